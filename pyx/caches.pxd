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


cdef inline bint outgrow_caches(Py_ssize_t weights) noexcept nogil:
    """Whether so many bytes of weights, read again and again, come so late that it pays to fetch them ahead."""
    return weights > cache_sizes[L3] // 4
