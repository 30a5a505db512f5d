"""LSTMs, GRUs and SimpleRNNs beside Keras's on the same weights, with its activations, in one or two directions, one or
two upon each other, with masks or not: y, the final states, and the gradients to x, to the initial states and to all
weights, by TensorFlow.

`pytest -m peers`, with keras and tensorflow in .venv.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from convert_cases import from_keras
from peer_cases import BOUNDS, check_configurations, difference, errors_of, parts_of, random_sizes, state_of

from blockcell import Bidirectional, Stack, convert

pytestmark = pytest.mark.peers
KINDS = {"LSTM": {}, "GRU": {"reset_after": False}, "GRU reset_after": {"reset_after": True}, "SimpleRNN": {}}
ACTIVATIONS = ("relu", "leaky_relu", "elu", "selu", "softplus", "softsign", "hard_sigmoid", "linear", "sigmoid")
GATES = ("sigmoid", "hard_sigmoid", "softsign", "tanh")  # softplus has no bound: many a draw overflows
AS_COMPUTED = {"leaky_relu": ("leaky_relu", float(np.float32(0.2)))}  # TensorFlow's LeakyRelu has a slope of float32
OFF = ("elu", "selu")  # which TensorFlow has as exp(z) - 1: off by eps, however small they are
STEP = 2.0**-30  # of numbers that are moved
MOST_MOVED = 64  # eps: weights are halved until results move by no more, as values without bounds may grow


@pytest.fixture(autouse=True)
def keras():
    """Skip the tests without Keras on TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("products of float64 are float32 on Keras's other backends")


def layer_of(layers, kind, hidden, directions, bias, activations):
    """Make Keras's layer, in float64."""
    options = {"return_sequences": True, "return_state": True, "use_bias": bias, "dtype": "float64"} | activations
    layer = getattr(layers, kind.split()[0])(hidden, **options, **KINDS[kind])
    return layers.Bidirectional(layer, dtype="float64") if directions == 2 else layer


def convert_arrays(arrays, kind, directions, activations):
    """Make a layer of what get_weights() returns, or of the gradients to it."""
    half = len(arrays) // directions
    gates = {} if kind == "SimpleRNN" else {"recurrent_activation": "sigmoid"}
    options = gates | KINDS[kind] | activations
    cells = [from_keras(arrays[half * d : half * (d + 1)], **options) for d in range(directions)]
    return Bidirectional(*cells) if directions == 2 else cells[0]


def zero_second_biases(arrays, kind, hidden, bias):
    """Set the biases to zero of which Keras has two where a layer here has their sum."""
    if kind == "GRU reset_after" and bias:
        for array in arrays[2::3]:
            array[1, : 2 * hidden] = 0
    return arrays


def compute_by_keras(theirs, x, first, d_y, d_last, mask, directions):
    """Compute y, the final states of all cells, and the gradients to x, to the initial states and to all weights."""
    import tensorflow as tf

    x, d_y, *states = (tf.constant(a.astype(np.float64)) for a in (x, d_y, *states_by_cell(first)))
    variables = [variable.value for layer in theirs for variable in layer.trainable_weights]
    per_layer = len(states) // len(theirs)
    with tf.GradientTape() as recorded:
        recorded.watch([x, *states])
        y, last = tf.transpose(x, (1, 0, 2)), []
        for k, layer in enumerate(theirs):
            begin = states[k * per_layer : (k + 1) * per_layer]
            y, *ends = layer(y, initial_state=begin, mask=None if mask is None else tf.constant(mask.T))
            last += ends
        y = tf.transpose(y, (1, 0, 2))
        incoming = [d_y, *(d.astype(np.float64) for d in states_by_cell(d_last))]
        total = sum(tf.reduce_sum(a * d) for a, d in zip([y, *last], incoming, strict=True))
    gradients = recorded.gradient(total, [x, *states, *variables])
    d_x, *d_rest = (tf.convert_to_tensor(a).numpy() for a in gradients)
    return y.numpy(), [a.numpy() for a in last], d_x, d_rest[: len(states)], d_rest[len(states) :]


def states_by_cell(states):
    """List the states [2,cells,B,H] or [1,cells,B,H] as h and c of each cell in turn."""
    return states.swapaxes(0, 1).reshape(-1, *states.shape[2:])


def compute_by_layer(ours, x, first, d_y, d_last, mask, layers, directions):
    """Compute what `compute_by_keras` does with a layer; return it by name."""
    options = {"mask": mask, "masked": "repeat" if directions == 1 else "zero"}  # as Keras does it
    y, state, tape = ours.forward(x, state_of([*zip(*first, strict=True)], layers, directions), **options)
    d_x, d_first, grads = ours.backward(tape, d_y, state_of([*zip(*d_last, strict=True)], layers, directions))
    results = {"y": y, "d_x": d_x}
    for state_name, cell_states in (("state", state), ("d_state", d_first)):
        flat = [array for part in parts_of(cell_states, layers, directions) for array in part]
        results |= {f"{state_name} {k}": array for k, array in enumerate(flat)}
    return results | {f"gradient of {name}": grad for name, grad in grads.items()}


def sensitivity(g, results, *numbers):
    """Return how many eps each result moves if every number moves by one eps, at random to one side or the other.

    `results` takes lists of arrays. What rounds in each of its steps is off by a few times as much.
    """
    numbers = [[a.astype(np.float64) for a in arrays] for arrays in numbers]
    exact, most = results(*numbers), {}
    for _ in range(2):
        near = ([a * (1 + STEP * g.choice([-1, 1], a.shape)) for a in arrays] for arrays in numbers)
        for name, array in results(*near).items():
            most[name] = max(most.get(name, 0.0), difference(array, exact[name]) / STEP)
    return most


