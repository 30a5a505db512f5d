"""Layers computed by the formulas, step by step."""

from __future__ import annotations

import numpy as np

from blockcell import GRU, LSTM, RNN
from blockcell.formulas import FORMULAS, error_in_eps, lstm_layer, lstm_layer_grad


def rounded(value, dtype):
    return value.astype(dtype).astype(np.float64) if dtype == np.float16 else value


def step(layer, x, state):
    weights = layer.weights | {"activation": layer.activation}
    if isinstance(layer, RNN):
        return [FORMULAS["block_rnn"](seq_len_max=1, x=x[None], h_prev=state[0], **weights).h[0]]
    weights["recurrent_activation"] = layer.recurrent_activation
    if isinstance(layer, GRU) and layer.reset_after:
        return [FORMULAS["block_gru_reset_after"](seq_len_max=1, x=x[None], h_prev=state[0], **weights).h[0]]
    if isinstance(layer, GRU):
        return [FORMULAS["GRUBlockCell"](x=x, h_prev=state[0], **weights).h]
    if layer.coupled or "w_p" in weights:
        attributes = {name: getattr(layer, name) for name in ("forget_bias", "cell_clip", "proj_clip")}
        gates = ("ci", "f", "o") if layer.coupled else ("i", "ci", "f", "o")
        result = lstm_layer(x=x[None], cs_prev=state[0], h_prev=state[1], **weights, **attributes, gates=gates)
        return [result.cs[0], result.h[0]]
    if layer.gate_order == "ifco":
        for name in ("w", "b"):
            i, f, ci, o = np.split(weights[name], 4, axis=-1)
            weights[name] = np.concatenate([i, ci, f, o], axis=-1)
    unused = {name: None for name in ("wci", "wcf", "wco") if name not in weights}
    attributes = {"forget_bias": layer.forget_bias, "cell_clip": layer.cell_clip, "use_peephole": not unused}
    result = FORMULAS["LSTMBlockCell"](
        x=x, cs_prev=state[0], h_prev=state[1], **weights, **dict.fromkeys(unused, np.zeros(1)), **attributes
    )
    return [result.cs, result.h]


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
    name = "block_rnn" if isinstance(cell, RNN) else "block_gru_reset_after" if cell.reset_after else "block_gru"
    steps = FORMULAS[name](seq_len_max=len(x), **arguments)._asdict()
    h_grad = d_y.copy()
    h_grad[-1] += d_state["h"]
    grads = FORMULAS[f"{name}_grad"](seq_len_max=len(x), **arguments, **steps, h_grad=h_grad)._asdict()
    return steps, {name.removesuffix("_grad"): value for name, value in grads.items()}


def check(result, expected, bound, name):
    """Check the shape of a result, and its error, with a bound in eps of the largest entry."""
    assert result.shape == expected.shape, name
    error = error_in_eps(result, expected, float(np.finfo(result.dtype).eps))
    assert error <= bound, f"{name}: {error} eps"
