"""The plan of a layer's call, and what else `_stream.pyx` and `_tensors.pyx` cimport from `_layers.pyx`.

The folder is named `blockcell` because Cython looks for a module's .pxd file by the module's full name."""
from passes.arrays cimport Kernel, Pass


cdef class KernelPlan:
    """A kernel of a layer, and how it runs T steps of B rows."""

    cdef object parameters  # bytes: the plan as a struct of the kernel's module
    cdef Kernel kernel
    cdef Py_ssize_t T, B, size  # size: bytes of scratch
    cdef int format  # how the matrices of weights are quantized
    cdef int threads, planned_threads  # that there may be; that the kernel uses
    cdef bint keeps_gil  # whether the kernel is too short to let other Python threads run

    cdef execute(self, char *scratch, const Pass *a)


cdef KernelPlan plan_from(
    planned, int format, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int threads
)
cdef KernelPlan plan_for(KernelPlan last, layer, task, int format, Py_ssize_t T, Py_ssize_t B, int threads=*)
cdef char *packed_address(object packed) noexcept
cdef bint is_shaped(array, int type_number, int rank, Py_ssize_t T, Py_ssize_t B, Py_ssize_t width) noexcept
cdef Py_ssize_t longest_length(object lengths) noexcept
