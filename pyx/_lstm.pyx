"""The LSTM's kernels: what Python calls.

cells/lstm.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

The kernel of an op takes the op's arrays as typed memoryviews, collects their addresses under the indices of
passes/indices.pxd, and runs the `engine`, a capsule, on `ready` planned threads.  An array [T,B,n] is a matrix of T * B
rows.  The kernel returns the nanoseconds that having several threads cost.  The caller owns all arrays; outputs and
`scratch` overlap no other array.
"""
from cells.types cimport LSTM, Cell, activation_of, cell_of
from engine cimport OpCall, bytes_of, engine_of, init_call, run
from passes.indices cimport (
    BIAS, BIAS_GRAD, CS_GRAD, CS_PREV, CS_PREV_GRAD, DICFO, H_GRAD, H_PREV, H_PREV_GRAD, OUT_CI, OUT_CO, OUT_CS, OUT_F,
    OUT_H, OUT_I, OUT_O, W, WCF, WCF_GRAD, WCI, WCI_GRAD, WCO, WCO_GRAD, W_GRAD, X, X_GRAD
)
from product.half cimport half
from product.real cimport number

REQUIREMENTS = {  # of each kernel: the first arguments of `requirements` in _engine.pyx
    "block_lstm": (LSTM, "forward"),
    "block_lstm_grad": (LSTM, "backward"),
    "lstm_cell_grad": (LSTM, "cell_grad"),
}


cdef inline Cell lstm_of(bint is_half, double forget_bias, double cell_clip, bint peephole, bint ifco) noexcept:
    """Return an LSTM with these options, and with the default activations."""
    cdef Cell c = cell_of(LSTM, is_half)
    c.forget_bias, c.cell_clip, c.peephole = forget_bias, cell_clip, peephole
    c.column[1], c.column[2] = 2 if ifco else 1, 1 if ifco else 2
    return c


# ------------------------------------------------------------------------------------------------------------- forward
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


# ------------------------------------------------------------------------------------------------------------ backward
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


# --------------------------------------------------------------------------------------------------------------- layers
def lstm_layer(planners, task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers by `plan_layer` of _engine.pyx.

    planners : one for each dtype, of which `storage` is the number
    options : (P or 0, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation)
    """
    P, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation = options
    cdef Cell c = lstm_of(False, forget_bias, cell_clip, use_peephole, ifco)
    c.P, c.coupled, c.proj_clip = P, coupled, proj_clip
    if coupled:  # w has no columns for i
        c.column[1], c.column[2], c.column[3] = 0, 1, 2
    c.activation, c.recurrent = activation_of(activation), activation_of(recurrent_activation)
    return planners[storage](bytes_of(&c), task, sizes, threads, format, transposed)
