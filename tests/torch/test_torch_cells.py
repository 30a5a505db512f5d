"""`LSTMCell`, `GRUCell` and `RNNCell` of `blockcell.torch` beside torch.nn's, in loops of one to several steps.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from bits import same
from peer_cases import BOUNDS, CONFIGURATIONS, check_configurations, worst_of
from torch_cases import (
    MARKS,
    SHARE,
    check_refused,
    hx_of,
    nudged,
    states_of,
    training_step,
)

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
forward_ad = torch.autograd.forward_ad

pytestmark = MARKS
KINDS = ["LSTMCell", "GRUCell", "RNNCell"]
QUANTIZED = ["LSTMCell", "GRUCell"]


def cell_of(kind, *sizes, **options):
    """Make a cell of a kind."""
    torch.manual_seed(0)
    return getattr(nn, kind)(*(sizes or (5, 8)), **options)


def count_of(kind):
    """Return the number of states of a kind of cell."""
    return 2 if kind == "LSTMCell" else 1


class Loop(torch.nn.Module):
    """A loop of a cell over the steps of x, which returns the states after each."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, hx):
        states = []
        for row in x:
            hx = self.cell(row, hx)
            states += states_of(hx)
        return states


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, seed):
    def compare(g, k):
        fewest = (1, 1, 1, 1 if dtype == "float64" else 8)
        T, B, inputs, hidden = (int(size) for size in g.integers(fewest, (6, 12, 24, 40)))
        B = int(g.choice([B, 40, 130], p=[0.9, 0.05, 0.05]))
        rows = () if g.random() < 0.2 else (B,)
        bias, zero, x_grad, hx_grad = (bool(g.integers(2)) for _ in range(4))
        frozen, asked = float(g.choice([0, 0, 0.5, 1])), [bool(b) for b in g.integers(4, size=2)]
        where = f"{kind}, {dtype}, {T=}, {rows=}, {inputs=}, {hidden=}, {bias=}, {zero=}, {x_grad=}, "
        where += f"{hx_grad=}, {frozen=}, {asked=}"
        options = {"bias": bias}
        if kind == "RNNCell" and dtype == "float64":  # in float32 rounding may lead beyond the kink of relu
            options["nonlinearity"] = str(g.choice(["tanh", "relu"]))
        torch.manual_seed(CONFIGURATIONS * seed + k)
        ours = getattr(nn, kind)(inputs, hidden, dtype=getattr(torch, dtype), **options)
        theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
        theirs.load_state_dict({name: tensor.double() for name, tensor in ours.state_dict().items()})
        for both in zip(ours.parameters(), theirs.parameters(), strict=True):
            is_frozen = g.random() < frozen
            for parameter in both:
                parameter.requires_grad_(not is_frozen)
        torch.set_num_threads(int(g.integers(1, 4)))
        x = g.standard_normal((T, *rows, inputs)).astype(dtype)
        hx = g.uniform(-0.8, 0.8, (count_of(kind), *rows, hidden)).astype(dtype)
        grads = g.standard_normal((2, T, *rows, hidden)).astype(dtype)
        results, few = [], dtype == "float32" and inputs < 8
        for module in (ours, theirs, nudged(g, theirs))[: 2 + few]:
            to = module.weight_ih.dtype
            given = torch.from_numpy(x).to(to).requires_grad_(x_grad)
            first = [torch.from_numpy(a).to(to).requires_grad_(hx_grad) for a in hx]
            found = Loop(module)(given, None if zero else hx_of(kind, first))
            states = [torch.stack(found[n :: count_of(kind)]) for n in range(count_of(kind))]
            wanted = [(a, torch.from_numpy(d).to(to)) for a, d, b in zip(states, grads, asked, strict=False) if b]
            if wanted and states[0].requires_grad:
                torch.autograd.backward(*zip(*wanted, strict=True))
            named = {"x": given} | dict(zip("hc", first, strict=False)) | dict(module.named_parameters())
            results.append(dict(zip("hc", states, strict=False)) | {f"d_{n}": a.grad for n, a in named.items()})
        found, expected, *moved = results
        assert {n for n, a in expected.items() if a is None} == {n for n, a in found.items() if a is None}, where
        pairs = {n: (a.detach().numpy(), expected[n].detach()) for n, a in found.items() if a is not None}
        changes = [(each["d_x"] - expected["d_x"]).abs().max().item() for each in moved if "d_x" in pairs]
        error, name = worst_of(pairs, dtype, {"d_x": max(changes, default=0.0) / SHARE})
        return error, f"{name} of {where}"

    check_configurations(compare, BOUNDS[dtype], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_layer(kind, seed):
    """Of single steps, on any threads, with and without gradients."""
    g = np.random.default_rng([seed, 1])
    for k in range(20):
        inputs, hidden, B = (int(size) for size in g.integers((1, 1, 1), (60, 90, 50)))
        cell, x = cell_of(kind, inputs, hidden), torch.from_numpy(g.standard_normal((3, B, inputs)).astype(np.float32))
        layer = getattr(nn, kind.removesuffix("Cell"))(inputs, hidden)
        layer.load_state_dict({f"{name}_l0": tensor for name, tensor in cell.state_dict().items()})
        expected = hx = None
        for row in x:
            torch.set_num_threads(int(g.integers(1, 4)))
            _, expected = layer(row[None], expected)
            with torch.set_grad_enabled(bool(g.integers(2))):
                hx = cell(row, hx)
            assert all(torch.equal(a, b[0]) for a, b in zip(states_of(hx), states_of(expected), strict=True)), k


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    module = cell_of(kind, 3, 2, dtype=torch.float64)
    names, weights = zip(*module.named_parameters(), strict=True)
    inputs = [torch.randn(3, size, dtype=torch.float64, requires_grad=True) for size in (3, 2, 2)[: 1 + count_of(kind)]]

    def function(x, *tensors):
        states, own = tensors[: count_of(kind)], dict(zip(names, tensors[count_of(kind) :], strict=True))
        return tuple(states_of(torch.func.functional_call(module, own, (x, hx_of(kind, states)))))

    assert torch.autograd.gradcheck(function, (*inputs, *weights))


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, backend, dynamo):
    loop = Loop(cell_of(kind))
    compiled = torch.compile(loop, fullgraph=True, backend=backend)
    for B in (3, 5, 2):  # the size becomes a symbol
        shapes = ((4, B, 5), (B, 8), (B, 8))[: 1 + count_of(kind)]
        x, *states = (torch.randn(shape, requires_grad=True) for shape in shapes)
        for hx in (hx_of(kind, states), None):
            found, expected = (training_step(loop, call, x, hx) for call in (compiled, loop))
            assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            assert all(map(torch.equal, compiled(x, None), loop(x, None)))


