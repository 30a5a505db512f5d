"""Measure what this machine can do, and what neighbours take away; keep its CPUs busy beside a benchmark.

Needed by: docs/performance.md

    python benchmarks/machine.py [--level v3]

Prints the ceilings with which times are compared: multiply-adds between registers, and reading memory, each the best of
several rounds, with one thread and with all of them at once.  Then what a neighbour in a cloud takes away, and whether
two CPUs are two cores.  Needs a C compiler.

A neighbour reads 64 MiB again and again, which takes the third-level cache and the way to memory from others; or it
multiplies and adds between registers, which takes half of a core where its CPU is one of two hyperthreads; or it does
both in turn.  It runs on the last CPU, and what is measured on the others.  On a machine with more CPUs pick two of
them by `taskset -c 0,1`.  bench.py has neighbours by --beside.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

CPUS = len(os.sched_getaffinity(0))  # that this process may use
SHARED = 1.6  # two threads with less than so many times the multiply-adds of one have no core each
KINDS = ("reads", "multiplies", "both")
QUIET = "quiet"  # no neighbour
BYTES = 64 << 20
MULTIPLY_ADDS = 300_000  # rounds of the loop, of which "both" does so many after it has read BYTES
SETTLES = 0.05  # seconds that a neighbour gets to wake up or stop

SOURCE = r"""
#include <stddef.h>

#define VECTOR(type) type __attribute__((vector_size(WIDTH), aligned(WIDTH)))
enum { CHAINS = 14 }; /* hide the latency of two units and leave registers for the factors */

#define FMA(name, type)                                                        \
    double name(long rounds)                                                   \
    {                                                                          \
        VECTOR(type) acc[CHAINS], a, b;                                        \
        for (size_t l = 0; l < WIDTH / sizeof(type); l++)                      \
            a[l] = 0.999f, b[l] = 0.001f;                                      \
        for (int k = 0; k < CHAINS; k++)                                       \
            acc[k] = a + (type)k;                                              \
        for (long r = 0; r < rounds; r++) {                                    \
            _Pragma("GCC unroll 14")                                           \
            for (int k = 0; k < CHAINS; k++)                                   \
                acc[k] = acc[k] * a + b;                                       \
        }                                                                      \
        VECTOR(type) sum = acc[0];                                             \
        for (int k = 1; k < CHAINS; k++)                                       \
            sum += acc[k];                                                     \
        return sum[0];                                                         \
    }

FMA(fma_float, float)
FMA(fma_double, double)

double read_all(const float *start, long count, long rounds)
{
    VECTOR(float) acc[8] = {0};
    const size_t lanes = WIDTH / sizeof(float);
    for (long r = 0; r < rounds; r++)
        for (long i = 0; i + (long)(8 * lanes) <= count; i += 8 * lanes)
            for (int k = 0; k < 8; k++)
                acc[k] += *(const VECTOR(float) *)(start + i + k * lanes);
    double sum = 0;
    for (int k = 0; k < 8; k++)
        sum += acc[k][0];
    return sum;
}
"""
LEVELS = {  # flags, bytes of a vector
    "v4": (["-march=x86-64-v4", "-mprefer-vector-width=512"], 64),
    "v3": (["-march=x86-64-v3"], 32),
    "base": ([], 16),
}
CHAINS = 14
ROUNDS = 9


@functools.cache
def compile_level(level: str) -> ctypes.CDLL:
    flags, width = LEVELS[level]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "machine.so")
        command = ["cc", "-O3", *flags, f"-DWIDTH={width}", "-shared", "-fPIC", "-o", str(library), "-xc", "-"]
        subprocess.run(command, input=SOURCE, text=True, check=True)
        loaded = ctypes.CDLL(str(library))
    for name in ("fma_float", "fma_double", "read_all"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def time_threads(call: Callable[[int], object], threads: int, tries: int = ROUNDS) -> float:
    """Return the seconds in which all threads make a call each, in the best round; each of several has its own CPU."""
    best, cpus = float("inf"), sorted(os.sched_getaffinity(0))

    def call_pinned(k: int) -> None:
        if threads > 1:  # else both may wake on one CPU, and stay there for milliseconds
            os.sched_setaffinity(0, {cpus[k % len(cpus)]})
        call(k)

    with ThreadPoolExecutor(threads) as team:
        for _ in range(tries):
            began = time.perf_counter()
            list(team.map(call_pinned, range(threads)))
            best = min(best, time.perf_counter() - began)
    return best


def multiply_adds(level: str, dtype: str, threads: int, rounds: int = 10_000_000, tries: int = ROUNDS) -> float:
    """Return GF/s of multiply-adds between registers; an addition and a multiplication are two."""
    library, width = compile_level(level), LEVELS[level][1]
    function, itemsize = (library.fma_double, 8) if dtype == "float64" else (library.fma_float, 4)
    operations = 2 * CHAINS * width // itemsize * rounds
    return threads * operations / time_threads(lambda _: function(ctypes.c_long(rounds)), threads, tries) / 1e9


def measure_reading(level: str, size: int, threads: int) -> float:
    """Return GB/s of reading `size` bytes again and again, each thread its own share of them."""
    library, share = compile_level(level), size // threads // 4
    arrays = [np.ones(share + 16, np.float32) for _ in range(threads)]
    starts = [a.ctypes.data + -a.ctypes.data % 64 for a in arrays]
    rounds = max(1, 500_000_000 // size)

    def call(k: int) -> None:
        library.read_all(ctypes.c_void_p(starts[k]), ctypes.c_long(share), ctypes.c_long(rounds))

    return rounds * size / time_threads(call, threads) / 1e9


# ------------------------------------------------------------------------------------------------------- the neighbours
def run_neighbour(kind: str) -> None:
    """Keep the last CPU busy until the process is killed."""
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    library, array = compile_level("base"), np.ones(BYTES // 4 + 16, np.float32)
    start = array.ctypes.data + -array.ctypes.data % 64
    print("ready", flush=True)
    while True:
        if kind != "multiplies":
            library.read_all(ctypes.c_void_p(start), ctypes.c_long(BYTES // 4), ctypes.c_long(1))
        if kind != "reads":
            library.fma_float(ctypes.c_long(MULTIPLY_ADDS))


class Neighbour:
    """Run a neighbour in a process that is stopped, except inside of ``with neighbour.awake():``.

    There is no process if the kind is QUIET.
    """

    def __init__(self, kind: str) -> None:
        self.process: subprocess.Popen[str] | None = None
        if kind != QUIET:
            command = [sys.executable, __file__, "--work", kind]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            if self.process.stdout.readline() != "ready\n":
                sys.exit("the neighbour does not run here")
        self.send(signal.SIGSTOP)

    def send(self, number: int) -> None:
        if self.process:
            self.process.send_signal(number)
            time.sleep(SETTLES)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the process run."""
        self.send(signal.SIGCONT)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()  # closes the pipe, too


