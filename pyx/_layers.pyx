"""Passes of layers, forward and back.

There is one `Runner` for each layer, and that of a `Stack` or a `Bidirectional` has those of its parts.  `call` and
`differentiate` take a user's arguments where kernels can read them as they are.  What has to be converted, or
explained, they leave to `Layer` (blockcell/layers/base.py), which reads it and goes on with `run` and `run_back`: from
there on all passes are the same.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.string cimport memcpy, memset
from numpy cimport (
    NPY_CORDER, NPY_INT64, NPY_UINT8, PyArray_BYTES, PyArray_CopyInto, PyArray_DIMS, PyArray_IS_C_CONTIGUOUS,
    PyArray_ITEMSIZE, PyArray_NewCopy, PyArray_SimpleNew, PyArray_SIZE, PyArray_STRIDES, PyArray_SwapAxes,
    PyArray_ZEROS, import_array, int64_t, ndarray, npy_intp
)

from collections import namedtuple

import numpy

from blockcell._args import empty
from blockcell._team import NUMBER, RUN

from numpy_arrays cimport is_plain
from passes.arrays cimport STATES, WEIGHTS, LayerKernel, Pass
from passes.steps cimport FINISHED, INITIAL, RESET
from schedule.runs cimport Runs

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_GetPointer(NUMBER, "blockcell._team.NUMBER")
cdef Runs run_kernel = <Runs> PyCapsule_GetPointer(RUN, "blockcell._team.RUN")

cdef enum:
    SHORT = 1 << 15  # multiplications, above which a pass leaves other Python threads running
    SMALL = 1 << 17  # bytes, as in _args.pyx


# -------------------------------------------------------------------------------------------------------------- kernels
cdef struct Call:
    LayerKernel kernel
    const void *plan
    void *work
    const Pass *arrays
    bint brief


cdef long long call_kernel(void *context, int ready) except? -1:
    cdef const Call *c = <const Call *> context
    cdef long long lost
    if c.brief:
        return c.kernel(c.plan, ready, c.work, c.arrays)
    with nogil:
        lost = c.kernel(c.plan, ready, c.work, c.arrays)
    return lost


@cython.final
cdef class Plan:

    cdef execute(self, char *work, const Pass *a):
        """Run the kernel, with so much scratch, or new one where that is NULL."""
        cdef Call call
        cdef char *own = NULL
        if work is NULL:
            work = own = <char *> PyMem_RawMalloc(self.size)
            if own is NULL:
                raise MemoryError()
        call.kernel, call.plan, call.arrays, call.brief = self.kernel, PyBytes_AS_STRING(self.parameters), a, self.brief
        call.work = work + (-<size_t> work & 63)
        try:
            run_kernel(self.planned, call_kernel, &call)
        finally:
            PyMem_RawFree(own)


cdef Plan plan_from(tuple planned, int format, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int threads):
    """Make a plan from a tuple of `kernel_with_plan` (passes/arrays.pxd)."""
    cdef Plan plan = Plan.__new__(Plan)
    kernel, plan.parameters, plan.size, plan.planned, _ = planned
    plan.kernel = <LayerKernel> PyCapsule_GetPointer(kernel, NULL)
    plan.T, plan.B, plan.format, plan.threads = T, B, format, threads
    plan.brief = T * B * (I + H) * H < SHORT
    return plan


cdef bint is_for(Plan plan, int format, Py_ssize_t T, Py_ssize_t B, int threads) noexcept:
    return plan is not None and plan.T == T and plan.B == B and plan.threads == threads and plan.format == format


cdef Plan plan_of(Plan last, layer, task, int format, Py_ssize_t T, Py_ssize_t B, int threads=0):
    """Return the last plan where it is for the same call, or a new one for a task of `layer._plan`.  0 threads are as
    many as users have set."""
    threads = threads or number_of_threads[0]
    if is_for(last, format, T, B, threads):
        return last
    planned = layer._plan(task, format, T, B, threads)
    return plan_from(planned, format, T, B, layer.input_size, layer.hidden_size, threads)


def pack(tuple planned, ndarray packed, list weights, list matrices):
    """Pack a layer's weights, or copy quantized matrices back.

    Parameters
    ----------
    planned : tuple
        What `layer._plan` returns for the task "pack" or "unpack".
    packed : ndarray of uint8
        As many bytes as are planned.
    weights : list of ndarray or None
        The float weights to pack, C-contiguous, in the kernels' order.
    matrices : list of QuantizedMatrix or None
        The quantized matrices at their places in this order, C-contiguous; codes and scales are written by "unpack".
    """
    cdef Pass a
    cdef int k
    cdef Plan plan = plan_from(planned, 0, 1, 1, 0, 0, 1)
    plan.brief = PyArray_SIZE(packed) < SMALL
    for k, array in enumerate(weights):
        a.weights[k] = bytes_or_null(array)
    for k, matrix in enumerate(matrices):
        a.codes[k] = <unsigned char *> bytes_or_null(None if matrix is None else matrix.codes)
        a.scales[k] = <float *> bytes_or_null(None if matrix is None else matrix.scale)
    plan.execute(PyArray_BYTES(packed), &a)


# --------------------------------------------------------------------------------------------------------------- arrays
cdef void *bytes_or_null(array) except? NULL:
    """Return where an array's numbers begin; NULL where there is no array."""
    if array is None:
        return NULL
    assert PyArray_IS_C_CONTIGUOUS(<ndarray?> array)
    return PyArray_BYTES(<ndarray> array)


