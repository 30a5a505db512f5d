"""All there is to check on a machine with a GPU, without a network: results, placement, and times beside cuDNN's.

    make gpu-check PYTHON=python3              # what runs is that Python's onnxruntime-gpu, and torch if it is there
    python benchmarks/gpu_check.py --provider cpu --output FILE [--steps T] [--quick]    # the same steps, without a GPU

Results: every op, dtype and form through `onnx_export.Session`, which makes a node on the CPU an error, against the
formulas in float64; the exit status is 1 when one is out of bounds.  Times: forward with all outputs, everything on the
device, T steps a call; the median of rounds, each of calls for about 0.2 s that end with one synchronisation.  Products
of float32 are computed in float32, not TF32, by all.  Writes docs/benchmarks/gpu.md; with another provider than CUDA it
has to be told where to write, because that page is for figures of a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
SIZES = {"T": 7, "B": 5, "I": 6, "H": 16}
GRID = [(H, B) for H in (128, 512) for B in (1, 64)]
CAPTURED = "unroll, CUDA graph"
FORMS = ["scan", "unroll", CAPTURED, "native"]
NO_CUDNN_GRU = "not exact: cuDNN's GRU is another function"
ROUNDS, SECONDS = 9, 0.2
Run = Callable[[], object]


# ------------------------------------------------------------------------------------------------------------- results
def results(provider: str) -> tuple[list[list[str]], bool]:
    """A row for every op, dtype and form, and whether all are within bounds."""
    from cases import arguments

    from blockcell.optable import OPS
    from onnx_export.verification import compare

    rows, ok = [], True
    for op, table in OPS.items():
        for dtype in ("float64", "float32", "float16"):
            eps = np.finfo(dtype).eps
            for loop in ["scan", "unroll", "loop"] if table.sequence else ["scan"]:
                args = arguments(op, SIZES, dtype=np.dtype(dtype), seq_len_max=5 if table.sequence else None)
                error, where, verdict = "", "", "ok"
                try:
                    found = compare(op, args, [provider], loop)
                    worst = max(found, key=lambda row: (np.isnan(row.error), row.error))
                    limit = 1e-12 / eps if dtype == "float64" else worst.bound
                    error, where = f"{worst.error * eps:.1e}", worst.output
                    if not worst.error <= limit:
                        verdict = f"above {limit * eps:.1e}"
                except Exception as failure:  # one that fails must not keep the others from being tried
                    verdict = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
                ok &= verdict == "ok"
                rows.append([op, dtype, loop, error, where, verdict])
                print(*rows[-1], flush=True)
    return rows, ok


# --------------------------------------------------------------------------------------------------------------- times
def seconds(run: Run, synchronize: Run) -> float:
    """A call's time: the median of the rounds."""
    run(), run(), synchronize()  # one builds or captures
    start = time.perf_counter()
    run(), synchronize()
    calls = max(1, round(SECONDS / (time.perf_counter() - start)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize()
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


def with_onnxruntime(op: str, form: str, sizes: dict[str, int], provider: str) -> tuple[Run, Run]:
    """A call of the op with all arrays on the device, and what waits for it."""
    from cases import arguments

    import onnx_export
    from onnx_export.runtime import PROVIDERS

    loop = form.split(",")[0]
    attrs = {"cell_clip": 0.0, "use_peephole": False} if op == "BlockLSTM" else {}
    args = arguments(op, sizes, seq_len_max=sizes["T"], **{"use_peephole": False, **attrs})
    model = onnx_export.build(op, sizes=sizes, attrs=attrs, loop=loop, static=True)
    name, given = PROVIDERS[provider].name, dict(PROVIDERS[provider].options)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if provider == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if form == CAPTURED:
            given = {**given, "enable_cuda_graph": "1"}
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[(name, given)])
    if session.get_providers()[0] != name:
        raise RuntimeError(f"onnxruntime fell back to {', '.join(session.get_providers())}")
    bound = session.io_binding()
    for value in model.graph.input:
        array = np.ascontiguousarray(args[value.name])
        bound.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array, provider, 0))
    for value in model.graph.output:  # at fixed addresses, which a captured graph writes to
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        result = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, provider, 0)
        bound.bind_ortvalue_output(value.name, result)
    return lambda: session.run_with_iobinding(bound), bound.synchronize_outputs