@pytest.mark.parametrize("kind", KINDS)
def test_exported_and_traced(kind):
    loop, x = Loop(cell_of(kind)), torch.randn(3, 4, 5)
    hx = hx_of(kind, torch.randn(2, 4, 8).unbind())
    with torch.no_grad():
        expected = loop(x, hx)
        assert all(map(torch.equal, torch.export.export(loop, (x, hx)).module()(x, hx), expected))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            assert all(map(torch.equal, torch.jit.trace(loop, (x, hx))(x, hx), expected))

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = loop.cell

        def forward(self, x, hx):
            return self.cell(x), self.cell(x, hx)

    traced = torch.fx.symbolic_trace(Twice())
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["cell", "cell"]
    for found, wanted in zip(traced(x[0], hx), Twice()(x[0], hx), strict=True):
        assert all(map(torch.equal, states_of(found), states_of(wanted)))


@pytest.mark.parametrize("kind", KINDS)
def test_operators_called_by_hand_have_one_direction(kind):
    module = cell_of(kind)
    inputs = torch.zeros(3, 5), [*module.parameters()], False, True, [torch.zeros(3, 8)] * count_of(kind), None
    module._op._op(*inputs)
    for k, wrong in ((2, True), (3, False)):
        with pytest.raises(ValueError, match="a single step has one direction, and its y is the caller's alone"):
            module._op._op(*inputs[:k], wrong, *inputs[k + 1 :])


