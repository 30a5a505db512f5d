"""Weights from TensorFlow 1 checkpoints."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..layers import GRU, LSTM
from ..optable import Array
from .shared import ORDERS, Cell, ConversionError, check_shapes, read_arrays, read_names

FORGET_BIAS = {  # the defaults of TensorFlow 1's classes
    "LSTMBlockCell": 1.0,
    "LSTMBlockFusedCell": 1.0,
    "BasicLSTMCell": 1.0,
    "LSTMCell": 1.0,
    "CudnnCompatibleLSTMCell": 0.0,
}
TF1_CELLS = (*FORGET_BIAS, "GRUBlockCell", "GRUBlockCellV2", "GRUCell", "CudnnCompatibleGRUCell")
REQUIRED = {
    "GRU": {"w_ru", "w_c", "b_ru", "b_c"},
    "CudnnCompatibleGRU": {"w_ru", "b_ru", "w_cx", "b_cx", "w_ch", "b_hc"},
    "LSTM": {"w", "b"},
}
_ALIASES = {"CudnnCompatibleLSTM": "CudnnCompatibleLSTMCell"}
SCOPES = {  # the classes, by TensorFlow's names for their variables' scopes
    "lstm_cell": "LSTMBlockCell",
    "lstm_fused_cell": "LSTMBlockFusedCell",
    "lstm_block_wrapper": "LSTMBlockFusedCell",
    "basic_lstm_cell": "BasicLSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
}
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
) -> Cell:
    """A layer with the weights of a TensorFlow 1 cell, as a checkpoint holds them.

    .. code-block:: python

        reader = tf.train.load_checkpoint("model.ckpt")
        variables = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        layer = convert.from_tf1(variables, scope="rnn/lstm_cell", forget_bias=1.0)

    A CHECKPOINT DOES NOT SAY WHICH forget_bias AND cell_clip THE CELL HAD. They are arguments of the cell in the
    program that made it, and attributes of its nodes in the graph (``.meta``, ``.pb``). A wrong forget_bias gives wrong
    results without any error, so pass it. Without it, the default of the class is taken with a warning.

    Parameters
    ----------
    variables : mapping of str to array_like
        Names and values. Variables that belong to no cell, such as ``.../Adam`` or ``global_step``, are ignored.
    cell : str, optional
        The class: LSTMBlockCell, LSTMBlockFusedCell, BasicLSTMCell, LSTMCell, CudnnCompatibleLSTMCell, GRUBlockCell,
        GRUBlockCellV2, GRUCell or CudnnCompatibleGRUCell. None infers it from the names of the variables.
    scope : str, optional
        What the names of the cell's variables begin with, such as ``"rnn/multi_rnn_cell/cell_0/lstm_cell"``. Needed
        if there is more than one cell.
    forget_bias : float, optional
        For an LSTM. None warns and takes the default of the class: 0.0 for CudnnCompatibleLSTMCell, else 1.0.
    cell_clip : float
        For an LSTM; 0 means no clip. TensorFlow 1's classes do not clip by default.

    Returns
    -------
    LSTM or GRU
        With peepholes if the cell has them. forget_bias is not added into the bias, as in TensorFlow. A
        CudnnCompatibleGRUCell is a GRU with reset_after=True.

    Warns
    -----
    UserWarning
        forget_bias is not given.

    Raises
    ------
    TypeError
        variables is no mapping, or an array has a dtype other than float32, float64 and float16.
    ConversionError
        Projections; coupled gates; layer normalization.
    ValueError
        No cell or several are found, or shapes are wrong.

    Notes
    -----
    Convert the cells of a bidirectional or stacked network one by one, and combine them with `blockcell.Bidirectional`
    and `blockcell.Stack`. To take the moving averages of the weights, rename them first:
    ``{name.removesuffix("/ExponentialMovingAverage"): ... for name in ... if name.endswith(...)}``.
    One build of TensorFlow stored w_ru and w_c under each other's names; their shapes show it, and they are swapped.
    """
    caller = "from_tf1"
    if not isinstance(variables, Mapping):
        expected = "expected names and arrays"
        raise TypeError(f"{caller}: variables is of type {type(variables).__name__}; {expected}")
    read_names(caller, variables)
    cell = _ALIASES.get(cell, cell) if cell is not None else None
    if cell is not None and cell not in TF1_CELLS:
        raise ConversionError(f"{caller}: cell is {cell!r}; expected one of {', '.join(TF1_CELLS)}")
    found_scope, kind, named = _find(caller, variables, cell, scope)
    arrays = read_arrays(caller, {name: variables[name] for name in named.values()})
    values: dict[str, Any] = {key: arrays[name] for key, name in named.items()}
    what = f"{caller}: the cell {found_scope!r}"
    if kind != "LSTM":
        if forget_bias is not None or cell_clip:
            raise ValueError(f"{what} is a GRU, which has no forget_bias and no cell_clip")
        return _gru(what, values)
    _refuse(what, found_scope, variables, values)
    bias = _forget_bias(what, found_scope, cell, forget_bias)
    return LSTM(**values, forget_bias=bias, cell_clip=cell_clip, gate_order=ORDERS["TF1 LSTM"])


def by_scope(names: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """The names that a cell's variables may have, by scope and kind (one of REQUIRED), and by what they may be."""
    names = [*names]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    taken: set[str] = set()
    for kind, roles in _NAMES.items():
        for role, endings in roles.items():
            for name in names:
                stem = name.removesuffix(":0")
                ending = next((end for end in endings if stem == end or stem.endswith("/" + end)), None)
                if ending is not None and name not in taken:
                    taken.add(name)
                    cells.setdefault((stem.removesuffix(ending).removesuffix("/"), kind), {})[role] = name
    for scope_found, kind in [key for key in cells if key[1] == "GRU"]:
        if "w_ch" in cells[scope_found, kind]:
            cells[scope_found, "CudnnCompatibleGRU"] = cells.pop((scope_found, kind))
    return cells


