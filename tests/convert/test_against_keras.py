"""LSTMs, GRUs and SimpleRNNs beside Keras's on the same weights, with its activations, in one or two directions, one or
two upon each other, with masks or not: y, the final states, and the gradients to x, to the initial states and to all
weights, by TensorFlow.

`make test-peers`, with keras and tensorflow in .venv.  BLOCKCELL_SEED repeats a run.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from peer_cases import BOUNDS, CONFIGURATIONS, SEED, parts_of, random_sizes, state_of, worst_of

from blockcell import Bidirectional, Stack, convert

pytestmark = pytest.mark.peers
KINDS = {"LSTM": {}, "GRU": {"reset_after": False}, "GRU reset_after": {"reset_after": True}, "SimpleRNN": {}}
ACTIVATIONS = ("relu", "elu", "selu", "softplus", "softsign", "hard_sigmoid", "linear")  # TensorFlow's leaky_relu has
# its slope in float32, in float64 too
GATES = ("sigmoid", "hard_sigmoid")


@pytest.fixture(autouse=True)
def keras():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("products of float64 are float32 on Keras's other backends")


def layer_of(layers, kind, hidden, directions, bias, activations):
    """Keras's, in float64."""
    options = {"return_sequences": True, "return_state": True, "use_bias": bias, "dtype": "float64"} | activations
    layer = getattr(layers, kind.split()[0])(hidden, **options, **KINDS[kind])
    return layers.Bidirectional(layer, dtype="float64") if directions == 2 else layer


def convert_arrays(arrays, kind, directions, activations):
    """What get_weights() returns, or the gradients to it, as a layer here."""
    half = len(arrays) // directions
    options = KINDS[kind] | activations
    cells = [convert.from_keras(arrays[half * d : half * (d + 1)], **options) for d in range(directions)]
    return Bidirectional(*cells) if directions == 2 else cells[0]


def without_second(arrays, kind, hidden, bias):
    """The biases set to zero, of which Keras has two where a layer here has their sum."""
    if kind == "GRU reset_after" and bias:
        for array in arrays[2::3]:
            array[1, : 2 * hidden] = 0
    return arrays


def compare(kind, sizes, dtype, g, *, layers, directions, bias, masked, **activations):
    import tensorflow as tf
    from keras import layers as keras_layers

    T, B, inputs, hidden = sizes
    theirs = [layer_of(keras_layers, kind, hidden, directions, bias, activations) for _ in range(layers)]
    ours = []
    for k, layer in enumerate(theirs):
        layer.build((B, T, directions * hidden if k else inputs))
        weights = [g.uniform(-1, 1, w.shape).astype(dtype) / np.sqrt(hidden).astype(dtype) for w in layer.get_weights()]
        layer.set_weights(without_second(weights, kind, hidden, bias))
        ours.append(convert_arrays(weights, kind, directions, activations))
    for layer, their in zip(ours, theirs, strict=True):  # the layer itself tells its activations
        assert repr(convert.from_keras(their)).replace("float64", dtype) == repr(layer)
    ours = Stack(ours) if layers > 1 else ours[0]
    assert ours.dtype == dtype

    cells, count = layers * directions, 2 if kind == "LSTM" else 1
    x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, directions * hidden))
    first, d_last = (g.uniform(-0.8, 0.8, (count, cells, B, hidden)).astype(dtype) for _ in range(2))  # h, c
    mask = g.random((T, B)) < g.random(B) if masked else None  # steps anywhere, few or many of a row

    x64 = tf.constant(x.astype(np.float64))
    cell_states = [tf.constant(a) for a in first.astype(np.float64).swapaxes(0, 1).reshape(-1, B, hidden)]
    variables = [variable.value for layer in theirs for variable in layer.trainable_weights]
    with tf.GradientTape() as recorded:
        recorded.watch([x64, *cell_states])
        y_theirs, last = tf.transpose(x64, (1, 0, 2)), []
        given = tf.constant(mask.T) if masked else None
        for k, layer in enumerate(theirs):
            each = directions * count
            y_theirs, *states = layer(y_theirs, initial_state=cell_states[k * each : (k + 1) * each], mask=given)
            last += states
        y_theirs = tf.transpose(y_theirs, (1, 0, 2))
        incoming = [d_y, *d_last.swapaxes(0, 1).reshape(-1, B, hidden)]
        pairs = zip([y_theirs, *last], incoming, strict=True)
        total = sum(tf.reduce_sum(a * d.astype(np.float64)) for a, d in pairs)
    d_x64, *gradients = (
        tf.convert_to_tensor(a).numpy() for a in recorded.gradient(total, [x64, *cell_states, *variables])
    )
    d_first64 = gradients[: len(cell_states)]

    options = {"mask": mask, "masked": "repeat" if directions == 1 else "zero"}  # as Keras does it
    y, state, tape = ours.forward(x, state_of([*zip(*first, strict=True)], layers, directions), **options)
    d_x, d_first, grads = ours.backward(tape, d_y, state_of([*zip(*d_last, strict=True)], layers, directions))

    pairs = {"y": (y, y_theirs.numpy()), "d_x": (d_x, d_x64)}
    for what, found, expected in (("state", state, last), ("d_state", d_first, d_first64)):
        flat = [array for part in parts_of(found, layers, directions) for array in part]
        pairs |= {f"{what} {k}": pair for k, pair in enumerate(zip(flat, expected, strict=True))}
    each = len(variables) // layers
    for k in range(layers):
        start = len(cell_states) + k * each
        arrays = without_second(gradients[start : start + each], kind, hidden, bias)
        for key, array in convert_arrays(arrays, kind, directions, activations).weights.items():
            if bias or not key.split(".")[-1].startswith("b"):
                name = f"{k}.{key}" if layers > 1 else key
                pairs[f"gradient of {name}"] = grads[name], array
    return worst_of(pairs, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("usual", [True, False], ids=["usual", "activations"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, usual, dtype):
    """With the usual activations, and with others."""
    worst = 0.0, "nothing"
    for k in range(CONFIGURATIONS):
        g = np.random.default_rng([SEED, k])
        sizes = random_sizes(g, dtype)
        options = {name: int(g.integers(1, 3)) for name in ("layers", "directions")}
        options |= {name: bool(g.integers(2)) for name in ("bias", "masked")}
        if not usual:
            options["activation"] = str(g.choice(ACTIVATIONS))
            options |= {} if kind == "SimpleRNN" else {"recurrent_activation": str(g.choice(GATES))}
        error, what = compare(kind, sizes, dtype, g, **options)
        worst = max(worst, (error, f"{what} of configuration {k}, T, B, I, H = {sizes}, {options}"))
        assert error <= BOUNDS[dtype], f"seed {SEED}: {worst[1]} is {error:.1f} eps off"
    print(f"seed {SEED}, {kind}, {dtype}: {worst[0]:.1f} eps, {worst[1]}")
