"""Layers with other activations than tanh and sigmoid: against the formulas, in every cell; what is refused."""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from bits import same
from cases import rng
from kernel_cases import BOUNDS, DTYPES
from layer_cases import gru, lstm, reset_after, rnn

from blockcell import GRU, LSTM, RNN, ops
from blockcell.activations import PARAMETERS
from blockcell.formulas import FORMULAS, error_in_eps

ALL = [*PARAMETERS, ("leaky_relu", 0.01), ("elu", 0.5), ("hard_sigmoid", 0.2, 0.5)]
CELLS = {"LSTM": lstm, "GRU": gru, "GRU reset after": reset_after, "RNN": rnn}


def make_layer(cell, dtype, activations, I=5, H=37):
    """One with weights so small that nothing grows."""
    layer = CELLS[cell](I, H, np.float64, **activations)
    layer.set_weights(**{name: 0.4 * weight for name, weight in layer.weights.items()})
    return type(layer)(**layer._arguments() | {name: w.astype(dtype) for name, w in layer.weights.items()})


def by_formulas(layer, x, state, tape, d_y):
    """y, the last state and all gradients; these from what the tape has, in whose precision kinks are decided."""
    args = {"seq_len_max": len(x), "x": x, **layer.weights, **layer._activations}
    states = tape.content.saved, tape.content.h
    if isinstance(layer, LSTM):
        args |= {"cs_prev": state.cs, "h_prev": state.h, "use_peephole": True}
        y = FORMULAS["BlockLSTM"](**args, forget_bias=layer.forget_bias, cell_clip=layer.cell_clip)
        saved = dict(zip(("i", "cs", "f", "o", "ci", "co", "h"), [*states[0], states[1]], strict=True))
        grads = FORMULAS["BlockLSTMGrad"](**args, **saved, cs_grad=np.zeros(d_y.shape), h_grad=d_y)
        return y.h, [y.cs[-1], y.h[-1]], grads._asdict()
    args["h_prev"] = state.h
    y = FORMULAS[layer._op.name](**args)
    saved = dict(zip(layer._op.result._fields, [*states[0], states[1]], strict=True))
    return y.h, [y.h[-1]], FORMULAS[f"{layer._op.name}_grad"](**args, **saved, h_grad=d_y)._asdict()


def pairs():
    """Each cell with each activation in each place, once beside the usual one and once beside another one."""
    for cell in CELLS:
        for k, activation in enumerate(ALL):
            other = ALL[(k + 3) % len(ALL)] if cell != "RNN" else None
            yield cell, {"activation": activation}
            if other:
                yield cell, {"recurrent_activation": activation}
                yield cell, {"activation": activation, "recurrent_activation": other}


@pytest.mark.meet(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("cell", "activations"), list(pairs()), ids=str)
def test_formulas(cell, activations, dtype, level):
    T, B, I = 2, 7, 5
    layer = make_layer(cell, DTYPES[dtype], activations)
    g = rng("activations", cell, str(activations))
    x = g.uniform(-1, 1, (T, B, I)).astype(dtype)
    state = type(layer(x)[1])(*(g.uniform(-0.5, 0.5, (B, 37)).astype(dtype) for _ in layer._state._fields))
    y, last, tape = layer.forward(x, state)
    d_y = g.standard_normal(y.shape).astype(dtype)
    d_x, d_first, grads = layer.backward(tape, d_y)
    y_true, last_true, grads_true = by_formulas(layer, x, state, tape, d_y)
    results = {"x": d_x, **{f"{name}_prev": part for name, part in d_first._asdict().items()}, **grads}
    compared = [("y", y, y_true), *zip(layer._state._fields, last, last_true, strict=True)]
    compared += [(f"gradient of {name}", value, grads_true[f"{name}_grad"]) for name, value in results.items()]
    for name, value, true in compared:
        error = error_in_eps(value, true, float(np.finfo(dtype).eps))
        assert error <= BOUNDS[dtype], f"{name} is {error:.1f} eps off"


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_a_layer_is_the_op(activation):
    T, B, I, H = 4, 3, 5, 21
    layer = make_layer("RNN", np.float32, {"activation": activation}, I, H)
    x = rng("rnn").uniform(-1, 1, (T, B, I)).astype(np.float32)
    zeros = np.zeros((B, H), np.float32)
    y, last, tape = layer.forward(x)
    args = {"seq_len_max": T, "x": x, "h_prev": zeros, **layer.weights, "activation": activation}
    assert same((y, last.h), (ops.block_rnn(**args).h, y[-1]))
    d_y = rng("rnn", 1).standard_normal(y.shape).astype(np.float32)
    d_x, d_first, grads = layer.backward(tape, d_y)
    expected = ops.block_rnn_grad(**args, h=y, h_grad=d_y)
    assert same((d_x, d_first.h, grads["w"], grads["b"]), tuple(expected))


