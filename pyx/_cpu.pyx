"""What this CPU can run and how the kernels were compiled; itself compiled for the oldest CPU, so that any can ask."""
import os

cimport cython
from cpython.pycapsule cimport PyCapsule_New

from schedule.machine cimport Machine

cdef extern from "levels.h":
    bint runs_v3()
    bint runs_v4()

cdef extern from "schedule/cpu.h":
    Machine this_machine
    void read_cache_sizes()
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
    """Return the levels whose instructions this CPU has, from the oldest."""
    return LEVELS[: 1 + runs_v3() + runs_v4()]


def prefetching(setting):
    """Return whether kernels prefetch weights that outgrow caches (machine.pxd): unless BLOCKCELL_PREFETCH is 0.

    The model of a CPU does not tell whether that pays: on a Zen 3 it cost time on a quiet machine, and saved time while
    others used the third-level cache.
    """
    if setting not in (None, "", "0", "1"):
        raise ImportError(f"BLOCKCELL_PREFETCH is {setting!r}; expected 0 or 1, or no such environment variable")
    return setting != "0"


cdef int _level
read_cache_sizes()
for _level, _default in enumerate((32 << 10, 1 << 20, 32 << 20)):  # bytes, where the CPU does not tell
    this_machine.caches[_level] = this_machine.caches[_level] or _default
this_machine.only_part = -1
this_machine.prefetching = prefetching(os.environ.get("BLOCKCELL_PREFETCH"))
# The constants of machine.h, measured with calls of layers on one core and two (Zen 4, AVX-512).  Only their ratios
# matter, and a factor of three changes few plans for the worse.
# Products of four rows and more:
this_machine.speed = 105
# Such products are as fast from L2, so it gives at least 54.  L3 gave as much to one core, and memory 25, but other
# cores read from these, too.
this_machine.read_speed[0], this_machine.read_speed[1], this_machine.read_speed[2] = 100, 30, 8
# Two threads with half of the rows each, H = 32, took 5 us more than one with half of the rows.
this_machine.waking, this_machine.waking_each = 6000, 150
# Where forward passes on two threads and backward ones on one took turns, or the other way round, both took 20 to 50 us
# more, and as much as before on one each or two each.
this_machine.sleep_cost = 25000
# A barrier of two cores took 0.3 us, or 1 us while the host kept them far apart; for each further thread its cache line
# moves to another core.
this_machine.barrier, this_machine.barrier_each = 500, 150
this_machine.exchange = 15  # many lines in a row, which the hardware prefetches; a single one takes 40 or more
this_machine.single_thread_limit = 12000  # twice the cost of waking another one
MACHINE = PyCapsule_New(&this_machine, "blockcell._cpu.MACHINE", NULL)  # for the kernels
CACHES = {"L1": this_machine.caches[0], "L2": this_machine.caches[1], "L3": this_machine.caches[2]}


def machine():
    """Return what plans assume about the machine, by the names of machine.h."""
    return this_machine


def use_machine(**changes):
    """Change what plans assume that are made from now on."""
    global this_machine
    fields = machine()
    assert changes.keys() <= fields.keys()
    this_machine = fields | changes
