"""Candidates in processes of their own, asked in turn: in one process the idle threads of one would slow the others.

All benchmarks time, repeat and print with this module.  A worker is a Python script that prints "ready" and then
answers every line of its standard input, JSON, with a line of JSON.  A round of `seconds` gives the median time of a
call; a figure is the median of rounds, a ratio the median of the rounds' ratios, and its spread their quartiles.  A
`Watch` marks a round in which the machine was disturbed: cores were shared or slowed down just before or just after it,
or threads of a candidate waited for a CPU.  Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
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
from ceiling import multiply_adds

SHARED = 1.6  # two threads with less than so many times the multiply-adds of one have no core each
SLOWED = 0.75  # of the best rate seen: a shared core has half of it, the clock alone moves by a fifth
WAITED = 0.05  # of a candidate's time
ENOUGH = 3  # rounds without a mark, for those with one to be left out
CPUS = len(os.sched_getaffinity(0))  # that this process may use
Name = TypeVar("Name")
Round = TypeVar("Round")
waited = 0.0  # of the time of the last `seconds`, while threads of this process were ready to run and had no CPU


def waiting() -> float:
    """Seconds that the threads of this process have waited for a CPU; none where the system does not count them."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def seconds(call: Callable[[], object], budget: float = 0.3) -> float:
    """The median time of single calls within the budget."""
    global waited
    times, before = [], waiting()
    begin = time.perf_counter()
    while not times or time.perf_counter() < begin + budget:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    waited = (waiting() - before) / (time.perf_counter() - begin)
    return statistics.median(times)


def means(calls: Sequence[Callable[[], object]], budget: float) -> list[float]:
    """The mean seconds of each call, where they alternate for so long."""
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


def busy_after(call: Callable[[], object]) -> float:
    """For how many seconds of CPU time idle threads wait busily after a call."""
    seconds = []
    for _ in range(5):
        call()
        start = time.process_time()
        time.sleep(0.1)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the quartiles, between which half of the values lie."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return median, low, high


def rest() -> None:
    """Wait until no thread of this process waits busily any more: onnxruntime's do for 50 ms, in the next one's way."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.004:
            return


class Watch:
    """Tells rounds in which the machine was disturbed.

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

    def disturbed(self, threads: int) -> bool:
        """Whether a core is slow, or two are one: the host made them its hyperthreads, or a neighbour has taken one."""
        rate_of_one = self.rate(1)
        self.best = max(self.best, rate_of_one)
        return rate_of_one < SLOWED * self.best or (threads > 1 and self.rate(2) < SHARED * rate_of_one)

    def round(self, threads: int, measure: Callable[[], Round]) -> tuple[Round, bool]:
        """A round of so many threads, and its mark."""
        before = self.disturbed(threads)
        for worker in self.workers:
            worker.waited = 0.0
        result = measure()
        waited = any(worker.waited > WAITED for worker in self.workers)
        return result, before or waited or self.disturbed(threads)

    def rounds(self, threads: int, measure: Callable[[], Round], count: int) -> list[tuple[Round, bool]]:
        """As many rounds without a mark as are wanted, but never more than twice as many in all."""
        rounds_so_far: list[tuple[Round, bool]] = []
        while len(rounds_so_far) < 2 * count and sum(not marked for _, marked in rounds_so_far) < count:
            rounds_so_far.append(self.round(threads, measure))
        return rounds_so_far


def watch(workers: Collection[Worker]) -> Watch:
    """On this machine, in 5 ms before and after a round; without a C compiler it does not see shared cores."""
    try:
        multiply_adds("base", "float32", 1, rounds=1, tries=1)
    except (OSError, subprocess.CalledProcessError):
        print("no C compiler: whether cores are shared or slowed down is not known")
        return Watch(workers, float)
    return Watch(workers, partial(multiply_adds, "base", "float32", rounds=500_000, tries=3))


def counted(rounds: Sequence[tuple[Round, bool]]) -> list[Round]:
    """The rounds that figures are made of: those without a mark if they are enough, else all."""
    unmarked = [result for result, marked in rounds if not marked]
    return unmarked if len(unmarked) >= ENOUGH else [result for result, _ in rounds]


def in_turn(points: Sequence[list[tuple[Round, bool]]], count: int, more: int) -> Iterator[int]:
    """The numbers of points, all in each round; then, in some more rounds, those of which fewer than wanted have no
    mark.  A point is the rounds that it has had."""
    for _ in range(count):
        yield from range(len(points))
    for _ in range(more):
        yield from [k for k, rounds in enumerate(points) if sum(not marked for _, marked in rounds) < count]


def answer(reply: Callable[[Any], Any]) -> None:
    """Be a worker."""
    print("ready", flush=True)
    for line in sys.stdin:
        result = reply(json.loads(line))
        rest()
        print(json.dumps([result, waited]), flush=True)


def answer_seconds(prepare: Callable[..., Callable[[], object]]) -> None:
    """Be a worker: a question is what to prepare, and for how many seconds; the answer is the seconds of a call."""
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
    """A process that answers.  ``missing`` says why it does not run, or is None; ``waited`` comes with each answer."""

    def __init__(self, script: str, *arguments: str, **environment: str) -> None:
        self.command, self.environment = [sys.executable, script, *arguments], os.environ | environment
        self.start()

    def start(self) -> None:
        """Also again, after it has ended."""
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
def opened(workers: dict[Name, Worker], needed: bool = True) -> Iterator[dict[Name, Worker]]:
    """The workers that run, until they are closed. One that does not run is left out, or ends the program if needed."""
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
def arguments(doc: str | None, rounds: int | None = None, seconds: float | None = None) -> argparse.ArgumentParser:
    """A parser with the docstring as its help, and the options that benchmarks share."""
    texts = {"description": doc, "epilog": "Nothing else should run on the machine."}
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each point ({rounds})")
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"of a round of each candidate ({seconds})")
    return parser


def run_program(main: Callable[[], object], work: Callable[..., object]) -> None:
    """Be the program, or one of its workers, started with --work and the arguments of ``work``."""
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()


# --------------------------------------------------------------------------------------------------------- the printing
def print_row(cells: Iterable[object]) -> None:
    """Print a line of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_heads(heads: Sequence[object]) -> None:
    """Begin a Markdown table."""
    print_row(heads)
    print_row(["---"] * len(heads))


def ratio_cell(values: Sequence[float], bases: Sequence[float]) -> str:
    """The median of the rounds' ratios, and their quartiles."""
    return "{:.2f}x, {:.2f} to {:.2f}".format(*spread([a / b for a, b in zip(values, bases, strict=True)]))
