"""Passes of layers, forward and backward.

There is one `Runner` for each layer, and the runner of a `Stack` or a `Bidirectional` has those of its layers.  A pass
goes through these levels:

    try_forward       try_backward       a user's arguments; None unless they are canonical, as kernels read them
    forward_layer     backward_layer     the layer that is called, on canonical arguments
    forward_sublayer  backward_sublayer  the same, or a layer in it
    plan_and_run_forward, plan_and_run_backward

After None, blockcell/layers converts the arguments, or raises, and calls `forward_layer` or `backward_layer`.

Letters: T time, B batch, I input, H cell; t is a step, b a batch row, and k the index of a weight, a state or a
layer.  Arrays are time first: x is [T,B,I], y is [T,B,output size].  The gradient of a loss to an array has its name
after "d_".
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.string cimport memcpy, memset
from numpy cimport (
    NPY_CORDER, NPY_INT64, NPY_UINT8, PyArray_BYTES, PyArray_CopyInto, PyArray_DIMS, PyArray_IS_C_CONTIGUOUS,
    PyArray_ITEMSIZE, PyArray_NDIM, PyArray_NewCopy, PyArray_SimpleNew, PyArray_SIZE, PyArray_STRIDES, PyArray_SwapAxes,
    import_array, int64_t, ndarray, npy_intp
)

from collections import namedtuple

import numpy

from blockcell._args import empty
from blockcell._kernels import TAPE_ARRAYS
from blockcell._team import NUMBER, RUN

from numpy_arrays cimport is_plain
from passes.arrays cimport STATES, Kernel, Pass, clear_pass
from passes.indices cimport (
    BIAS, BIAS_C, BIAS_HC, BIAS_RU, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, OUT_H, W, W_C, W_P, W_RU, WCF, WCI, WCO, X
)
from passes.steps cimport FINISHED, INITIAL, RESET, Layout
from product.lines cimport align_to_line
from schedule.runs cimport RunKernel, load_number

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_GetPointer(NUMBER, "blockcell._team.NUMBER")
cdef RunKernel run_kernel = <RunKernel> PyCapsule_GetPointer(RUN, "blockcell._team.RUN")

cdef enum:
    SHORT = 1 << 15  # multiplications, above which a pass leaves other Python threads running
    SMALL = 1 << 17  # bytes, as in _args.pyx

cdef dict WEIGHTS = {  # the indices of a layer's weights
    "w": W, "w_ru": W_RU, "w_c": W_C, "w_p": W_P, "wci": WCI, "wcf": WCF, "wco": WCO, "b": BIAS, "b_ru": BIAS_RU,
    "b_c": BIAS_C, "b_hc": BIAS_HC
}


# -------------------------------------------------------------------------------------------------------------- kernels
cdef struct KernelCall:  # what `call_kernel` gets; on the stack of `KernelPlan.execute`
    Kernel kernel
    const void *plan
    void *scratch
    const Pass *arrays
    bint keeps_gil


cdef long long call_kernel(void *context, int ready) except? -1:
    """Call a kernel on the threads that are ready; return the nanoseconds that having several cost.

    context : its KernelCall
    """
    cdef const KernelCall *call = <const KernelCall *> context
    cdef long long cost
    if call.keeps_gil:
        return call.kernel(call.plan, ready, call.scratch, call.arrays)
    with nogil:
        cost = call.kernel(call.plan, ready, call.scratch, call.arrays)
    return cost


@cython.final
cdef class KernelPlan:

    cdef execute(self, char *scratch, const Pass *a):
        """Run the kernel.

        scratch : `size` bytes, the caller's; NULL for memory that is allocated for this call
        a : the caller's
        """
        cdef KernelCall call
        cdef char *allocated = NULL
        if scratch is NULL:
            scratch = allocated = <char *> PyMem_RawMalloc(self.size)
            if allocated is NULL:
                raise MemoryError()
        call.kernel, call.plan, call.arrays = self.kernel, PyBytes_AS_STRING(self.parameters), a
        call.scratch, call.keeps_gil = align_to_line(scratch), self.keeps_gil
        try:
            run_kernel(self.planned_threads, call_kernel, &call)
        finally:
            PyMem_RawFree(allocated)


cdef KernelPlan plan_from(
    planned, int format, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, int threads
):
    """Return the plan of a kernel that is `planned`, a PlannedKernel (blockcell/_kernels.py) or such a tuple."""
    cdef KernelPlan plan = KernelPlan.__new__(KernelPlan)
    kernel, plan.parameters, plan.size, plan.planned_threads, _ = planned
    plan.kernel = <Kernel> PyCapsule_GetPointer(kernel, NULL)
    plan.T, plan.B, plan.format, plan.threads = T, B, format, threads
    plan.keeps_gil = T * B * (I + H) * H < SHORT
    return plan


cdef KernelPlan plan_for(KernelPlan last, layer, task, int format, Py_ssize_t T, Py_ssize_t B, int threads=0):
    """Return the plan of a call: that of the last call of this kernel, if it had the same sizes, or a new one.

    Parameters
    ----------
    last : KernelPlan or None
    layer : Leaf
        Plans its kernels by `_plan_kernel`.
    task : {"forward", "backward"}
    format : int
        How the matrices of weights are quantized.
    threads : int
        How many there may be; 0 for as many as users have set.
    """
    threads = threads or load_number(number_of_threads)
    if last is not None and last.T == T and last.B == B and last.threads == threads and last.format == format:
        return last
    planned = layer._plan_kernel(task, format, T, B, threads)
    return plan_from(planned, format, T, B, layer.input_size, layer.hidden_size, threads)


def run_packing_kernel(planned, ndarray packed, dict weights, dict matrices, bint unpacks=False):
    """Pack a layer's weights, or unpack its quantized matrices.

    Parameters
    ----------
    planned : PlannedKernel
        Of the task "pack".
    packed : ndarray of uint8
        As many bytes as are planned.
    weights : dict of str to ndarray
        The float weights to pack, C-contiguous.
    matrices : dict of str to QuantizedMatrix
        The quantized matrices, C-contiguous.
    unpacks : bool
        Whether codes and scales are written, and nothing is packed.
    """
    cdef Pass a
    cdef KernelPlan plan = plan_from(planned, 0, 1, 1, 0, 0, 1)
    plan.keeps_gil = PyArray_SIZE(packed) < SMALL
    clear_pass(&a)
    a.unpacks = unpacks
    for name, array in weights.items():
        a.inputs[<int> WEIGHTS[name]] = data_or_null(array)
    for name, matrix in matrices.items():
        a.codes[<int> WEIGHTS[name] - W] = <unsigned char *> data_or_null(matrix.codes)
        a.scales[<int> WEIGHTS[name] - W] = <float *> data_or_null(matrix.scale)
    plan.execute(PyArray_BYTES(packed), &a)


# --------------------------------------------------------------------------------------------------------------- arrays
cdef void *data_or_null(array) except? NULL:
    """Return the address of the numbers of a C-contiguous array; NULL for None."""
    if array is None:
        return NULL
    assert PyArray_IS_C_CONTIGUOUS(<ndarray?> array)
    return PyArray_BYTES(<ndarray> array)


cdef char *packed_address(object packed) noexcept:
    """Return the address of the packed weights in their array: its first cache line."""
    return <char *> align_to_line(PyArray_BYTES(<ndarray> packed))


cdef bint is_shaped(array, int type_number, int rank, Py_ssize_t T, Py_ssize_t B, Py_ssize_t width) noexcept:
    """Return whether a kernel can take `array` as it is, and it has the shape (B, width) or, of rank 3, (T, B, width).

    T, B : -1 if these sizes may be anything
    """
    cdef npy_intp *shape
    if not is_plain(array, type_number, rank):
        return False
    shape = PyArray_DIMS(<ndarray> array)
    return (
        shape[rank - 1] == width
        and (B < 0 or shape[rank - 2] == B)
        and (rank == 2 or T < 0 or shape[0] == T)
    )


cdef ndarray new_array(dtype, int type_number, int rank, Py_ssize_t a, Py_ssize_t b, Py_ssize_t c=1, Py_ssize_t d=1):
    """Return an array without values whose shape is the first of a, b, c and d; a large one begins at a cache line."""
    cdef npy_intp[4] shape = [a, b, c, d]
    if 8.0 * a * b * c * d < SMALL:
        return PyArray_SimpleNew(rank, shape, type_number)
    return empty((a, b, c, d)[:rank], dtype)


cdef void set_layout(Layout *layout, ndarray array) noexcept:
    """Describe how the rows of an array [T,B,.] lie in memory.

    layout : the caller's; written
    """
    layout.step = PyArray_STRIDES(array)[0] // PyArray_ITEMSIZE(array)
    layout.row = PyArray_STRIDES(array)[1] // PyArray_ITEMSIZE(array)


def step_mask_of(Py_ssize_t T, Py_ssize_t B, lengths, reset, bint reverse):
    """Return the step mask of lengths and resets.

    Parameters
    ----------
    T, B : int
    lengths : ndarray (B,) of int64, C-contiguous, or None
        How many steps each row has.
    reset : ndarray (T, B) of bool, C-contiguous, or None
        Whether a row starts anew at a step, from its reset state.
    reverse : bool
        Whether the layer runs from the last step to the first.

    Returns
    -------
    ndarray (T, B) of uint8, or None
        As kernels read it (steps.pxd); None if there are neither lengths nor resets.
    """
    cdef npy_intp[2] shape = [T, B]
    cdef Py_ssize_t t, b, length, reset_step
    cdef const int64_t *row_lengths = NULL if lengths is None else <const int64_t *> PyArray_BYTES(<ndarray> lengths)
    cdef const char *resets = NULL if reset is None else <const char *> PyArray_BYTES(<ndarray> reset)
    cdef ndarray step_mask
    cdef char *flags
    if row_lengths is NULL and resets is NULL:
        return None
    step_mask = PyArray_SimpleNew(2, shape, NPY_UINT8)
    flags = PyArray_BYTES(step_mask)
    for t in range(T):
        for b in range(B):
            length = T if row_lengths is NULL else row_lengths[b]
            if t >= length:
                flags[0] = FINISHED
            else:
                flags[0] = INITIAL if t == (length - 1 if reverse else 0) else 0
                reset_step = t + 1 if reverse else t  # an episode that starts at t + 1 hands no state back to t
                if resets is not NULL and reset_step < length and resets[reset_step * B + b]:
                    flags[0] |= RESET
            flags += 1
    return step_mask


cdef ndarray copy_reset_rows(ndarray rows, ndarray reset):
    """Return a copy of `rows` [T,B,n], or of the first ones of more steps, that has values only where `reset` [T,B] is
    true, and zeros elsewhere."""
    cdef Py_ssize_t t, b, T = PyArray_DIMS(reset)[0], B = PyArray_DIMS(reset)[1]
    cdef Py_ssize_t size = PyArray_DIMS(rows)[2] * PyArray_ITEMSIZE(rows)
    cdef ndarray copy = numpy.zeros((T, B, PyArray_DIMS(rows)[2]), rows.dtype)
    for t in range(T):  # numpy's own indexing by masks loses the error of an allocation that fails
        for b in range(B):
            if PyArray_BYTES(reset)[t * B + b]:
                memcpy(PyArray_BYTES(copy) + (t * B + b) * size,
                       PyArray_BYTES(rows) + t * PyArray_STRIDES(rows)[0] + b * PyArray_STRIDES(rows)[1], size)
    return copy


cdef void clear_first_step(ndarray rows, ndarray lengths) noexcept:
    """Set the first step of `rows` [T,B,n] to zero in the batch rows whose length is 0."""
    cdef Py_ssize_t b, size = PyArray_DIMS(rows)[2] * PyArray_ITEMSIZE(rows)
    for b in range(PyArray_DIMS(rows)[1]):
        if (<const int64_t *> PyArray_BYTES(lengths))[b] == 0:
            memset(PyArray_BYTES(rows) + b * PyArray_STRIDES(rows)[1], 0, size)


CellTape = namedtuple("CellTape", "weights x state reset_state saved h step_mask reverse")
CellTape.__doc__ = "What a cell keeps of a forward pass."
DenseTape = namedtuple("DenseTape", "weights x y step_mask last_steps")
DenseTape.__doc__ = "What a dense layer keeps of a forward pass: the rows that it computed, each from a row of x."
LastSteps = namedtuple("LastSteps", "T last_step directions")
LastSteps.__doc__ = """Which rows of x a dense layer with `last` reads: of T steps the last one of each row, [B]; and
the sizes and directions of x's halves by `Dense._directions_of_x`; those of a reverse one end at the first step."""


