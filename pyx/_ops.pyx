"""The kernels of ops: what Python calls.

cells/ has the equations, passes/forward.pxd and passes/backward.pxd the phases.

The kernel of an op takes the op's arrays as typed memoryviews, collects their addresses under the indices of
passes/indices.pxd, and runs the `engine`, a capsule, on `ready` planned threads.  An array [T,B,n] is a matrix of T * B
rows.  The kernel returns the nanoseconds that having several threads cost.  The caller owns all arrays; outputs and
`scratch` overlap no other array.
"""
from functools import partial

from cells.types cimport GRU, GRU_RESET_AFTER, LSTM, RNN, Cell, activation_of, cell_of
from engine cimport OpCall, engine_of, init_call, run
from passes.indices cimport (
    BIAS, BIAS_C, BIAS_C_GRAD, BIAS_GRAD, BIAS_HC, BIAS_HC_GRAD, BIAS_RU, BIAS_RU_GRAD, CS_GRAD, CS_PREV, CS_PREV_GRAD,
    D_C_BAR, D_R_BAR_U_BAR, DICFO, H_GRAD, H_PREV, H_PREV_GRAD, OUT_C, OUT_CI, OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_HC,
    OUT_I, OUT_O, OUT_R, OUT_U, W, W_C, W_C_GRAD, W_GRAD, W_RU, W_RU_GRAD, WCF, WCF_GRAD, WCI, WCI_GRAD, WCO, WCO_GRAD,
    X, X_GRAD
)
from product.half cimport half
from product.real cimport number

REQUIREMENTS = {  # of each kernel: the first arguments of `requirements` in _engine.pyx
    "block_lstm": (LSTM, "forward"),
    "block_lstm_grad": (LSTM, "backward"),
    "lstm_cell_grad": (LSTM, "cell_grad"),
    "block_gru": (GRU, "forward"),
    "gru_cell_grad": (GRU, "backward without weights"),
    "block_gru_grad": (GRU, "backward"),
    "block_gru_reset_after": (GRU_RESET_AFTER, "forward"),
    "block_gru_reset_after_grad": (GRU_RESET_AFTER, "backward"),
    "block_rnn": (RNN, "forward"),
    "block_rnn_grad": (RNN, "backward"),
}


# --------------------------------------------------------------------------------------------------------------- cells
cdef inline Cell lstm_of(bint is_half, double forget_bias, double cell_clip, bint peephole, bint ifco) noexcept:
    """Return an LSTM with these options, and with the default activations."""
    cdef Cell c = cell_of(LSTM, is_half)
    c.forget_bias, c.cell_clip, c.peephole = forget_bias, cell_clip, peephole
    c.column[1], c.column[2] = 2 if ifco else 1, 1 if ifco else 2
    return c


cdef inline Cell rnn_of(bint is_half, activation):
    """Return a plain RNN with this activation, `Numbers` of blockcell/activations.py."""
    cdef Cell c = cell_of(RNN, is_half)
    c.activation = activation_of(activation)
    return c


cdef inline bytes bytes_of(const Cell *c):
    """Return a cell as bytes, in which `plan_layer` of _engine.pyx takes it."""
    return (<const char *> c)[:sizeof(Cell)]


def lstm_layer(
    P, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation
):
    """Return the cell of an LSTM layer with these options as bytes; P is 0 without a projection."""
    cdef Cell c = lstm_of(False, forget_bias, cell_clip, use_peephole, ifco)
    c.P, c.coupled, c.proj_clip = P, coupled, proj_clip
    if coupled:  # w has no columns for i
        c.column[1], c.column[2], c.column[3] = 0, 1, 2
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent_activation)
    return bytes_of(&c)


def gru_layer(int kind, activation, recurrent_activation):
    """Return the cell of a GRU layer, of either kind, as bytes."""
    cdef Cell c = cell_of(kind, False)
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent_activation)
    return bytes_of(&c)


def rnn_layer(activation):
    """Return the cell of an RNN layer as bytes."""
    cdef Cell c = rnn_of(False, activation)
    return bytes_of(&c)


LAYERS = {  # for each kind of layer a function that returns its cell, by the options of the layer
    "lstm": lstm_layer,
    "gru": partial(gru_layer, GRU),
    "gru_reset_after": partial(gru_layer, GRU_RESET_AFTER),
    "rnn": rnn_layer,
}


# ---------------------------------------------------------------------------------------------------------------- LSTM
def block_lstm(
    const number[:, ::1] x, const number[:, ::1] cs_prev, const number[:, ::1] h_prev, const number[:, ::1] w,
    const number[::1] wci, const number[::1] wcf, const number[::1] wco, const number[::1] b, number[:, ::1] i,
    number[:, ::1] cs, number[:, ::1] f, number[:, ::1] o, number[:, ::1] ci, number[:, ::1] co, number[:, ::1] h,
    unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max, double forget_bias, double cell_clip, bint use_peephole,
    bint ifco, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = lstm_of(number is half, forget_bias, cell_clip, use_peephole, ifco)
    inputs[X], inputs[CS_PREV], inputs[H_PREV] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0]
    inputs[W], inputs[WCI], inputs[WCF], inputs[WCO], inputs[BIAS] = &w[0, 0], &wci[0], &wcf[0], &wco[0], &b[0]
    outputs[OUT_I], outputs[OUT_CS], outputs[OUT_F] = &i[0, 0], &cs[0, 0], &f[0, 0]
    outputs[OUT_O], outputs[OUT_CI], outputs[OUT_CO] = &o[0, 0], &ci[0, 0], &co[0, 0]
    outputs[OUT_H] = &h[0, 0]
    return run(engine_of(engine).forward, &call, scratch, ready)


