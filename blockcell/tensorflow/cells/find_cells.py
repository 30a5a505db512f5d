"""Find all cells of a model: search each graph, connect the cells, merge copies, and name them.

In come graphs and variables; out go `Cells`, in which the cells that others read come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..graphs import Graph
from ..variables import Variables
from .cell.found_cell import Found, InitialState
from .graph.graph_reader import GraphReader, Place, UnknownValue
from .search.block_ops import BLOCKS, read_block_op
from .search.checkpoint_names import search_names
from .search.subgraphs import search_subgraphs
from .structure.directions import CellRun
from .structure.initial_states import InitialStates
from .structure.layer_stack import Cells
from .structure.output_merges import OutputMerges
from .structure.sequences import Sequences
from .weights.saver_names import trace_weights
from .weights.weight_sources import WeightSources

_MOST_SELECTIONS = 4  # places from a state back to the step before, which a mask may select
_ENDINGS = re.compile(
    r"/(gates/|candidate/)?(kernel|bias|weights|biases|w_ru|b_ru|w_c|b_c|W_0|B|w|b)(/(part_\d+|read|ReadVariableOp))*\Z"
)


def find_cells(graphs: Sequence[Graph], variables: Variables | None) -> Cells:
    """Find the cells of graphs, or without a graph by names of variables; a frozen graph has no variables."""
    if not graphs and variables is not None:
        return Cells({cell.name: cell for cell in search_names(variables)})
    cells: list[Found] = []
    for k, graph in enumerate(graphs):
        sources = trace_weights(graph, variables)
        nodes = sources.reader.all_nodes()
        graph_cells = [read_block_op(sources, body, node) for body, node in nodes if node.op in BLOCKS]
        graph_cells += search_subgraphs(sources, {name for cell in graph_cells for name in cell.weights.values()})
        _connect_cells(sources, k, graph_cells)
        cells += graph_cells
    return Cells(_name_cells(_order_by_inputs(_merge_copies(cells))))


def _connect_cells(sources: WeightSources, graph_number: int, cells: Iterable[Found]) -> None:
    """Find the direction, the inputs, the merged outputs and the initial states of the cells in a graph."""
    reader, state_reader = sources.reader, InitialStates(sources)
    chains = _chain_steps(reader, [cell for cell in cells if cell.refused is None and cell.in_graph is not None])
    runs = [CellRun([cell.in_graph for cell in chain if cell.in_graph is not None]) for chain in chains]
    sequences = Sequences(reader, runs)
    for chain, run in zip(chains, runs, strict=True):
        parts = run.input_parts or ()
        input_cells = [chains[part.source][0] for part in parts if isinstance(part.source, int) and not part.made_of]
        places = [(part.source, part.axis) for part in parts if not isinstance(part.source, int)]
        first_step = chain[0].in_graph
        initial_states = () if first_step is None else state_reader.read(first_step, chain[0].state_sizes)
        for cell in chain:
            cell.initial_states = initial_states
            cell.reverse = None if run.reversals is None else bool(run.reversals)
            if run.reversals is not None and not places:
                cell.input_cells = tuple(input_cells)
            cell.input_origins = frozenset((graph_number, *place) for place in places)
    merges = OutputMerges(reader, sequences)
    for left, right in merges.concatenated:
        chains[left][0].concatenated_after.add(chains[right][0])
    for left, right in merges.merged:
        chains[left][0].merged_with.add(chains[right][0])


def _chain_steps(reader: GraphReader, cells: Iterable[Found]) -> list[list[Found]]:
    """Chain the steps of each unrolled cell in their order; any other cell is a chain by itself."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for cell in cells:
        groups.setdefault(_identity(cell), []).append(cell)
    chains = []
    for group in groups.values():
        cell_by_h = {cell.in_graph.h: cell for cell in group if cell.in_graph is not None}
        followers: dict[Found, list[Found]] = {}
        first_cells = []
        for cell in group:
            assert cell.in_graph is not None
            previous = None if cell.in_graph.state is None else _step_before(reader, cell.in_graph.state, cell_by_h)
            if previous is None or previous is cell:
                first_cells.append(cell)
            else:
                followers.setdefault(previous, []).append(cell)
        remaining = dict.fromkeys(group)
        for cell in [*first_cells, *group]:
            if cell not in remaining:
                continue
            del remaining[cell]
            chains.append([cell])
            while len(followers.get(chains[-1][-1], [])) == 1 and followers[chains[-1][-1]][0] in remaining:
                chains[-1].append(followers[chains[-1][-1]][0])
                del remaining[chains[-1][-1]]
    return chains


