"""A call of a kernel: `Pass` has its arrays and options.  Ops, layers, streams and tensors fill it in.

The forward pass reads x, the initial state and the weights, and writes y, the last state and the saved outputs of all
steps.  A cell's kernel does not write those that are NULL.

The backward pass reads x, y, the initial state and the saved outputs, all without gaps, and weights; further the
gradients of y and of the last state.  It writes the other gradients.

With weights as in PyTorch rows of x and y may lie anywhere, and gradients of x and of weights are not computed where
they are NULL.

Packing reads the weights, and of quantized matrices `codes` and `scales`; with `unpacks` it writes these two.

The caller owns all arrays.  None that is written overlaps another, but the last state may be the initial one.
"""
from libc.string cimport memset

from passes.indices cimport GRADS, INPUTS, OUTPUTS
from passes.steps cimport Layout, Steps
from product.lines cimport array_of
from product.real cimport MATRICES

cdef enum:
    STATES = 2  # at most: h [T,B,P] or [B,P], and cs [T,B,H] or [B,H]


cdef struct Pass:  # a pointer is NULL where there is no array; for states and their gradients that stands for zeros
    const void *inputs[INPUTS]  # indices.pxd has the indices of these three
    void *outputs[OUTPUTS]
    void *grads[GRADS]
    const unsigned char *step_mask  # [T,B]
    const void *reset_state[STATES]  # read where the step mask resets, if there is one
    void *reset_state_grad[STATES]  # written there; NULL if nobody asks for it
    Layout reset_layout[STATES]
    Layout reset_grad_layout[STATES]
    bint has_layouts  # of a layer, the following ones; an op's arrays have no gaps
    Layout x_layout, y_layout, y_grad_layout, x_grad_layout
    bint reverse  # the last step is processed first
    bint accumulate_x_grad  # with weights as in PyTorch: the gradient is added to what is in grads[X]
    void *packed  # the packed weights
    unsigned char *codes[MATRICES]  # of the shape of the matrix
    float *scales[MATRICES]  # [columns of the matrix]; NULL but for int8
    bint unpacks


# A kernel runs on at most `ready` threads, and returns the nanoseconds that having several of them cost.
# plan : the bytes of its plan
# scratch : its workspace, which begins at a cache line
ctypedef long long (*Kernel)(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil


cdef inline void clear_pass(Pass *a) noexcept nogil:
    """Give a call no arrays, and options that are all off."""
    memset(a, 0, sizeof(Pass))


cdef inline void set_reset_states(const Pass *a, bint is_half, Steps *s) noexcept nogil:
    """Set what h and cs are where they are reset, and where their gradients go, for a call with a step mask."""
    s.h_reset.rows, s.h_reset.layout = array_of(a.reset_state[0], is_half), a.reset_layout[0]
    s.h_reset.grads, s.h_reset.grads_layout = array_of(a.reset_state_grad[0], is_half), a.reset_grad_layout[0]
    s.cs_reset.rows, s.cs_reset.layout = array_of(a.reset_state[1], is_half), a.reset_layout[1]
    s.cs_reset.grads, s.cs_reset.grads_layout = array_of(a.reset_state_grad[1], is_half), a.reset_grad_layout[1]
