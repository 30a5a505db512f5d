"""What the backward passes of LSTM and GRU share: products of the gate gradients d with weights and with inputs.

d has a row for every (t, b), r = t * B + b; `input_row` finds what that row read.
Sums over rows have three levels, for accuracy: chains of BLOCK rows from zero in ascending r, added in ascending
order within blocks of ROW_BLOCK rows, and these blocks added in ascending order.
"""
from real cimport real
from steps cimport Steps, input_row
from team cimport share
from tile cimport (
    BLOCK, LF, LINES, ROW_BLOCK, ROWS, TILE, clear, line_of, lines_in, load_line, pack_line, pack_line_transposed,
    product, row_group, store, store_line, store_row, widen
)

cdef enum:
    PLAIN = 4  # lines in a panel without gates
    CHUNK = 4  # tiles of rows that meet a panel while it is in cache


cdef inline void pack_transposed(
    real *panels, const store *w, Py_ssize_t N, Py_ssize_t rows, Py_ssize_t j
) noexcept nogil:
    """Line j of the panels of w.T, for `rows` rows of w."""
    cdef Py_ssize_t L = line_of(panels), first = j // PLAIN * PLAIN
    pack_line_transposed(panels + first * L * N, min(<Py_ssize_t> PLAIN, lines_in(panels, rows) - first), j - first,
                         w + j * L * N, N, rows - j * L, N)


