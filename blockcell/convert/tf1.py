"""Weights from TensorFlow 1 checkpoints."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..activations import Activation
from ..gates import ORDERS
from ..layers import GRU, LSTM, RNN
from ..optable import Array, peephole_names
from .shared import ConversionError, check_shapes, read_arrays, read_names

FORGET_BIAS = {  # the defaults of TensorFlow 1's classes
    "LSTMBlockCell": 1.0,
    "LSTMBlockFusedCell": 1.0,
    "BasicLSTMCell": 1.0,
    "LSTMCell": 1.0,
    "CudnnCompatibleLSTMCell": 0.0,
    "CoupledInputForgetGateLSTMCell": 1.0,
}
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
_ALIASES = {"CudnnCompatibleLSTM": "CudnnCompatibleLSTMCell"}
SCOPES = {  # the classes, by TensorFlow's names for their variables' scopes
    "lstm_cell": "LSTMBlockCell",
    "lstm_fused_cell": "LSTMBlockFusedCell",
    "lstm_block_wrapper": "LSTMBlockFusedCell",
    "basic_lstm_cell": "BasicLSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
    "coupled_input_forget_gate_lstm_cell": "CoupledInputForgetGateLSTMCell",
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
        "w_p": ("projection/kernel", "projection/weights", "W_P_0"),
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
        variables is no mapping, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        The cell has layer normalization, or its projection has a bias.
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
    cell = _ALIASES.get(cell, cell) if cell is not None else None
    if cell is not None and cell not in _KINDS:
        raise ConversionError(f"{caller}: cell is {cell!r}; expected one of {', '.join(_KINDS)}")
    scope, kind, names = _find(caller, variables, cell, scope)
    arrays = read_arrays(caller, {name: variables[name] for name in names.values()})
    values: dict[str, Any] = {role: arrays[name] for role, name in names.items()}
    label = f"{caller}: the cell {scope!r}"
    if "zoneout" in scope.lower():
        warnings.warn(
            f"{label} has zoneout by its name, which is not converted: it mixes the states before and after each step,"
            f" in inference, too. Call the layer for one step at a time, and mix them",
            stacklevel=2,
        )
    if kind != "LSTM":
        is_set = {"forget_bias": forget_bias is not None, "cell_clip": bool(cell_clip), "proj_clip": bool(proj_clip)}
        if extra := [name for name in is_set if is_set[name]]:
            raise ValueError(
                f"{label} is {'an RNN' if kind == 'RNN' else 'a GRU'}, which has no {' and no '.join(extra)}"
            )
        return _rnn(label, values, activation) if kind == "RNN" else _gru(label, values, activation)
    coupled = _is_coupled(scope, cell, values)
    _check_lstm(label, values, coupled)
    if proj_clip and "w_p" not in values:
        raise ValueError(f"{label} has no projection, which proj_clip is for")
    options: dict[str, Any] = {"cell_clip": cell_clip, "proj_clip": proj_clip, "coupled": coupled}
    options["forget_bias"] = _forget_bias(label, scope, cell, forget_bias)
    return LSTM(**values, **options, gate_order=ORDERS["TF1 LSTM"], activation=activation)


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
    if len(complete) != 1:
        _refuse_cells(caller, variables, cells, complete, scope)
    return *complete[0], cells[complete[0]]


def _refuse_cells(
    caller: str,
    variables: Mapping[str, Any],
    cells: Mapping[tuple[str, str], dict[str, str]],
    complete: Sequence[tuple[str, str]],
    scope: str | None,
) -> None:
    """Refuse variables of no cell or of several in a scope."""
    where = "" if scope is None else f" in the scope {scope!r}"
    inside = [name for name in variables if scope is None or name.startswith(f"{scope}/")]
    if any(re.search(r"/part_\d+(:0)?$", name) for name in inside):
        raise ValueError(
            f"{caller}: variables are in parts{where} (.../part_0); join them along their first axis under the name"
            f" without /part_0"
        )
    if any(re.search("/(gamma|beta)(:0)?$", name) for name in inside):
        raise ConversionError(f"{caller}: there is layer normalization{where}, which the block cells do not have")
    if complete:
        scopes = [key[0] for key in complete]
        raise ValueError(f"{caller}: expected one cell{where}, found {scopes}; say which with scope=")
    cell_names = sorted({name for names in cells.values() for name in names.values() if name in inside})
    raise ValueError(
        f"{caller}: expected one cell{where}: kernel and bias of an LSTM or RNN, or w_ru, w_c, b_ru and b_c"
        f" (gates/kernel and so on) of a GRU. Of these there are {cell_names or 'none'}"
    )


def _rnn(label: str, values: Mapping[str, Array], activation: Activation) -> RNN:
    w, b = values["w"], values["b"]
    hidden = w.shape[-1] if w.ndim == 2 else 0
    check_shapes(label, {"w": (w, (max(len(w), hidden), hidden)), "b": (b, (hidden,))})
    return RNN(w, b, activation=activation)


def _gru(label: str, values: Mapping[str, Array], activation: Activation) -> GRU:
    if "w_ch" in values:
        return _gru_reset_after(label, values, activation)
    w_ru, w_c = (values[name] for name in ("w_ru", "w_c"))
    b_ru, b_c = (values[name] for name in ("b_ru", "b_c"))
    if w_ru.ndim == w_c.ndim == 2 and w_c.shape[1] == 2 * w_ru.shape[1]:
        w_ru, w_c = w_c, w_ru
    if b_ru.ndim == b_c.ndim == 1 and len(b_c) == 2 * len(b_ru):
        b_ru, b_c = b_c, b_ru
    hidden = w_c.shape[-1] if w_c.ndim == 2 else 0
    rows = len(w_c) if w_c.ndim == 2 else 0
    expected = {"w_c": (w_c, (rows, hidden)), "w_ru": (w_ru, (rows, 2 * hidden))}
    check_shapes(label, expected | {"b_ru": (b_ru, (2 * hidden,)), "b_c": (b_c, (hidden,))})
    return GRU(w_ru, w_c, b_ru, b_c, activation=activation)


def _gru_reset_after(label: str, values: Mapping[str, Array], activation: Activation) -> GRU:
    w_ru, w_cx, w_ch = (values[name] for name in ("w_ru", "w_cx", "w_ch"))
    hidden = w_ch.shape[-1] if w_ch.ndim == 2 else 0
    inputs = len(w_cx) if w_cx.ndim == 2 else 0
    shapes = {
        "w_ch": (hidden, hidden),
        "w_cx": (inputs, hidden),
        "w_ru": (inputs + hidden, 2 * hidden),
        "b_ru": (2 * hidden,),
        "b_cx": (hidden,),
        "b_hc": (hidden,),
    }
    check_shapes(label, {name: (values[name], shape) for name, shape in shapes.items()})
    w_c = np.concatenate([w_cx, w_ch])
    biases = values["b_ru"], values["b_cx"]
    return GRU(w_ru, w_c, *biases, reset_after=True, b_hc=values["b_hc"], activation=activation)


def _is_coupled(scope: str, cell: str | None, values: Mapping[str, Array]) -> bool:
    if (cell or _class_of_scope(scope)) == "CoupledInputForgetGateLSTMCell":
        return True
    return {*peephole_names(True)} == {*peephole_names(False)} & values.keys()


def _check_lstm(label: str, values: Mapping[str, Array], coupled: bool) -> None:
    w, b = values["w"], values["b"]
    gates = len(ORDERS["coupled LSTM" if coupled else "LSTM"])
    peepholes = [name for name in peephole_names(False) if name in values]
    if "b_p" in values:
        raise ConversionError(f"{label} has a projection with a bias; that of LSTMCell (num_proj) has none")
    size = "P" if "w_p" in values else "H"
    form = f"(I+{size}, {gates}H)"
    if w.ndim != 2 or b.shape != w.shape[1:] or w.shape[1] % gates:
        raise ValueError(
            f"{label} has weights of shape {w.shape} and a bias of {b.shape}; expected {form} and ({gates}H,)"
        )
    hidden = w.shape[1] // gates
    least = hidden
    if "w_p" in values:
        check_shapes(label, {"w_p": (values["w_p"], (hidden, values["w_p"].shape[-1] if values["w_p"].ndim else 0))})
        least = values["w_p"].shape[1]
    if len(w) < least:
        raise ValueError(f"{label} has weights of shape {w.shape}; expected {form}, so at least {least} rows")
    if peepholes and (*peepholes,) != peephole_names(coupled):
        names = ", ".join(peephole_names(coupled))
        raise ValueError(f"{label} has only {peepholes} of the peephole weights {names}")
    check_shapes(label, {name: (values[name], (hidden,)) for name in peepholes})


def _forget_bias(label: str, scope: str, cell: str | None, forget_bias: float | None) -> float:
    if forget_bias is not None:
        return forget_bias
    scope_class = _class_of_scope(scope)
    cell_class = cell or scope_class or "LSTMCell"
    default = FORGET_BIAS[cell_class]
    if cell and scope_class and FORGET_BIAS[scope_class] != default:
        raise ValueError(
            f"{label} is named like a {scope_class}, which has forget_bias {FORGET_BIAS[scope_class]}, but cell is"
            f" {cell}, which has {default} by default; say which with forget_bias="
        )
    warnings.warn(
        f"{label}: checkpoints do not hold forget_bias; {default} is taken, the default of"
        f" {cell_class}. Pass forget_bias= to say what it was",
        stacklevel=3,
    )
    return default


def _class_of_scope(scope: str) -> str | None:
    """Return the class that TensorFlow names a scope after; None if it is no cell's."""
    return SCOPES.get(re.sub(r"_\d+$", "", scope.split("/")[-1]))
