"""Graphs with one input of one node rewired, or one whole number changed: valid files that say what no program writes.

`slots` lists all that may be changed in a graph, node by node, and `changed` makes one change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tf_files import varint

NUMBERS = [-(2**63), -(2**31), -17, -3, -2, -1, 0, 1, 2, 3, 5, 64, 2**20, 2**31 - 1, 2**62]
_MOST = 4  # entries of a tensor that are changed
_INTEGERS: dict[int | bytes, tuple[str, int]] = {
    3: ("<i", 7),
    9: ("<q", 10),
}  # dtypes: how numbers lie in a file, and the field where they stand one by one


class Slot(NamedTuple):
    """What may be changed: an input of a node, or a whole number in one of its attributes."""

    where: tuple[int, ...]
    """The positions of the fields that lead to it."""
    what: str
    """"input", "number" of a field, "varints" in one, or a form of `struct` and the byte: "<i at 4"."""
    others: Sequence[str | int]
    """What may stand there, also what does."""


Fields = list[tuple[int, int, int | bytes]]


def fields_of(data: bytes) -> Fields:
    """Number, wire type and value of each field."""
    found: Fields = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        kind = tag & 7
        if kind == 0:
            found.append((tag >> 3, kind, number()))
        else:
            length = number() if kind == 2 else {1: 8, 5: 4}[kind]
            found.append((tag >> 3, kind, data[at : at + length]))
            at += length
    return found


def joined(fields: Fields) -> bytes:
    made = []
    for number, kind, value in fields:
        made.append(varint(number << 3 | kind))
        made.append(varint(value) if isinstance(value, int) else (varint(len(value)) if kind == 2 else b"") + value)
    return b"".join(made)


def inside(data: bytes, *numbers: int) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """What fields of these numbers, one in the other, hold, and where they are."""
    if not numbers:
        yield (), data
        return
    for k, (number, _, value) in enumerate(fields_of(data)):
        if number == numbers[0] and isinstance(value, bytes):
            for where, held in inside(value, *numbers[1:]):
                yield (k, *where), held


def put(data: bytes, where: Sequence[int], value: int | bytes) -> bytes:
    """With another value in a field."""
    fields = fields_of(data)
    number, kind, old = fields[where[0]]
    if len(where) > 1:
        assert isinstance(old, bytes)
        value = put(old, where[1:], value)
    fields[where[0]] = number, kind, value
    return joined(fields)


def at(data: bytes, where: Sequence[int]) -> int | bytes:
    """What is in a field."""
    value: int | bytes = data
    for k in where:
        assert isinstance(value, bytes)
        value = fields_of(value)[k][2]
    return value


def text(data: bytes, number: int) -> str:
    return next((value.decode() for n, _, value in fields_of(data) if n == number and isinstance(value, bytes)), "")


def slots(data: bytes, *wrapped: int) -> list[Slot]:
    """All that may be changed in a graph: a file, or what its fields of these numbers, one in the other, hold."""
    found: list[Slot] = []
    for place, graph in inside(data, *wrapped):
        nodes = [((*place, *where), node) for where, node in inside(graph, 1)]
        found += _of_body(nodes, [text(node, 1) for _, node in nodes])
        for where, function in inside(graph, 2, 1):
            nodes = [((*place, *where, *more), node) for more, node in inside(function, 3)]
            given = [text(argument, 1) for _, argument in inside(function, 1, 2)]
            found += _of_body(nodes, given + [f"{text(node, 1)}:{text(node, 2)}:0" for _, node in nodes])
    return found


def _of_body(nodes: Sequence[tuple[tuple[int, ...], bytes]], names: Sequence[str]) -> Iterator[Slot]:
    """Inputs may be whatever inputs there are, all nodes and arguments, and second outputs of nodes."""
    used = [value.decode() for _, node in nodes for number, _, value in fields_of(node)
            if number == 3 and isinstance(value, bytes)]  # fmt: skip
    others = list(dict.fromkeys([*used, *names, *(f"{text(node, 1)}:1" for _, node in nodes)]))
    for where, node in nodes:
        for k, (number, _, _) in enumerate(fields_of(node)):
            if number == 3:
                yield Slot((*where, k), "input", others)
        yield from (each._replace(where=(*where, *each.where)) for each in _numbers(node))


def _numbers(node: bytes) -> Iterator[Slot]:
    """Those of a node's attributes: whole numbers, also in lists, bools, and the numbers of tensors."""
    for where, value in inside(node, 5, 2):
        for k, (number, kind, held) in enumerate(fields_of(value)):
            if number in (3, 5) and kind == 0:
                yield Slot((*where, k), "number", _near(held))
        for more, numbers in inside(value, 1):
            for k, (number, _, held) in enumerate(fields_of(numbers)):
                if number == 3:
                    yield Slot((*where, *more, k), "number" if isinstance(held, int) else "varints", _near(held))
        for more, tensor in inside(value, 8):
            fields = fields_of(tensor)
            form, one_by_one = _INTEGERS.get(next((held for number, _, held in fields if number == 1), 0), ("", 0))
            for k, (number, _, held) in enumerate(fields):
                if form and number == one_by_one:
                    yield Slot((*where, *more, k), "number" if isinstance(held, int) else "varints", _near(held))
                elif form and number == 4 and isinstance(held, bytes):
                    size = struct.calcsize(form)
                    for start in range(0, min(len(held), _MOST * size), size):
                        (old,) = struct.unpack_from(form, held, start)
                        fit = [new for new in _near(old) if -(2 ** (8 * size - 1)) <= new < 2 ** (8 * size - 1)]
                        yield Slot((*where, *more, k), f"{form} at {start}", fit)


def _near(old: int | bytes) -> list[int]:
    return [*NUMBERS, old - 1, old + 1] if isinstance(old, int) else NUMBERS


def changed(data: bytes, slot: Slot, new: str | int) -> bytes:
    if isinstance(new, str):
        return put(data, slot.where, new.encode())
    if slot.what == "number":
        return put(data, slot.where, new % 2**64)
    if slot.what == "varints":
        return put(data, slot.where, varint(new))
    form, _, start = slot.what.partition(" at ")
    held = bytearray(at(data, slot.where))  # type: ignore[arg-type]
    struct.pack_into(form, held, int(start), new)
    return put(data, slot.where, bytes(held))
