"""The steps of a whole ONNX graph: its layers, and which of them reads the result of which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..layers import Bidirectional, Dense, Layer
from ..optable import ACTIVATIONS, Array
from .models import Step, assemble
from .onnx_graph import (
    CALLER,
    LARGEST_REPEATED,
    RESHAPING,
    SELECTING,
    Mover,
    OnnxGraph,
    attributes_by_name,
    fixed_sizes,
    input_name,
    integer_attribute,
    is_recurrent,
)
from .onnx_node import Remark, from_node, key_of
from .onnx_run import OnnxAssembly, OnnxPiece
from .shared import read_arrays

_LARGEST = 4096  # of T and B and their product, in a trial of what lies between two layers
_LARGEST_TRIAL = 2**19  # numbers of a result in such a trial
_QUANTIZED = "onnxruntime has quantized it; convert the model that quantize_dynamic was given"
_WRITTEN_OUT = (
    "it is a GRU, an LSTM or an RNN in single nodes, as tf2onnx writes most GRUs and SimpleRNNs of Keras; convert what"
    " the model was made of: convert.from_keras(model), or blockcell.tensorflow.open(path).cells of a graph"
)
_ACTIVATIONS = {name.capitalize(): name for name in ACTIVATIONS if name}  # by ONNX's names


_Pair = tuple[int, int]  # T and B


class Trial(NamedTuple):
    """Numbers in place of what a step gives for T steps of B rows."""

    values: dict[str, Array]
    """By the names that its results have in the graph."""
    forms: dict[str, Array]
    """y, with its axes in other orders, and parts of it that a dense layer may read, by the names of these forms."""


class Result(NamedTuple):
    """What a recurrent or a dense step gives, and where it is in a model."""

    graph: OnnxGraph
    node: Any
    """A recurrent node; None if the step is a dense one."""
    name: str
    form: str
    """How y is laid out in the value of this name, as `OnnxPiece.form` says it."""
    trial: Callable[[int, int], Trial]
    """Makes numbers for T and B."""
    sizes: tuple[int, int]
    """T and B, -1 where the model does not fix them."""
    width: int
    """The number of columns of y."""
    lengths: list[str]
    """The values that the lengths come from."""


class Source(NamedTuple):
    """Where a value comes from that is the y of a step."""

    key: str
    form: str
    """One of the step's `Trial.forms`."""
    nodes: list[Any]
    """The nodes between the step and the value."""


def from_graphs(graphs: list[OnnxGraph], remarks: list[Remark], ignore_clip: bool) -> OnnxAssembly:
    """Convert the layers of a model's graphs, and `assemble` them."""
    steps: dict[str, Step] = {}
    results: dict[str, Result] = {}
    outputs: list[str | None] = []
    trial_sizes: list[tuple[int, int]] = []
    passed_over: list[str] = []
    is_proven_for_rows = True
    for graph in graphs:
        graph_steps = GraphSteps(graph, steps, results, remarks, ignore_clip)
        outputs += graph_steps.add()
        trial_sizes += graph_steps.trial_sizes
        is_proven_for_rows &= graph_steps.is_proven_for_rows
        passed_over += [f"{key_of(node)} ({node.op_type})" for node in graph_steps.nodes_between]
    assembly = assemble(CALLER, steps, outputs, _hint(graphs[0]))
    layers = assembly.layers
    if isinstance(layers, dict):
        parts = [([key], layer, assembly.initial_states[key]) for key, layer in layers.items()]
    else:
        parts = [([*assembly.keys], layers, assembly.initial_states)]
    pieces = []
    for keys, layer, initial_state in parts:
        nodes = [results[key].node for key in keys if results[key].node is not None]
        last = results[keys[-1]]
        label = "the model" if len(parts) == 1 and not assembly.left_out else f"{nodes[0].op_type} {keys[0]!r}"
        pieces.append(OnnxPiece(label, layer, initial_state, last.graph, nodes, last.name, last.form))
    return OnnxAssembly(
        assembly, pieces, [*dict.fromkeys(trial_sizes)], [*dict.fromkeys(passed_over)], is_proven_for_rows
    )


