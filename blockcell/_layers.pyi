from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ._kernels import PlannedKernel
from .layers.masks import CountedSteps
from .layers.shared import Directions, LeafWeights, State
from .layers.tape import Tape
from .optable import Array
from .quantization import QuantizedMatrix

def run_packing_kernel(
    planned: PlannedKernel,
    packed: Array,
    weights: dict[str, Array],
    matrices: Mapping[str, QuantizedMatrix],
    unpacks: bool = False,
) -> None: ...
def check_lengths(caller: str, lengths: Array, T: int, values: Array) -> None: ...
def step_mask_of(T: int, B: int, lengths: Array | None, reset: Array | None, reverse: bool) -> Array | None: ...

class RunnableLayer(Protocol):
    """What the runner of any layer reads of it."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def input_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def output_size(self) -> int: ...
    @property
    def _over_time(self) -> bool: ...
    def _directions(self, reverse: bool) -> Directions: ...

class RunnableLeaf(RunnableLayer, Protocol):
    """A layer with weights of its own, which plans its kernels."""

    @property
    def _state(self) -> type[Any]: ...
    @property
    def _state_sizes(self) -> tuple[int, ...]: ...
    def _plan_kernel(self, task: str, format: int, T: int, B: int, threads: int) -> PlannedKernel: ...

class RunnableCell(RunnableLeaf, Protocol):
    @property
    def reverse(self) -> bool: ...
    @property
    def _kernel(self) -> str: ...

class RunnableDense(RunnableLeaf, Protocol):
    @property
    def _in_head(self) -> bool: ...
    def _directions_of_x(self) -> Directions: ...

class RunnableContainer(RunnableLayer, Protocol):
    @property
    def _layers(self) -> Mapping[str, HasRunner]: ...

class HasRunner(Protocol):
    @property
    def _runner(self) -> Runner: ...

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
    def __init__(self, layer: RunnableCell) -> None: ...

class DenseRunner(Runner):
    def __init__(self, layer: RunnableDense) -> None: ...

class StackRunner(Runner):
    def __init__(self, layer: RunnableContainer) -> None: ...

class BidirectionalRunner(Runner):
    def __init__(self, layer: RunnableContainer) -> None: ...
