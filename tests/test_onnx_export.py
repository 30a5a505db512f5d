"""Layers as ONNX models, on onnxruntime and onnx.reference: equal to the layer and, row by row, to the formulas."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import rng
from graphs import EPS, FLOAT64, ONNX, checked, on_onnxruntime, on_reference
from placement import fallbacks, refused_by_cuda_graphs, sizes_left
from test_onnx_runtimes import RUNTIMES

import onnx_export
from blockcell import GRU, LSTM, Bidirectional, LSTMState, Stack, __version__
from blockcell.formulas import FORMULAS

T, B, I = 6, 5, 3  # noqa: E741
LENGTHS = np.array([3, 0, 6, 1, 5])
LOOPS = ["scan", "unroll", "loop"]
DTYPES = ["float64", "float32", "float16"]


# --------------------------------------------------------------------------------------------------------- the layers
def lstm(size, dtype, inputs=I, **options):
    return drawn(LSTM.init(inputs, size, seed=size, dtype=dtype, **options))


def gru(size, dtype, inputs=I):
    return drawn(GRU.init(inputs, size, seed=size, dtype=dtype))


def drawn(layer):
    """The layer with biases that are not equal."""
    g = rng(repr(layer))
    moved = {name: (w + 0.3 * g.standard_normal(w.shape)).astype(w.dtype) for name, w in layer.weights.items()}
    layer.set_weights(**moved)
    return layer


LAYERS = {
    "LSTM": lambda dtype: lstm(5, dtype),
    "LSTM with all": lambda dtype: lstm(4, dtype, use_peephole=True, forget_bias=0.7, cell_clip=0.4, gate_order="ifco"),
    "GRU": lambda dtype: gru(4, dtype),
    "Bidirectional": lambda dtype: Bidirectional(lstm(5, dtype, use_peephole=True), gru(5, dtype)),
    "Stack": lambda dtype: Stack(
        [
            Bidirectional(gru(2, dtype), lstm(2, dtype, gate_order="ifco", forget_bias=1.0)),
            lstm(3, dtype, 4, cell_clip=0.3),
            Bidirectional(
                Stack([gru(4, dtype), lstm(2, dtype, 4)]),  # and, within the backward direction, both ways
                Stack([lstm(5, dtype), Bidirectional(gru(1, dtype, 5), gru(1, dtype, 5))]),
            ),
        ]
    ),
}
DEPTH = {"Stack": 4}
STREAMING = {
    **{name: LAYERS[name] for name in ("LSTM", "LSTM with all", "GRU")},
    "Stack": lambda dtype: Stack([lstm(4, dtype, gate_order="ifco"), Stack([gru(3, dtype, 4), lstm(4, dtype, 3)])]),
}


# -------------------------------------------------------------------------------------------- calls and their names
def flat(layer, state, prefix=""):
    """A state by the names of its parts."""
    if isinstance(layer, Stack):
        parts = [flat(part, of, f"{prefix}{k}.") for k, (part, of) in enumerate(zip(layer.layers, state, strict=True))]
    elif isinstance(layer, Bidirectional):
        parts = [flat(layer.fw, state[0], f"{prefix}fw."), flat(layer.bw, state[1], f"{prefix}bw.")]
    else:
        return {prefix + name: array for name, array in state._asdict().items()}
    return {name: array for part in parts for name, array in part.items()}


def random_state(layer, g, batch=B):
    _, zeros = layer(np.zeros((1, batch, layer.input_size), layer.dtype))

    def filled(part):
        if isinstance(part, np.ndarray):
            return g.uniform(-1, 1, part.shape).astype(part.dtype)
        return type(part)(*map(filled, part)) if hasattr(part, "_fields") else tuple(map(filled, part))

    return filled(zeros)


class Case:
    """A call of a layer and, by name, what a model of it takes and gives. What lies past a row's length is NaN."""

    def __init__(self, layer, *, lengths=True, reset=False, state=True, train=False, seed=0):
        g = rng(repr(layer), lengths, reset, train, seed)
        dtype = layer.dtype
        past = (np.arange(T)[:, None] >= LENGTHS) & lengths
        x = g.uniform(-1, 1, (T, B, layer.input_size)).astype(dtype)
        x[past] = np.nan
        self.options = {"lengths": lengths, "reset": reset, "state": state, "train": train}
        given = {"lengths": LENGTHS} if lengths else {}
        given |= {"reset": g.random((T, B)) < 0.3} if reset else {}
        first = random_state(layer, g) if state else None
        self.feeds = {"x": x, **given}
        if state:
            self.feeds |= {f"{name}_prev": array for name, array in flat(layer, first).items()}
        exact = self.exactly(layer)
        y, last, tape = exact.forward(*self.double(x, first), **given)
        self.expected = {"y": y} | flat(layer, last)
        if train:
            d_y = g.uniform(-1, 1, y.shape).astype(dtype)
            d_y[past] = np.nan
            d_last = random_state(layer, g) if state else None
            d_x, d_first, grads = exact.backward(tape, *self.double(d_y, d_last))
            self.feeds |= {"d_y": d_y} | layer.weights
            self.expected["d_x"] = d_x
            if state:
                self.feeds |= {f"d_{name}": array for name, array in flat(layer, d_last).items()}
                self.expected |= {f"d_{name}_prev": array for name, array in flat(layer, d_first).items()}
            self.expected |= {f"d_{name}": grad for name, grad in grads.items()}

    @staticmethod
    def exactly(layer):
        """The layer, of the same numbers, in float64."""
        if isinstance(layer, Stack):
            return Stack([Case.exactly(part) for part in layer.layers])
        if isinstance(layer, Bidirectional):
            return Bidirectional(Case.exactly(layer.fw), Case.exactly(layer.bw))
        return type(layer)(**layer._arguments() | {name: w.astype(np.float64) for name, w in layer.weights.items()})

    @staticmethod
    def double(*values):
        def converted(value):
            if isinstance(value, np.ndarray):
                return value.astype(np.float64)
            if hasattr(value, "_fields"):
                return type(value)(*map(converted, value))
            return value if value is None else tuple(map(converted, value))

        return map(converted, values)

    def check(self, model, run=on_onnxruntime, limit=FLOAT64, dtype=np.float64):
        assert {value.name for value in model.graph.input} == self.feeds.keys()
        assert [value.name for value in model.graph.output] == list(self.expected)
        for (name, right), result in zip(self.expected.items(), run(model, self.feeds), strict=True):
            assert result.dtype == dtype and result.shape == right.shape, name
            error, largest = np.abs(result - right).max(initial=0), np.abs(right).max(initial=0)
            assert error <= limit * largest, f"{name}: {error / (largest or 1):.2e} > {limit:.2e}"


