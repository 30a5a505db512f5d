"""The passes of a layer over PyTorch's tensors, which it reads and writes by their addresses.

Nothing of PyTorch's is imported or linked: a tensor's public methods tell what it is and where its memory is, which
takes less than half as long as `Tensor.numpy`.

Letters: T time, B batch, I input, H cell, P the numbers in a row of h; k is the index of a tensor, a state or a
direction.  `storages` is a list to which functions append the storages of tensors whose addresses they return: the
addresses are valid as long as the list exists.
"""
cimport cython
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.string cimport memcpy, memset

from blockcell._layers cimport KernelPlan, plan_from
from passes.arrays cimport STATES, Pass, clear_pass
from passes.indices cimport (
    BIAS, BIAS_C, BIAS_HC, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV, OUT_H, W, W_C, W_C_H, W_H, W_P_H, X
)
from passes.steps cimport Layout
from product.half cimport float_to_half, half, half_to_float
from product.real cimport number

cdef enum:
    WEIGHTS_PER_DIRECTION = 5  # at most
    DIRECTIONS = 2


cdef void add_biases(const number *a, const number *b, number *sums, Py_ssize_t n) noexcept nogil:
    """Write the sums of n numbers of two biases to `sums`, which overlaps neither."""
    cdef Py_ssize_t k
    for k in range(n):
        if number is half:
            sums[k] = float_to_half(half_to_float(a[k]) + half_to_float(b[k]))
        else:
            sums[k] = a[k] + b[k]


cdef size_t extent_of(tuple shape, tuple strides, size_t itemsize) except? 0:
    """Return the number of bytes from the first number of a tensor to the end of the last one."""
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


cdef int hold_memory(list storages, name, tensor, size_t address, size_t extent) except -1:
    """Keep a tensor's memory, `extent` bytes from `address` on, as long as `storages` exists; refuse a tensor whose
    storage has fewer.

    Another thread may give the tensor a new storage meanwhile, or resize the one that it has.  So the storage is held,
    and PyTorch made to refuse to resize it, as it does from the first call of `Tensor.numpy` on.
    """
    cdef size_t start, size
    storage = tensor.untyped_storage()
    if storage.resizable():
        if not tensor.is_cpu:
            raise ValueError(f"blockcell: {name} is on {tensor.device}; expected cpu")
        forbid_resizing(tensor, storage)
    storages.append(storage)
    start, size = storage.data_ptr(), storage.nbytes()
    if extent and not (start <= address and extent <= size and address - start <= size - extent):
        raise ValueError(
            f"blockcell: {name} has shape {tuple(tensor.shape)}, but its storage has {size} bytes alone"
        )
    return 0


def hold_storage(name, tensor):
    """Return the storage of a tensor, after making PyTorch refuse to resize it; raise a ValueError if it is too small.

    PyTorch's own functions read tensors without a look at the sizes of their storages, so this is for tensors that they
    are about to read.
    """
    cdef list storages = []
    extent = extent_of(tuple(tensor.shape), tensor.stride(), tensor.element_size())
    hold_memory(storages, name, tensor, tensor.data_ptr(), extent)
    return storages[0]


def array_of(name, tensor):
    """Return the memory of a tensor as an array of numpy's, or a copy where it is to be negated; raise a ValueError if
    its storage is too small."""
    tensor = tensor.detach()  # the array holds this one, whose storage nobody can replace
    hold_storage(name, tensor)
    return tensor.numpy(force=True)


