"""The cells, as plans and drivers know them.

The drivers (plan.pxd, forward.pxd, backward.pxd) are written for a `cell` of any of these types, and each kernel module
is compiled for its own alone: the fused type `cell` that they cimport is in modules/, one for each of them.  With all
four types Cython would translate, and C compilers read, each driver four times in every module.

The file of a cell has two functions that the drivers call, by way of `formulas` in modules/.  A step has one product
with its states, or a second one that needs the results of the first (`products_of` in plan.pxd); each function does
what follows product `n` of the step processed as number k:

    forward_cells   the states and outputs of the panels j0 to j1 and the slots b0 to b1
    backward_lines  the gradients of the lines j0 to j1 of a row, of the batch row in `slot`

    p         the plan: sizes, strides, the steps, and where everything is in scratch
    inputs    the arrays of the call by their numbers (operands.pxd); NULL for one that the call has not
    outputs   likewise; rows (t, b) of y and of saved values are written here, and nobody reads them in this pass
    z         the product: for each panel, z_panel reals apart, and each slot from b0 on LINES lines, of which the
              panel has some; read only
    rows      scratch of a thread's group, with the states of all slots; read, and written for the next step
    product   what the product gives, those lines: first the gradient of h that the steps after this one give; read
              only, and apart from `scratch`
    scratch   scratch memory of the call: d, d_h and d_cs, of which the function reads and writes these lines alone
"""
from cells.activations cimport Activation, activation_of
from product.panels cimport MATRICES
from product.quantized cimport UNQUANTIZED

cdef extern from "cells/table.h":
    ctypedef struct CellRow:
        int products, matrices, separate, states, biases, peepholes, saved
        int[MATRICES] gates
        double forward, backward
    const CellRow LSTM, GRU, GRU_RESET_AFTER, RNN


cdef struct Lstm:
    Py_ssize_t[MATRICES] gates  # that each matrix of weights has
    bint transposed  # weights and their gradients are as in PyTorch: for x and for h an array each, transposed
    int format  # how packed weights are quantized
    Activation activation, recurrent  # of states, by default tanh; of gates, by default sigmoid
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


cdef struct ResetAfter:  # the GRU that resets after the product
    Py_ssize_t[MATRICES] gates
    bint transposed
    int format
    Activation activation, recurrent


cdef struct Rnn:
    Py_ssize_t[MATRICES] gates
    bint transposed
    int format
    Activation activation


ctypedef fused gated:
    Lstm
    Gru
    ResetAfter


ctypedef fused any_cell:
    Lstm
    Gru
    ResetAfter
    Rnn


cdef inline const CellRow *row_of(const any_cell *c) noexcept nogil:
    """Return the row of the table of cells (table.h) for a type of cell; compilers know what it holds."""
    if any_cell is Lstm:
        return &LSTM
    elif any_cell is Gru:
        return &GRU
    elif any_cell is ResetAfter:
        return &GRU_RESET_AFTER
    else:
        return &RNN


cdef inline void set_matrices(any_cell *c) noexcept nogil:
    """Set what every cell has of its matrices: gates as in the table, float weights, as TensorFlow lays them out."""
    cdef int n
    for n in range(MATRICES):
        c.gates[n] = row_of(c).gates[n]
    c.transposed, c.format = False, UNQUANTIZED


cdef inline void use_activations(gated *c, activation, recurrent):
    """Set a layer's activations, `Numbers` of blockcell/activations.py."""
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent)
