"""The graph of a layer, forward and backward: what `export` and `training_step` share."""
