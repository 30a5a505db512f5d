"""Layers that run on the kernels of the ops: `LSTM`, `GRU`, `RNN`, `Bidirectional`, `Stack`; and `Dense`, for heads.

.. code-block:: text

    y, state = layer(x, state=None, lengths=None, reset=None, reset_state=None, mask=None)   inference
    y, state, tape = layer.forward(x, ...)                                                   and a tape for backward
    d_x, d_state, grads = layer.backward(tape, d_y, d_state=None)

**Time comes first: x is (T, B, I).** For x (B, T, I) pass ``batch_first=True``.

A layer copies the weights that its constructor gets, and ``set_weights`` replaces them all at once. Each call, and each
tape, keeps the weights it started with, even if another thread replaces them meanwhile. Nothing else is kept between
calls: states are arguments and results. Several threads may use one layer.

**forget_bias and cell_clip of a layer are 0 unless given; those of `blockcell.raw_ops` are TensorFlow's 1.0 and 3.0.**

=================  =================================================================================================
``calls.py``       `BaseLayer`, the base of layers and quantized layers: ``__call__``, conversion, ``save``
``layer.py``       `Layer`: ``forward``, ``backward``, ``set_weights``, ``plan``; `Leaf`: a layer with weights
``cell.py``        `Cell`: what `LSTM`, `GRU` and `RNN` share
``lstm_gru.py``    `LSTM`, `GRU` and `RNN`: constructors, initial weights; options: `optable.LAYER_OPTIONS`
``dense.py``       `Dense`
``containers.py``  `Bidirectional`, `Stack`, and the stream of a stack
``quantized.py``   `Quantized`, which ``layer.quantize`` returns
``tape.py``        `Tape`, which ``forward`` returns
``arguments.py``   readers of arguments: arrays, lengths, masks, states, and their error messages
``masks.py``       `CountedSteps`: moves the steps that a mask counts to the front
``shared.py``      types of states; packed weights (`LeafWeights`) and their lock; plans
``loading.py``     ``blockcell.load``; what descriptions tell of layers
``structure.py``   questions of other packages about layers; which attributes are for them
``cell_ops.py``    the passes of cells in the terms of the table of ops
=================  =================================================================================================

The interface for ``convert``, ``tensorflow``, ``torch`` and ``onnx_export`` consists of the names of this package, of
``structure.py``, ``cell_ops.py`` and ``loading.py``. They import from no other module in here.
"""

from .._stream import Stream
from ..activations import Activation  # noqa: F401 (annotations of classes that say they are from this module)
from ..quantization import QuantizationReport
from .calls import BaseLayer
from .containers import Bidirectional, Stack, StackStream
from .dense import Dense
from .layer import Layer
from .lstm_gru import GRU, LSTM, RNN
from .quantized import Quantized
from .shared import Grid, GRUState, LSTMState, Plan, RNNState
from .tape import Tape

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BaseLayer",
    "Bidirectional",
    "Dense",
    "GRUState",
    "Grid",
    "LSTMState",
    "Layer",
    "Plan",
    "QuantizationReport",
    "Quantized",
    "RNNState",
    "Stack",
    "StackStream",
    "Stream",
    "Tape",
]

# Pickles name a class by its module: by this one, so that they do not depend on the files in here.
for _name in {*__all__} - {"BaseLayer", "Layer", "StackStream", "Stream", "Tape"}:
    globals()[_name].__module__ = __name__
