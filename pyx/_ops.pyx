"""The functions of ops, which Python calls, and the options of layers.

cells/ has the equations, passes/forward.pxd and passes/backward.pxd the phases.

An op's function takes its arrays as typed memoryviews, collects their addresses under the indices of
passes/indices.pxd, and runs `kernel`, a capsule of a CPU level, by its `plan` on `ready` of the planned threads.  An
array [T,B,n] is a matrix of T * B rows.  The function returns the nanoseconds that having several threads cost.  The
caller owns all arrays; outputs and `scratch` overlap no other array.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_GetPointer

from functools import partial

from cells.types cimport GRU, GRU_RESET_AFTER, LSTM, RNN, SIGMOID, TANH, Cell, cell_of
from passes.arrays cimport Kernel, Pass, clear_pass
from passes.indices cimport (
    BIAS, BIAS_C, BIAS_HC, BIAS_RU, CS_GRAD, CS_PREV, D_C_BAR, D_R_BAR_U_BAR, DICFO, H_GRAD, H_PREV, OUT_C, OUT_CI,
    OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_HC, OUT_I, OUT_O, OUT_R, OUT_U, W, W_C, W_RU, WCF, WCI, WCO, X
)
from product.lines cimport align_to_line
from product.real cimport number

FUNCTIONS = {  # of each op's kernel: the function below, the kind of its cell, and the task of `plan_cell`
    "block_lstm": ("block_lstm", "lstm", "forward"),
    "block_lstm_grad": ("block_lstm_grad", "lstm", "backward"),
    "lstm_cell_grad": ("lstm_cell_grad", "lstm", "cell_grad"),
    "block_gru": ("block_gru", "gru", "forward"),
    "gru_cell_grad": ("gru_cell_grad", "gru", "backward without weights"),
    "block_gru_grad": ("block_gru_grad", "gru", "backward"),
    "block_gru_reset_after": ("block_gru", "gru_reset_after", "forward"),
    "block_gru_reset_after_grad": ("block_gru_grad", "gru_reset_after", "backward"),
    "block_rnn": ("block_rnn", "rnn", "forward"),
    "block_rnn_grad": ("block_rnn_grad", "rnn", "backward"),
}


# --------------------------------------------------------------------------------------------------------------- cells
def lstm_cell(P, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation):
    """Return the cell of an LSTM with these options as bytes; P is 0 without a projection."""
    cdef Cell c = cell_of(LSTM, activation, recurrent_activation)
    c.P, c.coupled, c.peephole = P, coupled, use_peephole
    c.forget_bias, c.cell_clip, c.proj_clip = forget_bias, cell_clip, proj_clip
    c.column[1], c.column[2] = 2 if ifco else 1, 1 if ifco else 2
    if coupled:  # w has no columns for i
        c.column[1], c.column[2], c.column[3] = 0, 1, 2
    return (<const char *> &c)[:sizeof(Cell)]


def gru_or_rnn_cell(int kind, activation=(TANH, 0, 0), recurrent_activation=(SIGMOID, 0, 0)):
    """Return the cell of a GRU, of either kind, or of a plain RNN, which has one activation, as bytes."""
    cdef Cell c = cell_of(kind, activation, recurrent_activation)
    return (<const char *> &c)[:sizeof(Cell)]


CELLS = {  # for each kind of cell a function that returns it by its options, as `plan_cell` of _engine.pyx takes it
    "lstm": lstm_cell,
    "gru": partial(gru_or_rnn_cell, GRU),
    "gru_reset_after": partial(gru_or_rnn_cell, GRU_RESET_AFTER),
    "rnn": partial(gru_or_rnn_cell, RNN),
}


cdef inline long long run(kernel, bytes plan, unsigned char[::1] scratch, int ready, const Pass *a) except? -1:
    """Run a kernel by its plan, both of `plan_cell`; return the nanoseconds that having several threads cost."""
    cdef Kernel function = <Kernel> PyCapsule_GetPointer(kernel, NULL)
    cdef const char *plan_data = PyBytes_AS_STRING(plan)
    cdef long long nanoseconds
    with nogil:
        nanoseconds = function(plan_data, ready, align_to_line(&scratch[0]), a)
    return nanoseconds


# ---------------------------------------------------------------------------------------------------------------- LSTM
def block_lstm(
    const number[:, ::1] x, const number[:, ::1] cs_prev, const number[:, ::1] h_prev, const number[:, ::1] w,
    const number[::1] wci, const number[::1] wcf, const number[::1] wco, const number[::1] b, number[:, ::1] i,
    number[:, ::1] cs, number[:, ::1] f, number[:, ::1] o, number[:, ::1] ci, number[:, ::1] co, number[:, ::1] h,
    unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[CS_PREV], a.inputs[H_PREV], a.inputs[W] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0]
    a.inputs[WCI], a.inputs[WCF], a.inputs[WCO], a.inputs[BIAS] = &wci[0], &wcf[0], &wco[0], &b[0]
    a.outputs[OUT_I], a.outputs[OUT_CS], a.outputs[OUT_F] = &i[0, 0], &cs[0, 0], &f[0, 0]
    a.outputs[OUT_O], a.outputs[OUT_CI], a.outputs[OUT_CO] = &o[0, 0], &ci[0, 0], &co[0, 0]
    a.outputs[OUT_H] = &h[0, 0]
    return run(kernel, plan, scratch, ready, &a)


def block_lstm_grad(
    const number[:, ::1] x, const number[:, ::1] cs_prev, const number[:, ::1] h_prev, const number[:, ::1] w,
    const number[::1] wci, const number[::1] wcf, const number[::1] wco, const number[:, ::1] i,
    const number[:, ::1] cs, const number[:, ::1] f, const number[:, ::1] o, const number[:, ::1] ci,
    const number[:, ::1] co, const number[:, ::1] h, const number[:, ::1] cs_grad, const number[:, ::1] h_grad,
    number[:, ::1] x_grad, number[:, ::1] cs_prev_grad, number[:, ::1] h_prev_grad, number[:, ::1] w_grad,
    number[::1] wci_grad, number[::1] wcf_grad, number[::1] wco_grad, number[::1] b_grad, unsigned char[::1] scratch,
    kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[CS_PREV], a.inputs[H_PREV], a.inputs[W] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0]
    a.inputs[WCI], a.inputs[WCF], a.inputs[WCO] = &wci[0], &wcf[0], &wco[0]
    a.inputs[OUT_I], a.inputs[OUT_CS], a.inputs[OUT_F], a.inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    a.inputs[OUT_CI], a.inputs[OUT_CO] = &ci[0, 0], &co[0, 0]
    if h is not None:  # a single step, which reads no h but h_prev, need not have it
        a.inputs[OUT_H] = &h[0, 0]
    a.inputs[CS_GRAD], a.inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    a.grads[X] = &x_grad[0, 0]
    a.grads[CS_PREV], a.grads[H_PREV] = &cs_prev_grad[0, 0], &h_prev_grad[0, 0]
    a.grads[WCI], a.grads[WCF], a.grads[WCO] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    a.grads[W], a.grads[BIAS] = &w_grad[0, 0], &b_grad[0]
    return run(kernel, plan, scratch, ready, &a)


def lstm_cell_grad(
    const number[:, ::1] cs_prev, const number[::1] wci, const number[::1] wcf, const number[::1] wco,
    const number[:, ::1] i, const number[:, ::1] cs, const number[:, ::1] f, const number[:, ::1] o,
    const number[:, ::1] ci, const number[:, ::1] co, const number[:, ::1] cs_grad, const number[:, ::1] h_grad,
    number[:, ::1] cs_prev_grad, number[:, ::1] dicfo, number[::1] wci_grad, number[::1] wcf_grad, number[::1] wco_grad,
    unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[CS_PREV], a.inputs[WCI], a.inputs[WCF], a.inputs[WCO] = &cs_prev[0, 0], &wci[0], &wcf[0], &wco[0]
    a.inputs[OUT_I], a.inputs[OUT_CS], a.inputs[OUT_F], a.inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    a.inputs[OUT_CI], a.inputs[OUT_CO] = &ci[0, 0], &co[0, 0]
    a.inputs[CS_GRAD], a.inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    a.grads[CS_PREV], a.grads[DICFO] = &cs_prev_grad[0, 0], &dicfo[0, 0]
    a.grads[WCI], a.grads[WCF], a.grads[WCO] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    return run(kernel, plan, scratch, ready, &a)


# ----------------------------------------------------------------------------------------------------------------- GRU
def block_gru(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[::1] b_ru, const number[::1] b_c, const number[::1] b_hc, number[:, ::1] r, number[:, ::1] u,
    number[:, ::1] c, number[:, ::1] hc, number[:, ::1] h, unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[H_PREV], a.inputs[W_RU], a.inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    a.inputs[BIAS_RU], a.inputs[BIAS_C] = &b_ru[0], &b_c[0]
    a.outputs[OUT_R], a.outputs[OUT_U], a.outputs[OUT_C], a.outputs[OUT_H] = &r[0, 0], &u[0, 0], &c[0, 0], &h[0, 0]
    if hc is not None:  # of the GRU that resets after the product
        a.inputs[BIAS_HC], a.outputs[OUT_HC] = &b_hc[0], &hc[0, 0]
    return run(kernel, plan, scratch, ready, &a)


def gru_cell_grad(
    const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c, const number[:, ::1] r,
    const number[:, ::1] u, const number[:, ::1] c, const number[:, ::1] h_grad, number[:, ::1] x_grad,
    number[:, ::1] h_prev_grad, number[:, ::1] c_bar_grad, number[:, ::1] r_bar_u_bar_grad, unsigned char[::1] scratch,
    kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[H_PREV], a.inputs[W_RU], a.inputs[W_C] = &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    a.inputs[OUT_R], a.inputs[OUT_U], a.inputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    a.inputs[H_GRAD] = &h_grad[0, 0]
    a.grads[X], a.grads[H_PREV] = &x_grad[0, 0], &h_prev_grad[0, 0]
    a.grads[D_C_BAR], a.grads[D_R_BAR_U_BAR] = &c_bar_grad[0, 0], &r_bar_u_bar_grad[0, 0]
    return run(kernel, plan, scratch, ready, &a)


def block_gru_grad(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w_ru, const number[:, ::1] w_c,
    const number[:, ::1] r, const number[:, ::1] u, const number[:, ::1] c, const number[:, ::1] hc,
    const number[:, ::1] h, const number[:, ::1] h_grad, number[:, ::1] x_grad, number[:, ::1] h_prev_grad,
    number[:, ::1] w_ru_grad, number[:, ::1] w_c_grad, number[::1] b_ru_grad, number[::1] b_c_grad,
    number[::1] b_hc_grad, unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[H_PREV], a.inputs[W_RU], a.inputs[W_C] = &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    a.inputs[OUT_R], a.inputs[OUT_U], a.inputs[OUT_C] = &r[0, 0], &u[0, 0], &c[0, 0]
    a.inputs[H_GRAD] = &h_grad[0, 0]
    a.grads[X], a.grads[H_PREV] = &x_grad[0, 0], &h_prev_grad[0, 0]
    a.grads[W_RU], a.grads[W_C] = &w_ru_grad[0, 0], &w_c_grad[0, 0]
    a.grads[BIAS_RU], a.grads[BIAS_C] = &b_ru_grad[0], &b_c_grad[0]
    if h is not None:  # a single step, which reads no h but h_prev, need not have it
        a.inputs[OUT_H] = &h[0, 0]
    if hc is not None:  # of the GRU that resets after the product
        a.inputs[OUT_HC], a.grads[BIAS_HC] = &hc[0, 0], &b_hc_grad[0]
    return run(kernel, plan, scratch, ready, &a)


# ----------------------------------------------------------------------------------------------------------- plain RNN
def block_rnn(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w, const number[::1] b, number[:, ::1] h,
    unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[H_PREV], a.inputs[W], a.inputs[BIAS] = &x[0, 0], &h_prev[0, 0], &w[0, 0], &b[0]
    a.outputs[OUT_H] = &h[0, 0]
    return run(kernel, plan, scratch, ready, &a)


def block_rnn_grad(
    const number[:, ::1] x, const number[:, ::1] h_prev, const number[:, ::1] w, const number[:, ::1] h,
    const number[:, ::1] h_grad, number[:, ::1] x_grad, number[:, ::1] h_prev_grad, number[:, ::1] w_grad,
    number[::1] b_grad, unsigned char[::1] scratch, kernel, bytes plan, int ready
):
    cdef Pass a
    clear_pass(&a)
    a.inputs[X], a.inputs[H_PREV], a.inputs[W], a.inputs[OUT_H] = &x[0, 0], &h_prev[0, 0], &w[0, 0], &h[0, 0]
    a.inputs[H_GRAD] = &h_grad[0, 0]
    a.grads[X], a.grads[H_PREV] = &x_grad[0, 0], &h_prev_grad[0, 0]
    a.grads[W], a.grads[BIAS] = &w_grad[0, 0], &b_grad[0]
    return run(kernel, plan, scratch, ready, &a)
