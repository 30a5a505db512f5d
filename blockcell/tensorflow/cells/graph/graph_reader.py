"""Reading a graph backwards: from a value to what it is computed from, into functions and out of them.

In comes a place, an output of a node; out go the places that its value comes from, or a constant. Each step is counted
and each place is visited once, so that loops, which are cycles, come to an end, and so does nonsense.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from ...graphs import Called, Function, Graph, Node
from ...tensors import Stored
from .op_table import GraphOp, graph_op

_STEPS = 200  # for each node of a graph
_MOST_PARSED = 2**12  # nodes whose attributes are kept
_LARGEST = 2**16  # entries of a constant that is read as numbers
FLOATS = ("float16", "float32", "float64", "bfloat16")
_FILLED = {"ZerosLike": 0.0, "OnesLike": 1.0}
_ARGUMENT = GraphOp("")
T = TypeVar("T")


class UnknownValue(ValueError):
    """A value comes from a place that is not understood; the text says from where."""


class Place(NamedTuple):
    """An output of a node, or an argument of a function: what compilers call a value."""

    body: str
    """The name of a function; "" is the graph itself."""
    name: str
    output: int = 0


class NodeInputs(tuple[Place, ...]):
    """The inputs of a node.  One that is missing, in a damaged graph, is unknown."""

    def __getitem__(self, k: Any) -> Any:
        try:
            return super().__getitem__(k)
        except IndexError:
            raise UnknownValue("nothing: the node has too few inputs") from None


class Caller(NamedTuple):
    """A node that calls a function."""

    body: str
    node: Node
    first_argument: int
    """The number of the input that is the function's first argument."""
    loop_body: str
    """The body of a While, whose results are the arguments of the next step; else ""."""


class StateOrigins(NamedTuple):
    """Where a state may come from."""

    places: Mapping[Place, None] = {}
    in_loop: bool = False
    """Whether a loop carries it."""
    conditions: Sequence[Place] = ()
    """The conditions that select it."""


