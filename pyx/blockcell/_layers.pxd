"""The plan of a layer's call, which `_stream.pyx` and `_tensors.pyx` cimport from `_layers.pyx`.

The folder is named `blockcell` because Cython looks for a module's .pxd file by the module's full name."""
from passes.arrays cimport LayerKernel, Pass


cdef class Plan:
    """How T steps of B rows are run with so many threads."""

    cdef object parameters
    cdef LayerKernel kernel
    cdef Py_ssize_t T, B, size  # bytes of scratch
    cdef int format, threads, planned  # how weights are packed; threads that there may be; those that are of use
    cdef bint brief

    cdef execute(self, char *work, const Pass *a)


cdef Plan plan_from(tuple planned, int format, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int threads)
cdef Plan plan_of(Plan last, layer, task, int format, Py_ssize_t T, Py_ssize_t B, int threads=*)
cdef char *address_of(object packed) noexcept
cdef bint is_shaped(array, int type_number, int rank, Py_ssize_t T, Py_ssize_t B, Py_ssize_t width) noexcept
