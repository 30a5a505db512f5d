"""Layers from and to ONNX: onnx.reference, onnxruntime, ONNX's own test cases, and the refusal of all other nodes."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import onnx
import pytest
from convert_cases import (
    B,
    H,
    I,
    T,
    assert_same,
    gru,
    lstm,
    made,
    onnx_graph,
    onnx_weights,
    rng,
    rnn,
    warned,
)
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from blockcell import FormatError, convert, formulas
from blockcell.activations import PARAMETERS
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Stack


def onnx_model(node, initializers, dtype=np.float64):
    """Make a model of one node; its inputs are those of the node that are no initializers."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def info(name):
        return helper.make_tensor_value_info(name, kind, [None] * (4 if name.endswith("Y") else 3))

    return helper.make_model(
        helper.make_graph(
            [node],
            "one",
            [info(name) for name in node.input if name and name not in initializers],
            [info(name) for name in node.output],
            initializer=[numpy_helper.from_array(array, name) for name, array in initializers.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )


def onnx_y(y):
    """Reshape ONNX's y [T,D,B,H] to [T,B,DH]."""
    return np.concatenate(list(y.swapaxes(0, 1)), axis=-1)


LAYERS = {
    "lstm": lambda g, dtype: lstm(g, dtype),
    "lstm forget_bias": lambda g, dtype: lstm(g, dtype, forget_bias=1.0, gate_order="ifco"),
    "lstm peephole": lambda g, dtype: lstm(g, dtype, peephole=True),
    "gru": gru,
    "bidirectional lstm": lambda g, dtype: Bidirectional(lstm(g, dtype), lstm(g, dtype, forget_bias=0.5)),
    "bidirectional, one peephole": lambda g, dtype: Bidirectional(lstm(g, dtype), lstm(g, dtype, peephole=True)),
    "bidirectional gru": lambda g, dtype: Bidirectional(gru(g, dtype), gru(g, dtype)),
    "gru reset after": lambda g, dtype: gru(g, dtype, reset_after=True),
    "bidirectional gru reset after": lambda g, dtype: Bidirectional(*(gru(g, dtype, reset_after=True) for _ in "fb")),
    "reverse lstm": lambda g, dtype: lstm(g, dtype, reverse=True),
    "reverse gru": lambda g, dtype: gru(g, dtype, reverse=True),
    "reverse gru reset after": lambda g, dtype: gru(g, dtype, reset_after=True, reverse=True),
    "rnn": rnn,
    "reverse rnn": lambda g, dtype: rnn(g, dtype, reverse=True),
    "bidirectional rnn": lambda g, dtype: Bidirectional(rnn(g, dtype), rnn(g, dtype)),
}
OTHERS = {  # those that onnx.reference does not compute
    "coupled lstm": lambda g, dtype: lstm(g, dtype, coupled=True, forget_bias=0.5),
    "coupled lstm peephole": lambda g, dtype: lstm(g, dtype, coupled=True, peephole=True),
    "coupled lstm hard_sigmoid": lambda g, dtype: lstm(
        g, dtype, coupled=True, recurrent_activation=("hard_sigmoid", 0.25, 0.375)
    ),
    "bidirectional coupled lstm": lambda g, dtype: Bidirectional(*(lstm(g, dtype, coupled=True) for _ in "fb")),
    "bidirectional rnn, two activations": lambda g, dtype: Bidirectional(
        rnn(g, dtype, activation="relu"), rnn(g, dtype, activation=("leaky_relu", 0.125))
    ),
    "lstm softsign": lambda g, dtype: lstm(g, dtype, activation="softsign", recurrent_activation="softplus"),
    "reverse gru elu": lambda g, dtype: gru(g, dtype, reverse=True, activation=("elu", 0.5)),
    "gru linear": lambda g, dtype: gru(g, dtype, reset_after=True, activation="linear"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_onnx_reference(name):
    g = rng()
    layer, x = LAYERS[name](g, np.float64), g.standard_normal((T, B, I))
    node, initializers = convert.to_onnx(layer)
    model = onnx_model(node, initializers)
    onnx.checker.check_model(model, full_check=True)
    y = ReferenceEvaluator(model).run(None, {"rnn_X": x})[0]
    np.testing.assert_allclose(onnx_y(y), layer(x)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [*LAYERS, *OTHERS])
def test_onnxruntime(name):
    """With initial states; Y_h and Y_c are compared too."""
    onnxruntime = pytest.importorskip("onnxruntime")
    g = rng()
    layer = (LAYERS | OTHERS)[name](g, np.float32)
    node, initializers = convert.to_onnx(layer, name="a")
    directions = 2 if isinstance(layer, Bidirectional) else 1
    places = ["h", "c"][: len(node.output) - 1]
    node.input.extend([""] * (len(places) + 5 - len(node.input)))
    x = g.standard_normal((T, B, I)).astype(np.float32)
    states = {place: g.standard_normal((directions, B, H)).astype(np.float32) for place in places}
    for k, place in enumerate(places):
        node.input[5 + k] = place
    model = onnx_model(node, initializers, np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"a_X": x} | states)
    parts = [tuple(states[place][d] for place in places[::-1]) for d in range(directions)]
    y, last = layer(x, parts if directions == 2 else parts[0])
    states_by_place = [
        np.stack([getattr(part, {"h": "h", "c": "cs"}[place]) for part in (last if directions == 2 else [last])])
        for place in places
    ]
    for result, expected in zip([onnx_y(theirs[0]), *theirs[1:]], [y, *states_by_place], strict=True):
        # Errors go by the largest number: a cell whose activation is unbounded reaches 13.
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", [*LAYERS, *OTHERS])
def test_onnx_round_trip(name, dtype):
    layer = (LAYERS | OTHERS)[name](rng(), dtype)
    once = convert.from_onnx(*convert.to_onnx(layer))
    assert_same(once, convert.from_onnx(onnx_model(*convert.to_onnx(once), dtype)))
    x = rng().standard_normal((T, B, I)).astype(dtype)
    np.testing.assert_allclose(once(x)[0], layer(x)[0], rtol=0, atol=8 * np.finfo(dtype).eps)


def onnx_cases():
    """Return the recurrent cases of ONNX's backend tests by name: the node, and its inputs and outputs by name."""
    cases = {}

    def expect(node, inputs, outputs, name):
        inputs_by_name = dict(zip([key for key in node.input if key], inputs, strict=True))
        cases[name] = node, inputs_by_name, dict(zip([key for key in node.output if key], outputs, strict=True))

    with np.errstate(invalid="ignore"):  # dot has warned in code of onnx, of numbers that are finite
        for kind in ("LSTM", "GRU", "RNN"):
            module = importlib.import_module(f"onnx.backend.test.case.node.{kind.lower()}")
            exporter = getattr(module, kind)
            theirs, module.expect = module.expect, expect
            try:
                for name in dir(exporter):
                    if name.startswith("export"):
                        getattr(exporter, name)()
            finally:
                module.expect = theirs
    return cases


ONNX_CASES = onnx_cases()


def test_onnx_cases_are_there():
    forms = ["batchwise", "bidirectional", "defaults", "reverse", "with_initial_bias"]
    expected = {f"test_{kind}_{form}" for kind in ("lstm", "gru", "simple_rnn") for form in forms}
    expected |= {"test_lstm_with_peepholes", "test_gru_seq_length", "test_rnn_seq_length"}
    assert expected <= ONNX_CASES.keys()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ONNX_CASES)
def test_onnx_case(name, again):
    """Also from what to_onnx makes of the layer again."""
    node, inputs, expected = ONNX_CASES[name]
    weights = {key: value for key, value in inputs.items() if key in "WRBP"}
    if "batchwise" in name:
        with pytest.raises(
            ConversionError, match="has layout=1, the batch first, which onnxruntime does not compute eit"
        ):
            convert.from_onnx(node, weights)
        return
    layer = convert.from_onnx(node, weights)
    if again:
        layer = convert.from_onnx(*convert.to_onnx(layer))
    state = tuple(inputs[key][0] for key in ("initial_c", "initial_h") if key in inputs) or None
    y, last = layer(inputs["X"], state, lengths=inputs.get("sequence_lens"))
    parts = last if isinstance(layer, Bidirectional) else [last]
    ours = {
        "Y": np.stack(np.split(y, len(parts), axis=-1), axis=1),
        "Y_h": np.stack([part.h for part in parts]),
        "Y_c": np.stack([getattr(part, "cs", part.h) for part in parts]),
    }
    for key, value in expected.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def onnx_node(kind="LSTM", inputs=("X", "W", "R", "B"), **attributes):
    """Make a recurrent node."""
    return helper.make_node(kind, inputs, ["Y"], name="a", **attributes)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            onnx_node("RNN", clip=1e38),
            r"clip=1e\+38, which limits .* activations; the cell_clip of an LSTM here limits",
        ),
        (onnx_node("RNN", clip=float("nan")), "clip=nan, which limits"),
        (onnx_node(input_forget=1, activations=["Relu", "Tanh", "Tanh"]), "input_forget=1 and the activation 'relu'"),
        (onnx_node("GRU", input_forget=1), "has the attribute 'input_forget', which ONNX does not know of its kind"),
        (onnx_node(coupled=1), "has the attribute 'coupled', which ONNX does not know"),
        (onnx_node(activations=["Sigmoid", "Relu", "Tanh"]), "'Relu'.*here both are the layer's activation"),
        (onnx_node("GRU", activations=["Sigmoid", "Gelu"]), "has the activation 'Gelu'; expected one of Affine, Elu"),
        (onnx_node("RNN", activations=["Affine"]), "has the activation Affine with no alpha"),
        (
            onnx_node("RNN", activations=["Affine"], activation_alpha=[2.0], activation_beta=[0.5]),
            "Affine with alpha=2, beta=0.5, and layers have none that is equal",
        ),
        (onnx_node("RNN", activations=["LeakyRelu"], activation_alpha=[-1.0]), "LeakyRelu with alpha=-1"),
        (onnx_node("RNN", activations=["Elu"], activation_alpha=[float("inf")]), "Elu with alpha=inf"),
        (onnx_node("RNN", activations=["LeakyRelu"], activation_alpha=[0.0]), "LeakyRelu with alpha=0"),
        (onnx_node(domain="com.microsoft"), "com.microsoft::LSTM"),
        (
            onnx_node(inputs=("X", "V", "R", "B")),
            r"its W 'V' \(input\[1\]\) is neither among the initializers nor made",
        ),
        (
            onnx_node(inputs=("X", "V", "R", "C")),
            r"its W 'V' \(input\[1\]\) and B 'C' \(input\[3\]\) are neither among the initializers nor .* the arrays:"
            r" convert.from_onnx\(node, {'V': ..., 'C': ..., ...}\)",
        ),
    ],
)
def test_onnx_refused(node, message):
    with pytest.raises(ConversionError, match=f"^from_onnx: .*{message}"):
        convert.from_onnx(node, onnx_weights(node.op_type))


