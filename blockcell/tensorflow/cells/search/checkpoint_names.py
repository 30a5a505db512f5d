"""The search for cells in a checkpoint without graph: by the names of its variables, and by their shapes.

In come the variables; out go cells, with formulas of steps that their layers are checked against.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....convert.tf1 import FORGET_BIAS, REQUIRED, SCOPES, by_scope
from ....formulas import activated, lstm_layer, sigmoid
from ....gates import COUPLED_GATES, GATE_ORDERS, ORDERS, reorder
from ....optable import OPS, Array
from ...variables import Variables, alike
from ..cell.cell_definition import CellDefinition
from ..cell.layer_check import State, Weights
from ..weights.weight_sources import AVERAGE, WeightSource
from .block_ops import formula_step
from .refusals import refused_cell_name

_SLOT = re.compile(
    rf"(/(Adam|Adam_1|AdamW|Momentum|Adagrad|Adadelta|Adadelta_1|RMSProp|RMSProp_1|Ftrl|Ftrl_1)|{AVERAGE})\Z"
)
_CELL = re.compile("lstm|gru|sru|rnn_cell", re.IGNORECASE)
_OLDER = {"BasicLSTMCell": "basic_lstm_cell", "LSTMCell": "lstm_cell", "LSTMBlockCell": "lstm_cell"}
_NO_CLIP = {"BasicLSTMCell"}  # it has no such argument
_RECURRENT = "/recurrent_kernel"


def search_names(variables: Variables) -> dict[str, CellDefinition]:
    """Define a cell for each scope that has names of one; None is an attribute that the class does not fix."""
    names = [name for name in variables.stored if name not in variables.slots and not _SLOT.search(name)]
    scopes = [name.removesuffix(_RECURRENT) for name in names if name.endswith(_RECURRENT)]
    keras_cells = {scope: _keras_cell(variables, scope) for scope in scopes}
    cells = {scope: cell for scope, cell in keras_cells.items() if cell is not None}
    keras_names = {f"{scope}/{name}" for scope in scopes for name in ("kernel", "bias")}
    names = [name for name in names if name not in keras_names]
    for (scope, kind), roles in by_scope(names).items():
        last = re.sub(r"_\d+\Z", "", scope.rpartition("/")[2])
        last = _OLDER.get(last, last)
        if not REQUIRED[kind] <= roles.keys() or (kind == "LSTM" and not _CELL.search(last)):
            continue
        refusal = _refusal(scope, names)
        sources = {role: _read_source(variables, name) for role, name in roles.items()}
        if kind == "LSTM":
            cells[scope] = _lstm_cell(last, sources, refusal)
        elif kind == "CudnnCompatibleGRU":
            cells[scope] = _cudnn_gru(sources, refusal)
        elif kind == "RNN":
            rnn: dict[str, Any] = {"sources": sources, "attributes": {"activation": None}}
            step = formula_step(OPS["block_rnn"])
            cells[scope] = CellDefinition("BasicRNNCell", layer_kind="RNN", **rnn, step=step, refusal=refusal)
        else:
            gru: dict[str, Any] = {"sources": _swap_by_shape(sources), "step": formula_step(OPS["GRUBlockCell"])}
            cells[scope] = CellDefinition("GRUCell", layer_kind="GRU", **gru, refusal=refusal)
    return cells


def _read_source(variables: Variables, name: str) -> WeightSource:
    stored = variables.stored[name]

    def read(suffix: str) -> Array:
        return alike(variables[name + suffix], name + suffix, stored.dtype, stored.shape)

    return WeightSource(name, tuple(stored.shape), stored.dtype, read, (name,))


def _swap_by_shape(sources: dict[str, WeightSource]) -> dict[str, WeightSource]:
    """Swap w_ru and w_c if their shapes are swapped, as one build of TensorFlow stored them."""
    for left, right in (("w_ru", "w_c"), ("b_ru", "b_c")):
        sizes = [sources[role].shape[-1:] if role in sources else () for role in (left, right)]
        if all(sizes) and sizes[1][0] == 2 * sizes[0][0]:
            sources[left], sources[right] = sources[right], sources[left]
    return sources


def _refusal(scope: str, names: list[str]) -> str | None:
    """Return the reason to refuse a cell by its names; None if there is none."""
    cell_names = [name for name in names if name.startswith(f"{scope}/")]
    if refusal := refused_cell_name(scope):
        return refusal
    if projection := [name for name in cell_names if re.search("/projection/bias(es)?\\Z", name)]:
        return f"it has a projection with a bias, {projection[0]}, which layers do not have"
    if normalization := [name for name in cell_names if re.search("/(gamma|beta)\\Z", name)]:
        return f"it has layer normalization, {normalization[0]}, which the block cells do not have"
    return None


def _lstm_cell(last: str, sources: dict[str, WeightSource], refusal: str | None) -> CellDefinition:
    """Define an LSTM, whose class the last part of its scope tells."""
    tf_class = SCOPES.get(last, "LSTMCell")
    coupled = tf_class == "CoupledInputForgetGateLSTMCell"
    all_peepholes = ("wci", "wcf", "wco")[coupled:]
    peepholes = [role for role in ("wci", "wcf", "wco") if role in sources]
    sources = {role: source for role, source in sources.items() if role != "b_p"}
    if refusal is None and (*peepholes,) not in ((), all_peepholes):
        refusal = f"it has only {', '.join(peepholes)} of the peephole weights {', '.join(all_peepholes)}"
    if refusal is None and last not in SCOPES:
        refusal = "the order of its gates is unknown: the name is of none of TensorFlow's cells; open its graph (.meta)"
    cudnn = tf_class == "CudnnCompatibleLSTMCell"
    attributes: dict[str, Any] = {
        "forget_bias": FORGET_BIAS[tf_class] if cudnn else None,
        "cell_clip": 0.0 if cudnn or tf_class in _NO_CLIP else None,
        "use_peephole": bool(peepholes),
        **({"proj_clip": None} if "w_p" in sources else {}),
        **({"coupled": True} if coupled else {"gate_order": ORDERS["TF1 LSTM"]}),
    }
    return CellDefinition(tf_class, sources=sources, attributes=attributes, step=_lstm_step, refusal=refusal)


def _lstm_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    arguments: dict[str, Any] = dict(weights)
    arguments |= {name: attributes[name] for name in ("forget_bias", "cell_clip", "proj_clip") if name in attributes}
    gates = COUPLED_GATES if attributes.get("coupled") else GATE_ORDERS[ORDERS["TF1 LSTM"]]
    result = lstm_layer(x=x[None], cs_prev=state[0], h_prev=state[1], gates=gates, **arguments)
    return result.cs[0], result.h[0]


def _cudnn_gru(sources: dict[str, WeightSource], refusal: str | None) -> CellDefinition:
    """Define a GRU that resets after the product, with two kernels for the candidate, one for x and one for h."""
    w_cx, w_ch = sources["w_cx"], sources["w_ch"]
    if refusal is None and (len(w_cx.shape) != 2 or len(w_ch.shape) != 2 or w_cx.shape[1] != w_ch.shape[1]):
        shapes = f"{w_cx.shape} and {w_ch.shape}"
        refusal = f"the kernels of its candidate have the shapes {shapes}; expected (I, H) and (H, H)"
    shape = (w_cx.shape[0] + w_ch.shape[0], w_ch.shape[1]) if refusal is None else ()
    weights = {"w_ru": sources["w_ru"], "w_c": _combine([w_cx, w_ch], shape, lambda *arrays: np.concatenate(arrays))}
    weights |= {"b_ru": sources["b_ru"], "b_c": sources["b_cx"], "b_hc": sources["b_hc"]}
    arguments: dict[str, Any] = {"attributes": {"reset_after": True}, "refusal": refusal}
    step = formula_step(OPS["block_gru_reset_after"])
    return CellDefinition("CudnnCompatibleGRUCell", layer_kind="GRU", sources=weights, step=step, **arguments)


# -------------------------------------------------------------------------------------------------------------- Keras
def _keras_cell(variables: Variables, scope: str) -> CellDefinition | None:
    """Define an LSTM, GRU or RNN of two kernels and perhaps a bias; return None without one of the kernels."""
    names = {"kernel": f"{scope}/kernel", "recurrent": f"{scope}{_RECURRENT}", "bias": f"{scope}/bias"}
    parts = {part: _read_source(variables, name) for part, name in names.items() if name in variables.stored}
    kernel, recurrent, bias = (parts.get(part) for part in names)
    if kernel is None or recurrent is None:
        return None
    hidden = recurrent.shape[0] if len(recurrent.shape) == 2 else 0
    gates = recurrent.shape[1] // hidden if hidden and not recurrent.shape[1] % hidden else 0
    layer_kind = {1: "RNN", 3: "GRU"}.get(gates, "LSTM")
    tf_class = "Keras SimpleRNN" if layer_kind == "RNN" else f"Keras {layer_kind}"
    refusal = _keras_refusal(kernel, recurrent, bias, gates, hidden)
    if refusal is not None:
        role = "w_c" if layer_kind == "GRU" else "w"
        return CellDefinition(tf_class, layer_kind=layer_kind, sources={role: kernel}, refusal=refusal)
    attributes: dict[str, Any] = {}
    keras_order = ORDERS[f"Keras {layer_kind}"]
    op = OPS[{"LSTM": "BlockLSTM", "GRU": "block_gru", "RNN": "block_rnn"}[layer_kind]]
    if layer_kind == "RNN":
        attributes = {"activation": None}
    elif layer_kind == "LSTM":
        attributes = {"forget_bias": 0.0, "cell_clip": 0.0, "use_peephole": False, "gate_order": keras_order}
    sources = {}
    for tensor in op.weights:
        role, order = tensor.name, {"w_ru": "ru", "b_ru": "ru", "w_c": "c", "b_c": "c"}.get(tensor.name, keras_order)
        rows, size = kernel.shape[0] + hidden, len(order) * hidden
        if tensor.kind == "peephole":  # Keras has none
            continue
        if tensor.kind == "matrix":
            take_gates = partial(reorder, old_order=keras_order, new_order=order)
            sources[role] = _combine([kernel, recurrent], (rows, size), lambda k, r, take=take_gates: take(np.r_[k, r]))
        elif bias is None:
            sources[role] = _combine([kernel], (size,), lambda k: np.zeros(k.shape[-1], k.dtype))
        else:
            sources[role] = _combine([bias], (size,), partial(_merge_bias, keras_order, order))
    if bias is not None and len(bias.shape) == 2:
        attributes = {"reset_after": True}
        sources["b_hc"] = _combine([bias], (hidden,), lambda b: reorder(b[1], keras_order, "c"))
    step = {"LSTM": _keras_lstm_step, "GRU": _keras_gru_step, "RNN": _keras_rnn_step}[layer_kind]
    return CellDefinition(
        tf_class, layer_kind=layer_kind, sources=sources, attributes=attributes, step=step, step_sources=parts
    )


def _keras_refusal(
    kernel: WeightSource, recurrent: WeightSource, bias: WeightSource | None, gates: int, hidden: int
) -> str | None:
    shapes = f"{kernel.shape} and {recurrent.shape}"
    if gates not in (1, 3, 4) or len(kernel.shape) != 2 or kernel.shape[1] != gates * hidden or not kernel.shape[0]:
        return f"its kernels have the shapes {shapes}; an LSTM's are (I, 4H) and (H, 4H), a GRU's 3H, an RNN's H"
    if gates == 3 and bias is None:
        return "it has no bias, whose shape would tell whether it resets after the product: use convert.from_keras"
    expected = [(gates * hidden,), *([(2, 3 * hidden)] if gates == 3 else [])]
    if bias is not None and bias.shape not in expected:
        return f"its bias has the shape {bias.shape}, as in CuDNN's layers; expected {' or '.join(map(str, expected))}"
    return None


def _combine(sources: list[WeightSource], shape: tuple[int, ...], combine: Callable[..., Array]) -> WeightSource:
    def read(suffix: str) -> Array:
        return combine(*(source.read(suffix) for source in sources))

    names = tuple(source.name for source in sources)
    return WeightSource(" + ".join(names), shape, sources[0].dtype, read, names)


def _merge_bias(keras_order: str, order: str, bias: Array) -> Array:
    """Take the bias of gates from the bias of x, with the bias of h if a layer adds both."""
    return reorder(bias if bias.ndim == 1 else bias[0] if order == "c" else bias[0] + bias[1], keras_order, order)


def _slice_weights(weights: Weights, x: Array, h: Array, gates: int) -> list[Array]:
    """Return kernels and bias in float64, sliced for the inputs and units of x and h, with gates on the first axis."""
    kernels = []
    for name, rows in (("kernel", x.shape[-1]), ("recurrent", h.shape[-1])):
        array = weights[name].astype(np.float64)
        kernels.append(np.moveaxis(array.reshape(len(array), gates, -1)[:rows, :, : h.shape[-1]], 1, 0))
    bias = weights["bias"].astype(np.float64) if "bias" in weights else np.zeros(gates * weights["recurrent"].shape[0])
    return [*kernels, bias.reshape(-1, gates, 1, weights["recurrent"].shape[0])[..., : h.shape[-1]]]


def _keras_lstm_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    cs, h = state
    kernel, recurrent, bias = _slice_weights(weights, x, h, 4)
    i, f, c, o = x @ kernel + h @ recurrent + bias[0]
    cs = sigmoid(f) * cs + sigmoid(i) * np.tanh(c)
    return cs, sigmoid(o) * np.tanh(cs)


def _keras_rnn_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    (h,) = state
    kernel, recurrent, bias = _slice_weights(weights, x, h, 1)
    return (activated((x @ kernel + h @ recurrent + bias[0])[0], attributes["activation"]),)


def _keras_gru_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    (h,) = state
    kernel, recurrent, bias = _slice_weights(weights, x, h, 3)
    from_x = x @ kernel + bias[0]
    inner = h @ recurrent + (bias[1] if len(bias) == 2 else 0)
    z, r = sigmoid(from_x[0] + inner[0]), sigmoid(from_x[1] + inner[1])
    new = r * inner[2] if len(bias) == 2 else (r * h) @ recurrent[2]
    return (z * h + (1 - z) * np.tanh(from_x[2] + new),)
