"""Dynamic quantization of float32 layers: how a matrix of weights becomes codes, and codes become float32 again.

.. code-block:: text

    float16     code = w rounded to float16                     dequantized: the code as float32
    int8        scale = max|column| / 127                       dequantized: float32(code * scale)
                code = round(w / scale), from -127 to 127

All rounding is to nearest, ties to even, and quotients and products are those of float32. A scale is at least 2**-126,
the smallest normal number, also for a column of zeros, and so small that ``127 * scale`` is finite.

To quantize what has been dequantized gives the same codes. The largest weight has the code 127, and
``float32(127 * scale) / 127`` is rounded to the scale again: where the product is 128 to 256 times the scale's power of
two, it is the weight that the scale was made from; below that it is rounded by at most 32 units of the scale's last
place, less than half of 127.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .errors import short
from .optable import SCHEMES, Array

LARGEST_CODE = 127
"""Of int8, for weights and for quantized activations."""
LEAST_SCALE = np.finfo(np.float32).smallest_normal
MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(LARGEST_CODE), np.float32(0))
FLOAT32 = "float32"
KERNEL_FORMATS = {FLOAT32: 0, "float16": 1, "int8": 2}
"""The numbers that kernels have for packed matrices of each scheme: ``pyx/product/quantized.pxd``."""

Scheme = str | Mapping[str, str]
"""What `Layer.quantize` takes: "int8" or "float16" for all matrices, or one for each prefix of their names."""


class QuantizedMatrix(NamedTuple):
    """A matrix of weights as codes."""

    codes: Array
    """Of the matrix' shape: float16 or int8."""
    scale: Array | None
    """Of int8: float32, one for each column."""


