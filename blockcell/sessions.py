"""Sessions of one layer in one process, which come, have input and go at different times: `Sessions`."""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from ._threads import in_forked_child
from .argument_reader import ArgumentReader
from .errors import short
from .layers import BaseLayer
from .optable import DTYPES, Array


@dataclass(slots=True, eq=False)
class _Session:
    id: int = -1
    row: int | None = None
    """Of the stream; None before the first step."""
    waiting: list[Array] = field(default_factory=list)
    """What was fed and no step has seen yet: arrays [I] and [t,I]."""
    queue: list[Array] = field(default_factory=list)
    """What was fed before that and is not computed yet. Only for who has `_computing`."""
    closed: bool = False


# What a session has in one run of the stream: the first arrays of its queue, of the last one perhaps a part; what the
# queue is then; and the number of steps.
_Turn = tuple[_Session, list[Array], list[Array], int]


class Sessions:
    """Runs a layer for many sessions, each step for all those that have input, with the bits that each has alone.

    A session is a sequence whose input comes bit by bit: a call that is listened to, a device that is watched. `feed`
    queues input, `step` computes what waits, and each session keeps its own state in between. The weights are those
    that the layer had when the `Sessions` were made.

    Any thread may call any method. `open`, `feed` and `close` never wait for arithmetic; `save` and `restore` wait for
    a running step; there is one `step` at a time. From asyncio: ``await asyncio.to_thread(sessions.step)``. Pickles and
    copies have everything, what waits too, under the same ids.

    Parameters
    ----------
    layer : Layer or Quantized
        One that has a stream: `LSTM`, `GRU`, `RNN`, `Dense`, a `Stack` of these, or one of them quantized.
    capacity : int
        How many sessions there is memory for at first. If more of them have had input, it is doubled, and stays.

    Raises
    ------
    TypeError
        It is no layer, or one whose backward direction begins at the last step.
    ValueError
        `capacity` is below 1.

    Examples
    --------
    >>> sessions = Sessions(LSTM.init(8, 16, seed=1))
    >>> a, b = sessions.open(), sessions.open()
    >>> sessions.feed(a, np.ones(8, np.float32))  # one step
    >>> sessions.feed(b, np.ones((3, 8), np.float32))  # three steps
    >>> {id: y.shape for id, y in sessions.step().items()}
    {0: (16,), 1: (3, 16)}
    """

    def __init__(self, layer: BaseLayer, *, capacity: SupportsIndex = 64) -> None:
        reader = ArgumentReader("Sessions")
        if not isinstance(layer, BaseLayer):
            raise TypeError(f"{reader.caller}: layer is {short(layer)}; expected a layer, quantized or not")
        capacity = reader.at_least(1, "capacity", capacity)
        self._stream = layer.stream(capacity)
        self._shape, self._dtype = (layer.input_size,), layer.dtype
        self._sessions: dict[int, _Session] = {}
        self._fed: dict[int, _Session] = {}  # those that have something waiting, the longest ago first
        self._done: dict[int, Array] = {}  # y that `step` has not returned yet
        self._rows = capacity  # of the stream, that sessions may have
        self._free = [*range(capacity)][::-1]  # those that none has
        self._left: list[int] = []  # those of closed sessions, where a running step may still write
        self._running: tuple[list[_Turn], Array, int] | None = None  # the last run: its y, and how many were before it
        self._next = 0
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # of the dicts, of `waiting` and `_left`; held for moments
        self._computing = threading.Lock()  # of the stream, its rows and `queue`; taken before `_lock`
        self._stepping = False  # whether a step is running
        _all.add(self)

    # Ctrl-C may raise after each call and at the end of each turn of a loop, and memory may be short wherever something
    # is made. What must happen together stands together below, without calls, and what may fail comes first.

    # -------------------------------------------------------------------------------------------------- never for long
    def open(self) -> int:
        """Begin a session, whose state is zero.

        Returns
        -------
        int
            Its id, which no other session of these gets.
        """
        return self._add(_Session())

    def feed(self, id: int, x: ArrayLike) -> None:
        """Queue input of a session; it is copied.

        Parameters
        ----------
        id : int
        x : array_like
            [I], one step, or [t,I], of the layer's dtype.

        Raises
        ------
        TypeError, ValueError
            `x` has another dtype or shape, or there is no such session.
        """
        if type(x) is np.ndarray and x.dtype == self._dtype and x.shape == self._shape:
            x = x.copy()
        else:
            x = self._read(x)
        with self._lock:
            session = self._session("feed", id)
            if x.ndim == 1 or len(x):
                self._fed[id] = session
                session.waiting += [x]

    def close(self, id: int) -> None:
        """End a session. What waits is discarded, and what a running `step` computes for it, too.

        Raises
        ------
        ValueError
            There is no such session.
        """
        with self._lock:
            session = self._session("close", id)
            if session.row is not None:
                self._left += [session.row]
            session.closed = True
            del self._sessions[id]
            if id in self._fed:
                del self._fed[id]
            if id in self._done:
                del self._done[id]

    # ------------------------------------------------------------------------------------------------------ arithmetic
    def step(self, limit: SupportsIndex | None = None) -> dict[int, Array]:
        """Compute what waits, of all sessions side by side.

        If it raises, nothing that was fed is lost or computed twice: the next step returns what had been computed by
        then, and goes on with the rest.

        Parameters
        ----------
        limit : int, optional
            How many steps of each session are computed at most; the others go on waiting. Sessions of very different
            numbers of steps, which None allows, are run in several groups.

        Returns
        -------
        dict of int to ndarray
            y of each session that had input, by its id: [t,H] for the t steps that were taken; [H] where these were
            a single x of shape [I]. A session that was closed meanwhile has none.

        Raises
        ------
        TypeError, ValueError
            `limit` is no integer, or below 1.
        RuntimeError
            Another step is running.
        """
        if limit is not None:
            limit = ArgumentReader("Sessions.step").at_least(1, "limit", limit)
        mine = False
        try:
            with self._lock:
                if not self._stepping:
                    self._stepping = mine = True
            if not mine:
                raise RuntimeError("Sessions.step: another step is running; expected one at a time")
            with self._computing:
                self._finish()
                for turns in self._groups(limit):
                    self._run(turns)
                with self._lock:
                    results, self._done = self._done, {}
            return results
        finally:
            if mine:
                self._stepping = False

    def save(self, id: int) -> Any:
        """Return the state of a session, after the step that is running, without what waits.

        Returns
        -------
        LSTMState, GRUState, RNNState, or tuples of these
            As a call of the layer takes and returns it, of one row.

        Raises
        ------
        ValueError
            There is no such session.
        """
        with self._computing:
            self._finish()
            with self._lock:
                session = self._session("save", id)
            self._place([session])
            state = self._stream.state_of([session.row])
        return state

    def restore(self, state: Any) -> int:
        """Begin a session with a state that `save` returned, here or elsewhere, or a call of the layer.

        Returns
        -------
        int
            Its id.

        Raises
        ------
        TypeError, ValueError
            `state` has another form, dtype or shape.
        """
        arrays = self._stream._state_arrays(state, 1)  # nothing below runs code of the caller's, or refuses it
        session = _Session()
        with self._computing:
            self._place([session])
            self._stream.set_state([session.row], self._stream._state_from(iter(arrays)))
        return self._add(session)

    # ---------------------------------------------------------------------------------------------------------- details
    def _add(self, session: _Session) -> int:
        with self._lock:
            session.id, self._next = self._next, self._next + 1
            self._sessions[session.id] = session
        return session.id

    def _session(self, method: str, id: int) -> _Session:
        try:
            return self._sessions[id]
        except KeyError:
            known = "was closed" if type(id) is int and 0 <= id < self._next else "was never opened"
            raise ValueError(f"Sessions.{method}: id is {short(id)}, which {known}; expected an open session") from None

    def _read(self, x: Any) -> Array:
        """Return a copy of a user's x in the layer's dtype."""
        reader = ArgumentReader("Sessions.feed")
        array = reader.array("x", x)
        reader.dtype_number([("x", x, array)], DTYPES.index(self._dtype), "the layer")
        if array.shape[-1:] != self._shape or array.ndim > 2:
            expected = f"expected (I,) or (t, I) with I={self._shape[0]} from the layer"
            raise ValueError(f"{reader.caller}: x has shape {array.shape}; {expected}")
        return np.array(array, self._dtype, order="C")

    def _place(self, sessions: list[_Session]) -> None:
        """Give a row to each session that has none. Only for who has `_computing`."""
        new = [session for session in sessions if session.row is None]
        if not new:
            return
        with self._lock:
            self._free, self._left = self._free + self._left, []
        missing = len(new) - len(self._free)
        if missing > 0:
            batch = self._rows + max(self._rows, missing)
            if batch > self._stream.batch:  # else an earlier call was stopped here
                self._stream._grow(batch)
            batch = self._stream.batch
            self._free, self._rows = [*range(batch - 1, self._rows - 1, -1), *self._free], batch
        self._stream.reset(self._free[-len(new) :])
        with self._lock:
            for session in new:
                row = self._free[-1]
                del self._free[-1]
                session.row = row
                if session.closed:  # a moment ago
                    self._left += [row]

    def _groups(self, limit: int | None) -> list[list[_Turn]]:
        """Return the turns of all sessions that have something waiting, those of about as many steps together."""
        with self._lock:
            fed = [
                session
                for id, session in self._fed.items()
                if (session.waiting or session.queue) and id not in self._done
            ]
            for session in fed:
                session.queue, session.waiting = session.queue + session.waiting, []
        groups: dict[int, list[_Turn]] = {}
        for session in fed:
            now, later, steps = _split_queue(session.queue, limit)
            turns = groups.setdefault((steps - 1).bit_length(), [])  # less than half of it is padding
            turns.append((session, now, later, steps))
        self._place(fed)
        return [*groups.values()]

    def _run(self, turns: list[_Turn]) -> None:
        """Compute these turns, or, if it raises, none of them, or `_finish` has something to do."""
        lengths = [steps for *_, steps in turns]
        rows = np.array([session.row for session, *_ in turns], np.intp)
        T = max(lengths)
        if T == 1:
            x = np.concatenate([now[0] for _, now, _, _ in turns], axis=None).reshape(1, len(turns), *self._shape)
        else:
            x = np.empty((T, len(turns), *self._shape), self._dtype)
            for k, (_, now, _, steps) in enumerate(turns):
                x[:steps, k] = np.vstack(now)
        y = np.empty((T, len(turns), self._stream.layer.output_size), self._dtype)
        self._running = turns, y, self._stream._advances
        self._stream.run(x, y, rows=rows, lengths=lengths if min(lengths) < T else None)
        self._finish()

    def _finish(self) -> None:
        """Note what the last run has computed, unless this is done. It may be stopped anywhere, and called again."""
        if self._running is None:
            return
        turns, y, before = self._running
        if self._stream._advances != before:
            results = [  # no views, which would keep y of all sessions
                y[0, k].copy() if now[0].ndim == 1 == len(now) else y[:steps, k].copy()
                for k, (_, now, _, steps) in enumerate(turns)
            ]
            with self._lock:
                for (session, _, later, _), result in zip(turns, results, strict=True):
                    if not session.closed:
                        self._done[session.id] = result
                        session.queue = later
                        if not later and not session.waiting and session.id in self._fed:
                            del self._fed[session.id]
        self._running = None

    # ----------------------------------------------------------------------------------------------- copies and pickles
    def __getstate__(self) -> dict[str, Any]:
        with self._computing:
            self._finish()
            with self._lock:
                own = {name: value for name, value in vars(self).items() if name not in _LOCKS}
                copied = copy.deepcopy(own)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_locks()

    def __len__(self) -> int:
        """Count the sessions that are open."""
        return len(self._sessions)

    def __repr__(self) -> str:
        return f"<Sessions of {self._stream.layer!r}, {len(self)} open, capacity={self._stream.batch}>"


def _split_queue(queue: list[Array], limit: int | None) -> tuple[list[Array], list[Array], int]:
    """Split a queue: return the arrays of the first steps, at most `limit`, the rest, and the number of these steps."""
    if len(queue) == 1 and queue[0].ndim == 1:
        return queue, [], 1
    steps = 0
    for k, x in enumerate(queue):
        here = 1 if x.ndim == 1 else len(x)
        if limit is not None and steps + here > limit:
            part = limit - steps
            if part == 0:
                return queue[:k], queue[k:], limit
            return [*queue[:k], x[:part]], [x[part:], *queue[k + 1 :]], limit
        steps += here
    return queue, [], steps


_LOCKS = "_lock", "_computing", "_stepping"
_all: weakref.WeakSet[Sessions] = weakref.WeakSet()


@in_forked_child
def _renew_locks() -> None:
    for sessions in _all:
        sessions._make_locks()
