"""What the patterns of an LSTM, a GRU and an RNN share: candidates, matches, operands and refusals.

In come the sums of a step's gates; out go the operands, biases and activations that a pattern is checked by. A match
understands every node on its way. A `Refusal` is raised for nodes that are surely a cell that no layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....activations import Activation, unusual
from ...graphs import Node
from ..cell.cell_definition import CellInGraph
from ..graph.graph_reader import Place, UnknownValue
from ..weights.gate_sums import Gate, GateSum, GateSums
from ..weights.weight_slices import WeightSlice, add_vectors, join_slices, zero_bias
from ..weights.weight_sources import WeightSource


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

    @property
    def end(self) -> Place:
        """The last node."""
        return self.step.h


@dataclass
class Operand:
    """The left side of a product, x or the state, and the slice of a kernel on the right side."""

    place: Place
    kernel: WeightSlice
    rows: str = "all"
    """``"first"`` and ``"last"`` are concatenated in one product, and share the rows of the kernel."""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the operand in all steps."""
        return self.kernel.key, self.rows

    def kernel_rows(self, hidden: int, is_state: bool) -> WeightSlice:
        """Return the rows of the kernel for the state, of `hidden` units, or for x."""
        row_count = self.kernel.shape[0]
        if self.rows == "all":
            return self.kernel
        size = hidden if is_state else row_count - hidden
        if not 0 < size < row_count:
            raise UnknownValue(f"{self.kernel.source.name} of {row_count} rows, beside {hidden} units")
        return self.kernel.rows(0, size) if self.rows == "first" else self.kernel.rows(row_count - size, row_count)


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

    def step(self, state: int) -> CellInGraph:
        """Return the step, whose state is the operand of this number."""
        raise NotImplementedError

    def match(self, state: int) -> CellMatch:
        """Match the nodes, of which the state is the operand of this number; raise `Refusal` for another cell."""
        raise NotImplementedError


class UnambiguousCell(CellCandidate):
    """A match whose nodes tell its operands apart."""

    def __init__(self, match: CellMatch) -> None:
        super().__init__(match.end, match.kernels, ())
        self._match = match

    def guess_state(self) -> int:
        return 0

    def step(self, state: int) -> CellInGraph:
        return self._match.step

    def match(self, state: int) -> CellMatch:
        return self._match


def get_operands(sums: GateSums, gate: GateSum) -> list[Operand]:
    """List the operands of a gate, with the rows of the kernels that they are multiplied with."""
    operands = []
    for operand, kernel in gate.products:
        if sums.op_name(operand) == "ConcatV2":
            node, inputs = sums.expect_op(operand)
            if len(inputs) != 3:
                count = len(inputs) - 1
                raise Refusal(f"the node {node.name!r} joins {count} arrays; a cell joins its input and its state")
            if (axis := sums.reader.constant_integer(inputs[2])) not in (1, -1):
                raise Refusal(f"the node {node.name!r} joins rows, along the axis {axis}; a cell joins columns")
            operands += [Operand(inputs[0], kernel, "first"), Operand(inputs[1], kernel, "last")]
        else:
            operands.append(Operand(operand, kernel))
    return operands


def kernel_sources(operands: Iterable[Sequence[Operand]]) -> dict[str, WeightSource]:
    return {operand.kernel.source.name: operand.kernel.source for group in operands for operand in group}


def check_sizes(kernels: Sequence[Sequence[WeightSlice]], hidden: int, output: int) -> None:
    """Refuse kernels of gates, for x and for the state, unless there are `hidden` units and `output` states."""
    if any(kernel.shape[1] != hidden for row in kernels for kernel in row):
        raise Refusal("its gates are of different sizes")
    if any(kernel.shape[0] != output for kernel in kernels[1]):
        raise Refusal(f"its state is of another size than its gates, {kernels[1][0].shape[0]} and {output}")


def join_biases(gates: Sequence[GateSum], hidden: int, dtype: str) -> WeightSource:
    """Join the biases of gates; several biases of one gate are added."""
    counts = {len(gate.biases) for gate in gates}
    if len(counts) != 1:
        raise Refusal("only some of its gates have a bias")
    if not counts.pop():
        return zero_bias(len(gates) * hidden, dtype)
    rows = zip(*(sorted(gate.biases, key=lambda piece: str(piece.key)) for gate in gates), strict=True)
    if any(piece.shape != (hidden,) for gate in gates for piece in gate.biases):
        raise Refusal("its biases are of another size than its gates")
    return add_vectors([join_slices([row]) for row in rows])


def gate_sums(gates: Mapping[str, Gate], end: Place) -> dict[str, GateSum]:
    """Return the sums of a cell's gates, which must all have one activation."""
    activations = {name: activation_name(gate.activation) for name, gate in gates.items()}
    if len({*activations.values()}) > 1:
        several = ", ".join(f"{name} a {activation}" for name, activation in activations.items())
        message = f"the gates of the node {end.name!r} have different activations, {several}"
        raise Refusal(f"{message}; layers have one for all of them")
    return {name: gate.sum for name, gate in gates.items()}


def activation_attributes(activation: Activation, recurrent: Activation) -> dict[str, Any]:
    """Return the arguments of a layer for activations that are not its defaults."""
    return dict(unusual({"activation": activation, "recurrent_activation": recurrent}))


def activation_name(activation: Activation) -> str:
    if isinstance(activation, str):
        return activation
    return f"{activation[0]}({', '.join(f'{a:g}' for a in activation[1:])})"


def describe_node(node: Node) -> str:
    return f"the node {node.name!r}, which is a {node.op},"


def unexpected_term(sums: GateSums, place: Place, where: str) -> Refusal:
    """Make the refusal of a term that is added where the cells have none."""
    node = sums.reader.node(sums.reader.resolve_in_step(place))
    term = f"the argument {place.name!r}" if node is None else describe_node(node)
    return Refusal(f"{term} is added to {where}; the block cells have no such thing", is_weak=True)
