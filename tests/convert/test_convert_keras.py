"""Layers from and to Keras: its formulas in numpy, and the refusal of what cannot be converted.

`pytest -m peers` compares with Keras itself, most of it in `test_against_keras.py`.
"""

from __future__ import annotations

import math
import re
import sys
import types

import numpy as np
import pytest
from convert_cases import (
    KERAS,
    B,
    H,
    I,
    T,
    assert_same,
    from_keras,
    gru,
    keras,
    keras_bidirectional,
    lstm,
    rng,
    rnn,
    sigmoid,
    warned,
)

from blockcell import convert, formulas
from blockcell.activations import PARAMETERS
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Dense, Stack

GATES = {"recurrent_activation": "sigmoid"}  # which the arrays of an LSTM or a GRU do not tell


def keras_lstm(x, kernel, recurrent, bias, tanh=np.tanh, sigmoid=sigmoid):
    """Compute keras.layers.LSTM as its source does: gates i, f, c, o. `tanh` and `sigmoid` are its two activations."""
    h, c, ys = np.zeros((B, H)), np.zeros((B, H)), []
    for step in x:
        z = step @ kernel + h @ recurrent + bias
        z0, z1, z2, z3 = z[:, :H], z[:, H : 2 * H], z[:, 2 * H : 3 * H], z[:, 3 * H :]
        c = sigmoid(z1) * c + sigmoid(z0) * tanh(z2)
        h = sigmoid(z3) * tanh(c)
        ys.append(h)
    return np.stack(ys)


def keras_gru(x, kernel, recurrent, bias, tanh=np.tanh, sigmoid=sigmoid):
    """Compute keras.layers.GRU with reset_after=False: gates z, r, h."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        m = step @ kernel + bias
        z = sigmoid(m[:, :H] + h @ recurrent[:, :H])
        r = sigmoid(m[:, H : 2 * H] + h @ recurrent[:, H : 2 * H])
        h = z * h + (1 - z) * tanh(m[:, 2 * H :] + (r * h) @ recurrent[:, 2 * H :])
        ys.append(h)
    return np.stack(ys)


def keras_gru_reset_after(x, kernel, recurrent, bias, tanh=np.tanh, sigmoid=sigmoid):
    """Compute keras.layers.GRU with reset_after=True: gates z, r, h, and a bias for either product."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        x_z, x_r, x_h = np.split(step @ kernel + bias[0], 3, axis=-1)
        h_z, h_r, h_h = np.split(h @ recurrent + bias[1], 3, axis=-1)
        z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
        h = z * h + (1 - z) * tanh(x_h + r * h_h)
        ys.append(h)
    return np.stack(ys)