def _step_before(reader: GraphReader, state: Place, cell_by_h: Mapping[Place, Found]) -> Found | None:
    """Return the step that gives a state, also where a mask keeps an earlier state in finished rows."""
    waiting = [state]
    for _ in range(_MOST_SELECTIONS):
        if not waiting:
            break
        try:
            place = reader.resolve(waiting.pop(0))
            if place in cell_by_h:
                return cell_by_h[place]
            waiting += reader.inputs_at(place)[1:] if reader.op(place).name == "Select" else []
        except UnknownValue:
            continue
    return None


def _identity(cell: Found) -> tuple[object, ...]:
    weights = tuple(cell.weights.items()) or cell.nodes
    return cell.kind, weights, tuple(cell.attributes.items()), cell_scope(cell), cell.refused


def _merge_copies(cells: Iterable[Found]) -> list[Found]:
    """Merge the steps of an unrolled cell, and copies in other functions, to one cell for each direction."""
    groups: dict[tuple[object, ...], dict[bool | None, list[Found]]] = {}
    for cell in cells:
        groups.setdefault(_identity(cell), {}).setdefault(cell.reverse, []).append(cell)
    same_cells: list[list[Found]] = []
    for by_direction in groups.values():
        unknown = by_direction.pop(None, [])
        directions = [*by_direction.values()] or [[]]
        directions[0] += unknown
        same_cells += directions
    representative = {cell: copies[0] for copies in same_cells for cell in copies}
    for copies in same_cells:
        first = copies[0]
        first.nodes = tuple(node for cell in copies for node in cell.nodes)
        first.concatenated_after = {representative[after] for cell in copies for after in cell.concatenated_after}
        first.merged_with = {representative[other] for cell in copies for other in cell.merged_with}
        if len({tuple(start.name for start in cell.initial_states) for cell in copies}) > 1:
            first.initial_states = (InitialState("several states, of its runs"),)
        directed = [cell for cell in copies if cell.reverse is not None]
        input_cells = {tuple(representative[below] for below in cell.input_cells) for cell in directed}
        first.input_cells_vary = len(input_cells) > 1
        first.input_cells = () if first.input_cells_vary else next(iter(input_cells), ())
        first.input_origins = frozenset().union(*(cell.input_origins for cell in directed))
    return [copies[0] for copies in same_cells]


def _order_by_inputs(cells: Iterable[Found]) -> list[Found]:
    """Order cells so that each comes after the cells that it reads."""
    done: dict[Found, None] = {}
    for cell in cells:
        waiting = [cell]
        while waiting:
            below = [input_cell for input_cell in waiting[-1].input_cells if input_cell not in done]
            if not below:
                done[waiting.pop()] = None
            waiting += below
    return [*done]


def cell_scope(cell: Found) -> str:
    """Return the scope of a cell's nodes, without the number at its end in which steps of one cell differ."""
    return re.sub(r"_\d+\Z", "", cell.nodes[0].rpartition("/")[0] or cell.nodes[0])


def _name_cells(cells: Iterable[Found]) -> dict[str, Found]:
    """Name cells by the scopes of their weights; cells that share weights, by the scopes of their nodes."""
    cells = list(cells)
    wanted: dict[str, list[Found]] = {}
    for cell in cells:
        first_weight = next(iter(cell.weights.values()), "").partition(" + ")[0].partition(", ")[0]
        scope, count = _ENDINGS.subn("", first_weight)
        cell.name = scope if count else cell_scope(cell)
        wanted.setdefault(cell.name, []).append(cell)
    named: dict[str, Found] = {}
    for name, group in wanted.items():
        scopes = {cell_scope(cell) for cell in group}
        for cell in group:
            base = name if len(scopes) == 1 else cell_scope(cell)
            base += " (reversed)" * (len(scopes) == 1 and len(group) > 1 and bool(cell.reverse))
            k = 1
            cell.name = base
            while cell.name in named or (cell.name in wanted and cell.name != name):
                k += 1
                cell.name = f"{base} ({k})"
            named[cell.name] = cell
    return named
