"""What the parts of a layer share: states and weights."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from .._threads import in_forked_child
from ..optable import Array

ZERO, REPEAT = "zero", "repeat"  # what y is where a step is skipped


class LSTMState(NamedTuple):
    """Cell state and output of an `LSTM` between two steps, each (B, H); the output (B, P) with a projection."""

    cs: Array
    h: Array


class GRUState(NamedTuple):
    """State of a `GRU` between two steps, (B, H)."""

    h: Array


class RNNState(NamedTuple):
    """State of an `RNN` between two steps, (B, H)."""

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
"""Of the parts that stand side by side in y: their sizes, and whether they are of a backward direction. A `Dense` has
none."""


def columns_of(directions: Directions) -> Iterator[tuple[slice, bool]]:
    """Iterate over the directions: their columns of y, and whether they run backwards."""
    start = 0
    for size, reverse in directions:
        yield slice(start, start + size), bool(reverse)
        start += size


State = Any  # LSTMState, GRUState, RNNState, () or tuples of them
GivenState = tuple[Any, ...] | list[Any] | Mapping[Any, Any] | None  # what a user gives for one; parts may be None too

# What a layer returns for its state, and for that of a backward direction. Until 3.13 only type checkers know defaults.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Some = LSTMState | GRUState | RNNState | tuple[Any, ...]
    S_co = TypeVar("S_co", bound=Some, default=Some, covariant=True)
    S_bw_co = TypeVar("S_bw_co", bound=Some, default=Some, covariant=True)
else:
    from typing import TypeVar

    S_co, S_bw_co = TypeVar("S_co", covariant=True), TypeVar("S_bw_co", covariant=True)


# -------------------------------------------------------------------------------------------------------------- weights
class LeafWeights(NamedTuple):
    """The weights of one leaf: read-only arrays by name, and the same packed for the kernels."""

    arrays: dict[str, Array]
    """Of quantized matrices there are none here."""
    packed: Array
    format: int = 0
    """How matrices are packed: one of `blockcell.quantization.KERNEL_FORMATS`."""


class Grid(NamedTuple):
    """How threads share the work of a pass: ``groups * members`` threads.

    Attributes
    ----------
    groups : int
        The groups of threads, which share the batch rows.
    members : int
        The threads in each group, which share the hidden units.
    """

    groups: int
    members: int


class Plan(NamedTuple):
    """The threads of a layer's two passes, as `Layer.plan` returns them.

    Attributes
    ----------
    forward : Grid
        Of a call, and of `forward`.
    backward : Grid
        Of `backward`, which is planned separately.
    """

    forward: Grid
    backward: Grid


class Weights(dict[str, Array]):
    """The weights of a layer by name: a dict that cannot be changed. Copies, pickles and ``|`` give plain dicts."""

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise TypeError(
            "weights is read-only: a change of it would not reach the layer; expected layer.set_weights(**arrays),"
            " or a change of a copy, dict(layer.weights)"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class SharedWeights:
    """The weights of all leaves of a layer, by leaf.

    All of them are replaced at once, so a call sees either the old ones or the new ones.
    """

    def __init__(self, weights: dict[Any, LeafWeights]) -> None:
        self.weights = weights

    def replace(self, old: dict[Any, LeafWeights], new: dict[Any, LeafWeights]) -> bool:
        """Replace the old weights, unless another thread has already done so; return whether they were replaced."""
        with _replacing:
            if self.weights is not old:
                return False
            self.weights = new
            return True


_replacing = threading.Lock()


@in_forked_child
def _renew_lock() -> None:
    global _replacing
    _replacing = threading.Lock()
