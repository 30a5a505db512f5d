"""LSTMs and GRUs of many nodes, backwards from their last node.

A match has every node on the way understood. `Variant` is raised where something is surely meant as a cell, and is
another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..optable import GATE_ORDERS
from .graphs import Node
from .refusals import ACTIVATIONS, CLIPS, Step
from .sums import ADD, Other, Piece, Sum, Sums, added, joined, zeros
from .trace import Place, Source, Unknown


class Variant(Exception):
    """This is a cell, but none that a layer computes: the text says why."""

    vague = False
    """Whether other nodes may show it better."""


@dataclass
class Match:
    """A cell's nodes as they were found."""

    cell: str
    kind: str
    """A class, where the nodes show it, or ""."""
    body: str
    last: Node
    x: Place
    states: tuple[Place, ...]
    """Before the step: h, or cs and h."""
    results: tuple[Place, ...]
    """After it."""
    sources: dict[str, Source]
    kernels: dict[str, Source]
    """The variables that are multiplied with, by their names."""
    sizes: tuple[int, int]
    """I and H."""
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> Place:
        return Place(self.body, self.last.name)


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
        return self.kernel.cut(0, 0, size) if self.rows == "first" else self.kernel.cut(0, count - size, count)


class Lstm:
    """The nodes of an LSTM whose two operands are not yet told apart: which is x, and which the state?"""

    def __init__(
        self, sums: Sums, last: Place, gates: dict[str, Sum], cs_prev: Place, cs: Place, clip: float,
        diagonals: dict[str, Piece],
    ) -> None:  # fmt: skip
        self.sums, self.gates, self.cs_prev, self.cs, self.clip = sums, gates, cs_prev, cs, clip
        self.end, self.diagonals = last, diagonals
        self.operands = {name: operands_of(sums, gate) for name, gate in gates.items()}
        first = self.operands["i"]
        if any(len(each) != 2 for each in self.operands.values()):
            raise Other
        for each in self.operands.values():
            if not sums.same(each[0].place, first[0].place):
                each.reverse()
            if not all(sums.same(a.place, b.place) and a.rows == b.rows for a, b in zip(each, first, strict=True)):
                raise Variant("its gates have different inputs")
        self.first = first
        self.kernels = _sources(self.operands.values())
        self.hidden = first[0].kernel.shape[1]
        self.joined = first[0].rows != "all"
        """Whether x and state are beside each other, x first."""

    def by_shape(self) -> int | None:
        """Which operand is the state, if the shapes of the kernels tell."""
        if self.joined:
            return 1
        fits = [k for k, each in enumerate(self.first) if each.kernel.shape[0] == self.hidden]
        return fits[0] if len(fits) == 1 else None

    def step(self, state: int) -> Step:
        """What it is among other steps, with the state being the operand of this number."""
        return Step(self.end, (self.cs_prev, self.first[state].place), (self.cs, self.end))

    def match(self, state: int) -> Match:
        """With the state being the operand of this number."""
        node = self.sums.tracer.node(self.end)
        assert node is not None
        order = self._order()
        gates = GATE_ORDERS[order]
        parts = {name: (self.operands[name][1 - state], self.operands[name][state]) for name in gates}
        above = [[parts[name][k].piece(self.hidden, k == 1) for name in gates] for k in (0, 1)]
        if any(piece.shape[1] != self.hidden for row in above for piece in row):
            raise Variant("its gates are of different sizes")
        if len({piece.key for piece in above[0]}) != 4 or len({piece.key for piece in above[1]}) != 4:
            raise Variant("two of its gates have the same weights")
        if any(piece.shape[0] != self.hidden for piece in above[1]):
            raise Variant(f"its state is of another size than its gates, {above[1][0].shape[0]} and {self.hidden}")
        sources = {"w": joined(above)}
        sources |= {role: joined([[piece]]) for role, piece in self.diagonals.items()}
        sources["b"] = biases([self.gates[name] for name in gates], self.hidden, sources["w"].dtype)
        attributes = {
            "forget_bias": self.gates["f"].constant,
            "cell_clip": self.clip,
            "use_peephole": bool(self.diagonals),
            "gate_order": order,
        }
        x, h = (parts["i"][k].place for k in (0, 1))
        kind = "" if self.joined else "Keras LSTM"
        states, results = (self.cs_prev, h), (self.cs, self.end)
        sizes = above[0][0].shape[0], self.hidden
        body = self.end.body
        return Match("LSTM", kind, body, node, x, states, results, sources, self.kernels, sizes, attributes)

    def _order(self) -> str:
        """The order that the gates have in the kernel, if it is one that layers have."""
        starts: dict[str, tuple[str, int]] = {}
        for name, operands in self.operands.items():
            starts[name] = operands[0].kernel.source.name, operands[0].kernel.ranges[-1][0]
        found = tuple(sorted(starts, key=lambda name: starts[name]))
        one = len({source for source, _ in starts.values()}) == 1
        return next((key for key, gates in GATE_ORDERS.items() if one and gates == found), "icfo")


