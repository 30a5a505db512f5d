"""What a value is made of that a graph computes of the outputs of the top cells, if it only rearranges them.

In come y of the layer and its last states, all of distinct random numbers; out goes where each number of a value is
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ....optable import Array

Kind = Literal["all", "step", "ends"]
"""All steps of y, one step, or the last states of both directions."""


class Form(NamedTuple):
    """What a value is, of the outputs of a Bidirectional."""

    kind: Kind
    origins: tuple[Array, Array, Array]
    """The step, the row and the column of y that each number is from; of last states, the column of both."""
    backward_first: bool
    """Whether the backward direction is on the left side."""


def find_form(value: Array, y: Array, width: int, last_states: Sequence[Array]) -> Form | None:
    """Return what a value is; None if it has other numbers, or y in an order that is none of a layer.

    `width` is how many columns of y are of the forward direction; `last_states` are side by side like y.
    """
    for array in (y, *(state[None] for state in last_states)):
        origins = find_origins(value, array)
        kind = None if origins is None else _find_kind(origins, len(array), y.shape, width)
        if origins is not None and kind is not None:
            return Form(kind, origins, bool((origins[2][..., 0] > 0).all()))
    return None


def _find_kind(
    origins: tuple[Array, Array, Array], step_count: int, y_shape: tuple[int, ...], width: int
) -> Kind | None:
    (step, row, column), (T, _, total) = origins, y_shape
    if column.ndim < 2 or column.shape[-1] != total or (row != row[..., :1]).any():
        return None
    if not any((column == np.roll(np.arange(total), shift)).all() for shift in (0, -width)):
        return None
    if step_count < T or (step == np.where(column >= width, 0, T - 1)).all():
        return "ends"
    if (step != step[..., :1]).any():
        return None
    count = len(np.unique(step))
    return "step" if count == 1 else "all" if count == T else None


def find_origins(value: Array, array: Array) -> tuple[Array, Array, Array] | None:
    """Return the indices in an array of distinct numbers that the numbers of a value have; None if it has others."""
    order = np.argsort(array, axis=None)
    places = np.searchsorted(array.ravel()[order], value).clip(max=array.size - 1)
    indices = np.unravel_index(order[places], array.shape)
    if value.dtype.kind != "f" or not value.size or (array[indices] != value).any():
        return None
    return indices[0], indices[1], indices[2]
