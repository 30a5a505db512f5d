"""Masks: each row's counted steps move to the front, the layer runs on them, and its results move back.

So a step that is skipped cannot touch any result, and the others have the bits that they have without it. There is no
indexing by arrays here: when memory is short, numpy crashes in it, unlike in ``take``.
"""

from __future__ import annotations

import numpy as np

from ..optable import Array
from .shared import Directions, columns_of


def rows_at(array: Array, steps: Array) -> Array:
    """Copy from [T,B,...] the steps of each row that stand in its column of `steps`."""
    T, B = array.shape[:2]
    rows = np.arange(B)
    if array.swapaxes(0, 1).flags.c_contiguous:  # batch first
        flat, positions = array.swapaxes(0, 1), rows * T + steps
    else:
        flat, positions = array, steps * B + rows
    result: Array = flat.reshape(T * B, *array.shape[2:]).take(positions, axis=0)
    return result


class CountedSteps:
    """The steps of each row that count, and where they go.

    Step k of row b of a gathered array is the row's counted step number k. Past the number of them, ``lengths[b]``, a
    gathered array holds anything.

    Parameters
    ----------
    mask : ndarray (T, B) of bool
        Which steps count.
    repeat : bool
        Whether y repeats at steps that are skipped; otherwise it is zero there.
    """

    def __init__(self, mask: Array, repeat: bool) -> None:
        self.mask, self.repeat = mask, repeat
        self.counted: Array = mask.cumsum(axis=0)  # up to and with each step
        self.lengths: Array = mask.sum(axis=0, dtype=np.int64)
        self.step_count = int(self.lengths.max(initial=0))
        self.rows: Array = np.arange(mask.shape[1])
        steps = np.argsort(~mask, axis=0, kind="stable")[: self.step_count]
        steps = np.where(np.arange(self.step_count)[:, None] < self.lengths, steps, 0)
        # Past a row's last counted step stands that one, or step 0 where there is none. What is there is ignored.
        self.steps: Array = np.maximum.accumulate(steps, axis=0)

    def gather(self, array: Array) -> Array:
        """Copy the counted steps of [T,B,...]."""
        return rows_at(array, self.steps)

    def gather_resets(self, reset: Array) -> Array:
        """Return for each counted step whether there is a reset at it, or since the counted step before it."""
        result: Array = np.diff(self.gather(reset.cumsum(axis=0)), axis=0, prepend=0) > 0
        return result

    def scatter(self, array: Array, result: Array, reverse: bool = False, repeat: bool = False) -> None:
        """Move the counted steps back to `result` [T,B,...].

        A step that is skipped becomes zero, or with `repeat` the last counted step before it in the order of the
        direction, if there is one.
        """
        sources = self.counted - self.mask if reverse else self.counted - 1
        has_source = (sources >= 0) & (sources < self.lengths) if repeat else self.mask
        if self.step_count:
            rows = array.reshape(self.step_count * len(self.rows), *array.shape[2:])
            result[...] = rows.take(sources * len(self.rows) + self.rows, axis=0, mode="clip")
        np.copyto(result, 0, where=~has_source[:, :, None])

    def scatter_y(self, y: Array, directions: Directions, result: Array) -> None:
        """Move the counted steps of y back, each direction by its own order if y repeats."""
        if not self.repeat:
            self.scatter(y, result)
            return
        for columns, reverse in columns_of(directions):
            self.scatter(y[:, :, columns], result[:, :, columns], reverse, True)

    def gather_d_y(self, d_y: Array, directions: Directions) -> Array:
        """Return the gradient to the gathered y; where y repeats, the gradients to all repetitions are added."""
        if not self.repeat:
            return self.gather(d_y)
        total = np.empty(d_y.shape, d_y.dtype)
        for columns, reverse in columns_of(directions):
            self._add_repetitions(d_y[:, :, columns], total[:, :, columns], reverse)
        return self.gather(total)

    def _add_repetitions(self, d_y: Array, total: Array, reverse: bool) -> None:
        """Add up from the last repetition to the first, and then the step itself; float16 in float32, rounded once."""
        dtype = np.dtype(np.float32) if d_y.dtype == np.float16 else d_y.dtype
        added, is_empty = np.zeros(d_y.shape[1:], dtype), np.ones((len(self.rows), 1), bool)
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(len(d_y))[:: 1 if reverse else -1]:
                value = d_y[t].astype(dtype)
                added = np.where(is_empty, value, added + value)
                total[t] = added
                is_empty = self.mask[t][:, None]


def has_gaps(mask: Array) -> bool:
    """Return whether a step of a row counts after one that does not, by a mask [T,B]."""
    return bool((mask[1:] & ~mask[:-1]).any())


def count_steps(
    mask: Array | None, lengths: Array | None, T: int, repeat: bool
) -> tuple[CountedSteps | None, Array | None]:
    """Return the steps that count by both the mask and the lengths, if they have to move, and how many each row has.

    Nothing has to move where the steps are each row's first ones.
    """
    if lengths is not None:
        is_within = np.arange(T)[:, None] < lengths
        mask = is_within if mask is None else mask & is_within
    if mask is None or mask.all():
        return None, None
    if repeat or has_gaps(mask):
        steps = CountedSteps(mask, repeat)
        return steps, steps.lengths
    return None, mask.sum(axis=0, dtype=np.int64)
