"""Converted ONNX models, compared with the models as onnxruntime runs them."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import numpy as np
import onnxruntime
import pytest
from convert_cases import all_warnings, assert_same
from onnx import TensorProto, helper, load, numpy_helper
from traced import peak

import onnx_export
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack, convert
from blockcell.convert import ConversionError, models, onnx_node, onnx_run, onnx_steps

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
        self.nodes.append(helper.make_node("LSTM", names, [f"{y}_rnn_Y"], hidden_size=hidden, name=f"{y}_lstm"))
        self.node("Squeeze", f"{y}_rnn_Y", y, np.array([1]))

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


# --------------------------------------------------------------------------------------------------------- comparison
def stacked(**options):
    """Return a model of a bidirectional GRU and an LSTM, which starts from states that are inputs, and a head."""
    graph, g = Graph(), np.random.default_rng(0)
    halves = [GRU.init(3, 4, seed=k, reset_after=True) for k in (0, 1)]
    for name, layer in (("a", Bidirectional(*halves)), ("b", LSTM.init(8, 5, seed=2))):
        node, arrays = convert.to_onnx(layer, name=name)
        graph.arrays |= arrays
        node.input[0] = {"a": "x", "b": "a2"}[name]
        node.input.extend(["", "h", "c"][: 3 * (name == "b")])
        graph.nodes.append(node)
        if name == "a":
            graph.node("Transpose", "a_Y", "a1", perm=[0, 2, 1, 3])
            graph.node("Reshape", "a1", "a2", np.array([0, 0, -1]))
    graph.node("Squeeze", "b_Y", "b1", np.array([1]))
    graph.node("MatMul", "b1", "product", g.standard_normal((5, 2)).astype(np.float32))
    graph.node("Add", "product", "out", np.float32([0.5, -0.5]))
    model = graph.model(("T", "B", 3), "out")
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "B", 5]) for name in "hc")
    return model


def changed_cells(monkeypatch, change):
    """Let the conversion make other cells of W, R and B [.,.]: the first argument of `change` is their list."""
    make = onnx_node.make_node_cell

    def make_changed(label, kind, arrays, **options):
        arrays, options = change(kind, [array.copy() for array in arrays], dict(options))
        return make(label, kind, arrays, **options)

    monkeypatch.setattr(onnx_node, "make_node_cell", make_changed)


def exchange_gates(kind, arrays, options):
    """Exchange r and u of a GRU."""
    order = [1, 0, 2] if kind == "GRU" else [0, 1, 2, 3]
    for array in arrays[:2]:
        array[:] = np.concatenate([np.split(array, len(order))[k] for k in order])
    return arrays, options


def forget_one_bias(kind, arrays, options):
    """Leave out the recurrent bias of a GRU's candidate."""
    if kind == "GRU":
        arrays[2][-4:] = 0
        arrays[2][:4] += 0.25
    return arrays, options


MUTANTS = {  # of the converter, by what they do
    "r and u exchanged": lambda patch: changed_cells(patch, exchange_gates),
    "a bias changed": lambda patch: changed_cells(patch, forget_one_bias),
    "reset before": lambda patch: changed_cells(
        patch, lambda kind, a, o: (a, o | {"reset_after": False} if kind == "GRU" else o)),
    "all in reverse": lambda patch: changed_cells(
        patch, lambda kind, a, o: (a, o | {"reverse": kind == "LSTM"})),
    "another activation": lambda patch: changed_cells(patch, lambda kind, a, o: (a, o | {"activation": "softsign"})),
    "directions exchanged": lambda patch: patch.setattr(
        onnx_node, "Bidirectional", lambda fw, bw: Bidirectional(bw, fw)),
    "a dense layer on the last step": lambda patch: patch.setattr(
        models, "_copy_dense", lambda dense, **options: Dense(**dense.weights, last=True)),
    "no bias of a dense layer": lambda patch: patch.setattr(
        onnx_steps.GraphSteps, "_dense", lambda self, node, w, bias: Dense(w, np.zeros_like(bias))),
    "a state not passed": lambda patch: patch.setattr(onnx_run.Trial, "is_zero", lambda self, name: name == "c"),
}  # fmt: skip


