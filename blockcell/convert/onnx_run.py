"""ONNX models on random inputs, beside the layers that they became: `compare_pieces`.

Nodes run one by one, so how large a result will be is known before its node starts: a model that is not trusted can
neither take much memory nor much time. Only operators of a list run, and nothing is read from other files. What
other nodes give is drawn at random, since they are no part of a layer. onnxruntime computes the nodes, onnx.reference
those for which it has no kernel. No other module of `convert` imports onnxruntime, and only this comparison does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, permutations, product
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..layers import Layer
from ..optable import ACTIVATIONS, Array
from .comparison import Crossing, NotCompared, Outcome, Sizes, choose_sizes, compare
from .models import Assembly, cell_states, flatten_state, nest_states, read_initial_state
from .onnx_graph import (
    CALLER,
    REPEATED,
    RESHAPING,
    SELECTING,
    Evaluator,
    OnnxGraph,
    evaluator,
    input_name,
    integer_attribute,
    is_recurrent,
    is_standard,
    reached_names,
    result_size,
)
from .onnx_node import key_of

_COMPUTED = {*REPEATED, "Dropout", "Gemm", "MatMul", *(name.capitalize() for name in ACTIVATIONS if name)}
_LARGEST_WORK = 2**32  # multiplications of one run, a second or so
_LARGEST_RUN = 2**21  # numbers of all results of one run, beside those that the model itself may have
_LARGEST_DRAWN = 2**20  # numbers of one input
_LARGEST_BOUND = 4096  # of a Slice or a Gather, beyond which T and B are tried
_ROLES = {0: "X", 4: "sequence_lens", 5: "initial_h", 6: "initial_c"}  # of inputs of recurrent nodes, by position
_RUNTIME_EPS = 4 * float(np.finfo(np.float32).eps)  # onnxruntime's Softplus is off by so much


class OnnxPiece(NamedTuple):
    """A layer, and where in a graph its input and its results are."""

    label: str
    """For messages: "the model", or "LSTM 'encoder'"."""
    layer: Layer
    initial_state: Any
    """As `read_initial_state` takes it."""
    graph: OnnxGraph
    nodes: Sequence[Any]
    """The recurrent nodes that it was made of, the first one in front."""
    result: str
    """The name of the value that y is; not used if there is one node alone."""
    form: str
    """How y is laid out in it, as `Trial.forms` of ``onnx_steps.py`` has it, or "Y" for that of a node."""

    def results(self) -> list[str]:
        """Return the names of the values that are compared, or looked at."""
        return [name for name in (self.result, *(name for node in self.nodes for name in node.output)) if name]


class OnnxAssembly(NamedTuple):
    """What the graphs of a model become, and what must be compared."""

    assembly: Assembly
    pieces: Sequence[OnnxPiece] = ()
    trial_sizes: Sequence[tuple[int, int]] = ()
    """T and B that nodes between layers can take, if they can take certain ones alone."""
    passed_over: Sequence[str] = ()
    """The labels of nodes between layers that do nothing."""
    is_proven_for_rows: bool = True
    """Whether they would do nothing for more rows than the model has."""


def compare_pieces(source: OnnxAssembly, ignore_clip: bool) -> Outcome:
    """Compare layers with the pieces of a model that they were made of; without the attribute clip if it is ignored.

    Returns
    -------
    Outcome
        With the labels of nodes that change the order of numbers in front of pieces or behind them.

    Raises
    ------
    ConversionError
        A layer computes something else than its piece of the model.
    """
    try:
        run = _Run(source.pieces, ignore_clip)
        sizes = run.choose_sizes(source.trial_sizes)
        compare(CALLER, run, sizes, source.passed_over)
    except NotCompared as error:
        return Outcome(remarks=[error.remark])
    hidden = "T" if source.is_proven_for_rows else "TB"
    small = [f"{name} = {size}" for name, size in run.fixed.items() if name in hidden and size < 3]
    remarks = [f"compared for {' and '.join(small)} alone, which the model fixes"] if small else []
    return Outcome(run.nodes_around(sizes[0]), remarks)


class _Run:
    """Runs all pieces of a model: a `comparison.Run`."""

    def __init__(self, pieces: Sequence[OnnxPiece], ignore_clip: bool) -> None:
        self.pieces = pieces
        graphs = {id(piece.graph): piece.graph for piece in pieces}
        self.sources = {
            key: _Source(graph, [piece for piece in pieces if piece.graph is graph], ignore_clip)
            for key, graph in graphs.items()
        }
        self.fixed: dict[str, int] = {}
        """T and B, if the model fixes them."""

    def __call__(self, T: int, B: int, seed: int, scale: float) -> list[Crossing]:
        values = self.values(T, B, seed, scale)
        return [_crossing(piece, values[id(piece.graph)]) for piece in self.pieces]

    def values(self, T: int, B: int, seed: int, scale: float) -> dict[int, _Values]:
        return {key: source.values(T, B, seed, scale) for key, source in self.sources.items()}

    def choose_sizes(self, trial_sizes: Sequence[tuple[int, int]]) -> list[Sizes]:
        """Choose the T and B of comparisons, and find which of them the model fixes."""
        bounds = {bound for source in self.sources.values() for bound in source.bounds()}
        leaves = [leaf for piece in self.pieces for leaf in piece.layer._leaves().values()]
        others = bounds | {size for leaf in leaves for size in (leaf.input_size, leaf.output_size)}
        first, second, *long = choose_sizes(None, None, others)
        beyond = max(bounds, default=0) + 8
        usual_sizes = [first[:2], (first.T, beyond), (beyond, first.B), (beyond, beyond)]
        shapes = self._first_shapes(trial_sizes or usual_sizes)
        if trial_sizes:
            self.fixed = dict(zip("TB", shapes[1], strict=True))
            return [Sizes(*shapes[0])]
        try:
            others_shapes = self._first_shapes([second[:2]])[1]
        except NotCompared:
            others_shapes = shapes[1]
        self.fixed = {name: a for name, a, b in zip("TB", shapes[1], others_shapes, strict=True) if a == b}
        T, B = self.fixed.get("T"), self.fixed.get("B")
        if shapes[0] != first[:2]:
            return [Sizes(*shapes[0])]
        long = [Sizes(max(long[0].T, beyond), first.B, True)] if T is None else []
        long += [Sizes(first.T, beyond, True)] if B is None and bounds else []
        return [*choose_sizes(T, B, others)[:2], *long]

    def _first_shapes(self, attempts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first T and B that the model can take, and those of the first piece's x."""
        errors = []
        for T, B in attempts:
            try:
                x = self(T, B, 0, 1.0)[0].x
                return (T, B), (x.shape[0], x.shape[1])
            except NotCompared as error:
                errors.append(error)
        raise errors[0]

    def nodes_around(self, sizes: Sizes) -> list[str]:
        """Return the labels of nodes in front of pieces and behind them that change the order of numbers."""
        values = self.values(sizes.T, sizes.B, 0, 1.0)
        nodes = [node for key, source in self.sources.items() for node in source.nodes_around(values[key])]
        return [*dict.fromkeys(f"{key_of(node)} ({node.op_type})" for node in nodes)]


