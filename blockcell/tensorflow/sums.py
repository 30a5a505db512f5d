"""What goes into a gate: a sum of products, biases and numbers, each with its part of a variable.

Cells differ in how they cut the work: one product for all gates that is split, or a split kernel and a product for each
gate; one kernel for [x, h], or two. In a gate's sum all of these are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..optable import Array
from .graphs import Node
from .trace import Place, Source, Tracer, Unknown

ADD = ("Add", "AddV2")
VIEWS = ("Split", "StridedSlice", "Squeeze", "Unpack")
_MOST_TERMS = 32
_MOST_VIEWS = 6  # parts of parts
_MOST_PASSED = 8
_MOST_AXES = 8
_WHOLE = ("int32", "int64")

Range = tuple[int, int]
Cut = Callable[[int], Range]
"""From a size to the part of it that is taken."""


class Other(Exception):
    """This is not the pattern."""


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

    def cut(self, axis: int, start: int, stop: int) -> Piece:
        """The part from `start` to `stop` of an axis."""
        if not -len(self.axes) <= axis < len(self.axes) or not 0 <= start < stop <= self.shape[axis]:
            raise Unknown(f"a part of {self.source.name} that it does not have")
        ranges, first = [*self.ranges], self.ranges[self.axes[axis]][0]
        ranges[self.axes[axis]] = (first + start, first + stop)
        return self._replace(ranges=tuple(ranges))

    def without(self, dropped: Sequence[int]) -> Piece:
        """Without these axes, which have the size 1."""
        if any(not 0 <= axis < len(self.axes) or self.shape[axis] != 1 for axis in dropped):
            raise Unknown(f"a part of {self.source.name} that it does not have")
        return self._replace(axes=tuple(axis for k, axis in enumerate(self.axes) if k not in dropped))

    def read(self, more: str) -> Array:
        index = [slice(*each) if axis in self.axes else each[0] for axis, each in enumerate(self.ranges)]
        return self.source.read(more)[tuple(index)]


class Product(NamedTuple):
    left: Place
    kernel: Piece


@dataclass
class Sum:
    """What is added up."""

    products: list[Product] = field(default_factory=list)
    biases: list[Piece] = field(default_factory=list)
    constant: float = 0.0
    others: list[Place] = field(default_factory=list)


class Sums:
    """Reads a graph's sums, backwards."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._pieces: dict[Place, Piece | str] = {}

    # ---------------------------------------------------------------------------------------------------------- nodes
    def past(self, place: Place) -> Place:
        """Where a value comes from, past nodes that pass it on."""
        for _ in range(_MOST_PASSED):
            node = self.tracer.node(place)
            if node is None or node.op not in ("Identity", "Snapshot"):
                break
            (place, *_) = self.tracer.inputs(place.body, node) or [place]
        return place

    def made(self, place: Place, *ops: str) -> tuple[Node, tuple[Place, ...], int]:
        """The node that makes a value, which must be one of these ops; its inputs, and which output this is."""
        place = self.past(place)
        node = self.tracer.node(place)
        if node is None or (ops and node.op not in ops):
            raise Other
        return node, self.tracer.inputs(place.body, node), place.output

    def op(self, place: Place) -> str:
        node = self.tracer.node(self.past(place))
        return "" if node is None else node.op

    def pair(self, place: Place, *ops: str) -> tuple[Place, Place]:
        _, inputs, _ = self.made(place, *ops)
        if len(inputs) != 2:
            raise Other
        return inputs[0], inputs[1]

    def only(self, place: Place, *ops: str) -> Place:
        _, inputs, _ = self.made(place, *ops)
        if len(inputs) != 1:
            raise Other
        return inputs[0]

    def same(self, one: Place, other: Place) -> bool:
        return self.tracer.straight(one) == self.tracer.straight(other)

    # ----------------------------------------------------------------------------------------------------------- sums
    def sum(self, place: Place, cuts: Sequence[Cut] = ()) -> Sum:
        """What is added up there, of which `cuts` take a part, the last one first."""
        found, left = Sum(), [(place, tuple(cuts))]
        for _ in range(_MOST_TERMS):
            if not left:
                return found
            here, cuts = left.pop(0)
            here = self.past(here)
            node = self.tracer.node(here)
            inputs = self.tracer.inputs(here.body, node) if node is not None else ()
            if node is not None and node.op in (*ADD, "BiasAdd") and len(inputs) == 2:
                left = [*((each, cuts) for each in inputs), *left]
            elif node is not None and node.op in ("Split", "StridedSlice") and (cut := self._cut(here)) is not None:
                left = [(cut[0], (*cuts, cut[1])), *left]
            elif node is not None and node.op == "MatMul":
                self._add_product(found, node, inputs, cuts)
            else:
                self._add_term(found, here, cuts)
        raise Other

    def activated(self, place: Place, op: str) -> Sum:
        """What goes into an activation, of which a part may be taken before or behind it."""
        cuts: list[Cut] = []
        for _ in range(_MOST_VIEWS):
            here = self.past(place)
            if self.op(here) == op:
                return self.sum(self.only(here, op), cuts)
            if self.op(here) not in ("Split", "StridedSlice") or (cut := self._cut(here)) is None:
                break
            place = cut[0]
            cuts.append(cut[1])
        raise Other

    def is_activated(self, place: Place, op: str) -> bool:
        for _ in range(_MOST_VIEWS):
            here = self.past(place)
            if self.op(here) == op:
                return True
            if self.op(here) not in ("Split", "StridedSlice") or (cut := self._cut(here)) is None:
                break
            place = cut[0]
        return False

    def _cut(self, place: Place) -> tuple[Place, Cut] | None:
        """What some columns are taken of, and which."""
        node, inputs, k = self.made(place)
        if node.op == "Split":
            count = node.attrs.get("num_split")
            if len(inputs) != 2 or not isinstance(count, int) or not 0 <= k < count:
                return None
            if self.tracer.number(inputs[0]) not in (1, -1):
                return None
            return inputs[1], lambda size: _part(size, k, count)
        taken = strided(self.tracer, node, inputs)
        if len(taken) != 2 or taken[0] != (None, None, False) or taken[1][2]:
            return None
        start, stop, _ = taken[1]
        return inputs[0], lambda size: _slice(size, start, stop)

    def _add_product(self, found: Sum, node: Node, inputs: tuple[Place, ...], cuts: tuple[Cut, ...]) -> None:
        attrs = node.attrs
        if len(inputs) != 2 or attrs.get("transpose_a") or attrs.get("transpose_b"):
            raise Other
        kernel = self.piece(inputs[1])
        if len(kernel.shape) != 2:
            raise Other
        found.products.append(Product(inputs[0], _taken(kernel, cuts)))

    def _add_term(self, found: Sum, place: Place, cuts: tuple[Cut, ...]) -> None:
        try:
            piece = self.piece(place)
        except Unknown:
            if cuts:
                raise Other from None
            found.others.append(place)
            return
        if not piece.shape:
            found.constant += self.tracer.value(place)
        elif len(piece.shape) == 1:
            found.biases.append(_taken(piece, cuts))
        else:
            raise Other

    # --------------------------------------------------------------------------------------------- parts of variables
    def piece(self, place: Place, depth: int = 0) -> Piece:
        """The part of a variable or constant that a place is."""
        if place not in self._pieces:
            try:
                self._pieces[place] = self._piece(place, depth)
            except Unknown as unknown:
                self._pieces[place] = str(unknown)
        found = self._pieces[place]
        if isinstance(found, str):
            raise Unknown(found)
        return found

    def _piece(self, place: Place, depth: int) -> Piece:
        if depth > _MOST_VIEWS:
            raise Unknown(f"the node {place.name!r}, beyond {_MOST_VIEWS} parts of parts")
        found = [self._view(each, depth) for each in self.tracer.origins(place)]
        if not found:
            raise Unknown(f"{place.name!r}, which comes from nothing but itself")
        if any(each.key != found[0].key for each in found[1:]):
            names = " or ".join(sorted({each.source.name for each in found})[:4])
            raise Unknown(f"{names}: not one weight")
        return found[0]

    def _view(self, place: Place, depth: int) -> Piece:
        tracer = self.tracer
        node = tracer.node(place)
        if node is None or node.op not in VIEWS:
            source = tracer.source(place)
            return Piece(source, tuple((0, size) for size in source.shape), tuple(range(len(source.shape))))
        inputs, attrs = tracer.inputs(place.body, node), node.attrs
        if len(inputs) != {"Split": 2, "StridedSlice": 4}.get(node.op, 1):
            raise Unknown(f"the node {node.name!r}, which has {len(inputs)} inputs")
        piece = self.piece(inputs[node.op == "Split"], depth + 1)
        if node.op == "Split":
            axis, count = tracer.number(inputs[0]), attrs.get("num_split")
            if not isinstance(count, int) or not -len(piece.shape) <= axis < len(piece.shape):
                raise Unknown(f"the node {node.name!r}, which is a Split along an axis that there is not")
            return piece.cut(axis, *_part(piece.shape[axis], place.output, count))
        if node.op == "Squeeze":
            return piece.without(squeezed(node, piece.shape))
        if node.op == "Unpack":
            axis = unpacked(node, len(piece.shape))
            return piece.cut(axis, place.output, place.output + 1).without([axis])
        taken = strided(tracer, node, inputs)
        if len(taken) > len(piece.shape):
            raise Unknown(f"the node {node.name!r}, which takes parts along axes that there are not")
        for axis, (start, stop, _) in enumerate(taken):
            piece = piece.cut(axis, *_slice(piece.shape[axis], start, stop))
        return piece.without([axis for axis, (*_, dropped) in enumerate(taken) if dropped])


