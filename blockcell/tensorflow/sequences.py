"""Which sequence a cell runs over, and in which direction: from its x back to other cells, or to what is none.

Only what keeps all values is passed on the way: loops that read a sequence step by step and write one, transpositions,
reversals, joins side by side. It is known all the way where time lies, so that only time is reversed. What is beside
that, such as a dropout, ends the way; the direction is followed past it, as each step is made of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .graphs import Node
from .trace import Place, Tracer, Unknown

_LONGEST = 2000  # nodes from a cell back to what it reads
_MOST_PARTS = 16  # sequences side by side
_DEEPEST = 32  # loops behind each other in which other nodes make the steps
_PACKED = -1  # the axis of a sequence that is a cell's steps, put together
_LARGEST = 2**16  # entries of a constant that may be zeros, or a permutation
_SAME = {
    "Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "RefIdentity", "Switch",
    "RefSwitch",
}  # fmt: skip
_WRITES = {"TensorArrayWriteV3": (3, 1, 2), "TensorArrayWriteV2": (3, 1, 2), "TensorListSetItem": (0, 1, 2)}
"""Which inputs are the array before, the index and the value."""
_READS = {"TensorArrayReadV3": (2, 1), "TensorArrayReadV2": (2, 1), "TensorListGetItem": (0, 1)}
"""Which inputs are the array and the index."""
_WHOLES = {"TensorArrayGatherV3": 2, "TensorArrayGatherV2": 2, "TensorListStack": 0}
_FILLS = {"TensorArrayScatterV3": (2, 1), "TensorArrayScatterV2": (2, 1), "TensorListFromTensor": (0, None)}
"""Which inputs are the values and the indices."""
_ENDS = {"Enter", "RefEnter", "Merge", "RefMerge", "NextIteration", "RefNextIteration", "Const", "Exit", "RefExit"}
_WIDER = {("float16", "float32"), ("float16", "float64"), ("bfloat16", "float32"), ("bfloat16", "float64"),
          ("float32", "float64")}  # fmt: skip

Turn = tuple[str, Place | None]
"""A reversal: of all steps, ("all", None), or of each row's own, ("rows", where their lengths come from)."""
ALL: Turn = ("all", None)


class At(NamedTuple):
    """A cell's node or nodes in a graph: one step of it, or all."""

    body: str
    x: Place
    state: Place | None
    """h before the step; None of an op that runs over all steps."""
    h: Place


@dataclass
class Use:
    """A cell as it runs once over a sequence."""

    steps: list[At]
    looped: bool = False
    masked: bool = False
    """Whether a row's state stays where its steps have ended."""
    parts: tuple[Part, ...] | None = None
    """What x is, side by side; None if that is not understood."""
    turns: tuple[Turn, ...] | None = None
    """How x is reversed against the natural order of time; None if that is not known."""


class Part(NamedTuple):
    """A sequence, or several side by side."""

    source: int | Place
    """The number of the use whose h it is; else the place where the way ends."""
    axis: int | None
    """Where time is at the source: 0, 1, or None for one step."""
    turns: tuple[Turn, ...]
    """Reversals on the way from the source."""
    element: tuple[int, int | None] | None = None
    """The step that is read, and of how many; None if a loop reads all."""
    order: tuple[Part, ...] | None = ()
    """Where a step ends the way: what it is made of, which has its order; None if that is not known."""


class Variable(NamedTuple):
    """What goes around a loop."""

    key: Place
    first: Place
    next: Place
    loop: str


