"""Streams whose rows step apart: the bits of each row alone, whatever company it has."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import numpy as np
import pytest
from bits import leaves, like, same, zeros
from layer_cases import STREAMED
from traced import peak_beside

import blockcell

N, I, H = 11, 5, 19  # noqa: E741
every_layer = pytest.mark.parametrize("name", STREAMED)


def uniform(rng, *shape, dtype=np.float32):
    return rng.uniform(-1, 1, shape).astype(dtype)


class Alone:
    """Every row by itself: a stream of one row, which the layer makes step by step."""

    def __init__(self, layer, rows):
        self.layer, self.states = layer, [zeros(layer, 1) for _ in range(rows)]

    @classmethod
    def going_on(cls, layer, stream):
        """With the states that the stream's rows have now."""
        alone = cls(layer, 0)
        alone.states = [stream.state_of([row]) for row in range(stream.batch)]
        return alone

    def run(self, x, rows, lengths=None):
        """y of these rows."""
        y = np.zeros((*x.shape[:2], self.layer.output_size), x.dtype)
        for k, row in enumerate(rows):
            for t in range(len(x) if lengths is None else lengths[k]):
                y[t, k : k + 1], self.states[row] = self.layer(x[t : t + 1, k : k + 1], self.states[row])
        return y

    def state_of(self, rows):
        parts = zip(*(leaves(self.states[row]) for row in rows), strict=True)
        return like(self.states[0], lambda _: np.concatenate(next(parts)))


def check_turns(stream, alone, rng, dtype):
    """Turns of rows drawn at random, in any order, by steps and in blocks; then all rows."""
    batch = stream.batch
    for turn in range(12):
        rows = rng.permutation(batch)[: rng.integers(0, batch + 1)]
        x = uniform(rng, 1 if turn % 2 else rng.integers(0, 5), len(rows), I, dtype=dtype)
        if turn % 2:
            y = stream.step(x[0], rows=rows)[None]
        else:
            y = stream.run(x, rows=rows)
        assert same(y, alone.run(x, rows)), turn
        assert same(stream.state, alone.state_of(range(batch))), turn
        if turn % 4 == 3:
            x = uniform(rng, 3, batch, I, dtype=dtype)
            assert same(stream.run(x), alone.run(x, range(batch))), turn


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@every_layer
def test_same_bits_as_alone(name, dtype):
    layer = STREAMED[name](I, H, dtype)
    check_turns(layer.stream(N), Alone(layer, N), np.random.default_rng(0), dtype)


