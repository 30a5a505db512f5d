"""Cells in a checkpoint without graph: by the names of its variables, and by their shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..convert.tf1 import FORGET_BIAS, REQUIRED, SCOPES, by_scope
from ..formulas import FORMULAS
from ..optable import Array
from .found import Found, State, Weights
from .trace import AVERAGE, Source
from .variables import Variables

_SLOT = re.compile(
    rf"(/(Adam|Adam_1|AdamW|Momentum|Adagrad|Adadelta|Adadelta_1|RMSProp|RMSProp_1|Ftrl|Ftrl_1)|{AVERAGE})\Z"
)
_CELL = re.compile("lstm|gru", re.IGNORECASE)
_OLDER = {"BasicLSTMCell": "basic_lstm_cell", "LSTMCell": "lstm_cell", "LSTMBlockCell": "lstm_cell"}
_NO_CLIP = {"BasicLSTMCell"}  # it has no such argument


def found_named(variables: Variables) -> list[Found]:
    """What has a cell's names. forget_bias and cell_clip are None where the class leaves them open."""
    names = [name for name in variables.stored if not _SLOT.search(name)]
    found = []
    for (scope, kind), roles in by_scope(names).items():
        last = re.sub(r"_\d+\Z", "", scope.rpartition("/")[2])
        last = _OLDER.get(last, last)
        if not REQUIRED[kind] <= roles.keys() or (kind == "LSTM" and not _CELL.search(last)):
            continue
        if kind == "LSTM" and scope.endswith("/projection"):
            continue
        refused = _refused(scope, kind, names)
        sources = {role: _source(variables, name) for role, name in roles.items()}
        if kind == "LSTM":
            found.append(_lstm(scope, last, sources, refused))
        else:
            cell = "CudnnCompatibleGRUCell" if kind == "CudnnCompatibleGRU" else "GRUCell"
            found.append(Found(scope, cell, cell="GRU", sources=_by_shape(sources), step=_gru_step, refused=refused))
    return found


def _source(variables: Variables, name: str) -> Source:
    stored = variables.stored[name]
    return Source(name, tuple(stored.shape), stored.dtype, lambda more: variables[name + more], (name,))


def _by_shape(sources: dict[str, Source]) -> dict[str, Source]:
    """One build of TensorFlow stored w_ru and w_c under each other's names."""
    for one, other in (("w_ru", "w_c"), ("b_ru", "b_c")):
        sizes = [sources[role].shape[-1:] if role in sources else () for role in (one, other)]
        if all(sizes) and sizes[1][0] == 2 * sizes[0][0]:
            sources[one], sources[other] = sources[other], sources[one]
    return sources


def _refused(scope: str, kind: str, names: list[str]) -> str | None:
    inside = [name for name in names if name.startswith(f"{scope}/")]
    if scope.endswith("coupled_input_forget_gate_lstm_cell"):
        return "its input gate is coupled to its forget gate; the gates of the block cells are independent"
    if projection := [name for name in inside if name.startswith(f"{scope}/projection/")]:
        return f"it has a projection, {projection[0]}, which the block cells do not have"
    if normal := [name for name in inside if re.search("/(gamma|beta)\\Z", name)]:
        return f"it has layer normalization, {normal[0]}, which the block cells do not have"
    if kind == "CudnnCompatibleGRU":
        return "it resets after the product: convert its variables with convert.from_tf1"
    return None


def _lstm(scope: str, last: str, sources: dict[str, Source], refused: str | None) -> Found:
    kind = SCOPES.get(last, "LSTMCell")
    peepholes = {"wci", "wcf", "wco"} & sources.keys()
    if refused is None and len(peepholes) not in (0, 3):
        refused = f"it has only {', '.join(sorted(peepholes))} of the peephole weights wci, wcf and wco"
    if refused is None and last not in SCOPES:
        refused = "the order of its gates is unknown: the name is of none of TensorFlow's cells; open its graph (.meta)"
    cudnn = kind == "CudnnCompatibleLSTMCell"
    attributes: dict[str, Any] = {
        "forget_bias": FORGET_BIAS[kind] if cudnn else None,
        "cell_clip": 0.0 if cudnn or kind in _NO_CLIP else None,
        "use_peephole": bool(peepholes),
        "gate_order": "icfo",
    }
    return Found(scope, kind, sources=sources, attributes=attributes, step=_lstm_step, refused=refused)


def _lstm_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    given = {name: value for name, value in attributes.items() if name != "gate_order"}
    result = FORMULAS["LSTMBlockCell"](x=x, cs_prev=state[0], h_prev=state[1], **weights, **given)
    return result.cs, result.h


def _gru_step(weights: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
    return (FORMULAS["GRUBlockCell"](x=x, h_prev=state[0], **weights).h,)
