"""blockcell beside itself: all threads and one, float64 and float16 and float32, the slowest steps of a stream, and
what small calls cost.

    python benchmarks/itself.py [--rounds 7]
    python benchmarks/itself.py --small   # instead: what small calls cost
    python benchmarks/itself.py --ragged  # instead: batches of rows that end early, beside those of full length
    python benchmarks/itself.py --storage LSTM GRU  # instead: weights in fewer bytes, where they gain least

Two processes of blockcell, with one thread and with all, are asked in turn; a ratio is the median of the rounds'.
Rounds on a disturbed machine are repeated (turns.py).  Prints Markdown.  Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product, repeat
from pathlib import Path

import numpy as np
from candidates import LAYERS
from turns import Watch, Worker, counted, watch

import blockcell
from blockcell.optable import WEIGHT_STORAGES

WORKER = str(Path(__file__).with_name("candidates.py"))
SIZES = [(20, 4, 40), (20, 4, 128), (20, 16, 128), (20, 64, 128), (20, 1, 256), (20, 16, 256), (20, 64, 256)]  # T, B, H
STEPS = 100_000
RAGGED = [(100, 16, 64), (100, 64, 64), (100, 64, 256)]  # T, B, H
PADDING = [50, 90]  # percent
KINDS: dict[str, Callable[[int], blockcell.Layer]] = {
    "LSTM": lambda H: blockcell.LSTM(*normal((2 * H, 4 * H), 4 * H)),
    "GRU": lambda H: blockcell.GRU(*normal((2 * H, 2 * H), (2 * H, H), 2 * H, H)),
    "GRU(reset_after)": lambda H: blockcell.GRU(*normal((2 * H, 2 * H), (2 * H, H), 2 * H, H, H)),
    "Dense": lambda H: blockcell.Dense(*normal((H, H), H)),
}
MOST = 6e7  # cells times those that each reads, rows and steps: in longer calls widening does not count
WORST = 8  # points that are printed
STORED = {"H": (64, 128, 256, 512, 1024), "B": (1, 2, 4, 6, 8, 12, 16, 24, 64, 256), "T": (1, 5, 20, 100)}


def row(cells: Iterable[object]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def asked(worker: Worker, task: str, dtype: str, T: int, B: int, H: int) -> float:
    return worker.ask({"task": task, "dtype": dtype, "sizes": {"T": T, "B": B, "I": H, "H": H}, "budget": 0.05})


def step_of_a_stream(H: int) -> Callable[[], object]:
    """A step of an LSTM with one input."""
    stream = blockcell.LSTM.init(1, H, seed=0).stream()
    return partial(stream.step, np.ones((1, 1), np.float32), np.empty((1, H), np.float32))


def times_of_steps(step: Callable[[], object]) -> list[float]:
    """Microseconds of single steps, as Python sees them, the slowest last."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(times)


def peak_of_steps(step: Callable[[], object]) -> int:
    """Bytes that a thousand steps have allocated at their peak."""
    step()
    thousand = repeat(None, 1000)
    tracemalloc.start()
    for _ in thousand:
        step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def small_calls() -> dict[str, Callable[[], object]]:
    """Of one row and one step, which are hardly any arithmetic; all take turns."""
    layer, x = blockcell.LSTM.init(32, 32, seed=0), np.ones((1, 1, 32), np.float32)
    stack = blockcell.Stack([layer, blockcell.Dense.init(32, 4, seed=1)])
    classifier = blockcell.Stack([blockcell.LSTM.init(1, 16, seed=2), blockcell.Dense.init(16, 2, seed=3, last=True)])
    both = blockcell.Bidirectional(layer, layer)
    one, lengths, stream, row = x[..., :1].copy(), np.ones(1, int), layer.stream(), x[0]

    def trained(layer: blockcell.Layer, x: np.ndarray) -> Callable[[], object]:
        y = layer(x)[0]
        return lambda: layer.backward(layer.forward(x)[2], y)

    return {
        "a stream's step": lambda: stream.step(row),
        "`layer(x)`": lambda: layer(x),
        "`layer(x, batch_first=True)`": lambda: layer(x, batch_first=True),
        "`layer(x, lengths=)`": lambda: layer(x, lengths=lengths),
        "a `Stack` of an LSTM and a `Dense`": lambda: stack(x),
        "a `Bidirectional` of two LSTMs": lambda: both(x),
        "`forward` and `backward`": trained(layer, x),
        "`forward` and `backward` of the `Stack`": trained(stack, x),
        "`forward` and `backward` of the classifier in docs/layers.md": trained(classifier, one),
        "the same at T = 10, B = 8": trained(classifier, np.ones((10, 8, 1), np.float32)),
    }


