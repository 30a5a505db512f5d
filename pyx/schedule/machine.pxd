"""What plans ask about the machine: the sizes of its caches, and what work and threads cost on it.

`_cpu.pyx` fills it in, and every kernel module gets its address when it is loaded.  Tests and benchmarks/scaling.py
have it changed, before a plan is made.
"""

cdef extern from "schedule/machine.h":
    ctypedef struct Machine:
        Py_ssize_t caches[3]
        Py_ssize_t groups, members, prefetching, only
        double waking, waking_each, slept, barrier, barrier_each, exchange, speed, alone
        double reading[3]
    const Machine *machine

cdef enum:
    L1, L2, L3


cdef inline void use_machine(const Machine *measured) noexcept:
    global machine
    machine = measured


cdef inline bint to_prefetch(Py_ssize_t weights, Py_ssize_t parts) noexcept nogil:
    """Whether a thread that reads its part of so many bytes of weights again and again should fetch them ahead: where
    this CPU gains by it and they outgrow its second-level cache."""
    return machine.prefetching and weights > parts * machine.caches[L2]
