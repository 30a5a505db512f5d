"""The mathematics of all ops and of the LSTM layer in plain numpy and float64: the oracle.

Written to be read. Each function has its op's name, keyword arguments and result: nothing here is fast, nothing
validates. Whatever the inputs' dtype, everything is computed and returned in float64.

Where layers have arguments that their ops do not, such as `activation`, these are keyword arguments here, which change
nothing where they are left out.

Symbols: T time steps, B batch, I inputs, H cells; ``@`` is the matrix product, all else is elementwise. ``a_bar`` is
the value that goes into gate a's activation, ``d_a`` the gradient of the loss to ``a``. A comment ``from (3)``
names the forward equation that a gradient goes back through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .activations import PARAMETERS, Activation, parts
from .optable import (
    OPS,
    GRUCellGrad,
    GRUCellVjp,
    GRUGrads,
    GRUResetAfterGrads,
    GRUResetAfterStates,
    GRUStates,
    LSTMCellGrad,
    LSTMGrads,
    LSTMStates,
    RNNGrads,
    RNNStates,
)

Float64 = NDArray[np.float64]


def sigmoid(z: Float64) -> Float64:
    """Compute 1 / (1 + exp(-z)) without overflow and with all digits of small results."""
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, e) / (1.0 + e)


def _float64(*arrays: ArrayLike) -> tuple[Float64, ...]:
    return tuple(np.asarray(array, dtype=np.float64) for array in arrays)


def _beside(*arrays: Float64) -> Float64:
    return np.concatenate(arrays, axis=1)


# ========================================================================================================== activations
SELU = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717  # scale and alpha


def _hard_sigmoid(z: Float64, scale: float, shift: float) -> Float64:
    return np.clip(scale * z + shift, 0, 1)


def _elu(z: Float64, alpha: float) -> Float64:
    return np.where(z > 0, z, alpha * np.expm1(np.minimum(z, 0)))


_FUNCTIONS: dict[str, tuple[Callable[..., Float64], Callable[..., Float64]]] = {
    "tanh": (np.tanh, lambda y: 1 - y * y),
    "sigmoid": (sigmoid, lambda y: y * (1 - y)),
    "relu": (lambda z: np.maximum(z, 0), lambda y: np.where(y > 0, 1.0, 0.0)),
    "leaky_relu": (lambda z, slope: np.where(z > 0, z, slope * z), lambda y, slope: np.where(y > 0, 1.0, slope)),
    "elu": (_elu, lambda y, alpha: np.where(y > 0, 1.0, y + alpha)),
    "selu": (
        lambda z: SELU[0] * _elu(z, SELU[1]),
        lambda y: np.where(y > 0, SELU[0], y + SELU[0] * SELU[1]),
    ),
    "softplus": (lambda z: np.logaddexp(z, 0), lambda y: -np.expm1(-y)),
    "softsign": (lambda z: z / (1 + np.abs(z)), lambda y: (1 - np.abs(y)) ** 2),
    "exponential": (np.exp, lambda y: y),
    "hard_sigmoid": (_hard_sigmoid, lambda y, scale, shift: np.where((y > 0) & (y < 1), scale, 0.0)),
    "linear": (lambda z: z, np.ones_like),
}
"""Each activation, and its derivative as a function of its value; both also take the parameters."""
assert _FUNCTIONS.keys() == PARAMETERS.keys()


def activated(z: ArrayLike, activation: Activation) -> Float64:
    """Compute the activation of z."""
    name, values = parts(activation)
    return _FUNCTIONS[name][0](np.asarray(z, dtype=np.float64), *values)


def slope(y: ArrayLike, activation: Activation) -> Float64:
    """Compute the derivative of the activation where its value is y."""
    name, values = parts(activation)
    return _FUNCTIONS[name][1](np.asarray(y, dtype=np.float64), *values)


# ================================================================================================================== GRU
def GRUBlockCell(
    *,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> GRUStates:
    x, h_prev, w_ru, w_c, b_ru, b_c = _float64(x, h_prev, w_ru, w_c, b_ru, b_c)
    r_bar, u_bar = np.split(_beside(x, h_prev) @ w_ru + b_ru, 2, axis=1)  # (1)
    r = activated(r_bar, recurrent_activation)  # (2) reset gate
    u = activated(u_bar, recurrent_activation)  # (3) update gate: near 1 it keeps the old state
    c = activated(_beside(x, h_prev * r) @ w_c + b_c, activation)  # (4) candidate; the reset comes before the product
    h = u * (h_prev - c) + c  # (5) which is u h_prev + (1 - u) c
    return GRUStates(r, u, c, h)


def GRUBlockCellGrad(
    *,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    d_h: ArrayLike,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> GRUCellGrad:
    x, h_prev, w_ru, w_c, r, u, c, d_h = _float64(x, h_prev, w_ru, w_c, r, u, c, d_h)
    inputs = x.shape[1]
    d_c_bar = d_h * (1 - u) * slope(c, activation)  # from (5) through (4)
    d_u_bar = d_h * (h_prev - c) * slope(u, recurrent_activation)  # from (5) through (3)
    to_x, to_hr = np.split(d_c_bar @ w_c.T, [inputs], axis=1)  # from (4): to x and to h_prev * r
    d_r_bar = to_hr * h_prev * slope(r, recurrent_activation)  # from (4) through (2)
    d_r_bar_u_bar = _beside(d_r_bar, d_u_bar)
    to_x_1, to_h = np.split(d_r_bar_u_bar @ w_ru.T, [inputs], axis=1)  # from (1)
    d_x = to_x_1 + to_x
    d_h_prev = to_h + to_hr * r + d_h * u  # h_prev stands in (1), (4) and (5)
    return GRUCellGrad(d_x, d_h_prev, d_c_bar, d_r_bar_u_bar)


def gru_block_cell_vjp(*, x: ArrayLike, h_prev: ArrayLike, r: ArrayLike, **arguments: Any) -> GRUCellVjp:
    """Take the arguments of `GRUBlockCellGrad`."""
    cell = GRUBlockCellGrad(x=x, h_prev=h_prev, r=r, **arguments)
    x, h_prev, r = _float64(x, h_prev, r)
    d_w_ru = _beside(x, h_prev).T @ cell.d_r_bar_u_bar  # from (1)
    d_w_c = _beside(x, h_prev * r).T @ cell.d_c_bar  # from (4)
    d_b_ru = cell.d_r_bar_u_bar.sum(axis=0)
    d_b_c = cell.d_c_bar.sum(axis=0)
    return GRUCellVjp(cell.d_x, cell.d_h_prev, d_w_ru, d_w_c, d_b_ru, d_b_c)


def block_gru(*, seq_len_max: SupportsIndex, x: ArrayLike, h_prev: ArrayLike, **weights: Any) -> GRUStates:
    """Take weights and activations as `GRUBlockCell` does."""
    x, h_prev = _float64(x, h_prev)
    states = GRUStates(*(np.zeros((len(x), *h_prev.shape)) for _ in GRUStates._fields))  # zeros stay past seq_len_max
    for t in range(int(seq_len_max)):
        step = GRUBlockCell(x=x[t], h_prev=h_prev, **weights)
        for state, value in zip(states, step, strict=True):
            state[t] = value
        h_prev = step.h
    return states


def block_gru_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    **weights: Any,
) -> GRUGrads:
    """Take weights and activations as `GRUBlockCell` does."""
    x, h_first, r, u, c, h, h_grad = _float64(x, h_prev, r, u, c, h, h_grad)
    names = "w_ru", "w_c", "b_ru", "b_c"
    x_grad, *sums = map(np.zeros_like, _float64(x, *(weights[name] for name in names)))
    d_h = np.zeros_like(h_first)  # what later steps send back
    for t in reversed(range(int(seq_len_max))):
        h_before = h[t - 1] if t > 0 else h_first
        saved = {"r": r[t], "u": u[t], "c": c[t]}
        step = gru_block_cell_vjp(x=x[t], h_prev=h_before, **saved, d_h=h_grad[t] + d_h, **weights)
        x_grad[t], d_h = step.d_x, step.d_h_prev
        for name, total in zip(names, sums, strict=True):
            total += getattr(step, f"d_{name}")
    return GRUGrads(x_grad, d_h, *sums)


def block_gru_reset_after(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    b_hc: ArrayLike,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> GRUResetAfterStates:
    x, h_before, w_ru, w_c, b_ru, b_c, b_hc = _float64(x, h_prev, w_ru, w_c, b_ru, b_c, b_hc)
    w_cx, w_ch = np.split(w_c, [x.shape[2]])  # the rows for x and those for h_prev
    states = GRUResetAfterStates(*(np.zeros((len(x), *h_before.shape)) for _ in GRUResetAfterStates._fields))
    for t in range(int(seq_len_max)):
        r_bar, u_bar = np.split(_beside(x[t], h_before) @ w_ru + b_ru, 2, axis=1)  # (1)
        r = activated(r_bar, recurrent_activation)  # (2)
        u = activated(u_bar, recurrent_activation)  # (3)
        hc = h_before @ w_ch + b_hc  # (4)
        c = activated(x[t] @ w_cx + b_c + r * hc, activation)  # (5) the reset comes after the product
        h = u * (h_before - c) + c  # (6)
        for state, value in zip(states, (r, u, c, hc, h), strict=True):
            state[t] = value
        h_before = h
    return states


def block_gru_reset_after_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w_ru: ArrayLike,
    w_c: ArrayLike,
    b_ru: ArrayLike,
    b_c: ArrayLike,
    b_hc: ArrayLike,
    r: ArrayLike,
    u: ArrayLike,
    c: ArrayLike,
    hc: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> GRUResetAfterGrads:
    x, h_first, w_ru, w_c, b_ru, b_c, b_hc = _float64(x, h_prev, w_ru, w_c, b_ru, b_c, b_hc)
    r, u, c, hc, h, h_grad = _float64(r, u, c, hc, h, h_grad)
    inputs = x.shape[2]
    w_cx, w_ch = np.split(w_c, [inputs])
    x_grad, w_ru_grad, w_c_grad, b_ru_grad, b_c_grad, b_hc_grad = map(np.zeros_like, (x, w_ru, w_c, b_ru, b_c, b_hc))
    d_h_next = np.zeros_like(h_first)  # what later steps send back
    for t in reversed(range(int(seq_len_max))):
        h_before = h[t - 1] if t > 0 else h_first
        d_h = h_grad[t] + d_h_next
        d_u_bar = d_h * (h_before - c[t]) * slope(u[t], recurrent_activation)  # from (6) through (3)
        d_c_bar = d_h * (1 - u[t]) * slope(c[t], activation)  # from (6) through (5)
        d_r_bar = d_c_bar * hc[t] * slope(r[t], recurrent_activation)  # from (5) through (2)
        d_hc = d_c_bar * r[t]  # from (5)
        d_r_bar_u_bar = _beside(d_r_bar, d_u_bar)
        to_x, to_h = np.split(d_r_bar_u_bar @ w_ru.T, [inputs], axis=1)  # from (1)
        x_grad[t] = to_x + d_c_bar @ w_cx.T  # x stands in (1) and (5)
        d_h_next = to_h + d_hc @ w_ch.T + d_h * u[t]  # h_prev stands in (1), (4) and (6)
        w_ru_grad += _beside(x[t], h_before).T @ d_r_bar_u_bar  # from (1)
        w_c_grad[:inputs] += x[t].T @ d_c_bar  # from (5)
        w_c_grad[inputs:] += h_before.T @ d_hc  # from (4)
        b_ru_grad += d_r_bar_u_bar.sum(axis=0)
        b_c_grad += d_c_bar.sum(axis=0)
        b_hc_grad += d_hc.sum(axis=0)
    return GRUResetAfterGrads(x_grad, d_h_next, w_ru_grad, w_c_grad, b_ru_grad, b_c_grad, b_hc_grad)


# ================================================================================================================== RNN
def block_rnn(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    b: ArrayLike,
    activation: Activation = "tanh",
) -> RNNStates:
    x, h_before, w, b = _float64(x, h_prev, w, b)
    h = np.zeros((len(x), *h_before.shape))  # zeros stay past seq_len_max
    for t in range(int(seq_len_max)):
        h[t] = activated(_beside(x[t], h_before) @ w + b, activation)  # (1)
        h_before = h[t]
    return RNNStates(h)


def block_rnn_grad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    b: ArrayLike,
    h: ArrayLike,
    h_grad: ArrayLike,
    activation: Activation = "tanh",
) -> RNNGrads:
    x, h_first, w, b, h, h_grad = _float64(x, h_prev, w, b, h, h_grad)
    x_grad, w_grad, b_grad = map(np.zeros_like, (x, w, b))
    d_h = np.zeros_like(h_first)  # what later steps send back
    for t in reversed(range(int(seq_len_max))):
        h_before = h[t - 1] if t > 0 else h_first
        d_h_bar = (h_grad[t] + d_h) * slope(h[t], activation)  # from (1)
        x_grad[t], d_h = np.split(d_h_bar @ w.T, [x.shape[2]], axis=1)
        w_grad += _beside(x[t], h_before).T @ d_h_bar
        b_grad += d_h_bar.sum(axis=0)
    return RNNGrads(x_grad, d_h, w_grad, b_grad)


# ================================================================================================================= LSTM
# `lstm_layer` and its gradient compute any LSTM; the ops are special cases.


def _peepholes(wci: ArrayLike | None, wcf: ArrayLike | None, wco: ArrayLike | None) -> tuple[Float64, ...] | None:
    """Return the peephole weights, or None: even zeros would spread a NaN of cs. A coupled LSTM has no wci."""
    return None if wcf is None or wco is None else _float64(0.0 if wci is None else wci, wcf, wco)


def _lstm_step_grad(
    gates: tuple[str, ...],
    peepholes: tuple[Float64, ...] | None,
    activation: Activation,
    recurrent_activation: Activation,
    cs_prev: Float64,
    states: LSTMStates,
    cs_grad: Float64,
    m_grad: Float64,
) -> LSTMCellGrad:
    """Go back through (9) to (2), from the gradients to cs and to o * co; ``dicfo`` in the order of the gates."""
    i, cs, f, o, ci, co, _ = states
    d_o_bar = m_grad * co * slope(o, recurrent_activation)  # from (9) through (8)
    d_cs = m_grad * o * slope(co, activation) + cs_grad  # from (9) through (7)
    if peepholes is not None:
        wci, wcf, wco = peepholes
        d_cs = d_cs + d_o_bar * wco  # from (8)
    # (6) is taken for the identity, also where it clipped: straight through, as TF does
    d_ci_bar = d_cs * i * slope(ci, activation)  # from (5) through (4)
    if "i" not in gates:  # coupled: from (5) through (3), also through (2), which is 1 - f
        d_f_bar = d_cs * (cs_prev - ci) * slope(f, recurrent_activation)
        d_i_bar = np.zeros_like(d_f_bar)
    else:
        d_f_bar = d_cs * cs_prev * slope(f, recurrent_activation)  # from (5) through (3)
        d_i_bar = d_cs * ci * slope(i, recurrent_activation)  # from (5) through (2)
    cs_prev_grad = d_cs * f  # from (5)
    if peepholes is not None:
        cs_prev_grad = cs_prev_grad + d_i_bar * wci + d_f_bar * wcf  # from (2) and (3)
    bars = {"i": d_i_bar, "ci": d_ci_bar, "f": d_f_bar, "o": d_o_bar}
    return LSTMCellGrad(
        cs_prev_grad,
        _beside(*(bars[gate] for gate in gates)),
        (d_i_bar * cs_prev).sum(axis=0),
        (d_f_bar * cs_prev).sum(axis=0),
        (d_o_bar * cs).sum(axis=0),
    )


def _lstm_product_grad(
    x: Float64, h_prev: Float64, w: Float64, d_bars: Float64
) -> tuple[Float64, Float64, Float64, Float64]:
    """Go back through (1): the gradients to x, h_prev, w and b."""
    x_grad, h_prev_grad = np.split(d_bars @ w.T, [x.shape[1]], axis=1)
    return x_grad, h_prev_grad, _beside(x, h_prev).T @ d_bars, d_bars.sum(axis=0)


def lstm_layer(
    *,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    w_p: ArrayLike | None = None,
    forget_bias: float = 0.0,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    gates: tuple[str, ...] = OPS["BlockLSTM"].gates,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> LSTMStates:
    """Compute what a `blockcell.LSTM` does over T steps, with `gates` in the order of w's columns.

    Coupled gates are ``("ci", "f", "o")``: i is 1 - f. With a projection w_p [H,P] h is [T,B,P], all else [T,B,H]."""
    peepholes, coupled = _peepholes(wci, wcf, wco), "i" not in gates
    x, cs, h, w, b = _float64(x, cs_prev, h_prev, w, b)
    shapes = (h.shape if name == "h" else cs.shape for name in LSTMStates._fields)
    states = LSTMStates(*(np.zeros((len(x), *shape)) for shape in shapes))
    for t in range(len(x)):
        bar = dict(zip(gates, np.split(_beside(x[t], h) @ w + b, len(gates), axis=1), strict=True))  # (1)
        if peepholes is not None:
            i_peephole, f_peephole, o_peephole = peepholes
            if not coupled:
                bar["i"] = bar["i"] + cs * i_peephole
            bar["f"] = bar["f"] + cs * f_peephole
        f = activated(bar["f"] + forget_bias, recurrent_activation)  # (3) forget gate
        i = 1 - f if coupled else activated(bar["i"], recurrent_activation)  # (2) input gate
        ci = activated(bar["ci"], activation)  # (4) candidate
        cs = i * ci + f * cs  # (5) new cell state
        if cell_clip > 0:
            cs = np.clip(cs, -cell_clip, cell_clip)  # (6)
        co = activated(cs, activation)  # (7)
        if peepholes is not None:
            bar["o"] = bar["o"] + cs * o_peephole
        o = activated(bar["o"], recurrent_activation)  # (8) output gate; its peephole sees the new cs, clipped
        h = o * co  # (9)
        if w_p is not None:
            h = h @ np.asarray(w_p, np.float64)  # (10)
            if proj_clip > 0:
                h = np.clip(h, -proj_clip, proj_clip)  # (11)
        for state, value in zip(states, (i, cs, f, o, ci, co, h), strict=True):
            state[t] = value
    return states


def lstm_layer_grad(
    *,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    w_p: ArrayLike | None = None,
    proj_clip: float = 0.0,
    gates: tuple[str, ...] = OPS["BlockLSTM"].gates,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
    states: LSTMStates,
    cs_grad: ArrayLike = 0.0,
    h_grad: ArrayLike,
    cs_last_grad: ArrayLike = 0.0,
    h_last_grad: ArrayLike = 0.0,
) -> dict[str, Float64]:
    """Compute the gradients to x, cs_prev, h_prev and the weights, by their names.

    They follow from the gradients to cs and h of each step and to the last ones from what comes after, and from what
    `lstm_layer` returned."""
    cell = gates, _peepholes(wci, wcf, wco), activation, recurrent_activation
    x, cs_first, h_first, w, h_grad, d_cs, d_h = _float64(x, cs_prev, h_prev, w, h_grad, cs_last_grad, h_last_grad)
    states = LSTMStates(*_float64(*states))
    cs_grad = np.broadcast_to(np.asarray(cs_grad, np.float64), states.cs.shape)
    d_cs, d_h = np.broadcast_to(d_cs, cs_first.shape), np.broadcast_to(d_h, h_first.shape)
    grads = {"x": np.zeros_like(x), "w": np.zeros_like(w), "b": np.zeros(w.shape[1])}
    grads |= {name: np.zeros(cs_first.shape[1]) for name in ("wci", "wcf", "wco")}
    projection = None if w_p is None else np.asarray(w_p, np.float64)
    if projection is not None:
        grads["w_p"] = np.zeros_like(projection)
    for t in reversed(range(len(x))):
        cs_before, h_before = (states.cs[t - 1], states.h[t - 1]) if t > 0 else (cs_first, h_first)
        now = LSTMStates(*(state[t] for state in states))
        d_m = h_grad[t] + d_h
        if projection is not None:
            if proj_clip > 0:
                d_m = np.where(np.abs(now.h) < proj_clip, d_m, 0)  # from (11): nothing passes where it clips
            grads["w_p"] += (now.o * now.co).T @ d_m  # from (10)
            d_m = d_m @ projection.T
        step = _lstm_step_grad(*cell, cs_before, now, cs_grad[t] + d_cs, d_m)
        d_cs = step.cs_prev_grad
        grads["x"][t], d_h, w_step, b_step = _lstm_product_grad(x[t], h_before, w, step.dicfo)
        step_grads = {"w": w_step, "b": b_step, "wci": step.wci_grad, "wcf": step.wcf_grad, "wco": step.wco_grad}
        for name, value in step_grads.items():
            grads[name] += value
    missing = {name for name, weight in {"wci": wci, "wcf": wcf, "wco": wco}.items() if weight is None}
    grads = {name: grad for name, grad in grads.items() if name not in missing}
    return grads | {"cs_prev": d_cs, "h_prev": d_h}


def _until(n: SupportsIndex, *arrays: ArrayLike) -> list[Float64]:
    """Return the first n steps of arrays over time."""
    return [array[: int(n)] for array in _float64(*arrays)]


def _zeros_after(array: Float64, T: int) -> Float64:
    """Append zeros up to T steps: the results past seq_len_max."""
    return np.concatenate([array, np.zeros((T - len(array), *array.shape[1:]))])


def BlockLSTM(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    forget_bias: float = 1.0,
    cell_clip: float = 3.0,
    use_peephole: bool = False,
    **arguments: Any,
) -> LSTMStates:
    """Take the other arguments as `lstm_layer` does."""
    [steps] = _until(seq_len_max, x)
    arguments |= {"wci": wci, "wcf": wcf, "wco": wco} if use_peephole else {}
    states = lstm_layer(x=steps, forget_bias=forget_bias, cell_clip=cell_clip, **arguments)
    return LSTMStates(*(_zeros_after(state, len(np.asarray(x))) for state in states))


def LSTMBlockCell(*, x: ArrayLike, **arguments: Any) -> LSTMStates:
    """Take the arguments of `BlockLSTM`, of one step."""
    return LSTMStates(*(state[0] for state in BlockLSTM(seq_len_max=1, x=np.asarray(x)[None], **arguments)))


def _peephole_grads(
    use_peephole: bool, hidden: int, weights: Iterable[ArrayLike | None], grads: Iterable[Float64]
) -> tuple[Float64, Float64, Float64]:
    """Return the gradients to peephole weights; without peepholes, zeros of the weights' own lengths."""
    if not use_peephole:
        grads = (np.zeros(hidden if weight is None else np.shape(weight)) for weight in weights)
    wci_grad, wcf_grad, wco_grad = grads
    return wci_grad, wcf_grad, wco_grad


