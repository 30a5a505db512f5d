"""Good calls with every kind of argument, bad ones with every kind of mistake, all in one process.

A bad call must raise the right exception, and its message must begin with the op and the argument. Which argument that
is follows from two rules: x fixes T, B and I, cs_prev (LSTM) or h_prev (GRU) fixes H; and the first argument that does
not agree is named.
"""

from __future__ import annotations

import array
import datetime
import inspect
import json
import re
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cases import SIZES, arguments

import blockcell.ops
import blockcell.raw_ops
from blockcell import _bind
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS

FUNCTIONS = {
    name: getattr({"ops": blockcell.ops, "raw_ops": blockcell.raw_ops}[op.module], name) for name, op in OPS.items()
}
SEQUENCES = [name for name, op in OPS.items() if op.sequence]
WITH_PEEPHOLE = [name for name, op in OPS.items() if op.attributes]
TOLERANCE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 2e-6, np.dtype(np.float16): 4e-3}


@cache
def _stored(op, dtype, use_peephole):
    return arguments(op, dtype=dtype, use_peephole=use_peephole)


def good(op, dtype=np.float32, use_peephole=True):
    """Good arguments: fresh copies."""
    stored = _stored(op, dtype, use_peephole)
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in stored.items()}


def check(op, given):
    """The call's results are the formulas'."""
    result = FUNCTIONS[op](**given)
    formula = inspect.signature(FORMULAS[op]).parameters
    expected = FORMULAS[op](**{name: value for name, value in given.items() if name in formula})
    assert type(result) is OPS[op].result
    for name, value in result._asdict().items():
        exact = getattr(expected, name)
        assert value.shape == exact.shape
        bound = TOLERANCE[value.dtype] * max(1.0, np.abs(exact).max(initial=0))
        np.testing.assert_allclose(value, exact, rtol=0, atol=bound, err_msg=name)
    return result


def refuse(op, given, exception, argument):
    with pytest.raises(exception) as caught:
        FUNCTIONS[op](**given)
    assert type(caught.value) is exception
    assert re.match(rf"{op}: {argument}\b", str(caught.value)), str(caught.value)


@pytest.fixture(scope="module", autouse=True)
def _the_process_is_well_afterwards():
    yield
    for op in OPS:
        check(op, good(op))


def sources(op):
    return OPS[op].sources


def blamed(op, tensor, axis, use_peephole=True):
    """The argument that an error names when this dimension of this tensor is wrong; None where nothing disagrees."""
    letter = tensor.shape.split()[axis]
    if sources(op).get(letter) != tensor.name:
        return tensor.name
    for other in OPS[op].inputs:
        used = use_peephole or not other.peephole
        if used and other.name != tensor.name and letter in other.shape:
            return other.name
    return None


# ---------------------------------------------------------------------------- the probes that TensorFlow was tried with
PROBES = json.loads((Path(__file__).parent / "probes.json").read_text())


class BFloat16:
    """What a bfloat16 tensor of another library gives numpy: two bytes of no kind that numpy knows."""

    def __init__(self, value):
        self.value = value.view(np.uint32)

    def __array__(self, dtype=None, copy=None):
        return (self.value >> 16).astype(np.uint16).view("V2")