def onnx_with_states(makers, initializers, inputs=(), kind="LSTM", places=("", "h", "c")):
    """Make a model whose initial states come from these nodes."""
    places = places[: 3 if kind == "LSTM" else 2]
    model = onnx_model(onnx_node(kind, ("X", "W", "R", "B", *places)), onnx_weights(kind) | initializers)
    for graph_input in list(model.graph.input):
        if graph_input.name in ("h", "c", "lens") and graph_input.name not in inputs:
            model.graph.input.remove(graph_input)
    nodes = [*makers, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


NOUGHT = numpy_helper.from_array(np.zeros(1))
SHAPE = {"shape": np.array([1, B, H])}


H0 = "initial_h 'h' (input[5])"
C0 = "initial_c 'c' (input[6])"


@pytest.mark.parametrize(
    ("makers", "initializers", "places"),
    [
        ([], {}, f"{H0} and {C0}"),
        ([], {"c": np.zeros((1, B, H))}, H0),
        ([], {"h": np.zeros((1, B, H))}, C0),
        ([made("ConstantOfShape", ["shape"], "h"), made("Exp", ["h"], "c")], SHAPE, C0),
        (
            [made("ConstantOfShape", ["shape"], "z"), made("Concat", ["z", "X"], "h", axis=0)],
            SHAPE | {"c": np.zeros((1, B, H))},
            "initial_h 'h' (input[5], of 'X' and 'z')",
        ),
        (
            [made("Slice", ["s", "0", "1"], "h"), made("Slice", ["s", "1", "2"], "c")],
            {str(k): np.array([k]) for k in range(3)},
            "initial_h 'h' (input[5], of 's') and initial_c 'c' (input[6], of 's')",
        ),
    ],
)
def test_onnx_states_that_are_the_callers(makers, initializers, places):
    """They are not part of the layer; which they are is said, and how a call has them."""
    model = onnx_with_states(makers, initializers)
    expected = convert.from_onnx(onnx_node(), onnx_weights())
    is_valid = all(node.op_type != "Concat" for node in makers)  # of z [1,B,H] and X [T,B,I], a model that never runs
    for options in ({}, {"name": "a"}):
        with pytest.warns(UserWarning) as record:
            assert_same(convert.from_onnx(model, **options, check=is_valid), expected)
        found = [str(each.message) for each in record if "left out" not in str(each.message)]
        assert found == [
            f"from_onnx: left to the caller: LSTM 'a' has {places}. Here a layer starts from zeros unless its call has"
            " state="
        ]
        assert {each.filename for each in record} == {__file__}


def test_onnx_lengths_that_are_the_callers():
    cast = made("Cast", ["x_lens"], "lens", to=onnx.TensorProto.INT32)
    model = onnx_with_states([cast], {}, places=("lens", "", ""))
    for each in (model, onnx_with_states([], {"lens": np.int32([T, 2])}, places=("lens", "", ""))):
        layer, text = warned(convert.from_onnx, each)
        assert_same(layer, convert.from_onnx(onnx_node(), onnx_weights()))
        source = ", of 'x_lens'" if each is model else ""
        assert text == (
            f"from_onnx: left to the caller: LSTM 'a' has sequence_lens 'lens' (input[4]{source}). Here a layer"
            f" takes every step unless its call has lengths="
        )


@pytest.mark.parametrize(
    ("makers", "initializers", "inputs"),
    [
        ([], {}, ("h", "c")),
        ([], {"h": np.zeros((1, B, H))}, ("c",)),
        ([made("ConstantOfShape", ["shape"], name) for name in "hc"], SHAPE, ()),
        ([made("ConstantOfShape", ["shape"], name, value=NOUGHT) for name in "hc"], SHAPE, ()),
        ([made("Constant", [], "z", value=NOUGHT), *(made("Expand", ["z", "shape"], n) for n in "hc")], SHAPE, ()),
        (
            [made("Cast", ["z"], "h", to=11), made("Concat", ["row", "row"], "c", axis=1)],
            {"z": np.zeros((1, B, H)), "row": np.zeros((1, 1, H))},
            (),
        ),
    ],
)
def test_onnx_states_that_are_given_or_zero(makers, initializers, inputs):
    """Zeros may be computed, as exporters do it to give them the size of the batch."""
    model = onnx_with_states(makers, initializers, inputs)
    assert_same(convert.from_onnx(model), convert.from_onnx(onnx_node(), onnx_weights()))


@pytest.mark.parametrize("name", [None, "b"])
@pytest.mark.parametrize(
    ("producer", "options", "warns"),
    [
        ("pytorch", {"linear_before_reset": 0}, True),
        ("pytorch", {}, True),
        ("pytorch", {"linear_before_reset": 1}, False),
        ("tf2onnx", {}, False),
    ],
)
def test_onnx_gru_that_pytorch_exported(producer, options, warns, name):
    """PyTorch's GRU resets after the product; some versions of its exporter write that it does not."""
    nodes = [
        helper.make_node("GRU", ["X", "W", "R", "B"], ["Y"], name="a", linear_before_reset=1),
        helper.make_node("GRU", ["X2", "W", "R", "B"], ["Y2"], name="b", **options),
        helper.make_node("LSTM", ["X3", "V", "S"], ["Y3"], name="c"),
    ]
    weights = onnx_weights("GRU") | {"V": onnx_weights()["W"], "S": onnx_weights()["R"]}
    graph = onnx_graph(nodes, weights, ["Y", "Y2", "Y3"], inputs=["X", "X2", "X3"])
    model = helper.make_model(graph, producer_name=producer)
    expected = convert.from_onnx(nodes[1], weights)
    if warns:
        found, text = warned(convert.from_onnx, model, name=name)
        assert text.startswith("from_onnx: PyTorch exported GRU 'b' with linear_before_reset=0, the reset gate before")
        assert text.endswith("set the attribute to 1, or use convert.from_torch(module)")
    else:
        found = convert.from_onnx(model, name=name)
    assert_same(found if name else found["b"], expected)
    assert expected.reset_after == (options == {"linear_before_reset": 1})
    assert convert.from_onnx(model, name="a").reset_after


def test_onnx_defaults_spelled_out():
    """Attributes and inputs that have their default values change nothing."""
    weights = onnx_weights() | {"zeros": np.zeros((1, B, H))}
    expected = convert.from_onnx(onnx_node(), weights)
    spelled = {"activations": ["sigmoid", "Tanh", "Tanh"], "input_forget": 0, "layout": 0, "direction": "forward"}
    assert_same(expected, convert.from_onnx(onnx_node(**spelled, hidden_size=H, domain="ai.onnx"), weights))
    assert_same(expected, convert.from_onnx(onnx_node(inputs=("X", "W", "R", "B", "lens", "zeros", "c")), weights))
    without = convert.from_onnx(onnx_node(inputs=("X", "W", "R")), weights)
    np.testing.assert_array_equal(without.weights["b"], np.zeros(4 * H))


def bad_model(dims=(), **changes):
    """Make a model with a tensor whose description does not fit its data."""
    model = onnx_model(onnx_node(), onnx_weights())
    tensor = model.graph.initializer[0]
    tensor.dims.extend(dims)
    for name, value in changes.items():
        setattr(tensor, name, value)
    return model


def test_onnx_model():
    """A node is found by its name or output, and weights in Constant nodes. One of several must be named."""
    weights = onnx_weights() | {"W2": onnx_weights()["W"] / 2}
    constant = helper.make_node("Constant", [], ["W2"], value=numpy_helper.from_array(weights.pop("W2")))
    second = helper.make_node("LSTM", ["X", "W2", "R", "B"], ["Z"])
    model = onnx_model(onnx_node(), weights)
    assert_same(convert.from_onnx(model), convert.from_onnx(onnx_node(), weights))
    model.graph.node.extend([constant, second])
    halved = convert.from_onnx(model, name="Z")
    assert_same(halved, convert.from_onnx(second, weights | {"W2": weights["W"] / 2}))
    assert_same(convert.from_onnx(model, name="a"), convert.from_onnx(onnx_node(), weights))
    assert [*convert.from_onnx(model)] == ["a", "Z"]
    with pytest.raises(ValueError, match=r"expected one LSTM, GRU or RNN node 'b', found \['a', 'Z'\]"):
        convert.from_onnx(model, name="b")
    with pytest.raises(TypeError, match="a model has its own"):
        convert.from_onnx(model, weights)


@pytest.mark.parametrize("external", [False, True])
def test_onnx_file(tmp_path, external):
    """Also with its arrays in a file beside it."""
    weights, path = onnx_weights(), tmp_path / "model.onnx"
    model = onnx_model(onnx_node(), weights)
    onnx.save(model, path, save_as_external_data=external, size_threshold=0, location="arrays")
    assert (tmp_path / "arrays").exists() == external
    for source in (path, str(path)):
        assert_same(convert.from_onnx(source), convert.from_onnx(onnx_node(), weights))
    assert_same(convert.from_onnx(path, name="a"), convert.from_onnx(onnx_node(), weights))


def test_what_is_no_onnx_file(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    with pytest.raises(FileNotFoundError, match=r"model\.onnx"):
        convert.from_onnx(path)
    with pytest.raises(FormatError, match="is no regular file; expected an ONNX model"):
        convert.from_onnx(tmp_path)
    onnx.save(onnx_model(onnx_node(), onnx_weights()), path, save_as_external_data=True, size_threshold=0, location="a")
    (tmp_path / "a").unlink()
    with pytest.raises((FormatError, FileNotFoundError), match=f"{tmp_path}"):
        convert.from_onnx(path)
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(FormatError, match=r"model\.onnx cannot be read as an ONNX model: "):
        convert.from_onnx(path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"reads files with onnx, which is not installed: pip install onnx$"):
        convert.from_onnx(path)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (onnx_node(direction="up"), "direction='up'"),
        (onnx_node(inputs=("X", "W")), "has no R"),
        (onnx_node(hidden_size=5), "hidden_size=5, but its R has"),
        (onnx_node("GRU", ["X", "W", "R", "B", "", "", "c"]), "has 7 inputs; expected at most 6: X, W, R, B, sequence"),
        (onnx_node("GRU", linear_before_reset=1.0), "has the attribute linear_before_reset twice or not as INT"),
        (onnx_node(direction="bidirectional"), r"W has shape \(1, 16, 3\); expected \(2, 16, I\)"),
    ],
)
def test_odd_nodes(node, message):
    """Attributes, inputs and shapes that are not as ONNX specifies them."""
    with pytest.raises(ValueError, match=message):
        convert.from_onnx(node, onnx_weights(node.op_type))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([b"model"], TypeError, "of type bytes; expected the path of a model, an onnx.Mod"),
        ([bad_model(dims=[3])], ValueError, "from_onnx: the tensor 'W' cannot be read: "),
        ([bad_model(data_type=77)], ValueError, "from_onnx: the tensor 'W' cannot be read: "),
        ([bad_model(data_location=1)], ValueError, "'W' is in another file; onnx.load"),
        ([onnx_node(), onnx_weights("GRU")], ValueError, r"W has shape \(1, 12, 3\)"),
    ],
)
def test_odd_sources(source, error, message):
    """No model, tensors that cannot be read, and weights of another kind."""
    with pytest.raises(error, match=message):
        convert.from_onnx(*source)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lstm(rng(), cell_clip=3), "has cell_clip=3.0, an ONNX LSTM has no such thing; if the limit is never reached"),
        (Stack([lstm(rng())]), "Convert layer.layers one by one"),
        (Bidirectional(lstm(rng()), gru(rng())), "an LSTM and a GRU; a node"),
        (Bidirectional(gru(rng(), reset_after=True), gru(rng())), "one GRU has reset_after=True and the other has not"),
        (Bidirectional(lstm(rng()), lstm(rng(), coupled=True)), "one LSTM has coupled=True and the other has not"),
        (lstm(rng(), coupled=True, recurrent_activation="relu"), "the activation 'relu' for its gates"),
    ],
)
def test_to_onnx_refused(layer, message):
    """What a node cannot express."""
    with pytest.raises(ConversionError, match=message):
        convert.to_onnx(layer)


