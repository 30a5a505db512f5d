"""Measure the ceilings of this CPU, with which times are compared: multiply-adds between registers, reading memory.

Needed by: docs/performance.md

    python benchmarks/ceiling.py [--level v3]

Needs a C compiler.  Every figure is the best of several rounds, with one thread and with all of them at once.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

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
        library = Path(folder, "ceiling.so")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="v4", choices=LEVELS)
    level = parser.parse_args().level
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        for dtype in ("float32", "float64"):
            print(f"{threads} thread(s): {multiply_adds(level, dtype, threads):7.1f} GF/s of multiply-adds in {dtype}")
        for megabytes in (0.5, 1, 2, 4, 8, 16, 32, 256):
            rate = measure_reading(level, int(megabytes * 2**20), threads)
            print(f"{threads} thread(s): {rate:7.1f} GB/s read from {megabytes:g} MiB in all")


if __name__ == "__main__":
    main()
