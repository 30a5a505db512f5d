"""The matrix product under every kernel: a register tile (BLIS' micro-kernel) over packed panels (its micro-panels).

The unit of both is the *cache line*: 64 bytes of neighbouring columns, 16 floats or 8 doubles, at every CPU level.  A
panel holds 1 to LINES lines of columns of a weight matrix for all k, in the order in which the tile reads them:

    [block of BLOCK k][sub-panel of SUB_LINES lines][k in block][line in sub-panel][lane]

The tile adds A (rows x K) @ panel (K x lines) to an accumulator of ROWS rows by LINES lines.

Order of summation, a promise to users: k is cut into blocks.  Each block is one chain of multiply-adds, which starts at
zero and ascends in k.  The blocks are added in ascending order to what the accumulator holds.  So the result of a row
depends on that row and on the panel alone, and is bit-identical for any number of rows and of threads.

Letters: K and k values that are summed, k0 the first one of a block and kb their number in it; q a row of A, which is
a batch row, or in gradients of weights an input; g a line of a panel; v a vector register; l a lane.  Pointers that
several functions take:

    a : rows of A, a `stride` apart; or, if that is 1, k columns of ROWS values each; read only
    panel, block : a packed panel, and what it has for one block of k; read only
    acc, out : [rows,LINES,L], the accumulator, in reals or in vectors; the caller's, aliases nothing
    distance : bytes from the weights that a tile reads to those that it prefetches meanwhile, or 0.  These are never
        read, so they may lie past the end of an array
"""
from product.lines cimport (
    LF, Array, L, at, clear, holds_half, inline_void, load_line, load_row, noinline_void
)
from product.real cimport COMPUTES_FLOAT, real

cdef extern from "product/tile.h":
    void prefetch_write(const void *address) noexcept nogil  # a line that is written soon, into the first-level cache
    void prefetch_read(const void *address) noexcept nogil  # a line that is read soon, into the second-level cache
    real scalar_factor(real x) noexcept nogil
    void keep_in_register(const void *vector) noexcept nogil
    ctypedef Py_ssize_t inline_size "ALWAYS_INLINE_SIZE"  # of functions that are inlined everywhere
    ctypedef real vec  # a whole vector register; C's operators work on it elementwise
    ctypedef float squaresf  # rows of several squares, which are transposed side by side
    ctypedef double squaresd
    squaresf load_16_bytes_of_rows(const char *row, Py_ssize_t stride) noexcept nogil
    # From each 16 bytes of a and b in turn: the low or high floats, pairs of floats, or doubles (x86's unpack).
    squaresf unpack_low(squaresf a, squaresf b) noexcept nogil
    squaresf unpack_high(squaresf a, squaresf b) noexcept nogil
    squaresf unpack_low_pairs(squaresf a, squaresf b) noexcept nogil
    squaresf unpack_high_pairs(squaresf a, squaresf b) noexcept nogil
    squaresd unpack_low_doubles(squaresd a, squaresd b) noexcept nogil
    squaresd unpack_high_doubles(squaresd a, squaresd b) noexcept nogil
    const vec ZERO
    const unsigned char[6][4][4] SPANS  # [ROWS,LINES,LINES], the schedule of the tile
    bint IS_SPAN(Py_ssize_t rows, Py_ssize_t span, Py_ssize_t nv) noexcept nogil
    ctypedef struct one_row: pass
    ctypedef struct two_rows: pass
    ctypedef struct three_rows: pass
    ctypedef struct four_rows: pass
    ctypedef struct five_rows: pass
    ctypedef struct six_rows: pass
    enum:
        ROWS  # rows of the tile
        SUB_LINES  # lines of a sub-panel, which the tile takes at once: one, or all of a panel
        LINE_BYTES
        LINES  # most lines in a panel
        VECTORS  # vector registers in a line
        SQUARES_VECTORS  # of these vectors in a line
        ACCUMULATORS  # vectors of sums of a tile
        ROW_PANELS  # panels that a single row is multiplied with at once: as many as have registers for their sums
        ROW_PANELS_OF_3  # panels of 3 lines that it is multiplied with at once
        ROW_ACCUMULATORS  # vectors of sums of these panels, at most
        BLOCK  # k in one chain of a product
        ROW_BLOCK  # rows (t, row) of a weight gradient whose chains are summed before they join the total
        ROW_CHAINS  # chains in a ROW_BLOCK
        PACK_ROWS  # rows of a matrix that are packed together: few, as each is a stream of its own to read
        GROUP_TILES  # most tiles of rows that share a block of a panel while it is in the first-level cache
        LATENCY_ROWS  # a tile of fewer rows takes as long as one of these, because it waits for its own sums
        TILE_SIZE  # reals in an accumulator


