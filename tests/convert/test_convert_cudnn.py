"""cuDNN's flat buffer, written number by number, beside the equations of its cells and beside PyTorch's weights."""

from __future__ import annotations

import numpy as np
import pytest
from convert_cases import B, H, I, T, assert_same, from_torch, rng, sigmoid

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional

GATES = {"LSTM": "ifco", "GRU": "rzn", "RNN": "h"}  # in cuDNN's order


def random_cell(g, kind, inputs, hidden=H):
    """Draw the matrices and biases of each gate, by name: W for the input, R for the state."""
    shapes = {"W": (hidden, inputs), "R": (hidden, hidden), "bW": (hidden,), "bR": (hidden,)}
    return {f"{role}{gate}": g.uniform(-1, 1, shape) for gate in GATES[kind] for role, shape in shapes.items()}


def flatten_cells(kind, cells):
    """Join all matrices of all cells, the input's before the state's, and then all biases in the same order."""
    roles = [("W", "R"), ("bW", "bR")]
    return np.concatenate(
        [cell[role + gate].ravel() for pair in roles for cell in cells for role in pair for gate in GATES[kind]]
    )


def cudnn_y(kind, cell, x, activation=np.tanh):
    """Compute y [T,B,H] by cuDNN's equations."""
    h = c = np.zeros((x.shape[1], len(next(iter(cell.values())))))
    ys = []
    for step in x:
        z = {gate: step @ cell[f"W{gate}"].T + cell[f"bW{gate}"] for gate in GATES[kind]}
        s = {gate: h @ cell[f"R{gate}"].T + cell[f"bR{gate}"] for gate in GATES[kind]}
        if kind == "LSTM":
            i, f, o = (sigmoid(z[gate] + s[gate]) for gate in "ifo")
            c = f * c + i * np.tanh(z["c"] + s["c"])
            h = o * np.tanh(c)
        elif kind == "GRU":
            r, u = (sigmoid(z[gate] + s[gate]) for gate in "rz")
            h = (1 - u) * np.tanh(z["n"] + r * s["n"]) + u * h
        else:
            h = activation(z["h"] + s["h"])
        ys.append(h)
    return np.stack(ys)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", GATES)
def test_equations(kind, layers, directions):
    g = rng()
    cells = [random_cell(g, kind, directions * H if k else I) for k in range(layers) for _ in range(directions)]
    layer = convert.from_cudnn(flatten_cells(kind, cells), kind, input_size=I, layers=layers, directions=directions)
    y = x = g.standard_normal((T, B, I))
    for k in range(0, len(cells), directions):
        halves = [cudnn_y(kind, cells[k], y)]
        halves += [cudnn_y(kind, cell, y[::-1])[::-1] for cell in cells[k + 1 : k + directions]]
        y = np.concatenate(halves, axis=-1)
    np.testing.assert_allclose(layer(x)[0], y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", GATES)
def test_beside_pytorch(kind):
    """Its weights have the same order."""
    g = rng()
    cells = [random_cell(g, kind, I) for _ in "fb"]
    names = {"weight_ih": "W", "weight_hh": "R", "bias_ih": "bW", "bias_hh": "bR"}
    state_dict = {
        f"{name}_l0{suffix}": np.concatenate([cell[role + gate] for gate in GATES[kind]]).astype(np.float32)
        for cell, suffix in zip(cells, ("", "_reverse"), strict=True)
        for name, role in names.items()
    }
    buffer = flatten_cells(kind, cells).astype(np.float32)
    layer = convert.from_cudnn(buffer, kind, input_size=I, directions=2)
    assert isinstance(layer, Bidirectional)
    options = {"nonlinearity": "tanh"} if kind == "RNN" else {}
    assert_same(layer, from_torch(state_dict, **options))


def test_relu():
    cell, x = random_cell(rng(), "RNN", I), rng().standard_normal((T, B, I))
    layer = convert.from_cudnn(flatten_cells("RNN", [cell]), "RNN", input_size=I, activation="relu")
    np.testing.assert_allclose(layer(x)[0], cudnn_y("RNN", cell, x, lambda z: np.maximum(z, 0)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", GATES)
def test_every_size(kind):
    """The number of cells is found for all small sizes, and one number more or less is refused."""
    for hidden in range(1, 6):
        for inputs in range(4):
            for layers, directions in ((1, 1), (2, 1), (1, 2), (3, 2)):
                cells = [
                    {"W": hidden * (directions * hidden if k else inputs), "R": hidden * hidden, "b": 2 * hidden}
                    for k in range(layers)
                ]
                size = directions * len(GATES[kind]) * sum(sum(cell.values()) for cell in cells)
                options = {"input_size": inputs, "layers": layers, "directions": directions}
                layer = convert.from_cudnn(np.zeros(size), kind, **options)
                assert layer.output_size == directions * hidden and layer.input_size == inputs
                for other in (size - 1, size + 1):
                    with pytest.raises(ValueError, match=f"the buffer has {other} numbers, and no hidden_size gives"):
                        convert.from_cudnn(np.zeros(other), kind, **options)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"kind": "lstm"}, ValueError, "kind is 'lstm'; expected one of LSTM, GRU, RNN"),
        ({"input_size": -1}, ValueError, "input_size is -1; expected a whole number from 0 up"),
        ({"layers": 0}, ValueError, "layers is 0; expected a whole number from 1 up"),
        ({"directions": 3}, ValueError, "directions is 3; expected 1 or 2"),
        ({"layers": True}, ValueError, "layers is True"),
        ({"activation": "relu"}, ConversionError, "activation is 'relu'; cuDNN's LSTM has tanh"),
        ({"buffer": np.zeros(4 * 3 * 7, np.int8)}, TypeError, "buffer has dtype int8"),
        ({"buffer": np.zeros(0)}, ValueError, "the buffer has 0 numbers"),
        ({"input_size": 3}, ValueError, "has 84 numbers, .*'LSTM', input_size=3.*: 2 gives 56, 3 gives 96"),
    ],
)
def test_refused(changed, error, message):
    options = {"buffer": np.zeros(4 * 3 * (2 + 3 + 2)), "kind": "LSTM", "input_size": 2} | changed
    with pytest.raises(error, match=f"^from_cudnn: .*{message}"):
        convert.from_cudnn(options.pop("buffer"), options.pop("kind"), **options)


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_buffers_of_tensorflow(kind):
    """As Keras 2 makes them of its weights for TensorFlow's op."""
    tf = pytest.importorskip("tensorflow")
    utils = pytest.importorskip("tf_keras.src.layers.rnn.gru_lstm_utils")
    g, gates = rng(), len(GATES[kind])
    kernel, recurrent, bias = (
        g.standard_normal(shape).astype(np.float32) for shape in ((I, gates * H), (H, gates * H), (2, gates * H))
    )
    order = [0, 1, 2, 3] if kind == "LSTM" else [1, 0, 2]  # Keras has z, r, h
    parts = [[tf.split(array, gates, axis=-1)[k] for k in order] for array in (kernel, recurrent, bias[0], bias[1])]
    buffer = utils.canonical_to_params(parts[0] + parts[1], parts[2] + parts[3], tf.constant([-1]), True)
    arrays = [kernel, recurrent, bias if kind == "GRU" else bias.sum(axis=0)]
    expected = convert.from_keras(arrays, recurrent_activation="sigmoid", check=False)
    assert_same(convert.from_cudnn(buffer.numpy(), kind, input_size=I), expected)