def operands_of(sums: Sums, gate: Sum) -> list[Operand]:
    """What is multiplied with which rows."""
    found = []
    for left, kernel in gate.products:
        if sums.op(left) == "ConcatV2":
            node, inputs, _ = sums.made(left, "ConcatV2")
            if len(inputs) != 3 or sums.tracer.number(inputs[2]) not in (1, -1):
                raise Variant(f"the node {node.name!r} joins more than an input and a state")
            found += [Operand(inputs[0], kernel, "first"), Operand(inputs[1], kernel, "last")]
        else:
            found.append(Operand(left, kernel))
    return found


def _sources(operands: Iterable[Sequence[Operand]]) -> dict[str, Source]:
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


def _both(pair: tuple[Place, Place]) -> Iterator[tuple[Place, Place]]:
    yield pair
    yield pair[1], pair[0]


# ---------------------------------------------------------------------------------------------------------------- LSTM
def lstm(sums: Sums, body: str, last: Node) -> Lstm:
    """From h = sigmoid(o) * tanh(cs)."""
    if last.op != "Mul":
        raise Other
    here = Place(body, last.name)
    for out, co in _both(sums.pair(here, "Mul")):
        if sums.op(co) == "Tanh" and sums.is_activated(out, "Sigmoid"):
            break
    else:
        raise Other
    cs = sums.only(co, "Tanh")
    total, clip = _clipped(sums, cs)
    forget_product, input_product = sums.pair(total, *ADD)
    pairs = [sums.pair(each, "Mul") for each in (forget_product, input_product)]
    for forgotten, new in (pairs, pairs[::-1]):
        for i, ci in _both(new):
            for f, cs_prev in _both(forgotten):
                if sums.op(ci) == "Tanh" and sums.is_activated(i, "Sigmoid") and sums.is_activated(f, "Sigmoid"):
                    return _lstm_of(sums, here, {"i": i, "f": f, "o": out, "ci": ci}, cs_prev, cs, clip)
    raise _changed(sums, [place for pair in pairs for place in pair])


def _changed(sums: Sums, factors: list[Place]) -> Variant | Other:
    """Why what is added up to the cell state is not sigmoid(f) * cs + sigmoid(i) * tanh(ci)."""
    if not any(sums.is_activated(each, "Sigmoid") for each in factors):
        return Other()
    for each in factors:
        if sums.op(each) == "Sub":
            node, (one, gate) = sums.made(each)[0], sums.pair(each)
            if sums.is_activated(gate, "Sigmoid") and _is_one(sums, one):
                return Variant(
                    f"its input gate is coupled to its forget gate by the node {node.name!r}; the gates of the block"
                    " cells are independent"
                )
    for each in factors:
        made = sums.tracer.node(sums.past(each))
        if made is not None and made.op in (*ACTIVATIONS, *CLIPS):
            return Variant(f"the node {made.name!r} is a {made.op}, where the block cells have a sigmoid or a tanh")
    return _vague("its cell state is not what the block cells have, sigmoid(f) * cs + sigmoid(i) * tanh(ci)")


def _is_one(sums: Sums, place: Place) -> bool:
    try:
        return sums.tracer.value(place) == 1
    except Unknown:
        return False