# ------------------------------------------------------------------------------------------------------------ packing
cdef inline real *packed_line(real *panel, Py_ssize_t lines, Py_ssize_t g, Py_ssize_t k0, Py_ssize_t kb) noexcept nogil:
    """Return where a panel of so many lines has line g of the kb values of k from k0 on."""
    return panel + k0 * lines * L + (g // SUB_LINES) * SUB_LINES * L * kb + (g % SUB_LINES) * L


cdef inline Py_ssize_t packed_stride(Py_ssize_t lines, Py_ssize_t g) noexcept nogil:
    """Return the distance from one k to the next in the sub-panel of line g."""
    return min(<Py_ssize_t> SUB_LINES, lines - g // SUB_LINES * SUB_LINES) * L


cdef inline void pack_line(
    real *line, Py_ssize_t stride, Py_ssize_t first, Py_ssize_t count, Array w, Py_ssize_t ld, Py_ssize_t n
) noexcept nogil:
    """Pack n columns of the rows `first` to first + count of w into a line of a panel, padded with zeros.

    line : `packed_line`; a `stride`, `packed_stride`, lies between one k and the next
    w : [first + count,ld], from the first of the columns on
    """
    cdef Py_ssize_t k
    for k in range(first, first + count):
        prefetch_read(at(w, (k + PACK_ROWS) * ld).data)
        load_line(line + k * stride, at(w, k * ld), n)


cdef inline void pack_rows(
    real *panel, Py_ssize_t lines, Array rows, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t K
) noexcept nogil:
    """Pack n columns of K rows, `ld` apart, into a panel of so many lines, padded with zeros."""
    cdef Py_ssize_t k0 = 0, k, g, kb
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        for k in range(kb):
            for g in range(lines):
                prefetch_read(at(rows, (k0 + k + PACK_ROWS) * ld + g * L).data)
                load_line(packed_line(panel, lines, g, k0, kb) + k * packed_stride(lines, g),
                          at(rows, (k0 + k) * ld + g * L), n - g * L)
        k0 += kb


cdef inline noinline_void transpose_squares(
    real *restrict dst, Py_ssize_t stride, const real *restrict src, Py_ssize_t ld, Py_ssize_t squares
) noexcept nogil:
    """Transpose so many squares of 16 bytes by 16 bytes, side by side in src, one below the other in dst.

    As many squares as a vector holds, from rows further down, are transposed at once.  This is not inlined because its
    addresses would find no registers among others.

    dst : a vector for each column of src, a `stride` apart: dst[i, j] := src[j, i]
    src : as many rows as a vector has lanes, `ld` apart
    """
    cdef Py_ssize_t _square, row = ld * sizeof(real), side = 16 // sizeof(real)
    cdef const char *column = <const char *> src
    cdef squaresf a, b, c, d, ab, cd
    cdef squaresd e, f
    for _square in range(squares):
        if COMPUTES_FLOAT:
            a = load_16_bytes_of_rows(column, side * row)
            b = load_16_bytes_of_rows(column + row, side * row)
            c = load_16_bytes_of_rows(column + 2 * row, side * row)
            d = load_16_bytes_of_rows(column + 3 * row, side * row)
            ab, cd = unpack_low(a, b), unpack_low(c, d)
            (<squaresf *> dst)[0] = unpack_low_pairs(ab, cd)
            (<squaresf *> (dst + stride))[0] = unpack_high_pairs(ab, cd)
            ab, cd = unpack_high(a, b), unpack_high(c, d)
            (<squaresf *> (dst + 2 * stride))[0] = unpack_low_pairs(ab, cd)
            (<squaresf *> (dst + 3 * stride))[0] = unpack_high_pairs(ab, cd)
        else:
            e = <squaresd> load_16_bytes_of_rows(column, side * row)
            f = <squaresd> load_16_bytes_of_rows(column + row, side * row)
            (<squaresd *> dst)[0] = unpack_low_doubles(e, f)
            (<squaresd *> (dst + stride))[0] = unpack_high_doubles(e, f)
        column += 16
        dst += side * stride


cdef inline void transpose_rows(
    real *dst, Py_ssize_t stride, Array w, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t kb
) noexcept nogil:
    """Transpose n rows of kb <= BLOCK values into kb lines, padded with zeros: line k := column k of the rows.

    dst : [kb] lines, a `stride` apart
    w : [n,kb], rows `ld` apart; n may be more than the lanes of a line
    """
    cdef Py_ssize_t k, l, v, side = 16 // sizeof(real), squares = kb // side
    cdef Py_ssize_t count = min(n, L), row_stride = ld
    cdef real[LF * BLOCK] space  # rows as reals, and rows of zeros
    cdef const real *rows = <const real *> w.data
    if holds_half(w) or count < L:
        rows, row_stride = space, BLOCK
        for l in range(count):
            load_row(space + l * BLOCK, at(w, l * ld), kb)
        clear(space + count * BLOCK, (L - count) * BLOCK)
    for v in range(SQUARES_VECTORS):
        l = v * (L // SQUARES_VECTORS)
        transpose_squares(dst + l, stride, rows + l * row_stride, row_stride, squares)
    for k in range(squares * side, kb):  # columns that fill no square
        for l in range(L):
            dst[k * stride + l] = rows[l * row_stride + k]


# --------------------------------------------------------------------------------------------------------------- tile
cdef inline vec multiply_add(vec sum, vec w, const real *a, Py_ssize_t index) noexcept nogil:
    """Return sum + w * a[index].  gcc moves sums from register to register where this is an expression in a loop."""
    return sum + w * scalar_factor(a[index])


cdef inline inline_size packed_vector(Py_ssize_t v, Py_ssize_t sub, Py_ssize_t k, Py_ssize_t K) noexcept nogil:
    """Return where a block of K values of k, whose sub-panels have `sub` vectors, has vector v for a k."""
    return (v // sub * K + k) * sub + v % sub


cdef inline inline_void run_tile(
    Py_ssize_t rows, Py_ssize_t v0, Py_ssize_t nv, Py_ssize_t sub, vec *restrict out, const real *a, Py_ssize_t rs,
    Py_ssize_t ks, const vec *restrict block, Py_ssize_t K, Py_ssize_t distance
) noexcept nogil:
    """Add A @ (nv vectors of a block's K >= 1 values of k, from vector v0 on) to `rows` rows of `out`.

    It is inlined with rows, v0, nv and sub constant, so that the accumulators live in registers.  The loop over k is no
    `for`, because they have to stay there across its end.  With two values of k in a round gcc keeps some on the stack.

    a : a[q, k] is at q * rs + k * ks
    block : its sub-panels have `sub` vectors
    distance : not used by few rows at v4, whose sub-panels CPUs prefetch well, as they are four times as long
    """
    cdef vec acc[ACCUMULATORS]
    cdef vec w[ACCUMULATORS]
    cdef Py_ssize_t k = 0, q, v, u
    cdef Py_ssize_t prefetched = (v0 + nv) // VECTORS - v0 // VECTORS if SUB_LINES == 1 or rows >= LATENCY_ROWS else 0
    for q in range(rows):
        for v in range(nv):
            acc[q * nv + v] = ZERO
    while True:
        for u in range(prefetched if rows > 1 or distance != 0 else 0):  # to prefetch in vain slows a single row down
            prefetch_read(<const char *> block + distance + (k * prefetched + u) * LINE_BYTES)
        for v in range(nv):
            w[v] = block[packed_vector(v0 + v, sub, k, K)]
            if 1 < rows < ROWS:
                keep_in_register(&w[v])
            if rows <= 3:
                for q in range(rows):
                    acc[q * nv + v] = multiply_add(acc[q * nv + v], w[v], a, q * rs + k * ks)
        if rows > 3:
            for q in range(rows):
                for v in range(nv):
                    acc[q * nv + v] = multiply_add(acc[q * nv + v], w[v], a, q * rs + k * ks)
        k += 1
        if k == K:
            break
    for q in range(rows):
        for v in range(nv):
            out[q * LINES * VECTORS + v0 + v] = out[q * LINES * VECTORS + v0 + v] + acc[q * nv + v]


cdef inline noinline_void run_four_by_three(
    Py_ssize_t v0, vec *restrict out, const real *a, Py_ssize_t rs, Py_ssize_t ks, const vec *restrict block,
    Py_ssize_t K, Py_ssize_t distance
) noexcept nogil:
    """Run the tile for four rows and three vectors of two lines, those from v0 = 0 or 1 on.

    This is not inlined because its addresses would find no registers among those of other tiles.
    """
    if v0 == 0: run_tile(4, 0, 3, VECTORS, out, a, rs, ks, block, K, distance)
    else: run_tile(4, 1, 3, VECTORS, out, a, rs, ks, block, K, distance)


cdef inline inline_size run_span(
    Py_ssize_t rows, Py_ssize_t v0, Py_ssize_t nv, vec *restrict out, const real *a, Py_ssize_t rs, Py_ssize_t ks,
    const vec *restrict block, Py_ssize_t K, Py_ssize_t distance
) noexcept nogil:
    """Run the tile for a span of nv vectors, and return the vector after it; inlined with rows and nv constant.

    v0 : the span's first vector; 0, or nv % VECTORS where a span of the same length was before (`SPANS`)
    """
    cdef Py_ssize_t sub = nv if SUB_LINES > 1 else VECTORS
    if nv % sub == 0: run_tile(rows, 0, nv, sub, out, a, rs, ks, block, K, distance)
    elif rows == 4 and nv == 3: run_four_by_three(v0, out, a, rs, ks, block, K, distance)
    elif v0 == 0: run_tile(rows, 0, nv, sub, out, a, rs, ks, block, K, distance)
    else: run_tile(rows, nv % sub, nv, sub, out, a, rs, ks, block, K, distance)
    return v0 + nv


cdef inline inline_void run_lines(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict out, const real *a, Py_ssize_t rs, Py_ssize_t ks,
    const vec *restrict block, Py_ssize_t K, Py_ssize_t distance
) noexcept nogil:
    """Run the tile for all lines of a block, in the spans that SPANS lists; inlined with `rows` constant."""
    cdef const unsigned char *spans = SPANS[rows - 1][lines - 1]
    cdef const vec *end = out + lines * VECTORS
    cdef Py_ssize_t v0 = 0, ended_lines  # v0 : the first vector of the next span, from its line on
    while True:  # the last length is not compared, so that tiles that go from line to line look nothing up
        if IS_SPAN(rows, spans[0], 2): v0 = run_span(rows, v0, 2, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 3): v0 = run_span(rows, v0, 3, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 4): v0 = run_span(rows, v0, 4, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 6): v0 = run_span(rows, v0, 6, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 8): v0 = run_span(rows, v0, 8, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 12): v0 = run_span(rows, v0, 12, out, a, rs, ks, block, K, distance)
        elif IS_SPAN(rows, spans[0], 16): v0 = run_span(rows, v0, 16, out, a, rs, ks, block, K, distance)
        else: v0 = run_span(rows, v0, VECTORS, out, a, rs, ks, block, K, distance)
        spans += 1
        ended_lines = v0 // VECTORS
        v0 %= VECTORS
        out += ended_lines * VECTORS
        block += ended_lines * VECTORS * K
        if SUB_LINES > 1 or out == end:  # at v4 the span was all lines
            break


ctypedef fused row_count:
    one_row
    two_rows
    three_rows
    four_rows
    five_rows
    six_rows


cdef inline noinline_void run_fixed_rows(
    row_count *_of_size, vec *restrict out, const vec *restrict block, const real *a, Py_ssize_t stride,
    Py_ssize_t K, Py_ssize_t lines, Py_ssize_t distance
) noexcept nogil:
    """Run `run_lines` for as many rows as the type has bytes.

    `add_block_product` calls a function for each number of rows, because gcc keeps the addresses of tiles on the stack
    where a function has more of them.
    """
    if stride == 1: run_lines(sizeof(row_count), lines, out, a, 1, ROWS, block, K, distance)
    else: run_lines(sizeof(row_count), lines, out, a, stride, 1, block, K, distance)


cdef inline void add_block_product(
    real *acc, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t stride, const real *block, Py_ssize_t K,
    Py_ssize_t distance
) noexcept nogil:
    """Add A @ block to acc for 1 to ROWS rows and a block of K values of k."""
    cdef vec *out = <vec *> acc
    cdef const vec *w = <const vec *> block
    if rows == 1: run_fixed_rows(<one_row *> NULL, out, w, a, stride, K, lines, distance)
    elif rows == 2: run_fixed_rows(<two_rows *> NULL, out, w, a, stride, K, lines, distance)
    elif rows == 3: run_fixed_rows(<three_rows *> NULL, out, w, a, stride, K, lines, distance)
    elif ROWS > 3:
        if rows == 4: run_fixed_rows(<four_rows *> NULL, out, w, a, stride, K, lines, distance)
        elif rows == 5: run_fixed_rows(<five_rows *> NULL, out, w, a, stride, K, lines, distance)
        elif ROWS > 5: run_fixed_rows(<six_rows *> NULL, out, w, a, stride, K, lines, distance)


cdef inline inline_void run_row_panels(
    Py_ssize_t panels, Py_ssize_t lines, Py_ssize_t last_lines, vec *restrict out, Py_ssize_t out_stride, const real *a,
    const vec *restrict block, Py_ssize_t panel_stride, Py_ssize_t K
) noexcept nogil:
    """Add a @ block for one row and a block of each of several panels, K values of k; inlined with constant numbers.

    A single row waits for its own additions, and several panels give it more chains to add to meanwhile.

    out : the accumulators of the panels, out_stride vectors apart
    block : that of the first panel, of 3 or 4 lines, the last one of last_lines; panel_stride vectors lie between two
    """
    cdef vec acc[ROW_ACCUMULATORS]
    cdef Py_ssize_t k = 0, i, s, v, n = lines * VECTORS, sub, own
    for v in range((panels - 1) * n + last_lines * VECTORS):
        acc[v] = ZERO
    while True:
        for i in range(panels):
            own = last_lines if i == panels - 1 else lines
            sub = min(<Py_ssize_t> SUB_LINES, own) * VECTORS
            for s in range(own * VECTORS // sub):
                for v in range(sub):
                    acc[i * n + s * sub + v] = multiply_add(
                        acc[i * n + s * sub + v], block[i * panel_stride + (s * K + k) * sub + v], a, k)
        k += 1
        if k == K:
            break
    for i in range(panels):
        for v in range(last_lines * VECTORS if i == panels - 1 else n):
            out[i * out_stride + v] = out[i * out_stride + v] + acc[i * n + v]


cdef inline noinline_void run_one_row(
    Py_ssize_t lines, Py_ssize_t last_lines, vec *restrict out, Py_ssize_t out_stride, const real *a,
    const vec *restrict block, Py_ssize_t panel_stride, Py_ssize_t K
) noexcept nogil:
    """Call `run_row_panels` with constants for as many panels of 3 or LINES lines as the level takes at once."""
    if lines == 3:
        if ROW_PANELS_OF_3 > 1: run_row_panels(ROW_PANELS_OF_3, 3, 3, out, out_stride, a, block, panel_stride, K)
    elif ROW_PANELS > 1:
        if last_lines == 1: run_row_panels(ROW_PANELS, LINES, 1, out, out_stride, a, block, panel_stride, K)
        elif last_lines == 2: run_row_panels(ROW_PANELS, LINES, 2, out, out_stride, a, block, panel_stride, K)
        elif last_lines == 3: run_row_panels(ROW_PANELS, LINES, 3, out, out_stride, a, block, panel_stride, K)
        else: run_row_panels(ROW_PANELS, LINES, LINES, out, out_stride, a, block, panel_stride, K)


cdef inline void add_row_panels_product(
    Py_ssize_t lines, Py_ssize_t last_lines, real *acc, Py_ssize_t acc_stride, const real *a, const real *panel,
    Py_ssize_t panel_stride, Py_ssize_t K
) noexcept nogil:
    """Add a @ panel for one row and each of ROW_PANELS panels of LINES lines, or of ROW_PANELS_OF_3 of 3 lines.

    acc : the accumulators of the panels, acc_stride reals apart
    panel : the first one, panel_stride reals before the next; of two panels with LINES lines the last may have fewer
    """
    cdef Py_ssize_t k0 = 0, kb
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        run_one_row(lines, last_lines, <vec *> acc, acc_stride * VECTORS // L, a + k0,
                    <const vec *> (panel + k0 * lines * L), panel_stride * VECTORS // L, kb)
        k0 += kb
        panel_stride -= kb * (lines - last_lines) * L  # the last panel's blocks are so much smaller


cdef inline inline_void add_panel_product(
    real *acc, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t stride, const real *panel, Py_ssize_t K,
    Py_ssize_t distance
) noexcept nogil:
    """Add a @ panel to acc for `rows` rows, whose tiles all read one block of the panel before the next.

    distance : for the first tile, which reads each line of the panel before the others
    """
    cdef Py_ssize_t k0 = 0, kb, q, height
    cdef const real *block
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        block = panel + k0 * lines * L
        q = 0
        while q < rows:
            height = tile_height(rows - q)
            add_block_product(acc + q * LINES * L, height, lines, a + q * stride + k0, stride, block, kb,
                              distance if q == 0 else 0)
            q += height
        k0 += kb


cdef inline inline_void extend_chains_inline(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict sums, Py_ssize_t sums_stride, const real *a, Py_ssize_t stride,
    const real *w, Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    """Extend chains by K >= 1 values of k, as `extend_chains` for vectors; inlined with constant rows.

    sums : [rows,lines], rows sums_stride vectors apart; read and written
    w : [K,ld], a weight matrix that is not packed
    """
    cdef vec acc[ROWS * VECTORS]
    cdef const vec *line
    cdef Py_ssize_t g, k, q, v
    for g in range(lines):
        for q in range(rows):
            for v in range(VECTORS):
                acc[q * VECTORS + v] = sums[q * sums_stride + g * VECTORS + v]
        k = 0
        while True:
            line = <const vec *> (w + k * ld) + g * VECTORS
            for q in range(rows):
                for v in range(VECTORS):
                    acc[q * VECTORS + v] = multiply_add(acc[q * VECTORS + v], line[v], a, q * stride + k)
            k += 1
            if k == K:
                break
        for q in range(rows):
            for v in range(VECTORS):
                sums[q * sums_stride + g * VECTORS + v] = acc[q * VECTORS + v]


cdef inline noinline_void extend_chains_of_rows(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict sums, Py_ssize_t ss, const real *a, Py_ssize_t rs, const real *w,
    Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    """Call `extend_chains_inline` for 1 to 4 rows, which become a constant there, as does the usual K."""
    if K == PACK_ROWS:
        if rows == 1: extend_chains_inline(1, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif rows == 2: extend_chains_inline(2, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif rows == 3: extend_chains_inline(3, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif ROWS > 3: extend_chains_inline(4, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
    elif rows == 1: extend_chains_inline(1, lines, sums, ss, a, rs, w, ld, K)
    elif rows == 2: extend_chains_inline(2, lines, sums, ss, a, rs, w, ld, K)
    elif rows == 3: extend_chains_inline(3, lines, sums, ss, a, rs, w, ld, K)
    elif ROWS > 3: extend_chains_inline(4, lines, sums, ss, a, rs, w, ld, K)


cdef inline void extend_chains(
    real *sums, Py_ssize_t sums_stride, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t stride,
    const real *w, Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    """Extend the chains of a product by the next K values of k: each goes on in ascending k from its last sum.

    sums : [rows,lines,L], rows sums_stride reals apart; the sums of the chains so far, read and written
    a : [rows,K], rows a `stride` apart
    w : [K,ld], so many whole lines of weights that are not packed
    """
    cdef Py_ssize_t q = 0, height
    while q < rows:
        height = min(tile_height(rows - q), <Py_ssize_t> 4)
        extend_chains_of_rows(height, lines, <vec *> (sums + q * sums_stride), sums_stride * VECTORS // L,
                              a + q * stride, stride, w, ld, K)
        q += height


cdef inline Py_ssize_t tile_group_height(Py_ssize_t rows) noexcept nogil:
    """Return how many of the remaining rows share a panel's blocks next: at most GROUP_TILES full tiles.

    Groups have nearly equal numbers of rows.
    """
    cdef Py_ssize_t groups
    if rows <= GROUP_TILES * ROWS:  # because divisions would slow down a small step
        return rows
    groups = (rows + GROUP_TILES * ROWS - 1) // (GROUP_TILES * ROWS)
    return ((rows + groups - 1) // groups + ROWS // 2) // ROWS * ROWS


cdef inline Py_ssize_t tile_height(Py_ssize_t rows) noexcept nogil:
    """Return how many of the remaining rows the next tile takes: all that it can, while LATENCY_ROWS are left for each
    of the others, because a tile of fewer rows takes as long."""
    cdef Py_ssize_t tiles
    if rows <= ROWS:
        return rows
    tiles = (rows + ROWS - 1) // ROWS
    if VECTORS == 2 and rows % ROWS == 1:  # because a single row that takes several lines is fast (`SPANS`)
        return ROWS
    return min(<Py_ssize_t> ROWS, max(rows - (tiles - 1) * LATENCY_ROWS, (rows + tiles - 1) // tiles))
