"""What the patterns of an LSTM, a GRU and an RNN share: candidates, matches, operands and refusals.

In come the sums of a step's gates; out go the operands, biases and activations that a pattern is checked by. A match
understands every node on its way, but not whether shapes fit, as `StepProgram` does. A `Refusal` is raised for nodes
that are surely a cell that no layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....activations import Activation, unusual
from ..cell.cell_definition import CellInGraph
from ..cell.found_cell import format_attribute
from ..graph.graph_reader import Place, UnknownValue
from ..weights.gate_sums import Gate, GateSum, GateSums, NoMatch, Operand
from ..weights.weight_slices import WeightSource, add_vectors, join_slices, zero_bias


class Refusal(Exception):
    """The reason why nodes are a cell that no layer computes.

    A weak reason gives way to what other nodes show. With `states`, it is a cell only if its last node gives one.
    """

    def __init__(self, reason: str, *, is_weak: bool = False, states: tuple[Place, ...] = ()) -> None:
        super().__init__(reason)
        self.is_weak, self.states = is_weak, states


@dataclass
class CellMatch:
    """The nodes of a cell's step, all of which are understood."""

    layer_kind: str
    """"LSTM", "GRU" or "RNN"."""
    tf_class: str
    """The class of TensorFlow or Keras, if the nodes show it, else ""."""
    step: CellInGraph
    sources: dict[str, WeightSource]
    kernels: dict[str, WeightSource]
    """The variables and constants of its products, by their names."""
    sizes: tuple[int, ...]
    """I, and the size of each state."""
    attributes: dict[str, Any] = field(default_factory=dict)


class CellCandidate:
    """The nodes of a step, of whose two operands it may not be known yet which is the state and which is x."""

    proven_by_nodes = True
    """Whether the nodes alone prove a cell; else the state must come from a step before, or the kernels have names."""
    may_be_followed = False
    """Whether a clip behind its last node may belong to it."""
    unprojected_end: Place | None = None
    """The last node before a projection, which is the last one of a candidate without projection, too."""

    def __init__(
        self, end: Place, kernels: dict[str, WeightSource], operands: Sequence[Operand], form: tuple[object, ...] = ()
    ) -> None:
        self.end, self.kernels = end, kernels
        self.operands = operands
        """The operands that may be the state."""
        self.key = type(self), *kernels, *form
        """What all steps of a cell have in common."""

    def guess_state(self) -> int | None:
        """Return the number of the operand that is the state, if the shapes of the kernels or their names tell."""
        raise NotImplementedError

    def match(self, state: int) -> CellMatch:
        """Match the nodes, of which the state is the operand of this number; raise `Refusal` for another cell."""
        raise NotImplementedError


class UnambiguousCell(CellCandidate):
    """A match whose nodes tell its operands apart."""

    def __init__(self, match: CellMatch) -> None:
        super().__init__(match.step.h, match.kernels, ())
        self._match = match

    def guess_state(self) -> int:
        return 0

    def match(self, state: int) -> CellMatch:
        return self._match


def get_operands(sums: GateSums, gate: GateSum) -> list[Operand]:
    """List the operands of a gate, with the rows of the kernels that they are multiplied with."""
    operands = []
    for operand in gate.products:
        name, inputs = sums.reader.resolve_in_step(operand.place).name, sums.reader.inputs_of(operand.place, "ConcatV2")
        if not inputs:
            operands.append(operand)
            continue
        if len(inputs) != 3:
            raise Refusal(f"the node {name!r} joins {len(inputs) - 1} arrays; a cell joins its input and its state")
        if (axis := sums.reader.constant_integer(inputs[2])) not in (1, -1):
            raise Refusal(f"the node {name!r} joins rows, along the axis {axis}; a cell joins columns")
        operands += [operand._replace(place=inputs[0], rows="first"), operand._replace(place=inputs[1], rows="last")]
    return operands


def kernel_sources(operands: Iterable[Sequence[Operand]]) -> dict[str, WeightSource]:
    return {operand.kernel.source.name: operand.kernel.source for group in operands for operand in group}


def join_biases(gates: Sequence[GateSum], hidden: int, dtype: str) -> WeightSource:
    """Join the biases of gates; several biases of one gate are added."""
    counts = {len(gate.biases) for gate in gates}
    if len(counts) != 1:
        raise Refusal("only some of its gates have a bias")
    if not counts.pop():
        return zero_bias(len(gates) * hidden, dtype)
    rows = zip(*(sorted(gate.biases, key=lambda piece: str(piece.key)) for gate in gates), strict=True)
    return add_vectors([join_slices([row]) for row in rows])


def gate_sums(gates: Mapping[str, Gate], end: Place) -> dict[str, GateSum]:
    """Return the sums of a cell's gates, which must all have one activation."""
    activations = {name: format_attribute(gate.activation) for name, gate in gates.items()}
    if len({*activations.values()}) > 1:
        several = ", ".join(f"{name} a {activation}" for name, activation in activations.items())
        message = f"the gates of the node {end.name!r} have different activations, {several}"
        raise Refusal(f"{message}; layers have one for all of them")
    return {name: gate.sum for name, gate in gates.items()}


def activation_attributes(activation: Activation, recurrent: Activation) -> dict[str, Any]:
    """Return the arguments of a layer for activations that are not its defaults."""
    return dict(unusual({"activation": activation, "recurrent_activation": recurrent}))


def is_complement(sums: GateSums, place: Place, gate: Place) -> bool:
    """Return whether a value is 1 minus a gate."""
    try:
        minuend, subtrahend = sums.input_pair(place, "Sub")
        return sums.reader.are_same(subtrahend, gate) and sums.reader.constant_number(minuend) == 1
    except (NoMatch, UnknownValue):
        return False


def describe_node(sums: GateSums, place: Place) -> str:
    place = sums.reader.resolve_in_step(place)
    node = sums.reader.node(place)
    return f"the argument {place.name!r}" if node is None else f"the node {place.name!r}, which is a {node.op},"


def unexpected_term(sums: GateSums, place: Place, where: str) -> Refusal:
    """Make the refusal of a term that is added where the cells have none."""
    term = describe_node(sums, place)
    return Refusal(f"{term} is added to {where}; the block cells have no such thing", is_weak=True)
