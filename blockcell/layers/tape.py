"""What a forward pass keeps for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..optable import Array
from .calls import BaseLayer
from .masks import CountedSteps


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """What `Layer.forward` keeps for `Layer.backward`: copies of x and y, the gates and states of every step, and the
    weights."""

    layer: BaseLayer[Any]
    T: int
    B: int
    step_count: int = field(repr=False)
    """The number of steps until every row has finished. Nothing is kept from there on."""
    lengths: Array | None = field(repr=False)
    content: Any = field(repr=False)
    batch_first: bool = False
    counted: CountedSteps | None = field(default=None, repr=False)
    """Where the steps that a mask counts are, if they had to move."""
