"""What goes around loops: of TensorFlow 1, frames between Enter and Exit, and of TensorFlow 2, functions."""

from __future__ import annotations

from typing import NamedTuple

from ...graphs import Node
from .graph_reader import Caller, Place, Reader, Unknown


class Carried(NamedTuple):
    """What goes around a loop, as it is seen inside."""

    place: Place
    first: Place
    """Where its first value comes from, outside."""
    next: Place
    """The value for the next step."""
    loop: str


class Loops:
    """The loops of a graph."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._carried: dict[Place, Carried | None] = {}

    def callers(self, body: str) -> list[Caller]:
        """What calls a function, without what nothing runs."""
        running, callers = self._reader.running, self._reader.callers.get(body, [])
        return [each for each in callers if each.body in running] if body in running else callers

    def carried(self, place: Place) -> Carried | None:
        """What goes around a loop and is seen here, inside of it."""
        here = self._reader.past(place)
        if here not in self._carried:
            try:
                node = self._reader.node(here)
                self._carried[here] = self._of_argument(here) if node is None else self._of_merge(here, node)
            except Unknown:
                self._carried[here] = None
        return self._carried[here]

    def _of_argument(self, place: Place) -> Carried | None:
        callers = self.callers(place.body)
        if len(callers) != 1 or callers[0].carried != place.body:
            return None
        first = self._reader.argument(callers[0], place)
        if first is None:
            return None
        k = self._reader.positions[place.body][place.name]
        return Carried(place, first, self._reader.returned(place.body, k), f"function {place.body}")

    def _of_merge(self, place: Place, node: Node) -> Carried | None:
        if self._reader.op(place).name != "Merge":
            return None
        inputs = {self._reader.op(each).name: each for each in self._reader.inputs(place.body, node)}
        if inputs.keys() - {""} != {"Enter", "NextIteration"}:
            return None
        before, after = (self._reader.given(inputs[op]) for op in ("Enter", "NextIteration"))
        return Carried(place, before[0], after[0], self._frame(inputs["Enter"])) if before and after else None

    def stays(self, carried: Carried) -> bool:
        """Whether a loop leaves something as it is."""
        return self._reader.past(carried.next) == carried.place

    def behind(self, place: Place) -> Carried | None:
        """What went around a loop, seen from behind it."""
        here = self._reader.past(place)
        node, op = self._reader.node(here), self._reader.op(here).name
        if node is not None and op == "Exit":
            inputs = self._reader.given(here)
            return self.carried(inputs[0]) if inputs else None
        if node is None or op != "While":
            return None
        name = self._reader.calls(node)[-1]
        arguments = self._reader.graph.functions[name].inputs
        return self.carried(Place(name, arguments[here.output])) if here.output < len(arguments) else None

    def entered(self, place: Place) -> tuple[Place, str | None]:
        """What is outside of a loop, of what does not change in it, and the loop; else the place itself."""
        here = self._reader.past(place)
        if self._reader.op(here).name == "Enter":
            inputs = self._reader.given(here)
            return (inputs[0], self._frame(here)) if inputs else (here, None)
        carried = self.carried(here)
        if carried is not None and self.stays(carried):
            return carried.first, carried.loop
        return here, None

    def counter(self, place: Place) -> str | None:
        """The loop whose steps this numbers, from 0."""
        carried = self.carried(place)
        if carried is None:
            return None
        here = self._reader.past(carried.next)
        if self._reader.op(here).name != "Add" or self._reader.numbers(carried.first) != [0]:
            return None
        inputs = self._reader.given(here)
        counts = [k for k, each in enumerate(inputs) if self._reader.past(each) == carried.place]
        fits = len(inputs) == 2 and len(counts) == 1 and self._reader.numbers(inputs[1 - counts[0]]) == [1]
        return carried.loop if fits else None

    def _frame(self, enter: Place) -> str:
        node = self._reader.node(enter)
        return f"frame {node and node.attrs.get('frame_name')}"