def times_of_calls(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each, the median of rounds in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in repeat(None, 300):
                call()
            times[name].append((time.perf_counter_ns() - start) / 3e5)
    return {name: statistics.median(each[5:]) for name, each in times.items()}


def print_small_calls() -> None:
    row(["call, H = 32, T = B = 1", "us"])
    row(["---"] * 2)
    for name, each in times_of_calls(small_calls()).items():
        row([name, f"{each:.2f}"])


def ragged(workers: list[Worker], guard: Watch, cores: int, rounds: int) -> None:
    """How long padded batches take, as a share of the time of full ones."""

    def ask(task: str, T: int, B: int, H: int) -> list[list[float]]:
        sizes = [{"T": T, "B": B, "I": H, "H": H, "padding": padding} for padding in (0, *PADDING)]
        return [
            [worker.ask({"task": task, "dtype": "float32", "sizes": each, "budget": 0.05}) for each in sizes]
            for worker in workers
        ]

    columns = [f"{what}{padding} % padding" for what in ("", f"{cores} threads: ") for padding in PADDING]
    row(["T", "B", "I = H", "task", "full, one thread, us", *columns])
    row(["---"] * (5 + len(columns)))
    for size in RAGGED:
        for task in LAYERS:
            times = counted(guard.rounds(cores, partial(ask, task, *size), rounds))
            full = statistics.median(t[0][0] for t in times) * 1e6
            shares = [statistics.median(t[k][n] / t[k][0] for t in times) for k in (0, 1) for n in (1, 2)]
            row([*size, task, f"{full:.0f}", *[f"{share:.2f}" for share in shares]])


def normal(*shapes: tuple[int, ...] | int) -> list[np.ndarray]:
    g = np.random.default_rng(1)
    return [g.standard_normal(shape, np.float32) / 32 for shape in shapes]


def print_storages(kinds: list[str], rounds: int) -> None:
    """Calls and steps of streams that gain least by weights in fewer bytes, and the geometric mean of all."""
    gains: dict[tuple[int, str], list[tuple[float, list[object]]]] = {}
    for kind, H in product(kinds, STORED["H"]):
        layer = KINDS[kind](H)
        packed = {storage: layer.packed(storage) for storage in (None, *WEIGHT_STORAGES)}
        for threads, B, T in product((1, len(os.sched_getaffinity(0))), STORED["B"], (0, *STORED["T"])):  # 0: a stream
            if max(T, 1) * B * H * H > MOST:
                continue
            blockcell.set_num_threads(threads)
            x = normal((T or 1, B, H))[0]
            calls = {k: partial(each, x) if T else partial(each.stream(B).step, x[0]) for k, each in packed.items()}
            n = max(2, int(3e-4 / min(timeit.repeat(calls[None], number=1, repeat=3))))
            turns = [{k: min(timeit.repeat(c, number=1, repeat=n)) for k, c in calls.items()} for _ in range(rounds)]
            least = min(turn[None] for turn in turns) * 1e6
            for storage in WEIGHT_STORAGES:
                gain = statistics.median(turn[None] / turn[storage] for turn in turns)
                point = [kind, H, B, T or "stream", f"{least:.0f}"]
                gains.setdefault((threads, storage), []).append((gain, point))
    row(["threads", "weights", "layer", "I = H", "B", "T", "float32, us", "how many times faster"])
    row(["---"] * 8)
    for (threads, storage), found in gains.items():
        for gain, point in sorted(found, key=lambda each: each[0])[:WORST]:
            row([threads, storage, *point, f"{gain:.2f}x"])
        short = sum(gain < 0.97 for gain, _ in found)
        mean = statistics.geometric_mean(gain for gain, _ in found)
        row([threads, storage, f"all {len(found)}, of which {short} below 0.97x", *[""] * 4, f"{mean:.2f}x"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="only what small calls cost")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--storage", nargs="+", metavar="LAYER", choices=KINDS)
    options = parser.parse_args()
    if options.small:
        print_small_calls()
        return
    if options.storage:
        print_storages(options.storage, options.rounds)
        return
    rounds = options.rounds
    cores = len(os.sched_getaffinity(0))
    one, all_ = (Worker(WORKER, "blockcell", str(n), OPENBLAS_NUM_THREADS="1") for n in (1, cores))
    guard = watch([one, all_])
    if options.ragged:
        ragged([one, all_], guard, cores, rounds)
        one.close()
        all_.close()
        return

    def ask(task: str, *size: int) -> list[float]:
        times = [asked(one, task, "float32", *size)]
        return times + [asked(all_, task, dtype, *size) for dtype in ("float32", "float64", "float16")]

    row(["T", "B", "I = H", "task", "one thread, us", f"{cores} threads", "float64 / float32", "float16 / float32"])
    row(["---"] * 8)
    for size in SIZES:
        for task in LAYERS:
            times = counted(guard.rounds(cores, partial(ask, task, *size), rounds))
            single = statistics.median(t[0] for t in times) * 1e6
            gain, double, half = (
                statistics.median(ratios)
                for ratios in ([t[0] / t[1] for t in times], [t[2] / t[1] for t in times], [t[3] / t[1] for t in times])
            )
            row([*size, task, f"{single:.0f}", f"{gain:.2f}x", f"{double:.2f}", f"{half:.2f}"])
    one.close()
    all_.close()
    print()
    row(["H", "median of a step, us", "99.9 %", "slowest", "bytes allocated"])
    row(["---"] * 5)
    for H in (16, 40, 128):
        step = step_of_a_stream(H)
        times = times_of_steps(step)
        median, late = times[STEPS // 2], times[STEPS * 999 // 1000]
        row([H, f"{median:.2f}", f"{late:.2f}", f"{times[-1]:.0f}", peak_of_steps(step)])
    print()
    print_small_calls()


if __name__ == "__main__":
    main()
