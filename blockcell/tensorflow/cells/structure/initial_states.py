"""Initial states of cells: zeros, variables and constants, or values that are computed or fed.

In comes a state that the first step of a cell reads; out goes an `InitialState`.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from ..cell.found_cell import InitialState
from ..graph.graph_reader import FLOATS, Place, UnknownValue
from ..graph.while_loops import WhileLoops
from ..weights.weight_slices import WeightSource, join_slices
from ..weights.weight_sources import WeightSources

_DEEPEST = 8  # nodes, one behind the other
_SHAPES = ("Tile", "BroadcastTo", "ExpandDims", "Reshape", "Squeeze")  # ops that change the shape alone


def read_initial_state(sources: WeightSources, loops: WhileLoops, place: Place, size: int) -> InitialState:
    """Return the initial state of a cell, by the state that its first step reads."""
    try:
        variable = loops.loop_variable(place)
        place = place if variable is None else variable.initial
        source = _source(sources, place, size)
        if source is None:
            return InitialState("")
        is_stored = source.dtype in FLOATS and not any(leaf[0] == "?" for leaf in source.leaves)
        return InitialState(source.name, source if is_stored else None, size)
    except UnknownValue:
        with suppress(UnknownValue):  # it is not in the file
            place = sources.reader.resolve(place)
        return InitialState(place.name)


def _source(sources: WeightSources, place: Place, size: int, depth: int = 0) -> WeightSource | None:
    """Return the variable or constant that a state is; None for zeros."""
    reader = sources.reader
    origins = [*reader.origins(place)]
    if len(origins) != 1 or depth > _DEEPEST:
        raise UnknownValue(place.name)
    origin = origins[0]
    op, inputs = reader.op(origin).name, reader.inputs_at(origin)
    if op == "ZerosLike":
        return None
    if op == "Fill":
        row = np.full(size, reader.constant_number(inputs[1]), np.float32)
        filled = WeightSource(origin.name, (size,), "float32", lambda suffix: row, (origin.name,))
        return filled if row.any() else None
    if op in _SHAPES:
        source = _source(sources, inputs[0], size, depth + 1)
        if source is not None and op == "Tile" and math.prod(source.shape) != size:
            raise UnknownValue(origin.name)
        return source
    for zeros, state in (inputs, inputs[::-1]) if op == "Add" and len(inputs) == 2 else ():
        if reader.fill_value(zeros) == 0:  # which repeat the state for each row of a batch
            return _source(sources, state, size, depth + 1)
    piece = sources.slice(origin)
    if not piece.shape or (piece.shape[-1] != size and math.prod(piece.shape) % size):
        raise UnknownValue(origin.name)
    return join_slices([[piece]])
