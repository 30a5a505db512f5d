"""Compare two threads with one: on a quiet machine, beside busy processes, and between numpy's threaded products.

Needed by: docs/performance.md

    python benchmarks/busy.py [--rounds 5] [--seconds 0.5] [--spin COUNT ...]

Waiting threads may spin, which is fast while every thread has a core of its own, and wasteful where other work wants
that core.  A figure is the mean microseconds of a call, the median of the rounds, with the median of the rounds' ratios
to one thread in the same place.  `--spin` adds columns for all threads with the given GOMP_SPINCOUNT.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from turns import CPUS, Worker, answer, ask_all, make_parser, open_workers, print_heads, print_row, run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SPINNING = "while True: pass"


def make_inference(T: int, B: int, H: int) -> Callable[[], object]:
    from blockcell import LSTM

    layer, x = LSTM.init(H, H, seed=0), np.ones((T, B, H), np.float32)
    return lambda: layer(x)


def make_training_step(T: int, B: int, H: int) -> Callable[[], object]:
    from blockcell import LSTM

    layer, x = LSTM.init(H, H, seed=0), np.ones((T, B, H), np.float32)

    def call() -> None:
        y, _, tape = layer.forward(x)
        layer.backward(tape, y)

    return call


CALLS = {
    "inference T50 B16 H128": lambda: make_inference(50, 16, 128),
    "inference T100 B1 H256": lambda: make_inference(100, 1, 256),
    "inference T20 B64 H32": lambda: make_inference(20, 64, 32),
    "training T8 B32 H32": lambda: make_training_step(8, 32, 32),
    "training T20 B4 H128": lambda: make_training_step(20, 4, 128),
}
PLACES = ("quiet", "busy", "numpy")


def work() -> None:
    """Answer a call's name, a budget and a place with the call's mean seconds; at "numpy" a product precedes each."""
    calls = {name: make() for name, make in CALLS.items()}
    a = np.ones((512, 512), np.float32)

    def reply(question: tuple[str, float, str]) -> float:
        name, seconds, place = question
        call, spent, count = calls[name], 0.0, 0
        call()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if place == "numpy":
                a @ a
            start = time.perf_counter()
            call()
            spent += time.perf_counter() - start
            count += 1
        return spent / count

    answer(reply)


@contextlib.contextmanager
def keep_cpus_busy(place: str) -> Iterator[None]:
    """Run as many busy processes as there are CPUs, if the place is "busy"."""
    count = CPUS if place == "busy" else 0
    processes = [subprocess.Popen([sys.executable, "-c", SPINNING]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = make_parser(__doc__, rounds=5, seconds=0.5)
    parser.add_argument("--spin", nargs="*", default=[], metavar="COUNT")
    options = parser.parse_args()
    settings = {"1 thread": {"OMP_NUM_THREADS": "1"}, f"{CPUS} threads": {}}
    settings |= {f"spin {count}": {"GOMP_SPINCOUNT": count} for count in options.spin}
    threads = {"OMP_NUM_THREADS": str(CPUS), "OPENBLAS_NUM_THREADS": str(CPUS)}  # else numpy takes the first too
    team = {name: Worker(__file__, "--work", **threads | mine) for name, mine in settings.items()}
    with open_workers(team) as workers:
        print_heads(["place", "call", *workers])
        for place, name in itertools.product(PLACES, CALLS):
            with keep_cpus_busy(place):
                rounds = [[*ask_all(workers, name, options.seconds, place).values()] for _ in range(options.rounds)]
            cells = []
            for k, times in enumerate(zip(*rounds, strict=True)):
                ratio = statistics.median(times[k] / times[0] for times in rounds)
                cells.append(f"{statistics.median(times) * 1e6:.0f} ({ratio:.2f})")
            print_row([place, name, *cells])


if __name__ == "__main__":
    run_program(main, work)