def exported(layer, case=None, **options):
    if options.get("loop") == "unroll":
        options["sizes"] = {"T": T, **options.get("sizes", {})}
    return checked(onnx_export.export(layer, None, **(case.options if case else {}), **options))


# ------------------------------------------------------------------------------------------------------------- results
FORMS = [
    {"lengths": True},
    {"lengths": True, "reset": True},
    {"lengths": False, "state": False},
    {"lengths": False, "reset": True},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(f"{k}={v}" for k, v in form.items()))
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_layer(name, loop, form):
    layer = LAYERS[name]("float64")
    case = Case(layer, **form)
    case.check(exported(layer, case, loop=loop))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(f"{k}={v}" for k, v in form.items()))
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_the_layer(name, form):
    layer = LAYERS[name]("float64")
    case = Case(layer, train=True, **form)
    case.check(exported(layer, case))


@pytest.mark.parametrize("loop", ["unroll", "loop"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_other_loops(name, loop):
    layer = LAYERS[name]("float64")
    case = Case(layer, train=True, reset=True)
    case.check(exported(layer, case, loop=loop))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_reference(name, train):
    """With and without what makes the graph larger."""
    layer = LAYERS[name]("float64")
    for form in FORMS[1:3]:
        case = Case(layer, train=train, **form)
        case.check(exported(layer, case, functions=False), on_reference)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_other_dtypes(name, train, dtype):
    """Against float64, of the same numbers. Every layer of a stack adds its own error."""
    layer = LAYERS[name](dtype)
    case = Case(layer, reset=True, train=train)
    limit = (24 if dtype == "float32" else 8) * EPS[np.dtype(dtype)] * DEPTH.get(name, 1)
    case.check(exported(layer, case), limit=limit, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_than_the_layers(dtype):
    """The weights are rounded, or gain digits that are zero."""
    layer = LAYERS["Bidirectional"]("float32")
    model = exported(layer, dtype=dtype)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert weights.keys() == layer.weights.keys()
    for name, array in layer.weights.items():
        np.testing.assert_array_equal(weights[name], array.astype(dtype), strict=True)
    if dtype == "float64":
        Case(Case.exactly(layer)).check(model)


@pytest.mark.parametrize("fixed", [{}, {"T": T}, {"B": B}, {"T": T, "B": B}])
@pytest.mark.parametrize("train", [False, True])
def test_sizes(train, fixed):
    layer = LAYERS["Bidirectional"]("float64")
    case = Case(layer, train=train, reset=True)
    model = exported(layer, case, sizes=fixed)
    case.check(model)
    x = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value or dim.dim_param for dim in x] == [fixed.get("T", "T"), fixed.get("B", "B"), I]


@pytest.mark.parametrize(("inputs", "cells", "batch"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_sizes_of_zero(kind, train, inputs, cells, batch):
    both = Bidirectional(*(kind.init(inputs, cells, seed=seed, dtype="float64") for seed in (1, 2)))
    layer = Stack([both, kind.init(2 * cells, cells, seed=3, dtype="float64")])
    x, lengths = np.ones((2, batch, inputs)), np.arange(batch)
    y, state, tape = layer.forward(x, lengths=lengths)
    d_x, _, grads = layer.backward(tape, np.ones_like(y))
    expected = {"y": y, **flat(layer, state)}
    feeds = {"x": x, "lengths": lengths}
    if train:
        expected |= {"d_x": d_x} | {f"d_{name}": grad for name, grad in grads.items()}
        feeds |= layer.weights | {"d_y": np.ones_like(y)}
    for sizes in ({}, {"T": 2, "B": batch or None}):
        model = exported(layer, train=train, state=False, sizes=sizes)
        for (name, right), result in zip(expected.items(), on_onnxruntime(model, feeds), strict=True):
            assert result.shape == right.shape, name
            np.testing.assert_allclose(result, right, rtol=0, atol=1e-14, err_msg=name)


# ----------------------------------------------------------------------------------------- the formulas, row by row
def by_formula(forward, gradient, weights, x, state, d_y, d_state, attrs):
    """Results and gradients of one row, [n, 1, ...], from the formulas of the ops."""
    n, peephole = len(x), {"use_peephole": "wci" in weights} if forward == "BlockLSTM" else {}
    arguments = {"seq_len_max": n, "x": x, **weights, **{f"{name}_prev": value for name, value in state.items()}}
    if peephole and "wci" not in weights:
        arguments |= dict.fromkeys(("wci", "wcf", "wco"), np.zeros(0))
    steps = FORMULAS[forward](**arguments, **attrs, **peephole)._asdict()
    incoming = {f"{name}_grad": np.zeros_like(steps[name]) for name in state}
    incoming["h_grad"] = d_y.copy()
    for name, value in d_state.items():
        incoming[f"{name}_grad"][-1] += value
    grads = FORMULAS[gradient](**arguments, **steps, **incoming, **peephole)._asdict()
    return steps, {name.removesuffix("_grad"): value for name, value in grads.items()}


@pytest.mark.parametrize("name", ["LSTM", "LSTM with peephole", "GRU"])
def test_equals_the_formulas(name):
    """Both directions of a layer, row by row: each by itself knows nothing of lengths."""
    kind, forward, gradient = (
        (GRU, "block_gru", "block_gru_grad") if name == "GRU" else (LSTM, "BlockLSTM", "BlockLSTMGrad")
    )
    attrs = {"forget_bias": 0.7, "cell_clip": 0.5} if kind is LSTM else {}
    options = attrs | ({"use_peephole": True} if "peephole" in name else {})
    layer = Bidirectional(*(drawn(kind.init(I, 4, seed=seed, dtype="float64", **options)) for seed in (1, 2)))
    case = Case(layer, train=True)
    expected = {key: np.zeros_like(value) for key, value in case.expected.items()}
    for way in ("fw", "bw"):
        cell = getattr(layer, way)
        states = cell._state._fields
        half = slice(0, 4) if way == "fw" else slice(4, 8)
        for b, n in enumerate(LENGTHS):
            state = {s: case.feeds[f"{way}.{s}_prev"][b : b + 1] for s in states}
            d_state = {s: case.feeds[f"d_{way}.{s}"][b : b + 1] for s in states}
            order = np.arange(n) if way == "fw" else np.arange(n)[::-1]
            if n == 0:
                for s in states:
                    expected[f"{way}.{s}"][b], expected[f"d_{way}.{s}_prev"][b] = state[s], d_state[s]
                continue
            x, d_y = case.feeds["x"][order, b : b + 1], case.feeds["d_y"][order, b : b + 1, half]
            steps, grads = by_formula(forward, gradient, cell.weights, x, state, d_y, d_state, attrs)
            expected["y"][order, b, half] = steps["h"][:, 0]
            expected["d_x"][order, b] += grads["x"][:, 0]
            for s in states:
                expected[f"{way}.{s}"][b] = steps[s][-1, 0]
                expected[f"d_{way}.{s}_prev"][b] = grads[f"{s}_prev"][0]
            for key in cell.weights:
                expected[f"d_{way}.{key}"] += grads[key]
    case.expected = expected
    case.check(exported(layer, case))


# ------------------------------------------------------------------------------------------------------------ streaming
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STREAMING)
def test_steps_make_the_sequence(name, dtype):
    layer = STREAMING[name](dtype)
    g = rng("streaming", name, dtype)
    x = g.uniform(-1, 1, (20, B, I)).astype(dtype)
    first = random_state(layer, g)
    model = exported(layer, streaming=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]
    exact = Case.exactly(layer)
    right, last = exact(*Case.double(x, first))
    limit = FLOAT64 if dtype == "float64" else 8 * EPS[np.dtype(dtype)]
    state = flat(layer, first)
    assert outputs == ["y", *state]
    assert [value.name for value in session.get_inputs()] == ["x", *(f"{part}_prev" for part in state)]
    for t, x_t in enumerate(x):
        results = dict(
            zip(outputs, session.run(None, {"x": x_t, **{f"{k}_prev": v for k, v in state.items()}}), strict=True)
        )
        state = {part: results[part] for part in state}
        assert np.abs(results["y"] - right[t]).max() <= limit * np.abs(right).max()
    for part, value in flat(layer, last).items():
        assert np.abs(state[part] - value).max() <= limit * np.abs(value).max(), part


def test_a_step_on_the_reference():
    layer = STREAMING["Stack"]("float64")
    state = random_state(layer, rng("step"))
    x = rng("x").uniform(-1, 1, (1, B, I))
    feeds = {"x": x[0], **{f"{name}_prev": value for name, value in flat(layer, state).items()}}
    y, last = layer(x, state)
    expected = [y[0], *flat(layer, last).values()]
    for result, right in zip(on_reference(exported(layer, streaming=True), feeds), expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-14)


# ---------------------------------------------------------------------------------------------------- ONNX's own nodes
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "Bidirectional"])
def test_native(name, lengths):
    """One node for a cell, and no loop."""
    layer = LAYERS[name]("float32")
    case = Case(layer, lengths=lengths)
    model = exported(layer, case, loop="native")
    kinds = [inner.op_type for function in model.functions for inner in function.node]
    assert not {"Scan", "Loop"} & set(kinds) and {"LSTM", "GRU"} & set(kinds)
    case.check(model, limit=24 * EPS[np.dtype(np.float32)], dtype=np.float32)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "Bidirectional"])
