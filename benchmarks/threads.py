"""Calls a second of layers from several Python threads of one process, each call on one thread of its own.

    python benchmarks/threads.py [--threads 1 2] [--sizes 10x1x32 50x1x128 50x16x64] [--rounds 5] [--seconds 0.5]

Sizes are TxBxH, with I = H. The threads use one layer together, or each its own; a call is inference, or training
(`forward` and `backward`); a stream is one for each thread, in blocks of T steps. The numbers of threads take turns; a
figure is the median of the rounds, and what stands behind it the median of the rounds' ratios to one thread. Nothing
else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blockcell
from blockcell import GRU, LSTM

Call = Callable[[], object]


def candidates(kind: type[LSTM] | type[GRU], T: int, B: int, H: int, threads: int) -> dict[str, list[Call]]:
    """What each thread calls."""
    x = np.random.default_rng(0).standard_normal((T, B, H)).astype(np.float32)
    layers = [kind.init(H, H, seed=0) for _ in range(threads)]
    streams = [layer.stream(B) for layer in layers]

    def training(layer: LSTM | GRU) -> Call:
        def call() -> None:
            y, _, tape = layer.forward(x)
            layer.backward(tape, y)

        return call

    return {
        "inference, one layer": [lambda: layers[0](x)] * threads,
        "inference, own layers": [lambda layer=layer: layer(x) for layer in layers],
        "training, one layer": [training(layers[0])] * threads,
        "training, own layers": [training(layer) for layer in layers],
        "own streams": [lambda stream=stream: stream.run(x) for stream in streams],
    }


def calls_a_second(calls: list[Call], seconds: float) -> float:
    """Of all threads together."""
    counts, gate = [0] * len(calls), threading.Barrier(len(calls) + 1)
    times = [0.0] * len(calls)

    def work(k: int) -> None:
        calls[k]()
        gate.wait()
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < seconds:
            calls[k]()
            counts[k] += 1
        times[k] = now

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    return sum(count / spent for count, spent in zip(counts, times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="the first is compared with")
    parser.add_argument("--sizes", nargs="+", default=["10x1x32", "50x1x128", "50x16x64"], metavar="TxBxH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    blockcell.set_num_threads(1)
    print(f"{os.cpu_count()} CPUs, {blockcell.build_info()['cpu']}; thousands of calls a second")
    print(f"{'':38}" + "".join(f"{f'{n} threads':>18}" for n in options.threads))
    for size in options.sizes:
        T, B, H = map(int, size.split("x"))
        for kind in (LSTM, GRU):
            calls = {n: candidates(kind, T, B, H, n) for n in options.threads}
            for name in calls[options.threads[0]]:
                rounds = [
                    [calls_a_second(calls[n][name], options.seconds) for n in options.threads]
                    for _ in range(options.rounds)
                ]
                line = f"{kind.__name__:5}{size:11}{name:22}"
                for k, found in enumerate(zip(*rounds, strict=True)):
                    ratio = statistics.median(one[k] / one[0] for one in rounds)
                    line += f"{statistics.median(found) / 1000:9.2f} ({ratio:.2f} x)"
                print(line, flush=True)


if __name__ == "__main__":
    main()
