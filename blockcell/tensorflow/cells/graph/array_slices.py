"""Nodes that take a part of an array, Split, SplitV, StridedSlice, Squeeze and Unpack: which part that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...graphs import Node
from .graph_reader import Place, Reader, Unknown

_MOST_AXES = 8


class Axis(NamedTuple):
    """What a StridedSlice does along an axis."""

    begins: bool
    """Whether there is a number where it begins."""
    ends: bool
    dropped: bool
    """Whether it takes one entry, and the axis is gone."""


class Taken(NamedTuple):
    """What a StridedSlice takes along an axis."""

    start: int | None
    stop: int | None
    dropped: bool


def index_of(reader: Reader, place: Place, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """The part that a view takes of an array of this shape."""
    node = reader.node(place)
    assert node is not None
    inputs, k, rank = reader.inputs(place.body, node), place.output, len(shape)
    if node.op == "StridedSlice":
        taken = strided(reader, node, inputs)
        fits = len(taken) <= rank
        for size, (start, _, dropped) in zip(shape, taken, strict=False):
            fits = fits and not (dropped and not -size <= (start or 0) < size)
        if not fits:
            raise Unknown(f"the node {node.name!r}, which takes a part of the shape {shape} that it does not have")
        return tuple(start or 0 if dropped else slice(start, stop) for start, stop, dropped in taken)
    if node.op == "Squeeze":
        axes = squeezed(node, shape)
        if any(shape[axis] != 1 for axis in axes):
            raise Unknown(f"the node {node.name!r}, which drops the axes {axes} of the shape {shape}")
        return tuple(0 if axis in axes else slice(None) for axis in range(rank))
    if node.op in ("Split", "SplitV"):
        axis = axis_of(node, split_axis(reader, node, inputs), rank)
        return *[slice(None)] * axis, slice(*split_range(reader, place, shape[axis]))
    axis, said = unpacked(node, rank), node.attrs.get("num")
    if said != shape[axis] or not 0 <= k < shape[axis]:
        raise Unknown(f"part {k} of the node {node.name!r}, which makes {said} of the shape {shape}")
    return *[slice(None)] * axis, k


def split_axis(reader: Reader, node: Node, inputs: Sequence[Place]) -> int:
    """The axis that a Split or SplitV cuts, which may be negative."""
    return reader.number(inputs[0 if node.op == "Split" else 2])


def split_range(reader: Reader, place: Place, size: int) -> tuple[int, int]:
    """Start and stop of one part that a Split or SplitV makes of an axis of some size."""
    node, k = reader.node(place), place.output
    assert node is not None
    count, parts = node.attrs.get("num_split"), list[int]()
    if node.op == "SplitV":
        parts = reader.numbers(reader.inputs(place.body, node)[1], rank=1) or []
        if parts.count(-1) == 1:
            parts[parts.index(-1)] = size - sum(parts) - 1  # what the other parts leave
        if len(parts) == count and k < count and min(parts) >= 0 and sum(parts) == size:
            return sum(parts[:k]), sum(parts[: k + 1])
    elif isinstance(count, int) and k < count and size % count == 0:
        return size // count * k, size // count * (k + 1)
    raise Unknown(f"part {k} of the node {node.name!r}, which makes {count} of an axis of {size}")


def shape_of(shape: Sequence[int], index: Sequence[int | slice]) -> tuple[int, ...]:
    """The shape of the part that an index takes."""
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(len(range(size)[part]) for size, part in zip(shape, parts, strict=True) if isinstance(part, slice))


def axis_of(node: Node, axis: int, rank: int) -> int:
    """The axis that a node means."""
    if not -rank <= axis < rank:
        raise Unknown(f"the node {node.name!r}, which is a {node.op} along the axis {axis} of {rank}")
    return axis % rank


def strided_axes(reader: Reader, node: Node, inputs: Sequence[Place]) -> list[Axis] | None:
    """Of a StridedSlice, what it does along each axis; None if it takes other parts than rows or columns."""
    attrs = node.attrs
    names = ("begin_mask", "end_mask", "shrink_axis_mask", "ellipsis_mask", "new_axis_mask")
    masks = [attrs.get(name, 0) for name in names]
    if len(inputs) != 4 or not all(isinstance(mask, int) for mask in masks) or masks[3] or masks[4]:
        return None
    strides = reader.numbers(inputs[3], rank=1)
    if strides is None or len(strides) > _MOST_AXES or any(stride != 1 for stride in strides):
        return None
    bits = [[bool(mask >> axis & 1) for mask in masks[:3]] for axis in range(len(strides))]
    return [Axis(dropped or not begin, dropped or not end, dropped) for begin, end, dropped in bits]


def strided(reader: Reader, node: Node, inputs: Sequence[Place]) -> list[Taken]:
    """Of a StridedSlice, what it takes along each axis."""
    axes = strided_axes(reader, node, inputs)
    begin, end = (reader.numbers(each, rank=1) for each in inputs[1:3]) if axes is not None else (None, None)
    if axes is None or begin is None or end is None or not len(begin) == len(end) == len(axes):
        raise Unknown(f"the node {node.name!r}, which takes other parts than rows or columns")
    found = []
    for axis, start, stop in zip(axes, begin, end, strict=True):
        if axis.dropped:
            found.append(Taken(start, start + 1 or None, True))
        else:
            found.append(Taken(start if axis.begins else None, stop if axis.ends else None, False))
    return found


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