def _hint(graph: OnnxGraph) -> str:
    """Say what to do if the cells of a model are written out: its weights have PyTorch's names, or loops have cells."""
    leaves = ("weight_ih", "weight_ih_l0")
    prefixes = [name.removesuffix(leaf) for leaf in leaves for name in graph.tensors if name.endswith(f".{leaf}")]
    if not prefixes:
        mends = [f". Of {key_of(node)!r}: {mend}" for node in graph.nodes if (mend := _mend(node))]
        return mends[0] if mends else ""
    return (
        f"; the weights of cells that are written out have PyTorch's names: tensors = {{tensor.name:"
        f" onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}};"
        f" {' and '.join(f'convert.from_torch(tensors, prefix={prefix!r})' for prefix in prefixes[:3])}"
    )


def _mend(node: Any) -> str:
    """Say what to do about a node that computes a GRU, an LSTM or an RNN but is none, "" for others.

    The body of a loop that does so has a product and an activation.
    """
    if node.op_type == "DynamicQuantizeLSTM":
        return _QUANTIZED
    ops = {inner.op_type for attribute in node.attribute for inner in attribute.g.node}
    has_cell = not ops.isdisjoint(("MatMul", "Gemm")) and not ops.isdisjoint(_ACTIVATIONS)
    return _WRITTEN_OUT if has_cell and node.op_type in ("Loop", "Scan") else ""


