"""The order of gates, and what neither Keras nor PyTorch can express.

Each source has a file of its own: `test_convert_keras.py`, `test_convert_torch.py`, `test_convert_onnx.py` and
`test_convert_tf1.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from convert_cases import lstm, rng

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.convert.shared import ORDERS, reorder
from blockcell.layers import Bidirectional, Stack


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
