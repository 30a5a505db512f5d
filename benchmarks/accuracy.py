"""Measure what quantization costs in accuracy, on trained layers and on initial weights.

Needed by: docs/quantization.md

    python benchmarks/accuracy.py [--csv docs/benchmarks/quantization-errors.csv]   # needs bench and examples

The errors are those of `layer.quantization_report` on what the layers were made for, and the scores of these results:

* the networks of `blockcell demo`, and the digits they have not seen: how many are right;
* an LSTM and a GRU that read Python's language reference, as `help()` shows it, character by character, and the last
  tenth of it, which they have not seen: the perplexity, of one character (trained for a minute each, on one thread);
* the network of examples/sunspots.py, and all years: how far off its forecasts for the next year are;
* an LSTM that follows a saturating resonator over 4000 steps of noise it has not seen, as models of audio do: how far
  off it is; "mixed" has the LSTM in int8 and the Dense in float32;
* initial weights, and standard normal numbers.

Peers that can express the layer are measured too: the int8 LSTM of onnxruntime and the int8 LSTM and GRU of torch,
which quantize x and h too, and OpenVINO in bfloat16, its default where the CPU multiplies bfloat16.  A Dense above them
stays float32.  report.py makes tables of the file.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import quantization
from turns import CPUS, make_parser

COLUMNS = ["data", "layer", "quantized to", "max", "rms", "relative_max", "relative_rms", "nbytes", "score"]
CELLS, ROWS, CHUNK, EPOCHS, LEARNING_RATE = 192, 32, 64, 6, 0.005  # of the layers that read characters
THREADS = CPUS  # of peers: onnxruntime has a scale of h for the rows of each
Run = Callable[[Any, np.ndarray], np.ndarray | None]


# --------------------------------------------------------------------------------------------------------------- peers
def onnxruntime(layer: Any, x: np.ndarray) -> np.ndarray | None:
    """Return y of an LSTM quantized by `quantize_dynamic`, which leaves a GRU as it is."""
    from blockcell import LSTM

    return quantization.onnxruntime(layer, x, "int8", THREADS)[1]() if isinstance(layer, LSTM) else None


def torch(layer: Any, x: np.ndarray) -> np.ndarray | None:
    """Return y of the same module quantized by `quantize_dynamic`, or None if there is no such module."""
    from blockcell import convert

    try:
        return quantization.torch(layer, x, "int8", THREADS)[1]()
    except convert.ConversionError:  # peepholes, or a GRU that resets before the product
        return None


def openvino(layer: Any, x: np.ndarray) -> np.ndarray | None:
    """Return y of ONNX's own node in bfloat16, or None if the CPU or the node cannot."""
    import openvino as ov

    peepholes = layer.weights.get("wci") is not None  # it ignores them
    if peepholes or "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return None
    return quantization.openvino(layer, x, "", THREADS)[1]()


PEERS: dict[str, Run] = {"onnxruntime int8": onnxruntime, "torch int8": torch, "OpenVINO bfloat16": openvino}


# --------------------------------------------------------------------------------------------------------------- lines
def csv_lines(
    data: str,
    name_of_layer: str,
    layer: Any,
    x: np.ndarray,
    score: Callable[[Any], str] | None = None,
    mixed: dict[str, str] | None = None,
) -> Iterator[Any]:
    """Yield the lines of a layer, with float32 in front; `mixed` is one more scheme."""
    from blockcell import Stack
    from blockcell.optable import SCHEMES
    from blockcell.quantization import report_of

    def line(name: str, cost: Any, y: Any) -> list[Any]:
        shares = (f"{value:.3g}" for value in (cost.max, cost.rms, cost.relative_max, cost.relative_rms))
        return [data, name_of_layer, name, *shares, cost.nbytes or "", "" if score is None else score(y)]

    y, weights = layer(x)[0], layer.weights.values()
    yield line("float32", report_of("float32", y, y, weights, weights), y)
    schemes: dict[str, Any] = {name: name for name in SCHEMES} | ({"mixed": mixed} if mixed else {})
    for name, scheme in schemes.items():
        yield line(name, layer.quantization_report(scheme, x), layer.quantize(scheme)(x)[0])
    recurrent, *dense = layer.layers if isinstance(layer, Stack) else [layer]
    for name, run in PEERS.items():
        peer_y = run(recurrent, x)
        if peer_y is not None:
            for head in dense:
                peer_y = head(peer_y)[0]
            yield line(name, report_of("", y, peer_y, [], []), peer_y)


def digits() -> Iterator[list[Any]]:
    from blockcell.command import demo

    shown, held_out = demo.load()

    def format_hits(y: Any) -> str:
        return f"{100 * (y[-1].argmax(axis=1) == held_out.labels).mean():.2f} % right"

    for network in demo.new_networks(0):
        demo.train(network, shown, held_out, np.random.default_rng(0), lambda what, done, of: None)
        title = f"{network.name} of {demo.HIDDEN}, Dense"
        yield from csv_lines("digits, held out", title, network.net, held_out.x, format_hits)


