"""Measure blockcell's calls and another runtime's in one process: onnxruntime, with several settings, and OpenVINO.

Needed by: docs/performance.md

    python benchmarks/beside_onnxruntime.py [--rounds 5] [--seconds 0.2] [--only WAY ...]

Idle threads of onnxruntime wait busily for some time after a run, in the way of everybody else's.  A process is a way
to run the models: onnxruntime as it comes, or told to wait less, or on one thread; blockcell's `Session`; OpenVINO.  In
each a model is run alone, and in turn with an inference and with a training step of an LSTM (T = 20, B = 16, I = H =
128) on as many threads as there are CPUs.  The models are an LSTM's of 128 cells: one step of one row, and a sequence
as ONNX's own LSTM node (T = 20, B = 16).  Prints mean microseconds of a model's run alone and of ours in turn with it,
and for how many milliseconds of CPU time the runtime's idle threads wait busily after a run, each the median of the
rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import (
    CPUS,
    Worker,
    answer,
    ask_all,
    make_parser,
    measure_spinning,
    open_workers,
    print_heads,
    print_row,
    run_program,
    time_in_turn,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
MODELS = {  # a name: T, B, I = H, and what export is told
    "step": (1, 1, 128, {"streaming": True}),
    "LSTM node": (20, 16, 128, {"lengths": False, "loop": "native"}),
}
NO_WAITING, NOT_LATER = "session.intra_op.allow_spinning", "session.force_spinning_stop"
FOR_SO_LONG = "session.intra_op.spin_duration_us"
WAYS: dict[str, dict[str, str] | None] = {  # onnxruntime's settings
    "nothing else": None,
    "onnxruntime": {},
    f"onnxruntime, `{NO_WAITING}=0`": {NO_WAITING: "0"},
    f"onnxruntime, `{NOT_LATER}=1`": {NOT_LATER: "1"},
    f"onnxruntime, `{FOR_SO_LONG}=50`": {FOR_SO_LONG: "50"},
    "onnxruntime, one thread": {"threads": "1"},
    "`Session`": None,
    "OpenVINO": None,
}
CALLS = ("inference", "training")


def our_calls() -> dict[str, Callable[[], object]]:
    from blockcell import LSTM

    layer, x = LSTM.init(128, 128, seed=0), np.ones((20, 16, 128), np.float32)

    def training() -> None:
        y, _, tape = layer.forward(x)
        layer.backward(tape, y)

    return {"inference": lambda: layer(x), "training": training}


def make_run(way: str, name: str) -> Callable[[], object]:
    """Return a call that runs a model."""
    from blockcell import LSTM
    from onnx_export import Session, export

    T, B, H, options = MODELS[name]
    model = export(LSTM.init(H, H, seed=1), None, functions=False, **options)
    step = "streaming" in options
    feeds = {value.name: np.ones((B, H), np.float32) for value in model.graph.input}
    if not step:
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

    settings: Any = onnxruntime.SessionOptions()
    for key, value in (WAYS[way] or {}).items():
        if key == "threads":
            settings.intra_op_num_threads = int(value)
        else:
            settings.add_session_config_entry(key, value)
    runs = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return lambda: runs.run(None, feeds)


def work(way: str) -> None:
    """Answer a model's name and a budget with microseconds: of its run alone, of each of our calls in turn with it, and
    of its idle threads' spinning.  Without a model, answer with those of our calls alone."""
    own = our_calls()
    models = {name: make_run(way, name) for name in MODELS if way != "nothing else"}

    def reply(question: tuple[str, float]) -> list[float]:
        name, seconds = question
        if not models:
            seconds_of_calls = [0.0, *(time_in_turn([own[call]], seconds)[0] for call in CALLS), 0.0]
        else:
            run = models[name]
            in_turn = [time_in_turn([run, own[call]], seconds)[1] for call in CALLS]
            seconds_of_calls = [time_in_turn([run], seconds)[0], *in_turn, measure_spinning(run)]
        return [1e6 * value for value in seconds_of_calls]

    answer(reply)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, seconds=0.2)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    options = parser.parse_args()
    import onnxruntime

    import blockcell

    info = blockcell.build_info()
    print(f"{CPUS} CPUs, {info['cpu']}, {info['compiler']}, onnxruntime {onnxruntime.__version__}\n")
    with open_workers({way: Worker(__file__, "--work", way) for way in options.only}) as workers:
        print_heads(["model", "beside", "alone", *(f"blockcell {call}" for call in CALLS), "then waits, ms"])
        for name in MODELS:
            rounds = [ask_all(workers, name, options.seconds) for _ in range(options.rounds)]
            for way in workers:
                columns = zip(*(answers[way] for answers in rounds), strict=True)
                alone, *own, waits = (statistics.median(column) for column in columns)
                cells = [f"{alone:.0f}" if alone else "", *(f"{us:.0f}" for us in own), f"{waits / 1e3:.1f}"]
                print_row([name, way, *cells])


if __name__ == "__main__":
    run_program(main, work)
