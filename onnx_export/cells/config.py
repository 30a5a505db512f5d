"""`Config`: what the graph of an op or a cell depends on, checked; `op_config` checks the arguments of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike

from blockcell.activations import DEFAULTS, Activation, Numbers
from blockcell.argument_reader import ArgumentReader
from blockcell.optable import DTYPE_NAMES, DTYPES, LETTERS, OPS, Op, Tensor, compute_dtype

from .. import activations
from . import gru, gru_reset_after, lstm, rnn

LOOPS = ("scan", "unroll", "native", "loop")
NODE_WEIGHTS = ("W", "R", "B", "P")  # what ONNX's own LSTM, GRU and RNN call their weights
OLDEST_OPSET = 15  # functions; Shape with a start
DEFAULT_OPSET = 18
REDUCE_AXES_OPSET = 18  # ReduceMax with axes as an input

Value = float | bool | Activation


@dataclass(frozen=True)
class Form:
    """How a graph is written; `build` explains ``loop``, ``opset`` and ``static``."""

    loop: str = "scan"
    opset: int = DEFAULT_OPSET
    static: bool = False
    inlined: bool = False
    """Whether the model has the nodes of its functions in their place."""


@dataclass(frozen=True)
class Config:
    """What an op's graph depends on. One that has a `refusal` cannot be built."""

    caller: str = field(compare=False)
    """The op, or the public function and the cell in its layer, with which messages begin."""
    op: Op
    """A row of the table of ops or, for a layer's cell, a row like these."""
    dtype: np.dtype[Any]
    sizes: Mapping[str, int]
    attrs: Mapping[str, Value]
    """Attributes of the op, or of the cell."""
    form: Form = Form()
    runs_all_steps: bool = False
    """Whether a sequence always runs all T steps. Then seq_len_max is no argument, and the states after the last step,
    ``cs_last`` and ``h_last``, can be outputs."""
    reset: bool = False
    """Whether such a sequence takes an argument ``fresh`` [T,B,1] of bool: where the state before a step is reset to
    zero."""
    lengths: bool = False
    """Whether ONNX's own LSTM takes the rows' ``lengths``."""
    node_inputs: tuple[str, ...] = ()
    """Inputs of ONNX's own node that are arguments: `NODE_WEIGHTS`, and ``h_first`` unless it comes from h_prev."""
    integers: bool = False
    """Whether products are in integers. Each matrix is unsigned bytes then, with an argument ``w_scale``."""

    @property
    def refusal(self) -> str:
        """The message of why the loop cannot run the op, "" if it can."""
        if self.form.loop == "unroll" and self.op.sequence and "T" not in self.sizes:
            needs = "loop='unroll' writes every step out and so needs sizes['T']"
            return f"{self.caller}: {needs}; 'scan' and 'loop' do not"
        if self.native and self.integers:
            message = f"{self.caller}: activations is 'int8' and loop 'native', whose nodes multiply in float32"
            return f"{message}; expected another loop, or activations='float32'"
        reason = self._why_not_native() if self.native else ""
        return f"{self.caller}: loop='native' {reason}" if reason else ""

    def _why_not_native(self) -> str:
        """Return why ONNX's own LSTM, GRU or RNN does not compute the same, "" if it does."""
        cell = native_cell(self.op)
        if not self.forward:
            return f"is not possible: ONNX's {cell} has no gradient; expected 'scan', 'unroll' or 'loop'"
        if not self.op.sequence:
            return "is not possible: a cell has no loop; expected 'scan', the default"
        if not self.runs_all_steps:
            return (
                f"is not possible: ONNX's {cell} gives no gates; expected 'scan', 'unroll' or 'loop', or the model of a"
                " layer, from export"
            )
        if "clip" in self.conditions:
            return (
                "is not exact: ONNX's clip bounds what goes into the gates, not the cell state; "
                f"expected a cell_clip of 0, not {self.attrs['cell_clip']}, or another loop"
            )
        if self.half:
            return "is not exact: the states would not be rounded to half at every step; expected float32 or float64"
        if self.sizes["I"] == 0 and cell != "RNN":
            return f"is not possible: onnxruntime's {cell} is wrong, or crashes, without inputs; expected another loop"
        if self.reset:
            return "is not possible with reset; expected 'scan', 'unroll' or 'loop'"
        if self.projected:
            return "is not possible: ONNX's LSTM has no projection; expected another loop"
        if reason := activations.not_in_node(cell, self.activation_of, "coupled" in self.conditions, self.dtype):
            return f"is not exact: {reason}; expected another loop"
        return ""

    @property
    def native(self) -> bool:
        return self.form.loop == "native"

    @property
    def half(self) -> bool:
        return self.dtype == np.float16

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype that a step computes in."""
        return compute_dtype(self.dtype)

    def attribute(self, name: str) -> float:
        """Return an attribute as a step uses it: in float16 it is rounded, as TensorFlow does."""
        with np.errstate(over="ignore"):
            return float(self.dtype.type(self.attrs.get(name, 0.0)))

    @property
    def activation_of(self) -> dict[str, Activation]:
        """Return the activations by the names of a layer's arguments."""
        return {name: self.attrs.get(name, default) for name, default in DEFAULTS.items()}  # type: ignore[misc]

    @property
    def projected(self) -> bool:
        """Return whether an LSTM has a projection."""
        return any(tensor.name == "w_p" for tensor in self.op.inputs)

    def is_always_zero(self, output: Tensor) -> bool:
        """Return whether an output is the gradient to a peephole weight that is not used."""
        return output.peephole and "peephole" not in self.conditions

    @property
    def forward(self) -> bool:
        return "grad" not in self.op.kernel

    @property
    def module(self) -> ModuleType:
        """Return the module that has the op's text."""
        return {"lstm": lstm, "gru": gru, "gru_reset_after": gru_reset_after, "rnn": rnn}[cell_name(self.op)]

    @property
    def conditions(self) -> set[str]:
        """Return the conditions of the text's lines that hold; `onnx_export.text` explains them."""
        clip, p_clip = self.attribute("cell_clip"), self.attribute("proj_clip")
        cell, bias = not self.op.sequence, self.attribute("forget_bias") != 0
        coupled, peephole = "f" in self.op.gates and "i" not in self.op.gates, bool(self.attrs.get("use_peephole"))
        sigmoid = self.activation_of["recurrent_activation"] == "sigmoid"
        holds = {
            "cell": cell,
            "fused": cell and not self.integers,
            "split": not cell or self.integers,
            "sequence": self.op.sequence,
            "peephole": peephole,
            "no_peep": not peephole,
            "i_peep": peephole and not coupled,
            "coupled": coupled,
            "uncoupled": not coupled,
            "proj": self.projected,
            "no_proj": not self.projected,
            "p_clip": self.projected and 0 < p_clip < np.inf,
            "cs_grad": self.op.sequence and any(tensor.name == "cs_grad" for tensor in self.op.inputs),
            "sigmoid": sigmoid,
            "generic": not sigmoid,
            "bias_b": bias and not self.integers,
            "bias_f": bias and self.integers,
            "clip": 0 < clip < np.inf,
            "float16": self.half and self.op.sequence,
        }
        return {word for word, condition in holds.items() if condition}


