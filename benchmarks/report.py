"""Write pages and pictures from the CSV files of bench.py: how fast blockcell is beside other libraries.

Needed by: docs/benchmarks/cpu.md, docs/performance.md, docs/recurrent-policies.md

    python benchmarks/report.py [FILE.csv ...]

Writes cpu.md beside the first file, and pictures of that file; prints every size that is short of what was aimed at.
Without arguments the files are those of docs/benchmarks, whose first table docs/performance.md has too, with lines of
quantization.csv (`PYTHONPATH=tests/lib python tests/repository/test_readme.py` copies it), torch.md and quantization.md
there are written of what torch_modules.py and quantization.py have measured, and docs/images/recurrent-policies.png is
drawn of what torch_episodes.py has measured.  Files of `bench.py --grid` get tables of their own: per task, peer and
number of threads.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import textwrap
from pathlib import Path

import bench
from bench import QUICK, Row, falls_short, group_rows, operations
from candidates import LAYERS, MORE_LAYERS, MORE_STREAMS, RAW, STREAMS
from matplotlib.figure import Figure
from turns import ENOUGH

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FILES = [FOLDER / f"{name}.csv" for name in ("float32", "float32-more", "float32-v3", "float64", "float16")]
FILES += sorted(FOLDER.glob("grid-*.csv"), reverse=True)  # v4, then v3
FORWARD, GRADIENTS = ("GRUBlockCell", "LSTMBlockCell", "BlockLSTM"), ("GRUBlockCellGrad", "BlockLSTMGrad")
TORCH = FOLDER / "torch-modules.csv"
QUANTIZATION = FOLDER / "quantization.csv"
EPISODES = FOLDER / "torch-episodes.csv"
CAP = 0.85  # no size is asked to take a larger share of the ceiling
PEERS = {"torch": "PyTorch", "onnxruntime": "onnxruntime", "openvino": "OpenVINO", "tensorflow": "TensorFlow"}
NAMES = {"blockcell": "blockcell"} | PEERS
COLOURS = dict(zip(NAMES, ("tab:red", "tab:orange", "tab:blue", "tab:purple", "tab:green"), strict=True))
SUMMARY = [  # the rows of the first table, of the first two files: what, the tasks, the peer
    ("LSTM, inference", ("LSTM inference",), "torch"),
    ("LSTM, inference", ("LSTM inference",), "onnxruntime"),
    ("LSTM, training step", ("LSTM training",), "torch"),
    ("GRU of PyTorch and Keras, inference", ("GRU(reset_after) inference",), "torch"),
    ("GRU of PyTorch and Keras, inference", ("GRU(reset_after) inference",), "onnxruntime"),
    ("GRU of PyTorch and Keras, training step", ("GRU(reset_after) training",), "torch"),
    ("GRU of TensorFlow's ops, inference", ("GRU inference",), "onnxruntime"),
    ("RNN, inference", ("RNN inference",), "torch"),
    ("RNN, inference", ("RNN inference",), "onnxruntime"),
    ("RNN, training step", ("RNN training",), "torch"),
    ("LSTM with a projection, inference", ("LSTM(projected) inference",), "torch"),
    ("LSTM with a projection, training step", ("LSTM(projected) training",), "torch"),
    ("TensorFlow's ops", FORWARD, "tensorflow"),
    ("their gradients", (*GRADIENTS, "LSTMBlockCellGrad"), "tensorflow"),
]


# ---------------------------------------------------------------------------------------------------- what was aimed at
def target(task: str, peer: str, H: int) -> tuple[float, float]:
    """Return the ratio to a peer that every size shall reach, and the one of their geometric mean."""
    if peer == "tensorflow":
        if task in FORWARD:
            return (2.0 if H <= 256 else 1.3), 4.0
        return (3.0 if task in GRADIENTS else 1.5), 8.0
    if peer == "torch":
        if task in MORE_LAYERS:
            return 1.0, 1.5
        return (1.9, 4.0) if "GRU" in task else (1.05, 1.6 if "training" in task else 1.8)
    return 1.0, (2.0 if peer == "openvino" and "GRU" in task else 1.5)


def aim(row: Row) -> float:
    """Return the ratio that a row's size shall reach: never one that takes more than CAP of the ceiling."""
    ratio = target(row["task"], row["candidate"], row["H"])[0]
    return min(ratio, CAP / row["share"]) if row["share"] else ratio


# ------------------------------------------------------------------------------------------------------------- the rows
def read_rows(path: Path) -> tuple[list[Row], Row]:
    """Read the rows of a CSV file, add their shares of the ceiling, and read the JSON file about the machine."""
    rows, about = bench.read(path)
    for row in rows:
        done = operations(row["task"], {letter: row[letter] for letter in "TBIH"})
        row["share"] = done / row["microseconds"] / 1e3 / about["ceiling"] if about["ceiling"] else 0.0
    return rows, about


