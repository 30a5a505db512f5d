"""The cell of the module `_gru_reset_after`."""
from cells cimport ResetAfter

ctypedef fused cell:
    ResetAfter
