"""Scoring many sequences with a pool of processes, one thread each.

A layer uses several threads by itself, but what Python does around its call has one.  Processes share out both.  Here a
character model gives each line of the standard library's source its bits per character: an LSTM and a Dense compute the
logits, numpy everything before and after them.  A `Scorer` runs lines of about the same length together.  It goes to
the workers with each share of the lines, but only as the path of the model, which each of them reads once.  However the
work is shared out, the scores have the same bits.  docs/scoring.md says how this goes on several machines.

    python examples/scoring.py [number of lines]

The more Python does around a call, the more a pool gains over threads.  The weights are random, because this is about
speed.  The only package needed is blockcell.
"""

import multiprocessing
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

import blockcell
from blockcell import LSTM, Dense, Scorer, Stack

LINES, SHARE, HIDDEN, CHARACTERS = 20000, 1000, 64, 128
ONE_HOT = np.eye(CHARACTERS, dtype=np.float32)


def score(scorer, lines):
    """Bits per character of ASCII lines of two characters or more; the scorer's results are the logits of all steps."""
    codes = [np.frombuffer(line.encode(), np.uint8) for line in lines]
    found = scorer([ONE_HOT[code[:-1]] for code in codes])  # every character but the last says something of the next
    logits, following = np.concatenate(found), np.concatenate([code[1:] for code in codes])
    bits = np.log2(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), following] / np.log(2)
    lengths = np.array([len(logits) for logits in found])
    return np.add.reduceat(bits, lengths.cumsum() - lengths) / lengths


def timed(who, scorer, shares, mapped):
    """All scores, and a line that says how fast they came; `mapped` is the builtin map, or a pool's."""
    begin = time.perf_counter()
    scores = np.concatenate(list(mapped(partial(score, scorer), shares)))
    print(f"{who:32}{len(scores) / (time.perf_counter() - begin):6.0f} lines per second")
    return scores


def main(number=LINES):
    lines = []
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += [line.strip() for line in module.read_text(encoding="utf8").splitlines()]
    lines = [line for line in lines if line.isascii() and 20 <= len(line) <= 120][:number]
    shares = [lines[first : first + SHARE] for first in range(0, len(lines), SHARE)]
    net = Stack([LSTM.init(CHARACTERS, HIDDEN, seed=1), Dense.init(HIDDEN, CHARACTERS, seed=2)])
    count = blockcell.get_num_threads()  # one for each CPU

    with tempfile.TemporaryDirectory() as folder:
        net.save(path := Path(folder) / "model.npz")
        one, all_of_them = (Scorer(path, output="all", num_threads=threads) for threads in (1, count))
        alone = timed("this process, 1 thread", one, shares, map)
        threaded = timed(f"this process, {count} threads", all_of_them, shares, map)
        context = multiprocessing.get_context("spawn")  # fork is not safe once a process has threads
        with ProcessPoolExecutor(count, context) as pool:
            list(pool.map(partial(score, one), shares))  # after that all workers have started
            pooled = timed(f"{count} processes, 1 thread each", one, shares, pool.map)
    same = alone.tobytes() == threaded.tobytes() == pooled.tobytes()
    print(f"{alone.mean():.2f} bits per character.", "All scores equal, bit for bit" if same else "The scores differ")
    return same


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
