"""Converted layers compute what the originals do: results stored from Keras and PyTorch, onnx.reference, onnxruntime
and ONNX's own test cases, the float64 formulas.  What cannot be converted is refused with the reason.

`make test-peers` does the same with Keras and PyTorch themselves.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import pytest
from golden import generate_layers
from golden.generate_layers import weights_of
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.convert.shared import ORDERS, reorder
from blockcell.convert.tf1 import FORGET_BIAS
from blockcell.formulas import FORMULAS
from blockcell.layers import GRU, LSTM, Bidirectional, LSTMState, Stack

GOLDEN = Path(__file__).parent / "golden"
SEED = int(os.environ.get("BLOCKCELL_SEED", 20))
T, B, I, H = 5, 2, 3, 4  # noqa: E741
RESET_AFTER = "after the product with the recurrent weights"


def rng():
    return np.random.default_rng(SEED)


def lstm(g, dtype=np.float64, inputs=I, hidden=H, peephole=False, **options):
    shapes = {"w": (inputs + hidden, 4 * hidden), "b": (4 * hidden,)}
    shapes |= dict.fromkeys(("wci", "wcf", "wco"), (hidden,)) if peephole else {}
    return LSTM(**{name: g.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}, **options)


def gru(g, dtype=np.float64, inputs=I, hidden=H):
    shapes = (inputs + hidden, 2 * hidden), (inputs + hidden, hidden), (2 * hidden,), (hidden,)
    return GRU(*(g.uniform(-1, 1, shape).astype(dtype) for shape in shapes))


def assert_same(first, second, rtol=0.0, atol=0.0):
    """The same weights under the same names, and the same kinds of layers in the same places."""
    assert repr(first) == repr(second) and first.weights.keys() == second.weights.keys()
    for name, value in first.weights.items():
        assert value.dtype == second.weights[name].dtype
        np.testing.assert_allclose(second.weights[name], value, rtol=rtol, atol=atol, err_msg=name)


def stored(package):
    cases = {}
    if (path := GOLDEN / f"{package}.npz").exists():
        with np.load(path) as file:
            for key in file.files:
                case, name = key.split("/")
                cases.setdefault(case, {})[name] = file[key]
    return cases


# --------------------------------------------------------------------------------------------------------- gate orders
def test_reorder():
    given = np.repeat(np.array([10, 20, 30, 40]), 2) + np.tile([1, 2], 4)
    for axis, values in ((0, given), (-1, given[None]), (0, given[:, None])):
        wanted = np.array([11, 12, 31, 32, 41, 42, 21, 22]).reshape(values.shape)  # c, the second, becomes the last
        np.testing.assert_array_equal(reorder(values, "icfo", "ifoc", axis), wanted)


def test_orders_are_permutations():
    for name, order in ORDERS.items():
        letters = "ifo" if "peepholes" in name else "cru" if "GRU" in name else "cfio"
        assert sorted(order) == sorted(letters), name


# --------------------------------------------------------------------------------------------------------------- Keras
KERAS = types.ModuleType("tf_keras.stand_in")
exec("def tanh(x): ...\ndef sigmoid(x): ...\ndef relu(x): ...\ndef hard_sigmoid(x): ...", vars(KERAS))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, KERAS.__name__, KERAS)


class KerasLayer:
    """Stands for a layer of Keras: its class, activations, get_config and get_weights are all that is looked at."""

    def __init__(self, weights=(), **config):
        defaults = {"activation": "tanh", "recurrent_activation": "sigmoid", "go_backwards": False}
        self.config = defaults | ({"reset_after": True} if type(self).__name__ == "GRU" else {}) | config
        self.weights = list(weights)
        self.name = "a_layer"
        self.activation, self.recurrent_activation = (
            getattr(KERAS, self.config[name], None) for name in ("activation", "recurrent_activation")
        )

    def get_config(self):
        return self.config

    def get_weights(self):
        return self.weights


def keras(kind, *weights, **config):
    if not hasattr(KERAS, kind):
        setattr(KERAS, kind, type(kind, (KerasLayer,), {"__module__": KERAS.__name__}))
    return getattr(KERAS, kind)(*weights, **config)


def keras_bidirectional(fw, bw, merge_mode="concat"):
    layer = keras("Bidirectional", merge_mode=merge_mode)
    layer.forward_layer, layer.backward_layer = fw, bw
    return layer


def check_keras(arrays):
    source = list(weights_of(arrays).values())
    options = {"reset_after": False} if source[0].shape[1] == 3 * H else {}
    layer = convert.from_keras(source, **options)
    y, _ = layer(arrays["x"].swapaxes(0, 1))
    np.testing.assert_allclose(y.swapaxes(0, 1), arrays["y"], rtol=0, atol=1e-6)
    back = convert.to_keras(layer)
    pairs = zip(back[:2] + back[3:5], [w for w in source if w.ndim == 2], strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
    assert_same(layer, convert.from_keras(back))


@pytest.mark.parametrize(("case", "arrays"), stored("keras").items(), ids=stored("keras"))
def test_stored_keras(case, arrays):
    check_keras(arrays)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def keras_lstm(x, kernel, recurrent, bias):
    """keras.layers.LSTM, as its source computes it: gates i, f, c, o."""
    h, c, ys = np.zeros((B, H)), np.zeros((B, H)), []
    for step in x:
        z = step @ kernel + h @ recurrent + bias
        z0, z1, z2, z3 = z[:, :H], z[:, H : 2 * H], z[:, 2 * H : 3 * H], z[:, 3 * H :]
        c = sigmoid(z1) * c + sigmoid(z0) * np.tanh(z2)
        h = sigmoid(z3) * np.tanh(c)
        ys.append(h)
    return np.stack(ys)


def keras_gru(x, kernel, recurrent, bias):
    """keras.layers.GRU with reset_after=False: gates z, r, h."""
    h, ys = np.zeros((B, H)), []
    for step in x:
        m = step @ kernel + bias
        z = sigmoid(m[:, :H] + h @ recurrent[:, :H])
        r = sigmoid(m[:, H : 2 * H] + h @ recurrent[:, H : 2 * H])
        h = z * h + (1 - z) * np.tanh(m[:, 2 * H :] + (r * h) @ recurrent[:, 2 * H :])
        ys.append(h)
    return np.stack(ys)


@pytest.mark.parametrize(("kind", "formula", "gates"), [("LSTM", keras_lstm, 4), ("GRU", keras_gru, 3)])
def test_keras_formulas(kind, formula, gates):
    g = rng()
    x = g.standard_normal((T, B, I))
    weights = [[g.uniform(-1, 1, shape) for shape in ((I, gates * H), (H, gates * H), (gates * H,))] for _ in "fb"]
    fw, bw = (keras(kind, w, reset_after=False, go_backwards=k == 1) for k, w in enumerate(weights))
    expected = formula(x, *weights[0])
    np.testing.assert_allclose(convert.from_keras(fw)(x)[0], expected, rtol=0, atol=1e-14)
    both = np.concatenate([expected, formula(x[::-1], *weights[1])[::-1]], axis=-1)
    np.testing.assert_allclose(convert.from_keras(keras_bidirectional(fw, bw))(x)[0], both, rtol=0, atol=1e-14)
    assert_same(convert.from_keras(weights[0] + weights[1]), convert.from_keras(keras_bidirectional(fw, bw)))
    # what the refusal of go_backwards says
    np.testing.assert_allclose(
        convert.from_keras(bw.get_weights())(x[::-1])[0], formula(x[::-1], *weights[1]), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("gate_order", ["icfo", "ifco"])
def test_to_keras(gate_order):
    g = rng()
    layer = lstm(g, forget_bias=0.75, cell_clip=-1, gate_order=gate_order)
    x = g.standard_normal((T, B, I))
    np.testing.assert_allclose(keras_lstm(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    layer = gru(g)
    np.testing.assert_allclose(keras_gru(x, *convert.to_keras(layer)), layer(x)[0], rtol=0, atol=1e-14)
    stack = Stack([Bidirectional(lstm(g), lstm(g)), gru(g, inputs=2 * H)])
    weights = convert.to_keras(stack)
    assert [len(part) for part in weights] == [6, 3]
    assert_same(convert.from_keras(weights), stack)


def arrays(*shapes, dtype=np.float32):
    return [np.zeros(shape, dtype) for shape in shapes]


LSTM_ARRAYS = arrays((I, 4 * H), (H, 4 * H), (4 * H,))
GRU_ARRAYS = arrays((I, 3 * H), (H, 3 * H), (3 * H,))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: keras("GRU", GRU_ARRAYS), f"reset_after=True .Keras's default.*{RESET_AFTER}"),
        (lambda: arrays((I, 3 * H), (H, 3 * H), (2, 3 * H)), f"bias has shape .2, 12.*{RESET_AFTER}"),
        (lambda: GRU_ARRAYS[:2], "without a bias does not show whether it has reset_after=True"),
        (lambda: keras("LSTM", LSTM_ARRAYS, recurrent_activation="hard_sigmoid"), "'hard_sigmoid'; only Keras"),
        (lambda: keras("LSTM", LSTM_ARRAYS, activation="relu"), "activation='relu'; only Keras's own 'tanh'"),
        (lambda: keras("LSTM", LSTM_ARRAYS, go_backwards=True), r"go_backwards=True.*x\[::-1\]"),
        (lambda: keras("SimpleRNN"), "a tf_keras.stand_in.SimpleRNN; expected Keras's LSTM, GRU or Bid"),
        (lambda: keras("Sequential"), "Of a model, pass the recurrent layers of model.layers in a list"),
        (lambda: keras_bidirectional(keras("LSTM"), keras("LSTM"), "sum"), "merge_mode='sum'; only 'concat'"),
        (lambda: keras_bidirectional(keras("SimpleRNN"), keras("LSTM")), "neither Keras's LSTM nor its GRU"),
        (
            lambda: keras_bidirectional(keras("LSTM", LSTM_ARRAYS, go_backwards=True), keras("LSTM", LSTM_ARRAYS)),
            "a forward layer with go_backwards=True",
        ),
        (lambda: arrays((I, 4 * H), (H, 4 * H), (8 * H,)), "CuDNNLSTM"),
    ],
)
def test_keras_refused(source, message):
    with pytest.raises(ConversionError, match=f"^from_keras: .*{message}"):
        convert.from_keras(source())


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("lstm", TypeError, "the source is of type str"),
        (LSTM_ARRAYS[:1], ValueError, "got 1 arrays"),
        (LSTM_ARRAYS + GRU_ARRAYS[:1], ValueError, r"kernel has shape \(16,\)"),
        (arrays((I, 4 * H), (H, 4 * H), (4 * H + 1,)), ValueError, r"bias has shape \(17,\); expected \(16,\)"),
        (arrays((I, 4 * H + 4), (H, 4 * H), (4 * H,)), ValueError, r"kernel has shape \(3, 20\); expected \(I, 16\)"),
        (arrays((I, 8), (H, 2 * H), (8,)), ValueError, "recurrent_kernel has shape .4, 8.; expected .H, 4H."),
        (LSTM_ARRAYS + arrays((H, 4 * H), (H, 4 * H), (4 * H,)), ValueError, "pass stacked layers as a list of lists"),
        (keras("LSTM"), ValueError, "has no weights yet"),
        (arrays((I, 4 * H), (H, 4 * H), dtype=np.int64), TypeError, "kernel has dtype int64"),
        (
            [LSTM_ARRAYS[0].astype(float), *LSTM_ARRAYS[1:]],
            TypeError,
            "recurrent_kernel has dtype float32; expected float64",
        ),
    ],
)
def test_keras_errors(source, error, message):
    with pytest.raises(error, match=message):
        convert.from_keras(source)


def test_keras_by_name_alone():
    """Classes and functions that are called like Keras's."""
    for name in ("activation", "recurrent_activation"):
        layer = keras("LSTM", LSTM_ARRAYS)
        convert.from_keras(layer)
        own = {"activation": "tanh", "recurrent_activation": "sigmoid"}[name]
        for module in (__name__, KERAS.__name__, "nowhere", None):
            function = types.FunctionType((lambda x: x).__code__, {}, own)
            function.__module__ = module
            setattr(layer, name, function)
            with pytest.raises(
                ConversionError, match=f"has {name}='{own}'( of {module})?; only Keras's own '{own}' can"
            ):
                convert.from_keras(layer)
    other = type("LSTM", (type(keras("LSTM")),), {"__module__": __name__})
    with pytest.raises(
        ConversionError, match=f"the source is a {__name__}.LSTM; expected Keras's LSTM.*its get_weights"
    ):
        convert.from_keras(other(LSTM_ARRAYS))
    with pytest.raises(ConversionError, match="is neither Keras's LSTM nor its GRU"):
        convert.from_keras(keras_bidirectional(keras("LSTM", LSTM_ARRAYS), other(LSTM_ARRAYS)))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("gates", [3, 4])
