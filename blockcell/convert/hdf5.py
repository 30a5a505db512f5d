"""Reading HDF5 files that need not be trusted, with h5py.

Every component of a path is looked at before it is opened: only hard links are followed, so that nothing outside of the
file is read. Datasets with external storage, virtual datasets and filters that are not HDF5's own are refused. Shapes
are compared with the size of the file before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from ..errors import FormatError, short
from ..files import LONGEST_TEXT
from ..optable import Array

MOST_TEXTS = 2**18  # that are read of a file, such as the names of layers
MOST_DEFLATED = 4  # how many times the size of the file all arrays may have; numbers of weights hardly deflate
SMALL = 2**20  # bytes that arrays may have in any case


class Budget:
    """How many bytes the arrays of a file may still have, and how many texts."""

    def __init__(self, file_size: int) -> None:
        self.file_size = file_size
        self.left = MOST_DEFLATED * file_size + SMALL
        self.texts_left = MOST_TEXTS

    def check(self, label: str, size: int) -> None:
        """Refuse an array, or a part of one, of more bytes than are left."""
        if size > self.left:
            raise FormatError(f"{label} has {size} bytes, in a file of {self.file_size}")

    def spend(self, label: str, size: int) -> None:
        self.check(label, size)
        self.left -= size


class StoredArray:
    """A dataset of numbers, which `read` reads."""

    def __init__(self, path: str, dataset: Any, budget: Budget) -> None:
        import h5py

        self.path = path
        self._dataset, self._budget = dataset, budget
        properties = dataset.id.get_create_plist()
        layout = properties.get_layout()
        if layout == h5py.h5d.VIRTUAL:
            raise FormatError(f"{path} is a virtual dataset, which may read other files")
        if layout not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
            raise FormatError(f"{path} has an unknown layout")
        if properties.get_external_count():
            raise FormatError(f"{path} has external storage: its numbers are in another file")
        if dataset.shape is None or dataset.id.get_type().get_class() not in (h5py.h5t.FLOAT, h5py.h5t.INTEGER):
            raise FormatError(f"{path} is no array of numbers")
        self.shape: tuple[int, ...] = dataset.shape
        self.size = math.prod(self.shape) * dataset.dtype.itemsize
        budget.check(path, self.size)
        if layout == h5py.h5d.CHUNKED:
            self._check_chunks(properties)
        elif dataset.id.get_storage_size() != self.size:
            raise FormatError(f"{path} has {dataset.id.get_storage_size()} bytes; expected {self.size}")

    def _check_chunks(self, properties: Any) -> None:
        import h5py

        filters = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_LZF}
        if any(properties.get_filter(k)[0] not in filters for k in range(properties.get_nfilters())):
            raise FormatError(f"{self.path} is compressed by a filter that is not HDF5's own")
        chunk = self._dataset.chunks
        self._budget.check(f"a chunk of {self.path}", math.prod(chunk) * self._dataset.dtype.itemsize)
        count = math.prod(-(-size // part) for size, part in zip(self.shape, chunk, strict=True))
        if self._dataset.id.get_num_chunks() != count:
            raise FormatError(f"{self.path} has {self._dataset.id.get_num_chunks()} chunks; expected {count}")

    def read(self) -> Array:
        """Read the numbers, in the byte order of this machine."""
        self._budget.spend(self.path, self.size)
        array = np.asarray(self._dataset[()])
        return array.astype(array.dtype.newbyteorder("="), copy=False)


class Group:
    """A group of a file, or the file itself."""

    def __init__(self, path: str, group: Any, budget: Budget) -> None:
        self.path = path
        self._group, self._budget = group, budget

    def names(self) -> list[str]:
        """Return the names of its members."""
        count = self._group.id.get_num_objs()
        self._budget.texts_left -= count
        if self._budget.texts_left < 0:
            raise FormatError(f"{self.path} has {count} members, too many with all others")
        return [name.decode("utf-8", "replace") for name in self._group.id]

    def __contains__(self, name: str) -> bool:
        return name not in ("", ".") and "/" not in name and bool(self._group.id.links.exists(name.encode()))

    def member(self, name: str) -> Group | StoredArray:
        """Return the member of a name, or of a path of names. Only hard links are followed."""
        import h5py

        part, _, rest = name.partition("/")
        path = f"{self.path}/{part}"
        if part not in self:
            raise FormatError(f"there is no {path}")
        if self._group.id.links.get_info(part.encode()).type != h5py.h5l.TYPE_HARD:
            raise FormatError(f"{path} is a link, and may lead out of the file")
        member = self._group[part]
        if isinstance(member, h5py.Group):
            group = Group(path, member, self._budget)
            return group.member(rest) if rest else group
        if rest or not isinstance(member, h5py.Dataset):
            raise FormatError(f"{path} is no {'group' if rest else 'group or dataset'}")
        return StoredArray(path, member, self._budget)

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
        return name in self._group.attrs

    def text(self, name: str) -> str:
        """Return an attribute that is one text."""
        texts = self._attribute(name)
        if len(texts) != 1:
            raise FormatError(f"{self.path}: the attribute {name} has {len(texts)} texts; expected one")
        return texts[0]

    def texts(self, name: str) -> list[str]:
        """Return an attribute that is a list of texts. Keras divides long ones among attributes with numbers."""
        if self.has_attribute(name):
            return self._attribute(name)
        texts: list[str] = []
        k = 0
        while self.has_attribute(f"{name}{k}"):
            texts += self._attribute(f"{name}{k}")
            k += 1
        if not k:
            raise FormatError(f"{self.path} has no attribute {name}")
        return texts

    def _attribute(self, name: str) -> list[str]:
        import h5py

        if not self.has_attribute(name):
            raise FormatError(f"{self.path} has no attribute {name}")
        attribute = h5py.h5a.open(self._group.id, name.encode())
        kind, count = attribute.get_type(), attribute.get_space().get_simple_extent_npoints()
        if count == 0:  # an empty list of names has the type of numbers
            return []
        if kind.get_class() != h5py.h5t.STRING:
            raise FormatError(f"{self.path}: the attribute {name} is no text")
        self._budget.texts_left -= count
        if self._budget.texts_left < 0 or count * kind.get_size() > LONGEST_TEXT:
            raise FormatError(f"{self.path}: the attribute {name} has {count} texts of {kind.get_size()} bytes")
        values = np.ravel(np.asarray(self._group.attrs[name], dtype=object))
        texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in values]
        if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > LONGEST_TEXT:
            raise FormatError(f"{self.path}: the attribute {name} is {short(values[0])} or longer than a text may be")
        return texts


@contextmanager
def opened(source: str | IO[bytes], size: int) -> Iterator[Group]:
    """Open the top group of a file of that many bytes. What libhdf5 cannot read is a FormatError."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("files of Keras are HDF5, and h5py is not installed: pip install h5py") from error
    try:
        with h5py.File(source, "r") as file:
            yield Group("", file, Budget(size))
    except FormatError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError) as error:  # what h5py makes of libhdf5's errors
        raise FormatError(f"its HDF5 cannot be read: {error}") from error
