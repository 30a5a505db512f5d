"""Compare blockcell.torch with PyTorch and TorchRL: layers, cells, padding, episodes and a whole network.

Needed by: docs/torch.md, docs/recurrent-policies.md

    python benchmarks/torch_modules.py layers --csv docs/benchmarks/torch-modules.csv    # every size, 15 minutes
    python benchmarks/torch_modules.py layers --tasks "GRU training" --widths 32 --batches 1 --steps 1 --stacks 1x1
    python benchmarks/torch_modules.py episodes --csv docs/benchmarks/torch-episodes.csv
    python benchmarks/torch_modules.py more      # or cells, int8, lengths, torchrl, consensus

* layers: LSTM and GRU, inference under ``no_grad``, and training: forward, backward to weights and input, and a step of
  Adam.  A compiled model is the layer and a Linear above it under ``torch.compile``, as users have it: it breaks the
  graph at torch.nn's layers.
* more: the same of RNNs, and of LSTMs that are projected to H / 2.  cells: LSTMCell, GRUCell and RNNCell in a loop.
* int8: inference, also of layers that torch's quantize_dynamic and ``replace(model, quantize="int8")`` make.
* lengths: 32 rows of at most 100 steps, I = 64 and H = 128; training computes all gradients.  "packed" is
  pack_padded_sequence, a call, pad_packed_sequence; "padded" takes the padding for steps; "lengths" is ``lengths=``.
* episodes: forward and backward of a rollout of 128 steps, 3 % of which start an episode.  All ways but the last are
  torch.nn's, and all compute the same.  cells: a loop that calls nn.LSTMCell and first sets the state of new episodes
  to zero; stretches: one that calls nn.LSTM for all steps up to the next at which any environment starts an episode;
  packed: nn.LSTM on a PackedSequence with a row for each episode; padded: on an array with a row for each episode, as
  long as the longest; reset: blockcell.torch.LSTM with ``reset=``.
* torchrl: a training step of TorchRL's LSTMModule in recurrent mode, before and after `replace`, for such rollouts with
  a stored state at each step; "pad" and "scan" are backends of TorchRL's own.
* consensus: inference of the network of medaka 2.1.0, Oxford Nanopore's consensus caller, on a batch of chunks as long
  as medaka's, with random weights and features.

I = H but where it is said; a stack is LAYERSxDIRECTIONS.  lengths and those after it run on one thread.  Each candidate
is a process of its own, and they are asked in turn; rounds in which the machine was disturbed are repeated (turns.py).
Prints for each point the milliseconds of each candidate, medians of the rounds, and the first one's time over each
other's, the median of the rounds' ratios; for some the peak memory of the process, and whether all gave the same
results; then the lowest ratio, the geometric mean and the highest of all rows and widths.  The CSV has the lowest and
highest ratio of the rounds to the last candidate; report.py makes tables and a picture of such files.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import resource
import statistics
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import turns
from bench import describe_machine
from machine import CPUS

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], object]
WORKS = ("inference", "training")
EAGER = [f"{kind} {work}" for work in WORKS for kind in ("LSTM", "GRU")]
STACKS = ["1x1", "1x2", "2x1", "2x2"]
FEW_STACKS = ["1x1", "2x2"]  # compiled
GRID = {"steps": [1, 20, 100], "widths": [32, 64, 128, 256, 512], "batches": [1, 16, 64]}
FEW = {"steps": [1, 20], "widths": [32, 256], "batches": [1, 16]}  # compiled
LONGEST = {"0 %": (100, 100), "50 %": (1, 100), "90 %": (1, 20)}  # the lengths of all rows but one are between these
ROLLOUT, SHARE = 128, 0.03  # steps of a rollout, and how many start an episode
COLUMNS = 10_000  # of a chunk: medaka's --chunk_len; its --batch_size is 100 (medaka/medaka.py)


def find_modules(ours: bool) -> Any:
    """Return blockcell.torch or torch.nn, whose process is left without blockcell, which sets the allocator."""
    return importlib.import_module("blockcell.torch" if ours else "torch.nn")


# ------------------------------------------------------------------------------------------------- layers and cells
def prepare_layers(candidate: str, task: str, T: int, B: int, H: int, stack: str) -> Call:
    import torch

    package, _, scheme = candidate.partition(" ")
    *how, kind, work = task.split()
    layers, directions = map(int, stack.split("x"))
    P = H // 2 if "projected" in how else H
    modules = find_modules(package == "blockcell.torch")

    class LinearModel(torch.nn.Module):
        """Run a module and a Linear above it: the model to compile."""

        def __init__(self, rnn: torch.nn.Module) -> None:
            super().__init__()
            self.rnn, self.linear = rnn, torch.nn.Linear(directions * P, directions * P)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.rnn(x)[0])

    class CellLoop(torch.nn.Module):
        """Run a cell over all steps."""

        def __init__(self, cell: torch.nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> tuple[Tensor]:
            hx, outputs = None, []
            for row in x:
                hx = self.cell(row, hx)
                outputs.append(hx[0] if isinstance(hx, tuple) else hx)
            return (torch.stack(outputs),)

    if kind.endswith("Cell"):
        model = CellLoop(getattr(modules, kind)(H, H))
    else:
        sizes = {"proj_size": P} if P != H else {}
        model = getattr(modules, kind)(H, H, layers, bidirectional=directions == 2, **sizes)
    if scheme and package == "torch.nn":
        warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
        kinds = {torch.nn.LSTM, torch.nn.GRU}
        model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(model.eval()), kinds, torch.qint8)[0]
        assert "Quantized" in repr(model), model
    elif scheme:
        modules.replace(model.eval(), quantize=scheme)
    if "compiled" in how:
        torch.compiler.reset()
        model = LinearModel(model)
    forward = torch.compile(model) if "compiled" in how else lambda x: model(x)[0]
    x, y_grad = torch.randn(T, B, H), torch.randn(T, B, directions * P)
    if work == "inference":
        model.eval()
        return torch.no_grad()(lambda: forward(x))
    optimizer = torch.optim.Adam(model.parameters())
    x.requires_grad_()

    def train() -> None:
        x.grad = None
        optimizer.zero_grad()
        forward(x).backward(y_grad)
        optimizer.step()

    return train


def list_layers(tasks: Sequence[str], options: argparse.Namespace, **default: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the points of tasks; of compiled ones few, unless sizes are given."""
    for task in tasks:
        compiled = task.startswith("compiled")
        grid = {"stacks": FEW_STACKS, **FEW} if compiled else {"stacks": STACKS, **GRID} | default
        stacks, steps, widths, batches = (getattr(options, name) or values for name, values in grid.items())
        for stack, T, H, B in itertools.product(stacks, steps, widths, batches):
            yield task, T, B, H, stack


