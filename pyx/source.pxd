"""The hash of the sources that a module is built from, by which blockcell/_kernels.py refuses other modules."""
cdef extern from *:
    const char *BLOCKCELL_SOURCE  # defined by setup.py
