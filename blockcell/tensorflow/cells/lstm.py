"""The pattern of an LSTM, backwards from its last node."""

from __future__ import annotations

from ...optable import GATE_ORDERS
from ..graphs import Node
from .match import Candidate, Match, Step, Variant, biases, both, kernels_of, operands_of, stranger, vague
from .ops import ACTIVATION, CLIP, op_of
from .pieces import Piece, joined
from .reader import Place, Unknown
from .sums import Other, Sum, Sums


class Lstm(Candidate):
    """The nodes of an LSTM whose two operands are not yet told apart: which is x, and which the state?"""

    def __init__(
        self, sums: Sums, end: Place, gates: dict[str, Sum], cs_prev: Place, cs: Place, clip: float,
        diagonals: dict[str, Piece],
    ) -> None:  # fmt: skip
        self._gates, self._cs_prev, self._cs, self._clip, self._diagonals = gates, cs_prev, cs, clip, diagonals
        self._by_gate = {name: operands_of(sums, gate) for name, gate in gates.items()}
        first = self._by_gate["i"]
        if any(len(each) != 2 for each in self._by_gate.values()):
            raise Other
        for each in self._by_gate.values():
            if not sums.reader.same(each[0].place, first[0].place):
                each.reverse()
            pairs = zip(each, first, strict=True)
            if not all(sums.reader.same(a.place, b.place) and a.rows == b.rows for a, b in pairs):
                raise Variant("its gates have different inputs")
        super().__init__(end, kernels_of(self._by_gate.values()), first)
        self._hidden = first[0].kernel.shape[1]
        self._joined = first[0].rows != "all"
        """Whether x and state are beside each other, x first."""

    def by_shape(self) -> int | None:
        if self._joined:
            return 1
        fits = [k for k, each in enumerate(self.operands) if each.kernel.shape[0] == self._hidden]
        return fits[0] if len(fits) == 1 else None

    def step(self, state: int) -> Step:
        return Step(self.end, (self._cs_prev, self.operands[state].place), (self._cs, self.end))

    def match(self, state: int) -> Match:
        order = self._order()
        gates = GATE_ORDERS[order]
        parts = {name: (self._by_gate[name][1 - state], self._by_gate[name][state]) for name in gates}
        above = [[parts[name][k].piece(self._hidden, k == 1) for name in gates] for k in (0, 1)]
        if any(piece.shape[1] != self._hidden for row in above for piece in row):
            raise Variant("its gates are of different sizes")
        if len({piece.key for piece in above[0]}) != 4 or len({piece.key for piece in above[1]}) != 4:
            raise Variant("two of its gates have the same weights")
        if any(piece.shape[0] != self._hidden for piece in above[1]):
            raise Variant(f"its state is of another size than its gates, {above[1][0].shape[0]} and {self._hidden}")
        sources = {"w": joined(above)}
        sources |= {role: joined([[piece]]) for role, piece in self._diagonals.items()}
        sources["b"] = biases([self._gates[name] for name in gates], self._hidden, sources["w"].dtype)
        attributes = {
            "forget_bias": self._gates["f"].constant,
            "cell_clip": self._clip,
            "use_peephole": bool(self._diagonals),
            "gate_order": order,
        }
        kind = "" if self._joined else "Keras LSTM"
        sizes = above[0][0].shape[0], self._hidden
        return Match("LSTM", kind, parts["i"][0].place, self.step(state), sources, self.kernels, sizes, attributes)

    def _order(self) -> str:
        """The order that the gates have in the kernel, if it is one that layers have."""
        starts: dict[str, tuple[str, int]] = {}
        for name, operands in self._by_gate.items():
            starts[name] = operands[0].kernel.source.name, operands[0].kernel.ranges[-1][0]
        found = tuple(sorted(starts, key=lambda name: starts[name]))
        one = len({source for source, _ in starts.values()}) == 1
        return next((key for key, gates in GATE_ORDERS.items() if one and gates == found), "icfo")


