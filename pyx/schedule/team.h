/* The barrier of a call's threads, clocks, and the rounding mode of a thread: team.pxd. */
#pragma once
#include <stddef.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
/* Cython makes a prange's variable firstprivate and lastprivate, and gcc begins such a loop with a barrier of its
   own, since one thread might write the last value before another reads the first.  Nobody here reads either.
   tests/repository/test_build.py looks for that barrier in what was compiled. */
#define lastprivate(variable)
static inline int team_size(void) { return omp_get_num_threads(); }
static inline int number_in_team(void) { return omp_get_thread_num(); }
#else
static inline int team_size(void) { return 1; }
static inline int number_in_team(void) { return 0; }
#endif
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum {
    UNTIMED_SPINS = 16,  /* before a waiting thread looks at the clock */
    SPINS = 1000,        /* before it sleeps: 10 to 50 microseconds, by how long a CPU pauses */
    LINE = 64,           /* bytes of a cache line */
    MOST_CPUS = 1024,    /* that a set of CPUs has room for */
    WORD = 8 * sizeof(unsigned long),  /* CPUs of a word of such a set */
    GROUPS = 64           /* groups of several threads, at most */
};

typedef struct {
    int arrived __attribute__((aligned(LINE)));  /* threads that wait now */
    int passed __attribute__((aligned(LINE)));   /* how often all threads have passed; a futex */
    int asleep;                                  /* threads that wait for the system to wake them */
} Barrier;

typedef struct {
    Barrier all;                  /* of all threads */
    /* Nanoseconds of the calling thread: at the start, by the clock and in CPU time, and how long it has spun. */
    long long start, cpu_start, spinning;
    unsigned long float_control;  /* of the calling thread: its rounding, and whether subnormal numbers are zero */
    int groups, members;          /* groups, and the threads of each */
    unsigned long taken[MOST_CPUS / WORD];  /* a bit for each CPU: a thread of the team runs on it */
    Barrier group[GROUPS];        /* one for each group; not cleared, nor used, if each has one thread */
} Team;

/* Prepare a team: nobody has come to a barrier, and no time has passed. */
static inline void clear_team(Team *team, int groups, int members) {
    memset(team, 0, offsetof(Team, group) + (members > 1 ? groups : 0) * sizeof(Barrier));
    team->groups = groups;
    team->members = members;
}
static inline long long nanoseconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
static inline long long nanoseconds(void) { return nanoseconds_of(CLOCK_MONOTONIC); }
static inline long long cpu_nanoseconds(void) { return nanoseconds_of(CLOCK_THREAD_CPUTIME_ID); }

#if defined(__x86_64__)
static inline void spin_pause(void) { __builtin_ia32_pause(); }
static inline unsigned long read_float_control(void) { return __builtin_ia32_stmxcsr(); }
static inline void write_float_control(unsigned long control) { __builtin_ia32_ldmxcsr((unsigned) control); }
#elif defined(__aarch64__)
static inline void spin_pause(void) { __asm__ volatile("yield"); }
static inline unsigned long read_float_control(void) {
    unsigned long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}
static inline void write_float_control(unsigned long control) { __asm__ volatile("msr fpcr, %0" : : "r"(control)); }
#else
static inline void spin_pause(void) { }
static inline unsigned long read_float_control(void) { return 0; }
static inline void write_float_control(unsigned long control) { (void) control; }
#endif

#ifdef __linux__
/* A CPU for each thread.  Linux may wake a thread on the CPU of the thread that woke it, and leaves both there while
   they take turns at barriers, because it never sees two threads wait for that CPU: several threads are then slower
   than one, for tens of milliseconds, beside idle CPUs. */
static __thread unsigned own_cpu;  /* that this thread has taken */

/* Take a CPU for this thread; return whether another thread has it. */
static inline int take(Team *team, unsigned cpu) {
    const unsigned long bit = 1UL << cpu % WORD;
    own_cpu = cpu;
    return cpu < MOST_CPUS && __atomic_fetch_or(&team->taken[cpu / WORD], bit, __ATOMIC_RELAXED) & bit;
}

