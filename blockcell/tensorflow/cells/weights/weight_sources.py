"""What a weight is made of: variables of a checkpoint and constants, whole, joined, converted or in parts.

In comes a place; out goes a `WeightSource` with name, shape and dtype, whose `read` reads the values, or a slice of it.

A Saver of TensorFlow 1 may use other names in a checkpoint than those of the graph's variables, and a checkpoint of
objects has keys. In both cases a node reads a tensor by its name or key in the checkpoint, and another node assigns it
to a variable: `_find_restored`. The functions of a SavedModel have captured variables: `_find_captures`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ....optable import Array
from ...graphs import Node
from ...objects import Objects, captured
from ...tensors import Stored, Tensor
from ...variables import Variables, alike
from ..graph.array_slices import slice_index
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import graph_op
from .weight_slices import WeightSlice, WeightSource

_ROUNDED = "bfloat16, rounded by the graph from"  # how a dtype begins that no layer has: its cell is refused
_DEEPEST = 4  # joins within each other
_MOST_VIEWS = 6  # parts of parts
_MOST_PARTS = 4096
_RESTORE = {"RestoreV2", "RestoreSlice", "Restore"}
_ASSIGN = {"Assign", "AssignVariableOp"}
_SLICE = re.compile(r"(?:\d{1,18} )+((?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*)")
T = TypeVar("T")


class SavedTensor(NamedTuple):
    """The key of a variable in a checkpoint, and the part of that tensor that it is."""

    key: str
    part: tuple[tuple[int, int | None], ...] | None = None
    """Start and stop in each dimension; None is the whole tensor."""


SavedNames = dict[str, dict[SavedTensor, None]]
"""The saved tensors of variables, by the names of their nodes."""


class OriginLookup(Generic[T]):
    """Looks up, once for each place, the one weight that all origins of the place hold, or why there is none."""

    def __init__(
        self, reader: GraphReader, read_origin: Callable[[Place, int], T], identify: Callable[[T], tuple[object, str]]
    ) -> None:
        """`read_origin` takes an origin and its depth; `identify` returns what origins have in common, and a name."""
        self._reader, self._read_origin, self._identify = reader, read_origin, identify
        self._weights: dict[Place, T | UnknownValue] = {}

    def __call__(self, place: Place, depth: int = 0) -> T:
        if place not in self._weights:
            try:
                self._weights[place] = self._find(place, depth)
            except UnknownValue as unknown:
                self._weights[place] = unknown
        weight = self._weights[place]
        if isinstance(weight, UnknownValue):
            raise UnknownValue(str(weight))
        return weight

    def _find(self, place: Place, depth: int) -> T:
        weights = [self._read_origin(origin, depth) for origin in self._reader.origins(place)]
        if not weights:
            raise UnknownValue(f"{place.name!r}, which comes from nothing but itself")
        names = dict(map(self._identify, weights))
        if len(names) > 1:
            raise UnknownValue(f"{' or '.join(sorted({*names.values()})[:4])}: not one weight")
        return weights[0]


class WeightSources:
    """The weights of a graph, with the variables of its checkpoint."""

    def __init__(self, reader: GraphReader, variables: Variables | None) -> None:
        """`variables` is None for a frozen graph."""
        self.reader, self.variables = reader, variables
        self.restored = _find_restored(reader)
        reader.captures = self._find_captures()
        self.source = OriginLookup(reader, self._read_source, lambda source: (source.name, source.name))
        """Returns the variables and constants that the weight at a place is made of."""
        self.slice = OriginLookup(reader, self._read_slice, lambda piece: (piece.key, piece.source.name))
        """Returns the slice of such a weight that a place is."""

    def _find_captures(self) -> dict[Place, Place]:
        """Find the variables and constants that the last arguments of a SavedModel's functions have captured."""
        graph, captures = self.reader.graph, dict[Place, Place]()
        nodes = {saved.key: name for name, places in self.restored[0].items() for saved in places}
        for name, values in captured(Objects(graph.objects), nodes).items() if graph.objects else ():
            arguments = graph.functions[name].inputs if name in graph.functions else ()
            if len(values) <= len(arguments):
                places = zip(arguments[len(arguments) - len(values) :], values, strict=True)
                captures |= {Place(name, argument): Place("", node) for argument, node in places if node in graph.nodes}
        return captures

    def _read_source(self, place: Place, depth: int) -> WeightSource:
        node = self.reader.node(place)
        if node is None:  # an argument is passed on: origins() has gone past it
            raise UnknownValue(f"the argument {place.name!r} of {place.body!r}")
        if depth > _DEEPEST:
            raise UnknownValue(f"the node {node.name!r}, beyond {_DEEPEST} joins")
        stored = self.reader.graph.constant(node)
        if stored is not None:
            return _leaf(node, stored)
        if graph_op(node).variable:
            return self._variable(node)
        inputs = self.reader.inputs_at(place)
        if node.op == "ConcatV2" and len(inputs) > 2:
            return self._join_parts(node, inputs, depth)
        if node.op == "Cast" and inputs:
            return self._convert(node, inputs[0], depth)
        raise UnknownValue(f"the node {node.name!r}, which is a {node.op}")

    def _read_slice(self, place: Place, depth: int) -> WeightSlice:
        if depth > _MOST_VIEWS:
            raise UnknownValue(f"the node {place.name!r}, beyond {_MOST_VIEWS} parts of parts")
        if not self.reader.op(place).view:
            return self.source(place).whole()
        whole = self.slice(self.reader.operands(place)[0], depth + 1)
        return whole.slice(slice_index(self.reader, place, whole.shape))

    def _variable(self, node: Node) -> WeightSource:
        """Make the weight of a variable; one that the checkpoint lacks still shows what its cell is."""
        saved = self._saved(node)
        if saved is not None:
            return self._read_stored(node.name, saved)
        shape, dtype = node.attrs.get("shape"), str(node.attrs.get("dtype"))
        if not isinstance(shape, tuple) or None in shape:
            raise UnknownValue(f"the variable {node.name!r}, which is not in the checkpoint")

        def read(suffix: str) -> Array:
            raise KeyError(node.name)

        return WeightSource(node.name, shape, dtype, read, (f"?{node.name}",))

    def _saved(self, node: Node) -> SavedTensor | None:
        """Return the saved tensor of a variable: by its Saver, by its own name, or by another Saver."""
        if self.variables is None:
            return None
        own, other_savers = self.restored
        objects = self.variables.has_objects and own  # whose names need not be those of nodes
        shared = node.attrs.get("shared_name") if node.op == "VarHandleOp" else None
        named = [] if objects else [SavedTensor(name) for name in (node.name, shared) if isinstance(name, str)]
        for places in (own.get(node.name, {}), dict.fromkeys(named[:1]), dict.fromkeys(named[1:]),
                      other_savers.get(node.name, {})):  # fmt: skip
            saved_tensors = [saved for saved in places if saved.key in self.variables]
            if len(saved_tensors) > 1:
                names = " or ".join(sorted({saved.key for saved in saved_tensors})[:4])
                raise UnknownValue(f"the variable {node.name!r}, which is saved as {names}: not one weight")
            if saved_tensors:
                return saved_tensors[0]
        return None

    def _read_stored(self, name: str, saved: SavedTensor) -> WeightSource:
        """Make the weight of the variable of a node's name, which is in the checkpoint."""
        assert self.variables is not None
        variables, saved_name, part = self.variables, self.variables.name_of(saved.key), saved.part
        stored = variables.stored[saved_name]
        shape = tuple(stored.shape)
        if part is not None:
            ends = [size if stop is None else stop for (_, stop), size in zip(part, shape, strict=False)]
            if len(part) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
                raise UnknownValue(f"a part of the variable {saved_name!r} that it does not have: its shape is {shape}")
            shape = tuple(end - start for (start, _), end in zip(part, ends, strict=True))

        def read(suffix: str) -> Array:
            saved_copy = SavedTensor(saved_name + suffix, part)
            copy = self.reader.bodies[""].get(name + suffix) if suffix else None
            if copy is not None and graph_op(copy).variable:
                saved_copy = self._saved(copy) or saved_copy
            array = variables[saved_copy.key]
            if saved_copy.part is not None and len(saved_copy.part) == array.ndim:
                array = array[tuple(slice(*axis_range) for axis_range in saved_copy.part)]
            return alike(array, saved_copy.key, stored.dtype, shape)

        shown_name = name
        is_number = saved_name.rpartition("/")[2].isdecimal()  # in a list, which says less than the node's name
        if variables.has_objects and (part is not None or name in variables or not is_number):
            shown_name = saved_name if part is None else f"{name}, of {saved_name}"
        return WeightSource(shown_name, shape, stored.dtype, read, (shown_name,))

    def _join_parts(self, node: Node, inputs: tuple[Place, ...], depth: int) -> WeightSource:
        """Make the weight of a ConcatV2; parts of a partitioned variable that no Saver restores are read whole."""
        parts = [self.source(place, depth + 1) for place in inputs[:-1]]
        rank = len(parts[0].shape)
        axis = self.reader.constant_integer(inputs[-1])
        if not -rank <= axis < rank or any(len(part.shape) != rank for part in parts):
            raise UnknownValue(f"the node {node.name!r}, which joins arrays along an axis that they do not have")
        axis %= rank
        if len({(*part.shape[:axis], *part.shape[axis + 1 :], part.dtype) for part in parts}) > 1:
            raise UnknownValue(f"the node {node.name!r}, which joins arrays that do not fit together")
        leaves: dict[str, None] = {}
        for part in parts:
            for leaf in part.leaves:
                self.reader.spend_steps(20)
                if leaf in leaves or len(leaves) > _MOST_PARTS:
                    raise UnknownValue(f"the node {node.name!r}, which joins a variable with itself")
                leaves[leaf] = None
        shape = (*parts[0].shape[:axis], sum(part.shape[axis] for part in parts), *parts[0].shape[axis + 1 :])
        name = " + ".join(part.name for part in parts) if len(parts) < 8 else f"the {len(parts)} parts of {node.name}"
        whole = parts[0].name.removesuffix("/part_0")
        is_variable = all(part.name == f"{whole}/part_{k}" for k, part in enumerate(parts))
        if is_variable and self.variables is not None and parts[0].name not in self.variables:
            name, missing = whole, all(leaf[0] == "?" for leaf in leaves)
            if missing and whole in self.variables and self._read_stored(whole, SavedTensor(whole)).shape == shape:
                return self._read_stored(whole, SavedTensor(whole))

        def read(suffix: str) -> Array:
            return np.concatenate([part.read(suffix) for part in parts], axis)

        return WeightSource(name, shape, parts[0].dtype, read, tuple(leaves))

    def _convert(self, node: Node, place: Place, depth: int) -> WeightSource:
        unconverted, dtype = self.source(place, depth + 1), str(node.attrs.get("DstT"))
        if unconverted.dtype.startswith(_ROUNDED):
            return unconverted
        if dtype == "bfloat16":
            return unconverted._replace(dtype=f"{_ROUNDED} {unconverted.dtype}")
        if dtype not in ("float16", "float32", "float64"):
            raise UnknownValue(f"the node {node.name!r}, which converts to {dtype}")
        return unconverted._replace(dtype=dtype, read=lambda suffix: unconverted.read(suffix).astype(dtype))


