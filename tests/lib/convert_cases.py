"""Layers to convert, and the results stored from Keras and PyTorch."""

from __future__ import annotations

import functools
import io
import types
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import SEED
from onnx import TensorProto, helper, numpy_helper

from blockcell import convert
from blockcell.activations import PARAMETERS
from blockcell.layers import GRU, LSTM, RNN, Dense, Stack

GOLDEN = Path(__file__).parents[1] / "golden"
T, B, I, H = 5, 2, 3, 4  # noqa: E741


def rng():
    return np.random.default_rng(SEED)


def lstm(g, dtype=np.float64, inputs=I, hidden=H, peephole=False, projection=0, coupled=False, **options):
    gates = 3 if coupled else 4
    shapes = {"w": (inputs + (projection or hidden), gates * hidden), "b": (gates * hidden,)}
    shapes |= dict.fromkeys(("wci", "wcf", "wco")[coupled:], (hidden,)) if peephole else {}
    shapes |= {"w_p": (hidden, projection)} if projection else {}
    weights = {name: g.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}
    return LSTM(**weights, coupled=coupled, **options)


def gru(g, dtype=np.float64, inputs=I, hidden=H, reset_after=False, **options):
    shapes = (inputs + hidden, 2 * hidden), (inputs + hidden, hidden), (2 * hidden,), (hidden,), (hidden,)
    *weights, b_hc = (g.uniform(-1, 1, shape).astype(dtype) for shape in shapes)
    return GRU(*weights, **({"reset_after": True, "b_hc": b_hc} if reset_after else {}), **options)


def rnn(g, dtype=np.float64, inputs=I, hidden=H, **options):
    return RNN(*(g.uniform(-1, 1, shape).astype(dtype) for shape in ((inputs + hidden, hidden), (hidden,))), **options)


def assert_same(first, second):
    """Assert that layers are built alike, and that their weights are equal and have the same names."""
    assert repr(first) == repr(second) and first.weights.keys() == second.weights.keys()
    for name, value in first.weights.items():
        assert value.dtype == second.weights[name].dtype
        np.testing.assert_array_equal(second.weights[name], value, err_msg=name)


def stored(package):
    """Return the results stored from a package: by case, its arrays by name."""
    cases = {}
    with np.load(GOLDEN / f"{package}.npz") as file:
        for key in file.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = file[key]
    return cases


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


from_keras = functools.partial(convert.from_keras, check=False)
"""Converts what Keras does not run: stand-ins for its layers, files, arrays."""
from_keras.__name__ = "from_keras"

KERAS = types.ModuleType("tf_keras.stand_in")
for _name in (*PARAMETERS, "gelu", "softmax"):
    exec(f"def {_name}(x): ...", vars(KERAS))


class KerasLayer:
    """Stands for a layer of Keras: the conversion reads its class, activations, get_config and get_weights only."""

    def __init__(self, weights=(), **config):
        defaults = {"activation": "tanh", "recurrent_activation": "sigmoid", "go_backwards": False}
        defaults["return_sequences"] = False
        self.config = defaults | ({"reset_after": True} if type(self).__name__ == "GRU" else {}) | config
        self.weights = list(weights)
        self.name = config.get("name", "a_layer")
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


def keras_model(description, weights):
    """Make a stand-in for the model or layer that Keras describes so in JSON."""
    kind, config = description["class_name"], description["config"]
    if kind == "Bidirectional":
        inner, arrays = config["layer"], weights[config["name"]]
        halves = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
        fw, bw = (keras(inner["class_name"], half, **inner["config"]) for half in halves)
        both = keras_bidirectional(fw, bw, config["merge_mode"])
        both.name = config["name"]
        return both
    layer = keras(kind, weights.get(config["name"], ()), **config)
    if kind == "TimeDistributed":
        layer.layer = keras(config["layer"]["class_name"], weights[config["name"]], **config["layer"]["config"])
    if kind in ("Sequential", "Functional"):
        parts = [part for part in config["layers"] if kind == "Functional" or part["class_name"] != "InputLayer"]
        layer.layers = [keras_model(part, weights) for part in parts]
    return layer


def onnx_weights(kind="LSTM", directions=1):
    g, gates = rng(), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    shapes = {"W": (gates * H, I), "R": (gates * H, H), "B": (2 * gates * H,), "P": (3 * H,)}
    return {name: g.uniform(-1, 1, (directions, *shape)) for name, shape in shapes.items()}


def made(op, inputs, output, **attributes):
    return helper.make_node(op, inputs, [output], **attributes)


def torch_weights(prefix="", suffix="_l0", inputs=I, hidden=H, gates=4, dtype=np.float64):
    g = rng()
    shapes = {"weight_ih": (gates * hidden, inputs), "weight_hh": (gates * hidden, hidden)}
    shapes |= dict.fromkeys(("bias_ih", "bias_hh"), (gates * hidden,))
    return {f"{prefix}{name}{suffix}": g.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}


from_torch = functools.partial(convert.from_torch, check=False)  # of weights, and of stand-ins that cannot run


def converted(function, model, left_out, **options):
    """Return the result; assert that a warning says what is left out."""
    if left_out is None:
        return function(model, **options)
    with pytest.warns(UserWarning, match=f"^{function.__name__}: left out: {left_out}$") as record:
        result = function(model, **options)
    assert len(record) == 1 and record[0].filename == __file__
    return result


def parts_of(layer):
    """Describe a stack."""
    layers = layer.layers if isinstance(layer, Stack) else [layer]
    return " ".join(
        f"Dense:{part.activation}:{part.last}" if isinstance(part, Dense) else type(part).__name__ for part in layers
    )


def onnx_graph(nodes, initializers, outputs, name="g", inputs=("X",), dtype=TensorProto.DOUBLE):
    def info(name):
        return helper.make_tensor_value_info(name, dtype, None)

    tensors = [numpy_helper.from_array(array, key) for key, array in initializers.items()]
    return helper.make_graph(nodes, name, [*map(info, inputs)], [*map(info, outputs)], initializer=tensors)


def model_of(nodes, initializers, outputs=("Y",), opset=18, **options):
    """Make a model of nodes and initializers; the options are those of `onnx_graph`."""
    graph, opsets = onnx_graph(nodes, initializers, outputs, **options), [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def export_by_torch(module, arguments, dynamo, **options):
    """Export a module by one of PyTorch's two exporters."""
    if dynamo:
        pytest.importorskip("onnxscript")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = pytest.importorskip("torch").onnx.export(
            module, arguments, None if dynamo else file, dynamo=dynamo, **options
        )
    return program.model_proto if dynamo else onnx.load_from_string(file.getvalue())


def assert_all_same(layers, expected):
    """Assert that two layers are the same, or those of two dicts."""
    assert isinstance(layers, dict) == isinstance(expected, dict)
    layers, expected = (each if isinstance(each, dict) else {"": each} for each in (layers, expected))
    assert layers.keys() == expected.keys()
    for name, layer in expected.items():
        assert_same(layers[name], layer)


def all_warnings(function, *arguments, **options):
    """Return the result of a function, and the texts of all its warnings, which are at a line of this file."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    assert {warning.filename for warning in record} <= {__file__}
    return result, [str(warning.message) for warning in record]


def warned(function, *arguments, **options):
    """Return the result of a function, and the one warning that it gives, at this line."""
    with pytest.warns(UserWarning) as record:
        result = function(*arguments, **options)
    assert [warning.filename for warning in record] == [__file__]
    return result, str(record[0].message)
