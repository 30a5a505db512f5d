"""Calls of ops whose arguments need no conversion, and arrays for their results.

`OpRunner.match_inputs` looks at every array once: all must have one dtype, be native, aligned and C-contiguous, and
have the shape that the table of ops gives.  Everything else, be it a list, a strided array or a mistake, goes to an
`ArgumentReader` (numbers and switches) or a `Converter` (arrays), which convert it or raise.

Letters: T time, B batch, I input, H cell; k is the position of a tensor among an op's inputs and then outputs, or of an
attribute; d is a dimension of a tensor.  The number of a dtype is its position in DTYPES of blockcell/optable.py.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer
from cython.view cimport memoryview
from libc.string cimport memcmp, memcpy, memset
from numpy cimport (
    NPY_ARRAY_WRITEABLE, NPY_UINT8, PyArray_BYTES, PyArray_CheckExact, PyArray_CLEARFLAGS, PyArray_DIMS,
    PyArray_ISWRITEABLE, PyArray_NBYTES, PyArray_NDIM, PyArray_SimpleNew, PyArray_TYPE, import_array, ndarray, npy_intp
)

import math

import numpy

from blockcell._team import NUMBER, RUN
from blockcell.optable import DTYPES, STORAGE, dims

from numpy_arrays cimport is_like, is_plain, overlap
from product.real cimport number
from schedule.runs cimport RunKernel, load_number

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_GetPointer(NUMBER, "blockcell._team.NUMBER")

cdef RunKernel run_kernel = <RunKernel> PyCapsule_GetPointer(RUN, "blockcell._team.RUN")

cdef const int[::1] TYPES = numpy.array([dtype.num for dtype in DTYPES], numpy.intc)
cdef const int[::1] ITEMSIZES = numpy.array([dtype.itemsize for dtype in DTYPES], numpy.intc)
cdef tuple EMPTY = tuple([numpy.empty(0, dtype) for dtype in DTYPES])  # for peepholes that are not used
cdef int HALF = DTYPES.index(numpy.dtype(numpy.float16))

cdef enum:
    LETTERS = 4  # T, B, I, H
    RANKS = 3
    TENSORS = 32  # no op has more inputs and outputs
    ALIGNMENT = 64  # a cache line
    SMALL = 1 << 17  # bytes of an array below which its alignment is not worth its price
    LARGE = 1 << 19  # while every dimension is below it, no result's number of bytes overflows


cdef struct TensorSpec:  # a tensor of the op, by the table of ops
    int rank
    bint peephole, read, over_time  # `peephole` and `read` as in the table; whether the first dimension is T
    npy_intp[RANKS][LETTERS] factors  # by which the letters are multiplied in the sum that is a dimension: I + H, 4H
    int peephole_input  # gradients of peepholes: the input that they belong to, else -1


def empty(shape, dtype):
    """Return an array without values.  A large one begins at a cache line, so that no two threads write to one line."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not SMALL <= nbytes < 1 << 62:
        return numpy.empty(shape, dtype)
    block = numpy.empty(nbytes + ALIGNMENT, numpy.uint8)
    start = -<size_t> PyArray_BYTES(block) % ALIGNMENT
    # Not numpy.ndarray(shape, dtype, block, start): when memory is short that may give a read-only array.
    return block[start : start + nbytes].view(dtype).reshape(shape)


def frozen_copy(array, ndarray other):
    """Return a read-only copy of an array that is plain and has the other's dtype and shape; else None."""
    if not is_like(array, other):
        return None
    copy = PyArray_SimpleNew(PyArray_NDIM(other), PyArray_DIMS(other), PyArray_TYPE(other))
    memcpy(PyArray_BYTES(<ndarray> copy), PyArray_BYTES(<ndarray> array), PyArray_NBYTES(other))
    PyArray_CLEARFLAGS(<ndarray> copy, NPY_ARRAY_WRITEABLE)
    return copy


cdef bint kernel_takes(array, int type_number, int rank) noexcept:
    """Return whether `array` is of this type and rank, and a kernel can take it as it is."""
    cdef int d
    if not is_plain(array, type_number, rank):
        return False
    for d in range(rank):
        if PyArray_DIMS(<ndarray> array)[d] >= LARGE:
            return False
    return True


cdef npy_intp dimension(const npy_intp *factors, const npy_intp *sizes) noexcept:
    """Return the sum of the sizes T, B, I, H, each times its factor."""
    return factors[0] * sizes[0] + factors[1] * sizes[1] + factors[2] * sizes[2] + factors[3] * sizes[3]


