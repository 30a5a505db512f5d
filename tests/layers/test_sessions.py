"""`Sessions`: each has the bits that it has alone; the state machine in reliability/test_stateful.py tries more."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from itertools import count

import numpy as np
import pytest
from bits import same, zeros
from injectors import Interrupts, attempt
from refusals import refusal
from scenarios import make_sessions, outcome
from traced import peak

from blockcell import GRU, LSTM, Bidirectional, Dense, Sessions, Stack

I, H = 5, 19  # noqa: E741
SECONDS = 20


@pytest.fixture(scope="module")
def net():
    return Stack([LSTM.init(I, 33, seed=1), GRU.init(33, 20, seed=2), Dense.init(20, H, seed=3, last=True)])


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (*shape, I)).astype(np.float32)


def alone(net, x):
    """y of one session that has all of x [t,I], a step at a time as `net` has a Dense with `last`."""
    stream = net.stream()
    return stream.run(x[:, None])[:, 0], stream.state


def test_sessions_move(net):
    """With what `save` gives, which is the state of a call."""
    x = inputs(8)
    y, last = alone(net, x)
    here, there = Sessions(net), Sessions(copy.copy(net), capacity=1)
    id = here.open()
    assert same(here.save(id), zeros(net, 1))  # it has no row yet
    here.feed(id, x[:5])
    here.step()
    here.feed(id, x[7])
    moved = there.restore(pickle.loads(pickle.dumps(here.save(id))))
    there.feed(moved, x[5:])
    assert same(there.step(), {moved: y[5:]}) and same(there.save(moved), last)
    stream = net.stream(3)
    stream.set_state([1], here.save(id))
    assert same(stream.run(x[5:, None], rows=[1])[:, 0], y[5:])
    by_name = {0: {"h": last[0].h, "cs": last[0].cs}, 1: {"h": last[1].h}}
    assert same(there.save(there.restore(by_name)), last)


def test_the_weights_are_those_of_the_beginning():
    layer, x = LSTM.init(I, H, seed=4), inputs(2)
    y = layer(x[:, None])[0][:, 0]
    sessions = Sessions(layer, capacity=1)
    layer.set_weights(**{name: array * 2 for name, array in layer.weights.items()})
    ids = [sessions.open() for _ in range(3)]  # more than there is room for
    for id in ids:
        sessions.feed(id, x)
    assert same(sessions.step(), dict.fromkeys(ids, y))


def test_errors(net):
    sessions, x = Sessions(net), inputs(3)
    id, closed = sessions.open(), sessions.open()
    sessions.close(closed)
    both, of_first = Bidirectional(*2 * [net.layers[0]]), alone(net, x)[1][0]
    for call, said in (
        (lambda: Sessions(3), "TypeError: Sessions: layer is 3; expected a layer, quantized or not"),
        (lambda: Sessions(net, capacity=0), "ValueError: Sessions: capacity is 0; expected at least 1"),
        (lambda: Sessions(net, capacity=1.5), "TypeError: Sessions: capacity is 1.5; expected an integer"),
        (lambda: Sessions(both), "TypeError: Bidirectional.stream: backward begins at the last"),
        (lambda: Sessions(net, 3), "TypeError: positional"),
        (lambda: sessions.feed(closed, x), "ValueError: Sessions.feed: id is 1, which was closed; expected an open"),
        (lambda: sessions.close(closed), "ValueError: Sessions.close: id is 1, which was closed"),
        (lambda: sessions.save(7), "ValueError: Sessions.save: id is 7, which was never opened"),
        (lambda: sessions.feed(id, x[:, :2]), "ValueError: x has shape (3, 2); expected (I,) or (t, I) with I=5"),
        (lambda: sessions.feed(id, x[None]), "ValueError: x has shape (1, 3, 5); expected"),
        (lambda: sessions.feed(id, 1.0), "ValueError: x has shape (); expected"),
        (
            lambda: sessions.feed(id, x.astype(float)),
            "TypeError: x has dtype float64; expected float32, that of the layer; x.astype(np.float32) converts it",
        ),
        (lambda: sessions.feed(id, "ab"), "TypeError: Sessions.feed: x is"),
        (lambda: sessions.step(0), "ValueError: Sessions.step: limit is 0; expected at least 1"),
        (lambda: sessions.step("2"), "TypeError: Sessions.step: limit is '2'; expected an integer"),
        (lambda: sessions.restore(of_first), "ValueError: Stack.stream: state has 2 parts; expected"),
        (lambda: sessions.restore(net.stream(2).state), "ValueError: shape (2, 33); expected (B, H) = (1, 33)"),
    ):
        with refusal(said):
            call()
    assert len(sessions) == 1 and sessions.step() == {}
    sessions.feed(id, x)
    assert same(sessions.step(), {id: alone(net, x)[0]})
    assert repr(sessions) == f"<Sessions of {net!r}, 1 open, capacity=64>"


# ----------------------------------------------------------------------------------------------- threads, forks, memory
def test_ctrl_c_at_any_place_of_a_step():
    """Nothing is computed twice. Lost are results at most where they are on their way to the caller, at the end."""
    layer, lost = LSTM.init(32, 8, seed=4), []  # x of `make_sessions` has 32 numbers
    everything, after = outcome(make_sessions(layer)), make_sessions(layer)
    after.step()
    for n in count(1):
        sessions = make_sessions(layer)
        reached, failed, results = attempt(Interrupts(), n, lambda sessions=sessions: sessions.step())
        results_after = outcome(sessions, *([] if failed else [results]))
        if not same(results_after, everything):
            assert failed and same(results_after, outcome(after))
            lost.append(n)
        if not reached:
            break
    assert n > 200 and len(lost) < 10 and lost == [*range(n - len(lost), n)]


class Paused:
    """A stream whose next run waits in the middle."""

    def __init__(self, stream):
        self.stream, self.inside, self.go_on = stream, threading.Event(), threading.Event()

    def run(self, *arguments, **options):
        self.inside.set()
        assert self.go_on.wait(SECONDS)
        return self.stream.run(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def test_others_come_and_go_while_a_step_runs(net):
    """`open`, `feed` and `close` do not wait for it, `save` does."""
    sessions, x = Sessions(net), inputs(4)
    y, last = alone(net, x)
    stays, goes = sessions.open(), sessions.open()
    for id in (stays, goes):
        sessions.feed(id, x[:2])
    paused = sessions._stream = Paused(sessions._stream)
    outputs, saved = [], []
    stepper = threading.Thread(target=lambda: outputs.append(sessions.step()))
    stepper.start()
    assert paused.inside.wait(SECONDS)
    sessions.feed(stays, x[2:])
    sessions.close(goes)
    comes = sessions.open()
    sessions.feed(comes, x)
    with pytest.raises(RuntimeError, match=r"Sessions.step: another step is running; expected one at a time"):
        sessions.step()
    saver = threading.Thread(target=lambda: saved.append(sessions.save(stays)))
    saver.start()
    assert not saved
    paused.go_on.set()
    stepper.join(SECONDS)
    saver.join(SECONDS)
    assert same(outputs, [{stays: y[:2]}]) and same(saved, [alone(net, x[:2])[1]])
    assert same(sessions.step(), {stays: y[2:], comes: y})
    assert same(sessions.save(comes), last)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_goes_on_whatever_the_parent_was_doing(net):
    """Also where a thread of the parent had all locks; its step is nobody's then."""
    sessions, x = Sessions(net), inputs(2)
    id = sessions.open()
    sessions.feed(id, x)
    sessions._stepping = True
    with sessions._computing, sessions._lock:
        child = os.fork()
        if child == 0:
            try:
                threading.Timer(SECONDS, os._exit, [3]).start()
                os._exit(0 if same(sessions.step(), {id: alone(net, x)[0]}) else 1)
            except BaseException:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_little_is_padding(net):
    """One session with many steps beside many with few takes no memory for all of them."""
    sessions, long = Sessions(net, capacity=400), inputs(20_000)
    ids = [sessions.open() for _ in range(400)]
    for id in ids[1:]:
        sessions.feed(id, long[0])
    sessions.feed(ids[0], long)
    results, most = peak(sessions.step)
    assert same(results[ids[0]], alone(net, long)[0]) and len(results) == 400
    assert most < 50e6  # a y of 400 rows and 20,000 steps would have 600 MB
