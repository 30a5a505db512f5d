"""What the conversions have in common: orders of gates, refusals, and arrays to cells and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..layers import GRU, LSTM, Bidirectional
from ..optable import DTYPE_NAMES, DTYPES, Array

ORDERS = {  # of the gates: input i, forget f, output o, reset r, update u; and of the candidate c
    "LSTM": "icfo",  # the default of blockcell's layer
    "GRU": "ruc",
    "TF1 LSTM": "icfo",
    "Keras LSTM": "ifco",
    "Keras GRU": "urc",  # Keras writes z for u and h for c
    "PyTorch LSTM": "ifco",
    "PyTorch GRU": "ruc",  # PyTorch writes z for u and n for c
    "ONNX LSTM": "iofc",
    "ONNX GRU": "urc",  # likewise
    "peepholes": "ifo",
    "ONNX peepholes": "iof",
}

KINDS = {4: "LSTM", 3: "GRU"}  # by the number of gates, the candidate among them

Cell = LSTM | GRU


class ConversionError(ValueError):
    """The other side cannot express what this one computes."""


def reorder(weights: Array, given: str, wanted: str, axis: int = -1) -> Array:
    """Put the gates along an axis into another order: ``reorder(b, "iofc", "icfo")``."""
    parts = dict(zip(given, np.split(weights, len(given), axis), strict=True))
    return np.concatenate([parts[gate] for gate in wanted], axis)


def make_cell(
    source: str,
    kernel: Array,
    recurrent: Array,
    bias: Array,
    recurrent_bias: Array | None = None,
    peepholes: Array | None = None,
    *,
    reset_after: bool = False,
    reverse: bool = False,
) -> Cell:
    """A layer from weights [I,.], [H,.], [.] and [.], with the gates in the order of a source such as "ONNX LSTM".

    Of the two biases, layers here have the sum; only the candidate of a GRU with reset_after has both.
    """
    kind, hidden = source.split()[1], len(recurrent)
    w, b = (reorder(a, ORDERS[source], ORDERS[kind]) for a in (np.concatenate([kernel, recurrent]), bias))
    b_h = np.zeros_like(b) if recurrent_bias is None else reorder(recurrent_bias, ORDERS[source], ORDERS[kind])
    if kind == "GRU":
        if reset_after:
            b[: 2 * hidden] += b_h[: 2 * hidden]
        else:
            b += b_h
        weights = w[:, : 2 * hidden], w[:, 2 * hidden :], b[: 2 * hidden], b[2 * hidden :]
        b_hc = b_h[2 * hidden :] if reset_after else None
        return GRU(*weights, reset_after=reset_after, b_hc=b_hc, reverse=reverse)
    b += b_h
    if peepholes is None:
        return LSTM(w, b, reverse=reverse)
    wci, wcf, wco = np.split(reorder(peepholes, ORDERS["ONNX peepholes"], ORDERS["peepholes"]), 3)
    return LSTM(w, b, wci=wci, wcf=wcf, wco=wco, reverse=reverse)


def split_cell(cell: Cell, target: str) -> tuple[Array, Array, Array, Array]:
    """The reverse of `make_cell`: kernel [I,.], recurrent kernel [H,.], bias with forget_bias, and recurrent bias.

    The recurrent bias is zero but for the candidate of a GRU with reset_after, so that sums are exact.
    """
    weights = cell.weights
    if isinstance(cell, GRU):
        parts, order = (("w_ru", "w_c"), ("b_ru", "b_c")), ORDERS["GRU"]
        w, b = (np.concatenate([weights[name] for name in names], axis=-1) for names in parts)
    else:
        w, b, order = weights["w"], weights["b"], cell.gate_order
    w, b = (reorder(a, order, ORDERS[target]) for a in (w, b))
    b_h = np.zeros_like(b)
    if isinstance(cell, LSTM):
        b[gate_slice(target, "f", cell.hidden_size)] += b.dtype.type(cell.forget_bias)
    elif cell.reset_after:
        b_h[gate_slice(target, "c", cell.hidden_size)] = weights["b_hc"]
    return w[: cell.input_size], w[cell.input_size :], b, b_h


def gate_slice(target: str, gate: str, hidden: int) -> slice:
    start = ORDERS[target].index(gate) * hidden
    return slice(start, start + hidden)


def cells_of(caller: str, layer: Any) -> tuple[Cell, ...]:
    """The cell, or both cells of a bidirectional layer."""
    cells = []
    for cell in (layer.fw, layer.bw) if isinstance(layer, Bidirectional) else (layer,):
        if not isinstance(cell, (LSTM, GRU)):
            expected = "expected a blockcell.LSTM, GRU or Bidirectional of one of them"
            raise TypeError(f"{caller}: the layer is of type {type(cell).__name__}; {expected}")
        cells.append(cell)
    return tuple(cells)


def has_peepholes(cell: Cell) -> bool:
    return "wci" in cell.weights


def clips(cell: Cell) -> bool:
    return isinstance(cell, LSTM) and cell.cell_clip > 0 and math.isfinite(cell.cell_clip)


def refuse_variants(caller: str, cell: Cell) -> None:
    """Refuse LSTMs of another form than those of four gates whose output is h."""
    if not isinstance(cell, LSTM):
        return
    if cell.coupled:
        raise ConversionError(f"{caller}: the LSTM has coupled=True, so its input gate is 1 - f; expected four gates")
    if "w_p" in cell.weights:
        raise ConversionError(f"{caller}: the LSTM has a projection, w_p; expected one without")


def refuse_extras(caller: str, cell: Cell, target: str) -> None:
    """Refuse what layers of blockcell have and most others do not."""
    refuse_variants(caller, cell)
    if cell.reverse:
        raise ConversionError(
            f"{caller}: the layer has reverse=True, which weights do not tell; make it anew with reverse=False, convert"
            f" that, and turn {target}'s input and output around: y = layer(x[::-1])[::-1]"
        )
    if has_peepholes(cell):
        raise ConversionError(f"{caller}: the LSTM has peepholes, {target} has none; an ONNX node has (to_onnx)")
    if isinstance(cell, LSTM) and clips(cell):
        raise ConversionError(
            f"{caller}: the LSTM clips its cell state at {cell.cell_clip:g}; {target} does not. If the limit is never"
            f" reached, make the layer anew with cell_clip=0"
        )


def is_of(packages: Iterable[str], thing: Any, name: str) -> bool:
    """Whether it is the class or function of that name in a module of these packages, not another of the same name."""
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] in packages and getattr(sys.modules.get(module), name, None) is thing


def read_names(caller: str, source: Mapping[str, Any]) -> list[str]:
    names = [*source]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{caller}: there is a name of type {type(name).__name__}; expected those of type str")
    return names


def read_arrays(caller: str, values: Mapping[str, Any]) -> dict[str, Array]:
    """The values as arrays, all of one dtype that layers take."""
    arrays: dict[str, Array] = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except Exception as error:  # PyTorch's, for example, for a tensor on a GPU
            raise TypeError(f"{caller}: {name} cannot be read as an array: {error}") from error
        if array.dtype not in DTYPES:
            raise TypeError(f"{caller}: {name} has dtype {array.dtype}; expected {DTYPE_NAMES}")
        first = next(iter(arrays), name)
        if arrays and array.dtype != arrays[first].dtype:
            raise TypeError(
                f"{caller}: {name} has dtype {array.dtype}; expected {arrays[first].dtype}, that of {first}"
            )
        arrays[name] = array
    return arrays


def count_gates(caller: str, name: str, recurrent: Array, axis: int, known: Iterable[int] = (3, 4)) -> int:
    """How many gates a recurrent kernel has: 4 for an LSTM, 3 for a GRU."""
    if recurrent.ndim == 2:
        for gates in known:
            if recurrent.shape[axis] == gates * recurrent.shape[1 - axis]:
                return gates
    forms = ("(H, 4H)", "(H, 3H)") if axis == 1 else ("(4H, H)", "(3H, H)")
    form = "{} for an LSTM or {} for a GRU".format(*forms)
    raise ValueError(f"{caller}: {name} has shape {recurrent.shape}; expected {form}")


def check_shapes(caller: str, arrays: Mapping[str, tuple[Array, tuple[int | None, ...]]]) -> None:
    for name, (array, expected) in arrays.items():
        fits = array.ndim == len(expected) and all(
            size in (None, found) for size, found in zip(expected, array.shape, strict=True)
        )
        if not fits:
            form = str(expected).replace("None", "I")
            raise ValueError(f"{caller}: {name} has shape {array.shape}; expected {form}")
