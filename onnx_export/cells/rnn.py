"""The plain RNN's graph text: one step forward, one step backward.

Forward, as in `blockcell.formulas`::

    bar = [x, h_prev] @ w + b                        (1)
    h   = activation(bar)                            (2)

Backward, from (2) to (1); the slope of (2) is one of its value, and needs no other step::

    d_bar = d_h * slope(h)                           (2)
    x_grad, h_prev_grad = d_bar @ w^T                (1)

`onnx_export.text` says how to read the margin, `onnx_export.activations` what Activation and ActivationSlope are.
"""

from ..text import Program

FORWARD = Program(
    carried={"h_prev": "h"},
    before="""
split    | w_x, w_h = Split <axis = 0> (w, I_H)                             # the rows for x, those for h_prev
""",
    step="""
fused    | x_h = Concat <axis = -1> (x, h_prev)
fused    | bar = Gemm (x_h, w, b)                                           # (1)
sequence | x_rows = Flatten <axis = -1> (x)
split    | x_w = Gemm (x_rows, w_x, b)                                      # (1) for all steps at once
sequence | x_bar = Reshape <allowzero = 1> (x_w, T_B_H)
split    | bar = Gemm (h_prev, w_h, x_bar)
         | h_new = Activation (bar)                                         # (2)
float16  | h_half = Cast <to = 10> (h_new)                                  # the next step sees the state in half
float16  | h = Cast <to = 1> (h_half)
""",
    after="""
sequence | h_live = Live (h)
""",
)

BACKWARD = Program(
    carried={"h_grad_next": "h_prev_grad"},
    before="""
         | w_T = Transpose <perm = [1, 0]> (w)
         | w_x_T, w_h_T = Split <axis = 1> (w_T, I_H)
         | h_first = Unsqueeze (h_prev, at_0)
         | h_rest = Slice (h, at_0, at_last, at_0)
         | h_before = Concat <axis = 0> (h_first, h_rest)                   # h_prev of every step
""",
    step="""
         | d_h = Add (h_grad, h_grad_next)
         | h_slope = ActivationSlope (h)
         | d_bar = Mul (d_h, h_slope)                                       # (2)
         | h_prev_grad = MatMul (d_bar, w_h_T)                              # (1)
         | x_grad = MatMul (d_bar, w_x_T)
""",
    after="""
         | x_grad_live = Live (x_grad)
         | d_bar_live = Live (d_bar)
         | d_rows = Flatten <axis = -1> (d_bar_live)                        # a row for every step and row of the batch
         | x_h = Concat <axis = -1> (x, h_before)
         | x_h_live = Live (x_h)
         | x_h_rows = Flatten <axis = -1> (x_h_live)
         | w_grad = Gemm <transA = 1> (x_h_rows, d_rows)                    # (1)
         | b_grad = ReduceSum <keepdims = 0> (d_rows, at_0)
""",
)

NATIVE = """
         | h_first = Unsqueeze (h_prev, at_0)
         | h_one, h_ends = RNN (x, W, R, B, lengths, h_first)
         | h_end = Squeeze (h_ends, at_0)
         | h_native = Squeeze (h_one, at_1)
"""
"""ONNX's own RNN, for layers, which bring the weights in its layout: `onnx_export.layers.weights`."""
