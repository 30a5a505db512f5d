"""Conversions of Keras models in memory run these and compare: random models, and faults of the converter.

`pytest -s -m peers`, with keras, tf_keras and tensorflow in .venv, prints the shares.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter

import numpy as np
import pytest
from keras_graphs import layers_of, random_graph

from blockcell import convert
from blockcell.convert import ConversionError, keras_layers
from blockcell.convert import keras as keras_module
from blockcell.convert.shared import make_cell
from blockcell.gates import ORDERS
from blockcell.layers import Bidirectional, Stack

pytestmark = pytest.mark.peers
MODELS = 300
BOUND = 5e-5  # of the largest entry
OWN_CALL = "its call() is its own"
NOT_COMPARED = "from_keras: not compared with the model, because "
PACKAGES = ["keras", "tf_keras"]


@pytest.fixture(params=PACKAGES)
def keras(request):
    """Provide a package of Keras, or skip the test."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("tensorflow")
    package = pytest.importorskip(request.param)
    package.backend.clear_session()
    return package


def converted(model, **options):
    """Convert a model; return the result and the text of the warning."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        layers = convert.from_keras(model, **options)
    return layers, "; ".join(str(warning.message) for warning in record if "from_keras" in str(warning.message))


# ------------------------------------------------------------------------------------------------------- random models
def as_array(tensor):
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)


def last_of(layer, state):
    """Return what a recurrent layer at the top gives without return_sequences."""
    top, state = (layer.layers[-1], state[-1]) if isinstance(layer, Stack) else (layer, state)
    if isinstance(top, Bidirectional):
        return np.concatenate([half.h for half in state], axis=-1)
    return getattr(state, "h", None)


def totals_of(keras_layer):
    """Return the sums of the weights of a layer's parts, which tell what it became."""
    cells = getattr(getattr(keras_layer, "cell", None), "cells", [keras_layer])
    return [float(sum(array.sum(dtype=np.float64) for array in cell.get_weights())) for cell in cells]


def sources_of(layer, model):
    """Return the layers of a model that a converted layer was made of."""
    parts = layer.layers if isinstance(layer, Stack) else [layer]
    totals = [sum(array.sum(dtype=np.float64) for array in part.weights.values()) for part in parts]
    candidates = [part for part in layers_of(model) if not hasattr(part, "layers") and part.get_weights()]
    sources = []
    while totals:
        found = [
            part
            for part in candidates
            if np.allclose(totals_of(part), totals[: len(totals_of(part))]) and len(totals_of(part)) <= len(totals)
        ]
        if not found:
            return []
        sources.append(found[0])
        del totals[: len(totals_of(found[0]))]
    return sources


def is_right(keras, layer, model, g):
    """Return whether a converted layer computes what the layers that it was made of compute one behind the other."""
    sources = sources_of(layer, model)
    if not sources:
        return False
    x = g.standard_normal((3, 6, layer.input_size)).astype(np.float32)
    try:
        y = keras.Model(sources[0].input, sources[-1].output)(x, training=False)
    except Exception:  # they are in different models, or begin with an initial state
        y = x
        for source in sources:
            y = source(y, training=False)
            y = y[0] if isinstance(y, (list, tuple)) else y
    y = as_array(y[0] if isinstance(y, (list, tuple)) else y)
    return is_near(layer, x, y)


def is_near(layer, x, expected):
    """Return whether a layer computes what is expected."""
    y, state = layer(x, batch_first=True)
    y = last_of(layer, state) if y.shape != expected.shape else y
    return y is not None and y.shape == expected.shape and np.abs(y - expected).max() <= BOUND * np.abs(expected).max()


