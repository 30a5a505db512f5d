"""What the conversions have in common: refusals, and arrays to cells and back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ..gates import ORDERS, gate_slice, reorder
from ..layers import GRU, LSTM, RNN, Bidirectional, Quantized
from ..optable import DTYPE_NAMES, DTYPES, Array, peephole_names

KINDS = {len(ORDERS[kind]): kind for kind in ("GRU", "LSTM", "RNN")}
"""Kinds of cells by their number of gates, the candidate among them."""
GATE_COUNTS = {kind: count for count, kind in KINDS.items()}
SPLIT = {"w", "b", "w_ru", "w_c", "b_ru", "b_c", "b_hc", "reset_after", "forget_bias", "gate_order"}
"""The arguments of cells that `split_cell` puts into its results."""

RecurrentCell = LSTM | GRU | RNN


class ConversionError(ValueError):
    """The target of a conversion cannot express what the source computes."""


def make_cell(
    layout: str,
    kernel: Array,
    recurrent: Array,
    bias: Array,
    recurrent_bias: Array | None = None,
    *,
    peepholes: Array | None = None,
    reset_after: bool = False,
    **options: Any,
) -> RecurrentCell:
    """Make a layer of weights [I,.], [H,.], [.] and [.] in the layout of another package, such as "ONNX LSTM".

    Layers here have the sum of the two biases; only the candidate of a GRU with reset_after has both. Peepholes are
    those of i, f and o, without i if gates are coupled. The options are the layer's.
    """
    kind = layout.split(maxsplit=1)[1]
    w, b = (reorder(a, ORDERS[layout], ORDERS[kind]) for a in (np.concatenate([kernel, recurrent]), bias))
    b_h = np.zeros_like(b) if recurrent_bias is None else reorder(recurrent_bias, ORDERS[layout], ORDERS[kind])
    if kind == "GRU":
        gates = 2 * len(recurrent)
        if reset_after:
            b[:gates] += b_h[:gates]
        else:
            b += b_h
        weights = w[:, :gates], w[:, gates:], b[:gates], b[gates:]
        return GRU(*weights, reset_after=reset_after, b_hc=b_h[gates:] if reset_after else None, **options)
    b += b_h
    if kind == "RNN":
        return RNN(w, b, **options)
    coupled = kind == "coupled LSTM"
    if peepholes is not None:
        names = peephole_names(coupled)
        options |= dict(zip(names, np.split(peepholes, len(names)), strict=True))
    return LSTM(w, b, coupled=coupled, **options)


def split_cell(
    caller: str, cell: RecurrentCell, target_name: str, layout: str, takes: Collection[str]
) -> tuple[Array, Array, Array, Array]:
    """Split a cell's weights into kernel [I,.], recurrent kernel [H,.], bias and recurrent bias; undo `make_cell`.

    forget_bias is added into the bias. The recurrent bias is zero but for the candidate of a GRU with reset_after, so
    that sums are exact. Refuse a cell with arguments other than these that the target does not take.
    """
    refuse_others(caller, cell, target_name, {*SPLIT, *takes})
    weights = cell.weights
    if isinstance(cell, GRU):
        parts, order = (("w_ru", "w_c"), ("b_ru", "b_c")), ORDERS["GRU"]
        w, b = (np.concatenate([weights[name] for name in names], axis=-1) for names in parts)
    else:
        w, b = weights["w"], weights["b"]
        order = ORDERS["RNN"] if isinstance(cell, RNN) else ORDERS["coupled LSTM"] if cell.coupled else cell.gate_order
    w, b = (reorder(a, order, ORDERS[layout]) for a in (w, b))
    b_h = np.zeros_like(b)
    if isinstance(cell, LSTM):
        b[gate_slice(ORDERS[layout], "f", cell.hidden_size)] += b.dtype.type(cell.forget_bias)
    elif isinstance(cell, GRU) and cell.reset_after:
        b_h[gate_slice(ORDERS[layout], "c", cell.hidden_size)] = weights["b_hc"]
    return w[: cell.input_size], w[cell.input_size :], b, b_h


def cells_of(caller: str, layer: Any) -> tuple[RecurrentCell, ...]:
    """Return the cell, or both cells of a bidirectional layer."""
    cells = []
    for cell in (layer.fw, layer.bw) if isinstance(layer, Bidirectional) else (layer,):
        if isinstance(cell, Quantized):
            expected = "expected the float32 layer, or the one that dequantize() gives"
            raise TypeError(f"{caller}: the layer is quantized, and its codes have no place in the target; {expected}")
        if not isinstance(cell, (LSTM, GRU, RNN)):
            expected = "expected a blockcell.LSTM, GRU, RNN or Bidirectional of one of them"
            raise TypeError(f"{caller}: the layer is of type {type(cell).__name__}; {expected}")
        cells.append(cell)
    return tuple(cells)


_MENDS = {  # by the argument that is not the default
    **dict.fromkeys(("wci", "wcf", "wco", "coupled"), "; an ONNX node has peepholes and coupled gates (to_onnx)"),
    **dict.fromkeys(("cell_clip", "proj_clip"), "; if the limit is never reached, make the layer anew without it"),
    "w_p": "; a torch.nn.LSTM has (to_torch)",
    "reverse": ", as weights do not tell it; make the layer anew with reverse=False, convert that, and turn its input"
    " and output around: y = layer(x[::-1])[::-1]",
}


def refuse_others(caller: str, cell: RecurrentCell, target_name: str, takes: Collection[str]) -> None:
    """Refuse a cell with weights or other arguments that are not the defaults and that the target does not take."""
    parameters = inspect.signature(type(cell)).parameters
    for name, value in cell._arguments().items():
        is_weight = isinstance(value, np.ndarray)
        if name in takes or (name.endswith("_clip") and not 0 < value < np.inf):
            continue
        if not is_weight and name in parameters and value == parameters[name].default:
            continue
        shown = f"the weights {name}" if is_weight else f"{name}={value!r}"
        text = f"the {type(cell).__name__} has {shown}, {target_name} has no such thing{_MENDS.get(name, '')}"
        raise ConversionError(f"{caller}: {text}")


def zoneout_remark(label: str) -> str:
    """Say that a cell, which messages call by the label, is converted without its zoneout."""
    return (
        f"{label} has zoneout by its name, which is not converted: it mixes the states before and after each step,"
        f" in inference, too. Call the layer for one step at a time, and mix them"
    )


def is_of(packages: Iterable[str], thing: Any, name: str) -> bool:
    """Return whether an object is the class or function of that name in a module of these packages."""
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] in packages and getattr(sys.modules.get(module), name, None) is thing


def read_names(caller: str, source: Mapping[str, Any]) -> list[str]:
    """Return the names of a mapping, which have to be texts."""
    names = [*source]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{caller}: there is a name of type {type(name).__name__}; expected those of type str")
    return names


def read_arrays(caller: str, values: Mapping[str, Any]) -> dict[str, Array]:
    """Read values as arrays, all of one dtype that layers take."""
    arrays: dict[str, Array] = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except Exception as error:  # PyTorch's, for example, for a tensor on a GPU
            raise TypeError(f"{caller}: {name} cannot be read as an array: {error}") from error
        if array.dtype not in DTYPES:
            raise TypeError(f"{caller}: {name} has dtype {array.dtype}; expected {DTYPE_NAMES}")
        first_name = next(iter(arrays), name)
        if arrays and array.dtype != arrays[first_name].dtype:
            raise TypeError(
                f"{caller}: {name} has dtype {array.dtype}; expected {arrays[first_name].dtype}, that of {first_name}"
            )
        arrays[name] = array
    return arrays


def count_gates(caller: str, name: str, recurrent: Array, axis: int) -> int:
    """Return how many gates a recurrent kernel has along an axis: 4 for an LSTM, 3 for a GRU, 1 for an RNN."""
    shape = recurrent.shape if axis == 1 else recurrent.shape[::-1]
    gates = next((count for count in KINDS if len(shape) == 2 and shape[1] == count * shape[0]), None)
    if gates is None:
        forms = ("(H, 4H)", "(H, 3H)", "(H, H)") if axis == 1 else ("(4H, H)", "(3H, H)", "(H, H)")
        form = "{} for an LSTM, {} for a GRU or {} for an RNN".format(*forms)
        raise ValueError(f"{caller}: {name} has shape {recurrent.shape}; expected {form}")
    return gates


def check_shapes(caller: str, arrays: Mapping[str, tuple[Array, tuple[int | None, ...]]], letter: str = "I") -> None:
    """Refuse arrays of other shapes than expected; None stands for any size, which messages call by the letter."""
    for name, (array, shape) in arrays.items():
        fits = array.ndim == len(shape) and all(
            expected in (None, size) for expected, size in zip(shape, array.shape, strict=True)
        )
        if not fits:
            form = str(shape).replace("None", letter)
            raise ValueError(f"{caller}: {name} has shape {array.shape}; expected {form}")
