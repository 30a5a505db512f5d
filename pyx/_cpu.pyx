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
    const char *cpu_vendor
    int cpu_family
    int cpu_model
    void read_model()
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
    """The levels whose instructions this CPU has, from the oldest."""
    return LEVELS[: 1 + runs_v3() + runs_v4()]


# Whether the tile is faster if it fetches weights ahead that outgrow the second-level cache, which some CPUs do better
# themselves: vendor, family, models, answer.  Of LSTMs and GRUs with H = 512 to 1024 and 4 to 64 rows on one thread.
PREFETCHING = (
    ("AuthenticAMD", 0x19, (*range(0x10), *range(0x20, 0x60)), False),  # Zen 3: 4 to 12 % slower
    ("AuthenticAMD", 0x19, (*range(0x10, 0x20), *range(0x60, 0xb0)), True),  # Zen 4: 1 to 30 % faster at v3
    ("AuthenticAMD", 0x1A, range(0x100), True),  # Zen 5: 5 to 12 % faster from memory, 0.3 to 0.7 % slower from L3
    ("GenuineIntel", 6, (0x8F, 0xCF, 0xAD), True),  # Xeons with AMX, far from L3: 10 to 24 % faster
)


def gains_by_prefetching(vendor, family, model):
    """Whether such a CPU does; yes if nobody has measured it."""
    for *names, models, answer in PREFETCHING:
        if names == [vendor, family] and model in models:
            return answer
    return True


def prefetching(asked):
    """What BLOCKCELL_PREFETCH says, 0 or 1, or else what this CPU gains by."""
    if asked not in (None, "", "0", "1"):
        raise ImportError(f"BLOCKCELL_PREFETCH is {asked!r}; expected 0 or 1, or no such environment variable")
    return asked == "1" if asked else gains_by_prefetching(cpu_vendor.decode(), cpu_family, cpu_model)


cdef int _level
read_model()
read_cache_sizes()
for _level, _usual in enumerate((32 << 10, 1 << 20, 32 << 20)):
    this_machine.caches[_level] = this_machine.caches[_level] or _usual
this_machine.only = -1
this_machine.prefetching = prefetching(os.environ.get("BLOCKCELL_PREFETCH"))
# From calls of layers on one core and two (Zen 4, AVX-512); what counts is how large they are beside each other, and
# plans bear factors of three (benchmarks/scaling.py --vary).  Products of four rows and more:
this_machine.speed = 105
# Such products are as fast from the second cache, so that gives at least 54; the third one gave as much to one core,
# and memory 25, but others read from these, too.
this_machine.reading[0], this_machine.reading[1], this_machine.reading[2] = 100, 30, 8
# Two threads with half of the rows each, H = 32, took 5 us more than one with half of the rows.  Two cores met in 0.3
# us, or in 1 us while the host kept them far apart; for each further thread the line of the barrier moves on.
this_machine.waking, this_machine.waking_each = 6000, 150
# Where forward passes on two threads and backward ones on one took turns, or the other way round, both took 20 to 50 us
# more, and as much as before on one each or two each.
this_machine.slept = 25000
this_machine.barrier, this_machine.barrier_each = 500, 150
this_machine.exchange = 15  # many lines in a row, which caches fetch ahead; a single one takes 40 or more
this_machine.alone = 12000  # as much again as waking
MACHINE = PyCapsule_New(&this_machine, "blockcell._cpu.MACHINE", NULL)  # for the kernels
CACHES = {"L1": this_machine.caches[0], "L2": this_machine.caches[1], "L3": this_machine.caches[2]}


def machine():
    """What plans ask about the machine, by the names of machine.pxd."""
    return this_machine


def use_machine(**changes):
    """Plans that are made from now on are told this."""
    global this_machine
    found = machine()
    assert changes.keys() <= found.keys()
    this_machine = found | changes