@pytest.mark.parametrize(
    ("names", "alpha", "beta", "expected"),
    [
        (["HardSigmoid", "tanh", "TANH"], [], [], ("tanh", ("hard_sigmoid", 0.2, 0.5))),
        (["HardSigmoid", "Elu", "Elu"], [0.25, 2.0, 2.0], [0.75], (("elu", 2.0), ("hard_sigmoid", 0.25, 0.75))),
        (["Sigmoid", "LeakyRelu", "LeakyRelu"], [], [], (("leaky_relu", 0.01), "sigmoid")),
        (["Softplus", "LeakyRelu", "LeakyRelu"], [0.2, 0.2], [9.0], ("leaky_relu", "softplus")),
        (["HardSigmoid", "Relu", "Relu"], [1 / 6], [0.5], ("relu", "hard_sigmoid")),
        (["Softsign", "Affine", "Affine"], [1.0, 1.0], [0.0, 0.0], ("linear", "softsign")),
    ],
)
def test_onnx_activations(names, alpha, beta, expected):
    """Each takes of alpha and beta what it has, in order; without them it has ONNX's defaults."""
    given = {"activation_alpha": alpha, "activation_beta": beta}
    node = onnx_node(activations=names, **{name: values for name, values in given.items() if values})
    weights = {name: array.astype(np.float32) / 2 for name, array in onnx_weights().items()}
    layer = convert.from_onnx(node, weights)
    assert (layer.activation, layer.recurrent_activation) == expected
    x = rng().standard_normal((T, B, I)).astype(np.float32)
    options = {"cs_prev": np.zeros((B, H)), "h_prev": np.zeros((B, H)), "recurrent_activation": expected[1]}
    y = formulas.lstm_layer(x=x, **layer.weights, **options, activation=expected[0]).h
    np.testing.assert_allclose(layer(x)[0], y, rtol=1e-5, atol=1e-6)


