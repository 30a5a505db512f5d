"""Evaluation of the nodes of a cell, one by one, in plain numpy and float64, without any knowledge of cells.

In come the places of x, states and results; out goes a program that computes a step from arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ....optable import Array
from ...graphs import Node
from ..graph.array_slices import checked_axis, shape_of, slice_index
from ..graph.graph_reader import FLOATS, Place, UnknownValue
from ..graph.op_table import graph_op
from ..weights.weight_slices import WeightSource
from ..weights.weight_sources import WeightSources
from .layer_check import ROWS, State, Weights

_MOST_NODES = 300
_MOST_MADE = 2**20  # entries that all nodes together compute, besides four times those of the weights
Shape = tuple[int, ...]


class StepProgram:
    """The nodes of a cell's step, in the order in which they are computed.

    All shapes are known before anything is computed. A node whose inputs numpy cannot broadcast, multiply or
    concatenate is not understood.
    """

    def __init__(
        self, weights: WeightSources, x: Place, states: Sequence[Place], results: Sequence[Place], sizes: Sequence[int]
    ) -> None:
        """Compile the nodes; `sizes` are I and the sizes of the states.

        Raises
        ------
        UnknownValue
            A node is not understood.
        """
        self._weights, self._reader, self._sizes = weights, weights.reader, sizes
        self._arguments = [self._reader.resolve(place) for place in (x, *states)]
        self._results = [self._reader.resolve(place) for place in results]
        self.sources: dict[str, WeightSource] = {}
        """The variables and constants that the nodes read."""
        self._program: list[tuple[Place, Callable[..., Array], tuple[Place, ...]]] = []
        self._leaves: dict[Place, str] = {}
        self._shapes: dict[Place, Shape] = {}
        self._shapes |= {place: (ROWS, size) for place, size in zip(self._arguments, sizes, strict=True)}
        self._entry_count = 0
        for result, size in zip(self._results, sizes[1:], strict=True):
            self._compile(result)
            if self._shapes[result] != (ROWS, size):
                shape = self._shapes[result]
                raise UnknownValue(f"the node {result.name!r}, which gives the shape {shape} for {ROWS} rows of {size}")
        self._refuse_cycles()
        if self._entry_count > _MOST_MADE + 4 * sum(math.prod(source.shape) for source in self.sources.values()):
            raise UnknownValue(f"the nodes before {self._results[-1].name!r}, which give {self._entry_count} numbers")

    def _compile(self, result: Place) -> None:
        """Compile the nodes before a result, each after its operands."""
        waiting: list[Place] = [result]
        entered: set[Place] = set()
        while waiting:
            place = waiting[-1]
            if place in self._shapes:
                waiting.pop()
                continue
            if len(entered) > _MOST_NODES:
                raise UnknownValue(f"more than {_MOST_NODES} nodes before {result.name!r}")
            node = self._reader.node(place)
            if node is None or not (_computes(node) or graph_op(node).view):
                self._add_weight(place)
                continue
            operands = tuple(map(self._origin, self._reader.operands(place)))
            missing = [operand for operand in operands if operand not in self._shapes]
            if missing and place not in entered:
                entered.add(place)
                waiting += missing
                continue
            if missing:
                raise UnknownValue(f"the node {place.name!r}, which is computed from itself")
            shapes = [self._shapes[operand] for operand in operands]
            function, self._shapes[place] = self._operation(place, node, shapes)
            self._entry_count += math.prod(self._shapes[place]) if _computes(node) else 0
            self._program.append((place, function, operands))
            waiting.pop()

    def _refuse_cycles(self) -> None:
        """Refuse a step whose x or states are computed from the step itself, and not from the step before.

        Unrolled steps may share what they compute of weights alone.
        """
        computed = set(self._arguments)
        for place, _, operands in self._program:
            if not computed.isdisjoint(operands):
                computed.add(place)
        own = {place._replace(output=0) for place in computed.difference(self._arguments)}
        for argument in self._arguments:
            for place in self._reader.walk(self._reader.inputs_in_step(argument), self._reader.inputs_in_step):
                if place == argument or place._replace(output=0) in own:
                    raise UnknownValue(f"the node {place.name!r}, which is computed from itself")

    def _origin(self, place: Place) -> Place:
        """Return where a value comes from, also from outside of functions and loops."""
        place = self._reader.resolve(place)
        node = self._reader.node(place)
        if place in self._arguments or (node is not None and _computes(node)):
            return place
        origins = self._reader.origins(place)
        if len(origins) > 1:
            self._weights.slice(place)  # they are alike, or this says that they are not
        return next(iter(origins), place)

    def _add_weight(self, place: Place) -> None:
        """Add a variable or constant to the weights that the program reads."""
        source = stored = self._weights.source(place)
        if stored.dtype not in FLOATS:
            raise UnknownValue(f"{stored.name!r}, which is of {stored.dtype}")
        if self._weights.variables is not None and self._reader.constant(place) is not None:
            source = source._replace(read=lambda suffix: stored.read(""))  # it is no variable with an average
        self._leaves[place] = name = f"{place.body}:{place.name}:{place.output}"
        self.sources[name] = source
        self._shapes[place] = source.shape

    def _operation(self, place: Place, node: Node, shapes: Sequence[Shape]) -> tuple[Callable[..., Array], Shape]:
        """Return the function that a node computes of arrays of these shapes, and the shape of the result."""
        first, op = shapes[0], graph_op(node)
        if op.compute is not None:
            options = {name: node.attrs.get(name, default) for name, default in op.options.items()}
            if any(not isinstance(value, float) for value in options.values()):
                raise UnknownValue(f"the node {node.name!r}, whose attributes are {options}")
            try:
                return partial(op.compute, **options) if options else op.compute, np.broadcast_shapes(*shapes)
            except ValueError:
                raise _shape_mismatch(node, shapes) from None
        if node.op == "MatMul":
            if len(first) != 2 or len(shapes[1]) != 2 or first != (ROWS, shapes[1][0]):
                raise _shape_mismatch(node, shapes)
            return _multiply, (ROWS, shapes[1][1])
        if node.op == "ConcatV2":
            axis = self._reader.constant_integer(self._reader.inputs_at(place)[-1])
            axis = checked_axis(self._reader, place, axis, len(first))
            beside = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
            if len(beside) > 1 or any(len(shape) != len(first) for shape in shapes):
                raise _shape_mismatch(node, shapes)
            size = sum(shape[axis] for shape in shapes)
            return lambda *arrays: np.concatenate(arrays, axis), (*first[:axis], size, *first[axis + 1 :])
        index = slice_index(self._reader, place, first)
        return lambda array: array[index], shape_of(first, index)

    def step(self, sources: Weights, x: Array, state: State, attributes: Mapping[str, Any]) -> State:
        """Compute a step; further inputs and units are zero. The graph has the attributes."""
        values = {place: sources[name] for place, name in self._leaves.items()}
        for place, array, size in zip(self._arguments, (x, *state), self._sizes, strict=True):
            values[place] = np.pad(array, [(0, 0), (0, size - array.shape[1])])
        for place, function, operands in self._program:
            values[place] = function(*(values[array] for array in operands))
        return tuple(values[place][:, : array.shape[1]] for place, array in zip(self._results, state, strict=True))


def _computes(node: Node) -> bool:
    """Return whether a node computes new numbers or concatenates arrays."""
    return graph_op(node).compute is not None or node.op in ("MatMul", "ConcatV2")


def _shape_mismatch(node: Node, shapes: Sequence[Shape]) -> UnknownValue:
    listed = " and ".join(map(str, shapes[:4]))
    return UnknownValue(f"the node {node.name!r}, which is a {node.op} of the shapes {listed}")


def _multiply(array: Array, kernel: Array) -> Array:
    """Multiply, only with the rows of the kernel that are not multiplied by zero."""
    rows = np.flatnonzero(array.any(0))
    product: Array = array[:, rows] @ kernel[rows].astype(np.float64)
    return product