def test_keras_two_layers_or_two_directions(gates, count):
    """With I = H their arrays have the same shapes."""
    half = arrays((H, gates * H), (H, gates * H), (gates * H,))[:count]
    with pytest.raises(
        ValueError, match=f"with I = H = 4, the {2 * count} arrays are those of a Bidirectional or of two"
    ):
        convert.from_keras(half + half, reset_after=False)
    assert isinstance(convert.from_keras([half, half], reset_after=False), Stack)
    both = keras_bidirectional(*(keras("LSTM" if gates == 4 else "GRU", half, reset_after=False) for _ in "fb"))
    assert isinstance(convert.from_keras(both), Bidirectional)


@pytest.mark.parametrize("function", [convert.to_keras, convert.to_torch])
def test_extras_refused(function):
    with pytest.raises(ConversionError, match="the LSTM has peepholes"):
        function(lstm(rng(), peephole=True))
    with pytest.raises(ConversionError, match="clips its cell state at 3"):
        function(Stack([lstm(rng(), cell_clip=3.0)]))
    for layer in ({}, Bidirectional(Stack([lstm(rng())]), lstm(rng()))):
        with pytest.raises(TypeError, match=r"the layer is of type (dict|Stack); expected a blockcell"):
            function(layer)


def test_a_clip_at_infinity_is_none():
    layer = lstm(rng(), cell_clip=math.inf)
    np.testing.assert_array_equal(convert.to_keras(layer)[0], convert.to_keras(lstm(rng()))[0])


