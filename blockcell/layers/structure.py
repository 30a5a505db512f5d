"""What layers consist of, for modules that convert, export or store them: leaves, weights, states and directions.

A leaf is a layer with weights of its own: an `LSTM`, `GRU`, `RNN` or `Dense`. Users of layers don't need this module,
so its functions are no attributes of layers. With `loading.py` it is the interface of the package for others.
"""

from __future__ import annotations

from typing import Any

from ..activations import Activation
from ..argument_reader import ArgumentReader
from ..optable import Array, Tensor
from .arguments import read_parts as read_parts
from .calls import BaseLayer
from .cell import Cell as Cell
from .containers import Stack
from .dense import Dense
from .layer import Layer
from .layer import Leaf as Leaf
from .lstm_gru import GRU, LSTM, RNN
from .shared import Directions

STATES: dict[str, Any] = {kind.__name__: kind._state for kind in (LSTM, GRU, RNN, Dense)}
"""The types of leaves' states, by the names of their classes."""


def snapshot_of(layer: Any) -> Any:
    """Return an equal layer with the weights of now, which nobody replaces later; anything else as it is."""
    return layer._snapshot() if isinstance(layer, BaseLayer) else layer


def leaves_by_prefix(layer: Layer) -> dict[str, Leaf]:
    """Return the leaves of a layer, by the prefix of their weights' names: "", "fw." or "0.bw."."""
    return layer._leaves()


def weight_tensors(leaf: Leaf) -> tuple[Tensor, ...]:
    """Return the table's descriptions of the weights that a leaf may have; the first one is a matrix."""
    return leaf._tensors


def constructor_arguments(leaf: Leaf) -> dict[str, Any]:
    """Return the weights and options with which the leaf's class makes an equal leaf."""
    return leaf._arguments()


def activations_of(cell: Cell) -> dict[str, Activation]:
    """Return the activations by the names of the constructor's arguments, in their canonical form."""
    return cell._activations


def state_sizes(leaf: Leaf) -> dict[str, int]:
    """Return the last dimension of each array of the state, by its name; a `Dense` has none."""
    return dict(zip(leaf._state._fields, leaf._state_sizes, strict=True))


def read_state(layer: BaseLayer, caller: str, state: Any, B: int) -> Any:
    """Return a user's state of B rows as a call takes it, zeros in place of None; errors begin with the caller."""
    return layer._read_state(ArgumentReader(caller), "state", state, B)


def has_steps(layer: BaseLayer) -> bool:
    """Return whether y has a row for each step, not for the last one alone."""
    return layer._over_time


def is_in_head(leaf: Leaf) -> bool:
    """Return whether a `Dense` with `last` reads the leaf's y, perhaps through other dense layers."""
    return leaf._in_head


def ends_in_softmax(layer: BaseLayer) -> bool:
    """Return whether y is the result of a softmax."""
    while isinstance(layer, Stack):
        layer = layer.layers[-1]
    return isinstance(layer, Dense) and layer.activation == "softmax"


def passes_dense_alone(layer: Layer) -> bool:
    """Return whether x comes to y through dense layers alone."""
    return layer._head_leaves()[1]


def output_directions(layer: BaseLayer) -> Directions:
    """Return how many columns of y are of each direction, and whether it runs backwards."""
    return layer._directions(False)


def input_directions(layer: Dense) -> Directions:
    """Return how many columns of x are of each direction of the layer below, and whether it runs backwards."""
    return layer._directions_of_x()


def description_of(layer: BaseLayer) -> dict[str, Any]:
    """Return the layer without its weights, as `blockcell.files` has it."""
    return layer._description()


def stored_arrays(layer: BaseLayer) -> dict[str, Array]:
    """Return the arrays that a file of the layer has, by name: weights, or codes of quantized ones and their scales."""
    return layer._arrays_of_file()
