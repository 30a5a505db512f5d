"""A stack of layers that runs on, step by step; a single layer's `Stream` is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from ._read import short
from ._stream import Stream, restored
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
        self._streams: list[Stream | StackStream] = [part.stream(batch) for part in layer.layers]
        self.batch: int = self._streams[0].batch
        self._between = [np.empty((self.batch, part.output_size), part.dtype) for part in layer.layers[:-1]]

    def step(self, x: ArrayLike, out: Array | None = None) -> Array:
        """One step, as `Stream.step`."""
        *below, last = self._streams
        for stream, y in zip(below, self._between, strict=True):
            x = stream.step(x, y)
        return last.step(x, out)

    def run(self, x: ArrayLike, out: Array | None = None) -> Array:
        """T steps, as `Stream.run`."""
        *below, last = self._streams
        for stream in below:
            x = stream.run(x)
        return last.run(x, out)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Set the states to zero, of all rows or of those given, as `Stream.reset`."""
        for stream in self._streams:
            stream.reset(rows)

    def refresh(self) -> None:
        """Take over the weights that the stack has now; the states stay."""
        for stream in self._streams:
            stream.refresh()

    @property
    def state(self) -> tuple[Any, ...]:
        return tuple(stream.state for stream in self._streams)

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        expected = f"expected {len(self._streams)}, one for each layer"
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"Stack.stream: state is {short(value)}; {expected}")
        if len(value) != len(self._streams):
            raise ValueError(f"Stack.stream: state has {len(value)} parts; {expected}")
        before = self.state
        try:
            for stream, part in zip(self._streams, value, strict=True):
                stream.state = part
        except Exception:  # all or nothing
            self.state = before
            raise

    def _in_use(self) -> Stack:
        return type(self.layer)([stream._in_use() for stream in self._streams])

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (self._in_use(), self.batch, self.state)

    def __repr__(self) -> str:
        return f"<Stream of {self.layer!r}, batch={self.batch}>"
