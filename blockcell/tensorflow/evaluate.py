"""The nodes of a cell, one by one, in plain numpy and float64: what a graph computes, by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..formulas import sigmoid
from ..optable import Array
from .found import State, Step, Weights
from .graphs import Node
from .sums import VIEWS, squeezed, strided, unpacked
from .trace import Place, Source, Tracer, Unknown

_MOST_NODES = 300

_OPS: dict[str, tuple[int, Callable[..., Array]]] = {  # how many inputs they have, and what they compute
    "Add": (2, np.add),
    "AddV2": (2, np.add),
    "BiasAdd": (2, np.add),
    "Sub": (2, np.subtract),
    "Mul": (2, np.multiply),
    "Maximum": (2, np.maximum),
    "Minimum": (2, np.minimum),
    "ClipByValue": (3, lambda a, low, high: np.minimum(np.maximum(a, low), high)),
    "Sigmoid": (1, sigmoid),
    "Tanh": (1, np.tanh),
}


class Body:
    """A cell's nodes, in the order in which they are computed."""

    def __init__(
        self, tracer: Tracer, x: Place, states: Sequence[Place], results: Sequence[Place], inputs: int, hidden: int
    ) -> None:
        """`inputs` and `hidden` are I and H.

        Raises
        ------
        Unknown
            A node is not understood.
        """
        self._sizes = [inputs, *[hidden] * len(states)]
        self._given = [tracer.straight(place) for place in (x, *states)]
        self._results = [tracer.straight(place) for place in results]
        self._tracer = tracer
        self.sources: dict[str, Source] = {}
        """The variables and constants that the nodes read."""
        self._program: list[tuple[Place, Callable[..., Array], tuple[Place, ...]]] = []
        self._leaves: dict[Place, str] = {}
        done = {*self._given}
        for result in self._results:
            self._compile(result, done)

    def _compile(self, wanted: Place, done: set[Place]) -> None:
        """Node after node, each when its inputs are there."""
        left: list[Place] = [wanted]
        entered: set[Place] = set()
        while left:
            place = left[-1]
            if place in done:
                left.pop()
                continue
            if len(entered) > _MOST_NODES:
                raise Unknown(f"more than {_MOST_NODES} nodes before {wanted.name!r}")
            found = self._operation(place)
            missing = [each for each in found[1] if each not in done] if found is not None else []
            if missing and place not in entered:
                entered.add(place)
                left += missing
                continue
            if missing:
                raise Unknown(f"the node {place.name!r}, which is computed from itself")
            if found is not None:
                self._program.append((place, *found))
            done.add(place)
            left.pop()

    def _operation(self, place: Place) -> tuple[Callable[..., Array], tuple[Place, ...]] | None:
        """What a node computes, and from which places; None if it is a variable or constant, which is kept."""
        tracer = self._tracer
        node = tracer.node(place)
        if node is None or node.op not in (*_OPS, *VIEWS, "MatMul", "ConcatV2"):
            self._leaf(place)
            return None
        inputs, made = tracer.inputs(place.body, node), _OPS.get(node.op)
        if made is not None:
            count, function, read = *made, inputs
        elif node.op == "MatMul":
            count, function, read = 2, _product, inputs
            if node.attrs.get("transpose_a") or node.attrs.get("transpose_b"):
                raise Unknown(f"the node {node.name!r}, which transposes")
        else:
            function, read = self._shaped(node, inputs, place.output)
            count = len(read)
        if len(read) != count:
            raise Unknown(f"the node {node.name!r}, which has {len(inputs)} inputs")
        return function, tuple(self._origin(each) for each in read)

    def _origin(self, place: Place) -> Place:
        """Where a value comes from; for what is passed to functions and loops, from outside of them."""
        place = self._tracer.straight(place)
        node = self._tracer.node(place)
        if place in self._given or (node is not None and node.op in (*_OPS, "MatMul", "ConcatV2")):
            return place
        origins = self._tracer.origins(place)
        return next(iter(origins), place)  # they are alike: else it would not have been understood as a weight

    def _leaf(self, place: Place) -> None:
        stored, node = self._tracer.source(place), self._tracer.node(place)
        source = stored
        if self._tracer.variables is not None and node is not None and self._tracer.graph.constant(node) is not None:
            source = source._replace(read=lambda more: stored.read(""))  # it is no variable with an average
        self._leaves[place] = name = f"{place.body}:{place.name}:{place.output}"
        self.sources[name] = source

    def _shaped(self, node: Node, inputs: tuple[Place, ...], k: int) -> tuple[Callable[..., Array], tuple[Place, ...]]:
        tracer, attrs = self._tracer, node.attrs
        if node.op == "ConcatV2" and len(inputs) > 1:
            axis = tracer.number(inputs[-1])
            return lambda *arrays: np.concatenate(arrays, axis), inputs[:-1]
        if node.op == "Split" and len(inputs) == 2:
            axis, count = tracer.number(inputs[0]), int(attrs["num_split"])
            return lambda array: np.split(array, count, axis)[k], inputs[1:]
        if node.op == "StridedSlice":
            taken = strided(tracer, node, inputs)
            index = tuple(start or 0 if dropped else slice(start, stop) for start, stop, dropped in taken)
            return lambda array: array[index], inputs[:1]
        if node.op == "Squeeze":
            return lambda array: np.squeeze(array, tuple(squeezed(node, array.shape))), inputs[:1]
        if node.op == "Unpack":
            return lambda array: np.take(array, k, unpacked(node, array.ndim)), inputs[:1]
        raise Unknown(f"the node {node.name!r}, which is a {node.op} of {len(inputs)} inputs")

    @property
    def step(self) -> Step:
        return self._step

    def _step(self, sources: Weights, given: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """The attributes are in the graph. Inputs and cells beyond those given are zero."""
        known = {place: sources[name] for place, name in self._leaves.items()}
        for place, array, size in zip(self._given, (given, *state), self._sizes, strict=True):
            known[place] = np.pad(array, [(0, 0), (0, size - array.shape[1])])
        for place, function, read in self._program:
            known[place] = function(*(known[each] for each in read))
        return tuple(known[place][:, : state[0].shape[1]] for place in self._results)


def _product(left: Array, right: Array) -> Array:
    """Only with the rows that are not multiplied by zero: of a large kernel that is a part."""
    rows = np.flatnonzero(left.any(0))
    product: Array = left[:, rows] @ right[rows].astype(np.float64)
    return product
