"""Two bidirectional LSTMs, one upon the other, beside PyTorch's on the same weights, with rows of different lengths:
y, the final states, and the gradients to x, to the initial states and to all weights.

`make test-peers`, with torch in .venv.  BLOCKCELL_SEED repeats a run.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from blockcell import LSTMState, convert

pytestmark = pytest.mark.peers
SEED = int(os.environ.get("BLOCKCELL_SEED", random.randrange(10**6)))
BOUNDS = {"float64": 1e-12 / np.finfo(np.float64).eps, "float32": 8}  # in eps of an array's largest entry


def states_of(h, cs):
    """PyTorch's states, [layers * directions, B, H], as those of a stack of bidirectional layers."""
    parts = [LSTMState(*pair) for pair in zip(cs, h, strict=True)]
    return tuple(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "sizes", [(9, 1, 6, 8), (7, 5, 3, 4), (12, 33, 20, 16), (30, 8, 40, 64), (6, 16, 100, 130)], ids=str
)
def test_bidirectional_stack(sizes, dtype):
    torch = pytest.importorskip("torch")
    from torch.nn.utils import rnn

    T, B, inputs, hidden = sizes
    g = np.random.default_rng([SEED, *sizes])
    theirs = torch.nn.LSTM(inputs, hidden, num_layers=2, bidirectional=True, dtype=torch.float64)
    bound = 1 / np.sqrt(hidden)
    weights = {key: g.uniform(-bound, bound, value.shape).astype(dtype) for key, value in theirs.state_dict().items()}
    for key in weights:  # PyTorch has two biases for each of ours: one holds it
        if key.startswith("bias_hh"):
            weights[key][:] = 0
    theirs.load_state_dict({key: torch.from_numpy(value.astype(np.float64)) for key, value in weights.items()})
    ours = convert.from_torch(weights)
    assert ours.dtype == dtype

    x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, 2 * hidden))
    h, cs, d_h, d_cs = (g.uniform(-0.8, 0.8, (4, B, hidden)).astype(dtype) for _ in range(4))
    lengths = g.integers(1, T + 1, B)  # PyTorch takes no row without steps
    lengths[g.integers(B)] = T

    x64, h64, cs64 = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, h, cs))
    packed = rnn.pack_padded_sequence(x64, torch.from_numpy(lengths), enforce_sorted=False)
    y_packed, (h_last, cs_last) = theirs(packed, (h64, cs64))
    y_theirs, _ = rnn.pad_packed_sequence(y_packed, total_length=T)
    incoming = zip((y_theirs, h_last, cs_last), (d_y, d_h, d_cs), strict=True)
    sum((a * torch.from_numpy(d.astype(np.float64))).sum() for a, d in incoming).backward()

    y, last, tape = ours.forward(x, states_of(h, cs), lengths=lengths)
    d_x, d_first, grads = ours.backward(tape, d_y, states_of(d_h, d_cs))

    pairs = {"y": (y, y_theirs.detach()), "d_x": (d_x, x64.grad)}
    for what, found, expected in (
        ("state", last, states_of(h_last.detach(), cs_last.detach())),
        ("d_state", d_first, states_of(h64.grad, cs64.grad)),
    ):
        for k in range(2):
            for direction in range(2):
                for name in ("cs", "h"):
                    pair = (getattr(part[k][direction], name) for part in (found, expected))
                    pairs[f"{what} {k} {direction} {name}"] = tuple(pair)
    # Each of their two biases has the gradient of ours.
    named = {
        key: np.zeros_like(value.detach()) if key.startswith("bias_hh") else value.grad.numpy()
        for key, value in theirs.named_parameters()
    }
    expected_grads = convert.from_torch(named).weights
    assert grads.keys() == expected_grads.keys()
    pairs |= {f"gradient of {key}": (grads[key], expected_grads[key]) for key in grads}

    worst = {}
    for what, (found, expected) in pairs.items():
        expected = np.asarray(expected)
        assert found.shape == expected.shape and found.dtype == dtype
        scale = np.abs(expected).max()
        worst[what] = np.abs(found - expected).max() / (np.finfo(dtype).eps * scale)
    print(f"seed {SEED}, {dtype}, {sizes}: {max(worst.values()):.1f} eps, {max(worst, key=worst.get)}")
    for what, error in worst.items():
        assert error <= BOUNDS[dtype], f"seed {SEED}: {what} is {error:.1f} eps off"
