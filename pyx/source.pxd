cdef extern from *:
    const char *BLOCKCELL_SOURCE  # a hash of the source files that the module is built from; defined by setup.py
