"""The check that a layer connects its cells as the graph does: the nodes between the cells run on random numbers.

In come the runs of the cells in a graph, and the layer that was made of them. The results of each run are random
arrays. The layer tells which x each cell must read, and what y is. The graph must give the same. So its nodes are
evaluated from the results of the cells to what others read and start from, and to the first nodes that merge both
directions. What lies behind is no part of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice, product
from typing import Any

import numpy as np

from ....convert.comparison import NotCompared, choose_sizes
from ....convert.shared import ConversionError
from ....errors import plain
from ....layers import Bidirectional, Layer, Stack
from ....optable import Array
from ...graphs import Node
from ..cell.cell_definition import CellInGraph
from ..cell.found_cell import Found
from ..graph.dependences import Dependences
from ..graph.graph_evaluation import DEEPEST, Frame, GraphEvaluation, OtherNumbers
from ..graph.graph_reader import FLOATS, Place, UnknownValue
from ..graph.node_functions import reverse_rows
from ..graph.op_table import RANDOM, graph_op
from ..graph.while_loops import WhileLoops
from ..weights.weight_sources import WeightSources
from .output_forms import Form, find_form, find_origins
from .sequences import CellRun

CALLER = "blockcell.tensorflow"
_NEAR = 1e-6  # of the largest number: nodes that keep all numbers may round them
_MOST_RETRIES = 4  # until T and B are what the graph fixes
_LARGEST_STATE = 2**16  # entries of a variable that may be an initial state
_MOST_OUTPUTS = 100  # places behind a cell that are evaluated to see in which order its y is read
_SELECTING = ("StridedSlice", "Slice", "Gather", "GatherNd", "Unpack")

StepFrames = list[tuple[Frame, CellInGraph]]
"""The steps of a run in its own order of time, each with its frame; one for an op that runs over all steps."""


@dataclass
class MadeLayer:
    """A layer that was made of cells."""

    layer: Layer
    leaves: Sequence[tuple[str, Layer]]
    """The names of the cells, and the layer of each, which `layer` copies."""
    cells: Mapping[str, Found]
    top: tuple[str, ...]
    """The cells whose h is y: one, or one of each direction."""

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the cells by the ids of the leaves that have their weights."""
        remaining, names = [*self.leaves], dict[int, str]()
        for leaf in self.layer._leaves().values():
            for k, (name, made) in enumerate(remaining):
                weights = leaf.weights.keys() == made.weights.keys() and made.weights
                pairs = ((leaf.weights[role], array) for role, array in (weights or {}).items())
                if weights and all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
                    names[id(leaf)] = name
                    del remaining[k]
                    break
        return names


class _OtherSize(Exception):
    """The graph fixes T or B, the first argument, to a size that was not chosen, the second one."""


