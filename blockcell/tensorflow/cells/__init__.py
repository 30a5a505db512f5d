"""Finding LSTMs and GRUs in graphs and checkpoints of TensorFlow's.

From the graph up, each file uses those before it:

=====================================================  ===========================================================
``ops``, ``reader``                                    what ops do; a graph, read backwards
``sources``, ``savers``, ``views``, ``pieces``         variables and constants, their names in checkpoints, parts of
                                                       them, and weights put together
``sums``, ``match``, ``lstm``, ``gru``                 the patterns of cells
``recurrences``, ``refusals``                          what is meant as a cell and is none, and why
``found``, ``evaluate``                                a cell that was found, and the check against its nodes
``blocks``, ``composed``, ``named``                    cells of one node, of many nodes, and without a graph
``loops``, ``steps``, ``sequences``, ``directions``    what a cell runs over, and in which direction
``find``, ``cells``                                    all cells of a model, and the layer that they are together
=====================================================  ===========================================================
"""

from .cells import Cells
from .find import find
from .found import Found

__all__ = ["Cells", "Found", "find"]
