from collections.abc import Sequence
from typing import Any

from .optable import Array

def hold(name: str, tensor: Any) -> Any: ...
def array_of(name: str, tensor: Any) -> Array: ...

class Sized:
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
        summed: int,
        states: tuple[str, ...],
        parts: int,
        threads: int,
        projection: int = 0,
        single: bool = False,
    ) -> None: ...

class TensorPass(Sized):
    def __call__(
        self, x: Any, weights: Sequence[Any], states: Sequence[Any], step_mask: Any, outputs: Sequence[Any]
    ) -> None: ...

class TensorGradients(Sized):
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