def LSTMBlockCellGrad(
    *,
    x: ArrayLike,
    cs_prev: ArrayLike,
    h_prev: ArrayLike,
    w: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    b: ArrayLike,
    i: ArrayLike,
    cs: ArrayLike,
    f: ArrayLike,
    o: ArrayLike,
    ci: ArrayLike,
    co: ArrayLike,
    cs_grad: ArrayLike,
    h_grad: ArrayLike,
    use_peephole: bool,
    activation: Activation = "tanh",
    recurrent_activation: Activation = "sigmoid",
) -> LSTMCellGrad:
    cs_prev, i, cs, f, o, ci, co, cs_grad, h_grad = _float64(cs_prev, i, cs, f, o, ci, co, cs_grad, h_grad)
    peepholes = _peepholes(wci, wcf, wco) if use_peephole else None
    cell = OPS["LSTMBlockCellGrad"].gates, peepholes, activation, recurrent_activation
    step = _lstm_step_grad(*cell, cs_prev, LSTMStates(i, cs, f, o, ci, co, o * co), cs_grad, h_grad)
    peephole_grads = _peephole_grads(use_peephole, cs_prev.shape[1], (wci, wcf, wco), step[2:])
    return LSTMCellGrad(step.cs_prev_grad, step.dicfo, *peephole_grads)


