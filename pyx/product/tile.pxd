"""The matrix product under every kernel: one register tile over packed panels.

Units are handled in *lines* of 64 bytes (16 floats, 8 doubles) at every CPU level.  A *panel* holds 1 to LINES lines of
columns of a weight matrix for all k, in the order in which the tile reads it:

    [block of BLOCK k][sub-panel of SUB lines][k in block][line in sub-panel][lane]

`product` adds A (rows x K) @ panel (K x lines) to an accumulator tile of ROWS rows by LINES lines.  Order of summation,
a promise to users: k is cut into blocks, each block is one chain of fused multiply-adds from zero in ascending k, and
the blocks are added in ascending order to what the accumulator holds.  A row's result depends on nothing but that row
and the panel, whatever the number of rows, so results keep their bits for any batch size and any split over threads.
"""
from product.half cimport CONVERTS, float_to_half, half, half_to_float, line_to_float, line_to_half
from product.real cimport real

ctypedef fused store:  # what arrays hold; `half` is computed as float
    float
    double
    half

cdef enum:  # the types of `store`, in the order of DTYPES in blockcell/optable.py
    FLOAT, DOUBLE, HALF

cdef extern from "product/tile.h":
    void prefetch_write(const void *address) noexcept nogil  # brings a line into the cache before it is needed
    void prefetch_read(const void *address) noexcept nogil  # the same, into the second-level cache
    float factor(float x) noexcept nogil
    double factor_of_doubles(double x) noexcept nogil
    void hold(const void *vector) noexcept nogil  # in a register, from which all rows take it
    ctypedef void inline_void "INLINED"
    ctypedef void noinline_void "CALLED"
    ctypedef float vecf  # a whole vector register; C's operators work on it elementwise
    ctypedef double vecd
    vecf side_by_side(const char *row, Py_ssize_t stride) noexcept nogil
    # Of each 16 bytes of a and b: the even or odd elements in turn, of four floats also the even or odd pairs.
    vecf even(vecf a, vecf b) noexcept nogil
    vecf odd(vecf a, vecf b) noexcept nogil
    vecf even_pairs(vecf a, vecf b) noexcept nogil
    vecf odd_pairs(vecf a, vecf b) noexcept nogil
    vecd even_doubles(vecd a, vecd b) noexcept nogil
    vecd odd_doubles(vecd a, vecd b) noexcept nogil
    const vecf ZEROF
    const vecd ZEROD
    enum:
        ROWS  # rows of the tile
        SUB  # lines that the tile takes at once: one, or all of a panel
        FILLS  # whether lines are four vectors, and a few rows take several of them
        LF  # floats in a line
        LD  # doubles in a line
        LINE_BYTES
        LINES  # most lines in a panel
        VECTORS  # vector registers in a line
        ACC  # accumulators of the tile
        ROW_PANELS  # panels that one row takes at once, where the registers hold their chains
        ROW_PANELS_OF_3  # likewise of panels of 3 lines
        CHAINS  # that this makes at most
        BLOCK  # k in one chain of a product
        ROW_BLOCK  # rows (t, b) of a weight gradient whose chains are summed before they join the total
        ROW_CHAINS  # chains in that
        PACK_ROWS  # rows of a matrix that are packed together: few, as each is a stream of its own to read
        GROUP_TILES  # tiles of rows that meet a block of a panel while it is in the first-level cache
        LATENCY_ROWS  # rows of a tile that take as long as fewer
        TILE_SIZE  # reals in an accumulator tile

ctypedef fused vec:
    vecf
    vecd


cdef inline Py_ssize_t real_itemsize(const store *unused) noexcept nogil:
    """Bytes of the type in which such arrays are computed."""
    return 8 if store is double else 4


cdef inline Py_ssize_t computed_itemsize(int storage) noexcept nogil:
    """Return the bytes of a number as it is computed, where arrays are of the type `storage`: FLOAT, DOUBLE or HALF."""
    return 8 if storage == DOUBLE else 4


cdef inline Py_ssize_t lanes_of(const real *unused) noexcept nogil:
    """Lanes of a line: 64 bytes."""
    return LF if real is float else LD


cdef inline Py_ssize_t lines_in(const real *unused, Py_ssize_t n) noexcept nogil:
    """Lines that hold n values."""
    return (n + lanes_of(unused) - 1) // lanes_of(unused)


