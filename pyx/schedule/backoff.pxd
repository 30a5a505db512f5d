"""Back-off: a call uses fewer threads than it planned while other work keeps the CPUs busy.

A call on several threads tells how many nanoseconds it lost by them: how much longer it took than half as many threads
would have taken (`lost` in team.pxd).  A gain is a negative loss.  The states, and what leads from one to the next:

    FULL        Calls use all threads that they planned.  `balance` is what they have gained in recent calls.
    IN_DEBT     The same, but `balance` is negative: the machine may have had a hiccup.
    BACKED_OFF  Calls use at most `limit` threads.

    FULL       -> IN_DEBT     a loss is larger than the balance
    IN_DEBT    -> FULL        gains have paid the debt
    IN_DEBT    -> BACKED_OFF  another loss: half of the call's threads, for `penalty` times the debt
    BACKED_OFF -> BACKED_OFF  the calls on `limit` threads get into debt and lose again: half as many, as above
    BACKED_OFF -> BACKED_OFF  time is up, and `limit` was far below what users have set: twice as many, for RECENT
    BACKED_OFF -> FULL        time is up, and twice as many are all

The penalty doubles each time, and is 1 again when the balance is full.  With at most MOST_PENALTY, about a tenth of the
time is lost where other work stays.  Threads of Python's share a BackOff and need no lock: its numbers are read and
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
    RECENT = 20_000_000  # nanoseconds of gains that count
    MOST_PENALTY = 10
    LONGEST = 1_000_000_000  # nanoseconds of calls on fewer threads


cdef struct BackOff:
    long long limit  # threads that a call may use; INT_MAX unless BACKED_OFF
    long long remaining  # BACKED_OFF: nanoseconds of calls on `limit` threads until more are tried
    long long balance  # nanoseconds that several threads have gained in recent calls, at most RECENT; < 0: IN_DEBT
    long long penalty  # 1 to MOST_PENALTY: `remaining` as a multiple of the debt


cdef inline void reset(BackOff *b) noexcept nogil:
    """To FULL, without a history."""
    store_relaxed(&b.limit, INT_MAX)
    store_relaxed(&b.remaining, 0)
    store_relaxed(&b.balance, 0)
    store_relaxed(&b.penalty, 1)


cdef inline int allowed_threads(const BackOff *b, int planned) noexcept nogil:
    return <int> min(<long long> planned, load_relaxed(&b.limit))


cdef inline void count_limited_time(BackOff *b, long long nanoseconds, int all_threads) noexcept nogil:
    """A call on fewer threads than planned has taken so long; users have set `all_threads`."""
    cdef long long limit = load_relaxed(&b.limit), remaining = load_relaxed(&b.remaining) - nanoseconds
    if remaining <= 0:  # time is up
        store_relaxed(&b.limit, 2 * limit if limit < (all_threads + 1) // 2 else INT_MAX)
        store_relaxed(&b.balance, 0)
        remaining = RECENT
    store_relaxed(&b.remaining, remaining)


cdef inline void count_loss(BackOff *b, long long loss, int threads) noexcept nogil:
    """A call on so many threads, at least 2, has lost so many nanoseconds by them."""
    cdef long long before = load_relaxed(&b.balance), balance = min(before - loss, <long long> RECENT)
    cdef long long penalty = load_relaxed(&b.penalty)
    if before < 0 and loss > 0:  # IN_DEBT -> BACKED_OFF
        store_relaxed(&b.limit, threads // 2)
        store_relaxed(&b.remaining, min(-penalty * balance, <long long> LONGEST))
        store_relaxed(&b.penalty, min(2 * penalty, <long long> MOST_PENALTY))
        balance = 0
    elif balance == RECENT and load_relaxed(&b.limit) == INT_MAX:
        store_relaxed(&b.penalty, 1)
    store_relaxed(&b.balance, balance)
