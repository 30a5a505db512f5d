"""Streams: a layer, or layers one above the other, step by step."""
from libc.string cimport memcpy, memset
from numpy cimport (
    NPY_INTP, PyArray_BYTES, PyArray_DIMS, PyArray_ISWRITEABLE, PyArray_NBYTES, import_array, int64_t, ndarray, npy_intp
)

import sys

import numpy

from blockcell._args import empty
from blockcell._layers import step_mask_of
from blockcell._read import ArgumentReader

from blockcell._layers cimport KernelPlan, is_shaped, packed_address, plan_for
from numpy_arrays cimport is_plain, overlap
from passes.arrays cimport STATES, Pass

import_array()

cdef extern from *:
    """
    static inline int claim_flag(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }
    static inline void release_flag(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    #define fetch_line(line) __builtin_prefetch(line)
    """
    bint claim_flag(int *flag)
    void release_flag(int *flag)
    void fetch_line(const char *line) nogil

cdef enum:
    PLANS = 64  # that a stream keeps, as the number of rows may change from step to step
    LARGE = 1 << 16  # bytes of states, above which copying them leaves other Python threads running
    ROWS_AHEAD = 4  # that are fetched from a large table while one is copied
    LINE = 64  # bytes


cdef class Stream:
    """Steps of a layer, one after the other, with the state kept in between.

    Made by `layer.stream(batch=1)`.  One step costs little more than its arithmetic, and with ``out=`` allocates
    nothing; the results have the bits of one call of the layer over all steps.  A stream keeps the weights that the
    layer had when it was made, until `refresh`.  It may be pickled.

    Rows may step apart: `step` and `run` take `rows`, those that advance, and a step of a few rows costs what it costs
    in a stream of so few.  Each row has the bits that it has alone.  `state_of` and `set_state` move rows to another
    stream, process or machine.

    A method that raises leaves the stream as it was.  A stream is for one thread at a time: a method that finds another
    one at work raises a RuntimeError.

    Attributes
    ----------
    layer : LSTM, GRU, RNN, Dense or Quantized
    batch : int
        B, the rows that run side by side.
    state : LSTMState, GRUState, RNNState or the empty tuple
        [B,H] each, h of a projected LSTM [B,P]; a copy.  Assigning sets it.
    """

    cdef readonly object layer
    cdef readonly Py_ssize_t batch
    cdef readonly Py_ssize_t _advances  # how often the states have changed by steps, of the lowest stream of a stack
    cdef object cell  # whose weights they are: the layer, or what a Quantized has of it
    cdef object dtype, weights  # those that the layer had at the last refresh
    cdef list plans  # the last ones
    cdef char *packed  # of the weights
    cdef int format  # how they are quantized
    cdef list states, following  # arrays [B,H]: those of now, and where the next ones are computed
    cdef const void *first[STATES]  # where both are in memory
    cdef void *last[STATES]
    cdef object numbers, named  # once rows are named: their numbers, intp [B], and for each row a byte that is zero
    cdef Py_ssize_t inputs, outputs, room
    cdef object memory  # scratch, of so much room
    cdef int type_number, in_use

    def __init__(self, layer, batch=1):
        if batch < 1:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected at least 1")
        width = layer.input_size + max(layer.hidden_size, layer.output_size)
        if batch * (width + 1) * layer.dtype.itemsize > sys.maxsize:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected fewer rows, that memory holds")
        self.layer, self.cell, self.batch = layer, layer, batch
        self.inputs, self.outputs, self.dtype = layer.input_size, layer.output_size, layer.dtype
        self.type_number = self.dtype.num
        self.memory, self.room, self.plans = None, 0, [None] * PLANS
        self.states, self.following = self.zeros(batch), self.zeros(batch)
        self.point()
        self.refresh()

    cdef list zeros(self, Py_ssize_t batch):
        cdef list arrays = []  # by a loop: Cython's list comprehensions free an item twice where the list cannot grow
        for size in self.cell._state_sizes:
            array = numpy.zeros((batch, size), self.dtype)
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
    def step(self, x, out=None, *, rows=None):
        """One step, of all rows or of those given.

        Parameters
        ----------
        x : array_like
            [B,I], of the layer's dtype; [n,I] for n rows that are given.
        out : ndarray, optional
            [B,H], or [B,P] where y has that size, filled and returned: C-contiguous and writeable.  [n,...] for n rows.
            Then nothing is allocated, if `rows` are an array of intp, but by the first steps of so many rows.
        rows : array_like of int or of bool, optional
            Which rows advance, in the order of `x` and of the result: each once, by indices, of which those below zero
            count from the end; or for every row whether it is meant, then in ascending order.  There may be none.  The
            others keep their states and cost nothing.

        Returns
        -------
        ndarray
            h, in the form of `out`.

        Raises
        ------
        TypeError, ValueError
            `x` or `out` has another dtype or shape, or they overlap; `rows` are neither indices nor bools, there is no
            such row, or one is given twice.
        RuntimeError
            The stream is in use.
        """
        return advance((self,), (), x, out, 2, rows, None)

    def run(self, x, out=None, *, rows=None, lengths=None):
        """T steps: as `step`, with `x` [T,B,I] and h [T,B,H].

        Parameters
        ----------
        x, out, rows
            As of `step`, with T in front.
        lengths : array_like of int, optional
            [B], or [n] for n rows that are given: how many steps each of them has, 0 to T.  Past its length a row keeps
            its state, h is zero and `x` is not read.

        Returns
        -------
        ndarray
            h, in the form of `out`.

        Raises
        ------
        TypeError, ValueError
            As from `step`; `lengths` are no integers, of another shape, or outside of 0 to T.
        RuntimeError
            The stream is in use.
        """
        return advance((self,), (), x, out, 3, rows, lengths)

    cdef input(self, x, int rank, Py_ssize_t n, bint some):
        """x of n rows, of all or of `some`, as the kernel takes it."""
        if is_shaped(x, self.type_number, rank, -1, n, self.inputs):
            return x
        return self.cell._taken("x", x, (None, n, self.inputs)[3 - rank :], ", by the number of rows" if some else "")

    cdef output(self, x, out, int rank, Py_ssize_t T, Py_ssize_t n):
        """Where the results of n rows go."""
        if out is None:
            return empty((T, n, self.outputs)[3 - rank :], self.dtype)
        if (
            not is_shaped(out, self.type_number, rank, T, n, self.outputs)
            or not PyArray_ISWRITEABLE(<ndarray> out)
        ):
            shape = (T, n, self.outputs)[3 - rank :]
            found = f"{out.dtype} {out.shape}" if type(out) is ndarray else type(out).__name__
            expected = f"expected a writeable C-contiguous {self.dtype} array of shape {shape}"
            message = f"{type(self.cell).__name__}.stream: out is {found}; {expected}"
            raise (ValueError if type(out) is ndarray and out.dtype == self.dtype else TypeError)(message)
        if overlap(x, out):
            raise ValueError(f"{type(self.cell).__name__}.stream: out overlaps x; give it memory of its own")
        return out

    cdef compute(self, x, y, Py_ssize_t T, Py_ssize_t n, step_mask, bint apart):
        """T steps of n rows, from the states of now to those that follow, which `move_on` makes those of now; or
        `apart`, from what stands there already: a kernel reads all states before it writes any."""
        cdef KernelPlan last_plan, plan
        cdef Pass a
        cdef int k
        cdef Py_ssize_t place = (n + 7 * T) % PLANS
        if self.outputs == 0:
            return
        last_plan = <KernelPlan> self.plans[place]
        plan = plan_for(last_plan, self.cell, "forward", self.format, T, n)
        if plan is not last_plan:
            self.plans[place] = plan
        if plan.size > self.room:
            self.memory = numpy.empty(plan.size, numpy.uint8)
            self.room = plan.size
        a.x, a.y = PyArray_BYTES(<ndarray> x), PyArray_BYTES(<ndarray> y)
        a.packed = self.packed
        a.saved, a.step_mask, a.reverse = NULL, NULL, False
        if step_mask is not None:
            a.step_mask = <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
        for k in range(STATES):
            a.initial_state[k], a.last_state[k] = self.first[k], self.last[k]
            if apart:
                a.initial_state[k] = self.last[k]
        a.x_layout.step, a.x_layout.row = n * self.inputs, self.inputs
        a.y_layout.step, a.y_layout.row = n * self.outputs, self.outputs
        plan.execute(PyArray_BYTES(<ndarray> self.memory), &a)

    # ---------------------------------------------------------------------------------------------- states and weights
    @property
    def state(self):
        return self.state_of(None)

    @state.setter
    def state(self, value):
        self.set_state(None, value)

    def state_of(self, rows):
        """The states of some rows: a copy, which `set_state` of any stream of such a layer takes.

        Parameters
        ----------
        rows : array_like of int or of bool, or None
            As of `step`; None for all of them.

        Returns
        -------
        LSTMState, GRUState, RNNState or the empty tuple
            [n,H] each, h of a projected LSTM [n,P], in the order of `rows`.

        Raises
        ------
        TypeError, ValueError
            `rows` are neither indices nor bools, there is no such row, or one is given twice.
        RuntimeError
            The stream is in use.
        """
        return self._state_from(iter(copies((self,), rows)))

    def set_state(self, rows, states):
        """Set the states of some rows; the others keep theirs.

        Parameters
        ----------
        rows : array_like of int or of bool, or None
            As of `step`; None for all of them.
        states
            As `state_of` returns them, for as many rows; they are copied.  One row is every row's.

        Raises
        ------
        TypeError, ValueError
            As from `state_of`, or `states` have another form, dtype or shape.
        RuntimeError
            The stream is in use.
        """
        put((self,), rows, self._state_arrays, states)

    def _state_arrays(self, value, n):
        """The arrays of a state of n rows that the user gives."""
        return self.cell._taken_state(value, n)

    def _state_from(self, arrays):
        """A state of the next ones of these arrays."""
        cdef list own = []
        for _ in range(len(self.states)):
            own.append(next(arrays))
        return self.cell._state._make(own)

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

    cdef void use(self, weights):
        """Read these weights from now on."""
        self.weights, self.packed, self.format = weights, packed_address(weights.packed), weights.format

    def _grow(self, batch):
        """Have more rows, whose states are zero."""
        grow((self,), batch)

    # ---------------------------------------------------------------------------------------------------------- pickles
    def _belong_to(self, quantized):
        """Of a stream that a `Quantized` makes."""
        self.layer = quantized
        return self

    def _in_use(self):
        """A layer with the weights that the stream works with, which its own layer may have replaced."""
        return self.layer if self.layer is not self.cell else self.cell._with(self.weights)

    def __reduce__(self):
        return restored, (self._in_use(), self.batch, self.state)

    def __repr__(self):
        return f"<Stream of {self.layer!r}, batch={self.batch}>"


