"""Compare blockcell with itself: all threads with one, float64 and float16 with float32; measure the slowest steps of
a stream and the cost of small calls.

Needed by: docs/performance.md

    python benchmarks/itself.py [--rounds 7]
    python benchmarks/itself.py --small   # instead: what small calls cost
    python benchmarks/itself.py --ragged  # instead: batches of rows that end early, beside those of full length
    python benchmarks/itself.py --quantized LSTM    # instead: quantized layers, where they gain least

Two processes of blockcell, with one thread and with all, are asked in turn; a ratio is the median of the rounds'.
Rounds on a disturbed machine are repeated (turns.py).  Prints Markdown.
"""

from __future__ import annotations

import statistics
import time
import timeit
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product, repeat

import numpy as np
from candidates import LAYERS, start_worker
from turns import CPUS, Watch, Worker, make_parser, open_workers, print_heads, print_row, select_rounds, watch

import blockcell
from blockcell.optable import SCHEMES

SIZES = [(20, 4, 40), (20, 4, 128), (20, 16, 128), (20, 64, 128), (20, 1, 256), (20, 16, 256), (20, 64, 256)]  # T, B, H
STEPS = 100_000
RAGGED = [(100, 16, 64), (100, 64, 64), (100, 64, 256)]  # T, B, H
PADDING = [50, 90]  # percent
KINDS: dict[str, Callable[[int], blockcell.Layer]] = {
    "LSTM": lambda H: blockcell.LSTM(*draw_normal((2 * H, 4 * H), 4 * H)),
    "GRU": lambda H: blockcell.GRU(*draw_normal((2 * H, 2 * H), (2 * H, H), 2 * H, H)),
    "GRU(reset_after)": lambda H: blockcell.GRU(*draw_normal((2 * H, 2 * H), (2 * H, H), 2 * H, H), reset_after=True),
    "Dense": lambda H: blockcell.Dense(*draw_normal((H, H), H)),
}
MOST = 6e7  # cells times those that each reads, rows and steps: in longer calls widening does not count
WORST = 8  # points that are printed
STORED = {"H": (64, 128, 256, 512, 1024), "B": (1, 2, 4, 6, 8, 12, 16, 24, 64, 256), "T": (1, 5, 20, 100)}


def time_task(worker: Worker, task: str, dtype: str, T: int, B: int, H: int, padding: int = 0) -> float:
    return worker.ask((task, dtype, {"T": T, "B": B, "I": H, "H": H, "padding": padding}, 0.05))


def make_stream_step(H: int) -> Callable[[], object]:
    """Return a call that steps an LSTM with one input."""
    stream = blockcell.LSTM.init(1, H, seed=0).stream()
    return partial(stream.step, np.ones((1, 1), np.float32), np.empty((1, H), np.float32))


