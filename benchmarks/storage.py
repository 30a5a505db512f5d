"""Steps of streams whose weights are stored in fewer bytes, beside onnxruntime and torch; accuracy.py has the errors.

    python benchmarks/storage.py --csv docs/benchmarks/storage.csv             # 8 minutes; needs a C compiler
    python benchmarks/storage.py --kinds LSTM --widths 512 --batches 1 --rounds 3

A step is T = 1 with the state from the step before.  onnxruntime and torch get a model each whose weights their
``quantize_dynamic`` has made int8; onnxruntime's does nothing to a GRU.  Each candidate is a process of its own, asked
in turn (turns.py), with one thread and with all; its better median counts.  The rounds of a point follow each other;
those in which the machine was disturbed are marked and repeated.  A ratio, to our float32, is the median of the rounds'
ratios, and its spread their quartiles.  Bytes are those of the matrices and scales, which a step
must read; a share is that of the rate at which ceiling.py reads so many bytes again and again with as many threads.
report.py makes docs/benchmarks/storage.md of both programs' files.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import machine
from candidates import drawn
from ceiling import reading
from turns import Worker, answer, counted, seconds, spread, watch

KINDS = {"LSTM": 4, "GRU": 3}  # and their gates
OURS = ("float32", "float16", "bfloat16", "int8")
PEERS = ("onnxruntime float32", "onnxruntime int8", "torch int8")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
POINT = ["kind", "B", "I", "H"]
COLUMNS = [*POINT, "candidate", "threads", "microseconds", "ratio", "low", "high", "rounds", "marked", "bytes", "share"]
Step = Callable[[], object]
Who = tuple[str, int]  # a candidate and its number of threads


# ---------------------------------------------------------------------------------------------------------- candidates
def weights(kind: str, I: int, H: int) -> dict[str, np.ndarray]:  # noqa: E741
    """Input weights [gates H, I] and recurrent ones [gates H, H], as the peers have them."""
    shapes = {"W": (KINDS[kind] * H, I), "R": (KINDS[kind] * H, H)}
    return {name: drawn(*shape, dtype=np.float32, scale=H**-0.5) for name, shape in shapes.items()}


def blockcell(storage: str, threads: int) -> Callable[..., Step]:
    import blockcell as bc

    bc.set_num_threads(threads)

    @cache
    def layer(kind: str, I: int, H: int) -> Any:  # noqa: E741
        w = np.concatenate([*weights(kind, I, H).values()], axis=1).T
        if kind == "LSTM":
            return bc.LSTM(w, np.zeros(4 * H, np.float32))
        return bc.GRU(w[:, : 2 * H], w[:, 2 * H :], np.zeros(2 * H, np.float32), np.zeros(H, np.float32))

    def prepare(kind: str, B: int, I: int, H: int) -> Step:  # noqa: E741
        stream = layer(kind, I, H).stream(B, **({} if storage == "float32" else {"storage": storage}))
        return partial(stream.step, drawn(B, I, dtype=np.float32), np.empty((B, H), np.float32))

    return prepare


def onnxruntime(storage: str, threads: int) -> Callable[..., Step]:
    import logging

    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.quantization import quantize_dynamic

    logging.disable()  # advice on preprocessing

    def model(kind: str, I: int, H: int) -> Any:  # noqa: E741
        states = ["h", "c"] if kind == "LSTM" else ["h"]
        graph = helper.make_graph(
            [
                helper.make_node(
                    kind, ["x", "W", "R", "", "", *states], ["", *(f"{s}_next" for s in states)], hidden_size=H
                )
            ],
            kind,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "B", I])]
            + [helper.make_tensor_value_info(s, TensorProto.FLOAT, [1, "B", H]) for s in states],
            [helper.make_tensor_value_info(f"{s}_next", TensorProto.FLOAT, [1, "B", H]) for s in states],
            [numpy_helper.from_array(array[None], name) for name, array in weights(kind, I, H).items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    @cache
    def session(kind: str, I: int, H: int) -> Any:  # noqa: E741
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            if storage == "int8":
                quantize_dynamic(model(kind, I, H), path)
            else:
                path.write_bytes(model(kind, I, H).SerializeToString())
            return ort.InferenceSession(path, options, ["CPUExecutionProvider"])

    def prepare(kind: str, B: int, I: int, H: int) -> Step:  # noqa: E741
        ready, names = session(kind, I, H), ["h", "c"] if kind == "LSTM" else ["h"]
        states = [{s: ort.OrtValue.ortvalue_from_numpy(np.zeros((1, B, H), np.float32)) for s in names} for _ in "ab"]
        turns = []
        for before, after in (states, states[::-1]):  # the state goes from one to the other and back, without a copy
            bound = ready.io_binding()
            bound.bind_cpu_input("x", drawn(1, B, I, dtype=np.float32))
            for s in names:
                bound.bind_ortvalue_input(s, before[s])
                bound.bind_ortvalue_output(f"{s}_next", after[s])
            turns.append(bound)
        turn = itertools.cycle(turns)
        return lambda: ready.run_with_iobinding(next(turn))

    return prepare


def torch(storage: str, threads: int) -> Callable[..., Step]:
    import torch

    warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
    torch.set_num_threads(threads)

    @cache
    def layer(kind: str, I: int, H: int) -> Any:  # noqa: E741
        model = torch.nn.Sequential(getattr(torch.nn, kind)(I, H))
        for name, array in zip(("weight_ih_l0", "weight_hh_l0"), weights(kind, I, H).values(), strict=True):
            getattr(model[0], name).data = torch.from_numpy(array)
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.LSTM, torch.nn.GRU}, torch.qint8)
        assert "Quantized" in repr(quantized[0]), quantized
        return quantized[0]

    def prepare(kind: str, B: int, I: int, H: int) -> Step:  # noqa: E741
        ready, x = layer(kind, I, H), torch.from_numpy(drawn(1, B, I, dtype=np.float32))
        state = torch.zeros(1, B, H)
        state = (state, state.clone()) if kind == "LSTM" else state

        def step() -> None:
            nonlocal state
            with torch.inference_mode():
                _, state = ready(x, state)

        return step

    return prepare


def work(candidate: str, threads: int) -> None:
    """Answers a point and for how many seconds with the seconds of a step."""
    package, storage = candidate.split() if " " in candidate else ("blockcell", candidate)
    prepare = {"blockcell": blockcell, "onnxruntime": onnxruntime, "torch": torch}[package](storage, threads)
    ready: dict[str, Step] = {}

    def reply(question: tuple[dict[str, Any], float]) -> float:
        point, budget = question
        if repr(point) not in ready:
            ready.clear()
            step = ready[repr(point)] = prepare(**point)
            step(), step()
        return seconds(ready[repr(point)], budget)

    answer(reply)


# --------------------------------------------------------------------------------------------------------------- times
def bytes_of(kind: str, I: int, H: int, storage: str) -> int:  # noqa: E741
    """Of the matrices and their scales."""
    columns = KINDS[kind] * H
    return columns * ((I + H) * ITEMSIZE[storage] + (4 if storage == "int8" else 0))


@cache
def bandwidth(level: str, quarters: int, threads: int) -> float:
    """GB/s of reading 2 ** (quarters / 4) bytes again and again, or 0 without a C compiler."""
    try:
        return reading(level, int(2 ** (quarters / 4)), threads)
    except (OSError, subprocess.CalledProcessError):
        return 0.0


def summary(point: dict[str, Any], rounds: list[tuple[dict[Who, float], bool]], level: str) -> Iterator[list[Any]]:
    """The lines of a point."""
    kept, marked = counted(rounds), sum(mark for _, mark in rounds)
    times = {who: [found[who] for found in kept] for who in kept[0]}
    best: dict[str, Who] = {}
    for who in sorted(times, key=lambda who: statistics.median(times[who])):
        best.setdefault(who[0], who)
    for candidate in (*OURS, *PEERS):
        if candidate not in best:
            continue
        mine, threads = times[best[candidate]], best[candidate][1]
        ratios = [ours / theirs for ours, theirs in zip(times[best["float32"]], mine, strict=True)]
        size = bytes_of(point["kind"], point["I"], point["H"], candidate.split()[-1])
        us = statistics.median(mine) * 1e6
        most = bandwidth(level, round(4 * np.log2(size)), threads)
        share = round(size / us / 1e3 / most, 3) if most else 0
        figures = round(us, 2), *(round(ratio, 3) for ratio in spread(ratios))
        yield [*point.values(), candidate, threads, *figures, len(rounds), marked, size, share]


def measure(options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        workers: dict[Who, Worker] = {}
        for candidate in (*OURS, *PEERS):
            for threads in sorted({1, cores}):
                arguments = "--work", candidate, str(threads)
                worker = stack.enter_context(closing(Worker(__file__, *arguments, OPENBLAS_NUM_THREADS="1")))
                if worker.missing:
                    print(f"{candidate} is left out: {worker.missing}")
                    break
                workers[candidate, threads] = worker
        if ("float32", 1) not in workers:
            sys.exit("blockcell does not run here")
        about = machine(None, "float32", ["onnxruntime", "torch"])
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        guard, lines = watch(workers.values()), []

        def ask(point: dict[str, Any]) -> dict[Who, float]:
            return {
                who: worker.ask((point, options.budget))
                for who, worker in workers.items()
                if (point["kind"], who[0]) != ("GRU", "onnxruntime int8")  # it would stay float32
            }

        for H, inputs, kind, B in itertools.product(options.widths, (1, None), options.kinds, options.batches):
            point = {"kind": kind, "B": B, "I": inputs or H, "H": H}
            ask(point)  # the models are made, and caches filled
            for line in summary(point, guard.rounds(cores, partial(ask, point), options.rounds), about["level"]):
                lines.append(line)
                candidate, threads, us, ratio, low, high, rounds, marked, size, share = line[len(POINT) :]
                shown = " ".join(f"{name}{value}" for name, value in list(point.items())[1:])
                print(
                    f"{kind:4} {shown:15} {candidate:20} {threads} thread(s) {us:10.2f} us, {ratio:.2f}x"
                    f" ({low:.2f} to {high:.2f}), {size / us / 1e3:6.1f} GB/s, {100 * share:.0f} %"
                    f"{f', {marked} of {rounds} rounds marked' if marked else ''}",
                    flush=True,
                )
    return lines, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512, 1024, 2048], help="H; I is 1, and H")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.04, help="seconds of a round of one candidate (0.04)")
    parser.add_argument("--csv", help="write the points to this file")
    options = parser.parse_args()
    start = time.time()
    lines, about = measure(options)
    if options.csv:
        Path(options.csv).with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        main()
