"""Find all cells of a model: search each graph, connect the cells, merge copies, and name them.

In come graphs and variables; out go `Cells`, in which the cells that others read come first. A model without any cell
gives none, without an error; `search/` decides what a cell is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from graphlib import TopologicalSorter
from typing import NamedTuple

from ..graphs import Graph
from ..variables import Variables
from .cell.cell_definition import CellDefinition, CellInGraph
from .cell.found_cell import UNLINKED, CellLinks, Found, InitialState
from .graph.graph_reader import GraphReader, Place, UnknownValue
from .graph.while_loops import WhileLoops
from .search.block_ops import BLOCKS, read_block_op
from .search.checkpoint_names import search_names
from .search.subgraphs import search_subgraphs
from .structure.connection_check import GraphConnections
from .structure.initial_states import read_initial_state
from .structure.layer_stack import Cells
from .structure.sequences import CellRun, trace_sequences
from .weights.weight_sources import WeightSources

_MOST_SELECTED = 8  # places from a state back to the step before, which masks may select
_ENDINGS = re.compile(
    r"/(gates/|candidate/)?(kernel|bias|weights|biases|w_ru|b_ru|w_c|b_c|W_0|B|w|b)(_\d+)?"
    r"(/(part_\d+|read|ReadVariableOp))*\Z"
)


class _ConnectedCell(NamedTuple):
    """A cell of a graph, with what comes before it."""

    definition: CellDefinition
    links: CellLinks = UNLINKED
    """What comes before it in its graph, but for the names of cells."""
    input_cells: tuple[CellDefinition, ...] = ()
    """The cells whose h is x, each by its first step."""


def find_cells(graphs: Sequence[Graph], variables: Variables | None) -> Cells:
    """Find the cells of graphs, or without a graph by names of variables; a frozen graph has no variables."""
    if not graphs and variables is not None:
        return Cells({scope: Found(scope, definition) for scope, definition in search_names(variables).items()})
    by_graph = [_search_graph(WeightSources(GraphReader(graph), variables), k) for k, graph in enumerate(graphs)]
    groups = _merge_copies([cell for cells, _, _ in by_graph for cell in cells])
    inputs = _find_inputs(groups)
    # groups read each other in no cycle: `trace_sequences` leaves the direction of runs in a cycle unknown, and
    # `_search_graph` gives cells of unknown direction no `input_cells`
    order = TopologicalSorter({number: read or () for number, read in enumerate(inputs)}).static_order()
    names = _name_groups({number: groups[number][0] for number in order})
    found_cells = {}
    for number, name in names.items():
        copies = groups[number]
        links = copies[0].links._replace(
            source_cells=tuple(names[below] for below in inputs[number] or ()),
            input_varies=inputs[number] is None,
            input_origins=frozenset().union(*(c.links.input_origins for c in copies if c.links.reverse is not None)),
        )
        if len({tuple(state.name for state in cell.links.initial_states) for cell in copies}) > 1:
            links = links._replace(initial_states=(InitialState("several states, of its runs"),))
        cell_nodes = [node for cell in copies for node in cell.definition.nodes]
        found_cells[name] = Found(name, copies[0].definition, cell_nodes, links)
    name_by_cell = {cell.definition: names[k] for k, group in enumerate(groups) for cell in group}
    connections = [
        (connections, [name_by_cell[cell] for cell in first_steps]) for _, connections, first_steps in by_graph
    ]
    return Cells(found_cells, connections)


def _search_graph(
    sources: WeightSources, graph_number: int
) -> tuple[list[_ConnectedCell], GraphConnections, list[CellDefinition]]:
    """Find the cells of a graph; return them, their connections, and the first step of each run in these.

    Cells are block ops, and cells of many nodes that have other weights.
    """
    reader, loops = sources.reader, WhileLoops(sources.reader)
    cells = [read_block_op(sources, body, node) for body, node in reader.all_nodes() if node.op in BLOCKS]
    cells += search_subgraphs(sources, {name for cell in cells for name in cell.weights.values()})
    in_graph = {cell: cell.in_graph for cell in cells if cell.refusal is None and cell.in_graph is not None}
    chains = _chain_steps(reader, in_graph)
    runs = [CellRun([in_graph[cell] for cell in chain]) for chain in chains]
    trace_sequences(reader, runs)
    connected: dict[CellDefinition, _ConnectedCell] = {}
    for chain, run in zip(chains, runs, strict=True):
        parts = run.input_parts or ()
        input_cells = [chains[part.source][0] for part in parts if isinstance(part.source, int) and not part.made_of]
        places = [(part.source, part.axis) for part in parts if not isinstance(part.source, int)]
        is_known = run.reversals is not None and not places
        states = zip(in_graph[chain[0]].states, chain[0].state_sizes.values(), strict=True)
        initial_states = tuple(read_initial_state(sources, loops, *place_and_size) for place_and_size in states)
        for cell in chain:
            links = CellLinks(
                None if run.reversals is None else bool(run.reversals),
                input_origins=frozenset((graph_number, *place) for place in places),
                initial_states=initial_states,
            )
            connected[cell] = _ConnectedCell(cell, links, tuple(input_cells) if is_known else ())
    all_cells = [connected.get(cell, _ConnectedCell(cell)) for cell in cells]
    return all_cells, GraphConnections(sources, runs), [chain[0] for chain in chains]


def _chain_steps(reader: GraphReader, in_graph: Mapping[CellDefinition, CellInGraph]) -> list[list[CellDefinition]]:
    """Chain the steps of each unrolled cell in their order; any other cell is a chain by itself."""
    groups: dict[tuple[object, ...], list[CellDefinition]] = {}
    for cell in in_graph:
        groups.setdefault(_identity(cell), []).append(cell)
    chains = []
    for group in groups.values():
        cell_by_h = {in_graph[cell].h: cell for cell in group}
        followers: dict[CellDefinition, list[CellDefinition]] = {}
        first_cells = []
        for cell in group:
            state = in_graph[cell].state
            previous = None if state is None else _step_before(reader, state, cell_by_h)
            if previous is None or previous is cell:
                first_cells.append(cell)
            else:
                followers.setdefault(previous, []).append(cell)
        remaining = {*group}
        for cell in [*first_cells, *group]:
            chain, next_cells = [], [cell]
            while len(next_cells) == 1 and next_cells[0] in remaining:
                chain += next_cells
                remaining.remove(chain[-1])
                next_cells = followers.get(chain[-1], [])
            chains += [chain] if chain else []
    return chains


def _step_before(reader: GraphReader, state: Place, cell_by_h: Mapping[Place, CellDefinition]) -> CellDefinition | None:
    """Return the step that gives a state, also where a mask keeps an earlier state in finished rows."""

    def selected(place: Place) -> list[Place]:
        with suppress(UnknownValue):
            return [reader.resolve(value) for value in reader.inputs_of(place, "Select")[1:]]
        return []

    with suppress(UnknownValue):
        for place in reader.walk([reader.resolve(state)], selected, most=_MOST_SELECTED, near_first=True):
            if place in cell_by_h:
                return cell_by_h[place]
    return None


# ------------------------------------------------------------------------------------------------------ copies, names
def _identity(cell: CellDefinition) -> tuple[object, ...]:
    """Return what all copies of a cell have in common."""
    weights = tuple(cell.weights.items()) or cell.nodes
    return cell.tf_class, weights, tuple(cell.attributes.items()), _cell_scope(cell), cell.refusal


def _merge_copies(cells: Iterable[_ConnectedCell]) -> list[list[_ConnectedCell]]:
    """Group the steps of an unrolled cell, and copies in other functions, to one group for each direction."""
    by_identity: dict[tuple[object, ...], dict[bool | None, list[_ConnectedCell]]] = {}
    for cell in cells:
        by_identity.setdefault(_identity(cell.definition), {}).setdefault(cell.links.reverse, []).append(cell)
    groups: list[list[_ConnectedCell]] = []
    for by_direction in by_identity.values():
        unknown = by_direction.pop(None, [])
        directions = [*by_direction.values()] or [[]]
        directions[0] += unknown
        groups += directions
    return groups


def _find_inputs(groups: Sequence[Sequence[_ConnectedCell]]) -> list[tuple[int, ...] | None]:
    """Return the numbers of the groups whose h each group reads; None if its copies do not read the same."""
    numbers = {cell.definition: number for number, group in enumerate(groups) for cell in group}
    inputs: list[tuple[int, ...] | None] = []
    for group in groups:
        read = {tuple(numbers[below] for below in cell.input_cells) for cell in group if cell.links.reverse is not None}
        inputs.append(None if len(read) > 1 else next(iter(read), ()))
    return inputs


def _cell_scope(cell: CellDefinition) -> str:
    """Return the scope of a cell's nodes, without the number at its end in which steps of one cell differ."""
    return re.sub(r"_\d+\Z", "", cell.nodes[0].rpartition("/")[0] or cell.nodes[0])


def _name_groups(cells: Mapping[int, _ConnectedCell]) -> dict[int, str]:
    """Name cells by the scopes of their weights; cells that share weights, by the scopes of their nodes."""
    numbers_by_name: dict[str, list[int]] = {}
    for number, cell in cells.items():
        first_weight = re.split(r" \+ |, |\[", next(iter(cell.definition.weights.values()), ""))[0]
        scope, count = _ENDINGS.subn("", first_weight)
        numbers_by_name.setdefault(scope if count else _cell_scope(cell.definition), []).append(number)
    names: dict[int, str] = {}
    used: set[str] = set()
    for name, numbers in numbers_by_name.items():
        scopes = {_cell_scope(cells[number].definition) for number in numbers}
        for number in numbers:
            base = name if len(scopes) == 1 else _cell_scope(cells[number].definition)
            if len(scopes) == 1 and len(numbers) > 1 and cells[number].links.reverse:
                base += " (reversed)"
            k = 1
            unique = base
            while unique in used or (unique in numbers_by_name and unique != name):
                k += 1
                unique = f"{base} ({k})"
            used.add(unique)
            names[number] = unique
    return names
