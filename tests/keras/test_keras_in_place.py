"""`blockcell.keras.replace` and `restore`, by the backend that Keras was started with (KERAS_BACKEND)."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = pytest.importorskip("keras", minversion="3.0")
import blockcell.keras  # noqa: E402
from blockcell.keras.computation import Computation  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # Keras has some of its own
BACKEND = keras.backend.backend()
X = np.random.default_rng(0).standard_normal((4, 6, 3)).astype(np.float32)


def replace(model):
    """Replace layers of any size, with JAX, too."""
    return blockcell.keras.replace(model, min_units=0)


def small_model(layer=None):
    return keras.Sequential([keras.Input((6, 3)), layer or keras.layers.LSTM(5), keras.layers.Dense(2)])


def predict(model):
    return model.predict(X, verbose=0)


def predict_all(model, x):
    """Call a model without Keras' functions for batches, which belong to one thread."""
    return keras.ops.convert_to_numpy(model(x, training=False)).copy()


def test_report_is_a_table():
    model = small_model(keras.layers.Bidirectional(keras.layers.GRU(5), name="both"))
    left = keras.layers.LSTM(4, recurrent_dropout=0.5, name="noisy")
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            keras.layers.RNN(keras.layers.LSTMCell(3), return_sequences=True, name="cells"),
            left,
            keras.layers.RepeatVector(6),
            model.layers[0],
        ]
    )
    report = replace(model)
    assert repr(report).splitlines() == [
        "replaced 2 layers:",
        "  backward_gru: GRU(5)",
        "  forward_gru: GRU(5)",
        "left 2:",
        "  cells: its class is RNN, which may compute something else than LSTM, GRU or SimpleRNN",
        "  noisy: recurrent_dropout is 0.5",
    ]
    assert [*blockcell.keras.restore(model).changed] == ["backward_gru", "forward_gru"]


def test_restored_model_has_the_bits_from_before():
    model = small_model()
    before = predict(model)
    replace(model)
    replaced = predict(model)
    np.testing.assert_allclose(replaced, before, rtol=0, atol=1e-6)
    blockcell.keras.restore(model)
    np.testing.assert_array_equal(predict(model), before)
    assert not [name for layer in model._flatten_layers() for name in ("inner_loop", "export") if name in vars(layer)]


def test_replacing_twice_says_so():
    model = small_model()
    replace(model)
    assert [*replace(model).left.values()] == ["it is replaced already"]


def test_new_weights_count():
    model = small_model()
    replace(model)
    first = predict(model)
    model.set_weights([2 * weight for weight in model.get_weights()])
    twice = predict(model)
    blockcell.keras.restore(model)
    np.testing.assert_allclose(twice, predict(model), rtol=0, atol=1e-6)
    assert np.abs(twice - first).max() > 0.01


class Derived(keras.layers.LSTM):
    """A layer of a user's own."""


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Derived(3), "its class is Derived, which may compute something else than LSTM, GRU"),
        (lambda: keras.layers.LSTM(3, recurrent_dropout=0.1), "recurrent_dropout is 0.1"),
        (lambda: keras.layers.GRU(3, go_backwards=True, unroll=True), "it is unrolled backwards or in a Bidirec"),
        (lambda: keras.layers.GRU(3, activation="gelu"), "its activation, gelu, is none of blockcell's"),
        (lambda: keras.layers.LSTM(3, dtype="mixed_bfloat16"), "its dtype policy is mixed_bfloat16; expected float"),
        (lambda: keras.layers.RNN(keras.layers.GRUCell(3)), "its class is RNN, which may compute something else"),
    ],
)
def test_layers_that_are_left(layer, reason):
    model = small_model(layer())
    before = predict(model)
    report = replace(model)
    [told] = report.left.values()
    assert told.startswith(reason)
    assert not report.changed
    np.testing.assert_array_equal(predict(model), before)


def test_small_layers_are_left():
    model = small_model(keras.layers.LSTM(5, name="small"))
    expected = {"small": "it has 5 units, fewer than min_units=6"}
    assert blockcell.keras.replace(model, min_units=6).left == expected
    assert len(blockcell.keras.replace(model).changed) == (BACKEND != "jax")
    with pytest.raises(TypeError, match=r"blockcell\.keras\.replace: min_units is '6'"):
        blockcell.keras.replace(model, min_units="6")


