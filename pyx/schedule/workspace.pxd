"""The workspace of a call: a block of scratch memory, which consists of regions, one behind the other.

A plan lists its regions, each with a name, rows and the stride of these, and `lay_out` says where each one starts.
`plan_kernel` returns them for the task "workspace": `describe_regions`.

Compiled with RED_ZONES, as by tools/sanitizers.py, a zone lies behind each region, and AddressSanitizer reports
whoever touches one while a kernel runs.  The environment variable SHORT_REGION is then the name of a region that is
halved in every workspace: a fault that must be found.
"""
cdef extern from "schedule/workspace.h":
    ctypedef struct Region:
        const char *name
        Py_ssize_t rows, stride, gap, start
    ctypedef struct Workspace:
        Py_ssize_t size  # reals of all regions
    Region region(const char *name, Py_ssize_t rows, Py_ssize_t stride, Py_ssize_t gap) noexcept nogil
    Workspace lay_out(Region *regions, int count, Py_ssize_t *starts) noexcept nogil
    # Forbid to touch the zones of `times` workspaces like this one, one behind the other in memory; allow it again.
    void guard_zones(const Workspace *workspace, void *memory, Py_ssize_t times) noexcept nogil
    void release_zones(const Workspace *workspace, void *memory, Py_ssize_t times) noexcept nogil


cdef inline list describe_regions(const Region *regions, int count):
    """Return (name, rows, stride, gap, start) of each region that is not empty, the last three in reals."""
    return [(regions[n].name.decode(), regions[n].rows, regions[n].stride, regions[n].gap, regions[n].start)
            for n in range(count) if regions[n].rows * regions[n].stride > 0]
