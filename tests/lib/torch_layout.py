"""Calls of the kernels that take weights as PyTorch has them."""

import numpy as np

from blockcell import _kernels, _team
from blockcell.optable import DTYPES

GATES = {"lstm": 4, "gru": 3}
STATES = {"lstm": 2, "gru": 1}
SAVED = {"lstm": 6, "gru": 4}


def run(kind, name, sizes, threads, dtype, arrays):
    """A kernel on so many threads."""
    T, B, inputs, hidden = sizes
    bytes_of_work, planned = _kernels.WORK[f"{kind}_{name}"](T, B, inputs, hidden, max(dtype.itemsize, 4), threads)
    taken = [a.view(np.uint16) if isinstance(a, np.ndarray) and a.dtype == np.float16 else a for a in arrays]
    ready = 1 if planned == 1 else _team.ready(planned)
    work = np.full(bytes_of_work, 0xFF, np.uint8)  # NaN, should anything read what was not written
    _kernels.KERNELS[f"{kind}_{name}"][DTYPES.index(dtype)](*taken, work, threads, ready)


def weights_of(g, kind, inputs, hidden, dtype):
    """PyTorch's w_ih and w_hh, and the layer's weights that are equal to them, with biases."""
    rows, bound = GATES[kind] * hidden, 1 / np.sqrt(hidden)
    shapes = (rows, inputs), (rows, hidden), (rows,), (rows,)
    w_ih, w_hh, b_ih, b_hh = (g.uniform(-bound, bound, shape).astype(dtype) for shape in shapes)
    w = np.concatenate([w_ih.T, w_hh.T])
    if kind == "lstm":
        return w_ih, w_hh, {"w": w, "b": b_ih + b_hh}
    ru, c = slice(2 * hidden), slice(2 * hidden, None)
    biases = {"b_ru": (b_ih + b_hh)[ru], "b_c": b_ih[c], "b_hc": b_hh[c]}
    return w_ih, w_hh, {"w_ru": w[:, ru], "w_c": w[:, c]} | biases
