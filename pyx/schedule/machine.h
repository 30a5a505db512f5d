/* What plans assume about the machine: machine.pxd. */
#pragma once
typedef struct {
    Py_ssize_t caches[3];                 /* bytes of the data cache of each level */
    Py_ssize_t groups, members;           /* the grid of all plans; 0: that of the least cost */
    Py_ssize_t prefetching;               /* whether weights are prefetched */
    Py_ssize_t only_part;                 /* the part that is run alone, to measure it; -1: all parts are run */
    /* The constants of the cost model (cost.pxd), in nanoseconds, and in operations or bytes in a nanosecond. */
    double waking, waking_each;           /* nanoseconds to start a team, and more for each of its threads */
    double sleep_cost;                    /* and more if these have slept */
    double barrier, barrier_each;         /* nanoseconds of a barrier, and more for each of its threads */
    double exchange;                      /* nanoseconds of a line that another core has written; half in products */
    double speed;                         /* operations of a core in a nanosecond, with vectors of 32 bytes or more */
    double read_speed[3];                 /* bytes that a core reads in a nanosecond from L2, L3 and memory */
    double single_thread_limit;           /* nanoseconds of work up to which a call has one thread */
} Machine;
static const Machine *machine;