cdef char *read_tensor(
    list storages, name, tensor, tuple shape, dtype, Py_ssize_t itemsize, Layout *layout
) except? NULL:
    """Return the address of a tensor of this shape and dtype, or of a copy if a kernel cannot read it as it is.

    name : of the tensor, in messages
    layout : the caller's; written: where the rows of the tensor, [T,B,.] or [B,.], lie in memory.  NULL if a kernel can
        read it without gaps alone
    """
    cdef size_t address, extent = itemsize  # bytes
    cdef Py_ssize_t length
    cdef bint is_unreadable
    if tensor.dtype is not dtype or tensor.shape != shape:
        raise ValueError(
            f"blockcell: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected {shape} and {dtype}"
        )
    address = tensor.data_ptr()
    is_unreadable = address % itemsize or tensor.is_neg()
    if is_unreadable or not (tensor.is_contiguous() if layout is NULL else tensor.stride(-1) == 1):
        hold_memory(storages, name, tensor, address, extent_of(shape, tensor.stride(), itemsize))
        tensor = tensor.resolve_neg().contiguous()
        if is_unreadable:
            tensor = tensor.clone()
        address = tensor.data_ptr()
    if layout is NULL:
        for length in shape:
            extent *= length
    else:
        strides = tensor.stride()
        extent = extent_of(shape, strides, itemsize)
        layout.step, layout.row, _ = strides if len(shape) == 3 else (0, *strides)
    hold_memory(storages, name, tensor, address, extent)
    return <char *> address


def refuse_count(name, count, expected):
    """Raise a ValueError that says how many tensors there are, and how many were expected."""
    raise ValueError(f"blockcell: there are {count} {name}; expected {' or '.join(map(str, expected))}")


def refuse_reset_states():
    """Raise a ValueError that says which passes states at resets are for."""
    raise ValueError("blockcell: there are reset_states; expected a sequence in one direction, with resets")


cdef int check_count(name, tensors, Py_ssize_t expected) except -1:
    """Refuse a list of more or fewer tensors."""
    if len(tensors) != expected:
        refuse_count(name, len(tensors), (expected,))
    return 0


cdef void copy_or_clear(char *target, const char *source, Py_ssize_t size) noexcept nogil:
    """Copy `size` bytes, or clear them if the source is NULL.  With none, both pointers may be NULL, which C's own
    functions must not get."""
    if size == 0:
        return
    if source is NULL:
        memset(target, 0, size)
    else:
        memcpy(target, source, size)


