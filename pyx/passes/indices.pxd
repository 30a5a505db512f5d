"""Indices of a call's arrays, by TensorFlow's names.

A call has `inputs`; a forward pass has `outputs`, and a backward pass `grads`: grads[n] is the gradient to inputs[n].
`Pass` (arrays.pxd) has the arrays as pointers, and kernels pass them on as `Array` (lines.pxd).

x is [T,B,I], h of all steps [T,B,P], and what else the steps give [T,B,H].  States are h [B,P] and cs [B,H], which are
neighbours here.  Weights are as in the table of ops (blockcell/optable.py), or as in PyTorch.
"""

cdef enum:  # outputs of the forward pass, and inputs of the backward pass
    OUT_H
    OUT_I, OUT_CS, OUT_F, OUT_O, OUT_CI, OUT_CO  # of the LSTM, in the order of a layer's tape
    STEP_OUTPUTS  # their number
    H_LAST = STEP_OUTPUTS  # outputs alone, of a layer: the states after the last step
    CS_LAST
    OUTPUTS
    OUT_R = OUT_I  # of the GRUs, in the order of a layer's tape
    OUT_U
    OUT_C
    OUT_HC  # of the GRU that resets after the product: the candidate's product with h

cdef enum:  # inputs; of a GRU's two matrices and biases, and of states, the second stands behind the first
    X = STEP_OUTPUTS
    H_PREV, CS_PREV
    W, W_C  # the LSTM and the RNN have one matrix of weights, the GRUs have two
    W_H, W_C_H  # MATRICES behind these: w_h of each, where it is an array of its own, as in PyTorch
    BIAS, BIAS_C, BIAS_HC  # the last one MATRICES behind the first
    WCI, WCF, WCO
    H_GRAD, CS_GRAD  # of the backward pass, like all that follow
    H_LAST_GRAD, CS_LAST_GRAD  # of a layer: the gradients of the states after the last step
    INPUTS
    W_RU = W
    W_P = W_C  # of an LSTM with a projection, of m = o * co to h; it has no w_x
    W_P_H = W_C_H
    BIAS_RU = BIAS

cdef enum:  # gradients of pre-activations, which TensorFlow's ops of a single step return, behind those to inputs
    DICFO = H_GRAD
    D_C_BAR, D_R_BAR_U_BAR
    GRADS
