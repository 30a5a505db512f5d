"""The layers of one cell: what `LSTM`, `GRU` and `RNN` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from .._layers import CellRunner
from .._stream import Stream
from ..activations import Activation, numbers
from ..argument_reader import ArgumentReader
from ..optable import Array, Op, layer_sizes
from .layer import Leaf
from .shared import Directions, S_co


class Cell(Leaf[S_co]):
    """A layer of one cell. `LSTM`, `GRU` and `RNN` override the options of the kernels."""

    _op: Op
    """The op that the layer computes: it has the same weights and outputs."""
    _activations: dict[str, Activation]
    """By the arguments' names, in their canonical form."""
    activation: Activation
    """The activation of the candidate and of an LSTM's output, or of an RNN's h: a name, or a tuple of a name and
    parameters that are not the defaults."""
    reverse: bool
    """Whether the layer runs from each row's last step to its first."""

    def _read_cell_options(self, reader: ArgumentReader, reverse: Any, **activations: Any) -> None:
        self._activations = {name: reader.activation(name, value) for name, value in activations.items()}
        self._set_options(**self._activations, reverse=reader.switch("reverse", reverse))

    def _new_runner(self) -> CellRunner:
        return CellRunner(self)

    def _kernel_options(self) -> tuple[Any, ...]:
        return tuple(map(numbers, self._activations.values()))

    def _arguments(self) -> dict[str, Any]:
        # In the order in which conversions look for what they have to refuse.
        weights = self._shared.weights[self].arrays
        return weights | self._activations | {"reverse": self.reverse} | self._option_values()

    def _directions(self, reverse: bool) -> Directions:
        return [(self.output_size, reverse ^ self.reverse)]

    @property
    def _gates(self) -> tuple[str, ...]:
        """The gates in the order of the first matrix' columns."""
        return self._op.gates

    def _sizes_of(self, arrays: Mapping[str, Array], message: str) -> dict[str, int]:
        first, gates = self._tensors[0], len(self._gates)
        rows, columns = arrays[first.name].shape
        if columns % gates:
            raise ValueError(f"{message}, so {gates} times as many columns as cells")
        projection = self._projection_size(arrays["w_p"], columns // gates) if "w_p" in arrays else None
        sizes = layer_sizes(first.shape, (rows, columns), projection)
        letter = "P" if "P" in sizes else "H"
        if rows < sizes[letter]:
            raise ValueError(f"{message}, so at least {letter} = {sizes[letter]} rows")
        return sizes

    def _projection_size(self, w_p: Array, hidden: int) -> int:
        """Return P, the size of h, from the weights that project it."""
        shape: tuple[int, ...] = w_p.shape
        if len(shape) != 2 or 0 in shape:
            expected = f"(H, P) with H={hidden} from w and P at least 1" if hidden else "that w has cells"
            raise ValueError(f"{type(self).__name__}: w_p has shape {shape}; expected {expected}")
        return shape[1]

    def stream(self, batch: SupportsIndex = 1) -> Stream[S_co]:
        if self.reverse:
            message = f"{type(self).__name__}.stream: the layer has reverse=True and so begins at the last step"
            raise TypeError(f"{message}; expected one that runs forwards")
        return super().stream(batch)
