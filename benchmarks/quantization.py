"""Compare quantized layers with onnxruntime, PyTorch and OpenVINO: time and error.

Needed by: docs/quantization.md

    python benchmarks/quantization.py --csv docs/benchmarks/quantization.csv   # an hour
    python benchmarks/quantization.py --kinds LSTM --widths 512 --batches 16 --threads 1 --rounds 3

A call is of T = 20 steps with I = H, or of one row with one input, which does hardly more than read the recurrent
weights at each step.  Everybody gets the same weights, drawn as PyTorch draws initial ones, and x is standard normal.
"int8" of onnxruntime and torch is what their ``quantize_dynamic`` makes of a model; onnxruntime's does nothing to a
GRU, and PyTorch has only the GRU that resets after the product.  "openvino" is what it does unasked: it computes in
bfloat16 where the CPU can.  Of "torch bfloat16" the model and x are bfloat16.

Candidates are processes of their own, asked in turn (turns.py), all with the same number of threads.  The rounds of a
point follow each other; those in which the machine was disturbed are marked and repeated.  A ratio is a candidate's
time over the time of ours quantized to int8: the median of the rounds' ratios, with their quartiles.  An error is the
root mean square of y's error against float64, relative to y's own.

accuracy.py has the errors of layers on what they were trained for.  docs/quantization.md has tables of both files.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import candidates
import numpy as np
import turns
from bench import describe_machine
from machine import CPUS

STEPS = 20
KINDS = ("LSTM", "GRU", "GRU(reset_after)")
OURS = ("float32", "float16", "int8")
BASE = "int8"  # whose time is 1
PEERS = ("onnxruntime float32", "onnxruntime int8", "torch float32", "torch bfloat16", "torch int8", "openvino float32")
PEERS += ("openvino",)
POINT = ["kind", "B", "I", "H", "threads"]
COLUMNS = [*POINT, "candidate", "microseconds", "ratio", "low", "high", "rounds", "marked", "error"]
Point = dict[str, Any]
Pair = tuple[Callable[[], object], Callable[[], np.ndarray]]  # a call, and one that gives y


# ---------------------------------------------------------------------------------------------------------- candidates
def draw_layer(point: Point) -> tuple[Any, np.ndarray]:
    """Draw a layer and x."""
    import blockcell as bc

    kind, rng, (B, I, H) = point["kind"], np.random.default_rng(0), (point[size] for size in "BIH")  # noqa: E741
    layer = bc.LSTM.init(I, H) if kind == "LSTM" else bc.GRU.init(I, H, reset_after="reset_after" in kind)
    bound = H**-0.5
    weights = {name: rng.uniform(-bound, bound, w.shape).astype(np.float32) for name, w in layer.weights.items()}
    layer.set_weights(**weights)
    return layer, rng.standard_normal((STEPS, B, I)).astype(np.float32)


def blockcell(layer: Any, x: np.ndarray, scheme: str, threads: int) -> Pair:
    import blockcell as bc

    bc.set_num_threads(threads)
    layer = layer if scheme == "float32" else layer.quantize(scheme)
    return partial(layer, x), lambda: layer(x)[0]


def build_model(layer: Any, x: np.ndarray) -> bytes:
    """Build a model of ONNX's own node."""
    from onnx import TensorProto, helper, numpy_helper

    from blockcell import convert

    node, arrays = convert.to_onnx(layer)
    graph = helper.make_graph(
        [node],
        node.op_type,
        [helper.make_tensor_value_info(node.input[0], TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString()


def onnxruntime(layer: Any, x: np.ndarray, scheme: str, threads: int) -> Pair:
    from onnxruntime.quantization import quantize_dynamic

    logging.disable()  # advice on preprocessing
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(build_model(layer, x))
        if scheme == "int8":
            quantize_dynamic(path, path)
        session = candidates.open_session(path, threads)
    return candidates.bind_session(session, x), lambda: session.run(None, {"rnn_X": x})[0][:, 0]


def torch(layer: Any, x: np.ndarray, scheme: str, threads: int) -> Pair:
    import torch

    from blockcell import convert

    warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
    torch.set_num_threads(threads)
    model = torch.nn.Sequential(getattr(torch.nn, type(layer).__name__)(layer.input_size, layer.hidden_size))
    model[0].load_state_dict({name: torch.from_numpy(w) for name, w in convert.to_torch(layer).items()})
    if scheme == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.LSTM, torch.nn.GRU}, torch.qint8)
        assert "Quantized" in repr(model), model
    dtype = torch.bfloat16 if scheme == "bfloat16" else torch.float32
    module, tensor = model.to(dtype)[0].eval(), torch.from_numpy(x).to(dtype)

    def call() -> Any:
        with torch.inference_mode():
            return module(tensor)[0]

    return call, lambda: call().float().numpy()


def openvino(layer: Any, x: np.ndarray, scheme: str, threads: int) -> Pair:
    request = candidates.open_request(build_model(layer, x), x, threads, scheme)

    def y() -> np.ndarray:
        request.infer()
        return request.get_output_tensor().data[:, 0]

    return request.infer, y


def work(candidate: str, threads: str) -> None:
    """Answer a point and a budget with the seconds of a call; with a path, write y there instead."""
    package, _, scheme = candidate.partition(" ")
    prepare = {"onnxruntime": onnxruntime, "torch": torch, "openvino": openvino}.get(package, blockcell)
    ready: dict[str, Pair] = {}
    name = candidate if prepare is blockcell else scheme

    def reply(question: tuple[Point, float, str]) -> float:
        point, budget, path = question
        if repr(point) not in ready:
            ready.clear()
            ready[repr(point)] = prepare(*draw_layer(point), name, int(threads))
        call, y = ready[repr(point)]
        if path:
            np.save(path, y())
            return 0.0
        return turns.seconds(call, budget)

    turns.answer(reply)


def has_layer(candidate: str, kind: str) -> bool:
    """Return whether a candidate has such a layer."""
    if candidate == "onnxruntime int8":
        return kind == "LSTM"
    return kind != "GRU" or not candidate.startswith("torch")


# --------------------------------------------------------------------------------------------------------------- times
def points(options: argparse.Namespace) -> Iterator[Point]:
    sizes = [(B, H, H) for H in options.widths for B in options.batches] + [(1, 1, H) for H in options.one_row]
    for threads, kind, (B, I, H) in itertools.product(options.threads, options.kinds, sizes):  # noqa: E741
        yield {"kind": kind, "B": B, "I": I, "H": H, "threads": threads}


def errors_of(point: Point, workers: dict[str, turns.Worker]) -> dict[str, float]:
    """Return the relative error of each candidate's y, against float64."""
    layer, x = draw_layer(point)
    weights = {name: w.astype(np.float64) for name, w in layer.weights.items()}
    options = {"reset_after": layer.reset_after} if "GRU" in point["kind"] else {}
    exact = type(layer)(**weights, **options)(x.astype(np.float64))[0]
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "y.npy"))
        for candidate, worker in workers.items():
            worker.ask((point, 0, path))
            errors[candidate] = float(np.sqrt(np.mean((np.load(path) - exact) ** 2) / np.mean(exact**2)))
    return errors


