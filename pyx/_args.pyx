"""Calls of ops whose arguments need no conversion, and arrays for their results.

`Call.match` looks at every array once: all must have one dtype, be native, aligned and C-contiguous, and have the shape
that the table of ops gives.  Everything else, be it a list, a strided array or a mistake, goes to an `ArgumentReader`
(numbers and switches) or a `Converter` (arrays), which convert it or raise.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer
from cython.view cimport memoryview
from libc.string cimport memcmp, memcpy, memset
from numpy cimport (
    NPY_ARRAY_WRITEABLE, NPY_UINT8, PyArray_BYTES, PyArray_CheckExact, PyArray_CLEARFLAGS, PyArray_DIMS,
    PyArray_ISWRITEABLE, PyArray_NBYTES, PyArray_NDIM, PyArray_SAMESHAPE, PyArray_SimpleNew, PyArray_TYPE, import_array,
    ndarray, npy_intp
)

import math

import numpy

from blockcell._team import NUMBER, RUN
from blockcell.optable import DTYPES, STORAGE, dims

from numpy_arrays cimport is_plain, overlap
from product.tile cimport store
from schedule.runs cimport Runs

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_GetPointer(NUMBER, "blockcell._team.NUMBER")

cdef Runs run_kernel = <Runs> PyCapsule_GetPointer(RUN, "blockcell._team.RUN")

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


cdef struct Spec:
    int rank
    bint peephole, read, over_time
    npy_intp[RANKS][LETTERS] factors
    int weight  # gradients of peepholes: the input that they belong to


def empty(shape, dtype):
    """numpy.empty; a large array begins at a cache line, so that kernels write whole lines, each from one thread."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not SMALL <= nbytes < 1 << 62:
        return numpy.empty(shape, dtype)
    block = numpy.empty(nbytes + ALIGNMENT, numpy.uint8)
    start = -<size_t> PyArray_BYTES(block) % ALIGNMENT
    # Not numpy.ndarray(shape, dtype, block, start): when memory is short that may give a read-only array.
    return block[start : start + nbytes].view(dtype).reshape(shape)


def frozen_copy(array, ndarray other):
    """A read-only copy of an array that is plain and has the other's dtype and shape; else None."""
    if not is_plain(array, PyArray_TYPE(other), PyArray_NDIM(other)) or not PyArray_SAMESHAPE(<ndarray> array, other):
        return None
    copied = PyArray_SimpleNew(PyArray_NDIM(other), PyArray_DIMS(other), PyArray_TYPE(other))
    memcpy(PyArray_BYTES(<ndarray> copied), PyArray_BYTES(<ndarray> array), PyArray_NBYTES(other))
    PyArray_CLEARFLAGS(<ndarray> copied, NPY_ARRAY_WRITEABLE)
    return copied


cdef bint as_it_is(array, int type_number, int rank) noexcept:
    """Whether it is an array that a kernel can take as it is."""
    cdef int d
    if not is_plain(array, type_number, rank):
        return False
    for d in range(rank):
        if PyArray_DIMS(<ndarray> array)[d] >= LARGE:
            return False
    return True


cdef npy_intp size(const npy_intp *factors, const npy_intp *sizes) noexcept:
    return factors[0] * sizes[0] + factors[1] * sizes[1] + factors[2] * sizes[2] + factors[3] * sizes[3]


cdef void clear(ndarray array) noexcept:
    memset(PyArray_BYTES(array), 0, PyArray_NBYTES(array))


def typed_view(store[::1] array):
    """A memoryview of the type that the kernels take."""
    return array


# For each dtype its `typed_view`, and the array to view: kernels take dtypes of two bytes as uint16.
cdef tuple TYPED_VIEW = tuple([typed_view[name] for name in STORAGE.values()])
cdef tuple VIEWED = tuple([array.view(numpy.uint16) if array.itemsize == 2 else array for array in EMPTY])


cdef void show(memoryview view, char *data, npy_intp nbytes, int ndim, npy_intp *shape) noexcept:
    """Point the view at contiguous memory that it does not own."""
    view.view.buf, view.view.len = data, nbytes
    view.view.ndim, view.view.shape, view.view.strides = ndim, <Py_ssize_t *> shape, NULL


