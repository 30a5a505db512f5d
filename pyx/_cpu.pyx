"""What this CPU can run and how the kernels were compiled; itself compiled for the oldest CPU, so that any can ask."""
cimport cython

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__)
        /* What tells the psABI levels x86-64-v3 and v4 apart in practice. The compiler's own name for a level would do,
           but clang learned it late. Includes the check that the operating system saves the wide registers. */
        static int runs_v3(void) {
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
                && __builtin_cpu_supports("bmi2");
        }
        static int runs_v4(void) {
            return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
                && __builtin_cpu_supports("avx512vl");
        }
    #else
        static int runs_v3(void) { return 0; }
        static int runs_v4(void) { return 0; }
    #endif

    #ifdef _OPENMP
        enum { HAS_OPENMP = 1 };
    #else
        enum { HAS_OPENMP = 0 };
    #endif

    #if defined(__clang__)
        #define COMPILER_NAME __VERSION__
    #elif defined(__GNUC__)
        #define COMPILER_NAME "gcc " __VERSION__
    #else
        #define COMPILER_NAME "unknown"
    #endif
    """
    bint runs_v3()
    bint runs_v4()
    bint HAS_OPENMP
    const char *COMPILER_NAME
    const char *BLOCKCELL_FLAGS  # these two are defined by setup.py
    const char *BLOCKCELL_SOURCES

OPENMP = HAS_OPENMP
COMPILER = COMPILER_NAME.decode()
FLAGS = BLOCKCELL_FLAGS.decode()
CYTHON = cython.__version__
SOURCES = dict(word.split("=") for word in BLOCKCELL_SOURCES.decode().split())  # what each kernel is to be built from
LEVELS = ("base", "v3", "v4")


def supported_levels():
    """The levels whose instructions this CPU has, from the oldest."""
    return LEVELS[: 1 + runs_v3() + runs_v4()]
