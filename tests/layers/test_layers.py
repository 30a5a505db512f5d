"""Layers compute what the ops do, bit for bit, and what a plain loop in float64 does; their gradients are derivatives.

Files of their own have the promises about rows (`test_layers_ragged.py`), what layers accept and refuse
(`test_layers_arguments.py`), weights (`test_layers_weights.py`), memory and threads (`test_layers_resources.py`).
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from bits import leaves, like, same
from by_formulas import check, loop
from cases import derivative, rng
from kernel_cases import BOUNDS, DTYPES, SIZES, run
from layer_cases import ATTRIBUTES, CELLS, LAYERS, SINGLE, draw

from blockcell import LSTM, LSTMState
from blockcell.optable import OPS


# --------------------------------------------------------------------------------------------- a plain loop in float64
@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("given", ["", "lengths", "reset", "lengths reset", "state", "state lengths reset"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_values(name, dtype, given):
    for T, B, I, H in [(1, 1, 1, 1), (7, 5, 3, 4), (5, 20, 9, 17)]:
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES)
        x, state, lengths, reset = draw(layer, T, B, name)
        values = {"state": state, "lengths": lengths, "reset": reset}
        plain = like(state, np.zeros_like), np.full(B, T), np.zeros((T, B), bool)
        everything = dict(zip(values, plain, strict=True)) | {key: values[key] for key in given.split()}
        counted = np.arange(T)[:, None] < everything["lengths"]
        expected, expected_last = loop(layer, x, everything["state"], counted, everything["reset"])
        # In float16 a state may be rounded to the other of two neighbours, if its float32 lies about halfway between
        # them. Later steps and layers inherit that error of 1 eps of the entry.
        bound = BOUNDS[dtype] * (2 if dtype == "float16" else 1)
        y, last, _ = layer.forward(x, **{key: values[key] for key in given.split()})
        check(y, expected, bound, f"y at {T, B, I, H}")
        for got, exact in zip(leaves(last), leaves(expected_last), strict=True):
            check(got, exact, bound, f"state at {T, B, I, H}")
        y2, last2 = layer(x, **{key: values[key] for key in given.split()})
        assert same([y, *leaves(last)], [y2, *leaves(last2)])


# ------------------------------------------------------------------------------------------------- the bits of the ops
def op_at(name, level):
    """An op on the kernels of a CPU level."""
    return lambda **args: run(name, {tensor.name: None for tensor in OPS[name].inputs} | args, level)


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CELLS)
def test_bits_of_the_ops(name, dtype, level):
    """Forward and backward, both at the same level."""
    for k, (T, B, I, H) in enumerate(SIZES):
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES if "ifco" not in name else {})
        x, state, _, _ = draw(layer, T, B, name)
        args = {"seq_len_max": T, "x": x, **layer.weights}
        g = rng("gradients", k)
        if isinstance(layer, LSTM):
            use = {"use_peephole": name != "lstm without peepholes"}
            names = ("BlockLSTMV2", "BlockLSTMGradV2") if layer.gate_order == "ifco" else ("BlockLSTM", "BlockLSTMGrad")
            args |= {"cs_prev": state.cs, "h_prev": state.h}
            more = {"cell_clip": layer.cell_clip} | ({"forget_bias": layer.forget_bias} if "ifco" not in name else {})
        else:
            use, more, names = {}, {}, (layer._op.name, f"{layer._op.name}_grad")
            args["h_prev"] = state.h
        op, grad = (op_at(name, level) for name in names)
        states = op(**args, **use, **more)
        y, last = layer(x, state)
        assert same([y, *last], [states.h, *([states.cs[-1]] if "cs" in args or use else []), states.h[-1]])
        y, last, tape = layer.forward(x, state)
        assert same([*tape.content.saved, y], states)

        d_y = g.standard_normal(y.shape).astype(dtype)
        d_last = like(last, lambda a, g=g: g.standard_normal(a.shape).astype(dtype))
        d_y[-1] = 0  # so the op's h_grad[-1] is the layer's gradient to the final state, and nothing is added
        incoming = {"h_grad": d_y.copy()}
        incoming["h_grad"][-1] = d_last.h
        if use:
            incoming["cs_grad"] = np.zeros_like(d_y)
            incoming["cs_grad"][-1] = d_last.cs
        d_x, d_state, grads = layer.backward(tape, d_y, d_last)
        expected = grad(**args, **states._asdict(), **incoming, **use)._asdict()
        results = {"x": d_x, **{f"{key}_prev": value for key, value in d_state._asdict().items()}, **grads}
        for key, value in results.items():
            np.testing.assert_array_equal(value, expected[f"{key}_grad"], err_msg=f"{key} at {T, B, I, H}")


# ----------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("given", ["", "lengths", "reset", "lengths reset"])
@pytest.mark.parametrize("name", LAYERS)
def test_backward_is_the_derivative(name, given):
    """Fourth-order central differences in float64, along random directions in every argument and weight."""
    T, B, I, H = 6, 5, 3, 4
    layer = LAYERS[name](I, H, np.float64)
    x, state, lengths, reset = draw(layer, T, B, name)
    options = {key: {"lengths": lengths, "reset": reset}[key] for key in given.split()}
    g = rng("directions", name, given)
    y, last, tape = layer.forward(x, state, **options)
    d_y = g.standard_normal(y.shape)
    d_last = like(last, lambda a: g.standard_normal(a.shape))
    d_x, d_state, grads = layer.backward(tape, d_y, d_last)
    assert grads.keys() == layer.weights.keys()

    def loss(x, state, weights):
        changed = copy.copy(layer)
        changed.set_weights(**weights)
        y, last = changed(x, state, **options)
        return (y * d_y).sum() + sum((a * d).sum() for a, d in zip(leaves(last), leaves(d_last), strict=True))

    def compare(gradient, direction, function, at, place):
        expected = derivative(function, at, direction)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-8, abs=1e-9), place

    for t, b in itertools.product(range(T), range(B)):  # every row of x: lengths and resets differ among them
        direction = np.zeros_like(x)
        direction[t, b] = g.standard_normal(I)
        compare(d_x, direction, lambda value: loss(value, state, {}), x, f"x[{t}, {b}]")
    for key, weight in layer.weights.items():
        direction = g.standard_normal(weight.shape)
        compare(grads[key], direction, lambda value, key=key: loss(x, state, {key: value}), weight, key)
    for k, (gradient, part) in enumerate(zip(leaves(d_state), leaves(state), strict=True)):
        for b in range(B):
            direction = np.zeros_like(part)
            direction[b] = g.standard_normal(part.shape[1])

            def changed(value, k=k):
                parts = iter(range(1000))
                return loss(x, like(state, lambda a: value if next(parts) == k else a), {})

            compare(gradient, direction, changed, part, f"part {k} of the state, row {b}")


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_backward_of_the_smaller_dtypes(name, dtype):
    """Against those in float64, from the same saved states."""
    for T, B, I, H in [(1, 1, 1, 1), (7, 5, 3, 4), (4, 70, 20, 33)]:
        if name not in SINGLE and T == 1:
            continue  # the only entry is a sum of two gradients that cancel
        layer = LAYERS[name](I, H, DTYPES[dtype], **ATTRIBUTES)
        wide = LAYERS[name](I, H, np.float64, **ATTRIBUTES)
        wide.set_weights(**{key: value.astype(np.float64) for key, value in layer.weights.items()})
        x, state, lengths, reset = draw(layer, T, B, name)
        y, last, tape = layer.forward(x, state, lengths=lengths, reset=reset)
        g = rng("gradients", name)
        d_y = g.standard_normal(y.shape).astype(dtype)
        d_last = like(last, lambda a, g=g: g.standard_normal(a.shape).astype(dtype))
        results = layer.backward(tape, d_y, d_last)
        wide_tape = dataclasses.replace(tape, layer=wide, content=widened(tape.content))
        expected = wide.backward(wide_tape, d_y.astype(np.float64), like(d_last, lambda a: a.astype(np.float64)))
        # In float16 the gradients that one layer passes to another are rounded once more.
        bound = BOUNDS[dtype] * (2 if dtype == "float16" and name not in SINGLE else 1)
        check(results[0], expected[0], bound, "d_x")
        for got, exact in zip(leaves(results[1]), leaves(expected[1]), strict=True):
            check(got, exact, bound, "d_state")
        for key, value in results[2].items():
            check(value, expected[2][key], bound, key)


def widened(content):
    """A tape's content in float64."""
    if isinstance(content, np.ndarray):
        return content.astype(np.float64) if content.dtype.kind == "f" else content
    if isinstance(content, dict):
        return {key: widened(value) for key, value in content.items()}
    if hasattr(content, "_fields"):
        return type(content)(*map(widened, content))
    return [widened(part) for part in content] if isinstance(content, (list, tuple)) else content