class GraphConnections:
    """The connections between the cells of one graph."""

    def __init__(self, sources: WeightSources, runs: Sequence[CellRun]) -> None:
        self.sources, self.reader, self.runs = sources, sources.reader, runs
        self.loops, self.dependences = WhileLoops(sources.reader), Dependences(sources.reader)
        self._reached: dict[int, dict[Place, None]] = {}

    def compare(self, made: MadeLayer, names: Sequence[str]) -> list[str]:
        """Compare a layer with the graph, and return remarks; `names` are the cells of the runs.

        Raises
        ------
        ConversionError
            The layer connects the cells in another way.
        NotCompared, UnknownValue
            The nodes between the cells are not understood.
        """
        running, of_layer = self.reader.running_bodies, {name for name, _ in made.leaves}
        used = {k: name for k, name in enumerate(names) if name in of_layer}
        used = {k: name for k, name in used.items() if self.runs[k].steps[0].body in running} or used
        if {*used.values()} != of_layer:
            raise NotCompared("no graph has all cells")
        fixed = self._fixed_sizes(used)
        others = {size for cell in made.cells.values() for size in (cell.input_size, cell.output_size) if size}
        remarks: dict[str, None] = {}
        for _ in range(_MOST_RETRIES):
            try:
                for T, B, is_long in choose_sizes(fixed.get("T"), fixed.get("B"), others):
                    remarks |= {} if is_long else dict.fromkeys(_Trial(self, made, used, T, B, fixed).compare())
                break
            except _OtherSize as other:
                letter, size = other.args
                if letter in fixed:
                    raise _difference(f"the graph has {letter} = {size} and {fixed[letter]}") from None
                fixed[letter] = size
        else:
            raise NotCompared("it fixes the numbers of steps and rows in more than one way")
        for letter, size in fixed.items():
            if size < 3:
                remarks[f"compared with the graph for {letter} = {size} alone, which the graph fixes"] = None
        return [*remarks]

    def _fixed_sizes(self, used: Iterable[int]) -> dict[str, int]:
        """Return T and B where the graph fixes them, by the number of unrolled steps or the shapes of inputs."""
        fixed: dict[str, int] = {}
        for k in used:
            run = self.runs[k]
            if not run.in_loop and not run.steps[0].all_steps:
                fixed["T"] = len(run.steps)
            for part in run.input_parts or ():
                shape = None if isinstance(part.source, int) or part.axis is None else self.shape(part.source)
                if shape is not None and len(shape) == 3 and part.axis is not None:
                    sizes = {"T": shape[part.axis], "B": shape[1 - part.axis]}
                    fixed |= {letter: size for letter, size in sizes.items() if size}
        return fixed

    def shape(self, place: Place) -> tuple[int | None, ...] | None:
        """Return the shape of a value as far as the graph tells it; None if it tells nothing."""
        attrs = self.reader.attrs(place)
        shapes, shape = attrs.get("_output_shapes"), attrs.get("shape")
        if self.reader.op(place).name != "Placeholder" or not shape:
            shape = shapes[place.output] if isinstance(shapes, list) and place.output < len(shapes) else None
        return shape if isinstance(shape, tuple) else None

    def reached(self, k: int) -> dict[Place, None]:
        """Return the places that depend on the results of a run."""
        if k not in self._reached:
            results = (place for step in self.runs[k].steps for place in step.results)
            self._reached[k] = self.dependences.reached(results)
        return self._reached[k]

    def depends_on(self, place: Place, k: int) -> bool:
        """Return whether a value depends on the results of a run."""
        return self.dependences.joined(place) in self.reached(k)

    def first_merges(self, top: Sequence[str], runs: Mapping[int, str]) -> Iterator[Place]:
        """Yield the first places that depend on both directions, whose cells are on top; runs have cells' names."""
        forward, backward = ([k for k, name in runs.items() if name == cell] for cell in top)
        for left, right in product(forward, backward):
            yield from self.dependences.first_merges(self.reached(left), self.reached(right))

    def refuse_sums(self, top: Sequence[str], names: Sequence[str]) -> None:
        """Refuse a layer that is not compared, if the graph only adds or multiplies the outputs of both directions."""
        places = self.first_merges(top, dict(enumerate(names))) if len(top) == 2 else ()
        nodes = [node for place in places if (node := self.reader.bodies[place.body].get(place.name)) is not None]
        if nodes and all(graph_op(node).compute is not None or node.op == "AddN" for node in nodes):
            raise _difference(f"the node {nodes[0].name!r}, which is a {nodes[0].op}, merges {' and '.join(top)}")

    @cached_property
    def random_places(self) -> dict[Place, None]:
        """The places that depend on random numbers, as those of dropout."""
        nodes = self.reader.all_nodes()
        return self.dependences.reached(
            Place(body, node.name) for body, node in nodes if graph_op(node).refusal == RANDOM
        )

    def frame(self, body: str, depth: int = 0) -> Frame:
        """Return the frame of a body that runs once."""
        callers = self.loops.callers(body)
        if not callers:
            return Frame(body)
        if callers[0].loop_body or depth > DEEPEST:
            raise UnknownValue(f"the function {body!r}, which is in a loop")
        return Frame(body, self.frame(callers[0].body, depth + 1), callers[0].node.name)


