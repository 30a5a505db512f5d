"""Streams: the bits of one call over all steps, no allocation, errors; states and weights are in `test_stateful.py`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from bits import same
from layer_cases import STREAMED
from refusals import refusal
from traced import MALLINFO, in_use, peak_beside

from blockcell import GRU, LSTM, Stack

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


@pytest.mark.meet(1)
@pytest.mark.skipif(MALLINFO is None, reason="the C library does not tell what it has given out")
@pytest.mark.parametrize("by", ["steps", "blocks"])
@pytest.mark.parametrize("name", SMALL)
def test_a_million_steps(name, by):
    """They have the bits of one call over all of them, and keep no memory: not a byte in a hundred steps."""
    x = np.random.default_rng(7).standard_normal((1_000_000, 1, 2), np.float32)
    assert any(kept_by_steps(SMALL[name](), x, by) < len(x) / 100 for _ in range(3))  # threads of pytest allocate, too
    before, held = in_use(), [(object(), bytes(1000)) for _ in range(len(x) // 100)]
    assert min(np.subtract(in_use(), before)) >= len(held)  # both would be noticed


def kept_by_steps(layer, x, by):
    y, last = layer(x)
    stream, outputs = layer.stream(), np.zeros_like(y)
    block, before, kept = 1000, (), 0
    for t in range(0, len(x), block):
        if by == "blocks":
            stream.run(x[t : t + block], out=outputs[t : t + block])
        else:
            for row, out in zip(x[t : t + block], outputs[t : t + block], strict=True):
                stream.step(row, out=out)
        if t == 20 * block:
            before = in_use()
        kept = max(kept, *np.subtract(in_use(), before)) if before else 0
    assert np.array_equal(outputs, y) and same(stream.state, last)
    return kept


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
    stream, out, read_only = layer.stream(B), np.empty((B, H), np.float32), np.empty((B, H), np.float32)
    read_only.flags.writeable = False
    before, memory = stream.state, np.zeros(B * (I + H), np.float32)
    expected = "expected a writeable C-contiguous float32 array of shape (3, 19)"
    in_memory, in_memory_too = memory[: B * I].reshape(B, I), memory[3 : 3 + B * H].reshape(B, H)
    for call, said in (
        (lambda: stream.step(x[0, :2]), "ValueError: x has shape (2, 5); expected (3, 5)"),
        (
            lambda: stream.step(np.float64(x[0])),
            "TypeError: x has dtype float64; expected float32, that of the layer; x.astype(np.float32) converts it",
        ),
        (lambda: stream.run(x[0]), "ValueError: x has shape (3, 5); expected (T, 3, 5)"),
        (lambda: stream.step(x[0], out=out[:2]), f"ValueError: out is float32 (2, 19); {expected}"),
        (lambda: stream.step(x[0], out=np.float64(out)), f"TypeError: out is float64 (3, 19); {expected}"),
        (lambda: stream.step(x[0], out=[1.0]), f"TypeError: out is list; {expected}"),
        (lambda: stream.step(x[0], out=read_only), f"ValueError: out is float32 (3, 19); {expected}"),
        (lambda: stream.step(in_memory, out=in_memory_too), "ValueError: out overlaps x; give it memory of its own"),
        (lambda: stream.reset([3]), "ValueError: rows has 3; expected indices from -3 to 2"),
        (
            lambda: setattr(stream, "state", (before.cs, before.h[:2])),
            "ValueError: LSTM.stream: state.h has shape (2, 19); expected (B, H) = (3, 19) with B from the stream",
        ),
        (
            lambda: setattr(stream, "state", before.h),
            "TypeError: LSTM.stream: state is of type ndarray; expected LSTMState(cs, h) or",
        ),
        (
            lambda: setattr(stream, "state", (before.h,)),
            "ValueError: LSTM.stream: state has 1 parts; expected LSTMState(cs, h)",
        ),
        (lambda: layer.stream(0), "ValueError: batch is 0; expected at least 1"),
        (lambda: layer.stream(1.5), "TypeError: batch is 1.5; expected an integer"),
    ):
        with refusal(said):
            call()
    assert same(stream.state, before)


def test_a_state_that_does_not_fit_a_stack_changes_nothing():
    layer = Stack([LSTM.init(I, 33, seed=3), GRU.init(33, H, seed=4)])
    stream = layer.stream(B)
    stream.run(inputs())
    before = stream.state
    other = layer.stream(B).state
    for value, said in (
        (1, "TypeError: Stack.stream: state is 1; expected (0, 1) or None"),
        (other[:1], "ValueError: Stack.stream: state has 1 parts; expected (0, 1)"),
        ((other[0], (other[1].h[:2],)), "ValueError: h has shape (2, 19)"),
        ((other[0], other[0]), "ValueError: GRU.stream: state has 2 parts; expected GRUState(h)"),
    ):
        with refusal(said):
            stream.state = value
        assert same(stream.state, before)
