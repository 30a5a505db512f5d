"""The one table of ops.

Validation and its messages, allocation, the results' named tuples, test data, ONNX graphs and the table of docs/ops.md
read an op's arguments, shapes and defaults here. Signatures write arguments and defaults out, for readers and editors:
tests compare those of ``raw_ops.py``, ``ops.py`` and ``formulas.py`` with the table, and
`_kernels.parameter_positions` those of the kernels.

Shapes are written over four letters, T time steps, B batch, I inputs, H cells, one word a dimension: ``"I+H 4H"``.
A letter's value comes from the first input that has a dimension which is just that letter: T, B and I from ``x``,
H from ``h_prev`` (GRU, RNN) or ``cs_prev`` (LSTM).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .activations import DEFAULTS, Activation, Numbers
from .gates import COUPLED_GATES, GATE_ORDERS, ORDERS, gate_names

Array = NDArray[Any]
LETTERS = "TBIH"
STORAGE: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "half",
}
"""The dtypes of every op, and the names of their numbers in C: ``number`` in ``pyx/product/real.pxd``."""
DTYPES = tuple(STORAGE)
REALS = {dtype: "double" if dtype == np.float64 else "float" for dtype in DTYPES}
"""The types in which kernels compute these dtypes: ``real`` in ``pyx/product/real.pxd``."""
SCHEMES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "int8": np.dtype(np.int8)}
"""How the matrices of a float32 layer can be quantized, and the dtype of the codes: ``blockcell.quantization``."""
ACTIVATIONS = (None, "sigmoid", "tanh", "relu", "softmax")
"""Of a `Dense` layer, in the order of ``pyx/cells/dense.pxd``."""
DTYPE_NAMES = f"{', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}"
"""For messages: ``"float32, float64 or float16"``."""


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which arrays of a dtype are computed: float16 is only for storage."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


# ------------------------------------------------------------------------------------------------------- the results
class GRUStates(NamedTuple):
    """Reset gate, update gate, candidate and new state."""

    r: Array
    u: Array
    c: Array
    h: Array


class GRUCellGrad(NamedTuple):
    """Gradients to the cell's inputs and to its pre-activations (``_bar``)."""

    d_x: Array
    d_h_prev: Array
    d_c_bar: Array
    d_r_bar_u_bar: Array


class GRUCellVjp(NamedTuple):
    """Gradients to all six inputs of the cell."""

    d_x: Array
    d_h_prev: Array
    d_w_ru: Array
    d_w_c: Array
    d_b_ru: Array
    d_b_c: Array


class GRUGrads(NamedTuple):
    """Gradients to all six inputs of the sequence."""

    x_grad: Array
    h_prev_grad: Array
    w_ru_grad: Array
    w_c_grad: Array
    b_ru_grad: Array
    b_c_grad: Array


class GRUResetAfterStates(NamedTuple):
    """Reset gate, update gate, candidate, what the reset gate acts on (h's part of the candidate), and new state."""

    r: Array
    u: Array
    c: Array
    hc: Array
    h: Array


class GRUResetAfterGrads(NamedTuple):
    """Gradients to all seven inputs of the sequence."""

    x_grad: Array
    h_prev_grad: Array
    w_ru_grad: Array
    w_c_grad: Array
    b_ru_grad: Array
    b_c_grad: Array
    b_hc_grad: Array


class RNNStates(NamedTuple):
    """New state."""

    h: Array


class RNNGrads(NamedTuple):
    """Gradients to all four inputs of the sequence."""

    x_grad: Array
    h_prev_grad: Array
    w_grad: Array
    b_grad: Array


class LSTMStates(NamedTuple):
    """Input gate, new cell state, forget gate, output gate, candidate, tanh of the cell state, output."""

    i: Array
    cs: Array
    f: Array
    o: Array
    ci: Array
    co: Array
    h: Array


class LSTMCellGrad(NamedTuple):
    """Gradients to the incoming cell state, to the four pre-activations and to the peephole weights."""

    cs_prev_grad: Array
    dicfo: Array
    wci_grad: Array
    wcf_grad: Array
    wco_grad: Array


class LSTMGrads(NamedTuple):
    """Gradients to all eight inputs of an LSTM cell or sequence."""

    x_grad: Array
    cs_prev_grad: Array
    h_prev_grad: Array
    w_grad: Array
    wci_grad: Array
    wcf_grad: Array
    wco_grad: Array
    b_grad: Array


