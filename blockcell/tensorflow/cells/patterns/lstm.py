"""The patterns of an LSTM, with a projection or without, backwards from its last node."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from ....activations import Activation
from ....optable import COUPLED_GATES, GATE_ORDERS
from ..graph.activations import LINEAR, Activated, activated, clipped, described
from ..graph.graph_reader import Place, Unknown
from ..weights.gate_sums import Gate, Other, Sum, Sums
from ..weights.weight_slices import Piece, joined
from .pattern import (
    Candidate,
    Match,
    Step,
    Variant,
    biases,
    both,
    gates_of,
    kernels_of,
    operands_of,
    shown,
    stranger,
    vague,
    with_activations,
)


class _Cell(NamedTuple):
    """The nodes between the products and the cell state."""

    cs: Place
    activation: Activation
    """What the cell state goes through behind it."""
    clip: float
    terms: tuple[Place, Place]
    """What is added up to the cell state: products."""


class _Terms(NamedTuple):
    """The factors of what is added up to the cell state."""

    i: Gate | None
    """None where it is 1 - f."""
    f: Gate
    ci: Gate
    cs_prev: Place


class Lstm(Candidate):
    """The nodes of an LSTM whose two operands are not yet told apart: which is x, and which the state?"""

    def __init__(
        self, sums: Sums, end: Place, gates: dict[str, Sum], cell: _Cell, cs_prev: Place, recurrent: Activation,
        diagonals: dict[str, Piece],
    ) -> None:  # fmt: skip
        self._gates, self._cs_prev, self._cell, self._diagonals = gates, cs_prev, cell, diagonals
        self._activations = with_activations(cell.activation, recurrent)
        self._by_gate = {name: operands_of(sums, gate) for name, gate in gates.items()}
        first = self._by_gate["ci"]
        if any(len(each) != 2 for each in self._by_gate.values()):
            raise Other
        for each in self._by_gate.values():
            if not sums.reader.same(each[0].place, first[0].place):
                each.reverse()
            pairs = zip(each, first, strict=True)
            if not all(sums.reader.same(a.place, b.place) and a.rows == b.rows for a, b in pairs):
                raise Other if cell.activation == LINEAR else Variant("its gates have different inputs")
        form = [(name, *(operand.key for operand in self._by_gate[name])) for name in sorted(gates)]
        super().__init__(end, kernels_of(self._by_gate.values()), first, (*form,))
        self.sure = cell.activation != LINEAR  # which may be any gate that is applied to a cell state
        self._hidden = first[0].kernel.shape[1]
        self._output = self._hidden
        self._projection: dict[str, Piece] = {}
        self._proj_clip = 0.0
        self._joined = first[0].rows != "all"
        """Whether x and state are beside each other, x first."""

    def projected(self, end: Place, kernel: Piece, clip: float) -> None:
        """Make it one with a projection, whose last node is another one."""
        if kernel.shape[:1] != (self._hidden,):
            raise Other
        self.inside, self.end = self.end, end
        self.kernels[kernel.source.name] = kernel.source
        self.key = *self.key, kernel.key, clip
        self._projection, self._proj_clip, self._output = {"w_p": kernel}, clip, kernel.shape[1]
        self.sure, self.bare = False, not clip  # it may be a dense layer

    def by_itself(self) -> int | None:
        named = self._projection and self._projection["w_p"].source.name.endswith("/projection/kernel")
        if not (self.sure or named):
            return None
        if self._joined:
            return 1
        fits = [k for k, each in enumerate(self.operands) if each.kernel.shape[0] == self._output]
        return fits[0] if len(fits) == 1 else None

    def step(self, state: int) -> Step:
        return Step(self.end, (self._cs_prev, self.operands[state].place), (self._cell.cs, self.end))

    def match(self, state: int) -> Match:
        coupled = "i" not in self._gates
        order = "icfo" if coupled else self._order()
        gates = COUPLED_GATES if coupled else GATE_ORDERS[order]
        parts = {name: (self._by_gate[name][1 - state], self._by_gate[name][state]) for name in gates}
        above = [[parts[name][k].piece(self._output, k == 1) for name in gates] for k in (0, 1)]
        if any(piece.shape[1] != self._hidden for row in above for piece in row):
            raise Variant("its gates are of different sizes")
        if any(len({piece.key for piece in row}) != len(gates) for row in above):
            raise Variant("two of its gates have the same weights")
        if any(piece.shape[0] != self._output for piece in above[1]):
            raise Variant(f"its state is of another size than its gates, {above[1][0].shape[0]} and {self._output}")
        sources = {"w": joined(above)}
        sources |= {role: joined([[piece]]) for role, piece in self._diagonals.items()}
        sources["b"] = biases([self._gates[name] for name in gates], self._hidden, sources["w"].dtype)
        sources |= {role: joined([[piece]]) for role, piece in self._projection.items()}
        attributes = {
            "forget_bias": self._gates["f"].constant,
            "cell_clip": self._cell.clip,
            "use_peephole": bool(self._diagonals),
            **({"proj_clip": self._proj_clip} if self._projection else {}),
            **({"coupled": True} if coupled else {"gate_order": order}),
            **self._activations,
        }
        kind = "" if self._joined else "Keras LSTM"
        sizes = above[0][0].shape[0], self._hidden, self._output
        return Match("LSTM", kind, parts["ci"][0].place, self.step(state), sources, self.kernels, sizes, attributes)

    def _order(self) -> str:
        """The order that the gates have in the kernel, if it is one that layers have."""
        starts: dict[str, tuple[str, int]] = {}
        for name, operands in self._by_gate.items():
            starts[name] = operands[0].kernel.source.name, operands[0].kernel.ranges[-1][0]
        found = tuple(sorted(starts, key=lambda name: starts[name]))
        one = len({source for source, _ in starts.values()}) == 1
        return next((key for key, gates in GATE_ORDERS.items() if one and gates == found), "icfo")


def lstm(sums: Sums, end: Place) -> Lstm:
    """From h = r(o) * a(cs), with cs = r(f) * cs_prev + r(i) * a(ci), or with 1 - r(f) in place of r(i).

    r and a are activations.
    """
    for out, co in both(sums.pair(end, "Mul")):
        cell = _cell(sums, co)
        if cell is not None and (o := sums.gate(out)) is not None:
            terms = _terms(sums, cell, o.activation)
            every = {"i": terms.i, "f": terms.f, "o": o}
            gates = gates_of({name: gate for name, gate in every.items() if gate is not None}, end)
            return _lstm_of(sums, end, gates | {"ci": terms.ci.sum}, cell, terms.cs_prev, o.activation)
    raise Other


def projected(sums: Sums, end: Place) -> Lstm:
    """From h = (r(o) * a(cs)) @ w_p, which may be clipped."""
    clip = clipped(sums.reader, end)
    node, inputs = sums.made(end if clip is None else clip[0], "MatMul")
    if len(inputs) != 2 or node.attrs.get("transpose_a") or node.attrs.get("transpose_b"):
        raise Other
    kernel = sums.piece(inputs[1])
    if len(kernel.shape) != 2:
        raise Other
    found = lstm(sums, sums.reader.past(inputs[0]))
    found.projected(end, kernel, _bound(sums, end, clip))
    return found


def _cell(sums: Sums, co: Place) -> _Cell | None:
    """The cell state that a value is the activation of, if its form is that of one."""
    found = activated(sums.reader, co)
    for activation, cs in [*([] if found is None else [(found.activation, _inner(sums, found))]), (LINEAR, co)]:
        with suppress(Other, Unknown):
            clip = clipped(sums.reader, cs)
            terms = sums.pair(cs if clip is None else clip[0], "Add")
            if all(sums.op(each) == "Mul" for each in terms):
                return _Cell(cs, activation, _bound(sums, cs, clip), terms)
    return None


def _inner(sums: Sums, found: Activated) -> Place:
    """What an activation is applied to, without the number that it adds itself."""
    if found.added:
        with suppress(Other, Unknown):
            for value, number in both(sums.pair(found.inner, "Add")):
                with suppress(Unknown):
                    if sums.reader.value(number) == found.added:
                        return value
    return found.inner


def _terms(sums: Sums, cell: _Cell, recurrent: Activation) -> _Terms:
    """The factors of a cell state."""
    pairs = [sums.pair(each, "Mul") for each in cell.terms]
    found: list[_Terms] = []
    gates = {place: sums.gate(place) for pair in pairs for place in pair}
    for forgotten, new in (pairs, pairs[::-1]):
        for i, ci in both(new):
            for f, cs_prev in both(forgotten):
                forget, candidate = gates[f], gates[ci]
                if forget is None or candidate is None:
                    continue
                coupled = _is_rest(sums, i, f)
                if (coupled or gates[i] is not None) and candidate.activation == cell.activation:
                    found.append(_Terms(None if coupled else gates[i], forget, candidate, cs_prev))
    fits = [each for each in found if {gate.activation for gate in each[:2] if gate is not None} == {recurrent}]
    if fits:
        return min(fits, key=lambda each: gates.get(each.cs_prev) is not None)
    if found and cell.activation != LINEAR:
        return found[0]  # gates_of says what is wrong
    raise _changed(sums, cell, [place for pair in pairs for place in pair], gates)


def _is_rest(sums: Sums, place: Place, gate: Place) -> bool:
    """Whether it is 1 minus a gate."""
    try:
        one, taken = sums.pair(place, "Sub")
        return sums.reader.same(taken, gate) and sums.reader.value(one) == 1
    except (Other, Unknown):
        return False


def _changed(sums: Sums, cell: _Cell, factors: list[Place], gates: dict[Place, Gate | None]) -> Variant | Other:
    """Why what is added up to the cell state is not r(f) * cs + r(i) * a(ci)."""
    known = [gates[place] for place in factors]
    if not any(gate is not None and gate.activation != LINEAR for gate in known) or cell.activation == LINEAR:
        return Other()
    for place in factors:
        if what := described(sums.reader, place):
            return Variant(f"{what}, which is no activation of layers")
    others = {shown(gate.activation) for gate in known if gate is not None}
    if len([gate for gate in known if gate is not None]) >= 3:
        several = " and ".join(sorted(others))
        state = f"the cell state, the node {cell.cs.name!r},"
        said = f"{state} goes through a {shown(cell.activation)}, and what is added up to it through {several}"
        return Variant(f"{said}; layers have one activation for the candidate and the cell state")
    return vague(
        f"its cell state is not what the block cells have, sigmoid(f) * cs + sigmoid(i) * tanh(ci): it is the node"
        f" {cell.cs.name!r}"
    )


def _lstm_of(sums: Sums, end: Place, gates: dict[str, Sum], cell: _Cell, cs_prev: Place, recurrent: Activation) -> Lstm:
    diagonals: dict[str, Piece] = {}
    for name, gate in gates.items():
        if gate.others and name != "ci":
            diagonals[f"wc{name}"] = _diagonal(sums, gate, cell.cs if name == "o" else cs_prev)
        if gate.others:
            raise stranger(sums, gate.others[0], f"the gate {name}" if name != "ci" else "the candidate")
        if gate.constant and name != "f":
            raise Variant(f"a number, {gate.constant:g}, is added to {name}; the block cells add one to f")
    every = [f"wc{name}" for name in ("i", "f", "o") if name in gates]
    if diagonals and len(diagonals) < len(every):
        raise Variant(f"it has only {len(diagonals)} of the {len(every)} peephole weights")
    found = {role: diagonals[role] for role in every if role in diagonals}
    return Lstm(sums, end, gates, cell, cs_prev, recurrent, found)


def _diagonal(sums: Sums, gate: Sum, state: Place) -> Piece:
    """The weights of a peephole."""
    for k, place in enumerate(gate.others):
        if sums.op(place) == "Mul":
            for one, other in both(sums.pair(place, "Mul")):
                if sums.reader.same(other, state):
                    del gate.others[k]
                    piece = sums.piece(one)
                    if len(piece.shape) != 1:
                        raise Variant(f"its peephole weights, {piece.source.name}, are no vector")
                    return piece
    raise stranger(sums, gate.others[0], "a gate")


def _bound(sums: Sums, place: Place, clip: tuple[Place, float, float] | None) -> float:
    """At what something is clipped symmetrically; 0 if it is not clipped."""
    if clip is None:
        return 0.0
    _, low, high = clip
    if high <= 0 or low != -high:
        node, _ = sums.made(place)
        raise Variant(f"the node {node.name!r} clips to {low:g} to {high:g}; the block cells clip symmetrically")
    return high
