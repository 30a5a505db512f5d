"""LSTMs and GRUs beside Keras's on the same weights, in one or two directions, one or two upon each other, with masks
or not: y, the final states, and the gradients to x, to the initial states and to all weights, by PyTorch under Keras.

`make test-peers`, with keras and torch in .venv.  BLOCKCELL_SEED repeats a run.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from peer_cases import BOUNDS, CONFIGURATIONS, SEED, parts_of, random_sizes, state_of, worst_of

from blockcell import Bidirectional, Stack, convert

# Keras itself makes arrays of PyTorch's tensors in a way that numpy 2 deprecates.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")]
KINDS = {"LSTM": {}, "GRU": {"reset_after": False}, "GRU reset_after": {"reset_after": True}}


@pytest.fixture(autouse=True)
def keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("the gradients are those of PyTorch")
    torch = pytest.importorskip("torch")
    keras.config.set_floatx("float64")
    torch.set_default_dtype(torch.float64)  # that of the states that Keras keeps where there are masks
    yield
    keras.config.set_floatx("float32")
    torch.set_default_dtype(torch.float32)


def layer_of(layers, kind, hidden, directions, bias):
    """Keras's, in float64."""
    options = {"return_sequences": True, "return_state": True, "use_bias": bias}
    layer = getattr(layers, kind.split()[0])(hidden, **options, **KINDS[kind])
    return layers.Bidirectional(layer) if directions == 2 else layer


def convert_arrays(arrays, kind, directions):
    """What get_weights() returns, or the gradients to it, as a layer here."""
    half = len(arrays) // directions
    options = KINDS[kind]
    cells = [convert.from_keras(arrays[half * d : half * (d + 1)], **options) for d in range(directions)]
    return Bidirectional(*cells) if directions == 2 else cells[0]


def without_second(arrays, kind, hidden, bias):
    """The biases set to zero, of which Keras has two where a layer here has their sum."""
    if kind == "GRU reset_after" and bias:
        for array in arrays[2::3]:
            array[1, : 2 * hidden] = 0
    return arrays


def compare(kind, sizes, dtype, g, *, layers, directions, bias, masked):
    import torch
    from keras import layers as keras_layers

    T, B, inputs, hidden = sizes
    theirs = [layer_of(keras_layers, kind, hidden, directions, bias) for _ in range(layers)]
    ours = []
    for k, layer in enumerate(theirs):
        layer.build((B, T, directions * hidden if k else inputs))
        weights = [g.uniform(-1, 1, w.shape).astype(dtype) / np.sqrt(hidden).astype(dtype) for w in layer.get_weights()]
        layer.set_weights(without_second(weights, kind, hidden, bias))
        ours.append(convert_arrays(weights, kind, directions))
    ours = Stack(ours) if layers > 1 else ours[0]
    assert ours.dtype == dtype

    cells, count = layers * directions, 2 if kind == "LSTM" else 1
    x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, directions * hidden))
    first, d_last = (g.uniform(-0.8, 0.8, (count, cells, B, hidden)).astype(dtype) for _ in range(2))  # h, c
    lengths = g.integers(0, T + 1, B) if masked else np.full(B, T)
    live = np.arange(T)[:, None] < lengths  # [T, B]
    d_y[~live] = 0  # Keras repeats y where a step is left out

    x64, *first64 = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, *first))
    y_theirs, last = x64.transpose(0, 1), []
    mask = torch.from_numpy(live.T.copy()) if masked else None
    for k, layer in enumerate(theirs):
        given = [a[c] for c in range(k * directions, (k + 1) * directions) for a in first64]
        y_theirs, *states = layer(y_theirs, initial_state=given, mask=mask)
        last += [states[c : c + count] for c in range(0, len(states), count)]
    y_theirs = y_theirs.transpose(0, 1)
    total = (y_theirs * torch.from_numpy(d_y.astype(np.float64))).sum()
    for c, states in enumerate(last):
        total = total + sum(
            (a * torch.from_numpy(d[c].astype(np.float64))).sum() for a, d in zip(states, d_last, strict=True)
        )
    total.backward()

    options = {"lengths": lengths} if masked else {}
    y, state, tape = ours.forward(x, state_of([*zip(*first, strict=True)], layers, directions), **options)
    d_x, d_first, grads = ours.backward(tape, d_y, state_of([*zip(*d_last, strict=True)], layers, directions))

    pairs = {"y": (y[live], y_theirs.detach().numpy()[live]), "d_x": (d_x, x64.grad)}
    for cell, part in enumerate(parts_of(state, layers, directions)):
        pairs |= {f"state {cell} {k}": (part[k], last[cell][k].detach()) for k in range(count)}
    for cell, part in enumerate(parts_of(d_first, layers, directions)):
        pairs |= {f"d_state {cell} {k}": (part[k], first64[k].grad[cell]) for k in range(count)}
    for k, layer in enumerate(theirs):
        expected = [variable.value.grad.numpy().copy() for variable in layer.trainable_weights]
        expected = convert_arrays(without_second(expected, kind, hidden, bias), kind, directions).weights
        for key, array in expected.items():
            if bias or not key.split(".")[-1].startswith("b"):
                name = f"{k}.{key}" if layers > 1 else key
                pairs[f"gradient of {name}"] = grads[name], array
    return worst_of(pairs, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype):
    worst = 0.0, "nothing"
    for k in range(CONFIGURATIONS):
        g = np.random.default_rng([SEED, k])
        sizes = random_sizes(g, dtype)
        options = {name: int(g.integers(1, 3)) for name in ("layers", "directions")}
        options |= {name: bool(g.integers(2)) for name in ("bias", "masked")}
        error, what = compare(kind, sizes, dtype, g, **options)
        worst = max(worst, (error, f"{what} of configuration {k}, T, B, I, H = {sizes}, {options}"))
        assert error <= BOUNDS[dtype], f"seed {SEED}: {worst[1]} is {error:.1f} eps off"
    print(f"seed {SEED}, {kind}, {dtype}: {worst[0]:.1f} eps, {worst[1]}")