def convert_quietly(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert.from_onnx(model, **options)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant, monkeypatch):
    """The comparison alone finds what is wrong with a converter."""
    model = stacked()
    if "last step" in mutant:
        graph = model.graph
        del graph.node[-3:]
        graph.node.append(helper.make_node("Squeeze", ["b_Y", "b1_0"], ["b1"]))
        graph.node.append(helper.make_node("MatMul", ["b1", "product_0"], ["product"]))
        graph.node.append(helper.make_node("Relu", ["product"], ["out"]))
    convert.from_onnx(model)
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(ConversionError, match="the layer computes something else than the model on random inputs"):
        convert_quietly(model)
    assert convert_quietly(model, check=False) is not None


def test_mutants_of_the_order_of_layers(monkeypatch):
    """Here any node between two layers counts as nothing, and is named."""
    graph = Graph()
    graph.lstm("x", "y", 3)
    cut(graph, "y", "z", -1, -END, 0, -1)
    graph.lstm("z", "out", 4, seed=1)
    model = graph.model(("T", "B", 3), "out")
    fit = onnx_steps.GraphSteps, "_fit"
    monkeypatch.setattr(*fit, lambda self, name, results, T, B: [(next(iter(results)), "y")])
    with pytest.raises(ConversionError, match=r"took these for parts that do nothing: y \(Squeeze\), z \(Slice\)\. If"):
        convert.from_onnx(model)
    assert isinstance(convert.from_onnx(model, check=False), Stack)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_constant_states(dtype, monkeypatch):
    """The state beside the layer must be the model's."""
    g = np.random.default_rng(0)
    node, arrays = convert.to_onnx(LSTM.init(3, 4, seed=0, dtype=dtype))
    node.input.extend(["", "h", "c"])
    arrays |= {name: g.uniform(-1, 1, (1, 1, 4)).astype(dtype) for name in "hc"}
    convert.from_onnx(node, arrays, initial_state=True)
    states = onnx_node._STATES
    monkeypatch.setattr(onnx_node, "_STATES", dict(zip(states, [*states.values()][::-1], strict=True)))
    with pytest.raises(ConversionError, match="computes something else"):
        convert.from_onnx(node, arrays, initial_state=True)


def test_the_model_stays_as_it_was():
    model = stacked()
    content = model.SerializeToString(deterministic=True)
    convert.from_onnx(model)
    assert model.SerializeToString(deterministic=True) == content


