"""Find the RNNs, LSTMs and GRUs of TensorFlow graphs and checkpoints, and make layers of them.

A graph becomes layers in five steps. The search goes through all nodes: a block op is a cell by itself, and the last
node of a step is matched backwards with the patterns of an LSTM, a GRU and an RNN. Whatever resembles a cell and
matches none is refused with a reason. The kernels of a match are traced to variables and constants, which are sliced
and joined to the weights of a layer. From the x of each cell the graph is followed back to other cells, past loops and
reversals, which gives directions and the order of layers. `Found.layer` makes the layer of one cell and compares it
with the nodes of the graph in float64; `Cells.layer` stacks the layers of all cells.

A folder imports from those above it, and from ``blockcell.tensorflow``:

==================  ===========================================================================================
``graph/``          what ops do, the graph read backwards, loops, array slices, activations
``weights/``        variables and constants, names in checkpoints, slices of kernels, sums of gates
``cell/``           a cell that was found, its layer, and the check of the layer against the nodes
``patterns/``       LSTM, GRU and RNN of many nodes, as TensorFlow, Keras and cuDNN write them
``search/``         block ops, cells of many nodes, cells of checkpoints without graph; refusals and their reasons
``structure/``      sequences, directions, merged outputs, initial states, stacks of layers
``find_cells.py``   all cells of a model, with their names and connections
==================  ===========================================================================================
"""

from .cell.found_cell import Found
from .cell.layer_check import Check
from .find_cells import find_cells
from .structure.layer_stack import Cells

__all__ = ["Cells", "Check", "Found", "find_cells"]
