"""Episodes that start within a sequence: calls with `reset` beside torch.nn's on each episode alone.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
from bits import same
from peer_cases import BOUNDS, CONFIGURATIONS, check_configurations, parts_of, random_sizes, state_of, worst_of
from torch_cases import MARKS, SHARE, hx_of, nudged, states_of

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
rnn = torch.nn.utils.rnn

pytestmark = MARKS
KINDS = ["LSTM", "GRU", "RNN"]
QUANTIZED = ["LSTM", "GRU"]


def by_episodes(module, kind, x, states, reset):
    """Compute y [T,B,.] and the last states by calls with one episode of one row each; x is [T,B,I]."""
    D, rows = 1 + module.bidirectional, []
    for b in range(x.shape[1]):
        row = slice(b, b + 1)
        starts = [0, *[t for t in range(1, len(x)) if reset[t, b]], len(x)]
        ys, lasts = [], []
        for k, (begin, end) in enumerate(pairwise(starts)):
            first = []
            for state in states:
                kept = torch.zeros(len(state), 1, 1, dtype=state.dtype)
                kept[0::D] = 1.0 if k == 0 and not reset[0, b] else 0.0
                if D == 2:
                    kept[1::D] = 1.0 if k == len(starts) - 2 else 0.0
                first.append(state[:, row] * kept)
            y, last = module(x[begin:end, row], hx_of(kind, first))
            ys.append(y)
            lasts.append(states_of(last))
        last = []
        for ahead, back in zip(lasts[-1], lasts[0], strict=True):
            directions = torch.arange(len(ahead)) % D
            last.append(torch.where((directions == 0)[:, None, None], ahead, back))
        rows.append([torch.cat(ys), *last])
    return [torch.cat(parts, dim=1) for parts in zip(*rows, strict=True)]


def call_in_form(module, kind, form, x, states, reset):
    """Compute the same by one call, in this form."""
    if form == "unbatched":
        y, last = module(x[:, 0], hx_of(kind, [state[:, 0] for state in states]), reset=reset[:, 0])
        return [y[:, None], *[state[:, None] for state in states_of(last)]]
    if module.batch_first:
        y, last = module(x.transpose(0, 1), hx_of(kind, states), reset=reset.T)
        return [y.transpose(0, 1), *states_of(last)]
    y, last = module(x, hx_of(kind, states), reset=reset)
    return [y, *states_of(last)]


def random_resets(g, T, B):
    """Draw resets: seldom, often, or always; nearly always at the first step, as rollouts have them."""
    reset = g.random((T, B)) < g.choice([0.0, 0.1, 0.5, 1.0], p=[0.1, 0.6, 0.2, 0.1])
    reset[0] |= g.random(B) < 0.5
    return reset


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, seed):
    """Results and all gradients."""

    def compare(g, k):
        T, B, inputs, hidden = random_sizes(g, dtype)
        form = str(g.choice(["batched", "unbatched"], p=[0.8, 0.2]))
        B = 1 if form == "unbatched" else B
        options = {name: bool(g.integers(2)) for name in ("bidirectional", "bias")}
        options["num_layers"] = int(g.integers(1, 4))
        if kind == "RNN" and dtype == "float64":  # in float32 rounding may lead beyond the kink of relu
            options["nonlinearity"] = str(g.choice(["tanh", "relu"]))
        fewest = 1 if dtype == "float64" else 8  # as of H
        if kind == "LSTM" and hidden > fewest and g.integers(2):
            options["proj_size"] = int(g.integers(fewest, hidden))
        where = f"{kind}, {dtype}, {T=}, {B=}, {inputs=}, {hidden=}, {form}, {options}"
        first = bool(g.integers(2))
        torch.manual_seed(CONFIGURATIONS * seed + k)
        ours = getattr(nn, kind)(inputs, hidden, batch_first=first, dtype=getattr(torch, dtype), **options)
        theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
        theirs.load_state_dict({name: tensor.double() for name, tensor in ours.state_dict().items()})
        torch.set_num_threads(int(g.integers(1, 3)))
        cells, n = options["num_layers"] * (1 + options["bidirectional"]), 1 + (kind == "LSTM")
        widths = (ours.proj_size or hidden, hidden)[:n]
        y_size = (1 + options["bidirectional"]) * widths[0]
        x, d_y = (g.standard_normal((T, B, size)).astype(dtype) for size in (inputs, y_size))
        states, d_last = ([g.uniform(-0.8, 0.8, (cells, B, w)).astype(dtype) for w in widths] for _ in range(2))
        reset = torch.from_numpy(random_resets(g, T, B))
        results, few = [], dtype == "float32" and inputs < 8
        for module in (ours, theirs, nudged(g, theirs))[: 2 + few]:
            to = module.weight_ih_l0.dtype
            given = [torch.from_numpy(a).to(to).requires_grad_() for a in (x, *states)]
            if module is ours:
                outputs = call_in_form(module, kind, form, given[0], given[1:], reset)
            else:
                outputs = by_episodes(module, kind, given[0], given[1:], reset)
            torch.autograd.backward(outputs, [torch.from_numpy(d).to(to) for d in (d_y, *d_last)])
            results.append([a.detach() for a in outputs] + [a.grad for a in (*given, *module.parameters())])
        with torch.no_grad():
            inference = call_in_form(ours, kind, form, torch.from_numpy(x), [*map(torch.from_numpy, states)], reset)
        assert all(torch.equal(a, b) for a, b in zip(inference, results[0], strict=False)), where
        names = ["y", *"hc"[:n], "d_x", *("d_h", "d_c")[:n], *[name for name, _ in ours.named_parameters()]]
        pairs = {name: (a.numpy(), b) for name, a, b in zip(names, *results[:2], strict=True)}
        at = names.index("d_x")
        changes = [(moved[at] - results[1][at]).abs().max().item() for moved in results[2:]]
        error, name = worst_of(pairs, dtype, {"d_x": max(changes, default=0.0) / SHARE})
        return error, f"{name} of {where}"

    check_configurations(compare, BOUNDS[dtype], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, seed):
    torch.manual_seed(seed)
    module = getattr(nn, kind)(3, 2, num_layers=2, bidirectional=True, dtype=torch.float64)
    names, weights = zip(*module.named_parameters(), strict=True)
    x = torch.randn(5, 3, 3, dtype=torch.float64, requires_grad=True)
    states = [torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "LSTM"))]
    reset = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)

    def function(x, *tensors):
        given, own = tensors[: len(states)], dict(zip(names, tensors[len(states) :], strict=True))
        y, last = torch.func.functional_call(module, own, (x, hx_of(kind, given)), {"reset": reset})
        return y, *states_of(last)

    assert torch.autograd.gradcheck(function, (x, *states, *weights))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_goes_through_a_reset(kind, seed):
    """Nor does any number, not even one that is not finite."""
    torch.manual_seed(seed)
    module = getattr(nn, kind)(5, 8, num_layers=2, bidirectional=True)
    reset = torch.zeros(6, 3, dtype=torch.bool)
    reset[2, 0] = reset[4, 0] = reset[3, 2] = True
    x = torch.randn(6, 3, 5, requires_grad=True)
    states = [torch.randn(4, 3, 8, requires_grad=True) for _ in range(1 + (kind == "LSTM"))]
    y, _ = module(x, hx_of(kind, states), reset=reset)
    y[2:4, 0].sum().backward()  # an episode between two others
    reached = torch.zeros(6, 3, dtype=torch.bool)
    reached[2:4, 0] = True
    assert torch.equal((x.grad != 0).any(2), reached)
    assert not any(state.grad.any() for state in states)
    spoilt = x.detach().clone()
    spoilt[:2, 0] = spoilt[4:, 0] = spoilt[:, 1] = np.nan
    assert torch.equal(module(spoilt, hx_of(kind, states), reset=reset)[0][2:4, 0], y[2:4, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_resets_may_be_overwritten(kind, seed):
    """Before the gradients are computed, by the next rollout; and y, as without resets."""
    torch.manual_seed(seed)
    module, x = getattr(nn, kind)(5, 8), torch.randn(6, 3, 5)
    results = []
    for overwrites in (False, True):
        module.zero_grad()
        reset = torch.zeros(6, 3, dtype=torch.bool)
        reset[2] = True
        y, _ = module(x, reset=reset)
        if overwrites:
            reset.fill_(True)
            y.relu_()
        else:
            y = y.relu()
        y.sum().backward()
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))


class Reader(torch.nn.Module):
    """A model that reads a rollout."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(5, 8, **options)

    def forward(self, x, reset):
        return self.rnn(x, reset=reset)


