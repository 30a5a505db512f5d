"""Check everything on a machine with a GPU, without a network: results, and times beside cuDNN's where it runs.

Needed by: make gpu-check, docs/onnx/runtimes.md

    make gpu-check PYTHON=python3              # on what that Python has: CUDA, else WebGPU; and torch if it is there
    python benchmarks/gpu_check.py --provider cpu [--output FILE] [--steps T] [--quick]    # the same, without a GPU

Results: every op, dtype and form through `onnx_export.Session`, which makes a node on the CPU an error, against the
formulas in float64; the exit status is 1 when one is out of bounds.  Times: forward with all outputs, everything on the
device, T steps a call; the median of rounds, each of calls for about 0.1 s that end with one synchronisation.  Products
of float32 are computed in float32, not TF32, by all.  Writes build/gpu-check-PROVIDER.md, and for CUDA
docs/benchmarks/gpu.md; docs/benchmarks/webgpu.md is such a page of a GPU that is no software.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import turns

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]
PAGES = {"cuda": ROOT / "docs" / "benchmarks" / "gpu.md"}
TITLES = {"cuda": "a GPU, by CUDA", "webgpu": "a GPU, by WebGPU", "cpu": "the CPU"}
SIZES = {"T": 7, "B": 5, "I": 6, "H": 16}
GRID = [(H, B) for H in (128, 512) for B in (1, 64)]
CAPTURED = "unroll, CUDA graph"
FORMS = ["scan", "unroll", CAPTURED]
PEERS = {"BlockLSTM": "LSTM", "block_gru": "", "block_gru_reset_after": "GRU"}  # layers of PyTorch
ROUNDS, SECONDS = 9, 0.1
Run = Callable[[], object]


# ------------------------------------------------------------------------------------------------------------- results
def check_results(provider: str) -> tuple[list[list[str]], bool]:
    """Check every op, dtype and form that runs there; return their rows, and whether all are within bounds."""
    from blockcell.optable import OPS
    from onnx_export.runtime import why_no_dtype

    rows = []
    for op in OPS:
        for dtype in ("float64", "float32", "float16"):
            if not why_no_dtype(provider, np.dtype(dtype)):
                for loop in ("scan", "unroll", "loop") if OPS[op].sequence else ("scan",):
                    rows.append([op, dtype, loop, *check_case(op, dtype, loop, provider)])
                    print(*rows[-1], flush=True)
    return rows, all(row[-1] == "ok" for row in rows)


def check_case(op: str, dtype: str, loop: str, provider: str) -> tuple[str, str, str]:
    """Return the largest error, its output, and the verdict."""
    from cases import arguments

    from blockcell.optable import OPS
    from onnx_export.verification import compare

    args = arguments(op, SIZES, dtype=np.dtype(dtype), seq_len_max=5 if OPS[op].sequence else None)
    eps = np.finfo(dtype).eps
    try:
        comparisons = compare(op, args, [provider], loop=loop)
    except Exception as failure:  # one that fails must not keep the others from being tried
        return "", "", describe_failure(failure)
    worst = max(comparisons, key=lambda row: (np.isnan(row.error), row.error))
    limit = 1e-12 / eps if dtype == "float64" else worst.bound
    verdict = "ok" if worst.error <= limit else f"above {limit * eps:.1e}"
    return f"{worst.error * eps:.1e}", worst.output, verdict


def describe_failure(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"


# --------------------------------------------------------------------------------------------------------------- times
def seconds_of_call(run: Run, synchronize: Run) -> float:
    """Return the seconds of a call, the median of the rounds."""

    def run_times(calls: int) -> None:
        for _ in range(calls):
            run()
        synchronize()

    run_times(2)  # one builds or captures
    calls = max(1, round(SECONDS / turns.seconds(partial(run_times, 1), 0)))
    return turns.seconds(partial(run_times, calls), ROUNDS * SECONDS) / calls


def prepare_onnxruntime(op: str, form: str, sizes: dict[str, int], provider: str) -> tuple[Run, Run]:
    """Return a call of the op with all arrays on the device, and a function that waits for it."""
    from cases import arguments

    import onnx_export
    from onnx_export.runtime import RuntimeModel

    loop = form.split(",")[0]
    attrs = {"cell_clip": 0.0, "use_peephole": False} if op == "BlockLSTM" else {}
    args = arguments(op, sizes, seq_len_max=sizes["T"], **{"use_peephole": False, **attrs})
    model = onnx_export.build(op, sizes=sizes, attrs=attrs, loop=loop, static=True)
    feeds = {value.name: np.asarray(args[value.name], order="C") for value in model.graph.input}
    captured = {"enable_cuda_graph": "1"} if form == CAPTURED else {}
    running = RuntimeModel(model, provider, provider_options=captured)
    if provider == "webgpu":
        return prepare_webgpu(running, feeds)
    session, bound = running.session, running.session.io_binding()
    for name, array in feeds.items():
        bound.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, provider, 0))
    for value in model.graph.output:  # at fixed addresses, which a captured graph writes to
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        result = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, provider, 0)
        bound.bind_ortvalue_output(value.name, result)
    return lambda: session.run_with_iobinding(bound), bound.synchronize_outputs


def prepare_webgpu(running: Any, feeds: dict[str, np.ndarray]) -> tuple[Run, Run]:
    """Return a call of a session on WebGPU, and a function that waits for it. Not every package lets Python put arrays
    on a GPU, but outputs can stay there as inputs of another session; fetching an output waits for it."""
    from onnx_export.runtime import RuntimeModel

    def bind_session(session: Any, inputs: dict[str, Any]) -> tuple[Any, list[Any]]:
        bound = session.io_binding()
        for name, value in inputs.items():
            if isinstance(value, np.ndarray):
                bound.bind_cpu_input(name, value)
            else:
                bound.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            bound.bind_output(output.name, "webgpu")
        session.run_with_iobinding(bound)
        return bound, bound.get_outputs()

    floats = {name: array for name, array in feeds.items() if array.ndim}  # seq_len_max is read by the CPU
    shapes = {name: ", ".join(map(str, array.shape)) for name, array in floats.items()}
    inputs, outputs = (", ".join(f"float[{shapes[name]}] {name}{end}" for name in floats) for end in ("", "_kept"))
    nodes = "".join(f"{name}_kept = Identity ({name})\n" for name in floats)
    text = f'<ir_version: 8, opset_import: ["": 18]> copy ({inputs}) => ({outputs}) {{ {nodes} }}'
    copy = RuntimeModel(onnx.parser.parse_model(text), "webgpu")
    _, arrays = bind_session(copy.session, floats)
    bound, results = bind_session(running.session, feeds | dict(zip(floats, arrays, strict=True)))
    for output, result in zip(running.session.get_outputs(), results, strict=True):
        bound.bind_ortvalue_output(output.name, result)
    least = min(results, key=lambda result: np.prod(result.shape()))
    return lambda: (running.session.run_with_iobinding(bound), copy), least.numpy


def prepare_torch(kind: str, sizes: dict[str, int], provider: str) -> tuple[Run, Run]:
    """Return a call of cuDNN's LSTM or GRU, and a function that waits for it."""
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    layer = getattr(torch.nn, kind)(sizes["I"], sizes["H"], device=provider)
    x = torch.rand(sizes["T"], sizes["B"], sizes["I"], device=provider)
    run = torch.inference_mode()(lambda: layer(x))
    return run, torch.cuda.synchronize if provider == "cuda" else lambda: None


