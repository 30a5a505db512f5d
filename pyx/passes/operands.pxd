"""The arrays of a layer's call under the indices of indices.pxd.

A layer gives the arrays of weights and states in an order of its own.  `set_weights`, `set_torch_weights` and
`set_states` store each of them under its index; the gradients of weights have the same order.
"""
from cells.types cimport Cell
from passes.arrays cimport Pass
from passes.indices cimport BIAS, W, W_C, W_C_H, W_H, W_P, W_P_H, WCI
from passes.steps cimport ResetState, Steps
from product.real cimport store
from schedule.plan cimport projects

cdef inline void set_weights(const Cell *c, const void *const *weights, const void **operands) noexcept nogil:
    """Set the operands of a layer's weights.

    weights : in the order of the table of ops, then a projection's w_p; NULL where the layer has none
    operands : `inputs`; or for gradients `outputs + GRAD`; or any other array of INPUTS pointers
    """
    cdef int matrices = c.traits.matrices, peepholes = c.traits.peepholes, biases = c.traits.biases, i
    for i in range(matrices):
        operands[W + i] = weights[i]
    for i in range(peepholes):
        operands[WCI + i] = weights[matrices + i]
    for i in range(biases):
        operands[BIAS + i] = weights[matrices + peepholes + i]
    if projects(c):
        operands[W_P], operands[BIAS + 1] = weights[matrices + peepholes + biases], NULL


cdef inline void set_torch_weights(
    const Cell *c, Py_ssize_t I, Py_ssize_t H, const void *const *weights, const store **operands
) noexcept nogil:
    """Set the operands of weights as PyTorch has them.

    weights : [gates * H, I], [gates * H, H], the cell's biases, a projection's [P, H]; all NULL if gradients of weights
        are skipped
    operands : as for `set_weights`
    """
    cdef int i
    operands[W], operands[W_H] = <const store *> weights[0], <const store *> weights[1]
    if c.traits.separate and weights[0] is not NULL:
        operands[W_C], operands[W_C_H] = operands[W] + c.gates[0] * H * I, operands[W_H] + c.gates[0] * H * H
    for i in range(c.traits.biases):
        operands[BIAS + i] = <const store *> weights[2 + i]
    if projects(c):
        operands[W_P_H], operands[BIAS + 1] = <const store *> weights[3], NULL


cdef inline void set_states(const Cell *c, const void *const *states, const void **operands) noexcept nogil:
    """Set the operands of states, or of their gradients, from that of h on.

    states : h; or cs and h
    operands : h, cs
    """
    cdef int i
    for i in range(c.traits.states):
        operands[c.traits.states - 1 - i] = states[i]


cdef inline void set_reset_state(ResetState *reset, const Pass *a, int i, bint backward) noexcept nogil:
    """Set what state number i of `a` is where it is reset; in the backward pass also its gradient."""
    reset.rows, reset.layout = a.reset_state[i], a.reset_layout[i]
    reset.grads = NULL
    if backward:
        reset.grads, reset.grads_layout = a.reset_state_grad[i], a.reset_grad_layout[i]


cdef inline void set_reset_states(const Cell *c, const Pass *a, Steps *s, bint backward) noexcept nogil:
    """Set what the states are where they are reset, for a call with a step mask."""
    set_reset_state(&s.h_reset, a, c.traits.states - 1, backward)
    if c.traits.states > 1:
        set_reset_state(&s.cs_reset, a, 0, backward)
