"""Indices of a call's arrays, by TensorFlow's names.

Kernels pass the arrays on as two arrays of pointers with these indices, `inputs` [INPUTS] and `outputs` [OUTPUTS].  All
arrays are the caller's; a pointer is NULL if the call has no such array.

A layer gives the arrays of weights and states in an order of its own.  `set_weights`, `set_torch_weights` and
`set_states` store each of them under its index; the gradients of weights have the same order.
"""
from cell cimport cell
from cells.types cimport row_of
from passes.arrays cimport Pass
from passes.steps cimport ResetState, Steps
from product.tile cimport store
from schedule.plan cimport projects

cdef enum:  # outputs of the forward pass, and inputs of the backward pass
    OUT_H
    OUT_I, OUT_CS, OUT_F, OUT_O, OUT_CI, OUT_CO  # of the LSTM, in the order of a layer's tape
    STEP_OUTPUTS  # their number
    OUT_R = OUT_I  # of the GRUs, in the order of a layer's tape
    OUT_U
    OUT_C
    OUT_HC  # of the GRU that resets after the product: the candidate's product with h

cdef enum:  # inputs
    X = STEP_OUTPUTS
    H_PREV, CS_PREV
    W, W_C  # the LSTM and the RNN have one matrix of weights, the GRUs have two
    W_H, W_C_H  # their rows for h, where these are arrays of their own, as in PyTorch
    BIAS, BIAS_C, BIAS_HC
    WCI, WCF, WCO
    H_GRAD, CS_GRAD
    H_LAST_GRAD, CS_LAST_GRAD  # of a layer: the gradients of the states after the last step
    INPUTS
    W_RU = W
    W_P = W_C  # of an LSTM with a projection; all its rows are for m = o * co, which is projected to h
    W_P_H = W_C_H
    BIAS_RU = BIAS

cdef enum:  # outputs
    H_LAST = STEP_OUTPUTS  # of a layer: the states after the last step
    CS_LAST
    X_GRAD
    GRAD = X_GRAD - X  # the gradient to inputs[n] is outputs[n + GRAD], for n from X to WCO
    H_PREV_GRAD = H_PREV + GRAD
    CS_PREV_GRAD = CS_PREV + GRAD
    W_GRAD = W + GRAD
    W_C_GRAD = W_C + GRAD
    W_H_GRAD = W_H + GRAD
    W_C_H_GRAD = W_C_H + GRAD
    BIAS_GRAD = BIAS + GRAD
    BIAS_C_GRAD = BIAS_C + GRAD
    BIAS_HC_GRAD = BIAS_HC + GRAD
    WCI_GRAD = WCI + GRAD
    WCF_GRAD = WCF + GRAD
    WCO_GRAD = WCO + GRAD
    DICFO, D_C_BAR, D_R_BAR_U_BAR  # gradients of the pre-activations, which TensorFlow's ops of a single step return
    OUTPUTS
    W_RU_GRAD = W_GRAD
    BIAS_RU_GRAD = BIAS_GRAD


cdef inline void set_weights(const cell *c, const void *const *weights, const void **operands) noexcept nogil:
    """Set the operands of a layer's weights.

    weights : in the order of the table of ops, then a projection's w_p; NULL where the layer has none
    operands : `inputs`; or for gradients `outputs + GRAD`; or any other array of INPUTS pointers
    """
    cdef int matrices = row_of(c).matrices, peepholes = row_of(c).peepholes, biases = row_of(c).biases, i
    for i in range(matrices):
        operands[W + i] = weights[i]
    for i in range(peepholes):
        operands[WCI + i] = weights[matrices + i]
    for i in range(biases):
        operands[BIAS + i] = weights[matrices + peepholes + i]
    if projects(c):
        operands[W_P], operands[BIAS + 1] = weights[matrices + peepholes + biases], NULL


cdef inline void set_torch_weights(
    const cell *c, Py_ssize_t I, Py_ssize_t H, const void *const *weights, const store **operands
) noexcept nogil:
    """Set the operands of weights as PyTorch has them.

    weights : [gates * H, I], [gates * H, H], the cell's biases, a projection's [P, H]; all NULL if gradients of weights
        are skipped
    operands : as for `set_weights`
    """
    cdef int i
    operands[W], operands[W_H] = <const store *> weights[0], <const store *> weights[1]
    if row_of(c).separate and weights[0] is not NULL:
        operands[W_C], operands[W_C_H] = operands[W] + c.gates[0] * H * I, operands[W_H] + c.gates[0] * H * H
    for i in range(row_of(c).biases):
        operands[BIAS + i] = <const store *> weights[2 + i]
    if projects(c):
        operands[W_P_H], operands[BIAS + 1] = <const store *> weights[3], NULL


cdef inline void set_states(const cell *c, const void *const *states, const void **operands) noexcept nogil:
    """Set the operands of states, or of their gradients, from that of h on.

    states : h; or cs and h
    operands : h, cs
    """
    cdef int i
    for i in range(row_of(c).states):
        operands[row_of(c).states - 1 - i] = states[i]


cdef inline void set_reset_state(ResetState *reset, const Pass *a, int i, bint backward) noexcept nogil:
    """Set what state number i of `a` is where it is reset; in the backward pass also its gradient."""
    reset.rows, reset.layout = a.reset_state[i], a.reset_layout[i]
    reset.grads = NULL
    if backward:
        reset.grads, reset.grads_layout = a.reset_state_grad[i], a.reset_grad_layout[i]


cdef inline void set_reset_states(const cell *c, const Pass *a, Steps *s, bint backward) noexcept nogil:
    """Set what the states are where they are reset, for a call with a step mask."""
    set_reset_state(&s.h_reset, a, row_of(c).states - 1, backward)
    if row_of(c).states > 1:
        set_reset_state(&s.cs_reset, a, 0, backward)
