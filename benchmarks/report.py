"""Write pages and pictures from the CSV files of benchmarks: how fast blockcell is beside other libraries.

Needed by: docs/benchmarks/cpu.md, docs/performance.md, docs/recurrent-policies.md

    python benchmarks/report.py [FILE.csv ...]

Writes cpu.md beside the first file, and pictures of that file.  Without arguments the files are those of
docs/benchmarks; torch.md there is written of what torch_modules.py has measured, and docs/images/recurrent-policies.png
drawn of its episodes.  `PYTHONPATH=tests/lib python tests/repository/test_readme.py` writes the tables in other pages,
also of what quantization.py and accuracy.py have measured.  Files of `bench.py --grid` get tables of their own: per
task, peer and number of threads.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from pathlib import Path

import bench
from bench import QUICK, Row, falls_short, group_rows, operations
from candidates import LAYERS, MORE_LAYERS, MORE_STREAMS, RAW, STREAMS
from matplotlib.figure import Figure
from turns import ENOUGH, read_about, read_table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FILES = [FOLDER / f"{name}.csv" for name in ("float32", "float32-more", "float64", "float16")]
FILES += sorted(FOLDER.glob("grid-*.csv"), reverse=True)  # v4, then v3
TORCH, QUANTIZATION, EPISODES = (FOLDER / f"{name}.csv" for name in ("torch-modules", "quantization", "torch-episodes"))
GRADIENTS = ("GRUBlockCellGrad", "BlockLSTMGrad", "LSTMBlockCellGrad")
PEERS = {"torch": "PyTorch", "onnxruntime": "onnxruntime", "openvino": "OpenVINO", "tensorflow": "TensorFlow"}
COLOURS = dict(zip(PEERS, ("tab:orange", "tab:blue", "tab:purple", "tab:green"), strict=True))
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
    ("TensorFlow's ops", ("GRUBlockCell", "LSTMBlockCell", "BlockLSTM"), "tensorflow"),
    ("their gradients", GRADIENTS, "tensorflow"),
]


# -------------------------------------------------------------------------------------------------- rows and their text
def read_rows(path: Path) -> tuple[list[Row], Row]:
    """Read the rows of a CSV file, add their shares of the ceiling, and read the JSON file about the machine."""
    rows, about = bench.read(path)
    for row in rows:
        done = operations(row["task"], {letter: row[letter] for letter in "TBIH"})
        row["share"] = done / row["microseconds"] / 1e3 / about["ceiling"] if about["ceiling"] else 0.0
    return rows, about


def is_grid(path: Path) -> bool:
    return "same_threads" in read_about(path)


def group_pairs(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group the rows by task and peer."""
    rows_of_pair = group_rows(rows, "task", "candidate")
    pairs = [(task, peer) for task in RAW + LAYERS + MORE_LAYERS for peer in PEERS]
    return {pair: rows_of_pair[pair] for pair in pairs if pair in rows_of_pair}


def middle_range(rows: list[Row]) -> tuple[float, float]:
    """Return the ratios between which the middle 80 % of the sizes lie."""
    cuts = statistics.quantiles((r["ratio"] for r in rows), n=10, method="inclusive")
    return cuts[0], cuts[-1]


def format_range(rows: list[Row]) -> str:
    return "{:.2f}x to {:.1f}x".format(*middle_range(rows))


def median_ratio(rows: list[Row]) -> str:
    return f"{statistics.median(r['ratio'] for r in rows):.2f}x"


def geometric_mean(rows: list[Row]) -> str:
    return f"{statistics.geometric_mean(r['ratio'] for r in rows):.2f}x"


def microseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def count_slower(rows: list[Row]) -> str:
    return f"{sum(map(falls_short, rows))} of {len(rows)}"


def ratio_of(row: Row) -> str:
    """Format the ratio, and the quartiles of its rounds where the file has them."""
    spread = f" ({row['low']:.2f} to {row['high']:.2f})" if row["low"] < row["high"] else ""
    return f"{row['ratio']:.2f}x{spread}"


def slowest(rows: list[Row], sizes: str = "T = {T}, B = {B}, I = {I}, H = {H}") -> list[str]:
    """Return the lowest ratio, and at which sizes it is."""
    worst = min(rows, key=lambda r: r["ratio"])
    return [ratio_of(worst), sizes.format(**worst)]


