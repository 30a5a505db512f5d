"""Layers against the ops bit for bit, against a loop over rows and steps in float64, and against differences."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pickle
import re
import tracemalloc
import typing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import arguments, rng
from fresh import printed
from test_formulas import _derivative
from test_kernels import BOUNDS, DTYPES, SIZES, run, same_bits, sizes_of

import blockcell
from blockcell import GRU, LSTM, Bidirectional, GRUState, LSTMState, Stack
from blockcell.formulas import FORMULAS
from blockcell.optable import OPS

ATTRIBUTES = {"forget_bias": 0.5, "cell_clip": 0.75}


def op_at(name, level):
    """An op on the kernels of a CPU level."""
    return lambda **args: run(name, {tensor.name: None for tensor in OPS[name].inputs} | args, level)


@pytest.fixture
def threads():
    yield blockcell.set_num_threads
    blockcell.set_num_threads(None)


# ----------------------------------------------------------------------------------------------------------- test data
def lstm(inputs, hidden, dtype, seed=0, peephole=True, **attributes):
    args = arguments("BlockLSTM", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    names = ["w", "b"] + ["wci", "wcf", "wco"] * peephole
    return LSTM(**{name: args[name] for name in names}, **attributes)


def gru(inputs, hidden, dtype, seed=0):
    args = arguments("block_gru", sizes_of(1, 1, inputs, hidden), seed=seed, dtype=dtype)
    return GRU(**{name: args[name] for name in ("w_ru", "w_c", "b_ru", "b_c")})


LAYERS = {
    "lstm": lambda I, H, dtype, **more: lstm(I, H, dtype, **more),
    "lstm without peepholes": lambda I, H, dtype, **more: lstm(I, H, dtype, peephole=False, **more),
    "lstm ifco": lambda I, H, dtype, **more: lstm(I, H, dtype, gate_order="ifco", **more),
    "gru": lambda I, H, dtype, **_: gru(I, H, dtype),
    "bidirectional lstm": lambda I, H, dtype, **more: Bidirectional(
        lstm(I, H, dtype, **more), lstm(I, H, dtype, 1, **more)
    ),
    "bidirectional gru": lambda I, H, dtype, **_: Bidirectional(gru(I, H, dtype), gru(I, H, dtype, 1)),
    "stack": lambda I, H, dtype, **more: Stack(
        [
            lstm(I, H, dtype, **more),
            Bidirectional(gru(H, H + 1, dtype), lstm(H, H + 1, dtype, 1, **more)),
            gru(2 * H + 2, H, dtype, 2),
        ]
    ),
    "bidirectional stack": lambda I, H, dtype, **more: Bidirectional(
        Stack([gru(I, H, dtype), lstm(H, 3, dtype, **more)]), Stack([lstm(I, H, dtype, 1, **more), gru(H, 3, dtype, 1)])
    ),
}
CELLS = [name for name in LAYERS if "directional" not in name and name != "stack"]


def leaves(nested):
    """The arrays of a state."""
    return [nested] if isinstance(nested, np.ndarray) else [array for part in nested for array in leaves(part)]


def like(state, function):
    """A state of the same form."""
    if isinstance(state, np.ndarray):
        return function(state)
    parts = [like(part, function) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def draw(layer, T, B, *key):
    """x, state, lengths and reset. One row has all steps, one none, and some episodes start at the ends of rows."""
    g = rng("layer", T, B, *key)
    x = g.uniform(-1, 1, (T, B, layer.input_size)).astype(layer.dtype)
    _, zeros = layer(np.empty((0, B, layer.input_size), layer.dtype))
    state = like(zeros, lambda a: g.uniform(-0.7, 0.7, a.shape).astype(layer.dtype))
    lengths = g.integers(0, T + 1, B)
    lengths[: 2 if B > 2 else 1] = [T, 0][: min(B, 2) if B > 2 else 1]
    reset = g.random((T, B)) < 0.3
    reset[0, ::2] = True
    reset[T - 1, ::3] = True
    return x, state, lengths, reset


# --------------------------------------------------------------------------------------- the same in the plainest way
def loop(layer, x, state, lengths, reset, reverse=False):
    """A layer as its documentation says, row by row and step by step, in float64; states rounded to the dtype."""
    if isinstance(layer, Stack):
        last = []
        for part, first in zip(layer.layers, state, strict=True):
            x, final = loop(part, x, first, lengths, reset, reverse)
            last.append(final)
        return x, tuple(last)
    if isinstance(layer, Bidirectional):
        fw, last_fw = loop(layer.fw, x, state[0], lengths, reset, reverse)
        bw, last_bw = loop(layer.bw, x, state[1], lengths, reset, not reverse)
        return np.concatenate([fw, bw], axis=2), (last_fw, last_bw)

    T, B, _ = x.shape
    y = np.zeros((T, B, layer.hidden_size))
    last = like(state, lambda a: a.astype(np.float64))
    for b in range(B):
        now = [part[b : b + 1] for part in last]
        steps = range(lengths[b])
        for t in reversed(steps) if reverse else steps:
            begins = t + 1 < lengths[b] and reset[t + 1, b] if reverse else reset[t, b]
            if begins:
                now = [np.zeros_like(part) for part in now]
            now = [rounded(part, layer.dtype) for part in step(layer, x[t, b : b + 1], now)]
            y[t, b] = now[-1][0]
        for part, value in zip(last, now, strict=True):
            part[b] = value[0]
    return y, last


def rounded(value, dtype):
    return value.astype(dtype).astype(np.float64) if dtype == np.float16 else value


def step(layer, x, state):
    if isinstance(layer, GRU):
        return [FORMULAS["GRUBlockCell"](x=x, h_prev=state[0], **layer.weights).h]
    weights = layer.weights
    if layer.gate_order == "ifco":
        for name in ("w", "b"):
            i, f, ci, o = np.split(weights[name], 4, axis=-1)
            weights[name] = np.concatenate([i, ci, f, o], axis=-1)
    unused = {name: None for name in ("wci", "wcf", "wco") if name not in weights}
    attributes = {"forget_bias": layer.forget_bias, "cell_clip": layer.cell_clip, "use_peephole": not unused}
    result = FORMULAS["LSTMBlockCell"](
        x=x, cs_prev=state[0], h_prev=state[1], **weights, **dict.fromkeys(unused, np.zeros(1)), **attributes
    )
    return [result.cs, result.h]


def check(result, expected, bound, what):
    """The error in eps of the largest entry."""
    assert result.shape == expected.shape, what
    scale = np.abs(expected).max(initial=0)
    error = np.abs(result.astype(np.float64) - expected).max(initial=0)
    assert error <= bound * np.finfo(result.dtype).eps * scale, (
        f"{what}: {error / np.finfo(result.dtype).eps / scale} eps"
    )


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("given", ["", "lengths", "reset", "lengths reset", "state", "state lengths reset"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_values(name, dtype, given):
    for T, B, I, H in [(1, 1, 1, 1), (7, 5, 3, 4), (5, 20, 9, 17)]:
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES)
        x, state, lengths, reset = draw(layer, T, B, name)
        values = {"state": state, "lengths": lengths, "reset": reset}
        plain = like(state, np.zeros_like), np.full(B, T), np.zeros((T, B), bool)
        everything = dict(zip(values, plain, strict=True)) | {key: values[key] for key in given.split()}
        expected, expected_last = loop(layer, x, **everything)
        # In float16, rounding a state differs where a float32 lies beside the middle of two halves: an error of 1 eps
        # of that entry, which later steps and layers take on.
        bound = BOUNDS[dtype] * (2 if dtype == "float16" else 1)
        y, last, _ = layer.forward(x, **{key: values[key] for key in given.split()})
        check(y, expected, bound, f"y at {T, B, I, H}")
        for got, wanted in zip(leaves(last), leaves(expected_last), strict=True):
            check(got, wanted, bound, f"state at {T, B, I, H}")
        y2, last2 = layer(x, **{key: values[key] for key in given.split()})
        assert same_bits([y, *leaves(last)], [y2, *leaves(last2)])


# --------------------------------------------------------------------------------------------- bits of the raw ops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CELLS)
def test_bits_of_the_ops(name, dtype, level):
    """Forward and backward, both at the same level."""
    for k, (T, B, I, H) in enumerate(SIZES):
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES if "ifco" not in name else {})
        x, state, _, _ = draw(layer, T, B, name)
        args = {"seq_len_max": T, "x": x, **layer.weights}
        g = rng("gradients", k)
        if isinstance(layer, LSTM):
            use = {"use_peephole": name != "lstm without peepholes"}
            names = ("BlockLSTMV2", "BlockLSTMGradV2") if layer.gate_order == "ifco" else ("BlockLSTM", "BlockLSTMGrad")
            args |= {"cs_prev": state.cs, "h_prev": state.h}
            more = {"cell_clip": layer.cell_clip} | ({"forget_bias": layer.forget_bias} if "ifco" not in name else {})
        else:
            use, more, names = {}, {}, ("block_gru", "block_gru_grad")
            args["h_prev"] = state.h
        op, grad = (op_at(name, level) for name in names)
        states = op(**args, **use, **more)
        y, last = layer(x, state)
        assert same_bits([y, *last], [states.h, *([states.cs[-1]] if "cs" in args or use else []), states.h[-1]])
        y, last, tape = layer.forward(x, state)
        assert same_bits([*tape.content.saved, y], states)

        d_y = g.standard_normal(y.shape).astype(dtype)
        d_last = like(last, lambda a, g=g: g.standard_normal(a.shape).astype(dtype))
        d_y[-1] = 0  # so that the op's gradient to the last step is that to the final state
        incoming = {"h_grad": d_y.copy()}
        incoming["h_grad"][-1] = d_last.h
        if use:
            incoming["cs_grad"] = np.zeros_like(d_y)
            incoming["cs_grad"][-1] = d_last.cs
        d_x, d_state, grads = layer.backward(tape, d_y, d_last)
        expected = grad(**args, **states._asdict(), **incoming, **use)._asdict()
        results = {"x": d_x, **{f"{key}_prev": value for key, value in d_state._asdict().items()}, **grads}
        for key, value in results.items():
            np.testing.assert_array_equal(value, expected[f"{key}_grad"], err_msg=f"{key} at {T, B, I, H}")


# ----------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("given", ["", "lengths", "reset", "lengths reset"])
@pytest.mark.parametrize("name", LAYERS)
def test_backward_is_the_derivative(name, given):
    """Fourth-order central differences in float64, along random directions in every argument and weight."""
    T, B, I, H = 6, 5, 3, 4
    layer = LAYERS[name](I, H, np.float64)
    x, state, lengths, reset = draw(layer, T, B, name)
    options = {key: {"lengths": lengths, "reset": reset}[key] for key in given.split()}
    g = rng("directions", name, given)
    y, last, tape = layer.forward(x, state, **options)
    d_y = g.standard_normal(y.shape)
    d_last = like(last, lambda a: g.standard_normal(a.shape))
    d_x, d_state, grads = layer.backward(tape, d_y, d_last)
    assert grads.keys() == layer.weights.keys()

    def loss(x, state, weights):
        changed = copy.copy(layer)
        changed.set_weights(**weights)
        y, last = changed(x, state, **options)
        return (y * d_y).sum() + sum((a * d).sum() for a, d in zip(leaves(last), leaves(d_last), strict=True))

    def compare(gradient, direction, function, at, what):
        expected = _derivative(function, at, direction)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-8, abs=1e-9), what

    for t, b in itertools.product(range(T), range(B)):  # every row of x, so that no mark is missed
        direction = np.zeros_like(x)
        direction[t, b] = g.standard_normal(I)
        compare(d_x, direction, lambda value: loss(value, state, {}), x, f"x[{t}, {b}]")
    for key, weight in layer.weights.items():
        direction = g.standard_normal(weight.shape)
        compare(grads[key], direction, lambda value, key=key: loss(x, state, {key: value}), weight, key)
    for k, (gradient, part) in enumerate(zip(leaves(d_state), leaves(state), strict=True)):
        for b in range(B):
            direction = np.zeros_like(part)
            direction[b] = g.standard_normal(part.shape[1])

            def changed(value, k=k):
                parts = iter(range(1000))
                return loss(x, like(state, lambda a: value if next(parts) == k else a), {})

            compare(gradient, direction, changed, part, f"part {k} of the state, row {b}")


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_backward_of_the_smaller_dtypes(name, dtype):
    """Against float64's, from the same saved states."""
    for T, B, I, H in [(1, 1, 1, 1), (7, 5, 3, 4), (4, 70, 20, 33)]:
        if name not in CELLS and T == 1:
            continue  # a sum of two gradients that cancel, and no larger entry beside it
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES)
        wide = LAYERS[name](I, H, np.float64, **ATTRIBUTES)
        wide.set_weights(**{key: value.astype(np.float64) for key, value in layer.weights.items()})
        x, state, lengths, reset = draw(layer, T, B, name)
        y, last, tape = layer.forward(x, state, lengths=lengths, reset=reset)
        g = rng("gradients", name)
        d_y = g.standard_normal(y.shape).astype(dtype)
        d_last = like(last, lambda a, g=g: g.standard_normal(a.shape).astype(dtype))
        results = layer.backward(tape, d_y, d_last)
        wide_tape = dataclasses.replace(tape, layer=wide, content=widened(tape.content))
        expected = wide.backward(wide_tape, d_y.astype(np.float64), like(d_last, lambda a: a.astype(np.float64)))
        # In float16 what one layer hands to another is rounded once more.
        bound = BOUNDS[dtype] * (2 if dtype == "float16" and name not in CELLS else 1)
        check(results[0], expected[0], bound, "d_x")
        for got, wanted in zip(leaves(results[1]), leaves(expected[1]), strict=True):
            check(got, wanted, bound, "d_state")
        for key, value in results[2].items():
            check(value, expected[2][key], bound, key)


