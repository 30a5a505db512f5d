"""Reads the arguments of a layer's calls: arrays, lengths, resets, and the parts of a state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .._read import ArgumentReader, as_kernels_take, is_array, short
from ..optable import DTYPES, Array


def read_array(
    reader: ArgumentReader,
    name: str,
    value: Any,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    expected: str,
    keep: bool = False,
) -> Array:
    """An array that the kernels can read, always a copy if `keep`. A None in `shape` allows any size."""
    array = reader.array(name, value)
    if type(value) is not np.ndarray or array.dtype != dtype:
        reader.dtype_number([(name, value, array)], DTYPES.index(dtype), "the layer")
    if not _fits(array.shape, shape):
        raise ValueError(f"{reader.caller}: {name} has shape {array.shape}; expected {expected}")
    return np.array(array, dtype, order="C", copy=True) if keep else as_kernels_take(array, dtype)


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(found) != len(shape):
        return False
    for n, expected in zip(found, shape, strict=True):
        if n != expected and expected is not None:
            return False
    return True


def read_lengths(reader: ArgumentReader, value: Any, T: int, B: int, source: str = "x") -> Array | None:
    """`source` is the argument that T and B are from."""
    if value is None:
        return None
    lengths = reader.array("lengths", value)
    if lengths.dtype.kind not in "iu" and (lengths.size or is_array(value)):
        raise TypeError(f"{reader.caller}: lengths has dtype {lengths.dtype}; expected integers")
    if lengths.shape != (B,):
        raise ValueError(
            f"{reader.caller}: lengths has shape {lengths.shape}; expected (B,) = ({B},) with B from {source}"
        )
    for b in np.flatnonzero((lengths < 0) | (lengths > T))[:1]:
        raise ValueError(f"{reader.caller}: lengths[{b}] is {lengths[b]}; expected 0 to T = {T}")
    return lengths.astype(np.int64)


def read_reset(reader: ArgumentReader, value: Any, T: int, B: int) -> Array | None:
    if value is None:
        return None
    reset = reader.array("reset", value)
    if reset.dtype != np.bool_ and (reset.size or is_array(value)):
        raise TypeError(f"{reader.caller}: reset has dtype {reset.dtype}; expected bool")
    if reset.shape != (T, B):
        raise ValueError(
            f"{reader.caller}: reset has shape {reset.shape}; expected (T, B) = ({T}, {B}) with both from x"
        )
    return reset.astype(np.bool_)


def read_parts(reader: ArgumentReader, name: str, state: Any, names: Iterable[str], expected: str) -> dict[str, Any]:
    """The parts of a state by the names that messages use, ``state.fw``; each is None if the state is None."""
    names = [f"{name}.{part}" for part in names]
    if state is None:
        return dict.fromkeys(names)
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"{reader.caller}: {name} is {short(state)}; expected {expected} or None")
    if len(state) != len(names):
        raise ValueError(f"{reader.caller}: {name} has {len(state)} parts; expected {expected}")
    return dict(zip(names, state, strict=True))