# ---------------------------------------------------------------------------------------------------- x_grad = d @ w.T
cdef inline Py_ssize_t input_grad_tasks(Py_ssize_t rows, Py_ssize_t lines) noexcept nogil:
    return ((rows + CHUNK * ROWS - 1) // (CHUNK * ROWS)) * ((lines + PLAIN - 1) // PLAIN)


cdef inline void input_grad(
    store *x_grad, Py_ssize_t I, const real *d, Py_ssize_t ldd, Py_ssize_t rows, const real *panels, Py_ssize_t K,
    const real *panels2, Py_ssize_t K2, Py_ssize_t task
) noexcept nogil:
    """One chunk of rows against one panel of columns of x: the first K columns of d times `panels`, then the following
    K2 times `panels2`."""
    cdef real[TILE] acc
    cdef Py_ssize_t L = line_of(acc), lines = lines_in(acc, I), panel_count = (lines + PLAIN - 1) // PLAIN
    cdef Py_ssize_t j = task % panel_count * PLAIN, r = task // panel_count * CHUNK * ROWS
    cdef Py_ssize_t end = min(rows, r + CHUNK * ROWS), n = min(<Py_ssize_t> PLAIN, lines - j), m, q, g, l
    while r < end:
        m = row_group(end - r)
        for l in range(m * LINES * L):
            acc[l] = 0
        product(acc, m, n, d + r * ldd, ldd, 1, panels + j * L * K, K, panels + (j + n) * L * K)
        if K2 > 0:
            product(acc, m, n, d + r * ldd + K, ldd, 1, panels2 + j * L * K2, K2,
                    panels2 + (j + n) * L * K2)
        for q in range(m):
            for g in range(n):
                store_line(x_grad + (r + q) * I + (j + g) * L, acc + (q * LINES + g) * L, I - (j + g) * L)
        r += m


# --------------------------------------------------------------------------------------------- w_grad = inputs.T @ d
cdef inline Py_ssize_t weight_grad_work(Py_ssize_t M, Py_ssize_t rows, Py_ssize_t L, Py_ssize_t threads) noexcept nogil:
    """Reals of scratch: the inputs of a block of rows, transposed into tiles, and a panel of d for each thread."""
    return min(rows, <Py_ssize_t> ROW_BLOCK) * (M + ROWS + threads * PLAIN * L)


cdef inline void pack_inputs(
    real *inputs, Py_ssize_t block, const store *row, const store *scale, Py_ssize_t M, Py_ssize_t g, Py_ssize_t k
) noexcept nogil:
    """Row k of the tile of inputs g: ROWS columns, times those of `scale` where it is not NULL; zeros for no row."""
    cdef real *dst = inputs + (g * block + k) * ROWS
    cdef Py_ssize_t q, n = min(<Py_ssize_t> ROWS, M - g * ROWS)
    cdef real factor
    if row is NULL:
        clear(dst, n)
        return
    for q in range(n):
        widen(dst + q, row + g * ROWS + q)
        if scale is not NULL:
            widen(&factor, scale + g * ROWS + q)
            dst[q] = dst[q] * factor


cdef inline void weight_grad_tile(
    real *out, Py_ssize_t N, const real *inputs, const real *panel, Py_ssize_t m, Py_ssize_t n, Py_ssize_t columns,
    Py_ssize_t kb, bint first
) noexcept nogil:
    """m rows by n lines (`columns` columns) of out, := the product of this block of rows or += it."""
    cdef real[TILE] acc
    cdef real[LF] total
    cdef Py_ssize_t L = line_of(out), q, l, k
    for l in range(m * LINES * L):
        acc[l] = 0
    product(acc, m, n, inputs, 1, ROWS, panel, kb, inputs + kb * ROWS)
    for q in range(m):
        for l in range(n):
            if not first:
                load_line(total, out + q * N + l * L, columns - l * L)
                for k in range(L):
                    acc[(q * LINES + l) * L + k] += total[k]
            store_line(out + q * N + l * L, acc + (q * LINES + l) * L, columns - l * L)


cdef inline void weight_grad(
    real *out, Py_ssize_t N, const Steps *s, const store *first, const store *rest, const store *scale, Py_ssize_t M,
    const real *d, Py_ssize_t ldd, real *work, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's rows of out (M x N) := inputs.T @ d[:, :N]; `scale`, where not NULL, multiplies the inputs."""
    cdef Py_ssize_t L = line_of(out), rows = s.T * s.B, block = min(rows, <Py_ssize_t> ROW_BLOCK)
    cdef Py_ssize_t lines = lines_in(out, N)
    cdef Py_ssize_t groups = (M + ROWS - 1) // ROWS
    cdef Py_ssize_t g0 = share(groups, part, parts), g1 = share(groups, part + 1, parts)
    cdef real *panel = work + block * (groups * ROWS + part * PLAIN * L)
    cdef Py_ssize_t r0 = 0, kb, k, g, j, n, l
    while r0 < rows:
        kb = min(block, rows - r0)
        for k in range(kb):
            for g in range(g0, g1):
                pack_inputs(work, block, input_row(s, first, rest, M, r0 + k),
                            <const store *> NULL if scale is NULL else scale + (r0 + k) * M, M, g, k)
        for j in range((lines + PLAIN - 1) // PLAIN):
            n = min(<Py_ssize_t> PLAIN, lines - j * PLAIN)
            k = j * PLAIN * L
            for l in range(n):
                pack_line(panel, n, l, d + r0 * ldd + k + l * L, ldd, N - k - l * L, kb)
            for g in range(g0, g1):
                weight_grad_tile(out + g * ROWS * N + k, N, work + g * ROWS * block, panel,
                                 min(<Py_ssize_t> ROWS, M - g * ROWS), n, N - k, kb, r0 == 0)
        r0 += kb


# ------------------------------------------------------------------------------------------- b_grad and the peepholes
cdef inline void column_sum(
    store *out, const real *d, Py_ssize_t ldd, const Steps *s, const store *first, const store *rest, Py_ssize_t ld,
    Py_ssize_t columns
) noexcept nogil:
    """Up to PLAIN lines of columns: the sum over rows of d, times the inputs of these columns where `rest` is not NULL.
    Summed in double for float too: it costs little, and these sums cancel more than products do."""
    cdef double[PLAIN * LF] total
    cdef double[PLAIN * LF] block
    cdef double[PLAIN * LF] chain
    cdef real[PLAIN * LF] factor
    cdef Py_ssize_t n = min(columns, PLAIN * line_of(d)), rows = s.T * s.B, r, l
    cdef const store *inputs
    for l in range(n):
        total[l] = block[l] = chain[l] = 0
        factor[l] = 1
    for r in range(rows):
        if rest is not NULL:
            inputs = input_row(s, first, rest, ld, r)
            for l in range(n):
                factor[l] = 0
                if inputs is not NULL:
                    widen(factor + l, inputs + l)
        for l in range(n):
            chain[l] = chain[l] + <double> d[r * ldd + l] * factor[l]
        if (r + 1) % BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                block[l] = block[l] + chain[l]
                chain[l] = 0
        if (r + 1) % ROW_BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                total[l] = total[l] + block[l]
                block[l] = 0
    for l in range(n):
        factor[l] = <real> total[l]
    store_row(out, factor, n)


cdef inline void column_sums(
    store *out, const real *d, Py_ssize_t ldd, const Steps *s, Py_ssize_t columns, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's share of the sums over rows of d."""
    cdef Py_ssize_t width = PLAIN * line_of(d), groups = (columns + width - 1) // width, g
    for g in range(share(groups, part, parts), share(groups, part + 1, parts)):
        column_sum(out + g * width, d + g * width, ldd, s, <store *> NULL, <store *> NULL, 0, columns - g * width)