def _lstm_of(sums: Sums, last: Place, places: dict[str, Place], cs_prev: Place, cs: Place, clip: float) -> Lstm:
    gates = {name: sums.activated(place, "Tanh" if name == "ci" else "Sigmoid") for name, place in places.items()}
    diagonals: dict[str, Piece] = {}
    for name, gate in gates.items():
        if gate.others and name != "ci":
            state = cs if name == "o" else cs_prev
            diagonals[f"wc{name}"] = _diagonal(sums, gate, state)
        if gate.others:
            raise _stranger(sums, gate.others[0], f"the gate {name}" if name != "ci" else "the candidate")
        if gate.constant and name != "f":
            raise Variant(f"a number, {gate.constant:g}, is added to {name}; the block cells add one to f")
        if not gate.products:
            raise Other
    if len(diagonals) % 3:
        raise Variant(f"it has only {len(diagonals)} of the three peephole weights")
    order = [role for role in ("wci", "wcf", "wco") if role in diagonals]
    return Lstm(sums, last, gates, cs_prev, cs, clip, {role: diagonals[role] for role in order})


def _diagonal(sums: Sums, gate: Sum, state: Place) -> Piece:
    """The weights of a peephole."""
    for k, place in enumerate(gate.others):
        if sums.op(place) == "Mul":
            for one, other in _both(sums.pair(place, "Mul")):
                if sums.same(other, state):
                    del gate.others[k]
                    piece = sums.piece(one)
                    if len(piece.shape) != 1:
                        raise Variant(f"its peephole weights, {piece.source.name}, are no vector")
                    return piece
    raise _stranger(sums, gate.others[0], "a gate")


def _stranger(sums: Sums, place: Place, where: str) -> Variant:
    node = sums.tracer.node(sums.past(place))
    what = f"the argument {place.name!r}" if node is None else f"the node {node.name!r}, which is a {node.op},"
    return _vague(f"{what} is added to {where}; the block cells have no such thing")


def _vague(text: str) -> Variant:
    variant = Variant(text)
    variant.vague = True
    return variant


def _clipped(sums: Sums, place: Place) -> tuple[Place, float]:
    """What is clipped symmetrically, and at what; 0 if it is not."""
    op, tracer = sums.op(place), sums.tracer
    if op == "ClipByValue":
        _, inputs, _ = sums.made(place)
        if len(inputs) != 3:
            raise Other
        inner, low, high = inputs[0], tracer.value(inputs[1]), tracer.value(inputs[2])
    elif op == "Maximum":
        below, bottom = sums.pair(place, "Maximum")
        inner, top = sums.pair(below, "Minimum")
        low, high = tracer.value(bottom), tracer.value(top)
    else:
        return place, 0.0
    if high <= 0 or low != -high:
        node = sums.made(place)[0]
        raise Variant(f"the node {node.name!r} clips to {low:g} to {high:g}; the block cells clip symmetrically")
    return inner, high


# ----------------------------------------------------------------------------------------------------------------- GRU
def gru(sums: Sums, body: str, last: Node) -> Match:
    """From h = u * h_prev + (1 - u) * c."""
    if last.op not in ADD:
        raise Other
    products = sums.pair(Place(body, last.name), *ADD)
    for keep, new in _both(products):
        if sums.op(keep) != "Mul" or sums.op(new) != "Mul":
            raise Other
        for rest, candidate in _both(sums.pair(new, "Mul")):
            if sums.op(rest) != "Sub" or sums.op(candidate) != "Tanh":
                continue
            one, u = sums.pair(rest, "Sub")
            for update, h_prev in _both(sums.pair(keep, "Mul")):
                if sums.same(update, u) and sums.tracer.value(one) == 1:
                    return _gru_of(sums, body, last, u, candidate, h_prev)
    raise Other


