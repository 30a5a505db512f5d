"""The cell of the module `_lstm`."""
from cells.types cimport Lstm

ctypedef fused cell:
    Lstm
