"""int8 matrix products: weights in 8 bits with a scale for each column, rows in 8 bits with a scale for each row.

A panel has its rows of w for x and then those for h, [k / 4][line][lane][4 values of k], each a byte, the code + 128.
A row that is to be multiplied is quantized first (`quantize_row`): codes of 8 bits behind a head of a scale and a
correction.  Sums of products are exact, and adding the correction takes out the 128.  Codes of 0 fill a row up to whole
cache lines.  Behind them is room for the same codes in 16 bits each, which are there if the product in use reads them.

    scale = max(max |v| / 127, 2^-126);   code = v / scale, rounded to the nearest even
    z = z + (scale of the row * scale of the column) * sum

Each of these operations is rounded, and none is fused with another.  A row with a NaN or an infinity in it has a scale
of NaN.  Products, up to z, are compiled once, in `_integer.pyx`, for all instructions that there are.
"""
from product.tile cimport LF, LINE_BYTES, LINES

cdef extern from "product/integer.h":
    enum:
        QUAD  # values of k that are multiplied together
        READ_PAST  # bytes behind the last panel that AMX may read and multiply with codes of 0
        MOST_K  # values of k whose sum is exact: 255 * 128 * MOST_K < 2^31
    ctypedef struct RowHead:
        float scale
        int correction
    ctypedef void (*Product)(
        float *z, const float *scales, const unsigned char *panel, Py_ssize_t lines, const char *heads,
        Py_ssize_t apart, const signed char *a, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t quads
    ) noexcept nogil
    ctypedef struct ProductInUse:
        Product add
        bint wide
    ProductInUse *integer_product
    void quantize_row(float *row, const float *v, Py_ssize_t n) noexcept nogil


cdef inline void use_product(ProductInUse *product) noexcept:
    global integer_product
    integer_product = product


cdef inline Py_ssize_t quads_of(Py_ssize_t K) noexcept nogil:
    return (K + QUAD - 1) // QUAD


cdef inline Py_ssize_t bytes_of_codes(Py_ssize_t K) noexcept nogil:
    """The size of K codes in bytes, in whole lines."""
    return (K + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


cdef inline Py_ssize_t bytes_of_row(Py_ssize_t K) noexcept nogil:
    """From one row of bytes to the next: a head, codes and room for wide codes; an odd number of lines, as in
    `scratch_stride`."""
    return (1 + 3 * bytes_of_codes(K) // LINE_BYTES | 1) * LINE_BYTES


cdef inline Py_ssize_t quantized_row_stride(Py_ssize_t K) noexcept nogil:
    """From one row of codes of K values to the next, in floats."""
    return bytes_of_row(K) // <Py_ssize_t> sizeof(float)


cdef inline int correction_of(const signed char *codes, Py_ssize_t n) noexcept nogil:
    """The correction for n of a row's codes; its head has the one for all of them."""
    cdef Py_ssize_t k
    cdef int total = 0
    for k in range(n):
        total += codes[k]
    return -128 * total


cdef inline const signed char *codes_from(const char *row, Py_ssize_t K, Py_ssize_t k) noexcept nogil:
    """The codes of a row of K values from number k on, as the product in use reads them."""
    cdef const signed char *codes = <const signed char *> row + sizeof(RowHead)
    return codes + bytes_of_codes(K) + 2 * k if integer_product.wide else codes + k


cdef inline void add_integer_product(
    float *z, Py_ssize_t rows, Py_ssize_t lines, const float *a, const char *panel, Py_ssize_t K, const float *scales
) noexcept nogil:
    """z += a @ (K rows of a panel of so many lines), for `rows` rows of codes."""
    cdef const unsigned char *w = <const unsigned char *> panel
    cdef const char *row = <const char *> a
    cdef Py_ssize_t stride = bytes_of_row(K), r, k, n
    cdef RowHead head
    if K <= MOST_K:
        integer_product.add(z, scales, w, lines, row, stride, codes_from(row, K, 0), stride, rows, quads_of(K))
        return
    for r in range(rows):  # in pieces
        row = <const char *> a + r * stride
        head.scale = (<const RowHead *> row).scale
        k = 0
        while k < K:
            n = min(<Py_ssize_t> MOST_K, K - k)
            head.correction = correction_of(<const signed char *> row + sizeof(RowHead) + k, n)
            integer_product.add(z + r * LINES * LF, scales, w + k * lines * LF, lines, <const char *> &head,
                                sizeof(RowHead), codes_from(row, K, k), stride, 1, quads_of(n))
            k += n
