"""The graph text of losses: those of `blockcell.loss`, with their gradients.

Mean squared error, over the numbers that count, of which there are n::

    loss = sum of (y - target)^2 / n                                           (1)
    d_y  = (y - target) / (n / 2)                                              (2)

Softmax cross-entropy, over the rows of y that count::

    z      = y - the largest of its row                                        (1)
    others = sum of exp(z), but for the 1 of the largest                       (2)
    loss   = mean of log(1 + others) - z[target]                               (3)
    d_y    = (exp(z) - ((1 + others) at the target, else 0)) / ((1 + others) * rows)   (4)

The 1 of the largest stays apart so that small losses and gradients keep their digits. For the same reason (4) is
-others at a target that is the largest, and log(1 + a) is log(b) * a / (b - 1) with b = 1 + a rounded, which has the
digits of a.

A row of y counts where ``counts`` is true, and ``count`` is the number of such rows. What does not count may be NaN.

`onnx_export.text` says how to read the margin; ``masked`` means that there are rows that do not count, ``full`` that
there are none. `LOSS_GRAPHS` has a row for each loss of `blockcell.loss.LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MEAN_SQUARED_ERROR = """
full     | error = Sub (y, target)
masked   | difference = Sub (y, target)
masked   | error = Where (counts, difference, zero)
         | squares = Mul (error, error)
         | total = ReduceSum <keepdims = 0> (squares)
         | numbers = Mul (count, width)                             # width numbers in a row
         | n = Clip (numbers, one)
         | loss = Div (total, n)                                    # (1)
         | half_n = Div (n, two)
         | d_y = Div (error, half_n)                                # (2)
"""

SOFTMAX_CROSS_ENTROPY = """
         | top = ReduceMax <keepdims = 1> (y, at_last)
         | z = Sub (y, top)                                         # (1)
         | at_top = Equal (z, zero)
         | powers = Exp (z)
         | powers_below = Where (at_top, zero, powers)
         | below = ReduceSum <keepdims = 1> (powers_below, at_last)
         | ones = Where (at_top, one, zero)
         | tops = ReduceSum <keepdims = 1> (ones, at_last)
         | more_tops = Sub (tops, one)                              # where several are the largest
         | others = Add (below, more_tops)                          # (2)
         | whole = Add (others, one)
         | whole_log = Log (whole)
         | kept = Sub (whole, one)
         | nothing_kept = Equal (kept, zero)
         | share = Div (others, kept)
         | log_of_share = Mul (whole_log, share)
         | log = Where (nothing_kept, others, log_of_share)
         | right = Unsqueeze (target, at_last)
         | at_right = Equal (classes, right)
         | z_at_right = Where (at_right, z, zero)
         | z_right = ReduceSum <keepdims = 1> (z_at_right, at_last)
full     | losses = Sub (log, z_right)
masked   | all_losses = Sub (log, z_right)
masked   | losses = Where (counts, all_losses, zero)
         | total = ReduceSum <keepdims = 0> (losses)
         | rows = Clip (count, one)
         | loss = Div (total, rows)                                 # (3)
         | less_whole = Sub (powers, whole)
         | less_others = Neg (others)
         | d_right = Where (at_top, less_others, less_whole)
         | d_z = Where (at_right, d_right, powers)
         | divisor = Mul (whole, rows)
full     | d_y = Div (d_z, divisor)                                 # (4)
masked   | d_all = Div (d_z, divisor)
masked   | d_y = Where (counts, d_all, zero)
"""


@dataclass(frozen=True)
class LossGraph:
    """A loss as a function of ONNX, which the model calls SoftmaxCrossEntropy, say."""

    text: str
    """Reads y, target, count and counts; computes loss and d_y."""
    constants: Callable[[int], Mapping[str, Any]]
    """Returns the constants that the text names, where y has so many numbers in a row."""


LOSS_GRAPHS = {
    "softmax_cross_entropy": LossGraph(SOFTMAX_CROSS_ENTROPY, lambda width: {"classes": np.arange(width)}),
    "mean_squared_error": LossGraph(MEAN_SQUARED_ERROR, lambda width: {"two": 2.0, "width": float(width)}),
}