def probe_arguments(op, description):
    """The arguments that a probe's description stands for. Sizes, where it does not say otherwise, are `SIZES`."""
    empty = {"batch 0": "B", "input 0": "I", "cell 0": "H", "time 0": "T"}
    if description in empty:
        given = arguments(op, {empty[description]: 0}, use_peephole=False)
        return given | (
            {"seq_len_max": SIZES["T"]} if OPS[op].sequence else {}
        )  # the probe left it at 4, also for T = 0
    given = good(op, use_peephole=False)
    if match := re.fullmatch(r"(\w+) rank\+1 .*", description):
        return given | {match[1]: given[match[1]][..., None]}
    if match := re.fullmatch(r"(\w+) rank-1 \(flat\)", description):
        value = given[match[1]]
        return given | {match[1]: value.reshape(-1) if value.ndim > 1 else value[0]}
    if match := re.fullmatch(r"(\w+) dim(\d)([+-]1)", description):
        return given | {match[1]: resized(given[match[1]], int(match[2]), int(match[3]))}
    if match := re.fullmatch(r"peephole=(True|False), (wci|all wc\*) len (\d)", description):
        names = ["wci"] if match[2] == "wci" else ["wci", "wcf", "wco"]
        return given | dict.fromkeys(names, np.ones(int(match[3]), np.float32)) | {"use_peephole": match[1] == "True"}
    if match := re.fullmatch(r"seq_len_max=np.int64\((-?\d+)\)", description):
        return given | {"seq_len_max": np.int64(match[1])}
    others = {
        "seq_len_max=array([0])": {"seq_len_max": np.zeros(1, np.int64)},
        "seq_len_max int32": {"seq_len_max": np.int32(SIZES["T"])},
        "x half others float": {"x": given.get("x").astype(np.float16)},
        "dtype double": converted(given, lambda value: value.astype(np.float64)),
        "dtype half": converted(given, lambda value: value.astype(np.float16)),
        "dtype bfloat16": converted(given, BFloat16),
    }
    return given | others[description]


def converted(given, conversion):
    return {name: conversion(value) for name, value in given.items() if isinstance(value, np.ndarray)}


def resized(value, axis, change):
    """The array with one more or one less along an axis."""
    if change < 0:
        return np.delete(value, -1, axis)
    return np.concatenate([value, value.take([0], axis)], axis)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe['op']}-{probe['description']}")
def test_probe(probe):
    given = probe_arguments(probe["op"], probe["description"])
    if probe["verdict"] == "ok":
        check(probe["op"], given)
    else:
        exception = {"TypeError": TypeError, "ValueError": ValueError}[probe["verdict"]]
        refuse(probe["op"], given, exception, probe["argument"])


# -------------------------------------------------------------------------------------------------------------- tensors
class Raising:
    def __init__(self, value=None):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("on another device")


def _masked(value):
    masked = np.ma.array(value)
    masked[(0,) * value.ndim] = np.ma.masked
    return masked


def _structured(value):
    return np.zeros(value.shape, [("re", np.float32), ("im", np.float32)])


WRONG_KINDS = {
    "text": lambda value: "0.5",
    "bytes": lambda value: b"0.5",
    "bytearray": lambda value: bytearray(8),
    "object": lambda value: object(),
    "dict": lambda value: {0: value},
    "set": lambda value: {1.0, 2.0},
    "generator": lambda value: (row for row in value),
    "function": lambda value: np.zeros,
    "dtype class": lambda value: np.float32,
    "list of text": lambda value: np.full(value.shape, "0.5").tolist(),
    "list of None": lambda value: np.full(value.shape, None).tolist(),
    "list of complex": lambda value: value.astype(complex).tolist(),
    "list of bool": lambda value: (value > 0).tolist(),
    "list of dates": lambda value: [datetime.date(2020, 1, 1)] * len(value),
    "complex": lambda value: value.astype(np.complex64),
    "bool": lambda value: value > 0,
    "int": lambda value: value.astype(np.int32),
    "longdouble": lambda value: value.astype(np.longdouble),
    "dates": lambda value: value.astype("datetime64[s]"),
    "durations": lambda value: value.astype("timedelta64[s]"),
    "strings": lambda value: value.astype("U8"),
    "StringDType": lambda value: value.astype(np.dtypes.StringDType()),
    "objects": lambda value: value.astype(object),
    "structured": _structured,
    "void": lambda value: value.astype(np.float16).view("V2"),
    "bfloat16": BFloat16,
    "masked": _masked,
    "raising": Raising,
    "bool scalar": lambda value: np.True_,
}


def _tensor_cases(names):
    return [pytest.param(op, tensor, id=f"{op}-{tensor.name}") for op in names for tensor in OPS[op].inputs]


@pytest.mark.parametrize("kind", WRONG_KINDS)
@pytest.mark.parametrize("op", OPS)
def test_wrong_kind(op, kind):
    """Of each tensor in turn, read or not."""
    given = good(op)
    for tensor in OPS[op].inputs:
        bad = WRONG_KINDS[kind](given[tensor.name])
        refuse(op, given | {tensor.name: bad}, TypeError, tensor.name)


