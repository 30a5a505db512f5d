"""The base classes `Layer`, of all layers, and `Leaf`, of layers with weights of their own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike

from .. import _kernels
from .._args import frozen_copy
from .._kernels import PlannedKernel
from .._layers import Runner, run_packing_kernel
from .._stream import Stream
from ..argument_reader import ArgumentReader, form, rows_as_kernels_take
from ..errors import short
from ..optable import DTYPES, SCHEMES, Array, LayerOption, Tensor, sizes_of
from ..quantization import (
    FLOAT32,
    KERNEL_FORMATS,
    QuantizationReport,
    QuantizedMatrix,
    Scheme,
    dequantize_matrix,
    quantize_matrix,
    read_schemes,
    report_of,
)
from .arguments import CallReader, checked_array, read_array, read_lengths, read_parts, repeat_row
from .calls import BaseLayer
from .masks import has_gaps
from .quantized import Quantized
from .shared import (
    ZERO,
    GivenState,
    Grid,
    GRUState,
    LeafWeights,
    LSTMState,
    NoState,
    Plan,
    RNNState,
    S_co,
    SharedWeights,
    State,
    Weights,
)
from .tape import Tape


class Layer(BaseLayer[S_co]):
    """What `LSTM`, `GRU`, `RNN`, `Dense`, `Bidirectional` and `Stack` have in common."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Return the arguments with which the constructor makes an equal layer."""

    @abstractmethod
    def _leaves(self, prefix: str = "") -> dict[str, Leaf]: ...

    @property
    @abstractmethod
    def _is_stateless(self) -> bool:
        """Whether the layer has no state, like a `Dense`."""

    @abstractmethod
    def _new_reset_state(self, T: int, B: int) -> State:
        """Return arrays of zeros (T, B, .) of the form of `reset_state`; None where the layer takes none."""

    @abstractmethod
    def _head_leaves(self) -> tuple[list[Leaf], bool]:
        """Return the leaves whose output reaches y through dense layers at most, and whether x does."""

    def _share(self, shared: SharedWeights) -> None:
        """Use the weights of the layer of which this one has become a part."""
        self._shared = shared

    def __copy__(self) -> Self:
        return type(self)(**self._snapshot()._arguments())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        return self._snapshot()._arguments()

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    # ---------------------------------------------------------------------------------------------------------- weights
    @property
    def weights(self) -> dict[str, Array]:
        """The weights by name, a read-only dict of read-only arrays: ``w``; ``fw.w``; ``0.bw.w``."""
        current = self._shared.weights
        return Weights(
            {
                prefix + name: array
                for prefix, leaf in self._leaves().items()
                for name, array in current[leaf].arrays.items()
            }
        )

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
        updates = {leaf: leaf._read_weights(reader, prefix, arrays, known) for prefix, leaf in self._leaves().items()}
        while True:  # until no other thread has replaced any meanwhile
            old = self._shared.weights
            new = {leaf: leaf._pack(old[leaf].arrays | update) for leaf, update in updates.items() if update}
            if self._shared.replace(old, old | new):
                return

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

        whole_report = report(scheme)
        if by_layer:
            schemes = read_schemes("", scheme, layer._leaves(), self.dtype)
            names = {prefix.rstrip("."): scheme for prefix, scheme in schemes.items() if scheme != FLOAT32}
            reports = {name: report({name: scheme}) for name, scheme in names.items()}
            whole_report = whole_report._replace(layers=reports)
        return whole_report

    # ------------------------------------------------------------------------------------------------------------ calls
    def forward(
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
        if reset is None and reset_state is None and mask is None and masked is ZERO:
            results = self._runner.try_forward(self._shared.weights, x, state, lengths, batch_first, True)
        if results is None:
            results, counted = self._convert_and_forward(
                x, state, lengths, reset, reset_state, mask, masked, batch_first, True
            )
        y, last_state, T, B, step_count, row_lengths, content = results
        return y, last_state, Tape(self, T, B, step_count, row_lengths, content, bool(batch_first), counted)

    @overload
    def backward(
        self, tape: Tape, d_y: ArrayLike | None, d_state: GivenState = None, *, batch_first: bool | None = None
    ) -> tuple[Array, S_co, dict[str, Array]]: ...
    @overload
    def backward(
        self,
        tape: Tape,
        d_y: ArrayLike | None,
        d_state: GivenState = None,
        *,
        batch_first: bool | None = None,
        return_d_reset_state: Literal[True],
    ) -> tuple[Array, S_co, dict[str, Array], S_co]: ...
    def backward(
        self,
        tape: Tape,
        d_y: ArrayLike | None,
        d_state: GivenState = None,
        *,
        batch_first: bool | None = None,
        return_d_reset_state: bool = False,
    ) -> Any:
        """Compute the gradients of a loss to arguments and weights, from the gradients to the results of `forward`.

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
        return_d_reset_state : bool
            Whether to return `d_reset_state`, too.

        Returns
        -------
        d_x : ndarray (T, B, I)
            Gradient to x, in its form; zero where a step does not count.
        d_state
            Gradient to the initial state, in its form.
        grads : dict of str to ndarray
            Gradient to each weight, by the names in `weights`.
        d_reset_state
            Gradient to `reset_state`, or to the zeros that it stands for, in its form; zero where there is no reset,
            and None of a `Bidirectional` and a layer with ``reverse=True``.

        Raises
        ------
        TypeError
            An array has another dtype than the layer, or an argument is of the wrong kind.
        ValueError
            A shape does not fit, or the tape is another layer's, of another `batch_first`, or for
            `return_d_reset_state` of a mask that skips other steps than the last ones of rows.
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
        d_reset_state = d_reset_rows = None
        is_asked = return_d_reset_state is not False and reader.switch("return_d_reset_state", return_d_reset_state)
        if is_asked:
            if tape.counted is not None and has_gaps(tape.counted.mask):
                expected = "expected a tape without a mask, or of one that skips steps at the ends of rows alone"
                raise ValueError(f"{reader.caller}: return_d_reset_state is True; {expected}")
            d_reset_state = self._new_reset_state(*((tape.B, tape.T) if tape.batch_first else (tape.T, tape.B)))
            d_reset_rows = _time_first(d_reset_state) if tape.batch_first else d_reset_state
        results = self._runner.try_backward(tape, d_y, d_state, d_reset_rows)
        if results is None:
            reader = CallReader(reader.caller, tape.batch_first)
            reader.T, reader.B = tape.T, tape.B
            d_last = self._read_state(reader, "d_state", d_state, tape.B)
            results = self._runner.backward_layer(tape, self._read_d_y(reader, d_y, tape), d_last, d_reset_rows)
        return (*results, d_reset_state) if is_asked else results

    def _read_d_y(self, reader: CallReader, d_y: Any, tape: Tape) -> Array:
        """Return the gradient to y at the steps that count, as the tape has them."""
        rows = (tape.step_count, tape.B) if self._over_time else (tape.B,)
        if d_y is None:
            return np.zeros((*rows, self.output_size), self.dtype)
        shape = *(reader.axes(tape.T, tape.B) if self._over_time else rows), self.output_size
        array = checked_array(reader, "d_y", d_y, self.dtype, shape, f"{shape}, that of y")
        if not self._over_time:
            return rows_as_kernels_take(array, self.dtype)
        array = reader.time_first(array)
        if tape.counted is None:
            return rows_as_kernels_take(array[: tape.step_count], self.dtype)
        return tape.counted.gather_d_y(rows_as_kernels_take(array, self.dtype), self._directions(False))

    def plan(self, T: SupportsIndex, B: SupportsIndex, num_threads: SupportsIndex | None = None) -> dict[str, Plan]:
        """Say how many threads a call would take, and what each of them would do.

        The plan with the least predicted cost is made: of arithmetic, of reading weights, of waking threads and of
        waiting for each other.  `groups` of threads share the batch rows and do not wait for each other; the `members`
        of a group share the hidden units and wait at a barrier in every step.  A small call has one thread.

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
        reader = ArgumentReader(f"{type(self).__name__}.plan")
        T, B = reader.at_least(1, "T", T), reader.at_least(1, "B", B)
        threads, plans = reader.thread_number(num_threads), {}
        for prefix, leaf in self._leaves().items():
            kernels = [leaf._plan_kernel(task, 0, T, B, threads) for task in ("forward", "backward")]
            grids = [Grid(kernel.threads // kernel.members, kernel.members) for kernel in kernels]
            plans[prefix.rstrip(".")] = Plan(*grids)
        return plans

    def _snapshot(self, change: Callable[[str, Leaf, LeafWeights], LeafWeights] = lambda _, __, same: same) -> Self:
        """Return an equal layer with the weights of now, or what the function makes of those of a leaf with this
        prefix; `set_weights` of this layer does not reach it."""
        layer, weights = self._without_weights(), self._shared.weights
        leaves = zip(self._leaves().items(), layer._leaves().values(), strict=True)
        layer._share(SharedWeights({own: change(prefix, leaf, weights[leaf]) for (prefix, leaf), own in leaves}))
        return layer

    @abstractmethod
    def _new_runner(self) -> Runner:
        """Return a runner of the layer, or of its parts' runners."""

    @abstractmethod
    def _without_weights(self) -> Self:
        """Return an equal layer that has no weights yet; `_share` gives it some."""


# ----------------------------------------------------------------------------------------------- weights of their own
class Leaf(Layer[S_co]):
    """A layer with weights of its own, not of other layers. `Cell` and `Dense` set the attributes below."""

    _kernel: str
    """The kind of its kernels: as `_kernels.plan_layer` takes it."""
    _tensors: tuple[Tensor, ...]
    """The weights that the constructor takes, in the order of the kernels."""
    _state: ClassVar[type[LSTMState] | type[GRUState] | type[RNNState] | type[NoState]]
    _options: ClassVar[tuple[LayerOption, ...]]
    _repr_attributes: ClassVar[tuple[str, ...]] = "input_size", "hidden_size", "dtype"
    """The attributes with which the repr begins."""
    _sizes: dict[str, int]
    _dtype_number: int
    _in_head = False
    """Whether a `Dense` with `last` reads y, perhaps through other dense layers."""

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of all weights that the kernels take, in their order; this layer may not have all of them."""
        return tuple(tensor.name for tensor in self._tensors)

    @abstractmethod
    def _kernel_options(self) -> tuple[Any, ...]:
        """Return the options of the function that plans the kernels (`lstm_layer` in ``pyx/_ops.pyx``)."""

    @abstractmethod
    def _sizes_of(self, arrays: Mapping[str, Array], message: str) -> dict[str, int]:
        """Return the sizes by their letters, from the shapes of weights; errors begin with the message."""

    def _leaves(self, prefix: str = "") -> dict[str, Leaf]:
        return {prefix: self}

    def _head_leaves(self) -> tuple[list[Leaf], bool]:
        return [self], False

    @property
    def _is_stateless(self) -> bool:
        return not self._state._fields

    @property
    def input_size(self) -> int:
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
        return DTYPES[self._dtype_number]

    def __repr__(self) -> str:
        attributes = [f"{name}={getattr(self, name)}" for name in self._repr_attributes]
        defaults = {option.name: option.default for option in self._options}
        options = [f"{name}={value!r}" for name, value in self._option_values().items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(attributes + self._repr_weights() + options)})"

    def _repr_weights(self) -> list[str]:
        """Return the part of the repr about weights that the layer may have or not, as arguments of `init`."""
        return []

    def _set_options(self, **values: Any) -> None:
        """Set options, the attributes that `__setattr__` refuses to set."""
        vars(self).update(values)

    def _option_values(self) -> dict[str, Any]:
        """Return the options by name."""
        return {option.name: getattr(self, option.name) for option in self._options}

    def _arguments(self) -> dict[str, Any]:
        return self._shared.weights[self].arrays | self._option_values()

    def _description(self) -> dict[str, Any]:
        description: dict[str, Any] = {"type": type(self).__name__}
        names = {"always", *(tensor.name for tensor in self._tensors)}
        for option in self._options:
            value = getattr(self, option.name)
            if option.stored in names or (not option.stored and value != option.default):
                description[option.name] = list(value) if isinstance(value, tuple) else value  # as JSON has it
        return description

    # ---------------------------------------------------------------------------------------------------------- weights
    def _initialize(self, values: dict[str, Any]) -> None:
        """Set sizes, dtype and weights from the arrays that the constructor gets."""
        reader = ArgumentReader(type(self).__name__)
        tensors = [tensor for tensor in self._tensors if tensor.name in values]
        arrays = {}
        for tensor in tensors:
            if values[tensor.name] is None:
                raise TypeError(
                    f"{reader.caller}: {tensor.name} is None; expected an array of shape {form(tensor.shape)}"
                )
            arrays[tensor.name] = reader.array(tensor.name, values[tensor.name])
        self._dtype_number = reader.dtype_number((name, values[name], array) for name, array in arrays.items())
        first_tensor = tensors[0]
        shape = arrays[first_tensor.name].shape
        message = f"{reader.caller}: {first_tensor.name} has shape {shape}; expected {form(first_tensor.shape)}"
        if len(shape) != 2:
            raise ValueError(f"{message}, rank 2; {reader.caller}.init makes new weights of given sizes")
        self._sizes = self._sizes_of(arrays, message)
        self._shared = SharedWeights({self: self._pack(self._read_weights(reader, "", values, {}))})
        self._runner = self._new_runner()

    def _read_weights(
        self, reader: ArgumentReader, prefix: str, values: Mapping[str, Any], known: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return copies of those values that are weights of this layer, whose names begin with the prefix.

        Most are like the `known` weights, and are then copied without a look at each rule.
        """
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
        array = read_array(reader, name, value, self.dtype, shape, expected, copies=True)
        array.flags.writeable = False
        return array

    def _pack(
        self, arrays: dict[str, Array], matrices: Mapping[str, QuantizedMatrix] | None = None, format: int = 0
    ) -> LeafWeights:
        """Return the arrays with all weights packed: these, and the quantized matrices of this format."""
        kernel, names = self._plan_kernel("pack", format, 1, 1, 1), self._weight_names
        packed = np.empty(kernel.size, np.uint8)  # huge pages made no difference below 4 MiB, numpy's own limit
        if self.hidden_size:
            run_packing_kernel(kernel, packed, [*map(arrays.get, names)], [*map((matrices or {}).get, names)])
        return LeafWeights(arrays, packed, format)

    def _without_weights(self) -> Self:
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__)
        layer._runner = layer._new_runner()
        return layer

    # ----------------------------------------------------------------------------------------------------- quantization
    def _quantize(self, reader: ArgumentReader, prefix: str, weights: LeafWeights, scheme: str) -> LeafWeights:
        """Return the weights with quantized matrices; errors have the prefix in front of their names."""
        vectors, matrices = dict(weights.arrays), {}
        for tensor in self._tensors:
            if tensor.kind == "matrix":
                name = tensor.name
                matrices[name] = quantize_matrix(vectors.pop(name), scheme, f"{reader.caller}: {prefix}{name}")
        return self._pack(vectors, matrices, KERNEL_FORMATS[scheme])

    def _dequantize(self, weights: LeafWeights) -> LeafWeights:
        """Return float32 weights in place of quantized ones."""
        arrays = dict(weights.arrays)
        for name, matrix in self._matrices(weights).items():
            arrays[name] = dequantize_matrix(matrix)
            arrays[name].flags.writeable = False
        names = [tensor.name for tensor in self._tensors if tensor.name in arrays]
        return self._pack({name: arrays[name] for name in names})

    def _stored_arrays(self, weights: LeafWeights) -> dict[str, Array]:
        """Return what a file has of these weights, in the order of the kernels."""
        arrays, matrices = dict[str, Array](), self._matrices(weights)
        for name in [tensor.name for tensor in self._tensors]:
            if name in matrices:
                codes, scale = matrices[name]
                arrays |= {name: codes} if scale is None else {name: codes, f"{name}.scale": scale}
            elif name in weights.arrays:
                arrays[name] = weights.arrays[name]
        return arrays

    def _matrices(self, weights: LeafWeights) -> dict[str, QuantizedMatrix]:
        """Return the matrices that `_quantize` has packed; none where they are float32."""
        if not weights.format:
            return {}
        scheme = next(name for name, number in KERNEL_FORMATS.items() if number == weights.format)
        shapes = {t.name: sizes_of(t.shape, self._sizes) for t in self._tensors if t.kind == "matrix"}
        matrices = {
            name: QuantizedMatrix(
                np.zeros(shape, SCHEMES[scheme]), np.zeros(shape[1], np.float32) if scheme == "int8" else None
            )
            for name, shape in shapes.items()
        }
        if self.hidden_size:
            kernel = self._plan_kernel("unpack", weights.format, 1, 1, 1)
            run_packing_kernel(kernel, weights.packed, [], [*map(matrices.get, self._weight_names)])
        return matrices

    # ---------------------------------------------------------------------------------------------------------- streams
    def stream(self, batch: SupportsIndex = 1) -> Stream[S_co]:
        return Stream(self, ArgumentReader(f"{type(self).__name__}.stream").integer("batch", batch))

    def _with_weights(self, weights: LeafWeights) -> Self:
        """Return an equal layer with these weights."""
        return type(self)(**(self._arguments() | weights.arrays))

    def _read_stream_array(self, name: str, value: Any, shape: tuple[int | None, ...], why: str = "") -> Array:
        """Return a user's array for a stream as kernels read it; an error about its shape ends with `why`."""
        expected = f"({', '.join('T' if size is None else str(size) for size in shape)}){why}"
        return read_array(ArgumentReader(f"{type(self).__name__}.stream"), name, value, self.dtype, shape, expected)

    def _read_stream_lengths(self, value: Any, T: int, n: int) -> Array | None:
        """Return a user's lengths of n rows for a stream."""
        return read_lengths(ArgumentReader(f"{type(self).__name__}.stream"), value, T, n)

    def _read_stream_state(self, value: Any, batch: int) -> list[Array]:
        """Return the arrays of a user's state for a stream, as kernels read them."""
        reader = ArgumentReader(f"{type(self).__name__}.stream")
        return [*self._read_state(reader, "state", value, batch, "the stream")]

    # ---------------------------------------------------------------------------------------------------------- kernels
    def _plan_kernel(self, task: str, format: int, T: int, B: int, threads: int) -> PlannedKernel:
        """Plan one of the layer's kernels.

        Parameters
        ----------
        task : {"pack", "unpack", "forward", "backward"}
        format : int
            How the matrices of weights are quantized.
        T, B, threads : int
            Steps, batch rows, and the most threads.
        """
        sizes, options = (T, B, self.input_size, self.hidden_size), self._kernel_options()
        arguments = task, sizes, threads, self._dtype_number, format, False, options
        return PlannedKernel(*_kernels.plan_layer(self._kernel, *arguments))

    def _parts_of(self, reader: ArgumentReader, name: str, state: State) -> Iterator[tuple[str, Any, int, str]]:
        """Iterate over the parts of a user's state: name in messages, value, last dimension, and the letter of this."""
        fields = self._state._fields
        described = f"{self._state.__name__}({', '.join(fields)})" if fields else "()"
        parts = read_parts(reader, name, state, fields, described)
        for size, (part, value) in zip(self._state_sizes, parts.items(), strict=True):
            yield part, value, size, "H" if size == self.hidden_size else "P"

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        """Return a state of B rows as kernels read it, zeros in place of None; `source` is where B is from."""
        arrays = []
        for part, value, size, letter in self._parts_of(reader, name, state):
            if value is None:
                arrays.append(np.zeros((B, size), self.dtype))
                continue
            if not name.startswith("d_"):  # as a gradient has every row's own
                value = repeat_row(value, B)
            expected = f"(B, {letter}) = {(B, size)} with B from {source}, {letter} from the layer"
            arrays.append(read_array(reader, part, value, self.dtype, (B, size), expected))
        return self._state(*arrays)

    def _read_reset_state(self, reader: CallReader, name: str, state: State) -> State:
        arrays = list[Any]()
        for part, value, size, letter in self._parts_of(reader, name, state):
            if value is None:
                arrays.append(None)
                continue
            if self._directions(False)[0][1]:
                raise ValueError(f"{reader.caller}: {part} is of a layer with reverse=True; expected None")
            shape, axes = (*reader.axes(reader.T, reader.B), size), ", ".join(reader.axes("T", "B"))
            expected = f"({axes}, {letter}) = {shape} with T and B from x, {letter} from the layer"
            array = reader.array(part, value)
            if array.ndim == 3:
                whole = [n if length == 1 else length for length, n in zip(array.shape, shape[:2], strict=False)]
                value = np.broadcast_to(array, (*whole, array.shape[2]))
            array = checked_array(reader, part, value, self.dtype, shape, expected)
            arrays.append(rows_as_kernels_take(reader.time_first(array), self.dtype))
        return self._state(*arrays)

    def _new_reset_state(self, T: int, B: int) -> State:
        if self._directions(False)[0][1]:
            return None
        return self._state(*[np.zeros((T, B, size), self.dtype) for size in self._state_sizes])


def _time_first(state: State) -> State:
    """Return views of a state's arrays [B,T,.], parts of it included, with both axes exchanged."""
    if isinstance(state, tuple):
        return tuple(map(_time_first, state))
    return None if state is None else state.swapaxes(0, 1)
