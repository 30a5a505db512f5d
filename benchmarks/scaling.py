"""Predict the speed of calls on 1 to 64 cores: measure parts of plans one by one on one core, and model the waiting.

Needed by: docs/performance.md

    python benchmarks/scaling.py [--kinds LSTM] [--tasks inference] [--cells 64 256] [--batches 16] [--csv FILE]
    python benchmarks/scaling.py --vary                      # plans that are wrong by a factor of three about costs
    python benchmarks/scaling.py --check                     # predictions for two threads beside two threads
    python benchmarks/scaling.py --picture docs/benchmarks/scaling.png

Measured is the first part of a grid, the largest one, through all phases of a call.  It runs alone, again and again, on
one core; so its weights stay in the second-level cache if they fit, and it has the third-level cache to itself.
Simulated are the parts side by side, though cores may share memory and a clock; the start of the team and the lines
that cores read of each other, as plans assume them; and the barriers, which take

    0.2 + 0.05 n us, or 0.5 + 0.15 n us, among n threads

A table has speed-ups over one core, for either barrier: of the present plan; of the plan up to version 0.1, which
divides rows or hidden units, among one thread or all; of each product divided by itself, as onnxruntime divides it; and
of the best of all grids.  "Falls" are cases in which more cores make a call slower by more than 5 %.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from turns import make_parser, print_heads, print_row, seconds

import blockcell
from blockcell import GRU, LSTM, _cpu, _team
from blockcell.layers import Grid

T = 20
COSTS = _cpu.machine()  # as plans assume them
LAYERS: dict[str, Callable[[int], Any]] = {
    "LSTM": lambda H: LSTM.init(H, H, seed=1),
    "GRU": lambda H: GRU.init(H, H, seed=1),
}
GATES, PRODUCTS, LINES = {"LSTM": 4, "GRU": 3}, {"LSTM": 1, "GRU": 2}, {"LSTM": 1, "GRU": 2}  # LINES: in a panel
TASKS = {"inference": ("inference",), "training": ("forward", "backward")}
CELLS, BATCHES, CORES = (64, 128, 256, 512, 1024), (1, 4, 16, 64, 256), (4, 8, 16, 32, 64)
BARRIERS = ((0.2, 0.05), (0.5, 0.15))  # microseconds, and for each thread
BUDGET = 0.02  # seconds for each part
ROUNDS = 5
PICTURED = ((64, 16), (128, 64), (256, 16), (512, 64), (1024, 256))  # H, B


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
    return 1e6 * seconds(call, BUDGET)


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
    """Measure all parts that `speedups` needs, then each once more: what disturbs a host lasts seconds."""
    for these, count in itertools.product(calls, cores):
        speedups(these, count, BARRIERS[0])
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


def panels(call: Pass) -> int:
    lines = 4 if call.work == "backward" else LINES[call.kind]
    return math.ceil(call.H / (16 * lines))


def plan_grid(call: Pass, threads: int) -> Grid:
    """Return the grid of the present plan."""
    layer, _ = make_layer(call.kind, call.H, call.B)
    plan = layer.plan(T, call.B, threads)[""]
    return plan.backward if call.work == "backward" else plan.forward


def plan_old_grid(call: Pass, threads: int) -> Grid:
    """Return the grid of the plan of versions up to 0.1."""
    L1, L2, _ = COSTS["caches"]
    recurrent, back = 4 * GATES[call.kind] * call.H**2, call.work == "backward"
    step = (4.0 if back else 2.0) * call.B * GATES[call.kind] * 2 * call.H**2
    rows = 16 if recurrent > L2 else 4 if recurrent > 2 * L1 else 2
    if step * T < 1e6 or (call.B < rows * threads and step < (3e5 if back else 2e5)):
        return Grid(1, 1)
    return Grid(threads, 1) if call.B >= rows * threads else Grid(1, threads if back else min(threads, panels(call)))


def grids(call: Pass, cores: int) -> Iterator[Grid]:
    """Yield the grids of 1, 2, 3, 4, 6, 8, 12 ... groups and of as many members that fit the cores, rows and panels."""
    counts = sorted({count << shift for count in (1, 3) for shift in range(7)})
    for groups, members in itertools.product(counts, counts):
        if groups * members <= cores and groups <= call.B and members <= panels(call):
            yield Grid(groups, members)


def best_time(call: Pass, cores: int, barrier: tuple[float, float]) -> float:
    return min(predict_time(call, grid, barrier) for grid in grids(call, cores))


def divided_products(call: Pass, cores: int, barrier: tuple[float, float]) -> float:
    """Predict the time with each product in equal parts between two barriers, and all other work on one core."""
    flops = 2 * T * call.B * GATES[call.kind] * 2 * call.H**2 * (2 if call.work == "backward" else 1)
    alone = part_time(call, Grid(1, 1))
    product = min(alone, flops / (1000 * COSTS["speed"]))
    wait = 2 * T * PRODUCTS[call.kind] * (barrier[0] + barrier[1] * cores)
    return min(alone, alone - product + product / cores + wait)


def passes(kind: str, task: str, H: int, B: int) -> list[Pass]:
    return [Pass(kind, work, H, B) for work in TASKS[task]]


def speedups(calls: list[Pass], cores: int, barrier: tuple[float, float]) -> dict[str, float]:
    alone = sum(part_time(call, Grid(1, 1)) for call in calls)
    ways = {
        "plan": lambda call: predict_time(call, plan_grid(call, cores), barrier),
        "before": lambda call: predict_time(call, plan_old_grid(call, cores), barrier),
        "products": lambda call: divided_products(call, cores, barrier),
        "best": lambda call: best_time(call, cores, barrier),
    }
    return {name: alone / sum(map(way, calls)) for name, way in ways.items()}


def print_table(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    falls = 0
    shapes = [*itertools.product(options.kinds, options.tasks, options.cells, options.batches)]
    measure([passes(*shape) for shape in shapes], options.cores)
    print_heads(["kind", "task", "H", "B", "cores", "grid", "plan", "before", "products", "best", "share of best"])
    for kind, task, H, B in shapes:
        calls, last = passes(kind, task, H, B), [1.0, 1.0]
        for cores in options.cores:
            results = [speedups(calls, cores, barrier) for barrier in BARRIERS]
            chosen = " ".join("{}x{}".format(*plan_grid(call, cores)) for call in calls)
            for k, ratios in enumerate(results):
                falls += ratios["plan"] < 0.95 * last[k]
                last[k] = max(last[k], ratios["plan"])
                rows.append({"kind": kind, "task": task, "H": H, "B": B, "cores": cores, "grid": chosen,
                             "barrier": k, **{name: round(value, 2) for name, value in ratios.items()}})  # fmt: skip
            cells = [", ".join(f"{ratios[name]:.1f}" for ratios in results) for name in results[0]]
            share = ", ".join(f"{ratios['plan'] / ratios['best']:.2f}" for ratios in results)
            print_row([kind, task, H, B, cores, chosen, *cells, share])
    print()
    print_heads(["kind", "task", "cores", "plan", "before", "products", "best"])
    for kind, task, cores in itertools.product(options.kinds, options.tasks, options.cores):
        these = [row for row in rows if (row["kind"], row["task"], row["cores"]) == (kind, task, cores)]
        means = [
            ", ".join(f"{statistics.mean(row[name] for row in these if row['barrier'] == k):.1f}" for k in (0, 1))
            for name in ("plan", "before", "products", "best")
        ]
        print_row([kind, task, cores, *means])
    shares = [row["plan"] / row["best"] for row in rows]
    gains = [row["plan"] / row["before"] for row in rows]
    print(
        f"\n{len(rows)} cases: share of the best {statistics.mean(shares):.2f} in the mean, {min(shares):.2f} at least;"
        f" {statistics.mean(gains):.2f} times the plan before, {min(gains):.2f} at least; falls: {falls}"
    )
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


def print_variations(options: argparse.Namespace) -> None:
    """Print shares of the best grid's speed, where costs in the plan are too low or too high by a factor of three."""
    groups = (
        "waking waking_each sleep_cost",
        "barrier barrier_each",
        "exchange",
        "speed",
        "read_speed",
        "single_thread_limit",
    )
    points = [*itertools.product(options.kinds, options.tasks, options.cells, options.batches, options.cores)]
    measure([passes(*sizes) for *sizes, _ in points], options.cores)
    print_heads(["what", "factor", "share of the best: mean", "lowest", "where"])
    for group, factor in [("", 1.0), *itertools.product(groups, (1 / 3, 3.0))]:
        changed = {name: np.multiply(COSTS[name], factor) for name in group.split()}
        _cpu.use_machine(**COSTS | changed)
        shares = []
        for (*sizes, cores), barrier in itertools.product(points, BARRIERS):
            result = speedups(passes(*sizes), cores, barrier)
            shares.append((result["plan"] / result["best"], " ".join(map(str, (*sizes, cores)))))
        lowest, where = min(shares)
        mean = statistics.mean(share for share, _ in shares)
        print_row([group or "as assumed", f"{factor:.2f}", f"{mean:.2f}", f"{lowest:.2f}", where])
    _cpu.use_machine(**COSTS)


