"""Layers for inference alone, with weights in fewer bytes: `Packed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .._read import ArgumentReader
from ..optable import Array
from .base import ZERO, Layer
from .loading import _built
from .shared import CellWeights, GivenState, S_co, SharedWeights
from .storage import Narrow, widened


class Packed(Generic[S_co]):
    """A layer as it was, for calls and streams alone: of its weights it keeps only what these read.

    Made by ``layer.packed(storage)``. It cannot be changed. Several threads may call it. It can be pickled, and a
    pickle has the weights in as few bytes.

    Attributes
    ----------
    storage : str or None
        How matrices are stored: "float16", "bfloat16" or "int8"; None for as they were.
    nbytes : int
        Bytes of all weights: of the matrices and of what stands beside them.
    """

    def __init__(self, layer: Layer[S_co], storage: str | None) -> None:
        self._layer, self._storage = layer._hollow(), storage
        reader, weights = ArgumentReader(f"{type(layer).__name__}.packed"), layer._shared.weights
        kept: dict[Any, CellWeights] = {}
        for (prefix, cell), own in zip(layer._cells().items(), self._layer._cells().values(), strict=True):
            kept[own] = weights[cell]
            if storage is not None:
                narrow = cell._narrow(reader, prefix, weights[cell], storage)
                vectors = {name: array for name, array in narrow.arrays.items() if array.ndim == 1}
                kept[own] = narrow._replace(arrays=vectors)
        self._layer._share(SharedWeights(kept))

    @property
    def storage(self) -> str | None:
        return self._storage

    @property
    def nbytes(self) -> int:
        return sum(weights.packed.nbytes for weights in self._layer._shared.weights.values())

    @property
    def input_size(self) -> int:
        """I, the last dimension of x."""
        return self._layer.input_size

    @property
    def hidden_size(self) -> int:
        """H, as the layer has it."""
        return self._layer.hidden_size

    @property
    def output_size(self) -> int:
        """The last dimension of y."""
        return self._layer.output_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of all inputs and of all results."""
        return self._layer.dtype

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
        """What a call of the layer returns, of ``layer.rounded_to(storage)`` if there is a `storage`."""
        return self._layer(x, state, lengths=lengths, reset=reset, mask=mask, masked=masked, batch_first=batch_first)

    def stream(self, batch: SupportsIndex = 1) -> Any:
        """Run it step by step, as ``layer.stream(batch, storage)`` does. All such streams share the weights."""
        return self._layer.stream(batch)._belong_to(self)

    def __repr__(self) -> str:
        return f"<{self._layer!r}, packed, storage={self.storage!r}, nbytes={self.nbytes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        arrays: dict[str, Array | Narrow] = {}
        for prefix, cell in self._layer._cells().items():
            weights = self._layer._shared.weights[cell]
            stored = cell._matrices(weights) if weights.narrow else {}
            arrays |= {prefix + name: array for name, array in (weights.arrays | stored).items()}
        return _restored, (self._layer._description(), arrays, self.storage)


def _restored(description: Mapping[str, Any], arrays: Mapping[str, Array | Narrow], storage: str | None) -> Packed:
    """One from its pickle."""
    wide = {name: widened(array) if isinstance(array, Narrow) else array for name, array in arrays.items()}
    return Packed(_built(description, wide, ""), storage)
