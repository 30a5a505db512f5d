"""Streams: a layer, or layers one above the other, step by step.

A stack has a stream for each of its layers.  Functions at the end of the file take such a tuple of streams, the lowest
one first, and change all of them or none.

Letters: T time, B batch, I input, H cell; n is the number of rows that advance, of which each has a number from 0 to
B - 1; k is the position of a stream, a state or a row.
"""
from libc.string cimport memcpy, memset
from numpy cimport (
    NPY_INTP, PyArray_BYTES, PyArray_DIMS, PyArray_ISWRITEABLE, PyArray_NBYTES, import_array, ndarray, npy_intp
)

import sys

import numpy

from blockcell._args import empty
from blockcell._layers import step_mask_of
from blockcell.argument_reader import ArgumentReader

from blockcell._layers cimport KernelPlan, is_shaped, longest_length, packed_address, plan_for
from numpy_arrays cimport is_plain, overlap
from passes.arrays cimport Pass
from passes.indices cimport H_LAST, H_PREV, OUT_H, X

import_array()

cdef extern from *:
    """
    static inline int claim_flag(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }
    static inline void release_flag(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    #define prefetch_line(line) __builtin_prefetch(line)
    """
    bint claim_flag(int *flag)
    void release_flag(int *flag)
    void prefetch_line(const char *line) nogil

cdef enum:
    PLANS = 64  # that a stream keeps, as the number of rows may change from step to step
    LARGE = 1 << 16  # bytes of states, above which copying them leaves other Python threads running
    PREFETCHED_ROWS = 4  # of a table, while one is copied
    LINE = 64  # bytes of a cache line


