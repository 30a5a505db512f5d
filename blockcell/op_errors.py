"""Errors of an op's results: what `onnx_export.verify` and `blockcell demo` find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .formulas import error_in_eps
from .optable import Array, Op

KERNELS = "blockcell"  # what a row has for a provider if the results are the kernels'


class Row(NamedTuple):
    """An output of an op on a runtime: its largest error, in eps of its dtype times its largest entry, and where."""

    op: str
    dtype: str
    sizes: Mapping[str, int]
    provider: str
    output: str
    error: float
    at: tuple[int, ...]
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # not so for NaN


def rows_of_outputs(
    op: Op,
    dtype: np.dtype[Any],
    sizes: Mapping[str, int],
    provider: str,
    results: Sequence[Array],
    exact: Sequence[Array],
    bounds: Mapping[str, float],
) -> list[Row]:
    """Return a row for each output of an op, whose bound it has: results beside those of the formulas."""
    eps = float(np.finfo(dtype).eps)
    return [
        Row(op.name, dtype.name, sizes, provider, tensor.name, *_error(*pair, eps), bounds[tensor.name])
        for tensor, pair in zip(op.outputs, zip(results, exact, strict=True), strict=True)
    ]


def severity(row: Row) -> tuple[bool, float]:
    """Return by what the worst of several rows is found: outputs above their bounds are worse than all others."""
    return not row.ok, row.error


def _error(result: Array, exact: Array, eps: float) -> tuple[float, tuple[int, ...]]:
    """Return the largest error in eps and its index: the first NaN's if there is one; infinite for a wrong shape."""
    if result.shape != exact.shape:
        return float("inf"), ()
    if not exact.size:
        return 0.0, ()
    at = np.unravel_index(int(np.abs(result - exact).argmax()), exact.shape)
    return error_in_eps(result, exact, eps), tuple(int(k) for k in at)
