"""The GRU's kernels: what Python calls.

cells/gru.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

The kernel of an op takes the op's arrays as typed memoryviews, collects their addresses under the indices of
passes/indices.pxd, and runs the `engine`, a capsule, on `ready` planned threads.  An array [T,B,n] is a matrix of T * B
rows.  The kernel returns the nanoseconds that having several threads cost.  The caller owns all arrays; outputs and
`scratch` overlap no other array.
"""
from cells.types cimport GRU, Cell, activation_of, cell_of
from engine cimport OpCall, bytes_of, engine_of, init_call, run
from passes.indices cimport (
    BIAS_C, BIAS_C_GRAD, BIAS_RU, BIAS_RU_GRAD, D_C_BAR, D_R_BAR_U_BAR, H_GRAD, H_PREV, H_PREV_GRAD, OUT_C, OUT_H,
    OUT_R, OUT_U, W_C, W_C_GRAD, W_RU, W_RU_GRAD, X, X_GRAD
)
from product.half cimport half
from product.real cimport number

REQUIREMENTS = {  # of each kernel: the first arguments of `requirements` in _engine.pyx
    "block_gru": (GRU, "forward"),
    "gru_cell_grad": (GRU, "backward without weights"),
    "block_gru_grad": (GRU, "backward"),
}


# ------------------------------------------------------------------------------------------------------------- forward
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


# ------------------------------------------------------------------------------------------------------------ backward
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


# --------------------------------------------------------------------------------------------------------------- layers
def gru_layer(planners, task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers by `plan_layer` of _engine.pyx.

    planners : one for each dtype, of which `storage` is the number
    options : (activation, recurrent_activation)
    """
    cdef Cell c = cell_of(GRU, False)
    c.activation, c.recurrent = activation_of(options[0]), activation_of(options[1])
    return planners[storage](bytes_of(&c), task, sizes, threads, format, transposed)
