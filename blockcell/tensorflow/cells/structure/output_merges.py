"""How a graph merges the outputs of cells: by a concatenation, as a Bidirectional does, or in another way.

In come the sequences of a graph; out go pairs of runs, concatenated in this order or merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations, permutations

from ...graphs import Node
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import graph_op
from .sequences import Sequences

_MOST_PLACES = 200  # places from what a node merges back to h
_REARRANGING = ("Cast", "ExpandDims", "Gather", "GatherNd", "Reshape", "ReverseSequence", "ReverseV2", "Squeeze",
                "StridedSlice", "Transpose", "Unpack")  # fmt: skip
"""Ops that rearrange values of their first input."""

RunPair = tuple[int, int]
"""Two runs, by numbers."""


class OutputMerges:
    """The runs whose h any node merges, if some runs are reversed.

    Merges of all steps' h, the y of a layer, count before merges of one step's h, such as the last one.
    """

    def __init__(self, reader: GraphReader, sequences: Sequences) -> None:
        self._reader, self._sequences = reader, sequences
        self._run_by_place: dict[Place, int | None] = dict(sequences.runs_by_h())
        self.concatenated: set[RunPair] = set()
        """The h of the first run is concatenated before the h of the second one, along the last axis."""
        self.merged: set[RunPair] = set()
        """A node adds or multiplies the h of both runs or merges them in another way; both orders of each pair."""
        if not any(run.reversals for run in sequences.runs):
            return
        of_steps: tuple[set[RunPair], set[RunPair]] = set(), set()
        for body, node in reader.all_nodes():
            with suppress(UnknownValue):
                self._add_pairs(body, node, of_steps)
        known_pairs = {frozenset(pair) for pair in self.concatenated | self.merged}
        self.concatenated |= {pair for pair in of_steps[0] if frozenset(pair) not in known_pairs}
        self.merged |= {pair for pair in of_steps[1] if frozenset(pair) not in known_pairs}

    def _add_pairs(self, body: str, node: Node, of_steps: tuple[set[RunPair], set[RunPair]]) -> None:
        """Add the pairs of runs that a node merges, to those of all steps or to those of single steps."""
        op = graph_op(node)
        if op.name == "ConcatV2":
            for axis in (0, 1, None):
                runs = self._concatenated_runs(Place(body, node.name), axis)
                if len(runs) > 1:
                    (of_steps[0] if axis is None else self.concatenated).update(combinations(runs, 2))
                    return
        elif op.name not in ("AddN", "Pack") and (op.compute is None or op.input_count != 2):
            return
        inputs = self._reader.inputs(body, node)
        outputs = [(run, place) for place in inputs if (run := self._single_run(place)) is not None]
        if op.name == "ConcatV2" and len(outputs) > 1 and self._reader.constant_integer(inputs[-1]) in (-1, 2):
            of_steps[0].update(combinations([run for run, _ in outputs], 2))  # in an order of steps that is not known
            return
        all_steps = [run for run, place in outputs if any(self._concatenated_runs(place, k) == [run] for k in (0, 1))]
        self.merged |= set(permutations(all_steps, 2))
        of_steps[1].update(permutations([run for run, _ in outputs], 2))

    def _concatenated_runs(self, place: Place, axis: int | None) -> list[int]:
        """List the runs whose h are concatenated in a sequence or, without the axis of time, in one step."""
        with suppress(UnknownValue):
            ends = self._sequences.sources(place, axis)
            runs = [end if isinstance(end, int) or axis is not None else self._single_run(end) for end in ends]
            return [run for run in runs if isinstance(run, int)]
        return []

    def _single_run(self, place: Place) -> int | None:
        """Return the one run whose h a value is, of all steps or of some; None if there is none or more than one."""
        if place in self._run_by_place:
            return self._run_by_place[place]
        runs: set[int | None] = set()

        def earlier(current: Place) -> Iterable[Place]:
            if current in self._run_by_place:
                runs.add(self._run_by_place[current])
                return ()
            with suppress(UnknownValue):
                return self._predecessors(current)
            return ()

        self._reader.walk([place], earlier, most=_MOST_PLACES, near_first=True)
        runs.discard(None)
        self._run_by_place[place] = runs.pop() if len(runs) == 1 else None
        return self._run_by_place[place]

    def _predecessors(self, place: Place) -> Iterable[Place]:
        """List where the values of a place come from, also past nodes that rearrange them."""
        op, inputs = self._reader.op(place), self._reader.inputs_at(place)
        if op.name == "Pack":
            return inputs
        if op.name == "Select":
            return inputs[1:]
        if op.name in _REARRANGING:
            return inputs[:1]
        if op.tensor_list:
            return [inputs[op.slots[role]] for role in ("array", "value") if role in op.slots]
        return self._reader.predecessors(place) or ()
