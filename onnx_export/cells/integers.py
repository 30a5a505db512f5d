"""Integer (int8) GEMM, ``activations="int8"``, as graphs of ONNX's own operators.

Each row is rounded to codes with a scale of its own, and

.. code-block:: text

    out = addend + (row's scale * column's scale) * (codes of the row @ codes of the column)

Both operands of MatMulInteger are unsigned with zero points of 128: on CPUs without VNNI onnxruntime multiplies
unsigned with signed bytes in 16 bits that saturate, and two unsigned ones exactly. A product's Cast and the Mul with
the scales must not follow each other: onnxruntime 1.32 fuses them into a MatMulIntegerToFloat, which takes one scale
only.

`onnx_export.text` says how to read the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from onnx import NodeProto

from blockcell.quantization import LARGEST_CODE

from ..nodes import Nodes, add_new_nodes, make_node
from ..text import expand_text

MOST = 65536
"""Values of k whose sum fits into 32 bits."""

ROUNDED = """
         | rows_size = Abs (rows)
         | rows_largest = ReduceMax <keepdims = 1> (rows_size, at_last)
         | rows_part = Div (rows_largest, code_top)
         | rows_scale = Max (rows_part, scale_least)
         | rows_zeros = Sub (rows, rows)                            # NaN where a number is not finite
         | rows_zero = ReduceSum <keepdims = 1> (rows_zeros, at_last)
         | rows_share = Div (rows, rows_scale)
         | rows_code = Round (rows_share)
         | rows_up = Add (rows_code, code_middle)
         | rows_bytes = Cast <to = 2> (rows_up)
"""
"""The codes of rows and their scales."""

PRODUCT = """\
         | out_sums = MatMulInteger (rows_bytes, w, byte_middle, byte_middle)
         | out_float = Cast <to = 1> (out_sums)
         | out_total = Add (out_float, rows_zero)                     # NaN makes the whole row NaN
         | out_scales = Mul (rows_scale, w_scale)
         | out_term = Mul (out_scales, out_total)
         | out = Add (addend, out_term)
"""


CONSTANTS: dict[str, np.generic] = {
    "code_top": np.float32(LARGEST_CODE),
    "scale_least": np.float32(2.0**-126),
    "code_middle": np.float32(128),
    "byte_middle": np.uint8(128),
}
"""The numbers that the texts name."""


def write_product(rows: str, w: str, w_scale: str, addend: str, out: str) -> Nodes:
    """Return the nodes of ``out = addend + rows @ w`` for quantized weights in unsigned bytes."""
    values = {"rows": rows, "w": w, "w_scale": w_scale, "addend": addend, "out": out}
    return expand_text(ROUNDED + PRODUCT, values, ["at_last", *CONSTANTS])


def replace_gemms(before: Iterable[NodeProto], step: Iterable[NodeProto], scales: Mapping[str, str]) -> Nodes:
    """Return the nodes of a step with integer GEMMs in place of its Gemms.

    `scales` has the names of scales by the names of weights. Where nodes before the step concatenate or split weights,
    the scales follow them. Rows that several products read are quantized once.
    """
    scale_of, nodes = dict(scales), Nodes()
    for node in before:
        input_scales = [scale_of[name] for name in node.input if name in scale_of]
        if node.op_type == "Concat" and input_scales:  # weights beside each other
            scale_of[node.output[0]] = f"{node.output[0]}_scale"
            nodes.append(make_node("Concat", input_scales, [scale_of[node.output[0]]], axis=0))
        elif node.op_type == "Split" and input_scales:  # the rows for x, those for h
            scale_of |= dict.fromkeys(node.output, input_scales[0])
    for node in step:
        if node.op_type == "Gemm":
            rows, w, addend = [*node.input, "zero"][:3]
            nodes = add_new_nodes(nodes, write_product(rows, w, scale_of[w], addend, node.output[0]))
        else:
            nodes.append(node)
    return nodes