cdef char *address_of(object packed) noexcept:
    """Where a kernel finds packed weights."""
    cdef char *start = PyArray_BYTES(<ndarray> packed)
    return start + (-<size_t> start & 63)


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


cdef ndarray new(dtype, int type_number, int rank, Py_ssize_t a, Py_ssize_t b, Py_ssize_t c=1, Py_ssize_t d=1):
    """An array of rank 2 to 4 without values; a large one begins at a cache line."""
    cdef npy_intp[4] shape = [a, b, c, d]
    if 8.0 * a * b * c * d < SMALL:
        return PyArray_SimpleNew(rank, shape, type_number)
    return empty((a, b, c, d)[:rank], dtype)


cdef void lay_out(ndarray array, Py_ssize_t *step, Py_ssize_t *row) noexcept:
    """How the rows of [T,B,.] lie in memory."""
    step[0] = PyArray_STRIDES(array)[0] // PyArray_ITEMSIZE(array)
    row[0] = PyArray_STRIDES(array)[1] // PyArray_ITEMSIZE(array)


def step_mask_of(Py_ssize_t T, Py_ssize_t B, lengths, reset, bint reverse):
    """Where rows end and start anew, [T,B] as kernels read it (steps.pxd); None if all run through without a reset.

    `lengths` [B] are int64, `reset` [T,B] bool; both without gaps, or None.
    """
    cdef npy_intp[2] shape = [T, B]
    cdef Py_ssize_t t, b, length
    cdef const int64_t *ends = NULL if lengths is None else <const int64_t *> PyArray_BYTES(<ndarray> lengths)
    cdef const char *resets = NULL if reset is None else <const char *> PyArray_BYTES(<ndarray> reset)
    cdef ndarray step_mask
    cdef char *flags
    if ends is NULL and resets is NULL:
        return None
    step_mask = PyArray_SimpleNew(2, shape, NPY_UINT8)
    flags = PyArray_BYTES(step_mask)
    for t in range(T):
        for b in range(B):
            length = T if ends is NULL else ends[b]
            if t >= length:
                flags[0] = FINISHED
            else:
                flags[0] = INITIAL if t == (length - 1 if reverse else 0) else 0
                if resets is not NULL:
                    if not reverse:
                        flags[0] |= RESET if resets[t * B + b] else 0
                    elif t + 1 < length:  # an episode that starts at t + 1 hands no state back to t
                        flags[0] |= RESET if resets[(t + 1) * B + b] else 0
            flags += 1
    return step_mask


