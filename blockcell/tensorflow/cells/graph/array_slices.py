"""The part of an array that a Split, SplitV, StridedSlice, Squeeze or Unpack takes.

In come a node and the shape of the array; out go indices and shapes as numpy has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .graph_reader import GraphReader, Place, UnknownValue


def slice_index(reader: GraphReader, place: Place, shape: Sequence[int]) -> tuple[int | slice, ...]:
    """Return the index by which a node takes its part of an array of a shape."""
    op, attrs, rank = reader.op(place).name, reader.attrs(place), len(shape)
    name, k = place.name, place.output
    if op == "StridedSlice":
        index = read_strided_index(reader, place)
        dropped = [(part, size) for part, size in zip(index, shape, strict=False) if isinstance(part, int)]
        if len(index) > rank or not all(-size <= part < size for part, size in dropped):
            raise UnknownValue(f"the node {name!r}, which takes a part of the shape {shape} that it does not have")
        return tuple(index)
    if op == "Squeeze":
        axes = attrs.get("squeeze_dims") or [axis for axis, size in enumerate(shape) if size == 1]
        are_axes = isinstance(axes, list) and all(isinstance(axis, int) and -rank <= axis < rank for axis in axes)
        if not are_axes or any(shape[axis] != 1 for axis in axes):
            raise UnknownValue(f"the node {name!r}, which drops the axes {axes!r} of the shape {shape}")
        dropped_axes = {axis % rank for axis in axes}  # TensorFlow takes one twice
        return tuple(0 if axis in dropped_axes else slice(None) for axis in range(rank))
    if op in ("Split", "SplitV"):
        axis = checked_axis(reader, place, split_axis(reader, place), rank)
        return *[slice(None)] * axis, slice(*split_range(reader, place, shape[axis]))
    axis, count = checked_axis(reader, place, attrs.get("axis", 0), rank), attrs.get("num")
    if count != shape[axis] or not 0 <= k < shape[axis]:
        raise UnknownValue(f"part {k} of the node {name!r}, which makes {count} of the shape {shape}")
    return *[slice(None)] * axis, k


def split_axis(reader: GraphReader, place: Place) -> int:
    """Return the axis that a Split or SplitV cuts, which may be negative."""
    return reader.constant_integer(reader.inputs_at(place)[0 if reader.op(place).name == "Split" else 2])


def split_range(reader: GraphReader, place: Place, size: int) -> tuple[int, int]:
    """Return start and stop of the part that an output of a Split or SplitV takes of an axis."""
    count, k, parts = reader.attrs(place).get("num_split"), place.output, list[int]()
    if reader.op(place).name == "SplitV":
        parts = reader.constant_integers(reader.inputs_at(place)[1], rank=1) or []
        if parts.count(-1) == 1:
            parts[parts.index(-1)] = size - sum(parts) - 1  # what the other parts leave
        if len(parts) == count and k < count and min(parts) >= 0 and sum(parts) == size:
            return sum(parts[:k]), sum(parts[: k + 1])
    elif isinstance(count, int) and k < count and size % count == 0:
        return size // count * k, size // count * (k + 1)
    raise UnknownValue(f"part {k} of the node {place.name!r}, which makes {count} of an axis of {size}")


def shape_of(shape: Sequence[int], index: Sequence[int | slice]) -> tuple[int, ...]:
    """Return the shape of the part that an index takes."""
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(len(range(size)[part]) for size, part in zip(shape, parts, strict=True) if isinstance(part, slice))


def checked_axis(reader: GraphReader, place: Place, axis: Any, rank: int) -> int:
    """Return an axis of the node at a place as a number from 0, which must be less than the rank."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        op = reader.op(place).name
        raise UnknownValue(f"the node {place.name!r}, which is a {op} along the axis {axis!r} of {rank}")
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


def read_strided_index(reader: GraphReader, place: Place, *, anywhere: bool = False) -> list[int | slice]:
    """Return the index of a StridedSlice of rows and columns; `anywhere` takes zeros for where these begin and end."""
    index, inputs = list[Any]([None]), reader.inputs_at(place)
    if len(inputs) == 4:
        begin, end, strides = (reader.constant_integers(place, rank=1) for place in inputs[1:])
        if anywhere:
            begin = end = [0] * len(strides or ())
        with suppress(TypeError, ValueError):  # an attribute is no number, or there are not as many of each
            index = strided_index(reader.attrs(place), begin or (), end or (), strides or ())
    if not index or any(part is None or part is ... or (isinstance(part, slice) and part.step) for part in index):
        raise UnknownValue(f"the node {place.name!r}, which takes other parts than rows or columns")
    return index
