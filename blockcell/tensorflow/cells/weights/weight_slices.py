"""Slices of weights: what is cut out of variables and constants, and joined to the weights of a layer.

In come slices of kernels and biases; out goes the weight that they are together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ....optable import Array
from ..graph.graph_reader import UnknownValue

AVERAGE = "/ExponentialMovingAverage"  # how the name of a variable's moving average ends
IndexRange = tuple[int, int]


class WeightSource(NamedTuple):
    """A weight, made of variables and constants."""

    name: str
    """The names of its variables and constants, joined with " + "."""
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[str], Array]
    """Reads the values; the argument is appended to the names of variables, for another copy of them."""
    leaves: tuple[str, ...]
    """Its variables and constants; one that the checkpoint lacks begins with "?"."""

    def whole(self) -> WeightSlice:
        return WeightSlice(self, tuple((0, size) for size in self.shape), tuple(range(len(self.shape))))


class WeightSlice(NamedTuple):
    """A slice of a variable or constant."""

    source: WeightSource
    ranges: tuple[IndexRange, ...]
    """Start and stop for each axis of the source."""
    axes: tuple[int, ...]
    """The axes of the source that are left; the others are dropped."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranges[axis][1] - self.ranges[axis][0] for axis in self.axes)

    @property
    def name(self) -> str:
        """The name of the source, of a part with its index: ``"kernel[:, 4:8]"``."""
        sized = zip(self.ranges, self.source.shape, strict=True)
        index = [":" if limits == (0, size) else "{}:{}".format(*limits) for limits, size in sized]
        return self.source.name if {*index} <= {":"} else f"{self.source.name}[{', '.join(index)}]"

    @property
    def key(self) -> tuple[object, ...]:
        return self.source.name, self.ranges, self.axes

    def slice(self, index: Sequence[int | slice]) -> WeightSlice:
        """Slice a slice, by an index for the first of the axes that are left, or for all of them."""
        ranges, dropped = [*self.ranges], set[int]()
        for axis, size, part in zip(self.axes, self.shape, index, strict=False):
            first = ranges[axis][0]
            if isinstance(part, int):
                dropped.add(axis)
                part = slice(part % size, part % size + 1)
            start, stop, _ = part.indices(size)
            if start >= stop:
                raise UnknownValue(f"a part of {self.source.name} that it does not have")
            ranges[axis] = first + start, first + stop
        return self._replace(ranges=tuple(ranges), axes=tuple(axis for axis in self.axes if axis not in dropped))

    def rows(self, start: int, stop: int) -> WeightSlice:
        return self.slice([slice(start, stop)])

    def columns(self, start: int, stop: int) -> WeightSlice:
        return self.slice([*[slice(None)] * (len(self.axes) - 1), slice(start, stop)])

    def read(self, suffix: str) -> Array:
        index = [slice(*limits) if axis in self.axes else limits[0] for axis, limits in enumerate(self.ranges)]
        return self.source.read(suffix)[tuple(index)]


def join_slices(rows: Sequence[Sequence[WeightSlice]]) -> WeightSource:
    """Join rows of slices to one weight, vectors in one row; the slices of a whole source are that source."""
    if not all(piece.shape for row in rows for piece in row):
        raise UnknownValue(f"columns of {rows[0][0].source.name} that it does not have")
    blocks = [_merge_neighbours(row, -1) for row in rows]
    if all(len(row) == 1 for row in blocks):
        blocks = [[piece] for piece in _merge_neighbours([row[0] for row in blocks], 0)]
    pieces = [piece for row in blocks for piece in row]
    if len({piece.source.dtype for piece in pieces}) != 1:
        raise UnknownValue(f"{pieces[0].source.name} and others of different dtypes")
    uneven = any(piece.shape[:-1] != row[0].shape[:-1] for row in rows for piece in row)
    if uneven or len({sum(piece.shape[-1] for piece in row) for row in rows}) > 1:
        raise UnknownValue(f"{pieces[0].source.name} and others, which do not fit beside each other")
    if len(pieces) == 1 and pieces[0].shape == pieces[0].source.shape:
        return pieces[0].source

    def read(suffix: str) -> Array:
        if len(pieces) == 1:
            return pieces[0].read(suffix)
        return np.concatenate([np.concatenate([piece.read(suffix) for piece in row], -1) for row in blocks], 0)

    columns = sum(piece.shape[-1] for piece in rows[0])
    shape = (columns,) if len(pieces[0].shape) == 1 else (sum(row[0].shape[0] for row in rows), columns)
    leaves = tuple(dict.fromkeys(leaf for piece in pieces for leaf in piece.source.leaves))
    return WeightSource(
        " + ".join(dict.fromkeys(piece.name for piece in pieces)), shape, pieces[0].source.dtype, read, leaves
    )


def _merge_neighbours(pieces: Sequence[WeightSlice], axis: int) -> list[WeightSlice]:
    """Merge slices that are neighbours in one source."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        union = _join_neighbours(merged[-1], piece, axis)
        merged[-1:] = [merged[-1], piece] if union is None else [union]
    return merged


def _join_neighbours(left: WeightSlice, right: WeightSlice, axis: int) -> WeightSlice | None:
    """Join two slices that are neighbours in one source; None if they are not."""
    if left.source.name != right.source.name or left.axes != right.axes:
        return None
    along = left.axes[axis]
    aligned = all(a == b for k, (a, b) in enumerate(zip(left.ranges, right.ranges, strict=True)) if k != along)
    if not aligned or left.ranges[along][1] != right.ranges[along][0]:
        return None
    ranges = [*left.ranges]
    ranges[along] = (left.ranges[along][0], right.ranges[along][1])
    return left._replace(ranges=tuple(ranges))


def add_vectors(sources: Sequence[WeightSource]) -> WeightSource:
    """Add several vectors."""
    if len(sources) == 1:
        return sources[0]
    if len({(source.shape, source.dtype) for source in sources}) != 1:
        raise UnknownValue(f"{sources[0].name} and others of different shapes, which are added")
    name = " + ".join(dict.fromkeys(source.name for source in sources))
    leaves = tuple(dict.fromkeys(leaf for source in sources for leaf in source.leaves))

    def read(suffix: str) -> Array:
        total = sources[0].read(suffix).astype(np.float64)  # a layer rounds the sum once, to its own dtype
        for source in sources[1:]:
            total = total + source.read(suffix)
        return total

    return WeightSource(f"the sum of {name}", sources[0].shape, sources[0].dtype, read, leaves)


def zero_bias(size: int, dtype: str) -> WeightSource:
    """Make the zeros of a layer's bias for a cell without a bias."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return WeightSource("zeros: it has no bias", (size,), dtype, lambda suffix: np.zeros(size, kind), ())
