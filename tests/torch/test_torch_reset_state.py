"""States from which episodes within a sequence start; `test_torch_lengths.py` has them in random configurations.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import pytest
from torch_cases import MARKS, Recorder, check_operators, hx_of, states_of

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")

pytestmark = MARKS
KINDS = ["LSTM", "GRU", "RNN"]
T, B, I, H, L = 7, 3, 5, 8, 2  # noqa: E741 (I is the number of inputs, as everywhere)


def random_inputs(kind, dtype=torch.float32, rows=B):
    """Draw x, lengths, reset and reset_state."""
    n = 1 + (kind == "LSTM")
    reset, lengths = torch.rand(T, rows) < 0.3, torch.randint(0, T + 1, (rows,))
    reset[2, 0], lengths[0] = True, T
    states = [torch.randn(L, T, rows, H, dtype=dtype) for _ in range(n)]
    return torch.randn(T, rows, I, dtype=dtype), lengths, reset, hx_of(kind, states)


class Player(torch.nn.Module):
    """A model that is trained on episodes within its rows."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = getattr(nn, kind)(I, H, L, **options)

    def forward(self, x, lengths, reset, reset_state):
        return self.rnn(x, lengths=lengths, reset=reset, reset_state=reset_state)


def training_step(model, call, x, lengths, reset, reset_state):
    """Return results and gradients of a training step, those to the states among them."""
    model.zero_grad()
    states = [state.detach().requires_grad_() for state in states_of(reset_state)]
    y, last = call(x, lengths, reset, tuple(states) if len(states) > 1 else states[0])
    (y.square().sum() + sum(state.sum() for state in states_of(last))).backward()
    results = [y, *states_of(last)]
    return [*[tensor.detach() for tensor in results], *[a.grad for a in (*model.parameters(), *states)]]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_exported(kind, dynamo, seed, tmp_path):
    """Graphs with other rows, too."""
    torch.manual_seed(seed)
    model = Player(kind)
    drawn = [random_inputs(kind, rows=rows) for rows in (3, 3, 4)]
    calls = [torch.compile(model, fullgraph=True, backend=backend) for backend in ("aot_eager", "inductor")]
    rows = torch.export.Dim("rows", min=2)
    sizes = {1: rows}, {0: rows}, {1: rows}, hx_of(kind, [{2: rows}] * 2)
    torch.export.save(torch.export.export(model, drawn[0], dynamic_shapes=sizes), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    for inputs in drawn:
        expected = training_step(model, model, *inputs)
        for call in calls:
            assert all(map(torch.equal, training_step(model, call, *inputs), expected))
        with torch.no_grad():
            y, last = program(*inputs)
        assert all(map(torch.equal, [y, *states_of(last)], expected))


@pytest.mark.usefixtures("new_memory_differs")
@pytest.mark.parametrize("kind", KINDS)
def test_operators_pass_opcheck(kind, seed):
    torch.manual_seed(seed)
    model, (x, lengths, reset, reset_state) = Player(kind, dtype=torch.float64), random_inputs(kind, torch.float64)
    with Recorder() as recorder:
        training_step(model, model, x, lengths, reset, reset_state)
    recorder.calls = [call for call in recorder.calls if "step_mask" not in str(call[0])]
    name = {"RNN": "rnn_tanh"}.get(kind, kind.lower())
    check_operators(recorder, model.rnn._op._op, name, (L, L))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, seed):
    torch.manual_seed(seed)
    module, (x, lengths, reset, reset_state) = Player(kind, dtype=torch.float64), random_inputs(kind, torch.float64)
    states = [state.requires_grad_() for state in states_of(reset_state)]

    def call(x, *states):
        y, last = module(x, lengths, reset, hx_of(kind, states))
        return y, *states_of(last)

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *states))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_state(kind, batch_first, seed):
    """A view of one state for all episodes reaches the operator without a copy; gradients are summed."""
    torch.manual_seed(seed)
    module, (x, _, reset, reset_state) = Player(kind, batch_first=batch_first).rnn, random_inputs(kind)
    if batch_first:
        x, reset = x.transpose(0, 1), reset.T
    learned = [torch.randn(L, 1, 1, H, requires_grad=True) for _ in states_of(reset_state)]
    views = [state.expand(L, *reset.shape, H) for state in learned]
    whole = [view.detach().clone().requires_grad_() for view in views]
    results = []
    for states in (views, whole):
        module.zero_grad()
        with Recorder() as recorder:
            y, _ = module(x, reset=reset, reset_state=hx_of(kind, states))
        y.square().sum().backward()
        results.append([y, *[p.grad for p in module.parameters()]])
        given = [args[-1] for function, args in recorder.calls if "forward" in str(function)]
        assert len(given) == L and all((a.stride()[:2] == (0, 0)) == (states is views) for part in given for a in part)
    assert all(map(torch.equal, *results))
    for state, every in zip(learned, whole, strict=True):
        assert torch.allclose(state.grad, every.grad.sum((1, 2), keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_quantized(kind, scheme, dynamo, seed):
    """The bits of the quantized layer."""
    torch.manual_seed(seed)
    model, (x, lengths, reset, reset_state) = Player(kind).eval(), random_inputs(kind)
    layer = convert.from_torch(model.rnn).quantize(scheme)
    states = tuple(
        dict(zip(["h", "cs"], [state[layer].numpy() for state in states_of(reset_state)], strict=False))
        for layer in range(L)
    )
    y, _ = layer(x.numpy(), lengths=lengths.numpy(), reset=reset.numpy(), reset_state=states)
    nn.replace(model, quantize=scheme)
    with torch.no_grad():
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            assert torch.equal(call(x, lengths, reset, reset_state)[0], torch.from_numpy(y))


@pytest.mark.parametrize("asks", [False, True])
def test_gradients_where_somebody_asks(asks, seed):
    """The operator computes none otherwise."""
    torch.manual_seed(seed)
    model, (*inputs, reset_state) = Player("GRU"), random_inputs("GRU")
    with Recorder() as recorder:
        model(*inputs, reset_state.requires_grad_(asks))[0].sum().backward()
    needs = [args[-1] is True for function, args in recorder.calls if "backward" in str(function)]
    assert needs == [asks] * L and (reset_state.grad is not None) == asks


STATE = torch.zeros(L, T, B, H)


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({}, {"reset_state": (STATE, STATE)}, ValueError, "reset_state is given; expected reset, too"),
        (
            {"bidirectional": True},
            {"reset": torch.zeros(T, B, dtype=torch.bool), "reset_state": (STATE, STATE)},
            ValueError,
            "reset_state is given; expected one direction, not bidirectional=True",
        ),
        (
            {},
            {"reset": torch.zeros(T, B, dtype=torch.bool), "reset_state": STATE},
            TypeError,
            "reset_state is of type Tensor; expected a pair of tensors (h_0, c_0)",
        ),
        (
            {},
            {"reset": torch.zeros(T, B, dtype=torch.bool), "reset_state": (STATE, STATE[:, 0])},
            ValueError,
            "reset_state has shape (2, 3, 8); expected (2, 7, 3, 8), the sizes of hx with those of input's steps and"
            " rows",
        ),
    ],
)
def test_errors(options, given, error, message):
    with pytest.raises(error) as raised:
        nn.LSTM(I, H, L, **options)(torch.zeros(T, B, I), **given)
    assert str(raised.value) == f"blockcell.torch.LSTM: {message}"


