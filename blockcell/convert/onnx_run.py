"""ONNX models on random inputs, beside the layers that they became: `compare_pieces`.

A `Trial` has random numbers in place of what recurrent nodes give, too: it shows which values are a layer's y, zero or
constant, before there is anything to compare.

Nodes run one by one, so how large a result will be is known before its node starts: a model that is not trusted can
neither take much memory nor much time. Only operators of a list run, and nothing is read from other files. What
other nodes give is drawn at random, since they are no part of a layer. onnxruntime computes the nodes, onnx.reference
those for which it has no kernel. No other module of `convert` imports onnxruntime, and only this comparison does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, product
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..layers import Layer
from ..optable import ACTIVATIONS, Array
from .comparison import Crossing, NotCompared, Outcome, Sizes, choose_sizes, compare
from .models import Assembly, cell_states, flatten_state, nest_states, read_initial_state
from .onnx_graph import (
    CALLER,
    FOLDED,
    RESHAPING,
    SELECTING,
    OnnxGraph,
    attributes_by_name,
    evaluate,
    has_more,
    input_name,
    integer_attribute,
    is_recurrent,
    is_standard,
    key_of,
    reached_names,
    result_size,
)

_COMPUTED = {*FOLDED, "Dropout", "Gemm", "MatMul", *(name.capitalize() for name in ACTIVATIONS if name)}
_LARGEST_WORK = 2**32  # multiplications of one run, a second or so
_LARGEST_RUN = 2**21  # numbers of all results of one run, beside those that the model itself may have
_LARGEST_DRAWN = 2**20  # numbers of one input
_LARGEST_TRIAL = 2**19  # numbers of a recurrent node's result in a trial
_MOST_FREE_SIZES = 6  # of a model, each of which may be T or B
_LARGEST_BOUND = 4096  # of a Slice or a Gather, beyond which T and B are tried
_X, _LENGTHS, _H, _C = 0, 4, 5, 6  # positions of inputs of recurrent nodes
_RUNTIME_EPS = 4 * float(np.finfo(np.float32).eps)  # onnxruntime has float32 alone, and its Softplus is off by so much

NodeComputer = Callable[[Any, Sequence[Array | None]], list[Array]]
"""Computes the results of a node, of a recurrent one all that it can have."""


class Result(NamedTuple):
    """What a recurrent or a dense step gives, and where it is in a model."""

    graph: OnnxGraph
    node: Any
    """The recurrent node, for a dense step the one in front of it."""
    name: str
    form: str
    """How y is laid out in the value of this name: one of its `forms`, or "Y" for that of a node."""

    def y(self, values: GraphValues) -> Array:
        """Return y [T,B,.] or, if it has no steps, [B,.]."""
        Y = values.by_node[id(self.node)][0]
        T, D, B, H = Y.shape
        if self.form == "Y":
            return Y.swapaxes(1, 2).reshape(T, B, D * H)
        array = values.known[self.name]
        if self.form in ("last", "ends"):
            return array
        columns = array.shape[-1]
        return array.reshape(B, T, columns).swapaxes(0, 1) if "batch" in self.form else array.reshape(T, B, columns)

    def forms(self, values: GraphValues) -> dict[str, Array]:
        """Return y with its axes in other orders, and parts of it that a dense layer may read, by their forms."""
        y = self.y(values)
        if self.form in ("last", "ends"):
            return {self.form: y}
        Y_h = values.by_node[id(self.node)][1]
        ends = {"last": y[-1], "ends": Y_h.swapaxes(0, 1).reshape(y.shape[1], -1)} if self.form == "Y" else {}
        forms = {"y": y, "y, batch first": y.swapaxes(0, 1)}
        return forms | {f"{name}, in rows": array.reshape(-1, y.shape[2]) for name, array in forms.items()} | ends


class OnnxPiece(NamedTuple):
    """A layer, and where in a graph its input and its results are."""

    label: str
    """For messages: "the model", or "LSTM 'encoder'"."""
    layer: Layer
    initial_state: Any
    """As `read_initial_state` takes it."""
    nodes: Sequence[Any]
    """The recurrent nodes that it was made of, the first one in front."""
    result: Result

    def results(self) -> list[str]:
        """Return the names of the values that are compared, or looked at."""
        return [name for name in (self.result.name, *(name for node in self.nodes for name in node.output)) if name]


class OnnxAssembly(NamedTuple):
    """What the graphs of a model become, and what must be compared."""

    assembly: Assembly
    pieces: Sequence[OnnxPiece] = ()
    passed_over: Sequence[str] = ()
    """The labels of nodes between layers that do nothing."""
    is_proven_for_rows: bool = True
    """Whether they would do nothing for more rows than the model has."""


def compare_pieces(source: OnnxAssembly, ignore_clip: bool) -> Outcome:
    """Compare layers with the pieces of a model that they were made of; without the attribute clip if it is ignored.

    The outcome has the labels of nodes that change the order of numbers in front of pieces or behind them. Raise a
    ConversionError if a layer computes something else than its piece of the model.
    """
    left_out: dict[str, None] = {}
    remarks: dict[str, None] = {}
    for graph in {id(piece.result.graph): piece.result.graph for piece in source.pieces}.values():
        try:
            run = _Run(graph, [piece for piece in source.pieces if piece.result.graph is graph], ignore_clip)
            sizes = run.choose_sizes()
            compare(CALLER, run, sizes, source.passed_over)
        except NotCompared as error:
            remarks[error.remark] = None
            continue
        hidden = "T" if source.is_proven_for_rows else "TB"
        small = [f"{name} = {size}" for name, size in run.fixed.items() if name in hidden and size < 3]
        remarks |= {f"compared for {' and '.join(small)} alone, which the model fixes": None} if small else {}
        left_out |= dict.fromkeys(run.nodes_around(run.values(sizes[0].T, sizes[0].B, 0, 1.0)))
    return Outcome([*left_out], [*remarks])


class _Run:
    """Runs all pieces of a graph: a `comparison.Run`."""

    def __init__(self, graph: OnnxGraph, pieces: Sequence[OnnxPiece], ignore_clip: bool) -> None:
        self.graph, self.pieces = graph, pieces
        nodes = [node for piece in pieces for node in piece.nodes]
        names = [name for piece in pieces for name in piece.results()]
        self.run = GraphRun(graph, nodes, names, _Runtime(graph.opsets, ignore_clip))
        x = nodes[0].input[0]
        sizes = (-1, -1) if x in self.run.drawn else trial_of(graph).sizes(x)
        self.fixed = {name: size for name, size in zip("TB", sizes, strict=True) if size > 0}
        """T and B, if the model fixes them."""

    def __call__(self, T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        values = self.values(T, B, seed, scale)
        return [_crossing(piece, values) for piece in self.pieces]

    def values(self, T: int, B: int, seed: int, scale: float) -> GraphValues:
        values = self.run.values(T, B, seed, scale)
        for node in self.run.nodes:
            if id(node) not in values.by_node:
                raise NotCompared(f"the results of {node.op_type} {key_of(node)!r} have the names of others")
        return values

    def choose_sizes(self) -> list[Sizes]:
        """Choose the T and B of comparisons."""
        bounds = self.run.bounds(self.graph.nodes)
        leaves = [leaf for piece in self.pieces for leaf in piece.layer._leaves().values()]
        others = bounds | {size for leaf in leaves for size in (leaf.input_size, leaf.output_size)}
        first, *sizes = choose_sizes(self.fixed.get("T"), self.fixed.get("B"), others)
        beyond = max(bounds, default=0) + 8
        errors = []
        for T, B in (first[:2], (first.T, beyond), (beyond, first.B), (beyond, beyond)):
            try:
                self(T, B, 0, 1.0)
            except NotCompared as error:
                errors.append(error)
                continue
            if errors:  # the model cannot take the usual sizes
                return [Sizes(T, B)]
            sizes = [size._replace(T=max(size.T, beyond)) if size.is_long else size for size in sizes]
            return [first, *sizes, *([Sizes(first.T, beyond, True)] if bounds and "B" not in self.fixed else [])]
        raise errors[0]

    def nodes_around(self, values: GraphValues) -> list[str]:
        """Return the labels of nodes in front of pieces and behind them that change the order of numbers."""
        graph, pieces = self.graph, self.pieces
        by_result = {piece.result.name: piece.result for piece in pieces if piece.result.name}
        stops = {name for piece in pieces for name in (*piece.results(), *piece.nodes[0].output)}
        left_out: list[str] = []
        orders = {False, True}  # whether steps come before rows in the model's input, if it has one layer
        ends = [(piece.nodes[0].input[0], piece) for piece in pieces]
        for name, reader in [*ends, *((name, None) for name in graph.outputs)]:
            moving, origins = graph.origins(name, stops)
            if name in values.run.drawn or len(origins) != 1 or any(node.op_type not in RESHAPING for node in moving):
                continue  # other nodes are left out anyway
            (origin,), labels = origins, [f"{key_of(node)} ({node.op_type})" for node in moving]
            source = by_result.get(origin)
            if source is None and reader is None and origin not in stops:
                continue
            try:
                values.compute([name, origin])
            except NotCompared:  # the nodes cannot take these sizes
                left_out += labels
                continue
            before = values.known[origin] if source is None else source.y(values)
            after = values.known[name]
            if source is not None and reader is not None:
                left_out += [] if np.array_equal(before, after) else labels
            elif reader is not None:
                orders_in_input = orders_of_steps(after, before)
                left_out += [] if orders_in_input else labels
                if len(pieces) == 1 and origin in graph.inputs:
                    orders = orders_in_input or orders
            elif not orders & orders_of_steps(before, after):
                is_dense = source is not None and source.form != "Y"
                left_out += labels or ([f"the order of the axes of {name!r}"] if is_dense else [])
        return left_out


class GraphRun:
    """A graph that runs: which values are drawn, and their sizes."""

    def __init__(self, graph: OnnxGraph, nodes: Sequence[Any], names: Sequence[str], compute: NodeComputer) -> None:
        self.graph = graph
        self.nodes = nodes
        """The recurrent nodes, whose inputs are drawn if they are not computed."""
        self.names = names
        """The values that must be computed."""
        self.compute = compute
        self.constants: dict[str, Array] = {}
        """The values of tensors and of what nodes make of them."""
        self.weights_dtype = np.dtype(np.float32)
        self.roles: dict[str, tuple[int, list[int | str]]] = {}
        """The positions of inputs of the nodes, and their shapes, by name."""
        self.fixed: dict[str, int] = {}
        """T and B, if the inputs of recurrent nodes are declared so."""
        self.aliases: dict[str, str] = {}
        """T or B, by the model's own names of sizes."""
        for node in nodes:
            self._add_roles(node)
        self.drawn: set[str] = set()
        """Inputs of recurrent nodes that are drawn although they are computed, of values whose shape is not known."""
        for name in self.roles:
            if any(self.shape(leaf) is None for leaf in self.leaves([name])):
                self.drawn.add(name)
        self.choices = [*self._size_choices([*chain.from_iterable(node.input for node in nodes), *names])]
        """Which of T and B each other size of the model may be; one is left once the model has run."""
        self.index_limits = self._index_limits()
        self.lengths = {*self.leaves(name for name, (position, _) in self.roles.items() if position == _LENGTHS)}
        """The values that are drawn and that lengths come from."""

    def _add_roles(self, node: Any) -> None:
        W, R = (np.asarray(self.graph.constant(input_name(node, k))) for k in (1, 2))
        if not W.ndim == R.ndim == 3:  # the node is refused
            return
        self.weights_dtype = W.dtype
        directions, columns, hidden = *W.shape[::2], R.shape[-1]
        state: list[int | str] = [directions, "B", hidden]
        shapes: dict[int, list[int | str]] = {_X: ["T", "B", columns], _LENGTHS: ["B"], _H: state, _C: state}
        for position, shape in shapes.items():
            if name := input_name(node, position):
                self.roles.setdefault(name, (position, shape))
                constant = self.graph.constant(name)
                stated = self.graph.shape(name) or [] if constant is None else np.shape(constant)
                for declared, size in zip(stated, shape, strict=False):
                    if isinstance(size, str) and isinstance(declared, int):
                        self.fixed.setdefault(size, declared)
                    elif isinstance(size, str) and isinstance(declared, str):
                        self.aliases.setdefault(declared, size)

    def shape(self, name: str) -> list[int | str] | None:
        """Return the shape of a value that is drawn, None if it is not known."""
        declared = self.graph.shape(name)
        if name not in self.roles:
            return declared
        expected = self.roles[name][1]
        if declared is None or len(declared) != len(expected):
            return expected
        return [a if isinstance(a, int) else b for a, b in zip(declared, expected, strict=True)]

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a value that is drawn."""
        from onnx import helper

        if name in self.roles and self.roles[name][0] != _LENGTHS:
            return self.weights_dtype
        described = self.graph.types.get(name)
        try:
            return helper.tensor_dtype_to_np_dtype(described.elem_type) if described else np.dtype(np.int32)
        except KeyError:
            raise NotCompared(f"the type of {name!r} is not known") from None

    def is_computed(self, name: str) -> bool:
        """Return whether a value is what a node makes of others, rather than a constant or drawn."""
        node = self.graph.makers.get(name)
        if name in self.drawn or name in self.graph.tensors or node is None:
            return False
        return is_recurrent(node) or (is_standard(node) and node.op_type in _COMPUTED)

    def sources_of(self, name: str) -> Iterable[str]:
        """Return the values that the node reads which computes a value."""
        return self.graph.makers[name].input if self.is_computed(name) else ()

    def leaves(self, names: Iterable[str]) -> list[str]:
        """Return the values that are drawn if these are asked for."""
        values = reached_names(names, self.sources_of)
        return [name for name in values if name not in self.graph.tensors and not self.is_computed(name)]

    def _size_choices(self, names: Iterable[str]) -> Iterator[dict[str, str]]:
        """Yield which of T and B the sizes of drawn values may be that are neither fixed nor known as T or B."""
        shapes = [self.shape(name) or [] for name in self.leaves(names)]
        known = {"T", "B", *self.aliases}
        free = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str) and size not in known)
        for letters in product("TB", repeat=min(len(free), _MOST_FREE_SIZES)):
            yield dict(zip(free, letters, strict=False))

    def _index_limits(self) -> dict[str, int]:
        """Return how many rows constant tables have at least, by the values from which indices into them come."""
        limits: dict[str, int] = {}
        for node in self.graph.nodes:
            table = self.graph.tensors.get(node.input[0]) if node.op_type == "Gather" and len(node.input) == 2 else None
            sizes = [] if table is None else table.dims[integer_attribute(node, "axis") :]
            for leaf in self.leaves([node.input[1]] if sizes else []):
                limits[leaf] = min(sizes[0], limits.get(leaf, sizes[0]))
        return limits

    def bounds(self, nodes: Iterable[Any]) -> set[int]:
        """Return the constants of nodes that may be bounds of steps or rows."""
        bounds: set[int] = set()
        for node in nodes:
            if node.op_type not in SELECTING or all(map(self.graph.is_fixed, node.output)):
                continue
            arrays = [array for name in node.input[1:] if (array := self.graph.constant(name)) is not None]
            numbers = {abs(int(number)) for array in arrays if array.dtype.kind == "i" for number in array.flat[:8]}
            numbers |= {abs(number) for attribute in node.attribute for number in attribute.ints[:8]}
            bounds |= {number for number in numbers if 2 < number <= _LARGEST_BOUND}
        return bounds

    def sizes(self, T: int, B: int, choice: dict[str, str]) -> dict[str, int]:
        """Return all sizes that have names, for T steps of B rows unless the model fixes these."""
        sizes = {"T": T, "B": B} | self.fixed
        return sizes | {name: sizes[letter] for name, letter in (self.aliases | choice).items()}

    def values(self, T: int, B: int, seed: int, scale: float) -> GraphValues:
        """Return the values of the graph for T steps of B rows, by a choice of the other sizes that it can take."""
        errors, taken = [], []
        for choice in self.choices:
            values = GraphValues(self, self.sizes(T, B, choice), seed, scale)
            try:
                values.compute(self.names)
            except NotCompared as error:
                errors.append(error)
                continue
            taken.append((choice, values))
            x = values.known.get(input_name(self.nodes[0], 0))
            if x is not None and x.shape[:2] == (T, B):
                break
        if not taken:
            raise errors[0]
        self.choices = [taken[-1][0]]
        return taken[-1][1]


class GraphValues:
    """The values of a graph for one draw, which are computed when they are asked for."""

    def __init__(self, run: GraphRun, sizes: Mapping[str, int], seed: int, scale: float) -> None:
        self.run = run
        self.graph = run.graph
        self.sizes = sizes
        self.seed = seed
        self.scale = scale
        self.known: dict[str, Array] = {}
        self.by_node: dict[int, list[Array]] = {}
        """All results of recurrent nodes, by the nodes' ids."""
        self.size, self.work = 0.0, 0.0

    def compute(self, names: Iterable[str]) -> None:
        """Compute these values and all that they come from."""
        run, known, constants = self.run, self.known, self.run.constants
        reached = reached_names(names, lambda name: () if name in known or name in constants else run.sources_of(name))
        for name in self.graph.in_order(reached):
            if name in self.graph.tensors and name not in constants:
                constants[name] = self.graph.array(name)
            if name in constants:
                known[name] = constants[name]
            elif name not in known and not run.is_computed(name):
                known[name] = self._draw(name)
            elif name not in known and known.keys() >= {*filter(None, run.sources_of(name))}:
                self._compute(self.graph.makers[name])
            if name not in known:
                raise NotCompared(f"{name!r} comes from itself, or no node gives it")

    def _draw(self, name: str) -> Array:
        """Draw a value at random, always the same one for its name and the seed."""
        run = self.run
        shape, dtype = run.shape(name), run.dtype(name)
        if shape is None:
            raise NotCompared(f"the shape of {name!r} is not known")
        sizes = [size if isinstance(size, int) else self.sizes.get(size, self.sizes["T"]) for size in shape]
        if math.prod(sizes) > _LARGEST_DRAWN:
            raise NotCompared(f"{name!r} has the shape {tuple(sizes)}, which is too large")
        g = np.random.default_rng([self.seed, crc32(repr(name).encode())])
        if dtype.kind == "f":
            return (g.standard_normal(sizes) * self.scale).astype(dtype)
        if name in run.lengths:
            lengths = g.integers(1, self.sizes["T"] + 1, sizes)
            lengths.flat[:1] = self.sizes["T"]
            return lengths.astype(dtype)
        return g.integers(0, max(1, run.index_limits.get(name, 2)), sizes).astype(dtype)

    def _compute(self, node: Any) -> None:
        """Compute the results of a node from known values."""
        inputs = [self.known[name] if name else None for name in node.input]
        size, work = _size_and_work(node, [array for array in inputs if array is not None])
        self.size += size
        self.work += work
        constants = sum(array.size for array in self.run.constants.values())
        if self.work > _LARGEST_WORK or self.size > _LARGEST_RUN + 2 * constants:
            raise NotCompared(f"{key_of(node)} ({node.op_type}) would take too long or too much memory")
        with np.errstate(all="ignore"):
            results = self.run.compute(node, inputs)
        named = self.set_results(node, results)
        if all(name in self.run.constants for name in node.input if name):
            self.run.constants |= named

    def set_results(self, node: Any, results: list[Array]) -> dict[str, Array]:
        """Keep the results of a node, of a recurrent one all that it can have; return those that have names."""
        if is_recurrent(node):
            self.by_node[id(node)] = results
        named = {name: array for name, array in zip(node.output, results, strict=False) if name}
        self.known |= named
        return named

    def states(self, node: Any) -> list[Array]:
        """Return the last states [D,B,.] of a recurrent node."""
        return self.by_node[id(node)][1:]


