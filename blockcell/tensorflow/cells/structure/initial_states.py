"""What states are before the first step: zeros, variables and constants, or what is computed or fed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..cell.found_cell import FLOATS, At, Start
from ..graph.graph_reader import Place, Unknown
from ..graph.while_loops import Loops
from ..weights.weight_slices import Pieces, joined
from ..weights.weight_sources import Source, Sources

_DEEPEST = 8  # nodes, one behind the other
_SHAPES = ("Tile", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze")  # what changes the shape alone


class Starts:
    """Reads what states are before the first step."""

    def __init__(self, sources: Sources) -> None:
        self._reader, self._sources = sources.reader, sources
        self._loops, self._piece = Loops(sources.reader), Pieces(sources).piece

    def of(self, first: At, sizes: Sequence[int]) -> tuple[Start, ...]:
        """Of a cell, by its first step."""
        return tuple(self._of(place, size) for place, size in zip(first.states, sizes, strict=True))

    def _of(self, place: Place, size: int) -> Start:
        try:
            carried = self._loops.carried(place)
            place = place if carried is None else carried.first
            source = self._source(place, size)
            if source is None:
                return Start("")
            kept = source.dtype in FLOATS and not any(leaf[0] == "?" for leaf in source.leaves)
            return Start(source.name, source if kept else None, size)
        except Unknown:
            with suppress(Unknown):  # it is not in the file
                place = self._reader.straight(place)
            return Start(place.name)

    def _source(self, place: Place, size: int, depth: int = 0) -> Source | None:
        """The variable or constant; None for zeros."""
        origins = [*self._reader.origins(place)]
        if len(origins) != 1 or depth > _DEEPEST:
            raise Unknown(place.name)
        here = origins[0]
        op, inputs = self._reader.op(here).name, self._reader.given(here)
        if op == "ZerosLike":
            return None
        if op == "Fill":
            value = self._reader.value(inputs[1])
            return None if value == 0 else _repeated(here.name, value, size)
        if op in _SHAPES:
            found = self._source(inputs[0], size, depth + 1)
            if found is not None and op == "Tile" and math.prod(found.shape) != size:
                raise Unknown(here.name)
            return found
        if op == "Add" and len(inputs) == 2:
            return self._added(inputs, size, depth)
        piece = self._piece(here)
        if not piece.shape or piece.shape[-1] != size:
            if math.prod(piece.shape) % size or not piece.shape:
                raise Unknown(here.name)
        return joined([[piece]])

    def _added(self, inputs: Sequence[Place], size: int, depth: int) -> Source | None:
        """A state that is added to zeros, which gives it as many rows as there are."""
        for zeros, state in (inputs, inputs[::-1]):
            if self._reader.filling(zeros) == 0:
                return self._source(state, size, depth + 1)
        raise Unknown(inputs[0].name)


def _repeated(name: str, value: float, size: int) -> Source:
    return Source(name, (size,), "float32", lambda more: np.full(size, value, np.float32), (name,))
