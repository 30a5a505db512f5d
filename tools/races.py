"""Run all that threads do together, in teams of groups of any form and in several Python threads at once.

    python tools/races.py [lstm | gru | rnn | dense]

Results must have the bits that one thread alone gives; BLOCKCELL_LEVEL says at which CPU level.
Run by `sanitizers.py threads` where ThreadSanitizer watches, by `freethreading.py` where there is no GIL, and by hand.
Takes ten seconds at a level, under ThreadSanitizer minutes.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
from bits import leaves, same, with_grid
from cases import arguments
from kernel_cases import DTYPES, run, sizes_of
from layer_cases import LAYERS, draw, halved_weights, outputs_by_weights, run_all

import blockcell
from blockcell import _team
from blockcell._kernels import bind
from blockcell.optable import OPS

GRIDS = ((2, 1), (1, 2), (1, 3), (2, 4), (8, 1), (1, 8))  # groups, members
draw_two_grids = partial(random.Random(1).sample, GRIDS, 2)  # for each case, as ThreadSanitizer is slow
# T, B, I, H by what decides the way: rows or lines split among the threads; one row, several, or more than the input
# product takes at once; weights packed before a single step, in it, or not at all, and threads without a panel; more
# rows (t, b) than a weight gradient's block.
SIZES = [(5, 60, 16, 32), (5, 3, 40, 96), (6, 1, 40, 160), (1, 20, 70, 130), (1, 130, 24, 64), (1, 3, 400, 50)]
WIDE = (2, 49, 8, 264)
LAYER_SIZES = [(5, 60, 16, 32), (5, 3, 40, 96), (6, 1, 40, 160), (1, 20, 70, 130)]
PYTHON_THREADS = 8
JOBS = 12  # of each
comparisons: Counter[str] = Counter()
differences: list[str] = []


def compare(results: Any, expected: Any, label: str) -> None:
    """Count a comparison by the first word of its label, and keep the label if any bits differ."""
    comparisons[label.split()[0]] += 1
    if not same(results, expected):
        differences.append(label)


def check_ops(family: str) -> None:
    """Compare ops of a family, on teams of several grids, with one thread."""
    for name in OPS:
        if family not in name.lower():
            continue
        for dtype in DTYPES:
            for sizes in [*SIZES, *([WIDE] if dtype == "float32" else [])]:
                args = arguments(name, sizes_of(*sizes), dtype=DTYPES[dtype])
                expected = run(name, args, num_threads=1)
                for grid in draw_two_grids() if sizes is not WIDE else GRIDS[-1:]:
                    with with_grid(*grid):
                        results = run(name, args, num_threads=8, call=bind(OPS[name]).run)
                    compare(results, expected, f"ops {name} {dtype} {sizes} {grid}")


def check_layers(family: str) -> None:
    """Compare calls and passes of layers of a family on several grids."""
    for name in (
        "lstm",
        "bidirectional lstm",
        "projected coupled lstm",
        "softplus lstm",
        "gru",
        "bidirectional gru",
        "gru reset after",
        "bidirectional gru reset after",
        "rnn",
        "dense alone",
        "dense softmax",
    ):
        if family not in name:
            continue
        for dtype in DTYPES:
            for T, B, I, H in LAYER_SIZES:  # noqa: E741
                layer = LAYERS[name](I, H, DTYPES[dtype])
                x, state, lengths, reset = draw(layer, T, B)
                for options in ({}, {"lengths": lengths, "reset": reset}):
                    expected = None
                    for grid in ((1, 1), *draw_two_grids()):
                        with with_grid(*grid):
                            layer_copy = copy.copy(layer)  # has no plan yet
                            results = [
                                layer_copy(x, state)[0],
                                *itertools.chain(*run_all(layer_copy, x, state, **options)),
                            ]
                        if expected is not None:
                            compare(results, expected, f"layers {name} {dtype} {T, B, I, H} {grid}")
                        expected = results


def check_streams(family: str) -> None:
    """Compare steps and blocks of streams of a family, of all rows or in another order, with a call of the layer."""
    for name in ("lstm", "projected coupled lstm", "gru", "gru reset after", "rnn", "dense softmax"):
        if family not in name:
            continue
        for dtype in DTYPES:
            for T, B, I, H in LAYER_SIZES:  # noqa: E741
                layer = LAYERS[name](I, H, DTYPES[dtype])
                x = draw(layer, T, B)[0]
                for scheme in (None, "float16", "int8") if dtype == "float32" else (None,):
                    streaming_layer = layer.quantize(scheme) if scheme else layer
                    with with_grid(1, 1):
                        expected, last = streaming_layer(x)
                    grid = draw_two_grids()[0]
                    with with_grid(*grid):
                        stream = streaming_layer.stream(B)
                        outputs = [stream.step(step_x) for step_x in x]
                        label = f"streams {name} {dtype} {scheme} {T, B, I, H} {grid}"
                        compare([np.stack(outputs), *leaves(stream.state)], [expected, *leaves(last)], label)
                        stream.reset()
                        outputs = [stream.run(x[a:b]) for a, b in itertools.pairwise(sorted({0, 1, T // 2, T}))]
                        compare([np.concatenate(outputs), *leaves(stream.state)], [expected, *leaves(last)], label)
                        stream.reset()
                        order = np.arange(B)[::-1]
                        outputs = stream.run(x[:, order], rows=order)
                        compare([outputs[:, order], *leaves(stream.state)], [expected, *leaves(last)], f"{label} rows")


def check_shared(name: str, team: int) -> None:
    """Compare what Python threads get that share ops, and layers, whose weights one of them replaces all the time.

    Streams are their own."""
    blockcell.set_num_threads(team)
    changing_layer, fixed_layer = (LAYERS[name](12, 32, np.float32) for _ in range(2))
    inputs = [draw(fixed_layer, 2 + k, 3 + 7 * k, name) for k in range(4)]
    weights = [changing_layer.weights, halved_weights(changing_layer)]
    possible_outputs = outputs_by_weights(changing_layer, weights, [(x, state) for x, state, *_ in inputs])
    passes = [run_all(fixed_layer, x, state, lengths=lengths, reset=reset) for x, state, lengths, reset in inputs]
    op_names = [op for op in OPS if name in op.lower()]
    args = {op: [arguments(op, sizes_of(3, 2 + 9 * k, 12, 32)) for k in range(4)] for op in op_names}
    expected = {op: [run(op, inputs_of_op, num_threads=1) for inputs_of_op in args[op]] for op in op_names}

    def swap() -> None:
        """Replace the weights of the changing layer again and again."""
        for k in range(8 * JOBS):
            changing_layer.set_weights(**weights[k % 2])

    def work(seed: int) -> None:
        """Call layers, a stream and ops on inputs that are drawn, and compare the results."""
        for k in np.random.default_rng(seed).integers(0, 4, JOBS):
            label = f"python-threads {name} {team} {k}"
            x, state, lengths, reset = inputs[k]
            y = changing_layer(x, state)[0]
            compare([y], [possible_outputs[same([y], [possible_outputs[1][k]])][k]], label)
            results = run_all(fixed_layer, x, state, lengths=lengths, reset=reset)
            for arrays, expected_arrays in zip(results, passes[k], strict=True):
                compare(arrays, expected_arrays, label)
            stream = fixed_layer.stream(x.shape[1])
            stream.state = state
            compare([np.stack([stream.step(step_x) for step_x in x])], [fixed_layer(x, state)[0]], label)
            for op in op_names:
                compare(run(op, args[op][k], num_threads=team), expected[op][k], f"{label} {op}")

    with ThreadPoolExecutor(PYTHON_THREADS) as pool:
        for job in [pool.submit(swap), *(pool.submit(work, seed) for seed in range(1, PYTHON_THREADS))]:
            job.result()


def check_python_threads(family: str) -> None:
    """Run check_shared for cells of a family, on teams of one and of two threads."""
    for name in ("lstm", "gru", "gru reset after", "rnn"):
        for team in (1, 2):
            if family in name:
                check_shared(name, team)


if __name__ == "__main__":
    start = time.perf_counter()
    blockcell.set_num_threads(8)
    _team.adapt(False)  # as many threads as are asked for, also where the machine is busy
    for check in (check_ops, check_layers, check_streams, check_python_threads):
        check(sys.argv[1] if len(sys.argv) > 1 else "")
    if differences:
        sys.exit("not the bits of one thread:\n" + "\n".join(differences))
    counts = ", ".join(f"{count} of {kind}" for kind, count in comparisons.items())
    print(f"comparisons at level {blockcell.build_info()['level']}: {counts}; {time.perf_counter() - start:.0f} s")
