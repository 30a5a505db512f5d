"""docs/benchmarks from the CSV files of bench.py: what was aimed at, what was reached, and where it falls short.

    python benchmarks/report.py docs/benchmarks/float32.csv [more.csv ...]

Writes a Markdown page beside the first file, and PNG pictures of it.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import operations
from candidates import LAYERS, RAW, STREAMS
from matplotlib.figure import Figure

FORWARD, GRADIENT = ("GRUBlockCell", "LSTMBlockCell", "BlockLSTM"), ("GRUBlockCellGrad", "BlockLSTMGrad")
CAP = 0.85  # no point is asked to take a larger share of the ceiling
CANDIDATES = ["blockcell", "torch", "onnxruntime", "openvino", "tensorflow"]
COLOURS = dict(zip(CANDIDATES, ("tab:red", "tab:orange", "tab:blue", "tab:purple", "tab:green"), strict=True))


def target(task: str, peer: str, H: int) -> tuple[float, float]:
    """How many times faster than a peer every point shall be, and their geometric mean."""
    if peer == "tensorflow":
        if task in FORWARD:
            return (2.0 if H <= 256 else 1.3), 4.0
        return (3.0 if task in GRADIENT else 1.5), 8.0
    if peer == "torch":
        return (1.9, 4.0) if "GRU" in task else (1.05, 1.6 if "training" in task else 1.8)
    return 1.0, (2.0 if (peer, task) == ("openvino", "GRU inference") else 1.5)


def floor(row: dict[str, Any]) -> float:
    """How many times faster than this peer its point shall be."""
    wanted = target(row["task"], row["candidate"], row["H"])[0]
    return min(wanted, CAP / row["share"]) if row["share"] else wanted


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    about = json.loads(path.with_suffix(".json").read_text())
    for row in rows:
        row |= {letter: int(row[letter]) for letter in "TBIH"}
        row |= {"microseconds": float(row["microseconds"]), "ratio": float(row["ratio"])}
        done = operations(row["task"], {letter: row[letter] for letter in "TBIH"})
        row["share"] = done / row["microseconds"] / 1e3 / about["ceiling"] if about["ceiling"] else 0.0
    return rows, about


def sizes(row: dict[str, Any]) -> str:
    return " ".join(f"{letter} {row[letter]}" for letter in "TBIH")


def point(row: dict[str, Any]) -> str:
    """A point beside a peer."""
    share = f", {100 * row['share'] * row['ratio']:.0f} %" if row["share"] else ""
    return f"{sizes(row)} {row['ratio']:.2f}x{share}"


def table(lines: list[list[str]]) -> list[str]:
    heading, *rest = lines
    return ["| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *rest)] + [""]


def comparison(rows: list[dict[str, Any]]) -> list[str]:
    """The table against the peers, and after it the points that fall short."""
    lines = [["task", "against", "points", "lowest", "at", "short of its floor", "below 0.9 of it", "mean", "aimed at"]]
    short: list[str] = []
    every = [0, 0, 0]  # points, short of their floor, below 0.9 of it
    for task in RAW + LAYERS:
        for peer in CANDIDATES[1:]:
            mine = [r for r in rows if (r["task"], r["candidate"]) == (task, peer)]
            if not mine:
                continue
            lowest = min(mine, key=lambda r: r["ratio"])
            below = [r for r in mine if r["ratio"] < floor(r)]
            mean, wanted = statistics.geometric_mean(r["ratio"] for r in mine), target(task, peer, 1)
            aim = f"{wanted[0]:g}x, {wanted[1]:g}x"
            counted = f"{len(below)}, {100 * len(below) / len(mine):.0f} %"
            far = sum(r["ratio"] < 0.9 * floor(r) for r in below)
            every = [a + b for a, b in zip(every, (len(mine), len(below), far), strict=True)]
            found = [f"{lowest['ratio']:.2f}x", sizes(lowest), counted, str(far), f"{mean:.2f}x", aim]
            lines.append([task, peer, str(len(mine)), *found])
            points = "; ".join(point(r) for r in sorted(below, key=lambda r: r["ratio"] / floor(r)))
            if below:
                short.append(f"* {task}, {peer}: {points}")
    if len(lines) == 1:
        return []
    heading = (
        f"Of {every[0]} comparisons {every[1]} ({100 * every[1] / every[0]:.1f} %) are short of their floor, "
        f"{every[2]} below 0.9 of it. The furthest first, with our own share of the ceiling there:"
    )
    return [*table(lines), heading, "", *short, ""]


def shares(rows: list[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    mine = [r for r in rows if r["candidate"] == "blockcell" and r["task"] in LAYERS and r["B"] >= 64 and r["H"] >= 256]
    if not mine or not about["ceiling"]:
        return []
    lines = [["task", "H", "share of the ceiling, B 64 and more: median, best"]]
    for task in LAYERS:
        for H in sorted({r["H"] for r in mine}):
            found = [r["share"] for r in mine if (r["task"], r["H"]) == (task, H)]
            if found:
                lines.append([task, str(H), f"{100 * statistics.median(found):.0f} %, {100 * max(found):.0f} %"])
    return table(lines)


def streams(rows: list[dict[str, Any]]) -> list[str]:
    mine = [r for r in rows if r["task"] in STREAMS]
    lines = [["task", "I", "H", "microseconds a step"]]
    lines += [[r["task"], str(r["I"]), str(r["H"]), f"{r['microseconds'] / r['T']:.2f}"] for r in mine]
    return table(lines) if mine else []


def plot_times(rows: list[dict[str, Any]], path: Path) -> None:
    """Time per step over H, for every layer task and batch size, T 20."""
    figure = Figure(figsize=(12, 12), layout="constrained")
    batches = (1, 16, 256)
    axes = figure.subplots(len(LAYERS), len(batches), sharex=True, squeeze=False)
    for line, task in enumerate(LAYERS):
        for column, B in enumerate(batches):
            panel = axes[line, column]
            for candidate in CANDIDATES:
                found = [
                    (r["H"], r["microseconds"] / r["T"])
                    for r in rows
                    if (r["task"], r["candidate"], r["B"], r["T"]) == (task, candidate, B, 20) and r["I"] == r["H"]
                ]
                if found:
                    panel.plot(
                        *zip(*sorted(found), strict=True), "o-", markersize=3, color=COLOURS[candidate], label=candidate
                    )
            panel.set(xscale="log", yscale="log", title=f"{task}, B {B}")
            panel.grid(alpha=0.3)
        axes[line, 0].set_ylabel("microseconds a step")
    for panel in axes[-1]:
        panel.set_xlabel("H = I")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=90)


def plot_ratios(rows: list[dict[str, Any]], path: Path) -> None:
    """How many times faster than each peer, every point a dot."""
    pairs = [
        (t, p) for t in RAW + LAYERS for p in CANDIDATES[1:] if any((r["task"], r["candidate"]) == (t, p) for r in rows)
    ]
    figure = Figure(figsize=(12, 1 + 0.4 * len(pairs)), layout="constrained")
    axes = figure.subplots()
    for k, (task, peer) in enumerate(pairs):
        found = [r for r in rows if (r["task"], r["candidate"]) == (task, peer)]
        dots = axes.scatter(
            [r["ratio"] for r in found],
            [k] * len(found),
            c=[r["H"] for r in found],
            s=14,
            alpha=0.7,
            cmap="viridis",
            norm="log",
            vmin=16,
            vmax=1024,
        )
        axes.plot(statistics.geometric_mean(r["ratio"] for r in found), k, "|", color="black", markersize=18)
    figure.colorbar(dots, label="H")
    axes.axvline(1, color="tab:red", linewidth=1)
    axes.set(xscale="log", xlabel="times faster than the peer; the bar is the geometric mean")
    axes.set_yticks(range(len(pairs)), [f"{task}, {peer}" for task, peer in pairs])
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=90)


def plot_shares(rows: list[dict[str, Any]], path: Path) -> None:
    """Our share of the ceiling over H, for batch sizes, T 20."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for k, task in enumerate(LAYERS):
        axes = figure.add_subplot(1, len(LAYERS), k + 1)
        for B in (1, 4, 16, 64, 256):
            found = [
                (r["H"], 100 * r["share"])
                for r in rows
                if (r["task"], r["candidate"], r["B"], r["T"]) == (task, "blockcell", B, 20) and r["I"] == r["H"]
            ]
            if found:
                axes.plot(*zip(*sorted(found), strict=True), "o-", markersize=3, label=f"B {B}")
        axes.set(xscale="log", ylim=(0, 100), title=task, xlabel="H = I")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of the multiply-add ceiling")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    paths = [Path(name) for name in sys.argv[1:]]
    folder = paths[0].parent
    page = ["# On this CPU, beside TensorFlow, PyTorch, onnxruntime and OpenVINO", ""]
    page += ["Written by `benchmarks/report.py` from what `benchmarks/bench.py` measured, which says how.", ""]
    for path in paths:
        rows, about = read(path)
        page += [f"## {path.stem}", "", ", ".join(f"{key} {value}" for key, value in about.items()) + ".", ""]
        page += ["A ratio says how many times faster than the peer at its better number of threads.", ""]
        page += [*comparison(rows), *shares(rows, about), *streams(rows)]
        if path == paths[0]:
            for name, plot in (("times", plot_times), ("ratios", plot_ratios), ("shares", plot_shares)):
                picture = folder / f"{path.stem}-{name}.png"
                plot(rows, picture)
                page += [f"![{name}]({picture.name})", ""]
    (folder / "cpu.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
