"""Files in memory: mapped, not read, so that only what is looked at comes in."""

from __future__ import annotations

import mmap
import os

from ..errors import FormatError
from ..files import check_regular
from .crc32c import crc32c, masked

_POINTER = b"version https://git-lfs.github.com/spec/"
DAMAGED = "the file is damaged: copy or save it again"


class File:
    """The bytes of a file, and its name for messages."""

    __slots__ = ("buffer", "name")

    def __init__(self, path: str | os.PathLike[str], data: bytes | None = None) -> None:
        """With `data`, what would be in the file; there need be none."""
        self.name = os.fspath(path)
        if data is not None:
            self.buffer = memoryview(data)
            return
        check_regular(path, "a file of TensorFlow's")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self.buffer = memoryview(mapping)
        if self.buffer[: len(_POINTER)] == _POINTER:
            raise FormatError(f"{self.name} is a pointer of Git LFS's to the file; fetch that with `git lfs pull`")

    def __len__(self) -> int:
        return len(self.buffer)

    def error(self, at: int, problem: str, mend: str = DAMAGED) -> FormatError:
        """Make the error to raise for something wrong at a byte."""
        return FormatError(f"{self.name}, byte {at}: {problem}; {mend}")

    def check(self, start: int, end: int, stored: int, subject: str) -> None:
        """Raise a FormatError unless the bytes have the CRC that is stored for them."""
        checksum = masked(crc32c(self.buffer[start:end]))
        if checksum != stored:
            raise self.error(start, f"the checksum of {subject} is {checksum:#010x}; expected {stored:#010x}")


class Folder:
    """Where a model is: what names in it or in its files lead to lies in it, too."""

    def __init__(self, path: str) -> None:
        """The folder itself may be a symbolic link, or lie behind one."""
        self._real = os.path.realpath(path)

    def file(self, path: str) -> File:
        """Open a file in the folder; refuse a symbolic link out of it, and a file behind one."""
        real = os.path.realpath(path)
        if not real.startswith(os.path.join(self._real, "")):
            problem = f"{path} is a symbolic link to {real}, outside of the folder {self._real}"
            raise FormatError(f"{problem}; copy the folder with what its links lead to, as `cp -rL` does")
        return File(path)