def with_torch(peer: str, sizes: dict[str, int], provider: str) -> tuple[Run, Run]:
    """cuDNN's LSTM or GRU, or a loop over a GRU's steps with the reset before the product, compiled."""
    import torch
    from cases import arguments
    from graphs import exact

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    T, B, I, H = (sizes[letter] for letter in "TBIH")  # noqa: E741
    x = torch.rand(T, B, I, device=provider)
    if peer.startswith("torch"):
        layer = getattr(torch.nn, peer.split()[1])(I, H, device=provider)
        run = torch.inference_mode()(lambda: layer(x))
    else:
        args = arguments("block_gru", sizes, seq_len_max=T)
        x, h_0, w_ru, w_c, b_ru, b_c = (
            torch.from_numpy(args[name]).to(provider) for name in ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")
        )

        def loop() -> torch.Tensor:
            h, states = h_0, []
            x_ru, x_c = x @ w_ru[:I] + b_ru, x @ w_c[:I] + b_c
            for t in range(T):
                r, u = torch.sigmoid(torch.addmm(x_ru[t], h, w_ru[I:])).chunk(2, 1)
                c = torch.tanh(torch.addmm(x_c[t], h * r, w_c[I:]))
                h = c + u * (h - c)
                states.append(h)
            return torch.stack(states)

        run = torch.inference_mode()(torch.compile(loop, mode="reduce-overhead"))
        error = np.abs(run().cpu().numpy() - exact("block_gru", args).h).max()
        if not error <= 1e-5:
            raise RuntimeError(f"the compiled loop is off by {error:.1e}")
    return run, torch.cuda.synchronize if provider == "cuda" else lambda: None


def times(steps: int, grid: list[tuple[int, int]], provider: str) -> list[list[str]]:
    """A row for every op and form, microseconds per step for every H and B; or why there is none."""
    forms: list[tuple[str, str, Callable[..., tuple[Run, Run]]]] = [
        *(("BlockLSTM", form, with_onnxruntime) for form in FORMS),
        ("", "torch LSTM (h only)", with_torch),
        *(("block_gru", form, with_onnxruntime) for form in FORMS),
        ("", "compiled loop (h only)", with_torch),
        ("", "torch GRU (h only; reset after the product)", with_torch),
    ]
    rows = []
    for op, form, candidate in forms:
        row = [op, form]
        for H, B in grid:
            sizes = {"T": steps, "B": B, "I": H, "H": H}
            if candidate is with_torch and importlib.util.find_spec("torch") is None:
                row.append("no torch here")
            elif form == CAPTURED and provider != "cuda":
                row.append("needs CUDA")
            elif op == "block_gru" and form == "native" and provider == "cuda":
                row.append(NO_CUDNN_GRU)
            else:
                try:
                    made = candidate(*([op] if op else []), form, sizes, provider)
                    row.append(f"{seconds(*made) / steps * 1e6:.2f}")
                except Exception as failure:  # the others are still wanted
                    row.append(f"{type(failure).__name__}: {str(failure).splitlines()[0]}")
        rows.append(row)
        print(*row, flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------------- page
def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[part.replace("|", "/") for part in row] for row in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def machine(provider: str) -> str:
    """What it ran on."""
    versions = [f"Python {platform.python_version()}", f"onnxruntime {onnxruntime.__version__}",
                f"onnx {onnx.__version__}"]  # fmt: skip
    if importlib.util.find_spec("torch"):
        import torch

        versions.append(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    where = platform.processor() or platform.machine()
    if provider == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        where = "GPU and driver: " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return f"{where}; {', '.join(versions)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--output", type=Path, help="the page to write; by default docs/benchmarks/gpu.md, for CUDA only"
    )
    parser.add_argument("--steps", type=int, default=100, help="T (default: 100)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    given = parser.parse_args()
    output = given.output or (PAGE if given.provider == "cuda" else None)
    if output is None:
        parser.error("--output is needed with --provider cpu")
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    available = onnxruntime.get_available_providers()
    if given.provider == "cuda" and "CUDAExecutionProvider" not in available:
        sys.exit(
            f"onnxruntime {onnxruntime.__version__} has only {', '.join(available)} here; onnxruntime-gpu has CUDA"
        )
    checked, ok = results(given.provider)
    grid = GRID[:1] if given.quick else GRID
    timed = times(given.steps, grid, given.provider)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        f"# On {'a GPU' if given.provider == 'cuda' else 'the CPU'}\n\n"
        f"Written by `make gpu-check` on {time.strftime('%Y-%m-%d')}. {machine(given.provider)}.\n\n"
        f"## Time per step in microseconds, forward, T = {given.steps}, I = H, float32\n\n"
        + table(["op", "form", *(f"H {H}, B {B}" for H, B in grid)], timed)
        + "\n## Largest error, relative to the output's largest entry\n\n"
        + table(["op", "dtype", "form", "error", "output", "verdict"], checked)
    )
    print(f"{output}: {sum(row[-1] == 'ok' for row in checked)} of {len(checked)} within bounds")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