def widened(content):
    if isinstance(content, np.ndarray):
        return content.astype(np.float64) if content.dtype.kind == "f" else content
    if isinstance(content, dict):
        return {key: widened(value) for key, value in content.items()}
    if hasattr(content, "_fields"):
        return type(content)(*map(widened, content))
    return [widened(part) for part in content] if isinstance(content, (list, tuple)) else content


def test_final_gradient_alone():
    """No d_y is a d_y of zeros, and parts of a state may be missing."""
    layer = LAYERS["stack"](3, 4, np.float64)
    x, state, lengths, reset = draw(layer, 5, 4)
    y, last, tape = layer.forward(x, (state[0], None, (None,)), lengths=lengths, reset=reset)
    zeros = like(state, np.zeros_like)
    expected = layer.forward(x, (state[0], *zeros[1:]), lengths=lengths, reset=reset)
    assert same_bits([y, *leaves(last)], [expected[0], *leaves(expected[1])])
    d_last = (LSTMState(None, last[0].h), None, last[2])
    whole = (LSTMState(np.zeros_like(last[0].cs), last[0].h), zeros[1], last[2])
    got, wanted = layer.backward(tape, None, d_last), layer.backward(tape, np.zeros_like(y), whole)
    assert same_bits([got[0], *leaves(got[1]), *got[2].values()], [wanted[0], *leaves(wanted[1]), *wanted[2].values()])


