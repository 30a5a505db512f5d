"""Products with weights stored in fewer bytes than they are computed in.

A panel of narrow weights holds its lines for one k after the other, [k][line][lane].  A few rows have weights widened
on their way into registers, for more of them a block is widened as a whole and given to the tile (tile.pxd).  What is
widened are the weights that blockcell/layers/storage.py defines, and the order of summation is the tile's.
"""
from libc.stdint cimport int8_t, uint16_t, uint32_t

from half cimport float_of_bits, half
from tile cimport (
    ACC, BLOCK, FILLS, LF, LINES, LINE_BYTES, ONCE, ONCE3, ROWS, VECTORS, ZEROF, called, for_reading, inlined,
    load_line, packed_at, packed_step, product_of_block, tile_height, vecf
)

cdef extern from *:
    """
    /* How the weights of a panel are stored; WIDE: as they are computed.  The last two: rows are rounded as well. */
    enum { WIDE, FLOAT16, BFLOAT16, INT8, INT8_INT8, INT8_INT16 };
    enum { PAIRED = VECTORS > 1 };
    #if defined(__AVX2__)
    enum { WIDENS = 1 };
    /* Vector v of a line of weights; those of INT8 without their scales. */
    static inline vecf widened(const char *line, int v, int narrow) {
    #if defined(__AVX512F__)
        if (narrow == INT8)
            return (vecf) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) line)));
        const __m256i codes = _mm256_loadu_si256((const __m256i *) line);
        return (vecf) (narrow == FLOAT16 ? _mm512_cvtph_ps(codes)
                       : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16)));
    #else
        if (narrow == INT8)
            return (vecf) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (line + 8 * v))));
        if (narrow == FLOAT16)
            return (vecf) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) line + v));
        const __m256i pairs = _mm256_loadu_si256((const __m256i *) line);
        return (vecf) _mm256_castsi256_ps(v ? _mm256_and_si256(pairs, _mm256_set1_epi32((int) 0xffff0000))
                                            : _mm256_slli_epi32(pairs, 16));
    #endif
    }
    #elif defined(__aarch64__)
    #include <arm_neon.h>
    enum { WIDENS = 1 };
    static inline vecf widened(const char *line, int v, int narrow) {
        if (narrow == INT8) {
            const int8x8_t half_line = vld1_s8((const int8_t *) line + v / 2 * 8);  /* which two vectors share */
            const int16x8_t codes = vmovl_s8(half_line);
            return (vecf) vcvtq_f32_s32(vmovl_s16(v % 2 ? vget_high_s16(codes) : vget_low_s16(codes)));
        }
        if (narrow == FLOAT16)
            return (vecf) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) line + 4 * v)));
        const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *) line + v % 2 * 16));
        return (vecf) (v / 2 ? vandq_u32(pairs, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(pairs, 16));
    }
    #else
    enum { WIDENS = 0 };
    static inline vecf widened(const char *line, int v, int narrow) {
        (void) line; (void) v; (void) narrow;
        return ZEROF;
    }
    #endif
    /* gcc would keep all scales of a tile in registers and then some of its sums in memory. */
    static inline const float *reread(const float *p) { __asm__ volatile("" : "+r"(p)); return p; }
    """
    enum:
        WIDE  # 0
        FLOAT16  # and on: in the order of WEIGHT_STORAGES in blockcell/optable.py
        BFLOAT16
        INT8
        INT8_INT8  # these two for integer.pxd
        INT8_INT16
        PAIRED  # of BFLOAT16, lane l of a line's first half stands beside that of its second: one shift widens each
        WIDENS  # whether there are instructions to widen weights on their way into registers
    vecf widened(const char *line, int v, int narrow) noexcept nogil
    const float *reread(const float *p) noexcept nogil


cdef inline Py_ssize_t bytes_of(int narrow) noexcept nogil:
    """Of a weight."""
    return 1 if narrow >= INT8 else 2


