"""Recurrences of a graph: cycles of nodes with weights, in loops and in unrolled steps with the same weights.

In come the products with weights; out go the nodes of each cycle, found by Tarjan's algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...graphs import Node
from ..graph.dependences import Dependences
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import CLIP, graph_op
from ..weights.gate_sums import GateSums, NoMatch
from ..weights.weight_sources import WeightSource
from .block_ops import BLOCKS

_GATES = {"Sigmoid", "Tanh", "Softsign", "Relu6", "Elu", "Erf", "Erfc"}  # what goes from one number to another


class WeightProduct(NamedTuple):
    """A MatMul with a weight on its right side."""

    body: str
    node: Node
    kernel: WeightSource

    @property
    def place(self) -> Place:
        return Place(self.body, self.node.name)


class Recurrence(NamedTuple):
    """Nodes with weights that are computed from what they gave before."""

    places: frozenset[Place]
    nodes: tuple[Node, ...]
    """In the graph's order."""
    kernels: tuple[WeightSource, ...]
    product: WeightProduct
    may_have_gates: bool
    """Whether they may be a cell with gates: they have a Mul, and an activation or a clip."""


def find_weight_products(sums: GateSums) -> list[WeightProduct]:
    """List all products with weights."""
    products = []
    for body, node in sums.reader.all_nodes():
        if node.op == "MatMul":
            try:
                _, kernel = sums.input_pair(Place(body, node.name), "MatMul")
                if not node.attrs.get("transpose_b"):  # as in gradients
                    products.append(WeightProduct(body, node, sums.weight_slice(kernel).source))
            except (NoMatch, UnknownValue):
                continue
    return products


def find_recurrences(
    reader: GraphReader, dependences: Dependences, products: Sequence[WeightProduct]
) -> list[Recurrence]:
    """Find where products with weights depend on what they gave before, in loops and unrolled steps."""
    product_by_place = {product.place: product for product in products}
    numbers = {Place(body, node.name): k for k, (body, node) in enumerate(reader.all_nodes())}
    alike: dict[tuple[str, str], list[Place]] = {}
    for product in products:
        alike.setdefault((product.body, product.kernel.name), []).append(product.place)
    # products with one weight count as one node: each of them is before another one
    before = {place: [group[k - 1]] for group in alike.values() for k, place in enumerate(group)}
    recurrences = []
    for cycle in _find_cycles(product_by_place, lambda place: dependences.sources(place) + before.get(place, [])):
        places = sorted({place._replace(output=0) for place in cycle} & numbers.keys(), key=numbers.__getitem__)
        nodes = [reader.bodies[place.body][place.name] for place in places]
        products_in_cycle = [product_by_place[place] for place in places if place in product_by_place]
        recurrence = _recurrence(places, nodes, products_in_cycle)
        recurrences += [] if recurrence is None else [recurrence]
    return recurrences


def _recurrence(places: Sequence[Place], nodes: Sequence[Node], products: Sequence[WeightProduct]) -> Recurrence | None:
    """Return the recurrence of a cycle of nodes; None for one without products, or of gradients."""
    names = {graph_op(node).name for node in nodes}
    if not products or any(name.endswith("Grad") or name in BLOCKS for name in names):
        return None
    has_activation = any(graph_op(node).name in _GATES or graph_op(node).refusal == CLIP for node in nodes)
    kernels = tuple({product.kernel.name: product.kernel for product in products}.values())
    return Recurrence(
        frozenset(places), tuple(nodes), kernels, products[0], may_have_gates="Mul" in names and has_activation
    )


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
