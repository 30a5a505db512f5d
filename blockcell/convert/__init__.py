"""Convert weights from and to Keras, PyTorch and ONNX, and from TensorFlow 1.

None of these packages need be installed; only `to_onnx`, and `from_onnx` of a model, need ``onnx``. If the other side
cannot express a layer, a `ConversionError` names the reason and a remedy. `from_keras`, `from_torch` and `from_onnx`
take whole models, too, and warn of skipped parts.

Layers of blockcell read x as [T,B,I], time first, unless a call has ``batch_first=True``. Their defaults, forget_bias=0
and cell_clip=0, are the defaults of all these packages except TensorFlow 1. Dropout acts in training only and has no
weights, so it is not converted.

Each module imports only from those above it:

========================  ==============================================================================================
``shared.py``             arrays to cells and back, refusals of what a format lacks
``comparison.py``         a converted layer and its source on the same random inputs
``models.py``             whole models: layers that stand one behind the other, and their initial states
``tf1.py``                `from_tf1`, TensorFlow 1 checkpoints
``torch_run.py``          a PyTorch module on random inputs, beside the layers made of it
``torch.py``              `from_torch`, `to_torch`
``onnx_activations.py``   activations of nodes, and their ``clip``
``onnx_graph.py``         a graph: its constants, and which nodes move numbers
``onnx_run.py``           models on random inputs, node by node: the module that imports onnxruntime
``onnx_node.py``          an LSTM, GRU or RNN node as a layer
``onnx_steps.py``         the layers of an ONNX graph, and their order
``onnx.py``               `from_onnx`, `to_onnx`
``hdf5.py``               HDF5 files that are not trusted: the module that imports h5py
``keras_description.py``  `KerasLayer`, which describes a layer or a model of Keras, and of those in memory and in JSON
``keras_files.py``        descriptions from files, with the arrays in them
``keras_layers.py``       the layers made of descriptions and of arrays
``keras_run.py``          models in memory, run and compared with the layers that they became
``keras.py``              `from_keras`, `to_keras`
========================  ==============================================================================================

The interface for ``keras``, ``tensorflow`` and ``onnx_export`` consists of the names of this package, of ``tf1.py``,
``comparison.py``, ``shared.py``, ``onnx_activations.py``, ``onnx_graph.py``, ``keras_layers.py`` and
``keras_description.py``.
"""

from .keras import from_keras, to_keras
from .onnx import from_onnx, to_onnx
from .shared import ConversionError
from .tf1 import from_tf1
from .torch import from_torch, to_torch

__all__ = [
    "ConversionError",
    "from_keras",
    "from_onnx",
    "from_tf1",
    "from_torch",
    "to_keras",
    "to_onnx",
    "to_torch",
]

ConversionError.__module__ = __name__  # what tracebacks show