def restored(layer, batch, state):
    """A stream from its pickle."""
    stream = layer.stream(batch)
    stream.state = state
    return stream


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


cdef read_rows(Stream stream, rows, bint once=True):
    """The numbers of the rows that a user gives, an array of intp; None for all.  May run code of the caller's."""
    if rows is None or (once and is_plain(rows, NPY_INTP, 1)):  # `hold` looks at what is in it
        return rows
    return reader_of(stream).rows(rows, stream.batch, once)


cdef reader_of(Stream stream):
    return ArgumentReader(f"{type(stream.cell).__name__}.stream")


cdef bint hold(Stream stream, ndarray rows) noexcept:
    """Copy the rows' numbers, from 0 on, to where nobody changes them; whether each is there, and given once."""
    cdef const npy_intp *given = <const npy_intp *> PyArray_BYTES(rows)
    cdef npy_intp *numbers = <npy_intp *> PyArray_BYTES(<ndarray> stream.numbers)
    cdef char *named = PyArray_BYTES(<ndarray> stream.named)
    cdef Py_ssize_t n = PyArray_DIMS(rows)[0], held = 0, k, row
    while held < n:
        row = given[held]
        if row < 0:
            row += stream.batch
        if row < 0 or row >= stream.batch or named[row]:
            break
        named[row] = True
        numbers[held] = row
        held += 1
    for k in range(held):
        named[numbers[k]] = False
    return held == n


