"""Find the RNNs, LSTMs and GRUs of TensorFlow graphs and checkpoints, and make layers of them.

A graph becomes layers in five steps. The search goes through all nodes: a block op is a cell by itself, and the last
node of a step is matched backwards with the patterns of an LSTM, a GRU and an RNN. Whatever resembles a cell and
matches none is refused with a reason. The kernels of a match are traced to variables and constants, which are sliced
and joined to the weights of a layer. From the x of each cell the graph is followed back to other cells, past loops and
reversals, which gives directions and the order of layers. `Found.layer` makes the layer of one cell and compares it
with the nodes of the graph in float64. `Cells.layer` stacks the layers of all cells, and compares what the layer hands
from cell to cell with what the nodes between the cells do to random numbers.

A folder imports from those above it, and from ``blockcell.tensorflow``:

================================  =============================================================================
``graph/``
``op_table.py``                   what each op does: activations, arrays, lists, why an op is in no cell
``graph_reader.py``               a graph read backwards, into functions and out of them, with a limit of steps
``while_loops.py``                loops of TensorFlow 1 (Enter to Exit) and 2 (While), and their variables
``array_slices.py``               what Split, StridedSlice and such take of an array
``activations.py``                which activation some nodes are
``node_functions.py``             what the nodes between cells compute, in numpy
``graph_evaluation.py``           values of a graph from given values, through calls, loops and lists
``dependences.py``                which values depend on others, forwards

``weights/``
``weight_slices.py``              slices of kernels and biases, joined to the weights of a layer
``weight_sources.py``             variables and constants, joined, converted or in parts; their names in checkpoints
``gate_sums.py``                  products, biases and numbers before the activation of a gate

``cell/``
``layer_check.py``                a layer compared with nodes, on random rows; the bound of its error
``cell_definition.py``            class, weights and attributes of a cell; shapes that do not fit
``node_evaluation.py``            the nodes of a step, computed in float64
``found_cell.py``                 `Found`: the layer of a cell, and its check

``patterns/``                     variants of a cell, each matched from the last node of its step
``pattern.py``                    what all patterns share
``lstm.py``, ``gru.py``           with their variants: projection, peepholes, coupled gates, reset after
``rnn.py``                        an RNN of one product

``search/``
``block_ops.py``                  cells that are one op, such as BlockLSTM
``recurrences.py``                cycles of nodes with weights
``refusals.py``                   why what resembles a cell is none
``subgraphs.py``                  cells of many nodes
``checkpoint_names.py``           cells of a checkpoint without graph, by names and shapes

``structure/``
``sequence_steps.py``             one node back along a sequence, with its lengths and masks
``sequences.py``                  which sequence a cell reads, through loops, reversals and joins; its direction
``initial_states.py``             states before the first step
``output_forms.py``               what a value is made of that rearranges the outputs of both directions
``connection_check.py``           a layer compared with the nodes between its cells, on random numbers
``layer_stack.py``                `Cells`: the layer of all cells, or why they are not one stack

``find_cells.py``                 all cells of a model, or none; their copies, names and connections
================================  =============================================================================

The docstring of ``blockcell.tensorflow`` lists what reads files below all this, from ``wire.py`` to ``model.py``.
"""

from .cell.found_cell import Found
from .cell.layer_check import Check
from .find_cells import find_cells
from .structure.layer_stack import Cells

__all__ = ["Cells", "Check", "Found", "find_cells"]
