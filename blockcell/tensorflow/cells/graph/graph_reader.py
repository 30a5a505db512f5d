"""A graph as it is read: backwards, from a value to what it is computed from, into functions and out of them.

Each step is counted and each place is visited once, so loops, which are cycles, come to an end, and so does nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from ...graphs import Called, Function, Graph, Node
from .op_table import Op, op_of

_STEPS = 200  # for each node of a graph
_LARGEST = 2**16  # entries of a constant that is read as numbers
_OTHERS = ("string", "resource", "variant", "bool")  # dtypes that are no numbers
_FLOATS = ("float16", "float32", "float64", "bfloat16")
_FILLED = {"ZerosLike": 0.0, "OnesLike": 1.0}
_NOTHING = Op("")


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


class Caller(NamedTuple):
    """A node that calls a function."""

    body: str
    node: Node
    first: int
    """The input that is the function's first argument."""
    carried: str
    """Of a loop, its body, whose results are the arguments of the next step; else ""."""


class Reader:
    """A graph, for looking backwards."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bodies: dict[str, Mapping[str, Node]] = {"": graph.nodes}
        self.bodies |= {name: function.nodes for name, function in graph.functions.items()}
        self.captures: dict[str, list[Place | None]] = {}
        """What the last arguments of functions are, also of those that nothing calls; None is not known."""
        self._inputs: dict[tuple[str, str], Inputs] = {}
        self._fillings: dict[Place, float | None] = {}
        self._budget = _STEPS * (1000 + sum(map(len, self.bodies.values())))

    # ---------------------------------------------------------------------------------------------------------- places
    def all_nodes(self) -> Iterator[tuple[str, Node]]:
        for body, nodes in self.bodies.items():
            for node in nodes.values():
                yield body, node

    def node(self, place: Place) -> Node | None:
        """The node at a place; None for an argument of a function."""
        found = self.bodies[place.body].get(place.name)
        if found is None and not (place.body and place.name in self.graph.functions[place.body].inputs):
            raise Unknown(f"{place.name!r}, which is not in the graph")
        if place.output and found is not None:
            outputs = op_of(found).outputs
            if outputs is not None and place.output >= len(outputs):
                raise Unknown(f"{f'{place.name}:{place.output}'!r}, which is no output of a node")
        return found

    def op(self, place: Place) -> Op:
        """The op at a place; of an argument one without name."""
        node = self.node(place)
        return _NOTHING if node is None else op_of(node)

    def inputs(self, body: str, node: Node) -> tuple[Place, ...]:
        """What a node is given, without control inputs."""
        key = body, node.name
        if key not in self._inputs:
            self._inputs[key] = Inputs(self._place(body, text) for text in node.inputs if text[:1] != "^")
        return self._inputs[key]

    def given(self, place: Place) -> tuple[Place, ...]:
        """What the node at a place is given; nothing for an argument."""
        node = self.node(place)
        return () if node is None else self.inputs(place.body, node)

    def _place(self, body: str, text: str) -> Place:
        """What a reference in a body means: ``"name"``, ``"name:1"``, in functions ``"name:output:1"``."""
        name, *rest = text.split(":")
        if not rest:
            return Place(body, name)
        if not rest[-1].isdecimal() or len(rest[-1]) > 9:
            raise Unknown(f"{text!r}, which is no output of a node")
        output, node = int(rest[-1]), self.bodies[body].get(name)
        outputs = op_of(node).outputs if node is not None else None
        if len(rest) > 1 and outputs and rest[0] in outputs:
            output += outputs.index(rest[0])  # each of them is one
        return Place(body, name, output)

    def count(self, steps: int = 1) -> None:
        self._budget -= steps
        if self._budget < 0:
            node = next(node for _, node in self.all_nodes())
            raise node.error("the graph that begins here is more entangled than that of any model", "is it damaged?")

    # ------------------------------------------------------------------------------------------------------- backwards
    def walk(
        self,
        starts: Iterable[Place],
        before: Callable[[Place], Iterable[Place] | None],
        *,
        most: int | None = None,
        near_first: bool = False,
    ) -> list[Place]:
        """All places behind some and those themselves, each once.

        What `before` gives last is gone after first, or with `near_first` what is nearest. It ends when `most` places
        are known.
        """
        found: list[Place] = []
        waiting = [*starts]
        seen = {*waiting}
        while waiting and (most is None or len(seen) < most):
            self.count()
            here = waiting.pop(0 if near_first else -1)
            found.append(here)
            new = dict.fromkeys(each for each in before(here) or () if each not in seen)
            seen.update(new)
            waiting += new
        return found

    def past(self, place: Place) -> Place:
        """The place that a value comes from within a step, past nodes that pass it on."""
        seen = {place}
        while (before := self.unchanged(place, "step")) is not None:
            self.count()
            place = before
            if place in seen:
                raise Unknown(f"{place.name!r}, which comes from nothing but itself")
            seen.add(place)
        return place

    def straight(self, place: Place) -> Place:
        """The place that a value comes from unchanged, also out of loops and variables, as far as that is one place."""
        seen = {place}
        while (before := self.unchanged(place, "step", "flow")) is not None:
            self.count()
            if before in seen:
                break
            place = before
            seen.add(place)
        return place

    def unchanged(self, place: Place, *passes: str) -> Place | None:
        """The input of a node that its output is, of a node that passes it on so, or multiplies it with ones."""
        op, inputs = self.op(place), self.given(place)
        if op.passes in passes and inputs:
            return inputs[0]
        if op.name == "Mul" and len(inputs) == 2:  # as dropout of Keras 2 does in inference
            for value, factor in (inputs, inputs[::-1]):
                if self.filling(factor) == 1:
                    return value
        return None

    def filling(self, place: Place) -> float | None:
        """The number that all entries of an array are, whatever its shape; None if that is not known."""
        if place not in self._fillings:
            self._fillings[place] = None
            with suppress(Unknown):
                self._fillings[place] = self._filling(place)
        return self._fillings[place]

    def _filling(self, place: Place) -> float | None:
        origin, node = self._maker(place)
        name = "" if node is None else op_of(node).name
        if name in _FILLED:
            return _FILLED[name]
        if name == "Fill":
            _, node = self._maker(self.given(origin)[1])
        stored = None if node is None else self.graph.constant(node)
        if stored is None or stored.dtype not in _FLOATS or not 0 < math.prod(stored.shape) <= _LARGEST:
            return None
        values = stored.read()
        return float(values.flat[0]) if (values == values.flat[0]).all() else None

    def _maker(self, place: Place) -> tuple[Place, Node | None]:
        """Where a value is made, and by which node; None if it may come from several places."""
        ends = [*self._ends(place, self._before)]
        return ends[0] if ends else place, self.node(ends[0]) if len(ends) == 1 else None

    def same(self, one: Place, other: Place) -> bool:
        """Whether two are one value."""
        return self.straight(one) == self.straight(other)

    def origins(self, place: Place) -> dict[Place, None]:
        """The places that it may come from unchanged, by whatever way: what is not passed on, in order."""
        return self._ends(place, self.before)

    def _ends(self, place: Place, before: Callable[[Place], list[Place] | None]) -> dict[Place, None]:
        ends: dict[Place, None] = {}

        def one(here: Place) -> list[Place] | None:
            found = before(here)
            if found is None:
                ends[here] = None
            return found

        self.walk([place], one)
        return ends

    def state(self, place: Place) -> tuple[dict[Place, None], bool]:
        """Where a state may come from, also out of selections by lengths, and whether that goes around a loop."""
        looped = False

        def before(here: Place) -> list[Place] | None:
            nonlocal looped
            op = self.op(here)
            if op is _NOTHING:
                looped = looped or any(caller.carried for caller in self.callers.get(here.body, ()))
            elif op.name == "NextIteration":
                looped = True
            if op.name == "Select":
                condition, *chosen = self.given(here)
                return None if self._decides(condition, chosen) else chosen
            return self.before(here)

        return self._ends(place, before), looped

    def _decides(self, condition: Place, chosen: Iterable[Place]) -> bool:
        """Whether a condition is on what is chosen itself, as in an activation, and not on lengths."""
        read = {self.past(each) for each in self.given(self.past(condition))}
        places = [self.past(place) for place in chosen]
        return any(each in read for place in places for each in (place, *map(self.past, self.given(place))))

    def before(self, place: Place) -> list[Place] | None:
        """Where a value comes from, unchanged, in one step; None if it is made here."""
        multiplied = self.unchanged(place)
        return self._before(place) if multiplied is None else [multiplied]

    def _before(self, place: Place) -> list[Place] | None:
        """What `before` gives, but for products with ones."""
        node = self.node(place)
        if node is None:
            return self._passed(place)
        inputs, op = self.inputs(place.body, node), op_of(node)
        if op.passes and inputs:
            return [inputs[0]]
        if op.name == "Merge":
            return list(inputs)
        if op.name == "IdentityN":
            return [inputs[place.output]] if place.output < len(inputs) else None
        if op.name == "Cast":
            attrs = node.attrs
            return [inputs[0]] if inputs and attrs.get("SrcT") == attrs.get("DstT") else None
        called = self.calls(node)
        if not called:
            return None
        if op.name == "While":  # the body's, not the condition's, or what goes into the first step
            return [self.returned(called[-1], place.output), *inputs[place.output : place.output + 1]]
        return [self.returned(name, place.output) for name in called]

    # ------------------------------------------------------------------------------------------------------- functions
    def calls(self, node: Node) -> list[str]:
        """The functions that a node calls."""
        if node.op in self.graph.functions:
            return [node.op]
        keys = op_of(node).calls
        if not keys:
            return []
        attrs = node.attrs
        called = [attrs.get(key) for key in keys]
        names = [each.name for each in called if isinstance(each, Called) and each.name in self.graph.functions]
        if len(names) != len(keys):
            raise Unknown(f"the node {node.name!r}, which calls a function that is not in the graph")
        return names

    def returned(self, name: str, output: int) -> Place:
        function = self.graph.functions[name]
        if output >= len(function.outputs) or function.outputs[output] not in function.returned:
            raise Unknown(f"output {output} of the function {name!r}, which has none")
        return self._place(name, function.returned[function.outputs[output]])

    def argument(self, caller: Caller, place: Place) -> Place | None:
        """What one caller passes for an argument; None of a damaged one."""
        inputs, k = self.inputs(caller.body, caller.node), caller.first + self.positions[place.body][place.name]
        return inputs[k] if k < len(inputs) else None

    def _passed(self, place: Place) -> list[Place]:
        """What all callers pass for an argument."""
        function = self.graph.functions[place.body]
        k = self.positions[place.body][place.name]
        found = []
        for caller in self.callers.get(place.body, ()):
            self.count()
            if (one := self.argument(caller, place)) is not None:
                found.append(one)
            if caller.carried and k < len(function.outputs):
                found.append(self.returned(caller.carried, k))
        captured, behind = self.captures.get(place.body, []), len(function.inputs) - k
        if not found and behind <= len(captured) and (one := captured[-behind]) is not None:
            found.append(one)
        if not found:
            raise Unknown(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        return found

    @cached_property
    def positions(self) -> dict[str, dict[str, int]]:
        """Of each function's arguments, the numbers."""
        functions: Mapping[str, Function] = self.graph.functions
        return {name: {each: k for k, each in enumerate(one.inputs)} for name, one in functions.items()}

    @cached_property
    def callers(self) -> dict[str, list[Caller]]:
        """Of each function, what calls it."""
        found: dict[str, list[Caller]] = {}
        for body, node in self.all_nodes():
            try:
                called = self.calls(node)
            except Unknown:
                continue
            op = op_of(node)
            for name in called:
                carried = called[-1] if op.name == "While" else ""
                found.setdefault(name, []).append(Caller(body, node, op.first, carried))
        return found

    @cached_property
    def running(self) -> set[str]:
        """The graph, and the functions that run with it: Keras stores those of each layer once more, by themselves."""
        called: dict[str, list[str]] = {}
        for name, callers in self.callers.items():
            for caller in callers:
                called.setdefault(caller.body, []).append(name)
        found, waiting = {""}, [""]
        while waiting:
            new = [name for name in called.get(waiting.pop(), ()) if name not in found]
            found.update(new)
            waiting += dict.fromkeys(new)
        return found

    # ------------------------------------------------------------------------------------------------------- constants
    def numbers(self, place: Place, *, rank: int | None = None) -> list[int] | None:
        """A constant of a few whole numbers, of any rank or of one; None if it is none."""
        node = self.node(self.straight(place))
        stored = None if node is None else self.graph.constant(node)
        if stored is None or stored.dtype not in ("int32", "int64") or math.prod(stored.shape) > _LARGEST:
            return None
        if rank is not None and len(stored.shape) != rank:
            return None
        return [int(number) for number in stored.read().ravel()]

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
            if stored.dtype in _OTHERS:
                raise Unknown(f"{origin.name!r}, which is {stored.dtype}")
            found = stored.read()
        if found is None or found.dtype.kind not in (kinds or "f"):
            raise Unknown(f"{place.name!r}, which is not one number")
        number = float(found.reshape(()))
        if not math.isfinite(number):
            raise Unknown(f"{place.name!r}, which is {number}")
        return number
