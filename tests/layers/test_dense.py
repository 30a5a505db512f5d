"""The dense layer: its formulas, the order of its sums, its last steps, and that one bit is the same everywhere.

The tests of all layers (`test_layers.py` and others) have it among their layers, as it is and within stacks.
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import functools
import itertools

import layer_formulas
import mpmath
import numpy as np
import pytest
from bits import leaves, like, on_threads, same
from cases import derivative, rng
from kernel_cases import BOUNDS, DTYPES, LARGE, SIZES
from layer_cases import dense, gru, lstm
from refusals import refusal
from summation import factors, mates, over_rows, powers, product, real_of, sum_in_double

from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack
from blockcell.formulas import error_in_eps, slope
from blockcell.optable import ACTIVATIONS

ALL = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def results(layer, x, d_y, **options):
    """All that forward and backward give."""
    y, state, tape = layer.forward(x, **options)
    d_x, d_state, grads = layer.backward(tape, d_y)
    assert layer(x, **options)[1] == state == d_state == () and same([layer(x, **options)[0]], [y])
    return [y, d_x, *grads.values()]


def draw_arguments(layer, T, B, *key):
    g = rng("dense", T, B, *key)
    x = g.uniform(-1, 1, (T, B, layer.input_size)).astype(layer.dtype)
    return x, g.standard_normal((T, B, layer.output_size)).astype(layer.dtype)


# ------------------------------------------------------------------------------------------------------------ formulas
@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@EVERY_DTYPE
@ALL
def test_formulas(activation, dtype):
    """That of the gradient starts from the layer's own y."""
    for T, B, I, O in [*SIZES, *LARGE]:
        layer = dense(I, O, dtype, activation)
        x, d_y = draw_arguments(layer, T, B)
        weights = layer.weights
        y, *grads = results(layer, x, d_y)
        expected = [
            layer_formulas.dense(x=x, **weights, activation=activation),
            *layer_formulas.dense_grad(x=x, w=weights["w"], y=y, d_y=d_y, activation=activation),
        ]
        if activation == "softmax" and O == 1:
            assert (y == 1).all() and not any(grad.any() for grad in grads)
            continue
        for name, result, exact in zip(("y", "x", "w", "b"), [y, *grads], expected, strict=True):
            assert result.dtype == dtype and result.shape == exact.shape
            error = error_in_eps(result, exact, float(np.finfo(dtype).eps))
            assert error <= BOUNDS[dtype], f"{name} is {error:.2f} eps off at {T, B, I, O}"


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_is_right_to_the_last_digits(dtype):
    """Of two classes, down to subnormal results, at any place in a row of many that are excluded by -inf."""
    info = np.finfo(dtype)
    lowest = -np.log(float(info.tiny)) + (15 if dtype == "float32" else 35)
    z = -np.concatenate([np.linspace(0, lowest, 60), np.geomspace(1e-9, lowest, 40)]).astype(dtype)
    exact = np.array([float(mpmath.exp(v) / (1 + mpmath.exp(v))) for v in map(float, z)])
    ulp = np.spacing(exact.astype(dtype)).astype(float)
    for columns, zero, at in [(2, 0, 1), (40, 37, 2), (17, 0, 16)]:
        layer = Dense(np.zeros((1, columns), dtype), np.zeros(columns, dtype), "softmax")
        b = np.full(columns, -np.inf, dtype)
        b[zero] = 0
        for k, b[at] in enumerate(z):
            layer.set_weights(b=b)
            y = layer(np.zeros((1, 1, 1), dtype))[0][0, 0]
            assert abs(y[at] - exact[k]) <= 4 * ulp[k] and abs(y[zero] - (1 - exact[k])) <= 4 * info.eps
            assert not np.delete(y, [zero, at]).any()


@pytest.mark.usefixtures("level")
@EVERY_DTYPE
def test_softmax_of_the_largest_numbers(dtype):
    """What numpy's formula gives with the largest logit subtracted, infinities and NaN included; its rows are apart."""
    most, inf, nan = float(np.finfo(dtype).max), np.inf, np.nan
    rows = [[most, 0, -most], [most, most, most], [-most, -most, -inf], [inf, 0, 1], [nan, 0, 1], [-inf, -inf, -inf]]
    layer = Dense(np.eye(3, dtype=dtype), np.zeros(3, dtype), "softmax")
    for row in rows:
        b = np.array(row, dtype)
        layer.set_weights(w=np.zeros((3, 3), dtype), b=b)
        with np.errstate(all="ignore"):
            expected = layer_formulas.dense(x=np.zeros(3), **layer.weights, activation="softmax")
        np.testing.assert_allclose(layer(np.zeros((1, 1, 3), dtype))[0][0, 0], expected, rtol=1e-3)


