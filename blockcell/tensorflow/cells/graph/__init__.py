"""Reading a TensorFlow graph backwards: the table of ops, inputs, functions, loops, array slices and activations."""
