"""The cell of the module `_gru`."""
from cells cimport Gru

ctypedef fused cell:
    Gru
