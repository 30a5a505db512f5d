"""Files that Keras 3 and Keras 2 (tf_keras) wrote, of random models: read without Keras, they compute what Keras does.

`pytest -s -m peers`, with keras, tf_keras and tensorflow in .venv, prints the shares.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter

import keras_forms as forms
import numpy as np
import pytest
from convert_cases import assert_same, from_keras

from blockcell import convert
from blockcell.convert import ConversionError
from blockcell.layers import Bidirectional, Stack

pytestmark = pytest.mark.peers
MODELS = 200
BOUND = 2e-5  # of the largest entry
LEAST_RIGHT = 0.95
RIGHT = "right", "right up to a second Dense behind both directions, which a warning names"
ACTIVATIONS = (
    "tanh",
    "tanh",
    "tanh",
    "relu",
    "elu",
    "selu",
    "softplus",
    "softsign",
    "sigmoid",
    "hard_sigmoid",
    "linear",
)
GATES = ("sigmoid", "sigmoid", "sigmoid", "hard_sigmoid")
HEADS = ("linear", "softmax", "relu", "sigmoid", "tanh")
REFUSED = {  # what may be refused, by words of the message
    "merge_mode": "a Bidirectional's merge_mode other than concat",
    "go_backwards": "go_backwards with return_sequences",
    "activation=": "an activation that layers here have not",
}


def keras_of(package):
    """Import a package of Keras, or skip the test."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("h5py")
    pytest.importorskip("tensorflow")
    return pytest.importorskip(package)


def draw_bool(g, probability):
    """Draw True with a probability."""
    return bool(g.random() < probability)


def recurrent_layer(g, layers, last):
    """Draw a recurrent layer; the last one of a model may return its last output alone."""
    kind = str(g.choice(["LSTM", "GRU", "SimpleRNN"]))
    options = {"activation": str(g.choice(ACTIVATIONS)), "use_bias": draw_bool(g, 0.9)}
    if draw_bool(g, 0.05):
        options["activation"] = layers.LeakyReLU(0.25)
    if kind != "SimpleRNN":
        options["recurrent_activation"] = str(g.choice(GATES))
    if kind == "GRU":
        options["reset_after"] = draw_bool(g, 0.5)
    if draw_bool(g, 0.005):
        options["activation"] = "gelu"
    around = {"return_sequences": not last or draw_bool(g, 0.4), "go_backwards": draw_bool(g, 0.03) and last}
    units = int(g.integers(1, 9))
    if draw_bool(g, 0.2):
        cells = [getattr(layers, f"{kind}Cell")(units, **options) for _ in range(int(g.integers(1, 3)))]
        layer = layers.RNN(cells if len(cells) > 1 or draw_bool(g, 0.5) else cells[0], **around)
        several = len(cells) > 1
    else:
        dropped = {"dropout": 0.2, "recurrent_dropout": 0.1} if draw_bool(g, 0.2) else {}
        layer = getattr(layers, kind)(units, **options, **around, **dropped)
        several = False
    if draw_bool(g, 0.3) and not around["go_backwards"] and not several:
        mode = "concat" if draw_bool(g, 0.97) else str(g.choice(["sum", "ave", "mul"]))
        layer = layers.Bidirectional(layer, merge_mode=mode)
    return layer


def random_model(g, keras):
    """Draw a Sequential or functional model, perhaps with models in it."""
    layers, inputs = keras.layers, (int(g.integers(2, 9)), int(g.integers(1, 7)))
    count = int(g.integers(1, 4))
    parts = []
    if draw_bool(g, 0.2):
        parts.append(layers.Dense(int(g.integers(1, 7)), activation=str(g.choice(HEADS))))
    for k in range(count):
        parts.append(recurrent_layer(g, layers, k == count - 1))
        if draw_bool(g, 0.2):
            parts.append(layers.Dropout(0.3))
    whole = all(getattr(getattr(part, "forward_layer", part), "return_sequences", True) for part in parts)
    if draw_bool(g, 0.2) and count > 1:
        inner = parts[:-1]
        parts = [keras.Sequential(inner), *parts[-1:]]
    heads = int(g.choice([0, 1, 1, 1, 2]))
    for k in range(heads):
        dense = layers.Dense(int(g.integers(1, 5)), activation=str(g.choice(HEADS)), use_bias=draw_bool(g, 0.8))
        parts.append(layers.TimeDistributed(dense) if whole and k == 0 and draw_bool(g, 0.3) else dense)
    if draw_bool(g, 0.4):
        x = y = keras.Input(inputs)
        for part in parts:
            y = part(y)
        model = keras.Model(x, y)
    else:
        model = keras.Sequential([keras.Input(inputs), *parts])
    drawn = []
    for array in model.get_weights():
        scale = 1 if array.ndim < 2 else 1.5 / np.sqrt(sum(array.shape[:1]))
        drawn.append(g.uniform(-scale, scale, array.shape).astype(np.float32))
    model.set_weights(drawn)
    return model