def print_check(options: argparse.Namespace) -> None:
    """Compare calls on two threads as predicted, with the waiting that plans assume, and as measured: the fastest of
    some rounds, because a host may keep two virtual cores far apart for seconds at a time."""
    barrier = COSTS["barrier"] / 1000, COSTS["barrier_each"] / 1000
    sizes = itertools.product(options.kinds, options.tasks, options.cells, options.batches)
    points = [(call, plan_grid(call, 2)) for size in sizes for call in passes(*size) if plan_grid(call, 2) != (1, 1)]
    blockcell.set_num_threads(2)
    measured = [[time_grid(call, grid) for call, grid in points] for _ in range(ROUNDS)]
    errors = []
    print_heads("kind,work,H,B,grid,one core (us),predicted,measured,slowest round,ratio".split(","))
    for (call, grid), rounds in zip(points, zip(*measured, strict=True), strict=True):
        expected = predict_time(call, grid, barrier)
        errors.append(abs(expected / min(rounds) - 1))
        numbers = part_time(call, Grid(1, 1)), expected, min(rounds), max(rounds)
        cells = [call.kind, call.work, call.H, call.B, "{}x{}".format(*grid), *(f"{number:.0f}" for number in numbers)]
        print_row([*cells, f"{expected / min(rounds):.2f}"])
    print(f"\n{len(errors)} points: the median of their errors is {100 * statistics.median(errors):.1f} %")


