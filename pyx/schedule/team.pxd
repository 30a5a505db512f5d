"""The team of threads of a call: how work is shared out, and where threads wait for each other.

A team may consist of groups of equally many threads, whose numbers are neighbours.  Each group has a barrier of its
own, so groups do not wait for each other.  If the runtime starts fewer threads than asked for, each barrier
is one of all threads.

A waiting thread spins for tens of microseconds, then sleeps, because the thread that it waits for may need its core.
Where two threads of the team begin or wake up on one CPU, one of them moves to another.
The calling thread, whose share of the work is never the smallest, measures its time; `measured_cost` estimates from
that how much faster half as many threads would have been.  Without OpenMP there is one thread.
"""
cdef extern from "schedule/team.h":
    ctypedef struct Team:  # on the stack of the calling thread, until all threads have passed the last barrier
        long long start, cpu_start, spinning  # nanoseconds: clock and CPU time at the start, time spun at barriers
        unsigned long float_control  # the calling thread's register of rounding and subnormal numbers
    enum:
        GROUPS
    void clear_team(Team *team, int groups, int members) noexcept nogil
    int number_in_team() noexcept nogil
    long long nanoseconds() noexcept nogil
    long long cpu_nanoseconds() noexcept nogil
    unsigned long read_float_control() noexcept nogil
    void write_float_control(unsigned long control) noexcept nogil
    unsigned own_cpu  # that this thread has taken
    void take_cpu(Team *team) noexcept nogil  # a thread begins on a CPU of its own
    void barrier(Team *team) noexcept nogil  # each thread of the team waits for all; one alone does not wait
    void group_barrier(Team *team) noexcept nogil  # each thread waits for those of its group


cdef inline void start_team(Team *team, Py_ssize_t groups, Py_ssize_t members) noexcept nogil:
    """Prepare a team of so many groups of so many threads.  The calling thread does it before the others begin."""
    clear_team(team, groups, members)
    team.start, team.cpu_start = nanoseconds(), cpu_nanoseconds()
    team.float_control = read_float_control()
    take_cpu(team)


cdef inline void join_team(Team *team) noexcept nogil:
    """Begin as a thread of the team: on a CPU of its own, and with the calling thread's rounding mode and treatment of
    subnormal numbers."""
    if number_in_team() > 0:
        take_cpu(team)
        write_float_control(team.float_control)


cdef inline long long measured_cost(const Team *team) noexcept nogil:
    """Return the nanoseconds that the team took longer than half as many threads would have needed, each on a CPU of
    its own; below zero if it was faster.  The calling thread asks at the end.

    CPU time tells what half as many would have needed, because the threads may have shared a CPU.
    """
    return nanoseconds() - team.start - 2 * (cpu_nanoseconds() - team.cpu_start - team.spinning)


cdef inline Py_ssize_t part_start(Py_ssize_t n, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Return where a part of n things begins; it ends where the next part begins.  No part is larger than the first."""
    return n * part if parts == 1 else (n * part + parts - 1) // parts  # a small call feels each division