def block_lstm_grad(
    const number[:, ::1] x, const number[:, ::1] cs_prev, const number[:, ::1] h_prev, const number[:, ::1] w,
    const number[::1] wci, const number[::1] wcf, const number[::1] wco, const number[:, ::1] i,
    const number[:, ::1] cs, const number[:, ::1] f, const number[:, ::1] o, const number[:, ::1] ci,
    const number[:, ::1] co, const number[:, ::1] h, const number[:, ::1] cs_grad, const number[:, ::1] h_grad,
    number[:, ::1] x_grad, number[:, ::1] cs_prev_grad, number[:, ::1] h_prev_grad, number[:, ::1] w_grad,
    number[::1] wci_grad, number[::1] wcf_grad, number[::1] wco_grad, number[::1] b_grad, unsigned char[::1] scratch,
    engine, Py_ssize_t seq_len_max, bint use_peephole, bint ifco, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = lstm_of(number is half, 0, 0, use_peephole, ifco)
    inputs[X], inputs[CS_PREV], inputs[H_PREV], inputs[W] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0]
    inputs[WCI], inputs[WCF], inputs[WCO] = &wci[0], &wcf[0], &wco[0]
    inputs[OUT_I], inputs[OUT_CS], inputs[OUT_F], inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    inputs[OUT_CI], inputs[OUT_CO] = &ci[0, 0], &co[0, 0]
    if h is not None:  # a single step, which reads no h but h_prev, need not have it
        inputs[OUT_H] = &h[0, 0]
    inputs[CS_GRAD], inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    outputs[X_GRAD] = &x_grad[0, 0]
    outputs[CS_PREV_GRAD], outputs[H_PREV_GRAD] = &cs_prev_grad[0, 0], &h_prev_grad[0, 0]
    outputs[WCI_GRAD], outputs[WCF_GRAD], outputs[WCO_GRAD] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    return run(engine_of(engine).backward, &call, scratch, ready)


def lstm_cell_grad(
    const number[:, ::1] cs_prev, const number[::1] wci, const number[::1] wcf, const number[::1] wco,
    const number[:, ::1] i, const number[:, ::1] cs, const number[:, ::1] f, const number[:, ::1] o,
    const number[:, ::1] ci, const number[:, ::1] co, const number[:, ::1] cs_grad, const number[:, ::1] h_grad,
    number[:, ::1] cs_prev_grad, number[:, ::1] dicfo, number[::1] wci_grad, number[::1] wcf_grad, number[::1] wco_grad,
    unsigned char[::1] scratch, engine, bint use_peephole, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, 1, i.shape[0], 0, i.shape[1], threads, members)
    call.cell = lstm_of(number is half, 0, 0, use_peephole, False)
    inputs[CS_PREV], inputs[WCI], inputs[WCF], inputs[WCO] = &cs_prev[0, 0], &wci[0], &wcf[0], &wco[0]
    inputs[OUT_I], inputs[OUT_CS], inputs[OUT_F], inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    inputs[OUT_CI], inputs[OUT_CO] = &ci[0, 0], &co[0, 0]
    inputs[CS_GRAD], inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    outputs[CS_PREV_GRAD], outputs[DICFO] = &cs_prev_grad[0, 0], &dicfo[0, 0]
    outputs[WCI_GRAD], outputs[WCF_GRAD], outputs[WCO_GRAD] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    return run(engine_of(engine).cell_grad, &call, scratch, ready)


# ----------------------------------------------------------------------------------------------------------------- GRU
def block_gru(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[::1] b_ru, const number[::1] b_c, number[:, ::1] r, number[:, ::1] u, number[:, ::1] c,
    number[:, ::1] h, unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = cell_of(GRU, number is half)
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[BIAS_RU], inputs[BIAS_C] = &b_ru[0], &b_c[0]
    outputs[OUT_R], outputs[OUT_U], outputs[OUT_C], outputs[OUT_H] = &r[0, 0], &u[0, 0], &c[0, 0], &h[0, 0]
    return run(engine_of(engine).forward, &call, scratch, ready)


def gru_cell_grad(
    const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c, const number[:, ::1] r,
    const number[:, ::1] u, const number[:, ::1] c, const number[:, ::1] h_grad, number[:, ::1] x_grad,
    number[:, ::1] h_prev_grad, number[:, ::1] c_bar_grad, number[:, ::1] r_bar_u_bar_grad, unsigned char[::1] scratch,
    engine, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, 1, x_grad.shape[0], x_grad.shape[1], h_prev.shape[1], threads, members)
    call.cell = cell_of(GRU, number is half)
    call.with_weight_grads = False
    inputs[H_PREV], inputs[W_RU], inputs[W_C] = &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[OUT_R], inputs[OUT_U], inputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    inputs[H_GRAD] = &h_grad[0, 0]
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0], &h_prev_grad[0, 0]
    outputs[D_C_BAR], outputs[D_R_BAR_U_BAR] = &c_bar_grad[0, 0], &r_bar_u_bar_grad[0, 0]
    return run(engine_of(engine).backward, &call, scratch, ready)


