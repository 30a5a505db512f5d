"""Round trips by way of every package, the order of gates, and what neither Keras nor PyTorch can express.

Each source has a file of its own: `test_convert_keras.py`, `test_convert_torch.py`, `test_convert_onnx.py` and
`test_convert_tf1.py`.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from convert_cases import SEED, assert_same, gru, lstm, rng

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.convert.shared import ORDERS, cells_of, reorder
from blockcell.layers import LSTM, Bidirectional, Stack


def random_layer(g):
    """An LSTM or a GRU of either kind, in one or two directions, one or two upon each other, perhaps without a bias."""
    dtype = g.choice([np.float16, np.float32, np.float64])
    kind = [lstm, gru, functools.partial(gru, reset_after=True)][g.integers(3)]
    inputs, hidden = g.permutation(np.arange(1, 9))[:2]  # with I = H, Keras' arrays may be those of two layers
    directions, bias = g.integers(1, 3), g.random() < 0.7
    layers = []
    for size in [inputs, directions * hidden][: g.integers(1, 3)]:
        cells = [kind(g, dtype, inputs=size, hidden=hidden) for _ in range(directions)]
        for cell in cells:
            changed = {} if bias else {name: 0 * w for name, w in cell.weights.items() if w.ndim == 1}
            cell.set_weights(**changed)
        layers.append(Bidirectional(*cells) if directions == 2 else cells[0])
    return Stack(layers) if len(layers) > 1 else layers[0]


@pytest.mark.parametrize("seed", range(60))
def test_round_trips(seed):
    """Bit for bit, by way of every package that can express the layer."""
    g = np.random.default_rng([SEED, seed])
    layer = random_layer(g)
    print(f"seed {SEED}, {layer!r}")
    assert_same(convert.from_keras(convert.to_keras(layer)), layer)
    cells = [cell for part in getattr(layer, "layers", [layer]) for cell in cells_of("test", part)]
    if all(isinstance(cell, LSTM) or cell.reset_after for cell in cells):
        assert_same(convert.from_torch(convert.to_torch(layer, prefix="a.b.")), layer)
    for part in getattr(layer, "layers", [layer]):
        assert_same(convert.from_onnx(*convert.to_onnx(part, name="n")), part)


def test_reorder():
    given = np.repeat(np.array([10, 20, 30, 40]), 2) + np.tile([1, 2], 4)
    for axis, values in ((0, given), (-1, given[None]), (0, given[:, None])):
        wanted = np.array([11, 12, 31, 32, 41, 42, 21, 22]).reshape(values.shape)  # c, the second, becomes the last
        np.testing.assert_array_equal(reorder(values, "icfo", "ifoc", axis), wanted)


def test_orders_are_permutations():
    for name, order in ORDERS.items():
        letters = "ifo" if "peepholes" in name else "cru" if "GRU" in name else "cfio"
        assert sorted(order) == sorted(letters), name


@pytest.mark.parametrize("function", [convert.to_keras, convert.to_torch])
def test_extras_refused(function):
    with pytest.raises(ConversionError, match="the LSTM has peepholes"):
        function(lstm(rng(), peephole=True))
    with pytest.raises(ConversionError, match="clips its cell state at 3"):
        function(Stack([lstm(rng(), cell_clip=3.0)]))
    for layer in ({}, Bidirectional(Stack([lstm(rng())]), lstm(rng()))):
        with pytest.raises(TypeError, match=r"the layer is of type (dict|Stack); expected a blockcell"):
            function(layer)


@pytest.mark.parametrize("function", [convert.to_keras, convert.to_torch, convert.to_onnx])
@pytest.mark.parametrize(
    "options, reason", [({"proj_size": 2}, "a projection, w_p"), ({"coupled": True}, "coupled=True")]
)
def test_variants_refused(function, options, reason):
    layer = LSTM.init(3, 4, seed=0, **options)
    for each in (layer, Bidirectional(layer, layer)):
        with pytest.raises(ConversionError, match=f"the LSTM has {reason}"):
            function(each)
