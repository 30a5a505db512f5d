"""What the passes call of the cell of the module `_lstm` (types.pxd has the arguments)."""
from cells.lstm cimport backward_lines, forward_cells
