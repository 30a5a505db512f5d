"""The share of the multiply-add ceiling that layers reach, in one build or in several side by side.

    python benchmarks/shares.py [--level v3] [--tasks "LSTM inference"]
    python benchmarks/shares.py ../before .                  # two checkouts, built in place

Sizes are those at which arithmetic counts: H = I of 256 and more, T = 20.  The ceiling is measured just before each
round, with as many threads, and vectors as wide as the level's.  A share is the median of the rounds.  Those on a
disturbed machine are repeated (turns.py); a star says that some of them had to count.  Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from bench import operations
from candidates import LAYERS
from ceiling import LEVELS, multiply_adds
from turns import ENOUGH, Worker, counted, watch

import blockcell

WORKER = str(Path(__file__).with_name("candidates.py"))
TASKS = [task for task in LAYERS if "reset_after" not in task]
CELLS, BATCHES = (256, 512, 1024), (4, 16, 24, 64)
ROUNDS = 5


def shares(workers: list[Worker], task: str, sizes: dict[str, int], level: str, threads: int) -> list[float]:
    """Of a round: every build's."""
    question = {"task": task, "dtype": "float32", "sizes": sizes, "budget": 0.05}
    found = []
    for worker in workers:
        ceiling = multiply_adds(level, "float32", threads, rounds=500_000, tries=3) * 1e9
        found.append(operations(task, sizes) / worker.ask(question) / ceiling)
    return found


def cell(rounds: list[tuple[list[float], bool]]) -> str:
    """The share of each build, in per cent."""
    star = "*" if sum(not marked for _, marked in rounds) < ENOUGH else ""
    columns = zip(*counted(rounds), strict=True)
    return " / ".join(f"{100 * statistics.median(column):.0f}" for column in columns) + star


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["."], metavar="folder", help="a checkout, built in place (.)")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=LAYERS, metavar="TASK", help=", ".join(LAYERS))
    parser.add_argument("--level", default=blockcell.build_info()["level"], choices=LEVELS)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    options = parser.parse_args()
    for threads in options.threads:
        builds = " / ".join(options.folders)
        print(f"\nShares of the ceiling in per cent, level {options.level}, {threads} thread(s), {builds}:\n")
        print(f"| H | B | {' | '.join(options.tasks)} |\n|{'---|' * (2 + len(options.tasks))}")
        with ExitStack() as stack:
            workers = []
            for folder in options.folders:
                environment = {"PYTHONPATH": folder, "BLOCKCELL_LEVEL": options.level, "OPENBLAS_NUM_THREADS": "1"}
                workers.append(stack.enter_context(closing(Worker(WORKER, "blockcell", str(threads), **environment))))
                if workers[-1].missing:
                    sys.exit(f"{folder} does not run: {workers[-1].missing}")
            guard = watch(workers)
            for H, B in itertools.product(CELLS, BATCHES):
                print(f"| {H} | {B} |", end="", flush=True)
                for task in options.tasks:
                    ask = partial(shares, workers, task, {"T": 20, "B": B, "I": H, "H": H}, options.level, threads)
                    rounds = guard.rounds(threads, ask, ROUNDS)
                    print(f" {cell(rounds)} |", end="", flush=True)
                print()


if __name__ == "__main__":
    main()
