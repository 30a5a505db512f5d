"""Read TensorFlow checkpoints, SavedModels and graphs, and find their RNN cells, without TensorFlow.

=====================================  ===============================================================
``model.ckpt`` (``model.ckpt.index``)  a checkpoint: an index and data files
a folder with ``checkpoint``           the checkpoint that it names
a folder with ``saved_model.pb``       a SavedModel, its graphs and variables
``.meta``                              the graph of the checkpoint beside it
``.pb``, ``.pbtxt``                    a graph, frozen: its variables are constants
``.pbmm``                              such a graph in a memory-mapped package, as DeepSpeech has them
=====================================  ===============================================================

.. code-block:: python

    import blockcell.tensorflow

    model = blockcell.tensorflow.open("model.ckpt")
    model.variables["rnn/lstm_cell/kernel"]
    print(model.cells)                                 # RNNs, LSTMs and GRUs, or why one is refused
    layer = model.cells["rnn/lstm_cell"].layer()

The search finds the block ops (LSTMBlockCell, BlockLSTM, BlockLSTMV2, GRUBlockCell) and cells of many nodes:
BasicLSTMCell, LSTMCell, GRUCell, CudnnCompatibleLSTMCell and CudnnCompatibleGRUCell of TensorFlow 1, LSTM and GRU of
Keras, and other cells with the same equations.

Files are mapped into memory, and only requested parts are read. Files are not trusted: a fault in a file raises a
`blockcell.FormatError`, in time and memory bounded by the size of the file. Nothing is unpickled or executed.

=================  =================================================================================================
``model.py``       `open`: which format a path has, and the model in it
``checkpoint.py``  checkpoints: names and tensors, also in slices
``table.py``       sorted tables (LevelDB), in which checkpoints are stored
``objects.py``     object graphs of TensorFlow 2
``variables.py``   the variables of a model
``graphs.py``      GraphDef, MetaGraphDef, SavedModel
``tensors.py``     dtypes, shapes, and the values of a TensorProto
``wire.py``        protobuf's wire format
``schema.py``      names and numbers of protobuf's fields
``text.py``        protobuf's text format
``mapped.py``      files in memory
``crc32c.py``      checksums
=================  =================================================================================================
"""

from .cells import Cells, Check, Found
from .graphs import Function, Graph, Node
from .model import Model, open
from .tensors import Tensor
from .variables import Variables

__all__ = ["Cells", "Check", "Found", "Function", "Graph", "Model", "Node", "Tensor", "Variables", "open"]
