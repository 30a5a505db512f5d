from collections.abc import Callable
from typing import Any

NUMBER: Any
RUN: Any

def expect_stacks(size: int) -> None: ...
def get() -> int: ...
def set(wanted: int, possible: int) -> None: ...
def compute(
    kernel: Callable[..., int],
    requirements: Callable[..., tuple[int, int, int]],
    sizes: tuple[int, ...],
    threads: int,
    arguments: tuple[Any, ...],
) -> None: ...
def adapt(wanted: bool) -> None: ...