def time_steps(step: Callable[[], object]) -> list[float]:
    """Return the microseconds of single steps, as Python sees them, the slowest last."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(times)


def measure_peak(step: Callable[[], object]) -> int:
    """Return the bytes that a thousand steps have allocated at their peak."""
    step()
    thousand = repeat(None, 1000)
    tracemalloc.start()
    for _ in thousand:
        step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def make_small_calls() -> dict[str, Callable[[], object]]:
    """Return calls of one row and one step, by name: they do hardly any arithmetic."""
    layer, x = blockcell.LSTM.init(32, 32, seed=0), np.ones((1, 1, 32), np.float32)
    stack = blockcell.Stack([layer, blockcell.Dense.init(32, 4, seed=1)])
    classifier = blockcell.Stack([blockcell.LSTM.init(1, 16, seed=2), blockcell.Dense.init(16, 2, seed=3, last=True)])
    both = blockcell.Bidirectional(layer, layer)
    x_of_one, lengths, stream, row = x[..., :1].copy(), np.ones(1, int), layer.stream(), x[0]

    def make_training_step(layer: blockcell.Layer, x: np.ndarray) -> Callable[[], object]:
        y = layer(x)[0]
        return lambda: layer.backward(layer.forward(x)[2], y)

    return {
        "a stream's step": lambda: stream.step(row),
        "`layer(x)`": lambda: layer(x),
        "`layer(x, batch_first=True)`": lambda: layer(x, batch_first=True),
        "`layer(x, lengths=)`": lambda: layer(x, lengths=lengths),
        "a `Stack` of an LSTM and a `Dense`": lambda: stack(x),
        "a `Bidirectional` of two LSTMs": lambda: both(x),
        "`forward` and `backward`": make_training_step(layer, x),
        "`forward` and `backward` of the `Stack`": make_training_step(stack, x),
        "`forward` and `backward` of the classifier in docs/layers.md": make_training_step(classifier, x_of_one),
        "the same at T = 10, B = 8": make_training_step(classifier, np.ones((10, 8, 1), np.float32)),
    }


def time_calls(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the microseconds of each call, the median of rounds in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in repeat(None, 300):
                call()
            times[name].append((time.perf_counter_ns() - start) / 3e5)
    return {name: statistics.median(call_times[5:]) for name, call_times in times.items()}


def print_small_calls() -> None:
    print_heads(["call, H = 32, T = B = 1", "us"])
    for name, median in time_calls(make_small_calls()).items():
        print_row([name, f"{median:.2f}"])


def print_ragged(workers: Iterable[Worker], guard: Watch, rounds: int) -> None:
    """Print the time of padded batches as a share of the time of full ones."""

    def ask(task: str, *size: int) -> list[list[float]]:
        return [[time_task(worker, task, "float32", *size, padding) for padding in (0, *PADDING)] for worker in workers]

    columns = [f"{prefix}{padding} % padding" for prefix in ("", f"{CPUS} threads: ") for padding in PADDING]
    print_heads(["T", "B", "I = H", "task", "full, one thread, us", *columns])
    for size, task in product(RAGGED, LAYERS):
        times = select_rounds(guard.rounds(CPUS, partial(ask, task, *size), rounds))
        full = statistics.median(t[0][0] for t in times) * 1e6
        shares = [statistics.median(t[k][n] / t[k][0] for t in times) for k in (0, 1) for n in (1, 2)]
        print_row([*size, task, f"{full:.0f}", *[f"{share:.2f}" for share in shares]])


def print_gains(one_thread: Worker, every: Worker, guard: Watch, rounds: int) -> None:
    """Print what all threads gain, and what float64 and float16 cost."""

    def ask(task: str, *size: int) -> list[float]:
        times = [time_task(one_thread, task, "float32", *size)]
        return times + [time_task(every, task, dtype, *size) for dtype in ("float32", "float64", "float16")]

    heads = ["one thread, us", f"{CPUS} threads", "float64 / float32", "float16 / float32"]
    print_heads(["T", "B", "I = H", "task", *heads])
    for size, task in product(SIZES, LAYERS):
        times = select_rounds(guard.rounds(CPUS, partial(ask, task, *size), rounds))
        gain, double, half = (
            statistics.median(ratios)
            for ratios in ([t[0] / t[1] for t in times], [t[2] / t[1] for t in times], [t[3] / t[1] for t in times])
        )
        single = statistics.median(t[0] for t in times) * 1e6
        print_row([*size, task, f"{single:.0f}", f"{gain:.2f}x", f"{double:.2f}", f"{half:.2f}"])


def print_streams() -> None:
    """Print the times of steps of a stream, and the bytes they allocate."""
    print_heads(["H", "median of a step, us", "99.9 %", "slowest", "bytes allocated"])
    for H in (16, 40, 128):
        step = make_stream_step(H)
        times = time_steps(step)
        median, late = times[STEPS // 2], times[STEPS * 999 // 1000]
        print_row([H, f"{median:.2f}", f"{late:.2f}", f"{times[-1]:.0f}", measure_peak(step)])


def draw_normal(*shapes: tuple[int, ...] | int) -> list[np.ndarray]:
    g = np.random.default_rng(1)
    return [g.standard_normal(shape, np.float32) / 32 for shape in shapes]


def print_quantized(kinds: list[str], rounds: int) -> None:
    """Print the calls and stream steps that gain least by quantization, and the geometric mean of all."""
    gains: dict[tuple[int, str], list[tuple[float, list[object]]]] = {}
    for kind, H in product(kinds, STORED["H"]):
        layer = KINDS[kind](H)
        layers = {None: layer} | {scheme: layer.quantize(scheme) for scheme in SCHEMES}
        for threads, B, T in product((1, CPUS), STORED["B"], (0, *STORED["T"])):  # 0: a stream
            if max(T, 1) * B * H * H > MOST:
                continue
            blockcell.set_num_threads(threads)
            x = draw_normal((T or 1, B, H))[0]
            calls = {k: partial(own, x) if T else partial(own.stream(B).step, x[0]) for k, own in layers.items()}
            n = max(2, int(3e-4 / min(timeit.repeat(calls[None], number=1, repeat=3))))
            turns = [{k: min(timeit.repeat(c, number=1, repeat=n)) for k, c in calls.items()} for _ in range(rounds)]
            least = min(turn[None] for turn in turns) * 1e6
            for scheme in SCHEMES:
                gain = statistics.median(turn[None] / turn[scheme] for turn in turns)
                point = [kind, H, B, T or "stream", f"{least:.0f}"]
                gains.setdefault((threads, scheme), []).append((gain, point))
    print_heads(["threads", "weights", "layer", "I = H", "B", "T", "float32, us", "how many times faster"])
    for (threads, scheme), own_gains in gains.items():
        for gain, point in sorted(own_gains, key=lambda pair: pair[0])[:WORST]:
            print_row([threads, scheme, *point, f"{gain:.2f}x"])
        short = sum(gain < 0.97 for gain, _ in own_gains)
        mean = statistics.geometric_mean(gain for gain, _ in own_gains)
        print_row([threads, scheme, f"all {len(own_gains)}, of which {short} below 0.97x", *[""] * 4, f"{mean:.2f}x"])


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--small", action="store_true", help="only what small calls cost")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--quantized", nargs="+", metavar="LAYER", choices=KINDS)
    options = parser.parse_args()
    if options.quantized:
        print_quantized(options.quantized, options.rounds)
    elif not options.small:
        with open_workers({threads: start_worker("blockcell", threads) for threads in (1, CPUS)}) as workers:
            guard = watch(workers.values())
            if options.ragged:
                print_ragged(workers.values(), guard, options.rounds)
            else:
                print_gains(workers[1], workers[CPUS], guard, options.rounds)
    if not (options.quantized or options.small or options.ragged):
        print()
        print_streams()
        print()
    if not (options.quantized or options.ragged):
        print_small_calls()


if __name__ == "__main__":
    main()
