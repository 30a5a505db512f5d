"""Measure blockcell alone: threads, dtypes, padding, small calls, streams, and shares of the ceiling.

Needed by: docs/performance.md

    python benchmarks/itself.py gains [--rounds 15]      # all threads beside one, float64 and float16 beside float32
    python benchmarks/itself.py padding                  # batches of rows that end early, beside those of full length
    python benchmarks/itself.py calls                    # small calls
    python benchmarks/itself.py streams                  # the slowest steps of a stream, and what they allocate
    python benchmarks/itself.py shares [--level v3]      # shares of the multiply-add ceiling, where arithmetic counts

Where processes of blockcell with one thread and with all are asked in turn, rounds on a disturbed machine are repeated
(turns.py), and a ratio is the median of the rounds'.  A star says that disturbed rounds had to count.  Ceilings
(machine.py) are of the same level and as many threads; shares need a C compiler.  Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product, repeat
from typing import Any

import numpy as np
import turns
from bench import operations
from candidates import LAYERS, start_worker
from machine import CPUS, LEVELS, multiply_adds

import blockcell
from blockcell import LSTM, Bidirectional, Dense, Stack

Call = Callable[[], object]
SIZES = [(20, 4, 40), (20, 4, 128), (20, 16, 128), (20, 64, 128), (20, 1, 256), (20, 16, 256), (20, 64, 256)]  # T, B, H
STEPS = 100_000
RAGGED = [(100, 16, 64), (100, 64, 64), (100, 64, 256)]  # T, B, H
PADDING = [50, 90]  # percent
SHARED_SIZES = [(20, B, H) for H in (256, 512, 1024) for B in (4, 16, 24, 64)]  # T, B, H, of shares


# ------------------------------------------------------------------------------------------------- processes in turn
def time_task(worker: turns.Worker, task: str, dtype: str, T: int, B: int, H: int, padding: int = 0) -> float:
    return worker.ask((task, dtype, {"T": T, "B": B, "I": H, "H": H, "padding": padding}, 0.05))


def measure_tasks(
    sizes: Sequence[tuple[int, int, int]], ask: Callable[..., Any], options: argparse.Namespace
) -> Iterator[tuple[list[object], list[Any], str]]:
    """Yield the cells of each size and task, the results of its rounds that count, and a star if disturbed ones do.

    ``ask`` gets the process with one thread, the one with all, the task, T, B and H.
    """
    level = {"BLOCKCELL_LEVEL": options.level}
    with turns.open_workers({threads: start_worker("blockcell", threads, **level) for threads in (1, CPUS)}) as workers:
        guard = turns.watch(workers.values())
        for (T, B, H), task in product(sizes, options.tasks):
            measure = partial(ask, workers[1], workers[CPUS], task, T, B, H)
            rounds = guard.rounds(CPUS, measure, options.rounds)
            star = "*" if sum(not marked for _, marked in rounds) < turns.ENOUGH else ""
            yield [T, B, H, task], turns.select_rounds(rounds), star


def print_gains(options: argparse.Namespace) -> None:
    """Print what all threads gain, and what float64 and float16 cost."""

    def ask(one: turns.Worker, every: turns.Worker, task: str, *size: int) -> list[float]:
        times = [time_task(every, task, dtype, *size) for dtype in ("float32", "float64", "float16")]
        return [time_task(one, task, "float32", *size), *times]

    heads = ["one thread, us", f"{CPUS} threads", "float64 / float32", "float16 / float32"]
    turns.print_heads(["T", "B", "I = H", "task", *heads])
    for cells, rounds, star in measure_tasks(SIZES, ask, options):
        gain, double, half = (
            statistics.median(times[a] / times[b] for times in rounds) for a, b in ((0, 1), (2, 1), (3, 1))
        )
        single = statistics.median(times[0] for times in rounds) * 1e6
        turns.print_row([*cells, f"{single:.0f}{star}", f"{gain:.2f}x", f"{double:.2f}", f"{half:.2f}"])


def print_padding(options: argparse.Namespace) -> None:
    """Print the time of padded batches as a share of the time of full ones."""

    def ask(one: turns.Worker, every: turns.Worker, *task_and_size: Any) -> list[list[float]]:
        task, *size = task_and_size
        return [[time_task(w, task, "float32", *size, padding) for padding in (0, *PADDING)] for w in (one, every)]

    columns = [f"{prefix}{padding} % padding" for prefix in ("", f"{CPUS} threads: ") for padding in PADDING]
    turns.print_heads(["T", "B", "I = H", "task", "full, one thread, us", *columns])
    for cells, rounds, star in measure_tasks(RAGGED, ask, options):
        full = statistics.median(times[0][0] for times in rounds) * 1e6
        shares = [statistics.median(times[k][n] / times[k][0] for times in rounds) for k in (0, 1) for n in (1, 2)]
        turns.print_row([*cells, f"{full:.0f}{star}", *[f"{share:.2f}" for share in shares]])


def print_shares(options: argparse.Namespace) -> None:
    """Print shares of the ceiling, which is measured just before each round."""

    def ask(one: turns.Worker, every: turns.Worker, task: str, T: int, B: int, H: int) -> list[float]:
        shares, done = [], operations(task, {"T": T, "B": B, "I": H, "H": H})
        for worker, threads in ((one, 1), (every, CPUS)):
            ceiling = multiply_adds(options.level, "float32", threads, rounds=500_000, tries=3) * 1e9
            shares.append(done / time_task(worker, task, "float32", T, B, H) / ceiling)
        return shares

    turns.print_heads(["T", "B", "I = H", "task", "one thread, %", f"{CPUS} threads, %"])
    for cells, rounds, star in measure_tasks(SHARED_SIZES, ask, options):
        percents = (f"{100 * statistics.median(shares):.0f}{star}" for shares in zip(*rounds, strict=True))
        turns.print_row([*cells, *percents])


# --------------------------------------------------------------------------------------------------- in this process
def make_small_calls() -> dict[str, Call]:
    """Return calls of one row and one step, by name: they do hardly any arithmetic."""
    layer, x = LSTM.init(32, 32, seed=0), np.ones((1, 1, 32), np.float32)
    stack = Stack([layer, Dense.init(32, 4, seed=1)])
    classifier = Stack([LSTM.init(1, 16, seed=2), Dense.init(16, 2, seed=3, last=True)])
    both, lengths, stream = Bidirectional(layer, layer), np.ones(1, int), layer.stream()

    def make_training_step(layer: blockcell.Layer, x: np.ndarray) -> Call:
        y = layer(x)[0]
        return lambda: layer.backward(layer.forward(x)[2], y)

    return {
        "a stream's step": lambda: stream.step(x[0]),
        "`layer(x)`": lambda: layer(x),
        "`layer(x, lengths=)`": lambda: layer(x, lengths=lengths),
        "a `Stack` of an LSTM and a `Dense`": lambda: stack(x),
        "a `Bidirectional` of two LSTMs": lambda: both(x),
        "`forward` and `backward`": make_training_step(layer, x),
        "`forward` and `backward` of the `Stack`": make_training_step(stack, x),
        "`forward` and `backward` of the classifier in docs/layers.md": make_training_step(
            classifier, x[..., :1].copy()
        ),
        "the same at T = 10, B = 8": make_training_step(classifier, np.ones((10, 8, 1), np.float32)),
    }


def print_calls(options: argparse.Namespace) -> None:
    """Print the microseconds of small calls, medians of rounds in turn."""
    calls = make_small_calls()
    rounds = [{name: timeit.timeit(call, number=300) / 300 for name, call in calls.items()} for _ in range(30)]
    turns.print_heads(["call, H = 32, T = B = 1", "us"])
    for name in calls:
        turns.print_row([name, f"{1e6 * statistics.median(times[name] for times in rounds[5:]):.2f}"])


def print_streams(options: argparse.Namespace) -> None:
    """Print the times of steps of a stream, as Python sees them, and the bytes that a thousand steps allocate."""
    turns.print_heads(["H", "median of a step, us", "99.9 %", "slowest", "bytes allocated"])
    for H in (16, 40, 128):
        stream = LSTM.init(1, H, seed=0).stream()
        step = partial(stream.step, np.ones((1, 1), np.float32), np.empty((1, H), np.float32))
        times = []
        for _ in range(STEPS):
            start = time.perf_counter_ns()
            step()
            times.append((time.perf_counter_ns() - start) / 1e3)
        times.sort()
        thousand = repeat(None, 1000)
        tracemalloc.start()
        for _ in thousand:
            step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        median, late = times[STEPS // 2], times[STEPS * 999 // 1000]
        turns.print_row([H, f"{median:.2f}", f"{late:.2f}", f"{times[-1]:.0f}", peak])


TABLES = {
    "gains": print_gains,
    "padding": print_padding,
    "shares": print_shares,
    "calls": print_calls,
    "streams": print_streams,
}


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=7)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--tasks", nargs="+", default=LAYERS, choices=LAYERS, metavar="TASK", help=", ".join(LAYERS))
    parser.add_argument("--level", default=blockcell.build_info()["level"], choices=LEVELS)
    options = parser.parse_args()
    TABLES[options.table](options)


if __name__ == "__main__":
    main()
