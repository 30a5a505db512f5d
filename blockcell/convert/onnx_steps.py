"""The layers of a whole ONNX graph, and which of them is behind which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np

from ..layers import Bidirectional, Dense, Layer
from ..optable import ACTIVATIONS, Array
from .models import Step, assemble
from .onnx_graph import LARGEST_REPEATED, RESHAPING, SELECTING, Graph, is_recurrent
from .onnx_node import Remark, from_graph_node, key_of
from .shared import read_arrays

_LARGEST = 4096  # of T and B and their product, in a trial of what lies between two layers
_ACTIVATIONS = {name.capitalize(): name for name in ACTIVATIONS if name}  # by ONNX's names
Probe = Callable[[int, int], tuple[dict[str, Array], dict[str, Array]]]


def from_graphs(
    caller: str, graphs: list[Graph], remarks: list[Remark], ignore_clip: bool
) -> tuple[Layer | dict[str, Layer], Any]:
    """The layers of a model's graphs, put together where nothing else is between them, and what they start from."""
    steps: dict[str, Step] = {}
    outputs = [key for graph in graphs for key in GraphSteps(caller, graph, steps, remarks, ignore_clip).add()]
    return assemble(caller, steps, outputs, stacklevel=4, hint=_hint(graphs[0]))


def _hint(graph: Graph) -> str:
    """What to do if the cells of a model are written out: if its weights have PyTorch's names, or it has loops."""
    ends = ("weight_ih", "weight_ih_l0")
    prefixes = [name.removesuffix(end) for end in ends for name in graph.tensors if name.endswith(f".{end}")]
    if not prefixes and any(node.op_type == "Loop" for node in graph.nodes):
        return (
            "; a Loop may be a cell that is written out in single nodes, as tf2onnx writes most GRUs and SimpleRNNs of"
            " Keras: convert the Keras model itself, convert.from_keras(model)"
        )
    if not prefixes:
        return ""
    return (
        f"; the weights of cells that are written out have PyTorch's names: tensors = {{tensor.name:"
        f" onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}};"
        f" {' and '.join(f'convert.from_torch(tensors, prefix={prefix!r})' for prefix in prefixes[:3])}"
    )


