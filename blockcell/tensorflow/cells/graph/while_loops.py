"""Loops and their variables: frames between Enter and Exit of TensorFlow 1, and functions of a While of TensorFlow 2.

In comes a place inside or behind a loop; out go the loop variable there, with its initial and its next value.
"""

from __future__ import annotations

from typing import NamedTuple

from ...graphs import Node
from .graph_reader import Caller, GraphReader, Place, UnknownValue


class LoopVariable(NamedTuple):
    """A variable that a loop carries from step to step, at its place inside the loop."""

    place: Place
    initial: Place
    """The place outside that its first value comes from."""
    next: Place
    """The value for the next step."""
    loop: str


class WhileLoops:
    """The loops of a graph."""

    def __init__(self, reader: GraphReader) -> None:
        self._reader = reader
        self._variables: dict[Place, LoopVariable | None] = {}

    def callers(self, body: str) -> list[Caller]:
        """List the nodes that call a function, without nodes that nothing runs."""
        running, callers = self._reader.running_bodies, self._reader.callers.get(body, [])
        return [caller for caller in callers if caller.body in running] if body in running else callers

    def loop_variable(self, place: Place) -> LoopVariable | None:
        """Return the loop variable at a place inside a loop; None if there is none."""
        origin = self._reader.resolve_in_step(place)
        if origin not in self._variables:
            try:
                node = self._reader.node(origin)
                self._variables[origin] = self._of_argument(origin) if node is None else self._of_merge(origin, node)
            except UnknownValue:
                self._variables[origin] = None
        return self._variables[origin]

    def _of_argument(self, place: Place) -> LoopVariable | None:
        callers = self.callers(place.body)
        if len(callers) != 1 or callers[0].loop_body != place.body:
            return None
        first = self._reader.passed_argument(callers[0], place)
        k = self._reader.argument_numbers[place.body][place.name]
        return LoopVariable(place, first, self._reader.function_result(place.body, k), f"function {place.body}")

    def _of_merge(self, place: Place, node: Node) -> LoopVariable | None:
        if self._reader.op(place).name != "Merge":
            return None
        inputs = {self._reader.op(place).name: place for place in self._reader.inputs_at(place)}
        if inputs.keys() - {""} != {"Enter", "NextIteration"}:
            return None
        first, last = (self._reader.inputs_at(inputs[op]) for op in ("Enter", "NextIteration"))
        return LoopVariable(place, first[0], last[0], self._frame(inputs["Enter"])) if first and last else None

    def is_invariant(self, variable: LoopVariable) -> bool:
        """Return whether a loop leaves a variable as it is."""
        return self._reader.resolve_in_step(variable.next) == variable.place

    def exit_variable(self, place: Place) -> LoopVariable | None:
        """Return the loop variable whose last value a place behind a loop is; None if there is none."""
        origin = self._reader.resolve_in_step(place)
        node, op = self._reader.node(origin), self._reader.op(origin).name
        if node is not None and op == "Exit":
            inputs = self._reader.inputs_at(origin)
            return self.loop_variable(inputs[0]) if inputs else None
        if node is None or op != "While":
            return None
        name = self._reader.called_functions(node)[-1]
        arguments = self._reader.graph.functions[name].inputs
        return self.loop_variable(Place(name, arguments[origin.output])) if origin.output < len(arguments) else None

    def outside_value(self, place: Place) -> tuple[Place, str | None]:
        """Return the outer place of a value that a loop leaves as it is, and the loop; else the place and None."""
        origin = self._reader.resolve_in_step(place)
        if self._reader.op(origin).name == "Enter":
            inputs = self._reader.inputs_at(origin)
            return (inputs[0], self._frame(origin)) if inputs else (origin, None)
        variable = self.loop_variable(origin)
        if variable is not None and self.is_invariant(variable):
            return variable.initial, variable.loop
        return origin, None

    def counted_loop(self, place: Place) -> str | None:
        """Return the loop whose steps a variable counts from 0; None if it counts none."""
        variable = self.loop_variable(place)
        if variable is None:
            return None
        inputs = self._reader.inputs_of(variable.next, "Add")
        if self._reader.constant_integers(variable.initial) != [0]:
            return None
        increments = [place for place in inputs if self._reader.resolve_in_step(place) != variable.place]
        by_one = len(inputs) == 2 and len(increments) == 1 and self._reader.constant_integers(increments[0]) == [1]
        return variable.loop if by_one else None

    def _frame(self, enter: Place) -> str:
        return f"frame {self._reader.attrs(enter).get('frame_name')}"
