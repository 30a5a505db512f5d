"""The formats of packed weights, and products with float16 weights (integer.pxd has those with int8 weights).

A panel of float16 weights has its lines for one k after the other, [k][line][lane].  The first tile of rows
dequantizes weights on their way into registers and leaves them in a block of float32, which the tiles of other rows
read (tile.pxd).  The order of summation is the tile's, so results are bit-identical with those of the float32 weights
that blockcell/quantization.py defines.

Letters and pointers are those of tile.pxd.  `codes` are the float16 weights of a panel, from its first k or from the
first one of a block on; the next panel begins panel_stride numbers further on.
"""
from product.half cimport HAS_LINE_CONVERSIONS, half
from product.lines cimport LF, REAL_BYTES, align_to_line, inline_void, load_halves, noinline_void
from product.real cimport real
from product.tile cimport (
    ACCUMULATORS, BLOCK, LATENCY_ROWS, LINE_BYTES, LINES, ROW_PANELS, ROW_PANELS_OF_3, ROWS, SUB_LINES, VECTORS, ZERO,
    add_block_product, multiply_add, packed_line, packed_stride, packed_vector, prefetch_read,
    tile_height, vec
)

cdef extern from "product/half.h":
    vec dequantize_vector(const half *line, int v) noexcept nogil  # vector v of a line, if HAS_LINE_CONVERSIONS

cdef enum:  # how packed weights are stored, in the order of KERNEL_FORMATS in blockcell/quantization.py
    UNQUANTIZED
    FLOAT16
    INT8


cdef inline Py_ssize_t bytes_per_weight(int format) noexcept nogil:
    """Return the bytes of a packed weight."""
    return REAL_BYTES if format == UNQUANTIZED else 1 if format == INT8 else 2


cdef inline noinline_void dequantize_block(
    real *restrict block, const half *restrict codes, Py_ssize_t lines, Py_ssize_t kb
) noexcept nogil:
    """Dequantize kb values of k of a panel of so many lines to `block`, in the order in which the tile reads it."""
    cdef Py_ssize_t k, g, stride
    cdef real *line
    for g in range(lines):
        line, stride = packed_line(block, lines, g, 0, kb), packed_stride(lines, g)
        for k in range(kb):
            load_halves(line + k * stride, codes + (k * lines + g) * LF, LF)


