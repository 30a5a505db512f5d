"""The LSTM's graph text: one step forward, one step backward, for cells and sequences.

Forward, as in `blockcell.formulas`, where sigmoid and tanh stand for a layer's activations::

    bar = [x, h_prev] @ w + b                             (1)   the pre-activations of the four gates
    i   = sigmoid(i_bar [+ cs_prev * wci])                (2)
    f   = sigmoid(f_bar + forget_bias [+ cs_prev * wcf])  (3)
    ci  = tanh(ci_bar)                                    (4)
    cs  = i * ci + f * cs_prev                            (5)
    cs  = clip(cs, -cell_clip, cell_clip)                 (6)
    co  = tanh(cs)                                        (7)
    o   = sigmoid(o_bar [+ cs * wco])                     (8)
    h   = o * co                                          (9)

A coupled layer has no gate i, but i = 1 - f (2). One with a projection has the output::

    m   = o * co                                          (9)
    h   = clip(m @ w_p, -proj_clip, proj_clip)            (10)

Backward, from (9) to (1); every ``a_from_b`` is what the gradient to a has of that to b, and needs no other step::

    d_o_bar  = h_grad  * o_from_h     o_from_h   = co * o * (1 - o)            (9), (8)
    d_cs     = h_grad  * cs_from_h    cs_from_h  = o * (1 - co * co) [+ o_from_h * wco]
             + cs_grad                                                         (9), (7), (8)
    d_i_bar  = d_cs    * i_from_cs    i_from_cs  = ci * i * (1 - i)            (5), (2)
    d_ci_bar = d_cs    * ci_from_cs   ci_from_cs = i * (1 - ci * ci)           (5), (4)
    d_f_bar  = d_cs    * f_from_cs    f_from_cs  = cs_prev * f * (1 - f)       (5), (3)
    cs_prev_grad = d_cs * cs_from_cs  cs_from_cs = f [+ i_from_cs * wci + f_from_cs * wcf]
    x_grad, h_prev_grad = d_bars @ w^T                                         (1)

Where gates are coupled, f_from_cs = (cs_prev - ci) * f * (1 - f), as (5) reads f twice. With a projection the gradient
to h comes to m first, and d_m stands for h_grad above::

    d_p = h_grad where |h| < proj_clip, else 0                                 (10)
    d_m = d_p @ w_p^T                                                          (10)

`onnx_export.text` says how to read the margin and the brackets, `onnx_export.activations` what Activation, Recurrent
and their slopes are.
"""

from ..text import Program

