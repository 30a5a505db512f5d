from typing import Any

OPENMP: bool
COMPILER: str
FLAGS: str
CYTHON: str
SOURCES: dict[str, str]
LEVELS: tuple[str, ...]
CACHES: dict[str, int]
MACHINE: object

def machine() -> dict[str, Any]: ...
def use_machine(**changes: Any) -> None: ...
def supported_levels() -> tuple[str, ...]: ...
