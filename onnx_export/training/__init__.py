"""`training_step`: a layer's graph with a loss and an optimizer."""

from .step import training_step

__all__ = ["training_step"]