# --------------------------------------------------------------------------------------------------------------- trials
class Trial:
    """A graph with random numbers in place of what recurrent nodes give, and its values for two inputs."""

    def __init__(self, graph: OnnxGraph) -> None:
        nodes = [node for node in graph.needed() if is_recurrent(node)]
        names, compute = [input_name(node, 0) for node in nodes[:1]], partial(_draw_or_compute, graph.opsets)
        self.run = GraphRun(graph, nodes, names, compute)
        self.draws: list[GraphValues] = []
        """For inputs of other sizes; none if the graph cannot take them."""
        with suppress(NotCompared):
            self.draws = [self.run.values(T, B, T, 1.0) for T, B in ((5, 3), (3, 5)) if nodes]

    def values(self, results: Iterable[Any], name: str, T: int, B: int) -> GraphValues:
        """Return values of which this one is computed, for results of these recurrent nodes for T steps of B rows."""
        values = GraphValues(self.run, self.run.sizes(T, B, self.run.choices[0]), 0, 1.0)
        for node in results:
            inputs = np.empty((T, B, 0)), *map(self.run.graph.constant, node.input[1:3])
            values.set_results(node, _random_results(node, inputs))
        values.compute([name])
        return values

    def _values_of(self, name: str) -> list[Array]:
        """Return a value for each draw; none if it cannot be computed."""
        try:
            for values in self.draws:
                values.compute([name])
        except NotCompared:
            return []
        return [values.known.get(name, np.empty(0)) for values in self.draws]

    def fixed_values(self, name: str) -> list[Array]:
        """Return a value for each draw if it depends on nothing but constants and the inputs' sizes; else none."""
        return self._values_of(name) if self.run.graph.is_fixed(name) else []

    def is_zero(self, name: str) -> bool:
        """Return whether a value is certainly zero, such as initial states that exporters make for each batch."""
        arrays = self.fixed_values(name)
        return bool(arrays) and not any(map(np.any, arrays))

    def sizes(self, name: str) -> tuple[int, int]:
        """Return T and B of a layer's X as far as the model fixes them, else -1.

        Only these tell whether a Reshape to (7, 1, H) leaves y [7,1,H] as it is, or exchanges the axes of y [1,7,H].
        """
        shapes = [array.shape for array in self._values_of(name)]
        if [*map(len, shapes)] != [3, 3]:
            return -1, -1
        T, B, _ = (size if size == other else -1 for size, other in zip(*shapes, strict=True))
        return T, B


