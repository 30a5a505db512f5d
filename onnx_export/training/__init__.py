"""`training_step`: a layer's graph with a loss and an optimizer."""