def test_without_onnxruntime(monkeypatch):
    """Nothing is compared, which a warning says."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.warns(UserWarning, match="^from_onnx: not compared with the model, because onnxruntime, which"):
        convert.from_onnx(stacked())
    convert.from_onnx(onnx_export.export(LSTM.init(3, 4, seed=0), None))


def bomb(op, *values, **attributes):
    """Return a model in which a node between the layer and a head would make a large result."""
    graph = Graph()
    graph.lstm("x", "y", 3)
    graph.node(op, "y", "z", *values, **attributes)
    graph.lstm("z", "out", 4, seed=1)
    return graph.model(("T", "B", 3), "out")


@pytest.mark.parametrize(
    "model",
    [
        bomb("Expand", np.array([2**40, 1, 1, 1])),
        bomb("Tile", np.array([2**20, 2**20, 1])),
        bomb("Gather", np.zeros(2**22, np.int64)),
    ],
    ids=["Expand", "Tile", "Gather"],
)
def test_large_results_are_not_computed(model):
    """Their sizes are known before the node runs."""

    def read():
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            convert.from_onnx(model)
        return [str(warning.message) for warning in record]

    (text,), size = peak(read)
    assert "not compared with the model, because z (" in text and text.endswith("too long or too much memory")
    assert size < 2**27


def test_doubling():
    """Sums of results count, too: each Concat of 40 doubles the steps."""
    graph = Graph()
    graph.lstm("x", "y", 3)
    for k in range(40):
        graph.nodes.append(helper.make_node("Concat", [f"c{k - 1}" if k else "y"] * 2, [f"c{k}"], axis=0))
    graph.lstm("c39", "out", 4, seed=1)
    with pytest.warns(UserWarning, match="would take too long or too much memory"):
        convert.from_onnx(graph.model(("T", "B", 3), "out"))


def test_embedding_and_lengths():
    """Indices are below the table's size, lengths between 1 and T; a state that a layer's own end gives is passed."""
    graph = Graph()
    g = np.random.default_rng(0)
    table = g.standard_normal((7, 3)).astype(np.float32)
    graph.arrays["table"] = table
    graph.nodes.append(helper.make_node("Gather", ["table", "ids"], ["embedded"], name="embedded"))
    graph.node("Cast", "x", "lens", to=TensorProto.INT32)
    for name, x, seed in (("a", "embedded", 0), ("b", "embedded", 1)):
        node, arrays = convert.to_onnx(GRU.init(3, 4, seed=seed), name=name)
        graph.arrays |= arrays
        node.input[0] = x
        node.input.extend(["lens", *(["a_Y_h"] if name == "b" else [])])
        graph.nodes.append(node)
    model = graph.model(("B",), "b_Y")
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["T", "B"]))
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layers = convert.from_onnx(model)
    assert [*layers] == ["a", "b"]
    texts = [str(warning.message) for warning in record]
    assert texts[0] == "from_onnx: left out: embedded (Gather)" and len(texts) == 2


@pytest.mark.parametrize("second", ["lens", "", "others"])
def test_lengths_of_a_chain(second):
    """Layers with other lengths are no stack, whose calls have lengths once."""
    graph = Graph()
    for name, x, lengths in (("a", "x", "lens"), ("b", "y", second)):
        node, arrays = convert.to_onnx(GRU.init(3, 3, seed=0), name=name)
        graph.arrays |= arrays
        node.input[0] = x
        node.input.append(lengths)
        graph.nodes.append(node)
        if name == "a":
            graph.node("Squeeze", "a_Y", "y", np.array([1]))
    model = graph.model(("T", "B", 3), "b_Y")
    model.graph.input.extend(helper.make_tensor_value_info(n, TensorProto.INT32, ["B"]) for n in ("lens", "others"))
    assert isinstance(convert.from_onnx(model), Stack if second == "lens" else dict)


def test_order_of_rows_in_input_and_result():
    """The batch may be first in both; else the node that turns one of them is left out."""
    for in_front in (False, True):
        for behind in (False, True):
            graph = Graph()
            if in_front:
                graph.node("Transpose", "x", "x2", perm=[1, 0, 2])
            graph.lstm("x2" if in_front else "x", "y", 3)
            if behind:
                graph.node("Transpose", "y", "out", perm=[1, 0, 2])
            model = graph.model(("T", "B", 3), "out" if behind else "y")
            if in_front == behind:
                convert.from_onnx(model)
            else:
                with pytest.warns(UserWarning, match=r"^from_onnx: left out: y \(Squeeze\)(, out \(Transpose\))?$"):
                    convert.from_onnx(model)


def test_nodes_behind_that_take_certain_sizes():
    """They are left out, although they do not run on the inputs of the comparison."""
    graph = Graph()
    graph.lstm("x", "y", 3)
    graph.node("Reshape", "y", "out", np.array([14, 4]))
    with pytest.warns(UserWarning, match=r"^from_onnx: left out: (y \(Squeeze\), )?out \(Reshape\)$"):
        assert isinstance(convert.from_onnx(graph.model(("T", "B", 3), "out")), LSTM)


def test_sizes_that_are_neither_steps_nor_rows():
    """Three sizes of which each two differ: the model is not compared, which a warning says."""
    graph = Graph()
    graph.nodes.append(helper.make_node("Max", ["p", "q", "r"], ["h"], name="h"))
    node, weights = convert.to_onnx(GRU.init(3, 4, seed=0))
    graph.arrays |= weights
    node.input.extend(["", "h"])
    graph.nodes.append(node)
    model = graph.model(("T", "B", 3), "rnn_Y")
    model.graph.input[0].name = "rnn_X"
    for name, sizes in (("p", "kl"), ("q", "km"), ("r", "lm")):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [*sizes]))
    _, texts = all_warnings(convert.from_onnx, model)
    assert any("not compared with the model, because " in text for text in texts)


# ---------------------------------------------------------------------------------------------------- random graphs
def draw_model(g):
    """Draw a model of recurrent layers with nodes between them that may do nothing; return it, and T and B."""
    graph, shape = Graph(), [g.choice(["T", "B"][axis : axis + 1] * 3 + [6 - 2 * axis, 1]) for axis in range(2)]
    shape = [int(size) if str(size).isdigit() else str(size) for size in shape]
    features, value = 3, "x"
    if batch_first := bool(g.integers(4) == 0):
        graph.node("Transpose", value, value := "turned", perm=[1, 0, 2])
    for k in range(layers := int(g.integers(1, 4))):
        if k:
            value, features = draw_between(g, graph, value, features, shape, f"b{k}")
        value, features = draw_layer(g, graph, value, features, f"y{k}")
    head = g.integers(5)
    if head:
        value, features = draw_between(g, graph, value, features, shape, "h") if head == 1 else (value, features)
        taken = {2: -1, 3: 0}.get(int(head))
        if taken is not None:
            graph.node("Gather", value, value := "taken", np.array(taken), axis=0)
        graph.node("MatMul", value, value := "product", g.uniform(-1, 1, (features, 2)).astype(np.float32))
        if g.integers(2):
            graph.node("Add", value, value := "sum", g.uniform(-1, 1, 2).astype(np.float32))
    elif layers == 1 or g.integers(3) == 0:
        value, features = draw_between(g, graph, value, features, shape, "e")
    if batch_first and head not in (2, 3):
        graph.node("Transpose", value, value := "returned", perm=[1, 0, 2])
    return graph.model([*(shape[::-1] if batch_first else shape), 3], value), shape, batch_first


def draw_layer(g, graph, x, features, y):
    """Add an LSTM or a GRU of one or both directions; return the name of y [T,B,.] and its columns."""
    hidden, kind = int(g.integers(3, 6)), g.choice([LSTM, GRU])
    layer = kind.init(features, hidden, seed=g, reverse=bool(g.integers(4) == 0))
    if both := bool(g.integers(3) == 0):
        layer = Bidirectional(kind.init(features, hidden, seed=g), kind.init(features, hidden, seed=g))
    node, weights = convert.to_onnx(layer, name=f"{y}_rnn")
    graph.arrays |= weights
    node.input[0] = x
    graph.nodes.append(node)
    if both or g.integers(2):
        graph.node("Transpose", f"{y}_rnn_Y", f"{y}_t", perm=[0, 2, 1, 3])
        graph.node("Reshape", f"{y}_t", y, np.array([0, 0, -1]))
    else:
        graph.node("Squeeze", f"{y}_rnn_Y", y, np.array([1]))
    return y, layer.output_size


def draw_between(g, graph, value, features, shape, name):
    """Add up to two nodes to a value [T,B,features], which keep its rank; return what they give and its columns."""
    for k in range(int(g.integers(0, 3))):
        x, value = value, f"{name}{k}"
        axis, number = int(g.integers(3)), int(g.choice([1, 2, 3, 4, 5, 6, 60, 300, END]))
        step, sizes = int(g.choice([1, 1, 2])), [size if isinstance(size, int) else -1 for size in shape]
        match g.choice(["Slice", "Gather", "Reverse", "Transpose", "Add", "Concat", "Reshape", "ReduceMean", "Pad"]):
            case "Slice":
                axis = int(g.integers(2))
                start = int(g.choice([0, 0, 1, -number]))
                cut(graph, x, value, start, END if start < 0 else number, axis, step)
            case "Gather":
                axis = int(g.integers(2))
                graph.node(
                    "Gather", x, value, np.array(g.choice([[0], [-1], [2], [0, 1, 2], [0, 2, 1]][:3])), axis=axis
                )
            case "Reverse":
                cut(graph, x, value, -1, -END, axis, -1)
            case "Transpose":
                graph.node("Transpose", x, f"{value}t", perm=[1, 0, 2])
                if g.integers(2):
                    graph.node("Identity", f"{value}t", value)
                else:
                    graph.node("Transpose", f"{value}t", value, perm=[1, 0, 2])
            case "Add":
                graph.node("Add", x, value, np.float32(g.choice([0, 0.5])))
            case "Concat":
                graph.arrays[f"{value}c"] = np.zeros([1, 1, 0] if axis == 2 else [0, 1, features], np.float32)
                if g.integers(2) and axis < 2:
                    graph.nodes.append(helper.make_node("Concat", [x, x], [value], name=value, axis=axis))
                else:
                    cut(graph, x, f"{value}l", 0, features // 2, 2)
                    cut(graph, x, f"{value}r", features // 2, END, 2)
                    order = [f"{value}l", f"{value}r"][:: int(g.choice([1, -1]))]
                    graph.nodes.append(helper.make_node("Concat", order, [value], name=value, axis=2))
                del graph.arrays[f"{value}c"]
            case "Reshape":
                to = [
                    [0, 0, -1],
                    [*sizes, features],
                    [sizes[1], sizes[0], features],
                    [1, -1, features],
                    [-1, 1, features],
                ]
                choice = to[int(g.integers(len(to)))]
                graph.node("Reshape", x, value, np.array(choice if choice.count(-1) < 2 else [0, -1, features]))
            case "ReduceMean":
                graph.node("ReduceMean", x, value, axes=[axis], keepdims=1)
                features = 1 if axis == 2 else features
            case "Pad":
                pads = np.zeros(6, np.int64)
                pads[axis] = g.integers(2)
                graph.node("Pad", x, value, pads)
                features += int(pads[2])
    return value, features


def outcome_of(model, shape, batch_first):
    """Convert a model; return "right", "wrong", or why no layer came of all of it without a word."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            layer = convert.from_onnx(model)
        except ConversionError:
            return "refused"
    text = " ".join(str(warning.message) for warning in record)
    if "left out" in text or isinstance(layer, dict):
        return "not compared" if "not compared" in text else "in parts"
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    runs = 0
    for T, B in ((6, 4), (5, 3), (11, 9), (400, 3), (4, 90)):
        T, B = (size if isinstance(size, int) else free for size, free in zip(shape, (T, B), strict=True))
        x = np.random.default_rng(T).standard_normal((B, T, 3) if batch_first else (T, B, 3)).astype(np.float32)
        try:
            expected = session.run(None, {"x": x})[0]
        except Exception:
            continue
        runs += 1
        y = layer(x, batch_first=batch_first)[0]
        if y.shape != expected.shape or np.abs(y - expected).max(initial=0) > 1e-5:
            return "wrong, with a warning" if "not compared" in text or "compared for" in text else "wrong in silence"
    return ("right, not compared" if "not compared" in text else "right") if runs else "does not run"


