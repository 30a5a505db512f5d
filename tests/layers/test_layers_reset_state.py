"""States from which episodes within a sequence start: an episode has the bits that it has alone, from that state."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import mmap
import sys
from ctypes import addressof, c_char
from itertools import pairwise

import numpy as np
import pytest
from bits import leaves, like, on_threads, same
from cases import rng
from guarded import NONE, PAGE, protect
from kernel_cases import DTYPES
from layer_cases import CELLS, LAYERS, draw, gru, lstm, reset_after, rnn, run_all, variant
from refusals import refusal

from blockcell import LSTM, Bidirectional, Dense, LSTMState, Stack

LAYERS = {name: LAYERS[name] for name in CELLS} | {
    "projected lstm": LAYERS["projected lstm"],
    "coupled lstm": LAYERS["coupled lstm"],
    "projected coupled lstm": LAYERS["projected coupled lstm"],
    "stack": lambda I, H, dtype, **more: Stack(
        [
            lstm(I, H, dtype, **more),
            Dense(*[rng("dense", H, n).uniform(-1, 1, shape).astype(dtype) for n, shape in enumerate([(H, 3), 3])]),
            Stack([reset_after(3, H, dtype), variant(H, H, dtype, 5)]),
            gru(5 if H else 0, 4, dtype, 2),
            rnn(4, H, dtype),
        ]
    ),
}


def draw_reset_state(state, T, seed):
    """Draw arrays [T,B,.] of the form of a state."""
    g = rng("reset state", seed)
    return like(state, lambda a: g.uniform(-0.7, 0.7, (T, *a.shape)).astype(a.dtype))


def one_row(arrays, b, t=None):
    """Return row b of a state, or of step t of a reset state."""
    return like(arrays, lambda a: a[b : b + 1] if t is None else a[t, b : b + 1])


def time_first(array, batch_first):
    return array.swapaxes(0, 1) if batch_first else array


def results_of_call(layer, x, state, options, d_y):
    """Return y, the last state, the gradients, and d_last; a call alone and a second backward have the same bits."""
    y, last, tape = layer.forward(x, state, **options)
    d_last = like(last, lambda a: np.ones_like(a) / 3)
    gradients = layer.backward(tape, d_y, d_last, return_d_reset_state=True)
    assert same(layer(x, state, **options), (y, last)) and same(layer.backward(tape, d_y, d_last), gradients[:3])
    return (y, last), gradients, d_last


def compare_episodes(layer, x, state, reset_state, reset, lengths, d_y, batch_first, threads):
    """Compare a call with calls of each episode alone."""
    T, B = reset.shape
    is_read = reset & (np.arange(T)[:, None] < lengths)
    turned = [np.ascontiguousarray(time_first(a, batch_first)) for a in (x, d_y, reset)]
    options = {"reset": turned[2], "batch_first": batch_first} | ({} if all(lengths == T) else {"lengths": lengths})
    options["reset_state"] = like(
        reset_state,
        lambda a: time_first(np.where(is_read[:, :, None], a, np.nan).astype(a.dtype), batch_first),
    )
    with on_threads(threads):
        results = results_of_call(layer, turned[0], state, options, turned[1])
    with on_threads(1):
        assert same(results_of_call(layer, turned[0], state, options, turned[1]), results)
    (y, last), (d_x, d_state, grads, d_reset_state), d_last = results
    y, d_x = time_first(y, batch_first), time_first(d_x, batch_first)
    d_reset_state = like(d_reset_state, lambda a: time_first(a, batch_first))
    assert not any(a[~is_read].any() for a in leaves(d_reset_state))
    sums = {key: np.zeros(a.shape) for key, a in grads.items()}
    for b in range(B):
        starts = [0, *[t for t in range(1, lengths[b]) if reset[t, b]], lengths[b]]
        for begin, end in pairwise(starts):
            steps, row, is_last = slice(begin, end), slice(b, b + 1), end == lengths[b]
            is_reset = begin < end and reset[begin, b]
            first = one_row(reset_state, b, begin) if is_reset else one_row(state, b)
            y1, last1, tape1 = layer.forward(x[steps, row], first)
            d_x1, d_first, grads1 = layer.backward(tape1, d_y[steps, row], one_row(d_last, b) if is_last else None)
            assert same((y[steps, row], d_x[steps, row]), (y1, d_x1)), f"{b=} {begin=}"
            d_first_of_all = one_row(d_reset_state, b, begin) if is_reset else one_row(d_state, b)
            assert same(leaves(d_first_of_all), leaves(d_first)), f"{b=} {begin=}"
            if is_last:
                assert same(leaves(one_row(last, b)), leaves(last1)), f"{b=}"
            for key, a in grads1.items():
                sums[key] += a
        if lengths[b] and reset[0, b]:
            assert not any(a.any() for a in leaves(one_row(d_state, b))), f"{b=}"
    for key, a in grads.items():
        bound = {"float64": 1e-12, "float32": 1e-4, "float16": 0.3}[a.dtype.name]
        assert np.abs(a - sums[key]).max(initial=0) <= bound * max(1, np.abs(sums[key]).max(initial=0)), key


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_episodes_alone(name, dtype):
    """Any numbers of steps, rows, units and threads, with lengths or not, all results and gradients."""
    g = rng("reset state", name, dtype)
    for seed in range(6):
        T, B, I, H = (int(g.integers(1, most)) for most in (24, 40, 40, 40))
        if seed == 0:  # few rows and many units, which threads divide
            T, B, I, H = 7, 5, 20, 200
        if seed == 1:  # a single step, which packs no weights
            T = 1
        layer = LAYERS[name](I, H, DTYPES[dtype])
        x, state, lengths, reset = draw(layer, T, B, name, seed)
        lengths = lengths if g.integers(2) else np.full(B, T)
        d_y = g.standard_normal((T, B, layer.output_size)).astype(dtype)
        options = bool(g.integers(2)), int(g.integers(2, 9))
        compare_episodes(layer, x, state, draw_reset_state(state, T, seed), reset, lengths, d_y, *options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_zeros_stand_for_none(name, dtype):
    """In place of all of it, and of any part."""
    layer = LAYERS[name](5, 9, DTYPES[dtype])
    x, state, lengths, reset = draw(layer, 6, 5, name)
    whole = draw_reset_state(state, 6, name)
    zeros, nothing = like(whole, np.zeros_like), tuple(None for _ in state)
    expected = run_all(layer, x, state, lengths=lengths, reset=reset)
    for given in (zeros, nothing):
        assert same(run_all(layer, x, state, lengths=lengths, reset=reset, reset_state=given), expected)
    for k, part in enumerate(whole):
        some, filled = ((*others[:k], part, *others[k + 1 :]) for others in (nothing, tuple(zeros)))
        expected = layer(x, state, reset=reset, reset_state=filled)
        assert same(layer(x, state, reset=reset, reset_state=some), expected)
        if hasattr(state, "_fields"):
            assert same(layer(x, state, reset=reset, reset_state=dict(zip(state._fields, some, strict=True))), expected)


def test_a_state_for_all_episodes():
    """Axes of length 1 are repeated: the initial state of any episode, which may be learned."""
    layer = LAYERS["stack"](5, 9, np.float64)
    x, state, _, reset = draw(layer, 6, 5)
    whole = draw_reset_state(state, 6, 0)
    for slices in [(slice(1), slice(1)), (slice(None), slice(1)), (slice(1), slice(None))]:
        small = like(whole, lambda a, slices=slices: a[slices])
        repeated = like(small, lambda a: np.broadcast_to(a, (6, 5, a.shape[2])))
        wide = like(repeated, np.array)
        results = [layer(x, state, reset=reset, reset_state=given) for given in (small, repeated, wide)]
        assert same(results[0], results[2]) and same(results[1], results[2])
        turned = like(small, lambda a: a.swapaxes(0, 1))
        y, last = layer(x.swapaxes(0, 1), state, reset=reset.T, reset_state=turned, batch_first=True)
        assert same((y.swapaxes(0, 1), last), results[2])


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages of memory")
def test_other_rows_are_not_touched():
    """Their memory cannot be read, in calls and in training; nor is what a tape keeps the caller's."""
    B, H = 4, PAGE // 4
    layer = LAYERS["gru"](3, H, np.float32)
    x, state, _, reset = draw(layer, 6, B)
    reset[3] = False
    memory = mmap.mmap(-1, 6 * B * PAGE)
    rows, address = np.frombuffer(memory, np.float32).reshape(6, B, H), addressof(c_char.from_buffer(memory))
    rows[...] = draw_reset_state(state, 6, 0)[0]
    d_y = np.ones((6, B, H), np.float32)
    options = {"reset": reset, "reset_state": (rows,)}
    _, _, tape = layer.forward(x, state, **options)
    expected = layer(x, state, **options), layer.backward(tape, d_y)
    for k in np.flatnonzero(~reset).tolist():
        protect(address + k * PAGE, 1, NONE)
    results = [layer(x, state, **options)]
    _, _, tape = layer.forward(x, state, **options)
    rows[reset] = np.nan
    results.append(layer.backward(tape, d_y))
    assert same(tuple(results), expected)


