"""The graphs of ONNX models: which values are constant or zero, and what lies between two layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ..optable import Array

RESHAPING = ("Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
SELECTING = ("Concat", "Gather", "Slice", "Split")  # these may leave something out
COUNTING = ("Add", "Div", "Mul", "ReduceProd", "Shape", "Sub")  # with these, shapes are computed
ZEROS = (*RESHAPING, "Concat", "Expand", "Slice", "Tile")  # of zeros, these make zeros


def is_recurrent(node: Any) -> bool:
    return node.op_type in ("LSTM", "GRU") and node.domain in ("", "ai.onnx")


class Graph:
    """A graph, or the body of a Loop, a Scan or an If, which also sees the values of the graph around it."""

    def __init__(self, caller: str, graph: Any, opsets: Any, around: Graph | None = None) -> None:
        self.caller = caller
        self.nodes = [*graph.node]
        self.is_body = around is not None
        self.opsets = opsets
        self.inputs: set[str] = {value.name for value in graph.input} | (around.inputs if around else set())
        self.outputs = [value.name for value in graph.output]
        self.tensors: dict[str, Any] = dict(around.tensors) if around else {}
        self.tensors |= {tensor.name: tensor for tensor in graph.initializer}
        self.makers: dict[str, Any] = dict(around.makers) if around else {}
        for node in self.nodes:
            values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            if node.op_type == "Constant" and values and node.output:
                self.tensors[node.output[0]] = values[0]
            self.makers |= dict.fromkeys(node.output, node)

    def bodies(self) -> Iterator[Graph]:
        """The graphs in its nodes, and those in theirs."""
        for node in self.nodes:
            for attribute in node.attribute:
                for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                    body = Graph(self.caller, graph, self.opsets, self)
                    yield body
                    yield from body.bodies()

    def needed(self) -> list[Any]:
        """The nodes that the results or an LSTM or a GRU need, in order."""
        waiting = [*self.outputs, *(name for node in self.nodes if is_recurrent(node) for name in node.output)]
        seen = {""}
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += self._read_by(self.makers[name]) if name in self.makers else []
        return [node for node in self.nodes if seen.intersection(node.output) - {""}]

    def _read_by(self, node: Any) -> list[str]:
        graphs = [graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs)]
        return [*node.input, *(name for graph in graphs for each in graph.node for name in self._read_by(each))]

    def array(self, name: str) -> Array:
        """The value of a constant."""
        return self._read(name, self.tensors[name])

    def _read(self, name: str, tensor: Any) -> Array:
        from onnx import numpy_helper

        if tensor.data_location == tensor.EXTERNAL:
            raise ValueError(
                f"{self.caller}: {name!r} is in another file; onnx.load(path) of the whole model brings it along"
            )
        try:
            return numpy_helper.to_array(tensor)
        except MemoryError:
            raise
        except Exception as error:  # onnx raises many kinds if dims, type and data do not agree
            raise ValueError(f"{self.caller}: the tensor {name!r} cannot be read: {error}") from error

    def is_zero(self, name: str) -> bool:
        """Whether a value is certainly zero, such as the initial states that exporters compute from the batch size."""
        waiting, seen = [name], {""}
        while waiting:
            each = waiting.pop()
            node = self.makers.get(each)
            if each in self.tensors:
                if np.any(self.array(each)):
                    return False
            elif node is not None and node.op_type == "ConstantOfShape":
                if any(np.any(self._read(each, attribute.t)) for attribute in node.attribute):
                    return False
            elif node is not None and node.op_type in ZEROS and node.input:
                inputs = node.input if node.op_type == "Concat" else node.input[:1]
                seen.add(each)
                waiting += [source for source in inputs if source not in seen]
            else:
                return False
        return True

    def is_argument(self, name: str) -> bool:
        """Whether a value is an input of the model, perhaps in another shape."""
        seen: set[str] = set()
        while name not in seen and (node := self.makers.get(name)) is not None:
            seen.add(name)
            if node.op_type not in RESHAPING or not node.input:
                return False
            name = node.input[0]
        return name in self.inputs and name not in self.tensors

    def is_fixed(self, name: str) -> bool:
        """Whether a value depends on nothing but constants and the shapes of others."""
        waiting, seen = [name], {""}
        while waiting:
            each = waiting.pop()
            node = self.makers.get(each)
            if each in seen or each in self.tensors or (node is not None and node.op_type == "Shape"):
                continue
            seen.add(each)
            if node is None or any(attribute.HasField("g") for attribute in node.attribute):
                return False
            waiting += node.input
        return True

    def origins(self, name: str, stops: Collection[str]) -> tuple[list[Any], list[str], list[str]]:
        """What a value comes from, and the nodes on the way from there, in order, which only move numbers.

        What it comes from are `stops`, or results of other nodes or inputs; those of which only the shape counts are
        last. Constants are not mentioned.
        """
        nodes: list[Any] = []
        found: dict[str, bool] = {}
        seen: set[tuple[str, bool]] = set()
        waiting: list[tuple[str, bool, Any]] = [(name, False, None)]
        while waiting:
            each, shape, done = waiting.pop()
            if done is not None:
                if all(done is not node for node in nodes):
                    nodes.append(done)
                continue
            if not each or (each, shape) in seen or each in self.tensors:
                continue
            seen.add((each, shape))
            node = self.makers.get(each)
            if each in stops or node is None:
                found[each] = found.get(each, True) and shape
            elif node.op_type in (*RESHAPING, *SELECTING) or (node.op_type in COUNTING and self.is_fixed(each)):
                waiting.append((each, shape, node))
                waiting += [(source, shape or node.op_type == "Shape", None) for source in node.input]
            else:
                found[each] = found.get(each, True) and shape
        return nodes, [each for each in found if not found[each]], [each for each in found if found[each]]

    def moved(self, name: str, nodes: list[Any], probes: Mapping[str, Array]) -> Array | None:
        """What these nodes make of other values than those they would get; None if they cannot take them."""
        from onnx import TensorProto, helper, numpy_helper, reference

        if name in probes:
            return probes[name]
        wanted = {each for node in nodes for each in node.input} & self.tensors.keys()
        graph = helper.make_graph(
            nodes,
            "moved",
            [helper.make_tensor_value_info(each, TensorProto.DOUBLE, None) for each in probes],
            [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None)],
            [numpy_helper.from_array(self.array(each), each) for each in sorted(wanted)],
        )
        try:
            evaluator = reference.ReferenceEvaluator(helper.make_model(graph, opset_imports=self.opsets))
            results: Any = evaluator.run(None, dict(probes))
            return np.asarray(results[0])
        except MemoryError:
            raise
        except Exception:  # numpy's and onnx's, of many kinds
            return None
