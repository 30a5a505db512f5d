"""The orders in which weights have the gates of a cell, here and in other packages, and `reorder`.

Letters stand for the gates: input i, forget f, output o, reset r, update u; and for the candidate, c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDERS = {
    "LSTM": "icfo",  # the default of blockcell's layer, and of TensorFlow's BlockLSTM
    "V2 LSTM": "ifco",  # TensorFlow's BlockLSTMV2
    "coupled LSTM": "cfo",
    "GRU": "ruc",
    "RNN": "c",
    "TF1 LSTM": "icfo",
    "Keras LSTM": "ifco",
    "Keras GRU": "urc",  # Keras writes z for u and h for c
    "Keras RNN": "c",
    "PyTorch LSTM": "ifco",
    "PyTorch GRU": "ruc",  # PyTorch writes z for u and n for c
    "PyTorch RNN": "c",
    "ONNX LSTM": "iofc",
    "ONNX coupled LSTM": "foc",  # once i has become f
    "ONNX GRU": "urc",  # ONNX writes z for u and h for c
    "ONNX RNN": "c",
    "peepholes": "ifo",
    "ONNX peepholes": "iof",
}
"""The orders, by layout: whose weights these are, and of which kind of cell."""


def gate_names(order: str) -> tuple[str, ...]:
    """Return what the arrays of an LSTM's gates, or of a GRU's, are called: the candidate of an LSTM is ci."""
    return tuple("ci" if gate == "c" and "f" in order else gate for gate in order)


GATE_ORDERS = {order: gate_names(order) for order in (ORDERS["LSTM"], ORDERS["V2 LSTM"])}
"""The names of an LSTM's gates, by the orders that layers have."""

COUPLED_GATES = gate_names(ORDERS["coupled LSTM"])
"""The gates of an LSTM whose input gate is 1 - f."""


def reorder(weights: NDArray[Any], old_order: Sequence[str], new_order: Sequence[str], axis: int = -1) -> NDArray[Any]:
    """Put the gates along an axis into another order, which may leave some out: ``reorder(b, "iofc", "icfo")``."""
    parts = dict(zip(old_order, np.split(weights, len(old_order), axis), strict=True))
    return np.concatenate([parts[gate] for gate in new_order], axis)


def gate_slice(order: Sequence[str], gate: str, hidden: int) -> slice:
    """Return where an array, such as a bias, has the numbers of a gate with so many hidden units."""
    start = order.index(gate) * hidden
    return slice(start, start + hidden)
