"""Steps past a row's length reach no result and no gradient, whatever they hold and whatever they compute.

In a graph they run like any others. Where activations are not bounded they may overflow.
"""

from __future__ import annotations

import numpy as np
import pytest
from export_cases import LAYERS, LENGTHS, B, Case, I, drawn, exported, lstm
from graphs import LOOPS, named, on_onnxruntime

from blockcell import GRU, LSTM, RNN, Bidirectional

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
