"""Whole models of Keras, PyTorch and ONNX: what is a stack, what a dict of layers, and what is said to be left out.

The stored models and results are those of Keras and of PyTorch's exporters to ONNX.
"""

from __future__ import annotations

import json
import re
import sys
import types

import generate_layers
import numpy as np
import onnx
import onnx.inliner
import pytest
from convert_cases import (
    B,
    H,
    I,
    T,
    all_warnings,
    assert_same,
    converted,
    from_keras,
    from_torch,
    keras,
    keras_bidirectional,
    keras_model,
    lstm,
    made,
    model_of,
    onnx_graph,
    onnx_weights,
    parts_of,
    rng,
    stored,
    torch_weights,
    warned,
)
from generate_layers import weights_of
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnx_export
from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.layers import GRU, LSTM, Dense, Stack


# --------------------------------------------------------------------------------------------------------------- Keras
def stored_keras_model(case):
    """Return a stand-in for a stored model of Keras, and all that is stored of it."""
    arrays = stored("keras_models")[case]
    weights = {}
    for name, array in weights_of(arrays).items():
        weights.setdefault(name.rpartition(".")[0], []).append(array)
    return keras_model(json.loads(bytes(arrays["model"])), weights), arrays


KERAS_STACKS = {  # what the stacks consist of, and what is said
    "sequential": ("LSTM GRU Dense:softmax:True", None),
    "dense on both sides": ("Dense:relu:False Bidirectional Dense:tanh:ends", None),
    "two dense": ("GRU Dense:relu:False Dense:None:True", None),
    "backwards": ("GRU Dense:sigmoid:ends", None),
    "each step": ("LSTM Dense:None:False", None),
    "sequential in it": ("LSTM GRU", None),
    "functional": ("LSTM GRU LSTM Dense:None:True", None),
    "functional in it": ("GRU LSTM", None),
    "masking": ("LSTM GRU", r"masking\w* \(Masking\): pass mask= to the layer's calls, and masked=\"repeat\""),
    "gelu": ("LSTM", r"dense\w* \(Dense\): its activation is 'gelu'"),
    "embedding": (
        "LSTM GRU",
        r"embedding \(Embedding\): pass mask=ids != 0 to the layer's calls, and masked=\"repeat\"",
    ),
    "called twice": ("LSTM", r"again \(LSTM\): that it is called more than once"),
}
KERAS_DICTS = {  # the names of layers, and what is left out
    "normalized between": (None, r"left out: layer_normalization\w* \(LayerNormalization\)"),
    "encoder and decoder": (
        {"encoder", "decoder"},
        r"left out: decoder \(LSTM\): it starts from the state of encoder: pass state=, dense\w* \(Dense\)",
    ),
    "residual": ({"first", "second"}, r"left out: add\w* \(Add\)"),
    "two results": ({"first", "second"}, ""),
}


def test_all_stored_keras_models():
    assert stored("keras_models").keys() == KERAS_STACKS.keys() | KERAS_DICTS.keys()