@pytest.mark.skipif(BACKEND != "jax", reason="other backends have no least size")
def test_short_calls_are_left():
    """With JAX, Keras computes calls of few rows and steps, and more of them in training."""
    model = small_model(keras.layers.LSTM(64))
    assert blockcell.keras.replace(model).changed
    computation, calls = vars(model.layers[0])["inner_loop"].computation, []
    forward = computation.forward
    computation.forward = lambda inputs, training: calls.append((len(inputs[0]), training)) or forward(inputs, training)
    model.compile(optimizer="sgd", loss="mse")
    for rows in (5, 6, 85, 86):  # of 6 steps
        x = np.tile(X, (22, 1, 1))[:rows]
        model.predict_on_batch(x)
        model.train_on_batch(x, np.zeros((rows, 2)))
    assert calls == [(6, False), (85, False), (86, False), (86, True)]


def test_layers_that_are_not_built_are_left():
    model = keras.Sequential([keras.layers.LSTM(3)])
    assert [*replace(model).left.values()] == ["it is not built; call the model once, then replace"]


def test_weights_on_a_gpu_stay_there():
    model = small_model(keras.layers.LSTM(5, name="there"))
    model.layers[0].cell.kernel = SimpleNamespace(value=SimpleNamespace(device="cuda:0"))
    assert replace(model).left == {"there": "Keras computes on cuda:0"}


@pytest.mark.parametrize("model", [None, object(), np.zeros(3)])
def test_what_is_no_layer(model):
    for function in (blockcell.keras.replace, blockcell.keras.restore):
        with pytest.raises(TypeError, match=rf"blockcell.keras.{function.__name__}: model is of type .*; expected a"):
            function(model)


def test_export_asks_for_restore(tmp_path):
    model = small_model()
    replace(model)
    with pytest.raises(ValueError, match=r"call blockcell.keras.restore\(model\) before"):
        model.export(str(tmp_path / "model"))


@pytest.mark.skipif(BACKEND not in ("tensorflow", "torch"), reason="JAX compiles around callbacks; numpy nothing")
def test_compiled_models_are_refused():
    model = small_model()
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    with pytest.raises(ValueError, match=r"with jit_compile=True, but .*; expected compile\(..., jit_compile=False"):
        replace(model)


@pytest.mark.skipif(BACKEND == "numpy", reason="numpy has no fit")
def test_a_model_that_was_trained_before_forgets_its_functions():
    model = small_model()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    y = np.zeros((4, 2), np.float32)
    model.fit(X, y, verbose=0)
    report = replace(model)
    [loop] = [vars(layer)["inner_loop"] for layer in model._flatten_layers() if layer.name in report.changed]
    calls, compute = [], loop.compute
    loop.compute = lambda *arguments: calls.append(arguments) or compute(*arguments)
    model.fit(X, y, verbose=0)
    predict(model)
    assert len(calls) >= 2


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_masked_steps_before_the_first_other_step(sequences, zero):
    """There JAX and numpy return the initial state, and others zeros: all of a row, and its first ones."""
    layer = keras.layers.GRU(5, return_sequences=sequences, return_state=True, zero_output_for_mask=zero)
    mask = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
    h = np.random.default_rng(3).standard_normal((4, 5)).astype(np.float32)

    def results():
        tensors = layer(X, initial_state=[keras.ops.convert_to_tensor(h)], mask=keras.ops.convert_to_tensor(mask))
        return [np.array(keras.ops.convert_to_numpy(tensor)) for tensor in tensors]

    expected = results()
    replace(layer)
    for result, of_keras in zip(results(), expected, strict=True):
        np.testing.assert_allclose(result, of_keras, rtol=0, atol=1e-6)


def test_a_model_in_a_model():
    inner = small_model(keras.layers.LSTM(5, name="inner_lstm"))
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.TimeDistributed(keras.layers.Dense(3)), inner])
    before = predict(model)
    assert [*replace(model).changed] == ["inner_lstm"]
    np.testing.assert_allclose(predict(model), before, rtol=0, atol=1e-6)


