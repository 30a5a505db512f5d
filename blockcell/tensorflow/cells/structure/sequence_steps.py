"""One node back from a sequence, or from a step of one, as far as all values are kept.

In comes a place with its axis of time; out go the places that its values come from, the axis of time there, and the
reversal, the element or the loop on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ...graphs import Node
from ..graph.array_slices import read_strided_index
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import graph_op
from ..graph.while_loops import WhileLoops

_WIDER = {("float16", "float32"), ("float16", "float64"), ("bfloat16", "float32"), ("bfloat16", "float64"),
          ("float32", "float64")}  # fmt: skip
_MOST_IN_ROW = 16  # conversions and loops, one behind the other

Reversal = tuple[str, Place | None]
"""Of all steps, ("all", None), or of each row up to its length, ("rows", the place that lengths come from)."""
ALL_STEPS: Reversal = ("all", None)


class StepBack(NamedTuple):
    """A place that values come from, and what is between it and them."""

    place: Place
    axis: int | None
    """The axis of time: 0, 1, or None for one step."""
    reversal: Reversal | None = None
    element: tuple[int, int | None] | None = None
    """The number of the step that is read, and of how many; None if a loop reads all."""
    loop: bool | None = None
    """Whether the place is in a loop, if that changes."""


class SequenceSteps:
    """Goes backwards from sequences and their steps in a graph."""

    def __init__(self, reader: GraphReader, loops: WhileLoops) -> None:
        self._reader, self._loops = reader, loops

    def step_back(self, place: Place, axis: int | None) -> list[StepBack] | None:
        """Go one node back; None where other nodes than those that keep all values make the values."""
        node = self._reader.node(place)
        if node is None:
            return self._step_to_caller(place, axis)
        op, inputs = graph_op(node), self._reader.inputs_at(place)
        if op.forwards != "flow" and op.name not in ("Merge", "While", "Cast"):
            forwarded = self._reader.predecessors(place)
            if forwarded is not None:
                return [StepBack(forwarded[0], axis)] if len(forwarded) == 1 else None
        if op.name == "ConcatV2" and len(inputs) > 2:
            if self._reader.constant_integer(inputs[-1]) in (-1, 1 if axis is None else 2):
                return [StepBack(place, axis) for place in inputs[:-1]]
            return None
        if op.name == "Cast" and inputs:
            attrs = node.attrs
            return [StepBack(inputs[0], axis)] if (attrs.get("SrcT"), attrs.get("DstT")) in _WIDER else None
        if axis is not None:
            return self._step_in_sequence(place, node, inputs, axis)
        chosen = self._selected_step(node, inputs)
        return [StepBack(chosen, axis)] if chosen is not None else self.read_step(place)

    def _step_to_caller(self, place: Place, axis: int | None) -> list[StepBack] | None:
        """Go from an argument to what the one caller passes, or to what a loop leaves as it is."""
        variable = self._loops.loop_variable(place)
        if variable is not None:
            is_kept = axis is not None and self._loops.is_invariant(variable)
            return [StepBack(variable.initial, axis)] if is_kept else None
        callers = self._loops.callers(place.body)
        if not callers:
            raise UnknownValue(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        if len(callers) > 1 or callers[0].loop_body:
            return None
        return [StepBack(self._reader.passed_argument(callers[0], place), axis)]

    # ------------------------------------------------------------------------------------------------ from a step of it
    def read_step(self, place: Place) -> list[StepBack] | None:
        """Return the sequence of which a step is read; in a loop, the step must have the number of the loop's step."""
        op, inputs = self._reader.op(place), self._reader.inputs_at(place)
        if op.name == "Unpack" and inputs:
            axis, count = self._reader.attrs(place).get("axis", 0), self._reader.attrs(place).get("num")
            if axis in (0, 1) and isinstance(count, int):
                return [StepBack(inputs[0], axis, element=(place.output, count))]
            return None
        if op.tensor_list == "read" and len(inputs) > max(op.slots.values()):
            entered, loop = self._loops.outside_value(inputs[op.slots["array"]])
            if loop is None or self._loops.counted_loop(inputs[op.slots["index"]]) != loop:
                return None
            return self._filled_array(entered)
        sliced = self._sliced_step(place)
        if sliced is None:
            return None
        axis, index = sliced
        loop = self._loops.counted_loop(index)
        if loop is not None:
            entered, inner_loop = self._loops.outside_value(inputs[0])
            return [StepBack(entered, axis, loop=False)] if inner_loop == loop else None
        numbers = self._reader.constant_integers(index) or []
        k = axis if op.name == "StridedSlice" and len(numbers) > 1 else 0
        return [StepBack(inputs[0], axis, element=(numbers[k], None))] if k < len(numbers) and numbers[k] >= 0 else None

    def _filled_array(self, place: Place) -> list[StepBack] | None:
        """Return the array whose rows fill a TensorArray or a TensorList."""
        origin = self._reader.resolve_in_step(place)
        op, inputs = self._reader.op(origin), self._reader.inputs_at(origin)
        if op.tensor_list != "fill" or len(inputs) <= op.slots["value"]:
            return None
        in_order = "index" not in op.slots or self._is_range(inputs[op.slots["index"]])
        return [StepBack(inputs[op.slots["value"]], 0, loop=False)] if in_order else None

    def _sliced_step(self, place: Place) -> tuple[int, Place] | None:
        """Return the axis and the index of ``x[t]``, ``x[:, t]`` or a gather of one step."""
        op, inputs = self._reader.op(place).name, self._reader.inputs_at(place)
        if op == "Gather" and len(inputs) >= 2:
            axis = self._reader.constant_integer(inputs[2]) if len(inputs) > 2 else 0
            return (axis, inputs[1]) if axis in (0, 1) and not self._reader.attrs(place).get("batch_dims") else None
        axes: list[int | slice] = []
        with suppress(UnknownValue):
            axes = read_strided_index(self._reader, place, anywhere=True) if op == "StridedSlice" else []
        if not 1 <= len(axes) <= 2 or not isinstance(axes[-1], int) or any(part != slice(None) for part in axes[:-1]):
            return None
        axis, parts = len(axes) - 1, self._reader.inputs_of(inputs[1], "Pack")
        if not parts:
            return axis, inputs[1]
        return (axis, parts[axis]) if len(parts) == len(axes) else None

    def read_mask(self, condition: Place) -> StepBack | None:
        """Return the sequence of a mask, of which a condition is one step."""
        for _ in range(_MOST_IN_ROW):
            condition, *_ = self._reader.inputs_of(condition, "Tile", "BroadcastTo") or [condition]
        steps_back = self.read_step(self._reader.resolve_in_step(condition))
        return None if steps_back is None else steps_back[0]

    def _selected_step(self, node: Node, inputs: tuple[Place, ...]) -> Place | None:
        """Return what a Select gives in the steps of a row that count, by its length or a mask.

        In finished rows it gives zero, or what it gave in the step before.
        """
        if graph_op(node).name != "Select" or len(inputs) != 3:
            return None
        if self.read_mask(inputs[0]) is not None:
            return inputs[1] if self._is_zero(inputs[2]) or self._is_masked(inputs[2]) else None
        condition = self._reader.resolve_in_step(inputs[0])
        op, compared = self._reader.op(condition).name, self._reader.inputs_at(condition)
        if op not in ("GreaterEqual", "Less") or len(compared) != 2 or self._loops.counted_loop(compared[0]) is None:
            return None
        beyond, within = inputs[1:] if op == "GreaterEqual" else inputs[:0:-1]
        return within if self._is_zero(beyond) else None

    def _is_masked(self, place: Place) -> bool:
        """Return whether a Select by a mask gave this value in the step before."""
        variable = self._loops.loop_variable(place)
        inputs = self._reader.inputs_of(place if variable is None else variable.next, "Select")
        return len(inputs) == 3 and self.read_mask(inputs[0]) is not None

    def _is_zero(self, place: Place) -> bool:
        """Return whether a value is zeros, also outside of the loops that leave it as it is."""
        for _ in range(_MOST_IN_ROW):
            inner, (place, _) = place, self._loops.outside_value(place)
            if place == inner:
                break
        return self._reader.fill_value(place) == 0

    # --------------------------------------------------------------------------------------------------- from all steps
    def _step_in_sequence(self, place: Place, node: Node, inputs: Sequence[Place], axis: int) -> list[StepBack] | None:
        """Go one node back from a sequence, whose time is on an axis."""
        op = graph_op(node)
        if op.tensor_list == "stack" and len(inputs) > op.slots["array"]:
            written = self._written_value(place) if axis == 0 else None
            return None if written is None else [StepBack(written, None, loop=True)]
        if op.name == "Transpose" and len(inputs) == 2:
            order = self._permutation(inputs[1])
            return None if order is None else [StepBack(inputs[0], order[axis])]
        if op.name == "ReverseSequence" and len(inputs) == 2:
            attrs = node.attrs
            if (attrs.get("seq_dim"), attrs.get("batch_dim", 0)) != (axis, 1 - axis):
                return None
            return [StepBack(inputs[0], axis, ("rows", self._lengths(inputs[1])))]
        if op.name == "ReverseV2" and len(inputs) == 2:
            axes = self._reader.constant_integers(inputs[1])
            return [StepBack(inputs[0], axis, ALL_STEPS)] if axes in ([axis], [axis - 3]) else None
        if op.name == "Enter" and inputs:
            return [StepBack(inputs[0], axis)]
        variable = self._loops.loop_variable(place)
        if variable is None or not self._loops.is_invariant(variable):
            return None
        return [StepBack(variable.initial, axis)]

    def _written_value(self, place: Place) -> Place | None:
        """Return what a loop writes in each step into the TensorArray or TensorList that it leaves behind."""
        op, inputs = self._reader.op(place), self._reader.inputs_at(place)
        if "index" in op.slots and not self._is_range(inputs[op.slots["index"]]):
            return None
        variable = self._loops.exit_variable(inputs[op.slots["array"]])
        if variable is None:
            return None
        write = self._reader.resolve_in_step(variable.next)
        op, inputs = self._reader.op(write), self._reader.inputs_at(write)
        if op.tensor_list != "write" or len(inputs) <= max(op.slots.values()):
            return None
        if self._reader.resolve_in_step(inputs[op.slots["array"]]) != variable.place:
            return None
        loop = self._loops.counted_loop(inputs[op.slots["index"]])
        return inputs[op.slots["value"]] if loop == variable.loop else None

    def _lengths(self, place: Place) -> Place:
        """Return where lengths come from, before conversions between integers."""
        for _ in range(_MOST_IN_ROW):
            place, *_ = self._reader.inputs_of(place, "Cast") or [place]
        return self._reader.resolve_in_step(place)

    def _permutation(self, place: Place) -> tuple[int, ...] | None:
        """Return the first two of three axes, swapped or not, if the last one stays in its place."""
        numbers = self._reader.constant_integers(place)
        if numbers is None and len(inputs := self._reader.inputs_of(place, "ConcatV2")) == 3:
            numbers = self._reader.constant_integers(inputs[0])
            if numbers is None or len(numbers) != 2 or not self._is_range(inputs[1], 2):
                return None
            numbers = [*numbers, 2]
        return tuple(numbers[:2]) if numbers in ([0, 1, 2], [1, 0, 2]) else None

    def _is_range(self, place: Place, start: int = 0) -> bool:
        """Return whether a value is the integers start, start + 1 and so on."""
        if len(inputs := self._reader.inputs_of(place, "Range")) == 3:
            return [self._reader.constant_integers(inputs[k]) for k in (0, 2)] == [[start], [1]]
        numbers = self._reader.constant_integers(place)
        return numbers is not None and numbers == list(range(start, start + len(numbers)))
