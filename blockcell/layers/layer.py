"""What all layers have in common: weights, quantization, calls, the backward pass and plans."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .._layers import Runner
from ..argument_reader import ArgumentReader, rows_as_kernels_take
from ..errors import short
from ..optable import Array
from ..quantization import FLOAT32, QuantizationReport, Scheme, read_schemes, report_of
from .arguments import CallReader, checked_array
from .calls import BaseLayer
from .quantized import Quantized
from .shared import ZERO, CellWeights, GivenState, Grid, Parts, Plan, S_co, SharedWeights
from .tape import Tape

if TYPE_CHECKING:
    from .single import Single


class Layer(BaseLayer[S_co]):
    """What `LSTM`, `GRU`, `RNN`, `Dense`, `Bidirectional` and `Stack` have in common."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Return the arguments with which the constructor makes an equal layer."""

    @abstractmethod
    def _cells(self, prefix: str = "") -> dict[str, Single]:
        """Return the layers with weights of which this one consists, by the prefix of these weights' names."""

    @property
    @abstractmethod
    def _is_stateless(self) -> bool:
        """Whether the layer has no state, like a `Dense`."""

    @abstractmethod
    def _head(self) -> tuple[list[Single], bool]:
        """Return cells and dense layers whose output reaches y through dense layers at most, and whether x does."""

    def _share(self, shared: SharedWeights) -> None:
        """Use the weights of the layer of which this one has become a part."""
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

    def _arrays_of_file(self) -> dict[str, Array]:
        return self.weights

    # ----------------------------------------------------------------------------------------------------- quantization
    def quantize(self, scheme: Scheme) -> Quantized[S_co]:
        """Quantize the layer as it is now: dynamic quantization, for calls and streams alone.

        Only matrices of weights are quantized. Biases, peepholes, states, inputs and results stay float32. Later
        changes of the layer's weights change nothing of what is returned.

        Parameters
        ----------
        scheme : {"int8", "float16"} or mapping of str to str
            - "int8": weights in 8 bits, with a scale for each column; and at every step each row of activations in 8
              bits, with a scale of its own. Products are sums of integers. :doc:`/quantization` has the definition.
            - "float16": weights in half the bytes. All arithmetic is that of float32: results have the bits of
              ``quantize("float16").dequantize()``.
            - A mapping, such as ``{"0": "int8", "1": "float32"}``, by prefixes of the weights' names; the longest one
              that fits counts. What has none stays float32.

        Returns
        -------
        Quantized

        Raises
        ------
        TypeError, ValueError
            A scheme or a prefix is something else, the layer's dtype is not float32, or a weight is not finite or too
            large for float16.
        """
        return Quantized(self, scheme)

    def quantization_report(
        self, scheme: Scheme, x: ArrayLike, state: GivenState = None, *, by_layer: bool = False, **options: Any
    ) -> QuantizationReport:
        """Measure what quantization costs on these data: how far y is off, and how many bytes are left.

        Parameters
        ----------
        scheme
            As of `quantize`.
        x, state, **options
            As of a call.
        by_layer : bool
            Whether to measure, too, what each layer costs alone, where the others stay float32.

        Returns
        -------
        QuantizationReport
            `max` and `rms`, of the difference between the y of this layer and that of ``quantize(scheme)``;
            `relative_max` and `relative_rms`, as shares of the largest y and of y's root mean square; `nbytes` of all
            weights in a file, and `nbytes_float32`; with `by_layer`, `layers`, a report for each layer by the prefix of
            its weights.

        Raises
        ------
        TypeError, ValueError
            As from `quantize` and a call.
        """
        by_layer = ArgumentReader(f"{type(self).__name__}.quantization_report").switch("by_layer", by_layer)
        layer = self._snapshot()  # whose weights nobody replaces meanwhile
        y, weights = layer(x, state, **options)[0], layer.weights

        def report(scheme: Scheme) -> QuantizationReport:
            quantized = layer.quantize(scheme)
            quantized_y = quantized(x, state, **options)[0]
            return report_of(scheme, y, quantized_y, quantized._arrays_of_file().values(), weights.values())

        found = report(scheme)
        if by_layer:
            schemes = read_schemes("", scheme, layer._cells(), self.dtype)
            names = {prefix.rstrip("."): each for prefix, each in schemes.items() if each != FLOAT32}
            found = found._replace(layers={name: report({name: each}) for name, each in names.items()})
        return found

    # ------------------------------------------------------------------------------------------------------------ calls
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
        """Return the gradient to y at the steps that count, as the tape has them."""
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
            for task in ("forward", "backward"):
                *_, count, members = cell._plan(task, 0, sizes[0], sizes[1], threads)
                grids.append(Grid(count // members, members))
            plans[prefix.rstrip(".")] = Plan(*grids)
        return plans

    def _snapshot(self, change: Callable[[str, Single, CellWeights], CellWeights] = lambda _, __, same: same) -> Self:
        """Return an equal layer with the weights of now, or what the function makes of those of a cell with this
        prefix; `set_weights` of this layer does not reach it."""
        layer, weights = self._without_weights(), self._shared.weights
        cells = zip(self._cells().items(), layer._cells().values(), strict=True)
        layer._share(SharedWeights({own: change(prefix, cell, weights[cell]) for (prefix, cell), own in cells}))
        return layer

    def _pickled(self) -> Parts:
        """Return the layer for the pickle of a quantized one."""
        return Parts(type(self), {name: _pickled(value) for name, value in self._arguments().items()})

    @abstractmethod
    def _new_runner(self) -> Runner:
        """Return a runner of the layer, or of its parts' runners."""

    @abstractmethod
    def _without_weights(self) -> Self:
        """Return an equal layer that has no weights yet; `_share` gives it some."""


def _pickled(value: Any) -> Any:
    """Return an argument of a layer as a pickle has it."""
    if isinstance(value, Layer):
        return value._pickled()
    return tuple(map(_pickled, value)) if type(value) is tuple else value  # those of a Stack's layers
