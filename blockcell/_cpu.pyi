OPENMP: bool
COMPILER: str
FLAGS: str
CYTHON: str
SOURCES: dict[str, str]
LEVELS: tuple[str, ...]
CACHES: dict[str, int]
MACHINE: object

def supported_levels() -> tuple[str, ...]: ...
