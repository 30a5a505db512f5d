"""Keep a CPU busy beside a benchmark, as a neighbour in a cloud does, and measure what that takes away.

Needed by: docs/performance.md

    python benchmarks/neighbour.py [--level v3]         # what each kind takes away, and whether two CPUs are two cores

A neighbour reads 64 MiB again and again, which takes the third-level cache and the way to memory from others; or it
multiplies and adds between registers, which takes half of a core where its CPU is one of two hyperthreads; or it does
both in turn.  It runs on the last CPU, and what is measured on the others.  On a machine with more CPUs pick two of
them by `taskset -c 0,1`.  Needs a C compiler.  bench.py and compare_builds.py have neighbours by --beside.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator

import numpy as np
from ceiling import LEVELS, compile_level, measure_reading, multiply_adds
from turns import SHARED, Worker, make_parser, print_heads, print_row, run_program

KINDS = ("reads", "multiplies", "both")
QUIET = "quiet"  # no neighbour
BYTES = 64 << 20
MULTIPLY_ADDS = 300_000  # rounds of the loop in ceiling.py, of which "both" does so many after it has read BYTES
SETTLES = 0.05  # seconds that a neighbour gets to wake up or stop


def work(kind: str) -> None:
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
        self.worker = None if kind == QUIET else Worker(__file__, "--work", kind)
        if self.worker and self.worker.missing:
            sys.exit(f"the neighbour does not run here: {self.worker.missing}")
        self.send(signal.SIGSTOP)

    def send(self, number: int) -> None:
        if self.worker:
            self.worker.process.send_signal(number)
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
        if self.worker:
            self.worker.process.kill()
            self.worker.process.communicate()  # closes the pipes, too


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


def add_beside(parser: argparse.ArgumentParser) -> None:
    """Add the option by which a benchmark runs all comparisons quiet and beside neighbours."""
    text = "compare quiet and beside each of these neighbours; all rounds count there, and marked ones are told"
    parser.add_argument("--beside", nargs="+", choices=KINDS, default=[], metavar="KIND", help=text)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--level", default="v3", choices=LEVELS)
    level, cpus = parser.parse_args().level, sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        ratio = multiply_adds(level, "float32", 2) / multiply_adds(level, "float32", 1)
        kind = "two cores" if ratio > SHARED else "two hyperthreads of one core, or of cores that others use"
        print(f"CPUs {cpus[0]} and {cpus[1]} do {ratio:.2f} times the multiply-adds of one: {kind}")
    print_heads(["beside", "multiply-adds, GF/s", "of quiet", "a read of 64 MiB, GB/s", "of quiet"])
    quiet: tuple[float, float] | None = None
    with open_neighbours(KINDS) as neighbours:
        for name, neighbour in neighbours.items():
            with neighbour.awake():
                rates = multiply_adds(level, "float32", 1), measure_reading(level, BYTES, 1)
            quiet = quiet or rates
            print_row([name, *(f"{r:.1f} | {r / q:.2f}" for r, q in zip(rates, quiet, strict=True))])


if __name__ == "__main__":
    run_program(main, work)
