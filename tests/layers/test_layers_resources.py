"""Memory and threads: layers keep no more than they need, and threads change no bits."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import itertools

import numpy as np
import pytest
from bits import leaves, same
from cases import rng
from kernel_cases import DTYPES
from layer_cases import CELLS, LAYERS, draw, reversed_cell, run_all
from traced import peak


# -------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", LAYERS)
def test_inference_keeps_nothing(name):
    """What a call allocates grows with T by y alone: no activations are saved."""
    layer = LAYERS[name](8, 16, np.float32)
    most = {}
    for T in (1000, 2000):
        x = np.zeros((T, 16, 8), np.float32)
        layer(x)
        result, most[T] = peak(lambda x=x: layer(x))
        assert len(result[0]) == T
    # Each step adds its y, and in a stack also the y of the layer below.
    below = {"stack": 34 + 18, "bidirectional stack": 6 + 16, "stack with dense": 16 + 6 + 16}
    needed = 4 * 16 * below.get(name, layer.output_size)
    assert (most[2000] - most[1000]) / 1000 <= 1.02 * needed
    tape = layer.forward(x)[2]
    assert most[2000] < 0.9 * sum(array.nbytes for array in {id(a): a for a in in_tape(tape.content)}.values())


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_done_where_all_rows_have_ended(name, dtype):
    """The steps after the longest row's end give zeros and are not in the tape; the others are as without them."""
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
            assert same([whole[:end]], [short]) and not whole[end:].any() and len(whole) == 40
        assert same(leaves(last), leaves(short_last)) and same(leaves(rest[0]), leaves(short_rest[0]))
        assert same(list(rest[1].values()), list(short_rest[1].values()))
        sizes, short_sizes = ([array.size for array in in_tape(t.content)] for t in (tape, short_tape))
        assert sizes == short_sizes


def in_tape(content):
    if isinstance(content, np.ndarray):
        yield content
    elif isinstance(content, (tuple, list)):
        for part in content:
            yield from in_tape(part)


# ------------------------------------------------------------------------------------------------------------- threads
@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LAYERS, *(f"reverse {name}" for name in CELLS)])
def test_threads_do_not_matter(name, dtype, set_num_threads):
    """Forward and back, in any direction."""
    for T, B, I, H in [(3, 2, 40, 300), (6, 40, 30, 100), (4, 130, 64, 64), (1, 20, 70, 130)]:
        layer = LAYERS[name.removeprefix("reverse ")](I, H, DTYPES[dtype])
        layer = reversed_cell(layer) if name.startswith("reverse") else layer
        x, state, lengths, reset = draw(layer, T, B, name)
        for options in ({}, {"lengths": lengths, "reset": reset}):
            results = []
            for count in (1, 2, 3):
                set_num_threads(count)
                results.append(list(itertools.chain(*run_all(layer, x, state, **options))))
            assert same(results[0], results[1]) and same(results[0], results[2])
