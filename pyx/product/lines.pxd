"""Lines of reals, in which kernels compute, and arrays in memory, from which lines are loaded and where they go.

A line is 64 bytes: 16 floats or 8 doubles.  An `Array` holds reals, or float16.  Only functions here see which: they
convert float16 to float, which is exact, and round a float to float16 once.

    dst, src, line, space : lines of L reals, in scratch memory or on the stack
    n : numbers of an array, from where it begins to the end of a row; may be more or fewer than a line has
"""
from product.half cimport HAS_LINE_CONVERSIONS, float_to_half, half, half_to_float, line_to_float, line_to_half
from product.real cimport COMPUTES_FLOAT, real

ctypedef fused cleared:
    real
    double

cdef extern from "product/tile.h":
    ctypedef void inline_void "ALWAYS_INLINE_VOID"  # of functions that are inlined everywhere
    ctypedef void noinline_void "NOINLINE_VOID"  # of functions that are never inlined
    const Py_ssize_t L "LANES"  # reals in a line
    const Py_ssize_t REAL_BYTES
    enum:
        LF  # floats in a line

cdef struct Array:  # numbers one behind the other, the caller's or in scratch memory
    char *data  # NULL: there is no such array
    bint is_half  # they are float16, not reals


cdef inline Py_ssize_t lines_in(Py_ssize_t n) noexcept nogil:
    """Return how many lines hold n values."""
    return (n + L - 1) // L


# -------------------------------------------------------------------------------------------------------------- arrays
cdef inline Array array_of(const void *data, bint is_half) noexcept nogil:
    """Return the array that begins at this address."""
    cdef Array array
    array.data, array.is_half = <char *> data, is_half
    return array


cdef inline Array reals(const real *data) noexcept nogil:
    """Return the array of reals that begins at this address."""
    return array_of(data, False)


cdef inline Array no_array() noexcept nogil:
    """Return what stands for an array that a call does not have."""
    return array_of(NULL, False)


cdef inline bint holds_half(Array array) noexcept nogil:
    """Return whether the array holds float16; where doubles are computed none does."""
    return COMPUTES_FLOAT and array.is_half


cdef inline Py_ssize_t itemsize_of(Array array) noexcept nogil:
    """Return the bytes of a number of the array."""
    return REAL_BYTES >> holds_half(array)  # a float16 has half the bytes of a float


cdef inline Array at(Array array, Py_ssize_t n) noexcept nogil:
    """Return the array from number n on."""
    return array_of(array.data + n * itemsize_of(array), array.is_half)


cdef inline void set_arrays(Array *arrays, const void *const *data, Py_ssize_t count, bint is_half) noexcept nogil:
    """Set arrays to those that begin at `count` addresses."""
    cdef Py_ssize_t i
    for i in range(count):
        arrays[i].data, arrays[i].is_half = <char *> data[i], is_half