# -------------------------------------------------------------------------------------------------------------- lengths
cdef Py_ssize_t row_out_of_range(ndarray lengths, Py_ssize_t least, Py_ssize_t most) noexcept:
    """Return the first batch row whose length is not `least` to `most`, by lengths [B]; -1 if there is none."""
    cdef const int64_t *length = <const int64_t *> PyArray_BYTES(lengths)
    cdef Py_ssize_t b
    for b in range(PyArray_DIMS(lengths)[0]):
        if length[b] < least or length[b] > most:
            return b
    return -1


def check_lengths(caller, ndarray lengths, Py_ssize_t T, values):
    """Raise a ValueError unless all lengths are 0 to T.

    Parameters
    ----------
    caller : str
        With which the message begins.
    lengths : ndarray (B,) of int64
        C-contiguous.
    T : int
    values : ndarray (B,)
        What the user gave, for the message: `lengths` may have wrapped around.
    """
    cdef Py_ssize_t b = row_out_of_range(lengths, 0, T)
    if b >= 0:
        raise ValueError(f"{caller}: lengths[{b}] is {values[b]}; expected 0 to T = {T}")


cdef Py_ssize_t longest_length(object lengths) noexcept:
    """Return the largest of lengths [B], the steps until every row has finished; 0 if there are no rows."""
    cdef const int64_t *length = <const int64_t *> PyArray_BYTES(<ndarray> lengths)
    cdef Py_ssize_t b, longest = 0
    for b in range(PyArray_DIMS(<ndarray> lengths)[0]):
        longest = max(longest, <Py_ssize_t> length[b])
    return longest


