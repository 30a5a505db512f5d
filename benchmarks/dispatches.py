"""Print where the nodes of every form run, and how many nodes, GPU dispatches and copies a step takes, as Markdown.

Needed by: docs/onnx/gpu.md

    python benchmarks/dispatches.py --provider webgpu    # or cuda or cpu; the default is the first of these that runs

Nothing is timed, so that a GPU made of software does. Each model runs at two lengths. What there is more of at the
longer one belongs to the steps, the rest to the call. Nodes and the copies between them are counted in onnxruntime's
profile, dispatches in its log. For CUDA without a GPU, nodes are told from onnxruntime's list of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]
SIZES = {"B": 4, "I": 16, "H": 32}
LENGTHS = 14, 28  # multiples of what "unroll" cuts at once
GRADIENTS = ["scan", "loop", "unroll"]
FORMS = [*GRADIENTS, "native"]
CASES = {
    "BlockLSTM": FORMS,
    "BlockLSTMGrad": GRADIENTS,
    "block_gru": FORMS,
    "block_gru_grad": GRADIENTS,
    "block_gru_reset_after": FORMS,
    "block_gru_reset_after_grad": GRADIENTS,
    "LSTM layer": FORMS,
    "LSTM layer, training": GRADIENTS,
    "GRU layer": FORMS,
    "GRU layer, training": GRADIENTS,
    "GRU layer, reset after": FORMS,
    "GRU layer, reset after, training": GRADIENTS,
}
DISPATCH = "Starting program"  # what the WebGPU provider logs with each
NOTES = {
    "cpu": "Nodes of a loop count at every step.",
    "webgpu": (
        "Nodes of a loop count at every step; copies are those within a call. The CPU runs a Scan or Loop itself, so "
        "the states and the rows that a step reads and writes travel at every step. The profile does not show that; it "
        "is counted here as the inputs and outputs of the loop's body."
    ),
    "cuda": "Nodes of a loop count at every step; copies are those within a call. Loops are the GPU's here.",
    "by list": "By onnxruntime's list of kernels, not by running. Nodes of a loop count at every step.",
}
Counts = dict[str, float]


# ----------------------------------------------------------------------------------------------------------- the models
def build_model(case: str, form: str, T: int) -> onnx.ModelProto:
    """Build the model that a `Session` on a GPU takes: with fixed sizes, without an If, and without long Splits."""
    import onnx_export
    from blockcell import GRU, LSTM
    from blockcell.optable import OPS

    sizes = {"T": T, **SIZES}
    if case in OPS:
        usable = {attribute.name for attribute in OPS[case].attributes}
        plain = {"use_peephole": False, "cell_clip": 0.0}  # ONNX's own LSTM does not clip
        attrs = {name: value for name, value in plain.items() if name in usable}
        return onnx_export.build(case, sizes=sizes, attrs=attrs, loop=form, static=True)
    options = {"reset_after": True} if "reset after" in case else {}
    layer = {"LSTM": LSTM, "GRU": GRU}[case.split()[0]].init(SIZES["I"], SIZES["H"], seed=0, **options)
    fixed = {letter: sizes[letter] for letter in "TB"}
    return onnx_export.export(layer, None, train="training" in case, loop=form, sizes=fixed, static=True)


def draw_feeds(model: onnx.ModelProto, T: int) -> dict[str, np.ndarray]:
    """Draw random floats; integer inputs are lengths, and all of them T."""
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        whole = kind.elem_type == onnx.TensorProto.INT64
        feeds[value.name] = np.full(shape, T) if whole else rng.uniform(-1, 1, shape).astype(np.float32)
    return feeds


# ---------------------------------------------------------------------------------------------------------- by running
def capture_log(run: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of `run`, and what is written to standard error meanwhile, by native code too."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            result = run()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return result, file.read().decode(errors="replace")


def count_nodes(events: list[dict[str, Any]]) -> tuple[Counts, Counter[str]]:
    """Count nodes and copies of the last run in a profile, and, by op, the nodes on the CPU."""
    run = [event for event in events if event["name"] == "model_run"][-1]
    nodes = [
        event
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= run["ts"]
    ]
    ops = Counter(event["args"]["op_name"] for event in nodes)
    copies = {"to the GPU": ops.pop("MemcpyFromHost", 0), "from the GPU": ops.pop("MemcpyToHost", 0)}
    on_cpu = {
        (event["name"], event["args"]["op_name"])
        for event in nodes
        if event["args"]["provider"] == "CPUExecutionProvider"
    }
    return {"nodes": ops.total(), **copies}, Counter(op for _, op in on_cpu)


def count_copies(model: onnx.ModelProto) -> tuple[int, int]:
    """Count the arrays that go to the GPU, and that come from it, at every step of a loop that the CPU runs."""
    from onnx_export.nodes import bodies, names_read

    there = back = 0
    for loop in onnx.inliner.inline_local_functions(model).graph.node:
        for body in bodies(loop):
            read = names_read(node for node in body.node if node.op_type != "Identity")  # a Loop copies no condition
            there += sum(value.name in read for value in body.input)
            back += len(body.output) - (loop.op_type == "Loop")
    return there, back


def count_by_profile(case: str, form: str, T: int, provider: str) -> tuple[Counts, Counter[str]]:
    """Count what a call takes at this length, by running it."""
    from onnx_export.runtime import RuntimeModel

    model = build_model(case, form, T)
    feeds = draw_feeds(model, T)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"enable_profiling": True, "profile_file_prefix": f"{folder}/profile", "log_severity_level": 1}
        running, _ = capture_log(lambda: RuntimeModel(model, provider, settings=settings))
        capture_log(lambda: running.run(feeds))  # the first time there may be more to do
        _, log = capture_log(lambda: running.run(feeds))
        profile, _ = capture_log(running.session.end_profiling)
        counts, on_cpu = count_nodes(json.loads(Path(profile).read_text()))
    if provider == "cpu":
        return {"nodes": counts["nodes"]}, Counter(["all"])
    if dispatches := log.count(DISPATCH):
        counts["dispatches"] = dispatches
    if on_cpu["Scan"] or on_cpu["Loop"]:
        there, back = count_copies(model)
        counts["to the GPU"] += T * there
        counts["from the GPU"] += T * back
    return counts, on_cpu


# ------------------------------------------------------------------------------------------------------------- by list
def count_by_list(case: str, form: str, T: int) -> tuple[Counts, Counter[str]]:
    """Count what CUDA would run, and what it would leave to the CPU."""
    from placement import fallbacks, left, left_in_loops

    model = build_model(case, form, T)
    nodes = len(left(model)) + (T - 1) * len(left_in_loops(model))
    return {"nodes": nodes}, Counter(line.split()[0] for line in fallbacks(model))


# --------------------------------------------------------------------------------------------------------------- table
def table_row(case: str, form: str, count: Callable[[str, str, int], tuple[Counts, Counter[str]]]) -> dict[str, str]:
    """Return the cells of a line, by their headings; of a failure, its message in the column "on the CPU"."""
    short, long = LENGTHS
    cells = {"": case, "form": form}
    try:
        (counts, on_cpu), (more, _) = (count(case, form, T) for T in LENGTHS)
    except Exception as failure:  # the others are still wanted
        return cells | {"on the CPU": str(failure).splitlines()[0].partition(";")[0]}
    cells["on the CPU"] = ", ".join(f"{op} {n}" if n > 1 else op for op, n in sorted(on_cpu.items())) or "none"
    for name in counts:
        step = (more[name] - counts[name]) / (long - short)
        cells |= {f"{name}, a step": f"{step:.3g}", f"{name}, besides": f"{counts[name] - short * step:.3g}"}
    return cells


def table(rows: list[dict[str, str]]) -> str:
    """Format the rows as a Markdown table."""
    heads = max(rows, key=len)
    lines = [heads, ["---"] * len(heads), *([row.get(head, "") for head in heads] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    from gpu_check import describe_run

    from onnx_export.runtime import PROVIDERS, why_not

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=list(PROVIDERS))
    provider = parser.parse_args().provider or next(filterfalse(why_not, ("cuda", "webgpu", "cpu")))
    if not why_not(provider):
        count, about = lambda *case: count_by_profile(*case, provider), f"{describe_run(provider)}. {NOTES[provider]}"
    elif provider == "cuda":
        count, about = count_by_list, NOTES["by list"]
    else:
        sys.exit(f"provider is {provider!r}, but {why_not(provider)}")
    rows, _ = capture_log(lambda: [table_row(case, form, count) for case, forms in CASES.items() for form in forms])
    print(f"{table(rows)}\n{about}")


if __name__ == "__main__":
    main()
