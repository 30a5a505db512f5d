"""Weights that nodes of an ONNX model make of constants, branches that are always taken, and heads on final states.

`pytest -m peers`: PyTorch's exports of layers that get their states, and silero-vad's models, beside onnxruntime.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from convert_cases import (
    B,
    H,
    I,
    T,
    all_warnings,
    assert_same,
    converted,
    export_by_torch,
    from_torch,
    made,
    model_of,
    onnx_graph,
    onnx_weights,
    parts_of,
    rng,
    warned,
)
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from blockcell import LSTM, Bidirectional, Dense, Stack, convert
from blockcell.convert import ConversionError
from onnx_export import export


def node_of(w="W", r="R", b="B", kind="LSTM", **options):
    """Make a recurrent node that reads weights of these names."""
    return helper.make_node(kind, ["X", w, r, b], ["Y", "Y_h"], name="a", **options)


def constant_arrays(**values):
    """Make arrays of constants, by name."""
    return {name: np.array(value) for name, value in values.items()}


WEIGHTS = onnx_weights()
EXPECTED = convert.from_onnx(node_of(), WEIGHTS)
W = WEIGHTS["W"]
INTEGERS = constant_arrays(zero=[0], one=[1], two=[2], H2=[2 * H], H4=[4 * H], shape=[1, 4 * H, I], parts=[H, 3 * H])


@pytest.mark.parametrize(
    ("makers", "initializers"),
    [
        ([made("Unsqueeze", ["w", "zero"], "V")], {"w": W[0]}),
        ([made("Squeeze", ["w", "zero"], "V")], {"w": W[None]}),
        ([made("Transpose", ["w"], "V", perm=[0, 2, 1])], {"w": W.swapaxes(1, 2)}),
        ([made("Reshape", ["w", "shape"], "V")], {"w": W.ravel()}),
        ([made("Identity", ["w"], "V")], {"w": W}),
        ([made("Flatten", ["w"], "v", axis=2), made("Unsqueeze", ["v", "zero"], "V")], {"w": W}),
        ([made("Cast", ["w"], "V", to=TensorProto.DOUBLE)], {"w": np.round(W * 8).astype(np.int8)}),
        ([made("Concat", ["u", "v"], "V", axis=1)], {"u": W[:, :5], "v": W[:, 5:]}),
        ([made("Slice", ["w", "one", "two", "zero"], "V")], {"w": np.concatenate([W + 1, W, W])}),
        ([made("Gather", ["w", "one"], "V", axis=0)], {"w": np.concatenate([W + 1, W])}),
        (
            [
                helper.make_node("Split", ["w", "parts"], ["u", "v"], axis=1),
                made("Concat", ["v", "u"], "V", axis=1),
            ],
            {"w": np.concatenate([W[:, 3 * H :], W[:, : 3 * H]], axis=1)},
        ),
        (
            [made("DequantizeLinear", ["w", "scale", "point"], "V")],
            {"w": np.round(W * 8).astype(np.int8), "scale": np.array(0.25), "point": np.array(3, np.int8)},
        ),
        ([made("Constant", [], "w", value=numpy_helper.from_array(W[0])), made("Unsqueeze", ["w", "zero"], "V")], {}),
        ([made("Constant", [], "w", value_floats=W.ravel()), made("Cast", ["w"], "v", to=TensorProto.DOUBLE),
          made("Reshape", ["v", "shape"], "V")], {}),
        ([made("Shape", ["w"], "size"), made("Reshape", ["v", "size"], "V")], {"w": W, "v": W.ravel()}),
    ],
)  # fmt: skip
def test_constants_in_front_of_weights(makers, initializers):
    """The layer has what onnx.reference makes of them."""
    arrays = WEIGHTS | INTEGERS | initializers
    model = model_of([*makers, node_of("V")], arrays, opset=21)
    V = ReferenceEvaluator(model_of(makers, arrays, ["V"], opset=21, inputs=())).run(None, {})[0]
    assert_same(convert.from_onnx(model), convert.from_onnx(node_of(), WEIGHTS | {"W": V}))


def test_axes_as_attributes():
    """As models of an older opset have them."""
    makers = [made("Unsqueeze", ["w"], "v", axes=[0]), made("Slice", ["v"], "V", axes=[1], starts=[0], ends=[4 * H])]
    assert_same(convert.from_onnx(model_of([*makers, node_of("V")], WEIGHTS | {"w": W[0]}, opset=9)), EXPECTED)


@pytest.mark.parametrize(
    ("makers", "message"),
    [
        (
            [made("Exp", ["W"], "V"), made("Identity", ["V"], "U")],
            r"its W 'V' \(input\[1\]\) and R 'U' \(input\[2\]\) are neither .* nor made of constants by Abs, Add, .*"
            r' options.optimized_model_filepath = "folded.onnx"; onnxruntime.InferenceSession\(',
        ),
        (
            [made("Identity", ["x2"], "V"), made("Identity", ["R"], "U")],
            r"its W 'V' \(input\[1\]\) is neither .* nor made of constants by .* convert.from_onnx\(node, {'V': \.\.",
        ),
        ([made("Identity", ["V"], "V"), made("Identity", ["R"], "U")], r"its W 'V' \(input\[1\]\) is neither"),
        ([made("Identity", ["t"], "V"), made("Identity", ["V"], "t")], "its W 'V' .* and R 'U' .* are neither"),
        ([made("Reshape", ["W", "zero"], "V"), made("Identity", ["R"], "U")], r"its W 'V' \(input\[1\]\) is neither"),
        (
            [helper.make_node("Split", ["W"], ["V"], num_outputs=2**31 - 1), made("Identity", ["R"], "U")],
            r"its W 'V' \(input\[1\]\) is neither",
        ),
    ],
)
def test_weights_that_are_no_constants(makers, message):
    model = model_of([*makers, node_of("V", "U")], WEIGHTS | INTEGERS, inputs=("X", "x2"))
    with pytest.raises(ConversionError, match=f"^from_onnx: LSTM 'a': {message}"):
        convert.from_onnx(model)


def test_what_the_message_says_about_weights_works(tmp_path):
    """onnxruntime folds what is not folded here."""
    onnxruntime = pytest.importorskip("onnxruntime")
    arrays = {name: array.astype(np.float32) for name, array in WEIGHTS.items()}
    node = helper.make_node("LSTM", ["X", "V", "R", "B"], ["Y"], name="a", hidden_size=H)
    model = model_of([made("Floor", ["W"], "V"), node], arrays, dtype=TensorProto.FLOAT)
    with pytest.raises(ConversionError):
        convert.from_onnx(model)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    folded = convert.from_onnx(onnx.load(tmp_path / "folded.onnx"))
    assert_same(folded, convert.from_onnx(node_of(), arrays | {"W": np.floor(arrays["W"])}))


# ------------------------------------------------------------------------------------------------------------ branches
def branch(nodes, outputs, initializers=()):
    """Make a branch of an If."""
    return onnx_graph(nodes, dict(initializers), outputs, name="branch", inputs=())


def if_node(condition, then, other, outputs):
    """Make an If of two branches."""
    return helper.make_node("If", [condition], outputs, name="if", then_branch=then, else_branch=other)


@pytest.mark.parametrize(
    ("makers", "taken"),
    [
        ([], True),
        ([made("Not", ["yes"], "condition")], False),
        ([made("Equal", ["one", "two"], "condition")], False),
        ([made("Less", ["one", "two"], "condition")], True),
        ([made("Cast", ["two"], "condition", to=TensorProto.BOOL)], True),
        ([made("Size", ["W"], "size"), made("Greater", ["size", "two"], "condition")], True),
        (
            [
                made("Shape", ["X"], "sizes"),
                made("Gather", ["sizes", "two"], "I"),
                made("Equal", ["I", "three"], "condition"),
            ],
            True,
        ),
    ],
)
def test_branches_that_are_always_taken(makers, taken):
    """Their nodes are as good as those outside: here they make weights, one within the other, and a head."""
    one = branch([made("Unsqueeze", ["part", "zero"], "V1")], ["V1"], {"part": W[0]})
    two = branch([made("Neg", ["W"], "V2")], ["V2"])
    inner = if_node("condition", *((one, two) if taken else (two, one)), ["V3"])
    outer = if_node("yes", branch([inner], ["V3"]), branch([made("Neg", ["W"], "V4")], ["V4"]), ["V"])
    head = branch([made("Gather", ["Y_h", "first"], "L"), made("Gemm", ["L", "D"], "Z1")], ["Z1"])
    left = branch([made("Shape", ["Y_h"], "Z2")], ["Z2"])
    arrays = WEIGHTS | INTEGERS | constant_arrays(yes=True, three=[I], first=0) | {"D": rng().uniform(-1, 1, (H, 2))}
    arrays |= {} if makers else constant_arrays(condition=True)
    model = model_of([*makers, outer, node_of("V"), if_node("yes", head, left, ["Z"])], arrays, outputs=["Z"])
    for size in (T, B, I):
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    layer = convert.from_onnx(model)
    assert parts_of(layer) == "LSTM Dense:None:True"
    assert_same(layer.layers[0], EXPECTED)
    x = rng().standard_normal((T, B, I))
    expected = ReferenceEvaluator(model).run(None, {"X": x})[0]
    np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [None, "rows"])
def test_branches_that_depend_on_a_call(size):
    """Whether the If is taken depends on a size that is not fixed: the layer is that in its body, as ever."""
    makers = [made("Shape", ["X"], "sizes"), made("Gather", ["sizes", "two"], "I"), made("Equal", ["I", "three"], "c")]
    body = branch([node_of()], ["Y"])
    model = model_of([*makers, if_node("c", body, branch([made("Exp", ["X"], "E")], ["E"]), ["Z"])],
                     WEIGHTS | INTEGERS | constant_arrays(three=[I]), outputs=["Z"])  # fmt: skip
    if size:
        for _ in "TBI":
            model.graph.input[0].type.tensor_type.shape.dim.add().dim_param = size
    assert_same(converted(convert.from_onnx, model, r"if \(If\)"), EXPECTED)


def test_names_that_stand_in_both_places():
    """A branch whose names are used around it stays where it is: which V is meant would be uncertain."""
    taken = branch([made("Unsqueeze", ["part", "zero"], "V")], ["V"], {"part": W[0]})
    node = if_node("yes", taken, branch([made("Neg", ["W"], "N")], ["N"]), ["U"])
    model = model_of([node, made("Neg", ["W"], "V"), node_of("U")], WEIGHTS | INTEGERS | constant_arrays(yes=True))
    with pytest.raises(ConversionError, match="its W 'U'"):
        convert.from_onnx(model)


# ----------------------------------------------------------------------------------------------------- 8-bit integers
def test_lstm_of_integers():
    """onnxruntime rounds x and h, too: such a node has no layer."""
    node = helper.make_node("DynamicQuantizeLSTM", ["X", "W", "R"], ["V"], name="q", domain="com.microsoft")
    with pytest.raises(ConversionError, match=r"a com.microsoft::DynamicQuantizeLSTM; expected an ONNX LSTM"):
        convert.from_onnx(node, WEIGHTS)
    with pytest.raises(ValueError, match=r"found q \(DynamicQuantizeLSTM\)\. .* the model that quantize_dynamic got"):
        convert.from_onnx(model_of([node], WEIGHTS, ["V"], inputs=("X",)))
    model = model_of([node, node_of()], WEIGHTS, inputs=("X",))
    model.graph.node[1].input[0] = "V"
    assert_same(converted(convert.from_onnx, model, r"q \(DynamicQuantizeLSTM\)"), EXPECTED)


@pytest.mark.parametrize("loop", ["native", "scan"])
def test_what_onnxruntime_quantizes_of_our_own(loop, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    layer = Stack([LSTM.init(8, 5, seed=2), Dense.init(5, 3, seed=3, activation="softmax", last=True)])
    export(layer, tmp_path / "float.onnx", loop=loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    with pytest.raises(ValueError, match=r"has no initializers .* of its (LSTM|Dense), .* another program has changed"):
        convert.from_onnx(tmp_path / "int8.onnx")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"^from_onnx: the model has no initializers 1.w of its Dense, .*: del model.metadata_props\[:\]$"),
        (np.zeros(5, np.float32), r"w has shape \(5,\)"),
    ],
)
def test_weights_of_our_own_that_have_changed(change, message):
    model = export(Stack([LSTM.init(4, 5, seed=0), Dense.init(5, 3, seed=1)]), None, loop="native")
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "1.w")
    model.graph.initializer.remove(tensor)
    if change is not None:
        model.graph.initializer.append(numpy_helper.from_array(change, "1.w"))
    with pytest.raises(ValueError, match=message):
        convert.from_onnx(model)


def test_kinds_of_cells_come_first():
    """In the list of what is left out, however long it is."""
    nodes = [made("Exp", [f"X{k or ''}"], f"X{k + 1}") for k in range(20)]
    nodes.append(helper.make_node("QuasiRNN", ["X20", "W", "R"], ["V"], name="plain"))
    nodes.append(helper.make_node("LSTM", ["V", "W", "R", "B"], ["Y"], name="a"))
    model = model_of(nodes, WEIGHTS, inputs=("X",))
    names = ", ".join(rf"X{k} \(Exp\)" for k in range(1, 12))
    assert_same(converted(convert.from_onnx, model, rf"plain \(QuasiRNN\), {names}, and 9 more"), EXPECTED)


# --------------------------------------------------------------------------------------------------------------- heads
def states_and_head(layers, makers, directions=1, kind="GRU"):
    """Make a model as PyTorch's exporters write nn.GRU and nn.LSTM, with final states `h` of all layers, and a head."""
    g, nodes, weights = rng(), [], {}
    direction, gates = ("forward", "bidirectional")[directions - 1], {"GRU": 3, "LSTM": 4}[kind]
    for k in range(layers):
        shapes = {"W": (gates * H, directions * H if k else I), "R": (gates * H, H), "B": (2 * gates * H,)}
        weights |= {f"{name}{k}": g.uniform(-1, 1, (directions, *shape)) for name, shape in shapes.items()}
        x = f"X{k}" if k else "X"
        nodes += [
            helper.make_node(
                kind, [x, f"W{k}", f"R{k}", f"B{k}"], [f"Y{k}", f"h{k}"], name=f"n{k}", direction=direction
            ),
            made("Transpose", [f"Y{k}"], f"T{k}", perm=[0, 2, 1, 3]),
            made("Reshape", [f"T{k}", "flat"], f"X{k + 1}"),
        ]
    nodes.append(made("Concat", [f"h{k}" for k in range(layers)], "h", axis=0))
    shapes = {"D": (H, 6), "DD": (2 * H, 6), "d": (6,), "E": (6, 2), "e": (2,)}
    weights |= {name: g.uniform(-1, 1, shape) for name, shape in shapes.items()}
    weights |= constant_arrays(flat=[0, 0, -1], last=-1, before=-2, first=0, end=[-1], all=[2**31], zero=[0])
    return model_of([*nodes, *makers], weights, outputs=["Z"])


