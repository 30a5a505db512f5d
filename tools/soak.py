"""Call everything from eight Python threads at once: ``python tools/soak.py CALLS SEED``.

Run by tests/reliability/test_soak.py, in children, so by `make test` and by CI on every push, longer by `make test-all`
and weekly.  300 calls take ten seconds, 20,000 minutes.
"""

from __future__ import annotations

import faulthandler
import itertools
import pickle
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
from bits import bits, like, same
from layer_cases import can_stream, halved_weights, outputs_by_weights
from scenarios import I, expected_results, make_layers, uniform
from scoring import alone

import blockcell
from blockcell import Scorer, Sessions

PYTHON_THREADS = 8
SECONDS = 20  # of its own, after which what a thread waits for will not come
SIZES = [(1, 1), (2, 16), (6, 16), (6, 5), (9, 33), (3, 70)]  # T, B: plans that a layer keeps for the next call


class Jobs:
    """Jobs that a thread may do next: each method does one, and checks the outcome."""

    def __init__(self, folder: Path) -> None:
        """Make the objects that threads share, and compute on one thread what each job must give."""
        self.folder, self.shared, self.files = folder, [], {}
        self.calls = [expected for _, expected in expected_results()]
        for name, layer in make_layers().items():
            self.files[name] = layer, bits(layer.weights)
            for T, B in SIZES:
                x = uniform(T, B, layer.input_size, dtype=layer.dtype)
                d_y = uniform(T, B, layer.output_size, dtype=layer.dtype, seed=1)
                state = like(layer(x)[1], np.copy)
                y, last, tape = layer.forward(x, state)
                expected = bits((layer(x), layer(x, state), (y, last), layer.backward(tape, d_y)))
                self.shared.append((name, layer, x, d_y, state, expected))
        self.scorers = []
        for output, (name, layer) in zip(itertools.cycle(["last", "all", "mean"]), make_layers().items()):
            xs = [uniform(t, layer.input_size, dtype=layer.dtype) for t in range(1, 20)]
            expected = [bits(alone(layer, output, x)) for x in xs]
            self.scorers.append((name, Scorer(layer, output=output, batch=4, num_threads=None), xs, expected))
        layer = make_layers()["classifier"]
        self.sessions, self.inbox = [Sessions(layer, capacity=2), Sessions(layer, capacity=1)], [{}, {}]
        self.stepping = [threading.Lock(), threading.Lock()]  # until results are in the inbox, or later ones overtake
        self.fed_sequences = [(x, layer(x[:, None])[0][:, 0]) for x in (uniform(7, I, seed=seed) for seed in range(9))]
        self.changing_layer = make_layers()["stack"]
        self.weights = [halved_weights(self.changing_layer), self.changing_layer.weights]
        self.inputs = [uniform(T, B, self.changing_layer.input_size) for T, B in SIZES]
        self.possible_outputs = outputs_by_weights(self.changing_layer, self.weights, [(x,) for x in self.inputs])

    def scenario(self, g: random.Random) -> None:
        """Act out a scenario with objects of its own."""
        g.choice(self.calls).check_undisturbed()

    def shared_layer(self, g: random.Random) -> None:
        """Call a layer, and run a forward and a backward pass, while other threads use it."""
        name, layer, x, d_y, state, expected = g.choice(self.shared)
        y, last, tape = layer.forward(x, state)
        results = layer(x), layer(x, state), (y, last), layer.backward(tape, d_y)
        assert bits(results) == expected, name

    def stream(self, g: random.Random) -> None:
        """Run its own stream of a shared layer, in pieces, through a pickle."""
        name, layer, x, _, state, expected = g.choice(self.shared)
        if can_stream(layer):
            stream = layer.stream(x.shape[1])
            stream.state = state
            first_steps, y = g.randint(0, len(x)), np.empty((*x.shape[:2], layer.output_size), x.dtype)
            y[:first_steps] = stream.run(x[:first_steps])
            stream = pickle.loads(pickle.dumps(stream))
            form = g.choice(["steps", "block", "rows"])
            if form == "steps":
                for t in range(first_steps, len(x)):
                    y[t] = stream.step(x[t])
            elif form == "block":
                y[first_steps:] = stream.run(x[first_steps:])
            else:  # one half of the rows after the other
                for rows in np.array_split(g.sample(range(stream.batch), stream.batch), 2):
                    y[first_steps:, rows] = stream.run(x[first_steps:, rows], rows=rows)
            assert bits((y, stream.state)) == expected[1], name

    def scorer(self, g: random.Random) -> None:
        """Score sequences with a scorer that others use at the same time."""
        name, scorer, xs, expected = g.choice(self.scorers)
        chosen_numbers = g.sample(range(len(xs)), g.randint(0, len(xs)))
        sequences = [xs[k] for k in chosen_numbers]
        assert bits([*scorer(g.choice([list, iter])(sequences))]) == tuple(expected[k] for k in chosen_numbers), name

    def session(self, g: random.Random) -> None:
        """Feed a session among those of other threads, which step it, too; in the middle it moves to other Sessions."""
        x, y = g.choice(self.fed_sequences)
        first_steps = g.randint(0, len(x))
        sessions, session_id = self.sessions[0], self.sessions[0].open()
        first = self.serve(0, session_id, x[:first_steps])
        state = sessions.save(session_id)
        sessions.close(session_id)
        assert bits([*first, *self.serve(1, self.sessions[1].restore(state), x[first_steps:])]) == bits([*y])

    def serve(self, place: int, session_id: int, x: np.ndarray) -> list[np.ndarray]:
        """Feed x to a session, and return y at each step, which another thread may get."""
        sessions, inbox = self.sessions[place], self.inbox[place]
        outputs = inbox[session_id] = []
        for step_x in x:
            sessions.feed(session_id, step_x)
        end = time.thread_time() + SECONDS
        while sum(map(len, outputs)) < len(x):
            with self.stepping[place]:
                for other_id, y in sessions.step(limit=3).items():
                    inbox[other_id].append(np.atleast_2d(y))
            assert time.thread_time() < end, "steps are missing"
        del inbox[session_id]
        return [row for part in outputs for row in part]

    def file(self, g: random.Random) -> None:
        """Save a layer to a file that others may write at the same time, and load it."""
        name = g.choice(sorted(self.files))
        layer, expected = self.files[name]
        path = self.folder / f"{g.choice(['a', 'b'])}{name}{g.choice(['.npz', '.safetensors'])}"
        layer.save(path)  # others may write the same
        assert bits(blockcell.load(path).weights) == expected, name

    def changing_weights(self, g: random.Random) -> None:
        """Replace weights, or call their layer: it has all of the old ones or all of the new."""
        if g.random() < 0.3:
            self.changing_layer.set_weights(**g.choice(self.weights))
        k = g.randrange(len(self.inputs))
        y = self.changing_layer(self.inputs[k])[0]
        assert any(same(y, outputs[k]) for outputs in self.possible_outputs)

    def do_job(self, g: random.Random) -> None:
        """Do a job that is drawn, and sometimes set the number of threads before."""
        if g.random() < 0.1:
            blockcell.set_num_threads(g.randint(1, 3))
        jobs = {
            self.scenario: 8,
            self.shared_layer: 4,
            self.stream: 4,
            self.scorer: 2,
            self.session: 2,
            self.file: 1,
            self.changing_weights: 3,
        }
        g.choices([*jobs], [*jobs.values()])[0](g)


def soak(calls: int, seed: int) -> None:
    """Do jobs from several threads until all calls are made or one fails."""
    print(f"seed {seed}")
    blockcell.set_num_threads(1)
    failed = threading.Event()

    def work(jobs: Jobs, k: int) -> None:
        """Do jobs until this thread has made its calls or another has failed."""
        g: Any = random.Random(f"{seed}, {k}")
        try:
            for _ in range(calls // PYTHON_THREADS):
                if not failed.is_set():
                    jobs.do_job(g)
        except BaseException:
            failed.set()
            raise

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PYTHON_THREADS) as pool:
        jobs = Jobs(Path(folder))
        for done in [pool.submit(work, jobs, k) for k in range(PYTHON_THREADS)]:
            done.result()


if __name__ == "__main__":
    faulthandler.enable()
    soak(int(sys.argv[1]), int(sys.argv[2]))
