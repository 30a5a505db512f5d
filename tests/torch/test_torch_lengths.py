"""Calls with `lengths`, `reset` and `reset_state`, for padded rows and episodes, beside loops over torch.nn's cells.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from peer_cases import BOUNDS, CONFIGURATIONS, check_configurations, random_sizes, worst_of
from refusals import refusal
from torch_cases import (
    MARKS,
    SHARE,
    Recorder,
    check_operators,
    flat_tensors,
    hx_of,
    loop_over_cells,
    nudged,
    random_resets,
    states_of,
    training_step,
)

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


class Reader(torch.nn.Module):
    """A model that reads padded rows, and episodes within them."""

    def __init__(self, kind, seed, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.rnn = getattr(nn, kind)(5, 8, 2, **options)

    def forward(self, x, lengths, reset, reset_state=None):
        return self.rnn(x, lengths=lengths, reset=reset, reset_state=reset_state)


def random_inputs(T, B, batch_first=False, dtype=torch.float32):
    """Draw x, lengths and reset."""
    x, reset = torch.randn(T, B, 5, dtype=dtype), torch.rand(T, B) < 0.3
    lengths = torch.randint(0, T + 1, (B,))
    lengths[0], reset[2, 0] = T, True
    return (x.transpose(0, 1), lengths, reset.T) if batch_first else (x, lengths, reset)


def random_states(kind, T, B, **options):
    """Draw states at resets, of two layers."""
    return hx_of(kind, [torch.randn(2, T, B, 8, **options) for _ in range(1 + (kind == "LSTM"))])


@pytest.mark.parametrize("form", ["lengths", "reset", "both", "reset_state"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_exported_traced(kind, form, seed, dynamo, tmp_path):
    batch_first = form == "both"
    model = Reader(kind, seed, bidirectional=form != "reset_state", batch_first=batch_first)
    drawn = []
    for T, B in ((4, 3), (7, 3), (5, 2)):
        x, lengths, reset = random_inputs(T, B, batch_first)
        drawn.append((x, None if form == "reset" else lengths, None if form == "lengths" else reset))
        if form == "reset_state":
            drawn[-1] += (random_states(kind, T, B),)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compilers = [compiled, torch.compile(model, fullgraph=True)]
    T, B = torch.export.Dim("T", min=2), torch.export.Dim("B", min=2)
    sizes = {0: B, 1: T} if batch_first else {0: T, 1: B}
    sizes = sizes, None if form == "reset" else {0: B}, None if form == "lengths" else sizes
    sizes += (hx_of(kind, [{1: T, 2: B}] * 2),) * (form == "reset_state")
    program = torch.export.export(model, drawn[0], dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "program.pt2")
    programs = [each.module() for each in (program, torch.export.load(tmp_path / "program.pt2"))]
    calls = compilers
    if form == "both":
        calls.append(torch.fx.symbolic_trace(model))
        nodes = [node for node in calls[2].graph.nodes if node.op == "call_module"]
        assert [(node.target, [*node.kwargs]) for node in nodes] == [("rnn", ["lengths", "reset", "reset_state"])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            calls.append(torch.jit.trace(model, drawn[0]))
    for inputs in drawn:
        for state in flat_tensors(inputs[3:]):
            state.requires_grad_()
        expected = training_step(model, model, *inputs)
        for call in calls:
            assert all(map(torch.equal, training_step(model, call, *inputs), expected))
        with torch.no_grad():
            for program in programs:
                assert all(map(torch.equal, flat_tensors(program(*inputs)), expected))
    if form in ("lengths", "both"):
        x, lengths, reset = drawn[0]
        for call in (model, compiled, *programs):
            with pytest.raises(ValueError, match=r"^blockcell: lengths\[1\] is 5; expected 0 to T = 4$"):
                call(x, torch.tensor([4, 5, -1]), reset)


@pytest.mark.usefixtures("new_memory_differs")
@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_states_at_resets_pass_opcheck(kind, seed):
    model, inputs = Reader(kind, seed, dtype=torch.float64), random_inputs(7, 3, dtype=torch.float64)
    with Recorder() as recorder:
        training_step(model, model, *inputs, random_states(kind, 7, 3, dtype=torch.float64, requires_grad=True))
    recorder.calls = [call for call in recorder.calls if "step_mask" not in str(call[0])]
    check_operators(recorder, model.rnn._op._op, {"RNN": "rnn_tanh"}.get(kind, kind.lower()), (2, 2))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_state(kind, batch_first, seed):
    """A view of one state for all episodes reaches the operator without a copy; gradients are summed."""
    module, (x, _, reset) = Reader(kind, seed, batch_first=batch_first).rnn, random_inputs(7, 3, batch_first)
    learned = [torch.randn(2, 1, 1, 8, requires_grad=True) for _ in range(1 + (kind == "LSTM"))]
    views = [state.expand(2, *reset.shape, 8) for state in learned]
    whole = [view.detach().clone().requires_grad_() for view in views]
    results = []
    for states in (views, whole):
        module.zero_grad()
        with Recorder() as recorder:
            y, _ = module(x, reset=reset, reset_state=hx_of(kind, states))
        y.square().sum().backward()
        results.append([y, *[p.grad for p in module.parameters()]])
        given = [args[-1] for function, args in recorder.calls if "forward" in str(function)]
        assert len(given) == 2 and all((a.stride()[:2] == (0, 0)) == (states is views) for part in given for a in part)
    assert all(map(torch.equal, *results))
    for state, every in zip(learned, whole, strict=True):
        assert torch.allclose(state.grad, every.grad.sum((1, 2), keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asks", [False, True])
def test_gradients_where_somebody_asks(asks, seed):
    """The operator computes none otherwise."""
    model, inputs, states = Reader("GRU", seed), random_inputs(7, 3), random_states("GRU", 7, 3, requires_grad=asks)
    with Recorder() as recorder:
        model(*inputs, states)[0].sum().backward()
    needs = [args[-1] is True for function, args in recorder.calls if "backward" in str(function)]
    assert needs == [asks] * 2 and (states.grad is not None) == asks


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_with_states_at_resets(kind, scheme, seed, dynamo):
    """The bits of the quantized layer."""
    model, (x, lengths, reset), states = Reader(kind, seed).eval(), random_inputs(7, 3), random_states(kind, 7, 3)
    layer = convert.from_torch(model.rnn).quantize(scheme)
    arrays = [dict(zip(["h", "cs"], [a[k].numpy() for a in states_of(states)], strict=False)) for k in range(2)]
    y, _ = layer(x.numpy(), lengths=lengths.numpy(), reset=reset.numpy(), reset_state=tuple(arrays))
    nn.replace(model, quantize=scheme)
    with torch.no_grad():
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            assert torch.equal(call(x, lengths, reset, states)[0], torch.from_numpy(y))


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


LENGTHS, RESET = torch.tensor([4, 0, 2]), torch.zeros(4, 3, dtype=torch.bool)
STATE = torch.zeros(1, 4, 3, 8)
ROWS, SHAPE = "one for each row of input", "as that of input without its last dimension"
REFUSED = [  # the form of the call, its keywords, the error
    ("batch", {"lengths": LENGTHS.float()}, TypeError, "lengths is of type torch.float32; {integers}"),
    ("batch", {"lengths": LENGTHS.bool()}, TypeError, "lengths is of type torch.bool; {integers}"),
    ("batch", {"lengths": LENGTHS.numpy()}, TypeError, "lengths is of type ndarray; {integers}"),
    ("batch", {"lengths": [4.0, 0, 2]}, TypeError, "lengths is of type list; {integers}"),
    ("batch", {"lengths": 4}, TypeError, "lengths is of type int; {integers}"),
    ("batch", {"lengths": LENGTHS[:2]}, ValueError, f"lengths has shape (2,); expected (3,), {ROWS}"),
    ("batch", {"lengths": [4, 0]}, ValueError, f"lengths has shape (2,); expected (3,), {ROWS}"),
    ("batch", {"lengths": LENGTHS[:, None]}, ValueError, f"lengths has shape (3, 1); expected (3,), {ROWS}"),
    ("batch first", {"lengths": LENGTHS}, ValueError, f"lengths has shape (3,); expected (4,), {ROWS}"),
    ("batch", {"lengths": LENGTHS.to("meta")}, ValueError, "lengths is on meta; expected cpu"),
    ("unbatched", {"lengths": LENGTHS[:1]}, ValueError, "lengths is given and input has 2 dimensions; {no_batch}"),
    ("packed", {"lengths": LENGTHS}, ValueError, "lengths {packed}"),
    ("batch", {"reset": RESET.float()}, TypeError, "reset is of type torch.float32; expected a tensor of torch.bool"),
    ("batch", {"reset": RESET.numpy()}, TypeError, "reset is of type ndarray; expected a tensor of torch.bool"),
    ("batch", {"reset": RESET.T}, ValueError, f"reset has shape (3, 4); expected (4, 3), {SHAPE}"),
    ("batch", {"reset": RESET[:, :, None]}, ValueError, f"reset has shape (4, 3, 1); expected (4, 3), {SHAPE}"),
    ("batch first", {"reset": RESET[:3]}, ValueError, f"reset has shape (3, 3); expected (4, 3), {SHAPE}"),
    ("unbatched", {"reset": RESET}, ValueError, f"reset has shape (4, 3); expected (4,), {SHAPE}"),
    ("batch", {"reset": RESET.to("meta")}, ValueError, "reset is on meta; expected cpu"),
    ("packed", {"reset": RESET}, ValueError, "reset {packed}"),
    ("batch", {"reset_state": STATE}, ValueError, "reset_state is given; expected reset, too"),
    ("two directions", {"reset": RESET, "reset_state": STATE}, ValueError, "reset_state is given; {one_direction}"),
    ("batch", {"reset": RESET, "reset_state": 3}, TypeError, "reset_state is of type int; expected {pair}"),
    ("batch", {"reset": RESET, "reset_state": STATE[:, 0]}, ValueError, "reset_state has shape (1, 3, 8); {sizes}"),
    ("packed", {"reset_state": STATE}, ValueError, "reset_state {packed}"),
]
EXPECTED = {
    "integers": "expected a tensor of integers",
    "no_batch": "expected 3 dimensions with it, or input[:length]",
    "packed": "is given and input is a PackedSequence; expected a padded tensor with it",
    "one_direction": "expected one direction, not bidirectional=True",
    "sizes": "expected (1, 4, 3, 8), the sizes of hx with those of input's steps and rows",
}


@pytest.mark.parametrize(("form", "given", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", KINDS)
def test_refused(kind, form, given, error, message):
    module = getattr(nn, kind)(5, 8, batch_first=form == "batch first", bidirectional=form == "two directions")
    x = torch.zeros(4, 3, 5)
    x = {"unbatched": x[:, 0], "packed": rnn.pack_padded_sequence(x, [4, 2, 1])}.get(form, x)
    if isinstance(given.get("reset_state"), torch.Tensor):
        given = given | {"reset_state": hx_of(kind, [given["reset_state"]] * 2)}
    pair = "a pair of tensors (h_0, c_0)" if kind == "LSTM" else "a tensor"
    text = f"blockcell.torch.{kind}: {message.format(pair=pair, **EXPECTED)}"
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        module(x, **given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LENGTHS + 1, "lengths[0] is 5"),
        (LENGTHS - 1, "lengths[1] is -1"),
        ([4, 2, 9], "lengths[2] is 9"),
        (torch.tensor([4, 0, 2**63 + 1], dtype=torch.uint64), f"lengths[2] is {2**63 + 1}"),
    ],
)
def test_other_lengths_than_0_to_T_are_refused(wrong, message):
    """By the operator, so by compiled programs, too."""
    with pytest.raises(ValueError, match=f"^blockcell: {re.escape(message)}; expected 0 to T = 4$"):
        nn.GRU(5, 8)(torch.zeros(4, 3, 5), lengths=wrong)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operators_refuse_states_at_resets(device):
    """Calls by hand in two directions, without resets, of a single step."""
    x, rows = torch.zeros(7, 3, 5, device=device), [torch.zeros(7, 3, 8, device=device)]
    weights = [torch.zeros(24, width, device=device) for width in (5, 8)]
    mask = torch.zeros(2, 7, 3, dtype=torch.uint8, device=device)
    reset = torch.zeros(7, 3, dtype=torch.bool, device=device)
    calls = [
        (torch.ops.blockcell.gru, (x, 2 * weights, True, True, [], mask, rows)),
        (torch.ops.blockcell.gru, (x, weights, False, True, [], None, rows)),
        (torch.ops.blockcell.gru_cell, (x[0], weights, False, True, [], mask[:, :1], rows)),
        (torch.ops.blockcell.gru_quantized, (x, 2 * weights, True, [], None, reset, "float16", rows)),
        (torch.ops.blockcell.gru_quantized, (x, weights, False, [], None, None, "float16", rows)),
    ]
    for operator, inputs in calls:
        with refusal("ValueError: blockcell: there are reset_states; expected a sequence in one direction"):
            operator(*inputs)