def test_not_with_a_packed_sequence():
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(T, I)])
    message = r"^blockcell.torch.GRU: reset_state is given and input is a PackedSequence; expected a padded tensor"
    with pytest.raises(ValueError, match=message):
        nn.GRU(I, H)(packed, reset_state=STATE)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operators_refuse(device):
    """Calls by hand in two directions, without resets, of a single step."""
    x, rows = torch.zeros(T, B, I, device=device), [torch.zeros(T, B, H, device=device)]
    weights = [torch.zeros(3 * H, width, device=device) for width in (I, H)]
    mask, reset = (
        torch.zeros(2, T, B, dtype=torch.uint8, device=device),
        torch.zeros(T, B, dtype=torch.bool, device=device),
    )
    calls = [
        (torch.ops.blockcell.gru, (x, 2 * weights, True, True, [], mask, rows)),
        (torch.ops.blockcell.gru, (x, weights, False, True, [], None, rows)),
        (torch.ops.blockcell.gru_cell, (x[0], weights, False, True, [], mask[:, :1], rows)),
        (torch.ops.blockcell.gru_quantized, (x, 2 * weights, True, [], None, reset, "float16", rows)),
        (torch.ops.blockcell.gru_quantized, (x, weights, False, [], None, None, "float16", rows)),
    ]
    for operator, inputs in calls:
        with pytest.raises(
            ValueError, match=r"^blockcell: there are reset_states; expected a sequence in one direction"
        ):
            operator(*inputs)
