"""What the backward passes of LSTM and GRU share: products of the gate gradients d with weights and with inputs.

d has a row for every (t, b), r = t * B + b; `input_row` finds what that row read.
Sums over rows have three levels, for accuracy: chains of BLOCK rows from zero in ascending r, added in ascending
order within blocks of ROW_BLOCK rows, and these blocks added in ascending order.  Sums of d alone and of d times
states, for biases and peepholes, are in double for float too: it costs little, and they cancel more than products do.
"""
from caches cimport outgrow_caches
from half cimport half
from real cimport real
from steps cimport Layout, Steps, input_row, place
from team cimport share
from tile cimport (
    BLOCK, LF, LINES, ROW_BLOCK, ROWS, TILE, TILES, VECTORS, clear, for_writing, line_at, line_of, lines_in, load_line,
    narrow, pack_line_transposed, packed_at, packed_step, product, product_of_block, row_group, store, store_line, vecd,
    vecf, widen
)

cdef enum:
    PLAIN = 4  # lines in a panel without gates


cdef inline Py_ssize_t backward_threads(
    double step, Py_ssize_t T, bint by_rows, Py_ssize_t threads
) noexcept nogil:
    """1 if waking the other threads and waiting for them would cost more than they save, for `step` floating-point
    operations in a step."""
    return 1 if step * T < 1e6 or (not by_rows and step < 3e5) else threads


cdef inline Py_ssize_t plain_panels(Py_ssize_t lines) noexcept nogil:
    return (lines + PLAIN - 1) // PLAIN


cdef inline const real *state_line(real *room, const store *row, Py_ssize_t j, Py_ssize_t n) noexcept nogil:
    """Line j, of n values, of the state that a row started from; NULL stands for zeros."""
    cdef Py_ssize_t L = line_of(room)
    if row is NULL:
        clear(room, L)
        return room
    return line_at(room, row + j * L, n)


cdef inline void pack_transposed(
    real *panel, const store *w, Py_ssize_t N, Py_ssize_t rows, Py_ssize_t j
) noexcept nogil:
    """Pack panel j of w.T, where w has `rows` rows and N columns."""
    cdef Py_ssize_t L = line_of(panel), first = j * PLAIN, l
    cdef Py_ssize_t n = min(<Py_ssize_t> PLAIN, lines_in(panel, rows) - first)
    for l in range(n):
        pack_line_transposed(panel, n, l, w + (first + l) * L * N, N, rows - (first + l) * L, N)


# ---------------------------------------------------------------------------------------------------- x_grad = d @ w.T
cdef inline void input_grad(
    store *x_grad, const Layout *layout, bint adds, Py_ssize_t B, Py_ssize_t I, const real *d, Py_ssize_t ldd,
    Py_ssize_t r0, Py_ssize_t r1, const real *panel, Py_ssize_t K, const real *panel2, Py_ssize_t K2, Py_ssize_t j
) noexcept nogil:
    """Columns of x_grad that belong to panel j, in the rows r = t * B + b from r0 to r1: the first K columns of d times
    `panel`, plus the next K2 times `panel2`; with `adds` added to what is there."""
    cdef real[TILES * TILE] acc
    cdef real[LF] before
    cdef Py_ssize_t L = line_of(acc), first = j * PLAIN, n = min(<Py_ssize_t> PLAIN, lines_in(acc, I) - first)
    cdef Py_ssize_t r = r0, t, b, m, q, g, l
    cdef bint fetches = outgrow_caches((K + K2) * I * sizeof(real))
    cdef store *row
    if r0 == r1:
        return
    t, b = r0 // B, r0 % B
    while r < r1:
        m = row_group(r1 - r)
        clear(acc, m * LINES * L)
        product(acc, m, n, d + r * ldd, ldd, panel, K, panel + n * L * K if fetches else <const real *> NULL, 0)
        if K2 > 0:
            product(acc, m, n, d + r * ldd + K, ldd, panel2, K2,
                    panel2 + n * L * K2 if fetches else <const real *> NULL, 0)
        for q in range(m):
            row = x_grad + place(layout, t, b)
            for g in range(n):
                if adds:
                    load_line(before, row + (first + g) * L, I - (first + g) * L)
                    for l in range(L):
                        acc[(q * LINES + g) * L + l] = before[l] + acc[(q * LINES + g) * L + l]
                store_line(row + (first + g) * L, acc + (q * LINES + g) * L, I - (first + g) * L)
            b += 1
            if b == B:
                t, b = t + 1, 0
        r += m


