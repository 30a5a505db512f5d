"""What TensorFlow's ops do in cells, or why they are in none.

In comes a node; out goes the row of its op. Later versions of an op and its form for references share one row. An op
without a row is in no cell, and makes its value itself. ``node_functions.py`` computes the ops between cells, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from ....formulas import activated
from ....optable import OPS as BLOCK_OPS
from ....optable import Array
from ...graphs import Node

NORMALIZES = "it has layer normalization, which the block cells do not have"
RANDOM = "it changes its state at random"
ACTIVATION = "it has an activation that layers do not have"
CLIP = "it clips what layers do not clip"
SHOWN = (NORMALIZES, RANDOM, ACTIVATION, CLIP)
"""The reasons that single nodes give to refuse a recurrence, the surest first."""
_VALUE = ("",)


class GraphOp(NamedTuple):
    """A row of the table: what an op does."""

    name: str
    """The name of the row, without version: ``"Add"`` of AddV2."""
    forwards: Literal["", "step", "flow"] = ""
    """Whether the first output is the first input: within a step, or into or out of a loop or a variable."""
    input_count: int | None = None
    """The number of inputs that a node must have."""
    array_inputs: slice = slice(None)
    """The inputs that are computed with; the others are numbers such as axes."""
    outputs: tuple[str, ...] | None = None
    """The names of the outputs, where they count; None if they are not known."""
    compute: Callable[..., Array] | None = None
    """The function in numpy, entry by entry."""
    options: Mapping[str, float] = {}
    """The attributes that `compute` takes, and their defaults."""
    activation: str = ""
    """The activation of layers that the op is."""
    view: Literal["", "columns", "axis"] = ""
    """Whether the op takes a part of an array: columns, which may be gates, or one entry of an axis, which it drops."""
    function_attributes: tuple[str, ...] = ()
    """The attributes that name functions."""
    first_argument: int = 0
    """The number of the input that is the functions' first argument."""
    tensor_list: Literal["", "write", "read", "stack", "fill"] = ""
    """What the op does with a TensorArray or TensorList, which loops have for the steps of a sequence."""
    slots: Mapping[str, int] = {}
    """The numbers of the inputs that are the list ("array"), the index and the value."""
    variable: bool = False
    """Whether the op is a variable, or its handle."""
    in_known_cells: bool = False
    """Whether the op may be in a cell that is found."""
    refusal: str = ""
    """The reason to refuse a cell that has this op where the known cells have none."""
    shape_only: bool = False
    """Whether only the shape of the input matters."""


def _passing(name: str, forwards: Literal["step", "flow"], outputs: tuple[str, ...] = _VALUE) -> GraphOp:
    return GraphOp(name, forwards=forwards, outputs=outputs, in_known_cells=True)


def _computing(name: str, inputs: int, compute: Callable[..., Array], refusal: str = "") -> GraphOp:
    return GraphOp(name, input_count=inputs, outputs=_VALUE, compute=compute, in_known_cells=True, refusal=refusal)


def _activation(name: str, activation: str, **options: float) -> GraphOp:
    def compute(z: Array, **values: float) -> Array:
        return activated(z, (activation, *values.values()) if values else activation)

    return _computing(name, 1, compute)._replace(options=options, activation=activation)