def count_outcomes(seeds):
    """Return how many of the models that these seeds draw have each outcome."""
    counts = Counter()
    for seed in seeds:
        model, shape, batch_first = draw_model(np.random.default_rng(seed))
        counts[outcome := outcome_of(model, shape, batch_first)] += 1
        assert outcome != "wrong in silence", f"seed {seed}"
    return counts


# -------------------------------------------------------------------------------------------- models of `export`
def exported_layers():
    """Return one layer of each kind, and a stack."""
    lstm = LSTM.init(4, 5, use_peephole=True, cell_clip=0.5, seed=1)
    gru = GRU.init(10, 5, reset_after=True, reverse=True, seed=2)
    dense = Dense.init(5, 3, activation="softmax", last=True, seed=3)
    return {
        "LSTM": lstm,
        "LSTM with projection": LSTM.init(4, 6, proj_size=3, seed=1),
        "GRU": GRU.init(4, 5, seed=1),
        "RNN": RNN.init(4, 5, seed=1),
        "Dense": Dense.init(4, 3, activation="relu", seed=1),
        "Stack": Stack([Bidirectional(LSTM.init(4, 5, seed=4), GRU.init(4, 5, seed=5)), gru, dense]),
        "float16": lstm.quantize("float16"),
    }


def export_forms(loop):
    forms = [{}, {"reset": True}, {"lengths": False, "state": False}, {"functions": False, "static": True}]
    forms += [{"streaming": True}, {"dtype": "float16"}, {"dtype": "float64"}]
    return [{**form, "loop": loop, "sizes": {"T": 4} if loop == "unroll" else None} for form in forms]


