"""A call's way from its arguments to the kernel, where nothing has to be converted or explained, and its new arrays.

`Binder.match` looks at every array once: one dtype, native, aligned, C-contiguous, and of the shape that the table of
ops gives.  Where anything is otherwise, be it a list, a strided array or an error, `run` asks `blockcell._bind.Call`, a
subclass, which converts or raises, from the same table.
"""
from cpython.pycapsule cimport PyCapsule_Import
from cython.view cimport memoryview
from libc.string cimport memcmp, memcpy, memset
from numpy cimport (
    NPY_FLOAT16, NPY_FLOAT32, NPY_FLOAT64, NPY_UINT8, PyArray_BYTES, PyArray_CheckExact, PyArray_DIMS,
    PyArray_ISWRITEABLE, PyArray_NBYTES, PyArray_NDIM, PyArray_SimpleNew, PyArray_TYPE, import_array, ndarray, npy_intp
)

import math

import numpy

from blockcell._team import ready, report
from blockcell.optable import DTYPES, dims

from arrays cimport is_plain, overlap
from half cimport half

import_array()

cdef const int *number_of_threads = <const int *> PyCapsule_Import("blockcell._team.NUMBER", 0)

cdef tuple EMPTY = tuple([numpy.empty(0, dtype) for dtype in DTYPES])  # for peepholes that are not used

cdef enum:
    FLOAT, DOUBLE, HALF  # the order of DTYPES
    KINDS
    LETTERS = 4  # T, B, I, H
    RANKS = 3
    TENSORS = 32  # at least the inputs and outputs of the largest op
    ALIGNMENT = 64  # a cache line
    SMALL = 1 << 17  # bytes of an array below which its alignment is not worth its price
    LARGE = 1 << 19  # while every dimension is below it, no result's number of bytes overflows

cdef int[KINDS] TYPES = [NPY_FLOAT32, NPY_FLOAT64, NPY_FLOAT16]


cdef struct Spec:
    int rank
    bint peephole, read, over_time
    npy_intp[RANKS][LETTERS] factors
    int weight  # gradients of peepholes: the input that they belong to


def empty(shape, dtype):
    """numpy.empty; a large array begins a cache line, so that kernels write lines whole, each by one thread only."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not SMALL <= nbytes < 1 << 62:
        return numpy.empty(shape, dtype)
    block = numpy.empty(nbytes + ALIGNMENT, numpy.uint8)
    start = -<size_t> PyArray_BYTES(block) % ALIGNMENT
    # Not numpy.ndarray(shape, dtype, block, start): without memory for a look at the block, that would be read-only.
    return block[start : start + nbytes].view(dtype).reshape(shape)


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


cdef class Frame:
    """A kernel's memoryviews, for one call at a time.

    Making one of an array costs more than all else that is done for the array.  So they are made once, of the dtype
    that the kernel expects, and `point` has them show the arrays of a call.
    """

    cdef list views
    cdef npy_intp[LETTERS + 1] asked  # steps, B, I, H and threads of the last call,
    cdef npy_intp work  # and how many bytes of scratch that needs, and how many threads it takes
    cdef int planned

    def __init__(self, int number, int views):
        cdef unsigned char[::1] scratch = numpy.empty(0, numpy.uint8)
        self.views = []
        for _ in range(views - 1):
            view = typed_view(number)
            self.views.append(view)
        self.views.append(scratch)
        self.asked[0] = -1

    cdef point(self, int k, ndarray array):
        cdef memoryview view = <memoryview> self.views[k]
        view.view.buf, view.view.len = PyArray_BYTES(array), PyArray_NBYTES(array)
        view.view.ndim, view.view.shape = PyArray_NDIM(array), <Py_ssize_t *> PyArray_DIMS(array)
        view.view.strides = NULL  # C-contiguous

    cdef let_go(self):
        """Nothing is kept of a call's arrays."""
        cdef memoryview view
        for each in self.views:
            view = <memoryview> each
            view.view.buf, view.view.len, view.view.ndim, view.view.shape = NULL, 0, 0, NULL