def test_relu_of_nan():
    """It stays, and its gradient is 0, as in TensorFlow, in the formulas and in ONNX; PyTorch's passes it."""
    layer = Dense(np.eye(4, dtype=np.float32), np.array([np.nan, -np.inf, np.inf, -1], np.float32), "relu")
    y, _, tape = layer.forward(np.zeros((1, 1, 4), np.float32))
    np.testing.assert_array_equal(y[0, 0], [np.nan, 0, np.inf, 0])
    d_x = layer.backward(tape, np.ones_like(y))[0]
    np.testing.assert_array_equal(d_x[0, 0], [0, 0, 1, 0])
    cell = RNN(np.zeros((8, 4), np.float32), layer.weights["b"], activation="relu")
    y, _, tape = cell.forward(np.zeros((1, 1, 4), np.float32))
    np.testing.assert_array_equal(cell.backward(tape, np.ones_like(y))[2]["b"], slope(y[0, 0], "relu"))
    np.testing.assert_array_equal(slope(y[0, 0], "relu"), [0, 0, 1, 0])


# -------------------------------------------------------------------------------------------------- order of summation
PATHS = [  # T, B, I, O, threads
    (1, 1, 200, 90, 1),  # one row
    (1, 5, 200, 300, 3),  # threads share the panels
    (1, 20, 130, 90, 2),  # or the rows
    (3, 200, 70, 170, 2),  # and in backward the inputs
    (2, 300, 6, 300, 3),  # or the outputs
]


@pytest.mark.parametrize("path", PATHS, ids=str)
@EVERY_DTYPE
def test_order(dtype, path, level):
    """As promised: data as in test_order.py, and the same sums."""
    T, B, I, O, threads = path
    g = np.random.default_rng([T, B, I, O])
    inputs, outputs, (row, sign, single) = mates(g, I), mates(g, O), mates(g, B)
    layer = Dense(factors(g, O, *inputs, dtype).astype(dtype), g.uniform(-1, 1, O).astype(dtype))
    x = g.uniform(-1, 1, (T, B, I))[..., inputs[0]].astype(dtype)
    a = {name: array.astype(real_of(x.dtype)) for name, array in {"x": x, **layer.weights}.items()}
    with on_threads(threads), np.errstate(over="ignore"):
        y = layer(x)[0]
        expected = product(a["b"], a["x"].reshape(T * B, I), a["w"]).astype(dtype)
        assert same([y.reshape(T * B, O)], [expected])

    w = factors(g, I, *outputs, dtype).T.astype(dtype)
    layer = Dense(w, np.zeros(O, dtype))
    x = powers(g, (T, B, I), -3, 1)[:, row].astype(dtype)
    exponents = g.integers(0, 12 if dtype == "float16" else 42, (B, 1))
    exponents[single] = 0
    d_y = (g.uniform(-1, 1, (T, B, O))[:, row][..., outputs[0]] * sign[:, None] * 2.0 ** exponents[row]).astype(dtype)
    with on_threads(threads), np.errstate(over="ignore"):
        d_x, _, grads = layer.backward(layer.forward(x)[2], d_y)
        x, d, w = (array.astype(real_of(x.dtype)) for array in (x.reshape(T * B, I), d_y.reshape(T * B, O), w))
        expected = product(0, d, w.T), over_rows(lambda r: x[r, :, None] * d[r], len(d)), sum_in_double(d)
        gradients = d_x.reshape(T * B, I), grads["w"], grads["b"]
        assert same(gradients, [np.asarray(part).astype(dtype, order="C") for part in expected])


# ---------------------------------------------------------------------------------------------------------- last steps
def last_rows(array, row_ends):
    """The rows of [T,B,.] at each row's last step; zeros for a row without steps."""
    at_ends = array[row_ends - 1, np.arange(len(row_ends))] if len(array) else 0
    return np.where((row_ends > 0)[:, None], at_ends, np.zeros(array.shape[1:], array.dtype))


