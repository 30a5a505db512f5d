"""Compare blockcell.torch's modules with torch.nn's: inference and training steps, eager and compiled.

Needed by: docs/torch.md

    python benchmarks/torch_modules.py --quick                                    # a few minutes
    python benchmarks/torch_modules.py --csv docs/benchmarks/torch-modules.csv    # the whole grid, 15 minutes
    python benchmarks/torch_modules.py --tasks "GRU training" --widths 32 --batches 1 --steps 1 --stacks 1x1
    python benchmarks/torch_modules.py --tasks "LSTM inference" --steps 100 --batches 64 --lengths short
    python benchmarks/torch_modules.py --int8    # or --cells, or --more: docs/torch.md has their tables

I = H; a stack is LAYERSxDIRECTIONS.  Inference is under ``no_grad``; a training step is forward, backward to weights
and input, and a step of Adam.  A compiled model is the module and a Linear above it under ``torch.compile``, as users
have it: it breaks the graph at torch.nn's modules.  With --lengths, eager modules get PackedSequences, of rows with 1
to T steps ("uniform"), or with up to T / 10 but for one of T ("short").  With --int8, inference is also measured of
modules that torch's quantize_dynamic and ``replace(model, quantize="int8")`` make, and a table has the speed of each,
relative to torch.nn.  With --cells, LSTMCell, GRUCell and RNNCell are measured in loops over T steps, as users write
them; with --more, RNNs and LSTMs that are projected to H / 2.  Both print a table, for one layer in one direction.

Each candidate is a process of its own, and they are asked in turn (turns.py).  A round goes through all points, but the
rounds of a compiled point follow each other, since compiling takes long.  Rounds in which the machine was disturbed are
marked and, but for --quick, repeated.  A ratio is the median of the rounds' ratios; the CSV has the lowest and highest
too, and report.py makes docs/benchmarks/torch.md of it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import describe_machine
from turns import (
    CPUS,
    Worker,
    answer_seconds,
    ask_all,
    make_parser,
    open_workers,
    run_program,
    select_rounds,
    take_turns,
    watch,
)

KINDS = ("LSTM", "GRU")
EAGER = [f"{kind} {work}" for work in ("inference", "training") for kind in KINDS]
TASKS = [*EAGER, *(f"compiled {task}" for task in EAGER)]
CELLS = [f"{kind}Cell {work}" for work in ("inference", "training") for kind in (*KINDS, "RNN")]
MORE = [f"{kind} {work}" for work in ("inference", "training") for kind in ("RNN", "projected LSTM")]
CANDIDATES = ("torch.nn", "blockcell.torch")
QUANTIZED = ("torch.nn", "torch.nn int8", "blockcell.torch", "blockcell.torch int8")  # --int8
GRID = {"widths": [32, 64, 128, 256, 512], "batches": [1, 16, 64], "steps": [1, 20, 100]}
STACKS = ["1x1", "1x2", "2x1", "2x2"]
FEW = {"widths": [32, 256], "batches": [1, 16], "steps": [1, 20]}  # quick, and compiled
FEW_STACKS = ["1x1", "2x2"]
FEW_QUANTIZED = {"widths": [256, 512], "batches": [1, 16], "steps": [1, 20]}
FEW_MORE = {"widths": [16, 64, 256], "batches": [1, 16, 64], "steps": [1, 20]}  # and cells
COLUMNS = ["task", "T", "B", "H", "layers", "directions", "torch_us", "blockcell_us", "ratio", "lowest", "highest"]
COLUMNS += ["rounds", "marked"]
Point = tuple[str, dict[str, int]]
Rounds = list[tuple[list[float], bool]]  # of a point: times of the candidates, and a mark


def work(candidate: str, threads: str, lengths: str) -> None:
    """Answer a task, its sizes and a budget with the seconds of a call."""
    import torch

    torch.set_num_threads(int(threads))
    package, _, scheme = candidate.partition(" ")
    if package == "torch.nn":
        modules = torch.nn
    else:
        import blockcell.torch as modules

    class LinearModel(torch.nn.Module):
        """Run a module and a Linear above it: the model to compile."""

        def __init__(self, rnn: torch.nn.Module, outputs: int) -> None:
            super().__init__()
            self.rnn, self.linear = rnn, torch.nn.Linear(outputs, outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.rnn(x)[0])

    class CellLoop(torch.nn.Module):
        """Run a cell over all steps and return h of each, in a tuple as a layer returns y."""

        def __init__(self, cell: torch.nn.Module) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            hx, outputs = None, []
            for row in x:
                hx = self.cell(row, hx)
                outputs.append(hx[0] if isinstance(hx, tuple) else hx)
            return (torch.stack(outputs),)

    def quantize(module: torch.nn.Module) -> torch.nn.Module:
        """Return the module quantized to int8."""
        if package == "torch.nn":
            warnings.simplefilter("ignore")  # it is deprecated
            kinds = {torch.nn.LSTM, torch.nn.GRU}
            quantized = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(module), kinds, torch.qint8)[0]
            assert "Quantized" in repr(quantized), quantized
            return quantized
        modules.replace(module, quantize=scheme)
        return module

    def pack_rows(steps: torch.Tensor, T: int, B: int) -> Any:
        most = T if lengths == "uniform" else max(1, T // 10)
        rows = [T, *torch.randint(1, most + 1, (B - 1,), generator=torch.Generator().manual_seed(1)).tolist()]
        return torch.nn.utils.rnn.pack_padded_sequence(steps, sorted(rows, reverse=True))

    def prepare(task: str, T: int, B: int, H: int, layers: int, directions: int) -> Any:
        torch.manual_seed(0)
        *how, kind, task_name = task.split()
        compiled = "compiled" in how
        if kind.endswith("Cell"):
            model = CellLoop(getattr(modules, kind)(H, H))
        else:
            sizes = {"proj_size": H // 2} if "projected" in how else {}
            model = getattr(modules, kind)(H, H, layers, bidirectional=directions == 2, **sizes)
        width = directions * (H // 2 if "projected" in how else H)
        x, y_grad = torch.randn(T, B, H), torch.randn(T, B, width)
        if scheme:
            model = quantize(model.eval())
        forward = model
        if lengths:
            x, y_grad = pack_rows(x, T, B), pack_rows(y_grad, T, B).data
        if compiled:
            torch.compiler.reset()
            model = LinearModel(model, width)
            forward = torch.compile(model)
        if task_name == "inference":
            model.eval()

            def infer() -> None:
                with torch.no_grad():
                    forward(x)

            return infer
        optimizer = torch.optim.Adam(model.parameters())
        data = x.data if lengths else x
        data.requires_grad_()

        def train() -> None:
            data.grad = None
            optimizer.zero_grad()
            y = forward(x)
            (y if compiled else y[0].data if lengths else y[0]).backward(y_grad)
            optimizer.step()

        return train

    answer_seconds(lambda task, sizes: prepare(task, **sizes))


def points(options: argparse.Namespace) -> tuple[list[Point], list[Point]]:
    """Return the eager points, and the compiled points: few, unless sizes are given."""
    few = FEW if options.quick else GRID
    all_points: tuple[list[Point], list[Point]] = ([], [])
    for task in options.tasks:
        compiled = task.startswith("compiled")
        default = FEW_QUANTIZED if options.int8 else FEW_MORE if options.with_table else FEW if compiled else few
        has_one_stack, few_stacks = options.with_table, compiled or options.quick
        stacks = options.stacks or (["1x1"] if has_one_stack else FEW_STACKS if few_stacks else STACKS)
        widths, batches, steps = (getattr(options, name) or default[name] for name in ("widths", "batches", "steps"))
        for stack, T, H, B in itertools.product(stacks, steps, widths, batches):
            layers, directions = map(int, stack.split("x"))
            all_points[compiled].append((task, {"T": T, "B": B, "H": H, "layers": layers, "directions": directions}))
    return all_points


def order_points(eager: list[Rounds], compiled: list[Rounds], count: int, more: int) -> Iterator[int]:
    """Yield the numbers of the points in the order of measuring."""
    yield from take_turns(eager, count, more)
    for number, rounds in enumerate(compiled, len(eager)):
        for _ in take_turns([rounds], count, more):
            yield number


def csv_line(point: Point, rounds: Rounds) -> list[Any]:
    kept = select_rounds(rounds)
    theirs, *_, ours = (round(statistics.median(column) * 1e6, 2) for column in zip(*kept, strict=True))
    ratios = [times[0] / times[-1] for times in kept]
    figures = (round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
    return [point[0], *point[1].values(), theirs, ours, *figures, len(rounds), sum(marked for _, marked in rounds)]


def ratio_table(candidates: tuple[str, ...], points: list[Point], all_rounds: list[Rounds]) -> Iterator[str]:
    """Yield a Markdown table: how many times as fast as torch.nn the others are."""
    heads = ["", "stack", "T", "B", "H", f"{candidates[0]}, µs", *candidates[1:]]
    yield from (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads)))
    for (task, sizes), rounds in zip(points, all_rounds, strict=True):
        kept = select_rounds(rounds)
        ratios = [statistics.median(times[0] / times[k] for times in kept) for k in range(1, len(candidates))]
        T, B, H, layers, directions = sizes.values()
        cells = [task, f"{layers}x{directions}", *map(str, (T, B, H))]
        cells += [f"{statistics.median(times[0] for times in kept) * 1e6:,.0f}", *(f"{ratio:.2f}x" for ratio in ratios)]
        yield f"| {' | '.join(cells)} |"


def ratio_table_by_sizes(points: list[Point], all_rounds: list[Rounds]) -> Iterator[str]:
    """Yield a Markdown table of two candidates' ratios, with a line for each size and a column for each task."""
    ratios_of_sizes: dict[tuple[str, ...], dict[str, float]] = {}
    for point, rounds in zip(points, all_rounds, strict=True):
        T, B, H, layers, directions = map(str, point[1].values())
        ratios_of_sizes.setdefault((f"{layers}x{directions}", T, B, H), {})[point[0]] = csv_line(point, rounds)[8]
    same = len({stack for stack, *_ in ratios_of_sizes}) == 1
    tasks = list(dict.fromkeys(task for task, _ in points))
    names = [task.removesuffix(" inference").replace(" training", ", training") for task in tasks]
    heads = [*["stack", "T", "B", "H"][same:], *names]
    yield from (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads)))
    for sizes, ratios in ratios_of_sizes.items():
        yield f"| {' | '.join([*sizes[same:], *(f'{ratios[task]:.2f}x' for task in tasks)])} |"


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--quick", action="store_true", help="a few sizes")
    parser.add_argument("--int8", action="store_true", help="inference with weights in int8")
    parser.add_argument("--cells", action="store_true", help="modules of single steps, in loops")
    parser.add_argument("--more", action="store_true", help="RNNs and projected LSTMs")
    tasks = [*TASKS, *CELLS, *MORE]
    parser.add_argument("--tasks", nargs="+", choices=tasks, metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--widths", nargs="+", type=int, help="H, and I = H")
    parser.add_argument("--batches", nargs="+", type=int, help="B")
    parser.add_argument("--steps", nargs="+", type=int, help="T")
    parser.add_argument("--stacks", nargs="+", metavar="LAYERSxDIRECTIONS", choices=STACKS, help=", ".join(STACKS))
    parser.add_argument("--lengths", default="", choices=["uniform", "short"], help="of the rows of PackedSequences")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of a round of one candidate (0.1)")
    parser.add_argument("--threads", type=int, default=CPUS, help="of both (as many as there are CPUs)")
    parser.add_argument("--csv", help="write the points to this file")
    options = parser.parse_args()
    threads, candidates = str(options.threads), QUANTIZED if options.int8 else CANDIDATES
    possible = EAGER[:2] if options.int8 else CELLS if options.cells else MORE if options.more else TASKS
    options.tasks, options.with_table = options.tasks or possible, options.int8 or options.cells or options.more
    if not {*options.tasks} <= {*possible} or options.int8 + options.cells + options.more > 1:
        parser.error(f"--int8, --cells and --more exclude each other; here --tasks are some of {possible}")
    if options.lengths and not set(options.tasks) <= set(EAGER):
        parser.error(f"--lengths is for some of --tasks {EAGER}")
    if options.with_table and (options.csv or options.lengths):
        parser.error("--int8, --cells and --more print a table; --csv and --lengths are for the others")
    team = {
        candidate: Worker(__file__, "--work", candidate, threads, options.lengths, OPENBLAS_NUM_THREADS="1")
        for candidate in candidates
    }
    with open_workers(team) as workers:
        about = describe_machine(None, "float32", ["torch"]) | {"threads": threads}
        print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
        eager, compiled = points(options)
        todo, more = eager + compiled, 0 if options.quick else options.rounds
        rounds: list[Rounds] = [[] for _ in todo]
        lines: dict[int, list[Any]] = {}
        guard, start, all_ = watch(workers.values()), time.time(), options.rounds * len(todo)

        def ask(point: Point) -> list[float]:
            return [*ask_all(workers, *point, options.budget).values()]

        numbers = order_points(rounds[: len(eager)], rounds[len(eager) :], options.rounds, more)
        for done, number in enumerate(numbers, 1):
            point = todo[number]
            rounds[number].append(guard.round(options.threads, partial(ask, point)))
            lines[number] = csv_line(point, rounds[number])
            left = (time.time() - start) / done * max(0, all_ - done) / 60
            sizes = " ".join(f"{name[0]}{size:<3}" for name, size in point[1].items())
            theirs, ours, ratio, *_, marked = lines[number][6:]
            at = f"[{done} of {all_} or more, {left:.0f} min left]"
            figures = f"{theirs:10.6g} us, ours {ours:10.6g} us ({ratio:.2f}x)"
            print(f"{at} {point[0]:23} {sizes} {figures}{f'  {marked} rounds marked' if marked else ''}", flush=True)
    if options.int8:
        print(*ratio_table(candidates, todo, rounds), sep="\n")
    elif options.with_table:
        print(*ratio_table_by_sizes(todo, rounds), sep="\n")
    for task in options.tasks:
        ratios = [cells[8] for cells in lines.values() if cells[0] == task]
        mean = statistics.geometric_mean(ratios)
        print(f"{task:23} lowest {min(ratios):.2f}x, geometric mean {mean:.2f}x of {len(ratios)} points")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines.values()])
        Path(options.csv).with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    run_program(main, work)
