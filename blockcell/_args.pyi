from collections.abc import Callable
from typing import Any

import numpy as np

from .optable import Op

def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]: ...

class Binder:
    op: Op
    def __init__(
        self,
        op: Op,
        kernels: tuple[Any, ...],
        work: Callable[..., tuple[int, int]],
    ) -> None: ...
    def run(
        self,
        arrays: tuple[Any, ...],
        out: Any,
        num_threads: Any,
        seq_len_max: Any = None,
        use_peephole: Any = False,
        forget_bias: Any = 0.0,
        cell_clip: Any = 0.0,
    ) -> Any: ...
