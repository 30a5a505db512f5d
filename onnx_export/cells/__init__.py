"""The nodes of an op or of a layer's cell, forward or backward, of which all models consist."""
