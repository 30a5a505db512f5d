"""Whole layers on the kernels of the ops: `LSTM`, `GRU`, `Bidirectional` and `Stack`.

.. code-block:: text

    y, state = layer(x, state=None, lengths=None, reset=None)              inference
    y, state, tape = layer.forward(x, ...)                                 the same, keeping what backward needs
    d_x, d_state, grads = layer.backward(tape, d_y, d_state=None)

A layer has its weights from its constructor, which copies them, or from ``set_weights``, which replaces them at once:
a call that runs meanwhile in another thread, and a tape, keep those that they began with.  Between calls a layer keeps
nothing else: states are arguments and results.  Several threads may use one layer.

**A layer's forget_bias and cell_clip are 0 unless given; those of `blockcell.raw_ops` are TensorFlow's 1.0 and 3.0.**
"""

from __future__ import annotations

import copy
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import _kernels, _team
from ._args import empty
from ._read import ArgumentReader, as_kernels_take, form, is_array, short
from ._stream import Runner, Stream
from .optable import DTYPES, OPS, Array, Op, Tensor, sizes_of
from .streams import StackStream

__all__ = ["GRU", "LSTM", "Bidirectional", "GRUState", "LSTMState", "Layer", "Stack", "Tape"]

ENDED, FRESH, FIRST = 1, 2, 4  # the marks of pyx/steps.pxd
HALF = DTYPES.index(np.dtype(np.float16))
GATE_ORDERS = {"icfo": OPS["BlockLSTM"].gates, "ifco": OPS["BlockLSTMV2"].gates}


class LSTMState(NamedTuple):
    """Cell state and output of an `LSTM` between two steps, each (B, H)."""

    cs: Array
    h: Array


class GRUState(NamedTuple):
    """State of a `GRU` between two steps, (B, H)."""

    h: Array


# LSTMState, GRUState, or tuples of them.
State = Any


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """What `Layer.forward` keeps for `Layer.backward`: copies of x and y, the steps' gates and states, the weights."""

    layer: Layer
    T: int
    B: int
    end: int = field(repr=False)
    """The step at which the last row has ended; nothing is kept from there on."""
    content: Any = field(repr=False)


# ------------------------------------------------------------------------------------------------------------- a call
class _Weights(NamedTuple):
    """The weights of a cell: read-only arrays by name, and all of them as the kernels read them."""

    arrays: dict[str, Array]
    packed: Array


class _Shared:
    """The weights of all cells of a layer. Replaced as a whole, so that a call sees all the old or all the new ones."""

    def __init__(self, weights: dict[_Cell, _Weights]) -> None:
        self.weights = weights

    def replace(self, old: dict[_Cell, _Weights], new: dict[_Cell, _Weights]) -> bool:
        """Whether the old ones were still there, so that the new ones are now."""
        with _replacing:
            if self.weights is not old:
                return False
            self.weights = new
            return True


_replacing = threading.Lock()


def _after_fork_in_child() -> None:
    """Whichever thread of the parent held the lock is not there to release it."""
    global _replacing
    _replacing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class _Steps:
    """Where a batch's rows end and start anew, as the kernels want to know it."""

    def __init__(self, T: int, B: int, lengths: Array | None, reset: Array | None) -> None:
        self.T, self.B, self.lengths, self.reset = T, B, lengths, reset
        self._found: dict[bool, Array] = {}

    def marks(self, reverse: bool) -> Array | None:
        if self.lengths is None and self.reset is None:
            return None
        if reverse not in self._found:
            self._found[reverse] = self._mark(reverse)
        return self._found[reverse]

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


class _Call(NamedTuple):
    """What all cells of a layer share in one call."""

    weights: Mapping[_Cell, _Weights]
    steps: _Steps
    training: bool