@pytest.mark.parametrize("case", KERAS_STACKS)
def test_stored_keras_stacks(case):
    model, arrays = stored_keras_model(case)
    parts, left_out = KERAS_STACKS[case]
    layer = converted(from_keras, model, left_out)
    assert parts_of(layer) == parts
    if "y" in arrays and left_out in (None, KERAS_STACKS["masking"][1]):  # no step is masked
        y, _ = layer(arrays["x"].swapaxes(0, 1))
        np.testing.assert_allclose(y.swapaxes(0, 1) if y.ndim == 3 else y, arrays["y"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", KERAS_DICTS)
def test_stored_keras_dicts(case):
    model, _ = stored_keras_model(case)
    names, left_out = KERAS_DICTS[case]
    layers, text = warned(from_keras, model)
    joining = "the layers are not one behind the other"
    assert re.fullmatch(f"from_keras: {'; '.join(filter(None, (left_out, joining)))}", text)
    assert names in (None, layers.keys())
    for name, layer in layers.items():
        assert_same(layer, from_keras(next(each for each in model.layers if each.name == name)))


def keras_arrays(kind, inputs, hidden=H):
    """Draw the arrays of a layer of Keras."""
    columns = {"LSTM": 4 * hidden, "GRU": 3 * hidden, "Dense": hidden}[kind]
    shapes = [(inputs, columns), (hidden, columns), (2, columns) if kind == "GRU" else (columns,)]
    return [rng().uniform(-1, 1, shape).astype(np.float32) for shape in (shapes[::2] if kind == "Dense" else shapes)]


def test_keras_model_with_a_call_of_its_own():
    """Its get_config raises, or tells nothing of the layers."""
    layers = [keras("GRU", keras_arrays("GRU", I), name="a"), keras("LSTM", keras_arrays("LSTM", H), name="b")]
    layers.append(keras("Dense", keras_arrays("Dense", H), name="c", activation="linear"))
    for config in ({}, None):
        model = keras("Model")
        model.layers = layers

        def get_config(config=config):
            if config is None:
                raise NotImplementedError
            return config

        model.get_config = get_config
        found = converted(from_keras, model, r"c \(Dense\), a_layer \(Model\): its call\(\) is its own")
        assert found.keys() == {"a", "b"}
        assert_same(found["a"], from_keras(layers[0]))
    layers[1].name = "a"
    own_call = r"c \(Dense\), a_layer \(Model\): its call\(\) is its own"
    assert converted(from_keras, model, own_call).keys() == {"a", "a'"}
    model.layers = layers[2:]
    with pytest.raises(
        ValueError, match=r"from_keras: expected a model with an LSTM, a GRU or an RNN, found c \(Dense\)"
    ):
        from_keras(model)
    model.layers = []
    with pytest.raises(ValueError, match="found an empty one"):
        from_keras(model)


def within_time_distributed(inner, *others):
    """Return a stand-in for a Sequential of a TimeDistributed with this layer in it, and of other layers."""
    outer = keras("TimeDistributed", name="outer")
    outer.layer = inner
    model = keras("Sequential")
    model.layers = [outer, *others]
    return model


def test_keras_time_distributed():
    fw, bw = (
        keras("LSTM", keras_arrays("LSTM", I), go_backwards=back, return_sequences=True) for back in (False, True)
    )
    text = r"outer \(TimeDistributed\): it calls its layer for each slice x\[:, n\] of x \(B, N, T, I\): pass these, .*"
    for inner in (fw, keras_bidirectional(fw, bw)):
        layer = converted(from_keras, within_time_distributed(inner), text)
        assert_same(layer, from_keras(inner))
    above = keras("LSTM", keras_arrays("LSTM", H), name="above")
    fw.name = "inner"
    layers = converted(from_keras, within_time_distributed(fw, above), text)
    assert layers.keys() == {"outer/inner", "above"}
    assert_same(layers["outer/inner"], from_keras(fw))
    nested = keras("Sequential", name="nested")
    nested.layers = [fw, above]
    layer = converted(from_keras, within_time_distributed(nested), text)
    assert_same(layer, Stack([from_keras(fw), from_keras(above)]))
    nested.layers = [keras("Dense", keras_arrays("Dense", I), name="dense", activation="linear")]
    with pytest.raises(ValueError, match=r"found outer \(TimeDistributed\)$"):
        from_keras(within_time_distributed(nested))


def test_keras_halves_of_two_sizes():
    halves = [keras("LSTM", keras_arrays("LSTM", I, units), units=units, go_backwards=units == 5) for units in (4, 5)]
    text = r"has a forward layer of 4 units and a backward layer of 5; .* bw\(x\[::-1\]\)\[0\]\[::-1\]$"
    with pytest.raises(ConversionError, match=text):
        from_keras(keras_bidirectional(*halves))


@pytest.mark.parametrize("activation", [None, "relu", "sigmoid", "softmax", "tanh"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_keras_dense(use_bias, activation):
    arrays = keras_arrays("Dense", I)[: 1 + use_bias]
    layer = from_keras(keras("Dense", arrays, activation=activation or "linear"))
    bias = arrays[1] if use_bias else np.zeros(H, np.float32)
    assert_same(layer, Dense(arrays[0], bias, activation))
    for array, expected in zip(convert.to_keras(layer), (arrays[0], bias), strict=True):
        np.testing.assert_array_equal(array, expected)
    with pytest.raises(
        ConversionError, match="Dense 'a_layer' has activation='gelu'; only Keras's own linear, sigmoid"
    ):
        from_keras(keras("Dense", arrays, activation="gelu"))
    with pytest.raises(ValueError, match="has no weights yet"):
        from_keras(keras("Dense", activation="linear"))


# ------------------------------------------------------------------------------------------------------------- PyTorch
class TorchModule:
    """Stands for a module of PyTorch: the conversion reads its class, state_dict, named_children and dim only."""

    def __init__(self, weights=None, children=(), **attributes):
        self.weights, self.children = weights or {}, children
        vars(self).update(attributes)

    def state_dict(self):
        inner = {f"{name}.{key}": v for name, child in self.named_children() for key, v in child.state_dict().items()}
        return self.weights | inner

    def named_children(self):
        return ((str(k), child) for k, child in enumerate(self.children))


TORCH = types.ModuleType("torch.stand_in")


@pytest.fixture(autouse=True)
def torch_stand_in(monkeypatch):
    """Provide the module that classes standing for PyTorch's say they are from."""
    monkeypatch.setitem(sys.modules, TORCH.__name__, TORCH)


def torch(kind, *arguments, **options):
    """Make a stand-in for a module of PyTorch of this class."""
    if not hasattr(TORCH, kind):
        setattr(TORCH, kind, type(kind, (TorchModule,), {"__module__": TORCH.__name__}))
    return getattr(TORCH, kind)(*arguments, **options)


def linear(inputs=H, outputs=2):
    """Make a stand-in for a Linear."""
    g = rng()
    return torch("Linear", {"weight": g.uniform(-1, 1, (outputs, inputs)), "bias": g.uniform(-1, 1, outputs)})


def two_gru():
    """Make a stand-in for a GRU of two layers."""
    return torch("GRU", torch_weights(gates=3) | torch_weights(suffix="_l1", inputs=H, gates=3))


class Own(TorchModule):
    pass


@pytest.mark.parametrize(
    ("modules", "parts", "left_out"),
    [
        (lambda: [two_gru(), torch("Dropout"), torch("LSTM", torch_weights(inputs=H))], "GRU GRU LSTM", None),
        (
            lambda: [torch("LSTM", torch_weights()), linear(), torch("ReLU"), linear(2, 3), torch("Softmax", dim=-1)],
            "LSTM Dense:relu:False Dense:softmax:False",
            None,
        ),
        (
            lambda: [torch("Sequential", children=[linear(I, I), torch("Identity")]), torch("LSTM", torch_weights())],
            "Dense:None:False LSTM",
            None,
        ),
        (lambda: [torch("Tanh"), torch("LSTM", torch_weights()), linear()], "LSTM Dense:None:False", r"0 \(Tanh\)"),
        (
            lambda: [torch("LSTM", torch_weights()), linear(), torch("Softmax", dim=1)],
            "LSTM Dense:None:False",
            r"2 \(Softmax\)",
        ),
        (lambda: [torch("LSTM", torch_weights()), Own(), linear()], "LSTM", r"1 \(Own\), 2 \(Linear\)"),
    ],
)
def test_torch_sequential(modules, parts, left_out):
    model = torch("Sequential", children=modules())
    layer = converted(convert.from_torch, model, left_out, check=False)
    assert parts_of(layer) == parts
    if left_out is None:
        expected, x = None, rng().standard_normal((T, B, I))
        for module in modules():
            if type(module).__name__ in ("LSTM", "GRU"):
                expected = from_torch(module)(x if expected is None else expected)[0]
        if expected is not None and "Dense" not in parts:
            np.testing.assert_array_equal(layer(x)[0], expected)


def test_torch_dicts():
    """Only a Sequential tells the order; what a module of another class does is not known."""
    norm = torch("LayerNorm", {"weight": np.ones(H), "bias": np.ones(H)})
    model = torch("Sequential", children=[two_gru(), norm, torch("LSTM", torch_weights(inputs=H)), linear()])
    layers = converted(convert.from_torch, model, r"1 \(LayerNorm\), 3 \(Linear\)", check=False)
    assert {name: parts_of(layer) for name, layer in layers.items()} == {"0": "GRU GRU", "2": "LSTM"}
    for source in (Own(children=model.children), model.state_dict()):
        layers = converted(convert.from_torch, source, r"1 \(weight, bias\), 3 \(weight, bias\)", check=False)
        assert layers.keys() == {"0", "2"}
        assert_same(layers["0"], from_torch(source, prefix="0."))
        assert_same(from_torch(source, prefix="3."), from_torch(linear()))
    inside = torch("Sequential", children=[Own(children=[two_gru()]), torch("LSTM", torch_weights(inputs=H))])
    assert converted(convert.from_torch, inside, r"0 \(Own\)", check=False).keys() == {"0.0", "1"}


def test_torch_linear():
    g = rng()
    for bias in (True, False):
        weights = {"weight": g.uniform(-1, 1, (H, I))} | ({"bias": g.uniform(-1, 1, H)} if bias else {})
        layer = from_torch(torch("Linear", weights))
        assert_same(layer, Dense(weights["weight"].T, weights.get("bias", np.zeros(H))))
        for name, array in weights.items():
            np.testing.assert_array_equal(convert.to_torch(layer, prefix="a.")[f"a.{name}"], array)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\); expected \(O, I\), of a Linear"):
        from_torch({"norm.weight": np.ones(4)}, prefix="norm.")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda w: {"epoch": 3, "state_dict": w}, r"found none: .*; they are in source\['state_dict'\]: pass that"),
        (lambda w: {"model": {f"net.{name}": array for name, array in w.items()}}, r"in source\['model'\]: pass that"),
        *(
            (
                lambda w, part=part: {f"a.{name}": array for name, array in w.items()} | {f"a.{part}": w},
                rf"a\.{part} is a part of a weight that is normalized or pruned\. Undo that first, by torch",
            )
            for part in ("weight_hh_l0_g", "weight_hh_l0_orig", "parametrizations.weight_hh_l0.original1")
        ),
    ],
)
def test_torch_mends(source, message):
    with pytest.raises(ValueError, match=f"^from_torch: .*{message}"):
        from_torch(source(torch_weights()))