def characters() -> Iterator[list[Any]]:
    from pydoc_data.topics import topics

    import blockcell
    from blockcell import GRU, LSTM, Dense, Stack, optim
    from blockcell.loss import softmax_cross_entropy

    blockcell.set_num_threads(1)
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
        network, optimizer = Stack([layer, Dense.init(CELLS, len(alphabet), seed=1)]), None
        chunks = range(0, len(text) - CHUNK, CHUNK)
        for epoch in range(EPOCHS):
            state = None
            for first in chunks:  # on from where the last chunk ended
                z, state, tape = network.forward(one_of[text[first : first + CHUNK]], state)
                _, d_z = softmax_cross_entropy(z, text[first + 1 : first + CHUNK + 1])
                grads, _ = optim.clip_global_norm(network.backward(tape, d_z)[2], 1.0)
                rate = LEARNING_RATE * (1 - (epoch + first / len(text)) / EPOCHS)
                weights, optimizer = optim.adam(network.weights, grads, optimizer, learning_rate=rate)
                network.set_weights(**weights)
        yield from csv_lines("characters, held out", f"{name}, Dense", network, one_of[held_out[:-1]], perplexity)


def sunspots() -> Iterator[list[Any]]:
    import sunspots
    from statsmodels.datasets import sunspots as data

    years = data.load_pandas().data
    first = int(np.flatnonzero(years["YEAR"] == sunspots.HELD_OUT)[0])
    roots = np.sqrt(years["SUNACTIVITY"].to_numpy(float))
    mean, deviation = roots[:first].mean(), roots[:first].std()
    series = ((roots - mean) / deviation).astype(np.float32)[:, None, None]
    network = sunspots.new_network(0)
    zero, rng = np.float32(-mean / deviation), np.random.default_rng(0)
    sunspots.train(network, series[:first, 0], zero, sunspots.EPOCHS, rng, lambda line: None)

    def next_year_error(y: Any) -> str:
        forecasts, truth = (series + y)[first - 1 : -sunspots.AHEAD], series[first : 1 - sunspots.AHEAD]
        numbers = [np.maximum(values * deviation + mean, 0) ** 2 for values in (forecasts, truth)]
        return f"{np.sqrt(np.mean((numbers[0] - numbers[1]) ** 2)):.2f} off the next year"

    yield from csv_lines("sunspots", f"LSTM of {sunspots.HIDDEN}, Dense", network, series, next_year_error)


def resonators() -> Iterator[list[Any]]:
    """Train an LSTM to follow a saturating resonator at noise, as of audio, over 4000 steps."""
    import blockcell
    from blockcell import LSTM, Dense, Stack, optim
    from blockcell.loss import mean_squared_error

    blockcell.set_num_threads(1)

    def draw_sequences(seed: int, steps: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.random.default_rng(seed).uniform(-1, 1, (steps, rows, 1)), np.zeros((steps, rows, 1))
        for t in range(2, steps):
            y[t] = np.tanh(1.9 * y[t - 1] - 0.95 * y[t - 2] + 0.05 * x[t])
        return x.astype(np.float32), y.astype(np.float32)

    network, optimizer = Stack([LSTM.init(1, 32, seed=0), Dense.init(32, 1, seed=1)]), None
    (x, y), (held_out, truth) = draw_sequences(0, 4000, 32), draw_sequences(1, 4000, 8)
    epochs, chunk = 40, 200
    for epoch in range(epochs):
        state = None
        for first in range(0, len(x), chunk):
            z, state, tape = network.forward(x[first : first + chunk], state)
            _, d_z = mean_squared_error(z, y[first : first + chunk])
            grads, _ = optim.clip_global_norm(network.backward(tape, d_z)[2], 1.0)
            rate = LEARNING_RATE * (1 - (epoch + first / len(x)) / epochs)
            weights, optimizer = optim.adam(network.weights, grads, optimizer, learning_rate=rate)
            network.set_weights(**weights)

    def error(z: Any) -> str:
        return f"{100 * np.sqrt(np.mean((z - truth) ** 2) / np.mean(truth**2)):.2f} % off"

    yield from csv_lines("resonator, 4000 steps", "LSTM of 32, Dense", network, held_out, error, {"0": "int8"})


def initial_layers() -> Iterator[list[Any]]:
    from blockcell import GRU, LSTM

    x = np.random.default_rng(0).standard_normal((100, 8, 64)).astype(np.float32)
    for H in (256, 1024):
        yield from csv_lines("standard normal", f"LSTM of {H}, initial", LSTM.init(64, H, seed=0), x)
    for H, after in itertools.product((256, 1024), (False, True)):
        name = f"GRU{'(reset_after)' * after} of {H}, initial"
        yield from csv_lines("standard normal", name, GRU.init(64, H, seed=0, reset_after=after), x)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--csv", help="write the lines to this file")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "examples")]
    start, rows = time.time(), []
    for line in itertools.chain(digits(), characters(), sunspots(), resonators(), initial_layers()):
        rows.append(line)
        print(*line, sep=", ", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