@pytest.mark.usefixtures("level")
@EVERY_DTYPE
@pytest.mark.parametrize("case", range(4))
def test_last(case, dtype, seed):
    """Results and gradients have the bits of the layer without `last` on the last steps alone, which are a single step
    of zeros for a row without steps."""
    g = np.random.default_rng([seed, case])
    for activation in ACTIVATIONS:
        T, B, I, O = (int(g.choice(sizes)) for sizes in ([1, 2, 5], [1, 3, 40], [1, 33, 130], [2, 10, 70]))
        layer = dense(I, O, dtype, activation, last=True)
        plain = dense(I, O, dtype, activation)
        x, d_y = draw_arguments(layer, T, B, case)
        lengths = g.integers(0, T + 1, B) if case % 2 else None
        row_ends = np.full(B, T) if lengths is None else lengths
        x[np.arange(T)[:, None] >= row_ends] = np.nan
        with on_threads(int(g.integers(1, 5))):
            y, d_x, *grads = results(layer, x, d_y[0], lengths=lengths)
            (expected,), (d_rows,), *expected_grads = results(plain, last_rows(x, row_ends)[None], d_y[:1])
            assert y.shape == (B, O) and same(y, expected)
            assert same(y[row_ends > 0], last_rows(plain(x, lengths=lengths)[0], row_ends)[row_ends > 0])
            assert same(grads, expected_grads)
            at = np.arange(T)[:, None] == row_ends - 1
            assert same(d_x, np.where(at[..., None], d_rows, 0).astype(dtype))
            none = layer.backward(layer.forward(x, lengths=lengths)[2], None)
            assert not any(array.any() for array in (none[0], *none[2].values()))


WITHOUT_STEPS = {
    "lengths": lambda T, steps: {"lengths": T * steps},
    "mask": lambda T, steps: {"mask": np.broadcast_to(steps, (T, 5))},
    "repeat": lambda T, steps: {"mask": np.broadcast_to(steps, (T, 5)), "masked": "repeat"},
}


def below(kind, dtype):
    """Layers of 6 outputs, and which of these are of a backward direction."""
    return {
        "forwards": (lstm(3, 6, dtype), np.zeros(6, bool)),
        "backwards": (GRU(**gru(3, 6, dtype).weights, reverse=True), np.ones(6, bool)),
        "both": (Bidirectional(lstm(3, 3, dtype), gru(3, 3, dtype)), np.arange(6) >= 3),
        "nested": (
            Bidirectional(
                Stack([dense(3, 2, dtype), gru(2, 3, dtype)]),
                Stack([Bidirectional(gru(3, 2, dtype), gru(3, 2, dtype, 1)), gru(4, 3, dtype)]),
            ),
            np.arange(6) >= 3,
        ),
        "backwards twice": (
            Bidirectional(
                Bidirectional(gru(3, 2, dtype), gru(3, 2, dtype, 1)), Bidirectional(gru(3, 2, dtype), lstm(3, 2, dtype))
            ),
            np.array([0, 0, 1, 1, 1, 1, 0, 0], bool),
        ),
    }[kind]


HEADS = {  # of several layers, for x of 3 numbers
    "two": lambda d: [gru(3, 4, d), dense(4, 5, d, "relu"), dense(5, 2, d, last=True)],
    "nested": lambda d: [
        lstm(3, 4, d),
        Stack([dense(4, 3, d, "tanh"), Stack([dense(3, 5, d, "softmax"), dense(5, 2, d, "sigmoid", last=True)])]),
    ],
    "both": lambda d: [
        Bidirectional(*(Stack([gru(3, 4, d, seed), dense(4, 2, d, "relu", seed)]) for seed in (1, 2))),
        dense(4, 2, d, last=True),
    ],
    "beside a cell": lambda d: [
        dense(3, 3, d, "tanh"),
        Bidirectional(dense(3, 2, d, "relu"), gru(3, 2, d)),
        dense(4, 2, d, last=True),
    ],
    "no cells": lambda d: [dense(3, 4, d, "sigmoid"), dense(4, 2, d, last=True)],
    "below a cell": lambda d: [dense(3, 4, d, "relu"), lstm(4, 3, d), dense(3, 2, d, "tanh", last=True)],
}
ENDS = {
    f"{kind}, {activation}": lambda d, kind=kind, activation=activation: [
        below(kind, d)[0],
        dense(6, 2, d, activation, last="ends"),
    ]
    for kind, activation in zip(itertools.cycle(("forwards", "backwards", "both", "nested")), ACTIVATIONS, strict=False)
}


