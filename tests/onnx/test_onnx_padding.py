"""Steps past a row's length reach no result and no gradient, whatever they hold and whatever they compute.

In a graph they run like any others. Where activations are not bounded they may overflow.
"""

from __future__ import annotations

import numpy as np
import pytest
from export_cases import LAYERS, LENGTHS, B, Case, I, dense, drawn, exported, gru, lstm, rnn
from graphs import LOOPS, named, on_onnxruntime
from training_cases import LOSSES, OPTIMIZERS, Training, errors

from blockcell import GRU, LSTM, RNN, Bidirectional, Stack

STEPS, ENDS = 20, np.array([3, 0, 2, 1, 3])
GROWING = ["relu", ("leaky_relu", 0.3), "elu", "selu", "softplus", "exponential", "linear"]
FACTORS = (1e20, 3.0, 0.7, 0.5, 0.3, 0.2)
CELLS = [
    (LSTM, {}),
    (LSTM, {"use_peephole": True, "gate_order": "ifco"}),
    (LSTM, {"use_peephole": True, "coupled": True}),
    (LSTM, {"proj_size": 3}),
    (GRU, {}),
    (GRU, {"reset_after": True}),
    (RNN, {}),
]
FORMS = [(loop, static) for loop in LOOPS for static in (False, True)]


def grown(cell, factor, place):
    """The cell with weights of this size, which let its states grow from step to step."""
    H = cell.hidden_size
    signs = {name: np.ones(array.shape[-1:]) for name, array in cell.weights.items()}
    if place == "activation" and isinstance(cell, GRU):
        signs["w_ru"][H:] = signs["b_ru"][H:] = -1  # u near 0 takes the candidate, which is not bounded
    if place == "activation" and isinstance(cell, LSTM) and cell.coupled:
        signs["w"][H : 2 * H] = signs["b"][H : 2 * H] = -1  # and f near 0 makes i 1
    cell.set_weights(**{name: factor * signs[name] * np.abs(array) for name, array in cell.weights.items()})
    return cell


def overflows(case):
    """Whether steps past the rows' lengths, of x = 0, would overflow, but no number that counts."""
    past = np.arange(STEPS)[:, None, None] >= case.given["lengths"][:, None]
    y = case.layer(np.where(past, 0, case.arguments["x"]), case.arguments.get("state"))[0]
    return not np.isfinite(y).all() and all(np.isfinite(array).all() for array in case.expected.values())


def overflowing(kind, options, place, activation, padding):
    """A case of training, in both directions, in which steps past the rows' lengths overflow."""
    for factor in FACTORS:
        given = {"dtype": "float64", **options, place: activation}
        cells = (drawn(kind.init(I, 4, seed=seed, **given)) for seed in (1, 2))
        layer = Bidirectional(*(grown(cell, factor, place) for cell in cells))
        case = Case(layer, train=True, sizes=(STEPS, B), ends=ENDS, padding=padding)
        with np.errstate(over="ignore", invalid="ignore"):
            case.expect_formulas()
        if overflows(case):
            return case
    raise AssertionError("there is no such case")


PLACES = [
    (kind, options, place)
    for kind, options in CELLS
    for place in ("activation", "recurrent_activation")
    if kind is not RNN or place == "activation"
]


@pytest.mark.meet(2)
@pytest.mark.parametrize("padding", [np.nan, np.inf])
@pytest.mark.parametrize(("loop", "static"), FORMS)
@pytest.mark.parametrize("activation", GROWING, ids=lambda name: name if isinstance(name, str) else name[0])
@pytest.mark.parametrize(("kind", "options", "place"), PLACES)
def test_gradients_of_steps_that_overflow(kind, options, place, activation, loop, static, padding):
    """They are the formulas', row by row, each of its own length."""
    case = overflowing(kind, options, place, activation, padding)
    model = exported(case.layer, case, loop=loop, static=static, sizes={"T": STEPS})
    case.check(model, limit=1e-11)  # as exp(z) is off by z eps


