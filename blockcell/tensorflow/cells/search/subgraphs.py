"""Cells of many nodes: BasicRNNCell, LSTMCell, GRUCell, CudnnCompatibleGRUCell, Keras' layers, and their like.

Each is found backwards from its last node, and only if every node on the way is one of the cell's own. What looks like
a cell and is none of these is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..cell.found_cell import At, Found
from ..cell.node_evaluation import Body
from ..graph.graph_reader import Place, Reader, Unknown
from ..graph.op_table import ACTIVATION, OPS, op_of
from ..patterns.gru import gru
from ..patterns.lstm import lstm, projected
from ..patterns.pattern import Candidate, Match, Step, Variant
from ..patterns.rnn import rnn
from ..weights.gate_sums import Other, Sums
from ..weights.weight_sources import Source, Sources
from .recurrences import Product, products_of, recurrences
from .refusals import by_names, is_named, kernels_before, kind_of, misused, shows, strange_node, why

_CLASSES = {
    "basic_rnn_cell": "BasicRNNCell",
    "basic_lstm_cell": "BasicLSTMCell",
    "lstm_cell": "LSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
    "coupled_input_forget_gate_lstm_cell": "CoupledInputForgetGateLSTMCell",
    "gru_cell": "GRUCell",
}
_CLIPS = ("Maximum", "Minimum", "ClipByValue")
_ACTIVATIONS = [name for name, op in OPS.items() if op.activation or op.shows == ACTIVATION]
_PATTERNS: tuple[tuple[Callable[[Sums, Place], Candidate], frozenset[str]], ...] = (
    (projected, frozenset({"MatMul", *_CLIPS})),
    (lstm, frozenset({"Mul"})),
    (gru, frozenset({"Add"})),
    (rnn, frozenset({"Add", "BiasAdd", "MatMul", "Mul", "RealDiv", "Select", *_CLIPS, *_ACTIVATIONS})),
)
"""With the last ops of a step, the patterns that tell most first: an LSTM's cs has the form of a GRU's h, nearly."""


def found_composed(sources: Sources, known: set[str]) -> list[Found]:
    """The cells of many nodes in a graph, and those that look like some; `known` are the weights of other cells."""
    search = _Search(Sums(sources))
    matches = search.matches()
    understood = {name for match in matches for name in match.kernels}
    search.refuse_variants(understood)
    search.refuse_recurrences(known | understood)
    found, refused = [], set[str]()
    for end, (reason, kernels) in search.wrong.items():
        if not refused & kernels.keys():
            found.append(_refused(end, reason, kernels))
        refused |= kernels.keys()
    alive = _alive(search.reader, matches, search.looped)
    found += _found(search.sums, [match for match in alive if not refused & match.kernels.keys()])
    for product, reason in by_names(search.products, known | understood | refused):
        found.append(_refused(product.place, reason, {product.kernel.name: product.kernel}))
    return found


class _Search:
    """What there is in a graph of cells, and of what is none."""

    def __init__(self, sums: Sums) -> None:
        self.sums, self.reader = sums, sums.reader
        self.candidates: list[Candidate] = []
        self.variants: dict[Place, Variant] = {}
        self.products = _of_running(self.reader, products_of(sums))
        bodies = {product.body for product in self.products} | self.reader.running
        nodes = [(op_of(node).name, Place(body, node.name)) for body, node in self.reader.all_nodes() if body in bodies]
        for pattern, ops in _PATTERNS:
            for op, end in nodes:
                if op in ops:
                    try:
                        if self.reader.unchanged(end) is None:  # else the value is another node's
                            self.candidates.append(pattern(sums, end))
                    except Variant as variant:
                        self.variants.setdefault(end, variant)
                    except (Other, Unknown):
                        continue
        self.readers: dict[Place, list[Product]] = {}
        """Products by what they multiply with a weight."""
        for product in self.products:
            self.readers.setdefault(product.operand, []).append(product)
        self.recurrences = recurrences(self.reader, self.products)
        self.looped = {place: each for each in self.recurrences for place in each.places}
        """Recurrences by their nodes."""
        self.wrong: dict[Place, tuple[str, dict[str, Source]]] = {}
        """What is none of the cells: by its last node why, and its kernels."""

    def matches(self) -> list[Match]:
        """Candidates whose operands can be told apart, the input and the state, and that pass their states on."""
        groups: dict[tuple[object, ...], list[Candidate]] = {}
        for each in self.candidates:
            groups.setdefault(each.key, []).append(each)
        found: list[Match] = []
        inside: set[Place | None] = set()
        gated = {place for place, each in self.looped.items() if each.gated}
        states = {key: self._states(group) for key, group in groups.items()}
        named = self._named(groups, states)
        for key, group in groups.items():
            if not (group[0].sure or states[key] or group in named):
                continue
            numbers = self._told_apart([each for each in group if each.end not in inside], states[key])
            kernels = group[0].kernels
            steps = [each.step(number) for each, number in numbers.items()]
            reasons = misused(self.reader, steps, kernels, self.readers, gated) if steps else {}
            matched = len(found)
            for each, number in numbers.items():
                try:
                    if each.end not in reasons:
                        found.append(each.match(number))
                        inside.add(each.inside)
                except (Variant, Unknown) as error:
                    reasons[each.end] = str(error)
            alone = {step.end for step in steps if self._is_alone(step)} if len(found) > matched else ()
            self.wrong |= {end: (reason, kernels) for end, reason in reasons.items() if end not in alone}
        return found

    def _is_alone(self, step: Step) -> bool:
        """Whether nothing says what the states are, as in a function of the cell alone, which Keras stores, too."""
        try:
            for state in step.states:
                self.reader.state(state)
        except Unknown:
            return step.end.body not in self.reader.running
        return False

    def _states(self, group: Sequence[Candidate]) -> set[tuple[object, ...]]:
        """Of steps with the same kernels, the operands that are what one of them gave."""
        ends = {each.end for each in group}
        return {operand.key for each in group for operand in each.operands if self._is_state(operand.place, ends)}

    def _named(
        self, groups: Mapping[tuple[object, ...], list[Candidate]], states: Mapping[tuple[object, ...], object]
    ) -> list[list[Candidate]]:
        """What nothing but the names of its kernels shows to be a cell: steps that do not follow each other."""
        shown = {kernel for key, group in groups.items() if group[0].sure or states[key] for kernel in group[0].kernels}
        found: dict[tuple[str, ...], list[Candidate]] = {}
        for group in groups.values():
            kernels = tuple(group[0].kernels)
            if not group[0].sure and shown.isdisjoint(kernels) and all(map(self._begins, group)):
                if kernels not in found or found[kernels][0].bare:
                    found[kernels] = group
        return [*found.values()]

    def _begins(self, step: Candidate) -> bool:
        """Whether the names tell which operand is the state, and this is nothing that goes around."""
        number = step.by_itself()
        if number is None:
            return False
        try:
            places, looped = self.reader.state(step.operands[number].place)
        except Unknown:
            return False
        return not looped and not any(place._replace(output=0) in self.looped for place in places)

    def _told_apart(self, group: Sequence[Candidate], states: Collection[tuple[object, ...]]) -> dict[Candidate, int]:
        """Of steps with the same kernels, which operand is the state; `states` are those that are."""
        found = {}
        for each in group:
            fits = [k for k, operand in enumerate(each.operands) if operand.key in states]
            number = fits[0] if len(fits) == 1 else each.by_itself()
            if number is not None:
                found[each] = number
            else:
                reason = f"it cannot be told which of its kernels, {' and '.join(each.kernels)}, is for its state"
                self.wrong[each.end] = reason, each.kernels
        return found

    def _is_state(self, place: Place, ends: set[Place]) -> bool:
        try:
            return not ends.isdisjoint(self.reader.state(place)[0])
        except Unknown:
            return False

    def refuse_variants(self, understood: set[str]) -> None:
        """What has a cell's form, or nearly, if it goes around a loop or has a cell's name."""
        by_place = {product.place: product for product in self.products}
        found = {end: kernels_before(self.reader, end, by_place) for end in self.variants}
        for end, variant in self.variants.items():
            kernels = {name: kernel for name, kernel in found[end].items() if name not in understood}
            loop = self.looped.get(end)
            if variant.states:
                ends = {each for each in found if found[each].keys() == found[end].keys()}
                meant = any(self._is_state(state, ends) for state in variant.states)
            else:
                meant = loop is not None or any(map(is_named, [*kernels][:1]))
            if kernels and meant:
                shown = shows(loop) if loop is not None and variant.vague else None
                self.wrong[end] = shown or str(variant), kernels

    def refuse_recurrences(self, known: set[str]) -> None:
        """What goes around a loop, with weights that are none of known cells."""
        # the step before a loop, which learns shapes, shows less than the loop
        for each in sorted(self.recurrences, key=lambda recurrence: strange_node(self.reader, recurrence) is None):
            if not each.gated:
                continue
            kernels = {kernel.name: kernel for kernel in each.kernels if kernel.name not in known}
            if len(kernels) == len(each.kernels) and not each.places & self.wrong.keys():
                self.wrong[each.product.place] = why(self.reader, each), kernels


def _of_running(reader: Reader, products: Sequence[Product]) -> list[Product]:
    """Without the functions that nothing runs, if all of their weights are multiplied with by what runs, too."""
    known = {product.kernel.name for product in products if product.body in reader.running}
    bodies = {product.body for product in products if product.kernel.name not in known} | reader.running
    return [product for product in products if product.body in bodies]


def _alive(reader: Reader, matches: list[Match], looped: Collection[Place]) -> list[Match]:
    """Without steps before a loop of the same cell that nothing depends on, as Keras has them to learn shapes."""
    loops = {tuple(match.kernels) for match in matches if match.end in looped}
    ends = {match.end for match in matches if match.end not in looped and tuple(match.kernels) in loops}
    needed = {body: _needed(reader, body, ends) for body in {end.body for end in ends}}
    return [match for match in matches if match.end not in ends or match.end.name in needed[match.end.body]]


def _needed(reader: Reader, body: str, ends: set[Place]) -> set[str]:
    """What the results of a body depend on; of the graph, that is nodes that nothing reads, but for `ends`."""
    nodes = reader.bodies[body]
    inputs: dict[str, list[str]] = {}
    for name, node in nodes.items():
        with suppress(Unknown):
            inputs[name] = [] if op_of(node).shape_only else [place.name for place in reader.inputs(body, node)]
    if body:
        waiting = [text.partition(":")[0] for text in reader.graph.functions[body].returned.values()]
    else:
        read = {each for before in inputs.values() for each in before}
        waiting = [name for name in nodes if name not in read and Place(body, name) not in ends]
    found = {*waiting}
    while waiting:
        before = [each for each in inputs.get(waiting.pop(), ()) if each not in found]
        found.update(before)
        waiting += before
    return found


def _kind(kernels: dict[str, Source]) -> str:
    """What a cell is, by the names of its weights."""
    name = next(iter(kernels))
    scope = re.sub(r"/(gates|candidate|projection)\Z", "", name.rpartition("/")[0]).rpartition("/")[2]
    return _CLASSES.get(re.sub(r"_\d+\Z", "", scope), kind_of(name))


def _refused(end: Place, reason: str, kernels: dict[str, Source]) -> Found:
    first = next(iter(kernels.values()))
    return Found(end.name, _kind(kernels), [end.name], sources={"w": first}, refused=reason)


def _found(sums: Sums, matches: list[Match]) -> Iterator[Found]:
    """Cells that were understood."""
    bodies: dict[tuple[object, ...], Body | str] = {}
    keys = []
    for match in matches:
        sources = [(role, source.name) for role, source in match.sources.items()]
        keys.append((match.end.body, *sources, *match.attributes.items()))
        if not isinstance(bodies.get(keys[-1]), Body):
            bodies[keys[-1]] = _body(sums, match)
    for key, match in zip(keys, matches, strict=True):
        body, kind, end = bodies[key], match.kind or _kind(match.kernels), match.end
        kind = kind if match.cell in kind else match.cell
        at = At(end.body, match.x, match.step.states, end)
        more: dict[str, Any] = {"cell": match.cell, "sources": match.sources, "attributes": match.attributes, "at": at}
        more |= {"refused": body} if isinstance(body, str) else {"parts": body.sources, "step": body.step}
        yield Found(end.name, kind, [end.name], **more)


def _body(sums: Sums, match: Match) -> Body | str:
    """A match's nodes, or why they are no function of its input and its states."""
    step, straight = match.step, sums.reader.straight
    try:
        places = [straight(place) for place in (match.x, *step.states)]
        if len({*places}) < len(places):  # in a first step the states may be one tensor, of zeros
            return "its input and its states are not told apart: they come from one node"
        if not {*places}.isdisjoint(straight(place) for place in step.results):
            return "a step reads what it computes itself"
        weights = _stored(match.sources.values())
        for place, size in zip(places, match.sizes, strict=True):
            with suppress(Unknown):  # most are computed, or fed
                given = sums.piece(place)
                if given.shape[1:] != (size,) or weights & _stored([given.source]):
                    return f"its input or a state is of {given.source.name}, of the shape {given.shape}"
        return Body(sums, match.x, step.states, step.results, match.sizes)
    except Unknown as unknown:
        return f"its nodes are not understood: {unknown}"


def _stored(sources: Iterable[Source]) -> set[str]:
    """The names of the variables and constants that these are made of, in whole or in part."""
    return {leaf.partition(",")[0] for source in sources for leaf in source.leaves}
