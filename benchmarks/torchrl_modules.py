"""Compare TorchRL's LSTMModule before and after `replace`: milliseconds of a training step, and peak memory.

Needed by: docs/torch.md

    python benchmarks/torchrl_modules.py [--rounds 5] [--seconds 0.5]

A step is forward and backward in recurrent mode on one thread, for rollouts of 128 steps in which 3 % of the steps
start an episode, with a stored state at each step and I = H.  "pad" and "scan" are backends of TorchRL's own.  Each
candidate is a process of its own for each size, and they are asked in turn (turns.py).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from turns import (
    Worker,
    answer,
    ask_all,
    make_parser,
    open_workers,
    print_heads,
    print_row,
    run_program,
    seconds,
    select_rounds,
    watch,
)

CANDIDATES = ("blockcell.torch", "pad", "scan")
T, SHARE, SIZES = 128, 0.03, ((16, 64), (128, 256))


def work(candidate: str, rows: str, width: str) -> None:
    """Answer a budget, in a list, with the median seconds of a step, and the peak MiB of memory that steps added."""
    import resource

    import torch
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, set_recurrent_mode

    import blockcell.torch

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB

    torch.set_num_threads(1)
    torch.manual_seed(0)
    B, H = int(rows), int(width)
    backend = "pad" if candidate == "blockcell.torch" else candidate
    module = LSTMModule(H, H, in_key="x", out_key="y", recurrent_backend=backend)
    if candidate == "blockcell.torch":
        blockcell.torch.replace(module)
    states = {key: torch.randn(B, T, 1, H) for key in module.in_keys[1:3]}
    rollout = TensorDict({"x": torch.randn(B, T, H), "is_init": torch.rand(B, T, 1) < SHARE, **states}, [B, T])
    before = peak()

    def train() -> None:
        module.zero_grad()
        with set_recurrent_mode(True):
            module(rollout.copy())["y"].square().mean().backward()

    train()
    answer(lambda question: (seconds(train, *question), peak() - before))


def main() -> None:
    options = make_parser(__doc__, rounds=5, seconds=0.5).parse_args()
    print_heads(["rows", "H", *[f"{name}, ms" for name in CANDIDATES], *[f"{name}, MiB" for name in CANDIDATES]])
    for B, H in SIZES:
        team: Any = {name: Worker(__file__, "--work", name, str(B), str(H)) for name in CANDIDATES}
        with open_workers(team, needed=False) as workers:
            measure = partial(ask_all, workers, options.seconds)
            rounds = select_rounds(watch(workers.values()).rounds(1, measure, options.rounds))
        times = {name: 1e3 * statistics.median(one[name][0] for one in rounds) for name in workers}
        peaks = {name: max(one[name][1] for one in rounds) for name in workers}
        cells = [[f"{values[name]:.1f}" if name in values else "" for name in CANDIDATES] for values in (times, peaks)]
        print_row([B, H, *cells[0], *cells[1]])


if __name__ == "__main__":
    run_program(main, work)
