"""The patterns of an LSTM, with a projection or without, matched backwards from the last node of a step.

In comes a place; out goes an `LstmCandidate`, whose `match` has the weights and attributes of a layer. Gates are i, f,
o and the candidate ci; cs is the cell state, and co the cell state behind its activation.
"""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import NamedTuple

from ....activations import Activation
from ....gates import COUPLED_GATES, GATE_ORDERS
from ..cell.cell_definition import CellInGraph
from ..graph.activations import LINEAR, find_activation, find_clip
from ..graph.graph_reader import Place, UnknownValue
from ..weights.gate_sums import Gate, GateSum, GateSums, NoMatch
from ..weights.weight_slices import WeightSlice, join_slices
from .pattern import (
    CellCandidate,
    CellMatch,
    Refusal,
    activation_attributes,
    gate_sums,
    get_operands,
    is_complement,
    join_biases,
    kernel_sources,
    unexpected_term,
)


class _CellState(NamedTuple):
    """The nodes that make a cell state of products."""

    cs: Place
    activation: Activation
    """The activation of the cell state in h."""
    clip: float
    terms: tuple[Place, Place]
    """The products whose sum is the cell state."""


class _Factors(NamedTuple):
    """The factors of the two products whose sum is the cell state."""

    i: Gate | None
    """None if it is 1 - f."""
    f: Gate
    ci: Gate
    cs_prev: Place


class LstmCandidate(CellCandidate):
    """The nodes of an LSTM's step, of whose two operands it is not known yet which is x and which is h."""

    def __init__(
        self, sums: GateSums, end: Place, gates: dict[str, GateSum], cell: _CellState, cs_prev: Place,
        recurrent: Activation, diagonals: dict[str, WeightSlice],
    ) -> None:  # fmt: skip
        self._gates, self._cs_prev, self._cell, self._diagonals = gates, cs_prev, cell, diagonals
        self._activations = activation_attributes(cell.activation, recurrent)
        self._by_gate = {name: get_operands(sums, gate) for name, gate in gates.items()}
        first = self._by_gate["ci"]
        if any(len(operands) != 2 for operands in self._by_gate.values()):
            raise NoMatch
        for operands in self._by_gate.values():
            if not sums.reader.are_same(operands[0].place, first[0].place):
                operands.reverse()
            pairs = zip(operands, first, strict=True)
            if not all(sums.reader.are_same(a.place, b.place) and a.rows == b.rows for a, b in pairs):
                raise NoMatch if cell.activation == LINEAR else Refusal("its gates have different inputs")
        form = [(name, *(operand.key for operand in self._by_gate[name])) for name in sorted(gates)]
        super().__init__(end, kernel_sources(self._by_gate.values()), first, (*form,))
        self.proven_by_nodes = cell.activation != LINEAR  # without one, any gate may be applied to a cell state
        self._hidden = first[0].kernel.shape[1]
        self._output = self._hidden
        self._projection: dict[str, WeightSlice] = {}
        self._proj_clip = 0.0
        self._joined = first[0].rows != "all"
        """Whether x and h are concatenated, x first."""

    def with_projection(self, end: Place, kernel: WeightSlice, clip: float) -> LstmCandidate:
        """Return the candidate with a projection, whose last node is the last node of the step."""
        projected = copy(self)
        projected.unprojected_end, projected.end = self.end, end
        projected.kernels = self.kernels | {kernel.source.name: kernel.source}
        projected.key = *self.key, kernel.key, clip
        projected._projection, projected._proj_clip, projected._output = {"w_p": kernel}, clip, kernel.shape[1]
        projected.proven_by_nodes, projected.may_be_followed = False, not clip  # it may be a dense layer
        return projected

    def guess_state(self) -> int | None:
        named = self._projection and self._projection["w_p"].source.name.endswith("/projection/kernel")
        if not (self.proven_by_nodes or named):
            return None
        if self._joined:
            return 1
        states = [k for k, operand in enumerate(self.operands) if operand.kernel.shape[0] == self._output]
        return states[0] if len(states) == 1 else None

    def match(self, state: int) -> CellMatch:
        coupled = "i" not in self._gates
        order = "icfo" if coupled else self._order()
        gates = COUPLED_GATES if coupled else GATE_ORDERS[order]
        operands = {name: (self._by_gate[name][1 - state], self._by_gate[name][state]) for name in gates}
        kernels = [[operands[name][k].kernel_rows(self._output, k == 1) for name in gates] for k in (0, 1)]
        sources = {"w": join_slices(kernels)}
        sources |= {role: join_slices([[piece]]) for role, piece in self._diagonals.items()}
        sources["b"] = join_biases([self._gates[name] for name in gates], self._hidden, sources["w"].dtype)
        sources |= {role: join_slices([[piece]]) for role, piece in self._projection.items()}
        attributes = {
            "forget_bias": self._gates["f"].constant,
            "cell_clip": self._cell.clip,
            "use_peephole": bool(self._diagonals),
            **({"proj_clip": self._proj_clip} if self._projection else {}),
            **({"coupled": True} if coupled else {"gate_order": order}),
            **self._activations,
        }
        tf_class = "" if self._joined else "Keras LSTM"
        x, h_prev = self.operands[1 - state].place, self.operands[state].place
        step = CellInGraph(self.end.body, x, (self._cs_prev, h_prev), (self._cell.cs, self.end))
        sizes = kernels[0][0].shape[0], self._hidden, self._output
        return CellMatch("LSTM", tf_class, step, sources, self.kernels, sizes, attributes)

    def _order(self) -> str:
        """Return the order of the gates in the kernel if layers have it, else "icfo", in which they are joined."""
        starts: dict[str, tuple[str, int]] = {}
        for name, operands in self._by_gate.items():
            starts[name] = operands[0].kernel.source.name, operands[0].kernel.ranges[-1][0]
        gate_order = tuple(sorted(starts, key=lambda name: starts[name]))
        one_kernel = len({source for source, _ in starts.values()}) == 1
        return next((key for key, gates in GATE_ORDERS.items() if one_kernel and gates == gate_order), "icfo")


