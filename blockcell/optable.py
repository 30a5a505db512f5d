"""The one table of ops.

Validation and its messages, allocation, the results' named tuples, test data, ONNX graphs and the table of docs/ops.md
read an op's arguments, shapes and defaults here. Signatures write arguments and defaults out, for readers and editors:
tests compare those of ``raw_ops.py``, ``ops.py`` and ``formulas.py`` with the table, `_kernels.parameter_positions` those
of the kernels.

Shapes are written over four letters, T time steps, B batch, I inputs, H cells, one word a dimension: ``"I+H 4H"``.
A letter's value comes from the first input that has a dimension which is just that letter: T, B and I from ``x``,
H from ``h_prev`` (GRU, RNN) or ``cs_prev`` (LSTM).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, cast, get_args

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


def _inputs(unread: str = "", **kinds: str) -> tuple[Tensor, ...]:
    """Read ``input="x[B I]", state="h_prev[B H]"`` as tensors.

    Names are interned as in source, since ``op(**arguments)`` compares them.
    """
    assert kinds.keys() <= {*get_args(Kind)}
    return tuple(
        Tensor(sys.intern(name), shape, cast(Kind, kind), read=name not in unread.split())
        for kind, text in kinds.items()
        for name, shape in re.findall(r"(\w+)\[([^]]*)\]", text)
    )


def _op(
    name: str,
    *,
    kernel: str,
    gates: tuple[str, ...],
    inputs: tuple[Tensor, ...],
    result: type[tuple[Array, ...]],
    shapes: tuple[str, ...],
    attributes: tuple[Attribute, ...] = (),
    constants: tuple[tuple[str, float | bool | None], ...] = (),
) -> Op:
    """Return a row of the table; `shapes` are those of the result's fields, or one of all of them."""
    fields = result._fields  # type: ignore[attr-defined]
    outputs = tuple(
        Tensor(field, shape, "peephole" if field.startswith("wc") else "output")
        for field, shape in zip(fields, shapes * (len(fields) // len(shapes)), strict=True)
    )
    return Op(name, kernel, gates, inputs, outputs, result, attributes, constants)


# ---------------------------------------------------------------------------------------------------------- the table
_ICFO, _IFCO = GATE_ORDERS.values()
_lstm_op = partial(_op, gates=_ICFO)
_gru_op = partial(_op, gates=gate_names(ORDERS["GRU"])[:2])  # the candidate has matrices of its own
_rnn_op = partial(_op, gates=("h",))

_GRU_WEIGHTS = {"state": "h_prev[B H]", "matrix": "w_ru[I+H 2H] w_c[I+H H]", "bias": "b_ru[2H] b_c[H]"}
_GRU_STATES = "r[B H] u[B H] c[B H]"
_GRU_SEQUENCE = "r[T B H] u[T B H] c[T B H] h[T B H]"
_RESET_AFTER_WEIGHTS = _GRU_WEIGHTS | {"bias": "b_ru[2H] b_c[H] b_hc[H]"}
_RESET_AFTER_SEQUENCE = "r[T B H] u[T B H] c[T B H] hc[T B H] h[T B H]"
_RNN_WEIGHTS = {"state": "h_prev[B H]", "matrix": "w[I+H H]", "bias": "b[H]"}
_LSTM_WEIGHTS = {
    "state": "cs_prev[B H] h_prev[B H]",
    "matrix": "w[I+H 4H]",
    "peephole": "wci[H] wcf[H] wco[H]",
    "bias": "b[4H]",
}
_LSTM_STATES = "i[B H] cs[B H] f[B H] o[B H] ci[B H] co[B H]"
_LSTM_SEQUENCE = "i[T B H] cs[T B H] f[T B H] o[T B H] ci[T B H] co[T B H] h[T B H]"
_LSTM_GRADS = ("B H", "B H", "I+H 4H", "H", "H", "H", "4H")

_ACTIVATION = Attribute("activation", "tanh", Numbers)
_PEEPHOLE = Attribute("use_peephole", False, bool)
_PEEPHOLE_REQUIRED = Attribute("use_peephole", None, bool)
_LSTM_ATTRIBUTES = (Attribute("forget_bias", 1.0), Attribute("cell_clip", 3.0), _PEEPHOLE)

# Constants of cell ops, which call the kernel of their sequence op: there is one step, and its gradient reads h_prev
# but no h.
_ONE_STEP = ("seq_len_max", 1)
_NO_H = ("h", None)


def _block_lstm(
    version: str,
    gates: tuple[str, ...],
    attributes: tuple[Attribute, ...],
    constants: tuple[tuple[str, float], ...] = (),
) -> tuple[Op, Op]:
    """Return a version of BlockLSTM and its gradient; versions differ in the gates' order and in the attributes."""
    order = ("ifco", gates == _IFCO)
    return (
        _op(
            f"BlockLSTM{version}",
            kernel="block_lstm",
            gates=gates,
            inputs=_inputs(input="x[T B I]", **_LSTM_WEIGHTS),
            result=LSTMStates,
            shapes=("T B H",),
            attributes=attributes,
            constants=(order, *constants),
        ),
        _op(
            f"BlockLSTMGrad{version}",
            kernel="block_lstm_grad",
            gates=gates,
            inputs=_inputs(
                input="x[T B I]",
                **_LSTM_WEIGHTS,
                saved=_LSTM_SEQUENCE,
                gradient="cs_grad[T B H] h_grad[T B H]",
                unread="b",
            ),
            result=LSTMGrads,
            shapes=("T B I", *_LSTM_GRADS),
            attributes=(_PEEPHOLE_REQUIRED,),
            constants=(order,),
        ),
    )


_TABLE = (
    _gru_op(
        "GRUBlockCell",
        kernel="block_gru",
        inputs=_inputs(input="x[B I]", **_GRU_WEIGHTS),
        result=GRUStates,
        shapes=("B H",),
        constants=(_ONE_STEP,),
    ),
    _gru_op(
        "GRUBlockCellGrad",
        kernel="gru_cell_grad",
        inputs=_inputs(input="x[B I]", **_GRU_WEIGHTS, saved=_GRU_STATES, gradient="d_h[B H]", unread="x b_ru b_c"),
        result=GRUCellGrad,
        shapes=("B I", "B H", "B H", "B 2H"),
    ),
    _lstm_op(
        "LSTMBlockCell",
        kernel="block_lstm",
        inputs=_inputs(input="x[B I]", **_LSTM_WEIGHTS),
        result=LSTMStates,
        shapes=("B H",),
        attributes=_LSTM_ATTRIBUTES,
        constants=(_ONE_STEP, ("ifco", False)),
    ),
    _lstm_op(
        "LSTMBlockCellGrad",
        kernel="lstm_cell_grad",
        inputs=_inputs(
            input="x[B I]",
            **_LSTM_WEIGHTS,
            saved=_LSTM_STATES,
            gradient="cs_grad[B H] h_grad[B H]",
            unread="x h_prev w b",
        ),
        result=LSTMCellGrad,
        shapes=("B H", "B 4H", "H", "H", "H"),
        attributes=(_PEEPHOLE_REQUIRED,),
    ),
    *_block_lstm("", _ICFO, _LSTM_ATTRIBUTES),
    *_block_lstm("V2", _IFCO, (Attribute("cell_clip", 0.0), _PEEPHOLE), constants=(("forget_bias", 0.0),)),
    _gru_op(
        "block_gru",
        kernel="block_gru",
        inputs=_inputs(input="x[T B I]", **_GRU_WEIGHTS),
        result=GRUStates,
        shapes=("T B H",),
    ),
    _gru_op(
        "block_gru_grad",
        kernel="block_gru_grad",
        inputs=_inputs(
            input="x[T B I]", **_GRU_WEIGHTS, saved=_GRU_SEQUENCE, gradient="h_grad[T B H]", unread="b_ru b_c"
        ),
        result=GRUGrads,
        shapes=("T B I", "B H", "I+H 2H", "I+H H", "2H", "H"),
    ),
    _gru_op(
        "block_gru_reset_after",
        kernel="block_gru_reset_after",
        inputs=_inputs(input="x[T B I]", **_RESET_AFTER_WEIGHTS),
        result=GRUResetAfterStates,
        shapes=("T B H",),
    ),
    _gru_op(
        "block_gru_reset_after_grad",
        kernel="block_gru_reset_after_grad",
        inputs=_inputs(
            input="x[T B I]",
            **_RESET_AFTER_WEIGHTS,
            saved=_RESET_AFTER_SEQUENCE,
            gradient="h_grad[T B H]",
            unread="b_ru b_c b_hc",
        ),
        result=GRUResetAfterGrads,
        shapes=("T B I", "B H", "I+H 2H", "I+H H", "2H", "H", "H"),
    ),
    _rnn_op(
        "block_rnn",
        kernel="block_rnn",
        inputs=_inputs(input="x[T B I]", **_RNN_WEIGHTS),
        result=RNNStates,
        shapes=("T B H",),
        attributes=(_ACTIVATION,),
    ),
    _rnn_op(
        "block_rnn_grad",
        kernel="block_rnn_grad",
        inputs=_inputs(input="x[T B I]", **_RNN_WEIGHTS, saved="h[T B H]", gradient="h_grad[T B H]", unread="b"),
        result=RNNGrads,
        shapes=("T B I", "B H", "I+H H", "H"),
        attributes=(_ACTIVATION,),
    ),
    _gru_op(
        "gru_block_cell_vjp",
        kernel="block_gru_grad",
        inputs=_inputs(input="x[B I]", **_GRU_WEIGHTS, saved=_GRU_STATES, gradient="d_h[B H]", unread="b_ru b_c"),
        result=GRUCellVjp,
        shapes=("B I", "B H", "I+H 2H", "I+H H", "2H", "H"),
        constants=(_ONE_STEP, _NO_H),
    ),
    _lstm_op(
        "lstm_block_cell_vjp",
        kernel="block_lstm_grad",
        inputs=_inputs(
            input="x[B I]", **_LSTM_WEIGHTS, saved=_LSTM_STATES, gradient="cs_grad[B H] h_grad[B H]", unread="b"
        ),
        result=LSTMGrads,
        shapes=("B I", *_LSTM_GRADS),
        attributes=(_PEEPHOLE_REQUIRED,),
        constants=(_ONE_STEP, _NO_H, ("ifco", False)),
    ),
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
    rows, gates = "I+P" if projected else "I+H", len(COUPLED_GATES if coupled else _ICFO)
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