@pytest.mark.parametrize("loop", ["scan", "loop", "unroll", "native"])
@pytest.mark.parametrize("name", exported_layers())
def test_exported_models_give_their_layers(name, loop, tmp_path):
    """In every form and without a warning, also out of a file and with other weights."""
    layer, count = exported_layers()[name], 0
    for form in export_forms(loop):
        try:
            onnx_export.export(layer, path := tmp_path / "a.onnx", **form)
        except (TypeError, ValueError):  # there is no such model
            continue
        result = convert.from_onnx(path)
        if name != "float16" and "dtype" not in form:
            assert_same(result, layer)
        model, count = load(path), count + 1
        tensor = model.graph.initializer[0]
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((array * 2).astype(array.dtype), tensor.name))
        changed = convert.from_onnx(model).weights
        assert any(not np.array_equal(changed[name], array) for name, array in result.weights.items())
    assert count or loop == "native"


def all_nodes(model):
    """Yield the nodes of a model, of its functions, and of their loops."""
    waiting = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [inner for attribute in node.attribute for inner in attribute.g.node]


def swap_parts(model):
    """Swap the first two parts of a Split."""
    node = next(node for node in all_nodes(model) if node.op_type == "Split")
    node.output[0], node.output[1] = node.output[1], node.output[0]