# ------------------------------------------------------------------------------------------- lines to and from arrays
cdef inline void load_value(real *dst, const store *src) noexcept nogil:
    if store is half:
        dst[0] = half_to_float(src[0])
    else:
        dst[0] = <real> src[0]


cdef inline void store_value(store *dst, real value) noexcept nogil:
    """The same back, rounded once."""
    if store is half:
        dst[0] = float_to_half(<float> value)
    else:
        dst[0] = <store> value


cdef inline void load_line(real *restrict dst, const store *restrict src, Py_ssize_t n) noexcept nogil:
    """A line from n values of an array, padded with zeros."""
    cdef Py_ssize_t l, lanes = lanes_of(dst)
    if n >= lanes:
        if store is half:
            if CONVERTS:
                line_to_float(<float *> dst, src)
                return
        for l in range(lanes):
            load_value(dst + l, src + l)
        return
    for l in range(n):
        load_value(dst + l, src + l)
    for l in range(n, lanes):
        dst[l] = 0


cdef inline const real *padded_line(real *room, const store *src, Py_ssize_t n) noexcept nogil:
    """Where a line of n values is: in the array if it can be read there, else in `room`, padded with zeros."""
    if store is half:
        load_line(room, src, n)
        return room
    else:
        if n >= lanes_of(room):
            return <const real *> src
        load_line(room, src, n)
        return room