TAKE = made("Gather", ["h", "last"], "L", axis=0)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.parametrize(
    ("makers", "parts", "left_out"),
    [
        ([TAKE, made("Gemm", ["L", "D", "d"], "Z")], "Dense:None:True", None),
        ([TAKE, made("Gemm", ["L", "D", "d"], "G"), made("Relu", ["G"], "Z")], "Dense:relu:True", None),
        (
            [TAKE, made("MatMul", ["L", "D"], "M"), made("Add", ["M", "d"], "G"), made("Relu", ["G"], "R"),
             made("Gemm", ["R", "E", "e"], "S"), made("Sigmoid", ["S"], "Z")],
            "Dense:relu:False Dense:sigmoid:True",
            None,
        ),
        (
            [
                made("Slice", ["h", "end", "all"], "S"),
                made("Squeeze", ["S", "zero"], "L"),
                made("Gemm", ["L", "D", "d"], "Z"),
            ],
            "Dense:None:True",
            None,
        ),
        ([TAKE, made("Relu", ["L"], "R"), made("Gemm", ["R", "D", "d"], "Z")], "", r"R \(Relu\), Z \(Gemm\)"),
    ],
)  # fmt: skip
def test_heads_on_the_last_state(kind, layers, makers, parts, left_out):
    """h[-1] and dense layers, beside onnx.reference."""
    model = states_and_head(layers, makers, kind=kind)
    layer = converted(convert.from_onnx, model, left_out)
    assert parts_of(layer) == f"{' '.join([kind] * layers)} {parts}".strip()
    if left_out is None:
        x = rng().standard_normal((T, B, I))
        expected = ReferenceEvaluator(model).run(None, {"X": x})[0]
        np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-14)


