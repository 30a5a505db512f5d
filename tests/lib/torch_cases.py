"""What tests of `blockcell.torch` have in common; a test file that imports it is skipped where there is no PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

MARKS = [
    pytest.mark.peers,
    pytest.mark.usefixtures("threads_of_torch_as_before"),
    # PyTorch's own, on the way to compiling and exporting
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd:DeprecationWarning"),
]


def hx_of(kind: str, states: Any) -> Any:
    """As a module or cell of this kind takes it: the first of these tensors, or a pair of them."""
    return tuple(states) if kind.startswith("LSTM") else states[0]


def states_of(last: Any) -> list[Any]:
    """The reverse of `hx_of`."""
    return [*last] if isinstance(last, tuple) else [last]


def flat_tensors(value: Any) -> list[Any]:
    """List the tensors in a result or an argument; of a PackedSequence its data."""
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return [value.data]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in flat_tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def training_step(module: Any, call: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Return the results of a call, and their gradients to the inputs that require one and to the parameters."""
    leaves = [tensor for tensor in flat_tensors(inputs) if tensor.requires_grad and tensor.is_leaf]
    for tensor in (*leaves, *module.parameters()):
        tensor.grad = None
    results = flat_tensors(call(*inputs))
    torch.autograd.backward(results, [torch.cos(a.detach()) for a in results])
    return [a.detach() for a in results] + [a.grad for a in (*leaves, *module.parameters())]


SHARE = 1e-6


def nudged(g: Any, module: Any) -> Any:
    """A copy whose weights of x are off by this share, each up or down.

    What that changes in the gradient to x, divided by the share, is about as large as this gradient, but where x is few
    numbers whose terms happen to cancel.  There it is as large as the terms, of which float32 has seven digits.
    """
    found = copy.deepcopy(module)
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if name.startswith("weight_ih"):
                weight.mul_(torch.from_numpy(1 + SHARE * g.choice([-1, 1], weight.shape)))
    return found


