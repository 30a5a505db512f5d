"""Predict the speed of calls on 1 to 64 cores: measure parts of plans one by one on one core, and model the waiting.

Needed by: docs/performance.md

    python benchmarks/scaling.py [--kinds LSTM] [--tasks inference] [--cells 64 256] [--batches 16]
    python benchmarks/scaling.py --check                     # predictions for two threads beside two threads
    python benchmarks/scaling.py --busy [--rounds 5]         # two threads beside one: quiet, busy, between numpy's

Measured is the first part of a grid, the largest one, through all phases of a call.  It runs alone, again and again, on
one core; so its weights stay in the second-level cache if they fit, and it has the third-level cache to itself.
Simulated are the parts side by side, though cores may share memory and a clock; the start of the team and the lines
that cores read of each other, as plans assume them; and the barriers, which take

    0.2 + 0.05 n us, or 0.5 + 0.15 n us, among n threads

A table has speed-ups of the plan over one core, for either barrier.  "Falls" are cases in which more cores make a call
slower by more than 5 %.

With --busy a figure is the mean microseconds of a call, the median of the rounds, with the median of the rounds' ratios
to one thread in the same place: on a quiet machine, beside busy processes, and between numpy's threaded products.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import candidates
import numpy as np
import turns
from machine import CPUS, keep_cpus_busy

import blockcell
from blockcell import GRU, LSTM, _cpu, _team
from blockcell.layers import Grid

T = 20
COSTS = _cpu.machine()  # as plans assume them
LAYERS: dict[str, Callable[[int], Any]] = {
    "LSTM": lambda H: LSTM.init(H, H, seed=1),
    "GRU": lambda H: GRU.init(H, H, seed=1),
}
GATES, PRODUCTS = {"LSTM": 4, "GRU": 3}, {"LSTM": 1, "GRU": 2}
TASKS = {"inference": ("inference",), "training": ("forward", "backward")}
CELLS, BATCHES, CORES = (64, 128, 256, 512, 1024), (1, 4, 16, 64, 256), (4, 8, 16, 32, 64)
BARRIERS = ((0.2, 0.05), (0.5, 0.15))  # microseconds, and for each thread
BUDGET = 0.02  # seconds for each part
ROUNDS = 5


class Pass(NamedTuple):
    """Inference, or one half of a training step, of one layer and size."""

    kind: str
    work: str
    H: int
    B: int


@cache
def make_layer(kind: str, H: int, B: int) -> tuple[Any, Any]:
    return LAYERS[kind](H), np.random.default_rng(0).uniform(-1, 1, (T, B, H)).astype(np.float32)


def microseconds(call: Callable[[], object]) -> float:
    call()
    return 1e6 * turns.seconds(call, BUDGET)


def time_grid(call: Pass, grid: Grid, only: int = -1) -> float:
    """Return the microseconds of a call with this grid: of part `only` alone, or of all parts on as many threads."""
    layer, x = make_layer(call.kind, call.H, call.B)
    layer = copy.copy(layer)  # has no plan yet
    _cpu.use_machine(groups=grid.groups, members=grid.members, only_part=only)
    if call.work == "inference":
        time_of_part = microseconds(lambda: layer(x))
    elif call.work == "forward":
        time_of_part = microseconds(lambda: layer.forward(x))
    else:
        y, _, tape = layer.forward(x)
        time_of_part = microseconds(lambda: layer.backward(tape, y))
    _cpu.use_machine(groups=0, members=0, only_part=-1)
    return time_of_part


PARTS: dict[tuple[Pass, Grid], float] = {}


def part_time(call: Pass, grid: Grid) -> float:
    """Return the microseconds of the largest part alone, without waiting."""
    if (call, grid) not in PARTS:
        PARTS[call, grid] = time_grid(call, grid, -1 if grid == (1, 1) else 0)
    return PARTS[call, grid]


def measure(calls: Iterable[list[Pass]], cores: Iterable[int]) -> None:
    """Measure all parts that `speedup` needs, then each once more: what disturbs a host lasts seconds."""
    for these, count in itertools.product(calls, cores):
        speedup(these, count, BARRIERS[0])
    for (call, grid), time_so_far in PARTS.items():
        PARTS[call, grid] = min(time_so_far, time_grid(call, grid, -1 if grid == (1, 1) else 0))


def waiting_time(call: Pass, grid: Grid, barrier: tuple[float, float]) -> float:
    """Return the microseconds of all barriers, of lines of other cores, and of the start of the team."""
    threads, products = grid.groups * grid.members, PRODUCTS[call.kind]
    if threads == 1:
        return 0

    def barrier_time(n: int) -> float:
        return barrier[0] + barrier[1] * n if n > 1 else 0

    lines, other_threads = call.H / 16, (threads - 1) / threads
    rows, members = math.ceil(call.B / grid.groups), (grid.members - 1) / grid.members
    exchange = COSTS["exchange"] / 1000
    cost = T * products * (barrier_time(grid.members) + exchange / 2 * rows * lines * members)
    cost += (COSTS["waking"] + COSTS["waking_each"] * threads) / 1000
    if call.work == "backward":
        cost += (3 + 2 * products * math.ceil(T * call.B / 256)) * barrier_time(threads)  # as many matrices as products
        cost += exchange / 2 * GATES[call.kind] * call.H * lines / grid.members * (grid.groups - 1) / grid.groups
        return cost + exchange * other_threads * T * call.B * lines * 2 * (GATES[call.kind] / threads + 1)
    chunk = max(1, min(T, 96 // (call.B // grid.groups)))
    return cost + math.ceil(T / chunk) * barrier_time(grid.members) + barrier_time(threads)


def predict_time(call: Pass, grid: Grid, barrier: tuple[float, float]) -> float:
    return part_time(call, grid) + waiting_time(call, grid, barrier)


def plan_grid(call: Pass, threads: int) -> Grid:
    """Return the grid of the present plan."""
    layer, _ = make_layer(call.kind, call.H, call.B)
    plan = layer.plan(T, call.B, threads)[""]
    return plan.backward if call.work == "backward" else plan.forward


def passes(kind: str, task: str, H: int, B: int) -> list[Pass]:
    return [Pass(kind, work, H, B) for work in TASKS[task]]


def speedup(calls: list[Pass], cores: int, barrier: tuple[float, float]) -> float:
    """Return the speed-up of the present plan over one core."""
    alone = sum(part_time(call, Grid(1, 1)) for call in calls)
    return alone / sum(predict_time(call, plan_grid(call, cores), barrier) for call in calls)


def print_table(options: argparse.Namespace) -> None:
    means: dict[tuple[object, ...], list[list[float]]] = {}
    falls = 0
    shapes = [*itertools.product(options.kinds, options.tasks, options.cells, options.batches)]
    measure([passes(*shape) for shape in shapes], options.cores)
    turns.print_heads(["kind", "task", "H", "B", "cores", "grid", "speed-up"])
    for kind, task, H, B in shapes:
        calls, last = passes(kind, task, H, B), [1.0, 1.0]
        for cores in options.cores:
            ratios = [speedup(calls, cores, barrier) for barrier in BARRIERS]
            means.setdefault((kind, task, cores), []).append(ratios)
            chosen = " ".join("{}x{}".format(*plan_grid(call, cores)) for call in calls)
            falls += sum(ratio < 0.95 * before for ratio, before in zip(ratios, last, strict=True))
            last = [*map(max, last, ratios)]
            turns.print_row([kind, task, H, B, cores, chosen, "{:.1f}, {:.1f}".format(*ratios)])
    print()
    turns.print_heads(["kind", "task", "cores", "mean speed-up"])
    for point, all_ratios in means.items():
        turns.print_row([*point, "{:.1f}, {:.1f}".format(*map(statistics.mean, zip(*all_ratios, strict=True)))])
    print(f"\nfalls: {falls}")


def print_check(options: argparse.Namespace) -> None:
    """Compare calls on two threads as predicted, with the waiting that plans assume, and as measured: the fastest of
    some rounds, because a host may keep two virtual cores far apart for seconds at a time."""
    barrier = COSTS["barrier"] / 1000, COSTS["barrier_each"] / 1000
    sizes = itertools.product(options.kinds, options.tasks, options.cells, options.batches)
    points = [(call, plan_grid(call, 2)) for size in sizes for call in passes(*size) if plan_grid(call, 2) != (1, 1)]
    blockcell.set_num_threads(2)
    measured = [[time_grid(call, grid) for call, grid in points] for _ in range(ROUNDS)]
    errors = []
    turns.print_heads("kind,work,H,B,grid,one core (us),predicted,measured,slowest round,ratio".split(","))
    for (call, grid), rounds in zip(points, zip(*measured, strict=True), strict=True):
        expected = predict_time(call, grid, barrier)
        errors.append(abs(expected / min(rounds) - 1))
        numbers = part_time(call, Grid(1, 1)), expected, min(rounds), max(rounds)
        cells = [call.kind, call.work, call.H, call.B, "{}x{}".format(*grid), *(f"{number:.0f}" for number in numbers)]
        turns.print_row([*cells, f"{expected / min(rounds):.2f}"])
    print(f"\n{len(errors)} points: the median of their errors is {100 * statistics.median(errors):.1f} %")


# ------------------------------------------------------------------------------------------------------- busy machines
CALLS = [  # T, B, H
    *(("LSTM inference", *sizes) for sizes in ((50, 16, 128), (100, 1, 256), (20, 64, 32))),
    *(("LSTM training", *sizes) for sizes in ((8, 32, 32), (20, 4, 128))),
]


def work(threads: str) -> None:
    """Answer a call, a budget and a place with the call's mean seconds; at "numpy" a product follows each."""
    a, prepare = np.ones((512, 512), np.float32), candidates.blockcell(int(threads))

    def reply(question: tuple[str, int, int, int, float, str]) -> float:
        task, T, B, H, budget, place = question
        call = prepare(task, "float32", {"T": T, "B": B, "I": H, "H": H})
        return turns.time_in_turn([call, lambda: a @ a] if place == "numpy" else [call], budget)[0]

    turns.answer(reply)


