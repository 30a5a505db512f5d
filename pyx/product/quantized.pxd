"""The formats of packed weights, and products with float16 weights (integer.pxd has those with int8 weights).

A panel of float16 weights has its lines for one k after the other, [k][line][lane].  The first tile of rows dequantizes
weights on their way into registers and leaves them in a block, which the tiles of other rows read (tile.pxd).  The
order of summation is the tile's, so results are bit-identical with those of the float32 weights that
blockcell/quantization.py defines.
"""
from product.half cimport half
from product.tile cimport (
    ACC, BLOCK, FILLS, LATENCY_ROWS, LF, LINE_BYTES, LINES, ROW_PANELS, ROW_PANELS_OF_3, ROWS, SUB, VECTORS, ZEROF,
    add_block_product, first_line, inline_void, load_line, multiply_add, noinline_void, packed_line, packed_stride,
    prefetch_read, tile_height, vecf
)

cdef extern from "product/quantized.h":
    enum:  # how packed weights are stored, in the order of KERNEL_FORMATS in blockcell/quantization.py
        UNQUANTIZED
        FLOAT16
        INT8
        HALF_VECTORS  # whether there are instructions to dequantize weights on their way into registers
    vecf half_vector(const char *line, int v) noexcept nogil  # vector v of a line of float16 weights


cdef inline Py_ssize_t bytes_per_code(int format) noexcept nogil:
    return 1 if format == INT8 else 2


cdef inline noinline_void dequantize_block(
    float *restrict block, const half *restrict src, Py_ssize_t lines, Py_ssize_t kb
) noexcept nogil:
    """block, as the tile reads it, := kb values of k of a panel of float16 weights."""
    cdef Py_ssize_t k, g, v, step
    cdef float *line
    cdef const half *codes
    for g in range(lines):
        line, step = packed_line(block, lines, g, 0, kb), packed_stride(block, lines, g)
        for k in range(kb):
            codes = src + (k * lines + g) * LF
            if HALF_VECTORS:
                for v in range(VECTORS):
                    (<vecf *> (line + k * step))[v] = half_vector(<const char *> codes, v)
            else:
                load_line(line + k * step, codes, LF)