def of_no_steps(layer, row):
    """By the formulas, what a layer makes of a row without steps, where the layers below make this of it."""
    if isinstance(layer, Stack):
        return functools.reduce(lambda row, part: of_no_steps(part, row), layer.layers, row)
    if isinstance(layer, Bidirectional):
        return np.concatenate([of_no_steps(layer.fw, row), of_no_steps(layer.bw, row)])
    if isinstance(layer, Dense):
        return layer_formulas.dense(x=row, **layer.weights, activation=layer.activation)
    return np.zeros(layer.output_size)


@EVERY_DTYPE
@pytest.mark.parametrize("head", HEADS | ENDS)
def test_rows_without_steps(head, dtype):
    """As in Keras and ONNX, cells give zeros, whatever the state, which stays; and every dense layer above them takes
    part, forward and backward. Also where no row has a step, or x has none."""
    net, g = Stack((HEADS | ENDS)[head](dtype)), rng("several", head)
    state = like(net(np.ones((1, 5, 3), dtype))[1], lambda a: g.uniform(-1, 1, a.shape).astype(dtype))
    x, d_y = g.uniform(-1, 1, (4, 5, 3)).astype(dtype), g.standard_normal((5, 2)).astype(dtype)
    some, none = np.array([True, False, True, True, False]), np.zeros(5, bool)
    for form, (T, steps) in itertools.product(WITHOUT_STEPS.values(), [(4, some), (4, none), (0, none)]):
        x_read, options = np.where(steps[:, None], x, np.nan).astype(dtype)[:T], form(T, steps)
        y, last, tape = net.forward(x_read, state, **options)
        assert same((y, last), net(x_read, state, **options))
        first = like(state, lambda a, steps=steps: a[steps])
        assert same((y[steps], like(last, lambda a, steps=steps: a[steps])), net(x[:T, steps], first))
        exact = of_no_steps(net, np.zeros(3))
        assert all(error_in_eps(row, exact, float(np.finfo(dtype).eps)) <= BOUNDS[dtype] for row in y[~steps])
        d_x, d_state, grads = net.backward(tape, d_y, last)
        assert not d_x[:, ~steps].any() and d_x[:, steps].any() == steps.any()
        for a, b in [(state, last), (last, d_state)]:
            assert same([part[~steps] for part in leaves(a)], [part[~steps] for part in leaves(b)])
        for name, weight in net.weights.items() if dtype == "float64" else ():
            direction = rng("direction", name).standard_normal(weight.shape)

            def loss(value, name=name, x=x_read, options=options, last=last):
                changed = copy.copy(net)
                changed.set_weights(**{name: value})
                y, end = changed(x, state, **options)
                return (y * d_y).sum() + sum((a * d).sum() for a, d in zip(leaves(end), leaves(last), strict=True))

            expected = derivative(loss, weight, direction)
            assert (grads[name] * direction).sum() == pytest.approx(expected, rel=1e-8, abs=1e-9), name


@pytest.mark.parametrize("scheme", ["float16", "int8"])
@pytest.mark.parametrize("head", ["two", "no cells", "below a cell"])
def test_rows_without_steps_of_quantized_layers(head, scheme):
    """They have the bits of the dense layers one after the other."""
    net = Stack(HEADS[head]("float32"))
    x, lengths = rng("quantized", head).uniform(-1, 1, (4, 5, 3)).astype(np.float32), np.array([4, 0, 3, 1, 0])
    row = np.zeros((1, 1, {"below a cell": 3, "two": 4}.get(head, 3)), np.float32)
    for layer in net.layers[{"two": 1, "no cells": 0, "below a cell": 2}[head] :]:
        row = Dense(**layer.weights, activation=layer.activation).quantize(scheme)(row)[0]
    y = net.quantize(scheme)(x, lengths=lengths)[0]
    assert same(y[lengths == 0], np.repeat(row[0], 2, axis=0))
    assert same(y[lengths > 0], net.quantize(scheme)(x[:, lengths > 0], lengths=lengths[lengths > 0])[0])