class _Source:
    """A graph that runs: which values are drawn, and their sizes."""

    def __init__(self, graph: OnnxGraph, pieces: Sequence[OnnxPiece], ignore_clip: bool) -> None:
        self.graph = graph
        self.pieces = pieces
        self.engine = _Engine(graph.opsets, ignore_clip)
        self.constants: dict[str, Array] = {}
        """The values of tensors and of what nodes make of them."""
        self.weights_dtype = np.dtype(np.float32)
        self.roles: dict[str, tuple[str, list[int | str]]] = {}
        """What inputs of the pieces' nodes are, and their shapes, by name."""
        self.fixed: dict[str, int] = {}
        """T and B, if the inputs of recurrent nodes are declared so."""
        self.aliases: dict[str, str] = {}
        """T or B, by the model's own names of sizes."""
        for piece in pieces:
            for node in piece.nodes:
                self._add_roles(node)
        self.drawn: set[str] = set()
        """Inputs of recurrent nodes that are drawn although they are computed, of values whose shape is not known."""
        for name in self.roles:
            if any(self.shape(leaf) is None for leaf in self.leaves([name])):
                self.drawn.add(name)
        names = [name for piece in pieces for node in piece.nodes for name in [*node.input, *piece.results()]]
        self.choices = [*self._size_choices(names)]
        """Which of T and B each other size of the model may be; one is left once the model has run."""
        self.index_limits = self._index_limits()
        self.lengths = {*self.leaves(name for name, (role, _) in self.roles.items() if role == "sequence_lens")}
        """The values that are drawn and that lengths come from."""

    def _add_roles(self, node: Any) -> None:
        W, R = (np.asarray(self.graph.constant(node.input[k])) for k in (1, 2))
        self.weights_dtype = W.dtype
        directions, columns, hidden = *W.shape[::2], R.shape[-1]
        state: list[int | str] = [directions, "B", hidden]
        shapes: dict[str, list[int | str]] = {"X": ["T", "B", columns], "sequence_lens": ["B"]}
        shapes |= {"initial_h": state, "initial_c": state}
        for position, role in _ROLES.items():
            if name := input_name(node, position):
                self.roles.setdefault(name, (role, shapes[role]))
                for declared, size in zip(self._stated(name) or [], shapes[role], strict=False):
                    if isinstance(size, str) and isinstance(declared, int):
                        self.fixed.setdefault(size, declared)
                    elif isinstance(size, str) and isinstance(declared, str):
                        self.aliases.setdefault(declared, size)

    def _stated(self, name: str) -> Sequence[int | str] | None:
        """Return the shape of an input that the model states or that its constants have."""
        first, second = (self.graph.constant(name, size) for size in (2, 3))
        is_fixed = first is not None and second is not None and first.shape == second.shape
        return first.shape if is_fixed and first is not None else self.graph.shape(name)

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

        role = self.roles.get(name, ("", []))[0]
        if role in ("X", "initial_h", "initial_c"):
            return self.weights_dtype
        described = self.graph.types.get(name)
        try:
            return helper.tensor_dtype_to_np_dtype(described.elem_type) if described else np.dtype(np.int32)
        except KeyError:
            raise NotCompared(f"the type of {name!r} is not known") from None

    def is_computed(self, name: str) -> bool:
        """Return whether a value is what a node makes of others, rather than drawn."""
        node = self.graph.makers.get(name)
        if name in self.drawn or node is None:
            return False
        return is_recurrent(node) or (is_standard(node) and node.op_type in _COMPUTED)

    def leaves(self, names: Iterable[str]) -> list[str]:
        """Return the values that are drawn if these are asked for."""

        def sources_of(name: str) -> Iterable[str]:
            return self.graph.makers[name].input if name not in self.graph.tensors and self.is_computed(name) else ()

        values = reached_names(names, sources_of)
        return [name for name in values if name not in self.graph.tensors and not self.is_computed(name)]

    def _size_choices(self, names: Iterable[str]) -> Iterator[dict[str, str]]:
        """Yield which of T and B the sizes of drawn values may be that are neither fixed nor T or B.

        The sizes of one value differ, if there are no more than two.
        """
        known = {"T", "B", *self.aliases}
        shapes = [self.shape(name) or [] for name in self.leaves(names)]
        free_sizes = [[size for size in shape if isinstance(size, str) and size not in known] for shape in shapes]
        free_names = [*dict.fromkeys(chain.from_iterable(free_sizes))][:6]
        for letters in product("TB", repeat=len(free_names)):
            choice = dict(zip(free_names, letters, strict=True))
            if all(len({choice.get(name) for name in sizes}) == min(2, len({*sizes})) for sizes in free_sizes):
                yield choice

    def _index_limits(self) -> dict[str, int]:
        """Return how many rows constant tables have at least, by the values from which indices into them come."""
        limits: dict[str, int] = {}
        for node in self.graph.nodes:
            table = self.graph.tensors.get(node.input[0]) if node.op_type == "Gather" and len(node.input) == 2 else None
            if table is None or not table.dims:
                continue
            axis = integer_attribute(node, "axis")
            rows = table.dims[axis] if -len(table.dims) <= axis < len(table.dims) else 0
            for leaf in self.leaves([node.input[1]]):
                limits[leaf] = min(rows, limits.get(leaf, rows))
        return limits

    def bounds(self) -> set[int]:
        """Return the constants that may be bounds of steps or rows."""
        bounds: set[int] = set()
        for node in self.graph.nodes:
            if node.op_type not in SELECTING or all(map(self.graph.is_fixed, node.output)):
                continue
            arrays = [array for name in node.input[1:] if (array := self.graph.constant(name)) is not None]
            numbers = {abs(int(number)) for array in arrays if array.dtype.kind == "i" for number in array.flat[:8]}
            numbers |= {abs(number) for attribute in node.attribute for number in attribute.ints[:8]}
            bounds |= {number for number in numbers if 2 < number <= _LARGEST_BOUND}
        return bounds

    def values(self, T: int, B: int, seed: int, scale: float) -> _Values:
        """Return the values of the graph for T steps of B rows, by a choice of the other sizes that it can take."""
        errors, taken = [], []
        for choice in self.choices:
            sizes = {"T": T, "B": B} | self.fixed
            sizes |= {name: sizes[letter] for name, letter in (self.aliases | choice).items()}
            values = _Values(self, sizes, seed, scale)
            try:
                values.compute([name for piece in self.pieces for name in piece.results()])
                values.check_nodes(node for piece in self.pieces for node in piece.nodes)
            except NotCompared as error:
                errors.append(error)
                continue
            taken.append((choice, values))
            if values.x(self.pieces[0]).shape[:2] == (T, B):
                break
        if not taken:
            raise errors[0]
        self.choices = [taken[-1][0]]
        return taken[-1][1]

    def nodes_around(self, values: _Values) -> list[Any]:
        """Return the nodes in front of pieces and behind them that change the order of numbers."""
        by_result = {piece.result: piece for piece in self.pieces if piece.result}
        stops = {name for piece in self.pieces for name in (*piece.results(), *piece.nodes[0].output)}
        nodes: list[Any] = []
        orders = {False, True}  # whether steps come before rows in the model's input, if it has one layer
        ends = [(piece.nodes[0].input[0], piece) for piece in self.pieces]
        for name, reader in [*ends, *((name, None) for name in self.graph.outputs)]:
            moving, origins, _ = self.graph.origins(name, stops)
            if name in self.drawn or len(origins) != 1 or any(node.op_type not in RESHAPING for node in moving):
                continue  # other nodes are left out anyway
            (origin,) = origins
            source = by_result.get(origin)
            if source is None and reader is None and origin not in stops:
                continue
            values.compute([name, origin])
            before = values.known[origin] if source is None else values.y(source)
            after = values.known[name] if reader is None else values.x(reader)
            if source is not None and reader is not None:
                nodes += [] if np.array_equal(before, after) else moving
            elif reader is not None:
                orders_in_input = orders_of_steps(after, before)
                nodes += [] if orders_in_input else moving
                if len(self.pieces) == 1 and origin in self.graph.inputs:
                    orders = orders_in_input or orders
            elif not orders & orders_of_steps(before, after):
                nodes += moving or ([] if source is None else self._nodes_in_head(source))
        return nodes

    def _nodes_in_head(self, piece: OnnxPiece) -> list[Any]:
        """Return the nodes that move numbers between the last recurrent node of a piece and its result."""
        nodes: list[Any] = []
        waiting = [piece.result]
        while waiting:
            node = self.graph.makers.get(waiting.pop())
            if node is not None and not is_recurrent(node) and not any(node is other for other in nodes):
                nodes.append(node)
                waiting += node.input[:1]
        return [node for node in reversed(nodes) if node.op_type in RESHAPING]


