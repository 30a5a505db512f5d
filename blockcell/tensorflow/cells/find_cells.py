"""Finding all cells of a model: each by itself, then which are one, what each runs over, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..graphs import Graph
from ..variables import Variables
from .cell.found_cell import Found, Start
from .graph.graph_reader import Place, Reader, Unknown
from .search.block_ops import BLOCKS, found_block
from .search.checkpoint_names import found_named
from .search.subgraphs import found_composed
from .structure.directions import Use
from .structure.initial_states import Starts
from .structure.layer_stack import Cells
from .structure.output_merges import Merges
from .structure.sequences import Sequences
from .weights.saver_names import sources_of
from .weights.weight_sources import Sources

_MOST_SELECTIONS = 4  # places from a state back to the step before, which is what a mask selects
_ENDINGS = re.compile(
    r"/(gates/|candidate/)?(kernel|bias|weights|biases|w_ru|b_ru|w_c|b_c|W_0|B|w|b)(/(part_\d+|read|ReadVariableOp))*\Z"
)


def find(graphs: Sequence[Graph], variables: Variables | None) -> Cells:
    """The cells of graphs, or without any those that the variables' names tell. Frozen graphs have no variables."""
    if not graphs and variables is not None:
        return Cells({each.name: each for each in found_named(variables)})
    found: list[Found] = []
    for k, graph in enumerate(graphs):
        sources = sources_of(graph, variables)
        nodes = sources.reader.all_nodes()
        inside = [found_block(sources, body, node) for body, node in nodes if node.op in BLOCKS]
        inside += found_composed(sources, {name for each in inside for name in each.weights.values()})
        _connect(sources, k, inside)
        found += inside
    return Cells(_named(_ordered(_as_one(found))))


def _connect(sources: Sources, number: int, found: Iterable[Found]) -> None:
    """Say of each cell in a graph in which direction it runs over what, and from which state."""
    reader, starts = sources.reader, Starts(sources)
    chains = _chains(reader, [each for each in found if each.refused is None and each.at is not None])
    sequences = Sequences(reader, [Use([each.at for each in chain if each.at is not None]) for chain in chains])
    for chain, use in zip(chains, sequences.uses, strict=True):
        below = [chains[part.source][0] for part in use.parts or () if isinstance(part.source, int) and not part.order]
        places = [(part.source, part.axis) for part in use.parts or () if not isinstance(part.source, int)]
        first = chain[0].at
        begins = () if first is None else starts.of(first, chain[0].state_sizes)
        for each in chain:
            each.starts = begins
            each.reverse = None if use.turns is None else bool(use.turns)
            if use.turns is not None and not places:
                each.below = tuple(below)
            each.origins = frozenset((number, *place) for place in places)
    merges = Merges(reader, sequences)
    for one, other in merges.concatenated:
        chains[one][0].behind.add(chains[other][0])
    for one, other in merges.merged:
        chains[one][0].merged.add(chains[other][0])


def _chains(reader: Reader, found: Iterable[Found]) -> list[list[Found]]:
    """The steps of each cell that is written out step by step, in their order; any other cell by itself."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for each in found:
        groups.setdefault(_key(each), []).append(each)
    chains = []
    for group in groups.values():
        ends = {each.at.h: each for each in group if each.at is not None}
        after: dict[Found, list[Found]] = {}
        first = []
        for each in group:
            assert each.at is not None
            before = None if each.at.state is None else _step_before(reader, each.at.state, ends)
            if before is None or before is each:
                first.append(each)
            else:
                after.setdefault(before, []).append(each)
        remaining = dict.fromkeys(group)
        for each in [*first, *group]:
            if each not in remaining:
                continue
            del remaining[each]
            chains.append([each])
            while len(after.get(chains[-1][-1], [])) == 1 and after[chains[-1][-1]][0] in remaining:
                chains[-1].append(after[chains[-1][-1]][0])
                del remaining[chains[-1][-1]]
    return chains


def _step_before(reader: Reader, state: Place, ends: Mapping[Place, Found]) -> Found | None:
    """The step that gives a state, also where a mask keeps that of an earlier one for some rows."""
    waiting = [state]
    for _ in range(_MOST_SELECTIONS):
        if not waiting:
            break
        try:
            here = reader.straight(waiting.pop(0))
            if here in ends:
                return ends[here]
            waiting += reader.given(here)[1:] if reader.op(here).name == "Select" else []
        except Unknown:
            continue
    return None


def _key(each: Found) -> tuple[object, ...]:
    weights = tuple(each.weights.items()) or each.nodes
    return each.kind, weights, tuple(each.attributes.items()), scope_of(each), each.refused


def _as_one(found: Iterable[Found]) -> list[Found]:
    """The steps of an unrolled cell, and copies of it in other functions, are one; each direction is one."""
    groups: dict[tuple[object, ...], dict[bool | None, list[Found]]] = {}
    for each in found:
        groups.setdefault(_key(each), {}).setdefault(each.reverse, []).append(each)
    cells: list[list[Found]] = []
    for group in groups.values():
        unknown = group.pop(None, [])
        parts = [*group.values()] or [[]]
        parts[0] += unknown
        cells += parts
    one = {each: part[0] for part in cells for each in part}
    for part in cells:
        first = part[0]
        first.nodes = tuple(node for each in part for node in each.nodes)
        first.behind = {one[other] for each in part for other in each.behind}
        first.merged = {one[other] for each in part for other in each.merged}
        if len({tuple(start.name for start in each.starts) for each in part}) > 1:
            first.starts = (Start("several states, of its runs"),)
        known = [each for each in part if each.reverse is not None]
        below = {tuple(one[other] for other in each.below) for each in known}
        first.mixed = len(below) > 1
        first.below = () if first.mixed else next(iter(below), ())
        first.origins = frozenset().union(*(each.origins for each in known))
    return [part[0] for part in cells]


def _ordered(found: Iterable[Found]) -> list[Found]:
    """Those that others read come before them."""
    done: dict[Found, None] = {}
    for each in found:
        waiting = [each]
        while waiting:
            below = [one for one in waiting[-1].below if one not in done]
            if not below:
                done[waiting.pop()] = None
            waiting += below
    return [*done]


def scope_of(found: Found) -> str:
    """Where a cell is in its graph; steps of one cell differ in the number at the end only."""
    return re.sub(r"_\d+\Z", "", found.nodes[0].rpartition("/")[0] or found.nodes[0])


def _named(cells: Iterable[Found]) -> dict[str, Found]:
    """By the scopes of their weights; where several share weights, by where they are in the graph."""
    cells = list(cells)
    wanted: dict[str, list[Found]] = {}
    for each in cells:
        first = next(iter(each.weights.values()), "").partition(" + ")[0].partition(", ")[0]
        scope, count = _ENDINGS.subn("", first)
        each.name = scope if count else scope_of(each)
        wanted.setdefault(each.name, []).append(each)
    found: dict[str, Found] = {}
    for name, group in wanted.items():
        scopes = {scope_of(each) for each in group}
        for each in group:
            base = name if len(scopes) == 1 else scope_of(each)
            base += " (reversed)" * (len(scopes) == 1 and len(group) > 1 and bool(each.reverse))
            k = 1
            each.name = base
            while each.name in found or (each.name in wanted and each.name != name):
                k += 1
                each.name = f"{base} ({k})"
            found[each.name] = each
    return found
