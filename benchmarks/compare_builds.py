"""How many times as long one build of the kernels takes as another, such as that of another compiler.

    git clone . /elsewhere && (cd /elsewhere && CC=clang python setup.py build_ext --inplace)
    python benchmarks/compare_builds.py . /elsewhere [--task "LSTM training"]

The arguments are two checkouts, built in place.  Each runs in a process of its own and the two are asked in turn, as in
bench.py; a ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from candidates import LAYERS, RAW, STREAMS
from turns import Worker

WORKER = str(Path(__file__).with_name("candidates.py"))
SIZES = [
    (1, 1, 32, 32),
    (1, 16, 512, 512),
    (20, 1, 128, 128),
    (20, 16, 128, 128),
    (20, 16, 512, 512),
    (20, 256, 256, 256),
]
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, metavar="folder", help="a checkout, built in place")
    parser.add_argument("--tasks", nargs="+", default=LAYERS, choices=RAW + LAYERS + STREAMS, metavar="TASK")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    workers = [
        Worker(WORKER, "blockcell", str(options.threads), PYTHONPATH=folder, OPENBLAS_NUM_THREADS="1")
        for folder in options.folders
    ]
    for worker, folder in zip(workers, options.folders, strict=True):
        if worker.missing:
            sys.exit(f"{folder} does not run: {worker.missing}")
    print(f"{'task':18}{'T':>4}{'B':>4}{'I':>5}{'H':>5}{'first':>14}{'second':>14}   second / first")
    for task in options.tasks:
        for T, B, I, H in SIZES:  # noqa: E741
            sizes = {"T": T, "B": B, "I": I, "H": H}
            question = {"task": task, "dtype": options.dtype, "sizes": sizes, "budget": 0.1}
            rounds = [[worker.ask(question) for worker in workers] for _ in range(ROUNDS)]
            one, other = (statistics.median(times) * 1e6 for times in zip(*rounds, strict=True))
            ratio = statistics.median(b / a for a, b in rounds)
            print(f"{task:18}{T:4}{B:4}{I:5}{H:5}{one:11.1f} us{other:11.1f} us{ratio:9.2f}", flush=True)


if __name__ == "__main__":
    main()