cdef class Stream:
    """Steps of a layer, one after the other, with the state kept in between.

    `layer.stream(batch=1)` makes one.  One step costs little more than its arithmetic, and with ``out=`` allocates
    nothing; the results are bit-identical with those of one call of the layer over all steps.  A stream keeps the
    weights that the layer had when it was made, until `refresh`.  It may be pickled.

    Some rows may advance alone: `step` and `run` take `rows`, and a step of a few rows costs what it costs in a stream
    of so few.  The results of a row do not depend on the other rows.  `state_of` and `set_state` move rows to another
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
    cdef readonly Py_ssize_t _advances  # how often steps have changed the states; counted in the lowest stream alone
    cdef object leaf  # the layer with the weights: `layer`, or the copy that a Quantized has of it
    cdef object dtype
    cdef object weights  # the LeafWeights that the layer had at the last refresh
    cdef list plans  # the last KernelPlans, each at an index by its sizes
    cdef char *packed  # the address of the packed weights
    cdef int format  # how the matrices of weights are quantized
    cdef list states, next_states  # arrays [B,H] or [B,P]: the current ones, and those that a step writes
    cdef Pass call  # of the kernel, for the claimer; what `compute` does not set is NULL
    cdef object row_numbers  # intp [B], once a call has named rows: the numbers of these rows
    cdef object is_named  # uint8 [B], then: scratch of `set_row_numbers`, zero between calls
    cdef Py_ssize_t input_size, output_size
    cdef Py_ssize_t scratch_size  # bytes
    cdef object scratch  # uint8, the kernel's
    cdef int type_number, in_use

    def __init__(self, layer, batch=1):
        if batch < 1:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected at least 1")
        width = layer.input_size + max(layer.hidden_size, layer.output_size)
        if batch * (width + 1) * layer.dtype.itemsize > sys.maxsize:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected fewer rows, that memory holds")
        self.layer, self.leaf, self.batch = layer, layer, batch
        self.input_size, self.output_size, self.dtype = layer.input_size, layer.output_size, layer.dtype
        self.type_number = self.dtype.num
        self.scratch, self.scratch_size, self.plans = None, 0, [None] * PLANS
        self.states, self.next_states = self.zero_states(batch), self.zero_states(batch)
        self.call.has_layouts = True
        self.refresh()

    cdef list zero_states(self, Py_ssize_t batch):
        """Return the arrays of a state of zeros."""
        cdef list arrays = []  # by a loop: Cython's list comprehensions free an item twice where the list cannot grow
        for size in self.leaf._state_sizes:
            array = numpy.zeros((batch, size), self.dtype)
            arrays.append(array)
        return arrays

    # ------------------------------------------------------------------------------------------------------------ steps
    def step(self, x, out=None, *, rows=None):
        """Run one step, of all rows or of some.

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
        """Run T steps, as `step` does one, with `x` [T,B,I] and h [T,B,H].

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

    cdef read_x(self, x, int rank, Py_ssize_t n, bint names_rows):
        """Return a user's x of n rows, [n,I] or for a rank of 3 [T,n,I], as the kernel takes it.

        names_rows : whether n is the number of rows that the user has named
        """
        if is_shaped(x, self.type_number, rank, -1, n, self.input_size):
            return x
        reason = ", by the number of rows" if names_rows else ""
        return self.leaf._read_stream_array("x", x, (None, n, self.input_size)[3 - rank :], reason)

    cdef read_out(self, x, out, int rank, Py_ssize_t T, Py_ssize_t n):
        """Return the array for the results of n rows: a user's `out`, which must not overlap x; for None a new one."""
        if out is None:
            return empty((T, n, self.output_size)[3 - rank :], self.dtype)
        if (
            not is_shaped(out, self.type_number, rank, T, n, self.output_size)
            or not PyArray_ISWRITEABLE(<ndarray> out)
        ):
            shape = (T, n, self.output_size)[3 - rank :]
            description = f"{out.dtype} {out.shape}" if type(out) is ndarray else type(out).__name__
            expected = f"expected a writeable C-contiguous {self.dtype} array of shape {shape}"
            message = f"{type(self.leaf).__name__}.stream: out is {description}; {expected}"
            raise (ValueError if type(out) is ndarray and out.dtype == self.dtype else TypeError)(message)
        if overlap(x, out):
            raise ValueError(f"{type(self.leaf).__name__}.stream: out overlaps x; give it memory of its own")
        return out

    cdef compute(self, x, y, Py_ssize_t T, Py_ssize_t n, step_mask, bint in_place):
        """Run the kernel for T steps.

        Parameters
        ----------
        x, y : ndarray (T, n, I) and (T, n, output_size), or without T
            C-contiguous; y is written.
        step_mask : ndarray (T, n) of uint8 or None
        in_place : bool
            Whether the initial states are the first n rows of the next states, too; otherwise they are the current
            states, which the next ones have to replace.  In place is possible as a kernel reads all states before it
            writes any.
        """
        cdef KernelPlan last_plan, plan
        cdef Pass *a = &self.call
        cdef list initial = self.next_states if in_place else self.states
        cdef Py_ssize_t index = (n + 7 * T) % PLANS, last = len(initial) - 1, k
        if self.output_size == 0:
            return
        last_plan = <KernelPlan> self.plans[index]
        plan = plan_for(last_plan, self.leaf, "forward", self.format, T, n)
        if plan is not last_plan:
            self.plans[index] = plan
        if plan.size > self.scratch_size:
            self.scratch = numpy.empty(plan.size, numpy.uint8)
            self.scratch_size = plan.size
        a.inputs[X], a.outputs[OUT_H], a.packed = PyArray_BYTES(<ndarray> x), PyArray_BYTES(<ndarray> y), self.packed
        a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
        for k in range(last + 1):  # the kernels have h first
            a.inputs[H_PREV + last - k] = PyArray_BYTES(<ndarray> initial[k])
            a.outputs[H_LAST + last - k] = PyArray_BYTES(<ndarray> self.next_states[k])
        a.x_layout.step, a.x_layout.row = n * self.input_size, self.input_size
        a.y_layout.step, a.y_layout.row = n * self.output_size, self.output_size
        plan.execute(PyArray_BYTES(<ndarray> self.scratch), a)

    # ---------------------------------------------------------------------------------------------- states and weights
    @property
    def state(self):
        return self.state_of(None)

    @state.setter
    def state(self, value):
        self.set_state(None, value)

    def state_of(self, rows):
        """Return a copy of the states of some rows, which `set_state` of any stream of such a layer takes.

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
        return self._state_from(iter(copy_states((self,), rows)))

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
        set_states((self,), rows, self._state_arrays, states)

    def _state_arrays(self, value, n):
        """Return the arrays of a user's state of n rows."""
        return self.leaf._read_stream_state(value, n)

    def _state_from(self, arrays):
        """Return a state of the next arrays of an iterator."""
        cdef list state = []
        for _ in range(len(self.states)):
            state.append(next(arrays))
        return self.leaf._state._make(state)

    def reset(self, rows=None):
        """Set the states of all rows or of some to zero.

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
        refresh((self,), self.leaf._shared.weights)

    cdef void use_weights(self, weights):
        """Take over weights, a LeafWeights."""
        self.weights, self.packed, self.format = weights, packed_address(weights.packed), weights.format

    def _grow(self, batch):
        """Add rows whose states are zero, up to `batch` of them."""
        grow((self,), batch)

    # ---------------------------------------------------------------------------------------------------------- pickles
    def _belong_to(self, quantized):
        """Make the stream that of a `Quantized`; return it."""
        self.layer = quantized
        return self

    def _in_use(self):
        """Return a layer with the weights that the stream uses, which its own layer may have replaced."""
        return self.layer if self.layer is not self.leaf else self.leaf._with_weights(self.weights)

    def __reduce__(self):
        return restored, (self._in_use(), self.batch, self.state)

    def __repr__(self):
        return f"<Stream of {self.layer!r}, batch={self.batch}>"


def restored(layer, batch, state):
    """Return a stream from its pickle, which has this function's name."""
    stream = layer.stream(batch)
    stream.state = state
    return stream