def keras_simple_rnn(x, kernel, recurrent, bias, tanh=np.tanh, sigmoid=None):
    """Compute keras.layers.SimpleRNN."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        h = tanh(step @ kernel + bias + h @ recurrent)
        ys.append(h)
    return np.stack(ys)


FORMULAS = {  # with the shape of the bias
    "LSTM": (keras_lstm, (4 * H,)),
    "GRU": (keras_gru, (3 * H,)),
    "GRU reset_after": (keras_gru_reset_after, (2, 3 * H)),
    "SimpleRNN": (keras_simple_rnn, (H,)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_keras_formulas(name):
    g = rng()
    x = g.standard_normal((T, B, I))
    formula, bias = FORMULAS[name]
    weights = [[g.uniform(-1, 1, shape) for shape in ((I, bias[-1]), (H, bias[-1]), bias)] for _ in "fb"]
    kind, reset_after = name.split()[0], len(bias) == 2
    fw, bw = (keras(kind, w, reset_after=reset_after, go_backwards=k == 1) for k, w in enumerate(weights))
    last = from_keras(bw)(x)[0][0]  # what Keras returns
    np.testing.assert_allclose(last, formula(x[::-1], *weights[1])[-1], rtol=0, atol=1e-14)
    expected = formula(x, *weights[0])
    np.testing.assert_allclose(from_keras(fw)(x)[0], expected, rtol=0, atol=1e-14)
    both = np.concatenate([expected, formula(x[::-1], *weights[1])[::-1]], axis=-1)
    np.testing.assert_allclose(from_keras(keras_bidirectional(fw, bw))(x)[0], both, rtol=0, atol=1e-14)
    gates = {} if kind == "SimpleRNN" else GATES
    assert_same(from_keras(weights[0] + weights[1], **gates), from_keras(keras_bidirectional(fw, bw)))
    # The refusal of go_backwards advises this.
    np.testing.assert_allclose(
        from_keras(bw.get_weights(), **gates)(x[::-1])[0], formula(x[::-1], *weights[1]), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("gate_order", ["icfo", "ifco"])
def test_to_keras(gate_order):
    g = rng()
    layer = lstm(g, forget_bias=0.75, cell_clip=-1, gate_order=gate_order)
    x = g.standard_normal((T, B, I))
    np.testing.assert_allclose(keras_lstm(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    layer = gru(g)
    np.testing.assert_allclose(keras_gru(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    layer = rnn(g)
    np.testing.assert_allclose(keras_simple_rnn(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    layer = gru(g, reset_after=True)
    np.testing.assert_allclose(keras_gru_reset_after(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    stack = Stack([Bidirectional(lstm(g), lstm(g)), gru(g, inputs=2 * H), gru(g, inputs=H, reset_after=True)])
    weights = convert.to_keras(stack)
    assert [len(part) for part in weights] == [6, 3, 3]
    assert_same(from_keras(weights, **GATES), stack)


# -------------------------------------------------------------------------------------------------------- activations
HARD = (("hard_sigmoid", 0.2, 0.5), lambda z: np.clip(0.2 * z + 0.5, 0, 1))  # Keras 2's


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("activation", PARAMETERS)
def test_keras_activations(activation, name):
    """By the name that the config has, of a layer; of arrays, by the name that layers here have."""
    g = rng()
    formula, bias = FORMULAS[name]
    weights = [0.5 * g.uniform(-1, 1, shape) for shape in ((I, bias[-1]), (H, bias[-1]), bias)]
    kind, ours = name.split()[0], HARD[0] if activation == "hard_sigmoid" else activation
    options = {"reset_after": len(bias) == 2, "activation": activation, "recurrent_activation": "hard_sigmoid"}
    layer = from_keras(keras(kind, weights, **options))
    assert layer.activation == ours and (kind == "SimpleRNN" or layer.recurrent_activation == HARD[0])
    x = g.standard_normal((T, B, I))
    expected = formula(x, *weights, lambda z: formulas.activated(z, ours), HARD[1])
    np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-13, atol=1e-14)
    given = {"activation": ours} | ({} if kind == "SimpleRNN" else {"recurrent_activation": HARD[0]})
    assert_same(from_keras(weights, **given), layer)
    twice = from_keras([weights, [*convert.to_keras(Bidirectional(layer, layer))]][1], **given)
    assert_same(twice, Bidirectional(layer, layer))
    if "reset_after" not in name:
        np.testing.assert_array_equal(convert.to_keras(layer)[2], weights[2])


@pytest.mark.parametrize(
    ("version", "expected"), [("3.15.1", "hard_sigmoid"), ("2.15.0", HARD[0]), ("10.0", "hard_sigmoid")]
)
def test_keras_versions_of_hard_sigmoid(version, expected, monkeypatch):
    """keras's own is relu6(z + 3) / 6 since version 3; tf_keras and the one in TensorFlow stay as they were."""
    package, module = types.ModuleType("keras"), types.ModuleType("keras.stand_in")
    package.__version__ = version
    for each in (package, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    exec("def hard_sigmoid(z): ...", vars(module))
    layer = keras("LSTM", LSTM_ARRAYS, recurrent_activation="hard_sigmoid")
    assert from_keras(layer).recurrent_activation == HARD[0]
    layer.recurrent_activation = module.hard_sigmoid
    assert from_keras(layer).recurrent_activation == expected


def test_keras_layers_as_activations():
    layer = keras("SimpleRNN", arrays((I, H), (H, H), (H,)))
    layer.config["activation"] = {"class_name": "ReLU", "config": {"max_value": 6.0}}
    layer.activation = keras("ReLU")
    with pytest.raises(ConversionError, match=r"has activation={'class_name': 'ReLU'.* Keras's own tanh, sigmoid"):
        from_keras(layer)


def test_keras_activations_are_those_of_arrays_alone():
    with pytest.raises(ValueError, match="activation or recurrent_activation is given; expected arrays, as a layer"):
        from_keras(keras("LSTM", LSTM_ARRAYS), activation="relu")
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        from_keras(LSTM_ARRAYS, activation="gelu")
    plain = arrays((I, H), (H, H), (H,))
    with pytest.raises(ValueError, match="recurrent_activation is 'relu', and the arrays are of RNN; expected None"):
        from_keras(plain, recurrent_activation="relu")
    with pytest.raises(ValueError, match="activation is 'relu', and the arrays are of Dense; expected None, or the"):
        from_keras(plain[::2], activation="relu")
    both = from_keras([plain, arrays((H, 3 * H), (H, 3 * H), (3 * H,))], recurrent_activation="relu")
    assert both.layers[1].recurrent_activation == "relu"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRU reset_after"])
@pytest.mark.parametrize("form", ["one", "two directions", "a list in a list", "behind a layer"])
def test_keras_arrays_do_not_tell_the_gates(kind, form):
    """Keras 2.2's defaults gave other results than those of Keras 2.3: a warning says what to pass for each."""
    g, (formula, bias) = rng(), FORMULAS[kind]
    weights = [g.uniform(-1, 1, shape) for shape in ((I, bias[-1]), (H, bias[-1]), bias)]
    source = {
        "one": weights,
        "two directions": weights + weights,
        "a list in a list": [weights],
        "behind a layer": [keras("SimpleRNN", [g.uniform(-1, 1, shape) for shape in ((I, I), (I, I), (I,))]), weights],
    }[form]
    layer, text = warned(from_keras, source)
    assert text.startswith("from_keras: arrays do not tell recurrent_activation: here it is 'sigmoid'. Pass it: ")
    told = [eval(value) for value in re.findall(r"recurrent_activation=(\(.*?\)|\".*?\")", text)][::-1]
    assert told == [HARD[0], "sigmoid"]
    assert_same(from_keras(source, recurrent_activation=told[1]), layer)
    if form == "one":
        x = g.standard_normal((T, B, I))
        for given, function in ((told[0], HARD[1]), (told[1], sigmoid)):
            y, _ = from_keras(source, recurrent_activation=given)(x)
            np.testing.assert_allclose(y, formula(x, *weights, sigmoid=function), rtol=0, atol=1e-14)


def keras_rnn(cells, **config):
    """Make a stand-in for keras.layers.RNN, of a cell or, in a list, of several."""
    cell = cells
    if isinstance(cells, list):
        cell = keras("StackedRNNCells")
        cell.cells = cells
    layer = keras("RNN", **config)
    layer.cell = cell
    return layer


def keras_weights(kind, inputs):
    """Draw the arrays of a layer of Keras."""
    columns = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}[kind] * H
    shapes = (inputs, columns), (H, columns), (2, columns) if kind == "GRU" else (columns,)
    return [rng().uniform(-1, 1, shape) for shape in shapes]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_keras_rnn_of_a_cell(kind, backwards):
    """It is the layer that Keras itself makes of the cell."""
    weights, options = keras_weights(kind, I), {"activation": "relu", "recurrent_activation": "hard_sigmoid"}
    options |= {"reset_after": True} if kind == "GRU" else {}
    cell = keras(f"{kind}Cell", weights, **options)
    expected = from_keras(keras(kind, weights, go_backwards=backwards, **options))
    assert_same(from_keras(keras_rnn(cell, go_backwards=backwards)), expected)
    assert_same(from_keras(keras_rnn([cell], go_backwards=backwards)), expected)
    if not backwards:
        assert_same(from_keras(cell), expected)
        both = from_keras(keras_bidirectional(keras_rnn(cell), keras_rnn([cell], go_backwards=True)))
        assert_same(both, Bidirectional(expected, expected))