# ---------------------------------------------------------------------------------------------- lines of reals, float16
cdef inline void load_reals(real *restrict dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """Copy n reals as a line, padded with zeros."""
    cdef Py_ssize_t l
    if n >= L:
        for l in range(L):
            dst[l] = src[l]
        return
    for l in range(L):
        dst[l] = src[l] if l < n else 0


cdef inline void load_halves(real *restrict dst, const half *restrict src, Py_ssize_t n) noexcept nogil:
    """Convert n numbers of float16 to a line, padded with zeros."""
    if n >= LF and HAS_LINE_CONVERSIONS:
        line_to_float(<float *> dst, src)
    else:
        load_halves_one_by_one(dst, src, n)


cdef inline noinline_void load_halves_one_by_one(
    real *restrict dst, const half *restrict src, Py_ssize_t n
) noexcept nogil:
    """Convert n numbers of float16 to a line without instructions for whole lines.  This is not inlined: it is long."""
    cdef Py_ssize_t l
    if n >= LF:
        for l in range(LF):
            dst[l] = <real> half_to_float(src[l])
        return
    for l in range(n):
        dst[l] = <real> half_to_float(src[l])
    for l in range(n, LF):
        dst[l] = 0


cdef inline void store_reals(real *restrict dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """Copy the first n lanes of a line."""
    cdef Py_ssize_t l
    if n >= L:
        for l in range(L):
            dst[l] = src[l]
        return
    for l in range(n):
        dst[l] = src[l]


cdef inline void store_halves(half *restrict dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """Round the first n lanes of a line to float16."""
    if n >= LF and HAS_LINE_CONVERSIONS:
        line_to_half(dst, <const float *> src)
    else:
        store_halves_one_by_one(dst, src, n)


cdef inline noinline_void store_halves_one_by_one(
    half *restrict dst, const real *restrict src, Py_ssize_t n
) noexcept nogil:
    """Round the first n lanes of a line without instructions for whole lines.  This is not inlined: it is long."""
    cdef Py_ssize_t l
    for l in range(min(n, <Py_ssize_t> LF)):
        dst[l] = float_to_half(<float> src[l])


# ---------------------------------------------------------------------------------------- lines, rows and single values
cdef inline inline_void load_line(real *restrict dst, Array src, Py_ssize_t n) noexcept nogil:
    """Load n values of an array as a line, padded with zeros; no value after them is read."""
    if holds_half(src):
        load_halves(dst, <const half *> src.data, n)
    else:
        load_reals(dst, <const real *> src.data, n)


cdef inline bint can_stay(Py_ssize_t n, bint is_half) noexcept nogil:
    """Return whether a line of n values, of float16 or not, can be read where it is: whether it is whole, and reals."""
    return n >= L and not is_half


cdef inline const real *line_at(
    bint in_place, real *space, Array src, Py_ssize_t offset, Py_ssize_t n
) noexcept nogil:
    """Return the line of n values from number `offset` of an array on, or its copy in `space`, padded with zeros.

    in_place : of `can_stay`
    space : [L], the caller's; must live as long as the result
    """
    if in_place:
        return <const real *> src.data + offset
    load_line(space, at(src, offset), n)
    return space


cdef inline void store_line(Array dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """Store the first n lanes of a line to an array, rounded once; no value after them is written."""
    if holds_half(dst):
        store_halves(<half *> dst.data, src, n)
    else:
        store_reals(<real *> dst.data, src, n)


cdef inline void load_row(real *restrict dst, Array src, Py_ssize_t n) noexcept nogil:
    """Load n values of an array as whole lines, the last one padded with zeros."""
    cdef Py_ssize_t j
    for j in range(lines_in(n)):
        load_line(dst + j * L, at(src, j * L), n - j * L)


cdef inline void store_row(Array dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """Store n values, which stand in whole lines, to an array."""
    cdef Py_ssize_t j
    for j in range(lines_in(n)):
        store_line(at(dst, j * L), src + j * L, n - j * L)


cdef inline real value_at(Array array, Py_ssize_t i) noexcept nogil:
    """Return number i of an array."""
    if holds_half(array):
        return <real> half_to_float((<const half *> array.data)[i])
    return (<const real *> array.data)[i]


cdef inline void load_values(real *restrict dst, Array src, Py_ssize_t n) noexcept nogil:
    """Load n values of an array, without padding."""
    cdef Py_ssize_t l
    for l in range(n):
        dst[l] = value_at(src, l)


cdef inline void store_value(Array dst, real value) noexcept nogil:
    """Store one value to an array, rounded once."""
    if holds_half(dst):
        (<half *> dst.data)[0] = float_to_half(<float> value)
    else:
        (<real *> dst.data)[0] = value


cdef inline void clear(cleared *dst, Py_ssize_t n) noexcept nogil:
    """Set n values to zero."""
    cdef Py_ssize_t l
    for l in range(n):
        dst[l] = 0


cdef inline void round_to_half(real *line) noexcept nogil:
    """Round a line of floats to what float16 can hold."""
    cdef half[LF] halves
    store_halves(halves, line, LF)
    load_halves(line, halves, LF)


cdef inline void *align_to_line(const void *memory) noexcept nogil:
    """Return the first address in memory that begins a cache line."""
    return <void *> ((<size_t> memory + 63) & ~<size_t> 63)
