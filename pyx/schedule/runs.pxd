"""How compiled modules run a kernel: `_team` says on how many threads, and is told what it lost by them."""

# What to run, with so many threads; what `_team` wants to know about them.
ctypedef long long (*Kernel)(void *context, int ready) except? -1
ctypedef int (*Runs)(int planned, Kernel kernel, void *context) except -1