CellTape = namedtuple("CellTape", "weights x state saved h step_mask reverse")
CellTape.__doc__ = "What a cell keeps of a forward pass."
DenseTape = namedtuple("DenseTape", "weights x y step_mask ends")
DenseTape.__doc__ = "What a dense layer keeps of a forward pass: the rows that it computed, each from a row of x."
Ends = namedtuple("Ends", "T last parts")
Ends.__doc__ = """Where a dense layer with `last` finds the rows that it reads: of T steps each row's last one, [B]; and
the parts of x, of which those that run backwards end at the first step."""


cdef ndarray at_least_one(ndarray lengths):
    """Return lengths [B] in which rows without steps have one."""
    cdef ndarray result = PyArray_NewCopy(lengths, NPY_CORDER)
    cdef int64_t *length = <int64_t *> PyArray_BYTES(result)
    cdef Py_ssize_t b
    for b in range(PyArray_DIMS(result)[0]):
        length[b] = max(length[b], <int64_t> 1)
    return result


cdef void clear_first_step(ndarray rows, ndarray lengths) noexcept:
    """Set the first step of `rows` [T,B,n] to zero in the batch rows whose length is 0."""
    cdef const int64_t *length = <const int64_t *> PyArray_BYTES(lengths)
    cdef Py_ssize_t b
    for b in range(PyArray_DIMS(rows)[1]):
        if length[b] == 0:
            memset(PyArray_BYTES(rows) + b * PyArray_STRIDES(rows)[1], 0,
                   PyArray_DIMS(rows)[2] * PyArray_ITEMSIZE(rows))


@cython.final
@cython.freelist(8)
cdef class Current:
    """What all parts of a layer share in one forward pass."""

    cdef dict weights
    cdef Py_ssize_t T, B
    cdef object lengths, reset  # as for `step_mask_of`
    cdef object head_lengths  # of the dense layers at the end (`Dense._in_head`): at least one step for each row
    cdef object ahead, back, head  # the step masks of each direction, and of the dense layers at the end
    cdef bint training
    cdef int threads

    cdef step_mask(self, bint reverse):
        if self.lengths is None and self.reset is None:
            return None
        if reverse:
            if self.back is None:
                self.back = step_mask_of(self.T, self.B, self.lengths, self.reset, True)
            return self.back
        if self.ahead is None:
            self.ahead = step_mask_of(self.T, self.B, self.lengths, self.reset, False)
        return self.ahead

    cdef step_mask_of_head(self):
        if self.head is None:
            self.head = step_mask_of(self.T, self.B, self.head_lengths, None, False)
        return self.head


