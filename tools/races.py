"""All that threads do together, in teams of groups of any form and in several Python threads at once.

    python tools/races.py [lstm | gru | rnn | dense]

Results must have the bits that one thread alone gives; BLOCKCELL_LEVEL says at which CPU level.
`sanitizers.py threads` runs this where ThreadSanitizer watches, `freethreading.py` where there is no GIL.
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
from bits import leaves, with_grid
from cases import arguments
from kernel_cases import DTYPES, run, same_bits, sizes_of
from layer_cases import LAYERS, draw, run_all

import blockcell
from blockcell import _team
from blockcell._bind import bind
from blockcell.optable import OPS

GRIDS = ((2, 1), (1, 2), (1, 3), (2, 4), (8, 1), (1, 8))  # groups, members
two_grids = partial(random.Random(1).sample, GRIDS, 2)  # for each case, as ThreadSanitizer is slow
# T, B, I, H by what decides the way: rows or lines split among the threads; one row, several, or more than the input
# product takes at once; weights packed before a single step, in it, or not at all, and threads without a panel; more
# rows (t, b) than a weight gradient's block.
SIZES = [(5, 60, 16, 32), (5, 3, 40, 96), (6, 1, 40, 160), (1, 20, 70, 130), (1, 130, 24, 64), (1, 3, 400, 50)]
WIDE = (2, 49, 8, 264)
LAYER_SIZES = [(5, 60, 16, 32), (5, 3, 40, 96), (6, 1, 40, 160), (1, 20, 70, 130)]
PYTHON_THREADS = 8
JOBS = 12  # of each
done: Counter[str] = Counter()
wrong: list[str] = []


def same(found: Any, expected: Any, what: str) -> None:
    done[what.split()[0]] += 1
    if not same_bits(found, expected):
        wrong.append(what)


def ops(family: str) -> None:
    for name in OPS:
        if family not in name.lower():
            continue
        for dtype in DTYPES:
            for sizes in [*SIZES, *([WIDE] if dtype == "float32" else [])]:
                args = arguments(name, sizes_of(*sizes), dtype=DTYPES[dtype])
                expected = run(name, args, num_threads=1)
                for grid in two_grids() if sizes is not WIDE else GRIDS[-1:]:
                    with with_grid(*grid):
                        found = run(name, args, num_threads=8, call=bind(OPS[name]).run)
                    same(found, expected, f"ops {name} {dtype} {sizes} {grid}")


def layers(family: str) -> None:
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
                for given in ({}, {"lengths": lengths, "reset": reset}):
                    expected = None
                    for grid in ((1, 1), *two_grids()):
                        with with_grid(*grid):
                            one = copy.copy(layer)  # has no plan yet
                            found = [one(x, state)[0], *itertools.chain(*run_all(one, x, state, **given))]
                        if expected is not None:
                            same(found, expected, f"layers {name} {dtype} {T, B, I, H} {grid}")
                        expected = found


def streams(family: str) -> None:
    for name in ("lstm", "projected coupled lstm", "gru", "gru reset after", "rnn", "dense softmax"):
        if family not in name:
            continue
        for dtype in DTYPES:
            for T, B, I, H in LAYER_SIZES:  # noqa: E741
                layer = LAYERS[name](I, H, DTYPES[dtype])
                x = draw(layer, T, B)[0]
                for scheme in (None, "float16", "int8") if dtype == "float32" else (None,):
                    made_of = layer.quantize(scheme) if scheme else layer
                    with with_grid(1, 1):
                        expected, last = made_of(x)
                    grid = two_grids()[0]
                    with with_grid(*grid):
                        stream = made_of.stream(B)
                        found = [stream.step(each) for each in x]
                        what = f"streams {name} {dtype} {scheme} {T, B, I, H} {grid}"
                        same([np.stack(found), *leaves(stream.state)], [expected, *leaves(last)], what)
                        stream.reset()
                        found = [stream.run(x[a:b]) for a, b in itertools.pairwise(sorted({0, 1, T // 2, T}))]
                        same([np.concatenate(found), *leaves(stream.state)], [expected, *leaves(last)], what)
                        stream.reset()
                        order = np.arange(B)[::-1]
                        found = stream.run(x[:, order], rows=order)
                        same([found[:, order], *leaves(stream.state)], [expected, *leaves(last)], f"{what} rows")


def shared(name: str, team: int) -> None:
    """Python threads share ops, and layers, whose weights one of them replaces all the time; streams are their own."""
    blockcell.set_num_threads(team)
    changing, fixed = (LAYERS[name](12, 32, np.float32) for _ in range(2))
    inputs = [draw(fixed, 2 + k, 3 + 7 * k, name) for k in range(4)]
    old = changing.weights
    weights = [old, {key: value * np.float32(0.5) for key, value in old.items()}]
    possible: list[list[Any]] = [[], []]
    for one, results in zip(weights, possible, strict=True):
        changing.set_weights(**one)
        results += [changing(x, state)[0] for x, state, _, _ in inputs]
    passes = [run_all(fixed, x, state, lengths=lengths, reset=reset) for x, state, lengths, reset in inputs]
    ops = [op for op in OPS if name in op.lower()]
    args = {op: [arguments(op, sizes_of(3, 2 + 9 * k, 12, 32)) for k in range(4)] for op in ops}
    expected = {op: [run(op, each, num_threads=1) for each in args[op]] for op in ops}

    def swap() -> None:
        for k in range(8 * JOBS):
            changing.set_weights(**weights[k % 2])

    def work(seed: int) -> None:
        for k in np.random.default_rng(seed).integers(0, 4, JOBS):
            what = f"python-threads {name} {team} {k}"
            x, state, lengths, reset = inputs[k]
            y = changing(x, state)[0]
            same([y], [possible[same_bits([y], [possible[1][k]])][k]], what)
            for part, one in zip(run_all(fixed, x, state, lengths=lengths, reset=reset), passes[k], strict=True):
                same(part, one, what)
            stream = fixed.stream(x.shape[1])
            stream.state = state
            same([np.stack([stream.step(each) for each in x])], [fixed(x, state)[0]], what)
            for op in ops:
                same(run(op, args[op][k], num_threads=team), expected[op][k], f"{what} {op}")

    with ThreadPoolExecutor(PYTHON_THREADS) as pool:
        for job in [pool.submit(swap), *(pool.submit(work, seed) for seed in range(1, PYTHON_THREADS))]:
            job.result()


def python_threads(family: str) -> None:
    for name in ("lstm", "gru", "gru reset after", "rnn"):
        for team in (1, 2):
            if family in name:
                shared(name, team)


if __name__ == "__main__":
    start = time.perf_counter()
    blockcell.set_num_threads(8)
    _team.adapt(False)  # as many threads as are asked for, also where the machine is busy
    for part in (ops, layers, streams, python_threads):
        part(sys.argv[1] if len(sys.argv) > 1 else "")
    if wrong:
        sys.exit("not the bits of one thread:\n" + "\n".join(wrong))
    counts = ", ".join(f"{count} of {kind}" for kind, count in done.items())
    print(f"comparisons at level {blockcell.build_info()['level']}: {counts}; {time.perf_counter() - start:.0f} s")