def lstm_block_cell_vjp(*, x: ArrayLike, h_prev: ArrayLike, w: ArrayLike, **arguments: Any) -> LSTMGrads:
    """Take the arguments of `LSTMBlockCellGrad`."""
    cell = LSTMBlockCellGrad(x=x, h_prev=h_prev, w=w, **arguments)
    x, h_prev, w = _float64(x, h_prev, w)
    x_grad, h_prev_grad, w_grad, b_grad = _lstm_product_grad(x, h_prev, w, cell.dicfo)
    peephole_grads = cell.wci_grad, cell.wcf_grad, cell.wco_grad
    return LSTMGrads(x_grad, cell.cs_prev_grad, h_prev_grad, w_grad, *peephole_grads, b_grad)


def BlockLSTMGrad(
    *,
    seq_len_max: SupportsIndex,
    x: ArrayLike,
    cs_prev: ArrayLike,
    wci: ArrayLike | None = None,
    wcf: ArrayLike | None = None,
    wco: ArrayLike | None = None,
    i: ArrayLike,
    cs: ArrayLike,
    f: ArrayLike,
    o: ArrayLike,
    ci: ArrayLike,
    co: ArrayLike,
    h: ArrayLike,
    cs_grad: ArrayLike,
    h_grad: ArrayLike,
    use_peephole: bool,
    **arguments: Any,
) -> LSTMGrads:
    """Take the other arguments as `lstm_layer` does."""
    steps, cs_grad, h_grad, *states = _until(seq_len_max, x, cs_grad, h_grad, i, cs, f, o, ci, co, h)
    weights = {"wci": wci, "wcf": wcf, "wco": wco}
    arguments |= {"cs_prev": cs_prev, "cs_grad": cs_grad, "h_grad": h_grad} | (weights if use_peephole else {})
    grads = lstm_layer_grad(x=steps, states=LSTMStates(*states), **arguments)
    x_grad, hidden = _zeros_after(grads["x"], len(np.asarray(x))), np.shape(cs_prev)[1]
    peephole_grads = _peephole_grads(use_peephole, hidden, weights.values(), (grads[name] for name in weights))
    return LSTMGrads(x_grad, grads["cs_prev"], grads["h_prev"], grads["w"], *peephole_grads, grads["b"])


BlockLSTMV2 = partial(BlockLSTM, forget_bias=0.0, cell_clip=0.0, gates=OPS["BlockLSTMV2"].gates)
BlockLSTMGradV2 = partial(BlockLSTMGrad, gates=OPS["BlockLSTMV2"].gates)


FORMULAS: dict[str, Callable[..., Any]] = {name: globals()[name] for name in OPS}
"""All by name."""


def error_in_eps(result: NDArray[Any], exact: Float64, eps: float) -> float:
    """Return the largest error of a result, in eps of the exact values' largest entry: the measure of every bound."""
    error = float(np.abs(result.astype(np.float64) - exact).max(initial=0))
    scale = float(np.abs(exact).max(initial=0))
    if scale == 0:
        return float("inf") if error else 0.0
    return error / (eps * scale)
