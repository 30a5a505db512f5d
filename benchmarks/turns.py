"""Run candidates in processes of their own and ask them in turn: in one process, idle threads of one slow the others.

All benchmarks time, repeat and print with this module.  A worker is a Python script that prints "ready" and then
answers every line of its standard input, JSON, with a line of JSON.  A round of `seconds` gives the median time of a
call; a figure is the median of rounds, a ratio the median of the rounds' ratios, and its spread their quartiles.  A
`Watch` marks a round in which the machine was disturbed: cores were shared or slowed down just before or just after it,
or threads of a candidate waited for a CPU.  Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from machine import SHARED, multiply_adds

SLOWED = 0.75  # of the best rate seen: a shared core has half of it, the clock alone moves by a fifth
WAITED = 0.05  # of a candidate's time
ENOUGH = 3  # rounds without a mark, for those with one to be left out
Name = TypeVar("Name")
Round = TypeVar("Round")
waited = 0.0  # of the time of the last `seconds`, while threads of this process were ready to run and had no CPU


def cpu_wait_seconds() -> float:
    """Return the seconds that threads of this process have waited for a CPU; 0 where the system does not count them."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def seconds(call: Callable[[], object], budget: float = 0.3) -> float:
    """Return the median time of single calls within the budget."""
    global waited
    times, before = [], cpu_wait_seconds()
    begin = time.perf_counter()
    while not times or time.perf_counter() < begin + budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    waited = (cpu_wait_seconds() - before) / (time.perf_counter() - begin)
    return statistics.median(times)


def time_in_turn(calls: Sequence[Callable[[], object]], budget: float) -> list[float]:
    """Return the mean seconds of each call, while all calls alternate for `budget` seconds."""
    spent, count = [0.0] * len(calls), 0
    for call in calls:
        call()
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for k, call in enumerate(calls):
            start = time.perf_counter()
            call()
            spent[k] += time.perf_counter() - start
        count += 1
    return [seconds / count for seconds in spent]


def measure_spinning(call: Callable[[], object]) -> float:
    """Return the seconds of CPU time that idle threads spin after a call."""
    seconds = []
    for _ in range(5):
        call()
        start = time.process_time()
        time.sleep(0.1)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles of the values."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return median, low, high


