"""Graphs of ONNX models: which values are constant, and which nodes only move numbers."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import files
from ..errors import FormatError
from ..optable import Array

RESHAPING = ("Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
SELECTING = ("Concat", "Gather", "Slice", "Split")  # these may leave something out
MOVING = (*RESHAPING, *SELECTING)
COUNTING = ("Add", "Div", "Mul", "ReduceProd", "Shape", "Sub")  # with these, shapes are computed
DECIDING = ("And", "Equal", "Greater", "Less", "Not", "Or", "Size")  # with these and COUNTING, conditions are computed
FOLDED = {*MOVING, *COUNTING, *DECIDING, "Constant", "DequantizeLinear"} - {"Dropout"}
FOLDED |= {"Abs", "CastLike", "ConstantOfShape", "Expand", "Max", "Min", "Neg", "Sigmoid", "Tanh", "Tile", "Where"}
"""Ops that make constants of constants, such as weights and initial states."""
LARGEST_CONSTANT = 2**28  # elements
LARGEST_REPEATED = 2**22  # elements of a constant that is made of smaller ones
CALLER = "from_onnx"
"""The name of the function that the user called, for messages."""


def is_standard(node: Any) -> bool:
    return bool(node.domain in ("", "ai.onnx"))


def is_recurrent(node: Any) -> bool:
    return node.op_type in ("LSTM", "GRU", "RNN") and is_standard(node)


def input_name(node: Any, position: int) -> str:
    """Return the name of an input, "" if the node does not have it."""
    return str(node.input[position]) if len(node.input) > position else ""


def attributes_by_name(node: Any) -> dict[str, Any]:
    return {attribute.name: attribute for attribute in node.attribute}


def key_of(node: Any) -> str:
    """Return the name of a node, or of its first result: nodes need no names."""
    return node.name or next(filter(None, node.output), "")


def integer_attribute(node: Any, name: str, default: int = 0) -> int:
    """Return an attribute that is an integer, the default if the node does not have it."""
    return int(next((attribute.i for attribute in node.attribute if attribute.name == name), default))


def has_more(node: Any) -> bool:
    """Return whether a node has graphs, or values that are not in it: such a node is not computed."""
    return any(
        part.HasField("g") or part.HasField("sparse_tensor") or part.graphs or part.tensors or part.ref_attr_name
        or part.t.data_location == part.t.EXTERNAL for part in node.attribute
    )  # fmt: skip


def schema_of(kind: str) -> Any:
    """Return what ONNX says of a kind of nodes, with `inputs` and `attributes`."""
    from onnx import defs

    return defs.get_schema(kind)


def reached_names(names: Iterable[str], sources_of: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield the names, their sources, the sources of these, and so on, each once."""
    waiting, seen = [*names], {""}
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            yield name
            waiting += sources_of(name)


def read_model(path: files.StrPath) -> Any:
    """Read the ONNX model in a file, with the arrays that it has in other files of its folder."""
    files.check_regular(path, "an ONNX model")
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f"{CALLER} reads files with onnx, which is not installed: pip install onnx") from error
    try:
        return onnx.load(path, format="protobuf")
    except (MemoryError, OSError):
        raise
    except Exception as error:  # protobuf and onnx have several of their own
        raise FormatError(f"{os.fsdecode(path)} cannot be read as an ONNX model: {error}") from error