def test_truncated_backpropagation_sees_its_own_steps():
    """Two halves with carried state: the forward is that of the whole, and the gradients add up to the whole's when
    the second half's gradient to its initial state is the first half's to its final one."""
    layer = LAYERS["lstm"](3, 4, np.float64)
    x, state, _, reset = draw(layer, 8, 4)
    d_y = rng("tbptt").standard_normal((8, 4, 4))
    y, last, tape = layer.forward(x, state, reset=reset)
    d_x, d_state, grads = layer.backward(tape, d_y)
    y1, middle, tape1 = layer.forward(x[:5], state, reset=reset[:5])
    y2, last2, tape2 = layer.forward(x[5:], middle, reset=reset[5:])
    assert same_bits([y, *last], [np.concatenate([y1, y2]), *last2])
    d_x2, d_middle, grads2 = layer.backward(tape2, d_y[5:])
    d_x1, d_state1, grads1 = layer.backward(tape1, d_y[:5], d_middle)
    np.testing.assert_allclose(np.concatenate([d_x1, d_x2]), d_x, rtol=0, atol=1e-14)
    for part, whole in zip(d_state1, d_state, strict=True):
        np.testing.assert_allclose(part, whole, rtol=0, atol=1e-14)
    for key in grads:
        np.testing.assert_allclose(grads1[key] + grads2[key], grads[key], rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------------------------- rows, padding, bits
def run_all(layer, x, state, d_y=None, **options):
    """All per-row results, and the gradients of the weights."""
    y, last, tape = layer.forward(x, state, **options)
    d_y = rng("d_y", y.shape).standard_normal(y.shape).astype(layer.dtype) if d_y is None else d_y
    d_last = like(last, lambda a: rng("d", a.shape).standard_normal(a.shape).astype(layer.dtype))
    d_x, d_state, grads = layer.backward(tape, d_y, d_last)
    return [y, d_x], [*leaves(last), *leaves(d_state)], [*grads.values()]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_threads_do_not_matter(name, dtype, threads):
    for T, B, I, H in [(3, 2, 40, 300), (6, 40, 30, 100), (4, 130, 64, 64), (1, 20, 70, 130)]:
        layer = LAYERS[name](I, H, DTYPES[dtype])
        x, state, lengths, reset = draw(layer, T, B, name)
        for options in ({}, {"lengths": lengths, "reset": reset}):
            found = []
            for count in (1, 2, 3):
                threads(count)
                found.append(list(itertools.chain(*run_all(layer, x, state, **options))))
            assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_order_of_rows_does_not_matter(name, dtype):
    """Sorted by length or not, a row's results have the same bits."""
    T, B, I, H = 6, 23, 5, 9
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, T, B, name)
    g = rng("order")
    d_y = g.standard_normal((T, B, layer.output_size)).astype(dtype)
    y, last, tape = layer.forward(x, state, lengths=lengths, reset=reset)
    d_x, d_state, _ = layer.backward(tape, d_y, last)
    for order in (np.argsort(-lengths, kind="stable"), g.permutation(B)):
        first = like(state, lambda a, order=order: a[order])
        y2, last2, tape2 = layer.forward(x[:, order], first, lengths=lengths[order], reset=reset[:, order])
        d_x2, d_state2, _ = layer.backward(tape2, d_y[:, order], last2)
        assert same_bits([y[:, order], d_x[:, order]], [y2, d_x2])
        assert same_bits([a[order] for a in leaves((last, d_state))], leaves((last2, d_state2)))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_of_its_length_alone(name, dtype):
    """A row of a padded batch has the bits that it has by itself without padding, forward and backward."""
    T, B, I, H = 7, 6, 5, 9
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, state, lengths, _ = draw(layer, T, B, name)
    d_y = rng("alone").standard_normal((T, B, layer.output_size)).astype(dtype)
    y, last, tape = layer.forward(x, state, lengths=lengths)
    d_x, d_state, _ = layer.backward(tape, d_y, last)
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        first = like(state, lambda a, row=row: a[row])
        y1, last1, tape1 = layer.forward(x[:length, row], first)
        d_x1, d_state1, _ = layer.backward(tape1, d_y[:length, row], last1)
        assert same_bits([y[:length, row], d_x[:length, row]], [y1, d_x1])
        assert same_bits([a[row] for a in leaves((last, d_state))], leaves((last1, d_state1)))
        assert not y[length:, row].any() and not d_x[length:, row].any()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_comes_out_of_padding(name, dtype):
    """NaN past the rows' lengths, in x and in the gradient, and in states that a reset drops."""
    T, B, I, H = 9, 7, 5, 9
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, T, B, name)
    reset[0] = lengths > 0
    reset[lengths - 1, np.arange(B)] = True
    past = np.arange(T)[:, None] >= lengths
    clean = x.copy()
    clean[past], x[past] = 0, np.nan
    d_y = rng("padding").standard_normal((T, B, layer.output_size)).astype(dtype)
    dirty = d_y.copy()
    dirty[past] = np.nan
    expected = run_all(layer, clean, state, d_y, lengths=lengths, reset=reset)
    results = run_all(layer, x, state, dirty, lengths=lengths, reset=reset)
    for one, other in zip(results, expected, strict=True):
        assert same_bits(one, other)
        assert all(np.isfinite(array).all() for array in one)
    for array in results[0]:
        assert not array[past].any()


