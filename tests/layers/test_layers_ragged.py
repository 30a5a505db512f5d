"""Rows that end early take no part from then on: no other row and no thread sees it, and it saves their time."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import time

import numpy as np
import pytest
from bits import leaves, like, on_threads, same
from cases import rng
from kernel_cases import DTYPES
from layer_cases import CELLS, LAYERS, draw


def drawn_lengths(g, T, B):
    """Sorted or not; of rows that are all, partly or hardly padding, or not at all."""
    few = np.where(g.random(B) < 0.1, T, g.integers(0, max(T // 5, 1) + 1, B))
    lengths = [g.integers(0, T + 1, B), few, np.full(B, T), T - g.integers(0, 2, B)][g.integers(4)]
    return [lengths, np.sort(lengths), np.sort(lengths)[::-1]][g.integers(3)]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_alone(name, dtype):
    """Any numbers of steps, rows, units and threads, with resets or not: each row has the bits that it has alone."""
    g = rng("ragged", name)
    for seed in range(6):
        T, B, I, H = int(g.integers(1, 30)), int(g.integers(2, 70)), int(g.integers(1, 40)), int(g.integers(1, 40))
        layer = LAYERS[name](I, H, DTYPES[dtype])
        x, state, _, reset = draw(layer, T, B, name, seed)
        lengths, options = drawn_lengths(g, T, B), {"batch_first": bool(g.integers(2))}
        given = {"reset": reset} if g.integers(2) else {}
        d_y = g.standard_normal((T, B, layer.output_size)).astype(dtype)
        past = np.arange(T)[:, None] >= lengths
        x[past], d_y[past] = np.nan, np.nan
        turned = [each.swapaxes(0, 1) if options["batch_first"] else each for each in (x, d_y)]
        resets = {"reset": reset.swapaxes(0, 1) if options["batch_first"] else reset} if given else {}
        results = []
        for threads in (int(g.integers(2, 9)), 1):
            with on_threads(threads):
                called = layer(turned[0], state, lengths=lengths, **resets, **options)
                y, last, tape = layer.forward(turned[0], state, lengths=lengths, **resets, **options)
                d_last = like(last, lambda a: np.ones_like(a) / 3)
                results.append([called, (y, last), layer.backward(tape, turned[1], d_last)])
        assert same(results[0], results[1]) and same(*results[0][:2]), f"{seed=}"
        _, (y, last), (d_x, d_state, _) = results[0]
        y, d_x = [each.swapaxes(0, 1) if options["batch_first"] else each for each in (y, d_x)]
        assert not y[past].any() and not d_x[past].any(), f"{seed=}"
        for b in g.permutation(B)[:8]:
            row, steps = slice(b, b + 1), slice(lengths[b])
            alone = {"reset": reset[steps, row]} if given else {}
            y1, last1, tape1 = layer.forward(x[steps, row], like(state, lambda a, row=row: a[row]), **alone)
            final = like(d_last, lambda a, row=row: a[row])
            d_x1, d_state1, _ = layer.backward(tape1, d_y[steps, row], final)
            assert same((y[steps, row], d_x[steps, row]), (y1, d_x1)), f"{seed=} {b=}"
            assert same([a[row] for a in leaves((last, d_state))], leaves((last1, d_state1))), f"{seed=} {b=}"


def seconds_of(call):
    """CPU time, the best of some."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


@pytest.mark.parametrize("what", ["lengths", "mask", "mask with gaps"])
@pytest.mark.parametrize("name", [*CELLS, "bidirectional lstm"])
def test_rows_that_have_ended_cost_little(name, what):
    """Nine tenths of all steps are padding: without them a call takes a fifth of the time, so here less than half."""
    T, B, I, H = 80, 48, 32, 96
    layer, g = LAYERS[name](I, H, np.float32), rng("cost")
    x, state, _, _ = draw(layer, T, B, name)
    lengths = np.where(np.arange(B) % 12 == 5, T, 2)
    mask = np.arange(T)[:, None] < lengths
    mask = g.permuted(mask, axis=0) if what == "mask with gaps" else mask
    options = {"lengths": lengths} if what == "lengths" else {"mask": mask}
    with on_threads(1):
        whole, ragged = (seconds_of(lambda given=given: layer(x, state, **given)) for given in ({}, options))
    assert ragged < whole / 2
