"""The cell of the module `_gru`."""
from cells.types cimport Gru

ctypedef fused cell:
    Gru