# ------------------------------------------------------------------------------------------- the streams of a stack
cdef claim(tuple streams):
    """Claim all streams for the caller alone, until `release`; raise a RuntimeError if one is in use."""
    cdef Py_ssize_t k
    cdef Stream stream
    for k in range(len(streams)):
        stream = streams[k]
        if not claim_flag(&stream.in_use):
            release(streams, k)
            raise RuntimeError(
                f"{type(stream.leaf).__name__}.stream: the stream is in use; it is for one thread at a time"
            )


cdef void release(tuple streams, Py_ssize_t count) noexcept:
    """Release the first `count` streams."""
    cdef Py_ssize_t k
    for k in range(count):
        release_flag(&(<Stream> streams[k]).in_use)


cdef read_rows(Stream stream, rows, bint once=True):
    """Return the rows that a user names as an array of intp, or None for all rows.  May run code of the user's.

    An array of intp is returned as it is, if each row is to be named `once`: `row_numbers_of` looks at its values.
    """
    if rows is None or (once and is_plain(rows, NPY_INTP, 1)):
        return rows
    return reader_of(stream).rows(rows, stream.batch, once)


cdef reader_of(Stream stream):
    """Return the reader of arguments whose messages name the stream."""
    return ArgumentReader(f"{type(stream.leaf).__name__}.stream")


cdef bint set_row_numbers(Stream stream, ndarray rows) noexcept:
    """Copy the numbers of rows, counted from 0, to where no other thread changes them.

    Returns whether there are such rows, and each is named once.
    """
    cdef const npy_intp *indices = <const npy_intp *> PyArray_BYTES(rows)
    cdef npy_intp *numbers = <npy_intp *> PyArray_BYTES(<ndarray> stream.row_numbers)
    cdef char *is_named = PyArray_BYTES(<ndarray> stream.is_named)
    cdef Py_ssize_t n = PyArray_DIMS(rows)[0], count = 0, k, row
    while count < n:
        row = indices[count]
        if row < 0:
            row += stream.batch
        if row < 0 or row >= stream.batch or is_named[row]:
            break
        is_named[row] = True
        numbers[count] = row
        count += 1
    for k in range(count):
        is_named[numbers[k]] = False
    return count == n


