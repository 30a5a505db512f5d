"""Writes what TensorFlow's files consist of, right or wrong, for what TensorFlow itself does not write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from blockcell.tensorflow.crc32c import crc32c

MAGIC = 0xDB4775248B80FB57
TYPES = {"float32": 1, "float64": 2, "int32": 3, "string": 7, "complex64": 8, "int64": 9, "bool": 10, "qint8": 11,
         "bfloat16": 14, "float16": 19}  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow.npz"


def unpack(folder: Path) -> dict[str, np.ndarray]:
    """Write the files that TensorFlow wrote; what it reads from them."""
    with np.load(GOLDEN) as golden:
        for name in golden.files:
            if name.startswith("file/"):
                path = folder / name.removeprefix("file/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(golden[name].tobytes())
        return {name: golden[name] for name in golden.files if not name.startswith("file/")}


def crcs(data: bytes) -> list[int]:
    """Return the CRC-32C of the first bytes of data, for all lengths, by the definition, bit by bit."""
    crc, checksums = 0xFFFFFFFF, [0]
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        checksums.append(crc ^ 0xFFFFFFFF)
    return checksums


def masked(data: bytes) -> int:
    crc = crcs(data)[-1] if len(data) < 100_000 else crc32c(data)  # which is compared with `crcs`, and much faster
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# ------------------------------------------------------------------------------------------------------------ messages
def varint(value: int) -> bytes:
    value &= 2**64 - 1
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint that begins at this position, and the position behind it; IndexError if data ends before."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Fields = list[tuple[int, int, int | bytes]]
"""Number, wire type and value of each field of a message: an integer for VARINT, else bytes."""


def decode_fields(data: bytes) -> Fields:
    """Return the fields of a message; ValueError if it is none."""
    fields: Fields = []
    position = 0
    try:
        while position < len(data):
            tag, position = read_varint(data, position)
            number, wire_type = tag >> 3, tag & 7
            if wire_type not in (VARINT, FIXED64, BYTES, FIXED32) or not number:
                raise ValueError("a field has another wire type, or no number")
            if wire_type == VARINT:
                value, position = read_varint(data, position)
                fields.append((number, wire_type, value))
                continue
            length = 8 if wire_type == FIXED64 else 4
            if wire_type == BYTES:
                length, position = read_varint(data, position)
            start, position = position, position + length
            if position > len(data):
                raise ValueError("a field goes on past the end")
            fields.append((number, wire_type, data[start:position]))
    except IndexError:
        raise ValueError("a varint goes on past the end") from None
    return fields


def encode_fields(fields: Fields) -> bytes:
    """Return the message of these fields."""
    message = bytearray()
    for number, wire_type, value in fields:
        message += varint(number << 3 | wire_type)
        if isinstance(value, int):
            message += varint(value)
        else:
            message += (varint(len(value)) if wire_type == BYTES else b"") + value
    return bytes(message)


def field(number: int, value: int | float | bytes | str) -> bytes:
    """Return a field: a varint, 4 bytes of a float, or bytes."""
    if isinstance(value, int):
        return varint(number * 8) + varint(value)
    if isinstance(value, float):
        return varint(number * 8 + 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number * 8 + 2) + varint(len(data)) + data


def shape(*sizes: int) -> bytes:
    return b"".join(field(2, field(1, size)) for size in sizes)


def tensor(dtype: str, sizes: Sequence[int], values: bytes = b"") -> bytes:
    """Return a TensorProto; `values` are its fields of values."""
    return field(1, TYPES[dtype]) + field(2, shape(*sizes)) + values


def node(name: str, op: str, inputs: Sequence[str] = (), **attrs: bytes) -> bytes:
    """Return a NodeDef; the attributes are AttrValues."""
    fields = [field(1, name), field(2, op), *(field(3, name) for name in inputs)]
    return b"".join([*fields, *(field(5, field(1, key) + field(2, value)) for key, value in attrs.items())])


def constant(name: str, value: bytes) -> bytes:
    """Return a Const with a TensorProto."""
    return node(name, "Const", value=field(8, value))


def graph(*nodes: bytes) -> bytes:
    return b"".join(field(1, message) for message in nodes)


# -------------------------------------------------------------------------------------------------------------- tables
def block(entries: Sequence[tuple[bytes, bytes]], restart: int = 16, compression: int = 0) -> bytes:
    data, last, restarts = bytearray(), b"", []
    for k, (key, value) in enumerate(entries):
        shared = 0
        if k % restart:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        else:
            restarts.append(len(data))
        data += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    data += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)) + bytes([compression])
    return bytes(data) + struct.pack("<I", masked(data))


def footer(index: int, size: int) -> bytes:
    places = varint(0) + varint(0) + varint(index) + varint(size)
    return places.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def table(entries: Mapping[bytes, bytes], per_block: int = 8, restart: int = 16) -> bytes:
    items = list(entries.items())
    blocks, places, at = [], [], 0
    for k in range(0, len(items), per_block):
        part = items[k : k + per_block]
        blocks.append(block(part, restart))
        places.append((part[-1][0], varint(at) + varint(len(blocks[-1]) - 5)))
        at += len(blocks[-1])
    index = block(places, 1)
    return b"".join(blocks) + index + footer(at, len(index) - 5)


# --------------------------------------------------------------------------------------------------------------- files
def entry(
    dtype: str,
    sizes: Sequence[int],
    data: bytes,
    offset: int = 0,
    shard: int = 0,
    more: bytes = b"",
    stored: int | None = None,
) -> bytes:
    """Return a BundleEntryProto of data; `stored` is the masked checksum."""
    crc = varint(6 * 8 + 5) + struct.pack("<I", masked(data) if stored is None else stored)
    head = field(1, TYPES[dtype]) + field(2, shape(*sizes)) + field(3, shard)
    return head + field(4, offset) + field(5, len(data)) + crc + more


def write_checkpoint(prefix: Path, entries: Mapping[bytes, bytes], *shards: bytes, header: bytes | None = None) -> Path:
    header = field(1, len(shards)) if header is None else header
    prefix.with_name(f"{prefix.name}.index").write_bytes(table({b"": header} | dict(sorted(entries.items()))))
    for k, data in enumerate(shards):
        prefix.with_name(f"{prefix.name}.data-{k:05}-of-{len(shards):05}").write_bytes(data)
    return prefix


def package(regions: Mapping[str, bytes], lengths: bool = True) -> bytes:
    """Return a memory-mapped package; the region "." is the graph."""
    data, directory = bytearray(), b""
    for name, content in regions.items():
        data += bytes(-len(data) % 64)
        element = field(1, len(data)) + field(2, f"memmapped_package://{name}")
        directory += field(1, element + (field(3, len(content)) if lengths else b""))
        data += content
    return bytes(data) + directory + struct.pack("<Q", len(data))


def immutable(name: str, dtype: str, sizes: Sequence[int]) -> bytes:
    """Return an ImmutableConst whose region has the node's name."""
    region = field(2, f"memmapped_package://{name}")
    return node(name, "ImmutableConst", dtype=field(6, TYPES[dtype]), shape=field(7, shape(*sizes)),
                memory_region_name=region)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- objects
