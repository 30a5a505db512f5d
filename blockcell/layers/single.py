"""Layers with weights of their own, which consist of no other layers: their sizes, weights, packing and kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar, Self, SupportsIndex

import numpy as np

from .. import _kernels
from .._args import frozen_copy
from .._layers import pack
from .._stream import Stream
from ..argument_reader import ArgumentReader, form
from ..errors import short
from ..optable import DTYPES, SCHEMES, Array, Tensor, sizes_of
from ..quantization import KERNEL_FORMATS, QuantizedMatrix, quantize_matrix
from .arguments import in_rows, read_array, read_lengths, read_parts
from .layer import Layer
from .shared import CellWeights, GRUState, LSTMState, NoState, Parts, RNNState, S_co, SharedWeights, State

HALF = DTYPES.index(np.dtype(np.float16))


class Single(Layer[S_co]):
    """A layer that consists of no others. `Cell` and `Dense` set the attributes below."""

    _kernel: str
    """The kind of its kernels: a key of `_kernels.LAYERS`."""
    _tensors: tuple[Tensor, ...]
    """The weights that the constructor takes, in the order of the kernels."""
    _state: ClassVar[type[LSTMState] | type[GRUState] | type[RNNState] | type[NoState]]
    _repr_attributes: ClassVar[tuple[str, ...]] = "input_size", "hidden_size", "dtype"
    """The attributes with which the repr begins."""
    _sizes: dict[str, int]
    _dtype_number: int
    _in_head = False
    """Whether a `Dense` with `last` reads y, perhaps through other dense layers."""

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of all weights that the kernels take, in their order."""
        return tuple(tensor.name for tensor in self._kernel_tensors)

    @property
    def _kernel_tensors(self) -> tuple[Tensor, ...]:
        """All weights that the kernels take, in their order; this layer may not have all of them."""
        return self._tensors

    @abstractmethod
    def _kernel_options(self) -> tuple[Any, ...]:
        """Return the options of the function that plans the kernels (`lstm_layer` in ``pyx/_lstm.pyx``)."""

    @abstractmethod
    def _sizes_of(self, arrays: Mapping[str, Array], what: str) -> dict[str, int]:
        """Return the sizes by their letters, as the weights have them; `what` begins a message about the first one."""

    def _cells(self, prefix: str = "") -> dict[str, Single]:
        return {prefix: self}

    def _head(self) -> tuple[list[Single], bool]:
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
        values = [f"{name}={getattr(self, name)}" for name in self._repr_attributes]
        return f"{type(self).__name__}({', '.join(values + self._repr_options())})"

    def _repr_options(self) -> list[str]:
        """Return the last part of the repr: options that differ from their defaults."""
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
        self._dtype_number = reader.dtype_number((name, values[name], array) for name, array in arrays.items())
        first = tensors[0]
        shape = arrays[first.name].shape
        what = f"{reader.caller}: {first.name} has shape {shape}; expected {form(first.shape)}"
        if len(shape) != 2:
            raise ValueError(f"{what}, rank 2")
        self._sizes = self._sizes_of(arrays, what)
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
        array = read_array(reader, name, value, self.dtype, shape, expected, keep=True)
        array.flags.writeable = False
        return array

    def _pack(
        self, arrays: dict[str, Array], matrices: Mapping[str, QuantizedMatrix] | None = None, format: int = 0
    ) -> CellWeights:
        """Return the arrays with all weights packed: these, and the quantized matrices of this format."""
        plan = self._plan("pack", format, 1, 1, 1)
        packed = np.empty(plan[2], np.uint8)  # huge pages made no difference below 4 MiB, numpy's own limit
        if self.hidden_size:
            pack(plan, packed, [*map(arrays.get, self._weight_names)], [*map((matrices or {}).get, self._weight_names)])
        return CellWeights(arrays, packed, format)

    def _without_weights(self) -> Self:
        layer = object.__new__(type(self))
        layer.__dict__.update(self.__dict__)
        layer._runner = layer._new_runner()
        return layer

    # ----------------------------------------------------------------------------------------------------- quantization
    def _quantize(self, reader: ArgumentReader, prefix: str, weights: CellWeights, scheme: str) -> CellWeights:
        """Return the weights with quantized matrices; errors have the prefix in front of their names."""
        vectors, matrices = dict(weights.arrays), {}
        for tensor in self._tensors:
            if tensor.kind == "matrix":
                name = tensor.name
                matrices[name] = quantize_matrix(vectors.pop(name), scheme, f"{reader.caller}: {prefix}{name}")
        return self._pack(vectors, matrices, KERNEL_FORMATS[scheme])

    def _pickled(self) -> Parts:
        parts, weights = super()._pickled(), self._shared.weights[self]
        return parts._replace(arguments=parts.arguments | self._matrices(weights))

    def _matrices(self, weights: CellWeights) -> dict[str, QuantizedMatrix]:
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
            pack(
                self._plan("unpack", weights.format, 1, 1, 1),
                weights.packed,
                [],
                [*map(matrices.get, self._weight_names)],
            )
        return matrices

    # ---------------------------------------------------------------------------------------------------------- streams
    def stream(self, batch: SupportsIndex = 1) -> Stream[S_co]:
        return Stream(self, ArgumentReader(f"{type(self).__name__}.stream").integer("batch", batch))

    def _with_weights(self, weights: CellWeights) -> Self:
        """Return an equal layer with these weights."""
        return type(self)(**(self._arguments() | weights.arrays))

    def _read_stream_array(self, name: str, value: Any, shape: tuple[int | None, ...], why: str = "") -> Array:
        """Return an array that a stream was given as kernels read it; `why` it must have this shape ends a message."""
        expected = f"({', '.join('T' if size is None else str(size) for size in shape)}){why}"
        return read_array(ArgumentReader(f"{type(self).__name__}.stream"), name, value, self.dtype, shape, expected)

    def _read_stream_lengths(self, value: Any, T: int, n: int) -> Array | None:
        """Return the lengths of n rows that a stream was given."""
        return read_lengths(ArgumentReader(f"{type(self).__name__}.stream"), value, T, n)

    def _read_stream_state(self, value: Any, batch: int) -> list[Array]:
        """Return the arrays of a state that a stream was given, as kernels read them."""
        reader = ArgumentReader(f"{type(self).__name__}.stream")
        return [*self._read_state(reader, "state", value, batch, "the stream")]

    # ---------------------------------------------------------------------------------------------------------- kernels
    def _plan(self, task: str, format: int, T: int, B: int, threads: int) -> tuple[object, bytes, int, int, int]:
        """Plan one of the layer's kernels.

        Parameters
        ----------
        task : {"pack", "unpack", "forward", "backward"}
        format : int
            How the matrices of weights are quantized.
        T, B, threads : int

        Returns
        -------
        tuple
            The kernel, its plan, the bytes of the workspace (of the packed weights, if these are the task), how many of
            the threads it uses, and how many of these share the hidden units of a row.
        """
        sizes = T, B, self.input_size, self.hidden_size
        return _kernels.LAYERS[self._kernel](
            task, sizes, threads, self._dtype_number, format, False, self._kernel_options()
        )

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        """Return a state of B rows as kernels read it, zeros in place of None; `source` is where B is from."""
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
