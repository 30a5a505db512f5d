"""Padded rows of different lengths, with resets or without: calls with `lengths` beside loops over torch.nn's cells.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from bits import same
from peer_cases import BOUNDS, CONFIGURATIONS, check_configurations, parts_of, random_sizes, state_of, worst_of
from torch_cases import MARKS, SHARE, hx_of, loop_over_cells, nudged, random_resets, states_of

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
rnn = torch.nn.utils.rnn

pytestmark = MARKS
KINDS = ["LSTM", "GRU", "RNN"]
QUANTIZED = ["LSTM", "GRU"]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def random_lengths(g, T, B):
    """Draw lengths, 0 to T: of all rows, of a few short ones, or none but zeros and T."""
    lengths = g.choice([g.integers(0, T + 1, B), g.integers(0, T // 5 + 1, B), g.choice([0, T], B)], p=[0.7, 0.2, 0.1])
    return torch.from_numpy(lengths)


def padding_of(lengths, T):
    """Return which steps [T,B] are padding."""
    return torch.arange(T)[:, None] >= lengths


def fill_padding(x, lengths, value):
    """Return x [T,B,I] with this value where there is padding."""
    return x.masked_fill(padding_of(lengths, len(x))[:, :, None], value)


def call_in_form(module, form, x, states, lengths, reset, reset_states):
    """Compute y [T,B,.] and the last states by one call, in this form; without an option if there is none."""
    options = {"reset": reset.T if module.batch_first else reset} if reset is not None else {}
    if reset_states:
        turned = [state.transpose(1, 2) if module.batch_first else state for state in reset_states]
        options["reset_state"] = hx_of(type(module).__name__, turned)
    if form == "unbatched":
        options = {name: reset[:, 0] for name in options}
        if reset_states:
            options["reset_state"] = hx_of(type(module).__name__, [state[:, :, 0] for state in reset_states])
        x, states = x[:, 0], [state[:, 0] for state in states]
    elif form == "lengths":
        options["lengths"] = lengths
    swaps = module.batch_first and form != "unbatched"
    y, last = module(
        x.transpose(0, 1) if swaps else x, hx_of(type(module).__name__, states) if states else None, **options
    )
    outputs = [y.transpose(0, 1) if swaps else y, *states_of(last)]
    return [tensor.unsqueeze(1) for tensor in outputs] if form == "unbatched" else outputs


def check_compiled(module, inputs, outputs, d_outputs, where):
    """Compare a compiled call, and its gradients, with the outputs of an eager one bit by bit."""
    torch._dynamo.reset()
    form, x, states, lengths, reset, reset_states = inputs
    lengths = torch.as_tensor(lengths, dtype=torch.int64)  # a list would be a constant of the graph
    tensors = [tensor for tensor in (x, *states, *reset_states, *module.parameters()) if tensor.requires_grad]
    compiled = torch.compile(call_in_form, fullgraph=True, backend="aot_eager")
    results = compiled(module, form, x, states, lengths, reset, reset_states)
    assert all(map(torch.equal, results, outputs)), where
    grads = [
        torch.autograd.grad(r, tensors, d_outputs, retain_graph=True, allow_unused=True) for r in (results, outputs)
    ]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), where


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, compiles, seed, dynamo):
    """Results and all gradients, with NaN in the padding; compiled, the same bits."""

    def compare(g, k):
        T, B, inputs, hidden = random_sizes(g, dtype)
        form = str(g.choice(["lengths", "no lengths", "unbatched"], p=[0.7, 0.2, 0.1]))
        B = 1 if form == "unbatched" else B
        options = {name: bool(g.integers(2)) for name in ("bidirectional", "bias")}
        options["num_layers"] = int(g.integers(1, 4))
        if kind == "RNN" and dtype == "float64":  # in float32 rounding may lead beyond the kink of relu
            options["nonlinearity"] = str(g.choice(["tanh", "relu"]))
        fewest = 1 if dtype == "float64" else 8  # as of H
        if kind == "LSTM" and hidden > fewest and g.integers(2):
            options["proj_size"] = int(g.integers(fewest, hidden))
        batch_first, has_hx, has_reset, has_reset_state = (bool(n) for n in g.integers(2, size=4))
        has_reset_state &= has_reset and not options["bidirectional"]
        where = f"{kind}, {dtype}, {T=}, {B=}, {inputs=}, {hidden=}, {form}, {options}"
        where += f", {has_hx=}, {has_reset=}, {has_reset_state=}"
        torch.manual_seed(CONFIGURATIONS * seed + k)
        ours = getattr(nn, kind)(inputs, hidden, batch_first=batch_first, dtype=getattr(torch, dtype), **options)
        theirs = getattr(torch.nn, kind)(inputs, hidden, dtype=torch.float64, **options)
        theirs.load_state_dict({name: tensor.double() for name, tensor in ours.state_dict().items()})
        torch.set_num_threads(int(g.integers(1, 3)))
        cells, n = options["num_layers"] * (1 + options["bidirectional"]), 1 + (kind == "LSTM")
        widths = (ours.proj_size or hidden, hidden)[:n]
        y_size = (1 + options["bidirectional"]) * widths[0]
        x, d_y = (torch.from_numpy(g.standard_normal((T, B, size)).astype(dtype)) for size in (inputs, y_size))
        hx, d_last = (
            [torch.from_numpy(g.uniform(-0.8, 0.8, (cells, B, width)).astype(dtype)) for width in widths]
            for _ in range(2)
        )
        lengths = random_lengths(g, T, B) if form == "lengths" else torch.full((B,), T)
        reset = torch.from_numpy(random_resets(g, T, B) & has_reset)
        is_read = (reset & ~padding_of(lengths, T))[:, :, None]
        reset_state = [
            torch.from_numpy(g.uniform(-0.8, 0.8, (cells, T, B, width)).astype(dtype)).masked_fill(~is_read, np.nan)
            for width in widths * has_reset_state
        ]
        given_lengths = lengths.to(INTEGERS[g.integers(len(INTEGERS))]) if g.integers(4) else lengths.tolist()
        x = fill_padding(x, lengths, np.nan)
        results, few = [], dtype == "float32" and inputs < 8
        for module in (ours, theirs, nudged(g, theirs))[: 2 + few]:
            to = module.weight_ih_l0.dtype
            tensors = [tensor.detach().to(to).requires_grad_() for tensor in (x, *hx, *reset_state)]
            states, reset_states = tensors[1 : 1 + n] if has_hx else [], tensors[1 + n :]
            if module is ours:
                inputs = form, tensors[0], states, given_lengths, reset if has_reset else None, reset_states
                outputs = call_in_form(ours, *inputs)
                with torch.no_grad():
                    assert all(map(torch.equal, call_in_form(ours, *inputs), outputs)), where
                if compiles:
                    check_compiled(ours, inputs, outputs, [d.to(to) for d in (d_y, *d_last)], where)
            else:
                states = states or [torch.zeros_like(state) for state in hx]
                states = [state.to(to) for state in states]
                finite = [torch.where(is_read, state, 0.0) for state in reset_states] or None
                inputs = fill_padding(tensors[0], lengths, 0.0), states, lengths, reset, finite
                outputs = loop_over_cells(module, *inputs)
            torch.autograd.backward(outputs, [d.to(to) for d in (d_y, *d_last)])
            given = tensors[0], *(tensors[1 : 1 + n] if has_hx else []), *reset_states
            gradients = [tensor.grad for tensor in (*given, *module.parameters())]
            results.append([*[output.detach() for output in outputs], *gradients])
        names = [
            "y",
            *"hc"[:n],
            "d_x",
            *("d_h", "d_c")[: n * has_hx],
            *("d_h at resets", "d_c at resets")[: len(reset_state)],
        ]
        names += [name for name, _ in ours.named_parameters()]
        named = dict(zip(names, results[0], strict=True))
        padding = padding_of(lengths, T)
        assert not named["y"][padding].any() and not named["d_x"][padding].any(), where
        pairs = {name: (a.numpy(), b) for name, a, b in zip(names, *results[:2], strict=True)}
        at = names.index("d_x")
        changes = [(moved[at] - results[1][at]).abs().max().item() for moved in results[2:]]
        error, name = worst_of(pairs, dtype, {"d_x": max(changes, default=0.0) / SHARE})
        return error, f"{name} of {where}"

    check_configurations(compare, BOUNDS[dtype], seed, 70 if compiles else CONFIGURATIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_steps(kind, seed):
    """Their last state is hx, bit by bit, and so is its gradient; other rows don't notice them."""
    torch.manual_seed(seed)
    module = getattr(nn, kind)(5, 8, num_layers=2, bidirectional=True)
    x = torch.full((6, 3, 5), np.nan, requires_grad=True)
    states = [torch.randn(4, 3, 8, requires_grad=True) for _ in range(1 + (kind == "LSTM"))]
    for hx, expected in ((hx_of(kind, states), states), (None, [torch.zeros(4, 3, 8)] * len(states))):
        y, last = module(x, hx, lengths=torch.zeros(3, dtype=torch.int64))
        assert not y.any() and all(map(torch.equal, states_of(last), expected))
        grads = [torch.randn(4, 3, 8) for _ in states]
        torch.autograd.backward([y, *states_of(last)], [torch.ones_like(y), *grads])
        if hx is not None:
            assert all(map(torch.equal, [state.grad for state in states], grads))
        assert not any(tensor.grad.any() for tensor in (x, *module.parameters()))
    assert module(torch.zeros(6, 0, 5), lengths=[])[0].shape == (6, 0, 16)


