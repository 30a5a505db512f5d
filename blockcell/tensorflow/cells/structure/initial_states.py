"""Initial states of cells: zeros, variables and constants, or values that are computed or fed.

In come the states that the first step of a cell reads; out goes an `InitialState` for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..cell.cell_definition import CellInGraph
from ..cell.found_cell import InitialState
from ..graph.graph_reader import FLOATS, Place, UnknownValue
from ..graph.while_loops import WhileLoops
from ..weights.weight_slices import WeightSlices, join_slices
from ..weights.weight_sources import WeightSource, WeightSources

_DEEPEST = 8  # nodes, one behind the other
_SHAPES = ("Tile", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze")  # ops that change the shape alone


class InitialStates:
    """Reads the initial states of cells in a graph."""

    def __init__(self, sources: WeightSources) -> None:
        self._reader, self._sources = sources.reader, sources
        self._loops, self._weight_slice = WhileLoops(sources.reader), WeightSlices(sources).weight_slice

    def read(self, first_step: CellInGraph, sizes: Sequence[int]) -> tuple[InitialState, ...]:
        """Return the initial states of a cell by its first step; `sizes` are the sizes of its states."""
        return tuple(self._read(place, size) for place, size in zip(first_step.states, sizes, strict=True))

    def _read(self, place: Place, size: int) -> InitialState:
        try:
            variable = self._loops.loop_variable(place)
            place = place if variable is None else variable.initial
            source = self._source(place, size)
            if source is None:
                return InitialState("")
            is_stored = source.dtype in FLOATS and not any(leaf[0] == "?" for leaf in source.leaves)
            return InitialState(source.name, source if is_stored else None, size)
        except UnknownValue:
            with suppress(UnknownValue):  # it is not in the file
                place = self._reader.resolve(place)
            return InitialState(place.name)

    def _source(self, place: Place, size: int, depth: int = 0) -> WeightSource | None:
        """Return the variable or constant that a state is; None for zeros."""
        origins = [*self._reader.origins(place)]
        if len(origins) != 1 or depth > _DEEPEST:
            raise UnknownValue(place.name)
        origin = origins[0]
        op, inputs = self._reader.op(origin).name, self._reader.inputs_at(origin)
        if op == "ZerosLike":
            return None
        if op == "Fill":
            row = np.full(size, self._reader.constant_number(inputs[1]), np.float32)
            filled = WeightSource(origin.name, (size,), "float32", lambda suffix: row, (origin.name,))
            return filled if row.any() else None
        if op in _SHAPES:
            source = self._source(inputs[0], size, depth + 1)
            if source is not None and op == "Tile" and math.prod(source.shape) != size:
                raise UnknownValue(origin.name)
            return source
        for zeros, state in (inputs, inputs[::-1]) if op == "Add" and len(inputs) == 2 else ():
            if self._reader.fill_value(zeros) == 0:  # which repeat the state for each row of a batch
                return self._source(state, size, depth + 1)
        piece = self._weight_slice(origin)
        if not piece.shape or (piece.shape[-1] != size and math.prod(piece.shape) % size):
            raise UnknownValue(origin.name)
        return join_slices([[piece]])
