"""Layers computed by the formulas, step by step."""

from __future__ import annotations

import numpy as np

from blockcell import LSTM, RNN
from blockcell.formulas import FORMULAS, error_in_eps, lstm_layer, lstm_layer_grad


def rounded(value, dtype):
    return value.astype(dtype).astype(np.float64) if dtype == np.float16 else value


def op_of(cell):
    """Return the name of the op that a GRU or an RNN computes."""
    return "block_rnn" if isinstance(cell, RNN) else "block_gru_reset_after" if cell.reset_after else "block_gru"


def step(layer, x, state):
    """Compute the state after a step of rows x [B,I]."""
    arguments = {"x": x[None], **layer.weights, **layer._activations}
    if isinstance(layer, LSTM):
        options = {name: getattr(layer, name) for name in ("forget_bias", "cell_clip", "proj_clip")}
        result = lstm_layer(cs_prev=state[0], h_prev=state[1], **arguments, **options, gates=layer._gates)
        return [result.cs[0], result.h[0]]
    return [FORMULAS[op_of(layer)](seq_len_max=1, h_prev=state[0], **arguments).h[0]]


def row_gradients(cell, x, state, d_y, d_state):
    """Compute the results and the gradients of a row of n steps, each by its name; x and d_y are [n, 1, ...]."""
    arguments = {
        "x": x,
        **cell.weights,
        **{f"{name}_prev": value for name, value in state.items()},
        **cell._activations,
    }
    if isinstance(cell, LSTM):
        options = {"gates": cell._gates, "proj_clip": cell.proj_clip}
        bounds = {"forget_bias": cell.forget_bias, "cell_clip": cell.cell_clip}
        steps = lstm_layer(**arguments, **options, **bounds)
        last = {f"{name}_last_grad": value for name, value in d_state.items()}
        return steps._asdict(), lstm_layer_grad(**arguments, **options, states=steps, h_grad=d_y, **last)
    steps = FORMULAS[op_of(cell)](seq_len_max=len(x), **arguments)._asdict()
    h_grad = d_y.copy()
    h_grad[-1] += d_state["h"]
    grads = FORMULAS[f"{op_of(cell)}_grad"](seq_len_max=len(x), **arguments, **steps, h_grad=h_grad)._asdict()
    return steps, {name.removesuffix("_grad"): value for name, value in grads.items()}


def check(result, expected, bound, name):
    """Check the shape of a result, and its error, with a bound in eps of the largest entry."""
    assert result.shape == expected.shape, name
    error = error_in_eps(result, expected, float(np.finfo(result.dtype).eps))
    assert error <= bound, f"{name}: {error} eps"
