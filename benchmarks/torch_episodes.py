"""Compare ways to train an LSTM of PyTorch on rollouts in which episodes start anywhere: environment steps a second.

Needed by: docs/recurrent-policies.md

    python benchmarks/torch_episodes.py [--csv docs/benchmarks/torch-episodes.csv]    # 4 minutes

A call is forward and backward, to weights and input, of a rollout of 128 steps, on one thread; 3 % of the steps start
an episode, and I = H.  All ways but the last are torch.nn's, and all compute the same:

* steps: a loop that calls nn.LSTM for each step, and first sets the state of new episodes to zero.
* cells: the same loop with nn.LSTMCell.
* stretches: a loop that calls nn.LSTM for all steps up to the next at which any environment starts an episode.
* packed: one call of nn.LSTM on a PackedSequence with a row for each episode.
* padded: one call of nn.LSTM on an array with a row for each episode, as long as the longest.
* reset: one call of blockcell.torch.LSTM with ``reset=``.

Each way is a process of its own, and they are asked in turn (turns.py).  report.py draws a picture of the CSV.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import describe_machine
from turns import (
    Worker,
    answer_seconds,
    ask_all,
    make_parser,
    open_workers,
    print_heads,
    print_row,
    run_program,
    select_rounds,
    watch,
)

if TYPE_CHECKING:
    from torch import Tensor

T, BATCHES, WIDTHS, SHARE = 128, (16, 128), (64, 256), 0.03
COLUMNS = ["B", "H", "way", "milliseconds", "steps_per_second", "lowest", "highest", "rounds", "marked"]


# ------------------------------------------------------------------------------------------------------------- the ways
def loop_over_steps(lstm: Any, x: Tensor, start: Tensor) -> Tensor:
    import torch

    state, outputs = (x.new_zeros(1, x.shape[1], lstm.hidden_size),) * 2, []
    for row, kept in zip(x, (~start).unsqueeze(-1), strict=True):
        y, state = lstm(row[None], tuple([part * kept for part in state]))
        outputs.append(y)
    return torch.cat(outputs)


def loop_over_cells(cell: Any, x: Tensor, start: Tensor) -> Tensor:
    import torch

    state, outputs = (x.new_zeros(x.shape[1], cell.hidden_size),) * 2, []
    for row, kept in zip(x, (~start).unsqueeze(-1), strict=True):
        state = cell(row, tuple([part * kept for part in state]))
        outputs.append(state[0])
    return torch.stack(outputs)


def loop_over_stretches(lstm: Any, x: Tensor, start: Tensor) -> Tensor:
    import torch

    state, outputs = (x.new_zeros(1, x.shape[1], lstm.hidden_size),) * 2, []
    cuts = [0, *(start[1:].any(1).nonzero().flatten() + 1).tolist(), len(x)]
    for first, end in itertools.pairwise(cuts):
        kept = ~start[first].unsqueeze(-1)
        y, state = lstm(x[first:end], tuple([part * kept for part in state]))
        outputs.append(y)
    return torch.cat(outputs)


def number_episodes(start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the episode and the step in it of each step [B*T], environment by environment, and episodes' lengths."""
    import torch

    begins = start.T.clone()
    begins[:, 0] = True
    first = begins.flatten().nonzero().flatten()
    episode = begins.flatten().cumsum(0) - 1
    step = torch.arange(start.numel()) - first[episode]
    return episode, step, first.diff(append=torch.tensor([start.numel()]))


def pack_episodes(lstm: Any, x: Tensor, start: Tensor) -> Tensor:
    import torch
    from torch.nn.utils.rnn import PackedSequence

    episode, step, lengths = number_episodes(start)
    rank = lengths.argsort(descending=True).argsort()  # a PackedSequence has the longest row first
    order = (step * len(lengths) + rank[episode]).argsort()
    index = order % len(x) * x.shape[1] + order // len(x)  # of rows of x.flatten(0, 1)
    y = lstm(PackedSequence(x.flatten(0, 1)[index], step.bincount()))[0].data
    return torch.empty(x.shape[0] * x.shape[1], y.shape[1]).index_copy(0, index, y).view(*x.shape[:2], -1)


def pad_episodes(lstm: Any, x: Tensor, start: Tensor) -> Tensor:
    episode, step, lengths = number_episodes(start)
    padded = x.new_zeros(int(lengths.max()), len(lengths), x.shape[2])
    y, _ = lstm(padded.index_put((step, episode), x.transpose(0, 1).flatten(0, 1)))
    return y[step, episode].view(x.shape[1], x.shape[0], -1).transpose(0, 1)


def call_with_reset(lstm: Any, x: Tensor, start: Tensor) -> Tensor:
    y: Tensor = lstm(x, reset=start)[0]
    return y


WAYS = {
    "steps": loop_over_steps,
    "cells": loop_over_cells,
    "stretches": loop_over_stretches,
    "packed": pack_episodes,
    "padded": pad_episodes,
    "reset": call_with_reset,
}


# ----------------------------------------------------------------------------------------------------------- the worker
def work(way: str) -> None:
    """Answer B, H and a budget with the seconds of a call."""
    import torch

    torch.set_num_threads(1)
    if way == "reset":
        from blockcell.torch import LSTM
    else:
        LSTM = torch.nn.LSTMCell if way == "cells" else torch.nn.LSTM  # type: ignore[assignment, misc]

    def prepare(B: int, H: int) -> Any:
        torch.manual_seed(0)
        start, x, d_y = torch.rand(T, B) < SHARE, torch.randn(T, B, H).requires_grad_(), torch.randn(T, B, H)
        layer = LSTM(H, H)

        def train() -> None:
            x.grad = None
            layer.zero_grad()
            WAYS[way](layer, x, start).backward(d_y)

        return train

    answer_seconds(prepare)


def main() -> None:
    parser = make_parser(__doc__, rounds=3, seconds=0.5)
    parser.add_argument("--csv", help="write the figures to this file")
    options = parser.parse_args()
    lines: list[list[Any]] = []
    with open_workers({way: Worker(__file__, "--work", way) for way in WAYS}) as workers:
        about = describe_machine(None, "float32", ["torch"]) | {"threads": "1"}
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        print_heads(COLUMNS)
        guard = watch(workers.values())
        for B, H in itertools.product(BATCHES, WIDTHS):
            rounds = guard.rounds(1, partial(ask_all, workers, B, H, options.seconds), options.rounds)
            for way in WAYS:
                times = [seconds[way] for seconds in select_rounds(rounds)]
                rates = [f"{T * B / t:.0f}" for t in (statistics.median(times), max(times), min(times))]
                line = [B, H, way, f"{statistics.median(times) * 1e3:.2f}", *rates]
                lines.append([*line, len(rounds), sum(marked for _, marked in rounds)])
                print_row(lines[-1])
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
        Path(options.csv).with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    run_program(main, work)
