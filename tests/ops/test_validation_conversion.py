"""Arrays in other forms, and lists, give the results of plain arrays, which are not converted."""

from __future__ import annotations

import array

import numpy as np
import pytest
from calls import WITH_PEEPHOLE, check, converted, good
from cases import FUNCTIONS, arguments
from forms import Protocol, Subclass, backwards, byte_swapped, memmap, misaligned, read_only, strided

from blockcell import op_arguments
from blockcell.optable import OPS

pytestmark = pytest.mark.usefixtures("good_calls_afterwards")


class Interface:
    """Has nothing but ``__array_interface__``."""

    def __init__(self, value):
        self.value = value
        self.__array_interface__ = value.__array_interface__


SAME_VALUES = {
    "Fortran": np.asfortranarray,
    "strided": strided,
    "reversed": backwards,
    "read-only": read_only,
    "byte-swapped": byte_swapped,
    "unaligned": misaligned,
    "subclass": lambda value: value.view(Subclass),
    "unmasked": np.ma.array,
    "__array__": Protocol,
    "__array_interface__": Interface,
    "memoryview": memoryview,
    "array.array": lambda value: array.array(value.dtype.char, value) if value.ndim == 1 else value,
    "matrix": lambda value: value.view(np.matrix) if value.ndim == 2 else value,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_same_values_same_bits(op, dtype, tmp_path):
    args = good(op, dtype)
    expected = check(op, args)
    kinds = {**SAME_VALUES, "memmap": lambda value: memmap(value, tmp_path)}
    if dtype is np.float16:
        del kinds["array.array"]  # there is none of float16
    for kind, conversion in kinds.items():
        for result in (
            FUNCTIONS[op](**args | converted(good(op, dtype), conversion)),
            FUNCTIONS[op](**args | {"h_prev": conversion(good(op, dtype)["h_prev"])}),
        ):
            for name, value in result._asdict().items():
                assert type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous
                np.testing.assert_array_equal(value, getattr(expected, name), err_msg=f"{kind}: {name}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_good_arrays_are_not_converted(op, dtype, monkeypatch):
    """Also with ``out`` and without peepholes. Very large ones do pass through the converter."""
    calls = []
    read = op_arguments.Converter.read
    monkeypatch.setattr(op_arguments.Converter, "read", lambda *args: calls.append(args) or read(*args))
    for peephole in (True, False) if op in WITH_PEEPHOLE else (True,):
        args = good(op, dtype, peephole)
        out = tuple(FUNCTIONS[op](**args))
        FUNCTIONS[op](**args, out=out)
        if not peephole:
            FUNCTIONS[op](**args | dict.fromkeys(("wci", "wcf", "wco")))
    assert not calls
    if dtype is np.float32:
        check(op, arguments(op, {"T": 2, "B": 1, "I": 2**19 + 1, "H": 1}))
        assert calls


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_lists_take_the_dtype_of_the_first_array(op, dtype):
    args = good(op, dtype)
    expected = FUNCTIONS[op](**args)
    lists = converted(args, np.ndarray.tolist)
    for tensor in OPS[op].inputs:
        result = FUNCTIONS[op](**args | lists | {tensor.name: args[tensor.name]})
        for name, value in result._asdict().items():
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)
    if dtype is np.float32:
        rows = {name: tuple(value) for name, value in lists.items()}
        for result in (FUNCTIONS[op](**args | lists), FUNCTIONS[op](**args | rows)):
            for name, value in result._asdict().items():
                assert value.dtype == np.float32
                np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)


def test_list_of_integers():
    args = {"x": [[1]], "h_prev": [[0]], "w_ru": [[1, 2], [3, 4]], "w_c": [[1], [2]], "b_ru": [0, 0], "b_c": [0]}
    assert check("GRUBlockCell", args).h.dtype == np.float32