def test_native_in_float64(name):
    """onnxruntime has no such kernel; onnx.reference has one, which does not look at lengths: a GRU needs none."""
    if ONNX < (1, 23) and name != "GRU":
        pytest.skip("onnx.reference's LSTM gives its cell state since onnx 1.23")
    layer = LAYERS[name]("float64")
    case = Case(layer, lengths=name == "GRU")
    case.check(exported(layer, case, loop="native"), on_reference)


# ------------------------------------------------------------------------------------------------------- other runtimes
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("runtime", "form"),
    [
        ("OpenVINO", {"loop": "loop"}),
        ("OpenVINO", {"loop": "unroll"}),
        ("tract", {"loop": "scan", "static": True}),
        ("tract", {"loop": "unroll"}),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(map(str, part.values())),
)
def test_other_runtimes(runtime, form, train, tmp_path):
    """In the forms that docs/onnx/layers.md names for them."""
    pytest.importorskip(runtime.lower())
    layer = LAYERS["Bidirectional"]("float32")
    case = Case(layer, train=train, reset=True)
    model = exported(layer, case, functions=False, sizes={"T": T, "B": B}, **form)
    limit = 24 * EPS[np.dtype(np.float32)]
    run = RUNTIMES[runtime]
    case.check(model, lambda model, given: run(model, given, tmp_path / "layer.onnx"), limit=limit, dtype=np.float32)


