"""Measure blockcell's calls and another library's in one process: PyTorch's, onnxruntime's and OpenVINO's.

Needed by: docs/performance.md

    python benchmarks/beside.py torch [--rounds 9] [--seconds 0.3]
    python benchmarks/beside.py onnxruntime [--rounds 5] [--seconds 0.2] [--only WAY ...]

A process is a way to load or to set the other library: which is imported first, whether blockcell has an OpenMP runtime
of its own, as in a wheel that auditwheel has repaired, what the environment or onnxruntime's options say.  Threads that
spin after a call are in the other's way if they are not the same threads.  So in each process calls of the other
library are timed alone, and in turn with an inference and with a training step of blockcell's LSTM (T = 20, B = 16,
I = H = 128) on as many threads as there are CPUs; PyTorch also beside as many busy processes as there are CPUs.

The calls of PyTorch are a Linear on as many rows, and its gradients; the models an LSTM of 128 cells: one step of one
row, and a sequence as ONNX's own LSTM node (T = 20, B = 16).  Prints mean microseconds, alone and in turn, and for how
many milliseconds of CPU time the other library's idle threads spin after a call, each the median of the rounds.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import candidates
import numpy as np
import turns
from machine import CPUS, keep_cpus_busy

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests" / "lib")]  # a copy with its own runtime stands before them

T, B, H = 20, 16, 128
OURS = ("inference", "training")
THEIRS = {"torch": ("Linear", "Linear, training"), "onnxruntime": ("step", "LSTM node")}
ONE, TWO = "one runtime", "two runtimes"
IMPORTS = {  # what is imported, whether blockcell has a runtime of its own, environment
    f"{ONE}, torch first": ("torch blockcell", False, {}),
    f"{ONE}, blockcell first": ("blockcell torch", False, {}),
    TWO: ("blockcell torch", True, {}),
    f"{TWO}, `GOMP_SPINCOUNT=1000`": ("blockcell torch", True, {"GOMP_SPINCOUNT": "1000"}),
    f"{ONE}, `OMP_WAIT_POLICY=passive`": ("torch blockcell", False, {"OMP_WAIT_POLICY": "passive"}),
}
SETTINGS: dict[str, tuple[str, str] | None] = {  # of onnxruntime
    "onnxruntime": None,
    **{
        f"onnxruntime, `{key}={value}`": (key, value)
        for key, value in (
            ("session.intra_op.allow_spinning", "0"),
            ("session.force_spinning_stop", "1"),
            ("session.intra_op.spin_duration_us", "50"),
        )
    },
    "`Session`": None,
    "OpenVINO": None,
}
WAYS = {"torch": list(IMPORTS), "onnxruntime": list(SETTINGS)}
Call = Callable[[], object]


# ------------------------------------------------------------------------------------------------- the other's calls
def make_torch_call(way: str, name: str) -> Call:
    import torch

    linear, rows = torch.nn.Linear(H, H), torch.ones(T * B, H)
    if name == "Linear":
        return torch.inference_mode()(lambda: linear(rows))
    return lambda: linear(rows).backward(rows)


def make_run(way: str, name: str) -> Call:
    """Return a call that runs a model."""
    from blockcell import LSTM
    from onnx_export import Session, export

    options: dict[str, Any] = {"streaming": True} if name == "step" else {"lengths": False, "loop": "native"}
    rows = 1 if name == "step" else B
    model = export(LSTM.init(H, H, seed=1), None, functions=False, **options)
    feeds = {value.name: np.ones((rows, H), np.float32) for value in model.graph.input}
    if name != "step":
        feeds["x"] = np.ones((T, B, H), np.float32)
    if way == "`Session`":
        session = Session(model)
        return lambda: session(x=feeds["x"], state=(feeds["cs_prev"], feeds["h_prev"]))
    if way == "OpenVINO":
        import openvino

        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            file.write(model.SerializeToString())
            file.flush()
            compiled = openvino.compile_model(file.name, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda: compiled(feeds)
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    if entry := SETTINGS[way]:
        settings.add_session_config_entry(*entry)
    runs = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return lambda: runs.run(None, feeds)


def work(library: str, way: str) -> None:
    """Answer a call of theirs and a budget with microseconds: of it and of ours, alone and in turn, and of spinning."""
    if library == "torch":
        for name in IMPORTS[way][0].split():
            importlib.import_module(name)
        sys.modules["torch"].set_num_threads(CPUS)
    make = make_torch_call if library == "torch" else make_run
    theirs = {name: make(way, name) for name in THEIRS[library]}
    prepare = candidates.blockcell(CPUS)
    ours = [prepare(f"LSTM {task}", "float32", {"T": T, "B": B, "I": H, "H": H}) for task in OURS]

    def reply(question: tuple[str, float]) -> list[float]:
        call, budget = theirs[question[0]], question[1]
        times = turns.time_in_turn([call], budget)
        for own in ours:
            times += [*turns.time_in_turn([own], budget), *turns.time_in_turn([own, call], budget)]
        return [1e6 * value for value in (*times, turns.measure_spinning(call))]

    turns.answer(reply)


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=5, seconds=0.2)
    parser.add_argument("library", choices=WAYS)
    parser.add_argument("--only", nargs="*", metavar="WAY")
    options = parser.parse_args()
    import own_runtime

    import blockcell

    info, library = blockcell.build_info(), options.library
    version = importlib.import_module(library).__version__
    print(f"{CPUS} CPUs, {info['cpu']}, {info['compiler']}, {library} {version}\n")
    with tempfile.TemporaryDirectory() as folder:
        own = own_runtime.copy(Path(folder)) if library == "torch" else {}
        team = {}
        for way in options.only or WAYS[library]:
            _, two, environment = IMPORTS.get(way, ("", False, {}))
            environment = environment | (own if two else {}) | {"OPENBLAS_NUM_THREADS": "1"}
            team[way] = turns.Worker(__file__, "--work", library, way, **environment)
        with turns.open_workers(team) as workers:
            ours = (f"blockcell's {task}" for task in OURS)
            turns.print_heads(["", "beside", "", "its call", *ours, "then spins, ms"])
            for place in ("quiet", "busy") if library == "torch" else ("quiet",):
                for name in THEIRS[library]:
                    with keep_cpus_busy(place):
                        rounds = [turns.ask_all(workers, name, options.seconds) for _ in range(options.rounds)]
                    for way in workers:
                        columns = zip(*(answers[way] for answers in rounds), strict=True)
                        alone, a, a_turn, theirs_a, b, b_turn, theirs_b, spins = map(statistics.median, columns)
                        cells = [f"{alone:.0f}, {theirs_a:.0f}, {theirs_b:.0f}", f"{a:.0f}, {a_turn:.0f}"]
                        turns.print_row([place, name, way, *cells, f"{b:.0f}, {b_turn:.0f}", f"{spins / 1e3:.2f}"])


if __name__ == "__main__":
    turns.run_program(main, work)