# ------------------------------------------------------------------------------------------------------------- PyTorch
def check_torch(arrays):
    weights = weights_of(arrays)
    layer = convert.from_torch(weights)
    y, state = layer(arrays["x"])
    np.testing.assert_allclose(y, arrays["y"], rtol=0, atol=1e-14)
    flat = []  # PyTorch stacks the states of all layers and directions
    for part in state if isinstance(layer, Stack) else [state]:
        flat += [part] if isinstance(part, LSTMState) else part
    np.testing.assert_allclose(np.stack([s.h for s in flat]), arrays["h"], rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.stack([s.cs for s in flat]), arrays["c"], rtol=0, atol=1e-14)
    back = convert.to_torch(layer, prefix="net.")
    assert_same(layer, convert.from_torch(back))
    for name in back:
        if "weight" in name:
            np.testing.assert_array_equal(back[name], weights[name.removeprefix("net.")])
        assert back[name].flags.c_contiguous


@pytest.mark.parametrize(("case", "arrays"), stored("torch").items(), ids=stored("torch"))
def test_stored_torch(case, arrays):
    check_torch(arrays)


def torch_lstm(x, weight_ih, weight_hh, bias_ih, bias_hh):
    """torch.nn.LSTM as its documentation writes it: gates i, f, g, o."""
    h, c, ys = np.zeros((B, H)), np.zeros((B, H)), []
    rows = [slice(k * H, (k + 1) * H) for k in range(4)]
    for step in x:
        i, f, g, o = (step @ weight_ih[r].T + bias_ih[r] + h @ weight_hh[r].T + bias_hh[r] for r in rows)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        ys.append(h)
    return np.stack(ys)


def torch_weights(prefix="", suffix="_l0", inputs=I, hidden=H, gates=4, dtype=np.float64):
    g = rng()
    shapes = {"weight_ih": (gates * hidden, inputs), "weight_hh": (gates * hidden, hidden)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates * hidden,))
    return {f"{prefix}{name}{suffix}": g.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("suffix", ["_l0", ""])
def test_torch_formula(suffix):
    """Also of an LSTMCell, whose names have no _l0, and of a module."""
    weights = torch_weights(prefix="encoder.rnn.", suffix=suffix)
    x = rng().standard_normal((T, B, I))
    expected = torch_lstm(x, *weights.values())
    module = type("Module", (), {"state_dict": lambda self: weights | {"encoder.out.weight": np.ones(1)}})()
    for source, options in ((weights, {}), (module, {}), (module, {"prefix": "encoder.rnn."})):
        np.testing.assert_allclose(convert.from_torch(source, **options)(x)[0], expected, rtol=0, atol=1e-14)
    layer = lstm(rng(), forget_bias=1.5, gate_order="ifco")
    np.testing.assert_allclose(torch_lstm(x, *convert.to_torch(layer).values()), layer(x)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_torch_dtype(dtype):
    layer = convert.from_torch(torch_weights(dtype=dtype))
    assert layer.dtype == dtype and all(value.dtype == dtype for value in convert.to_torch(layer).values())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: torch_weights(gates=3), ConversionError, rf"\(12, 4\), \(3H, H\): a GRU. .*{RESET_AFTER}"),
        (lambda w: torch_weights(gates=1), ConversionError, "a plain RNN"),
        (lambda w: w | {"weight_hr_l0": np.ones((2, H))}, ConversionError, "is a projection .proj_size."),
        (lambda w: torch_weights("a.") | torch_weights("b."), ValueError, r"several: \['a.', 'b.'\]; say which"),
        (lambda w: {}, ValueError, "no name ends in weight_hh_l0"),
        (lambda w: {k: v for k, v in w.items() if k != "weight_ih_l0"}, ValueError, "weight_ih_l0 is missing"),
        (lambda w: {k: v for k, v in w.items() if k != "weight_hh_l0"}, ValueError, "weight_hh_l0 is missing"),
        (lambda w: w | {"weight_ih_l999999999": np.ones(1)}, ValueError, "weight_ih_l1 is missing"),
        (lambda w: w | {"weight_ih_l00": np.ones(1)}, ValueError, "weight_ih_l00 would be left over"),
        (lambda w: w | {"weight_hh_l0_raw": np.ones(1)}, ValueError, "weight_hh_l0_raw would be left over"),
        (lambda w: w | {"weight_hh": np.ones(1)}, ValueError, "weight_hh would be left over"),
        (lambda w: w | {"b.bias_hh_l0": np.ones(1)}, ValueError, r"several: \['', 'b.'\]; say which"),
        (lambda w: w | {"bias_hh_l0": np.ones(3)}, ValueError, r"bias_hh_l0 has shape \(3,\); expected \(16,\)"),
        (
            lambda w: w | {"weight_ih_l0": np.ones((8, I))},
            ValueError,
            r"weight_ih_l0 has shape \(8, 3\); expected \(16, I\)",
        ),
        (
            lambda w: w | {"weight_hh_l0": np.ones((9, H))},
            ValueError,
            r"weight_hh_l0 has shape \(9, 4\); expected \(4H, H\)",
        ),
        (
            lambda w: w | {"bias_hh_l0": np.ones(16, np.float32)},
            TypeError,
            "bias_hh_l0 has dtype float32; expected float64",
        ),
        (lambda w: [w], TypeError, "the source is of type list; expected a state_dict"),
        (lambda w: w | {3: np.ones(1)}, TypeError, "there is a name of type int; expected those of type str"),
    ],
)
def test_torch_errors(change, error, message):
    with pytest.raises(error, match=f"^from_torch: .*{message}"):
        convert.from_torch(change(torch_weights()))


