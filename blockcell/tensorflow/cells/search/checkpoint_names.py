"""Cells in a checkpoint without graph: by the names of its variables, and by their shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....convert.tf1 import FORGET_BIAS, REQUIRED, SCOPES, by_scope
from ....formulas import FORMULAS, activated, lstm_layer, sigmoid
from ....optable import COUPLED_GATES, OPS, Array
from ...variables import Variables, alike
from ..cell.found_cell import Found
from ..cell.layer_check import State, Weights
from ..weights.weight_sources import AVERAGE, Source
from .refusals import other_cell

_SLOT = re.compile(
    rf"(/(Adam|Adam_1|AdamW|Momentum|Adagrad|Adadelta|Adadelta_1|RMSProp|RMSProp_1|Ftrl|Ftrl_1)|{AVERAGE})\Z"
)
_CELL = re.compile("lstm|gru|sru|rnn_cell", re.IGNORECASE)
_OLDER = {"BasicLSTMCell": "basic_lstm_cell", "LSTMCell": "lstm_cell", "LSTMBlockCell": "lstm_cell"}
_NO_CLIP = {"BasicLSTMCell"}  # it has no such argument
_RECURRENT = "/recurrent_kernel"


def found_named(variables: Variables) -> list[Found]:
    """What has a cell's names. forget_bias and cell_clip are None where the class leaves them open."""
    names = [name for name in variables.stored if name not in variables.slots and not _SLOT.search(name)]
    scopes = [name.removesuffix(_RECURRENT) for name in names if name.endswith(_RECURRENT)]
    found = [each for each in (_keras(variables, scope) for scope in scopes) if each is not None]
    theirs = {f"{scope}/{name}" for scope in scopes for name in ("kernel", "bias")}
    names = [name for name in names if name not in theirs]
    for (scope, kind), roles in by_scope(names).items():
        last = re.sub(r"_\d+\Z", "", scope.rpartition("/")[2])
        last = _OLDER.get(last, last)
        if not REQUIRED[kind] <= roles.keys() or (kind == "LSTM" and not _CELL.search(last)):
            continue
        refused = _refused(scope, kind, names)
        sources = {role: _source(variables, name) for role, name in roles.items()}
        if kind == "LSTM":
            found.append(_lstm(scope, last, sources, refused))
        elif kind == "CudnnCompatibleGRU":
            found.append(_cudnn_gru(scope, sources, refused))
        elif kind == "RNN":
            rnn: dict[str, Any] = {"sources": sources, "attributes": {"activation": None}, "step": _rnn_step}
            found.append(Found(scope, "BasicRNNCell", cell="RNN", **rnn, refused=refused))
        else:
            more: dict[str, Any] = {"sources": _by_shape(sources), "step": _gru_step, "refused": refused}
            found.append(Found(scope, "GRUCell", cell="GRU", **more))
    return found


def _source(variables: Variables, name: str) -> Source:
    stored = variables.stored[name]

    def read(more: str) -> Array:
        return alike(variables[name + more], name + more, stored.dtype, stored.shape)

    return Source(name, tuple(stored.shape), stored.dtype, read, (name,))


def _by_shape(sources: dict[str, Source]) -> dict[str, Source]:
    """One build of TensorFlow stored w_ru and w_c under each other's names."""
    for one, other in (("w_ru", "w_c"), ("b_ru", "b_c")):
        sizes = [sources[role].shape[-1:] if role in sources else () for role in (one, other)]
        if all(sizes) and sizes[1][0] == 2 * sizes[0][0]:
            sources[one], sources[other] = sources[other], sources[one]
    return sources


def _refused(scope: str, kind: str, names: list[str]) -> str | None:
    inside = [name for name in names if name.startswith(f"{scope}/")]
    if other := other_cell(scope):
        return other
    if projection := [name for name in inside if re.search("/projection/bias(es)?\\Z", name)]:
        return f"it has a projection with a bias, {projection[0]}, which layers do not have"
    if normal := [name for name in inside if re.search("/(gamma|beta)\\Z", name)]:
        return f"it has layer normalization, {normal[0]}, which the block cells do not have"
    return None