class GraphSteps:
    """Adds the steps of a graph.

    Whether one layer is behind another is tried: numbers in place of the first one's results go through the nodes
    between the two, and must reach the second one as y, perhaps with its axes in another order.
    """

    def __init__(
        self, caller: str, graph: Graph, steps: dict[str, Step], remarks: list[Remark], ignore_clip: bool
    ) -> None:
        self.caller = caller
        self.graph = graph
        self.steps = steps
        self.remarks = remarks
        self.ignore_clip = ignore_clip
        self.sources: dict[str, str] = {}
        """The values that steps give, and whose they are."""
        self.states: set[str] = set()
        """Those of them that are states."""
        self.probes: dict[str, Probe] = {}
        """For T and B: numbers for the values that a layer gives, and what y, and parts of it, are then."""
        self.fixed_sizes: dict[str, tuple[int, int]] = {}
        """T and B of what a layer reads, -1 where the model does not fix them."""
        self.without_bias: dict[str, str] = {}
        """The dense layers whose bias has not been seen, and their products."""
        self.readers: dict[str, list[Any]] = {}
        for node in graph.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.taken: list[Any] = []
        """The nodes between layers, which need no mention."""

    def add(self) -> list[str | None]:
        """Add the steps; what the results come from."""
        graph, others = self.graph, []
        nodes = graph.needed()
        for node in nodes:
            if node.op_type in (*RESHAPING, *SELECTING):
                continue
            if is_recurrent(node):
                self._add_recurrent(node)
            elif not (self._add_dense(node) or self._add_bias(node) or self._add_activation(node)):
                others += self._add_other(node, node.output)
        for node in nodes:
            if node.op_type in SELECTING and all(node is not each for each in self.taken):
                origins = {each for name in node.input for each in graph.origins(name, self.sources)[1]}
                others += [] if origins <= self.states else self._add_other(node, ())
        return [*others, *self._inputs(graph.outputs)]

    def _add_other(self, node: Any, results: Iterable[str]) -> list[str]:
        """Add what has an effect. In a body it is that of the node which has the body."""
        if self.graph.is_body or all(map(self.graph.is_fixed, node.output)):
            return []
        return [self._put(node, results, self._inputs(node.input))]

    def _put(self, node: Any, results: Iterable[str], inputs: tuple[str | None, ...], **rest: Any) -> str:
        key = key_of(node)
        while key in self.steps:  # nodes need no names, or have the same in two graphs
            key += "'"
        self.steps[key] = Step(f"{key} ({node.op_type})", inputs, **rest)
        self.sources |= dict.fromkeys(filter(None, results), key)
        return key

    def _inputs(self, names: Iterable[str]) -> tuple[str | None, ...]:
        """The steps that values come from; None for states and inputs."""
        origins = dict.fromkeys(each for name in names for each in self.graph.origins(name, self.sources)[1])
        return tuple(None if name in self.states else self.sources.get(name) for name in origins)

    def _source(self, name: str) -> tuple[str, str, list[Any]] | None:
        """The layer whose y a value is, in which form, and the nodes on the way.

        Others may come together with it, such as the states of all layers, of which the last one is taken.
        """
        nodes, origins, shapes = self.graph.origins(name, self.sources)
        keys = {each: self.sources.get(each, "") for each in [*origins, *shapes]}
        probes = {key: self.probes[key] for key in keys.values() if key in self.probes}
        if not origins or {*keys.values()} - probes.keys():
            return None
        sizes = {3, 5}  # and what an export with fixed sizes has
        for each in (each for node in nodes for each in node.input if each in self.graph.tensors):
            array = self.graph.array(each)
            if array.dtype.kind == "i" and array.size <= 4:
                sizes |= {int(size) for size in array.flat if 0 < size <= _LARGEST}
        fixed = next((self.fixed_sizes[key] for key in probes), (-1, -1))
        choices = [sorted(sizes)[:8] if size < 0 else [size] for size in fixed]
        tried = [(T, B) for T, B in product(*choices) if T * B <= _LARGEST]
        sure = [pair for pair in tried if all(size != 1 or known == 1 for size, known in zip(pair, fixed, strict=True))]
        for T, B in [(5, 3), *sure]:
            if (match := self._match(name, nodes, keys, probes, T, B)) is not None:
                return *match, nodes
        # With one step, axes may be exchanged that are not with one row. If both sizes are possible, they must agree.
        rest = [self._match(name, nodes, keys, probes, T, B) for T, B in tried if (T, B) not in sure]
        matches = {match for match in rest if match is not None}
        return (*matches.pop(), nodes) if len(matches) == 1 else None

    def _match(
        self, name: str, nodes: list[Any], keys: Mapping[str, str], probes: Mapping[str, Probe], T: int, B: int
    ) -> tuple[str, str] | None:
        """The layer whose y these nodes make a value of, and in which form, for T steps of B rows."""
        values, forms, shift = dict[str, Array](), dict[tuple[str, str], Array](), 0
        for key, probe in probes.items():  # no two layers get the same numbers
            given, expected = probe(T, B)
            values |= {each: array + shift for each, array in given.items()}
            forms |= {(key, form): array + shift for form, array in expected.items()}
            shift += sum(array.size for array in given.values())
        if keys.keys() - values.keys():  # such as the cell state
            return None
        found = self.graph.moved(name, nodes, {each: values[each] for each in keys})
        for form, wanted in forms.items():
            if found is not None and found.shape == wanted.shape and np.all(found == wanted):
                return form
        return None

    def _read_sizes(self, name: str, batch_first: bool) -> tuple[int, int]:
        """T and B of a layer's X as far as the shapes of the model's values fix them, else -1.

        Only these tell whether a Reshape to (7, 1, H) leaves y [7,1,H] as it is, or exchanges the axes of y [1,7,H].
        """
        nodes, origins, shapes = self.graph.origins(name, self.sources)
        found = []
        for unknown in (2, 3):
            values: dict[str, Array] = {}
            for each in [*origins, *shapes]:
                key, sizes = self.sources.get(each, ""), self.graph.declared.get(each, [])
                if key in self.probes:
                    T, B = (unknown if size < 0 else size for size in self.fixed_sizes[key])
                    values |= self.probes[key](T, B)[0] if T * B <= _LARGEST else {}
                    continue
                sizes = [unknown if size < 0 else size for size in sizes]
                if sizes and math.prod(sizes) <= LARGEST_REPEATED:
                    values[each] = np.zeros(sizes, np.int64)
            X = self.graph.moved(name, nodes, values) if {*origins, *shapes} <= values.keys() else None
            found.append(X.shape[:2] if X is not None and X.ndim == 3 else (-1, -1))
        T, B = (first if 0 < first == second else -1 for first, second in zip(*found, strict=True))
        return (B, T) if batch_first else (T, B)

    def _add_recurrent(self, node: Any) -> None:
        layer, first = from_graph_node(self.caller, self.graph, node, self.remarks, self.ignore_clip)
        attributes = {attribute.name: attribute for attribute in node.attribute}
        batch_first = "layout" in attributes and attributes["layout"].i == 1
        source = self._source(node.input[0])
        if source is not None and source[1] == ("y, batch first" if batch_first else "y"):
            inputs: tuple[str | None, ...] = (source[0],)
            self.taken += source[2]
        else:
            inputs = (*self._inputs(node.input[:1]), None)
        for name in node.input[4:7]:  # what is to be said about these is said in remarks
            self.taken += self.graph.origins(name, self.sources)[0]
        outputs = [*node.output, "", ""]
        Y, Y_h = outputs[:2]
        fixed_sizes = self._read_sizes(node.input[0], batch_first)
        key = self._put(node, node.output, inputs, layer=layer, first=first)
        self.fixed_sizes[key] = fixed_sizes
        self.states |= {name for name in node.output[1:] if name}
        backwards = [False, True] if isinstance(layer, Bidirectional) else [getattr(layer, "reverse", False)]
        shape = len(backwards), layer.hidden_size

        def probe(T: int, B: int) -> tuple[dict[str, Array], dict[str, Array]]:
            y = np.arange(1.0, 1.0 + T * B * shape[0] * shape[1]).reshape(T, B, *shape)
            h = np.stack([y[0 if back else -1][:, d] for d, back in enumerate(backwards)])
            values = {Y: y.transpose(1, 0, 2, 3) if batch_first else y.swapaxes(1, 2)}
            values[Y_h] = h.swapaxes(0, 1) if batch_first else h
            ends = h.swapaxes(0, 1).reshape(B, -1)
            return values, _forms(y.reshape(T, B, -1)) | {"last": y[-1].reshape(B, -1), "ends": ends}

        self.probes[key] = probe

    def _add_dense(self, node: Any) -> bool:
        """Add a MatMul or a Gemm as a dense layer."""
        names = [*node.input]
        w = self.graph.constant(names[1]) if node.op_type in ("MatMul", "Gemm") and len(names) > 1 else None
        if w is None:
            return False
        source = self._source(names[0])
        attributes = {attribute.name: attribute for attribute in node.attribute}
        factors = {attributes[name].f for name in ("alpha", "beta") if name in attributes}
        if source is None or w.ndim != 2 or ("transA" in attributes and attributes["transA"].i) or factors - {1.0}:
            return False
        if "transB" in attributes and attributes["transB"].i:
            w = w.T
        bias = self.graph.constant(names[2]) if node.op_type == "Gemm" and names[2:] else None
        if len(names) > 2 and (bias is None or not _is_row(bias, w.shape[1])):
            return False
        zeros = np.zeros(w.shape[1], w.dtype)
        arrays = read_arrays(
            f"{self.caller}: {key_of(node)}", {"w": w, "b": zeros if bias is None else bias.reshape(-1)}
        )
        layer = Dense(arrays["w"], arrays["b"])
        key = self._put_behind(source, node, node.output[0], layer.output_size, layer=layer)
        if node.op_type == "MatMul":
            self.without_bias[key] = node.output[0]
        return True

    def _add_bias(self, node: Any) -> bool:
        """Add an Add to the dense layer whose product it follows."""
        for name, other in (node.input, node.input[::-1]) if node.op_type == "Add" and len(node.input) == 2 else ():
            bias = self.graph.constant(other)
            source = None if bias is None else self._source(name)
            if bias is None or source is None or source[0] not in self.without_bias:
                continue
            key, form, nodes = source
            layer = self.steps[key].layer
            alone = len(self.readers.get(self.without_bias[key], ())) == 1
            if isinstance(layer, Dense) and alone and _is_row(bias, layer.output_size):
                arrays = read_arrays(f"{self.caller}: {key_of(node)}", {"w": layer.weights["w"], "b": bias.reshape(-1)})
                self.steps[key] = self.steps[key]._replace(layer=Dense(arrays["w"], arrays["b"]))
                del self.without_bias[key]
                self.taken += nodes
                self._put_result(key, form, node.output[0], layer.output_size)
                return True
        return False

    def _add_activation(self, node: Any) -> bool:
        source = self._source(node.input[0]) if node.op_type in _ACTIVATIONS and node.input else None
        if source is None or not isinstance(layer := self.steps[source[0]].layer, Dense):
            return False
        if node.op_type == "Softmax":
            newest = max((opset.version for opset in self.graph.opsets if opset.domain in ("", "ai.onnx")), default=1)
            axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
            rank = 3 if source[1] in ("y", "y, batch first") else 2
            if (axes or [-1 if newest >= 13 else 1])[0] not in (-1, rank - 1):
                return False
        self._put_behind(source, node, node.output[0], layer.output_size, activation=_ACTIVATIONS[node.op_type])
        return True

    def _put_behind(self, source: tuple[str, str, list[Any]], node: Any, output: str, size: int, **rest: Any) -> str:
        """Add a dense layer, or its activation, which has results of the same form as its input."""
        before, form, nodes = source
        self.taken += nodes
        if form in ("last", "ends"):
            self.steps[before] = self.steps[before]._replace(last="ends" if form == "ends" else True)
        key = self._put(node, [output], (before,), **rest)
        self.fixed_sizes[key] = self.fixed_sizes[before]
        self._put_result(key, form, output, size)
        return key

    def _put_result(self, key: str, form: str, output: str, size: int) -> None:
        """Say which value a dense layer gives, and in which form."""
        self.sources[output] = key

        def probe(T: int, B: int) -> tuple[dict[str, Array], dict[str, Array]]:
            if form in ("last", "ends"):
                rows = np.arange(1.0, 1.0 + B * size).reshape(B, size)
                return {output: rows}, {form: rows}
            y = np.arange(1.0, 1.0 + T * B * size).reshape(T, B, size)
            return {output: _forms(y)[form]}, _forms(y)

        self.probes[key] = probe


def _is_row(bias: Array, size: int) -> bool:
    """Whether it adds the same numbers to each row."""
    return bias.size == size and bias.shape[-1:] == (size,)


def _forms(y: Array) -> dict[str, Array]:
    """y [T,B,.], with its axes in other orders, too."""
    by_batch, size = y.swapaxes(0, 1), y.shape[2]
    forms = {"y": y, "y, batch first": by_batch}
    return forms | {f"{name}, in rows": each.reshape(-1, size) for name, each in forms.items()}
