"""The nodes of a cell, one by one, in plain numpy and float64: what a graph computes, by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..formulas import sigmoid
from ..optable import Array
from .found import State, Step, Weights
from .graphs import Node
from .trace import Place, Tracer, Unknown

_MOST_NODES = 200

_OPS: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "AddV2": np.add,
    "BiasAdd": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "ClipByValue": lambda a, low, high: np.minimum(np.maximum(a, low), high),
    "Sigmoid": sigmoid,
    "Tanh": np.tanh,
    "MatMul": np.matmul,
    "Identity": lambda a: a,
    "Snapshot": lambda a: a,
}


def step_of(
    tracer: Tracer, x: Place, states: tuple[Place, ...], results: tuple[Place, ...], weights: Mapping[str, Place]
) -> Step:
    """The function that computes a cell's results from its weights, its input and its state."""
    places = [tracer.straight(place) for place in (x, *states)]

    def step(values: Weights, given: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """The attributes are in the graph."""
        known = {weights[role]: value for role, value in values.items()}
        known |= dict(zip(places, (given, *state), strict=True))
        return tuple(_evaluated(tracer, result, known) for result in results)

    return step


def _evaluated(tracer: Tracer, wanted: Place, known: dict[Place, Array]) -> Array:
    """Node after node, each when its inputs are there; `known` has what is given and gets what is computed."""
    left, count = [wanted], 0
    while left:
        count += 1
        if count > 2 * _MOST_NODES:
            raise Unknown(f"more than {_MOST_NODES} nodes before {wanted.name!r}")
        place = left[-1]
        if place in known:
            left.pop()
            continue
        straight = tracer.straight(place)
        if straight in known:
            known[place] = known[straight]
            continue
        node = tracer.node(place)
        if node is None:
            raise Unknown(f"the argument {place.name!r}")
        if tracer.graph.constant(node) is not None:
            known[place] = np.float64(tracer.value(place, "f", "i"))  # type: ignore[assignment]
            continue
        inputs = tracer.inputs(place.body, node)
        missing = [each for each in inputs if each not in known]
        if missing:
            left += missing
            continue
        known[place] = _result(node, [known[each] for each in inputs], place.output)
    return known[wanted]


def _result(node: Node, inputs: list[Array], output: int) -> Array:
    if node.op == "ConcatV2":
        return np.concatenate(inputs[:-1], int(inputs[-1]))
    if node.op == "Split":
        return np.split(inputs[1], int(node.attrs["num_split"]), int(inputs[0]))[output]
    if node.op not in _OPS:
        raise Unknown(f"the node {node.name!r}, which is a {node.op}")
    return _OPS[node.op](*inputs)
