from collections.abc import Callable
from typing import Any

import numpy as np

from ._kernels import Kernel
from .argument_reader import ArgumentReader
from .op_arguments import Converter
from .optable import Op

def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]: ...
def frozen_copy(array: object, other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None: ...

class OpRunner:
    def __init__(
        self,
        op: Op,
        kernels: tuple[Kernel, ...],
        requirements: Callable[..., tuple[int, int, int]],
        positions: dict[str, int],
        reader: ArgumentReader,
        converter: Converter,
    ) -> None: ...
    def run(
        self,
        arrays: tuple[Any, ...],
        out: Any,
        num_threads: Any,
        attributes: tuple[Any, ...] = (),
        seq_len_max: Any = None,
    ) -> Any: ...
