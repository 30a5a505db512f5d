"""The types of cells, and what the file of a cell has to have.

Plans and passes (plan.pxd, forward.pxd, backward.pxd) are written for a `cell` of any of these types, and each kernel
module is compiled for its own type alone: pyx/modules/ has a fused type `cell` for each module.  With all four types
Cython would translate, and C compilers would read, each pass four times in every module.

The file of a cell has two functions that the passes call, by way of `formulas` in pyx/modules/.  A step has one product
with its states, or a second one that needs the results of the first.  Each function computes what follows product n of
the step that is processed as number k:

    forward_cells   the states and outputs of the panels j0 to j1 and the slots b0 to b1
    backward_lines  the gradients of the lines j0 to j1 of the batch row in slot b

Their arguments:

    p         the plan: sizes, strides, the steps, and where everything is in scratch memory
    c         the cell, under its own name
    n         0, or 1 if a step has a second product
    inputs    the caller's arrays by the indices of operands.pxd, NULL for one that the call does not have
    outputs   the caller's arrays by these indices, NULL for one that the call does not have; the rows (t, row) of y and
              of saved values are written here, and no pass reads them back
    z         the product: for each panel, z_panel reals apart, and for each slot from b0 on LINES lines, of which the
              panel uses some; read only
    rows      the scratch memory of the thread's group: the states of all slots are read, and written for step k + 1
    product   the lines j0 to j1 of the product; n = 0: of the gradient of h that the steps after this one give;
              read only, and outside `scratch`
    scratch   the workspace of the call: the function reads and writes the lines j0 to j1 of d, d_h and d_cs alone

A line is 64 bytes of neighbouring units, L numbers.  j is a panel or, where a panel has one line of units, a line; l is
a lane of a line, t a step, row a batch row, b its slot.
"""
from cells.activations cimport Activation, activation_of
from product.panels cimport MATRICES
from product.quantized cimport UNQUANTIZED

cdef extern from "cells/table.h":
    ctypedef struct CellRow:
        int products, matrices, state_matrices, separate, states, biases, peepholes, saved
        int[MATRICES] gates
        double forward_time, backward_time
    const CellRow LSTM, GRU, GRU_RESET_AFTER, RNN


cdef struct Lstm:
    Py_ssize_t[MATRICES] gates  # of each matrix of weights
    bint transposed  # weights and their gradients are as in PyTorch: an array for x and one for h, both transposed
    int format  # how packed weights are quantized
    Activation activation, recurrent  # of states, by default tanh; of gates, by default sigmoid
    double forget_bias, cell_clip
    bint peephole
    Py_ssize_t[4] column  # where the gates i, ci, f, o begin in a row of w, in units of H
    bint coupled  # i = 1 - f, and w has no columns for i
    Py_ssize_t P  # the size of h, a projection of o * co; 0: h is o * co
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
    """Return the row of the table of cells (table.h) for a type of cell.  Its numbers are constants to compilers."""
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