# ---------------------------------------------------------------------------------------------------------------- ONNX
TORCH_MODELS = {
    "lstm": "LSTM Dense:softmax:False",
    "two lstm": "LSTM LSTM Dense:relu:True",
    "two bidirectional gru": "Bidirectional Bidirectional Dense:softmax:False",
    "bidirectional lstm": "Bidirectional Dense:None:ends",
    "gru": "GRU Dense:None:True",
}


@pytest.mark.parametrize("case", stored("torch_onnx"))
def test_stored_torch_onnx(case):
    """As PyTorch's two exporters write models with two layers, both directions, the batch first, and three heads."""
    check_torch_onnx(case, stored("torch_onnx")[case])


def check_torch_onnx(case, arrays):
    """Assert that the layer of a stored export gives the stored results."""
    name = case.removesuffix(", dynamo")
    layer = convert.from_onnx(onnx.load_from_string(bytes(arrays["model"])))
    assert parts_of(layer) == TORCH_MODELS[name]
    batch_first = name not in ("lstm", "gru")
    y, _ = layer(arrays["x"].swapaxes(0, 1) if batch_first else arrays["x"])
    y = y.swapaxes(0, 1) if y.ndim == 3 and batch_first else y
    np.testing.assert_allclose(y, arrays["y"], rtol=0, atol=1e-6)


