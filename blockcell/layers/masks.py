"""Masks: each row's counted steps move to the front, the layer runs on them, and its results move back.

So a step that is left out cannot touch any result, and the others have the bits that they have without it. There is no
indexing by arrays here: when memory is short, numpy crashes in it, unlike in ``take``.
"""

from __future__ import annotations

import numpy as np

from ..optable import Array
from .shared import Directions


def rows_at(array: Array, steps: Array) -> Array:
    """Of [T,B,...], for each row the steps that stand in a column of `steps`; a copy."""
    T, B = array.shape[:2]
    rows = np.arange(B)
    if array.swapaxes(0, 1).flags.c_contiguous:  # batch first
        flat, places = array.swapaxes(0, 1), rows * T + steps
    else:
        flat, places = array, steps * B + rows
    result: Array = flat.reshape(T * B, *array.shape[2:]).take(places, axis=0)
    return result


class CountedSteps:
    """Where the steps of each row that count are, and where they go.

    Step k of row b of a gathered array is the row's counted step number k. Past the number of them, ``lengths[b]``, a
    gathered array holds anything.
    """

    def __init__(self, mask: Array, repeat: bool) -> None:
        """`repeat`: y repeats where a step is left out; else it is zero there."""
        self.mask, self.repeat = mask, repeat
        self.counted: Array = mask.cumsum(axis=0)  # up to and with each step
        self.lengths: Array = mask.sum(axis=0, dtype=np.int64)
        self.end = int(self.lengths.max(initial=0))
        self.rows: Array = np.arange(mask.shape[1])
        steps = np.argsort(~mask, axis=0, kind="stable")[: self.end]
        steps = np.where(np.arange(self.end)[:, None] < self.lengths, steps, 0)
        # Past a row's last counted step stands that one, or step 0 where there is none. What is there is ignored.
        self.steps: Array = np.maximum.accumulate(steps, axis=0)

    def gather(self, array: Array) -> Array:
        """From [T,B,...], a copy."""
        return rows_at(array, self.steps)

    def gather_resets(self, reset: Array) -> Array:
        """Whether there is a reset between the counted step before and the step, or at the step."""
        result: Array = np.diff(self.gather(reset.cumsum(axis=0)), axis=0, prepend=0) > 0
        return result

    def scatter(self, array: Array, result: Array, reverse: bool = False, repeat: bool = False) -> None:
        """Back to [T,B,...]. Where a step is left out there are zeros, or what stands at the last counted step before
        it in the order of the direction, if there is one."""
        sources = self.counted - self.mask if reverse else self.counted - 1
        has_source = (sources >= 0) & (sources < self.lengths) if repeat else self.mask
        if self.end:
            rows = array.reshape(self.end * len(self.rows), *array.shape[2:])
            result[...] = rows.take(sources * len(self.rows) + self.rows, axis=0, mode="clip")
        np.copyto(result, 0, where=~has_source[:, :, None])

    def scatter_y(self, y: Array, parts: Directions, result: Array) -> None:
        """The same, where y may repeat."""
        if not self.repeat:
            self.scatter(y, result)
            return
        at = 0
        for size, reverse in parts:
            self.scatter(y[:, :, at : at + size], result[:, :, at : at + size], bool(reverse), True)
            at += size

    def gather_d_y(self, d_y: Array, parts: Directions) -> Array:
        """The gradient to the gathered y: where y repeats, that to every repetition is added."""
        if not self.repeat:
            return self.gather(d_y)
        total, at = np.empty(d_y.shape, d_y.dtype), 0
        for size, reverse in parts:
            self._add_up(d_y[:, :, at : at + size], total[:, :, at : at + size], bool(reverse))
            at += size
        return self.gather(total)

    def _add_up(self, d_y: Array, total: Array, reverse: bool) -> None:
        """From the last repetition to the first, and then to the step itself; float16 in float32, rounded once."""
        kind = np.dtype(np.float32) if d_y.dtype == np.float16 else d_y.dtype
        added, nothing = np.zeros(d_y.shape[1:], kind), np.ones((len(self.rows), 1), bool)
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(len(d_y))[:: 1 if reverse else -1]:
                value = d_y[t].astype(kind)
                added = np.where(nothing, value, added + value)
                total[t] = added
                nothing = self.mask[t][:, None]


def count(mask: Array | None, lengths: Array | None, T: int, repeat: bool) -> tuple[CountedSteps | None, Array | None]:
    """Which steps count by both, and as lengths: how many. Nothing has to move where they are each row's first ones."""
    if lengths is not None:
        within = np.arange(T)[:, None] < lengths
        mask = within if mask is None else mask & within
    if mask is None or mask.all():
        return None, None
    if repeat or (mask[1:] & ~mask[:-1]).any():
        steps = CountedSteps(mask, repeat)
        return steps, steps.lengths
    return None, mask.sum(axis=0, dtype=np.int64)
