"""LSTMs, with projections and without, GRUs and RNNs beside PyTorch's on the same weights, in one or two directions,
one or more upon each other, with rows of different lengths or not: y, the final states, and the gradients to x, to the
initial states and to all weights.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import numpy as np
import pytest
from convert_cases import from_torch
from peer_cases import BOUNDS, check_configurations, parts_of, random_sizes, state_of, worst_of

from blockcell import convert, optim

pytestmark = pytest.mark.peers


KINDS = {  # classes of torch.nn, and options
    "LSTM": ("LSTM", {}),
    "GRU": ("GRU", {}),
    "RNN tanh": ("RNN", {"nonlinearity": "tanh"}),
    "RNN relu": ("RNN", {"nonlinearity": "relu"}),
    "LSTM projected": ("LSTM", {}),
}


def compare(name, sizes, dtype, g, *, layers=2, directions=2, bias=True, packed=True):
    """Compare with PyTorch; return the largest error, in eps of an array's largest entry, and where it is."""
    torch = pytest.importorskip("torch")
    from torch.nn.utils import rnn

    T, B, inputs, hidden = sizes
    kind, nonlinearity = KINDS[name]
    options = {"num_layers": layers, "bidirectional": directions == 2, "bias": bias} | nonlinearity
    outputs = hidden
    if name == "LSTM projected":
        least = 1 if dtype == "float64" else 8  # for the same reason as the least number of cells
        hidden = max(hidden, least + 1)
        options["proj_size"] = outputs = int(g.integers(least, hidden))
    theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
    bound = 1 / np.sqrt(hidden)
    weights = {key: g.uniform(-bound, bound, value.shape).astype(dtype) for key, value in theirs.state_dict().items()}
    only_one = slice(2 * hidden) if kind == "GRU" else slice(None)  # where they have two biases for one of ours
    for key in weights:
        if key.startswith("bias_hh"):
            weights[key][only_one] = 0
    theirs.load_state_dict({key: torch.from_numpy(value.astype(np.float64)) for key, value in weights.items()})
    ours = from_torch(weights, nonlinearity=nonlinearity.get("nonlinearity"))
    assert ours.dtype == dtype

    cells, count = layers * directions, 2 if kind == "LSTM" else 1
    x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, directions * outputs))
    widths = [outputs, hidden][:count]  # of h, cs
    first, d_last = ([g.uniform(-0.8, 0.8, (cells, B, size)).astype(dtype) for size in widths] for _ in range(2))
    lengths = g.integers(1, T + 1, B) if packed else None  # PyTorch takes no row without steps

    x64, *first64 = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, *first))
    hx = tuple(first64) if kind == "LSTM" else first64[0]
    if packed:
        lengths[g.integers(B)] = T
        sequences = rnn.pack_padded_sequence(x64, torch.from_numpy(lengths), enforce_sorted=False)
        y_packed, last = theirs(sequences, hx)
        y_theirs, _ = rnn.pad_packed_sequence(y_packed, total_length=T)
    else:
        y_theirs, last = theirs(x64, hx)
    last = last if kind == "LSTM" else (last,)
    incoming = zip((y_theirs, *last), (d_y, *d_last), strict=True)
    sum((a * torch.from_numpy(d.astype(np.float64))).sum() for a, d in incoming).backward()

    y, state, tape = ours.forward(x, state_of([*zip(*first, strict=True)], layers, directions), lengths=lengths)
    d_x, d_first, grads = ours.backward(tape, d_y, state_of([*zip(*d_last, strict=True)], layers, directions))

    pairs = {"y": (y, y_theirs.detach()), "d_x": (d_x, x64.grad)}
    for what, states_found, expected in (("state", state, last), ("d_state", d_first, [a.grad for a in first64])):
        for cell, part in enumerate(parts_of(states_found, layers, directions)):
            for name, array, theirs_too in zip(("h", "cs"), part, expected, strict=False):
                pairs[f"{what} {cell} {name}"] = array, theirs_too.detach()[cell]
    # Each of their two biases has the gradient of ours, which is their sum.
    named = {key: value.grad.numpy().copy() for key, value in theirs.named_parameters()}
    for key in named:
        if key.startswith("bias_hh"):
            named[key][only_one] = 0
    for key, expected in from_torch(named, nonlinearity=nonlinearity.get("nonlinearity")).weights.items():
        if bias or not key.split(".")[-1].startswith("b"):
            pairs[f"gradient of {key}"] = grads[key], expected
    return worst_of(pairs, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [(9, 1, 6, 8), (7, 5, 3, 4), (12, 33, 20, 16), (30, 8, 40, 64), (6, 16, 100, 130)], ids=str
)
def test_bidirectional_stack(sizes, kind, dtype, seed):
    error, what = compare(kind, sizes, dtype, np.random.default_rng([seed, *sizes]))
    print(f"{kind}, {dtype}, {sizes}: {error:.1f} eps, {what}")
    assert error <= BOUNDS[dtype], f"{what} is {error:.1f} eps off"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, seed):
    def compare_drawn(g, k):
        sizes = random_sizes(g, dtype)
        options = {"layers": int(g.integers(1, 4)), "directions": int(g.integers(1, 3))}
        options |= {name: bool(g.integers(2)) for name in ("bias", "packed")}
        error, name = compare(kind, sizes, dtype, g, **options)
        return error, f"{name} of {kind}, {dtype}, T, B, I, H = {sizes}, {options}"

    check_configurations(compare_drawn, BOUNDS[dtype], seed)