cdef inline void input_grads(
    store *x_grad, const Layout *layout, bint adds, Py_ssize_t B, Py_ssize_t I, const real *d, Py_ssize_t ldd,
    Py_ssize_t rows, const real *panels, Py_ssize_t K, const real *panels2, Py_ssize_t K2, Py_ssize_t part,
    Py_ssize_t parts
) noexcept nogil:
    """One part of x_grad: a few rows times one panel after the other."""
    cdef Py_ssize_t L = line_of(d), count = plain_panels(lines_in(d, I)), most = TILES * ROWS, task, r, j
    cdef Py_ssize_t tasks = (rows + most - 1) // most * count
    for task in range(share(tasks, part, parts), share(tasks, part + 1, parts)):
        r, j = task // count * most, task % count
        input_grad(x_grad, layout, adds, B, I, d, ldd, r, min(r + most, rows), panels + j * PLAIN * L * K, K,
                   panels2 + j * PLAIN * L * K2, K2, j)


# ------------------------------------------------------------------- w_grad = inputs.T @ d, or transposed d.T @ inputs
cdef inline Py_ssize_t tiles_of(Py_ssize_t inputs) noexcept nogil:
    return (inputs + ROWS - 1) // ROWS


cdef inline void pack_inputs(
    real *dst, Py_ssize_t stride, const store **rows, const store **scales, Py_ssize_t M, Py_ssize_t count
) noexcept nogil:
    """Copy `count` rows of M inputs to the tiles, multiplied by `scales` unless that is NULL; zeros for a row that is
    NULL.  Several rows to one tile before the next, because the tiles are pages apart."""
    cdef real[ROWS] values
    cdef real factor
    cdef real *to
    cdef Py_ssize_t g, k, q, n
    for g in range(tiles_of(M)):
        n = min(<Py_ssize_t> ROWS, M - g * ROWS)
        for k in range(count):
            to = dst + g * stride + k * ROWS
            if rows[k] is NULL:
                clear(to, ROWS)
                continue
            if n == ROWS:
                for q in range(ROWS):
                    widen(&values[q], rows[k] + g * ROWS + q)
            else:
                clear(values, ROWS)
                for q in range(n):
                    widen(&values[q], rows[k] + g * ROWS + q)
            if scales is not NULL:
                for q in range(n):
                    widen(&factor, scales[k] + g * ROWS + q)
                    values[q] = values[q] * factor
            for q in range(ROWS):
                to[q] = values[q]


cdef inline void pack_row(real *panels, const store *row, Py_ssize_t M, Py_ssize_t k, Py_ssize_t kb) noexcept nogil:
    """Row k of kb in the panels that hold M columns := `row`; zeros if that is NULL."""
    cdef Py_ssize_t L = line_of(panels), lines = lines_in(panels, M), k0 = k // BLOCK * BLOCK
    cdef Py_ssize_t b = min(<Py_ssize_t> BLOCK, kb - k0), j, g, n
    cdef real *panel
    cdef real *to
    for j in range(plain_panels(lines)):
        panel = panels + j * PLAIN * L * kb
        n = min(<Py_ssize_t> PLAIN, lines - j * PLAIN)
        for g in range(n):
            to = packed_at(panel, n, g, k0, b) + (k - k0) * packed_step(panel, n, g)
            if row is NULL:
                clear(to, L)
            else:
                load_line(to, row + (j * PLAIN + g) * L, M - (j * PLAIN + g) * L)


cdef inline void join_lines(real *total, real *lines, Py_ssize_t n, bint first) noexcept nogil:
    """total += n lines, or with `first` total := n lines."""
    cdef Py_ssize_t v
    for v in range(n * VECTORS):
        if real is float:
            (<vecf *> total)[v] = (<vecf *> lines)[v] if first else (<vecf *> lines)[v] + (<vecf *> total)[v]
        else:
            (<vecd *> total)[v] = (<vecd *> lines)[v] if first else (<vecd *> lines)[v] + (<vecd *> total)[v]


