"""How a graph puts the outputs of cells together: beside each other, as a Bidirectional does, or in another way."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations, permutations

from ...graphs import Node
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import op_of
from .sequences import Sequences

_MOST_PLACES = 200  # places from what a node merges back to h
_REARRANGING = ("Cast", "ExpandDims", "Gather", "GatherNd", "Reshape", "ReverseSequence", "ReverseV2", "Squeeze",
                "StridedSlice", "Transpose", "Unpack")  # fmt: skip
"""Ops that keep values of their first input, and put them in other places."""

Pair = tuple[int, int]
"""Two uses, by numbers."""


class Merges:
    """The uses whose h any node puts together, if some uses are reversed.

    The h of all steps counts before the h of one step, such as the last one: it is what a layer gives as y.
    """

    def __init__(self, reader: Reader, sequences: Sequences) -> None:
        self._reader, self._sequences = reader, sequences
        self._uses: dict[Place, int | None] = dict(sequences.uses_by_h())
        self.concatenated: set[Pair] = set()
        """The h of the first use is before the h of the second one, along the last axis."""
        self.merged: set[Pair] = set()
        """A node adds them, multiplies them or puts them together in another way; both orders of each pair."""
        if not any(use.turns for use in sequences.uses):
            return
        of_steps: tuple[set[Pair], set[Pair]] = set(), set()
        for body, node in reader.all_nodes():
            with suppress(Unknown):
                self._add(body, node, of_steps)
        known = {frozenset(pair) for pair in self.concatenated | self.merged}
        self.concatenated |= {pair for pair in of_steps[0] if frozenset(pair) not in known}
        self.merged |= {pair for pair in of_steps[1] if frozenset(pair) not in known}

    def _add(self, body: str, node: Node, of_steps: tuple[set[Pair], set[Pair]]) -> None:
        """Add the pairs that a node puts together, to those of all steps or to those of single steps."""
        op = op_of(node)
        if op.name == "ConcatV2":
            for axis in (0, 1, None):
                uses = self._in_order(Place(body, node.name), axis)
                if len(uses) > 1:
                    (of_steps[0] if axis is None else self.concatenated).update(combinations(uses, 2))
                    return
        elif op.name not in ("AddN", "Pack") and (op.compute is None or op.inputs != 2):
            return
        inputs = self._reader.inputs(body, node)
        outputs = [(use, place) for place in inputs if (use := self._use(place)) is not None]
        if op.name == "ConcatV2" and len(outputs) > 1 and self._reader.number(inputs[-1]) in (-1, 2):
            of_steps[0].update(combinations([use for use, _ in outputs], 2))  # in an order of steps that is not known
            return
        whole = [use for use, place in outputs if any(self._in_order(place, axis) == [use] for axis in (0, 1))]
        self.merged |= set(permutations(whole, 2))
        of_steps[1].update(permutations([use for use, _ in outputs], 2))

    def _in_order(self, place: Place, axis: int | None) -> list[int]:
        """List the uses whose h are beside each other in a sequence or, without the axis of time, in one step."""
        with suppress(Unknown):
            sources = self._sequences.sources(place, axis)
            uses = [source if isinstance(source, int) or axis is not None else self._use(source) for source in sources]
            return [use for use in uses if isinstance(use, int)]
        return []

    def _use(self, place: Place) -> int | None:
        """Return the one use whose h a value is, of all steps or of some; None if it is none or of several uses."""
        if place in self._uses:
            return self._uses[place]
        uses: set[int | None] = set()

        def before(here: Place) -> Iterable[Place]:
            if here in self._uses:
                uses.add(self._uses[here])
                return ()
            with suppress(Unknown):
                return self._before(here)
            return ()

        self._reader.walk([place], before, most=_MOST_PLACES, near_first=True)
        uses.discard(None)
        self._uses[place] = uses.pop() if len(uses) == 1 else None
        return self._uses[place]

    def _before(self, place: Place) -> Iterable[Place]:
        """List where the values come from, wherever they are put."""
        op, inputs = self._reader.op(place), self._reader.given(place)
        if op.name == "Pack":
            return inputs
        if op.name == "Select":
            return inputs[1:]
        if op.name in _REARRANGING:
            return inputs[:1]
        if op.array:
            return [inputs[op.at[role]] for role in ("array", "value") if role in op.at]
        return self._reader.before(place) or ()
