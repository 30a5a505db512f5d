"""The type in which a kernel computes: one source, compiled for both."""

ctypedef fused real:
    float
    double
