"""What a cell is to plans and passes: `Cell`, the options of an op or layer, and `CellTraits`, what its kind has.

Each file of a cell ends with its traits: numbers, and the functions that the passes call.  A step has one product with
its states, or a second one that needs the results of the first.  Two kinds of functions compute what follows product n
of the step that is processed as number k:

    forward_cells   [n] the states and outputs of the panels j0 to j1 and the slots b0 to b1
    backward_lines  the gradients of the lines j0 to j1 of the batch row in slot b

Their arguments:

    call      a Forward or a Backward (plan.pxd): the cell, sizes, strides, the steps, the caller's arrays and scratch
              memory.  Forward, the rows (t, row) of y and of saved values are written, and no pass reads them back.
              Backward, the function writes the lines j0 to j1 of d, d_h and d_cs in scratch memory alone
    step      the product of a step; the states of all slots are read, and written for the next step
    n         backward, 1 is the second matrix, whose product follows that of n = 0
    z         the product: for each panel, step.z_panel reals apart, and for each slot from b0 on LINES lines, of which
              line u * gates + gate has a gate of line u of the panel's units (panels.pxd); read only
    product   the lines j0 to j1 of the product; n = 0: of the gradient of h that the steps after this one give;
              read only, and outside of scratch memory

Two more may be NULL.  `load_peepholes` loads line j of the peepholes, weights that no product has, to `lines` in
scratch memory; a cell with peepholes has one line of units in a panel.  `store_remaining_grads` stores one part of the
gradients that only this cell has, once all of d is computed.

A line is 64 bytes of neighbouring units, L numbers.  j is a panel or, where a panel has one line of units, a line; l is
a lane of a line, t a step, row a batch row, b its slot.
"""
from libc.string cimport memset

from product.lines cimport Array
from product.real cimport MATRICES, real

cdef enum:
    PRODUCTS = 2  # of a step, at most

cdef enum:  # the kinds of cells
    LSTM, GRU, GRU_RESET_AFTER, RNN
    CELL_KINDS

cdef enum:  # activations, in the order of blockcell/activations.py
    TANH, SIGMOID, RELU, LEAKY_RELU, ELU, SELU, SOFTPLUS, SOFTSIGN, EXPONENTIAL, HARD_SIGMOID, LINEAR


cdef struct Activation:
    int number
    double a, b  # its parameters


cdef struct StepProduct:  # a product of a step with the rows of a part
    int n  # which one, 0 or 1
    Py_ssize_t k  # the number of the step
    real *rows  # scratch as the rows of the part's group lie in it
    Py_ssize_t b0, b1  # the slots with active rows
    const real *h  # what the product reads: h of the step before, h_prev * r or m, or its codes; the row of slot 0
    const real *x  # the rows of x, that of slot b0 first; read if z has no product with x
    real *z  # panel 0 of x @ w_x + b, that of slot b0 first; NULL where product n has no such z
    Py_ssize_t z_panel  # reals from one panel of z to the next


cdef struct Cell
ctypedef void (*ForwardCells)(
    const void *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil
ctypedef void (*BackwardLines)(
    const void *call, int n, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *product
) noexcept nogil
ctypedef void (*LoadPeepholes)(
    const Cell *c, real *lines, const Array *inputs, Py_ssize_t H, Py_ssize_t j
) noexcept nogil
ctypedef void (*StoreGrads)(const void *call, Py_ssize_t part, Py_ssize_t parts) noexcept nogil


cdef struct CellTraits:  # what all cells of a kind have; a projected LSTM has one product and one matrix more
    int products  # of a step that read x; each needs the results of the one before
    int matrices  # of weights, [w_x; w_h] each
    int state_matrices  # by which a step's d is multiplied for the gradient of the state before it
    int[MATRICES] gates  # of each matrix: its columns in units of H; a coupled LSTM has no first gate
    int separate  # 1 if the last gate's products with x and with h are not added
    int states  # that a step hands on: h, or cs and h
    int peepholes
    int saved  # arrays [T,B,H] on the tape of a layer beside h, in the order of the enum in indices.pxd
    double forward_time, backward_time  # nanoseconds of a line of units of one row in a step, beside the products
    int factor  # the saved output that is a factor of the second product's input: r of h_prev * r, co of o * co
    ForwardCells[PRODUCTS] forward_cells, default_forward_cells  # of each product of a step; with default activations
    # Set alone: in a tuple, clang does not take the attributes of `noinline_void`
    BackwardLines backward_lines, default_backward_lines
    LoadPeepholes load_peepholes
    StoreGrads store_remaining_grads


cdef struct Cell:  # the options of an op or a layer, and below what `use_traits` sets
    int kind
    bint is_half  # all arrays of the call are float16, and states are rounded to it after each step
    bint transposed  # weights and their gradients are as in PyTorch: an array for x and one for h, both transposed
    int format  # how packed weights are quantized
    Activation activation, recurrent  # of states, by default tanh; of gates, by default sigmoid
    # Of an LSTM alone, else zeros:
    double forget_bias, cell_clip
    bint peephole
    Py_ssize_t[4] column  # where the gates i, ci, f, o begin among the columns of w, in units of H
    bint coupled  # i = 1 - f, and w has no columns for i
    Py_ssize_t P  # the size of h, a projection of o * co; 0: h is o * co
    double proj_clip
    const CellTraits *traits
    Py_ssize_t[MATRICES] gates  # of each matrix of weights
    bint projects  # h is a projection; it has the last product and the last matrix, without w_x or a bias
    int products, matrices  # of a step, of weights
    const ForwardCells *forward_cells  # those of its traits for its activations
    BackwardLines backward_lines


cdef inline CellTraits no_traits() noexcept nogil:
    """Return traits that are all 0 or NULL."""
    cdef CellTraits traits
    memset(&traits, 0, sizeof(CellTraits))
    return traits


cdef inline Activation activation_of(numbers):
    """Return the activation with the number and parameters of a `Numbers` (blockcell/activations.py)."""
    cdef Activation f
    f.number, f.a, f.b = numbers
    return f


cdef inline Cell cell_of(int kind, activation, recurrent_activation):
    """Return a cell of this kind with these activations, weights as TensorFlow has them, and all other options off.

    activation, recurrent_activation : `Numbers` of blockcell/activations.py
    """
    cdef Cell c
    memset(&c, 0, sizeof(Cell))
    c.kind, c.column = kind, [0, 1, 2, 3]
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent_activation)
    return c


cdef inline void use_traits(Cell *c, const CellTraits *traits) noexcept nogil:
    """Give a cell the traits of its kind, and what it has of these by its options."""
    cdef int n
    c.traits = traits
    for n in range(MATRICES):
        c.gates[n] = traits.gates[n]
    c.gates[0] = c.gates[0] - c.coupled
    c.projects = c.P > 0
    c.products, c.matrices = traits.products + c.projects, traits.matrices + c.projects
    c.forward_cells, c.backward_lines = traits.forward_cells, traits.backward_lines
    if c.recurrent.number == SIGMOID and c.activation.number == TANH:
        c.forward_cells, c.backward_lines = traits.default_forward_cells, traits.default_backward_lines
