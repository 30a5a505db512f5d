"""One step back from a sequence, or from a step of one, as far as all values are kept."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...graphs import Node
from ..graph.array_slices import strided_axes
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import op_of
from ..graph.while_loops import Loops

_WIDER = {("float16", "float32"), ("float16", "float64"), ("bfloat16", "float32"), ("bfloat16", "float64"),
          ("float32", "float64")}  # fmt: skip
_MOST_IN_ROW = 16  # conversions and loops, one behind the other
_LARGEST = 2**16  # entries of a constant that may be zeros

Turn = tuple[str, Place | None]
"""A reversal: of all steps, ("all", None), or of each row's own, ("rows", where their lengths come from)."""
ALL: Turn = ("all", None)


class Before(NamedTuple):
    """One step back."""

    place: Place
    axis: int | None
    """Where time is: 0, 1, or None for one step."""
    turn: Turn | None = None
    element: tuple[int, int | None] | None = None
    """The step that is read, and of how many; None if a loop reads all."""
    loop: bool | None = None
    """Whether it is in a loop, if that changes."""


class Steps:
    """The steps back in a graph."""

    def __init__(self, reader: Reader, loops: Loops) -> None:
        self._reader, self._loops = reader, loops

    def before(self, place: Place, axis: int | None) -> list[Before] | None:
        """One step back; None if the way ends here."""
        node = self._reader.node(place)
        if node is None:
            return self._passed(place, axis)
        op, inputs = op_of(node), self._reader.inputs(place.body, node)
        if (unchanged := self._reader.unchanged(place, "step")) is not None:
            return [Before(unchanged, axis)]
        if op.name == "IdentityN":
            return [Before(inputs[place.output], axis)] if place.output < len(inputs) else None
        called = self._reader.calls(node)
        if len(called) == 1:
            return [Before(self._reader.returned(called[0], place.output), axis)]
        if op.name == "ConcatV2" and len(inputs) > 2:
            if self._reader.number(inputs[-1]) in (-1, 1 if axis is None else 2):
                return [Before(each, axis) for each in inputs[:-1]]
            return None
        if op.name == "Cast" and inputs:
            attrs = node.attrs
            return [Before(inputs[0], axis)] if (attrs.get("SrcT"), attrs.get("DstT")) in _WIDER else None
        if axis is not None:
            return self._of_sequence(place, node, inputs, axis)
        chosen = self._chosen(node, inputs)
        return [Before(chosen, axis)] if chosen is not None else self.read(place)

    def _passed(self, place: Place, axis: int | None) -> list[Before] | None:
        """What the one caller of a function passes, or what a loop leaves as it is."""
        carried = self._loops.carried(place)
        if carried is not None:
            return [Before(carried.first, axis)] if axis is not None and self._loops.stays(carried) else None
        callers = self._loops.callers(place.body)
        if not callers:
            raise Unknown(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        if len(callers) > 1 or callers[0].carried:
            return None
        outer = self._reader.argument(callers[0], place)
        return None if outer is None else [Before(outer, axis)]

    # ------------------------------------------------------------------------------------------------ from a step of it
    def read(self, place: Place) -> list[Before] | None:
        """A sequence of which a step is read: in a loop, the one that has the loop's number."""
        node, op, inputs = self._reader.node(place), self._reader.op(place), self._reader.given(place)
        if node is None:
            return None
        if op.name == "Unpack" and inputs:
            axis, count = node.attrs.get("axis", 0), node.attrs.get("num")
            if axis in (0, 1) and isinstance(count, int):
                return [Before(inputs[0], axis, element=(place.output, count))]
            return None
        if op.array == "read" and len(inputs) > max(op.at.values()):
            entered, loop = self._loops.entered(inputs[op.at["array"]])
            if loop is None or self._loops.counter(inputs[op.at["index"]]) != loop:
                return None
            return self._filled(entered)
        sliced = self._sliced(node, inputs)
        if sliced is None:
            return None
        axis, index = sliced
        loop = self._loops.counter(index)
        if loop is not None:
            entered, inside = self._loops.entered(inputs[0])
            return [Before(entered, axis, loop=False)] if inside == loop else None
        numbers = self._reader.numbers(index) or []
        k = axis if op.name == "StridedSlice" and len(numbers) > 1 else 0
        return [Before(inputs[0], axis, element=(numbers[k], None))] if k < len(numbers) and numbers[k] >= 0 else None

    def _filled(self, place: Place) -> list[Before] | None:
        """The array that was put into a list of arrays."""
        here = self._reader.past(place)
        op, inputs = self._reader.op(here), self._reader.given(here)
        if op.array != "fill" or len(inputs) <= op.at["value"]:
            return None
        in_order = "index" not in op.at or self._counted(inputs[op.at["index"]])
        return [Before(inputs[op.at["value"]], 0, loop=False)] if in_order else None

    def _sliced(self, node: Node, inputs: tuple[Place, ...]) -> tuple[int, Place] | None:
        """The axis and the index of ``x[t]``, ``x[:, t]`` or a gather of one step."""
        op = op_of(node).name
        if op == "Gather" and len(inputs) >= 2:
            axis = self._reader.number(inputs[2]) if len(inputs) > 2 else 0
            return (axis, inputs[1]) if axis in (0, 1) and not node.attrs.get("batch_dims") else None
        axes = strided_axes(self._reader, node, inputs) if op == "StridedSlice" else None
        if axes is None or not 1 <= len(axes) <= 2 or not axes[-1].dropped:
            return None
        if any(each.begins or each.ends for each in axes[:-1]):
            return None
        begin, axis = self._reader.past(inputs[1]), len(axes) - 1
        if self._reader.op(begin).name != "Pack":
            return axis, inputs[1]
        parts = self._reader.given(begin)
        return (axis, parts[axis]) if len(parts) == len(axes) else None

    def mask(self, condition: Place) -> Before | None:
        """The sequence of a mask, of which a condition is one step."""
        for _ in range(_MOST_IN_ROW):
            condition = self._reader.past(condition)
            if self._reader.op(condition).name not in ("Tile", "BroadcastTo") or not self._reader.given(condition):
                break
            condition = self._reader.given(condition)[0]
        read = self.read(condition)
        return None if read is None else read[0]

    def _chosen(self, node: Node, inputs: tuple[Place, ...]) -> Place | None:
        """What a selection gives where steps count, within each row's length or by a mask.

        Elsewhere it is zero, or what the selection gave in the step before.
        """
        if op_of(node).name != "Select" or len(inputs) != 3:
            return None
        if self.mask(inputs[0]) is not None:
            return inputs[1] if self._is_zero(inputs[2]) or self._is_masked(inputs[2]) else None
        condition = self._reader.past(inputs[0])
        op, compared = self._reader.op(condition).name, self._reader.given(condition)
        if op not in ("GreaterEqual", "Less") or len(compared) != 2 or self._loops.counter(compared[0]) is None:
            return None
        past, within = inputs[1:] if op == "GreaterEqual" else inputs[:0:-1]
        return within if self._is_zero(past) else None

    def _is_masked(self, place: Place) -> bool:
        """Whether a selection by a mask gives this, in the step before."""
        carried = self._loops.carried(place)
        before = self._reader.past(place if carried is None else carried.next)
        inputs = self._reader.given(before)
        return self._reader.op(before).name == "Select" and len(inputs) == 3 and self.mask(inputs[0]) is not None

    def _is_zero(self, place: Place) -> bool:
        for _ in range(_MOST_IN_ROW):
            before, (place, _) = place, self._loops.entered(place)
            if place == before:
                break
        node, op = self._reader.node(place), self._reader.op(place).name
        if node is None:
            return False
        if op == "ZerosLike":
            return True
        if op == "Fill":
            return self._reader.value(self._reader.given(place)[1]) == 0
        stored = self._reader.graph.constant(node)
        return stored is not None and math.prod(stored.shape) <= _LARGEST and not stored.read().any()

    # --------------------------------------------------------------------------------------------------- from all steps
    def _of_sequence(self, place: Place, node: Node, inputs: tuple[Place, ...], axis: int) -> list[Before] | None:
        op = op_of(node)
        if op.array == "stack" and len(inputs) > op.at["array"]:
            written = self._written(place) if axis == 0 else None
            return None if written is None else [Before(written, None, loop=True)]
        if op.name == "Transpose" and len(inputs) == 2:
            order = self._permutation(inputs[1])
            return None if order is None else [Before(inputs[0], order[axis])]
        if op.name == "ReverseSequence" and len(inputs) == 2:
            attrs = node.attrs
            if (attrs.get("seq_dim"), attrs.get("batch_dim", 0)) != (axis, 1 - axis):
                return None
            return [Before(inputs[0], axis, ("rows", self._lengths(inputs[1])))]
        if op.name == "ReverseV2" and len(inputs) == 2:
            axes = self._reader.numbers(inputs[1])
            return [Before(inputs[0], axis, ALL)] if axes in ([axis], [axis - 3]) else None
        if op.name == "Enter" and inputs:
            return [Before(inputs[0], axis)]
        carried = self._loops.carried(place)
        return [Before(carried.first, axis)] if carried is not None and self._loops.stays(carried) else None

    def _written(self, place: Place) -> Place | None:
        """What a loop writes in each step into the array that it leaves behind."""
        op, inputs = self._reader.op(place), self._reader.given(place)
        if "index" in op.at and not self._counted(inputs[op.at["index"]]):
            return None
        carried = self._loops.behind(inputs[op.at["array"]])
        if carried is None:
            return None
        write = self._reader.past(carried.next)
        op, inputs = self._reader.op(write), self._reader.given(write)
        if op.array != "write" or len(inputs) <= max(op.at.values()):
            return None
        if self._reader.past(inputs[op.at["array"]]) != carried.place:
            return None
        return inputs[op.at["value"]] if self._loops.counter(inputs[op.at["index"]]) == carried.loop else None

    def _lengths(self, place: Place) -> Place:
        """Where lengths come from, whatever integers they are."""
        for _ in range(_MOST_IN_ROW):
            place = self._reader.past(place)
            if self._reader.op(place).name != "Cast":
                break
            place, *_ = self._reader.given(place) or [place]
        return place

    def _permutation(self, place: Place) -> tuple[int, ...] | None:
        """The first two of three axes, swapped or not, with the last one in its place."""
        here = self._reader.past(place)
        numbers = self._reader.numbers(here)
        if numbers is None and self._reader.op(here).name == "ConcatV2":
            inputs = self._reader.given(here)
            numbers = self._reader.numbers(inputs[0]) if len(inputs) == 3 else None
            if numbers is None or len(numbers) != 2 or not self._counted(inputs[1], 2):
                return None
            numbers = [*numbers, 2]
        return tuple(numbers[:2]) if numbers in ([0, 1, 2], [1, 0, 2]) else None

    def _counted(self, place: Place, start: int = 0) -> bool:
        """Whether it is start, start + 1 and so on."""
        here = self._reader.past(place)
        if self._reader.op(here).name == "Range":
            inputs = self._reader.given(here)
            return len(inputs) == 3 and [self._reader.numbers(inputs[k]) for k in (0, 2)] == [[start], [1]]
        numbers = self._reader.numbers(here)
        return numbers is not None and numbers == list(range(start, start + len(numbers)))