def test_final_gradient_alone():
    """A d_y that is None counts as zeros, and so do missing parts of a state."""
    layer = LAYERS["stack"](3, 4, np.float64)
    x, state, lengths, reset = draw(layer, 5, 4)
    y, last, tape = layer.forward(x, (state[0], None, None, (None,)), lengths=lengths, reset=reset)
    zeros = like(state, np.zeros_like)
    expected = layer.forward(x, (state[0], *zeros[1:]), lengths=lengths, reset=reset)
    assert same([y, *leaves(last)], [expected[0], *leaves(expected[1])])
    d_last = (LSTMState(None, last[0].h), None, *last[2:])
    whole = (LSTMState(np.zeros_like(last[0].cs), last[0].h), zeros[1], *last[2:])
    got, expected = layer.backward(tape, None, d_last), layer.backward(tape, np.zeros_like(y), whole)
    assert same([got[0], *leaves(got[1]), *got[2].values()], [expected[0], *leaves(expected[1]), *expected[2].values()])


def test_nothing_goes_through_where_h_is_clipped():
    layer = LSTM.init(3, 5, seed=0, dtype=np.float64, proj_size=4)
    x = np.random.default_rng(0).standard_normal((1, 2, 3))
    h = layer(x)[0]
    clip = float(np.median(np.abs(h)))
    clipped = np.abs(h) > clip
    bounded = LSTM(**layer.weights, proj_clip=clip)
    y, _, tape = bounded.forward(x)
    assert np.array_equal(y, np.clip(h, -clip, clip)) and clipped.any() and not clipped.all()
    d_y = np.random.default_rng(1).standard_normal(y.shape)
    open_tape = layer.forward(x)[2]
    at_bound = np.abs(h) >= clip
    gradients, expected = bounded.backward(tape, d_y), layer.backward(open_tape, np.where(at_bound, 0, d_y))
    assert np.array_equal(gradients[0], expected[0])
    assert all(np.array_equal(gradients[2][name], expected[2][name]) for name in expected[2])


def test_proj_clip_as_it_is_stored():
    """In float16 the bound is rounded as the other attributes are, and h at the bound counts as clipped."""
    layer = LSTM.init(3, 5, seed=0, dtype=np.float16, proj_size=2, proj_clip=0.1)
    layer.set_weights(w_p=np.full((5, 2), 60, np.float16))
    x = np.ones((1, 1, 3), np.float16)
    y, _, tape = layer.forward(x)
    assert (np.abs(y) == np.float16(0.1)).all()
    assert not layer.backward(tape, np.ones_like(y))[0].any()
