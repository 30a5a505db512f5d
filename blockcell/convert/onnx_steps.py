"""The steps of a whole ONNX graph: its layers, and which of them reads the result of which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..layers import Dense
from ..optable import ACTIVATIONS, Array
from .comparison import NotCompared
from .models import Step, assemble
from .onnx_graph import (
    CALLER,
    MOVING,
    SELECTING,
    OnnxGraph,
    attributes_by_name,
    input_name,
    integer_attribute,
    is_recurrent,
    key_of,
)
from .onnx_node import Remarks, from_node
from .onnx_run import OnnxAssembly, OnnxPiece, Result, trial_of
from .shared import read_arrays

_HINT = (
    ". Cells that are written out in single nodes, as by tf2onnx and of PyTorch's cells, and those that onnxruntime has"
    " quantized are not found: convert what the model was made of, by convert.from_keras(model),"
    " convert.from_torch(module) or blockcell.tensorflow.open(path).cells, or the model that quantize_dynamic got."
    " Weights with PyTorch's names are enough: convert.from_torch({tensor.name: onnx.numpy_helper.to_array(tensor) for"
    " tensor in model.graph.initializer})"
)
_ACTIVATIONS = {name.capitalize(): name for name in ACTIVATIONS if name}  # by ONNX's names


class Source(NamedTuple):
    """Where a value comes from that is the y of a step."""

    key: str
    form: str
    """One of the step's `Result.forms`."""
    nodes: list[Any]
    """The nodes between the step and the value."""


def from_graphs(graphs: list[OnnxGraph], remarks: Remarks, ignore_clip: bool) -> OnnxAssembly:
    """Convert the layers of a model's graphs, and `assemble` them."""
    steps: dict[str, Step] = {}
    results: dict[str, Result] = {}
    outputs: list[str | None] = []
    passed_over: list[str] = []
    is_proven_for_rows = True
    for graph in graphs:
        graph_steps = GraphSteps(graph, steps, results, remarks, ignore_clip)
        outputs += graph_steps.add()
        is_proven_for_rows &= graph_steps.is_proven_for_rows
        passed_over += [f"{key_of(node)} ({node.op_type})" for node in graph_steps.nodes_between]
    assembly = assemble(CALLER, steps, outputs, _HINT)
    layers = assembly.layers
    if isinstance(layers, dict):
        parts = [([key], layer, assembly.initial_states[key]) for key, layer in layers.items()]
    else:
        parts = [([*assembly.keys], layers, assembly.initial_states)]
    pieces = []
    for keys, layer, initial_state in parts:
        nodes = [*{id(results[key].node): results[key].node for key in keys}.values()]
        label = "the model" if len(parts) == 1 and not assembly.left_out else f"{nodes[0].op_type} {keys[0]!r}"
        pieces.append(OnnxPiece(label, layer, initial_state, nodes, results[keys[-1]]))
    return OnnxAssembly(assembly, pieces, [*dict.fromkeys(passed_over)], is_proven_for_rows)