def test_onnx_activations_of_both_directions():
    """One list, forward first, which takes of alpha and beta in order, too."""
    node = onnx_node(
        "GRU",
        direction="bidirectional",
        activations=["Sigmoid", "Elu", "HardSigmoid", "LeakyRelu"],
        activation_alpha=[0.5, 0.25, 0.125],
        activation_beta=[0.375],
    )
    layer = convert.from_onnx(node, onnx_weights("GRU", 2))
    assert (layer.fw.activation, layer.fw.recurrent_activation) == (("elu", 0.5), "sigmoid")
    assert layer.bw.activation == ("leaky_relu", 0.125)
    assert layer.bw.recurrent_activation == ("hard_sigmoid", 0.25, 0.375)
    node = onnx_node("GRU", direction="bidirectional", activations=["Sigmoid", "Tanh"])
    with pytest.raises(ValueError, match="has 2 activations; expected 4"):
        convert.from_onnx(node, onnx_weights("GRU", 2))


def test_onnx_parameters_of_float64():
    """ONNX has them in float32; a layer of float64 gets that number, and one that is not exact in it is refused."""
    node = onnx_node("RNN", activations=["LeakyRelu"])
    layer = convert.from_onnx(node, onnx_weights("RNN"))
    assert layer.activation == ("leaky_relu", 0.01)  # the default
    node = onnx_node("RNN", activations=["LeakyRelu"], activation_alpha=[0.01])
    assert convert.from_onnx(node, onnx_weights("RNN")).activation == ("leaky_relu", float(np.float32(0.01)))
    with pytest.raises(ConversionError, match=r"\('leaky_relu', 0.01\) has parameters that are not exact in float32"):
        convert.to_onnx(layer)


