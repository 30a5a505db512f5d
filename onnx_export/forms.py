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
            cells = (node for node in nodes_of(model) if node.op_type in CELLS and not node.domain)
            if missing := next(filter(None, (_missing_cell(provider, node) for node in cells)), ""):
                reason = f"{provider!r} has no {missing}; expected another"
                raise ValueError(f"{caller}: loop='native' is not possible: {reason}")
            return model
        except ValueError as error:
            refusals.append(error)
    if len({str(error) for error in refusals}) == 1:  # of an argument that is wrong in any form
        raise refusals[0]
    reasons = "; ".join(str(error).removeprefix(f"{caller}: ") for error in refusals)
    raise ValueError(f"{caller}: there is no form for provider={provider!r}: {reasons}")


def _missing_cell(provider: str, node: NodeProto) -> str:
    """Return which LSTM, GRU or RNN a GPU's provider has no kernel for, "" if it has one for the node."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    cell, default = node.op_type, CUDNN_ACTIVATIONS[node.op_type]
    used = attributes.get("activations", default)
    if provider == "webgpu":
        if cell not in WEBGPU_CELLS:
            return cell
        has_activations = WEBGPU_ACTIVATIONS.issuperset(used)
    else:
        has_activations = used == default * (len(used) // len(default))
    if not has_activations:
        return f"{cell} with {b', '.join(used).decode()}"
    if provider == "cuda" and cell == "GRU" and not attributes.get("linear_before_reset"):
        return "GRU that resets before the product"
    if provider == "cuda" and cell == "LSTM" and (attributes.get("input_forget") or any(node.input[7:])):
        return "LSTM with peepholes or coupled gates"
    return ""
