"""The cell of the module `_gru_reset_after`."""
from cells.types cimport ResetAfter

ctypedef fused cell:
    ResetAfter