# ------------------------------------------------------------------------------------------------------------ the model
def test_names():
    layer = Stack([Bidirectional(lstm(2, "float32"), gru(2, "float32")), gru(3, "float32", 4)])
    model = exported(layer, train=True, reset=True)
    states = ["0.fw.cs", "0.fw.h", "0.bw.h", "1.h"]
    weights = ["0.fw.w", "0.fw.b", *(f"{p}.{w}" for p in ("0.bw", "1") for w in ("w_ru", "w_c", "b_ru", "b_c"))]
    first = [f"{name}_prev" for name in states]
    d_last = [f"d_{name}" for name in states]
    inputs = ["x", "lengths", "reset", *first, *weights, "d_y", *d_last]
    outputs = ["y", *states, "d_x", *(f"d_{name}" for name in first), *(f"d_{name}" for name in weights)]
    assert [value.name for value in model.graph.input] == inputs
    assert [value.name for value in model.graph.output] == outputs
    assert list(layer.weights) == weights and not model.graph.initializer
    shapes = {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*model.graph.input, *model.graph.output)
    }
    kind = onnx.TensorProto
    assert shapes["x"] == shapes["d_x"] == (kind.FLOAT, ["T", "B", 3])
    assert shapes["y"] == shapes["d_y"] == (kind.FLOAT, ["T", "B", 3])
    assert shapes["lengths"] == (kind.INT64, ["B"])
    assert shapes["reset"] == (kind.BOOL, ["T", "B"])
    assert shapes["0.fw.cs_prev"] == shapes["d_0.fw.cs"] == (kind.FLOAT, ["B", 2])
    assert shapes["1.w_c"] == shapes["d_1.w_c"] == (kind.FLOAT, [7, 3])


