"""What the passes call of the cell of the module `_rnn` (types.pxd has the arguments)."""
from cells.rnn cimport backward_lines, forward_cells
