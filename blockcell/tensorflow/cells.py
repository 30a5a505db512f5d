"""All cells of a model, by names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .blocks import BLOCKS, found_block
from .composed import found_composed
from .found import Found
from .graphs import Graph
from .named import found_named
from .trace import Tracer
from .variables import Variables

_ENDINGS = re.compile(
    r"/(gates/|candidate/)?(kernel|bias|weights|biases|w_ru|b_ru|w_c|b_c|W_0|B|w|b)(/(part_\d+|read|ReadVariableOp))*\Z"
)
_SHOWN = 60


class Cells(Mapping[str, Found]):
    """The cells that were found, by names."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Found:
        if name not in self._found:
            raise KeyError(f"{name}; there are {', '.join(self._found) or 'none'}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        lines = [repr(each) for each in self._found.values()]
        left = len(lines) - _SHOWN
        lines[_SHOWN:] = [f"... {left} more"] if left > 0 else []
        return "\n    ".join([f"<{len(self)} cells>", *lines])


def find(graphs: Sequence[Graph], variables: Variables | None) -> Cells:
    """The cells of graphs, or without any those that the variables' names tell. Frozen graphs have no variables."""
    if not graphs and variables is not None:
        return Cells({each.name: each for each in found_named(variables)})
    found: list[Found] = []
    for graph in graphs:
        tracer = Tracer(graph, variables)
        blocks = [found_block(tracer, body, node) for body, node in tracer.all_nodes() if node.op in BLOCKS]
        found += blocks + found_composed(tracer, {name for each in blocks for name in each.weights.values()})
    return Cells(_named(_together(found)))


def _together(found: Iterable[Found]) -> list[Found]:
    """The steps of an unrolled cell, and copies of it in other functions, are one."""
    cells: dict[tuple[object, ...], Found] = {}
    nodes: dict[tuple[object, ...], list[str]] = {}
    for each in found:
        weights = tuple(each.weights.items()) or each.nodes
        key: tuple[object, ...] = each.kind, weights, tuple(each.attributes.items()), scope_of(each), each.refused
        cells.setdefault(key, each)
        nodes.setdefault(key, []).extend(each.nodes)
    for key, each in cells.items():
        each.nodes = tuple(nodes[key])
    return [*cells.values()]


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
        for each in group:
            base = name if len(group) == 1 else scope_of(each)
            k = 1
            each.name = base
            while each.name in found or (each.name in wanted and each.name != name):
                k += 1
                each.name = f"{base} ({k})"
            found[each.name] = each
    return found
