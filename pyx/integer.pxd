"""Products in integers: weights in 8 bits with a scale for each column, rows in 8 or 16 bits with a scale for each row.

A panel holds its rows of w for x and then those for h, [k / 4][line][lane][4 values of k], each a byte, the code + 128.
A row that is to be multiplied becomes codes (`quantise`): in 8 bits, or in 16, which are two rows of signed bytes,
256 high + low.  Such a row of bytes begins with a scale and a correction: sums of products are exact, and adding the
correction takes out the 128.  Where k is not a multiple of 4 there are more codes, of 0, in rows up to whole lines.
Behind them is room for the same codes in 16 bits each.  A row has these, and is wide, if the product in use reads them.

    scale = max(max |v| / top, 2^-126), top = 127 or 32639;   code = v / scale, rounded to the nearest even
    z = z + (scale of the row * scale of the column) * sum,   sum = 256 * high + low in float32 with 16 bits

Each of these operations is rounded, and none is fused with another.  A row with a NaN or an infinity in it has a scale
of NaN.  Products, up to z, are compiled once, in `_integer.pyx`, for all instructions that there are.
"""
from narrow cimport INT8_INT16, INT8_INT8
from tile cimport LF, LINE_BYTES, LINES

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__SSE2__)
    #include <emmintrin.h>
    #endif
    enum { QUAD = 4, MOST_K = 1 << 16, READ_PAST = 16 * 4 * 64 };
    typedef void (*Product)(
        float *, const float *, const uint8_t *, ptrdiff_t, const char *, ptrdiff_t, const int8_t *, ptrdiff_t,
        ptrdiff_t, int, ptrdiff_t);
    typedef struct { Product add; int wide; void (*decide)(void); } ProductInUse;
    static ProductInUse *integer_product;  /* where `_integer.pyx` says which one is in use */
    typedef struct { float scale; int32_t correction; char rest[56]; } RowHead;
    typedef int32_t float_bits __attribute__((may_alias));

    /* Whether the product in use reads wide rows; the first row of a process decides which product that is. */
    static inline int reads_wide_rows(void) {
        if (__builtin_expect(__atomic_load_n(&integer_product->add, __ATOMIC_ACQUIRE) == NULL, 0))
            integer_product->decide();
        return integer_product->wide;
    }

    #define INLINED_PIECE static inline __attribute__((always_inline))

    /* codes := n values of v / scale, rounded to the nearest even; `high` gets codes of 8 bits, or the upper bytes of
       16, and `low` the lower ones.  The sums of each are added to `sums`. */
    INLINED_PIECE void quantise_values(
        const int parts, int8_t *restrict high, int8_t *restrict low, const float *restrict v, ptrdiff_t n, float scale,
        uint32_t *restrict sums
    ) {
        uint32_t high_sum = 0, low_sum = 0;
        for (ptrdiff_t k = 0; k < n; k++) {
            /* 1.5 * 2^23 leaves an integer in the lower bits of the sum. */
            const float shifted = v[k] / scale + 12582912.0f;
            int32_t code;
            memcpy(&code, &shifted, sizeof code);
            code -= 0x4b400000;
            if (parts == 1) {
                high[k] = (int8_t) code;
                high_sum += code;
            } else {
                const int32_t lower = (int32_t) ((uint32_t) code << 24) >> 24, upper = (code - lower) >> 8;
                low[k] = (int8_t) lower;
                high[k] = (int8_t) upper;
                low_sum += lower;
                high_sum += upper;
            }
        }
        sums[0] += high_sum;
        sums[1] += low_sum;
    }

    #if defined(__SSE2__)
    INLINED_PIECE void store_four(int8_t *codes, __m128i values) {
        const __m128i pairs = _mm_packs_epi32(values, values);
        const int32_t four = _mm_cvtsi128_si32(_mm_packs_epi16(pairs, pairs));
        memcpy(codes, &four, sizeof four);
    }

    INLINED_PIECE uint32_t sum_of_four(__m128i values) {
        values = _mm_add_epi32(values, _mm_shuffle_epi32(values, 0x4e));
        return (uint32_t) _mm_cvtsi128_si32(_mm_add_epi32(values, _mm_shuffle_epi32(values, 0xb1)));
    }

    /* `quantise_values` for a multiple of 4 */
    INLINED_PIECE void quantise_fours(
        const int parts, int8_t *high, int8_t *low, const float *v, ptrdiff_t n, float scale, uint32_t *sums
    ) {
        __m128i high_sum = _mm_setzero_si128(), low_sum = high_sum;
        for (ptrdiff_t k = 0; k < n; k += 4) {
            __m128i codes = _mm_cvtps_epi32(_mm_div_ps(_mm_loadu_ps(v + k), _mm_set1_ps(scale)));
            if (parts > 1) {
                const __m128i lower = _mm_srai_epi32(_mm_slli_epi32(codes, 24), 24);
                codes = _mm_srai_epi32(_mm_sub_epi32(codes, lower), 8);
                store_four(low + k, lower);
                low_sum = _mm_add_epi32(low_sum, lower);
            }
            store_four(high + k, codes);
            high_sum = _mm_add_epi32(high_sum, codes);
        }
        sums[0] += sum_of_four(high_sum);
        sums[1] += sum_of_four(low_sum);
    }

    /* wide [n / 4 quads][codes of k = 0, 2, 1 and 3], each of 16 bits, := n codes of 8 bits; n is a multiple of 16 */
    static inline void widen_codes(int16_t *restrict wide, const int8_t *restrict codes, ptrdiff_t n) {
        for (ptrdiff_t k = 0; k < n; k += 16) {
            const __m128i bytes = _mm_loadu_si128((const __m128i *) (codes + k)), odd = _mm_srai_epi16(bytes, 8);
            const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8);
            _mm_storeu_si128((__m128i *) (wide + k), _mm_unpacklo_epi32(even, odd));
            _mm_storeu_si128((__m128i *) (wide + k + 8), _mm_unpackhi_epi32(even, odd));
        }
    }
    #else
    #define quantise_fours quantise_values
    #define widen_codes(wide, codes, n) ((void) 0)  /* no product reads them */
    #endif

    /* `quantise_values` in vectors.  Compilers would leave up to 15 of the last values to instructions for one. */
    INLINED_PIECE void quantise_in_vectors(
        const int parts, int8_t *high, int8_t *low, const float *v, ptrdiff_t n, float scale, uint32_t *sums
    ) {
        const ptrdiff_t most = n / 32 * 32, fours = n / 4 * 4;
        if (most > 0)
            quantise_values(parts, high, low, v, most, scale, sums);
        if (fours > most)
            quantise_fours(parts, high + most, low + most, v + most, fours - most, scale, sums);
        if (n > fours)
            quantise_values(parts, high + fours, low + fours, v + fours, n - fours, scale, sums);
    }

    static __attribute__((noinline)) void quantise(
        char *restrict row, ptrdiff_t part, int parts, const float *restrict v, ptrdiff_t n
    ) {
        const float_bits *bits = (const float_bits *) v;
        int32_t most = 0;
        uint32_t sums[2] = {0, 0};  /* of more than MOST_K codes, which nobody reads, they may wrap */
        int8_t *high = (int8_t *) row + sizeof(RowHead), *low = high + part;
        const ptrdiff_t end = (n + 63) / 64 * 64;  /* AMX reads as much */
        float scale;
        for (ptrdiff_t k = 0; k < n; k++) {
            const int32_t size = bits[k] & 0x7fffffff;
            most = size > most ? size : most;
        }
        if (most >= 0x7f800000) {
            scale = __builtin_nanf("");
            memset(high, 0, n);
            if (parts > 1)
                memset(low, 0, n);
        } else {
            memcpy(&scale, &most, sizeof scale);
            scale /= parts > 1 ? 32639.0f : 127.0f;
            scale = scale > 0x1p-126f ? scale : 0x1p-126f;
            if (parts == 1)
                quantise_in_vectors(1, high, low, v, n, scale, sums);
            else
                quantise_in_vectors(2, high, low, v, n, scale, sums);
        }
        for (ptrdiff_t k = n; k < end; k++)
            high[k] = 0;
        ((RowHead *) row)->scale = scale;
        ((RowHead *) row)->correction = (int32_t) (-128u * sums[0]);
        if (parts > 1) {
            for (ptrdiff_t k = n; k < end; k++)
                low[k] = 0;
            ((RowHead *) (row + part))->correction = (int32_t) (-128u * sums[1]);
        }
        if (reads_wide_rows()) {
            widen_codes((int16_t *) (high + end), high, end);
            if (parts > 1)
                widen_codes((int16_t *) (low + end), low, end);
        }
    }
    """
    enum:
        QUAD  # values of k that are multiplied together
        READ_PAST  # bytes behind the last panel that AMX may read and multiply with codes of 0
        MOST_K  # values of k whose sum is exact: 255 * 128 * MOST_K < 2^31
    ctypedef struct RowHead:
        float scale
        int correction
    ctypedef void (*Product)(
        float *z, const float *scales, const unsigned char *panel, Py_ssize_t lines, const char *heads,
        Py_ssize_t apart, const signed char *a, Py_ssize_t stride, Py_ssize_t rows, int parts, Py_ssize_t quads
    ) noexcept nogil
    ctypedef struct ProductInUse:
        Product add
        bint wide
    ProductInUse *integer_product
    void quantise(char *row, Py_ssize_t part, int parts, const float *v, Py_ssize_t n) noexcept nogil


cdef inline void use_product(ProductInUse *product) noexcept:
    global integer_product
    integer_product = product


cdef inline bint in_integers(int narrow) noexcept nogil:
    """Whether rows are rounded, too, for products with weights that are stored so."""
    return narrow == INT8_INT8 or narrow == INT8_INT16


cdef inline int row_parts(int narrow) noexcept nogil:
    """Of how many rows of bytes a row is made."""
    return 2 if narrow == INT8_INT16 else 1


cdef inline Py_ssize_t quads_of(Py_ssize_t K) noexcept nogil:
    return (K + QUAD - 1) // QUAD


cdef inline Py_ssize_t bytes_of_codes(Py_ssize_t K) noexcept nogil:
    """The size of K codes in bytes, in whole lines."""
    return (K + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


cdef inline Py_ssize_t bytes_of_row(Py_ssize_t K) noexcept nogil:
    """From one row of bytes to the next: a head, codes and room for wide codes; an odd number of lines, as in
    `stride_of`."""
    return (1 + 3 * bytes_of_codes(K) // LINE_BYTES | 1) * LINE_BYTES


cdef inline Py_ssize_t stride_of_codes(int narrow, Py_ssize_t K) noexcept nogil:
    """From one row of codes of K values to the next, in floats."""
    return row_parts(narrow) * bytes_of_row(K) // <Py_ssize_t> sizeof(float)


cdef inline void quantise_row(int narrow, float *row, const float *v, Py_ssize_t K) noexcept nogil:
    quantise(<char *> row, bytes_of_row(K), row_parts(narrow), v, K)


cdef inline int correction_of(const signed char *codes, Py_ssize_t n) noexcept nogil:
    """For n codes of a row of bytes; its head has that for all of them."""
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
    int narrow, float *z, Py_ssize_t rows, Py_ssize_t lines, const float *a, const char *panel, Py_ssize_t K,
    const float *scales
) noexcept nogil:
    """z += a @ (K rows of a panel of so many lines), for `rows` rows of codes."""
    cdef const unsigned char *w = <const unsigned char *> panel
    cdef const char *row = <const char *> a
    cdef Py_ssize_t part = bytes_of_row(K), r, k, n
    cdef int parts = row_parts(narrow), q
    cdef RowHead[2] heads
    if K <= MOST_K:
        integer_product.add(z, scales, w, lines, row, part, codes_from(row, K, 0), part, rows * parts, parts,
                            quads_of(K))
        return
    for r in range(rows):  # in pieces
        row = <const char *> a + r * parts * part
        k = 0
        while k < K:
            n = min(<Py_ssize_t> MOST_K, K - k)
            for q in range(parts):
                heads[q].scale = (<const RowHead *> row).scale
                heads[q].correction = correction_of(
                    <const signed char *> row + q * part + sizeof(RowHead) + k, n)
            integer_product.add(z + r * LINES * LF, scales, w + k * lines * LF, lines, <const char *> heads,
                                sizeof(RowHead), codes_from(row, K, k), part, parts, parts, quads_of(n))
            k += n
