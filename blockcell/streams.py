"""A stack of layers that runs on, step by step; a single layer's `Stream` is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from . import _stream
from ._read import short
from .optable import Array

if TYPE_CHECKING:
    from .layers import Stack


class StackStream:
    """Steps of a stack, one after the other, with the states kept in between: as `Stream`, layer upon layer.

    Made by `stack.stream(batch=1)`.

    Attributes
    ----------
    layer : Stack
    batch : int
        B, the rows that run side by side.
    state : tuple
        Those of the layers; copies.  Assigning sets them.
    """

    def __init__(self, layer: Stack, batch: SupportsIndex = 1) -> None:
        self.layer = layer
        self._parts: list[_stream.Stream | StackStream] = [part.stream(batch) for part in layer.layers]
        self._streams: tuple[_stream.Stream, ...] = tuple(
            stream for part in self._parts for stream in (part._streams if isinstance(part, StackStream) else (part,))
        )
        self.batch: int = self._streams[0].batch
        self._between = tuple(
            np.empty((self.batch, stream.layer.output_size), layer.dtype) for stream in self._streams[:-1]
        )
        self.refresh()  # so that the weights of all are of the same moment

    def step(self, x: ArrayLike, out: Array | None = None) -> Array:
        """One step, as `Stream.step`."""
        return _stream.advance(self._streams, self._between, x, out, 2)

    def run(self, x: ArrayLike, out: Array | None = None) -> Array:
        """T steps, as `Stream.run`."""
        return _stream.advance(self._streams, self._between, x, out, 3)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Set the states to zero, of all rows or of those given, as `Stream.reset`."""
        _stream.reset(self._streams, rows)

    def refresh(self) -> None:
        """Take over the weights that the stack has now; the states stay."""
        _stream.refresh(self._streams, self.layer._shared.weights)

    @property
    def state(self) -> tuple[Any, ...]:
        return tuple(part.state for part in self._parts)

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        _stream.put(self._streams, self._state_arrays(value))

    def _state_arrays(self, value: Any) -> list[Array]:
        """A state of the user's as the arrays of all streams, one after the other."""
        expected = f"expected {len(self._parts)}, one for each layer"
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"Stack.stream: state is {short(value)}; {expected}")
        if len(value) != len(self._parts):
            raise ValueError(f"Stack.stream: state has {len(value)} parts; {expected}")
        return [array for part, given in zip(self._parts, value, strict=True) for array in part._state_arrays(given)]

    def _in_use(self) -> Stack:
        return type(self.layer)([part._in_use() for part in self._parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return _stream.restored, (self._in_use(), self.batch, self.state)

    def __repr__(self) -> str:
        return f"<Stream of {self.layer!r}, batch={self.batch}>"