@pytest.mark.parametrize("activation", PARAMETERS)
def test_every_activation_there_and_back(activation):
    """But for two, which ONNX's nodes do not have."""
    layer = gru(rng(), np.float32, activation=activation, recurrent_activation=activation)
    if activation in ("selu", "exponential"):
        with pytest.raises(ConversionError, match=f"the activation '{activation}' is none that ONNX's nodes have"):
            convert.to_onnx(layer)
        return
    is_bounded = activation != "linear"  # of random inputs, a GRU of linear functions makes numbers that are not finite
    assert_same(convert.from_onnx(*convert.to_onnx(layer), check=is_bounded), layer)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_clip_that_is_to_be_ignored(kind):
    """It is refused unless the caller ignores it, and then no part of the comparison."""
    node, weights = onnx_node(kind, clip=0.5), onnx_weights(kind)
    for source in ((node, weights), (onnx_model(node, weights),)):
        assert_same(convert.from_onnx(*source, ignore_clip=True), convert.from_onnx(onnx_node(kind), weights))
        with pytest.raises(ConversionError, match=r"If your inputs never reach the limit, pass ignore_clip=True$"):
            convert.from_onnx(*source)
    for clip in (float("inf"), float(np.finfo(np.float32).max)):
        assert_same(convert.from_onnx(onnx_node(kind, clip=clip), weights), convert.from_onnx(onnx_node(kind), weights))


@pytest.mark.parametrize("peephole", [False, True])
@pytest.mark.parametrize("gates", [[], [0.2, 0.5], [0.25, 0.125]])
def test_input_forget(gates, peephole):
    """f is 1 - i, so f's own weights count for nothing; the node is compared with onnxruntime's results."""
    options = {"activations": ["HardSigmoid", "Tanh", "Tanh"] * 2} if gates else {}
    options |= dict(zip(("activation_alpha", "activation_beta"), ([value] * 2 for value in gates), strict=False))
    inputs = ["X", "W", "R", "B", "", "", "", "P"][: None if peephole else 4]
    node = onnx_node(inputs=inputs, input_forget=1, direction="bidirectional", **options)
    weights = onnx_weights(directions=2)
    layer = convert.from_onnx(node, weights)
    assert layer.fw.coupled and layer.bw.coupled
    for name, parts in {"W": 4, "R": 4, "B": 8, "P": 3}.items():  # of which the third ones are f's
        for part in np.split(weights[name], parts, axis=1)[2::4]:
            part[:] = 9
    assert_same(convert.from_onnx(node, weights), layer)