@cython.final
@cython.freelist(8)
cdef class ForwardContext:
    """What the layers in the one that is called share in one forward pass."""

    cdef dict weights  # the `LeafWeights` of each layer with weights
    cdef Py_ssize_t T, B  # T: the steps until every row has finished
    cdef object lengths, reset  # as for `step_mask_of`
    # Of the leaves in the head (`Leaf._in_head`): at least one step for each row. None if y has all steps.
    cdef object head_lengths
    cdef object forward_mask, reverse_mask, head_mask  # step masks, made when a layer asks first
    cdef bint training  # whether a tape is kept
    cdef int threads  # as for `plan_for`

    cdef step_mask(self, bint reverse):
        """Return the step mask of one direction; None if there is none."""
        if reverse:
            if self.reverse_mask is None:
                self.reverse_mask = step_mask_of(self.T, self.B, self.lengths, self.reset, True)
            return self.reverse_mask
        if self.forward_mask is None:
            self.forward_mask = step_mask_of(self.T, self.B, self.lengths, self.reset, False)
        return self.forward_mask

    cdef head_step_mask(self):
        """Return the step mask of dense layers in the head."""
        if self.head_mask is None:
            self.head_mask = step_mask_of(self.T, self.B, self.head_lengths, None, False)
        return self.head_mask


