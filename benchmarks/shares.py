"""Measure the share of the multiply-add ceiling that layers reach, in one build or in several side by side.

Needed by: docs/performance.md

    python benchmarks/shares.py [--level v3] [--tasks "LSTM inference"]
    python benchmarks/shares.py ../before .                  # two checkouts, built in place

Sizes are those at which arithmetic counts: H = I of 256 and more, T = 20.  The ceiling is measured just before each
round, with as many threads, and vectors as wide as the level's.  A share is the median of the rounds.  Those on a
disturbed machine are repeated (turns.py); a star says that some of them had to count.  Prints Markdown.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial

from bench import operations
from candidates import LAYERS, start_worker
from ceiling import LEVELS, multiply_adds
from turns import CPUS, ENOUGH, Worker, make_parser, open_workers, print_heads, print_row, select_rounds, watch

import blockcell

TASKS = [task for task in LAYERS if "reset_after" not in task]
CELLS, BATCHES = (256, 512, 1024), (4, 16, 24, 64)
ROUNDS = 5


def shares(workers: dict[str, Worker], task: str, sizes: dict[str, int], level: str, threads: int) -> list[float]:
    """Measure each build's share of the ceiling in one round."""
    rates = []
    for worker in workers.values():
        ceiling = multiply_adds(level, "float32", threads, rounds=500_000, tries=3) * 1e9
        rates.append(operations(task, sizes) / worker.ask((task, "float32", sizes, 0.05)) / ceiling)
    return rates


def shares_cell(rounds: list[tuple[list[float], bool]]) -> str:
    """Format each build's share in per cent, with a star where marked rounds count."""
    star = "*" if sum(not marked for _, marked in rounds) < ENOUGH else ""
    columns = zip(*select_rounds(rounds), strict=True)
    return " / ".join(f"{100 * statistics.median(column):.0f}" for column in columns) + star


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folders", nargs="*", default=["."], metavar="folder", help="a checkout, built in place (.)")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=LAYERS, metavar="TASK", help=", ".join(LAYERS))
    parser.add_argument("--level", default=blockcell.build_info()["level"], choices=LEVELS)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, CPUS}))
    options = parser.parse_args()
    for threads in options.threads:
        builds = " / ".join(options.folders)
        print(f"\nShares of the ceiling in per cent, level {options.level}, {threads} thread(s), {builds}:\n")
        environment = {"BLOCKCELL_LEVEL": options.level}
        with open_workers(
            {folder: start_worker("blockcell", threads, PYTHONPATH=folder, **environment) for folder in options.folders}
        ) as workers:
            print_heads(["H", "B", *options.tasks])
            guard = watch(workers.values())
            for H, B in itertools.product(CELLS, BATCHES):
                sizes = {"T": 20, "B": B, "I": H, "H": H}
                calls = [partial(shares, workers, task, sizes, options.level, threads) for task in options.tasks]
                print_row([H, B, *(shares_cell(guard.rounds(threads, call, ROUNDS)) for call in calls)])


if __name__ == "__main__":
    main()
