"""Recurrences of a graph: cycles of nodes with weights, in loops and in unrolled steps with the same weights.

In come the products with weights; out go the nodes of each cycle, found by Tarjan's algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...graphs import Node
from ..graph.dependences import Dependences
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import CLIP, graph_op
from ..weights.gate_sums import GateSums, NoMatch
from ..weights.weight_slices import WeightSource
from .block_ops import BLOCKS

_GATES = {"Sigmoid", "Tanh", "Softsign", "Relu6", "Elu", "Erf", "Erfc"}  # what goes from one number to another

WeightProducts = Mapping[Place, WeightSource]
"""The products with a weight on their right side, and these weights."""


class Recurrence(NamedTuple):
    """Nodes with weights that are computed from what they gave before."""

    nodes: Mapping[Place, Node]
    """In the graph's order."""
    kernels: tuple[WeightSource, ...]
    product: Place
    """Its first product with a weight."""
    may_have_gates: bool
    """Whether they may be a cell with gates: they have a Mul, and an activation or a clip."""


def find_weight_products(sums: GateSums) -> WeightProducts:
    """Find all products with weights."""
    products: dict[Place, WeightSource] = {}
    for body, node in sums.reader.all_nodes():
        if node.op == "MatMul":
            with suppress(NoMatch, UnknownValue):
                _, kernel = sums.input_pair(Place(body, node.name), "MatMul")
                if not node.attrs.get("transpose_b"):  # as in gradients
                    products[Place(body, node.name)] = sums.sources.slice(kernel).source
    return products


def find_recurrences(reader: GraphReader, dependences: Dependences, products: WeightProducts) -> list[Recurrence]:
    """Find where products with weights depend on what they gave before, in loops and unrolled steps."""
    numbers = {Place(body, node.name): k for k, (body, node) in enumerate(reader.all_nodes())}
    alike: dict[tuple[str, str], list[Place]] = {}
    for place, kernel in products.items():
        alike.setdefault((place.body, kernel.name), []).append(place)
    # products with one weight count as one node: each of them is before another one
    before = {place: [group[k - 1]] for group in alike.values() for k, place in enumerate(group)}
    recurrences = []
    for cycle in _find_cycles(products, lambda place: dependences.sources(place) + before.get(place, [])):
        places = sorted({place._replace(output=0) for place in cycle} & numbers.keys(), key=numbers.__getitem__)
        nodes = {place: reader.bodies[place.body][place.name] for place in places}
        recurrence = _recurrence(nodes, {place: products[place] for place in places if place in products})
        recurrences += [] if recurrence is None else [recurrence]
    return recurrences


def _recurrence(nodes: Mapping[Place, Node], products: WeightProducts) -> Recurrence | None:
    """Return the recurrence of a cycle of nodes; None for one without products, or of gradients."""
    names = {graph_op(node).name for node in nodes.values()}
    if not products or any(name.endswith("Grad") or name in BLOCKS for name in names):
        return None
    has_activation = any(graph_op(node).name in _GATES or graph_op(node).refusal == CLIP for node in nodes.values())
    kernels = tuple({kernel.name: kernel for kernel in products.values()}.values())
    may_have_gates = "Mul" in names and has_activation
    return Recurrence(nodes, kernels, next(iter(products)), may_have_gates)


def _find_cycles(roots: Iterable[Place], before: Callable[[Place], Sequence[Place]]) -> Iterator[set[Place]]:
    """Yield the strongly connected components of what places depend on: Tarjan's algorithm, without recursion."""
    index: dict[Place, int] = {}
    low: dict[Place, int] = {}
    stack: list[Place] = []
    on_stack: set[Place] = set()

    def enter(place: Place) -> tuple[Place, Iterator[Place]]:
        index[place] = low[place] = len(index)
        stack.append(place)
        on_stack.add(place)
        return place, iter(before(place))

    for root in roots:
        if root in index:
            continue
        open_ = [enter(root)]
        while open_:
            place, predecessors = open_[-1]
            predecessor = next(predecessors, None)
            if predecessor is not None:
                if predecessor not in index:
                    open_.append(enter(predecessor))
                elif predecessor in on_stack:
                    low[place] = min(low[place], index[predecessor])
                continue
            open_.pop()
            if open_:
                low[open_[-1][0]] = min(low[open_[-1][0]], low[place])
            if low[place] == index[place]:
                component = set()
                while place not in component:
                    component.add(stack.pop())
                on_stack -= component
                if len(component) > 1:
                    yield component