# -------------------------------------------------------------------------------------------------------------- runners
cdef class Runner:
    """Runs the passes of one layer, `layer`."""

    cdef object layer, dtype
    cdef int type_number  # of the dtype, as numpy has it
    cdef Py_ssize_t input_size, output_size
    cdef bint over_time  # whether y has all steps; otherwise it has the last one of each row

    def __init__(self, layer):
        self.layer, self.dtype, self.type_number = layer, layer.dtype, layer.dtype.num
        self.input_size, self.output_size, self.over_time = layer.input_size, layer.output_size, layer._over_time

    cdef ndarray new_rows(self, Py_ssize_t T, Py_ssize_t B, Py_ssize_t size):
        """Return an array [T,B,size] without values."""
        return new_array(self.dtype, self.type_number, 3, T, B, size)

    # ----------------------------------------------------------------------------------------- what subclasses override
    cdef bint takes_state(self, state, Py_ssize_t B) except -1:
        """Return whether `state` is a state of B rows that kernels can read as it is; None stands for zeros."""
        raise NotImplementedError

    cdef tuple forward_sublayer(self, ForwardContext context, ndarray x, state, reset_state, bint reverse, y):
        """Run the forward pass of the layer that is called, or of a layer in it.

        Parameters
        ----------
        context : ForwardContext
        x : ndarray (T, B, I)
            Rows may lie anywhere, but a row has no gaps; in training there are none at all.
        state
            As `takes_state` takes it.
        reset_state
            What the state is where it is reset: of the form of `state` with arrays [T,B,.], whose rows may lie
            anywhere.  None stands for zeros, in place of an array, too.
        reverse : bool
            Whether the directions of this layer are reversed, as it is in the second layer of a `Bidirectional`.
        y : ndarray or None
            Is filled and returned, and may have gaps between rows; None for a new array, to which the tape may refer.

        Returns
        -------
        y : ndarray
        last_state
        tape
            What `backward_sublayer` needs; None unless in training.
        """
        raise NotImplementedError

    cdef tuple backward_sublayer(self, tape, ndarray d_y, d_last, d_reset_state, d_x):
        """Run the backward pass of the layer that is called, or of a layer in it.

        Parameters
        ----------
        tape
            What `forward_sublayer` returned.
        d_y : ndarray
            There may be gaps between rows.
        d_last
            Gradient to the last state; None for zeros.
        d_reset_state
            Of the form of `reset_state`: the gradient to it is written where there is a reset; None if nobody asks for
            it.
        d_x : ndarray (T, B, I) or None
            Is filled and returned, and may have gaps between rows; None for a new array.

        Returns
        -------
        d_x : ndarray (T, B, I)
        d_initial
            Gradient to the initial state.
        grads : dict of str to ndarray
            Gradients to the weights.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- forward passes
    def try_forward(self, dict weights, x, state, lengths, batch_first, bint training):
        """Run the forward pass on a user's arguments; return None if one is not canonical, or wrong."""
        cdef Py_ssize_t T, B
        if not is_shaped(x, self.type_number, 3, -1, -1, self.input_size):
            return None
        if batch_first is not True and batch_first is not False:
            return None
        if batch_first is True:
            x = PyArray_SwapAxes(<ndarray> x, 0, 1)
        T, B = PyArray_DIMS(<ndarray> x)[0], PyArray_DIMS(<ndarray> x)[1]
        if not self.takes_state(state, B):
            return None
        if lengths is not None:
            if not is_plain(lengths, NPY_INT64, 1) or PyArray_DIMS(<ndarray> lengths)[0] != B:
                return None
            lengths = PyArray_NewCopy(<ndarray> lengths, NPY_CORDER)  # which no other thread changes
            if row_out_of_range(<ndarray> lengths, 0, T) >= 0:
                return None
        return self.forward_layer(weights, x, state, lengths, None, None, None, batch_first, training)

    cpdef forward_layer(
        self, dict weights, ndarray x, state, lengths, reset, reset_state, counted, bint batch_first, bint training,
        int threads=0
    ):
        """Run the forward pass of the layer that is called.

        Parameters
        ----------
        weights : dict
            The `LeafWeights` of each leaf.
        x : ndarray (T, B, I)
            As kernels read it; with a mask the `counted` steps alone.
        state
            As `takes_state` takes it.
        lengths, reset
            As for `step_mask_of`, for the steps of x.
        reset_state
            As for `forward_sublayer`.
        counted : CountedSteps or None
            Which of the user's steps are those of x, if a mask has moved them.
        batch_first : bool
            Whether y is (B, T, output size).
        training : bool
        threads : int
            As for `plan_for`.

        Returns
        -------
        y : ndarray
            All steps of the user's, or the last one of each row.
        last_state
        T, B, step_count, lengths, content
            In training, what the layer's `Tape` has.
        """
        cdef ForwardContext context = ForwardContext.__new__(ForwardContext)
        cdef Py_ssize_t T = PyArray_DIMS(x)[0] if counted is None else len(counted.mask)
        context.weights, context.training, context.threads = weights, training, threads
        context.lengths, context.reset = lengths, reset
        context.T, context.B = PyArray_DIMS(x)[0], PyArray_DIMS(x)[1]
        if lengths is not None:
            context.T = longest_length(lengths)
        if context.T < PyArray_DIMS(x)[0]:
            x = x[: context.T]
        if self.over_time:
            y, last_state, content = self.forward_steps(context, x, state, reset_state, T, counted, batch_first)
        else:
            y, last_state, content = self.forward_last_steps(context, x, state, reset_state, counted is None)
        if training:
            return y, last_state, T, context.B, context.T, context.lengths, content
        return y, last_state

    cdef tuple forward_steps(
        self, ForwardContext context, ndarray x, state, reset_state, Py_ssize_t T, counted, bint batch_first
    ):
        """Run the forward pass of a layer whose y has all steps; return y, the last state and the tape's content.

        T : the number of the user's steps
        """
        if not context.training and context.T == T and not batch_first and counted is None:
            return self.forward_sublayer(context, x, state, reset_state, False, None)
        if batch_first:
            result = self.new_rows(context.B, T, self.output_size)
            y = PyArray_SwapAxes(<ndarray> result, 0, 1)
        else:
            result = y = self.new_rows(T, context.B, self.output_size)
        if counted is not None:
            counted_y, last_state, content = self.forward_sublayer(context, x, state, reset_state, False, None)
            counted.scatter_y(counted_y, self.layer._directions(False), y)
            return result, last_state, content
        if context.training:  # the tape's own
            x = PyArray_NewCopy(x, NPY_CORDER)
        if context.T < T:
            y[context.T :] = 0
            y = y[: context.T]
        _, last_state, content = self.forward_sublayer(context, x, state, reset_state, False, y)
        return result, last_state, content

    cdef tuple forward_last_steps(self, ForwardContext context, ndarray x, state, reset_state, bint is_users_x):
        """Run the forward pass of a layer whose y has the last step of each row; return y, the last state and the
        tape's content.  From a row without steps the head computes y as from a step of zeros, also if T is 0.

        is_users_x : whether x is the user's memory, which has to be copied before it is written or kept
        """
        cdef bint has_empty = False
        if context.T == 0:
            context.T, x = 1, numpy.zeros((1, context.B, self.input_size), self.dtype)
            context.lengths = numpy.zeros(context.B, numpy.int64)
            context.head_lengths = numpy.ones(context.B, numpy.int64)
        else:
            context.head_lengths = context.lengths
            if context.lengths is not None:
                has_empty = row_out_of_range(<ndarray> context.lengths, 1, context.T) >= 0
            if is_users_x and (context.training or has_empty):
                x = PyArray_NewCopy(x, NPY_CORDER)
            if has_empty:
                clear_first_step(x, context.lengths)
                context.head_lengths = numpy.maximum(context.lengths, 1)
        y = None
        if context.training:  # the caller's; a tape has its own
            y = new_array(self.dtype, self.type_number, 2, context.B, self.output_size)
        return self.forward_sublayer(context, x, state, reset_state, False, y)

    # ------------------------------------------------------------------------------------------------- backward passes
    def try_backward(self, tape, d_y, d_last, d_reset_state):
        """Run the backward pass on a user's arguments; return None if one is not canonical, or wrong."""
        cdef Py_ssize_t T = tape.T, B = tape.B, step_count = tape.step_count
        cdef bint swaps = self.over_time and tape.batch_first
        cdef int rank = 3 if self.over_time else 2
        if tape.counted is not None:
            return None
        if not is_shaped(d_y, self.type_number, rank, B if swaps else T, T if swaps else B, self.output_size):
            return None
        if swaps:
            d_y = PyArray_SwapAxes(<ndarray> d_y, 0, 1)
        if self.over_time and step_count < T:
            d_y = d_y[:step_count]
        if not self.takes_state(d_last, B):
            return None
        return self.backward_layer(tape, d_y, d_last, d_reset_state)

    cpdef backward_layer(self, tape, ndarray d_y, d_last, d_reset_state):
        """Run the backward pass of the layer that is called.

        Parameters
        ----------
        tape : Tape
        d_y : ndarray
            At the steps that count, as the tape has them, time first.
        d_last
            Gradient to the last state; None for zeros.
        d_reset_state
            As for `backward_sublayer`, with all steps of the user's.

        Returns
        -------
        d_x, d_initial, grads
            As of `backward_sublayer`; d_x has all steps of the user's, in the form of x.
        """
        cdef Py_ssize_t T = tape.T, B = tape.B, step_count = tape.step_count
        result = self.new_rows(B, T, self.input_size) if tape.batch_first else self.new_rows(T, B, self.input_size)
        d_x = PyArray_SwapAxes(<ndarray> result, 0, 1) if tape.batch_first else result
        if tape.counted is not None:
            counted_d_x, d_initial, grads = self.backward_sublayer(tape.content, d_y, d_last, d_reset_state, None)
            tape.counted.scatter(counted_d_x, d_x)
        elif step_count > T:  # a step of zeros that no row has
            _, d_initial, grads = self.backward_sublayer(tape.content, d_y, d_last, d_reset_state, None)
        else:
            if step_count < T:
                d_x[step_count:] = 0
                d_x = d_x[:step_count]
            _, d_initial, grads = self.backward_sublayer(tape.content, d_y, d_last, d_reset_state, d_x)
            if not self.over_time and tape.lengths is not None:
                clear_first_step(d_x, tape.lengths)  # of rows without steps, for which the head has read one
        return result, d_initial, grads


