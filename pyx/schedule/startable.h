/* How many threads can be started now. */
#pragma once
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
static int number = 1, most = 1, warned = 0, backs_off = 1;
#define load_int(variable) __atomic_load_n(&(variable), __ATOMIC_RELAXED)
#define store_int(variable, value) __atomic_store_n(&(variable), value, __ATOMIC_RELAXED)
