"""What the nodes between cells compute, in plain numpy: rearrangements, shape arithmetic, masks and lengths.

In come the attributes of a node and its inputs; out comes an array, or one for each output. Floating-point numbers of
any dtype are float64, as rounding does not matter here, and whole numbers are int64. A function raises an error for
inputs that TensorFlow would refuse, and before it makes an array of more than `MOST_ENTRIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....optable import Array
from ...graphs import Node
from .array_slices import strided_index
from .graph_reader import FLOATS, UnknownValue
from .op_table import graph_op

MOST_ENTRIES = 2**21  # of one array
Attributes = Mapping[str, Any]
Function = Callable[..., Array | tuple[Array, ...]]
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def canonical(array: Array) -> Array:
    """Return an array in the dtype that stands for its kind: float64, int64 or bool."""
    if array.dtype.kind in "fiu":
        return array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=False)
    return array


def find_function(node: Node) -> Function | None:
    """Return the function of a node's op; None if it is not known."""
    op = graph_op(node)
    function = _FUNCTIONS.get(node.op) or _FUNCTIONS.get(op.name)
    return _by_entry(op.compute, op.options) if function is None and op.compute is not None else function


def check_size(shape: Sequence[int]) -> None:
    """Refuse to make an array of a shape that is too large."""
    if min(shape, default=0) < 0 or math.prod(int(size) for size in shape) > MOST_ENTRIES:
        raise UnknownValue(f"an array of the shape {tuple(map(int, shape))}")


def _by_entry(compute: Callable[..., Any], options: Mapping[str, float] = {}) -> Function:
    """Return the function of a node that computes entry by entry; `options` are the defaults of its attributes."""

    def computed(attrs: Attributes, *arrays: Array) -> Array:
        check_size(np.broadcast_shapes(*(array.shape for array in arrays)))
        given = {name: float(attrs.get(name, default)) for name, default in options.items()}
        return np.asarray(compute(*arrays, **given))

    return computed


def _reducing(reduce: Callable[..., Any]) -> Function:
    def reduced(attrs: Attributes, array: Array, axes: Array) -> Array:
        return np.asarray(reduce(array, axis=_integers(axes), keepdims=bool(attrs.get("keep_dims", False))))

    return reduced


def _integers(array: Array) -> tuple[int, ...]:
    return tuple(int(number) for number in array.ravel())


def _cast(attrs: Attributes, array: Array) -> Array:
    kind = attrs.get("DstT")
    if kind in FLOATS:
        return array.astype(np.float64)
    if kind == "bool":
        return array.astype(bool)
    if kind not in _INTEGERS:
        raise UnknownValue(f"a conversion to {kind}")
    return np.trunc(array).astype(np.int64)


def _select_rows(attrs: Attributes, condition: Array, a: Array, b: Array) -> Array:
    """Select as TensorFlow 1 does: a vector of conditions selects rows."""
    if condition.ndim == 1 and a.ndim > 1:
        condition = condition.reshape(-1, *[1] * (a.ndim - 1))
    check_size(np.broadcast_shapes(condition.shape, a.shape, b.shape))
    return np.where(condition, a, b)


def _concat(arrays: Sequence[Array], axis: Array) -> Array:
    check_size((sum(array.size for array in arrays),))
    return np.concatenate(arrays, int(axis))


def _pack(attrs: Attributes, *arrays: Array) -> Array:
    check_size((sum(array.size for array in arrays),))
    return np.stack(arrays, int(attrs.get("axis", 0)))


def _slice_strided(attrs: Attributes, array: Array, *numbers: Array) -> Array:
    part: Array = array[tuple(strided_index(attrs, *map(_integers, numbers)))]
    return part


def _slice(attrs: Attributes, array: Array, begin: Array, sizes: Array) -> Array:
    starts, counts = _integers(begin), _integers(sizes)
    part: Array = array[tuple(slice(a, None if n == -1 else a + n) for a, n in zip(starts, counts, strict=True))]
    if any(n not in (-1, size) for n, size in zip(counts, part.shape, strict=True)):
        raise UnknownValue(f"a part of the shape {array.shape} that it does not have")
    return part


