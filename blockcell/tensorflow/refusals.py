"""What is meant as a cell and is none that a layer computes: where it is, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from .blocks import BLOCKS
from .graphs import Node
from .sums import Other, Sums
from .trace import Place, Source, Tracer, Unknown

_CELL = re.compile(r"\A(lstm|gru)|(lstm|gru)\w*_cell(_\d+)?\Z", re.IGNORECASE)
_NORMAL = re.compile(r"layer_?norm|/(gamma|beta)\Z", re.IGNORECASE)
_MOST_BEFORE = 200  # nodes
_MOST_AROUND = 4  # scopes around a weight
_PLAIN = {
    "Add", "AddV2", "BiasAdd", "Sub", "Mul", "Sigmoid", "Tanh", "MatMul", "ConcatV2", "Split", "StridedSlice",
    "Identity", "Snapshot", "Enter", "RefEnter", "Exit", "Switch", "RefSwitch", "Merge", "RefMerge", "NextIteration",
    "RefNextIteration", "Select", "SelectV2", "StopGradient", "EnsureShape", "Cast", "LoopCond", "",
}  # fmt: skip
_NORMALIZES = {"Rsqrt", "SquaredDifference", "Mean", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
_RANDOM = {"RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2", "StatelessRandomNormalV2"}
ACTIVATIONS = {
    "Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Softsign", "Softplus", "Softmax", "Erf", "Erfc", "Exp", "Sin", "Abs",
}  # fmt: skip
CLIPS = {"ClipByValue", "Minimum", "Maximum"}


class Product(NamedTuple):
    """A product with a weight."""

    body: str
    node: Node
    left: Place
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


def products_of(sums: Sums) -> list[Product]:
    """All products with a weight."""
    found = []
    for body, node in sums.tracer.all_nodes():
        if node.op == "MatMul":
            try:
                left, right = sums.pair(Place(body, node.name), "MatMul")
                if not node.attrs.get("transpose_b"):  # as in gradients
                    found.append(Product(body, node, sums.tracer.straight(left), sums.piece(right).source))
            except (Other, Unknown):
                continue
    return found


def kernels_before(tracer: Tracer, end: Place, products: Mapping[Place, Product]) -> dict[str, Source]:
    """The weights of the products that something is computed from, within a step."""
    found: dict[str, Source] = {}
    seen, left = {end}, [end]
    while left and len(seen) < _MOST_BEFORE:
        here = left.pop(0)
        tracer.count()
        if here in products:
            found[products[here].kernel.name] = products[here].kernel
            continue
        with suppress(Unknown):  # it is not in the file
            node = tracer.node(here)
            if node is not None and node.op not in ("Merge", "RefMerge", "Enter", "RefEnter"):
                before = [each for each in tracer.inputs(here.body, node) if each not in seen]
                seen.update(before)
                left += before
    return found


class Step(NamedTuple):
    """A match as a step among others with the same weights."""

    end: Place
    states: tuple[Place, ...]
    results: tuple[Place, ...]


def misused(
    tracer: Tracer,
    steps: Sequence[Step],
    kernels: Collection[str],
    readers: Mapping[Place, Sequence[Product]],
    inside: Collection[Place],
) -> dict[Place, str]:
    """Of which steps the states are not those of the step before, and why.

    `readers` are products by what they multiply, `inside` are the nodes of recurrences.
    """
    found: dict[Place, str] = {}
    ends, scope = {step.end for step in steps}, next(iter(kernels)).rpartition("/")[0]
    for product in (product for end in ends for product in readers.get(end, ())):
        name = product.kernel.name
        if name not in kernels and scope and name.startswith(f"{scope}/"):
            reason = f"it has a projection, {name}: its output goes through the product {product.node.name!r}"
            return dict.fromkeys(ends, reason)
    for k in range(len(steps[0].states)):
        before: dict[Place, tuple[dict[Place, None], bool]] = {}
        results: set[Place] = set()
        for step in steps:
            try:
                results.add(tracer.straight(step.results[k]))
                before[step.end] = tracer.state(step.states[k])
            except Unknown as unknown:
                found.setdefault(step.end, f"its state comes from {unknown}")
        passed = any(not results.isdisjoint(places) for places, _ in before.values())
        what = "cell state is not that" if k < len(steps[0].states) - 1 else "state is not its output"
        for step in steps:
            places, looped = before.get(step.end, ({}, False))
            strange = [place for place in places if looped or place._replace(output=0) in inside]
            if strange and results.isdisjoint(places) and (looped or not passed):
                reason = f"its {what} of the step before, but comes from {strange[0].name!r}"
                found.setdefault(step.end, reason)
            elif (drawn := _drawn(tracer, step.states[k])) is not None:
                reason = f"its state is kept at random, by the node {drawn.name!r}, which is a {drawn.op}"
                found.setdefault(step.end, reason)
    return found


def _drawn(tracer: Tracer, state: Place) -> Node | None:
    """What draws random numbers for a selection between states, as zoneout does."""
    seen, left = {state}, [state]
    conditions: list[Place] = []
    while left:
        here = left.pop()
        tracer.count()
        before: Sequence[Place] = ()
        with suppress(Unknown):
            node = tracer.node(here)
            if node is not None and node.op in ("Select", "SelectV2"):
                before = tracer.inputs(here.body, node)
                conditions += before[:1]
                before = before[1:]
            else:
                before = tracer.before(here) or ()
        left += [each for each in before if each not in seen]
        seen.update(before)
    seen, left = {*conditions}, conditions
    while left and len(seen) < _MOST_BEFORE:
        here = left.pop()
        before = ()
        with suppress(Unknown):
            node = tracer.node(here)
            if node is not None and "Random" in node.op:
                return node
            before = () if node is None else tracer.inputs(here.body, node)
        left += [each for each in before if each not in seen]
        seen.update(before)
    return None


# --------------------------------------------------------------------------------------------------------- recurrences
def recurrences(tracer: Tracer, products: Sequence[Product]) -> list[Recurrence]:
    """Where products with weights depend on what they gave before: in loops, and in steps with the same weights."""
    found = []
    bodies: dict[str, dict[str, Product]] = {}
    for product in products:
        bodies.setdefault(product.body, {})[product.node.name] = product
    for body, inside in bodies.items():
        order = {name: k for k, name in enumerate(tracer.bodies[body])}
        for names in _Dependencies(tracer, body, inside).cycles():
            nodes = tuple(tracer.bodies[body][name] for name in sorted(names & order.keys(), key=order.__getitem__))
            recurrence = _recurrence(body, nodes, inside)
            if recurrence is not None:
                found.append(recurrence)
    return found


def _recurrence(body: str, nodes: tuple[Node, ...], products: Mapping[str, Product]) -> Recurrence | None:
    """If it is one of gates, and not of gradients."""
    ops = {node.op for node in nodes}
    inside = [products[node.name] for node in nodes if node.name in products]
    if not inside or "Mul" not in ops or not ops & {"Sigmoid", "Tanh", *CLIPS}:
        return None
    if any(op.endswith("Grad") or op in BLOCKS for op in ops):
        return None
    kernels = tuple({product.kernel.name: product.kernel for product in inside}.values())
    return Recurrence(frozenset(Place(body, node.name) for node in nodes), nodes, kernels, inside[0])


class _Dependencies:
    """What each node of a body is computed from; products with one weight count as one node."""

    def __init__(self, tracer: Tracer, body: str, products: Mapping[str, Product]) -> None:
        self._tracer, self._body, self._nodes, self._roots = tracer, body, tracer.bodies[body], [*products]
        alike: dict[str, list[str]] = {}
        for name, product in products.items():
            alike.setdefault(product.kernel.name, []).append(name)
        self._alike: dict[str, list[str]] = {}
        for names in alike.values():
            self._alike |= {name: [other] for name, other in zip(names, [*names[1:], names[0]], strict=True)}
        self._next: dict[str, str] = {}
        """Of an argument of a loop's body, what the loop passes for it the next time."""
        if any(carried == body for *_, carried in tracer.callers.get(body, [])):
            function = tracer.graph.functions[body]
            for argument, output in zip(function.inputs, function.outputs, strict=False):
                self._next[argument] = function.returned.get(output, "").partition(":")[0]

    def before(self, name: str) -> list[str]:
        node = self._nodes.get(name)
        if node is None:
            return [self._next[name]] if name in self._next else []
        try:
            found = [place.name for place in self._tracer.inputs(self._body, node)]
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
            left = [(root, iter(self._enter(root, index, low, stack, on_stack)))]
            while left:
                name, before = left[-1]
                other = next(before, None)
                if other is not None:
                    if other not in index:
                        left.append((other, iter(self._enter(other, index, low, stack, on_stack))))
                    elif other in on_stack:
                        low[name] = min(low[name], index[other])
                    continue
                left.pop()
                if left:
                    low[left[-1][0]] = min(low[left[-1][0]], low[name])
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


