"""Sizes, dtypes, levels and bounds for kernels, and calls at a CPU level."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import as_passed

from blockcell import _kernels, optable
from blockcell._kernels import bind
from blockcell.optable import OPS

LEVELS = _kernels.available_levels()
DTYPES = {dtype.name: dtype.type for dtype in optable.DTYPES}
# Largest error in eps of the output's largest entry; float64's leaves room for the formulas' own rounding.
BOUNDS = {"float32": 5, "float64": 64, "float16": 1.5}
SIZES = [  # T, B, I, H: single units, every kind of tail, one and many lines, tiles, blocks and panels
    (1, 1, 1, 1),
    (3, 2, 3, 5),
    (4, 7, 20, 17),
    (5, 1, 0, 33),
    (3, 13, 40, 16),
    (2, 64, 40, 40),
    (20, 16, 64, 64),
    (3, 5, 300, 100),
    (2, 3, 128, 256),
    (3, 70, 33, 48),
    (2, 2, 100, 512),
]
LARGE = [(2, 3, 1024, 1024), (3, 40, 200, 777)]


def for_tests(level, dtype="float32"):
    """Return parts of the kernels of a level, which compute in float64 for float64, else in float32."""
    name = f"blockcell._for_tests_{'double' if dtype == 'float64' else 'float'}_{level}"
    return pytest.importorskip(name, reason="only built in a checkout")


@cache
def at_level(name, level):
    """Return what a public function calls, with the kernels of a level."""
    return bind(OPS[name], _kernels.load(level)).run


def run(name, args, level=_kernels.LEVEL, num_threads=None, out=None, call=None):
    return (call or at_level(name, level))(*as_passed(name, args, out, num_threads))


def sizes_of(T, B, I, H):  # noqa: E741
    return {"T": T, "B": B, "I": I, "H": H}


def compare_with_tensorflow(case: Any, results: Any, saturated: float, usual: float) -> None:
    """Expect TensorFlow's patterns of NaN and infinities, and values within so many of its eps of the largest entry."""
    eps = {"f32": 2.0**-23, "f16": 2.0**-10}[case["dtype"]]
    for name in case["outputs"].keys() & results.keys():
        steps = slice(case["compared"][name])
        expected, result = (a[steps].astype(np.float64) for a in (case["outputs"][name], results[name]))
        place = f"{case['op']} {case['case']} {name}"
        assert result.shape == expected.shape, place
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(expected[~finite], result[~finite], err_msg=place)
        scale = max(1.0, np.abs(expected[finite]).max(initial=0))
        error = np.abs(expected - result)[finite].max(initial=0) / (eps * scale)
        assert error <= (saturated if case["kind"] == "saturated" else usual), f"{place} is {error:.1f} eps off"