def lines_of(
    point: Point, rounds: list[tuple[dict[str, float], bool]], errors: dict[str, float]
) -> Iterator[list[Any]]:
    """Yield the CSV lines of a point."""
    kept, marked = turns.select_rounds(rounds), sum(mark for _, mark in rounds)
    for candidate in kept[0]:
        us = statistics.median(times[candidate] for times in kept) * 1e6
        ratio = turns.spread([times[candidate] / times[BASE] for times in kept])
        figures = round(us, 2), *(round(value, 3) for value in ratio), len(rounds), marked, f"{errors[candidate]:.2e}"
        yield [*point.values(), candidate, *figures]


def measure(options: argparse.Namespace) -> None:
    about, all_lines = describe_machine(None, "float32", ["onnxruntime", "torch", "openvino"]), []
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    for threads, todo in itertools.groupby(points(options), lambda point: point["threads"]):
        team = {
            candidate: turns.Worker(__file__, "--work", candidate, str(threads), OPENBLAS_NUM_THREADS="1")
            for candidate in (*OURS, *PEERS)
        }
        with turns.open_workers(team, needed=False) as workers:
            guard = turns.watch(workers.values())
            for point in todo:
                mine = {name: worker for name, worker in workers.items() if has_layer(name, point["kind"])}
                errors = errors_of(point, mine)
                rounds = guard.rounds(threads, partial(turns.ask_all, mine, point, options.seconds, ""), options.rounds)
                print(*(f"{name}{value}" for name, value in point.items()), flush=True)
                lines = [*lines_of(point, rounds, errors)]
                all_lines += lines
                for line in lines:
                    candidate, us, ratio, low, high, _, _, error = line[len(POINT) :]
                    print(f"  {candidate:20} {us:10.2f} us, {ratio:.2f}x ({low:.2f} to {high:.2f}), {error}")
    if options.csv:
        turns.write_table(options.csv, COLUMNS, all_lines, about)


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=5, seconds=0.04)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--widths", nargs="*", type=int, default=[128, 256, 512, 1024], help="H, and I = H")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64], help="B")
    parser.add_argument(
        "--one-row", nargs="*", type=int, default=[512, 1024, 2048, 4096], help="H with B = 1 and I = 1"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, CPUS}))
    parser.add_argument("--csv", type=Path, help="write the points to this file")
    measure(parser.parse_args())


if __name__ == "__main__":
    turns.run_program(main, work)
