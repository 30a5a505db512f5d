"""Rewire one input of one node of a graph, or change one whole number: valid files that say what no program writes.

`list_slots` lists all that may be changed in a graph, node by node, and `replace_value` makes one change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tf_files import VARINT, decode_fields, encode_fields, varint

NUMBERS = [-(2**63), -(2**31), -17, -3, -2, -1, 0, 1, 2, 3, 5, 64, 2**20, 2**31 - 1, 2**62]
_MAX_ENTRIES = 4  # entries of a tensor that are changed
_INTEGERS: dict[int | bytes, tuple[str, int]] = {3: ("<i", 7), 9: ("<q", 10)}
"""Of dtypes: how numbers lie in the bytes of a tensor, and the field where they stand one by one."""


class Slot(NamedTuple):
    """A place of a graph that may be changed: an input of a node, or a whole number in one of its attributes."""

    path: tuple[int, ...]
    """The positions of the fields that lead to it."""
    encode: Callable[[Any], int | bytes]
    """Takes a replacement to the new value of the field."""
    replacements: Sequence[str | int]
    """What may stand there, also what does."""


def messages_in(data: bytes, *numbers: int) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield the messages that fields of these numbers, one in the other, hold, and the path to each."""
    if not numbers:
        yield (), data
        return
    for k, (number, _, value) in enumerate(decode_fields(data)):
        if number == numbers[0] and isinstance(value, bytes):
            for path, message in messages_in(value, *numbers[1:]):
                yield (k, *path), message


def replace_value(data: bytes, path: Sequence[int], value: int | bytes) -> bytes:
    """Return the message with another value in the field at a path."""
    fields = decode_fields(data)
    number, wire_type, old_value = fields[path[0]]
    if len(path) > 1:
        assert isinstance(old_value, bytes)
        value = replace_value(old_value, path[1:], value)
    fields[path[0]] = number, wire_type, value
    return encode_fields(fields)


def first_text(data: bytes, number: int) -> str:
    """Return the text of the first field of a number, or nothing."""
    return next((value.decode() for n, _, value in decode_fields(data) if n == number and isinstance(value, bytes)), "")


def list_slots(data: bytes, *wrapped: int) -> list[Slot]:
    """List all that may be changed in a graph: a file, or what its fields of these numbers, one in the other, hold."""
    slots: list[Slot] = []
    for graph_path, graph in messages_in(data, *wrapped):
        nodes = [((*graph_path, *path), node) for path, node in messages_in(graph, 1)]
        slots += _slots_of_body(nodes, [first_text(node, 1) for _, node in nodes])
        for path, function in messages_in(graph, 2, 1):
            nodes = [((*graph_path, *path, *inner_path), node) for inner_path, node in messages_in(function, 3)]
            argument_names = [first_text(argument, 1) for _, argument in messages_in(function, 1, 2)]
            output_names = [f"{first_text(node, 1)}:{first_text(node, 2)}:0" for _, node in nodes]
            slots += _slots_of_body(nodes, argument_names + output_names)
    return slots


def _slots_of_body(nodes: Sequence[tuple[tuple[int, ...], bytes]], names: Sequence[str]) -> Iterator[Slot]:
    """Yield the slots of nodes; an input may be any input that there is, any node or argument, or a second output."""
    input_names = [value.decode() for _, node in nodes for number, _, value in decode_fields(node)
            if number == 3 and isinstance(value, bytes)]  # fmt: skip
    replacements = list(dict.fromkeys([*input_names, *names, *(f"{first_text(node, 1)}:1" for _, node in nodes)]))
    for path, node in nodes:
        for k, (number, _, _) in enumerate(decode_fields(node)):
            if number == 3:
                yield Slot((*path, k), str.encode, replacements)
        yield from (slot._replace(path=(*path, *slot.path)) for slot in _number_slots(node))


def _number_slots(node: bytes) -> Iterator[Slot]:
    """Yield the slots of a node's attributes: whole numbers, also in lists, bools, and the numbers of tensors."""
    for path, value in messages_in(node, 5, 2):
        for k, (number, wire_type, content) in enumerate(decode_fields(value)):
            if number in (3, 5) and wire_type == VARINT:
                yield _number_slot((*path, k), content)
        for inner_path, numbers in messages_in(value, 1):
            for k, (number, _, content) in enumerate(decode_fields(numbers)):
                if number == 3:
                    yield _number_slot((*path, *inner_path, k), content)
        for inner_path, tensor in messages_in(value, 8):
            fields = decode_fields(tensor)
            dtype = next((content for number, _, content in fields if number == 1), 0)
            form, entry_field = _INTEGERS.get(dtype, ("", 0))
            for k, (number, _, content) in enumerate(fields):
                if form and number == entry_field:
                    yield _number_slot((*path, *inner_path, k), content)
                elif form and number == 4 and isinstance(content, bytes):
                    size = struct.calcsize(form)
                    for start in range(0, min(len(content), _MAX_ENTRIES * size), size):
                        yield _entry_slot((*path, *inner_path, k), content, form, start)


def _number_slot(path: tuple[int, ...], old_value: int | bytes) -> Slot:
    """Return the slot of a field with a number, or with packed varints, in place of which one stands."""
    if isinstance(old_value, int):
        return Slot(path, lambda number: number % 2**64, [*NUMBERS, old_value - 1, old_value + 1])
    return Slot(path, varint, NUMBERS)


def _entry_slot(path: tuple[int, ...], content: bytes, form: str, start: int) -> Slot:
    """Return the slot of an entry in the bytes of a tensor."""

    def encode(number: int) -> bytes:
        """Return the bytes with this entry."""
        new_content = bytearray(content)
        struct.pack_into(form, new_content, start, number)
        return bytes(new_content)

    (old_number,), limit = struct.unpack_from(form, content, start), 2 ** (8 * struct.calcsize(form) - 1)
    return Slot(path, encode, [n for n in (*NUMBERS, old_number - 1, old_number + 1) if -limit <= n < limit])
