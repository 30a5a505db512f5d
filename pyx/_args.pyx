"""The common case of a call's arguments, quickly: do the arrays fit the op's row in the table just as they are?

`Matcher.bind` looks at every array once, through the buffer protocol: one dtype, native, aligned, C-contiguous, and of
the shape that the table gives.  It returns the sizes and the results' arrays, or None where anything is otherwise: a
list, a strided array, an error.  Then `blockcell._bind` converts or explains, from the same table.
"""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer

cdef enum:
    LETTERS = 4  # T, B, I, H
    RANKS = 3
    TENSORS = 32  # at least the inputs and outputs of the largest op
    LARGE = 1 << 19  # a product of three dimensions below it, of 4 H each at most, fits in 63 bits of bytes


cdef struct Spec:
    int rank
    bint peephole
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


cdef class Matcher:
    """One op's inputs and outputs, as numbers.

    Each tensor is given as (one tuple of the letters' factors for each dimension, whether it belongs to a peephole),
    each dtype's empty-array function takes a shape.
    """

    cdef Spec[TENSORS] specs
    cdef int inputs, outputs
    cdef int[LETTERS] source, axis  # the input and its dimension that give a letter's value
    cdef object ndarray, empty
    cdef tuple dtypes

    def __cinit__(self, tuple inputs, tuple outputs, type ndarray, empty, tuple dtypes):
        cdef int k, d, letter
        self.inputs, self.outputs = len(inputs), len(outputs)
        if self.inputs + self.outputs > TENSORS:
            raise ValueError("TENSORS is too small")
        self.ndarray, self.empty, self.dtypes = ndarray, empty, dtypes
        self.source = [-1, -1, -1, -1]
        tensors = inputs + outputs
        peepholes = [k for k in range(self.inputs) if inputs[k][1]]
        for k, (dims, peephole) in enumerate(tensors):
            self.specs[k].rank, self.specs[k].peephole = len(dims), peephole
            for d, factors in enumerate(dims):
                self.specs[k].factors[d] = factors
                if k < self.inputs and sum(factors) == 1:
                    letter = factors.index(1)
                    if self.source[letter] < 0:
                        self.source[letter], self.axis[letter] = k, d
            if k >= self.inputs:
                self.specs[k].same = peepholes.pop(0) if peephole else tensors.index(tensors[k], self.inputs)

    cdef bint look(self, array, Seen *seen) except -1:
        """Whether it is an array that a kernel can take as it is."""
        cdef Py_buffer view
        cdef int d
        if type(array) is not self.ndarray:
            return False
        try:
            PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT)
        except (BufferError, ValueError):  # a dtype that has no buffer
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

    def bind(self, tuple arrays, out, bint use_peephole):
        """(number of the dtype, T, B, I, H, the outputs' arrays), or None where `blockcell._bind` must look closer."""
        cdef Seen[TENSORS] seen
        cdef Py_ssize_t[LETTERS] sizes
        cdef const Spec *spec
        cdef int k, d, m, letter, dtype
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
        dtype = 0 if seen[0].format == b"f" else 1 if seen[0].format == b"d" else 2
        if out is None:
            out = self.allocate(self.dtypes[dtype], seen, sizes, use_peephole)
        elif not self.accept(out, seen, sizes, use_peephole):
            return None
        return dtype, sizes[0], sizes[1], sizes[2], sizes[3], out

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
            outputs.append(self.empty(shape, dtype))
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
