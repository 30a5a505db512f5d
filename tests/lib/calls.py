"""Calls of the ops by name: good arguments, the results that they must give, and refusals."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from cases import FUNCTIONS, arguments, arguments_of

from blockcell.formulas import FORMULAS
from blockcell.optable import OPS

WITH_PEEPHOLE = [name for name, op in OPS.items() if any(tensor.peephole for tensor in op.inputs)]
TOLERANCE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 2e-6, np.dtype(np.float16): 4e-3}


@cache
def _stored(op, dtype, use_peephole):
    return arguments(op, dtype=dtype, use_peephole=use_peephole)


def good(op, dtype=np.float32, use_peephole=True):
    """Return good arguments, which a test may change."""
    stored = _stored(op, dtype, use_peephole)
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in stored.items()}


def check(op, arguments):
    """Call an op, check that its results are the formulas', and return them."""
    result = FUNCTIONS[op](**arguments)
    expected = FORMULAS[op](**arguments_of(op, arguments))
    assert type(result) is OPS[op].result
    for name, value in result._asdict().items():
        exact = getattr(expected, name)
        assert value.shape == exact.shape
        bound = TOLERANCE[value.dtype] * max(1.0, np.abs(exact).max(initial=0))
        np.testing.assert_allclose(value, exact, rtol=0, atol=bound, err_msg=name)
    return result


def assert_equal(results, expected):
    for result, exact in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, exact)


def refuse(op, arguments, exception, argument):
    """Check that a call raises an exception of this very class, whose message begins with the op and the argument."""
    with pytest.raises(exception) as caught:
        FUNCTIONS[op](**arguments)
    assert type(caught.value) is exception
    assert re.match(rf"{op}: {argument}\b", str(caught.value)), str(caught.value)


def converted(arguments, conversion):
    """Return the arrays among the arguments, converted."""
    return {name: conversion(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}


def resized(value, axis, change):
    """Return the array with one element more (change 1) or less (-1) along an axis."""
    if change < 0:
        return np.delete(value, -1, axis)
    return np.concatenate([value, value.take([0], axis)], axis)