def is_grid(path: Path) -> bool:
    return "same_threads" in json.loads(path.with_suffix(".json").read_text())


def group_pairs(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group the rows by task and peer."""
    pairs_of_rows = {
        (task, peer): [r for r in rows if (r["task"], r["candidate"]) == (task, peer)]
        for task in RAW + LAYERS + MORE_LAYERS
        for peer in PEERS
    }
    return {pair: mine for pair, mine in pairs_of_rows.items() if mine}


def layers_of(rows: list[Row]) -> list[str]:
    return [task for task in LAYERS + MORE_LAYERS if any(r["task"] == task for r in rows)]


def middle_range(rows: list[Row]) -> tuple[float, float]:
    """Return the ratios between which the middle 80 % of the sizes lie."""
    cuts = statistics.quantiles((r["ratio"] for r in rows), n=10, method="inclusive")
    return cuts[0], cuts[-1]


def microseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def count_slower(rows: list[Row]) -> str:
    return f"{sum(map(falls_short, rows))} of {len(rows)}"


def geometric_mean(rows: list[Row]) -> str:
    return f"{statistics.geometric_mean(r['ratio'] for r in rows):.2f}x"


def ratio_of(row: Row) -> str:
    """Format the ratio, and the quartiles of its rounds where the file has them."""
    spread = f" ({row['low']:.2f} to {row['high']:.2f})" if row["low"] < row["high"] else ""
    return f"{row['ratio']:.2f}x{spread}"


def sizes(row: Row) -> str:
    return ", ".join(f"{letter} = {row[letter]}" for letter in "TBIH")


# ------------------------------------------------------------------------------------------------------------ the pages
def table(lines: list[list[str]]) -> list[str]:
    heading, *rest = lines
    return ["| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *rest)] + [""]


def machine_line(about: Row) -> str:
    peers = ", ".join(f"{name} {about[peer].partition('+')[0]}" for peer, name in PEERS.items() if peer in about)
    return (
        f"Measured on {about['date']} in {about['dtype']} on {about['threads']} cores of an {about['cpu']}, CPU level "
        f"{about['level']}; {about['compiler']}, numpy {about['numpy']}, {peers}; ceiling {about['ceiling']:g} GF/s."
    )


def summary(paths: list[Path], quantized: Path | None = None) -> list[str]:
    """Make the first table; docs/performance.md also has lines of a file of quantization.py."""
    lines = [["", "beside", "faster, median", "80 % of the sizes", "slower at"]]
    files = [read_rows(path) for path in paths]
    for title, tasks, peer in SUMMARY:
        for rows, about in files:
            mine = [r for r in rows if r["task"] in tasks and r["candidate"] == peer]
            if not mine:
                continue
            low, high = middle_range(mine)
            version = about[peer].partition("+")[0]
            median = f"{statistics.median(r['ratio'] for r in mine):.2f}x"
            lines.append([title, f"{PEERS[peer]} {version}", median, f"{low:.2f}x to {high:.1f}x", count_slower(mine)])
    return table(lines + (few_bits_lines(quantized) if quantized else []))


def ratios(rows: list[Row]) -> list[str]:
    lines = [["task", "peer", "median", "80 % of the sizes", "slower at", "slowest", "at"]]
    for (task, peer), mine in group_pairs(rows).items():
        low, high = middle_range(mine)
        worst = min(mine, key=lambda r: r["ratio"])
        median = f"{statistics.median(r['ratio'] for r in mine):.2f}x"
        span = f"{low:.2f}x to {high:.2f}x"
        lines.append([task, PEERS[peer], median, span, count_slower(mine), ratio_of(worst), sizes(worst)])
    return table(lines) if len(lines) > 1 else []


def aims(paths: list[Path]) -> list[str]:
    """Count the sizes that are short of their aim; `main` prints each."""
    lines = [["file", "task", "peer", "aim of each size", "short of it", "by over a tenth", "aim of the mean", "mean"]]
    for path in paths:
        for (task, peer), mine in group_pairs(read_rows(path)[0]).items():
            least, mean = target(task, peer, 1)
            below, far = (sum(r["high"] < part * aim(r) for r in mine) for part in (1, 0.9))
            counts = [f"{below} of {len(mine)}", str(far)]
            lines.append([path.stem, task, PEERS[peer], f"{least:g}x", *counts, f"{mean:g}x", geometric_mean(mine)])
    return table(lines)


def shares(rows: list[Row]) -> list[str]:
    tasks = layers_of(rows)
    mine = [r for r in rows if r["candidate"] == "blockcell" and r["task"] in tasks and r["B"] >= 64 and r["H"] >= 256]
    if not any(r["share"] for r in mine):
        return []
    widths = sorted({r["H"] for r in mine})
    lines = [["task", *(f"H = {H}" for H in widths)]]
    for task in layers_of(mine):
        line = [task]
        for H in widths:
            own_shares = [r["share"] for r in mine if (r["task"], r["H"]) == (task, H)]
            best = f" ({100 * max(own_shares):.0f} %)" if len(own_shares) > 1 else ""
            line.append(f"{100 * statistics.median(own_shares):.0f} %{best}" if own_shares else "")
        lines.append(line)
    return ["Median share of the ceiling with B = 64 and more; in brackets the best:", "", *table(lines)]


def times(rows: list[Row]) -> list[str]:
    """Make a table for each task, of the sizes of `make bench`."""
    page = []
    for task in RAW + LAYERS + MORE_LAYERS:
        T = 1 if task in RAW and not task.startswith("Block") else 20
        mine = [
            r
            for r in rows
            if (r["task"], r["T"], r["I"]) == (task, T, r["H"])
            and r["H"] in QUICK["widths"]
            and r["B"] in QUICK["batches"]
        ]
        if not mine:
            continue
        peers = [peer for peer in PEERS if any(r["candidate"] == peer for r in mine)]
        lines = [["H", "B", "blockcell, µs", *(PEERS[peer] for peer in peers)]]
        for H, B in sorted({(r["H"], r["B"]) for r in mine}):
            row_of = {r["candidate"]: r for r in mine if (r["H"], r["B"]) == (H, B)}
            ours = microseconds(row_of["blockcell"]["microseconds"])
            lines.append([str(H), str(B), ours, *(ratio_of(row_of[p]) if p in row_of else "" for p in peers)])
        page += [f"### {task}, T = {T}", "", *table(lines)]
    return page


def streams(rows: list[Row]) -> list[str]:
    stream_rows = [r for r in rows if r["task"] in STREAMS + MORE_STREAMS]
    mine = {(r["task"], r["H"], r["I"]): r["microseconds"] / r["T"] for r in stream_rows}
    if not mine:
        return []
    tasks = dict.fromkeys(task for task, _, _ in mine)
    heads = [f"{task}, {inputs}" for task in tasks for inputs in ("I = 1", "I = H")]
    lines = [["H", *heads]]
    for H in sorted({H for _, H, _ in mine}):
        lines.append([str(H), *(microseconds(mine[task, H, inputs]) for task in tasks for inputs in (1, H))])
    about = "A step is one call for one step with `out=`, a block one call of `run` for 100 steps; one row."
    kinds = " and ".join(dict.fromkeys(task.split()[0] for task in tasks))
    return [f"### Streams of {kinds}, microseconds a step", "", about, "", *table(lines)]


def grid(rows: list[Row]) -> list[str]:
    """Make a table by task, peer and number of threads, and one of every size that is short."""
    lines = [["task", "peer", "threads", "geometric mean", "short", "disturbed", "lowest", "at"]]
    behind = [["task", "peer", "threads", "short at", "ratio", "rounds"]]
    for (task, peer), both in group_pairs(rows).items():
        for (threads,), mine in sorted(group_rows(both, "threads").items()):
            cells = [task, PEERS[peer], str(threads)]
            disturbed = sum(r["marked"] > 0 and r["rounds"] - r["marked"] < ENOUGH for r in mine)
            worst = min(mine, key=lambda r: r["ratio"])
            counts = [count_slower(mine), str(disturbed)]
            lines.append([*cells, geometric_mean(mine), *counts, ratio_of(worst), sizes(worst)])
            for row in sorted(filter(falls_short, mine), key=lambda r: r["ratio"]):
                behind.append([*cells, sizes(row), ratio_of(row), str(row["rounds"])])
    return [GRID, *table(lines), *(table(behind) if len(behind) > 1 else [])]


HEAD = """# Speed on one CPU: every task beside every peer

How many times faster is blockcell than TensorFlow, PyTorch, onnxruntime and OpenVINO?
[performance.md](../performance.md) has the answer in short; here are the figures behind it. `python
benchmarks/report.py` writes this page from the CSV files in this directory, which hold every size. `python
benchmarks/bench.py` measured them.

* A ratio of 2.00x means that blockcell takes half of the peer's time. Below 1.00x the peer is faster.
* T is the number of time steps, B of batch rows, I of inputs, H of cells.
* Each candidate, blockcell too, counts with the better of one thread and all; in the files "grid" all have the same
  number of threads.
* TensorFlow's ops are called eagerly.
* "GRU" resets before the product, as TensorFlow's does. "GRU(reset_after)" resets after it, as PyTorch's and Keras' do.
  onnxruntime and OpenVINO have both. At every size all candidates compute the same function.
* "LSTM(projected)" is PyTorch's with `proj_size` H / 2.
* The ceiling is the rate of multiply-adds that the CPU reaches between registers.
* A ratio is the median of several rounds. Behind it stand the quartiles, as in 1.12x (1.08 to 1.15): half of the rounds
  lie between them. blockcell counts as slower at a size if the upper quartile is below 1.00x, so that the peer was
  faster in three of four rounds, and as short of another aim likewise. Older files have no quartiles; there the median
  counts.
* A single size may be off by much: the machine is [noisy](../performance.md#how-it-was-measured). Trust the medians.
"""
GRID = """Everybody has the same number of threads. "Short" are the sizes at which the peer is faster in three of four
rounds. "Disturbed" are those at which rounds count although [the machine was
disturbed](../performance.md#how-it-was-measured), since fewer than three others are left.
"""
AIMS = """## What was aimed at

Every size should reach the first ratio below, unless that takes more than 85 % of the ceiling. (For TensorFlow's
forward ops it is 1.3x where H is above 256.) The geometric mean over all sizes should reach the second. `python
benchmarks/report.py` prints each size that is short; [performance.md](../performance.md#where-it-falls-short) says why.
"""


def cpu_page(paths: list[Path]) -> str:
    """Return the text of cpu.md."""
    lines, shown = [HEAD], set()
    for path in paths:
        rows, about = read_rows(path)
        lines += [f"## {path.stem}", "", machine_line(about), ""]
        if is_grid(path):
            lines += grid(rows)
            continue
        lines += [*(summary(paths[:2]) if path == paths[0] else []), *ratios(rows), *shares(rows)]
        if path == paths[0]:
            for name, (_, caption) in PICTURES.items():
                lines += [f"![{caption}]({path.stem}-{name}.png)", ""]
            lines += ["The tables below have the sizes of `make bench`, with I = H, and the ratio to each peer.", ""]
        new = [r for r in rows if r["task"] not in shown]
        lines += [*times(new), *streams(new)]
        shown |= {r["task"] for r in rows}
    other_paths = [path for path in paths if not is_grid(path)]
    return "\n".join([*lines, *([AIMS, *aims(other_paths)] if other_paths else [])][:-1]) + "\n"


# ------------------------------------------------------------------------------------- blockcell.torch beside torch.nn
TORCH_HEAD = """# Speed in PyTorch: blockcell.torch beside torch.nn

How many times faster are `blockcell.torch.LSTM` and `GRU` than `torch.nn.LSTM` and `GRU`? `python benchmarks/report.py`
writes this page from torch-modules.csv in this directory, which has every size. `python benchmarks/torch_modules.py
--csv docs/benchmarks/torch-modules.csv` measured it.

* A ratio of 2.00x means that blockcell takes half of PyTorch's time. Below 1.00x PyTorch is faster.
* T is the number of time steps, B of batch rows, H of cells and of inputs; "2x1" are two layers in one direction.
* Inference is under `no_grad`. A training step is forward, backward to weights and input, and a step of Adam.
* "Compiled" is the layer with a Linear above it under `torch.compile`, at fewer sizes. PyTorch's own layers break the
  graph; ours do not.
"""


def read_torch(path: Path) -> tuple[list[Row], Row]:
    """Read the rows of torch_modules.py and its JSON file about the machine."""
    with path.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("T", "B", "H", "layers", "directions")}
        row |= {name: float(row[name]) for name in ("torch_us", "blockcell_us", "ratio", "lowest", "highest")}
        row |= {"low": row["ratio"], "high": row["ratio"]}  # three rounds have no quartiles
        row["stack"] = f"{row['layers']}x{row['directions']}"
    return rows, json.loads(path.with_suffix(".json").read_text())


def torch_sizes(row: Row) -> str:
    return f"T = {row['T']}, B = {row['B']}, H = {row['H']}, {row['stack']}"


def means(rows: list[Row], heading: str) -> list[str]:
    """Make a table of geometric means, with a column for each value of `heading`, filled with a row's sizes."""
    sizes = dict.fromkeys(heading.format(**r) for r in sorted(rows, key=lambda r: (r["T"], r["B"], r["H"], r["stack"])))
    lines = [["task", *sizes]]
    for task in dict.fromkeys(r["task"] for r in rows):
        line = [task]
        for head in sizes:
            matching_rows = [r for r in rows if r["task"] == task and heading.format(**r) == head]
            line.append(geometric_mean(matching_rows) if matching_rows else "")
        lines.append(line)
    return table(lines)


def torch_summary(path: Path) -> list[str]:
    """Make a table with a line for each task, and say where it was measured; docs/torch.md has both too."""
    rows, about = read_torch(path)
    lines = [["task", "geometric mean", "80 % of the sizes", "slower at", "slowest", "at"]]
    for task in dict.fromkeys(r["task"] for r in rows):
        mine = [r for r in rows if r["task"] == task]
        low, high = middle_range(mine)
        worst = min(mine, key=lambda r: r["ratio"])
        span = f"{low:.2f}x to {high:.2f}x"
        lines.append([task, geometric_mean(mine), span, count_slower(mine), ratio_of(worst), torch_sizes(worst)])
    measured = (
        f"Measured on {about['date']} in {about['dtype']} on {about['threads']} cores of an {about['cpu']}, CPU level"
        f" {about['level']}; {about['compiler']}, PyTorch {about['torch'].partition('+')[0]}, as many threads as cores."
    )
    return [*table(lines), *textwrap.wrap(measured, 120), ""]


def torch_page(path: Path) -> str:
    """Return the text of torch.md."""
    rows, _ = read_torch(path)
    page = [TORCH_HEAD, *torch_summary(path)]
    page += ["Geometric means by width, by steps and rows, and by layers and directions:", ""]
    for heading in ("H = {H}", "T = {T}, B = {B}", "{stack}"):
        page += means(rows, heading)
    small = [r for r in rows if (r["T"], r["B"], r["H"], r["stack"]) == (1, 1, 32, "1x1")]
    if small:
        page += ["## The price of a call", "", "T = 1, B = 1, H = 32, one layer in one direction, microseconds:", ""]
        lines = [["task", "torch.nn", "blockcell.torch", ""]]
        for r in small:
            lines.append([r["task"], *(microseconds(r[f"{who}_us"]) for who in ("torch", "blockcell")), ratio_of(r)])
        page += table(lines)
    slow = sorted((r for r in rows if r["ratio"] < 1), key=lambda r: r["ratio"])
    page += ["## Where torch.nn is faster", ""]
    page += ["The median of the rounds' ratios, and their lowest and highest:", ""] if slow else ["At no size.", ""]
    if slow:
        lines = [["task", "sizes", "ratio", "rounds"]]
        lines += [[r["task"], torch_sizes(r), ratio_of(r), f"{r['lowest']:.2f}x to {r['highest']:.2f}x"] for r in slow]
        page += table(lines)
    return "\n".join(page[:-1]) + "\n"


WAYS = {  # of torch_episodes.py
    "steps": "nn.LSTM for each step",
    "cells": "nn.LSTMCell for each step",
    "stretches": "nn.LSTM for each stretch",
    "packed": "PackedSequence of episodes",
    "padded": "padded episodes",
    "reset": "blockcell, reset=",
}


def read_episodes(path: Path) -> tuple[dict[tuple[int, int], list[Row]], Row]:
    """Read the rows of torch_episodes.py by B and H, and its JSON file about the machine."""
    with path.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("B", "H", "steps_per_second", "lowest", "highest")}
    return group_rows(rows, "B", "H"), json.loads(path.with_suffix(".json").read_text())


def episodes_table(path: Path) -> list[str]:
    """Make a table with a line for each size, and say where it was measured; docs/recurrent-policies.md has both."""
    points, about = read_episodes(path)
    lines = [["environments", "units", "reset=", "the fastest other", "", "ratio"]]
    for (B, H), rows in points.items():
        [own] = [row for row in rows if row["way"] == "reset"]
        best = max((row for row in rows if row is not own), key=lambda row: row["steps_per_second"])
        rates = [row["steps_per_second"] for row in (own, best)]
        lines.append([str(B), str(H), *(f"{r:,}" for r in rates), WAYS[best["way"]], f"{rates[0] / rates[1]:.1f}x"])
    measured = (
        f"Measured on {about['date']} in {about['dtype']} on one core of an {about['cpu']}, CPU level {about['level']};"
        f" {about['compiler']}, PyTorch {about['torch'].partition('+')[0]}."
    )
    return [*table(lines), *textwrap.wrap(measured, 120), ""]


# ------------------------------------------------------------------------------------------------- quantized layers
QUANTIZATION_HEAD = """# Quantized layers beside other libraries

How fast is `layer.quantize("int8")`, and how far is y off? [quantization.md](../quantization.md) has the answer in
short. `python benchmarks/report.py` writes this page from quantization.csv and quantization-errors.csv in this
directory, which `python benchmarks/quantization.py` and `accuracy.py` measured.

* Calls are of T = 20 steps. All candidates have the same number of threads.
* A ratio of 2.00x means that a candidate takes twice as long as "int8", ours: weights and activations in 8 bits. In
  brackets the quartiles of the rounds' ratios.
* "int8" of onnxruntime and torch is what their `quantize_dynamic` makes. "openvino" is what it does unasked: on this
  CPU it computes in bfloat16. PyTorch has only the GRU that resets after the product, and onnxruntime no GRU in int8.
* Errors are root mean squares of what y is off, relative to y's, x standard normal, weights as PyTorch draws them.
"""
BASE = "int8"
IN_FEW_BITS = {"onnxruntime int8": "onnxruntime", "torch int8": "torch", "openvino": "openvino"}
FEW_BITS = [  # rows of docs/performance.md: what, the kind, the peer
    ("LSTM in 8 bits, inference", "LSTM", "onnxruntime int8"),
    ("LSTM in 8 bits, inference", "LSTM", "torch int8"),
    ("LSTM in 8 bits, inference", "LSTM", "openvino"),
    ("GRU of PyTorch and Keras in 8 bits, inference", "GRU(reset_after)", "torch int8"),
    ("GRU of PyTorch and Keras in 8 bits, inference", "GRU(reset_after)", "openvino"),
    ("GRU of TensorFlow's ops in 8 bits, inference", "GRU", "openvino"),
]


def read_quantization(path: Path) -> tuple[list[Row], Row]:
    """Read the rows of quantization.py and its JSON file about the machine."""
    with path.open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in ("B", "I", "H", "threads", "rounds", "marked")}
        row |= {name: float(row[name]) for name in ("microseconds", "ratio", "low", "high", "error", "share")}
    return rows, json.loads(path.with_suffix(".json").read_text())


def measured_lines(about: Row) -> list[str]:
    versions = ", ".join(f"{PEERS[peer]} {about[peer].partition('+')[0]}" for peer in PEERS if peer in about)
    line = (
        f"Measured on {about['date']} on {about['threads']} cores of an {about['cpu']}, CPU level {about['level']};"
        f" {about['compiler']}, {versions}."
    )
    return [*textwrap.wrap(line, 120), ""]


def points_of(rows: list[Row]) -> list[dict[str, Row]]:
    """Return the rows of each point by candidate."""
    return [{r["candidate"]: r for r in mine} for mine in group_rows(rows, "kind", "B", "I", "H", "threads").values()]


def few_bits_lines(path: Path) -> list[list[str]]:
    """Return rows of docs/performance.md: ours in 8 bits beside a peer, with I = H."""
    rows, about = read_quantization(path)
    lines = []
    for title, kind, peer in FEW_BITS:
        mine = [r for r in rows if (r["kind"], r["candidate"]) == (kind, peer) and r["I"] == r["H"]]
        low, high = middle_range(mine)
        package = IN_FEW_BITS[peer]
        beside = f"{PEERS[package]} {about[package].partition('+')[0]}, {'int8' if 'int8' in peer else 'its default'}"
        median = f"{statistics.median(r['ratio'] for r in mine):.2f}x"
        lines.append([title, beside, median, f"{low:.2f}x to {high:.1f}x", count_slower(mine)])
    return lines


def few_bits(path: Path) -> list[str]:
    """Compare ours in 8 bits with each peer and with ours in float32, with I = H; docs/quantization.md has it too."""
    rows, about = read_quantization(path)
    lines = [["", "threads", *IN_FEW_BITS, "the fastest of them", "slower at", "float32 beside int8"]]
    for (kind, threads), mine in group_rows([r for r in rows if r["I"] == r["H"]], "kind", "threads").items():
        points = points_of(mine)
        beside = [[r for r in mine if r["candidate"] == peer] for peer in IN_FEW_BITS]
        fastest = [min((p[name] for name in IN_FEW_BITS if name in p), key=lambda r: r["ratio"]) for p in points]
        worst = min(fastest, key=lambda r: r["ratio"])
        at = f"{geometric_mean(fastest)}; {worst['ratio']:.2f}x at B = {worst['B']}, H = {worst['H']}"
        many = [p for p in points if p["float32"]["B"] >= 16]
        floats = [p["float32"] for p in many]
        gain = f"{geometric_mean(floats)}; {min(r['ratio'] for r in floats):.2f}x"
        columns = (geometric_mean(r) if r else "" for r in beside)
        lines.append([kind, str(threads), *columns, at, count_slower(fastest), gain])
    return [*table(lines), *measured_lines(about)]


def few_bits_errors(path: Path) -> list[str]:
    """Make a table of the geometric mean of the errors over all sizes, and the largest."""
    rows = [r for r in read_quantization(path)[0] if r["threads"] == 1 and r["I"] == r["H"]]
    names = [name for name in dict.fromkeys(r["candidate"] for r in rows) if "float" not in name or "bfloat" in name]
    lines = [["", *names]]
    for (kind,), mine in group_rows(rows, "kind").items():
        errors = [[r["error"] for r in mine if r["candidate"] == name] for name in names]
        lines.append([kind, *(f"{statistics.geometric_mean(e):.1e}; {max(e):.1e}" if e else "" for e in errors)])
    return table(lines)


def one_row(path: Path) -> list[str]:
    """Make a table of microseconds a step of one row with one input, and the share of the rate of reading."""
    rows, about = read_quantization(path)
    rows = [r for r in rows if r["I"] == 1]
    names = list(dict.fromkeys(r["candidate"] for r in rows))
    lines = [["", "H", "threads", *names]]

    def step(row: Row) -> str:
        rate = f" ({100 * row['share']:.0f} %)" if row["share"] else ""
        return microseconds(row["microseconds"] / 20) + rate

    for point in points_of(rows):
        mine = point[BASE]
        shown = [step(point[name]) if name in point else "" for name in names]
        lines.append([mine["kind"], str(mine["H"]), str(mine["threads"]), *shown])
    return [*table(lines), *measured_lines(about)]


def all_sizes(path: Path) -> list[str]:
    """Make tables with a line for each point with I = H: ours in 8 bits in microseconds, other candidates' ratios."""
    rows = [r for r in read_quantization(path)[0] if r["I"] == r["H"]]
    candidates = [name for name in dict.fromkeys(r["candidate"] for r in rows) if name != BASE]
    page = []
    for (threads,), mine in sorted(group_rows(rows, "threads").items()):
        lines = [["", "B", "H", f"{BASE}, µs", *candidates]]
        for p in points_of(mine):
            base = p[BASE]
            cells = [base["kind"], str(base["B"]), str(base["H"]), microseconds(base["microseconds"])]
            lines.append([*cells, *(ratio_of(p[name]) if name in p else "" for name in candidates)])
        page += [f"### {threads} thread{'s' * (threads > 1)}", "", *table(lines)]
    return page


def read_errors(path: Path) -> list[Row]:
    """Read the rows of accuracy.py."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def quantization_costs(path: Path) -> list[str]:
    """Make a table of the scores of trained layers, for docs/quantization.md."""
    rows_of_layer: dict[tuple[str, str], dict[str, Row]] = {}
    for r in read_errors(path):
        rows_of_layer.setdefault((r["data"], r["layer"]), {})[r["quantized to"]] = r
    names = [*max(rows_of_layer.values(), key=len)]  # some layer has all of them
    scores = [["", *names]]
    for (data, layer), mine in rows_of_layer.items():
        units = {r["score"].partition(" ")[2] for r in mine.values()} - {""}
        for unit in units:
            shares = (mine[name]["score"].partition(" ")[0] if name in mine else "" for name in names)
            scores.append([f"{data}, {unit}: {layer}", *shares])
    return table(scores)


def quantization_errors(path: Path) -> list[str]:
    """Make a table of the errors of y."""
    rows = read_errors(path)
    lines = [["data", "layer", "quantized to", "kB", "y is off by at most", "of the largest y", "RMS, of y's RMS", ""]]
    for r in rows:
        exact = r["quantized to"] == "float32"
        shares = [f"{100 * float(r[name]):.2g} %" for name in ("relative_max", "relative_rms")]
        kilobytes = f"{int(r['nbytes']) / 1000:,.{0 if int(r['nbytes']) > 10_000 else 1}f}" if r["nbytes"] else ""
        off = ["", "", ""] if exact else [f"{float(r['max']):.2g}", *shares]
        lines.append([r["data"], r["layer"], r["quantized to"], kilobytes, *off, r["score"]])
    return table(lines)


def quantization_page(path: Path) -> str:
    """Return the text of quantization.md."""
    rows, _ = read_quantization(path)
    disturbed = sum(r["rounds"] - r["marked"] < ENOUGH for r in rows if r["candidate"] == BASE)
    noted = [f"At {disturbed} of {len(points_of(rows))} points the machine was disturbed in most rounds.", ""]
    page = [
        QUANTIZATION_HEAD,
        *few_bits(path),
        *(noted if disturbed else []),
        "## All sizes",
        "",
        *all_sizes(path),
    ]
    page += ["## One row, one input", "", "Microseconds a step; ours with the share of the rate of reading:", ""]
    page += [*one_row(path), "## How far y is off", "", "Geometric means over all sizes; the largest:", ""]
    page += [*few_bits_errors(path), "On what layers were made for:", ""]
    page += quantization_errors(path.with_name(f"{path.stem}-errors.csv"))
    return "\n".join(page[:-1]) + "\n"


# --------------------------------------------------------------------------------------------------------- the pictures
def plot_ratios(rows: list[Row], path: Path) -> None:
    """Plot the ratio to each peer: every size a dot, the middle 80 % a bar, the median in figures.

    What a bar is stands above it, so that the picture is narrow and can be read in 400 pixels.
    """
    all_pairs = group_pairs(rows)
    figure = Figure(figsize=(5, 0.7 + 0.41 * len(all_pairs)), layout="constrained", dpi=140)
    axes = figure.subplots()
    text = {"fontsize": 9, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
    for k, ((task, peer), mine) in enumerate(all_pairs.items()):
        values, colour = [r["ratio"] for r in mine], COLOURS[peer]
        axes.plot(middle_range(mine), [k, k], color=colour, linewidth=9, alpha=0.35, solid_capstyle="butt")
        axes.plot(values, [k] * len(values), ".", color=colour, markersize=3, alpha=0.5)
        axes.plot(statistics.median(values), k, "|", color="black", markersize=13, markeredgewidth=2)
        axes.text(0.43, k - 0.28, f"{task} beside {PEERS[peer]}", **text)
        axes.text(300, k - 0.28, f"median {statistics.median(values):.1f}x", ha="right", **text)
    axes.axvline(1, color="black", linewidth=1, zorder=0)
    axes.set(xscale="log", xlim=(0.4, 320), xlabel="times faster than the other library (left of the line: slower)")
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks([])
    axes.set_ylim(len(all_pairs) - 0.6, -0.9)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path)


def plot_times(rows: list[Row], path: Path) -> None:
    """Plot time per step over H, for every layer task and batch size, T = 20."""
    figure = Figure(figsize=(12, 12), layout="constrained")
    batches = (1, 16, 256)
    tasks = layers_of(rows)
    axes = figure.subplots(len(tasks), len(batches), sharex=True, squeeze=False)
    for line, task in enumerate(tasks):
        for column, B in enumerate(batches):
            panel = axes[line, column]
            for candidate, name in NAMES.items():
                points = [
                    (r["H"], r["microseconds"] / r["T"])
                    for r in rows
                    if (r["task"], r["candidate"], r["B"], r["T"]) == (task, candidate, B, 20) and r["I"] == r["H"]
                ]
                if points:
                    panel.plot(
                        *zip(*sorted(points), strict=True), "o-", markersize=3, color=COLOURS[candidate], label=name
                    )
            panel.set(xscale="log", yscale="log", title=f"{task}, B = {B}")
            panel.grid(alpha=0.3)
        axes[line, 0].set_ylabel("microseconds a step")
    for panel in axes[-1]:
        panel.set_xlabel("H = I")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=90)


def plot_shares(rows: list[Row], path: Path) -> None:
    """Plot our share of the ceiling over H, for batch sizes, T = 20."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    tasks = layers_of(rows)
    for k, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), k + 1)
        for B in (1, 4, 16, 64, 256):
            points = [
                (r["H"], 100 * r["share"])
                for r in rows
                if (r["task"], r["candidate"], r["B"], r["T"]) == (task, "blockcell", B, 20) and r["I"] == r["H"]
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=3, label=f"B = {B}")
        axes.set(xscale="log", ylim=(0, 100), title=task, xlabel="H = I")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of the multiply-add ceiling")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=90)