def test_torch_with_a_weight_missing():
    """Of three layers in two directions: each is named."""
    weights = {}
    for k in range(3):
        for direction in ("", "_reverse"):
            weights |= torch_weights("rnn.", f"_l{k}{direction}", inputs=2 * H if k else I)
    assert len(convert.from_torch(weights).layers) == 3
    for name in weights:
        left = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(
            ValueError, match=f"from_torch: {name} is missing; beside rnn.*, expected weight_ih, weight_hh, b"
        ):
            convert.from_torch(left)
    for part in ("bias_ih", "bias_hh"):
        left = {key: value for key, value in weights.items() if part not in key}
        with pytest.raises(ValueError, match=f"rnn.{part}_l0 is missing"):
            convert.from_torch(left)
    left = {key: value for key, value in weights.items() if "bias" not in key}
    for name, value in convert.from_torch(left).weights.items():
        assert value.any() == name.endswith("w")


def test_torch_unreadable_tensor():
    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    with pytest.raises(TypeError, match=r"weight_ih_l0 cannot be read as an array: .*Tensor.cpu"):
        convert.from_torch(torch_weights() | {"weight_ih_l0": Elsewhere()})
    with pytest.raises(ValueError, match=r"no LSTM has the prefix 'b.'; there are"):
        convert.from_torch(torch_weights("a."), prefix="b.")


def test_to_torch_refused():
    g = rng()
    with pytest.raises(ConversionError, match=f"the layer is a GRU.*{RESET_AFTER}"):
        convert.to_torch(gru(g))
    for stack in (
        Stack([lstm(g), lstm(g, inputs=H, hidden=2)]),
        Stack([lstm(g), Bidirectional(*[lstm(g, inputs=H)] * 2)]),
    ):
        with pytest.raises(ConversionError, match=r"Convert layer.layers one by one"):
            convert.to_torch(stack)


# ---------------------------------------------------------------------------------------------------------------- ONNX
def onnx_model(node, initializers, dtype=np.float64):
    """A model of one node; what the initializers do not hold is an input."""
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
    """ONNX's [T,D,B,H] as [T,B,DH]."""
    return np.concatenate(list(y.swapaxes(0, 1)), axis=-1)


