"""Checks of numpy arrays that go to a kernel.  No check raises."""
from numpy cimport (
    PyArray_BYTES, PyArray_CheckExact, PyArray_ISCARRAY_RO, PyArray_NBYTES, PyArray_NDIM, PyArray_SAMESHAPE,
    PyArray_TYPE, ndarray, npy_intp
)


cdef inline bint is_plain(array, int type_number, int rank) noexcept:
    """Return whether `array` is an array of this type and rank, C-contiguous, aligned and of native byte order."""
    return (
        PyArray_CheckExact(array)
        and PyArray_ISCARRAY_RO(<ndarray> array)
        and PyArray_TYPE(<ndarray> array) == type_number
        and PyArray_NDIM(<ndarray> array) == rank
    )


cdef inline bint is_like(array, ndarray other) noexcept:
    """Return whether `array` is plain, and has the other's type and shape."""
    return is_plain(array, PyArray_TYPE(other), PyArray_NDIM(other)) and PyArray_SAMESHAPE(<ndarray> array, other)


cdef inline bint overlap(ndarray a, ndarray b) noexcept:
    """Return whether two C-contiguous arrays have memory in common."""
    cdef char *a0 = PyArray_BYTES(a)
    cdef char *b0 = PyArray_BYTES(b)
    cdef npy_intp a_size = PyArray_NBYTES(a), b_size = PyArray_NBYTES(b)
    return a_size > 0 and b_size > 0 and a0 < b0 + b_size and b0 < a0 + a_size
