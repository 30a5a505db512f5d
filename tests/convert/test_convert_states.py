"""The states that models start from: what `initial_state` gives beside the layer, and that results are then theirs."""

from __future__ import annotations

import numpy as np
import pytest
from convert_cases import (
    H,
    I,
    T,
    assert_same,
    export_by_torch,
    from_torch,
    made,
    model_of,
    onnx_weights,
    rng,
    torch_weights,
    warned,
)
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from blockcell import LSTM, Bidirectional, GRUState, LSTMState, Stack, convert

OWN = "from_onnx: a state of its own to start from: "


def onnx_tensor(*values):
    """Make an ONNX tensor of values."""
    return numpy_helper.from_array(np.array(values))


def int64_array(*values):
    """Make an array of int64, as ONNX has sizes, axes and indices."""
    return np.array(values, np.int64)


def random_states(g, *shape):
    """Draw states of a shape."""
    return g.uniform(-1, 1, shape)


def node_of(kind="LSTM", names=("h", "c"), result="Y", x="X", prefix="", **attributes):
    """Make a recurrent node with initial states of these names."""
    inputs = [x, *(prefix + name for name in "WRB"), "", *names[: 2 if kind == "LSTM" else 1]]
    return helper.make_node(kind, inputs, [result], name=result.lower(), hidden_size=H, **attributes)


BATCH = [made("Shape", ["X"], "sizes"), made("Gather", ["sizes", "1"], "batch")]  # X is [T,B,I]
FORMS = {  # how models make rows of h0 [1,1,H] for a batch: nodes
    "constant": [],
    "Identity": [made("Identity", ["h0"], "h")],
    "Expand": [*BATCH, made("Concat", ["1", "batch", "4"], "shape", axis=0), made("Expand", ["h0", "shape"], "h")],
    "Expand, as PyTorch's new exporter has it": [
        made("Shape", ["X"], "batch", start=1, end=2),
        made("Concat", ["-1", "batch", "-1"], "shape", axis=0),
        made("Abs", ["shape"], "positive"),
        made("Expand", ["h0", "positive"], "h"),
    ],
    "Expand, as PyTorch's old exporter has it": [
        *BATCH,
        made("Concat", ["-1", "batch", "-1"], "shape", axis=0),
        made("ConstantOfShape", ["3"], "ones", value=onnx_tensor(1)),
        made("Mul", ["ones", "-1"], "negative"),
        made("Equal", ["shape", "negative"], "is_negative"),
        made("Where", ["is_negative", "ones", "shape"], "positive"),
        made("Expand", ["h0", "positive"], "h"),
    ],
    "Tile": [*BATCH, made("Concat", ["1", "batch", "1"], "counts", axis=0), made("Tile", ["h0", "counts"], "h")],
    "Unsqueeze, Expand, Transpose": [
        made("Tanh", ["h0"], "bounded"),
        *BATCH,
        made("Concat", ["batch", "4"], "shape", axis=0),
        made("Expand", ["bounded", "shape"], "rows"),
        made("Unsqueeze", ["rows", "1"], "B1H"),
        made("Transpose", ["B1H"], "h", perm=[1, 0, 2]),
    ],
    "ConstantOfShape": [
        *BATCH,
        made("Concat", ["1", "batch", "4"], "shape", axis=0),
        made("ConstantOfShape", ["shape"], "h", value=onnx_tensor(0.25)),
    ],
    "zeros + h0": [
        *BATCH,
        made("Concat", ["1", "batch", "4"], "shape", axis=0),
        made("ConstantOfShape", ["shape"], "zeros", value=onnx_tensor(0.0)),
        made("Add", ["zeros", "h0"], "h"),
    ],
}
OF_VECTORS = ("Unsqueeze, Expand, Transpose", "zeros + h0")  # h0 is [H]
NUMBERS = {str(value): int64_array(value) for value in (-1, 1, 3, 4)}


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_made_of_constants(form, kind):
    """The state has one row, calls take it for any batch, and the results are those of the model."""
    makers, constants = FORMS[form], {"c": random_states(rng(), 1, 1, H)}
    h0 = random_states(rng(), *((H,) if form in OF_VECTORS else (1, 1, H)))
    weights = onnx_weights(kind) | NUMBERS | ({"h0": h0} if makers else {"h": h0}) | constants
    model = model_of([*makers, node_of(kind)], weights)
    layer, state = convert.from_onnx(model, initial_state=True)
    layer_without_state, text = warned(convert.from_onnx, model)
    assert_same(layer_without_state, layer)
    also = " and initial_c 'c' (input[6])" if kind == "LSTM" else ""
    assert text.startswith(f"{OWN}{kind} 'y' has initial_h 'h' (input[5]){also}. Here a layer starts from zeros")
    assert type(state) is layer._state and {array.shape for array in state} == {(1, H)}
    for batch in (1, 2, 5):
        if batch > 1 and form in ("constant", "Identity"):
            break
        x = rng().standard_normal((T, batch, I))
        model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.repeat(state[0][None], batch, 1), "c"))
        (expected,) = ReferenceEvaluator(model).run(None, {"X": x})
        np.testing.assert_allclose(layer(x, state)[0], expected[:, 0], rtol=0, atol=1e-14)


