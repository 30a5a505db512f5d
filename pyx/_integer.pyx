"""Products of quantized rows with panels of int8 weights (integer.pxd), for all instruction sets that have some.

Compiled once, because sums of integers are the same at every CPU level.  The first quantized row of a process selects
the best instruction set that the CPU has and the system allows.  `use` selects another one, for tests.
"""
from cpython.pycapsule cimport PyCapsule_New

cdef extern from "product/integer_instructions.h":
    ctypedef struct InstructionSet:
        const char *name
        int (*is_supported)() noexcept nogil
    const InstructionSet *instruction_sets
    enum:
        INSTRUCTION_SETS  # how many
    void *PRODUCT_IN_USE "(&product_in_use)"
    void use_instructions(const InstructionSet *set)
    const char *instructions_in_use()

PRODUCT = PyCapsule_New(PRODUCT_IN_USE, "blockcell._integer.PRODUCT", NULL)  # for the kernels


def available_instruction_sets():
    """Return the names of the instruction sets that this CPU has, the best first; the last ones are for tests alone."""
    return tuple(
        [instruction_sets[k].name.decode() for k in range(INSTRUCTION_SETS) if instruction_sets[k].is_supported()]
    )


def in_use():
    """Return the name of the instruction set in use."""
    return instructions_in_use().decode()


def use(name):
    """Use the instruction set of this name from now on, in all threads, of which none may have quantized rows."""
    for k in range(INSTRUCTION_SETS):
        if instruction_sets[k].name.decode() == name and instruction_sets[k].is_supported():
            use_instructions(&instruction_sets[k])
            return
    raise ValueError(f"name is {name!r}; expected one of {', '.join(available_instruction_sets())}")
