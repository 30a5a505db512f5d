"""The forward pass of a layer over PyTorch's tensors, which it takes by their addresses.

Nothing of PyTorch's is imported or linked: a tensor is asked by its public methods what it is and where its memory is,
which takes less than half as long as `Tensor.numpy`.
"""
cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.string cimport memcpy, memset

from blockcell._layers cimport Plan, plan_from
from half cimport float_to_half, half, half_to_float
from passes cimport STATES, Pass
from steps cimport Layout
from tile cimport store

cdef enum:
    PER = 4  # tensors of weights of a direction, at most
    DIRECTIONS = 2

NAMES = "w_ih", "w_hh", "b_ih", "b_hh"


cdef void add(const store *a, const store *b, store *sums, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if store is half:
            sums[k] = float_to_half(half_to_float(a[k]) + half_to_float(b[k]))
        else:
            sums[k] = a[k] + b[k]


cdef char *taken(
    list held, name, tensor, tuple shape, dtype, Py_ssize_t itemsize, Layout *rows
) except? NULL:
    """Where a tensor's memory begins; it stays there as long as `held` does.

    Another thread may give the tensor a new storage meanwhile, or resize the one that it has.  So the storage is held,
    and PyTorch made to refuse to resize it, as it does from the first call of `Tensor.numpy` on.  What a kernel cannot
    read as it is, is copied.  Where there are `rows` [T,B,.] or, of one step, [B,.], these may lie anywhere.
    """
    cdef size_t at, begin, size, extent = itemsize  # bytes
    cdef Py_ssize_t length, T, B
    if tensor.dtype is not dtype or tensor.shape != shape:
        raise ValueError(
            f"blockcell: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected {shape} and {dtype}"
        )
    at = tensor.data_ptr()
    if at % itemsize or tensor.is_neg():
        tensor = tensor.resolve_neg().contiguous().clone()
        at = tensor.data_ptr()
    elif not (tensor.is_contiguous() if rows is NULL else tensor.stride(-1) == 1):
        tensor = tensor.contiguous()
        at = tensor.data_ptr()
    storage = tensor.untyped_storage()
    if storage.resizable():
        tensor.numpy(force=True)
    held.append(storage)
    for length in shape:
        extent *= length
    if rows is not NULL:
        rows.step, rows.row, _ = tensor.stride() if len(shape) == 3 else (0, *tensor.stride())
        if extent:
            T, B, length = shape if len(shape) == 3 else (1, *shape)
            extent = ((T - 1) * rows.step + (B - 1) * rows.row + length) * itemsize
    begin, size = storage.data_ptr(), storage.nbytes()
    if extent and not (begin <= at and extent <= size and at - begin <= size - extent):
        raise ValueError(f"blockcell: {name} has shape {shape}, but its storage has {size} bytes alone")
    return <char *> at


@cython.final
cdef class TensorPass:
    """The forward pass of a layer, in one direction or two, or a single step of it, for tensors of one set of sizes.

    Parameters
    ----------
    found : tuple or None
        What the kernel and its `..._work` return; None where nothing is to be computed.
    dtype, marks_dtype : torch.dtype
        Of the marks, and of all other tensors.
    itemsize : int
        Bytes of a number.
    sizes : tuple of int
        T, B, I, H.
    directions : int
    bias : bool
    gates, summed : int
        Of how many gates, the first ones, only the sum of the two biases counts.
    states : tuple of str
    parts : int
        How many numbers the tape has for each step and cell.
    threads : int
    single : bool
        Whether x is [B,I] and states are [B,H], in one direction, and there is no y: that is the state h.
    """

    cdef Plan plan
    cdef object dtype, marks_dtype
    cdef Py_ssize_t T, B, I, H, itemsize, gates, summed
    cdef int directions, per, parts
    cdef bint single
    cdef tuple states, x_shape, state_shape, marks_shape, weight_shapes

    def __init__(
        self, found, dtype, marks_dtype, itemsize, sizes, directions, bias, gates, summed, states, parts, threads,
        single=False
    ):
        cdef Py_ssize_t T, B, I, H
        T, B, I, H = sizes
        self.T, self.B, self.I, self.H, self.itemsize = T, B, I, H, itemsize
        self.plan = None if found is None else plan_from(found, 0, T, B, I, H, threads)
        self.dtype, self.marks_dtype, self.directions, self.per = dtype, marks_dtype, directions, PER if bias else 2
        self.gates, self.summed, self.states, self.parts = gates * H, summed * H, states, parts
        self.x_shape, self.state_shape, self.marks_shape = (T, B, I), (directions, B, H), (DIRECTIONS, T, B)
        self.single = single
        if single:
            self.x_shape, self.state_shape = (B, I), (B, H)
        self.weight_shapes = (self.gates, I), (self.gates, H), (self.gates,), (self.gates,)
        assert directions <= DIRECTIONS and len(states) <= STATES

    def __call__(self, x, weights, states, marks, outputs):
        """Fill the outputs, contiguous tensors of the caller's own: y, unless this is a single step, the last states, and
        perhaps the tape and a copy of y."""
        cdef Pass a
        cdef char *weight[DIRECTIONS * PER]
        cdef char *first[STATES]
        cdef char *output[STATES + 3]
        cdef char *block
        cdef char *marked = NULL
        cdef Py_ssize_t H = self.H, itemsize = self.itemsize, state = self.B * H * itemsize
        cdef Py_ssize_t biases = (self.gates * itemsize + 63) // 64 * 64
        cdef int k, n = len(self.states), per = self.per, tape = n if self.single else n + 1
        cdef char **last = output + (tape - n)
        cdef list held = []
        if len(weights) != self.directions * per:
            raise ValueError(f"blockcell: there are {len(weights)} weights; expected {self.directions * per}")
        if len(states) != 0 and len(states) != n:
            raise ValueError(f"blockcell: there are {len(states)} states; expected {n} or none")
        a.x = taken(held, "x", x, self.x_shape, self.dtype, itemsize, &a.x_layout)
        for k in range(self.directions * per):
            weight[k] = taken(
                held, NAMES[k % per], weights[k], self.weight_shapes[k % per], self.dtype, itemsize, NULL
            )
        for k in range(n):
            first[k] = NULL
            if len(states) != 0:
                first[k] = taken(held, self.states[k], states[k], self.state_shape, self.dtype, itemsize, NULL)
        if marks is not None:
            marked = taken(held, "marks", marks, self.marks_shape, self.marks_dtype, 1, NULL)
        for k in range(len(outputs)):
            output[k] = <char *> <size_t> outputs[k].data_ptr()
        if self.plan is None:
            for k in range(n):
                if first[k] is NULL:
                    memset(last[k], 0, self.directions * state)
                else:
                    memcpy(last[k], first[k], self.directions * state)
            return
        a.y_layout.step, a.y_layout.row = self.B * self.directions * H, self.directions * H
        block = <char *> PyMem_RawMalloc(biases + self.plan.size)
        if block is NULL:
            raise MemoryError()
        try:
            for k in range(self.directions):
                self.run(&a, k, weight + k * per, first, output, last, output[tape] if len(outputs) > tape else NULL,
                         marked, block, block + biases)
        finally:
            PyMem_RawFree(block)
        if len(outputs) > tape + 1:
            memcpy(output[tape + 1], output[0], self.T * self.B * self.directions * H * itemsize)

    cdef run(
        self, Pass *a, int number, char **weight, char **first, char **output, char **last, char *tape, char *marked,
        char *sums, char *work
    ):
        """One direction, the second one backwards in time.  `sums` has room for the biases."""
        cdef Py_ssize_t state = self.B * self.H * self.itemsize
        cdef int k, n = len(self.states)
        for k in range(n):  # the kernels have h last
            a.first[k] = NULL if first[n - 1 - k] is NULL else first[n - 1 - k] + number * state
            a.last[k] = last[n - 1 - k] + number * state
        a.y = output[0] + number * self.H * self.itemsize
        if self.single:  # what would be h twice is once only
            if n == 1:
                a.last[0] = NULL
            else:
                a.y = NULL
        a.saved = NULL if tape is NULL else tape + number * self.parts * self.T * state
        a.marks = NULL if marked is NULL else <const unsigned char *> marked + number * self.T * self.B
        a.reverse = number == 1
        a.weights[0], a.weights[1] = weight[0], weight[1]
        a.weights[2] = a.weights[3] = a.weights[4] = sums
        if self.per == PER:
            if self.itemsize == 8:
                add(<const double *> weight[2], <const double *> weight[3], <double *> sums, self.summed)
            elif self.itemsize == 4:
                add(<const float *> weight[2], <const float *> weight[3], <float *> sums, self.summed)
            else:
                add(<const half *> weight[2], <const half *> weight[3], <half *> sums, self.summed)
            a.weights[3] = weight[2] + self.summed * self.itemsize
            a.weights[4] = weight[3] + self.summed * self.itemsize
        else:
            memset(sums, 0, self.gates * self.itemsize)
        self.plan.execute(work, a)