cdef const npy_intp *numbers_of(Stream stream, rows) except? NULL:
    """The numbers of the rows that `read_rows` gave, for who has claimed the stream; NULL for all."""
    if rows is None:
        return NULL
    if stream.numbers is None:
        numbers = numpy.empty(stream.batch, numpy.intp)
        stream.named = numpy.zeros(stream.batch, numpy.uint8)
        stream.numbers = numbers
    if not hold(stream, rows):
        hold(stream, reader_of(stream).rows(rows, stream.batch, True))  # where it does not say what is wrong
    return <const npy_intp *> PyArray_BYTES(<ndarray> stream.numbers)


cdef void copy_these(
    char *table, char *rows, const npy_intp *numbers, Py_ssize_t n, size_t size, bint back
) noexcept nogil:
    """n rows of so many bytes out of a table of all of them, or back."""
    cdef Py_ssize_t k
    cdef size_t at
    cdef char *row
    for k in range(n):
        if numbers is not NULL and k + ROWS_AHEAD < n:
            row, at = table + numbers[k + ROWS_AHEAD] * size, 0
            while at < size:
                fetch_line(row + at)
                at += LINE
        row = table + (k if numbers is NULL else numbers[k]) * size
        if back:
            memcpy(row, rows + k * size, size)
        else:
            memcpy(rows + k * size, row, size)


