"""Measure a training step in a browser, beside TensorFlow.js; and check that it learns the same there.

Needed by: docs/onnx/training.md

    python benchmarks/in_browser.py [--rounds 5] [--seconds 2] [--only SIZE ...]
    python benchmarks/in_browser.py --compare

A step is forward, softmax cross-entropy, backward and adam, of an LSTM and a dense layer on its last step, in float32
and on one thread: the model of `training_step` in onnxruntime-web, with WebAssembly; and TensorFlow.js' layers, with
its back end in WebAssembly and the one in JavaScript.  Every round opens each of them in a page of its own, in turn;
the times are means.  Prints the milliseconds of a step, each the median of the rounds, and how many times
onnxruntime-web's that is, with quartiles.

With --compare it trains as `training_steps.py --compare`, from the same weights on the same batches, and prints the
last loss and how many of the digits held out are right.

Needs npm, which fetches both packages, and what `pytest -m browser` needs.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from training_steps import CLASSES, make_task
from turns import make_parser, print_heads, print_row, ratio_cell

import blockcell
from blockcell import LSTM, Dense, Stack
from onnx_export import training_step

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests" / "lib"), str(ROOT / "examples" / "browser")]

from browser import chromium, served  # noqa: E402
from make_page import copy_onnxruntime, fetched, unpack  # noqa: E402

TENSORFLOW = "4.22.0"
SIZES = {"8x32x8x64": (8, 32, 8, 64), "10x1x32x32": (10, 1, 32, 32), "50x16x128x128": (50, 16, 128, 128)}  # T, B, I, H
WAYS = {"ONNX": "onnxruntime-web", "wasm": "TensorFlow.js, WebAssembly", "cpu": "TensorFlow.js, JavaScript"}

ONNX = """
import * as ort from "./onnxruntime/ort.wasm.bundle.min.mjs";
ort.env.wasm.numThreads = 1;