def _gru_of(sums: Sums, body: str, last: Node, u: Place, candidate: Place, h_prev: Place) -> Match:
    new, inner = sums.activated(candidate, "Tanh"), None
    operands = operands_of(sums, new)
    if new.others:
        r, inner = _reset_after(sums, new.others[0], h_prev)
        operands += operands_of(sums, inner)
    else:
        r, operands = _reset_before(sums, candidate, operands, h_prev)
    if len(operands) != 2 or len(new.others) > 1:
        raise _vague(f"what goes into {_said(sums, candidate)} is not what a GRU has there")
    gates = {"r": sums.activated(r, "Sigmoid"), "u": sums.activated(u, "Sigmoid")}
    hidden = operands[0].kernel.shape[1]
    pairs = [_told_apart(sums, name, gate, operands[0].place, h_prev) for name, gate in gates.items()]
    w_ru = [[pair[k].piece(hidden, k == 1) for pair in pairs] for k in (0, 1)]
    w_c = [[operands[k].piece(hidden, k == 1)] for k in (0, 1)]
    if any(piece.shape != (w_c[k][0].shape[0], hidden) for k in (0, 1) for piece in w_ru[k]):
        raise Variant("its gates are of different sizes")
    if any(len({w_c[k][0].key, *(piece.key for piece in w_ru[k])}) != 3 for k in (0, 1)):
        raise Variant("two of its gates have the same weights")
    if w_c[1][0].shape[0] != hidden:
        raise Variant(f"its state is of another size than its gates, {w_c[1][0].shape[0]} and {hidden}")
    for name, gate in {**gates, "the candidate": new, **({} if inner is None else {"what is reset": inner})}.items():
        if gate.constant:
            raise Variant(f"a number, {gate.constant:g}, is added to {name}; the block cells have none there")
    sources = {"w_ru": joined(w_ru), "w_c": joined(w_c)}
    sources["b_ru"] = biases([*gates.values()], hidden, sources["w_ru"].dtype)
    sources["b_c"] = biases([new], hidden, sources["w_ru"].dtype)
    if inner is not None:
        sources["b_hc"] = biases([inner], hidden, sources["w_ru"].dtype)
    beside = all(pair[0].rows != "all" for pair in pairs)
    kind = "Keras GRU" if not beside else "CudnnCompatibleGRUCell" if inner is not None else ""
    attributes = {} if inner is None else {"reset_after": True}
    x, end, sizes = operands[0].place, Place(body, last.name), (w_c[0][0].shape[0], hidden)
    kernels = _sources([*pairs, operands])
    return Match("GRU", kind, body, last, x, (h_prev,), (end,), sources, kernels, sizes, attributes)


def _reset_before(sums: Sums, candidate: Place, operands: list[Operand], h_prev: Place) -> tuple[Place, list[Operand]]:
    """The reset gate, and what is multiplied: x, and the state times the gate."""
    for k, each in enumerate(operands):
        if sums.op(each.place) == "Mul":
            for r, h in _both(sums.pair(each.place, "Mul")):
                if sums.same(h, h_prev) and sums.is_activated(r, "Sigmoid"):
                    return r, [*operands[:k], *operands[k + 1 :], each]
    if any(sums.same(each.place, h_prev) for each in operands):
        raise Variant(f"it has no reset gate: the state goes into {_said(sums, candidate)} as it is")
    raise _vague(f"what goes into {_said(sums, candidate)} is not what a GRU has there")


def _reset_after(sums: Sums, place: Place, h_prev: Place) -> tuple[Place, Sum]:
    """The reset gate, and the sum that it is applied to."""
    if sums.op(place) == "Mul":
        for r, inner in _both(sums.pair(place, "Mul")):
            if sums.is_activated(r, "Sigmoid"):
                found = sums.sum(inner)
                operands = operands_of(sums, found)
                if len(operands) == 1 and not found.others and sums.same(operands[0].place, h_prev):
                    return r, found
    raise _stranger(sums, place, "the candidate")


def _told_apart(sums: Sums, name: str, gate: Sum, x: Place, h_prev: Place) -> list[Operand]:
    """A gate's operands, that for x first."""
    if gate.others:
        raise _stranger(sums, gate.others[0], f"the gate {name}")
    operands = operands_of(sums, gate)
    for pair in (operands, operands[::-1]):
        if len(pair) == 2 and sums.same(pair[0].place, x) and sums.same(pair[1].place, h_prev):
            return pair
    raise Variant(f"its gate {name} is not computed from the input and the state that the candidate is computed from")


def _said(sums: Sums, place: Place) -> str:
    node, _, _ = sums.made(place)
    return f"the node {node.name!r}, which is a {node.op},"
