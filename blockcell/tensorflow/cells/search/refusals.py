"""What is meant as a cell and is none that a layer computes: where it is, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from ...graphs import Node
from ..graph.activations import described
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import SHOWN, op_of
from ..patterns.pattern import Step
from ..weights.weight_sources import Source
from .recurrences import Product, Recurrence

_CELL = re.compile(r"\A(lstm|gru)|(lstm|gru|rnn|sru|nas|cfn)\w*_cell(_\d+)?\Z", re.IGNORECASE)
_OTHER = re.compile(
    r"(sru|ugrnn|nas|cfn|((intersection|ind|minimal)_rnn)|((phased|conv\w*|g|indy)_?lstm)|indy_gru)_cell(_\d+)?\Z"
)
_NORMAL = re.compile(r"layer_?norm|/(gamma|beta)\Z", re.IGNORECASE)
_MOST_BEFORE = 200  # nodes
_MOST_AROUND = 4  # scopes around a weight


def kernels_before(reader: Reader, end: Place, products: Mapping[Place, Product]) -> dict[str, Source]:
    """The weights of the products that something is computed from, within a step."""
    found: dict[str, Source] = {}

    def before(here: Place) -> Sequence[Place]:
        if here in products:
            found[products[here].kernel.name] = products[here].kernel
            return ()
        with suppress(Unknown):  # it is not in the file
            return () if reader.op(here).name in ("Merge", "Enter") else reader.given(here)
        return ()

    reader.walk([end], before, most=_MOST_BEFORE, near_first=True)
    return found


# ------------------------------------------------------------------------------------------- states of cells that match
def misused(
    reader: Reader,
    steps: Sequence[Step],
    kernels: Collection[str],
    readers: Mapping[Place, Sequence[Product]],
    inside: Collection[Place],
) -> dict[Place, str]:
    """Of which steps the states are not those of the step before, and why.

    `readers` are products by what they multiply, `inside` are the nodes of recurrences.
    """
    found: dict[Place, str] = {}
    for k in range(len(steps[0].states)):
        before: dict[Place, tuple[dict[Place, None], bool]] = {}
        results: set[Place] = set()
        for step in steps:
            try:
                results.add(reader.straight(step.results[k]))
                before[step.end] = reader.state(step.states[k])
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
            elif (drawn := _drawn(reader, step.states[k])) is not None:
                reason = f"its state is kept at random, by the node {drawn.name!r}, which is a {drawn.op}"
                found.setdefault(step.end, reason)
    ends, scope = {step.end for step in steps}, next(iter(kernels)).rpartition("/")[0]
    for product in (product for end in ends if found for product in readers.get(end, ())):
        name = product.kernel.name
        if name not in kernels and scope and name.startswith(f"{scope}/"):
            reason = f"it has a projection, {name}: its output goes through the product {product.node.name!r}"
            return dict.fromkeys(ends, reason)
    return found


def _drawn(reader: Reader, state: Place) -> Node | None:
    """What draws random numbers for a selection between states, as zoneout does."""
    conditions: list[Place] = []

    def chosen(here: Place) -> Sequence[Place] | None:
        with suppress(Unknown):
            if reader.op(here).name != "Select":
                return reader.before(here)
            conditions.extend(reader.given(here)[:1])
            return reader.given(here)[1:]
        return None

    def computed(here: Place) -> Sequence[Place]:
        with suppress(Unknown):
            return () if reader.op(here).shape_only else reader.given(here)
        return ()

    reader.walk([state], chosen)
    for here in reader.walk(conditions, computed, most=_MOST_BEFORE):
        with suppress(Unknown):
            node = reader.node(here)
            if node is not None and "Random" in node.op:
                return node
    return None


# ---------------------------------------------------------------------------------------- recurrences that do not match
def shows(recurrence: Recurrence) -> str | None:
    """What one node of a recurrence shows it to be."""
    for says in SHOWN:
        for node in recurrence.nodes:
            if op_of(node).shows == says:
                return f"{says}: the node {node.name!r} is a {node.op}"
    return None


def strange_node(reader: Reader, recurrence: Recurrence) -> str | None:
    """What one node of a recurrence shows it to be, or which activation it has that layers do not have."""
    if shown := shows(recurrence):
        return shown
    for node in recurrence.nodes:
        with suppress(Unknown):  # what it reads may be missing
            if what := described(reader, Place(recurrence.product.body, node.name)):
                return f"{what}, which is no activation of layers"
    return None


def why(reader: Reader, recurrence: Recurrence) -> str:
    """Why a recurrence is none of the cells."""
    if reason := strange_node(reader, recurrence):
        return reason
    for node in recurrence.nodes:
        if not op_of(node).known:
            return f"the node {node.name!r}, which is a {node.op}, is in none of the cells that are known"
    kernel = recurrence.kernels[0].name
    return f"what follows the product {recurrence.product.node.name!r} with {kernel} is no RNN, LSTM or GRU"


def is_named(kernel: str) -> bool:
    """Whether a weight has the name of a cell's."""
    return _CELL.search(_scope(kernel).rpartition("/")[2]) is not None


def kind_of(name: str) -> str:
    """What something is that is refused, by the names of its weights."""
    kinds = {"gru": "GRU", "lstm": "LSTM", "sru": "SRU", "basic_rnn": "RNN", "simple_rnn": "RNN"}
    return next((kind for part, kind in kinds.items() if part in name.lower()), "unknown cell")


def other_cell(scope: str) -> str | None:
    """Why a cell is refused that has the name of one that no layer computes."""
    found = _OTHER.search(scope)
    return None if found is None else f"it is another cell by its name, {found[0]}, and none that layers compute"


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
    if other := other_cell(scope):
        return other
    if len(kernels) > 1 and any("projection" in name for name in kernels):
        return f"it has other products, {', '.join(kernels[:4])}; the block cells have one"
    if _NORMAL.search(scope):
        return "it has layer normalization, which the block cells do not have"
    return (
        f"what follows the product {product.node.name!r} with {product.kernel.name} is not what BasicRNNCell,"
        " BasicLSTMCell, LSTMCell or GRUCell have: perhaps another activation, or layer normalization"
    )
