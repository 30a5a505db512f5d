"""Products of the backward passes of cells and of the dense layer: d @ w.T for x, and inputs.T @ d for weights.

d has the gradients of all pre-activations: a row r = t * B + b of `ldd` reals for each step t and slot b (steps.pxd).
Rows of d that belong to finished rows are never read.

Sums over rows have three levels, for accuracy: chains of BLOCK rows from zero in ascending r, where r = t * B + row,
added in ascending order within blocks of ROW_BLOCK rows, and these blocks added in ascending order.  Sums for biases
and peepholes are in double for float too: it costs little, and they cancel more than products do.  Finished rows keep
their places in this order as if they added zeros.  They are skipped, since adding zero would change nothing but the
sign of a chain's zero, and a sum that begins with +0 does not see that.

t, b : a step and a slot, or a batch row where `RowBlock` or the caller's arrays are read
L, l : reals in a cache line, one of these
j, g : a packed panel, one of its lines
c, k : a chain of a block, one of its rows
q : a row of a tile
s : the `Steps` of the call
"""
from passes.steps cimport (
    Layout, Steps, active_end, clear_finished_rows, current_row, has_step, offset_of, previous_row, row_of_slot,
    slot_of_row, step_at
)
from product.half cimport half
from product.real cimport real
from product.tile cimport (
    BLOCK, GROUP_TILES, LF, LINES, PACK_ROWS, ROW_BLOCK, ROW_CHAINS, ROWS, TILE_SIZE, VECTORS, add_block_product,
    add_panel_product, clear, lanes_of, lines_in, load_line, load_value, pack_line_transposed, packed_line,
    packed_stride, padded_line, prefetch_read, prefetch_write, store, store_line, store_value, tile_group_height, vecd,
    vecf
)
from schedule.machine cimport to_prefetch
from schedule.team cimport share

cdef enum:
    PANEL_LINES = 4  # lines in a panel without gates


cdef inline Py_ssize_t count_panels(Py_ssize_t lines) noexcept nogil:
    return (lines + PANEL_LINES - 1) // PANEL_LINES


cdef inline Py_ssize_t lines_in_panel(Py_ssize_t lines, Py_ssize_t j) noexcept nogil:
    """How many of so many lines are in panel j."""
    return min(<Py_ssize_t> PANEL_LINES, lines - j * PANEL_LINES)


cdef inline const real *state_line(real *room, const store *row, Py_ssize_t j, Py_ssize_t n) noexcept nogil:
    """Line j, of n values, of the state that a row started from; NULL stands for zeros."""
    cdef Py_ssize_t L = lanes_of(room)
    if row is NULL:
        clear(room, L)
        return room
    return padded_line(room, row + j * L, n)


cdef inline void add_line(
    real *restrict sum, const real *restrict line, const store *restrict values, Py_ssize_t n
) noexcept nogil:
    """sum := line + a line of n values of an array."""
    cdef Py_ssize_t l, L = lanes_of(sum)
    cdef real[LF] room
    cdef const real *addend = padded_line(&room[0], values, n)
    for l in range(L):
        sum[l] = line[l] + addend[l]


cdef inline void pack_transposed_panel(
    real *panel, const store *w, Py_ssize_t N, Py_ssize_t rows, Py_ssize_t j
) noexcept nogil:
    """Pack panel j of w.T, where w has `rows` rows and N columns.  Fetching rows ahead meanwhile gained nothing."""
    cdef Py_ssize_t L = lanes_of(panel), first = j * PANEL_LINES, l
    cdef Py_ssize_t n = min(<Py_ssize_t> PANEL_LINES, lines_in(panel, rows) - first)
    for l in range(n):
        pack_line_transposed(panel, n, l, w + (first + l) * L * N, N, rows - (first + l) * L, N)