def _taken(piece: Piece, cuts: tuple[Cut, ...]) -> Piece:
    """Some of the last axis."""
    for cut in reversed(cuts):
        piece = piece.cut(-1, *cut(piece.shape[-1]))
    return piece


def _part(size: int, k: int, count: int) -> Range:
    if not 0 <= k < count or size % count:
        raise Unknown(f"part {k} of {count} of something of size {size}")
    return k * size // count, (k + 1) * size // count


def _slice(size: int, start: int | None, stop: int | None) -> Range:
    first, last, _ = slice(start, stop).indices(size)
    return first, last


# ------------------------------------------------------------------------------------------------ what nodes' attrs say
def strided(tracer: Tracer, node: Node, inputs: tuple[Place, ...]) -> list[tuple[int | None, int | None, bool]]:
    """Of a StridedSlice, for each axis: start, stop, and whether the axis is dropped."""
    attrs = node.attrs
    names = ("begin_mask", "end_mask", "shrink_axis_mask", "ellipsis_mask", "new_axis_mask")
    masks = [attrs.get(name, 0) for name in names]
    if len(inputs) != 4 or not all(isinstance(mask, int) for mask in masks) or masks[3] or masks[4]:
        raise Unknown(f"the node {node.name!r}, which takes other parts than rows or columns")
    begin, end, strides = (_numbers(tracer, each) for each in inputs[1:])
    if not len(begin) == len(end) == len(strides) or any(stride != 1 for stride in strides):
        raise Unknown(f"the node {node.name!r}, which takes other parts than rows or columns")
    found: list[tuple[int | None, int | None, bool]] = []
    for axis, (start, stop) in enumerate(zip(begin, end, strict=True)):
        if masks[2] >> axis & 1:
            found.append((start, start + 1 or None, True))
        else:
            found.append((None if masks[0] >> axis & 1 else start, None if masks[1] >> axis & 1 else stop, False))
    return found


