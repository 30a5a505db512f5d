"""Compare a training step as an ONNX model with one of blockcell's kernels and optimizers, and with PyTorch's.

Needed by: docs/onnx/training.md

    python benchmarks/training_steps.py [--rounds 5] [--seconds 0.3] [--only SIZE ...]

A step is forward, softmax cross-entropy, backward, clipping by the global norm, and adam, of an LSTM with I = H and a
dense layer on its last step, in float32. Each way has a process of its own, and they are asked in turn. Prints the
milliseconds of a step, each the median of the rounds, and how many times blockcell's that is, with quartiles.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import turns
from machine import CPUS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CLASSES = 10
SIZES = {f"{T}x{B}x{H}": (T, B, H) for B, H in ((1, 32), (16, 128), (64, 256)) for T in (10, 50, 200)}
Call = Callable[[], object]


def draw_data(T: int, B: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    return g.uniform(-1, 1, (T, B, H)).astype(np.float32), g.integers(0, CLASSES, B)


def make_network(inputs: int, hidden: int) -> object:
    from blockcell import LSTM, Dense, Stack

    return Stack([LSTM.init(inputs, hidden, seed=1), Dense.init(hidden, CLASSES, seed=2, last=True)])


def make_our_step(T: int, B: int, H: int) -> Call:
    from blockcell import loss, optim

    net = make_network(H, H)
    (x, target), memory = draw_data(T, B, H), None

    def step() -> None:
        nonlocal memory
        y, _, tape = net.forward(x)
        grads = net.backward(tape, loss.softmax_cross_entropy(y, target)[1])[2]
        grads, _ = optim.clip_global_norm(grads, 1.0)
        weights, memory = optim.adam(net.weights, grads, memory, learning_rate=1e-3)
        net.set_weights(**weights)

    return step


def make_onnx_step(T: int, B: int, H: int) -> Call:
    from onnx_export import TrainingSession, training_step

    net = make_network(H, H)
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "max_norm": 1.0, "lengths": False}
    session = TrainingSession(training_step(net, None, **options), net)
    x, target = draw_data(T, B, H)
    return lambda: session(x=x, target=target, learning_rate=1e-3)


def make_torch_step(T: int, B: int, H: int) -> Call:
    import torch

    torch.set_num_threads(CPUS)
    lstm, dense = torch.nn.LSTM(H, H), torch.nn.Linear(H, CLASSES)
    weights = [*lstm.parameters(), *dense.parameters()]
    adam, (x, target) = torch.optim.Adam(weights, lr=1e-3), map(torch.as_tensor, draw_data(T, B, H))

    def step() -> None:
        adam.zero_grad()
        torch.nn.functional.cross_entropy(dense(lstm(x)[0][-1]), target).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()

    return step


WAYS = {"blockcell": make_our_step, "ONNX": make_onnx_step, "PyTorch": make_torch_step}


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=5, seconds=0.3)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="SIZE")
    options = parser.parse_args()
    import onnxruntime
    import torch

    import blockcell

    versions = f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__}, {CPUS} threads"
    print(f"{blockcell.build_info()['cpu']}, {versions}\n")
    with turns.open_workers({way: turns.Worker(__file__, "--work", way) for way in WAYS}) as workers:
        heads = [head for way in [*WAYS][1:] for head in (f"{way}, ms", "times blockcell's")]
        turns.print_heads(["T", "B", "H", "blockcell, ms", *heads])
        guard = turns.watch(workers.values())
        for size in options.only:
            ask = partial(turns.ask_all, workers, size, options.seconds)
            rounds = turns.select_rounds(guard.rounds(CPUS, ask, options.rounds))
            own, *others = ([times[way] for times in rounds] for way in WAYS)
            cells = [f"{1e3 * statistics.median(own):.2f}"]
            for other in others:
                cells += [f"{1e3 * statistics.median(other):.2f}", turns.ratio_cell(other, own)]
            turns.print_row([*SIZES[size], *cells])


if __name__ == "__main__":
    turns.run_program(main, lambda way: turns.answer_seconds(lambda size: WAYS[way](*SIZES[size])))
