"""Protobuf's wire format, as much of it as TensorFlow's files need, in place and without recursion.

A message is a sequence of fields: a varint, number * 8 + kind, and then what the kind says, a varint (0), 8 bytes (1),
a varint and as many bytes (2), or 4 bytes (5). What is inside a field of kind 2, such as another message, is looked at
when somebody asks for it, so that no depth of nesting matters. Fields of other numbers or kinds than those asked for
are skipped, and of several that should be one the last counts, as in protobuf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import FormatError
from ..optable import Array
from .mapped import File

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LONGEST = 10  # bytes in a varint
PIECE = 2**16  # bytes of varints that are unpacked at once
MOST_UNPACKED = 2**25  # bytes of numbers that were varints, besides 4 times those of the message


def varint(file: File, at: int, end: int) -> tuple[int, int]:
    """Read a varint; return it and where it ends."""
    buffer, start, value, shift = file.buffer, at, 0, 0
    while at < end:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
        if at == start + LONGEST:
            break
    else:
        raise file.error(start, "a number goes on past the end of what holds it")
    raise file.error(start, "a number has more than 64 bits")


class Message:
    """Bytes in a file: a message, a text or what else a field of kind 2 holds."""

    __slots__ = ("end", "file", "start")

    def __init__(self, file: File, start: int, end: int) -> None:
        self.file, self.start, self.end = file, start, end

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def view(self) -> memoryview:
        return self.file.buffer[self.start : self.end]

    def error(self, problem: str, *mend: str) -> FormatError:
        return self.file.error(self.start, problem, *mend)

    def limit(self, count: int, most: float, subject: str) -> None:
        """Raise a FormatError if there are more of something than any model has: memory is bounded by the file."""
        if count > most:
            raise self.error(f"there are more than {most} {subject}", "no model has so many")

    def fields(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, kind, first byte and end of each field."""
        file, buffer, at, end = self.file, self.file.buffer, self.start, self.end
        while at < end:
            tag, first = buffer[at], at + 1
            if tag >= 0x80:
                tag, first = varint(file, at, end)
            kind = tag & 7
            if kind == BYTES:
                if first < end and buffer[first] < 0x80:
                    length, first = buffer[first], first + 1
                else:
                    length, first = varint(file, first, end)
                past = first + length
            elif kind == VARINT:
                _, past = varint(file, first, end)
            elif kind == FIXED32:
                past = first + 4
            elif kind == FIXED64:
                past = first + 8
            else:
                raise file.error(at, f"a field has the kind {kind}, which TensorFlow does not use")
            if past > end:
                raise file.error(at, f"a field ends at byte {past}, past what holds it, which ends at byte {end}")
            if not 0 < tag >> 3 < 2**29:
                raise file.error(at, f"a field has the number {tag >> 3}")
            yield tag >> 3, kind, first, past
            at = past

    def inside(self, number: int, most: float = math.inf, subject: str = "") -> Iterator[Message]:
        """Yield the messages in the fields of a number, up to `most` of a subject."""
        count = 0
        for field_number, kind, start, end in self.fields():
            if field_number == number and kind == BYTES:
                count += 1
                self.limit(count, most, subject)
                yield Message(self.file, start, end)

    def last(self, number: int, kind: int = BYTES) -> Message | None:
        """Return the bytes of the last field of a number and a kind; None if there is none."""
        message = None
        for field_number, its_kind, start, end in self.fields():
            if field_number == number and its_kind == kind:
                message = Message(self.file, start, end)
        return message

    def last_texts(self, *numbers: int) -> list[str]:
        """Return the last text for each number; an empty one if there is none."""
        messages: list[Message | None] = [None] * len(numbers)
        for number, kind, start, end in self.fields():
            if kind == BYTES and number in numbers:
                messages[numbers.index(number)] = Message(self.file, start, end)
        return [message.text() if message else "" for message in messages]

    def text(self) -> str:
        """Decode the bytes themselves as a text."""
        try:
            return str(self.view, "utf-8")
        except UnicodeDecodeError:
            raise self.error("a text is not UTF-8") from None

    def integer(self, number: int, kind: int = VARINT) -> int:
        """Return the last integer of a kind, signed if it is a varint; 0 if there is none."""
        data = self.last(number, kind)
        if data is None:
            return 0
        return data.varint() if kind == VARINT else int.from_bytes(data.view, "little")

    def varint(self) -> int:
        """Return the varint that the bytes themselves are, as an int64."""
        value, _ = varint(self.file, self.start, self.end)
        return value - 2**64 if value >> 63 else value

    def integers(self, number: int, dtype: np.dtype[Any]) -> Array:
        """Return all varints of a number, packed or not, as integers of a dtype, modulo its range."""
        return self.unpack(self.numbers(number, 1), dtype)

    def unpack(self, varints: memoryview, dtype: np.dtype[Any]) -> Array:
        """Return the varints that some bytes of the message are."""
        data, written = np.frombuffer(varints, np.uint8), bytearray()
        while len(data):
            ends = np.flatnonzero(data[:PIECE] < 0x80)
            lengths = np.diff(ends, prepend=-1)
            if not len(ends) or lengths.max() > LONGEST or (data[ends[lengths == LONGEST]] > 1).any():
                raise self.error("one of its numbers goes on past its end, or has more than 64 bits")
            starts = ends + 1 - lengths
            piece, data = data[: ends[-1] + 1], data[ends[-1] + 1 :]
            shifts = (7 * (np.arange(len(piece)) - np.repeat(starts, lengths))).astype(np.uint64)
            values = np.bitwise_or.reduceat((piece & 0x7F).astype(np.uint64) << shifts, starts)
            written += values.astype(dtype).tobytes()
            most = (MOST_UNPACKED + 4 * len(self)) // dtype.itemsize
            self.limit(len(written) // dtype.itemsize, most, "numbers")
        return np.frombuffer(written, dtype)

    def numbers(self, number: int, width: int) -> memoryview:
        """Return the bytes of all numbers of a field, packed or not; in place if possible.

        They are of 4 or 8 bytes each, or varints with a `width` of 1.
        """
        whole, joined = self.file.buffer[:0], bytearray()
        kinds = BYTES, {1: VARINT, 4: FIXED32, 8: FIXED64}[width]
        for field_number, kind, start, end in self.fields():
            if field_number != number or kind not in kinds:
                continue
            if (end - start) % width:
                raise self.file.error(start, f"{end - start} bytes hold numbers of {width} bytes each")
            if width == 1 and end > start and self.file.buffer[end - 1] > 0x7F:
                raise self.file.error(start, "the last of its numbers goes on past its end")
            joined += whole
            whole = self.file.buffer[start:end]
        if not joined:
            return whole
        joined += whole
        return memoryview(joined).toreadonly()
