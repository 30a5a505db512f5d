"""The weights of a layer as its model has them: in the model's dtype, in codes, or in ONNX's layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from blockcell.gates import ORDERS, gate_slice, reorder
from blockcell.layers import GRU, LSTM, BaseLayer, Quantized
from blockcell.layers.structure import Leaf
from blockcell.optable import Array


def stored_weights(layer: BaseLayer, dtype: np.dtype[Any], integer: bool) -> dict[str, Array]:
    """Return the weights as a model of this dtype has them; with `integer`, codes are unsigned."""
    arrays = layer._arrays_of_file()
    if not isinstance(layer, Quantized):
        return {name: array.astype(dtype) for name, array in arrays.items()}
    if integer:  # the bytes of code + 128
        arrays |= {name: array.view(np.uint8) ^ 128 for name, array in arrays.items() if array.dtype == np.int8}
    return arrays


def is_int8(leaf: Leaf, prefix: str, weights: Mapping[str, Array]) -> bool:
    """Return whether the matrices of a leaf are quantized to int8."""
    return f"{prefix}{leaf._tensors[0].name}.scale" in weights


def node_weights(cell: Any, weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return a cell's weights, with the scales of codes, in the layout of ONNX's own LSTM, GRU or RNN.

    Of coupled gates ONNX's LSTM has i, and f is 1 - i. As 1 - sigmoid(z) is sigmoid(-z), i gets the weights of f,
    negated. f has them all the same, for runtimes that do not know of this.
    """
    kind, hidden, weights = type(cell).__name__, cell.hidden_size, dict(weights)
    old_order, new_order = ORDERS[kind], ORDERS[f"ONNX {kind}"]
    matrices, biases = (["w_ru", "w_c"], ["b_ru", "b_c"]) if isinstance(cell, GRU) else (["w"], ["b"])
    coupled = isinstance(cell, LSTM) and cell.coupled
    if isinstance(cell, LSTM):
        old_order = ORDERS["coupled LSTM"] if coupled else cell.gate_order
        new_order = new_order.replace("i", "f") if coupled else new_order
        weights["b"] = weights["b"].copy()
        if cell.forget_bias:
            with np.errstate(all="ignore"):
                weights["b"][gate_slice(old_order, "f", hidden)] += weights["b"].dtype.type(cell.forget_bias)

    def in_new_order(names: Iterable[str]) -> Array:
        arrays = [weights[name] for name in names]
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        return reorder(joined, old_order, new_order)

    w, b = in_new_order(matrices), in_new_order(biases)
    b_h = np.zeros_like(b)
    if isinstance(cell, GRU) and cell.reset_after:
        b_h[gate_slice(new_order, "c", hidden)] = weights["b_hc"]
    if coupled:
        for array in (w, b):
            np.negative(array[..., :hidden], out=array[..., :hidden])
        weights |= {"wci": -weights["wcf"]} if "wcf" in weights else {}
    arrays = {"W": w[: cell.input_size].T, "R": w[cell.input_size :].T, "B": np.concatenate([b, b_h])}
    if "wcf" in weights:
        arrays["P"] = np.concatenate([weights[f"wc{gate}"] for gate in ORDERS["ONNX peepholes"]])
    arrays = {name: array[None] for name, array in arrays.items()}  # of one direction
    if f"{matrices[0]}.scale" not in weights:
        return arrays
    scales = in_new_order(f"{name}.scale" for name in matrices)[:, None]
    return {"W.scale": scales, "R.scale": scales, **arrays}
