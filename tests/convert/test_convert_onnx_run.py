"""Converted ONNX models, compared with the models as onnxruntime runs them."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from blockcell import LSTM, convert

END = 2**31


class Graph:
    """Nodes and constants of a model, which are added one by one."""

    def __init__(self):
        self.nodes, self.arrays = [], {}

    def lstm(self, x, y, inputs, *, hidden=4, seed=0):
        """Add an LSTM and a Squeeze, from x [T,B,I] to y [T,B,H]."""
        node, weights = convert.to_onnx(LSTM.init(inputs, hidden, seed=seed))
        self.arrays |= {y + name: array for name, array in weights.items()}
        names = [x, *(y + name if name else "" for name in list(node.input)[1:])]
        self.nodes.append(helper.make_node("LSTM", names, [f"{y}_Y"], hidden_size=hidden, name=f"{y}_lstm"))
        self.node("Squeeze", f"{y}_Y", y, np.array([1]))

    def node(self, op, x, y, *values, **attributes):
        """Add a node from x to y, whose further inputs are constants."""
        names = [f"{y}_{k}" for k in range(len(values))]
        self.arrays |= zip(names, map(np.asarray, values), strict=True)
        self.nodes.append(helper.make_node(op, [x, *names], [y], name=y, **attributes))

    def model(self, shape, result):
        """Return the model of float32 from x of this shape."""
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_empty_tensor_value_info(result)],
            [numpy_helper.from_array(array, name) for name, array in self.arrays.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def cut(graph, x, y, start, end, axis, step=1):
    graph.node("Slice", x, y, *(np.array([number]) for number in (start, end, axis, step)))


BETWEEN = {  # nodes that do nothing for one step, one row, or few of them
    "y.flip(0)": lambda graph: cut(graph, "y", "z", -1, -END, 0, -1),
    "y.flip(1)": lambda graph: cut(graph, "y", "z", -1, -END, 1, -1),
    "y[::2]": lambda graph: cut(graph, "y", "z", 0, END, 0, 2),
    "y[:1]": lambda graph: cut(graph, "y", "z", 0, 1, 0),
    "y[:, :1]": lambda graph: cut(graph, "y", "z", 0, 1, 1),
    "y[:5]": lambda graph: cut(graph, "y", "z", 0, 5, 0),
    "y[:300]": lambda graph: cut(graph, "y", "z", 0, 300, 0),
    "y[:, :60]": lambda graph: cut(graph, "y", "z", 0, 60, 1),
    "y[-70:]": lambda graph: cut(graph, "y", "z", -70, END, 0),
    "y[0]": lambda graph: graph.node("Gather", "y", "z", np.array(0), axis=0),
    "y[:5][4]": lambda graph: [cut(graph, "y", "v", 0, 5, 0), graph.node("Gather", "v", "z", np.array(4), axis=0)],
}


@pytest.mark.parametrize("shape", [("T", "B", 3), ("T", 1, 3), (6, 4, 3), (1, "B", 3)], ids=str)
@pytest.mark.parametrize("second", ["LSTM", "MatMul"])
@pytest.mark.parametrize("between", BETWEEN)
def test_nodes_that_do_nothing_for_some_sizes(between, second, shape):
    """The nodes are left out, unless they do nothing for the sizes that the model fixes: then the results agree."""
    graph = Graph()
    graph.lstm("x", "y", 3)
    BETWEEN[between](graph)
    if second == "LSTM":
        if graph.nodes[-1].op_type == "Gather":
            graph.node("Unsqueeze", "z", "zz", np.array([0]))
        graph.lstm(graph.nodes[-1].output[0], "out", 4, seed=1)
    else:
        graph.node("MatMul", "z", "out", np.ones((4, 2), np.float32))
    model = graph.model(shape, "out")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layer = convert.from_onnx(model)
    if isinstance(layer, dict) or "left out" in " ".join(str(warning.message) for warning in record):
        return
    assert 1 in shape or shape == (6, 4, 3)
    T, B = (size if isinstance(size, int) else other for size, other in zip(shape, (400, 80), strict=False))
    x = np.random.default_rng(0).standard_normal((T, B, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(layer(x)[0], session.run(None, {"x": x})[0], rtol=0, atol=1e-6)