@pytest.mark.parametrize("name", CELLS)
def test_a_dropped_state_may_be_nan(name):
    layer = LAYERS[name](3, 4, np.float64)
    x, state, _, reset = draw(layer, 5, 4, name)
    reset[0] = [True, False, True, True]
    for part in state:
        part[reset[0]] = np.nan
    results = run_all(layer, x, state, reset=reset)
    for part in state:
        part[reset[0]] = 0
    for one, other in zip(results, run_all(layer, x, state, reset=reset), strict=True):
        assert same_bits(one, other)
        assert all(np.isfinite(array).all() for array in one)


@pytest.mark.parametrize("name", LAYERS)
def test_no_padding_and_no_reset_is_as_without(name):
    """The bits, so all rows of the batch may be full; the gradients of the weights included."""
    layer = LAYERS[name](3, 4, np.float32)
    x, state, _, _ = draw(layer, 5, 4, name)
    plain = run_all(layer, x, state)
    for options in ({"lengths": [5] * 4}, {"reset": np.zeros((5, 4), bool)}, {"lengths": np.full(4, 5, np.uint8)}):
        for one, other in zip(run_all(layer, x, state, **options), plain, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------------------------------------- what is accepted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["lstm", "gru", "stack"])
def test_any_layout_of_memory(name, dtype):
    layer = LAYERS[name](3, 4, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, 5, 6, name)
    d_y = rng("layout").standard_normal((5, 6, 4)).astype(dtype)
    expected = run_all(layer, x, state, d_y, lengths=lengths, reset=reset)

    def spaced(array):
        wide = np.zeros([2 * n for n in array.shape], array.dtype)
        wide[tuple(slice(None, None, 2) for _ in array.shape)] = array
        return wide[tuple(slice(None, None, 2) for _ in array.shape)]

    def read_only(array):
        array = array.copy()
        array.flags.writeable = False
        return array

    for other in (np.asfortranarray, spaced, read_only, lambda a: a.astype(a.dtype.newbyteorder())):
        options = {"lengths": other(lengths), "reset": other(reset)}
        results = run_all(layer, other(x), like(state, other), other(d_y), **options)
        for one, wanted in zip(results, expected, strict=True):
            assert same_bits(one, wanted)
        assert same_bits(leaves(layer(other(x))), leaves(layer(x)))  # as they are, they go another way
        assert same_bits(leaves(layer(other(x), like(state, other))), leaves(layer(x, state)))
        swapped = copy.copy(layer)
        swapped.set_weights(**{key: other(value) for key, value in layer.weights.items()})
        assert same_bits([swapped(x)[0]], [layer(x)[0]])
    results = run_all(
        layer, x.tolist(), like(state, lambda a: a)[:], d_y.tolist(), lengths=lengths.tolist(), reset=reset.tolist()
    )
    for one, wanted in zip(results, expected, strict=True):
        assert same_bits(one, wanted)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lists_make_float32_layers(name):
    layer = LAYERS[name](2, 3, np.float32)
    made = type(layer)(**{key: value.tolist() for key, value in layer.weights.items()})
    assert made.dtype == np.float32
    x = rng("lists").uniform(-1, 1, (4, 2, 2)).astype(np.float32)
    assert same_bits([made(x.tolist(), [a.tolist() for a in layer(x)[1]])[0]], [layer(x, layer(x)[1])[0]])


