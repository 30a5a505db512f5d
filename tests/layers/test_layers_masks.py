"""Masks: their steps at the front are the same call, and y repeats as Keras' does.

That a row has the bits that it has without the steps that are left out, `test_layers_ragged.py` says;
`tests/convert/test_against_keras.py` compares with Keras.
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import numpy as np
import pytest
from bits import leaves, like, same
from cases import rng
from kernel_cases import DTYPES
from layer_cases import IN_ANY_DIRECTION, draw, drawn_mask, run_all
from refusals import refusal
from traced import peak

from blockcell import GRU, LSTM, Bidirectional, Dense, Stack

T, B, I, H = 9, 7, 5, 6


def repeated(mask, reverse):
    """The pairs (t, source) of a row where y is that of a counted step, in the order of the direction."""
    pairs, source = [], None
    for t in range(len(mask))[:: -1 if reverse else 1]:
        source = t if mask[t] else source
        if source is not None:
            pairs.append((t, source))
    return pairs


def halves(layer, reverse=False):
    """Sizes and directions of the parts of y."""
    if isinstance(layer, Stack):
        return halves(layer.layers[-1], reverse)
    if isinstance(layer, Bidirectional):
        return halves(layer.fw, reverse) + halves(layer.bw, not reverse)
    return [(layer.output_size, not isinstance(layer, Dense) and reverse ^ layer.reverse)]


def repetitions(layer, mask):
    """Yield the columns of each part of y, with each row and its `repeated` pairs."""
    at = 0
    for size, reverse in halves(layer):
        for b in range(mask.shape[1]):
            yield np.s_[at : at + size], b, repeated(mask[:, b], reverse)
        at += size


# ---------------------------------------------------------------------------------------------------------------- bits
@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_ANY_DIRECTION)
def test_steps_at_the_front_are_the_same_call(name, dtype, seed):
    """All results, the gradients of the weights too: those of the rows with their steps at the front, and lengths."""
    for case in range(3):
        layer, g = IN_ANY_DIRECTION[name](I, H, DTYPES[dtype]), rng("front", name, seed, case)
        x, state, _, _ = draw(layer, T, B, name)
        mask = drawn_mask(g, T, B)
        d_y = g.standard_normal((T, B, layer.output_size)).astype(dtype)
        front = np.argsort(~mask, axis=0, kind="stable")
        at = front, np.arange(B)
        (y, d_x), *expected = run_all(layer, x[at], state, d_y[at], lengths=mask.sum(axis=0))
        (found_y, found_d_x), *results = run_all(layer, x, state, d_y, mask=mask)
        assert same((found_y[at], found_d_x[at], results), (y, d_x, expected))


@pytest.mark.meet(1)
@pytest.mark.parametrize("masked", ["zero", "repeat"])
@pytest.mark.parametrize("name", IN_ANY_DIRECTION)
def test_a_mask_of_lengths(name, masked):
    """What a mask and lengths say alike is the same, and a mask that is all True is none."""
    layer = IN_ANY_DIRECTION[name](I, H, np.float32)
    x, state, lengths, reset = draw(layer, T, B, name)
    within = np.arange(T)[:, None] < lengths
    by_lengths = run_all(layer, x, state, lengths=lengths, reset=reset, masked=masked)
    for options in (
        {"mask": within},
        {"mask": within, "lengths": lengths},
        {"mask": within, "lengths": np.full(B, T)},
        {"mask": np.ones((T, B), bool), "lengths": lengths},
        {"mask": within.tolist()},
    ):
        assert same(run_all(layer, x, state, reset=reset, masked=masked, **options), by_lengths)
    expected = run_all(layer, x, state, reset=reset)
    assert same(run_all(layer, x, state, reset=reset, mask=np.ones((T, B), bool), masked=masked), expected)
    assert same(run_all(layer, x, state, reset=reset, masked=masked), expected)


@pytest.mark.parametrize("name", IN_ANY_DIRECTION)
def test_no_row_has_a_step(name):
    layer = IN_ANY_DIRECTION[name](I, H, np.float32)
    x, state, _, reset = draw(layer, T, B, name)
    for masked in ("zero", "repeat"):
        y, last, tape = layer.forward(
            np.full_like(x, np.nan), state, mask=np.zeros((T, B), bool), masked=masked, reset=reset
        )
        d_x, d_state, grads = layer.backward(tape, np.ones_like(y), last)
        assert same(last, state) and same(d_state, state)
        assert not any(a.any() for a in (y, d_x, *grads.values())) and y.shape[:2] == d_x.shape[:2] == (T, B)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("last", [True, "ends"])
@pytest.mark.parametrize("name", ["gru", "reverse lstm", "bidirectional lstm"])
def test_a_head_on_the_last_step(name, last, batch_first):
    """It is the row's last one that counts; where a backward direction ends, its first one."""
    below, g = IN_ANY_DIRECTION[name](I, H, np.float32), rng("head", name, last)
    layer = Stack([below, Dense.init(below.output_size, 3, seed=0, last=last)])
    bias = g.standard_normal(3).astype(np.float32)
    layer.set_weights(**{"1.b": bias})
    x, state, _, _ = draw(layer, T, B, name)
    mask = drawn_mask(g, T, B)
    x[~mask] = np.nan
    d_y = g.standard_normal((B, 3)).astype(np.float32)
    turn = (lambda a: a.swapaxes(0, 1)) if batch_first else (lambda a: a)
    for masked in ("zero", "repeat"):
        options = {"mask": turn(mask), "masked": masked, "batch_first": batch_first}
        y, final, tape = layer.forward(turn(x), state, **options)
        d_x, d_state, _ = layer.backward(tape, d_y, final)
        assert same((y, final), layer(turn(x), state, **options)) and y.shape == (B, 3)
        for b in range(B):
            row, steps = slice(b, b + 1), mask[:, b]
            y1, final1, tape1 = layer.forward(x[steps, row], like(state, lambda a, row=row: a[row]))
            d_x1, d_state1, _ = layer.backward(tape1, d_y[row], final1)
            assert same((y[row], turn(d_x)[steps, row]), (y1, d_x1))
            assert same([a[row] for a in leaves((final, d_state))], leaves((final1, d_state1)))
        assert (y[~mask.any(axis=0)] == bias).all() and not turn(d_x)[~mask].any()


