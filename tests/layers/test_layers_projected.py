"""Projected and coupled LSTMs beside LSTMs that are neither, and beside PyTorch's.

That they compute their equations, `test_layers.py` says of them as of all layers.
"""

# ruff: noqa: E741 (I is the number of inputs, as everywhere)
from __future__ import annotations

import warnings

import numpy as np
import pytest
from bits import on_threads
from cases import rng
from layer_cases import ATTRIBUTES, draw, lstm, variant
from peer_cases import BOUNDS, check_configurations, random_sizes, worst_of

from blockcell import LSTM, Bidirectional, LSTMState

SIZES = [(1, 1, 3, 5), (6, 1, 7, 40), (5, 20, 9, 17), (3, 9, 40, 66)]


def results_of(layer, x, state, options, d_y, d_state):
    y, last, tape = layer.forward(x, state, **options)
    d_x, d_first, grads = layer.backward(tape, d_y, d_state)
    return {"y": y, **last._asdict(), "d_x": d_x, "d_cs": d_first.cs, "d_h": d_first.h, **grads}


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clip", [0.0, 100.0])
def test_a_projection_that_changes_nothing(dtype, clip):
    """By the unit matrix: all sums are exact, so every bit is that of the LSTM without a projection."""
    for T, B, I, H in SIZES:
        plain = lstm(I, H, dtype, **ATTRIBUTES)
        layer = LSTM(**plain.weights, w_p=np.eye(H, dtype=dtype), proj_clip=clip, **ATTRIBUTES)
        x, state, lengths, reset = draw(plain, T, B)
        g, d_y = rng("unit", T), rng("d_y", T).standard_normal((T, B, H)).astype(dtype)
        d_state = LSTMState(*g.standard_normal((2, B, H)).astype(dtype))
        for options in ({}, {"lengths": lengths, "reset": reset}):
            for threads in (1, 3):
                with on_threads(threads):
                    expected = results_of(plain, x, state, options, d_y, d_state)
                    results = results_of(layer, x, state, options, d_y, d_state)
                assert [name for name in expected if not np.array_equal(results[name], expected[name])] == []


@pytest.mark.parametrize("outputs", [0, 12])
def test_coupled_gates_by_four_gates(outputs):
    """1 - sigmoid(z) is sigmoid(-z): the columns and the peephole of i are those of f, negated."""
    for T, B, I, H in SIZES:
        coupled = variant(I, H, np.float64, outputs, coupled=True, proj_clip=0.2 if outputs else 0.0, forget_bias=0.5)
        weights = coupled.weights
        (w_ci, w_f, w_o), (b_ci, b_f, b_o) = (np.split(weights[name], 3, axis=-1) for name in ("w", "b"))
        w, b = np.concatenate([-w_f, w_ci, w_f, w_o], axis=1), np.concatenate([-b_f - 0.5, b_ci, b_f, b_o])
        more = {name: weights[name] for name in ("wcf", "wco", "w_p") if name in weights}
        four = LSTM(w, b, wci=-weights["wcf"], **more, forget_bias=0.5, proj_clip=coupled.proj_clip)
        x, state, lengths, reset = draw(coupled, T, B)
        d_y = rng("d_y", T).standard_normal((T, B, coupled.output_size))
        options = {"lengths": lengths, "reset": reset}
        results, expected = (results_of(layer, x, state, options, d_y, state) for layer in (coupled, four))
        for name, axis in (("w", 1), ("b", 0)):
            d_i, d_ci, d_f, d_o = np.split(expected[name], 4, axis=axis)
            expected[name] = np.concatenate([d_ci, d_f - d_i, d_o], axis=axis)
        expected["wcf"] = expected["wcf"] - expected.pop("wci")
        assert results.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(results[name], array, rtol=0, atol=1e-13 * max(1, np.abs(array).max()))


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