def verdict_on(keras, drawn, g):
    """Tell what becomes of a random model."""
    model = drawn.model
    try:
        layers, text = converted(model)
    except ConversionError as error:
        if "something else than the model" in str(error):
            return "refused for a call() of its own" if drawn.is_changed else f"wrong: {error}"
        return "refused"
    except ValueError as error:
        return f"wrong: {error}"
    is_own_told = OWN_CALL in text
    is_stopped = "Conv1D" in text and "no mask reaches it" in text  # which a Conv1D keeps from the layers behind it
    missing = [fact for fact in drawn.facts if (fact.partition(": pass mask=")[0] if is_stopped else fact) not in text]
    if missing and f"root (Own): {OWN_CALL}" not in text:
        return f"wrong: nothing is said of {missing}: {text}"
    if drawn.is_changed:
        return "a call() of its own is named" if is_own_told else f"wrong: a call() of its own: {text}"
    parts = layers.values() if isinstance(layers, dict) else [layers]
    if not all(is_right(keras, part, model, g) for part in parts):
        return f"wrong numbers: {text}"
    if not text:
        x = g.standard_normal((3, 6, layers.input_size)).astype(np.float32)
        y = model(x, training=False)
        if not is_near(layers, x, as_array(y[0] if isinstance(y, (list, tuple)) else y)):
            return "wrong: without a word"
        return "right, without a word"
    return "not compared" if "not compared" in text else "right, with a warning"


def count_verdicts(keras, seed, count):
    """Convert random models; return how many there are of each verdict, and the first wrong one."""
    counts, wrong = Counter(), ""
    for k in range(count):
        g = np.random.default_rng([seed, k])
        keras.backend.clear_session()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = random_graph(g, keras)
            verdict = verdict_on(keras, drawn, g)
        if verdict.startswith("wrong") and not wrong:
            wrong = f"model {k}: {verdict}\n{drawn.model.get_config()}"
        if verdict.startswith("wrong") and os.environ.get("SHOW"):
            print(k, verdict)
        counts[verdict.split(":")[0]] += 1
    return counts, wrong


def test_random_models(keras, seed):
    counts, wrong = count_verdicts(keras, seed, MODELS)
    print(f"{keras.__name__} {keras.__version__}: {dict(counts.most_common())}")
    assert not wrong, wrong


# ------------------------------------------------------------------------------------------------------ what is refused
def own_model(keras, base, change):
    """Return a class with a call() of its own, which changes x or y of its base's."""

    class Own(base):
        def call(self, x, training=None, mask=None):
            return change(lambda x: super(Own, self).call(x), x)

    return Own


