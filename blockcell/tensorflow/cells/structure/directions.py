"""In which direction cells run: reversals against the natural order of time, from cell to cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..cell.found_cell import At
from ..graph.graph_reader import Place, Reader
from .sequence_steps import ALL, Turn


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


@dataclass
class Use:
    """A cell as it runs once over a sequence."""

    steps: list[At]
    looped: bool = False
    masked: bool = False
    """Whether a row's state stays where its steps have ended."""
    mask_turns: tuple[Turn, ...] | None = None
    """How its mask is reversed, if it has one that is read step by step; None if it stops by lengths."""
    parts: tuple[Part, ...] | None = None
    """What x is, side by side; None if that is not understood."""
    turns: tuple[Turn, ...] | None = None
    """How x is reversed against the natural order of time; None if that is not known."""


def find_turns(reader: Reader, uses: Sequence[Use]) -> None:
    """The direction of each use, of those before it first; none of what goes around."""
    done: set[int] = set()
    for start in range(len(uses)):
        waiting = [start]
        open_: set[int] = set()
        while waiting:
            reader.count()
            k = waiting[-1]
            needed = [each for each in _needed(uses[k]) if each not in done]
            if k in open_ or not needed:
                waiting.pop()
                if k not in done:
                    done.add(k)
                    uses[k].turns = _turns_of_use(uses, uses[k])
                continue
            open_.add(k)
            waiting += [each for each in needed if each not in open_]


def _needed(use: Use) -> list[int]:
    parts = use.parts or ()
    every = [*parts, *(each for part in parts for each in part.order or ())]
    return [part.source for part in every if isinstance(part.source, int)]


def _turns_of_use(uses: Sequence[Use], use: Use) -> tuple[Turn, ...] | None:
    if use.parts is None:
        return None
    every = [_turns_of(uses, part) for part in use.parts]
    turns = every[0] if every else None
    if any(each != turns for each in every) or (turns is not None and len(turns) > 1):
        return None
    if use.mask_turns is not None:
        return turns if use.mask_turns == turns else None
    return None if use.masked and turns == (ALL,) else turns


def _turns_of(uses: Sequence[Use], part: Part) -> tuple[Turn, ...] | None:
    """Those since the sequence was in its natural order."""
    before: tuple[Turn, ...] | None = ()
    if isinstance(part.source, int):
        before = uses[part.source].turns
    elif part.order:
        every = {_turns_of(uses, each) for each in part.order}
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
