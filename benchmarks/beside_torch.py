"""blockcell's calls and PyTorch's in one process, two threads each: with one OpenMP runtime for both, and with two.

    python benchmarks/beside_torch.py [--rounds 9] [--seconds 0.3] [--size 20x16x128]

A process is a way to load the two: which is imported first, whether blockcell has a runtime of its own, as in a wheel
that auditwheel has repaired, and what the environment says.  In each a call of blockcell's is timed alone, a call of
PyTorch's alone, and both where they alternate: threads that wait busily after a call are in the other's way if they are
not the same threads.  All of it on a quiet machine, then beside as many busy processes as there are CPUs.  Prints the
tables of docs/threads.md: mean microseconds of a call alone, and in turn, and for how many PyTorch's idle thread waits
busily after a call, each the median of the rounds.  The size is TxBxH.  Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from turns import Worker, answer, busy_after, means

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


def calls(T: int, B: int, H: int) -> dict[str, tuple[Call, Call]]:
    """By name, a call of ours and one of PyTorch's that alternate: a layer of each, then their gradients."""
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


def work(imports: list[str], T: int, B: int, H: int) -> None:
    """Answers a pair's name and for how many seconds with the means of ours and PyTorch's, alone and in turn."""
    for name in imports:
        importlib.import_module(name)
    import torch

    import blockcell

    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    blockcell.set_num_threads(threads)
    pairs = calls(T, B, H)

    def reply(question: tuple[str, float]) -> list[float]:
        """Microseconds."""
        (ours, theirs), seconds = pairs[question[0]], question[1]
        alone = means([ours], seconds) + means([theirs], seconds)
        return [1e6 * one for one in (*alone, *means([ours, theirs], seconds), busy_after(theirs))]

    answer(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--size", default="20x16x128", metavar="TxBxH")
    options = parser.parse_args()
    import own_runtime
    import torch
    from busy import others

    import blockcell

    with tempfile.TemporaryDirectory() as folder:
        own = own_runtime.copy(Path(folder))
        workers = {
            way: Worker(
                *(__file__, "--work", *imports.split(), *options.size.split("x")),
                **environment | (own if two else {}),
                OPENBLAS_NUM_THREADS="1",
            )
            for way, (imports, two, environment) in WAYS.items()
        }
        rounds: dict[tuple[str, str, str], list[list[float]]] = {}
        for _ in range(options.rounds):
            for place, pair in itertools.product(PLACES, PAIRS):
                with others(place):
                    for way, worker in workers.items():
                        rounds.setdefault((place, pair, way), []).append(worker.ask((pair, options.seconds)))
        for worker in workers.values():
            worker.close()
    info = blockcell.build_info()
    machine = f"{os.cpu_count()} CPUs, {info['cpu']}, {info['compiler']}, torch {torch.__version__}"
    print(f"{machine}, T x B x H = {options.size}\n")
    for place in PLACES:
        heads = [f"{pair}: {who}" for pair in PAIRS for who in ("blockcell", "PyTorch")]
        print(f"| {place} | {' | '.join(heads)} | then waits |\n" + "|---" * (2 + len(heads)) + "|")
        for way in WAYS:
            cells = []
            for pair in PAIRS:
                found = [statistics.median(column) for column in zip(*rounds[place, pair, way], strict=True)]
                cells += [f"{alone:.0f}, {in_turn:.0f}" for alone, in_turn in zip(found[:2], found[2:4], strict=True)]
            print(f"| {way} | {' | '.join(cells)} | {found[4]:.0f} |")
        print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:-3], *map(int, sys.argv[-3:]))
    else:
        main()