def _lstm(scope: str, last: str, sources: dict[str, Source], refused: str | None) -> Found:
    kind = SCOPES.get(last, "LSTMCell")
    coupled = kind == "CoupledInputForgetGateLSTMCell"
    every = ("wci", "wcf", "wco")[coupled:]
    peepholes = [role for role in ("wci", "wcf", "wco") if role in sources]
    sources.pop("b_p", None)
    if refused is None and (*peepholes,) not in ((), every):
        refused = f"it has only {', '.join(peepholes)} of the peephole weights {', '.join(every)}"
    if refused is None and last not in SCOPES:
        refused = "the order of its gates is unknown: the name is of none of TensorFlow's cells; open its graph (.meta)"
    cudnn = kind == "CudnnCompatibleLSTMCell"
    attributes: dict[str, Any] = {
        "forget_bias": FORGET_BIAS[kind] if cudnn else None,
        "cell_clip": 0.0 if cudnn or kind in _NO_CLIP else None,
        "use_peephole": bool(peepholes),
        **({"proj_clip": None} if "w_p" in sources else {}),
        **({"coupled": True} if coupled else {"gate_order": "icfo"}),
    }
    return Found(scope, kind, sources=sources, attributes=attributes, step=_lstm_step, refused=refused)


def _lstm_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    given = {name: value for name, value in attributes.items() if name in ("forget_bias", "cell_clip", "proj_clip")}
    gates = COUPLED_GATES if attributes.get("coupled") else OPS["BlockLSTM"].gates
    known: dict[str, Any] = {**weights, **given}
    result = lstm_layer(x=x[None], cs_prev=state[0], h_prev=state[1], gates=gates, **known)
    return result.cs[0], result.h[0]


def _rnn_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    given = {"activation": attributes["activation"]}
    return (FORMULAS["block_rnn"](seq_len_max=1, x=x[None], h_prev=state[0], **weights, **given).h[0],)


def _gru_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    return (FORMULAS["GRUBlockCell"](x=x, h_prev=state[0], **weights).h,)


def _cudnn_gru(scope: str, sources: dict[str, Source], refused: str | None) -> Found:
    """A GRU that resets after the product, with a kernel for x and one for the state in the candidate."""
    x, h = sources.pop("w_cx"), sources.pop("w_ch")
    if refused is None and (len(x.shape) != 2 or len(h.shape) != 2 or x.shape[1] != h.shape[1]):
        refused = f"the kernels of its candidate have the shapes {x.shape} and {h.shape}; expected (I, H) and (H, H)"
    shape = (x.shape[0] + h.shape[0], h.shape[1]) if refused is None else ()
    made = {"w_ru": sources["w_ru"], "w_c": _from([x, h], shape, lambda *kernels: np.concatenate(kernels))}
    made |= {"b_ru": sources["b_ru"], "b_c": sources["b_cx"], "b_hc": sources["b_hc"]}
    more: dict[str, Any] = {"attributes": {"reset_after": True}, "step": _reset_after_step, "refused": refused}
    return Found(scope, "CudnnCompatibleGRUCell", cell="GRU", sources=made, **more)


def _reset_after_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    return (FORMULAS["block_gru_reset_after"](seq_len_max=1, x=x[None], h_prev=state[0], **weights).h[0],)


