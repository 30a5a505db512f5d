"""Weights from and to Keras, PyTorch, ONNX, TensorFlow 1 and cuDNN, where both sides compute the same function.

None of these packages need be installed; only `to_onnx`, and `from_onnx` of a model, need ``onnx``. A layer that the
other side cannot express is refused with a `ConversionError` that says why, and what to do instead.

`from_keras`, `from_torch` and `from_onnx` take whole models, too, and warn of what they leave out.

Layers of blockcell read x as [T,B,I], time first, unless a call has ``batch_first=True``. Their defaults, forget_bias=0
and cell_clip=0, are those of all these packages but TensorFlow 1. Dropout acts in training only and has no weights, so
it is not converted.
"""

from .cudnn import from_cudnn
from .keras import from_keras, to_keras
from .onnx import from_onnx, to_onnx
from .shared import ConversionError
from .tf1 import from_tf1
from .torch import from_torch, to_torch

__all__ = [
    "ConversionError",
    "from_cudnn",
    "from_keras",
    "from_onnx",
    "from_tf1",
    "from_torch",
    "to_keras",
    "to_onnx",
    "to_torch",
]

ConversionError.__module__ = __name__  # what tracebacks show
