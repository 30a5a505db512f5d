from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from .optable import Array

Given = Mapping[str, ArrayLike]
Step = tuple[dict[str, Array], dict[str, Array]] | None

def sgd(weights: Given, grads: Given, state: Given | None, rate: float) -> Step: ...
def momentum(weights: Given, grads: Given, state: Given | None, rate: float, decay: float) -> Step: ...
def adam(
    weights: Given,
    grads: Given,
    state: Given | None,
    rate: float,
    decay1: float,
    decay2: float,
    epsilon: float,
) -> Step: ...
def cross_entropy(logits: Any, labels: Any) -> tuple[float, Array] | None: ...
