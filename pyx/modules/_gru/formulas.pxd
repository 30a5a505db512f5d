"""What the passes call of the cell of the module `_gru` (types.pxd has the arguments)."""
from cells.gru cimport backward_lines, forward_cells