def onnx_chain(between, *, directions=1, second=(), outputs=("Z",), columns=None):
    """Make a model of an LSTM `a`, these nodes from A to X2, and a GRU `b`, which reads as many columns as A has."""
    direction = "bidirectional" if directions == 2 else "forward"
    g = rng()
    weights = {f"a{name}": array for name, array in onnx_weights("LSTM", directions).items()}
    shapes = {"W": (3 * H, columns or directions * H), "R": (3 * H, H), "B": (6 * H,)}
    weights |= {f"b{name}": g.uniform(-1, 1, (1, *shape)) for name, shape in shapes.items()}
    weights |= {"one": np.array([1]), "two": np.array([2]), "none": np.array([0, 0, -1]), "fixed": np.array([7, 2, H])}
    weights |= {"s": np.ones(())}
    a = helper.make_node("LSTM", ["X", "aW", "aR", "aB"], ["A", "A_h"], name="a", direction=direction)
    b = helper.make_node("GRU", ["X2", "bW", "bR", "bB", *second], ["Z"], name="b")
    return model_of([a, *between, b], weights, outputs)


TURN = made("Transpose", ["A"], "A2", perm=[0, 2, 1, 3])


@pytest.mark.parametrize(
    ("between", "options"),
    [
        ([made("Squeeze", ["A", "one"], "X2")], {}),
        ([TURN, made("Reshape", ["A2", "none"], "X2")], {}),
        ([TURN, made("Reshape", ["A2", "none"], "X2")], {"directions": 2}),
        ([TURN, made("Reshape", ["A2", "none"], "A3"), made("Cast", ["A3"], "X2", to=11)], {"directions": 2}),
        (
            [
                made("Squeeze", ["A", "one"], "A2"),
                made("Transpose", ["A2"], "A3", perm=[1, 0, 2]),
                made("Dropout", ["A3"], "A4"),
                made("Transpose", ["A4"], "X2", perm=[1, 0, 2]),
            ],
            {},
        ),
    ],
)
def test_onnx_chains(between, options):
    model = onnx_chain(between, **options)
    check_chain(convert.from_onnx(model), model)


def check_chain(stack, model):
    assert isinstance(stack, Stack)
    for layer, name in zip(stack.layers, "ab", strict=True):
        assert_same(layer, convert.from_onnx(model, name=name))


@pytest.mark.parametrize(
    ("between", "left_out", "options"),
    [
        ([made("Squeeze", ["A", "one"], "A2"), made("Mul", ["A2", "s"], "X2")], r"X2 \(Mul\)", {}),
        (
            [TURN, made("Reshape", ["A2", "none"], "A3"), made("MatMul", ["A3", "A3"], "X2")],
            r"X2 \(MatMul\); not compared with the model, because X2 \(MatMul\) does not run: .* dimension mismatch",
            {},
        ),
        # The axes of the directions and of the cells are joined in the wrong order, or T and B are exchanged.
        (
            [made("Transpose", ["A"], "A2", perm=[0, 2, 3, 1]), made("Reshape", ["A2", "none"], "X2")],
            r"A2 \(Transpose\), X2 \(Reshape\)",
            {"directions": 2},
        ),
        (
            [made("Squeeze", ["A", "one"], "A2"), made("Transpose", ["A2"], "X2", perm=[1, 0, 2])],
            r"A2 \(Squeeze\), X2 \(Transpose\)",
            {},
        ),
        ([made("Squeeze", ["A", "one"], "X2")], None, {"outputs": ("Z", "X2")}),
        ([made("Squeeze", ["A", "one"], "A2"), made("Slice", ["A2", "one", "two"], "X2")], r"X2 \(Slice\)", {}),
        ([made("Identity", ["X"], "X2")], None, {"columns": I}),
    ],
)
def test_onnx_dicts(between, left_out, options):
    model = onnx_chain(between, **options)
    layers = converted(convert.from_onnx, model, left_out)
    assert layers.keys() == {"a", "b"}
    for name, layer in layers.items():
        assert_same(layer, convert.from_onnx(model, name=name))