cdef class LeafRunner(Runner):
    """Runs a layer with weights of its own."""

    cdef type state_type
    cdef int state_count
    cdef Py_ssize_t[STATES] state_sizes  # numbers in a row of each state
    cdef KernelPlan forward_plan, backward_plan  # of the last call

    def __init__(self, layer):
        Runner.__init__(self, layer)
        self.state_count = len(layer._state._fields)
        self.state_type = layer._state if self.state_count else tuple  # a layer without a state has the empty tuple
        for k in range(self.state_count):
            self.state_sizes[k] = layer._state_sizes[k]

    cdef bint takes_state(self, state, Py_ssize_t B) except -1:
        """Return whether `state` is None or of the layer's type, with plain arrays of B rows."""
        cdef int k
        if state is None:
            return True
        if type(state) is not self.state_type or len(<tuple> state) != self.state_count:
            return False
        for k in range(self.state_count):
            if not is_shaped((<tuple> state)[k], self.type_number, 2, 0, B, self.state_sizes[k]):
                return False
        return True

    cdef new_state(self, Py_ssize_t B, void **addresses):
        """Return a state without values, whose addresses are written: that of h first."""
        cdef list arrays = []
        cdef int k
        for k in range(self.state_count):
            array = new_array(self.dtype, self.type_number, 2, B, self.state_sizes[k])
            addresses[self.state_count - 1 - k] = PyArray_BYTES(<ndarray> array)
            arrays.append(array)
        return tuple.__new__(self.state_type, arrays)

    cdef void set_state(self, state, const void **addresses, Layout *layouts=NULL) noexcept:
        """Set where the arrays of a state are, that of h first: NULL where there is none.

        layouts : of arrays [T,B,.]; NULL for a state whose arrays [B,.] have no gaps
        """
        cdef int k, i
        for k in range(self.state_count if state is not None else 0):
            i = self.state_count - 1 - k
            if (<tuple> state)[k] is not None:
                addresses[i] = PyArray_BYTES(<ndarray> (<tuple> state)[k])
                if layouts is not NULL:
                    set_layout(&layouts[i], <ndarray> (<tuple> state)[k])

    cdef copy_state(self, state, Py_ssize_t B):
        """Return a copy of a state, or zeros for None."""
        cdef void *addresses[STATES]
        cdef int k
        copy = self.new_state(B, addresses)
        for k in range(self.state_count):
            if state is None:
                memset(addresses[self.state_count - 1 - k], 0, B * self.state_sizes[k] * self.dtype.itemsize)
            else:
                PyArray_CopyInto(<ndarray> copy[k], <ndarray> (<tuple> state)[k])
        return copy

    cdef int plan_and_run_forward(self, weights, Pass *a, Py_ssize_t T, Py_ssize_t B, int threads) except -1:
        """Run the forward kernel, by the plan of the last call if that had the same sizes.

        weights : the layer's LeafWeights
        a : the caller's; `packed` and `has_layouts` are set here
        threads : as for `plan_for`
        """
        cdef KernelPlan plan
        cdef int format
        with cython.critical_section(self):  # in Pythons without a GIL, where another thread may replace it
            plan = self.forward_plan
        _, packed, format = <tuple> weights  # faster than by their names
        a.packed, a.has_layouts = packed_address(packed), True
        plan = plan_for(plan, self.layer, "forward", format, T, B, threads)
        with cython.critical_section(self):
            self.forward_plan = plan
        plan.execute(NULL, a)
        return 0

    cdef dict plan_and_run_backward(self, dict weights, Pass *a, Py_ssize_t T, Py_ssize_t B):
        """Run the backward kernel, by the plan of the last call if that had the same sizes; return the gradients to the
        weights, by their names.

        weights : the arrays by their names
        a : the caller's; weights, their gradients and `has_layouts` are set here
        """
        cdef KernelPlan plan
        cdef dict grads = {}
        cdef npy_intp *shape
        cdef int index, rank
        a.has_layouts = True
        for name, array in weights.items():
            rank, shape = PyArray_NDIM(<ndarray> array), PyArray_DIMS(<ndarray> array)
            grad = new_array(self.dtype, self.type_number, rank, shape[0], shape[1] if rank > 1 else 1)
            grads[name], index = grad, WEIGHTS[name]
            a.inputs[index], a.grads[index] = PyArray_BYTES(<ndarray> array), PyArray_BYTES(<ndarray> grad)
        with cython.critical_section(self):
            plan = self.backward_plan
        plan = plan_for(plan, self.layer, "backward", 0, T, B)
        with cython.critical_section(self):
            self.backward_plan = plan
        plan.execute(NULL, a)
        return grads

    cdef dict zero_grads(self, dict weights):
        """Return gradients to the weights of a pass that has computed nothing."""
        cdef dict grads = {}
        for name in weights:
            grads[name] = numpy.zeros_like(weights[name])
        return grads