def plot_episodes(path: Path, picture: Path) -> None:
    """Plot the steps a second of each way over episodes: a bar the median round, a line the lowest and the highest."""
    points, _ = read_episodes(path)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flat
    for panel, ((B, H), rows) in zip(panels, points.items(), strict=True):
        rates = [row["steps_per_second"] / 1000 for row in rows]
        spread = [[rate - row["lowest"] / 1000 for rate, row in zip(rates, rows, strict=True)]]
        spread += [[row["highest"] / 1000 - rate for rate, row in zip(rates, rows, strict=True)]]
        colours = [COLOURS["blockcell" if row["way"] == "reset" else "torch"] for row in rows]
        bars = panel.barh([WAYS[row["way"]] for row in rows], rates, xerr=spread, color=colours, ecolor="0.4")
        panel.bar_label(bars, fmt="{:,.1f}", padding=4)
        panel.set(title=f"{B} environments, {H} units", xlim=(0, 1.2 * max(row["highest"] for row in rows) / 1000))
    figure.axes[0].invert_yaxis()  # of all, as they share it
    for panel in figure.axes[2:]:
        panel.set_xlabel("thousand environment steps a second")
    figure.savefig(picture, dpi=90)


PICTURES = {
    "ratios": (
        plot_ratios,
        "How many times faster than each peer: every size a dot, the middle 80 % a bar, the median a black line",
    ),
    "times": (plot_times, "Microseconds a step over H with T = 20, blockcell and its peers"),
    "shares": (plot_shares, "The share of the multiply-add ceiling over H with T = 20"),
}


