"""Compare blockcell with TensorFlow, PyTorch, onnxruntime and OpenVINO on this CPU: raw ops, layers and streams.

Needed by: docs/performance.md; make bench

    python benchmarks/bench.py --quick                          # a few sizes, under 4 minutes: make bench
    python benchmarks/bench.py --csv FILE                       # every size, an hour
    python benchmarks/bench.py --grid --csv FILE                # LSTMs, everybody with one thread, then with all
    python benchmarks/bench.py --more --csv FILE                # RNNs and projected LSTMs, every size, 20 minutes
    python benchmarks/bench.py --tasks "LSTM training" --widths 256 512 --batches 16 --steps 20
    python benchmarks/bench.py --level v3                       # with AVX2 alone, and peers limited to it
    python benchmarks/bench.py --again FILE                     # the points of FILE that fall short, in more rounds
    python benchmarks/bench.py --beside reads both ...          # every point quiet and beside such neighbours
    python benchmarks/bench.py --builds BEFORE AFTER ...        # two checkouts, built in place, instead of peers

Candidates are those of candidates.py that are installed; the others are named.  Each is asked with one thread and with
all, and its better median counts; with --threads or --grid everybody has the same number.  A round goes through all
points, so that the rounds of a point are minutes apart and a neighbour's busy minute spoils one of them.  Rounds in
which the machine was disturbed (turns.py) are marked and, but for --quick, repeated at the end; they count only where
fewer than three have no mark.  The ratio of a point is the median of the rounds' ratios, and its spread their
quartiles.  A point falls short if the upper quartile is below 1: the peer was faster in three of four rounds.  The CSV
has a line for each point and candidate, and a JSON file beside it tells of the machine; report.py makes docs/benchmarks
of them.

With --beside everybody has one thread, and every point is measured quiet and beside each neighbour (machine.py).  All
rounds beside a neighbour count, and none is repeated.

With --builds "before" is a checkout such as one of another commit (`git clone . /elsewhere`) or by another compiler
(`CC=clang python setup.py build_ext --inplace`), and both have all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import turns
from candidates import CANDIDATES, DOES, LAYERS, MORE_LAYERS, MORE_STREAMS, RAW, STREAMS, projection, start_worker
from machine import CPUS, KINDS, QUIET, multiply_adds, open_neighbours

ONE_AND_ALL = sorted({1, CPUS})
POINT = ["task", "dtype", "T", "B", "I", "H", "beside"]
COLUMNS = [*POINT, "candidate", "threads", "microseconds", "ratio", "low", "high", "rounds", "marked"]
WIDTHS, BATCHES, STEPS = (16, 40, 64, 128, 256, 512, 1024), (1, 4, 16, 64, 256), (1, 20, 100)
OTHERS = ((100, 100), (300, 300), (40, 300), (300, 64))  # I and H that are unequal or no multiple of a vector
QUICK = {"widths": (16, 128, 512), "batches": (1, 16, 256), "steps": (1, 20)}
EVERYTHING = {"widths": WIDTHS, "batches": BATCHES, "steps": STEPS}
GRID = {"widths": (16, 40, 64, 100, 128, 256, 300, 512), "batches": (1, 4, 16, 64), "steps": (20, 100)}
HEAVY = 1e10  # operations of a call that is left out, but of the grid: nothing is learnt from seconds of it
PACKAGES = {"tensorflow": ("tensorflow-cpu", "tensorflow")}  # where a candidate is not the name of its package
Who = tuple[str, int]  # a candidate and its number of threads
Times = dict[Who, float]  # of a round
Row = dict[str, Any]  # a line of the CSV
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def operations(task: str, sizes: dict[str, int]) -> int:
    """Count the multiplications and additions in a call's products."""
    if task == "LSTMBlockCellGrad":
        return 0
    I, H, gates = sizes["I"], sizes["H"], 3 if "GRU" in task else 1 if "RNN" in task else 4  # noqa: E741
    P = projection(task, H)
    forward_operations = 2 * sizes["T"] * sizes["B"] * ((I + (P or H)) * H * gates + H * P)
    return forward_operations * {"training": 3, "BlockLSTMGrad": 2}.get(task.split()[-1], 1)