class Layer(ABC):
    """What `LSTM`, `GRU`, `Bidirectional` and `Stack` have in common."""

    _shared: _Shared

    # ------------------------------------------------------------------------------------------------ what a layer is
    @property
    @abstractmethod
    def input_size(self) -> int:
        """I, the last dimension of x."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """H, the number of cells; of a stack's last layer."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """The last dimension of y."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """float32, float64 or float16: that of the weights, of all inputs and of all results."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """What the constructor takes to make the same layer."""

    @abstractmethod
    def _cells(self, prefix: str = "") -> dict[str, _Cell]:
        """The cells that this layer is made of, by the prefix of their weights' keys."""

    def _share(self, shared: _Shared) -> None:
        """Become part of a layer."""
        self._shared = shared

    def __copy__(self) -> Self:
        return type(self)(**self._arguments())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments()

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    # -------------------------------------------------------------------------------------------------------- weights
    @property
    def weights(self) -> dict[str, Array]:
        """The weights by name, read-only: ``w``; ``fw.w``; ``0.bw.w``."""
        current = self._shared.weights
        return {
            prefix + name: array
            for prefix, cell in self._cells().items()
            for name, array in current[cell].arrays.items()
        }

    def set_weights(self, **arrays: ArrayLike) -> None:
        """Replace all weights or some, all at the same moment.

        Parameters
        ----------
        **arrays : array_like
            By the keys of `weights`, of the same shapes and dtype; they are copied.  Keys with dots can be given as
            ``set_weights(**{"fw.w": w})``.

        Raises
        ------
        TypeError
            There is no such weight, or it has another dtype.
        ValueError
            It has another shape.
        """
        reader = ArgumentReader(type(self).__name__)
        known = self.weights
        for name in arrays:
            if name not in known:
                raise TypeError(f"{reader.caller}: there is no weight {name}; expected {', '.join(known)}")
        given = {cell: cell._read_weights(reader, prefix, arrays) for prefix, cell in self._cells().items()}
        while True:  # until nobody else has replaced any meanwhile
            old = self._shared.weights
            new = {cell: cell._pack(old[cell].arrays | read) for cell, read in given.items() if read}
            if self._shared.replace(old, old | new):
                return

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layer to a file, ``.npz`` or ``.safetensors``, which `blockcell.load` reads: `blockcell.files`."""
        from .files import save

        save(self, path)

    # ---------------------------------------------------------------------------------------------------------- calls
    def __call__(
        self,
        x: ArrayLike,
        state: State = None,
        *,
        lengths: ArrayLike | None = None,
        reset: ArrayLike | None = None,
    ) -> tuple[Array, State]:
        """Run the layer; nothing is kept for a backward pass.

        Parameters
        ----------
        x : array_like (T, B, I)
            Input, time first, of the layer's dtype; lists are converted.
        state : optional
            State before the first step, as a call returns it: `LSTMState`, `GRUState`, (fw, bw), or a tuple of these
            for a stack.  None, also in place of any part, means zeros.
        lengths : array_like (B,) of int, optional
            How many steps of each row count, 0 to T.  Past its length a row's state stays what it is, y is zero, and
            x is never looked at; a backward direction starts at the row's own end.  The time is that of the longest
            row; the others' steps past their ends are computed and dropped.
        reset : array_like (T, B) of bool, optional
            Where a new episode starts: the state before step t is zero for the rows that are True.  A backward
            direction zeroes its state between its steps t and t - 1.

        Returns
        -------
        y : ndarray (T, B, output_size)
            The cells' h; of `Bidirectional` the forward half first.
        state
            State after each row's last step, in the form of `state`.

        Raises
        ------
        TypeError
            An array has another dtype than the layer, or an argument is of the wrong kind.
        ValueError
            A shape or a length does not fit.
        """
        if lengths is None and reset is None and (results := self._directly(x, state)) is not None:
            return results
        y, last, _ = self._start(x, state, lengths, reset, False)
        return y, last

    def forward(
        self,
        x: ArrayLike,
        state: State = None,
        *,
        lengths: ArrayLike | None = None,
        reset: ArrayLike | None = None,
    ) -> tuple[Array, State, Tape]:
        """Run the layer and keep what `backward` needs.  Same arguments, same bits as a plain call.

        Returns
        -------
        y, state
            As from a plain call.
        tape : Tape
            For `backward`, any number of times.  It has its own copies of everything: x, y, states and the layer's
            weights may change in the meantime.
        """
        return self._start(x, state, lengths, reset, True)

    def backward(
        self, tape: Tape, d_y: ArrayLike | None, d_state: State = None
    ) -> tuple[Array, State, dict[str, Array]]:
        """The gradients of a loss, from those to the results of `forward`.

        The gradient passes through ``cell_clip`` as if it were not there, as in TensorFlow.

        Parameters
        ----------
        tape : Tape
            From this layer's `forward`.
        d_y : array_like (T, B, output_size)
            Gradient to y; what lies past a row's length is never looked at.  None means zeros.
        d_state : optional
            Gradient to the final state, in its form.  None, also in place of any part, means zeros.

        Returns
        -------
        d_x : ndarray (T, B, I)
            Gradient to x; zero past a row's length.
        d_state
            Gradient to the initial state, in its form.
        grads : dict of str to ndarray
            Gradient to each weight, by the keys of `weights`.

        Raises
        ------
        TypeError
            An array has another dtype than the layer, or an argument is of the wrong kind.
        ValueError
            A shape does not fit, or the tape is another layer's.
        """
        reader = ArgumentReader(type(self).__name__)
        if not isinstance(tape, Tape):
            raise TypeError(f"{reader.caller}: tape is {short(tape)}; expected that of this layer's forward")
        if tape.layer is not self:
            raise ValueError(
                f"{reader.caller}: tape is that of another layer, {tape.layer!r}; expected one of {self!r}"
            )
        shape = tape.T, tape.B, self.output_size
        if d_y is None:
            d_y = np.zeros(shape, self.dtype)
        else:
            d_y = _read(reader, "d_y", d_y, self.dtype, shape, f"{shape}, that of y")
        d_last = self._read_state(reader, "d_state", d_state, tape.B)
        d_x, d_first, grads = self._backward(tape.content, d_y[: tape.end], d_last)
        if tape.end < tape.T:
            d_x = np.concatenate([d_x, np.zeros((tape.T - tape.end, *d_x.shape[1:]), self.dtype)])
        return d_x, d_first, grads

    def _directly(self, x: Any, state: Any) -> tuple[Array, State] | None:
        """What a plain call returns, without a detour through Python; None where there is no such way."""
        return None

    def _start(self, x: Any, state: State, lengths: Any, reset: Any, training: bool) -> tuple[Array, State, Tape]:
        weights = self._shared.weights
        reader = ArgumentReader(type(self).__name__)
        inputs = f"(T, B, I) with I={self.input_size} from the layer"
        x = _read(reader, "x", x, self.dtype, (None, None, self.input_size), inputs)
        T, B, _ = x.shape
        lengths, reset = _read_lengths(reader, lengths, T, B), _read_reset(reader, reset, T, B)
        first = self._read_state(reader, "state", state, B, keep=training)
        end = T if lengths is None else int(lengths.max(initial=0))  # where all rows have ended
        x = x[:end].copy() if training else x[:end]
        steps = _Steps(end, B, lengths, reset if reset is None else reset[:end])
        y = None
        if training or end < T:  # the user's, not the tape's
            y = empty((T, B, self.output_size), self.dtype)
            y[end:] = 0
        part, last, content = self._forward(
            _Call(weights, steps, training), x, first, False, y if y is None else y[:end]
        )
        return part if y is None else y, last, Tape(self, T, B, end, content)

    @abstractmethod
    def stream(self, batch: SupportsIndex = 1) -> Any:
        """The layer step by step, with the state kept in between."""

    @abstractmethod
    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, keep: bool = False) -> State:
        """A state as the kernels take it; where it is to be kept, in memory of our own."""

    @abstractmethod
    def _forward(self, call: _Call, x: Array, state: State, reverse: bool, y: Array | None) -> tuple[Array, State, Any]:
        """y, the final state, and what the tape keeps.

        The given y, whose rows may be part of longer ones, is filled and returned; a new one may be part of the tape.
        """

    @abstractmethod
    def _backward(self, tape: Any, d_y: Array, d_last: State) -> tuple[Array, State, dict[str, Array]]:
        """What `backward` returns."""


# ------------------------------------------------------------------------------------------------------------ arguments
def _read(
    reader: ArgumentReader,
    name: str,
    value: Any,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    expected: str,
    keep: bool = False,
) -> Array:
    """An array as the kernels take it; where it is to be kept, in memory of our own. None fits any size."""
    array = reader.array(name, value)
    if type(value) is not np.ndarray or array.dtype != dtype:
        reader.dtype_number([(name, value, array)], DTYPES.index(dtype), "the layer")
    if not _fits(array.shape, shape):
        raise ValueError(f"{reader.caller}: {name} has shape {array.shape}; expected {expected}")
    return np.array(array, dtype, order="C", copy=True) if keep else as_kernels_take(array, dtype)


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(found) != len(shape):
        return False
    for n, expected in zip(found, shape, strict=True):
        if n != expected and expected is not None:
            return False
    return True


def _read_lengths(reader: ArgumentReader, value: Any, T: int, B: int) -> Array | None:
    if value is None:
        return None
    lengths = reader.array("lengths", value)
    if lengths.dtype.kind not in "iu" and (lengths.size or is_array(value)):
        raise TypeError(f"{reader.caller}: lengths has dtype {lengths.dtype}; expected integers")
    if lengths.shape != (B,):
        raise ValueError(f"{reader.caller}: lengths has shape {lengths.shape}; expected (B,) = ({B},) with B from x")
    for b in np.flatnonzero((lengths < 0) | (lengths > T))[:1]:
        raise ValueError(f"{reader.caller}: lengths[{b}] is {lengths[b]}; expected 0 to T = {T}")
    return lengths.astype(np.int64)


def _read_reset(reader: ArgumentReader, value: Any, T: int, B: int) -> Array | None:
    if value is None:
        return None
    reset = reader.array("reset", value)
    if reset.dtype != np.bool_ and (reset.size or is_array(value)):
        raise TypeError(f"{reader.caller}: reset has dtype {reset.dtype}; expected bool")
    if reset.shape != (T, B):
        raise ValueError(
            f"{reader.caller}: reset has shape {reset.shape}; expected (T, B) = ({T}, {B}) with both from x"
        )
    return reset.astype(np.bool_)


def _read_parts(reader: ArgumentReader, name: str, state: State, names: Iterable[str], expected: str) -> dict[str, Any]:
    """The parts of a state by their full names; of None, None."""
    names = [f"{name}.{part}" for part in names]
    if state is None:
        return dict.fromkeys(names)
    if not isinstance(state, (tuple, list)):
        raise TypeError(f"{reader.caller}: {name} is {short(state)}; expected {expected} or None")
    if len(state) != len(names):
        raise ValueError(f"{reader.caller}: {name} has {len(state)} parts; expected {expected}")
    return dict(zip(names, state, strict=True))


# ---------------------------------------------------------------------------------------------------------------- cells
class _CellTape(NamedTuple):
    weights: dict[str, Array]
    x: Array
    state: tuple[Array, ...]
    saved: Array
    h: Array
    marks: Array | None
    reverse: bool


class _Cell(Layer):
    """A layer of one cell.  What an LSTM and a GRU differ in comes from the op's row of the table and from below."""

    _op: ClassVar[Op]
    """The op that a layer is: its weights, states and outputs are those of the layer."""
    _kernel: ClassVar[str]
    """What the names of the kernels begin with."""
    _state: ClassVar[type[LSTMState] | type[GRUState]]
    _sizes: dict[str, int]
    _number: int
    _runner: Runner

    def _pack_options(self) -> tuple[bool, ...]:
        """What packing and the gradients need to know."""
        return ()

    def _forward_options(self) -> tuple[float, ...]:
        return ()

    def _arguments(self) -> dict[str, Any]:
        return dict(self._shared.weights[self].arrays)

    def _cells(self, prefix: str = "") -> dict[str, _Cell]:
        return {prefix: self}

    @classmethod
    @cache
    def _tensors(cls) -> tuple[Tensor, ...]:
        """The weights, in the kernels' order."""
        return tuple(tensor for tensor in cls._op.inputs if tensor.name[0] in "wb")

    @property
    def input_size(self) -> int:
        """I, the last dimension of x."""
        return self._sizes["I"]

    @property
    def hidden_size(self) -> int:
        """H, the number of cells."""
        return self._sizes["H"]

    @property
    def output_size(self) -> int:
        """H, the last dimension of y."""
        return self._sizes["H"]

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, float64 or float16: that of the weights, of all inputs and of all results."""
        return DTYPES[self._number]

    def __repr__(self) -> str:
        values = [f"input_size={self.input_size}", f"hidden_size={self.hidden_size}", f"dtype={self.dtype}"]
        return f"{type(self).__name__}({', '.join(values + self._remarks())})"

    def _remarks(self) -> list[str]:
        """What else the repr says."""
        return []

    # -------------------------------------------------------------------------------------------------------- weights
    def _take(self, values: dict[str, Any]) -> None:
        """The sizes and the dtype from the weights, and the weights."""
        reader, tensors = (
            ArgumentReader(type(self).__name__),
            [tensor for tensor in self._tensors() if tensor.name in values],
        )
        arrays = {}
        for tensor in tensors:
            if values[tensor.name] is None:
                raise TypeError(
                    f"{reader.caller}: {tensor.name} is None; expected an array of shape {form(tensor.shape)}"
                )
            arrays[tensor.name] = reader.array(tensor.name, values[tensor.name])
        self._number = reader.dtype_number((name, values[name], array) for name, array in arrays.items())
        first, gates = tensors[0], len(self._op.gates)
        shape = arrays[first.name].shape
        what = f"{reader.caller}: {first.name} has shape {shape}; expected {form(first.shape)}"
        if len(shape) != 2:
            raise ValueError(f"{what}, rank 2")
        hidden, rest = divmod(shape[1], gates)
        if rest:
            raise ValueError(f"{what}, so {gates} times as many columns as cells")
        if shape[0] < hidden:
            raise ValueError(f"{what}, so at least H = {hidden} rows")
        self._sizes = {"I": shape[0] - hidden, "H": hidden}
        self._shared = _Shared({self: self._pack(self._read_weights(reader, "", values))})
        self._runner = Runner(self)

    def _read_weights(self, reader: ArgumentReader, prefix: str, values: Mapping[str, Any]) -> dict[str, Array]:
        """Copies of this cell's weights among the values, whose names begin with the prefix."""
        arrays = {}
        sizes = ", ".join(f"{letter}={size}" for letter, size in self._sizes.items())
        for tensor in self._tensors():
            name = prefix + tensor.name
            if name in values:
                shape = sizes_of(tensor.shape, self._sizes)
                expected = f"{form(tensor.shape)} = {shape} with {sizes}"
                array = _read(reader, name, values[name], self.dtype, shape, expected, keep=True)
                array.flags.writeable = False
                arrays[tensor.name] = array
        return arrays

    def _pack(self, arrays: dict[str, Array]) -> _Weights:
        size, _ = self._work("pack", 1, 1, 1)
        packed = np.empty(size, np.uint8)
        if self.hidden_size:
            self._run("pack", *self._ordered(arrays), packed, *self._pack_options())
        return _Weights(arrays, packed)

    def _ordered(self, arrays: dict[str, Array]) -> list[Array]:
        """One for each weight of the op, empty where the cell has none."""
        return [arrays.get(tensor.name, _EMPTY[self._number]) for tensor in self._tensors()]

    # -------------------------------------------------------------------------------------------------------- streams
    def stream(self, batch: SupportsIndex = 1) -> Stream:
        """A `Stream`: the layer step by step, with the state kept in between, from zeros.

        Parameters
        ----------
        batch : int
            B, the rows that run side by side; at least 1.
        """
        return Stream(self, ArgumentReader(f"{type(self).__name__}.stream").integer("batch", batch))

    def _with(self, weights: _Weights) -> Self:
        """A layer like this one with these weights."""
        return type(self)(**(self._arguments() | weights.arrays))

    def _taken(self, name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
        """An array of a stream's caller as the kernels take it."""
        expected = f"({', '.join('T' if size is None else str(size) for size in shape)})"
        return _read(ArgumentReader(f"{type(self).__name__}.stream"), name, value, self.dtype, shape, expected)

    def _taken_state(self, value: Any, batch: int) -> list[Array]:
        """A state, likewise."""
        names = self._state._fields
        what, expected = f"{type(self).__name__}.stream: state", self._state.__name__
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{what} is {short(value)}; expected {expected}({', '.join(names)})")
        if len(value) != len(names):
            raise ValueError(f"{what} has {len(value)} arrays; expected {', '.join(names)}")
        shape = batch, self.hidden_size
        return [self._taken(name, array, shape) for name, array in zip(names, value, strict=True)]

    def _stream_kernel(self, weights: _Weights, T: int, B: int, threads: int) -> tuple[object, bytes, int, int]:
        """What runs T steps, its plan, how many bytes of scratch it needs, and how many of the threads it takes."""
        sizes = T, B, self.input_size, self.hidden_size
        bias = next(array for name, array in weights.arrays.items() if name[0] == "b")
        run, plan = self._run("stream", bias, weights.packed, *sizes, *self._forward_options(), threads)
        return run, plan, *self._work("stream", T, B, threads)

    # -------------------------------------------------------------------------------------------------------- kernels
    def _directly(self, x: Any, state: Any) -> tuple[Array, State] | None:
        return self._runner.call(self, self._shared.weights[self], x, state)

    def _run(self, name: str, *arguments: Any) -> Any:
        if self._number == HALF:  # which a kernel's memoryview does not know
            arguments = tuple(
                a.view(np.uint16) if isinstance(a, np.ndarray) and a.dtype == np.float16 else a for a in arguments
            )
        return _kernels.KERNELS[f"{self._kernel}_{name}"][self._number](*arguments)

    def _work(self, name: str, T: int, B: int, threads: int) -> tuple[int, int]:
        """How many bytes of scratch a kernel needs, and how many of the threads it takes."""
        itemsize = max(self.dtype.itemsize, 4)  # half is computed in float
        return _kernels.WORK[f"{self._kernel}_{name}"](T, B, self.input_size, self.hidden_size, itemsize, threads)

    def _compute(self, name: str, T: int, B: int, *arguments: Any) -> None:
        """Run a kernel that takes scratch, on as many threads as are of use and there are now."""
        threads = _team.get()
        size, planned = self._work(name, T, B, threads)
        ready = 1 if planned == 1 else _team.ready(planned)
        lost = self._run(name, *arguments, np.empty(size, np.uint8), threads, ready)
        if planned > 1:
            _team.report(lost)

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, keep: bool = False) -> State:
        fields, shape = self._state._fields, (B, self.hidden_size)
        if state is None:
            return self._state(*[np.zeros(shape, self.dtype) for _ in fields])
        parts = _read_parts(reader, name, state, fields, f"{self._state.__name__}({', '.join(fields)})")
        expected = f"(B, H) = {shape} with B from x, H from the layer"
        return self._state(
            *(
                np.zeros(shape, self.dtype)
                if value is None
                else _read(reader, part, value, self.dtype, shape, expected, keep)
                for part, value in parts.items()
            )
        )

    def _forward(self, call: _Call, x: Array, state: State, reverse: bool, y: Array | None) -> tuple[Array, State, Any]:
        T, B, _ = x.shape
        arrays, packed = call.weights[self]
        marks = call.steps.marks(reverse)
        last = self._state(*map(np.empty_like, state))
        shape = T, B, self.hidden_size
        h = empty(shape, self.dtype) if y is None or call.training else y
        saved = empty((len(self._op.outputs) - 1, *shape), self.dtype) if call.training else None
        if h.size:
            options = self._forward_options()
            self._compute("layer", T, B, x, *state, packed, h, saved, *last, marks, reverse, *options)
        else:
            _copy(last, state)
        if y is None:
            y = h
        elif y is not h:
            y[...] = h
        tape = _CellTape(arrays, x, state, saved, h, marks, reverse) if saved is not None else None
        return y, last, tape

    def _backward(self, tape: _CellTape, d_y: Array, d_last: State) -> tuple[Array, State, dict[str, Array]]:
        T, B, _ = tape.x.shape
        d_state = self._state(*map(np.empty_like, d_last))
        if not tape.h.size:
            _copy(d_state, d_last)
            return np.zeros_like(tape.x), d_state, {name: np.zeros_like(w) for name, w in tape.weights.items()}
        d_x = empty(tape.x.shape, self.dtype)
        grads = {name: empty(w.shape, self.dtype) for name, w in tape.weights.items()}
        read = [
            w for tensor, w in zip(self._tensors(), self._ordered(tape.weights), strict=True) if tensor.name[0] == "w"
        ]
        self._compute(
            *("layer_grad", T, B, tape.x, *tape.state, *read, tape.saved, tape.h, d_y, *d_last),
            *(d_x, *d_state, *self._ordered(grads), tape.marks, tape.reverse, *self._pack_options()),
        )
        return d_x, d_state, grads