cdef void clear_array(ndarray array) noexcept:
    """Set a C-contiguous array to zero."""
    memset(PyArray_BYTES(array), 0, PyArray_NBYTES(array))


def typed_view(number[::1] array):
    """Return a memoryview of the type that the kernels take."""
    return array


# For each dtype its `typed_view`, and an array to make one of: kernels take dtypes of two bytes as uint16.
cdef tuple TYPED_VIEWS = tuple([typed_view[name] for name in STORAGE.values()])
cdef tuple EMPTY_FOR_VIEWS = tuple([array.view(numpy.uint16) if array.itemsize == 2 else array for array in EMPTY])


cdef bint same_numbers(tuple values, tuple others) except -1:
    """Return whether attributes of an op are the same, bit by bit: 0.0 is not -0.0."""
    cdef double value, other
    cdef Py_ssize_t k
    for k in range(len(values)):
        if isinstance(values[k], tuple):  # an activation
            if not same_numbers(<tuple> values[k], <tuple> others[k]):
                return False
        else:
            value, other = values[k], others[k]
            if memcmp(&value, &other, sizeof(double)) != 0:
                return False
    return True


cdef void point_view(memoryview view, char *data, npy_intp nbytes, int ndim, npy_intp *shape) noexcept:
    """Point a memoryview at contiguous memory that it does not own.

    data, shape : the memory and its `ndim` sizes; whoever owns them keeps them as long as the view is used; may be NULL
    """
    view.view.buf, view.view.len = data, nbytes
    view.view.ndim, view.view.shape, view.view.strides = ndim, <Py_ssize_t *> shape, NULL


cdef class OpArguments:
    """The arguments of an op's function, for one call at a time.

    It takes memoryviews.  Making new ones for each call would add 0.7 us to the 2.0 us of a GRUBlockCell (B = 1,
    I = H = 32), and 1.1 us to the 1.9 us of a small LSTMBlockCellGrad.  So they are made once: `set_array` directs one
    at an array that the call keeps alive, and after `release_arrays` they refer to no memory.
    """

    cdef object function
    cdef list values  # in the order of the function's parameters
    cdef int ready_position  # of the number of threads that are ready
    cdef list views  # the memoryviews among them: of the op's tensors, None for one that is not read, then of scratch
    cdef npy_intp[TENSORS][2] matrices  # the shapes of views of arrays of rank 3
    cdef npy_intp[LETTERS + 1] planned_sizes  # T, B, I, H and threads of the last call,
    cdef tuple planned_attributes  # its attributes,
    cdef npy_intp scratch_size  # and its plan: bytes of scratch,
    cdef int planned_threads  # and the threads that are of use

    def __init__(self, function, int dtype_number, int count, list view_positions, int ready_position):
        cdef unsigned char[::1] scratch = numpy.empty(0, numpy.uint8)
        self.function, self.ready_position = function, ready_position
        self.values, self.views = [None] * count, []
        for position in view_positions[: len(view_positions) - 1]:
            view = None if position is None else TYPED_VIEWS[dtype_number](EMPTY_FOR_VIEWS[dtype_number])
            self.views.append(view)
        self.views.append(scratch)
        for position, view in zip(view_positions, self.views):
            if position is not None:
                self.values[position] = view
        self.planned_sizes[0] = -1

    cdef set_array(self, int k, ndarray array):
        """Point view k at an array; at one of rank 3 as a matrix with a row for each step and batch row."""
        cdef memoryview view = <memoryview> self.views[k]
        cdef npy_intp nbytes = view.view.itemsize
        cdef npy_intp *shape = PyArray_DIMS(array)
        cdef int d, rank = PyArray_NDIM(array)
        if rank == 3:
            self.matrices[k][0], self.matrices[k][1] = shape[0] * shape[1], shape[2]
            shape, rank = self.matrices[k], 2
        for d in range(rank):  # PyArray_NBYTES takes 1 % of the time of a small call
            nbytes *= shape[d]
        point_view(view, PyArray_BYTES(array), nbytes, rank, shape)

    cdef release_arrays(self):
        """Point all views at nothing, before whoever called frees the arrays."""
        for view in self.views:
            if view is not None:
                point_view(<memoryview> view, NULL, 0, 0, NULL)


