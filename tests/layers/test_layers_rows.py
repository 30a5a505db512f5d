"""A row's results depend on the row alone, not on other rows, padding or states that a reset drops."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import numpy as np
import pytest
from bits import leaves, like, same
from cases import rng
from kernel_cases import DTYPES
from layer_cases import CELLS, LAYERS, draw, run_all


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_order_of_rows_does_not_matter(name, dtype):
    """A row has the same bits wherever it stands, in batches sorted by length and in others."""
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
        assert same([y[:, order], d_x[:, order]], [y2, d_x2])
        assert same([a[order] for a in leaves((last, d_state))], leaves((last2, d_state2)))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_of_its_length_alone(name, dtype):
    """A row of a padded batch has the bits that it has alone without padding, forward and backward."""
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
        assert same([y[:length, row], d_x[:length, row]], [y1, d_x1])
        assert same([a[row] for a in leaves((last, d_state))], leaves((last1, d_state1)))
        assert not y[length:, row].any() and not d_x[length:, row].any()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_comes_out_of_padding(name, dtype):
    """NaN in the padding of x and of d_y reaches no result."""
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
        assert same(one, other)
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
