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


class Block(NamedTuple):
    """Where a block's entries and restarts are."""

    start: int
    end: int


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
        footer = len(file) - FOOTER
        at = footer
        for _ in range(2):
            offset, at = varint(file, at, len(file) - len(MAGIC))
            size, at = varint(file, at, len(file) - len(MAGIC))
        self._index = self._block(footer, offset, size, 0)
        self._key_bytes = 0  # read so far

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, after the checksums of their blocks are compared."""
        self._check(self._index)
        self._key_bytes = 0
        last, end = None, 0
        for place in self._entries(self._index):
            offset, at = varint(self.file, place.value.start, place.value.end)
            size, at = varint(self.file, at, place.value.end)
            block = self._block(place.value.start, offset, size, end)
            end = block.end + TRAILER
            self._check(block)
            for entry in self._entries(block):
                if last is not None and entry.key <= last:
                    raise entry.value.error(f"the key {entry.key[:40]!r} comes after {last[:40]!r}")
                last = entry.key
                yield entry

    def _check(self, block: Block) -> None:
        """Raise a FormatError unless the block is what was written."""
        stored = int.from_bytes(self.file.buffer[block.end + 1 : block.end + TRAILER], "little")
        self.file.check(block.start, block.end + 1, stored, f"the block of {block.end - block.start} bytes")

    def _block(self, at: int, offset: int, size: int, first: int) -> Block:
        """Return the block whose place byte `at` gives. It begins at `first` or later, as blocks do not overlap."""
        file, end = self.file, offset + size
        if offset < first or end + TRAILER > len(file) - FOOTER or size < 4:
            raise file.error(
                at, f"a block is said to be at {offset}, of {size} bytes; expected it in {first}:{len(file) - FOOTER}"
            )
        if file.buffer[end]:
            kind = {1: "snappy"}.get(file.buffer[end], f"the method {file.buffer[end]}")
            raise file.error(
                end,
                f"a block is compressed with {kind}",
                "save it with TensorFlow 1.2 or later, which does not compress",
            )
        return Block(offset, end)

    def _entries(self, block: Block) -> Iterator[Entry]:
        file, buffer, key = self.file, self.file.buffer, b""
        restarts = int.from_bytes(buffer[block.end - 4 : block.end], "little")
        at, end = block.start, block.end - 4 - 4 * restarts
        if end < at:
            raise file.error(block.end - 4, f"a block of {block.end - at} bytes has {restarts} restarts")
        while at < end:
            start = at
            shared, at = varint(file, at, end)
            unshared, at = varint(file, at, end)
            length, at = varint(file, at, end)
            value, past = at + unshared, at + unshared + length
            if shared > len(key) or past > end:
                raise file.error(start, f"an entry has {shared} + {unshared} bytes of key and {length} of value")
            key = key[:shared] + bytes(buffer[at:value])
            self._key_bytes += len(key)
            if self._key_bytes > MOST_KEYS + 2 * len(file):
                raise file.error(start, f"its keys have more than {MOST_KEYS} bytes", "no checkpoint has such names")
            yield Entry(key, Message(file, value, past))
            at = past
