"""What layers and quantized layers have in common, `BaseLayer`: calls, streams and files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, Generic, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .. import files
from .._layers import Runner
from ..argument_reader import ArgumentReader, rows_as_kernels_take
from ..errors import short
from ..optable import Array
from ..quantization import Scheme
from .arguments import CallReader, checked_array, read_bools, read_lengths
from .masks import CountedSteps, count_steps
from .shared import REPEAT, ZERO, Directions, GivenState, S_co, SharedWeights, State


class BaseLayer(ABC, Generic[S_co]):
    """What `Layer` and `Quantized` have in common: calls, streams and files."""

    _shared: SharedWeights
    _runner: Runner

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would change nothing: options, and public attributes but those of a user's subclass."""
        is_ours = not name.startswith("_") and type(self).__module__.partition(".")[0] == "blockcell"
        is_option = any(name == option.name for option in getattr(self, "_options", ()))
        if is_option or (is_ours and not callable(getattr(type(self), name, None))):
            expected = "expected set_weights for weights, and arguments of the constructor for options"
            raise AttributeError(f"{type(self).__name__}: {name} cannot be set; {expected}")
        super().__setattr__(name, value)

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

    @property
    def _over_time(self) -> bool:
        """Whether y has a row for each step, or for the last one only."""
        return True

    @abstractmethod
    def _directions(self, reverse: bool) -> Directions:
        """Return how many columns of y are of each direction, part after part; `reverse` turns all of them."""

    @abstractmethod
    def _snapshot(self) -> BaseLayer[S_co]:
        """Return an equal layer with the weights that this one has now, whatever becomes of this one's."""

    @abstractmethod
    def stream(self, batch: SupportsIndex = 1) -> Any:
        """Run the layer step by step; the `Stream` keeps the state in between, which is zero at first.

        Parameters
        ----------
        batch : int
            B, the number of rows that run side by side; at least 1.

        Returns
        -------
        Stream or StackStream
            The streams of a quantized layer share its weights.

        Raises
        ------
        TypeError
            The layer begins at the last step, which a stream does not know: it is a `Bidirectional`, has
            ``reverse=True``, or stands above a layer with such a direction.
        """

    # ------------------------------------------------------------------------------------------------------------ calls
    def __call__(
        self,
        x: ArrayLike,
        state: GivenState = None,
        *,
        lengths: ArrayLike | None = None,
        reset: ArrayLike | None = None,
        reset_state: GivenState = None,
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
            ``{0: ..., 1: ...}`` for a stack, where a `Dense` may be missing. An array of one row, (1, H), is every
            row's.
        lengths : array_like (B,) of int, optional
            Number of steps of each row, 0 to T. Past its length a row keeps its state, y is zero and x is not read; a
            backward direction starts at the row's last step. Steps past a row's end take next to no time, in
            whatever order the rows come.
        reset : array_like (T, B) of bool, optional
            Where a new episode starts: rows that are True start step t from a state of zeros, or from `reset_state`. A
            backward direction sets the state to zero between step t and step t - 1.
        reset_state : optional
            The states from which episodes start, such as those that were stored when they were played: like `state`,
            but with arrays (T, B, H), which are read only where `reset` is True; None stands for zeros, also in place
            of any part. An axis of T or B may have length 1. Nothing is copied for a call, so a view by
            ``np.broadcast_to`` takes no memory. A `Bidirectional`, a layer with ``reverse=True`` and `mask` exclude
            it.
        mask : array_like (T, B) of bool, optional
            Which steps of each row count, as in Keras: True counts. The others are skipped, wherever they are: the
            state passes them by and x is not read there, so a row has the bits that it has without them. With
            `lengths`, what both say counts. A reset at a skipped step takes place at the row's next step that
            counts, one after the last of these not at all: the final state is that after the last one.
        masked : {"zero", "repeat"}
            What y is at steps that do not count, by `mask` or by `lengths`: zero, as of Keras' Bidirectional, or
            repeated, as of its LSTM and GRU: what it was at the row's last step before that counted, and zero where
            there is none. "Before" goes by the layer's direction, for each half of a `Bidirectional` by its own; for a
            `Dense`, which has none, forwards. Only the y that is returned repeats, not what the layers of a stack hand
            on.
        batch_first : bool
            Whether x, `reset`, `reset_state`, `mask` and y have the batch in front: x (B, T, I). Other states stay as
            they are. The bits are the same, and no array is copied for it.

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
            A shape or a length does not fit, `masked` is unknown, or `reset_state` is given without `reset`, or where
            it is excluded.
        """
        if reset is None and reset_state is None and mask is None and masked is ZERO:
            results: tuple[Array, S_co] | None = self._runner.try_forward(
                self._shared.weights, x, state, lengths, batch_first, False
            )
            if results is not None:
                return results
        results = self._convert_and_forward(x, state, lengths, reset, reset_state, mask, masked, batch_first, False)[0]
        y, last_state = results
        return y, last_state

    def _convert_and_forward(
        self,
        x: Any,
        state: State,
        lengths: Any,
        reset: Any,
        reset_state: State,
        mask: Any,
        masked: Any,
        batch_first: Any,
        training: bool,
    ) -> tuple[Any, CountedSteps | None]:
        """Convert a user's arguments, or raise, and run the layer on them.

        Return what `Runner.forward_layer` does, and the steps that count, if a mask has moved them.
        """
        weights = self._shared.weights
        reader = CallReader(type(self).__name__, batch_first)
        if not isinstance(masked, str) or masked not in (ZERO, REPEAT):
            raise ValueError(f"{reader.caller}: masked is {short(masked)}; expected 'zero' or 'repeat'")
        inputs = f"({', '.join(reader.axes('T', 'B'))}, I) with I={self.input_size} from the layer"
        x = reader.time_first(checked_array(reader, "x", x, self.dtype, (None, None, self.input_size), inputs))
        reader.T, reader.B = T, B = x.shape[:2]
        lengths = read_lengths(reader, lengths, T, B)
        reset, mask = read_bools(reader, "reset", reset), read_bools(reader, "mask", mask)
        initial_state = self._read_state(reader, "state", state, B)
        if reset_state is not None:
            if reset is None or mask is not None:
                expected = "reset, too" if reset is None else "no mask with it"
                raise ValueError(f"{reader.caller}: reset_state is given; expected {expected}")
            reset_state = self._read_reset_state(reader, "reset_state", reset_state)

        counted = None
        if mask is not None or masked == REPEAT:
            counted, lengths = count_steps(mask, lengths, T, masked == REPEAT)
        if counted is not None:
            x, reset = counted.gather(x), None if reset is None else counted.gather_resets(reset)
        x = rows_as_kernels_take(x, self.dtype)
        reset = None if reset is None else np.ascontiguousarray(reset)
        batch_first = reader.batch_first
        results = self._runner.forward_layer(
            weights, x, initial_state, lengths, reset, reset_state, counted, batch_first, training
        )
        return results, counted

    def _compute(
        self,
        x: Array,
        state: State,
        lengths: Array | None,
        reset: Array | None,
        threads: int,
        reset_state: State = None,
    ) -> tuple[Array, S_co]:
        """Return what a call returns, of arrays as kernels read them, on at most so many threads."""
        results: tuple[Array, S_co] = self._runner.forward_layer(
            self._shared.weights, x, state, lengths, reset, reset_state, None, False, False, threads
        )
        return results

    @abstractmethod
    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        """Return a user's state of B rows as kernels read it; `source` is the argument that B is from."""

    @abstractmethod
    def _read_reset_state(self, reader: CallReader, name: str, state: State) -> State:
        """Return what a user's states are at resets, as kernels read them; None for zeros, also in place of arrays."""

    # ------------------------------------------------------------------------------------------------------------ files
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layer to a file; `blockcell.files` describes the formats.

        `blockcell.load` reads the file of a `Layer`, `Quantized.load` that of a quantized one. Either the whole file is
        written or nothing is: what was there before stays until the new file is complete.

        Parameters
        ----------
        path : path_like
            Ends in ``.npz`` or ``.safetensors``.

        Raises
        ------
        ValueError
            The path has another ending, an attribute of the layer is NaN, or it has more than 16384 arrays.
        OSError
            The file cannot be written.
        """
        files.write(path, self._description(), self._arrays_of_file(), self._quantization)

    @abstractmethod
    def _description(self) -> dict[str, Any]:
        """Return the layer without its weights, as `blockcell.files` has it."""

    @abstractmethod
    def _leaves(self, prefix: str = "") -> dict[str, Any]:
        """Return the leaves of this layer, by the prefix of their weights' names: "", "fw." or "0.bw."."""

    def _arrays_of_file(self) -> dict[str, Array]:
        """Return the arrays that a file has, by name: the weights, and in place of a quantized one codes and scale."""
        weights = self._shared.weights
        return {
            prefix + name: array
            for prefix, leaf in self._leaves().items()
            for name, array in leaf._stored_arrays(weights[leaf]).items()
        }

    _quantization: Scheme | None = None