cdef inline void store_line(store *restrict dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    """The first n lanes of a line to an array, rounded once."""
    cdef Py_ssize_t l, lanes = lanes_of(src)
    if n >= lanes:
        if store is half:
            if CONVERTS:
                line_to_half(dst, <const float *> src)
                return
        for l in range(lanes):
            store_value(dst + l, src[l])
        return
    for l in range(n):
        store_value(dst + l, src[l])


cdef inline void load_part(real *restrict dst, const store *restrict src, Py_ssize_t n) noexcept nogil:
    """n values, and nothing else."""
    cdef Py_ssize_t l
    for l in range(n):
        load_value(dst + l, src + l)


cdef inline void load_row(real *restrict dst, const store *restrict src, Py_ssize_t n) noexcept nogil:
    """n values as whole lines, the last one padded with zeros."""
    cdef Py_ssize_t j, lanes = lanes_of(dst)
    for j in range(lines_in(dst, n)):
        load_line(dst + j * lanes, src + j * lanes, n - j * lanes)


cdef inline void clear(real *dst, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t l
    for l in range(n):
        dst[l] = 0


cdef inline void round_to_half(real *line) noexcept nogil:
    cdef half[LF] stored
    store_line(stored, line, LF)
    load_line(line, stored, LF)


cdef inline void store_row(store *restrict dst, const real *restrict src, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t j, lanes = lanes_of(src)
    for j in range(lines_in(src, n)):
        store_line(dst + j * lanes, src + j * lanes, n - j * lanes)


cdef inline void *first_line(const void *memory) noexcept nogil:
    """The first address that begins a cache line."""
    return <void *> ((<size_t> memory + 63) & ~<size_t> 63)


cdef inline void *align_scratch(unsigned char[::1] work) noexcept nogil:
    """Likewise, in scratch."""
    return first_line(&work[0])


# ------------------------------------------------------------------------------------------------------------ packing
cdef inline real *packed_line(real *panel, Py_ssize_t lines, Py_ssize_t g, Py_ssize_t k0, Py_ssize_t kb) noexcept nogil:
    """Where line g of the block of kb rows that starts at k0 begins in a panel."""
    return panel + k0 * lines * lanes_of(panel) + (g // SUB) * SUB * lanes_of(panel) * kb + (g % SUB) * lanes_of(panel)


cdef inline Py_ssize_t packed_stride(const real *panel, Py_ssize_t lines, Py_ssize_t g) noexcept nogil:
    """From one k to the next in the sub-panel of line g."""
    return min(<Py_ssize_t> SUB, lines - g // SUB * SUB) * lanes_of(panel)


cdef inline void load_lines(
    real *panel, Py_ssize_t step, Py_ssize_t k0, Py_ssize_t count, const store *w, Py_ssize_t ld, Py_ssize_t n
) noexcept nogil:
    """n columns of the rows k0 to k0 + count of w to the line of a panel that begins at `panel`."""
    cdef Py_ssize_t k
    for k in range(k0, k0 + count):
        prefetch_read(w + (k + PACK_ROWS) * ld)
        load_line(panel + k * step, w + k * ld, n)


cdef inline void pack_rows(
    real *panel, Py_ssize_t lines, const store *rows, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t K
) noexcept nogil:
    """A panel of so many lines := n columns of K rows (row stride ld), zeros beyond."""
    cdef Py_ssize_t k0 = 0, k, g, kb, lanes = lanes_of(panel)
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        for k in range(kb):
            for g in range(lines):
                prefetch_read(rows + (k0 + k + PACK_ROWS) * ld + g * lanes)
                load_line(packed_line(panel, lines, g, k0, kb) + k * packed_stride(panel, lines, g),
                          rows + (k0 + k) * ld + g * lanes, n - g * lanes)
        k0 += kb


cdef inline noinline_void transpose_squares(
    real *restrict dst, Py_ssize_t step, const real *restrict src, Py_ssize_t ld, Py_ssize_t squares
) noexcept nogil:
    """16 bytes each of the rows of src, as many as a vector has lanes, side by side there and one below the other in
    dst: dst[i, j] := src[j, i].  A function of its own, as the addresses find no registers among others."""
    cdef Py_ssize_t _square, row = ld * sizeof(real), side = 16 // sizeof(real)
    cdef const char *at = <const char *> src
    cdef vecf a, b, c, d, ab, cd
    cdef vecd e, f
    for _square in range(squares):
        if real is float:
            a, b = side_by_side(at, side * row), side_by_side(at + row, side * row)
            c, d = side_by_side(at + 2 * row, side * row), side_by_side(at + 3 * row, side * row)
            ab, cd = even(a, b), even(c, d)
            (<vecf *> dst)[0], (<vecf *> (dst + step))[0] = even_pairs(ab, cd), odd_pairs(ab, cd)
            ab, cd = odd(a, b), odd(c, d)
            (<vecf *> (dst + 2 * step))[0], (<vecf *> (dst + 3 * step))[0] = even_pairs(ab, cd), odd_pairs(ab, cd)
        else:
            e, f = <vecd> side_by_side(at, side * row), <vecd> side_by_side(at + row, side * row)
            (<vecd *> dst)[0], (<vecd *> (dst + step))[0] = even_doubles(e, f), odd_doubles(e, f)
        at += 16
        dst += side * step


cdef inline void load_lines_transposed(
    real *dst, Py_ssize_t step, const store *w, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t kb
) noexcept nogil:
    """kb <= BLOCK lines, a step apart: line k := column k of the n rows of w that start at `w`, zeros beyond."""
    cdef Py_ssize_t k, l, v, lanes = lanes_of(dst), side = 16 // sizeof(real), squares = kb // side
    cdef Py_ssize_t count = min(n, lanes), stride = ld
    cdef real[LF * BLOCK] wide
    cdef const real *rows = <const real *> w
    if store is half or count < lanes:
        rows, stride = wide, BLOCK
        for l in range(count):
            load_row(wide + l * BLOCK, w + l * ld, kb)
        clear(wide + count * BLOCK, (lanes - count) * BLOCK)
    for v in range(VECTORS):
        l = v * (lanes // VECTORS)
        transpose_squares(dst + l, step, rows + l * stride, stride, squares)
    for k in range(squares * side, kb):  # columns that fill no square
        for l in range(lanes):
            dst[k * step + l] = rows[l * stride + k]


cdef inline void pack_line_transposed(
    real *panel, Py_ssize_t lines, Py_ssize_t g, const store *w, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t K
) noexcept nogil:
    """Line g of a panel of w transposed := the n rows of w that start at `w`, K values each, zeros beyond."""
    cdef Py_ssize_t q, k0, kb
    for q in range((K + BLOCK - 1) // BLOCK):
        k0 = q * BLOCK
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        load_lines_transposed(packed_line(panel, lines, g, k0, kb), packed_stride(panel, lines, g), w + k0, ld, n, kb)


# --------------------------------------------------------------------------------------------------------------- tile
cdef inline vec multiply_add(vec sum, vec w, const void *a, Py_ssize_t at) noexcept nogil:
    """sum + w * a[at].  A function, as gcc moves sums from register to register where this stands as an expression."""
    if vec is vecf:
        return sum + w * factor((<const float *> a)[at])
    else:
        return sum + w * factor_of_doubles((<const double *> a)[at])


cdef inline inline_void tile(
    Py_ssize_t rows, Py_ssize_t first, Py_ssize_t nv, Py_ssize_t sub, vec *restrict out, const void *a, Py_ssize_t rs,
    Py_ssize_t ks, const vec *restrict p, Py_ssize_t K, const char *ahead
) noexcept nogil:
    """out (rows x nv vectors) += chain over K >= 1 values of k from zero of a[m, k] * p[k], for nv vectors from number
    `first` on of a block whose sub-panels are of `sub` vectors.  Inlined with these and rows constant, so that the
    accumulators live in registers: also across the loop's end, which is why it is no `for`.  With two values of k in a
    round gcc keeps some on the stack.  Meanwhile K lines from `ahead` on come nearer for each sub-panel that ends here,
    unless it is one of several for so few rows that fetching slows them."""
    cdef vec acc[ACC]
    cdef vec w[ACC]
    cdef Py_ssize_t k = 0, m, v, u
    cdef Py_ssize_t fetched = (first + nv) // sub - first // sub if nv <= sub or rows >= LATENCY_ROWS else 0
    for m in range(rows):
        for v in range(nv):
            if vec is vecf:
                acc[m * nv + v] = ZEROF
            else:
                acc[m * nv + v] = ZEROD
    while True:
        for u in range(fetched):
            prefetch_read(ahead + (k * fetched + u) * LINE_BYTES)
        for v in range(nv):
            w[v] = p[((first + v) // sub * K + k) * sub + (first + v) % sub]
            if 1 < rows < ROWS:
                hold(&w[v])
            if rows <= 3:
                for m in range(rows):
                    acc[m * nv + v] = multiply_add(acc[m * nv + v], w[v], a, m * rs + k * ks)
        if rows > 3:
            for m in range(rows):
                for v in range(nv):
                    acc[m * nv + v] = multiply_add(acc[m * nv + v], w[v], a, m * rs + k * ks)
        k += 1
        if k == K:
            break
    for m in range(rows):
        for v in range(nv):
            out[m * LINES * VECTORS + first + v] = out[m * LINES * VECTORS + first + v] + acc[m * nv + v]


cdef inline noinline_void four_by_three(
    Py_ssize_t first, vec *restrict out, const void *a, Py_ssize_t rs, Py_ssize_t ks, const vec *restrict p,
    Py_ssize_t K, const char *ahead
) noexcept nogil:
    """Four rows by three vectors of two lines, whose addresses find no registers among those of other tiles."""
    if first == 0: tile(4, 0, 3, VECTORS, out, a, rs, ks, p, K, ahead)
    else: tile(4, 1, 3, VECTORS, out, a, rs, ks, p, K, ahead)


cdef inline inline_void tiles(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict out, const void *a, Py_ssize_t rs, Py_ssize_t ks,
    const vec *restrict p, Py_ssize_t K, const char *ahead, Py_ssize_t step
) noexcept nogil:
    """The tile for all lines of a panel, inlined with `rows` constant: mostly one sub-panel after the other.  At v3,
    where a line is two vectors, up to four rows take more vectors at once: ten chains keep a CPU busy that begins two
    multiply-adds a cycle and ends them after five.  On aarch64, where a line is four vectors, up to three rows do so:
    the registers that their sums leave hold the factors."""
    cdef Py_ssize_t g = 0, once = 1
    if SUB > 1:  # v4: all lines are one sub-panel
        if lines == 1: tile(rows, 0, VECTORS, VECTORS, out, a, rs, ks, p, K, ahead)
        elif lines == 2: tile(rows, 0, 2 * VECTORS, 2 * VECTORS, out, a, rs, ks, p, K, ahead)
        elif lines == 3: tile(rows, 0, 3 * VECTORS, 3 * VECTORS, out, a, rs, ks, p, K, ahead)
        else: tile(rows, 0, LINES * VECTORS, LINES * VECTORS, out, a, rs, ks, p, K, ahead)
        return
    if VECTORS == 2:
        if rows == 1 and lines == 4:
            tile(rows, 0, 8, VECTORS, out, a, rs, ks, p, K, ahead)
            return
        if rows <= 2 and lines == 3:
            tile(rows, 0, 6, VECTORS, out, a, rs, ks, p, K, ahead)
            return
        if rows == 3 and lines == 3:
            tile(rows, 0, 3, VECTORS, out, a, rs, ks, p, K, ahead)
            tile(rows, 1, 3, VECTORS, out + VECTORS, a, rs, ks, p + K * VECTORS, K, ahead + step)
            return
        if rows == 4 and lines >= 3:
            four_by_three(0, out, a, rs, ks, p, K, ahead)
            four_by_three(1, out + VECTORS, a, rs, ks, p + K * VECTORS, K, ahead + step)
            g = 3
        if rows <= 3:
            once = 2
    if FILLS:
        if rows == 1 and lines == 4:
            tile(rows, 0, 16, VECTORS, out, a, rs, ks, p, K, ahead)
            return
        if rows == 1 and lines == 3:
            tile(rows, 0, 12, VECTORS, out, a, rs, ks, p, K, ahead)
            return
        if rows <= 3 and lines == 3 or rows == 3 and lines == 4:
            tile(rows, 0, 6, VECTORS, out, a, rs, ks, p, K, ahead)
            tile(rows, 6, 6, VECTORS, out, a, rs, ks, p, K, ahead + step)
            g = 3
        if rows <= 2:
            once = 2
    while once == 2 and g + 2 <= lines:
        tile(rows, 0, 2 * VECTORS, VECTORS, out + g * VECTORS, a, rs, ks, p + g * K * VECTORS, K, ahead + g * step)
        g += 2
    while g < lines:
        tile(rows, 0, VECTORS, VECTORS, out + g * VECTORS, a, rs, ks, p + g * K * VECTORS, K, ahead + g * step)
        g += 1


# A function for each number of rows, as gcc keeps addresses of tiles on the stack where more of them are in one.  The
# elements of A are those of rows `stride` apart or, where that is 1, of columns ROWS apart.
cdef inline noinline_void one_row(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(1, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(1, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline noinline_void two_rows(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(2, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(2, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline noinline_void three_rows(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(3, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(3, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline noinline_void four_rows(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(4, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(4, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline noinline_void five_rows(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(5, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(5, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline noinline_void six_rows(
    vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K, Py_ssize_t lines,
    const char *ahead, Py_ssize_t step
) noexcept nogil:
    if stride == 1: tiles(6, lines, out, a, 1, ROWS, p, K, ahead, step)
    else: tiles(6, lines, out, a, stride, 1, p, K, ahead, step)


cdef inline void tile_rows(
    Py_ssize_t rows, vec *restrict out, const vec *restrict p, const void *a, Py_ssize_t stride, Py_ssize_t K,
    Py_ssize_t lines, const char *ahead, Py_ssize_t step
) noexcept nogil:
    """The tile for 1 to ROWS rows and all lines of a panel.  With each sub-panel K lines from `ahead` on come nearer,
    then those `step` bytes further on."""
    if rows == 1: one_row(out, p, a, stride, K, lines, ahead, step)
    elif rows == 2: two_rows(out, p, a, stride, K, lines, ahead, step)
    elif rows == 3: three_rows(out, p, a, stride, K, lines, ahead, step)
    elif ROWS > 3:
        if rows == 4: four_rows(out, p, a, stride, K, lines, ahead, step)
        elif rows == 5: five_rows(out, p, a, stride, K, lines, ahead, step)
        elif ROWS > 5: six_rows(out, p, a, stride, K, lines, ahead, step)


cdef inline inline_void chains_of_one(
    Py_ssize_t panels, Py_ssize_t lines, Py_ssize_t last, vec *restrict out, Py_ssize_t step, const void *a,
    const vec *restrict p, Py_ssize_t next, Py_ssize_t K
) noexcept nogil:
    """The tile for one row and so many panels of 3 or 4 lines, the last one of `last` lines; `next` vectors from one to
    the other and `step` in out: as many chains at once as there are, since each waits for its own additions."""
    cdef vec acc[CHAINS]
    cdef Py_ssize_t k = 0, i, s, v, n = lines * VECTORS, sub, own
    for v in range((panels - 1) * n + last * VECTORS):
        if vec is vecf:
            acc[v] = ZEROF
        else:
            acc[v] = ZEROD
    while True:
        for i in range(panels):
            own = last if i == panels - 1 else lines
            sub = min(<Py_ssize_t> SUB, own) * VECTORS
            for s in range(own * VECTORS // sub):
                for v in range(sub):
                    acc[i * n + s * sub + v] = multiply_add(
                        acc[i * n + s * sub + v], p[i * next + (s * K + k) * sub + v], a, k)
        k += 1
        if k == K:
            break
    for i in range(panels):
        for v in range(last * VECTORS if i == panels - 1 else n):
            out[i * step + v] = out[i * step + v] + acc[i * n + v]


cdef inline noinline_void tile_one(
    Py_ssize_t lines, Py_ssize_t last, vec *restrict out, Py_ssize_t step, const void *a,
    const vec *restrict p, Py_ssize_t next, Py_ssize_t K
) noexcept nogil:
    if lines == 3:
        if ROW_PANELS_OF_3 > 1: chains_of_one(ROW_PANELS_OF_3, 3, 3, out, step, a, p, next, K)
    elif ROW_PANELS > 1:
        if last == 1: chains_of_one(ROW_PANELS, LINES, 1, out, step, a, p, next, K)
        elif last == 2: chains_of_one(ROW_PANELS, LINES, 2, out, step, a, p, next, K)
        elif last == 3: chains_of_one(ROW_PANELS, LINES, 3, out, step, a, p, next, K)
        else: chains_of_one(ROW_PANELS, LINES, LINES, out, step, a, p, next, K)


cdef inline Py_ssize_t max_row_panels(Py_ssize_t lines) noexcept nogil:
    """How many panels of so many lines one row takes at once."""
    return ROW_PANELS_OF_3 if lines == 3 else ROW_PANELS


cdef inline void add_row_panels_product(
    Py_ssize_t lines, Py_ssize_t last, real *acc, Py_ssize_t step, const real *a, const real *panel, Py_ssize_t next,
    Py_ssize_t K
) noexcept nogil:
    """acc += a @ panel for one row and `max_row_panels` panels, more than one, of 3 or LINES lines, which stand `next`
    apart, and `step` in acc.  Of two panels with LINES lines the last one may have fewer."""
    cdef Py_ssize_t k0 = 0, kb, lanes = lanes_of(acc)
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        if real is float:
            tile_one(lines, last, <vecf *> acc, step * VECTORS // LF, a + k0,
                     <const vecf *> (panel + k0 * lines * lanes), next * VECTORS // LF, kb)
        else:
            tile_one(lines, last, <vecd *> acc, step * VECTORS // LD, a + k0,
                     <const vecd *> (panel + k0 * lines * lanes), next * VECTORS // LD, kb)
        k0 += kb
        next -= kb * (lines - last) * lanes


cdef inline void add_block_product(
    real *acc, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t stride, const real *block, Py_ssize_t kb,
    const real *ahead, Py_ssize_t step
) noexcept nogil:
    """acc (rows x lines) += A (rows of `stride`, or if that is 1 columns of ROWS) @ a panel's block of kb values of k,
    for at most ROWS rows.  With each sub-panel kb lines from `ahead` on are fetched, then those `step` further on."""
    if real is float:
        tile_rows(rows, <vecf *> acc, <const vecf *> block, a, stride, kb, lines, <const char *> ahead,
                  step * sizeof(real))
    else:
        tile_rows(rows, <vecd *> acc, <const vecd *> block, a, stride, kb, lines, <const char *> ahead,
                  step * sizeof(real))


cdef inline void add_panel_product(
    real *acc, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t stride, const real *panel, Py_ssize_t K,
    const real *next, Py_ssize_t first
) noexcept nogil:
    """acc (rows x lines) += a (rows of `stride`) @ panel, all rows with one block before the next.  These are the tiles
    of rows from number `first` on; each fetches another part of the panel that comes next, unless that is NULL."""
    cdef Py_ssize_t k0 = 0, kb, r, m, part, lanes = lanes_of(acc), subs = (lines + SUB - 1) // SUB
    cdef const real *block
    cdef const real *ahead
    while k0 < K:
        kb = min(<Py_ssize_t> BLOCK, K - k0)
        block = panel + k0 * lines * lanes
        r, part = 0, first
        while r < rows:
            m = tile_height(rows - r)
            ahead = block  # is here already
            if next is not NULL and part * subs < lines:
                ahead = next + (part * K + k0) * subs * lanes
            add_block_product(acc + r * LINES * lanes, m, lines, a + r * stride + k0, stride, block, kb, ahead,
                              kb * lanes)
            r += m
            part += 1
        k0 += kb


cdef inline inline_void chain(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict sums, Py_ssize_t ss, const void *a, Py_ssize_t rs, const void *w,
    Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    """The chains in `sums` (rows of ss vectors) go on over K >= 1 values of k of a[m, k] * w[k], for so many lines of
    unpacked w, whose row k begins at w + k * ld.  Inlined with constant rows, as `tile` is."""
    cdef vec acc[ROWS * VECTORS]
    cdef const vec *p
    cdef Py_ssize_t j, k, m, v
    for j in range(lines):
        for m in range(rows):
            for v in range(VECTORS):
                acc[m * VECTORS + v] = sums[m * ss + j * VECTORS + v]
        k = 0
        while True:
            if vec is vecf:
                p = <const vec *> (<const float *> w + k * ld) + j * VECTORS
            else:
                p = <const vec *> (<const double *> w + k * ld) + j * VECTORS
            for m in range(rows):
                for v in range(VECTORS):
                    acc[m * VECTORS + v] = multiply_add(acc[m * VECTORS + v], p[v], a, m * rs + k)
            k += 1
            if k == K:
                break
        for m in range(rows):
            for v in range(VECTORS):
                sums[m * ss + j * VECTORS + v] = acc[m * VECTORS + v]


cdef inline noinline_void chain_some(
    Py_ssize_t rows, Py_ssize_t lines, vec *restrict sums, Py_ssize_t ss, const void *a, Py_ssize_t rs, const void *w,
    Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    if K == PACK_ROWS:
        if rows == 1: chain(1, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif rows == 2: chain(2, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif rows == 3: chain(3, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
        elif ROWS > 3: chain(4, lines, sums, ss, a, rs, w, ld, PACK_ROWS)
    elif rows == 1: chain(1, lines, sums, ss, a, rs, w, ld, K)
    elif rows == 2: chain(2, lines, sums, ss, a, rs, w, ld, K)
    elif rows == 3: chain(3, lines, sums, ss, a, rs, w, ld, K)
    elif ROWS > 3: chain(4, lines, sums, ss, a, rs, w, ld, K)


cdef inline void chain_rows(
    real *sums, Py_ssize_t ss, Py_ssize_t rows, Py_ssize_t lines, const real *a, Py_ssize_t rs, const real *w,
    Py_ssize_t ld, Py_ssize_t K
) noexcept nogil:
    """Goes on with the chains of a product for lines of unpacked w (row stride ld) and K values of k; their sums stand
    in rows of ss reals."""
    cdef Py_ssize_t r = 0, m
    while r < rows:
        m = min(tile_height(rows - r), <Py_ssize_t> 4)
        if real is float:
            chain_some(m, lines, <vecf *> (sums + r * ss), ss * VECTORS // LF, a + r * rs, rs, w, ld, K)
        else:
            chain_some(m, lines, <vecd *> (sums + r * ss), ss * VECTORS // LD, a + r * rs, rs, w, ld, K)
        r += m


cdef inline Py_ssize_t tile_group_height(Py_ssize_t rows) noexcept nogil:
    """How many of the remaining rows meet a panel together: up to GROUP_TILES full tiles, in groups of nearly equal
    size."""
    cdef Py_ssize_t groups
    if rows <= GROUP_TILES * ROWS:  # spares a small step the divisions
        return rows
    groups = (rows + GROUP_TILES * ROWS - 1) // (GROUP_TILES * ROWS)
    return ((rows + groups - 1) // groups + ROWS // 2) // ROWS * ROWS


cdef inline Py_ssize_t tile_height(Py_ssize_t rows) noexcept nogil:
    """How many of the remaining rows the next tile takes: all that it can, while LATENCY_ROWS are left for each of the
    others, since a tile of fewer rows takes as long."""
    cdef Py_ssize_t tiles
    if rows <= ROWS:
        return rows
    tiles = (rows + ROWS - 1) // ROWS
    if VECTORS == 2 and rows % ROWS == 1:  # but a single row is fast, see `tiles`
        return ROWS
    return min(<Py_ssize_t> ROWS, max(rows - (tiles - 1) * LATENCY_ROWS, (rows + tiles - 1) // tiles))