class GraphReader:
    """Reads a graph backwards."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bodies: dict[str, Mapping[str, Node]] = {"": graph.nodes}
        self.bodies |= {name: function.nodes for name, function in graph.functions.items()}
        self.captures: dict[Place, Place] = {}
        """What arguments of functions that nothing calls have captured."""
        self._inputs: dict[tuple[str, str], NodeInputs] = {}
        self.attrs = lru_cache(_MOST_PARSED)(self._parse_attrs)
        """Returns the attributes of the node at a place; an argument has none."""
        self.called_functions = lru_cache(_MOST_PARSED)(self._called_functions)
        self._fillings: dict[Place, float | None] = {}
        self._budget = _STEPS * (1000 + sum(map(len, self.bodies.values())))

    # ---------------------------------------------------------------------------------------------------------- places
    def all_nodes(self) -> Iterator[tuple[str, Node]]:
        for body, nodes in self.bodies.items():
            for node in nodes.values():
                yield body, node

    def node(self, place: Place) -> Node | None:
        """Return the node at a place; None for an argument of a function."""
        node = self.bodies[place.body].get(place.name)
        if node is None and not (place.body and place.name in self.graph.functions[place.body].inputs):
            raise UnknownValue(f"{place.name!r}, which is not in the graph")
        if place.output and node is not None:
            outputs = graph_op(node).outputs
            if outputs is not None and place.output >= len(outputs):
                raise UnknownValue(f"{f'{place.name}:{place.output}'!r}, which is no output of a node")
        return node

    def op(self, place: Place) -> GraphOp:
        """Return the op at a place; for an argument one without name."""
        node = self.node(place)
        return _ARGUMENT if node is None else graph_op(node)

    def _parse_attrs(self, place: Place) -> dict[str, Any]:
        node = self.node(place)
        return {} if node is None else node.attrs

    def constant(self, place: Place) -> Stored | None:
        """Return the tensor of the constant at a place; None for another node and for an argument."""
        node = self.node(place)
        return None if node is None else self.graph.constant(node)

    def inputs_at(self, place: Place) -> tuple[Place, ...]:
        """Return the inputs of the node at a place, without control inputs; an argument has none."""
        key, node = (place.body, place.name), self.node(place)
        if key not in self._inputs:
            texts = () if node is None else node.inputs
            self._inputs[key] = NodeInputs(self._parse_reference(place.body, text) for text in texts if text[:1] != "^")
        return self._inputs[key]

    def inputs_of(self, place: Place, *ops: str) -> tuple[Place, ...]:
        """Return the inputs of the node that makes a value within a step, if it is one of these ops; else none."""
        place = self.resolve_in_step(place)
        return self.inputs_at(place) if self.op(place).name in ops else ()

    def operands(self, place: Place) -> tuple[Place, ...]:
        """Return the arrays that the node at a place computes with, without numbers such as axes."""
        op, inputs = self.op(place), self.inputs_at(place)
        if len(inputs) != op.input_count and not (op.input_count is None and len(inputs) > 1):
            raise UnknownValue(f"the node {place.name!r}, which is a {op.name} of {len(inputs)} inputs")
        return inputs[op.array_inputs]

    def inputs_in_step(self, place: Place) -> tuple[Place, ...]:
        """Return what a place is computed from within a step of its loop; nothing for one that is not in the file."""
        with suppress(UnknownValue):
            return () if self.op(place).name in ("Merge", "Enter") else self.inputs_at(place)
        return ()

    def _parse_reference(self, body: str, text: str) -> Place:
        """Parse a reference in a body: ``"name"``, ``"name:1"``, in functions ``"name:output:1"``."""
        name, *rest = text.split(":")
        if not rest:
            return Place(body, name)
        if not rest[-1].isdecimal() or len(rest[-1]) > 9:
            raise UnknownValue(f"{text!r}, which is no output of a node")
        output, node = int(rest[-1]), self.bodies[body].get(name)
        outputs = graph_op(node).outputs if node is not None else None
        if len(rest) > 1 and outputs and rest[0] in outputs:
            output += outputs.index(rest[0])  # each of them is one
        return Place(body, name, output)

    def spend_steps(self, steps: int = 1) -> None:
        self._budget -= steps
        if self._budget < 0:
            node = next(node for _, node in self.all_nodes())
            raise node.error("the graph that begins here is more entangled than that of any model", "is it damaged?")

    # ------------------------------------------------------------------------------------------------------- backwards
    def walk(
        self,
        starts: Iterable[T],
        predecessors: Callable[[T], Iterable[T] | None],
        *,
        most: int | None = None,
        near_first: bool = False,
    ) -> list[T]:
        """List places, or names, and all their predecessors, each once, until `most` of them are known.

        The walk follows the last predecessor first, or with `near_first` the nearest one.
        """
        visited: list[T] = []
        waiting = deque(starts)
        seen = {*waiting}
        while waiting and (most is None or len(seen) < most):
            self.spend_steps()
            place = waiting.popleft() if near_first else waiting.pop()
            visited.append(place)
            unseen = dict.fromkeys(origin for origin in predecessors(place) or () if origin not in seen)
            seen.update(unseen)
            waiting += unseen
        return visited

    def resolve_in_step(self, place: Place) -> Place:
        """Return the place that a value comes from within a step, past nodes that forward it."""
        return self.resolve(place, "step")

    def resolve(self, place: Place, *passes: str) -> Place:
        """Return the one place that a value comes from unchanged, also out of loops and variables."""
        seen = {place}
        while (origin := self.forwarded_input(place, *(passes or ("step", "flow")))) is not None:
            self.spend_steps()
            if origin in seen:
                break
            place = origin
            seen.add(place)
        return place

    def forwarded_input(self, place: Place, *passes: str) -> Place | None:
        """Return the input that a node forwards in one of these ways or multiplies with ones; None for other nodes."""
        op, inputs = self.op(place), self.inputs_at(place)
        if op.forwards in passes and inputs:
            return inputs[0]
        if op.name == "Mul" and len(inputs) == 2:  # as dropout of Keras 2 does in inference
            for value, factor in (inputs, inputs[::-1]):
                if self.fill_value(factor) == 1:
                    return value
        return None

    def fill_value(self, place: Place) -> float | None:
        """Return the number that all entries of an array are, whatever its shape; None if it is not known."""
        if place not in self._fillings:
            self._fillings[place] = None
            with suppress(UnknownValue):
                self._fillings[place] = self._read_fill_value(place)
        return self._fillings[place]

    def _read_fill_value(self, place: Place) -> float | None:
        origin = self._single_origin(place)
        name = self.op(origin).name
        if name in _FILLED:
            return _FILLED[name]
        stored = self.constant(origin if name != "Fill" else self._single_origin(self.inputs_at(origin)[1]))
        if stored is None or stored.dtype not in FLOATS or not 0 < math.prod(stored.shape) <= _LARGEST:
            return None
        values = stored.read()
        return float(values.flat[0]) if (values == values.flat[0]).all() else None

    def _single_origin(self, place: Place) -> Place:
        """Return the one place that makes a value, where a product with ones makes a value, too."""
        ends = [*self._walk_to_ends(place, self._direct_predecessors)]
        if len(ends) != 1:
            raise UnknownValue(f"{place.name!r}, which does not come from one place")
        return ends[0]

    def are_same(self, left: Place, right: Place) -> bool:
        """Return whether two places hold one value."""
        return self.resolve(left) == self.resolve(right)

    def origins(self, place: Place) -> dict[Place, None]:
        """Return the places that make a value, which comes from them unchanged by some way, in order."""
        return self._walk_to_ends(place, self.predecessors)

    def _walk_to_ends(self, place: Place, predecessors: Callable[[Place], list[Place] | None]) -> dict[Place, None]:
        ends: dict[Place, None] = {}

        def collect(current: Place) -> list[Place] | None:
            earlier = predecessors(current)
            if earlier is None:
                ends[current] = None
            return earlier

        self.walk([place], collect)
        return ends

    def state_origins(self, place: Place) -> StateOrigins:
        """Return where a state may come from, also out of a Select by lengths."""
        in_loop, conditions = False, list[Place]()

        def earlier(current: Place) -> list[Place] | None:
            nonlocal in_loop
            op = self.op(current)
            if op is _ARGUMENT:
                in_loop = in_loop or any(caller.loop_body for caller in self.callers.get(current.body, ()))
            elif op.name == "NextIteration":
                in_loop = True
            if op.name == "Select":
                condition, *chosen = self.inputs_at(current)
                if self._is_own_condition(condition, chosen):
                    return None
                conditions.append(condition)
                return chosen
            return self.predecessors(current)

        return StateOrigins(self._walk_to_ends(place, earlier), in_loop, conditions)

    def is_state_of(self, place: Place, ends: set[Place]) -> bool:
        """Return whether a state may come from one of these places, as far as its origins are known."""
        try:
            return not ends.isdisjoint(self.state_origins(place).places)
        except UnknownValue:
            return False

    def _is_own_condition(self, condition: Place, chosen: Iterable[Place]) -> bool:
        """Return whether a condition is on the values that it selects, as in an activation, and not on lengths."""
        resolve = self.resolve_in_step
        compared = {resolve(value) for value in self.inputs_at(resolve(condition))}
        places = [resolve(place) for place in chosen]
        return any(value in compared for place in places for value in (place, *map(resolve, self.inputs_at(place))))

    def predecessors(self, place: Place) -> list[Place] | None:
        """Return the places that a node forwards a value from; None if it makes the value."""
        multiplied = self.forwarded_input(place)
        return self._direct_predecessors(place) if multiplied is None else [multiplied]

    def _direct_predecessors(self, place: Place) -> list[Place] | None:
        """Return what `predecessors` does, but for products with ones."""
        node = self.node(place)
        if node is None:
            return self._passed_arguments(place)
        inputs, op = self.inputs_at(place), graph_op(node)
        if op.forwards and inputs:
            return [inputs[0]]
        if op.name == "Merge":
            return list(inputs)
        if op.name == "IdentityN":
            return [inputs[place.output]] if place.output < len(inputs) else None
        if op.name == "Cast":
            attrs = node.attrs
            return [inputs[0]] if inputs and attrs.get("SrcT") == attrs.get("DstT") else None
        called = self.called_functions(node)
        if not called:
            return None
        if op.name == "While":  # the body's, not the condition's, or what goes into the first step
            return [self.function_result(called[-1], place.output), *inputs[place.output : place.output + 1]]
        return [self.function_result(name, place.output) for name in called]

    # ------------------------------------------------------------------------------------------------------- functions
    def _called_functions(self, node: Node) -> list[str]:
        """Name the functions that a node calls."""
        if node.op in self.graph.functions:
            return [node.op]
        keys = graph_op(node).function_attributes
        if not keys:
            return []
        called = map(node.attrs.get, keys)
        names = [value.name for value in called if isinstance(value, Called) and value.name in self.graph.functions]
        if len(names) != len(keys):
            raise UnknownValue(f"the node {node.name!r}, which calls a function that is not in the graph")
        return names

    def function_result(self, name: str, output: int) -> Place:
        function = self.graph.functions[name]
        if output >= len(function.outputs) or function.outputs[output] not in function.returned:
            raise UnknownValue(f"output {output} of the function {name!r}, which has none")
        return self._parse_reference(name, function.returned[function.outputs[output]])

    def passed_argument(self, caller: Caller, place: Place) -> Place:
        """Return what one caller passes for an argument."""
        inputs = self.inputs_at(Place(caller.body, caller.node.name))
        return inputs[caller.first_argument + self.argument_numbers[place.body][place.name]]

    def _passed_arguments(self, place: Place) -> list[Place]:
        """Return what all callers pass for an argument."""
        function = self.graph.functions[place.body]
        k = self.argument_numbers[place.body][place.name]
        arguments = []
        for caller in self.callers.get(place.body, ()):
            self.spend_steps()
            arguments.append(self.passed_argument(caller, place))
            if caller.loop_body and k < len(function.outputs):
                arguments.append(self.function_result(caller.loop_body, k))
        return arguments or [self.captured(place)]

    def captured(self, place: Place) -> Place:
        """Return what a function that nothing calls has captured as an argument."""
        if place not in self.captures:
            raise UnknownValue(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        return self.captures[place]

    @cached_property
    def argument_numbers(self) -> dict[str, dict[str, int]]:
        """The numbers of the arguments of each function."""
        functions: Mapping[str, Function] = self.graph.functions
        return {name: {argument: k for k, argument in enumerate(f.inputs)} for name, f in functions.items()}

    @cached_property
    def callers(self) -> dict[str, list[Caller]]:
        """The nodes that call each function."""
        callers: dict[str, list[Caller]] = {}
        for body, node in self.all_nodes():
            try:
                called = self.called_functions(node)
            except UnknownValue:
                continue
            op = graph_op(node)
            for name in called:
                loop_body = called[-1] if op.name == "While" else ""
                callers.setdefault(name, []).append(Caller(body, node, op.first_argument, loop_body))
        return callers

    @cached_property
    def running_bodies(self) -> set[str]:
        """The graph and the functions that run with it, as Keras stores the functions of each layer once more."""
        called: dict[str, list[str]] = {}
        for name, callers in self.callers.items():
            for caller in callers:
                called.setdefault(caller.body, []).append(name)
        return {*self.walk([""], called.get)}

    # ------------------------------------------------------------------------------------------------------- constants
    def constant_integers(self, place: Place, *, rank: int | None = None) -> list[int] | None:
        """Return a constant of a few whole numbers, of this rank; None if a place is none."""
        stored = self.constant(self.resolve(place))
        if stored is None or stored.dtype not in ("int32", "int64") or math.prod(stored.shape) > _LARGEST:
            return None
        if rank is not None and len(stored.shape) != rank:
            return None
        return [int(number) for number in stored.read().ravel()]

    def constant_integer(self, place: Place) -> int:
        """Return a constant that is one whole number."""
        return int(self.constant_number(place, "i", "u"))

    def constant_number(self, place: Place, *kinds: str) -> float:
        """Return a constant that is one number."""
        array = None
        for origin in self.origins(place):
            stored = self.constant(origin)
            if stored is None or math.prod(stored.shape) != 1 or array is not None:
                raise UnknownValue(f"{origin.name!r}, which is not one number")
            if not stored.is_readable:
                raise UnknownValue(f"{origin.name!r}, which is {stored.dtype}")
            array = stored.read()
        if array is None or array.dtype.kind not in (kinds or "f"):
            raise UnknownValue(f"{place.name!r}, which is not one number")
        number = float(array.reshape(()))
        if not math.isfinite(number):
            raise UnknownValue(f"{place.name!r}, which is {number}")
        return number
