"""What the patterns of cells share: operands, matches, and what to say of a cell that is none of them.

A match has every node on the way understood. `Variant` is raised where something is surely meant as a cell, and is
another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....activations import Activation, unusual
from ...graphs import Node
from ..graph.graph_reader import Place, Unknown
from ..weights.gate_sums import Gate, Sum, Sums
from ..weights.weight_slices import Piece, added, joined, zeros
from ..weights.weight_sources import Source


class Variant(Exception):
    """This is a cell, but none that a layer computes: the text says why."""

    vague = False
    """Whether other nodes may show it better."""
    states: tuple[Place, ...] = ()
    """If there are any, it is one only if one of them comes from its last node."""


class Step(NamedTuple):
    """A match as a step among others with the same weights."""

    end: Place
    states: tuple[Place, ...]
    """Before the step: h, or cs and h."""
    results: tuple[Place, ...]
    """After it."""


@dataclass
class Match:
    """A cell's nodes as they were found."""

    cell: str
    kind: str
    """A class, where the nodes show it, or ""."""
    x: Place
    step: Step
    sources: dict[str, Source]
    kernels: dict[str, Source]
    """The variables that are multiplied with, by their names."""
    sizes: tuple[int, ...]
    """I, and the size of each state."""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> Place:
        """Its last node."""
        return self.step.end


@dataclass
class Operand:
    """What is multiplied, with the part of a kernel for it."""

    place: Place
    kernel: Piece
    rows: str = "all"
    """``"first"`` and ``"last"`` are beside each other in one product, and share the kernel's rows."""

    @property
    def key(self) -> tuple[object, ...]:
        """What it is in other steps, too."""
        return self.kernel.key, self.rows

    def piece(self, hidden: int, is_state: bool) -> Piece:
        """The rows of a kernel for the state, of `hidden` units, or for x."""
        count = self.kernel.shape[0]
        if self.rows == "all":
            return self.kernel
        size = hidden if is_state else count - hidden
        if not 0 < size < count:
            raise Unknown(f"{self.kernel.source.name} of {count} rows, beside {hidden} units")
        return self.kernel.rows(0, size) if self.rows == "first" else self.kernel.rows(count - size, count)


class Candidate:
    """The nodes of a cell, of whose operands it may not be known yet which is the state."""

    sure = True
    """Whether the nodes alone tell that it is a cell; else it is one only where it reads what it gave before."""
    bare = False
    """Whether there may be more behind its last node that belongs to it, an activation or a clip."""
    inside: Place | None = None
    """The last node of another candidate that this one has in it."""

    def __init__(
        self, end: Place, kernels: dict[str, Source], operands: Sequence[Operand], form: tuple[object, ...] = ()
    ) -> None:
        self.end, self.kernels = end, kernels
        self.operands = operands
        """Those that may be the state."""
        self.key = type(self), *kernels, *form
        """What all steps of a cell have in common."""

    def by_itself(self) -> int | None:
        """The number of the operand that is the state, if the shapes of the kernels or their names tell."""
        raise NotImplementedError

    def step(self, state: int) -> Step:
        """What it is among other steps, with the state being the operand of this number."""
        raise NotImplementedError

    def match(self, state: int) -> Match:
        """With the state being the operand of this number."""
        raise NotImplementedError


class Told(Candidate):
    """A cell whose nodes tell its operands apart."""

    def __init__(self, match: Match) -> None:
        super().__init__(match.end, match.kernels, ())
        self._match = match

    def by_itself(self) -> int:
        return 0

    def step(self, state: int) -> Step:
        return self._match.step

    def match(self, state: int) -> Match:
        return self._match


def operands_of(sums: Sums, gate: Sum) -> list[Operand]:
    """What is multiplied with which rows."""
    found = []
    for operand, kernel in gate.products:
        if sums.op(operand) == "ConcatV2":
            node, inputs = sums.made(operand)
            if len(inputs) != 3:
                count = len(inputs) - 1
                raise Variant(f"the node {node.name!r} joins {count} arrays; a cell joins its input and its state")
            if (axis := sums.reader.number(inputs[2])) not in (1, -1):
                raise Variant(f"the node {node.name!r} joins rows, along the axis {axis}; a cell joins columns")
            found += [Operand(inputs[0], kernel, "first"), Operand(inputs[1], kernel, "last")]
        else:
            found.append(Operand(operand, kernel))
    return found


def kernels_of(operands: Iterable[Sequence[Operand]]) -> dict[str, Source]:
    return {each.kernel.source.name: each.kernel.source for group in operands for each in group}


def biases(gates: Sequence[Sum], hidden: int, dtype: str) -> Source:
    """Of some gates, beside each other; several of a gate are added."""
    counts = {len(gate.biases) for gate in gates}
    if len(counts) != 1:
        raise Variant("only some of its gates have a bias")
    if not counts.pop():
        return zeros(len(gates) * hidden, dtype)
    rows = zip(*(sorted(gate.biases, key=lambda piece: str(piece.key)) for gate in gates), strict=True)
    if any(piece.shape != (hidden,) for gate in gates for piece in gate.biases):
        raise Variant("its biases are of another size than its gates")
    return added([joined([row]) for row in rows])


def gates_of(found: Mapping[str, Gate], end: Place) -> dict[str, Sum]:
    """The sums of a cell's gates, which must have one activation."""
    activations = {name: shown(gate.activation) for name, gate in found.items()}
    if len({*activations.values()}) > 1:
        several = ", ".join(f"{name} a {activation}" for name, activation in activations.items())
        said = f"the gates of the node {end.name!r} have different activations, {several}"
        raise Variant(f"{said}; layers have one for all of them")
    return {name: gate.sum for name, gate in found.items()}


def with_activations(activation: Activation, recurrent: Activation) -> dict[str, Any]:
    """Those of a layer that are not its defaults."""
    return dict(unusual({"activation": activation, "recurrent_activation": recurrent}))


def shown(activation: Activation) -> str:
    return (
        activation if isinstance(activation, str) else f"{activation[0]}({', '.join(f'{a:g}' for a in activation[1:])})"
    )


def both(pair: tuple[Place, Place]) -> Iterator[tuple[Place, Place]]:
    """A pair in either order."""
    yield pair
    yield pair[1], pair[0]


# ------------------------------------------------------------------------------------------------------------- refusals
def vague(text: str) -> Variant:
    """A variant that other nodes may show better."""
    variant = Variant(text)
    variant.vague = True
    return variant


def said(node: Node) -> str:
    return f"the node {node.name!r}, which is a {node.op},"


def stranger(sums: Sums, place: Place, where: str) -> Variant:
    """Something is added that the cells do not have there."""
    node = sums.reader.node(sums.reader.past(place))
    what = f"the argument {place.name!r}" if node is None else said(node)
    return vague(f"{what} is added to {where}; the block cells have no such thing")