class OnnxGraph:
    """A graph, or the body of a Loop, a Scan or an If, which also sees the values of the graph around it."""

    def __init__(self, graph: Any, opsets: Any, around: OnnxGraph | None = None) -> None:
        self.nodes: list[Any] = []
        """In place of an If whose condition is constant, the nodes of its branch."""
        self.is_body = around is not None
        self.opsets = opsets
        self.inputs: set[str] = {value.name for value in graph.input} | (around.inputs if around else set())
        self.types: dict[str, Any] = dict(around.types) if around else {}
        """What the graph states of values, inputs among them: elem_type and perhaps shape."""
        self.types |= {value.name: value.type.tensor_type for value in [*graph.value_info, *graph.input]}
        self.outputs = [value.name for value in graph.output]
        self.tensors: dict[str, Any] = dict(around.tensors) if around else {}
        self.tensors |= {tensor.name: tensor for tensor in graph.initializer}
        self.makers: dict[str, Any] = dict(around.makers) if around else {}
        """The nodes that compute values, in order, by the values' names."""
        self.positions: dict[str, int] = dict(around.positions) if around else {}
        self.folded: dict[str, Array | None] = {}
        """The values of nodes of constants, None if they are no constants."""
        self.trial: Any = None
        """The `Trial` of ``onnx_run.py``, once there is one."""
        self._add_nodes(graph.node, {name for node in graph.node for name in node.output})

    def _add_nodes(self, nodes: Iterable[Any], used: set[str]) -> None:
        """Add nodes; `used` are the names that these and others around them have."""
        from onnx import helper

        for node in nodes:
            branch = self._branch(node)
            inner = {name for inner_node in branch.node for name in inner_node.output} if branch else set()
            inner |= {tensor.name for tensor in branch.initializer} if branch else set()
            if branch is not None and inner.isdisjoint(used | self.inputs | self.tensors.keys() | self.makers.keys()):
                used |= inner
                self.tensors |= {tensor.name: tensor for tensor in branch.initializer}
                self._add_nodes(branch.node, used)
                pairs = zip(branch.output, node.output, strict=False)
                self._add_nodes([helper.make_node("Identity", [a.name], [b]) for a, b in pairs if b], used)
                continue
            self.nodes.append(node)
            values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            if node.op_type == "Constant" and values and node.output:
                self.tensors[node.output[0]] = values[0]
            for name in node.output:
                self.makers[name] = node
                self.positions.setdefault(name, len(self.positions))

    def _branch(self, node: Any) -> Any:
        """Return the branch that an If with a constant condition takes; None for other nodes."""
        if node.op_type != "If" or not is_standard(node) or not node.input:
            return None
        condition = self.constant(node.input[0])
        if condition is None or condition.size != 1:
            return None
        branch = attributes_by_name(node).get("then_branch" if condition.item() else "else_branch")
        return branch.g if branch is not None and branch.HasField("g") else None

    def bodies(self) -> Iterator[OnnxGraph]:
        """Yield the graphs in its nodes, and those in theirs."""
        for node in self.nodes:
            for attribute in node.attribute:
                for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                    body = OnnxGraph(graph, self.opsets, self)
                    yield body
                    yield from body.bodies()

    def needed(self) -> list[Any]:
        """Return the nodes that the results or recurrent nodes need, in order."""
        results = [*self.outputs, *(name for node in self.nodes if is_recurrent(node) for name in node.output)]
        names = reached_names(results, lambda name: self._read_by(self.makers[name]) if name in self.makers else [])
        needed_names = {*names}
        return [node for node in self.nodes if not needed_names.isdisjoint(node.output)]

    def _read_by(self, node: Any) -> list[str]:
        graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
        return [
            *node.input,
            *(name for graph in graphs for inner_node in graph.node for name in self._read_by(inner_node)),
        ]

    def shape(self, name: str) -> list[int | str] | None:
        """Return the shape that the graph states for a value, with a name for each size that it does not fix."""
        described = self.types.get(name)
        if described is None or not described.HasField("shape"):
            return None
        return [
            size.dim_value if size.HasField("dim_value") else size.dim_param or f"{name}.{axis}"
            for axis, size in enumerate(described.shape.dim)
        ]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return the values in the order in which the graph computes them, those that it does not compute first."""
        return sorted(names, key=lambda name: self.positions.get(name, -1))

    def constant(self, name: str) -> Array | None:
        """Return a value that follows from constants alone; None for others, and behind hundreds of nodes."""
        try:
            return self._constant(name)
        except RecursionError:
            return None

    def _constant(self, name: str) -> Array | None:
        if name in self.tensors:
            return self.array(name)
        if name not in self.folded:
            self.folded[name] = None  # also while it is computed: a node may read its own result
            node = self.makers.get(name)
            if node is not None and node.op_type in FOLDED and is_standard(node):
                self.folded |= self._fold(node)
        return self.folded[name]

    def _fold(self, node: Any) -> dict[str, Array]:
        """Compute what a node makes of constants, by name; nothing if it gets others, or cannot take them."""
        if (sizes := self._known_sizes(node)) is not None:
            return {node.output[0]: sizes}
        values = {name: self._constant(name) for name in filter(None, node.input)}
        arrays = {name: value for name, value in values.items() if value is not None}
        if len(arrays) < len(values) or not _is_moderate(node, [arrays[name] for name in filter(None, node.input)]):
            return {}
        return evaluate(node, arrays, self.opsets)

    def _known_sizes(self, node: Any) -> Array | None:
        """Return the sizes of an input of the graph that a Gather takes of its Shape; None if they are not fixed."""
        shape = self.makers.get(node.input[0]) if node.op_type == "Gather" and len(node.input) == 2 else None
        if shape is None or shape.op_type != "Shape" or len(shape.input) != 1 or shape.attribute or node.attribute[1:]:
            return None
        stated = self.shape(shape.input[0]) if shape.input[0] in self.inputs else None
        sizes = np.array([size if isinstance(size, int) else -1 for size in stated or []], np.int64)
        indices = self._constant(node.input[1])
        if indices is None or indices.dtype.kind != "i" or np.any((indices < -len(sizes)) | (indices >= len(sizes))):
            return None
        return None if np.any(sizes[indices] < 0) else sizes[indices]

    def array(self, name: str) -> Array:
        """Return the value of an initializer or a Constant."""
        from onnx import numpy_helper

        tensor = self.tensors[name]
        if tensor.data_location == tensor.EXTERNAL:
            raise ValueError(
                f"{CALLER}: {name!r} is in another file; onnx.load(path) of the whole model brings it along"
            )
        try:
            return numpy_helper.to_array(tensor)
        except MemoryError:
            raise
        except Exception as error:  # onnx raises many kinds if dims, type and data do not agree
            raise ValueError(f"{CALLER}: the tensor {name!r} cannot be read: {error}") from error

    def is_argument(self, name: str) -> bool:
        """Return whether a value is an input of the model, perhaps in another shape."""

        def sources_of(value: str) -> Iterable[str]:
            node = self.makers.get(value)
            return node.input[:1] if node is not None and node.op_type in RESHAPING else ()

        *_, origin = reached_names([name], sources_of)
        return origin in self.inputs and origin not in self.tensors

    def is_fixed(self, name: str) -> bool:
        """Return whether a value depends on nothing but constants and the shapes of others."""

        def sources_of(name: str) -> Iterable[str]:
            node = self.makers.get(name)
            return () if name in self.tensors or node is None or node.op_type == "Shape" else node.input

        for value in reached_names([name], sources_of):
            node = self.makers.get(value)
            if value not in self.tensors and (node is None or any(part.HasField("g") for part in node.attribute)):
                return False
        return True

    def origins(self, name: str, stops: Collection[str]) -> tuple[list[Any], list[str]]:
        """Find what a value comes from by nodes that only move numbers.

        Return these nodes, in order, and the `stops`, inputs and results of other nodes that the value comes from.
        Constants, and values of which only the shape counts, are not mentioned.
        """

        def kind(value: str) -> str:
            is_end = value in stops or value in self.tensors or value not in self.makers
            return "" if is_end else str(self.makers[value].op_type)

        values = [*reached_names([name], lambda value: self.makers[value].input if kind(value) in MOVING else ())]
        makers = [self.makers[value] for value in self.in_order(values) if kind(value) in MOVING]
        others = [value for value in values if value not in self.tensors and kind(value) not in MOVING]
        origins = [value for value in others if not (kind(value) in COUNTING and self.is_fixed(value))]
        return [*{id(node): node for node in makers}.values()], origins


def evaluate(node: Any, arrays: Mapping[str, Any], opsets: Any) -> dict[str, Array]:
    """Compute the results of a node by name, with onnx.reference; none if it cannot take the arrays."""
    from onnx import TensorProto, helper, reference

    names, count = [*filter(None, node.output)], len(node.output)
    if has_more(node) or (node.op_type == "Split" and integer_attribute(node, "num_outputs", count) != count):
        return {}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in group] for group in (arrays, names)
    )
    try:
        model = helper.make_model(helper.make_graph([node], "some", inputs, outputs), opset_imports=opsets)
        results: Any = reference.ReferenceEvaluator(model).run(None, dict(arrays))
        return dict(zip(names, map(np.asarray, results), strict=True))
    except MemoryError:
        raise
    except Exception:  # numpy's and onnx's, of many kinds
        return {}


def graph_digest(model: Any) -> str:
    """Return a digest of what a model computes, but for the numbers in its weights: `export` keeps it in the model."""
    graph = model.graph
    parts = [*model.opset_import, *model.functions, *graph.input, *graph.node, *graph.output]
    texts = [part.SerializeToString(deterministic=True).hex() for part in parts]
    texts += sorted(tensor.name for tensor in graph.initializer)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _is_moderate(node: Any, inputs: list[Array]) -> bool:
    """Return whether a node makes of constants no more than could have been a constant, too."""
    if node.op_type in ("Concat", "Gather"):
        return result_size(node, inputs) <= LARGEST_CONSTANT
    return result_size(node, inputs) <= max([LARGEST_REPEATED, *(array.size for array in inputs)])


def result_size(node: Any, inputs: list[Array]) -> float:
    """Return the most elements that one of the node's results may have; infinity if the node cannot take the inputs."""
    try:
        return _result_size(node, inputs)
    except ValueError:  # shapes that cannot be broadcast
        return math.inf


