"""The order of summation, a promise (docs/mathematics.md, "Order of summation"), kept by every path at every CPU level.

Each result is compared, bit for bit, with one that numpy sums up in the promised order, addition by addition.  The data
make any other order show.  Nearly every term of a sum has a mate elsewhere in it, of the same size and of the opposite
sign.  Terms are so large that what is left over is, to a visible part, what rounding did to the partial sums.  One
factor of each product is a power of two, so the product is exact: whether it is fused with an addition does not matter.
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from bits import on_threads, same
from kernel_cases import DTYPES, run
from summation import factors, mates, over_rows, powers, product, real_of, sum_in_double

from blockcell import GRU, LSTM, RNN, Bidirectional, _kernels
from blockcell.optable import OPS

PATHS = [  # T, B, I, H, threads
    (1, 1, 70, 90, 1),  # one row; weights are read as they lie
    (1, 5, 70, 90, 3),  # several rows; threads share the units
    (1, 20, 70, 90, 2),  # weights are packed block by block
    (1, 70, 70, 90, 2),  # and backward threads share the rows
    (1, 400, 70, 90, 2),  # weights are packed at the beginning, and threads share the rows
    (4, 1, 90, 170, 1),  # one row; its input products are computed for several steps at once
    (3, 1, 70, 104, 1),  # several panels at once, of which the last one has fewer lines: a GRU's
    (3, 1, 70, 114, 1),  # an LSTM's and a GRU's,
    (3, 1, 70, 120, 1),  # an LSTM's of other numbers of lines
    (3, 1, 70, 122, 1),
    (4, 1, 90, 170, 3),  # threads share the units
    (3, 11, 70, 100, 3),  # of several rows
    (3, 20, 70, 90, 2),  # threads share the rows
    (2, 200, 70, 90, 2),  # which are so many that the input product is part of the step
]


# ----------------------------------------------------------------------------------------------------------------- data


def gates_of(name):
    """Of the columns of each matrix of weights."""
    return {"w": 4} if "LSTM" in name else {"w": 1} if "rnn" in name else {"w_ru": 2, "w_c": 1}


def arguments_of_op(name, args, dtype):
    """Those that the op takes."""
    inputs = {tensor.name: args[tensor.name].astype(dtype) for tensor in OPS[name].inputs}
    return {"seq_len_max": len(args["x"]), **inputs} | ({"use_peephole": True} if "LSTM" in name else {})


@cache
def forward_case(name, T, B, I, H, dtype):
    """Mates are inputs, and units: they have equal values, and their rows of the weights are opposite."""
    g = np.random.default_rng([T, B, I, H])
    inputs, units = mates(g, I), mates(g, H)
    args = {}
    for key, gates in gates_of(name).items():
        w = np.concatenate([factors(g, gates * H, *part, dtype) for part in (inputs, units)])
        columns = np.arange(gates * H).reshape(gates, H)[:, units[0]].ravel()
        args |= {key: w[:, columns], f"b{key[1:]}": g.uniform(-1, 1, gates * H)[columns]}
    args["x"] = g.uniform(-1, 1, (T, B, I))[..., inputs[0]]
    for key in ("cs_prev", "h_prev"):
        args[key] = g.uniform(-1, 1, (B, H))[:, units[0]]
    for key in ("wci", "wcf", "wco", "b_hc"):
        args[key] = g.uniform(-1, 1, H)[units[0]]
    return arguments_of_op(name, args, dtype)


@cache
def backward_case(name, T, B, I, H, dtype):
    """Mates are units, whose gate gradients are equal and their columns of the weights opposite; and batch rows, which
    have equal values and opposite gradients."""
    g = np.random.default_rng([T, B, I, H])
    units, (row, sign, single) = mates(g, H), mates(g, B)

    def by_mate(values):
        return values[..., row, :][..., units[0]]

    args = {"x": powers(g, (T, B, I), -3, 1)[:, row]}
    for key, gates in gates_of(name).items():
        w = np.concatenate([factors(g, I + H, *units, dtype).T for _ in range(gates)], axis=1)
        args |= {key: np.concatenate([w[:I], w[I:][units[0]]]), f"b{key[1:]}": np.zeros(gates * H)}
    for key in ("wci", "wcf", "wco", "b_hc"):
        args[key] = powers(g, H, -3, 1)[units[0]]
    for key in ("cs_prev", "h_prev"):
        args[key] = by_mate(powers(g, (B, H), -3, 1))
    for key in ("cs", "h", "ci", "c", "hc"):
        args[key] = by_mate(powers(g, (T, B, H), -3, 1))
    for key in ("i", "f", "o", "r", "u"):
        args[key] = by_mate(2.0 ** g.integers(-3, 0, (T, B, H)))
    args["co"] = by_mate(g.integers(-1, 2, (T, B, H)))
    for key in ("h_grad", "cs_grad"):
        args[key] = by_mate(g.uniform(-1, 1, (T, B, H))) * sign[:, None]
    # What is summed in double shows where large numbers cancel.  float16 has none, but some, of one step, multiply.
    several = dtype == np.float16 and T == 1
    exponents = g.integers(0, 15 if several else 12 if dtype == np.float16 else 42, (B, 1))
    exponents[single] = 0
    for key in ("h_grad", "cs_grad", *(("i", "f", "o", "ci", "u", "c", "h") if several else ())):
        args[key] = args[key] * 2.0 ** exponents[row]
    return arguments_of_op(name, args, dtype)


# --------------------------------------------------------------------------------------------------- the same by numpy
def widened(args):
    return {key: a.astype(real_of(a.dtype)) for key, a in args.items() if isinstance(a, np.ndarray)}


def stored(name, results, dtype):
    with np.errstate(over="ignore"):
        return OPS[name].result._make(np.asarray(result).astype(dtype, order="C") for result in results)


def parts(w, x):
    """The rows of w for x and those for h."""
    return np.split(w, [x.shape[-1]])


def pre_activations(b, x, h, w):
    """[x, h] @ w + b."""
    w_x, w_h = parts(w, x)
    return product(product(b, x, w_x), h, w_h)


def lstm_step(a, x, level):
    """z by numpy; sigmoid, tanh and the rest by the kernel, of a cell whose input is z and whose weights pass it on."""
    h_prev, zero = 0 * a["h_prev"], 0 * a["b"]
    z = pre_activations(a["b"], x, a["h_prev"], a["w"])
    w = np.eye(len(zero) + h_prev.shape[1], len(zero), dtype=x.dtype)
    return run("LSTMBlockCell", a | {"x": z, "h_prev": h_prev, "w": w, "b": zero, "use_peephole": True}, level)


def gru_step(a, x, level):
    """The same.  c needs r."""
    h_prev, H = a["h_prev"], len(a["b_c"])
    weights = {"w_ru": np.eye(4 * H, 2 * H, dtype=x.dtype), "w_c": np.eye(4 * H, H, -2 * H, dtype=x.dtype)}
    weights |= {"b_ru": 0 * a["b_ru"], "b_c": 0 * a["b_c"]}

    def cell(z_ru, z_c):
        return run("GRUBlockCell", a | weights | {"x": np.concatenate([z_ru, z_c], axis=1)}, level)

    z_ru = pre_activations(a["b_ru"], x, h_prev, a["w_ru"])
    r = cell(z_ru, 0 * h_prev).r
    return cell(z_ru, pre_activations(a["b_c"], x, h_prev * r, a["w_c"]))


def reset_after_step(a, x, level):
    """The same, one row after the other, as hc is passed on in the bias."""
    h_prev, H, w_c = a["h_prev"], len(a["b_c"]), parts(a["w_c"], x)
    bars = pre_activations(a["b_ru"], x, h_prev, a["w_ru"]), product(a["b_c"], x, w_c[0])
    z, hc = np.concatenate(bars, axis=1), product(a["b_hc"], h_prev, w_c[1])
    weights = {"w_ru": np.eye(4 * H, 2 * H, dtype=x.dtype), "w_c": np.eye(4 * H, H, -2 * H, dtype=x.dtype)}
    weights |= {"b_ru": 0 * a["b_ru"], "b_c": 0 * a["b_c"], "seq_len_max": 1}
    for matrix in ("w_ru", "w_c"):
        weights[matrix][3 * H :] = 0
    rows = [
        run("block_gru_reset_after", weights | {"x": z[b, None, None], "h_prev": h_prev[b, None], "b_hc": hc[b]}, level)
        for b in range(len(x))
    ]
    return type(rows[0])._make(np.concatenate(result, axis=1)[0] for result in zip(*rows, strict=True))


def rnn_step(a, x, level):
    """The same."""
    z, zero = pre_activations(a["b"], x, a["h_prev"], a["w"]), 0 * a["b"]
    w = np.eye(2 * len(zero), len(zero), dtype=x.dtype)
    step = run("block_rnn", {"seq_len_max": 1, "x": z[None], "h_prev": 0 * a["h_prev"], "w": w, "b": zero}, level)
    return type(step)(step.h[0])


STEPS = {
    "BlockLSTM": lstm_step,
    "block_gru": gru_step,
    "block_gru_reset_after": reset_after_step,
    "block_rnn": rnn_step,
}


def forward(name, args, level):
    a, dtype, steps = widened(args), args["x"].dtype, []
    for x in a["x"]:
        states = STEPS[name](a, x, level)
        steps.append(stored(name, states, dtype))
        a |= widened({f"{key}_prev": getattr(steps[-1], key) for key in ("cs", "h") if hasattr(states, key)})
    return OPS[name].result._make(map(np.stack, zip(*steps, strict=True)))


def before(first, states):
    """What each step starts from."""
    return np.concatenate([first[None], states[:-1]])


def weight_grad(x, states, d):
    inputs = np.concatenate(np.concatenate([x, states], axis=2))
    return over_rows(lambda r: inputs[r, :, None] * d[r], len(d))


def lstm_backward(a):
    """Also of a projected LSTM, by the gradient of m, which comes from that of h."""
    x, (w_x, w_h), cs_prev = a["x"], parts(a["w"], a["x"]), before(a["cs_prev"], a["cs"])
    d_h, d_cs = a.get("h_last_grad", 0), a.get("cs_last_grad", 0)
    d, d_out = [None] * len(x), [None] * len(x)
    for t in reversed(range(len(x))):
        i, f, o, ci, co = (a[key][t] for key in ("i", "f", "o", "ci", "co"))
        d_out[t] = d_m = d_h + a["h_grad"][t]
        if "w_p" in a:
            d_m = product(0, d_m, a["w_p"].T)
        if "cs_grad" in a:
            d_cs = d_cs + a["cs_grad"][t]
        d_o = d_m * co * o * (1 - o)
        d_cs = d_m * o * (1 - co * co) + d_cs + d_o * a["wco"]
        d_i, d_ci, d_f = d_cs * ci * i * (1 - i), d_cs * i * (1 - ci * ci), d_cs * cs_prev[t] * f * (1 - f)
        d_cs = d_cs * f + d_i * a["wci"] + d_f * a["wcf"]
        d[t] = np.concatenate([d_i, d_ci, d_f, d_o], axis=1)
        d_h = product(0, d[t], w_h.T)
    d, cs_prev, cs = np.concatenate(d), np.concatenate(cs_prev), np.concatenate(a["cs"])
    d_i, _, d_f, d_o = np.split(d, 4, axis=1)
    x_grad, w_grad = product(0, d, w_x.T).reshape(x.shape), weight_grad(x, before(a["h_prev"], a["h"]), d)
    peepholes = sum_in_double(d_i, cs_prev), sum_in_double(d_f, cs_prev), sum_in_double(d_o, cs)
    m, d_out = np.concatenate(a["o"] * a["co"]), np.concatenate(d_out)
    w_p_grad = [over_rows(lambda r: m[r, :, None] * d_out[r], len(m))] if "w_p" in a else []
    return x_grad, d_cs, d_h, w_grad, *peepholes, sum_in_double(d), *w_p_grad


def gru_backward(a):
    x, (ru_x, ru_h), (c_x, c_h) = a["x"], parts(a["w_ru"], a["x"]), parts(a["w_c"], a["x"])
    h_prev = before(a["h_prev"], a["h"])
    d_h = 0
    d_ru, d_c = [None] * len(x), [None] * len(x)
    for t in reversed(range(len(x))):
        r, u, c = (a[key][t] for key in ("r", "u", "c"))
        d_h = d_h + a["h_grad"][t]
        d_c[t] = d_h * (1 - u) * (1 - c * c)
        d_hr = product(0, d_c[t], c_h.T)
        d_r, d_u = d_hr * h_prev[t] * r * (1 - r), d_h * (h_prev[t] - c) * u * (1 - u)
        d_ru[t] = np.concatenate([d_r, d_u], axis=1)
        d_h = product(d_hr * r + d_h * u, d_ru[t], ru_h.T)
    d_ru, d_c = np.concatenate(d_ru), np.concatenate(d_c)
    x_grad = product(product(0, d_ru, ru_x.T), d_c, c_x.T).reshape(x.shape)
    weights = weight_grad(x, h_prev, d_ru), weight_grad(x, h_prev * a["r"], d_c)
    return x_grad, d_h, *weights, sum_in_double(d_ru), sum_in_double(d_c)


def reset_after_backward(a):
    x, (ru_x, ru_h), (c_x, c_h) = a["x"], parts(a["w_ru"], a["x"]), parts(a["w_c"], a["x"])
    h_prev = before(a["h_prev"], a["h"])
    d_h = 0
    d_ru, d_c, d_hc = ([None] * len(x) for _ in range(3))
    for t in reversed(range(len(x))):
        r, u, c, hc = (a[key][t] for key in ("r", "u", "c", "hc"))
        d_h = d_h + a["h_grad"][t]
        d_c[t] = d_h * (1 - u) * (1 - c * c)
        d_hc[t] = d_c[t] * r
        d_ru[t] = np.concatenate([d_c[t] * hc * r * (1 - r), d_h * (h_prev[t] - c) * u * (1 - u)], axis=1)
        d_h = product(product(d_h * u, d_ru[t], ru_h.T), d_hc[t], c_h.T)
    d_ru, d_c, d_hc = (np.concatenate(d) for d in (d_ru, d_c, d_hc))
    x_grad = product(product(0, d_ru, ru_x.T), d_c, c_x.T).reshape(x.shape)
    no_x, no_h = x[..., :0], h_prev[..., :0]
    w_c_grad = np.concatenate([weight_grad(x, no_h, d_c), weight_grad(no_x, h_prev, d_hc)])
    biases = sum_in_double(d_ru), sum_in_double(d_c), sum_in_double(d_hc)
    return x_grad, d_h, weight_grad(x, h_prev, d_ru), w_c_grad, *biases


def rnn_backward(a):
    x, (w_x, w_h) = a["x"], parts(a["w"], a["x"])
    d_h, d = 0, [None] * len(x)
    for t in reversed(range(len(x))):
        d[t] = (d_h + a["h_grad"][t]) * (1 - a["h"][t] * a["h"][t])
        d_h = product(0, d[t], w_h.T)
    d = np.concatenate(d)
    w_grad = weight_grad(x, before(a["h_prev"], a["h"]), d)
    return product(0, d, w_x.T).reshape(x.shape), d_h, w_grad, sum_in_double(d)


BACKWARD = {
    "BlockLSTMGrad": lstm_backward,
    "block_gru_grad": gru_backward,
    "block_gru_reset_after_grad": reset_after_backward,
    "block_rnn_grad": rnn_backward,
}


@cache
def backward(name, *case):
    args = backward_case(name, *case)
    return stored(name, BACKWARD[name](widened(args)), args["x"].dtype)


# --------------------------------------------------------------------------------------------------------------- tests
def differing_names(results, expected):
    """The results that are not the same."""
    return [name for name, a, b in zip(expected._fields, results, expected, strict=True) if not same([a], [b])]


@pytest.mark.meet(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_forward(name, path, dtype, level):
    *sizes, threads = path
    args = forward_case(name, *sizes, DTYPES[dtype])
    assert not differing_names(run(name, args, level, num_threads=threads), forward(name, args, level))


@pytest.mark.meet(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, path, dtype, level):
    """That layers have the same gradients as ops, test_layers.py says."""
    *sizes, threads = path
    args = backward_case(name, *sizes, DTYPES[dtype])
    assert not differing_names(run(name, args, level, num_threads=threads), backward(name, *sizes, DTYPES[dtype]))


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", [path for path in PATHS if path[0] > 1], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_layers_and_streams(name, path, dtype, level):
    *sizes, threads = path
    args = forward_case(name, *sizes, DTYPES[dtype])
    x, there = args["x"], forward(name, args, level)
    back = forward(name, args | {"x": x[::-1]}, level)
    weights = {key: value for key, value in args.items() if key[0] in "wb"}
    if name == "BlockLSTM":
        layer, state = LSTM(**weights, forget_bias=1, cell_clip=3), (args["cs_prev"], args["h_prev"])
    elif name == "block_rnn":
        layer, state = RNN(**weights), (args["h_prev"],)
    else:
        layer, state = GRU(**weights, reset_after="b_hc" in weights), (args["h_prev"],)

    def check(y, last, states):
        assert same([y], [states.h])
        assert same(last, [getattr(states, key)[-1] for key in last._fields])

    with on_threads(threads):
        check(*layer(x, state), there)
        check(*layer.forward(x, state)[:2], there)
        y, (_, last) = Bidirectional(layer, layer)(x, (state, state))
        y_fw, y_bw = np.split(y, 2, axis=2)
        assert same([y_fw.copy()], [there.h])
        check(y_bw[::-1].copy(), last, back)
        stream = layer.stream(x.shape[1])
        stream.state = state
        check(np.concatenate([[stream.step(x[0])], stream.run(x[1:])]), stream.state, there)


# ---------------------------------------------------------------------------------------------------------- projections
def projected_layer(args, dtype):
    """An LSTM of w_p [H,P] and of the other weights among the arguments."""
    names = [name for name in ("w", "wci", "wcf", "wco", "b", "w_p") if name in args]
    return LSTM(**{name: args[name].astype(dtype) for name in names}, forget_bias=1)


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.usefixtures("level")
def test_projection(path, dtype):
    """Mates are units, which have equal m, and opposite rows of w_p."""
    (T, B, I, H, threads), dtype = path, DTYPES[dtype]
    P, g = I + 5, np.random.default_rng(path)
    units = mates(g, H)
    w, b = np.zeros((I + P, 4 * H)), g.uniform(-1, 1, (4, H))[:, units[0]].ravel()
    layer = projected_layer({"w": w, "b": b, "w_p": factors(g, P, *units, dtype)}, dtype)
    x, cs_prev = np.zeros((T, B, I), dtype), g.uniform(-1, 1, (B, H))[:, units[0]].astype(dtype)
    with on_threads(threads):
        y, _, tape = layer.forward(x, (cs_prev, np.zeros((B, P), dtype)))
        called, streamed = layer(x, tape.content.state)[0], layer.stream(B)
        streamed.state = tape.content.state
        assert same([called, np.stack([streamed.step(row) for row in x])], [y, y])
    if dtype == np.float16:  # of the cell's values the tape has only what is left in half precision
        wide = projected_layer({name: a.astype(np.float32) for name, a in layer.weights.items()}, np.float32)
        tapes = []
        for t in range(T):
            before = cs_prev if t == 0 else tape.content.saved[1, t - 1]
            state = before.astype(np.float32), np.zeros((B, P), np.float32)
            tapes.append(wide.forward(x[t : t + 1].astype(np.float32), state)[2].content.saved)
        saved = np.concatenate(tapes, axis=1)
    else:
        saved = tape.content.saved
    m = (saved[3] * saved[5]).reshape(T * B, H)
    expected = product(np.zeros((T * B, P), m.dtype), m, layer.weights["w_p"].astype(m.dtype))
    assert same([y], [expected.reshape(T, B, P).astype(dtype)])


@pytest.mark.meet(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.usefixtures("level")
def test_projection_backward(path, dtype):
    """Mates are units, outputs and batch rows, as in `backward_case`."""
    (T, B, I, H, threads), dtype = path, DTYPES[dtype]
    P, g = I + 5, np.random.default_rng(path)
    units, outs, (row, sign, _) = mates(g, H), mates(g, P), mates(g, B)
    args = {"x": powers(g, (T, B, I), -3, 1)[:, row]}
    w = np.concatenate([factors(g, I + P, *units, dtype).T for _ in range(4)], axis=1)
    args |= {"w": np.concatenate([w[:I], w[I:][outs[0]]]), "b": np.zeros(4 * H)}
    args["w_p"] = factors(g, H, *outs, dtype).T[units[0]]
    args |= {name: powers(g, H, -3, 1)[units[0]] for name in ("wci", "wcf", "wco")}
    args |= {name: powers(g, (T, B, H), -3, 1)[:, row][..., units[0]] for name in ("cs", "ci")}
    args |= {name: (2.0 ** g.integers(-3, 0, (T, B, H)))[:, row][..., units[0]] for name in ("i", "f", "o")}
    args["co"] = g.integers(-1, 2, (T, B, H))[:, row][..., units[0]]
    args["h"] = powers(g, (T, B, P), -3, 1)[:, row]
    args |= {"cs_prev": powers(g, (B, H), -3, 1)[row][:, units[0]], "h_prev": powers(g, (B, P), -3, 1)[row]}
    args["h_grad"] = g.uniform(-1, 1, (T, B, P))[:, row][..., outs[0]] * sign[:, None]
    args["cs_last_grad"] = g.uniform(-1, 1, (B, H))[row][:, units[0]] * sign[:, None]
    args["h_last_grad"] = g.uniform(-1, 1, (B, P))[row][:, outs[0]] * sign[:, None]
    args = {name: array.astype(dtype, order="C") for name, array in args.items()}  # a tape has no gaps
    layer = projected_layer(args, dtype)
    tape = layer.forward(args["x"], (args["cs_prev"], args["h_prev"]))[2]
    saved = np.stack([args[name] for name in ("i", "cs", "f", "o", "ci", "co")])
    tape = dataclasses.replace(tape, content=tape.content._replace(saved=saved, h=args["h"]))
    with on_threads(threads):
        d_x, d_state, grads = layer.backward(tape, args["h_grad"], (args["cs_last_grad"], args["h_last_grad"]))
    names = ["x", "cs", "h", "w", "wci", "wcf", "wco", "b", "w_p"]
    expected = dict(zip(names, lstm_backward(widened(args)), strict=True))
    results = {"x": d_x, "cs": d_state.cs, "h": d_state.h, **grads}
    with np.errstate(over="ignore"):
        assert not [name for name in names if not same([results[name]], [expected[name].astype(dtype)])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_a_block_of_both_x_and_h_shows(name, dtype, monkeypatch):
    """Blocks of other lengths, and other orders within them, are mutants of test_mutants.py."""

    def in_one(b, x, h, w):
        return product(b, np.concatenate([x, h], axis=1), w)

    args = forward_case(name, 1, 400, 70, 90, DTYPES[dtype])
    promised = forward(name, args, _kernels.LEVEL)
    monkeypatch.setitem(globals(), "pre_activations", in_one)
    results = [result for result in OPS[name].result._fields if result != "hc"]  # x has no part in it
    assert differing_names(forward(name, args, _kernels.LEVEL), promised) == results
