"""How cells are connected: sequences, directions, merged outputs, initial states, and stacks of layers."""