cdef class TensorKernel:
    """A kernel of a layer for tensors of one set of sizes: of one direction, of two, or of a single step.

    Parameters
    ----------
    planned : tuple or None
        The kernel with its plan, as for `plan_from`; None where nothing is to be computed.
    sizes : tuple of int
        T, B, I, H, P.
    layout : WeightLayout
        Which weights the layer has: of how many directions, with biases or not, with a projection or not.
    weight_shapes : dict of str to tuple
        The shapes of the weights of a direction, by name, in the order of torch.nn.
    dtype, step_mask_dtype : torch.dtype
        Of all tensors but the step mask, and of the step mask.
    itemsize : int
        Bytes of a number.
    summed_gates : int
        For so many gates, the first ones, only the sum of the two biases counts.
    states : tuple of str
        Their names; the first one is h.
    tape_arrays : int
        How many arrays [T,B,H] the tape has for each direction.
    single : bool
        Whether x is [B,I] and states are [B,.], in one direction, and there is no y: that is the state h.
    threads : int
    """

    cdef KernelPlan plan
    cdef object dtype, step_mask_dtype
    cdef Py_ssize_t T, B, I, H, P, itemsize
    cdef Py_ssize_t bias_size, summed_size  # numbers of a bias: all, and those of the summed gates
    cdef int directions, weights_per_direction, tape_arrays
    cdef bint single, bias, projected
    cdef tuple states, x_shape, y_shape, state_shapes, reset_state_shapes, tape_shape, step_mask_shape
    cdef tuple weight_names, weight_shapes
    cdef Py_ssize_t[STATES] state_bytes  # of one direction

    def __init__(
        self, planned, sizes, layout, dict weight_shapes, dtype, step_mask_dtype, itemsize, summed_gates, states,
        tape_arrays, single, threads
    ):
        cdef Py_ssize_t T, B, I, H, P
        cdef int k
        T, B, I, H, P = sizes
        self.T, self.B, self.I, self.H, self.P, self.itemsize = T, B, I, H, P, itemsize
        self.plan = None if planned is None else plan_from(planned, 0, T, B, I, H, threads)
        self.dtype, self.step_mask_dtype = dtype, step_mask_dtype
        self.directions, self.bias, self.projected = layout
        self.bias_size, self.summed_size = weight_shapes["w_ih"][0], summed_gates * H
        self.states, self.tape_arrays, self.single = states, tape_arrays, single
        widths = (P, H)[:len(states)]
        if single:
            self.x_shape, self.y_shape, self.state_shapes = (B, I), (B, P), tuple([(B, width) for width in widths])
        else:
            self.x_shape, self.y_shape = (T, B, I), (T, B, self.directions * P)
            self.state_shapes = tuple([(self.directions, B, width) for width in widths])
        self.reset_state_shapes = tuple([(T, B, width) for width in widths])
        self.tape_shape, self.step_mask_shape = (self.directions, tape_arrays, T, B, H), (DIRECTIONS, T, B)
        self.weight_names, self.weight_shapes = tuple(weight_shapes), tuple(weight_shapes.values())
        self.weights_per_direction = len(weight_shapes)
        assert self.directions <= DIRECTIONS and len(states) <= STATES
        assert self.weights_per_direction <= WEIGHTS_PER_DIRECTION
        for k in range(len(states)):
            self.state_bytes[k] = B * widths[k] * itemsize

    cdef int read_weights(self, list storages, weights, int per_direction, char **addresses) except -1:
        """Read the weights of all directions, or those without biases.

        addresses : the caller's; written
        """
        cdef int k, j
        for k in range(self.directions * per_direction):
            j = k % per_direction
            if j == 2 and per_direction < self.weights_per_direction:  # the projection, behind the biases
                j = self.weights_per_direction - 1
            addresses[k] = read_tensor(
                storages, self.weight_names[j], weights[k], self.weight_shapes[j], self.dtype, self.itemsize, NULL
            )
        return 0

    cdef int read_states(self, list storages, states, char **addresses, suffix="") except -1:
        """Read states, or gradients to them, whose names have a suffix.

        states : a sequence that is empty or has None for a state that is not given
        addresses : the caller's; written, NULL for a state that is not given
        """
        cdef int k
        for k in range(len(self.states)):
            addresses[k] = NULL
            if len(states) != 0 and states[k] is not None:
                addresses[k] = read_tensor(
                    storages, self.states[k] + suffix, states[k], self.state_shapes[k], self.dtype, self.itemsize, NULL
                )
        return 0

    cdef int read_reset_states(self, list storages, states, step_mask, Pass *a) except -1:
        """Read the states at resets, of which there are none where they are zero.

        a : what it has of them is set
        """
        cdef int k
        if len(states) == 0:
            return 0
        check_count("reset_states", states, len(self.states))
        if self.single or self.directions > 1 or step_mask is None:
            refuse_reset_states()
        for k in range(len(self.states)):
            a.reset_state[k] = read_tensor(
                storages, self.states[k] + "_reset", states[k], self.reset_state_shapes[k], self.dtype, self.itemsize,
                &a.reset_layout[k]
            )
        return 0

    cdef void copy_states(self, char **target, char **source) noexcept:
        """Copy the states, or gradients to them, of all directions; they are zero where the source is NULL."""
        cdef int k
        for k in range(len(self.states)):
            copy_or_clear(target[k], source[k], self.directions * self.state_bytes[k])

    cdef void set_saved(self, char *tape, int direction, const void **outputs) noexcept:
        """Set where the tape of all directions has the outputs of the steps of one direction, beside h."""
        cdef Py_ssize_t size = self.T * self.B * self.H * self.itemsize
        cdef int k
        for k in range(self.tape_arrays):
            outputs[OUT_H + 1 + k] = tape + (direction * self.tape_arrays + k) * size

    cdef void set_matrices(self, char **weight, int projection, const void **arrays) noexcept:
        """Set where the matrices of one direction are, or their gradients.

        Gates whose two biases are not summed are a second matrix, the lower rows of w_ih and w_hh.

        weight : w_ih, w_hh and, if there is a projection, at the index `projection` w_hr
        arrays : the inputs or the gradients of a call; written
        """
        arrays[W], arrays[W_H] = weight[0], weight[1]
        arrays[W_C] = weight[0] + self.summed_size * self.I * self.itemsize
        arrays[W_C_H] = weight[1] + self.summed_size * self.P * self.itemsize
        if self.projected:
            arrays[W_P_H] = weight[projection]

    cdef const unsigned char *read_step_mask(self, list storages, step_mask) except? NULL:
        """Return the address of a step mask for both directions; NULL for None."""
        if step_mask is None:
            return NULL
        return <const unsigned char *> read_tensor(
            storages, "step_mask", step_mask, self.step_mask_shape, self.step_mask_dtype, 1, NULL
        )


