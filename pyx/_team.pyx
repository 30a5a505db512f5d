"""How many threads a call runs on: asked at every call, and answered here alone.

`get` is the number that a call plans with.  A plan may take fewer, for a small call one; then `ready` says, just before
the kernel runs, how many of these there are now, and `report` takes what the kernel found out about them.  `run` does
all three, for kernels of any kind:

* An OpenMP runtime ends the process where it cannot start a thread.  So, whenever a thread of Python's is about to use
  more of them than the last time, it is tried whether they can be started.
* Where threads took longer than half as many would have, other work occupies the CPUs, or waiting costs more here than
  plans assume.  What they lose is set off against what they have gained lately.  One loss is a debt, which the next
  gains pay: the system may have had a hiccup, and a thread that has slept takes long to wake.  With a loss on top of a
  debt, calls run on half as many threads until they have taken as long as was lost, and twice as long each time that it
  happens again, up to ten times: where other work stays, about a tenth is lost.  Then twice as many are tried.
* A forked child has the runtime's belief in threads, but not the threads: waiting for those would hang.

Results have the same bits for any number of threads.
"""
from cpython.pycapsule cimport PyCapsule_New

import warnings

import numpy

cdef extern from *:
    """
    #include <limits.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdlib.h>

    static __thread int started = 1;  /* threads of the runtime that this one has, itself among them */

    static void *wait_for_gate(void *gate) {
        pthread_mutex_lock((pthread_mutex_t *) gate);
        pthread_mutex_unlock((pthread_mutex_t *) gate);
        return NULL;
    }

    /* How many of so many threads can be started side by side, with stacks of so many bytes; 0 for the usual ones. */
    static int startable(int wanted, size_t stack) {
        pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
        pthread_t *threads = (pthread_t *) malloc(wanted * sizeof(pthread_t));
        pthread_attr_t attributes;
        sigset_t all, before;
        int n = 0;
        if (threads == NULL)
            return 0;
        pthread_attr_init(&attributes);
        if (stack > 0)
            pthread_attr_setstacksize(&attributes, stack);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  /* signals are for the process's own threads */
        pthread_mutex_lock(&gate);
        while (n < wanted && pthread_create(&threads[n], &attributes, wait_for_gate, &gate) == 0)
            n++;
        pthread_mutex_unlock(&gate);
        for (int k = 0; k < n; k++)
            pthread_join(threads[k], NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        free(threads);
        return n;
    }

    /* Written by any thread; nothing else depends on them. */
    static int number = 1, most = 1, warned = 0, adapts = 1;
    static long long gained = 0;                  /* nanoseconds, lately; less than 0 for a debt */
    static int times = 1;                         /* the next rest as a multiple of what is lost */
    static int limit = INT_MAX;                   /* threads that a call runs on for now, after losses */
    static long long rest = 0;                    /* nanoseconds of calls that this limits, until it is raised */
    static __thread long long rests_since = 0;    /* when this thread's call began, if it is one of them */
    static __thread int running = 1;              /* threads of its call */
    #define now(variable) __atomic_load_n(&(variable), __ATOMIC_RELAXED)
    #define becomes(variable, value) __atomic_store_n(&(variable), value, __ATOMIC_RELAXED)
    """
    int started
    int startable(int wanted, size_t stack) nogil
    int number, most, warned, adapts, times, limit, running
    long long gained, rest, rests_since
    enum:
        INT_MAX
    int now(int variable)
    long long now_long "now" (long long variable)
    void becomes(int variable, int value)
    void becomes_long "becomes" (long long variable, long long value)

from runs cimport Kernel
from team cimport nanoseconds

cdef size_t stack = 0


def expect_stacks(size_t size):
    """That the runtime's threads have stacks of so many bytes."""
    global stack
    stack = size


cdef enum:
    LATELY = 20_000_000  # nanoseconds of gains that count
    MOST_TIMES = 10
    LONGEST = 1_000_000_000  # nanoseconds of rest


# For other compiled modules: where the number is that a call plans with.
NUMBER = PyCapsule_New(&number, "blockcell._team.NUMBER", NULL)


cdef void forget() noexcept:
    """What calls have gained and lost."""
    becomes_long(gained, 0)
    becomes_long(rest, 0)
    becomes(times, 1)
    becomes(limit, INT_MAX)


def get():
    """How many threads a call may plan with."""
    return now(number)


def set(int wanted, int possible):
    """From now on so many; of all those that there may be, try again how many there are."""
    becomes(warned, False)
    becomes(most, possible)
    becomes(number, min(wanted, possible))
    forget()


def ready(int planned):
    """How many of the planned threads there are now."""
    global running
    cdef int able, limited = now(limit)
    running = 1
    planned = min(planned, now(most))
    becomes_long(rests_since, nanoseconds() if planned > limited else 0)
    planned = min(planned, limited)
    if planned <= 1:
        return 1
    if planned > started:
        able = started + startable(planned - started, stack)
        if able < planned:
            becomes(most, able)
            becomes(number, min(now(number), able))
            if not now(warned):
                becomes(warned, True)
                warnings.warn(
                    f"blockcell: only {able} of {planned} threads can be started: calls use no more than can be;"
                    f" set_num_threads tries again",
                    RuntimeWarning,
                    stacklevel=2,
                )
            planned = able
    becomes(started, planned)
    running = planned
    return planned


def report(long long lost):
    """What became of a call that was planned with more than one thread."""
    cdef long long balance
    cdef int limited = now(limit)
    if now_long(rests_since):
        becomes_long(rest, now_long(rest) - (nanoseconds() - now_long(rests_since)))
        becomes_long(rests_since, 0)
        if now_long(rest) <= 0:
            becomes(limit, 2 * limited if limited < (now(number) + 1) // 2 else INT_MAX)
            becomes_long(rest, LATELY)
            becomes_long(gained, 0)
    if running > 1 and now(adapts):
        balance = min(now_long(gained) - lost, <long long> LATELY)
        if lost > 0 and now_long(gained) < 0:
            becomes_long(rest, min(-now(times) * balance, <long long> LONGEST))
            becomes(times, min(2 * now(times), <int> MOST_TIMES))
            becomes(limit, running // 2)
            balance = 0
        elif balance == LATELY and limited == INT_MAX:
            becomes(times, 1)
        becomes_long(gained, balance)


def adapt(bint wanted):
    """Whether calls may have to run on fewer threads for what others lost; not in tests, which mean the number."""
    becomes(adapts, wanted)
    forget()


# ----------------------------------------------------------------------------------------------------- running a kernel
cdef int run(int planned, Kernel kernel, void *context) except -1:
    """Run a kernel on as many of the planned threads as there are now."""
    cdef long long lost = kernel(context, 1 if planned == 1 else ready(planned))
    if planned > 1:
        report(lost)
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
