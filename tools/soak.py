"""Eight Python threads call everything at once: ``python soak.py CALLS SEED``, which test_soak.py runs in children."""

from __future__ import annotations

import faulthandler
import itertools
import pickle
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
from bits import bits, like
from scenarios import Expected, I, everything, halved, kinds, uniform
from scoring import alone

import blockcell
from blockcell import Scorer, Sessions

PYTHON_THREADS = 8
SECONDS = 20  # of its own, after which what a thread waits for will not come
SIZES = [(1, 1), (2, 16), (6, 16), (6, 5), (9, 33), (3, 70)]  # T, B: plans that a layer keeps for the next call


class Jobs:
    """What a thread may do next, and whether the outcome is right."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shared, self.files = folder, [], {}
        self.calls = [(name, scenario, Expected(scenario)) for name, scenario in everything()]
        for name, layer in kinds().items():
            self.files[name] = layer, bits(layer.weights)
            for T, B in SIZES:
                x = uniform(T, B, layer.input_size, dtype=layer.dtype)
                d_y = uniform(T, B, layer.output_size, dtype=layer.dtype, seed=1)
                state = like(layer(x)[1], np.copy)
                y, last, tape = layer.forward(x, state)
                expected = bits((layer(x), layer(x, state), (y, last), layer.backward(tape, d_y)))
                self.shared.append((name, layer, x, d_y, state, expected))
        self.scorers = []
        for output, (name, layer) in zip(itertools.cycle(["last", "all", "mean"]), kinds().items()):
            xs = [uniform(t, layer.input_size, dtype=layer.dtype) for t in range(1, 20)]
            expected = [bits(alone(layer, output, x)) for x in xs]
            self.scorers.append((name, Scorer(layer, output=output, batch=4, num_threads=None), xs, expected))
        layer = kinds()["classifier"]
        self.sessions, self.inbox = [Sessions(layer, capacity=2), Sessions(layer, capacity=1)], [{}, {}]
        self.stepping = [threading.Lock(), threading.Lock()]  # until results are in the inbox, or later ones overtake
        self.told = [(x, layer(x[:, None])[0][:, 0]) for x in (uniform(7, I, seed=seed) for seed in range(9))]
        self.changing = kinds()["stack"]
        self.weights = [self.changing.weights, halved(self.changing)]
        self.inputs, self.possible = [uniform(T, B, self.changing.input_size) for T, B in SIZES], []
        for weights in self.weights[::-1]:
            self.changing.set_weights(**weights)
            self.possible.append([bits(self.changing(x)) for x in self.inputs])

    def scenario(self, g: random.Random) -> None:
        """With objects of its own."""
        _, scenario, expected = g.choice(self.calls)
        thing = scenario.make()
        expected.check(thing, False, scenario.act(thing))

    def shared_layer(self, g: random.Random) -> None:
        name, layer, x, d_y, state, expected = g.choice(self.shared)
        y, last, tape = layer.forward(x, state)
        found = layer(x), layer(x, state), (y, last), layer.backward(tape, d_y)
        assert bits(found) == expected, name

    def stream(self, g: random.Random) -> None:
        """Its own, of a shared layer, in pieces, through a pickle."""
        name, layer, x, _, state, expected = g.choice(self.shared)
        if name != "bidirectional":
            stream = layer.stream(x.shape[1])
            stream.state = state
            cut, y = g.randint(0, len(x)), np.empty((*x.shape[:2], layer.output_size), x.dtype)
            y[:cut] = stream.run(x[:cut])
            stream = pickle.loads(pickle.dumps(stream))
            way = g.choice(["steps", "block", "rows"])
            if way == "steps":
                for t in range(cut, len(x)):
                    y[t] = stream.step(x[t])
            elif way == "block":
                y[cut:] = stream.run(x[cut:])
            else:  # one half of the rows after the other
                for some in np.array_split(g.sample(range(stream.batch), stream.batch), 2):
                    y[cut:, some] = stream.run(x[cut:, some], rows=some)
            assert bits((y, stream.state)) == expected[1], name

    def scorer(self, g: random.Random) -> None:
        """One that others use at the same time."""
        name, scorer, xs, expected = g.choice(self.scorers)
        some = g.sample(range(len(xs)), g.randint(0, len(xs)))
        given = [xs[k] for k in some]
        assert bits([*scorer(g.choice([list, iter])(given))]) == tuple(expected[k] for k in some), name

    def session(self, g: random.Random) -> None:
        """Among those of other threads, of which now one steps and now another; at one place and then at the other."""
        x, y = g.choice(self.told)
        cut = g.randint(0, len(x))
        sessions, id = self.sessions[0], self.sessions[0].open()
        first = self.served(0, id, x[:cut])
        state = sessions.save(id)
        sessions.close(id)
        assert bits([*first, *self.served(1, self.sessions[1].restore(state), x[cut:])]) == bits([*y])

    def served(self, place: int, id: int, x: np.ndarray) -> list[np.ndarray]:
        """y at each step, which another thread may get."""
        sessions, inbox = self.sessions[place], self.inbox[place]
        mine = inbox[id] = []
        for each in x:
            sessions.feed(id, each)
        end = time.thread_time() + SECONDS
        while sum(map(len, mine)) < len(x):
            with self.stepping[place]:
                for other, y in sessions.step(limit=3).items():
                    inbox[other].append(np.atleast_2d(y))
            assert time.thread_time() < end, "steps are missing"
        del inbox[id]
        return [row for part in mine for row in part]

    def file(self, g: random.Random) -> None:
        name = g.choice(sorted(self.files))
        layer, expected = self.files[name]
        path = self.folder / f"{g.choice(['a', 'b'])}{name}{g.choice(['.npz', '.safetensors'])}"
        layer.save(path)  # others may write the same
        assert bits(blockcell.load(path).weights) == expected, name

    def changing_weights(self, g: random.Random) -> None:
        """All of the old ones or all of the new."""
        if g.random() < 0.3:
            self.changing.set_weights(**g.choice(self.weights))
        k = g.randrange(len(self.inputs))
        found = bits(self.changing(self.inputs[k]))
        assert any(found == results[k] for results in self.possible)

    def one(self, g: random.Random) -> None:
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
    print(f"seed {seed}")
    blockcell.set_num_threads(1)
    failures: list[BaseException] = []

    def work(jobs: Jobs, k: int) -> None:
        g: Any = random.Random(f"{seed}, {k}")
        try:
            for _ in range(calls // PYTHON_THREADS):
                if not failures:
                    jobs.one(g)
        except BaseException as error:
            failures.append(error)
            raise

    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(Path(folder))
        threads = [threading.Thread(target=work, args=(jobs, k)) for k in range(PYTHON_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


if __name__ == "__main__":
    faulthandler.enable()
    soak(int(sys.argv[1]), int(sys.argv[2]))
