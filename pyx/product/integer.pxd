"""int8 matrix products: int8 weights with a scale for each column, times activations that are quantized row by row.

A panel has w_x and then w_h, [k / 4][line][lane][4 values of k], each a byte, the code + 128.
A row of activations is quantized just before it is multiplied (`quantize_row`).  A *quantized row* is a head, with a
scale and a correction, then a code of 8 bits for each value, and codes of 0 up to the end of a cache line.  Behind them
is space for *wide codes*, the same codes in 16 bits each, which are there if the instructions in use read them.  Sums
of products of codes are exact integers, and adding the correction takes out the 128.

    scale = max(max |v| / 127, 2^-126);   code = v / scale, rounded to the nearest even
    z = z + (scale of the row * scale of the column) * sum

Quantization is symmetric: activations have no zero point, and weights only the 128 of their storage.  No product
saturates: instructions whose sums of pairs would do so, as those of SSE2 and AVX2 in 8 bits, are not used.

Each of these operations is rounded, and none is fused with another.  A row with a NaN or an infinity in it has a scale
of NaN.  Products, up to z, are compiled once, in `_integer.pyx`, for all instructions that there are.

Letters: K and k values that are summed; a quad is 4 of them.
"""
from product.lines cimport LF
from product.tile cimport LINE_BYTES, LINES

cdef extern from "product/integer.h":
    enum:
        QUAD  # values of k that are multiplied together
        HEAD_BYTES  # of a row, in which its Head is first
        READ_PAST  # bytes behind the last panel that AMX may read and multiply with codes of 0
        MOST_K  # values of k whose sum is exact: 255 * 128 * MOST_K < 2^31
    ctypedef struct Head:
        float scale
        int correction  # -128 times the sum of the codes
    # z [rows,LINES,16] += rows times a panel of so many lines and quads.
    ctypedef void (*Product)(
        float *z, const float *scales, const unsigned char *panel, Py_ssize_t lines, const char *heads,
        Py_ssize_t head_stride, const signed char *codes, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t quads,
        Py_ssize_t distance
    ) noexcept nogil
    ctypedef struct ProductInUse:
        Product add
        bint reads_wide_codes
    ProductInUse *integer_product
    void quantize_row(float *row, const float *v, Py_ssize_t n) noexcept nogil  # row := the n values of v, quantized


cdef inline void use_product(ProductInUse *product) noexcept:
    """Set the product of this module, which `_integer.pyx` owns.

    product : lives as long as the process
    """
    global integer_product
    integer_product = product


cdef inline Py_ssize_t quads_of(Py_ssize_t K) noexcept nogil:
    """Return how many quads hold K values."""
    return (K + QUAD - 1) // QUAD


cdef inline Py_ssize_t code_bytes(Py_ssize_t K) noexcept nogil:
    """Return the bytes of K codes of 8 bits, in whole cache lines."""
    return (K + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


cdef inline Py_ssize_t quantized_row_bytes(Py_ssize_t K) noexcept nogil:
    """Return the bytes of a quantized row of K values: an odd number of cache lines, as in `scratch_stride`."""
    return (1 + 3 * code_bytes(K) // LINE_BYTES | 1) * LINE_BYTES


cdef inline Py_ssize_t quantized_row_stride(Py_ssize_t K) noexcept nogil:
    """Return the stride of quantized rows of K values, in floats."""
    return quantized_row_bytes(K) // <Py_ssize_t> sizeof(float)


cdef inline int correction(const signed char *codes, Py_ssize_t n) noexcept nogil:
    """Return the correction for n codes of a row; its head has that for all of them."""
    cdef Py_ssize_t k
    cdef int total = 0
    for k in range(n):
        total += codes[k]
    return -128 * total


cdef inline const signed char *codes_at(const char *row, Py_ssize_t K, Py_ssize_t k) noexcept nogil:
    """Return the address of the codes of a quantized row of K values from k on, in the width that the product reads."""
    cdef const signed char *codes = <const signed char *> row + HEAD_BYTES
    return codes + code_bytes(K) + 2 * k if integer_product.reads_wide_codes else codes + k


cdef inline void add_integer_product(
    float *z, Py_ssize_t rows, Py_ssize_t lines, const float *a, const char *panel, Py_ssize_t K, const float *scales,
    Py_ssize_t distance
) noexcept nogil:
    """Add a @ (K values of k of a panel of so many lines) to z for `rows` rows.

    z : [rows,LINES,16], the accumulator
    a : [rows] quantized rows of K values, `quantized_row_stride` apart
    panel : its codes, from the first of the K values on
    scales : [lines,16], of the panel's columns
    distance : as in tile.pxd, for the first tile of rows
    """
    cdef const unsigned char *codes = <const unsigned char *> panel
    cdef const char *row = <const char *> a
    cdef Py_ssize_t stride = quantized_row_bytes(K), q, k, n
    cdef Head head
    if K <= MOST_K:
        integer_product.add(z, scales, codes, lines, row, stride, codes_at(row, K, 0), stride, rows, quads_of(K),
                            distance)
        return
    for q in range(rows):  # in pieces of MOST_K values, each with a head of its own
        row = <const char *> a + q * stride
        head.scale = (<const Head *> row).scale
        k = 0
        while k < K:
            n = min(<Py_ssize_t> MOST_K, K - k)
            head.correction = correction(<const signed char *> row + HEAD_BYTES + k, n)
            integer_product.add(z + q * LINES * LF, scales, codes + k * lines * LF, lines, <const char *> &head,
                                HEAD_BYTES, codes_at(row, K, k), stride, 1, quads_of(n), 0)
            k += n