cdef inline inline_void run_float16_tile(
    Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t v0, Py_ssize_t nv, Py_ssize_t lines, vec *restrict out,
    Py_ssize_t out_stride, const real *a, Py_ssize_t stride, const half *restrict codes, Py_ssize_t panel_stride,
    vec *restrict block, Py_ssize_t K, const char *prefetch
) noexcept nogil:
    """Add A @ (nv vectors of K values of k, from vector v0 on) to `out`, for rows and a panel or a row and some panels.

    Each vector of weights is dequantized once and then used for all rows.  LATENCY_ROWS rows or more, after which there
    may be other tiles (`tile_height`), store it in `block` as well.  Inlined with constant bounds, as `run_tile` is.

    out : the accumulators of the panels, out_stride vectors apart
    codes : panels of so many lines
    block : the weights in float32, in the order in which the tile reads them; written
    prefetch : K lines, or NULL
    """
    cdef vec[2 * ACCUMULATORS] acc
    cdef vec[ACCUMULATORS] w
    cdef Py_ssize_t k = 0, i, q, v, sub = VECTORS * (lines if SUB_LINES > 1 else 1)
    for v in range(rows * panels * nv):
        acc[v] = ZERO
    while True:
        if prefetch is not NULL:
            prefetch_read(prefetch + k * LINE_BYTES)
        for i in range(panels):
            for v in range(nv):
                w[v] = dequantize_vector(
                    codes + i * panel_stride + (k * lines + (v0 + v) // VECTORS) * LF, (v0 + v) % VECTORS)
                if rows >= LATENCY_ROWS:
                    block[packed_vector(v0 + v, sub, k, K)] = w[v]
                if rows <= 3:  # where registers are left for the values of a; with more rows for the weights
                    for q in range(rows):
                        acc[(q * panels + i) * nv + v] = multiply_add(
                            acc[(q * panels + i) * nv + v], w[v], a, q * stride + k)
            if rows > 3:
                for q in range(rows):
                    for v in range(nv):
                        acc[q * nv + v] = multiply_add(acc[q * nv + v], w[v], a, q * stride + k)
        k += 1
        if k == K:
            break
    for q in range(rows):
        for i in range(panels):
            for v in range(nv):
                out[q * LINES * VECTORS + i * out_stride + v0 + v] = (
                    out[q * LINES * VECTORS + i * out_stride + v0 + v] + acc[(q * panels + i) * nv + v])


cdef inline inline_void run_float16_lines(
    Py_ssize_t rows, Py_ssize_t max_vectors, Py_ssize_t lines, vec *restrict out, const real *a, Py_ssize_t stride,
    const half *restrict codes, vec *restrict block, Py_ssize_t K
) noexcept nogil:
    """Run the tile for all of 3 or 4 lines, at most max_vectors at a time where a line has several vectors.

    Meanwhile the codes of the next block are prefetched.
    """
    cdef const char *prefetch = <const char *> (codes + K * lines * LF)
    cdef const char *prefetch_more = prefetch + K * LINE_BYTES
    if VECTORS == 1:
        if lines == 3: run_float16_tile(rows, 1, 0, 3, 3, out, 0, a, stride, codes, 0, block, K, NULL)
        else: run_float16_tile(rows, 1, 0, LINES, LINES, out, 0, a, stride, codes, 0, block, K, NULL)
    elif VECTORS == 4:  # two lines of up to three rows, one of more
        if max_vectors == 4:
            run_float16_tile(rows, 1, 0, 8, lines, out, 0, a, stride, codes, 0, block, K, prefetch)
            if lines == 3: run_float16_tile(rows, 1, 8, 4, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
            else: run_float16_tile(rows, 1, 8, 8, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
        else:
            run_float16_tile(rows, 1, 0, 4, lines, out, 0, a, stride, codes, 0, block, K, prefetch)
            run_float16_tile(rows, 1, 4, 4, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
            run_float16_tile(rows, 1, 8, 4, lines, out, 0, a, stride, codes, 0, block, K, NULL)
            if lines > 3: run_float16_tile(rows, 1, 12, 4, lines, out, 0, a, stride, codes, 0, block, K, NULL)
    elif max_vectors == 4:
        run_float16_tile(rows, 1, 0, 4, lines, out, 0, a, stride, codes, 0, block, K, prefetch)
        if lines == 3: run_float16_tile(rows, 1, 4, 2, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
        else: run_float16_tile(rows, 1, 4, 4, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
    elif max_vectors == 3:
        run_float16_tile(rows, 1, 0, 3, lines, out, 0, a, stride, codes, 0, block, K, prefetch)
        run_float16_tile(rows, 1, 3, 3, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
        if lines > 3: run_float16_tile(rows, 1, 6, 2, lines, out, 0, a, stride, codes, 0, block, K, NULL)
    else:
        run_float16_tile(rows, 1, 0, 2, lines, out, 0, a, stride, codes, 0, block, K, prefetch)
        run_float16_tile(rows, 1, 2, 2, lines, out, 0, a, stride, codes, 0, block, K, prefetch_more)
        run_float16_tile(rows, 1, 4, 2, lines, out, 0, a, stride, codes, 0, block, K, NULL)
        if lines > 3: run_float16_tile(rows, 1, 6, 2, lines, out, 0, a, stride, codes, 0, block, K, NULL)


cdef inline noinline_void run_float16_rows(
    Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, vec *restrict out, Py_ssize_t out_stride,
    const real *a, Py_ssize_t stride, const half *restrict codes, Py_ssize_t panel_stride, vec *restrict block,
    Py_ssize_t K
) noexcept nogil:
    """Run the tile for 1 to ROWS rows and 3 or 4 lines, for a single row also for fewer lines or several panels."""
    if rows == 1:
        if lines == 1: run_float16_tile(1, 1, 0, VECTORS, 1, out, 0, a, 0, codes, 0, block, K, NULL)
        elif lines == 2: run_float16_tile(1, 1, 0, 2 * VECTORS, 2, out, 0, a, 0, codes, 0, block, K, NULL)
        elif lines == 3:
            if ROW_PANELS_OF_3 > 1 and panels > 1:
                run_float16_tile(1, ROW_PANELS_OF_3, 0, 3 * VECTORS, 3, out, out_stride, a, 0, codes, panel_stride,
                                 block, K, NULL)
            else: run_float16_tile(1, 1, 0, 3 * VECTORS, 3, out, 0, a, 0, codes, 0, block, K, NULL)
        elif ROW_PANELS > 1 and panels > 1:
            run_float16_tile(1, ROW_PANELS, 0, LINES * VECTORS, LINES, out, out_stride, a, 0, codes, panel_stride,
                             block, K, NULL)
        else: run_float16_tile(1, 1, 0, LINES * VECTORS, LINES, out, 0, a, 0, codes, 0, block, K, NULL)
    elif rows == 2: run_float16_lines(2, 4, lines, out, a, stride, codes, block, K)
    elif rows == 3: run_float16_lines(3, 4, lines, out, a, stride, codes, block, K)
    elif rows == 4: run_float16_lines(4, 3, lines, out, a, stride, codes, block, K)
    elif rows == 5: run_float16_lines(5, 2, lines, out, a, stride, codes, block, K)
    else: run_float16_lines(ROWS, 2, lines, out, a, stride, codes, block, K)


cdef inline noinline_void add_float16_product(
    real *acc, Py_ssize_t acc_stride, Py_ssize_t rows, Py_ssize_t panels, Py_ssize_t lines, const real *a,
    Py_ssize_t stride, const half *codes, Py_ssize_t panel_stride, Py_ssize_t K
) noexcept nogil:
    """Add A @ (a panel of float16 weights) to acc for `rows` rows, or for one row and each of several panels.

    The first tile of rows dequantizes a block of weights, and the other tiles read it.

    acc : the accumulators of the panels, acc_stride numbers apart
    codes : the first panel
    """
    cdef real[(BLOCK * LINES + 1) * LF] space
    cdef real *block = <real *> align_to_line(&space[0])
    cdef const half *block_codes
    cdef Py_ssize_t k0 = 0, kb, q, height
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        block_codes = codes + k0 * lines * LF
        q = 0
        if HAS_LINE_CONVERSIONS and (lines >= 3 or rows == 1):
            q = tile_height(rows)
            run_float16_rows(q, panels, lines, <vec *> acc, acc_stride * VECTORS // LF, a + k0, stride, block_codes,
                             panel_stride, <vec *> block, kb)
        else:
            dequantize_block(block, block_codes, lines, kb)
        while q < rows:
            height = tile_height(rows - q)
            add_block_product(acc + q * LINES * LF, height, lines, a + q * stride + k0, stride, block, kb, 0)
            q += height
        k0 += kb