cdef const npy_intp *row_numbers_of(Stream stream, rows) except? NULL:
    """Return the numbers of the rows that `read_rows` gave; NULL for all rows.

    They are the stream's, which the caller has claimed, and stay until it releases it.
    """
    if rows is None:
        return NULL
    if stream.row_numbers is None:
        row_numbers = numpy.empty(stream.batch, numpy.intp)
        stream.is_named = numpy.zeros(stream.batch, numpy.uint8)
        stream.row_numbers = row_numbers
    if not set_row_numbers(stream, rows):  # the reader says what is wrong, unless another thread has changed `rows`
        set_row_numbers(stream, reader_of(stream).rows(rows, stream.batch, True))
    return <const npy_intp *> PyArray_BYTES(<ndarray> stream.row_numbers)


cdef void copy_row_bytes(
    char *table, char *rows, const npy_intp *numbers, Py_ssize_t n, size_t size, bint to_table
) noexcept nogil:
    """Copy n rows of `size` bytes each from a table to `rows`, or from there `to_table`.

    numbers : [n], the rows of the table; NULL for the first n
    """
    cdef Py_ssize_t k
    cdef size_t offset
    cdef char *row
    for k in range(n):
        if numbers is not NULL and k + PREFETCHED_ROWS < n:
            row, offset = table + numbers[k + PREFETCHED_ROWS] * size, 0
            while offset < size:
                prefetch_line(row + offset)
                offset += LINE
        row = table + (k if numbers is NULL else numbers[k]) * size
        if to_table:
            memcpy(row, rows + k * size, size)
        else:
            memcpy(rows + k * size, row, size)


cdef void copy_rows(ndarray table, ndarray rows, const npy_intp *numbers, Py_ssize_t n, bint to_table) noexcept:
    """Copy n rows from a table to the first rows of `rows`, or from there `to_table`.

    numbers : [n], the rows of the table; NULL for the first n
    """
    cdef size_t size = PyArray_NBYTES(table) // PyArray_DIMS(table)[0]
    cdef char *table_data = PyArray_BYTES(table)
    cdef char *rows_data = PyArray_BYTES(rows)
    if n * size < LARGE:
        copy_row_bytes(table_data, rows_data, numbers, n, size, to_table)
    else:
        with nogil:
            copy_row_bytes(table_data, rows_data, numbers, n, size, to_table)


cdef void copy_named_rows(tuple streams, const npy_intp *numbers, Py_ssize_t n, bint to_states) noexcept:
    """Copy n rows of all states to the first rows of the next states, or from there `to_states`.

    numbers : [n], the rows of the states
    """
    cdef Py_ssize_t k, i
    cdef Stream stream
    for k in range(len(streams)):
        stream = streams[k]
        for i in range(len(stream.states)):
            copy_rows(stream.states[i], stream.next_states[i], numbers, n, to_states)


def advance(tuple streams, tuple between, x, out, int rank, rows, lengths, /):
    """Run x through all streams: one step, or T steps.

    Parameters
    ----------
    streams : tuple of Stream
    between : tuple of ndarray (B, output_size)
        Memory for y of a step of each stream but the last.
    x, out, rows, lengths
        Of the user, as of `Stream.step` and `Stream.run`.
    rank : {2, 3}
        Of x: 2 for a step, 3 for T steps.

    Returns
    -------
    ndarray
        `out`, or a new array.
    """
    cdef Py_ssize_t T = 1, step_count, n, k, top = len(streams) - 1
    cdef Stream stream = streams[0]
    cdef Stream top_stream = streams[top]
    cdef const npy_intp *numbers = NULL
    cdef size_t written
    cdef bint names_rows = rows is not None
    n = stream.batch
    if names_rows:
        rows = read_rows(stream, rows)
        n = PyArray_DIMS(<ndarray> rows)[0]
    x = stream.read_x(x, rank, n, names_rows)
    if rank == 3:
        T = PyArray_DIMS(<ndarray> x)[0]
    step_count, step_mask = T, None
    if lengths is not None:
        lengths = stream.leaf._read_stream_lengths(lengths, T, n)
        step_count = longest_length(lengths)
        step_mask = step_mask_of(step_count, n, lengths, None, False)
    # Up to here code of the user's may have run; from here on none does.
    out = top_stream.read_out(x, out, rank, T, n)
    claim(streams)
    try:
        if names_rows:
            numbers = row_numbers_of(stream, rows)
        if n > 0 and step_count > 0:
            if names_rows:
                copy_named_rows(streams, numbers, n, False)
            for k in range(top + 1):
                stream = streams[k]
                if k == top:
                    y = out
                elif rank == 2:
                    y = between[k]
                else:
                    y = empty((step_count, n, stream.output_size), stream.dtype)
                stream.compute(x, y, step_count, n, step_mask, names_rows)
                x = y
            if names_rows:
                copy_named_rows(streams, numbers, n, True)
            else:
                for k in range(top + 1):
                    stream = streams[k]
                    stream.states, stream.next_states = stream.next_states, stream.states
            (<Stream> streams[0])._advances += 1
        if step_count < T:
            written = PyArray_NBYTES(<ndarray> out) // T * step_count
            memset(PyArray_BYTES(<ndarray> out) + written, 0, PyArray_NBYTES(<ndarray> out) - written)
    finally:
        release(streams, top + 1)
    return out


