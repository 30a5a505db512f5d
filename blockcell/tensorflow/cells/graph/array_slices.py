"""The part of an array that a Split, SplitV, StridedSlice, Squeeze or Unpack takes.

In come a node and the shape of the array; out go indices and shapes as numpy has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...graphs import Node
from .graph_reader import GraphReader, Place, UnknownValue


def slice_index(reader: GraphReader, place: Place, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Return the index by which a node takes its part of an array of a shape."""
    node = reader.node(place)
    assert node is not None
    inputs, k, rank = reader.inputs(place.body, node), place.output, len(shape)
    if node.op == "StridedSlice":
        index = read_strided_index(reader, node, inputs)
        dropped = [(part, size) for part, size in zip(index, shape, strict=False) if isinstance(part, int)]
        if len(index) > rank or not all(-size <= part < size for part, size in dropped):
            raise UnknownValue(f"the node {node.name!r}, which takes a part of the shape {shape} that it does not have")
        return tuple(index)
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


def strided_index(
    attrs: Mapping[str, Any], begin: Sequence[int], end: Sequence[int], strides: Sequence[int]
) -> list[Any]:
    """Return the index of a StridedSlice, as numpy has it."""
    names = ("begin_mask", "end_mask", "shrink_axis_mask", "new_axis_mask", "ellipsis_mask")
    masks = [int(attrs.get(name, 0)) for name in names]
    index: list[Any] = []
    for k, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True)):
        begins_anywhere, ends_anywhere, is_dropped, is_new, is_rest = (mask >> k & 1 for mask in masks)
        if is_rest:
            index.append(...)
        elif is_new:
            index.append(None)
        elif is_dropped:
            index.append(first)
        else:
            step = None if stride == 1 else stride
            index.append(slice(None if begins_anywhere else first, None if ends_anywhere else last, step))
    return index


def read_strided_index(
    reader: GraphReader, node: Node, inputs: Sequence[Place], *, anywhere: bool = False
) -> list[int | slice]:
    """Return the index of a StridedSlice of rows and columns; `anywhere` takes zeros for where these begin and end."""
    index: list[Any] = [None]
    if len(inputs) == 4:
        begin, end, strides = (reader.constant_integers(place, rank=1) for place in inputs[1:])
        if anywhere:
            begin = end = [0] * len(strides or ())
        with suppress(TypeError, ValueError):  # an attribute is no number, or there are not as many of each
            index = strided_index(node.attrs, begin or (), end or (), strides or ())
    if not index or any(part is None or part is ... or (isinstance(part, slice) and part.step) for part in index):
        raise UnknownValue(f"the node {node.name!r}, which takes other parts than rows or columns")
    return index


def squeezed_axes(node: Node, shape: Sequence[int]) -> list[int]:
    """Return the axes that a Squeeze drops."""
    axes = node.attrs.get("squeeze_dims") or [axis for axis, size in enumerate(shape) if size == 1]
    rank = len(shape)
    if not isinstance(axes, list) or not all(isinstance(axis, int) and -rank <= axis < rank for axis in axes):
        raise UnknownValue(f"the node {node.name!r}, which drops {axes!r}")
    return sorted({axis % rank for axis in axes})  # TensorFlow takes one twice
