"""The arrays of one pass of a layer, as its kernels get them; a pointer is NULL where there is none.

Forward, the kernel reads x, packed weights and the states in `initial_state`, NULL for zeros, and writes y, the
states in `last_state` and, for a tape, `saved`; a cell's kernel leaves out those that are NULL.  Backward it reads all
of x, y, `initial_state` and `saved`, which have no gaps then, weights, the gradient of y and those of `last_state`,
NULL for zeros, and writes the other gradients.  With weights as PyTorch has them, rows of x and y may lie anywhere, and
gradients to x and to the weights are left out where they are NULL.

Where weights are packed, a kernel reads `weights`, and of quantized matrices `codes` and `scales` at the same indices,
or writes these two.

The caller owns all arrays.  One that is written overlaps no other, but a state in `last_state` may be that in
`initial_state`.
"""
from cpython.pycapsule cimport PyCapsule_New

from passes.steps cimport Layout

cdef enum:
    STATES = 2  # at most
    WEIGHTS = 6  # likewise; in the order of the table of ops, and then those that only layers have


cdef struct Pass:
    const void *x  # [T,B,I]
    void *y  # [T,B,P]
    const void *initial_state[STATES]  # [B,H], but h, the last of them, [B,P]
    void *last_state[STATES]
    void *saved  # the other outputs of the steps, one array [T,B,H] after the other
    const unsigned char *step_mask  # [T,B]
    bint reverse
    void *packed
    Layout x_layout, y_layout
    const void *weights[WEIGHTS]
    unsigned char *codes[WEIGHTS]  # of the shape of the matrix
    float *scales[WEIGHTS]  # a number for each column of the matrix; NULL but for int8
    const void *y_grad  # this one and all below are of the shape of what they are gradients to
    const void *last_state_grad[STATES]
    void *x_grad
    void *initial_state_grad[STATES]
    void *weight_grads[WEIGHTS]
    Layout y_grad_layout, x_grad_layout
    bint accumulate_x_grad  # with weights as PyTorch has them: x_grad is added to what is there


# A kernel of a layer: with its plan, on so many threads, with a workspace that begins at a cache line.  It returns the
# nanoseconds that having several threads cost.
ctypedef long long (*LayerKernel)(const void *plan, int ready, void *work, const Pass *a) noexcept nogil


cdef inline tuple kernel_with_plan(LayerKernel kernel, const void *plan, Py_ssize_t size, tuple requirements):
    """Return what `plan_from` in _layers.pyx takes: a kernel, a copy of its plan, which has `size` bytes, and what the
    plan requires (`requirements_of` in cost.pxd)."""
    return (PyCapsule_New(<void *> kernel, NULL, NULL), (<const char *> plan)[:size]) + requirements
