"""Compare ways to run an LSTM or a GRU of PyTorch on rows of different lengths: milliseconds of a call.

Needed by: docs/torch.md

    python benchmarks/torch_lengths.py    # 3 minutes

A call takes 32 rows of at most 100 steps, I = 64 and H = 128, on one thread, and gives y [T,B,H]; training computes all
gradients, too.  Of nn, torch.nn, and of blockcell.torch there is:

* packed: pack_padded_sequence, a call, pad_packed_sequence.
* padded: a call that takes the padding for steps.
* lengths: a call with ``lengths=``, of blockcell.torch alone.

Each way is a process of its own, and they are asked in turn (turns.py).
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import Any

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

T, B, I, H = 100, 32, 64, 128  # noqa: E741
LONGEST = {"0 %": (T, T), "50 %": (1, T), "90 %": (1, T // 5)}  # the lengths of all rows but one are drawn from these
WAYS = ["nn packed", "nn padded", "packed", "padded", "lengths"]


def work(way: str) -> None:
    """Answer a kind, a task, the padding and a budget with the seconds of a call."""
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    import blockcell.torch

    torch.set_num_threads(1)

    def prepare(kind: str, task: str, padding: str) -> Any:
        torch.manual_seed(0)
        least, most = LONGEST[padding]
        lengths = torch.randint(least, most + 1, (B,))
        lengths[0] = T
        x, d_y = torch.randn(T, B, I), torch.randn(T, B, H)
        d_y[torch.arange(T)[:, None] >= lengths] = 0
        layer = getattr(torch.nn if way.startswith("nn") else blockcell.torch, kind)(I, H)

        def call() -> Any:
            if "packed" in way:
                packed, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
                return pad_packed_sequence(packed, total_length=T)[0]
            return layer(x, lengths=lengths)[0] if way == "lengths" else layer(x)[0]

        def train() -> None:
            x.requires_grad_().grad = None
            layer.zero_grad()
            call().backward(d_y)

        return train if task == "training" else torch.no_grad()(call)

    answer_seconds(prepare)


def main() -> None:
    parser = make_parser(__doc__, rounds=3, seconds=0.5)
    options = parser.parse_args()
    with open_workers({way: Worker(__file__, "--work", way) for way in WAYS}) as workers:
        about = describe_machine(None, "float32", ["torch"]) | {"threads": "1"}
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        print_heads(["kind", "task", "padding", *WAYS])
        guard = watch(workers.values())
        for question in itertools.product(("LSTM", "GRU"), ("inference", "training"), LONGEST):
            rounds = select_rounds(
                guard.rounds(1, partial(ask_all, workers, *question, options.seconds), options.rounds)
            )
            print_row([*question, *(f"{statistics.median([r[way] for r in rounds]) * 1e3:.2f}" for way in WAYS)])


if __name__ == "__main__":
    run_program(main, work)