class QuantizationReport(NamedTuple):
    """How far a quantized layer is off, and its bytes, as `Layer.quantization_report` measures them."""

    quantization: Scheme
    max: float
    """The largest difference of y."""
    rms: float
    """The root mean square of all differences of y."""
    relative_max: float
    """`max` as a share of the largest y."""
    relative_rms: float
    """`rms` as a share of the root mean square of y."""
    nbytes: int
    """Bytes of all weights in a file: with scales, biases and peepholes."""
    nbytes_float32: int
    layers: dict[str, QuantizationReport] = {}  # noqa: RUF012 (a named tuple's default)
    """With ``by_layer=True``: the report of the layer in which only the matrices of this prefix are quantized."""

    def __repr__(self) -> str:
        """Return the values on one line and, with ``by_layer=True``, a table with a line for each layer."""
        texts = self._texts()
        lines = [f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"]
        if self.layers:
            columns = [["layers", *map(repr, self.layers)]]
            of_layers = [report._texts() for report in self.layers.values()]
            for name in ("max", "rms", "relative_max", "relative_rms", "nbytes"):
                columns.append([name, *[layer_texts[name] for layer_texts in of_layers]])
            widths = [max(map(len, column)) for column in columns]
            for row in zip(*columns, strict=True):
                lines.append("  ".join([text.rjust(width) for text, width in zip(row, widths, strict=True)]))
        return "\n".join(lines)

    def _texts(self) -> dict[str, str]:
        """Return all values but `layers` as the repr has them."""
        values = self._asdict().items()
        return {name: f"{x:.3g}" if isinstance(x, float) else repr(x) for name, x in values if name != "layers"}


def report_of(
    scheme: Scheme, y: Array, quantized_y: Array, arrays: Iterable[Array], weights: Iterable[Array]
) -> QuantizationReport:
    """Compare the results of a layer and of its quantized form, and the arrays that files have of both."""

    def largest_and_rms(array: Array) -> tuple[float, float]:
        return float(np.abs(array).max(initial=0)), float(np.sqrt(np.square(array).mean())) if array.size else 0.0

    exact = y.astype(np.float64)
    (most, rms), whole = largest_and_rms(quantized_y - exact), largest_and_rms(exact)
    relative = [part / all_ if all_ else np.inf if part else 0.0 for part, all_ in zip((most, rms), whole, strict=True)]
    nbytes = [sum(array.nbytes for array in of) for of in (arrays, weights)]
    return QuantizationReport(scheme, most, rms, relative[0], relative[1], nbytes[0], nbytes[1])


# -------------------------------------------------------------------------------------------------------------- schemes
def read_scheme(caller: str, value: Any, dtype: np.dtype[Any], name: str = "scheme") -> str:
    """Return "int8" or "float16", given by a user for a layer of this dtype."""
    if not isinstance(value, str) or value not in SCHEMES:
        error = ValueError if isinstance(value, str) else TypeError
        expected = f"expected one of {', '.join(map(repr, SCHEMES))}"
        raise error(f"{caller}: {name} is {short(value)}; {expected}")
    if dtype != np.float32:
        message = f"{caller}: {name} is {value!r} and the layer's dtype {dtype}"
        raise ValueError(f"{message}; expected float32: make a layer of weights.astype(np.float32) first")
    return value


def read_schemes(
    caller: str, value: Any, prefixes: Iterable[str], dtype: np.dtype[Any], name: str = "scheme"
) -> dict[str, str]:
    """Return the scheme of each cell, by the prefixes of its weights' names, from what a user gives for the layer.

    A mapping has the first parts of these prefixes, without the last dot; the longest one counts, and without one a
    cell stays float32.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(prefixes, read_scheme(caller, value, dtype, name))
    schemes: dict[str, str] = dict.fromkeys(prefixes, FLOAT32)
    for key, scheme in sorted(value.items(), key=lambda item: len(str(item[0]))):
        inside = [prefix for prefix in schemes if isinstance(key, str) and (not key or prefix.startswith(f"{key}."))]
        if not inside:
            parts = {prefix[:k] for prefix in schemes for k, letter in enumerate(prefix) if letter == "."}
            expected = f"expected {', '.join(map(repr, ['', *sorted(parts)][:20]))}, of the weights' names"
            raise ValueError(f"{caller}: {name} has the key {short(key)}; {expected}")
        if scheme != FLOAT32:
            read_scheme(caller, scheme, dtype, f"{name}[{key!r}]")
        schemes |= {prefix: scheme for prefix in inside}
    return schemes


# ------------------------------------------------------------------------------------------------------------- matrices
def quantize_matrix(array: Array, scheme: str, name: str = "w") -> QuantizedMatrix:
    """Quantize a float32 matrix; errors call it by its name.

    Raises
    ------
    ValueError
        An entry is not finite, or too large for float16.
    """
    _expect(np.isfinite(array), array, name, f"finite weights, as they are to be quantized to {scheme}")
    if scheme == "int8":
        with np.errstate(under="ignore"):
            scale = np.clip(np.abs(array).max(axis=0, initial=0) / np.float32(LARGEST_CODE), LEAST_SCALE, MOST_SCALE)
            codes = np.empty(array.shape, np.int8)
            for row, weights in zip(codes, array, strict=True):  # numpy crashes in broadcasts where memory is short
                row[:] = np.rint(weights / scale)
            return QuantizedMatrix(codes, scale)
    with np.errstate(over="ignore", under="ignore"):
        codes = array.astype(np.float16)
    _expect(np.isfinite(codes), array, name, "a number that float16 holds; int8 holds any")
    return QuantizedMatrix(codes, None)


def dequantize_matrix(matrix: QuantizedMatrix) -> Array:
    """Return the float32 weights that the codes stand for."""
    weights = matrix.codes.astype(np.float32)
    if matrix.scale is not None:
        for row in weights:
            row *= matrix.scale
    return weights


# ------------------------------------------------------------------------------------------------------------- in files
def read_matrices(arrays: Mapping[str, Array], schemes: Mapping[str, str]) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices among the arrays of a file, by name; `schemes` names those of each.

    Dtypes and shapes are right, numbers may be any.
    """
    matrices = {}
    for name, scheme in schemes.items():
        codes = arrays[name].astype(SCHEMES[scheme], copy=False)  # they may be big-endian
        scale = arrays.get(f"{name}.scale")
        if scale is None:
            _expect(np.isfinite(codes), codes, f"its {name}", "the code of a finite float16")
        else:
            _expect(codes >= -LARGEST_CODE, codes, f"its {name}", "-127 to 127")
            scale = scale.astype(np.float32, copy=False)
            right = (scale >= LEAST_SCALE) & (scale <= MOST_SCALE)
            _expect(right, scale, f"its {name}.scale", f"{LEAST_SCALE!s} to {MOST_SCALE!s}")
        matrices[name] = QuantizedMatrix(codes, scale)
    return matrices


def _expect(right: Array, array: Array, name: str, expected: str) -> None:
    wrong = np.argwhere(~right)
    if len(wrong):
        place = wrong[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is {array[tuple(place)]!s}; expected {expected}")
