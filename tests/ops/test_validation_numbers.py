"""Numbers and switches: seq_len_max, num_threads, use_peephole and the other attributes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from calls import WITH_PEEPHOLE, assert_equal, check, converted, good, refuse
from cases import FUNCTIONS, SIZES
from forms import Protocol, Raising

from blockcell.optable import OPS

pytestmark = pytest.mark.usefixtures("good_calls_afterwards")
SEQUENCES = [name for name, op in OPS.items() if op.sequence]


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


NOT_INTEGERS = [3.0, np.float64(3), np.array(3.0), "3", b"3", 3j, None, [3], (3,), {}, object(), np.True_]
NOT_INTEGERS += [
    np.array(True),
    np.array([3.0]),
    np.array("3"),
    np.array(None),
    np.ma.masked,
    np.ma.array(3, mask=True),
]
NOT_INTEGERS += [Decimal(3), Fraction(3), np.datetime64(3, "s"), Raising(), int]


@pytest.mark.parametrize("op", SEQUENCES)
def test_seq_len_max(op):
    args = good(op)
    steps = SIZES["T"]
    for value in (0, 1, 3, steps):
        expected = check(op, args | {"seq_len_max": value})
        kinds = (np.int8, np.uint64, np.array, lambda v: np.array(v, ">i4"), Index, lambda v: Protocol(np.array(v)))
        for kind in kinds:
            assert_equal(FUNCTIONS[op](**args | {"seq_len_max": kind(value)}), expected)
    # As everywhere in Python, True is the integer 1.
    assert_equal(FUNCTIONS[op](**args | {"seq_len_max": True}), FUNCTIONS[op](**args | {"seq_len_max": 1}))
    for value in NOT_INTEGERS:
        refuse(op, args | {"seq_len_max": value}, TypeError, "seq_len_max")
    for value in (-1, steps + 1, 2**31, 2**63, 2**70, -(2**70), np.int64(-1), np.uint64(2**63), np.array(-1), Index(9)):
        refuse(op, args | {"seq_len_max": value}, ValueError, "seq_len_max")
    for value in (np.array([3]), np.array([[3]]), np.array([1, 2, 3]), np.zeros(0, int), np.zeros((13, 11, 0), int)):
        refuse(op, args | {"seq_len_max": value}, ValueError, "seq_len_max")
    refuse(op, args | converted(args, np.asfortranarray) | {"seq_len_max": steps + 1}, ValueError, "seq_len_max")


REAL = [1, True, 0.5, np.float16(0.5), np.float32(0.5), np.int8(1), Fraction(1, 2), -2.0, np.uint64(2**63)]
NOT_REAL = ["1", b"1", None, 1j, np.complex64(1), [1.0], (1.0,), {}, object(), Decimal(1), float]
NOT_REAL += [np.array(1.0), np.array([1.0]), np.datetime64(1, "s")]


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, part.name) for op in OPS for part in OPS[op].attributes if part.name in ("forget_bias", "cell_clip")],
)
def test_number(op, name):
    args = good(op)
    for value in REAL:
        expected = check(op, args | {name: float(value)})
        assert_equal(FUNCTIONS[op](**args | {name: value}), expected)
    for value in NOT_REAL:
        refuse(op, args | {name: value}, TypeError, name)
    refuse(op, args | {name: 10**400}, ValueError, name)
    if name == "cell_clip":
        off = check(op, args | {name: 0.0})
        for value in (np.nan, -1.0, -np.inf, np.inf, np.float32("nan"), -0.0):
            assert_equal(FUNCTIONS[op](**args | {name: value}), off)
    half = good(op, np.float16)
    with np.errstate(over="ignore"):
        rounded = float(np.float16(0.1)), float(np.float16(1e30))
    for value, same in zip((0.1, 1e30), rounded, strict=True):
        assert_equal(FUNCTIONS[op](**half | {name: value}), FUNCTIONS[op](**half | {name: same}))


@pytest.mark.parametrize("op", WITH_PEEPHOLE)
def test_use_peephole(op):
    for value in (True, False):
        args = good(op, use_peephole=value)
        check(op, args | {"use_peephole": np.bool_(value)})
    for value in (None, 0, 1, 1.0, "True", np.int64(1), np.array(True), [], [True], object()):
        refuse(op, args | {"use_peephole": value}, TypeError, "use_peephole")


@pytest.mark.parametrize("op", OPS)
def test_num_threads(op):
    args = good(op)
    expected = FUNCTIONS[op](**args)
    for value in (None, 1, 2, 3, np.int8(2), True, Index(2), 2**40):
        assert_equal(FUNCTIONS[op](**args, num_threads=value), expected)
    for value in (0, -1, np.int64(0), -(2**70), False):
        refuse(op, args | {"num_threads": value}, ValueError, "num_threads")
    for value in (1.5, 2.0, "2", b"2", [1], (1,), {}, np.float32(1), np.array([1]), np.array(1.0), object(), 1j):
        refuse(op, args | {"num_threads": value}, TypeError, "num_threads")
