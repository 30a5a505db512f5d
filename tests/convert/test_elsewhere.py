"""The recipes of docs/elsewhere.md, run on files of their form, and that a wrong file does not pass."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from convert_cases import B, H, I, T, assert_same, from_torch, rng, torch_weights
from keras_forms import drawn

from blockcell import convert
from blockcell.layers import LSTM, Dense, Stack

PAGE = (Path(__file__).parents[2] / "docs" / "elsewhere.md").read_text()


def recipe(name):
    """Return a function of the page."""
    block = next(
        block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if name in block
    )
    scope = {}
    exec(block, scope)
    return scope[name]


def write_json(path, document):
    """Write a document as JSON; return the path."""
    path.write_text(json.dumps(document, default=np.ndarray.tolist))
    return path


def sigmoid(z):
    """Compute the logistic function."""
    return 1 / (1 + np.exp(-z))


def nam_document(layers=2, hidden=H):
    """Make a .nam, and a function that computes what it does with x [T], number by number."""
    g = rng()
    numbers, cells = [], []
    for k in range(layers):
        matrix, bias = g.uniform(-1, 1, (4 * hidden, (hidden if k else 1) + hidden)), g.uniform(-1, 1, 4 * hidden)
        h, c = g.uniform(-1, 1, (2, hidden))
        cells.append((matrix, bias, h, c))
        numbers += [matrix.ravel(), bias, h, c]
    head, offset = g.uniform(-1, 1, hidden), g.uniform(-1, 1, 1)
    config = {"input_size": 1, "hidden_size": hidden, "num_layers": layers}
    weights = np.concatenate([*numbers, head, offset])
    document = {"version": "0.5.0", "architecture": "LSTM", "config": config, "weights": weights, "sample_rate": 48000}

    def play(x):
        states = [(h, c) for _, _, h, c in cells]
        y = []
        for sample in x:
            z = np.array([sample])
            for k, (matrix, bias, _, _) in enumerate(cells):
                h, c = states[k]
                i, f, o, candidate = (matrix @ np.concatenate([z, h]) + bias).reshape(4, hidden)[[0, 1, 3, 2]]
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(candidate)
                z = sigmoid(o) * np.tanh(c)
                states[k] = z, c
            y.append(head @ z + offset[0])
        return np.array(y)

    return document, play


@pytest.mark.parametrize("layers", [1, 2])
def test_nam(layers, tmp_path):
    document, play = nam_document(layers)
    network, first = recipe("read_nam")(write_json(tmp_path / "amp.nam", document))
    x = rng().standard_normal(20)
    y, _ = network(x.astype(np.float32)[:, None, None], state=first)
    np.testing.assert_allclose(y[:, 0, 0], play(x), rtol=0, atol=2e-6)
    stream = network.stream()
    stream.set_state([0], first)
    np.testing.assert_array_equal(stream.run(x.astype(np.float32)[:, None, None]), y)
    assert np.abs(network(x.astype(np.float32)[:, None, None])[0][:3, 0, 0] - play(x)[:3]).max() > 1e-3  # from zeros
    for changed in ({"weights": [*document["weights"], 0.0]}, {"weights": document["weights"][1:]}):
        with pytest.raises((AssertionError, ValueError)):
            recipe("read_nam")(write_json(tmp_path / "amp.nam", document | changed))
    with pytest.raises(AssertionError, match="WaveNet"):
        recipe("read_nam")(write_json(tmp_path / "amp.nam", document | {"architecture": "WaveNet"}))


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("skip", [0, 1])
def test_guitarml(gates, skip, tmp_path):
    g = rng()
    rec = torch_weights(inputs=1, gates=gates, dtype=np.float32)
    lin = {"lin.weight": g.uniform(-1, 1, (1, H)), "lin.bias": g.uniform(-1, 1, 1)}
    about = {"model": "SimpleRNN", "input_size": 1, "skip": skip, "unit_type": {3: "GRU", 4: "LSTM"}[gates]}
    state_dict = {f"rec.{name}": array for name, array in rec.items()} | lin
    document = {"model_data": about, "state_dict": state_dict}
    network, skip_of_file = recipe("read_guitarml")(write_json(tmp_path / "model.json", document))
    assert skip_of_file == skip
    head = Dense(lin["lin.weight"].T.astype(np.float32), lin["lin.bias"].astype(np.float32))
    assert_same(network, Stack([from_torch(rec), head]))
    document["state_dict"]["lin.extra"] = np.zeros(2)
    with pytest.raises(AssertionError):
        recipe("read_guitarml")(write_json(tmp_path / "model.json", document))
    document["state_dict"] = state_dict | {"rec.weight_ih_l1": np.zeros((3, 3))}
    with pytest.raises(ValueError, match="l1"):
        recipe("read_guitarml")(write_json(tmp_path / "model.json", document))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_rtneural(kind, tmp_path):
    g = rng()
    cell, dense = drawn(g, kind, 1, H, reset_after=kind == "GRU"), drawn(g, "Dense", H, 2)
    last = drawn(g, "Dense", 2, 1)
    parts = [(kind.lower(), "", cell), ("time-distributed-dense", "tanh", dense), ("dense", "", last)]
    document = {
        "in_shape": [None, None, 1],
        "in_skip": 1,
        "layers": [
            {"type": name, "activation": activation, "shape": [None, None, len(arrays[-1].T)], "weights": arrays}
            for name, activation, arrays in parts
        ],
    }
    document["layers"][0]["shape"][-1] = H
    network, skip = recipe("read_rtneural")(write_json(tmp_path / "model.json", document))
    assert skip == 1
    layer = convert.from_keras(cell, recurrent_activation="sigmoid", check=False)
    assert_same(network, Stack([layer, Dense(*dense, "tanh"), Dense(*last)]))
    document["layers"][0]["type"] = "conv1d"
    with pytest.raises(ValueError, match="a layer of type conv1d"):
        recipe("read_rtneural")(write_json(tmp_path / "model.json", document))
    document["layers"] = document["layers"][1:]
    document["layers"][0]["shape"][-1] = 3
    with pytest.raises(AssertionError):
        recipe("read_rtneural")(write_json(tmp_path / "model.json", document))


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("peephole", [False, True])
def test_tflite(coupled, projected, peephole):
    """Beside an LSTM whose weights are put together gate by gate."""
    g, outputs = rng(), 2 if projected else H
    tensors = [None] * 24
    tensors[0], tensors[18], tensors[19] = np.zeros((T, B, I)), np.zeros((B, outputs)), np.zeros((B, H))
    gates = {"i": 0, "f": 1, "c": 2, "o": 3}
    if coupled:
        del gates["i"]
    for gate in gates.values():
        tensors[1 + gate], tensors[5 + gate] = g.uniform(-1, 1, (H, I)), g.uniform(-1, 1, (H, outputs))
        tensors[12 + gate] = g.uniform(-1, 1, H)
    names = {"wci": 9, "wcf": 10, "wco": 11} if not coupled else {"wcf": 10, "wco": 11}
    for place in names.values() if peephole else ():
        tensors[place] = g.uniform(-1, 1, H)
    if projected:
        tensors[16] = g.uniform(-1, 1, (2, H))
    order = "cfo" if coupled else "icfo"  # blockcell's
    kernel, recurrent, bias = (np.concatenate([tensors[k + gates[gate]] for gate in order]) for k in (1, 5, 12))
    weights = {name: tensors[place] for name, place in names.items()} if peephole else {}
    weights |= {"w_p": tensors[16].T} if projected else {}
    expected = LSTM(np.concatenate([kernel.T, recurrent.T]), bias, coupled=coupled, cell_clip=2.5, **weights)
    layer = recipe("lstm_of_tflite")(tensors, cell_clip=2.5)
    x = g.standard_normal((T, B, I))
    np.testing.assert_allclose(layer(x)[0], expected(x)[0], rtol=0, atol=1e-14)
    tensors[20] = np.ones(H)  # layer normalization
    with pytest.raises(AssertionError):
        recipe("lstm_of_tflite")(tensors)


@pytest.mark.peers
def test_tflite_itself():
    """A Keras LSTM, converted to TensorFlow Lite: the tensors that its interpreter gives."""
    tf = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("tf_keras")
    model = keras.Sequential([keras.Input((T, I), batch_size=1), keras.layers.LSTM(H, return_sequences=True)])
    g = rng()
    model.set_weights([g.uniform(-1, 1, array.shape).astype(np.float32) for array in model.get_weights()])
    content = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an interpreter that is to move to another package
        interpreter = tf.lite.Interpreter(model_content=content)
    interpreter.allocate_tensors()
    op = next(op for op in interpreter._get_ops_details() if op["op_name"] == "UNIDIRECTIONAL_SEQUENCE_LSTM")
    tensors = [None if k < 0 else interpreter.get_tensor(k) for k in op["inputs"]]
    layer = recipe("lstm_of_tflite")(tensors)
    x = g.standard_normal((1, T, I)).astype(np.float32)
    y, _ = layer(x, batch_first=True)
    np.testing.assert_allclose(y, np.asarray(model(x)), rtol=0, atol=1e-6)
