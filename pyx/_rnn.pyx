"""The plain RNN's kernels: what Python calls.

The equations are in rnn.pxd, the phases in forward.pxd and backward.pxd.  The kernel of an op takes typed memoryviews:
it collects their addresses under the names of operands.pxd, and makes the plan (plan.pxd).  `..._work` returns what it
requires: bytes of its workspace, threads, and how many of these share the units of a row.  A kernel returns the
nanoseconds that having several threads cost.  `rnn_layer` plans the kernels of layers, which layer.pxd has.
"""
from cpython.pycapsule cimport PyCapsule_Import

from cells.activations cimport activation_of
from cells.rnn cimport rnn_of
from cells.types cimport Rnn
from passes.backward cimport run_backward
from passes.forward cimport run_forward
from passes.layer cimport plan_layer
from passes.operands cimport (
    BIAS, BIAS_GRAD, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, H_PREV_GRAD, INPUTS, OUT_H, OUTPUTS, W, W_GRAD, X, X_GRAD
)
from product.integer cimport ProductInUse, use_product
from product.tile cimport align_scratch, real_itemsize, store
from schedule.cost cimport grid_of, requirements_of
from schedule.machine cimport Machine, use_machine
from schedule.plan cimport Backward, Forward, backward_of, forward_of, plan_backward, plan_forward, use_panels
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


# ----------------------------------------------------------------------------------------------------------------- ops
cdef forward_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Rnn c = rnn_of()
    cdef Forward p = plan_forward(&c, T, B, I, H, itemsize, False, num_threads)
    return requirements_of(&p.workspace, p.L, &p.grid)


cdef backward_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Rnn c = rnn_of()
    cdef Backward p = plan_backward(&c, T, B, I, H, itemsize, True, num_threads)
    return requirements_of(&p.workspace, p.L, &p.grid)


def block_rnn_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return forward_work(T, B, I, H, itemsize, num_threads)


def block_rnn_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return backward_work(T, B, I, H, itemsize, num_threads)


def block_rnn(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w, const store[::1] b,
    store[:, :, ::1] h, unsigned char[::1] work, Py_ssize_t seq_len_max, activation, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Rnn c = rnn_of()
    cdef Forward p = forward_of(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], real_itemsize(&x[0, 0, 0]),
                                False, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[BIAS] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &b[0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0, 0], NULL
    use_panels(&p, align_scratch(work))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


def block_rnn_grad(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w, const store[:, :, ::1] h,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] h_prev_grad, store[:, ::1] w_grad,
    store[::1] b_grad, unsigned char[::1] work, Py_ssize_t seq_len_max, activation, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Rnn c = rnn_of()
    cdef Backward p = backward_of(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                  real_itemsize(&x[0, 0, 0]), True, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[OUT_H] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &h[0, 0, 0]
    inputs[H_GRAD], inputs[H_LAST_GRAD] = &h_grad[0, 0, 0], NULL
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0, 0], &h_prev_grad[0, 0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def rnn_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers: `plan_layer` in layer.pxd.

    options : (activation,)
    """
    cdef Rnn c = rnn_of()
    c.activation = activation_of(options[0])
    return plan_layer(&c, task, sizes, threads, storage, format, transposed)
