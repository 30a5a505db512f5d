"""What plans assume about the machine: the sizes of its caches, and what work and threads cost on it.

`_cpu.pyx` fills it in, and every kernel module gets its address when it is loaded.  Tests and benchmarks/scaling.py
have it changed, before a plan is made.  machine.h says what each field is.
"""

from cpython.pyport cimport PY_SSIZE_T_MAX

cdef extern from "schedule/machine.h":
    ctypedef struct Machine:
        Py_ssize_t caches[3]
        Py_ssize_t groups, members, prefetching, only_part
        double waking, waking_each, sleep_cost, barrier, barrier_each, exchange, speed, single_thread_limit
        double read_speed[3]
    const Machine *machine

cdef enum:
    L1, L2, L3


cdef inline void use_machine(const Machine *this_machine) noexcept:
    """Let the plans of this module use a Machine, which belongs to `_cpu.pyx` and is never freed."""
    global machine
    machine = this_machine


cdef inline Py_ssize_t fewest_prefetching_rows(Py_ssize_t weights, Py_ssize_t parts) noexcept nogil:
    """Return how many rows a product has at least if it prefetches weights, of which a thread reads its part of
    `weights` bytes again and again.

    A part that outgrows half of the second-level cache is worth it.  One row is multiplied as fast as CPUs fill that
    cache by themselves, and gains only where weights outgrow a quarter of the third-level cache, which others use, too.
    """
    if not machine.prefetching or 2 * weights <= parts * machine.caches[L2]:
        return PY_SSIZE_T_MAX
    return 1 if 4 * weights > machine.caches[L3] else 2
