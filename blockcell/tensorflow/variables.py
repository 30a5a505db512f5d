"""The variables of a model, which are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..optable import Array
from .tensors import Stored

_SHOWN = 60


class Variables(Mapping[str, Array]):
    """The variables in files: names and arrays, read each time one is asked for.

    The arrays cannot be changed and may lie in the file itself, unaligned; copy one to keep it without the file.
    bfloat16 comes as float32.
    """

    def __init__(self, stored: Mapping[str, Stored], skipped: Mapping[str, str]) -> None:
        self.stored = stored
        """Name and what is known without reading: ``stored[name].dtype``, TensorFlow's name, and ``.shape``."""
        self.skipped = skipped
        """The dtypes of those that are no numbers, such as strings, which are not read."""

    def __getitem__(self, name: str) -> Array:
        if name in self.skipped:
            raise KeyError(f"{name} is of {self.skipped[name]}, which is not read")
        array = self.stored[name].read()
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __repr__(self) -> str:
        lines = [f"{name}  {each.dtype} {list(each.shape)}" for name, each in self.stored.items()]
        lines += [f"{name}  {dtype}, not read" for name, dtype in self.skipped.items()]
        left = len(lines) - _SHOWN
        lines[_SHOWN:] = [f"... {left} more"] if left > 0 else []
        return "\n    ".join([f"<{len(self)} variables>", *lines])
