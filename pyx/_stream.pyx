"""A layer that runs on, step by step: its packed weights and its states stay where the kernel works."""
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
)
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_GetPointer

import numpy

from panels cimport stride_of

cdef object empty = numpy.empty, ndarray = numpy.ndarray

ctypedef void (*Run)(const void *plan, void *work, const void *x, void *y) noexcept nogil

cdef enum:
    SHORT = 1 << 15  # weights, above which a step leaves other Python threads running


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
        run, plan, size = self.layer._stream_kernel(self.weights, T, self.batch)
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
        cdef Py_buffer x_view, y_view
        cdef const void *p = PyBytes_AS_STRING(plan)
        if not self.look(x, &x_view, rank, T, self.I, False):
            x = self.taken("x", x, (T, self.batch, self.I)[3 - rank :])
            self.look(x, &x_view, rank, T, self.I, False)
        try:
            if out is None:
                out = empty((T, self.batch, self.H)[3 - rank :], self.dtype)
            if not self.look(out, &y_view, rank, T, self.H, True):
                self.refuse(out, (T, self.batch, self.H)[3 - rank :])
            if <char *> x_view.buf < <char *> y_view.buf + y_view.len and (
                <char *> y_view.buf < <char *> x_view.buf + x_view.len
            ):
                PyBuffer_Release(&y_view)
                raise ValueError(f"{type(self.layer).__name__}.stream: out overlaps x; give it memory of its own")
            if self.H > 0 and self.short and T == 1:
                self.kernel(p, self.work, x_view.buf, y_view.buf)
            elif self.H > 0:
                with nogil:
                    self.kernel(p, self.work, x_view.buf, y_view.buf)
            PyBuffer_Release(&y_view)
        finally:
            PyBuffer_Release(&x_view)
        return out

    cdef bint look(self, array, Py_buffer *view, int rank, Py_ssize_t T, Py_ssize_t width, bint write) except -1:
        """Whether it is an array that the kernel can take as it is; its buffer is open then."""
        if type(array) is not ndarray:
            return False
        try:
            PyObject_GetBuffer(array, view, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if write else 0))
        except Exception:  # read-only, or a dtype that has no buffer
            return False
        if (
            view.ndim == rank
            and view.format[0] == self.format
            and view.format[1] == 0
            and view.shape[rank - 1] == width
            and view.shape[rank - 2] == self.batch
            and (rank == 2 or view.shape[0] == T)
            and <size_t> view.buf % <size_t> view.itemsize == 0
            and PyBuffer_IsContiguous(view, b"C")
        ):
            return True
        PyBuffer_Release(view)
        return False

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
        if len(value) != len(names):
            raise ValueError(f"state has {len(value)} arrays; expected {', '.join(names)}")
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