@pytest.mark.parametrize("zero", "TBIH")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["lstm", "lstm without peepholes", "gru", "bidirectional lstm", "stack"])
def test_sizes_of_zero(name, dtype, zero):
    sizes = {"T": 3, "B": 2, "I": 4, "H": 5} | {zero: 0}
    T, B, I, H = sizes.values()
    layer = LAYERS[name](I, H, DTYPES[dtype])
    x, state = np.ones((T, B, I), dtype), None
    _, zeros = layer(np.empty((0, B, I), dtype))
    state = like(zeros, lambda a: np.ones_like(a) / 2)
    for options in ({}, {"lengths": [T] * B}, {"lengths": np.full(B, T), "reset": np.zeros((T, B), bool)}):
        y, last, tape = layer.forward(x, state, **options)
        assert y.shape == (T, B, layer.output_size) and y.dtype == dtype
        if zero in "TB":
            assert same_bits(leaves(last), leaves(state))
            assert all(a is not b for a, b in zip(leaves(last), leaves(state), strict=True))
        d_x, d_state, grads = layer.backward(tape, np.ones_like(y), last)
        assert d_x.shape == x.shape
        assert [a.shape for a in leaves(d_state)] == [a.shape for a in leaves(state)]
        assert {key: a.shape for key, a in grads.items()} == {key: a.shape for key, a in layer.weights.items()}
        if zero in "TB":
            assert same_bits(leaves(d_state), leaves(last))
            assert not any(a.any() for a in grads.values())
        if zero == "H" and name != "stack":
            assert not d_x.any()
        assert same_bits([y], [layer(x, state, **options)[0]])
    assert not any(a.any() for a in leaves(zeros))


def test_results_are_the_users():
    """What a call returns may be changed, and so may what it was given: a tape has its own."""
    for name in LAYERS:
        layer = LAYERS[name](3, 4, np.float64)
        x, state, lengths, reset = draw(layer, 5, 4, name)
        y, last, tape = layer.forward(x, state, lengths=lengths, reset=reset)
        d_y = np.ones_like(y)
        expected = layer.backward(tape, d_y)
        for array in (x, y, lengths, reset, *leaves(state), *leaves(last)):
            array[...] = 0
        layer.set_weights(**{key: np.zeros_like(value) for key, value in layer.weights.items()})
        results = layer.backward(tape, d_y)
        assert same_bits([results[0], *results[2].values()], [expected[0], *expected[2].values()])
        assert (d_y == 1).all()


