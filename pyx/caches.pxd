"""The sizes of this CPU's caches in bytes, which `_cpu.pyx` asks for and every kernel module gets when it is loaded."""

cdef extern from *:
    """
    static const Py_ssize_t *cache_sizes;
    """
    const Py_ssize_t *cache_sizes

cdef enum:
    L1, L2, L3


cdef inline void use_cache_sizes(const Py_ssize_t *sizes) noexcept:
    global cache_sizes
    cache_sizes = sizes


cdef inline bint outgrow_l2(Py_ssize_t weights, Py_ssize_t parts) noexcept nogil:
    """Whether a thread that reads its part of so many bytes of weights again and again should fetch them ahead.  Its
    second-level cache decides: how far away the third one is no CPU tells, and a large one may be nearly as far as
    memory."""
    return weights > parts * cache_sizes[L2]
