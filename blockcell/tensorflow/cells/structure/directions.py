"""In which direction cells run: the reversals of time between cells.

In come the runs of cells with their inputs; the reversals of each run against the natural order of time are filled in.
Those of a run are known only if all sequences that it reads have the same, and its mask has them, too. Two equal ones
in a row cancel. Runs are done after those that they read. In a cycle the first one reads a run that is not done, so
that it is unknown, and so are all runs of the cycle and behind it; `find_cells` relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cell.cell_definition import CellInGraph
from ..graph.graph_reader import GraphReader, Place
from .sequence_steps import ALL_STEPS, Reversal


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


def find_reversals(reader: GraphReader, runs: Sequence[CellRun]) -> None:
    """Find the reversals of each run after those of the runs that it reads; None for runs in a cycle."""
    done: set[int] = set()
    for start in range(len(runs)):
        waiting = [start]
        open_: set[int] = set()
        while waiting:
            reader.spend_steps()
            k = waiting[-1]
            needed = [run_number for run_number in _runs_before(runs[k]) if run_number not in done]
            if k in open_ or not needed:
                waiting.pop()
                if k not in done:
                    done.add(k)
                    runs[k].reversals = _run_reversals(runs, runs[k])
                continue
            open_.add(k)
            waiting += [run_number for run_number in needed if run_number not in open_]


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
