"""Let memory, threads, forks and signals go wrong in the middle of calls: ``python tools/faults.py MINUTES MODE ...``.

Run by tests/reliability/test_faults.py, in children, so by `make test` and by CI on every push, longer by `make
test-all` and weekly.  Most modes take seconds; after so many MINUTES of processor time the process ends.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import numpy as np
from bits import bits, like, same
from injectors import disturb
from layer_cases import can_stream, halved_weights, outputs_by_weights
from scenarios import COMPUTING, GROUPS, B, Expected, I, T, expected_results, ignore, make_layers, uniform

import blockcell
from blockcell import GRU

SECONDS = 20  # after which a child that hangs is killed


# ----------------------------------------------------------------------------------------------------------- resources
def without_threads(limit: str, before: str) -> None:
    """Call when no thread can be started beside those that run: same bits, and a warning for each number set."""
    blockcell.set_num_threads(1)
    calls = [*expected_results()]
    if limit == "processes" and os.getuid() == 0:  # root has no such limit
        os.setuid(65534)
    blockcell.set_num_threads(int(before))
    for _, expected in calls:  # these start threads and take memory, which are there from now on
        expected.check_undisturbed()
    if limit == "processes":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    else:  # less than a thread's stack is left, those of 64 MiB that the test asks for, but enough for the results
        threading.stack_size(64 << 20)
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address_space + (24 << 20), resource.RLIM_INFINITY))
    try:
        threading.Thread(target=ignore).start()
    except RuntimeError:
        pass
    else:
        raise AssertionError("a thread could be started: this shows nothing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k, threads in enumerate((2, 3, 8, 64)):
            blockcell.set_num_threads(threads)
            for name, expected in calls[k::4]:
                os.write(2, f"{name} on {threads}\n".encode())
                expected.check_undisturbed()
    print([str(warning.message) for warning in caught])
    assert len(caught) <= 4, caught
    assert all(w.category is RuntimeWarning and "thread" in str(w.message) for w in caught)
    if limit != "processes":  # now there are threads again
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _, expected in calls:
            expected.check_undisturbed()


# ---------------------------------------------------------------------------------------------------------------- forks
def run_in_child(work: Callable[[], None]) -> int:
    """Run a function in a forked child, which is killed if it hangs, and return its exit status."""
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
    """Act out prepared scenarios, and check what they give."""
    for name, subject, expected in calls:
        os.write(2, f"{os.getpid()} {name}\n".encode())
        expected.check_undisturbed(subject)


def prepare(groups: Any = COMPUTING, only: str = "", selection: slice = slice(None)) -> list[Any]:
    """Return scenarios with objects that are made now, to be used later or by another process."""
    scenarios = [item for group in groups for item in GROUPS[group]().items() if only in item[0]][selection]
    return [(name, scenario.make(), Expected(scenario)) for name, scenario in scenarios]


def count_threads() -> int:
    """Return the number of this process's threads."""
    return len(os.listdir("/proc/self/task"))


def threads_of_steps() -> None:
    """Check that a stream's steps use as many threads as are set now, not as were set when it was made."""
    layer = GRU.init(64, 256, seed=0)
    x, before = uniform(B, 64), count_threads()
    blockcell.set_num_threads(2)
    stream = layer.stream(B)
    blockcell.set_num_threads(1)
    first = stream.step(x)
    assert count_threads() == before, "a step took two threads"
    blockcell.set_num_threads(2)
    stream.step(x)
    assert count_threads() == before + 1, "a step took one thread"
    assert same(first, layer(x[None])[0][0])


def fork_after(threads: str, only: str = "") -> None:
    """Fork: a child and its own child use what the parent made and used with threads, and what they make."""
    blockcell.set_num_threads(int(threads))
    calls = prepare((*COMPUTING, "files"), only)

    def child() -> None:
        """Use what this process makes itself, on one thread, and some of that in a child of its own."""
        blockcell.set_num_threads(8)
        assert blockcell.get_num_threads() == 1
        check_all(prepare(only=only))
        assert run_in_child(lambda: check_all(prepare(only=only, selection=slice(None, None, 4)))) == 0

    assert run_in_child(lambda: check_all(calls)) == 0
    assert run_in_child(child) == 0
    check_all(calls)


