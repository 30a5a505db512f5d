"""Arrays of an op's call that its kernel cannot take as they are: validation, conversion, allocation, ``out=``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ._args import empty
from .argument_reader import ArgumentReader, as_kernels_take, form
from .errors import short
from .optable import DTYPES, LETTERS, Array, Op, Tensor, sizes_of


class CheckedInputs(NamedTuple):
    """A call's inputs as arrays, checked but not converted."""

    arrays: tuple[Array | None, ...]
    number: int
    """The position of their dtype in DTYPES."""
    sizes: dict[str, int]
    """The values of the letters."""
    use_peephole: bool

    @property
    def letters(self) -> tuple[int, ...]:
        """T, B, I, H; T is 1 for an op of a single step."""
        return tuple(self.sizes.get(letter, 1) for letter in LETTERS)


class Converter:
    """Converts the arrays of an op's calls to what its kernel takes, or says what is wrong with them."""

    def __init__(self, op: Op, reader: ArgumentReader) -> None:
        self.op = op
        self.reader = reader
        self.sources = op.sources

    # ---------------------------------------------------------------------------------------------------------- inputs
    def read(self, values: tuple[Any, ...], use_peephole: bool) -> CheckedInputs:
        """Return the inputs as arrays, after every check of them."""
        op = self.op
        arrays = tuple(
            [self._tensor(tensor, value, use_peephole) for tensor, value in zip(op.inputs, values, strict=True)]
        )
        names = [tensor.name for tensor in op.inputs]
        number = self.reader.dtype_number(zip(names, values, arrays, strict=True))
        return CheckedInputs(arrays, number, self._sizes(arrays, use_peephole), use_peephole)

    def wrong_steps(self, seq_len_max: int, x: Array) -> ValueError:
        return ValueError(
            f"{self.op.name}: seq_len_max is {short(seq_len_max)}; expected 0 <= seq_len_max <= T = {x.shape[0]}"
            f" from x (shape {x.shape})"
        )

    def convert(self, inputs: CheckedInputs, out: Any) -> tuple[tuple[Array | None, ...], list[Array]]:
        """Return the inputs as the kernel takes them, and arrays for its outputs: those of `out`, or new ones."""
        op, dtype = self.op, DTYPES[inputs.number]
        shapes = self._output_shapes(inputs, dtype.itemsize)
        if out is not None:
            self._check_out(out, inputs, shapes, dtype)
        arrays = tuple(
            [
                as_kernels_take(array, dtype)
                if array is not None and tensor.read and (inputs.use_peephole or not tensor.peephole)
                else array
                for tensor, array in zip(op.inputs, inputs.arrays, strict=True)
            ]
        )
        if out is None:
            return arrays, [empty(shape, dtype) for shape in shapes]
        return arrays, [np.asarray(output) for output in out]

    def _tensor(self, tensor: Tensor, value: Any, use_peephole: bool) -> Array | None:
        """Return the value as an array; None for a peephole that may be missing and is."""
        if value is None:
            if tensor.peephole and not use_peephole:
                return None
            reason = " because use_peephole is True" if tensor.peephole else ""
            raise TypeError(
                f"{self.op.name}: {tensor.name} is None; expected an array of shape {form(tensor.shape)}{reason}"
            )
        return self.reader.array(tensor.name, value)

    def _sizes(self, arrays: Sequence[Array | None], use_peephole: bool) -> dict[str, int]:
        """Return the letters' values, after a check of every shape."""
        op = self.op
        sizes: dict[str, int] = {}
        for tensor, array in zip(op.inputs, arrays, strict=True):
            if tensor.name in self.sources.values():
                assert array is not None
                words = tensor.shape.split()
                if array.ndim != len(words):
                    expected = f"expected rank {len(words)}, {form(tensor.shape)}"
                    raise ValueError(f"{op.name}: {tensor.name} has shape {array.shape}; {expected}")
                pairs = zip(words, array.shape, strict=True)
                sizes.update(pair for pair in pairs if self.sources.get(pair[0]) == tensor.name)
        for tensor, array in zip(op.inputs, arrays, strict=True):
            if tensor.peephole and not use_peephole:
                if array is not None and array.ndim != 1:
                    expected = "expected rank 1, of any length while use_peephole is False"
                    raise ValueError(f"{op.name}: {tensor.name} has shape {array.shape}; {expected}")
            elif array is not None and array.shape != (expected_shape := sizes_of(tensor.shape, sizes)):
                expected = _expected(tensor, expected_shape) + self._origin(tensor, sizes, arrays)
                raise ValueError(f"{op.name}: {tensor.name} has shape {array.shape}; expected {expected}")
        return sizes

    def _origin(self, tensor: Tensor, sizes: dict[str, int], arrays: Sequence[Array | None]) -> str:
        """Write where sizes are from: ``" with I=3 from x (shape (2, 3)), H=5 from h_prev (shape (2, 5))"``."""
        parts: list[str] = []
        named = zip(self.op.inputs, arrays, strict=True)
        shapes = {t.name: f" (shape {array.shape})" for t, array in named if array is not None}
        for letter, source in self.sources.items():
            if letter in tensor.shape and source != tensor.name:
                parts.append(f"{letter}={sizes[letter]} from {source}{shapes.pop(source, '')}")
        return f" with {', '.join(parts)}"

    # ---------------------------------------------------------------------------------------------------------- outputs
    def _output_shapes(self, inputs: CheckedInputs, itemsize: int) -> list[tuple[int, ...]]:
        op, sizes = self.op, inputs.sizes
        peepholes = [array for tensor, array in zip(op.inputs, inputs.arrays, strict=True) if tensor.peephole]
        shapes = []
        for tensor in op.outputs:
            shape = sizes_of(tensor.shape, sizes)
            if tensor.peephole and (weight := peepholes.pop(0)) is not None:
                shape = weight.shape
            if prod(size for size in shape if size) * itemsize > sys.maxsize:  # numpy's limit
                too_large = f"would have shape {shape}, which is too large"
                origin = self._origin(tensor, sizes, inputs.arrays)
                raise ValueError(f"{op.name}: {tensor.name} {too_large}{origin}")
            shapes.append(shape)
        return shapes

    def _check_out(self, out: Any, inputs: CheckedInputs, shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        op = self.op
        names = ", ".join(tensor.name for tensor in op.outputs)
        if not isinstance(out, tuple):
            raise TypeError(f"{op.name}: out is {short(out)}; expected a tuple of the arrays ({names})")
        if len(out) != len(shapes):
            raise ValueError(f"{op.name}: out has {len(out)} arrays; expected {len(shapes)}: ({names})")
        for k, (tensor, shape, output) in enumerate(zip(op.outputs, shapes, out, strict=True)):
            message = f"{op.name}: out[{k}] ({tensor.name})"
            if not isinstance(output, np.ndarray) or isinstance(output, np.ma.MaskedArray):
                raise TypeError(f"{message} is {short(output)}; expected a numpy array")
            if output.dtype != dtype:
                raise TypeError(f"{message} has dtype {output.dtype}; expected {dtype}, that of the inputs")
            if output.shape != shape:
                expected = _expected(tensor, shape) + self._origin(tensor, inputs.sizes, inputs.arrays)
                raise ValueError(f"{message} has shape {output.shape}; expected {expected}")
            if not output.flags.writeable:
                raise ValueError(f"{message} is read-only; expected a writeable array")
            if not (output.flags.c_contiguous and output.flags.aligned):
                raise ValueError(f"{message} has strides {output.strides}; expected a C-contiguous, aligned array")
            for other, array in zip(op.inputs, inputs.arrays, strict=True):
                if array is not None and np.shares_memory(output, array):
                    raise ValueError(f"{message} overlaps the input {other.name}; expected memory of its own")
            for m in range(k):
                if np.shares_memory(output, out[m]):
                    raise ValueError(f"{message} overlaps out[{m}] ({op.outputs[m].name}); expected memory of its own")


def _expected(tensor: Tensor, shape: tuple[int, ...]) -> str:
    """Write a shape in letters and in numbers: ``(I+H, 4H) = (8, 20)``."""
    return f"{form(tensor.shape)} = {shape}"