class GraphSteps:
    """Adds the steps of a graph.

    Whether one layer reads another's y is tried: numbers in place of the first one's results go through the nodes
    between the two, and must reach the second one as y, perhaps with its axes in another order.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        steps: dict[str, Step],
        results: dict[str, Result],
        remarks: list[Remark],
        ignore_clip: bool,
    ) -> None:
        self.graph = graph
        self.steps = steps
        self.results = results
        """By the keys of recurrent and dense steps, those of other graphs, too."""
        self.remarks = remarks
        self.ignore_clip = ignore_clip
        self.key_of_value: dict[str, str] = {}
        """The steps that give values, by the values' names."""
        self.states: set[str] = set()
        """The names of values that are last states."""
        self.products_without_bias: set[str] = set()
        """The keys of dense steps whose bias has not been seen."""
        self.readers: dict[str, list[Any]] = {}
        for node in graph.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.trial_sizes: list[_Pair] = []
        """T and B that nodes between layers can take, if they cannot take any."""
        self.is_proven_for_rows = True
        """Whether nodes between layers do nothing for more steps and rows, too, than the one or two of the model."""
        self.nodes_between: list[Any] = []
        """The nodes between layers, and before their states, which no warning mentions."""

    def add(self) -> list[str | None]:
        """Add the steps; return the keys of those that the graph's results come from."""
        graph, results = self.graph, []
        nodes = graph.needed()
        for node in nodes:
            if node.op_type in (*RESHAPING, *SELECTING):
                continue
            if is_recurrent(node):
                self._add_recurrent(node)
            elif not (self._add_dense(node) or self._add_bias(node) or self._add_activation(node)):
                results += self._add_unconverted(node, node.output)
        for node in nodes:
            if node.op_type in SELECTING and all(node is not between for between in self.nodes_between):
                origins = {origin for name in node.input for origin in graph.origins(name, self.key_of_value)[1]}
                results += [] if origins <= self.states else self._add_unconverted(node, ())
        return [*results, *self._input_keys(graph.outputs)]

    def _add_unconverted(self, node: Any, results: Iterable[str]) -> list[str]:
        """Add a node that has an effect; return its key. The node that has a body stands for those in the body."""
        if self.graph.is_body or all(map(self.graph.is_fixed, node.output)):
            return []
        return [self._add_step(node, results, self._input_keys(node.input), hint=_mend(node))]

    def _add_step(self, node: Any, results: Iterable[str], inputs: tuple[str | None, ...], **fields: Any) -> str:
        """Add the step of a node that gives these values; return its key."""
        key = key_of(node)
        while key in self.steps:  # nodes need no names, or have the same in two graphs
            key += "'"
        self.steps[key] = Step(f"{key} ({node.op_type})", inputs, **fields)
        self.key_of_value |= dict.fromkeys(filter(None, results), key)
        return key

    def _input_keys(self, names: Iterable[str]) -> tuple[str | None, ...]:
        """Return the keys of the steps that values come from; None for states and inputs."""
        origins = dict.fromkeys(origin for name in names for origin in self.graph.origins(name, self.key_of_value)[1])
        return tuple(None if name in self.states else self.key_of_value.get(name) for name in origins)

    # --------------------------------------------------------------------------------------------------------- sources
    def _source(self, name: str) -> Source | None:
        """Find the step whose y a value is; None if it is none's.

        Others may come together with it, such as the states of all layers, of which the last one is taken.
        """
        nodes, origins, shapes = self.graph.origins(name, self.key_of_value)
        keys = {origin: self.key_of_value.get(origin, "") for origin in [*origins, *shapes]}
        results = {key: self.results[key] for key in keys.values() if key in self.results}
        if not origins or {*keys.values()} - results.keys():
            return None
        fixed = next((result.sizes for result in results.values()), (-1, -1))
        move = self.graph.mover(name, nodes, [*keys])
        usual_pairs, other_pairs = self._trial_sizes(nodes, fixed)

        def fit(T: int, B: int) -> list[tuple[str, str]] | None:
            return _fit(move, [*keys], results, T, B)

        fits = {pair: forms for pair in usual_pairs if (forms := fit(*pair)) is not None}
        if not fits:  # the nodes take certain sizes alone
            fits = {pair: forms for pair in other_pairs if (forms := fit(*pair))}
            self.trial_sizes += fits
            self.is_proven_for_rows = False
        common = [form for form in next(iter(fits.values()), ()) if all(form in forms for forms in fits.values())]
        if {*origins} <= self.states or any(node.op_type in SELECTING for node in nodes):
            common.sort(key=lambda form: form[1] not in ("last", "ends"))  # one step is the last
        if common and any(0 < size < 3 for size in fixed):
            self.is_proven_for_rows &= common[0] in (fit(5, 3) or ())
        return Source(*common[0], nodes) if common else None

    def _trial_sizes(self, nodes: list[Any], fixed: tuple[int, int]) -> tuple[list[_Pair], list[_Pair]]:
        """Return the T and B to try: the fixed ones, else usual ones, and those that constants of the nodes may mean.

        All of the usual pairs count that the nodes can take. One step or row is not among them unless it is fixed: much
        does nothing with one that does something with more.
        """
        constants: set[int] = set()
        for name in (name for node in nodes for name in node.input if name in self.graph.tensors):
            array = self.graph.array(name)
            if array.dtype.kind == "i" and array.size <= 4:
                constants |= {abs(int(size)) for size in array.flat if 0 < abs(size) <= _LARGEST}
        sizes = sorted(constants)[:8]
        beyond = [max(sizes) + 2] if sizes else []  # where a Slice or a Gather with these bounds does not end
        pairs = [(5, 3), (3, 5), *((size, 3) for size in [*sizes, *beyond]), *((5, size) for size in [*sizes, *beyond])]
        usual_pairs = dict.fromkeys(_with_fixed(pair, fixed) for pair in pairs if 1 not in pair)
        products = dict.fromkeys(_with_fixed(pair, fixed) for pair in product([3, 5, *sizes], [3, 5, *sizes]))
        return [*usual_pairs], [(T, B) for T, B in products if T * B <= _LARGEST]

    def _read_sizes(self, name: str) -> tuple[int, int]:
        """Read T and B of a layer's X as far as the shapes of the model's values fix them, else -1.

        Only these tell whether a Reshape to (7, 1, H) leaves y [7,1,H] as it is, or exchanges the axes of y [1,7,H].
        """
        nodes, origins, shapes = self.graph.origins(name, self.key_of_value)
        pairs = [self._supposed_sizes(name, nodes, [*origins, *shapes], unknown) for unknown in (2, 3)]
        T, B = (first if 0 < first == second else -1 for first, second in zip(*pairs, strict=True))
        return T, B

    def _supposed_sizes(self, name: str, nodes: list[Any], origins: list[str], unknown: int) -> tuple[int, int]:
        """Return the first two sizes of X [.,.,I] if all sizes that are not fixed are `unknown`; -1 if it is none."""
        values: dict[str, Array] = {}
        for origin in origins:
            key = self.key_of_value.get(origin, "")
            if key in self.results:
                T, B = fixed_sizes(self.results[key].sizes, unknown)
                values |= self.results[key].trial(T, B).values if T * B <= _LARGEST else {}
                continue
            sizes = fixed_sizes(self.graph.shape(origin) or [], unknown)
            if sizes and math.prod(sizes) <= LARGEST_REPEATED:
                values[origin] = np.zeros(sizes, np.int64)
        X = self.graph.mover(name, nodes, values)(values) if {*origins} <= values.keys() else None
        return (X.shape[0], X.shape[1]) if X is not None and X.ndim == 3 else (-1, -1)

    # ----------------------------------------------------------------------------------------------------------- layers
    def _add_recurrent(self, node: Any) -> None:
        layer, initial_state = from_node(self.graph, node, self.remarks, self.ignore_clip)
        source, name = self._source(node.input[0]), input_name(node, 4)
        lengths = self.graph.origins(name, ())[1] or [name]  # which a call of a stack has once
        if source is not None and (source.form, self.results[source.key].lengths) == ("y", lengths):
            inputs: tuple[str | None, ...] = (source.key,)
            self.nodes_between += source.nodes
        else:
            inputs = (*self._input_keys(node.input[:1]), None)
        for name in node.input[4:7]:  # remarks say what there is to say about lengths and states
            self.nodes_between += self.graph.origins(name, self.key_of_value)[0]
        sizes = self._read_sizes(node.input[0])
        key = self._add_step(node, node.output, inputs, layer=layer, initial_state=initial_state)
        self.states |= {name for name in node.output[1:] if name}
        trial, width = _recurrent_trial(node, layer), layer.output_size
        self.results[key] = Result(self.graph, node, node.output[0], "Y", trial, sizes, width, lengths)

    def _add_dense(self, node: Any) -> bool:
        """Add a MatMul or a Gemm as a dense layer; return whether it is one."""
        names = [*node.input]
        w = self.graph.constant(names[1]) if node.op_type in ("MatMul", "Gemm") and len(names) > 1 else None
        if w is None:
            return False
        source, attributes = self._source(names[0]), attributes_by_name(node)
        factors = {attributes[name].f for name in ("alpha", "beta") if name in attributes}
        if source is None or w.ndim != 2 or integer_attribute(node, "transA") or factors - {1.0}:
            return False
        if integer_attribute(node, "transB"):
            w = w.T
        bias = self.graph.constant(names[2]) if node.op_type == "Gemm" and names[2:] else None
        if len(names) > 2 and (bias is None or not _is_row(bias, w.shape[1])):
            return False
        layer = self._dense(node, w, np.zeros(w.shape[1], w.dtype) if bias is None else bias)
        key = self._add_behind(source, node, layer.output_size, layer=layer)
        if node.op_type == "MatMul":
            self.products_without_bias.add(key)
        return True

    def _dense(self, node: Any, w: Array, bias: Array) -> Dense:
        arrays = read_arrays(f"{CALLER}: {key_of(node)}", {"w": w, "b": bias.reshape(-1)})
        return Dense(arrays["w"], arrays["b"])

    def _add_bias(self, node: Any) -> bool:
        """Add an Add to the dense layer whose product it reads; return whether it reads one."""
        if node.op_type != "Add" or len(node.input) != 2:
            return False
        first, second = node.input
        return self._add_bias_to(first, second, node) or self._add_bias_to(second, first, node)

    def _add_bias_to(self, product_name: str, bias_name: str, node: Any) -> bool:
        """Add a bias to the dense layer with this product; return whether these are a product and a bias of it."""
        bias = self.graph.constant(bias_name)
        source = None if bias is None else self._source(product_name)
        if bias is None or source is None or source.key not in self.products_without_bias:
            return False
        layer = self.steps[source.key].layer
        is_only_reader = len(self.readers.get(self.results[source.key].name, ())) == 1
        if not (isinstance(layer, Dense) and is_only_reader and _is_row(bias, layer.output_size)):
            return False
        self.steps[source.key] = self.steps[source.key]._replace(layer=self._dense(node, layer.weights["w"], bias))
        self.products_without_bias.remove(source.key)
        self.nodes_between += source.nodes
        self._set_output(source.key, source, node.output[0], layer.output_size)
        return True

    def _add_activation(self, node: Any) -> bool:
        """Add the activation of a dense layer; return whether it is one."""
        source = self._source(node.input[0]) if node.op_type in _ACTIVATIONS and node.input else None
        if source is None or not isinstance(layer := self.steps[source.key].layer, Dense):
            return False
        if node.op_type == "Softmax" and not self._is_over_last_axis(node, source.form):
            return False
        self._add_behind(source, node, layer.output_size, activation=_ACTIVATIONS[node.op_type])
        return True

    def _is_over_last_axis(self, node: Any, form: str) -> bool:
        """Return whether a Softmax of a y in this form is over its last axis."""
        newest = max((opset.version for opset in self.graph.opsets if opset.domain in ("", "ai.onnx")), default=1)
        rank = 3 if form in ("y", "y, batch first") else 2
        return integer_attribute(node, "axis", -1 if newest >= 13 else 1) in (-1, rank - 1)

    def _add_behind(self, source: Source, node: Any, size: int, **fields: Any) -> str:
        """Add a dense layer, or its activation, whose result has the form of its input; return its key."""
        self.nodes_between += source.nodes
        if source.form in ("last", "ends"):
            self.steps[source.key] = self.steps[source.key]._replace(dense_last=source.form)
        key = self._add_step(node, node.output[:1], (source.key,), **fields)
        self._set_output(key, source, node.output[0], size)
        return key

    def _set_output(self, key: str, source: Source, result: str, size: int) -> None:
        """Say which value [.,size] a dense step gives, in the form of its source and for the same T and B."""
        self.key_of_value[result] = key
        trial = _dense_trial(source.form, result, size)
        changes: dict[str, Any] = {"node": None, "name": result, "form": source.form, "trial": trial, "width": size}
        self.results[key] = self.results[source.key]._replace(**changes)