def last_of(layer, state):
    """Return what a recurrent layer at the top gives without return_sequences."""
    top, state = (layer.layers[-1], state[-1]) if isinstance(layer, Stack) else (layer, state)
    if isinstance(top, Bidirectional):
        return np.concatenate([half.h for half in state], axis=-1)
    return getattr(state, "h", None)


def compare(model, path, g):
    """Tell whether what is read computes what Keras does, or why it is refused."""
    x = g.standard_normal((3, *model.input_shape[1:])).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a softmax of one number
        expected = np.asarray(model(x, training=False))
    try:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            layer = from_keras(path)
    except ConversionError as error:
        return next((reason for words, reason in REFUSED.items() if words in str(error)), str(error))
    left_out = [re.findall(r"left out: (\S+) \(Dense\)$", str(warning.message)) for warning in record]
    if isinstance(layer, dict):
        return "a dict"
    y, state = layer(x, batch_first=True)
    if y.shape != expected.shape and not left_out:
        y = last_of(layer, state)
    for (name,) in left_out:  # a second Dense behind one with last="ends", which alone can be carried over
        y = np.asarray(model.get_layer(name)(y))
    if y is None or y.shape != expected.shape:
        return f"wrong: {np.shape(y)} for {expected.shape}"
    error = np.abs(y - expected).max() / max(np.abs(expected).max(), 1e-6)
    return RIGHT[len(left_out)] if error <= BOUND else f"wrong: off by {error:.2g}"


@pytest.mark.parametrize("ending", [".h5", ".keras"])
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_random_models(package, ending, tmp_path, seed):
    keras, counts = keras_of(package), Counter()
    for k in range(MODELS):
        g = np.random.default_rng([seed, k])
        keras.backend.clear_session()
        model = random_model(g, keras)
        path = tmp_path / f"{k}{ending}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save(path if package == "keras" else str(path))
        verdict = compare(model, path, g)
        assert not verdict.startswith("wrong"), f"{package}, model {k}: {verdict}\n{model.to_json()}"
        counts[verdict] += 1
        path.unlink()
    print(f"{package} {keras.__version__}, {ending}: {dict(counts.most_common())}")
    assert sum(counts[verdict] for verdict in RIGHT) >= LEAST_RIGHT * MODELS


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("inputs", [3, 4])
def test_arrays_for_cudnn_bit_for_bit(kind, inputs, tmp_path, seed):
    """Keras 2 converts them when it loads them into an LSTM or a GRU; a CuDNNLSTM in memory is read, too."""
    keras = keras_of("tf_keras")
    old_layers = pytest.importorskip(f"tf_keras.src.layers.rnn.cudnn_{kind.lower()}")
    layer = getattr(old_layers, f"CuDNN{kind}")(4, return_sequences=True, name="a")
    layer.build((2, 5, inputs))
    g = np.random.default_rng(seed)
    arrays = [g.standard_normal(array.shape).astype(np.float32) for array in layer.get_weights()]
    layer.set_weights(arrays)
    path = forms.write_h5_weights(tmp_path / "w.h5", forms.sequential(forms.entry(kind, "a")), {"a": arrays}, "2.1.5")
    plain = getattr(keras.layers, kind)(4, return_sequences=True, name="a")
    keras.Sequential([keras.Input((5, inputs)), plain]).load_weights(path, by_name=True)
    expected = convert.from_keras(plain)
    for found in map(from_keras, (layer, arrays, path)):  # a CuDNNLSTM needs a GPU
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("both", [False, True])
def test_arrays_of_keras_1_bit_for_bit(kind, both, tmp_path, seed):
    """Keras 2 still reads them, by their order."""
    keras = keras_of("tf_keras")
    g, gates = np.random.default_rng(seed), len(forms.KERAS_1.get(kind, "c"))
    arrays = [g.standard_normal(shape).astype(np.float32) for shape in [(3, 4), (4, 4), (4,)] * gates * (1 + both)]
    layer = getattr(keras.layers, kind)(4, **{"reset_after": False} if kind == "GRU" else {})
    layer = keras.layers.Bidirectional(layer, name="a") if both else layer
    layer._name = "a"
    part = forms.entry("Bidirectional" if both else kind, "a")
    path = forms.write_h5_weights(tmp_path / "w.h5", forms.sequential(part), {"a": arrays}, None)
    keras.Sequential([keras.Input((5, 3)), layer]).load_weights(path, by_name=True)
    gates = {} if kind == "SimpleRNN" else {"recurrent_activation": "sigmoid"}
    assert_same(from_keras(path, **gates), convert.from_keras(layer))
