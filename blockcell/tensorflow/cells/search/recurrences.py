"""Recurrences of a graph: nodes that are computed from what they gave before, with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...graphs import Node
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import CLIP, op_of
from ..weights.gate_sums import Other, Sums
from ..weights.weight_sources import Source
from .block_ops import BLOCKS

_GATES = {"Sigmoid", "Tanh", "Softsign", "Relu6", "Erf", "Erfc"}  # what goes from one number to another


class Product(NamedTuple):
    """A product with a weight."""

    body: str
    node: Node
    operand: Place
    kernel: Source

    @property
    def place(self) -> Place:
        return Place(self.body, self.node.name)


class Recurrence(NamedTuple):
    """Nodes that are computed from what they gave before, with weights."""

    places: frozenset[Place]
    nodes: tuple[Node, ...]
    """In the graph's order."""
    kernels: tuple[Source, ...]
    product: Product
    gated: bool
    """Whether they may be a cell with gates."""


def products_of(sums: Sums) -> list[Product]:
    """All products with a weight."""
    found = []
    for body, node in sums.reader.all_nodes():
        if node.op == "MatMul":
            try:
                operand, kernel = sums.pair(Place(body, node.name), "MatMul")
                if not node.attrs.get("transpose_b"):  # as in gradients
                    found.append(Product(body, node, sums.reader.straight(operand), sums.piece(kernel).source))
            except (Other, Unknown):
                continue
    return found


def recurrences(reader: Reader, products: Sequence[Product]) -> list[Recurrence]:
    """Where products with weights depend on what they gave before: in loops, and in steps with the same weights."""
    found = []
    bodies: dict[str, dict[str, Product]] = {}
    for product in products:
        bodies.setdefault(product.body, {})[product.node.name] = product
    for body, inside in bodies.items():
        order = {name: k for k, name in enumerate(reader.bodies[body])}
        for names in _Dependencies(reader, body, inside).cycles():
            nodes = tuple(reader.bodies[body][name] for name in sorted(names & order.keys(), key=order.__getitem__))
            recurrence = _recurrence(body, nodes, inside)
            if recurrence is not None:
                found.append(recurrence)
    return found


def _recurrence(body: str, nodes: tuple[Node, ...], products: Mapping[str, Product]) -> Recurrence | None:
    """If it is not one of gradients."""
    names = {op_of(node).name for node in nodes}
    inside = [products[node.name] for node in nodes if node.name in products]
    if not inside or any(name.endswith("Grad") or name in BLOCKS for name in names):
        return None
    gated = "Mul" in names and any(op_of(node).name in _GATES or op_of(node).shows == CLIP for node in nodes)
    kernels = tuple({product.kernel.name: product.kernel for product in inside}.values())
    return Recurrence(frozenset(Place(body, node.name) for node in nodes), nodes, kernels, inside[0], gated)


class _Dependencies:
    """What each node of a body is computed from; products with one weight count as one node."""

    def __init__(self, reader: Reader, body: str, products: Mapping[str, Product]) -> None:
        self._reader, self._body, self._nodes, self._roots = reader, body, reader.bodies[body], [*products]
        alike: dict[str, list[str]] = {}
        for name, product in products.items():
            alike.setdefault(product.kernel.name, []).append(name)
        self._alike: dict[str, list[str]] = {}
        for names in alike.values():
            self._alike |= {name: [other] for name, other in zip(names, [*names[1:], names[0]], strict=True)}
        self._next: dict[str, str] = {}
        """Of an argument of a loop's body, what the loop passes for it the next time."""
        if any(caller.carried == body for caller in reader.callers.get(body, ())):
            function = reader.graph.functions[body]
            for argument, output in zip(function.inputs, function.outputs, strict=False):
                self._next[argument] = function.returned.get(output, "").partition(":")[0]

    def before(self, name: str) -> list[str]:
        node = self._nodes.get(name)
        if node is None:
            return [self._next[name]] if name in self._next else []
        try:
            found = [place.name for place in self._reader.inputs(self._body, node)]
        except Unknown:
            found = []
        return found + self._alike.get(name, [])

    def cycles(self) -> Iterator[set[str]]:
        """The strongly connected components of what products depend on, by Tarjan's algorithm without recursion."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        on_stack: set[str] = set()
        for root in self._roots:
            if root in index:
                continue
            open_ = [(root, iter(self._enter(root, index, low, stack, on_stack)))]
            while open_:
                name, before = open_[-1]
                other = next(before, None)
                if other is not None:
                    if other not in index:
                        open_.append((other, iter(self._enter(other, index, low, stack, on_stack))))
                    elif other in on_stack:
                        low[name] = min(low[name], index[other])
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

    def _enter(
        self, name: str, index: dict[str, int], low: dict[str, int], stack: list[str], on_stack: set[str]
    ) -> list[str]:
        index[name] = low[name] = len(index)
        stack.append(name)
        on_stack.add(name)
        return self.before(name)
