/* The regions of a workspace, one behind the other; with RED_ZONES there are protected zones between them. */
#pragma once
#include "product/real.h"
#ifdef RED_ZONES
#include <sanitizer/asan_interface.h>
#include <stdlib.h>
#include <string.h>
enum { ZONE = 16, MOST_REGIONS = 16 };  /* reals of a zone; regions of a workspace, at most */
#endif

/* A matrix in a workspace.  All sizes are in reals, and whole cache lines. */
typedef struct {
    const char *name;
    Py_ssize_t rows, stride;  /* 0 rows: this plan has no such region */
    Py_ssize_t gap;           /* behind the last row */
    Py_ssize_t start;         /* from the start of the workspace, set by lay_out */
} Region;

typedef struct {
    Py_ssize_t size;
#ifdef RED_ZONES
    int regions;
    Py_ssize_t ends[MOST_REGIONS];  /* where each region ends and its zone begins */
#endif
} Workspace;

static inline Region region(const char *name, Py_ssize_t rows, Py_ssize_t stride, Py_ssize_t gap) {
    const Region result = {name, rows, stride, gap, 0};
    return result;
}

/* Place `count` regions one behind the other: sets the `start` of each, also in `starts`. */
static inline Workspace lay_out(Region *regions, int count, Py_ssize_t *starts) {
    Workspace workspace = {0};
    for (int n = 0; n < count; n++) {
        Py_ssize_t size = regions[n].rows > 0 ? regions[n].rows * regions[n].stride + regions[n].gap : 0;
        starts[n] = regions[n].start = workspace.size;
#ifdef RED_ZONES
        if (size > 0) {
            const char *shortened = getenv("SHORT_REGION");
            if (shortened && strcmp(shortened, regions[n].name) == 0)
                size = size / 2 / ZONE * ZONE;
            workspace.ends[workspace.regions++] = workspace.size + size;
            size += ZONE;
        }
#endif
        workspace.size += size;
    }
    return workspace;
}

/* Forbid to touch the zones of `times` workspaces like this one, one behind the other in memory. */
static inline void guard_zones(const Workspace *workspace, void *memory, Py_ssize_t times) {
#ifdef RED_ZONES
    for (Py_ssize_t n = 0; n < times; n++)
        for (int k = 0; k < workspace->regions; k++)
            ASAN_POISON_MEMORY_REGION(
                (real *) memory + n * workspace->size + workspace->ends[k], ZONE * sizeof(real));
#endif
}

/* Allow it again. */
static inline void release_zones(const Workspace *workspace, void *memory, Py_ssize_t times) {
#ifdef RED_ZONES
    for (Py_ssize_t n = 0; n < times; n++)
        ASAN_UNPOISON_MEMORY_REGION((real *) memory + n * workspace->size, workspace->size * sizeof(real));
#endif
}