@pytest.mark.usefixtures("new_memory_holds_nan")
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_packed_sequences(kind, seed):
    """Where all rows have a step. A PackedSequence sorts them, and so the terms of the weights' gradients."""
    g = np.random.default_rng([seed, 1])
    for k in range(20):
        T, B, inputs, hidden = random_sizes(g, "float32")
        options = {"num_layers": int(g.integers(1, 4)), "bidirectional": bool(g.integers(2))}
        module = getattr(nn, kind)(inputs, hidden, **options)
        is_sorted, lengths = bool(k % 2), torch.from_numpy(g.integers(1, T + 1, B))
        if is_sorted:
            lengths = lengths.sort(descending=True)[0]
        drawn, results = torch.randn(T, B, inputs), []
        for is_packed in (True, False):
            module.zero_grad()
            x = drawn.clone().requires_grad_()
            if is_packed:
                y, last = module(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
                y, _ = rnn.pad_packed_sequence(y, total_length=T)
            else:
                y, last = module(x, lengths=lengths)
            torch.autograd.backward([y, *states_of(last)], [torch.cos(a.detach()) for a in (y, *states_of(last))])
            weights = module.parameters() if is_sorted else []
            results.append([y, *states_of(last), x.grad, *[weight.grad for weight in weights]])
        assert all(map(torch.equal, *results)), f"{k}: {T=}, {lengths=}, {inputs=}, {hidden=}, {options}"


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_draws_the_same_numbers(kind, batch_first, seed):
    """As torch.nn's module does for the padded input."""
    options = {"num_layers": 3, "dropout": 0.4, "batch_first": batch_first, "dtype": torch.float64}
    theirs, ours = getattr(torch.nn, kind)(6, 16, **options), getattr(nn, kind)(6, 16, **options)
    ours.load_state_dict(theirs.state_dict())
    x, lengths = torch.randn(5, 4, 6, dtype=torch.float64), torch.tensor([2, 5, 0, 4])
    results = []
    for module, given in ((theirs, {}), (ours, {"lengths": lengths})):
        torch.manual_seed(seed)
        y = module(x.transpose(0, 1) if batch_first else x, **given)[0]
        results.append(y.transpose(0, 1) if batch_first else y)
    assert torch.allclose(fill_padding(results[0], lengths, 0.0), results[1], rtol=0, atol=1e-12)


class Reader(torch.nn.Module):
    """A model that reads padded rows."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(5, 8, **options)

    def forward(self, x, lengths, reset):
        return self.rnn(x, lengths=lengths, reset=reset)


def training_step(model, call, *inputs):
    """Return results and gradients of a training step."""
    model.zero_grad()
    y, last = call(*inputs)
    y.square().sum().backward()
    return [y.detach(), *[state.detach() for state in states_of(last)], *[p.grad for p in model.parameters()]]


def random_inputs(T, B, batch_first=False):
    x, reset = torch.randn(T, B, 5), torch.rand(T, B) < 0.3
    lengths = torch.randint(0, T + 1, (B,))
    return (x.transpose(0, 1), lengths, reset.T) if batch_first else (x, lengths, reset)


@pytest.mark.parametrize("form", ["lengths", "reset", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_exported_traced(kind, form, dynamo, tmp_path):
    batch_first = form == "both"
    model = Reader(kind, num_layers=2, bidirectional=True, batch_first=batch_first)
    drawn = []
    for T, B in ((4, 3), (7, 3), (5, 2)):
        x, lengths, reset = random_inputs(T, B, batch_first)
        drawn.append((x, None if form == "reset" else lengths, None if form == "lengths" else reset))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compilers = [compiled, torch.compile(model, fullgraph=True)]
    T, B = torch.export.Dim("T", min=2), torch.export.Dim("B", min=2)
    sizes = {0: B, 1: T} if batch_first else {0: T, 1: B}
    sizes = sizes, None if form == "reset" else {0: B}, None if form == "lengths" else sizes
    program = torch.export.export(model, drawn[0], dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "program.pt2")
    programs = [each.module() for each in (program, torch.export.load(tmp_path / "program.pt2"))]
    calls = [*compilers, torch.fx.symbolic_trace(model)]
    if form == "both":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            calls.append(torch.jit.trace(model, drawn[0]))
        nodes = [node for node in calls[2].graph.nodes if node.op == "call_module"]
        assert [(node.target, [*node.kwargs]) for node in nodes] == [("rnn", ["lengths", "reset"])]
    for inputs in drawn:
        expected = training_step(model, model, *inputs)
        for call in calls:
            assert all(map(torch.equal, training_step(model, call, *inputs), expected))
        with torch.no_grad():
            for program in programs:
                y, last = program(*inputs)
                assert all(map(torch.equal, [y, *states_of(last)], expected[: 1 + len(states_of(last))]))
    if form != "reset":
        x, lengths, reset = drawn[0]
        for call in (model, compiled, *programs):
            with pytest.raises(ValueError, match=r"^blockcell: lengths\[1\] is 5; expected 0 to T = 4$"):
                call(x, torch.tensor([4, 5, -1]), reset)


def test_operator_passes_opcheck():
    x, lengths, reset = random_inputs(5, 3)
    for tensors in ((lengths, reset), (lengths, None), (None, reset)):
        torch.library.opcheck(torch.ops.blockcell.step_mask.default, (x, *tensors))
    wrong = [(x[0], lengths, reset), (x, lengths[:2], reset), (x, lengths.int(), reset), (x, None, reset[:4])]
    for inputs in wrong:
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match=r"^blockcell: \w+ has shape .*; expected "):
                torch.ops.blockcell.step_mask(*[t if t is None else t.to(device) for t in inputs])
    with pytest.raises(ValueError, match=r"^blockcell: there are neither lengths nor resets$"):
        torch.ops.blockcell.step_mask(x, None, None)


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized(kind, scheme, dynamo, seed):
    """The bits of the quantized layer."""
    g = np.random.default_rng([seed, 2])
    for k in range(15):
        layers, D = int(g.integers(1, 3)), int(g.integers(1, 3))
        module = getattr(torch.nn, kind)(5, 40, layers, bidirectional=D == 2).eval()
        nn.replace(module, scheme)
        T, B = int(g.integers(1, 12)), int(g.integers(1, 20))
        options = {"lengths": random_lengths(g, T, B), "reset": torch.from_numpy(random_resets(g, T, B))}
        options = dict([*options.items()][k % 3 == 1 : 1 + (k % 3 > 0)])
        x = fill_padding(torch.randn(T, B, 5), options.get("lengths", torch.full((B,), T)), np.nan)
        arrays = g.uniform(-0.8, 0.8, (1 + (kind == "LSTM"), layers * D, B, 40)).astype(np.float32)
        given = x, hx_of(kind, [*torch.from_numpy(arrays)])
        y, last = module(*given, **options)
        state = state_of([*arrays.swapaxes(0, 1)], layers, D)
        numpy_options = {name: tensor.numpy() for name, tensor in options.items()}
        expected, final = convert.from_torch(module).quantize(scheme)(x.numpy(), state, **numpy_options)
        where = f"{k}: {T=}, {B=}, {layers=}, {D=}, {options}"
        assert same(y.numpy(), expected), where
        for j, part in enumerate(parts_of(final, layers, D)):
            assert same([a[j].numpy() for a in states_of(last)], [*part]), where
        if k == 2:
            with torch.no_grad():
                compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
                assert torch.equal(compiled(*given, **options)[0], y)
                with pytest.raises(ValueError, match=r"^blockcell: lengths\[0\] is -1; expected 0 to T = "):
                    module(x, lengths=torch.full((B,), -1))


@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind):
    module, x = getattr(nn, kind)(5, 8), torch.zeros(4, 3, 5)
    first = getattr(nn, kind)(5, 8, batch_first=True)
    prefix, lengths = f"blockcell.torch.{kind}: ", torch.tensor([4, 0, 2])
    rows, integers = "one for each row of input", "expected a tensor of integers"
    packed = rnn.pack_padded_sequence(x, [4, 2, 1])
    cases = [
        (module, x, lengths.float(), TypeError, f"lengths is of type torch.float32; {integers}"),
        (module, x, lengths.bool(), TypeError, f"lengths is of type torch.bool; {integers}"),
        (module, x, lengths.numpy(), TypeError, f"lengths is of type ndarray; {integers}"),
        (module, x, [4.0, 0, 2], TypeError, f"lengths is of type list; {integers}"),
        (module, x, 4, TypeError, f"lengths is of type int; {integers}"),
        (module, x, lengths[:2], ValueError, f"lengths has shape (2,); expected (3,), {rows}"),
        (module, x, [4, 0], ValueError, f"lengths has shape (2,); expected (3,), {rows}"),
        (module, x, lengths[:, None], ValueError, f"lengths has shape (3, 1); expected (3,), {rows}"),
        (first, x, lengths, ValueError, f"lengths has shape (3,); expected (4,), {rows}"),
        (module, x, lengths.to("meta"), ValueError, "lengths is on meta; expected cpu"),
        (module, x, [4, 2**70, 0], ValueError, f"lengths[1] is {2**70}; expected 0 to T = 4"),
        (first, x, [4, 0, 2, -(2**63)], ValueError, f"lengths[3] is -{2**63}; expected 0 to T = 3"),
        (
            module,
            x[:, 0],
            lengths[:1],
            ValueError,
            "lengths is given and input has 2 dimensions; expected 3 dimensions with it, or input[:length]",
        ),
        (
            module,
            packed,
            lengths,
            ValueError,
            "lengths is given and input is a PackedSequence; expected a padded tensor with it",
        ),
    ]
    for rnn_module, given, wrong, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(prefix + message)}$"):
            rnn_module(given, lengths=wrong)
    for wrong, message in (
        (lengths + 1, "lengths[0] is 5"),
        (lengths - 1, "lengths[1] is -1"),
        ([4, 2, 9], "lengths[2] is 9"),
        (torch.tensor([4, 0, 2**63 + 1], dtype=torch.uint64), f"lengths[2] is {2**63 + 1}"),
    ):
        with pytest.raises(ValueError, match=f"^blockcell: {re.escape(message)}; expected 0 to T = 4$"):
            module(x, lengths=wrong)
