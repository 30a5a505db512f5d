"""`blockcell.torch` beside torch.nn on the same weights: y, the final states, and the gradients to everything.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import numpy as np
import pytest
from bits import same
from peer_cases import BOUNDS, check_configurations, parts_of, random_sizes, worst_of
from torch_cases import CHANGES_OF_WEIGHTS, MARKS, hx_of, states_of

from blockcell import _kernels, convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
op = pytest.importorskip("blockcell.torch.op")
rnn = torch.nn.utils.rnn

pytestmark = MARKS
CONFIGURATIONS = 300
KINDS = ["LSTM", "GRU", "RNN"]


def random_config(g, dtype):
    """Draw sizes and options of a configuration."""
    config = {"sizes": random_sizes(g, dtype), "layers": int(g.integers(1, 4)), "threads": int(g.integers(1, 3))}
    switches = ("bidirectional", "bias", "batch_first", "x_grad", "hx", "hx_grad", "compact")
    config |= {name: bool(g.integers(2)) for name in switches}
    config["form"] = str(g.choice(["batched", "batched", "unbatched", "sorted", "unsorted", "equal"]))
    config["frozen"] = float(g.choice([0, 0, 0.5, 1]))  # how many of the parameters
    config["nonlinearity"] = str(g.choice(["tanh", "relu"]))  # of an RNN
    config["projects"] = bool(g.integers(2))  # an LSTM
    config["asked"] = [bool(b) for b in g.integers(4, size=3)]  # of y, h_n and c_n, which have a gradient
    return config


def module_pair(kind, config, g, dtype):
    """Make a module of blockcell, and one of PyTorch in float64 with the same weights."""
    inputs, hidden = config["sizes"][2:]
    options = {"num_layers": config["layers"]} | {k: config[k] for k in ("bias", "batch_first", "bidirectional")}
    if kind == "RNN":
        options["nonlinearity"] = config.get("nonlinearity", "tanh")
    fewest = 1 if dtype == "float64" else 8  # as of H
    if kind == "LSTM" and config.get("projects") and hidden > fewest:
        options["proj_size"] = int(g.integers(fewest, hidden))
    theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
    ours = getattr(nn, kind)(inputs, hidden, dtype=getattr(torch, dtype), **options)
    bound = 1 / np.sqrt(hidden)
    named = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, parameter), (name_of_theirs, expected) in named:
        assert name == name_of_theirs and parameter.shape == expected.shape
        values = g.uniform(-bound, bound, parameter.shape).astype(dtype)
        parameter.data.copy_(torch.from_numpy(values))
        expected.data.copy_(torch.from_numpy(values))
        parameter.requires_grad_(bool(g.random() >= config["frozen"]))
    return ours, theirs


def results_of(module, kind, config, x, hx, lengths, grads):
    """Run a module forward and backward; return all results by name."""
    form = config["form"]
    states = None if hx is None else hx[0] if kind != "LSTM" else tuple(hx)
    if form in ("sorted", "unsorted", "equal"):
        x_given = rnn.pack_padded_sequence(x, lengths, config["batch_first"], enforce_sorted=form != "unsorted")
        packed, last = module(x_given, states)
        assert torch.equal(packed.batch_sizes, x_given.batch_sizes)
        for name in ("sorted_indices", "unsorted_indices"):
            indices, expected_indices = getattr(packed, name), getattr(x_given, name)
            assert (indices is None and expected_indices is None) or torch.equal(indices, expected_indices)
        y = packed.data
    else:
        y, last = module(x, states)
    last = (last,) if kind != "LSTM" else last
    outputs = dict(zip(("y", "h_n", "c_n"), (y, *last), strict=False))
    asked = [(a, d) for a, d, is_asked in zip(outputs.values(), grads, config["asked"], strict=False) if is_asked]
    if asked and y.requires_grad:
        torch.autograd.backward([a for a, _ in asked], [d.to(a.dtype).expand(a.shape) for a, d in asked])
    named = {"x": x} | dict(zip(("h_0", "c_0"), hx or (), strict=False)) | dict(module.named_parameters())
    return outputs | {f"d_{name}": tensor.grad for name, tensor in named.items()}


def compare(kind, dtype, g, config):
    """Compare a module with PyTorch's in one configuration."""
    T, B, inputs, hidden = config["sizes"]
    torch.set_num_threads(config["threads"])
    ours, theirs = module_pair(kind, config, g, dtype)
    D, packed = 1 + config["bidirectional"], config["form"] in ("sorted", "unsorted", "equal")
    rows = () if config["form"] == "unbatched" else (B,)
    lengths = None
    if packed:
        lengths = np.full(B, T) if config["form"] == "equal" else g.integers(1, T + 1, B)
        lengths = torch.from_numpy(np.sort(lengths)[::-1].copy() if config["form"] == "sorted" else lengths)
    x = g.standard_normal((*rows, T, inputs) if config["batch_first"] else (T, *rows, inputs)).astype(dtype)
    widths = (ours.proj_size or hidden, hidden)[: 1 + (kind == "LSTM")]
    hx = [g.uniform(-0.8, 0.8, (config["layers"] * D, *rows, width)).astype(dtype) for width in widths]
    y_shape = (int(lengths.sum()),) if packed else x.shape[:-1]
    shapes = (*y_shape, D * widths[0]), *[a.shape for a in hx]
    grads = [g.standard_normal(shape).astype(dtype) for shape in shapes]
    if config["compact"]:  # as that of y.sum()
        grads[0] = grads[0][(0,) * grads[0].ndim].reshape(1)
    results = []
    has_kinks = kind == "RNN" and config["nonlinearity"] == "relu" and dtype == "float32"
    for module, factor in ((ours, 1), (theirs, 1), (theirs, 1 + 1e-6))[: 2 + has_kinks]:
        theirs.zero_grad()
        to = next(module.parameters()).dtype
        x_in = (torch.from_numpy(x).to(to) * factor).requires_grad_(config["x_grad"])
        hx_in = [torch.from_numpy(a).to(to).requires_grad_(config["hx_grad"]) for a in hx] if config["hx"] else None
        results.append(results_of(module, kind, config, x_in, hx_in, lengths, [torch.from_numpy(d) for d in grads]))
    found, expected, *moved = [{n: None if a is None else a.detach().clone() for n, a in r.items()} for r in results]
    if moved and any(
        (a - moved[0][name]).abs().max() > 5e-5 * a.abs().max() for name, a in expected.items() if a is not None
    ):
        return 0.0, "nothing, as it is too near to a kink"
    pairs = {name: (a.detach().numpy(), expected[name].detach()) for name, a in found.items() if a is not None}
    missing = {name for name, a in expected.items() if a is not None} - {*pairs}
    assert missing <= {f"d_{name}" for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    return worst_of(pairs, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, seed):
    def compare_drawn(g, k):
        config = random_config(g, dtype)
        error, name = compare(kind, dtype, g, config)
        return error, f"{name} of {kind}, {dtype}, {config}"

    check_configurations(compare_drawn, BOUNDS[dtype], seed, CONFIGURATIONS)


@pytest.mark.parametrize("form", ["batched", "unsorted", "reset", "reset_state"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, form, seed):
    torch.manual_seed(seed)
    options = {"num_layers": 2, "bidirectional": form != "reset_state", "batch_first": form == "unsorted"}
    module = getattr(nn, kind)(3, 2, **options, dtype=torch.float64)
    names, weights = zip(*module.named_parameters(), strict=True)
    x = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    n, B = 1 + (kind == "LSTM"), 3 if form == "unsorted" else 4
    shapes = [(2 + 2 * module.bidirectional, B, 2)] * n + [(2, 3, 4, 2)] * n * (form == "reset_state")
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    reset = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)

    def function(x, *tensors):
        given, own = tensors[: len(states)], dict(zip(names, tensors[len(states) :], strict=True))
        options = {"reset": reset} if form.startswith("reset") else {}
        if form == "reset_state":
            options["reset_state"] = hx_of(kind, given[n:])
        if form == "unsorted":
            x = rnn.pack_padded_sequence(x, [2, 4, 1], batch_first=True, enforce_sorted=False)
        y, last = torch.func.functional_call(module, own, (x, hx_of(kind, given[:n])), options)
        return y.data if form == "unsorted" else y, *states_of(last)

    assert torch.autograd.gradcheck(function, (x, *states, *weights))


def restore_and_replace(module):
    """Make the module PyTorch's for a moment."""
    nn.restore(module)
    assert isinstance(module, torch.nn.RNNBase)
    nn.replace(module)
    return module


CHANGES = CHANGES_OF_WEIGHTS | {
    "restore and replace": lambda g, module: restore_and_replace(module),
    "dtype": lambda g, module: module.double() if module.weight_ih_l0.dtype == torch.float32 else module.float(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_after_any_calls_on_any_threads(kind, seed):
    """A module on which all sorts of things were done has the bits of a new one on one thread."""
    g = np.random.default_rng([seed, 1])
    options = {"num_layers": 2, "bidirectional": True}
    torch.manual_seed(seed)
    module = getattr(nn, kind)(48, 96, **options)
    planned = set()
    for k in range(40):
        change = str(g.choice([*CHANGES]))
        module = CHANGES[change](g, module)
        dtype = module.weight_ih_l0.dtype
        T, B = int(g.integers(1, 40)), int(g.choice([1, 3, 16, 40]))
        x = torch.from_numpy(g.standard_normal((T, B, 48))).to(dtype)
        lengths = torch.from_numpy(g.integers(1, T + 1, B)) if g.random() < 0.3 else None
        module_input = x if lengths is None else rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        training, threads = bool(g.integers(2)), int(g.integers(1, 4))
        fresh = getattr(nn, kind)(48, 96, dtype=dtype, **options)
        fresh.load_state_dict(module.state_dict())
        results = []
        for other, on in ((module, threads), (fresh, 1)):
            torch.set_num_threads(on)
            other.zero_grad()
            with torch.set_grad_enabled(training):
                y, last = other(module_input)
            results.append([y if lengths is None else y.data, *([last] if kind != "LSTM" else last)])
            if results[-1][0].requires_grad:
                torch.autograd.backward(results[-1], [torch.cos(a.detach()) for a in results[-1]])
            results[-1] += [parameter.grad for parameter in other.parameters()]
        activations = _kernels.LSTMOptions(ifco=True) if kind == "LSTM" else module._op._activations
        arguments = "forward", (T, B, 48, 96), threads, [*op.DTYPES].index(dtype), 0, True, activations
        *_, count, _ = _kernels.plan_layer(module._op._kernel, *arguments)
        planned.add(count)
        where = f"call {k}: {change}, {T=}, {B=}, {dtype}, {threads=}, {training=}"
        asked = [True] * (2 + (kind == "LSTM")) + [parameter.requires_grad for parameter in module.parameters()]
        for result, expected, is_asked in zip(*results, asked, strict=True):
            if is_asked and expected is not None:
                assert torch.equal(result, expected), where
            else:
                assert result is None, where
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    assert {1, 2} <= planned


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_blockcells_own_layers(kind, dtype, seed):
    torch.manual_seed(seed)
    module = getattr(nn, kind)(7, 20, num_layers=2, bidirectional=True, dtype=getattr(torch, dtype))
    model = torch.nn.Sequential(module)
    layers = convert.from_torch(model)
    x = torch.randn(9, 5, 7, dtype=module.weight_ih_l0.dtype)
    with torch.inference_mode():
        y, last = module(x)
    found, state = layers(x.numpy())
    last = [last] if kind != "LSTM" else [*last]
    expected = parts_of(state, 2, 2)
    assert same(y.numpy(), found)
    for k, part in enumerate(expected):
        assert same([a[k].numpy() for a in last], [*part])


@pytest.mark.parametrize("form", ["batched", "batch_first", "unsorted", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_the_same_numbers(kind, form, seed):
    """With lengths, those that torch.nn's module draws for the padded input."""
    options = {"num_layers": 3, "dropout": 0.4, "batch_first": form == "batch_first"}
    options |= {"bidirectional": form != "lengths", "dtype": torch.float64}
    theirs, ours = getattr(torch.nn, kind)(6, 16, **options), getattr(nn, kind)(6, 16, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([2, 5, 1, 4])
    is_step = (torch.arange(5)[:, None] < lengths)[:, :, None] if form == "lengths" else 1
    if form == "unsorted":
        x = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    results = []
    for module, call in ((theirs, {}), (ours, {"lengths": lengths} if form == "lengths" else {})):
        torch.manual_seed(seed)
        y = module(x, **call)[0]
        module.zero_grad()
        (y.data * is_step if form == "unsorted" else y * is_step).square().sum().backward()
        results.append([y.data * is_step, *[parameter.grad for parameter in module.parameters()]])
        assert not torch.equal(module(x)[0].data, y.data)
        module.eval()
        results[-1].append(module(x, **call)[0].data * is_step)
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
