"""blockcell beside TensorFlow, PyTorch, onnxruntime and OpenVINO on this CPU: raw ops, layers and streams.

    python benchmarks/bench.py --quick                          # a few sizes, under 4 minutes: make bench
    python benchmarks/bench.py --csv FILE                       # the whole grid, an hour
    python benchmarks/bench.py --tasks "LSTM training" --widths 256 512 --batches 16 --steps 20
    python benchmarks/bench.py --level v3                       # with AVX2 alone, and peers limited to it

Candidates are those of candidates.py that are installed; the others are named.  Each is asked with one thread and with
all, and its better median counts.  A round goes through all points, so that the rounds of a point are minutes apart and
a neighbour's busy minute spoils one of them; the ratio of a point is the median of the rounds' ratios.  The CSV has a
line for each point and candidate, and a JSON file beside it tells of the machine; report.py makes docs/benchmarks of
them.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from candidates import CANDIDATES, DOES, LAYERS, RAW, STREAMS
from ceiling import multiply_adds
from turns import Worker

WORKER = str(Path(__file__).with_name("candidates.py"))
COLUMNS = ["task", "dtype", "T", "B", "I", "H", "candidate", "threads", "microseconds", "ratio"]
WIDTHS, BATCHES, STEPS = (16, 40, 64, 128, 256, 512, 1024), (1, 4, 16, 64, 256), (1, 20, 100)
OTHERS = ((100, 100), (300, 300), (40, 300), (300, 64))  # I and H that are unequal or no multiple of a vector
QUICK = {"widths": (16, 128, 512), "batches": (1, 16, 256), "steps": (1, 20)}
HEAVY = 1e10  # operations of a call that is left out: nothing is learnt from seconds of it
PACKAGES = {"tensorflow": ("tensorflow-cpu", "tensorflow")}  # where a candidate is not the name of its package
Who = tuple[str, int]  # a candidate and its number of threads
Times = dict[Who, list[float]]  # of a point: each round's, none where it does not run
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def operations(task: str, sizes: dict[str, int]) -> int:
    """Multiplications and additions in a call's products."""
    one = 2 * sizes["T"] * sizes["B"] * (sizes["I"] + sizes["H"]) * sizes["H"] * (3 if "GRU" in task else 4)
    if task == "LSTMBlockCellGrad":
        return 0
    return one * {"training": 3, "BlockLSTMGrad": 2}.get(task.split()[-1], 1)


def machine(level: str | None, dtype: str, candidates: list[str]) -> dict[str, Any]:
    """What the figures hold for."""
    from blockcell import build_info

    info = {key: str(build_info()[key]) for key in ("cpu", "compiler", "cython", "numpy")}
    cores = len(os.sched_getaffinity(0))
    info |= {"threads": str(cores), "level": level or build_info()["level"], "dtype": dtype}
    for candidate in candidates:
        for package in PACKAGES.get(candidate, (candidate,)):
            try:
                info[candidate] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    try:
        ceiling = multiply_adds(info["level"], dtype, cores)
    except (OSError, subprocess.CalledProcessError):  # no C compiler
        ceiling = 0.0
    return info | {"ceiling": round(ceiling, 1), "date": time.strftime("%Y-%m-%d")}


def points(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, int]]]:
    widths = [(H, H) for H in options.widths]
    if not options.quick and options.widths == WIDTHS:
        widths += OTHERS
    for task in options.tasks:
        if task in STREAMS:
            for H, I in itertools.product(options.widths, (1, None)):  # noqa: E741
                yield task, {"T": 1 if "step" in task else 100, "B": 1, "I": I or H, "H": H}
            continue
        steps = (1,) if task in RAW and not task.startswith("Block") else options.steps
        for T, (I, H), B in itertools.product(steps, widths, options.batches):  # noqa: E741
            sizes = {"T": T, "B": B, "I": I, "H": H}
            if operations(task, sizes) <= HEAVY:
                yield task, sizes


def ask(workers: dict[Who, Worker], task: str, dtype: str, sizes: dict[str, int], budget: float, times: Times) -> None:
    """A round of a point: everybody's time joins `times`; a peer whose process ends is left out of this point."""
    question = {"task": task, "dtype": dtype, "sizes": sizes, "budget": budget}
    for who, worker in workers.items():
        if task not in DOES[who[0]][0] or dtype not in DOES[who[0]][1] or times.get(who, [0]) == []:
            continue
        try:
            times.setdefault(who, []).append(worker.ask(question))
        except RuntimeError as error:
            if who[0] == "blockcell":
                raise
            print(f"{who[0]} with {who[1]} thread(s) is left out here: {error}")
            worker.start()
            times[who] = []


