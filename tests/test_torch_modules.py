"""What modules of `blockcell.torch` are in PyTorch: compiled, exported, copied, saved, swapped; and what they refuse.

`make test-peers`, with torch in .venv.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings

import numpy as np
import pytest

from blockcell import _kernels, convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
rnn = torch.nn.utils.rnn

pytestmark = pytest.mark.peers
KINDS = ["LSTM", "GRU"]


def made(kind, *sizes, **options):
    torch.manual_seed(3)
    return getattr(nn, kind)(*(sizes or (5, 8)), **options)


def tensors_of(output):
    """y and the last states."""
    y, last = output
    return [y.data if isinstance(y, rnn.PackedSequence) else y, *(last if isinstance(last, tuple) else (last,))]


def step(module, call, *inputs):
    """Results and gradients of a training step."""
    module.zero_grad()
    x = inputs[0]
    if isinstance(x, torch.Tensor):
        x.grad = None
    results = tensors_of(call(*inputs))
    torch.autograd.backward(results, [torch.cos(a.detach()) for a in results])
    grads = [x.grad] if isinstance(x, torch.Tensor) else []
    return [*(a.detach() for a in results), *grads, *(p.grad for p in module.parameters())]


def equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def hx_of(kind, *shape, dtype=torch.float32):
    h, c = torch.randn(2, *shape, dtype=dtype)
    return (h, c) if kind == "LSTM" else h


# ------------------------------------------------------------------------------------------------- compiled and exported
COMPILED = [
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "dtype": torch.float64},
    {"num_layers": 2, "dropout": 0.0, "batch_first": True},
]


@pytest.fixture
def dynamo():
    """Nothing compiled before, and the warnings of PyTorch's own that compiling gives."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("options", COMPILED, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, options, backend, dynamo):
    module = made(kind, **options)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for B, T in ((3, 4), (5, 4), (2, 7)):  # sizes become symbols
        x = torch.randn(B, T, 5, dtype=module.weight_ih_l0.dtype, requires_grad=True)
        equal(step(module, compiled, x), step(module, module, x))
    hx = hx_of(kind, len(module.all_weights), x.shape[not module.batch_first], 8, dtype=x.dtype)
    equal(step(module, compiled, x, hx), step(module, module, x, hx))
    with torch.no_grad():
        equal(tensors_of(compiled(x)), tensors_of(module(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_within_a_model(kind, dynamo):
    torch.manual_seed(3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(torch.nn, kind)(5, 8, num_layers=2, bidirectional=True)
            self.head = torch.nn.Linear(16, 3)

        def forward(self, x):
            y, last = self.rnn(x)
            return self.head(torch.relu(y)), last

    model = Model()
    nn.replace(model)
    x = torch.randn(4, 3, 5, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    for found, expected in zip(step(model, compiled, x), step(model, model, x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["sorted", "unsorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_with_packed_sequences(kind, form, dynamo):
    module = made(kind, num_layers=2, bidirectional=True)
    packed = rnn.pack_padded_sequence(torch.randn(6, 3, 5), [6, 4, 1], enforce_sorted=False)
    if form == "sorted":
        packed = rnn.PackedSequence(packed.data, packed.batch_sizes)
    data = packed.data.requires_grad_()

    def call(data, given):
        return module(rnn.PackedSequence(data, *packed[1:]), given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    hx = hx_of(kind, 4, 3, 8) if form == "unsorted" else None
    equal(step(module, compiled, data, hx), step(module, call, data, hx))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exported(kind, strict, dynamo):
    module = made(kind, num_layers=2, bidirectional=True, batch_first=True).eval()
    x = torch.randn(3, 4, 5)
    sizes = {0: torch.export.Dim("B", min=2), 1: torch.export.Dim("T", min=2)}
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=(sizes,), strict=strict)
        for B, T in ((3, 4), (2, 9)):
            x = torch.randn(B, T, 5)
            equal(tensors_of(program.module()(x)), tensors_of(module(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("kind", KINDS)
def test_operators_pass_opcheck(kind):
    """Schema, fake tensors, autograd and tracing, of the forward and the backward operator."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "blockcell":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    for options in ({}, {"bidirectional": True, "bias": False}):
        module = made(kind, 3, 4, **options)
        x = torch.randn(5, 2, 3, requires_grad=True)
        packed = rnn.pack_padded_sequence(x, [5, 3])
        hx = hx_of(kind, 1 + module.bidirectional, 2, 4)
        with Recorder():
            for given in ((x,), (packed, hx)):
                step(module, module, *given)
            module(x.detach().transpose(0, 1).contiguous().transpose(0, 1))
            with torch.no_grad():
                module(x, hx)
    names = [str(function) for function, _ in calls]
    name = f"blockcell.{kind.lower()}"
    assert (names.count(f"{name}.default"), names.count(f"{name}_backward.default")) == (8, 4)
    for function, args in calls:
        args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        if "backward" not in str(function) and args[2]:
            args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.library.opcheck(function, tuple(args))