def block_gru_grad(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[:, ::1] r, const number[:, ::1] u, const number[:, ::1] c, const number[:, ::1] h,
    const number[:, ::1] h_grad, number[:, ::1] x_grad, number[:, ::1] h_prev_grad, number[:, ::1] w_ru_grad,
    number[:, ::1] w_c_grad, number[::1] b_ru_grad, number[::1] b_c_grad, unsigned char[::1] scratch, engine,
    Py_ssize_t seq_len_max, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = cell_of(GRU, number is half)
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[OUT_R], inputs[OUT_U], inputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    if h is not None:  # a single step, which reads no h but h_prev, need not have it
        inputs[OUT_H] = &h[0, 0]
    inputs[H_GRAD] = &h_grad[0, 0]
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0], &h_prev_grad[0, 0]
    outputs[W_RU_GRAD], outputs[W_C_GRAD] = &w_ru_grad[0, 0], &w_c_grad[0, 0]
    outputs[BIAS_RU_GRAD], outputs[BIAS_C_GRAD] = &b_ru_grad[0], &b_c_grad[0]
    return run(engine_of(engine).backward, &call, scratch, ready)


# ----------------------------------------------------------------------------------- GRU that resets after the product
def block_gru_reset_after(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[::1] b_ru, const number[::1] b_c, const number[::1] b_hc, number[:, ::1] r, number[:, ::1] u,
    number[:, ::1] c, number[:, ::1] hc, number[:, ::1] h, unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max,
    int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = cell_of(GRU_RESET_AFTER, number is half)
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[BIAS_RU], inputs[BIAS_C], inputs[BIAS_HC] = &b_ru[0], &b_c[0], &b_hc[0]
    outputs[OUT_R], outputs[OUT_U], outputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    outputs[OUT_HC], outputs[OUT_H] = &hc[0, 0], &h[0, 0]
    return run(engine_of(engine).forward, &call, scratch, ready)


def block_gru_reset_after_grad(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[:, ::1] r, const number[:, ::1] u, const number[:, ::1] c, const number[:, ::1] hc,
    const number[:, ::1] h, const number[:, ::1] h_grad, number[:, ::1] x_grad, number[:, ::1] h_prev_grad,
    number[:, ::1] w_ru_grad, number[:, ::1] w_c_grad, number[::1] b_ru_grad, number[::1] b_c_grad,
    number[::1] b_hc_grad, unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max, int threads, int members,
    int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = cell_of(GRU_RESET_AFTER, number is half)
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[OUT_R], inputs[OUT_U], inputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    inputs[OUT_HC], inputs[OUT_H] = &hc[0, 0], &h[0, 0]
    inputs[H_GRAD] = &h_grad[0, 0]
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0], &h_prev_grad[0, 0]
    outputs[W_RU_GRAD], outputs[W_C_GRAD] = &w_ru_grad[0, 0], &w_c_grad[0, 0]
    outputs[BIAS_RU_GRAD], outputs[BIAS_C_GRAD], outputs[BIAS_HC_GRAD] = &b_ru_grad[0], &b_c_grad[0], &b_hc_grad[0]
    return run(engine_of(engine).backward, &call, scratch, ready)


# ----------------------------------------------------------------------------------------------------------- plain RNN
def block_rnn(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w, const number[::1] b, number[:, ::1] h,
    unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max, activation, int threads, int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = rnn_of(number is half, activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[BIAS] = &x[0, 0], &h_prev[0, 0], &w[0, 0], &b[0]
    outputs[OUT_H] = &h[0, 0]
    return run(engine_of(engine).forward, &call, scratch, ready)


def block_rnn_grad(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w, const number[:, ::1] h,
    const number[:, ::1] h_grad, number[:, ::1] x_grad, number[:, ::1] h_prev_grad, number[:, ::1] w_grad,
    number[::1] b_grad, unsigned char[::1] scratch, engine, Py_ssize_t seq_len_max, activation, int threads,
    int members, int ready
):
    cdef OpCall call
    cdef const void **inputs = call.inputs
    cdef void **outputs = call.outputs
    init_call(&call, seq_len_max, h_prev.shape[0], x.shape[1], h_prev.shape[1], threads, members)
    call.cell = rnn_of(number is half, activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[OUT_H] = &x[0, 0], &h_prev[0, 0], &w[0, 0], &h[0, 0]
    inputs[H_GRAD] = &h_grad[0, 0]
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0], &h_prev_grad[0, 0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    return run(engine_of(engine).backward, &call, scratch, ready)