def wait_until_idle() -> None:
    """Wait until no thread of this process spins: onnxruntime's spin for 50 ms and would slow the next candidate."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.004:
            return


class Watch:
    """Mark rounds in which the machine was disturbed.

    Parameters
    ----------
    workers
        Who is asked in a round.
    rate : callable
        Multiply-adds a second of so many threads at once, each on a CPU of its own.
    """

    def __init__(self, workers: Collection[Worker], rate: Callable[[int], float]) -> None:
        self.workers, self.rate = workers, rate
        self.best = max(rate(1) for _ in range(9))

    def is_disturbed(self, threads: int) -> bool:
        """Return whether a core is slow or shared: the host made two of one core, or a neighbour has taken one."""
        rate_of_one = self.rate(1)
        self.best = max(self.best, rate_of_one)
        return rate_of_one < SLOWED * self.best or (threads > 1 and self.rate(2) < SHARED * rate_of_one)

    def round(self, threads: int, measure: Callable[[], Round]) -> tuple[Round, bool]:
        """Measure one round on `threads` threads; return its result and its mark."""
        before = self.is_disturbed(threads)
        for worker in self.workers:
            worker.waited = 0.0
        result = measure()
        waited = any(worker.waited > WAITED for worker in self.workers)
        return result, before or waited or self.is_disturbed(threads)

    def rounds(self, threads: int, measure: Callable[[], Round], count: int) -> list[tuple[Round, bool]]:
        """Measure until `count` rounds have no mark, but never more than twice `count` rounds."""
        rounds_so_far: list[tuple[Round, bool]] = []
        while len(rounds_so_far) < 2 * count and sum(not marked for _, marked in rounds_so_far) < count:
            rounds_so_far.append(self.round(threads, measure))
        return rounds_so_far


def watch(workers: Collection[Worker]) -> Watch:
    """Make a `Watch` that takes 5 ms before and after a round; without a C compiler it does not see shared cores."""
    try:
        multiply_adds("base", "float32", 1, rounds=1, tries=1)
    except (OSError, subprocess.CalledProcessError):
        print("no C compiler: whether cores are shared or slowed down is not known")
        return Watch(workers, float)
    return Watch(workers, partial(multiply_adds, "base", "float32", rounds=500_000, tries=3))


def select_rounds(rounds: Sequence[tuple[Round, bool]], quiet: bool = True) -> list[Round]:
    """Return the results that figures are made of: of unmarked rounds if they are enough, else of all.

    Beside a neighbour (machine.py), which is not `quiet`, all rounds count.
    """
    unmarked = [result for result, marked in rounds if not marked]
    return unmarked if quiet and len(unmarked) >= ENOUGH else [result for result, _ in rounds]


def take_turns(points: Sequence[list[tuple[Round, bool]]], count: int, more: int) -> Iterator[int]:
    """Yield each point's number `count` times, in turn; then, up to `more` times, those with fewer than `count`
    unmarked rounds.  A point is the list of its rounds so far, to which the caller appends."""
    for _ in range(count):
        yield from range(len(points))
    for _ in range(more):
        yield from [k for k, rounds in enumerate(points) if sum(not marked for _, marked in rounds) < count]


def answer(reply: Callable[[Any], Any]) -> None:
    """Answer the questions on standard input with ``reply``, as a worker."""
    print("ready", flush=True)
    for line in sys.stdin:
        result = reply(json.loads(line))
        wait_until_idle()
        print(json.dumps([result, waited]), flush=True)


def answer_seconds(prepare: Callable[..., Callable[[], object]]) -> None:
    """Answer each question, the arguments of ``prepare`` and a budget in seconds, with the seconds of a call."""
    ready: dict[str, Callable[[], object]] = {}

    def reply(question: Sequence[Any]) -> float:
        *task, budget = question
        key = json.dumps(task)
        if key not in ready:
            ready.clear()
            ready[key] = prepare(*task)
            ready[key]()
            ready[key]()
        return seconds(ready[key], budget)

    answer(reply)


class Worker:
    """Run a script that answers.  ``missing`` says why it does not run, or is None; each answer sets ``waited``."""

    def __init__(self, script: str, *arguments: str, **environment: str) -> None:
        self.command, self.environment = [sys.executable, script, *arguments], os.environ | environment
        self.start()

    def start(self) -> None:
        """Start the process, also after it has ended."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, text=True, env=self.environment, **pipes)
        self.missing = None
        if self.process.stdout.readline().strip() != "ready":
            self.missing = (self.process.communicate()[1].strip().splitlines() or ["it ended at once"])[-1]

    def ask(self, question: Any) -> Any:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{question} ended a worker: {self.process.stderr.read()[-500:]}")
        result, self.waited = json.loads(line)
        return result

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def open_workers(workers: dict[Name, Worker], needed: bool = True) -> Iterator[dict[Name, Worker]]:
    """Yield the workers that run, and close them. One that does not run is left out, or ends the program if needed."""
    try:
        for name, worker in [*workers.items()]:
            if worker.missing and needed:
                sys.exit(f"{name} does not run here: {worker.missing}")
            if worker.missing:
                print(f"{name} is left out: {worker.missing}")
                del workers[name]
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def ask_all(workers: dict[Name, Worker], *question: Any) -> dict[Name, Any]:
    """Ask each worker the question, one after the other."""
    return {name: worker.ask(question) for name, worker in workers.items()}


# ----------------------------------------------------------------------------------------------------- the command line
def make_parser(doc: str | None, rounds: int | None = None, seconds: float | None = None) -> argparse.ArgumentParser:
    """Make a parser with the docstring as its help, and the options that benchmarks share."""
    texts = {"description": doc, "epilog": "Nothing else should run on the machine."}
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each point ({rounds})")
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"of a round of each candidate ({seconds})")
    return parser


def run_program(main: Callable[[], object], work: Callable[..., object]) -> None:
    """Run ``main``, or ``work`` in a process that was started with --work and the arguments of ``work``."""
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()


# ----------------------------------------------------------------------------------------------- the files and tables
def write_table(path: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]], about: Any = None) -> None:
    """Write a CSV file, and beside it, if it is given, a JSON file about the machine."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *lines])
    if about:
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a CSV file, where what can be a number is one."""
    with path.open(newline="") as file:
        return [{name: parse_cell(text) for name, text in row.items()} for row in csv.DictReader(file)]


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON file of a CSV file."""
    about: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return about


def parse_cell(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def print_row(cells: Iterable[object]) -> None:
    """Print a line of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_heads(heads: Sequence[object]) -> None:
    """Begin a Markdown table."""
    print_row(heads)
    print_row(["---"] * len(heads))


def ratio_cell(values: Sequence[float], bases: Sequence[float]) -> str:
    """Format the median of the rounds' ratios, and their quartiles."""
    return "{:.2f}x, {:.2f} to {:.2f}".format(*spread([a / b for a, b in zip(values, bases, strict=True)]))
