"""What the passes call of the cell of the module `_gru_reset_after` (types.pxd has the arguments)."""
from cells.gru_reset_after cimport backward_lines, forward_cells