def test_the_line_that_the_warning_shows():
    weights = onnx_weights() | dict(zip("hc", random_states(rng(), 2, 1, 1, H), strict=True))
    model = model_of([node_of()], weights)
    _, text = warned(convert.from_onnx, model)
    lines = text.split("comes with the layer: ")[1].replace("...", "model").split("; ")
    scope = {"convert": convert, "model": model, "x": rng().standard_normal((T, 3, I))}
    exec("\n".join(lines), scope)
    np.testing.assert_equal(scope["state"], LSTMState(weights["c"][0], weights["h"][0]))
    expected = scope["layer"](scope["x"], {"h": weights["h"][0].repeat(3, 0), "cs": weights["c"][0].repeat(3, 0)})
    np.testing.assert_array_equal(scope["y"], expected[0])


def two_lstms(**attributes):
    """Return weights and nodes of two LSTMs; each direction of the second one starts from a state of its own."""
    g = rng()
    weights = {f"a{name}": array for name, array in onnx_weights().items()}
    weights |= {f"b{name}": array for name, array in onnx_weights(directions=2).items()}
    weights["bW"], weights["axis"] = g.uniform(-1, 1, (2, 4 * H, H)), int64_array(1)
    weights |= {"h": random_states(g, 2, 1, H), "c": random_states(g, 2, 1, H)}
    return weights, [
        node_of(names=(), result="A", prefix="a"),
        made("Squeeze", ["A", "axis"], "A2"),
        node_of(x="A2", prefix="b", direction="bidirectional"),
    ]


def test_states_of_a_stack():
    weights, nodes = two_lstms()
    layer, state = convert.from_onnx(model_of(nodes, weights), initial_state=True)
    assert isinstance(layer, Stack) and isinstance(layer.layers[1], Bidirectional)
    zeros = np.zeros((1, H))
    expected = LSTMState(zeros, zeros), tuple(LSTMState(weights["c"][d], weights["h"][d]) for d in (0, 1))
    np.testing.assert_equal(state, expected)
    x = rng().standard_normal((T, 3, I))
    model = model_of(nodes, weights | {name: weights[name].repeat(3, 1) for name in "hc"})
    (y,) = ReferenceEvaluator(model).run(None, {"X": x})
    np.testing.assert_allclose(layer(x, state)[0], np.concatenate([y[:, 0], y[:, 1]], -1), rtol=0, atol=1e-14)


def test_states_of_several_layers():
    """A dict of them, as of the layers."""
    weights, nodes = two_lstms()
    model = model_of([nodes[0], made("Exp", ["A"], "E"), made("Squeeze", ["E", "axis"], "A2"), nodes[2]], weights)
    with pytest.warns(UserWarning) as record:
        layers, states_by_name = convert.from_onnx(model, initial_state=True)
    assert [str(warning.message) for warning in record] == ["from_onnx: left out: E (Exp)"]
    assert layers.keys() == {"a", "y"} and states_by_name["a"] is None
    np.testing.assert_array_equal(states_by_name["y"][1].h, weights["h"][1])
    layer, state = convert.from_onnx(model, name="y", initial_state=True)
    assert_same(layer, layers["y"])
    np.testing.assert_equal(state, states_by_name["y"])
    with pytest.warns(UserWarning) as record:
        convert.from_onnx(model)
    assert str(record[-1].message).endswith("y, last = layers['a'](x, states['a'])")


