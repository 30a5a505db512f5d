"""The plain RNN's kernels: what Python calls.

cells/rnn.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

For each op there are two functions.  `<kernel>_requirements` plans a call of T, B, I, H on at most `threads` threads,
and returns the bytes of its scratch, the threads that it uses, and how many of these share the hidden units of a row.
`<kernel>` runs it on `ready` of these threads: it takes the op's arrays as typed memoryviews, collects their addresses
under the indices of passes/operands.pxd, and returns the nanoseconds that having several threads cost.  The caller
owns all arrays; outputs and `scratch` overlap no other array.

`rnn_layer` plans the kernels of layers, which passes/layer.pxd has.
"""
from cpython.pycapsule cimport PyCapsule_Import

from cells.activations cimport activation_of
from cells.rnn cimport default_rnn
from cells.types cimport RNN, Rnn
from passes.backward cimport run_backward
from passes.forward cimport run_forward
from passes.layer cimport plan_layer
from passes.operands cimport (
    BIAS, BIAS_GRAD, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, H_PREV_GRAD, INPUTS, OUT_H, OUTPUTS, W, W_GRAD, X, X_GRAD
)
from product.integer cimport ProductInUse, use_product
from product.tile cimport align_scratch, real_itemsize, store
from schedule.cost cimport grid_of
from schedule.machine cimport Machine, use_machine
from schedule.plan cimport (
    Backward, Forward, backward_requirements, forward_requirements, plan_backward_on, plan_forward_on, use_panels
)
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
TAPE_ARRAYS = RNN.saved
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


# ----------------------------------------------------------------------------------------------------------------- ops
def block_rnn_requirements(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads):
    cdef Rnn c = default_rnn()
    return forward_requirements(&c, T, B, I, H, itemsize, threads)


def block_rnn_grad_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef Rnn c = default_rnn()
    return backward_requirements(&c, T, B, I, H, itemsize, True, threads)


def block_rnn(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w, const store[::1] b,
    store[:, :, ::1] h, unsigned char[::1] scratch, Py_ssize_t seq_len_max, activation, int threads, int members,
    int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Rnn c = default_rnn()
    cdef Forward p = plan_forward_on(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                     real_itemsize(&x[0, 0, 0]), False, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[BIAS] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &b[0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0, 0], NULL
    use_panels(&p, align_scratch(scratch))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


def block_rnn_grad(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w, const store[:, :, ::1] h,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] h_prev_grad, store[:, ::1] w_grad,
    store[::1] b_grad, unsigned char[::1] scratch, Py_ssize_t seq_len_max, activation, int threads, int members,
    int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Rnn c = default_rnn()
    cdef Backward p = plan_backward_on(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                       real_itemsize(&x[0, 0, 0]), True, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[OUT_H] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &h[0, 0, 0]
    inputs[H_GRAD], inputs[H_LAST_GRAD] = &h_grad[0, 0, 0], NULL
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0, 0], &h_prev_grad[0, 0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def rnn_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers: `plan_layer` in layer.pxd.

    options : (activation,)
    """
    cdef Rnn c = default_rnn()
    c.activation = activation_of(options[0])
    return plan_layer(&c, task, sizes, threads, storage, format, transposed)
