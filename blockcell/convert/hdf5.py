"""Reading HDF5 files that need not be trusted, with h5py.

Every component of a path is looked at before it is opened: only hard links are followed, so that nothing outside of the
file is read. Datasets with external storage, virtual datasets, and chunks, which libhdf5 would inflate without a limit,
are refused. Whatever may take much memory or time is counted before it is read: bytes of arrays and texts, members of
groups, opened objects.

libhdf5 does not tell how long the texts of an attribute are before it has read all of them, and thousands may be one
long text of the file. One wrong byte in a heap lets it search forever, or ends the process when it opens a virtual
dataset. So `OpenFile` reads the headers of objects, and texts of variable length, from the bytes. The HDF5 File
Format Specification describes them in IV.A and III.E.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

try:
    import h5py
except ImportError as error:
    raise ImportError("files of Keras are HDF5, and h5py is not installed: pip install h5py") from error

from ..errors import FormatError
from ..files import LONGEST_TEXT
from ..optable import Array

MOST_TEXTS = 2**18  # that are read of a file, such as the names of layers
MOST_DEFLATED = 4  # how many times the size of a .keras all arrays may have; numbers of weights hardly deflate
SMALL = 2**20  # bytes that arrays may have in any case
BYTES_OF_OBJECT = 128  # that an object takes in the file at least; a dataset takes 311, a group 162
FEW_OBJECTS = 2**11  # that may be opened in any case
LONGEST_PATH = 2**12
MOST_ATTRIBUTES = 2**9  # of a group; Keras divides names among attributes of 64 kB
DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, struct.error)
"""What h5py, zipfile and struct raise for damaged files."""
_COMPRESSED_HEAP = re.compile(rb"FRHP\0..(?!\0\0)..[\0-\3]", re.DOTALL)
"""The header of a fractal heap, which has links or attributes, with filters: their length is not 0."""
_CONTINUATION, _ATTRIBUTE, _LAYOUT = 0x10, 0x0C, 0x08  # kinds of messages in headers
_ELEMENT = struct.Struct("<IQI")  # of an attribute: the length of a text, the address of its heap, its number there


class OpenFile:
    """The bytes of a file, what its parts may still take, and texts; headers with texts and heaps are read once."""

    def __init__(self, content: IO[bytes], file_size: int) -> None:
        self.file_size = file_size
        self._content = content
        self._attributes: dict[int, dict[bytes, bytes]] = {}
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}
        self.left = {
            "bytes": MOST_DEFLATED * file_size + SMALL,
            "bytes of texts": MOST_DEFLATED * file_size + SMALL,
            "texts": MOST_TEXTS,
            "objects": file_size // BYTES_OF_OBJECT + FEW_OBJECTS,
        }

    def check(self, label: str, count: int, kind: str) -> None:
        """Refuse more of a kind than is left."""
        if count > self.left[kind]:
            rest = f"which may have {self.left[kind]} more in all its parts"
            raise FormatError(f"{label} has {count} {kind}, in a file of {self.file_size} bytes, {rest}")

    def spend(self, label: str, count: int, kind: str) -> None:
        self.check(label, count, kind)
        self.left[kind] -= count

    def check_heaps(self) -> None:
        """Refuse heaps that libhdf5 would inflate without a limit."""
        self._content.seek(0)
        end = b""
        while block := self._content.read(SMALL):
            if _COMPRESSED_HEAP.search(end + block):
                raise FormatError("a heap of its names is compressed; expected one that is not")
            end = block[-16:]

    def _read_bytes(self, address: int, size: int) -> bytes:
        """Read bytes of texts, or of what leads to them."""
        self.spend(f"what is stored at {address}", size, "bytes of texts")
        self._content.seek(address)
        content = self._content.read(size)
        if len(content) != size:
            raise FormatError(f"it ends before the {size} bytes at {address}")
        return content

    def read_texts(self, header: int, name: str, count: int) -> list[bytes]:
        """Return the texts of an attribute; `header` is the address of its object's header."""
        if header not in self._attributes:
            messages = self._read_messages(header)
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
        layouts = [body[:2] for kind, body in self._read_messages(header) if kind == _LAYOUT]
        return any(version >= 3 and layout == 3 for version, layout in layouts)

    def _read_text(self, length: int, heap: int, number: int) -> bytes:
        if not length:
            return b""
        if heap not in self._heaps:
            self._heaps[heap] = self._read_heap(heap)
        address, size = self._heaps[heap].get(number, (0, 0))
        if length > size:
            raise FormatError(f"a text of {length} bytes is not in the heap at {heap}")
        return self._read_bytes(address, length).partition(b"\0")[0]

    def _read_messages(self, header: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the body of each message in the header of an object."""
        start = self._read_bytes(header, 16)
        is_newer = start[:4] == b"OHDR"  # else it is of version 1, which has no signature
        if is_newer:
            flags = start[5]
            first = header + 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)  # behind times and limits
            width = 1 << (flags & 3)
            blocks = [(first + width, int.from_bytes(self._read_bytes(first, width), "little"))]
            prefix = struct.Struct("<BHxxx" if flags & 4 else "<BHx")
        else:
            blocks = [(header + 16, int.from_bytes(start[8:12], "little"))]
            prefix = struct.Struct("<HHxxxx")
        for address, size in blocks:
            block = self._read_bytes(address, size)
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

    def _read_heap(self, heap: int) -> dict[int, tuple[int, int]]:
        """Return the address and the size of each object in a global heap, by their numbers."""
        signature, size = struct.unpack("<4sxxxxQ", self._read_bytes(heap, 16))
        if signature != b"GCOL":
            raise FormatError(f"there is no heap at {heap}")
        block = self._read_bytes(heap, size)
        objects: dict[int, tuple[int, int]] = {}
        k = 16
        while k + 16 <= size:
            number, length = struct.unpack_from("<HxxxxxxQ", block, k)
            if number:  # 0 is free
                objects[number] = heap + k + 16, min(length, size - k - 16)
            k += 16 + -(-length // 8) * 8
        return objects


def _parse_attribute(body: bytes) -> tuple[bytes, bytes]:
    """Return the name and the data of an attribute."""
    version, *sizes = struct.unpack_from("<BxHHH", body)  # of the name, the datatype and the dataspace
    start = 9 if version == 3 else 8  # which has an encoding of the name
    name = body[start : start + sizes[0]].partition(b"\0")[0]
    if version == 1:
        sizes = [-(-size // 8) * 8 for size in sizes]
    return name, body[start + sum(sizes) :]


class StoredArray:
    """A dataset of numbers, which `read` reads. It is closed meanwhile: open ones take much memory."""

    def __init__(self, path: str, parent: Any, name: bytes, file: OpenFile) -> None:
        self.path = path
        self._parent, self._name, self._file = parent, name, file
        dataset = self._open()
        properties = dataset.get_create_plist()
        if properties.get_layout() == h5py.h5d.CHUNKED:
            expected = "expected one block of numbers, as Keras writes it and `h5repack -f NONE -l CONTI` makes it"
            raise FormatError(f"{path} is stored in chunks, or compressed; {expected}")
        if properties.get_external_count():
            raise FormatError(f"{path} has external storage: its numbers are in another file")
        kind, is_null = dataset.get_type(), dataset.get_space().get_simple_extent_type() == h5py.h5s.NULL
        if is_null or kind.get_class() not in (h5py.h5t.FLOAT, h5py.h5t.INTEGER):
            raise FormatError(f"{path} is no array of numbers")
        self.shape: tuple[int, ...] = dataset.shape
        self._dtype: np.dtype[Any] = dataset.dtype
        if h5py.h5t.py_create(self._dtype) != kind:
            raise FormatError(f"{path} has numbers that are of no type of numpy's")
        self.size = math.prod(self.shape) * self._dtype.itemsize
        file.check(path, self.size, "bytes")
        if dataset.get_storage_size() != self.size:
            raise FormatError(f"{path} has {dataset.get_storage_size()} bytes; expected {self.size}")

    def _open(self) -> Any:
        self._file.spend(self.path, 1, "objects")
        return h5py.h5d.open(self._parent, self._name)

    def read(self) -> Array:
        """Read the numbers, in the byte order of this machine."""
        self._file.spend(self.path, self.size, "bytes")
        dataset = self._open()
        array = np.empty(self.shape, self._dtype)
        if array.size:
            dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array)
        return array.astype(array.dtype.newbyteorder("="), copy=False)


class Group:
    """A group of a file, or the file itself."""

    def __init__(self, path: str, group: Any, file: OpenFile) -> None:
        self.path = path
        self._group, self._file = group, file  # h5py's GroupID
        if (count := h5py.h5o.get_info(group).num_attrs) > MOST_ATTRIBUTES:  # libhdf5 looks for one after the other
            raise FormatError(f"{path} has {count} attributes; expected at most {MOST_ATTRIBUTES}")
        self._members: dict[str, Group | StoredArray] = {}
        self._names: list[str] | None = None

    def names(self) -> list[str]:
        """Return the names of its members."""
        if self._names is None:
            names: list[bytes] = []
            left = self._file.left["bytes of texts"]

            def add(name: bytes) -> bool | None:
                """Add a name; return True to see no more."""
                nonlocal left
                names.append(name)
                left -= len(name)
                return True if left < 0 or len(names) > MOST_TEXTS else None

            self._group.links.iterate(add, order=h5py.h5.ITER_NATIVE)
            self._file.spend(self.path, len(names), "texts")
            self._file.spend(self.path, sum(map(len, names)), "bytes of texts")
            self._names = [name.decode("utf-8", "replace") for name in sorted(names)]
        return self._names

    def __contains__(self, name: str) -> bool:
        return name not in ("", ".") and "/" not in name and bool(self._group.links.exists(name.encode()))

    def member(self, name: str) -> Group | StoredArray:
        """Return the member of a name, or of a path of names. Only hard links are followed."""
        member: Group | StoredArray = self
        for part in name.split("/"):
            if not isinstance(member, Group):
                raise FormatError(f"{member.path} is a dataset; expected a group")
            member = member._members.get(part) or member._open_member(part)
        return member

    def _open_member(self, name: str) -> Group | StoredArray:
        """Open a group or a dataset in it, and keep it."""
        path = f"{self.path}/{name}"
        if len(path) > LONGEST_PATH:
            raise FormatError(f"{path[:80]}... has a path of {len(path)} letters; expected at most {LONGEST_PATH}")
        if name not in self:
            raise FormatError(f"there is no {path}")
        if self._group.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise FormatError(f"{path} is a link, and may lead out of the file")
        self._file.spend(path, 1, "objects")
        info = h5py.h5o.get_info(self._group, name.encode())
        if info.type == h5py.h5o.TYPE_DATASET:
            if self._file.is_virtual(info.addr):
                raise FormatError(f"{path} is a virtual dataset, which may read other files")
            self._members[name] = StoredArray(path, self._group, name.encode(), self._file)
        elif info.type == h5py.h5o.TYPE_GROUP:
            self._members[name] = Group(path, h5py.h5g.open(self._group, name.encode()), self._file)
        else:
            raise FormatError(f"{path} is no group or dataset")
        return self._members[name]

    def group(self, name: str) -> Group:
        """Return the group of a name, or of a path of names."""
        member = self.member(name)
        if not isinstance(member, Group):
            raise FormatError(f"{member.path} is a dataset; expected a group")
        return member

    def array(self, name: str) -> StoredArray:
        """Return the dataset of a name, or of a path of names."""
        member = self.member(name)
        if not isinstance(member, StoredArray):
            raise FormatError(f"{member.path} is a group; expected a dataset")
        return member

    def has_attribute(self, name: str) -> bool:
        return bool(h5py.h5a.exists(self._group, name.encode()))

    def text(self, name: str) -> str:
        """Return an attribute that is a text."""
        return "".join(self.texts(name))

    def texts(self, name: str) -> list[str]:
        """Return an attribute that is a list of texts. Keras divides long ones among attributes with numbers."""
        numbered = (f"{name}{k}" for k in itertools.count())
        names = [name] if self.has_attribute(name) else [*itertools.takewhile(self.has_attribute, numbered)]
        return [text for part in names or [name] for text in self._attribute(part)]

    def _attribute(self, name: str) -> list[str]:
        if not self.has_attribute(name):
            raise FormatError(f"{self.path} has no attribute {name}")
        label = f"{self.path}: the attribute {name}"
        self._file.spend(label, 1, "objects")
        attribute = h5py.h5a.open(self._group, name.encode())
        kind, count = attribute.get_type(), attribute.get_space().get_simple_extent_npoints()
        if count == 0:  # an empty list of names has the type of numbers
            return []
        if kind.get_class() != h5py.h5t.STRING:
            raise FormatError(f"{label} is no text")
        self._file.spend(label, count, "texts")
        if kind.is_variable_str():
            header = h5py.h5o.get_info(self._group).addr
            values = self._file.read_texts(header, name, count)
        else:
            if count * kind.get_size() > LONGEST_TEXT:
                raise FormatError(f"{label} has {count} texts of {kind.get_size()} bytes")
            self._file.spend(label, count * kind.get_size(), "bytes of texts")
            array = np.empty(attribute.shape, attribute.dtype)
            attribute.read(array)
            values = array.ravel().tolist()
        return [value.decode("utf-8", "replace") for value in values]


@contextmanager
def opened(source: str | IO[bytes], size: int) -> Iterator[Group]:
    """Open the top group of a file of that many bytes. What libhdf5 cannot read is a FormatError."""
    try:
        with open(source, "rb") if isinstance(source, str) else source as content:
            file = OpenFile(content, size)
            file.check_heaps()
            with h5py.File(source, "r", rdcc_nslots=1, rdcc_nbytes=0) as hdf5_file:
                yield Group("", h5py.h5g.open(hdf5_file.id, b"/"), file)
    except FormatError:
        raise
    except DAMAGE as error:
        raise FormatError(f"its HDF5 cannot be read: {error}") from error