# ------------------------------------------------------------------------------------------------------------- reasons
def shows(recurrence: Recurrence) -> str | None:
    """What one node of a recurrence shows it to be."""
    for ops, says in (
        (_NORMALIZES, "it has layer normalization, which the block cells do not have"),
        (_RANDOM, "it changes its state at random"),
        (ACTIVATIONS, "it has another activation than sigmoid and tanh"),
        (CLIPS, "it clips what the block cells do not clip, as a hard sigmoid does"),
    ):
        for node in recurrence.nodes:
            if node.op in ops:
                return f"{says}: the node {node.name!r} is a {node.op}"
    return None


def why(recurrence: Recurrence) -> str:
    """Why a recurrence is none of the cells."""
    for node in recurrence.nodes:
        if node.op not in _PLAIN:
            says = f"the node {node.name!r}, which is a {node.op}, is in none of the cells that are known"
            return shows(recurrence) or says
    kernel = recurrence.kernels[0].name
    return f"what follows the product {recurrence.product.node.name!r} with {kernel} is neither an LSTM nor a GRU"


def is_named(kernel: str) -> bool:
    """Whether a weight has the name of a cell's."""
    return _CELL.search(_scope(kernel).rpartition("/")[2]) is not None


def kind_of(name: str) -> str:
    """What something is that is refused, by the names of its weights."""
    return "GRU" if "gru" in name.lower() else "LSTM" if "lstm" in name.lower() else "unknown cell"


