"""Scoring many sequences with a pool of processes, one thread each.

A layer uses several threads by itself, but what Python does around its call has one.  Processes share out both.  Here a
character model gives each line of the standard library's source its bits per character: an LSTM and a Dense compute the
logits, numpy everything before and after them.  Each worker gets the model once, pickled, when it starts; from then on
only lines go there and scores come back.  However the work is shared out, the scores have the same bits.

    python examples/scoring.py [number of lines]

On two cores the rates are 33,000 lines per second with one thread, 54,000 with two, and 54,000 with two processes: here
threads do as well, and need no pool.  The more Python does around a call, the more a pool gains.  The weights are
random, because this is about speed.  The only package needed is blockcell.
"""

import multiprocessing
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

import blockcell
from blockcell import LSTM, Dense, Stack

LINES, ROWS, HIDDEN, CHARACTERS = 20000, 64, 64, 128


def start(net):
    """Once in each worker."""
    global model
    model = net
    blockcell.set_num_threads(1)


def score(lines):
    """Bits per character of a batch of ASCII lines of two characters or more."""
    lengths = np.array([len(line) - 1 for line in lines])  # every character but the last says something of the next
    codes = np.zeros((lengths.max() + 1, len(lines)), int)
    for row, line in enumerate(lines):
        codes[: len(line), row] = np.frombuffer(line.encode(), np.uint8)
    x = np.eye(CHARACTERS, dtype=np.float32)[codes[:-1]]
    logits, _ = model(x, lengths=lengths)
    chosen = np.take_along_axis(logits, codes[1:, :, None], axis=2)[:, :, 0]
    bits = np.log2(np.exp(logits).sum(axis=2)) - chosen / np.log(2)
    return np.where(np.arange(len(bits))[:, None] < lengths, bits, 0).sum(axis=0) / lengths


def timed(who, batches, mapped):
    """All scores, and a line that says how fast they came; `mapped` is the builtin map, or a pool's."""
    begin = time.perf_counter()
    scores = np.concatenate(list(mapped(score, batches)))
    print(f"{who:32}{len(scores) / (time.perf_counter() - begin):6.0f} lines per second")
    return scores


def main(number=LINES):
    lines = []
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += [line.strip() for line in module.read_text(encoding="utf8").splitlines()]
    lines = [line for line in lines if line.isascii() and 20 <= len(line) <= 120][:number]
    lines.sort(key=len)
    batches = [lines[first : first + ROWS] for first in range(0, len(lines), ROWS)]  # of about one length each
    net = Stack([LSTM.init(CHARACTERS, HIDDEN, seed=1), Dense.init(HIDDEN, CHARACTERS, seed=2)])
    count = blockcell.get_num_threads()  # one for each CPU

    start(net)
    alone = timed("this process, 1 thread", batches, map)
    blockcell.set_num_threads(None)
    threaded = timed(f"this process, {count} threads", batches, map)
    context = multiprocessing.get_context("spawn")  # fork is not safe once a process has threads
    with ProcessPoolExecutor(count, context, initializer=start, initargs=(net,)) as pool:
        list(pool.map(score, batches))  # after that all workers have started
        pooled = timed(f"{count} processes, 1 thread each", batches, pool.map)
    same = alone.tobytes() == threaded.tobytes() == pooled.tobytes()
    print(f"{alone.mean():.2f} bits per character.", "All scores equal, bit for bit" if same else "The scores differ")
    return same


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:])))
