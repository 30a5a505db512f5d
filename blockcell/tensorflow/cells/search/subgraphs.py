"""The search for cells of many nodes: BasicRNNCell, LSTMCell, GRUCell, CudnnCompatibleGRUCell and Keras' layers.

In come the weights of a graph; out go the cells, of which each is matched backwards from its last node, and only if
every node on the way belongs to it. Out go refusals, too, of whatever resembles a cell and is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..cell.found_cell import CellInGraph, Found
from ..cell.node_evaluation import StepProgram
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import ACTIVATION, OPS, graph_op
from ..patterns.gru import match_gru
from ..patterns.lstm import match_lstm, match_projected_lstm
from ..patterns.pattern import CellCandidate, CellMatch, Refusal, Step
from ..patterns.rnn import match_rnn
from ..weights.gate_sums import GateSums, NoMatch
from ..weights.weight_sources import WeightSource, WeightSources
from . import refusals
from .recurrences import WeightProduct, find_recurrences, find_weight_products

_CLASSES = {
    "basic_rnn_cell": "BasicRNNCell",
    "basic_lstm_cell": "BasicLSTMCell",
    "lstm_cell": "LSTMCell",
    "cudnn_compatible_lstm_cell": "CudnnCompatibleLSTMCell",
    "coupled_input_forget_gate_lstm_cell": "CoupledInputForgetGateLSTMCell",
    "gru_cell": "GRUCell",
}
_CLIPS = ("Maximum", "Minimum", "ClipByValue")
_ACTIVATIONS = [name for name, op in OPS.items() if op.activation or op.refusal == ACTIVATION]
_PATTERNS: tuple[tuple[Callable[[GateSums, Place], CellCandidate], frozenset[str]], ...] = (
    (match_projected_lstm, frozenset({"MatMul", *_CLIPS})),
    (match_lstm, frozenset({"Mul"})),
    (match_gru, frozenset({"Add"})),
    (match_rnn, frozenset({"Add", "BiasAdd", "MatMul", "Mul", "RealDiv", "Select", *_CLIPS, *_ACTIVATIONS})),
)
"""Patterns with the ops that may end a step, the surest first: an LSTM's cs almost has the form of a GRU's h."""
_Steps = list[CellCandidate]
_Key = tuple[object, ...]
"""What all steps of a cell, or an operand in all steps, have in common."""


def search_subgraphs(sources: WeightSources, known_weights: set[str]) -> list[Found]:
    """Find the cells of many nodes in a graph and what resembles some; other cells have the known weights."""
    search = _Search(GateSums(sources))
    matches = search.matches()
    understood = {name for match in matches for name in match.kernels}
    search.refuse_unsupported(understood)
    search.refuse_recurrences(known_weights | understood)
    cells, refused = [], set[str]()
    for end, (reason, kernels) in search.refused.items():
        if not refused & kernels.keys():
            cells.append(_refused_cell(end, reason, kernels))
        refused |= kernels.keys()
    needed_matches = _drop_unused_steps(search.reader, matches, search.recurrence_by_place)
    cells += _understood_cells(search.sums, [match for match in needed_matches if not refused & match.kernels.keys()])
    for product, reason in refusals.refuse_by_name(search.products, known_weights | understood | refused):
        cells.append(_refused_cell(product.place, reason, {product.kernel.name: product.kernel}))
    return cells


class _Search:
    """Candidates, products and recurrences of a graph, and what is refused."""

    def __init__(self, sums: GateSums) -> None:
        self.sums, self.reader = sums, sums.reader
        self.candidates: list[CellCandidate] = []
        self.unsupported: dict[Place, Refusal] = {}
        self.products = _running_products(self.reader, find_weight_products(sums))
        bodies = {product.body for product in self.products} | self.reader.running_bodies
        nodes = [(body, node) for body, node in self.reader.all_nodes() if body in bodies]
        ends = [(graph_op(node).name, Place(body, node.name)) for body, node in nodes]
        for pattern, last_ops in _PATTERNS:
            for op, end in ends:
                if op in last_ops:
                    try:
                        if self.reader.forwarded_input(end) is None:  # else the value is another node's
                            self.candidates.append(pattern(sums, end))
                    except Refusal as refusal:
                        self.unsupported.setdefault(end, refusal)
                    except (NoMatch, UnknownValue):
                        continue
        self.products_by_operand: dict[Place, list[WeightProduct]] = {}
        """The products of each operand with weights."""
        for product in self.products:
            self.products_by_operand.setdefault(product.operand, []).append(product)
        self.recurrences = find_recurrences(self.reader, self.products)
        self.recurrence_by_place = {place: recurrence for recurrence in self.recurrences for place in recurrence.places}
        """The recurrence of each node."""
        self.refused: dict[Place, tuple[str, dict[str, WeightSource]]] = {}
        """The reason and the kernels of each refusal, by its last node."""

    def matches(self) -> list[CellMatch]:
        """Match the candidates whose input and state can be told apart, and that pass their states on."""
        groups: dict[_Key, _Steps] = {}
        for candidate in self.candidates:
            groups.setdefault(candidate.key, []).append(candidate)
        matches: list[CellMatch] = []
        inner_ends: set[Place | None] = set()
        gated = {place for place, recurrence in self.recurrence_by_place.items() if recurrence.gated}
        states = {key: self._state_keys(group) for key, group in groups.items()}
        named_groups = self._named_groups(groups, states)
        for key, group in groups.items():
            if not (group[0].sure or states[key] or group in named_groups):
                continue
            outer = [candidate for candidate in group if candidate.end not in inner_ends]
            numbers = self._state_numbers(outer, states[key])
            kernels = group[0].kernels
            steps = [candidate.step(number) for candidate, number in numbers.items()]
            reasons = refusals.find_misused_states(self.reader, steps, kernels, self.products_by_operand, gated)
            matched = len(matches)
            for candidate, number in numbers.items():
                try:
                    if candidate.end not in reasons:
                        matches.append(candidate.match(number))
                        inner_ends.add(candidate.inner_end)
                except (Refusal, UnknownValue) as error:
                    reasons[candidate.end] = str(error)
            standalone = {step.end for step in steps if self._is_alone(step)} if len(matches) > matched else ()
            self.refused |= {end: (reason, kernels) for end, reason in reasons.items() if end not in standalone}
        return matches

    def _is_alone(self, step: Step) -> bool:
        """Whether nothing passes states to a step, as in a function of the cell alone, which Keras stores, too."""
        try:
            for state in step.states:
                self.reader.state_origins(state)
        except UnknownValue:
            return step.end.body not in self.reader.running_bodies
        return False

    def _state_keys(self, group: Sequence[CellCandidate]) -> set[_Key]:
        """Return the keys of the operands that one of the steps with the same kernels gave."""
        ends = {candidate.end for candidate in group}
        operands = [operand for candidate in group for operand in candidate.operands]
        return {operand.key for operand in operands if self._is_state(operand.place, ends)}

    def _named_groups(self, groups: Mapping[_Key, _Steps], states: Mapping[_Key, object]) -> list[_Steps]:
        """Return steps that only the names of their kernels show to be cells, as they do not follow each other."""
        shown_groups = [group for key, group in groups.items() if group[0].sure or states[key]]
        shown_kernels = {kernel for group in shown_groups for kernel in group[0].kernels}
        group_by_kernels: dict[tuple[str, ...], _Steps] = {}
        for group in groups.values():
            kernels = tuple(group[0].kernels)
            if not group[0].sure and shown_kernels.isdisjoint(kernels) and all(map(self._is_single_step, group)):
                if kernels not in group_by_kernels or group_by_kernels[kernels][0].may_be_followed:
                    group_by_kernels[kernels] = group
        return [*group_by_kernels.values()]

    def _is_single_step(self, step: CellCandidate) -> bool:
        """Whether the names tell which operand is the state, and no loop carries this operand."""
        number = step.guess_state()
        if number is None:
            return False
        try:
            places, in_loop = self.reader.state_origins(step.operands[number].place)
        except UnknownValue:
            return False
        return not in_loop and not any(place._replace(output=0) in self.recurrence_by_place for place in places)

    def _state_numbers(self, group: Sequence[CellCandidate], states: Collection[_Key]) -> dict[CellCandidate, int]:
        """Return which operand of each step is the state; `states` are the keys of operands that surely are."""
        state_numbers = {}
        for candidate in group:
            matching = [k for k, operand in enumerate(candidate.operands) if operand.key in states]
            number = matching[0] if len(matching) == 1 else candidate.guess_state()
            if number is not None:
                state_numbers[candidate] = number
            else:
                reason = f"it cannot be told which of its kernels, {' and '.join(candidate.kernels)}, is for its state"
                self.refused[candidate.end] = reason, candidate.kernels
        return state_numbers

    def _is_state(self, place: Place, ends: set[Place]) -> bool:
        try:
            return not ends.isdisjoint(self.reader.state_origins(place)[0])
        except UnknownValue:
            return False

    def refuse_unsupported(self, understood: set[str]) -> None:
        """Refuse what almost has the form of a cell, if it is in a recurrence or has the name of a cell."""
        by_place = {product.place: product for product in self.products}
        kernels_by_end = {end: refusals.kernels_before(self.reader, end, by_place) for end in self.unsupported}
        for end, refusal in self.unsupported.items():
            kernels = {name: kernel for name, kernel in kernels_by_end[end].items() if name not in understood}
            recurrence = self.recurrence_by_place.get(end)
            if refusal.states:
                names = kernels_by_end[end].keys()
                ends = {other_end for other_end, other in kernels_by_end.items() if other.keys() == names}
                is_cell = any(self._is_state(state, ends) for state in refusal.states)
            else:
                is_cell = recurrence is not None or any(map(refusals.has_cell_name, [*kernels][:1]))
            if kernels and is_cell:
                reason = refusals.revealing_node(recurrence) if recurrence is not None and refusal.is_weak else None
                self.refused[end] = reason or str(refusal), kernels

    def refuse_recurrences(self, known_weights: set[str]) -> None:
        """Refuse recurrences that may be cells with gates, if their weights are not those of known cells."""
        # the step before a loop, which learns shapes, shows less than the loop
        for recurrence in sorted(self.recurrences, key=lambda loop: refusals.strange_node(self.reader, loop) is None):
            if not recurrence.gated:
                continue
            kernels = {kernel.name: kernel for kernel in recurrence.kernels if kernel.name not in known_weights}
            if len(kernels) == len(recurrence.kernels) and not recurrence.places & self.refused.keys():
                self.refused[recurrence.product.place] = refusals.explain_refusal(self.reader, recurrence), kernels


def _running_products(reader: GraphReader, products: Sequence[WeightProduct]) -> list[WeightProduct]:
    """List the products without functions that nothing runs, if what runs has products with all of their weights."""
    running = reader.running_bodies
    kernels = {product.kernel.name for product in products if product.body in running}
    bodies = {product.body for product in products if product.kernel.name not in kernels} | running
    return [product for product in products if product.body in bodies]


def _drop_unused_steps(reader: GraphReader, matches: list[CellMatch], looped: Collection[Place]) -> list[CellMatch]:
    """List the matches without unused steps before a loop of the same cell, as Keras has them to learn shapes."""
    loops = {tuple(match.kernels) for match in matches if match.end in looped}
    ends = {match.end for match in matches if match.end not in looped and tuple(match.kernels) in loops}
    needed = {body: _needed_names(reader, body, ends) for body in {end.body for end in ends}}
    return [match for match in matches if match.end not in ends or match.end.name in needed[match.end.body]]


def _needed_names(reader: GraphReader, body: str, ends: set[Place]) -> set[str]:
    """Name what the results of a body depend on; those of the graph are nodes that nothing reads, but for `ends`."""
    nodes = reader.bodies[body]
    inputs: dict[str, list[str]] = {}
    for name, node in nodes.items():
        with suppress(UnknownValue):
            inputs[name] = [] if graph_op(node).shape_only else [place.name for place in reader.inputs(body, node)]
    if body:
        waiting = [text.partition(":")[0] for text in reader.graph.functions[body].returned.values()]
    else:
        used = {name for names in inputs.values() for name in names}
        waiting = [name for name in nodes if name not in used and Place(body, name) not in ends]
    needed = {*waiting}
    while waiting:
        unseen = [name for name in inputs.get(waiting.pop(), ()) if name not in needed]
        needed.update(unseen)
        waiting += unseen
    return needed


def _cell_class(kernels: dict[str, WeightSource]) -> str:
    """Return the class of a cell by the names of its weights."""
    name = next(iter(kernels))
    scope = re.sub(r"/(gates|candidate|projection)\Z", "", name.rpartition("/")[0]).rpartition("/")[2]
    return _CLASSES.get(re.sub(r"_\d+\Z", "", scope), refusals.kind_by_name(name))


def _refused_cell(end: Place, reason: str, kernels: dict[str, WeightSource]) -> Found:
    first = next(iter(kernels.values()))
    return Found(end.name, _cell_class(kernels), [end.name], sources={"w": first}, refused=reason)


def _understood_cells(sums: GateSums, matches: list[CellMatch]) -> Iterator[Found]:
    """Make cells of matches, each with the program of its step, or refused if that is not understood."""
    programs: dict[_Key, StepProgram | str] = {}
    keys = []
    for match in matches:
        sources = [(role, source.name) for role, source in match.sources.items()]
        keys.append((match.end.body, *sources, *match.attributes.items()))
        if not isinstance(programs.get(keys[-1]), StepProgram):
            programs[keys[-1]] = _compile_step(sums, match)
    for key, match in zip(keys, matches, strict=True):
        program, kind, end = programs[key], match.kind or _cell_class(match.kernels), match.end
        kind = kind if match.cell in kind else match.cell
        arguments: dict[str, Any] = {"cell": match.cell, "sources": match.sources, "attributes": match.attributes}
        arguments["in_graph"] = CellInGraph(end.body, match.x, match.step.states, end)
        if isinstance(program, StepProgram):
            arguments |= {"parts": program.sources, "step": program.step}
        else:
            arguments["refused"] = program
        yield Found(end.name, kind, [end.name], **arguments)


def _compile_step(sums: GateSums, match: CellMatch) -> StepProgram | str:
    """Compile the nodes of a match, or return why they are no function of its input and its states."""
    step, resolve = match.step, sums.reader.resolve
    try:
        places = [resolve(place) for place in (match.x, *step.states)]
        if len({*places}) < len(places):  # in a first step the states may be one tensor, of zeros
            return "its input and its states are not told apart: they come from one node"
        if not {*places}.isdisjoint(resolve(place) for place in step.results):
            return "a step reads what it computes itself"
        weights = _weight_names(match.sources.values())
        for place, size in zip(places, match.sizes, strict=True):
            with suppress(UnknownValue):  # most are computed, or fed
                piece = sums.weight_slice(place)
                if piece.shape[1:] != (size,) or weights & _weight_names([piece.source]):
                    return f"its input or a state is of {piece.source.name}, of the shape {piece.shape}"
        return StepProgram(sums, match.x, step.states, step.results, match.sizes)
    except UnknownValue as unknown:
        return f"its nodes are not understood: {unknown}"


def _weight_names(sources: Iterable[WeightSource]) -> set[str]:
    """Name the variables and constants that weights are made of, in whole or in part."""
    return {leaf.partition(",")[0] for source in sources for leaf in source.leaves}
