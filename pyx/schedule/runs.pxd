"""How compiled modules run a kernel: `run` in _team.pyx decides on how many threads, and counts what these cost."""

# A kernel with its arguments in `context`: runs it on the threads that are ready, at most as many as its plan has, and
# returns the nanoseconds that having several threads cost (`measured_cost` in team.pxd).
ctypedef long long (*KernelFunction)(void *context, int ready) except? -1
# `run`: `planned` are the threads of the kernel's plan; `context` is the caller's, and is passed to the kernel.
ctypedef int (*RunKernel)(int planned, KernelFunction kernel, void *context) except -1

cdef extern from *:
    """
    static inline int load_number(const int *number) { return __atomic_load_n(number, __ATOMIC_RELAXED); }
    """
    int load_number(const int *number) noexcept nogil  # of threads, which other Python threads may set meanwhile
