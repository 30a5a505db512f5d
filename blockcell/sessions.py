"""Sessions of one layer in one process, which come, have input and go at different times: `Sessions`."""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from ._read import ArgumentReader, short
from ._threads import in_forked_child
from .layers import Layer, Packed
from .optable import DTYPES, Array


@dataclass(slots=True)
class _Session:
    row: int | None = None
    """Of the stream; None before the first step."""
    waiting: list[Array] = field(default_factory=list)
    """What was fed and is not computed yet: arrays [I] and [t,I]."""
    closed: bool = False


class _Turn(NamedTuple):
    """What a session has in one run of the stream."""

    id: int
    session: _Session
    taken: list[Array]
    """The first arrays that wait; of the last one perhaps a part."""
    rest: list[Array]
    """What is left of that one."""
    steps: int


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
    layer : Layer or Packed
        One that has a stream: `LSTM`, `GRU`, `RNN`, `Dense`, a `Stack` of these, or one of them packed.
    capacity : int
        For how many sessions there is room at first. If more of them have had input, room is doubled, and stays.
    storage : {None, "float16", "bfloat16", "int8"}
        How matrices of weights are kept, as of ``layer.stream``.
    activations : {"float32", "int8", "int16"}
        With ``storage="int8"``: as of ``layer.packed``.

    Raises
    ------
    TypeError
        It is no layer, or one whose backward direction begins at the last step.
    ValueError
        `capacity` is below 1, or as from ``layer.stream``.

    Examples
    --------
    >>> sessions = Sessions(LSTM.init(8, 16, seed=1))
    >>> a, b = sessions.open(), sessions.open()
    >>> sessions.feed(a, np.ones(8, np.float32))  # one step
    >>> sessions.feed(b, np.ones((3, 8), np.float32))  # three steps
    >>> {id: y.shape for id, y in sessions.step().items()}
    {0: (16,), 1: (3, 16)}
    """

    def __init__(
        self,
        layer: Layer | Packed,
        *,
        capacity: SupportsIndex = 64,
        storage: str | None = None,
        activations: str = "float32",
    ) -> None:
        reader = ArgumentReader("Sessions")
        if not isinstance(layer, Layer | Packed):
            raise TypeError(f"{reader.caller}: layer is {short(layer)}; expected a layer, or a packed one")
        capacity = reader.integer("capacity", capacity)
        if capacity < 1:
            raise ValueError(f"{reader.caller}: capacity is {capacity}; expected at least 1")
        if isinstance(layer, Packed):
            if storage is not None:
                expected = f"expected None with a packed layer, whose storage is {layer.storage!r}"
                raise ValueError(f"{reader.caller}: storage is {short(storage)}; {expected}")
            self._stream = layer.stream(capacity)
        else:
            self._stream = layer.stream(capacity, storage, activations)
        self._shape, self._dtype = (layer.input_size,), layer.dtype
        self._sessions: dict[int, _Session] = {}
        self._fed: dict[int, _Session] = {}  # those that have something waiting, the longest ago first
        self._done: dict[int, Array] = {}  # y that `step` has not returned yet
        self._free = [*range(capacity)][::-1]  # rows of the stream
        self._left: list[int] = []  # those of closed sessions, where a running step may still write
        self._next = 0
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # of the dicts and of `_left`; held for moments
        self._computing = threading.Lock()  # of the stream and of its free rows; taken before `_lock`
        self._stepping = threading.Lock()  # of `step`, which does not wait for it
        _all.add(self)

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
                session.waiting.append(x)
                self._fed[id] = session

    def close(self, id: int) -> None:
        """End a session. What waits is discarded, and what a running `step` computes for it, too.

        Raises
        ------
        ValueError
            There is no such session.
        """
        with self._lock:
            session = self._session("close", id)
            session.closed = True
            for each in (self._sessions, self._fed, self._done):
                each.pop(id, None)
            if session.row is not None:
                self._left.append(session.row)

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
            a single x of shape [I]. A session that was closed meanwhile is left out.

        Raises
        ------
        TypeError, ValueError
            `limit` is no integer, or below 1.
        RuntimeError
            Another step is running.
        """
        if limit is not None:
            limit = ArgumentReader("Sessions.step").integer("limit", limit)
            if limit < 1:
                raise ValueError(f"Sessions.step: limit is {limit}; expected at least 1, or None")
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("Sessions.step: another step is running; expected one at a time")
        try:
            with self._computing:
                for turns in self._groups(limit):
                    self._run(turns)
                with self._lock:
                    done = [*self._done.items()]
                results = {id: y.copy() for id, y in done}  # not views, which would keep y of all sessions
                with self._lock:
                    self._done = {}
                    return {id: y for id, y in results.items() if id in self._sessions}
        finally:
            self._stepping.release()

    def save(self, id: int) -> Any:
        """The state of a session, after the step that is running, without what waits.

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
            with self._lock:
                session = self._session("save", id)
            self._place([session])
            return self._stream.state_of([session.row])

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
            id, self._next = self._next, self._next + 1
            self._sessions[id] = session
        return id

    def _session(self, what: str, id: int) -> _Session:
        try:
            return self._sessions[id]
        except KeyError:
            known = "was closed" if type(id) is int and 0 <= id < self._next else "was never opened"
            raise ValueError(f"Sessions.{what}: id is {short(id)}, which {known}; expected an open session") from None

    def _read(self, x: Any) -> Array:
        """A copy of any x, of numbers that the layer takes."""
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
            self._free += self._left
            self._left = []
        missing = len(new) - len(self._free)
        if missing > 0:
            before = self._stream.batch
            batch = before + max(before, missing)
            self._stream._grow(batch)
            self._free = [*range(batch - 1, before - 1, -1), *self._free]
        rows = self._free[-len(new) :]
        self._stream.reset(rows)
        with self._lock:
            for session, row in zip(new, rows, strict=True):
                session.row = row
                if session.closed:  # a moment ago
                    self._left.append(row)
            del self._free[-len(new) :]

    def _groups(self, limit: int | None) -> list[list[_Turn]]:
        """The turns of all sessions that have something waiting, those of about as many steps together."""
        with self._lock:
            fed = [(id, session, session.waiting[:]) for id, session in self._fed.items() if id not in self._done]
        groups: dict[int, list[_Turn]] = {}
        for id, session, waiting in fed:
            turn = _Turn(id, session, *_taken(waiting, limit))
            groups.setdefault((turn.steps - 1).bit_length(), []).append(turn)  # less than half of it is padding
        self._place([session for _, session, _ in fed])
        return [*groups.values()]

    def _run(self, turns: list[_Turn]) -> None:
        """Compute these turns, or, if it raises, none of them."""
        lengths = [turn.steps for turn in turns]
        rows = np.array([turn.session.row for turn in turns], np.intp)
        T = max(lengths)
        if T == 1:
            x = np.concatenate([turn.taken[0] for turn in turns], axis=None).reshape(1, len(turns), *self._shape)
        else:
            x = np.empty((T, len(turns), *self._shape), self._dtype)
            for k, turn in enumerate(turns):
                x[: turn.steps, k] = np.vstack(turn.taken)
        y = self._stream.run(x, rows=rows, lengths=lengths if min(lengths) < T else None)
        with self._lock:
            for k, (id, session, taken, rest, steps) in enumerate(turns):
                if not session.closed:
                    self._done[id] = y[0, k] if len(taken) == 1 and taken[0].ndim == 1 else y[:steps, k]
                    session.waiting[: len(taken)] = rest
                    if not session.waiting:
                        del self._fed[id]

    # ----------------------------------------------------------------------------------------------- copies and pickles
    def __getstate__(self) -> dict[str, Any]:
        with self._computing, self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name not in _LOCKS})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_locks()

    def __len__(self) -> int:
        """The number of sessions that are open."""
        return len(self._sessions)

    def __repr__(self) -> str:
        return f"<Sessions of {self._stream.layer!r}, {len(self)} open, capacity={self._stream.batch}>"


def _taken(waiting: list[Array], limit: int | None) -> tuple[list[Array], list[Array], int]:
    """The first arrays up to so many steps, what is left of the last one, and the number of steps."""
    if len(waiting) == 1 and waiting[0].ndim == 1:
        return waiting, [], 1
    steps = 0
    for k, x in enumerate(waiting):
        here = 1 if x.ndim == 1 else len(x)
        if limit is not None and steps + here > limit:
            part = limit - steps
            return [*waiting[:k], *([x[:part]] if part else [])], [x[part:]] if part else [], limit
        steps += here
    return waiting, [], steps


_LOCKS = "_lock", "_computing", "_stepping"
_all: weakref.WeakSet[Sessions] = weakref.WeakSet()


@in_forked_child
def _renew_locks() -> None:
    for sessions in _all:
        sessions._make_locks()