/** A function that takes a step: x and labels to the loss. It has `weights`, too. */
export async function learner(model, weights, rate) {
  const session = await ort.InferenceSession.create(model);
  let kept = { step: new ort.Tensor("int64", [0n], []) };
  for (const [name, { shape, data }] of Object.entries(weights)) {
    kept[name] = new ort.Tensor("float32", data, shape);
    for (const slot of "mv") kept[`${slot}.${name}`] = new ort.Tensor("float32", new Float32Array(data.length), shape);
  }
  const step = async ({ shape, data }, labels) => {
    const x = new ort.Tensor("float32", data, shape);
    const target = new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [labels.length]);
    const found = await session.run({ x, target, learning_rate: new ort.Tensor("float32", [rate], []), ...kept });
    kept = Object.fromEntries(Object.keys(kept).map((name) => [name, found[`new_${name}`]]));
    return found.loss.data[0];
  };
  step.weights = () => Object.fromEntries(Object.keys(weights).map((name) => [name, Array.from(kept[name].data)]));
  return step;
}
"""
TENSORFLOW_JS = """
/** The same of TensorFlow.js. */
export async function learner(backend, [steps, , inputs, units], classes, rate) {
  tf.wasm.setWasmPaths("./");
  tf.wasm.setThreadsCount(1);
  if (!(await tf.setBackend(backend))) throw new Error(`no back end ${backend}`);
  const model = tf.sequential({
    layers: [
      tf.layers.lstm({ units, inputShape: [steps, inputs], recurrentActivation: "sigmoid" }),
      tf.layers.dense({ units: classes }),
    ],
  });
  const loss = (labels, logits) => tf.losses.softmaxCrossEntropy(labels, logits);
  model.compile({ optimizer: tf.train.adam(rate), loss });
  return async ({ shape: [T, B, I], data }, labels) => {
    const x = tf.tidy(() => tf.tensor(data, [T, B, I]).transpose([1, 0, 2]));
    const target = tf.tidy(() => tf.oneHot(tf.tensor1d(labels, "int32"), classes).toFloat());
    const loss = await model.trainOnBatch(x, target);
    tf.dispose([x, target]);
    return loss;
  };
}
"""
TIMES = """async ({ way, size, weights, data, classes, seconds }) => {
  const { learner } = await import(way === "ONNX" ? "./onnx.js" : "./tensorflow.js");
  for (const each of Object.values(weights)) each.data = Float32Array.from(each.data);
  const step =
    way === "ONNX" ? await learner(`${size.join("x")}.onnx`, weights, 1e-3) : await learner(way, size, classes, 1e-3);
  data.x.data = Float32Array.from(data.x.data);
  const losses = [];
  for (let k = 0; k < 5; k++) losses.push(await step(data.x, data.labels));
  const start = performance.now();
  let count = 0;
  for (; performance.now() < start + 1000 * seconds; count++) losses.push(await step(data.x, data.labels));
  return { seconds: (performance.now() - start) / 1000 / count, first: losses[0], last: losses.at(-1) };
}"""
LEARNS = """async ({ weights, batches, rate }) => {
  const { learner } = await import("./onnx.js");
  for (const each of Object.values(weights)) each.data = Float32Array.from(each.data);
  const step = await learner("learn.onnx", weights, rate);
  let loss;
  for (const { x, labels } of batches) loss = await step({ ...x, data: Float32Array.from(x.data) }, labels);
  return { loss, weights: step.weights() };
}"""


def as_json(array: np.ndarray) -> dict[str, list[float]]:
    return {"shape": [*array.shape], "data": array.ravel().tolist()}


def write_site(folder: Path) -> None:
    """Write all files that the pages load."""
    copy_onnxruntime(folder / "onnxruntime")
    (folder / "onnx.js").write_text(ONNX)
    (folder / "tensorflow.js").write_text(TENSORFLOW_JS)
    (folder / "index.html").write_text('<!doctype html><link rel="icon" href="data:,">')
    unpack(fetched("@tensorflow/tfjs", TENSORFLOW), ["dist/tf.min.js"], folder)
    parts = ["tf-backend-wasm.min.js", *(f"tfjs-backend-wasm{form}.wasm" for form in ("", "-simd", "-threaded-simd"))]
    unpack(fetched("@tensorflow/tfjs-backend-wasm", TENSORFLOW), [f"dist/{part}" for part in parts], folder)
    tags = '<script src="tf.min.js"></script><script src="tf-backend-wasm.min.js"></script>'
    (folder / "tensorflow.html").write_text(f'<!doctype html><link rel="icon" href="data:,">{tags}')


def make_network(inputs: int, hidden: int) -> Stack:
    return Stack([LSTM.init(inputs, hidden, seed=1, forget_bias=1.0), Dense.init(hidden, CLASSES, seed=2, last=True)])


def measure_steps(rounds: int, seconds: float, only: list[str]) -> None:
    with tempfile.TemporaryDirectory() as built:
        folder = Path(built)
        write_site(folder)
        for size in only:
            T, _, inputs, hidden = SIZES[size]
            options = {"loss": "softmax_cross_entropy", "optimizer": "adam", "lengths": False}
            net = make_network(inputs, hidden)
            training_step(net, folder / f"{size}.onnx", **options, loop="unroll", sizes={"T": T})
        with served(folder) as address, chromium() as browser:
            print(f"Chromium {browser.version}, {blockcell.build_info()['cpu']}\n")
            heads = [head for way in [*WAYS][1:] for head in (f"{WAYS[way]}, ms", "times that")]
            print_heads(["T", "B", "I", "H", f"{WAYS['ONNX']}, ms", *heads])
            for size in only:
                T, B, inputs, hidden = SIZES[size]
                g = np.random.default_rng(0)
                data = {"x": as_json(g.uniform(-1, 1, (T, B, inputs)).astype(np.float32))}
                data["labels"] = g.integers(0, CLASSES, B).tolist()
                weights = {name: as_json(array) for name, array in make_network(inputs, hidden).weights.items()}
                task = {"size": SIZES[size], "weights": weights, "data": data, "classes": CLASSES, "seconds": seconds}
                times: list[dict[str, float]] = []
                for _ in range(rounds):
                    times.append({})
                    for way in WAYS:
                        page = browser.new_page()
                        page.goto(address + ("" if way == "ONNX" else "tensorflow.html"))
                        result = page.evaluate(TIMES, task | {"way": way})
                        page.close()
                        if not result["last"] < result["first"]:
                            sys.exit(f"{WAYS[way]}, {size}: the loss went from {result['first']} to {result['last']}")
                        times[-1][way] = result["seconds"]
                columns = {way: [seconds_of_ways[way] for seconds_of_ways in times] for way in WAYS}
                cells = [f"{1e3 * statistics.median(columns['ONNX']):.2f}"]
                for way in [*WAYS][1:]:
                    cells += [f"{1e3 * statistics.median(columns[way]):.2f}", ratio_cell(columns[way], columns["ONNX"])]
                print_row([T, B, inputs, hidden, *cells])


def compare_losses() -> None:
    net, x, labels, picked, test, model, rate = make_task("float32")
    batches = [{"x": as_json(x[:, rows]), "labels": labels[rows].tolist()} for rows in picked]
    weights = {name: as_json(array) for name, array in net.weights.items()}
    with tempfile.TemporaryDirectory() as built:
        write_site(Path(built))
        (Path(built) / "learn.onnx").write_bytes(model.SerializeToString())
        with served(Path(built)) as address, chromium() as browser:
            page = browser.new_page()
            page.goto(address)
            result = page.evaluate(LEARNS, {"weights": weights, "batches": batches, "rate": rate})
    trained = copy.copy(net)
    learned = {name: np.array(numbers, np.float32) for name, numbers in result["weights"].items()}
    trained.set_weights(**{name: learned[name].reshape(array.shape) for name, array in net.weights.items()})
    share = (trained(x[:, test])[0].argmax(axis=1) == labels[test]).mean()
    print_row(["float32", "browser", f"{result['loss']:.15f}", f"{100 * share:.1f} %"])


def main() -> None:
    parser = make_parser(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES), metavar="SIZE")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        compare_losses()
    else:
        measure_steps(options.rounds, options.seconds, options.only)


if __name__ == "__main__":
    main()