# ------------------------------------------------------------------------------------------ what a module is in PyTorch
@pytest.mark.parametrize("kind", KINDS)
def test_results_may_be_changed_in_place(kind):
    module, x = cell_of(kind), torch.randn(3, 5)
    results = []
    for change in (torch.relu, torch.relu_):
        module.zero_grad()
        sum(change(state).sum() for state in states_of(module(x))).backward()
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind):
    prefix, x = f"blockcell.torch.{kind}: ", torch.zeros(3, 5)
    number, pair = ("[0]", "a pair of tensors (h_0, c_0)") if kind == "LSTMCell" else ("", "a tensor")

    def zero_hx(*shape, dtype=torch.float32):
        return hx_of(kind, [torch.zeros(shape, dtype=dtype)] * 2)

    cell, half = cell_of(kind), cell_of(kind).half()
    cases = [
        (half, (x.half(),), f"TypeError: {prefix}the weights are torch.float16; expected"),
        (cell, (x.double(),), "ValueError: RNN input dtype (torch.float64) does not match weight dtype"),
        (cell, (x.to("meta"),), f"ValueError: {prefix}input is on meta, the weights on cpu; expected cpu"),
        (cell, (x.numpy(),), f"TypeError: {prefix}input is of type ndarray; expected a tensor"),
        (cell, (x[None],), f"ValueError: {kind}: Expected input to be 1D or 2D, got 3D instead"),
        (cell, (x[:, :3],), "RuntimeError: input has inconsistent input_size: got 3, expected 5"),
        (cell, (x, 3), f"TypeError: {prefix}hx is of type int; expected {pair}"),
        (cell, (x, zero_hx(4, 8)), f"RuntimeError: Expected hidden{number} size (3, 8), got [4, 8]"),
        (cell, (x, zero_hx(1, 3, 8)), f"RuntimeError: Expected hidden{number} size (3, 8), got [1, 3, 8]"),
        (cell, (x[0], zero_hx(3, 8)), f"RuntimeError: Expected hidden{number} size (8,), got [3, 8]"),
        (cell, (x, zero_hx(3, 8, dtype=torch.float64)), "ValueError: RNN hx dtype (torch.float64) does not"),
    ]
    check_refused(cases)


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized(kind, scheme, dynamo):
    """The bits of a step of the quantized layer."""
    for B in (1, 3, 40):
        module, x = getattr(torch.nn, kind)(5, 40).eval(), torch.randn(B, 5)
        nn.replace(module, scheme)
        layer = convert.from_torch(module)
        hx = hx_of(kind, torch.randn(2, B, 40).unbind())
        for rows, given in ((x, hx), (x, None), (x[0], hx_of(kind, [s[0] for s in states_of(hx)]))):
            arrays = None if given is None else [s.numpy().reshape(-1, 40) for s in states_of(given)[::-1]]
            _, state = layer.quantize(scheme)(rows.reshape(1, -1, 5).numpy(), arrays)
            found = states_of(module(rows, given))
            assert all(same(a.numpy().reshape(b.shape), b) for a, b in zip(found, state[::-1], strict=True))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert all(map(torch.equal, states_of(compiled(x, hx)), states_of(module(x, hx))))
    with pytest.raises(RuntimeError, match=f"blockcell.torch.{kind}: it is in training mode with gradients enabled"):
        module.train()(x)
    with pytest.raises(RuntimeError, match=f"blockcell.torch.{kind}: input or hx requires a gradient"):
        module.eval()(x.requires_grad_())
    assert repr(module) == f"{kind}(5, 40, quantization={scheme!r})"
    assert type(module) is getattr(nn, kind) and not nn.restore(module).left


def test_what_is_not_quantized():
    model = torch.nn.ModuleDict({"plain": torch.nn.RNN(5, 8), "cell": torch.nn.RNNCell(5, 8)})
    model["projected"] = torch.nn.LSTM(5, 8, proj_size=3)
    assert nn.replace(model, "int8").left == {
        "plain": "it has no gates, and is not quantized to int8",
        "cell": "it has no gates, and is not quantized to int8",
        "projected": "proj_size is 3, and it is not quantized to int8",
    }
