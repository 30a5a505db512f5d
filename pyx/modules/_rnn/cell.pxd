"""The cell of the module `_rnn`."""
from cells cimport Rnn

ctypedef fused cell:
    Rnn