# ---------------------------------------------------------------------------------------------------------- repetition
@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_ANY_DIRECTION)
def test_y_repeats(name, dtype, seed):
    """As zeros do, but for y and what its gradient adds to that of the step that it repeats."""
    for case in range(3):
        layer, g = IN_ANY_DIRECTION[name](I, H, DTYPES[dtype]), rng("repeat", name, seed, case)
        x, state, lengths, reset = draw(layer, T, B, name)
        mask = drawn_mask(g, T, B)
        both = mask & (np.arange(T)[:, None] < lengths) if case == 2 else mask
        x[~both] = np.nan
        options = {"mask": mask, "reset": reset} | ({"lengths": lengths} if case == 2 else {})
        y, last, tape = layer.forward(x, state, **options)
        expected, d_y = np.zeros_like(y), g.standard_normal(y.shape).astype(dtype)
        summed = np.zeros(y.shape, np.float32 if dtype == "float16" else dtype)
        for part, b, pairs in repetitions(layer, both):
            added = {}  # from the last repetition to the first, and to the step itself
            for t, source in reversed(pairs):
                expected[t, b, part] = y[source, b, part]
                value = d_y[t, b, part].astype(summed.dtype)
                added[source] = added[source] + value if source in added else value
            for source, value in added.items():
                summed[source, b, part] = value
        results_y, found_last, found_tape = layer.forward(x, state, **options, masked="repeat")
        assert same((results_y, found_last), (expected, last))
        assert same(layer(x, state, **options, masked="repeat"), (expected, last))
        assert same(layer.backward(found_tape, d_y, last), layer.backward(tape, summed.astype(dtype), last))
        other_tape = layer.forward(
            x.swapaxes(0, 1),
            state,
            masked="repeat",
            batch_first=True,
            **options | {name: options[name].T for name in ("mask", "reset")},
        )[2]
        assert same(
            layer.backward(other_tape, d_y.swapaxes(0, 1), last)[1:],
            layer.backward(tape, summed.astype(dtype), last)[1:],
        )


# -------------------------------------------------------------------------------------------------- memory and errors
def test_memory():
    """A mask that is all True, or that leaves out steps at the end alone, copies nothing; another one copies x."""
    layer = LSTM.init(256, 8, seed=0)
    x, mask = np.zeros((100, 64, 256), np.float32), np.ones((100, 64), bool)
    most = {"none": peak(lambda: layer(x))[1]}
    for form, change in {"all": np.s_[:0], "end": np.s_[90:, 3], "start": np.s_[:10, 3]}.items():
        changed_mask = mask.copy()
        changed_mask[change] = False
        most[form] = peak(lambda changed_mask=changed_mask: layer(x, mask=changed_mask))[1]
    assert most["all"] < most["none"] + 0.1 * x.nbytes and most["end"] < most["none"] + 0.1 * x.nbytes
    assert most["start"] < most["none"] + 1.5 * x.nbytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": np.ones((5, 4))}, "TypeError: GRU: mask has dtype float64; expected bool"),
        ({"mask": [[1] * 4] * 5}, "TypeError: GRU: mask has dtype int64; expected bool"),
        ({"mask": np.ones(4, bool)}, "ValueError: GRU: mask has shape (4,); expected (T, B) = (5, 4) with both from x"),
        ({"mask": np.ones((5, 4, 1), bool)}, "ValueError: GRU: mask has shape (5, 4, 1); expected (T, B) = (5, 4)"),
        ({"masked": "last"}, "ValueError: GRU: masked is 'last'; expected 'zero' or 'repeat'"),
        ({"masked": None}, "ValueError: GRU: masked is None; expected 'zero' or 'repeat'"),
        ({"masked": np.array(["zero"])}, "ValueError: GRU: masked is of type ndarray; expected 'zero' or 'repeat'"),
    ],
)
def test_refused(given, said):
    layer = GRU.init(3, 2, seed=0)
    for call in (layer, layer.forward):
        with refusal(said):
            call(np.ones((5, 4, 3), np.float32), **given)
