"""What a step of training costs as an ONNX model, beside blockcell's kernels and optimizers, and beside PyTorch.

    python benchmarks/training_steps.py [--rounds 5] [--seconds 0.3] [--only SIZE ...] [--threads 1]

A step is forward, softmax cross-entropy, backward, clipping by the global norm, and adam, of an LSTM with I = H and a
dense layer on its last step, in float32. Each way has a process of its own, and they are asked in turn. Prints the
milliseconds of a step, each the median of the rounds, and how many times ours that is; the last line of each batch is
what a further step of the sequence costs, from the shortest to the longest. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from turns import Worker, answer, seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
CLASSES = 10
SIZES = {f"{T}x{B}x{H}": (T, B, H) for B, H in ((1, 32), (16, 128), (64, 256)) for T in (10, 50, 200)}
WAYS = ("blockcell", "ONNX", "PyTorch")
Call = Callable[[], object]


def data(T: int, B: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    return g.uniform(-1, 1, (T, B, H)).astype(np.float32), g.integers(0, CLASSES, B)


def ours(T: int, B: int, H: int, threads: int) -> Call:
    import blockcell
    from blockcell import LSTM, Dense, Stack, loss, optim

    blockcell.set_num_threads(threads)
    net = Stack([LSTM.init(H, H, seed=1), Dense.init(H, CLASSES, seed=2, last=True)])
    (x, target), memory = data(T, B, H), None

    def step() -> None:
        nonlocal memory
        y, _, tape = net.forward(x)
        grads = net.backward(tape, loss.softmax_cross_entropy(y, target)[1])[2]
        grads, _ = optim.clip_global_norm(grads, 1.0)
        weights, memory = optim.adam(net.weights, grads, memory, learning_rate=1e-3)
        net.set_weights(**weights)

    return step


def onnx(T: int, B: int, H: int, threads: int) -> Call:
    from blockcell import LSTM, Dense, Stack
    from onnx_export import TrainingSession, runtime, training_step

    plain = runtime.Running.__init__

    def limited(self, model, provider, sizes=None, settings=None, provider_options=None):  # type: ignore[no-untyped-def]
        plain(self, model, provider, sizes, {"intra_op_num_threads": threads}, provider_options)

    runtime.Running.__init__ = limited  # type: ignore[method-assign]
    net = Stack([LSTM.init(H, H, seed=1), Dense.init(H, CLASSES, seed=2, last=True)])
    options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "max_norm": 1.0, "lengths": False}
    session = TrainingSession(training_step(net, None, **options), net)  # type: ignore[arg-type]
    x, target = data(T, B, H)
    return lambda: session(x=x, target=target, learning_rate=1e-3)


def pytorch(T: int, B: int, H: int, threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    lstm, dense = torch.nn.LSTM(H, H), torch.nn.Linear(H, CLASSES)
    weights = [*lstm.parameters(), *dense.parameters()]
    adam, (x, target) = torch.optim.Adam(weights, lr=1e-3), map(torch.as_tensor, data(T, B, H))

    def step() -> None:
        adam.zero_grad()
        torch.nn.functional.cross_entropy(dense(lstm(x)[0][-1]), target).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()

    return step


def work(way: str, threads: int) -> None:
    """Answers a size with the seconds of a step."""
    made: dict[str, Call] = {}

    def reply(question: tuple[str, float]) -> float:
        size, budget = question
        if size not in made:
            made.clear()
            made[size] = {"blockcell": ours, "ONNX": onnx, "PyTorch": pytorch}[way](*SIZES[size], threads)
            made[size]()
        return seconds(made[size], budget)

    answer(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="SIZE")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    import onnxruntime
    import torch

    import blockcell

    workers = {way: Worker(__file__, "--work", way, str(options.threads)) for way in WAYS}
    told = f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__}, {options.threads} threads"
    print(f"{blockcell.build_info()['cpu']}, {told}\n")
    print("| T | B | H | blockcell, ms | ONNX, ms | | PyTorch, ms | |\n|---|---|---|---|---|---|---|---|")
    found: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
    for size in options.only:
        T, B, H = SIZES[size]
        rounds = [
            {way: worker.ask((size, options.seconds)) for way, worker in workers.items()} for _ in range(options.rounds)
        ]
        median = {way: statistics.median(one[way] for one in rounds) for way in WAYS}
        ratio = {way: statistics.median(one[way] / one["blockcell"] for one in rounds) for way in WAYS}
        found.setdefault((B, H), {})[T] = median
        cells = [f"{1e3 * median[way]:.2f} | {ratio[way]:.2f}x" for way in WAYS[1:]]
        print(f"| {T} | {B} | {H} | {1e3 * median['blockcell']:.2f} | {' | '.join(cells)} |", flush=True)
    print("\n| B | H | a further step: blockcell, us | ONNX, us | PyTorch, us |\n|---|---|---|---|---|")
    for (B, H), by_length in found.items():
        if len(by_length) > 1:
            short, long = min(by_length), max(by_length)
            further = [1e6 * (by_length[long][way] - by_length[short][way]) / (long - short) for way in WAYS]
            print(f"| {B} | {H} | {' | '.join(f'{one:.0f}' for one in further)} |")
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        main()
