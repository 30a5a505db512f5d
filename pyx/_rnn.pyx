"""The plain RNN's kernels: what Python calls.

cells/rnn.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

The kernel of an op takes the op's arrays as typed memoryviews, collects their addresses under the indices of
passes/indices.pxd, and runs the `engine`, a capsule, on `ready` planned threads.  An array [T,B,n] is a matrix of T * B
rows.  The kernel returns the nanoseconds that having several threads cost.  The caller owns all arrays; outputs and
`scratch` overlap no other array.
"""
from cells.types cimport RNN, Cell, activation_of, cell_of
from engine cimport OpCall, bytes_of, engine_of, init_call, run
from passes.indices cimport BIAS, BIAS_GRAD, H_GRAD, H_PREV, H_PREV_GRAD, OUT_H, W, W_GRAD, X, X_GRAD
from product.half cimport half
from product.real cimport number

REQUIREMENTS = {  # of each kernel: the first arguments of `requirements` in _engine.pyx
    "block_rnn": (RNN, "forward"),
    "block_rnn_grad": (RNN, "backward"),
}


cdef inline Cell rnn_of(bint is_half, activation):
    """Return a plain RNN with this activation, `Numbers` of blockcell/activations.py."""
    cdef Cell c = cell_of(RNN, is_half)
    c.activation = activation_of(activation)
    return c


# ----------------------------------------------------------------------------------------------------------------- ops
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


# --------------------------------------------------------------------------------------------------------------- layers
def rnn_layer(planners, task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers by `plan_layer` of _engine.pyx.

    planners : one for each dtype, of which `storage` is the number
    options : (activation,)
    """
    cdef Cell c = rnn_of(False, options[0])
    return planners[storage](bytes_of(&c), task, sizes, threads, format, transposed)
