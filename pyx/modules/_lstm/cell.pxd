"""The cell that `_lstm.pyx` compiles the passes for: `cell` as a fused type, and `Cell` for structs.

Of all files of this name, setup.py lets `from cell cimport cell` find this one for that module.  So Cython translates
each pass once in a module, and not once for every cell."""
from cells.types cimport Lstm
from cells.types cimport Lstm as Cell

ctypedef fused cell:
    Lstm
