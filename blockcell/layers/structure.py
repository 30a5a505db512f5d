"""What layers consist of, for modules that convert, export or store them: cells, weights, states and directions.

Users of layers don't need it, so it is no attribute of theirs. Where a function takes a cell, a `Dense` is one, too.
"""

from __future__ import annotations

from typing import Any

from ..activations import Activation
from ..optable import Array, Tensor
from .calls import BaseLayer
from .cell import Cell
from .dense import Dense
from .layer import Layer, Single
from .shared import Directions


def cells_by_prefix(layer: Layer) -> dict[str, Single]:
    """Return the cells of a layer, by the prefix of their weights' names: "", "fw." or "0.bw."."""
    return layer._cells()


def weight_tensors(cell: Single) -> tuple[Tensor, ...]:
    """Return the table's descriptions of the weights that a cell may have; the first one is a matrix."""
    return cell._tensors


def gates_of(cell: Cell) -> tuple[str, ...]:
    """Return the gates in the order of the columns of the first matrix."""
    return cell._gates


def activations_of(cell: Cell) -> dict[str, Activation]:
    """Return the activations by the names of the constructor's arguments, in their canonical form."""
    return cell._activations


def state_sizes(cell: Single) -> dict[str, int]:
    """Return the last dimension of each array of the state, by its name; a `Dense` has none."""
    return dict(zip(cell._state._fields, cell._state_sizes, strict=True))


def has_steps(layer: BaseLayer) -> bool:
    """Return whether y has a row for each step, not for the last one alone."""
    return layer._over_time


def feeds_last_steps(cell: Single) -> bool:
    """Return whether a `Dense` with `last` reads the cell's y, perhaps through other dense layers."""
    return cell._in_head


def passes_dense_alone(layer: Layer) -> bool:
    """Return whether x comes to y through dense layers alone."""
    return layer._head()[1]


def input_directions(layer: Dense) -> Directions:
    """Return how many columns of x are of each direction of the layer below, and whether it runs backwards."""
    return layer._directions_of_x()


def description_of(layer: BaseLayer) -> dict[str, Any]:
    """Return the layer without its weights, as `blockcell.files` has it."""
    return layer._description()


def stored_arrays(layer: BaseLayer) -> dict[str, Array]:
    """Return the arrays that a file of the layer has, by name: weights, or codes of quantized ones and their scales."""
    return layer._arrays_of_file()
