"""The attribute `clip` of ONNX's nodes, which bounds the inputs of their activations: a clip that changes nothing.

A clip changes nothing where an activation has one value from the clip on, and where its input cannot reach the clip.
The largest magnitudes of the inputs of a cell's activations, and of its states, for an x of at most x:

    gate, candidate     x sum(|W|) + h sum(|R|) + |Wb| + |Rb|, with the sums over the columns of W and R
    h                   1, if gates are between 0 and 1 and activations between -1 and 1; or that of the initial state
    c of an LSTM        1 / (1 - f), the limit of c = f c + 1, with the largest f of the forget gate; 1 if f = 1 - i; or
                        that of the initial state
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..activations import Activation
from ..activations import parts as parts_of
from ..formulas import activated
from ..optable import Array
from .onnx_graph import RESHAPING, SELECTING, OnnxGraph, is_recurrent
from .shared import ConversionError

_GATES = ("sigmoid", "hardsigmoid")
_BOUNDED = (*_GATES, "softsign", "tanh")
_BOUNDED_OPS = ("HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh")


def refuse_clip(
    label: str,
    node: Any,
    clip: float,
    weights: Sequence[Array],
    activations: Sequence[Mapping[str, Activation]],
    coupled: bool,
    graph: OnnxGraph | None,
) -> None:
    """Refuse a bound of the inputs of a node's activations, unless these have the same values without it.

    Parameters
    ----------
    weights : sequence of ndarray
        W [D,.,I], R [D,.,H], B [D,.], and P if it has peepholes.
    activations : sequence of mapping
        The activations of each direction, as arguments of a layer.
    graph : OnnxGraph or None
        Where the node is, None if that is not known.
    """
    W = weights[0]
    limits = []
    for d, cell in enumerate(activations):
        reached = _reached(node, [array[d] for array in weights], cell, coupled, graph)
        limits += [min(_saturated(cell[argument], W.dtype), reach) for argument, reach in reached]
    limit = max(limits)
    if not clip >= min(limit, float(np.finfo(np.float32).max)):
        begin = f", and only from {limit:.4g} on that changes nothing" if limit < math.inf else ""
        raise ConversionError(
            f"{label} has clip={clip:g}, which limits what goes into the activations{begin}; the cell_clip of an LSTM"
            f" here limits the cell state. If your inputs never reach the limit, pass ignore_clip=True"
        )


def _reached(
    node: Any, weights: Sequence[Array], activations: Mapping[str, Activation], coupled: bool, graph: OnnxGraph | None
) -> list[tuple[str, float]]:
    """Return the largest magnitudes of inputs of activations of one direction, with the names of the arguments."""
    W, R, B, *peepholes = weights
    x = math.inf if graph is None else _largest(graph, node.input[0])
    h, c = (_largest_state(node, k, graph) for k in (5, 6))
    hidden = R.shape[-1]
    if math.isinf(x + h) or peepholes:
        sums = np.full(len(W), math.inf)
    else:
        sums = x * np.abs(W).sum(1, dtype=float) + h * np.abs(R).sum(1, dtype=float)
        sums += np.abs(B.astype(float)).reshape(2, -1).sum(0)
    if len(activations) == 1:
        return [("activation", float(sums.max()))]
    gates, candidate = sums[:-hidden], sums[-hidden:]
    reached = [("recurrent_activation", float(gates.max())), ("activation", float(candidate.max()))]
    if len(W) == 4 * hidden:
        largest = max(c, 1.0 if coupled else _largest_cell(gates[2 * hidden :], activations["recurrent_activation"]))
        reached.append(("activation", math.inf if math.isinf(h) else largest))
    return reached


def _largest_cell(forget: Array, activation: Activation) -> float:
    """Return the largest magnitude of an LSTM's cell state, from those of the inputs of its forget gate."""
    name, values = parts_of(activation)
    if name == "hard_sigmoid":  # its slope may be negative
        forget = forget * math.copysign(1, values[0])
    with np.errstate(divide="ignore", under="ignore"):
        return float(np.max(1 / (1 - activated(forget, activation))))


def _largest(graph: OnnxGraph, name: str) -> float:
    """Return the largest magnitude that a value can have; infinity if it is not a bounded result of other nodes."""
    nodes, origins, _ = graph.origins(name, ())
    moving = [node for node in nodes if node.op_type in (*RESHAPING, *SELECTING) and not graph.is_fixed(node.output[0])]
    moved = [value for node in moving for value in (node.input if node.op_type == "Concat" else node.input[:1])]
    if not origins or any(map(graph.is_fixed, moved)):  # constants, whose size is not looked at
        return math.inf
    largest = 0.0
    for origin in origins:
        node = graph.makers.get(origin)
        if node is not None and is_recurrent(node) and origin in node.output[:2]:
            largest = max(largest, _largest_state(node, 5, graph))
        elif node is not None and node.op_type in _BOUNDED_OPS:
            largest = max(largest, 1.0)
        else:
            return math.inf
    return largest


def _largest_state(node: Any, position: int, graph: OnnxGraph | None) -> float:
    """Return the largest magnitude of h, or of an initial c, by the position of its input; infinity without bound."""
    written = [name for attribute in node.attribute if attribute.name == "activations" for name in attribute.strings]
    names = [name.decode(errors="replace").lower() for name in written]
    count = 3 if "LSTM" in node.op_type else 2 if node.op_type == "GRU" else 1
    is_bounded = all(name in (_BOUNDED if k % count or count == 1 else _GATES) for k, name in enumerate(names))
    if position == 5 and not is_bounded:
        return math.inf
    least = 1.0 if position == 5 else 0.0
    name = node.input[position] if len(node.input) > position else ""
    if not name or (graph is not None and graph.is_zero(name)):
        return least
    array = None if graph is None else graph.constant(name)
    return math.inf if array is None else max(least, float(np.abs(array).max(initial=0)))


def _saturated(activation: Activation, dtype: np.dtype[Any]) -> float:
    """Return from which distance from 0 on an activation has one value on each side, in this precision."""
    name, values = parts_of(activation)
    info: Any = np.finfo(np.promote_types(dtype, np.float32))  # float16 is computed in float32
    if name == "tanh":
        return math.log(8 / info.eps) / 2  # there 1 - tanh is a quarter of eps, half of what is between 1 and the next
    if name == "sigmoid":
        return -math.log(info.smallest_normal) + math.log(2 / info.eps)  # where exp(-z) rounds to 0
    if name == "hard_sigmoid" and values[0] != 0:
        return float(max(abs(values[1]), abs(1 - values[1])) / abs(values[0]))
    return math.inf
