"""The types of a module: Cython translates the kernels once, and setup.py compiles them for arrays of each type."""

from product.half cimport half

ctypedef fused number:  # what arrays hold, in modules that are compiled once
    float
    double
    half

cdef extern from "product/real.h":
    ctypedef float real  # in which kernels compute: float or double
    # What arrays of the caller hold: float, double, or half, which is computed as float.  To Cython it is another type
    # than `real`, so that functions may take either.
    ctypedef double store
    enum:  # the types of `store`, in the order of DTYPES in blockcell/optable.py
        FLOAT, DOUBLE, HALF
        STORAGE  # that of this module
        COMPUTES_FLOAT  # whether `real` is float
        STORES_HALF  # whether `store` is half

cdef enum:
    MATRICES = 2  # of weights of a cell, at most
