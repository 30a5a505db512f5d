OPENMP: bool
COMPILER: str
FLAGS: str
CYTHON: str

def supported_levels() -> tuple[str, ...]: ...
