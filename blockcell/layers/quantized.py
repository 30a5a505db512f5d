"""A quantized layer, for calls and streams: `Quantized`, and what a pickle has of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO, Any, ClassVar, NoReturn, SupportsIndex

import numpy as np

from .. import files
from ..argument_reader import ArgumentReader
from ..quantization import FLOAT32, Scheme, read_schemes
from .arguments import CallReader
from .calls import BaseLayer
from .shared import Directions, LeafWeights, S_co, State


class Quantized(BaseLayer[S_co]):
    """A layer with quantized weights, for calls and streams. Made by ``layer.quantize(scheme)``.

    It has the weights that the layer had then, and cannot be changed. Several threads may call it. It can be pickled,
    and a pickle has the weights in as few bytes.

    Attributes
    ----------
    quantization : str or dict
        What `quantize` was given: "int8", "float16" or a scheme for each prefix.
    nbytes : int
        Bytes of all arrays that it holds: codes, scales, biases and peepholes as kernels read them, and of matrices
        that stay float32 what a layer holds.
    """

    _read: ClassVar[Callable[..., Any]]
    _rebuild: ClassVar[Callable[..., Any]]
    """Functions of `loading`, which builds layers of all kinds: they read a file, and what a pickle has."""

    def __init__(self, layer: Any, scheme: Scheme) -> None:
        caller = f"{type(layer).__name__}.quantize"
        schemes = read_schemes(caller, scheme, layer._leaves(), layer.dtype)
        reader = ArgumentReader(caller)

        def quantize(prefix: str, leaf: Any, weights: LeafWeights) -> LeafWeights:
            scheme = schemes[prefix]
            return weights if scheme == FLOAT32 else leaf._quantize(reader, prefix, weights, scheme)

        self._quantization: Scheme = scheme if isinstance(scheme, str) else dict(scheme)
        snapshot = layer._snapshot(quantize)
        self._layer: BaseLayer[S_co] = snapshot
        self._shared, self._runner = snapshot._shared, snapshot._runner

    @property
    def quantization(self) -> str | dict[str, str]:
        return self._quantization if isinstance(self._quantization, str) else dict(self._quantization)

    @property
    def nbytes(self) -> int:
        leaves = self._shared.weights.values()
        return sum(array.nbytes for leaf in leaves for array in (leaf.packed, *leaf.arrays.values()))

    def dequantize(self) -> Any:
        """Return the float32 layer with the weights that are left. Calls of a float16 layer have its bits."""
        layer: Any = self._layer
        return layer._snapshot(lambda _, leaf, weights: leaf._dequantize(weights))

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Quantized[Any]:
        """Read a quantized layer that `save` wrote.

        Parameters
        ----------
        path : path_like or file object
            As of `blockcell.load`.

        Raises
        ------
        FormatError
            The file holds a layer that is not quantized, or as from `blockcell.load`.
        TypeError, ValueError, OSError
            As from `blockcell.load`.
        """
        layer: Quantized[Any] = cls._read(path, True)
        return layer

    def stream(self, batch: SupportsIndex = 1) -> Any:
        return self._layer.stream(batch)._belong_to(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError, also for what only float32 layers have: weights, gradients, `set_weights`."""
        expected = "expected calls and streams alone, or dequantize() for a float32 layer"
        raise AttributeError(f"a quantized layer has no {name}; {expected}")

    # ---------------------------------------------------------------------------------------------- as of the layer
    @property
    def input_size(self) -> int:
        return self._layer.input_size

    @property
    def hidden_size(self) -> int:
        return self._layer.hidden_size

    @property
    def output_size(self) -> int:
        return self._layer.output_size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._layer.dtype

    @property
    def _over_time(self) -> bool:
        return self._layer._over_time

    def _directions(self, reverse: bool) -> Directions:
        return self._layer._directions(reverse)

    def _read_state(self, reader: ArgumentReader, name: str, state: State, B: int, source: str = "x") -> State:
        return self._layer._read_state(reader, name, state, B, source)

    def _read_reset_state(self, reader: CallReader, name: str, state: State) -> State:
        return self._layer._read_reset_state(reader, name, state)

    def _snapshot(self) -> Quantized[S_co]:
        return self

    def _description(self) -> dict[str, Any]:
        return self._layer._description()

    def _leaves(self, prefix: str = "") -> dict[str, Any]:
        return self._layer._leaves(prefix)

    def __copy__(self) -> Quantized[S_co]:
        return self  # as nothing changes it

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantized[S_co]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        description = self._description()
        files.check(description)  # of a subclass that is not blockcell's there is none
        return Quantized._rebuild, (description, self._arrays_of_file(), self._quantization)

    def __repr__(self) -> str:
        return f"<{self._layer!r}, quantized to {self._quantization!r}, nbytes={self.nbytes}>"
