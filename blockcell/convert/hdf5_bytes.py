"""What libhdf5 cannot be trusted with in an HDF5 file, read from the bytes: texts of variable length, layouts.

libhdf5 does not tell how long the texts of an attribute are before it has read all of them, and thousands may be one
long text of the file. One wrong byte in a heap lets it search forever, or ends the process when it opens a virtual
dataset. So this module reads the headers of objects, and each text from its heap, itself. The HDF5 File Format
Specification describes them in IV.A and III.E.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ..errors import FormatError
from ..files import LONGEST_TEXT

_CONTINUATION, _ATTRIBUTE, _LAYOUT = 0x10, 0x0C, 0x08  # kinds of messages in headers
_ELEMENT = struct.Struct("<IQI")  # of an attribute: the length of a text, the address of its heap, its number there

ReadBytes = Callable[[int, int], bytes]
"""Reads bytes of the file: the arguments are the address of the first byte, and how many they are."""


class ByteReader:
    """Reads the texts of variable length and the layouts in a file; headers with texts and heaps are read once."""

    def __init__(self, read_bytes: ReadBytes) -> None:
        self._read_bytes = read_bytes
        self._attributes: dict[int, dict[bytes, bytes]] = {}
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}

    def read_texts(self, header: int, name: str, count: int) -> list[bytes]:
        """Return the texts of an attribute; `header` is the address of its object's header."""
        if header not in self._attributes:
            messages = _read_messages(self._read_bytes, header)
            self._attributes[header] = dict(_parse_attribute(body) for kind, body in messages if kind == _ATTRIBUTE)
        data = self._attributes[header].get(name.encode())
        if data is None:
            raise FormatError(f"the attribute {name} has texts of variable length, and is not in the header itself")
        elements = [_ELEMENT.unpack_from(data, k * _ELEMENT.size) for k in range(count)]
        size = sum(length for length, _, _ in elements)
        if size > LONGEST_TEXT:
            raise FormatError(f"the attribute {name} has {size} bytes; expected at most {LONGEST_TEXT}")
        return [self._read_text(*element) for element in elements]

    def is_virtual(self, header: int) -> bool:
        """Return whether the numbers of a dataset are in others; `header` is the address of its header."""
        layouts = [body[:2] for kind, body in _read_messages(self._read_bytes, header) if kind == _LAYOUT]
        return any(version >= 3 and layout == 3 for version, layout in layouts)

    def _read_text(self, length: int, heap: int, number: int) -> bytes:
        if not length:
            return b""
        if heap not in self._heaps:
            self._heaps[heap] = _read_heap(self._read_bytes, heap)
        address, size = self._heaps[heap].get(number, (0, 0))
        if length > size:
            raise FormatError(f"a text of {length} bytes is not in the heap at {heap}")
        return self._read_bytes(address, length).partition(b"\0")[0]


def _read_messages(read_bytes: ReadBytes, header: int) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the body of each message in the header of an object."""
    start = read_bytes(header, 16)
    is_newer = start[:4] == b"OHDR"  # else it is of version 1, which has no signature
    if is_newer:
        flags = start[5]
        first = header + 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)  # behind times and limits
        width = 1 << (flags & 3)
        blocks = [(first + width, int.from_bytes(read_bytes(first, width), "little"))]
        prefix = struct.Struct("<BHxxx" if flags & 4 else "<BHx")
    else:
        blocks = [(header + 16, int.from_bytes(start[8:12], "little"))]
        prefix = struct.Struct("<HHxxxx")
    for address, size in blocks:
        block = read_bytes(address, size)
        k = 0
        while k + prefix.size <= size:
            kind, length = prefix.unpack_from(block, k)
            k += prefix.size
            body = block[k : k + length]
            k += length
            if kind == _CONTINUATION:
                next_address, next_size = struct.unpack_from("<QQ", body)
                blocks.append((next_address + 4, next_size - 8) if is_newer else (next_address, next_size))
            else:
                yield kind, body


def _parse_attribute(body: bytes) -> tuple[bytes, bytes]:
    """Return the name and the data of an attribute."""
    version, *sizes = struct.unpack_from("<BxHHH", body)  # of the name, the datatype and the dataspace
    start = 9 if version == 3 else 8  # which has an encoding of the name
    name = body[start : start + sizes[0]].partition(b"\0")[0]
    if version == 1:
        sizes = [-(-size // 8) * 8 for size in sizes]
    return name, body[start + sum(sizes) :]


def _read_heap(read_bytes: ReadBytes, heap: int) -> dict[int, tuple[int, int]]:
    """Return the address and the size of each object in a global heap, by their numbers."""
    signature, size = struct.unpack("<4sxxxxQ", read_bytes(heap, 16))
    if signature != b"GCOL":
        raise FormatError(f"there is no heap at {heap}")
    block = read_bytes(heap, size)
    objects: dict[int, tuple[int, int]] = {}
    k = 16
    while k + 16 <= size:
        number, length = struct.unpack_from("<HxxxxxxQ", block, k)
        if number:  # 0 is free
            objects[number] = heap + k + 16, min(length, size - k - 16)
        k += 16 + -(-length // 8) * 8
    return objects