def test_two_threads():
    """Neither waits for the other forever, as a callback would that calls JAX."""
    models = [small_model() for _ in range(2)]
    expected = [predict(model) for model in models]
    for model in models:
        replace(model)
    results: list[list[np.ndarray]] = [[], []]

    def run(k):
        for _ in range(20):
            results[k].append(np.asarray(keras.ops.convert_to_numpy(predict(models[k]))))

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not [thread for thread in threads if thread.is_alive()]
    for k in range(2):
        for result in results[k]:
            np.testing.assert_allclose(result, expected[k], rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_an_earlier_call(training):
    """Only the last tape in training is kept, until it is used: other gradients are computed from the arguments."""
    rng, options = np.random.default_rng(1), {"reset_after": True}
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 15), (5, 15), (2, 15))]
    calls = [[x, rng.standard_normal((4, 5)).astype(np.float32), *weights] for x in (X, -X)]
    d_results = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 6, 5), (4, 5))]
    computation = Computation("GRU", options, weight_count=3, returns_sequences=True, zero_masked=False)
    tokens = [int(computation.forward_with_token(call, training)[0]) for call in calls]
    for token, call in zip(tokens, calls, strict=True):
        alone = Computation("GRU", options, weight_count=3, returns_sequences=True, zero_masked=False)
        expected = alone.backward(alone.forward(call, True)[1], d_results)
        for grad, expected_grad in zip(computation.backward_of_token(token, call, d_results), expected, strict=True):
            np.testing.assert_array_equal(grad, expected_grad)
    assert computation._kept == (0, None)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="PyTorch and JAX raise errors of their own")
@pytest.mark.parametrize("power", [1, 2])
def test_gradients_of_gradients(power):
    """TensorFlow would take what it cannot differentiate for a constant."""
    import tensorflow as tf

    model, x = small_model(), tf.constant(X)
    replace(model)
    with tf.GradientTape() as outer, tf.GradientTape() as inner:
        outer.watch(x)
        inner.watch(x)
        penalty = tf.reduce_sum(inner.gradient(tf.reduce_sum(model(x) ** power), x) ** 2)
    with pytest.raises(ValueError, match=r"a gradient of a gradient .*; call blockcell\.keras\.restore"):
        outer.gradient(penalty, [x, *(variable.value for variable in model.trainable_variables)])


def test_one_model_in_two_threads():
    """Each thread gets what it would alone, for batches of its own."""
    model = small_model()
    xs = [X, -X[:3]]
    expected = [predict_all(model, x) for x in xs]
    replace(model)
    results: list[list[np.ndarray]] = [[], []]

    def run(k):
        results[k] += [predict_all(model, xs[k]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        for result in results[k]:
            np.testing.assert_allclose(result, expected[k], rtol=0, atol=1e-6)


@pytest.mark.skipif(BACKEND != "jax", reason="other backends compile nothing around a layer")
def test_transformations_of_jax():
    """Gradients under jit and vmap are those of each batch alone."""
    import jax

    model = small_model(keras.layers.GRU(5))
    values = [variable.value for variable in model.trainable_variables]
    seeds = [variable.value for variable in model.non_trainable_variables]

    def loss(trainable, x):
        y, _ = model.stateless_call(trainable, seeds, x, training=False)
        return (y * y).sum()

    xs = np.stack([X, -X])
    expected = [jax.grad(loss)(values, x) for x in xs]
    replace(model)
    together = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(values, xs)
    for k in range(2):
        for grad, expected_grad in zip(together, expected[k], strict=True):
            np.testing.assert_allclose(grad[k], expected_grad, rtol=0, atol=1e-5)


@pytest.mark.skipif(BACKEND != "jax", reason="only compiled programs outlive a layer")
def test_errors_in_a_program_of_jax():
    """An error in a call is one of the program, which says what to do; the process goes on."""
    import jax

    from blockcell.keras import xla_calls

    model = small_model()
    replace(model)
    program = jax.jit(lambda x: model(x, training=False))
    expected = np.asarray(program(X))
    known = dict(xla_calls._computations)
    xla_calls._computations.clear()
    with pytest.raises((RuntimeError, ValueError), match="the layer that this program was compiled for is gone"):
        np.asarray(program(X))
    xla_calls._computations.update(known)
    np.testing.assert_array_equal(np.asarray(program(X)), expected)
