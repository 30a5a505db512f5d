"""Sorted tables, the files of LevelDB: a checkpoint's ``.index``.

.. code-block:: text

    table: block ...  index block  footer
    block: entry ...  uint32 restart ...  uint32 restarts  |  uint8 compression  uint32 masked CRC-32C
    entry: varint shared  varint unshared  varint length  key[shared:]  value
    footer, 48 bytes: the places of two blocks, the second the index, zeros, and MAGIC

A place is two varints, offset and length. An entry's key begins with the `shared` first bytes of the one before. The
index has an entry for every block; its value is the block's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .mapped import File
from .wire import Message, varint

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48
TRAILER = 5
MOST_KEYS = 2**24  # bytes of keys in a table, besides twice its size


class Entry(NamedTuple):
    """An entry of a block."""

    key: bytes
    value: Message


def is_table(file: File) -> bool:
    """Return whether a file ends as a table does."""
    return len(file) >= FOOTER and bytes(file.buffer[-len(MAGIC) :]) == MAGIC


class Table:
    """The entries of a table, in the order of their keys."""

    def __init__(self, file: File) -> None:
        self.file = file
        if not is_table(file):
            problem = "it does not end as a table of TensorFlow's does"
            raise file.error(len(file), problem, "it is cut off or something else: copy or save it again")
        footer, end = len(file) - FOOTER, len(file) - len(MAGIC)
        _, at = self._read_place(footer, end)
        (offset, size), _ = self._read_place(at, end)
        self._index = self._block(footer, offset, size, 0)
        self._key_bytes = 0  # read so far

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, after the checksums of their blocks are compared."""
        self._key_bytes = 0
        last, end = None, 0
        for place in self._entries(self._index):
            (offset, size), _ = self._read_place(place.value.start, place.value.end)
            block = self._block(place.value.start, offset, size, end)
            end = block.end + TRAILER
            for entry in self._entries(block):
                if last is not None and entry.key <= last:
                    raise entry.value.error(f"the key {entry.key[:40]!r} comes after {last[:40]!r}")
                last = entry.key
                yield entry

    def _read_place(self, at: int, end: int) -> tuple[tuple[int, int], int]:
        """Read the offset and the size of a block; return where they end, too."""
        offset, at = varint(self.file, at, end)
        size, at = varint(self.file, at, end)
        return (offset, size), at

    def _block(self, at: int, offset: int, size: int, first: int) -> Message:
        """Return the block whose place byte `at` gives. It begins at `first` or later, as blocks do not overlap."""
        file, end = self.file, offset + size
        if offset < first or end + TRAILER > len(file) - FOOTER or size < 4:
            problem = f"a block is said to be at {offset}, of {size} bytes"
            raise file.error(at, f"{problem}; expected it in {first}:{len(file) - FOOTER}")
        if file.buffer[end]:
            method = {1: "snappy"}.get(file.buffer[end], f"the method {file.buffer[end]}")
            mend = "save it with TensorFlow 1.2 or later, which does not compress"
            raise file.error(end, f"a block is compressed with {method}", mend)
        return Message(file, offset, end)

    def _entries(self, block: Message) -> Iterator[Entry]:
        """Yield the entries of a block, which must be what was written."""
        file, buffer, key = self.file, self.file.buffer, b""
        stored = int.from_bytes(buffer[block.end + 1 : block.end + TRAILER], "little")
        file.check(block.start, block.end + 1, stored, f"the block of {len(block)} bytes")
        restarts = int.from_bytes(buffer[block.end - 4 : block.end], "little")
        at, end = block.start, block.end - 4 - 4 * restarts
        if end < at:
            raise block.error(f"a block of {len(block)} bytes has {restarts} restarts")
        while at < end:
            entry = Message(file, at, end)
            shared, at = varint(file, at, end)
            unshared, at = varint(file, at, end)
            length, at = varint(file, at, end)
            value, past = at + unshared, at + unshared + length
            if shared > len(key) or past > end:
                raise entry.error(f"an entry has {shared} + {unshared} bytes of key and {length} of value")
            key = key[:shared] + bytes(buffer[at:value])
            self._key_bytes += len(key)
            entry.limit(self._key_bytes, MOST_KEYS + 2 * len(file), "bytes of keys")
            yield Entry(key, Message(file, value, past))
            at = past