def describe_machine(level: str | None, dtype: str, candidates: list[str]) -> dict[str, Any]:
    """Describe what the figures hold for: CPU, level, versions, ceiling, date."""
    from blockcell import build_info

    info = {key: str(build_info()[key]) for key in ("cpu", "compiler", "cython", "numpy")}
    info |= {"threads": str(CPUS), "level": level or build_info()["level"], "dtype": dtype}
    for candidate in candidates:
        for package in PACKAGES.get(candidate, (candidate,)):
            try:
                info[candidate] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    try:
        ceiling = multiply_adds(info["level"], dtype, CPUS)
    except (OSError, subprocess.CalledProcessError):  # no C compiler
        ceiling = 0.0
    return info | {"ceiling": round(ceiling, 1), "date": time.strftime("%Y-%m-%d")}


def points(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, int]]]:
    widths = [(H, H) for H in options.widths]
    if options.widths == WIDTHS:
        widths += OTHERS
    for task in options.tasks:
        if task in STREAMS + MORE_STREAMS:
            for H, I in itertools.product(options.widths, (1, None)):  # noqa: E741
                yield task, {"T": 1 if "step" in task else 100, "B": 1, "I": I or H, "H": H}
            continue
        steps = (1,) if task in RAW and not task.startswith("Block") else options.steps
        for T, (I, H), B in itertools.product(steps, widths, options.batches):  # noqa: E741
            sizes = {"T": T, "B": B, "I": I, "H": H}
            if options.grid or operations(task, sizes) <= HEAVY:
                yield task, sizes


class Point:
    """Measure a task at one size; ``teams`` are numbers of threads, ``rounds`` the times so far, each with a mark.

    ``beside`` is the kind of a neighbour, or QUIET.
    """

    def __init__(self, task: str, dtype: str, sizes: dict[str, int], teams: list[int], beside: str = QUIET) -> None:
        self.task, self.dtype, self.sizes, self.teams, self.beside = task, dtype, sizes, teams, beside
        self.rounds: list[tuple[Times, bool]] = []
        self.ended: set[Who] = set()

    def ask(self, workers: dict[Who, turns.Worker], budget: float) -> Times:
        """Return each candidate's time; a peer whose process ends is left out of this point."""
        times = {}
        for who, worker in workers.items():
            tasks, dtypes = DOES[who[0]]
            if self.task not in tasks or self.dtype not in dtypes or who[1] not in self.teams or who in self.ended:
                continue
            try:
                times[who] = worker.ask((self.task, self.dtype, self.sizes, budget))
            except RuntimeError as error:
                if who[0] == "blockcell":
                    raise
                print(f"{who[0]} with {who[1]} thread(s) is left out here: {error}")
                worker.start()
                self.ended.add(who)
        return times

    def count_marked(self) -> int:
        return sum(mark for _, mark in self.rounds)

    def rows(self) -> list[Row]:
        """Return the rows of the CSV."""
        rounds = turns.select_rounds(self.rounds, self.beside == QUIET)
        medians = {who: statistics.median(r[who] for r in rounds) for who in rounds[0] if who not in self.ended}
        best: dict[str, Who] = {}
        for who in sorted(medians, key=lambda who: medians[who]):
            best.setdefault(who[0], who)
        rows = []
        for who in (best[name] for name in DOES if name in best):
            ratio = turns.spread([r[who] / r[best["blockcell"]] for r in rounds])
            figures = [round(medians[who] * 1e6, 2), *(round(value, 3) for value in ratio)]
            point = [self.task, self.dtype, *self.sizes.values(), self.beside]
            line = [*point, *who, *figures, len(self.rounds), self.count_marked()]
            rows.append(dict(zip(COLUMNS, line, strict=True)))
        return rows


# ----------------------------------------------------------------------------------------------------------- the files
def read(path: Path) -> tuple[list[Row], Row]:
    """Read the rows of a CSV file and its JSON file; older files lack spread, marks and neighbours."""
    rows = [{"low": row["ratio"], "high": row["ratio"], "rounds": 0, "marked": 0, "beside": QUIET} | row
            for row in turns.read_table(path)]  # fmt: skip
    return rows, turns.read_about(path)


def write(path: Path, rows: list[Row], about: Row) -> None:
    turns.write_table(path, COLUMNS, ([row[column] for column in COLUMNS] for row in rows), about)