# ------------------------------------------------------------------------------------------------ the table's columns
@cache
def dims(shape: str) -> tuple[tuple[int, int, int, int], ...]:
    """Return for each dimension the factors of the four letters: "I+H 4H" is ``((0, 0, 1, 1), (0, 0, 0, 4))``."""
    parsed = []
    for word in shape.split():
        factors = dict.fromkeys(LETTERS, 0)
        for factor, letter in re.findall(rf"(\d*)([{LETTERS}])", word):
            factors[letter] += int(factor or 1)
        parsed.append((factors["T"], factors["B"], factors["I"], factors["H"]))
    return tuple(parsed)


def sizes_of(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the shape in numbers: ``sizes_of("I+H 4H", {"I": 3, "H": 5}) == (8, 20)``."""
    if "O" in shape or "P" in shape:  # of weights that only layers have
        words = (re.findall(r"(\d*)([A-Z])", word) for word in shape.split())
        return tuple(sum(int(factor or 1) * sizes[letter] for factor, letter in word) for word in words)
    T, B, I, H = (sizes.get(letter, 0) for letter in LETTERS)  # noqa: E741
    return tuple([t * T + b * B + i * I + h * H for t, b, i, h in dims(shape)])


Kind = Literal["input", "state", "matrix", "peephole", "bias", "saved", "gradient", "output"]
"""What a tensor is: the input x; a state before the first step; weights, of three kinds; what a gradient is told of the
forward pass; an incoming gradient; a result. Gradients to peephole weights are of the kind "peephole", too."""
WEIGHTS: tuple[Kind, ...] = ("matrix", "peephole", "bias")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output array of an op."""

    name: str
    shape: str
    kind: Kind
    read: bool = True
    """Whether the values matter. TF's gradients demand a few inputs that they never look at."""

    @property
    def parameter(self) -> str:
        """The name of the kernel's parameter: a gradient is ``x_grad`` there, and ``d_x`` in TensorFlow's GRU."""
        return f"{self.name[2:]}_grad" if self.name.startswith("d_") else self.name

    @property
    def rank(self) -> int:
        return len(self.shape.split())

    @property
    def peephole(self) -> bool:
        """Whether it may be None or of any length where ``use_peephole`` is false."""
        return self.kind == "peephole"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A number, switch or activation of an op. Required where the default is None."""

    name: str
    default: float | bool | Activation | None
    kind: type[float] | type[bool] | type[Numbers] = float
    """What a kernel gets."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op: ``inputs`` and ``outputs`` in TF's order, ``gates`` in the order of the weights' columns."""

    name: str
    kernel: str
    gates: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    result: type[tuple[Array, ...]]
    """The named tuple of the outputs, which gives them their names."""
    attributes: tuple[Attribute, ...]
    constants: tuple[tuple[str, float | bool | None], ...]
    """Parameters of the kernel that are not the op's, and their values: other ops of this kernel have others. A cell op
    is its sequence op with one step."""

    @property
    def module(self) -> str:
        """The module of the op's function: names of TensorFlow's ops are in CamelCase, ours in snake_case."""
        return "raw_ops" if self.name[0].isupper() else "ops"

    @property
    def sequence(self) -> bool:
        """Whether the op runs over T steps: then ``seq_len_max``, an integer, comes before the other inputs."""
        return any(tensor.shape.startswith("T ") for tensor in self.inputs)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights and biases among the inputs."""
        return tuple(tensor for tensor in self.inputs if tensor.kind in WEIGHTS)

    @property
    def sources(self) -> dict[str, str]:
        """The input that fixes each letter."""
        sources: dict[str, str] = {}
        for tensor in self.inputs:
            for word in tensor.shape.split():
                if word in LETTERS:
                    sources.setdefault(word, tensor.name)
        return sources


class _CellOps(NamedTuple):
    """What the ops of a cell have in common."""

    gates: tuple[str, ...]
    states: type[Any]
    """The result of its forward ops: a named tuple."""
    weights: dict[Kind, str]
    """The inputs of all its ops between x and those that only gradients have."""
    attributes: tuple[Attribute, ...] = ()
    gradient_attributes: tuple[Attribute, ...] = ()


def _op(
    name: str,
    kernel: str,
    cell: _CellOps,
    x: str,
    gradients: type[Any] | None = None,
    incoming: str = "",
    unread: str = "",
    constants: tuple[tuple[str, float | bool | None], ...] = (),
) -> Op:
    """Return a row of the table.

    `x` is the shape of x, and that of states and of their gradients with H in place of I. `gradients` is the result of
    a gradient op, whose last inputs are all states, but h only of a sequence, and the `incoming` gradients. An output
    that is the gradient of an input has its shape. Names are interned as in source, since ``op(**arguments)`` compares
    them.
    """
    state, result = x.replace("I", "H"), gradients or cell.states
    inputs = [Tensor("x", x, "input", "x" not in unread.split())]
    for kind, text in cell.weights.items():
        tensors = re.findall(r"(\w+)\[([^]]*)\]", text)
        inputs += [Tensor(sys.intern(name), shape, kind, name not in unread.split()) for name, shape in tensors]
    if gradients:
        saved = [name for name in cell.states._fields if name != "h" or "T" in x]
        inputs += [Tensor(name, state, "saved") for name in saved]
        inputs += [Tensor(sys.intern(name), state, "gradient") for name in incoming.split()]
    shapes = {f"{tensor.name}_grad": tensor.shape for tensor in inputs} | _SHAPES_OF_PRE_ACTIVATIONS
    outputs = []
    for field in result._fields:
        output = Tensor(field, state, "peephole" if field.startswith("wc") else "output")
        outputs.append(replace(output, shape=shapes.get(output.parameter, state)))
    attributes = cell.gradient_attributes if gradients else cell.attributes
    return Op(name, kernel, cell.gates, tuple(inputs), tuple(outputs), result, attributes, constants)


# ---------------------------------------------------------------------------------------------------------- the table
_SHAPES_OF_PRE_ACTIVATIONS = {"dicfo": "B 4H", "r_bar_u_bar_grad": "B 2H"}
_PEEPHOLE = Attribute("use_peephole", False, bool)
_ACTIVATION = (Attribute("activation", "tanh", Numbers),)

_GRU = _CellOps(
    gate_names(ORDERS["GRU"])[:2],  # the candidate has matrices of its own
    GRUStates,
    {"state": "h_prev[B H]", "matrix": "w_ru[I+H 2H] w_c[I+H H]", "bias": "b_ru[2H] b_c[H]"},
)
_RESET_AFTER = _GRU._replace(states=GRUResetAfterStates, weights=_GRU.weights | {"bias": "b_ru[2H] b_c[H] b_hc[H]"})
_RNN = _CellOps(
    ("h",),
    RNNStates,
    {"state": "h_prev[B H]", "matrix": "w[I+H H]", "bias": "b[H]"},
    _ACTIVATION,
    _ACTIVATION,
)
_LSTM = _CellOps(
    GATE_ORDERS["icfo"],
    LSTMStates,
    {
        "state": "cs_prev[B H] h_prev[B H]",
        "matrix": "w[I+H 4H]",
        "peephole": "wci[H] wcf[H] wco[H]",
        "bias": "b[4H]",
    },
    (Attribute("forget_bias", 1.0), Attribute("cell_clip", 3.0), _PEEPHOLE),
    (Attribute("use_peephole", None, bool),),
)
_LSTM_V2 = _LSTM._replace(gates=GATE_ORDERS["ifco"], attributes=(Attribute("cell_clip", 0.0), _PEEPHOLE))

# Constants of cell ops, which call the kernel of their sequence op: there is one step, and its gradient reads h_prev
# but no h.
_ONE_STEP = ("seq_len_max", 1)
_NO_H = ("h", None)
_ICFO, _IFCO = ("ifco", False), ("ifco", True)

_STEP, _STEPS = "B I", "T B I"
_CS_H = "cs_grad h_grad"
_TABLE = (
    _op("GRUBlockCell", "block_gru", _GRU, _STEP, constants=(_ONE_STEP,)),
    _op("GRUBlockCellGrad", "gru_cell_grad", _GRU, _STEP, GRUCellGrad, "d_h", "x b_ru b_c"),
    _op("LSTMBlockCell", "block_lstm", _LSTM, _STEP, constants=(_ONE_STEP, _ICFO)),
    _op("LSTMBlockCellGrad", "lstm_cell_grad", _LSTM, _STEP, LSTMCellGrad, _CS_H, "x h_prev w b"),
    _op("BlockLSTM", "block_lstm", _LSTM, _STEPS, constants=(_ICFO,)),
    _op("BlockLSTMGrad", "block_lstm_grad", _LSTM, _STEPS, LSTMGrads, _CS_H, "b", (_ICFO,)),
    _op("BlockLSTMV2", "block_lstm", _LSTM_V2, _STEPS, constants=(_IFCO, ("forget_bias", 0.0))),
    _op("BlockLSTMGradV2", "block_lstm_grad", _LSTM_V2, _STEPS, LSTMGrads, _CS_H, "b", (_IFCO,)),
    _op("block_gru", "block_gru", _GRU, _STEPS),
    _op("block_gru_grad", "block_gru_grad", _GRU, _STEPS, GRUGrads, "h_grad", "b_ru b_c"),
    _op("block_gru_reset_after", "block_gru_reset_after", _RESET_AFTER, _STEPS),
    _op(
        "block_gru_reset_after_grad",
        "block_gru_reset_after_grad",
        _RESET_AFTER,
        _STEPS,
        GRUResetAfterGrads,
        "h_grad",
        "b_ru b_c b_hc",
    ),
    _op("block_rnn", "block_rnn", _RNN, _STEPS),
    _op("block_rnn_grad", "block_rnn_grad", _RNN, _STEPS, RNNGrads, "h_grad", "b"),
    _op("gru_block_cell_vjp", "block_gru_grad", _GRU, _STEP, GRUCellVjp, "d_h", "b_ru b_c", (_ONE_STEP, _NO_H)),
    _op("lstm_block_cell_vjp", "block_lstm_grad", _LSTM, _STEP, LSTMGrads, _CS_H, "b", (_ONE_STEP, _NO_H, _ICFO)),
)

OPS: dict[str, Op] = {op.name: op for op in _TABLE}
"""All by name, TF's eight first."""

DENSE_WEIGHTS = (Tensor("w", "I O", "matrix"), Tensor("b", "O", "bias"))
"""The weights of a `Dense` layer, which is no op."""


class LayerOption(NamedTuple):
    """An argument of a layer's constructor that is no weight. The layer has a property of this name."""

    name: str
    default: Any
    values: tuple[Any, ...] = ()
    """All values that it may have; empty for numbers and for activations of cells."""
    stored: str = ""
    """When a file has it: "always"; with the weight of this name; or, if empty, where it is not the default."""


_CELL_OPTIONS = tuple(LayerOption(name, default) for name, default in DEFAULTS.items())
_REVERSE = LayerOption("reverse", False, (False, True))
LAYER_OPTIONS = {
    "LSTM": (
        LayerOption("forget_bias", 0.0, stored="always"),
        LayerOption("cell_clip", 0.0, stored="always"),
        LayerOption("gate_order", "icfo", tuple(GATE_ORDERS), stored="always"),
        LayerOption("proj_clip", 0.0, stored="w_p"),
        LayerOption("coupled", False, (False, True)),
        *_CELL_OPTIONS,
        _REVERSE,
    ),
    "GRU": (LayerOption("reset_after", False, (False, True)), *_CELL_OPTIONS, _REVERSE),
    "RNN": (_CELL_OPTIONS[0], _REVERSE),
    "Dense": (
        LayerOption("activation", None, ACTIVATIONS, stored="always"),
        LayerOption("last", False, (False, True, "ends")),
    ),
}
"""The options of each layer with weights of its own, in the order of files and reprs."""


@cache
def lstm_weights(coupled: bool, projected: bool) -> tuple[Tensor, ...]:
    """Return the weights of an `LSTM` layer, of which the peepholes may be missing; the op has neither variant."""
    rows, gates = "I+P" if projected else "I+H", len(COUPLED_GATES if coupled else _LSTM.gates)
    shapes = {"w": f"{rows} {gates}H", "b": f"{gates}H"}
    tensors = (replace(tensor, shape=shapes.get(tensor.name, tensor.shape)) for tensor in OPS["BlockLSTM"].weights)
    kept = tuple(tensor for tensor in tensors if not (coupled and tensor.name == "wci"))
    return (*kept, Tensor("w_p", "H P", "matrix")) if projected else kept


def peephole_names(coupled: bool) -> tuple[str, ...]:
    """Return the names of an `LSTM` layer's peephole weights, in the order of the gates."""
    return tuple(tensor.name for tensor in lstm_weights(coupled, False) if tensor.kind == "peephole")


def layer_sizes(form: str, shape: tuple[int, ...], projection: int | None = None) -> dict[str, int]:
    """Return the sizes of a layer by their letters, from the shape of its first matrix, and from P with a projection.

    `form` is the shape in letters, such as "I+H 4H". A shape that does not fit has sizes for which `sizes_of` differs.
    """
    if form == "I O":
        return dict(zip("IO", (*shape, 0, 0), strict=False))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    [gates] = re.findall(r" (\d*)H$", form)
    hidden = columns // int(gates or 1)
    if projection is None:
        return {"I": max(0, rows - hidden), "H": hidden}
    return {"I": max(0, rows - projection), "H": hidden, "P": projection}
