"""Measure what quantization costs in accuracy, on trained layers.

Needed by: docs/quantization.md

    python benchmarks/accuracy.py [--csv docs/benchmarks/quantization-scores.csv]   # needs the extra bench

The scores are those of layers on what they were made for:

* the networks of `blockcell demo`, and the digits they have not seen: how many are right;
* an LSTM and a GRU that read Python's language reference, as `help()` shows it, character by character, and the last
  tenth of it, which they have not seen: the perplexity, of one character (trained for a minute each, on one thread);
* an LSTM that follows a saturating resonator over 4000 steps of noise it has not seen, as models of audio do: how far
  off it is; "mixed" has the LSTM in int8 and the Dense in float32.

Peers that can express the layer are measured too: the int8 LSTM of onnxruntime and the int8 LSTM and GRU of torch,
which quantize x and h too, and OpenVINO in bfloat16, its default where the CPU multiplies bfloat16.  A Dense above them
stays float32.  docs/quantization.md has a table of the file, by report.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import quantization
from machine import CPUS
from turns import make_parser, write_table

COLUMNS = ["data", "layer", "quantized to", "score"]
CELLS, ROWS, CHUNK, EPOCHS, LEARNING_RATE = 192, 32, 64, 6, 0.005  # of the layers that read characters
THREADS = CPUS  # of peers: onnxruntime has a scale of h for the rows of each
PEERS = ("onnxruntime int8", "torch int8", "OpenVINO bfloat16")


def run_peer(name: str, layer: Any, x: np.ndarray) -> np.ndarray | None:
    """Return y of a peer, or None where it cannot: onnxruntime's `quantize_dynamic` leaves a GRU as it is."""
    from blockcell import LSTM, convert

    if name == "OpenVINO bfloat16":
        import openvino as ov

        peepholes = layer.weights.get("wci") is not None  # it ignores them
        if peepholes or "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            return None
        return quantization.openvino(layer, x, "", THREADS)[1]()
    if name == "onnxruntime int8" and not isinstance(layer, LSTM):
        return None
    try:
        return getattr(quantization, name.split()[0])(layer, x, "int8", THREADS)[1]()
    except convert.ConversionError:  # torch has no peepholes, and no GRU that resets before the product
        return None


def csv_lines(
    data: str, title: str, net: Any, x: np.ndarray, score: Callable[[Any], str], mixed: dict[str, str] | None = None
) -> Iterator[Any]:
    """Yield the lines of a layer and a Dense above it, with float32 in front; `mixed` is one more scheme."""
    from blockcell.optable import SCHEMES

    schemes: dict[str, Any] = {name: name for name in SCHEMES} | ({"mixed": mixed} if mixed else {})
    yield [data, title, "float32", score(net(x)[0])]
    for name, scheme in schemes.items():
        yield [data, title, name, score(net.quantize(scheme)(x)[0])]
    recurrent, dense = net.layers
    for name in PEERS:
        peer_y = run_peer(name, recurrent, x)
        if peer_y is not None:
            yield [data, title, name, score(dense(peer_y)[0])]


def digits() -> Iterator[list[Any]]:
    from blockcell.command import demo

    shown, held_out = demo.load()

    def format_hits(y: Any) -> str:
        return f"{100 * (y[-1].argmax(axis=1) == held_out.labels).mean():.2f} % right"

    for network in demo.new_networks(0):
        demo.train(network, shown, held_out, np.random.default_rng(0), lambda what, done, of: None)
        title = f"{network.name} of {demo.HIDDEN}, Dense"
        yield from csv_lines("digits, held out", title, network.net, held_out.x, format_hits)


def train(network: Any, x: Any, target: Any, loss: Callable[..., Any], epochs: int, chunk: int) -> None:
    """Train by adam on chunks of a sequence, each on from where the last one ended, at a rate that falls to zero."""
    import blockcell
    from blockcell import optim

    blockcell.set_num_threads(1)
    optimizer = None
    for epoch in range(epochs):
        state = None
        for first in range(0, len(target) - chunk + 1, chunk):
            z, state, tape = network.forward(x[first : first + chunk], state)
            _, d_z = loss(z, target[first : first + chunk])
            grads, _ = optim.clip_global_norm(network.backward(tape, d_z)[2], 1.0)
            rate = LEARNING_RATE * (1 - (epoch + first / len(x)) / epochs)
            weights, optimizer = optim.adam(network.weights, grads, optimizer, learning_rate=rate)
            network.set_weights(**weights)


def characters() -> Iterator[list[Any]]:
    from pydoc_data.topics import topics

    from blockcell import GRU, LSTM, Dense, Stack
    from blockcell.loss import softmax_cross_entropy

    pages = " ".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
    alphabet, codes = np.unique([*" ".join(pages.split())], return_inverse=True)
    one_of = np.eye(len(alphabet), dtype=np.float32)

    def split_rows(part: Any, count: int) -> Any:
        steps = len(part) // count
        return part[: count * steps].reshape(count, steps).T

    end = len(codes) * 9 // 10
    text, held_out = split_rows(codes[:end], ROWS), split_rows(codes[end:], ROWS)

    def perplexity(z: Any) -> str:
        return f"{np.exp(softmax_cross_entropy(z, held_out[1:])[0]):.3f} perplexity"

    for name, layer in (
        (f"LSTM of {CELLS}", LSTM.init(len(alphabet), CELLS, seed=0, forget_bias=1.0)),
        (f"GRU(reset_after) of {CELLS}", GRU.init(len(alphabet), CELLS, seed=0, reset_after=True)),
    ):
        network = Stack([layer, Dense.init(CELLS, len(alphabet), seed=1)])
        train(network, one_of[text], text[1:], softmax_cross_entropy, EPOCHS, CHUNK)
        yield from csv_lines("characters, held out", f"{name}, Dense", network, one_of[held_out[:-1]], perplexity)


def resonators() -> Iterator[list[Any]]:
    """Train an LSTM to follow a saturating resonator at noise, as of audio, over 4000 steps."""
    from blockcell import LSTM, Dense, Stack
    from blockcell.loss import mean_squared_error

    def draw_sequences(seed: int, steps: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.random.default_rng(seed).uniform(-1, 1, (steps, rows, 1)), np.zeros((steps, rows, 1))
        for t in range(2, steps):
            y[t] = np.tanh(1.9 * y[t - 1] - 0.95 * y[t - 2] + 0.05 * x[t])
        return x.astype(np.float32), y.astype(np.float32)

    network = Stack([LSTM.init(1, 32, seed=0), Dense.init(32, 1, seed=1)])
    (x, y), (held_out, truth) = draw_sequences(0, 4000, 32), draw_sequences(1, 4000, 8)
    train(network, x, y, mean_squared_error, epochs=40, chunk=200)

    def error(z: Any) -> str:
        return f"{100 * np.sqrt(np.mean((z - truth) ** 2) / np.mean(truth**2)):.2f} % off"

    yield from csv_lines("resonator, 4000 steps", "LSTM of 32, Dense", network, held_out, error, {"0": "int8"})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--csv", type=Path, help="write the lines to this file")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    lines = []
    for line in itertools.chain(digits(), characters(), resonators()):
        lines.append(line)
        print(*line, sep=", ", flush=True)
    if options.csv:
        write_table(options.csv, COLUMNS, lines)


if __name__ == "__main__":
    main()