def trial_of(graph: OnnxGraph) -> Trial:
    """Return the trial of a graph, which has one."""
    trial: Trial = graph.trial or Trial(graph)
    graph.trial = trial
    return trial


def _draw_or_compute(opsets: Any, node: Any, inputs: Sequence[Array | None]) -> list[Array]:
    """Draw the results of a recurrent node; compute those of another one with onnx.reference."""
    if is_recurrent(node):
        return _random_results(node, inputs)
    arrays = {name: array for name, array in zip(node.input, inputs, strict=True) if array is not None}
    if not (results := evaluate(node, arrays, opsets)):
        raise NotCompared(f"{key_of(node)} ({node.op_type}) does not run")
    return [results.get(name, np.empty(0)) for name in node.output]


def _random_results(node: Any, inputs: Sequence[Array | None]) -> list[Array]:
    """Draw Y, Y_h and Y_c of a recurrent node for its X [T,B,.], W and R: numbers of float16, which casts keep."""
    X, W, R = inputs[:3]
    if X is None or W is None or R is None or X.ndim != 3 or 0 in X.shape[:2]:
        raise NotCompared(f"{key_of(node)} ({node.op_type}) gets no steps")
    (T, B), D, H = X.shape[:2], len(R), R.shape[2]
    if T * B * D * H > _LARGEST_TRIAL:
        raise NotCompared(f"{key_of(node)} ({node.op_type}) would give too much")
    g = np.random.default_rng(crc32(repr([*node.output]).encode()))
    Y, Y_c = (g.uniform(-1, 1, shape).astype(np.float16).astype(W.dtype) for shape in ((T, D, B, H), (D, B, H)))
    direction = attributes_by_name(node).get("direction")
    first = 0 if direction is not None and direction.s == b"reverse" else -1
    return [Y, np.stack([Y[first, 0], Y[0, 1]] if D == 2 else [Y[first, 0]]), Y_c]