def main() -> None:
    if any(name.startswith("-") for name in sys.argv[1:]):
        sys.exit(__doc__)
    paths = [Path(name) for name in sys.argv[1:]] or FILES
    (paths[0].parent / "cpu.md").write_text(cpu_page(paths))
    if paths == FILES:
        TORCH.with_name("torch.md").write_text(torch_page(TORCH))
        QUANTIZATION.with_name("quantization.md").write_text(quantization_page(QUANTIZATION))
        plot_episodes(EPISODES, FOLDER.parent / "images" / "recurrent-policies.png")
    paths = [path for path in paths if not is_grid(path)]
    for name, (plot, _) in PICTURES.items() if paths else ():
        plot(read_rows(paths[0])[0], paths[0].parent / f"{paths[0].stem}-{name}.png")
    for path in paths:
        for (task, peer), mine in group_pairs(read_rows(path)[0]).items():
            below = sorted((r for r in mine if r["high"] < aim(r)), key=lambda r: r["ratio"] / aim(r))
            for row in below:
                share = f", {100 * row['share'] * row['ratio']:.0f} % of the ceiling" if row["share"] else ""
                print(f"{path.stem}: {task} beside {PEERS[peer]}: {sizes(row)}: {ratio_of(row)}{share}")


if __name__ == "__main__":
    main()