class Signalling:
    """An array whose conversion waits while another thread forks."""

    def __init__(self, array: np.ndarray) -> None:
        """Hold an array, and events for being inside the conversion and for going on."""
        self.array, self.inside, self.go_on = array, threading.Event(), threading.Event()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Say that the conversion has begun, and wait until it may go on."""
        self.inside.set()
        self.go_on.wait(SECONDS)
        return self.array


def fork_inside(call_name: str) -> None:
    """Fork while another thread is in the middle of a call: the child can call the layer, and new streams."""
    blockcell.set_num_threads(2)
    layer = make_layers()["stack"]
    x, stream = uniform(T, B, I), layer.stream(B)
    expected, new_weights = bits(layer(x)), halved_weights(layer)
    stream.run(x[:1])
    weight = Signalling(new_weights["0.w"])
    waiting_x = Signalling(x[1] if call_name == "step" else x)
    call = {
        "set_weights": lambda: layer.set_weights(**new_weights | {"0.w": weight}),
        "step": lambda: stream.step(waiting_x),
        "run": lambda: stream.run(waiting_x),
        "call": lambda: layer(waiting_x),
    }[call_name]
    signalling = weight if call_name == "set_weights" else waiting_x

    def child() -> None:
        """Use the layer, the stream and new weights, which must not hang."""
        assert bits(layer(x)) == expected
        if call_name in ("step", "run"):  # the thread that uses the stream is gone; the stream may raise, but not hang
            try:
                stream.step(x[1])
                stream.state = stream.state
                stream.reset()
            except RuntimeError as error:
                print(error, file=sys.stderr)
        assert bits(layer.stream(B).run(x)) == expected[0]
        layer.set_weights(**new_weights)
        new_y = copy.copy(layer)(x)
        assert bits(new_y) != expected and same(layer(x), new_y)

    calling_thread = threading.Thread(target=call)
    calling_thread.start()
    assert signalling.inside.wait(SECONDS)
    status = run_in_child(child)
    signalling.go_on.set()
    calling_thread.join()
    assert status == 0, status


def fork_during(children: str) -> None:
    """Fork while other threads make calls of all kinds."""
    blockcell.set_num_threads(2)
    calls, stop = prepare(), threading.Event()
    layer = make_layers()["stack"]
    x, both_weights = uniform(T, B, I), [halved_weights(layer), layer.weights]
    possible_outputs = [bits(y) for (y,) in outputs_by_weights(layer, both_weights, [(x,)])]

    def act_again(k: int) -> None:
        """Act out every third scenario until told to stop."""
        own = prepare(selection=slice(k, None, 3))
        while not stop.is_set():
            for _, subject, expected in own:
                expected.scenario.act(subject)

    def swap_weights() -> None:
        """Replace the weights of the layer until told to stop."""
        while not stop.is_set():
            for weights in both_weights:
                layer.set_weights(**weights)

    def child(k: int) -> None:
        """Call the layer, replace its weights, and act out every fifth scenario."""
        assert bits(layer(x)[0]) in possible_outputs
        for weights, expected in zip(both_weights, possible_outputs, strict=True):
            layer.set_weights(**weights)
            assert bits(layer(x)[0]) == expected
        check_all(calls[k::5])

    threads = [threading.Thread(target=act_again, args=(k,)) for k in range(3)]
    threads.append(threading.Thread(target=swap_weights))
    for thread in threads:
        thread.start()
    try:
        statuses = [run_in_child(partial(child, k)) for k in range(int(children))]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not any(statuses), statuses
    check_all(calls)


# ------------------------------------------------------------------------------------------------------ multiprocessing
def run_job(job: tuple[Any, np.ndarray]) -> Any:
    """Run a stream or call a layer that came to this process as a pickle."""
    stream_or_layer, x = job
    signal.alarm(SECONDS)
    blockcell.set_num_threads(2)
    return (stream_or_layer.run(x), stream_or_layer.state) if hasattr(stream_or_layer, "run") else stream_or_layer(x)


def processes(method: str) -> None:
    """Check that streams and layers compute the same in processes that get them as pickles."""
    blockcell.set_num_threads(2)
    jobs, expected = [], []
    for layer in make_layers().values():
        x = uniform(2 * T, B, I, dtype=layer.dtype)
        jobs.append((layer, x))
        expected.append(bits(layer(x)))
        if can_stream(layer):
            stream = layer.stream(B)
            stream.run(x[:T])
            jobs.append((stream, x[T:]))
            expected.append(bits(layer(x[T:], layer(x[:T])[1])))
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert [bits(result) for result in pool.map(run_job, jobs)] == expected


# --------------------------------------------------------------------------------------------------------------- Ctrl-C
def signals(count: str, seed: str) -> None:
    """Send SIGINT at random moments of calls, inside kernels and outside."""
    blockcell.set_num_threads(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started to ignore it
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    g, interrupted = random.Random(int(seed)), 0
    calls = [*expected_results()]
    for k in range(int(count)):
        name, expected = g.choice(calls)
        os.write(2, f"{k} {name}\n".encode())
        subject, failed, result = expected.scenario.make(), True, None
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** g.uniform(-5, -2.5))
            result = expected.scenario.act(subject)
            failed = False
            while True:
                select.select([], [], [], 1)  # the signal comes here at the latest; an Event would keep its lock
        except KeyboardInterrupt:
            pass
        interrupted += failed
        expected.check(subject, failed, result)
    print(f"{interrupted} of {count} inside a call")


# ----------------------------------------------------------------------------------------------------- a single stream
def one_stream(calls: str) -> None:
    """Use one stream from several threads at once: each call works or raises a RuntimeError, and later it works."""
    for name, layer in make_layers().items():
        if can_stream(layer):
            print(f"{name}: {share_stream(layer, int(calls))} refused")


def share_stream(layer: Any, calls: int) -> int:
    """Use a stream of a layer from four threads at once, and return how many calls were refused."""
    stream, x = layer.stream(B), uniform(2 * T, B, I, dtype=layer.dtype)
    states = like(layer(x)[1], np.copy)

    def use(seed: int) -> int:
        """Do drawn actions with the stream, and return how many were refused."""
        g, refusals = random.Random(seed), 0
        actions: tuple[Callable[[], Any], ...] = (
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
        for _ in range(calls):
            try:
                g.choice(actions)()
            except RuntimeError:
                refusals += 1
        return refusals

    with ThreadPoolExecutor(4) as pool:
        refused = sum(pool.map(use, range(4)))
    stream.reset()
    assert same(stream.run(x), layer(x)[0]) and same(stream.state, layer(x)[1])
    return refused


CALLS = (disturb, without_threads, threads_of_steps, processes, signals, one_stream)
MODES = {mode.__name__: mode for mode in (*CALLS, fork_after, fork_inside, fork_during)}

if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGXCPU, chain=True)  # shows where the time went
    resource.setrlimit(resource.RLIMIT_CPU, (round(60 * float(sys.argv[1])), resource.RLIM_INFINITY))
    MODES[sys.argv[2]](*sys.argv[3:])
