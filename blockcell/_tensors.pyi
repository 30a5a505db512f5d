from collections.abc import Sequence
from typing import Any

from .optable import Array

def hold_storage(name: str, tensor: Any) -> Any: ...
def array_of(name: str, tensor: Any) -> Array: ...

class TensorKernel:
    def __init__(
        self,
        planned: tuple[object, bytes, int, int, int] | None,
        dtype: Any,
        step_mask_dtype: Any,
        itemsize: int,
        sizes: tuple[int, int, int, int],
        directions: int,
        bias: bool,
        gates: int,
        summed_gates: int,
        states: tuple[str, ...],
        tape_arrays: int,
        threads: int,
        projection: int = 0,
        single: bool = False,
    ) -> None: ...

class TensorForward(TensorKernel):
    def __call__(
        self, x: Any, weights: Sequence[Any], states: Sequence[Any], step_mask: Any, outputs: Sequence[Any]
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
    ) -> None: ...