CHANGES = {
    "same": lambda call, x: call(x),
    "scaled x": lambda call, x: call(2 * x),
    "scaled y": lambda call, x: 3 * call(x),
    "flipped": lambda call, x: call(x[:, ::-1]),
    "no step after the 60th": lambda call, x: call(x[:, :60]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["Sequential", "functional"])
def test_calls_of_ones_own(keras, form, change):
    layers, inputs = keras.layers, keras.Input((None, 4))
    lstm = layers.LSTM(4, return_sequences=True)
    if form == "Sequential":
        model = own_model(keras, keras.Sequential, CHANGES[change])([inputs, lstm])
    else:
        model = own_model(keras, keras.Model, CHANGES[change])(inputs, lstm(inputs))
    x = keras.Input((None, 4))
    text = converted(keras.Model(x, layers.Dense(3)(model(x))))[1]  # in which it is not seen through
    assert f"{model.name} (Own): {OWN_CALL}" in text
    if change == "same":
        assert not converted(model)[1]
        return
    with pytest.raises(ConversionError, match=r"something else than the model on random inputs: .* pass check=False$"):
        convert.from_keras(model)
    assert converted(model, check=False)[1] == f"from_keras: left out: {model.name} (Own): {OWN_CALL}"


def residual_model(keras, returns="same"):
    """Return a model whose structure nobody tells."""

    class Residual(keras.Model):
        def __init__(self):
            super().__init__()
            self.rnn = keras.layers.LSTM(4, return_sequences=True)

        def call(self, x):
            return {"same": self.rnn(x), "residual": x + self.rnn(x), "flipped": self.rnn(x)[:, ::-1]}[returns]

    model = Residual()
    model(np.zeros((2, 5, 4), np.float32))
    return model


def test_models_of_ones_own(keras):
    layer, text = converted(residual_model(keras))
    assert repr(layer).startswith("LSTM") and not text
    for returns in ("residual", "flipped"):
        model = residual_model(keras, returns)
        with pytest.raises(ConversionError, match=r"y of the model at \(0, 0, 0\) is .* in the model and .* in the la"):
            convert.from_keras(model)
        name = f"{model.name} (Residual): its call() is its own"
        assert converted(model, check=False)[1] == f"from_keras: left out: {name}"
        x = inputs = keras.Input((None, 4))
        outer = keras.Model(inputs, keras.layers.Dense(2)(model(x)))
        assert f"{name}" in converted(outer)[1]


def test_layers_that_are_called_twice(keras, tmp_path):
    layers, inputs = keras.layers, keras.Input((6, 4))
    lstm = layers.LSTM(4, return_sequences=True, name="lstm")
    parts = [layers.LSTM(4, return_sequences=True), layers.Dense(4)]
    block = keras.Sequential([keras.Input((6, 4)), *parts], name="block")
    for called, name in ((lstm, "lstm (LSTM)"), (block, "block (Sequential)")):
        model = keras.Model(inputs, called(called(inputs)))
        text = f"from_keras: left out: {name}: that it is called more than once"
        assert converted(model)[1] == text
        path = str(tmp_path / f"{called.name}.keras")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, about Keras
            model.save(path)
        reason = "because a file is never run; load it with Keras and pass the model"
        assert converted(path)[1] == f"{text}; not compared with the model, {reason}"
        assert converted(path, check=False)[1] == text


# --------------------------------------------------------------------------------------------------- masks and states
@pytest.mark.parametrize("top", ["LSTM", "Bidirectional", "last"])
@pytest.mark.parametrize("maker", ["Embedding", "Masking"])
def test_masks(keras, maker, top, seed):
    """Keras passes masks to the layers that it converts, and what the warning says gives Keras' results."""
    layers, g = keras.layers, np.random.default_rng(seed)
    cell = layers.GRU(5, return_sequences=top != "last")
    upper = layers.Bidirectional(cell) if top == "Bidirectional" else cell
    first = layers.Embedding(9, 4, mask_zero=True) if maker == "Embedding" else layers.Masking(-1.0)
    shape = (None,) if maker == "Embedding" else (None, 4)
    dense = layers.Dense(2, bias_initializer=keras.initializers.Constant(0.3))
    model = keras.Sequential([keras.Input(shape), first, layers.LSTM(4, return_sequences=True), upper, dense])
    stack, text = converted(model)
    mask = "mask=ids != 0" if maker == "Embedding" else "mask="
    masked = {"LSTM": ', and masked="repeat"', "Bidirectional": keras_layers.ZEROS}.get(top, "")
    assert text == f"from_keras: left out: {first.name} ({maker}): pass {mask} to the layer's calls{masked}"
    is_step = g.random((3, 7)) < 0.6
    x = np.where(is_step, g.integers(1, 9, (3, 7)), 0) if maker == "Embedding" else g.standard_normal((3, 7, 4))
    x = x if maker == "Embedding" else np.where(is_step[..., None], x, -1.0).astype(np.float32)
    options = {"masked": "repeat"} if top == "LSTM" else {}
    y, _ = stack(as_array(first(x)), batch_first=True, mask=is_step, **options)
    expected = as_array(model(x))
    # The Dense makes its bias of the zeros at masked steps: at all of them, or at those that have no y to repeat.
    zeros = {"last": np.zeros_like(is_step), "Bidirectional": ~is_step, "LSTM": np.cumsum(is_step, axis=1) == 0}[top]
    if zeros.any():
        np.testing.assert_allclose(expected[zeros], 0.3, rtol=0, atol=1e-7)
        expected = np.where(zeros[..., None], 0, expected)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_masks_that_the_config_does_not_tell(keras):
    layers = keras.layers
    x, mask = keras.Input((None, 4)), keras.Input((None,), dtype="bool")
    model = keras.Model([x, mask], layers.LSTM(3, name="lstm")(x, mask=mask))
    assert converted(model)[1] == "from_keras: left out: lstm (LSTM): it gets a mask: pass mask="
    ids = keras.Input((None,), dtype="int32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of it, too
        lost = layers.Lambda(lambda x: 2 * x, name="lost")(layers.Embedding(9, 4, mask_zero=True, name="ids")(ids))
    text = converted(keras.Model(ids, layers.LSTM(3, name="lstm")(lost)))[1]
    assert "lost (Lambda), lstm (LSTM): no mask reaches it" in text and "pass mask" not in text
    states = [keras.Input((3,)), keras.Input((3,))]
    y = layers.LSTM(3, name="lstm")(layers.Embedding(9, 4, mask_zero=True, name="ids")(ids), initial_state=states)
    text, is_lost = converted(keras.Model([ids, *states], y))[1], not keras.__version__.startswith("2.")
    assert ("no mask reaches" in text) == ("pass mask" not in text) == is_lost
    nested = keras.Sequential([keras.Input((None, 4)), layers.Dense(4)])  # which passes masks on when it runs alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = nested(layers.Embedding(9, 4, mask_zero=True, name="ids")(ids))
    text = converted(keras.Model(ids, layers.LSTM(3, name="lstm")(y)))[1]
    assert "pass mask=ids != 0" in text and "no mask reaches" not in text

    class Maker(layers.Layer):
        def compute_mask(self, x, mask=None):
            return x[..., 0] > 0

        def call(self, x):
            return x

    maker = Maker(name="maker")
    maker.supports_masking = True
    text = converted(keras.Model(x, layers.LSTM(3, name="lstm")(maker(x))))[1]
    assert text.startswith("from_keras: left out: maker (Maker)") and "gets a mask: pass mask=" in text


def test_states(keras):
    layers = keras.layers
    encoder, decoder = keras.Input((None, 4), name="a"), keras.Input((None, 3), name="b")
    y, h, c = layers.LSTM(4, return_state=True, return_sequences=True, name="encoder")(encoder)
    lstm = layers.LSTM(4, return_sequences=True, name="decoder")
    text = converted(keras.Model([encoder, decoder], lstm(decoder, initial_state=[h, c])))[1]
    assert "left out: decoder (LSTM): it starts from the state of encoder: pass state=;" in text
    assert text.endswith("; the layers are not one behind the other")
    text = converted(keras.Model(encoder, [y, h, c]))[1]
    assert text == "from_keras: left out: encoder (LSTM): its states are used, which a call returns beside y"
    inputs = [keras.Input((None, 3)), keras.Input((5,)), keras.Input((5,))]
    lstm = layers.LSTM(5, return_sequences=True, name="lstm")
    layer, text = converted(keras.Model(inputs, lstm(inputs[0], initial_state=inputs[1:])))
    assert not text and layer.hidden_size == 5
    both = layers.Bidirectional(layers.GRU(5, return_state=True, return_sequences=True), name="both")
    y, _, state = both(inputs[0])
    text = converted(keras.Model(inputs[0], [y, state]))[1]
    assert text == "from_keras: left out: both (Bidirectional): its states are used, which a call returns beside y"


def test_stateful_layers(keras, seed):
    layers, g = keras.layers, np.random.default_rng(seed)
    lstm = layers.LSTM(4, stateful=True, return_sequences=True, name="lstm")
    inputs = keras.Input(batch_shape=(3, None, 4))
    model = keras.Model(inputs, layers.Dense(2)(lstm(inputs)))
    x = g.standard_normal((3, 5, 4)).astype(np.float32)
    model(x)
    states = [as_array(state).copy() for state in lstm.states]
    stack, text = converted(model)
    assert text == "from_keras: left out: lstm (LSTM): stateful=True: call it as a stream, or pass state="
    for state, expected in zip(lstm.states, states, strict=True):
        np.testing.assert_array_equal(as_array(state), expected)
    h, c = states
    y, _ = stack(x, {0: {"h": h, "cs": c}, 1: None}, batch_first=True)
    np.testing.assert_allclose(y, as_array(model(x)), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- single layers
LAYERS = {
    "LSTM": lambda layers: layers.LSTM(5, return_sequences=True, return_state=True),
    "GRU": lambda layers: layers.GRU(5, reset_after=False),
    "backwards": lambda layers: layers.GRU(5, go_backwards=True),
    "SimpleRNN": lambda layers: layers.SimpleRNN(5, activation="relu"),
    "Bidirectional": lambda layers: layers.Bidirectional(layers.LSTM(5, return_state=True)),
    "RNN": lambda layers: layers.RNN([layers.LSTMCell(5), layers.GRUCell(3)], return_state=True),
    "LSTMCell": lambda layers: layers.LSTMCell(5),
    "GRUCell": lambda layers: layers.GRUCell(5),
    "stateful": lambda layers: layers.LSTM(5, stateful=True),
    "Dense": lambda layers: layers.Dense(5, activation="softmax"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_single_layers(keras, kind):
    layer = LAYERS[kind](keras.layers)
    layer.build((3, 4) if "Cell" in kind else (3, None, 4))
    assert ("stateful=True" if kind == "stateful" else "") in converted(layer)[1]
    assert "not compared" not in converted(layer)[1]


@pytest.mark.parametrize("policy", ["float64", "float16", "mixed_float16", "mixed_bfloat16"])
def test_dtype_policies(keras, policy, seed):
    layers, options = keras.layers, {"dtype": keras.mixed_precision.Policy(policy)}
    inputs = keras.Input((None, 4), dtype="float32")
    keras.utils.set_random_seed(seed)
    options["return_sequences"] = True  # in half precision, the last step alone may hide the first ones
    model = keras.Model(inputs, layers.GRU(5, **options)(layers.LSTM(5, **options)(inputs)))
    text = converted(model)[1]
    assert not text or ("bfloat16" in policy and text.startswith(NOT_COMPARED))


SIZES = [((None, 1), "T = 1"), ((2, None), "B = 2"), ((1, 70), "B = 1"), ((4, 9), "")]


@pytest.mark.parametrize(("shape", "text"), SIZES)
def test_sizes_that_a_model_fixes(keras, shape, text):
    inputs = keras.Input(batch_shape=(*shape, 4))
    model = keras.Model(inputs, keras.layers.LSTM(3, return_sequences=True)(inputs))
    expected = f"from_keras: compared for {text} alone, which the model fixes" if text else ""
    assert converted(model)[1] == expected


# ------------------------------------------------------------------------------------------------------- not compared
def test_what_cannot_be_compared(keras):
    layers, inputs = keras.layers, keras.Input((None, 4))

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.rnn = layers.LSTM(4)

        def call(self, x, other):
            return self.rnn(x) + self.rnn(other)

    def fail(call, x):
        raise RuntimeError("no longer")

    two = Two()
    two(*np.zeros((2, 3, 5, 4), np.float32))
    lstm = layers.LSTM(3, return_sequences=True)
    normal = getattr(keras, "random", None) or pytest.importorskip("tensorflow").random
    models = {
        "it raises TypeError for random inputs": two,
        "it is random: two runs": own_model(keras, keras.Model, lambda call, x: call(x + normal.normal((4,))))(
            inputs, lstm(inputs)
        ),
        "it returns 2 arrays": own_model(keras, keras.Model, lambda call, x: [call(x), x])(inputs, lstm(inputs)),
    }
    for reason, model in models.items():
        message = converted(model)[1]
        assert "not compared with the model, because it" in message and reason in message
        assert "not compared" not in converted(model, check=False)[1]
    broken = own_model(keras, keras.Model, fail)(inputs, lstm(inputs))
    assert "because it raises RuntimeError for random inputs: " in converted(broken)[1]


# ----------------------------------------------------------------------------------------------- the model, afterwards
def state_of(keras, model):
    """Return all that a run may change of a model, and random numbers that would be drawn next."""
    import random

    layers = [*model._flatten_layers()]
    variables = [variable for layer in layers for variable in layer.weights]
    variables += [state for layer in layers for state in getattr(layer, "states", None) or () if state is not None]
    arrays = [as_array(variable).copy() for variable in variables]
    attributes = [{name: value for name, value in vars(layer).items()} for layer in layers]
    return arrays, attributes, random.getstate(), np.random.get_state()[1].copy(), model.losses  # noqa: NPY002


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_model_is_left_as_it_was(keras, is_whole):
    layers = keras.layers

    def draw(call, x):
        import random

        random.random()
        np.random.random()  # noqa: NPY002
        return call(x)

    inputs = keras.Input(batch_shape=(3, None, 4))
    y = layers.Dropout(0.5)(inputs) if is_whole else layers.BatchNormalization()(inputs)
    options = {"stateful": not is_whole, "dropout": 0.3}
    y = layers.LSTM(4, return_sequences=True, activity_regularizer="l2", **options)(y)
    y = layers.Bidirectional(layers.GRU(3, return_sequences=True, **options))(y)
    model = own_model(keras, keras.Model, draw)(inputs, y) if is_whole else keras.Model(inputs, y)
    model(np.ones((3, 5, 4), np.float32))
    before = state_of(keras, model)
    assert "not compared" not in converted(model)[1]
    after = state_of(keras, model)
    for array, expected in zip(after[0], before[0], strict=True):
        np.testing.assert_array_equal(array, expected)
    for attributes, expected in zip(after[1], before[1], strict=True):
        assert attributes.keys() == expected.keys()
        assert all(attributes[name] is expected[name] for name in expected)
    assert after[2] == before[2]
    np.testing.assert_array_equal(after[3], before[3])
    assert len(after[4]) == len(before[4])


# --------------------------------------------------------------------------------------------- faults of the converter
def with_config(function, key, value):
    """Return `describe` with another value in the configs of all recurrent layers."""

    def describe(source):
        described = function(source)

        def changed(layer):
            inner = tuple(map(changed, layer.layers))
            config = {**layer.config, key: value} if key in layer.config and layer.is_recurrent else layer.config
            return layer._replace(layers=inner, config=config)

        return changed(described)

    return describe


def config_mutant(key, value):
    return lambda patch: patch.setattr(keras_module, "describe", with_config(keras_module.describe, key, value))


def order_mutant(name, order):
    return lambda patch: patch.setitem(ORDERS, name, order)


def swapped(fw, bw):
    return Bidirectional(bw, fw)


def without_second_bias(layout, kernel, recurrent, bias, recurrent_bias=None, **options):
    return make_cell(layout, kernel, recurrent, bias, None if recurrent_bias is None else 0 * recurrent_bias, **options)


def identity_mutant(kind):
    return lambda patch: patch.setattr(keras_layers, "WITHOUT_EFFECT", (*keras_layers.WITHOUT_EFFECT, kind))


MUTANTS = {
    "a flip dropped": ("backwards", config_mutant("go_backwards", False)),
    "directions swapped": ("Bidirectional", lambda patch: patch.setattr(keras_layers, "Bidirectional", swapped)),
    "another merge": ("sum", config_mutant("merge_mode", "concat")),
    "u and r swapped": ("GRU", order_mutant("Keras GRU", "ruc")),
    "f and c swapped": ("LSTM", order_mutant("Keras LSTM", "icfo")),
    "no second bias": ("GRU", lambda patch: patch.setattr(keras_layers, "make_cell", without_second_bias)),
    "another reset": ("GRU without bias", config_mutant("reset_after", True)),
    "another activation": ("LSTM", config_mutant("activation", "relu")),
    "another gate": ("LSTM", config_mutant("recurrent_activation", "hard_sigmoid")),
    "a flip counts as nothing": ("Lambda", identity_mutant("Lambda")),
    "a normalization counts as nothing": ("LayerNormalization", identity_mutant("LayerNormalization")),
    "a merge counts as nothing": ("Add", identity_mutant("Add")),
}


def mutated_model(keras, kind):
    """Return the model that a mutant is tried on."""
    layers, inputs = keras.layers, keras.Input((None, 4))
    y = layers.LSTM(4, return_sequences=True)(inputs)
    if kind == "backwards":
        y = layers.GRU(4, go_backwards=True)(y)
    elif kind in ("Bidirectional", "sum"):
        y = layers.Bidirectional(layers.GRU(4), merge_mode="concat" if kind == "Bidirectional" else kind)(y)
    elif kind.startswith("GRU"):
        y = layers.GRU(4, reset_after=kind == "GRU", use_bias=kind == "GRU")(y)
    elif kind == "Lambda":
        y = layers.GRU(3)(layers.Lambda(lambda y: y[:, ::-1])(y))
    elif kind == "LayerNormalization":
        y = layers.GRU(3)(layers.LayerNormalization()(y))
    elif kind == "Add":
        y = layers.GRU(3)(layers.Add()([y, inputs]))
    model = keras.Model(inputs, y)
    g = np.random.default_rng(5)
    model.set_weights([g.uniform(-0.9, 0.9, array.shape).astype(array.dtype) for array in model.get_weights()])
    return model


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_of_the_converter(keras, name, monkeypatch):
    """The comparison alone sees them; warnings are ignored."""
    kind, mutate = MUTANTS[name]
    model = mutated_model(keras, kind)
    if kind != "sum":
        converted(model)
    mutate(monkeypatch)
    with pytest.raises(ConversionError, match="the layer computes something else than the model on random inputs"):
        converted(model)