cdef long long call_function(void *context, int ready) except? -1:
    """Call an op's function on the threads that are ready; return the nanoseconds that having several cost.

    context : its `OpArguments`
    """
    cdef OpArguments arguments = <OpArguments> context
    arguments.values[arguments.ready_position] = ready
    return arguments.function(*arguments.values)


cdef class OpRunner:
    """Runs one op: has what the table says of it as numbers, and the functions, one for each dtype.

    Parameters
    ----------
    op : Op
    functions : tuple of callable
        A function of _ops.pyx for each dtype.
    plan_kernel : callable
        Returns for (T, B, I, H), the number of the dtype, threads and a dict of options a PlannedKernel
        (blockcell/_kernels.py).
    positions : dict of str to int
        The position of each of the functions' parameters by name.
    reader, converter : ArgumentReader, Converter
        Convert attributes and arrays that a kernel cannot take as they are, or raise.
    """

    cdef TensorSpec[TENSORS] specs  # inputs, then outputs
    cdef int input_count, output_count
    cdef int[LETTERS] letter_input, letter_axis  # the input and its dimension that give a letter's value; -1: none
    cdef bint sequence
    cdef type result
    cdef tuple attributes, attribute_types
    cdef int peephole_attribute  # the position of use_peephole among the attributes; -1: none
    cdef tuple functions
    cdef object plan_kernel, reader, converter
    cdef tuple attribute_names
    cdef dict constant_options
    cdef list view_positions  # in the arguments of a function; None for a tensor that is not read
    cdef int argument_count, kernel_position, plan_position, ready_position
    cdef tuple idle_arguments  # for each dtype a list of the OpArguments that no call uses now

    def __init__(self, op, tuple functions, plan_kernel, dict positions, reader, converter):
        cdef int k, d, letter
        self.functions, self.plan_kernel, self.reader, self.converter = functions, plan_kernel, reader, converter
        self.result, self.sequence = op.result, op.sequence
        self.input_count, self.output_count = len(op.inputs), len(op.outputs)
        tensors = op.inputs + op.outputs
        assert len(tensors) <= TENSORS
        self.letter_input = [-1, -1, -1, -1]
        peepholes = [k for k in range(self.input_count) if tensors[k].peephole]
        for k, tensor in enumerate(tensors):
            self.specs[k].rank, self.specs[k].peephole, self.specs[k].read = tensor.rank, tensor.peephole, tensor.read
            self.specs[k].over_time = tensor.shape.startswith("T ")
            for d, factors in enumerate(dims(tensor.shape)):
                self.specs[k].factors[d] = factors
                if k < self.input_count and sum(factors) == 1:
                    letter = factors.index(1)
                    if self.letter_input[letter] < 0:
                        self.letter_input[letter], self.letter_axis[letter] = k, d
            if k >= self.input_count:
                self.specs[k].peephole_input = peepholes.pop(0) if tensor.peephole else -1
        names = [attribute.name for attribute in op.attributes]
        self.attributes, self.attribute_types = op.attributes, tuple([attribute.kind for attribute in op.attributes])
        self.peephole_attribute = names.index("use_peephole") if "use_peephole" in names else -1

        self.attribute_names, self.constant_options = tuple(names), {}
        for name, value in op.constants:
            if value is not None:
                self.constant_options[name] = value
        self.argument_count = len(positions)
        self.view_positions = [positions[tensor.parameter] if tensor.read else None for tensor in tensors]
        self.view_positions.append(positions["scratch"])
        self.kernel_position, self.plan_position = positions["kernel"], positions["plan"]
        self.ready_position = positions["ready"]
        self.idle_arguments = tuple([[] for _ in functions])

    def run(self, tuple arrays, out, num_threads, tuple attributes=(), seq_len_max=None):
        """Run the op.

        Parameters
        ----------
        arrays : tuple
            The inputs in the order of the table, converted where they have to be.
        out : tuple of ndarray or None
            Arrays for the outputs; None for new ones.
        num_threads : int or None
            None for as many threads as users have set.
        attributes : tuple
            The attributes in the order of the table.
        seq_len_max : int, optional
            Of a sequence: the steps that are computed.

        Returns
        -------
        named tuple of ndarray
            `op.result`, with the arrays of `out` if there are any.
        """
        cdef int k, dtype_number = 0
        cdef npy_intp[LETTERS] sizes
        cdef bint use_peephole, converts
        assert len(arrays) == self.input_count and len(attributes) == len(self.attribute_types)
        threads = load_number(number_of_threads) if num_threads is None else self.reader.thread_number(num_threads)
        for k in range(len(self.attribute_types)):
            if type(attributes[k]) is not self.attribute_types[k]:
                attributes = self.reader.attributes(self.attributes, attributes)
                break
        use_peephole = self.peephole_attribute >= 0 and attributes[self.peephole_attribute]
        if self.sequence and type(seq_len_max) is not int:
            seq_len_max = self.reader.integer("seq_len_max", seq_len_max)

        converts = not self.match_inputs(arrays, use_peephole, &dtype_number, sizes) or (
            out is not None and not self.match_outputs(out, dtype_number, arrays, sizes, use_peephole)
        )
        if converts:
            inputs = self.converter.read(arrays, use_peephole)
            arrays, dtype_number = inputs.arrays, inputs.number
            sizes[0], sizes[1], sizes[2], sizes[3] = inputs.letters
        if self.sequence and not 0 <= seq_len_max <= sizes[0]:
            raise self.converter.wrong_steps(seq_len_max, arrays[0])
        if converts:
            arrays, outputs = self.converter.convert(inputs, out)
        elif out is None:
            outputs = self.new_outputs(dtype_number, arrays, sizes, use_peephole)
        else:
            outputs = out
        results = tuple.__new__(self.result, outputs if out is None else out)
        if self.sequence:
            if seq_len_max < sizes[0]:
                for k in range(self.output_count):
                    if self.specs[self.input_count + k].over_time:
                        outputs[k][seq_len_max:] = 0
            sizes[0] = seq_len_max
        if sizes[0] == 0 or sizes[1] == 0 or sizes[3] == 0:
            for k in range(self.output_count):
                clear_array(outputs[k])
            return results
        if dtype_number == HALF and float in self.attribute_types:
            attributes = self.round_attributes(attributes)
        self.compute(dtype_number, arrays, outputs, attributes, use_peephole, sizes, threads)
        return results

    cdef compute(
        self, int dtype_number, tuple arrays, outputs, tuple attributes, bint use_peephole, const npy_intp *sizes,
        int threads
    ):
        """Call the function of this dtype.

        sizes : T, B, I, H of this call; T are the steps that are computed
        """
        cdef OpArguments arguments
        try:
            arguments = self.idle_arguments[dtype_number].pop()
        except IndexError:  # the first call, or more at once than ever before
            arguments = OpArguments(
                self.functions[dtype_number], dtype_number, self.argument_count, self.view_positions,
                self.ready_position
            )
        try:
            self.set_arrays(arguments, arrays, outputs, use_peephole, EMPTY[dtype_number])
            scratch = self.new_scratch(arguments, attributes, sizes, dtype_number, threads)
            arguments.set_array(self.input_count + self.output_count, scratch)
            run_kernel(arguments.planned_threads, call_function, <void *> arguments)
        finally:
            arguments.release_arrays()
            self.idle_arguments[dtype_number].append(arguments)

    cdef tuple round_attributes(self, tuple attributes):
        """Return the attributes with numbers rounded to float16."""
        cdef int k
        cdef list values = []
        for k in range(len(attributes)):
            values.append(self.reader.half(attributes[k]) if self.attribute_types[k] is float else attributes[k])
        return tuple(values)

    cdef set_arrays(self, OpArguments arguments, tuple arrays, outputs, bint use_peephole, empty):
        """Point the memoryviews at the arrays; set gradients of peepholes that are not used to zero."""
        cdef const TensorSpec *spec
        cdef int k
        for k in range(self.input_count):
            spec = &self.specs[k]
            if spec.read:
                arguments.set_array(k, empty if spec.peephole and not use_peephole else arrays[k])
        for k in range(self.output_count):
            if self.specs[self.input_count + k].peephole and not use_peephole:
                clear_array(outputs[k])
            arguments.set_array(self.input_count + k, outputs[k])

    cdef new_scratch(
        self, OpArguments arguments, tuple attributes, const npy_intp *sizes, int dtype_number, int threads
    ):
        """Return new scratch for a call, after a new plan if the last call had other sizes or attributes.

        sizes : T, B, I, H
        """
        cdef npy_intp[LETTERS + 1] plan_sizes = [sizes[0], sizes[1], sizes[2], sizes[3], threads]
        if (
            memcmp(plan_sizes, arguments.planned_sizes, sizeof(plan_sizes)) != 0
            or not same_numbers(attributes, arguments.planned_attributes)
        ):
            options = self.constant_options | dict(zip(self.attribute_names, attributes))
            kernel, plan, arguments.scratch_size, arguments.planned_threads, _ = self.plan_kernel(
                (sizes[0], sizes[1], sizes[2], sizes[3]), dtype_number, threads, options
            )
            arguments.values[self.kernel_position], arguments.values[self.plan_position] = kernel, plan
            arguments.planned_attributes = attributes
            memcpy(arguments.planned_sizes, plan_sizes, sizeof(plan_sizes))
        return PyArray_SimpleNew(1, &arguments.scratch_size, NPY_UINT8)

    cdef bint has_shape(self, int k, ndarray array, const npy_intp *sizes) noexcept:
        """Return whether an array has the shape of tensor k, whose rank it has, where the letters have these sizes."""
        cdef const TensorSpec *spec = &self.specs[k]
        cdef int d
        for d in range(spec.rank):
            if PyArray_DIMS(array)[d] != dimension(spec.factors[d], sizes):
                return False
        return True

    cdef bint match_inputs(self, tuple arrays, bint use_peephole, int *dtype_number, npy_intp *sizes) except -1:
        """Return whether the kernel can take all inputs as they are.

        dtype_number : written: of all arrays, if so
        sizes : written: T, B, I, H, if so; T is 1 for an op of a single step
        """
        cdef const TensorSpec *spec
        cdef int k, letter, source
        if not PyArray_CheckExact(arrays[0]):
            return False
        dtype_number[0] = 0
        while TYPES[dtype_number[0]] != PyArray_TYPE(<ndarray> arrays[0]):
            dtype_number[0] += 1
            if dtype_number[0] == TYPES.shape[0]:
                return False
        for k in range(self.input_count):
            spec, array = &self.specs[k], arrays[k]
            if array is None and spec.peephole and not use_peephole:
                continue
            if not kernel_takes(array, TYPES[dtype_number[0]], spec.rank):
                return False
        for letter in range(LETTERS):
            source = self.letter_input[letter]
            sizes[letter] = PyArray_DIMS(<ndarray> arrays[source])[self.letter_axis[letter]] if source >= 0 else 1
        for k in range(self.input_count):
            if (use_peephole or not self.specs[k].peephole) and not self.has_shape(k, arrays[k], sizes):
                return False
        return True

    cdef list new_outputs(self, int dtype_number, tuple arrays, const npy_intp *sizes, bint use_peephole):
        """Return arrays without values for the outputs.

        sizes : T, B, I, H
        """
        cdef list outputs = []
        cdef npy_intp nbytes
        cdef npy_intp[RANKS] shape = [0, 0, 0]
        cdef const TensorSpec *spec
        cdef int k, d
        for k in range(self.input_count, self.input_count + self.output_count):
            spec = &self.specs[k]
            for d in range(spec.rank):
                shape[d] = dimension(spec.factors[d], sizes)
            if spec.peephole and not use_peephole and arrays[spec.peephole_input] is not None:
                shape[0] = PyArray_DIMS(<ndarray> arrays[spec.peephole_input])[0]
            nbytes = ITEMSIZES[dtype_number]
            for d in range(spec.rank):
                nbytes *= shape[d]
            if nbytes < SMALL:
                outputs.append(PyArray_SimpleNew(spec.rank, shape, TYPES[dtype_number]))
            else:
                outputs.append(empty((shape[0], shape[1], shape[2])[: spec.rank], DTYPES[dtype_number]))
        return outputs

    cdef bint match_outputs(
        self, out, int dtype_number, tuple arrays, const npy_intp *sizes, bint use_peephole
    ) except -1:
        """Return whether the kernel can write to `out` as it is, which no input overlaps.

        sizes : T, B, I, H
        """
        cdef const TensorSpec *spec
        cdef int k, other
        if not isinstance(out, tuple) or len(out) != self.output_count:
            return False
        for k in range(self.output_count):
            spec, array = &self.specs[self.input_count + k], out[k]
            if not kernel_takes(array, TYPES[dtype_number], spec.rank) or not PyArray_ISWRITEABLE(array):
                return False
            if spec.peephole and not use_peephole and arrays[spec.peephole_input] is not None:
                if PyArray_DIMS(<ndarray> array)[0] != PyArray_DIMS(<ndarray> arrays[spec.peephole_input])[0]:
                    return False
            elif not self.has_shape(self.input_count + k, array, sizes):
                return False
            for other in range(self.input_count):
                if arrays[other] is not None and overlap(array, arrays[other]):
                    return False
            for other in range(k):
                if overlap(array, out[other]):
                    return False
        return True
