"""Products of rows of codes with panels of codes (integer.pxd), for all instructions that there are for them.

Compiled once, as sums of integers are the same everywhere.  The first row of codes of a process decides which
instructions are used: the best that the CPU has and the system allows.  `use` decides otherwise, for tests.
"""
from cpython.pycapsule cimport PyCapsule_New

cdef extern from "product/integer_instructions.h":
    ctypedef struct Way:
        const char *name
        int (*runs)() noexcept nogil
    const Way *ways
    enum:
        WAYS
    void *PRODUCT_IN_USE "(&product_in_use)"
    void use_way(const Way *way)
    const char *way_in_use()

PRODUCT = PyCapsule_New(PRODUCT_IN_USE, "blockcell._integer.PRODUCT", NULL)  # for the kernels


def available():
    """The names of the instructions that can be used here, the best first; the last ones for tests alone."""
    return tuple([ways[k].name.decode() for k in range(WAYS) if ways[k].runs()])


def in_use():
    return way_in_use().decode()


def use(name):
    """Decide which instructions are used from now on, in all threads, while none of them has rows of codes."""
    for k in range(WAYS):
        if ways[k].name.decode() == name and ways[k].runs():
            use_way(&ways[k])
            return
    raise ValueError(f"name is {name!r}; expected one of {', '.join(available())}")
