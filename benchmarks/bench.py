"""blockcell beside TensorFlow, PyTorch, onnxruntime and OpenVINO on this CPU: raw ops, layers and streams.

    python benchmarks/bench.py --quick                          # a few sizes, under 4 minutes: make bench
    python benchmarks/bench.py --csv FILE                       # the whole grid, an hour
    python benchmarks/bench.py --tasks "LSTM training" --widths 256 512 --batches 16 --steps 20
    python benchmarks/bench.py --level v3                       # with AVX2 alone, and peers limited to it

Candidates are those of candidates.py that are installed; the others are named.  blockcell chooses its threads; a peer
is asked with one thread and with all, and its better median counts.  The ratio of a point is the median of the rounds'
ratios.  The CSV has a line for each point and candidate, and a JSON file beside it tells of the machine; report.py
makes docs/benchmarks of them.
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


def measure(
    workers: dict[tuple[str, int], Worker], task: str, dtype: str, sizes: dict[str, int], rounds: int, budget: float
) -> list[list[Any]]:
    """The lines of a point."""
    asked = {who: w for who, w in workers.items() if task in DOES[who[0]][0] and dtype in DOES[who[0]][1]}
    question = {"task": task, "dtype": dtype, "sizes": sizes, "budget": budget}
    times: dict[tuple[str, int], list[float]] = {who: [] for who in asked}
    for _ in range(rounds):
        for who, worker in list(asked.items()):
            try:
                times[who].append(worker.ask(question))
            except RuntimeError as error:
                if who[0] == "blockcell":
                    raise
                print(f"{who[0]} with {who[1]} thread(s) is left out here: {error}")
                worker.start()
                del asked[who]
    lines = []
    for candidate in dict.fromkeys(name for name, _ in asked):
        best = min((who for who in asked if who[0] == candidate), key=lambda who: statistics.median(times[who]))
        ours = next(times[who] for who in asked if who[0] == "blockcell")
        ratio = statistics.median(theirs / us for theirs, us in zip(times[best], ours, strict=True))
        us = statistics.median(times[best]) * 1e6
        lines.append([task, dtype, *sizes.values(), candidate, best[1], round(us, 2), round(ratio, 3)])
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
            for threads in [cores] if name == "blockcell" else sorted({1, cores}):
                worker = stack.enter_context(closing(Worker(WORKER, name, str(threads), **environment)))
                if worker.missing:
                    print(f"{name} is left out: {worker.missing}")
                    break
                workers[name, threads] = worker
        if ("blockcell", cores) not in workers:
            sys.exit("blockcell does not run here")
        about = machine(options.level, options.dtype, list(dict.fromkeys(name for name, _ in workers)))
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        lines, start, todo = [], time.time(), list(points(options))
        for done, (task, sizes) in enumerate(todo, 1):
            new = measure(workers, task, options.dtype, sizes, options.rounds, budget)
            lines += new
            times = "  ".join(f"{line[6]} {line[8]:.6g} us" + f" ({line[9]:.2f}x)" * (line[9] != 1) for line in new)
            point = " ".join(f"{letter}{size:<4}" for letter, size in sizes.items())
            left = (time.time() - start) / done * (len(todo) - done) / 60
            print(f"[{done}/{len(todo)}, {left:.0f} min left] {task:17} {point} {times}", flush=True)
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
