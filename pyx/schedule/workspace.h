/* Protected zones behind the regions of a workspace, in a build of tests/lib/sanitizers.py. */
#pragma once
#ifdef RED_ZONES
#include <sanitizer/asan_interface.h>
#include <stdlib.h>
enum { ZONE = 16, REGIONS = 16 };  /* reals of a zone; regions of a workspace, at most */
#endif

typedef struct {
    Py_ssize_t size;  /* reals */
#ifdef RED_ZONES
    int regions;
    Py_ssize_t ends[REGIONS];  /* where each region ends and its zone begins */
#endif
} Workspace;

static inline Workspace empty_workspace(void) {
    Workspace workspace = {0};
    return workspace;
}

/* Reserve a region of so many reals; return the index of its first one. */
static inline Py_ssize_t take(Workspace *workspace, Py_ssize_t size) {
    const Py_ssize_t start = workspace->size;
#ifdef RED_ZONES
    const char *number = getenv("SHORT_REGION");
    if (number && atoi(number) == workspace->regions)
        size = size / 2 / ZONE * ZONE;
    workspace->ends[workspace->regions++] = start + size;
    size += ZONE;
#endif
    workspace->size += size;
    return start;
}

/* Forbid to touch the zones of `times` workspaces like this one, one behind the other in memory. */
static inline void guard_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) {
#ifdef RED_ZONES
    for (Py_ssize_t n = 0; n < times; n++)
        for (int k = 0; k < workspace->regions; k++)
            ASAN_POISON_MEMORY_REGION(
                (char *) memory + (n * workspace->size + workspace->ends[k]) * itemsize, ZONE * itemsize);
#endif
}

/* Allow it again. */
static inline void release_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) {
#ifdef RED_ZONES
    for (Py_ssize_t n = 0; n < times; n++)
        ASAN_UNPOISON_MEMORY_REGION((char *) memory + n * workspace->size * itemsize, workspace->size * itemsize);
#endif
}
