"""Protobuf's wire format, tables and checksums, from bytes that the tests write."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tf_files
from hypothesis import given
from hypothesis import strategies as st
from tf_files import decode_fields, encode_fields, field, varint
from traced import peak

from blockcell import FormatError
from blockcell.tensorflow import crc32c as checksums
from blockcell.tensorflow import wire
from blockcell.tensorflow.mapped import File
from blockcell.tensorflow.table import Table, is_table
from blockcell.tensorflow.wire import Message

INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)


@pytest.fixture
def file(tmp_path):
    """Return a function that makes a file of bytes."""

    def write_file(data: bytes) -> File:
        path = tmp_path / "a file"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return File(path)

    return write_file


@pytest.fixture
def message(file):
    """Return a function that makes a message of a whole file."""
    return lambda data: Message(file(data), 0, len(data))


# ------------------------------------------------------------------------------------------------------------- messages
NUMBERS = st.integers(1, 2**29 - 1)
FIELDS = st.lists(
    st.tuples(NUMBERS, st.just(wire.VARINT), st.integers(0, 2**64 - 1))
    | st.tuples(NUMBERS, st.just(wire.FIXED64), st.binary(min_size=8, max_size=8))
    | st.tuples(NUMBERS, st.just(wire.BYTES), st.binary(max_size=300))
    | st.tuples(NUMBERS, st.just(wire.FIXED32), st.binary(min_size=4, max_size=4))
)


@given(FIELDS)
def test_fields_are_what_was_written(tmp_path_factory, fields):
    data = encode_fields(fields)
    assert decode_fields(data) == fields
    path = tmp_path_factory.mktemp("wire") / "message"
    path.write_bytes(data)
    whole = Message(File(path), 0, len(data))
    values = [(number, wire_type, Message(whole.file, *place)) for number, wire_type, *place in whole.fields()]
    assert [(n, t, v.varint() % 2**64 if t == wire.VARINT else bytes(v.view)) for n, t, v in values] == fields


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\2a", b"\x0d\0\0\0", b"\x09" + bytes(7), b"\0\0", b"\x0b\0"])
def test_what_is_no_message_is_not_decoded(data):
    with pytest.raises(ValueError):
        decode_fields(data)


def test_the_last_of_a_field_counts(message):
    read_message = message(
        field(1, 5) + field(2, "a") + field(1, -7) + field(1, "another kind") + field(2, "b") + field(3, 2.5)
    )
    assert read_message.integer(1) == -7 and read_message.last_texts(2, 1, 4) == ["b", "another kind", ""]
    assert read_message.integer(4) == 0 and read_message.last(4) is None
    assert [text.text() for text in read_message.inside(2)] == ["a", "b"]


@given(st.lists(st.lists(INTEGERS, max_size=5) | INTEGERS, max_size=6))
def test_repeated_numbers_packed_or_not(tmp_path_factory, values):
    data = b"".join(
        field(9, b"".join(map(varint, value))) if isinstance(value, list) else field(9, value) for value in values
    )
    path = tmp_path_factory.mktemp("wire") / "message"
    path.write_bytes(data)
    flat = [number for value in values for number in (value if isinstance(value, list) else [value])]
    data += field(9, b"".join(map(varint, flat * 40)))  # enough to be unpacked at once
    path.write_bytes(data)
    flat *= 41
    for dtype in map(np.dtype, (np.int64, np.int32, np.uint16, np.uint64)):
        numbers = Message(File(path), 0, len(data)).integers(9, dtype)
        wrapped = np.array([number % 2**64 for number in flat], np.uint64).astype(dtype)
        np.testing.assert_array_equal(numbers, wrapped, strict=True)


def test_many_packed_numbers(message):
    """More than are unpacked at once, so that some are cut in two."""
    values = np.random.default_rng(0).integers(0, 2**63, 30_000) >> np.arange(30_000) % 64
    numbers = message(field(3, b"".join(varint(int(value)) for value in values))).integers(3, np.dtype(np.int64))
    np.testing.assert_array_equal(numbers, values)


def test_numbers_of_fixed_width(message):
    packed, single = struct.pack("<3f", 1, 2, 3), field(5, 4.0)
    assert bytes(message(field(5, packed)).numbers(5, 4)) == packed
    expected = packed + struct.pack("<f", 4) + packed
    assert bytes(message(field(5, packed) + single + field(5, packed)).numbers(5, 4)) == expected
    assert bytes(message(b"\x31" + b"\7" * 8).numbers(6, 8)) == b"\7" * 8
    assert bytes(message(b"").numbers(5, 4)) == b""


@pytest.mark.parametrize(
    "data, words",
    [
        (b"\x80", "goes on past the end"),
        (b"\x08\xff", "byte 1: a number goes on past the end"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "more than 64 bits"),
        (b"\x0a\x05abcd", "a field ends at byte 7, past what holds it, which ends at byte 6"),
        (b"\x0a" + varint(2**63), "past what holds it"),
        (b"\x0d\1\2\3", "past what holds it"),
        (b"\x09\1\2\3\4\5\6\7", "past what holds it"),
        (b"\x0b\x0c", "the kind 3"),
        (b"\x0c", "the kind 4"),
        (b"\x0f", "the kind 7"),
        (b"\x00\x01", "the number 0"),
        (varint(2**32) + b"\1", "the number 536870912"),
    ],
)
def test_what_is_no_message(message, data, words):
    with pytest.raises(FormatError, match=f"a file, .*{words}"):
        list(message(data).fields())


@pytest.mark.parametrize("packed", [b"\x80", b"\1" * 2**16 + b"\xff", b"\xff" * 9 + b"\x02", b"\x80" * 2**17 + b"\1"])
def test_what_are_no_packed_numbers(message, packed):
    with pytest.raises(FormatError, match=r"64 bits|goes on"):
        message(field(1, packed)).integers(1, np.dtype(np.int64))


def test_packed_numbers_have_their_width(message):
    with pytest.raises(FormatError, match="5 bytes hold numbers of 4 bytes"):
        message(field(1, b"12345")).numbers(1, 4)


def test_numbers_take_no_more_memory_than_the_file(message):
    whole = message(field(1, bytes(2**24)))
    _, used = peak(lambda: whole.integers(1, np.dtype(np.int32)))
    assert used < 4 * 2**24 + 2**24
    with pytest.raises(FormatError, match=r"more than \d+ numbers"):
        whole.integers(1, np.dtype(np.int64))


@pytest.mark.parametrize("one_field", [field(1, 7), field(1, b"\7"), field(1, b""), field(1, b"\7" * 300)])
def test_numbers_in_many_fields_take_no_more_memory(message, one_field):
    whole = message(one_field * (2**19 // len(one_field)))
    numbers, used = peak(lambda: whole.integers(1, np.dtype(np.int32)))
    assert (numbers == 7).all() and len(numbers) == (2**19 // len(one_field)) * one_field.count(7, 1)
    assert used < 4 * len(whole) + 2**22


def test_text_is_utf8(message):
    assert message(field(1, "Gerät")).last_texts(1) == ["Gerät"]
    with pytest.raises(FormatError, match="UTF-8"):
        message(field(1, b"\xff")).last_texts(1)


def test_depth_does_not_matter(message):
    """Nothing is parsed but what is asked for, so nothing recurses."""
    data = b""
    for _ in range(20_000):
        data = field(1, data)
    outer, depth = message(data), 0
    while (inner := outer.last(1)) is not None:
        outer, depth = inner, depth + 1
    assert depth == 20_000


# -------------------------------------------------------------------------------------------------------------- CRC-32C
@pytest.mark.parametrize(
    "data, crc",
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this one and those below: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksums_that_are_known(data, crc):
    assert checksums.crc32c(data) == crc == tf_files.crcs(data)[-1]


def test_checksums_of_all_lengths(monkeypatch):
    """About all places where the way of computing changes: words, a first fold, a last one of few, chunks."""
    monkeypatch.setattr(checksums, "CHUNK", 7000)
    words, fold = 8 * checksums.SPAN, 8 * checksums.SHIFTS[0]
    places = [100, checksums.SPAN, checksums.SPAN + checksums.SHIFTS[0], words, words + fold, 8 * 7000, 8 * 14000]
    data = np.random.default_rng(1).bytes(max(places) + 20)
    expected = tf_files.crcs(data)
    for length in [*range(60), *(place + k for place in places for k in range(-9, 13, 3))]:
        assert checksums.crc32c(memoryview(data)[:length]) == expected[length], length


def test_the_polynomial_that_folds_is_a_multiple():
    def power(exponent):
        value = 1
        for _ in range(exponent):
            value <<= 1
            value ^= 0x11EDC6F41 if value >> 32 else 0
        return value

    shifts = checksums.SHIFTS
    assert power(checksums.SPAN) ^ power(checksums.SPAN - shifts[0]) ^ power(checksums.SPAN - shifts[1]) ^ 1 == 0
    assert shifts[2] == checksums.SPAN


# --------------------------------------------------------------------------------------------------------------- tables
@given(
    st.dictionaries(st.binary(max_size=12) | st.binary(max_size=2).map(lambda b: b"prefix" * 9 + b), st.binary()),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_tables_are_what_was_written(tmp_path_factory, entries, per_block, restart):
    path = tmp_path_factory.mktemp("table") / "table"
    path.write_bytes(tf_files.table(dict(sorted(entries.items())), per_block, restart))
    table_file = File(path)
    assert is_table(table_file)
    read = {entry.key: bytes(entry.value.view) for entry in Table(table_file).entries()}
    assert read == entries and list(read) == sorted(entries)


def one_block(content: bytes, *restarts: int, compression: int = 0) -> bytes:
    """Return a table of a block with these bytes."""
    data = content + struct.pack(f"<{len(restarts)}I", *restarts) + bytes([compression])
    data += struct.pack("<I", tf_files.masked(data))
    index = tf_files.block([(b"z", varint(0) + varint(len(data) - 5))], 1)
    return data + index + tf_files.footer(len(data), len(index) - 5)


def index_of(*places: bytes) -> bytes:
    """Return a table of one block, and an index that says where the blocks are."""
    data = tf_files.block([(b"a", b"1")])
    index = tf_files.block([(b"k%d" % k, place) for k, place in enumerate(places)], 1)
    return data + index + tf_files.footer(len(data), len(index) - 5)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "does not end as a table"),
        (b"x" * 100, "does not end as a table"),
        (tf_files.footer(2**63, 5), "a block is said to be at 9223372036854775808"),
        (tf_files.footer(0, 2**40), "of 1099511627776 bytes"),
        (tf_files.footer(0, 0), "of 0 bytes"),
        (b"\x80" * 40 + tf_files.footer(0, 0)[40:], "64 bits"),
        (one_block(b"\1\1\1ab", 0, 1), "an entry has 1 \\+ 1 bytes of key and 1 of value"),
        (one_block(b"\0\1\7ab", 0, 1), "an entry has 0 \\+ 1 bytes of key and 7 of value"),
        (one_block(b"\0" + b"\xff" * 9 + b"\1\0", 0, 1), "bytes of key"),
        (one_block(b"\0\1\1ab\0\1\1ab", 0, 1), "the key b'a' comes after b'a'"),
        (one_block(b"\0\1\1ba\0\1\1ab", 0, 1), "the key b'a' comes after b'b'"),
        (one_block(b"\0\1\1ab", 2**31), "has 2147483648 restarts"),
        (one_block(b"\0\1\1ab", 0, 1, compression=1), "snappy.*save it with TensorFlow"),
        (one_block(b"\0\1\1ab", 0, 1, compression=9), "the method 9"),
        (index_of(varint(0) + varint(13), varint(0) + varint(13)), "expected it in 18:"),
        (index_of(varint(5) + varint(2**60)), "said to be at 5"),
        (index_of(b"\x80"), "goes on past the end"),
    ],
)  # fmt: skip
def test_what_is_no_table(file, data, words):
    table_file = file(data)
    with pytest.raises(FormatError, match=f"a file, .*{words}"):
        list(Table(table_file).entries())


def test_every_byte_of_a_table_counts(file):
    """But those of the footer that nothing reads."""
    data = tf_files.table({b"%03d" % k: b"value" * k for k in range(5)}, 2, 2)
    whole = [(entry.key, bytes(entry.value.view)) for entry in Table(file(data)).entries()]
    refused = 0
    for k in range(len(data)):
        changed = bytearray(data)
        changed[k] ^= 1 << k % 8
        try:
            entries = [(entry.key, bytes(entry.value.view)) for entry in Table(file(changed)).entries()]
        except FormatError:
            refused += 1
        else:
            assert entries == whole and k >= len(data) - 48
    assert refused > len(data) - 48 + 8


def test_keys_that_grow_are_refused(file):
    """Each entry of 5 bytes would have a key of thousands, which are all kept."""
    head = b"\0" + varint(60_000) + b"\0" + b"a" * 60_000
    entries = b"".join(varint(60_000 + k) + b"\1\0" + b"a" for k in range(2000))
    table_file = file(one_block(head + entries, 0, 1))

    def read():
        with pytest.raises(FormatError, match=r"more than \d+ bytes of keys"):
            list(Table(table_file).entries())

    _, used = peak(read)
    assert used < 4 * len(table_file) + 2**26
