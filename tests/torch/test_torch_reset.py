"""Episodes that start within a sequence; test_torch_lengths.py compares their results with loops over cells.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from torch_cases import MARKS, hx_of, states_of

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
rnn = torch.nn.utils.rnn

pytestmark = MARKS
KINDS = ["LSTM", "GRU", "RNN"]


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