# ------------------------------------------------------------------------------------------------------------- weights
def test_weights_are_copies():
    w, b = np.ones((6, 12), np.float32), np.zeros(12, np.float32)
    layer = LSTM(w, b)
    w[:] = 0
    assert (layer.weights["w"] == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        layer.weights["w"][0] = 0
    stack = Stack([layer, layer])
    layer.set_weights(w=w)
    assert (stack.weights["0.w"] == 1).all()
    stack.set_weights(**{"1.w": w})
    assert (
        (stack.weights["0.w"] == 1).all() and not stack.weights["1.w"].any() and not stack.layers[1].weights["w"].any()
    )
    stack.layers[0].set_weights(w=w)
    assert not stack.weights["0.w"].any()


@pytest.mark.parametrize("name", LAYERS)
def test_set_weights(name):
    layer, other = LAYERS[name](3, 4, np.float32), LAYERS[name](3, 4, np.float32)
    x, state, _, _ = draw(layer, 5, 4, name)
    new = {key: np.float32(0.5) * value for key, value in layer.weights.items()}
    before = layer(x, state)[0]
    some = list(new)[::2]
    layer.set_weights(**{key: new[key] for key in some})
    assert layer.weights.keys() == new.keys()
    for key, value in layer.weights.items():
        np.testing.assert_array_equal(value, new[key] if key in some else other.weights[key])
    between = layer(x, state)[0]
    layer.set_weights(**new)
    after = layer(x, state)[0]
    assert not np.array_equal(before, between) and not np.array_equal(between, after)
    layer.set_weights(**other.weights)
    assert same_bits([layer(x, state)[0]], [before])
    first = next(iter(new))
    for bad in (
        {first: new[first][:-1]},
        {first: new[first].astype(np.float64)},
        {"nothing": new[first]},
        {first: None},
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(next(iter(bad)))):
            layer.set_weights(**new | bad)
        assert same_bits([layer(x, state)[0]], [before])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_pickles(name, dtype):
    layer = LAYERS[name](3, 4, dtype, **ATTRIBUTES)
    x, state, lengths, reset = draw(layer, 5, 4, name)
    expected = run_all(layer, x, state, lengths=lengths, reset=reset)
    stored = pickle.dumps(layer)
    assert len(stored) < sum(value.nbytes for value in layer.weights.values()) + 2500
    for twin in (pickle.loads(stored), copy.copy(layer), copy.deepcopy(layer)):
        assert type(twin) is type(layer) and repr(twin) == repr(layer)
        for one, other in zip(run_all(twin, x, state, lengths=lengths, reset=reset), expected, strict=True):
            assert same_bits(one, other)
        twin.set_weights(**{key: np.zeros_like(value) for key, value in twin.weights.items()})
        assert not any(value.any() for value in twin.weights.values())
        assert same_bits([layer(x, state, lengths=lengths, reset=reset)[0]], [expected[0][0]])


@pytest.mark.parametrize("name", ["LSTM", "GRU", "Bidirectional", "Stack", "LSTMState", "GRUState"])
def test_pickles_name_the_package(name):
    """They stay readable when a class moves to another file; its annotations can be resolved all the same."""
    assert typing.get_type_hints(getattr(blockcell, name))
    assert pickle.loads(f"cblockcell.layers\n{name}\n.".encode()) is getattr(blockcell, name)
    assert pickle.dumps(getattr(blockcell, name), 0) == f"cblockcell.layers\n{name}\np0\n.".encode()


def test_repr():
    net = Stack([Bidirectional(LSTM.init(8, 16, seed=0), LSTM.init(8, 16, seed=1)), GRU.init(32, 4, seed=2)])
    cell = "LSTM(input_size=8, hidden_size=16, dtype=float32)"
    assert (
        repr(net) == f"Stack([Bidirectional(fw={cell}, bw={cell}), GRU(input_size=32, hidden_size=4, dtype=float32)])"
    )
    layer = LSTM.init(2, 3, seed=0, dtype="float64", use_peephole=True, forget_bias=1, gate_order="ifco")
    more = "dtype=float64, use_peephole=True, forget_bias=1.0, gate_order='ifco'"
    assert repr(layer) == f"LSTM(input_size=2, hidden_size=3, {more})"
    assert (net.input_size, net.hidden_size, net.output_size, net.dtype) == (8, 4, 4, np.float32)
    assert (net.layers[0].input_size, net.layers[0].hidden_size, net.layers[0].output_size) == (8, 16, 32)


# ---------------------------------------------------------------------------------------------------------- new layers
def test_init_lstm():
    I, H = 30, 50
    for order, f in (("icfo", 2), ("ifco", 1)):
        layer = LSTM.init(I, H, seed=3, dtype=np.float64, use_peephole=True, gate_order=order)
        w, b, bound = layer.weights["w"], layer.weights["b"], np.sqrt(6 / (I + H))
        for k in range(4):
            x_part, h_part = w[:I, k * H : (k + 1) * H], w[I:, k * H : (k + 1) * H]
            assert 0.99 * bound < np.abs(x_part).max() <= bound and abs(x_part.mean()) < 0.05 * bound
            np.testing.assert_allclose(h_part @ h_part.T, np.eye(H), rtol=0, atol=1e-13)
            assert (b[k * H : (k + 1) * H] == (k == f)).all()
        gates = np.split(w, 4, axis=1)
        assert all(np.abs(p - q).max() > 0.1 for p, q in itertools.combinations(gates, 2))
        assert 0 < np.abs(layer.weights["wci"]).max() <= np.sqrt(3 / H)
        assert (layer.forget_bias, layer.cell_clip) == (0, 0)
    assert not LSTM.init(I, H, seed=3, forget_bias=1.0, cell_clip=3.0).weights["b"].any()


def test_init_gru():
    I, H = 30, 50
    weights = GRU.init(I, H, seed=3, dtype=np.float64).weights
    assert (weights["b_ru"] == 1).all() and not weights["b_c"].any()
    for part in (*np.split(weights["w_ru"], 2, axis=1), weights["w_c"]):
        assert 0.99 * np.sqrt(6 / (I + H)) < np.abs(part[:I]).max() <= np.sqrt(6 / (I + H))
        np.testing.assert_allclose(part[I:].T @ part[I:], np.eye(H), rtol=0, atol=1e-13)


@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_init_is_seeded(cls):
    one, same, other = (cls.init(3, 4, seed=seed) for seed in (1, np.random.default_rng(1), 2))
    for key, value in one.weights.items():
        assert same_bits([value], [same.weights[key]]) and value.dtype == np.float32
    assert not np.array_equal(*(next(iter(layer.weights.values())) for layer in (one, other)))
    assert not np.array_equal(*(next(iter(cls.init(3, 4, seed=None).weights.values())) for _ in range(2)))
    for sizes in ((0, 3), (3, 0), (0, 0)):
        layer = cls.init(*sizes, seed=0, dtype="float16")
        assert (layer.input_size, layer.hidden_size, layer.dtype) == (*sizes, np.float16)
    for bad, error in (((-1, 3), ValueError), ((3, 2.5), TypeError)):
        with pytest.raises(error, match=f"{cls.__name__}.init: (input|hidden)_size"):
            cls.init(*bad, seed=0)
    with pytest.raises(TypeError, match="dtype is int64"):
        cls.init(2, 3, seed=0, dtype=int)


# -------------------------------------------------------------------------------------------------------------- errors
F = np.float32


def ones(*shape, dtype=F):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LSTM(ones(5, 13), ones(12)), ValueError, "LSTM: w has shape (5, 13); expected (I+H, 4H)"),
        (lambda: LSTM(ones(2, 12), ones(12)), ValueError, "LSTM: w has shape (2, 12); expected (I+H, 4H), so at least"),
        (lambda: LSTM(ones(12), ones(12)), ValueError, "LSTM: w has shape (12,); expected (I+H, 4H), rank 2"),
        (
            lambda: LSTM(ones(5, 12), ones(11)),
            ValueError,
            "LSTM: b has shape (11,); expected (4H,) = (12,) with I=2, H=3",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12, dtype=np.float64)),
            TypeError,
            "LSTM: b has dtype float64; expected float32",
        ),
        (
            lambda: LSTM(ones(5, 12, dtype=int), ones(12)),
            TypeError,
            "LSTM: w has dtype int64; expected float32, float64",
        ),
        (lambda: LSTM(None, ones(12)), TypeError, "LSTM: w is None; expected an array of shape (I+H, 4H)"),
        (
            lambda: LSTM(ones(5, 12), ones(12), wci=ones(3)),
            TypeError,
            "LSTM: wcf is None; expected an array of shape (H,)",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), wci=ones(3), wcf=ones(3), wco=ones(4)),
            ValueError,
            "LSTM: wco has shape (4,); expected (H,) = (3,)",
        ),
        (lambda: LSTM(ones(5, 12), ones(12), forget_bias="1"), TypeError, "LSTM: forget_bias is '1'; expected a real"),
        (
            lambda: LSTM(ones(5, 12), ones(12), gate_order="ifgo"),
            ValueError,
            "LSTM: gate_order is 'ifgo'; expected 'icfo'",
        ),
        (
            lambda: LSTM(ones(5, 12), ones(12), gate_order=[]),
            TypeError,
            "LSTM: gate_order is of type list; expected 'icfo'",
        ),
        (
            lambda: GRU(ones(5, 6), ones(5, 4), ones(6), ones(3)),
            ValueError,
            "GRU: w_c has shape (5, 4); expected (I+H, H) =",
        ),
        (
            lambda: GRU(ones(5, 7), ones(5, 3), ones(6), ones(3)),
            ValueError,
            "GRU: w_ru has shape (5, 7); expected (I+H, 2H)",
        ),
        (lambda: GRU([["a"]], ones(5, 3), ones(6), ones(3)), TypeError, "GRU: w_ru is made of"),
        (lambda: Bidirectional(GRU.init(2, 3, seed=0), "x"), TypeError, "Bidirectional: bw is 'x'; expected a layer"),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 4, seed=0)),
            ValueError,
            "Bidirectional: bw has output_size 4; expected 3, that of fw",
        ),
        (
            lambda: Bidirectional(GRU.init(2, 3, seed=0), GRU.init(2, 3, seed=0, dtype="float64")),
            TypeError,
            "Bidirectional: bw has dtype float64; expected float32, that of fw",
        ),
        (lambda: Stack([]), ValueError, "Stack: layers is empty; expected at least one layer"),
        (lambda: Stack(3), TypeError, "Stack: layers is 3; expected a sequence of layers"),
        (
            lambda: Stack(GRU.init(2, 3, seed=0)),
            TypeError,
            "Stack: layers is of type GRU; expected a sequence of layers",
        ),
        (lambda: Stack([GRU.init(2, 3, seed=0), None]), TypeError, "Stack: 1 is None; expected a layer"),
        (
            lambda: Stack([GRU.init(2, 3, seed=0), GRU.init(4, 3, seed=0)]),
            ValueError,
            "Stack: 1 has input_size 4; expected 3, the output_size of 0",
        ),
    ],
)
def test_constructors_refuse(make, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        make()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": ones(4, 2)}, ValueError, "Stack: x has shape (4, 2); expected (T, B, I) with I=3 from the layer"),
        ({"x": ones(5, 4, 2)}, ValueError, "Stack: x has shape (5, 4, 2); expected (T, B, I) with I=3 from the layer"),
        ({"x": ones(5, 4, 3, dtype="d")}, TypeError, "Stack: x has dtype float64; expected float32, that of the layer"),
        ({"x": None}, TypeError, "Stack: x is None; expected an array of real numbers"),
        ({"state": ones(4, 3)}, TypeError, "Stack: state is of type ndarray; expected (0, 1) or None"),
        ({"state": (None,)}, ValueError, "Stack: state has 1 parts; expected (0, 1)"),
        (
            {"state": (ones(4, 2), None)},
            TypeError,
            "Stack: state.0 is of type ndarray; expected LSTMState(cs, h) or None",
        ),
        ({"state": (GRUState(ones(4, 2)), None)}, ValueError, "Stack: state.0 has 1 parts; expected LSTMState(cs, h)"),
        (
            {"state": (LSTMState(ones(4, 2), ones(3, 2)), None)},
            ValueError,
            "Stack: state.0.h has shape (3, 2); expected (B, H) = (4, 2) with B from x, H from the layer",
        ),
        (
            {"state": (None, (None, [ones(4, 5, dtype="e")]))},
            TypeError,
            "Stack: state.1.bw.h has dtype float16; expected",
        ),
        ({"lengths": ones(4)}, TypeError, "Stack: lengths has dtype float32; expected integers"),
        ({"lengths": [True] * 4}, TypeError, "Stack: lengths has dtype bool; expected integers"),
        ({"lengths": [1, 2, 3]}, ValueError, "Stack: lengths has shape (3,); expected (B,) = (4,)"),
        ({"lengths": 3}, ValueError, "Stack: lengths has shape (); expected (B,) = (4,)"),
        ({"lengths": [1, 6, -1, 2]}, ValueError, "Stack: lengths[1] is 6; expected 0 to T = 5"),
        ({"lengths": [1, 2, -1, 2]}, ValueError, "Stack: lengths[2] is -1; expected 0 to T = 5"),
        (
            {"lengths": np.full(4, 2**64 - 1, np.uint64)},
            ValueError,
            "Stack: lengths[0] is 18446744073709551615; expected",
        ),
        ({"reset": np.zeros((5, 4))}, TypeError, "Stack: reset has dtype float64; expected bool"),
        ({"reset": np.zeros((4, 5), bool)}, ValueError, "Stack: reset has shape (4, 5); expected (T, B) = (5, 4)"),
    ],
)
def test_calls_refuse(given, error, message):
    layer = Stack([LSTM.init(3, 2, seed=0), Bidirectional(GRU.init(2, 5, seed=1), GRU.init(2, 5, seed=2))])
    for call in (layer, layer.forward):
        with pytest.raises(error, match=re.escape(message)) as caught:
            call(**{"x": ones(5, 4, 3)} | given)
        assert type(caught.value) is error