@EVERY_DTYPE
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", ["forwards", "backwards", "both", "nested", "backwards twice"])
def test_ends(kind, ragged, dtype):
    """Each direction's own last output: that of a backward one stands at the first step."""
    T, B = 5, 6
    layer, backwards = below(kind, dtype)
    head = dense(len(backwards), 4, dtype, "tanh")
    net = Stack([layer, Dense(*head.weights.values(), "tanh", last="ends")])
    x = rng("ends", kind).uniform(-1, 1, (T, B, 3)).astype(dtype)
    lengths = np.array([5, 0, 1, 3, 5, 2]) if ragged else None
    row_ends = np.full(B, T) if lengths is None else lengths
    h, state, tape = layer.forward(x, lengths=lengths)
    rows = np.where(backwards, h[0], last_rows(h, row_ends))
    y, states, net_tape = net.forward(x, lengths=lengths)
    assert same((y, states), (head(rows[None])[0][0], (state, ())))
    assert same(net(x, lengths=lengths), (y, states))
    if not ragged:  # which is all that Keras takes into account: the last states of both directions
        assert same(rows, np.concatenate([part[-1] for part in states_of(layer, state)], axis=1))

    d_y = rng("d_y").standard_normal((B, 4)).astype(dtype)
    d_x, d_state, grads = net.backward(net_tape, d_y)
    _, d_rows, *expected = results(head, rows[None], d_y[None])
    d_h = np.zeros_like(h)
    for b in range(B):
        if row_ends[b]:
            d_h[row_ends[b] - 1, b, ~backwards] = d_rows[0, b, ~backwards]
            d_h[0, b, backwards] = d_rows[0, b, backwards]
    expected_gradients = layer.backward(tape, d_h)
    assert same((d_x, d_state[0]), expected_gradients[:2])
    assert same(list(grads.values()), [*expected_gradients[2].values(), *expected])


def states_of(layer, state):
    """The states at the end, of the layers whose outputs y is, in its order."""
    if isinstance(layer, Bidirectional):
        return states_of(layer.fw, state[0]) + states_of(layer.bw, state[1])
    return states_of(layer.layers[-1], state[-1]) if isinstance(layer, Stack) else [leaves(state)]


@EVERY_DTYPE
@pytest.mark.parametrize("head", HEADS)
def test_a_part_of_a_stack_that_is_called_alone(head, dtype):
    """A part gives what an equal layer of its own gives: its dense layers compute no step past the end of a row."""
    T, lengths = 4, [4, 0, 2]
    for number, part in enumerate(Stack(HEADS[head](dtype)).layers):
        g, own_layer = rng("part", head, number), copy.copy(part)
        x = g.uniform(-1, 1, (T, 3, part.input_size)).astype(dtype)
        y, last, tape = part.forward(x, lengths=lengths)
        expected_y, expected_last, expected_tape = own_layer.forward(x, lengths=lengths)
        assert same((y, last), (expected_y, expected_last)) and same(part(x, lengths=lengths), (y, last))
        d_y = g.standard_normal(y.shape).astype(dtype)
        assert same(part.backward(tape, d_y), own_layer.backward(expected_tape, d_y))
        assert y.ndim == 2 or not (y[:, 1].any() or y[2:, 2].any())


@pytest.mark.parametrize("T, B, I, O", [(0, 2, 3, 4), (3, 0, 3, 4), (3, 2, 0, 4), (3, 2, 3, 0), (0, 0, 0, 0)])
@EVERY_DTYPE
@pytest.mark.parametrize("last", [False, True])
def test_sizes_of_zero(last, dtype, T, B, I, O):
    for activation in ACTIVATIONS:
        layer = dense(I, O, dtype, activation, last=last)
        x = np.ones((T, B, I), dtype)
        y, state, tape = layer.forward(x, lengths=[T] * B)
        assert y.shape == ((B, O) if last else (T, B, O)) and same((y, state), layer(x))
        if (last and not T) or not I:
            expected = layer_formulas.dense(x=np.zeros((*y.shape[:-1], I)), **layer.weights, activation=activation)
            np.testing.assert_allclose(y, expected, rtol=2e-3)
        d_x, _, grads = layer.backward(tape, np.ones_like(y))
        assert d_x.shape == x.shape and [g.shape for g in grads.values()] == [(I, O), (O,)]
        assert (T and B) or not grads["w"].any()
        assert y.size or not grads["b"].any()


# ------------------------------------------------------------------------------------------------ the layer as a whole
def test_repr_and_attributes():
    layer = Dense.init(3, 4, seed=0, activation="softmax", last="ends")
    assert repr(layer) == "Dense(input_size=3, output_size=4, dtype=float32, activation='softmax', last='ends')"
    assert (layer.input_size, layer.hidden_size, layer.output_size, layer.dtype) == (3, 4, 4, np.float32)
    assert (layer.activation, layer.last) == ("softmax", "ends")
    assert repr(Dense.init(3, 4, seed=0)) == "Dense(input_size=3, output_size=4, dtype=float32)"
    assert "last=True" in repr(Dense.init(3, 4, seed=0, last=True)) and not Dense.init(3, 4).last


