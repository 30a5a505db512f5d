"""The patterns of a GRU, which resets before or after the product, matched backwards from the last node of a step.

In comes a place; out goes the match, with the weights and attributes of a layer. u is the update gate, r the reset gate
and c the candidate.
"""

from __future__ import annotations

from contextlib import suppress

from ..cell.cell_definition import CellInGraph
from ..graph.graph_reader import Place
from ..weights.gate_sums import Gate, GateSum, GateSums, NoMatch, Operand
from ..weights.weight_slices import join_slices
from .pattern import (
    CellMatch,
    Refusal,
    UnambiguousCell,
    activation_attributes,
    describe_node,
    gate_sums,
    get_operands,
    is_complement,
    join_biases,
    kernel_sources,
    unexpected_term,
)


def match_gru(sums: GateSums, end: Place) -> UnambiguousCell:
    """Match h = u * h_prev + (1 - u) * c."""
    for keep, new in sums.input_orders(end, "Add"):
        if sums.op_name(keep) != "Mul" or sums.op_name(new) != "Mul":
            raise NoMatch
        for complement, candidate in sums.input_orders(new, "Mul"):
            for u, h_prev in sums.input_orders(keep, "Mul"):
                if is_complement(sums, complement, u) and (c := sums.read_gate(candidate)) is not None:
                    return UnambiguousCell(_make_gru(sums, end, u, candidate, c, h_prev))
    raise NoMatch


def _make_gru(sums: GateSums, end: Place, u: Place, candidate: Place, c: Gate, h_prev: Place) -> CellMatch:
    """Make the match of a GRU with the update gate u, the candidate c and the state before, or refuse it."""
    new, inner = c.sum, None
    operands = get_operands(sums, new)
    if new.other_terms:
        r, inner = _reset_after(sums, new.other_terms[0], h_prev)
        operands += get_operands(sums, inner)
    else:
        r, operands = _reset_before(sums, candidate, operands, h_prev)
    update = sums.read_gate(u)
    if len(operands) != 2 or len(new.other_terms) > 1 or update is None:
        raise _unknown_operands(sums, candidate, h_prev)
    gates = gate_sums({"r": r, "u": update}, end)
    hidden = operands[0].kernel.shape[1]
    pairs = [_order_operands(sums, name, gate, operands[0].place, h_prev) for name, gate in gates.items()]
    w_ru = [[pair[k].kernel_rows(hidden, k == 1) for pair in pairs] for k in (0, 1)]
    w_c = [[operands[k].kernel_rows(hidden, k == 1)] for k in (0, 1)]
    for name, gate in {**gates, "the candidate": new, **({} if inner is None else {"what is reset": inner})}.items():
        if gate.constant:
            raise Refusal(f"a number, {gate.constant:g}, is added to {name}; the block cells have none there")
    sources = {"w_ru": join_slices(w_ru), "w_c": join_slices(w_c)}
    sources["b_ru"] = join_biases([*gates.values()], hidden, sources["w_ru"].dtype)
    sources["b_c"] = join_biases([new], hidden, sources["w_ru"].dtype)
    if inner is not None:
        sources["b_hc"] = join_biases([inner], hidden, sources["w_ru"].dtype)
    beside = all(pair[0].rows != "all" for pair in pairs)
    tf_class = "Keras GRU" if not beside else "CudnnCompatibleGRUCell" if inner is not None else ""
    attributes = {} if inner is None else {"reset_after": True}
    attributes |= activation_attributes(c.activation, r.activation)
    step, sizes = CellInGraph(end.body, operands[0].place, (h_prev,), (end,)), (w_c[0][0].shape[0], hidden)
    kernels = kernel_sources([*pairs, operands])
    return CellMatch("GRU", tf_class, step, sources, kernels, sizes, attributes)


def _unknown_operands(sums: GateSums, candidate: Place, h_prev: Place) -> Refusal:
    """Make the refusal of another cell that mixes its state as a GRU does, such as an SRU."""
    reason = f"what goes into {describe_node(sums, candidate)} is not what a GRU has there"
    return Refusal(reason, is_weak=True, states=(h_prev,))


def _reset_before(
    sums: GateSums, candidate: Place, operands: list[Operand], h_prev: Place
) -> tuple[Gate, list[Operand]]:
    """Return the reset gate, and the operands of the candidate: x, and the state times the gate."""
    for k, operand in enumerate(operands):
        if sums.op_name(operand.place) == "Mul":
            for r, h in sums.input_orders(operand.place, "Mul"):
                if sums.reader.are_same(h, h_prev) and (gate := sums.read_gate(r)) is not None:
                    return gate, [*operands[:k], *operands[k + 1 :], operand]
    raise _unknown_operands(sums, candidate, h_prev)


def _reset_after(sums: GateSums, place: Place, h_prev: Place) -> tuple[Gate, GateSum]:
    """Return the reset gate, and the sum that it is applied to."""
    if sums.op_name(place) == "Mul":
        for r, inner in sums.input_orders(place, "Mul"):
            with suppress(NoMatch):
                inner_sum, gate = sums.read_sum(inner), sums.read_gate(r)
                operands = get_operands(sums, inner_sum)
                if gate is not None and len(operands) == 1 and not inner_sum.other_terms:
                    if sums.reader.are_same(operands[0].place, h_prev):
                        return gate, inner_sum
    raise unexpected_term(sums, place, "the candidate")


def _order_operands(sums: GateSums, name: str, gate: GateSum, x: Place, h_prev: Place) -> list[Operand]:
    """Return the operands of a gate, x before the state."""
    if gate.other_terms:
        raise unexpected_term(sums, gate.other_terms[0], f"the gate {name}")
    operands = get_operands(sums, gate)
    for pair in (operands, operands[::-1]):
        if len(pair) == 2 and sums.reader.are_same(pair[0].place, x) and sums.reader.are_same(pair[1].place, h_prev):
            return pair
    nodes = " and ".join(repr(operand.place.name) for operand in operands)
    inputs = f"{x.name!r} and {h_prev.name!r}"
    raise Refusal(f"its gate {name}, from {nodes}, is not computed from the input and the state, {inputs}")
