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

`onnx_export.text` says how to read the margin; ``float32`` and ``float64`` are what is computed in, ``no_eps``
means that epsilon is 0, when a weight that never had a gradient stays where it is, and ``eps`` that it is not.
`OPTIMIZER_GRAPHS` has a row for each optimizer of `blockcell.optim.OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import factorial, log
from typing import Any

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
eps      | size = Add (v_root, epsilon)
no_eps   | nothing_yet = Equal (v_root, zero)
no_eps   | size = Where (nothing_yet, one, v_root)
         | m_rate = Mul (new_m, rate)
         | change = Div (m_rate, size)
         | new_w = Sub (w, change)                                  # (3)
"""

ADAM_RATE = """
         | new_step = Add (step, int_1)
         | step_32 = Cast <to = 6> (new_step)                       # WebGPU has no int64
float32  | t = Cast <to = 1> (step_32)
float64  | t = Cast <to = 11> (step_32)
float64  | powers = Pow (betas, t)
float64  | corrections = Sub (one, powers)
float32  | y = Mul (t, rates)                                       # rates are -log(betas)
float32  | y_minus = Neg (y)
float32  | powers = Exp (y_minus)
float32  | plainly = Sub (one, powers)
float32  | s_5 = Mul (y, factor_5)
float32  | t_5 = Add (s_5, factor_4)
float32  | s_4 = Mul (y, t_5)
float32  | t_4 = Add (s_4, factor_3)
float32  | s_3 = Mul (y, t_4)
float32  | t_3 = Add (s_3, factor_2)
float32  | s_2 = Mul (y, t_3)
float32  | t_2 = Add (s_2, factor_1)
float32  | s_1 = Mul (y, t_2)
float32  | t_1 = Add (s_1, one)
float32  | series = Mul (y, t_1)
float32  | is_small = Less (y, quarter)
float32  | corrections = Where (is_small, series, plainly)
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
float32  | part = Div (g, unit)
         | squares = ReduceSumSquare <keepdims = 0> (part)
"""
NORM = """
         | total = ReduceSum <keepdims = 0> (every)
         | root = Sqrt (total)
float32  | norm = Mul (root, unit)                                  # (1)
"""
"""Of the sums of all gradients' squares."""

CLIP_SCALE = """
         | above = Clip (norm, max_norm)
         | ratio = Div (max_norm, above)
         | nothing = Sub (norm, norm)                               # NaN where it is not finite
         | scale = Add (ratio, nothing)                             # (2)
"""


@dataclass(frozen=True)
class OptimizerGraph:
    """An optimizer as functions of ONNX, which the model calls AdamUpdate and AdamRate, say.

    onnx.reference takes a function of ONNX's own name, such as Adam, for that operator.
    """

    text: str
    """The update of one weight. It reads w, g, the slots, learning_rate, step and the outputs of `rate_text`, and
    computes new_w and the new slots."""
    slots: tuple[str, ...] = ()
    """What the text calls the slots, in their order in `blockcell.optim.OPTIMIZERS`; the new ones begin with new_."""
    rate_text: str = ""
    """What is computed once for all weights, of learning_rate and step."""
    rate_outputs: tuple[str, ...] = ()
    """The outputs of `rate_text`: where steps are counted, new_step is one."""
    constants: Callable[[Mapping[str, float]], Mapping[str, Any]] = dict
    """Returns the constants that the texts name, for these settings."""
    conditions: Callable[[Mapping[str, float]], tuple[str, ...]] = lambda settings: ()
    """Returns the texts' conditions that hold for these settings, beside the one for the dtype."""


def adam_constants(settings: Mapping[str, float]) -> dict[str, Any]:
    """Return the constants of Adam's texts; factor_k is that of y^k in the series of (1 - exp(-y)) / y."""
    betas = [settings["beta1"], settings["beta2"]]
    return {
        **settings,
        "beta1_rest": 1 - betas[0],
        "beta2_rest": 1 - betas[1],
        "betas": betas,
        "quarter": 0.25,
        "rates": [-log(beta) if beta else 1000.0 for beta in betas],  # exp(-1000) is 0, as a power of beta = 0 is
        **{f"factor_{k}": (-1) ** k / factorial(k + 1) for k in range(1, 6)},
    }


OPTIMIZER_GRAPHS = {
    "sgd": OptimizerGraph(SGD),
    "momentum": OptimizerGraph(MOMENTUM, ("v",)),
    "adam": OptimizerGraph(
        ADAM,
        ("m", "v"),
        ADAM_RATE,
        ("new_step", "rate", "correct2"),
        adam_constants,
        lambda settings: ("eps",) if settings["epsilon"] else ("no_eps",),
    ),
}
