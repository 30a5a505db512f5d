"""Compare a training step as an ONNX model with one of blockcell's kernels and optimizers, and with PyTorch's.

Needed by: docs/onnx/training.md

    python benchmarks/training_steps.py [--rounds 5] [--seconds 0.3] [--only SIZE ...] [--threads 1]
    python benchmarks/training_steps.py --profile [--only SIZE ...] [--threads 1]
    python benchmarks/training_steps.py --compare

A step is forward, softmax cross-entropy, backward, clipping by the global norm, and adam, of an LSTM with I = H and a
dense layer on its last step, in float32. Each way has a process of its own, and they are asked in turn. Prints the
milliseconds of a step, each the median of the rounds, and how many times blockcell's that is, with quartiles; then what
a further step of the sequence costs, from the shortest to the longest.

With --profile it prints what onnxruntime's own profile says of a step of the model: how many nodes run, which share of
them adam and its rates have, and which share of the time in nodes goes to matrix products and to sums.

With --compare it trains an LSTM on scikit-learn's handwritten digits instead, a hundred steps from the same weights on
the same batches, and prints the last loss and how many of the digits held out are right.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from turns import (
    CPUS,
    Worker,
    answer_seconds,
    ask_all,
    make_parser,
    open_workers,
    print_heads,
    print_row,
    ratio_cell,
    run_program,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if TYPE_CHECKING:
    from onnx import ModelProto

    from blockcell import Stack
    from onnx_export import TrainingSession

CLASSES = 10
SIZES = {f"{T}x{B}x{H}": (T, B, H) for B, H in ((1, 32), (16, 128), (64, 256)) for T in (10, 50, 200)}
WAYS = ("blockcell", "ONNX", "PyTorch")
Call = Callable[[], object]


def draw_data(T: int, B: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    return g.uniform(-1, 1, (T, B, H)).astype(np.float32), g.integers(0, CLASSES, B)


def make_our_step(T: int, B: int, H: int, threads: int) -> Call:
    import blockcell
    from blockcell import LSTM, Dense, Stack, loss, optim

    blockcell.set_num_threads(threads)
    net = Stack([LSTM.init(H, H, seed=1), Dense.init(H, CLASSES, seed=2, last=True)])
    (x, target), memory = draw_data(T, B, H), None

    def step() -> None:
        nonlocal memory
        y, _, tape = net.forward(x)
        grads = net.backward(tape, loss.softmax_cross_entropy(y, target)[1])[2]
        grads, _ = optim.clip_global_norm(grads, 1.0)
        weights, memory = optim.adam(net.weights, grads, memory, learning_rate=1e-3)
        net.set_weights(**weights)

    return step


def make_onnx_step(T: int, B: int, H: int, threads: int) -> Call:
    session = open_session(H, intra_op_num_threads=threads)
    x, target = draw_data(T, B, H)
    return lambda: session(x=x, target=target, learning_rate=1e-3)


def open_session(H: int, **settings: object) -> TrainingSession:
    from blockcell import LSTM, Dense, Stack
    from onnx_export import TrainingSession, runtime, training_step

    init = runtime.RuntimeModel.__init__

    def new_init(self, model, provider, sizes=None, given=None, provider_options=None):  # type: ignore[no-untyped-def]
        init(self, model, provider, sizes, settings, provider_options)

    net = Stack([LSTM.init(H, H, seed=1), Dense.init(H, CLASSES, seed=2, last=True)])
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "max_norm": 1.0, "lengths": False}
    model = training_step(net, None, **options)  # type: ignore[arg-type]
    runtime.RuntimeModel.__init__ = new_init  # type: ignore[method-assign]
    try:
        return TrainingSession(model, net)
    finally:
        runtime.RuntimeModel.__init__ = init  # type: ignore[method-assign]


def make_torch_step(T: int, B: int, H: int, threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    lstm, dense = torch.nn.LSTM(H, H), torch.nn.Linear(H, CLASSES)
    weights = [*lstm.parameters(), *dense.parameters()]
    adam, (x, target) = torch.optim.Adam(weights, lr=1e-3), map(torch.as_tensor, draw_data(T, B, H))

    def step() -> None:
        adam.zero_grad()
        torch.nn.functional.cross_entropy(dense(lstm(x)[0][-1]), target).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()

    return step


def work(way: str, threads: str) -> None:
    """Answer a size and a budget with the seconds of a step."""
    step_of = {"blockcell": make_our_step, "ONNX": make_onnx_step, "PyTorch": make_torch_step}[way]
    answer_seconds(lambda size: step_of(*SIZES[size], int(threads)))


def profile(size: str, threads: int) -> list[object]:
    """Profile a step; return the cells of a table."""
    T, B, H = SIZES[size]
    x, target = draw_data(T, B, H)
    with tempfile.TemporaryDirectory() as folder:
        options_of_profile = {"enable_profiling": True, "profile_file_prefix": f"{folder}/profile"}
        session = open_session(H, intra_op_num_threads=threads, **options_of_profile)
        for _ in range(5):
            session(x=x, target=target, learning_rate=1e-3)
        events = json.loads(Path(session._running[()].session.end_profiling()).read_text())
    start = max(event["ts"] for event in events if event["name"] == "model_run")
    ran = [event for event in events if event["name"].endswith("_kernel_time") and event["ts"] >= start]
    nodes = [(event["args"]["op_name"], event["name"], event["dur"]) for event in ran]
    nodes = [node for node in nodes if node[0] != "Scan"]  # whose time is that of the nodes in it, and its own
    total = sum(time for _, _, time in nodes)
    products, sums = (
        sum(time for kind, _, time in nodes if kind in kinds) / total
        for kinds in (("MatMul", "Gemm", "FusedMatMul"), ("ReduceSum", "ReduceSumSquare"))
    )
    adam = sum("Adam" in name for _, name, _ in nodes)
    return [T, B, H, len(nodes), adam, f"{100 * products:.0f} %", f"{100 * sums:.1f} %"]


class Task(NamedTuple):
    """The network that `compare` trains, its data and its ONNX model."""

    net: Stack
    x: np.ndarray
    labels: np.ndarray
    picked: list[np.ndarray]
    """Numbers of the digits of each step."""
    test: np.ndarray
    """Numbers of the digits that are held out."""
    model: ModelProto
    rate: float


def make_task(dtype: str, steps: int = 100, rows: int = 64, held_out: int = 360) -> Task:
    from sklearn.datasets import load_digits

    from blockcell import LSTM, Dense, Stack
    from onnx_export import training_step

    net = Stack([LSTM.init(8, 32, seed=1, dtype=dtype), Dense.init(32, CLASSES, seed=2, last=True, dtype=dtype)])
    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8).swapaxes(0, 1) / 16).astype(dtype)  # a digit's rows are its steps
    shuffled = np.random.default_rng(0).permutation(len(labels))
    train, test = shuffled[held_out:], shuffled[:held_out]
    picked = [np.random.default_rng(k).choice(train, rows, replace=False) for k in range(steps)]
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "max_norm": 1.0, "lengths": False}
    model = training_step(net, None, **options)  # type: ignore[arg-type]
    return Task(net, x, labels, picked, test, model, rate=0.01)


def compare(dtype: str) -> None:
    from onnx.reference import ReferenceEvaluator

    from blockcell import loss, optim
    from onnx_export import TrainingSession

    net, x, labels, picked, test, model, rate = make_task(dtype)

    def run_layers() -> tuple[float, dict[str, np.ndarray]]:
        layer, weights, memory = copy.copy(net), net.weights, None
        for rows in picked:
            y, _, tape = layer.forward(x[:, rows])
            value, d_y = loss.softmax_cross_entropy(y, labels[rows])
            grads, _ = optim.clip_global_norm(layer.backward(tape, d_y)[2], 1.0)
            weights, memory = optim.adam(layer.weights, grads, memory, learning_rate=rate)
            layer.set_weights(**weights)
        return value, weights

    def run_onnxruntime() -> tuple[float, dict[str, np.ndarray]]:
        session = TrainingSession(model, net)
        for rows in picked:
            value = session(x=x[:, rows], target=labels[rows], learning_rate=rate).loss
        return value, session.weights

    def run_reference() -> tuple[float, dict[str, np.ndarray]]:
        run, kept = ReferenceEvaluator(model), net.weights
        kept |= {f"{slot}.{name}": np.zeros_like(weight) for name, weight in net.weights.items() for slot in "mv"}
        kept["step"] = np.array(0)
        for rows in picked:
            feeds = {"x": x[:, rows], "target": labels[rows], "learning_rate": np.array(rate, dtype), **kept}
            results = dict(zip(run.output_names, run.run(None, feeds), strict=True))
            kept = {name.removeprefix("new_"): array for name, array in results.items() if name.startswith("new_")}
        return float(results["loss"]), {name: kept[name] for name in net.weights}

    for way, run in (("blockcell", run_layers), ("onnxruntime", run_onnxruntime), ("onnx.reference", run_reference)):
        value, weights = run()
        trained = copy.copy(net)
        trained.set_weights(**weights)
        share = (trained(x[:, test])[0].argmax(axis=1) == labels[test]).mean()
        print_row([dtype, way, f"{value:.15f}", f"{100 * share:.1f} %"])


def main() -> None:
    parser = make_parser(__doc__, rounds=5, seconds=0.3)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="SIZE")
    parser.add_argument("--threads", type=int, default=CPUS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        print_heads(["dtype", "", "loss of step 100", "right of 360 held out"])
        for dtype in ("float64", "float32"):
            compare(dtype)
        return
    if options.profile:
        print_heads(["T", "B", "H", "nodes", "of adam", "time in products", "time in sums"])
        for size in options.only:
            print_row(profile(size, options.threads))
        return
    import onnxruntime
    import torch

    import blockcell

    versions = f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__}, {options.threads} threads"
    print(f"{blockcell.build_info()['cpu']}, {versions}\n")
    medians: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
    with open_workers({way: Worker(__file__, "--work", way, str(options.threads)) for way in WAYS}) as workers:
        heads = [head for way in WAYS[1:] for head in (f"{way}, ms", "times blockcell's")]
        print_heads(["T", "B", "H", "blockcell, ms", *heads])
        for size in options.only:
            T, B, H = SIZES[size]
            rounds = [ask_all(workers, size, options.seconds) for _ in range(options.rounds)]
            times = {way: [answers[way] for answers in rounds] for way in WAYS}
            medians.setdefault((B, H), {})[T] = median = {way: statistics.median(times[way]) for way in WAYS}
            cells = [f"{1e3 * median['blockcell']:.2f}"]
            for way in WAYS[1:]:
                cells += [f"{1e3 * median[way]:.2f}", ratio_cell(times[way], times["blockcell"])]
            print_row([T, B, H, *cells])
    print()
    print_heads(["B", "H", *(f"a further step: {way}, us" for way in WAYS)])
    for (B, H), by_length in medians.items():
        if len(by_length) > 1:
            short, long = min(by_length), max(by_length)
            further = [1e6 * (by_length[long][way] - by_length[short][way]) / (long - short) for way in WAYS]
            print_row([B, H, *(f"{us:.0f}" for us in further)])


if __name__ == "__main__":
    run_program(main, work)
