"""A call's way from its arguments to the kernel, where nothing has to be converted or explained.

`Binder.match` looks at every array once, through the buffer protocol: one dtype, native, aligned, C-contiguous, and of
the shape that the table of ops gives.  Where anything is otherwise, be it a list, a strided array or an error, `run`
asks `blockcell._bind.Call`, a subclass, which converts or raises, from the same table.
"""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer

import numpy

from blockcell.optable import DTYPES, dims

cdef object empty = numpy.empty, ndarray = numpy.ndarray
cdef object UINT8 = numpy.dtype(numpy.uint8), UINT16 = numpy.dtype(numpy.uint16)
cdef tuple EMPTY = tuple([numpy.empty(0, dtype) for dtype in DTYPES])  # for peepholes that are not used

cdef enum:
    FLOAT, DOUBLE, HALF  # the order of DTYPES
    LETTERS = 4  # T, B, I, H
    RANKS = 3
    TENSORS = 32  # at least the inputs and outputs of the largest op
    LARGE = 1 << 19  # while every dimension is below it, no result's number of bytes overflows


cdef struct Spec:
    int rank
    bint peephole, read, over_time
    Py_ssize_t[RANKS][LETTERS] factors
    int same  # outputs: the first one of the same shape.  Outputs of peepholes: the input that it belongs to


cdef struct Seen:
    char *start
    Py_ssize_t bytes
    int rank
    char format
    bint readonly
    Py_ssize_t[RANKS] shape


cdef bint overlap(const Seen *a, const Seen *b) noexcept:
    return a.bytes > 0 and b.bytes > 0 and a.start < b.start + b.bytes and b.start < a.start + a.bytes


