"""Checkpoints: ``PREFIX.index``, a table of what there is, and ``PREFIX.data-00000-of-00001``, the bytes.

The table's first key is empty; its value, a BundleHeaderProto, says how many data files (shards) there are. Other keys
are names of variables; their values, BundleEntryProtos, have dtype, shape and place. A partitioned variable's entry
lists its slices, each of which has an entry of its own, under `Slice.key`.
"""

from __future__ import annotations

import glob
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import FormatError
from ..optable import Array
from .crc32c import crc32c, masked
from .mapped import File, Folder
from .objects import GRAPH, Objects
from .table import Table
from .tensors import DTYPES, TEXT, Dtype, Stored, check_size, dtype_of, full_shape, values_of
from .variables import Variables
from .wire import FIXED32, Message, varint

MOST_VARIABLES = 2**16  # and slices, in a file, besides one for each 200 bytes
MOST_SHARDS = 10**5  # five digits
FULL = -1  # the length of a dimension that a slice does not divide


class Shards:
    """The data files of a checkpoint, each opened at its first use."""

    def __init__(self, folder: Folder, prefix: str, count: int) -> None:
        self._folder, self._prefix, self._count = folder, prefix, count
        self._files: dict[int, File] = {}
        self.taken: list[tuple[int, int, int]] = []
        """Data file, first byte and the one past the last, of each tensor."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> File:
        if k not in self._files:
            files = glob.glob(f"{glob.escape(self._prefix)}.data-?????-of-?????")
            if files and not any(name.endswith(f"-of-{self._count:05}") for name in files):
                mismatch = f"{self._prefix}.index is for {self._count} data files, but there is {files[0]}"
                raise FormatError(f"{mismatch}; copy all files of one checkpoint")
            self._files[k] = self._folder.file(f"{self._prefix}.data-{k:05}-of-{self._count:05}")
        return self._files[k]


class Whole(Stored):
    """A tensor in a data file."""

    __slots__ = ("_crc", "_message", "_offset", "_shard", "_shards", "_size")

    def __init__(self, message: Message, dtype: Dtype, shape: tuple[int, ...], shards: Shards) -> None:
        self._message, self._dtype, self.shape, self._shards = message, dtype, shape, shards
        self._shard, self._offset, self._size = (message.integer(number) for number in (3, 4, 5))
        self._crc = message.integer(6, FIXED32)
        if not 0 <= self._shard < len(shards):
            raise message.error(f"a tensor is in data file {self._shard}; there are {len(shards)}")
        size = self._size if dtype.stored is None else math.prod(shape) * dtype.stored.itemsize
        if self._size != size or self._offset < 0:
            mismatch = f"a tensor of {dtype.name} and shape {shape} is said to be {self._size} bytes at {self._offset}"
            raise message.error(mismatch)
        shards.taken.append((self._shard, self._offset, self._offset + self._size))

    @property
    def file(self) -> File:
        return self._shards[self._shard]

    def read(self) -> Array:
        """Read the values, after their checksum is compared."""
        data = self.bytes()
        self.file.check(data.start, data.end, self._crc, f"the tensor of {self._size} bytes")
        assert self._dtype.stored is not None
        return values_of(data.view, self._dtype).reshape(self.shape)

    def bytes(self) -> Message:
        """Return the bytes in the data file, which must have all of them."""
        file, end = self.file, self._offset + self._size
        if end > len(file):
            raise file.error(len(file), f"it ends before byte {end}, where a tensor of {self._size} bytes should end")
        return Message(file, self._offset, end)

    def text(self) -> Message:
        """Return the text of a tensor that is one text: behind its length and a checksum of the length."""
        data = self.bytes()
        length, at = varint(data.file, data.start, data.end)
        left = data.end - at - 4
        if length != left or length >= 2**32:
            raise data.error(f"a text of {length} bytes, its length and a checksum are said to be {len(data)} bytes")
        text = Message(data.file, at + 4, data.end)
        crc = masked(crc32c(length.to_bytes(4, "little") + text.file.buffer[at : text.end]))
        if crc != self._crc:
            raise data.error(f"the checksum of a text of {length} bytes is {crc:#010x}; expected {self._crc:#010x}")
        return text


class Partitioned(Stored):
    """A tensor in slices."""

    __slots__ = ("_message", "_slices")

    def __init__(self, message: Message, dtype: Dtype, shape: tuple[int, ...]) -> None:
        self._message, self._dtype, self.shape = message, dtype, shape
        self._slices: list[tuple[tuple[slice, ...], Whole]] = []

    def add(self, part: tuple[slice, ...], tensor: Whole) -> None:
        part_shape = tuple(axis_slice.stop - axis_slice.start for axis_slice in part)
        if tensor.dtype != self.dtype or tensor.shape != part_shape:
            mismatch = f"a slice of shape {part_shape} has {tensor.dtype} and shape {tensor.shape}"
            raise self._message.error(f"{mismatch}; its variable has {self.dtype}")
        self._slices.append((part, tensor))

    def read(self) -> Array:
        """Read the values, copied together if there are several slices. Each number must be in one slice."""
        assert self._dtype.stored is not None
        count, files = math.prod(self.shape), {tensor.file.name: len(tensor.file) for _, tensor in self._slices}
        check_size(count * self._dtype.stored.itemsize, sum(files.values()), self._message)
        if sum(math.prod(tensor.shape) for _, tensor in self._slices) != count:
            raise self._message.error(f"the slices of a variable are not the whole of its shape {self.shape}")
        whole, seen = np.empty(0), np.zeros(self.shape, bool)
        for k, (part, tensor) in enumerate(self._slices):
            values = tensor.read()
            whole = whole if k else np.empty(self.shape, values.dtype)
            whole[part] = values
            seen[part] = True
        if not seen.all():
            raise self._message.error(f"the slices of a variable of shape {self.shape} overlap")
        return whole


def read(folder: Folder, prefix: str) -> Variables:
    """Read the index of a checkpoint in a folder."""
    file = folder.file(f"{prefix}.index")
    entries: dict[bytes, Message] = {}
    for entry in Table(file).entries():
        entries[entry.key] = entry.value
        entry.value.limit(len(entries), MOST_VARIABLES + len(file) // 200, "variables")
    header = entries.pop(b"", None)
    if header is None:
        raise file.error(0, "the table has no header", "open the checkpoint by the name that its .index has without it")
    count = header.integer(1)
    if not 0 < count <= MOST_SHARDS:
        raise header.error(f"there are said to be {count} data files")
    if header.integer(2):
        raise header.error("its numbers are big-endian", "save it again on a little-endian machine")
    shards = Shards(folder, prefix, count)
    stored: dict[str, Stored] = {}
    skipped: dict[str, str] = {}
    for key, message in [*entries.items()]:
        if key[0]:  # others are slices, which belong to variables
            name = _name(key, message)
            dtype = dtype_of(message.integer(1))
            if dtype.stored is None:
                skipped[name] = dtype.name
            else:
                stored[name] = _tensor(name, message, dtype, entries, shards)
    shards.taken.sort()
    for (shard, _, end), (next_shard, start, _) in pairwise(shards.taken):
        if shard == next_shard and start < end:
            raise file.error(0, f"two tensors overlap in data file {shard}, at byte {start}")
    return Variables(stored, skipped, _objects(entries.get(GRAPH.encode()), shards))


def _objects(message: Message | None, shards: Shards) -> Objects | None:
    """Return the objects of an object checkpoint; None of another checkpoint."""
    if message is None or message.integer(1) != TEXT or full_shape(message.last(2), DTYPES[TEXT], message.file):
        return None
    try:
        return Objects(Whole(message, DTYPES[TEXT], (), shards).text())
    except FileNotFoundError:  # the index alone says something, too
        return None


def _name(key: bytes, message: Message) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise message.error(f"the name {key[:80]!r} is not UTF-8") from None


def _tensor(name: str, message: Message, dtype: Dtype, entries: dict[bytes, Message], shards: Shards) -> Stored:
    shape = full_shape(message.last(2), dtype, message.file)
    variable: Partitioned | None = None
    for saved_slice in map(Slice.of, message.inside(7)):
        variable = variable or Partitioned(message, dtype, shape)
        part = saved_slice.within(shape, message)
        entry = entries.pop(saved_slice.key(name), None)
        if entry is None:
            raise message.error(f"there is no slice {saved_slice} of the variable {name!r}")
        its_dtype = dtype_of(entry.integer(1))
        if its_dtype.stored is None:
            raise entry.error(f"a slice of the variable {name!r} is of {its_dtype.name}")
        variable.add(part, Whole(entry, its_dtype, full_shape(entry.last(2), its_dtype, entry.file), shards))
    return variable or Whole(message, dtype, shape, shards)


# --------------------------------------------------------------------------------------------------------------- slices
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


def _ordered(value: int) -> bytes:
    """Encode a signed number as OrderedCode does: n ones for n bytes, a zero, and the number; signs inverted."""
    length = 1
    while (value if value >= 0 else ~value) >> (7 * length - 1):
        length += 1
    ones = (1 << length) - 1 << 8 * length - length  # the n highest bits
    return ((value & (1 << 8 * length) - 1) ^ ones).to_bytes(length, "big")
