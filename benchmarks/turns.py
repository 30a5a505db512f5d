"""Candidates in processes of their own, asked in turn: in one process the idle threads of one would slow the others.

A worker is a Python script that prints "ready" and then answers every line of its standard input, JSON, with a line of
JSON.  A round of `seconds` gives the median time of a call; a figure is the median of rounds, a ratio the median of the
rounds' ratios.  Nothing else should run on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def seconds(call: Callable[[], object], budget: float = 0.3) -> float:
    """The median time of single calls within the budget."""
    times = []
    end = time.perf_counter() + budget
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rest() -> None:
    """Wait until no thread of this process waits busily any more: onnxruntime's do for 50 ms, in the next one's way."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.004:
            return


def answer(reply: Callable[[Any], Any]) -> None:
    """Be a worker."""
    print("ready", flush=True)
    for line in sys.stdin:
        result = reply(json.loads(line))
        rest()
        print(json.dumps(result), flush=True)


class Worker:
    """A process that answers; ``missing`` says why it does not run, or is None."""

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
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