# ------------------------------------------------------------------------------------------------------------- training
LONG = 400  # steps, in which the states of these layers overflow, though they grow slowly
NETWORKS = {
    "head": lambda: Stack([grown(gru(4, "float64", activation="linear"), 20, "activation"), dense(3, "float64", 4)]),
    "last": lambda: Stack(
        [
            Bidirectional(
                grown(lstm(4, "float64", activation="relu"), 20, "activation"),
                Stack([grown(rnn(4, "float64", activation="softplus"), 20, "activation"), gru(4, "float64", 4)]),
            ),
            grown(gru(4, "float64", 8, reset_after=True, activation="relu"), 20, "activation"),
            dense(5, "float64", 4, activation="relu"),
            dense(3, "float64", 5, last=True),
        ]
    ),
    "reverse": lambda: Stack(
        [
            grown(lstm(4, "float64", recurrent_activation="exponential"), 0.5, "recurrent_activation"),
            grown(rnn(4, "float64", 4, activation="linear", reverse=True), 20, "activation"),
        ]
    ),
}


def batch_of(training, ends, padding):
    """A batch with these lengths, and this value where no step counts."""
    batch = training.batch(0)
    batch |= {"lengths": ends, "x": batch["x"].copy(), "target": batch["target"].copy()}
    past = np.arange(training.sizes[0])[:, None] >= ends
    counts = ~past if training.layer._over_time else ends > 0
    batch["x"] = np.where(past[..., None], padding, np.nan_to_num(batch["x"], nan=0.5))
    if training.loss == "softmax_cross_entropy":
        batch["target"] = np.where(counts, np.maximum(batch["target"], 0), -7)
    else:
        batch["target"] = np.where(counts[..., None], np.nan_to_num(batch["target"], nan=0.5), padding)
    return batch


@pytest.mark.meet(2)
@pytest.mark.parametrize("padding", [np.nan, np.inf])
@pytest.mark.parametrize("loop", ["scan", "loop"])
@pytest.mark.parametrize("criterion", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_steps_that_overflow(name, criterion, loop, padding):
    """The model of a step gives what the layers give, with resets, masks and states."""
    layer = NETWORKS[name]()
    options = {"sizes": (LONG, B), "reset": True, "mask": True, "state": True, "max_norm": 1.0}
    training = Training(layer, criterion, "adam", **OPTIMIZERS["adam"], **options)
    batch = batch_of(training, ENDS, padding)
    batch["reset"][4:] = False
    x = np.where(np.arange(LONG)[:, None, None] >= ENDS[:, None], 0, batch["x"])
    assert not np.isfinite(layer(x, training.state)[0]).all()
    found, expected = training.first_step(training.model(loop=loop), batch=batch)
    assert all(np.isfinite(array).all() for array in expected.values())
    off = errors(found, expected)
    assert max(off.values()) <= 1e-12, off


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("loop", "static"), FORMS)
def test_gradients_to_outputs_that_are_clipped(loop, static, bad):
    """They stop at a projection's clip, whatever they are, and nothing else is what they were."""
    layer = lstm(5, "float64", proj_size=3, proj_clip=0.1)
    case = Case(layer, train=True, reset=True)
    is_clipped = np.abs(case.expected["y"]) == 0.1
    assert 5 < is_clipped.sum() < is_clipped.size / 2
    case.feeds["d_y"] = case.arguments["d_y"] = np.where(is_clipped, bad, case.feeds["d_y"])
    case.expected = case.computed()
    assert all(np.isfinite(array).all() for array in case.expected.values())
    case.check(exported(layer, case, loop=loop, static=static))


# ----------------------------------------------------------------------------------------- states of rows without steps
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["LSTM with all", "GRU", "GRU after", "Bidirectional", "Projected", "Both ends"])
def test_states_of_rows_without_steps(name, bad):
    """They are the states after the sequence, too, and reach nothing else, whatever they are."""
    layer = LAYERS[name]("float64")
    case, empty = Case(layer, train=True), LENGTHS == 0
    model = exported(layer, case)
    right = named(model, on_onnxruntime(model, case.feeds))
    spoiled = {key: array.copy() for key, array in case.feeds.items()}
    for key, array in spoiled.items():
        if key.endswith("_prev"):
            array[empty] = bad
    for key, found in named(model, on_onnxruntime(model, spoiled)).items():
        if f"{key}_prev" in spoiled:
            assert not np.isfinite(found[empty]).any()
            found, right[key] = found[~empty], right[key][~empty]
        np.testing.assert_array_equal(found, right[key], err_msg=key)
