"""Layers without detours: one call on arrays that can be taken as they are, or step by step in a stream."""
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
)
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer

import numpy

from blockcell._args import empty
from blockcell._kernels import get_num_threads
from blockcell._read import short

from panels cimport stride_of

cdef object ndarray = numpy.ndarray

# From the states in `first` (NULL: zeros) to those in `last`; where that is NULL, they are in `work` and stay there.
ctypedef void (*Run)(
    const void *plan, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil

cdef enum:
    SHORT = 1 << 15  # multiplications, above which a call leaves other Python threads running
    STATES = 2  # at most


cdef char *data_of(
    array, char format, int rank, Py_ssize_t *T, Py_ssize_t *B, Py_ssize_t width, bint write
) except? NULL:
    """Where the numbers of an array begin that a kernel can take as it is, or NULL.  Its shape is (B, width), or for a
    rank of 3 (T, B, width); a negative T or B becomes what the array has."""
    cdef Py_buffer view
    cdef char *data = NULL
    if type(array) is not ndarray:
        return NULL
    try:
        PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if write else 0))
    except Exception:  # read-only, or a dtype that has no buffer
        return NULL
    if (
        view.ndim == rank
        and view.format[0] == format
        and view.format[1] == 0
        and view.shape[rank - 1] == width
        and (B[0] < 0 or view.shape[rank - 2] == B[0])
        and (rank == 2 or T[0] < 0 or view.shape[0] == T[0])
        and <size_t> view.buf % <size_t> view.itemsize == 0
        and PyBuffer_IsContiguous(&view, b"C")
    ):
        data = <char *> view.buf
        B[0] = view.shape[rank - 2]
        if rank == 3:
            T[0] = view.shape[0]
    PyBuffer_Release(&view)
    return data


cdef class Runner:
    """Calls of a layer of one cell, of which nothing is kept but what the next call of the same sizes can use."""

    cdef Py_ssize_t I, H
    cdef object dtype
    cdef char format
    cdef type state
    cdef int states
    cdef tuple prepared  # weights, T, B, threads; the kernel, its plan, and how many bytes of scratch it needs

    def __init__(self, layer):
        self.I, self.H, self.dtype = layer.input_size, layer.hidden_size, layer.dtype
        self.format = ord(self.dtype.char)
        self.state, self.states = layer._state, len(layer._state._fields)

    def call(self, layer, weights, threads, x, state):
        """What ``layer(x, state)`` returns, or None where something has to be converted, or explained."""
        cdef Py_ssize_t T = -1, B = -1, size
        cdef int k
        cdef const void *first[STATES]
        cdef void *last[STATES]
        cdef const void *x_data = data_of(x, self.format, 3, &T, &B, self.I, False)
        cdef const void *p
        cdef void *y_data
        cdef char *work
        cdef Run run
        if x_data is NULL or T == 0 or B == 0 or self.H == 0 or (state is not None and type(state) is not self.state):
            return None
        for k in range(self.states):
            first[k] = NULL
            if state is not None:
                first[k] = data_of(state[k], self.format, 2, &T, &B, self.H, False)
                if first[k] is NULL:
                    return None
        prepared = self.prepared
        if prepared is None or prepared[0] is not weights or prepared[1:4] != (T, B, threads):
            prepared = self.prepared = weights, T, B, threads, *layer._stream_kernel(weights, T, B, threads)
        run, plan, size = <Run> PyCapsule_GetPointer(prepared[4], NULL), prepared[5], prepared[6]
        p = PyBytes_AS_STRING(plan)
        y = empty((T, B, self.H), self.dtype)
        y_data = data_of(y, self.format, 3, &T, &B, self.H, True)
        after = []
        for k in range(self.states):
            after.append(empty((B, self.H), self.dtype))
            last[k] = data_of(after[k], self.format, 2, &T, &B, self.H, True)
        work = <char *> PyMem_RawMalloc(size)
        if work is NULL:
            raise MemoryError()
        if T * B * (self.I + self.H) * self.H < SHORT:
            run(p, work + (-<Py_ssize_t> work & 63), x_data, y_data, first, last)
        else:
            with nogil:
                run(p, work + (-<Py_ssize_t> work & 63), x_data, y_data, first, last)
        PyMem_RawFree(work)
        return y, tuple.__new__(self.state, after)