/* Move this thread to a CPU that no thread has taken, if it may run on one; where it may run stays as it is. */
static __attribute__((noinline, cold)) void move_to_free_cpu(Team *team) {
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    free = allowed;
    for (unsigned cpu = 0; cpu < MOST_CPUS; cpu++)
        if (__atomic_load_n(&team->taken[cpu / WORD], __ATOMIC_RELAXED) >> cpu % WORD & 1)
            CPU_CLR(cpu, &free);
    if (CPU_COUNT(&free) > 0 && sched_setaffinity(0, sizeof free, &free) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed);
    take(team, sched_getcpu());
}

/* Begin on a CPU of one's own. */
static inline void take_cpu(Team *team) {
    if (take(team, sched_getcpu()))
        move_to_free_cpu(team);
}

/* Go on, after one has slept, on a CPU of one's own. */
static inline void keep_cpu(Team *team) {
    if ((unsigned) sched_getcpu() == own_cpu)
        return;
    if (own_cpu < MOST_CPUS)
        __atomic_fetch_and(&team->taken[own_cpu / WORD], ~(1UL << own_cpu % WORD), __ATOMIC_RELAXED);
    take_cpu(team);
}
#else
static __attribute__((unused)) unsigned own_cpu;  /* where the tests alone read it */
static inline void take_cpu(Team *team) { (void) team; }
static inline void keep_cpu(Team *team) { (void) team; }
#endif

/* Sleep until all threads have passed a barrier of the team once more than the number `passed`. */
static __attribute__((noinline, cold)) void sleep_until_passed(Team *team, Barrier *at, int passed) {
    if (__atomic_load_n(&at->passed, __ATOMIC_ACQUIRE) != passed)
        return;
    #ifdef __linux__
    __atomic_add_fetch(&at->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&at->passed, __ATOMIC_SEQ_CST) == passed)
        syscall(SYS_futex, &at->passed, FUTEX_WAIT_PRIVATE, passed, NULL, NULL, 0);
    __atomic_sub_fetch(&at->asleep, 1, __ATOMIC_SEQ_CST);
    #else
    const struct timespec nap = {0, 20000};
    while (__atomic_load_n(&at->passed, __ATOMIC_ACQUIRE) == passed)
        nanosleep(&nap, NULL);
    #endif
    keep_cpu(team);
}

/* Wait at a barrier of the team, `at`, until so many threads have come to it: spin, then sleep. */
static __attribute__((noinline)) void wait_at(Team *team, Barrier *at, int threads) {
    const int passed = __atomic_load_n(&at->passed, __ATOMIC_RELAXED);
    const int is_calling_thread = number_in_team() == 0;
    long long spinning_since = 0;
    if (__atomic_add_fetch(&at->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&at->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&at->passed, passed + 1, __ATOMIC_SEQ_CST);
        #ifdef __linux__
        if (__atomic_load_n(&at->asleep, __ATOMIC_SEQ_CST) > 0)
            syscall(SYS_futex, &at->passed, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        #endif
        return;
    }
    for (int k = 0; k < SPINS; k++) {
        if (__atomic_load_n(&at->passed, __ATOMIC_ACQUIRE) != passed)
            break;
        if (k == UNTIMED_SPINS && is_calling_thread)
            spinning_since = nanoseconds();
        spin_pause();
    }
    if (spinning_since > 0)
        team->spinning += nanoseconds() - spinning_since;
    sleep_until_passed(team, at, passed);
}

static inline void barrier(Team *team) { wait_at(team, &team->all, team_size()); }

static inline void group_barrier(Team *team) {
    if (team->groups > 1 && team_size() == team->groups * team->members)
        wait_at(team, &team->group[number_in_team() / team->members], team->members);
    else
        barrier(team);
}
