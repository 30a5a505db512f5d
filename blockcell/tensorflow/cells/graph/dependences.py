"""Which values of a graph depend on others, by any nodes, forwards through calls and loops.

In come places; out go the places that read them, and the first nodes at which two sets of places meet. All outputs of a
node count as one place, but each output of a call or a loop counts for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from ...graphs import Node
from .graph_reader import GraphReader, Place, UnknownValue
from .op_table import graph_op


class Dependences:
    """The values of a graph, by what they depend on."""

    def __init__(self, reader: GraphReader) -> None:
        self._reader = reader

    def reached(self, starts: Iterable[Place]) -> dict[Place, None]:
        """Return all places that depend on some places, and these, the nearest first."""
        joined = dict.fromkeys(map(self.joined, starts))
        return dict.fromkeys(self._reader.walk(joined, self.readers, near_first=True))

    def sources(self, place: Place) -> list[Place]:
        """Return the places that a place reads."""
        return self._sources_and_readers[0].get(self.joined(place), [])

    def readers(self, place: Place) -> list[Place]:
        """Return the places that read a place."""
        return self._sources_and_readers[1].get(self.joined(place), [])

    def first_merges(self, left: Mapping[Place, None], right: Mapping[Place, None]) -> list[Place]:
        """Return the places that are reached from both sides, while nothing that they read is."""
        both = [place for place in left if place in right]
        behind = {reader for place in both for reader in self.readers(place)}
        return [place for place in both if place not in behind]

    def is_result(self, place: Place) -> bool:
        """Return whether a place that nothing reads is a result of the graph or of a function."""
        function = self._reader.graph.functions.get(place.body)
        if function is None:
            return True
        results = [self._reader.function_result(function.name, k) for k in range(len(function.outputs))]
        return place in map(self.joined, results)

    def joined(self, place: Place) -> Place:
        """Return the place that stands for all outputs of a node."""
        node = self._reader.bodies[place.body].get(place.name)
        return place if node is None or self._is_call(node) else place._replace(output=0)

    def _is_call(self, node: Node) -> bool:
        return bool(graph_op(node).function_attributes) or node.op in self._reader.graph.functions

    @cached_property
    def _sources_and_readers(self) -> tuple[dict[Place, list[Place]], dict[Place, list[Place]]]:
        """The places that each place reads, and those that read it."""
        sources_of: dict[Place, list[Place]] = {}
        readers_of: dict[Place, list[Place]] = {}
        for body, node in self._reader.all_nodes():
            self._reader.spend_steps()
            place = Place(body, node.name)
            try:
                inputs = self._reader.inputs_at(place)
                pairs = self._call_pairs(place, node) if self._is_call(node) else [(source, place) for source in inputs]
            except UnknownValue:
                continue
            for source, reader in pairs if not graph_op(node).shape_only else ():
                sources_of.setdefault(reader, []).append(self.joined(source))
                readers_of.setdefault(self.joined(source), []).append(reader)
        return sources_of, readers_of

    def _call_pairs(self, place: Place, node: Node) -> list[tuple[Place, Place]]:
        """Return the places that a call or a loop hands on, with the places where they arrive."""
        op, inputs = graph_op(node), self._reader.inputs_at(place)
        called = self._reader.called_functions(node)
        pairs: list[tuple[Place, Place]] = []
        for name in called[-1:] if op.name == "While" else called:
            function = self._reader.graph.functions[name]
            arguments = [Place(name, argument) for argument in function.inputs]
            pairs += zip(inputs[op.first_argument :], arguments, strict=False)
            results = [self._reader.function_result(name, k) for k in range(len(function.outputs))]
            pairs += [(result, place._replace(output=k)) for k, result in enumerate(results)]
            pairs += zip(results, arguments, strict=False) if op.name == "While" else ()
        return pairs
