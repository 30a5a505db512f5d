"""The threads of a call: how many, who does what, where they meet.  Without OpenMP there is one."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    static inline int team_size(void) { return omp_get_num_threads(); }
    static inline void meet(Py_ssize_t parts) {
        if (parts > 1) {
            #pragma omp barrier
        }
    }
    #else
    static inline int team_size(void) { return 1; }
    static inline void meet(Py_ssize_t parts) { }
    #endif
    """
    int team_size() noexcept nogil
    void meet(Py_ssize_t parts) noexcept nogil  # of a team of so many; one alone does not wait


cdef inline Py_ssize_t share(Py_ssize_t n, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Where a thread's part of n things begins; it ends where the next part begins."""
    return n * part // parts
