"""What modules that convert, export or store layers ask of them, beside the attributes that the classes have for it.

A leaf is a layer with weights of its own: an `LSTM`, `GRU`, `RNN` or `Dense`. Attributes of `BaseLayer`, `Layer`,
`Leaf` and `Cell` that begin with an underscore are not for users of layers, but any module of blockcell and of
onnx_export may read them: `_leaves`, `_tensors`, `_arguments`, `_activations`, `_description`, `_arrays_of_file`,
`_over_time`, `_directions` and others.
"""

from __future__ import annotations

from typing import Any

from ..argument_reader import ArgumentReader
from .arguments import read_parts as read_parts
from .calls import BaseLayer
from .cell import Cell as Cell
from .containers import Stack
from .dense import Dense
from .layer import Layer
from .layer import Leaf as Leaf
from .lstm_gru import GRU, LSTM, RNN

LEAVES: dict[str, Any] = {kind.__name__: kind for kind in (LSTM, GRU, RNN, Dense)}
"""The classes of leaves, by name."""
STATES: dict[str, Any] = {name: kind._state for name, kind in LEAVES.items()}
"""The types of leaves' states, by the names of their classes."""


def snapshot_of(layer: Any) -> Any:
    """Return an equal layer with the weights of now, which nobody replaces later; anything else as it is."""
    return layer._snapshot() if isinstance(layer, BaseLayer) else layer


def state_sizes(leaf: Leaf) -> dict[str, int]:
    """Return the last dimension of each array of the state, by its name; a `Dense` has none."""
    return dict(zip(leaf._state._fields, leaf._state_sizes, strict=True))


def read_state(layer: BaseLayer, caller: str, state: Any, B: int) -> Any:
    """Return a user's state of B rows as a call takes it, zeros in place of None; errors begin with the caller."""
    return layer._read_state(ArgumentReader(caller), "state", state, B)


def ends_in_softmax(layer: BaseLayer) -> bool:
    """Return whether y is the result of a softmax."""
    while isinstance(layer, Stack):
        layer = layer.layers[-1]
    return isinstance(layer, Dense) and layer.activation == "softmax"


def passes_dense_alone(layer: Layer) -> bool:
    """Return whether x comes to y through dense layers alone."""
    return layer._head_leaves()[1]
