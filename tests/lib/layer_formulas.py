"""The formulas of what only layers compute: dense layers, in float64, and products in integers, in float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blockcell.formulas import Float64, sigmoid
from blockcell.quantization import LARGEST_CODE


def dense(*, x: ArrayLike, w: ArrayLike, b: ArrayLike, activation: str | None = None) -> Float64:
    """Compute what `blockcell.Dense` does for rows (..., I). With `last`, a row without steps is a row of zeros."""
    x, w, b = (np.asarray(array, np.float64) for array in (x, w, b))
    z = x @ w + b
    if activation == "softmax":
        e = np.exp(z - z.max(axis=-1, keepdims=True, initial=-np.inf))
        y: Float64 = e / e.sum(axis=-1, keepdims=True)
        return y
    elementwise: dict[str | None, Callable[[Float64], Float64]] = {
        None: lambda z: z,
        "sigmoid": sigmoid,
        "tanh": np.tanh,
        "relu": lambda z: np.maximum(z, 0),
    }
    return elementwise[activation](z)


def dense_grad(
    *, x: ArrayLike, w: ArrayLike, y: ArrayLike, d_y: ArrayLike, activation: str | None = None
) -> tuple[Float64, Float64, Float64]:
    """Compute the gradients of `dense` to x, w and b."""
    x, w, y, d_y = (np.asarray(array, np.float64) for array in (x, w, y, d_y))
    d_z = {
        None: d_y,
        "sigmoid": d_y * y * (1 - y),
        "tanh": d_y * (1 - y * y),
        "relu": np.where(y > 0, d_y, 0),
        "softmax": y * (d_y - (d_y * y).sum(axis=-1, keepdims=True)),
    }[activation]
    over = [*range(x.ndim - 1)]
    return d_z @ w.T, np.tensordot(x, d_z, (over, over)), d_z.sum(axis=tuple(over))


# ------------------------------------------------------------------------------------------------ products in integers
def row_codes(rows: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Quantize rows [n,k] as a layer quantized to int8 does before products: codes [n,k] and a scale for each row.

    Each operation is rounded to float32."""
    v = np.asarray(rows, dtype=np.float32)
    with np.errstate(under="ignore"):
        largest = np.abs(v).max(axis=1, initial=0)
        scale = np.maximum(largest / np.float32(LARGEST_CODE), np.float32(2.0**-126))
        finite = np.isfinite(largest)
        codes = np.rint(np.where(finite[:, None], v, 0) / np.where(finite, scale, 1)[:, None])
    return codes.astype(np.int64), np.where(finite, scale, np.float32(np.nan)).astype(np.float32)


def add_product_in_integers(z: ArrayLike, rows: ArrayLike, w: ArrayLike, w_scale: ArrayLike) -> NDArray[np.float32]:
    """Compute ``z + rows @ w`` as such a layer does, from weights w [k,n] in int8 and the scales of their columns."""
    result: NDArray[np.float32] = np.asarray(z, dtype=np.float32)
    w_scale = np.asarray(w_scale, dtype=np.float32)
    codes, scale = row_codes(rows)
    w = np.asarray(w, dtype=np.int64)
    for k in range(0, max(len(w), 1), 65536):  # a sum of so many fits into 32 bits; that of none is 0, and -0 + 0 is 0
        total = (codes[:, k : k + 65536] @ w[k : k + 65536]).astype(np.float32)
        result = result + (scale[:, None] * w_scale) * total
    return result