# -------------------------------------------------------------------------------------------------------------- runners
cdef class Runner:
    """Runs a layer."""

    cdef object layer, dtype
    cdef int type_number
    cdef Py_ssize_t inputs, outputs
    cdef bint over_time

    def __init__(self, layer):
        self.layer, self.dtype, self.type_number = layer, layer.dtype, layer.dtype.num
        self.inputs, self.outputs, self.over_time = layer.input_size, layer.output_size, layer._over_time

    cdef ndarray rows(self, Py_ssize_t T, Py_ssize_t B, Py_ssize_t size):
        return new(self.dtype, self.type_number, 3, T, B, size)

    # ------------------------------------------------------------------------------------------ what each kind does
    cdef bint takes(self, state, Py_ssize_t B) except -1:
        """Whether it is a state that can be read as it is; None stands for zeros."""
        raise NotImplementedError

    cdef tuple forward(self, Current current, ndarray x, state, bint reverse, y):
        """y, the final state, and what the tape keeps.

        A given y is filled and returned.  Without one, the tape may refer to the y that is returned.  The rows of x and
        y, along their last axis, may lie anywhere, so also those of d_y and d_x in `backward`; in training x has no
        gaps.
        """
        raise NotImplementedError

    cdef tuple backward(self, tape, ndarray d_y, d_last, d_x):
        """The gradients to x and the initial state, and the dict of those to the weights, from what `forward` kept.  A
        given d_x is filled and returned."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- passes
    def call(self, dict weights, x, state, lengths, batch_first, bint training):
        """What `run` returns; None where something has to be converted, or explained."""
        cdef Py_ssize_t T, B, b
        cdef const int64_t *length
        if not is_shaped(x, self.type_number, 3, -1, -1, self.inputs):
            return None
        if batch_first is not True and batch_first is not False:
            return None
        if batch_first is True:
            x = PyArray_SwapAxes(<ndarray> x, 0, 1)
        T, B = PyArray_DIMS(<ndarray> x)[0], PyArray_DIMS(<ndarray> x)[1]
        if not self.takes(state, B):
            return None
        if lengths is not None:
            if not is_plain(lengths, NPY_INT64, 1) or PyArray_DIMS(<ndarray> lengths)[0] != B:
                return None
            lengths = PyArray_NewCopy(<ndarray> lengths, NPY_CORDER)
            length = <const int64_t *> PyArray_BYTES(<ndarray> lengths)
            for b in range(B):
                if length[b] < 0 or length[b] > T:
                    return None
        return self.run(weights, x, state, lengths, None, None, T, batch_first, training)

    def run(
        self, dict weights, ndarray x, state, lengths, reset, counted, Py_ssize_t T, bint batch_first, bint training,
        int threads=0
    ):
        """y and the final state; in training also T, B, the steps until every row has ended, and what the tape keeps.

        x and `reset` are time first and have no more steps than are needed.  T is the number of the user's, and
        `counted` says which of these they are, if they had to move.  threads are as for `plan_of`.

        Where y is of last steps, a row without steps gets one of zeros for the dense layers at the end, also if T is 0.
        """
        cdef Current current = Current.__new__(Current)
        cdef Py_ssize_t B = PyArray_DIMS(x)[1], end = PyArray_DIMS(x)[0], b, longest = 0, shortest = end
        cdef npy_intp[3] one_step = [1, B, self.inputs]
        cdef const int64_t *length
        result = y = without_steps = None
        if lengths is not None:
            length = <const int64_t *> PyArray_BYTES(<ndarray> lengths)
            for b in range(B):
                longest, shortest = max(longest, <Py_ssize_t> length[b]), min(shortest, <Py_ssize_t> length[b])
            if longest < end:
                x, end = x[:longest], longest
        if not self.over_time and end == 0:
            x, end = PyArray_ZEROS(3, one_step, self.type_number, 0), 1
            lengths = without_steps = PyArray_ZEROS(1, one_step + 1, NPY_INT64, 0)
        elif training and counted is None:
            x = PyArray_NewCopy(x, NPY_CORDER)
        if not self.over_time and without_steps is None and shortest == 0:
            without_steps = lengths
            if not training and counted is None:
                x = PyArray_NewCopy(x, NPY_CORDER)
            clear_first_step(x, lengths)
        current.weights, current.T, current.B, current.training = weights, end, B, training
        current.lengths, current.reset = lengths, reset
        current.head_lengths = lengths if without_steps is None else at_least_one(lengths)
        current.threads = threads
        if not self.over_time:
            if training:  # for the caller; a tape has its own
                result = y = new(self.dtype, self.type_number, 2, B, self.outputs)
        elif training or end < T or batch_first or counted is not None:
            if batch_first:
                result = self.rows(B, T, self.outputs)
                y = PyArray_SwapAxes(<ndarray> result, 0, 1)
            else:
                result = y = self.rows(T, B, self.outputs)
            if end < T and counted is None:
                y[end:] = 0
                y = y[:end]
        if counted is None or not self.over_time:
            part, last, content = self.forward(current, x, state, False, y)
        else:
            part, last, content = self.forward(current, x, state, False, None)
            counted.scatter_y(part, self.layer._directions(False), y)
        if result is None:
            result = part
        if not self.over_time:
            content = content, without_steps
        return (result, last, T, B, end, content) if training else (result, last)

    def differentiate(self, tape, d_y, d_state):
        """What `run_back` returns; None where something has to be converted, or explained."""
        cdef Py_ssize_t T = tape.T, B = tape.B, end = tape.end
        cdef bint turned = tape.batch_first
        if tape.counted is not None:
            return None
        if not self.over_time:
            if not is_shaped(d_y, self.type_number, 2, -1, B, self.outputs):
                return None
        else:
            if not is_shaped(d_y, self.type_number, 3, B if turned else T, T if turned else B, self.outputs):
                return None
            if turned:
                d_y = PyArray_SwapAxes(<ndarray> d_y, 0, 1)
            if end < T:
                d_y = d_y[:end]
        if not self.takes(d_state, B):
            return None
        return self.run_back(tape, d_y, d_state)

    def run_back(self, tape, ndarray d_y, d_last):
        """The gradients to x and the initial state, and the dict of those to the weights; from that to y at the steps
        that count, as the tape has them, time first."""
        cdef Py_ssize_t T = tape.T, B = tape.B, end = tape.end
        result = self.rows(B, T, self.inputs) if tape.batch_first else self.rows(T, B, self.inputs)
        d_x = PyArray_SwapAxes(<ndarray> result, 0, 1) if tape.batch_first else result
        content, without_steps = (tape.content, None) if self.over_time else tape.content
        if tape.counted is not None:
            gathered, d_first, grads = self.backward(content, d_y, d_last, None)
            tape.counted.scatter(gathered, d_x)
        elif end > T:  # a step of zeros that no row has
            _, d_first, grads = self.backward(content, d_y, d_last, None)
        else:
            if end < T:
                d_x[end:] = 0
                d_x = d_x[:end]
            _, d_first, grads = self.backward(content, d_y, d_last, d_x)
            if without_steps is not None:
                clear_first_step(d_x, without_steps)
        return result, d_first, grads


cdef class SingleRunner(Runner):
    """That of a layer with weights of its own."""

    cdef tuple names  # of the weights in the kernels' order
    cdef type state
    cdef int states
    cdef Py_ssize_t[STATES] sizes  # of a row of each state
    cdef Plan plan, plan_back

    def __init__(self, layer):
        Runner.__init__(self, layer)
        self.names = layer._names
        assert len(self.names) <= WEIGHTS
        self.states = len(layer._state._fields)
        self.state = layer._state if self.states else tuple  # a layer without a state has the empty tuple
        for k in range(self.states):
            self.sizes[k] = layer._state_sizes[k]

    cdef bint takes(self, state, Py_ssize_t B) except -1:
        cdef int k
        if state is None:
            return True
        if type(state) is not self.state or len(<tuple> state) != self.states:
            return False
        for k in range(self.states):
            if not is_shaped((<tuple> state)[k], self.type_number, 2, 0, B, self.sizes[k]):
                return False
        return True

    cdef new_state(self, Py_ssize_t B, void **addresses):
        """A state without values, and where it is in memory."""
        cdef list arrays = []
        cdef int k
        for k in range(self.states):
            array = new(self.dtype, self.type_number, 2, B, self.sizes[k])
            addresses[k] = PyArray_BYTES(<ndarray> array)
            arrays.append(array)
        return tuple.__new__(self.state, arrays)

    cdef copy_of(self, state, Py_ssize_t B):
        """Of a state, or zeros."""
        cdef void *addresses[STATES]
        cdef int k
        copy = self.new_state(B, addresses)
        for k in range(self.states):
            if state is None:
                memset(addresses[k], 0, B * self.sizes[k] * self.dtype.itemsize)
            else:
                PyArray_CopyInto(<ndarray> copy[k], <ndarray> (<tuple> state)[k])
        return copy

    cdef int compute(self, weights, Pass *a, Py_ssize_t T, Py_ssize_t B, int threads) except -1:
        """Run the forward kernel."""
        cdef Plan plan
        threads = threads or number_of_threads[0]
        with cython.critical_section(self):
            plan = self.plan
        a.packed = address_of(weights.packed)
        plan = plan_of(plan, self.layer, "forward", weights.format, T, B, threads)
        with cython.critical_section(self):
            self.plan = plan
        plan.execute(NULL, a)
        return 0

    cdef dict compute_back(self, dict weights, Pass *a, Py_ssize_t T, Py_ssize_t B):
        """Run the backward kernel; the gradients to the weights."""
        cdef Plan plan
        cdef dict grads = {}
        cdef int k
        for k in range(len(self.names)):
            array, a.weights[k], a.weight_grads[k] = weights.get(self.names[k]), NULL, NULL
            if array is not None:
                grad = self.like(<ndarray> array)
                grads[self.names[k]] = grad
                a.weights[k] = PyArray_BYTES(<ndarray> array)
                a.weight_grads[k] = PyArray_BYTES(<ndarray> grad)
        with cython.critical_section(self):
            plan = self.plan_back
        plan = plan_of(plan, self.layer, "backward", 0, T, B)
        with cython.critical_section(self):
            self.plan_back = plan
        plan.execute(NULL, a)
        return grads

    cdef ndarray like(self, ndarray array):
        if array.ndim == 1:
            return new(self.dtype, self.type_number, 2, 1, array.shape[0])[0]
        return new(self.dtype, self.type_number, 2, array.shape[0], array.shape[1])

    cdef dict no_grads(self, dict weights):
        cdef dict grads = {}
        for name in weights:
            grads[name] = numpy.zeros_like(weights[name])
        return grads


@cython.final
cdef class CellRunner(SingleRunner):
    """That of an LSTM or a GRU."""

    cdef bint reverse
    cdef int saved  # arrays on a tape beside h
    cdef Py_ssize_t cells

    def __init__(self, layer):
        SingleRunner.__init__(self, layer)
        self.reverse, self.saved, self.cells = layer.reverse, len(layer._op.outputs) - 1, layer.hidden_size

    cdef tuple forward(self, Current current, ndarray x, state, bint reverse, y):
        cdef Pass a
        cdef Py_ssize_t T = current.T, B = current.B
        cdef int k
        cdef ndarray h
        weights = current.weights[self.layer]
        saved = tape = None
        a.saved, a.step_mask, a.reverse = NULL, NULL, reverse ^ self.reverse
        if current.training:
            saved = new(self.dtype, self.type_number, 4, self.saved, T, B, self.cells)
            state = self.copy_of(state, B)
            a.saved = PyArray_BYTES(<ndarray> saved)
        h = self.rows(T, B, self.outputs) if y is None or current.training else y
        if T and B and self.outputs:
            last = self.new_state(B, a.last_state)
            for k in range(self.states):
                a.initial_state[k] = NULL if state is None else PyArray_BYTES(<ndarray> (<tuple> state)[k])
            step_mask = current.step_mask(a.reverse)
            if step_mask is not None:
                a.step_mask = <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.x, a.y = PyArray_BYTES(x), PyArray_BYTES(h)
            lay_out(x, &a.x_layout.step, &a.x_layout.row)
            lay_out(h, &a.y_layout.step, &a.y_layout.row)
            self.compute(weights, &a, T, B, current.threads)
        else:
            step_mask, last = current.step_mask(a.reverse), self.copy_of(state, B)
        if y is None:
            y = h
        elif y is not h:
            PyArray_CopyInto(<ndarray> y, h)
        if current.training:
            tape = CellTape(weights.arrays, x, state, saved, h, step_mask, bool(a.reverse))
        return y, last, tape

    cdef tuple backward(self, tape, ndarray d_y, d_last, d_x):
        cdef Pass a
        cdef ndarray x, h, d
        cdef Py_ssize_t T, B
        cdef int k
        weights, x, state, saved, h, step_mask, a.reverse = tape
        T, B = PyArray_DIMS(x)[0], PyArray_DIMS(x)[1]
        d = self.rows(T, B, self.inputs) if d_x is None else d_x
        if PyArray_SIZE(h) == 0:
            d[...] = 0
            return d, self.copy_of(d_last, B), self.no_grads(weights)
        d_first = self.new_state(B, a.initial_state_grad)
        for k in range(self.states):
            a.initial_state[k] = PyArray_BYTES(<ndarray?> state[k])
            a.last_state_grad[k] = NULL if d_last is None else PyArray_BYTES(<ndarray> (<tuple> d_last)[k])
        a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray?> step_mask)
        a.x, a.y, a.saved = PyArray_BYTES(x), PyArray_BYTES(h), PyArray_BYTES(<ndarray?> saved)
        a.y_grad, a.x_grad = PyArray_BYTES(d_y), PyArray_BYTES(d)
        lay_out(d_y, &a.y_grad_layout.step, &a.y_grad_layout.row)
        lay_out(d, &a.x_grad_layout.step, &a.x_grad_layout.row)
        return d, d_first, self.compute_back(weights, &a, T, B)


@cython.final
cdef class DenseRunner(SingleRunner):
    """That of a dense layer."""

    cdef tuple forward(self, Current current, ndarray x, state, bint reverse, y):
        cdef Pass a
        cdef Py_ssize_t T = current.T, B = current.B
        cdef ndarray rows
        weights = current.weights[self.layer]
        step_mask = ends = tape = None
        if self.over_time:
            if current.lengths is not None:
                step_mask = current.step_mask_of_head() if self.layer._in_head else current.step_mask(reverse)
        else:
            ends = Ends(T, self.last_steps(current), self.layer._directions_of_x())
            x, T = self.gather(x, ends), 1
            y = None if y is None else y[None]
        rows = self.rows(T, B, self.outputs) if y is None or current.training else y
        if PyArray_SIZE(rows):
            a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.x, a.y = PyArray_BYTES(x), PyArray_BYTES(rows)
            lay_out(x, &a.x_layout.step, &a.x_layout.row)
            lay_out(rows, &a.y_layout.step, &a.y_layout.row)
            self.compute(weights, &a, T, B, current.threads)
        if y is None:
            y = rows
        elif y is not rows:
            PyArray_CopyInto(<ndarray> y, rows)
        if current.training:
            tape = DenseTape(weights.arrays, x, rows, step_mask, ends)
        return y if ends is None else y[0], (), tape

    cdef tuple backward(self, tape, ndarray d_y, d_last, d_x):
        cdef Pass a
        cdef ndarray x, y, d
        cdef Py_ssize_t T, B
        weights, x, y, step_mask, ends = tape
        T, B = PyArray_DIMS(x)[0], PyArray_DIMS(x)[1]
        if ends is not None:
            d_y = d_y[None]
        d = self.rows(T, B, self.inputs) if d_x is None or ends is not None else d_x
        if PyArray_SIZE(y):
            a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.x, a.y, a.y_grad, a.x_grad = PyArray_BYTES(x), PyArray_BYTES(y), PyArray_BYTES(d_y), PyArray_BYTES(d)
            lay_out(d_y, &a.y_grad_layout.step, &a.y_grad_layout.row)
            lay_out(d, &a.x_grad_layout.step, &a.x_grad_layout.row)
            grads = self.compute_back(weights, &a, T, B)
        else:
            d[...] = 0
            grads = self.no_grads(weights)
        if ends is None:
            return d, (), grads
        if d_x is None:
            d_x = self.rows(ends.T, B, self.inputs)
        d_x[...] = 0
        self.copy_ends(ends, d, d_x, False)
        return d_x, (), grads

    # --------------------------------------------------------------------------------------------------- with `last`
    cdef ndarray last_steps(self, Current current):
        """Each row's last step, [B]."""
        cdef npy_intp B = current.B
        cdef ndarray steps = PyArray_SimpleNew(1, &B, NPY_INT64)
        cdef int64_t *step = <int64_t *> PyArray_BYTES(steps)
        cdef Py_ssize_t b
        for b in range(B):
            step[b] = current.T - 1
            if current.head_lengths is not None:
                step[b] = (<const int64_t *> PyArray_BYTES(<ndarray> current.head_lengths))[b] - 1
        return steps

    cdef ndarray gather(self, ndarray x, ends):
        """Copy the rows of x [T,B,I] that are read to a new array [1,B,I]."""
        cdef ndarray rows = self.rows(1, PyArray_DIMS(x)[1], self.inputs)
        self.copy_ends(ends, rows, x, True)
        return rows

    cdef int copy_ends(self, ends, ndarray rows, ndarray x, bint gathers) except -1:
        """Copy to `rows` [1,B,I] from the steps of `x` [T,B,I] where its parts end, or back."""
        cdef Py_ssize_t b, size, at = 0, itemsize = PyArray_ITEMSIZE(x), B = PyArray_DIMS(x)[1]
        cdef const int64_t *last = <const int64_t *> PyArray_BYTES(<ndarray> ends.last)
        cdef char *row
        cdef char *step
        for part in ends.parts:
            size = part[0] * itemsize
            for b in range(B):
                row = PyArray_BYTES(rows) + b * self.inputs * itemsize + at
                step = PyArray_BYTES(x) + b * PyArray_STRIDES(x)[1] + at
                if not part[1]:
                    step += last[b] * PyArray_STRIDES(x)[0]
                if gathers:
                    memcpy(row, step, size)
                else:
                    memcpy(step, row, size)
            at += size
        return 0