@cython.final
cdef class TensorForward(TensorKernel):
    """The forward pass."""

    def __call__(self, x, weights, states, step_mask, outputs, reset_states=()):
        """Fill the outputs, contiguous tensors of the caller's own: y, unless this is a single step, the last states,
        and perhaps the tape and a copy of y."""
        cdef Pass a
        cdef char *weight[DIRECTIONS * WEIGHTS_PER_DIRECTION]
        cdef char *initial[STATES]
        cdef char *output[STATES + 3]
        cdef char *block  # memory for biases, then the kernel's
        cdef const unsigned char *flags
        cdef Py_ssize_t itemsize = self.itemsize, bias_bytes = (self.bias_size * itemsize + 63) // 64 * 64
        cdef int k, n = len(self.states), per = self.weights_per_direction, tape = n if self.single else n + 1
        cdef char **last = output + (tape - n)
        cdef list storages = []
        check_count("weights", weights, self.directions * per)
        if len(states) != 0:
            check_count("states", states, n)
        clear_pass(&a)
        a.has_layouts = True
        a.inputs[X] = read_tensor(storages, "x", x, self.x_shape, self.dtype, itemsize, &a.x_layout)
        self.read_weights(storages, weights, per, weight)
        self.read_states(storages, states, initial)
        flags = self.read_step_mask(storages, step_mask)
        self.read_reset_states(storages, reset_states, step_mask, &a)
        for k in range(len(outputs)):
            output[k] = <char *> <size_t> outputs[k].data_ptr()
        if self.plan is None:
            self.copy_states(last, initial)
            return
        a.y_layout.step, a.y_layout.row = self.B * self.directions * self.P, self.directions * self.P
        block = <char *> PyMem_RawMalloc(bias_bytes + self.plan.size)
        if block is NULL:
            raise MemoryError()
        try:
            for k in range(self.directions):
                a.step_mask = NULL if flags is NULL else flags + k * self.T * self.B
                self.run_direction(
                    &a, k, weight + k * per, initial, output, last, output[tape] if len(outputs) > tape else NULL,
                    block, block + bias_bytes
                )
        finally:
            PyMem_RawFree(block)
        if len(outputs) > tape + 1:
            memcpy(output[tape + 1], output[0], self.T * self.B * self.directions * self.P * itemsize)

    cdef run_direction(
        self, Pass *a, int direction, char **weight, char **initial, char **output, char **last, char *tape, char *sums,
        char *scratch
    ):
        """Run the kernel for one direction; direction 1 goes backward in time.

        a : x, the layouts, the step mask and the reset states are set; all else is set here
        weight : of this direction: w_ih, w_hh, b_ih, b_hh and w_hr, or those of them that there are
        initial, last : the states, of all directions; initial ones may be NULL
        output : its first one is y of all directions, unless this is a single step
        tape : of all directions; may be NULL
        sums : written: a bias, the sum of both
        scratch : for the kernel
        """
        cdef int k
        for k in range(len(self.states)):
            a.inputs[H_PREV + k] = NULL if initial[k] is NULL else initial[k] + direction * self.state_bytes[k]
            a.outputs[H_LAST + k] = last[k] + direction * self.state_bytes[k]
        if not self.single:  # whose y is the state h
            a.outputs[OUT_H] = output[0] + direction * self.P * self.itemsize
        if tape is not NULL:
            self.set_saved(tape, direction, <const void **> a.outputs)
        a.reverse = direction == 1
        self.set_matrices(weight, self.weights_per_direction - 1, a.inputs)
        a.inputs[BIAS] = a.inputs[BIAS_C] = a.inputs[BIAS_HC] = sums
        if self.bias:
            if self.itemsize == 8:
                add_biases(<const double *> weight[2], <const double *> weight[3], <double *> sums, self.summed_size)
            elif self.itemsize == 4:
                add_biases(<const float *> weight[2], <const float *> weight[3], <float *> sums, self.summed_size)
            else:
                add_biases(<const half *> weight[2], <const half *> weight[3], <half *> sums, self.summed_size)
            a.inputs[BIAS_C] = weight[2] + self.summed_size * self.itemsize
            a.inputs[BIAS_HC] = weight[3] + self.summed_size * self.itemsize
        else:
            memset(sums, 0, self.bias_size * self.itemsize)
        self.plan.execute(scratch, a)


