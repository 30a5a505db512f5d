"""What TensorFlow's ops do, as far as cells are concerned: the one table that everything goes by that reads a graph.

Ops of which one is a later version of the other, or its form for references, have one row, under one name. An op that
has no row is in no cell, and makes its value itself.
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
"""What a node may show a recurrence to be, the surest first."""
_VALUE = ("",)


class Op(NamedTuple):
    """What an op does."""

    name: str
    """The one of its row, without version: ``"Add"`` of AddV2."""
    passes: Literal["", "step", "flow"] = ""
    """Whether its output is its first input: within a step, or into or out of a loop or a variable."""
    inputs: int | None = None
    """How many it must have."""
    arrays: slice = slice(None)
    """The inputs that are computed with; the others are numbers that say how."""
    outputs: tuple[str, ...] | None = None
    """Their names, where these count; None is not known."""
    compute: Callable[..., Array] | None = None
    """In numpy, entry by entry."""
    options: Mapping[str, float] = {}
    """The attributes that this takes, and their defaults."""
    activation: str = ""
    """The activation that it is, by the name that layers have for it."""
    view: Literal["", "columns", "axis"] = ""
    """Whether it takes a part of an array: of a size, which may be gates, or along an axis, which it drops."""
    calls: tuple[str, ...] = ()
    """Its attributes that name functions."""
    first: int = 0
    """The input that is the functions' first argument."""
    array: Literal["", "write", "read", "stack", "fill"] = ""
    """What it does with a list of arrays, which loops have for the steps of a sequence."""
    at: Mapping[str, int] = {}
    """Then, which of its inputs are the array, the index and the value."""
    variable: bool = False
    """Whether it is a variable, or its handle."""
    known: bool = False
    """Whether it may be in a cell that is found."""
    shows: str = ""
    """What a cell is, and why it is refused, if it has this op where the known cells have none."""
    shape_only: bool = False
    """Whether the values of its input do not matter."""


def _passing(name: str, passes: Literal["step", "flow"], outputs: tuple[str, ...] = _VALUE) -> Op:
    return Op(name, passes=passes, outputs=outputs, known=True)


def _computing(name: str, inputs: int, compute: Callable[..., Array], shows: str = "") -> Op:
    return Op(name, inputs=inputs, outputs=_VALUE, compute=compute, known=True, shows=shows)


def _activation(name: str, activation: str, **options: float) -> Op:
    def compute(z: Array, **values: float) -> Array:
        return activated(z, (activation, *values.values()) if values else activation)

    return Op(name, inputs=1, outputs=_VALUE, compute=compute, options=options, activation=activation, known=True)


def _clipped(a: Array, low: Array, high: Array) -> Array:
    return np.minimum(np.maximum(a, low), high)


_TABLE = (
    # a value goes on as it is
    *(_passing(name, "step") for name in (
        "Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape")),
    _passing("Switch", "step", ("output_false", "output_true")),
    *(_passing(name, "flow") for name in ("Enter", "Exit", "NextIteration", "ReadVariableOp")),
    Op("IdentityN", known=True),
    Op("Merge", outputs=("output", "value_index"), known=True),
    Op("Cast", outputs=_VALUE, known=True),
    Op("LoopCond", known=True),
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
    _computing("ClipByValue", 3, _clipped, CLIP),
    *(_activation(name, activation) for name, activation in {
        "Tanh": "tanh", "Sigmoid": "sigmoid", "Relu": "relu", "Elu": "elu", "Selu": "selu", "Softplus": "softplus",
        "Softsign": "softsign", "Exp": "exponential"}.items()),
    _activation("LeakyRelu", "leaky_relu", alpha=0.2),
    _computing("Relu6", 1, lambda a: np.clip(a, 0, 6), ACTIVATION),
    Op("MatMul", inputs=2, outputs=_VALUE, known=True),
    Op("ConcatV2", arrays=slice(-1), outputs=_VALUE, known=True),
    # a part of an array
    Op("Split", inputs=2, arrays=slice(1, None), view="columns", known=True),
    Op("SplitV", inputs=3, arrays=slice(1), view="columns", known=True),
    Op("StridedSlice", inputs=4, arrays=slice(1), outputs=_VALUE, view="columns", known=True),
    Op("Squeeze", inputs=1, outputs=_VALUE, view="axis"),
    Op("Unpack", inputs=1, view="axis"),
    # variables and constants
    *(Op(name, variable=True) for name in ("Variable", "VarHandleOp", "AutoReloadVariable")),
    *(Op(name, outputs=_VALUE) for name in ("Const", "ImmutableConst")),
    # functions
    Op("PartitionedCall", calls=("f",)),
    Op("RemoteCall", calls=("f",), first=1),
    Op("While", calls=("cond", "body")),
    Op("If", calls=("then_branch", "else_branch"), first=1),
    # lists of arrays
    Op("TensorArrayV3", outputs=("handle", "flow")),
    Op("TensorArrayWrite", array="write", at={"array": 3, "index": 1, "value": 2}),
    Op("TensorListSetItem", array="write", at={"array": 0, "index": 1, "value": 2}),
    Op("TensorArrayRead", array="read", at={"array": 2, "index": 1}),
    Op("TensorListGetItem", array="read", at={"array": 0, "index": 1}),
    Op("TensorArrayGather", array="stack", at={"array": 2, "index": 1}),
    Op("TensorListStack", array="stack", at={"array": 0}),
    Op("TensorArrayScatter", array="fill", at={"value": 2, "index": 1}),
    Op("TensorListFromTensor", array="fill", at={"value": 0}),
    *(Op(name, shape_only=True) for name in ("Shape", "ShapeN", "ZerosLike", "OnesLike", "Size", "Rank")),
    # what shows that a cell is another one
    *(Op(name, shows=NORMALIZES) for name in ("Rsqrt", "SquaredDifference", "Mean", "FusedBatchNorm")),
    *(Op(name, shows=RANDOM) for name in (
        "RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2", "StatelessRandomNormalV2")),
    *(Op(name, shows=ACTIVATION) for name in (
        "Softmax", "Erf", "Erfc", "Sin", "Abs")),
    *(Op(name, outputs=tuple(each.name for each in op.outputs)) for name, op in BLOCK_OPS.items()),
)  # fmt: skip
OPS = {op.name: op for op in _TABLE}
_LIKE = {  # other versions
    **{f"Ref{name}": name for name in ("Identity", "Switch", "Enter", "Exit", "NextIteration", "Merge")},
    **{
        f"TensorArray{what}V{k}": f"TensorArray{what}"
        for what in ("Write", "Read", "Gather", "Scatter")
        for k in (2, 3)
    },
    **{f"Stateless{name}": name for name in ("While", "If")},
    **{f"{name}V2": name for name in ("Add", "Select", "Variable", "FusedBatchNorm")},
    "FusedBatchNormV3": "FusedBatchNorm",
    "GatherV2": "Gather",
    "StatefulPartitionedCall": "PartitionedCall",
}


def op_of(node: Node) -> Op:
    """The row of a node's op."""
    name = _LIKE.get(node.op, node.op)
    return OPS.get(name) or Op(name)