# -------------------------------------------------------------------------------------------------------------- Keras
def _keras(variables: Variables, scope: str) -> Found | None:
    """An LSTM, GRU or RNN with a kernel, a recurrent kernel and perhaps a bias; None if it is something else."""
    names = {"kernel": f"{scope}/kernel", "recurrent": f"{scope}{_RECURRENT}", "bias": f"{scope}/bias"}
    parts = {part: _source(variables, name) for part, name in names.items() if name in variables.stored}
    kernel, recurrent, bias = (parts.get(part) for part in names)
    if kernel is None or recurrent is None:
        return None
    hidden = recurrent.shape[0] if len(recurrent.shape) == 2 else 0
    gates = recurrent.shape[1] // hidden if hidden and not recurrent.shape[1] % hidden else 0
    cell = {1: "RNN", 3: "GRU"}.get(gates, "LSTM")
    kind = "Keras SimpleRNN" if cell == "RNN" else f"Keras {cell}"
    refused = _keras_refused(kernel, recurrent, bias, gates, hidden)
    if refused is not None:
        role = "w_c" if cell == "GRU" else "w"
        return Found(scope, kind, cell=cell, sources={role: kernel}, refused=refused)
    attributes: dict[str, Any] = {}
    op = OPS[{"LSTM": "BlockLSTM", "GRU": "block_gru", "RNN": "block_rnn"}[cell]]
    columns: dict[str, tuple[int, ...]]
    if cell == "RNN":
        attributes, columns = {"activation": None}, {"w": (0,), "b": (0,)}
    elif cell == "LSTM":
        attributes = {"forget_bias": 0.0, "cell_clip": 0.0, "use_peephole": False, "gate_order": "ifco"}
        columns = {"w": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
    else:
        columns = {"w_ru": (1, 0), "w_c": (2,), "b_ru": (1, 0), "b_c": (2,)}  # Keras has z, our u, first
    sources = {}
    kinds = {tensor.name: tensor.kind for tensor in op.weights}
    for role, order in columns.items():
        if kinds[role] == "matrix":
            shape = kernel.shape[0] + hidden, len(order) * hidden
            sources[role] = _from(
                [kernel, recurrent], shape, lambda k, r, order=order: _gates(np.r_[k, r], order, hidden)
            )
        elif bias is None:
            sources[role] = _from([kernel], (len(order) * hidden,), lambda k: np.zeros(k.shape[-1], k.dtype))
        else:
            sources[role] = _from([bias], (len(order) * hidden,), lambda b, order=order: _bias(b, order, hidden))
    if bias is not None and len(bias.shape) == 2:
        attributes = {"reset_after": True}
        sources["b_hc"] = _from([bias], (hidden,), lambda b: _gates(b[1], (2,), hidden))
    step = {"LSTM": _keras_lstm, "GRU": _keras_gru, "RNN": _keras_rnn}[cell]
    return Found(scope, kind, cell=cell, sources=sources, attributes=attributes, step=step, parts=parts)


def _keras_refused(kernel: Source, recurrent: Source, bias: Source | None, gates: int, hidden: int) -> str | None:
    shapes = f"{kernel.shape} and {recurrent.shape}"
    if gates not in (1, 3, 4) or len(kernel.shape) != 2 or kernel.shape[1] != gates * hidden or not kernel.shape[0]:
        return f"its kernels have the shapes {shapes}; an LSTM's are (I, 4H) and (H, 4H), a GRU's 3H, an RNN's H"
    if gates == 3 and bias is None:
        return "it has no bias, whose shape would tell whether it resets after the product: use convert.from_keras"
    expected = [(gates * hidden,), *([(2, 3 * hidden)] if gates == 3 else [])]
    if bias is not None and bias.shape not in expected:
        return f"its bias has the shape {bias.shape}, as in CuDNN's layers; expected {' or '.join(map(str, expected))}"
    return None


def _from(parts: list[Source], shape: tuple[int, ...], made: Callable[..., Array]) -> Source:
    name, leaves = " + ".join(part.name for part in parts), tuple(part.name for part in parts)
    return Source(name, shape, parts[0].dtype, lambda more: made(*(part.read(more) for part in parts)), leaves)


def _gates(array: Array, order: Sequence[int], hidden: int) -> Array:
    """The columns of some gates."""
    return np.concatenate([array[..., k * hidden : (k + 1) * hidden] for k in order], -1)


def _bias(bias: Array, order: Sequence[int], hidden: int) -> Array:
    """That of the input, with that of the state where both are added."""
    both = bias if bias.ndim == 1 else bias[0] if order == (2,) else bias[0] + bias[1]
    return _gates(both, order, hidden)


def _cut(weights: Weights, x: Array, h: Array, gates: int) -> list[Array]:
    """The kernels and the bias in float64, for as many inputs and cells as x and h have, gates in an axis before."""
    found = []
    for part, rows in (("kernel", x.shape[-1]), ("recurrent", h.shape[-1])):
        array = weights[part].astype(np.float64)
        found.append(np.moveaxis(array.reshape(len(array), gates, -1)[:rows, :, : h.shape[-1]], 1, 0))
    bias = weights["bias"].astype(np.float64) if "bias" in weights else np.zeros(gates * weights["recurrent"].shape[0])
    return [*found, bias.reshape(-1, gates, 1, weights["recurrent"].shape[0])[..., : h.shape[-1]]]


def _keras_lstm(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    cs, h = state
    kernel, recurrent, bias = _cut(weights, x, h, 4)
    i, f, c, o = x @ kernel + h @ recurrent + bias[0]
    cs = sigmoid(f) * cs + sigmoid(i) * np.tanh(c)
    return cs, sigmoid(o) * np.tanh(cs)


def _keras_rnn(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    (h,) = state
    kernel, recurrent, bias = _cut(weights, x, h, 1)
    return (activated((x @ kernel + h @ recurrent + bias[0])[0], attributes["activation"]),)


def _keras_gru(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    (h,) = state
    kernel, recurrent, bias = _cut(weights, x, h, 3)
    given = x @ kernel + bias[0]
    inner = h @ recurrent + (bias[1] if len(bias) == 2 else 0)
    z, r = sigmoid(given[0] + inner[0]), sigmoid(given[1] + inner[1])
    new = r * inner[2] if len(bias) == 2 else (r * h) @ recurrent[2]
    return (z * h + (1 - z) * np.tanh(given[2] + new),)