def _with_fixed(pair: _Pair, fixed: _Pair) -> _Pair:
    T, B = (free if size < 0 else size for free, size in zip(pair, fixed, strict=True))
    return T, B


def _fit(
    move: Mover, origins: list[str], results: Mapping[str, Result], T: int, B: int
) -> list[tuple[str, str]] | None:
    """Return whose y, and in which forms, nodes make of results for T steps of B rows; None if they cannot take these.

    The `origins` are the values that the nodes read.
    """
    values, forms, shift = dict[str, Array](), dict[tuple[str, str], Array](), 0
    for key, result in results.items():  # no two steps get the same numbers
        if T * B * result.width > _LARGEST_TRIAL:
            return None
        trial = result.trial(T, B)
        values |= {name: array + shift for name, array in trial.values.items()}
        forms |= {(key, form): array + shift for form, array in trial.forms.items()}
        shift += sum(array.size for array in trial.values.values())
    if not values.keys() >= {*origins}:  # such as the cell state
        return None
    moved = move({origin: values[origin] for origin in origins})
    if moved is None:
        return None
    return [form for form, array in forms.items() if moved.shape == array.shape and np.all(moved == array)]


def _recurrent_trial(node: Any, layer: Layer) -> Callable[[int, int], Trial]:
    """Return what makes numbers for Y and Y_h of a recurrent node."""
    Y, Y_h = [*node.output, "", ""][:2]
    backwards = [False, True] if isinstance(layer, Bidirectional) else [getattr(layer, "reverse", False)]
    shape = len(backwards), layer.hidden_size

    def trial(T: int, B: int) -> Trial:
        y = np.arange(1.0, 1.0 + T * B * shape[0] * shape[1]).reshape(T, B, *shape)
        h = np.stack([y[0 if back else -1][:, d] for d, back in enumerate(backwards)])
        parts = {"last": y[-1].reshape(B, -1), "ends": h.swapaxes(0, 1).reshape(B, -1)}
        return Trial({Y: y.swapaxes(1, 2), Y_h: h}, _forms(y.reshape(T, B, -1)) | parts)

    return trial


def _dense_trial(form: str, result: str, size: int) -> Callable[[int, int], Trial]:
    """Return what makes numbers for the result of a dense layer in this form."""

    def trial(T: int, B: int) -> Trial:
        if form in ("last", "ends"):
            rows = np.arange(1.0, 1.0 + B * size).reshape(B, size)
            return Trial({result: rows}, {form: rows})
        y = np.arange(1.0, 1.0 + T * B * size).reshape(T, B, size)
        return Trial({result: _forms(y)[form]}, _forms(y))

    return trial


def _is_row(bias: Array, size: int) -> bool:
    """Return whether a bias adds the same numbers to each row."""
    return bias.size == size and bias.shape[-1:] == (size,)


def _forms(y: Array) -> dict[str, Array]:
    """Return y [T,B,.] in all forms that have a row for each step, by the forms' names."""
    by_batch, size = y.swapaxes(0, 1), y.shape[2]
    forms = {"y": y, "y, batch first": by_batch}
    return forms | {f"{name}, in rows": array.reshape(-1, size) for name, array in forms.items()}