def test_the_file_is_the_model(tmp_path):
    layer = LAYERS["Stack"]("float32")
    model = onnx_export.export(layer, tmp_path / "layer.onnx")
    assert onnx.load(tmp_path / "layer.onnx") == model
    assert [path.name for path in tmp_path.iterdir()] == ["layer.onnx"]
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["blockcell.version"] == model.producer_version == __version__
    assert json.loads(facts["blockcell.layer"])["type"] == "Stack"
    assert facts["blockcell.loop"] == "scan"
    assert model.ir_version == 8
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 18), ("blockcell", 1)}


def test_cells_that_are_alike_share_a_function():
    same, other = lstm(4, "float32", 4), lstm(4, "float32", 4, cell_clip=0.5)
    model = exported(Stack([same, same, other, gru(4, "float32", 4)]))
    assert [made.name for made in model.functions] == ["LSTM", "LSTM_2", "GRU"]
    calls = [node.op_type for node in model.graph.node if node.domain == "blockcell"]
    assert calls == ["LSTM", "LSTM", "LSTM_2", "GRU"]


@pytest.mark.parametrize("train", [False, True])
def test_nodes_alone(train):
    layer = LAYERS["Stack"]("float64")
    case = Case(layer, train=train)
    model = exported(layer, case, functions=False)
    assert not model.functions
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    case.check(model)


@pytest.mark.parametrize("opset", [15, 17, 19, 21])
def test_opsets(opset):
    layer = LAYERS["Bidirectional"]("float64")
    case = Case(layer, train=True, reset=True)
    case.check(exported(layer, case, opset=opset))


