"""Weights from TensorFlow 1 checkpoints."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from ..activations import Activation
from ..gates import ORDERS
from ..layers import GRU, LSTM, RNN
from ..optable import Array, peephole_names
from .shared import ConversionError, check_shapes, read_arrays, read_names, zoneout_remark

_LSTMS = {  # TensorFlow 1's classes of LSTMs, their defaults of forget_bias, and the names of their variables' scopes
    "LSTMBlockCell": (1.0, "lstm_cell"),
    "LSTMBlockFusedCell": (1.0, "lstm_fused_cell", "lstm_block_wrapper"),
    "BasicLSTMCell": (1.0, "basic_lstm_cell"),
    "LSTMCell": (1.0,),
    "CudnnCompatibleLSTMCell": (0.0, "cudnn_compatible_lstm_cell"),
    "CudnnCompatibleLSTM": (0.0,),
    "CoupledInputForgetGateLSTMCell": (1.0, "coupled_input_forget_gate_lstm_cell"),
}
FORGET_BIAS = {name: forget_bias for name, (forget_bias, *_) in _LSTMS.items()}
SCOPES = {scope: name for name, (_, *scopes) in _LSTMS.items() for scope in scopes}
_KINDS = {  # those in REQUIRED, by class
    **dict.fromkeys(FORGET_BIAS, "LSTM"),
    **dict.fromkeys(("GRUBlockCell", "GRUBlockCellV2", "GRUCell"), "GRU"),
    "CudnnCompatibleGRUCell": "CudnnCompatibleGRU",
    "BasicRNNCell": "RNN",
}
REQUIRED = {
    "GRU": {"w_ru", "w_c", "b_ru", "b_c"},
    "CudnnCompatibleGRU": {"w_ru", "b_ru", "w_cx", "b_cx", "w_ch", "b_hc"},
    "LSTM": {"w", "b"},
    "RNN": {"w", "b"},
}
_RNN = re.compile(r"(\A|/)(basic_rnn_cell(_\d+)?|BasicRNNCell)\Z")
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {  # the endings of variables' names, also those of older versions
    "GRU": {
        "w_ru": ("w_ru", "gates/kernel", "gates/weights", "Gates/Linear/Matrix"),
        "w_c": ("w_c", "candidate/kernel", "candidate/weights", "Candidate/Linear/Matrix"),
        "b_ru": ("b_ru", "gates/bias", "gates/biases", "Gates/Linear/Bias"),
        "b_c": ("b_c", "candidate/bias", "candidate/biases", "Candidate/Linear/Bias"),
        "w_cx": ("candidate/input_projection/kernel",),  # these four: the candidate of CudnnCompatibleGRUCell
        "b_cx": ("candidate/input_projection/bias",),
        "w_ch": ("candidate/hidden_projection/kernel",),
        "b_hc": ("candidate/hidden_projection/bias",),
    },
    "LSTM": {
        "w_p": ("projection/kernel", "projection/weights", "W_P_0"),  # before w, whose endings these have, too
        "b_p": ("projection/bias", "projection/biases"),  # of another layer: LSTMCell has none
        "w": ("kernel", "weights", "W_0", "Linear/Matrix"),
        "b": ("bias", "biases", "B", "Linear/Bias"),
        "wci": ("w_i_diag", "W_I_diag"),
        "wcf": ("w_f_diag", "W_F_diag"),
        "wco": ("w_o_diag", "W_O_diag"),
    },
}


def from_tf1(
    variables: Mapping[str, Any],
    *,
    cell: str | None = None,
    scope: str | None = None,
    forget_bias: float | None = None,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    activation: Activation = "tanh",
) -> LSTM | GRU | RNN:
    """Convert the variables of a TensorFlow 1 cell, as a checkpoint holds them.

    .. code-block:: python

        reader = tf.train.load_checkpoint("model.ckpt")
        variables = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        layer = convert.from_tf1(variables, scope="rnn/lstm_cell", forget_bias=1.0)

    A CHECKPOINT DOES NOT CONTAIN forget_bias, cell_clip, proj_clip AND activation. They are arguments of the cell in
    the program that wrote it, and are in the graph (``.meta``, ``.pb``). A wrong forget_bias gives wrong results and no
    error, so pass it.

    Parameters
    ----------
    variables : mapping of str to array_like
        Names and values. Variables that belong to no cell, such as ``.../Adam`` or ``global_step``, are ignored.
    cell : str, optional
        The class: LSTMBlockCell, LSTMBlockFusedCell, BasicLSTMCell, LSTMCell, CudnnCompatibleLSTMCell,
        CoupledInputForgetGateLSTMCell, GRUBlockCell, GRUBlockCellV2, GRUCell, CudnnCompatibleGRUCell or BasicRNNCell.
        None infers it from the names of the variables.
    scope : str, optional
        The prefix of the cell's variables, such as ``"rnn/multi_rnn_cell/cell_0/lstm_cell"``. Needed if there is more
        than one cell.
    forget_bias : float, optional
        Of an LSTM. None warns and takes the default of the class: 0.0 for CudnnCompatibleLSTMCell, else 1.0.
    cell_clip, proj_clip : float
        Of an LSTM, and of its projection; 0 means no clip. TensorFlow 1's classes do not clip by default.
    activation : str or tuple
        The ``activation`` argument of the class: a name, or a name and parameters, as in layers.

    Returns
    -------
    LSTM, GRU or RNN
        It has peepholes and a projection if the cell has them. forget_bias is not added to the bias, as in TensorFlow.
        A CudnnCompatibleGRUCell is a GRU with reset_after=True, a CoupledInputForgetGateLSTMCell an LSTM with
        coupled=True.

    Warns
    -----
    UserWarning
        forget_bias is not given. The scope says zoneout, which is not converted.

    Raises
    ------
    TypeError
        variables is no mapping, a peephole is missing, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        The projection of the cell has a bias.
    ValueError
        There is no cell, or several match, or shapes are wrong.

    Notes
    -----
    Convert the cells of a bidirectional or stacked network one by one, and combine them with `blockcell.Bidirectional`
    and `blockcell.Stack`. To take the moving averages of the weights, rename them first:
    ``{name.removesuffix("/ExponentialMovingAverage"): ... for name in ... if name.endswith(...)}``.
    One build of TensorFlow exchanged the names of w_ru and w_c; their shapes show it, and they are swapped back.
    """
    caller = "from_tf1"
    if not isinstance(variables, Mapping):
        expected = "expected names and arrays"
        raise TypeError(f"{caller}: variables is of type {type(variables).__name__}; {expected}")
    read_names(caller, variables)
    if cell is not None and cell not in _KINDS:
        raise ConversionError(f"{caller}: cell is {cell!r}; expected one of {', '.join(_KINDS)}")
    scope, kind, names = _find(caller, variables, cell, scope)
    arrays = read_arrays(caller, {name: variables[name] for name in names.values()})
    values: dict[str, Any] = {role: arrays[name] for role, name in names.items()}
    label = f"{caller}: the cell {scope!r}"
    if "zoneout" in scope.lower():
        warnings.warn(zoneout_remark(label), stacklevel=2)
    if kind != "LSTM":
        is_set = {"forget_bias": forget_bias is not None, "cell_clip": bool(cell_clip), "proj_clip": bool(proj_clip)}
        if extra := [name for name in is_set if is_set[name]]:
            raise ValueError(
                f"{label} is {'an RNN' if kind == 'RNN' else 'a GRU'}, which has no {' and no '.join(extra)}"
            )
        values = values if kind == "RNN" else _gru_arguments(label, values)
    else:
        coupled = _is_coupled(scope, cell, values)
        if "b_p" in values:
            raise ConversionError(f"{label} has a projection with a bias; that of LSTMCell (num_proj) has none")
        cell_class = _class_of_lstm(label, scope, cell, forget_bias)
        values |= {"cell_clip": cell_clip, "proj_clip": proj_clip, "coupled": coupled}
        values |= {"forget_bias": FORGET_BIAS[cell_class] if forget_bias is None else forget_bias}
        values |= {"gate_order": ORDERS["TF1 LSTM"]}
    layer_class = {"LSTM": LSTM, "RNN": RNN}.get(kind, GRU)
    try:
        layer: LSTM | GRU | RNN = layer_class(**values, activation=activation)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from error
    if kind == "LSTM" and forget_bias is None:
        warnings.warn(
            f"{label}: checkpoints do not hold forget_bias; {FORGET_BIAS[cell_class]} is taken, the default of"
            f" {cell_class}. Pass forget_bias= to say what it was",
            stacklevel=2,
        )
    return layer


def by_scope(names: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Group the names that a cell's variables may have: by scope and kind, one of REQUIRED, and by role."""
    names = [*names]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    seen: set[str] = set()
    for kind, roles in _NAMES.items():
        for role, suffixes in roles.items():
            for name in names:
                stem = name.removesuffix(":0")
                suffix = next((suffix for suffix in suffixes if stem == suffix or stem.endswith("/" + suffix)), None)
                if suffix is not None and name not in seen:
                    seen.add(name)
                    cells.setdefault((stem.removesuffix(suffix).removesuffix("/"), kind), {})[role] = name
    for scope, kind in [key for key in cells if key[1] == "GRU"]:
        if "w_ch" in cells[scope, kind]:
            cells[scope, "CudnnCompatibleGRU"] = cells.pop((scope, kind))
    for scope, kind in [key for key in cells if key[1] == "LSTM" and _RNN.search(key[0])]:
        cells[scope, "RNN"] = cells.pop((scope, kind))
    return cells


