"""`blockcell.torch` beside torch.nn on the same weights: y, the final states, and the gradients to everything.

`make test-peers`, with torch in .venv.  BLOCKCELL_SEED repeats a run.
"""

from __future__ import annotations

import numpy as np
import pytest
from peer_cases import BOUNDS, SEED, random_sizes, worst_of

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
rnn = torch.nn.utils.rnn

pytestmark = pytest.mark.peers
CONFIGURATIONS = 300
KINDS = ["LSTM", "GRU"]


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(g, dtype):
    """Sizes and options of a configuration."""
    config = {"sizes": random_sizes(g, dtype), "layers": int(g.integers(1, 4)), "threads": int(g.integers(1, 3))}
    switches = ("bidirectional", "bias", "batch_first", "x_grad", "hx", "hx_grad", "compact")
    config |= {name: bool(g.integers(2)) for name in switches}
    config["form"] = str(g.choice(["batched", "batched", "unbatched", "sorted", "unsorted", "equal"]))
    config["frozen"] = float(g.choice([0, 0, 0.5, 1]))  # how many of the parameters
    config["asked"] = [bool(b) for b in g.integers(4, size=3)]  # of y, h_n and c_n, which have a gradient
    return config


def pair_of(kind, config, g, dtype):
    """Ours and theirs, which is in float64, with the same weights."""
    T, B, inputs, hidden = config["sizes"]
    options = {"num_layers": config["layers"]} | {k: config[k] for k in ("bias", "batch_first", "bidirectional")}
    theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
    ours = getattr(nn, kind)(inputs, hidden, dtype=getattr(torch, dtype), **options)
    bound = 1 / np.sqrt(hidden)
    for (name, parameter), (name_of_theirs, expected) in zip(ours.named_parameters(), theirs.named_parameters()):
        assert name == name_of_theirs and parameter.shape == expected.shape
        values = g.uniform(-bound, bound, parameter.shape).astype(dtype)
        parameter.data.copy_(torch.from_numpy(values))
        expected.data.copy_(torch.from_numpy(values))
        parameter.requires_grad_(bool(g.random() >= config["frozen"]))
    return ours, theirs


def results_of(module, kind, config, x, hx, lengths, grads):
    """Run a module forward and backward: all results by name."""
    form = config["form"]
    given = None if hx is None else hx[0] if kind == "GRU" else tuple(hx)
    if form in ("sorted", "unsorted", "equal"):
        x_given = rnn.pack_padded_sequence(x, lengths, config["batch_first"], enforce_sorted=form != "unsorted")
        packed, last = module(x_given, given)
        assert torch.equal(packed.batch_sizes, x_given.batch_sizes)
        for name in ("sorted_indices", "unsorted_indices"):
            found, expected = getattr(packed, name), getattr(x_given, name)
            assert (found is None and expected is None) or torch.equal(found, expected)
        y = packed.data
    else:
        y, last = module(x, given)
    last = (last,) if kind == "GRU" else last
    outputs = dict(zip(("y", "h_n", "c_n"), (y, *last)))
    results = dict(outputs)
    asked = [(a, d) for a, d, is_asked in zip(outputs.values(), grads, config["asked"]) if is_asked and a.requires_grad]
    if asked:
        torch.autograd.backward([a for a, _ in asked], [d.to(a.dtype).expand(a.shape) for a, d in asked])
    named = {"x": x} | dict(zip(("h_0", "c_0"), hx or ())) | dict(module.named_parameters())
    return results | {f"d_{name}": tensor.grad for name, tensor in named.items()}


def compare(kind, dtype, g, config):
    T, B, inputs, hidden = config["sizes"]
    torch.set_num_threads(config["threads"])
    ours, theirs = pair_of(kind, config, g, dtype)
    D, packed = 1 + config["bidirectional"], config["form"] in ("sorted", "unsorted", "equal")
    rows = () if config["form"] == "unbatched" else (B,)
    lengths = None
    if packed:
        lengths = np.full(B, T) if config["form"] == "equal" else g.integers(1, T + 1, B)
        lengths = torch.from_numpy(np.sort(lengths)[::-1].copy() if config["form"] == "sorted" else lengths)
    x = g.standard_normal((*rows, T, inputs) if config["batch_first"] else (T, *rows, inputs)).astype(dtype)
    hx = [
        g.uniform(-0.8, 0.8, (config["layers"] * D, *rows, hidden)).astype(dtype) for _ in range(1 + (kind == "LSTM"))
    ]
    y_shape = (int(lengths.sum()),) if packed else x.shape[:-1]
    grads = [g.standard_normal(shape).astype(dtype) for shape in ((*y_shape, D * hidden), *[hx[0].shape] * 2)]
    if config["compact"]:  # as that of y.sum()
        grads[0] = grads[0][(0,) * grads[0].ndim].reshape(1)
    results = []
    for module in (ours, theirs):
        to = next(module.parameters()).dtype
        x_in = torch.from_numpy(x).to(to).requires_grad_(config["x_grad"])
        hx_in = [torch.from_numpy(a).to(to).requires_grad_(config["hx_grad"]) for a in hx] if config["hx"] else None
        results.append(results_of(module, kind, config, x_in, hx_in, lengths, [torch.from_numpy(d) for d in grads]))
    found, expected = results
    pairs = {}
    for name, array in found.items():
        if array is None:
            continue
        pairs[name] = array.detach().numpy(), expected[name].detach().numpy()
    missing = {name for name, a in expected.items() if a is not None} - {*pairs}
    assert missing <= {f"d_{name}" for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    return worst_of(pairs, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype):
    worst = 0.0, "nothing"
    for k in range(CONFIGURATIONS):
        g = np.random.default_rng([SEED, k])
        config = drawn(g, dtype)
        error, what = compare(kind, dtype, g, config)
        worst = max(worst, (error, f"{what} of configuration {k}, {config}"))
        assert error <= BOUNDS[dtype], f"seed {SEED}: {worst[1]} is {error:.1f} eps off"
    print(f"seed {SEED}, {kind}, {dtype}: {worst[0]:.1f} eps, {worst[1]}")
