"""Score sequences of 20 to 400 steps with two LSTMs of 128 cells: by `Scorer`, and by other libraries.

Needed by: docs/scoring.md

    python benchmarks/scoring.py [--sequences 20000] [--rounds 3] [--ways ...]

Prints Markdown: seconds until the last h of every sequence is there, by one process of one thread.  Sequences have 40
inputs, and lengths drawn evenly.

* Scorer: as it comes.
* torch: PackedSequences of sequences that are sorted by length.
* onnxruntime: padded batches of such sequences, with their lengths, for ONNX's own LSTM nodes.

PyTorch and onnxruntime have the batch of 16 to 256 that is best for each way on 512 sequences.  Each way runs in a
process of its own; they take turns, and rounds on a disturbed machine are repeated (turns.py).  A figure is the median
of the rounds, with the fastest and the slowest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import turns
from candidates import open_session
from machine import CPUS

import blockcell
from blockcell import LSTM, Scorer, Stack

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


def split_batches(lengths: list[int], batch: int) -> list[Array]:
    """Return the numbers of the sequences of each batch, the longest first."""
    order = np.argsort(lengths, kind="stable")[::-1]
    return [order[first : first + batch] for first in range(0, len(order), batch)]


# ------------------------------------------------------------------------------------------------------------- the ways
def make_scorer() -> Way:
    net = make_network()
    return lambda xs, batch: np.array(Scorer(net, batch=batch)(xs))


def make_torch() -> Way:
    import torch
    from torch.nn.utils.rnn import pack_sequence

    from blockcell import convert

    torch.set_num_threads(1)
    net = torch.nn.LSTM(INPUTS, CELLS, num_layers=2)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in convert.to_torch(make_network()).items()})

    @torch.inference_mode()
    def score(xs: list[Array], batch: int) -> Array:
        outputs = np.empty((len(xs), CELLS), np.float32)
        for numbers in split_batches([len(x) for x in xs], batch):
            packed = pack_sequence([torch.from_numpy(xs[k]) for k in numbers])
            outputs[numbers] = net(packed)[1][0][-1].numpy()
        return outputs

    return score


def make_onnxruntime() -> Way:
    from onnx_export import export

    session = open_session(export(make_network(), None, loop="native", state=False).SerializeToString(), threads=1)

    def score(xs: list[Array], batch: int) -> Array:
        outputs = np.empty((len(xs), CELLS), np.float32)
        for numbers in split_batches([len(x) for x in xs], batch):
            lengths = np.array([len(xs[k]) for k in numbers])
            x = np.zeros((lengths.max(), len(numbers), INPUTS), np.float32)
            for b, k in enumerate(numbers):
                x[: len(xs[k]), b] = xs[k]
            [outputs[numbers]] = session.run(["1.h"], {"x": x, "lengths": lengths})
        return outputs

    return score


WAYS: dict[str, Callable[[], Way]] = {"Scorer": make_scorer, "torch": make_torch, "onnxruntime": make_onnxruntime}


def work(way: str, number: str) -> None:
    """Answer [batch, sequences] with the seconds, and with sums of the results for a check."""
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((length, INPUTS), np.float32) for length in draw_lengths(int(number))]
    score = WAYS[way]()
    score(xs[:4], 4)

    def reply(question: tuple[int, int]) -> tuple[float, list[float]]:
        batch, count = question
        results = []
        spent = turns.seconds(lambda: results.append(score(xs[:count], batch)), 0)
        return spent, results[0].astype(np.float64).sum(axis=0).tolist()

    turns.answer(reply)


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=3)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument(
        "--ways", nargs="+", default=[*WAYS], choices=WAYS, help="the first is compared with the others"
    )
    options = parser.parse_args()
    number, lengths = options.sequences, draw_lengths(options.sequences)
    about = blockcell.build_info()
    print(f"{CPUS} CPUs, {about['cpu']}, level {about['level']}; {number:,} sequences, {sum(lengths):,} steps\n")
    team = {way: turns.Worker(__file__, "--work", way, str(number), OMP_NUM_THREADS="1") for way in options.ways}
    with turns.open_workers(team, needed=False) as workers:

        def best_batch(way: str) -> int:
            if way == "Scorer":
                return DEFAULT
            return min(BATCHES, key=lambda batch: workers[way].ask([batch, min(TRIED, number)])[0])

        best = {way: best_batch(way) for way in workers}

        def measure() -> dict[str, tuple[float, list[float]]]:
            return {way: worker.ask([best[way], number]) for way, worker in workers.items()}

        rounds = turns.select_rounds(turns.watch(workers.values()).rounds(1, measure, options.rounds))
    first, *_ = best
    turns.print_heads(["", "batch", "s", f"times that of {first}"])
    for way in best:
        times = [answers[way][0] for answers in rounds]
        assert np.allclose(rounds[0][way][1], rounds[0][first][1], atol=1e-4 * number), "results differ"
        ratio = statistics.median(a / answers[first][0] for a, answers in zip(times, rounds, strict=True))
        figures = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})", f"{ratio:.2f}x"
        turns.print_row([way, best[way], *figures])


if __name__ == "__main__":
    turns.run_program(main, work)