def _scope(kernel: str) -> str:
    return re.sub(r"/(gates|candidate|projection)\Z", "", kernel.lstrip("?").rpartition("/")[0])


def by_names(products: Sequence[Product], covered: set[str]) -> Iterator[tuple[Product, str]]:
    """Kernels of cells, by their names, that are in none that is known, and why."""
    done = {scope for name in covered for scope in _scopes(name)}
    inside: dict[str, set[str]] = {}
    for product in products:
        for scope in _scopes(product.kernel.name):
            inside.setdefault(scope, set()).add(product.kernel.name)
    for product in products:
        scope = _scope(product.kernel.name)
        if is_named(product.kernel.name) and scope not in done:
            done.add(scope)
            yield product, _reason(product, scope, sorted(inside.get(scope, ())))


def _scopes(name: str) -> Iterator[str]:
    """What a weight may be in: scopes around it."""
    for _ in range(_MOST_AROUND):
        name = name.rpartition("/")[0]
        if name:
            yield name.lstrip("?")


def _reason(product: Product, scope: str, kernels: Sequence[str]) -> str:
    if re.search("coupled", scope):
        return "its input gate is coupled to its forget gate; the gates of the block cells are independent"
    if len(kernels) > 1 and any("projection" in name for name in kernels):
        return f"it has other products, {', '.join(kernels[:4])}; the block cells have one"
    if _NORMAL.search(scope):
        return "it has layer normalization, which the block cells do not have"
    return (
        f"what follows the product {product.node.name!r} with {product.kernel.name} is not what BasicLSTMCell,"
        " LSTMCell or GRUCell have: perhaps another activation, layer normalization or coupled gates"
    )
