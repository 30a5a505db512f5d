"""The arrays of a layer's call under the indices of indices.pxd.

A layer gives the arrays of weights and states in an order of its own.  `set_weights`, `set_torch_weights` and
`set_states` store each of them under its index; the gradients of weights have the same order.
"""
from cells.types cimport Cell
from passes.arrays cimport Pass
from passes.indices cimport BIAS, W, W_C, W_C_H, W_H, W_P, W_P_H, WCI
from passes.steps cimport ResetState, Steps
from product.lines cimport Array, array_of, at, no_array, set_arrays

cdef inline void set_weights(const Cell *c, const void *const *weights, Array *operands) noexcept nogil:
    """Set the operands of a layer's weights.

    weights : in the order of the table of ops, then a projection's w_p; NULL where the layer has none
    operands : `inputs`; or for gradients `outputs + GRAD`; or any other INPUTS arrays
    """
    cdef int matrices = c.traits.matrices, peepholes = c.traits.peepholes, biases = c.traits.biases
    set_arrays(&operands[W], weights, matrices, c.is_half)
    set_arrays(&operands[WCI], &weights[matrices], peepholes, c.is_half)
    set_arrays(&operands[BIAS], &weights[matrices + peepholes], biases, c.is_half)
    if c.projects:
        operands[W_P] = array_of(weights[matrices + peepholes + biases], c.is_half)
        operands[BIAS + 1] = no_array()


cdef inline void set_torch_weights(
    const Cell *c, Py_ssize_t I, Py_ssize_t H, const void *const *weights, Array *operands
) noexcept nogil:
    """Set the operands of weights as PyTorch has them.

    weights : [gates * H, I], [gates * H, H], the cell's biases, a projection's [P, H]; all NULL if gradients of weights
        are skipped
    operands : as for `set_weights`
    """
    operands[W], operands[W_H] = array_of(weights[0], c.is_half), array_of(weights[1], c.is_half)
    if c.traits.separate and weights[0] is not NULL:
        operands[W_C], operands[W_C_H] = at(operands[W], c.gates[0] * H * I), at(operands[W_H], c.gates[0] * H * H)
    set_arrays(&operands[BIAS], &weights[2], c.traits.biases, c.is_half)
    if c.projects:
        operands[W_P_H], operands[BIAS + 1] = array_of(weights[3], c.is_half), no_array()


cdef inline void set_states(const Cell *c, const void *const *states, Array *operands) noexcept nogil:
    """Set the operands of states, or of their gradients, from that of h on.

    states : h; or cs and h
    operands : h, cs
    """
    cdef int i
    for i in range(c.traits.states):
        operands[c.traits.states - 1 - i] = array_of(states[i], c.is_half)


cdef inline void set_reset_state(
    const Cell *c, ResetState *reset, const Pass *a, int i, bint backward
) noexcept nogil:
    """Set what state number i of `a` is where it is reset; in the backward pass also its gradient."""
    reset.rows, reset.layout = array_of(a.reset_state[i], c.is_half), a.reset_layout[i]
    reset.grads = no_array()
    if backward:
        reset.grads, reset.grads_layout = array_of(a.reset_state_grad[i], c.is_half), a.reset_grad_layout[i]


cdef inline void set_reset_states(const Cell *c, const Pass *a, Steps *s, bint backward) noexcept nogil:
    """Set what the states are where they are reset, for a call with a step mask."""
    set_reset_state(c, &s.h_reset, a, c.traits.states - 1, backward)
    if c.traits.states > 1:
        set_reset_state(c, &s.cs_reset, a, 0, backward)
