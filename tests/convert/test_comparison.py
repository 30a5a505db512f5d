"""The comparison of converted layers with their sources, on sources that are layers with known faults."""

import random

import numpy as np
import pytest

from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack
from blockcell.convert import ConversionError
from blockcell.convert.comparison import Crossing, NotCompared, choose_sizes, compare, keep_random_states

LAYERS = {
    "LSTM": lambda: LSTM.init(6, 12, seed=1),
    "LSTM in float64": lambda: LSTM.init(6, 12, seed=1, dtype="float64"),
    "GRU in float16": lambda: GRU.init(6, 12, seed=2, dtype="float16"),
    "RNN": lambda: RNN.init(6, 12, seed=3),
    "Bidirectional": lambda: Bidirectional(GRU.init(6, 12, seed=4), GRU.init(6, 12, seed=5)),
    "Stack": lambda: Stack([Dense.init(6, 12, seed=8), LSTM.init(12, 12, seed=6), Dense.init(12, 12, seed=7)]),
    "large": lambda: LSTM.init(600, 300, seed=9),
}
FAULTS = {
    "flipped x": lambda layer, x: layer(x[::-1])[0],
    "flipped y": lambda layer, x: layer(x)[0][::-1],
    "flipped rows": lambda layer, x: layer(x[:, ::-1])[0],
    "no step after the 60th": lambda layer, x: np.where(np.arange(len(x))[:, None, None] < 60, layer(x)[0], 0),
    "residual": lambda layer, x: layer(x)[0] + x[..., :1],
    "scaled": lambda layer, x: layer(x)[0] * np.asarray(1.1, x.dtype),
    "fewer steps": lambda layer, x: layer(x)[0][::2],
    "another state": lambda layer, x: layer(np.concatenate([x[-1:], x]))[0][1:],
}


def crossing_of(layer, x, y):
    return Crossing("the model", layer, x, {"y": y}, lambda y, state: {"y": y})


def run_of(layer, source):
    """Return a run of a source, a function of a layer and x."""

    def run(T, B, seed, scale):
        g = np.random.default_rng(seed)
        x = (g.standard_normal((T, B, layer.input_size)) * scale).astype(layer.dtype)
        return [crossing_of(layer, x, source(layer, x))]

    return run


def in_other_order(layer, x):
    """Compute what the layer does from inputs whose columns are in another order, so sums are rounded otherwise."""
    first = layer.layers[0] if isinstance(layer, Stack) else layer
    names = [name for name in ("w", "w_ru", "w_c", "fw.w_ru", "fw.w_c", "bw.w_ru", "bw.w_c") if name in first.weights]
    order = np.random.default_rng(0).permutation(layer.input_size)
    old = {name: first.weights[name] for name in names}
    try:
        rows = [*order, *range(layer.input_size, len(old[names[0]]))]
        first.set_weights(**{name: array[rows] for name, array in old.items()})
        return layer(x[..., order])[0]
    finally:
        first.set_weights(**old)


@pytest.mark.parametrize("name", LAYERS)
def test_right_layers(name):
    layer = LAYERS[name]()
    compare("test", run_of(layer, in_other_order), choose_sizes(None, None, [6, 12]))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LAYERS)
def test_faults(name, fault):
    layer = LAYERS[name]()
    with pytest.raises(ConversionError, match=r"test: the layer computes something else than the model.*: Dropout 'd'"):
        compare("test", run_of(layer, FAULTS[fault]), choose_sizes(None, None, [6, 12]), ["Dropout 'd'"])


def test_message_names_the_first_difference():
    layer = LAYERS["LSTM"]()

    def source(layer, x):
        y = layer(x)[0].copy()
        y[2, 1, 4] += 0.5
        y[4, 0, 0] += 0.75
        return y

    with pytest.raises(ConversionError, match=r"y of the model at \(2, 1, 4\) is .*; the largest difference is 0.75"):
        compare("test", run_of(layer, source), choose_sizes(None, None, [6, 12]))


def test_saturated_layers_get_smaller_inputs():
    """A layer whose gates are saturated for x of ordinary size computes nearly the same forwards and backwards."""
    weights = LSTM.init(6, 12, seed=1).weights["w"] * 60
    layer = LSTM(weights, np.zeros(48, np.float32))
    compare("test", run_of(layer, in_other_order), choose_sizes(None, None, [6, 12]))
    with pytest.raises(ConversionError):
        compare("test", run_of(layer, FAULTS["flipped x"]), choose_sizes(None, None, [6, 12]))


@pytest.mark.parametrize(
    "source, reason",
    [
        (lambda layer, x: layer(x)[0] + np.random.default_rng().standard_normal(), "it is random"),
        (lambda layer, x: layer(x)[0] * np.nan, "not finite"),
    ],
)
def test_not_compared(source, reason):
    with pytest.raises(NotCompared, match=reason):
        compare("test", run_of(LAYERS["LSTM"](), source), choose_sizes(None, None))


@pytest.mark.parametrize("kept", ["steps", "columns"])
def test_layers_that_forget(kept):
    """A layer without recurrent weights says nothing about steps; one with zeros as weights of some columns does."""
    w = LSTM.init(6, 12, seed=1).weights["w"].copy()
    w[:3] = 0
    layer = Stack([LSTM(w, np.zeros(48, np.float32)), Dense.init(12, 2, seed=1, last=True)])
    compare("test", run_of(layer, lambda layer, x: layer(x)[0]), choose_sizes(None, None))
    if kept == "columns":
        w[6:] = 0
        b = np.repeat(np.float32([0, 0, -40, 0]), 12)  # gates i, c, f, o: nothing is remembered
        layer = Stack([LSTM(w, b), Dense.init(12, 2, seed=1, last=True)])
        with pytest.raises(NotCompared, match="the model hardly depends on step 0"):
            compare("test", run_of(layer, lambda layer, x: layer(x)[0]), choose_sizes(None, None))


@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_without_steps(batch_first):
    """Nothing depends on them, nor on steps behind the ends of all rows."""
    layer, lengths = LAYERS["GRU in float16"](), np.array([3, 0, 2])

    def run(T, B, seed, scale):
        x = np.random.default_rng(seed).standard_normal((B, T, 6) if batch_first else (T, B, 6)).astype(np.float16)
        options = {"lengths": lengths, "batch_first": batch_first}
        y = layer(x, **options)[0]
        return [Crossing("the model", layer, x, {"y": y}, lambda y, state: {"y": y}, options)]

    compare("test", run, choose_sizes(5, 3))


def test_many_steps_are_compared():
    """As many as a model may fix: then the dependence on some of them is looked at."""
    layer = LAYERS["LSTM"]()
    compare("test", run_of(layer, in_other_order), choose_sizes(3000, 1))
    with pytest.raises(ConversionError):
        compare("test", run_of(layer, FAULTS["no step after the 60th"]), choose_sizes(3000, 1))


def test_sizes():
    assert choose_sizes(None, None) == [(5, 3, False), (7, 4, False), (71, 3, True)]
    assert choose_sizes(None, None, [3, 5, 71]) == [(7, 4, False), (11, 6, False), (73, 4, True)]
    assert choose_sizes(None, None, range(20)) == [(20, 21, False), (22, 23, False), (71, 21, True)]
    assert choose_sizes(20, None) == [(20, 3, False), (20, 4, False)]
    assert choose_sizes(20, 1) == [(20, 1, False)]


def test_random_states_are_kept():
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with keep_random_states():
        random.random()
        np.random.seed(1)  # noqa: NPY002
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1][1])  # noqa: NPY002
