"""The workspace of a call: a block of scratch memory, of which a plan takes regions, one behind the other.

Compiled with RED_ZONES, as by tests/lib/sanitizers.py, a zone lies behind each region, and AddressSanitizer reports
whoever touches one while a kernel runs.  The environment variable SHORT_REGION is then the number of a region that is
halved in every workspace: a fault that must be found.
"""
cdef extern from "schedule/workspace.h":
    ctypedef struct Workspace:
        Py_ssize_t size  # reals of all regions
    Workspace empty_workspace() noexcept nogil
    # Reserve a region of so many reals; return the index of its first one.
    Py_ssize_t take(Workspace *workspace, Py_ssize_t size) noexcept nogil
    # Forbid to touch the zones of `times` workspaces like this one, one behind the other in memory; allow it again.
    void guard_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) noexcept nogil
    void release_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) noexcept nogil