# ----------------------------------------------------------------------------------------------- changes of weights
def save_and_load(module: Any) -> Any:
    """Save a module by torch.save, and load it."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def new_values(g: Any, module: Any) -> Any:
    """Draw values for all parameters."""
    bound = float(g.uniform(0.1, 1))
    draw = partial(g.uniform, -bound, bound)
    return {name: torch.from_numpy(draw(p.shape)).to(p.dtype) for name, p in module.named_parameters()}


def change_in_place(g: Any, module: Any) -> Any:
    """Change some of the parameters in place."""
    with torch.inference_mode() if g.integers(2) else torch.no_grad():
        for parameter in module.parameters():
            if g.integers(2):
                parameter.mul_(float(g.uniform(-1.5, 1.5)))
    return module


def replace_data(g: Any, module: Any) -> Any:
    """Replace the data of all parameters, twice."""
    for _ in range(2):  # the second time, memory that was freed may be had again
        for name, values in new_values(g, module).items():
            getattr(module, name).data = values if g.integers(2) else values.t().contiguous().t()
    return module


def repeat_first_gate(g: Any, module: Any) -> Any:
    """Give all gates the first one's recurrent weights, and set the other matrix to itself."""
    square = module.weight_hh_l0.data[: module.hidden_size]
    module.weight_hh_l0.data = torch.cat([square] * (len(module.weight_hh_l0) // len(square)))
    module.weight_ih_l0.data = module.weight_ih_l0.data
    return module


def load_values(g: Any, module: Any) -> Any:
    """Load drawn values."""
    module.load_state_dict(new_values(g, module), assign=bool(g.integers(2)))
    return module


def replace_parameter(g: Any, module: Any) -> Any:
    """Replace one of the parameters."""
    name = str(g.choice([name for name, _ in module.named_parameters()]))
    setattr(module, name, torch.nn.Parameter(new_values(g, module)[name]))
    return module


CHANGES_OF_WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda g, module: module,
    "in place": change_in_place,
    ".data": replace_data,
    "repeated gate": repeat_first_gate,
    "load_state_dict": load_values,
    "new parameter": replace_parameter,
    "shared memory": lambda g, module: module.share_memory(),
    "deepcopy": lambda g, module: copy.deepcopy(module),
    "pickle": lambda g, module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda g, module: save_and_load(module),
    "eval": lambda g, module: module.train().eval(),
    "freeze": lambda g, module: [p.requires_grad_(bool(g.integers(2))) for p in module.parameters()] and module,
}


# ----------------------------------------------------------------------------------------------------- loops over steps
def random_resets(g: Any, T: int, B: int) -> Any:
    """Draw resets: seldom, often, or always; nearly always at the first step, as rollouts have them."""
    reset = g.random((T, B)) < g.choice([0.0, 0.1, 0.5, 1.0], p=[0.1, 0.6, 0.2, 0.1])
    reset[0] |= g.random(B) < 0.5
    return reset


def loop_over_cells(
    module: Any, x: Any, states: list[Any], lengths: Any, reset: Any, reset_states: Any = None
) -> list[Any]:
    """Compute y [T,B,.] and the last states [L*D,B,.] of torch.nn's module by loops over single steps of its cells.

    x is [T,B,I], a state [L*D,B,.], lengths [B], reset [T,B], and a state at resets [L,T,B,.], None for zeros.
    h has a projection where the module has one.
    """
    D, last_states = 1 + module.bidirectional, []
    for layer in range(module.num_layers):
        outputs = []
        for d in range(D):
            step = cell_step(module, f"l{layer}" + "_reverse" * d)
            state, y = [s[layer * D + d] for s in states], {}
            for t in reversed(range(len(x))) if d else range(len(x)):
                rows = (t < lengths).nonzero()[:, 0]
                starts = reset[t + d] & (t + d < lengths) if t + d < len(x) else torch.zeros_like(reset[0])
                at_resets = [0.0] * len(state) if reset_states is None else [s[layer, t] for s in reset_states]
                fresh = [torch.where(starts[:, None], a, s) for a, s in zip(at_resets, state, strict=True)]
                computed = step(x[t, rows], [s[rows] for s in fresh])
                state = [s.index_copy(0, rows, c) for s, c in zip(state, computed, strict=True)]
                y[t] = torch.zeros_like(state[0]).index_copy(0, rows, computed[0])
            outputs.append(torch.stack([y[t] for t in range(len(x))]))
            last_states.append(state)
        x = torch.cat(outputs, dim=2)
    return [x, *map(torch.stack, zip(*last_states, strict=True))]


def cell_step(module: Any, suffix: str) -> Callable[[Any, list[Any]], list[Any]]:
    """Return a function that computes the next state from x [B,I] and a state by the cell of torch.nn's module that has
    the weights with this suffix."""
    weights = {
        name.removesuffix(f"_{suffix}"): weight
        for name, weight in module.named_parameters()
        if name.endswith(f"_{suffix}")
    }
    projection = weights.pop("weight_hr", None)
    options = {"bias": module.bias, "dtype": torch.float64}
    if not isinstance(module, torch.nn.LSTM):
        kind = torch.nn.GRUCell if isinstance(module, torch.nn.GRU) else torch.nn.RNNCell
        if kind is torch.nn.RNNCell:
            options["nonlinearity"] = module.nonlinearity
        cell = kind(weights["weight_ih"].shape[1], module.hidden_size, **options)
        return lambda x, state: [torch.func.functional_call(cell, weights, (x, *state))]
    # torch.nn.LSTMCell has no projection, so that h is a part of its input, and its own h is zero.
    weights["weight_ih"] = torch.cat([weights["weight_ih"], weights["weight_hh"]], dim=1)
    weights["weight_hh"] = torch.zeros(4 * module.hidden_size, module.hidden_size, dtype=torch.float64)
    cell = torch.nn.LSTMCell(weights["weight_ih"].shape[1], module.hidden_size, **options)

    def step(x: Any, state: list[Any]) -> list[Any]:
        h, c = state
        inputs = torch.cat([x, h], dim=1), (torch.zeros_like(c), c)
        h, c = torch.func.functional_call(cell, weights, inputs)
        return [h if projection is None else h @ projection.T, c]

    return step


# ----------------------------------------------------------------------------------------------------------- operators
class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the calls of blockcell's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "blockcell":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def check_operators(recorder: Recorder, whole: Any, name: str, passes: tuple[int, int]) -> None:
    """Schema, fake tensors, autograd and tracing, of the operators that were called, so many forward and backward, and
    of the whole one that has gradients."""
    names = [str(function) for function, _ in recorder.calls]
    assert tuple(names.count(f"blockcell.{name}_{way}.default") for way in ("forward", "backward")) == passes

    def copied(value: Any, requires_grad: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [copied(each, requires_grad) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(requires_grad and value.is_floating_point())

    for function, args in recorder.calls:
        torch.library.opcheck(function, tuple(copied(a, False) for a in args))
        if "forward" in str(function):
            for requires_grad in (False, True):
                torch.library.opcheck(whole, tuple(copied(a, requires_grad) for a in (*args[:2], *args[3:])))


def check_refused(cases: Iterable[tuple[Callable[..., Any], tuple[Any, ...], str]]) -> None:
    """Each call is an error of one line, which begins so as a traceback ends with it."""
    for call, inputs, said in cases:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            call(*inputs)
        found = f"{raised.type.__name__}: {raised.value}"
        assert found.startswith(said) and "\n" not in found
