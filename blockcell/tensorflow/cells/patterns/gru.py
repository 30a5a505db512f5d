"""The patterns of a GRU, which resets before or after the product, backwards from its last node."""

from __future__ import annotations

from contextlib import suppress

from ..graph.activations import LINEAR
from ..graph.graph_reader import Place
from ..weights.gate_sums import Gate, Other, Sum, Sums
from ..weights.weight_slices import joined
from .pattern import (
    Match,
    Operand,
    Step,
    Told,
    Variant,
    biases,
    both,
    gates_of,
    kernels_of,
    operands_of,
    said,
    stranger,
    vague,
    with_activations,
)


def gru(sums: Sums, end: Place) -> Told:
    """From h = u * h_prev + (1 - u) * c."""
    products = sums.pair(end, "Add")
    for keep, new in both(products):
        if sums.op(keep) != "Mul" or sums.op(new) != "Mul":
            raise Other
        for rest, candidate in both(sums.pair(new, "Mul")):
            if sums.op(rest) != "Sub" or (c := sums.gate(candidate)) is None:
                continue
            one, u = sums.pair(rest, "Sub")
            for update, h_prev in both(sums.pair(keep, "Mul")):
                if sums.reader.same(update, u) and sums.reader.value(one) == 1:
                    _refuse_simple(sums, end, c, h_prev)
                    return Told(_gru_of(sums, end, u, candidate, c, h_prev))
    raise Other


def _refuse_simple(sums: Sums, end: Place, candidate: Gate, h_prev: Place) -> None:
    """Cells whose state is in no product."""
    if candidate.activation == LINEAR and len(operands_of(sums, candidate.sum)) == 1 and not candidate.sum.others:
        node, _ = sums.made(end)
        variant = Variant(f"it is an SRU or one like it, whose state goes into no product: the node {node.name!r}")
        variant.states = (h_prev,)
        raise variant


def _gru_of(sums: Sums, end: Place, u: Place, candidate: Place, c: Gate, h_prev: Place) -> Match:
    new, inner = c.sum, None
    operands = operands_of(sums, new)
    if new.others:
        r, inner = _reset_after(sums, new.others[0], h_prev)
        operands += operands_of(sums, inner)
    else:
        r, operands = _reset_before(sums, candidate, operands, h_prev)
    update = sums.gate(u)
    if len(operands) != 2 or len(new.others) > 1 or update is None:
        raise _other_operands(sums, candidate)
    gates = gates_of({"r": r, "u": update}, end)
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
    attributes |= with_activations(c.activation, r.activation)
    step, sizes = Step(end, (h_prev,), (end,)), (w_c[0][0].shape[0], hidden)
    return Match("GRU", kind, operands[0].place, step, sources, kernels_of([*pairs, operands]), sizes, attributes)


def _other_operands(sums: Sums, candidate: Place) -> Variant:
    return vague(f"what goes into {said(sums.made(candidate)[0])} is not what a GRU has there")


def _reset_before(sums: Sums, candidate: Place, operands: list[Operand], h_prev: Place) -> tuple[Gate, list[Operand]]:
    """The reset gate, and what is multiplied: x, and the state times the gate."""
    for k, each in enumerate(operands):
        if sums.op(each.place) == "Mul":
            for r, h in both(sums.pair(each.place, "Mul")):
                if sums.reader.same(h, h_prev) and (gate := sums.gate(r)) is not None:
                    return gate, [*operands[:k], *operands[k + 1 :], each]
    if any(sums.reader.same(each.place, h_prev) for each in operands):
        node, _ = sums.made(candidate)
        raise Variant(f"it has no reset gate: the state goes into {said(node)} as it is")
    raise _other_operands(sums, candidate)


def _reset_after(sums: Sums, place: Place, h_prev: Place) -> tuple[Gate, Sum]:
    """The reset gate, and the sum that it is applied to."""
    if sums.op(place) == "Mul":
        for r, inner in both(sums.pair(place, "Mul")):
            with suppress(Other):
                found, gate = sums.sum(inner), sums.gate(r)
                operands = operands_of(sums, found)
                if gate is not None and len(operands) == 1 and not found.others:
                    if sums.reader.same(operands[0].place, h_prev):
                        return gate, found
    raise stranger(sums, place, "the candidate")


def _told_apart(sums: Sums, name: str, gate: Sum, x: Place, h_prev: Place) -> list[Operand]:
    """A gate's operands, that for x first."""
    if gate.others:
        raise stranger(sums, gate.others[0], f"the gate {name}")
    operands = operands_of(sums, gate)
    for pair in (operands, operands[::-1]):
        if len(pair) == 2 and sums.reader.same(pair[0].place, x) and sums.reader.same(pair[1].place, h_prev):
            return pair
    nodes = " and ".join(repr(operand.place.name) for operand in operands)
    inputs = f"{x.name!r} and {h_prev.name!r}"
    raise Variant(f"its gate {name}, from {nodes}, is not computed from the input and the state, {inputs}")
