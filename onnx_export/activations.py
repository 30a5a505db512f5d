"""The activations of `blockcell.activations` and their slopes as graph text, in one place for the graphs of all cells.

Four words in the texts of cells stand for nodes that depend on a layer's activations. Activation and Recurrent are the
values of the two activations. ActivationSlope and RecurrentSlope are their derivatives, computed from the value alone.
`expand_activations` writes the nodes. In the texts here `x` is the input, the value is `y`, and `slope` follows from
`y`; names of values between them begin with the name of the input.

In float32 a value is an operator of ONNX, but for Selu and Softsign, which onnxruntime does not have on WebGPU. In
float64 most values are written out: attributes of operators are float32, and onnxruntime has no float64 kernels of most
of these. ``float32`` and ``float64`` in the margin are these dtypes; `onnx_export.text` says how to read the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from onnx import NodeProto

from blockcell.activations import PARAMETERS, Activation, parts
from blockcell.convert.onnx_activations import USES, WRITTEN, are_exact
from blockcell.formulas import SELU

from .nodes import Nodes
from .text import expand_text

_SELU = dict(zip(("scale", "alpha"), SELU, strict=True)) | {"drop": SELU[0] * SELU[1]}
"""Selu's numbers, which no argument changes; `drop` is how far it falls below 0."""

_ELU = """
float32  | y = Elu <alpha: float = @alpha> (x)
float64  | x_above = Greater (x, zero)
float64  | x_exp = Exp (x)
float64  | x_less = Sub (x_exp, one)
float64  | x_part = Mul (x_less, alpha)
float64  | y = Where (x_above, x, x_part)
"""
VALUES = {
    "tanh": "| y = Tanh (x)",
    "sigmoid": "| y = Sigmoid (x)",
    "relu": "| y = Relu (x)",
    "leaky_relu": """
float32  | y = LeakyRelu <alpha: float = @negative_slope> (x)
float64  | x_above = Greater (x, zero)
float64  | x_part = Mul (x, negative_slope)
float64  | y = Where (x_above, x, x_part)
""",
    "elu": _ELU,
    "selu": f"""{_ELU.replace("y =", "x_elu =")}\
         | y = Mul (x_elu, scale)
""",
    "softplus": """
float32  | y = Softplus (x)
float64  | x_size = Abs (x)
float64  | x_minus = Neg (x_size)
float64  | x_exp = Exp (x_minus)
float64  | x_more = Add (x_exp, one)
float64  | x_log = Log (x_more)
float64  | x_top = Max (x, zero)
float64  | y = Add (x_top, x_log)
""",
    "softsign": """
         | x_size = Abs (x)
         | x_more = Add (x_size, one)
         | y = Div (x, x_more)
""",
    "exponential": "| y = Exp (x)",
    "hard_sigmoid": """
float32  | y = HardSigmoid <alpha: float = @scale, beta: float = @shift> (x)
float64  | x_part = Mul (x, scale)
float64  | x_more = Add (x_part, shift)
float64  | y = Clip (x_more, zero, one)
""",
    "linear": "| y = Identity (x)",
}

SLOPES = {
    "tanh": """
         | y_y = Mul (y, y)
         | slope = Sub (one, y_y)
""",
    "sigmoid": """
         | y_not = Sub (one, y)
         | slope = Mul (y, y_not)
""",
    "relu": """
         | y_above = Greater (y, zero)
         | slope = Where (y_above, one, zero)
""",
    "leaky_relu": """
         | y_above = Greater (y, zero)
         | slope = Where (y_above, one, negative_slope)
""",
    "elu": """
         | y_above = Greater (y, zero)
         | y_more = Add (y, alpha)
         | slope = Where (y_above, one, y_more)
""",
    "selu": """
         | y_above = Greater (y, zero)
         | y_more = Add (y, drop)
         | slope = Where (y_above, scale, y_more)
""",
    "softplus": """
         | y_minus = Neg (y)
         | y_exp = Exp (y_minus)
         | slope = Sub (one, y_exp)
""",
    "softsign": """
         | y_size = Abs (y)
         | y_gap = Sub (one, y_size)
         | slope = Mul (y_gap, y_gap)
""",
    "exponential": "| slope = Identity (y)",
    "hard_sigmoid": """
         | y_above = Greater (y, zero)
         | y_below = Less (y, one)
         | y_part = Where (y_below, scale, zero)
         | slope = Where (y_above, y_part, zero)
""",
    "linear": "| slope = Identity (one)",
}
"""At the kinks of relu and hard_sigmoid the slope is 0."""

