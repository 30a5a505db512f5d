"""Layers computed by the formulas, step by step."""

from __future__ import annotations

import numpy as np
from bits import like
from layer_formulas import dense

from blockcell import LSTM, RNN, Bidirectional, Dense, Stack
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


def loop(layer, x, state, counted, reset, reverse=False):
    """Compute what a layer does, row by row, each without the steps that are not counted [T,B]; return y and the state.

    After each step, states are rounded to float16 in layers of float16.
    """
    if isinstance(layer, Stack):
        last = []
        for part, first in zip(layer.layers, state, strict=True):
            x, final = loop(part, x, first, counted, reset, reverse)
            last.append(final)
        return x, tuple(last)
    if isinstance(layer, Bidirectional):
        fw, last_fw = loop(layer.fw, x, state[0], counted, reset, reverse)
        bw, last_bw = loop(layer.bw, x, state[1], counted, reset, not reverse)
        return np.concatenate([fw, bw], axis=2), (last_fw, last_bw)
    if isinstance(layer, Dense):
        y = rounded(dense(x=x, **layer.weights, activation=layer.activation), layer.dtype)
        return np.where(counted[..., None], y, 0), ()

    y = np.zeros((*x.shape[:2], layer.output_size))
    last = like(state, lambda a: a.astype(np.float64))
    for b in range(x.shape[1]):
        now = [part[b : b + 1] for part in last]
        steps = np.flatnonzero(counted[:, b])
        is_first = np.diff(reset[:, b].cumsum()[steps], prepend=0) > 0  # of an episode
        if reverse ^ layer.reverse:  # the state is zero between the first step of an episode and the one before
            steps, is_first = steps[::-1], np.append(False, is_first[:0:-1])[: len(steps)]
        for t, begins in zip(steps, is_first, strict=True):
            if begins:
                now = [np.zeros_like(part) for part in now]
            now = [rounded(part, layer.dtype) for part in step(layer, x[t, b : b + 1], now)]
            y[t, b] = now[-1][0]
        for part, value in zip(last, now, strict=True):
            part[b] = value[0]
    return y, last


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
