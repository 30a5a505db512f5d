"""The part of an array that a Split, SplitV, StridedSlice, Squeeze or Unpack takes.

In come a node and the shape of the array; out go indices and shapes as numpy has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...graphs import Node
from .graph_reader import GraphReader, Place, UnknownValue

_MOST_AXES = 8


class AxisFlags(NamedTuple):
    """What a StridedSlice does along an axis."""

    begins: bool
    """Whether the slice has a number where it begins."""
    ends: bool
    dropped: bool
    """Whether it takes one entry, and the axis is gone."""


class AxisSlice(NamedTuple):
    """What a StridedSlice takes along an axis."""

    start: int | None
    stop: int | None
    dropped: bool


def slice_index(reader: GraphReader, place: Place, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Return the index by which a node takes its part of an array of a shape."""
    node = reader.node(place)
    assert node is not None
    inputs, k, rank = reader.inputs(place.body, node), place.output, len(shape)
    if node.op == "StridedSlice":
        axis_slices = strided_slices(reader, node, inputs)
        exists = len(axis_slices) <= rank
        for size, (start, _, dropped) in zip(shape, axis_slices, strict=False):
            exists = exists and not (dropped and not -size <= (start or 0) < size)
        if not exists:
            raise UnknownValue(f"the node {node.name!r}, which takes a part of the shape {shape} that it does not have")
        return tuple(start or 0 if dropped else slice(start, stop) for start, stop, dropped in axis_slices)
    if node.op == "Squeeze":
        axes = squeezed_axes(node, shape)
        if any(shape[axis] != 1 for axis in axes):
            raise UnknownValue(f"the node {node.name!r}, which drops the axes {axes} of the shape {shape}")
        return tuple(0 if axis in axes else slice(None) for axis in range(rank))
    if node.op in ("Split", "SplitV"):
        axis = checked_axis(node, split_axis(reader, node, inputs), rank)
        return *[slice(None)] * axis, slice(*split_range(reader, place, shape[axis]))
    axis, count = checked_axis(node, node.attrs.get("axis", 0), rank), node.attrs.get("num")
    if count != shape[axis] or not 0 <= k < shape[axis]:
        raise UnknownValue(f"part {k} of the node {node.name!r}, which makes {count} of the shape {shape}")
    return *[slice(None)] * axis, k


def split_axis(reader: GraphReader, node: Node, inputs: Sequence[Place]) -> int:
    """Return the axis that a Split or SplitV cuts, which may be negative."""
    return reader.constant_integer(inputs[0 if node.op == "Split" else 2])


def split_range(reader: GraphReader, place: Place, size: int) -> tuple[int, int]:
    """Return start and stop of the part that an output of a Split or SplitV takes of an axis."""
    node, k = reader.node(place), place.output
    assert node is not None
    count, parts = node.attrs.get("num_split"), list[int]()
    if node.op == "SplitV":
        parts = reader.constant_integers(reader.inputs(place.body, node)[1], rank=1) or []
        if parts.count(-1) == 1:
            parts[parts.index(-1)] = size - sum(parts) - 1  # what the other parts leave
        if len(parts) == count and k < count and min(parts) >= 0 and sum(parts) == size:
            return sum(parts[:k]), sum(parts[: k + 1])
    elif isinstance(count, int) and k < count and size % count == 0:
        return size // count * k, size // count * (k + 1)
    raise UnknownValue(f"part {k} of the node {node.name!r}, which makes {count} of an axis of {size}")


def shape_of(shape: Sequence[int], index: Sequence[int | slice]) -> tuple[int, ...]:
    """Return the shape of the part that an index takes."""
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(len(range(size)[part]) for size, part in zip(shape, parts, strict=True) if isinstance(part, slice))


def checked_axis(node: Node, axis: Any, rank: int) -> int:
    """Return an axis of a node as a number from 0, which must be less than the rank."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise UnknownValue(f"the node {node.name!r}, which is a {node.op} along the axis {axis!r} of {rank}")
    return axis % rank


def strided_axis_flags(reader: GraphReader, node: Node, inputs: Sequence[Place]) -> list[AxisFlags] | None:
    """Return what a StridedSlice does along each axis; None if it takes other parts than rows or columns."""
    attrs = node.attrs
    names = ("begin_mask", "end_mask", "shrink_axis_mask", "ellipsis_mask", "new_axis_mask")
    masks = [attrs.get(name, 0) for name in names]
    if len(inputs) != 4 or not all(isinstance(mask, int) for mask in masks) or masks[3] or masks[4]:
        return None
    strides = reader.constant_integers(inputs[3], rank=1)
    if strides is None or len(strides) > _MOST_AXES or any(stride != 1 for stride in strides):
        return None
    bits = [[bool(mask >> axis & 1) for mask in masks[:3]] for axis in range(len(strides))]
    return [AxisFlags(dropped or not begin, dropped or not end, dropped) for begin, end, dropped in bits]


def strided_slices(reader: GraphReader, node: Node, inputs: Sequence[Place]) -> list[AxisSlice]:
    """Return what a StridedSlice takes along each axis."""
    axes, begin, end = strided_axis_flags(reader, node, inputs), None, None
    if axes is not None:
        begin, end = (reader.constant_integers(place, rank=1) for place in inputs[1:3])
    if axes is None or begin is None or end is None or not len(begin) == len(end) == len(axes):
        raise UnknownValue(f"the node {node.name!r}, which takes other parts than rows or columns")
    axis_slices = []
    for axis, start, stop in zip(axes, begin, end, strict=True):
        if axis.dropped:
            axis_slices.append(AxisSlice(start, start + 1 or None, True))
        else:
            axis_slices.append(AxisSlice(start if axis.begins else None, stop if axis.ends else None, False))
    return axis_slices


def squeezed_axes(node: Node, shape: Sequence[int]) -> list[int]:
    """Return the axes that a Squeeze drops."""
    axes = node.attrs.get("squeeze_dims") or [axis for axis, size in enumerate(shape) if size == 1]
    rank = len(shape)
    if not isinstance(axes, list) or not all(isinstance(axis, int) and -rank <= axis < rank for axis in axes):
        raise UnknownValue(f"the node {node.name!r}, which drops {axes!r}")
    return sorted({axis % rank for axis in axes})  # TensorFlow takes one twice