def _numbers(tracer: Tracer, place: Place) -> list[int]:
    """A constant that is a few whole numbers."""
    node = tracer.node(tracer.straight(place))
    stored = None if node is None else tracer.graph.constant(node)
    if stored is None or len(stored.shape) != 1 or stored.shape[0] > _MOST_AXES or stored.dtype not in _WHOLE:
        raise Unknown(f"{place.name!r}, which is not a few whole numbers")
    return [int(number) for number in stored.read()]


def squeezed(node: Node, shape: Sequence[int]) -> list[int]:
    """The axes that a Squeeze drops."""
    axes = node.attrs.get("squeeze_dims") or [axis for axis, size in enumerate(shape) if size == 1]
    rank = len(shape)
    if not isinstance(axes, list) or not all(isinstance(axis, int) and -rank <= axis < rank for axis in axes):
        raise Unknown(f"the node {node.name!r}, which drops {axes!r}")
    return sorted({axis % rank for axis in axes})  # TensorFlow takes one twice


def unpacked(node: Node, rank: int) -> int:
    """The axis that an Unpack drops."""
    axis = node.attrs.get("axis", 0)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise Unknown(f"the node {node.name!r}, which drops the axis {axis!r}")
    return axis % rank


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
        together = _together(found[-1], piece, axis)
        found[-1:] = [found[-1], piece] if together is None else [together]
    return found


def _together(one: Piece, other: Piece, axis: int) -> Piece | None:
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
        total = sources[0].read(more)
        for each in sources[1:]:
            total = total + each.read(more)
        return total

    return Source(f"the sum of {name}", sources[0].shape, sources[0].dtype, read, leaves)


def zeros(size: int, dtype: str) -> Source:
    """A bias that is not there."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return Source("zeros: it has no bias", (size,), dtype, lambda more: np.zeros(size, kind), ())