def match_lstm(sums: GateSums, end: Place) -> LstmCandidate:
    """Match h = r(o) * a(cs), with cs = r(f) * cs_prev + r(i) * a(ci), or with 1 - r(f) in place of r(i).

    r and a are activations.
    """
    for out, co in sums.input_orders(end, "Mul"):
        cell = _find_cell_state(sums, co)
        if cell is not None and (o := sums.read_gate(out)) is not None:
            terms = _find_factors(sums, cell, o.activation)
            gates_or_none = {"i": terms.i, "f": terms.f, "o": o}
            gates = gate_sums({name: gate for name, gate in gates_or_none.items() if gate is not None}, end)
            return _make_lstm(sums, end, gates | {"ci": terms.ci.sum}, cell, terms.cs_prev, o.activation)
    raise NoMatch


def match_projected_lstm(sums: GateSums, end: Place) -> LstmCandidate:
    """Match h = (r(o) * a(cs)) @ w_p, which may be clipped."""
    clip = find_clip(sums.reader, end)
    product = sums.read_product(end if clip is None else clip[0])
    candidate = match_lstm(sums, sums.reader.resolve_in_step(product.place))
    return candidate.with_projection(end, product.kernel, _bound(sums, end, clip))


def _find_cell_state(sums: GateSums, co: Place) -> _CellState | None:
    """Return the cell state that `co` is an activation of, if it is the sum of two products."""
    forms: list[tuple[Activation, Place]] = [(LINEAR, co)]
    if (activated := find_activation(sums.reader, co)) is not None:
        forms.insert(0, activated)
    for activation, cs in forms:
        with suppress(NoMatch, UnknownValue):
            clip = find_clip(sums.reader, cs)
            terms = sums.input_pair(cs if clip is None else clip[0], "Add")
            if all(sums.op_name(term) == "Mul" for term in terms):
                return _CellState(cs, activation, _bound(sums, cs, clip), terms)
    return None


