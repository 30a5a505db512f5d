"""The kernels that take weights as PyTorch has them, beside the layers: the same bits in everything that they return.

Weights, states, sizes, the layout in memory of x, y and their gradients, lengths, direction, threads and what is asked
for are drawn at random.  BLOCKCELL_SEED repeats a run.
"""

import os

import numpy as np
import pytest
from bits import on_threads, same
from torch_layout import SAVED, STATES, run, weights_of

from blockcell import GRU, LSTM
from blockcell._layers import marks_of

SEED = int(os.environ.get("BLOCKCELL_SEED", 17))


def placed(g, array):
    """The same values with the rows of the first two axes somewhere else in memory."""
    T, B, size = array.shape
    place = g.integers(3)
    if place == 0:
        return array.copy()
    if place == 1:  # batch_first
        return array.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    wide = np.full((T, B, size + int(g.integers(1, 20))), np.nan, array.dtype)  # a part of the columns
    at = int(g.integers(wide.shape[2] - size + 1))
    wide[..., at : at + size] = array
    return wide[..., at : at + size]


def random_sizes(g):
    """T, B, I, H: single steps with few and many rows, of few and many weights; sequences."""
    single = g.random() < 0.4
    T = 1 if single else int(g.integers(2, 40))
    B = int(g.choice([1, 2, 3, 5, 16, 17, 40, 130] if single else [1, 2, 3, 4, 7, 16, 33]))
    inputs, hidden = (int(g.integers(1, top)) for top in ((300, 300) if B < 40 and g.random() < 0.3 else (70, 70)))
    return T, B, 0 if g.random() < 0.03 else inputs, hidden


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_equals_the_layer(kind, dtype):
    dtype = np.dtype(dtype)
    for k in range(80):
        g = np.random.default_rng([SEED, k])
        T, B, inputs, hidden = sizes = random_sizes(g)
        reverse, training, threads = bool(g.integers(2)), g.random() < 0.8, int(g.integers(1, 4))
        where = f"seed {SEED}, configuration {k}: {sizes=}, {reverse=}, {threads=}"
        w_ih, w_hh, named = weights_of(g, kind, inputs, hidden, dtype)
        options = {"gate_order": "ifco"} if kind == "lstm" else {"reset_after": True}
        layer = (LSTM if kind == "lstm" else GRU)(**named, reverse=reverse, **options)
        x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, hidden))
        first, d_last = ([g.uniform(-1, 1, (B, hidden)).astype(dtype) for _ in range(STATES[kind])] for _ in range(2))
        lengths = g.integers(0, T + 1, B) if g.random() < 0.4 else None
        marks = marks_of(T, B, lengths, None, reverse)
        biases = [named["b"]] if kind == "lstm" else [named["b_ru"], named["b_c"], named["b_hc"]]

        with on_threads(int(g.integers(1, 4))):
            expected_y, expected_last, tape = layer.forward(x, tuple(first), lengths=lengths)
            expected_d_x, expected_d_first, grads = layer.backward(tape, d_y, tuple(d_last))

        x, y = placed(g, x), placed(g, np.zeros_like(expected_y))
        last = [np.empty_like(a) for a in first]
        saved = np.empty((SAVED[kind], T, B, hidden), dtype) if training else None
        arrays = x, *first, w_ih, w_hh, *biases, y, saved, *last
        run(kind, "torch", sizes, threads, dtype, (*arrays, marks, reverse))
        for name, found, expected in zip(("y", "last", "last"), (y, *last), (expected_y, *expected_last), strict=False):
            assert same(found, expected), f"{where}: {name}"
        if not training:
            continue

        wants_x, wants_weights = g.random() < 0.7, g.random() < 0.7
        adds = dtype != np.float16 and g.random() < 0.5  # of float16 the sum is rounded once, which a layer does not do
        before = g.standard_normal(x.shape).astype(dtype)
        d_x = placed(g, before if adds else np.zeros_like(before)) if wants_x else None
        d_first = [np.empty_like(a) for a in first]
        d_w = [np.empty_like(a) for a in (w_ih, w_hh, *biases)] if wants_weights else [None] * (2 + len(biases))
        arrays = x, *first, w_ih, w_hh, saved, y, placed(g, d_y), *d_last, d_x, adds, *d_first, *d_w
        run(kind, "torch_grad", sizes, threads, dtype, (*arrays, marks, reverse))
        pairs = {"d_first": (np.stack(d_first), np.stack(expected_d_first))}
        if wants_x:
            pairs["d_x"] = d_x, before + expected_d_x if adds else expected_d_x
        if wants_weights:
            w = grads["w"] if kind == "lstm" else np.concatenate([grads["w_ru"], grads["w_c"]], axis=1)
            names = ["b"] if kind == "lstm" else ["b_ru", "b_c", "b_hc"]
            pairs |= {"d_w_ih": (d_w[0], w[:inputs].T), "d_w_hh": (d_w[1], w[inputs:].T)}
            pairs |= {f"d_{name}": (array, grads[name]) for name, array in zip(names, d_w[2:], strict=True)}
        for name, (found, expected) in pairs.items():
            assert same(found, expected), f"{where}: {name}"
    print(f"seed {SEED}, {kind}, {dtype}")