@cython.final
cdef class CellRunner(LeafRunner):
    """Runs a layer of one cell: an LSTM, a GRU or an RNN."""

    cdef bint reverse
    cdef int saved_count  # arrays [T,B,H] on a tape beside h
    cdef Py_ssize_t hidden_size

    def __init__(self, layer):
        LeafRunner.__init__(self, layer)
        self.reverse, self.saved_count, self.hidden_size = layer.reverse, TAPE_ARRAYS[layer._kernel], layer.hidden_size

    cdef tuple forward_sublayer(self, ForwardContext context, ndarray x, state, reset_state, bint reverse, y):
        """Run the cell over all steps; in training keep what each of them saves."""
        cdef Pass a
        cdef Py_ssize_t T = context.T, B = context.B
        cdef ndarray h
        weights = context.weights[self.layer]
        saved = tape = None
        clear_pass(&a)
        a.reverse = reverse ^ self.reverse
        if context.training:
            saved = new_array(self.dtype, self.type_number, 4, self.saved_count, T, B, self.hidden_size)
            state = self.copy_state(state, B)
            if reset_state is not None:
                reset = context.reset[:T]
                reset_state = tuple([None if rows is None else copy_reset_rows(rows, reset) for rows in reset_state])
            self.set_saved(saved, <const void **> a.outputs)
        h = self.new_rows(T, B, self.output_size) if y is None or context.training else y
        if T and B and self.output_size:
            last_state = self.new_state(B, &a.outputs[H_LAST])
            self.set_state(state, &a.inputs[H_PREV])
            self.set_state(reset_state, a.reset_state, a.reset_layout)
            step_mask = context.step_mask(a.reverse)
            if step_mask is not None:
                a.step_mask = <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.inputs[X], a.outputs[OUT_H] = PyArray_BYTES(x), PyArray_BYTES(h)
            set_layout(&a.x_layout, x)
            set_layout(&a.y_layout, h)
            self.plan_and_run_forward(weights, &a, T, B, context.threads)
        else:
            step_mask, last_state = context.step_mask(a.reverse), self.copy_state(state, B)
        if y is None:
            y = h
        elif y is not h:
            PyArray_CopyInto(<ndarray> y, h)
        if context.training:
            tape = CellTape(weights.arrays, x, state, reset_state, saved, h, step_mask, bool(a.reverse))
        return y, last_state, tape

    cdef void set_saved(self, ndarray saved, const void **outputs) noexcept:
        """Set where the outputs of the steps beside h are, one behind the other."""
        cdef int k
        for k in range(self.saved_count):
            outputs[OUT_H + 1 + k] = PyArray_BYTES(saved) + k * PyArray_STRIDES(saved)[0]

    cdef tuple backward_sublayer(self, tape, ndarray d_y, d_last, d_reset_state, d_x):
        """Compute the gradients of all steps from what they saved."""
        cdef Pass a
        cdef ndarray x, h, x_grad
        cdef Py_ssize_t T, B
        clear_pass(&a)
        weights, x, state, reset_state, saved, h, step_mask, a.reverse = tape
        T, B = PyArray_DIMS(x)[0], PyArray_DIMS(x)[1]
        x_grad = self.new_rows(T, B, self.input_size) if d_x is None else d_x
        if PyArray_SIZE(h) == 0:
            x_grad[...] = 0
            return x_grad, self.copy_state(d_last, B), self.zero_grads(weights)
        d_initial = self.new_state(B, &a.grads[H_PREV])
        self.set_state(state, &a.inputs[H_PREV])
        self.set_state(d_last, &a.inputs[H_LAST_GRAD])
        self.set_state(reset_state, a.reset_state, a.reset_layout)
        self.set_state(d_reset_state, <const void **> a.reset_state_grad, a.reset_grad_layout)
        self.set_saved(saved, a.inputs)
        if step_mask is not None:
            a.step_mask = <const unsigned char *> PyArray_BYTES(<ndarray?> step_mask)
        a.inputs[X], a.inputs[OUT_H], a.inputs[H_GRAD] = PyArray_BYTES(x), PyArray_BYTES(h), PyArray_BYTES(d_y)
        a.grads[X] = PyArray_BYTES(x_grad)
        set_layout(&a.y_grad_layout, d_y)
        set_layout(&a.x_grad_layout, x_grad)
        return x_grad, d_initial, self.plan_and_run_backward(weights, &a, T, B)


