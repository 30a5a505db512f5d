/* What plans ask about the machine: machine.pxd. */
#pragma once
typedef struct {
    Py_ssize_t caches[3];                 /* bytes of the data cache of each level */
    Py_ssize_t groups, members;           /* the grid of all plans; 0: that of the least cost */
    Py_ssize_t prefetching;               /* whether it is faster to fetch weights ahead */
    Py_ssize_t only;                      /* the part that alone is run, to measure it; -1: all parts are */
    /* What the grid of the least cost is found by: nanoseconds, and operations and bytes in one. */
    double waking, waking_each;           /* to start a team, and more for each of its threads */
    double slept;                         /* and more if these have slept */
    double barrier, barrier_each;         /* for a barrier, and more for each of its threads */
    double exchange;                      /* of a line that another core has written; half where products go on */
    double speed;                         /* operations of a core, in vectors of 32 bytes or more */
    double reading[3];                    /* bytes that it reads from its second and third cache, and from memory */
    double alone;                         /* one thread's work, up to which no other one is woken */
} Machine;
static const Machine *machine;