def test_inference_hands_out_no_more_than_it_must():
    """Without lengths h alone is kept of all steps; with them cs, too; the gates never."""
    for lengths, collected in ((False, 1), (True, 2)):
        model = exported(lstm(4, "float32"), lengths=lengths, functions=False)
        (scan,) = (node for node in model.graph.node if node.op_type == "Scan")
        assert len(scan.output) == 2 + collected


@pytest.mark.parametrize(("lengths", "turn"), [(False, "Slice"), (True, "Gather")])
def test_layers_of_a_backward_direction_are_turned_once(lengths, turn):
    """x on the way in, y on the way out, and nothing in between."""
    tower = Stack([gru(4, "float32"), gru(4, "float32", 4), gru(4, "float32", 4)])
    model = exported(Bidirectional(gru(4, "float32"), tower), lengths=lengths)
    turns = [node for node in model.graph.node if node.op_type == turn]
    assert len(turns) == 2 + (4 if lengths else 0)  # and, with lengths, each cell's final state


def test_nothing_is_left_of_what_is_not_asked_for():
    kinds = {node.op_type for node in exported(lstm(4, "float32"), lengths=False).graph.node}
    assert kinds == {"LSTM"}


# -------------------------------------------------------------------------------------------------------------- on CUDA
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_no_node_falls_back(name, train, loop):
    layer = LAYERS[name]("float16" if loop == "scan" else "float32")
    options = {"train": train, "loop": loop, "reset": True}
    model = exported(layer, sizes={"T": T, "B": B}, **options)
    assert fallbacks(model) == []
    assert sizes_left(model) == []
    if loop == "unroll":
        assert refused_by_cuda_graphs(model) == []


@pytest.mark.parametrize("name", STREAMING)
def test_no_node_of_a_step_falls_back(name):
    model = exported(STREAMING[name]("float32"), streaming=True, sizes={"B": B})
    assert refused_by_cuda_graphs(model) == []


def test_onnx_own_lstm_is_on_the_gpu():
    model = exported(lstm(4, "float32"), loop="native", sizes={"T": T, "B": B})
    assert fallbacks(model) == sizes_left(model) == []


@pytest.mark.cuda
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu and a GPU"
)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu(name, train):
    layer = LAYERS[name]("float64")
    case = Case(layer, train=train, reset=True)
    session = onnx_export.Session(exported(layer, case), provider="cuda")
    running = session._running_for({"T": T, "B": B})
    case.check(session.model, lambda model, feeds: running.run(None, feeds), limit=1e-12)


# ------------------------------------------------------------------------------------------------------------- sessions
@pytest.mark.parametrize("name", LAYERS)
def test_a_session_is_called_like_the_layer(name, tmp_path):
    layer = LAYERS[name]("float64")
    onnx_export.export(layer, tmp_path / "layer.onnx", reset=True)
    g = rng("session", name)
    x, state, reset = g.uniform(-1, 1, (T, B, I)), random_state(layer, g), g.random((T, B)) < 0.3
    session = onnx_export.Session(str(tmp_path / "layer.onnx"))
    for given in ({}, {"state": state}, {"state": None, "lengths": LENGTHS.tolist(), "reset": reset}):
        result = session(x=x, **given)
        y, last = layer(x, given.get("state"), lengths=given.get("lengths"), reset=given.get("reset"))
        np.testing.assert_allclose(result.y, y, rtol=0, atol=1e-14)
        found = flat(layer, result.state)
        for part, right in flat(layer, last).items():
            np.testing.assert_allclose(found[part], right, rtol=0, atol=1e-14, err_msg=part)


@pytest.mark.parametrize("name", LAYERS)
def test_a_session_that_trains(name):
    layer = LAYERS[name]("float64")
    g = rng("training", name)
    x, state, d_last = g.uniform(-1, 1, (T, B, I)), random_state(layer, g), random_state(layer, g)
    session = onnx_export.Session(onnx_export.export(layer, None, train=True))
    y, _, tape = layer.forward(x, state)
    d_y = g.uniform(-1, 1, y.shape)
    result = session(x=x, state=state, weights=layer.weights, d_y=d_y, d_state=d_last)
    assert result._fields == ("y", "state", "d_x", "d_state", "grads")
    d_x, d_first, grads = layer.backward(tape, d_y, d_last)
    np.testing.assert_allclose(result.d_x, d_x, rtol=0, atol=1e-13)
    assert list(result.grads) == list(grads)
    found = flat(layer, result.d_state) | result.grads
    for part, right in (flat(layer, d_first) | grads).items():
        np.testing.assert_allclose(found[part], right, rtol=0, atol=1e-13, err_msg=part)