cdef class Binder:
    """One op: its row of the table as numbers, and its kernels, one for each dtype."""

    cdef Spec[TENSORS] specs
    cdef int inputs, outputs
    cdef int[LETTERS] source, axis  # the input and its dimension that give a letter's value
    cdef bint sequence, takes_clip, takes_peephole, ifco
    cdef readonly object op
    cdef type result
    cdef tuple kernels
    cdef object work, threads

    def __init__(self, op, tuple kernels, work, threads):
        cdef int k, d, letter
        self.op, self.kernels, self.work, self.threads = op, kernels, work, threads
        self.result, self.sequence, self.ifco = op.result, op.sequence, op.gates[1] == "f"
        attributes = [attribute.name for attribute in op.attributes]
        self.takes_clip, self.takes_peephole = "cell_clip" in attributes, "use_peephole" in attributes
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
                shapes = [other.shape for other in op.outputs]
                self.specs[k].same = peepholes.pop(0) if tensor.peephole else self.inputs + shapes.index(tensor.shape)

    def run(
        self, tuple arrays, out, num_threads, seq_len_max=None, use_peephole=False, forget_bias=0.0, cell_clip=0.0
    ):
        """The op's named tuple for `arrays`, which are the inputs of the table."""
        cdef int k, number
        cdef const Spec *spec
        threads = self.threads(None) if num_threads is None else self.thread_number(num_threads)
        if use_peephole is not True and use_peephole is not False:
            use_peephole = self.switch("use_peephole", use_peephole)
        if type(forget_bias) is not float:
            forget_bias = self.number("forget_bias", forget_bias)
        if type(cell_clip) is not float:
            cell_clip = self.number("cell_clip", cell_clip)
        if self.sequence and type(seq_len_max) is not int:
            seq_len_max = self.integer("seq_len_max", seq_len_max)

        bound = self.match(arrays, out, use_peephole)
        if bound is None:
            arrays, bound = self.convert(arrays, out, use_peephole, seq_len_max)
        number, T, B, I, H, outputs = bound
        results = tuple.__new__(self.result, outputs if out is None else out)
        if self.sequence:
            if not 0 <= seq_len_max <= T:
                raise self.wrong_steps(seq_len_max, T, arrays[0])
            if seq_len_max < T:
                for k in range(self.outputs):
                    if self.specs[self.inputs + k].over_time:
                        outputs[k][seq_len_max:] = 0
        if B == 0 or H == 0 or (self.sequence and seq_len_max == 0):
            for output in outputs:
                output.fill(0)
            return results

        arguments = []
        for k in range(self.inputs):
            spec = &self.specs[k]
            if spec.read:
                arguments.append(EMPTY[number] if spec.peephole and not use_peephole else arrays[k])
        for k in range(self.outputs):
            if self.specs[self.inputs + k].peephole and not use_peephole:
                outputs[k].fill(0)
        arguments.extend(outputs)
        if number == HALF:  # which a kernel's memoryview does not know
            arguments = [array.view(UINT16) for array in arguments]
            if self.takes_clip:
                forget_bias, cell_clip = self.half(forget_bias), self.half(cell_clip)
        steps = seq_len_max if self.sequence else T
        arguments.append(empty(self.work(steps, B, I, H, 8 if number == DOUBLE else 4, threads), UINT8))
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
        self.kernels[number](*arguments)
        return results

    cdef bint look(self, array, Seen *seen) except -1:
        """Whether it is an array that a kernel can take as it is."""
        cdef Py_buffer view
        cdef int d
        if type(array) is not ndarray:
            return False
        try:
            PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT)
        except Exception:  # a dtype that has no buffer
            return False
        seen.start, seen.bytes, seen.rank = <char *> view.buf, view.len, view.ndim
        seen.format, seen.readonly = view.format[0], view.readonly
        cdef bint good = (
            view.ndim <= RANKS
            and view.format[0] in b"fde"
            and view.format[1] == 0
            and <size_t> view.buf % <size_t> view.itemsize == 0
            and PyBuffer_IsContiguous(&view, b"C")
        )
        for d in range(view.ndim if good else 0):
            seen.shape[d] = view.shape[d]
            good = good and view.shape[d] < LARGE
        PyBuffer_Release(&view)
        return good

    cdef bint fits(self, int k, const Seen *seen, const Py_ssize_t *sizes) noexcept:
        cdef const Spec *spec = &self.specs[k]
        cdef int d
        for d in range(spec.rank):
            if seen.shape[d] != self.size(spec.factors[d], sizes):
                return False
        return True

    cdef Py_ssize_t size(self, const Py_ssize_t *factors, const Py_ssize_t *sizes) noexcept:
        return factors[0] * sizes[0] + factors[1] * sizes[1] + factors[2] * sizes[2] + factors[3] * sizes[3]

    cdef tuple match(self, tuple arrays, out, bint use_peephole):
        """(number of the dtype, T, B, I, H, the outputs' arrays), or None where somebody must look closer."""
        cdef Seen[TENSORS] seen
        cdef Py_ssize_t[LETTERS] sizes
        cdef const Spec *spec
        cdef int k, letter, number
        for k in range(self.inputs):
            spec, array = &self.specs[k], arrays[k]
            if array is None and spec.peephole and not use_peephole:
                seen[k].bytes, seen[k].rank = 0, -1
            elif not self.look(array, &seen[k]) or seen[k].rank != spec.rank or seen[k].format != seen[0].format:
                return None
        for letter in range(LETTERS):
            sizes[letter] = seen[self.source[letter]].shape[self.axis[letter]] if self.source[letter] >= 0 else 0
        for k in range(self.inputs):
            if (use_peephole or not self.specs[k].peephole) and not self.fits(k, &seen[k], sizes):
                return None
        number = FLOAT if seen[0].format == b"f" else DOUBLE if seen[0].format == b"d" else HALF
        if out is None:
            out = self.allocate(DTYPES[number], seen, sizes, use_peephole)
        elif not self.accept(out, seen, sizes, use_peephole):
            return None
        return number, sizes[0], sizes[1], sizes[2], sizes[3], out

    cdef list allocate(self, dtype, const Seen *seen, const Py_ssize_t *sizes, bint use_peephole):
        cdef list shapes = [], outputs = []
        cdef const Spec *spec
        cdef int k, d
        for k in range(self.inputs, self.inputs + self.outputs):
            spec = &self.specs[k]
            if spec.peephole and not use_peephole and seen[spec.same].rank == 1:
                shape = (seen[spec.same].shape[0],)
            elif spec.peephole or spec.same == k:
                shape = tuple([self.size(spec.factors[d], sizes) for d in range(spec.rank)])
            else:
                shape = shapes[spec.same - self.inputs]
            shapes.append(shape)
            outputs.append(empty(shape, dtype))
        return outputs

    cdef bint accept(self, out, Seen *seen, const Py_ssize_t *sizes, bint use_peephole) except -1:
        cdef const Spec *spec
        cdef int k, other
        if not isinstance(out, tuple) or len(out) != self.outputs:
            return False
        for k in range(self.inputs, self.inputs + self.outputs):
            spec = &self.specs[k]
            if not self.look(out[k - self.inputs], &seen[k]) or seen[k].rank != spec.rank:
                return False
            if seen[k].format != seen[0].format or seen[k].readonly:
                return False
            if spec.peephole and not use_peephole and seen[spec.same].rank == 1:
                if seen[k].shape[0] != seen[spec.same].shape[0]:
                    return False
            elif not self.fits(k, &seen[k], sizes):
                return False
            for other in range(k):
                if overlap(&seen[k], &seen[other]):
                    return False
        return True
