"""What weights in fewer bytes cost in accuracy, on layers that were trained and on initial weights.

    python benchmarks/accuracy.py [--csv docs/benchmarks/storage-errors.csv]   # needs the extras demo and examples

The errors are those of `layer.storage_error` on what the layers were made for: the networks of `blockcell demo` on the
digits they have not seen, that of examples/sunspots.py on all years, and initial weights on standard normal numbers.
onnxruntime's int8 LSTM, which rounds x and h to 8 bits too, is measured in the same way.  report.py makes tables of the
file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = ("float16", "bfloat16", "int8")
COLUMNS = ["data", "layer", "storage", "max", "rms", "relative_max", "relative_rms", "nbytes", "score"]


def onnxruntime_y(layer: Any, x: np.ndarray) -> np.ndarray:
    """The y of onnxruntime's `quantize_dynamic` of an LSTM; a Dense above it stays float32."""
    import logging

    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.quantization import quantize_dynamic

    from blockcell import Stack, convert

    logging.disable()
    if isinstance(layer, Stack):
        lstm, dense = layer.layers
        return dense(onnxruntime_y(lstm, x))[0]
    node, arrays = convert.to_onnx(layer)
    graph = helper.make_graph(
        [node],
        "LSTM",
        [helper.make_tensor_value_info(node.input[0], TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        quantize_dynamic(model, path)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(None, {node.input[0]: x})[0][:, 0]


def errors() -> Iterator[list[Any]]:
    """The lines of every layer, with float32 in front where there is a score."""
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "examples")]
    import sunspots
    from statsmodels.datasets import sunspots as data

    from blockcell import GRU, LSTM
    from blockcell.command import demo
    from blockcell.layers.storage import error_of

    def lines(name: str, what: str, layer: Any, x: Any, score: Callable[[Any], str] | None = None) -> Iterator[Any]:
        y, nbytes = layer(x)[0], sum(array.nbytes for array in layer.weights.values())
        if score is not None:
            yield [name, what, "float32", 0, 0, 0, 0, nbytes, score(y)]
        found = {storage: (layer.rounded_to(storage)(x)[0], layer.storage_error(storage, x)) for storage in STORAGES}
        if "LSTM" in what:
            other = onnxruntime_y(layer, x)
            found["onnxruntime int8"] = other, error_of("int8", "int8", y, other, [], [])
        for storage, (other, cost) in found.items():
            shares = (f"{value:.3g}" for value in (cost.max, cost.rms, cost.relative_max, cost.relative_rms))
            yield [name, what, storage, *shares, cost.nbytes or "", "" if score is None else score(other)]

    digits, held_out = demo.load()

    def right(y: Any) -> str:
        return f"{100 * (y[-1].argmax(axis=1) == held_out.labels).mean():.2f} % right"

    for network in demo.new_networks(0):
        demo.train(network, digits, held_out, np.random.default_rng(0), lambda what, done, of: None)
        yield from lines("digits, held out", f"{network.name} of {demo.HIDDEN}, Dense", network.net, held_out.x, right)

    years = data.load_pandas().data
    first = int(np.flatnonzero(years["YEAR"] == sunspots.HELD_OUT)[0])
    roots = np.sqrt(years["SUNACTIVITY"].to_numpy(float))
    mean, deviation = roots[:first].mean(), roots[:first].std()
    series = ((roots - mean) / deviation).astype(np.float32)[:, None, None]
    network = sunspots.new_network(0)
    zero, rng = np.float32(-mean / deviation), np.random.default_rng(0)
    sunspots.train(network, series[:first, 0], zero, sunspots.EPOCHS, rng, lambda line: None)

    def next_year(y: Any) -> str:
        forecasts, truth = (series + y)[first - 1 : -sunspots.AHEAD], series[first : 1 - sunspots.AHEAD]
        numbers = [np.maximum(values * deviation + mean, 0) ** 2 for values in (forecasts, truth)]
        return f"{np.sqrt(np.mean((numbers[0] - numbers[1]) ** 2)):.2f} off the next year"

    yield from lines("sunspots", f"LSTM of {sunspots.HIDDEN}, Dense", network, series, next_year)
    x = np.random.default_rng(0).standard_normal((100, 8, 64)).astype(np.float32)
    for kind, H in itertools.product((LSTM, GRU), (256, 1024)):
        yield from lines("standard normal", f"{kind.__name__} of {H}, initial", kind.init(64, H, seed=0), x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="write the lines to this file")
    options = parser.parse_args()
    start, lines = time.time(), []
    for line in errors():
        lines.append(line)
        print(*line, sep=", ", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
