"""Which sequence a cell runs over, and in which direction: traced from its x back to other cells, or to other nodes.

In come the runs of cells in a graph; the inputs and directions of these runs are filled in. A trace passes only what
keeps all values: loops that read and write a sequence step by step, transpositions, reversals and joins side by side.
The axis of time is known all the way, so that only time is reversed. Other nodes, such as a dropout, end the trace; the
direction is followed past them where each step is made of the same step.

Invariant of a trace: the sequence at its point, reversed by `reversals` in this order, of which then the step `element`
is taken if there is one, is what the trace began with, or one of the sequences side by side in that. A node that does
not keep the invariant ends the trace. Of a trace through too many nodes nothing is returned: it raises `UnknownValue`.

The reversals of a run, against the natural order of time, are known only if all sequences that it reads have the same,
and its mask has them, too. Two equal ones in a row cancel. Runs in a cycle, and behind one, have none; `find_cells`
relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from ..cell.cell_definition import CellInGraph
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.while_loops import WhileLoops
from .sequence_steps import ALL_STEPS, Reversal, SequenceSteps, StepBack

_LONGEST = 2000  # nodes from a cell back to what it reads
_MOST_PARTS = 16  # sequences side by side
_DEEPEST = 32  # nested traces of steps that other nodes make


class SequencePart(NamedTuple):
    """One of the sequences that are side by side in an input."""

    source: int | Place
    """The number of the run whose h it is; else the place where the trace ends."""
    axis: int | None
    """The axis of time at the source: 0, 1, or None for one step."""
    reversals: tuple[Reversal, ...]
    """The reversals between the source and the input."""
    element: tuple[int, int | None] | None = None
    """The number of the step that is read, and of how many; None if a loop reads all."""
    made_of: tuple[SequencePart, ...] | None = ()
    """Where a trace ends at one step: the sequences that make this step, in its order; None if they are not known."""


@dataclass
class CellRun:
    """One run of a cell over a sequence."""

    steps: list[CellInGraph]
    in_loop: bool = False
    masked: bool = False
    """Whether the states of finished rows stay."""
    mask_reversals: tuple[Reversal, ...] | None = None
    """How its mask is reversed, if it reads one step by step; None if it stops by lengths."""
    input_parts: tuple[SequencePart, ...] | None = None
    """The sequences that x is, side by side; None if they are not understood."""
    reversals: tuple[Reversal, ...] | None = None
    """How x is reversed against the natural order of time; None if it is not known."""


class _TracePoint(NamedTuple):
    """Where a trace is, and what it has passed."""

    place: Place
    axis: int | None
    in_loop: bool
    reversals: tuple[Reversal, ...] = ()
    element: tuple[int, int | None] | None = None


class _UnknownStep(Exception):
    """A value is made of a step of a sequence, but it is not known of which."""


def trace_sequences(reader: GraphReader, runs: Sequence[CellRun]) -> None:
    """Trace the inputs of runs, and fill in their loops, masks, inputs and reversals."""
    sequences = _Sequences(reader, runs)
    running = [run for run in runs if run.steps[0].body in reader.running_bodies] or runs
    for run in running:
        sequences.read_loop(run)
    for run in running:
        try:
            starts = [_TracePoint(step.x, 0 if step.state is None else None, run.in_loop) for step in run.steps]
            run.input_parts = _combine_steps([*map(sequences.trace, starts)])
        except UnknownValue:
            run.input_parts = None
    _find_reversals(runs)


class _Sequences:
    """The sequences between the runs of cells in a graph."""

    def __init__(self, reader: GraphReader, runs: Sequence[CellRun]) -> None:
        self._reader, self._runs = reader, runs
        self._loops = WhileLoops(reader)
        self._steps = SequenceSteps(reader, self._loops)
        self._run_by_h = {nodes.h: (k, step) for k, run in enumerate(runs) for step, nodes in enumerate(run.steps)}
        self._parts_of_steps: dict[Place, tuple[SequencePart, ...] | None] = {}
        self._packed_parts: dict[Place, tuple[SequencePart, ...] | None] = {}
        self._depth = 0

    def read_loop(self, run: CellRun) -> None:
        """Find out whether a run is in a loop, and whether lengths or a mask end its rows."""
        states = [step.state for step in run.steps]
        if states[0] is None:
            return
        try:
            if len(states) == 1:
                variable = self._loops.loop_variable(states[0])
                states, run.in_loop = ([variable.next] if variable is not None else []), variable is not None
            else:  # the state of the first step is from nowhere
                del states[0]
            selections = [self._reader.inputs_of(state, "Select") for state in states if state is not None]
            conditions = [inputs[0] for inputs in selections if inputs]
            if conditions:
                run.masked = True
                run.mask_reversals = self._find_mask_reversals(conditions)
        except UnknownValue:
            pass

    def _find_mask_reversals(self, conditions: Sequence[Place]) -> tuple[Reversal, ...] | None:
        """Return how the mask that selects states is reversed; None if the conditions are no mask."""
        reads = [read for read in map(self._steps.read_mask, conditions) if read is not None]
        if len(reads) < len(conditions) or len({(read.place, read.axis) for read in reads}) > 1:
            return None
        parts = self.trace(_TracePoint(reads[0].place, reads[0].axis, False))
        if len(parts) != 1:
            return None
        reversals, elements = parts[0].reversals, [read.element for read in reads if read.element is not None]
        if not elements:  # a loop reads all steps
            return reversals if len(reads) == 1 else None
        numbers, total = [number for number, _ in elements], elements[0][1]
        if numbers == [*range(len(reads))]:
            return reversals
        from_the_end = total is not None and numbers == [total - 1 - k for k in range(len(reads))]
        return (*reversals, ALL_STEPS) if from_the_end else None

    # ------------------------------------------------------------------------------------------------------ the traces
    def trace(self, start: _TracePoint) -> tuple[SequencePart, ...]:
        """Return what is side by side in a sequence or in a step of one, from left to right."""
        parts: list[SequencePart] = []
        waiting = [start]
        for _ in range(_LONGEST):
            if not waiting:
                return tuple(parts)
            self._reader.spend_steps()
            place, axis, in_loop, reversals, element = point = waiting.pop()
            run_and_step = self._run_of_h(place, axis)
            if run_and_step is not None:
                run, step = run_and_step
                count = len(self._runs[run].steps)
                single = axis is None and count > 1
                parts.append(SequencePart(run, axis, reversals, (step, count) if single else element))
                continue
            packed = self._packed(place, axis)
            if packed is not None:
                whole = (part._replace(reversals=(*part.reversals, *reversals), element=element) for part in packed)
                parts += whole
                continue
            steps_back = self._steps.step_back(place, axis)
            if steps_back is None:
                made_of = self._step_parts(place) if axis is None and in_loop else ()
                parts.append(SequencePart(place, axis, reversals, element, made_of))
                continue
            waiting += [_step_further(point, step_back) for step_back in reversed(steps_back)]
            if len(waiting) + len(parts) > _MOST_PARTS:
                break
        raise UnknownValue(f"{start.place.name!r}, which is made of too much")

    def _run_of_h(self, place: Place, axis: int | None) -> tuple[int, int] | None:
        """Return the run and step whose h a place is, if time is this axis of it."""
        run_and_step = self._run_by_h.get(place)
        if run_and_step is None:
            return None
        all_steps = self._runs[run_and_step[0]].steps[run_and_step[1]].state is None
        return run_and_step if axis == (0 if all_steps else None) else None

    def _packed(self, place: Place, axis: int | None) -> tuple[SequencePart, ...] | None:
        """Return what is side by side in a Pack along the axis of time, if it has all steps of cells; else None."""
        if axis is None or self._reader.op(place).name != "Pack" or self._reader.attrs(place).get("axis", 0) != axis:
            return None
        if place not in self._packed_parts:
            self._packed_parts[place] = None  # also for a Pack that comes from itself
            inputs, self._depth = self._reader.inputs_at(place), self._depth + 1
            with suppress(UnknownValue):
                if self._depth <= _DEEPEST:
                    parts = _combine_steps([self.trace(_TracePoint(step, None, False)) for step in inputs])
                    if parts and all(self._has_all_steps(part, len(inputs)) for part in parts):
                        self._packed_parts[place] = parts
            self._depth -= 1
        return self._packed_parts[place]

    def _has_all_steps(self, part: SequencePart, count: int) -> bool:
        """Return whether a part is so many steps of a cell, in order or reversed, and these are all of its steps."""
        run = self._runs[part.source] if isinstance(part.source, int) else None
        return run is not None and len(run.steps) == count and not run.in_loop and part.made_of is not None

    # ------------------------------------------------------------------------------------ steps that other nodes make
    def _step_parts(self, place: Place) -> tuple[SequencePart, ...] | None:
        """Return the sequences that a step is made of, by any nodes; None if it is not known of which step of them."""
        if place not in self._parts_of_steps:
            self._depth += 1
            try:
                self._parts_of_steps[place] = self._find_step_parts(place) if self._depth <= _DEEPEST else None
            except _UnknownStep:
                self._parts_of_steps[place] = None
            finally:
                self._depth -= 1
        return self._parts_of_steps[place]

    def _find_step_parts(self, place: Place) -> tuple[SequencePart, ...]:
        """Find the sequences that a step is made of; raise `_UnknownStep` if it is not known of which step."""
        parts: dict[SequencePart, None] = {}
        node_count = 0

        def earlier(current: Place) -> Sequence[Place]:
            nonlocal node_count
            node_count += 1
            if node_count > _LONGEST or len(parts) > _MOST_PARTS:
                raise _UnknownStep
            run_and_step = self._run_of_h(current, None)
            if run_and_step is not None:
                parts[SequencePart(run_and_step[0], None, ())] = None
                return ()
            op = self._reader.op(current)
            if op.forwards == "flow" or op.name in ("", "Merge", "Const"):
                if self._loops.counted_loop(current) is not None:
                    raise _UnknownStep
                return ()
            steps_back = self._steps.read_step(current)
            if steps_back is not None and steps_back[0].element is None:
                parts.update(dict.fromkeys(self._read_in_order(steps_back[0])))
                return ()
            if op.tensor_list == "read":
                raise _UnknownStep
            return self._reader.inputs_at(current)[: 1 if op.forwards else None]

        self._reader.walk([place], earlier)
        return tuple(parts)

    def _read_in_order(self, read: StepBack) -> list[SequencePart]:
        """List the parts of a sequence that a loop reads step by step."""
        parts_read = []
        for part in self.trace(_TracePoint(read.place, read.axis, False)):
            if part.made_of is None:
                raise _UnknownStep
            for inner_part in part.made_of or (part,):
                reversals = (*inner_part.reversals, *part.reversals) if part.made_of else part.reversals
                parts_read.append(inner_part._replace(reversals=reversals, made_of=()))
        return parts_read


def _step_further(point: _TracePoint, step_back: StepBack) -> _TracePoint:
    """Move a trace one node back."""
    return _TracePoint(
        step_back.place,
        step_back.axis,
        point.in_loop if step_back.loop is None else step_back.loop,
        point.reversals if step_back.reversal is None else (step_back.reversal, *point.reversals),
        step_back.element or point.element,
    )


def _combine_steps(steps: Sequence[tuple[SequencePart, ...]]) -> tuple[SequencePart, ...]:
    """Combine what unrolled steps read one by one to the sequence that they read together."""
    parts = []
    count = len(steps)
    if any(len(part) != len(steps[0]) for part in steps):
        return (steps[0][0]._replace(made_of=None),)
    for column in zip(*steps, strict=True):
        first = column[0]
        if count == 1:
            parts.append(first if first.element in (None, (0, 1)) else first._replace(made_of=None))
            continue
        is_same = all(part._replace(element=None) == first._replace(element=None) for part in column)
        numbers = [part.element[0] for part in column if part.element is not None]
        total = first.element[1] if first.element is not None else None
        if is_same and numbers == [*range(count)]:
            parts.append(first._replace(element=None))
        elif is_same and numbers == [*range(count)][::-1] and total == count:
            parts.append(first._replace(element=None, reversals=(*first.reversals, ALL_STEPS)))
        else:
            parts.append(first._replace(element=None, made_of=None))
    return tuple(parts)


# -------------------------------------------------------------------------------------------------------- the reversals
def _find_reversals(runs: Sequence[CellRun]) -> None:
    """Find the reversals of each run after those of the runs that it reads; None for runs in a cycle, or behind one."""
    sorter = TopologicalSorter({k: _runs_before(run) for k, run in enumerate(runs)})
    with suppress(CycleError):  # what is in no cycle can be sorted nevertheless
        sorter.prepare()
    while ready := sorter.get_ready():
        for k in ready:
            runs[k].reversals = _run_reversals(runs, runs[k])
        sorter.done(*ready)


def _runs_before(run: CellRun) -> list[int]:
    """List the numbers of the runs that a run reads."""
    parts = [*(run.input_parts or ())]
    parts += [inner_part for part in parts for inner_part in part.made_of or ()]
    return [part.source for part in parts if isinstance(part.source, int)]


def _run_reversals(runs: Sequence[CellRun], run: CellRun) -> tuple[Reversal, ...] | None:
    """Return the reversals that all inputs and the mask of a run have in common; None if they differ."""
    if run.input_parts is None:
        return None
    different = {_part_reversals(runs, part) for part in run.input_parts}
    reversals = different.pop() if len(different) == 1 else None
    if reversals is not None and len(reversals) > 1:
        return None
    if run.mask_reversals is not None:
        return reversals if run.mask_reversals == reversals else None
    return None if run.masked and reversals == (ALL_STEPS,) else reversals


def _part_reversals(runs: Sequence[CellRun], part: SequencePart) -> tuple[Reversal, ...] | None:
    """Return the reversals of a part since the sequence was in its natural order; None if they are not known."""
    earlier: tuple[Reversal, ...] | None = ()
    if isinstance(part.source, int):
        earlier = runs[part.source].reversals
    elif part.made_of:
        reversals_of_parts = {_part_reversals(runs, inner_part) for inner_part in part.made_of}
        earlier = reversals_of_parts.pop() if len(reversals_of_parts) == 1 else None
    if earlier is None or part.made_of is None:
        return None
    reversals: list[Reversal] = []
    for reversal in (*earlier, *part.reversals):
        if reversals and reversals[-1] == reversal:
            reversals.pop()
        else:
            reversals.append(reversal)
    return tuple(reversals)