cdef class CompositeRunner(Runner):
    """That of a layer of several."""

    cdef tuple names, parts

    def __init__(self, layer):
        Runner.__init__(self, layer)
        self.names, self.parts = tuple(layer._layers), ()
        for part in layer._layers.values():
            self.parts += (part._runner,)

    cdef bint takes(self, state, Py_ssize_t B) except -1:
        cdef Py_ssize_t k
        if state is None:
            return True
        if type(state) is not tuple or len(<tuple> state) != len(self.parts):
            return False
        for k in range(len(self.parts)):
            if not (<Runner> self.parts[k]).takes((<tuple> state)[k], B):
                return False
        return True

    cdef dict keyed(self, list grads):
        """The parts' gradients by the names that the layer has for its weights."""
        cdef dict found = {}
        cdef Py_ssize_t k
        for k in range(len(self.parts)):
            name = self.names[k]
            for key, array in (<dict> grads[k]).items():
                found[f"{name}.{key}"] = array
        return found


@cython.final
cdef class StackRunner(CompositeRunner):
    """That of a stack."""

    cdef tuple forward(self, Current current, ndarray x, state, bint reverse, y):
        cdef list last = [], tapes = []
        cdef Py_ssize_t k, top = len(self.parts) - 1
        for k in range(top + 1):
            first = None if state is None else (<tuple> state)[k]
            x, after, tape = (<Runner> self.parts[k]).forward(current, x, first, reverse, y if k == top else None)
            last.append(after)
            tapes.append(tape)
        return x, tuple(last), tapes

    cdef tuple backward(self, tape, ndarray d_y, d_last, d_x):
        cdef list states = [], grads = []
        cdef Py_ssize_t k
        for k in range(len(self.parts) - 1, -1, -1):
            after = None if d_last is None else (<tuple> d_last)[k]
            part = (<Runner> self.parts[k]).backward(tape[k], d_y, after, None if k else d_x)
            d_y = part[0]
            states.append(part[1])
            grads.append(part[2])
        states.reverse()
        grads.reverse()
        return d_y, tuple(states), self.keyed(grads)