def onnx_fixed(shape, sizes, directions=1, makers=(), declared=(), head=(), end=-1):
    """Make a model of two LSTMs with a Transpose and a Reshape to `sizes` behind each, as PyTorch's new exporter does.

    `makers` are nodes before them, from x to X, and `head` those behind them, from y1 to Z.
    """
    g, direction, nodes = rng(), "bidirectional" if directions == 2 else "forward", [*makers]
    weights = {"sizes": np.array([*sizes, directions * H]), "end": np.array(end), "V": g.uniform(-1, 1, (H, 3))}
    for k, (x, inputs) in enumerate([("X", I), ("y0", directions * H)]):
        shapes = {"W": (4 * H, inputs), "R": (4 * H, H), "B": (8 * H,)}
        weights |= {f"{name}{k}": g.uniform(-1, 1, (directions, *form)) for name, form in shapes.items()}
        nodes += [
            helper.make_node("LSTM", [x, f"W{k}", f"R{k}", f"B{k}"], [f"Y{k}"], name=f"a{k}", direction=direction),
            made("Transpose", [f"Y{k}"], f"t{k}", perm=[0, 2, 1, 3]),
            made("Reshape", [f"t{k}", "sizes"], f"y{k}"),
        ]
    x = "x" if makers else "X"
    model = model_of([*nodes, *head], weights, ["Z" if head else "y1"], inputs=())
    infos = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, form) for name, form in [(x, shape), *declared]]
    model.graph.input.append(infos[0])
    model.graph.value_info.extend(infos[1:])
    return model


ROWS_FIRST = made("Transpose", ["x"], "X", perm=[1, 0, 2])
RELU = made("Relu", ["x"], "X")


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(
    ("shape", "sizes", "makers"),
    [
        ((7, 1, I), (7, 1), []),
        ((1, 7, I), (7, 1), [ROWS_FIRST]),
        ((2, 1, I), (2, 1), []),
        ((1, 7, I), (1, 7), []),
        ((1, 1, I), (1, 1), []),
        (("T", 1, I), (-1, 1), []),
        ((1, "T", I), (-1, 1), [ROWS_FIRST]),
        ((1, "B", I), (1, -1), []),
        ((7, "B", I), (7, -1), []),
    ],
)
def test_onnx_chains_of_one_row(shape, sizes, makers, directions):
    """A Reshape to (7, 1, H) leaves y as it is where the model's input has 7 steps and one row."""
    model = onnx_fixed(shape, sizes, directions, makers)
    stack, texts = all_warnings(convert.from_onnx, model)
    is_any_row = sizes == (7, -1)
    assert is_any_row or re.fullmatch(
        r"from_onnx: compared for ((T|B) = [12]( and )?)+ alone, which the model fixes", *texts
    )
    assert parts_of(stack) == " ".join(["LSTM" if directions == 1 else "Bidirectional"] * 2)
    x = rng().standard_normal([{"T": 6, "B": 1}.get(size, size) for size in shape])
    expected = ReferenceEvaluator(model).run(None, {"x" if makers else "X": x})[0]
    y, _ = stack(x, batch_first=bool(makers))
    np.testing.assert_allclose(y.swapaxes(0, 1) if makers else y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("shape", "sizes", "makers"),
    [
        ((1, 7, I), (7, 1), []),
        ((7, 1, I), (1, 7), []),
        ((7, 1, I), (7, 1), [ROWS_FIRST]),
        (("T", 1, I), (1, -1), []),
        ((1, "B", I), (-1, 1), []),
        (("T", "B", I), (7, 1), []),  # right for one row, and not for one step
        (("T", "B", I), (1, -1), []),
        ((7, "B", I), (7, 1), []),
        (None, (7, 1), []),
        ((7, 1, I), (1, 7), [RELU]),
        ((2**40, 1, I), (1, 2**40), []),
        (("T",) * 64, (7, 1), []),
        ((0, 1, I), (1, 7), []),
    ],
)
def test_onnx_reshapes_that_exchange_steps_and_rows(shape, sizes, makers):
    """The nodes are left out; a model that cannot run on inputs of other sizes is not compared."""
    layers, (text,) = all_warnings(convert.from_onnx, onnx_fixed(shape, sizes, makers=makers))
    assert isinstance(layers, dict) and [*layers] == ["a0", "a1"]
    first = "X (Relu), " if makers == [RELU] else ""
    is_run = shape is not None and {2**40, 0}.isdisjoint(shape) and (sizes != (7, 1) or {"T", "B"}.isdisjoint(shape))
    start = f"left out: {first}t0 (Transpose), y0 (Reshape)" if is_run else "not compared with the model, because "
    assert text.startswith(f"from_onnx: {start}")


def test_onnx_sizes_behind_other_nodes():
    """What stands before the first layer is left out, but the model states the shape that it gives."""
    model = onnx_fixed((7, 1, I), (7, 1), makers=[RELU], declared=[("X", (7, 1, I))])
    left_out = r"X \(Relu\); compared for B = 1 alone, which the model fixes"
    assert parts_of(converted(convert.from_onnx, model, left_out)) == "LSTM LSTM"