cdef typed_view(int number):
    """A memoryview as the kernels of the dtype have it."""
    cdef float[::1] floats
    cdef double[::1] doubles
    cdef half[::1] halves
    if number == FLOAT:
        floats = EMPTY[FLOAT]
        return floats
    if number == DOUBLE:
        doubles = EMPTY[DOUBLE]
        return doubles
    halves = EMPTY[HALF].view(numpy.uint16)
    return halves


cdef class Binder:
    """One op: its row of the table as numbers, and its kernels, one for each dtype."""

    cdef Spec[TENSORS] specs
    cdef int inputs, outputs
    cdef int views  # the memoryviews that a kernel takes, the last of which is that of its scratch
    cdef int[LETTERS] source, axis  # the input and its dimension that give a letter's value
    cdef bint sequence, takes_clip, takes_peephole, ifco
    cdef readonly object op
    cdef type result
    cdef tuple kernels
    cdef tuple frames  # for each dtype a list of those that no call uses
    cdef object work

    def __init__(self, op, tuple kernels, work):
        cdef int k, d, letter
        self.op, self.kernels, self.work = op, kernels, work
        self.result, self.sequence, self.ifco = op.result, op.sequence, op.gates[1] == "f"
        attributes = [attribute.name for attribute in op.attributes]
        self.takes_clip, self.takes_peephole = "cell_clip" in attributes, "use_peephole" in attributes
        self.inputs, self.outputs = len(op.inputs), len(op.outputs)
        self.views = sum([tensor.read for tensor in op.inputs]) + self.outputs + 1
        self.frames = [], [], []
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

    def run(
        self, tuple arrays, out, num_threads, seq_len_max=None, use_peephole=False, forget_bias=0.0, cell_clip=0.0
    ):
        """The op's named tuple for `arrays`, which are the inputs of the table."""
        cdef int k, number = 0
        cdef npy_intp[LETTERS] sizes
        cdef Frame frame
        cdef list arguments
        threads = number_of_threads[0] if num_threads is None else self.thread_number(num_threads)
        if use_peephole is not True and use_peephole is not False:
            use_peephole = self.switch("use_peephole", use_peephole)
        if type(forget_bias) is not float:
            forget_bias = self.number("forget_bias", forget_bias)
        if type(cell_clip) is not float:
            cell_clip = self.number("cell_clip", cell_clip)
        if self.sequence and type(seq_len_max) is not int:
            seq_len_max = self.integer("seq_len_max", seq_len_max)

        outputs = self.match(arrays, out, use_peephole, &number, sizes)
        if outputs is None:
            arrays, (number, sizes[0], sizes[1], sizes[2], sizes[3], outputs) = self.convert(
                arrays, out, use_peephole, seq_len_max
            )
        results = tuple.__new__(self.result, outputs if out is None else out)
        if self.sequence:
            steps = sizes[0]
            if not 0 <= seq_len_max <= steps:
                raise self.wrong_steps(seq_len_max, steps, arrays[0])
            if seq_len_max < steps:
                for k in range(self.outputs):
                    if self.specs[self.inputs + k].over_time:
                        outputs[k][seq_len_max:] = 0
            sizes[0] = seq_len_max
        if sizes[1] == 0 or sizes[3] == 0 or (self.sequence and sizes[0] == 0):
            for k in range(self.outputs):
                clear(outputs[k])
            return results
        if number == HALF and self.takes_clip:
            forget_bias, cell_clip = self.half(forget_bias), self.half(cell_clip)
        try:
            frame = self.frames[number].pop()
        except IndexError:  # the first call, or more at once than ever before
            frame = Frame(number, self.views)
        try:
            self.point(frame, arrays, outputs, use_peephole, EMPTY[number])
            work = self.scratch(frame, sizes, 8 if number == DOUBLE else 4, threads)
            frame.point(self.views - 1, work)
            arguments = frame.views[:]
            if self.sequence:
                arguments.append(seq_len_max)
            if self.takes_clip:
                arguments.append(forget_bias)
                arguments.append(cell_clip)
            if self.takes_peephole:
                arguments.append(use_peephole)
                if self.sequence:
                    arguments.append(self.ifco)
            arguments.append(threads)
            arguments.append(1 if frame.planned == 1 else ready(frame.planned))
            lost = self.kernels[number](*arguments)
            if frame.planned > 1:
                report(lost)
        finally:
            frame.let_go()
            self.frames[number].append(frame)
        return results

    cdef point(self, Frame frame, tuple arrays, outputs, bint use_peephole, empty):
        """The frame's memoryviews to the arrays."""
        cdef const Spec *spec
        cdef int k, at = 0
        for k in range(self.inputs):
            spec = &self.specs[k]
            if spec.read:
                frame.point(at, empty if spec.peephole and not use_peephole else arrays[k])
                at += 1
        for k in range(self.outputs):
            if self.specs[self.inputs + k].peephole and not use_peephole:
                clear(outputs[k])
            frame.point(at, outputs[k])
            at += 1

    cdef scratch(self, Frame frame, const npy_intp *sizes, int itemsize, int threads):
        cdef npy_intp[LETTERS + 1] asked = [sizes[0], sizes[1], sizes[2], sizes[3], threads]
        if memcmp(asked, frame.asked, sizeof(asked)) != 0:
            frame.work, frame.planned = self.work(sizes[0], sizes[1], sizes[2], sizes[3], itemsize, threads)
            memcpy(frame.asked, asked, sizeof(asked))
        return PyArray_SimpleNew(1, &frame.work, NPY_UINT8)

    cdef bint fits(self, int k, ndarray array, const npy_intp *sizes) noexcept:
        cdef const Spec *spec = &self.specs[k]
        cdef int d
        for d in range(spec.rank):
            if PyArray_DIMS(array)[d] != size(spec.factors[d], sizes):
                return False
        return True

    cdef match(self, tuple arrays, out, bint use_peephole, int *number, npy_intp *sizes):
        """The outputs, with the dtype's number and the letters' values; None where somebody must look closer."""
        cdef const Spec *spec
        cdef int k, letter, source
        if not PyArray_CheckExact(arrays[0]):
            return None
        number[0] = 0
        while TYPES[number[0]] != PyArray_TYPE(<ndarray> arrays[0]):
            number[0] += 1
            if number[0] == KINDS:
                return None
        for k in range(self.inputs):
            spec, array = &self.specs[k], arrays[k]
            if array is None and spec.peephole and not use_peephole:
                continue
            if not as_it_is(array, TYPES[number[0]], spec.rank):
                return None
        for letter in range(LETTERS):
            source = self.source[letter]
            sizes[letter] = PyArray_DIMS(<ndarray> arrays[source])[self.axis[letter]] if source >= 0 else 0
        for k in range(self.inputs):
            if (use_peephole or not self.specs[k].peephole) and not self.fits(k, arrays[k], sizes):
                return None
        if out is None:
            return self.allocate(number[0], arrays, sizes, use_peephole)
        return out if self.accept(out, TYPES[number[0]], arrays, sizes, use_peephole) else None

    cdef list allocate(self, int number, tuple arrays, const npy_intp *sizes, bint use_peephole):
        cdef list outputs = []
        cdef npy_intp itemsize = DTYPES[number].itemsize, nbytes
        cdef npy_intp[RANKS] shape = [0, 0, 0]
        cdef const Spec *spec
        cdef int k, d
        for k in range(self.inputs, self.inputs + self.outputs):
            spec = &self.specs[k]
            for d in range(spec.rank):
                shape[d] = size(spec.factors[d], sizes)
            if spec.peephole and not use_peephole and arrays[spec.weight] is not None:
                shape[0] = PyArray_DIMS(<ndarray> arrays[spec.weight])[0]
            nbytes = itemsize
            for d in range(spec.rank):
                nbytes *= shape[d]
            if nbytes < SMALL:
                outputs.append(PyArray_SimpleNew(spec.rank, shape, TYPES[number]))
            else:
                outputs.append(empty((shape[0], shape[1], shape[2])[: spec.rank], DTYPES[number]))
        return outputs

    cdef bint accept(
        self, out, int type_number, tuple arrays, const npy_intp *sizes, bint use_peephole
    ) except -1:
        cdef const Spec *spec
        cdef int k, other
        if not isinstance(out, tuple) or len(out) != self.outputs:
            return False
        for k in range(self.outputs):
            spec, array = &self.specs[self.inputs + k], out[k]
            if not as_it_is(array, type_number, spec.rank) or not PyArray_ISWRITEABLE(array):
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