cdef inline void weight_grad_tiles(
    real *out, Py_ssize_t N, Py_ssize_t M, const real *inputs, Py_ssize_t stride, const real *panel, Py_ssize_t n,
    Py_ssize_t columns, Py_ssize_t kb, bint first
) noexcept nogil:
    """out += the product of this block of rows, or := with `first`, for M rows and n lines (`columns` columns) of out.
    At most TILES tiles, which use a block of the panel while it is in cache."""
    cdef real[TILES * TILE] acc
    cdef real[LF] total
    cdef Py_ssize_t L = line_of(out), tiles = tiles_of(M), k0 = 0, b, g, q, l
    clear(acc, tiles * ROWS * LINES * L)
    for q in range(M):
        for l in range(n):
            for_writing(out + q * N + l * L)
    while k0 < kb:
        b = min(<Py_ssize_t> BLOCK, kb - k0)
        for g in range(tiles):
            product_of_block(acc + g * ROWS * LINES * L, min(<Py_ssize_t> ROWS, M - g * ROWS), n,
                             inputs + g * stride + k0 * ROWS, 1, ROWS, panel + k0 * n * L, b,
                             inputs + (g + TILES) * stride + k0 * ROWS, 0)
        k0 += b
    for q in range(M):
        if columns >= n * L:
            join_lines(out + q * N, acc + q * LINES * L, n, first)
            continue
        for l in range(n):
            load_line(total, out + q * N + l * L, columns - l * L)
            join_lines(total, acc + (q * LINES + l) * L, 1, first)
            store_line(out + q * N + l * L, total, columns - l * L)


cdef inline void weight_grad_rows(
    real *out, Py_ssize_t N, Py_ssize_t M, const real *inputs, Py_ssize_t stride, const real *panel, Py_ssize_t n,
    Py_ssize_t columns, Py_ssize_t kb, bint first
) noexcept nogil:
    """The same for any number of rows of out."""
    cdef Py_ssize_t m = 0, most = TILES * ROWS
    while m < M:
        weight_grad_tiles(out + m * N, N, min(most, M - m), inputs + m // ROWS * stride, stride, panel, n, columns, kb,
                          first)
        m += most


cdef inline void add_columns(
    double *restrict sums, const real *restrict rows, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t kb
) noexcept nogil:
    """sums += the sums of n columns of kb rows of d: chains of BLOCK rows, added in order.  Many columns at once, as
    each waits for its own additions."""
    cdef double[PLAIN * LF] block
    cdef double[PLAIN * LF] chain
    cdef Py_ssize_t c0 = 0, k0, k, b, l, m
    while c0 < n:
        m = min(<Py_ssize_t> PLAIN * line_of(rows), n - c0)
        for l in range(m):
            block[l] = 0
        k0 = 0
        while k0 < kb:
            b = min(<Py_ssize_t> BLOCK, kb - k0)
            for l in range(m):
                chain[l] = 0
            for k in range(k0, k0 + b):
                for l in range(m):
                    chain[l] = chain[l] + rows[k * ld + c0 + l]
            for l in range(m):
                block[l] = block[l] + chain[l]
            k0 += b
        for l in range(m):
            sums[c0 + l] = sums[c0 + l] + block[l]
        c0 += m


# ----------------------------------------------------------------------------------------------------------- peepholes
cdef inline void peephole_sum(
    store *out, const real *d, Py_ssize_t ldd, const Steps *s, const store *first, Py_ssize_t H, const store *rest,
    const Layout *layout, Py_ssize_t columns
) noexcept nogil:
    """out := the sum over all rows of d times the state that `input_row` finds, for at most one line of columns."""
    cdef double[LF] total
    cdef double[LF] block
    cdef double[LF] chain
    cdef real factor
    cdef Py_ssize_t n = min(columns, line_of(d)), rows = s.T * s.B, r, l
    cdef const store *inputs
    for l in range(n):
        total[l] = block[l] = chain[l] = 0
    for r in range(rows):
        inputs = input_row(s, first, H, rest, layout, r // s.B, r % s.B)
        for l in range(n):
            factor = 0
            if inputs is not NULL:
                widen(&factor, inputs + l)
            chain[l] = chain[l] + <double> d[r * ldd + l] * factor
        if (r + 1) % BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                block[l] = block[l] + chain[l]
                chain[l] = 0
        if (r + 1) % ROW_BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                total[l] = total[l] + block[l]
                block[l] = 0
    for l in range(n):
        narrow(out + l, <real> total[l])
