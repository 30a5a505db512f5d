"""What a weight is: variables of the checkpoint and constants, and how they are put together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ....optable import Array
from ...graphs import Node
from ...tensors import Stored
from ...variables import Variables, alike
from ..graph.array_slices import index_of, shape_of
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import op_of

_ROUNDED = "bfloat16, rounded by the graph from"  # how a dtype begins that no layer has: its cell is refused
AVERAGE = "/ExponentialMovingAverage"
_DEEPEST = 4  # joins and splits within each other
_MOST_PARTS = 4096
_MOST_REPEATED = 2**22  # entries of a constant that is one number
T = TypeVar("T")


class Saved(NamedTuple):
    """Where a variable is in a checkpoint."""

    key: str
    part: tuple[tuple[int, int | None], ...] | None = None
    """Start and stop in each dimension; None is all of it."""


Names = dict[str, dict[Saved, None]]
"""Where variables are, by the names of their nodes."""


class Source(NamedTuple):
    """What a weight is: variables and constants, and how they are put together."""

    name: str
    """Of a variable or constant, or all of them, joined with " + "."""
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[str], Array]
    """The values; the argument is appended to the variables' names, for another copy of them."""
    leaves: tuple[str, ...]
    saved: Saved | None = None
    """Of a variable."""


class Traced(Generic[T]):
    """What places hold, each looked at once: the one thing that all of a place's origins hold, or why there is none."""

    def __init__(self, reader: Reader, made: Callable[[Place, int], T], key: Callable[[T], tuple[object, str]]) -> None:
        """`made` is given an origin and how deep it is in others, `key` says what must be alike, and a name."""
        self._reader, self._made, self._key = reader, made, key
        self._found: dict[Place, T | Unknown] = {}

    def __call__(self, place: Place, depth: int = 0) -> T:
        if place not in self._found:
            try:
                self._found[place] = self._find(place, depth)
            except Unknown as unknown:
                self._found[place] = unknown
        found = self._found[place]
        if isinstance(found, Unknown):
            raise Unknown(str(found))
        return found

    def _find(self, place: Place, depth: int) -> T:
        found = [self._made(each, depth) for each in self._reader.origins(place)]
        if not found:
            raise Unknown(f"{place.name!r}, which comes from nothing but itself")
        keys = dict(map(self._key, found))
        if len(keys) > 1:
            raise Unknown(f"{' or '.join(sorted({*keys.values()})[:4])}: not one weight")
        return found[0]


