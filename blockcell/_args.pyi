from collections.abc import Callable
from typing import Any

class Matcher:
    def __init__(
        self,
        inputs: tuple[tuple[tuple[tuple[int, int, int, int], ...], bool], ...],
        outputs: tuple[tuple[tuple[tuple[int, int, int, int], ...], bool], ...],
        ndarray: type,
        empty: Callable[..., Any],
        dtypes: tuple[Any, ...],
    ) -> None: ...
    def bind(
        self, arrays: tuple[Any, ...], out: Any, use_peephole: bool
    ) -> tuple[int, int, int, int, int, Any] | None: ...