@pytest.mark.parametrize(("op", "tensor"), _tensor_cases(OPS))
def test_wrong_array(op, tensor):
    given, name = good(op), tensor.name
    value, float64 = given[name], given[name].astype(np.float64)
    refuse(op, given | {name: None}, TypeError, name)
    ragged = [*np.atleast_1d(value).tolist(), [[1.0, 2.0], [3.0]]]
    refuse(op, given | {name: ragged}, ValueError, name)
    for scalar in (0.5, 1, np.float32(1), np.float64(1), np.array(1, np.float32)):
        refuse(op, given | {name: scalar}, ValueError, name)
    refuse(op, given | {name: []}, ValueError, name)
    refuse(op, given | {name: value[None]}, ValueError, name)
    refuse(op, given | {name: value[..., None].tolist()}, ValueError, name)
    # The first array fixes the dtype: if x is the odd one, the next argument is named.
    second = OPS[op].inputs[1].name
    refuse(op, given | {name: float64}, TypeError, second if name == "x" else name)
    refuse(op, given | {name: value.astype(">f8")}, TypeError, second if name == "x" else name)
    if name != "x":
        named = OPS[op].inputs[2].name if name == second else name
        refuse(op, given | {"x": given["x"].tolist(), name: float64}, TypeError, named)


@pytest.mark.parametrize(("op", "tensor"), _tensor_cases(OPS))
def test_wrong_size(op, tensor):
    """One more, one less, zero, and 2**40 of it, which no memory holds: a view with stride 0."""
    given, name = good(op), tensor.name
    for axis in range(tensor.rank):
        argument = blamed(op, tensor, axis)
        if argument is None:  # T of a forward op
            continue
        for change in (1, -1):
            refuse(op, given | {name: resized(given[name], axis, change)}, ValueError, argument)
        for size in (0, 2**31, 2**40):
            shape = list(given[name].shape)
            shape[axis] = size
            strides = [0] * tensor.rank
            huge = np.lib.stride_tricks.as_strided(given[name], shape, strides, writeable=False)
            refuse(op, given | {name: huge}, ValueError, argument)
    if tensor.rank == 2 and tensor.shape != "B I":
        refuse(op, given | {name: np.ascontiguousarray(given[name].T)}, ValueError, blamed(op, tensor, 0))


@pytest.mark.parametrize("op", WITH_PEEPHOLE)
def test_peephole_weights(op):
    given = good(op)
    for name in ("wci", "wcf", "wco"):
        for bad in (
            {name: None},
            {name: given[name][:-1]},
            {name: np.zeros((5, 5), np.float32)},
            {name: np.zeros(0, "f")},
        ):
            refuse(op, given | bad, TypeError if bad[name] is None else ValueError, name)
        with pytest.raises(TypeError, match=f"{name} is None; .* because use_peephole is True"):
            FUNCTIONS[op](**given | {name: None})
    unused = good(op, use_peephole=False)
    plain = check(op, unused)
    for name in ("wci", "wcf", "wco"):
        for weight in (None, np.zeros(0, "f"), np.full(3, np.nan, "f"), np.full(2, np.inf, "f")[::-1], [1, 2, 3], []):
            result = check(op, unused | {name: weight})
            if f"{name}_grad" in result._fields:
                length = SIZES["H"] if weight is None else len(weight)
                np.testing.assert_array_equal(getattr(result, f"{name}_grad"), np.zeros(length, "f"))
            for field in ("cs", "h", "x_grad", "cs_prev_grad"):
                if field in result._fields:
                    np.testing.assert_array_equal(getattr(result, field), getattr(plain, field))
        without = {k: v for k, v in unused.items() if k != name}
        check(op, without)
        refuse(op, unused | {name: np.zeros((1, 5), "f")}, ValueError, name)
        refuse(op, unused | {name: np.float32(0)}, ValueError, name)
        refuse(op, unused | {name: np.zeros(5)}, TypeError, name)
        refuse(op, unused | {name: "none"}, TypeError, name)


