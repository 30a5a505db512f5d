"""The GRU's graph text: one step forward, one step backward, for cells and sequences.

Forward, as in `blockcell.formulas`, where sigmoid and tanh stand for a layer's activations::

    ru_bar = [x, h_prev] @ w_ru + b_ru               (1)
    r, u   = sigmoid(ru_bar)                         (2), (3)
    c      = tanh([x, h_prev * r] @ w_c + b_c)       (4)
    h      = u * (h_prev - c) + c                    (5)

Backward, from (5) to (1); every ``a_from_b`` is what the gradient to a has of that to b, and needs no other step::

    d_c_bar = d_h  * c_from_h     c_from_h  = (1 - u) * (1 - c * c)            (5), (4)
    d_u_bar = d_h  * u_from_h     u_from_h  = (h_prev - c) * u * (1 - u)       (5), (3)
    d_x, d_hr = d_c_bar @ w_c^T                                                (4)   hr is h_prev * r
    d_r_bar = d_hr * r_from_hr    r_from_hr = h_prev * r * (1 - r)             (4), (2)
    d_x, d_h_prev += d_r_bar_u_bar @ w_ru^T                                    (1)
    d_h_prev += d_hr * r + d_h * u                                             (4), (5)

`onnx_export.text` says how to read the margin, `onnx_export.activations` what Activation, Recurrent and their slopes
are.
"""

from ..text import Program

FORWARD = Program(
    carried={"h_prev": "h"},
    before="""
split    | w_ru_x, w_ru_h = Split <axis = 0> (w_ru, I_H)                    # the rows for x, those for h_prev
split    | w_c_x, w_c_h = Split <axis = 0> (w_c, I_H)
""",
    step="""
fused    | x_h = Concat <axis = -1> (x, h_prev)
fused    | ru_bar = Gemm (x_h, w_ru, b_ru)                                  # (1)
sequence | x_rows = Flatten <axis = -1> (x)
split    | x_ru = Gemm (x_rows, w_ru_x, b_ru)                               # (1) for all steps at once
sequence | x_ru_bar = Reshape <allowzero = 1> (x_ru, T_B_2H)
split    | ru_bar = Gemm (h_prev, w_ru_h, x_ru_bar)
         | ru = Recurrent (ru_bar)                                          # (2), (3)
         | r, u = Split <axis = -1> (ru, H_H)
         | h_r = Mul (h_prev, r)
fused    | x_hr = Concat <axis = -1> (x, h_r)
fused    | c_bar = Gemm (x_hr, w_c, b_c)                                    # (4)
split    | x_c = Gemm (x_rows, w_c_x, b_c)                                  # (4) for all steps at once
sequence | x_c_bar = Reshape <allowzero = 1> (x_c, T_B_H)
split    | c_bar = Gemm (h_r, w_c_h, x_c_bar)
         | c = Activation (c_bar)
         | h_c = Sub (h_prev, c)
         | u_h_c = Mul (u, h_c)
         | h_new = Add (u_h_c, c)                                           # (5)
float16  | h_half = Cast <to = 10> (h_new)                                  # the next step sees the state in half
float16  | h = Cast <to = 1> (h_half)
""",
    after="""
sequence | r_live = Live (r)
sequence | u_live = Live (u)
sequence | c_live = Live (c)
sequence | h_live = Live (h)
""",
)

BACKWARD = Program(
    carried={"d_h_next": "d_h_prev"},
    before="""
sequence | w_ru_T = Transpose <perm = [1, 0]> (w_ru)
sequence | w_c_T = Transpose <perm = [1, 0]> (w_c)
sequence | w_ru_x_T, w_ru_h_T = Split <axis = 1> (w_ru_T, I_H)
sequence | w_c_x_T, w_c_h_T = Split <axis = 1> (w_c_T, I_H)
sequence | h_first = Unsqueeze (h_prev, at_0)
sequence | h_rest = Slice (h, at_0, at_last, at_0)
sequence | h_before = Concat <axis = 0> (h_first, h_rest)                   # h_prev of every step
""",
    step="""
sequence | d_h = Add (h_grad, d_h_next)
         | u_not = Sub (one, u)
         | c_slope = ActivationSlope (c)
         | c_from_h = Mul (u_not, c_slope)                                  # (5), (4)
         | d_c_bar = Mul (d_h, c_from_h)
         | u_slope = RecurrentSlope (u)
         | h_c = Sub (h_before, c)
         | u_from_h = Mul (h_c, u_slope)                                    # (5), (3)
         | d_u_bar = Mul (d_h, u_from_h)
         | r_slope = RecurrentSlope (r)
         | r_from_hr = Mul (h_before, r_slope)                              # (4), (2)
cell     | d_x_hr = Gemm <transB = 1> (d_c_bar, w_c)                        # (4)
cell     | d_x_c, d_hr = Split <axis = 1> (d_x_hr, I_H)
sequence | d_x_c = MatMul (d_c_bar, w_c_x_T)
sequence | d_hr = MatMul (d_c_bar, w_c_h_T)
         | d_r_bar = Mul (d_hr, r_from_hr)
         | d_r_bar_u_bar = Concat <axis = -1> (d_r_bar, d_u_bar)
         | h_through_r = Mul (d_hr, r)                                      # (4)
         | h_through_u = Mul (d_h, u)                                       # (5)
         | h_through = Add (h_through_r, h_through_u)
cell     | d_x_h = Gemm <transB = 1> (d_r_bar_u_bar, w_ru)                  # (1)
cell     | d_x_ru, h_through_ru = Split <axis = 1> (d_x_h, I_H)
cell     | d_h_prev = Add (h_through_ru, h_through)
sequence | d_x_ru = MatMul (d_r_bar_u_bar, w_ru_x_T)
sequence | d_h_prev = Gemm (d_r_bar_u_bar, w_ru_h_T, h_through)
         | d_x = Add (d_x_ru, d_x_c)
""",
    after="""
sequence | d_x_live = Live (d_x)
sequence | d_ru_live = Live (d_r_bar_u_bar)
sequence | d_ru_rows = Flatten <axis = -1> (d_ru_live)                      # a row for every step and row of the batch
         | x_h = Concat <axis = -1> (x, h_before)
sequence | x_h_live = Live (x_h)
sequence | x_h_rows = Flatten <axis = -1> (x_h_live)
         | d_w_ru = Gemm <transA = 1> (x_h_rows, d_ru_rows)                 # (1)
         | d_b_ru = ReduceSum <keepdims = 0> (d_ru_rows, at_0)
sequence | d_c_live = Live (d_c_bar)
sequence | d_c_rows = Flatten <axis = -1> (d_c_live)
         | h_r = Mul (h_before, r)
         | x_hr = Concat <axis = -1> (x, h_r)
sequence | x_hr_live = Live (x_hr)
sequence | x_hr_rows = Flatten <axis = -1> (x_hr_live)
         | d_w_c = Gemm <transA = 1> (x_hr_rows, d_c_rows)                  # (4)
         | d_b_c = ReduceSum <keepdims = 0> (d_c_rows, at_0)
""",
)

NATIVE = """
         | h_first = Unsqueeze (h_prev, at_0)
         | h_one, h_ends = GRU <linear_before_reset = 0> (x, W, R, B, lengths, h_first)
         | h_end = Squeeze (h_ends, at_0)
         | h_native = Squeeze (h_one, at_1)
"""
"""ONNX's own GRU, for layers, which bring the weights in its layout: `onnx_export.layers.weights`."""
