from collections.abc import Mapping
from typing import Any

from .layers.shared import CellWeights
from .optable import Array
from .quantization import QuantizedMatrix

def pack(
    planned: tuple[object, bytes, int, int, int],
    packed: Array,
    weights: list[Array | None],
    matrices: list[QuantizedMatrix | None],
) -> None: ...
def step_mask_of(T: int, B: int, lengths: Array | None, reset: Array | None, reverse: bool) -> Array | None: ...

class Runner:
    def __init__(self, layer: Any) -> None: ...
    def call(
        self, weights: Mapping[Any, CellWeights], x: Any, state: Any, lengths: Any, batch_first: Any, training: bool
    ) -> Any: ...
    def run(
        self,
        weights: Mapping[Any, CellWeights],
        x: Array,
        state: Any,
        lengths: Array | None,
        reset: Array | None,
        counted: Any,
        T: int,
        batch_first: bool,
        training: bool,
        threads: int = 0,
    ) -> Any: ...
    def differentiate(self, tape: Any, d_y: Any, d_last: Any) -> Any: ...
    def run_back(self, tape: Any, d_y: Array, d_last: Any) -> tuple[Array, Any, dict[str, Array]]: ...

class CellRunner(Runner): ...
class DenseRunner(Runner): ...
class StackRunner(Runner): ...
class BidirectionalRunner(Runner): ...
