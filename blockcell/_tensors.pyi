from collections.abc import Sequence
from typing import Any

class TensorPass:
    def __init__(
        self,
        found: tuple[object, bytes, int, int] | None,
        dtype: Any,
        marks_dtype: Any,
        itemsize: int,
        sizes: tuple[int, int, int, int],
        directions: int,
        bias: bool,
        gates: int,
        summed: int,
        states: tuple[str, ...],
        parts: int,
        threads: int,
        single: bool = False,
    ) -> None: ...
    def __call__(
        self, x: Any, weights: Sequence[Any], states: Sequence[Any], marks: Any, outputs: Sequence[Any]
    ) -> None: ...
