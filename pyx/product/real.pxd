"""The compute type of every kernel: one source, compiled for both."""

ctypedef fused real:
    float
    double