# ------------------------------------------------------------------------------------------------------------ crossings
def _crossing(piece: OnnxPiece, values: GraphValues) -> Crossing:
    """Return what enters a piece and what leaves it."""
    result = piece.result
    expected = {"Y" if result.form == "Y" else repr(result.name): result.y(values)}
    for node in piece.nodes:
        expected |= zip(_state_labels(piece, node), values.states(node), strict=False)

    def read(y: Array, last: Any) -> Mapping[str, Array]:
        results, states = dict.fromkeys(expected, y), iter(cell_states(last))
        for node in piece.nodes:
            cells = [*islice(states, len(values.states(node)[0]))]
            for label, field in zip(_state_labels(piece, node)[: len(values.states(node))], ("h", "cs"), strict=False):
                results[label] = np.stack([getattr(cell, field) for cell in cells]) * has_steps
        return results

    state = read_initial_state(CALLER, piece.layer, _state(piece, values))
    options: dict[str, Any] = {} if state is None else {"state": state}
    lengths = values.known.get(input_name(piece.nodes[0], _LENGTHS))
    options |= {} if lengths is None else {"lengths": lengths}
    has_steps = np.bool_(True) if lengths is None else lengths[:, None] > 0  # else onnxruntime's states are zeros
    x = np.ascontiguousarray(values.known[piece.nodes[0].input[0]].astype(piece.layer.dtype))
    return Crossing(piece.label, piece.layer, x, expected, read, options, _RUNTIME_EPS)