def _find_factors(sums: GateSums, cell: _CellState, recurrent: Activation) -> _Factors:
    """Find the gates among the factors of a cell state's terms."""
    pairs = [sums.input_pair(term, "Mul") for term in cell.terms]
    readings: list[_Factors] = []
    gates = {place: sums.read_gate(place) for pair in pairs for place in pair}
    for forgotten, new in (pairs, pairs[::-1]):
        for i, ci in (new, new[::-1]):
            for f, cs_prev in (forgotten, forgotten[::-1]):
                forget, candidate = gates[f], gates[ci]
                if forget is None or candidate is None:
                    continue
                coupled = is_complement(sums, i, f)
                if (coupled or gates[i] is not None) and candidate.activation == cell.activation:
                    readings.append(_Factors(None if coupled else gates[i], forget, candidate, cs_prev))
    fitting = [reading for reading in readings if {gate.activation for gate in reading[:2] if gate} == {recurrent}]
    if fitting:
        return min(fitting, key=lambda factors: gates.get(factors.cs_prev) is not None)
    if readings and cell.activation != LINEAR:
        return readings[0]  # gate_sums refuses it
    if cell.activation == LINEAR or {gate.activation for gate in gates.values() if gate is not None} <= {LINEAR}:
        raise NoMatch
    reason = "its cell state is not what the block cells have, sigmoid(f) * cs + sigmoid(i) * tanh(ci): it is the node"
    raise Refusal(f"{reason} {cell.cs.name!r}", is_weak=True)


def _make_lstm(
    sums: GateSums, end: Place, gates: dict[str, GateSum], cell: _CellState, cs_prev: Place, recurrent: Activation
) -> LstmCandidate:
    """Make the candidate of gates, after peephole weights are taken out of their other terms."""
    diagonals: dict[str, WeightSlice] = {}
    for name, gate in gates.items():
        if gate.other_terms and name != "ci":
            diagonals[f"wc{name}"] = _find_peephole(sums, gate, cell.cs if name == "o" else cs_prev)
        if gate.other_terms:
            raise unexpected_term(sums, gate.other_terms[0], f"the gate {name}" if name != "ci" else "the candidate")
        if gate.constant and name != "f":
            raise Refusal(f"a number, {gate.constant:g}, is added to {name}; the block cells add one to f")
    roles = [f"wc{name}" for name in ("i", "f", "o") if name in gates]
    if diagonals and len(diagonals) < len(roles):
        raise Refusal(f"it has only {len(diagonals)} of the {len(roles)} peephole weights")
    ordered = {role: diagonals[role] for role in roles if role in diagonals}
    return LstmCandidate(sums, end, gates, cell, cs_prev, recurrent, ordered)


def _find_peephole(sums: GateSums, gate: GateSum, state: Place) -> WeightSlice:
    """Take the product with a state out of a gate's terms, and return its peephole weights."""
    for k, place in enumerate(gate.other_terms):
        if sums.op_name(place) == "Mul":
            for vector, operand in sums.input_orders(place, "Mul"):
                if sums.reader.are_same(operand, state):
                    del gate.other_terms[k]
                    return sums.sources.slice(vector)
    raise unexpected_term(sums, gate.other_terms[0], "a gate")


def _bound(sums: GateSums, place: Place, clip: tuple[Place, float, float] | None) -> float:
    """Return the bound of a symmetric clip; 0 if there is no clip."""
    if clip is None:
        return 0.0
    _, low, high = clip
    if high <= 0 or low != -high:
        name = sums.reader.resolve_in_step(place).name
        raise Refusal(f"the node {name!r} clips to {low:g} to {high:g}; the block cells clip symmetrically")
    return high
