"""The graph text of optimizers: those of `blockcell.optim`, for one weight, and the common norm of all gradients.

Each optimizer has the equations of its namesake: sgd::

    w = w - learning_rate * g                                                  (1)

momentum::

    v = momentum * v + g                                                       (1)
    w = w - learning_rate * v                                                  (2)

adam, with t the number of this step::

    m = beta1 * m + (1 - beta1) * g                                            (1)
    v = beta2 * v + (1 - beta2) * g * g                                        (2)
    w = w - rate * m / (sqrt(v) + least)                                       (3)
    rate = learning_rate * sqrt(correct2) / correct1, least = epsilon * sqrt(correct2)
    correct1 = 1 - beta1^t, correct2 = 1 - beta2^t

In float32, 1 - beta^t would lose its digits where beta^t is almost 1. With y = -t log(beta) it is 1 - exp(-y), and for
y below 1/4 the series y * (1 - y/2! + y^2/3! - ... - y^5/6!), which is right to 5e-8 there.

Clipping by the global norm, which is in float32 counted in largest entries, so that no square overflows::

    norm = sqrt(sum of the squares of all entries)                             (1)
    g    = g * scale, scale = max_norm / max(norm, max_norm)                   (2)   NaN where the norm is not finite

`onnx_export.text` says how to read the margin; ``single`` and ``double`` mean float32 and float64, ``even`` that
epsilon is 0, when a weight that never had a gradient stays where it is, and ``uneven`` that it is not.
"""

SGD = """
         | change = Mul (g, learning_rate)
         | new_w = Sub (w, change)                                  # (1)
"""

MOMENTUM = """
         | v_kept = Mul (v, momentum)
         | new_v = Add (v_kept, g)                                  # (1)
         | change = Mul (new_v, learning_rate)
         | new_w = Sub (w, change)                                  # (2)
"""

ADAM = """
         | m_kept = Mul (m, beta1)
         | m_taken = Mul (g, beta1_rest)
         | new_m = Add (m_kept, m_taken)                            # (1)
         | v_kept = Mul (v, beta2)
         | g_taken = Mul (g, beta2_rest)
         | v_taken = Mul (g_taken, g)
         | new_v = Add (v_kept, v_taken)                            # (2)
         | v_mean = Div (new_v, correct2)
         | v_root = Sqrt (v_mean)
uneven   | size = Add (v_root, epsilon)
even     | nothing_yet = Equal (v_root, zero)
even     | size = Where (nothing_yet, one, v_root)
         | m_rate = Mul (new_m, rate)
         | change = Div (m_rate, size)
         | new_w = Sub (w, change)                                  # (3)
"""

ADAM_RATE = """
         | new_step = Add (step, int_1)
         | step_32 = Cast <to = 6> (new_step)                       # WebGPU has no int64
single   | t = Cast <to = 1> (step_32)
double   | t = Cast <to = 11> (step_32)
double   | powers = Pow (betas, t)
double   | corrections = Sub (one, powers)
single   | y = Mul (t, rates)                                       # rates are -log(betas)
single   | y_minus = Neg (y)
single   | powers = Exp (y_minus)
single   | plainly = Sub (one, powers)
single   | s_5 = Mul (y, factor_5)
single   | t_5 = Add (s_5, factor_4)
single   | s_4 = Mul (y, t_5)
single   | t_4 = Add (s_4, factor_3)
single   | s_3 = Mul (y, t_4)
single   | t_3 = Add (s_3, factor_2)
single   | s_2 = Mul (y, t_3)
single   | t_2 = Add (s_2, factor_1)
single   | s_1 = Mul (y, t_2)
single   | t_1 = Add (s_1, one)
single   | series = Mul (y, t_1)
single   | is_small = Less (y, quarter)
single   | corrections = Where (is_small, series, plainly)
         | correct1, correct2 = Split <axis = 0> (corrections, int_1_1)
         | rate = Div (learning_rate, correct1)
"""

LARGEST = """
         | sizes = Abs (g)
         | largest = ReduceMax <keepdims = 0> (sizes)
"""
UNIT = """
         | largest = ReduceMax <keepdims = 0> (every)
         | unit = Clip (largest, least, most)
"""
"""Of the largest entries of all gradients."""

SQUARES = """
single   | part = Div (g, unit)
         | squares = ReduceSumSquare <keepdims = 0> (part)
"""
NORM = """
         | total = ReduceSum <keepdims = 0> (every)
         | root = Sqrt (total)
single   | norm = Mul (root, unit)                                  # (1)
"""
"""Of the sums of all gradients' squares."""

CLIP_SCALE = """
         | above = Clip (norm, max_norm)
         | ratio = Div (max_norm, above)
         | nothing = Sub (norm, norm)                               # NaN where it is not finite
         | scale = Add (ratio, nothing)                             # (2)
"""
