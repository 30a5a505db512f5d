"""Weights in half the bytes, or a quarter: how a float32 matrix becomes codes, and codes become float32 again.

.. code-block:: text

    float16     code = w rounded to float16                     the weight is the code as float32
    bfloat16    code = the upper 16 bits of w, rounded          the weight is the code with 16 zero bits below it
    int8        scale = max(|column| / 127, 2**-126)            the weight is float32(code * scale)
                code = round(w / scale), from -127 to 127

All rounding is to nearest, ties to even, and quotients and products are those of float32. To store what has been stored
changes nothing: a column's largest weight comes back exactly, ``float32(127 * scale)``, so its scale stays what it is.
The bound of the scale keeps this true of subnormal numbers, and gives zeros for a column of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._read import ArgumentReader, short
from ..optable import WEIGHT_STORAGES, Array

LEAST_SCALE = np.finfo(np.float32).smallest_normal
MOST_SCALE = np.finfo(np.float32).max / np.float32(127)


class Narrow(NamedTuple):
    """A matrix of weights as it is stored."""

    codes: Array
    """Of the matrix' shape: float16, uint16 (the bits of bfloat16) or int8."""
    scale: Array | None
    """Of int8: float32, one for each column."""


def read_storage(reader: ArgumentReader, value: Any, dtype: np.dtype[Any]) -> str:
    """The name of a way to store the weights of a layer of this dtype."""
    if not isinstance(value, str) or value not in WEIGHT_STORAGES:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"{reader.caller}: storage is {short(value)}; expected one of {', '.join(map(repr, WEIGHT_STORAGES))}"
        )
    if dtype != np.float32:
        what = f"{reader.caller}: storage is {value!r} and the layer's dtype {dtype}"
        raise ValueError(f"{what}; expected float32: make a layer of weights.astype(np.float32) first")
    return value


def narrowed(array: Array, storage: str, name: str = "w") -> Narrow:
    """A float32 matrix as it is stored; errors call it by its name.

    Raises
    ------
    ValueError
        An entry is not finite, or too large for float16 or bfloat16.
    """
    _expect(np.isfinite(array), array, name, f"finite weights, as they are to be stored in {storage}")
    if storage == "int8":
        with np.errstate(under="ignore"):
            scale = np.maximum(np.abs(array).max(axis=0, initial=0) / np.float32(127), LEAST_SCALE)
            return Narrow(np.rint(array / scale).astype(np.int8), scale)
    if storage == "float16":
        with np.errstate(over="ignore", under="ignore"):
            codes = array.astype(np.float16)
    else:
        bits = np.ascontiguousarray(array).view(np.uint32)
        codes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    _expect(_finite(codes), array, name, f"a number that {storage} holds; int8 holds any")
    return Narrow(codes, None)


def widened(narrow: Narrow) -> Array:
    """The weights that are stored, in float32."""
    codes, scale = narrow
    if scale is not None:
        return codes.astype(np.float32) * scale
    if codes.dtype == np.float16:
        return codes.astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


# ------------------------------------------------------------------------------------------------------------- in files
def stored_arrays(weights: Mapping[str, Array], narrow: Mapping[str, Narrow]) -> dict[str, Array]:
    """What a file has of the weights of a layer, in this order."""
    arrays: dict[str, Array] = {}
    for name, array in weights.items():
        codes, scale = narrow.get(name, Narrow(array, None))
        arrays |= {name: codes} if scale is None else {name: codes, f"{name}.scale": scale}
    return arrays


def read_stored(arrays: Mapping[str, Array], storage: str) -> dict[str, Narrow]:
    """The matrices among the arrays of a file. Dtypes and shapes are right, numbers may be any."""
    found = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            codes = array.astype(WEIGHT_STORAGES[storage], copy=False)  # they may be big-endian
            scale = arrays.get(f"{name}.scale")
            if scale is None:
                _expect(_finite(codes), codes, f"its {name}", f"the code of a finite {storage}")
            else:
                _expect(codes >= -127, codes, f"its {name}", "-127 to 127")
                scale = scale.astype(np.float32, copy=False)
                right = (scale >= LEAST_SCALE) & (scale <= MOST_SCALE)
                _expect(right, scale, f"its {name}.scale", f"{LEAST_SCALE!s} to {MOST_SCALE!s}")
            found[name] = Narrow(codes, scale)
    return found


# ------------------------------------------------------------------------------------------------------------- checking
def _finite(codes: Array) -> Array:
    """Which codes of float16 or bfloat16 are of finite numbers."""
    exponent = 0x7C00 if codes.dtype == np.float16 else 0x7F80
    return (codes.view(np.uint16) & exponent) != exponent  # type: ignore[no-any-return]


def _expect(right: Array, array: Array, name: str, expected: str) -> None:
    for place in np.argwhere(~right)[:1].tolist():
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is {array[tuple(place)]!s}; expected {expected}")
