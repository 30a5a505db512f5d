"""The plain RNN's kernels: what Python calls with typed memoryviews.

The equations are in rnn.pxd, the phases in forward.pxd and backward.pxd.  A kernel here names its arrays, with the
names of blockcell/optable.py, and makes the plan (plan.pxd).  `..._work` returns what a kernel
requires: bytes of scratch, threads, and how many of these share the units of a row.  `..._plan` returns a layer's
kernel with its plan, and what this plan requires.  Kernels return the nanoseconds that they lost by having several
threads.
"""
from cpython.pycapsule cimport PyCapsule_Import, PyCapsule_New

from cells.activations cimport activation_of
from cells.rnn cimport rnn_of
from cells.types cimport Rnn
from passes.arrays cimport Pass
from passes.backward cimport run_backward, run_pass_back
from passes.forward cimport run_forward, run_pack, run_pack_quantized, run_pass
from passes.operands cimport (
    BIAS, BIAS_GRAD, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, H_PREV_GRAD, INPUTS, OUT_H, OUTPUTS, W, W_GRAD, X, X_GRAD
)
from product.integer cimport READ_PAST, ProductInUse, use_product
from product.quantized cimport INT8, bytes_of_code
from product.tile cimport aligned, computed_size, storage_of, store
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
    cdef Forward p = forward_of(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], computed_size(&x[0, 0, 0]),
                                False, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[BIAS] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &b[0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0, 0], NULL
    use_panels(&p, aligned(work))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, aligned(work), ready)
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
                                  computed_size(&x[0, 0, 0]), True, grid_of(threads // members, members))
    cdef long long nanoseconds
    c.activation = activation_of(activation)
    inputs[X], inputs[H_PREV], inputs[W], inputs[OUT_H] = &x[0, 0, 0], &h_prev[0, 0], &w[0, 0], &h[0, 0, 0]
    inputs[H_GRAD], inputs[H_LAST_GRAD] = &h_grad[0, 0, 0], NULL
    outputs[X_GRAD], outputs[H_PREV_GRAD] = &x_grad[0, 0, 0], &h_prev_grad[0, 0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &c, inputs, outputs, aligned(work), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def rnn_pack_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Rnn c = rnn_of()
    cdef Forward p = forward_of(&c, 1, 1, I, H, itemsize, True, grid_of(1, 1))
    return p.panels * itemsize + 64, 1, 1


def rnn_pack(const store[:, ::1] w, const store[::1] b, unsigned char[::1] packed):
    """Pack a layer's weights as its kernel reads them."""
    cdef const store *inputs[INPUTS]
    cdef Rnn c = rnn_of()
    cdef Py_ssize_t H = w.shape[1]
    cdef Forward p = forward_of(&c, 1, 1, w.shape[0] - H, H, computed_size(&w[0, 0]), True, grid_of(1, 1))
    inputs[W], inputs[BIAS] = &w[0, 0], &b[0]
    use_panels(&p, aligned(packed))
    run_pack(&p, &c, inputs)


def rnn_pack_quantized_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int format, int num_threads):
    """`format` says how the weights are quantized."""
    cdef Rnn c = rnn_of()
    c.format = format
    cdef Forward p = forward_of(&c, 1, 1, I, H, sizeof(float), True, grid_of(1, 1))
    return p.panels * sizeof(float) + 64 + READ_PAST * (format == INT8), 1, 1


def rnn_pack_quantized(
    unsigned char[:, ::1] w, float[::1] scale, const float[::1] b, unsigned char[::1] packed, int format, bint back
):
    """Pack a layer's weights that are stored in fewer bytes, as codes and perhaps scales; or copy these `back`."""
    cdef const float *inputs[INPUTS]
    cdef unsigned char *codes = &w[0, 0]
    cdef float *scales = &scale[0]
    cdef Rnn c = rnn_of()
    cdef Py_ssize_t H = w.shape[1] // bytes_of_code(format)
    c.format = format
    cdef Forward p = forward_of(&c, 1, 1, w.shape[0] - H, H, sizeof(float), True, grid_of(1, 1))
    inputs[BIAS] = &b[0]
    use_panels(&p, aligned(packed))
    with nogil:
        run_pack_quantized(&p, &c, inputs, &codes, &scales, back)


cdef struct LayerPlan:
    Forward p
    Rnn c
    int storage


cdef long long layer(const void *plan, int ready, void *work, const Pass *a) noexcept nogil:
    cdef const LayerPlan *s = <const LayerPlan *> plan
    return run_pass(&s.p, &s.c, s.storage, ready, work, a)


def rnn_layer_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int num_threads, int format,
    activation
):
    """What runs T steps of a layer whose arrays are of this kind, its plan, and what this requires."""
    cdef LayerPlan s
    s.c = rnn_of()
    s.c.activation, s.c.format = activation_of(activation), format
    s.p = plan_forward(&s.c, T, B, I, H, computed_size(&kind[0]), True, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer, NULL, NULL), (<char *> &s)[:sizeof(LayerPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)


cdef struct GradPlan:
    Backward p
    Rnn c
    int storage


cdef long long layer_grad(const void *plan, int ready, void *work, const Pass *a) noexcept nogil:
    cdef const GradPlan *s = <const GradPlan *> plan
    return run_pass_back(&s.p, &s.c, s.storage, ready, work, a)


def rnn_layer_grad_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int num_threads, activation
):
    """The same for the gradients."""
    cdef GradPlan s
    s.c = rnn_of()
    s.c.activation = activation_of(activation)
    s.p = plan_backward(&s.c, T, B, I, H, computed_size(&kind[0]), True, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer_grad, NULL, NULL), (<char *> &s)[:sizeof(GradPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)


# -------------------------------------------------------------------------- layers with weights as PyTorch has them
cdef Rnn torch_cell(activation):
    """w_ih [H,I] and w_hh [H,H]."""
    cdef Rnn c = rnn_of()
    c.transposed, c.activation = True, activation_of(activation)
    return c


def rnn_torch_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int num_threads, activation
):
    """What runs T steps of a layer whose arrays are of this kind, its plan, and what this requires."""
    cdef LayerPlan s
    s.c = torch_cell(activation)
    s.p = plan_forward(&s.c, T, B, I, H, computed_size(&kind[0]), False, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer, NULL, NULL), (<char *> &s)[:sizeof(LayerPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)


def rnn_torch_grad_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int num_threads, activation
):
    """The same for the gradients."""
    cdef GradPlan s
    s.c = torch_cell(activation)
    s.p = plan_backward(&s.c, T, B, I, H, computed_size(&kind[0]), True, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer_grad, NULL, NULL), (<char *> &s)[:sizeof(GradPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)
