"""The form of a graph: its loop, and whether it is static. The caller chooses it, or the provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnx import ModelProto, NodeProto, helper

from .cells.body import CELLS
from .cells.config import Form
from .nodes import nodes_of

# The forms for each provider of onnxruntime, where the caller chooses no loop: the first possible one is built.
FORMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "cpu": [{"loop": "scan"}],
    "cuda": [{"loop": "native", "static": True}, {"loop": "scan", "static": True}],
    "webgpu": [{"loop": "native", "static": True}, {"loop": "unroll", "static": True}],
}
# Which of ONNX's own cells WebGPU has, with which activations, and the only activations that cuDNN has.
WEBGPU_CELLS, WEBGPU_ACTIVATIONS = ("LSTM", "GRU"), {b"Sigmoid", b"Tanh", b"Relu"}
CUDNN_ACTIVATIONS = {"LSTM": [b"Sigmoid", b"Tanh", b"Tanh"], "GRU": [b"Sigmoid", b"Tanh"], "RNN": [b"Tanh"]}
# Nodes that the CPU runs, which fetches the states from the GPU at every step.
SLOW = {"webgpu": ("Scan", "Loop")}


def make_in_form(
    caller: str, provider: str, loop: str | None, form: Form, make: Callable[[Form], ModelProto]
) -> ModelProto:
    """Return ``make(form)`` with the given loop or, without one, in the provider's first possible form."""
    if provider not in FORMS:
        raise ValueError(f"{caller}: provider is {provider!r}; expected one of {', '.join(FORMS)}")
    forms = [replace(form, loop=row["loop"], static=form.static or bool(row.get("static"))) for row in FORMS[provider]]
    if loop is not None:
        return make(replace(forms[0], loop=loop))
    refusals = []
    for form in forms:
        try:
            model = make(form)
            if form.loop == "native":
                _check_kernels(caller, provider, model)
            return model
        except ValueError as error:
            refusals.append(error)
    if len({str(error) for error in refusals}) == 1:  # of an argument that is wrong in any form
        raise refusals[0]
    reasons = "; ".join(str(error).removeprefix(f"{caller}: ") for error in refusals)
    raise ValueError(f"{caller}: there is no form for provider={provider!r}: {reasons}")


def _check_kernels(caller: str, provider: str, model: ModelProto) -> None:
    """Raise a ValueError if the provider does not have all of ONNX's own cells in the model."""
    missing_cell = _missing_on_cudnn if provider == "cuda" else _missing_on_webgpu
    for node in nodes_of(model):
        if node.op_type in CELLS and (cell := missing_cell(node)):
            raise ValueError(f"{caller}: loop='native' is not possible: {provider!r} has no {cell}; expected another")


def _missing_on_webgpu(node: NodeProto) -> str:
    """Return what WebGPU lacks for an LSTM, GRU or RNN, "" if it has a kernel."""
    if node.op_type not in WEBGPU_CELLS:
        return node.op_type
    used = _attributes(node).get("activations", [])
    return "" if WEBGPU_ACTIVATIONS.issuperset(used) else f"{node.op_type} with {b', '.join(used).decode()}"


def _missing_on_cudnn(node: NodeProto) -> str:
    """Return what cuDNN lacks for an LSTM, GRU or RNN, "" if it computes the node."""
    attributes, default = _attributes(node), CUDNN_ACTIVATIONS[node.op_type]
    used = attributes.get("activations", default)
    if used != default * (len(used) // len(default)):
        return f"{node.op_type} with {b', '.join(used).decode()}"
    if node.op_type == "GRU" and not attributes.get("linear_before_reset"):
        return "GRU that resets before the product"
    if node.op_type == "LSTM" and (attributes.get("input_forget") or any(node.input[7:])):
        return "LSTM with peepholes or coupled gates"
    return ""


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
