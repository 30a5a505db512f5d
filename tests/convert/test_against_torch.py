"""Training goes on after a conversion from PyTorch: all weights beside PyTorch's, with the cures of docs/convert.md.

`pytest -m peers`, with torch in .venv. `tests/torch/test_torch.py` compares results and gradients of all kinds.
"""

from __future__ import annotations

import numpy as np
import pytest

from blockcell import convert, optim

pytestmark = pytest.mark.peers


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
