"""The cell that `_gru.pyx` compiles the passes for.

Of all files of this name, setup.py lets `from cell cimport cell` find this one for that module.  So Cython translates
each pass once in a module, and not once for every cell."""
from cells.types cimport Gru

ctypedef fused cell:
    Gru