WORDS = {
    "Activation": ("activation", VALUES, "x", "y"),
    "Recurrent": ("recurrent_activation", VALUES, "x", "y"),
    "ActivationSlope": ("activation", SLOPES, "y", "slope"),
    "RecurrentSlope": ("recurrent_activation", SLOPES, "y", "slope"),
}
"""For each word: a layer's argument, its texts, and the texts' names for their input and output."""


def numbers(activations: Mapping[str, Activation]) -> dict[str, float]:
    """Return the numbers that the nodes of these activations name, by their names."""
    return {
        f"{argument}_{name}": value
        for argument, activation in activations.items()
        for name, value in _parameters(activation).items()
    }


def expand_activations(
    nodes: Iterable[NodeProto], activations: Mapping[str, Activation], dtype: np.dtype[np.floating]
) -> Nodes:
    """Return the nodes with activations and slopes written out.

    `activations` are by the names of a layer's arguments; `dtype` is what is computed in.
    """
    by_output: dict[str, NodeProto] = {}  # by the first output: what is there already is not made again
    for node in nodes:
        if node.op_type in WORDS:
            for written_node in _activation_nodes(node, activations, dtype):
                assert by_output.setdefault(written_node.output[0], written_node) == written_node, written_node
        else:
            by_output[node.output[0]] = node
    return [*by_output.values()]


def not_in_node(
    op_type: str, activations: Mapping[str, Activation], coupled: bool, dtype: np.dtype[np.floating]
) -> str:
    """Return why ONNX's own LSTM, GRU or RNN does not have these activations, "" if it does."""
    for argument in USES[op_type]:
        name, values = parts(activations[argument])
        if name == "softplus":
            return f"in its {op_type}, onnxruntime's softplus of more than 88 is infinite"
        if name not in WRITTEN:
            return f"ONNX's {op_type} has no {argument} {name!r}"
        if dtype == np.float64 and not are_exact(values):
            return f"ONNX's {op_type} has the numbers of its activations in float32, not {activations[argument]!r}"
    gate, values = parts(activations["recurrent_activation"])
    if coupled and gate != "sigmoid" and (gate, *values[1:]) != ("hard_sigmoid", 0.5):
        return (
            "ONNX's LSTM keeps i of coupled gates, and 1 - f is no such i with the recurrent_activation "
            f"{activations['recurrent_activation']!r}"
        )
    return ""


def _activation_nodes(word: NodeProto, activations: Mapping[str, Activation], dtype: np.dtype[np.floating]) -> Nodes:
    """Return the nodes for which an Activation, Recurrent or one of their slopes stands."""
    argument, texts, input_name, output_name = WORDS[word.op_type]
    activation = activations[argument]
    parameters = _parameters(activation)
    values = {input_name: word.input[0], output_name: word.output[0]}
    values |= {name: f"{argument}_{name}" for name in parameters}
    nodes = expand_text(texts[parts(activation)[0]], values, ["zero", "one"], [dtype.name])
    for node in nodes:
        for attribute in node.attribute:
            attribute.f = parameters[attribute.ref_attr_name]
            attribute.ClearField("ref_attr_name")
    return nodes


def _parameters(activation: Activation) -> dict[str, float]:
    """Return the numbers that the texts of an activation name."""
    name, values = parts(activation)
    return _SELU if name == "selu" else dict(zip(PARAMETERS[name], values, strict=True))