# ---------------------------------------------------------------------------------------------------- x_grad = d @ w.T
cdef inline void compute_x_grad_panel(
    store *x_grad, const Layout *layout, bint accumulate, const Steps *s, Py_ssize_t I, const real *d, Py_ssize_t ldd,
    Py_ssize_t r0, Py_ssize_t r1, const real *panel, Py_ssize_t K, const real *panel2, Py_ssize_t K2, Py_ssize_t j
) noexcept nogil:
    """Columns of x_grad that belong to panel j, for the rows r = t * B + b of d from r0 to r1, b a slot: the first K
    columns of d times `panel`, plus the next K2 times `panel2`; with `accumulate` added to what is there."""
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef real[LF] before
    cdef Py_ssize_t L = lanes_of(acc), first = j * PANEL_LINES, n = lines_in_panel(lines_in(acc, I), j)
    cdef Py_ssize_t r = r0, t, b, m, q, g, l
    cdef bint prefetches = to_prefetch((K + K2) * I * sizeof(real), 1)
    cdef store *row
    if r0 == r1:
        return
    t, b = r0 // s.B, r0 % s.B
    while r < r1:
        m = tile_group_height(r1 - r)
        clear(acc, m * LINES * L)
        add_panel_product(acc, m, n, d + r * ldd, ldd, panel, K,
                          panel + n * L * K if prefetches else <const real *> NULL, 0)
        if K2 > 0:
            add_panel_product(acc, m, n, d + r * ldd + K, ldd, panel2, K2,
                              panel2 + n * L * K2 if prefetches else <const real *> NULL, 0)
        for q in range(m):
            row = x_grad + offset_of(layout, t, row_of_slot(s, b))
            for g in range(n):
                if accumulate:
                    load_line(before, row + (first + g) * L, I - (first + g) * L)
                    for l in range(L):
                        acc[(q * LINES + g) * L + l] = before[l] + acc[(q * LINES + g) * L + l]
                store_line(row + (first + g) * L, acc + (q * LINES + g) * L, I - (first + g) * L)
            b += 1
            if b == s.B:
                t, b = t + 1, 0
        r += m


