"""A layer's ONNX model gives, on onnxruntime and onnx.reference, the layer's results and, row by row, the formulas'.

What a model is made of, sessions, and what `export` refuses have files of their own: `test_onnx_export_*.py`.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from cases import rng
from export_cases import (
    DEPTH,
    DTYPES,
    LAYERS,
    STREAMING,
    B,
    Case,
    I,
    T,
    dense,
    drawn,
    exported,
    flat,
    gru,
    lstm,
    random_state,
    rnn,
)
from graphs import EPS, FLOAT64, LOOPS, ONNX, on_onnxruntime, on_reference
from layer_cases import OPTIONS, with_option
from runtimes import RUNTIMES

import onnx_export
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack
from blockcell.activations import PARAMETERS
from onnx_export.cells.body import CELLS as OWN

# ------------------------------------------------------------------------------------------------------------- results
FORMS = [
    {"lengths": True},
    {"lengths": True, "reset": True},
    {"lengths": False, "state": False},
    {"lengths": False, "reset": True},
]


@pytest.mark.meet(2)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(f"{k}={v}" for k, v in form.items()))
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_layer(name, loop, form, train):
    """And its gradients."""
    layer = LAYERS[name]("float64")
    case = Case(layer, train=train, **form)
    case.check(exported(layer, case, loop=loop))


@pytest.mark.parametrize(("cell", "name"), OPTIONS)
def test_no_option_of_a_cell_is_dropped(cell, name):
    case = Case(with_option(cell, name, "float64")[0])
    case.check(exported(case.layer, case))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_reference(name, train):
    """Without functions, with lengths and resets, and with neither lengths nor states."""
    layer = LAYERS[name]("float64")
    for form in FORMS[1:3]:
        case = Case(layer, train=train, **form)
        case.check(exported(layer, case, functions=False), on_reference)


@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_other_dtypes(name, train, dtype):
    """Against float64, with the same inputs and weights. Every layer of a stack adds its own error."""
    layer = LAYERS[name](dtype)
    case = Case(layer, reset=True, train=train)
    limit = (24 if dtype == "float32" else 8) * EPS[np.dtype(dtype)] * DEPTH.get(name, 1)
    case.check(exported(layer, case), limit=limit, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_than_the_layers(dtype):
    """The weights are converted to it."""
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


def cells_of(inputs, outputs, make, **options):
    both = Bidirectional(*(make(outputs, "float64", inputs, **options) for _ in range(2)))
    return Stack([both, make(outputs, "float64", 2 * outputs, **options)])


def dense_layers_of(inputs, outputs, last):
    below = dense(inputs, "float64", 2, activation="sigmoid")
    head = dense(outputs, "float64", 2, activation="tanh", last=last)
    return Stack([gru(2, "float64", inputs), below, gru(2, "float64", inputs), head])


@pytest.mark.meet(2)
@pytest.mark.parametrize(("inputs", "outputs", "batch"), [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("make_layer", "options"),
    [
        (cells_of, {"make": lstm}),
        (cells_of, {"make": gru}),
        (cells_of, {"make": gru, "reset_after": True}),
        *((dense_layers_of, {"last": last}) for last in (False, True, "ends")),
    ],
)
def test_sizes_of_zero(make_layer, options, train, inputs, outputs, batch):
    layer = make_layer(inputs, outputs, **options)
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
NUMBERS = {"leaky_relu": (0.3,), "elu": (0.7,), "hard_sigmoid": (0.3, 0.4)}  # others than the defaults
OTHERS = [(name, *NUMBERS.get(name, ())) for name in PARAMETERS]


@pytest.mark.meet(1)
@pytest.mark.parametrize("activation", OTHERS, ids=lambda activation: activation[0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LSTM, {}),
        (LSTM, {"use_peephole": True}),
        (LSTM, {"use_peephole": True, "coupled": True}),
        (LSTM, {"proj_size": 3, "proj_clip": 0.2}),
        (LSTM, {"use_peephole": True, "coupled": True, "proj_size": 6}),
        (GRU, {}),
        (GRU, {"reset_after": True}),
        (RNN, {}),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else part.__name__,
)
def test_equals_the_formulas(kind, options, activation):
    """Both directions of a layer, row by row, since the formulas know no lengths; every activation in each of its
    places. Small weights, as some activations grow without bound."""
    attrs = {"forget_bias": 0.7, "cell_clip": 0.5} if kind is LSTM else {}
    for place in ("activation",) if kind is RNN else ("activation", "recurrent_activation"):
        given = attrs | options | {"dtype": "float64", place: activation}
        both = Bidirectional(*(drawn(kind.init(I, 4, seed=seed, **given)) for seed in (1, 2)))
        both.set_weights(**{name: 0.1 * array for name, array in both.weights.items()})
        compare_with_formulas(both)


def compare_with_formulas(layer):
    case = Case(layer, train=True)
    case.expect_formulas()
    case.check(exported(layer, case))


# ------------------------------------------------------------------------------------------------------------ streaming
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STREAMING)
def test_steps_make_the_sequence(name, dtype):
    layer = STREAMING[name](dtype)
    g = rng("streaming", name, dtype)
    x, state = g.uniform(-1, 1, (20, B, I)).astype(dtype), random_state(layer, g)
    model, names = exported(layer, streaming=True), [*flat(layer, state)]
    assert [value.name for value in model.graph.input] == ["x", *(f"{part}_prev" for part in names)]
    assert [value.name for value in model.graph.output] == ["y", *names]
    stream = Case.exactly(layer).stream(B)
    double_x, stream.state = Case.double(x, state)
    right = {"y": stream.run(double_x)} | flat(layer, stream.state)
    session, rows = onnx_export.Session(model), []
    for x_t in x:
        y, state = session(x=x_t, state=state)
        rows.append(y)
    found = {"y": np.stack(rows)} | flat(layer, state)
    limit = FLOAT64 if dtype == "float64" else 8 * EPS[np.dtype(dtype)]
    assert type(state) is type(stream.state)
    for part, array in right.items():
        assert np.abs(found[part] - array).max() <= limit * np.abs(array).max(), part


@pytest.mark.parametrize("form", [*({"loop": loop} for loop in LOOPS), {"provider": "webgpu"}])
@pytest.mark.parametrize("name", [name for name in STREAMING if name != "Dense"])
def test_a_step_has_no_loop(name, form):
    """So every form is the same, and needs no number of steps."""
    layer = STREAMING[name]("float32")
    model = onnx_export.export(layer, None, streaming=True, **form)
    assert model.graph == onnx_export.export(layer, None, streaming=True).graph
    kinds = {node.op_type for made in model.functions for node in made.node}
    assert "Gemm" in kinds and not {"Scan", "Loop", "If"} & kinds
    where = {"Stack": "0: ", "Classifier": "1: ", "Variants": "0: "}.get(name, "")
    with pytest.raises(ValueError, match=f"^export: {where}loop='native' is not possible: a cell has no loop"):
        onnx_export.export(layer, None, streaming=True, loop="native")


# ---------------------------------------------------------------------------------------------------- ONNX's own nodes
NATIVE = {
    **{name: LAYERS[name] for name in ("LSTM", "GRU", "GRU after", "Bidirectional")},
    "RNN": lambda dtype: rnn(4, dtype),
    "coupled": lambda dtype: lstm(4, dtype, coupled=True, use_peephole=True, forget_bias=0.7),
    "LSTM with all": lambda dtype: lstm(4, dtype, use_peephole=True, forget_bias=0.7, gate_order="ifco"),
    "without peepholes": lambda dtype: Bidirectional(
        Stack([lstm(4, dtype, forget_bias=0.7, coupled=True), gru(3, dtype, 4)]),
        Stack([lstm(3, dtype, gate_order="ifco"), gru(3, dtype, 3, reset_after=True)]),
    ),
    **{name: LAYERS[name] for name in ("Classifier", "Both ends", "Dense within")},
}
UNUSUAL = {  # activations that onnx.reference does not have
    "coupled, unusual": lambda dtype: lstm(
        4, dtype, coupled=True, use_peephole=True, recurrent_activation=("hard_sigmoid", 0.25, 0.5), activation="elu"
    ),
}


@pytest.mark.meet(2)
@pytest.mark.parametrize("sizes", [{}, {"T": T, "B": B}], ids=["free", "fixed"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("name", NATIVE | UNUSUAL)
def test_native(name, lengths, state, sizes):
    """One node for a cell, in the graph itself, and no loop."""
    layer = (NATIVE | UNUSUAL)[name]("float32")
    case = Case(layer, lengths=lengths, state=state)
    model = exported(layer, case, loop="native", sizes=sizes)
    assert not model.functions and all(node.domain == "" for node in model.graph.node)
    kinds = [node.op_type for node in model.graph.node]
    assert not {"Scan", "Loop"} & set(kinds)
    assert sum(map(kinds.count, OWN)) == sum(not isinstance(c, Dense) for c in layer._leaves().values())
    limit = 24 * EPS[np.dtype(np.float32)] * DEPTH.get(name, 2 if name == "without peepholes" else 1)
    case.check(model, limit=limit, dtype=np.float32)
    session = onnx_export.Session(model)
    found = case.by_name(session(**case.arguments))
    case.check(model, lambda *_: found.values(), limit=limit, dtype=np.float32)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("name", NATIVE)
def test_native_in_float64(name, state):
    """On onnx.reference, because onnxruntime has no such kernel.

    Its nodes ignore lengths. The model of a GRU or RNN is right all the same; the others are tried without lengths.
    """
    no_lstm = name.startswith(("GRU", "RNN"))
    if ONNX < (1, 23) and not no_lstm:
        pytest.skip("onnx.reference's LSTM gives its cell state since onnx 1.23")
    layer = NATIVE[name]("float64")
    case = Case(layer, lengths=no_lstm, state=state)
    case.check(exported(layer, case, loop="native"), on_reference)


# ------------------------------------------------------------------------------------------------------- other runtimes
@pytest.mark.meet(2)
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
@pytest.mark.parametrize("name", ["Bidirectional", "Classifier", "Both ends", "Dense within", "Projected", "Variants"])
def test_other_runtimes(name, runtime, form, train, tmp_path):
    """In the forms that docs/onnx/layers.md names for them."""
    pytest.importorskip(runtime.lower())
    layer = LAYERS[name]("float32")
    case = Case(layer, train=train, reset=True)
    model = exported(layer, case, functions=False, sizes={"T": T, "B": B}, **form)
    limit = 24 * EPS[np.dtype(np.float32)] * DEPTH.get(name, 1)
    run = RUNTIMES[runtime]
    case.check(model, lambda model, given: run(model, given, tmp_path / "layer.onnx"), limit=limit, dtype=np.float32)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("runtime", "lengths"),
    [("OpenVINO", True), ("OpenVINO", False), ("tract", False)],
    ids=["OpenVINO lengths", "OpenVINO", "tract"],
)
def test_native_on_other_runtimes(runtime, lengths, state, tmp_path):
    pytest.importorskip(runtime.lower())
    layer = NATIVE["without peepholes"]("float32")
    case = Case(layer, lengths=lengths, state=state)
    model = exported(layer, case, functions=False, sizes={"T": T, "B": B}, loop="native")
    limit, run = 24 * EPS[np.dtype(np.float32)] * 2, RUNTIMES[runtime]  # a stack of two
    case.check(model, lambda model, given: run(model, given, tmp_path / "layer.onnx"), limit=limit, dtype=np.float32)