def test_keras_rnn_of_several_cells():
    """They stand one on the other, and the last one gives the output."""
    weights = {"LSTM": keras_weights("LSTM", I), "GRU": keras_weights("GRU", H)}
    cells = [keras("LSTMCell", weights["LSTM"]), keras("GRUCell", weights["GRU"], reset_after=True)]
    x = rng().standard_normal((T, B, I))
    y = keras_gru_reset_after(keras_lstm(x, *weights["LSTM"]), *weights["GRU"])
    np.testing.assert_allclose(from_keras(keras_rnn(cells))(x)[0], y, rtol=0, atol=1e-14)
    y = keras_gru_reset_after(keras_lstm(x[::-1], *weights["LSTM"]), *weights["GRU"])
    stack = from_keras(keras_rnn(cells, go_backwards=True))
    np.testing.assert_allclose(stack(x)[0][0], y[-1], rtol=0, atol=1e-14)
    with pytest.raises(
        ConversionError, match=r"Bidirectional 'a_layer' has .* an RNN of several cells in each direction"
    ):
        from_keras(keras_bidirectional(keras_rnn(cells), keras_rnn(cells, go_backwards=True)))
    with pytest.raises(ConversionError, match=r"go_backwards=True and return_sequences=True.*x\[::-1\]"):
        from_keras(keras_rnn(cells, go_backwards=True, return_sequences=True))
    with pytest.raises(ConversionError, match="SRUCell 'a_layer' is none of Keras's LSTM, GRU and SimpleRNN, nor a"):
        from_keras(keras_rnn([cells[0], keras("SRUCell")]))
    model = keras("Sequential")
    model.layers = [keras_rnn(keras("SRUCell"))]
    with pytest.raises(ValueError, match=r"expected a model with an LSTM, .*, found a_layer \(RNN of SRUCell\)"):
        from_keras(model)