def test_rows_that_differ():
    """The state is then for a batch of this size."""
    h = random_states(rng(), 1, 3, H)
    node, weights = node_of(), onnx_weights() | {"h": h, "c": random_states(rng(), 1, 1, H)}
    layer, state = convert.from_onnx(node, weights, initial_state=True, check=False)  # which onnxruntime refuses
    np.testing.assert_array_equal(state.h, h[0])
    np.testing.assert_array_equal(state.cs, weights["c"][0].repeat(3, 0))
    assert layer(np.zeros((T, 3, I)), state)[0].shape == (T, 3, H)


def test_zeros_stay_as_they_are():
    weights = onnx_weights() | {"h": np.zeros((1, 1, H)), "c": np.zeros((1, 1, H))}
    assert convert.from_onnx(model_of([node_of()], weights), initial_state=True)[1] is None
    layer, state = convert.from_onnx(node_of(names=()), weights, initial_state=True)
    assert state is None and isinstance(layer, LSTM)
    _, state = convert.from_onnx(node_of(), weights | {"h": np.ones((1, 1, H))}, initial_state=True)
    np.testing.assert_equal(state, LSTMState(np.zeros((1, H)), np.ones((1, H))))


@pytest.mark.parametrize(
    "makers",
    [
        [made("ReduceMax", ["X"], "m", keepdims=0), made("Mul", ["h0", "m"], "h")],
        [  # as many times h0 as there are steps
            made("Shape", ["X"], "T", start=0, end=1),
            made("Cast", ["T"], "float", to=11),
            made("Mul", ["h0", "float"], "h"),
        ],
        [made("Shape", ["X"], "sizes"), made("Expand", ["h0", "sizes"], "h")],
        [made("Shape", ["X"], "sizes"), made("Tile", ["h0", "huge"], "h")],
        [made("Expand", ["h0", "huge"], "h")],
        [made("ConstantOfShape", ["huge"], "h", value=onnx_tensor(1.0))],
        [],
    ],
)
def test_states_that_are_no_constants(makers):
    """They are the caller's, as before."""
    constants = {"h0": random_states(rng(), 1, 1, H), "c": np.zeros((1, 1, H)), "huge": int64_array(1, 2**40, H)}
    model = model_of([*makers, node_of()], onnx_weights() | constants)
    with pytest.warns(UserWarning) as record:
        _, state = convert.from_onnx(model, initial_state=True)
    assert state is None
    assert str(record[-1].message).startswith("from_onnx: left to the caller: LSTM 'y' has initial_h 'h' (input[5]")


def test_states_of_nodes_that_are_not_computed():
    """Random numbers stand for what they give: no two draws have the same, also for fixed steps and rows."""
    weights = onnx_weights("GRU") | {"h0": random_states(rng(), 1, 1, H)}
    model = model_of([made("Exp", ["h0"], "h"), node_of("GRU")], weights)
    for size in (T, 1, I):
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    with pytest.warns(UserWarning, match="^from_onnx: left to the caller: GRU 'y' has initial_h 'h'"):
        assert convert.from_onnx(model, initial_state=True)[1] is None


@pytest.mark.parametrize(
    ("h", "error", "message"),
    [
        (np.ones((1, 2, H + 1)), ValueError, r"initial_h has shape \(1, 2, 5\); expected \(1, B, 4\)"),
        (np.ones((2, 1, H)), ValueError, r"initial_h has shape \(2, 1, 4\); expected \(1, B, 4\)"),
        (np.ones(H), ValueError, r"initial_h has shape \(4,\); expected \(1, B, 4\)"),
        (np.ones((1, 2, H), np.float32), TypeError, "initial_h has dtype float32; expected float64, that of W"),
    ],
)
def test_states_that_do_not_fit(h, error, message):
    with pytest.raises(error, match=f"^from_onnx: LSTM 'y': {message}"):
        convert.from_onnx(node_of(names=["h"]), onnx_weights() | {"h": h})


# -------------------------------------------------------------------------------------------- parameters of PyTorch's
@pytest.mark.parametrize("prefix", [None, "rnn."])
@pytest.mark.parametrize("gates", [3, 4])
def test_parameters_of_a_module(gates, prefix):
    """Named, they are the state; else they are left out, and what to do is said."""
    weights = {f"rnn.{name}": array for name, array in torch_weights(gates=gates).items()}
    h0, c0 = random_states(rng(), 2, 1, 1, H)
    names = ("first.h0", "first.c0")[: gates - 2]
    module = weights | dict(zip(names, (h0, c0), strict=False))
    layer, state = from_torch(module, prefix=prefix, initial_state=names)
    expected = from_torch(weights)
    assert_same(layer, expected)
    np.testing.assert_equal(state, LSTMState(c0[0], h0[0]) if gates == 4 else GRUState(h0[0]))
    layer_without_state, text = warned(from_torch, module)
    assert_same(layer_without_state, expected)
    names_in_message = "h0, c0" if gates == 4 else "h0"
    assert text == (
        f"from_torch: left out: first ({names_in_message}): if that is what it starts from, pass initial_state={names}"
    )