def _find(
    caller: str, variables: Mapping[str, Any], cell: str | None, scope: str | None
) -> tuple[str, str, dict[str, str]]:
    """A cell's scope, its kind among those in REQUIRED, and the names of its variables."""
    cells = by_scope(variables)
    wanted = None if scope is None else scope.strip("/")
    kinds = [kind for kind in REQUIRED if cell is None or kind == _kind_of(cell)]
    full = [
        key for key, named in cells.items()
        if REQUIRED[key[1]] <= named.keys() and key[1] in kinds and wanted in (None, key[0])
    ]  # fmt: skip
    if len(full) > 1:  # dense layers too have a kernel and a bias
        full = [key for key in full if re.search("lstm|gru", key[0].split("/")[-1], re.IGNORECASE)] or full
    if len(full) != 1:
        _not_found(caller, variables, cells, full, wanted)
    return *full[0], cells[full[0]]


def _kind_of(cell: str) -> str:
    return "CudnnCompatibleGRU" if cell == "CudnnCompatibleGRUCell" else "GRU" if cell.startswith("GRU") else "LSTM"


def _not_found(
    caller: str,
    variables: Mapping[str, Any],
    cells: Mapping[tuple[str, str], dict[str, str]],
    full: Sequence[tuple[str, str]],
    scope: str | None,
) -> None:
    where = "" if scope is None else f" in the scope {scope!r}"
    inside = [name for name in variables if scope is None or name.startswith(f"{scope}/")]
    if any(re.search(r"/part_\d+(:0)?$", name) for name in inside):
        raise ValueError(
            f"{caller}: variables are in parts{where} (.../part_0); join them along their first axis under the name"
            f" without /part_0"
        )
    if any(re.search("/(gamma|beta)(:0)?$", name) for name in inside):
        raise ConversionError(f"{caller}: there is layer normalization{where}, which the block cells do not have")
    if full:
        scopes = [key[0] for key in full]
        raise ValueError(f"{caller}: expected one cell{where}, found {scopes}; say which with scope=")
    partly = sorted({name for named in cells.values() for name in named.values() if name in inside})
    raise ValueError(
        f"{caller}: expected one cell{where}: kernel and bias of an LSTM, or w_ru, w_c, b_ru and b_c (gates/kernel"
        f" and so on) of a GRU. Of these there are {partly or 'none'}"
    )