# ------------------------------------------------------------------------------------------------------------ arguments
def op_config(
    op: str,
    dtype: DTypeLike = "float32",
    sizes: Mapping[str, int | None] | None = None,
    attrs: Mapping[str, Value] | None = None,
    form: Form = Form(),
) -> Config:
    """Check what an op is to be built of; return its configuration."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    row = OPS[op]
    dtype = check_dtype(op, dtype)
    fixed = check_sizes(op, sizes, LETTERS)
    values = check_attributes(op, row, attrs or {})
    check_form(op, form)
    fixed = {letter: size for letter, size in fixed.items() if letter in row.sources}  # a cell has no T
    return Config(op, row, dtype, fixed, values, form)


def cell_name(op: Op) -> str:
    """Return the name of an op's cell, that of its kernel and of the module with its text."""
    return op.kernel.removeprefix("block_").removesuffix("_grad").removesuffix("_cell")


def native_cell(op: Op) -> str:
    """Return which of ONNX's own nodes is such a cell: LSTM, GRU or RNN."""
    return cell_name(op).partition("_")[0].upper()


def check_form(caller: str, form: Form) -> None:
    """Raise a ValueError unless there are such a loop and such operators."""
    opset = form.opset
    if form.loop not in LOOPS:
        raise ValueError(f"{caller}: loop is {form.loop!r}; expected one of {', '.join(LOOPS)}")
    if not isinstance(opset, int) or not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        newest = f"{onnx.defs.onnx_opset_version()}, the newest that onnx {onnx.__version__} knows"
        raise ValueError(f"{caller}: opset is {opset!r}; expected an integer from {OLDEST_OPSET} to {newest}")


def check_dtype(caller: str, dtype: DTypeLike) -> np.dtype[Any]:
    """Return the dtype if ops have it, else raise a ValueError."""
    try:
        return DTYPES[DTYPES.index(np.dtype(dtype))]
    except (TypeError, ValueError):
        raise ValueError(f"{caller}: dtype is {dtype!r}; expected {DTYPE_NAMES}") from None


def check_sizes(caller: str, sizes: Mapping[str, int | None] | None, letters: str, least: int = 0) -> dict[str, int]:
    """Check sizes by their letters; return the ones that are not None."""
    fixed = {}
    for letter, size in (sizes or {}).items():
        if letter not in tuple(letters):
            raise ValueError(f"{caller}: sizes has {letter!r}; expected the letters {', '.join(letters)}")
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < least:
            expected = f"expected an integer >= {least} or None, any size"
            raise ValueError(f"{caller}: sizes[{letter!r}] is {size!r}; {expected}")
        fixed[letter] = int(size)
    return fixed


def check_attributes(caller: str, op: Op, attrs: Mapping[str, Value]) -> dict[str, Value]:
    """Check an op's attributes; return all of them, with defaults for missing ones."""
    names = [attribute.name for attribute in op.attributes]
    for name in attrs:
        if name not in names:
            expected = f"expected {', '.join(names)}" if names else "the op has none"
            raise ValueError(f"{caller}: attrs has {name!r}; {expected}")
    reader, values = ArgumentReader(caller), dict[str, Value]()
    read: dict[type, Callable[[str, Any], Value]]
    read = {Numbers: reader.activation, bool: reader.switch, float: partial(read_number, reader)}
    for attribute in op.attributes:
        name, value = attribute.name, attrs.get(attribute.name, attribute.default)
        try:
            values[name] = read[attribute.kind](f"attrs[{name!r}]", value)
        except TypeError as error:
            raise ValueError(str(error)) from None
    return values


def read_number(reader: ArgumentReader, name: str, value: Any) -> float:
    """Return a number, or raise an error: also of True and False, which Python takes for numbers."""
    if isinstance(value, bool):
        raise TypeError(f"{reader.caller}: {name} is {value}; expected a real number")
    return reader.number(name, value)


def input_tensors(op: Op) -> list[Tensor]:
    """Return an op's input tensors, seq_len_max among them."""
    return [Tensor("seq_len_max", "", "input"), *op.inputs] if op.sequence else [*op.inputs]
