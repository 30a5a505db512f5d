"""How many times faster than TensorFlow's raw ops: every op, over a grid of sizes.

    python benchmarks/against_tensorflow.py [--quick] [--rounds 3] [--dtype float16] [--csv FILE]

Needs tensorflow-cpu beside blockcell.  Each candidate lives in a process of its own and the two are asked in turn (in
one process the idle threads of one would slow the other); a round runs a call for about 0.3 s and gives the median
time, and the ratio of a point is the median of its rounds' ratios.  Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
OPS = ["GRUBlockCell", "GRUBlockCellGrad", "LSTMBlockCell", "LSTMBlockCellGrad", "BlockLSTM", "BlockLSTMGrad"]
WIDTHS = [(H, H) for H in (16, 40, 64, 100, 128, 256, 300, 512)] + [(40, 300), (300, 64)]  # I, H


def grid(quick: bool):
    for name in OPS:
        steps = (1, 20, 100) if name.startswith("Block") else (1,)
        for T, (I, H), B in itertools.product(steps, WIDTHS, (1, 4, 16, 64, 256)):  # noqa: E741
            if not quick or (I == H in (16, 128, 512) and B in (1, 16, 256) and T < 100):
                yield name, {"T": T, "B": B, "I": I, "H": H}


def seconds_per_call(function, budget: float = 0.3) -> float:
    """The median of single calls within the budget, after a warm-up."""
    function()
    times = []
    end = time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def worker(candidate: str) -> None:
    """Answers every line of standard input, a point as JSON, with its time in seconds."""
    from cases import arguments

    if candidate == "tensorflow":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import tensorflow as tf

        ops, convert = tf.raw_ops, lambda value: tf.constant(value) if np.ndim(value) else value
    else:
        from blockcell import raw_ops as ops

        convert = lambda value: value  # noqa: E731
    print("ready", flush=True)
    for line in sys.stdin:
        name, sizes, dtype = json.loads(line)
        drawn = arguments(name, sizes, dtype=np.dtype(dtype), use_peephole=False)
        args = {key: convert(value) for key, value in drawn.items()}
        if "seq_len_max" in args and candidate == "tensorflow":
            args["seq_len_max"] = tf.constant(args["seq_len_max"], tf.int64)
        op = getattr(ops, name)
        print(seconds_per_call(lambda op=op, args=args: op(**args)), flush=True)


def start_worker(candidate: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", candidate],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    if process.stdout.readline().strip() != "ready":
        sys.exit(f"{candidate} cannot be imported here")
    return process


def ask(worker: subprocess.Popen[str], name: str, sizes: dict[str, int], dtype: str = "float32") -> float:
    """A worker's seconds per call of an op."""
    worker.stdin.write(json.dumps([name, sizes, dtype]) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fraction of the grid")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per point (default 3)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"], help="TF has these two")
    parser.add_argument("--csv", help="also write the points to this file")
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS, help="only these")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)

    workers = {candidate: start_worker(candidate) for candidate in ("blockcell", "tensorflow")}
    rows = []
    for name, sizes in grid(options.quick):
        if name not in options.ops:
            continue
        rounds = []
        for _ in range(options.rounds):
            times = {candidate: ask(process, name, sizes, options.dtype) for candidate, process in workers.items()}
            rounds.append(times)
            if times["tensorflow"] > 3:
                break
        ours, theirs = (statistics.median(times[c] for times in rounds) * 1e6 for c in workers)
        ratio = statistics.median(times["tensorflow"] / times["blockcell"] for times in rounds)
        rows.append([name, *sizes.values(), round(ours, 1), round(theirs, 1), round(ratio, 2)])
        point = " ".join(f"{letter}{size:<4}" for letter, size in sizes.items())
        print(f"{name:18} {point} {ours:12.1f} us {theirs:12.1f} us {ratio:7.2f}x", flush=True)
    for process in workers.values():
        process.stdin.close()
    for name in options.ops:
        ratios = [row[-1] for row in rows if row[0] == name]
        print(f"{name:18} lowest {min(ratios):.2f}x, geometric mean {statistics.geometric_mean(ratios):.2f}x")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([["op", "T", "B", "I", "H", "blockcell_us", "tensorflow_us", "ratio"], *rows])


if __name__ == "__main__":
    main()
