"""The nodes of a cell, one by one, in plain numpy and float64: what a graph computes, by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..formulas import sigmoid
from ..optable import Array
from .found import FLOATS, ROWS, State, Step, Weights
from .graphs import Node
from .sums import VIEWS, Sums, squeezed, strided, unpacked
from .trace import Place, Source, Unknown

_MOST_NODES = 300
_MOST_MADE = 2**20  # entries that all nodes together compute, besides four times those of the weights
_ELEMENTWISE: dict[str, tuple[int, Callable[..., Array]]] = {  # how many inputs they have, and what they compute
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
_MAKING = {*_ELEMENTWISE, "MatMul", "ConcatV2"}
Shape = tuple[int, ...]


class Body:
    """A cell's nodes, in the order in which they are computed.

    The shape of whatever they give is known before anything is computed: a node that TensorFlow would refuse, as its
    inputs do not fit together, is not understood.
    """

    def __init__(
        self, sums: Sums, x: Place, states: Sequence[Place], results: Sequence[Place], inputs: int, hidden: int
    ) -> None:
        """`inputs` and `hidden` are I and H.

        Raises
        ------
        Unknown
            A node is not understood.
        """
        self._sums, self._tracer = sums, sums.tracer
        self._sizes = [inputs, *[hidden] * len(states)]
        self._given = [self._tracer.straight(place) for place in (x, *states)]
        self._results = [self._tracer.straight(place) for place in results]
        self.sources: dict[str, Source] = {}
        """The variables and constants that the nodes read."""
        self._program: list[tuple[Place, Callable[..., Array], tuple[Place, ...]]] = []
        self._leaves: dict[Place, str] = {}
        self._shapes: dict[Place, Shape] = {
            place: (ROWS, size) for place, size in zip(self._given, self._sizes, strict=True)
        }
        self._made = 0
        for result in self._results:
            self._compile(result)
            if self._shapes[result] != (ROWS, hidden):
                shape = self._shapes[result]
                raise Unknown(f"the node {result.name!r}, which gives the shape {shape} for {ROWS} rows of {hidden}")
        self._refuse_cycles()
        if self._made > _MOST_MADE + 4 * sum(math.prod(source.shape) for source in self.sources.values()):
            raise Unknown(f"the nodes before {self._results[-1].name!r}, which give {self._made} numbers")

    def _compile(self, wanted: Place) -> None:
        """Node after node, each when its inputs are there."""
        left: list[Place] = [wanted]
        entered: set[Place] = set()
        while left:
            place = left[-1]
            if place in self._shapes:
                left.pop()
                continue
            if len(entered) > _MOST_NODES:
                raise Unknown(f"more than {_MOST_NODES} nodes before {wanted.name!r}")
            node = self._tracer.node(place)
            if node is None or node.op not in (*_MAKING, *VIEWS):
                self._leaf(place)
                continue
            read = self._read(node, self._tracer.inputs(place.body, node))
            missing = [each for each in read if each not in self._shapes]
            if missing and place not in entered:
                entered.add(place)
                left += missing
                continue
            if missing:
                raise Unknown(f"the node {place.name!r}, which is computed from itself")
            function, self._shapes[place] = self._operation(place, node, [self._shapes[each] for each in read])
            self._made += math.prod(self._shapes[place]) if node.op in _MAKING else 0
            self._program.append((place, function, read))
            left.pop()

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
            left, seen = [*self._before(given)], set[Place]()
            while left:
                self._tracer.count()
                here = left.pop()
                if here == given or here._replace(output=0) in own:
                    raise Unknown(f"the node {here.name!r}, which is computed from itself")
                if here not in seen:
                    seen.add(here)
                    left += self._before(here)

    def _before(self, place: Place) -> Sequence[Place]:
        """What is computed before a place, within a step of its loop."""
        try:
            node = self._tracer.node(place)
            if node is None or node.op in ("Merge", "RefMerge"):
                return ()
            return self._tracer.inputs(place.body, node)
        except Unknown:  # it is not in the file
            return ()

    def _read(self, node: Node, inputs: tuple[Place, ...]) -> tuple[Place, ...]:
        """The arrays that a node is given, without the numbers that say what it does with them."""
        count = {"MatMul": 2, "Split": 2, "StridedSlice": 4, "Squeeze": 1, "Unpack": 1}.get(node.op)
        if node.op in _ELEMENTWISE:
            count, _ = _ELEMENTWISE[node.op]
        if len(inputs) != count and not (count is None and len(inputs) > 1):
            raise Unknown(f"the node {node.name!r}, which is a {node.op} of {len(inputs)} inputs")
        arrays = {"ConcatV2": inputs[:-1], "Split": inputs[1:], "StridedSlice": inputs[:1]}.get(node.op, inputs)
        return tuple(self._origin(each) for each in arrays)

    def _origin(self, place: Place) -> Place:
        """Where a value comes from; for what is passed to functions and loops, from outside of them."""
        place = self._tracer.straight(place)
        node = self._tracer.node(place)
        if place in self._given or (node is not None and node.op in _MAKING):
            return place
        origins = self._tracer.origins(place)
        if len(origins) > 1:
            self._sums.piece(place)  # they are alike, or this says that they are not
        return next(iter(origins), place)

    def _leaf(self, place: Place) -> None:
        """A variable or constant, which is kept."""
        stored, node = self._tracer.source(place), self._tracer.node(place)
        if stored.dtype not in FLOATS:
            raise Unknown(f"{stored.name!r}, which is of {stored.dtype}")
        source = stored
        if self._tracer.variables is not None and node is not None and self._tracer.graph.constant(node) is not None:
            source = source._replace(read=lambda more: stored.read(""))  # it is no variable with an average
        self._leaves[place] = name = f"{place.body}:{place.name}:{place.output}"
        self.sources[name] = source
        self._shapes[place] = source.shape

    def _operation(self, place: Place, node: Node, shapes: Sequence[Shape]) -> tuple[Callable[..., Array], Shape]:
        """What a node computes from arrays of these shapes, and the shape of that."""
        tracer, k, first = self._tracer, place.output, shapes[0]
        inputs = tracer.inputs(place.body, node)
        if node.op in _ELEMENTWISE:
            return _ELEMENTWISE[node.op][1], _together(node, shapes)
        if node.op == "MatMul":
            if node.attrs.get("transpose_a") or node.attrs.get("transpose_b"):
                raise Unknown(f"the node {node.name!r}, which transposes")
            if len(first) != 2 or len(shapes[1]) != 2 or first != (ROWS, shapes[1][0]):
                raise _unfit(node, shapes)
            return _product, (ROWS, shapes[1][1])
        if node.op == "ConcatV2":
            axis = _axis(node, tracer.number(inputs[-1]), len(first))
            beside = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
            if len(beside) > 1 or any(len(shape) != len(first) for shape in shapes):
                raise _unfit(node, shapes)
            size = sum(shape[axis] for shape in shapes)
            return lambda *arrays: np.concatenate(arrays, axis), (*first[:axis], size, *first[axis + 1 :])
        index = self._index(node, inputs, first, k)
        parts = [*index, *[slice(None)] * (len(first) - len(index))]
        taken = [len(range(size)[part]) for size, part in zip(first, parts, strict=True) if isinstance(part, slice)]
        return lambda array: array[index], tuple(taken)

    def _index(self, node: Node, inputs: tuple[Place, ...], shape: Shape, k: int) -> tuple[int | slice, ...]:
        """The part that a view takes of an array."""
        tracer = self._tracer
        if node.op == "StridedSlice":
            taken = strided(tracer, node, inputs)
            fits = len(taken) <= len(shape)
            for size, (start, _, dropped) in zip(shape, taken, strict=False):
                fits = fits and not (dropped and not -size <= (start or 0) < size)
            if not fits:
                raise Unknown(f"the node {node.name!r}, which takes a part of the shape {shape} that it does not have")
            return tuple(start or 0 if dropped else slice(start, stop) for start, stop, dropped in taken)
        if node.op == "Squeeze":
            axes = squeezed(node, shape)
            if any(shape[axis] != 1 for axis in axes):
                raise Unknown(f"the node {node.name!r}, which drops the axes {axes} of the shape {shape}")
            return tuple(0 if axis in axes else slice(None) for axis in range(len(shape)))
        if node.op == "Unpack":
            axis, count = unpacked(node, len(shape)), shape[unpacked(node, len(shape))]
            size, said = 1, node.attrs.get("num")
        else:
            axis, said = _axis(node, tracer.number(inputs[0]), len(shape)), node.attrs.get("num_split")
            count = said if isinstance(said, int) and said > 0 else 1
            size = shape[axis] // count
        if said != count or not 0 <= k < count or size * count != shape[axis]:
            raise Unknown(f"part {k} of the node {node.name!r}, which makes {said} of the shape {shape}")
        return *[slice(None)] * axis, k if node.op == "Unpack" else slice(k * size, (k + 1) * size)

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


def _together(node: Node, shapes: Sequence[Shape]) -> Shape:
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


def _axis(node: Node, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise Unknown(f"the node {node.name!r}, which is a {node.op} along the axis {axis} of {rank}")
    return axis % rank


def _unfit(node: Node, shapes: Sequence[Shape]) -> Unknown:
    found = " and ".join(map(str, shapes[:4]))
    return Unknown(f"the node {node.name!r}, which is a {node.op} of the shapes {found}")


def _product(left: Array, right: Array) -> Array:
    """Only with the rows that are not multiplied by zero: of a large kernel that is a part."""
    rows = np.flatnonzero(left.any(0))
    product: Array = left[:, rows] @ right[rows].astype(np.float64)
    return product