def tracked(children: Mapping[str, int], *attributes: tuple[str, str], kind: bytes = b"") -> bytes:
    """Return an object of an object graph: its children, and the full names and keys of variables."""
    edges = b"".join(field(1, field(1, number) + field(2, name)) for name, number in children.items())
    return edges + b"".join(
        field(2, field(1, "VARIABLE_VALUE") + field(2, full) + field(3, key)) for full, key in attributes
    ) + kind  # fmt: skip


def encode_variables(values: Mapping[str, np.ndarray]) -> tuple[dict[bytes, bytes], bytes]:
    """Return the entries of variables by their names, and their data."""
    entries, data = {}, b""
    for name, value in values.items():
        entries[name.encode()] = entry(str(value.dtype), value.shape, value.tobytes(), len(data))
        data += value.tobytes()
    return entries, data


def save_variables(prefix: Path, values: Mapping[str, np.ndarray]) -> Path:
    """Write a checkpoint of variables, by their names."""
    return write_checkpoint(prefix, *encode_variables(values))


def write_objects(prefix: Path, values: Mapping[str, np.ndarray], objects: bytes) -> Path:
    """Write a checkpoint of variables, by their keys, and of a graph of objects."""
    entries, data = encode_variables(values)
    length = len(objects).to_bytes(4, "little")
    checksum = masked(length).to_bytes(4, "little")
    text = varint(len(objects)) + checksum + objects
    stored = masked(length + checksum + objects)
    entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry("string", (), text, len(data), stored=stored)
    return write_checkpoint(prefix, entries, data + text)