# ------------------------------------------------------------------------------------------------- rows of all lengths
def prepare_lengths(way: str, task: str, padding: str) -> Call:
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    T, B, (kind, work) = 100, 32, task.split()
    lengths = torch.randint(LONGEST[padding][0], LONGEST[padding][1] + 1, (B,))
    lengths[0] = T
    x, d_y = torch.randn(T, B, 64), torch.randn(T, B, 128)
    d_y[torch.arange(T)[:, None] >= lengths] = 0
    layer = getattr(find_modules(not way.startswith("nn")), kind)(64, 128)

    def call() -> Any:
        if "packed" in way:
            packed, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
            return pad_packed_sequence(packed, total_length=T)[0]
        return layer(x, lengths=lengths)[0] if way == "lengths" else layer(x)[0]

    return make_training(layer, x, d_y, call) if work == "training" else torch.no_grad()(call)


def make_training(layer: Any, x: Tensor, d_y: Tensor, call: Callable[[], Tensor]) -> Call:
    """Return a call that computes all gradients."""
    x.requires_grad_()

    def train() -> None:
        x.grad = None
        layer.zero_grad()
        call().backward(d_y)

    return train


# ------------------------------------------------------------------------------------------------------------- episodes
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


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "cells": loop_over_cells,
    "stretches": loop_over_stretches,
    "packed": pack_episodes,
    "padded": pad_episodes,
    "reset": lambda lstm, x, start: lstm(x, reset=start)[0],
}