# ------------------------------------------------------------------------------------------------------- the arguments
def test_what_a_layer_has():
    """The canonical form: the name alone where the parameters have their defaults."""
    values = [("leaky_relu", 0.2), ("hard_sigmoid", 0.2), ["elu", 2], ("relu",), "selu"]
    expected = ["leaky_relu", ("hard_sigmoid", 0.2, 0.5), ("elu", 2.0), "relu", "selu"]
    for value, canonical in zip(values, expected, strict=True):
        layer = GRU.init(2, 3, seed=0, activation=value, recurrent_activation=value)
        assert layer.activation == layer.recurrent_activation == canonical
        for again in (copy.copy(layer), pickle.loads(pickle.dumps(layer))):
            assert repr(again) == repr(layer) and again.activation == canonical
        assert f"activation={canonical!r}, recurrent_activation={canonical!r}" in repr(layer)
    assert repr(RNN.init(2, 3)) == "RNN(input_size=2, hidden_size=3, dtype=float32)"
    assert not hasattr(RNN.init(2, 3), "recurrent_activation")
    with pytest.raises(AttributeError):
        LSTM.init(2, 3).activation = "relu"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("swich", ValueError, "activation is 'swich'; expected one of tanh, sigmoid, relu, leaky_relu, elu, selu, "),
        (("relu", 0.1), ValueError, "activation has 1 parameters for relu; expected none"),
        (("elu", 1, 2), ValueError, "activation has 2 parameters for elu; expected alpha"),
        (("leaky_relu", 0), ValueError, "activation has the negative_slope 0; expected a finite number above 0"),
        (("elu", np.nan), ValueError, "activation has the alpha nan; expected a finite number above 0"),
        (("hard_sigmoid", np.inf), ValueError, "activation has the scale inf; expected a finite number"),
        (("elu", 10**400), ValueError, "activation has the alpha 1"),
        (("elu", "1"), TypeError, "activation has the alpha '1'; expected a real number"),
        (("elu", True), TypeError, "activation has the alpha True; expected a real number"),
        (None, TypeError, "activation is None; expected a name or a tuple of a name and parameters, such as "),
        (np.tanh, TypeError, "activation is of type ufunc; expected a name or a tuple of a name and parameters"),
        ((), TypeError, "activation is of type tuple; expected a name or a tuple"),
        (("elu",) * 2, TypeError, "activation has the alpha 'elu'; expected a real number"),
    ],
    ids=str,
)
def test_refused(value, error, message):
    for cls in (LSTM, GRU, RNN):
        with pytest.raises(error, match=re.escape(f"{cls.__name__}: {message}")):
            cls.init(2, 3, activation=value)
    with pytest.raises(error, match=re.escape(f"LSTM: recurrent_{message}")):
        LSTM.init(2, 3, recurrent_activation=value)
    one = np.ones((1, 1), np.float32)
    args = {"seq_len_max": 1, "x": one[None], "h_prev": one, "w": np.ones((2, 1), np.float32), "b": one[0]}
    with pytest.raises(error, match=re.escape(f"block_rnn: {message}")):
        ops.block_rnn(**args, activation=value)
