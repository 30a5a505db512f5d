"""Weights in a graph: variables and constants, their names in checkpoints, slices of kernels, and sums of gates."""
