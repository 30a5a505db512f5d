"""The dense layer's kernels: what Python calls with typed memoryviews.

The equations, the phases and the plan of scratch are in dense.pxd.  `..._work` returns what a kernel
requires: bytes of scratch, threads, and how many of these share the units of a row.  `..._plan` returns a layer's
kernel with its plan, and what this plan requires.  Kernels return the nanoseconds that they lost by having several
threads.
"""
from cpython.pycapsule cimport PyCapsule_Import, PyCapsule_New

from cells.dense cimport Backward, Forward, backward_of, forward_of, run_pack, run_pass, run_pass_back
from passes.arrays cimport Pass
from product.integer cimport READ_PAST, ProductInUse, use_product
from product.panels cimport pack_bias, pack_quantized
from product.quantized cimport INT8, UNQUANTIZED, bytes_of_code
from product.tile cimport aligned, computed_size, storage_of, store
from schedule.cost cimport requirements_of
from schedule.machine cimport Machine, use_machine
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


def dense_pack_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, 1, I, O, itemsize, UNQUANTIZED, 0, 1)
    return p.w.count * p.w.size * itemsize + 64, 1, 1


def dense_pack(const store[:, ::1] w, const store[::1] b, unsigned char[::1] packed):
    """Pack a layer's weights as its kernel reads them."""
    cdef Forward p = forward_of(1, 1, w.shape[0], w.shape[1], computed_size(&w[0, 0]), UNQUANTIZED, 0, 1)
    p.w.base = aligned(packed)
    run_pack(&p, &w[0, 0], &b[0])


def dense_pack_quantized_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int format, int num_threads):
    """`format` says how the weights are quantized."""
    cdef Forward p = forward_of(1, 1, I, O, sizeof(float), format, 0, 1)
    return p.w.count * p.w.size * sizeof(float) + 64 + READ_PAST * (format == INT8), 1, 1


def dense_pack_quantized(
    unsigned char[:, ::1] w, float[::1] scale, const float[::1] b, unsigned char[::1] packed, int format,
    bint back
):
    """packed := the bias, and w, which is codes and for int8 scales; or copy codes and scales `back`."""
    cdef unsigned char *codes = &w[0, 0]
    cdef float *scales = &scale[0]
    cdef const float *bias = &b[0]
    cdef Forward p = forward_of(1, 1, w.shape[0], w.shape[1] // bytes_of_code(format), sizeof(float), format, 0, 1)
    p.w.base = aligned(packed)
    with nogil:
        if not back:
            pack_bias(&p.w, <float *> p.w.base, &bias, 0, p.w.count)
        pack_quantized(&p.w, &codes, &scales, back)


cdef struct LayerPlan:
    Forward p
    int storage


cdef long long layer(const void *plan, int ready, void *work, const Pass *a) noexcept nogil:
    cdef const LayerPlan *s = <const LayerPlan *> plan
    return run_pass(&s.p, s.storage, ready, work, a)


def dense_layer_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int num_threads, int format,
    int activation
):
    """What runs T steps of a layer whose arrays are of this kind, its plan, and what this requires."""
    cdef LayerPlan s
    s.p = forward_of(T, B, I, O, computed_size(&kind[0]), format, activation, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer, NULL, NULL), (<char *> &s)[:sizeof(LayerPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)


cdef struct GradPlan:
    Backward p
    int storage


cdef long long layer_grad(const void *plan, int ready, void *work, const Pass *a) noexcept nogil:
    cdef const GradPlan *s = <const GradPlan *> plan
    return run_pass_back(&s.p, s.storage, ready, work, a)


def dense_layer_grad_plan(
    const store[::1] kind, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int num_threads, int activation
):
    """The same for the gradients."""
    cdef GradPlan s
    s.p = backward_of(T, B, I, O, computed_size(&kind[0]), activation, num_threads)
    s.storage = storage_of(&kind[0])
    plan = PyCapsule_New(<void *> layer_grad, NULL, NULL), (<char *> &s)[:sizeof(GradPlan)]
    return plan + requirements_of(&s.p.workspace, s.p.L, &s.p.grid)