@cython.final
cdef class DenseRunner(LeafRunner):
    """Runs a dense layer, for all steps or, with `last`, for the last step of each row."""

    cdef tuple forward_sublayer(self, ForwardContext context, ndarray x, state, reset_state, bint reverse, y):
        """Compute y at all steps or, with `last`, at the last step of each row."""
        cdef Pass a
        cdef Py_ssize_t T = context.T, B = context.B
        cdef ndarray rows
        weights = context.weights[self.layer]
        step_mask = last_steps = tape = None
        if self.over_time:
            if context.lengths is not None:
                if self.layer._in_head and context.head_lengths is not None:  # None where it is called alone
                    step_mask = context.head_step_mask()
                else:
                    step_mask = context.step_mask(reverse)
        else:
            last_steps = LastSteps(T, self.find_last_steps(context), self.layer._directions_of_x())
            rows = self.new_rows(1, B, self.input_size)
            self.copy_last_rows(last_steps, rows, x, True)
            x, T, y = rows, 1, None if y is None else y[None]
        rows = self.new_rows(T, B, self.output_size) if y is None or context.training else y
        if PyArray_SIZE(rows):
            clear_pass(&a)
            a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.inputs[X], a.outputs[OUT_H] = PyArray_BYTES(x), PyArray_BYTES(rows)
            set_layout(&a.x_layout, x)
            set_layout(&a.y_layout, rows)
            self.plan_and_run_forward(weights, &a, T, B, context.threads)
        if y is None:
            y = rows
        elif y is not rows:
            PyArray_CopyInto(<ndarray> y, rows)
        if context.training:
            tape = DenseTape(weights.arrays, x, rows, step_mask, last_steps)
        return y if last_steps is None else y[0], (), tape

    cdef tuple backward_sublayer(self, tape, ndarray d_y, d_last, d_reset_state, d_x):
        """Compute the gradients; with `last` the gradient to x is zero at steps that were not read."""
        cdef Pass a
        cdef ndarray x, y, x_grad
        cdef Py_ssize_t T, B
        weights, x, y, step_mask, last_steps = tape
        T, B = PyArray_DIMS(x)[0], PyArray_DIMS(x)[1]
        if last_steps is not None:
            d_y = d_y[None]
        x_grad = self.new_rows(T, B, self.input_size) if d_x is None or last_steps is not None else d_x
        if PyArray_SIZE(y):
            clear_pass(&a)
            a.step_mask = NULL if step_mask is None else <const unsigned char *> PyArray_BYTES(<ndarray> step_mask)
            a.inputs[X], a.inputs[OUT_H], a.inputs[H_GRAD] = PyArray_BYTES(x), PyArray_BYTES(y), PyArray_BYTES(d_y)
            a.grads[X] = PyArray_BYTES(x_grad)
            set_layout(&a.y_grad_layout, d_y)
            set_layout(&a.x_grad_layout, x_grad)
            grads = self.plan_and_run_backward(weights, &a, T, B)
        else:
            x_grad[...] = 0
            grads = self.zero_grads(weights)
        if last_steps is None:
            return x_grad, (), grads
        if d_x is None:
            d_x = self.new_rows(last_steps.T, B, self.input_size)
        d_x[...] = 0
        self.copy_last_rows(last_steps, x_grad, d_x, False)
        return d_x, (), grads

    # --------------------------------------------------------------------------------------------------- with `last`
    cdef ndarray find_last_steps(self, ForwardContext context):
        """Return the last step of each row, [B]."""
        cdef npy_intp B = context.B
        cdef ndarray steps = PyArray_SimpleNew(1, &B, NPY_INT64)
        cdef int64_t *step = <int64_t *> PyArray_BYTES(steps)
        cdef Py_ssize_t b
        for b in range(B):
            step[b] = context.T - 1
            if context.head_lengths is not None:
                step[b] = (<const int64_t *> PyArray_BYTES(<ndarray> context.head_lengths))[b] - 1
        return steps

    cdef int copy_last_rows(self, last_steps, ndarray rows, ndarray x, bint gathers) except -1:
        """Copy to `rows` [1,B,I] from the last steps of x [T,B,I], or to x unless it `gathers`."""
        cdef Py_ssize_t b, size, offset = 0, itemsize = PyArray_ITEMSIZE(x), B = PyArray_DIMS(x)[1]  # in bytes
        cdef const int64_t *last_step = <const int64_t *> PyArray_BYTES(<ndarray> last_steps.last_step)
        cdef char *row
        cdef char *step
        for direction_size, is_reverse in last_steps.directions:
            size = direction_size * itemsize
            for b in range(B):
                row = PyArray_BYTES(rows) + b * self.input_size * itemsize + offset
                step = PyArray_BYTES(x) + b * PyArray_STRIDES(x)[1] + offset
                if not is_reverse:
                    step += last_step[b] * PyArray_STRIDES(x)[0]
                if gathers:
                    memcpy(row, step, size)
                else:
                    memcpy(step, row, size)
            offset += size
        return 0


