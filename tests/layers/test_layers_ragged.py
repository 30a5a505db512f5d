"""A row's results depend on the row alone: rows that end early take no part from then on, and no row sees another."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import mmap
import sys
from ctypes import addressof, c_char

import numpy as np
import pytest
from bits import leaves, like, on_threads, same
from cases import rng
from fresh import printed
from guarded import NONE, PAGE, protect
from kernel_cases import DTYPES
from layer_cases import CELLS, IN_ANY_DIRECTION, LAYERS, draw, drawn_mask, run_all
from traced import MALLINFO


def drawn_lengths(g, T, B):
    """Sorted or not; of rows that are all, partly or hardly padding, or not at all."""
    few = np.where(g.random(B) < 0.1, T, g.integers(0, max(T // 5, 1) + 1, B))
    lengths = [g.integers(0, T + 1, B), few, np.full(B, T), T - g.integers(0, 2, B)][g.integers(4)]
    return [lengths, np.sort(lengths), np.sort(lengths)[::-1]][g.integers(3)]


def since_the_last(reset, mask):
    """For each counted step of a row, whether there is a reset after the counted step before it; of the row alone."""
    flags, pending = [], False
    for t in range(len(mask)):
        pending |= bool(reset[t])
        if mask[t]:
            flags.append(pending)
            pending = False
    return np.array(flags, bool)


def spoil_finished_rows(content, counts):
    """Write NaN where a tape has memory for steps past those that count, which stand at the front."""
    if hasattr(content, "saved"):
        content.saved[:, np.arange(content.saved.shape[1])[:, None] >= counts] = np.nan
    elif not hasattr(content, "_fields"):
        for part in content:
            spoil_finished_rows(part, counts)


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_ANY_DIRECTION)
def test_rows_alone(name, dtype):
    """Any numbers of steps, rows, units and threads, with lengths, masks and resets or not: each row has the bits that
    it has alone, without the steps that are left out; NaN stands where nothing is to be read."""
    g = rng("ragged", name)
    for seed in range(12):
        T, B, I, H = int(g.integers(1, 30)), int(g.integers(2, 70)), int(g.integers(1, 40)), int(g.integers(1, 40))
        if seed in (0, 1):  # few rows and many units, which threads divide
            T, B, I, H = 9, 6, 20, 200
        layer = IN_ANY_DIRECTION[name](I, H, DTYPES[dtype])
        x, state, _, reset = draw(layer, T, B, name, seed)
        lengths = drawn_lengths(g, T, B) if seed % 4 != 3 else np.full(B, T)
        mask = drawn_mask(g, T, B) if seed % 2 else np.ones((T, B), bool)
        of_steps = ({"mask": mask} if seed % 2 else {}) | ({"reset": reset} if g.integers(2) else {})
        counted, batch_first = mask & (np.arange(T)[:, None] < lengths), bool(g.integers(2))
        d_y = g.standard_normal((T, B, layer.output_size)).astype(dtype)
        x[~counted], d_y[~counted] = np.nan, np.nan
        turn = (lambda array: array.swapaxes(0, 1)) if batch_first else (lambda array: array)
        options = {key: turn(array) for key, array in of_steps.items()} | {"batch_first": batch_first}
        options |= {"lengths": lengths} if seed % 4 != 3 else {}
        results = []
        for threads in (int(g.integers(2, 9)), 1):
            with on_threads(threads):
                called = layer(turn(x), state, **options)
                y, last, tape = layer.forward(turn(x), state, **options)
                spoil_finished_rows(tape.content, counted.sum(axis=0))
                d_last = like(last, lambda a: np.ones_like(a) / 3)
                results.append([called, (y, last), layer.backward(tape, turn(d_y), d_last)])
        assert same(results[0], results[1]) and same(*results[0][:2]), f"{seed=}"
        _, (y, last), (d_x, d_state, grads) = results[0]
        y, d_x = turn(y), turn(d_x)
        assert not y[~counted].any() and not d_x[~counted].any(), f"{seed=}"
        assert all(np.isfinite(grad).all() for grad in grads.values()), f"{seed=}"  # no padding, which is NaN
        for b in g.permutation(B)[:8]:
            row, steps = slice(b, b + 1), counted[:, b]
            alone = {"reset": since_the_last(reset[:, b], steps)[:, None]} if "reset" in options else {}
            y1, last1, tape1 = layer.forward(x[steps, row], like(state, lambda a, row=row: a[row]), **alone)
            final = like(d_last, lambda a, row=row: a[row])
            d_x1, d_state1, _ = layer.backward(tape1, d_y[steps, row], final)
            assert same((y[steps, row], d_x[steps, row]), (y1, d_x1)), f"{seed=} {b=}"
            assert same([a[row] for a in leaves((last, d_state))], leaves((last1, d_state1))), f"{seed=} {b=}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_keep_their_places_in_sums(dtype, threads):
    """The weights' gradients have the bits that they have where rows past their ends add zeros."""
    g = rng("places", dtype)
    for _ in range(5):
        T, B, I, H = int(g.integers(1, 60)), int(g.integers(2, 30)), int(g.integers(1, 40)), int(g.integers(1, 40))
        layer, lengths = LAYERS["dense alone"](I, H, DTYPES[dtype]), drawn_lengths(g, T, B)
        x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (I, H))
        past = np.arange(T)[:, None] >= lengths
        x[past], d_y[past] = 0, 0
        with on_threads(threads):
            gradients, expected = (
                layer.backward(layer.forward(x, **options)[2], d_y)[2] for options in ({"lengths": lengths}, {})
            )
        assert same(gradients, expected), f"{T=} {B=} {lengths=}"


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages of memory")
@pytest.mark.parametrize("what", ["lengths", "mask"])
@pytest.mark.parametrize("name", [*CELLS, "bidirectional lstm"])
def test_padding_is_not_touched(name, what):
    """Its memory cannot be read."""
    I, T, B = 32, 2 * PAGE // 128, 6
    layer, lengths = LAYERS[name](I, 8, np.float32), np.array([T // 2, T, T // 2, 0, T, T // 2])
    x, state, _, _ = draw(layer, T, B, name)
    memory = mmap.mmap(-1, B * T * 128)
    hidden, address = np.frombuffer(memory, np.float32).reshape(B, T, I), addressof(c_char.from_buffer(memory))
    hidden[...] = x.swapaxes(0, 1)
    options = {"lengths": lengths} if what == "lengths" else {"mask": np.arange(T) < lengths[:, None]}
    expected = layer(hidden, state, **options, batch_first=True)
    for b, length in enumerate(lengths.tolist()):
        protect(address + (b * T + length) * 128, (T - length) * 128 // PAGE, NONE)
    for threads in (1, 2):
        with on_threads(threads):
            assert same(layer(hidden, state, **options, batch_first=True), expected)


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
        assert same(one, other)
        assert all(np.isfinite(array).all() for array in one)


@pytest.mark.parametrize("name", LAYERS)
def test_no_padding_and_no_reset_is_as_without(name):
    """Lengths of T and resets that are all False change no bit, nor do they in the gradients of the weights."""
    layer = LAYERS[name](3, 4, np.float32)
    x, state, _, _ = draw(layer, 5, 4, name)
    plain = run_all(layer, x, state)
    for options in ({"lengths": [5] * 4}, {"reset": np.zeros((5, 4), bool)}, {"lengths": np.full(4, 5, np.uint8)}):
        for one, other in zip(run_all(layer, x, state, **options), plain, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


def test_numbers_that_are_not_finite_stay_in_their_rows():
    """A weight that is infinite gives NaN where it is multiplied; rows without a step meet no weight."""
    layer = LAYERS["lstm without peepholes"](3, 4, np.float32)
    layer.set_weights(w=np.where(np.arange(16) == 2, np.inf, layer.weights["w"]).astype(np.float32))
    x, state, _, _ = draw(layer, 5, 4, "finite")
    (_, d_x), (_, h, _, d_h), _ = run_all(layer, x, state, lengths=[5, 0, 3, 0])
    assert same(h[[1, 3]], state.h[[1, 3]]) and np.isfinite(d_h[[1, 3]]).all() and not d_x[:, [1, 3]].any()


TAPES = """
import hashlib
import numpy as np
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, LSTMState, Stack

def arrays_of(content):
    if isinstance(content, np.ndarray):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else []
    return [array for part in parts for array in arrays_of(part)]

one_way = Stack([LSTM.init(3, 4, seed=0, proj_size=2), Dense.init(2, 3, seed=1), RNN.init(3, 3, seed=2),
                 GRU.init(3, 4, seed=3), GRU.init(4, 3, seed=4, reset_after=True)])
both_ways = Stack([Bidirectional(LSTM.init(3, 4, seed=0), GRU.init(3, 4, seed=1)), Dense.init(8, 2, seed=2, last=True)])
rows, steps = np.arange(5), np.arange(6)[:, None]
ones = np.ones((6, 5, 4), np.float32)
padded = {"lengths": [6, 0, 1, 3, 4], "reset": steps == rows}
states = {"reset_state": (LSTMState(ones, ones[:, :, 2:]), (), None, (ones,), None)}
for layer, options in ((one_way, padded | states), (both_ways, padded), (one_way, {"mask": steps % 4 != rows}),
                       (both_ways, {"mask": steps % 4 != rows, "masked": "repeat"})):
    y, last, tape = layer.forward(ones[:, :, 1:], **options)
    memory = [array.tobytes() for array in arrays_of((y, last, tape.content, layer.backward(tape, y)))]
    print(len(memory), hashlib.sha256(b"".join(memory)).hexdigest())
print(np.empty(3000, np.uint8)[100])
"""


@pytest.mark.skipif(MALLINFO is None, reason="only glibc fills the memory that it gives out")
def test_tapes_depend_on_their_inputs_alone():
    """Finished rows and states where there is no reset, which no pass reads, are not what was in memory before."""
    *tapes, memory = printed(TAPES, MALLOC_PERTURB_="1").split("\n")
    *expected, other_memory = printed(TAPES, MALLOC_PERTURB_="2").split("\n")
    assert memory != other_memory
    assert tapes == expected
