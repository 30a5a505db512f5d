"""One cell that was found: its attributes, its layer, and the check of the layer against the nodes of the graph."""
