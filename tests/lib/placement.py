"""Which nodes onnxruntime's CUDA provider would leave to the CPU, told without a GPU.

A node is the provider's when it has a kernel for it (`cuda_kernels.json`, from onnxruntime's own table) and none of the
rules for LSTM, GRU and RNN says otherwise. What onnxruntime folds into constants beforehand is no node any more. Where
a size is computed at run time, onnxruntime puts that arithmetic on the CPU on purpose, beginning at Shape; `sizes_left`
finds where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, shape_inference

from onnx_export.nodes import bodies, graphs

KERNELS = json.loads((Path(__file__).parent / "cuda_kernels.json").read_text())["ops"]
CONTROL_FLOW = {"If", "Loop", "Scan"}
CAPTURED_MOST = 32  # inputs of a Concat


def fallbacks(model: ModelProto) -> list[str]:
    """Return every node without a kernel on CUDA, and why."""
    return [f"{node.op_type} {node.name}: {why}" for node, why in _examined(model) if why]


def left(model: ModelProto) -> list[str]:
    """Return the ops of all nodes that are not folded."""
    return [node.op_type for node, _ in _examined(model)]


def sizes_left(model: ModelProto) -> list[str]:
    """Return every node that computes a size at run time, and so is on the CPU or brings others there."""
    return [f"{node.op_type} {node.name}" for node, _ in _examined(model) if node.op_type in ("Shape", "Size")]


def refused_by_cuda_graphs(model: ModelProto) -> list[str]:
    """Return every node and output for which onnxruntime refuses to capture a CUDA graph of the model."""
    refused = [
        f"{node.op_type} {node.name}"
        for node, _ in _examined(model)
        if node.op_type in CONTROL_FLOW or (node.op_type == "Concat" and len(node.input) > CAPTURED_MOST)
    ]
    return [*refused, *constant_outputs(model), *fallbacks(model), *sizes_left(model)]


def constant_outputs(model: ModelProto) -> list[str]:
    """Return the outputs that are constants after folding, which onnxruntime copies outside of the stream."""
    computed = {name for node, _ in _examined(model) for name in node.output}
    return [value.name for value in model.graph.output if value.name not in computed]


def _examined(model: ModelProto) -> Iterator[tuple[NodeProto, str]]:
    """Yield the nodes that are left after folding, those in bodies too, each with why it has no kernel, if so."""
    model = shape_inference.infer_shapes(inliner.inline_local_functions(model), strict_mode=True)
    (opset,) = (entry.version for entry in model.opset_import if entry.domain == "")
    scopes = (types for _, types in graphs(model.graph))  # in the order in which bodies are examined

    def examined(graph: GraphProto, constants: set[str]) -> Iterator[tuple[NodeProto, str]]:
        types = next(scopes)
        constants = constants | {tensor.name for tensor in graph.initializer}
        values = [*graph.input, *graph.value_info, *graph.output]
        fixed = {value.name for value in values if _is_fixed(value)}
        for node in graph.node:
            known_constants = constants | fixed if node.op_type == "Shape" else constants
            if node.op_type not in CONTROL_FLOW and known_constants.issuperset(filter(None, node.input)):
                constants.update(node.output)
                continue
            yield node, _why_not(node, types, opset)
            for body in bodies(node):
                yield from examined(body, constants)

    return examined(model.graph, set())


def _is_fixed(value: onnx.ValueInfoProto) -> bool:
    """Return whether the shape is known as a whole."""
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _why_not(node: NodeProto, types: Mapping[str, int], opset: int) -> str:
    if node.domain or node.op_type not in KERNELS:
        return "no kernel for it is known"
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    rows = KERNELS[node.op_type]
    row = next((rows[versions] for versions in rows if _matches(versions, schema.since_version)), None)
    if row is None:
        return f"no kernel for version {schema.since_version}, only for {', '.join(rows)}"
    parameters = [
        *zip(node.input, _formal(schema.inputs, len(node.input)), strict=True),
        *zip(node.output, _formal(schema.outputs, len(node.output)), strict=True),
    ]
    for name, parameter in parameters:
        if name and parameter in row:
            kind = TensorProto.DataType.Name(types.get(name, 0)).lower()
            if kind not in row[parameter].split():
                return f"no kernel for {name} of type {kind}"
    return _why_no_cudnn(node) if node.op_type in ("LSTM", "GRU", "RNN") else ""


def _matches(versions: str, since: int) -> bool:
    """Whether a kernel for these versions takes an op of this one. "13+" does not take 14, if there is an op 14."""
    first, *last = map(int, re.findall(r"\d+", versions))
    return first <= since <= last[0] if last else first == since


def _formal(parameters: list[onnx.defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the type parameter of every argument; the last one may stand for many."""
    names = [parameter.type_str for parameter in parameters]
    return (names + names[-1:] * (count - len(names)))[:count]


def _why_no_cudnn(node: NodeProto) -> str:
    """Return why cuDNN may not compute an LSTM, GRU or RNN, by onnxruntime's own rules, or an empty text."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if others := attributes.keys() - {"hidden_size", "direction", "linear_before_reset"}:
        return f"cuDNN is not known to have {', '.join(sorted(others))}"
    if node.op_type == "GRU" and attributes.get("linear_before_reset", 0) != 1:
        return "cuDNN resets after the product (linear_before_reset=1)"
    if node.op_type == "LSTM" and len(node.input) > 7 and node.input[7]:
        return "cuDNN has no peephole"
    return ""
