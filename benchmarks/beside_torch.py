"""Measure blockcell's and PyTorch's calls in one process, two threads each: with one OpenMP runtime and with two.

Needed by: docs/performance.md

    python benchmarks/beside_torch.py [--rounds 9] [--seconds 0.3] [--size 20x16x128]

A process is a way to load the two: which is imported first, whether blockcell has a runtime of its own, as in a wheel
that auditwheel has repaired, and what the environment says.  In each a call of blockcell's is timed alone, a call of
PyTorch's alone, and both where they alternate: threads that wait busily after a call are in the other's way if they are
not the same threads.  All of it on a quiet machine, then beside as many busy processes as there are CPUs.  Prints the
tables of docs/performance.md: mean microseconds of a call alone, and in turn, and for how many PyTorch's idle thread
waits busily after a call, each the median of the rounds.  The size is TxBxH.
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from turns import (
    CPUS,
    Worker,
    answer,
    ask_all,
    make_parser,
    measure_spinning,
    open_workers,
    print_heads,
    print_row,
    run_program,
    time_in_turn,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests" / "lib")]  # a copy with its own runtime stands before them

ONE = "one runtime"
TWO = "two runtimes"
PLACES, PAIRS = ("quiet", "busy"), ("inference", "training")
WAYS = {  # imports, whether blockcell has a runtime of its own, environment
    f"{ONE}, torch first": ("torch blockcell", False, {}),
    f"{ONE}, blockcell first": ("blockcell torch", False, {}),
    TWO: ("blockcell torch", True, {}),
    f"{TWO}, `GOMP_SPINCOUNT=1000`": ("blockcell torch", True, {"GOMP_SPINCOUNT": "1000"}),
    f"{TWO}, `OMP_WAIT_POLICY=passive`": ("blockcell torch", True, {"OMP_WAIT_POLICY": "passive"}),
    f"{ONE}, `GOMP_SPINCOUNT=1000`": ("torch blockcell", False, {"GOMP_SPINCOUNT": "1000"}),
    f"{ONE}, `OMP_WAIT_POLICY=passive`": ("torch blockcell", False, {"OMP_WAIT_POLICY": "passive"}),
    "`OMP_NUM_THREADS=1`": ("torch blockcell", False, {"OMP_NUM_THREADS": "1"}),
}
Call = Callable[[], object]


def make_pairs(T: int, B: int, H: int) -> dict[str, tuple[Call, Call]]:
    """Make pairs of calls that alternate, ours and PyTorch's: of a layer each, then of its gradients."""
    import numpy as np
    import torch

    from blockcell import LSTM

    layer, x = LSTM.init(H, H, seed=0), np.ones((T, B, H), np.float32)
    linear, rows = torch.nn.Linear(H, H), torch.ones(T * B, H)

    def infer() -> None:
        with torch.inference_mode():
            linear(rows)

    def gradients() -> None:
        linear(rows).backward(rows)

    def training() -> None:
        y, _, tape = layer.forward(x)
        layer.backward(tape, y)

    return {"inference": (lambda: layer(x), infer), "training": (training, gradients)}


def work(*arguments: str) -> None:
    """Answer a pair's name and a budget with both mean times, alone and in turn, and PyTorch's spinning."""
    *imports, T, B, H = arguments
    for name in imports:
        importlib.import_module(name)
    import torch

    import blockcell

    threads = int(os.environ.get("OMP_NUM_THREADS", CPUS))
    torch.set_num_threads(threads)
    blockcell.set_num_threads(threads)
    pairs = make_pairs(int(T), int(B), int(H))

    def reply(question: tuple[str, float]) -> list[float]:
        """Return the microseconds of one round."""
        (ours, theirs), seconds = pairs[question[0]], question[1]
        alone = time_in_turn([ours], seconds) + time_in_turn([theirs], seconds)
        return [1e6 * value for value in (*alone, *time_in_turn([ours, theirs], seconds), measure_spinning(theirs))]

    answer(reply)


def main() -> None:
    parser = make_parser(__doc__, rounds=9, seconds=0.3)
    parser.add_argument("--size", default="20x16x128", metavar="TxBxH")
    options = parser.parse_args()
    import own_runtime
    import torch
    from busy import keep_cpus_busy

    import blockcell

    rounds: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        own = own_runtime.copy(Path(folder))
        team = {
            way: Worker(
                *(__file__, "--work", *imports.split(), *options.size.split("x")),
                **environment | (own if two else {}),
                OPENBLAS_NUM_THREADS="1",
            )
            for way, (imports, two, environment) in WAYS.items()
        }
        with open_workers(team) as workers:
            for _, place, pair in itertools.product(range(options.rounds), PLACES, PAIRS):
                with keep_cpus_busy(place):
                    rounds.setdefault((place, pair), []).append(ask_all(workers, pair, options.seconds))
    info = blockcell.build_info()
    print(f"{CPUS} CPUs, {info['cpu']}, {info['compiler']}, torch {torch.__version__}, T x B x H = {options.size}")
    for place in PLACES:
        print()
        print_heads([place, *(f"{pair}: {who}" for pair in PAIRS for who in ("blockcell", "PyTorch")), "then waits"])
        for way in WAYS:
            cells = []
            for pair in PAIRS:
                columns = zip(*(answers[way] for answers in rounds[place, pair]), strict=True)
                times = [statistics.median(column) for column in columns]
                cells += [f"{alone:.0f}, {in_turn:.0f}" for alone, in_turn in zip(times[:2], times[2:4], strict=True)]
            print_row([way, *cells, f"{times[4]:.0f}"])


if __name__ == "__main__":
    run_program(main, work)