class _Values:
    """The values of a graph for one draw, which are computed when they are asked for."""

    def __init__(self, source: _Source, sizes: Mapping[str, int], seed: int, scale: float) -> None:
        self.source = source
        self.graph = source.graph
        self.sizes = sizes
        self.seed = seed
        self.scale = scale
        self.known: dict[str, Array] = {}
        self.by_node: dict[int, list[Array]] = {}
        """All results of recurrent nodes, by the nodes' ids."""
        self.size, self.work = 0.0, 0.0

    def compute(self, names: Iterable[str]) -> None:
        """Compute these values and all that they come from."""
        waiting, opened = [*names], set[str]()
        while waiting:
            name = waiting[-1]
            if self._find(name):
                waiting.pop()
                continue
            node = self.graph.makers[name]
            missing = [value for value in node.input if not self._find(value)]
            if not missing:
                self._run(node)
            if name not in self.known and (name in opened or not missing):
                raise NotCompared(f"{key_of(node)} ({node.op_type}) reads its own result, or does not give {name!r}")
            opened.add(name)
            waiting += missing

    def check_nodes(self, nodes: Iterable[Any]) -> None:
        """Refuse recurrent nodes that have not run, since their results are also those of others or constants."""
        for node in nodes:
            if id(node) not in self.by_node:
                raise NotCompared(f"the results of {node.op_type} {key_of(node)!r} have the names of others")

    def _find(self, name: str) -> bool:
        """Return whether a value is known; draw it or read it if no node computes it."""
        constants = self.source.constants
        if name in self.graph.tensors and name not in constants:
            constants[name] = self.graph.array(name)
        if name in constants:
            self.known[name] = constants[name]
        elif name and name not in self.known and not self.source.is_computed(name):
            self.known[name] = self._draw(name)
        return not name or name in self.known

    def _draw(self, name: str) -> Array:
        """Draw a value at random, always the same one for its name and the seed."""
        source = self.source
        shape, dtype = source.shape(name), source.dtype(name)
        if shape is None:
            raise NotCompared(f"the shape of {name!r} is not known")
        sizes = [size if isinstance(size, int) else self.sizes.get(size, self.sizes["T"]) for size in shape]
        if math.prod(sizes) > _LARGEST_DRAWN:
            raise NotCompared(f"{name!r} has the shape {tuple(sizes)}, which is too large")
        if name in source.drawn and self.graph.is_zero(name):
            return np.zeros(sizes, dtype)
        g = np.random.default_rng([self.seed, crc32(repr(name).encode())])
        if dtype.kind == "f":
            return (g.standard_normal(sizes) * self.scale).astype(dtype)
        if name in source.lengths:
            lengths = g.integers(1, self.sizes["T"] + 1, sizes)
            lengths.flat[:1] = self.sizes["T"]
            return lengths.astype(dtype)
        return g.integers(0, max(1, source.index_limits.get(name, 2)), sizes).astype(dtype)

    def _run(self, node: Any) -> None:
        """Compute the results of a node from known values."""
        inputs = [self.known[name] if name else None for name in node.input]
        size, work = _size_and_work(node, [array for array in inputs if array is not None])
        self.size += size
        self.work += work
        constants = sum(array.size for array in self.source.constants.values())
        if self.work > _LARGEST_WORK or self.size > _LARGEST_RUN + 2 * constants:
            raise NotCompared(f"{key_of(node)} ({node.op_type}) would take too long or too much memory")
        with np.errstate(all="ignore"):
            results = self.source.engine.run(node, inputs)
        if is_recurrent(node):
            self.by_node[id(node)] = results
        named = {name: array for name, array in zip(node.output, results, strict=False) if name}
        self.known |= named
        if all(name in self.source.constants for name in node.input if name):
            self.source.constants |= named

    def states(self, node: Any) -> list[Array]:
        """Return the last states [D,B,.] of a recurrent node."""
        return self.by_node[id(node)][1:]

    def x(self, piece: OnnxPiece) -> Array:
        """Return what enters a piece [T,B,I]."""
        return self.known[piece.nodes[0].input[0]]

    def y(self, piece: OnnxPiece) -> Array:
        """Return what leaves a piece, [T,B,.] or, if it has no steps, [B,.]."""
        if piece.form == "Y":
            y = self.by_node[id(piece.nodes[-1])][0].swapaxes(1, 2)
            return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
        y, (T, B) = self.known[piece.result], self.x(piece).shape[:2]
        if piece.form in ("last", "ends"):
            return y
        columns = y.shape[-1]
        return y.reshape(B, T, columns).swapaxes(0, 1) if "batch first" in piece.form else y.reshape(T, B, columns)


