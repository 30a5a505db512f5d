"""Score sequences of 20 to 400 steps with two LSTMs of 128 cells: by `Scorer`, and by other libraries.

Needed by: docs/scoring.md

    python benchmarks/scoring.py [--sequences 20000] [--rounds 3] [--processes 1 2] [--ways ...] [--quick]
    python benchmarks/scoring.py --engines [--sequences 8000] [--rounds 3]

Prints Markdown.  The first command: seconds until the last h of every sequence is there, by one process of one thread,
and by two that have every other sequence each.  Sequences have 40 inputs, and lengths drawn evenly.

* Scorer: as it comes.
* torch, sorted: PackedSequences of sequences that are sorted by length; in order: of sequences as they come, which
  PyTorch sorts within each (``enforce_sorted=False``).
* onnxruntime, sorted and in order: padded batches with their lengths, for ONNX's own LSTM nodes.

PyTorch and onnxruntime have the batch of 16 to 256 that is best for each way on 512 sequences.  "Padding" is its share
of the steps that a batch has.  Each way runs in processes of its own; they take turns, and rounds on a disturbed
machine are repeated (turns.py).  A figure is the median of the rounds, with the fastest and the slowest.

The second command: thousand sequences a second of two workers of Ray Data, Dask and Spark, as in docs/scoring.md,
beside two plain processes that read the same eight files.  It is the second job of a cluster that has started.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import turns
from turns import CPUS, Worker, answer, make_parser, print_heads, print_row, select_rounds, watch

import blockcell
from blockcell import LSTM, Scorer, Stack
from blockcell.scorer import _plan_batches

INPUTS, CELLS, SHORTEST, LONGEST = 40, 128, 20, 400
BATCHES = (16, 32, 64, 128, 256)
DEFAULT = 64  # of a Scorer
TRIED = 512
Array = np.ndarray[Any, Any]
Way = Callable[[list[Array], int], Array]  # sequences and batch to the last h of each


def make_network() -> Stack:
    return Stack([LSTM.init(INPUTS, CELLS, seed=1), LSTM.init(CELLS, CELLS, seed=2)])


def draw_lengths(number: int) -> list[int]:
    return np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, number).tolist()


def split_batches(lengths: list[int], batch: int, by_length: bool) -> list[Array]:
    """Return the numbers of the sequences of each batch."""
    order = np.argsort(lengths, kind="stable")[::-1] if by_length else np.arange(len(lengths))
    return [order[first : first + batch] for first in range(0, len(order), batch)]


# ------------------------------------------------------------------------------------------------------------- the ways
def make_scorer() -> Way:
    net = make_network()
    return lambda xs, batch: np.array(Scorer(net, batch=batch)(xs))


def make_torch(by_length: bool) -> Way:
    import torch
    from torch.nn.utils.rnn import pack_sequence

    from blockcell import convert

    torch.set_num_threads(1)
    net = torch.nn.LSTM(INPUTS, CELLS, num_layers=2)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in convert.to_torch(make_network()).items()})

    @torch.inference_mode()
    def score(xs: list[Array], batch: int) -> Array:
        outputs = np.empty((len(xs), CELLS), np.float32)
        for numbers in split_batches([len(x) for x in xs], batch, by_length):
            packed = pack_sequence([torch.from_numpy(xs[k]) for k in numbers], enforce_sorted=by_length)
            outputs[numbers] = net(packed)[1][0][-1].numpy()
        return outputs

    return score


def make_onnxruntime(by_length: bool) -> Way:
    import onnxruntime as ort

    from onnx_export import export

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = export(make_network(), None, loop="native", state=False)
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def score(xs: list[Array], batch: int) -> Array:
        outputs = np.empty((len(xs), CELLS), np.float32)
        for numbers in split_batches([len(x) for x in xs], batch, by_length):
            lengths = np.array([len(xs[k]) for k in numbers])
            x = np.zeros((lengths.max(), len(numbers), INPUTS), np.float32)
            for b, k in enumerate(numbers):
                x[: len(xs[k]), b] = xs[k]
            [outputs[numbers]] = session.run(["1.h"], {"x": x, "lengths": lengths})
        return outputs

    return score


WAYS: dict[str, tuple[Callable[[], Way], bool | None]] = {  # and whether they sort; a Scorer does so by itself
    "Scorer": (make_scorer, None),
    "torch, sorted": (lambda: make_torch(True), True),
    "torch, in order": (lambda: make_torch(False), False),
    "onnxruntime, sorted": (lambda: make_onnxruntime(True), True),
    "onnxruntime, in order": (lambda: make_onnxruntime(False), False),
}


def padding_share(way: str, lengths: list[int], batch: int) -> float:
    """Return the share of the steps that is padding; a PackedSequence has none."""
    if way.startswith("torch"):
        return 0.0
    by_length = WAYS[way][1]
    batches = _plan_batches(lengths, batch) if by_length is None else split_batches(lengths, batch, by_length)
    return 1 - sum(lengths) / sum(len(numbers) * max(lengths[k] for k in numbers) for numbers in batches)


def work(way: str, number: int, part: int, parts: int) -> None:
    """Answer [batch, sequences] with the seconds, and with sums of the results for a check."""
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((length, INPUTS), np.float32) for length in draw_lengths(number)][part::parts]
    score = WAYS[way][0]()
    score(xs[:4], 4)

    def reply(question: tuple[int, int]) -> tuple[float, list[float]]:
        batch, count = question
        results = []
        spent = turns.seconds(lambda: results.append(score(xs[:count], batch)), 0)
        return spent, results[0].astype(np.float64).sum(axis=0).tolist()

    answer(reply)


def best_batch(worker: Worker, number: int) -> int:
    return min(BATCHES, key=lambda batch: worker.ask([batch, min(TRIED, number)])[0])


def compare_ways(options: argparse.Namespace) -> None:
    lengths, best, seconds = draw_lengths(options.sequences), {}, {}
    for parts in options.processes:
        teams = {}
        for way in options.ways:
            shares = [(way, str(options.sequences), str(part), str(parts)) for part in range(parts)]
            teams[way] = [Worker(__file__, "--work", *share, OMP_NUM_THREADS="1") for share in shares]
            if missing := teams[way][0].missing:
                print(f"{way} does not run here: {missing}")
                del teams[way]
        for way, team in teams.items():
            if way not in best:
                best[way] = DEFAULT if way == "Scorer" else best_batch(team[0], options.sequences)

        def measure(teams: dict[str, list[Worker]] = teams, parts: int = parts) -> dict[str, float]:
            """Return the seconds of each way."""
            seconds_of_way, sums = {}, {}
            with ThreadPoolExecutor(parts) as pool:
                for way, team in teams.items():
                    question = [best[way], options.sequences]
                    answers = list(pool.map(Worker.ask, team, [question] * parts))
                    seconds_of_way[way] = max(answer[0] for answer in answers)
                    sums[way] = np.sum([answer[1] for answer in answers], axis=0)
            [first, *other_sums] = sums.values()
            assert all(np.allclose(first, own, atol=1e-4 * options.sequences) for own in other_sums), "results differ"
            return seconds_of_way

        guard = watch([worker for team in teams.values() for worker in team])
        rounds = select_rounds(guard.rounds(parts, measure, options.rounds))
        for way in teams:
            seconds[way, parts] = [times[way] for times in rounds]
        for team in teams.values():
            for worker in team:
                worker.close()
    print(f"\n{options.sequences:,} sequences, {sum(lengths):,} steps, {options.rounds} rounds\n")
    heads = [f"{parts} process{'es' * (parts > 1)}, s" for parts in options.processes]
    print_heads(["", "batch", "padding", *heads])
    for way in best:
        figures = []
        for parts in options.processes:
            mine, ours = seconds[way, parts], seconds[options.ways[0], parts]
            ratio = statistics.median(a / b for a, b in zip(mine, ours, strict=True))
            figures.append(f"{statistics.median(mine):.1f} ({min(mine):.1f} to {max(mine):.1f}), {ratio:.2f}x")
        print_row([way, best[way], f"{padding_share(way, lengths, best[way]):.1%}", *figures])


# ---------------------------------------------------------------------------------------------------------- the engines
FILES = 8


def write_files(folder: Path, number: int) -> None:
    import pyarrow
    import pyarrow.parquet

    make_network().save(folder / "model.npz")
    (folder / "sequences").mkdir()
    rng, lengths = np.random.default_rng(1), draw_lengths(number)
    for k in range(FILES):
        lengths_of_file = lengths[k::FILES]
        numbers = pyarrow.array(rng.standard_normal(sum(lengths_of_file) * INPUTS, np.float32))
        steps = pyarrow.ListArray.from_arrays(np.arange(sum(lengths_of_file) + 1, dtype=np.int32) * INPUTS, numbers)
        lists = pyarrow.ListArray.from_arrays(np.cumsum([0, *lengths_of_file], dtype=np.int32), steps)
        ids = np.arange(len(lengths_of_file)) * FILES + k
        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "x": lists}), folder / "sequences" / f"{k}.parquet")


def score_files(scorer: Scorer, files: Iterable[str]) -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows = []
    for file in files:
        table = pyarrow.parquet.read_table(file)
        numbers = table["id"].to_pylist()
        rows += [{"id": k, "score": y} for k, y in zip(numbers, scorer(table["x"]), strict=True)]
    return rows


def start_processes(scorer: Scorer) -> Callable[[], Any]:
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    return lambda: [
        row for rows in pool.map(partial(score_files, scorer), [[file] for file in list_files()]) for row in rows
    ]


def list_files() -> list[str]:
    return sorted(glob("sequences/*.parquet"))


def start_ray(scorer: Scorer) -> Callable[[], Any]:
    import pyarrow
    import ray

    class Score:
        def __call__(self, table: Any) -> Any:
            return pyarrow.table({"id": table["id"], "score": scorer(table["x"])})

    ray.init(num_cpus=3, log_to_driver=False)  # two workers, and who lists the files
    ray.data.DataContext.get_current().enable_progress_bars = False
    workers = ray.data.ActorPoolStrategy(size=2)

    def job() -> Any:
        data = ray.data.read_parquet(os.path.abspath("sequences"), override_num_blocks=FILES)
        return data.map_batches(Score, compute=workers, batch_size=None, batch_format="pyarrow").take_all()

    return job


def start_dask(scorer: Scorer) -> Callable[[], Any]:
    import dask.bag
    from dask.distributed import Client

    client = Client(n_workers=2, threads_per_worker=1)

    def job() -> Any:
        bag = dask.bag.from_sequence([os.path.abspath(file) for file in list_files()], npartitions=FILES)
        return client.compute(bag.map_partitions(partial(score_files, scorer))).result()

    return job


def start_spark(scorer: Scorer, arrow: bool) -> Callable[[], Any]:
    import pandas
    import pyarrow
    from pyspark.sql import SparkSession

    def score_frames(frames: Iterable[Any]) -> Iterator[Any]:
        for frame in frames:
            yield pandas.DataFrame({"id": frame["id"], "score": scorer(list(frame["x"]))})

    def score_batches(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            yield pyarrow.RecordBatch.from_pydict({"id": batch["id"], "score": scorer(batch["x"])})

    builder = SparkSession.builder.master("local-cluster[2,1,4096]").config("spark.executor.memory", "4g")
    session = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", 1000).getOrCreate()

    def job() -> Any:
        data = session.read.parquet(os.path.abspath("sequences"))
        how, function = (data.mapInArrow, score_batches) if arrow else (data.mapInPandas, score_frames)
        return how(function, "id long, score array<float>").collect()

    return job


ENGINES: dict[str, Callable[[Scorer], Callable[[], Any]]] = {
    "two plain processes": start_processes,
    "Ray Data, `map_batches`": start_ray,
    "Dask, `bag.map_partitions`": start_dask,
    "Spark, `mapInPandas`": lambda scorer: start_spark(scorer, False),
    "Spark, `mapInArrow`": lambda scorer: start_spark(scorer, True),
}


def run_engine(name: str, rounds: int) -> None:
    """Print the seconds and the number of rows of a first job and of `rounds` more."""
    job = ENGINES[name](Scorer("model.npz"))
    for _ in range(rounds + 1):
        start = time.perf_counter()
        rows = job()
        print("seconds", time.perf_counter() - start, len({int(row["id"]) for row in rows}), flush=True)
    os._exit(0)  # the caller ends the workers


def compare_engines(options: argparse.Namespace) -> None:
    print(f"\n{options.sequences:,} sequences, two workers, {options.rounds} jobs after the first\n")
    print_heads(["", "thousand sequences a second", "of two plain processes"])
    plain = None
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.sequences)
        root = Path(__file__).resolve()
        path = os.pathsep.join([str(root.parents[1]), str(root.parent)])
        environment = os.environ | {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        for name in options.ways:
            command = [sys.executable, str(root), "--engine", name, str(options.rounds)]
            with tempfile.TemporaryFile("w+") as output:  # no pipe, which workers would keep open
                both = {"stdout": output, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **both)
                process.wait()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # workers that are left
                output.seek(0)
                output_lines = output.read().splitlines()
            lines = [line.split() for line in output_lines if line.startswith("seconds ")]
            if len(lines) <= options.rounds:
                print(f"{name} does not run here: {output_lines[-1:]}")
                continue
            assert all(int(rows) == options.sequences for _, _, rows in lines), f"{name}: rows are missing"
            rate = options.sequences / statistics.median(float(spent) for _, spent, _ in lines[1:]) / 1e3
            plain = plain or rate
            print_row([name, f"{rate:.2f}", f"{rate / plain:.0%}"])


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--ways", nargs="+", help="some of them, the first of which others are compared with")
    parser.add_argument("--quick", action="store_true", help="1000 sequences, one round")
    options = parser.parse_args()
    options.sequences = options.sequences or (1000 if options.quick else 8000 if options.engines else 20_000)
    options.rounds = 1 if options.quick else options.rounds
    options.ways = options.ways or [*(ENGINES if options.engines else WAYS)]
    about = blockcell.build_info()
    print(f"{CPUS} CPUs, {about['cpu']}, level {about['level']}")
    (compare_engines if options.engines else compare_ways)(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["--engine"]:
        run_engine(sys.argv[2], int(sys.argv[3]))
    else:
        main()
