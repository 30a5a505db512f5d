"""How many threads a call runs on: asked at every call, and answered here alone.

`get` is the number that a call plans with.  A plan may take fewer, for a small call one.  `run` decides how many of
these a kernel runs on, and counts what it lost by them:

* An OpenMP runtime ends the process where it cannot start a thread.  So, whenever a thread of Python's is about to use
  more of them than the last time, it is tried whether they can be started.
* While other work keeps the CPUs busy, calls back off: backoff.pxd.
* A forked child has the runtime's belief in threads, but not the threads: waiting for those would hang.

Results have the same bits for any number of threads.
"""
from cpython.pycapsule cimport PyCapsule_New

import warnings

import numpy

from schedule.backoff cimport BackOff, allowed_threads, count_limited_time, count_loss, reset
from schedule.runs cimport Kernel
from schedule.team cimport nanoseconds

cdef extern from "schedule/startable.h":
    int started
    int startable(int wanted, size_t stack) nogil
    int number, most, warned, backs_off
    int load_int(int variable)
    void store_int(int variable, int value)

cdef size_t stack = 0


def expect_stacks(size_t size):
    """That the runtime's threads have stacks of so many bytes."""
    global stack
    stack = size


cdef BackOff back_off
reset(&back_off)

# For other compiled modules: where the number is that a call plans with.
NUMBER = PyCapsule_New(&number, "blockcell._team.NUMBER", NULL)


def get():
    """How many threads a call may plan with."""
    return load_int(number)


def set(int wanted, int possible):
    """From now on so many; of all those that there may be, try again how many there are."""
    store_int(warned, False)
    store_int(most, possible)
    store_int(number, min(wanted, possible))
    reset(&back_off)


def adapt(bint wanted):
    """Whether calls back off; not in tests, which mean the number.  In either case earlier losses are forgotten."""
    store_int(backs_off, wanted)
    reset(&back_off)


cdef int start(int wanted) except -1:
    """How many of the wanted threads there are after an attempt to start those that are missing."""
    cdef int able
    if wanted > started:
        able = started + startable(wanted - started, stack)
        if able < wanted:
            store_int(most, able)
            store_int(number, min(load_int(number), able))
            if not load_int(warned):
                store_int(warned, True)
                warnings.warn(
                    f"blockcell: only {able} of {wanted} threads can be started: calls use no more than can be;"
                    f" set_num_threads tries again",
                    RuntimeWarning,
                    stacklevel=2,
                )
            wanted = able
    store_int(started, wanted)
    return wanted


# ----------------------------------------------------------------------------------------------------- running a kernel
cdef int run(int planned, Kernel kernel, void *context) except -1:
    """Run a kernel on as many of the planned threads as there are now and are of use."""
    cdef int possible, allowed, threads = 1
    cdef long long begun, loss
    if planned == 1:
        kernel(context, 1)
        return 0
    possible = min(planned, load_int(most))
    allowed = allowed_threads(&back_off, possible)
    if allowed > 1:
        threads = start(allowed)
    begun = nanoseconds()
    loss = kernel(context, threads)
    if allowed < possible:
        count_limited_time(&back_off, nanoseconds() - begun, load_int(number))
    if threads > 1 and load_int(backs_off):
        count_loss(&back_off, loss, threads)
    return 0


RUN = PyCapsule_New(<void *> run, "blockcell._team.RUN", NULL)  # for other compiled modules: runs.pxd


cdef long long call(void *context, int ready) except? -1:
    kernel, arguments = <tuple> context
    arguments += (ready,)
    return kernel(*arguments)


def compute(kernel, work, tuple sizes, int threads, tuple arguments):
    """Run one of Python's: `work` tells by the sizes how much scratch it needs, which comes after the arguments."""
    cdef int planned
    size, planned, _ = work(*sizes, threads)
    # By +: where memory is short, Cython's (*arguments, more) crashes.
    context = kernel, arguments + (numpy.empty(size, numpy.uint8), threads)
    run(planned, call, <void *> context)