@pytest.mark.parametrize("end", [-1, 6])
def test_onnx_heads_of_one_row(end):
    head = [made("Gather", ["y1", "end"], "l", axis=0), made("Gemm", ["l", "V"], "G"), made("Relu", ["G"], "Z")]
    model = onnx_fixed((7, 1, I), (7, 1), head=head, end=end)
    stack, text = warned(convert.from_onnx, model)
    assert text == "from_onnx: compared for B = 1 alone, which the model fixes"
    assert parts_of(stack) == "LSTM LSTM Dense:relu:True"
    x = rng().standard_normal((7, 1, I))
    expected = ReferenceEvaluator(model).run(None, {"X": x})[0]
    np.testing.assert_allclose(stack(x)[0], expected, rtol=0, atol=1e-14)


def onnx_head(makers, **initializers):
    """Make a model, batch first, of an LSTM `a`, whose y is `A2` and whose last h is `A_h`, and of `makers`."""
    g = rng()
    weights = onnx_weights() | {
        "one": np.array([1]),
        "first": np.array([0]),
        "two": np.array([0, 1]),
        "V": g.uniform(-1, 1, (H, 3)),
    }
    weights |= {"b": g.uniform(-1, 1, 3), "last": np.array(-1), "H": np.array([H])} | initializers
    nodes = [
        made("Transpose", ["X"], "X1", perm=[1, 0, 2]),
        helper.make_node("LSTM", ["X1", "W", "R", "B"], ["A", "A_h"], name="a"),
        made("Squeeze", ["A", "one"], "A1"),
        made("Transpose", ["A1"], "A2", perm=[1, 0, 2]),
    ]
    return model_of([*nodes, *makers], weights, ["Z"])


LAST = made("Gather", ["A2", "last"], "L", axis=1)
IN_ROWS = [
    made("Shape", ["A1"], "S1"),
    made("Gather", ["S1", "order"], "S2"),
    made("Gather", ["S2", "two"], "S3"),
    made("ReduceProd", ["S3"], "S4", keepdims=1),
    made("Concat", ["S4", "H"], "S5", axis=0),
    made("Reshape", ["A2", "S5"], "D"),
    made("MatMul", ["D", "V"], "M"),
    made("Concat", ["S3", "O"], "S6", axis=0),
    made("Reshape", ["M", "S6"], "M2"),
    made("Add", ["M2", "b"], "Y3"),
    made("Softmax", ["Y3"], "Z", axis=2),
]


@pytest.mark.parametrize(
    ("makers", "parts", "left_out"),
    [
        ([made("MatMul", ["A2", "V"], "Z")], "LSTM Dense:None:False", None),
        ([made("MatMul", ["A2", "V"], "M"), made("Add", ["M", "b"], "Z")], "LSTM Dense:None:False", None),
        ([LAST, made("Gemm", ["L", "V", "b"], "Z")], "LSTM Dense:None:True", None),
        (
            [LAST, made("Gemm", ["L", "U", "b"], "G", transB=1), made("Softmax", ["G"], "Z", axis=1)],
            "LSTM Dense:softmax:True",
            None,
        ),
        (
            [made("Squeeze", ["A_h", "first"], "L"), made("Gemm", ["L", "V"], "G"), made("Relu", ["G"], "Z")],
            "LSTM Dense:relu:True",
            None,
        ),
        (IN_ROWS, "LSTM Dense:softmax:False", None),
        ([LAST, made("Gemm", ["L", "V", "b"], "Z", alpha=0.5)], "LSTM", r"Z \(Gemm\), L \(Gather\)"),
        (
            [made("MatMul", ["A2", "V"], "M"), made("Softmax", ["M"], "Z", axis=1)],
            "LSTM Dense:None:False",
            r"Z \(Softmax\)",
        ),
        ([made("MatMul", ["A2", "V"], "M"), made("Add", ["M", "M"], "Z")], "LSTM Dense:None:False", r"Z \(Add\)"),
        ([made("MatMul", ["A2", "V"], "M"), made("Gelu", ["M"], "Z")], "LSTM Dense:None:False", r"Z \(Gelu\)"),
        ([made("Tanh", ["A2"], "Z")], "LSTM", r"Z \(Tanh\)"),
    ],
)
def test_onnx_heads(makers, parts, left_out):
    """A dense layer and its activation, before and behind them what exporters write, beside onnx.reference."""
    model = onnx_head(makers, U=rng().uniform(-1, 1, (3, H)), order=np.array([1, 0, 2]), O=np.array([3]))
    layer = converted(convert.from_onnx, model, left_out)
    assert parts_of(layer) == parts
    if left_out is None:
        x = rng().standard_normal((B, T, I))
        expected = ReferenceEvaluator(model).run(None, {"X": x})[0]
        y, _ = layer(x, batch_first=True)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-14)


def test_onnx_bodies():
    """LSTMs in the bodies of loops and branches are found, and get weights from the graph around."""
    weights = onnx_weights() | {"V": onnx_weights()["R"] / 2}
    nodes = [helper.make_node("LSTM", ["x", "W", name, "B"], ["y"], name=name) for name in ("R", "V")]
    body, other = (onnx_graph([node], {}, ["y"], inputs=()) for node in nodes)
    loop = helper.make_node("If", ["X"], ["Y"], name="either", then_branch=body, else_branch=other)
    model = helper.make_model(onnx_graph([loop], weights, ["Y"]))
    layers = converted(convert.from_onnx, model, r"either \(If\)")
    for name, node in zip(("R", "V"), nodes, strict=True):
        assert_same(layers[name], convert.from_onnx(node, weights))
        assert_same(convert.from_onnx(model, name=name), layers[name])


