"""The passes of a layer over PyTorch's tensors, which it takes by their addresses.

Nothing of PyTorch's is imported or linked: a tensor is asked by its public methods what it is and where its memory is,
which takes less than half as long as `Tensor.numpy`.
"""
cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.string cimport memcpy, memset

from blockcell._layers cimport KernelPlan, plan_from
from passes.arrays cimport STATES, Pass
from passes.steps cimport Layout
from product.half cimport float_to_half, half, half_to_float
from product.tile cimport store

cdef enum:
    PER = 5  # tensors of weights of a direction, at most
    DIRECTIONS = 2


cdef void add(const store *a, const store *b, store *sums, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if store is half:
            sums[k] = float_to_half(half_to_float(a[k]) + half_to_float(b[k]))
        else:
            sums[k] = a[k] + b[k]


cdef size_t extent_of(tuple shape, tuple strides, size_t itemsize) except? 0:
    """Count the bytes from the first number of a tensor to the end of the last one."""
    cdef size_t numbers = 1, length, stride
    for length, stride in zip(shape, strides):
        if length == 0:
            return 0
        numbers += (length - 1) * stride
    return numbers * itemsize


cdef forbid_resizing(tensor, storage):
    """Make PyTorch refuse to resize a tensor's storage, as it does once an array of numpy's may share it."""
    if not tensor.is_neg():  # else `numpy` would read all of it, to negate it
        try:
            tensor.numpy(force=True)
            return
        except TypeError:  # numpy has no bfloat16
            pass
    tensor.as_strided((0,), (1,), 0).short().set_(storage).numpy()


cdef int hold_memory(list held, name, tensor, size_t at, size_t extent) except -1:
    """Keep a tensor's memory, `extent` bytes from the address `at` on, as long as `held` exists; refuse a tensor whose
    storage has fewer.

    Another thread may give the tensor a new storage meanwhile, or resize the one that it has.  So the storage is held,
    and PyTorch made to refuse to resize it, as it does from the first call of `Tensor.numpy` on.
    """
    cdef size_t begin, size
    storage = tensor.untyped_storage()
    if storage.resizable():
        if not tensor.is_cpu:
            raise ValueError(f"blockcell: {name} is on {tensor.device}; expected cpu")
        forbid_resizing(tensor, storage)
    held.append(storage)
    begin, size = storage.data_ptr(), storage.nbytes()
    if extent and not (begin <= at and extent <= size and at - begin <= size - extent):
        raise ValueError(
            f"blockcell: {name} has shape {tuple(tensor.shape)}, but its storage has {size} bytes alone"
        )
    return 0


def hold(name, tensor):
    """The storage of a tensor, which cannot be resized any more; a ValueError if it is too small.

    PyTorch's own functions read tensors without a look at the sizes of their storages, so this is for tensors that they
    are about to read.
    """
    cdef list held = []
    extent = extent_of(tuple(tensor.shape), tensor.stride(), tensor.element_size())
    hold_memory(held, name, tensor, tensor.data_ptr(), extent)
    return held[0]


def array_of(name, tensor):
    """The memory of a tensor as an array of numpy's, or a copy where it is to be negated; a ValueError if its storage
    is too small."""
    tensor = tensor.detach()  # the array holds this one, whose storage nobody can replace
    hold(name, tensor)
    return tensor.numpy(force=True)


cdef char *taken(
    list held, name, tensor, tuple shape, dtype, Py_ssize_t itemsize, Layout *rows
) except? NULL:
    """Where a tensor's memory begins; it stays there as long as `held` does.

    What a kernel cannot read as it is, is copied.  Where there are `rows` [T,B,.] or, of one step, [B,.], these may lie
    anywhere.
    """
    cdef size_t at, extent = itemsize  # bytes
    cdef Py_ssize_t length
    cdef bint unreadable
    if tensor.dtype is not dtype or tensor.shape != shape:
        raise ValueError(
            f"blockcell: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected {shape} and {dtype}"
        )
    at = tensor.data_ptr()
    unreadable = at % itemsize or tensor.is_neg()
    if unreadable or not (tensor.is_contiguous() if rows is NULL else tensor.stride(-1) == 1):
        hold_memory(held, name, tensor, at, extent_of(shape, tensor.stride(), itemsize))
        tensor = tensor.resolve_neg().contiguous()
        if unreadable:
            tensor = tensor.clone()
        at = tensor.data_ptr()
    if rows is NULL:
        for length in shape:
            extent *= length
    else:
        strides = tensor.stride()
        extent = extent_of(shape, strides, itemsize)
        rows.step, rows.row, _ = strides if len(shape) == 3 else (0, *strides)
    hold_memory(held, name, tensor, at, extent)
    return <char *> at


cdef void clear_bytes(char *memory, Py_ssize_t size) noexcept nogil:
    """Write zeros to `size` bytes.  With none, `memory` may be NULL, which C's own function must not get."""
    if size:
        memset(memory, 0, size)


cdef void copy_bytes(char *target, const char *source, Py_ssize_t size) noexcept nogil:
    """Copy `size` bytes.  With none, both pointers may be NULL, which C's own function must not get."""
    if size:
        memcpy(target, source, size)


cdef class Sized:
    """What the passes of a layer over tensors of one set of sizes have in common; in one direction, in two, or of a
    single step.

    Parameters
    ----------
    planned : tuple or None
        The kernel with its plan, as for `plan_from`; None where nothing is to be computed.
    dtype, step_mask_dtype : torch.dtype
        Of the step mask, and of all other tensors.
    itemsize : int
        Bytes of a number.
    sizes : tuple of int
        T, B, I, H.
    directions : int
    bias : bool
    gates, summed : int
        Of how many gates, the first ones, only the sum of the two biases counts.
    states : tuple of str
        The first one is h.
    parts : int
        How many numbers the tape has for each step and cell.
    threads : int
    projection : int
        P, the numbers in a row of h; 0 where these are H.
    single : bool
        Whether x is [B,I] and states are [B,.], in one direction, and there is no y: that is the state h.
    """

    cdef KernelPlan plan
    cdef object dtype, step_mask_dtype
    cdef Py_ssize_t T, B, I, H, P, itemsize, gates, summed
    cdef int directions, per, parts
    cdef bint single, bias, projected
    cdef tuple states, x_shape, y_shape, state_shapes, tape_shape, step_mask_shape, weight_names, weight_shapes
    cdef Py_ssize_t[STATES] state_bytes  # of one direction

    def __init__(
        self, planned, dtype, step_mask_dtype, itemsize, sizes, directions, bias, gates, summed, states, parts, threads,
        projection=0, single=False
    ):
        cdef Py_ssize_t T, B, I, H, P
        cdef int k
        T, B, I, H = sizes
        P = projection or H
        self.T, self.B, self.I, self.H, self.P, self.itemsize = T, B, I, H, P, itemsize
        self.plan = None if planned is None else plan_from(planned, 0, T, B, I, H, threads)
        self.dtype, self.step_mask_dtype, self.directions = dtype, step_mask_dtype, directions
        self.gates, self.summed, self.states, self.parts = gates * H, summed * H, states, parts
        self.single, self.bias, self.projected = single, bias, projection > 0
        widths = (P, H)[:len(states)]
        if single:
            self.x_shape, self.y_shape, self.state_shapes = (B, I), (B, P), tuple([(B, width) for width in widths])
        else:
            self.x_shape, self.y_shape = (T, B, I), (T, B, directions * P)
            self.state_shapes = tuple([(directions, B, width) for width in widths])
        self.tape_shape, self.step_mask_shape = (directions, parts, T, B, H), (DIRECTIONS, T, B)
        weights = {"w_ih": (self.gates, I), "w_hh": (self.gates, P)}
        if bias:
            weights |= {"b_ih": (self.gates,), "b_hh": (self.gates,)}
        if projection:
            weights["w_hr"] = P, H
        self.weight_names, self.weight_shapes, self.per = tuple(weights), tuple(weights.values()), len(weights)
        assert directions <= DIRECTIONS and len(states) <= STATES
        for k in range(len(states)):
            self.state_bytes[k] = B * widths[k] * itemsize

    cdef check(self, what, tensors, int expected):
        if len(tensors) != expected:
            raise ValueError(f"blockcell: there are {len(tensors)} {what}; expected {expected}")

    cdef int take_states(self, list held, states, char **first, suffix="") except -1:
        """Where states are that may be left out, all or, if None, one; or gradients, with a suffix of their names."""
        cdef int k
        for k in range(len(self.states)):
            first[k] = NULL
            if len(states) != 0 and states[k] is not None:
                first[k] = taken(
                    held, self.states[k] + suffix, states[k], self.state_shapes[k], self.dtype, self.itemsize, NULL
                )
        return 0

    cdef const unsigned char *read_step_mask(self, list held, step_mask) except? NULL:
        if step_mask is None:
            return NULL
        return <const unsigned char *> taken(
            held, "step_mask", step_mask, self.step_mask_shape, self.step_mask_dtype, 1, NULL
        )


@cython.final
cdef class TensorPass(Sized):
    """The forward pass."""

    def __call__(self, x, weights, states, step_mask, outputs):
        """Fill the outputs, contiguous tensors of the caller's own: y, unless this is a single step, the last states,
        and perhaps the tape and a copy of y."""
        cdef Pass a
        cdef char *weight[DIRECTIONS * PER]
        cdef char *first[STATES]
        cdef char *output[STATES + 3]
        cdef char *block
        cdef const unsigned char *flags
        cdef Py_ssize_t itemsize = self.itemsize, biases = (self.gates * itemsize + 63) // 64 * 64
        cdef int k, n = len(self.states), per = self.per, tape = n if self.single else n + 1
        cdef char **last = output + (tape - n)
        cdef list held = []
        self.check("weights", weights, self.directions * per)
        if len(states) != 0:
            self.check("states", states, n)
        a.x = taken(held, "x", x, self.x_shape, self.dtype, itemsize, &a.x_layout)
        for k in range(self.directions * per):
            weight[k] = taken(
                held, self.weight_names[k % per], weights[k], self.weight_shapes[k % per], self.dtype, itemsize, NULL
            )
        self.take_states(held, states, first)
        flags = self.read_step_mask(held, step_mask)
        for k in range(len(outputs)):
            output[k] = <char *> <size_t> outputs[k].data_ptr()
        if self.plan is None:
            for k in range(n):
                if first[k] is NULL:
                    clear_bytes(last[k], self.directions * self.state_bytes[k])
                else:
                    copy_bytes(last[k], first[k], self.directions * self.state_bytes[k])
            return
        a.y_layout.step, a.y_layout.row = self.B * self.directions * self.P, self.directions * self.P
        block = <char *> PyMem_RawMalloc(biases + self.plan.size)
        if block is NULL:
            raise MemoryError()
        try:
            for k in range(self.directions):
                a.step_mask = NULL if flags is NULL else flags + k * self.T * self.B
                self.run(&a, k, weight + k * per, first, output, last, output[tape] if len(outputs) > tape else NULL,
                         block, block + biases)
        finally:
            PyMem_RawFree(block)
        if len(outputs) > tape + 1:
            memcpy(output[tape + 1], output[0], self.T * self.B * self.directions * self.P * itemsize)

    cdef run(
        self, Pass *a, int number, char **weight, char **first, char **output, char **last, char *tape, char *sums,
        char *work
    ):
        """One direction, the second one backwards in time.  `sums` has room for the biases."""
        cdef int k, n = len(self.states)
        for k in range(n):  # the kernels have h last
            a.initial_state[n - 1 - k] = NULL if first[k] is NULL else first[k] + number * self.state_bytes[k]
            a.last_state[n - 1 - k] = last[k] + number * self.state_bytes[k]
        a.y = NULL if self.single else output[0] + number * self.P * self.itemsize  # a single step's is the state h
        a.saved = NULL if tape is NULL else tape + number * self.parts * self.T * self.B * self.H * self.itemsize
        a.reverse = number == 1
        a.weights[0], a.weights[1] = weight[0], weight[1]
        a.weights[2] = a.weights[3] = a.weights[4] = sums
        if self.bias:
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
        if self.projected:
            a.weights[3] = weight[self.per - 1]
        self.plan.execute(work, a)


@cython.final
cdef class TensorGradients(Sized):
    """The backward pass."""

    def __call__(self, y, tape, matrices, grads, x, states, step_mask, bint needs_x, outputs):
        """Fill the outputs, contiguous tensors of the caller's own: the gradients to x if it `needs_x`, to the weights
        if there is x, and to the states if there are any.

        `matrices` are the weights without biases, and `grads` those of y, unless this is a single step, and of the last
        states; None for zeros.
        """
        cdef Pass a
        cdef char *weight[DIRECTIONS * PER]
        cdef char *first[STATES]
        cdef char *last[STATES]
        cdef char *output[1 + DIRECTIONS * PER + STATES]
        cdef char *block
        cdef char *kept
        cdef char *x_grad
        cdef char *y_grad = NULL
        cdef char **weight_grads = output + needs_x
        cdef char **first_grads = output + needs_x + (0 if x is None else self.directions * self.per)
        cdef const unsigned char *flags
        cdef Py_ssize_t itemsize = self.itemsize
        cdef Py_ssize_t zeros = (self.B * max(self.H, self.P) * itemsize + 63) // 64 * 64
        cdef Py_ssize_t biases = (self.gates * itemsize + 63) // 64 * 64
        cdef int k, j, n = len(self.states), per = 3 if self.projected else 2
        cdef bint given = len(states) != 0
        cdef list held = []
        self.check("matrices", matrices, self.directions * per)
        self.check("grads", grads, n if self.single else n + 1)
        if given:
            self.check("states", states, n)
        self.check("outputs", outputs, first_grads - output + (n if given else 0))
        a.x = NULL if x is None else taken(held, "x", x, self.x_shape, self.dtype, itemsize, &a.x_layout)
        a.y = taken(held, "y", y, self.y_shape, self.dtype, itemsize, &a.y_layout)
        kept = taken(held, "tape", tape, self.tape_shape, self.dtype, itemsize, NULL)
        for k in range(self.directions * per):
            j = self.per - 1 if k % per == 2 else k % per
            weight[k] = taken(
                held, self.weight_names[j], matrices[k], self.weight_shapes[j], self.dtype, itemsize, NULL
            )
        self.take_states(held, states, first)
        if grads[0] is not None:
            y_grad = taken(held, "y_grad", grads[0], self.y_shape, self.dtype, itemsize, &a.y_grad_layout)
        self.take_states(held, [None, *grads[1:]] if self.single else grads[1:], last, "_grad")
        flags = self.read_step_mask(held, step_mask)
        for k in range(len(outputs)):
            output[k] = <char *> <size_t> outputs[k].data_ptr()
        x_grad = output[0] if needs_x else NULL
        if self.plan is None:
            self.clear(x_grad, NULL if x is None else weight_grads, first_grads if given else NULL, last)
            return
        a.x_grad_layout.step, a.x_grad_layout.row = self.B * self.I, self.I
        block = <char *> PyMem_RawMalloc((1 + STATES) * zeros + 2 * biases + self.plan.size)
        if block is NULL:
            raise MemoryError()
        memset(block, 0, zeros)
        if y_grad is NULL:
            a.y_grad_layout.step = a.y_grad_layout.row = 0
        try:
            for k in range(self.directions):
                for j in range(n):  # the kernels have h last
                    a.initial_state[n - 1 - j] = first[j] + k * self.state_bytes[j] if given else block
                    a.last_state_grad[n - 1 - j] = NULL if last[j] is NULL else last[j] + k * self.state_bytes[j]
                    a.initial_state_grad[n - 1 - j] = (
                        first_grads[j] + k * self.state_bytes[j] if given else block + (1 + j) * zeros
                    )
                a.y_grad = block if y_grad is NULL else y_grad + k * self.P * itemsize
                a.step_mask = NULL if flags is NULL else flags + k * self.T * self.B
                a.x_grad, a.accumulate_x_grad, a.reverse = x_grad, k == 1, k == 1
                self.run(&a, k, kept, weight + k * per, NULL if x is None else weight_grads + k * self.per,
                         block + (1 + STATES) * zeros, block + (1 + STATES) * zeros + 2 * biases)
                a.y = <char *> a.y + self.P * itemsize
        finally:
            PyMem_RawFree(block)

    cdef run(self, Pass *a, int number, char *tape, char **weight, char **grads, char *biases, char *work):
        """One direction.  `biases` has room for both."""
        cdef Py_ssize_t itemsize = self.itemsize
        cdef char *b_ih = biases
        cdef char *b_hh = biases + self.gates * itemsize
        cdef int k
        a.saved = tape + number * self.parts * self.T * self.B * self.H * itemsize
        a.weights[0], a.weights[1] = weight[0], weight[1]
        if self.projected:
            a.weights[3] = weight[2]
        for k in range(5):
            a.weight_grads[k] = NULL
        if grads is not NULL:
            if self.bias:
                b_ih, b_hh = grads[2], grads[3]
            a.weight_grads[0], a.weight_grads[1], a.weight_grads[2] = grads[0], grads[1], b_ih
            a.weight_grads[3], a.weight_grads[4] = b_ih + self.summed * itemsize, b_hh + self.summed * itemsize
            if self.projected:
                a.weight_grads[3] = grads[self.per - 1]
        self.plan.execute(work, a)
        if grads is not NULL:
            memcpy(b_hh, b_ih, self.summed * itemsize)

    cdef clear(self, char *x_grad, char **weight_grads, char **first_grads, char **last):
        """The gradients of nothing: those to the states are what they are after the last step."""
        cdef Py_ssize_t length, size
        cdef int k
        if x_grad is not NULL:
            clear_bytes(x_grad, self.T * self.B * self.I * self.itemsize)
        if weight_grads is not NULL:
            for k in range(self.directions * self.per):
                size = self.itemsize
                for length in self.weight_shapes[k % self.per]:
                    size *= length
                clear_bytes(weight_grads[k], size)
        if first_grads is not NULL:
            for k in range(len(self.states)):
                if last[k] is NULL:
                    clear_bytes(first_grads[k], self.directions * self.state_bytes[k])
                else:
                    copy_bytes(first_grads[k], last[k], self.directions * self.state_bytes[k])
