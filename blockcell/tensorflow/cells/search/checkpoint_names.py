"""The search for cells in a checkpoint without graph: by the names of its variables, and by their shapes.

In come the variables; out go cells, whose layers are checked against formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....convert.keras_layers import cell_from_arrays
from ....convert.tf1 import FORGET_BIAS, REQUIRED, SCOPES, by_scope, exchange_by_shape
from ....gates import ORDERS, reorder
from ....layers import LSTM
from ....optable import Array, sizes_of
from ...variables import Variables, alike
from ..cell.cell_definition import LAYER_SPECS, CellDefinition
from ..weights.weight_slices import AVERAGE, WeightSource, zero_bias
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
            cells[scope] = CellDefinition("BasicRNNCell", layer_kind="RNN", **rnn, refusal=refusal)
        else:
            sources = exchange_by_shape(sources)
            cells[scope] = CellDefinition("GRUCell", layer_kind="GRU", sources=sources, refusal=refusal)
    return cells


def _read_source(variables: Variables, name: str) -> WeightSource:
    stored = variables.stored[name]

    def read(suffix: str) -> Array:
        return alike(variables[name + suffix], name + suffix, stored.dtype, stored.shape)

    return WeightSource(name, tuple(stored.shape), stored.dtype, read, (name,))


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
    return CellDefinition(tf_class, sources=sources, attributes=attributes, refusal=refusal)


def _cudnn_gru(sources: dict[str, WeightSource], refusal: str | None) -> CellDefinition:
    """Define a GRU that resets after the product, with two kernels for the candidate, one for x and one for h."""
    w_cx, w_ch = sources["w_cx"], sources["w_ch"]
    fits = len(w_cx.shape) == 2 and w_cx.shape[1:] == w_ch.shape[1:]
    shape = (w_cx.shape[0] + w_ch.shape[0], w_ch.shape[1]) if fits else ()
    w_c = _combine([w_cx, w_ch], shape, lambda suffix: np.concatenate([w_cx.read(suffix), w_ch.read(suffix)]))
    weights = {"w_ru": sources["w_ru"], "w_c": w_c, "b_ru": sources["b_ru"]}
    weights |= {"b_c": sources["b_cx"], "b_hc": sources["b_hc"]}
    arguments: dict[str, Any] = {"attributes": {"reset_after": True}, "refusal": refusal}
    return CellDefinition("CudnnCompatibleGRUCell", layer_kind="GRU", sources=weights, **arguments)


# -------------------------------------------------------------------------------------------------------------- Keras
def _keras_cell(variables: Variables, scope: str) -> CellDefinition | None:
    """Define an LSTM, GRU or RNN of two kernels and perhaps a bias; return None without one of the kernels."""
    names = [f"{scope}/kernel", f"{scope}{_RECURRENT}", f"{scope}/bias"]
    parts = [_read_source(variables, name) for name in names if name in variables.stored]
    if not {*names[:2]} <= {part.name for part in parts}:
        return None
    kernel, recurrent, *biases = parts
    hidden = recurrent.shape[0] if len(recurrent.shape) == 2 else 0
    gates = recurrent.shape[1] // hidden if hidden and not recurrent.shape[1] % hidden else 0
    layer_kind = {1: "RNN", 3: "GRU"}.get(gates, "LSTM")
    tf_class = "Keras SimpleRNN" if layer_kind == "RNN" else f"Keras {layer_kind}"
    refusal = _keras_refusal(kernel.shape, recurrent.shape, [bias.shape for bias in biases], gates, hidden)
    if refusal is not None:
        role = "w_c" if layer_kind == "GRU" else "w"
        return CellDefinition(tf_class, layer_kind=layer_kind, sources={role: kernel}, refusal=refusal)
    resets_after = layer_kind == "GRU" and len(biases[0].shape) == 2
    attributes: dict[str, Any] = {"reset_after": True} if resets_after else {}
    keras_order = ORDERS["Keras LSTM"]
    if layer_kind == "LSTM":
        attributes = {"forget_bias": 0.0, "cell_clip": 0.0, "use_peephole": False, "gate_order": keras_order}
    elif layer_kind == "RNN":
        attributes = {"activation": None}
    sources = {}
    for tensor in LAYER_SPECS["GRU that resets after" if resets_after else layer_kind].op.weights:
        shape = sizes_of(tensor.shape, {"I": kernel.shape[0], "H": hidden})

        def read(suffix: str, role: str = tensor.name) -> Array:
            layer = cell_from_arrays(scope, [part.read(suffix) for part in parts], None, {})
            weight = layer.weights[role]
            return reorder(weight, layer.gate_order, keras_order) if isinstance(layer, LSTM) else weight

        if tensor.kind == "matrix":
            sources[tensor.name] = _combine([kernel, recurrent], shape, read)
        elif tensor.kind == "bias":
            sources[tensor.name] = _combine(biases, shape, read) if biases else zero_bias(shape[0], kernel.dtype)
    return CellDefinition(tf_class, layer_kind=layer_kind, sources=sources, attributes=attributes)


def _keras_refusal(
    kernel: tuple[int, ...], recurrent: tuple[int, ...], biases: list[tuple[int, ...]], gates: int, hidden: int
) -> str | None:
    """Return the reason to refuse a cell by the shapes of its variables; None if there is none."""
    if gates not in (1, 3, 4) or len(kernel) != 2 or kernel[1] != gates * hidden or not kernel[0]:
        shapes = f"{kernel} and {recurrent}"
        return f"its kernels have the shapes {shapes}; an LSTM's are (I, 4H) and (H, 4H), a GRU's 3H, an RNN's H"
    if gates == 3 and not biases:
        return "it has no bias, whose shape would tell whether it resets after the product: use convert.from_keras"
    expected = [(gates * hidden,), *([(2, 3 * hidden)] if gates == 3 else [])]
    if biases and biases[0] not in expected:
        return f"its bias has the shape {biases[0]}, as in CuDNN's layers; expected {' or '.join(map(str, expected))}"
    return None


def _combine(sources: Sequence[WeightSource], shape: tuple[int, ...], read: Callable[[str], Array]) -> WeightSource:
    """Make the weight that is read from several variables."""
    names = tuple(source.name for source in sources)
    return WeightSource(" + ".join(names), shape, sources[0].dtype, read, names)