def test_onnx_loops():
    """tf2onnx writes GRUs of Keras out in loops; then the Keras model is the way."""
    nodes = [made("MatMul", ["h", "R"], "z"), made("Tanh", ["z"], "h2")]
    body = onnx_graph(nodes, {"R": np.ones((I, I))}, ["more", "h2"], inputs=["k", "more", "h"])
    loop = helper.make_node("Loop", ["steps", "", "X"], ["Y"], name="gru/while_loop", body=body)
    weights = onnx_weights() | {"steps": np.array(7)}
    text = r"Cells that are written out in single nodes, as by tf2onnx .* convert.from_keras\(model\)"
    with pytest.raises(ValueError, match=rf"found gru/while_loop \(Loop\)\. {text}"):
        convert.from_onnx(helper.make_model(onnx_graph([loop], weights, ["Y"])))
    above = helper.make_node("LSTM", ["Y", "W", "R", "B"], ["Z"], name="above")
    model = helper.make_model(onnx_graph([loop, above], weights, ["Z"]))
    assert_same(converted(convert.from_onnx, model, r"gru/while_loop \(Loop\)"), convert.from_onnx(above, weights))


def test_onnx_functions():
    weights = onnx_weights()
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], name="a")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Layer", ["x", "w", "r", "b"], ["y"], [node], opsets[:1])
    call = helper.make_node("Layer", ["X", "W", "R", "B"], ["Y"], domain="own")
    graph = onnx_graph([call], {name: weights[name] for name in "WRB"}, ["Y"])
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    with pytest.raises(ConversionError, match=r"in the model's function 'Layer', .*inline_local_functions\(model\)$"):
        convert.from_onnx(model)
    layer = convert.from_onnx(onnx.inliner.inline_local_functions(model))
    assert_same(layer, convert.from_onnx(helper.make_node("LSTM", ["X", "W", "R", "B"], ["Y"]), weights))


def test_onnx_left_out_in_short():
    """A long list is cut; nodes that nothing reads, and those that only compute shapes, are not in it."""
    weights = onnx_weights()
    nodes = [made("Exp", [f"X{k}"], f"X{k + 1}") for k in range(20)]
    nodes += [made("Tanh", ["X20"], "unused"), made("Shape", ["X20"], "shape")]
    nodes += [made("ConstantOfShape", ["shape"], "zeros"), made("Expand", ["zeros", "shape"], "h")]
    nodes.append(helper.make_node("LSTM", ["X20", "W", "R", "B", "", "h"], ["Y"]))
    model = helper.make_model(onnx_graph(nodes, weights, ["Y"], inputs=["X0"]))
    twelve = ", ".join(rf"X{k} \(Exp\)" for k in range(1, 13))
    h = "Input initial_h must have shape .*"  # it has one row for each step, so the model cannot run
    left_out = rf"{twelve}, and 8 more; not compared with the model, because Y \(LSTM\) does not run: {h}"
    layer = converted(convert.from_onnx, model, left_out)
    assert_same(layer, convert.from_onnx(helper.make_node("LSTM", ["X", "W", "R", "B"], ["Y"]), weights))
    empty = helper.make_model(onnx_graph(nodes[:1], {}, ["X1"], inputs=["X0"]))
    with pytest.raises(
        ValueError, match=r"from_onnx: expected a model with an LSTM, a GRU or an RNN, found X1 \(Exp\)"
    ):
        convert.from_onnx(empty)


def test_exported_models_that_do_not_tell_their_layer():
    """They get the weights with every call, or their description is none."""
    with pytest.raises(
        ValueError, match=r"the model has no initializers w, b of its LSTM, .*: it gets them with every"
    ):
        convert.from_onnx(onnx_export.export(lstm(rng()), None, train=True))
    model = onnx_export.export(lstm(rng()), None)
    model.metadata_props[1].value = '{"type": "Lstm"}'
    with pytest.raises(
        ValueError, match=r"from_onnx: the model's blockcell.layer cannot be read: it has a layer of type"
    ):
        convert.from_onnx(model)


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_dense_is_no_cell(kind):
    dense = Dense.init(H, 2, seed=0)
    with pytest.raises(ConversionError, match=r"Convert layer.layers one by one"):
        convert.to_torch(Stack([kind.init(I, H, seed=0), dense]))
    with pytest.raises(TypeError, match=r"the layer is of type Dense; expected a blockcell.LSTM"):
        convert.to_onnx(dense)