def summary(task: str, dtype: str, sizes: dict[str, int], times: Times) -> list[list[Any]]:
    """The lines of a point."""
    found = {who: rounds for who, rounds in times.items() if rounds}
    best: dict[str, Who] = {}
    for who in sorted(found, key=lambda who: statistics.median(found[who])):
        best.setdefault(who[0], who)
    lines = []
    for candidate in (name for name in CANDIDATES if name in best):
        pairs = zip(found[best[candidate]], found[best["blockcell"]], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        us = statistics.median(found[best[candidate]]) * 1e6
        lines.append([task, dtype, *sizes.values(), candidate, best[candidate][1], round(us, 2), round(ratio, 3)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = RAW + LAYERS + STREAMS
    parser.add_argument("--quick", action="store_true", help="a few sizes in short rounds")
    parser.add_argument("--tasks", nargs="+", default=every, choices=every, metavar="TASK", help=", ".join(every))
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16"])
    parser.add_argument("--widths", nargs="+", type=int, help="H, and I = H")
    parser.add_argument("--batches", nargs="+", type=int, help="B")
    parser.add_argument("--steps", nargs="+", type=int, help="T")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each point (5)")
    parser.add_argument("--budget", type=float, help="seconds of a round of one candidate (0.1; quick: 0.03)")
    parser.add_argument("--peers", nargs="*", choices=[*CANDIDATES], help="only these")
    parser.add_argument("--level", help="blockcell's CPU level; with v3, peers are limited to AVX2 as well")
    parser.add_argument("--csv", help="write the points to this file")
    options = parser.parse_args()
    grid = QUICK if options.quick else {"widths": WIDTHS, "batches": BATCHES, "steps": STEPS}
    for name, values in grid.items():
        setattr(options, name, getattr(options, name) or values)
    budget = options.budget or (0.03 if options.quick else 0.1)

    environment = {"BLOCKCELL_LEVEL": options.level} if options.level else {}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would wait busily after making the weights
    environment |= AVX2 if options.level == "v3" else {}
    cores = len(os.sched_getaffinity(0))
    names = [n for n in CANDIDATES if n == "blockcell" or options.peers is None or n in options.peers]
    if options.level == "v3":
        names = [n for n in names if n not in ("onnxruntime", "tensorflow")]  # take no such limit
    with ExitStack() as stack:
        workers = {}
        for name in names:
            for threads in sorted({1, cores}):
                worker = stack.enter_context(closing(Worker(WORKER, name, str(threads), **environment)))
                if worker.missing:
                    print(f"{name} is left out: {worker.missing}")
                    break
                workers[name, threads] = worker
        if ("blockcell", 1) not in workers:
            sys.exit("blockcell does not run here")
        about = machine(options.level, options.dtype, list(dict.fromkeys(name for name, _ in workers)))
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        start, todo = time.time(), list(points(options))
        times: list[Times] = [{} for _ in todo]
        lines: list[list[Any]] = []
        for done in range(options.rounds * len(todo)):
            number = done % len(todo)
            (task, sizes), found = todo[number], times[number]
            ask(workers, task, options.dtype, sizes, budget, found)
            new = summary(task, options.dtype, sizes, found)
            if done >= (options.rounds - 1) * len(todo):
                lines += new
            us = "  ".join(f"{line[6]} {line[8]:.6g} us" + f" ({line[9]:.2f}x)" * (line[9] != 1) for line in new)
            point = " ".join(f"{letter}{size:<4}" for letter, size in sizes.items())
            left = (time.time() - start) / (done + 1) * (options.rounds * len(todo) - done - 1) / 60
            at = f"[{number + 1}/{len(todo)} of round {done // len(todo) + 1}, {left:.0f} min left]"
            print(f"{at} {task:17} {point} {us}", flush=True)
    for task, candidate in dict.fromkeys((line[0], line[6]) for line in lines if line[6] != "blockcell"):
        ratios = [line[9] for line in lines if (line[0], line[6]) == (task, candidate)]
        mean = statistics.geometric_mean(ratios)
        print(f"{task:17} {candidate:12} lowest {min(ratios):.2f}x, geometric mean {mean:.2f}x of {len(ratios)} points")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
        Path(options.csv).with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
