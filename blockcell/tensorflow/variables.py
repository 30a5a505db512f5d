"""The variables of a model: names and arrays, which are read on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import plain
from ..optable import Array
from .objects import Named, Objects, named
from .tensors import Stored

_SHOWN = 60


class Variables(Mapping[str, Array]):
    """The variables in files, a mapping of names to arrays, which reads an array at each access.

    Arrays are read-only and may be views of the file, unaligned; copy an array to keep it without the file. bfloat16
    becomes float32.

    Variables of an object checkpoint of TensorFlow 2 have their full names, such as ``"gru/gru_cell/kernel"``, if these
    are unique, else their object paths, such as ``"model/layer_with_weights-0/cell/kernel"``. The keys in the
    checkpoint, ``"model/.../kernel/.ATTRIBUTES/VARIABLE_VALUE"``, work, too.
    """

    def __init__(
        self, stored: Mapping[str, Stored], skipped: Mapping[str, str], objects: Objects | None = None
    ) -> None:
        """`objects` are those of an object checkpoint."""
        names, slots = named(objects, stored.keys()) if objects is not None else Named({}, set())
        self._names = names
        self.has_objects = objects is not None
        self.stored = {names.get(key, key): tensor for key, tensor in stored.items()}
        """Name and what is known without reading: ``stored[name].dtype``, TensorFlow's name, and ``.shape``."""
        self.skipped = skipped
        """The dtypes of variables that are no numbers, such as strings, which are not read."""
        self.slots = frozenset(names.get(key, key) for key in slots)
        """The variables of an object checkpoint that an optimizer keeps for others."""

    def name_of(self, key: str) -> str:
        """Return the name of a variable, by its key in the checkpoint or by this name."""
        return self._names.get(key, key)

    def __getitem__(self, name: str) -> Array:
        if name in self.skipped:
            raise KeyError(f"{name} is of {self.skipped[name]}, which is not read")
        array = self.stored[self.name_of(name)].read()
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.name_of(name) in self.stored

    def __repr__(self) -> str:
        lines = [f"{name}  {tensor.dtype} {list(tensor.shape)}" for name, tensor in self.stored.items()]
        lines += [f"{name}  {dtype}, not read" for name, dtype in self.skipped.items()]
        left = len(lines) - _SHOWN
        lines[_SHOWN:] = [f"... {left} more"] if left > 0 else []
        return "\n    ".join([f"<{len(self)} variables>", *map(plain, lines)])


def alike(array: Array, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return an array, a variable or its moving average, if it has this dtype and shape."""
    expected = "float32" if dtype == "bfloat16" else dtype
    if (array.dtype.name, array.shape) != (expected, shape):
        raise ValueError(f"{name!r} is {array.dtype} of the shape {array.shape}; expected {expected} of {shape}")
    return array