@cython.final
cdef class PairRunner(CompositeRunner):
    """That of two layers side by side, of which the second one runs in the other direction."""

    cdef tuple forward(self, Current current, ndarray x, state, bint reverse, y):
        cdef Py_ssize_t half = self.outputs // 2
        if y is None:
            y = self.rows(current.T, current.B, self.outputs)
        fw, bw = (None, None) if state is None else state
        _, last_fw, tape_fw = (<Runner> self.parts[0]).forward(current, x, fw, reverse, y[:, :, :half])
        _, last_bw, tape_bw = (<Runner> self.parts[1]).forward(current, x, bw, not reverse, y[:, :, half:])
        return y, (last_fw, last_bw), (tape_fw, tape_bw)

    cdef tuple backward(self, tape, ndarray d_y, d_last, d_x):
        cdef Py_ssize_t half = self.outputs // 2
        fw, bw = (None, None) if d_last is None else d_last
        tape_fw, tape_bw = tape
        d_x, d_fw, grads_fw = (<Runner> self.parts[0]).backward(tape_fw, d_y[:, :, :half], fw, d_x)
        d_x_bw, d_bw, grads_bw = (<Runner> self.parts[1]).backward(tape_bw, d_y[:, :, half:], bw, None)
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.add(d_x, d_x_bw, out=d_x)
        return d_x, (d_fw, d_bw), self.keyed([grads_fw, grads_bw])
