"""The layers of one cell: what `LSTM` and `GRU` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from .._args import empty
from .._stream import Stream
from ..optable import Array, Op
from .base import Single
from .shared import Directions, ForwardPass, S_co, State


class CellTape(NamedTuple):
    """What a cell keeps of a forward pass."""

    weights: dict[str, Array]
    x: Array
    state: tuple[Array, ...]
    saved: Array
    h: Array
    marks: Array | None
    reverse: bool


class Cell(Single[S_co]):
    """A layer of one cell. `LSTM` and `GRU` override the options of the kernels."""

    _op: Op
    """The op that the layer computes: it has the same weights and outputs."""
    _reverse: bool = False

    @property
    def reverse(self) -> bool:
        """Whether the layer runs from each row's last step to its first."""
        return self._reverse

    def _arguments(self) -> dict[str, Any]:
        return self._shared.weights[self].arrays | {"reverse": self.reverse}

    def _described(self, **attributes: Any) -> dict[str, Any]:
        """The layer's type and attributes. Only a reverse one says in which direction it runs, as files of old ones."""
        return {"type": type(self).__name__} | attributes | ({"reverse": True} if self.reverse else {})

    def _remarks(self) -> list[str]:
        return ["reverse=True"] if self.reverse else []

    def _directions(self, reverse: bool) -> Directions:
        return [(self.hidden_size, reverse ^ self.reverse)]

    def _sizes_of(self, shape: tuple[int, int], what: str) -> dict[str, int]:
        gates = len(self._op.gates)
        hidden, rest = divmod(shape[1], gates)
        if rest:
            raise ValueError(f"{what}, so {gates} times as many columns as cells")
        if shape[0] < hidden:
            raise ValueError(f"{what}, so at least H = {hidden} rows")
        return {"I": shape[0] - hidden, "H": hidden}

    def stream(self, batch: SupportsIndex = 1, storage: str | None = None) -> Stream[S_co]:
        """Run the layer step by step; the `Stream` keeps the state in between, which is zero at first.

        Parameters
        ----------
        batch : int
            B, the number of rows that run side by side; at least 1.
        storage : {None, "float16", "bfloat16", "int8"}
            How the stream keeps matrices of weights: of a float32 layer, in half the bytes or a quarter. Its results
            are then those of ``layer.rounded_to(storage)``, bit for bit. None: as they are.

        Raises
        ------
        TypeError
            The layer has ``reverse=True``: it begins at the last step, which a stream does not know.
        ValueError
            `storage` is unknown, the layer's dtype is not float32, or a weight is not finite or too large.
        """
        if self.reverse:
            what = f"{type(self).__name__}.stream: the layer has reverse=True and so begins at the last step"
            raise TypeError(f"{what}; expected one that runs forwards")
        return super().stream(batch, storage)

    @property
    def _runs_plainly(self) -> bool:
        return not self.reverse

    def _forward(
        self, current: ForwardPass, x: Array, state: State, reverse: bool, y: Array | None
    ) -> tuple[Array, State, Any]:
        T, B, _ = x.shape
        reverse ^= self.reverse
        arrays, packed, narrow = current.weights[self]
        marks = current.marks.in_direction(reverse)
        last = self._state(*map(np.empty_like, state))
        shape = T, B, self.hidden_size
        h = empty(shape, self.dtype) if y is None or current.training else y
        saved = empty((len(self._op.outputs) - 1, *shape), self.dtype) if current.training else None
        if h.size:
            options = self._forward_options()
            self._compute("layer", T, B, x, *state, packed, h, saved, *last, marks, reverse, narrow, *options)
        else:
            _copy(last, state)
        if y is None:
            y = h
        elif y is not h:
            y[...] = h
        tape = CellTape(arrays, x, state, saved, h, marks, reverse) if saved is not None else None
        return y, last, tape

    def _backward(
        self, tape: CellTape, d_y: Array, d_last: State, d_x: Array | None
    ) -> tuple[Array, State, dict[str, Array]]:
        T, B, _ = tape.x.shape
        d_state = self._state(*map(np.empty_like, d_last))
        if d_x is None:
            d_x = empty(tape.x.shape, self.dtype)
        if not tape.h.size:
            _copy(d_state, d_last)
            d_x[...] = 0
            return d_x, d_state, {name: np.zeros_like(w) for name, w in tape.weights.items()}
        grads = {name: empty(w.shape, self.dtype) for name, w in tape.weights.items()}
        read = self._ordered(tape.weights, "matrix", "peephole")
        forward = tape.x, *tape.state, *read, tape.saved, tape.h
        found = d_x, *d_state, *self._ordered(grads)
        options = tape.marks, tape.reverse, *self._pack_options()
        self._compute("layer_grad", T, B, *forward, d_y, *d_last, *found, *options)
        return d_x, d_state, grads


def _copy(targets: Iterable[Array], sources: Iterable[Array]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[...] = source