def test_parameters_of_a_stack():
    """The cells are in PyTorch's order: layers, and directions of each. The batch may be missing, or fixed."""
    kinds = {"_l0": I, "_l0_reverse": I, "_l1": 2 * H, "_l1_reverse": 2 * H}
    source = {name: array for suffix, size in kinds.items() for name, array in torch_weights("", suffix, size).items()}
    h0, c0 = random_states(rng(), 4, H), random_states(rng(), 4, 3, H)
    layer, state = from_torch(source | {"h": h0, "c": c0}, initial_state=["h", "c"])
    assert isinstance(layer, Stack) and len(state) == 2
    for k, part in enumerate(cell for pair in state for cell in pair):
        np.testing.assert_equal(part, LSTMState(c0[k], h0[[k]].repeat(3, 0)))
    assert layer(np.zeros((T, 3, I)), state)[0].shape == (T, 3, 2 * H)


@pytest.mark.parametrize(
    ("parameters", "names", "error", "message"),
    [
        ({}, ("h0", "c0"), ValueError, r"initial_state is \('h0', 'c0'\); expected the names that h and cs have"),
        ({"h0": np.ones((1, 1, H))}, ("h0",), ValueError, "expected the names that h and cs have in the source"),
        ({"h0": np.ones((1, 1, H))}, "h0", ValueError, "initial_state is 'h0'; expected the names"),
        (
            {"h0": np.ones((1, 1, H)), "c0": np.ones((2, 1, H))},
            ("h0", "c0"),
            ValueError,
            r"c0 has shape \(2, 1, 4\); expected \(1, 1, 4\) or \(1, 4\)",
        ),
        (
            {"h0": np.ones((1, 1, H), np.float32), "c0": np.ones((1, 1, H))},
            ("h0", "c0"),
            TypeError,
            "h0 has dtype float32; expected float64, that of its weights",
        ),
        (torch_weights("b."), ("h0", "c0"), ValueError, r"expected a prefix, too, of \['', 'b.'\]"),
    ],
)
def test_parameters_that_do_not_fit(parameters, names, error, message):
    with pytest.raises(error, match=f"^from_torch: .*{message}"):
        from_torch(torch_weights() | parameters, initial_state=names)


@pytest.mark.peers
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("way", ["expand", "repeat", "added"])
@pytest.mark.parametrize(("layers", "directions"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_exports_with_parameters(kind, layers, directions, way, dynamo):
    """A module whose h0 and c0 are parameters: y is PyTorch's for batches of other sizes than that of the export."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(torch.nn, kind)(I, H, layers, bidirectional=directions == 2, batch_first=True)
            self.first = torch.nn.ParameterList(
                torch.randn(layers * directions, 1, H) for _ in range(1 + (kind == "LSTM"))
            )

        def forward(self, x):
            batch = x.shape[0]
            if way == "expand":
                first = [array.expand(-1, batch, -1).contiguous() for array in self.first]
            elif way == "repeat":
                first = [array.repeat(1, batch, 1) for array in self.first]
            else:
                first = [x.new_zeros(len(array), batch, H) + array for array in self.first]
            return self.rnn(x, tuple(first) if kind == "LSTM" else first[0])[0]

    torch.manual_seed(layers)
    model, x = Model().eval(), torch.randn(3, T, I)
    sizes = {"dynamic_shapes": ({0: torch.export.Dim("B", min=1, max=99)},)} if dynamo else {}
    sizes = sizes or {"dynamic_axes": {"x": {0: "B"}}, "input_names": ["x"]}
    layer, state = convert.from_onnx(export_by_torch(model, (x,), dynamo, **sizes), initial_state=True)
    for batch in (1, 3, 7):
        x = torch.randn(batch, T, I)
        with torch.no_grad():
            expected = model(x)
        np.testing.assert_allclose(layer(x.numpy(), state, batch_first=True)[0], expected, rtol=0, atol=1e-6)
