"""Cells that are one node: LSTMBlockCell, BlockLSTM, BlockLSTMV2 and GRUBlockCell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....formulas import FORMULAS
from ....optable import GATE_ORDERS, OPS, Array, Op
from ...graphs import Node
from ..cell.found_cell import At, Found, Step
from ..cell.layer_check import State, Weights
from ..graph.graph_reader import Place, Unknown
from ..weights.weight_sources import Source, Sources

BLOCKS = {name: OPS[name] for name in ("LSTMBlockCell", "BlockLSTM", "BlockLSTMV2", "GRUBlockCell")}
_LARGEST = float(np.finfo(np.float32).max)


def found_block(given: Sources, body: str, node: Node) -> Found:
    """The cell that a node is."""
    op = BLOCKS[node.op]
    cell = "GRU" if "w_ru" in {tensor.name for tensor in op.weights} else "LSTM"
    refused = None
    attributes: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    role, at = "", None
    try:
        attributes = _attributes(op, node)
        roles = ["seq_len_max"] * op.sequence + [tensor.name for tensor in op.inputs]
        inputs = given.reader.inputs(body, node)
        for tensor in op.weights:
            if tensor.peephole and not attributes["use_peephole"]:
                continue  # there is something, but it is not read
            role = tensor.name
            sources[role] = given.source(inputs[roles.index(role)])
        h = Place(body, node.name, [tensor.name for tensor in op.outputs].index("h"))
        states = tuple(inputs[roles.index(tensor.name)] for tensor in op.inputs if tensor.kind == "state")
        at = At(body, inputs[roles.index("x")], states, h, op.sequence)
    except Unknown as unknown:
        refused = f"{role} comes from {unknown}" if role else str(unknown)
    if cell == "LSTM":
        attributes.setdefault("gate_order", next(key for key, gates in GATE_ORDERS.items() if gates == op.gates))
    return Found(
        node.name,
        node.op,
        [node.name],
        cell=cell,
        sources=sources,
        attributes=attributes,
        step=_step(op),
        at=at,
        refused=refused,
    )


def _attributes(op: Op, node: Node) -> dict[str, Any]:
    """Those of the node; TensorFlow leaves out what has its default."""
    given, found = node.attrs, dict[str, Any](op.constants)
    found.pop("ifco", None)
    for attribute in op.attributes:
        value = given.get(attribute.name, attribute.default)
        if not isinstance(value, attribute.kind) or (isinstance(value, float) and not abs(value) <= _LARGEST):
            raise Unknown(f"the attribute {attribute.name} is {value!r}; expected a {attribute.kind.__name__}")
        found[attribute.name] = value
    return found


def _step(op: Op) -> Step:
    formula = FORMULAS[op.name]

    def step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """By the op's formula, in the order of the op's own inputs."""
        given: dict[str, Any] = dict(weights)
        given |= {attribute.name: attributes[attribute.name] for attribute in op.attributes}
        names = [tensor.name for tensor in op.inputs if tensor.name.endswith("_prev")]
        given |= dict(zip(names, state, strict=True))
        if op.sequence:
            result = formula(seq_len_max=1, x=x[None], **given)
            return tuple(getattr(result, name.removesuffix("_prev"))[0] for name in names)
        result = formula(x=x, **given)
        return tuple(getattr(result, name.removesuffix("_prev")) for name in names)

    return step