def time_forms(steps: int, grid: list[tuple[int, int]], provider: str) -> list[list[str]]:
    """Return a row for every op and form: microseconds per step for every H and B, or why there are none."""
    cases = []
    for op, peer in PEERS.items():
        cases += [(op, form) for form in FORMS if form != CAPTURED or provider == "cuda"]
        cases += [("", peer)] if peer and provider != "webgpu" else []
    rows = []
    for op, form in cases:
        row = [op, form if op else f"torch {form} (h only)"]
        for H, B in grid:
            sizes = {"T": steps, "B": B, "I": H, "H": H}
            try:
                runner = prepare_onnxruntime(op, form, sizes, provider) if op else prepare_torch(form, sizes, provider)
                row.append(f"{seconds_of_call(*runner) / steps * 1e6:.2f}")
            except Exception as failure:  # the others are still wanted
                row.append(describe_failure(failure))
        rows.append(row)
        print(*row, flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------- page
def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[part.replace("|", "/") for part in row] for row in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def worst_results(rows: list[list[str]]) -> list[list[str]]:
    """Return the row with the largest error of each dtype, and all rows that are out of bounds."""
    worst: dict[str, list[str]] = {}
    for row in rows:
        if row[-1] == "ok":
            worst[row[1]] = max(worst.get(row[1], row), row, key=lambda own: float(own[3]))
    return [*worst.values(), *(row for row in rows if row[-1] != "ok")]


def describe_run(provider: str) -> str:
    """Describe the device and the versions that this ran on."""
    versions = [f"Python {platform.python_version()}", f"onnxruntime {onnxruntime.__version__}"]
    for package in ["onnxruntime-webgpu", "onnxruntime-ep-webgpu"] if provider == "webgpu" else []:
        if any(metadata.distributions(name=package)):
            versions.append(f"{package} {metadata.version(package)}")
    versions.append(f"onnx {onnx.__version__}")
    if provider != "webgpu" and importlib.util.find_spec("torch"):
        import torch

        versions.append(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    where = platform.processor() or platform.machine()
    if provider == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        where = "GPU and driver: " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    elif provider == "webgpu":
        where = f"Vulkan devices: {vulkan_devices()}"
    return f"{where}; {', '.join(versions)}"


def vulkan_devices() -> str:
    """Return the names of the GPUs in vulkaninfo's summary, among which may be software."""
    if not shutil.which("vulkaninfo"):
        return "unknown without vulkan-tools"
    summary = subprocess.run(["vulkaninfo", "--summary"], capture_output=True, text=True).stdout
    return ", ".join(re.findall(r"deviceName += (.*)", summary))


def choose_provider(name: str | None) -> str:
    """Return the first provider that runs here, of those that are asked for, else end the program."""
    from onnx_export.runtime import why_not

    choices = [name] if name else ["cuda", "webgpu"]
    reasons = {provider: why_not(provider) for provider in choices}
    for provider, reason in reasons.items():
        if not reason:
            return provider
    sys.exit("\n".join(f"provider {provider!r}: {reason}" for provider, reason in reasons.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--provider", choices=["cuda", "webgpu", "cpu"], help="the first of them that runs, but not cpu"
    )
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--steps", type=int, default=100, help="T (default: 100)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    options = parser.parse_args()
    provider = choose_provider(options.provider)
    output = options.output or PAGES.get(provider, ROOT / "build" / f"gpu-check-{provider}.md")
    result_rows, ok = check_results(provider)
    grid = GRID[:1] if options.quick else GRID
    time_rows = time_forms(options.steps, grid, provider)
    right = sum(row[-1] == "ok" for row in result_rows)
    count = f"{right} of {len(result_rows)} results of an op, a dtype and a form are within bounds"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        f"# ONNX models on {TITLES[provider]}: times and errors\n\n"
        f"Written by `make gpu-check` on {time.strftime('%Y-%m-%d')}. {describe_run(provider)}.\n\n"
        f"## Time per step in microseconds, forward, T = {options.steps}, I = H, float32\n\n"
        + table(["op", "form", *(f"H {H}, B {B}" for H, B in grid)], time_rows)
        + f"\n## Largest error of a dtype, relative to the output's largest entry\n\n{count}:\n\n"
        + table(["op", "dtype", "form", "error", "output", "verdict"], worst_results(result_rows))
    )
    print(f"{output}: {count}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
