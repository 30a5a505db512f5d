from collections.abc import Sequence
from typing import Any, NoReturn

from .optable import Array

def hold_storage(name: str, tensor: Any) -> Any: ...
def array_of(name: str, tensor: Any) -> Array: ...
def refuse_count(name: str, count: int, expected: Sequence[int]) -> NoReturn: ...
def refuse_reset_states() -> NoReturn: ...

class TensorKernel:
    def __init__(self, planned: tuple[object, bytes, int, int, int] | None, *options: Any, **named: Any) -> None: ...

class TensorForward(TensorKernel):
    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
        states: Sequence[Any],
        step_mask: Any,
        outputs: Sequence[Any],
        reset_states: Sequence[Any] = (),
    ) -> None: ...

class TensorBackward(TensorKernel):
    def __call__(
        self,
        y: Any,
        tape: Any,
        matrices: Sequence[Any],
        grads: Sequence[Any],
        x: Any,
        states: Sequence[Any],
        step_mask: Any,
        needs_x: bool,
        outputs: Sequence[Any],
        reset_states: Sequence[Any] = (),
        needs_reset_states: bool = False,
    ) -> None: ...
