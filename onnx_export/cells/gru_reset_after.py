"""The graph text of the GRU that resets after the product: one step forward, one step backward.

Forward, as in `blockcell.formulas`, where sigmoid and tanh stand for a layer's activations::

    r_bar, u_bar = [x, h_prev] @ w_ru + b_ru         (1)
    r, u   = sigmoid(r_bar), sigmoid(u_bar)          (2), (3)
    hc     = h_prev @ w_ch + b_hc                    (4)   w_c has the rows w_cx for x and w_ch for h_prev
    c      = tanh(x @ w_cx + b_c + r * hc)           (5)
    h      = u * (h_prev - c) + c                    (6)

Backward, from (6) to (1); every ``a_from_h`` is what the gradient to a has of that to h, and needs no other step::

    d_c_bar = d_h * c_from_h     c_from_h  = (1 - u) * (1 - c * c)             (6), (5)
    d_u_bar = d_h * u_from_h     u_from_h  = (h_prev - c) * u * (1 - u)        (6), (3)
    d_r_bar = d_h * r_from_h     r_from_h  = c_from_h * hc * r * (1 - r)       (6), (5), (2)
    d_hc    = d_h * hc_from_h    hc_from_h = c_from_h * r                      (6), (5)
    d_x      = [d_r_bar_u_bar, d_c_bar] @ w_x^T                                (1), (5)
    d_h_prev = [d_r_bar_u_bar, d_hc] @ w_h^T + d_h * u                         (1), (4), (6)

So x and h_prev have one product each, with the rows w_x and w_h of ``[w_ru, w_c]``.

`onnx_export.text` says how to read the margin, `onnx_export.activations` what Activation, Recurrent and their slopes
are.
"""

from ..text import Program
from . import gru

FORWARD = Program(
    carried={"h_prev": "h"},
    before="""
         | w_ruc = Concat <axis = 1> (w_ru, w_c)
         | w_x, w_h = Split <axis = 0> (w_ruc, I_H)                         # the rows for x, those for h_prev
         | b_x = Concat <axis = 0> (b_ru, b_c)
""",
    step="""
sequence | x_rows = Flatten <axis = -1> (x)
         | x_w = Gemm (x_rows, w_x, b_x)                                    # (1), (5) for all steps at once
sequence | x_bar = Reshape <allowzero = 1> (x_w, T_B_3H)
         | x_ru, x_c = Split <axis = -1> (x_bar, HH_H)
         | x_c_shape = Shape (x_c)
         | b_rows = Expand (b_hc, x_c_shape)
         | x_ru_b = Concat <axis = -1> (x_ru, b_rows)                       # so that a step has no node for b_hc
         | h_bar = Gemm (h_prev, w_h, x_ru_b)                               # (1), (4)
         | r_bar, u_bar, hc = Split <axis = -1> (h_bar, H_H_H)
         | r = Recurrent (r_bar)                                            # (2)
         | u = Recurrent (u_bar)                                            # (3)
         | r_hc = Mul (r, hc)
         | c_bar = Add (x_c, r_hc)
         | c = Activation (c_bar)                                           # (5)
         | h_c = Sub (h_prev, c)
         | u_h_c = Mul (u, h_c)
         | h_new = Add (u_h_c, c)                                           # (6)
float16  | h_half = Cast <to = 10> (h_new)                                  # the next step sees the state in half
float16  | h = Cast <to = 1> (h_half)
""",
    after="""
sequence | r_live = Live (r)
sequence | u_live = Live (u)
sequence | c_live = Live (c)
sequence | hc_live = Live (hc)
sequence | h_live = Live (h)
""",
)

BACKWARD = Program(
    carried={"d_h_next": "d_h_prev"},
    before="""
         | w_ruc = Concat <axis = 1> (w_ru, w_c)
         | w_T = Transpose <perm = [1, 0]> (w_ruc)
         | w_x_T, w_h_T = Split <axis = 1> (w_T, I_H)
         | h_first = Unsqueeze (h_prev, at_0)
         | h_rest = Slice (h, at_0, at_last, at_0)
         | h_before = Concat <axis = 0> (h_first, h_rest)                   # h_prev of every step
""",
    step="""
         | d_h = Add (h_grad, d_h_next)
         | u_not = Sub (one, u)
         | c_slope = ActivationSlope (c)
         | c_from_h = Mul (u_not, c_slope)                                  # (6), (5)
         | u_slope = RecurrentSlope (u)
         | h_c = Sub (h_before, c)
         | u_from_h = Mul (h_c, u_slope)                                    # (6), (3)
         | hc_from_h = Mul (c_from_h, r)                                    # (5)
sigmoid  | r_not = Sub (one, r)
sigmoid  | hc_slope = Mul (hc, r_not)
sigmoid  | r_from_h = Mul (hc_from_h, hc_slope)                             # (5), (2)
generic  | r_slope = RecurrentSlope (r)
generic  | r_from_hc = Mul (hc, r_slope)
generic  | r_from_h = Mul (c_from_h, r_from_hc)                             # (5), (2)
         | bars_from = Concat <axis = -1> (r_from_h, u_from_h, hc_from_h)
         | d_from = Concat <axis = -1> (d_h, d_h, d_h)
         | d_bars = Mul (d_from, bars_from)
         | h_through_u = Mul (d_h, u)                                       # (6)
         | d_h_prev = Gemm (d_bars, w_h_T, h_through_u)                     # (1), (4)
         | d_c_bar = Mul (d_h, c_from_h)
         | d_r_bar_u_bar, d_hc = Split <axis = -1> (d_bars, HH_H)
         | d_x_bars = Concat <axis = -1> (d_r_bar_u_bar, d_c_bar)
         | d_x = MatMul (d_x_bars, w_x_T)                                   # (1), (5)
""",
    after="""
         | d_x_live = Live (d_x)
         | x_live = Live (x)
         | x_rows = Flatten <axis = -1> (x_live)                            # a row for every step and row of the batch
         | d_x_bars_live = Live (d_x_bars)
         | d_x_rows = Flatten <axis = -1> (d_x_bars_live)
         | d_w_x = Gemm <transA = 1> (x_rows, d_x_rows)                     # (1), (5)
         | h_live = Live (h_before)
         | h_rows = Flatten <axis = -1> (h_live)
         | d_bars_live = Live (d_bars)
         | d_h_rows = Flatten <axis = -1> (d_bars_live)
         | d_w_h = Gemm <transA = 1> (h_rows, d_h_rows)                     # (1), (4)
         | d_w_ru_x, d_w_c_x = Split <axis = 1> (d_w_x, HH_H)
         | d_w_ru_h, d_w_c_h = Split <axis = 1> (d_w_h, HH_H)
         | d_w_ru = Concat <axis = 0> (d_w_ru_x, d_w_ru_h)
         | d_w_c = Concat <axis = 0> (d_w_c_x, d_w_c_h)
         | d_b_x = ReduceSum <keepdims = 0> (d_x_rows, at_0)
         | d_b_ru, d_b_c = Split <axis = 0> (d_b_x, HH_H)
         | d_hc_live = Live (d_hc)
         | d_hc_rows = Flatten <axis = -1> (d_hc_live)
         | d_b_hc = ReduceSum <keepdims = 0> (d_hc_rows, at_0)
""",
)

NATIVE = gru.NATIVE.replace("linear_before_reset = 0", "linear_before_reset = 1")
"""ONNX's own GRU, for layers."""