def _leaf(node: Node, stored: Stored) -> WeightSource:
    def read(suffix: str) -> Array:
        if suffix:
            raise KeyError(f"{node.name}{suffix}")
        return stored.read()

    return WeightSource(node.name, tuple(stored.shape), stored.dtype, read, (node.name,))


# ------------------------------------------------------------------------------------------------- names in checkpoints
def _find_restored(reader: GraphReader) -> tuple[SavedNames, SavedNames]:
    """Find the saved tensors of variables: by the Saver that the file names, and by other Savers."""
    own: SavedNames = {}
    other_savers: SavedNames = {}
    texts: dict[Place, list[SavedTensor]] = {}
    for body, node in reader.all_nodes():
        if node.op not in _ASSIGN:
            continue
        try:
            variable, value = reader.inputs_at(Place(body, node.name))[:2]
            source = reader.resolve(value)
            if reader.op(source).name not in _RESTORE:
                continue
            restore = source._replace(output=0)
            if restore not in texts:
                texts[restore] = _read_restore(reader, restore)
            saved = texts[restore][source.output]
            names = [origin.name for origin in reader.origins(variable) if reader.op(origin).variable]
            saver_names = own if _is_own(reader, restore) else other_savers
        except (UnknownValue, ValueError, IndexError):  # it is not what a Saver makes
            continue
        for name in names:
            saver_names.setdefault(name, {})[saved] = None
    return own, other_savers