def change_number(model):
    """Clip at another number."""
    node = next(node for node in all_nodes(model) if node.op_type == "Constant" and "clip_high" in node.output[0])
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0.25), node.attribute[0].t.name))


def change_final_state(model):
    """Give the state before the first step as the last one."""
    node = next(node for node in model.graph.node if "h" in node.output)
    node.output[[*node.output].index("h")] = "other"
    model.graph.node.append(helper.make_node("Identity", ["h_prev"], ["h"]))


def fix_state(model):
    """Give a constant for the state before the first step."""
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 5), np.float32), "h_prev"))


def forget_digest(model):
    """Make the model one of an older version."""
    (entry,) = (entry for entry in model.metadata_props if entry.key == "blockcell.digest")
    model.metadata_props.remove(entry)


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("loop", ["scan", "loop"])
@pytest.mark.parametrize(
    "change",
    [swap_parts, change_number, change_final_state, fix_state, forget_digest],
    ids=lambda f: f.__name__,
)
def test_exported_model_that_another_program_changed(change, loop, functions):
    """It is refused, although it says which layer it was; with check=False it is that layer."""
    layer = exported_layers()["LSTM"]
    model = onnx_export.export(layer, None, loop=loop, functions=functions)
    change(model)
    with pytest.raises(
        ConversionError, match=r"^from_onnx: another program has changed the model .*_props\[:\]; to get"
    ):
        convert.from_onnx(model)
    assert np.array_equal(convert.from_onnx(model, check=False).weights["w"], layer.weights["w"])


COUNT = 300


def test_some_random_graphs():
    """None gives another model without a word."""
    print(count_outcomes(range(40)))


@pytest.mark.slow
def test_random_graphs():
    """`pytest -m slow -s -k test_random_graphs` prints how many there are of each kind."""
    counts = count_outcomes(range(COUNT))
    print(counts)
    assert counts["right"] > COUNT / 4