def training_step(model, call, x, reset):
    """Return results and gradients of a training step."""
    model.zero_grad()
    y, last = call(x, reset)
    y.square().sum().backward()
    return [y.detach(), *[state.detach() for state in states_of(last)], *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_exported_traced(kind, dynamo):
    model = Reader(kind, num_layers=2, bidirectional=True)
    drawn = [(torch.randn(T, B, 5), torch.rand(T, B) < 0.3) for T, B in ((4, 3), (7, 3), (5, 2))]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compilers = [compiled, torch.compile(model, fullgraph=True)]
    sizes = {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B", min=2)}
    exported = torch.export.export(model, drawn[0], dynamic_shapes=(sizes, sizes)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(model, drawn[0])
    symbolic = torch.fx.symbolic_trace(model)
    assert [(n.target, [*n.kwargs]) for n in symbolic.graph.nodes if n.op == "call_module"] == [("rnn", ["reset"])]
    for x, reset in drawn:
        expected = training_step(model, model, x, reset)
        for call in (*compilers, symbolic, traced):
            assert all(map(torch.equal, training_step(model, call, x, reset), expected))
        with torch.no_grad():
            y, last = exported(x, reset)
        assert all(map(torch.equal, [y, *states_of(last)], expected[: 1 + len(states_of(last))]))


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized(kind, scheme, dynamo, seed):
    """The bits of the quantized layer."""
    g = np.random.default_rng([seed, 1])
    for k in range(10):
        layers, D = int(g.integers(1, 3)), int(g.integers(1, 3))
        module = getattr(torch.nn, kind)(5, 40, layers, bidirectional=D == 2).eval()
        nn.replace(module, scheme)
        T, B = int(g.integers(1, 12)), int(g.integers(1, 20))
        x, reset = g.standard_normal((T, B, 5)).astype(np.float32), random_resets(g, T, B)
        arrays = g.uniform(-0.8, 0.8, (1 + (kind == "LSTM"), layers * D, B, 40)).astype(np.float32)
        given = torch.from_numpy(x), hx_of(kind, [*torch.from_numpy(arrays)])
        y, last = module(*given, reset=torch.from_numpy(reset))
        state = state_of([*arrays.swapaxes(0, 1)], layers, D)
        expected, final = convert.from_torch(module).quantize(scheme)(x, state, reset=reset)
        where = f"{k}: {T=}, {B=}, {layers=}, {D=}"
        assert same(y.numpy(), expected), where
        for j, part in enumerate(parts_of(final, layers, D)):
            assert same([a[j].numpy() for a in states_of(last)], [*part]), where
        if k == 0:
            with torch.no_grad():
                compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
                assert torch.equal(compiled(*given, reset=torch.from_numpy(reset))[0], y)


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind):
    module, x = getattr(nn, kind)(5, 8), torch.zeros(4, 3, 5)
    first = getattr(nn, kind)(5, 8, batch_first=True)
    prefix, reset = f"blockcell.torch.{kind}: ", torch.zeros(4, 3, dtype=torch.bool)
    shape = "as that of input without its last dimension"
    packed = rnn.pack_padded_sequence(x, [4, 2, 1])
    cases = [
        (module, x, reset.float(), TypeError, "reset is of type torch.float32; expected a tensor of torch.bool"),
        (module, x, reset.numpy(), TypeError, "reset is of type ndarray; expected a tensor of torch.bool"),
        (module, x, reset.T, ValueError, f"reset has shape (3, 4); expected (4, 3), {shape}"),
        (module, x, reset[:, :, None], ValueError, f"reset has shape (4, 3, 1); expected (4, 3), {shape}"),
        (first, x, reset[:3], ValueError, f"reset has shape (3, 3); expected (4, 3), {shape}"),
        (module, x[:, 0], reset, ValueError, f"reset has shape (4, 3); expected (4,), {shape}"),
        (module, x, reset.to("meta"), ValueError, "reset is on meta; expected cpu"),
        (
            module,
            packed,
            reset,
            ValueError,
            "reset is given and input is a PackedSequence; expected a padded tensor with it",
        ),
    ]
    for each, given, resets, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(prefix + message)}$"):
            each(given, reset=resets)