# ---------------------------------------------------------------------------------------- Keras and PyTorch themselves
@pytest.mark.peers
def test_keras_models_themselves():
    keras = pytest.importorskip("keras")
    for case, (model, arrays) in generate_layers.keras_model_cases(seed=1).items():
        if case in KERAS_DICTS:
            assert isinstance(warned(from_keras, model)[0], dict), case
            continue
        parts, left_out = KERAS_STACKS[case]
        found = converted(from_keras, model, left_out)
        if "y" in arrays and left_out in (None, KERAS_STACKS["masking"][1]):
            y, _ = found(arrays["x"].swapaxes(0, 1))
            y = y.swapaxes(0, 1) if y.ndim == 3 else y
            assert parts_of(found) == parts, case
            expected = keras.ops.convert_to_numpy(model(arrays["x"]))  # now: models share layers
            np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6, err_msg=case)
            if case == "sequential":
                model.set_weights([0 * array for array in model.get_weights()])
                model.set_weights([array for part in convert.to_keras(found) for array in part])
                again = keras.ops.convert_to_numpy(model(arrays["x"]))
                np.testing.assert_array_equal(again, expected)
    model = keras.Sequential([keras.layers.Dense(2)])
    model.build((None, I))
    with pytest.raises(ValueError, match="expected a model with an LSTM, a GRU or an RNN, found dense"):
        from_keras(model)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:You are saving", "ignore:__array__ implementation")  # as a file, Keras' own
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
@pytest.mark.parametrize("ending", ["", ".keras", ".h5"])
def test_time_distributed_of_keras_itself(package, ending, tmp_path, seed):
    keras = pytest.importorskip(package)
    keras.utils.set_random_seed(seed)
    L = keras.layers
    x = L.Input((5, 6, I))
    y = L.TimeDistributed(L.Bidirectional(L.LSTM(H)), name="inner")(x)
    model = keras.Model(x, L.GRU(2, name="upper")(y))
    if ending:
        model.save(tmp_path / f"model{ending}")
    source = tmp_path / f"model{ending}" if ending else model
    layers, message = warned(from_keras, source)
    assert re.match(r"from_keras: left out: inner \(TimeDistributed\): it calls its layer for each slice", message)
    (inner_name,) = layers.keys() - {"upper"}
    assert inner_name.startswith("inner/")
    values = np.random.default_rng(seed).standard_normal((B, 5, 6, I)).astype(np.float32)
    states = layers[inner_name](values.reshape(B * 5, 6, I), batch_first=True)[1]
    ends = np.concatenate([states[0].h, states[1].h], -1).reshape(B, 5, 2 * H)
    _, last = layers["upper"](ends, batch_first=True)
    np.testing.assert_allclose(last.h, np.asarray(model(values)), rtol=0, atol=1e-6)


@pytest.mark.peers
def test_halves_of_two_sizes_of_keras_itself(seed):
    """The message says how to compute what Keras does."""
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(seed)
    L = keras.layers
    halves = [L.LSTM(units, return_sequences=True, go_backwards=units == 5) for units in (4, 5)]
    both = L.Bidirectional(halves[0], backward_layer=halves[1])
    x = np.random.default_rng(seed).standard_normal((B, T, I)).astype(np.float32)
    expected = np.asarray(both(x)).swapaxes(0, 1)
    with pytest.raises(ConversionError, match="has a forward layer of 4 units and a backward layer of 5"):
        from_keras(both)
    halves = both.forward_layer, both.backward_layer
    fw, bw = (from_keras(half.get_weights(), recurrent_activation="sigmoid") for half in halves)
    x = x.swapaxes(0, 1)
    y = np.concatenate([fw(x)[0], bw(x[::-1])[0][::-1]], -1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


@pytest.mark.peers
def test_torch_onnx_itself():
    pytest.importorskip("onnxscript")
    pytest.importorskip("torch")
    for case, (_, arrays) in generate_layers.torch_onnx_cases(seed=1).items():
        check_torch_onnx(case, arrays)


@pytest.mark.peers
def test_torch_modules_themselves():
    nn = pytest.importorskip("torch").nn
    lstm, gru = nn.LSTM(I, H, 2), nn.GRU(H, 2)
    stack = convert.from_torch(nn.Sequential(lstm, nn.Dropout(0.5), gru, nn.Linear(2, 3), nn.Softmax(dim=-1)))
    assert parts_of(stack) == "LSTM LSTM GRU Dense:softmax:False"
    x = rng().standard_normal((T, B, I)).astype(np.float32)
    y = convert.from_torch(gru)(convert.from_torch(lstm)(x)[0])[0]
    np.testing.assert_array_equal(Stack(stack.layers[:3])(x)[0], y)
    nn.utils.parametrizations.weight_norm(lstm, "weight_hh_l1")
    with pytest.raises(ConversionError, match=r"weight_hh_l1.original0 is a part of .* parametrize.remove"):
        convert.from_torch(lstm)
    prune = pytest.importorskip("torch.nn.utils.prune")
    prune.l1_unstructured(gru, "weight_hh_l0", amount=0.5)
    with pytest.raises(ConversionError, match=r"weight_hh_l0_orig is a part of .* prune.remove or"):
        convert.from_torch(gru)
    prune.remove(gru, "weight_hh_l0")
    assert (convert.from_torch(gru).weights["w_c"][H:] == 0).any()