cdef class Stream:
    """Steps of a recurrent layer, one after the other, with the state kept in between.

    Made by `layer.stream(batch=1)`.  One step costs little more than its arithmetic, and with ``out=`` allocates
    nothing; the results have the bits of one call of the layer over all steps.  A stream keeps the weights that the
    layer had when it was made, until `refresh`.  It may be pickled, and is to be used by one thread at a time.

    Attributes
    ----------
    layer : LSTM or GRU
    batch : int
        B, the rows that run side by side.
    state : LSTMState or GRUState
        [B,H] each; a copy.  Assigning sets it.
    """

    cdef readonly object layer
    cdef readonly Py_ssize_t batch
    cdef object dtype, weights, memory, plan, block_plan, states
    cdef Py_ssize_t I, H, block_steps
    cdef char format
    cdef Run kernel
    cdef char *work
    cdef bint short

    def __init__(self, layer, batch=1):
        if batch < 1:
            raise ValueError(f"{type(layer).__name__}.stream: batch is {batch}; expected at least 1")
        self.layer, self.batch = layer, batch
        self.I, self.H, self.dtype = layer.input_size, layer.hidden_size, layer.dtype
        self.format = ord(self.dtype.char)
        self.short = self.batch * (self.I + self.H) * self.H < SHORT
        self.memory = None
        self.refresh()

    def refresh(self):
        """Take over the weights that the layer has now; the state stays."""
        self.weights = self.layer._current
        self.plan, self.block_steps = self.prepared(1), 0

    cdef prepared(self, Py_ssize_t T):
        """The kernel's plan for T steps, and scratch that is large enough for it."""
        run, plan, size = self.layer._stream_kernel(self.weights, T, self.batch, get_num_threads())
        self.kernel = <Run> PyCapsule_GetPointer(run, NULL)
        if self.memory is None or self.memory.size < size:
            self.reserve(size)
        return plan

    cdef reserve(self, Py_ssize_t size):
        """New scratch, with the states at its front as the kernels have them."""
        cdef unsigned char[::1] view
        cdef Py_ssize_t at, stride
        real = numpy.dtype(numpy.float64 if self.format == b"d" else numpy.float32)
        stride = stride_of(self.H, 64 // real.itemsize)
        view = self.memory = memory = numpy.zeros(size, numpy.uint8)
        at = -<Py_ssize_t> &view[0] & 63
        self.work = <char *> &view[at]
        rows = memory[at : at + 3 * self.batch * stride * real.itemsize].view(real).reshape(3, self.batch, stride)
        before, self.states = self.states, (rows[2], rows[0]) if "cs" in self.layer._state._fields else (rows[0],)
        for old, new in zip(before or (), self.states):
            new[:] = old

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
        """
        return self.advance(x, out, self.plan, 2, 1)

    def run(self, x, out=None):
        """T steps: as `step`, with `x` [T,B,I] and h [T,B,H]."""
        if type(x) is not ndarray or x.ndim != 3:
            x = self.taken("x", x, (None, self.batch, self.I))
        cdef Py_ssize_t T = x.shape[0]
        if T == 0:
            return empty((0, self.batch, self.H), self.dtype) if out is None else out
        if T != self.block_steps:
            self.block_plan = self.prepared(T)
            self.block_steps = T
        return self.advance(x, out, self.block_plan, 3, T)

    cdef advance(self, x, out, plan, int rank, Py_ssize_t T):
        cdef Py_ssize_t itemsize = self.dtype.itemsize
        cdef const void *p = PyBytes_AS_STRING(plan)
        cdef char *x_data = data_of(x, self.format, rank, &T, &self.batch, self.I, False)
        cdef char *y_data
        if x_data is NULL:
            x = self.taken("x", x, (T, self.batch, self.I)[3 - rank :])
            x_data = data_of(x, self.format, rank, &T, &self.batch, self.I, False)
        if out is None:
            out = empty((T, self.batch, self.H)[3 - rank :], self.dtype)
        y_data = data_of(out, self.format, rank, &T, &self.batch, self.H, True)
        if y_data is NULL:
            self.refuse(out, (T, self.batch, self.H)[3 - rank :])
        if (
            x_data < y_data + T * self.batch * self.H * itemsize
            and y_data < x_data + T * self.batch * self.I * itemsize
        ):
            raise ValueError(f"{type(self.layer).__name__}.stream: out overlaps x; give it memory of its own")
        if self.H > 0 and self.short and T == 1:
            self.kernel(p, self.work, x_data, y_data, NULL, NULL)
        elif self.H > 0:
            with nogil:
                self.kernel(p, self.work, x_data, y_data, NULL, NULL)
        return out

    def taken(self, name, value, shape):
        """An array-like as an array that the kernel can take; None in `shape` fits any length."""
        expected = "(" + ", ".join(["T" if size is None else str(size) for size in shape]) + ")"
        return self.layer._taken(name, value, shape, expected)

    def refuse(self, out, shape):
        found = f"{out.dtype} {out.shape}" if type(out) is ndarray else type(out).__name__
        expected = f"expected a writeable C-contiguous {self.dtype} array of shape {shape}"
        message = f"{type(self.layer).__name__}.stream: out is {found}; {expected}"
        raise (ValueError if type(out) is ndarray and out.dtype == self.dtype else TypeError)(message)

    # ----------------------------------------------------------------------------------------------------------- states
    @property
    def state(self):
        return self.layer._state._make([rows[:, : self.H].astype(self.dtype) for rows in self.states])

    @state.setter
    def state(self, value):
        names = self.layer._state._fields
        what, expected = f"{type(self.layer).__name__}.stream: state", self.layer._state.__name__
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{what} is {short(value)}; expected {expected}({', '.join(names)})")
        if len(value) != len(names):
            raise ValueError(f"{what} has {len(value)} arrays; expected {', '.join(names)}")
        arrays = [self.taken(name, array, (self.batch, self.H)) for name, array in zip(names, value)]
        for rows, array in zip(self.states, arrays):
            rows[:, : self.H] = array

    def reset(self, rows=None):
        """Set the state to zero, of all rows or of those given.

        Parameters
        ----------
        rows : array_like of int or of bool, optional
            Indices of rows, or for every row whether it is meant.

        Raises
        ------
        ValueError
            There is no such row.
        """
        for state in self.states:
            try:
                state[slice(None) if rows is None else numpy.asarray(rows)] = 0
            except IndexError as error:
                raise ValueError(f"rows is {rows!r}; expected indices below batch = {self.batch}: {error}") from None

    # ---------------------------------------------------------------------------------------------------------- pickles
    def _in_use(self):
        """A layer with the weights that the stream works with, which its own layer may have replaced."""
        return self.layer._with(self.weights)

    def __reduce__(self):
        return restored, (self._in_use(), self.batch, self.state)

    def __repr__(self):
        return f"<Stream of {self.layer!r}, batch={self.batch}>"


def restored(layer, batch, state):
    """A stream from its pickle."""
    stream = layer.stream(batch)
    stream.state = state
    return stream
