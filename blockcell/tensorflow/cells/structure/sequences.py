"""Which sequence a cell runs over: from its x back to other cells, or to what is none.

Only what keeps all values is passed on the way: loops that read a sequence step by step and write one, transpositions,
reversals, joins side by side. It is known all the way where time lies, so that only time is reversed. What is beside
that, such as a dropout, ends the way; the direction is followed past it, as each step is made of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.while_loops import Loops
from .directions import Part, Use, find_turns
from .sequence_steps import ALL, Before, Steps, Turn

_LONGEST = 2000  # nodes from a cell back to what it reads
_MOST_PARTS = 16  # sequences side by side
_DEEPEST = 32  # loops behind each other in which other nodes make the steps
_PACKED = -1  # the axis of a sequence that is a cell's steps, put together


class _Way(NamedTuple):
    """How far a way back has come."""

    place: Place
    axis: int | None
    looped: bool
    turns: tuple[Turn, ...] = ()
    element: tuple[int, int | None] | None = None


class _Untold(Exception):
    """It is not known of which step something is made."""


class Sequences:
    """The sequences between the uses of cells in a graph."""

    def __init__(self, reader: Reader, uses: Sequence[Use]) -> None:
        """Fills in what is known of the uses."""
        self._reader, self.uses = reader, uses
        self._loops = Loops(reader)
        self._steps = Steps(reader, self._loops)
        self._results = {each.h: (k, step) for k, use in enumerate(uses) for step, each in enumerate(use.steps)}
        self._orders: dict[Place, tuple[Part, ...] | None] = {}
        self._packs: dict[Place, list[Before] | None] = {}
        self._depth = 0
        running = [use for use in uses if use.steps[0].body in reader.running] or uses
        for use in running:
            self._run(use)
        for use in running:
            try:
                use.parts = _combined([self._parts(step.x, use) for step in use.steps])
            except Unknown:
                use.parts = None
        find_turns(reader, uses)

    def _run(self, use: Use) -> None:
        """Whether it runs in a loop, and up to lengths or by a mask."""
        states = [step.state for step in use.steps]
        if states[0] is None:
            return
        try:
            if len(states) == 1:
                carried = self._loops.carried(states[0])
                states, use.looped = ([carried.next] if carried is not None else []), carried is not None
            else:  # the state of the first step is from nowhere
                del states[0]
            conditions = [self._reader.given(place)[0] for place in map(self._selection, states) if place is not None]
            if conditions:
                use.masked = True
                use.mask_turns = self._mask_turns(conditions)
        except Unknown:
            pass

    def _selection(self, state: Place | None) -> Place | None:
        """The selection that a state comes from, if it comes from one."""
        here = None if state is None else self._reader.past(state)
        return here if here is not None and self._reader.op(here).name == "Select" else None

    def _mask_turns(self, conditions: Sequence[Place]) -> tuple[Turn, ...] | None:
        """How the mask is reversed by which states are selected; None if it is no mask."""
        reads = [read for read in map(self._steps.mask, conditions) if read is not None]
        if len(reads) < len(conditions) or len({(read.place, read.axis) for read in reads}) > 1:
            return None
        parts = self._trace(_Way(reads[0].place, reads[0].axis, False))
        if len(parts) != 1:
            return None
        turns, elements = parts[0].turns, [read.element for read in reads if read.element is not None]
        if not elements:  # a loop reads all steps
            return turns if len(reads) == 1 else None
        numbers, total = [number for number, _ in elements], elements[0][1]
        if numbers == [*range(len(reads))]:
            return turns
        from_the_end = total is not None and numbers == [total - 1 - k for k in range(len(reads))]
        return (*turns, ALL) if from_the_end else None

    def sources(self, place: Place, axis: int | None) -> list[int | Place]:
        """List what is beside each other in a sequence or a step: the uses whose h it is, or where the ways end."""
        return [part.source for part in self._trace(_Way(place, axis, False))]

    def uses_by_h(self) -> dict[Place, int]:
        """Return the uses by the places of their h, of single steps or of all steps at once."""
        return {place: use for place, (use, _) in self._results.items()}

    # ------------------------------------------------------------------------------------------------------- the parts
    def _parts(self, x: Place, use: Use) -> tuple[Part, ...]:
        return self._trace(_Way(x, 0 if use.steps[0].state is None else None, use.looped))

    def _trace(self, start: _Way) -> tuple[Part, ...]:
        """What is side by side in a sequence or in a step of one, from left to right."""
        found: list[Part] = []
        waiting = [start]
        for _ in range(_LONGEST):
            if not waiting:
                return tuple(found)
            self._reader.count()
            here, axis, looped, turns, element = way = waiting.pop()
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
            waiting += [_further(way, each) for each in reversed(before)]
            if len(waiting) + len(found) > _MOST_PARTS:
                break
        raise Unknown(f"{start.place.name!r}, which is made of too much")

    def _result(self, place: Place, axis: int | None) -> tuple[int, int] | None:
        """The use and step whose h this is, if it lies in time like this."""
        known = self._results.get(place)
        if known is None:
            return None
        whole = self.uses[known[0]].steps[known[1]].state is None
        return known if axis in ((0,) if whole else (None, _PACKED)) else None

    def _result_of_step(self, place: Place) -> tuple[int, int] | None:
        """The use and step whose h this is, also where a mask selects it."""
        here = self._reader.past(place)
        if self._reader.op(here).name == "Select" and (chosen := self._steps.before(here, None)):
            here = self._reader.past(chosen[0].place)
        return self._result(here, None)

    def _before(self, place: Place, axis: int | None) -> list[Before] | None:
        """One step back; None if the way ends here."""
        node = self._reader.node(place)
        if node is None or axis is None or node.op != "Pack" or node.attrs.get("axis", 0) != axis:
            return self._steps.before(place, axis)
        if place not in self._packs:
            self._packs[place] = self._packed(self._reader.given(place))
        return self._packs[place]

    def _packed(self, inputs: Sequence[Place]) -> list[Before] | None:
        """The steps of cells, one after the other."""
        rows: list[list[tuple[int, int]]] = []
        for place in inputs:
            self._reader.count()
            here = self._reader.past(place)
            parts = [here]
            if self._reader.op(here).name == "ConcatV2":
                *parts, last = self._reader.given(here)
                if self._reader.number(last) not in (1, -1) or len(parts) > _MOST_PARTS:
                    return None
            known = [self._result_of_step(part) for part in parts]
            rows.append([each for each in known if each is not None])
            if None in known or len(rows[-1]) != len(rows[0]):
                return None
        found = []
        count = len(inputs)
        for column in zip(*rows, strict=True):
            use = column[0][0]
            numbers = [step for each, step in column if each == use]
            if numbers not in (forward := [*range(count)], forward[::-1]):
                return None
            if len(self.uses[use].steps) != count or self.uses[use].looped:
                return None
            found.append(Before(self.uses[use].steps[0].h, _PACKED, None if numbers == forward else ALL))
        return found

    # ------------------------------------------------------------------------------------ steps that other nodes make
    def _order(self, place: Place) -> tuple[Part, ...] | None:
        """The sequences that a step is made of, by whatever nodes; None if it is not known which step of them."""
        if place not in self._orders:
            self._depth += 1
            try:
                self._orders[place] = self._found_order(place) if self._depth <= _DEEPEST else None
            except _Untold:
                self._orders[place] = None
            finally:
                self._depth -= 1
        return self._orders[place]

    def _found_order(self, place: Place) -> tuple[Part, ...]:
        found: dict[Part, None] = {}
        passed = 0

        def before(here: Place) -> Sequence[Place]:
            nonlocal passed
            passed += 1
            if passed > _LONGEST or len(found) > _MOST_PARTS:
                raise _Untold
            known = self._result(here, None)
            if known is not None:
                found[Part(known[0], None, ())] = None
                return ()
            op = self._reader.op(here)
            if op.passes == "flow" or op.name in ("", "Merge", "Const"):
                if self._loops.counter(here) is not None:
                    raise _Untold
                return ()
            read = self._steps.read(here)
            if read is not None and read[0].element is None:
                found.update(dict.fromkeys(self._read_in_order(read[0])))
                return ()
            if op.array == "read":
                raise _Untold
            return self._reader.given(here)

        self._reader.walk([place], before)
        return tuple(found)

    def _read_in_order(self, read: Before) -> list[Part]:
        """What a loop reads step by step."""
        found = []
        for part in self._trace(_Way(read.place, read.axis, False)):
            if part.order is None:
                raise _Untold
            for each in part.order or (part,):
                turns = (*each.turns, *part.turns) if part.order else part.turns
                found.append(each._replace(turns=turns, order=()))
        return found


def _further(way: _Way, before: Before) -> _Way:
    """One step further back."""
    return _Way(
        before.place,
        before.axis,
        way.looped if before.loop is None else before.loop,
        way.turns if before.turn is None else (before.turn, *way.turns),
        before.element or way.element,
    )


def _combined(steps: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
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
