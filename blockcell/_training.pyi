from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from .optable import Array

Given = Mapping[str, ArrayLike]
Updates = tuple[dict[str, Array], dict[str, Array]] | None

def sgd(weights: Given, grads: Given, state: Given | None, *settings: float) -> Updates: ...
def momentum(weights: Given, grads: Given, state: Given | None, *settings: float) -> Updates: ...
def adam(weights: Given, grads: Given, state: Given | None, *settings: float) -> Updates: ...
def cross_entropy(logits: Any, labels: Any) -> tuple[float, Array] | None: ...