def group_rows(rows: list[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by their values in these columns."""
    rows_by_point: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        rows_by_point.setdefault(tuple(row[column] for column in columns), []).append(row)
    return rows_by_point


def group_by_point(rows: list[Row], same_threads: bool) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows by point, and by threads if all candidates have the same number."""
    return group_rows(rows, *POINT, *(["threads"] if same_threads else []))


def falls_short(row: Row) -> bool:
    """Return whether the row's peer is faster in three of four rounds."""
    return row["high"] < 1


def short_points(rows: list[Row], same_threads: bool) -> list[Point]:
    """Return the points that `--again` measures."""
    return [
        Point(task, dtype, {"T": T, "B": B, "I": I, "H": H}, threads or ONE_AND_ALL, beside)
        for (task, dtype, T, B, I, H, beside, *threads), mine in group_by_point(rows, same_threads).items()  # noqa: E741
        if any(map(falls_short, mine))
    ]


def merge_rows(old: list[Row], new: list[Row], same_threads: bool) -> list[Row]:
    """Return the old rows, but the new ones of each point that is measured anew."""
    return list(itertools.chain(*(group_by_point(old, same_threads) | group_by_point(new, same_threads)).values()))


# -------------------------------------------------------------------------------------------------------- the measuring
def parse_options() -> argparse.Namespace:
    parser = turns.make_parser(__doc__)
    tasks, more = RAW + LAYERS + STREAMS, MORE_LAYERS + MORE_STREAMS
    parser.add_argument("--quick", action="store_true", help="a few sizes in short rounds")
    parser.add_argument("--grid", action="store_true", help="LSTM layers, everybody with one thread, then with all")
    parser.add_argument("--more", action="store_true", help="RNNs and projected LSTMs instead")
    parser.add_argument("--again", type=Path, metavar="FILE", help="the points of FILE that fall short, in more rounds")
    parser.add_argument("--tasks", nargs="+", choices=tasks + more, metavar="TASK", help=", ".join(tasks + more))
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16"])
    parser.add_argument("--widths", nargs="+", type=int, help="H, and I = H")
    parser.add_argument("--batches", nargs="+", type=int, help="B")
    parser.add_argument("--steps", nargs="+", type=int, help="T")
    parser.add_argument("--threads", nargs="+", type=int, help="everybody has so many, one number after the other")
    parser.add_argument("--rounds", type=int, help="rounds of each point (5; again: 15)")
    parser.add_argument("--budget", type=float, help="seconds of a round of one candidate (0.1; quick, grid: 0.03)")
    parser.add_argument("--peers", nargs="*", choices=[*CANDIDATES], help="only these")
    parser.add_argument("--level", help="blockcell's CPU level; with v3, peers are limited to AVX2 as well")
    parser.add_argument("--csv", type=Path, help="write the points to this file")
    parser.add_argument("--builds", nargs=2, metavar="FOLDER", help="compare two checkouts of blockcell")
    text = "compare quiet and beside each of these neighbours; all rounds count there, and marked ones are told"
    parser.add_argument("--beside", nargs="+", choices=KINDS, default=[], metavar="KIND", help=text)
    options = parser.parse_args()
    if options.grid:
        tasks, more = ["LSTM inference", "LSTM training"], MORE_LAYERS
    sizes = QUICK if options.quick else GRID if options.grid else EVERYTHING
    for name, values in sizes.items():
        setattr(options, name, getattr(options, name) or values)
    options.tasks = options.tasks or (more if options.more else tasks)
    default = [1] if options.beside else ONE_AND_ALL if options.grid else [CPUS] if options.builds else None
    options.threads = options.threads or default
    options.budget = options.budget or (0.03 if options.quick or options.grid else 0.1)
    options.rounds = options.rounds or (15 if options.again else 5)
    return options


def progress_line(point: Point, rows: list[Row]) -> str:
    sizes = " ".join(f"{letter}{size:<4}" for letter, size in point.sizes.items())
    figures = (
        f"{row['candidate']} {row['microseconds']:.6g} us"
        + f" ({row['ratio']:.2f}x, {row['low']:.2f} to {row['high']:.2f})" * (row["candidate"] != "blockcell")
        for row in rows
    )
    threads = f"{point.teams[0]} thread(s) " if len(point.teams) == 1 else ""
    marked = f"  {point.count_marked()} of {len(point.rounds)} rounds marked" if point.count_marked() else ""
    beside = "" if point.beside == QUIET else f"beside {point.beside} "
    return f"{point.task:17} {sizes} {beside}{threads}{'  '.join(figures)}{marked}"


def print_summary(rows: list[Row]) -> None:
    for (task, candidate, beside), mine in group_rows(rows, "task", "candidate", "beside").items():
        if candidate != "blockcell":
            ratios = [row["ratio"] for row in mine]
            mean, behind = statistics.geometric_mean(ratios), sum(map(falls_short, mine))
            figures = f"lowest {min(ratios):.2f}x, geometric mean {mean:.2f}x of {len(mine)} points, {behind} short"
            marked = sum(row["marked"] for row in mine) / sum(row["rounds"] for row in mine)
            print(f"{task:17} {candidate:12} {beside:10} {figures}, {marked:.0%} of rounds marked")


def main() -> None:
    options = parse_options()
    if options.again:
        old, before = read(options.again)
        options.level, options.dtype = before["level"], before["dtype"]
        options.peers = {row["candidate"] for row in old}
        options.beside = sorted({row["beside"] for row in old} - {QUIET})
        same_threads = before.get("same_threads", False)
        todo = short_points(old, same_threads)
        if not todo:
            sys.exit(f"no point of {options.again} falls short")
    else:
        same_threads = options.threads is not None
        teams = [[threads] for threads in options.threads] if same_threads else [ONE_AND_ALL]
        todo = [
            Point(task, options.dtype, sizes, team, beside)
            for task, sizes in points(options)
            for team in teams
            for beside in (QUIET, *options.beside)
        ]

    environment = {"BLOCKCELL_LEVEL": options.level} if options.level else {}
    environment |= AVX2 if options.level == "v3" else {}
    names = [n for n in CANDIDATES if n == "blockcell" or options.peers is None or n in options.peers]
    if options.level == "v3":
        names = [n for n in names if n != "tensorflow"]  # takes no such limit
    folders = dict(zip(("before", "blockcell"), options.builds, strict=True)) if options.builds else {}
    numbers = sorted({threads for point in todo for threads in point.teams})

    def start(name: str, threads: int) -> turns.Worker:
        if name in folders:
            return start_worker("blockcell", threads, PYTHONPATH=folders[name], **environment)
        return start_worker(name, threads, **environment)

    with contextlib.ExitStack() as stack:
        neighbours = stack.enter_context(open_neighbours(options.beside))
        team = {(name, threads): start(name, threads) for name in folders or names for threads in numbers}
        workers = stack.enter_context(turns.open_workers(team, needed=False))
        missing = (options.peers if options.again else {"blockcell"}) - {name for name, _ in workers}
        if missing:
            sys.exit(f"{', '.join(missing)} must run here")
        about = describe_machine(options.level, options.dtype, list(dict.fromkeys(name for name, _ in workers)))
        about |= {"same_threads": True} if same_threads else {}
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        if options.again and before["cpu"] != about["cpu"]:
            sys.exit(f"{options.again} was measured on {before['cpu']}")
        guard, start, all_ = turns.watch(workers.values()), time.time(), options.rounds * len(todo)
        more = 0 if options.quick or options.beside else options.rounds
        for done, k in enumerate(turns.take_turns([point.rounds for point in todo], options.rounds, more), 1):
            point = todo[k]
            with neighbours[point.beside].awake():
                point.rounds.append(guard.round(max(point.teams), partial(point.ask, workers, options.budget)))
            left = (time.time() - start) / done * (all_ - done) / 60
            at = f"{done} of {all_}, {left:.0f} min left" if done <= all_ else "marked, again"
            print(f"[{at}] {progress_line(point, point.rows())}", flush=True)
    rows = [row for point in todo for row in point.rows()]
    print_summary(rows)
    if options.again:
        write(options.again, merge_rows(old, rows, same_threads), before | {"again": about["date"]})
    elif options.csv:
        write(options.csv, rows, about)


if __name__ == "__main__":
    main()
