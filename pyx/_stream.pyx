"""Layers without detours: one call on arrays that can be taken as they are, or step by step in a stream."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.string cimport memcpy, memset
from numpy cimport (
    PyArray_BYTES, PyArray_DIMS, PyArray_ISWRITEABLE, PyArray_NBYTES, import_array, ndarray, npy_intp
)

import sys

import numpy

from blockcell._args import empty
from blockcell._read import which
from blockcell._team import NUMBER, RUN
from arrays cimport is_plain, overlap
from runs cimport Runs

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_GetPointer(NUMBER, "blockcell._team.NUMBER")
cdef Runs run_kernel = <Runs> PyCapsule_GetPointer(RUN, "blockcell._team.RUN")

# On so many threads, from the states in `first` (NULL: zeros) to those in `last`; what `_team` wants to know.
ctypedef long long (*Run)(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil

cdef extern from *:
    """
    static inline int claim_flag(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }
    static inline void release_flag(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    """
    bint claim_flag(int *flag)
    void release_flag(int *flag)

cdef enum:
    SHORT = 1 << 15  # multiplications, above which a call leaves other Python threads running
    STATES = 2  # at most


cdef struct Steps:  # of one call
    Run run
    const void *plan
    void *work
    const void *x
    void *y
    const void **first
    void **last
    bint brief


cdef long long run_steps(void *context, int ready) except? -1:
    cdef const Steps *s = <const Steps *> context
    cdef long long lost
    if s.brief:
        return s.run(s.plan, ready, s.work, s.x, s.y, s.first, s.last)
    with nogil:
        lost = s.run(s.plan, ready, s.work, s.x, s.y, s.first, s.last)
    return lost


@cython.final
cdef class Plan:
    """How T steps of B rows are run with so many threads, and the weights that this reads."""

    cdef object weights, parameters
    cdef Run run
    cdef Py_ssize_t T, B, size  # bytes of scratch
    cdef int threads, planned  # there may be; are of use
    cdef bint batch_first, brief

    cdef execute(self, char *work, const void *x, void *y, const void **first, void **last):
        cdef Steps steps
        work += -<size_t> work & 63
        steps.run, steps.plan, steps.work = self.run, PyBytes_AS_STRING(self.parameters), work
        steps.x, steps.y, steps.first, steps.last, steps.brief = x, y, first, last, self.brief
        run_kernel(self.planned, run_steps, &steps)


cdef Plan plan_of(Plan last, layer, weights, Py_ssize_t T, Py_ssize_t B, bint batch_first):
    """The last one, where it is of the same."""
    cdef int threads = number_of_threads[0]
    cdef Plan plan
    if (
        last is not None and last.weights is weights and last.T == T and last.B == B and last.threads == threads
        and last.batch_first == batch_first
    ):
        return last
    plan = Plan.__new__(Plan)
    kernel, plan.parameters, plan.size, plan.planned = layer._stream_kernel(weights, T, B, batch_first, threads)
    plan.run = <Run> PyCapsule_GetPointer(kernel, NULL)
    plan.weights, plan.T, plan.B, plan.threads, plan.batch_first = weights, T, B, threads, batch_first
    plan.brief = T * B * (layer.input_size + layer.hidden_size) * layer.hidden_size < SHORT
    return plan


cdef bint is_shaped(array, int type_number, int rank, Py_ssize_t T, Py_ssize_t B, Py_ssize_t width) noexcept:
    """Whether a kernel can take it as it is: (B, width), or for a rank of 3 (T, B, width); any T or B below zero."""
    cdef npy_intp *shape
    if not is_plain(array, type_number, rank):
        return False
    shape = PyArray_DIMS(<ndarray> array)
    return (
        shape[rank - 1] == width
        and (B < 0 or shape[rank - 2] == B)
        and (rank == 2 or T < 0 or shape[0] == T)
    )


cdef class Runner:
    """Calls of a layer with weights of its own.  Nothing is kept of them but what the next one of the same sizes can
    use."""

    cdef Py_ssize_t inputs, cells
    cdef object dtype
    cdef type state
    cdef int type_number, states
    cdef Plan plan

    def __init__(self, layer):
        self.inputs, self.cells, self.dtype = layer.input_size, layer.hidden_size, layer.dtype
        self.type_number = self.dtype.num
        self.states = len(layer._state._fields)
        self.state = layer._state if self.states else tuple  # a layer without a state has the empty tuple

    def call(self, layer, dict weights, x, state, batch_first):
        """What ``layer(x, state, batch_first=...)`` returns, with one of all `weights`; None where something has to be
        converted, or explained."""
        cdef Py_ssize_t T, B
        cdef int k
        cdef bint turned
        cdef const void *first[STATES]
        cdef void *last[STATES]
        cdef char *work
        cdef Plan plan
        if not is_shaped(x, self.type_number, 3, -1, -1, self.inputs):
            return None
        if batch_first is not True and batch_first is not False:
            return None
        turned = batch_first is True
        T, B = PyArray_DIMS(<ndarray> x)[turned], PyArray_DIMS(<ndarray> x)[not turned]
        if T == 0 or B == 0 or self.cells == 0:
            return None
        if state is not None and (type(state) is not self.state or len(<tuple> state) != self.states):
            return None
        for k in range(self.states):
            first[k] = NULL
            if state is not None:
                part = (<tuple> state)[k]
                if not is_shaped(part, self.type_number, 2, 0, B, self.cells):
                    return None
                first[k] = PyArray_BYTES(<ndarray> part)
        y = empty((B, T, self.cells) if turned else (T, B, self.cells), self.dtype)
        after = []
        for k in range(self.states):
            part = empty((B, self.cells), self.dtype)
            last[k] = PyArray_BYTES(<ndarray> part)
            after.append(part)
        with cython.critical_section(self):
            plan = self.plan
        plan = plan_of(plan, layer, weights[layer], T, B, turned)
        with cython.critical_section(self):
            self.plan = plan
        work = <char *> PyMem_RawMalloc(plan.size)
        if work is NULL:
            raise MemoryError()
        try:
            plan.execute(work, PyArray_BYTES(<ndarray> x), PyArray_BYTES(<ndarray> y), first, last)
        finally:
            PyMem_RawFree(work)
        return y, tuple.__new__(self.state, after)


# -------------------------------------------------------------------------------------------------------------- streams
cdef class Stream:
    """Steps of a layer, one after the other, with the state kept in between.

    Made by `layer.stream(batch=1)`.  One step costs little more than its arithmetic, and with ``out=`` allocates
    nothing; the results have the bits of one call of the layer over all steps.  A stream keeps the weights that the
    layer had when it was made, until `refresh`.  It may be pickled.

    A method that raises leaves the stream as it was.  A stream is for one thread at a time: a method that finds another
    one at work raises a RuntimeError.

    Attributes
    ----------
    layer : LSTM, GRU, Dense or Packed
    batch : int
        B, the rows that run side by side.
    storage : str or None
        How matrices of weights are kept: "float16", "bfloat16" or "int8"; None for as they are.
    state : LSTMState, GRUState or the empty tuple
        [B,H] each; a copy.  Assigning sets it.
    """

    cdef readonly object layer, storage
    cdef readonly Py_ssize_t batch
    cdef object cell  # whose weights they are: the layer, or what a Packed has of it
    cdef object dtype, given, weights  # what the layer has, and what of it is read
    cdef Plan step_plan, block_plan
    cdef list states, following  # arrays [B,H]: those of now, and where the next ones are computed
    cdef const void *first[STATES]  # where both are in memory
    cdef void *last[STATES]
    cdef Py_ssize_t inputs, cells, room
    cdef object memory  # scratch, of so much room
    cdef int type_number, in_use

    def __init__(self, layer, batch=1, storage=None):
        if batch < 1:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected at least 1")
        if batch * (layer.input_size + layer.hidden_size + 1) * layer.dtype.itemsize > sys.maxsize:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected fewer rows, that memory holds")
        self.layer, self.cell, self.batch, self.storage = layer, layer, batch, storage
        self.inputs, self.cells, self.dtype = layer.input_size, layer.hidden_size, layer.dtype
        self.type_number = self.dtype.num
        self.memory, self.room = None, 0
        self.states, self.following = self.zeros(), self.zeros()
        self.point()
        self.refresh()

    cdef list zeros(self):
        cdef list arrays = []  # by a loop: Cython's list comprehensions free an item twice where the list cannot grow
        for _ in self.cell._state._fields:
            array = numpy.zeros((self.batch, self.cells), self.dtype)
            arrays.append(array)
        return arrays

    cdef void point(self) noexcept:
        cdef Py_ssize_t k
        for k in range(len(self.states)):
            self.first[k] = PyArray_BYTES(<ndarray> self.states[k])
            self.last[k] = PyArray_BYTES(<ndarray> self.following[k])

    cdef void move_on(self) noexcept:
        """What was computed is the state."""
        self.states, self.following = self.following, self.states
        self.point()

    # ------------------------------------------------------------------------------------------------------------ steps
    def step(self, x, out=None):
        """One step.

        Parameters
        ----------
        x : array_like
            [B,I], of the layer's dtype.
        out : ndarray, optional
            [B,H], filled and returned: C-contiguous and writeable.  Then nothing is allocated.

        Returns
        -------
        ndarray
            h, [B,H].

        Raises
        ------
        TypeError, ValueError
            `x` or `out` has another dtype or shape, or they overlap.
        RuntimeError
            The stream is in use.
        """
        return advance((self,), (), x, out, 2)

    def run(self, x, out=None):
        """T steps: as `step`, with `x` [T,B,I] and h [T,B,H]."""
        return advance((self,), (), x, out, 3)

    cdef input(self, x, int rank):
        """x as the kernel takes it."""
        if is_shaped(x, self.type_number, rank, -1, self.batch, self.inputs):
            return x
        return self.cell._taken("x", x, (None, self.batch, self.inputs)[3 - rank :])

    cdef output(self, x, out, int rank, Py_ssize_t T):
        """Where the results go."""
        if out is None:
            return empty((T, self.batch, self.cells)[3 - rank :], self.dtype)
        if (
            not is_shaped(out, self.type_number, rank, T, self.batch, self.cells)
            or not PyArray_ISWRITEABLE(<ndarray> out)
        ):
            shape = (T, self.batch, self.cells)[3 - rank :]
            found = f"{out.dtype} {out.shape}" if type(out) is ndarray else type(out).__name__
            expected = f"expected a writeable C-contiguous {self.dtype} array of shape {shape}"
            message = f"{type(self.cell).__name__}.stream: out is {found}; {expected}"
            raise (ValueError if type(out) is ndarray and out.dtype == self.dtype else TypeError)(message)
        if overlap(x, out):
            raise ValueError(f"{type(self.cell).__name__}.stream: out overlaps x; give it memory of its own")
        return out

    cdef compute(self, x, y, Py_ssize_t T):
        """T steps, up to the states that follow; `move_on` makes them those of now."""
        cdef Plan plan
        if self.cells == 0:
            return
        if T == 1:
            plan = self.step_plan = plan_of(self.step_plan, self.cell, self.weights, 1, self.batch, False)
        else:
            plan = self.block_plan = plan_of(self.block_plan, self.cell, self.weights, T, self.batch, False)
        if plan.size > self.room:
            self.memory = numpy.empty(plan.size, numpy.uint8)
            self.room = plan.size
        plan.execute(
            PyArray_BYTES(<ndarray> self.memory), PyArray_BYTES(<ndarray> x), PyArray_BYTES(<ndarray> y), self.first,
            self.last,
        )

    # ---------------------------------------------------------------------------------------------- states and weights
    @property
    def state(self):
        cdef list arrays = []
        claim((self,))
        try:
            for array in self.states:
                array = array.copy()
                arrays.append(array)
        finally:
            release((self,), 1)
        return self.cell._state._make(arrays)

    @state.setter
    def state(self, value):
        put((self,), self._state_arrays(value))

    def _state_arrays(self, value):
        return self.cell._taken_state(value, self.batch)

    def reset(self, rows=None):
        """Set the state to zero, of all rows or of those given.

        Parameters
        ----------
        rows : array_like of int or of bool, optional
            Indices of rows, or for every row whether it is meant.

        Raises
        ------
        TypeError
            `rows` is neither.
        ValueError
            There is no such row.
        """
        reset((self,), rows)

    def refresh(self):
        """Take over the weights that the layer has now; the state stays."""
        refresh((self,), self.cell._shared.weights)

    # ---------------------------------------------------------------------------------------------------------- pickles
    def _belong_to(self, packed):
        """Of a stream that a `Packed` makes."""
        self.layer, self.storage = packed, packed.storage
        return self

    def _in_use(self):
        """A layer with the weights that the stream works with, which its own layer may have replaced."""
        return self.cell._with(self.weights)

    def __reduce__(self):
        if self.layer is not self.cell:
            return restored, (self.layer, self.batch, self.state)
        return restored, (self._in_use(), self.batch, self.state, self.storage)

    def __repr__(self):
        return shown(self.layer, self.batch, self.storage if self.layer is self.cell else None)


def restored(layer, batch, state, storage=None):
    """A stream from its pickle."""
    stream = layer.stream(batch) if storage is None else layer.stream(batch, storage)
    stream.state = state
    return stream


def shown(layer, batch, storage):
    """A stream's repr."""
    return f"<Stream of {layer!r}, batch={batch}{'' if storage is None else f', storage={storage!r}'}>"


# --------------------------------------------------------------- streams that stand one above the other change together
cdef claim(tuple streams):
    """All of them for the caller alone, until `release`."""
    cdef Py_ssize_t k
    cdef Stream stream
    for k in range(len(streams)):
        stream = streams[k]
        if not claim_flag(&stream.in_use):
            release(streams, k)
            raise RuntimeError(
                f"{type(stream.cell).__name__}.stream: the stream is in use; it is for one thread at a time"
            )


cdef void release(tuple streams, Py_ssize_t n) noexcept:
    cdef Py_ssize_t k
    for k in range(n):
        release_flag(&(<Stream> streams[k]).in_use)


def advance(tuple streams, tuple between, x, out, int rank):
    """x through all of them: a step where the rank is 2, else a block of steps.  `between` has room for the y of a step
    of each but the last."""
    cdef Py_ssize_t T = 1, k, top = len(streams) - 1
    cdef Stream stream = streams[0]
    x = stream.input(x, rank)  # may run code of the caller's; nothing below does
    if rank == 3:
        T = PyArray_DIMS(<ndarray> x)[0]
    stream = streams[top]
    out = stream.output(x, out, rank, T)
    if T == 0:
        return out
    claim(streams)
    try:
        for k in range(top + 1):
            stream = streams[k]
            if k == top:
                y = out
            elif rank == 2:
                y = between[k]
            else:
                y = empty((T, stream.batch, stream.cells), stream.dtype)
            stream.compute(x, y, T)
            x = y
        for k in range(top + 1):
            (<Stream> streams[k]).move_on()
    finally:
        release(streams, top + 1)
    return out


def put(tuple streams, list arrays):
    """The states of all become those of `arrays`, one after the other."""
    cdef Py_ssize_t k, at = 0
    cdef ndarray state
    claim(streams)
    for k in range(len(streams)):
        for state in (<Stream> streams[k]).states:
            memcpy(PyArray_BYTES(state), PyArray_BYTES(<ndarray> arrays[at]), PyArray_NBYTES(state))
            at += 1
    release(streams, len(streams))


def reset(tuple streams, rows):
    """These rows of all states become zero, or all where none are given."""
    cdef Py_ssize_t k, b, batch = (<Stream> streams[0]).batch
    cdef npy_intp size
    cdef ndarray state
    cdef bytearray picked = which(rows, batch)
    claim(streams)
    for k in range(len(streams)):
        for state in (<Stream> streams[k]).states:
            size = PyArray_NBYTES(state) // batch
            for b in range(batch):
                if picked[b]:
                    memset(PyArray_BYTES(state) + b * size, 0, size)
    release(streams, len(streams))


def refresh(tuple streams, dict weights):
    """The weights of all become what they are now."""
    cdef Py_ssize_t k
    cdef Stream stream
    cdef list read = []
    claim(streams)
    try:
        for k in range(len(streams)):
            stream = streams[k]
            given = weights[stream.cell]
            read.append(stream.weights if given is stream.given else stream.cell._streamed(given, stream.storage))
        for k in range(len(streams)):
            stream = streams[k]
            stream.given, stream.weights = weights[stream.cell], read[k]
            stream.step_plan = stream.block_plan = None
    finally:
        release(streams, len(streams))