# --------------------------------------------------------------------------------------------------------------- cuDNN
def cudnn_arrays(kernel, recurrent, bias):
    """Return the arrays of a CuDNNLSTM or CuDNNGRU from those of an LSTM or a GRU, number by number."""
    inputs, units = len(kernel), len(recurrent)
    kernel, recurrent = kernel.copy(), recurrent.copy()
    for gate in range(kernel.shape[1] // units):
        columns = slice(gate * units, (gate + 1) * units)
        numbers = kernel[:, columns].ravel(order="F")  # cuDNN's matrix [units, inputs], row by row
        kernel[:, columns] = numbers.reshape(inputs, units)
        recurrent[:, columns] = recurrent[:, columns].T
    if bias.ndim == 1:
        bias = np.stack([0.25 * bias, 0.75 * bias])
    return [kernel, recurrent, bias.ravel()]


@pytest.mark.parametrize("inputs", [I, H, 1])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_arrays_for_cudnn(kind, inputs):
    """The same layer as of plain arrays: cuDNN has one kind of GRU."""
    g = rng()
    columns = {"LSTM": 4, "GRU": 3}[kind] * H
    shapes = (inputs, columns), (H, columns), (2, columns) if kind == "GRU" else (columns,)
    # whole numbers, of which a quarter and three quarters add up to the whole
    keras_arrays = [np.round(g.uniform(-8, 8, shape)) for shape in shapes]
    expected = from_keras(keras_arrays, **GATES)
    assert_same(from_keras(cudnn_arrays(*keras_arrays), **GATES), expected)
    assert_same(from_keras(keras(f"CuDNN{kind}", cudnn_arrays(*keras_arrays))), expected)
    if inputs != H:
        both = from_keras(2 * cudnn_arrays(*keras_arrays), **GATES)
        assert_same(both, Bidirectional(expected, expected))
    with pytest.raises(ConversionError, match="CuDNNGRU, whose activations are tanh and sigmoid; recurrent_activation"):
        from_keras(cudnn_arrays(*keras_arrays), recurrent_activation="hard_sigmoid")
    if kind == "GRU":
        with pytest.raises(ValueError, match=r"bias has shape \(2, 12\); expected \(12,\)"):
            from_keras(cudnn_arrays(*keras_arrays), reset_after=False, **GATES)


# ------------------------------------------------------------------------------------------------------------ refusals
def arrays(*shapes, dtype=np.float32):
    """Make arrays of zeros."""
    return [np.zeros(shape, dtype) for shape in shapes]


LSTM_ARRAYS = arrays((I, 4 * H), (H, 4 * H), (4 * H,))
GRU_ARRAYS = arrays((I, 3 * H), (H, 3 * H), (3 * H,))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: GRU_ARRAYS[:2], "without a bias does not show whether it has reset_after=True"),
        (
            lambda: keras("LSTM", LSTM_ARRAYS, recurrent_activation="gelu"),
            "recurrent_activation='gelu'; expected one of Keras's own tanh, .* from_keras.layer.get_wei.*, recurrent",
        ),
        (
            lambda: keras("LSTM", LSTM_ARRAYS, go_backwards=True, return_sequences=True),
            r"go_backwards=True and return_sequences=True.*x\[::-1\]",
        ),
        (lambda: keras("SRU"), "the source is a SRU; expected Keras's LSTM, GRU, SimpleRNN, their cells"),
        (lambda: keras_bidirectional(keras("LSTM"), keras("LSTM"), "sum"), "merge_mode='sum'; only 'concat'"),
        (lambda: keras_bidirectional(keras("SRU"), keras("LSTM")), "none of Keras's LSTM, GRU and SimpleRNN"),
        (
            lambda: keras_bidirectional(keras("LSTM", LSTM_ARRAYS, go_backwards=True), keras("LSTM", LSTM_ARRAYS)),
            "a forward layer with go_backwards=True",
        ),
    ],
)
def test_keras_refused(source, message):
    with pytest.raises(ConversionError, match=f"^from_keras: .*{message}"):
        from_keras(source())


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("lstm", FileNotFoundError, "lstm"),
        ([], ValueError, "got arrays of shapes ; expected those of layers one behind the other"),
        (LSTM_ARRAYS[:1], ValueError, r"got arrays of shapes \(3, 16\); expected .* may be np.zeros"),
        (LSTM_ARRAYS + GRU_ARRAYS[:1], ValueError, r"\(3, 16\), \(4, 16\), \(16,\), \(3, 12\); expected those of"),
        (arrays((9, I)) + LSTM_ARRAYS, ValueError, r"got arrays of shapes \(9, 3\), .* leave the array out: weights"),
        (arrays((9, I)) + LSTM_ARRAYS[:2], ValueError, "recurrent_kernel has shape .3, 16.; expected .H, 4H."),
        (arrays((9, H)) + arrays((H, 4 * H), (H, 4 * H)), ValueError, r"kernel has shape \(9, 4\); expected \(I, 16\)"),
        (LSTM_ARRAYS + arrays((H, 5), (5, 5), (5,)), ValueError, "or a list of such a list for each layer"),
        (LSTM_ARRAYS + arrays((H,), (H,)), ValueError, r"\(4,\), \(4,\); expected those of"),
        (arrays((3, I, 8), (8,)) + LSTM_ARRAYS, ValueError, "Pass the model itself"),
        ([LSTM_ARRAYS, arrays((H, 2))], ValueError, r"got arrays of shapes \(4, 2\); "),
        (LSTM_ARRAYS + arrays((5, 2), (2,)), ValueError, "expected those of layers one behind the other"),
        (arrays((I, 6), (2, 6), (2, 6), (2, 6)), ValueError, "expected those of layers one behind the other"),
        (LSTM_ARRAYS + arrays((H, 2), (2,), dtype=float), TypeError, "1 has dtype float64; expected float32"),
        (arrays((I, 4 * H), (H, 4 * H), (4 * H + 1,)), ValueError, r"bias has shape \(17,\); expected \(16,\)"),
        (arrays((I, 4 * H + 4), (H, 4 * H), (4 * H,)), ValueError, r"kernel has shape \(3, 20\); expected \(I, 16\)"),
        (arrays((I, 8), (H, 2 * H), (8,)), ValueError, "recurrent_kernel has shape .4, 8.; expected .H, 4H."),
        (keras("LSTM"), ValueError, "has no weights yet"),
        (keras("GRU", GRU_ARRAYS), ValueError, r"bias has shape \(12,\); expected \(2, 12\)"),
        (keras("GRU", [*GRU_ARRAYS[:2], *arrays((2, 3 * H))], reset_after=False), ValueError, r"expected \(12,\)"),
        (arrays((I, 4 * H), (H, 4 * H), dtype=np.int64), TypeError, "kernel has dtype int64"),
        (
            [LSTM_ARRAYS[0].astype(float), *LSTM_ARRAYS[1:]],
            TypeError,
            "recurrent_kernel has dtype float32; expected float64",
        ),
    ],
)
def test_keras_errors(source, error, message):
    with pytest.raises(error, match=message):
        from_keras(source)