def _state_labels(piece: OnnxPiece, node: Any) -> list[str]:
    """Return what messages call the last states h and c of a node."""
    behind = f" of {node.op_type} {key_of(node)!r}" if len(piece.nodes) > 1 else ""
    return [f"Y_h{behind}", f"Y_c{behind}"]


def _state(piece: OnnxPiece, values: GraphValues) -> Any:
    """Return the state that the piece starts from: what the conversion says of it, and else what the model has."""
    known_cells, cells = iter(flatten_state(piece.layer, piece.initial_state)), []
    for node in piece.nodes:
        node_cells = [*islice(known_cells, len(values.states(node)[0]))]
        for position, field in ((_H, "h"), (_C, "cs")):
            name = input_name(node, position)
            is_drawn = name in values.run.drawn
            if name and (is_drawn or not (field in node_cells[0] or trial_of(values.graph).is_zero(name))):
                node_cells = [cell | {field: values.known[name][d]} for d, cell in enumerate(node_cells)]
        cells += node_cells
    return nest_states(piece.layer, iter(cells))


def orders_of_steps(array: Array, other: Array) -> set[bool]:
    """Return whether steps come before rows in another array that has the numbers of x or y [T,B,.].

    Its axes may be joined or taken apart. Both orders fit if there is one step or one row, or if there are no steps;
    none fits if the numbers are others or mixed.
    """
    forms = {True: array, False: array.swapaxes(0, 1) if array.ndim > 2 else array}
    return {order for order, form in forms.items() if np.array_equal(form.ravel(), other.ravel())}