BOTH = [made("Gather", ["h", "before"], "L1", axis=0), made("Gather", ["h", "last"], "L2", axis=0)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("names", "parts", "left_out"),
    [(["L1", "L2"], "Dense:relu:ends", None), (["L2", "L1"], "", r"G \(Gemm\), Z \(Relu\)")],
)
def test_heads_on_both_directions(layers, names, parts, left_out):
    """torch.cat([h[-2], h[-1]], -1); the other way around there is no such layer."""
    makers = [*BOTH, made("Concat", names, "L", axis=-1), made("Gemm", ["L", "DD", "d"], "G"), made("Relu", ["G"], "Z")]
    model = states_and_head(layers, makers, directions=2)
    layer = converted(convert.from_onnx, model, left_out)
    assert parts_of(layer) == f"{' '.join(['Bidirectional'] * layers)} {parts}".strip()
    if left_out is None:
        x = rng().standard_normal((T, B, I))
        np.testing.assert_allclose(layer(x)[0], ReferenceEvaluator(model).run(None, {"X": x})[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("takes", ["Y_h", "Y"])
@pytest.mark.parametrize("dense", [1, 2])
def test_heads_of_rows_without_steps(dense, takes):
    """The dense layers get zeros, also where the state before the first step is not zero, as onnxruntime says."""
    g = rng()
    shapes = {"W": (1, 3 * H, I), "R": (1, 3 * H, H), "b": (1, 6 * H), "D": (H, 6), "d": 6, "E": (6, 2), "e": 2}
    weights = {name: g.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    if dense == 1:
        weights |= {"D": weights["D"][:, :2], "d": weights["d"][:2]}
    taken = made("Squeeze", ["h", "zero"], "L")
    if takes == "Y":
        taken = made("Gather", ["Y3", "last"], "L", axis=0)
    two = [made("Relu", ["G"], "S"), made("Gemm", ["S", "E", "e"], "G2")]
    nodes = [
        helper.make_node("GRU", ["X", "W", "R", "b", "lens", "first"], ["Y", "h"], name="a", hidden_size=H),
        made("Squeeze", ["Y", "one"], "Y3"),
        taken,
        made("Gemm", ["L", "D", "d"], "G"),
        *(two if dense == 2 else []),
        made("Softmax", ["G2" if dense == 2 else "G"], "Z", axis=-1),
    ]
    lengths = np.full(B, T) * (np.arange(B) != 1)
    weights |= {"zero": np.array([0]), "one": np.array([1]), "last": np.array(-1), "lens": lengths.astype(np.int32)}
    first = g.uniform(-1, 1, (1, B, H)).astype(np.float32)
    model = model_of(nodes, weights | {"first": first}, outputs=["Z"])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    for size in (T, B, I):  # with more steps, the last of Y would be zero
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    (layer, state), _ = warned(convert.from_onnx, model, initial_state=True)  # the lengths are the caller's
    x = g.standard_normal((T, B, I)).astype(np.float32)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"X": x})[0]
    np.testing.assert_allclose(layer(x, state, lengths=lengths)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("index", ["first", "before"])
def test_states_of_other_layers_are_no_head(index):
    """Those of the first of three layers, for example."""
    model = states_and_head(3, [made("Gather", ["h", index], "L", axis=0), made("Gemm", ["L", "D", "d"], "Z")])
    layer = converted(convert.from_onnx, model, r"Z \(Gemm\)")
    assert isinstance(layer, dict) or "Dense" not in parts_of(layer)


def test_cells_that_are_written_out():
    """As PyTorch's new exporter writes nn.LSTMCell; the message shows how its weights become a layer all the same."""
    nodes = [made("Gemm", ["X", "cell.weight_ih", "cell.bias_ih"], "g", transB=1), made("Tanh", ["g"], "Y")]
    weights = {"cell.weight_ih": W[0], "cell.weight_hh": WEIGHTS["R"][0]}
    weights |= {"cell.bias_ih": WEIGHTS["B"][0, : 4 * H], "cell.bias_hh": WEIGHTS["B"][0, 4 * H :]}
    model = model_of(nodes, weights)
    with pytest.raises(ValueError, match=r"found g \(Gemm\), Y \(Tanh\)\. Cells that are written out in sin") as error:
        convert.from_onnx(model)
    scope = {"onnx": onnx, "convert": convert, "model": model}
    with pytest.warns(
        UserWarning, match="^from_torch: not compared with the model, because only weights were given: p"
    ):
        exec("layer = " + str(error.value).split("PyTorch's names are enough: ")[1], scope)
    assert isinstance(scope["layer"], LSTM) and scope["layer"].input_size == I


# ------------------------------------------------------------------------------------ PyTorch's exporters, silero-vad
FIXED = "from_onnx: compared for B = 2 alone, which the model fixes"  # by a Reshape, of the new exporter


def streaming(kind, layers, directions, batch_first, dynamo):
    """Export a PyTorch model that takes and returns states; return its arguments, its results and the export."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"num_layers": layers, "bidirectional": directions == 2, "batch_first": batch_first}
            self.rnn = getattr(torch.nn, kind)(I, H, **options)

        def forward(self, x, h, c=None):
            y, last = self.rnn(x, h if c is None else (h, c))
            return (y, last) if c is None else (y, *last)

    torch.manual_seed(layers)
    model = Model().eval()
    sizes = [(B, T, I) if batch_first else (T, B, I), *[(layers * directions, B, H)] * (2 if kind == "LSTM" else 1)]
    arguments = tuple(torch.randn(size) for size in sizes)
    with torch.no_grad():
        results = [result.numpy() for result in model(*arguments)]
    return [argument.numpy() for argument in arguments], results, export_by_torch(model, arguments, dynamo)


@pytest.mark.peers
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_exports_that_take_states(kind, layers, directions, batch_first, dynamo):
    """y and the final states of the layer are PyTorch's, from the states that the model would get."""
    (x, *states), (y, *last), model = streaming(kind, layers, directions, batch_first, dynamo)
    layer, texts = all_warnings(convert.from_onnx, model)
    texts = [text for text in texts if text != FIXED]
    cells = layer.layers if layers == 2 else [layer]
    assert [isinstance(cell, Bidirectional) for cell in cells] == [directions == 2] * layers
    assert len(texts) <= 1 and (texts or (layers == 1 and not dynamo))
    for text in texts:
        assert "left to the caller: " in text and "(input[5], of '" in text
    names = "h" if kind == "GRU" else ("h", "cs")
    parts = [{name: array[k] for name, array in zip(names, states, strict=True)} for k in range(layers * directions)]
    state = [dict(zip(("fw", "bw"), parts[2 * k :], strict=False)) for k in range(layers)] if directions == 2 else parts
    our_y, after = layer(x, state=dict(enumerate(state)) if layers == 2 else state[0], batch_first=batch_first)
    np.testing.assert_allclose(our_y, y, rtol=0, atol=1e-6)
    flat = [part for cell in (after if layers == 2 else [after]) for part in (cell if directions == 2 else [cell])]
    for name, expected in zip(names, last, strict=True):
        np.testing.assert_allclose(np.stack([getattr(part, name) for part in flat]), expected, rtol=0, atol=1e-6)


@pytest.mark.peers
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("reads", "rows"), [("h", B), ("h", 1), ("y", 1)])
def test_exported_heads_on_the_last_state(reads, rows, layers, dynamo):
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(I, H, layers, batch_first=True)
            self.head = nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Linear(6, 2), nn.Softmax(-1))

        def forward(self, x):
            y, h = self.rnn(x)
            return self.head(h[-1] if reads == "h" else y[:, -1])

    torch.manual_seed(0)
    module, x = Classifier().eval(), torch.randn(rows, T, I)
    layer, texts = all_warnings(convert.from_onnx, export_by_torch(module, (x,), dynamo))
    assert parts_of(layer) == f"{' '.join(['GRU'] * layers)} Dense:relu:False Dense:softmax:True"
    assert texts in ([], [FIXED.replace("2", str(rows))])
    with torch.no_grad():
        np.testing.assert_allclose(layer(x.numpy(), batch_first=True)[0], module(x), rtol=0, atol=1e-6)