def _result_size(node: Any, inputs: list[Array]) -> float:
    data = inputs[0] if inputs else np.empty(0)
    if node.op_type == "Concat":
        return sum(array.size for array in inputs)
    if node.op_type == "Gather" and len(inputs) == 2:
        axis = integer_attribute(node, "axis")
        rows = data.shape[axis] if -data.ndim <= axis < data.ndim else 0
        return data.size // rows * inputs[1].size if rows > 0 else math.inf
    if node.op_type in ("ConstantOfShape", "Expand", "Tile") and len(inputs) <= 2:
        sizes = inputs[-1] if inputs else data
        counts = [abs(int(count)) for count in sizes.flat] if sizes.dtype.kind == "i" and sizes.size <= 64 else [0]
        return math.prod(count for count in [data.size if len(inputs) > 1 else 1, *counts] if count)
    if node.op_type in (*MOVING, "DequantizeLinear", "ReduceProd"):
        return max([1, *(array.size for array in inputs)])
    if node.op_type == "Gemm" and len(inputs) > 1:
        rows = data.shape[-1:] if integer_attribute(node, "transA") else data.shape[:1]
        columns = inputs[1].shape[:1] if integer_attribute(node, "transB") else inputs[1].shape[-1:]
        return float(math.prod((*rows, *columns)))
    if node.op_type == "MatMul" and len(inputs) == 2:
        shapes = [array.shape[:-2] for array in inputs]
        return math.prod(np.broadcast_shapes(*shapes)) * math.prod(data.shape[-2:-1]) * math.prod(inputs[1].shape[-1:])
    return math.prod(np.broadcast_shapes(*(array.shape for array in inputs)))
