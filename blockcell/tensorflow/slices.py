"""Slices, the parts in which checkpoints store partitioned variables: where they are and what they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..optable import Array
from .tensors import MOST_DIMENSIONS
from .wire import Message

FULL = -1  # the length of a dimension that is not divided


class Slice(NamedTuple):
    """Where a slice begins in each dimension, and how long it is there."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, message: Message) -> Slice:
        """Read a TensorSliceProto."""
        starts, lengths = [], []
        for extent in message.inside(1):
            starts.append(extent.integer(1))
            lengths.append(extent.integer(2) if any(number == 2 for number, *_ in extent.fields()) else FULL)
            if len(starts) > MOST_DIMENSIONS:
                raise message.error(f"a slice has more than {MOST_DIMENSIONS} dimensions")
        return cls(tuple(starts), tuple(lengths))

    def within(self, shape: tuple[int, ...], message: Message) -> tuple[slice, ...]:
        """Return the index of the slice in an array of a shape."""
        if len(shape) != len(self.starts):
            raise message.error(f"a slice has {len(self.starts)} dimensions; its variable has the shape {shape}")
        part = []
        for start, length, size in zip(self.starts, self.lengths, shape, strict=True):
            stop = size if length == FULL else start + length
            if not 0 <= start <= stop <= size or (length == FULL and start):
                raise message.error(f"a slice is {start}:{stop} of a dimension of its variable, which has {size}")
            part.append(slice(start, stop))
        return tuple(part)

    def key(self, name: str) -> bytes:
        """Return the key of this slice of a variable in a table. Keys are in the order of names and slices."""
        escaped = name.encode().replace(b"\xff", b"\xff\0").replace(b"\0", b"\0\xff")
        rank = len(self.starts)
        numbers = [number for pair in zip(self.starts, self.lengths, strict=True) for number in pair]
        return b"\0" + escaped + b"\0\1" + (bytes([1, rank]) if rank else b"\0") + b"".join(map(_ordered, numbers))


def size_of(part: tuple[slice, ...]) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(axis_slice.stop - axis_slice.start for axis_slice in part)


def joined(
    shape: tuple[int, ...], parts: Sequence[tuple[slice, ...]], read: Callable[[int], Array], message: Message
) -> Array:
    """Join all parts of an array, reading one at a time. Each number must be in one part."""
    if len(parts) == 1 and size_of(parts[0]) == shape:
        return read(0)
    if not parts or sum(math.prod(size_of(part)) for part in parts) != math.prod(shape):
        raise message.error(f"the slices of a variable are not the whole of its shape {shape}")
    whole, seen = np.empty(0), np.zeros(shape, bool)
    for k, part in enumerate(parts):
        values = read(k)
        whole = whole if k else np.empty(shape, values.dtype)
        whole[part] = values
        seen[part] = True
    if not seen.all():
        raise message.error(f"the slices of a variable of shape {shape} overlap")
    return whole


def _ordered(value: int) -> bytes:
    """Encode a signed number as OrderedCode does: n ones for n bytes, a zero, and the number; signs inverted."""
    length = 1
    while (value if value >= 0 else ~value) >> (7 * length - 1):
        length += 1
    ones = (1 << length) - 1 << 8 * length - length  # the n highest bits
    return ((value & (1 << 8 * length) - 1) ^ ones).to_bytes(length, "big")
