"""The nodes of a cell, one by one, in plain numpy and float64: what a graph computes, by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ....optable import Array
from ...graphs import Node
from ..graph.array_slices import axis_of, index_of, shape_of
from ..graph.graph_reader import Place, Unknown
from ..graph.op_table import op_of
from ..weights.gate_sums import Sums
from ..weights.weight_sources import Source
from .found_cell import FLOATS, Step
from .layer_check import ROWS, State, Weights

_MOST_NODES = 300
_MOST_MADE = 2**20  # entries that all nodes together compute, besides four times those of the weights
Shape = tuple[int, ...]


class Body:
    """A cell's nodes, in the order in which they are computed.

    The shape of whatever they give is known before anything is computed: a node that TensorFlow would refuse, as its
    inputs do not fit together, is not understood.
    """

    def __init__(
        self, sums: Sums, x: Place, states: Sequence[Place], results: Sequence[Place], sizes: Sequence[int]
    ) -> None:
        """`sizes` are I and those of the states.

        Raises
        ------
        Unknown
            A node is not understood.
        """
        self._sums, self._reader = sums, sums.reader
        self._sizes = sizes
        self._given = [self._reader.straight(place) for place in (x, *states)]
        self._results = [self._reader.straight(place) for place in results]
        self.sources: dict[str, Source] = {}
        """The variables and constants that the nodes read."""
        self._program: list[tuple[Place, Callable[..., Array], tuple[Place, ...]]] = []
        self._leaves: dict[Place, str] = {}
        self._shapes: dict[Place, Shape] = {
            place: (ROWS, size) for place, size in zip(self._given, self._sizes, strict=True)
        }
        self._made = 0
        for result, size in zip(self._results, sizes[1:], strict=True):
            self._compile(result)
            if self._shapes[result] != (ROWS, size):
                shape = self._shapes[result]
                raise Unknown(f"the node {result.name!r}, which gives the shape {shape} for {ROWS} rows of {size}")
        self._refuse_cycles()
        if self._made > _MOST_MADE + 4 * sum(math.prod(source.shape) for source in self.sources.values()):
            raise Unknown(f"the nodes before {self._results[-1].name!r}, which give {self._made} numbers")

    def _compile(self, wanted: Place) -> None:
        """Node after node, each when its inputs are there."""
        waiting: list[Place] = [wanted]
        entered: set[Place] = set()
        while waiting:
            place = waiting[-1]
            if place in self._shapes:
                waiting.pop()
                continue
            if len(entered) > _MOST_NODES:
                raise Unknown(f"more than {_MOST_NODES} nodes before {wanted.name!r}")
            node = self._reader.node(place)
            if node is None or not (_makes(node) or op_of(node).view):
                self._leaf(place)
                continue
            read = self._read(node, self._reader.inputs(place.body, node))
            missing = [each for each in read if each not in self._shapes]
            if missing and place not in entered:
                entered.add(place)
                waiting += missing
                continue
            if missing:
                raise Unknown(f"the node {place.name!r}, which is computed from itself")
            function, self._shapes[place] = self._operation(place, node, [self._shapes[each] for each in read])
            self._made += math.prod(self._shapes[place]) if _makes(node) else 0
            self._program.append((place, function, read))
            waiting.pop()

    def _refuse_cycles(self) -> None:
        """What the step is given may be computed from the step before, and from nothing of the step itself.

        What a step makes of weights alone is not its own: steps that are written out may share it.
        """
        computed = set(self._given)
        for place, _, read in self._program:
            if not computed.isdisjoint(read):
                computed.add(place)
        own = {place._replace(output=0) for place in computed.difference(self._given)}
        for given in self._given:
            for here in self._reader.walk(self._before(given), self._before):
                if here == given or here._replace(output=0) in own:
                    raise Unknown(f"the node {here.name!r}, which is computed from itself")

    def _before(self, place: Place) -> Sequence[Place]:
        """What is computed before a place, within a step of its loop."""
        try:
            return () if self._reader.op(place).name == "Merge" else self._reader.given(place)
        except Unknown:  # it is not in the file
            return ()

    def _read(self, node: Node, inputs: tuple[Place, ...]) -> tuple[Place, ...]:
        """The arrays that a node is given, without the numbers that say what it does with them."""
        op = op_of(node)
        if len(inputs) != op.inputs and not (op.inputs is None and len(inputs) > 1):
            raise Unknown(f"the node {node.name!r}, which is a {node.op} of {len(inputs)} inputs")
        return tuple(self._origin(each) for each in inputs[op.arrays])

    def _origin(self, place: Place) -> Place:
        """Where a value comes from; for what is passed to functions and loops, from outside of them."""
        place = self._reader.straight(place)
        node = self._reader.node(place)
        if place in self._given or (node is not None and _makes(node)):
            return place
        origins = self._reader.origins(place)
        if len(origins) > 1:
            self._sums.piece(place)  # they are alike, or this says that they are not
        return next(iter(origins), place)

    def _leaf(self, place: Place) -> None:
        """A variable or constant, which is kept."""
        stored, node = self._sums.sources.source(place), self._reader.node(place)
        if stored.dtype not in FLOATS:
            raise Unknown(f"{stored.name!r}, which is of {stored.dtype}")
        source = stored
        if (
            self._sums.sources.variables is not None
            and node is not None
            and self._reader.graph.constant(node) is not None
        ):
            source = source._replace(read=lambda more: stored.read(""))  # it is no variable with an average
        self._leaves[place] = name = f"{place.body}:{place.name}:{place.output}"
        self.sources[name] = source
        self._shapes[place] = source.shape

    def _operation(self, place: Place, node: Node, shapes: Sequence[Shape]) -> tuple[Callable[..., Array], Shape]:
        """What a node computes from arrays of these shapes, and the shape of that."""
        first, op = shapes[0], op_of(node)
        if op.compute is not None:
            options = {name: node.attrs.get(name, default) for name, default in op.options.items()}
            if any(not isinstance(value, float) for value in options.values()):
                raise Unknown(f"the node {node.name!r}, whose attributes are {options}")
            return partial(op.compute, **options) if options else op.compute, _broadcast(node, shapes)
        if node.op == "MatMul":
            if node.attrs.get("transpose_a") or node.attrs.get("transpose_b"):
                raise Unknown(f"the node {node.name!r}, which transposes")
            if len(first) != 2 or len(shapes[1]) != 2 or first != (ROWS, shapes[1][0]):
                raise _unfit(node, shapes)
            return _product, (ROWS, shapes[1][1])
        if node.op == "ConcatV2":
            axis = axis_of(node, self._reader.number(self._reader.given(place)[-1]), len(first))
            beside = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
            if len(beside) > 1 or any(len(shape) != len(first) for shape in shapes):
                raise _unfit(node, shapes)
            size = sum(shape[axis] for shape in shapes)
            return lambda *arrays: np.concatenate(arrays, axis), (*first[:axis], size, *first[axis + 1 :])
        index = index_of(self._reader, place, first)
        return lambda array: array[index], shape_of(first, index)

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
        return tuple(known[place][:, : each.shape[1]] for place, each in zip(self._results, state, strict=True))


def _makes(node: Node) -> bool:
    """Whether a node makes other numbers than it is given, or puts arrays together."""
    return op_of(node).compute is not None or node.op in ("MatMul", "ConcatV2")


def _broadcast(node: Node, shapes: Sequence[Shape]) -> Shape:
    """The shape of what is computed entry by entry."""
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise _unfit(node, shapes) from None
    bias = node.op == "BiasAdd"
    if (bias or node.op == "ClipByValue") and shape != shapes[0]:
        raise _unfit(node, shapes)
    if bias and (shapes[1] != shapes[0][-1:] or (node.attrs.get("data_format") == "NCHW" and len(shape) > 2)):
        raise _unfit(node, shapes)
    return shape


def _unfit(node: Node, shapes: Sequence[Shape]) -> Unknown:
    found = " and ".join(map(str, shapes[:4]))
    return Unknown(f"the node {node.name!r}, which is a {node.op} of the shapes {found}")


def _product(array: Array, kernel: Array) -> Array:
    """Only with the rows that are not multiplied by zero: of a large kernel that is a part."""
    rows = np.flatnonzero(array.any(0))
    product: Array = array[:, rows] @ kernel[rows].astype(np.float64)
    return product
