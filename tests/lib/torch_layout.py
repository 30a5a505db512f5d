"""Calls of the kernels that take weights as PyTorch has them, on arrays of numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockcell import _kernels, _team
from blockcell._tensors import TensorPass
from blockcell.optable import DTYPES

GATES = {"lstm": 4, "gru": 3}
SUMMED = {"lstm": 4, "gru": 2}
STATES = {"lstm": ("h", "c"), "gru": ("h",)}
SAVED = {"lstm": 6, "gru": 4}


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


def pass_of(kind, sizes, dtype, directions=1, bias=True, threads=1):
    """As `blockcell.torch` makes it."""
    T, B, _, H = sizes
    number, found = DTYPES.index(dtype), None
    array = np.empty(0, np.uint16 if dtype == np.float16 else dtype)
    if T * B * H:
        plan = _kernels.KERNELS[f"{kind}_torch"][number](array, *sizes, threads)
        found = (*plan, *_kernels.WORK[f"{kind}_torch"](*sizes, max(dtype.itemsize, 4), threads))
    counts = GATES[kind], SUMMED[kind], STATES[kind], SAVED[kind], threads
    return TensorPass(found, dtype, np.dtype(np.uint8), dtype.itemsize, sizes, directions, bias, *counts)


def forward(kind, sizes, threads, x, weights, states, marks, outputs, directions=1):
    """The forward pass over arrays; the outputs are filled."""
    bias = len(weights) == 4 * directions
    lent = [[Lent(array) for array in arrays] for arrays in (weights, states, outputs)]
    compute = pass_of(kind, sizes, x.dtype, directions, bias, threads)
    compute(Lent(x), *lent[:2], None if marks is None else Lent(marks), lent[2])


def backward(kind, sizes, threads, dtype, arrays):
    """The kernel of the gradients on so many threads."""
    bytes_of_work, planned = _kernels.WORK[f"{kind}_torch_grad"](*sizes, max(dtype.itemsize, 4), threads)
    taken = [a.view(np.uint16) if isinstance(a, np.ndarray) and a.dtype == np.float16 else a for a in arrays]
    ready = 1 if planned == 1 else _team.ready(planned)
    work = np.full(bytes_of_work, 0xFF, np.uint8)  # NaN, should anything read what was not written
    _kernels.KERNELS[f"{kind}_torch_grad"][DTYPES.index(dtype)](*taken, work, threads, ready)


def weights_of(g, kind, inputs, hidden, dtype, bias=True):
    """PyTorch's weights of a direction, and the layer's that are equal to them."""
    rows, bound = GATES[kind] * hidden, 1 / np.sqrt(hidden)
    shapes = (rows, inputs), (rows, hidden), (rows,), (rows,)
    w_ih, w_hh, b_ih, b_hh = weights = [g.uniform(-bound, bound, shape).astype(dtype) for shape in shapes]
    if not bias:
        weights, b_ih, b_hh = weights[:2], np.zeros_like(b_ih), np.zeros_like(b_hh)
    w = np.concatenate([w_ih.T, w_hh.T])
    if kind == "lstm":
        return weights, {"w": w, "b": b_ih + b_hh}
    ru, c = slice(2 * hidden), slice(2 * hidden, None)
    biases = {"b_ru": (b_ih + b_hh)[ru], "b_c": b_ih[c], "b_hc": b_hh[c]}
    return weights, {"w_ru": w[:, ru], "w_c": w[:, c]} | biases