def test_init():
    layer = Dense.init(30, 50, seed=3, dtype=np.float64)
    w, bound = layer.weights["w"], np.sqrt(6 / 80)
    assert w.shape == (30, 50) and 0.99 * bound < np.abs(w).max() <= bound and abs(w.mean()) < 0.05 * bound
    assert not layer.weights["b"].any()
    assert same([w], [Dense.init(30, 50, seed=np.random.default_rng(3), dtype=np.float64).weights["w"]])
    assert not np.array_equal(*(Dense.init(3, 4).weights["w"] for _ in range(2)))
    with refusal("ValueError: input_size is -1; expected at least 0", "Dense.init"):
        Dense.init(-1, 3, seed=0)
    with refusal("TypeError: Dense.init: output_size"):
        Dense.init(3, 2.5, seed=0)


W, B = np.ones((3, 4), np.float32), np.ones(4, np.float32)
LOWER = LSTM.init(2, 3, seed=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Dense(8, 16),
            "ValueError: Dense: w has shape (); expected (I, O), rank 2; Dense.init makes new weights of given sizes",
        ),
        (lambda: Dense(W, None), "TypeError: Dense: b is None; expected an array of shape (O,)"),
        (lambda: Dense(W[0], B), "ValueError: Dense: w has shape (4,); expected (I, O), rank 2"),
        (lambda: Dense(W, B[1:]), "ValueError: Dense: b has shape (3,); expected (O,) = (4,) with I=3, O=4"),
        (lambda: Dense(W, B.astype(float)), "TypeError: Dense: b has dtype float64; expected float32"),
        (lambda: Dense(W, B, "gelu"), "ValueError: Dense: activation is 'gelu'; expected one of None, 'sigmoid'"),
        (lambda: Dense(W, B, np.tanh), "TypeError: Dense: activation is of type ufunc; expected one of None,"),
        (lambda: Dense(W, B, last="first"), "ValueError: Dense: last is 'first'; expected True, False or 'ends'"),
        (lambda: Dense(W, B, last=1), "TypeError: Dense: last is 1; expected"),
        (
            lambda: Stack([Dense(W, B, last=True), Dense.init(4, 2)]),
            "ValueError: Stack: layer 0 gives only the last step; expected all steps, but for the last layer",
        ),
        (
            lambda: Stack([Stack([LOWER, Dense(W, B, last=True)]), Dense.init(4, 2)]),
            "ValueError: Stack: layer 0 gives only the last step",
        ),
        (
            lambda: Bidirectional(Stack([LOWER, Dense(W, B, last=True)]), LSTM.init(2, 4)),
            "ValueError: Bidirectional: fw gives only the last step; expected all of them: put the Dense above, in a"
            " Stack",
        ),
        (lambda: Stack([Dense(W, B, last="ends")]), "ValueError: Stack: 0 has last='ends'; expected a layer below it"),
        (
            lambda: Stack([Dense.init(2, 3), Dense(W, B, last="ends")]),
            "ValueError: Stack: last='ends' above a Dense, whose outputs have no direction",
        ),
        (
            lambda: Dense(W, B, last="ends")(np.ones((2, 1, 3), np.float32)),
            "TypeError: Dense: last is 'ends', but there is no layer below; expected a Stack with both",
        ),
        (lambda: Dense(W, B, last="ends").stream(), "TypeError: Dense: last is 'ends', but there is no layer below"),
        (
            lambda: Stack([LSTM.init(2, 3, reverse=True), Dense(W, B, last="ends")]).layers[1].stream(),
            "TypeError: Dense.stream: a direction of the layer below begins at the last step",
        ),
        (
            lambda: Dense(W, B)(np.ones((2, 1, 3), np.float32), (1,)),
            "ValueError: Dense: state has 1 parts; expected ()",
        ),
        (lambda: Dense(W, B)(np.ones((2, 1, 3), np.float32), 1), "TypeError: Dense: state is 1; expected () or None"),
        (lambda: Dense(W, B)(np.ones((2, 3), np.float32)), "ValueError: Dense: x has shape (2, 3); expected (T, B, I)"),
    ],
)
def test_refused(make, said):
    with refusal(said):
        make()


def test_backward_refuses_other_shapes():
    layer = Dense(W, B, last=True)
    tape = layer.forward(np.ones((5, 2, 3), np.float32))[2]
    with refusal("ValueError: Dense: d_y has shape (5, 2, 4); expected (2, 4), that of y"):
        layer.backward(tape, np.ones((5, 2, 4), np.float32))