class _Trial:
    """The comparison of a layer with a graph, for T steps and B rows."""

    def __init__(
        self,
        graph: GraphConnections,
        made: MadeLayer,
        used: Mapping[int, str],
        T: int,
        B: int,
        fixed: Collection[str],
    ) -> None:
        """`used` names the cells of the runs; `fixed` are the letters of the sizes that the graph fixes."""
        self._graph, self._made, self._used, self._shape, self._fixed = graph, made, used, (T, B), fixed
        g = np.random.default_rng(4)
        self._x = g.standard_normal((T, B, made.layer.input_size))
        self._results = {
            name: [g.standard_normal((T, B, size)) for size in made.cells[name].state_sizes]
            for name in dict.fromkeys(used.values())
        }
        """The states behind each step of each cell, in the order of time in which the cell runs."""
        self._lengths = np.full(B, T)
        self._reads: dict[str, Array] = {}

    def compare(self) -> Iterator[str]:
        """Compare with all rows of T steps, and, if rows have lengths, with rows of other lengths; yield remarks."""
        evaluation, y = self._evaluation(), self._follow(self._made.layer, self._x)
        first_frames: dict[int, Frame] = {}
        for k, name in self._used.items():
            frames = self._frames(self._graph.runs[k], evaluation)
            first_frames[k] = frames[0][0]
            self._compare_x(name, frames, evaluation)
            yield from self._compare_states(k, *frames[0], evaluation)
        yield from self._skip_remarks(first_frames, evaluation)
        merged = self._merged_forms(y, evaluation) if len(self._made.top) == 2 else {}
        yield from self._order_remarks(y, merged, evaluation)
        runs, (T, B) = [self._graph.runs[k] for k in self._used], self._shape
        if T < 3 or not any(lengths for run in runs for _, lengths in run.reversals or ()):
            return
        self._lengths = T - np.arange(B) % (T - 1)
        evaluation, y = self._evaluation(), self._follow(self._made.layer, self._x)
        for k, name in self._used.items():
            self._compare_x(name, self._frames(self._graph.runs[k], evaluation), evaluation)
        for place, form in merged.items():
            step, row, column = form.origins
            counts = (step < self._lengths[row]) & (form.kind == "all")
            if (self._merged(place, evaluation)[counts] != y[step, row, column][counts]).any():
                raise _difference(f"the node {place.name!r} reverses a direction by other lengths")

    # ------------------------------------------------------------------------------------------------ what a layer does
    def _follow(self, layer: Any, x: Array) -> Array:
        """Return y of a layer whose cells have the random results, and keep what each cell reads."""
        if isinstance(layer, Stack):
            for inner in layer.layers:
                x = self._follow(inner, x)
            return x
        if isinstance(layer, Bidirectional):
            backward = self._reversed(self._follow(layer.bw, self._reversed(x)))
            return np.concatenate([self._follow(layer.fw, x), backward], 2)
        name = self._made.names[id(layer)]
        self._reads[name] = self._reversed(x) if layer.reverse else x
        h = self._results[name][-1]
        return self._reversed(h) if layer.reverse else h

    def _reversed(self, array: Array) -> Array:
        return reverse_rows(array, self._lengths, 0, 1)

    # ------------------------------------------------------------------------------------------------ what a graph does
    def _evaluation(self) -> GraphEvaluation:
        """Return the evaluation of the graph, from the results of its cells and what the lowest cells read."""
        given: dict[Place, Callable[[Frame], Array]] = {}
        for k, name in self._used.items():
            run = self._graph.runs[k]
            for number, step in enumerate(run.steps):
                for place, array in zip(step.results, self._results[name], strict=True):
                    if run.in_loop:
                        given[place] = partial(_at_step, array)
                    else:
                        given[place] = partial(_anywhere, array if step.all_steps else array[number])
            for _, lengths in run.reversals or ():
                if lengths is not None:
                    given[lengths] = partial(_anywhere, self._lengths)
            given |= self._inputs(name, run)
        return GraphEvaluation(self._graph.reader, self._graph.loops, given, self._read_source)

    def _inputs(self, name: str, run: CellRun) -> Iterator[tuple[Place, Callable[[Frame], Array]]]:
        """Yield the places that a run reads and that are no cell's h, with their values."""
        if run.input_parts is None or run.reversals is None:
            raise NotCompared(f"it does not tell in which direction {plain(name)} runs, or what its input is")
        if all(isinstance(part.source, int) for part in run.input_parts):
            return
        start, total = 0, self._x.shape[2]
        for part in run.input_parts:
            if isinstance(part.source, int):
                start += self._made.cells[self._used[part.source]].output_size or 0
                continue
            size = ((self._graph.shape(part.source) or (None,))[-1]) if len(run.input_parts) > 1 else total
            columns = self._x[:, :, start : start + (size or 0)]
            start += size or 0
            if not size or start > total:
                raise NotCompared(f"the sizes of the arrays that {plain(name)} reads side by side are not known")
            if part.axis is None:
                yield part.source, partial(_at_step, self._reversed(columns) if run.reversals else columns)
            else:
                yield part.source, partial(_anywhere, columns.transpose(1, 0, 2) if part.axis else columns)

    def _read_source(self, place: Place, node: Node) -> Array:
        """Return the value of a variable that may be an initial state, or one of an input."""
        (T, B), graph = self._shape, self._graph
        if graph_op(node).variable:
            source = graph.sources.source(place)
            if source.leaves[0][:1] == "?" or math.prod(source.shape) > _LARGEST_STATE:
                raise UnknownValue(f"the variable {source.name!r} of the shape {source.shape}")
            return source.read("")
        shape, dtype = graph.shape(place), str(node.attrs.get("dtype"))
        kind = "float" if dtype in FLOATS else dtype.rstrip("123468")
        if kind not in ("float", "int", "bool") or None in (shape or ())[2:]:
            raise UnknownValue(f"the input {node.name!r} of {dtype} and the shape {shape}")
        if kind == "int" and (shape is None or len(shape) < 2):
            return self._lengths if shape != () else np.array(B)
        if not shape:  # whether the graph is trained, or how much dropout keeps
            return np.array(1.0 if kind == "float" else False)
        batch_first = any(part.axis for k in self._used for part in graph.runs[k].input_parts or ())
        free = iter([B] if shape.count(None) == 1 else [B, T] if batch_first else [T, B])
        sizes = [size or next(free) for size in shape]
        if kind == "float":
            return np.random.default_rng(5).standard_normal(sizes)
        return np.ones(sizes, bool if kind == "bool" else np.int64)

    def _frames(self, run: CellRun, evaluation: GraphEvaluation) -> StepFrames:
        """Return the frames of the steps of a run."""
        step, graph = run.steps[0], self._graph
        if not run.in_loop:
            return [(graph.frame(step.body), step) for step in run.steps]
        variable = None if step.state is None else graph.loops.loop_variable(step.state)
        if variable is None:
            raise UnknownValue(f"the loop of the node {step.h.name!r}")
        if variable.loop.startswith("frame "):
            first = evaluation.first_frame(graph.frame(step.body), variable.place)
            count = evaluation.count_steps(first, self._loop_condition(variable.place))
        else:
            caller = graph.loops.callers(step.body)[0]
            condition = graph.reader.called_functions(caller.node)[0]
            first = Frame(step.body, graph.frame(caller.body), caller.node.name, 0)
            result = graph.reader.function_result(condition, 0)
            count = evaluation.count_steps(first._replace(body=condition), result)
        self._expect("T", count)
        return [(first._replace(step=k), step) for k in range(count)]

    def _loop_condition(self, merge: Place) -> Place:
        """Return the condition of the loop of a variable in TensorFlow 1."""
        for place in self._graph.dependences.readers(merge):
            if self._graph.reader.op(place).name == "Switch":
                condition: Place = self._graph.reader.inputs_at(place)[1]
                return condition
        raise UnknownValue(f"the loop of the node {merge.name!r}")

    def _expect(self, letter: str, size: int) -> None:
        if size != self._shape["TB".index(letter)]:
            raise _OtherSize(letter, size)

    # --------------------------------------------------------------------------------------------------- the comparison
    def _compare_x(self, name: str, frames: StepFrames, evaluation: GraphEvaluation) -> None:
        """Compare what a cell reads in the graph and in the layer."""
        arrays = [evaluation.array(frame, step.x) for frame, step in frames]
        x, expected = arrays[0] if frames[0][1].all_steps else np.stack(arrays), self._reads[name]
        if x.ndim == 3:
            self._expect("T", x.shape[0])
            self._expect("B", x.shape[1])
        if x.shape != expected.shape:
            raise _difference(f"{name} reads x of the shape {x.shape}, and in the layer of {expected.shape}")
        counts = np.arange(len(x))[:, None] < self._lengths
        differs = ~np.isclose(x, expected, rtol=0, atol=_NEAR * np.abs(expected).max()) & counts[:, :, None]
        if differs.any():
            where = tuple(map(int, np.argwhere(differs)[0]))
            numbers = f"{x[where]:.6g} in the graph and {expected[where]:.6g} in the layer"
            raise _difference(f"x of {name} at {where}, in the order of its steps, is {numbers}")

    def _compare_states(self, k: int, frame: Frame, step: CellInGraph, evaluation: GraphEvaluation) -> Iterator[str]:
        """Compare the states that a cell starts from; yield a remark if one is neither known nor an input."""
        name = self._used[k]
        cell = self._made.cells[name]
        expected = [*(cell.initial_state or {}).values()] or [None] * len(step.states)
        places = [
            place
            for place, array, known in zip(step.states, expected, cell.links.initial_states, strict=False)
            if not self._is_state(frame, place, array, evaluation) and (known.source is None or array is None)
        ]
        is_fed, depends_on = True, self._graph.depends_on
        for place in places:
            variable = self._graph.loops.loop_variable(place)
            start = place if variable is None else variable.initial
            others = [other for number, other in self._used.items() if number != k and depends_on(start, number)]
            if others:
                raise _difference(f"{name} starts from the state of {others[-1]}, and in the layer from zeros")
            origin = self._graph.reader.resolve(start)
            is_fed = is_fed and self._graph.reader.op(origin).name == "Placeholder"
        if not is_fed:
            state = cell.state_from or places[0].name
            yield f"{plain(name)} starts from {plain(state)}: pass the state to calls of the layer as state="

    def _is_state(self, frame: Frame, place: Place, expected: Array | None, evaluation: GraphEvaluation) -> bool:
        """Return whether a state is an expected array, or zeros, as far as it is understood."""
        try:
            state = evaluation.array(frame, place)
        except UnknownValue:
            return False
        if state.ndim == 2 and len(state) > 1 and "B" not in self._fixed:
            self._expect("B", len(state))
        return state.ndim == 2 and np.allclose(state, 0.0 if expected is None else expected, rtol=_NEAR, atol=0)

    # ------------------------------------------------------------------------------------------ what is made of outputs
    def _merged_forms(self, y: Array, evaluation: GraphEvaluation) -> dict[Place, Form]:
        """Return the first nodes that merge the outputs of both directions as the layer does, with what they are.

        Other nodes that merge them are refused, unless one of these is y. Last steps with the backward direction first
        are refused if no other node merges both.
        """
        widths = [self._results[name][-1].shape[2] for name in self._made.top]
        last_states = [
            np.concatenate([array[-1] for array in arrays], 1)
            for arrays in zip(*(self._results[name] for name in self._made.top), strict=False)
        ]
        found: dict[Place, Form] = {}
        wrong, swapped = list[str](), list[str]()
        unknown: list[UnknownValue] = []
        for place in self._graph.first_merges(self._made.top, self._used):
            try:
                form = find_form(self._merged(place, evaluation), y, widths[0], last_states)
                if form is None and place in self._graph.random_places:
                    raise UnknownValue(f"the node {place.name!r}, which depends on random numbers")
                if form is None:
                    wrong.append(f"the node {place.name!r} merges other numbers")
                elif form.backward_first:
                    reason = f"the node {place.name!r} has the output of the backward direction first"
                    (wrong if form.kind == "all" else swapped).append(reason)
                else:
                    found[place] = form
            except OtherNumbers as numbers:
                wrong.append(f"{numbers} is before the node {place.name!r}, which merges them")
            except UnknownValue as error:
                unknown.append(error)
        wrong += [] if found else swapped
        if wrong and all(form.kind != "all" for form in found.values()):
            names = " and ".join(self._made.top)
            raise _difference(f"it has the outputs of {names} side by side, in the order of x, and {wrong[0]}")
        if unknown and not found:
            raise unknown[0]
        return found

    def _merged(self, place: Place, evaluation: GraphEvaluation) -> Array:
        """Return what a node makes of both directions; of a concatenation with others, what depends on the cells."""
        reader = self._graph.reader
        frame, node, inputs = self._graph.frame(place.body), reader.node(place), reader.inputs_at(place)
        if node is None or node.op != "ConcatV2":
            return evaluation.array(frame, place)
        runs = [k for k, name in self._used.items() if name in self._made.top]
        parts = [part for part in inputs[:-1] if any(self._graph.depends_on(part, k) for k in runs)]
        arrays = [evaluation.array(frame, part) for part in parts]
        axis = int(evaluation.array(frame, inputs[-1]))
        try:
            return np.concatenate(arrays, axis)
        except ValueError:
            raise UnknownValue(f"the node {place.name!r}, which concatenates other shapes") from None

    def _order_remarks(self, y: Array, merged: Mapping[Place, Form], evaluation: GraphEvaluation) -> Iterator[str]:
        """Yield remarks if the graph reads y from the last step to the first alone, of both directions or of each."""
        if len(self._made.top) == 2 and merged:
            wholes = [place for place, form in merged.items() if form.kind == "all"]
            outputs = [(" and ".join(self._made.top), wholes, y)]
        else:
            outputs = []
            for name in self._made.top:
                h = self._results[name][-1]
                natural = self._reversed(h) if self._made.cells[name].reverse else h
                runs = [self._graph.runs[k] for k, other in self._used.items() if other == name]
                outputs += [(name, [step.h for step in run.steps], natural) for run in runs]
        for name, starts, natural in outputs:
            values: dict[Place, Array] = {}
            for place in islice(chain(starts, self._graph.dependences.reached(starts)), _MOST_OUTPUTS):
                with suppress(UnknownValue):
                    values[place] = evaluation.array(self._graph.frame(place.body), place)
            forwards, backwards = (
                {place for place, value in values.items() if _is_either(value, array)}
                for array in (natural, self._reversed(natural))
            )
            both = forwards | backwards
            used, turned = (any(self._uses_order(place, both) for place in side) for side in (forwards, backwards))
            if turned and not used:
                order = "from the last step to the first, the layer in the order of x"
                yield f"the graph has y of {plain(name)} {order}"

    def _uses_order(self, place: Place, sequences: Collection[Place]) -> bool:
        """Return whether a sequence is read as a whole, by nodes that do not give the same sequence."""
        readers = self._graph.dependences.readers(place)
        ops = [self._graph.reader.op(reader).name for reader in readers if reader not in sequences]
        return any(op not in _SELECTING for op in ops) if readers else self._graph.dependences.is_result(place)

    def _skip_remarks(self, first_frames: Mapping[int, Frame], evaluation: GraphEvaluation) -> Iterator[str]:
        """Yield a remark if a node reads the outputs of a lower cell beside those of a top cell, as a residual does."""
        if len(self._results) == len(self._made.top):
            return
        for k, frame in first_frames.items():
            if self._used[k] not in self._made.top:
                continue
            inside = self._inside(self._graph.runs[k])
            for place in islice((place for place in self._graph.reached(k) if place not in inside), _MOST_OUTPUTS):
                for owners in self._owners(place, frame, evaluation):
                    for low in sorted(owners - {*self._made.top}) if self._used[k] in owners else ():
                        read = f"y of {low} beside y of {self._used[k]}, by the node {place.name!r}"
                        yield f"the graph reads {plain(read)}: the layer gives the latter alone"

    def _inside(self, run: CellRun) -> set[Place]:
        """Return the places of the nodes in a cell."""
        reader = self._graph.reader
        outside = {reader.resolve(place) for step in run.steps for place in (step.x, *step.states)}
        results = [place for step in run.steps for place in step.results]
        starts = [place for result in results for place in reader.inputs_in_step(result)]
        walked = reader.walk(starts, lambda place: () if place in outside else reader.inputs_in_step(place))
        return {*map(self._graph.dependences.joined, [*results, *walked])}

    def _owners(self, place: Place, loop_frame: Frame, evaluation: GraphEvaluation) -> Iterator[set[str]]:
        """Yield the cells whose outputs a node reads as they are: in a step of a loop, and where its body runs once."""
        frames = [loop_frame] if loop_frame.body == place.body else []
        with suppress(UnknownValue):
            frames.append(self._graph.frame(place.body))
        for frame in dict.fromkeys(frames):
            owners: set[str] = set()
            for part in self._graph.reader.inputs_at(place):
                with suppress(UnknownValue):
                    value = evaluation.array(frame, part)
                    near = ((name, h) for name, (*_, h) in self._results.items() if np.isin(value.flat[:1], h).all())
                    owners.update(name for name, h in near if find_origins(value, h) is not None)
            yield owners


def _is_either(value: Array, sequence: Array) -> bool:
    """Return whether a value is a sequence, time first or batch first."""
    return np.array_equal(value, sequence) or np.array_equal(value, sequence.transpose(1, 0, 2))


def _at_step(array: Array, frame: Frame) -> Array:
    """Return the row of an array for the step of the innermost loop of a frame."""
    while frame.step is None:
        if frame.outer is None:
            raise UnknownValue("a step of a loop, outside of it")
        frame = frame.outer
    if frame.step >= len(array):
        raise UnknownValue(f"step {frame.step} of {len(array)}")
    return np.asarray(array[frame.step])


def _anywhere(array: Array, frame: Frame) -> Array:
    return array


def _difference(text: str) -> ConversionError:
    return ConversionError(
        f"{CALLER}: the layer computes something else than the graph: {plain(text)}. If you know better, pass"
        f" check=False"
    )
