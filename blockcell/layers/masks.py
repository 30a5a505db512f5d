"""Masks: each row's counted steps move to the front, the layer runs on them, and its results move back.

So a step that is left out cannot touch any result, and the others have the bits that they have without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..optable import Array


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
        self.rows: Array = np.arange(mask.shape[1])
        t, b = np.nonzero(mask)
        self.steps: Array = np.zeros((int(self.lengths.max(initial=0)), mask.shape[1]), np.intp)  # of the gathered ones
        self.steps[self.counted[t, b] - 1, b] = t
        np.maximum.accumulate(self.steps, axis=0, out=self.steps)  # past a row's last one that one, so x is not read

    def gather(self, array: Array) -> Array:
        """From [T,B,...], a copy."""
        return array[self.steps, self.rows]

    def gather_resets(self, reset: Array) -> Array:
        """Whether there is a reset between the counted step before and the step, or at the step."""
        return np.diff(self.gather(reset.cumsum(axis=0)), axis=0, prepend=0) > 0

    def _sources(self, reverse: bool) -> tuple[Array, Array]:
        """For each step, the last counted one up to it in the order of the direction, and whether there is one."""
        sources = self.counted - self.mask if reverse else self.counted - 1
        return sources, (sources >= 0) & (sources < self.lengths)

    def scatter(self, array: Array, result: Array) -> None:
        """Back to [T,B,...], with zeros where a step is left out."""
        result[...] = 0
        result[self.mask] = array[self._sources(False)[0][self.mask], np.nonzero(self.mask)[1]]

    def scatter_y(self, y: Array, halves: Iterable[tuple[int, bool]], result: Array) -> None:
        """The same, where y may repeat. `halves` has sizes and directions of what stands side by side in y."""
        if not self.repeat:
            self.scatter(y, result)
            return
        at = 0
        for size, reverse in halves:
            sources, found = self._sources(reverse)
            half = result[:, :, at : at + size]
            half[...] = y[np.where(found, sources, 0), self.rows, at : at + size] if len(y) else 0
            half[~found] = 0
            at += size

    def gather_d_y(self, d_y: Array, halves: Iterable[tuple[int, bool]]) -> Array:
        """The gradient to the gathered y: where y repeats, that to every repetition is added."""
        result, at = self.gather(d_y), 0
        if self.repeat:
            for size, reverse in halves:
                self._add_repeated(result[:, :, at : at + size], d_y[:, :, at : at + size], reverse)
                at += size
        return result

    def _add_repeated(self, result: Array, d_y: Array, reverse: bool) -> None:
        """Step after step in the order of the direction; float16 is summed in float32 and rounded once."""
        sources, found = self._sources(reverse)
        repeated = found & ~self.mask
        steps = np.flatnonzero(repeated.any(axis=1))
        total = result.astype(np.float32) if result.dtype == np.float16 else result
        with np.errstate(over="ignore", invalid="ignore"):
            for t in steps[::-1] if reverse else steps:
                rows = np.flatnonzero(repeated[t])
                total[sources[t, rows], rows] += d_y[t, rows]
            if total is not result:
                result[...] = total


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
