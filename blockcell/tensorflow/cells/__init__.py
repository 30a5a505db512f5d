"""Finding RNNs, LSTMs and GRUs in graphs and checkpoints of TensorFlow's.

From the graph up, each file uses those before it:

===================================================  ==========================================================
``ops``, ``reader``                                  what ops do; a graph, read backwards
``sources``, ``savers``                              variables and constants, and their names in checkpoints
``views``, ``pieces``                                parts of them, and weights put together of such
``activations``, ``sums``                            what goes into a gate, and the activation behind it
``match``, ``lstm``, ``gru``, ``rnn``                the patterns of cells
``check``, ``found``, ``evaluate``                   a cell that was found, and the check against its nodes
``blocks``                                           cells of one node
``recurrences``, ``refusals``                        what is meant as a cell and is none, and why
``named``, ``composed``                              cells without a graph, and cells of many nodes
``loops``, ``states``                                what states are before the first step
``steps``, ``directions``, ``sequences``             what a cell runs over, and in which direction
``find``, ``cells``                                  all cells of a model, and the layer that they are together
===================================================  ==========================================================
"""

from .cells import Cells
from .check import Check
from .find import find
from .found import Found

__all__ = ["Cells", "Check", "Found", "find"]