LAYERS = {
    "lstm": lambda g, dtype: lstm(g, dtype),
    "lstm forget_bias": lambda g, dtype: lstm(g, dtype, forget_bias=1.0, gate_order="ifco"),
    "lstm peephole": lambda g, dtype: lstm(g, dtype, peephole=True),
    "gru": gru,
    "bidirectional lstm": lambda g, dtype: Bidirectional(lstm(g, dtype), lstm(g, dtype, forget_bias=0.5)),
    "bidirectional, one peephole": lambda g, dtype: Bidirectional(lstm(g, dtype), lstm(g, dtype, peephole=True)),
    "bidirectional gru": lambda g, dtype: Bidirectional(gru(g, dtype), gru(g, dtype)),
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


@pytest.mark.parametrize("name", LAYERS)
def test_onnxruntime(name):
    """Y_h and Y_c too, with initial states."""
    onnxruntime = pytest.importorskip("onnxruntime")
    g = rng()
    layer = LAYERS[name](g, np.float32)
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
    np.testing.assert_allclose(onnx_y(theirs[0]), y, rtol=0, atol=2e-6)
    for k, place in enumerate(places):
        ours = [getattr(part, {"h": "h", "c": "cs"}[place]) for part in (last if directions == 2 else [last])]
        np.testing.assert_allclose(theirs[1 + k], np.stack(ours), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_onnx_round_trip(name, dtype):
    layer = LAYERS[name](rng(), dtype)
    once = convert.from_onnx(*convert.to_onnx(layer))
    assert_same(once, convert.from_onnx(onnx_model(*convert.to_onnx(once), dtype)))
    x = rng().standard_normal((T, B, I)).astype(dtype)
    np.testing.assert_allclose(once(x)[0], layer(x)[0], rtol=0, atol=8 * np.finfo(dtype).eps)


def onnx_cases():
    """The LSTM and GRU cases of ONNX's backend tests: name -> node, inputs by name, outputs by name."""
    cases = {}

    def expect(node, inputs, outputs, name):
        given = dict(zip([key for key in node.input if key], inputs, strict=True))
        cases[name] = node, given, dict(zip([key for key in node.output if key], outputs, strict=True))

    for kind in ("LSTM", "GRU"):
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
    assert {"test_lstm_defaults", "test_lstm_with_peepholes", "test_gru_with_initial_bias"} <= ONNX_CASES.keys()
    assert len(ONNX_CASES) >= 11


@pytest.mark.parametrize("name", ONNX_CASES)
def test_onnx_case(name):
    """Those that cannot be expressed are refused, and what the refusal advises gives the right results."""
    node, given, expected = copy.deepcopy(ONNX_CASES[name])
    weights = {key: value for key, value in given.items() if key in "WRBP"}
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    reverse, batchwise = attributes.get("direction") == b"reverse", attributes.get("layout") == 1
    if reverse or batchwise:
        with pytest.raises(ConversionError, match="direction='reverse'" if reverse else "layout=1"):
            convert.from_onnx(node, weights)
        kept = [attribute for attribute in node.attribute if attribute.name not in ("direction", "layout")]
        del node.attribute[:]
        node.attribute.extend(kept)
    layer = convert.from_onnx(node, weights)
    x = given["X"].swapaxes(0, 1) if batchwise else given["X"]
    lengths = given.get("sequence_lens")
    state = tuple(given[key][0] for key in ("initial_c", "initial_h") if key in given) or None
    y, last = layer(x[::-1] if reverse else x, state, lengths=lengths)
    y = y[::-1] if reverse else y
    parts = last if isinstance(layer, Bidirectional) else [last]
    ours = {
        "Y": np.stack(np.split(y, len(parts), axis=-1), axis=1),
        "Y_h": np.stack([part.h for part in parts]),
        "Y_c": np.stack([getattr(part, "cs", part.h) for part in parts]),
    }
    if batchwise:
        ours = {"Y": ours["Y"].transpose(2, 0, 1, 3), "Y_h": ours["Y_h"].swapaxes(0, 1)}
    for key, value in expected.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def onnx_node(kind="LSTM", inputs=("X", "W", "R", "B"), **attributes):
    return helper.make_node(kind, inputs, ["Y"], name="a", **attributes)


def onnx_weights(kind="LSTM", directions=1):
    g, gates = rng(), 4 if kind == "LSTM" else 3
    shapes = {"W": (gates * H, I), "R": (gates * H, H), "B": (2 * gates * H,), "P": (3 * H,)}
    return {name: g.uniform(-1, 1, (directions, *shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (onnx_node(clip=3.0), "clip=3, which limits what goes into the gates"),
        (onnx_node(input_forget=1), "input_forget=1, which couples"),
        (onnx_node("GRU", linear_before_reset=1), f"linear_before_reset=1. .*{RESET_AFTER}"),
        (onnx_node(activations=["Sigmoid", "Relu", "Tanh"]), "'Relu'.*only Sigmoid for the gates"),
        (onnx_node("GRU", activations=["HardSigmoid", "Tanh"]), "'HardSigmoid'"),
        (onnx_node(layout=1), "layout=1, batch first"),
        (onnx_node(direction="reverse"), r"y = layer\(x\[::-1\]\)\[0\]\[::-1\]"),
        (onnx_node("RNN"), "the node is a ::RNN; expected an ONNX LSTM or GRU"),
        (onnx_node(domain="com.microsoft"), "com.microsoft::LSTM"),
        (onnx_node(inputs=("X", "V", "R", "B")), "its W, 'V', is not among the initializers"),
        (onnx_node(inputs=("X", "W", "R", "B", "P")), r'a constant sequence_lens.*node.input\[4\] = ""\), .*lengths='),
        (onnx_node(inputs=("X", "W", "R", "B", "", "P")), r'a constant initial_h.*node.input\[5\] = ""\), .*state='),
        (onnx_node(inputs=("X", "W", "R", "B", "", "", "P")), r'a constant initial_c.*node.input\[6\] = ""'),
    ],
)
def test_onnx_refused(node, message):
    with pytest.raises(ConversionError, match=f"^from_onnx: .*{message}"):
        convert.from_onnx(node, onnx_weights(node.op_type))


def onnx_with_states(makers, initializers, inputs=(), kind="LSTM", places=("", "h", "c")):
    """A model whose initial states come from these nodes."""
    places = places[: 3 if kind == "LSTM" else 2]
    model = onnx_model(onnx_node(kind, ("X", "W", "R", "B", *places)), onnx_weights(kind) | initializers)
    for each in list(model.graph.input):
        if each.name in ("h", "c", "lens") and each.name not in inputs:
            model.graph.input.remove(each)
    nodes = [*makers, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def made(op, inputs, output, **attributes):
    return helper.make_node(op, inputs, [output], **attributes)


NOUGHT, ONE = (numpy_helper.from_array(np.array([value])) for value in (0.0, 1.0))
SHAPE = {"shape": np.array([1, B, H])}


@pytest.mark.parametrize(
    ("makers", "initializers", "place"),
    [
        ([made("Add", ["h0", "h0"], "h")], {"h0": np.ones((1, B, H))}, "initial_h 'h'"),
        ([made("Identity", ["h0"], "h")], {"h0": np.ones((1, B, H))}, "initial_h 'h'"),
        ([made("ReduceSum", ["X"], "h")], {}, "initial_h 'h'"),
        ([], {"c": np.zeros((1, B, H))}, "initial_h 'h'"),
        ([], {"h": np.zeros((1, B, H))}, "initial_c 'c'"),
        ([made("ConstantOfShape", ["shape"], "h", value=ONE)], SHAPE, "initial_h 'h'"),
        ([made("ConstantOfShape", ["shape"], "h"), made("Exp", ["h"], "c")], SHAPE, "initial_c 'c'"),
        ([made("ConstantOfShape", ["shape"], "z"), made("Concat", ["z", "X"], "h", axis=0)], SHAPE, "initial_h 'h'"),
    ],
)
def test_onnx_computed_states(makers, initializers, place):
    """They would be lost; what the refusal advises works."""
    model = onnx_with_states(makers, initializers)
    with pytest.raises(
        ConversionError, match=f"LSTM 'a' has {place}, which other nodes compute; a layer gets that when"
    ):
        convert.from_onnx(model)
    model.graph.node[-1].input[5] = model.graph.node[-1].input[6] = ""
    assert_same(convert.from_onnx(model), convert.from_onnx(onnx_node(), onnx_weights()))


def test_onnx_computed_lengths():
    cast = made("Cast", ["x_lens"], "lens", to=onnx.TensorProto.INT32)
    model = onnx_with_states([cast], {}, places=("lens", "", ""))
    with pytest.raises(ConversionError, match=r"sequence_lens 'lens', which other nodes compute; .*pass lengths="):
        convert.from_onnx(model)


@pytest.mark.parametrize(
    ("makers", "initializers", "inputs"),
    [
        ([], {}, ("h", "c")),
        ([], {"h": np.zeros((1, B, H))}, ("c",)),
        ([made("ConstantOfShape", ["shape"], name) for name in "hc"], SHAPE, ()),
        ([made("ConstantOfShape", ["shape"], name, value=NOUGHT) for name in "hc"], SHAPE, ()),
        ([made("Constant", [], "z", value=NOUGHT), *(made("Expand", ["z", "shape"], n) for n in "hc")], SHAPE, ()),
        ([made("Cast", ["z"], "h", to=11), made("Concat", ["z", "z"], "c", axis=0)], {"z": np.zeros((1, B, H))}, ()),
    ],
)
def test_onnx_states_that_are_given_or_zero(makers, initializers, inputs):
    """As exporters make them of the size of the batch."""
    model = onnx_with_states(makers, initializers, inputs)
    assert_same(convert.from_onnx(model), convert.from_onnx(onnx_node(), onnx_weights()))


def test_onnx_defaults_spelled_out():
    """What nodes carry that changes nothing."""
    weights = onnx_weights() | {"zeros": np.zeros((1, B, H))}
    expected = convert.from_onnx(onnx_node(), weights)
    spelled = {"activations": ["sigmoid", "Tanh", "Tanh"], "input_forget": 0, "layout": 0, "direction": "forward"}
    assert_same(expected, convert.from_onnx(onnx_node(**spelled, hidden_size=H, domain="ai.onnx"), weights))
    assert_same(expected, convert.from_onnx(onnx_node(inputs=("X", "W", "R", "B", "lens", "zeros", "c")), weights))
    without = convert.from_onnx(onnx_node(inputs=("X", "W", "R")), weights)
    np.testing.assert_array_equal(without.weights["b"], np.zeros(4 * H))


def unreadable(dims=(), **changes):
    """A model of which a tensor says of itself what it is not."""
    model = onnx_model(onnx_node(), onnx_weights())
    tensor = model.graph.initializer[0]
    tensor.dims.extend(dims)
    for name, value in changes.items():
        setattr(tensor, name, value)
    return model


def test_onnx_model():
    """Nodes are found by name or output; weights in Constant nodes; several nodes and none."""
    weights = onnx_weights() | {"W2": onnx_weights()["W"] / 2}
    constant = helper.make_node("Constant", [], ["W2"], value=numpy_helper.from_array(weights.pop("W2")))
    second = helper.make_node("LSTM", ["X", "W2", "R", "B"], ["Z"])
    model = onnx_model(onnx_node(), weights)
    assert_same(convert.from_onnx(model), convert.from_onnx(onnx_node(), weights))
    model.graph.node.extend([constant, second])
    halved = convert.from_onnx(model, name="Z")
    assert_same(halved, convert.from_onnx(second, weights | {"W2": weights["W"] / 2}))
    assert_same(convert.from_onnx(model, name="a"), convert.from_onnx(onnx_node(), weights))
    with pytest.raises(ValueError, match=r"expected one LSTM or GRU node, found \['a', 'Z'\]; say which with name="):
        convert.from_onnx(model)
    with pytest.raises(ValueError, match=r"expected one LSTM or GRU node 'b', found \['a', 'Z'\]"):
        convert.from_onnx(model, name="b")
    with pytest.raises(TypeError, match="a model has its own"):
        convert.from_onnx(model, weights)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: convert.from_onnx("model.onnx"), TypeError, "of type str; expected an onnx.ModelProto"),
        (lambda: convert.from_onnx(onnx_node(direction="up"), onnx_weights()), ValueError, "direction='up'"),
        (lambda: convert.from_onnx(onnx_node(inputs=("X", "W")), onnx_weights()), ValueError, "has no R"),
        (
            lambda: convert.from_onnx(onnx_node(hidden_size=5), onnx_weights()),
            ValueError,
            "hidden_size=5, but its R has",
        ),
        (
            lambda: convert.from_onnx(onnx_node("GRU", ["X", "W", "R", "B", "", "", "c"]), onnx_weights("GRU")),
            ValueError,
            "has 7 inputs; expected at most 6: X, W, R, B, sequence_lens, initial_h",
        ),
        (
            lambda: convert.from_onnx(onnx_node("GRU", linear_before_reset=1.0), onnx_weights("GRU")),
            ValueError,
            "has the attribute linear_before_reset twice or not as INT",
        ),
        (
            lambda: convert.from_onnx(onnx_node(coupled=1), onnx_weights()),
            ConversionError,
            "has the attribute 'coupled', which ONNX does not know",
        ),
        (lambda: convert.from_onnx(unreadable(dims=[3])), ValueError, "from_onnx: the tensor 'W' cannot be read: "),
        (lambda: convert.from_onnx(unreadable(data_type=77)), ValueError, "from_onnx: the tensor 'W' cannot be read: "),
        (lambda: convert.from_onnx(unreadable(data_location=1)), ValueError, "'W' is in another file; onnx.load"),
        (lambda: convert.from_onnx(onnx_node(), onnx_weights("GRU")), ValueError, r"W has shape \(1, 12, 3\)"),
        (
            lambda: convert.from_onnx(onnx_node(direction="bidirectional"), onnx_weights()),
            ValueError,
            r"W has shape \(1, 16, 3\); expected \(2, 16, I\)",
        ),
        (lambda: convert.to_onnx(lstm(rng(), cell_clip=3)), ConversionError, "clips its cell state at 3"),
        (lambda: convert.to_onnx(Stack([lstm(rng())])), ConversionError, "Convert layer.layers one by one"),
        (lambda: convert.to_onnx(Bidirectional(lstm(rng()), gru(rng()))), ConversionError, "an LSTM and a GRU"),
    ],
)
def test_onnx_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


# -------------------------------------------------------------------------------------------------------- TensorFlow 1
NEW_DIAGONALS, OLD_DIAGONALS = ([f"{w}_{gate}_diag" for gate in gates] for w, gates in (("w", "ifo"), ("W", "IFO")))


def tf1_lstm(scope="rnn/lstm_cell/", peephole=False, names=("kernel", "bias", *NEW_DIAGONALS)):
    g = rng()
    shapes = [(I + H, 4 * H), (4 * H,), *([(H,)] * 3 if peephole else [])]
    return {scope + name: g.uniform(-1, 1, s).astype(np.float32) for name, s in zip(names, shapes, strict=False)}


def tf1_gru(scope="rnn/gru_cell/", names=("w_ru", "w_c", "b_ru", "b_c")):
    g = rng()
    shapes = (I + H, 2 * H), (I + H, H), (2 * H,), (H,)
    return {scope + name: g.uniform(-1, 1, s).astype(np.float32) for name, s in zip(names, shapes, strict=True)}


def noise(scope):
    """What else stands in a checkpoint."""
    kernel = np.ones((H, 8), np.float32)
    optimizer = {f"{scope}{leaf}/{slot}": kernel for leaf in ("kernel", "w_ru") for slot in ("Adam", "Adam_1")}
    averages = {f"{scope}kernel/ExponentialMovingAverage": kernel}
    dense = {
        "dense/kernel": kernel,
        "dense/bias": kernel[0],
        "global_step": np.int64(7),
        "beta1_power": np.float32(0.9),
    }
    return optimizer | averages | dense | {f"{scope}bias_cudnn_0": kernel[0], f"{scope}bias_cudnn_1": kernel[0]}


def expected_lstm(variables, x, forget_bias, cell_clip=0.0):
    """BlockLSTM's formula, on the values in the order in which they were made."""
    w, b, *peepholes = variables.values()
    wci, wcf, wco = peepholes or (None,) * 3
    zeros, weights = np.zeros((B, H)), {"w": w, "b": b, "wci": wci, "wcf": wcf, "wco": wco}
    options = {"forget_bias": forget_bias, "cell_clip": cell_clip, "use_peephole": bool(peepholes)}
    return FORMULAS["BlockLSTM"](seq_len_max=T, x=x, cs_prev=zeros, h_prev=zeros, **weights, **options).h


def x32():
    return rng().standard_normal((T, B, I)).astype(np.float32)


@pytest.mark.parametrize("peephole", [False, True])
@pytest.mark.parametrize(
    ("scope", "names", "default"),
    [
        ("rnn/lstm_cell/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("input/lstm_fused_cell/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("rnn/basic_lstm_cell_2/", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("rnn/multi_rnn_cell/cell_0/cudnn_compatible_lstm_cell/", ("kernel", "bias", *NEW_DIAGONALS), 0.0),
        ("", ("kernel", "bias", *NEW_DIAGONALS), 1.0),
        ("RNN/LSTMCell/", ("weights", "biases", *NEW_DIAGONALS), 1.0),
        ("RNN/LSTMCell/", ("W_0", "B", *OLD_DIAGONALS), 1.0),
        ("RNN/BasicLSTMCell/", ("Linear/Matrix", "Linear/Bias", *NEW_DIAGONALS), 1.0),
    ],
)
def test_tf1_lstm(scope, names, default, peephole):
    variables = tf1_lstm(scope, peephole, names)
    x, everything = x32(), (noise(scope) if scope else {}) | variables
    for forget_bias in (0.0, 0.5):
        layer = convert.from_tf1(everything, forget_bias=forget_bias, cell_clip=0.5)
        np.testing.assert_allclose(layer(x)[0], expected_lstm(variables, x, forget_bias, 0.5), rtol=0, atol=1e-6)
        assert layer.forget_bias == forget_bias and layer.cell_clip == 0.5
    with pytest.warns(UserWarning, match=f"checkpoints do not hold forget_bias; {default} is taken"):
        layer = convert.from_tf1(everything)
    np.testing.assert_allclose(layer(x)[0], expected_lstm(variables, x, default), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("cell", "default"), [*FORGET_BIAS.items(), ("CudnnCompatibleLSTM", 0.0)])
def test_tf1_class(cell, default):
    with pytest.warns(UserWarning, match="checkpoints do not hold forget_bias"):
        assert convert.from_tf1(tf1_lstm("my/cell/"), cell=cell).forget_bias == default


def test_tf1_class_and_name_disagree():
    """DeepSpeech's LSTMBlockFusedCell, which is named like the other and has its forget_bias."""
    variables = tf1_lstm("cell_0/cudnn_compatible_lstm_cell/")
    with pytest.raises(ValueError, match=r"which has forget_bias 0.0, but cell is LSTMBlockFusedCell, which has 1.0"):
        convert.from_tf1(variables, cell="LSTMBlockFusedCell")
    assert convert.from_tf1(variables, cell="LSTMBlockFusedCell", forget_bias=0.0).forget_bias == 0


GRU_NAMES = [
    ("w_ru", "w_c", "b_ru", "b_c"),
    ("gates/kernel", "candidate/kernel", "gates/bias", "candidate/bias"),
    ("gates/weights", "candidate/weights", "gates/biases", "candidate/biases"),
    ("Gates/Linear/Matrix", "Candidate/Linear/Matrix", "Gates/Linear/Bias", "Candidate/Linear/Bias"),
    ("w_c", "w_ru", "b_ru", "b_c"),  # as one build of TensorFlow had them
    ("w_c", "w_ru", "b_c", "b_ru"),
]


@pytest.mark.parametrize("cell", [None, "GRUBlockCell", "GRUBlockCellV2", "GRUCell"])
@pytest.mark.parametrize("names", GRU_NAMES)
def test_tf1_gru(names, cell):
    variables, x = tf1_gru(names=names), x32()
    w_ru, w_c, b_ru, b_c = variables.values()
    weights = {"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c}
    expected = FORMULAS["block_gru"](seq_len_max=T, x=x, h_prev=np.zeros((B, H)), **weights).h
    layer = convert.from_tf1(
        {f"{name}:0": value for name, value in (variables | noise("rnn/gru_cell/")).items()}, cell=cell
    )
    np.testing.assert_allclose(layer(x)[0], expected, rtol=0, atol=1e-6)


def test_tf1_scopes():
    """Several cells in one checkpoint, put together."""
    variables = {}
    for k, direction in enumerate(("fw", "bw")):
        variables |= {key: value * (k + 1) for key, value in tf1_lstm(f"net/{direction}/lstm_cell/").items()}
    fw, bw = (convert.from_tf1(variables, scope=f"net/{d}/lstm_cell", forget_bias=1.0) for d in ("fw", "bw"))
    np.testing.assert_array_equal(2 * fw.weights["w"], bw.weights["w"])
    assert Bidirectional(fw, bw).output_size == 2 * H
    with pytest.raises(
        ValueError, match=r"expected one cell, found \['net/fw/lstm_cell', 'net/bw/lstm_cell'\]; say which"
    ):
        convert.from_tf1(variables)
    with pytest.raises(ValueError, match="expected one cell in the scope 'net'"):
        convert.from_tf1(variables, scope="net/")


def cudnn_gru():
    names = ["gates/kernel", "gates/bias", "candidate/input_projection/kernel", "candidate/hidden_projection/kernel"]
    return {f"cudnn_compatible_gru_cell/{name}": np.ones((4, 4), np.float32) for name in names}


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        (cudnn_gru(), {}, f"a CudnnCompatibleGRUCell. .*{RESET_AFTER}"),
        ({}, {"cell": "CudnnCompatibleGRUCell"}, f"is no GRUBlockCell. .*{RESET_AFTER}"),
        ({}, {"cell": "NASCell"}, "cell is 'NASCell'; expected one of LSTMBlockCell"),
        (tf1_lstm() | {"rnn/lstm_cell/projection/kernel": np.ones((H, 2))}, {}, "has a projection .num_proj."),
        (tf1_lstm("a/coupled_input_forget_gate_lstm_cell/"), {}, "couples its input gate to the forget gate"),
        (
            tf1_lstm() | {f"rnn/lstm_cell/w_{g}_diag": np.ones(H, np.float32) for g in "fo"},
            {},
            "couples its input gate",
        ),
        (
            {
                "layer_norm_basic_lstm_cell/kernel": np.ones((7, 16)),
                "layer_norm_basic_lstm_cell/input/gamma": np.ones(4),
            },
            {},
            "layer normalization",
        ),
    ],
)
def test_tf1_refused(variables, options, message):
    with pytest.raises(ConversionError, match=f"^from_tf1: .*{message}"):
        convert.from_tf1(variables, forget_bias=1.0, **options)


@pytest.mark.parametrize(
    ("variables", "options", "error", "message"),
    [
        ([], {}, TypeError, "variables is of type list; expected names and arrays"),
        ({}, {}, ValueError, "Of these there are none"),
        ({3: np.ones(1)}, {}, TypeError, "there is a name of type int; expected those of type str"),
        ({"a/kernel": np.ones(1)}, {}, ValueError, r"there are \['a/kernel'\]"),
        (tf1_gru(), {"forget_bias": 1.0}, ValueError, "is a GRU, which has no forget_bias"),
        (tf1_gru(), {"cell": "LSTMCell"}, ValueError, "expected one cell"),
        ({f"{name}/part_0": value for name, value in tf1_lstm().items()}, {}, ValueError, "variables are in parts"),
        (tf1_lstm() | {"rnn/lstm_cell/bias": np.ones(15, np.float32)}, {}, ValueError, r"a bias of \(15,\)"),
        (tf1_lstm() | {"rnn/lstm_cell/w_i_diag": np.ones(H, np.float32)}, {}, ValueError, r"only \['wci'\]"),
        (tf1_gru() | {"rnn/gru_cell/b_c": np.ones(3, np.float32)}, {}, ValueError, r"b_c has shape \(3,\)"),
        (tf1_lstm() | {"rnn/lstm_cell/bias": np.ones(16)}, {}, TypeError, "has dtype float64; expected float32"),
    ],
)
def test_tf1_errors(variables, options, error, message):
    with pytest.raises(error, match=f"^from_tf1: .*{message}"):
        convert.from_tf1(variables, **options)


# ----------------------------------------------------------------------------------------------------------- the peers
@pytest.mark.peers
def test_keras_itself():
    """Its layers as they are, and its layers with our weights."""
    pytest.importorskip("keras")
    for name, (theirs, found) in generate_layers.keras_cases(seed=SEED).items():
        check_keras(found)
        layer = convert.from_keras(theirs)
        x = found["x"]
        np.testing.assert_allclose(
            layer(x.swapaxes(0, 1))[0].swapaxes(0, 1), found["y"], rtol=0, atol=1e-6, err_msg=name
        )
        if "without bias" not in name:
            theirs.set_weights([0 * value for value in theirs.get_weights()])
            theirs.set_weights(convert.to_keras(layer))
            np.testing.assert_allclose(np.asarray(theirs(x)), found["y"], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.peers
def test_keras_itself_refused():
    layers = pytest.importorskip("keras").layers
    for layer, message in (
        (layers.GRU(H), RESET_AFTER),
        (layers.LSTM(H, activation="relu"), "activation='relu'"),
        (layers.LSTM(H, recurrent_activation="hard_sigmoid"), "hard_sigmoid"),
        (layers.LSTM(H, go_backwards=True), "go_backwards"),
        (layers.Bidirectional(layers.LSTM(H), merge_mode="sum"), "merge_mode"),
        (layers.SimpleRNN(H), "SimpleRNN"),
    ):
        layer.build((B, T, I))
        with pytest.raises(ConversionError, match=message):
            convert.from_keras(layer)
    with pytest.raises(ValueError, match="no weights yet"):
        convert.from_keras(layers.LSTM(H))
    first, second = layers.LSTM(H), layers.GRU(2, reset_after=False)
    first.build((B, T, I))
    second.build((B, T, H))
    assert isinstance(convert.from_keras([first, second]), Stack)


@pytest.mark.peers
def test_torch_itself():
    torch = pytest.importorskip("torch")
    for name, (theirs, found) in generate_layers.torch_cases(seed=SEED).items():
        check_torch(found)
        layer = convert.from_torch(theirs)
        assert_same(layer, convert.from_torch(theirs.state_dict()))
        options = {"num_layers": theirs.num_layers, "bidirectional": theirs.bidirectional}
        again = torch.nn.LSTM(I, H, dtype=torch.float64, **options)
        again.load_state_dict({key: torch.from_numpy(value) for key, value in convert.to_torch(layer).items()})
        with torch.no_grad():
            y = again(torch.from_numpy(found["x"]))[0].numpy()
        np.testing.assert_allclose(y, found["y"], rtol=0, atol=1e-14, err_msg=name)
    for module, message in (
        (torch.nn.GRU(I, H), RESET_AFTER),
        (torch.nn.RNN(I, H), "a plain RNN"),
        (torch.nn.LSTM(I, H, proj_size=2), "proj_size"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert.from_torch(module)
    with pytest.raises(TypeError, match=r"weight_ih_l0 cannot be read as an array|dtype"):
        convert.from_torch(torch.nn.LSTM(I, H, dtype=torch.bfloat16))
    cell = torch.nn.LSTMCell(I, H)
    x = rng().standard_normal((1, B, I)).astype(np.float32)
    with torch.no_grad():
        h, _ = cell(torch.from_numpy(x[0]))
    np.testing.assert_allclose(convert.from_torch(cell)(x)[0][0], h.numpy(), rtol=0, atol=1e-6)