def test_keras_by_name_alone():
    """Classes and functions of other modules are refused, although they have the names of Keras's."""
    for name in ("activation", "recurrent_activation"):
        layer = keras("LSTM", LSTM_ARRAYS)
        from_keras(layer)
        own = {"activation": "tanh", "recurrent_activation": "sigmoid"}[name]
        for module in (__name__, KERAS.__name__, "nowhere", None):
            function = types.FunctionType((lambda x: x).__code__, {}, own)
            function.__module__ = module
            setattr(layer, name, function)
            with pytest.raises(
                ConversionError, match=f"has {name}='{own}' of {module}; expected one of Keras's own tanh"
            ):
                from_keras(layer)
    other = type("LSTM", (type(keras("LSTM")),), {"__module__": __name__})
    with pytest.raises(
        ConversionError, match=f"the source is a {__name__}.LSTM; expected Keras's LSTM.*its get_weights"
    ):
        from_keras(other(LSTM_ARRAYS))
    with pytest.raises(ConversionError, match="is none of Keras's LSTM, GRU and SimpleRNN"):
        from_keras(keras_bidirectional(keras("LSTM", LSTM_ARRAYS), other(LSTM_ARRAYS)))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("gates", [1, 3, 4])
def test_keras_two_layers_or_two_directions(gates, count):
    """If I = H, the arrays of both have the same shapes."""
    half = arrays((H, gates * H), (H, gates * H), (gates * H,))[:count]
    with pytest.raises(ValueError, match=r"in one way alone: .* With I = H, a Bidirectional has the shapes"):
        from_keras(half + half, reset_after=False)
    options = GATES if gates > 1 else {}
    assert isinstance(from_keras([half, half], reset_after=False, **options), Stack)
    kind = {1: "SimpleRNN", 3: "GRU", 4: "LSTM"}[gates]
    both = keras_bidirectional(*(keras(kind, half, reset_after=False) for _ in "fb"))
    assert isinstance(from_keras(both), Bidirectional)