cdef class CompositeRunner(Runner):
    """Runs a layer that consists of other layers, by their runners."""

    cdef tuple names, runners  # of the layers

    def __init__(self, layer):
        Runner.__init__(self, layer)
        self.names, self.runners = tuple(layer._layers), ()
        for sublayer in layer._layers.values():
            self.runners += (sublayer._runner,)

    cdef bint takes_state(self, state, Py_ssize_t B) except -1:
        """Return whether `state` is None or a tuple of states that the layers take."""
        cdef Py_ssize_t k
        if state is None:
            return True
        if type(state) is not tuple or len(<tuple> state) != len(self.runners):
            return False
        for k in range(len(self.runners)):
            if not (<Runner> self.runners[k]).takes_state((<tuple> state)[k], B):
                return False
        return True

    cdef dict join_grads(self, list layer_grads):
        """Return the gradients of all layers by the names that this one has for its weights."""
        cdef dict grads = {}
        cdef Py_ssize_t k
        for k in range(len(self.runners)):
            layer_name = self.names[k]
            for name, array in (<dict> layer_grads[k]).items():
                grads[f"{layer_name}.{name}"] = array
        return grads


@cython.final
cdef class StackRunner(CompositeRunner):
    """Runs a `Stack`."""

    cdef tuple forward_sublayer(self, ForwardContext context, ndarray x, state, reset_state, bint reverse, y):
        """Run the layers from the lowest to the highest, which alone writes to y if that is an array."""
        cdef list last_states = [], tapes = []
        cdef Py_ssize_t k, top = len(self.runners) - 1
        for k in range(top + 1):
            layer_state = None if state is None else (<tuple> state)[k]
            layer_reset_state = None if reset_state is None else (<tuple> reset_state)[k]
            x, layer_state, tape = (<Runner> self.runners[k]).forward_sublayer(
                context, x, layer_state, layer_reset_state, reverse, y if k == top else None
            )
            last_states.append(layer_state)
            tapes.append(tape)
        return x, tuple(last_states), tapes

    cdef tuple backward_sublayer(self, tape, ndarray d_y, d_last, d_reset_state, d_x):
        """Run the backward passes of the layers from the highest to the lowest."""
        cdef list d_states = [], layer_grads = []
        cdef Py_ssize_t k
        for k in range(len(self.runners) - 1, -1, -1):
            d_state = None if d_last is None else (<tuple> d_last)[k]
            layer_d_reset_state = None if d_reset_state is None else (<tuple> d_reset_state)[k]
            results = (<Runner> self.runners[k]).backward_sublayer(
                tape[k], d_y, d_state, layer_d_reset_state, None if k else d_x
            )
            d_y = results[0]
            d_states.append(results[1])
            layer_grads.append(results[2])
        d_states.reverse()
        layer_grads.reverse()
        return d_y, tuple(d_states), self.join_grads(layer_grads)


@cython.final
cdef class BidirectionalRunner(CompositeRunner):
    """Runs a `Bidirectional`: two layers side by side, of which the second one runs in the other direction."""

    cdef tuple forward_sublayer(self, ForwardContext context, ndarray x, state, reset_state, bint reverse, y):
        """Run both layers over x; each of them writes to its half of y."""
        cdef Py_ssize_t half = self.output_size // 2
        if y is None:
            y = self.new_rows(context.T, context.B, self.output_size)
        fw, bw = (None, None) if state is None else state
        y_fw, y_bw = y[:, :, :half], y[:, :, half:]
        _, last_fw, tape_fw = (<Runner> self.runners[0]).forward_sublayer(context, x, fw, None, reverse, y_fw)
        _, last_bw, tape_bw = (<Runner> self.runners[1]).forward_sublayer(context, x, bw, None, not reverse, y_bw)
        return y, (last_fw, last_bw), (tape_fw, tape_bw)

    cdef tuple backward_sublayer(self, tape, ndarray d_y, d_last, d_reset_state, d_x):
        """Run the backward passes of both layers, and add up their gradients to x."""
        cdef Py_ssize_t half = self.output_size // 2
        fw, bw = (None, None) if d_last is None else d_last
        tape_fw, tape_bw = tape
        d_x, d_fw, grads_fw = (<Runner> self.runners[0]).backward_sublayer(tape_fw, d_y[:, :, :half], fw, None, d_x)
        d_x_bw, d_bw, grads_bw = (<Runner> self.runners[1]).backward_sublayer(tape_bw, d_y[:, :, half:], bw, None, None)
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.add(d_x, d_x_bw, out=d_x)
        return d_x, (d_fw, d_bw), self.join_grads([grads_fw, grads_bw])