def compare(kind, sizes, dtype, g, *, layers, directions, bias, masked, **activations):
    """Compare with Keras; return the largest error relative to its limit, the same in eps, and its name."""
    from keras import layers as keras_layers

    T, B, inputs, hidden = sizes
    cells, count = layers * directions, 2 if kind == "LSTM" else 1
    theirs = [layer_of(keras_layers, kind, hidden, directions, bias, activations) for _ in range(layers)]
    weights = []
    for k, layer in enumerate(theirs):
        layer.build((B, T, directions * hidden if k else inputs))
        drawn = [g.uniform(-1, 1, w.shape) / np.sqrt(hidden) for w in layer.get_weights()]
        weights += [w.astype(dtype) for w in zero_second_biases(drawn, kind, hidden, bias)]
    x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, directions * hidden))
    first, d_last = (g.uniform(-0.8, 0.8, (count, cells, B, hidden)).astype(dtype) for _ in range(2))  # h, c
    mask = g.random((T, B)) < g.random(B) if masked else None  # steps anywhere, few or many of a row
    computed = {name: AS_COMPUTED.get(value, value) for name, value in activations.items()}

    def of_layers(arrays):
        per_layer = len(arrays) // layers
        return [arrays[k * per_layer : (k + 1) * per_layer] for k in range(layers)]

    def results(weights, arguments):
        ours = [convert_arrays(arrays, kind, directions, computed) for arrays in of_layers(weights)]
        return compute_by_layer(Stack(ours) if layers > 1 else ours[0], *arguments, mask, layers, directions)

    arguments = [x, first, d_y, d_last]
    limits = dict.fromkeys(results(weights, arguments), BOUNDS[dtype])
    if activations:
        with np.errstate(all="ignore"):  # without bounds, values may overflow, and NaN is not <= MOST_MOVED either
            while not np.max([*(by := sensitivity(g, results, weights, arguments)).values()]) <= MOST_MOVED:
                weights = [w / 2 for w in weights]
        limits = {name: max(limit, BOUNDS["float32"] * by[name]) for name, limit in limits.items()}
    for their, arrays in zip(theirs, of_layers(weights), strict=True):
        their.set_weights(arrays)
        converted, ours = convert.from_keras(their), convert_arrays(arrays, kind, directions, activations)
        assert repr(converted).replace("float64", dtype) == repr(ours)  # the layer itself tells its activations

    y, last, d_x, d_first, d_weights = compute_by_keras(theirs, *arguments, mask, directions)
    expected = {"y": y, "d_x": d_x}
    for name, arrays in (("state", last), ("d_state", d_first)):
        expected |= {f"{name} {k}": array for k, array in enumerate(arrays)}
    for k, arrays in enumerate(of_layers(d_weights)):
        grads = convert_arrays(zero_second_biases(arrays, kind, hidden, bias), kind, directions, activations).weights
        for key, array in grads.items():
            if bias or not key.split(".")[-1].startswith("b"):
                expected[f"gradient of {k}.{key}" if layers > 1 else f"gradient of {key}"] = array
    our_results = results(weights, arguments)
    values = [name for name in expected if name.startswith(("y", "state"))]
    terms = dict.fromkeys(values, 1.0) if activations.get("activation") in OFF else {}
    errors = errors_of({name: (our_results[name], array) for name, array in expected.items()}, dtype, terms)
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    return errors[worst] / limits[worst], errors[worst], worst


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("usual", [True, False], ids=["usual", "activations"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, usual, dtype, seed):
    """With the usual activations, and with others."""

    def compare_drawn(g, k):
        sizes = random_sizes(g, dtype)
        options = {name: int(g.integers(1, 3)) for name in ("layers", "directions")}
        options |= {name: bool(g.integers(2)) for name in ("bias", "masked")}
        if not usual:
            options["activation"] = str(g.choice(ACTIVATIONS))
            options |= {} if kind == "SimpleRNN" else {"recurrent_activation": str(g.choice(GATES))}
        of_limit, error, name = compare(kind, sizes, dtype, g, **options)
        return of_limit, f"{name} ({error:.1f} eps) of {kind}, {dtype}, T, B, I, H = {sizes}, {options}"

    check_configurations(compare_drawn, 1, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_one_bias_of_a_gru_moves_twice_as_far(kind, seed):
    """b_ru of a GRU that resets after the product, in one step of SGD; all other weights move as far as here."""
    import keras

    g = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    layer = layer_of(keras.layers, kind, 4, 1, True, {})
    x, target = g.standard_normal((5, 6, 3)), g.standard_normal((5, 6, 4))
    outputs = layer(inputs := keras.Input((6, 3), dtype="float64"))
    model = keras.Model(inputs, outputs[0])
    ours = convert.from_keras(layer)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
    model.train_on_batch(x, target)
    y, _, tape = ours.forward(x, batch_first=True)
    grads = ours.backward(tape, 2 * (y - target) / y.size)[2]
    trained = convert.from_keras(layer).weights
    steps = {name: (trained[name] - weight) / -0.1 for name, weight in ours.weights.items()}
    for name, grad in grads.items():
        times = 2 if (kind, name) == ("GRU reset_after", "b_ru") else 1
        assert np.abs(grad).max() > 1e-3
        assert np.abs(steps[name] - times * grad).max() < 1e-6, name  # Keras has its learning rate in float32