@pytest.mark.parametrize("scheme", ["int8", "float16"])
def test_quantized(scheme):
    """Episodes have the bits that they have alone."""
    layer = LSTM.init(20, 24, seed=0).quantize(scheme)
    g = rng("quantized")
    x, reset = g.standard_normal((9, 3, 20)).astype(np.float32), g.random((9, 3)) < 0.3
    reset_state = tuple(g.standard_normal((9, 3, 24)).astype(np.float32) for _ in "ch")
    y, _ = layer(x, reset=reset, reset_state=reset_state)
    for b in range(3):
        starts = sorted({0, *np.flatnonzero(reset[:, b]).tolist(), 9})
        for begin, end in pairwise(starts):
            first = one_row(reset_state, b, begin) if reset[begin, b] else None
            assert same(y[begin:end, b : b + 1], layer(x[begin:end, b : b + 1], first)[0])


def test_no_steps_and_no_rows():
    layer = LAYERS["stack"](3, 4, np.float32)
    for T, B in [(0, 2), (3, 0), (0, 0)]:
        _, state, _, _ = draw(layer, 3, 2)
        state = like(state, lambda a, B=B: np.zeros((B, a.shape[1]), a.dtype))
        options = {"reset": np.ones((T, B), bool), "reset_state": draw_reset_state(state, T, 0)}
        y, last, tape = layer.forward(np.zeros((T, B, 3), np.float32), state, **options)
        assert same(last, state)
        assert not any(a.any() for a in leaves(layer.backward(tape, y, return_d_reset_state=True)[3]))