def _find(
    caller: str, variables: Mapping[str, Any], cell: str | None, scope: str | None
) -> tuple[str, str, dict[str, str]]:
    """Return a cell's scope, its kind among those in REQUIRED, and the names of its variables by role."""
    cells = by_scope(variables)
    if cell == "BasicRNNCell":
        cells |= {(scope, "RNN"): names for (scope, kind), names in cells.items() if kind == "LSTM"}
    scope = None if scope is None else scope.strip("/")
    kind = None if cell is None else _KINDS[cell]
    complete = [
        key for key, names in cells.items()
        if REQUIRED[key[1]] <= names.keys() and kind in (None, key[1]) and scope in (None, key[0])
    ]  # fmt: skip
    if len(complete) > 1:  # dense layers too have a kernel and a bias
        complete = [
            key for key in complete if re.search("lstm|gru|rnn", key[0].split("/")[-1], re.IGNORECASE)
        ] or complete
    where = "" if scope is None else f" in the scope {scope!r}"
    if len(complete) > 1:
        scopes = [key[0] for key in complete]
        raise ValueError(f"{caller}: expected one cell{where}, found {scopes}; say which with scope=")
    if not complete:
        names = chain.from_iterable(names.values() for names in cells.values())
        inside = {name for name in names if scope is None or name.startswith(f"{scope}/")}
        raise ValueError(
            f"{caller}: expected one cell{where}: kernel and bias of an LSTM or RNN, or w_ru, w_c, b_ru and b_c"
            f" (gates/kernel and so on) of a GRU. Of these there are {sorted(inside) or 'none'}"
        )
    return *complete[0], cells[complete[0]]


