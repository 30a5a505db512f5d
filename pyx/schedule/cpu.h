/* The sizes of this CPU's caches, as far as the processor or the system tells. */
#pragma once
#include "machine.h"

static Machine this_machine;  /* a cache has 0 bytes where the processor does not tell */
#if defined(__x86_64__)
    #include <cpuid.h>
    /* Set the sizes of the data caches of this_machine. */
    static void read_cache_sizes(void) {
        unsigned a, b, c, d, leaf = 4;
        /* AMD's processors tell by a leaf of their own, in the form of Intel's. */
        if (__get_cpuid(0x80000001, &a, &b, &c, &d) && c >> 22 & 1)
            leaf = 0x8000001D;
        for (unsigned k = 0; k < 16 && __get_cpuid_count(leaf, k, &a, &b, &c, &d) && (a & 31); k++) {
            unsigned level = a >> 5 & 7;
            if ((a & 31) != 2 && level >= 1 && level <= 3)
                this_machine.caches[level - 1] =
                    ((Py_ssize_t) (b >> 22) + 1) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) * ((Py_ssize_t) c + 1);
        }
    }
#elif defined(__linux__)
    #include <stdio.h>
    /* Read an entry of a cache in sysfs to `value`, by a format of scanf; return whether there is such an entry. */
    static int has_entry(int cache, const char *name, const char *format, void *value) {
        char path[80];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", cache, name);
        FILE *file = fopen(path, "r");
        int is_read = file && fscanf(file, format, value) == 1;
        if (file)
            fclose(file);
        return is_read;
    }
    /* Set the sizes of the data caches of this_machine; none where the firmware does not tell. */
    static void read_cache_sizes(void) {
        char type;
        int level, kibibytes;
        for (int k = 0; has_entry(k, "level", "%d", &level); k++)
            if (level >= 1 && level <= 3 && has_entry(k, "type", "%c", &type) && type != 'I'
                && has_entry(k, "size", "%dK", &kibibytes))
                this_machine.caches[level - 1] = (Py_ssize_t) kibibytes << 10;
        if (this_machine.caches[2] == 0)
            this_machine.caches[2] = this_machine.caches[1];  /* the last one, as of a Cortex-A72 */
    }
#else
    static void read_cache_sizes(void) {}
#endif

#ifdef _OPENMP
    enum { HAS_OPENMP = 1 };
#else
    enum { HAS_OPENMP = 0 };
#endif

#if defined(__clang__)
    #define COMPILER_NAME __VERSION__
#elif defined(__GNUC__)
    #define COMPILER_NAME "gcc " __VERSION__
#else
    #define COMPILER_NAME "unknown"
#endif
