"""All cells of a model, by names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import plain
from ..layers import GRU, LSTM, Bidirectional, Stack
from .blocks import BLOCKS, found_block
from .composed import found_composed
from .found import Found
from .graphs import Graph
from .named import found_named
from .savers import tracer_of
from .sequences import Sequences, Use
from .trace import Tracer, Unknown
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

    def layer(
        self, *, forget_bias: float | None = None, cell_clip: float | None = None, average: bool = False
    ) -> LSTM | GRU | Bidirectional | Stack:
        """The layer of all cells that are not refused, as the graph has them on top of each other and side by side.

        A cell is its own layer, a forward and a reversed one of the same x are a `Bidirectional`, and what is on top of
        each other is a `Stack`. y is in the order of x. States are zero unless given, whatever the graph begins with.

        Parameters
        ----------
        forget_bias, cell_clip, average
            As in `Found.layer`, for each cell.

        Raises
        ------
        ValueError
            The cells are not known to be one layer, as something else is between them or they read several inputs; or
            `Found.layer` raises it.
        """
        levels = self.levels()
        given: dict[str, Any] = {"forget_bias": forget_bias, "cell_clip": cell_clip, "average": average}
        layers: list[Any] = []
        for level in levels:
            if len(level) == 1:
                layers += [each.layer(**given) for each in level[0]]
            else:
                halves = [[each.layer(reverse=False, **given) for each in chain] for chain in level]
                layers.append(Bidirectional(*(half[0] if len(half) == 1 else Stack(half) for half in halves)))
        return layers[0] if len(layers) == 1 else Stack(layers)

    def levels(self) -> list[tuple[list[Found], ...]]:
        """What `layer` puts on top of each other: cells, or those of the forward and of the backward direction."""
        usable = [each for each in self._found.values() if each.refused is None]
        if len(usable) < 2 and not any(each.mixed for each in usable):
            if not usable:
                raise ValueError("no cell is left" if self._found else "there is no cell")
            return [(usable,)]
        for each in usable:
            if each.mixed:
                raise ValueError(f"{plain(each.name)} runs several times, and does not read the same cells each time")
            if each.reverse is None:
                raise ValueError(
                    f"the file does not tell in which direction {plain(each.name)} runs, or what its input is"
                )
        read = {below for each in usable for below in each.below}
        here = tuple(sorted((each for each in usable if each not in read), key=lambda each: bool(each.reverse)))
        if not 1 <= len(here) <= 2 or (len(here) == 2 and [each.reverse for each in here] != [False, True]):
            raise ValueError(f"the output of several cells is read by none of them: {_inputs(here)}")
        if len(here) == 2 and here[0] in here[1].behind and here[1] not in here[0].behind:
            one, other = (plain(each.name) for each in here)
            raise ValueError(f"the graph has the output of {other} before that of {one}")
        found: list[tuple[list[Found], ...]] = []
        while here:
            chains = tuple([each] for each in here)
            if len(chains) > 2 or (len(chains) == 2 and [each.reverse for each in here] != [False, True]):
                raise ValueError(f"{_inputs(here)}: these are side by side, and not forward and then backward")
            while len(chains) == 2 and chains[0][0].below != chains[1][0].below:
                below = [chain[0].below for chain in chains]
                if any(len(each) != 1 or each[0].reverse != here[k].reverse for k, each in enumerate(below)):
                    raise ValueError(f"forward and backward do not read the same: {_inputs(here)}")
                for chain, (each,) in zip(chains, below, strict=True):
                    chain.insert(0, each)
            first = [chain[0] for chain in chains]
            if not first[0].below and len({each.origins or each for each in first}) != 1:
                raise ValueError(f"forward and backward do not read the same: {_inputs(first)}")
            found.insert(0, chains)
            here = first[0].below
        dtypes = {"float32" if each.dtype == "bfloat16" else each.dtype for each in usable}
        if len(dtypes) > 1:
            raise ValueError(f"the cells are of {' and '.join(sorted(dtypes))}; a layer is of one dtype")
        return found

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
    for k, graph in enumerate(graphs):
        tracer = tracer_of(graph, variables)
        inside = [found_block(tracer, body, node) for body, node in tracer.all_nodes() if node.op in BLOCKS]
        inside += found_composed(tracer, {name for each in inside for name in each.weights.values()})
        _connect(tracer, k, inside)
        found += inside
    return Cells(_named(_ordered(_together(found))))


def _connect(tracer: Tracer, number: int, found: Iterable[Found]) -> None:
    """Say of each cell in a graph in which direction it runs over what."""
    chains = _chains(tracer, [each for each in found if each.refused is None and each.at is not None])
    sequences = Sequences(tracer, [Use([each.at for each in chain if each.at is not None]) for chain in chains])
    for chain, use in zip(chains, sequences.uses, strict=True):
        below = [chains[part.source][0] for part in use.parts or () if isinstance(part.source, int) and not part.order]
        places = [(part.source, part.axis) for part in use.parts or () if not isinstance(part.source, int)]
        for each in chain:
            each.reverse = None if use.turns is None else bool(use.turns)
            if use.turns is not None and not places:
                each.below = tuple(below)
            each.origins = frozenset((number, *place) for place in places)
    for one, other in sequences.joined():
        chains[one][0].behind.add(chains[other][0])


def _chains(tracer: Tracer, found: Iterable[Found]) -> list[list[Found]]:
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
            try:
                before = None if each.at.state is None else ends.get(tracer.straight(each.at.state))
            except Unknown:
                before = None
            if before is None or before is each:
                first.append(each)
            else:
                after.setdefault(before, []).append(each)
        left = dict.fromkeys(group)
        for each in [*first, *group]:
            if each not in left:
                continue
            del left[each]
            chains.append([each])
            while len(after.get(chains[-1][-1], [])) == 1 and after[chains[-1][-1]][0] in left:
                chains[-1].append(after[chains[-1][-1]][0])
                del left[chains[-1][-1]]
    return chains


def _key(each: Found) -> tuple[object, ...]:
    weights = tuple(each.weights.items()) or each.nodes
    return each.kind, weights, tuple(each.attributes.items()), scope_of(each), each.refused


def _together(found: Iterable[Found]) -> list[Found]:
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
        left = [each]
        while left:
            below = [one for one in left[-1].below if one not in done]
            if not below:
                done[left.pop()] = None
            left += below
    return [*done]


def _inputs(cells: Iterable[Found]) -> str:
    """Cells, and what they read."""
    said = (f"{each.name} (of {', '.join(each.input_from) or each.input or 'something'})" for each in cells)
    return plain(", ".join(said))


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
