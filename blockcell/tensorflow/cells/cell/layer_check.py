"""The check of a layer against the nodes of its cell: both compute one step of random rows, the nodes in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....formulas import error_in_eps
from ....layers import GRU, LSTM, RNN
from ....optable import Array, Kind

Weights = Mapping[str, Array]
State = tuple[Array, ...]

ROWS = 3  # of one call of the nodes
_CALLS = 8, 128  # at least, at most: Few units need more rows, for some to meet gates that are not saturated.
_UNITS_IN_ALL = 256
_LARGEST = 100.0  # of the entries of x
_DRAWS = 3  # of rounding errors
_FACTOR = 16.0  # Of 2,000 random cells, no layer was off by more than 6 times what the random rounding errors make.
_WHOLE = 2**20  # entries of the largest array that gets rounding errors; those of x and of the state do for larger ones


class Check(float):
    """The largest error of a layer against its cell's nodes in float64, in eps of the largest entry.

    Attributes
    ----------
    bound : float
        The largest allowed error.
    """

    bound: float

    def __new__(cls, error: float, bound: float) -> Check:
        check = super().__new__(cls, error)
        check.bound = bound
        return check

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return float(self), self.bound

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound, which NaN is not."""
        return self <= self.bound


def compare(
    layer: LSTM | GRU | RNN,
    step: Callable[[Weights, Array, State], State],
    weights: Weights,
    rows: Sequence[Array],
    floor: float,
) -> Check:
    """Compare one step of a layer with the same step in float64, from x and the state before it.

    The bound is `floor`. If the layer is off by more, it is what the rounding errors of a float32 computation make of
    the step, times a factor: the step is computed in float64 from numbers with random errors as large as float32's,
    which large weights amplify as they amplify those of the layer.
    """
    g = np.random.default_rng(1)
    eps = float(np.finfo(layer.dtype).eps)
    computed_eps = min(eps, float(np.finfo(np.float32).eps))  # layers of float16 compute in float32

    def compute(error: float) -> State:
        """Compute the step in float64 with a random relative error of each number."""
        inexact = {name: _with_errors(array, error, g) for name, array in weights.items()}
        inputs = [_with_errors(array, error, g).reshape(-1, ROWS, array.shape[1]) for array in rows]
        results = [step(inexact, x, tuple(state)) for x, *state in zip(*inputs, strict=True)]
        return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))

    def largest_error(results: Sequence[Array]) -> float:
        return float(np.max([error_in_eps(*pair, eps) for pair in zip(results, exact, strict=True)]))

    exact = compute(0)
    x, *state = rows
    _, last = layer(x[None], tuple(state))
    error, bound = largest_error(last), floor
    if error > floor:
        bound = max(floor, _FACTOR * max(largest_error(compute(computed_eps)) for _ in range(_DRAWS)))
    return Check(error, bound)


def _with_errors(array: Array, error: float, g: np.random.Generator) -> Array:
    """Return an array in float64 with random relative errors of up to `error`; a large one as it is."""
    if array.size > _WHOLE:
        return array
    return array * (1 + error * g.uniform(-1, 1, array.shape)) if error else array.astype(np.float64)


def draw_rows(
    sizes: Sequence[int], weights: Mapping[Kind, Sequence[Array]], dtype: Any, *, may_overflow: bool
) -> list[Array]:
    """Draw x and the state of a check, from the weights of each kind; `sizes` are I and those of the states.

    Large weights and biases saturate gates, and a saturated gate hides what is wrong with it. So each row is smaller
    than the one before: products of weights with the first outweigh the biases, those with the last are about one.
    If the activations may overflow, all rows are as small as the last.
    """
    g = np.random.default_rng(0)
    norms = np.concatenate([np.linalg.norm(matrix.astype(np.float64), axis=0) for matrix in weights["matrix"]])
    smallest = 1 / _largest([norms])
    largest = min(_LARGEST, max(1.0, 2 * _largest(weights["bias"]) / max(float(np.median(norms)), 1e-30)))
    count = ROWS * int(np.clip(_UNITS_IN_ALL // sizes[-1], *_CALLS))
    scale = np.geomspace(smallest if may_overflow else largest, smallest, count)[:, None]
    cell_state_scale = np.geomspace(1, 1 / _largest(weights["peephole"]), count)[:, None]
    x = g.standard_normal((count, sizes[0])) * scale
    states = [g.uniform(-1, 1, (count, size)) for size in sizes[1:]]
    scales = [cell_state_scale, scale][-len(states) :]  # cs, if there is one, and h
    scaled = [x, *(state * state_scale for state, state_scale in zip(states, scales, strict=True))]
    return [array.astype(dtype) for array in scaled]


def _largest(arrays: Sequence[Array]) -> float:
    """Return the largest absolute entry, at least one; finite, whatever weights are."""
    return max([1.0, *(float(np.nan_to_num(np.abs(array.astype(np.float64))).max(initial=0)) for array in arrays)])