cdef void copy_rows(ndarray table, ndarray rows, const npy_intp *numbers, Py_ssize_t n, bint back) noexcept:
    cdef size_t size = PyArray_NBYTES(table) // PyArray_DIMS(table)[0]
    cdef char *all_rows = PyArray_BYTES(table)
    cdef char *these = PyArray_BYTES(rows)
    if n * size < LARGE:
        copy_these(all_rows, these, numbers, n, size, back)
    else:
        with nogil:
            copy_these(all_rows, these, numbers, n, size, back)


cdef void copy_states(tuple streams, const npy_intp *numbers, Py_ssize_t n, bint back) noexcept:
    """n rows of all states to where the next ones are computed, or back."""
    cdef Py_ssize_t k, i
    cdef Stream stream
    for k in range(len(streams)):
        stream = streams[k]
        for i in range(len(stream.states)):
            copy_rows(stream.states[i], stream.following[i], numbers, n, back)


def advance(tuple streams, tuple between, x, out, int rank, rows, lengths, /):
    """x through all of them: a step where the rank is 2, else a block of steps.  `between` has room for the y of a step
    of each but the last."""
    cdef Py_ssize_t T = 1, end, n, k, top = len(streams) - 1
    cdef Stream stream = streams[0]
    cdef Stream last = streams[top]
    cdef const npy_intp *numbers = NULL
    cdef size_t written
    cdef bint some = rows is not None
    n = stream.batch
    if some:
        rows = read_rows(stream, rows)
        n = PyArray_DIMS(<ndarray> rows)[0]
    x = stream.input(x, rank, n, some)
    if rank == 3:
        T = PyArray_DIMS(<ndarray> x)[0]
    end, step_mask = T, None
    if lengths is not None:
        lengths = stream.cell._taken_lengths(lengths, T, n)
        end = longest(lengths)
        step_mask = step_mask_of(end, n, lengths, None, False)
    # Up to here code of the caller's may have run; from here on none does.
    out = last.output(x, out, rank, T, n)
    claim(streams)
    try:
        if some:
            numbers = numbers_of(stream, rows)
        if n > 0 and end > 0:
            if some:
                copy_states(streams, numbers, n, False)
            for k in range(top + 1):
                stream = streams[k]
                if k == top:
                    y = out
                elif rank == 2:
                    y = between[k]
                else:
                    y = empty((end, n, stream.outputs), stream.dtype)
                stream.compute(x, y, end, n, step_mask, some)
                x = y
            if some:
                copy_states(streams, numbers, n, True)
            else:
                for k in range(top + 1):
                    (<Stream> streams[k]).move_on()
            (<Stream> streams[0])._advances += 1
        if end < T:
            written = PyArray_NBYTES(<ndarray> out) // T * end
            memset(PyArray_BYTES(<ndarray> out) + written, 0, PyArray_NBYTES(<ndarray> out) - written)
    finally:
        release(streams, top + 1)
    return out


