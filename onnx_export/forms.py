"""The form of a graph: its loop, and whether it is static. The caller chooses it, or the provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from blockcell.convert.onnx_activations import attributes_of

from .cells.config import Config, Form, cell_name, check_form, native_cell

# The loops for each provider of onnxruntime, where the caller chooses none: the first possible one is built.
PROVIDER_LOOPS = {"cpu": ["scan"], "cuda": ["native", "scan"], "webgpu": ["native", "unroll"]}
# Which of ONNX's own cells WebGPU has, with which activations, and the only activations that cuDNN has.
WEBGPU_CELLS, WEBGPU_ACTIVATIONS = ("LSTM", "GRU"), {"Sigmoid", "Tanh", "Relu"}
CUDNN_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
# Nodes that the CPU runs, which fetches the states from the GPU at every step.
SLOW = {"webgpu": ("Scan", "Loop")}


def choose_form(
    caller: str, provider: str, loop: str | None, form: Form, configs_in: Callable[[Form], Sequence[Config]]
) -> Form:
    """Return the form with the given loop or, without one, the provider's first possible form.

    ``configs_in(form)`` gives the configurations of what is to be built in a form. A ValueError says why none is
    possible.
    """
    if provider not in PROVIDER_LOOPS:
        raise ValueError(f"{caller}: provider is {provider!r}; expected one of {', '.join(PROVIDER_LOOPS)}")
    refusals = []
    for candidate_loop in PROVIDER_LOOPS[provider] if loop is None else [loop]:
        candidate = replace(form, loop=candidate_loop, static=form.static or provider != "cpu")
        check_form(caller, candidate)
        configs = configs_in(candidate)
        refusal = next((c.refusal for c in configs if c.refusal), "")
        if loop is None and not refusal:
            refusal = next(filter(None, (_refuse_cell(caller, provider, c) for c in configs)), "")
        if not refusal:
            return candidate
        refusals.append(refusal)
    if loop is not None:
        raise ValueError(refusals[0])
    texts = "; ".join(refusal.removeprefix(f"{caller}: ") for refusal in refusals)
    raise ValueError(f"{caller}: there is no form for provider={provider!r}: {texts}")


def _refuse_cell(caller: str, provider: str, c: Config) -> str:
    """Return the message of which LSTM, GRU or RNN of ONNX's own a provider does not have, "" if there is none."""
    missing = _missing_cell(provider, c) if c.native and c.sizes["H"] else ""
    reason = f"{provider!r} has no {missing}; expected another"
    return f"{caller}: loop='native' is not possible: {reason}" if missing else ""


def _missing_cell(provider: str, c: Config) -> str:
    """Return which LSTM, GRU or RNN a GPU's provider has no kernel for, "" if it has one for the cell."""
    cell = native_cell(c.op)
    used = attributes_of(cell, [c.activation_of]).get("activations", CUDNN_ACTIVATIONS[cell])
    if provider == "webgpu" and cell not in WEBGPU_CELLS:
        return cell
    has_activations = WEBGPU_ACTIVATIONS.issuperset(used) if provider == "webgpu" else used == CUDNN_ACTIVATIONS[cell]
    if not has_activations:
        return f"{cell} with {', '.join(used)}"
    if provider == "cuda" and cell_name(c.op) == "gru":
        return "GRU that resets before the product"
    if provider == "cuda" and c.conditions & {"peephole", "coupled"}:
        return "LSTM with peepholes or coupled gates"
    return ""