def prepare_episodes(way: str, B: int, H: int) -> Call:
    import torch

    layer = getattr(find_modules(way == "reset"), "LSTMCell" if way == "cells" else "LSTM")(H, H)
    start, x, d_y = torch.rand(ROLLOUT, B) < SHARE, torch.randn(ROLLOUT, B, H), torch.randn(ROLLOUT, B, H)
    return make_training(layer, x, d_y, lambda: WAYS[way](layer, x, start))


def prepare_torchrl(candidate: str, B: int, H: int) -> Call:
    import torch
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, set_recurrent_mode

    backend = "pad" if candidate == "blockcell.torch" else candidate
    module = LSTMModule(H, H, in_key="x", out_key="y", recurrent_backend=backend)
    if candidate == "blockcell.torch":
        find_modules(True).replace(module)
    states = {key: torch.randn(B, ROLLOUT, 1, H) for key in module.in_keys[1:3]}
    inputs = {"x": torch.randn(B, ROLLOUT, H), "is_init": torch.rand(B, ROLLOUT, 1) < SHARE}
    rollout = TensorDict(inputs | states, [B, ROLLOUT])

    def train() -> None:
        module.zero_grad()
        with set_recurrent_mode(True):
            module(rollout.copy())["y"].square().mean().backward()

    return train


def prepare_consensus(candidate: str, chunks: int) -> Call:
    """Prepare a network with the sizes of medaka's `GRUModel` (medaka/architectures/gru.py in nanoporetech/medaka)."""
    import torch

    class ConsensusModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(10, 128, num_layers=2, bidirectional=True, batch_first=True)
            self.linear = torch.nn.Linear(256, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.gru(x)[0]).softmax(-1)

    model = ConsensusModel().eval()
    if candidate == "blockcell.torch":
        find_modules(True).replace(model)
    x = torch.rand(chunks, COLUMNS, 10, generator=torch.Generator().manual_seed(1))
    return torch.inference_mode()(lambda: zlib.crc32(model(x).argmax(-1).byte().numpy().tobytes()))


# ------------------------------------------------------------------------------------------------------------ the cases
class Case(NamedTuple):
    """What is compared: each candidate is asked each point, whose cells have these columns."""

    prepare: Callable[..., Call]
    """Takes a candidate and a point to the call that is timed."""
    candidates: Sequence[str]
    columns: Sequence[str]
    points: Callable[[argparse.Namespace], Iterable[tuple[Any, ...]]]
    threads: int = 1
    memory: bool = False


def of_layers(tasks: Sequence[str], candidates: Sequence[str] = ("torch.nn", "blockcell.torch"), **sizes: Any) -> Case:
    """Make a case of layers or cells."""
    columns = ("task", "T", "B", "H", "stack")
    return Case(prepare_layers, candidates, columns, lambda o: list_layers(o.tasks or tasks, o, **sizes), CPUS)


QUANTIZED = ("torch.nn", "torch.nn int8", "blockcell.torch", "blockcell.torch int8")
MORE = {"stacks": ["1x1"], "steps": [1, 20], "widths": [16, 64, 256], "batches": [1, 16, 64]}
CASES = {
    "layers": of_layers([*EAGER, *(f"compiled {task}" for task in EAGER)]),
    "more": of_layers([f"{kind} {work}" for work in WORKS for kind in ("RNN", "projected LSTM")], **MORE),
    "cells": of_layers([f"{kind}Cell {work}" for work in WORKS for kind in ("LSTM", "GRU", "RNN")], **MORE),
    "int8": of_layers(EAGER[:2], QUANTIZED, **MORE | {"widths": [256, 512], "batches": [1, 16]}),
    "lengths": Case(
        prepare_lengths,
        ("nn packed", "nn padded", "packed", "padded", "lengths"),
        ("task", "padding"),
        lambda options: itertools.product(options.tasks or EAGER, LONGEST),
    ),
    "episodes": Case(prepare_episodes, [*WAYS], "BH", lambda _: itertools.product((16, 128), (64, 256))),
    "torchrl": Case(
        prepare_torchrl, ("pad", "scan", "blockcell.torch"), "BH", lambda _: ((16, 64), (128, 256)), memory=True
    ),
    "consensus": Case(
        prepare_consensus, ("torch.nn", "blockcell.torch"), ("chunks",), lambda o: [(o.chunks,)], memory=True
    ),
}


