"""The dense layer's kernels: what Python calls with typed memoryviews.

The equations, the phases and the plan of scratch are in dense.pxd.  `..._work` returns the bytes of scratch that a
kernel needs and how many threads are of use to it.  Kernels return the nanoseconds that they lost by having several.
"""
from cpython.pycapsule cimport PyCapsule_Import, PyCapsule_New

from caches cimport use_cache_sizes
from dense cimport (
    Arrays, Backward, Forward, backward_of, forward_of, run_backward, run_forward, run_pack, run_stream,
    take_batch_first, take_marks, take_marks_back
)
from narrow cimport FLOAT16, INT8, WIDE, bytes_of
from panels cimport pack_bias, pack_narrow
from source cimport BLOCKCELL_SOURCE
from steps cimport strided
from tile cimport aligned, computed_size, storage_of, store

SOURCE = BLOCKCELL_SOURCE.decode()
use_cache_sizes(<const Py_ssize_t *> PyCapsule_Import("blockcell._cpu.CACHE_SIZES", 0))


cdef forward_work(Py_ssize_t rows, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(rows, 1, I, O, itemsize, WIDE, 0, num_threads)
    return p.total * itemsize + 64, p.threads


def dense_pack_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, 1, I, O, itemsize, WIDE, 0, 1)
    return p.w.count * p.w.size * itemsize + 64, 1


def dense_pack(const store[:, ::1] w, const store[::1] b, unsigned char[::1] packed):
    """Pack a layer's weights as its kernel reads them."""
    cdef Forward p = forward_of(1, 1, w.shape[0], w.shape[1], computed_size(&w[0, 0]), WIDE, 0, 1)
    p.w.base = aligned(packed)
    run_pack(&p, &w[0, 0], &b[0])


def dense_narrow_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    """`itemsize` is that of the codes."""
    cdef Forward p = forward_of(1, 1, I, O, sizeof(float), INT8 if itemsize == 1 else FLOAT16, 0, 1)
    return p.w.count * p.w.size * sizeof(float) + 64, 1


def dense_narrow(
    unsigned char[:, ::1] w, float[::1] scale, const float[::1] b, unsigned char[::1] packed, int narrow,
    bint back
):
    """Pack a layer's weights that are stored in fewer bytes, as codes and perhaps scales; or copy these `back`."""
    cdef unsigned char *codes = &w[0, 0]
    cdef float *scales = &scale[0]
    cdef const float *bias = &b[0]
    cdef Forward p = forward_of(1, 1, w.shape[0], w.shape[1] // bytes_of(narrow), sizeof(float), narrow, 0, 1)
    p.w.base = aligned(packed)
    with nogil:
        if not back:
            pack_bias(&p.w, <float *> p.w.base, &bias, 0, p.w.count)
        pack_narrow(&p.w, &codes, &scales, back)


def dense_layer_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    return forward_work(T * B, I, O, itemsize, num_threads)


def dense_layer(
    const store[:, :, :] x, unsigned char[::1] packed, store[:, :, :] y, const unsigned char[:, ::1] marks,
    int narrow, int activation, unsigned char[::1] work, int num_threads, int ready
):
    """The rows of x and y may lie anywhere."""
    cdef Forward p = forward_of(x.shape[0], x.shape[1], x.shape[2], y.shape[2], computed_size(&x[0, 0, 0]), narrow,
                                activation, num_threads)
    cdef long long nanoseconds
    p.x_layout, p.y_layout = strided(x.strides, sizeof(store)), strided(y.strides, sizeof(store))
    if marks is not None:
        take_marks(&p, &marks[0, 0])
    p.w.base = aligned(packed)
    with nogil:
        nanoseconds = run_forward(&p, &x[0, 0, 0], &y[0, 0, 0], aligned(work), ready)
    return nanoseconds


def dense_layer_grad_work(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads
):
    cdef Backward p = backward_of(T, B, I, O, itemsize, 0, num_threads)
    return p.total * itemsize + 64, p.threads


def dense_layer_grad(
    const store[:, :, ::1] x, const store[:, ::1] w, const store[:, :, ::1] y, const store[:, :, :] y_grad,
    store[:, :, :] x_grad, store[:, ::1] w_grad, store[::1] b_grad, const unsigned char[:, ::1] marks, int activation,
    unsigned char[::1] work, int num_threads, int ready
):
    """The gradients of that, from x and y without gaps.  The rows of y_grad and x_grad may lie anywhere."""
    cdef Backward p = backward_of(x.shape[0], x.shape[1], w.shape[0], w.shape[1], computed_size(&x[0, 0, 0]),
                                  activation, num_threads)
    cdef Arrays a
    cdef long long nanoseconds
    a.w, a.y, a.y_grad = &w[0, 0], &y[0, 0, 0], &y_grad[0, 0, 0]
    a.x_grad, a.w_grad, a.b_grad = &x_grad[0, 0, 0], &w_grad[0, 0], &b_grad[0]
    p.d_y_layout, p.d_x_layout = strided(y_grad.strides, sizeof(store)), strided(x_grad.strides, sizeof(store))
    if marks is not None:
        take_marks_back(&p, &marks[0, 0], aligned(work))
    with nogil:
        nanoseconds = run_backward(&p, &a, &x[0, 0, 0], aligned(work), ready)
    return nanoseconds


# -------------------------------------------------------------------------------------------------------------- streams
cdef struct StreamPlan:
    Forward p
    int storage


cdef long long stream(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    cdef const StreamPlan *s = <const StreamPlan *> plan
    return run_stream(&s.p, s.storage, ready, work, x, y)


def dense_stream_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int num_threads):
    return forward_work(T * B, I, O, itemsize, num_threads)


def dense_stream(
    const store[::1] b, unsigned char[::1] packed, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O,
    bint batch_first, int narrow, int activation, int num_threads
):
    """What `_stream` calls for T steps, and the plan that it passes to it."""
    cdef StreamPlan s
    s.p = forward_of(T, B, I, O, computed_size(&b[0]), narrow, activation, num_threads)
    s.storage = storage_of(&b[0])
    s.p.w.base = aligned(packed)
    if batch_first:
        take_batch_first(&s.p)
    return PyCapsule_New(<void *> stream, NULL, NULL), (<char *> &s)[:sizeof(StreamPlan)]