def copy_states(tuple streams, rows):
    """Return copies of some rows of the states of all streams, one array after the other.

    rows : of the user, as of `Stream.state_of`
    """
    cdef Stream stream = streams[0]
    cdef list arrays = []
    rows = read_rows(stream, rows)
    n = stream.batch if rows is None else len(rows)
    for stream in streams:
        for size in stream.leaf._state_sizes:
            array = numpy.empty((n, size), stream.dtype)
            arrays.append(array)
    exchange_states(streams, rows, arrays, False)
    return arrays


def set_states(tuple streams, rows, state_arrays, value):
    """Set some rows of the states of all streams.

    Parameters
    ----------
    streams : tuple of Stream
    rows
        Of the user, as of `Stream.set_state`.
    state_arrays : callable
        Returns for `value` and the number of rows an array for each state of each stream, in this order.
    value
        The user's state.
    """
    cdef Stream stream = streams[0]
    rows = read_rows(stream, rows)
    exchange_states(streams, rows, state_arrays(value, stream.batch if rows is None else len(rows)), True)


cdef exchange_states(tuple streams, rows, list arrays, bint to_states):
    """Copy the rows that `read_rows` gave of the states of all streams to arrays, or from these `to_states`.

    arrays : an array for each state of each stream
    """
    cdef const npy_intp *numbers
    cdef Stream stream
    cdef ndarray state
    cdef Py_ssize_t k = 0
    claim(streams)
    try:
        numbers = row_numbers_of(streams[0], rows)
        for stream in streams:
            for state in stream.states:
                copy_rows(state, arrays[k], numbers, PyArray_DIMS(<ndarray> arrays[k])[0], to_states)
                k += 1
    finally:
        release(streams, len(streams))


def reset(tuple streams, rows):
    """Set some rows of the states of all streams to zero; all rows for None."""
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
    """Add rows whose states are zero to all streams, up to `batch` of them."""
    cdef Py_ssize_t k, i
    cdef Stream stream
    cdef list grown = []
    claim(streams)
    try:
        for k in range(len(streams)):
            stream = streams[k]
            states, next_states = stream.zero_states(batch), stream.zero_states(batch)
            for i in range(len(stream.states)):
                copy_rows(states[i], stream.states[i], NULL, stream.batch, True)
            grown.append((states, next_states))
        for k in range(len(streams)):
            stream = streams[k]
            stream.states, stream.next_states = grown[k]
            stream.batch, stream.row_numbers = batch, None
    finally:
        release(streams, len(streams))


def refresh(tuple streams, dict weights):
    """Take over weights in all streams at once.

    weights : the LeafWeights of each layer
    """
    cdef Py_ssize_t k
    cdef Stream stream
    claim(streams)
    try:
        for k in range(len(streams)):
            stream = streams[k]
            stream.use_weights(weights[stream.leaf])
    finally:
        release(streams, len(streams))
