"""Cells that are one node, a block op: LSTMBlockCell, BlockLSTM, BlockLSTMV2 and GRUBlockCell.

In come a node and the weights of its graph; out goes a `CellDefinition`, whose step is the formula of its layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....gates import GATE_ORDERS
from ....optable import OPS, Op
from ...graphs import Node
from ..cell.cell_definition import CellDefinition, CellInGraph
from ..graph.graph_reader import Place, UnknownValue
from ..weights.weight_slices import WeightSource, join_slices
from ..weights.weight_sources import WeightSources

BLOCKS = {name: OPS[name] for name in ("LSTMBlockCell", "BlockLSTM", "BlockLSTMV2", "GRUBlockCell")}
_LARGEST = float(np.finfo(np.float32).max)


def read_block_op(weights: WeightSources, body: str, node: Node) -> CellDefinition:
    """Define the cell that the node of a block op is, or refuse it."""
    op = BLOCKS[node.op]
    layer_kind = "GRU" if "w_ru" in {tensor.name for tensor in op.weights} else "LSTM"
    refusal = None
    attributes: dict[str, Any] = {}
    sources: dict[str, WeightSource] = {}
    role, in_graph = "", None
    try:
        attributes = _attributes(op, node)
        roles = ["seq_len_max"] * op.sequence + [tensor.name for tensor in op.inputs]
        inputs = weights.reader.inputs_at(Place(body, node.name))
        for tensor in op.weights:
            if tensor.peephole and not attributes["use_peephole"]:
                continue  # the op does not read this input
            role = tensor.name
            sources[role] = join_slices([[weights.slice(inputs[roles.index(role)])]])
        state_names = [tensor.name for tensor in op.inputs if tensor.kind == "state"]
        states = tuple(inputs[roles.index(name)] for name in state_names)
        outputs = [tensor.name for tensor in op.outputs]
        results = tuple(Place(body, node.name, outputs.index(name.removesuffix("_prev"))) for name in state_names)
        in_graph = CellInGraph(body, inputs[roles.index("x")], states, results, op.sequence)
    except UnknownValue as unknown:
        refusal = f"{role} comes from {unknown}" if role else str(unknown)
    if layer_kind == "LSTM":
        attributes.setdefault("gate_order", next(key for key, gates in GATE_ORDERS.items() if gates == op.gates))
    return CellDefinition(
        node.op,
        [node.name],
        layer_kind=layer_kind,
        sources=sources,
        attributes=attributes,
        in_graph=in_graph,
        refusal=refusal,
    )


def _attributes(op: Op, node: Node) -> dict[str, Any]:
    """Return the attributes of a node, with the defaults of those that TensorFlow leaves out."""
    node_attributes = node.attrs
    # BlockLSTMV2 has no attribute forget_bias: its kernel gets 0.0.
    attributes: dict[str, Any] = {name: value for name, value in op.constants if isinstance(value, float)}
    for attribute in op.attributes:
        value = node_attributes.get(attribute.name, attribute.default)
        if not isinstance(value, attribute.kind) or (isinstance(value, float) and not abs(value) <= _LARGEST):
            raise UnknownValue(f"the attribute {attribute.name} is {value!r}; expected a {attribute.kind.__name__}")
        attributes[attribute.name] = value
    return attributes
