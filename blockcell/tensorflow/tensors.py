"""Tensors as TensorFlow stores them: dtypes, shapes, and the values of a TensorProto."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..optable import Array
from .mapped import File
from .schema import DIMENSION, SHAPE, TENSOR
from .wire import Message

LARGEST = 2**48  # bytes of a tensor
MOST_DIMENSIONS = 32
MOST_TEXTS = 2**16
MOST_FILLED = 2**24  # bytes of a tensor for which the file has fewer numbers, besides twice the file's size


class Dtype(NamedTuple):
    """One of TensorFlow's types."""

    name: str
    stored: np.dtype[Any] | None = None
    """The dtype in a file; None for a type that is not read."""
    field: int = 0
    """The number of the field of a TensorProto that has values one by one."""


_NAMES = (
    "float32 float64 int32 uint8 int16 int8 string complex64 int64 bool qint8 quint8 qint32 bfloat16 qint16 quint16"
    " uint16 complex128 float16 resource variant uint32 uint64"
).split()  # by their numbers, from 1
_FIELDS = {
    **dict.fromkeys(("int32", "uint8", "int16", "int8", "uint16"), TENSOR.int_val),
    **dict.fromkeys(("bfloat16", "float16"), TENSOR.half_val),
    **{"float32": TENSOR.float_val, "float64": TENSOR.double_val, "int64": TENSOR.int64_val, "bool": TENSOR.bool_val},
    **{"uint32": TENSOR.uint32_val, "uint64": TENSOR.uint64_val},
}


def dtype_named(name: str) -> Dtype:
    """Return the type with a name, which is not read if it is none of TensorFlow's."""
    stored = np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<") if name in _FIELDS else None
    return Dtype(name, stored, _FIELDS.get(name, 0))


DTYPES = {number: dtype_named(name) for number, name in enumerate(_NAMES, 1)}
TEXT = 7
_REFERENCE = 100  # added for a reference to such a tensor


def dtype_of(number: int) -> Dtype:
    """Return the type with a number."""
    dtype = DTYPES.get(number - _REFERENCE if number > _REFERENCE else number)
    return dtype or Dtype(f"type {number}")


def check_size(size: int, room: int, message: Message) -> None:
    """Raise a FormatError where a tensor of `size` bytes would be made of files of `room` bytes, if that is absurd."""
    if size > MOST_FILLED + 2 * room:
        raise message.error(f"a tensor is said to have {size} bytes, in a file of {room} bytes")


class Stored:
    """A tensor in a file, whose dtype and shape are known before `read` reads it."""

    __slots__ = ("_dtype", "shape")

    _dtype: Dtype
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """TensorFlow's name of it."""
        return self._dtype.name

    @property
    def is_readable(self) -> bool:
        """Whether its values are numbers that `read` returns: not texts, for example, and not complex numbers."""
        return self._dtype.stored is not None

    def __repr__(self) -> str:
        return f"<{self.dtype} {self.shape}>"

    def read(self) -> Array:
        """Read the values, in place if possible; bfloat16 as float32."""
        raise NotImplementedError


def shape_of(message: Message | None) -> tuple[int | None, ...] | None:
    """Read a TensorShapeProto; None stands for an unknown size or rank."""
    if message is None:
        return ()
    if message.integer(SHAPE.unknown_rank):
        return None
    sizes: list[int | None] = []
    for dimension in message.inside(SHAPE.dim, MOST_DIMENSIONS, "dimensions"):
        size = dimension.integer(DIMENSION.size)
        if size < -1:
            raise dimension.error(f"a dimension has the size {size}")
        sizes.append(size if size >= 0 else None)
    return tuple(sizes)


def full_shape(message: Message | None, dtype: Dtype, file: File) -> tuple[int, ...]:
    """Read the shape of a stored tensor, which has no unknown sizes."""
    shape = shape_of(message)
    at = message.start if message else 0
    if shape is None or None in shape:
        raise file.error(at, f"a tensor has the shape {shape}; expected one without unknown sizes")
    sizes = tuple(size for size in shape if size is not None)
    itemsize = dtype.stored.itemsize if dtype.stored else 1
    if math.prod(max(1, size) for size in sizes) * itemsize > LARGEST:
        raise file.error(at, f"a tensor has the shape {shape}, more than {LARGEST} bytes")
    return sizes


def values_of(data: memoryview | bytes, dtype: Dtype) -> Array:
    """Return the numbers in bytes, as an array that cannot be changed."""
    assert dtype.stored is not None
    stored: Array = np.frombuffer(data, np.uint8 if dtype.name == "bool" else dtype.stored)
    if dtype.name == "bool":
        return stored.view(bool) if stored.max(initial=0) <= 1 else stored != 0
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype.name == "bfloat16" else stored


class Tensor(Stored):
    """A TensorProto, whose values are read on demand."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message = message
        self._dtype = dtype_of(message.integer(TENSOR.dtype))
        self.shape = full_shape(message.last(TENSOR.tensor_shape), self._dtype, message.file)

    def read(self) -> Array:
        """Read the values, in place if the file has all of them as bytes."""
        message, dtype = self._message, self._dtype
        if dtype.stored is None:
            raise message.error(f"a tensor is of {dtype.name}", "only numbers are read")
        count, content = math.prod(self.shape), message.last(TENSOR.tensor_content)
        if content:
            if len(content) != count * dtype.stored.itemsize:
                raise content.error(f"a tensor of {self.dtype} and shape {self.shape} has {len(content)} bytes")
            return values_of(content.view, dtype).reshape(self.shape)
        values = self._numbers()
        if len(values) > count:
            raise message.error(f"a tensor of shape {self.shape} has {len(values)} numbers")
        if len(values) < count:  # the last one stands for all that follow, zero for none
            check_size(count * values.itemsize, len(message.file), message)
            if len(values) < 2:
                return np.broadcast_to(values[0] if len(values) else values.dtype.type(0), self.shape)
            filled = np.full(count, values[-1])
            filled[: len(values)] = values
            values = filled
        return values.reshape(self.shape)

    def texts(self) -> list[str]:
        """Read the texts of a tensor of texts."""
        return [field.text() for field in self._message.inside(TENSOR.string_val, MOST_TEXTS, "texts in a tensor")]

    def _numbers(self) -> Array:
        """Read the numbers in the field of the dtype; those of 16 bits and whole ones are varints of their bits."""
        message, dtype = self._message, self._dtype
        assert dtype.stored is not None
        size = dtype.stored.itemsize
        if dtype.name in ("float32", "float64"):
            return values_of(message.numbers(dtype.field, size), dtype)
        return values_of(message.integers(dtype.field, np.dtype(f"<u{size}")).data, dtype)
