"""What the kernels of a CPU level offer to the modules that are compiled once: `Engine`, a table of functions.

There is one for each type in which kernels compute (`_engine.pyx`), and Python passes it on as a capsule.  Only it has
the sizes of tiles, lines and panels, so plans are made there: the modules of the ops see bytes and addresses.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.string cimport memset

from cells.types cimport Cell
from passes.indices cimport INPUTS, OUTPUTS

cdef struct OpCall:  # all arrays are the caller's; a pointer is NULL if the op has no such array
    Cell cell
    Py_ssize_t T, B, I, H
    int threads, members  # of the plan: `requirements` in _engine.pyx
    bint with_weight_grads
    const void *inputs[INPUTS]
    void *outputs[OUTPUTS]


# It runs on `ready` of the planned threads, and returns what having several of them cost.
ctypedef long long (*OpPass)(const OpCall *call, void *scratch, int ready) noexcept nogil

cdef struct Engine:
    OpPass forward, backward
    OpPass cell_grad  # of a step without its products


cdef inline const Engine *engine_of(engine) except NULL:
    """Return the table in a capsule."""
    return <const Engine *> PyCapsule_GetPointer(engine, "blockcell.engine")


cdef inline void init_call(
    OpCall *call, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int threads, int members
) noexcept:
    """Initialise a call, without a cell and arrays."""
    memset(call, 0, sizeof(OpCall))
    call.T, call.B, call.I, call.H, call.threads, call.members = T, B, I, H, threads, members
    call.with_weight_grads = True


cdef inline long long run(OpPass run_pass, const OpCall *call, unsigned char[::1] scratch, int ready) except? -1:
    """Run a pass of an op; return the nanoseconds that having several threads cost."""
    cdef long long nanoseconds
    with nogil:
        nanoseconds = run_pass(call, &scratch[0], ready)
    return nanoseconds