def lstm(sums: Sums, end: Place) -> Lstm:
    """From h = sigmoid(o) * tanh(cs), with cs = sigmoid(f) * cs_prev + sigmoid(i) * tanh(ci)."""
    for out, co in both(sums.pair(end, "Mul")):
        if sums.op(co) == "Tanh" and sums.is_activated(out, "Sigmoid"):
            break
    else:
        raise Other
    cs = sums.only(co, "Tanh")
    total, clip = _clipped(sums, cs)
    forget_product, input_product = sums.pair(total, "Add")
    pairs = [sums.pair(each, "Mul") for each in (forget_product, input_product)]
    for forgotten, new in (pairs, pairs[::-1]):
        for i, ci in both(new):
            for f, cs_prev in both(forgotten):
                if sums.op(ci) == "Tanh" and sums.is_activated(i, "Sigmoid") and sums.is_activated(f, "Sigmoid"):
                    return _lstm_of(sums, end, {"i": i, "f": f, "o": out, "ci": ci}, cs_prev, cs, clip)
    raise _changed(sums, [place for pair in pairs for place in pair])


def _changed(sums: Sums, factors: list[Place]) -> Variant | Other:
    """Why what is added up to the cell state is not sigmoid(f) * cs + sigmoid(i) * tanh(ci)."""
    if not any(sums.is_activated(each, "Sigmoid") for each in factors):
        return Other()
    for each in factors:
        if sums.op(each) == "Sub":
            node, (one, gate) = sums.made(each)[0], sums.pair(each, "Sub")
            if sums.is_activated(gate, "Sigmoid") and _is_one(sums, one):
                return Variant(
                    f"its input gate is coupled to its forget gate by the node {node.name!r}; the gates of the block"
                    " cells are independent"
                )
    for each in factors:
        made: Node | None = sums.reader.node(sums.reader.past(each))
        if made is not None and op_of(made).shows in (ACTIVATION, CLIP):
            return Variant(f"the node {made.name!r} is a {made.op}, where the block cells have a sigmoid or a tanh")
    return vague("its cell state is not what the block cells have, sigmoid(f) * cs + sigmoid(i) * tanh(ci)")


def _is_one(sums: Sums, place: Place) -> bool:
    try:
        return sums.reader.value(place) == 1
    except Unknown:
        return False


def _lstm_of(sums: Sums, end: Place, places: dict[str, Place], cs_prev: Place, cs: Place, clip: float) -> Lstm:
    gates = {name: sums.activated(place, "Tanh" if name == "ci" else "Sigmoid") for name, place in places.items()}
    diagonals: dict[str, Piece] = {}
    for name, gate in gates.items():
        if gate.others and name != "ci":
            state = cs if name == "o" else cs_prev
            diagonals[f"wc{name}"] = _diagonal(sums, gate, state)
        if gate.others:
            raise stranger(sums, gate.others[0], f"the gate {name}" if name != "ci" else "the candidate")
        if gate.constant and name != "f":
            raise Variant(f"a number, {gate.constant:g}, is added to {name}; the block cells add one to f")
        if not gate.products:
            raise Other
    if len(diagonals) % 3:
        raise Variant(f"it has only {len(diagonals)} of the three peephole weights")
    order = [role for role in ("wci", "wcf", "wco") if role in diagonals]
    return Lstm(sums, end, gates, cs_prev, cs, clip, {role: diagonals[role] for role in order})


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


def _clipped(sums: Sums, place: Place) -> tuple[Place, float]:
    """What is clipped symmetrically, and at what; 0 if it is not."""
    op, value = sums.op(place), sums.reader.value
    if op == "ClipByValue":
        _, inputs = sums.made(place)
        if len(inputs) != 3:
            raise Other
        inner, low, high = inputs[0], value(inputs[1]), value(inputs[2])
    elif op == "Maximum":
        below, bottom = sums.pair(place, "Maximum")
        inner, top = sums.pair(below, "Minimum")
        low, high = value(bottom), value(top)
    else:
        return place, 0.0
    if high <= 0 or low != -high:
        node, _ = sums.made(place)
        raise Variant(f"the node {node.name!r} clips to {low:g} to {high:g}; the block cells clip symmetrically")
    return inner, high
