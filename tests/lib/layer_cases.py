"""Layers of every kind with random weights, random arguments for them, and all results of a call."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import inspect

import numpy as np
from bits import leaves, like, zeros
from cases import arguments, rng
from kernel_cases import sizes_of

from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack
from blockcell.optable import ACTIVATIONS

ATTRIBUTES = {"forget_bias": 0.5, "cell_clip": 0.75}


def lstm(inputs, hidden, dtype, seed=0, peephole=True, **attributes):
    args = arguments("BlockLSTM", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    names = ["w", "b"] + ["wci", "wcf", "wco"] * peephole
    return LSTM(**{name: args[name] for name in names}, **attributes)


def variant(inputs, hidden, dtype, outputs=0, coupled=False, seed=0, peephole=True, **attributes):
    """Return an LSTM with a projection, or with coupled gates.  One without cells projects nothing."""
    outputs = outputs if hidden else 0
    g, fed_back, gates = rng("variant", inputs, hidden, outputs, coupled, seed), outputs or hidden, 4 - coupled
    shapes = {"w": (inputs + fed_back, gates * hidden), "b": (gates * hidden,)}
    shapes |= dict.fromkeys(("wci", "wcf", "wco")[coupled:] if peephole else (), (hidden,))
    if outputs:  # bounds that float16 has, and that the differences of `test_backward_is_the_derivative` do not cross
        shapes["w_p"], attributes = (hidden, outputs), {"proj_clip": 0.25 if coupled else 0.1875} | attributes
    drawn = {name: g.uniform(-1, 1, shape) * (1.5 / np.sqrt(shape[0]) if name[0] == "w" and len(shape) == 2 else 1)
             for name, shape in shapes.items()}  # fmt: skip
    return LSTM(**{name: array.astype(dtype) for name, array in drawn.items()}, coupled=coupled, **attributes)


def gru(inputs, hidden, dtype, seed=0, **attributes):
    args = arguments("block_gru", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    return GRU(**{name: args[name] for name in ("w_ru", "w_c", "b_ru", "b_c")}, **attributes)


def reset_after(inputs, hidden, dtype, seed=0, **attributes):
    args = arguments("block_gru_reset_after", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    weights = {name: args[name] for name in ("w_ru", "w_c", "b_ru", "b_c", "b_hc")}
    return GRU(**weights, reset_after=True, **attributes)


def rnn(inputs, hidden, dtype, seed=0, **attributes):
    args = arguments("block_rnn", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    return RNN(args["w"], args["b"], **attributes)


def activations(activation, recurrent=None):
    """Return options for smooth activations: differences of others cross kinks."""
    return {"activation": activation} | ({"recurrent_activation": recurrent} if recurrent else {})


def dense(inputs, outputs, dtype, activation=None, seed=0, **options):
    g = rng("dense", inputs, outputs, activation, seed)
    w, b = g.uniform(-1, 1, (inputs, outputs)) * 1.5 / np.sqrt(max(inputs, 1)), g.uniform(-1, 1, outputs)
    if activation == "relu":  # each output on one side of the kink, which differences must not cross
        b += np.where(np.arange(outputs) % 2, 3, -3)
    return Dense(w.astype(dtype), b.astype(dtype), activation, **options)


def stack(*layers):
    """Return a stack of these layers."""
    return Stack(layers)


LAYERS = {
    "lstm": lambda I, H, dtype, **more: lstm(I, H, dtype, **more),
    "lstm without peepholes": lambda I, H, dtype, **more: lstm(I, H, dtype, peephole=False, **more),
    "lstm ifco": lambda I, H, dtype, **more: lstm(I, H, dtype, gate_order="ifco", **more),
    "projected lstm": lambda I, H, dtype, **more: variant(I, H, dtype, (H + 1) // 2, peephole=False, **more),
    "coupled lstm": lambda I, H, dtype, **more: variant(I, H, dtype, coupled=True, **more),
    "projected coupled lstm": lambda I, H, dtype, **more: variant(I, H, dtype, 2 * H, coupled=True, **more),
    "gru": lambda I, H, dtype, **_: gru(I, H, dtype),
    "gru reset after": lambda I, H, dtype, **_: reset_after(I, H, dtype),
    "rnn": lambda I, H, dtype, **_: rnn(I, H, dtype),
    "sigmoid rnn": lambda I, H, dtype, **_: rnn(I, H, dtype, **activations("sigmoid")),
    "softplus lstm": lambda I, H, dtype, **more: lstm(I, H, dtype, **activations("softplus", "tanh"), **more),
    "linear gru": lambda I, H, dtype, **_: gru(I, H, dtype, **activations("linear", "tanh")),
    "tanh gru reset after": lambda I, H, dtype, **_: reset_after(I, H, dtype, **activations("sigmoid", "tanh")),
    "bidirectional lstm": lambda I, H, dtype, **more: Bidirectional(
        lstm(I, H, dtype, **more), lstm(I, H, dtype, 1, **more)
    ),
    "bidirectional gru": lambda I, H, dtype, **_: Bidirectional(gru(I, H, dtype), gru(I, H, dtype, 1)),
    "bidirectional gru reset after": lambda I, H, dtype, **_: Bidirectional(
        reset_after(I, H, dtype), reset_after(I, H, dtype, 1)
    ),
    "stack": lambda I, H, dtype, **more: stack(
        lstm(I, H, dtype, **more),
        Bidirectional(gru(H, H + 1, dtype), lstm(H, H + 1, dtype, 1, **more)),
        reset_after(2 * H + 2, H + 2, dtype),
        gru(H + 2, H, dtype, 2),
    ),
    "bidirectional stack": lambda I, H, dtype, **more: Bidirectional(
        stack(gru(I, H, dtype), lstm(H, 3, dtype, **more)), stack(lstm(I, H, dtype, 1, **more), rnn(H, 3, dtype, 1))
    ),
    **{
        f"dense {activation or 'alone'}": lambda I, H, dtype, activation=activation, **_: dense(I, H, dtype, activation)
        for activation in ACTIVATIONS
    },
    "stack with dense": lambda I, H, dtype, **more: stack(
        dense(I, H, dtype, "tanh"),
        Bidirectional(stack(gru(H, H, dtype), dense(H, 3, dtype, "sigmoid")), lstm(H, 3, dtype, **more)),
        dense(6, H, dtype, "relu", 1),
        gru(H, H, dtype, 1),
        dense(H, H, dtype, "softmax", 2),
    ),
}
STREAMED = {
    "LSTM": lambda I, H, dtype: lstm(I, H, dtype, cell_clip=0.5),
    "projected LSTM": lambda I, H, dtype: variant(I, 33, dtype, H),
    "coupled LSTM": lambda I, H, dtype: variant(I, 40, dtype, H, coupled=True),
    "GRU": gru,
    "GRU that resets after": reset_after,
    "RNN": lambda I, H, dtype: rnn(I, H, dtype, activation="softsign"),
    "Dense": lambda I, H, dtype: dense(I, H, dtype, "softmax"),
    "Stack": lambda I, H, dtype: stack(
        dense(I, 7, dtype, "relu"), stack(lstm(7, 33, dtype), gru(33, 20, dtype)), dense(20, H, dtype, "tanh")
    ),
}
"""Layers that can be streams."""
OPTIONS = [
    (cell, name)
    for cell in (LSTM, GRU, RNN)
    for name, parameter in inspect.signature(cell).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]
"""Every argument of a constructor that need not be given, weights among them."""
OPTIONAL_WEIGHTS = {
    **{name: {"use_peephole": True} for name in ("wci", "wcf", "wco")},
    "w_p": {"proj_size": 2},
    "b_hc": {"reset_after": True},
}
"""For each weight that a layer may lack, the arguments of `init` with which it has the weight."""


def with_option(cell, name, dtype=np.float32):
    """A layer of random weights that has another value than the default of one option, and this value."""
    default = inspect.signature(cell).parameters[name].default
    if default is None:
        value, options = None, OPTIONAL_WEIGHTS[name]
    else:
        others = {"icfo": "ifco", "tanh": "softsign", "sigmoid": "hard_sigmoid", "False": True, "0.0": 0.25}
        value = others[str(default)]
        options = {name: value} | ({"proj_size": 2} if name == "proj_clip" else {})
    layer = cell.init(3, 4, seed=1, dtype=dtype, **options)
    g = rng("option", name)
    weights = {key: g.uniform(-1, 1, array.shape).astype(array.dtype) for key, array in layer.weights.items()}
    layer.set_weights(**weights)
    return layer, weights[name] if value is None else value


def reversed_cell(layer):
    """Return an equal cell that runs backwards."""
    return type(layer)(**(layer._arguments() | {"reverse": True}))


IN_ANY_DIRECTION = LAYERS | {
    "reverse lstm": lambda I, H, dtype: reversed_cell(lstm(I, H, dtype)),
    "reverse gru": lambda I, H, dtype: reversed_cell(gru(I, H, dtype)),
    "bidirectional with dense": lambda I, H, dtype: Bidirectional(
        stack(gru(I, H, dtype), dense(H, 3, dtype)), stack(lstm(I, H, dtype), dense(H, 3, dtype))
    ),
}
CELLS = [name for name in LAYERS if name.startswith(("lstm", "gru", "rnn"))]
SINGLE = [name for name in LAYERS if "stack" not in name and "directional" not in name]


def can_stream(layer):
    """Return whether a layer has streams, as no Bidirectional is in it."""
    return not isinstance(layer, Bidirectional) and all(map(can_stream, getattr(layer, "layers", ())))


def halved_weights(layer):
    return {name: array * array.dtype.type(0.5) for name, array in layer.weights.items()}


def outputs_by_weights(layer, weights, calls):
    """Return y of each call, a tuple of arguments, with each of these weights, the last of which the layer keeps."""
    outputs = []
    for arrays in weights:
        layer.set_weights(**arrays)
        outputs.append([layer(*arguments)[0] for arguments in calls])
    return outputs


def draw(layer, T, B, *key):
    """Draw x, state, lengths, reset.  One row has all steps and one none; some resets are at the first or last step."""
    g = rng("layer", T, B, *key)
    x = g.uniform(-1, 1, (T, B, layer.input_size)).astype(layer.dtype)
    state = like(zeros(layer, B), lambda a: g.uniform(-0.7, 0.7, a.shape).astype(layer.dtype))
    lengths = g.integers(0, T + 1, B)
    lengths[: 2 if B > 2 else 1] = [T, 0][: min(B, 2) if B > 2 else 1]
    reset = g.random((T, B)) < 0.3
    reset[0, ::2] = True
    reset[T - 1, ::3] = True
    return x, state, lengths, reset


def run_all(layer, x, state, d_y=None, **options):
    """Run forward and backward; return [y, d_x], the states and their gradients, and the gradients of the weights."""
    y, last, tape = layer.forward(x, state, **options)
    d_y = rng("d_y", y.shape).standard_normal(y.shape).astype(layer.dtype) if d_y is None else d_y
    d_last = like(last, lambda a: rng("d", a.shape).standard_normal(a.shape).astype(layer.dtype))
    d_x, d_state, grads = layer.backward(tape, d_y, d_last)
    return [y, d_x], [*leaves(last), *leaves(d_state)], [*grads.values()]


def drawn_mask(g, T, B):
    """Rows of every kind: any steps, all, none, padded at the left, at the right, at both ends."""
    mask = g.random((T, B)) < g.uniform(0.2, 0.9, B)
    t = np.arange(T)
    for b, kind in enumerate(g.integers(0, 7, B)):
        start, stop = sorted(g.integers(0, T + 1, 2))
        row = {0: t >= 0, 1: t < 0, 2: t >= start, 3: t < stop, 4: (t >= start) & (t < stop)}.get(int(kind), mask[:, b])
        mask[:, b] = row
    return mask