@cython.final
cdef class TensorBackward(TensorKernel):
    """The backward pass."""

    def __call__(
        self, y, tape, matrices, grads, x, states, step_mask, bint needs_x, outputs, reset_states=(),
        bint needs_reset_states=False
    ):
        """Fill the outputs, contiguous tensors of the caller's own: the gradients to x if it `needs_x`, to the weights
        if there is x, to the states if there are any, and to the states at resets if it `needs_reset_states`.

        `matrices` are the weights without biases, and `grads` those of y, unless this is a single step, and of the last
        states; None for zeros.
        """
        cdef Pass a
        cdef char *weight[DIRECTIONS * WEIGHTS_PER_DIRECTION]
        cdef char *initial[STATES]
        cdef char *last_grad[STATES]
        cdef char *output[1 + DIRECTIONS * WEIGHTS_PER_DIRECTION + 2 * STATES]
        cdef char *y_data
        cdef char *tape_data
        cdef char *y_grad = NULL
        cdef char **weight_grads = output + needs_x
        cdef char **initial_grads = weight_grads + (0 if x is None else self.directions * self.weights_per_direction)
        cdef char **reset_grads
        cdef const unsigned char *flags
        cdef Py_ssize_t itemsize = self.itemsize
        cdef Py_ssize_t state_bytes = (self.B * max(self.H, self.P) * itemsize + 63) // 64 * 64
        cdef char *zeros  # memory for a state of zeros, which begins the block,
        cdef char *no_initial_grads  # for gradients to states that nobody asks for,
        cdef char *scratch  # and for the kernel
        cdef int k, j, n = len(self.states), per = 3 if self.projected else 2
        cdef bint has_states = len(states) != 0
        cdef list storages = []
        check_count("matrices", matrices, self.directions * per)
        check_count("grads", grads, n if self.single else n + 1)
        if has_states:
            check_count("states", states, n)
        reset_grads = initial_grads + (n if has_states else 0)
        check_count("outputs", outputs, reset_grads - output + (n if needs_reset_states else 0))
        clear_pass(&a)
        a.has_layouts = True
        if x is not None:
            a.inputs[X] = read_tensor(storages, "x", x, self.x_shape, self.dtype, itemsize, &a.x_layout)
        y_data = read_tensor(storages, "y", y, self.y_shape, self.dtype, itemsize, &a.y_layout)
        tape_data = read_tensor(storages, "tape", tape, self.tape_shape, self.dtype, itemsize, NULL)
        self.read_weights(storages, matrices, per, weight)
        self.read_states(storages, states, initial)
        if grads[0] is not None:
            y_grad = read_tensor(storages, "y_grad", grads[0], self.y_shape, self.dtype, itemsize, &a.y_grad_layout)
        self.read_states(storages, [None, *grads[1:]] if self.single else grads[1:], last_grad, "_grad")
        flags = self.read_step_mask(storages, step_mask)
        self.read_reset_states(storages, reset_states, step_mask, &a)
        for k in range(len(outputs)):
            output[k] = <char *> <size_t> outputs[k].data_ptr()
        for k in range(n if needs_reset_states else 0):  # zero where there is no reset
            copy_or_clear(reset_grads[k], NULL, self.T * self.state_bytes[k])
            a.reset_state_grad[k] = reset_grads[k]
            a.reset_grad_layout[k].row = self.state_bytes[k] // self.B // itemsize if self.B else 0
            a.reset_grad_layout[k].step = self.state_bytes[k] // itemsize
        if self.plan is None:  # there is no step
            for tensor in outputs:
                tensor.zero_()
            if has_states:
                self.copy_states(initial_grads, last_grad)
            return
        a.x_grad_layout.step, a.x_grad_layout.row = self.B * self.I, self.I
        zeros = <char *> PyMem_RawMalloc((1 + STATES) * state_bytes + self.plan.size)
        if zeros is NULL:
            raise MemoryError()
        memset(zeros, 0, state_bytes)
        no_initial_grads = zeros + state_bytes
        scratch = no_initial_grads + STATES * state_bytes
        if y_grad is NULL:
            a.y_grad_layout.step = a.y_grad_layout.row = 0
        try:
            for k in range(self.directions):
                for j in range(n):
                    a.inputs[H_PREV + j] = initial[j] + k * self.state_bytes[j] if has_states else zeros
                    if last_grad[j] is not NULL:
                        a.inputs[H_LAST_GRAD + j] = last_grad[j] + k * self.state_bytes[j]
                    a.grads[H_PREV + j] = no_initial_grads + j * state_bytes
                    if has_states:
                        a.grads[H_PREV + j] = initial_grads[j] + k * self.state_bytes[j]
                a.inputs[OUT_H] = y_data + k * self.P * itemsize
                a.inputs[H_GRAD] = zeros if y_grad is NULL else y_grad + k * self.P * itemsize
                a.step_mask = NULL if flags is NULL else flags + k * self.T * self.B
                a.grads[X] = output[0] if needs_x else NULL
                a.accumulate_x_grad = a.reverse = k == 1
                self.run_direction(
                    &a, k, tape_data, weight + k * per,
                    NULL if x is None else weight_grads + k * self.weights_per_direction, scratch
                )
        finally:
            PyMem_RawFree(zeros)

    cdef run_direction(self, Pass *a, int direction, char *tape, char **weight, char **grads, char *scratch):
        """Run the kernel for one direction.

        a : what belongs to the direction is set, but for what is set here: the tape, the weights and their gradients
        tape : of all directions
        weight : of this direction: w_ih, w_hh and, if there is a projection, w_hr
        grads : of this direction, in the order of all its weights; written; NULL if nobody asks for them
        scratch : for the kernel
        """
        cdef Py_ssize_t summed_bytes = self.summed_size * self.itemsize
        self.set_saved(tape, direction, a.inputs)
        self.set_matrices(weight, 2, a.inputs)
        if grads is not NULL:
            self.set_matrices(grads, self.weights_per_direction - 1, <const void **> a.grads)
            if self.bias:
                a.grads[BIAS], a.grads[BIAS_HC] = grads[2], grads[3] + summed_bytes
                if not self.projected:  # the projection, its second matrix, has no bias
                    a.grads[BIAS_C] = grads[2] + summed_bytes
        self.plan.execute(scratch, a)
        if grads is not NULL and self.bias:
            memcpy(grads[3], grads[2], summed_bytes)