def test_backward_refuses():
    layer, other = (LSTM.init(3, 2, seed=seed) for seed in (0, 1))
    y, last, tape = layer.forward(ones(5, 4, 3))
    for given, error, message in [
        ((None, y), TypeError, "LSTM: tape is None; expected that of this layer's forward"),
        ((other.forward(ones(5, 4, 3))[2], y), ValueError, "LSTM: tape is that of another layer"),
        ((tape, y[1:]), ValueError, "LSTM: d_y has shape (4, 4, 2); expected (5, 4, 2), that of y"),
        ((tape, y.astype("d")), TypeError, "LSTM: d_y has dtype float64; expected float32, that of the layer"),
        ((tape, y, last[:1]), ValueError, "LSTM: d_state has 1 parts; expected LSTMState(cs, h)"),
        ((tape, y, (last.cs, last.h[1:])), ValueError, "LSTM: d_state.h has shape (3, 2); expected (B, H) = (4, 2)"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            layer.backward(*given)


# ------------------------------------------------------------------------------------------------- memory and threads
@pytest.mark.parametrize("name", LAYERS)
def test_inference_keeps_nothing(name):
    """A call allocates y and the final state, beside scratch that does not grow with T: no saved activations."""
    layer = LAYERS[name](8, 16, np.float32)
    whole = 0
    for T in (1000, 2000):
        x = np.zeros((T, 16, 8), np.float32)
        layer(x)
        tracemalloc.start()
        try:
            result = layer(x)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(result[0]) == T
        if T == 1000:
            whole = peak
    # what one more step costs: its y, and in a stack that of the layer below, while both are needed
    needed = 4 * 16 * {"stack": 34 + 16, "bidirectional stack": 6 + 16}.get(name, layer.output_size)
    assert (peak - whole) / 1000 <= 1.02 * needed
    tape = layer.forward(x)[2]
    assert peak < 0.9 * sum(array.nbytes for array in {id(a): a for a in in_tape(tape.content)}.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_done_where_all_rows_have_ended(name, dtype):
    """Results are those of the steps before, and zeros; the tape has as many steps."""
    layer = LAYERS[name](3, 4, dtype)
    x, state, _, reset = draw(layer, 40, 3, name)
    for lengths in ([5, 9, 0], [0, 0, 0], [40, 1, 40]):
        end, options = max(lengths), {"lengths": np.array(lengths)}
        d_y = rng("d_y", name).normal(size=(40, 3, layer.output_size)).astype(dtype)
        y, last, tape = layer.forward(x, state, reset=reset, **options)
        short_y, short_last, short_tape = layer.forward(x[:end], state, reset=reset[:end], **options)
        d_x, *rest = layer.backward(tape, d_y)
        short_d_x, *short_rest = layer.backward(short_tape, d_y[:end])
        for whole, short in ((y, short_y), (d_x, short_d_x), (layer(x, state, reset=reset, **options)[0], short_y)):
            assert same_bits([whole[:end]], [short]) and not whole[end:].any() and len(whole) == 40
        assert same_bits(leaves(last), leaves(short_last)) and same_bits(leaves(rest[0]), leaves(short_rest[0]))
        assert same_bits(list(rest[1].values()), list(short_rest[1].values()))
        sizes, short_sizes = ([array.size for array in in_tape(t.content)] for t in (tape, short_tape))
        assert sizes == short_sizes


def in_tape(content):
    if isinstance(content, np.ndarray):
        yield content
    elif isinstance(content, (tuple, list)):
        for part in content:
            yield from in_tape(part)


@pytest.mark.parametrize("name", ["lstm", "gru", "stack"])
def test_threads_share_a_layer(name, threads):
    layer = LAYERS[name](6, 24, np.float32)
    jobs = []
    for k in range(24):
        x, state, lengths, reset = draw(layer, 5 + k % 3, 3 + k, name, k)
        jobs.append((x, state, {"lengths": lengths, "reset": reset} if k % 2 else {}))
    expected = [run_all(layer, x, state, **options) for x, state, options in jobs]
    for count in (1, 2):
        threads(count)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda job: run_all(layer, job[0], job[1], **job[2]), jobs * 3))
        for result, wanted in zip(results, expected * 3, strict=True):
            assert all(same_bits(one, other) for one, other in zip(result, wanted, strict=True))


def test_weights_change_at_once():
    """While one thread replaces the weights, calls in others see all of the old or all of the new ones."""
    layer = Stack([Bidirectional(gru(3, 8, np.float32), gru(3, 8, np.float32, 1)), lstm(16, 8, np.float32)])
    x, state, _, _ = draw(layer, 4, 3)
    old = layer.weights
    new = {key: value * np.float32(0.5) for key, value in old.items()}
    possible = []
    for weights in (new, old):
        layer.set_weights(**weights)
        possible.append(layer(x, state)[0])

    def swap():
        for k in range(400):
            layer.set_weights(**(new, old)[k % 2])

    with ThreadPoolExecutor(3) as pool:
        swapping = pool.submit(swap)
        seen = [0, 0]
        while not swapping.done() or not all(seen):
            y = layer(x, state)[0]
            which = [same_bits([y], [one]) for one in possible]
            assert any(which)
            seen[which.index(True)] += 1
            if swapping.done() and not all(seen):
                swapping = pool.submit(swap)
        swapping.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_fork():
    code = """
import os
import numpy as np
import blockcell

blockcell.set_num_threads(2)
layer = blockcell.LSTM.init(48, 64, seed=0)
x = np.random.default_rng(0).standard_normal((20, 64, 48)).astype(np.float32)
expected = layer(x)[0]
child = os.fork()
if child == 0:
    import signal
    signal.alarm(60)
    layer.set_weights(**layer.weights)
    os._exit(0 if np.array_equal(layer(x)[0], expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert printed(code) == "0"
