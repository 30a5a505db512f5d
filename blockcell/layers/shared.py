"""What the parts of a layer share: states, weights, and where rows end and start anew."""

import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..optable import Array

ENDED, FRESH, FIRST = 1, 2, 4  # the marks of pyx/steps.pxd
ZERO, REPEAT = "zero", "repeat"  # what y is where a step is left out


class LSTMState(NamedTuple):
    """Cell state and output of an `LSTM` between two steps, each (B, H)."""

    cs: Array
    h: Array


class GRUState(NamedTuple):
    """State of a `GRU` between two steps, (B, H)."""

    h: Array


class NoState(tuple[()]):
    """Makes the state of a `Dense`, which has none: the empty tuple."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *arrays: Array) -> tuple[()]:  # type: ignore[misc]
        return ()

    @classmethod
    def _make(cls, arrays: Iterable[Array]) -> tuple[()]:
        return ()


Directions = list[tuple[int, bool | None]]
"""Of the parts that stand side by side in y: their sizes, and whether they are of a backward direction.  A `Dense` has
none."""

State = Any  # LSTMState, GRUState, () or tuples of them
GivenState = tuple[Any, ...] | list[Any] | Mapping[Any, Any] | None  # what a user gives for one; parts may be None too

# What a layer returns for its state, and for that of a backward direction. Until 3.13 only type checkers know defaults.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Some = LSTMState | GRUState | tuple[Any, ...]
    S_co = TypeVar("S_co", bound=Some, default=Some, covariant=True)
    S_bw_co = TypeVar("S_bw_co", bound=Some, default=Some, covariant=True)
else:
    from typing import TypeVar

    S_co, S_bw_co = TypeVar("S_co", covariant=True), TypeVar("S_bw_co", covariant=True)


# -------------------------------------------------------------------------------------------------------------- weights
class CellWeights(NamedTuple):
    """The weights of one cell: read-only arrays by name, and the same packed for the kernels."""

    arrays: dict[str, Array]
    """Of a `Packed` layer that stores matrices in fewer bytes, without these."""
    packed: Array
    narrow: int = 0
    """How matrices are packed: 0 in the layer's dtype, else 1 + the position of their storage in WEIGHT_STORAGES."""


class SharedWeights:
    """The weights of all cells of a layer, by cell.

    All of them are replaced at once, so a call sees either the old ones or the new ones.
    """

    def __init__(self, weights: dict[Any, CellWeights]) -> None:
        self.weights = weights

    def replace(self, old: dict[Any, CellWeights], new: dict[Any, CellWeights]) -> bool:
        """Replace the old weights, unless another thread has already done so; return whether they were replaced."""
        with _replacing:
            if self.weights is not old:
                return False
            self.weights = new
            return True


_replacing = threading.Lock()


def _after_fork_in_child() -> None:
    """A thread that held the lock in the parent does not exist in the child, so nobody would release it."""
    global _replacing
    _replacing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ------------------------------------------------------------------------------------------------------------- one pass
class RowMarks:
    """Where the rows of a batch end and start anew, as the kernels read it."""

    def __init__(self, T: int, B: int, lengths: Array | None, reset: Array | None) -> None:
        self.T, self.B, self.lengths, self.reset = T, B, lengths, reset
        self._marks: dict[bool, Array] = {}

    def in_direction(self, reverse: bool) -> Array | None:
        """The marks of every step and row, [T,B]; None if all rows run through all steps without a reset."""
        if self.lengths is None and self.reset is None:
            return None
        if reverse not in self._marks:
            self._marks[reverse] = self._mark(reverse)
        return self._marks[reverse]

    def _mark(self, reverse: bool) -> Array:
        lengths = np.full(self.B, self.T) if self.lengths is None else self.lengths
        t = np.arange(self.T)[:, None]
        ended = t >= lengths
        marks: Array = FIRST * (t == (lengths - 1 if reverse else np.zeros_like(lengths))).astype(np.uint8)
        if self.reset is not None and reverse:  # an episode that starts at t + 1 hands no state back to t
            marks[:-1][self.reset[1:] & ~ended[1:]] |= FRESH
        elif self.reset is not None:
            marks[self.reset] |= FRESH
        marks[ended] = ENDED
        return marks


class ForwardPass(NamedTuple):
    """What all cells of a layer share in one forward pass."""

    weights: Mapping[Any, CellWeights]
    marks: RowMarks
    training: bool
