"""Layers to convert, and the results stored from Keras and PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from blockcell.layers import GRU, LSTM

GOLDEN = Path(__file__).parent / "golden"
SEED = int(os.environ.get("BLOCKCELL_SEED", 20))
T, B, I, H = 5, 2, 3, 4  # noqa: E741


def rng():
    return np.random.default_rng(SEED)


def lstm(g, dtype=np.float64, inputs=I, hidden=H, peephole=False, **options):
    shapes = {"w": (inputs + hidden, 4 * hidden), "b": (4 * hidden,)}
    shapes |= dict.fromkeys(("wci", "wcf", "wco"), (hidden,)) if peephole else {}
    return LSTM(**{name: g.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}, **options)


def gru(g, dtype=np.float64, inputs=I, hidden=H, reset_after=False, **options):
    shapes = (inputs + hidden, 2 * hidden), (inputs + hidden, hidden), (2 * hidden,), (hidden,), (hidden,)
    *weights, b_hc = (g.uniform(-1, 1, shape).astype(dtype) for shape in shapes)
    return GRU(*weights, **({"reset_after": True, "b_hc": b_hc} if reset_after else {}), **options)


def assert_same(first, second):
    """The layers are built alike, and their weights are equal and have the same names."""
    assert repr(first) == repr(second) and first.weights.keys() == second.weights.keys()
    for name, value in first.weights.items():
        assert value.dtype == second.weights[name].dtype
        np.testing.assert_array_equal(second.weights[name], value, err_msg=name)


def stored(package):
    """The results stored from a package: by case, its arrays by name."""
    cases = {}
    with np.load(GOLDEN / f"{package}.npz") as file:
        for key in file.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = file[key]
    return cases


def sigmoid(z):
    return 1 / (1 + np.exp(-z))