# ------------------------------------------------------------------------------------------------------------ crossings
def _crossing(piece: OnnxPiece, values: _Values) -> Crossing:
    """Return what enters a piece and what leaves it."""
    expected = {"Y" if piece.form == "Y" else repr(piece.result): values.y(piece)}
    for node in piece.nodes:
        expected |= zip(_state_labels(piece, node), values.states(node), strict=False)

    def read(y: Array, last: Any) -> Mapping[str, Array]:
        results, states = dict.fromkeys(expected, y), iter(cell_states(last))
        for node in piece.nodes:
            cells = [*islice(states, _direction_count(values, node))]
            for label, field in zip(_state_labels(piece, node)[: len(values.states(node))], ("h", "cs"), strict=False):
                results[label] = np.stack([getattr(cell, field) for cell in cells]) * has_steps
        return results

    state = read_initial_state(CALLER, piece.layer, _state(piece, values))
    options: dict[str, Any] = {} if state is None else {"state": state}
    lengths = values.known.get(input_name(piece.nodes[0], 4))
    options |= {} if lengths is None else {"lengths": lengths}
    has_steps = np.bool_(True) if lengths is None else lengths[:, None] > 0  # else onnxruntime's states are zeros
    x = np.ascontiguousarray(values.x(piece).astype(piece.layer.dtype))
    return Crossing(piece.label, piece.layer, x, expected, read, options, values.source.engine.eps)