# ------------------------------------------------------------------------------------------------ arrays of other kinds
class Protocol:
    """Nothing but ``__array__``."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return self.value


class Interface:
    """Nothing but ``__array_interface__``."""

    def __init__(self, value):
        self.value = value
        self.__array_interface__ = value.__array_interface__


class Subclass(np.ndarray):
    pass


def _unaligned(value):
    memory = np.zeros(value.nbytes + 1, np.uint8)
    view = memory[1:].view(value.dtype).reshape(value.shape)
    view[...] = value
    return view


def _read_only(value):
    value.flags.writeable = False
    return value


def _strided(value):
    wide = np.zeros((*value.shape, 2), value.dtype)
    wide[..., 1] = value
    return wide[..., 1]


def _reversed(value):
    return np.ascontiguousarray(value[::-1])[::-1]


def _memmap(value, folder):
    mapped = np.memmap(folder / str(len(list(folder.iterdir()))), value.dtype, "w+", shape=value.shape)
    mapped[...] = value
    return mapped


SAME_VALUES = {
    "Fortran": np.asfortranarray,
    "strided": _strided,
    "reversed": _reversed,
    "read-only": _read_only,
    "byte-swapped": lambda value: value.astype(value.dtype.newbyteorder()),
    "unaligned": _unaligned,
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
    given = good(op, dtype)
    expected = check(op, given)
    kinds = {**SAME_VALUES, "memmap": lambda value: _memmap(value, tmp_path)}
    if dtype is np.float16:
        del kinds["array.array"]  # which has no half
    for kind, conversion in kinds.items():
        for result in (
            FUNCTIONS[op](**given | converted(good(op, dtype), conversion)),
            FUNCTIONS[op](**given | {"h_prev": conversion(good(op, dtype)["h_prev"])}),
        ):
            for name, value in result._asdict().items():
                assert type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous
                np.testing.assert_array_equal(value, getattr(expected, name), err_msg=f"{kind}: {name}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_good_arrays_are_not_converted(op, dtype, monkeypatch):
    """Also with ``out`` and without peepholes. Those too large for the fast way go the other."""
    calls = []
    read = _bind.Converter.read
    monkeypatch.setattr(_bind.Converter, "read", lambda *args: calls.append(args) or read(*args))
    for peephole in (True, False) if OPS[op].attributes else (True,):
        given = good(op, dtype, peephole)
        out = tuple(FUNCTIONS[op](**given))
        FUNCTIONS[op](**given, out=out)
        if not peephole:
            FUNCTIONS[op](**given | dict.fromkeys(("wci", "wcf", "wco")))
    assert not calls
    if dtype is np.float32:
        check(op, arguments(op, {"T": 2, "B": 1, "I": 2**19 + 1, "H": 1}))
        assert calls


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_lists_take_the_dtype_of_the_first_array(op, dtype):
    given = good(op, dtype)
    expected = FUNCTIONS[op](**given)
    lists = converted(given, np.ndarray.tolist)
    for tensor in OPS[op].inputs:
        result = FUNCTIONS[op](**given | lists | {tensor.name: given[tensor.name]})
        for name, value in result._asdict().items():
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)
    if dtype is np.float32:
        rows = {name: tuple(value) for name, value in lists.items()}
        for result in (FUNCTIONS[op](**given | lists), FUNCTIONS[op](**given | rows)):
            for name, value in result._asdict().items():
                assert value.dtype == np.float32
                np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)


def test_list_of_integers():
    given = {"x": [[1]], "h_prev": [[0]], "w_ru": [[1, 2], [3, 4]], "w_c": [[1], [2]], "b_ru": [0, 0], "b_c": [0]}
    assert check("GRUBlockCell", given).h.dtype == np.float32


# ---------------------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("letters", ["T", "B", "I", "H", "BI", "BH", "IH", "BIH", "TBIH"])
@pytest.mark.parametrize("op", OPS)
def test_zero_sizes(op, letters):
    for dtype in (np.float32, np.float16):
        result = check(op, arguments(op, dict.fromkeys(letters, 0), dtype=dtype))
        filled = tuple(np.full_like(value, 7) for value in result)
        again = FUNCTIONS[op](**arguments(op, dict.fromkeys(letters, 0), dtype=dtype), out=filled)
        for value, expected in zip(again, result, strict=True):
            np.testing.assert_array_equal(value, expected)


def _empty(op, sizes):
    """Arguments of any size at no memory: every tensor is a view of one number with strides 0."""
    number = np.zeros(1, np.float32)
    given = {}
    for tensor in OPS[op].inputs:
        shape = blockcell.optable.sizes_of(tensor.shape, sizes)
        given[tensor.name] = np.lib.stride_tricks.as_strided(number, shape, [0] * len(shape), writeable=False)
    given |= {"seq_len_max": 0} if OPS[op].sequence else {}
    return given | ({"use_peephole": True} if OPS[op].attributes else {})


@pytest.mark.parametrize("op", OPS)
def test_huge_sizes_of_nothing(op):
    """2**60 of what has no elements is a shape like any other."""
    for sizes in ({"T": 1, "B": 0, "I": 2**58, "H": 0}, {"T": 2**58, "B": 0, "I": 0, "H": 0}):
        result = FUNCTIONS[op](**_empty(op, sizes))
        for tensor, value in zip(OPS[op].outputs, result, strict=True):
            assert value.shape == blockcell.optable.sizes_of(tensor.shape, sizes)
            assert value.size == 0


@pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMV2", "block_gru"])
def test_results_that_no_address_reaches(op):
    """The inputs agree and are empty, but numpy has no such shape for the results."""
    given = _empty(op, {"T": 2**50, "B": 0, "I": 0, "H": 2**20})
    refuse(op, given, ValueError, OPS[op].outputs[0].name)


# -------------------------------------------------------------------------------------------------------------- numbers
class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("op", SEQUENCES)
def test_seq_len_max(op):
    given = good(op)
    steps = SIZES["T"]
    for value in (0, 1, 3, steps):
        expected = check(op, given | {"seq_len_max": value})
        kinds = (np.int8, np.uint64, np.array, lambda v: np.array(v, ">i4"), Index, lambda v: Protocol(np.array(v)))
        for kind in kinds:
            for a, b in zip(FUNCTIONS[op](**given | {"seq_len_max": kind(value)}), expected, strict=True):
                np.testing.assert_array_equal(a, b)
    for a, b in zip(
        FUNCTIONS[op](**given | {"seq_len_max": True}), FUNCTIONS[op](**given | {"seq_len_max": 1}), strict=True
    ):
        np.testing.assert_array_equal(a, b)  # as everywhere in Python, True is the integer 1

    not_integers = [
        3.0,
        np.float64(3),
        np.array(3.0),
        "3",
        b"3",
        3j,
        None,
        [3],
        (3,),
        {},
        object(),
        np.True_,
        np.array(True),
    ]
    not_integers += [
        np.array([3.0]),
        np.array("3"),
        np.array(None),
        np.ma.masked,
        np.ma.array(3, mask=True),
        Decimal(3),
    ]
    not_integers += [Fraction(3), np.datetime64(3, "s"), Raising(), int]
    for value in not_integers:
        refuse(op, given | {"seq_len_max": value}, TypeError, "seq_len_max")
    for value in (-1, steps + 1, 2**31, 2**63, 2**70, -(2**70), np.int64(-1), np.uint64(2**63), np.array(-1), Index(9)):
        refuse(op, given | {"seq_len_max": value}, ValueError, "seq_len_max")
    for value in (np.array([3]), np.array([[3]]), np.array([1, 2, 3]), np.zeros(0, int), np.zeros((13, 11, 0), int)):
        refuse(op, given | {"seq_len_max": value}, ValueError, "seq_len_max")
    refuse(
        op, converted(given, np.asfortranarray) | {"seq_len_max": steps + 1} | _switch(op), ValueError, "seq_len_max"
    )


def _switch(op):
    return {"use_peephole": True} if OPS[op].attributes else {}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("op", SEQUENCES)
def test_nothing_past_seq_len_max_is_read_and_all_is_zero(op, dtype):
    given = good(op, dtype) | {"seq_len_max": 2}
    expected = FUNCTIONS[op](**given)
    for tensor in OPS[op].inputs:
        if tensor.shape.startswith("T "):
            given[tensor.name][2:] = np.nan
    out = tuple(np.full_like(value, np.nan) for value in expected)
    for result in (FUNCTIONS[op](**given), FUNCTIONS[op](**given, out=out)):
        for tensor, value, clean in zip(OPS[op].outputs, result, expected, strict=True):
            np.testing.assert_array_equal(value, clean)
            if tensor.shape.startswith("T "):
                assert (value[2:] == 0).all() and (value[:2] != 0).any()


REAL = [1, True, 0.5, np.float16(0.5), np.float32(0.5), np.int8(1), Fraction(1, 2), -2.0, np.uint64(2**63)]
NOT_REAL = ["1", b"1", None, 1j, np.complex64(1), [1.0], (1.0,), {}, object(), Decimal(1), float]
NOT_REAL += [np.array(1.0), np.array([1.0]), np.datetime64(1, "s")]


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, part.name) for op in OPS for part in OPS[op].attributes if part.name in ("forget_bias", "cell_clip")],
)
def test_number(op, name):
    given = good(op)
    for value in REAL:
        expected = check(op, given | {name: float(value)})
        for a, b in zip(FUNCTIONS[op](**given | {name: value}), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for value in NOT_REAL:
        refuse(op, given | {name: value}, TypeError, name)
    refuse(op, given | {name: 10**400}, ValueError, name)
    if name == "cell_clip":
        off = check(op, given | {name: 0.0})
        for value in (np.nan, -1.0, -np.inf, np.inf, np.float32("nan"), -0.0):
            result = FUNCTIONS[op](**given | {name: value})
            for a, b in zip(result, off, strict=True):
                np.testing.assert_array_equal(a, b)
    half = good(op, np.float16)
    with np.errstate(over="ignore"):
        rounded = float(np.float16(0.1)), float(np.float16(1e30))
    for value, same in zip((0.1, 1e30), rounded, strict=True):
        for a, b in zip(FUNCTIONS[op](**half | {name: value}), FUNCTIONS[op](**half | {name: same}), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("op", WITH_PEEPHOLE)
def test_use_peephole(op):
    for value in (True, False):
        given = good(op, use_peephole=value)
        check(op, given | {"use_peephole": np.bool_(value)})
    for value in (None, 0, 1, 1.0, "True", np.int64(1), np.array(True), [], [True], object()):
        refuse(op, given | {"use_peephole": value}, TypeError, "use_peephole")


@pytest.mark.parametrize("op", OPS)
def test_num_threads(op):
    given = good(op)
    expected = FUNCTIONS[op](**given)
    for value in (None, 1, 2, 3, np.int8(2), True, Index(2), 2**40):
        for a, b in zip(FUNCTIONS[op](**given, num_threads=value), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for value in (0, -1, np.int64(0), -(2**70), False):
        refuse(op, given | {"num_threads": value}, ValueError, "num_threads")
    for value in (1.5, 2.0, "2", b"2", [1], (1,), {}, np.float32(1), np.array([1]), np.array(1.0), object(), 1j):
        refuse(op, given | {"num_threads": value}, TypeError, "num_threads")


# ------------------------------------------------------------------------------------------------------------------ out
def _filled(op, given):
    return [np.full_like(value, 7) for value in FUNCTIONS[op](**given)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_out_is_filled_and_returned(op, dtype, tmp_path):
    for peephole in (True, False) if OPS[op].attributes else (True,):
        given = good(op, dtype, peephole)
        expected = FUNCTIONS[op](**given)
        kinds = (np.array, lambda value: value.view(Subclass), lambda value: _memmap(value, tmp_path))
        for inputs in (given, given | converted(given, np.asfortranarray)):
            for kind in kinds:
                out = tuple(kind(value) for value in _filled(op, given))
                for given_as in (out, OPS[op].result(*out)):
                    result = FUNCTIONS[op](**inputs, out=given_as)
                    assert type(result) is OPS[op].result
                    assert all(a is b for a, b in zip(result, out, strict=True))
                    for a, b in zip(result, expected, strict=True):
                        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_neighbours_do_not_overlap(op):
    """Results in one block of memory, and inputs beside them."""
    given = good(op)
    expected = FUNCTIONS[op](**given)
    block = np.zeros(sum(value.size for value in (*expected, given["x"])), np.float32)
    parts, start = [], 0
    for value in (*expected, given["x"]):
        parts.append(block[start : start + value.size].reshape(value.shape))
        start += value.size
    parts[-1][...] = given["x"]
    result = FUNCTIONS[op](**given | {"x": parts[-1]}, out=tuple(parts[:-1]))
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_wrong_out(op):
    given = good(op)
    out = _filled(op, given)
    for bad in (list(out), out[0], "out", 1, {}, iter(out), np.zeros((len(out), 3, 5), "f")):
        refuse(op, given | {"out": bad}, TypeError, "out")
    for bad in ((), tuple(out[:-1]), (*out, out[0].copy()), (out[0],)):
        refuse(op, given | {"out": bad}, ValueError, "out")


@pytest.mark.parametrize(("op", "k"), [(op, k) for op in OPS for k in range(len(OPS[op].outputs))])
def test_wrong_array_in_out(op, k):
    """Also where the inputs have to be converted."""
    for given in (good(op), good(op) | {"x": good(op)["x"].tolist()}):
        _refuse_arrays_in_out(op, given, k)


def _refuse_arrays_in_out(op, given, k):
    out = _filled(op, given)
    right = out[k]
    name = rf"out\[{k}\] \({OPS[op].outputs[k].name}"

    def bad(array, exception):
        refuse(op, given | {"out": (*out[:k], array, *out[k + 1 :])}, exception, name)

    for value in (
        None,
        right.tolist(),
        0.5,
        "out",
        memoryview(right),
        Protocol(right),
        np.ma.array(right),
        _masked(right),
    ):
        bad(value, TypeError)
    for dtype in (np.float64, np.float16, np.int32, np.complex64, object, right.dtype.newbyteorder()):
        bad(right.astype(dtype), TypeError)
    for axis in range(right.ndim):
        bad(resized(right, axis, 1), ValueError)
        bad(resized(right, axis, -1), ValueError)
    for reshaped in (right[None], right[..., None], right.reshape(-1)[:0], right.reshape(-1)[0, ...]):
        bad(reshaped, ValueError)
    bad(_read_only(right.copy()), ValueError)
    bad(_strided(right), ValueError)
    bad(_unaligned(right), ValueError)
    if right.ndim > 1:
        bad(np.asfortranarray(right), ValueError)
    # its first number is the last one of an input, or of another output
    for tensor in OPS[op].inputs:
        if isinstance(given[tensor.name], np.ndarray):
            memory = np.zeros(given[tensor.name].size + right.size, np.float32)
            shared = memory[: given[tensor.name].size].reshape(given[tensor.name].shape)
            shared[...] = given[tensor.name]
            last = memory[shared.size - 1 : shared.size - 1 + right.size].reshape(right.shape)
            overlapping = given | {tensor.name: shared, "out": (*out[:k], last, *out[k + 1 :])}
            refuse(op, overlapping, ValueError, name)
    for m, other in enumerate(out):
        if m < k:
            memory = np.zeros(other.size + right.size, np.float32)
            first = memory[: other.size].reshape(other.shape)
            second = memory[other.size - 1 : other.size - 1 + right.size].reshape(right.shape)
            twice = list(out)
            twice[m], twice[k] = first, second
            refuse(op, given | {"out": tuple(twice)}, ValueError, name)


@pytest.mark.parametrize("op", OPS)
def test_out_between_the_elements_of_an_input(op):
    """The bounds overlap and the memory does not: allowed, because no byte is both."""
    given = good(op)
    expected = FUNCTIONS[op](**given)
    memory = np.zeros((2, *given["h_prev"].shape), np.float32)
    out = _filled(op, given)
    k = next(k for k, value in enumerate(out) if value.shape == given["h_prev"].shape or value.ndim == 3)
    if out[k].ndim == 3:
        return
    strided = np.lib.stride_tricks.as_strided(memory, given["h_prev"].shape, memory.strides[1:])
    strided[...] = given["h_prev"]
    out[k] = memory[1]
    for a, b in zip(FUNCTIONS[op](**given | {"h_prev": strided}, out=tuple(out)), expected, strict=True):
        np.testing.assert_array_equal(a, b)


# ----------------------------------------------------------------------------------------------------------- signatures
@pytest.mark.parametrize("op", OPS)
def test_signature_follows_the_table(op):
    parameters = inspect.signature(FUNCTIONS[op]).parameters
    table = OPS[op]
    expected = ["seq_len_max"] * table.sequence + [part.name for part in (*table.inputs, *table.attributes)]
    expected += ["out", "num_threads"] + ["name"] * (table.module == "raw_ops")
    assert list(parameters) == expected
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    defaults = {part.name: part.default for part in table.attributes if part.default is not None}
    defaults |= dict.fromkeys(["wci", "wcf", "wco", "out", "num_threads", "name"])
    for name, parameter in parameters.items():
        assert parameter.default == defaults.get(name, parameter.empty)


@pytest.mark.parametrize("op", OPS)
def test_names_of_arguments(op):
    given = good(op)
    for name in given:
        optional = name in ("wci", "wcf", "wco") or any(
            part.name == name and part.default is not None for part in OPS[op].attributes
        )
        if not optional:
            with pytest.raises(TypeError, match=rf"{op}\(\) missing .*'{name}'"):
                FUNCTIONS[op](**{key: value for key, value in given.items() if key != name})
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument 'weights'"):
        FUNCTIONS[op](**given, weights=1)
    with pytest.raises(TypeError, match=rf"{op}\(\) takes 0 positional arguments"):
        FUNCTIONS[op](*given.values())
    if OPS[op].module == "raw_ops":
        for name in (None, "cell", 3, object()):
            check(op, given | {"name": name})


# ------------------------------------------------------------------------------------------------------------- messages
F = np.float32
CELL = {"x": np.zeros((2, 3), F), "cs_prev": np.zeros((2, 5), F), "h_prev": np.zeros((2, 5), F)}
CELL |= {"w": np.zeros((8, 20), F), "b": np.zeros(20, F)}
B_FROM_X, H_FROM_CS_PREV = "B=2 from x (shape (2, 3))", "H=5 from cs_prev (shape (2, 5))"
MESSAGES = [
    (
        {"w": np.zeros((7, 16), F)},
        f"w has shape (7, 16); expected (I+H, 4H) = (8, 20) with I=3 from x (shape (2, 3)), {H_FROM_CS_PREV}",
    ),
    ({"x": np.zeros(3, F)}, "x has shape (3,); expected rank 2, (B, I)"),
    ({"cs_prev": np.zeros((4, 5), F)}, f"cs_prev has shape (4, 5); expected (B, H) = (2, 5) with {B_FROM_X}"),
    ({"b": np.zeros(21, F)}, f"b has shape (21,); expected (4H,) = (20,) with {H_FROM_CS_PREV}"),
    ({"wci": np.zeros((5, 1), F)}, "wci has shape (5, 1); expected rank 1, of any length while use_peephole is False"),
    ({"use_peephole": True}, "wci is None; expected an array of shape (H,) because use_peephole is True"),
    ({"x": None}, "x is None; expected an array of shape (B, I)"),
    ({"x": "abc"}, "x is made of <U3; expected an array of real numbers"),
    ({"b": np.zeros(20)}, "b has dtype float64; expected float32, that of x"),
    ({"b": np.zeros(20, complex)}, "b has dtype complex128; expected float32, float64 or float16"),
    ({"forget_bias": "1"}, "forget_bias is '1'; expected a real number"),
    ({"use_peephole": 1}, "use_peephole is 1; expected True or False"),
    ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
    ({"out": ()}, "out has 0 arrays; expected 7: (i, cs, f, o, ci, co, h)"),
    (
        {"out": (np.zeros((2, 4), F),) * 7},
        f"out[0] (i) has shape (2, 4); expected (B, H) = (2, 5) with {B_FROM_X}, {H_FROM_CS_PREV}",
    ),
]


@pytest.mark.parametrize(("bad", "message"), MESSAGES, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_message(bad, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        FUNCTIONS["LSTMBlockCell"](**CELL | bad)
    assert str(caught.value) == f"LSTMBlockCell: {message}"


def test_message_of_seq_len_max():
    given = good("BlockLSTM") | {"seq_len_max": 5}
    with pytest.raises(ValueError) as caught:
        FUNCTIONS["BlockLSTM"](**given)
    expected = "expected 0 <= seq_len_max <= T = 4 from x (shape (4, 3, 2))"
    assert str(caught.value) == f"BlockLSTM: seq_len_max is 5; {expected}"
