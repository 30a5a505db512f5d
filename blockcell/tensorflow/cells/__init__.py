"""Finding LSTMs and GRUs in graphs and checkpoints of TensorFlow's.

From the graph up, each file uses those before it:

===================================================  ==========================================================
``ops``, ``reader``                                  what ops do; a graph, read backwards
``sources``, ``savers``                              variables and constants, and their names in checkpoints
``views``, ``pieces``                                parts of them, and weights put together of such
``sums``, ``match``, ``lstm``, ``gru``               the patterns of cells
``found``, ``evaluate``                              a cell that was found, and the check against its nodes
``blocks``, ``named``                                cells of one node, and those without a graph
``recurrences``, ``refusals``                        what is meant as a cell and is none, and why
``composed``                                         cells of many nodes
``loops``, ``steps``, ``directions``, ``sequences``  what a cell runs over, and in which direction
``find``, ``cells``                                  all cells of a model, and the layer that they are together
===================================================  ==========================================================
"""

from .cells import Cells
from .find import find
from .found import Found

__all__ = ["Cells", "Found", "find"]
