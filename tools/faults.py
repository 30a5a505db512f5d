"""What may go wrong in the middle of calls, which test_faults.py runs in children.

``python faults.py MINUTES MODE ...`` ends after so many minutes of processor time.
"""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import pickle
import random
import resource
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
from bits import bits, like, same
from cases import arguments
from injectors import disturb
from scenarios import COMPUTING, B, Expected, H, I, T, everything, halved, kinds, nothing, uniform

import blockcell
from blockcell import GRU, Scorer, Sessions, raw_ops

SECONDS = 20  # after which a child that hangs is killed


# ----------------------------------------------------------------------------------------------------------- resources
def without_threads(limit: str, before: str) -> None:
    """No thread can be started beside those that run: the bits are the same, with a warning for each number set."""
    blockcell.set_num_threads(1)
    calls = [(name, scenario, Expected(scenario)) for name, scenario in everything()]
    if limit == "processes" and os.getuid() == 0:  # root has no such limit
        os.setuid(65534)
    blockcell.set_num_threads(int(before))
    for _, scenario, expected in calls:  # these start threads and take memory, which are there from now on
        expected.check(thing := scenario.make(), False, scenario.act(thing))
    if limit == "processes":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    else:  # less than a thread's stack is left, those of 64 MiB that the test asks for, but enough for the results
        threading.stack_size(64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (used() + (24 << 20), resource.RLIM_INFINITY))
    try:
        threading.Thread(target=nothing, args=(0,)).start()
    except RuntimeError:
        pass
    else:
        raise AssertionError("a thread could be started: this shows nothing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k, threads in enumerate((2, 3, 8, 64)):
            blockcell.set_num_threads(threads)
            for name, scenario, expected in calls[k::4]:
                os.write(2, f"{name} on {threads}\n".encode())
                expected.check(thing := scenario.make(), False, scenario.act(thing))
    print([str(warning.message) for warning in caught])
    assert len(caught) <= 4, caught
    assert all(w.category is RuntimeWarning and "thread" in str(w.message) for w in caught)
    if limit != "processes":  # now there are threads again
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _, scenario, expected in calls:
            expected.check(thing := scenario.make(), False, scenario.act(thing))


def used() -> int:
    """The address space in use, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def little_memory() -> None:
    """There is no memory for large arrays: MemoryError, and the object is as it was. Once there is, it works again."""
    steps = 5_000  # results of 20 MB; of 12 MB, there would be memory
    x = uniform(steps, B, I)
    sequence = arguments("BlockLSTM", {"T": 1, "B": B, "I": I, "H": H}) | {"x": x, "seq_len_max": steps}
    layers = {name: layer for name, layer in kinds().items() if name != "LSTM half"}
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "BlockLSTM": (lambda: raw_ops.BlockLSTM(**sequence), lambda: 0)
    }
    for name, layer in layers.items():
        y, _, tape = layer.forward(x)
        calls |= {
            f"{name}: call": (lambda layer=layer: layer(x), lambda: 0),
            f"{name}: call lengths": (lambda layer=layer: layer(x, lengths=np.full(B, steps - 1)), lambda: 0),
            f"{name}: forward": (lambda layer=layer: layer.forward(x)[:2], lambda: 0),
            f"{name}: backward": (lambda layer=layer, tape=tape, y=y: layer.backward(tape, y), lambda: 0),
        }
        if name != "bidirectional":
            stream = layer.stream(B)
            stream.run(x[:3])
            calls[f"{name}: run"] = lambda stream=stream: stream.run(x), lambda stream=stream: stream.state
            if name != "dense":  # whose stream has no states
                calls[f"{name}: stream"] = lambda layer=layer: layer.stream(10**6), lambda: 0
        if name not in ("LSTM", "stack", "bidirectional"):
            continue
        scorer = Scorer(layer, output="all")
        for what, kind in (("list", list), ("iterator", iter)):
            calls[f"{name}: scorer, {what}"] = (
                lambda scorer=scorer, kind=kind: [*scorer(kind([x[:, b] for b in range(B)]))],
                lambda scorer=scorer: scorer([x[:3, 0]]),
            )
        if name != "bidirectional":
            sessions = Sessions(layer)
            for b in range(B):
                sessions.feed(sessions.open(), x[:, b])
            calls[f"{name}: sessions"] = sessions.step, lambda sessions=sessions: sessions.save(3)
    resource.setrlimit(resource.RLIMIT_AS, (used() + (16 << 20), resource.RLIM_INFINITY))
    for name, (call, state) in calls.items():
        os.write(2, f"{name}\n".encode())
        before = bits(state())
        for _ in range(2):
            try:
                call()
            except MemoryError:
                pass
            else:
                raise AssertionError(f"{name}: there was memory: this shows nothing")
            assert bits(state()) == before, name
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for name, layer in layers.items():
        y = layer(x)[0]
        assert same(layer.forward(x)[0], y) and same(calls[f"{name}: call"][0]()[0], y)
        if name != "bidirectional":
            assert same(calls[f"{name}: run"][0](), layer(x, layer(x[:3])[1])[0])
        for what in ("scorer, list", "scorer, iterator", "sessions"):
            if call := calls.get(f"{name}: {what}"):
                found = call[0]()
                assert same([*(found.values() if what == "sessions" else found)], [*y.swapaxes(0, 1)])


# ---------------------------------------------------------------------------------------------------------------- forks
def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child, which is killed if it hangs."""
    child = os.fork()
    if child == 0:
        faulthandler.register(signal.SIGALRM, chain=True)  # shows where it hangs
        signal.alarm(SECONDS)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_all(calls: Any) -> None:
    for name, thing, scenario, expected in calls:
        os.write(2, f"{os.getpid()} {name}\n".encode())
        expected.check(thing, False, scenario.act(thing))


def prepared(groups: Any = COMPUTING, only: str = "", part: slice = slice(None)) -> list[Any]:
    """Scenarios with objects that are made now, to be used later or by another process."""
    found = [(name, scenario) for name, scenario in everything(groups) if only in name][part]
    return [(name, scenario.make(), scenario, Expected(scenario)) for name, scenario in found]


def running() -> int:
    """The number of this process's threads."""
    return len(os.listdir("/proc/self/task"))


def threads_of_steps() -> None:
    """A stream's steps use as many threads as are set now, not as were set when it was made."""
    layer = GRU.init(64, 256, seed=0)
    x, before = uniform(B, 64), running()
    blockcell.set_num_threads(2)
    stream = layer.stream(B)
    blockcell.set_num_threads(1)
    first = stream.step(x)
    assert running() == before, "a step took two threads"
    blockcell.set_num_threads(2)
    stream.step(x)
    assert running() == before + 1, "a step took one thread"
    assert same(first, layer(x[None])[0][0])


def fork_after(threads: str, only: str = "") -> None:
    """A child, and its own child, use what the parent made and used with threads, and what they make themselves."""
    blockcell.set_num_threads(int(threads))
    calls = prepared((*COMPUTING, "files"), only)

    def child() -> None:
        check_all(prepared(only=only))
        assert in_child(lambda: check_all(prepared(only=only, part=slice(None, None, 4)))) == 0

    assert in_child(lambda: check_all(calls)) == 0
    assert in_child(child) == 0
    check_all(calls)


class Signalling:
    """An array whose conversion waits while another thread forks."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.inside, self.go_on = array, threading.Event(), threading.Event()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.inside.set()
        self.go_on.wait(SECONDS)
        return self.array


def fork_inside(what: str) -> None:
    """A fork while another thread is in the middle of a call: the child can call the layer, and new streams."""
    blockcell.set_num_threads(2)
    layer = kinds()["stack"]
    x, stream = uniform(T, B, I), layer.stream(B)
    expected, new = bits(layer(x)), halved(layer)
    stream.run(x[:1])
    weight = Signalling(new["0.w"])
    given = Signalling(x[1] if what == "step" else x)
    call = {
        "set_weights": lambda: layer.set_weights(**new | {"0.w": weight}),
        "step": lambda: stream.step(given),
        "run": lambda: stream.run(given),
        "call": lambda: layer(given),
    }[what]
    signalling = weight if what == "set_weights" else given

    def child() -> None:
        assert bits(layer(x)) == expected
        if what in ("step", "run"):  # the thread that uses the stream is gone; the stream may raise, but not hang
            try:
                stream.step(x[1])
                stream.state = stream.state
                stream.reset()
            except RuntimeError as error:
                print(error, file=sys.stderr)
        assert bits(layer.stream(B).run(x)) == expected[0]
        layer.set_weights(**new)
        changed = copy.copy(layer)(x)
        assert bits(changed) != expected and same(layer(x), changed)

    other = threading.Thread(target=call)
    other.start()
    assert signalling.inside.wait(SECONDS)
    status = in_child(child)
    signalling.go_on.set()
    other.join()
    assert status == 0, status


def fork_during(children: str) -> None:
    """Forks while other threads make calls of all kinds."""
    blockcell.set_num_threads(2)
    calls, done = prepared(), threading.Event()
    layer = kinds()["stack"]
    x, old, new = uniform(T, B, I), layer.weights, halved(layer)
    possible = []
    for weights in (new, old):
        layer.set_weights(**weights)
        possible.append(bits(layer(x)))

    def busy(k: int) -> None:
        own = prepared(part=slice(k, None, 3))
        while not done.is_set():
            for _, thing, scenario, _ in own:
                scenario.act(thing)

    def swapping() -> None:
        while not done.is_set():
            for weights in (new, old):
                layer.set_weights(**weights)

    def child(k: int) -> None:
        assert bits(layer(x)) in possible
        for weights, expected in zip((new, old), possible, strict=True):
            layer.set_weights(**weights)
            assert bits(layer(x)) == expected
        check_all(calls[k::5])

    others = [threading.Thread(target=busy, args=(k,)) for k in range(3)] + [threading.Thread(target=swapping)]
    for thread in others:
        thread.start()
    try:
        statuses = [in_child(partial(child, k)) for k in range(int(children))]
    finally:
        done.set()
        for thread in others:
            thread.join()
    assert not any(statuses), statuses
    check_all(calls)


# ------------------------------------------------------------------------------------------------------ multiprocessing
def elsewhere(job: tuple[Any, np.ndarray]) -> Any:
    """Runs in another process, which gets the stream or the layer as a pickle."""
    thing, x = job
    signal.alarm(SECONDS)
    blockcell.set_num_threads(2)
    return (thing.run(x), thing.state) if hasattr(thing, "run") else thing(x)


def processes(method: str) -> None:
    blockcell.set_num_threads(2)
    jobs, expected = [], []
    for name, layer in kinds().items():
        x = uniform(2 * T, B, I, dtype=layer.dtype)
        jobs.append((layer, x))
        expected.append(bits(layer(x)))
        if name != "bidirectional":
            stream = layer.stream(B)
            stream.run(x[:T])
            jobs.append((stream, x[T:]))
            expected.append(bits(layer(x[T:], layer(x[:T])[1])))
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert [bits(result) for result in pool.map(elsewhere, jobs)] == expected


# --------------------------------------------------------------------------------------------------------------- Ctrl-C
def signals(count: str, seed: str) -> None:
    """SIGINT at random moments of calls, inside kernels and outside."""
    blockcell.set_num_threads(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started to ignore it
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    g, inside = random.Random(int(seed)), 0
    calls = [(name, scenario, Expected(scenario)) for name, scenario in everything()]
    for k in range(int(count)):
        name, scenario, expected = g.choice(calls)
        os.write(2, f"{k} {name}\n".encode())
        thing, failed, result = scenario.make(), True, None
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** g.uniform(-5, -2.5))
            result = scenario.act(thing)
            failed = False
            while True:
                select.select([], [], [], 1)  # the signal comes here at the latest; an Event would keep its lock
        except KeyboardInterrupt:
            pass
        inside += failed
        expected.check(thing, failed, result)
    print(f"{inside} of {count} inside a call")


# ----------------------------------------------------------------------------------------------------- a single stream
def one_stream(calls: str) -> None:
    """Several threads use one stream at once: each call works or raises a RuntimeError. Later the stream works."""
    layers = {name: layer for name, layer in kinds().items() if name != "bidirectional"}
    for name, layer in layers.items():
        stream, x = layer.stream(B), uniform(2 * T, B, I, dtype=layer.dtype)
        states = like(layer(x)[1], np.copy)
        refused: list[RuntimeError] = []
        failures: list[BaseException] = []

        def use(
            seed: int,
            stream: Any = stream,
            x: Any = x,
            states: Any = states,
            refused: Any = refused,
            failures: Any = failures,
        ) -> None:
            g = random.Random(seed)
            does = (
                lambda: stream.step(x[0]),
                lambda: stream.run(x[: g.randrange(2 * T)]),
                lambda: stream.step(x[0, :3], rows=[2, 1, 7]),
                lambda: stream.run(x[:, :2], rows=[4, 3], lengths=[g.randrange(2 * T), 2]),
                lambda: stream.set_state([0, 1], stream.state_of([B - 1, 1])),
                lambda: stream.state,
                lambda: setattr(stream, "state", states),
                lambda: stream.reset([1]),
                lambda: stream.refresh(),
                lambda: pickle.dumps(stream),
                lambda: blockcell.set_num_threads(g.randrange(1, 4)),
            )
            for _ in range(int(calls)):
                try:
                    g.choice(does)()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    refused.append(error)
                except BaseException as error:
                    failures.append(error)
                    raise

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        print(f"{name}: {len(refused)} refused")
        stream.reset()
        assert same(stream.run(x), layer(x)[0]) and same(stream.state, layer(x)[1])


MODES = {
    function.__name__: function
    for function in (
        disturb,
        without_threads,
        little_memory,
        threads_of_steps,
        fork_after,
        fork_inside,
        fork_during,
        processes,
        signals,
        one_stream,
    )
}

if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGXCPU, chain=True)  # shows where the time went
    resource.setrlimit(resource.RLIMIT_CPU, (round(60 * float(sys.argv[1])), resource.RLIM_INFINITY))
    MODES[sys.argv[2]](*sys.argv[3:])
