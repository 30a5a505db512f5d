"""How many of its planned threads a call runs on, asked at every call.

`get` is the number that a call plans with.  Its plan (cost.pxd) may take fewer, for a small call one.  `run` decides
how many of these a kernel runs on, and counts what having several cost:

* An OpenMP runtime ends the process where it cannot start a thread.  So, whenever a Python thread is about to use more
  of them than the last time, a trial tells whether they can be started.
* While other work keeps the CPUs busy, calls back off: backoff.pxd.
* A forked child has the runtime's state, but not its threads: waiting for those would hang.

Results are bit-identical for any number of threads.
"""
from cpython.pycapsule cimport PyCapsule_New

import warnings

from schedule.backoff cimport BackOff, allowed_threads, count_cost, count_limited_time, reset_back_off
from schedule.runs cimport KernelFunction
from schedule.team cimport Team, nanoseconds, own_cpu, start_team, take_cpu

cdef extern from "schedule/startable.h":
    int started_threads
    int count_startable(int wanted, size_t stack) nogil
    int usable_threads, possible_threads, has_warned, backs_off
    int load_int(int variable)
    void store_int(int variable, int value)

cdef size_t stack_size = 0  # bytes, of the runtime's threads; 0: the default


def expect_stacks(size_t size):
    """Assume that the runtime's threads have stacks of so many bytes; 0 is the default."""
    global stack_size
    stack_size = size


cdef BackOff back_off
reset_back_off(&back_off)

# For other compiled modules: the address of the number that a call plans with.
NUMBER = PyCapsule_New(&usable_threads, "blockcell._team.NUMBER", NULL)


def get():
    """Return how many threads a call may plan with."""
    return load_int(usable_threads)


def set(int wanted, int possible):
    """Let calls plan with so many threads, at most those that are possible; forget what earlier calls have found."""
    store_int(has_warned, False)
    store_int(possible_threads, possible)
    store_int(usable_threads, min(wanted, possible))
    reset_back_off(&back_off)


def adapt(bint wanted):
    """Switch back-off on or off, as for tests that mean the number of threads; earlier costs are forgotten."""
    store_int(backs_off, wanted)
    reset_back_off(&back_off)


cdef int start_threads(int wanted) except -1:
    """Return how many of the wanted threads there are, after a trial of those that this thread has not yet started."""
    cdef int ready
    if wanted > started_threads:
        ready = started_threads + count_startable(wanted - started_threads, stack_size)
        if ready < wanted:
            store_int(possible_threads, ready)
            store_int(usable_threads, min(load_int(usable_threads), ready))
            if not load_int(has_warned):
                store_int(has_warned, True)
                warnings.warn(
                    f"blockcell: only {ready} of {wanted} threads can be started: calls use no more than can be;"
                    f" set_num_threads tries again",
                    RuntimeWarning,
                    stacklevel=2,
                )
            wanted = ready
    store_int(started_threads, wanted)
    return wanted


# ----------------------------------------------------------------------------------------------------- running a kernel
cdef int run(int planned, KernelFunction kernel, void *context) except -1:
    """Run a kernel on as many of the planned threads as there are now and are of use.

    context : the caller's; passed to the kernel
    """
    cdef int possible, allowed, threads = 1
    cdef long long start_time, cost
    if planned == 1:
        kernel(context, 1)
        return 0
    possible = min(planned, load_int(possible_threads))
    allowed = allowed_threads(&back_off, possible)
    if allowed > 1:
        threads = start_threads(allowed)
    start_time = nanoseconds()
    cost = kernel(context, threads)
    if allowed < possible:
        count_limited_time(&back_off, nanoseconds() - start_time, load_int(usable_threads))
    if threads > 1 and load_int(backs_off):
        count_cost(&back_off, cost, threads)
    return 0


RUN = PyCapsule_New(<void *> run, "blockcell._team.RUN", NULL)  # for other compiled modules: runs.pxd


cdef long long call_kernel(void *kernel, int ready) except? -1:
    """Call a kernel that is a function of Python's on the threads that are ready."""
    return (<object> kernel)(ready)


def run_for_tests(kernel, int planned):
    """Run a kernel that is a function of Python's, which takes the number of threads that are ready."""
    run(planned, call_kernel, <void *> kernel)


def take_cpus_for_tests(int count):
    """Return the CPUs that a team of so many threads takes; this thread plays all of them, one after the other."""
    cdef Team team
    start_team(&team, 1, count)
    cpus = [own_cpu]
    while len(cpus) < count:
        take_cpu(&team)
        cpus.append(own_cpu)
    return cpus
