"""Indices of a call's arrays, by TensorFlow's names.

Kernels pass the arrays on under these indices: `inputs` has INPUTS arrays and `outputs` has OUTPUTS (`Array` of
lines.pxd).  All are the caller's; `data` is NULL if the call has no such array.
"""

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
