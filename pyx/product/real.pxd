"""The type of a module: Cython translates the kernels once, and setup.py compiles them for float and for double."""

from product.half cimport half

ctypedef fused number:  # what arrays hold, in modules that are compiled once
    float
    double
    half

cdef extern from "product/real.h":
    ctypedef float real  # in which kernels compute: float or double
    enum:
        COMPUTES_FLOAT  # whether `real` is float

cdef enum:
    MATRICES = 2  # of weights of a cell, at most
