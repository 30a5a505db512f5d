"""The layers of one cell: what `LSTM`, `GRU` and `RNN` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from .._layers import CellRunner
from .._stream import Stream
from ..activations import Activation, numbers, unusual
from ..argument_reader import ArgumentReader
from ..optable import Array, Op
from .layer import Leaf
from .shared import Directions, S_co


class Cell(Leaf[S_co]):
    """A layer of one cell. `LSTM`, `GRU` and `RNN` override the options of the kernels."""

    _op: Op
    """The op that the layer computes: it has the same weights and outputs."""
    _reverse: bool = False
    _activations: dict[str, Activation]
    """By the arguments' names, in their canonical form."""

    @property
    def reverse(self) -> bool:
        """Whether the layer runs from each row's last step to its first."""
        return self._reverse

    @property
    def activation(self) -> Activation:
        """What makes the candidate of an LSTM or GRU, and h of an LSTM's cell state or of an RNN's product: a name, or
        a tuple of a name and parameters where these are not the defaults."""
        return self._activations["activation"]

    def _read_activations(self, reader: ArgumentReader, **given: Any) -> None:
        self._activations = {name: reader.activation(name, value) for name, value in given.items()}

    def _new_runner(self) -> CellRunner:
        return CellRunner(self)

    def _kernel_options(self) -> tuple[Any, ...]:
        return tuple(map(numbers, self._activations.values()))

    def _arguments(self) -> dict[str, Any]:
        return self._shared.weights[self].arrays | self._activations | {"reverse": self.reverse}

    def _described(self, **attributes: Any) -> dict[str, Any]:
        """The layer's type and attributes. Those that are as in older versions, which did not have them, are left out:
        files of both are the same then."""
        newer: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value  # as JSON has it
            for name, value in unusual(self._activations).items()
        }
        return {"type": type(self).__name__} | attributes | newer | ({"reverse": True} if self.reverse else {})

    def _repr_options(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in unusual(self._activations).items()] + (
            ["reverse=True"] if self.reverse else []
        )

    def _directions(self, reverse: bool) -> Directions:
        return [(self.output_size, reverse ^ self.reverse)]

    @property
    def _gates(self) -> tuple[str, ...]:
        """The gates in the order of the first matrix' columns."""
        return self._op.gates

    def _sizes_of(self, arrays: Mapping[str, Array], what: str) -> dict[str, int]:
        gates = len(self._gates)
        rows, columns = arrays[self._tensors[0].name].shape
        hidden, rest = divmod(columns, gates)
        if rest:
            raise ValueError(f"{what}, so {gates} times as many columns as cells")
        fed_back = self._feedback_sizes(arrays, hidden)
        for letter, size in fed_back.items():
            if rows < size:
                raise ValueError(f"{what}, so at least {letter} = {size} rows")
            rows -= size
        return {"I": rows, "H": hidden} | fed_back

    def _feedback_sizes(self, arrays: Mapping[str, Array], hidden: int) -> dict[str, int]:
        """The size of h, by its letter."""
        return {"H": hidden}

    def stream(self, batch: SupportsIndex = 1) -> Stream[S_co]:
        if self.reverse:
            what = f"{type(self).__name__}.stream: the layer has reverse=True and so begins at the last step"
            raise TypeError(f"{what}; expected one that runs forwards")
        return super().stream(batch)