cdef Py_ssize_t longest(ndarray lengths) noexcept:
    cdef const int64_t *length = <const int64_t *> PyArray_BYTES(lengths)
    cdef Py_ssize_t b, most = 0
    for b in range(PyArray_DIMS(lengths)[0]):
        most = max(most, <Py_ssize_t> length[b])
    return most


def copies(tuple streams, rows):
    """The states of these rows of all, one array after the other."""
    cdef Stream stream = streams[0]
    cdef const npy_intp *numbers
    cdef Py_ssize_t k, n
    cdef ndarray state
    cdef list arrays = []
    rows = read_rows(stream, rows)
    n = stream.batch if rows is None else PyArray_DIMS(<ndarray> rows)[0]
    claim(streams)
    try:
        numbers = numbers_of(streams[0], rows)
        for k in range(len(streams)):
            stream = streams[k]
            for state in stream.states:
                array = numpy.empty((n, PyArray_DIMS(state)[1]), stream.dtype)
                copy_rows(state, array, numbers, n, False)
                arrays.append(array)
    finally:
        release(streams, len(streams))
    return arrays


def put(tuple streams, rows, state_arrays, value):
    """The states of these rows of all become what the function reads of a user's value for so many rows, one array
    after the other."""
    cdef Stream stream = streams[0]
    cdef const npy_intp *numbers
    cdef Py_ssize_t k, n, at = 0
    cdef ndarray state
    cdef list arrays
    rows = read_rows(stream, rows)
    n = stream.batch if rows is None else PyArray_DIMS(<ndarray> rows)[0]
    arrays = state_arrays(value, n)
    claim(streams)
    try:
        numbers = numbers_of(streams[0], rows)
        for k in range(len(streams)):
            for state in (<Stream> streams[k]).states:
                copy_rows(state, arrays[at], numbers, n, True)
                at += 1
    finally:
        release(streams, len(streams))


def reset(tuple streams, rows):
    """These rows of all states become zero, or all where none are given."""
    cdef Stream stream = streams[0]
    cdef Py_ssize_t k, i, n = stream.batch
    cdef const npy_intp *numbers = NULL
    cdef npy_intp size
    cdef ndarray state
    if rows is not None:
        rows = read_rows(stream, rows, False)
        n, numbers = PyArray_DIMS(<ndarray> rows)[0], <const npy_intp *> PyArray_BYTES(<ndarray> rows)
    claim(streams)
    for k in range(len(streams)):
        for state in (<Stream> streams[k]).states:
            size = PyArray_NBYTES(state) // PyArray_DIMS(state)[0]
            for i in range(n):
                memset(PyArray_BYTES(state) + (i if numbers is NULL else numbers[i]) * size, 0, size)
    release(streams, len(streams))


def grow(tuple streams, Py_ssize_t batch):
    """All get more rows, whose states are zero."""
    cdef Py_ssize_t k, i
    cdef Stream stream
    cdef list grown = []
    claim(streams)
    try:
        for k in range(len(streams)):
            stream = streams[k]
            states, following = stream.zeros(batch), stream.zeros(batch)
            for i in range(len(stream.states)):
                copy_rows(states[i], stream.states[i], NULL, stream.batch, True)
            grown.append((states, following))
        for k in range(len(streams)):
            stream = streams[k]
            stream.states, stream.following = grown[k]
            stream.batch, stream.numbers = batch, None
            stream.point()
    finally:
        release(streams, len(streams))


def refresh(tuple streams, dict weights):
    """The weights of all become what they are now."""
    cdef Py_ssize_t k
    cdef Stream stream
    claim(streams)
    try:
        for k in range(len(streams)):
            stream = streams[k]
            stream.use(weights[stream.cell])
    finally:
        release(streams, len(streams))