def _gather(attrs: Attributes, array: Array, indices: Array, axis: Array | int = 0) -> Array:
    axis, batched = int(axis) % array.ndim, int(attrs.get("batch_dims", 0))
    check_size((indices.size, array.size // max(1, array.shape[axis])))
    if batched > 1 or (batched and axis == 0) or indices.dtype.kind != "i":
        raise UnknownValue(f"a Gather of {batched} batch dimensions along the axis {axis}")
    if batched:
        return np.stack([np.take(row, numbers, axis - 1) for row, numbers in zip(array, indices, strict=True)])
    return np.take(array, indices, axis)


def _gather_nd(attrs: Attributes, array: Array, indices: Array) -> Array:
    check_size((*indices.shape[:-1], *array.shape[indices.shape[-1] :]))
    part: Array = array[tuple(np.moveaxis(indices, -1, 0))]
    return part


def reverse_rows(array: Array, lengths: Array, axis: int, batch_axis: int) -> Array:
    """Reverse each row along an axis, up to its length."""
    rows = np.moveaxis(array, (batch_axis, axis), (0, 1)).copy()
    for row, length in zip(rows, _integers(lengths), strict=True):
        row[:length] = row[:length][::-1].copy()
    return np.moveaxis(rows, (0, 1), (batch_axis, axis))


def _tile(attrs: Attributes, array: Array, counts: Array) -> Array:
    if len(counts) != array.ndim:
        raise UnknownValue(f"a Tile by {len(counts)} counts of the shape {array.shape}")
    check_size([size * int(count) for size, count in zip(array.shape, counts, strict=True)])
    return np.tile(array, _integers(counts))


def _broadcast(attrs: Attributes, array: Array, shape: Array) -> Array:
    check_size(_integers(shape))
    return np.broadcast_to(array, _integers(shape))


def _fill(attrs: Attributes, shape: Array, value: Array) -> Array:
    check_size(_integers(shape))
    return np.full(_integers(shape), value)


def _largest_random(attrs: Attributes, shape: Array, *seeds: Array) -> Array:
    """Return random numbers with which dropout drops nothing."""
    return _fill(attrs, shape, np.array(1 - 2**-20))


def _range(attrs: Attributes, start: Array, limit: Array, delta: Array) -> Array:
    first, last, step = start.item(), limit.item(), delta.item()
    check_size((int(max(0, (last - first) / step)) + 1,))
    return np.arange(first, last, step)


def _pad(attrs: Attributes, array: Array, widths: Array, value: Array | int = 0) -> Array:
    check_size([size + int(width.sum()) for size, width in zip(array.shape, widths, strict=True)])
    return np.pad(array, widths, constant_values=value)


def _cumulate(attrs: Attributes, array: Array, axis: Array) -> Array:
    if attrs.get("exclusive") or attrs.get("reverse"):
        raise UnknownValue("a Cumsum that is exclusive or reversed")
    return np.cumsum(array, int(axis))


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Sum": np.sum, "Prod": np.prod, "Max": np.max, "Min": np.min, "Mean": np.mean, "All": np.all, "Any": np.any,
}  # fmt: skip
_BY_ENTRY: dict[str, Callable[..., Any]] = {
    "Less": np.less, "LessEqual": np.less_equal, "GreaterEqual": np.greater_equal, "Equal": np.equal,
    "NotEqual": np.not_equal, "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "LogicalNot": np.logical_not,
    "FloorDiv": np.floor_divide, "FloorMod": np.mod, "Neg": np.negative, "Abs": np.abs, "Sign": np.sign,
    "Square": np.square, "Sqrt": np.sqrt, "Rsqrt": lambda array: 1 / np.sqrt(array), "Floor": np.floor, "Log": np.log,
    "Pow": np.power, "SquaredDifference": lambda a, b: (a - b) ** 2,
}  # fmt: skip
_FUNCTIONS: dict[str, Function] = {
    "Cast": _cast,
    "Select": _select_rows,
    "SelectV2": _by_entry(np.where),
    "Concat": lambda attrs, axis, *arrays: _concat(arrays, axis),
    "ConcatV2": lambda attrs, *operands: _concat(operands[:-1], operands[-1]),
    "Pack": _pack,
    "StridedSlice": _slice_strided,
    "Slice": _slice,
    "Gather": _gather,
    "GatherNd": _gather_nd,
    "Reshape": lambda attrs, array, shape: array.reshape(_integers(shape)),
    "Transpose": lambda attrs, array, axes: array.transpose(_integers(axes)),
    "ExpandDims": lambda attrs, array, axis: np.expand_dims(array, int(axis.reshape(()))),
    "Tile": _tile,
    "BroadcastTo": _broadcast,
    "Fill": _fill,
    "Range": _range,
    "Pad": _pad,
    "PadV2": _pad,
    "Cumsum": _cumulate,
    "ReverseV2": lambda attrs, array, axes: np.flip(array, _integers(axes)),
    "ReverseSequence": lambda attrs, array, lengths: reverse_rows(
        array, lengths, int(attrs["seq_dim"]), int(attrs.get("batch_dim", 0))
    ),
    "Where": lambda attrs, condition: np.argwhere(condition),
    "InvertPermutation": lambda attrs, order: np.argsort(order),
    "ZerosLike": lambda attrs, array: np.zeros_like(array),
    "OnesLike": lambda attrs, array: np.ones_like(array),
    "Shape": lambda attrs, array: np.array(array.shape, np.int64),
    "ShapeN": lambda attrs, *arrays: tuple(np.array(array.shape, np.int64) for array in arrays),
    "Size": lambda attrs, array: np.array(array.size),
    "Rank": lambda attrs, array: np.array(array.ndim),
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniformV2"), _largest_random),
    "AddN": _by_entry(lambda *arrays: np.sum(np.broadcast_arrays(*arrays), 0)),
    **{name: _reducing(reduce) for name, reduce in _REDUCTIONS.items()},
    **{name: _by_entry(compute) for name, compute in _BY_ENTRY.items()},
}