def test_a_session_takes_a_step():
    layer = lstm(4, "float32")
    session = onnx_export.Session(onnx_export.export(layer, None, streaming=True))
    x = rng("step").uniform(-1, 1, (T, B, I)).astype(np.float32)
    state = None
    for x_t in x:
        y, state = session(x=x_t, state=state)
    right, last = layer(x)
    assert type(state) is LSTMState
    np.testing.assert_allclose(y, right[-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(state.cs, last.cs, rtol=0, atol=1e-6)


X = np.zeros((4, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("given", "exception", "message"),
    [
        ({}, TypeError, "Bidirectional: x missing; expected x, state, lengths"),
        ({"x": X, "inputs": X}, TypeError, "Bidirectional: inputs unknown; expected x, state, lengths"),
        ({"x": X, "reset": X}, TypeError, "Bidirectional: reset unknown; expected x, state, lengths"),
        ({"x": X[0]}, ValueError, "x has shape (2, 3); expected (T, B, 3)"),
        ({"x": X[:, :, :2]}, ValueError, "x has shape (4, 2, 2); expected (T, B, 3)"),
        ({"x": X[:0]}, ValueError, "x has no steps; expected at least one"),
        ({"x": X.astype(np.float64)}, TypeError, "x has dtype float64; expected float32"),
        ({"x": X, "lengths": [1]}, ValueError, "lengths has shape (1,); expected (2,), with B=2 from x"),
        ({"x": X, "lengths": [1, 5]}, ValueError, "lengths is [1 5]; expected 0 to T = 4"),
        ({"x": X, "lengths": [-1, 4]}, ValueError, "lengths is [-1  4]; expected 0 to T = 4"),
        ({"x": X, "lengths": [1.0, 2.0]}, TypeError, "lengths has dtype float64; expected int64"),
        ({"x": X, "state": X}, TypeError, "state is of type ndarray; expected (fw, bw) or None"),
        ({"x": X, "state": (None,)}, ValueError, "state has 1 parts; expected (fw, bw)"),
        ({"x": X, "state": (None, (X[0],))}, ValueError, "state.bw.h has shape (2, 3); expected (2, 5), with B=2"),
    ],
)  # fmt: skip
def test_bad_calls(given, exception, message):
    session = onnx_export.Session(onnx_export.export(LAYERS["Bidirectional"]("float32"), None))
    with pytest.raises(exception, match=re.escape(message)):
        session(**given)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "LSTM: weights missing; expected x, state, lengths, weights, d_y, d_state"),
        ([1], "LSTM: weights is of type list; expected a dict with w, b"),
        ({"w": X}, "LSTM: weights has no b; expected w, b"),
        ({"w": X, "b": X, "c": X}, "LSTM: weights has c; expected w, b"),
    ],
)
def test_bad_weights(weights, message):
    session = onnx_export.Session(onnx_export.export(lstm(4, "float32"), None, train=True))
    with pytest.raises(TypeError, match=re.escape(message)):
        session(x=X, weights=weights)


