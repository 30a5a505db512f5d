"""Streams: the bits of one call over all steps, no allocation, errors; states and weights are in `test_stateful.py`."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import traced
from bits import same
from layer_cases import STREAMED
from traced import MALLINFO, in_use, peak_beside

from blockcell import GRU, LSTM, Bidirectional, Stack

T, B, I, H = 40, 3, 5, 19  # noqa: E741
DTYPES = [np.float32, np.float64, np.float16]
every_layer = pytest.mark.parametrize("name", STREAMED)


def inputs(dtype=np.float32, steps=T):
    return np.random.default_rng(7).normal(size=(steps, B, I)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@every_layer
def test_same_bits_as_one_call(name, dtype):
    layer, x = STREAMED[name](I, H, dtype), inputs(dtype)
    y, last = layer(x)
    steps, blocks = layer.stream(B), layer.stream(B)
    out = np.empty((B, H), dtype)
    for t in range(T):
        if t % 2:
            assert steps.step(x[t], out=out) is out
        else:
            out = steps.step(x[t])
        assert np.array_equal(out, y[t]), t
    cuts = [0, 1, 2, 9, 10, 33, T]
    parts = [blocks.run(x[a:b]) for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), y)
    assert same(steps.state, last) and same(blocks.state, last)


SMALL = {
    "LSTM": lambda: LSTM.init(2, 3, seed=1, use_peephole=True, cell_clip=0.5),
    "GRU": lambda: GRU.init(2, 3, seed=2),
    "Stack": lambda: Stack([LSTM.init(2, 3, seed=3), GRU.init(3, 3, seed=4)]),
}


counts_memory = pytest.mark.skipif(MALLINFO is None, reason="the C library does not tell what it has given out")


@pytest.mark.meet(1)
@counts_memory
@pytest.mark.parametrize("by", ["steps", "blocks"])
@pytest.mark.parametrize("name", SMALL)
def test_a_million_steps(name, by):
    """They have the bits of one call over all of them, and keep no memory: not a byte in a hundred steps."""
    steps, layer = 1_000_000, SMALL[name]()
    x = np.random.default_rng(7).standard_normal((steps, 1, 2), np.float32)
    y, last = layer(x)
    stream, outputs = layer.stream(), np.zeros_like(y)
    block, before, kept = 1000, (), 0
    for t in range(0, steps, block):
        if by == "blocks":
            stream.run(x[t : t + block], out=outputs[t : t + block])
        else:
            for row, out in zip(x[t : t + block], outputs[t : t + block], strict=True):
                stream.step(row, out=out)
        if t == 20 * block:
            before = in_use()
        kept = max(kept, *np.subtract(in_use(), before)) if before else 0
    assert np.array_equal(outputs, y) and same(stream.state, last)
    assert kept < steps / 100


@counts_memory
@pytest.mark.parametrize("keep", [lambda: traced.libc.malloc(ctypes.c_size_t(1)), object], ids=["byte", "object"])
def test_what_is_kept_is_noticed(keep):
    """A byte of the C library's or an object of Python's, kept in each hundredth of a million steps."""
    before, kept = in_use(), [keep() for _ in range(10_000)]
    assert max(np.subtract(in_use(), before)) >= len(kept)


@every_layer
def test_out_allocates_nothing(name):
    stream, x, out = STREAMED[name](I, H, np.float32).stream(B), inputs(), np.empty((B, H), np.float32)
    rows = list(x)
    for row in rows:
        stream.step(row, out=out)
    steps = [partial(stream.step, row, out) for row in rows]
    assert peak_beside(steps) < 1000  # Python's own objects, of a few hundred bytes; no array, whose header is 112


def test_errors():
    layer, x = STREAMED["LSTM"](I, H, np.float32), inputs()
    stream, out = layer.stream(B), np.empty((B, H), np.float32)
    before = stream.state
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\).*\(3, 5\)"):
        stream.step(x[0, :2])
    with pytest.raises(TypeError, match=r"x has dtype float64.*float32.*; x\.astype\(np\.float32\) converts"):
        stream.step(x[0].astype(np.float64))
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\)"):
        stream.run(x[0])
    with pytest.raises(ValueError, match=r"out.*\(3, 19\)"):
        stream.step(x[0], out=out[:2])
    with pytest.raises(TypeError, match=r"out.*float32"):
        stream.step(x[0], out=out.astype(np.float64))
    with pytest.raises(TypeError, match="out"):
        stream.step(x[0], out=[1.0])
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out.*writeable"):
        stream.step(x[0], out=out)
    memory = np.zeros(B * (I + H), np.float32)
    with pytest.raises(ValueError, match="overlap"):
        stream.step(memory[: B * I].reshape(B, I), out=memory[3 : 3 + B * H].reshape(B, H))
    with pytest.raises(ValueError, match="rows"):
        stream.reset([3])
    expected = r"LSTM.stream: state.h has shape \(2, 19\); expected \(B, H\) = \(3, 19\) with B from the stream"
    with pytest.raises(ValueError, match=expected):
        stream.state = before.cs, before.h[:2]
    with pytest.raises(TypeError, match=r"LSTM.stream: state is of type ndarray; expected LSTMState\(cs, h\) or"):
        stream.state = before.h
    with pytest.raises(ValueError, match=r"LSTM.stream: state has 1 parts; expected LSTMState\(cs, h\)"):
        stream.state = (before.h,)
    assert same(stream.state, before)
    with pytest.raises(ValueError, match="batch"):
        layer.stream(0)
    with pytest.raises(TypeError, match="batch"):
        layer.stream(1.5)
    with pytest.raises(TypeError, match=r"Bidirectional.*last step"):
        Bidirectional(layer, layer).stream()


def test_a_state_that_does_not_fit_a_stack_changes_nothing():
    layer = Stack([LSTM.init(I, 33, seed=3), GRU.init(33, H, seed=4)])
    stream = layer.stream(B)
    stream.run(inputs())
    before = stream.state
    other = layer.stream(B).state
    for value, error, message in (
        (1, TypeError, r"Stack.stream: state is 1; expected \(0, 1\) or None"),
        (other[:1], ValueError, r"Stack.stream: state has 1 parts; expected \(0, 1\)"),
        ((other[0], (other[1].h[:2],)), ValueError, r"h has shape \(2, 19\)"),
        ((other[0], other[0]), ValueError, r"GRU.stream: state has 2 parts; expected GRUState\(h\)"),
    ):
        with pytest.raises(error, match=message):
            stream.state = value
        assert same(stream.state, before)