def work(name: str, candidate: str, threads: str) -> None:
    """Answer a point and a budget with the seconds of a call, the peak MiB of the process so far, and a result."""
    import torch

    torch.set_num_threads(int(threads))
    ready: dict[str, tuple[Call, object]] = {}

    def reply(question: Sequence[Any]) -> tuple[float, float, object]:
        *point, budget = question
        key = json.dumps(point)
        if key not in ready:
            ready.clear()
            torch.manual_seed(0)
            call = CASES[name].prepare(candidate, *point)
            result = call()
            ready[key] = call, result if isinstance(result, int) else None
        call, result = ready[key]
        spent = turns.seconds(call, budget)
        return spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result  # Linux counts in KiB

    turns.answer(reply)


def main() -> None:
    parser = turns.make_parser(__doc__, rounds=3, seconds=0.1)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="of layers, more, cells, int8 and lengths")
    parser.add_argument("--widths", nargs="+", type=int, help="H, and I = H")
    parser.add_argument("--batches", nargs="+", type=int, help="B")
    parser.add_argument("--steps", nargs="+", type=int, help="T")
    parser.add_argument("--stacks", nargs="+", metavar="LAYERSxDIRECTIONS", choices=STACKS, help=", ".join(STACKS))
    parser.add_argument("--chunks", type=int, default=100, help=f"of {COLUMNS:,} columns, in one batch (100)")
    parser.add_argument("--threads", type=int, help="of all candidates")
    parser.add_argument("--csv", type=Path, help="write the points to this file")
    options = parser.parse_args()
    case, lines, ratios_of = CASES[options.case], [], {}
    first, *others = case.candidates
    threads = options.threads or case.threads
    team: dict[str, turns.Worker] = {
        candidate: turns.Worker(__file__, "--work", options.case, candidate, str(threads), OPENBLAS_NUM_THREADS="1")
        for candidate in case.candidates
    }
    with turns.open_workers(team) as workers:
        about = describe_machine(None, "float32", ["torch"]) | {"threads": str(threads)}
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        memory = [*(f"{name}, MiB" for name in case.candidates), "same results"] if case.memory else []
        heads = [*(f"{name}, ms" for name in case.candidates), *(f"{first} / {name}" for name in others)]
        turns.print_heads([*case.columns, *heads, *memory])
        guard = turns.watch(workers.values())
        for point in case.points(options):
            rounds = guard.rounds(threads, partial(turns.ask_all, workers, *point, options.seconds), options.rounds)
            kept = turns.select_rounds(rounds)
            times = {name: [answers[name][0] for answers in kept] for name in case.candidates}
            ratios = {name: [a / b for a, b in zip(times[first], times[name], strict=True)] for name in others}
            group = tuple(f"{n} = {v}" for n, v in zip(case.columns, point, strict=True) if n not in ("B", "H"))
            for name in others:
                ratios_of.setdefault((*group, name), []).append(statistics.median(ratios[name]))
            medians = [statistics.median(times[name]) for name in case.candidates]
            cells = [f"{1e3 * median:.4g}" for median in medians]
            cells += [f"{statistics.median(ratios[name]):.2f}x" for name in others]
            if case.memory:
                cells += [f"{max(answers[name][1] for answers in kept):,.0f}" for name in case.candidates]
                results = {own[2] for own in kept[-1].values()}
                cells.append("" if results == {None} else "yes" if len(results) == 1 else "no")
            turns.print_row([*point, *cells])
            last = ratios[others[-1]]
            figures = [round(ratio, 3) for ratio in (statistics.median(last), min(last), max(last))]
            marked = sum(mark for _, mark in rounds)
            lines.append([*point, *(round(1e6 * median, 2) for median in medians), *figures, len(rounds), marked])
    print()
    for names, values in ratios_of.items():
        figures = f"{min(values):.2f}x, {statistics.geometric_mean(values):.2f}x, {max(values):.2f}x"
        print(f"{', '.join(names)}: {figures} of {len(values)} points")
    if options.csv:
        columns = [*case.columns, *(f"{name}, us" for name in case.candidates)]
        turns.write_table(options.csv, [*columns, "ratio", "lowest", "highest", "rounds", "marked"], lines, about)


if __name__ == "__main__":
    turns.run_program(main, work)
