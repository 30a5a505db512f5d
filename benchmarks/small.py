"""Measure the cost of small calls: a training step of the classifier in docs/layers.md in parts, beside PyTorch's,
and the import of blockcell.

Needed by: docs/performance.md

    python benchmarks/small.py [--threads N]

Prints Markdown: microseconds of each line of the training loop, in the loop, as medians over its steps; ours and
PyTorch's, if that is installed, take turns.  Then a step of adam with many weights; and the import, in a fresh process
that has imported numpy, with its bytecode compiled before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import numpy as np
from turns import make_parser, print_heads, print_row, seconds

import blockcell
from blockcell import LSTM, Dense, Stack, loss, optim

try:
    import torch
except ImportError:
    torch = None

Step = Callable[[], Iterator[None]]  # stops after each part
SIZES = [(1, 1), (10, 8)]  # T, B
H, CLASSES, RATE = 16, 2, 0.02
PARTS = ("forward", "loss", "backward", "adam", "set_weights")
ROUNDS, STEPS, IMPORTS = 10, 300, 15
IMPORT = "import time, numpy; start = time.perf_counter(); import blockcell; print(time.perf_counter() - start)"


def draw_data(T: int, B: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).uniform(-1, 1, (T, B, 1)).astype(np.float32)
    return x, (x[0, :, 0] > 0).astype(int)


def make_our_step(T: int, B: int) -> Step:
    x, labels = draw_data(T, B)
    net = Stack([LSTM.init(1, H, seed=1), Dense.init(H, CLASSES, seed=2, last=True)])
    memory = None

    def step() -> Iterator[None]:
        nonlocal memory
        logits, _, tape = net.forward(x)
        yield
        _, d_logits = loss.softmax_cross_entropy(logits, labels)
        yield
        _, _, grads = net.backward(tape, d_logits)
        yield
        weights, memory = optim.adam(net.weights, grads, memory, learning_rate=RATE)
        yield
        net.set_weights(**weights)
        yield

    return step


def make_torch_step(T: int, B: int) -> Step:
    x, labels = map(torch.from_numpy, draw_data(T, B))
    lstm, dense = torch.nn.LSTM(1, H), torch.nn.Linear(H, CLASSES)
    adam = torch.optim.Adam([*lstm.parameters(), *dense.parameters()], lr=RATE)

    def step() -> Iterator[None]:
        logits = dense(lstm(x)[0][-1])
        yield
        mean = torch.nn.functional.cross_entropy(logits, labels)
        yield
        mean.backward()
        yield
        adam.step()
        adam.zero_grad()
        yield

    return step


def median_times(steps: list[Step]) -> list[list[float]]:
    """Return, for each step, the median microseconds of its parts, then of the whole."""
    times_of_steps: list[list[list[int]]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, times in zip(steps, times_of_steps, strict=True):
            stamps = [[perf_counter_ns(), *(perf_counter_ns() for _ in step())] for _ in range(STEPS)]
            times += stamps[STEPS // 10 :]
    results = []
    for times in times_of_steps:
        parts = [statistics.median(column) / 1e3 for column in np.diff(times).T.tolist()]
        results.append([*parts, statistics.median(ticks[-1] - ticks[0] for ticks in times) / 1e3])
    return results


def time_large_adam() -> float:
    """Return the milliseconds of a step of adam with ten million weights."""
    weights, grads = ({"w": np.full(10**7, value, np.float32)} for value in (1.0, 0.5))
    _, memory = optim.adam(weights, grads)
    return 1e3 * seconds(lambda: optim.adam(weights, grads, memory), 1)


def time_imports() -> list[float]:
    """Return the milliseconds of each import but the first, which compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        run = [sys.executable, "-c", IMPORT]
        medians_of_lines = [
            subprocess.run(run, env=environment, stdout=subprocess.PIPE, check=True).stdout for _ in range(IMPORTS + 1)
        ]
    return [float(seconds) * 1e3 for seconds in medians_of_lines[1:]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, help="of both; default: each one's own")
    options = parser.parse_args()
    if options.threads:
        blockcell.set_num_threads(options.threads)
        if torch:
            torch.set_num_threads(options.threads)
    print_heads(["T", "B", "", *PARTS, "step, us"])
    for T, B in SIZES:
        results = median_times([make_our_step(T, B), make_torch_step(T, B)] if torch else [make_our_step(T, B)])
        for name, (*parts, step) in zip(("blockcell", "torch.nn"), results, strict=False):
            shown = [f"{median:.1f}" for median in parts] + [""] * (len(PARTS) - len(parts))
            print_row([T, B, name, *shown, f"{step:.0f}"])
    print(f"\nadam of 10 million weights: {time_large_adam():.1f} ms")
    print(f"import blockcell: {statistics.median(time_imports()):.1f} ms beside numpy")


if __name__ == "__main__":
    main()
