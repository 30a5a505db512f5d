"""Streams: a layer, or layers one above the other, step by step."""
from libc.string cimport memcpy, memset
from numpy cimport PyArray_BYTES, PyArray_DIMS, PyArray_ISWRITEABLE, PyArray_NBYTES, import_array, ndarray, npy_intp

import sys

import numpy

from blockcell._args import empty
from blockcell._read import which

from blockcell._layers cimport Plan, address_of, is_shaped, plan_of
from arrays cimport overlap
from passes cimport STATES, Pass

import_array()

cdef extern from *:
    """
    static inline int claim_flag(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }
    static inline void release_flag(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    """
    bint claim_flag(int *flag)
    void release_flag(int *flag)


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
    activations : str
        To what x and h are rounded for products: "int8" or "int16"; "float32" for not at all.
    state : LSTMState, GRUState or the empty tuple
        [B,H] each, h of a projected LSTM [B,P]; a copy.  Assigning sets it.
    """

    cdef readonly object layer, storage, activations
    cdef readonly Py_ssize_t batch
    cdef object cell  # whose weights they are: the layer, or what a Packed has of it
    cdef object dtype, given, weights  # what the layer has, and what of it is read
    cdef Plan step_plan, block_plan
    cdef char *packed  # of the weights
    cdef int narrow  # how they are
    cdef list states, following  # arrays [B,H]: those of now, and where the next ones are computed
    cdef const void *first[STATES]  # where both are in memory
    cdef void *last[STATES]
    cdef Py_ssize_t inputs, outputs, room
    cdef object memory  # scratch, of so much room
    cdef int type_number, in_use

    def __init__(self, layer, batch=1, storage=None, activations="float32"):
        if batch < 1:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected at least 1")
        width = layer.input_size + max(layer.hidden_size, layer.output_size)
        if batch * (width + 1) * layer.dtype.itemsize > sys.maxsize:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected fewer rows, that memory holds")
        self.layer, self.cell, self.batch, self.storage, self.activations = layer, layer, batch, storage, activations
        self.inputs, self.outputs, self.dtype = layer.input_size, layer.output_size, layer.dtype
        self.type_number = self.dtype.num
        self.memory, self.room = None, 0
        self.states, self.following = self.zeros(), self.zeros()
        self.point()
        self.refresh()

    cdef list zeros(self):
        cdef list arrays = []  # by a loop: Cython's list comprehensions free an item twice where the list cannot grow
        for size in self.cell._state_sizes:
            array = numpy.zeros((self.batch, size), self.dtype)
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
            [B,H], or [B,P] where y has that size, filled and returned: C-contiguous and writeable.  Then nothing is
            allocated.

        Returns
        -------
        ndarray
            h, in the form of `out`.

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
            return empty((T, self.batch, self.outputs)[3 - rank :], self.dtype)
        if (
            not is_shaped(out, self.type_number, rank, T, self.batch, self.outputs)
            or not PyArray_ISWRITEABLE(<ndarray> out)
        ):
            shape = (T, self.batch, self.outputs)[3 - rank :]
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
        cdef Pass a
        cdef int k
        if self.outputs == 0:
            return
        if T == 1:
            plan = self.step_plan = plan_of(self.step_plan, self.cell, "layer", self.narrow, 1, self.batch)
        else:
            plan = self.block_plan = plan_of(self.block_plan, self.cell, "layer", self.narrow, T, self.batch)
        if plan.size > self.room:
            self.memory = numpy.empty(plan.size, numpy.uint8)
            self.room = plan.size
        a.x, a.y, a.packed = PyArray_BYTES(<ndarray> x), PyArray_BYTES(<ndarray> y), self.packed
        a.saved, a.marks, a.reverse = NULL, NULL, False
        for k in range(STATES):
            a.first[k], a.last[k] = self.first[k], self.last[k]
        a.x_layout.step, a.x_layout.row = self.batch * self.inputs, self.inputs
        a.y_layout.step, a.y_layout.row = self.batch * self.outputs, self.outputs
        plan.execute(PyArray_BYTES(<ndarray> self.memory), &a)

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
        self.layer, self.storage, self.activations = packed, packed.storage, packed.activations
        return self

    def _in_use(self):
        """A layer with the weights that the stream works with, which its own layer may have replaced."""
        return self.cell._with(self.weights)

    def __reduce__(self):
        if self.layer is not self.cell:
            return restored, (self.layer, self.batch, self.state)
        return restored, (self._in_use(), self.batch, self.state, self.storage, self.activations)

    def __repr__(self):
        return shown(self.layer, self.batch, self.storage, self.activations, self.layer is not self.cell)


def restored(layer, batch, state, storage=None, activations="float32"):
    """A stream from its pickle."""
    stream = layer.stream(batch) if storage is None else layer.stream(batch, storage, activations)
    stream.state = state
    return stream


def shown(layer, batch, storage, activations, packed):
    """A stream's repr; a packed layer's says by itself how it is stored."""
    stored = "" if storage is None or packed else f", storage={storage!r}"
    rounded = "" if activations == "float32" or packed else f", activations={activations!r}"
    return f"<Stream of {layer!r}, batch={batch}{stored}{rounded}>"


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
                y = empty((T, stream.batch, stream.outputs), stream.dtype)
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
            if given is stream.given:
                read.append(stream.weights)
            else:
                read.append(stream.cell._streamed(given, stream.storage, stream.activations, stream.batch))
        for k in range(len(streams)):
            stream = streams[k]
            stream.given, stream.weights = weights[stream.cell], read[k]
            stream.packed, stream.narrow = address_of(read[k].packed), read[k].narrow
    finally:
        release(streams, len(streams))