SILERO = {  # its files, and how many LSTMs they have: for 16 kHz, and for 8 kHz
    "silero_vad.onnx": 2,
    "silero_vad_16k_op15.onnx": 1,
    "silero_vad_16k_sequence.onnx": 1,
    "silero_vad_half.onnx": 1,
    "silero_vad_op18_ifless.onnx": 2,
    "silero_vad_openvino_16k.onnx": 1,
}


def silero(name):
    """Return the path of a model of silero-vad, or skip the test."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None:
        pytest.skip("silero-vad is not installed")
    return Path(spec.origin).with_name("data") / name


def run_with_cell(onnxruntime, model, rate):
    """Run a whole model; return its cell's input, and the cell's states before and after."""

    def is_input(name):
        return name.endswith("decoder/If_output_0") or name in ("/Transpose_output_0", "select", "select_3")

    def info(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    for node in [*model.graph.node]:
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        here = [*filter(is_input, node.output)]
        inner_names = [name for body in bodies for inner in body.node for name in inner.output if is_input(name)]
        if inner_names and not here:
            for body, name in zip(bodies, inner_names, strict=True):
                body.output.append(info(name))
            here = ["x of the cell"]
            node.output.extend(here)
        model.graph.output.extend(map(info, here))
    g = rng()
    sizes = {"input": (1, 576 if rate == 16000 else 288), "state": (2, 1, 128), "h": (1, 1, 128), "c": (1, 1, 128)}
    input_names = {value.name for value in model.graph.input}
    feeds = {name: g.uniform(-0.5, 0.5, size).astype(np.float32) for name, size in sizes.items() if name in input_names}
    state = feeds["state"] if "state" in feeds else np.concatenate([feeds["h"], feeds["c"]])
    feeds |= {"sr": np.array(rate)} if "sr" in input_names else {}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, *after, x = session.run(None, feeds)
    return x.reshape(1, 1, 128), state, after[0] if len(after) == 1 else np.concatenate(after)


@pytest.mark.peers
def test_all_models_of_silero():
    assert {path.name for path in silero("").glob("*.onnx")} == SILERO.keys()


@pytest.mark.peers
@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("name", SILERO)
def test_models_of_silero(name, rate):
    """What onnxruntime has for x and the states of the cell, and for its results, in the model itself."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = onnx.load(silero(name))
    if rate == 8000 and SILERO[name] == 1:
        pytest.skip("it is for 16 kHz only")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if "ifless" in name:  # its cells are written out
            prefix = "model.decoder.rnn." if rate == 16000 else "model_8k.decoder.rnn."
            with pytest.raises(ValueError, match=r"convert\.from_torch\({tensor\.name: "):
                convert.from_onnx(model)
            tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
            layer = from_torch(tensors, prefix=prefix)
        else:
            layer = convert.from_onnx(model)
    if "ifless" not in name and "sequence" not in name:
        assert any("left to the caller: LSTM" in str(warning.message) for warning in record)
    if isinstance(layer, dict):
        layer = next(cell for key, cell in layer.items() if ("then" in key) == (rate == 16000))
    assert (layer.input_size, layer.hidden_size) == (128, 128)
    x, state, expected = run_with_cell(onnxruntime, model, rate)
    y, after = layer(x, state=dict(zip(("h", "cs"), state, strict=True)))
    for result, expected_result in zip((y[-1], after.cs), expected, strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=0, atol=2e-6)
