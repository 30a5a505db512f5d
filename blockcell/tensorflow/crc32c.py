"""CRC-32C, the checksum of TensorFlow's tables and tensors, at about the speed of memory.

A CRC is the remainder of a polynomial over GF(2), the bits of the message being its coefficients. It stays the same if
a multiple of the CRC's own polynomial P is added, and x^5685 + x^1362 + x^426 + 1 is one; so it is with y = x^8 or
x^64 in place of x, as squaring does that to any polynomial over GF(2). In words, with y = x^64: the word at i may be
taken away if it is added, by XOR, to those at i + 5685 - 1362, i + 5685 - 426 and i + 5685. numpy does so for 4323
words at a time, until 5685 are left, and again with bytes; the remainder of these is computed byte by byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SPAN = 5685
SHIFTS = (SPAN - 1362, SPAN - 426, SPAN)
CHUNK = 2**17  # words, a megabyte
_REFLECTED = 0x82F63B78  # P without x^32, its highest coefficient in the lowest bit


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_REFLECTED if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of bytes."""
    data = memoryview(data)
    if len(data) < 8:
        return _remainder(data, 0xFFFFFFFF) ^ 0xFFFFFFFF
    head = (len(data) - 4) % 8 + 4  # up to 11 bytes; zeros before the first change nothing
    first = bytearray(-head % 8) + data[:head]
    for k in range(-head % 8, -head % 8 + 4):
        first[k] ^= 0xFF  # where CRCs begin: the register is all ones
    words = np.frombuffer(bytes(first), np.uint64)
    for start in range(head, len(data), 8 * CHUNK):
        chunk = np.frombuffer(data[start : start + 8 * CHUNK], np.uint64)
        words = _folded(np.concatenate([words, chunk]))
    return _remainder(_folded(words.view(np.uint8).copy()).tobytes(), 0) ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Mask a CRC as it is stored, so that the CRC of data that hold CRCs is a good one, too."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _folded(items: Any) -> Any:
    """Reduce words or bytes, in place, to at most SPAN with the same remainder."""
    folded = max(0, len(items) - SPAN)
    for start in range(0, folded, SHIFTS[0]):
        stop = min(folded, start + SHIFTS[0])
        for shift in SHIFTS:
            items[start + shift : stop + shift] ^= items[start:stop]
    return items[folded:]


def _remainder(data: bytes | memoryview, crc: int) -> int:
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc
