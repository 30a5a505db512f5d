"""Round trips by way of every package, the order of gates, and what neither Keras nor PyTorch can express.

Each source has a file of its own: `test_convert_keras.py`, `test_convert_torch.py`, `test_convert_onnx.py` and
`test_convert_tf1.py`.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
from convert_cases import B, H, I, T, assert_same, from_keras, from_torch, gru, lstm, rng, rnn
from hypothesis import given, settings
from hypothesis import strategies as st

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.convert.shared import cells_of
from blockcell.gates import ORDERS, reorder
from blockcell.layers import GRU, LSTM, RNN, Bidirectional, Stack


@st.composite
def random_layers(draw):
    """Draw an LSTM, a GRU or an RNN, in one or two directions, one or two upon each other, perhaps without a bias."""
    g = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float64, np.float32, np.float16]))
    kind = draw(st.sampled_from([rnn, lstm, gru, functools.partial(gru, reset_after=True)]))
    sizes = st.lists(st.integers(1, 8), min_size=2, max_size=2, unique=True)
    inputs, hidden = draw(sizes)  # with I = H, Keras' arrays may be those of two layers
    directions, bias = draw(st.integers(1, 2)), draw(st.booleans())
    layers = []
    for size in [inputs, directions * hidden][: draw(st.integers(1, 2))]:
        cells = [kind(g, dtype, inputs=size, hidden=hidden) for _ in range(directions)]
        for cell in cells:
            changed = {} if bias else {name: 0 * w for name, w in cell.weights.items() if w.ndim == 1}
            cell.set_weights(**changed)
        layers.append(Bidirectional(*cells) if directions == 2 else cells[0])
    return Stack(layers) if len(layers) > 1 else layers[0]


@settings(max_examples=60, deadline=None)
@given(layer=random_layers())
def test_round_trips(layer):
    """Bit for bit, by way of every package that can express the layer."""
    arrays = convert.to_keras(layer)
    cells = [cell for part in getattr(layer, "layers", [layer]) for cell in cells_of("test", part)]
    gates = {} if isinstance(cells[0], RNN) else {"recurrent_activation": "sigmoid"}
    assert_same(from_keras(arrays, **gates), layer)
    if not any(isinstance(cell, GRU) and not cell.reset_after for cell in cells):
        options = {"nonlinearity": "tanh"} if isinstance(cells[0], RNN) else {}
        arrays = convert.to_torch(layer, prefix="a.b.")
        assert_same(from_torch(arrays, **options), layer)
        summed = slice(2 * cells[0].hidden_size) if isinstance(cells[0], GRU) else slice(None)
        assert not any(array[summed].any() for name, array in arrays.items() if "bias_hh" in name)
    for part in getattr(layer, "layers", [layer]):
        assert_same(convert.from_onnx(*convert.to_onnx(part, name="n")), part)


def test_reorder():
    gates = np.repeat(np.array([10, 20, 30, 40]), 2) + np.tile([1, 2], 4)
    for axis, values in ((0, gates), (-1, gates[None]), (0, gates[:, None])):
        wanted = np.array([11, 12, 31, 32, 41, 42, 21, 22]).reshape(values.shape)  # c, the second, becomes the last
        np.testing.assert_array_equal(reorder(values, "icfo", "ifoc", axis), wanted)


def test_orders_are_permutations():
    for name, order in ORDERS.items():
        letters = {"peepholes": "ifo", "GRU": "cru", "RNN": "c", "LSTM": "cfo" if "coupled" in name else "cfio"}
        letters = letters[name.split()[-1]]
        assert sorted(order) == sorted(letters), name


CELLS = {LSTM: lstm, GRU: gru, RNN: rnn}
UNUSUAL = {  # for each argument of a layer that is not in all of them: options with which a cell has it
    "wci": {"peephole": True},
    "wcf": {"peephole": True, "coupled": True},
    "wco": {"peephole": True},
    "w_p": {"projection": 2},
    "forget_bias": {"forget_bias": 0.75},
    "cell_clip": {"cell_clip": 0.25},
    "proj_clip": {"projection": 2, "proj_clip": 0.125},
    "coupled": {"coupled": True},
    "gate_order": {"gate_order": "ifco"},
    "activation": {"activation": "relu"},
    "recurrent_activation": {"recurrent_activation": "hard_sigmoid"},
    "reset_after": {"reset_after": True},
    "b_hc": {"reset_after": True},
    "reverse": {"reverse": True},
}
TARGETS = {  # back and forth; what a target does not tell is given
    "Keras": (convert.to_keras, from_keras, ("activation", "recurrent_activation")),
    "PyTorch": (convert.to_torch, from_torch, ("activation",)),
    "ONNX": (lambda cell: convert.to_onnx(cell), lambda found, **options: convert.from_onnx(*found, **options), ()),
}
REFUSED = {
    "Keras": {"wci", "wcf", "wco", "w_p", "cell_clip", "proj_clip", "coupled", "reverse"},
    "PyTorch": {"wci", "wcf", "wco", "cell_clip", "proj_clip", "coupled", "reverse", "recurrent_activation"},
    "ONNX": {"w_p", "cell_clip", "proj_clip"},
}


def arguments_of():
    """Yield each keyword argument of each cell."""
    for cell in CELLS:
        for name, parameter in inspect.signature(cell).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                yield cell, name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("cell", "name"), [*arguments_of()], ids=lambda value: getattr(value, "__name__", value))
def test_every_argument_is_converted_or_refused(cell, name, target):
    """Nothing that a layer has is dropped: either what comes back has the same results, or there is an error."""
    g = rng()
    layer = CELLS[cell](g, np.float32, **UNUSUAL[name])
    assert name in layer.weights or layer._arguments()[name] != inspect.signature(cell).parameters[name].default
    there, back, argument_names = TARGETS[target]
    refused = name in REFUSED[target] or (target == "PyTorch" and name == "activation" and cell is not RNN)
    if refused or (target == "PyTorch" and cell is GRU and not layer.reset_after):
        with pytest.raises(ConversionError, match=f"^to_{'torch' if target == 'PyTorch' else target.lower()}: "):
            there(layer)
        return
    arguments = {key: layer._arguments()[key] for key in argument_names if key in layer._arguments()}
    if target == "PyTorch":
        arguments = {"nonlinearity": arguments["activation"]} if cell is RNN else {}
    again = back(there(layer), **arguments)
    x = g.standard_normal((T, B, I)).astype(np.float32)
    np.testing.assert_allclose(again(x)[0], layer(x)[0], rtol=0, atol=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("function", [convert.to_keras, convert.to_torch, convert.to_onnx])
def test_what_is_not_known_is_refused(function, monkeypatch):
    """A weight or an attribute of a later version."""
    cell = lstm(rng())
    arguments = cell._arguments()
    for name, value, message in (
        ("w_new", np.ones(H), "the LSTM has the weights w_new, .* has no such thing"),
        ("slope", 0.5, "the LSTM has slope=0.5, .* has no such thing"),
    ):
        monkeypatch.setattr(LSTM, "_arguments", lambda self, more={name: value}: arguments | more)
        with pytest.raises(ConversionError, match=message):
            function(cell)


@pytest.mark.parametrize("function", [convert.to_keras, convert.to_torch])
def test_extras_refused(function):
    with pytest.raises(ConversionError, match=r"has the weights wci, .* has no such thing; an ONNX node has peepholes"):
        function(lstm(rng(), peephole=True))
    with pytest.raises(ConversionError, match=r"cell_clip=3.0, .*; if the limit is never reached, make the layer anew"):
        function(Stack([lstm(rng(), cell_clip=3.0)]))
    for layer in ({}, Bidirectional(Stack([lstm(rng())]), lstm(rng()))):
        with pytest.raises(TypeError, match=r"the layer is of type (dict|Stack); expected a blockcell"):
            function(layer)
