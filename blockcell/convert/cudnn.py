"""Weights from cuDNN's flat buffer, as TensorFlow and MXNet hold it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..activations import Activation
from ..layers import Bidirectional, Layer, Stack
from ..optable import Array
from .shared import GATE_COUNTS, ConversionError, make_cell, read_arrays


def from_cudnn(
    buffer: Any,
    kind: str,
    *,
    input_size: int,
    layers: int = 1,
    directions: int = 1,
    activation: Activation = "tanh",
) -> Layer:
    """Convert cuDNN's flat buffer of weights.

    .. code-block:: python

        layer = convert.from_cudnn(variables["cudnn_lstm/opaque_kernel"], "LSTM", input_size=40, layers=2)

    Parameters
    ----------
    buffer : array
        All weights of all layers and then all their biases: an ``opaque_kernel`` of TensorFlow's ``CudnnLSTM`` and
        ``CudnnGRU``, or an ``rnn_param`` of MXNet's ``RNN``.
    kind : {"LSTM", "GRU", "RNN"}
        The cell. cuDNN's GRU is the one with ``reset_after=True``.
    input_size : int
        The number of inputs of the first layer.
    layers, directions : int
        Their numbers; 2 directions become a `Bidirectional`. hidden_size follows from the length of the buffer.
    activation : str or tuple
        Of an RNN: "tanh" or "relu". LSTM and GRU have tanh and sigmoid.

    Returns
    -------
    LSTM, GRU, RNN, Bidirectional or Stack
        A `Stack` of several layers.

    Raises
    ------
    TypeError
        The buffer is not float32, float64 or float16.
    ConversionError
        An activation other than tanh and sigmoid is passed for an LSTM or a GRU.
    ValueError
        No hidden_size gives a buffer of this length.
    """
    caller = "from_cudnn"
    if kind not in GATE_COUNTS:
        raise ValueError(f"{caller}: kind is {kind!r}; expected one of LSTM, GRU, RNN")
    for name, value, least in (("input_size", input_size, 0), ("layers", layers, 1), ("directions", directions, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{caller}: {name} is {value!r}; expected a whole number from {least} up")
    if directions > 2:
        raise ValueError(f"{caller}: directions is {directions}; expected 1 or 2")
    if kind != "RNN" and activation != "tanh":
        raise ConversionError(f"{caller}: activation is {activation!r}; cuDNN's {kind} has tanh")
    flat = read_arrays(caller, {"buffer": buffer})["buffer"].ravel()
    hidden = _hidden_size(caller, flat.size, kind, int(input_size), int(layers), int(directions))
    rows = GATE_COUNTS[kind] * hidden  # of the matrices, which have a row for each number of each gate
    start = 0

    def read_next(*shape: int) -> Array:
        nonlocal start
        array = flat[start : start + math.prod(shape)].reshape(shape)
        start += array.size
        return array

    places = [(layer, direction) for layer in range(layers) for direction in range(directions)]
    weights = [
        (read_next(rows, directions * hidden if layer else input_size), read_next(rows, hidden)) for layer, _ in places
    ]
    biases = [(read_next(rows), read_next(rows)) for _ in places]
    by_kind: dict[str, dict[str, Any]] = {"RNN": {"activation": activation}, "GRU": {"reset_after": True}}
    options = by_kind.get(kind, {})
    cells = [
        make_cell(f"PyTorch {kind}", kernel.T, recurrent.T, bias.copy(), recurrent_bias, **options)  # the same order
        for (kernel, recurrent), (bias, recurrent_bias) in zip(weights, biases, strict=True)
    ]
    if directions == 2:
        both: list[Layer] = [Bidirectional(*cells[k : k + 2]) for k in range(0, len(cells), 2)]
        return both[0] if layers == 1 else Stack(both)
    return cells[0] if layers == 1 else Stack(cells)


def _hidden_size(caller: str, size: int, kind: str, inputs: int, layers: int, directions: int) -> int:
    """Return the H with which all layers have so many weights: the root of a H^2 + b H = size / (gates D)."""
    above = layers - 1
    a, b = 1 + above * (directions + 1), inputs + 2 + 2 * above
    weights_of_gate, remainder = divmod(size, GATE_COUNTS[kind] * directions)
    hidden = (math.isqrt(b * b + 4 * a * weights_of_gate) - b) // (2 * a)
    if remainder or not hidden or a * hidden * hidden + b * hidden != weights_of_gate:
        raise ValueError(
            f"{caller}: the buffer has {size} numbers, and no hidden_size gives so many with kind={kind!r},"
            f" input_size={inputs}, layers={layers}, directions={directions}: {hidden} gives"
            f" {GATE_COUNTS[kind] * directions * (a * hidden * hidden + b * hidden)}, {hidden + 1} gives"
            f" {GATE_COUNTS[kind] * directions * (a * (hidden + 1) ** 2 + b * (hidden + 1))}"
        )
    return hidden
