"""Why something that resembles a cell is refused: its states, nodes or names show a cell that no layer computes.

In come steps, recurrences and products of a graph; out go reasons in words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...graphs import Node
from ..cell.cell_definition import CellInGraph
from ..graph.graph_reader import GraphReader, Place, StateOrigins, UnknownValue
from ..graph.op_table import SHOWN, graph_op
from ..patterns.pattern import Refusal
from ..weights.weight_slices import WeightSource
from .recurrences import Recurrence, WeightProducts

_CELL = re.compile(r"\A(lstm|gru)|(lstm|gru|rnn|sru|nas|cfn)\w*_cell(_\d+)?\Z", re.IGNORECASE)
_OTHER = re.compile(
    r"(sru|ugrnn|nas|cfn|((intersection|ind|minimal)_rnn)|((phased|conv\w*|g|indy)_?lstm)|indy_gru)_cell(_\d+)?\Z"
)
_ZONEOUT = re.compile("[^/]*zoneout[^/]*", re.IGNORECASE)
_MOST_BEFORE = 200  # nodes
_MOST_AROUND = 4  # scopes around a weight


class RefusedNodes(NamedTuple):
    """Nodes that resemble a cell and are none that layers compute."""

    reason: str
    kernels: dict[str, WeightSource]


def refuse_unsupported(
    reader: GraphReader,
    unsupported: Mapping[Place, Refusal],
    products: WeightProducts,
    recurrence_by_place: Mapping[Place, Recurrence],
    matched_kernels: Collection[str],
) -> dict[Place, RefusedNodes]:
    """Refuse what almost has the form of a cell, if it is in a recurrence or has the name of a cell.

    `unsupported` says at which nodes patterns found a cell that no layer computes, and why; `matched_kernels` are those
    of cells that match. The result has refusals by their last nodes, as has that of `refuse_recurrences`.
    """
    refused: dict[Place, RefusedNodes] = {}
    kernels_by_end = {end: _kernels_before(reader, end, products) for end in unsupported}
    for end, refusal in unsupported.items():
        kernels = {name: kernel for name, kernel in kernels_by_end[end].items() if name not in matched_kernels}
        recurrence = recurrence_by_place.get(end)
        if refusal.states:
            names = kernels_by_end[end].keys()
            ends = {other_end for other_end, other in kernels_by_end.items() if other.keys() == names}
            is_cell = any(reader.is_state_of(state, ends) for state in refusal.states)
        else:
            is_cell = recurrence is not None or any(map(_has_cell_name, [*kernels][:1]))
        if kernels and is_cell:
            reason = _revealing_node(recurrence) if recurrence is not None and refusal.is_weak else None
            refused[end] = RefusedNodes(reason or str(refusal), kernels)
    return refused


def refuse_recurrences(
    recurrences: Sequence[Recurrence], cell_kernels: Collection[str], refused: Collection[Place]
) -> dict[Place, RefusedNodes]:
    """Refuse recurrences that may have gates, unless they share kernels with a cell or have nodes that are refused."""
    refusals: dict[Place, RefusedNodes] = {}
    # the step before a loop, which learns shapes, shows less than the loop
    for recurrence in sorted(recurrences, key=lambda recurrence: _revealing_node(recurrence) is None):
        kernels = {kernel.name: kernel for kernel in recurrence.kernels if kernel.name not in cell_kernels}
        is_cell = len(kernels) < len(recurrence.kernels)
        is_refused = any(place in refused or place in refusals for place in recurrence.nodes)
        if recurrence.may_have_gates and not is_cell and not is_refused:
            refusals[recurrence.product] = RefusedNodes(_explain_refusal(recurrence), kernels)
    return refusals


def _kernels_before(reader: GraphReader, end: Place, products: WeightProducts) -> dict[str, WeightSource]:
    """Return the kernels of the products that a value is computed from within a step, by their names."""
    kernels: dict[str, WeightSource] = {}

    def predecessors(place: Place) -> Sequence[Place]:
        if place not in products:
            return reader.inputs_in_step(place)
        kernels[products[place].name] = products[place]
        return ()

    reader.walk([end], predecessors, most=_MOST_BEFORE, near_first=True)
    return kernels


# ------------------------------------------------------------------------------------------- states of cells that match
def find_misused_states(
    reader: GraphReader, steps: Sequence[CellInGraph], recurrence_places: Collection[Place]
) -> dict[Place, str]:
    """Find the steps whose states are not the results of the step before, and why; recurrences have these places."""
    reasons: dict[Place, str] = {}
    for k in range(len(steps[0].states) if steps else 0):
        origins: dict[Place, StateOrigins] = {}
        results: set[Place] = set()
        for step in steps:
            try:
                results.add(reader.resolve(step.results[k]))
                origins[step.h] = reader.state_origins(step.states[k])
            except UnknownValue as unknown:
                reasons.setdefault(step.h, f"its state comes from {unknown}")
        any_passed_on = any(not results.isdisjoint(origin.places) for origin in origins.values())
        mismatch = "cell state is not that" if k < len(steps[0].states) - 1 else "state is not its output"
        for step in steps:
            places, in_loop, conditions = origins.get(step.h, StateOrigins())
            foreign = [place for place in places if in_loop or place._replace(output=0) in recurrence_places]
            if foreign and results.isdisjoint(places) and (in_loop or not any_passed_on):
                reason = f"its {mismatch} of the step before, but comes from {foreign[0].name!r}"
                reasons.setdefault(step.h, reason)
            elif (drawn := _random_node(reader, conditions)) is not None:
                reason = f"its state is kept at random, by the node {drawn.name!r}, which is a {drawn.op}"
                reasons.setdefault(step.h, reason)
    return reasons


def _random_node(reader: GraphReader, conditions: Iterable[Place]) -> Node | None:
    """Find the node that draws random numbers for conditions, as zoneout has them."""

    def computed(place: Place) -> Sequence[Place]:
        with suppress(UnknownValue):
            return () if reader.op(place).shape_only else reader.inputs_at(place)
        return ()

    for place in reader.walk(conditions, computed, most=_MOST_BEFORE):
        with suppress(UnknownValue):
            node = reader.node(place)
            if node is not None and "Random" in node.op:
                return node
    return None


# ---------------------------------------------------------------------------------------- recurrences that do not match
def _revealing_node(recurrence: Recurrence) -> str | None:
    """Describe the node of a recurrence that surely shows another cell; None if there is none."""
    for refusal in SHOWN:
        for node in recurrence.nodes.values():
            if graph_op(node).refusal == refusal:
                return f"{refusal}: the node {node.name!r} is a {node.op}"
    return None


def _explain_refusal(recurrence: Recurrence) -> str:
    """Explain why a recurrence is none of the cells."""
    if reason := _revealing_node(recurrence):
        return reason
    for node in recurrence.nodes.values():
        if not graph_op(node).in_known_cells:
            return f"the node {node.name!r}, which is a {node.op}, is in none of the cells that are known"
    return _explain_product(recurrence.product, recurrence.kernels[0].name)


def _explain_product(product: Place, kernel: str) -> str:
    return f"what follows the product {product.name!r} with {kernel} is no RNN, LSTM or GRU"


def _has_cell_name(kernel: str) -> bool:
    """Return whether the scope of a weight has the name of a cell."""
    return _CELL.search(cell_scope(kernel).rpartition("/")[2]) is not None


def class_by_name(name: str) -> str:
    """Return the class of a refused cell by the name of a weight."""
    classes = {"gru": "GRU", "lstm": "LSTM", "sru": "SRU", "basic_rnn": "RNN", "simple_rnn": "RNN"}
    return next((tf_class for part, tf_class in classes.items() if part in name.lower()), "unknown cell")


def refused_cell_name(scope: str) -> str | None:
    """Return the reason to refuse a cell by its name; None if it is not the name of another cell."""
    if zoneout := _ZONEOUT.search(scope):
        return f"it has zoneout by its name, {zoneout[0]}, which mixes the states, in inference, too; no layer does"
    match = _OTHER.search(scope)
    return None if match is None else f"it is another cell by its name, {match[0]}, and none that layers compute"


def cell_scope(kernel: str) -> str:
    """Return the scope of a cell by the name of one of its kernels."""
    return re.sub(r"/(gates|candidate|projection)\Z", "", kernel.lstrip("?").rpartition("/")[0])


def refuse_by_name(products: WeightProducts, covered: set[str]) -> Iterator[tuple[Place, str]]:
    """Refuse kernels that have the names of cells and are in no known cell."""
    around = range(1, _MOST_AROUND + 1)
    covered_scopes = {name.lstrip("?").rsplit("/", k)[0] for name in covered if "/" in name for k in around}
    for place, kernel in products.items():
        scope = cell_scope(kernel.name)
        if _has_cell_name(kernel.name) and scope not in covered_scopes:
            covered_scopes.add(scope)
            yield place, refused_cell_name(scope) or _explain_product(place, kernel.name)
