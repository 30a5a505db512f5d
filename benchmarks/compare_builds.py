"""Compare the speed of two builds of the kernels, such as builds of two commits or by two compilers.

Needed by: docs/platforms.md

    git clone . /elsewhere && (cd /elsewhere && CC=clang python setup.py build_ext --inplace)
    python benchmarks/compare_builds.py . /elsewhere [--tasks "LSTM training"] [--beside reads both]

The arguments are two checkouts, built in place.  Each runs in a process of its own and the two are asked in turn, as in
bench.py.  A ratio, the first one's time over the second one's, is the median of the rounds', followed by their
quartiles; where it is below 0.95 the point is measured once more.  Rounds on a disturbed machine are repeated; see
turns.py.  BLOCKCELL_LEVEL picks the CPU level of both.  With --beside every point is measured quiet and beside each
neighbour (machine.py) on one thread; there are no points measured again, and beside a neighbour all rounds count.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from functools import partial

from candidates import LAYERS, MORE_LAYERS, MORE_STREAMS, RAW, STREAMS, start_worker
from machine import CPUS, QUIET, add_beside, open_neighbours
from turns import Watch, Worker, ask_all, make_parser, open_workers, select_rounds, spread, watch

STEPS, BATCHES, CELLS = (1, 20, 100), (1, 16, 64), (40, 128, 256, 512)
ROUNDS = 7
SLOWER = 0.95


def compare(
    guard: Watch, threads: int, workers: dict[int, Worker], quiet: bool, *question: object
) -> tuple[float, str]:
    """Return the ratio, and a line with both builds' microseconds, the ratio and its spread."""
    measure = partial(ask_all, workers, *question)
    if quiet:
        all_rounds = guard.rounds(threads, measure, ROUNDS)
    else:
        all_rounds = [guard.round(threads, measure) for _ in range(ROUNDS)]
    rounds = [[*times.values()] for times in select_rounds(all_rounds, quiet)]
    marked = sum(mark for _, mark in all_rounds)
    first, second = (statistics.median(times) * 1e6 for times in zip(*rounds, strict=True))
    ratio, low, high = spread([a / b for a, b in rounds])
    marks = f"   {marked} of {len(all_rounds)} rounds marked" if marked else ""
    return ratio, f"{first:11.1f} us{second:11.1f} us{ratio:9.2f} ({low:.2f} to {high:.2f}){marks}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folders", nargs=2, metavar="folder", help="a checkout, built in place")
    every = RAW + LAYERS + STREAMS + MORE_LAYERS + MORE_STREAMS
    parser.add_argument("--tasks", nargs="+", default=LAYERS, choices=every, metavar="TASK")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16"])
    for name, sizes in (("steps", STEPS), ("batches", BATCHES), ("cells", CELLS)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--threads", type=int, help="of both (all; 1 beside neighbours)")
    add_beside(parser)
    options = parser.parse_args()
    threads = options.threads or (1 if options.beside else CPUS)
    with contextlib.ExitStack() as stack:
        neighbours = stack.enter_context(open_neighbours(options.beside))
        builds = {k: start_worker("blockcell", threads, PYTHONPATH=path) for k, path in enumerate(options.folders, 1)}
        workers = stack.enter_context(open_workers(builds))
        guard = watch(workers.values())
        ratios: dict[str, list[float]] = {name: [] for name in neighbours}
        print(f"{'task':18}{'T':>4}{'B':>4}{'I, H':>6}{'':>12}{'first':>14}{'second':>14}   first / second")
        for task, T, B, H in itertools.product(options.tasks, options.steps, options.batches, options.cells):
            question = task, options.dtype, {"T": T, "B": B, "I": H, "H": H}, 0.05
            for name, neighbour in neighbours.items():
                with neighbour.awake():
                    ratio, line = compare(guard, threads, workers, name == QUIET, *question)
                    if ratio < SLOWER and not options.beside:
                        line += f"   again {compare(guard, threads, workers, True, *question)[0]:.2f}"
                ratios[name].append(ratio)
                print(f"{task:18}{T:4}{B:4}{H:6}{name:>12}{line}", flush=True)
    for name, values in ratios.items():
        print(f"{name}: geometric mean of {len(values)}: {statistics.geometric_mean(values):.3f}")


if __name__ == "__main__":
    main()
