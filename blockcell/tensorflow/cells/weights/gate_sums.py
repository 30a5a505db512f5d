"""What goes into a gate: a sum of products, biases and numbers, each with its part of a variable.

Cells differ in how they cut the work: one product for all gates that is split, or a split kernel and a product for each
gate; one kernel for [x, h], or two. In a gate's sum all of these are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....activations import Activation
from ...graphs import Node
from ..graph.activations import LINEAR, activated
from ..graph.array_slices import Taken, split_axis, split_range, strided
from ..graph.graph_reader import Place, Unknown
from ..graph.op_table import op_of
from .weight_slices import Piece, Pieces, Range
from .weight_sources import Sources

_MOST_TERMS = 32
_MOST_VIEWS = 6  # parts of parts

Cut = Callable[[int], Range]
"""From a size to the part of it that is taken."""


class Other(Exception):
    """This is not the pattern."""


class Term(NamedTuple):
    """A product."""

    operand: Place
    kernel: Piece


@dataclass
class Sum:
    """What is added up."""

    products: list[Term] = field(default_factory=list)
    biases: list[Piece] = field(default_factory=list)
    constant: float = 0.0
    others: list[Place] = field(default_factory=list)


class Gate(NamedTuple):
    """A sum behind an activation."""

    activation: Activation
    sum: Sum


class Sums:
    """Reads a graph's nodes as parts of a pattern, and its sums."""

    def __init__(self, sources: Sources) -> None:
        self.reader, self.sources = sources.reader, sources
        self.piece = Pieces(sources).piece
        """The part of a variable or constant that a place is."""

    # ---------------------------------------------------------------------------------------------------------- nodes
    def op(self, place: Place) -> str:
        """The op that makes a value."""
        return self.reader.op(self.reader.past(place)).name

    def made(self, place: Place, op: str = "") -> tuple[Node, tuple[Place, ...]]:
        """The node that makes a value, which must be this op, and its inputs."""
        place = self.reader.past(place)
        node = self.reader.node(place)
        if node is None or (op and op_of(node).name != op):
            raise Other
        return node, self.reader.inputs(place.body, node)

    def pair(self, place: Place, op: str) -> tuple[Place, Place]:
        _, inputs = self.made(place, op)
        if len(inputs) != 2:
            raise Other
        return inputs[0], inputs[1]

    def only(self, place: Place, op: str) -> Place:
        _, inputs = self.made(place, op)
        if len(inputs) != 1:
            raise Other
        return inputs[0]

    # ----------------------------------------------------------------------------------------------------------- sums
    def sum(self, place: Place, cuts: Sequence[Cut] = ()) -> Sum:
        """What is added up there, of which `cuts` take a part, the last one first."""
        found, waiting = Sum(), [(place, tuple(cuts))]
        for _ in range(_MOST_TERMS):
            if not waiting:
                return found
            here, cuts = waiting.pop(0)
            here = self.reader.past(here)
            node, op = self.reader.node(here), self.reader.op(here).name
            inputs = self.reader.given(here)
            if op in ("Add", "BiasAdd") and len(inputs) == 2:
                waiting = [*((each, cuts) for each in inputs), *waiting]
            elif (cut := self._cut(here)) is not None:
                waiting = [(cut[0], (*cuts, cut[1])), *waiting]
            elif node is not None and op == "MatMul":
                self._add_product(found, node, inputs, cuts)
            else:
                self._add_term(found, here, cuts)
        raise Other

    def gate(self, place: Place) -> Gate | None:
        """A sum of products behind an activation, of which a part may be taken before or behind it; else None."""
        try:
            found = self._gate(place)
        except (Other, Unknown):
            return None
        return found if found.sum.products else None

    def _gate(self, place: Place) -> Gate:
        here, cuts = place, list[Cut]()
        for _ in range(_MOST_VIEWS):
            here = self.reader.past(here)
            found = activated(self.reader, here)
            if found is not None:
                total = self.sum(found.inner, cuts)
                total.constant -= found.added
                return Gate(found.activation, total)
            if (cut := self._cut(here)) is None:
                break
            here = cut[0]
            cuts.append(cut[1])
        return Gate(LINEAR, self.sum(place))

    def _cut(self, place: Place) -> tuple[Place, Cut] | None:
        """What some columns are taken of, and which."""
        node = self.reader.node(place)
        if node is None or op_of(node).view != "columns":
            return None
        inputs, op = self.reader.inputs(place.body, node), op_of(node)
        if node.op in ("Split", "SplitV"):
            if len(inputs) != op.inputs or split_axis(self.reader, node, inputs) not in (1, -1):
                return None
            return inputs[op.arrays][0], lambda size: split_range(self.reader, place, size)
        taken = strided(self.reader, node, inputs)
        if len(taken) != 2 or taken[0] != Taken(None, None, False) or taken[1].dropped:
            return None
        return inputs[0], lambda size: slice(taken[1].start, taken[1].stop).indices(size)[:2]

    def _add_product(self, found: Sum, node: Node, inputs: tuple[Place, ...], cuts: tuple[Cut, ...]) -> None:
        attrs = node.attrs
        if len(inputs) != 2 or attrs.get("transpose_a") or attrs.get("transpose_b"):
            raise Other
        kernel = self.piece(inputs[1])
        if len(kernel.shape) != 2:
            raise Other
        found.products.append(Term(inputs[0], _taken(kernel, cuts)))

    def _add_term(self, found: Sum, place: Place, cuts: tuple[Cut, ...]) -> None:
        try:
            piece = self.piece(place)
        except Unknown:
            if cuts:
                raise Other from None
            found.others.append(place)
            return
        if not piece.shape:
            found.constant += self.reader.value(place)
        elif len(piece.shape) == 1:
            found.biases.append(_taken(piece, cuts))
        else:
            raise Other


def _taken(piece: Piece, cuts: tuple[Cut, ...]) -> Piece:
    """Some of the columns."""
    for cut in reversed(cuts):
        piece = piece.columns(*cut(piece.shape[-1]))
    return piece
