"""The pattern of a plain RNN, matched backwards from the last node of a step.

In comes a place; out goes an `RnnCandidate`. Its nodes alone do not tell that it is a cell, as any dense layer of two
inputs has the same. It is a cell if the same nodes, or another step with the same weights, gave one of the inputs.
"""

from __future__ import annotations

import re

from ..cell.cell_definition import CellInGraph
from ..cell.found_cell import format_attribute
from ..graph.activations import LINEAR
from ..graph.graph_reader import Place
from ..weights.gate_sums import Gate, GateSums, NoMatch
from ..weights.weight_slices import join_slices
from .pattern import (
    CellCandidate,
    CellMatch,
    Refusal,
    get_operands,
    join_biases,
    kernel_sources,
)

_NAMED = re.compile(r"(\A|/)(basic_)?rnn_cell(_\d+)?/(kernel|weights|Linear/Matrix)\Z")
_KERAS = "recurrent_kernel"


class RnnCandidate(CellCandidate):
    """The nodes of an RNN's step, of whose two operands it is not known yet which is x and which is h."""

    proven_by_nodes = False

    def __init__(self, sums: GateSums, end: Place, gate: Gate) -> None:
        self._gate = gate
        operands = get_operands(sums, gate.sum)
        if len(operands) != 2 or gate.sum.other_terms or gate.sum.constant:
            raise NoMatch
        form = format_attribute(gate.activation), *sorted(str(piece.key) for piece in gate.sum.biases)
        super().__init__(end, kernel_sources([operands]), operands, form)
        self._hidden = operands[0].kernel.shape[1]
        self._joined = operands[0].rows != "all"

    def guess_state(self) -> int | None:
        names = [operand.kernel.source.name for operand in self.operands]
        is_sliced = any(operand.kernel.shape != operand.kernel.source.shape for operand in self.operands)
        if is_sliced or self._gate.activation == LINEAR:  # what follows may be the activation
            return None
        if self._joined:
            return 1 if _NAMED.search(names[0]) else None
        square = [operand.kernel.shape == (self._hidden, self._hidden) for operand in self.operands]
        states = [k for k, name in enumerate(names) if name.rpartition("/")[2] == _KERAS and square[k]]
        return states[0] if len(states) == 1 else None

    def match(self, state: int) -> CellMatch:
        x, h = self.operands[1 - state], self.operands[state]
        kernels = [[x.kernel_rows(self._hidden, False)], [h.kernel_rows(self._hidden, True)]]
        if kernels[1][0].shape[0] != self._hidden:
            raise Refusal(f"its state is of another size than its units, {kernels[1][0].shape[0]} and {self._hidden}")
        sources = {"w": join_slices(kernels)}
        sources["b"] = join_biases([self._gate.sum], self._hidden, sources["w"].dtype)
        tf_class = "" if self._joined else "Keras SimpleRNN"
        attributes = {"activation": self._gate.activation}
        step = CellInGraph(self.end.body, x.place, (h.place,), (self.end,))
        sizes = kernels[0][0].shape[0], self._hidden
        return CellMatch("RNN", tf_class, step, sources, self.kernels, sizes, attributes)


def match_rnn(sums: GateSums, end: Place) -> RnnCandidate:
    """Match h = a(x @ w_x + h_prev @ w_h + b); a is an activation."""
    gate = sums.read_gate(end)
    if gate is not None:
        return RnnCandidate(sums, end, gate)
    op, inputs = sums.reader.op(end), sums.reader.inputs_at(end)
    for inner in inputs if op.refusal else ():
        gate = sums.read_gate(inner)
        if gate is not None:
            states = tuple(operand.place for operand in get_operands(sums, gate.sum))
            raise Refusal(f"the node {end.name!r} is a {op.name}, which is no activation of layers", states=states)
    raise NoMatch