# ----------------------------------------------------------------------------------------------------------- training
def double_steps(optimizer, **options):
    """Return a step of blockcell's optimizer, which moves biases that PyTorch has twice as far again."""

    def step(weights, grads, memory, biases):
        new, memory = optimizer(weights, grads, memory, **options)
        return new | {name: 2 * new[name] - weights[name] for name in biases}, memory

    return step


def double_gradients(weights, grads, memory, biases):
    """Compute a step of PyTorch's SGD with momentum and weight decay, with doubled gradients of `biases`."""
    memory = memory or dict.fromkeys(weights, 0.0)
    grads = grads | {name: 2 * grads[name] for name in biases}
    memory = {name: 0.9 * memory[name] + grads[name] + 0.1 * weights[name] for name in weights}
    return {name: weights[name] - 0.05 * memory[name] for name in weights}, memory


def double_rates(weights, grads, memory, biases):
    """Compute a step of PyTorch's AdamW by blockcell's Adam: decay, then steps, doubled for `biases`."""
    new, memory = optim.adam(weights, grads, memory, learning_rate=0.01)
    steps = {name: new[name] - weights[name] for name in weights}
    return {name: weights[name] * (1 - 0.01 * 0.1) + (1 + (name in biases)) * steps[name] for name in weights}, memory


TRAINED = {  # PyTorch's optimizer, its arguments, and the cure of docs/convert.md
    "sgd": ("SGD", {"lr": 0.05}, double_steps(optim.sgd, learning_rate=0.05)),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}, double_steps(optim.momentum, learning_rate=0.05)),
    "adam": ("Adam", {"lr": 0.01}, double_steps(optim.adam, learning_rate=0.01)),
    "weight decay": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, double_gradients),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, double_rates),
}


@pytest.mark.parametrize("optimizer", TRAINED)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_training_on_after_a_conversion(kind, optimizer, seed):
    """All weights go where PyTorch's go; biases that are the sum of two of PyTorch's only with the cure."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    told = {"nonlinearity": "tanh"} if kind == "RNN" else {}
    theirs = getattr(torch.nn, kind)(3, 4, 2, bidirectional=True, dtype=torch.float64, **told)
    x, target = (torch.randn(6, 5, size, dtype=torch.float64) for size in (3, 8))
    ours = convert.from_torch(theirs)
    name, options, step = TRAINED[optimizer]
    trained = getattr(torch.optim, name)(theirs.parameters(), **options)
    biases = {key for key in ours.weights if key.endswith((".b", ".b_ru"))}
    assert len(biases) == 4
    memory, none = None, set()
    for k in range(4):
        trained.zero_grad()
        (theirs(x)[0] - target).square().sum().backward()
        trained.step()
        y, _, tape = ours.forward(x.numpy())
        grads = ours.backward(tape, 2 * (y - target.numpy()))[2]
        expected = convert.from_torch(theirs).weights
        if k == 0:
            uncured = step(ours.weights, grads, memory, none)[0]
            assert all((np.abs(uncured[key] - expected[key]).max() > 1e-4) == (key in biases) for key in expected)
        weights, memory = step(ours.weights, grads, memory, biases)
        ours.set_weights(**weights)
        for key in expected:
            assert np.abs(weights[key] - expected[key]).max() < 1e-10, (k, key)