def draw_picture(path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PICTURED), figsize=(3 * len(PICTURED), 3.2), sharey=True)
    counts = (1, 2, *CORES)
    measure([passes("LSTM", "inference", *shape) for shape in PICTURED], counts[1:])
    for axis, (H, B) in zip(axes, PICTURED, strict=True):
        calls = passes("LSTM", "inference", H, B)
        lines = [{"plan": 1.0, "before": 1.0, "products": 1.0, "best": 1.0}]
        lines += [speedups(calls, cores, BARRIERS[0]) for cores in counts[1:]]
        for name, style in (("best", "k:"), ("plan", "C0-o"), ("before", "C1-s"), ("products", "C2-^")):
            axis.plot(counts, [line[name] for line in lines], style, markersize=4, label=name)
        axis.set(title=f"LSTM, H = {H}, B = {B}", xlabel="cores", xscale="log", yscale="log")
        axis.set_xticks(counts, map(str, counts))
        axis.set_yticks(counts, map(str, counts))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed-up, simulated")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=[*LAYERS], choices=LAYERS, metavar="KIND")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS, metavar="TASK")
    parser.add_argument("--cells", type=int, nargs="+", default=CELLS, metavar="H")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    parser.add_argument("--cores", type=int, nargs="+", default=CORES)
    parser.add_argument("--vary", action="store_true", help="share of the best with other costs in the plan")
    parser.add_argument("--check", action="store_true", help="compare with two threads")
    parser.add_argument("--barriers-alone", action="store_true", help="as if all other waiting took no time")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE", help="speed-up by cores for five shapes, as a PNG")
    options = parser.parse_args()
    _team.adapt(False)
    blockcell.set_num_threads(64)
    if options.barriers_alone:
        COSTS.update(waking=0, waking_each=0, exchange=0)
        _cpu.use_machine(**COSTS)
    if options.picture:
        draw_picture(options.picture)
    elif options.check:
        print_check(options)
    elif options.vary:
        print_variations(options)
    else:
        print_table(options)


if __name__ == "__main__":
    main()