FORWARD = Program(
    carried={"cs_prev": "cs", "h_prev": "h"},
    before="""
split     | w_x, w_h = Split <axis = 0> (w, I_H)                             # the rows for x, those for h_prev
bias_b    | [b_i, b_ci, b_f, b_o] = Split <axis = 0> (b, gates)
bias_b    | b_f_biased = Add (b_f, forget_bias)
bias_b    | b_all = Concat <axis = 0> ([b_i, b_ci, b_f_biased, b_o])
""",
    step="""
fused     | x_h = Concat <axis = -1> (x, h_prev)
fused     | bar = Gemm (x_h, w, b_all)                                       # (1)
sequence  | x_rows = Flatten <axis = -1> (x)
split     | x_w = Gemm (x_rows, w_x, b_all)                                  # (1) for all steps at once
sequence  | x_bar = Reshape <allowzero = 1> (x_w, T_B_gates)
split     | bar = Gemm (h_prev, w_h, x_bar)
          | [i_bar, ci_bar, f_bar, o_bar] = Split <axis = -1> (bar, gates)
i_peep    | i_see = Mul (cs_prev, wci)
i_peep    | i_sum = Add (i_bar, i_see)
uncoupled | i = Recurrent (i_sum)                                            # (2)
peephole  | f_see = Mul (cs_prev, wcf)
bias_f    | f_biased = Add (f_bar, forget_bias)                              # b and the products are added first
peephole  | f_sum = Add (f_biased, f_see)
          | f = Recurrent (f_sum)                                            # (3)
coupled   | i = Sub (one, f)                                                 # (2)
          | ci = Activation (ci_bar)                                         # (4)
          | i_ci = Mul (i, ci)
          | f_cs = Mul (f, cs_prev)
          | cs_sum = Add (i_ci, f_cs)                                        # (5)
clip      | cs_new = Clip (cs_sum, clip_low, clip_high)                      # (6)
          | co = Activation (cs_new)                                         # (7)
peephole  | o_see = Mul (cs_new, wco)
peephole  | o_sum = Add (o_bar, o_see)
          | o = Recurrent (o_sum)                                            # (8)
no_proj   | h_new = Mul (o, co)                                              # (9)
proj      | m = Mul (o, co)                                                  # (9)
proj      | m_p = Gemm (m, w_p)                                              # (10)
p_clip    | h_new = Clip (m_p, p_low, p_high)                                # (10)
float16   | cs_half = Cast <to = 10> (cs_new)                                # the next step sees the states in half
float16   | cs = Cast <to = 1> (cs_half)
float16   | h_half = Cast <to = 10> (h_new)
float16   | h = Cast <to = 1> (h_half)
""",
    after="""
sequence  | i_live = Live (i)
sequence  | cs_live = Live (cs)
sequence  | f_live = Live (f)
sequence  | o_live = Live (o)
sequence  | ci_live = Live (ci)
sequence  | co_live = Live (co)
sequence  | h_live = Mul (o_live, co_live)                                   # (9) again: cheaper than keeping h
""",
)

