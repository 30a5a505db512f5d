"""What tests of `blockcell.torch` have in common; a test file that imports it is skipped where there is no PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
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


def tensors_that_do_not_fit(inputs: tuple[Any, ...]) -> Iterator[list[tuple[Any, ...]]]:
    """For each tensor among the inputs of an operator: the inputs with tensors of other shapes or another dtype."""
    for k, value in enumerate(inputs):
        for j, tensor in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(tensor, torch.Tensor):
                wrongs = tensor[:-1], tensor[..., :-1], tensor[None], tensor.to(torch.int8)
                given = [[*value[:j], wrong, *value[j + 1 :]] if isinstance(value, list) else wrong for wrong in wrongs]
                yield [(*inputs[:k], each, *inputs[k + 1 :]) for each in given]


def check_refused(cases: Iterable[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]]) -> None:
    """Each call is an error whose message, of one line, begins so."""
    for call, inputs, error, message in cases:
        with pytest.raises(error) as raised:
            call(*inputs)
        assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
