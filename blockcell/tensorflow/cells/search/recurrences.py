"""Recurrences of a graph: cycles of nodes with weights, in loops and in unrolled steps with the same weights.

In come the products with weights; out go the nodes of each cycle, found by Tarjan's algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...graphs import Node
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import CLIP, graph_op
from ..weights.gate_sums import GateSums, NoMatch
from ..weights.weight_sources import WeightSource
from .block_ops import BLOCKS

_GATES = {"Sigmoid", "Tanh", "Softsign", "Relu6", "Erf", "Erfc"}  # what goes from one number to another


class WeightProduct(NamedTuple):
    """A MatMul with a weight on its right side."""

    body: str
    node: Node
    operand: Place
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
                operand, kernel = sums.input_pair(Place(body, node.name), "MatMul")
                if not node.attrs.get("transpose_b"):  # as in gradients
                    source = sums.weight_slice(kernel).source
                    products.append(WeightProduct(body, node, sums.reader.resolve(operand), source))
            except (NoMatch, UnknownValue):
                continue
    return products


def find_recurrences(reader: GraphReader, products: Sequence[WeightProduct]) -> list[Recurrence]:
    """Find where products with weights depend on what they gave before, in loops and unrolled steps."""
    recurrences_found = []
    bodies: dict[str, dict[str, WeightProduct]] = {}
    for product in products:
        bodies.setdefault(product.body, {})[product.node.name] = product
    for body, products_by_node in bodies.items():
        order = {name: k for k, name in enumerate(reader.bodies[body])}
        for names in _Dependencies(reader, body, products_by_node).cycles():
            nodes = tuple(reader.bodies[body][name] for name in sorted(names & order.keys(), key=order.__getitem__))
            recurrence = _recurrence(body, nodes, products_by_node)
            if recurrence is not None:
                recurrences_found.append(recurrence)
    return recurrences_found


def _recurrence(body: str, nodes: tuple[Node, ...], products: Mapping[str, WeightProduct]) -> Recurrence | None:
    """Return the recurrence of a cycle of nodes; None for one without products, or of gradients."""
    names = {graph_op(node).name for node in nodes}
    products_in_cycle = [products[node.name] for node in nodes if node.name in products]
    if not products_in_cycle or any(name.endswith("Grad") or name in BLOCKS for name in names):
        return None
    has_activation = any(graph_op(node).name in _GATES or graph_op(node).refusal == CLIP for node in nodes)
    kernels = tuple({product.kernel.name: product.kernel for product in products_in_cycle}.values())
    places = frozenset(Place(body, node.name) for node in nodes)
    return Recurrence(places, nodes, kernels, products_in_cycle[0], may_have_gates="Mul" in names and has_activation)


class _Dependencies:
    """What each node of a body is computed from; products with one weight count as one node."""

    def __init__(self, reader: GraphReader, body: str, products: Mapping[str, WeightProduct]) -> None:
        self._reader, self._body, self._nodes, self._roots = reader, body, reader.bodies[body], [*products]
        nodes_by_kernel: dict[str, list[str]] = {}
        for name, product in products.items():
            nodes_by_kernel.setdefault(product.kernel.name, []).append(name)
        self._alike: dict[str, list[str]] = {}
        for names in nodes_by_kernel.values():
            self._alike |= {name: [next_name] for name, next_name in zip(names, [*names[1:], names[0]], strict=True)}
        self._next: dict[str, str] = {}
        """Of an argument of a loop's body, what the loop passes for it the next time."""
        if any(caller.loop_body == body for caller in reader.callers.get(body, ())):
            function = reader.graph.functions[body]
            for argument, output in zip(function.inputs, function.outputs, strict=False):
                self._next[argument] = function.returned.get(output, "").partition(":")[0]

    def before(self, name: str) -> list[str]:
        node = self._nodes.get(name)
        if node is None:
            return [self._next[name]] if name in self._next else []
        try:
            inputs = [place.name for place in self._reader.inputs(self._body, node)]
        except UnknownValue:
            inputs = []
        return inputs + self._alike.get(name, [])

    def cycles(self) -> Iterator[set[str]]:
        """Yield the strongly connected components of what products depend on: Tarjan's algorithm, without recursion."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        on_stack: set[str] = set()

        def enter(name: str) -> tuple[str, Iterator[str]]:
            index[name] = low[name] = len(index)
            stack.append(name)
            on_stack.add(name)
            return name, iter(self.before(name))

        for root in self._roots:
            if root in index:
                continue
            open_ = [enter(root)]
            while open_:
                name, predecessors = open_[-1]
                predecessor = next(predecessors, None)
                if predecessor is not None:
                    if predecessor not in index:
                        open_.append(enter(predecessor))
                    elif predecessor in on_stack:
                        low[name] = min(low[name], index[predecessor])
                    continue
                open_.pop()
                if open_:
                    low[open_[-1][0]] = min(low[open_[-1][0]], low[name])
                if low[name] == index[name]:
                    component = set()
                    while name not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    if len(component) > 1:
                        yield component
