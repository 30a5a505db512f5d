"""A layer for calls and streams alone, with its weights in fewer bytes: `Packed`, and what a pickle has of it."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from .._read import ArgumentReader
from ..optable import Array
from .shared import ZERO, CellWeights, GivenState, S_co, SharedWeights
from .storage import Narrow, widened


class Packed(Generic[S_co]):
    """A layer as it was, for calls and streams alone: of its weights it keeps only what these read.

    Made by ``layer.packed(storage)``. It cannot be changed. Several threads may call it. It can be pickled, and a
    pickle has the weights in as few bytes.

    Attributes
    ----------
    storage : str or None
        How matrices are stored: "float16", "bfloat16" or "int8"; None for as they were.
    activations : str
        To what the rows that they are multiplied with are rounded: "int8" or "int16"; "float32" for not at all.
    nbytes : int
        Bytes of all weights: of the matrices and of what stands beside them. Matrices that fit into the second-level
        cache in float32 are kept so, too, since calls are faster then.
    """

    def __init__(self, layer: Any, storage: str | None, activations: str) -> None:
        self._layer, self._storage, self._activations = layer._hollow(), storage, activations
        reader, weights = ArgumentReader(f"{type(layer).__name__}.packed"), layer._shared.weights
        kept: dict[Any, CellWeights] = {}
        for (prefix, cell), own in zip(layer._cells().items(), self._layer._cells().values(), strict=True):
            kept[own] = weights[cell]
            if storage is not None:
                narrow = cell._narrow(reader, prefix, weights[cell], storage, activations)
                matrices = [tensor.name for tensor in cell._tensors if tensor.kind == "matrix"]
                vectors = {name: array for name, array in narrow.arrays.items() if name not in matrices}
                stored = narrow.stored and narrow.stored._replace(arrays=vectors)
                kept[own] = narrow._replace(arrays=vectors, stored=stored)
        self._layer._share(SharedWeights(kept))

    @property
    def storage(self) -> str | None:
        return self._storage

    @property
    def activations(self) -> str:
        return self._activations

    @property
    def nbytes(self) -> int:
        kept = self._layer._shared.weights.values()
        return sum(each.packed.nbytes + (each.stored.packed.nbytes if each.stored else 0) for each in kept)

    @property
    def input_size(self) -> int:
        """I, the last dimension of x."""
        return int(self._layer.input_size)

    @property
    def hidden_size(self) -> int:
        """H, as the layer has it."""
        return int(self._layer.hidden_size)

    @property
    def output_size(self) -> int:
        """The last dimension of y."""
        return int(self._layer.output_size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of all inputs and of all results."""
        dtype: np.dtype[Any] = self._layer.dtype
        return dtype

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
        """What a call of the layer returns, of ``layer.rounded_to(storage)`` if there is a `storage`; nearly that if
        activations are rounded, too."""
        options = {"lengths": lengths, "reset": reset, "mask": mask, "masked": masked, "batch_first": batch_first}
        results: tuple[Array, S_co] = self._layer(x, state, **options)
        return results

    def _run(self, x: Array, state: Any, lengths: Array | None, reset: Array | None, threads: int) -> Any:
        """What a call returns, of arrays as kernels read them, on at most so many threads."""
        weights = self._layer._shared.weights
        return self._layer._runner.run(weights, x, state, lengths, reset, None, len(x), False, False, threads)

    def stream(self, batch: SupportsIndex = 1) -> Any:
        """Run it step by step, as ``layer.stream(batch, storage)`` does. All such streams share the weights."""
        return self._layer.stream(batch)._belong_to(self)

    def __repr__(self) -> str:
        rounded = "" if self.activations == "float32" else f", activations={self.activations!r}"
        return f"<{self._layer!r}, packed, storage={self.storage!r}{rounded}, nbytes={self.nbytes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._layer._apart(), self.storage, self.activations)


class Parts(NamedTuple):
    """A layer in a pickle: its arguments, where matrices are as they are stored and layers are `Parts`."""

    kind: type[Any]
    arguments: dict[str, Any]


def _joined(value: Any) -> Any:
    """The layer, or an argument of one."""
    if isinstance(value, Narrow):
        return widened(value)
    if isinstance(value, Parts):
        return value.kind(**{name: _joined(each) for name, each in value.arguments.items()})
    return tuple(map(_joined, value)) if type(value) is tuple else value


def _restored(parts: Parts, storage: str | None, activations: str = "float32") -> Packed:
    """One from its pickle; older ones have no `activations`."""
    return Packed(_joined(parts), storage, activations)