BACKWARD = Program(
    carried={"cs_grad_next": "cs_prev_grad", "h_grad_next": "h_prev_grad"},
    before="""
proj      | w_p_T = Transpose <perm = [1, 0]> (w_p)
sequence  | w_T = Transpose <perm = [1, 0]> (w)
sequence  | w_x_T, w_h_T = Split <axis = 1> (w_T, I_H)
sequence  | cs_first = Unsqueeze (cs_prev, at_0)
sequence  | cs_rest = Slice (cs, at_0, at_last, at_0)
sequence  | cs_before = Concat <axis = 0> (cs_first, cs_rest)                # cs_prev of every step
sequence  | h_first = Unsqueeze (h_prev, at_0)
sequence  | h_rest = Slice (h, at_0, at_last, at_0)
sequence  | h_before = Concat <axis = 0> (h_first, h_rest)
""",
    step="""
sequence  | d_h = Add (h_grad, h_grad_next)
cs_grad   | d_cs_here = Add (cs_grad, cs_grad_next)
p_clip    | h_size = Abs (h)
p_clip    | h_inside = Less (h_size, p_high)
p_clip    | d_p = Where (h_inside, d_h, zero)                                # (10)
proj      | d_m = Gemm (d_p, w_p_T)                                          # (10)
          | o_slope = RecurrentSlope (o)
          | o_from_h = Mul (co, o_slope)                                     # (9), (8)
          | co_slope = ActivationSlope (co)
          | cs_through_co = Mul (o, co_slope)                                # (9), (7)
peephole  | cs_through_o = Mul (o_from_h, wco)                               # (8)
peephole  | cs_from_h = Add (cs_through_co, cs_through_o)
          | d_cs_h = Mul (d_m, cs_from_h)
          | d_cs = Add (d_cs_here, d_cs_h)
uncoupled | i_slope = RecurrentSlope (i)
uncoupled | i_from_cs = Mul (ci, i_slope)                                    # (5), (2)
          | ci_slope = ActivationSlope (ci)
          | ci_from_cs = Mul (i, ci_slope)                                   # (5), (4)
          | f_slope = RecurrentSlope (f)
coupled   | cs_less_ci = Sub (cs_before, ci)                                 # (5), (2)
          | f_from_cs = Mul (cs_less_ci, f_slope)                            # (5), (3)
          | bars_from = Concat <axis = -1> ([i_from_cs, ci_from_cs, f_from_cs, o_from_h])
uncoupled | d_from = Concat <axis = -1> (d_cs, d_cs, d_cs, d_m)
coupled   | d_from = Concat <axis = -1> (d_cs, d_cs, d_m)
          | d_bars = Mul (d_from, bars_from)
i_peep    | cs_through_i = Mul (i_from_cs, wci)                              # (2)
peephole  | cs_through_f = Mul (f_from_cs, wcf)                              # (3)
i_peep    | cs_through_f_i = Add (f, cs_through_i)
peephole  | cs_from_cs = Add (cs_through_f_i, cs_through_f)
          | cs_prev_grad = Mul (d_cs, cs_from_cs)                            # (5)
cell      | d_x_h = Gemm <transB = 1> (d_bars, w)                            # (1)
cell      | x_grad, h_prev_grad = Split <axis = 1> (d_x_h, I_H)
sequence  | x_grad = MatMul (d_bars, w_x_T)
sequence  | h_prev_grad = MatMul (d_bars, w_h_T)
""",
    after="""
sequence  | x_grad_live = Live (x_grad)
sequence  | d_bars_live = Live (d_bars)
sequence  | d_rows = Flatten <axis = -1> (d_bars_live)                       # a row for every step and row of the batch
          | x_h = Concat <axis = -1> (x, h_before)
sequence  | x_h_live = Live (x_h)
sequence  | x_h_rows = Flatten <axis = -1> (x_h_live)
          | w_grad = Gemm <transA = 1> (x_h_rows, d_rows)                    # (1)
          | b_grad = ReduceSum <keepdims = 0> (d_rows, at_0)
          | [d_i_bar, d_ci_bar, d_f_bar, d_o_bar] = Split <axis = -1> (d_bars, gates)
          | d_wci = Mul (d_i_bar, cs_before)                                 # (2)
sequence  | d_wci_live = Live (d_wci)
sequence  | d_wci_rows = Flatten <axis = -1> (d_wci_live)
          | wci_grad = ReduceSum <keepdims = 0> (d_wci_rows, at_0)
          | d_wcf = Mul (d_f_bar, cs_before)                                 # (3)
sequence  | d_wcf_live = Live (d_wcf)
sequence  | d_wcf_rows = Flatten <axis = -1> (d_wcf_live)
          | wcf_grad = ReduceSum <keepdims = 0> (d_wcf_rows, at_0)
          | d_wco = Mul (d_o_bar, cs)                                        # (8)
sequence  | d_wco_live = Live (d_wco)
sequence  | d_wco_rows = Flatten <axis = -1> (d_wco_live)
          | wco_grad = ReduceSum <keepdims = 0> (d_wco_rows, at_0)
proj      | m = Mul (o, co)                                                  # (9)
proj      | m_live = Live (m)
proj      | m_rows = Flatten <axis = -1> (m_live)
proj      | d_p_live = Live (d_p)
proj      | d_p_rows = Flatten <axis = -1> (d_p_live)
proj      | w_p_grad = Gemm <transA = 1> (m_rows, d_p_rows)                  # (10)
""",
)

NATIVE = """
          | cs_first = Unsqueeze (cs_prev, at_0)
          | h_first = Unsqueeze (h_prev, at_0)
peephole  | h_one, h_ends, cs_ends = LSTM (x, W, R, B, lengths, h_first, cs_first, P)
no_peep   | h_one, h_ends, cs_ends = LSTM (x, W, R, B, lengths, h_first, cs_first)
          | h_end = Squeeze (h_ends, at_0)
          | cs_end = Squeeze (cs_ends, at_0)
          | h_native = Squeeze (h_one, at_1)
"""
"""ONNX's own LSTM, for layers, which bring the weights in its layout: `onnx_export.layers.weights`."""
