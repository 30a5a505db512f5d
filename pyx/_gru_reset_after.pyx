"""The kernels of the GRU that resets after the product: what Python calls.

cells/gru_reset_after.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

For each op there are two functions.  `<kernel>_requirements` plans a call of T, B, I, H on at most `threads` threads,
and returns the bytes of its scratch, the threads that it uses, and how many of these share the hidden units of a row.
`<kernel>` runs it on `ready` of these threads: it takes the op's arrays as typed memoryviews, collects their addresses
under the indices of passes/operands.pxd, and returns the nanoseconds that having several threads cost.  The caller
owns all arrays; outputs and `scratch` overlap no other array.

`gru_reset_after_layer` plans the kernels of layers, which passes/layer.pxd has.
"""
from cpython.pycapsule cimport PyCapsule_Import

from cells.gru_reset_after cimport default_reset_after
from cells.types cimport GRU_RESET_AFTER, ResetAfter, use_activations
from passes.backward cimport run_backward
from passes.forward cimport run_forward
from passes.layer cimport plan_layer
from passes.operands cimport (
    BIAS_C, BIAS_C_GRAD, BIAS_HC, BIAS_HC_GRAD, BIAS_RU, BIAS_RU_GRAD, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, H_PREV_GRAD,
    INPUTS, OUT_C, OUT_H, OUT_HC, OUT_R, OUT_U, OUTPUTS, W_C, W_C_GRAD, W_RU, W_RU_GRAD, X, X_GRAD
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
TAPE_ARRAYS = GRU_RESET_AFTER.saved
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


# ----------------------------------------------------------------------------------------------------------------- ops
def block_gru_reset_after_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef ResetAfter c = default_reset_after()
    return forward_requirements(&c, T, B, I, H, itemsize, threads)


def block_gru_reset_after_grad_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef ResetAfter c = default_reset_after()
    return backward_requirements(&c, T, B, I, H, itemsize, True, threads)


def block_gru_reset_after(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[::1] b_ru, const store[::1] b_c, const store[::1] b_hc, store[:, :, ::1] r, store[:, :, ::1] u,
    store[:, :, ::1] c, store[:, :, ::1] hc, store[:, :, ::1] h, unsigned char[::1] scratch, Py_ssize_t seq_len_max,
    int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef ResetAfter cell = default_reset_after()
    cdef Forward p = plan_forward_on(&cell, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                     real_itemsize(&x[0, 0, 0]), False, grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[BIAS_RU], inputs[BIAS_C], inputs[BIAS_HC] = &b_ru[0], &b_c[0], &b_hc[0]
    outputs[OUT_R], outputs[OUT_U], outputs[OUT_C] = &r[0, 0, 0], &u[0, 0, 0], &c[0, 0, 0]
    outputs[OUT_HC], outputs[OUT_H], outputs[H_LAST] = &hc[0, 0, 0], &h[0, 0, 0], NULL
    use_panels(&p, align_scratch(scratch))
    with nogil:
        nanoseconds = run_forward(&p, &cell, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


def block_gru_reset_after_grad(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[:, :, ::1] r, const store[:, :, ::1] u, const store[:, :, ::1] c, const store[:, :, ::1] hc,
    const store[:, :, ::1] h, const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] h_prev_grad,
    store[:, ::1] w_ru_grad, store[:, ::1] w_c_grad, store[::1] b_ru_grad, store[::1] b_c_grad, store[::1] b_hc_grad,
    unsigned char[::1] scratch, Py_ssize_t seq_len_max, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef ResetAfter cell = default_reset_after()
    cdef Backward p = plan_backward_on(&cell, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                       real_itemsize(&x[0, 0, 0]), True, grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[H_PREV], inputs[W_RU], inputs[W_C] = &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0]
    inputs[OUT_R], inputs[OUT_U], inputs[OUT_C] = &r[0, 0, 0], &u[0, 0, 0], &c[0, 0, 0]
    inputs[OUT_HC], inputs[OUT_H] = &hc[0, 0, 0], &h[0, 0, 0]
    inputs[H_GRAD], inputs[H_LAST_GRAD] = &h_grad[0, 0, 0], NULL
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0, 0], &h_prev_grad[0, 0]
    outputs[W_RU_GRAD], outputs[W_C_GRAD] = &w_ru_grad[0, 0], &w_c_grad[0, 0]
    outputs[BIAS_RU_GRAD], outputs[BIAS_C_GRAD], outputs[BIAS_HC_GRAD] = &b_ru_grad[0], &b_c_grad[0], &b_hc_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &cell, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def gru_reset_after_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers: `plan_layer` in layer.pxd.

    options : (activation, recurrent_activation)
    """
    cdef ResetAfter c = default_reset_after()
    use_activations(&c, options[0], options[1])
    return plan_layer(&c, task, sizes, threads, storage, format, transposed)