cdef inline inline_void half_tile(
    Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t first, Py_ssize_t nv, Py_ssize_t lines, vecf *restrict out,
    Py_ssize_t step, const float *a, Py_ssize_t rs, const half *restrict p, Py_ssize_t next, vecf *restrict block,
    Py_ssize_t K, const char *ahead
) noexcept nogil:
    """`tile`, or for a single row `chains_of_one`, with nv vectors from number `first` on of panels of so many lines of
    float16 weights: each is dequantized once and then used for all rows.  LATENCY_ROWS rows and more, which others may
    follow (`tile_height`), store it in `block` as well.  Inlined with all of these constant."""
    cdef vecf[2 * ACC] acc
    cdef vecf[ACC] w
    cdef Py_ssize_t k = 0, i, m, v, sub = VECTORS * (lines if SUB > 1 else 1)
    for v in range(rows * panels * nv):
        acc[v] = ZEROF
    while True:
        if ahead is not NULL:
            prefetch_read(ahead + k * LINE_BYTES)
        for i in range(panels):
            for v in range(nv):
                w[v] = half_vector(<const char *> (p + i * next + (k * lines + (first + v) // VECTORS) * LF),
                                   (first + v) % VECTORS)
                if rows >= LATENCY_ROWS:
                    block[((first + v) // sub * K + k) * sub + (first + v) % sub] = w[v]
                if rows <= 3:  # so many values of a find registers beside the sums, else the weights do
                    for m in range(rows):
                        acc[(m * panels + i) * nv + v] = multiply_add(
                            acc[(m * panels + i) * nv + v], w[v], a, m * rs + k)
            if rows > 3:
                for m in range(rows):
                    for v in range(nv):
                        acc[m * nv + v] = multiply_add(acc[m * nv + v], w[v], a, m * rs + k)
        k += 1
        if k == K:
            break
    for m in range(rows):
        for i in range(panels):
            for v in range(nv):
                out[m * LINES * VECTORS + i * step + first + v] = (
                    out[m * LINES * VECTORS + i * step + first + v] + acc[(m * panels + i) * nv + v])


cdef inline inline_void half_lines(
    Py_ssize_t rows, Py_ssize_t most, Py_ssize_t lines, vecf *restrict out, const float *a, Py_ssize_t rs,
    const half *restrict p, vecf *restrict block, Py_ssize_t K
) noexcept nogil:
    """The tile for all of 3 or 4 lines, at most so many vectors at a time where a line has several.  Meanwhile the next
    block comes nearer."""
    cdef const char *ahead = <const char *> (p + K * lines * LF)
    cdef const char *more = ahead + K * LINE_BYTES
    if VECTORS == 1:
        if lines == 3: half_tile(rows, 1, 0, 3, 3, out, 0, a, rs, p, 0, block, K, NULL)
        else: half_tile(rows, 1, 0, LINES, LINES, out, 0, a, rs, p, 0, block, K, NULL)
    elif FILLS:  # two lines of up to three rows, one of more
        if most == 4:
            half_tile(rows, 1, 0, 8, lines, out, 0, a, rs, p, 0, block, K, ahead)
            if lines == 3: half_tile(rows, 1, 8, 4, lines, out, 0, a, rs, p, 0, block, K, more)
            else: half_tile(rows, 1, 8, 8, lines, out, 0, a, rs, p, 0, block, K, more)
        else:
            half_tile(rows, 1, 0, 4, lines, out, 0, a, rs, p, 0, block, K, ahead)
            half_tile(rows, 1, 4, 4, lines, out, 0, a, rs, p, 0, block, K, more)
            half_tile(rows, 1, 8, 4, lines, out, 0, a, rs, p, 0, block, K, NULL)
            if lines > 3: half_tile(rows, 1, 12, 4, lines, out, 0, a, rs, p, 0, block, K, NULL)
    elif most == 4:
        half_tile(rows, 1, 0, 4, lines, out, 0, a, rs, p, 0, block, K, ahead)
        if lines == 3: half_tile(rows, 1, 4, 2, lines, out, 0, a, rs, p, 0, block, K, more)
        else: half_tile(rows, 1, 4, 4, lines, out, 0, a, rs, p, 0, block, K, more)
    elif most == 3:
        half_tile(rows, 1, 0, 3, lines, out, 0, a, rs, p, 0, block, K, ahead)
        half_tile(rows, 1, 3, 3, lines, out, 0, a, rs, p, 0, block, K, more)
        if lines > 3: half_tile(rows, 1, 6, 2, lines, out, 0, a, rs, p, 0, block, K, NULL)
    else:
        half_tile(rows, 1, 0, 2, lines, out, 0, a, rs, p, 0, block, K, ahead)
        half_tile(rows, 1, 2, 2, lines, out, 0, a, rs, p, 0, block, K, more)
        half_tile(rows, 1, 4, 2, lines, out, 0, a, rs, p, 0, block, K, NULL)
        if lines > 3: half_tile(rows, 1, 6, 2, lines, out, 0, a, rs, p, 0, block, K, NULL)


cdef inline noinline_void half_rows(
    Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, vecf *restrict out, Py_ssize_t step,
    const float *a, Py_ssize_t rs, const half *restrict p, Py_ssize_t next, vecf *restrict block, Py_ssize_t K
) noexcept nogil:
    """The tile for 1 to ROWS rows and 3 or 4 lines, for one row also for fewer."""
    if rows == 1:
        if lines == 1: half_tile(1, 1, 0, VECTORS, 1, out, 0, a, 0, p, 0, block, K, NULL)
        elif lines == 2: half_tile(1, 1, 0, 2 * VECTORS, 2, out, 0, a, 0, p, 0, block, K, NULL)
        elif lines == 3:
            if ROW_PANELS_OF_3 > 1 and panels > 1:
                half_tile(1, ROW_PANELS_OF_3, 0, 3 * VECTORS, 3, out, step, a, 0, p, next, block, K, NULL)
            else: half_tile(1, 1, 0, 3 * VECTORS, 3, out, 0, a, 0, p, 0, block, K, NULL)
        elif ROW_PANELS > 1 and panels > 1:
            half_tile(1, ROW_PANELS, 0, LINES * VECTORS, LINES, out, step, a, 0, p, next, block, K, NULL)
        else: half_tile(1, 1, 0, LINES * VECTORS, LINES, out, 0, a, 0, p, 0, block, K, NULL)
    elif rows == 2: half_lines(2, 4, lines, out, a, rs, p, block, K)
    elif rows == 3: half_lines(3, 4, lines, out, a, rs, p, block, K)
    elif rows == 4: half_lines(4, 3, lines, out, a, rs, p, block, K)
    elif rows == 5: half_lines(5, 2, lines, out, a, rs, p, block, K)
    else: half_lines(ROWS, 2, lines, out, a, rs, p, block, K)


cdef inline noinline_void add_float16_product(
    float *acc, Py_ssize_t step, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, const float *a,
    Py_ssize_t stride, const half *panel, Py_ssize_t next, Py_ssize_t K
) noexcept nogil:
    """`add_panel_product`, or `add_row_panels_product`, with panels of float16 weights that are `next` numbers apart.
    The first tile of rows dequantizes a block of weights, and the other tiles read it."""
    cdef float[(BLOCK * LINES + 1) * LF] room
    cdef float *block = <float *> first_line(&room[0])
    cdef const half *codes
    cdef Py_ssize_t k0 = 0, kb, r, m
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        codes = panel + k0 * lines * LF
        r = 0
        if HALF_VECTORS and (lines >= 3 or rows == 1):
            r = tile_height(rows)
            half_rows(r, panels, lines, <vecf *> acc, step * VECTORS // LF, a + k0, stride, codes, next, <vecf *> block,
                      kb)
        else:
            dequantize_block(block, codes, lines, kb)
        while r < rows:
            m = tile_height(rows - r)
            add_block_product(acc + r * LINES * LF, m, lines, a + r * stride + k0, stride, block, kb, block, 0)
            r += m
        k0 += kb
