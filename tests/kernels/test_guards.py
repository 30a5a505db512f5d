"""Every op, layer and stream on arrays whose first or last byte is the first or last that may be touched.

The page beside each array is protected, so that even a vector instruction that reads past an end is the end of the
process, and what a call only reads lies in pages that cannot be written.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch_layout
from bits import like, same
from cases import arguments
from guarded import SIDES, guarded
from kernel_cases import DTYPES, LEVELS, for_tests, run, sizes_of
from layer_cases import LAYERS, draw

import blockcell
from blockcell.optable import OPS

SIZES = [  # T, B, I, H: less than a line, tails of lines, of tiles and of panels; the last two on two threads
    (1, 1, 1, 1),
    (3, 2, 3, 5),
    (5, 1, 0, 33),
    (2, 7, 31, 15),
    (3, 13, 41, 17),
    (1, 20, 70, 130),
    (3, 37, 9, 63),
    (2, 3, 65, 129),
    (4, 67, 33, 47),
]
LAYER_SIZES = [(1, 1, 1, 1), (3, 5, 7, 19), (4, 37, 33, 47)]


@pytest.fixture
def one_thread():
    """Several would wait for each other all the time, and the ops have been there."""
    blockcell.set_num_threads(1)
    yield
    blockcell.set_num_threads(None)


@pytest.mark.meet(3)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_ops(name, dtype, level, side):
    for sizes in SIZES:
        threads = 2 if sizes in SIZES[-2:] else 1
        args = arguments(name, sizes_of(*sizes), dtype=DTYPES[dtype])
        expected = run(name, args, level, num_threads=1)
        guarded_args = {k: guarded(v, side) if isinstance(v, np.ndarray) else v for k, v in args.items()}
        out = tuple(guarded(np.full_like(array, np.nan), side, writable=True) for array in expected)
        assert same(run(name, guarded_args, level, threads, out), expected), sizes


def turned(array):
    return np.ascontiguousarray(array.swapaxes(0, 1))


@pytest.mark.meet(2)
@pytest.mark.usefixtures("one_thread", "level")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, dtype, side):
    guard = partial(guarded, side=side)
    for T, B, I, H in LAYER_SIZES:  # noqa: E741
        layer = LAYERS[name](I, H, DTYPES[dtype])
        x, state, lengths, reset = draw(layer, T, B)
        y = layer(x, state)[0]
        assert same([layer(guard(x), like(state, guard))[0]], [y])
        assert same([layer(guard(turned(x)), like(state, guard), batch_first=True)[0]], [turned(y)])
        for extras in ({}, {"lengths": lengths, "reset": reset}, {"mask": ~reset, "masked": "repeat"}):
            y, last, tape = layer.forward(x, state, **extras)
            d_x, *expected = layer.backward(tape, y, last)
            _, _, tape = layer.forward(guard(x), like(state, guard), **extras)
            assert same((d_x, *expected), layer.backward(tape, guard(y), like(last, guard)))
            options = {
                name: turned(value) if value.ndim == 2 else value for name, value in extras.items() if name != "masked"
            }
            options |= {"masked": extras.get("masked", "zero"), "batch_first": True}
            _, _, tape = layer.forward(guard(turned(x)), like(state, guard), **options)
            assert same((turned(d_x), *expected), layer.backward(tape, guard(turned(y)), like(last, guard)))


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", torch_layout.GATES)
def test_torch_layout(kind, dtype, side):
    dtype, guard = np.dtype(DTYPES[dtype]), partial(guarded, side=side)
    for k, (T, B, I, H) in enumerate(SIZES):  # noqa: E741
        g = np.random.default_rng(k)
        weights, _ = torch_layout.weights_of(g, kind, I, H, dtype)
        x, y, *states = (
            g.standard_normal(shape).astype(dtype)
            for shape in [(T, B, I), (T, B, H)] + 2 * len(torch_layout.STATES[kind]) * [(1, B, H)]
        )
        first, last = states[::2], states[1::2]
        tape = np.zeros((1, torch_layout.SAVED[kind], T, B, H), dtype)

        def calls(guard, out, x=x, first=first, weights=weights, y=y, tape=tape, last=last):
            """All results, forward and back."""
            call = kind, x.shape + y.shape[2:], 2
            x, first, weights, d_y = guard(x), [*map(guard, first)], [*map(guard, weights)], guard(y)
            outputs = [out(y), *map(out, last), out(tape)]
            torch_layout.forward(*call, x, weights, first, None, outputs)
            gradients = [out(x), *map(out, weights), *map(out, first)]
            read, incoming = (guard(outputs[0]), guard(outputs[-1])), [d_y, *map(guard, last)]
            torch_layout.backward(*call, *read, weights[:2], incoming, x, first, None, True, gradients)
            return outputs + gradients

        expected = calls(lambda array: array, np.zeros_like)
        assert same(calls(guard, partial(guard, writable=True)), expected), (T, B, I, H)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [blockcell.LSTM, blockcell.GRU])
def test_streams(kind, dtype, side):
    for T, B, I, H in LAYER_SIZES:  # noqa: E741
        layer = kind.init(I, H, seed=0, dtype=DTYPES[dtype])
        x = draw(layer, T, B)[0]
        expected = layer(x)[0]
        out = guarded(np.full_like(expected, np.nan), side, writable=True)
        assert same([layer.stream(B).run(guarded(x, side), out)], [expected])
        stream = layer.stream(B)
        for t in range(T):
            out = guarded(np.full_like(expected[t], np.nan), side, writable=True)
            assert same([stream.step(guarded(x[t], side), out)], [expected[t]])
        stream, rows = layer.stream(2 * B + 1), guarded(np.arange(B) * 2 + 1, side)
        lengths = guarded(np.full(B, T), side)
        out = guarded(np.full_like(expected, np.nan), side, writable=True)
        assert same([stream.run(guarded(x, side), out, rows=rows, lengths=lengths)], [expected])


PLANTED = """
import sys
import numpy as np
from guarded import guarded
from blockcell import _for_tests_float_base as kernels

longer = np.lib.stride_tricks.as_strided  # a view that says that it has one number more than there is
x, out, tanh = np.ones(37, np.float32), np.zeros(38, np.float32), (0, 0, 0)
if sys.argv[1] == "read":
    kernels.activate(longer(guarded(x, "ends"), (38,)), out, tanh)
elif sys.argv[1] == "write":
    kernels.activate(out, longer(guarded(x, "ends", writable=True), (38,)), tanh)
else:
    kernels.activate(x, guarded(x, "begins"), tanh)
"""


@pytest.mark.parametrize("fault", ["read", "write", "input"])
def test_planted(fault):
    """One number read past an end, one written, and a write to what is only to be read: each ends the process."""
    for_tests("base")
    command = [sys.executable, "-c", PLANTED, fault]
    result = subprocess.run(command, cwd=Path(guarded.__code__.co_filename).parent, capture_output=True)
    assert result.returncode in (-signal.SIGSEGV, -signal.SIGBUS) or b"AddressSanitizer: SEGV" in result.stderr
