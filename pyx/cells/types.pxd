"""The cells, as plans and drivers know them.

The drivers (plan.pxd, forward.pxd, backward.pxd) are written for a `cell` of any of these types, and each kernel module
is compiled for its own alone: the fused type `cell` that they cimport is in modules/, one for each of them.  With all
four types Cython would translate, and C compilers read, each driver four times in every module.
"""
from cells.activations cimport SIGMOID, TANH, Activation, activation_of
from product.panels cimport MATRICES


cdef struct Lstm:
    Py_ssize_t[MATRICES] gates  # that each matrix of weights has
    bint transposed  # weights and their gradients are as in PyTorch: for x and for h an array each, transposed
    int format  # how packed weights are quantized
    Activation activation, recurrent  # in place of tanh and of sigmoid
    bint usual  # whether they are these: then they are written into the cells' loops
    double forget_bias, cell_clip
    bint peephole
    Py_ssize_t[4] column  # where the gates i, ci, f, o begin in a row of w, in units of H
    bint coupled  # i is 1 - f, and w has no column for it
    Py_ssize_t P  # to how many numbers o * co is projected, which are h; 0: it is h
    double proj_clip


cdef struct Gru:
    Py_ssize_t[MATRICES] gates
    bint transposed
    int format
    Activation activation, recurrent
    bint usual


cdef struct ResetAfter:  # the GRU that resets after the product
    Py_ssize_t[MATRICES] gates
    bint transposed
    int format
    Activation activation, recurrent
    bint usual


cdef struct Rnn:
    Py_ssize_t[MATRICES] gates
    bint transposed
    int format
    Activation activation


ctypedef fused gated:
    Lstm
    Gru
    ResetAfter


cdef inline void use_activations(gated *c, activation, recurrent):
    """Those of a layer, as `Numbers` of blockcell/activations.py."""
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent)
    c.usual = c.activation.number == TANH and c.recurrent.number == SIGMOID
