"""The arrays of a call, by TensorFlow's names.

Kernels pass them on as two arrays of pointers, `inputs` and `outputs`, with these indices.  A pointer is NULL if the
call has no such array.
"""

cdef enum:  # outputs of the forward pass, and inputs of the backward pass
    OUT_H
    OUT_I, OUT_CS, OUT_F, OUT_O, OUT_CI, OUT_CO  # of the LSTM, in the order in which a layer's tape keeps them
    OUTS
    OUT_R = OUT_I  # of the GRU, likewise
    OUT_U
    OUT_C
    OUT_HC  # of the GRU that resets after the product

cdef enum:  # inputs
    X = OUTS
    H_PREV, CS_PREV
    W, W_C  # the LSTM has one matrix of weights, the GRUs have two
    W_H, W_C_H  # their rows for h, where these are arrays of their own
    BIAS, BIAS_C, BIAS_HC
    WCI, WCF, WCO
    H_GRAD, CS_GRAD
    H_LAST_GRAD, CS_LAST_GRAD  # of a layer: of the states after the last step
    INPUTS
    W_RU = W
    W_P = W_C  # of an LSTM with a projection, which has all its rows for what would be h
    W_P_H = W_C_H
    BIAS_RU = BIAS

cdef enum:  # outputs
    H_LAST = OUTS  # of a layer: the states after the last step
    CS_LAST
    X_GRAD
    H_PREV_GRAD, CS_PREV_GRAD
    W_GRAD, W_C_GRAD
    W_H_GRAD, W_C_H_GRAD
    BIAS_GRAD, BIAS_C_GRAD, BIAS_HC_GRAD
    WCI_GRAD, WCF_GRAD, WCO_GRAD
    DICFO, D_C_BAR, D_R_BAR_U_BAR  # where the cells' gradients end in TensorFlow
    OUTPUTS
    W_RU_GRAD = W_GRAD
    W_P_GRAD = W_C_GRAD
    W_P_H_GRAD = W_C_H_GRAD
    BIAS_RU_GRAD = BIAS_GRAD
