"""The pattern of a plain RNN, backwards from its last node.

The nodes alone tell nothing: any dense layer of two inputs has them. It is a cell where one of these is what the same
nodes, or those of another step with the same weights, gave before.
"""

from __future__ import annotations

import re

from ..graph.activations import LINEAR, described
from ..graph.graph_reader import Place
from ..weights.gate_sums import Gate, Other, Sums
from ..weights.weight_slices import joined
from .pattern import Candidate, Match, Step, Variant, biases, kernels_of, operands_of, shown

_NAMED = re.compile(r"(\A|/)(basic_)?rnn_cell(_\d+)?/(kernel|weights|Linear/Matrix)\Z")
_KERAS = "recurrent_kernel"


class Rnn(Candidate):
    """The nodes of a plain RNN whose two operands are not yet told apart."""

    sure = False

    def __init__(self, sums: Sums, end: Place, gate: Gate) -> None:
        self._gate = gate
        operands = operands_of(sums, gate.sum)
        if len(operands) != 2 or gate.sum.others or gate.sum.constant:
            raise Other
        form = shown(gate.activation), *sorted(str(piece.key) for piece in gate.sum.biases)
        super().__init__(end, kernels_of([operands]), operands, form)
        self._hidden = operands[0].kernel.shape[1]
        self._joined = operands[0].rows != "all"
        self.bare = gate.activation == LINEAR

    def by_itself(self) -> int | None:
        names = [each.kernel.source.name for each in self.operands]
        if any(each.kernel.shape != each.kernel.source.shape for each in self.operands):
            return None
        if self._joined:
            return 1 if _NAMED.search(names[0]) else None
        square = [each.kernel.shape == (self._hidden, self._hidden) for each in self.operands]
        fits = [k for k, name in enumerate(names) if name.rpartition("/")[2] == _KERAS and square[k]]
        return fits[0] if len(fits) == 1 else None

    def step(self, state: int) -> Step:
        return Step(self.end, (self.operands[state].place,), (self.end,))

    def match(self, state: int) -> Match:
        x, h = self.operands[1 - state], self.operands[state]
        above = [[x.piece(self._hidden, False)], [h.piece(self._hidden, True)]]
        if h.kernel.shape[1] != x.kernel.shape[1] or above[1][0].shape[0] != self._hidden:
            raise Variant(f"its state is of another size than what it gives, {above[1][0].shape[0]} and {self._hidden}")
        sources = {"w": joined(above)}
        sources["b"] = biases([self._gate.sum], self._hidden, sources["w"].dtype)
        kind = "" if self._joined else "Keras SimpleRNN"
        attributes = {"activation": self._gate.activation}
        sizes = above[0][0].shape[0], self._hidden
        return Match("RNN", kind, x.place, self.step(state), sources, self.kernels, sizes, attributes)


def rnn(sums: Sums, end: Place) -> Rnn:
    """From h = a(x @ w_x + h_prev @ w_h + b); a is an activation."""
    gate = sums.gate(end)
    if gate is not None:
        return Rnn(sums, end, gate)
    if what := described(sums.reader, end):
        for inner in sums.reader.given(sums.reader.past(end)):
            gate = sums.gate(inner)
            if gate is not None:
                variant = Variant(f"{what}, which is no activation of layers")
                variant.states = tuple(each.place for each in operands_of(sums, gate.sum))
                raise variant
    raise Other