def _gru(what: str, values: Mapping[str, Array]) -> GRU:
    if "w_ch" in values:
        return _gru_reset_after(what, values)
    w_ru, w_c = (values[name] for name in ("w_ru", "w_c"))
    b_ru, b_c = (values[name] for name in ("b_ru", "b_c"))
    if w_ru.ndim == w_c.ndim == 2 and w_c.shape[1] == 2 * w_ru.shape[1]:
        w_ru, w_c = w_c, w_ru
    if b_ru.ndim == b_c.ndim == 1 and len(b_c) == 2 * len(b_ru):
        b_ru, b_c = b_c, b_ru
    hidden = w_c.shape[-1] if w_c.ndim == 2 else 0
    rows = len(w_c) if w_c.ndim == 2 else 0
    expected = {"w_c": (w_c, (rows, hidden)), "w_ru": (w_ru, (rows, 2 * hidden))}
    check_shapes(what, expected | {"b_ru": (b_ru, (2 * hidden,)), "b_c": (b_c, (hidden,))})
    return GRU(w_ru, w_c, b_ru, b_c)


def _gru_reset_after(what: str, values: Mapping[str, Array]) -> GRU:
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
    check_shapes(what, {name: (values[name], shape) for name, shape in shapes.items()})
    w_c = np.concatenate([w_cx, w_ch])
    return GRU(w_ru, w_c, values["b_ru"], values["b_cx"], reset_after=True, b_hc=values["b_hc"])


def _refuse(what: str, scope: str, variables: Mapping[str, Any], values: Mapping[str, Array]) -> None:
    w, b = values["w"], values["b"]
    peepholes = {"wci", "wcf", "wco"} & values.keys()
    if scope.endswith("coupled_input_forget_gate_lstm_cell") or peepholes == {"wcf", "wco"}:
        raise ConversionError(
            f"{what} couples its input gate to the forget gate; the gates of the block cells are independent"
        )
    if any(name.startswith(f"{scope}/projection/") for name in variables):
        raise ConversionError(f"{what} has a projection (num_proj), which the block cells do not have")
    if w.ndim != 2 or b.shape != w.shape[1:] or w.shape[1] % 4:
        raise ValueError(f"{what} has weights of shape {w.shape} and a bias of {b.shape}; expected (I+H, 4H) and (4H,)")
    if len(w) < w.shape[1] // 4:
        raise ValueError(
            f"{what} has weights of shape {w.shape}; expected (I+H, 4H), so at least {w.shape[1] // 4} rows"
        )
    if peepholes and len(peepholes) < 3:
        raise ValueError(f"{what} has only {sorted(peepholes)} of the peephole weights wci, wcf and wco")
    check_shapes(what, {name: (values[name], (w.shape[1] // 4,)) for name in sorted(peepholes)})


def _forget_bias(what: str, scope: str, cell: str | None, forget_bias: float | None) -> float:
    if forget_bias is not None:
        return forget_bias
    named = SCOPES.get(re.sub(r"_\d+$", "", scope.split("/")[-1]))
    default = FORGET_BIAS[cell or named or "LSTMCell"]
    if cell and named and FORGET_BIAS[named] != default:
        raise ValueError(
            f"{what} is named like a {named}, which has forget_bias {FORGET_BIAS[named]}, but cell is {cell}, which has"
            f" {default} by default; say which with forget_bias="
        )
    warnings.warn(
        f"{what}: checkpoints do not hold forget_bias; {default} is taken, the default of"
        f" {cell or named or 'LSTMCell'}. Pass forget_bias= to say what it was",
        stacklevel=3,
    )
    return default
