"""Measure many sessions in one process, some ready at a time: thousand session steps a second, on one thread.

Needed by: docs/serving.md

    python benchmarks/sessions.py [--sessions 200] [--ready 60] [--cells 128] [--rounds 5] [--seconds 0.3]

The network is two LSTMs, one above the other.  At each turn other sessions, drawn at random, have one step of input.
All ways but onnxruntime give each session the bits that it has alone; they take turns, and a figure is the median of
the rounds.

* rows of a stream: a stream of all sessions, of which those that are ready step.
* Sessions: `blockcell.Sessions`, which are fed and then step.
* a stream each: a stream of one row for every session.
* onnxruntime, gathered: arrays with a row of states for each session, of which numpy gathers those that are ready for a
  run of an exported model of ONNX's own LSTM nodes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from candidates import open_session
from turns import make_parser, seconds

import blockcell
from blockcell import LSTM, Sessions, Stack
from onnx_export import export

TURNS = 50
ONNXRUNTIME = "onnxruntime, gathered"
Array = np.ndarray[Any, Any]
Step = Callable[[Array, Array], Array]  # rows [n] and their x [n,I] to their y [n,H]


def make_steps(net: Stack, sessions: int) -> dict[str, Step]:
    streams = [net.stream() for _ in range(sessions)]
    of_rows, served = net.stream(sessions), Sessions(net, capacity=sessions)
    ids = [served.open() for _ in range(sessions)]

    def rows_of_a_stream(rows: Array, x: Array) -> Array:
        return of_rows.step(x, rows=rows)

    def serve(rows: Array, x: Array) -> Array:
        for row, input_of_row in zip(rows, x, strict=True):
            served.feed(ids[row], input_of_row)
        y = served.step()
        return np.array([y[ids[row]] for row in rows])

    def stream_each(rows: Array, x: Array) -> Array:
        return np.concatenate([streams[row].step(x[k : k + 1]) for k, row in enumerate(rows)])

    return {
        "rows of a stream": rows_of_a_stream,
        "Sessions": serve,
        "a stream each": stream_each,
        ONNXRUNTIME: gather_with_onnxruntime(net, sessions),
    }


def gather_with_onnxruntime(net: Stack, sessions: int) -> Step:
    """Return a step by onnxruntime, on one thread, with states in a table."""
    session = open_session(export(net, None, loop="native", lengths=False).SerializeToString(), threads=1)
    table = {tensor.name: np.zeros((sessions, net.hidden_size), np.float32) for tensor in session.get_inputs()[1:]}

    def step(rows: Array, x: Array) -> Array:
        y, *states = session.run(None, {"x": x[None], **{name: array[rows] for name, array in table.items()}})
        for array, last in zip(table.values(), states, strict=True):
            array[rows] = last
        return y[0]

    return step


def main() -> None:
    parser = make_parser(__doc__, rounds=5, seconds=0.3)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--ready", type=int, default=60, help="at a time")
    parser.add_argument("--cells", type=int, default=128)
    options = parser.parse_args()
    blockcell.set_num_threads(1)
    H, n = options.cells, options.ready
    net = Stack([LSTM.init(H, H, seed=1), LSTM.init(H, H, seed=2)])
    rng = np.random.default_rng(0)
    rows = [rng.choice(options.sessions, n, replace=False) for _ in range(TURNS)]
    xs = rng.standard_normal((TURNS, n, H)).astype(np.float32)
    steps = make_steps(net, options.sessions)
    y = {name: np.concatenate([step(*turn) for turn in zip(rows, xs, strict=True)]) for name, step in steps.items()}
    expected = y["a stream each"]
    for name, mine in y.items():
        same = np.allclose(mine, expected, atol=1e-5) if name == ONNXRUNTIME else np.array_equal(mine, expected)
        assert same, f"{name} differs"
    rates: dict[str, list[float]] = {name: [] for name in steps}
    turns = itertools.cycle(zip(rows, xs, strict=True))
    for _ in range(options.rounds):
        for name, step in steps.items():
            rates[name].append(n / seconds(lambda step=step: step(*next(turns)), options.seconds) / 1e3)
    for name, mine in rates.items():
        print(f"{name:24}{statistics.median(mine):6.0f}   ({min(mine):.0f} to {max(mine):.0f})")


if __name__ == "__main__":
    main()