class Sources:
    """The weights of a graph, with the variables of its checkpoint.  `saver_names.sources_of` makes it."""

    def __init__(self, reader: Reader, variables: Variables | None) -> None:
        """`variables` is None for a frozen graph."""
        self.reader, self.variables = reader, variables
        self.restored: tuple[Names, Names] = {}, {}
        """Where variables are, by their nodes: for the Saver that the file names, and for others."""
        self.source = Traced(reader, self._made, lambda source: (source.name, source.name))
        """The variables and constants that a weight is made of."""

    def _made(self, place: Place, depth: int) -> Source:
        node = self.reader.node(place)
        if node is None:  # an argument is passed on: origins() has gone past it
            raise Unknown(f"the argument {place.name!r} of {place.body!r}")
        if depth > _DEEPEST:
            raise Unknown(f"the node {node.name!r}, beyond {_DEEPEST} joins and splits")
        stored = self.reader.graph.constant(node)
        if stored is not None:
            return _leaf(node, stored)
        if op_of(node).variable:
            return self._variable(node)
        inputs = self.reader.inputs(place.body, node)
        if node.op == "ConcatV2" and len(inputs) > 2:
            return self._joined(node, inputs, depth)
        if node.op in ("Split", "SplitV") and len(inputs) == op_of(node).inputs:
            return self._part(place, self.source(inputs[op_of(node).arrays][0], depth + 1), node)
        if node.op == "Cast" and inputs:
            return self._converted(node, inputs[0], depth)
        raise Unknown(f"the node {node.name!r}, which is a {node.op}")

    def _variable(self, node: Node) -> Source:
        name = self._names.get(node.name, node.name)
        saved = self._saved(node)
        if saved is not None:
            return self._stored(name, saved, node)
        shape = node.attrs.get("shape")
        dtype = str(node.attrs.get("dtype"))
        if isinstance(shape, tuple) and None not in shape:  # a part of one that is stored whole, perhaps

            def read(more: str) -> Array:
                raise KeyError(node.name)

            return Source(name, shape, dtype, read, (f"?{node.name}",))
        raise Unknown(f"the variable {node.name!r}, which is not in the checkpoint")

    def _saved(self, node: Node) -> Saved | None:
        """Where a variable is: as its Saver says, by its own name, or as another Saver says."""
        if self.variables is None:
            return None
        own, others = self.restored
        objects = self.variables.objects is not None and own  # whose names need not be those of nodes
        shared = node.attrs.get("shared_name") if node.op == "VarHandleOp" else None
        named = [] if objects else [Saved(name) for name in (node.name, shared) if isinstance(name, str)]
        for known in (own.get(node.name, {}), dict.fromkeys(named[:1]), dict.fromkeys(named[1:]),
                      others.get(node.name, {})):  # fmt: skip
            found = [saved for saved in known if saved.key in self.variables]
            if len(found) > 1:
                names = " or ".join(sorted({saved.key for saved in found})[:4])
                raise Unknown(f"the variable {node.name!r}, which is saved as {names}: not one weight")
            if found:
                return found[0]
        return None

    @cached_property
    def _names(self) -> dict[str, str]:
        """Of nodes such as "gru/kernel_1", the full name of their variable, "gru/kernel", if no other's is the same."""
        names: dict[str, str] = {}
        for name, places in self.restored[0].items():
            if self.variables is not None and len(places) == 1:
                full = self.variables.full_names.get(self.variables.name_of(next(iter(places)).key), "")
                if full and re.fullmatch(r"_\d+", name.removeprefix(full)):
                    names[name] = full
        count = Counter(names.values())
        names = {name: full for name, full in names.items() if count[full] == 1}
        others = set(names.values()) & self.reader.bodies[""].keys() - names.keys()
        return names | {name: f"{name}, the node" for name in others}

    def _stored(self, name: str, saved: Saved, node: Node | None = None) -> Source:
        """A variable that is in the checkpoint."""
        assert self.variables is not None
        variables, shown, part = self.variables, self.variables.name_of(saved.key), saved.part
        stored = variables.stored[shown]
        shape = tuple(stored.shape)
        if part is not None:
            ends = [size if stop is None else stop for (_, stop), size in zip(part, shape, strict=False)]
            if len(part) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
                raise Unknown(f"a part of the variable {shown!r} that it does not have: its shape is {shape}")
            shape = tuple(end - start for (start, _), end in zip(part, ends, strict=True))

        def read(more: str) -> Array:
            where = Saved(shown + more, part)
            copy = self.reader.bodies[""].get(node.name + more) if more and node is not None else None
            if copy is not None and op_of(copy).variable:
                where = self._saved(copy) or where
            array = variables[where.key]
            if where.part is not None and len(where.part) == array.ndim:
                array = array[tuple(slice(*each) for each in where.part)]
            return alike(array, where.key, stored.dtype, shape)

        return Source(name, shape, stored.dtype, read, (name,), saved)

    def _joined(self, node: Node, inputs: tuple[Place, ...], depth: int) -> Source:
        parts = [self.source(each, depth + 1) for each in inputs[:-1]]
        rank = len(parts[0].shape)
        axis = self.reader.number(inputs[-1])
        if not -rank <= axis < rank or any(len(part.shape) != rank for part in parts):
            raise Unknown(f"the node {node.name!r}, which joins arrays along an axis that they do not have")
        axis %= rank
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        if any((*part.shape[:axis], 0, *part.shape[axis + 1 :]) != (*shape[:axis], 0, *shape[axis + 1 :])
               for part in parts) or len({part.dtype for part in parts}) != 1:  # fmt: skip
            raise Unknown(f"the node {node.name!r}, which joins arrays that do not fit together")
        whole = self._whole(parts, axis)
        if whole is not None and whole.shape != tuple(shape):
            raise Unknown(f"the variable {whole.name!r} of shape {whole.shape}, whose parts make {tuple(shape)}")
        leaves: dict[str, None] = {}
        for part in parts:
            for leaf in part.leaves:
                self.reader.count(20)
                if leaf in leaves or len(leaves) > _MOST_PARTS:
                    raise Unknown(f"the node {node.name!r}, which joins a variable with itself")
                leaves[leaf] = None
        few = len(parts) < 8
        name = " + ".join(part.name for part in parts) if few else f"the {len(parts)} parts of {node.name}"

        def read(more: str) -> Array:
            if whole is not None:
                try:
                    return whole.read(more)
                except KeyError:  # there may be moving averages of the parts
                    pass
            return np.concatenate([part.read(more) for part in parts], axis)

        if whole is not None:
            return whole._replace(read=read)

        return Source(name, tuple(shape), parts[0].dtype, read, tuple(leaves))

    def _whole(self, parts: list[Source], axis: int) -> Source | None:
        """The variable that these are all the parts of, one behind the other."""
        stem = parts[0].name.removesuffix("/part_0")
        named = all(part.name == f"{stem}/part_{k}" for k, part in enumerate(parts))
        first = parts[0].saved
        if self.variables is None or (first is None and not (named and stem in self.variables)):
            return None
        if first is None:
            return self._stored(stem, Saved(stem))
        end = 0
        for part in parts:
            start = part.saved.part[axis][0] if part.saved and part.saved.part else 0
            if part.saved is None or part.saved.key != first.key or start != end:
                return None
            end += part.shape[axis]
        found = self._stored(stem if named else self.variables.name_of(first.key), Saved(first.key))
        return found if found.shape == (*parts[0].shape[:axis], end, *parts[0].shape[axis + 1 :]) else None

    def _part(self, place: Place, whole: Source, node: Node) -> Source:
        count = node.attrs.get("num_split")
        try:
            index = index_of(self.reader, place, whole.shape)
        except Unknown:
            said = f"the node {node.name!r}, which splits {whole.name} of shape {whole.shape} in {count}"
            raise Unknown(said) from None
        said = f"part {place.output} of {count}"
        leaves = tuple(f"{leaf}, {said}" for leaf in whole.leaves)

        def read(more: str) -> Array:
            part: Array = whole.read(more)[index]
            return part

        return Source(f"{whole.name}, {said}", shape_of(whole.shape, index), whole.dtype, read, leaves)

    def _converted(self, node: Node, place: Place, depth: int) -> Source:
        given, dtype = self.source(place, depth + 1), str(node.attrs.get("DstT"))
        if given.dtype.startswith(_ROUNDED):
            return given
        if dtype == "bfloat16":
            return given._replace(dtype=f"{_ROUNDED} {given.dtype}")
        if dtype not in ("float16", "float32", "float64"):
            raise Unknown(f"the node {node.name!r}, which converts to {dtype}")
        return given._replace(dtype=dtype, read=lambda more: given.read(more).astype(dtype))


def _leaf(node: Node, stored: Stored) -> Source:
    name, size = node.name, math.prod(stored.shape)

    def read(more: str) -> Array:
        if more:
            raise KeyError(f"{name}{more}")
        array = stored.read()
        if size > _MOST_REPEATED and not any(array.strides):
            raise node.error(f"a weight is one number, {size} times", "expected trained weights")
        return array

    return Source(name, tuple(stored.shape), stored.dtype, read, (name,))