X, RESET = np.zeros((5, 4, 3), np.float32), np.zeros((5, 4), bool)
LAYER = LSTM.init(3, 2, seed=0)
BOTH = Bidirectional(LAYER, LAYER)
ROWS = np.zeros((5, 4, 2), np.float32)


@pytest.mark.parametrize(
    ("layer", "reset_state", "said"),
    [
        (
            LAYER,
            (ROWS, ROWS[:, :3]),
            "ValueError: reset_state.h has shape (5, 3, 2); expected (T, B, H) = (5, 4, 2) with T and B from"
            " x, H from the layer",
        ),
        (
            LAYER,
            (ROWS.astype(np.float64), ROWS),
            "TypeError: reset_state.cs has dtype float64; expected float32, that of the layer;"
            " reset_state.cs.astype(np.float32) converts it",
        ),
        (LAYER, (ROWS,), "ValueError: reset_state has 1 parts; expected LSTMState(cs, h)"),
        (
            LSTM(**LAYER.weights, reverse=True),
            (ROWS, None),
            "ValueError: reset_state.cs is of a layer with reverse=True; expected None",
        ),
        *(
            (layer, state, f"ValueError: {name} is of a Bidirectional; expected None, as bw starts at the end")
            for layer, state, name in [
                (BOTH, ((ROWS, ROWS), None), "reset_state"),
                (Stack([BOTH]), (((ROWS, ROWS), None),), "reset_state.0"),
            ]
        ),
    ],
)
def test_errors(layer, reset_state, said):
    for call in (layer, layer.forward):
        with refusal(said, type(layer).__name__):
            call(X, reset=RESET, reset_state=reset_state)


def test_what_must_be_beside_it():
    for options, expected in (({}, "reset, too"), ({"reset": RESET, "mask": RESET}, "no mask with it")):
        for call in (LAYER, LAYER.forward):
            with refusal(f"ValueError: reset_state is given; expected {expected}", "LSTM"):
                call(X, reset_state=(ROWS, ROWS), **options)


def test_none_of_other_directions():
    """A layer that takes no reset state may have others beside it."""
    layer = Stack([BOTH, LSTM.init(4, 2, seed=1)])
    reset_state = (None, LSTMState(ROWS + 1, ROWS))
    _, _, tape = layer.forward(X, reset=RESET | True, reset_state=reset_state)
    nothing, grads = layer.backward(tape, ROWS + 1, return_d_reset_state=True)[3]
    assert nothing is None and type(grads) is LSTMState and all(a.any() for a in grads)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_where_y_repeats_at_the_end(name, batch_first):
    """They are those of the y that is not repeated, whose last step has the gradients to all repetitions."""
    layer, T, B = LAYERS[name](5, 9, np.float64), 7, 6
    x, state, _, reset = draw(layer, T, B, name)
    lengths, g = np.array([7, 0, 1, 4, 6, 3]), rng("repeated", name)
    d_y = g.standard_normal((T, B, layer.output_size))
    summed = d_y.copy()
    for t in range(T - 1, 0, -1):
        summed[t - 1] = np.where((t >= lengths)[:, None], summed[t] + d_y[t - 1], d_y[t - 1])
    arrays = [np.ascontiguousarray(time_first(a, batch_first)) for a in (x, reset, d_y, summed)]
    reset_state = like(draw_reset_state(state, T, name), lambda a: time_first(a, batch_first))
    options = {"lengths": lengths, "reset": arrays[1], "reset_state": reset_state, "batch_first": batch_first}
    results = []
    for masked, gradient in (("zero", arrays[3]), ("repeat", arrays[2])):
        _, last, tape = layer.forward(arrays[0], state, masked=masked, **options)
        d_last = like(last, lambda a: np.ones_like(a) / 3)
        results.append(layer.backward(tape, gradient, d_last, return_d_reset_state=True))
    assert same(*results)
    assert any(a.any() for a in leaves(results[1][3]))


def test_no_gradients_with_gaps():
    mask = np.arange(5)[:, None] < [5, 0, 3, 4]
    d_reset_state = [
        LAYER.backward(LAYER.forward(X, reset=RESET, **options)[2], ROWS, return_d_reset_state=True)[3]
        for options in ({"mask": mask}, {"lengths": mask.sum(axis=0)})
    ]
    assert same(*d_reset_state)
    mask[0, 0] = False
    _, _, tape = LAYER.forward(X, reset=RESET, mask=mask)
    with pytest.raises(ValueError, match="LSTM: return_d_reset_state is True; expected a tape without a mask, or of"):
        LAYER.backward(tape, ROWS, return_d_reset_state=True)
