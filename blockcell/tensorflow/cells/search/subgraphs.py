"""The search for cells of many nodes: BasicRNNCell, LSTMCell, GRUCell, CudnnCompatibleGRUCell and Keras' layers.

In come the weights of a graph; out go definitions of cells. Each cell is matched backwards from its last node, and only
if every node on the way belongs to it. Whatever resembles a cell and is none of these is refused.

An example is the step of a BasicLSTMCell in a loop, which passes h and cs on as h_prev and cs_prev::

    z = BiasAdd(MatMul(ConcatV2(x, h_prev), kernel), bias)
    i, ci, f, o = Split(z)
    kept = Mul(cs_prev, Sigmoid(Add(f, 1.0)))
    new = Mul(Sigmoid(i), Tanh(ci))
    cs = Add(kept, new)
    h = Mul(Tanh(cs), Sigmoid(o))

1. Candidates: `match_lstm` is tried with each Mul as the last node of a step. With `kept` or `new` it raises `NoMatch`:
   neither factor is an activation of a sum of two products. With `h` it finds cs behind Tanh, and the gate o, which is
   Sigmoid of a `GateSum` with the last H columns of kernel and bias. Of the four factors of `kept` and `new`, Tanh(ci)
   has cs' activation, two have o's, and cs_prev is left; the gate beside cs_prev is f, and its number 1.0 the forget
   bias. The operands of all gates are x and h_prev: an `LstmCandidate`, which does not know yet which one is the state.
   `match_rnn` makes candidates, too: MatMul, z, Sigmoid(i), Tanh(ci) and Sigmoid(o) each have the form of an RNN.
2. Groups: candidates with the same `key`, as the steps of an unrolled cell have it, are one cell.
3. Proof: a group is a cell if its nodes prove it (`proven_by_nodes`), as Tanh(cs) does; if one of its steps gave an
   operand of a step (`_state_keys`); or, of single steps, by the names of kernels. The RNNs are dropped: nothing does.
4. States: the loop passes h on as the second operand, which is thus the state, and the first is x. A step whose cs_prev
   and h_prev are not the cs and h of a step is refused. A function that nothing calls, as Keras stores one for a cell
   alone, passes no states; its step (`_is_uncalled`) is ignored instead if another step of the group matches.
5. Order: MatMul(h, w_p) behind h would make a projected LSTM, whose pattern comes first in `_PATTERNS`, as its match
   replaces the one that ends at h (`unprojected_end`). Of several refusals with one last node the first stays.
6. The rest: a cycle of nodes with other kernels is refused if it has a Mul and an activation (`may_have_gates`), and so
   are other kernels with the names of cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ....convert.tf1 import SCOPES
from ..cell.cell_definition import CellDefinition, CellInGraph
from ..cell.node_evaluation import StepProgram
from ..graph.activations import find_activation
from ..graph.dependences import Dependences
from ..graph.graph_reader import GraphReader, Place, UnknownValue
from ..graph.op_table import ACTIVATION, OPS, graph_op
from ..patterns.gru import match_gru
from ..patterns.lstm import match_lstm, match_projected_lstm
from ..patterns.pattern import CellCandidate, CellMatch, Refusal
from ..patterns.rnn import match_rnn
from ..weights.gate_sums import GateSums, NoMatch
from ..weights.weight_slices import WeightSource
from ..weights.weight_sources import WeightSources
from .recurrences import Recurrence, WeightProducts, find_recurrences, find_weight_products
from .refusals import (
    RefusedNodes,
    cell_scope,
    class_by_name,
    find_misused_states,
    refuse_by_name,
    refuse_recurrences,
    refuse_unsupported,
)

_CLASSES = SCOPES | {"lstm_cell": "LSTMCell", "basic_rnn_cell": "BasicRNNCell", "gru_cell": "GRUCell"}
_CLIPS = ("Maximum", "Minimum", "ClipByValue")
_ACTIVATIONS = [name for name, op in OPS.items() if op.activation or op.refusal == ACTIVATION]
_PATTERNS: tuple[tuple[Callable[[GateSums, Place], CellCandidate], frozenset[str]], ...] = (
    (match_projected_lstm, frozenset({"MatMul", *_CLIPS})),
    (match_lstm, frozenset({"Mul"})),
    (match_gru, frozenset({"Add"})),
    (match_rnn, frozenset({"Add", "BiasAdd", "MatMul", "Mul", "RealDiv", "Select", *_CLIPS, *_ACTIVATIONS})),
)
"""Patterns with the ops that may end a step; the example above says why their order matters."""
_Key = tuple[object, ...]
"""What all steps of a cell, or an operand in all steps, have in common."""


def search_subgraphs(sources: WeightSources, weights_of_block_ops: set[str]) -> list[CellDefinition]:
    """Define the cells of many nodes in a graph, and what resembles one and shares no weights with block ops."""
    sums, reader = GateSums(sources), sources.reader
    products = _running_products(reader, find_weight_products(sums))
    dependences = Dependences(reader)
    recurrences = find_recurrences(reader, dependences, products)
    recurrence_by_place = {place: recurrence for recurrence in recurrences for place in recurrence.nodes}
    candidates, unsupported = _match_patterns(sums, {place.body for place in products} | reader.running_bodies)
    matches, refused = _CandidateMatcher(reader, dependences, recurrence_by_place).match(candidates)
    matched_kernels = {name for match in matches for name in match.kernels}
    refused |= refuse_unsupported(reader, unsupported, products, recurrence_by_place, matched_kernels)
    refused |= refuse_recurrences(recurrences, weights_of_block_ops | matched_kernels, refused)
    cells, refused_kernels = [], set[str]()
    for end, (reason, kernels) in refused.items():
        if refused_kernels.isdisjoint(kernels):
            cells.append(_refuse_cell(end, reason, kernels))
        refused_kernels |= kernels.keys()
    needed_matches = _drop_unused_steps(reader, dependences, matches)
    cells += _define_cells(sums, [match for match in needed_matches if refused_kernels.isdisjoint(match.kernels)])
    for place, reason in refuse_by_name(products, weights_of_block_ops | matched_kernels | refused_kernels):
        cells.append(_refuse_cell(place, reason, {products[place].name: products[place]}))
    return cells


def _match_patterns(sums: GateSums, bodies: Collection[str]) -> tuple[list[CellCandidate], dict[Place, Refusal]]:
    """Match each pattern with all nodes of some bodies; return candidates, and the cells that no layer computes."""
    candidates: list[CellCandidate] = []
    unsupported: dict[Place, Refusal] = {}
    ends = [(graph_op(node).name, Place(body, node.name)) for body, node in sums.reader.all_nodes() if body in bodies]
    for pattern, last_ops in _PATTERNS:
        for op, end in ends:
            if op not in last_ops:
                continue
            try:
                if sums.reader.forwarded_input(end) is None:  # else the value is another node's
                    candidates.append(pattern(sums, end))
            except Refusal as refusal:
                unsupported.setdefault(end, refusal)
            except (NoMatch, UnknownValue):
                continue
    return candidates, unsupported


class _CandidateMatcher:
    """Tells inputs and states of candidates apart, by how the steps of a graph follow each other."""

    def __init__(
        self, reader: GraphReader, dependences: Dependences, recurrence_by_place: Mapping[Place, Recurrence]
    ) -> None:
        self._reader, self._dependences, self._recurrence_by_place = reader, dependences, recurrence_by_place
        self._gate_places = {place for place, recurrence in recurrence_by_place.items() if recurrence.may_have_gates}

    def match(self, candidates: Sequence[CellCandidate]) -> tuple[list[CellMatch], dict[Place, RefusedNodes]]:
        """Match the candidates that are proven to be cells; return matches, and refusals by their last nodes."""
        groups: dict[_Key, list[CellCandidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.key, []).append(candidate)
        state_keys = {key: self._state_keys(group) for key, group in groups.items()}
        proven_keys = {key for key, group in groups.items() if group[0].proven_by_nodes or state_keys[key]}
        proven_keys |= self._keys_proven_by_name(groups, proven_keys)
        matches: list[CellMatch] = []
        refused: dict[Place, RefusedNodes] = {}
        unprojected_ends: set[Place | None] = set()
        for key, group in groups.items():
            if key in proven_keys:
                steps, kernels = [step for step in group if step.end not in unprojected_ends], group[0].kernels
                group_matches, reasons = self._match_steps(steps, state_keys[key])
                matches += group_matches.values()
                refused |= {end: RefusedNodes(reason, kernels) for end, reason in reasons.items()}
                unprojected_ends |= {candidate.unprojected_end for candidate in group_matches}
        return matches, refused

    def _match_steps(
        self, candidates: Sequence[CellCandidate], state_keys: Collection[_Key]
    ) -> tuple[dict[CellCandidate, CellMatch], dict[Place, str]]:
        """Match the steps of a cell; return matches by candidates, and reasons to refuse steps by their last nodes."""
        matches: dict[CellCandidate, CellMatch] = {}
        reasons: dict[Place, str] = {}
        for candidate in candidates:
            try:
                matches[candidate] = candidate.match(_state_number(candidate, state_keys))
            except (Refusal, UnknownValue) as error:
                reasons[candidate.end] = str(error)
        steps = [match.step for match in matches.values()]
        misused = find_misused_states(self._reader, steps, self._gate_places)
        matches = {candidate: match for candidate, match in matches.items() if candidate.end not in misused}
        ignored_ends = {step.h for step in steps if self._is_uncalled(step)} if matches else set[Place]()
        return matches, reasons | {end: reason for end, reason in misused.items() if end not in ignored_ends}

    def _is_uncalled(self, step: CellInGraph) -> bool:
        """Return whether nothing passes states to a step, as in a function that Keras stores for the cell alone."""
        try:
            for state in step.states:
                self._reader.state_origins(state)
        except UnknownValue:
            return step.body not in self._reader.running_bodies
        return False

    def _state_keys(self, group: Sequence[CellCandidate]) -> set[_Key]:
        """Return the keys of the operands that one of the steps with the same kernels gave."""
        ends = {candidate.end for candidate in group}
        operands = [operand for candidate in group for operand in candidate.operands]
        return {operand.key for operand in operands if self._reader.is_state_of(operand.place, ends)}

    def _keys_proven_by_name(
        self, groups: Mapping[_Key, Sequence[CellCandidate]], proven_keys: Collection[_Key]
    ) -> set[_Key]:
        """Return the keys of single steps that only the names of their kernels prove to be cells.

        Groups with the same kernels are one step with and without the clip at its end. The first group counts behind
        which no more may follow, else the last one.
        """
        proven_kernels = {kernel for key in proven_keys for kernel in groups[key][0].kernels}
        keys_by_kernels: dict[tuple[str, ...], list[_Key]] = {}
        for key, group in groups.items():
            kernels, is_proven = tuple(group[0].kernels), group[0].proven_by_nodes
            if not is_proven and proven_kernels.isdisjoint(kernels) and all(map(self._is_single_step, group)):
                keys_by_kernels.setdefault(kernels, []).append(key)
        return {
            next((key for key in keys if not groups[key][0].may_be_followed), keys[-1])
            for keys in keys_by_kernels.values()
        }

    def _is_single_step(self, candidate: CellCandidate) -> bool:
        """Return whether names tell which operand is the state, no loop carries it, and the activation is all of one.

        What an activation of several nodes is applied to, such as that of a swish, is read by more than one of them.
        """
        number, activated = candidate.guess_state(), find_activation(self._reader, candidate.end)
        inner = () if activated is None else self._reader.walk([activated.inner], self._forwarded)
        if number is None or any(len(self._dependences.readers(place)) > 1 for place in inner):
            return False
        try:
            places, in_loop, _ = self._reader.state_origins(candidate.operands[number].place)
        except UnknownValue:
            return False
        return not in_loop and not any(place._replace(output=0) in self._recurrence_by_place for place in places)

    def _forwarded(self, place: Place) -> tuple[Place, ...]:
        origin = self._reader.forwarded_input(place, "step")
        return () if origin is None else (origin,)


def _state_number(candidate: CellCandidate, state_keys: Collection[_Key]) -> int:
    """Return the number of the operand that is the state, by the keys of operands that surely are."""
    numbers = [k for k, operand in enumerate(candidate.operands) if operand.key in state_keys]
    number = numbers[0] if len(numbers) == 1 else candidate.guess_state()
    if number is None:
        kernels = " and ".join(candidate.kernels)
        raise Refusal(f"it cannot be told which of its kernels, {kernels}, is for its state")
    return number


def _running_products(reader: GraphReader, products: WeightProducts) -> WeightProducts:
    """Return the products without functions that nothing runs, if what runs has products with all of their weights."""
    running = reader.running_bodies
    kernels = {kernel.name for place, kernel in products.items() if place.body in running}
    bodies = {place.body for place, kernel in products.items() if kernel.name not in kernels} | running
    return {place: kernel for place, kernel in products.items() if place.body in bodies}


def _drop_unused_steps(reader: GraphReader, dependences: Dependences, matches: list[CellMatch]) -> list[CellMatch]:
    """List the matches without unused steps outside of a loop of the same cell, as Keras has them to learn shapes."""
    in_loop = {match.step.h: reader.state_origins(match.step.states[-1]).in_loop for match in matches}
    loops = {tuple(match.kernels) for match in matches if in_loop[match.step.h]}
    outside = {match.step.h for match in matches if not in_loop[match.step.h] and tuple(match.kernels) in loops}

    def is_used(end: Place) -> bool:
        """Return whether a result depends on a step. Results of the graph itself are what nothing reads."""
        for place in dependences.reached([end]):
            with suppress(UnknownValue):  # a damaged function may lack a result
                is_last = bool(place.body) or not (place in outside or dependences.readers(place))
                if is_last and dependences.is_result(place):
                    return True
        return False

    return [match for match in matches if match.step.h not in outside or is_used(match.step.h)]


def _cell_class(kernels: dict[str, WeightSource]) -> str:
    """Return the class of a cell by the names of its weights."""
    name = next(iter(kernels))
    return _CLASSES.get(re.sub(r"_\d+\Z", "", cell_scope(name).rpartition("/")[2]), class_by_name(name))


def _refuse_cell(end: Place, reason: str, kernels: dict[str, WeightSource]) -> CellDefinition:
    first = next(iter(kernels.values()))
    return CellDefinition(_cell_class(kernels), [end.name], sources={"w": first}, refusal=reason)


def _define_cells(sums: GateSums, matches: list[CellMatch]) -> Iterator[CellDefinition]:
    """Define the cells of matches, each with the program of its step, or refused if that is not understood."""
    compiled: dict[_Key, dict[str, Any]] = {}
    keys = []
    for match in matches:
        sources = [(role, source.name) for role, source in match.sources.items()]
        keys.append((match.step.h.body, *sources, *match.attributes.items()))
        if "step" not in compiled.get(keys[-1], {}):
            compiled[keys[-1]] = _compile_step(sums.sources, match)
    for key, match in zip(keys, matches, strict=True):
        tf_class = match.tf_class or _cell_class(match.kernels)
        yield CellDefinition(
            tf_class if match.layer_kind in tf_class else match.layer_kind,
            [match.step.h.name],
            layer_kind=match.layer_kind,
            sources=match.sources,
            attributes=match.attributes,
            in_graph=match.step,
            **compiled[key],
        )


def _compile_step(weights: WeightSources, match: CellMatch) -> dict[str, Any]:
    """Return the program of a match for its definition, or why its nodes are no function of its input and states."""
    step, resolve = match.step, weights.reader.resolve
    try:
        places = [resolve(place) for place in (step.x, *step.states)]
        if len({*places}) < len(places):  # in a first step the states may be one tensor, of zeros
            return {"refusal": "its input and its states are not told apart: they come from one node"}
        if not {*places}.isdisjoint(resolve(place) for place in step.results):
            return {"refusal": "a step reads what it computes itself"}
        leaves = {leaf for source in match.sources.values() for leaf in source.leaves}
        for place, size in zip(places, match.sizes, strict=True):
            with suppress(UnknownValue):  # most are computed, or fed
                piece = weights.slice(place)
                if piece.shape[1:] != (size,) or not leaves.isdisjoint(piece.source.leaves):
                    return {"refusal": f"its input or a state is of {piece.source.name}, of the shape {piece.shape}"}
        program = StepProgram(weights, step.x, step.states, step.results, match.sizes)
        return {"step": program.step, "step_sources": program.sources}
    except UnknownValue as unknown:
        return {"refusal": f"its nodes are not understood: {unknown}"}
