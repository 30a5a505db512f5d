"""The team of threads of a call: how work is shared out, and where threads wait for each other.

A team may consist of groups of equally many threads, whose numbers are neighbours.  Each group has a barrier of its
own, so groups do not wait for each other.  If the runtime starts fewer threads than asked for, each barrier
is one of all threads.

A waiting thread spins for tens of microseconds, then sleeps, because the thread that it waits for may need its core.
The calling thread, whose share of the work is never the smallest, measures its time; `lost` estimates from that how
much faster half as many threads would have been.  Without OpenMP there is one thread.
"""
cdef extern from "schedule/team.h":
    ctypedef struct Team:
        long long begun, begun_cpu, spun
        unsigned long control
    enum:
        GROUPS
    void clear_team(Team *team, int groups, int members) noexcept nogil
    int number_in_team() noexcept nogil
    long long nanoseconds() noexcept nogil
    long long cpu_nanoseconds() noexcept nogil
    unsigned long control_of_thread() noexcept nogil
    void control_thread(unsigned long control) noexcept nogil
    void barrier(Team *team) noexcept nogil  # each thread of the team waits for all; one alone does not wait
    void group_barrier(Team *team) noexcept nogil  # each thread waits for those of its group


cdef inline void gather(Team *team, Py_ssize_t groups, Py_ssize_t members) noexcept nogil:
    """Called by the calling thread before the others begin: so many groups of so many threads."""
    clear_team(team, groups, members)
    team.begun, team.begun_cpu = nanoseconds(), cpu_nanoseconds()
    team.control = control_of_thread()


cdef inline void join(Team *team) noexcept nogil:
    """Called by each thread: take over the rounding mode and the treatment of subnormal numbers of the calling one."""
    control_thread(team.control)


cdef inline long long lost(const Team *team) noexcept nogil:
    """Called by the calling thread at the end: how many nanoseconds the team took longer than half as many threads
    would have needed, each on a CPU of its own.  Uses CPU time, because the threads may have shared a CPU."""
    return nanoseconds() - team.begun - 2 * (cpu_nanoseconds() - team.begun_cpu - team.spun)


cdef inline Py_ssize_t share(Py_ssize_t n, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Where a part of n things begins; it ends where the next part begins.  No part is larger than the first."""
    return n * part if parts == 1 else (n * part + parts - 1) // parts  # a small call feels each division