TWO = arrays((H, 4 * H), (H, 4 * H), (4 * H,))
ALL = {  # layers, and whether they say so by their shapes alone
    "a stack": [LSTM_ARRAYS, TWO],
    "sizes after it": [TWO + TWO, arrays((2 * H, 2), (2,))],
    "sizes after two": [TWO, TWO, arrays((H, 2), (2,))],
    "both directions": [
        LSTM_ARRAYS + LSTM_ARRAYS,
        arrays((2 * H, 3 * H), (H, 3 * H), (2, 3 * H)),
        arrays((H, 2), (2,)),
    ],
    "without biases": [LSTM_ARRAYS[:2], arrays((H, 4 * I), (I, 4 * I)), arrays((I, 2), (2,))],
    "dense first": [arrays((9, I), (I,)), LSTM_ARRAYS, arrays((H, 2), (2,)), arrays((2, 2), (2,))],
    "dense without bias": [LSTM_ARRAYS, arrays((H, 5)), arrays((5, 2))],
    "two pairs": [
        LSTM_ARRAYS + LSTM_ARRAYS,
        [*arrays((2 * H, 4 * H), (H, 4 * H), (4 * H,))] * 2,
        arrays((2 * H, 1), (1,)),
    ],
}


@pytest.mark.parametrize("name", ALL)
def test_keras_weights_of_a_model(name):
    """One list of all arrays gives what a list for each layer gives; of a Dense, a warning says what is not known."""
    g = rng()
    lists = [[g.uniform(-1, 1, array.shape).astype(np.float32) for array in part] for part in ALL[name]]
    whole = [array for part in lists for array in part]
    expected = []
    for part in lists:
        if len(part) == 1 or (len(part) == 2 and part[1].ndim == 1):
            expected.append(Dense(part[0], part[1] if part[1:] else np.zeros(part[0].shape[1], np.float32)))
        else:
            half = len(part) // 2
            cells = [part] if len(part) < 6 else [part[:half], part[half:]]
            cells = [from_keras(each, **GATES) for each in cells]
            expected.append(Bidirectional(*cells) if cells[1:] else cells[0])
    for source in (whole, lists) if name not in ("sizes after it", "dense without bias") else (whole,):
        if any(isinstance(layer, Dense) for layer in expected):
            layer, text = warned(from_keras, source, **GATES)
            assert text.startswith("from_keras: arrays do not tell a Dense's activation, nor what return_sequences")
            scope = {"stack": layer, "Stack": Stack, "Dense": Dense}
            mended = eval(text.split("make the Dense anew: ")[1], scope).layers[-1]
            assert (mended.activation, mended.last) == ("softmax", True)
            np.testing.assert_array_equal(mended.weights["w"], expected[-1].weights["w"])
        else:
            layer = from_keras(source, **GATES)
        assert_same(layer, Stack(expected))