# -------------------------------------------------------------------------------------------------------------- runtime
def _size_and_work(node: Any, inputs: list[Array]) -> tuple[float, float]:
    """Return how many numbers a result of a node has at most, and how many multiplications they take."""
    if is_recurrent(node):
        X, W, R = inputs[:3]
        steps = math.prod(X.shape[:2])
        return steps * math.prod(R.shape[::2]), steps * (W.size + R.size)
    size = result_size(node, inputs)
    depth = max(inputs[0].shape, default=1) if node.op_type in ("Gemm", "MatMul") and inputs else 1
    return size, size * depth


class _Runtime:
    """Computes nodes with onnxruntime, and with onnx.reference those for which it has no kernel."""

    def __init__(self, opsets: Any, ignore_clip: bool) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise NotCompared("onnxruntime, which computes its nodes, is not installed") from None
        self.onnxruntime: Any = onnxruntime
        self.opsets = [opset for opset in opsets if opset.domain in ("", "ai.onnx")]
        self.ignored = {"clip"} if ignore_clip else set()
        self.sessions: dict[int, Callable[[dict[str, Array]], list[Array]]] = {}

    def __call__(self, node: Any, inputs: Sequence[Array | None]) -> list[Array]:
        arrays = {f"i{k}": array for k, array in enumerate(inputs) if array is not None}
        dtype = np.dtype(np.float32)  # of recurrent nodes, for which it has no others
        if is_recurrent(node):
            if "i0" not in arrays or not all(array.size for array in arrays.values()):  # it would end the process
                raise NotCompared(f"{node.op_type} {key_of(node)!r} gets no steps or no rows for random inputs")
            dtype = arrays["i0"].dtype
            floats = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
            arrays |= {name: array.astype(np.float32, copy=False) for name, array in floats.items()}
        if id(node) not in self.sessions:
            self.sessions[id(node)] = self._session(node, arrays)
        try:
            results = self.sessions[id(node)](arrays)
        except (MemoryError, NotCompared):
            raise
        except Exception as error:  # onnxruntime's, of many kinds
            raise NotCompared(f"{key_of(node)} ({node.op_type}) does not run: {_reason(error)}") from error
        return [array.astype(dtype) for array in results] if is_recurrent(node) else results

    def _session(self, node: Any, arrays: Mapping[str, Array]) -> Callable[[dict[str, Array]], list[Array]]:
        """Return what computes the results of a node from its inputs, by their positions."""
        from onnx import helper

        if has_more(node):
            raise NotCompared(f"{key_of(node)} ({node.op_type}) has an attribute that is not in it")
        names = [f"i{k}" if f"i{k}" in arrays else "" for k in range(len(node.input))]
        outputs = [f"o{k}" for k in range(len(node.output))]
        attributes = [attribute for attribute in node.attribute if attribute.name not in self.ignored]
        if is_recurrent(node):
            outputs = ["Y", "Y_h", "Y_c"][: 3 if node.op_type == "LSTM" else 2]
            attributes = [attribute for attribute in attributes if attribute.name != "hidden_size"]
            attributes.append(helper.make_attribute("hidden_size", arrays["i2"].shape[-1]))
        plain = helper.make_node(node.op_type, names, outputs, name=key_of(node))
        plain.attribute.extend(attributes)
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
            for name, array in arrays.items()
        ]
        graph = helper.make_graph([plain], "node", infos, [*map(helper.make_empty_tensor_value_info, outputs)])
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=8)
        options = self.onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.graph_optimization_level = self.onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers = ["CPUExecutionProvider"]
        try:
            session = self.onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
        except Exception as error:  # it has no kernel for float64, or does not know the opset
            if is_recurrent(node):
                raise NotCompared(f"onnxruntime does not take {node.op_type}: {_reason(error)}") from error
            return lambda arrays: _draw_or_compute(self.opsets, plain, [arrays.get(name) for name in plain.input])
        return partial(session.run, None)


def _reason(error: Exception) -> str:
    """Return what onnxruntime says of an input or a node, without where in its sources it says so."""
    text = " ".join(str(error).split())
    for start in ("[ONNXRuntimeError] : ", "Status Message: ", "was false. "):
        text = text.rpartition(start)[2]
    return text if len(text) < 160 else f"{text[:157]}..."