cdef class Frame:
    """A kernel's arguments, for one call at a time.

    A kernel takes memoryviews.  Making new ones for each call would add 0.7 us to the 2.0 us of a GRUBlockCell (B = 1,
    I = H = 32), and 1.1 us to the 1.9 us of a small LSTMBlockCellGrad.  So they are made once: `point` directs one at
    an array that the call keeps alive, and after `let_go` they refer to no memory.
    """

    cdef object kernel
    cdef list arguments  # in its order
    cdef int ready_place
    cdef list views  # the memoryviews among them: of the table's tensors, None if not read, then of scratch
    cdef npy_intp[LETTERS + 1] asked  # steps, B, I, H and threads of the last call,
    cdef npy_intp work  # and how many bytes of scratch that needs, and how many threads it takes
    cdef int planned

    def __init__(self, kernel, int number, list arguments, list places, int ready_place):
        cdef unsigned char[::1] scratch = numpy.empty(0, numpy.uint8)
        self.kernel, self.ready_place = kernel, ready_place
        self.arguments, self.views = arguments[:], []
        for place in places[: len(places) - 1]:
            view = None if place is None else TYPED_VIEW[number](VIEWED[number])
            self.views.append(view)
        self.views.append(scratch)
        for place, view in zip(places, self.views):
            if place is not None:
                self.arguments[place] = view
        self.asked[0] = -1

    cdef point(self, int k, ndarray array):
        show(<memoryview> self.views[k], PyArray_BYTES(array), PyArray_NBYTES(array), PyArray_NDIM(array),
             PyArray_DIMS(array))

    cdef let_go(self):
        """Keep nothing of a call's arrays."""
        for view in self.views:
            if view is not None:
                show(<memoryview> view, NULL, 0, 0, NULL)


cdef long long call_kernel(void *context, int ready) except? -1:
    cdef Frame frame = <Frame> context
    frame.arguments[frame.ready_place] = ready
    return frame.kernel(*frame.arguments)