def _gru_arguments(label: str, values: Mapping[str, Array]) -> dict[str, Any]:
    """Return the arguments of a GRU."""
    if "w_ch" in values:
        w_cx, w_ch = values["w_cx"], values["w_ch"]
        hidden = w_ch.shape[-1] if w_ch.ndim else 0
        check_shapes(label, {"w_ch": (w_ch, (hidden, hidden)), "w_cx": (w_cx, (None, hidden))})
        arguments = {"w_ru": values["w_ru"], "w_c": np.concatenate([w_cx, w_ch]), "b_ru": values["b_ru"]}
        return arguments | {"b_c": values["b_cx"], "b_hc": values["b_hc"], "reset_after": True}
    return exchange_by_shape(values)


def exchange_by_shape(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a GRU, of which one build of TensorFlow exchanged the names."""
    stored_names: dict[str, str] = {}
    for pair in (("w_ru", "w_c"), ("b_ru", "b_c")):
        gates, candidate = (values[name].shape[-1:] for name in pair)
        stored_names |= zip(pair, pair[::-1] if gates and candidate == (2 * gates[0],) else pair, strict=True)
    return {name: values[stored_name] for name, stored_name in stored_names.items()}


def _is_coupled(scope: str, cell: str | None, values: Mapping[str, Array]) -> bool:
    if (cell or _class_of_scope(scope)) == "CoupledInputForgetGateLSTMCell":
        return True
    return {*peephole_names(True)} == {*peephole_names(False)} & values.keys()


def _class_of_lstm(label: str, scope: str, cell: str | None, forget_bias: float | None) -> str:
    """Return the class of an LSTM; refuse a scope of another one if their defaults of forget_bias differ."""
    scope_class = _class_of_scope(scope)
    if forget_bias is None and cell and scope_class and FORGET_BIAS[scope_class] != FORGET_BIAS[cell]:
        raise ValueError(
            f"{label} is named like a {scope_class}, which has forget_bias {FORGET_BIAS[scope_class]}, but cell is"
            f" {cell}, which has {FORGET_BIAS[cell]} by default; say which with forget_bias="
        )
    return cell or scope_class or "LSTMCell"


def _class_of_scope(scope: str) -> str | None:
    """Return the class that TensorFlow names a scope after; None if it is no cell's."""
    return SCOPES.get(re.sub(r"_\d+$", "", scope.split("/")[-1]))
