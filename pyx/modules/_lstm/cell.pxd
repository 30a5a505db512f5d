"""The cell of the module `_lstm`."""
from cells cimport Lstm

ctypedef fused cell:
    Lstm
