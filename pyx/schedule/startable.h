/* How many threads can be started now. */
#pragma once
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

static __thread int started_threads = 1;  /* threads of the OpenMP runtime that this thread has, itself among them */

/* The thread of a trial: wait until all of them have been started, as the mutex `gate` tells. */
static void *wait_for_gate(void *gate) {
    pthread_mutex_lock((pthread_mutex_t *) gate);
    pthread_mutex_unlock((pthread_mutex_t *) gate);
    return NULL;
}

/* Try to start so many threads side by side, with stacks of so many bytes, 0 for the default; return how many there
   were.  All of them have ended then. */
static int count_startable(int wanted, size_t stack) {
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

/* The settings of the process.  Any thread reads and writes them; no other memory is ordered by them. */
static int usable_threads = 1;    /* that a call plans with, unless it has a number of its own */
static int possible_threads = 1;  /* that there may be, by the last attempt to start them */
static int has_warned = 0;        /* of threads that cannot be started, since users have set their number */
static int backs_off = 1;         /* whether calls use fewer threads while several have a cost */
#define load_int(variable) __atomic_load_n(&(variable), __ATOMIC_RELAXED)
#define store_int(variable, value) __atomic_store_n(&(variable), value, __ATOMIC_RELAXED)