# ----------------------------------------------------------------------------------------------------------- PyTorch's
def drawn(g, dtype):
    T, B, I, H = random_sizes(g, dtype)
    H = max(H, 2)
    P = int(g.integers(1, H)) if dtype == "float64" else int(g.integers((H + 1) // 2, H))
    return {"sizes": (T, B, I, H, P), "directions": int(g.integers(1, 3)), "ragged": bool(g.integers(2)),
            "threads": int(g.integers(1, 4))}  # fmt: skip


def from_torch(module, suffix, dtype):
    """One direction's weights as ours, and the arrays of ours in PyTorch's form."""
    w_ih, w_hh, b_ih, b_hh, w_hr = (
        getattr(module, f"{name}_l0{suffix}").detach().numpy().astype(dtype)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    )
    return LSTM(np.concatenate([w_ih.T, w_hh.T]), b_ih + b_hh, w_p=w_hr.T, gate_order="ifco")


def as_array(tensor):
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach().numpy()


@pytest.mark.peers
@pytest.mark.parametrize("dtype", BOUNDS)
def test_torch(dtype, seed):
    """nn.LSTM(proj_size=) in float64: outputs, states and all gradients."""
    torch = pytest.importorskip("torch")

    def compare(g, k):
        config = drawn(g, dtype)
        T, B, I, H, P = config["sizes"]
        D = config["directions"]
        module = torch.nn.LSTM(I, H, proj_size=P, bidirectional=D == 2, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in module.named_parameters():  # a bias here is the sum of PyTorch's two
                values = g.uniform(-1, 1, parameter.shape) * (name[:4] == "weig" or "ih" in name) / np.sqrt(H)
                parameter.copy_(torch.from_numpy(values.astype(dtype).astype(np.float64)))
        cells = [from_torch(module, suffix, dtype) for suffix in ("", "_reverse")[:D]]
        x = g.standard_normal((T, B, I)).astype(dtype)
        h, c = (g.uniform(-0.8, 0.8, (D, B, size)).astype(dtype) for size in (P, H))
        lengths = g.integers(1, T + 1, B) if config["ragged"] else np.full(B, T)
        d_y = (g.standard_normal((T, B, D * P)) * (np.arange(T)[:, None] < lengths)[..., None]).astype(dtype)
        d_h, d_c = (g.standard_normal((D, B, size)).astype(dtype) for size in (P, H))

        leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, h, c)]
        packed = torch.nn.utils.rnn.pack_padded_sequence(leaves[0], torch.from_numpy(lengths), enforce_sorted=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's
            out, last = module(packed, tuple(leaves[1:]))
        y = torch.nn.utils.rnn.pad_packed_sequence(out, total_length=T)[0]
        grads = [torch.from_numpy(a.astype(np.float64)) for a in (d_y, d_h, d_c)]
        torch.autograd.backward([y, *last], grads)

        layer = cells[0] if D == 1 else Bidirectional(*cells)
        state = [LSTMState(c[d], h[d]) for d in range(D)]
        d_state = [LSTMState(d_c[d], d_h[d]) for d in range(D)]
        with on_threads(config["threads"]):
            our_y, after, tape = layer.forward(x, state[0] if D == 1 else tuple(state), lengths=lengths)
            results = layer.backward(tape, d_y, d_state[0] if D == 1 else tuple(d_state))
        after, before = ([nested] if D == 1 else nested for nested in (after, results[1]))
        pairs = {"y": (our_y, y), "d_x": (results[0], leaves[0].grad)}
        for d, suffix in enumerate(("", "_reverse")[:D]):
            prefix = "" if D == 1 else ("fw.", "bw.")[d]
            own = {name: results[2][f"{prefix}{name}"] for name in ("w", "b", "w_p")}
            pairs |= {f"h {d}": (after[d].h, last[0][d]), f"c {d}": (after[d].cs, last[1][d])}
            pairs |= {f"d_h {d}": (before[d].h, leaves[1].grad[d]), f"d_c {d}": (before[d].cs, leaves[2].grad[d])}
            theirs = {name: getattr(module, f"{name}_l0{suffix}").grad.numpy().T for name in
                      ("weight_ih", "weight_hh", "bias_ih", "weight_hr")}  # fmt: skip
            pairs |= {
                f"w_ih {d}": (own["w"][:I], theirs["weight_ih"]),
                f"w_hh {d}": (own["w"][I:], theirs["weight_hh"]),
            }
            pairs |= {f"b {d}": (own["b"], theirs["bias_ih"]), f"w_hr {d}": (own["w_p"], theirs["weight_hr"])}
        error, name = worst_of({name: (a, as_array(b)) for name, (a, b) in pairs.items()}, dtype)
        return error, f"{name} of {dtype}, {config}"

    check_configurations(compare, BOUNDS[dtype], seed)