_EMPTY = [np.empty(0, dtype) for dtype in DTYPES]


def _copy(targets: Iterable[Array], sources: Iterable[Array]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


class LSTM(_Cell):
    """A long short-term memory: `blockcell.raw_ops.BlockLSTM` as a layer, bit for bit.

    .. code-block:: text

        [i_bar | ci_bar | f_bar | o_bar] = [x, h_prev] @ w + b         "ifco": i, f, ci, o
        i = sigmoid(i_bar + cs_prev * wci)
        f = sigmoid(f_bar + cs_prev * wcf + forget_bias)
        ci = tanh(ci_bar)
        cs = i * ci + f * cs_prev                                      clipped to [-cell_clip, cell_clip]
        o = sigmoid(o_bar + cs * wco)
        h = o * tanh(cs)

    **forget_bias and cell_clip are 0 unless given.**  The raw ops keep TensorFlow's 1.0 and 3.0: give these for weights
    that were trained with them.

    Parameters
    ----------
    w : array_like (I+H, 4H)
        Weights: I rows for x, H rows for h; columns by gate, in `gate_order`.
    b : array_like (4H,)
        Bias, likewise.
    wci, wcf, wco : array_like (H,), optional
        Peephole weights of the gates i, f and o; all three or none.
    forget_bias : float
        Added to the forget gate.
    cell_clip : float
        Bound of the cell state; 0 or less for none.
    gate_order : {"icfo", "ifco"}
        Order of the columns: that of LSTMBlockCell and BlockLSTM, or that of BlockLSTMV2.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16, or an argument is of the wrong kind.
    ValueError
        Shapes do not agree, or the gate order is unknown.
    """

    _op = OPS["BlockLSTM"]
    _kernel = "lstm"
    _state = LSTMState

    def __init__(
        self,
        w: ArrayLike,
        b: ArrayLike,
        *,
        wci: ArrayLike | None = None,
        wcf: ArrayLike | None = None,
        wco: ArrayLike | None = None,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        gate_order: str = "icfo",
    ) -> None:
        reader = ArgumentReader(type(self).__name__)
        if not isinstance(gate_order, str) or gate_order not in GATE_ORDERS:
            error = ValueError if isinstance(gate_order, str) else TypeError
            raise error(f"{reader.caller}: gate_order is {short(gate_order)}; expected 'icfo' or 'ifco'")
        self._forget_bias = reader.number("forget_bias", forget_bias)
        self._cell_clip = reader.number("cell_clip", cell_clip)
        self._gate_order = gate_order
        peepholes = {"wci": wci, "wcf": wcf, "wco": wco}
        self._use_peephole = any(value is not None for value in peepholes.values())
        self._take({"w": w, "b": b} | (peepholes if self._use_peephole else {}))

    @classmethod
    def init(
        cls,
        input_size: SupportsIndex,
        hidden_size: SupportsIndex,
        *,
        seed: Any,
        dtype: DTypeLike = np.float32,
        use_peephole: bool = False,
        forget_bias: float = 0.0,
        cell_clip: float = 0.0,
        gate_order: str = "icfo",
    ) -> Self:
        """A layer with new weights, the same for the same seed.

        Each gate has Glorot's uniform distribution for x and a random orthogonal matrix for h. b is 0, but 1 for the
        forget gate where `forget_bias` is 0. Peephole weights are Glorot uniform.

        The defaults of TensorFlow 1's cells, LSTMBlockCell among them: Glorot uniform over the whole kernel, w; b = 0,
        forget_bias = 1, no clip (the raw ops have 3). Keras: Glorot uniform and orthogonal as here, but over all four
        gates together; b is 1 for the forget gate.

        Parameters
        ----------
        input_size, hidden_size : int
            I and H.
        seed : int, sequence of int, numpy.random.Generator or None
            What `numpy.random.default_rng` takes; None draws a seed from the system.
        dtype : float32, float64 or float16
        use_peephole : bool
            Whether there are peephole weights.
        forget_bias, cell_clip, gate_order
            As in the constructor.
        """
        reader = ArgumentReader(f"{cls.__name__}.init")
        I, H, dtype = _read_sizes(reader, input_size, hidden_size, dtype)  # noqa: E741
        g = np.random.default_rng(seed)
        gates = GATE_ORDERS.get(gate_order, ())
        weights: dict[str, Array] = {"w": _new_weights(g, I, H, 4), "b": np.zeros(4 * H)}
        if forget_bias == 0 and gates:
            k = gates.index("f")
            weights["b"][k * H : (k + 1) * H] = 1
        if reader.switch("use_peephole", use_peephole):
            weights |= {name: _glorot(g, H, H, (H,)) for name in ("wci", "wcf", "wco")}
        return cls(**_rounded(weights, dtype), forget_bias=forget_bias, cell_clip=cell_clip, gate_order=gate_order)

    @property
    def forget_bias(self) -> float:
        return self._forget_bias

    @property
    def cell_clip(self) -> float:
        return self._cell_clip

    @property
    def gate_order(self) -> str:
        return self._gate_order

    def _attributes(self) -> dict[str, Any]:
        return {"forget_bias": self.forget_bias, "cell_clip": self.cell_clip, "gate_order": self.gate_order}

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | self._attributes()

    def _remarks(self) -> list[str]:
        usual = {"forget_bias": 0.0, "cell_clip": 0.0, "gate_order": "icfo"}
        unusual = [f"{name}={value!r}" for name, value in self._attributes().items() if value != usual[name]]
        return ["use_peephole=True"] * self._use_peephole + unusual

    def _pack_options(self) -> tuple[bool, ...]:
        return self._use_peephole, self.gate_order == "ifco"

    def _forward_options(self) -> tuple[float, ...]:
        numbers = self.forget_bias, self.cell_clip
        return *(map(ArgumentReader.half, numbers) if self._number == HALF else numbers), self._use_peephole


class GRU(_Cell):
    """A gated recurrent unit: `blockcell.ops.block_gru` as a layer, bit for bit.

    .. code-block:: text

        [r_bar | u_bar] = [x, h_prev] @ w_ru + b_ru
        r = sigmoid(r_bar)
        u = sigmoid(u_bar)
        c = tanh([x, h_prev * r] @ w_c + b_c)
        h = u * h_prev + (1 - u) * c

    The reset comes before the product, as in TensorFlow's GRUBlockCell; PyTorch's and cuDNN's comes after it.

    Parameters
    ----------
    w_ru : array_like (I+H, 2H)
        Weights of the gates: I rows for x, H rows for h; columns r, u.
    w_c : array_like (I+H, H)
        Weights of the candidate: I rows for x, H rows for ``h * r``.
    b_ru : array_like (2H,)
        Bias of the gates: r, u.
    b_c : array_like (H,)
        Bias of the candidate.

    Raises
    ------
    TypeError
        The arrays are not all of one dtype of float32, float64 and float16.
    ValueError
        Shapes do not agree.
    """

    _op = OPS["block_gru"]
    _kernel = "gru"
    _state = GRUState

    def __init__(self, w_ru: ArrayLike, w_c: ArrayLike, b_ru: ArrayLike, b_c: ArrayLike) -> None:
        self._take({"w_ru": w_ru, "w_c": w_c, "b_ru": b_ru, "b_c": b_c})

    @classmethod
    def init(
        cls, input_size: SupportsIndex, hidden_size: SupportsIndex, *, seed: Any, dtype: DTypeLike = np.float32
    ) -> Self:
        """A layer with new weights, the same for the same seed.

        Each gate and the candidate have Glorot's uniform distribution for x and a random orthogonal matrix for h.
        b_ru is 1 and b_c 0.

        The defaults of TensorFlow 1's cells, GRUBlockCell among them: Glorot uniform over the whole of w_ru and w_c;
        the same biases. Keras: Glorot uniform and orthogonal as here, but over all three together; biases 0.

        Parameters
        ----------
        input_size, hidden_size : int
            I and H.
        seed : int, sequence of int, numpy.random.Generator or None
            What `numpy.random.default_rng` takes; None draws a seed from the system.
        dtype : float32, float64 or float16
        """
        I, H, dtype = _read_sizes(ArgumentReader(f"{cls.__name__}.init"), input_size, hidden_size, dtype)  # noqa: E741
        g = np.random.default_rng(seed)
        w_ru, w_c = _new_weights(g, I, H, 2), _new_weights(g, I, H, 1)
        return cls(**_rounded({"w_ru": w_ru, "w_c": w_c, "b_ru": np.ones(2 * H), "b_c": np.zeros(H)}, dtype))


# ---------------------------------------------------------------------------------------------------------- new weights
def _read_sizes(
    reader: ArgumentReader, input_size: Any, hidden_size: Any, dtype: Any
) -> tuple[int, int, np.dtype[Any]]:
    sizes = {"input_size": input_size, "hidden_size": hidden_size}
    for name in sizes:
        sizes[name] = reader.integer(name, sizes[name])
        if sizes[name] < 0:
            raise ValueError(f"{reader.caller}: {name} is {sizes[name]}; expected at least 0")
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        raise TypeError(f"{reader.caller}: dtype is {dtype}; expected float32, float64 or float16")
    return sizes["input_size"], sizes["hidden_size"], dtype


def _glorot(g: np.random.Generator, fan_in: int, fan_out: int, shape: tuple[int, ...]) -> Array:
    bound = np.sqrt(6 / max(fan_in + fan_out, 1))
    return g.uniform(-bound, bound, shape)


def _orthogonal(g: np.random.Generator, size: int) -> Array:
    """Uniform among all orthogonal matrices."""
    q, r = np.linalg.qr(g.standard_normal((size, size)))
    return q * np.copysign(1, np.diagonal(r))  # type: ignore[no-any-return]


def _new_weights(g: np.random.Generator, inputs: int, hidden: int, gates: int) -> Array:
    """[I+H, gates H]"""
    columns = [
        np.concatenate([_glorot(g, inputs, hidden, (inputs, hidden)), _orthogonal(g, hidden)]) for _ in range(gates)
    ]
    return np.concatenate(columns, axis=1)


def _rounded(weights: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    with np.errstate(under="ignore"):  # float16 has few small numbers, and none is missed here
        return {name: array.astype(dtype) for name, array in weights.items()}


# ------------------------------------------------------------------------------------------------------- made of layers
class _Made(Layer):
    """A layer made of copies of others."""

    _layers: dict[str, Layer]

    def _take(self, layers: dict[str, Any]) -> None:
        """Copies of the layers; their weights are replaced together from now on."""
        caller = type(self).__name__
        for name, layer in layers.items():
            if not isinstance(layer, Layer):
                raise TypeError(f"{caller}: {name} is {short(layer)}; expected a layer")
        self._layers = {name: copy.copy(layer) for name, layer in layers.items()}
        first, *others = self._layers
        for name in others:
            if self._layers[name].dtype != self.dtype:
                expected = f"expected {self.dtype}, that of {first}"
                raise TypeError(f"{caller}: {name} has dtype {self._layers[name].dtype}; {expected}")
        shared = _Shared({})
        for layer in self._layers.values():
            shared.weights |= layer._shared.weights
        self._share(shared)

    def _share(self, shared: _Shared) -> None:
        self._shared = shared
        for layer in self._layers.values():
            layer._share(shared)

    def _cells(self, prefix: str = "") -> dict[str, _Cell]:
        found: dict[str, _Cell] = {}
        for name, layer in self._layers.items():
            found |= layer._cells(f"{prefix}{name}.")
        return found

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, float64 or float16: that of the weights, of all inputs and of all results."""
        return next(iter(self._layers.values())).dtype

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, keep: bool = False) -> State:
        parts = _read_parts(reader, name, state, self._layers, f"({', '.join(self._layers)})")
        return tuple(
            layer._read_state(reader, part, value, B, keep)
            for layer, (part, value) in zip(self._layers.values(), parts.items(), strict=True)
        )

    def _keyed(self, grads: Iterable[dict[str, Array]]) -> dict[str, Array]:
        """The layers' gradients by the keys of `weights`."""
        return {
            f"{name}.{key}": array
            for name, found in zip(self._layers, grads, strict=True)
            for key, array in found.items()
        }


class Bidirectional(_Made):
    """Two layers side by side, of which the second goes through the steps from the last to the first.

    Parameters
    ----------
    fw, bw : Layer
        For the forward and the backward direction, of one dtype, input size and output size; they are copied.
        Their halves of y lie in this order; the state is a tuple of both.

    Raises
    ------
    TypeError
        An argument is not a layer, or the dtypes differ.
    ValueError
        The sizes differ.
    """

    def __init__(self, fw: Layer, bw: Layer) -> None:
        self._take({"fw": fw, "bw": bw})
        for size in ("input_size", "output_size"):
            one, other = getattr(fw, size), getattr(bw, size)
            if one != other:
                raise ValueError(f"{type(self).__name__}: bw has {size} {other}; expected {one}, that of fw")

    @property
    def fw(self) -> Layer:
        """The layer of the forward direction."""
        return self._layers["fw"]

    @property
    def bw(self) -> Layer:
        """The layer of the backward direction."""
        return self._layers["bw"]

    @property
    def input_size(self) -> int:
        """I, the last dimension of x."""
        return self.fw.input_size

    @property
    def hidden_size(self) -> int:
        """H, the number of cells of the forward direction."""
        return self.fw.hidden_size

    @property
    def output_size(self) -> int:
        """2H, the last dimension of y."""
        return 2 * self.fw.output_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fw={self.fw!r}, bw={self.bw!r})"

    def _arguments(self) -> dict[str, Any]:
        return {"fw": self.fw, "bw": self.bw}

    def stream(self, batch: SupportsIndex = 1) -> NoReturn:
        """A backward direction begins at the end, which a stream does not have: a TypeError."""
        raise TypeError(f"{type(self).__name__}.stream: backward begins at the last step; stream fw alone")

    def _halves(self, y: Array) -> tuple[Array, Array]:
        return y[:, :, : self.fw.output_size], y[:, :, self.fw.output_size :]

    def _forward(self, call: _Call, x: Array, state: State, reverse: bool, y: Array | None) -> tuple[Array, State, Any]:
        if y is None:
            y = empty((*x.shape[:2], self.output_size), self.dtype)
        fw, bw = self._halves(y)
        _, last_fw, tape_fw = self.fw._forward(call, x, state[0], reverse, fw)
        _, last_bw, tape_bw = self.bw._forward(call, x, state[1], not reverse, bw)
        return y, (last_fw, last_bw), (tape_fw, tape_bw)

    def _backward(self, tape: Any, d_y: Array, d_last: State) -> tuple[Array, State, dict[str, Array]]:
        halves = [as_kernels_take(half, self.dtype) for half in self._halves(d_y)]
        d_x, d_fw, grads_fw = self.fw._backward(tape[0], halves[0], d_last[0])
        d_x_bw, d_bw, grads_bw = self.bw._backward(tape[1], halves[1], d_last[1])
        with np.errstate(over="ignore", invalid="ignore"):
            d_x += d_x_bw
        return d_x, (d_fw, d_bw), self._keyed((grads_fw, grads_bw))


class Stack(_Made):
    """Layers one upon the other: the y of each is the x of the next.

    Parameters
    ----------
    layers : sequence of Layer
        At least one, from the input to the output, of one dtype; they are copied. The state is a tuple of all.

    Raises
    ------
    TypeError
        An element is not a layer, or the dtypes differ.
    ValueError
        There is none, or the input size of one is not the output size of the one before it.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        caller = type(self).__name__
        if not isinstance(layers, Iterable):
            raise TypeError(f"{caller}: layers is {short(layers)}; expected a sequence of layers")
        named = {str(k): layer for k, layer in enumerate(layers)}
        if not named:
            raise ValueError(f"{caller}: layers is empty; expected at least one layer")
        self._take(named)
        for k, (before, layer) in enumerate(pairwise(self.layers)):
            if layer.input_size != before.output_size:
                expected = f"expected {before.output_size}, the output_size of {k}"
                raise ValueError(f"{caller}: {k + 1} has input_size {layer.input_size}; {expected}")

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, from the input to the output."""
        return tuple(self._layers.values())

    @property
    def input_size(self) -> int:
        """I, the last dimension of x."""
        return self.layers[0].input_size

    @property
    def hidden_size(self) -> int:
        """H, the number of cells of the last layer."""
        return self.layers[-1].hidden_size

    @property
    def output_size(self) -> int:
        """The last dimension of y."""
        return self.layers[-1].output_size

    def stream(self, batch: SupportsIndex = 1) -> StackStream:
        """The stack step by step, with the states kept in between, from zeros: see `LSTM.stream`."""
        return StackStream(self, batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.layers))}])"

    def _arguments(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def _forward(self, call: _Call, x: Array, state: State, reverse: bool, y: Array | None) -> tuple[Array, State, Any]:
        last, tapes = [], []
        for layer, first in zip(self.layers, state, strict=True):
            x, final, tape = layer._forward(call, x, first, reverse, y if layer is self.layers[-1] else None)
            last.append(final)
            tapes.append(tape)
        return x, tuple(last), tapes

    def _backward(self, tape: Any, d_y: Array, d_last: State) -> tuple[Array, State, dict[str, Array]]:
        states, grads = [], []
        for layer, content, d_state in reversed([*zip(self.layers, tape, d_last, strict=True)]):
            d_y, d_first, found = layer._backward(content, d_y, d_state)
            states.append(d_first)
            grads.append(found)
        return d_y, tuple(reversed(states)), self._keyed(reversed(grads))
