"""Parts of weights: what is cut out of variables and constants, and put together to the weights of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....optable import Array
from ..graph.array_slices import index_of
from ..graph.graph_reader import Place, Unknown
from .weight_sources import Source, Sources, Traced

_MOST_VIEWS = 6  # parts of parts

Range = tuple[int, int]


class Piece(NamedTuple):
    """A part of a variable or constant."""

    source: Source
    ranges: tuple[Range, ...]
    """Of each of the source's axes."""
    axes: tuple[int, ...]
    """The source's axes that are left; the others have been dropped."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranges[axis][1] - self.ranges[axis][0] for axis in self.axes)

    @property
    def key(self) -> tuple[object, ...]:
        return self.source.name, self.ranges, self.axes

    def take(self, index: Sequence[int | slice]) -> Piece:
        """A part of it, by an index for the first of the axes that are left, or for all of them."""
        ranges, dropped = [*self.ranges], set[int]()
        for axis, size, part in zip(self.axes, self.shape, index, strict=False):
            first = ranges[axis][0]
            if isinstance(part, int):
                dropped.add(axis)
                part = slice(part % size, part % size + 1)
            start, stop, _ = part.indices(size)
            if start >= stop:
                raise Unknown(f"a part of {self.source.name} that it does not have")
            ranges[axis] = first + start, first + stop
        return self._replace(ranges=tuple(ranges), axes=tuple(axis for axis in self.axes if axis not in dropped))

    def rows(self, start: int, stop: int) -> Piece:
        return self.take([slice(start, stop)])

    def columns(self, start: int, stop: int) -> Piece:
        return self.take([*[slice(None)] * (len(self.axes) - 1), slice(start, stop)])

    def read(self, more: str) -> Array:
        index = [slice(*each) if axis in self.axes else each[0] for axis, each in enumerate(self.ranges)]
        return self.source.read(more)[tuple(index)]


class Pieces:
    """Reads the parts of weights in a graph."""

    def __init__(self, sources: Sources) -> None:
        self._sources, self._reader = sources, sources.reader
        self.piece = Traced(sources.reader, self._made, lambda piece: (piece.key, piece.source.name))
        """The part of a variable or constant that a place is."""

    def _made(self, place: Place, depth: int) -> Piece:
        if depth > _MOST_VIEWS:
            raise Unknown(f"the node {place.name!r}, beyond {_MOST_VIEWS} parts of parts")
        node = self._reader.node(place)
        op = self._reader.op(place)
        if node is None or not op.view:
            source = self._sources.source(place)
            return Piece(source, tuple((0, size) for size in source.shape), tuple(range(len(source.shape))))
        inputs = self._reader.inputs(place.body, node)
        if len(inputs) != op.inputs:
            raise Unknown(f"the node {node.name!r}, which has {len(inputs)} inputs")
        whole = self.piece(inputs[op.arrays][0], depth + 1)
        return whole.take(index_of(self._reader, place, whole.shape))


# ------------------------------------------------------------------------------------------------------------ assembled
def joined(rows: Sequence[Sequence[Piece]]) -> Source:
    """What pieces make, above and beside each other; vectors are one row. Pieces of one whole are that."""
    blocks = [_merged(row, -1) for row in rows]
    if all(len(row) == 1 for row in blocks):
        blocks = [[piece] for piece in _merged([row[0] for row in blocks], 0)]
    pieces = [piece for row in blocks for piece in row]
    if len({piece.source.dtype for piece in pieces}) != 1:
        raise Unknown(f"{pieces[0].source.name} and others of different dtypes")
    uneven = any(piece.shape[:-1] != row[0].shape[:-1] for row in rows for piece in row)
    if uneven or len({sum(piece.shape[-1] for piece in row) for row in rows}) > 1:
        raise Unknown(f"{pieces[0].source.name} and others, which do not fit beside each other")
    if len(pieces) == 1 and pieces[0].shape == pieces[0].source.shape:
        return pieces[0].source

    def read(more: str) -> Array:
        if len(pieces) == 1:
            return pieces[0].read(more)
        return np.concatenate([np.concatenate([each.read(more) for each in row], -1) for row in blocks], 0)

    columns = sum(piece.shape[-1] for piece in rows[0])
    shape = (columns,) if len(pieces[0].shape) == 1 else (sum(row[0].shape[0] for row in rows), columns)
    leaves = tuple(dict.fromkeys(leaf for piece in pieces for leaf in piece.source.leaves))
    return Source(_names(pieces), shape, pieces[0].source.dtype, read, leaves)


def _merged(pieces: Sequence[Piece], axis: int) -> list[Piece]:
    """Neighbours that are one."""
    found = [pieces[0]]
    for piece in pieces[1:]:
        together = _neighbours(found[-1], piece, axis)
        found[-1:] = [found[-1], piece] if together is None else [together]
    return found


def _neighbours(one: Piece, other: Piece, axis: int) -> Piece | None:
    """Two that are neighbours in one source."""
    if one.source.name != other.source.name or one.axes != other.axes:
        return None
    at = one.axes[axis]
    same = all(a == b for k, (a, b) in enumerate(zip(one.ranges, other.ranges, strict=True)) if k != at)
    if not same or one.ranges[at][1] != other.ranges[at][0]:
        return None
    ranges = [*one.ranges]
    ranges[at] = (one.ranges[at][0], other.ranges[at][1])
    return one._replace(ranges=tuple(ranges))


def _names(pieces: Sequence[Piece]) -> str:
    """``"kernel, part 1 of 3"``, ``"kernel, rows 4:8"``, and so on; those of several are joined with " + "."""
    said: dict[str, list[str]] = {}
    for piece in pieces:
        source, at = piece.source, [source_range for source_range in piece.ranges]
        rows = [_part_said("row", *each, size) for each, size in zip(at[:-1], source.shape, strict=False)]
        columns = [_part_said("part", *each, size) for each, size in zip(at[-1:], source.shape[-1:], strict=True)]
        said.setdefault(", ".join([source.name, *filter(None, rows)]), []).extend(filter(None, columns))
    return " + ".join(", ".join([name, " and ".join(dict.fromkeys(parts))] if parts else [name])
                      for name, parts in said.items())  # fmt: skip


def _part_said(what: str, start: int, stop: int, size: int) -> str:
    """Which part of an axis; "" is all of it."""
    width = stop - start
    if width == size:
        return ""
    return (
        f"{what} {start // width} of {size // width}"
        if size % width == start % width == 0
        else f"{what} {start}:{stop}"
    )


def added(sources: Sequence[Source]) -> Source:
    """The sum of several vectors."""
    if len(sources) == 1:
        return sources[0]
    if len({(each.shape, each.dtype) for each in sources}) != 1:
        raise Unknown(f"{sources[0].name} and others of different shapes, which are added")
    name = " + ".join(dict.fromkeys(each.name for each in sources))
    leaves = tuple(dict.fromkeys(leaf for each in sources for leaf in each.leaves))

    def read(more: str) -> Array:
        total = sources[0].read(more).astype(np.float64)  # a layer rounds the sum once, to its own dtype
        for source in sources[1:]:
            total = total + source.read(more)
        return total

    return Source(f"the sum of {name}", sources[0].shape, sources[0].dtype, read, leaves)


def zeros(size: int, dtype: str) -> Source:
    """A bias that is not there."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return Source("zeros: it has no bias", (size,), dtype, lambda more: np.zeros(size, kind), ())