class GraphSteps:
    """Adds the steps of a graph.

    Whether one layer reads another's y is tried: random numbers in place of the first one's results go through the
    nodes between the two, and must reach the second one as y, perhaps with its axes in another order.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        steps: dict[str, Step],
        results: dict[str, Result],
        remarks: Remarks,
        ignore_clip: bool,
    ) -> None:
        self.graph = graph
        self.steps = steps
        self.results = results
        """By the keys of recurrent and dense steps, those of other graphs, too."""
        self.key_of_value: dict[str, str] = {}
        """The steps that give values, by the values' names."""
        self.states: set[str] = set()
        """The names of values that are last states."""
        self.nodes = graph.needed()
        nodes = [node for node in self.nodes if is_recurrent(node)]
        self.layers = {id(node): from_node(graph, node, remarks, ignore_clip) for node in nodes}
        """The layers and initial states of recurrent nodes, by their ids."""
        self.trial = trial_of(graph)
        self.is_proven_for_rows = True
        """Whether nodes between layers do nothing for more steps and rows, too, than the one or two of the model."""
        self.nodes_between: list[Any] = []
        """The nodes between layers, and before their states, which no warning mentions."""

    def add(self) -> list[str | None]:
        """Add the steps; return the keys of those that the graph's results come from."""
        graph, results = self.graph, []
        for node in self.nodes:
            if node.op_type in MOVING:
                continue
            if is_recurrent(node):
                self._add_recurrent(node)
            elif not (self._add_dense(node) or self._add_bias(node) or self._add_activation(node)):
                results += self._add_unconverted(node, node.output)
        for node in self.nodes:
            if node.op_type in SELECTING and all(node is not between for between in self.nodes_between):
                origins = {origin for name in node.input for origin in graph.origins(name, self.key_of_value)[1]}
                results += [] if origins <= self.states else self._add_unconverted(node, ())
        return [*results, *self._input_keys(graph.outputs)]

    def _add_unconverted(self, node: Any, results: Iterable[str]) -> list[str]:
        """Add a node that has an effect; return its key. The node that has a body stands for those in the body."""
        if self.graph.is_body or all(map(self.graph.is_fixed, node.output)):
            return []
        return [self._add_step(node, results, self._input_keys(node.input))]

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
        nodes, origins = self.graph.origins(name, self.key_of_value)
        keys = dict.fromkeys(self.key_of_value.get(origin, "") for origin in origins)
        if not keys or keys.keys() - self.results.keys():
            return None
        results = {key: self.results[key] for key in keys}
        fixed = self.trial.sizes(next(iter(results.values())).node.input[0])
        trials = [self._fit(name, results, T, B) for T, B in self._trial_sizes(nodes, fixed)]
        fits = [forms for forms in trials if forms is not None]
        common = [form for form in (fits or [[]])[0] if all(form in forms for forms in fits)]
        if {*origins} <= self.states or any(node.op_type in SELECTING for node in nodes):
            common.sort(key=lambda form: form[1] not in ("last", "ends"))  # one step is the last
        if common and any(0 < size < 3 for size in fixed):
            self.is_proven_for_rows &= common[0] in (self._fit(name, results, 5, 3) or ())
        return Source(*common[0], nodes) if common else None

    def _trial_sizes(self, nodes: list[Any], fixed: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the T and B to try: the fixed ones, else usual ones, and those that bounds of the nodes may mean.

        One step or row is not among them unless it is fixed: much does nothing with one that does something with more.
        """
        sizes = sorted(self.trial.run.bounds(nodes))[:8]
        sizes += [sizes[-1] + 2] if sizes else []  # where a Slice or a Gather with these bounds does not end
        pairs = [(5, 3), (3, 5), *((size, 3) for size in sizes), *((5, size) for size in sizes)]
        return [*dict.fromkeys((T if fixed[0] < 0 else fixed[0], B if fixed[1] < 0 else fixed[1]) for T, B in pairs)]

    def _fit(self, name: str, results: Mapping[str, Result], T: int, B: int) -> list[tuple[str, str]] | None:
        """Return whose y a value is, and in which forms, for T steps of B rows; None if nodes cannot take these."""
        try:
            values = self.trial.values((result.node for result in results.values()), name, T, B)
            values.compute(result.name for result in results.values())
            forms = {(key, form): y for key, result in results.items() for form, y in result.forms(values).items()}
        except (NotCompared, ValueError):  # ValueError where a dense layer gets other steps or rows of these sizes
            return None
        return [form for form, y in forms.items() if np.array_equal(values.known[name], y)]

    # ----------------------------------------------------------------------------------------------------------- layers
    def _add_recurrent(self, node: Any) -> None:
        layer, initial_state = self.layers[id(node)]
        source = self._source(node.input[0])
        if source is not None and source.form == "y" and self._has_lengths_of(node, self.results[source.key].node):
            inputs: tuple[str | None, ...] = (source.key,)
            self.nodes_between += source.nodes
        else:
            inputs = (*self._input_keys(node.input[:1]), None)
        for name in node.input[4:7]:  # remarks say what there is to say about lengths and states
            self.nodes_between += self.graph.origins(name, self.key_of_value)[0]
        key = self._add_step(node, node.output, inputs, layer=layer, initial_state=initial_state)
        self.states |= {name for name in node.output[1:] if name}
        self.results[key] = Result(self.graph, node, node.output[0], "Y")

    def _has_lengths_of(self, node: Any, other: Any) -> bool:
        """Return whether two recurrent nodes have lengths of the same values: a call of a stack has them once."""
        names = input_name(node, 4), input_name(other, 4)
        first, second = (self.graph.origins(name, ())[1] or [name] for name in names)
        return first == second

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
        self._add_behind(source, node, layer=layer)
        return True

    def _dense(self, node: Any, w: Array, bias: Array) -> Dense:
        arrays = read_arrays(f"{CALLER}: {key_of(node)}", {"w": w, "b": bias.reshape(-1)})
        return Dense(arrays["w"], arrays["b"])

    def _add_bias(self, node: Any) -> bool:
        """Add the bias of an Add to the dense layer whose product it reads; return whether it reads one."""
        names = [*node.input] if node.op_type == "Add" and len(node.input) == 2 else []
        for product_name, bias_name in zip(names, names[::-1], strict=True):
            bias = self.graph.constant(bias_name)
            source = None if bias is None else self._source(product_name)
            if bias is None or source is None:
                continue
            layer, result = self.steps[source.key].layer, self.results[source.key].name
            is_only_reader = sum([*reader.input].count(result) for reader in self.graph.nodes) == 1
            has_no_bias = isinstance(layer, Dense) and not layer.weights["b"].any()
            if layer is not None and has_no_bias and is_only_reader and _is_row(bias, layer.output_size):
                dense = self._dense(node, layer.weights["w"], bias)
                self.steps[source.key] = self.steps[source.key]._replace(layer=dense)
                self.nodes_between += source.nodes
                self._set_output(source.key, source, node.output[0])
                return True
        return False

    def _add_activation(self, node: Any) -> bool:
        """Add the activation of a dense layer; return whether it is one."""
        source = self._source(node.input[0]) if node.op_type in _ACTIVATIONS and node.input else None
        if source is None or not isinstance(self.steps[source.key].layer, Dense):
            return False
        if node.op_type == "Softmax" and not self._is_over_last_axis(node, source.form):
            return False
        self._add_behind(source, node, activation=_ACTIVATIONS[node.op_type])
        return True

    def _is_over_last_axis(self, node: Any, form: str) -> bool:
        """Return whether a Softmax of a y in this form is over its last axis."""
        newest = max((opset.version for opset in self.graph.opsets if opset.domain in ("", "ai.onnx")), default=1)
        rank = 3 if form in ("y", "y, batch first") else 2
        return integer_attribute(node, "axis", -1 if newest >= 13 else 1) in (-1, rank - 1)

    def _add_behind(self, source: Source, node: Any, **fields: Any) -> None:
        """Add a dense layer, or its activation, whose result has the form of its input."""
        self.nodes_between += source.nodes
        if source.form in ("last", "ends"):
            self.steps[source.key] = self.steps[source.key]._replace(dense_last=source.form)
        key = self._add_step(node, node.output[:1], (source.key,), **fields)
        self._set_output(key, source, node.output[0])

    def _set_output(self, key: str, source: Source, result: str) -> None:
        """Say which value a dense step gives, in the form of its source and for the same T and B."""
        self.key_of_value[result] = key
        self.results[key] = self.results[source.key]._replace(name=result, form=source.form)


def _is_row(bias: Array, size: int) -> bool:
    """Return whether a bias adds the same numbers to each row."""
    return bias.size == size and bias.shape[-1:] == (size,)