cdef class Call:
    """Calls of one op: its row of the table as numbers, and its kernels, one for each dtype.

    `places` gives the position of each of the kernels' parameters by name.  What a kernel cannot take as it is goes to
    `reader` or `converter`.
    """

    cdef Spec[TENSORS] specs
    cdef int inputs, outputs
    cdef int[LETTERS] source, axis  # the input and its dimension that give a letter's value
    cdef bint sequence
    cdef type result
    cdef tuple attributes, kinds  # of the table, and their types
    cdef int peephole  # which of them is use_peephole; -1: none
    cdef tuple kernels
    cdef object work, reader, converter
    cdef list arguments  # a kernel's as every frame begins: its constants, None for all others
    cdef list view_places, attribute_places  # in them; None for a tensor that is not read
    cdef int steps_place, threads_place, members_place, ready_place
    cdef tuple frames  # for each dtype a list of those that no call uses

    def __init__(self, op, tuple kernels, work, dict places, reader, converter):
        cdef int k, d, letter
        self.kernels, self.work, self.reader, self.converter = kernels, work, reader, converter
        self.result, self.sequence = op.result, op.sequence
        self.inputs, self.outputs = len(op.inputs), len(op.outputs)
        tensors = op.inputs + op.outputs
        assert len(tensors) <= TENSORS
        self.source = [-1, -1, -1, -1]
        peepholes = [k for k in range(self.inputs) if tensors[k].peephole]
        for k, tensor in enumerate(tensors):
            self.specs[k].rank, self.specs[k].peephole, self.specs[k].read = tensor.rank, tensor.peephole, tensor.read
            self.specs[k].over_time = tensor.shape.startswith("T ")
            for d, factors in enumerate(dims(tensor.shape)):
                self.specs[k].factors[d] = factors
                if k < self.inputs and sum(factors) == 1:
                    letter = factors.index(1)
                    if self.source[letter] < 0:
                        self.source[letter], self.axis[letter] = k, d
            if k >= self.inputs:
                self.specs[k].weight = peepholes.pop(0) if tensor.peephole else -1
        names = [attribute.name for attribute in op.attributes]
        self.attributes, self.kinds = op.attributes, tuple([attribute.kind for attribute in op.attributes])
        self.peephole = names.index("use_peephole") if "use_peephole" in names else -1

        self.arguments = [None] * len(places)
        for name, value in op.constants:
            self.arguments[places[name]] = value
        self.view_places = [places[tensor.name] if tensor.read else None for tensor in tensors] + [places["work"]]
        self.attribute_places = [places[name] for name in names]
        self.steps_place = places["seq_len_max"] if op.sequence else -1
        self.threads_place, self.members_place, self.ready_place = places["threads"], places["members"], places["ready"]
        self.frames = tuple([[] for _ in kernels])

    def run(self, tuple arrays, out, num_threads, tuple attributes=(), seq_len_max=None):
        """The op's named tuple; `arrays` and `attributes` are the table's inputs and attributes, in its order."""
        cdef int k, number = 0
        cdef npy_intp[LETTERS] sizes
        cdef bint use_peephole, plain
        assert len(arrays) == self.inputs and len(attributes) == len(self.kinds)
        threads = number_of_threads[0] if num_threads is None else self.reader.thread_number(num_threads)
        for k in range(len(self.kinds)):
            if type(attributes[k]) is not self.kinds[k]:
                attributes = self.reader.attributes(self.attributes, attributes)
                break
        use_peephole = self.peephole >= 0 and attributes[self.peephole]
        if self.sequence and type(seq_len_max) is not int:
            seq_len_max = self.reader.integer("seq_len_max", seq_len_max)

        plain = self.match(arrays, use_peephole, &number, sizes) and (
            out is None or self.accept(out, number, arrays, sizes, use_peephole)
        )
        if not plain:
            given = self.converter.read(arrays, use_peephole)
            arrays, number = given.arrays, given.number
            sizes[0], sizes[1], sizes[2], sizes[3] = given.letters
        if self.sequence and not 0 <= seq_len_max <= sizes[0]:
            raise self.converter.wrong_steps(seq_len_max, arrays[0])
        if not plain:
            arrays, outputs = self.converter.convert(given, out)
        elif out is None:
            outputs = self.allocate(number, arrays, sizes, use_peephole)
        else:
            outputs = out
        results = tuple.__new__(self.result, outputs if out is None else out)
        if self.sequence:
            if seq_len_max < sizes[0]:
                for k in range(self.outputs):
                    if self.specs[self.inputs + k].over_time:
                        outputs[k][seq_len_max:] = 0
            sizes[0] = seq_len_max
        if sizes[1] == 0 or sizes[3] == 0 or (self.sequence and sizes[0] == 0):
            for k in range(self.outputs):
                clear(outputs[k])
            return results
        if number == HALF and float in self.kinds:
            attributes = self.rounded(attributes)
        self.compute(number, arrays, outputs, attributes, use_peephole, sizes, threads)
        return results

    cdef compute(
        self, int number, tuple arrays, outputs, tuple attributes, bint use_peephole, const npy_intp *sizes, int threads
    ):
        """Run the kernel."""
        cdef int k
        cdef Frame frame
        try:
            frame = self.frames[number].pop()
        except IndexError:  # the first call, or more at once than ever before
            frame = Frame(self.kernels[number], number, self.arguments, self.view_places, self.ready_place)
        try:
            self.point(frame, arrays, outputs, use_peephole, EMPTY[number])
            work = self.scratch(frame, sizes, max(ITEMSIZES[number], 4), threads)  # half is computed in float
            frame.point(self.inputs + self.outputs, work)
            for k in range(len(attributes)):
                frame.arguments[<int> self.attribute_places[k]] = attributes[k]
            if self.sequence:
                frame.arguments[self.steps_place] = sizes[0]
            run_kernel(frame.planned, call_kernel, <void *> frame)
        finally:
            frame.let_go()
            self.frames[number].append(frame)

    cdef tuple rounded(self, tuple attributes):
        """The numbers rounded to float16."""
        cdef int k
        cdef list values = []
        for k in range(len(attributes)):
            values.append(self.reader.half(attributes[k]) if self.kinds[k] is float else attributes[k])
        return tuple(values)

    cdef point(self, Frame frame, tuple arrays, outputs, bint use_peephole, empty):
        """The frame's memoryviews to the arrays; gradients of peepholes that are not used become zero."""
        cdef const Spec *spec
        cdef int k
        for k in range(self.inputs):
            spec = &self.specs[k]
            if spec.read:
                frame.point(k, empty if spec.peephole and not use_peephole else arrays[k])
        for k in range(self.outputs):
            if self.specs[self.inputs + k].peephole and not use_peephole:
                clear(outputs[k])
            frame.point(self.inputs + k, outputs[k])

    cdef scratch(self, Frame frame, const npy_intp *sizes, int itemsize, int threads):
        cdef npy_intp[LETTERS + 1] asked = [sizes[0], sizes[1], sizes[2], sizes[3], threads]
        if memcmp(asked, frame.asked, sizeof(asked)) != 0:
            frame.work, planned, members = self.work(sizes[0], sizes[1], sizes[2], sizes[3], itemsize, threads)
            frame.planned = planned
            frame.arguments[self.threads_place], frame.arguments[self.members_place] = planned, members
            memcpy(frame.asked, asked, sizeof(asked))
        return PyArray_SimpleNew(1, &frame.work, NPY_UINT8)

    cdef bint fits(self, int k, ndarray array, const npy_intp *sizes) noexcept:
        cdef const Spec *spec = &self.specs[k]
        cdef int d
        for d in range(spec.rank):
            if PyArray_DIMS(array)[d] != size(spec.factors[d], sizes):
                return False
        return True

    cdef bint match(self, tuple arrays, bint use_peephole, int *number, npy_intp *sizes) except -1:
        """Whether the arrays can go in as they are; then also the number of their dtype and the letters' values."""
        cdef const Spec *spec
        cdef int k, letter, source
        if not PyArray_CheckExact(arrays[0]):
            return False
        number[0] = 0
        while TYPES[number[0]] != PyArray_TYPE(<ndarray> arrays[0]):
            number[0] += 1
            if number[0] == TYPES.shape[0]:
                return False
        for k in range(self.inputs):
            spec, array = &self.specs[k], arrays[k]
            if array is None and spec.peephole and not use_peephole:
                continue
            if not as_it_is(array, TYPES[number[0]], spec.rank):
                return False
        for letter in range(LETTERS):
            source = self.source[letter]
            sizes[letter] = PyArray_DIMS(<ndarray> arrays[source])[self.axis[letter]] if source >= 0 else 0
        for k in range(self.inputs):
            if (use_peephole or not self.specs[k].peephole) and not self.fits(k, arrays[k], sizes):
                return False
        return True

    cdef list allocate(self, int number, tuple arrays, const npy_intp *sizes, bint use_peephole):
        cdef list outputs = []
        cdef npy_intp nbytes
        cdef npy_intp[RANKS] shape = [0, 0, 0]
        cdef const Spec *spec
        cdef int k, d
        for k in range(self.inputs, self.inputs + self.outputs):
            spec = &self.specs[k]
            for d in range(spec.rank):
                shape[d] = size(spec.factors[d], sizes)
            if spec.peephole and not use_peephole and arrays[spec.weight] is not None:
                shape[0] = PyArray_DIMS(<ndarray> arrays[spec.weight])[0]
            nbytes = ITEMSIZES[number]
            for d in range(spec.rank):
                nbytes *= shape[d]
            if nbytes < SMALL:
                outputs.append(PyArray_SimpleNew(spec.rank, shape, TYPES[number]))
            else:
                outputs.append(empty((shape[0], shape[1], shape[2])[: spec.rank], DTYPES[number]))
        return outputs

    cdef bint accept(self, out, int number, tuple arrays, const npy_intp *sizes, bint use_peephole) except -1:
        """Whether the kernel can write to `out` as it is."""
        cdef const Spec *spec
        cdef int k, other
        if not isinstance(out, tuple) or len(out) != self.outputs:
            return False
        for k in range(self.outputs):
            spec, array = &self.specs[self.inputs + k], out[k]
            if not as_it_is(array, TYPES[number], spec.rank) or not PyArray_ISWRITEABLE(array):
                return False
            if spec.peephole and not use_peephole and arrays[spec.weight] is not None:
                if PyArray_DIMS(<ndarray> array)[0] != PyArray_DIMS(<ndarray> arrays[spec.weight])[0]:
                    return False
            elif not self.fits(self.inputs + k, array, sizes):
                return False
            for other in range(self.inputs):
                if arrays[other] is not None and overlap(array, arrays[other]):
                    return False
            for other in range(k):
                if overlap(array, out[other]):
                    return False
        return True
