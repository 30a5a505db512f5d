"""Weights in half the bytes, or a quarter: how a float32 matrix becomes codes, and codes become float32 again.

.. code-block:: text

    float16     code = w rounded to float16                     the weight is the code as float32
    bfloat16    code = the upper 16 bits of w, rounded          the weight is the code with 16 zero bits below it
    int8        scale = max|column| / 127                       the weight is float32(code * scale)
                code = round(w / scale), from -127 to 127

All rounding is to nearest, ties to even, and quotients and products are those of float32. A scale is at least 2**-126,
the smallest normal number, also for a column of zeros, and so small that ``127 * scale`` is finite.

To store what has been stored changes nothing. The largest weight has the code 127, and ``float32(127 * scale) / 127``
is rounded to the scale again: where the product is 128 to 256 times the scale's power of two, it is the weight that the
scale was made from; below that it is rounded by at most 32 units of the scale's last place, less than half of 127.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._cpu import CACHES
from .._read import ArgumentReader, short
from ..optable import ROUNDINGS, WEIGHT_STORAGES, Array

LEAST_SCALE = np.finfo(np.float32).smallest_normal
MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Narrow(NamedTuple):
    """A matrix of weights as it is stored."""

    codes: Array
    """Of the matrix' shape: float16, uint16 (the bits of bfloat16) or int8."""
    scale: Array | None
    """Of int8: float32, one for each column."""


class StorageError(NamedTuple):
    """What storing the weights in fewer bytes costs, as `Layer.storage_error` measures it."""

    storage: str
    activations: str
    """To what the rows that weights are multiplied with are rounded; "float32" for not at all."""
    max: float
    """The largest difference of y."""
    rms: float
    """The root mean square of all differences of y."""
    relative_max: float
    """`max` as a share of the largest y."""
    relative_rms: float
    """`rms` as a share of the root mean square of y."""
    nbytes: int
    """Bytes of all weights, as stored: with scales, biases and peepholes."""
    nbytes_float32: int

    def __repr__(self) -> str:
        values = self._asdict()
        if self.activations == ROUNDINGS[0]:
            del values["activations"]
        shown = (f"{name}={f'{x:.3g}' if isinstance(x, float) else repr(x)}" for name, x in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"


def error_of(
    storage: str, activations: str, y: Array, rounded: Array, stored: Iterable[Array], weights: Iterable[Array]
) -> StorageError:
    """By the results of a layer and of the layer with the weights as stored, and by the arrays of both."""

    def largest_and_rms(array: Array) -> tuple[float, float]:
        return float(np.abs(array).max(initial=0)), float(np.sqrt(np.square(array).mean())) if array.size else 0.0

    exact = y.astype(np.float64)
    (most, rms), whole = largest_and_rms(rounded - exact), largest_and_rms(exact)
    relative = [part / all_ if all_ else np.inf if part else 0.0 for part, all_ in zip((most, rms), whole, strict=True)]
    nbytes = [sum(array.nbytes for array in arrays) for arrays in (stored, weights)]
    return StorageError(storage, activations, most, rms, relative[0], relative[1], nbytes[0], nbytes[1])


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


def read_activations(reader: ArgumentReader, value: Any, storage: str | None) -> None:
    """Refuse what is no way to round activations, or none beside this storage of weights."""
    if not isinstance(value, str) or value not in ROUNDINGS:
        error = ValueError if isinstance(value, str) else TypeError
        expected = f"expected one of {', '.join(map(repr, ROUNDINGS))}"
        raise error(f"{reader.caller}: activations is {short(value)}; {expected}")
    if value != ROUNDINGS[0] and storage != "int8":
        what = f"{reader.caller}: activations is {value!r} and storage {storage!r}"
        raise ValueError(f"{what}; expected storage='int8', as only weights in int8 are multiplied in integers")


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
            scale = np.clip(np.abs(array).max(axis=0, initial=0) / np.float32(127), LEAST_SCALE, MOST_SCALE)
            codes = np.empty(array.shape, np.int8)
            for row, weights in zip(codes, array, strict=True):  # numpy crashes in broadcasts where memory is short
                row[:] = np.rint(weights / scale)
            return Narrow(codes, scale)
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
        weights = codes.astype(np.float32)
        for row in weights:
            row *= scale
        return weights
    if codes.dtype == np.float16:
        return codes.astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


# --------------------------------------------------------------------------------------------------------- what is read
# The product of up to FEW rows widens weights in registers, that of more in cache, a block at a time (`narrow_product`
# in narrow.pxd). Beside float32 that costs something at every step, and gains where weights come from far enough away.
# What widening once saves grows with the steps, and by measurement with every GROUP rows.
FEW, GROUP = 12, 48


def keeps_widened(number: int, nbytes: int, batch: int | None = None) -> bool:
    """Whether weights that are stored so, and in float32 take so many bytes, are kept in float32 for all calls, or for
    a stream of so many rows: where they fit into the second-level cache, fewer bytes gain nothing; and the more rows
    there are, the less time is spent on reading weights."""
    if not 0 < number <= len(WEIGHT_STORAGES):
        return False
    most = rows_that_gain(number, nbytes)
    return most == 0 or (batch is not None and batch > most)


def rows_that_gain(number: int, nbytes: int) -> int:
    """How many rows at most a step of a stream may have to be faster with the fewer bytes."""
    if nbytes <= CACHES["L2"]:
        return 0
    return 8 if _is_far(nbytes) else 1 if number == len(WEIGHT_STORAGES) else 2


def widens(number: int, nbytes: int, T: int, B: int) -> bool:
    """Whether a call of T steps of B rows widens such weights before the first step, which takes as long as some five
    rows, or many more where memory is written."""
    if not 0 < number <= len(WEIGHT_STORAGES):
        return False
    if B > FEW:
        return T * -(-B // GROUP) >= (10 if _is_far(nbytes) else 3)
    return B > 1 and T * B >= 120 and T >= (8 if number == len(WEIGHT_STORAGES) else 32) and not _is_far(nbytes)


def _is_far(nbytes: int) -> bool:
    return nbytes > CACHES["L3"] // 2


# ------------------------------------------------------------------------------------------------------------- in files
def stored_arrays(weights: Mapping[str, Array], narrow: Mapping[str, Narrow]) -> dict[str, Array]:
    """What a file has of the weights of a layer, in this order."""
    arrays: dict[str, Array] = {}
    for name, array in weights.items():
        codes, scale = narrow.get(name, Narrow(array, None))
        arrays |= {name: codes} if scale is None else {name: codes, f"{name}.scale": scale}
    return arrays


def read_stored(arrays: Mapping[str, Array], matrices: Iterable[str], storage: str) -> dict[str, Narrow]:
    """The matrices, by name, among the arrays of a file. Dtypes and shapes are right, numbers may be any."""
    found = {}
    for name in matrices:
        codes = arrays[name].astype(WEIGHT_STORAGES[storage], copy=False)  # they may be big-endian
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
