"""Where what a node is given comes from: backwards through a graph, and out of functions, to variables and constants.

Each step is counted and each place is visited once, so loops, which are cycles, come to an end, and so does nonsense.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..optable import OPS, Array
from .graphs import Called, Function, Graph, Node
from .tensors import Stored
from .variables import Variables, alike

AVERAGE = "/ExponentialMovingAverage"
_DEEPEST = 4  # joins and splits within each other
_MOST_PARTS = 4096
_STEPS = 200  # for each node of a graph
_MOST_REPEATED = 2**22  # entries of a constant that is one number
_THROUGH = {
    "Identity", "ReadVariableOp", "Enter", "RefEnter", "Switch", "RefSwitch", "Exit", "RefExit", "NextIteration",
    "RefNextIteration", "RefIdentity", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot", "EnsureShape",
}  # fmt: skip
_ONE_OUTPUT = _THROUGH - {"Switch", "RefSwitch"} | {
    "Add", "AddV2", "BiasAdd", "Cast", "ClipByValue", "ConcatV2", "Const", "ImmutableConst", "MatMul", "Maximum",
    "Minimum", "Mul", "Select", "SelectV2", "Sigmoid", "Squeeze", "StridedSlice", "Sub", "Tanh",
}  # fmt: skip
VARIABLES = {"Variable", "VariableV2", "VarHandleOp", "AutoReloadVariable"}
_OUTPUTS = {name: {each.name: k for k, each in enumerate(op.outputs)} for name, op in OPS.items()}
_OUTPUTS |= {"TensorArrayV3": {"flow": 1}, "Switch": {"output_true": 1}, "RefSwitch": {"output_true": 1}}
_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f", "RemoteCall": "f"}
_LOOPS = {"While", "StatelessWhile"}
_BRANCHES = {"If", "StatelessIf"}


class Unknown(ValueError):
    """Something comes from a place that is not understood: the text says from where."""


class Place(NamedTuple):
    """An output of a node, or an argument of a function."""

    body: str
    """The function's name; "" is the graph itself."""
    name: str
    output: int = 0


class Inputs(tuple[Place, ...]):
    """What a node is given.  One that it does not have, in a damaged graph, is unknown."""

    def __getitem__(self, k: Any) -> Any:
        try:
            return super().__getitem__(k)
        except IndexError:
            raise Unknown("nothing: the node has too few inputs") from None


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