def print_busy(options: argparse.Namespace) -> None:
    numpys = {"OPENBLAS_NUM_THREADS": str(CPUS)}
    team = {f"{threads} threads": turns.Worker(__file__, "--work", str(threads), **numpys) for threads in (1, CPUS)}
    with turns.open_workers(team) as workers:
        turns.print_heads(["place", "call", *workers])
        for place, call in itertools.product(("quiet", "busy", "numpy"), CALLS):
            with keep_cpus_busy(place):
                rounds = [[*turns.ask_all(workers, *call, 0.5, place).values()] for _ in range(options.rounds)]
            cells = []
            for k, times in enumerate(zip(*rounds, strict=True)):
                ratio = statistics.median(times[k] / times[0] for times in rounds)
                cells.append(f"{statistics.median(times) * 1e6:.0f} ({ratio:.2f})")
            turns.print_row([place, "{} T{} B{} H{}".format(*call), *cells])


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=5)
    parser.add_argument("--kinds", nargs="+", default=[*LAYERS], choices=LAYERS, metavar="KIND")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS, metavar="TASK")
    parser.add_argument("--cells", type=int, nargs="+", default=CELLS, metavar="H")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    parser.add_argument("--cores", type=int, nargs="+", default=CORES)
    parser.add_argument("--check", action="store_true", help="compare with two threads")
    parser.add_argument("--busy", action="store_true", help="compare two threads with one in three places")
    options = parser.parse_args()
    if options.busy:
        print_busy(options)
        return
    _team.adapt(False)
    blockcell.set_num_threads(64)
    (print_check if options.check else print_table)(options)


if __name__ == "__main__":
    turns.run_program(main, work)
