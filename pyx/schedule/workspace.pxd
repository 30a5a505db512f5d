"""The workspace of a call: a block of scratch memory, of which a plan takes regions, one behind the other.

Compiled with RED_ZONES, as tests/lib/sanitizers.py does it, a zone lies behind each region, and AddressSanitizer tells
whoever touches one while a kernel runs.  The environment variable SHORT_REGION then halves one region of every
workspace, the one of this number: a fault that must be found.
"""
cdef extern from "schedule/workspace.h":
    ctypedef struct Workspace:
        Py_ssize_t size
    Workspace empty_workspace() noexcept nogil
    Py_ssize_t take(Workspace *workspace, Py_ssize_t size) noexcept nogil
    void guard_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) noexcept nogil
    void release_zones(const Workspace *workspace, void *memory, Py_ssize_t itemsize, Py_ssize_t times) noexcept nogil