class Tracer:
    """A graph with the variables of its checkpoint, for looking backwards.  `savers.tracer_of` makes it."""

    def __init__(self, graph: Graph, variables: Variables | None) -> None:
        """`variables` is None for a frozen graph."""
        self.graph, self.variables = graph, variables
        self.bodies: dict[str, Mapping[str, Node]] = {"": graph.nodes}
        self.bodies |= {name: function.nodes for name, function in graph.functions.items()}
        self._inputs: dict[tuple[str, str], Inputs] = {}
        self._sources: dict[Place, Source | str] = {}
        self._left = _STEPS * (1000 + sum(map(len, self.bodies.values())))
        self.restored: tuple[Names, Names] = {}, {}
        """Where variables are, by their nodes: for the Saver that the file names, and for others."""
        self.captures: dict[str, list[Place | None]] = {}
        """What the last arguments of functions are, also of those that nothing calls; None is not known."""

    def all_nodes(self) -> Iterator[tuple[str, Node]]:
        for body, nodes in self.bodies.items():
            for node in nodes.values():
                yield body, node

    def inputs(self, body: str, node: Node) -> tuple[Place, ...]:
        """What a node is given, without control inputs."""
        key = body, node.name
        if key not in self._inputs:
            self._inputs[key] = Inputs(self.place(body, text) for text in node.inputs if text[:1] != "^")
        return self._inputs[key]

    def place(self, body: str, text: str) -> Place:
        """What a reference in a body means: ``"name"``, ``"name:1"``, in functions ``"name:output:1"``."""
        name, *rest = text.split(":")
        if not rest:
            return Place(body, name)
        if not rest[-1].isdecimal() or len(rest[-1]) > 9:
            raise Unknown(f"{text!r}, which is no output of a node")
        output = int(rest[-1])
        if len(rest) > 1:
            output += self._first(body, name, rest[0])
        return Place(body, name, output)

    def _first(self, body: str, name: str, output: str) -> int:
        """The number of the first of a node's outputs that are called this."""
        node = self.bodies[body].get(name)
        return 0 if node is None else _OUTPUTS.get(node.op, {}).get(output, 0)

    def node(self, place: Place) -> Node | None:
        """The node at a place; None for an argument of a function."""
        found = self.bodies[place.body].get(place.name)
        if found is None and not (place.body and place.name in self.graph.functions[place.body].inputs):
            raise Unknown(f"{place.name!r}, which is not in the graph")
        if place.output and found is not None and found.op in _ONE_OUTPUT:
            raise Unknown(f"{f'{place.name}:{place.output}'!r}, which is no output of a node")
        return found

    # -------------------------------------------------------------------------------------------------- to the origin
    def origins(self, place: Place) -> dict[Place, None]:
        """The places that it may come from unchanged: what is not passed on, in order."""
        found: dict[Place, None] = {}
        seen = {place}
        left = [place]
        while left:
            self.count()
            here = left.pop()
            before = self.before(here)
            if before is None:
                found[here] = None
                continue
            left += [each for each in before if each not in seen]
            seen.update(before)
        return found

    def straight(self, place: Place) -> Place:
        """The place that a value comes from unchanged, as far as that is one place."""
        seen = {place}
        while True:
            self.count()
            before = self.before(place) if self._plain(place) else None
            if before is None or len(before) != 1 or before[0] in seen:
                return place
            place = before[0]
            seen.add(place)

    def _plain(self, place: Place) -> bool:
        """Whether it comes out of a node that passes one value on."""
        node = self.node(place)
        return node is not None and node.op in _THROUGH

    def state(self, place: Place) -> tuple[dict[Place, None], bool]:
        """Where a state may come from, also out of selections by lengths, and whether that goes around a loop."""
        found: dict[Place, None] = {}
        seen, left, looped = {place}, [place], False
        while left:
            self.count()
            here = left.pop()
            node = self.node(here)
            if node is None:
                looped = looped or any(carried for *_, carried in self.callers.get(here.body, []))
            elif node.op in ("NextIteration", "RefNextIteration"):
                looped = True
            chosen = node is not None and node.op in ("Select", "SelectV2")
            before = list(self.inputs(here.body, node)[1:]) if node is not None and chosen else self.before(here)
            if before is None:
                found[here] = None
                continue
            left += [each for each in before if each not in seen]
            seen.update(before)
        return found, looped

    def count(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            node = next(node for _, node in self.all_nodes())
            raise node.error("the graph that begins here is more entangled than that of any model", "is it damaged?")

    def before(self, place: Place) -> list[Place] | None:
        """Where a value comes from, unchanged, in one step; None if it is made here."""
        node = self.node(place)
        if node is None:
            return self._given(place)
        inputs = self.inputs(place.body, node)
        if node.op in _THROUGH and inputs:
            return [inputs[0]]
        if node.op in ("Merge", "RefMerge"):
            return list(inputs)
        if node.op == "IdentityN":
            return [inputs[place.output]] if place.output < len(inputs) else None
        if node.op == "Cast":
            attrs = node.attrs
            return [inputs[0]] if inputs and attrs.get("SrcT") == attrs.get("DstT") else None
        calls = self.calls(node)
        if not calls:
            return None
        back = [self.returned(name, place.output) for name, _ in calls]
        if node.op in _LOOPS:
            back = [self.returned(calls[-1][0], place.output)]  # of the body, not of the condition
            back += inputs[place.output : place.output + 1]
        return back

    def calls(self, node: Node) -> list[tuple[str, int]]:
        """The functions that a node calls, and which of its inputs is their first."""
        if node.op in self.graph.functions:
            return [(node.op, 0)]
        if node.op in _CALLS:
            keys, first = [_CALLS[node.op]], 0
        elif node.op in _LOOPS:
            keys, first = ["cond", "body"], 0
        elif node.op in _BRANCHES:
            keys, first = ["then_branch", "else_branch"], 1
        else:
            return []
        attrs = node.attrs
        called = [attrs.get(key) for key in keys]
        names = [each.name for each in called if isinstance(each, Called) and each.name in self.graph.functions]
        if len(names) != len(keys):
            raise Unknown(f"the node {node.name!r}, which calls a function that is not in the graph")
        return [(name, first) for name in names]

    def returned(self, name: str, output: int) -> Place:
        function = self.graph.functions[name]
        if output >= len(function.outputs) or function.outputs[output] not in function.returned:
            raise Unknown(f"output {output} of the function {name!r}, which has none")
        return self.place(name, function.returned[function.outputs[output]])

    def _given(self, place: Place) -> list[Place]:
        """What callers pass for an argument."""
        function = self.graph.functions[place.body]
        k = self.positions[place.body][place.name]
        found = []
        for body, node, first, carried in self.callers.get(place.body, []):
            self.count()
            inputs = self.inputs(body, node)
            if k + first < len(inputs):
                found.append(inputs[k + first])
            if carried and k < len(function.outputs):
                found.append(self.returned(carried, k))
        captured, left = self.captures.get(place.body, []), len(function.inputs) - k
        if not found and left <= len(captured) and (one := captured[-left]) is not None:
            found.append(one)
        if not found:
            raise Unknown(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        return found

    @cached_property
    def positions(self) -> dict[str, dict[str, int]]:
        functions: Mapping[str, Function] = self.graph.functions
        return {name: {each: k for k, each in enumerate(one.inputs)} for name, one in functions.items()}

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Node, int, str]]]:
        """Of each function: body and node that call it, the first input, and the body of a loop or ""."""
        found: dict[str, list[tuple[str, Node, int, str]]] = {}
        for body, node in self.all_nodes():
            try:
                calls = self.calls(node)
            except Unknown:
                continue
            for name, first in calls:
                carried = calls[-1][0] if node.op in _LOOPS else ""
                found.setdefault(name, []).append((body, node, first, carried))
        return found

    # --------------------------------------------------------------------------------------------------- what it holds
    def source(self, place: Place, depth: int = 0) -> Source:
        """The variables and constants that a weight is made of."""
        if place not in self._sources:
            try:
                self._sources[place] = self._source(place, depth)
            except Unknown as unknown:
                self._sources[place] = str(unknown)
        found = self._sources[place]
        if isinstance(found, str):
            raise Unknown(found)
        return found

    def _source(self, place: Place, depth: int) -> Source:
        origins = self.origins(place)
        if not origins:
            raise Unknown(f"{place.name!r}, which comes from nothing but itself")
        sources = [self._made(each, depth) for each in origins]
        if any(each.name != sources[0].name for each in sources[1:]):
            names = " or ".join(sorted({each.name for each in sources})[:4])
            raise Unknown(f"{names}: not one weight")
        return sources[0]

    def _made(self, place: Place, depth: int) -> Source:
        node = self.node(place)
        if node is None:  # an argument is passed on: origins() has gone past it
            raise Unknown(f"the argument {place.name!r} of {place.body!r}")
        if depth > _DEEPEST:
            raise Unknown(f"the node {node.name!r}, beyond {_DEEPEST} joins and splits")
        stored = self.graph.constant(node)
        if stored is not None:
            return _leaf(node, stored)
        if node.op in VARIABLES:
            return self._variable(node)
        inputs = self.inputs(place.body, node)
        if node.op == "ConcatV2" and len(inputs) > 2:
            return self._joined(node, inputs, depth)
        if node.op == "Split" and len(inputs) == 2:
            return self._part(node, place.output, inputs, depth)
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
        others = set(names.values()) & self.bodies[""].keys() - names.keys()
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
            copy = self.bodies[""].get(node.name + more) if more and node is not None else None
            if copy is not None and copy.op in VARIABLES:
                where = self._saved(copy) or where
            array = variables[where.key]
            if where.part is not None and len(where.part) == array.ndim:
                array = array[tuple(slice(*each) for each in where.part)]
            return alike(array, where.key, stored.dtype, shape)

        return Source(name, shape, stored.dtype, read, (name,), saved)

    def _joined(self, node: Node, inputs: tuple[Place, ...], depth: int) -> Source:
        parts = [self.source(each, depth + 1) for each in inputs[:-1]]
        rank = len(parts[0].shape)
        axis = self.number(inputs[-1])
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
                self.count(20)
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

    def _part(self, node: Node, k: int, inputs: tuple[Place, ...], depth: int) -> Source:
        whole, count, axis = self.source(inputs[1], depth + 1), node.attrs.get("num_split"), self.number(inputs[0])
        rank = len(whole.shape)
        if not -rank <= axis < rank or not isinstance(count, int) or not 0 <= k < count or whole.shape[axis] % count:
            raise Unknown(f"the node {node.name!r}, which splits {whole.name} of shape {whole.shape} in {count}")
        size = whole.shape[axis] // count
        shape = list(whole.shape)
        shape[axis] = size
        where = tuple(slice(k * size, (k + 1) * size) if d == axis % rank else slice(None) for d in range(rank))
        name = f"{whole.name}, part {k} of {count}"
        leaves = tuple(f"{leaf}, part {k} of {count}" for leaf in whole.leaves)
        return Source(name, tuple(shape), whole.dtype, lambda more: whole.read(more)[where], leaves)

    def _converted(self, node: Node, place: Place, depth: int) -> Source:
        given, dtype = self.source(place, depth + 1), str(node.attrs.get("DstT"))
        numpy = "float32" if dtype == "bfloat16" else dtype
        if numpy not in ("float16", "float32", "float64"):
            raise Unknown(f"the node {node.name!r}, which converts to {dtype}")
        if dtype == "bfloat16":
            raise Unknown(f"the node {node.name!r}, which rounds to bfloat16")
        return given._replace(dtype=dtype, read=lambda more: given.read(more).astype(numpy))

    def number(self, place: Place) -> int:
        """A constant that is one whole number."""
        return int(self.value(place, "i", "u"))

    def value(self, place: Place, *kinds: str) -> float:
        """A constant that is one number."""
        found = None
        for origin in self.origins(place):
            node = self.node(origin)
            stored = None if node is None else self.graph.constant(node)
            if stored is None or math.prod(stored.shape) != 1 or found is not None:
                raise Unknown(f"{origin.name!r}, which is not one number")
            if stored.dtype in ("string", "resource", "variant", "bool"):
                raise Unknown(f"{origin.name!r}, which is {stored.dtype}")
            found = stored.read()
        if found is None or found.dtype.kind not in (kinds or "f"):
            raise Unknown(f"{place.name!r}, which is not one number")
        number = float(found.reshape(()))
        if not math.isfinite(number):
            raise Unknown(f"{place.name!r}, which is {number}")
        return number


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
