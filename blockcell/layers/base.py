"""What all layers have in common, `Layer`, and those with weights of their own, `Single`."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, Generic, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .. import _kernels, files
from .._args import frozen_copy
from .._layers import Runner
from .._read import ArgumentReader, form, rows_as_kernels_take, short
from .._stream import Stream
from .._threads import get_num_threads
from ..optable import DTYPES, ROUNDINGS, WEIGHT_STORAGES, Array, Kind, Tensor, sizes_of
from .arguments import (
    CallReader,
    checked_array,
    in_rows,
    read_array,
    read_lengths,
    read_parts,
    read_switches,
)
from .masks import CountedSteps, count
from .packed import Packed, Parts
from .shared import (
    REPEAT,
    ZERO,
    CellWeights,
    Directions,
    GivenState,
    Grid,
    GRUState,
    LSTMState,
    NoState,
    Plan,
    RNNState,
    S_co,
    SharedWeights,
    State,
)
from .storage import (
    Narrow,
    StorageError,
    error_of,
    keeps_widened,
    narrowed,
    read_activations,
    read_storage,
    rows_that_gain,
    stored_arrays,
    widened,
    widens,
)

HALF = DTYPES.index(np.dtype(np.float16))


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """What `Layer.forward` keeps for `Layer.backward`: copies of x and y, the gates and states of every step, and the
    weights."""

    layer: Layer
    T: int
    B: int
    end: int = field(repr=False)
    """The number of steps until every row has ended. Nothing is kept from there on."""
    content: Any = field(repr=False)
    batch_first: bool = False
    counted: CountedSteps | None = field(default=None, repr=False)
    """Where the steps that a mask counts are, if they had to move."""


class Layer(ABC, Generic[S_co]):
    """What `LSTM`, `GRU`, `RNN`, `Dense`, `Bidirectional` and `Stack` have in common."""

    _shared: SharedWeights
    _runner: Runner

    # -------------------------------------------------------------------------------------------------- what a layer is
    @property
    @abstractmethod
    def input_size(self) -> int:
        """I, the last dimension of x."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """H, the number of cells; of a stack's last layer. Of a `Dense`, its outputs."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """The last dimension of y."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """float32, float64 or float16: the dtype of the weights, of all inputs and of all results."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """The arguments with which the constructor makes an equal layer."""

    @abstractmethod
    def _description(self) -> dict[str, Any]:
        """The layer without its weights, as `blockcell.files` has it."""

    @abstractmethod
    def _cells(self, prefix: str = "") -> dict[str, Single]:
        """The layers with weights that the layer consists of, by the prefix of these weights' names."""

    @abstractmethod
    def _directions(self, reverse: bool) -> Directions:
        """How many columns of y are of a layer that runs backwards, or does not: one part after the other."""

    @property
    @abstractmethod
    def _is_stateless(self) -> bool:
        """Whether it has no state, as a `Dense` has none."""

    @property
    def _over_time(self) -> bool:
        """Whether y has a row for each step, or for the last one only."""
        return True

    @abstractmethod
    def _head(self) -> tuple[list[Single], bool]:
        """Return cells and dense layers whose output reaches y through dense layers at most, and whether x does."""

    def _share(self, shared: SharedWeights) -> None:
        """Use the weights of a layer that this one is now a part of."""
        self._shared = shared

    def __copy__(self) -> Self:
        return type(self)(**self._arguments())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments()

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    # ---------------------------------------------------------------------------------------------------------- weights
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
        """Replace some or all weights, all of them at the same moment.

        Parameters
        ----------
        **arrays : array_like
            New weights by their names in `weights`, with the same shapes and dtype; they are copied. Names with dots
            can be given as ``set_weights(**{"fw.w": w})``.

        Raises
        ------
        TypeError
            There is no weight of that name, or the array has another dtype.
        ValueError
            The array has another shape.
        """
        reader = ArgumentReader(type(self).__name__)
        known = self.weights
        if not arrays.keys() <= known.keys():
            unknown = next(name for name in arrays if name not in known)
            raise TypeError(f"{reader.caller}: there is no weight {unknown}; expected {', '.join(known)}")
        given = {cell: cell._read_weights(reader, prefix, arrays, known) for prefix, cell in self._cells().items()}
        while True:  # until no other thread has replaced any meanwhile
            old = self._shared.weights
            new = {cell: cell._pack(old[cell].arrays | read) for cell, read in given.items() if read}
            if self._shared.replace(old, old | new):
                return

    def _stored(
        self, reader: ArgumentReader, prefix: str, weights: Mapping[str, Array], storage: str
    ) -> dict[str, Narrow]:
        """The matrices among the weights as they are stored; the prefix is in front of their names."""
        cells = self._cells(prefix).items()
        names = [start + tensor.name for start, cell in cells for tensor in cell._tensors if tensor.kind == "matrix"]
        return {name: narrowed(weights[name], storage, f"{reader.caller}: {name}") for name in names}

    def rounded_to(self, storage: str) -> Self:
        """An equal layer, but with the weights that are left once these have been stored in fewer bytes.

        What that costs in accuracy is the difference between the two layers' results. Matrices are rounded; biases and
        peepholes are not. `blockcell.layers.storage` has the definition.

        Parameters
        ----------
        storage : {"float16", "bfloat16", "int8"}

        Raises
        ------
        ValueError
            The layer's dtype is not float32, or a weight is not finite or too large to be stored so.
        """
        reader = ArgumentReader(f"{type(self).__name__}.rounded_to")
        storage, weights = read_storage(reader, storage, self.dtype), self.weights
        stored = self._stored(reader, "", weights, storage)
        layer = copy.copy(self)
        layer.set_weights(**weights | {name: widened(each) for name, each in stored.items()})
        return layer

    def storage_error(
        self,
        storage: str,
        x: ArrayLike,
        state: GivenState = None,
        *,
        activations: str = "float32",
        **options: Any,
    ) -> StorageError:
        """Measure what it costs to store the weights in fewer bytes: how far y is off on these data.

        Parameters
        ----------
        storage : {"float16", "bfloat16", "int8"}
        x, state, **options
            As of a call.
        activations : {"float32", "int8", "int16"}
            With ``storage="int8"``: as of `packed`.

        Returns
        -------
        StorageError
            `max` and `rms`, of the difference between the y of this layer and that of
            ``packed(storage, activations)``; `relative_max` and `relative_rms`, as shares of the largest y and of y's
            root mean square; `nbytes` of all weights as stored, and `nbytes_float32`.

        Raises
        ------
        TypeError, ValueError
            As from `packed` and a call.
        """
        reader = ArgumentReader(f"{type(self).__name__}.storage_error")
        storage = read_storage(reader, storage, self.dtype)
        read_activations(reader, activations, storage)
        layer = copy.copy(self)  # whose weights nobody replaces meanwhile
        weights = layer.weights
        stored = stored_arrays(weights, self._stored(reader, "", weights, storage))
        expected = layer(x, state, **options)[0]
        y = layer.packed(storage, activations)(x, state, **options)[0]
        return error_of(storage, activations, expected, y, stored.values(), weights.values())

    def save(self, path: str | os.PathLike[str], storage: str | None = None) -> None:
        """Write the layer to a file, which `blockcell.load` reads; `blockcell.files` describes the formats.

        Either the whole file is written or nothing is: what was there before stays until the new file is complete.

        Parameters
        ----------
        path : path_like
            Ends in ``.npz`` or ``.safetensors``.
        storage : {"float16", "bfloat16", "int8"}, optional
            Of a float32 layer: in what its weights are stored, for a file of half the bytes or a quarter. What
            `blockcell.load` reads is then ``layer.rounded_to(storage)``, bit for bit.

        Raises
        ------
        ValueError
            The path has another ending, an attribute of the layer is NaN, or it has more than 16384 arrays; or as from
            `rounded_to`.
        OSError
            The file cannot be written.
        """
        weights = self.weights
        if storage is not None:
            reader = ArgumentReader(f"{type(self).__name__}.save")
            storage = read_storage(reader, storage, self.dtype)
            weights = stored_arrays(weights, self._stored(reader, "", weights, storage))
        files.write(path, self._description(), weights, storage)

    # ------------------------------------------------------------------------------------------------------------ calls
    def __call__(
        self,
        x: ArrayLike,
        state: GivenState = None,
        *,
        lengths: ArrayLike | None = None,
        reset: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        masked: str = ZERO,
        batch_first: bool = False,
    ) -> tuple[Array, S_co]:
        """Run the layer without keeping anything for a backward pass.

        Parameters
        ----------
        x : array_like (T, B, I)
            Input, of the layer's dtype; lists are converted. **Time comes first**, as in TensorFlow's ops and PyTorch's
            default: for x (B, T, I), as Keras has it, pass ``batch_first=True``.
        state : optional
            State before the first step, as a call returns it: `LSTMState`, `GRUState`, `RNNState`, (fw, bw), or a tuple
            of these for a stack. None means zeros, also in place of any part. A plain tuple or list goes by position,
            so for an LSTM **it is (cs, h), where Keras and PyTorch have (h, c)**. A mapping goes by the names, in any
            order, and has all of them: ``{"h": h, "cs": c}``, ``{"h": h, "cs": None}``, ``{"fw": ..., "bw": ...}``,
            ``{0: ..., 1: ...}`` for a stack, where a `Dense` may be left out. An array of one row, (1, H), is every
            row's.
        lengths : array_like (B,) of int, optional
            Number of steps of each row, 0 to T. Past its length a row keeps its state, y is zero and x is not read; a
            backward direction starts at the row's last step. Steps past a row's end take next to no time, in
            whatever order the rows come.
        reset : array_like (T, B) of bool, optional
            Where a new episode starts: rows that are True start step t from a state of zeros. A backward direction
            sets the state to zero between step t and step t - 1.
        mask : array_like (T, B) of bool, optional
            Which steps of each row count, as in Keras: True counts. The others are left out, wherever they are: the
            state passes them by and x is not read there, so a row has the bits that it has without them. With
            `lengths`, what both say counts. A reset at a step that is left out takes place at the row's next step that
            counts, one after the last of these not at all: the final state is that after the last one.
        masked : {"zero", "repeat"}
            What y is at steps that do not count, by `mask` or by `lengths`: zero, as of Keras' Bidirectional, or
            repeated, as of its LSTM and GRU: what it was at the row's last step before that counted, and zero where
            there is none. "Before" goes by the layer's direction, for each half of a `Bidirectional` by its own; for a
            `Dense`, which has none, forwards. Only the y that is returned repeats, not what the layers of a stack hand
            on.
        batch_first : bool
            Whether x, `reset`, `mask` and y have the batch in front: x (B, T, I). States stay as they are. The bits are
            the same, and no array is copied for it.

        Returns
        -------
        y : ndarray (T, B, output_size)
            The cells' h; for `Bidirectional` the forward half comes first. (B, T, output_size) with `batch_first`, and
            (B, output_size) where a `Dense` with `last` stands at the end.
        state
            State after each row's last step, in the form of `state`.

        Raises
        ------
        TypeError
            An array has another dtype than the layer, or an argument is of the wrong kind.
        ValueError
            A shape or a length does not fit, or `masked` is unknown.
        """
        if reset is None and mask is None and masked is ZERO:
            results: tuple[Array, S_co] | None = self._runner.call(
                self._shared.weights, x, state, lengths, batch_first, False
            )
            if results is not None:
                return results
        y, last = self._read_and_run(x, state, lengths, reset, mask, masked, batch_first, False)[0]
        return y, last

    def forward(
        self,
        x: ArrayLike,
        state: GivenState = None,
        *,
        lengths: ArrayLike | None = None,
        reset: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        masked: str = ZERO,
        batch_first: bool = False,
    ) -> tuple[Array, S_co, Tape]:
        """Run the layer and keep what `backward` needs. Takes the arguments of a call and returns the same bits.

        Returns
        -------
        y, state
            As from a call.
        tape : Tape
            For `backward`, any number of times. It has copies of everything, so x, y, the states and the layer's
            weights may change before that.
        """
        results = counted = None
        if reset is None and mask is None and masked is ZERO:
            results = self._runner.call(self._shared.weights, x, state, lengths, batch_first, True)
        if results is None:
            results, counted = self._read_and_run(x, state, lengths, reset, mask, masked, batch_first, True)
        y, last, T, B, end, content = results
        return y, last, Tape(self, T, B, end, content, bool(batch_first), counted)

    def backward(
        self, tape: Tape, d_y: ArrayLike | None, d_state: GivenState = None, *, batch_first: bool | None = None
    ) -> tuple[Array, S_co, dict[str, Array]]:
        """The gradients of a loss to arguments and weights, given those to the results of `forward`.

        The gradient passes through ``cell_clip`` as if there were no clip, as in TensorFlow. It is zero where
        ``proj_clip`` clips.

        Parameters
        ----------
        tape : Tape
            From this layer's `forward`.
        d_y : array_like (T, B, output_size)
            Gradient to y, of its shape. It is not read where a step does not count; with ``masked="repeat"`` it is,
            where y repeats. None means zeros.
        d_state : optional
            Gradient to the final state, in its form. None means zeros, also in place of any part.
        batch_first : bool, optional
            What `forward` had. It need not be given; anything else is an error.

        Returns
        -------
        d_x : ndarray (T, B, I)
            Gradient to x, in its form; zero where a step does not count.
        d_state
            Gradient to the initial state, in its form.
        grads : dict of str to ndarray
            Gradient to each weight, by the names in `weights`.

        Raises
        ------
        TypeError
            An array has another dtype than the layer, or an argument is of the wrong kind.
        ValueError
            A shape does not fit, or the tape is another layer's or of another `batch_first`.
        """
        reader = ArgumentReader(type(self).__name__)
        if not isinstance(tape, Tape):
            raise TypeError(f"{reader.caller}: tape is {short(tape)}; expected that of this layer's forward")
        if tape.layer is not self:
            raise ValueError(
                f"{reader.caller}: tape is that of another layer, {tape.layer!r}; expected one of {self!r}"
            )
        if batch_first is not None and reader.switch("batch_first", batch_first) != tape.batch_first:
            expected = f"expected {tape.batch_first}, which forward had for this tape"
            raise ValueError(f"{reader.caller}: batch_first is {batch_first}; {expected}")
        results: tuple[Array, S_co, dict[str, Array]] | None = self._runner.differentiate(tape, d_y, d_state)
        if results is None:
            reader = CallReader(reader.caller, tape.batch_first)
            reader.T, reader.B = tape.T, tape.B
            d_last = self._read_state(reader, "d_state", d_state, tape.B)
            results = self._runner.run_back(tape, self._read_d_y(reader, d_y, tape), d_last)
        return results

    def _read_d_y(self, reader: CallReader, d_y: Any, tape: Tape) -> Array:
        """The gradient to y at the steps that count, as the tape has them."""
        rows = (tape.end, tape.B) if self._over_time else (tape.B,)
        if d_y is None:
            return np.zeros((*rows, self.output_size), self.dtype)
        shape = *(reader.axes(tape.T, tape.B) if self._over_time else rows), self.output_size
        array = checked_array(reader, "d_y", d_y, self.dtype, shape, f"{shape}, that of y")
        if not self._over_time:
            return rows_as_kernels_take(array, self.dtype)
        array = reader.time_first(array)
        if tape.counted is None:
            return rows_as_kernels_take(array[: tape.end], self.dtype)
        return tape.counted.gather_d_y(rows_as_kernels_take(array, self.dtype), self._directions(False))

    def _read_and_run(
        self, x: Any, state: State, lengths: Any, reset: Any, mask: Any, masked: Any, batch_first: Any, training: bool
    ) -> tuple[Any, CountedSteps | None]:
        """What `Runner.run` returns of these arguments, and where the steps are that count, if they had to move."""
        weights = self._shared.weights
        reader = CallReader(type(self).__name__, batch_first)
        if not isinstance(masked, str) or masked not in (ZERO, REPEAT):
            raise ValueError(f"{reader.caller}: masked is {short(masked)}; expected 'zero' or 'repeat'")
        inputs = f"({', '.join(reader.axes('T', 'B'))}, I) with I={self.input_size} from the layer"
        x = reader.time_first(checked_array(reader, "x", x, self.dtype, (None, None, self.input_size), inputs))
        reader.T, reader.B = T, B = x.shape[:2]
        lengths = read_lengths(reader, lengths, T, B)
        reset, mask = read_switches(reader, "reset", reset), read_switches(reader, "mask", mask)
        first = self._read_state(reader, "state", state, B)

        counted = None
        if mask is not None or masked == REPEAT:
            counted, lengths = count(mask, lengths, T, masked == REPEAT)
        if counted is not None:
            x, reset = counted.gather(x), None if reset is None else counted.gather_resets(reset)
        end = T if lengths is None else int(lengths.max(initial=0))  # the steps until every row has ended
        x = rows_as_kernels_take(x[:end], self.dtype)
        reset = None if reset is None else np.ascontiguousarray(reset[:end])
        return self._runner.run(weights, x, first, lengths, reset, counted, T, reader.batch_first, training), counted

    def plan(self, T: SupportsIndex, B: SupportsIndex, num_threads: SupportsIndex | None = None) -> dict[str, Plan]:
        """How many threads a call would take, and what each of them would do.

        The plan with the least predicted cost is made: of arithmetic, of reading weights, of waking threads and of
        waiting for each other.  `groups` of threads share the batch rows and do not wait for each other; the `members`
        of a group share the hidden units and meet in every step.  A small call has one thread.

        Parameters
        ----------
        T, B : int
            Steps and batch rows of the call, at least 1.
        num_threads : int, optional
            At most so many; those of `blockcell.set_num_threads` unless given.

        Returns
        -------
        dict of str to Plan
            For each layer with weights, by the prefix of their names without its dot ("" for a layer that has no
            parts), a tuple ``(forward, backward)`` of ``(groups, members)``.

        Raises
        ------
        TypeError
            A number is not an integer.
        ValueError
            A number is less than 1.

        Examples
        --------
        >>> from blockcell import LSTM
        >>> LSTM.init(256, 256, seed=0).plan(20, 1, num_threads=1)
        {'': Plan(forward=Grid(groups=1, members=1), backward=Grid(groups=1, members=1))}
        """
        reader, sizes = ArgumentReader(f"{type(self).__name__}.plan"), []
        for name, value in (("T", T), ("B", B)):
            sizes.append(reader.integer(name, value))
            if sizes[-1] < 1:
                raise ValueError(f"{reader.caller}: {name} is {value}; expected at least 1")
        threads, plans = reader.thread_number(num_threads), {}
        for prefix, cell in self._cells().items():
            grids = []
            for name in ("layer", "layer_grad"):
                *_, count, members = cell._plan(name, 0, sizes[0], sizes[1], threads)
                grids.append(Grid(count // members, members))
            plans[prefix.rstrip(".")] = Plan(*grids)
        return plans

    @abstractmethod
    def stream(self, batch: SupportsIndex = 1, storage: str | None = None, activations: str = "float32") -> Any:
        """Run the layer step by step; the stream keeps the state in between."""

    def packed(self, storage: str | None = None, activations: str = "float32") -> Packed[S_co]:
        """The layer as it is now, for calls and streams alone, with its weights in fewer bytes.

        A call has the bits of ``layer.rounded_to(storage)``. Later changes of the layer's weights change nothing of it.

        Parameters
        ----------
        storage : {None, "float16", "bfloat16", "int8"}
            How matrices are stored: of float32 layers, in half the bytes or a quarter. None: as they are.
        activations : {"float32", "int8", "int16"}
            With ``storage="int8"``: to what rows are rounded before they are multiplied with the weights, in integers:
            x_t, h_{t-1} and, in a GRU that resets before the product, r * h_{t-1}, or before a projection
            o * tanh(cs), each row of each step with a scale of its own. "float32" rounds nothing. :doc:`/storage` has
            the definition and what it costs.

        Returns
        -------
        Packed

        Raises
        ------
        TypeError, ValueError
            `storage` or `activations` is something else, or one does not go with the other; the layer's dtype is not
            float32, or a weight is not finite or too large.
        """
        reader = ArgumentReader(f"{type(self).__name__}.packed")
        storage = None if storage is None else read_storage(reader, storage, self.dtype)
        read_activations(reader, activations, storage)
        return Packed(self, storage, activations)

    def _apart(self) -> Parts:
        """The layer for the pickle of one that is packed."""
        return Parts(type(self), {name: _apart(value) for name, value in self._arguments().items()})

    @abstractmethod
    def _hollow(self) -> Self:
        """An equal layer that has no weights yet; `_share` gives it some."""

    @abstractmethod
    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        """A state that the kernels can read. `source` is what B is from."""


# ----------------------------------------------------------------------------------------------- weights of their own
class Single(Layer[S_co]):
    """A layer that consists of no others. `Cell` and `Dense` set the attributes below."""

    _kernel: str
    """The first part of the kernels' names."""
    _tensors: tuple[Tensor, ...]
    """The weights that it has, or may have, in the order in which kernels take them."""
    _state: ClassVar[type[LSTMState] | type[GRUState] | type[RNNState] | type[NoState]]
    _runs: ClassVar[type[Runner]]
    _shown: ClassVar[tuple[str, ...]] = "input_size", "hidden_size", "dtype"
    """What the repr begins with."""
    _sizes: dict[str, int]
    _number: int
    _in_head = False
    """Whether a `Dense` with `last` reads y, perhaps through other dense layers."""

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of all weights that its kernels take, in this order."""
        return tuple(tensor.name for tensor in self._places)

    @property
    def _places(self) -> tuple[Tensor, ...]:
        """These weights; a layer may not have all of them."""
        return self._tensors

    @property
    def _form(self) -> tuple[int, ...]:
        """What beside the sizes says how large the arrays of its kernels are."""
        return ()

    def _pack_options(self) -> tuple[bool, ...]:
        """Options of the kernels that pack weights."""
        return ()

    def _forward_options(self) -> tuple[Any, ...]:
        """Options of the forward kernels."""
        return ()

    def _gradient_options(self) -> tuple[Any, ...]:
        """Options of the kernels that compute gradients."""
        return self._pack_options()

    @abstractmethod
    def _sizes_of(self, arrays: Mapping[str, Array], what: str) -> dict[str, int]:
        """The letters' values by the weights, of which the first is a matrix; `what` begins a message about that."""

    def _cells(self, prefix: str = "") -> dict[str, Single]:
        return {prefix: self}

    def _head(self) -> tuple[list[Single], bool]:
        return [self], False

    @property
    def _is_stateless(self) -> bool:
        return not self._state._fields

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
    def _state_sizes(self) -> tuple[int, ...]:
        """The last dimension of each array of the state."""
        return tuple(self.hidden_size if name == "cs" else self.output_size for name in self._state._fields)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, float64 or float16: the dtype of the weights, of all inputs and of all results."""
        return DTYPES[self._number]

    def __repr__(self) -> str:
        values = [f"{name}={getattr(self, name)}" for name in self._shown]
        return f"{type(self).__name__}({', '.join(values + self._remarks())})"

    def _remarks(self) -> list[str]:
        """The repr's last part: options that differ from their defaults."""
        return []

    # ---------------------------------------------------------------------------------------------------------- weights
    def _initialize(self, values: dict[str, Any]) -> None:
        """Set sizes, dtype and weights from the arrays that the constructor gets."""
        reader, tensors = (
            ArgumentReader(type(self).__name__),
            [tensor for tensor in self._tensors if tensor.name in values],
        )
        sizes = [*values.values()][:2]
        if all(isinstance(size, Integral) for size in sizes):  # as other packages' constructors take them
            given = [short(int(size)) for size in sizes]
            expected = f"expected an array of shape {form(tensors[0].shape)}"
            new = f"for new weights: {reader.caller}.init({', '.join(given)})"
            raise TypeError(f"{reader.caller}: {tensors[0].name} is {given[0]}; {expected}; {new}")
        arrays = {}
        for tensor in tensors:
            if values[tensor.name] is None:
                raise TypeError(
                    f"{reader.caller}: {tensor.name} is None; expected an array of shape {form(tensor.shape)}"
                )
            arrays[tensor.name] = reader.array(tensor.name, values[tensor.name])
        self._number = reader.dtype_number((name, values[name], array) for name, array in arrays.items())
        first = tensors[0]
        shape = arrays[first.name].shape
        what = f"{reader.caller}: {first.name} has shape {shape}; expected {form(first.shape)}"
        if len(shape) != 2:
            raise ValueError(f"{what}, rank 2")
        self._sizes = self._sizes_of(arrays, what)
        self._shared = SharedWeights({self: self._pack(self._read_weights(reader, "", values, {}))})
        self._runner = self._runs(self)

    def _read_weights(
        self, reader: ArgumentReader, prefix: str, values: Mapping[str, Any], known: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Copies of the values that are weights of this cell; the prefix is in front of their names. Most will be like
        the known ones."""
        arrays = {}
        for tensor in self._tensors:
            name = prefix + tensor.name
            if name in values:
                array = frozen_copy(values[name], known[name]) if name in known else None
                if array is None:
                    array = self._read_weight(reader, name, tensor.shape, values[name])
                arrays[tensor.name] = array
        return arrays

    def _read_weight(self, reader: ArgumentReader, name: str, letters: str, value: Any) -> Array:
        shape, sizes = sizes_of(letters, self._sizes), (f"{letter}={size}" for letter, size in self._sizes.items())
        expected = f"{form(letters)} = {shape} with {', '.join(sizes)}"
        array = read_array(reader, name, value, self.dtype, shape, expected, keep=True)
        array.flags.writeable = False
        return array

    def _pack(self, arrays: dict[str, Array]) -> CellWeights:
        packed = np.empty(self._packed_size(), np.uint8)  # huge pages made no difference below 4 MiB, numpy's own limit
        if self.hidden_size:
            self._run("pack", *self._ordered(arrays), packed, *self._pack_options())
        return CellWeights(arrays, packed)

    def _ordered(self, arrays: dict[str, Array], *kinds: Kind) -> list[Array]:
        """One array for each weight that the kernels take, or of these kinds, an empty one if the cell does not have
        it."""
        empty = _EMPTY[self._number]
        places = [t for t in self._places if not kinds or t.kind in kinds]
        return [arrays[t.name] if t.name in arrays else empty.reshape((0,) * t.rank) for t in places]

    def _hollow(self) -> Self:
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__)
        layer._runner = self._runs(layer)
        return layer

    # ------------------------------------------------------------------------------------------ weights in fewer bytes
    def _narrow(
        self, reader: ArgumentReader, prefix: str, weights: CellWeights, storage: str, activations: str
    ) -> CellWeights:
        """The same weights, but with matrices packed in fewer bytes; the prefix is in front of their names."""
        arrays = {prefix + name: array for name, array in weights.arrays.items()}
        stored = self._stored(reader, prefix, arrays, storage)
        number = 1 + [*WEIGHT_STORAGES].index(storage) + ROUNDINGS.index(activations)
        work = _kernels.WORK[f"{self._kernel}_narrow"]
        size, _, _ = work(1, 1, self.input_size, self.hidden_size, number, 1, *self._form)
        narrow = CellWeights(weights.arrays, np.empty(size, np.uint8), number)
        self._exchange(narrow, {name.removeprefix(prefix): each for name, each in stored.items()}, False)
        keeps = keeps_widened(number, self._packed_size())
        return self._widened(narrow, get_num_threads()) if keeps else narrow

    def _widened(self, narrow: CellWeights, threads: int) -> CellWeights:
        """The same as float32 packs them."""
        wide = CellWeights(narrow.arrays, np.empty(self._packed_size(), np.uint8), 0, narrow)
        if self.hidden_size:
            sizes = self.input_size, self.hidden_size
            arguments = *sizes, *self._form, narrow.packed, wide.packed, narrow.narrow
            _kernels.compute(f"{self._kernel}_widen", self._number, (1, 1, *sizes, 4), threads, arguments)
        return wide

    def _for_call(self, narrow: CellWeights, T: int, B: int, threads: int) -> CellWeights:
        """What a call of T steps of B rows reads of weights in fewer bytes."""
        wide = widens(narrow.narrow, self._packed_size(), T, B)
        return self._widened(narrow, threads) if wide else narrow

    def _apart(self) -> Parts:
        parts, weights = super()._apart(), self._shared.weights[self]
        narrow = weights.stored or weights
        return parts._replace(arguments=parts.arguments | self._matrices(narrow)) if narrow.narrow else parts

    def _matrices(self, weights: CellWeights) -> dict[str, Narrow]:
        """The matrices that `_narrow` has packed."""
        dtype = [*WEIGHT_STORAGES.values()][min(weights.narrow, len(WEIGHT_STORAGES)) - 1]
        shapes = {t.name: sizes_of(t.shape, self._sizes) for t in self._tensors if t.kind == "matrix"}
        stored = {
            name: Narrow(np.zeros(shape, dtype), np.zeros(shape[1], np.float32) if dtype == np.int8 else None)
            for name, shape in shapes.items()
        }
        self._exchange(weights, stored, True)
        return stored

    def _exchange(self, weights: CellWeights, stored: Mapping[str, Narrow], back: bool) -> None:
        """From the matrices to the packed weights, or back."""
        if self.hidden_size:
            none = Narrow(np.empty((0, 0), np.uint8), None)
            matrices = [stored.get(t.name, none) for t in self._places if t.kind == "matrix"]
            codes = [np.ascontiguousarray(each.codes).view(np.uint8) for each in matrices]
            scales = [_EMPTY[self._number] if each.scale is None else each.scale for each in matrices]
            vectors = self._ordered(weights.arrays, "peephole", "bias")
            options = weights.packed, weights.narrow, back, *self._pack_options()
            self._run("narrow", *codes, *scales, *vectors, *options)

    # ---------------------------------------------------------------------------------------------------------- streams
    def stream(
        self, batch: SupportsIndex = 1, storage: str | None = None, activations: str = "float32"
    ) -> Stream[S_co]:
        """Run the layer step by step; the `Stream` keeps the state in between, which is zero at first.

        Parameters
        ----------
        batch : int
            B, the number of rows that run side by side; at least 1.
        storage : {None, "float16", "bfloat16", "int8"}
            How the stream keeps matrices of weights: of a float32 layer, in half the bytes or a quarter. Its results
            are then those of ``layer.rounded_to(storage)``, bit for bit. None: as they are.
        activations : {"float32", "int8", "int16"}
            With ``storage="int8"``: as of `packed`.
        """
        reader = ArgumentReader(f"{type(self).__name__}.stream")
        storage = None if storage is None else read_storage(reader, storage, self.dtype)
        read_activations(reader, activations, storage)
        return Stream(self, reader.integer("batch", batch), storage, activations)

    def _streamed(
        self, weights: CellWeights, storage: str | None, activations: str, batch: int
    ) -> tuple[CellWeights, int]:
        """What a stream of so many rows reads of these weights; and up to how many rows step with their `stored`."""
        if storage is not None:
            reader = ArgumentReader(f"{type(self).__name__}.stream")
            weights = self._narrow(reader, "", weights, storage, activations)
        nbytes = self._packed_size()
        if keeps_widened(weights.narrow, nbytes, batch):
            return self._widened(weights, get_num_threads()), rows_that_gain(weights.narrow, nbytes)
        return weights._replace(stored=None), 0

    def _with(self, weights: CellWeights) -> Self:
        """An equal layer, but with these weights."""
        return type(self)(**(self._arguments() | weights.arrays))

    def _taken(self, name: str, value: Any, shape: tuple[int | None, ...], why: str = "") -> Array:
        """An array given to a stream, in the form that the kernels read; `why` it has this shape."""
        expected = f"({', '.join('T' if size is None else str(size) for size in shape)}){why}"
        return read_array(ArgumentReader(f"{type(self).__name__}.stream"), name, value, self.dtype, shape, expected)

    def _taken_lengths(self, value: Any, T: int, n: int) -> Array | None:
        """The steps of n rows, given to a stream."""
        return read_lengths(ArgumentReader(f"{type(self).__name__}.stream"), value, T, n)

    def _taken_state(self, value: Any, batch: int) -> list[Array]:
        """The arrays of a state given to a stream, in the form that the kernels read."""
        reader = ArgumentReader(f"{type(self).__name__}.stream")
        return [*self._read_state(reader, "state", value, batch, "the stream")]

    # ---------------------------------------------------------------------------------------------------------- kernels

    def _run(self, name: str, *arguments: Any) -> Any:
        if self._number == HALF:  # memoryviews have no float16: kernels take its bits as integers
            arguments = tuple(
                a.view(np.uint16) if isinstance(a, np.ndarray) and a.dtype == np.float16 else a for a in arguments
            )
        return _kernels.KERNELS[f"{self._kernel}_{name}"][self._number](*arguments)

    def _packed_size(self) -> int:
        """The bytes of all weights as `_pack` packs them."""
        itemsize = max(self.dtype.itemsize, 4)  # float16 is computed in float32
        sizes = self.input_size, self.hidden_size
        size, _, _ = _kernels.WORK[f"{self._kernel}_pack"](1, 1, *sizes, itemsize, 1, *self._form)
        return size

    def _plan(self, name: str, narrow: int, T: int, B: int, threads: int) -> tuple[object, bytes, int, int, int]:
        """What runs T steps, or differentiates them; its plan; the bytes of scratch that the plan needs, how many of
        the threads it uses, and how many of these share the hidden units of a row."""
        options = (narrow, *self._forward_options()) if name == "layer" else self._gradient_options()
        sizes = T, B, self.input_size, self.hidden_size
        return self._run(f"{name}_plan", _EMPTY[self._number], *sizes, threads, *options)  # type: ignore[no-any-return]

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        fields, arrays = self._state._fields, []
        described = f"{self._state.__name__}({', '.join(fields)})" if fields else "()"
        parts = read_parts(reader, name, state, fields, described)
        for size, (part, value) in zip(self._state_sizes, parts.items(), strict=True):
            if value is None:
                arrays.append(np.zeros((B, size), self.dtype))
                continue
            if not name.startswith("d_"):  # as a gradient has every row's own
                value = in_rows(value, B)
            letter = "H" if size == self.hidden_size else "P"
            expected = f"(B, {letter}) = {(B, size)} with B from {source}, {letter} from the layer"
            arrays.append(read_array(reader, part, value, self.dtype, (B, size), expected))
        return self._state(*arrays)


def _apart(value: Any) -> Any:
    """An argument of a layer, likewise."""
    if isinstance(value, Layer):
        return value._apart()
    return tuple(map(_apart, value)) if type(value) is tuple else value  # those of a Stack's layers


_EMPTY = [np.empty(0, dtype) for dtype in DTYPES]