@dataclass
class Sequences:
    """The sequences between the uses of cells in a graph."""

    tracer: Tracer
    uses: list[Use]
    _results: dict[Place, tuple[int, int]] = field(default_factory=dict)
    _variables: dict[Place, Variable | None] = field(default_factory=dict)
    _orders: dict[Place, tuple[Part, ...] | None] = field(default_factory=dict)
    _packs: dict[Place, list[_Before] | None] = field(default_factory=dict)
    _reached: set[str] = field(default_factory=set)
    _depth: int = 0

    def __post_init__(self) -> None:
        for k, use in enumerate(self.uses):
            for step, each in enumerate(use.steps):
                self._results[each.h] = k, step
        self._reached = self._called()
        if any(use.steps[0].body in self._reached for use in self.uses):
            known = [use for use in self.uses if use.steps[0].body in self._reached]
        else:
            known = self.uses
        for use in known:
            self._run(use)
        for use in known:
            try:
                use.parts = self._combined([self._parts(step.x, use) for step in use.steps])
            except Unknown:
                use.parts = None
        self._turn()

    def _called(self) -> set[str]:
        """The graph, and the functions that run with it: Keras stores those of each layer once more, by themselves."""
        called: dict[str, list[str]] = {}
        for name, callers in self.tracer.callers.items():
            for body, *_ in callers:
                called.setdefault(body, []).append(name)
        found, left = {""}, [""]
        while left:
            new = [name for name in called.get(left.pop(), ()) if name not in found]
            found.update(new)
            left += dict.fromkeys(new)
        return found

    def _callers(self, body: str) -> list[tuple[str, Node, int, str]]:
        """What calls a function, without what nothing runs."""
        callers = self.tracer.callers.get(body, [])
        return [each for each in callers if each[0] in self._reached] if body in self._reached else callers

    def _run(self, use: Use) -> None:
        """Whether it runs in a loop, and up to lengths."""
        state = use.steps[0].state
        if state is None or len(use.steps) > 1:
            return
        try:
            variable = self._variable(state)
            if variable is not None:
                node = self.tracer.node(self._plain(variable.next))
                use.looped, use.masked = True, node is not None and node.op in ("Select", "SelectV2")
        except Unknown:
            pass

    def joined(self) -> set[tuple[int, int]]:
        """The uses whose h are put side by side by any node, if some of them are reversed."""
        found: set[tuple[int, int]] = set()
        for body, node in self.tracer.all_nodes() if any(use.turns for use in self.uses) else ():
            if node.op != "ConcatV2":
                continue
            try:
                for axis in (0, 1):
                    parts = self._trace(Place(body, node.name), axis, False)
                    if len(parts) == 2 and isinstance(parts[0].source, int) and isinstance(parts[1].source, int):
                        found.add((parts[0].source, parts[1].source))
            except Unknown:
                continue
        return found

    # ------------------------------------------------------------------------------------------------------- the parts
    def _parts(self, x: Place, use: Use) -> tuple[Part, ...]:
        step = use.steps[0]
        return self._trace(x, None if step.state is not None else 0, use.looped)

    def _trace(self, place: Place, axis: int | None, looped: bool) -> tuple[Part, ...]:
        """What is side by side in a sequence or in a step of one, from left to right."""
        found: list[Part] = []
        left: list[tuple[Place, int | None, bool, tuple[Turn, ...], tuple[int, int | None] | None]]
        left = [(place, axis, looped, (), None)]
        for _ in range(_LONGEST):
            if not left:
                return tuple(found)
            self.tracer.count()
            here, axis, looped, turns, element = left.pop()
            known = self._result(here, axis)
            if known is not None:
                use, step = known
                count = len(self.uses[use].steps)
                single = axis is None and count > 1
                found.append(Part(use, axis, turns, (step, count) if single else element))
                continue
            before = self._before(here, axis)
            if before is None:
                order = self._order(here) if axis is None and looped else ()
                found.append(Part(here, axis, turns, element, order))
                continue
            for each in reversed(before):
                more = turns if each.turn is None else (each.turn, *turns)
                inside = each.loop if each.loop is not None else looped
                left.append((each.place, each.axis, inside, more, each.element or element))
            if len(left) + len(found) > _MOST_PARTS:
                break
        raise Unknown(f"{place.name!r}, which is made of too much")

    def _result(self, place: Place, axis: int | None) -> tuple[int, int] | None:
        """The use and step whose h this is, if it lies in time like this."""
        known = self._results.get(place)
        if known is None:
            return None
        whole = self.uses[known[0]].steps[known[1]].state is None
        return known if axis in ((0,) if whole else (None, _PACKED)) else None

    def _before(self, place: Place, axis: int | None) -> list[_Before] | None:
        """One step back; None if the way ends here."""
        node = self.tracer.node(place)
        if node is None:
            return self._given(place, axis)
        if node.op in _SAME:
            inputs = self.tracer.inputs(place.body, node)
            return [_Before(inputs[0], axis)] if inputs else None
        if node.op == "IdentityN":
            inputs = self.tracer.inputs(place.body, node)
            return [_Before(inputs[place.output], axis)] if place.output < len(inputs) else None
        called = self.tracer.calls(node)
        if called and "While" not in node.op and len(called) == 1:
            return [_Before(self.tracer.returned(called[0][0], place.output), axis)]
        inputs = self.tracer.inputs(place.body, node)
        if node.op == "ConcatV2" and len(inputs) > 2:
            if self.tracer.number(inputs[-1]) in (-1, 1 if axis is None else 2):
                return [_Before(each, axis) for each in inputs[:-1]]
            return None
        if node.op == "Cast" and inputs:
            attrs = node.attrs
            return [_Before(inputs[0], axis)] if (attrs.get("SrcT"), attrs.get("DstT")) in _WIDER else None
        if axis is None:
            chosen = self._chosen(node, inputs)
            return [_Before(chosen, axis)] if chosen is not None else self._read(place, node, inputs)
        return self._whole(place, node, inputs, axis)

    def _given(self, place: Place, axis: int | None) -> list[_Before] | None:
        """What the one caller of a function passes, or what a loop leaves as it is."""
        variable = self._variable(place)
        if variable is not None:
            same = axis is not None and self._plain(variable.next) == variable.key
            return [_Before(variable.first, axis)] if same else None
        callers = self._callers(place.body)
        if not callers:
            raise Unknown(f"the argument {place.name!r} of the function {place.body!r}, which nothing calls")
        if len(callers) > 1 or callers[0][3]:
            return None
        body, node, first, _ = callers[0]
        k = first + self.tracer.positions[place.body][place.name]
        return [_Before(outer, axis) for outer in self.tracer.inputs(body, node)[k : k + 1]] or None

    # ------------------------------------------------------------------------------------------------------- one step
    def _read(self, place: Place, node: Node, inputs: tuple[Place, ...]) -> list[_Before] | None:
        """A sequence of which a step is read: in a loop, the one that has the loop's number."""
        if node.op == "Unpack" and inputs:
            axis, count = node.attrs.get("axis", 0), node.attrs.get("num")
            if axis in (0, 1) and isinstance(count, int):
                return [_Before(inputs[0], axis, element=(place.output, count))]
            return None
        if node.op in _READS and len(inputs) >= 2:
            array, index = _READS[node.op]
            if len(inputs) <= array:
                return None
            entered, loop = self._entered(inputs[array])
            if loop is None or self._counter(inputs[index]) != loop:
                return None
            return self._filled(entered)
        axis, index_place = self._sliced(node, inputs)
        if index_place is None:
            return None
        loop = self._counter(index_place)
        if loop is not None:
            entered, inside = self._entered(inputs[0])
            return [_Before(entered, axis, loop=False)] if inside == loop else None
        try:
            k = self._constant(index_place, axis if node.op == "StridedSlice" else 0)
        except Unknown:
            return None
        return None if k < 0 else [_Before(inputs[0], axis, element=(k, None))]

    def _filled(self, place: Place) -> list[_Before] | None:
        """The array that was put into a list of arrays."""
        here = self._plain(place)
        node = self.tracer.node(here)
        if node is None or node.op not in _FILLS:
            return None
        inputs = self.tracer.inputs(here.body, node)
        values, indices = _FILLS[node.op]
        if len(inputs) <= values or (indices is not None and not self._counted(inputs[indices])):
            return None
        return [_Before(inputs[values], 0, loop=False)]

    def _sliced(self, node: Node, inputs: tuple[Place, ...]) -> tuple[int, Place | None]:
        """The axis and the index of ``x[t]``, ``x[:, t]`` or a gather of one step."""
        nothing = -1, None
        if node.op in ("GatherV2", "Gather") and len(inputs) >= 2:
            axis = self.tracer.number(inputs[2]) if len(inputs) > 2 else 0
            return (axis, inputs[1]) if axis in (0, 1) and not node.attrs.get("batch_dims") else nothing
        if node.op != "StridedSlice" or len(inputs) != 4:
            return nothing
        attrs = node.attrs
        masks = [attrs.get(f"{each}_mask", 0) for each in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")]
        forms = {(0, 0, 0, 0, 1): 0, (1, 1, 0, 0, 2): 1}
        axis = forms.get(tuple(masks), -1)
        stride = self._numbers(inputs[3])
        if axis < 0 or stride is None or stride != [1] * (axis + 1):
            return nothing
        here = self._plain(inputs[1])
        begin = self.tracer.node(here)
        if begin is None or begin.op != "Pack":
            return axis, inputs[1]
        parts = self.tracer.inputs(here.body, begin)
        return (axis, parts[axis]) if len(parts) == axis + 1 else nothing

    def _constant(self, place: Place, k: int) -> int:
        """A number, or one of a few."""
        numbers = self._numbers(place)
        if numbers is None or not numbers or (len(numbers) > 1 and len(numbers) <= k):
            raise Unknown(f"{place.name!r}, which is not one number")
        return numbers[k] if len(numbers) > 1 else numbers[0]

    def _chosen(self, node: Node, inputs: tuple[Place, ...]) -> Place | None:
        """What a selection gives within each row's length; beyond it is zero."""
        if node.op not in ("Select", "SelectV2") or len(inputs) != 3:
            return None
        here = self._plain(inputs[0])
        condition = self.tracer.node(here)
        if condition is None or condition.op not in ("GreaterEqual", "Less"):
            return None
        compared = self.tracer.inputs(here.body, condition)
        if len(compared) != 2 or self._counter(compared[0]) is None:
            return None
        past, within = inputs[1:] if condition.op == "GreaterEqual" else inputs[:0:-1]
        return within if self._is_zero(past) else None

    def _is_zero(self, place: Place) -> bool:
        for _ in range(_MOST_PARTS):
            place, _ = self._entered(place)
            here = self._plain(place)
            if here == place:
                break
            place = here
        node = self.tracer.node(place)
        if node is None:
            return False
        if node.op == "ZerosLike":
            return True
        if node.op == "Fill":
            return self.tracer.value(self.tracer.inputs(place.body, node)[1]) == 0
        stored = self.tracer.graph.constant(node)
        return stored is not None and math.prod(stored.shape) <= _LARGEST and not stored.read().any()

    # ---------------------------------------------------------------------------------------------------- all the steps
    def _whole(self, place: Place, node: Node, inputs: tuple[Place, ...], axis: int) -> list[_Before] | None:
        if node.op in _WHOLES and len(inputs) > _WHOLES[node.op]:
            written = self._written(node, inputs) if axis == 0 else None
            return None if written is None else [_Before(written, None, loop=True)]
        if node.op == "Pack" and node.attrs.get("axis", 0) == axis:
            if place not in self._packs:
                self._packs[place] = self._packed(inputs)
            return self._packs[place]
        if node.op == "Transpose" and len(inputs) == 2:
            order = self._permutation(inputs[1])
            return None if order is None else [_Before(inputs[0], order[axis])]
        if node.op == "ReverseSequence" and len(inputs) == 2:
            attrs = node.attrs
            if (attrs.get("seq_dim"), attrs.get("batch_dim", 0)) != (axis, 1 - axis):
                return None
            return [_Before(inputs[0], axis, ("rows", self._lengths(inputs[1])))]
        if node.op == "ReverseV2" and len(inputs) == 2:
            numbers = self._numbers(inputs[1])
            return [_Before(inputs[0], axis, ALL)] if numbers in ([axis], [axis - 3]) else None
        if node.op in ("Enter", "RefEnter") and inputs:
            return [_Before(inputs[0], axis)]
        variable = self._variable(place)
        if variable is not None and self._plain(variable.next) == variable.key:
            return [_Before(variable.first, axis)]
        return None

    def _written(self, node: Node, inputs: tuple[Place, ...]) -> Place | None:
        """What a loop writes in each step into the array that it leaves behind."""
        index = 1
        if node.op != "TensorListStack" and not self._counted(inputs[index]):
            return None
        variable = self._left(inputs[_WHOLES[node.op]])
        if variable is None:
            return None
        here = self._plain(variable.next)
        write = self.tracer.node(here)
        if write is None or write.op not in _WRITES:
            return None
        given = self.tracer.inputs(here.body, write)
        array, index, value = _WRITES[write.op]
        if len(given) <= max(array, value) or self._plain(given[array]) != variable.key:
            return None
        return given[value] if self._counter(given[index]) == variable.loop else None

    def _packed(self, inputs: tuple[Place, ...]) -> list[_Before] | None:
        """The steps of cells, one after the other."""
        rows: list[list[tuple[int, int]]] = []
        for place in inputs:
            self.tracer.count()
            here = self._plain(place)
            node = self.tracer.node(here)
            parts: Iterable[Place] = [here]
            if node is not None and node.op == "ConcatV2":
                *parts, last = self.tracer.inputs(here.body, node)
                if self.tracer.number(last) not in (1, -1) or len(parts) > _MOST_PARTS:
                    return None
            known = [self._result(self._plain(part), None) for part in parts]
            rows.append([each for each in known if each is not None])
            if None in known or len(rows[-1]) != len(rows[0]):
                return None
        found = []
        for column in zip(*rows, strict=True):
            use, count = column[0][0], len(inputs)
            numbers = [step for each, step in column if each == use]
            turn = {tuple(range(count)): None, tuple(range(count))[::-1]: ALL}.get(tuple(numbers), "")
            if turn == "" or len(self.uses[use].steps) != count or count == 1:
                return None
            found.append(_Before(self.uses[use].steps[0].h, _PACKED, turn))  # type: ignore[arg-type]
        return found

    def _lengths(self, place: Place) -> Place:
        """Where lengths come from, whatever integers they are."""
        for _ in range(_MOST_PARTS):
            place = self._plain(place)
            node = self.tracer.node(place)
            if node is None or node.op != "Cast":
                break
            place, *_ = self.tracer.inputs(place.body, node) or [place]
        return place

    def _permutation(self, place: Place) -> tuple[int, ...] | None:
        """The first two of three axes, swapped or not, with the last one in its place."""
        here = self._plain(place)
        node = self.tracer.node(here)
        numbers = self._numbers(here)
        if numbers is None and node is not None and node.op == "ConcatV2":
            inputs = self.tracer.inputs(here.body, node)
            numbers = self._numbers(inputs[0]) if len(inputs) == 3 else None
            if numbers is None or len(numbers) != 2 or not self._counted(inputs[1], 2):
                return None
            numbers = [*numbers, 2]
        return tuple(numbers[:2]) if numbers in ([0, 1, 2], [1, 0, 2]) else None

    # ------------------------------------------------------------------------------------------------ numbers and loops
    def _numbers(self, place: Place) -> list[int] | None:
        """A constant of a few whole numbers."""
        here = self._plain(place)
        node = self.tracer.node(here)
        stored = None if node is None else self.tracer.graph.constant(node)
        if stored is None or stored.dtype not in ("int32", "int64") or math.prod(stored.shape) > _LARGEST:
            return None
        return [int(each) for each in stored.read().ravel()]

    def _counted(self, place: Place, start: int = 0) -> bool:
        """Whether it is start, start + 1 and so on."""
        here = self._plain(place)
        node = self.tracer.node(here)
        if node is None:
            return False
        if node.op == "Range":
            inputs = self.tracer.inputs(here.body, node)
            return len(inputs) == 3 and [self._numbers(inputs[k]) for k in (0, 2)] == [[start], [1]]
        numbers = self._numbers(here)
        return numbers is not None and numbers == list(range(start, start + len(numbers)))

    def _plain(self, place: Place) -> Place:
        """Past nodes that give what they are given."""
        for _ in range(_LONGEST):
            self.tracer.count()
            node = self.tracer.node(place)
            if node is None or node.op not in _SAME:
                return place
            inputs = self.tracer.inputs(place.body, node)
            if not inputs:
                return place
            place = inputs[0]
        raise Unknown(f"{place.name!r}, which comes from nothing but itself")

    def _variable(self, place: Place) -> Variable | None:
        """What goes around a loop and is seen here, inside of it."""
        key = self._plain(place)
        if key not in self._variables:
            try:
                self._variables[key] = self._found_variable(key)
            except Unknown:
                self._variables[key] = None
        return self._variables[key]

    def _found_variable(self, key: Place) -> Variable | None:
        node = self.tracer.node(key)
        if node is None:
            callers = self._callers(key.body)
            if len(callers) != 1 or callers[0][3] != key.body:
                return None
            body, loop, first, _ = callers[0]
            k = self.tracer.positions[key.body][key.name]
            inputs = self.tracer.inputs(body, loop)
            if k + first >= len(inputs):
                return None
            return Variable(key, inputs[k + first], self.tracer.returned(key.body, k), f"function {key.body}")
        if node.op not in ("Merge", "RefMerge"):
            return None
        ends: dict[str, tuple[Place, Node]] = {}
        for each in self.tracer.inputs(key.body, node):
            end = self.tracer.node(each)
            if end is not None:
                ends[end.op.removeprefix("Ref")] = each, end
        if ends.keys() != {"Enter", "NextIteration"}:
            return None
        before, after = (self.tracer.inputs(key.body, ends[op][1]) for op in ("Enter", "NextIteration"))
        frame = f"frame {ends['Enter'][1].attrs.get('frame_name')}"
        return Variable(key, before[0], after[0], frame) if before and after else None

    def _left(self, place: Place) -> Variable | None:
        """What went around a loop, seen from behind it."""
        here = self._plain(place)
        node = self.tracer.node(here)
        if node is None:
            return None
        if node.op in ("Exit", "RefExit"):
            inputs = self.tracer.inputs(here.body, node)
            return self._variable(inputs[0]) if inputs else None
        if node.op not in ("While", "StatelessWhile"):
            return None
        name = self.tracer.calls(node)[-1][0]
        arguments = self.tracer.graph.functions[name].inputs
        return self._variable(Place(name, arguments[here.output])) if here.output < len(arguments) else None

    def _entered(self, place: Place) -> tuple[Place, str | None]:
        """What is outside of a loop, of what does not change in it, and the loop; else the place itself."""
        here = self._plain(place)
        node = self.tracer.node(here)
        if node is not None and node.op in ("Enter", "RefEnter"):
            inputs = self.tracer.inputs(here.body, node)
            return (inputs[0], f"frame {node.attrs.get('frame_name')}") if inputs else (here, None)
        variable = self._variable(here)
        if variable is not None and self._plain(variable.next) == variable.key:
            return variable.first, variable.loop
        return here, None

    def _counter(self, place: Place) -> str | None:
        """The loop whose steps this numbers, from 0."""
        variable = self._variable(place)
        if variable is None:
            return None
        here = self._plain(variable.next)
        node = self.tracer.node(here)
        if node is None or node.op not in ("Add", "AddV2") or self._numbers(variable.first) != [0]:
            return None
        inputs = self.tracer.inputs(here.body, node)
        counts = [k for k, each in enumerate(inputs) if self._plain(each) == variable.key]
        fits = len(inputs) == 2 and len(counts) == 1 and self._numbers(inputs[1 - counts[0]]) == [1]
        return variable.loop if fits else None

    # ----------------------------------------------------------------------------------------------------- directions
    def _order(self, place: Place) -> tuple[Part, ...] | None:
        """The sequences that a step is made of, by whatever nodes; None if it is not known which step of them."""
        if place not in self._orders:
            self._depth += 1
            self._orders[place] = self._found_order(place) if self._depth <= _DEEPEST else None
            self._depth -= 1
        return self._orders[place]

    def _found_order(self, place: Place) -> tuple[Part, ...] | None:
        found: dict[Part, None] = {}
        seen, left = {place}, [place]
        while left:
            self.tracer.count()
            here = left.pop()
            if len(seen) > _LONGEST or len(found) > _MOST_PARTS:
                return None
            known = self._result(here, None)
            if known is not None:
                found[Part(known[0], None, ())] = None
                continue
            node = self.tracer.node(here)
            if node is None or node.op in _ENDS:
                if self._counter(here) is not None:
                    return None
                continue
            inputs = self.tracer.inputs(here.body, node)
            read = self._read(here, node, inputs)
            if read is not None and read[0].element is None:
                for part in self._trace(read[0].place, read[0].axis, False):
                    if part.order is None:
                        return None
                    for each in part.order or (part,):
                        turns = (*each.turns, *part.turns) if part.order else part.turns
                        found[each._replace(turns=turns, order=())] = None
                continue
            if node.op in _READS:
                return None
            left += [each for each in inputs if each not in seen]
            seen.update(inputs)
        return tuple(found)

    def _combined(self, steps: list[tuple[Part, ...]]) -> tuple[Part, ...]:
        """One sequence of what the steps read one by one."""
        found = []
        count = len(steps)
        if any(len(each) != len(steps[0]) for each in steps):
            return (steps[0][0]._replace(order=None),)
        for column in zip(*steps, strict=True):
            first = column[0]
            if count == 1:
                found.append(first if first.element in (None, (0, 1)) else first._replace(order=None))
                continue
            same = all(each._replace(element=None) == first._replace(element=None) for each in column)
            numbers = [each.element[0] for each in column if each.element is not None]
            total = first.element[1] if first.element is not None else None
            if same and numbers == [*range(count)]:
                found.append(first._replace(element=None))
            elif same and numbers == [*range(count)][::-1] and total == count:
                found.append(first._replace(element=None, turns=(*first.turns, ALL)))
            else:
                found.append(first._replace(element=None, order=None))
        return tuple(found)

    def _turn(self) -> None:
        """The direction of each use, of those before it first; none of what goes around."""
        done: set[int] = set()
        for start in range(len(self.uses)):
            left = [start]
            open_: set[int] = set()
            while left:
                self.tracer.count()
                k = left[-1]
                needed = [each for each in self._needed(k) if each not in done]
                if k in open_ or not needed:
                    left.pop()
                    if k not in done:
                        done.add(k)
                        self.uses[k].turns = self._turns_of(self.uses[k])
                    continue
                open_.add(k)
                left += [each for each in needed if each not in open_]

    def _needed(self, k: int) -> list[int]:
        parts = self.uses[k].parts or ()
        every = [*parts, *(each for part in parts for each in part.order or ())]
        return [part.source for part in every if isinstance(part.source, int)]

    def _turns_of(self, use: Use) -> tuple[Turn, ...] | None:
        if use.parts is None:
            return None
        every = [self._turns(part) for part in use.parts]
        turns = every[0] if every else None
        if any(each != turns for each in every) or (turns is not None and len(turns) > 1):
            return None
        return None if use.masked and turns == (ALL,) else turns

    def _turns(self, part: Part) -> tuple[Turn, ...] | None:
        """Those since the sequence was in its natural order."""
        before: tuple[Turn, ...] | None = ()
        if isinstance(part.source, int):
            before = self.uses[part.source].turns
        elif part.order is None:
            return None
        elif part.order:
            every = {self._turns(each) for each in part.order}
            before = every.pop() if len(every) == 1 else None
        if before is None or part.order is None:
            return None
        found: list[Turn] = []
        for turn in (*before, *part.turns):
            if found and found[-1] == turn:
                found.pop()
            else:
                found.append(turn)
        return tuple(found)


class _Before(NamedTuple):
    """One step back on the way."""

    place: Place
    axis: int | None
    turn: Turn | None = None
    element: tuple[int, int | None] | None = None
    loop: bool | None = None
    """Whether it is in a loop, if that changes."""