cdef inline void compute_x_grad_part(
    store *x_grad, const Layout *layout, bint accumulate, const Steps *s, Py_ssize_t ranges, Py_ssize_t I,
    const real *d, Py_ssize_t ldd, const real *panels, Py_ssize_t K, const real *panels2, Py_ssize_t K2,
    Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One part of x_grad: a few tiles of rows times one panel after the other.  Rows that end early have been dealt out
    to so many ranges of slots; then a part has some of the steps."""
    cdef Py_ssize_t L = lanes_of(d), count = count_panels(lines_in(d, I)), most = GROUP_TILES * ROWS, rows = s.T * s.B
    cdef Py_ssize_t task, tiles = count_tiles(rows), blocks, t = part, n, b, end, r, j
    if count == 0:
        return
    if s.slots is NULL:
        blocks = max((tiles + GROUP_TILES - 1) // GROUP_TILES, min(tiles, (parts + count - 1) // count))
        for task in range(share(blocks * count, part, parts), share(blocks * count, part + 1, parts)):
            n, j = task // count, task % count
            r, end = share(tiles, n, blocks) * ROWS, min(share(tiles, n + 1, blocks) * ROWS, rows)
            compute_x_grad_panel(x_grad, layout, accumulate, s, I, d, ldd, r, end, panels + j * PANEL_LINES * L * K, K,
                                 panels2 + j * PANEL_LINES * L * K2, K2, j)
        return
    if not accumulate:
        clear_finished_rows(s, x_grad, layout, I, part, parts)
    while t < s.T:
        for n in range(ranges):
            b = share(s.B, n, ranges)
            end = active_end(s, step_at(s, t), b, share(s.B, n + 1, ranges))
            while b < end:
                r = t * s.B + b
                b = min(b + most, end)
                for j in range(count):
                    compute_x_grad_panel(x_grad, layout, accumulate, s, I, d, ldd, r, t * s.B + b,
                                         panels + j * PANEL_LINES * L * K, K, panels2 + j * PANEL_LINES * L * K2, K2,
                                         j)
        t += parts


# ------------------------------------------------------------------- w_grad = inputs.T @ d, or transposed d.T @ inputs
cdef inline Py_ssize_t count_tiles(Py_ssize_t inputs) noexcept nogil:
    return (inputs + ROWS - 1) // ROWS


cdef struct RowBlock:  # ROW_BLOCK rows r = t * B + b, or fewer at the end, without those that have ended
    Py_ssize_t rows, chains  # with these
    Py_ssize_t active  # without them
    Py_ssize_t[ROW_CHAINS] count  # of each chain; the rows of chain c begin at c * BLOCK in
    Py_ssize_t[ROW_BLOCK] t, b, d_row  # d_row: the number of the row of d


cdef inline void list_active_rows(RowBlock *block, const Steps *s, Py_ssize_t r0) noexcept nogil:
    """The block from row r0 on."""
    cdef Py_ssize_t t = r0 // s.B, b = r0 % s.B, c, k = 0, n, q, end, to
    block.rows = min(<Py_ssize_t> ROW_BLOCK, s.T * s.B - r0)
    block.chains = (block.rows + BLOCK - 1) // BLOCK
    block.active = 0
    for c in range(block.chains):
        to, end = c * BLOCK, min((c + 1) * BLOCK, block.rows)
        while k < end:
            n = min(end - k, s.B - b)  # rows of one step
            if s.slots is NULL:
                for q in range(n):
                    block.t[to + q], block.b[to + q], block.d_row[to + q] = t, b + q, r0 + k + q
                to += n
            else:
                for q in range(b, b + n):
                    if has_step(s, t, q):
                        block.t[to], block.b[to], block.d_row[to] = t, q, t * s.B + slot_of_row(s, q)
                        to += 1
            k += n
            b += n
            if b == s.B:
                t, b = t + 1, 0
        block.count[c] = to - c * BLOCK
        block.active += block.count[c]


cdef inline void pack_columns(
    real *panel, Py_ssize_t lines, const RowBlock *block, const real *d, Py_ssize_t ldd, Py_ssize_t n
) noexcept nogil:
    """A panel of so many lines := n columns of a block of rows of d, zeros beyond."""
    cdef Py_ssize_t c, k, g, count, L = lanes_of(panel)
    cdef const Py_ssize_t *rows
    cdef const real *row
    cdef const real *ahead
    for c in range(block.chains):
        rows, count = &block.d_row[c * BLOCK], block.count[c]
        for k in range(count):
            row, ahead = d + rows[k] * ldd, d + rows[min(k + PACK_ROWS, count - 1)] * ldd
            for g in range(lines):
                prefetch_read(ahead + g * L)
                load_line(packed_line(panel, lines, g, c * BLOCK, count) + k * packed_stride(panel, lines, g),
                          row + g * L, n - g * L)


cdef inline void pack_tiles(
    real *dst, Py_ssize_t stride, const store **rows, const store **scales, Py_ssize_t M, Py_ssize_t count
) noexcept nogil:
    """Copy `count` rows of M values to the tiles, multiplied by `scales` unless that is NULL; zeros for a row that is
    NULL.  Several rows to one tile before the next, because the tiles are pages apart.  Without the array between, it
    was slower."""
    cdef real[ROWS] values
    cdef real factor
    cdef real *to
    cdef Py_ssize_t g, k, q, n
    for g in range(count_tiles(M)):
        n = min(<Py_ssize_t> ROWS, M - g * ROWS)
        for k in range(count):
            to = dst + g * stride + k * ROWS
            if rows[k] is NULL:
                clear(to, ROWS)
                continue
            if n == ROWS:
                for q in range(ROWS):
                    load_value(&values[q], rows[k] + g * ROWS + q)
            else:
                clear(values, ROWS)
                for q in range(n):
                    load_value(&values[q], rows[k] + g * ROWS + q)
            if scales is not NULL:
                for q in range(n):
                    load_value(&factor, scales[k] + g * ROWS + q)
                    values[q] = values[q] * factor
            for q in range(ROWS):
                to[q] = values[q]


cdef inline void pack_row(
    real *panels, const store *row, const store *scale, Py_ssize_t M, const RowBlock *block, Py_ssize_t c, Py_ssize_t k
) noexcept nogil:
    """Row k of a block's chain c in the panels that hold M columns := `row`, multiplied by `scale` unless that is NULL;
    zeros if the row is NULL."""
    cdef Py_ssize_t L = lanes_of(panels), lines = lines_in(panels, M), j, g, n, l
    cdef real[LF] factor
    cdef real *panel
    cdef real *to
    for j in range(count_panels(lines)):
        panel = panels + j * PANEL_LINES * L * block.rows
        n = min(<Py_ssize_t> PANEL_LINES, lines - j * PANEL_LINES)
        for g in range(n):
            to = packed_line(panel, n, g, c * BLOCK, block.count[c]) + k * packed_stride(panel, n, g)
            if row is NULL:
                clear(to, L)
            else:
                load_line(to, row + (j * PANEL_LINES + g) * L, M - (j * PANEL_LINES + g) * L)
                if scale is not NULL:
                    load_line(factor, scale + (j * PANEL_LINES + g) * L, M - (j * PANEL_LINES + g) * L)
                    for l in range(L):
                        to[l] = to[l] * factor[l]


cdef inline void accumulate_lines(real *total, real *lines, Py_ssize_t n, bint first) noexcept nogil:
    """total += n lines, or with `first` total := n lines.  gcc unrolls a plain loop first, and leaves it scalar."""
    cdef Py_ssize_t v
    for v in range(n * VECTORS):
        if real is float:
            (<vecf *> total)[v] = (<vecf *> lines)[v] if first else (<vecf *> lines)[v] + (<vecf *> total)[v]
        else:
            (<vecd *> total)[v] = (<vecd *> lines)[v] if first else (<vecd *> lines)[v] + (<vecd *> total)[v]


cdef inline void add_weight_grad_tiles(
    real *out, Py_ssize_t N, Py_ssize_t M, const real *inputs, Py_ssize_t stride, const real *panel, Py_ssize_t n,
    Py_ssize_t columns, const RowBlock *block, bint first
) noexcept nogil:
    """out += the product of this block of rows, or := with `first`, for M rows and n lines (`columns` columns) of out.
    At most GROUP_TILES tiles, which use a block of the panel while it is in cache."""
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef real[LF] total
    cdef Py_ssize_t L = lanes_of(out), tiles = count_tiles(M), c, at, g, q, l
    clear(acc, tiles * ROWS * LINES * L)
    for q in range(M):
        for l in range(n):
            prefetch_write(out + q * N + l * L)
    for c in range(block.chains):
        at = c * BLOCK * ROWS
        for g in range(tiles if block.count[c] > 0 else 0):
            add_block_product(acc + g * ROWS * LINES * L, min(<Py_ssize_t> ROWS, M - g * ROWS), n,
                              inputs + g * stride + at, 1, panel + c * BLOCK * n * L, block.count[c],
                              inputs + (g + GROUP_TILES) * stride + at, 0)
    for q in range(M):
        if columns >= n * L:
            accumulate_lines(out + q * N, acc + q * LINES * L, n, first)
            continue
        for l in range(n):
            load_line(total, out + q * N + l * L, columns - l * L)
            accumulate_lines(total, acc + (q * LINES + l) * L, 1, first)
            store_line(out + q * N + l * L, total, columns - l * L)


cdef inline void add_weight_grad_rows(
    real *out, Py_ssize_t N, Py_ssize_t M, const real *inputs, Py_ssize_t stride, const real *panel, Py_ssize_t n,
    Py_ssize_t columns, const RowBlock *block, bint first
) noexcept nogil:
    """The same for any number of rows of out."""
    cdef Py_ssize_t m = 0, most = GROUP_TILES * ROWS
    if block.active == 0 and not first:
        return
    while m < M:
        add_weight_grad_tiles(out + m * N, N, min(most, M - m), inputs + m // ROWS * stride, stride, panel, n, columns,
                              block, first)
        m += most


cdef inline void add_column_sums(
    double *restrict sums, const real *restrict d, Py_ssize_t ldd, Py_ssize_t n, const RowBlock *block
) noexcept nogil:
    """sums += the sums of n columns of a block of rows of d: chains of BLOCK rows, added in order.  Many columns at
    once, as each waits for its own additions."""
    cdef double[PANEL_LINES * LF] total
    cdef double[PANEL_LINES * LF] chain
    cdef const real *row
    cdef Py_ssize_t c0 = 0, c, k, l, m
    while c0 < n:
        m = min(<Py_ssize_t> PANEL_LINES * lanes_of(d), n - c0)
        for l in range(m):
            total[l] = 0
        for c in range(block.chains):
            for l in range(m):
                chain[l] = 0
            for k in range(c * BLOCK, c * BLOCK + block.count[c]):
                row = d + block.d_row[k] * ldd + c0
                for l in range(m):
                    chain[l] = chain[l] + row[l]
            for l in range(m):
                total[l] = total[l] + chain[l]
        for l in range(m):
            sums[c0 + l] = sums[c0 + l] + total[l]
        c0 += m


# ----------------------------------------------------------------------------------------------------------- peepholes
cdef inline void compute_peephole_grad(
    store *out, const real *d, Py_ssize_t ldd, const Steps *s, const store *initial, Py_ssize_t H, const store *states,
    const Layout *layout, Py_ssize_t columns
) noexcept nogil:
    """Sum d * cs over all rows to the gradient of a peephole, for at most one line of columns.

    out : the line's elements of the gradient, the caller's
    d : [T * B,ldd] in scratch, from the columns of the gate and the line on
    initial : [B,H] from the line on, to multiply with the states before each step; NULL: with those after it
    states : the states after each step, [T,B,H] from the line on, with `layout`
    columns : values from the line on to the end of a row
    """
    cdef double[LF] total
    cdef double[LF] block
    cdef double[LF] chain
    cdef real factor
    cdef Py_ssize_t n = min(columns, lanes_of(d)), rows = s.T * s.B, r, at, t, b, l
    cdef const store *state
    for l in range(n):
        total[l] = block[l] = chain[l] = 0
    for r in range(rows):
        t, b = r // s.B, r % s.B
        if initial is NULL:
            state = current_row(s, states, layout, t, b)
        else:
            state = previous_row(s, initial, H, states, layout, t, b)
        at = (t * s.B + slot_of_row(s, b)) * ldd
        for l in range(n if has_step(s, t, b) else 0):
            factor = 0
            if state is not NULL:
                load_value(&factor, state + l)
            chain[l] = chain[l] + <double> d[at + l] * factor
        if (r + 1) % BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                block[l] = block[l] + chain[l]
                chain[l] = 0
        if (r + 1) % ROW_BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                total[l] = total[l] + block[l]
                block[l] = 0
    for l in range(n):
        store_value(out + l, <real> total[l])