# --------------------------------------------------------------------------------------------------- how rows are given
WRONG_ROWS = {
    "beyond": ([0, N], ValueError, r"stream: rows has 11; expected indices from -11 to 10"),
    "beyond, intp": (np.array([0, N]), ValueError, r"stream: rows has 11; expected indices from -11 to 10"),
    "before": ([0, -N - 1], ValueError, r"rows has -12; expected indices from -11 to 10"),
    "huge": (np.array([0, 2**64 - 1], np.uint64), ValueError, r"rows has 18446744073709551615; expected indices"),
    "twice": ([3, 3], ValueError, r"rows has 3 twice; expected each row once"),
    "twice, intp": (np.array([3, 3]), ValueError, r"rows has 3 twice; expected each row once"),
    "twice, from the end": (np.array([3, 3 - N]), ValueError, r"rows has 3 twice; expected each row once"),
    "too many": (np.arange(2 * N) % N, ValueError, r"rows has 0 twice; expected each row once"),
    "mask": ([True, True], ValueError, r"rows has shape \(2,\); expected \(11,\), one bool for each row"),
    "mask of rank 2": (np.ones((1, N), bool), ValueError, r"rows has shape \(1, 11\); expected \(11,\), one bool"),
    "fractions": ([0.0, 1.0], TypeError, r"rows is .*float64; expected indices, or one bool for each row"),
    "text": ("ab", TypeError, r"rows is 'ab'.*expected indices"),
    "number": (3, ValueError, r"rows has shape \(\); expected \(n,\), an index for each of n rows"),
    "rank 2": ([[0, 1]], ValueError, r"rows has shape \(1, 2\); expected \(n,\)"),
    "ragged": ([[0], [1, 2]], ValueError, "rows cannot be read as an array"),
    "objects": ([None, 1], TypeError, "rows is"),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
@pytest.mark.parametrize("name", ["LSTM", "Dense", "Stack"])
def test_wrong_rows_change_nothing(name, wrong):
    rows, error, message = WRONG_ROWS[wrong]
    layer, rng = STREAMED[name](I, H, np.float32), np.random.default_rng(4)
    stream = layer.stream(N)
    stream.run(uniform(rng, 2, N, I))
    before, n = stream.state, 2 if wrong == "ragged" else np.size(rows)
    calls = [
        lambda: stream.step(uniform(rng, n, I), rows=rows),
        lambda: stream.run(uniform(rng, 2, n, I), rows=rows),
        lambda: stream.run(uniform(rng, 0, n, I), rows=rows),
        lambda: stream.state_of(rows),
        lambda: stream.set_state(rows, like(zeros(layer, n), lambda a: a + 1)),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
        assert same(stream.state, before)
    check_turns(stream, Alone.going_on(layer, stream), rng, np.float32)


@pytest.mark.parametrize("name", ["LSTM", "Stack"])
def test_other_wrong_arguments_change_nothing(name):
    layer, rng = STREAMED[name](I, H, np.float32), np.random.default_rng(5)
    stream, x, out = layer.stream(N), uniform(rng, 4, 3, I), np.empty((4, 3, H), np.float32)
    stream.run(uniform(rng, 2, N, I))
    before, rows = stream.state, [4, 1, 0]
    first = "LSTM" if name == "LSTM" else "Dense"
    for call, error, message in (
        (lambda: stream.step(x[0, :2], rows=rows), ValueError, rf"{first}.stream: x has shape \(2, 5\); expected"),
        (lambda: stream.step(x[0], rows=rows[:2]), ValueError, r"x has shape \(3, 5\); expected \(2, 5\), by the num"),
        (lambda: stream.step(np.zeros((N, I), np.float32), rows=[True] * 3 + [False] * 8), ValueError, r"\(3, 5\), by"),
        (lambda: stream.step(x[0]), ValueError, r"x has shape \(3, 5\); expected \(11, 5\)$"),
        (lambda: stream.run(x, rows=rows, out=out[:, :2]), ValueError, r"out is .* of shape \(4, 3, 19\)"),
        (lambda: stream.run(x, out[:3], rows=rows), ValueError, r"out is .* of shape \(4, 3, 19\)"),
        (lambda: stream.run(x, rows=rows, lengths=[1, 2]), ValueError, r"lengths has shape \(2,\).* = \(3,\)"),
        (lambda: stream.run(x, rows=rows, lengths=[1, 2, 5]), ValueError, r"lengths\[2\] is 5; expected 0 to T = 4"),
        (lambda: stream.run(x, rows=rows, lengths=[-1, 2, 3]), ValueError, r"lengths\[0\] is -1; expected 0 to T = 4"),
        (lambda: stream.run(x, rows=rows, lengths=[0.5, 2, 3]), TypeError, "lengths has dtype float64"),
        (lambda: stream.run(x, None, rows), TypeError, "positional"),
        (lambda: stream.set_state(rows, stream.state), ValueError, r"has shape \(11, \d+\)"),
        (lambda: stream.set_state(rows, stream.state_of([1, 2])), ValueError, r"has shape \(2, \d+\)"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert same(stream.state, before)


def test_a_layer_that_fails_changes_nothing_below(monkeypatch):
    """The states of the layers below it have been computed by then."""
    layer, rng = STREAMED["Stack"](I, H, np.float32), np.random.default_rng(6)
    stream = layer.stream(N)
    before = stream.state

    def fails(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layer.layers[2], "_plan_kernel", fails)
        for call in (
            lambda: stream.step(uniform(rng, 3, I), rows=[5, 6, 7]),
            lambda: stream.run(uniform(rng, 2, 3, I), rows=[5, 6, 7], lengths=[1, 2, 0]),
            lambda: stream.run(uniform(rng, 2, N, I), lengths=[1] * N),
        ):
            with pytest.raises(MemoryError):
                call()
            assert same(stream.state, before)
    check_turns(stream, Alone(layer, N), rng, np.float32)


def test_rows_that_change_while_x_is_read():
    """x's conversion runs the caller's code, which may write to the array of indices."""
    layer = STREAMED["Stack"](I, H, np.float32)
    stream, before, rows = layer.stream(N), layer.stream(N).state, np.array([1, 2])

    class Writes:
        def __init__(self, *new):
            self.new = new

        def __array__(self, dtype=None, copy=None):
            rows[:] = self.new
            return np.ones((2, I), np.float32)

    for new in ((2**60, 1), (4, 4), (-(2**62), 0)):
        with pytest.raises(ValueError, match="rows has"):
            stream.step(Writes(*new), rows=rows)
        assert same(stream.state, before)
    alone = Alone(layer, N)
    assert same(stream.step(Writes(9, 3), rows=rows), alone.run(np.ones((1, 2, I), np.float32), [9, 3])[0])
    assert same(stream.state, alone.state_of(range(N)))


# -------------------------------------------------------------------------------------------------------------- lengths
@pytest.mark.meet(2)
@pytest.mark.parametrize("form", [list, np.array, lambda lengths: np.array(lengths, ">i2")])
@pytest.mark.parametrize("lengths", [[3, 0, 6, 6, 1], [0] * 5, [6] * 5, [2, 2, 0, 1, 1]], ids=str)
@every_layer
def test_lengths(name, lengths, form):
    """Past its length a row keeps its state, y is zero, and x is not read."""
    layer, rng = STREAMED[name](I, H, np.float32), np.random.default_rng(7)
    x, rows = uniform(rng, 6, 5, I), [8, 2, 0, 10, 5]
    for k, length in enumerate(lengths):
        x[length:, k] = np.nan
    for rows_of_call in (rows, None):
        batch = 5 if rows_of_call is None else N
        stream = layer.stream(batch)
        stream.state = like(zeros(layer, batch), lambda a: uniform(rng, *a.shape))
        alone = Alone.going_on(layer, stream)
        out = np.full((6, 5, H), 7, np.float32)
        assert stream.run(x, out, rows=rows_of_call, lengths=form(lengths)) is out
        assert same(out, alone.run(x, rows if rows_of_call else range(5), lengths))
        assert same(stream.state, alone.state_of(range(batch)))


# --------------------------------------------------------------------------------------------------------------- states
def test_states_are_copies_in_the_forms_of_a_call():
    layer, rng = STREAMED["LSTM"](I, H, np.float32), np.random.default_rng(10)
    stream = layer.stream(N)
    stream.run(uniform(rng, 2, N, I))
    states, before = stream.state_of([2, 1]), stream.state
    assert type(states) is blockcell.LSTMState
    for array in states:
        array[:] = 9
    assert same(stream.state, before) and same(stream.state_of(None), before)
    cs, h = np.ones((1, H), np.float32), np.full((2, H), 2, np.float32)
    stream.set_state([5, 4], {"h": h, "cs": cs})
    h[:] = 9
    for array, old, new in zip(stream.state, before, (1, 2), strict=True):
        assert (array[4:6] == new).all() and same(np.delete(array, [4, 5], 0), np.delete(old, [4, 5], 0))
    stream.set_state(None, before)
    assert same(stream.state, before)


# --------------------------------------------------------------------------------------------------------------- memory
@every_layer
def test_out_and_indices_allocate_nothing(name):
    """Also where the number of rows changes from step to step."""
    stream = STREAMED[name](I, H, np.float32).stream(200)
    x, out = np.ones((200, I), np.float32), np.ones((200, H), np.float32)
    row_ranges = [np.arange(first, first + n) for first, n in ((0, 40), (7, 41), (90, 1), (3, 60), (5, 100))]
    turns = [(x[: len(rows)], out[: len(rows)], rows) for rows in row_ranges] * 4

    def step(turn):
        stream.step(turn[0], turn[1], rows=turn[2])

    for turn in turns:
        step(turn)
    assert peak_beside([partial(step, turn) for turn in turns]) < 1000
    rows = [7, 8]
    assert peak_beside([lambda: stream.step(x[:2], out[:2], rows=rows)]) > 100  # what a list costs is noticed


def test_plans_are_bounded(set_num_threads):
    """A step of each number of rows needs a plan; of these it keeps some."""
    set_num_threads(1)  # so that 2000 rows need the most scratch
    stream, x = STREAMED["LSTM"](I, H, np.float32).stream(2000), np.ones((2000, I), np.float32)
    rows, out = np.arange(2000), np.empty((2000, H), np.float32)
    stream.step(x, rows=rows)
    tracemalloc.start()
    try:
        kept = []
        for n in range(1, 2000):
            stream.step(x[:n], out[:n], rows=rows[:n])
            if n in (200, 1999):
                gc.collect()  # empties Python's own lists of tuples to use again
                kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert 50_000 < kept[0] and kept[1] < kept[0] + 10_000
