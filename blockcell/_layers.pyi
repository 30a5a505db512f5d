from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from .layers.shared import Directions, LeafWeights
from .optable import Array
from .quantization import QuantizedMatrix

def pack(
    planned: tuple[object, bytes, int, int, int],
    packed: Array,
    weights: list[Array | None],
    matrices: list[QuantizedMatrix | None],
) -> None: ...
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
    def _weight_names(self) -> tuple[str, ...]: ...
    @property
    def _state(self) -> type[Any]: ...
    @property
    def _state_sizes(self) -> tuple[int, ...]: ...
    def _plan(self, task: str, format: int, T: int, B: int, threads: int) -> tuple[object, bytes, int, int, int]: ...

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
    def call(
        self, weights: Mapping[Any, LeafWeights], x: Any, state: Any, lengths: Any, batch_first: Any, training: bool
    ) -> Any: ...
    def run(
        self,
        weights: Mapping[Any, LeafWeights],
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

class CellRunner(Runner):
    def __init__(self, layer: RunnableCell) -> None: ...

class DenseRunner(Runner):
    def __init__(self, layer: RunnableDense) -> None: ...

class StackRunner(Runner):
    def __init__(self, layer: RunnableContainer) -> None: ...

class BidirectionalRunner(Runner):
    def __init__(self, layer: RunnableContainer) -> None: ...