def _read_restore(reader: GraphReader, place: Place) -> list[SavedTensor]:
    """List the saved tensors that a restoring node reads."""
    inputs, has_slices = reader.inputs_at(place), reader.op(place).name != "Restore"
    names = _constant_texts(reader, inputs[1])
    slices = _constant_texts(reader, inputs[2]) if len(inputs) > 2 and has_slices else [""] * len(names)
    return [SavedTensor(name, _parse_slice(text)) for name, text in zip(names, slices, strict=True)]


def _constant_texts(reader: GraphReader, place: Place) -> list[str]:
    tensor = reader.constant(reader.resolve(place))
    if not isinstance(tensor, Tensor) or tensor.dtype != "string":
        raise UnknownValue(f"{place.name!r}, which is no text")
    return tensor.texts()


def _parse_slice(text: str) -> tuple[tuple[int, int | None], ...] | None:
    """Parse a slice of a Saver: ``"9 16 0,4:-"`` is ``[0:4, :]`` of an array of shape (9, 16), "" the whole array."""
    if not text:
        return None
    match = _SLICE.fullmatch(text)
    if match is None:
        raise UnknownValue(f"{text!r}, which is no slice")
    part: list[tuple[int, int | None]] = []
    for dimension in match[1].split(":"):
        start, _, length = dimension.partition(",")
        part.append((0, None) if dimension == "-" else (int(start), int(start) + int(length)))
    return tuple(part)


def _is_own(reader: GraphReader, place: Place) -> bool:
    """Return whether a node is of the Saver that the file names, by its last node or by the call of its function."""
    name = reader.graph.saver
    if place.body:
        return any(caller.node.name == name for caller in reader.callers.get(place.body, ()))
    scope = name.rpartition("/")[0]
    return bool(scope) and place.name.startswith(f"{scope}/")
