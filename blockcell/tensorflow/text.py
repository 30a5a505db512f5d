"""Protobuf's text format (``.pbtxt``): graphs in it become the bytes that they are in binary, to be read as those are.

Fields that are not in `schema`, which no reader here asks for, are left out.
"""

from __future__ import annotations

import re
from typing import NoReturn

import numpy as np

from .mapped import File
from .schema import DOUBLE, FLOAT, INTEGER, TEXT, MessageFields
from .tensors import DTYPES
from .wire import BYTES, FIXED32, FIXED64, VARINT

DEEPEST = 100  # as in protobuf
_UNREAD = MessageFields()

_TOKEN = re.compile(
    rb"""(?:[\s,;]++|\#[^\n]*+)*+(?:
    (?P<open>[{<])|(?P<close>[}>])|(?P<colon>:)|(?P<list>\[)|(?P<listed>\])
    |(?P<text>"(?:[^"\\\n]++|\\.)*+"|'(?:[^'\\\n]++|\\.)*+')
    |(?P<word>[-+]?[\w./]++(?:(?<=[eE])[-+]\w++)?)
    |(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPES = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_ENUM = {f"DT_{dtype.name.upper()}": number for number, dtype in DTYPES.items()}
_ENUM |= {"DT_FLOAT": 1, "DT_DOUBLE": 2, "DT_HALF": 19, "true": 1, "false": 0}
_ENUM |= {f"{name}_REF": number + 100 for name, number in _ENUM.items() if name.startswith("DT_")}


def unescaped(text: bytes) -> bytes:
    """Return the bytes that stand between quotation marks, without escapes."""

    def value(escape: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = escape.groups()
        if letter:
            return bytes([_ESCAPES.get(letter[0], letter[0])])
        return bytes([int(octal, 8) & 0xFF if octal else int(hexadecimal, 16)])

    return _ESCAPE.sub(value, text)


def binary(file: File, message: MessageFields) -> File:
    """Convert a message in text to binary."""
    return File(f"{file.name}, in binary", bytes(_Reader(file).message(message, "end", DEEPEST)))


class _Reader:
    """A text, and the word in it that is next."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._past = 0
        self._next()

    def _next(self) -> None:
        token = _TOKEN.match(self._file.buffer, self._past)
        if token is None:
            raise self._file.error(self._past, "what follows is no text of protobuf's")
        self._kind = token.lastgroup or ""
        self._text: bytes = token[self._kind]
        self._at, self._past = token.start(self._kind), token.end()

    def _unexpected(self, expected: str) -> NoReturn:
        start = self._text[:40].decode("utf-8", "replace") or "the end"
        raise self._file.error(self._at, f"there is {start!r}; expected {expected}")

    def message(self, message: MessageFields, closing: str, depth: int) -> bytearray:
        """Convert the fields of a message to binary, up to the word that closes it."""
        written = bytearray()
        while self._kind != closing:
            number: int = 0
            form: str | MessageFields = ""
            if self._kind == "word":
                number, form = message.fields.get(self._text.decode("utf-8", "replace"), (0, ""))
            elif self._kind == "list":  # the name of an extension
                while self._kind not in ("listed", "end"):
                    self._next()
            else:
                self._unexpected("a field")
            self._next()
            if self._kind == "colon":
                self._next()
            written += self._value(number, form, depth)
        return written

    def _value(self, number: int, form: str | MessageFields, depth: int) -> bytes:
        """Convert a value to a field in binary; to nothing if no reader asks for the field."""
        if self._kind == "open" and (not number or isinstance(form, MessageFields)):
            if not depth:
                raise self._file.error(self._at, f"messages are nested more than {DEEPEST} deep")
            self._next()
            content = self.message(form if isinstance(form, MessageFields) else _UNREAD, "close", depth - 1)
            self._next()
            return _field(number, bytes(content)) if number else b""
        if self._kind == "text" and (not number or form == TEXT):
            whole = bytearray()
            while self._kind == "text":
                whole += unescaped(self._text[1:-1])
                self._next()
            return _field(number, bytes(whole)) if number else b""
        if self._kind == "word" and (not number or form in (INTEGER, FLOAT, DOUBLE)):
            written = self._number(number, form) if number else b""
            self._next()
            return written
        self._unexpected("a message, in braces" if isinstance(form, MessageFields) else form or "a value")

    def _number(self, number: int, form: str | MessageFields) -> bytes:
        """Convert the number of a field to binary."""
        word = self._text.decode("utf-8", "replace")
        try:
            if form == INTEGER:
                value = _ENUM[word] if word in _ENUM else int(word, 0)
                if -(2**63) <= value < 2**64:
                    return _varint(number * 8 + VARINT) + _varint(value % 2**64)
            else:
                dtype, kind = ("<f4", FIXED32) if form == FLOAT else ("<f8", FIXED64)
                with np.errstate(over="ignore"):
                    return _varint(number * 8 + kind) + np.array(float(word)).astype(dtype).tobytes()
        except ValueError:
            pass
        self._unexpected("an integer of 64 bits" if form == INTEGER else "a number")


def _field(number: int, data: bytes) -> bytes:
    return _varint(number * 8 + BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