def _state_labels(piece: OnnxPiece, node: Any) -> list[str]:
    """Return what messages call the last states h and c of a node."""
    behind = f" of {node.op_type} {key_of(node)!r}" if len(piece.nodes) > 1 else ""
    return [f"Y_h{behind}", f"Y_c{behind}"]


def _direction_count(values: _Values, node: Any) -> int:
    return len(values.states(node)[0])


def _state(piece: OnnxPiece, values: _Values) -> Any:
    """Return the state that the piece starts from: what the conversion says of it, and else what the model has."""
    known_cells, cells = iter(flatten_state(piece.layer, piece.initial_state)), []
    for node in piece.nodes:
        node_cells = [*islice(known_cells, _direction_count(values, node))]
        for position, field in ((5, "h"), (6, "cs")):
            name = input_name(node, position)
            is_drawn = name in values.source.drawn
            if name and (is_drawn or not (field in node_cells[0] or values.graph.is_zero(name))):
                node_cells = [cell | {field: values.known[name][d]} for d, cell in enumerate(node_cells)]
        cells += node_cells
    return nest_states(piece.layer, iter(cells))


def orders_of_steps(array: Array, other: Array) -> set[bool]:
    """Return whether steps come before rows in another array that has the numbers of x or y [T,B,.].

    The other array may have the axes in another order, and some joined or taken apart; more than one order fits if
    there is one step or one row, or if there are no steps. None fits if the numbers are others or are mixed.
    """
    joined = [order.index(0) < order.index(1) for order in _orders_of_axes(array, other) if array.ndim > 1]
    apart = [order[0] < order[1] for order in _orders_of_axes(other, array) if other.ndim > 1]
    return {False, True} if (joined or apart) and array.ndim < 3 else {*joined, *apart}