def test_keras_dense_arrays():
    """Alone; and what to_keras makes of a stack is read again."""
    g = rng()
    dense = Dense(g.uniform(-1, 1, (I, 2)), g.uniform(-1, 1, 2))
    layer, _ = warned(from_keras, convert.to_keras(dense))
    assert_same(layer, dense)
    stack = Stack([dense, lstm(g, inputs=2), gru(g, inputs=H)])
    assert_same(warned(from_keras, convert.to_keras(stack), **GATES)[0], stack)


def test_keras_two_directions_or_two_layers_among_others():
    half = arrays((H, 4 * H), (H, 4 * H), (4 * H,))
    with pytest.raises(ValueError, match="With I = H, a Bidirectional has the shapes of two layers"):
        from_keras(arrays((I, 4 * H), (H, 4 * H), (4 * H,)) + half + half)


def test_a_clip_at_infinity_is_none():
    layer = lstm(rng(), cell_clip=math.inf)
    np.testing.assert_array_equal(convert.to_keras(layer)[0], convert.to_keras(lstm(rng()))[0])


# -------------------------------------------------------------------------------------------------------- Keras itself
@pytest.mark.peers
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("form", ["plain", "stack", "bidirectional", "sequences"])
def test_keras_weights_of_a_model_itself(kind, form):
    """model.get_weights() and the two things that it does not tell give what the model gives."""
    keras = pytest.importorskip("keras")
    make = getattr(keras.layers, kind)
    recurrent = {
        "plain": [make(H)],
        "stack": [make(H, return_sequences=True), make(6)],
        "bidirectional": [keras.layers.Bidirectional(make(H, return_sequences=True)), make(6)],
        "sequences": [make(H, return_sequences=True)],
    }[form]
    dense = [keras.layers.Dense(7), keras.layers.Dense(2, activation="softmax")]
    model = keras.Sequential([keras.Input((T, I)), *recurrent, *dense])
    g = rng()
    model.set_weights([g.uniform(-1, 1, array.shape).astype(np.float32) for array in model.get_weights()])
    x = g.standard_normal((B, T, I)).astype(np.float32)
    stack, _ = warned(from_keras, model.get_weights(), **GATES)
    head = Dense(**stack.layers[-1].weights, activation="softmax", last=form != "sequences")
    stack = Stack([*stack.layers[:-1], head])
    expected = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(stack(x, batch_first=True)[0], expected, rtol=0, atol=1e-6)
    assert_same(stack, from_keras(model))


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("form", ["one dense", "two dense", "bidirectional"])
def test_keras_classifiers_of_rows_without_steps(kind, form):
    """All of their steps are masked: Keras' dense layers get zeros."""
    keras = pytest.importorskip("keras")
    layer = getattr(keras.layers, kind)(H)
    recurrent = keras.layers.Bidirectional(layer) if form == "bidirectional" else layer
    dense = [keras.layers.Dense(7, activation="relu")] * (form == "two dense")
    dense.append(keras.layers.Dense(2, activation="softmax"))
    model = keras.Sequential([keras.Input((T, I)), keras.layers.Masking(0.0), recurrent, *dense])
    g = rng()
    model.set_weights([g.uniform(-1, 1, array.shape).astype(np.float32) for array in model.get_weights()])
    x = g.standard_normal((B, T, I)).astype(np.float32)
    x[0], x[1, :2] = 0, 0
    stack, _ = warned(from_keras, model)
    y, _ = stack(x, mask=x.any(axis=2), batch_first=True)
    np.testing.assert_allclose(y, keras.ops.convert_to_numpy(model(x)), rtol=0, atol=1e-6)