def table(lines: list[list[str]]) -> list[str]:
    heading, *rest = lines
    return ["| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *rest)] + [""]


def version_of(peer: str, about: Row) -> str:
    return f"{PEERS[peer]} {about[peer].partition('+')[0]}"


def measured_lines(about: Row, dtype: str = " in {dtype}", end: str = "") -> list[str]:
    """Say when, where and beside which versions figures were measured."""
    versions = ", ".join(version_of(peer, about) for peer in PEERS if peer in about)
    cores = "one core" if about["threads"] == "1" else f"{about['threads']} cores"
    line = (
        f"Measured on {about['date']}{dtype.format(**about)} on {cores} of an {about['cpu']}, CPU level "
        f"{about['level']}; {about['compiler']}, {versions}{end}."
    )
    return [*textwrap.wrap(line, 120), ""]


# -------------------------------------------------------------------------------------------------------------- one CPU
def summary(paths: list[Path], quantized: Path) -> list[str]:
    """Make the first table of docs/performance.md, which also has lines of a file of quantization.py."""
    lines = [["", "beside", "faster, median", "80 % of the sizes", "slower at"]]

    def add(title: str, beside: str, rows: list[Row]) -> None:
        lines.append([title, beside, median_ratio(rows), format_range(rows), count_slower(rows)])

    files = [read_rows(path) for path in paths]
    for title, tasks, peer in SUMMARY:
        for rows, about in files:
            if mine := [r for r in rows if r["task"] in tasks and r["candidate"] == peer]:
                add(title, version_of(peer, about), mine)
    rows, about = read_table(quantized), read_about(quantized)
    for title, kind, peer in FEW_BITS:
        mine = [r for r in rows if (r["kind"], r["candidate"]) == (kind, peer) and r["I"] == r["H"]]
        form = "int8" if "int8" in peer else "its default"
        add(title, f"{version_of(peer.partition(' ')[0], about)}, {form}", mine)
    return table(lines)


def ratios(rows: list[Row]) -> list[str]:
    lines = [["task", "beside", "median", "80 % of the sizes", "slower at", "slowest", "at"]]
    for (task, peer), mine in group_pairs(rows).items():
        lines.append([task, PEERS[peer], median_ratio(mine), format_range(mine), count_slower(mine), *slowest(mine)])
    return table(lines) if len(lines) > 1 else []


def times(rows: list[Row]) -> list[str]:
    """Make a table of our microseconds at the sizes of `make bench`."""
    mine = {
        (r["task"], r["H"], r["B"]): r["microseconds"]
        for r in rows
        if r["candidate"] == "blockcell"
        and r["task"] in RAW + LAYERS + MORE_LAYERS
        and (r["T"], r["I"]) == (1 if "Cell" in r["task"] else 20, r["H"])
        and r["H"] in QUICK["widths"]
        and r["B"] in QUICK["batches"]
    }
    if not mine:
        return []
    sizes = sorted({(H, B) for _, H, B in mine})
    lines = [["task", *(f"H = {H}, B = {B}" for H, B in sizes)]]
    for task in dict.fromkeys(task for task, *_ in mine):
        lines.append([task, *(microseconds(mine[task, H, B]) if (task, H, B) in mine else "" for H, B in sizes)])
    return ["blockcell's microseconds with I = H; T = 20, and 1 of cells:", "", *table(lines)]


def streams(rows: list[Row]) -> list[str]:
    stream_rows = [r for r in rows if r["task"] in STREAMS + MORE_STREAMS]
    mine = {(r["task"], r["H"], r["I"]): r["microseconds"] / r["T"] for r in stream_rows}
    if not mine:
        return []
    widths = sorted({H for _, H, _ in mine})
    lines = [["task", *(f"H = {H}" for H in widths)]]
    for task in dict.fromkeys(task for task, _, _ in mine):
        for inputs in (1, "H"):
            values = (microseconds(mine[task, H, H if inputs == "H" else 1]) for H in widths)
            lines.append([f"{task}, I = {inputs}", *values])
    about = "Streams, microseconds a step of one row: a call for one step with `out=`, or `run` for a block of 100:"
    return [about, "", *table(lines)]


def grid(rows: list[Row]) -> list[str]:
    """Make a table by task, peer and number of threads."""
    lines = [["task", "beside", "threads", "geometric mean", "short", "disturbed", "lowest", "at"]]
    for (task, peer), both in group_pairs(rows).items():
        for (threads,), mine in sorted(group_rows(both, "threads").items()):
            disturbed = sum(r["marked"] > 0 and r["rounds"] - r["marked"] < ENOUGH for r in mine)
            counts = [count_slower(mine), str(disturbed)]
            lines.append([task, PEERS[peer], str(threads), geometric_mean(mine), *counts, *slowest(mine)])
    return table(lines)


HEAD = """# Speed on one CPU: every task beside every other library

How many times faster is blockcell than TensorFlow, PyTorch, onnxruntime and OpenVINO?
[performance.md](../performance.md) has the answer in short; here are the figures behind it. `python
benchmarks/report.py` writes this page from the CSV files in this directory, which hold every size. `python
benchmarks/bench.py` measured them.

* A ratio of 2.00x means that blockcell takes half of the other library's time. Below 1.00x the other library is faster.
* T is the number of time steps, B of batch rows, I of inputs, H of cells.
* Each library, blockcell too, counts with the better of one thread and all; in the files "grid" all have the same
  number of threads.
* TensorFlow's ops are called eagerly.
* "GRU" resets before the product, as TensorFlow's does. "GRU(reset_after)" resets after it, as PyTorch's and Keras' do.
  onnxruntime and OpenVINO have both. At every size all libraries compute the same function.
* "LSTM(projected)" is PyTorch's with `proj_size` H / 2.
* The ceiling is the rate of multiply-adds that the CPU reaches between registers.
* A ratio is the median of several rounds. Behind it stand the quartiles, as in 1.12x (1.08 to 1.15): half of the rounds
  lie between them. blockcell counts as slower at a size, or short, if the upper quartile is below 1.00x, so that the
  other library was faster in three of four rounds. Older files have no quartiles; there the median counts.
* A single size may be off by much: the machine is [noisy](../performance.md#how-it-was-measured). Trust the medians.
  "Disturbed" are sizes at which disturbed rounds count, since fewer than three others are left.
"""


def cpu_page(paths: list[Path]) -> str:
    """Return the text of cpu.md."""
    lines, shown = [HEAD], set()
    for path in paths:
        rows, about = read_rows(path)
        lines += [f"## {path.stem}", "", *measured_lines(about, end=f"; ceiling {about['ceiling']:g} GF/s")]
        if is_grid(path):
            lines += grid(rows)
            continue
        lines += ratios(rows)
        if path == paths[0]:
            for name, (_, caption) in PICTURES.items():
                lines += [f"![{caption}]({path.stem}-{name}.png)", ""]
        new = [r for r in rows if r["task"] not in shown]
        lines += [*times(new), *streams(new)]
        shown |= {r["task"] for r in rows}
    return "\n".join(lines[:-1]) + "\n"


# ------------------------------------------------------------------------------------- blockcell.torch beside torch.nn
TORCH_HEAD = """# Speed in PyTorch: blockcell.torch beside torch.nn

How many times faster are `blockcell.torch.LSTM` and `GRU` than `torch.nn.LSTM` and `GRU`, by width, and by steps and
rows? [torch.md](../torch.md#how-much-faster) has the means of all sizes, the slowest sizes and the machine. `python
benchmarks/report.py` writes this page from torch-modules.csv in this directory, which has every size. `python
benchmarks/torch_modules.py layers --csv docs/benchmarks/torch-modules.csv` measured it.

* A ratio of 2.00x, a geometric mean, means that blockcell takes half of PyTorch's time. Below 1.00x PyTorch is faster.
* T is the number of time steps, B of batch rows, H of cells and of inputs.
* Inference is under `no_grad`. A training step is forward, backward to weights and input, and a step of Adam.
* "Compiled" is the layer with a Linear above it under `torch.compile`, at fewer sizes. PyTorch's own layers break the
  graph; ours do not.
"""


def read_torch(path: Path) -> list[Row]:
    """Read the rows of torch_modules.py; three rounds have no quartiles."""
    return [row | {"low": row["ratio"], "high": row["ratio"]} for row in read_table(path)]


def means(rows: list[Row], heading: str) -> list[str]:
    """Make a table of geometric means, with a column for each value of `heading`, filled with a row's sizes."""
    sizes = dict.fromkeys(heading.format(**r) for r in sorted(rows, key=lambda r: (r["T"], r["B"], r["H"], r["stack"])))
    lines = [["task", *sizes]]
    for (task,), own in group_rows(rows, "task").items():
        columns = [[r for r in own if heading.format(**r) == head] for head in sizes]
        lines.append([task, *(geometric_mean(column) if column else "" for column in columns)])
    return table(lines)


def torch_summary(path: Path) -> list[str]:
    """Make a table with a line for each task, and say where it was measured, for docs/torch.md."""
    lines = [["task", "geometric mean", "80 % of the sizes", "slower at", "slowest", "at"]]
    for (task,), mine in group_rows(read_torch(path), "task").items():
        at = slowest(mine, "T = {T}, B = {B}, H = {H}, {stack}")
        lines.append([task, geometric_mean(mine), format_range(mine), count_slower(mine), *at])
    return [*table(lines), *measured_lines(read_about(path), end=", as many threads as cores")]


def torch_page(path: Path) -> str:
    """Return the text of torch.md."""
    rows = read_torch(path)
    page = [TORCH_HEAD]
    for heading in ("H = {H}", "T = {T}, B = {B}"):
        page += means(rows, heading)
    page += ["## The price of a call", "", "T = 1, B = 1, H = 32, one layer in one direction, microseconds:", ""]
    lines = [["task", "torch.nn", "blockcell.torch", ""]]
    for r in rows:
        if (r["T"], r["B"], r["H"], r["stack"]) == (1, 1, 32, "1x1"):
            both = (microseconds(r[f"{package}, us"]) for package in ("torch.nn", "blockcell.torch"))
            lines.append([r["task"], *both, ratio_of(r)])
    return "\n".join([*page, *table(lines)][:-1]) + "\n"


WAYS = {  # over episodes, of torch_modules.py
    "cells": "nn.LSTMCell for each step",
    "stretches": "nn.LSTM for each stretch",
    "packed": "PackedSequence of episodes",
    "padded": "padded episodes",
    "reset": "blockcell, reset=",
}


def step_rates(row: Row) -> dict[str, float]:
    """Return the environment steps a second of each way."""
    return {way: 128e6 * row["B"] / row[f"{way}, us"] for way in WAYS}


def episodes_table(path: Path) -> list[str]:
    """Make a table with a line for each size, and say where it was measured; docs/recurrent-policies.md has both."""
    lines = [["environments", "units", "reset=", "the fastest other", "", "ratio"]]
    for row in read_table(path):
        rates = step_rates(row)
        own = rates.pop("reset")
        best = max(rates, key=rates.__getitem__)
        figures = f"{own:,.0f}", f"{rates[best]:,.0f}", WAYS[best], f"{own / rates[best]:.1f}x"
        lines.append([str(row["B"]), str(row["H"]), *figures])
    return [*table(lines), *measured_lines(read_about(path))]


# ------------------------------------------------------------------------------------------------- quantized layers
IN_FEW_BITS = ("onnxruntime int8", "torch int8", "openvino")
FEW_BITS = [  # rows of docs/performance.md: what, the kind, the peer
    ("LSTM in 8 bits, inference", "LSTM", "onnxruntime int8"),
    ("LSTM in 8 bits, inference", "LSTM", "torch int8"),
    ("LSTM in 8 bits, inference", "LSTM", "openvino"),
    ("GRU of PyTorch and Keras in 8 bits, inference", "GRU(reset_after)", "torch int8"),
    ("GRU of PyTorch and Keras in 8 bits, inference", "GRU(reset_after)", "openvino"),
    ("GRU of TensorFlow's ops in 8 bits, inference", "GRU", "openvino"),
]


def few_bits(path: Path) -> list[str]:
    """Compare ours in 8 bits with each peer and with ours in float32, with I = H, for docs/quantization.md."""
    rows = [r for r in read_table(path) if r["I"] == r["H"]]
    lines = [["", "threads", *IN_FEW_BITS, "the fastest of them", "slower at", "float32 beside int8"]]
    for (kind, threads), mine in group_rows(rows, "kind", "threads").items():
        beside = [[r for r in mine if r["candidate"] == peer] for peer in IN_FEW_BITS]
        fastest = [
            min((r for r in point if r["candidate"] in IN_FEW_BITS), key=lambda r: r["ratio"])
            for point in group_rows(mine, "B", "H").values()
        ]
        worst = min(fastest, key=lambda r: r["ratio"])
        at = f"{geometric_mean(fastest)}; {worst['ratio']:.2f}x at B = {worst['B']}, H = {worst['H']}"
        floats = [r for r in mine if r["candidate"] == "float32" and r["B"] >= 16]
        gain = f"{geometric_mean(floats)}; {min(r['ratio'] for r in floats):.2f}x"
        columns = (geometric_mean(r) if r else "" for r in beside)
        lines.append([kind, str(threads), *columns, at, count_slower(fastest), gain])
    ours = [r for r in rows if r["candidate"] == "int8"]
    disturbed = sum(r["rounds"] - r["marked"] < ENOUGH for r in ours)
    end = f"; at {disturbed} of {len(ours)} sizes most rounds were disturbed"
    return [*table(lines), *measured_lines(read_about(path), dtype="", end=end)]


def quantization_scores(path: Path) -> list[str]:
    """Make a table of the scores of trained layers, for docs/quantization.md."""
    rows_of_layer = {
        names: {r["quantized to"]: r for r in mine}
        for names, mine in group_rows(read_table(path), "data", "layer").items()
    }
    names = [*max(rows_of_layer.values(), key=len)]  # some layer has all of them
    scores = [["", *names]]
    for (data, layer), mine in rows_of_layer.items():
        unit = mine["float32"]["score"].partition(" ")[2]
        shares = (mine[name]["score"].partition(" ")[0] if name in mine else "" for name in names)
        scores.append([f"{data}, {unit}: {layer}", *shares])
    return table(scores)


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


def plot_shares(rows: list[Row], path: Path) -> None:
    """Plot our share of the ceiling over H, for batch sizes, T = 20."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    tasks = [task for task in LAYERS + MORE_LAYERS if any(r["task"] == task for r in rows)]
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
    """Plot the steps a second of each way over episodes."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for panel, row in zip(figure.subplots(2, 2, sharey=True).flat, read_table(path), strict=True):
        rates = {WAYS[way]: rate / 1000 for way, rate in step_rates(row).items()}
        bars = panel.barh([*rates], [*rates.values()], color=["tab:orange"] * (len(rates) - 1) + ["tab:red"])
        panel.bar_label(bars, fmt="{:,.1f}", padding=4)
        panel.set(title=f"{row['B']} environments, {row['H']} units", xlim=(0, 1.2 * max(rates.values())))
    figure.axes[0].invert_yaxis()  # of all, as they share it
    for panel in figure.axes[2:]:
        panel.set_xlabel("thousand environment steps a second")
    figure.savefig(picture, dpi=90)


PICTURES = {
    "ratios": (
        plot_ratios,
        "How many times faster than each library: every size a dot, the middle 80 % a bar, the median a black line",
    ),
    "shares": (plot_shares, "The share of the multiply-add ceiling over H with T = 20"),
}


def main() -> None:
    if any(name.startswith("-") for name in sys.argv[1:]):
        sys.exit(__doc__)
    paths = [Path(name) for name in sys.argv[1:]] or FILES
    (paths[0].parent / "cpu.md").write_text(cpu_page(paths))
    if paths == FILES:
        TORCH.with_name("torch.md").write_text(torch_page(TORCH))
        plot_episodes(EPISODES, FOLDER.parent / "images" / "recurrent-policies.png")
    if not is_grid(paths[0]):
        for name, (plot, _) in PICTURES.items():
            plot(read_rows(paths[0])[0], paths[0].parent / f"{paths[0].stem}-{name}.png")


if __name__ == "__main__":
    main()
