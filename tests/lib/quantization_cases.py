"""Weights and rows of activations that are hard to quantize."""

from __future__ import annotations

import numpy as np

F32 = np.float32
LARGEST = {"float16": 65504.0, "int8": float(np.finfo(F32).max)}
TINY, LEAST, MOST = 2.0**-149, 2.0**-126, LARGEST["int8"]
ROWS = {  # whose scales and codes, for products in integers, are at ends of what there is
    "zeros": [0.0, 0, 0, 0, 0],
    "negative zeros": [-0.0, -0.0, -0.0, -0.0, -0.0],
    "subnormal": [TINY, 1e-39, -1e-40, 0, -TINY],
    "least scale": [LEAST, -LEAST, 100 * LEAST, LEAST / 2, -3 * LEAST],
    "huge": [3e38, -3.4e38, 1e38, 2, 0],
    "largest": [MOST, -MOST, MOST, MOST, MOST],
    "huge and tiny": [1e38, 1e-40, -1, 0, -0.0],
    "infinity": [np.inf, 1, -1, 0, 2],
    "infinities": [1, np.inf, -np.inf, np.inf, 0],
    "NaN": [1, -1, 0, 2, np.nan],
}


def numbers(g: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Finite ones that can be quantized so, of all exponents, of a few in each column, and some that lie halfway."""
    bits = g.integers(0, 2**32, shape, dtype=np.uint32)
    column = g.integers(0, 2**32, (1, shape[1]), dtype=np.uint32)
    near = g.integers(0, 9, shape).astype(np.uint32) << 23
    bits = np.where(g.random((1, shape[1])) < 0.7, (bits & 0x807FFFFF) | (column & 0x7F800000) - near, bits)
    bits = np.where(g.random(shape) < 0.3, bits & 0xFFFF8000, bits)  # a few bits alone
    bits = np.where(g.random(shape) < 0.2, bits & 0xFFFFF000, bits)  # halfway in float16
    bits = np.where(g.random((1, shape[1])) < 0.2, bits & 0x81FFFFFF, bits)  # columns of subnormal ones
    array = bits.astype(np.uint32).view(F32)
    array = np.where(np.isfinite(array), array, 0)
    if name == "float16":  # as many of them in its range
        array = np.where(g.random(shape) < 0.8, np.ldexp(np.frexp(array)[0], g.integers(-26, 17, shape)), array)
    return np.clip(array, -LARGEST[name], LARGEST[name]).astype(F32)
