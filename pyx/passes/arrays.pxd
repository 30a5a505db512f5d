"""The arrays of a call of a layer, as its kernels get them; `Pass` has the arrays of one pass.

The forward pass reads x, the packed weights and the initial state, and writes y, the last state and, for a tape, the
saved outputs.  A cell's kernel does not write those that are NULL.

The backward pass reads x, y, the initial state and the saved outputs, all without gaps, and weights; further the
gradients of y and of the last state.  It writes the other gradients.

With weights as in PyTorch rows of x and y may lie anywhere, and gradients of x and of weights are not computed where
they are NULL.

Packing reads `weights`, and of quantized matrices `codes` and `scales` at the same indices; unpacking writes these two.

The caller owns all arrays.  None that is written overlaps another, but the last state may be the initial one.
"""
from cpython.pycapsule cimport PyCapsule_New

from passes.steps cimport Layout

cdef enum:
    STATES = 2  # at most
    WEIGHTS = 6  # at most; in the order of the table of ops, then those that only layers have


cdef struct Pass:  # a pointer is NULL where there is no array; for states and their gradients that stands for zeros
    const void *x  # [T,B,I]
    void *y  # [T,B,P]
    const void *initial_state[STATES]  # [B,H] but h, the last one, [B,P]
    void *last_state[STATES]  # [B,H] but h, the last one, [B,P]
    void *saved  # outputs of the steps beside h, one array [T,B,H] after the other
    const unsigned char *step_mask  # [T,B]
    const void *reset_state[STATES]  # [T,B,H] but h, [T,B,P]; read where the step mask resets, if there is one
    Layout reset_layout[STATES]
    bint reverse  # the last step is processed first
    void *packed  # the packed weights
    Layout x_layout, y_layout
    const void *weights[WEIGHTS]
    unsigned char *codes[WEIGHTS]  # of the shape of the matrix
    float *scales[WEIGHTS]  # [columns of the matrix]; NULL but for int8
    const void *y_grad  # this gradient and all below have the shapes of their arrays
    const void *last_state_grad[STATES]
    void *x_grad
    void *initial_state_grad[STATES]
    void *reset_state_grad[STATES]  # written where the step mask resets; NULL if nobody asks for it
    Layout reset_grad_layout[STATES]
    void *weight_grads[WEIGHTS]
    Layout y_grad_layout, x_grad_layout
    bint accumulate_x_grad  # with weights as in PyTorch: the gradient is added to what is in x_grad


# The type of a layer's kernel.  It runs on at most `ready` threads, and returns the nanoseconds that having several of
# them cost.
# plan : the bytes of its plan
# scratch : its workspace, which begins at a cache line
ctypedef long long (*LayerKernel)(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil


cdef inline tuple kernel_with_plan(LayerKernel kernel, const void *plan, Py_ssize_t size, tuple requirements):
    """Return a kernel, a copy of its plan and what the plan requires, as `plan_from` in _layers.pyx takes them.

    plan : of `size` bytes; it is copied
    requirements : of `requirements_of` in cost.pxd
    """
    return (PyCapsule_New(<void *> kernel, NULL, NULL), (<const char *> plan)[:size]) + requirements
