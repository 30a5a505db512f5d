"""Many sessions in one process, of which some are ready at a time: thousand steps of sessions a second, on one thread.

    python benchmarks/sessions.py [--sessions 200] [--ready 60] [--cells 128] [--rounds 5] [--seconds 0.3]

The network is two LSTMs, one above the other.  At each turn other sessions, drawn at random, have one step of input.
All ways give each session the bits that it has alone; they take turns, and a figure is the median of the rounds.

* a stream each: a stream of one row for every session.
* a table of states: arrays with a row for each session; the states of those that are ready are gathered for one call of
  the layer, and scattered after it.
* a stream for all: it runs all rows, and the states of those that were not ready are put back.
* a mask for all: one call with all rows, of which `mask` counts those that are ready.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from turns import seconds

import blockcell
from blockcell import LSTM, Stack

TURNS = 50
Array = np.ndarray[Any, Any]
Step = Callable[[Array, Array], Array]  # rows [n] and their x [n,I] to their y [n,H]


def ways(net: Stack, sessions: int) -> dict[str, Step]:
    zeros = [np.zeros((sessions, layer.hidden_size), net.dtype) for layer in net.layers for _ in range(2)]
    each = [net.stream() for _ in range(sessions)]
    for_all = net.stream(sessions)
    table, masked = [array.copy() for array in zeros], [array.copy() for array in zeros]
    padded = np.zeros((sessions, net.input_size), net.dtype)

    def stream_each(rows: Array, x: Array) -> Array:
        return np.concatenate([each[row].step(x[k : k + 1]) for k, row in enumerate(rows)])

    def table_of_states(rows: Array, x: Array) -> Array:
        y, state = net(x[None], pairs([array[rows] for array in table]))
        for array, last in zip(table, itertools.chain(*state), strict=True):
            array[rows] = last
        return y[0]

    def stream_for_all(rows: Array, x: Array) -> Array:
        padded[rows] = x
        before = [array.copy() for array in itertools.chain(*for_all.state)]
        y = for_all.step(padded)
        after = [*itertools.chain(*for_all.state)]
        for array, last in zip(before, after, strict=True):
            array[rows] = last[rows]
        for_all.state = pairs(before)
        return y[rows]

    def mask_for_all(rows: Array, x: Array) -> Array:
        nonlocal masked
        padded[rows] = x
        ready = np.zeros((1, sessions), bool)
        ready[0, rows] = True
        y, state = net(padded[None], pairs(masked), mask=ready)
        masked = [*itertools.chain(*state)]
        return y[0, rows]

    return {
        "a stream each": stream_each,
        "a table of states": table_of_states,
        "a stream for all": stream_for_all,
        "a mask for all": mask_for_all,
    }


def pairs(arrays: list[Array]) -> list[tuple[Array, Array]]:
    """The arrays as states of LSTMs, (cs, h) each."""
    return [(arrays[k], arrays[k + 1]) for k in range(0, len(arrays), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--ready", type=int, default=60, help="at a time")
    parser.add_argument("--cells", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a round of one way")
    options = parser.parse_args()
    blockcell.set_num_threads(1)
    H, n = options.cells, options.ready
    net = Stack([LSTM.init(H, H, seed=1), LSTM.init(H, H, seed=2)])
    rng = np.random.default_rng(0)
    rows = [rng.choice(options.sessions, n, replace=False) for _ in range(TURNS)]
    xs = rng.standard_normal((TURNS, n, H)).astype(np.float32)
    found = ways(net, options.sessions)
    [first, *others] = [np.concatenate([step(*turn) for turn in zip(rows, xs, strict=True)]) for step in found.values()]
    assert all(np.array_equal(first, other) for other in others), "the ways differ"
    rates: dict[str, list[float]] = {name: [] for name in found}
    turns = itertools.cycle(zip(rows, xs, strict=True))
    for _ in range(options.rounds):
        for name, step in found.items():
            rates[name].append(n / seconds(lambda step=step: step(*next(turns)), options.seconds) / 1e3)
    for name, mine in rates.items():
        print(f"{name:20}{statistics.median(mine):6.0f}   ({min(mine):.0f} to {max(mine):.0f})")


if __name__ == "__main__":
    main()