def _orders_of_axes(array: Array, joined: Array) -> Iterator[tuple[int, ...]]:
    """Yield the orders of an array's axes in which some of them, joined, are those of another array."""
    orders = permutations(range(array.ndim)) if array.size == joined.size and array.ndim < 7 else ()
    for order in orders:
        moved = array.transpose(order)
        ends, ends_joined = (np.cumprod([size for size in one.shape if size != 1]) for one in (moved, joined))
        if {*ends_joined} <= {*ends} and np.array_equal(moved.ravel(), joined.ravel()):
            yield order


# --------------------------------------------------------------------------------------------------------------- engine
def _size_and_work(node: Any, inputs: list[Array]) -> tuple[float, float]:
    """Return how many numbers a result of a node has at most, and how many multiplications they take."""
    if is_recurrent(node):
        X, W, R = inputs[:3]
        steps = math.prod(X.shape[:2])
        return steps * math.prod(R.shape[::2]), steps * (W.size + R.size)
    size = result_size(node, inputs)
    depth = max(inputs[0].shape, default=1) if node.op_type in ("Gemm", "MatMul") and inputs else 1
    return size, size * depth


class _Engine:
    """Computes single nodes."""

    eps = _RUNTIME_EPS
    """The precision of recurrent nodes: onnxruntime has them in float32 alone."""

    def __init__(self, opsets: Any, ignore_clip: bool) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise NotCompared("onnxruntime, which computes its nodes, is not installed") from None
        self.onnxruntime: Any = onnxruntime
        self.opsets = [opset for opset in opsets if opset.domain in ("", "ai.onnx")]
        self.ignored = {"output_sequence"} | ({"clip"} if ignore_clip else set())
        self.sessions: dict[tuple[Any, ...], Evaluator] = {}

    def run(self, node: Any, inputs: Sequence[Array | None]) -> list[Array]:
        """Return the results of a node, of a recurrent one all that it can have."""
        if not is_recurrent(node):
            return self._run(node, inputs)
        from onnx import helper

        X = inputs[0]
        if X is None or any(array is not None and not array.size for array in inputs):  # it would end the process
            raise NotCompared(f"{node.op_type} {key_of(node)!r} gets no steps or no rows for random inputs")
        arrays = [a if a is None or a.dtype.kind != "f" else a.astype(np.float32, copy=False) for a in inputs]
        count = 3 if node.op_type == "LSTM" else 2
        names = [f"i{k}" if a is not None else "" for k, a in enumerate(arrays)]
        plain = helper.make_node(node.op_type, names, ["Y", "Y_h", "Y_c"][:count], name=node.name)
        plain.attribute.extend(attribute for attribute in node.attribute if attribute.name not in self.ignored)
        if arrays[2] is not None and all(attribute.name != "hidden_size" for attribute in node.attribute):
            plain.attribute.append(helper.make_attribute("hidden_size", arrays[2].shape[-1]))
        return [array.astype(X.dtype) for array in self._run(plain, arrays, key=id(node))]

    def _run(self, node: Any, inputs: Sequence[Array | None], key: int | None = None) -> list[Array]:
        arrays = {name: array for name, array in zip(node.input, inputs, strict=True) if array is not None}
        session_key = key or id(node), tuple(array.dtype for array in arrays.values())
        if session_key not in self.sessions:
            self.sessions[session_key] = self._session(node, arrays)
        try:
            results = self.sessions[session_key](arrays)
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's, of many kinds
            raise NotCompared(f"{key_of(node)} ({node.op_type}) does not run: {_reason(error)}") from error
        if results is None:
            raise NotCompared(f"{key_of(node)} ({node.op_type}) does not run")
        return [results.get(name, np.empty(0)) for name in node.output]

    def _session(self, node: Any, arrays: Mapping[str, Array]) -> Evaluator:
        """Return what computes a node's results by name; None if it cannot take the values."""
        from onnx import helper

        for attribute in node.attribute:
            has_graph = attribute.HasField("g") or attribute.graphs or attribute.tensors or attribute.ref_attr_name
            has_graph = has_graph or attribute.HasField("sparse_tensor")
            if has_graph or attribute.t.data_location == attribute.t.EXTERNAL:
                raise NotCompared(f"{key_of(node)} ({node.op_type}) has an attribute that is not in it")
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
            for name, array in arrays.items()
        ]
        names = [*filter(None, node.output)]
        graph = helper.make_graph([node], "node", infos, [*map(helper.make_empty_tensor_value_info, names)])
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=8)
        options = self.onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.graph_optimization_level = self.onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = self.onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # it has no kernel for float64, or does not know the opset
            if is_recurrent(node):
                raise NotCompared(f"onnxruntime does not take {node.op_type}: {_reason(error)}") from error
            return evaluator(node, arrays, self.opsets)
        return lambda values: dict(zip(names, session.run(names, dict(values)), strict=True))


def _reason(error: Exception) -> str:
    """Return what onnxruntime says of an input or a node, without where in its sources it says so."""
    text = " ".join(str(error).split())
    for start in ("[ONNXRuntimeError] : ", "Status Message: ", "was false. "):
        text = text.rpartition(start)[2]
    return text if len(text) < 160 else f"{text[:157]}..."