_TABLE = (
    # a value goes on as it is
    *(_passing(name, "step") for name in (
        "Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape")),
    _passing("Switch", "step", ("output_false", "output_true")),
    *(_passing(name, "flow") for name in ("Enter", "Exit", "NextIteration", "ReadVariableOp")),
    GraphOp("IdentityN", in_known_cells=True),
    GraphOp("Merge", outputs=("output", "value_index"), in_known_cells=True),
    GraphOp("Cast", outputs=_VALUE, in_known_cells=True),
    GraphOp("LoopCond", in_known_cells=True),
    # values are computed
    _computing("Add", 2, np.add),
    _computing("BiasAdd", 2, np.add),
    _computing("Sub", 2, np.subtract),
    _computing("Mul", 2, np.multiply),
    _computing("RealDiv", 2, np.divide),
    _computing("Greater", 2, np.greater),
    _computing("Select", 3, np.where),
    _computing("Maximum", 2, np.maximum, CLIP),
    _computing("Minimum", 2, np.minimum, CLIP),
    _computing("ClipByValue", 3, lambda a, low, high: np.minimum(np.maximum(a, low), high), CLIP),
    *(_activation(name, activation) for name, activation in {
        "Tanh": "tanh", "Sigmoid": "sigmoid", "Relu": "relu", "Elu": "elu", "Selu": "selu", "Softplus": "softplus",
        "Softsign": "softsign", "Exp": "exponential"}.items()),
    _activation("LeakyRelu", "leaky_relu", alpha=0.2),
    _computing("Relu6", 1, lambda a: np.clip(a, 0, 6), ACTIVATION),
    GraphOp("MatMul", input_count=2, outputs=_VALUE, in_known_cells=True),
    GraphOp("ConcatV2", array_inputs=slice(-1), outputs=_VALUE, in_known_cells=True),
    # a part of an array
    GraphOp("Split", input_count=2, array_inputs=slice(1, None), view="columns", in_known_cells=True),
    GraphOp("SplitV", input_count=3, array_inputs=slice(1), view="columns", in_known_cells=True),
    GraphOp("StridedSlice", input_count=4, array_inputs=slice(1), outputs=_VALUE, view="columns", in_known_cells=True),
    GraphOp("Squeeze", input_count=1, outputs=_VALUE, view="axis"),
    GraphOp("Unpack", input_count=1, view="axis"),
    # variables and constants
    *(GraphOp(name, variable=True) for name in ("Variable", "VarHandleOp", "AutoReloadVariable")),
    *(GraphOp(name, outputs=_VALUE) for name in ("Const", "ImmutableConst")),
    # functions
    GraphOp("PartitionedCall", function_attributes=("f",)),
    GraphOp("RemoteCall", function_attributes=("f",), first_argument=1),
    GraphOp("While", function_attributes=("cond", "body")),
    GraphOp("If", function_attributes=("then_branch", "else_branch"), first_argument=1),
    # lists of arrays
    GraphOp("TensorArrayV3", outputs=("handle", "flow")),
    GraphOp("TensorArrayWrite", tensor_list="write", slots={"array": 3, "index": 1, "value": 2}),
    GraphOp("TensorListSetItem", tensor_list="write", slots={"array": 0, "index": 1, "value": 2}),
    GraphOp("TensorArrayRead", tensor_list="read", slots={"array": 2, "index": 1}),
    GraphOp("TensorListGetItem", tensor_list="read", slots={"array": 0, "index": 1}),
    GraphOp("TensorArrayGather", tensor_list="stack", slots={"array": 2, "index": 1}),
    GraphOp("TensorListStack", tensor_list="stack", slots={"array": 0}),
    GraphOp("TensorArrayScatter", tensor_list="fill", slots={"value": 2, "index": 1}),
    GraphOp("TensorListFromTensor", tensor_list="fill", slots={"value": 0}),
    *(GraphOp(name, shape_only=True) for name in ("Shape", "ShapeN", "ZerosLike", "OnesLike", "Size", "Rank")),
    # what shows that a cell is another one
    *(GraphOp(name, refusal=NORMALIZES) for name in ("Rsqrt", "SquaredDifference", "Mean", "FusedBatchNorm")),
    *(GraphOp(name, refusal=RANDOM) for name in (
        "RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2", "StatelessRandomNormalV2")),
    *(GraphOp(name, refusal=ACTIVATION) for name in (
        "Softmax", "Erf", "Erfc", "Sin", "Abs")),
    *(GraphOp(name, outputs=tuple(output.name for output in op.outputs)) for name, op in BLOCK_OPS.items()),
)  # fmt: skip
OPS = {op.name: op for op in _TABLE}
_LIKE = {  # other versions
    **{f"Ref{name}": name for name in ("Identity", "Switch", "Enter", "Exit", "NextIteration", "Merge")},
    **{f"TensorArray{op}V{k}": f"TensorArray{op}" for op in ("Write", "Read", "Gather", "Scatter") for k in (2, 3)},
    **{f"Stateless{name}": name for name in ("While", "If")},
    **{f"{name}V2": name for name in ("Add", "Select", "Variable", "FusedBatchNorm")},
    "FusedBatchNormV3": "FusedBatchNorm",
    "GatherV2": "Gather",
    "StatefulPartitionedCall": "PartitionedCall",
}


def graph_op(node: Node) -> GraphOp:
    """Return the row of a node's op."""
    name = _LIKE.get(node.op, node.op)
    return OPS.get(name) or GraphOp(name)
