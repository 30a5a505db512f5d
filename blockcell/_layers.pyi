from collections.abc import Mapping
from typing import Any

from ._kernels import PlannedKernel
from .layers.cell import Cell
from .layers.containers import Bidirectional, Stack
from .layers.dense import Dense
from .layers.masks import CountedSteps
from .layers.shared import LeafWeights, State
from .layers.tape import Tape
from .optable import Array
from .quantization import QuantizedMatrix

def run_packing_kernel(
    planned: PlannedKernel, packed: Array, weights: list[Array | None], matrices: list[QuantizedMatrix | None]
) -> None: ...
def check_lengths(caller: str, lengths: Array, T: int, values: Array) -> None: ...
def step_mask_of(T: int, B: int, lengths: Array | None, reset: Array | None, reverse: bool) -> Array | None: ...

class Runner:
    def try_forward(
        self, weights: Mapping[Any, LeafWeights], x: Any, state: Any, lengths: Any, batch_first: Any, training: bool
    ) -> Any: ...
    def forward_layer(
        self,
        weights: Mapping[Any, LeafWeights],
        x: Array,
        state: State,
        lengths: Array | None,
        reset: Array | None,
        reset_state: State,
        counted: CountedSteps | None,
        batch_first: bool,
        training: bool,
        threads: int = 0,
    ) -> Any: ...
    def try_backward(
        self, tape: Tape, d_y: Any, d_last: Any, d_reset_state: State
    ) -> tuple[Array, Any, dict[str, Array]] | None: ...
    def backward_layer(
        self, tape: Tape, d_y: Array, d_last: State, d_reset_state: State
    ) -> tuple[Array, Any, dict[str, Array]]: ...

class CellRunner(Runner):
    def __init__(self, layer: Cell[Any]) -> None: ...

class DenseRunner(Runner):
    def __init__(self, layer: Dense) -> None: ...

class StackRunner(Runner):
    def __init__(self, layer: Stack) -> None: ...

class BidirectionalRunner(Runner):
    def __init__(self, layer: Bidirectional[Any, Any]) -> None: ...