@contextlib.contextmanager
def open_neighbours(kinds: Collection[str]) -> Iterator[dict[str, Neighbour]]:
    """Yield a neighbour of each kind, and as QUIET none; leave the last CPU to them if there are any.

    Start what is measured inside of the block: a process inherits the CPUs that it may use.
    """
    cpus = os.sched_getaffinity(0)
    if kinds and len(cpus) < 2:
        sys.exit("a neighbour needs a second CPU")
    neighbours: dict[str, Neighbour] = {}
    try:
        for kind in (QUIET, *kinds):
            neighbours[kind] = Neighbour(kind)
        if kinds:
            os.sched_setaffinity(0, cpus - {max(cpus)})
        yield neighbours
    finally:
        os.sched_setaffinity(0, cpus)
        for neighbour in neighbours.values():
            neighbour.close()


@contextlib.contextmanager
def keep_cpus_busy(place: str) -> Iterator[None]:
    """Run as many processes that spin as there are CPUs, if the place is "busy"."""
    count = CPUS if place == "busy" else 0
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    from turns import print_heads, print_row  # which imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="v3", choices=LEVELS)
    level, counts = parser.parse_args().level, sorted({1, CPUS})
    print_heads(["ceiling", *(f"{threads} thread{'s' * (threads > 1)}" for threads in counts)])
    for dtype in ("float32", "float64"):
        rates = (f"{multiply_adds(level, dtype, threads):.1f}" for threads in counts)
        print_row([f"multiply-adds in {dtype}, GF/s", *rates])
    for megabytes in (0.5, 1, 8, 32, 256):
        rates = (f"{measure_reading(level, int(megabytes * 2**20), threads):.1f}" for threads in counts)
        print_row([f"reading {megabytes:g} MiB in all, GB/s", *rates])
    if CPUS == 1:
        return
    ratio = multiply_adds(level, "float32", 2) / multiply_adds(level, "float32", 1)
    kind = "two cores" if ratio > SHARED else "two hyperthreads of one core, or of cores that others use"
    print(f"\nTwo CPUs do {ratio:.2f} times the multiply-adds of one: {kind}")
    print_heads(["beside", "multiply-adds, GF/s", "of quiet", "a read of 64 MiB, GB/s", "of quiet"])
    quiet: tuple[float, float] | None = None
    with open_neighbours(KINDS) as neighbours:
        for name, neighbour in neighbours.items():
            with neighbour.awake():
                measured = multiply_adds(level, "float32", 1), measure_reading(level, BYTES, 1)
            quiet = quiet or measured
            print_row([name, *(f"{rate:.1f} | {rate / base:.2f}" for rate, base in zip(measured, quiet, strict=True))])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        run_neighbour(sys.argv[2])
    else:
        main()
