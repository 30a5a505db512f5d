"""The arrays of one pass of a layer, as its kernels get them; a pointer is NULL where there is none.

Forward, the kernel reads x, packed weights and the states in `first`, NULL for zeros, and writes y, the states in
`last` and, for a tape, `saved`; a cell's kernel leaves out those that are NULL.  Backward it reads all of x, y, `first`
and `saved`, which have no gaps then, weights, the gradient of y and those of `last`, NULL for zeros, and writes the
other gradients.  With weights as PyTorch has them, rows of x and y may lie anywhere, and gradients to x and to the
weights are left out where they are NULL.
"""
from passes.steps cimport Layout

cdef enum:
    STATES = 2  # at most
    WEIGHTS = 6  # likewise; in the order of the table of ops, and then those that only layers have


cdef struct Pass:
    const void *x
    void *y
    const void *first[STATES]
    void *last[STATES]
    void *saved  # the other outputs of the steps, one array after the other
    const unsigned char *marks
    bint reverse
    void *packed
    Layout x_layout, y_layout
    const void *weights[WEIGHTS]
    const void *y_grad
    const void *last_grad[STATES]
    void *x_grad
    void *first_grad[STATES]
    void *weight_grads[WEIGHTS]
    Layout y_grad_layout, x_grad_layout
    bint adds  # with weights as PyTorch has them: x_grad is added to what is there


# A kernel of a layer: with its plan, on so many threads, with scratch that begins at a cache line.
ctypedef long long (*Run)(const void *plan, int ready, void *work, const Pass *a) noexcept nogil
