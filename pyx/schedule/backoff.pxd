"""Back-off: a call uses fewer threads than it planned while other work keeps the CPUs busy.

A call on several threads has a measured cost: how many nanoseconds longer it took than half as many threads would have
taken (`measured_cost` in team.pxd).  A cost below zero is a benefit.  The states, and what leads from one to the next:

    FULL        Calls use all threads that they planned.  `benefit` is the sum over recent calls.
    COSTLY      The same, but `benefit` is below zero: the machine may have had a hiccup.
    BACKED_OFF  Calls use at most `limit` threads.

    FULL       -> COSTLY      the cost of a call is larger than the benefit
    COSTLY     -> FULL        the benefit of later calls is larger than the cost
    COSTLY     -> BACKED_OFF  another call has a cost: half of its threads, for `penalty` times the cost of all
    BACKED_OFF -> BACKED_OFF  calls on `limit` threads are costly twice, too: half as many, as above
    BACKED_OFF -> BACKED_OFF  time is up, and `limit` was far below what users have set: twice as many, for RECENT
    BACKED_OFF -> FULL        time is up, and twice as many are all

The penalty doubles each time, and is 1 again when the benefit is RECENT.  With at most MAX_PENALTY, about a tenth of
the time is lost where other work stays.  Python threads share a BackOff and need no lock: its numbers are read and
written whole, and a lost update does no more harm than a call that was not counted.
"""
from libc.limits cimport INT_MAX

cdef extern from *:
    """
    static inline long long load_relaxed(const long long *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void store_relaxed(long long *p, long long value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
    """
    long long load_relaxed(const long long *p) noexcept nogil
    void store_relaxed(long long *p, long long value) noexcept nogil

cdef enum:
    RECENT = 20_000_000  # nanoseconds: the most benefit that is remembered
    MAX_PENALTY = 10
    LONGEST = 1_000_000_000  # nanoseconds of calls on fewer threads


cdef struct BackOff:
    long long limit  # threads that a call may use; INT_MAX unless BACKED_OFF
    long long remaining  # BACKED_OFF: nanoseconds of calls on `limit` threads until more are tried
    long long benefit  # nanoseconds that several threads have saved in recent calls, at most RECENT; below 0: COSTLY
    long long penalty  # 1 to MAX_PENALTY: `remaining` as a multiple of the cost


cdef inline void reset_back_off(BackOff *b) noexcept nogil:
    """Set the state to FULL, without a history."""
    store_relaxed(&b.limit, INT_MAX)
    store_relaxed(&b.remaining, 0)
    store_relaxed(&b.benefit, 0)
    store_relaxed(&b.penalty, 1)


cdef inline int allowed_threads(const BackOff *b, int planned) noexcept nogil:
    """Return how many of its planned threads a call may use."""
    return <int> min(<long long> planned, load_relaxed(&b.limit))


cdef inline void count_limited_time(BackOff *b, long long nanoseconds, int all_threads) noexcept nogil:
    """Count the time of a call on fewer threads than planned; users have set `all_threads`."""
    cdef long long limit = load_relaxed(&b.limit), remaining = load_relaxed(&b.remaining) - nanoseconds
    if remaining <= 0:  # time is up
        store_relaxed(&b.limit, 2 * limit if limit < (all_threads + 1) // 2 else INT_MAX)
        store_relaxed(&b.benefit, 0)
        remaining = RECENT
    store_relaxed(&b.remaining, remaining)


cdef inline void count_cost(BackOff *b, long long cost, int threads) noexcept nogil:
    """Count the cost, in nanoseconds, that a call had by running on so many threads, at least 2."""
    cdef long long before = load_relaxed(&b.benefit), benefit = min(before - cost, <long long> RECENT)
    cdef long long penalty = load_relaxed(&b.penalty)
    if before < 0 and cost > 0:  # COSTLY -> BACKED_OFF
        store_relaxed(&b.limit, threads // 2)
        store_relaxed(&b.remaining, min(-penalty * benefit, <long long> LONGEST))
        store_relaxed(&b.penalty, min(2 * penalty, <long long> MAX_PENALTY))
        benefit = 0
    elif benefit == RECENT and load_relaxed(&b.limit) == INT_MAX:
        store_relaxed(&b.penalty, 1)
    store_relaxed(&b.benefit, benefit)