# ------------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": "while"}, "export: loop is 'while'; expected one of scan, unroll, native, loop"),
        ({"loop": "unroll"}, "export: loop='unroll' writes every step out and so needs sizes['T']"),
        ({"loop": "native"}, "export: loop='native' is not exact: ONNX's clip bounds what goes into the gates, not "
         "the cell state; expected a cell_clip of 0, not 0.3, or another loop"),
        ({"loop": "native", "dtype": "float16"}, "export: loop='native' is not exact: ONNX's clip"),
        ({"loop": "native", "streaming": True}, "export: loop='native' is not possible: a cell has no loop"),
        ({"loop": "native", "train": True}, "export: loop='native' is not possible: ONNX's LSTM has no gradient"),
        ({"dtype": "int8"}, "export: dtype is 'int8'; expected float32, float64 or float16"),
        ({"sizes": {"H": 4}}, "export: sizes has 'H'; expected the letters T, B"),
        ({"sizes": {"B": -1}}, "export: sizes['B'] is -1; expected an integer >= 0 or None, any size"),
        ({"sizes": {"T": 0}}, "export: sizes['T'] is 0; expected at least 1"),
        ({"sizes": {"B": 0}}, "export: sizes['B'] is 0; expected at least 1, or None"),
        ({"opset": 14}, "export: opset is 14; expected an integer from 15 to"),
        ({"streaming": True, "train": True}, "export: streaming and train are both True; expected one"),
        ({"streaming": True, "state": False}, "export: state is False; expected True, as a step needs"),
        ({"streaming": True, "reset": True}, "export: reset is True; expected False, as a step starts anew from"),
    ],
)  # fmt: skip
def test_mistakes(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        onnx_export.export(lstm(4, "float32", cell_clip=0.3), tmp_path / "layer.onnx", **options)
    assert not [*tmp_path.iterdir()]


def test_native_refusals_that_depend_on_the_layer():
    plain = lstm(4, "float32")
    with pytest.raises(
        ValueError, match="export: loop='native' is not possible with reset; expected 'scan', 'unroll' or"
    ):
        onnx_export.export(plain, None, loop="native", reset=True)
    with pytest.raises(ValueError, match="expected float32 or float64"):
        onnx_export.export(plain, None, loop="native", dtype="float16")
    with pytest.raises(ValueError, match=r"export: 1\.bw: loop='native' is not exact"):
        clipped = lstm(4, "float32", 4, cell_clip=0.3)
        onnx_export.export(Stack([plain, Bidirectional(lstm(4, "float32", 4), clipped)]), None, loop="native")
    with pytest.raises(ValueError, match="loop='native' of float64 does not run on onnxruntime's CPU provider"):
        onnx_export.Session(onnx_export.export(plain, None, loop="native", dtype="float64"))


@pytest.mark.parametrize("what", ["LSTM", None, np.zeros(3), LSTM])
def test_what_is_no_layer(what):
    with pytest.raises(TypeError, match=r"export: layer is of type .*; expected an LSTM, GRU, Bidirectional or Stack"):
        onnx_export.export(what, None)


def test_backward_directions_do_not_stream():
    layer = LAYERS["Bidirectional"]("float32")
    with pytest.raises(
        TypeError, match="export: layer is a Bidirectional, which begins at the last step; it cannot be"
    ):
        onnx_export.export(layer, None, streaming=True)
    with pytest.raises(TypeError, match=r"export: 0 is a Bidirectional, which begins at the last step"):
        onnx_export.export(Stack([layer]), None, streaming=True)


def test_paths_that_cannot_be_written(tmp_path):
    layer = lstm(4, "float32")
    (tmp_path / "layer.onnx").write_bytes(b"before")
    with pytest.raises(TypeError, match="export: path is 3; expected a path or None"):
        onnx_export.export(layer, 3)
    with pytest.raises(FileNotFoundError) as caught:
        onnx_export.export(layer, tmp_path / "missing" / "layer.onnx")
    assert caught.value.filename == str(tmp_path / "missing" / "layer.onnx")
    with pytest.raises(OSError):
        onnx_export.export(layer, tmp_path)
    with pytest.raises(ValueError):
        onnx_export.export(layer, tmp_path / "layer.onnx", loop="while")
    assert [path.name for path in tmp_path.iterdir()] == ["layer.onnx"]
    assert (tmp_path / "layer.onnx").read_bytes() == b"before"


def test_more_than_a_file_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["onnx_export.export"], "LARGEST", 1000)
    layer = lstm(4, "float32")
    size = sum(weights.nbytes for weights in layer.weights.values())
    onnx_export.export(layer, tmp_path / "a.onnx")
    onnx_export.export(layer, tmp_path / "a.onnx", dtype="float64", train=True)
    with pytest.raises(ValueError, match=f"the layer has {2 * size} bytes of weights; a model holds less than 1000"):
        onnx_export.export(layer, tmp_path / "b.onnx", dtype="float64")
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