cdef inline Py_ssize_t place_in_line(int narrow, Py_ssize_t l) noexcept nogil:
    """Where lane l of a line of weights is."""
    return l % (LF // 2) * 2 + l // (LF // 2) if narrow == BFLOAT16 and PAIRED else l


cdef inline void widen_line(
    float *restrict dst, const char *restrict src, int narrow, const float *restrict scales
) noexcept nogil:
    cdef Py_ssize_t l, half_line = LF // 2
    cdef const uint16_t *bits = <const uint16_t *> src
    if narrow == FLOAT16:
        load_line(dst, <const half *> src, LF)
    elif narrow == INT8:
        for l in range(LF):
            dst[l] = <float> (<const int8_t *> src)[l] * scales[l]
    elif PAIRED:
        for l in range(half_line):
            dst[l] = float_of_bits(<uint32_t> bits[2 * l] << 16)
            dst[half_line + l] = float_of_bits(<uint32_t> bits[2 * l + 1] << 16)
    else:
        for l in range(LF):
            dst[l] = float_of_bits(<uint32_t> bits[l] << 16)


cdef inline inlined widen_lines(
    float *restrict block, const char *restrict src, int narrow, Py_ssize_t lines, Py_ssize_t kb,
    const float *restrict scales
) noexcept nogil:
    """`widen_block`, inlined with `narrow` constant."""
    cdef Py_ssize_t k, g, v, step, n = LF * bytes_of(narrow)
    cdef float *to
    cdef vecf w
    for g in range(lines):
        to, step = packed_at(block, lines, g, 0, kb), packed_step(block, lines, g)
        for k in range(kb):
            if WIDENS:
                for v in range(VECTORS):
                    w = widened(src + (k * lines + g) * n, v, narrow)
                    if narrow == INT8:
                        w = w * (<const vecf *> (scales + g * LF))[v]
                    (<vecf *> (to + k * step))[v] = w
            else:
                widen_line(to + k * step, src + (k * lines + g) * n, narrow, scales + g * LF)


cdef inline called widen_block(
    float *restrict block, const char *restrict src, int narrow, Py_ssize_t lines, Py_ssize_t kb,
    const float *restrict scales
) noexcept nogil:
    """A panel's block of kb values of k as the tile reads it."""
    if narrow == FLOAT16: widen_lines(block, src, FLOAT16, lines, kb, scales)
    elif narrow == BFLOAT16: widen_lines(block, src, BFLOAT16, lines, kb, scales)
    else: widen_lines(block, src, INT8, lines, kb, scales)


cdef inline inlined narrow_tile(
    int narrow, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t first, Py_ssize_t nv, Py_ssize_t lines,
    vecf *restrict out, Py_ssize_t step, const float *a, Py_ssize_t rs, const char *restrict p, Py_ssize_t next,
    Py_ssize_t K, const float *restrict scales, const char *ahead
) noexcept nogil:
    """`tile`, or for a single row `chains_of_one`, with nv vectors from number `first` on of panels of so many lines of
    narrow weights: each is widened once and then used for all rows.  Inlined with all of these constant."""
    cdef vecf acc[2 * ACC]
    cdef vecf w[ACC]
    cdef Py_ssize_t k = 0, i, m, v, size = LF * bytes_of(narrow)
    for v in range(rows * panels * nv):
        acc[v] = ZEROF
    while True:
        if ahead is not NULL:
            for_reading(ahead + k * LINE_BYTES)
        if narrow == INT8 and VECTORS > 1:
            scales = reread(scales)
        for i in range(panels):
            for v in range(nv):
                w[v] = widened(p + i * next * sizeof(float) + (k * lines + (first + v) // VECTORS) * size,
                               (first + v) % VECTORS, narrow)
                if narrow == INT8:
                    w[v] = w[v] * (<const vecf *> (scales + i * next))[first + v]
                if rows <= 3:  # so many values of a find registers beside the sums, else the weights do
                    for m in range(rows):
                        acc[(m * panels + i) * nv + v] = acc[(m * panels + i) * nv + v] + w[v] * a[m * rs + k]
            if rows > 3:
                for m in range(rows):
                    for v in range(nv):
                        acc[m * nv + v] = acc[m * nv + v] + w[v] * a[m * rs + k]
        k += 1
        if k == K:
            break
    for m in range(rows):
        for i in range(panels):
            for v in range(nv):
                out[m * LINES * VECTORS + i * step + first + v] = (
                    out[m * LINES * VECTORS + i * step + first + v] + acc[(m * panels + i) * nv + v])


cdef inline inlined narrow_lines(
    int narrow, Py_ssize_t rows, Py_ssize_t most, Py_ssize_t lines, vecf *restrict out, const float *a, Py_ssize_t rs,
    const char *restrict p, Py_ssize_t K, const float *restrict scales
) noexcept nogil:
    """The tile for all of 3 or 4 lines, at most so many vectors at a time where a line has several.  Meanwhile the next
    block comes nearer."""
    cdef const char *ahead = p + K * lines * LF * bytes_of(narrow)
    cdef const char *more = <const char *> NULL if narrow == INT8 else ahead + K * LINE_BYTES
    if VECTORS == 1:
        if lines == 3: narrow_tile(narrow, rows, 1, 0, 3, 3, out, 0, a, rs, p, 0, K, scales, NULL)
        else: narrow_tile(narrow, rows, 1, 0, LINES, LINES, out, 0, a, rs, p, 0, K, scales, NULL)
    elif FILLS:  # two lines of up to three rows, one of more
        if most == 4:
            narrow_tile(narrow, rows, 1, 0, 8, lines, out, 0, a, rs, p, 0, K, scales, ahead)
            if lines == 3: narrow_tile(narrow, rows, 1, 8, 4, lines, out, 0, a, rs, p, 0, K, scales, more)
            else: narrow_tile(narrow, rows, 1, 8, 8, lines, out, 0, a, rs, p, 0, K, scales, more)
        else:
            narrow_tile(narrow, rows, 1, 0, 4, lines, out, 0, a, rs, p, 0, K, scales, ahead)
            narrow_tile(narrow, rows, 1, 4, 4, lines, out, 0, a, rs, p, 0, K, scales, more)
            narrow_tile(narrow, rows, 1, 8, 4, lines, out, 0, a, rs, p, 0, K, scales, NULL)
            if lines > 3: narrow_tile(narrow, rows, 1, 12, 4, lines, out, 0, a, rs, p, 0, K, scales, NULL)
    elif most == 4:
        narrow_tile(narrow, rows, 1, 0, 4, lines, out, 0, a, rs, p, 0, K, scales, ahead)
        if lines == 3: narrow_tile(narrow, rows, 1, 4, 2, lines, out, 0, a, rs, p, 0, K, scales, more)
        else: narrow_tile(narrow, rows, 1, 4, 4, lines, out, 0, a, rs, p, 0, K, scales, more)
    elif most == 3:
        narrow_tile(narrow, rows, 1, 0, 3, lines, out, 0, a, rs, p, 0, K, scales, ahead)
        narrow_tile(narrow, rows, 1, 3, 3, lines, out, 0, a, rs, p, 0, K, scales, more)
        if lines > 3: narrow_tile(narrow, rows, 1, 6, 2, lines, out, 0, a, rs, p, 0, K, scales, NULL)
    else:
        narrow_tile(narrow, rows, 1, 0, 2, lines, out, 0, a, rs, p, 0, K, scales, ahead)
        narrow_tile(narrow, rows, 1, 2, 2, lines, out, 0, a, rs, p, 0, K, scales, more)
        narrow_tile(narrow, rows, 1, 4, 2, lines, out, 0, a, rs, p, 0, K, scales, NULL)
        if lines > 3: narrow_tile(narrow, rows, 1, 6, 2, lines, out, 0, a, rs, p, 0, K, scales, NULL)


cdef inline inlined narrow_rows(
    int narrow, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, vecf *restrict out, Py_ssize_t step,
    const float *a, Py_ssize_t rs, const char *restrict p, Py_ssize_t next, Py_ssize_t K, const float *restrict scales
) noexcept nogil:
    """The tile for 1 to ROWS rows and 3 or 4 lines."""
    if rows == 1:
        if lines == 3:
            if ONCE3 > 1 and panels > 1:
                narrow_tile(narrow, 1, ONCE3, 0, 3 * VECTORS, 3, out, step, a, 0, p, next, K, scales, NULL)
            else: narrow_tile(narrow, 1, 1, 0, 3 * VECTORS, 3, out, 0, a, 0, p, 0, K, scales, NULL)
        elif ONCE > 1 and panels > 1:
            narrow_tile(narrow, 1, ONCE, 0, LINES * VECTORS, LINES, out, step, a, 0, p, next, K, scales, NULL)
        else: narrow_tile(narrow, 1, 1, 0, LINES * VECTORS, LINES, out, 0, a, 0, p, 0, K, scales, NULL)
    elif rows == 2: narrow_lines(narrow, 2, 4, lines, out, a, rs, p, K, scales)
    elif rows == 3: narrow_lines(narrow, 3, 4, lines, out, a, rs, p, K, scales)
    elif rows == 4: narrow_lines(narrow, 4, 3, lines, out, a, rs, p, K, scales)
    elif rows == 5: narrow_lines(narrow, 5, 2, lines, out, a, rs, p, K, scales)
    else: narrow_lines(narrow, ROWS, 2, lines, out, a, rs, p, K, scales)


cdef inline called narrow_tiles(
    int narrow, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, vecf *restrict out, Py_ssize_t step,
    const float *a, Py_ssize_t rs, const char *restrict p, Py_ssize_t next, Py_ssize_t K, const float *restrict scales
) noexcept nogil:
    if narrow == FLOAT16: narrow_rows(FLOAT16, rows, panels, lines, out, step, a, rs, p, next, K, scales)
    elif narrow == BFLOAT16: narrow_rows(BFLOAT16, rows, panels, lines, out, step, a, rs, p, next, K, scales)
    else: narrow_rows(INT8, rows, panels, lines, out, step, a, rs, p, next, K, scales)


cdef inline called narrow_product(
    int narrow, float *acc, Py_ssize_t step, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, const float *a,
    Py_ssize_t stride, const char *panel, Py_ssize_t next, Py_ssize_t K, const float *scales
) noexcept nogil:
    """`product`, or `product_of_one`, with panels of narrow weights [k][line][lane].  A few rows have them widened on
    their way into registers; for more of them a block is widened as a whole."""
    cdef float[BLOCK * LINES * LF] wide
    cdef const char *block
    cdef Py_ssize_t k0 = 0, kb, r, m
    cdef bint few = WIDENS and rows <= 2 * ROWS and lines >= 3
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        block = panel + k0 * lines * LF * bytes_of(narrow)
        if not few:
            widen_block(wide, block, narrow, lines, kb, scales)
        r = 0
        while r < rows:
            m = tile_height(rows - r)
            if few:
                narrow_tiles(narrow, m, panels, lines, <vecf *> (acc + r * LINES * LF), step * VECTORS // LF,
                             a + r * stride + k0, stride, block, next, kb, scales)
            else:
                product_of_block(acc + r * LINES * LF, m, lines, a + r * stride + k0, stride, &wide[0], kb, &wide[0],
                                 0)
            r += m
        k0 += kb
