"""The cell of the module `_rnn`."""
from cells.types cimport Rnn

ctypedef fused cell:
    Rnn
