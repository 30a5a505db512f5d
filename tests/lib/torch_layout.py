"""Calls of the kernels that take weights as PyTorch has them, on arrays of numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockcell import _kernels
from blockcell._tensors import TensorBackward, TensorForward
from blockcell.activations import numbers
from blockcell.optable import DTYPES

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
SUMMED = {"lstm": 4, "gru": 2, "rnn": 1}
STATES = {"lstm": ("h", "c"), "gru": ("h",), "rnn": ("h",)}
SAVED = {"lstm": 6, "gru": 4, "rnn": 0}


class Lent:
    """An array that answers as a tensor of PyTorch's does whose storage ends with it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype, self.shape, self.begin = array.dtype, array.shape, array.__array_interface__["data"][0]
        self.size = np.lib.array_utils.byte_bounds(array)[1] - self.begin if array.size else 0

    def data_ptr(self) -> int:
        return self.begin

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def contiguous(self) -> Lent:
        return Lent(np.ascontiguousarray(self.array))

    def clone(self) -> Lent:
        return Lent(self.array.copy())

    def zero_(self) -> None:
        self.array[...] = 0

    def is_neg(self) -> bool:
        return False

    def resolve_neg(self) -> Lent:
        return self

    def untyped_storage(self) -> Lent:
        return self

    def resizable(self) -> bool:
        return False

    def nbytes(self) -> int:
        return self.size


def pass_of(kind, sizes, dtype, directions=1, bias=True, threads=1, back=False, projection=0, single=False):
    """A `TensorForward` or, `back`, a `TensorBackward`, as `blockcell.torch` makes it for a layer or a single step."""
    T, B, I, H = sizes  # noqa: E741
    planned, activations = None, (numbers("tanh"), numbers("sigmoid"))
    if T * B * H:
        layer = "gru_reset_after" if kind == "gru" else kind
        lstm = _kernels.LSTMOptions(P=projection, ifco=True)
        options = {"lstm": lstm, "gru": activations, "rnn": activations[:1]}[kind]
        task = "backward" if back else "forward"
        planned = _kernels.plan_layer(layer, task, tuple(sizes), threads, DTYPES.index(dtype), 0, True, options)
    P, rows = projection or H, GATES[kind] * H
    shapes = {"w_ih": (rows, I), "w_hh": (rows, P)} | (dict.fromkeys(("b_ih", "b_hh"), (rows,)) if bias else {})
    shapes |= {"w_hr": (P, H)} if projection else {}
    tensors, cell = (dtype, np.dtype(np.uint8), dtype.itemsize), (SUMMED[kind], STATES[kind], SAVED[kind], single)
    kernel_class = TensorBackward if back else TensorForward
    return kernel_class(planned, (*sizes, P), (directions, bias, projection > 0), shapes, *tensors, *cell, threads)


def lent(value):
    """What stands for tensors."""
    return [*map(lent, value)] if isinstance(value, list) else None if value is None else Lent(value)


def forward(kind, sizes, threads, x, weights, states, step_mask, outputs, directions=1, projection=0, reset_states=()):
    """The forward pass over arrays; the outputs are filled."""
    bias = len(weights) > 3 * directions
    compute = pass_of(kind, sizes, x.dtype, directions, bias, threads, projection=projection)
    compute(*map(lent, (x, weights, states, step_mask, outputs, [*reset_states])))


def backward(
    kind,
    sizes,
    threads,
    y,
    tape,
    matrices,
    grads,
    x,
    states,
    step_mask,
    needs_x,
    outputs,
    directions=1,
    projection=0,
    reset_states=(),
    needs_reset_states=False,
):
    """The backward pass over arrays, likewise."""
    of_states = len(states) + needs_reset_states * len(reset_states)
    bias = x is None or len(outputs) - needs_x - of_states > len(matrices)
    compute = pass_of(kind, sizes, y.dtype, directions, bias, threads, True, projection)
    given = map(lent, (y, tape, matrices, grads, x, states, step_mask))
    compute(*given, needs_x, lent(outputs), lent([*reset_states]), needs_reset_states)


def weights_of(g, kind, inputs, hidden, dtype, bias=True, projection=0):
    """PyTorch's weights of a direction, and the layer's that are equal to them."""
    rows, bound = GATES[kind] * hidden, 1 / np.sqrt(hidden)
    shapes = (rows, inputs), (rows, projection or hidden), (rows,), (rows,)
    w_ih, w_hh, b_ih, b_hh = weights = [g.uniform(-bound, bound, shape).astype(dtype) for shape in shapes]
    if not bias:
        weights, b_ih, b_hh = weights[:2], np.zeros_like(b_ih), np.zeros_like(b_hh)
    w = np.concatenate([w_ih.T, w_hh.T])
    if projection:
        w_hr = g.uniform(-bound, bound, (projection, hidden)).astype(dtype)
        return [*weights, w_hr], {"w": w, "b": b_ih + b_hh, "w_p": w_hr.T}
    if kind != "gru":
        return weights, {"w": w, "b": b_ih + b_hh}
    ru, c = slice(2 * hidden), slice(2 * hidden, None)
    biases = {"b_ru": (b_ih + b_hh)[ru], "b_c": b_ih[c], "b_hc": b_hh[c]}
    return weights, {"w_ru": w[:, ru], "w_c": w[:, c]} | biases
