"""Products of the backward passes of cells and of the dense layer: d @ w.T for x, and inputs.T @ d for weights.

d has the gradients of all pre-activations: for each step t and slot b (steps.pxd) a row of `ldd` reals, number
t * B + b.  Rows of d that belong to finished rows are never read.

Sums over rows have three levels, for accuracy: chains of BLOCK rows from zero in ascending r, where r = t * B + row is
numbered by batch rows, not by slots; chains added in ascending order within blocks of ROW_BLOCK rows; and these blocks
added in ascending order.  Sums for biases and peepholes are in double for float too: it costs little, and they cancel
more than products do.  Finished rows keep their places in this order as if they added zeros.  They are skipped, which
changes no bit: x + 0 = x, and a chain starts at +0, so the sign of a zero cannot differ.

t : a step
b, row : a slot, a batch row
r, r0 : a row (t, row) of the caller's, r = t * B + row; the first one of a block
d_row : a row of d, t * B + b
L, l : reals in a cache line, one of these
j, g : a packed panel, one of its lines
column : the first column of a line
c, k : a chain of a block, one of its rows
q, m : one of some rows that are computed together, and how many these are
s : the `Steps` of the call
part, parts : the index of a part of the work, and how many there are
"""
from passes.steps cimport (
    Layout, Steps, active_end, clear_finished_rows, contiguous_layout, has_step, offset_of, previous_row, row_of_slot,
    slot_of_row, step_at
)
from product.lines cimport (
    LF, REAL_BYTES, Array, L, array_of, at, clear, inline_void, line_at, lines_in, load_line, load_reals, load_values,
    noinline_void, store_line, store_reals, store_value, value_at
)
from product.panels cimport scratch_stride
from product.real cimport real
from product.tile cimport (
    BLOCK, GROUP_TILES, LINES, PACK_ROWS, ROW_BLOCK, ROW_CHAINS, ROWS, TILE_SIZE, VECTORS, add_block_product,
    add_panel_product, packed_line, packed_stride, prefetch_read, prefetch_write, tile_group_height,
    transpose_rows, vec
)
from schedule.machine cimport fewest_prefetching_rows
from schedule.team cimport part_start

cdef enum:
    PANEL_LINES = 4  # lines of a packed panel, in which the gates of a unit do not stand side by side


cdef inline Py_ssize_t count_panels(Py_ssize_t lines) noexcept nogil:
    """Return how many panels hold so many lines."""
    return (lines + PANEL_LINES - 1) // PANEL_LINES


cdef inline Py_ssize_t panel_lines(Py_ssize_t lines, Py_ssize_t j) noexcept nogil:
    """Return how many of so many lines are in panel j."""
    return min(<Py_ssize_t> PANEL_LINES, lines - j * PANEL_LINES)


cdef inline const real *state_line(
    bint in_place, real *space, Array state, Py_ssize_t j, Py_ssize_t n
) noexcept nogil:
    """Return line j of a state, padded with zeros.

    in_place, space : as of `line_at`
    state : a row of an array of the caller's, or no array for zeros
    n : values from the line on to the end of the row
    """
    if state.data is NULL:
        clear(space, L)
        return space
    return line_at(in_place, space, state, j * L, n)


cdef inline void add_line(
    bint in_place, real *restrict sum, const real *restrict line, Array values, Py_ssize_t offset, Py_ssize_t n
) noexcept nogil:
    """Set sum [L] to the sum of `line` [L] and of n values of an array of the caller's, from number `offset` on.

    in_place : as of `line_at`
    """
    cdef Py_ssize_t l
    cdef real[LF] space
    cdef const real *addend = line_at(in_place, &space[0], values, offset, n)
    for l in range(L):
        sum[l] = line[l] + addend[l]


cdef inline void pack_transposed_panel(
    real *panel, Array w, Py_ssize_t N, Py_ssize_t rows, Py_ssize_t j
) noexcept nogil:
    """Pack panel j of w.T, for w [rows,N] of the caller's.  Prefetching rows meanwhile gained nothing."""
    cdef Py_ssize_t lines = panel_lines(lines_in(rows), j), g, first, k0, kb
    for g in range(lines):
        first, k0 = (j * PANEL_LINES + g) * L, 0
        while k0 < N:
            kb = min(<Py_ssize_t> BLOCK, N - k0)
            transpose_rows(packed_line(panel, lines, g, k0, kb), packed_stride(lines, g), at(w, first * N + k0), N,
                           rows - first, kb)
            k0 += kb


# ---------------------------------------------------------------------------------------------------- x_grad = d @ w.T
cdef struct XGrad:  # the gradient of x, d @ w.T
    const Steps *steps
    Array x_grad  # [T,B,I] with `layout`, the caller's
    Layout layout
    bint accumulate  # the product is added to what is in x_grad
    Py_ssize_t I
    const real *d
    Py_ssize_t ldd
    Py_ssize_t K, K2  # columns of d, first those of one matrix, then those of a second; K2 = 0: there is no second one


cdef inline void compute_x_grad_panel(
    const XGrad *x, Py_ssize_t d_row0, Py_ssize_t d_row1, const real *panel, const real *panel2, Py_ssize_t j
) noexcept nogil:
    """Compute the columns of x_grad of panel j, for the rows d_row0 to d_row1 of d.

    panel, panel2 : panel j of each matrix
    """
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef real[LF] before
    cdef const Steps *s = x.steps
    cdef const real *d
    cdef Py_ssize_t lines = panel_lines(lines_in(x.I), j), first = j * PANEL_LINES * L
    cdef Py_ssize_t d_row = d_row0, t, b, m, q, g, l, column
    cdef Py_ssize_t prefetched = 0  # bytes of all lines of a k, if the next panel is prefetched
    cdef Array out
    cdef real *sums
    if d_row0 == d_row1:
        return
    if d_row1 - d_row0 >= fewest_prefetching_rows((x.K + x.K2) * x.I * REAL_BYTES, 1):
        prefetched = lines * L * REAL_BYTES
    t, b = d_row0 // s.B, d_row0 % s.B
    while d_row < d_row1:
        m = tile_group_height(d_row1 - d_row)
        d = x.d + d_row * x.ldd
        clear(acc, m * LINES * L)
        add_panel_product(acc, m, lines, d, x.ldd, panel, x.K, x.K * prefetched)
        if x.K2 > 0:
            add_panel_product(acc, m, lines, d + x.K, x.ldd, panel2, x.K2, x.K2 * prefetched)
        for q in range(m):
            out = at(x.x_grad, offset_of(&x.layout, t, row_of_slot(s, b)))
            for g in range(lines):
                column, sums = first + g * L, acc + (q * LINES + g) * L
                if x.accumulate:
                    load_line(before, at(out, column), x.I - column)
                    for l in range(L):
                        sums[l] = before[l] + sums[l]
                store_line(at(out, column), sums, x.I - column)
            b += 1
            if b == s.B:
                t, b = t + 1, 0
        d_row += m


cdef inline void compute_x_grad_part(
    const XGrad *x, const real *panels, const real *panels2, Py_ssize_t groups, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Compute one part of x_grad, a few tiles of rows times one panel after the other.

    If all rows have T steps, a part is a range of the pairs (rows, panel), which all take as long.  Else it is every
    `parts`-th step, of which the active rows are the first slots of each group.

    panels, panels2 : panel 0 of each matrix
    groups : that of `set_step_mask`
    """
    cdef const Steps *s = x.steps
    cdef Py_ssize_t count = count_panels(lines_in(x.I)), most = GROUP_TILES * ROWS, rows = s.T * s.B
    cdef Py_ssize_t size = PANEL_LINES * L * x.K, size2 = PANEL_LINES * L * x.K2  # of a panel of each matrix
    cdef Py_ssize_t pair, tiles = count_tiles(rows), blocks, t = part, group, block, b, end, d_row, j
    if count == 0:
        return
    if s.slots is NULL:
        blocks = max((tiles + GROUP_TILES - 1) // GROUP_TILES, min(tiles, (parts + count - 1) // count))
        for pair in range(part_start(blocks * count, part, parts), part_start(blocks * count, part + 1, parts)):
            block, j = pair // count, pair % count
            d_row, end = part_start(tiles, block, blocks) * ROWS, min(part_start(tiles, block + 1, blocks) * ROWS, rows)
            compute_x_grad_panel(x, d_row, end, panels + j * size, panels2 + j * size2, j)
        return
    if not x.accumulate:
        clear_finished_rows(s, x.x_grad, &x.layout, x.I, part, parts)
    while t < s.T:
        for group in range(groups):
            b = part_start(s.B, group, groups)
            end = active_end(s, step_at(s, t), b, part_start(s.B, group + 1, groups))
            while b < end:
                d_row = t * s.B + b
                b = min(b + most, end)
                for j in range(count):
                    compute_x_grad_panel(x, d_row, t * s.B + b, panels + j * size, panels2 + j * size2, j)
        t += parts


# ------------------------------------------------------------------- w_grad = inputs.T @ d, or transposed d.T @ inputs
cdef inline Py_ssize_t count_tiles(Py_ssize_t rows) noexcept nogil:
    """Return how many register tiles hold so many rows."""
    return (rows + ROWS - 1) // ROWS


cdef struct RowBlock:  # the active ones of ROW_BLOCK rows r = t * B + row, or of what is left at the end
    bint is_first, is_last
    Py_ssize_t tile_stride  # reals from one tile of the block's rows to the next
    Py_ssize_t rows, chains  # of the block, with its finished rows
    Py_ssize_t active  # active rows
    Py_ssize_t[ROW_CHAINS] count  # active rows of each chain; those of chain c begin at c * BLOCK in the arrays below
    Py_ssize_t[ROW_BLOCK] t, row  # their step and batch row
    Py_ssize_t[ROW_BLOCK] d_row  # their row of d


cdef inline Py_ssize_t tile_stride_of(const Steps *s) noexcept nogil:
    """Return the distance from one tile of a block of rows to the next, for the largest block."""
    return scratch_stride(min(s.T * s.B, <Py_ssize_t> ROW_BLOCK) * ROWS)


cdef inline void list_active_rows(RowBlock *block, const Steps *s, Py_ssize_t r0) noexcept nogil:
    """List the active rows of the block that begins with row r0."""
    cdef Py_ssize_t t = r0 // s.B, row0 = r0 % s.B, c, r = r0, n, q, row, end, to  # row0: the batch row of row r
    block.is_first, block.is_last = r0 == 0, r0 + ROW_BLOCK >= s.T * s.B
    block.tile_stride = tile_stride_of(s)
    block.rows = min(<Py_ssize_t> ROW_BLOCK, s.T * s.B - r0)
    block.chains = (block.rows + BLOCK - 1) // BLOCK
    block.active = 0
    for c in range(block.chains):
        to, end = c * BLOCK, r0 + min((c + 1) * BLOCK, block.rows)
        while r < end:
            n = min(end - r, s.B - row0)  # rows of one step
            if s.slots is NULL:
                for q in range(n):
                    block.t[to + q], block.row[to + q], block.d_row[to + q] = t, row0 + q, r + q
                to += n
            else:
                for row in range(row0, row0 + n):
                    if has_step(s, t, row):
                        block.t[to], block.row[to], block.d_row[to] = t, row, t * s.B + slot_of_row(s, row)
                        to += 1
            r += n
            row0 += n
            if row0 == s.B:
                t, row0 = t + 1, 0
        block.count[c] = to - c * BLOCK
        block.active += block.count[c]


cdef struct RowRun:  # active rows of a chain, side by side: at most PACK_ROWS that a part packs together
    Py_ssize_t chain, r, count  # the chain; its first row of the run, counted from the chain's first one; how many
    Py_ssize_t first  # the first row as an index of the arrays of RowBlock
    Py_ssize_t left  # active rows of the part that come after


cdef inline RowRun runs_of(const RowBlock *block, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Return what `next_run` begins with, for one part of a block's active rows."""
    cdef RowRun run
    run.chain, run.count, run.first, run.r = 0, 0, 0, part_start(block.active, part, parts)
    run.left = part_start(block.active, part + 1, parts) - run.r
    return run


cdef inline bint next_run(RowRun *run, const RowBlock *block) noexcept nogil:
    """Go on to the next run of a part, and return whether there is one."""
    if run.left == 0:
        return False
    run.r += run.count
    while run.r >= block.count[run.chain]:
        run.r -= block.count[run.chain]
        run.chain += 1
    run.first = run.chain * BLOCK + run.r
    run.count = min(run.left, min(<Py_ssize_t> PACK_ROWS, block.count[run.chain] - run.r))
    run.left -= run.count
    return True


cdef struct InputRow:  # what a row of a weight gradient's product is packed from
    Array values  # of the caller's, or of d; no array for zeros
    Array factor  # of the caller's, to multiply the values with, or no array


cdef inline void pack_columns(
    real *panel, Py_ssize_t lines, const RowBlock *block, const real *d, Py_ssize_t ldd, Py_ssize_t n
) noexcept nogil:
    """Pack columns of a block of rows of d into a panel of so many lines, with zeros beyond the n columns that d has.

    d : from the first column on
    """
    cdef Py_ssize_t c, k, g, count
    cdef const Py_ssize_t *rows
    cdef const real *line
    cdef const real *later_line
    for c in range(block.chains):
        rows, count = &block.d_row[c * BLOCK], block.count[c]
        for k in range(count):
            line, later_line = d + rows[k] * ldd, d + rows[min(k + PACK_ROWS, count - 1)] * ldd
            for g in range(lines):
                prefetch_read(later_line + g * L)
                load_reals(packed_line(panel, lines, g, c * BLOCK, count) + k * packed_stride(lines, g),
                           line + g * L, n - g * L)


cdef inline inline_void pack_tiles_of(
    bint is_half, bint has_factors, real *dst, Py_ssize_t tile_stride, const InputRow *rows, Py_ssize_t M,
    Py_ssize_t count
) noexcept nogil:
    """Pack rows as `pack_tiles`; inlined with constants that say whether arrays are float16, and rows have factors."""
    cdef real[ROWS] values  # loading to the tile at once was slower
    cdef real *to
    cdef Array row, factor
    cdef Py_ssize_t g, k, q, n
    for g in range(count_tiles(M)):
        n = min(<Py_ssize_t> ROWS, M - g * ROWS)
        for k in range(count):
            to = dst + g * tile_stride + k * ROWS
            row = array_of(rows[k].values.data, is_half)
            if row.data is NULL:
                clear(to, ROWS)
                continue
            if n == ROWS:
                for q in range(ROWS):
                    values[q] = value_at(row, g * ROWS + q)
            else:
                clear(values, ROWS)
                for q in range(n):
                    values[q] = value_at(row, g * ROWS + q)
            if has_factors:
                factor = array_of(rows[k].factor.data, is_half)
                for q in range(n):
                    values[q] = values[q] * value_at(factor, g * ROWS + q)
            for q in range(ROWS):
                to[q] = values[q]


cdef inline noinline_void pack_tiles(
    bint is_half, real *dst, Py_ssize_t tile_stride, const InputRow *rows, Py_ssize_t M, Py_ssize_t count
) noexcept nogil:
    """Pack `count` rows of M values as columns of register tiles: ROWS values of a row to each tile.

    A tile takes all these rows before the next one, because tiles are pages apart.

    dst : the first row's place in the first tile; the next row is ROWS further on, the next tile tile_stride
    rows : [count], of arrays that are float16 or not; all of them have factors, or none
    """
    cdef bint has_factors = count > 0 and rows[0].factor.data is not NULL
    if is_half: pack_tiles_of(True, has_factors, dst, tile_stride, rows, M, count)
    elif has_factors: pack_tiles_of(False, True, dst, tile_stride, rows, M, count)
    else: pack_tiles_of(False, False, dst, tile_stride, rows, M, count)


cdef inline void pack_row(
    real *panels, const InputRow *row, Py_ssize_t M, const RowBlock *block, Py_ssize_t c, Py_ssize_t k
) noexcept nogil:
    """Pack row k of chain c of a block into all panels.

    panels : in scratch, each for block.rows rows
    row : of M values
    """
    cdef Py_ssize_t j, lines, g, column, l
    cdef real[LF] factor
    cdef real *panel
    cdef real *to
    for j in range(count_panels(lines_in(M))):
        panel = panels + j * PANEL_LINES * L * block.rows
        lines = panel_lines(lines_in(M), j)
        for g in range(lines):
            to = packed_line(panel, lines, g, c * BLOCK, block.count[c]) + k * packed_stride(lines, g)
            column = (j * PANEL_LINES + g) * L
            if row.values.data is NULL:
                clear(to, L)
            else:
                load_line(to, at(row.values, column), M - column)
                if row.factor.data is not NULL:
                    load_line(factor, at(row.factor, column), M - column)
                    for l in range(L):
                        to[l] = to[l] * factor[l]


cdef inline void accumulate_lines(real *total, real *lines, Py_ssize_t count, bint is_first) noexcept nogil:
    """Add `count` lines to `total`, or copy them there if they are the first ones."""
    cdef Py_ssize_t v
    if is_first:
        for v in range(count * VECTORS):
            (<vec *> total)[v] = (<vec *> lines)[v]
    else:
        for v in range(count * VECTORS):
            (<vec *> total)[v] = (<vec *> lines)[v] + (<vec *> total)[v]


cdef inline noinline_void accumulate_tiles(
    real *out, Py_ssize_t N, Py_ssize_t M, real *acc, Py_ssize_t lines, Py_ssize_t columns, bint is_first
) noexcept nogil:
    """Add the sums of M rows of tiles to one panel's columns of a weight gradient (`add_weight_grad_tiles`).

    This is not inlined, because gcc would keep lines on the stack among the code of the callers.

    acc : [M,LINES,L]
    """
    cdef real[LF] total
    cdef Py_ssize_t q, g
    for q in range(M):
        if columns >= lines * L:
            accumulate_lines(out + q * N, acc + q * LINES * L, lines, is_first)
            continue
        for g in range(lines):
            load_reals(total, out + q * N + g * L, columns - g * L)
            accumulate_lines(total, acc + (q * LINES + g) * L, 1, is_first)
            store_reals(out + q * N + g * L, total, columns - g * L)


cdef inline void add_weight_grad_rows(
    real *out, Py_ssize_t N, Py_ssize_t M, const real *tiles, const real *panel, Py_ssize_t lines, Py_ssize_t columns,
    const RowBlock *block
) noexcept nogil:
    """Add the product of a block of rows to one panel's columns of a weight gradient.

    Some tiles of rows of the gradient use a chain of the panel while it is in cache.

    out : [M,N], from the panel's first column on, the caller's or scratch; overwritten if the block is the first one
    tiles : of `pack_tiles`, those of the M rows
    panel : of so many lines, of `pack_columns` or `pack_row`
    columns : of out, from the panel's first one on to the end of a row
    """
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t m, c, q, g
    if block.active == 0 and not block.is_first:
        return
    while M > 0:
        m = min(M, <Py_ssize_t> GROUP_TILES * ROWS)
        clear(acc, count_tiles(m) * ROWS * LINES * L)
        for q in range(m):
            for g in range(lines):
                prefetch_write(out + q * N + g * L)
        for c in range(block.chains):
            for q in range(count_tiles(m) if block.count[c] > 0 else 0):
                add_block_product(acc + q * ROWS * LINES * L, min(<Py_ssize_t> ROWS, m - q * ROWS), lines,
                                  tiles + q * block.tile_stride + c * BLOCK * ROWS, 1, panel + c * BLOCK * lines * L,
                                  block.count[c], 0)
        accumulate_tiles(out, N, m, acc, lines, columns, block.is_first)
        out, tiles, M = out + m * N, tiles + count_tiles(m) * block.tile_stride, M - m


cdef inline void add_column_sums(
    double *restrict sums, const real *restrict d, Py_ssize_t ldd, Py_ssize_t n, const RowBlock *block
) noexcept nogil:
    """Add a block of rows of d to the sums of n columns, in chains of BLOCK rows.

    Columns are summed side by side, a panel's number of them, as each sum waits for its own additions.

    sums : [n] in scratch
    d : from the first column on
    """
    cdef double[PANEL_LINES * LF] total
    cdef double[PANEL_LINES * LF] chain
    cdef const real *line
    cdef Py_ssize_t column = 0, c, k, l, n_columns
    while column < n:
        n_columns = min(<Py_ssize_t> PANEL_LINES * L, n - column)
        for l in range(n_columns):
            total[l] = 0
        for c in range(block.chains):
            for l in range(n_columns):
                chain[l] = 0
            for k in range(c * BLOCK, c * BLOCK + block.count[c]):
                line = d + block.d_row[k] * ldd + column
                for l in range(n_columns):
                    chain[l] = chain[l] + line[l]
            for l in range(n_columns):
                total[l] = total[l] + chain[l]
        for l in range(n_columns):
            sums[column + l] = sums[column + l] + total[l]
        column += n_columns


# ----------------------------------------------------------------------------------------------------------- peepholes
cdef inline void compute_peephole_grad(
    Array out, const real *d, Py_ssize_t ldd, const Steps *s, Array initial, Py_ssize_t H, Array states,
    Py_ssize_t unit
) noexcept nogil:
    """Sum d * cs over all rows to the gradient of a peephole, for one line of it.

    out : [H], the gradient, the caller's
    d : [T * B,ldd] in scratch, from the columns of the gate on
    initial : [B,H], to multiply with the states before each step; no array: with those after it
    states : the states after each step, [T,B,H] without gaps
    unit : the first unit of the line
    """
    cdef Layout layout = contiguous_layout(s.B, H)
    cdef double[LF] total
    cdef double[LF] block
    cdef double[LF] chain
    cdef real[LF] factor
    cdef Py_ssize_t n = min(H - unit, L), rows = s.T * s.B, r, t, row, l
    cdef Array state
    cdef const real *line
    for l in range(n):
        total[l] = block[l] = chain[l] = 0
    for r in range(rows):
        t, row = r // s.B, r % s.B
        if has_step(s, t, row):
            if initial.data is NULL:
                state = at(states, offset_of(&layout, t, row))
            else:
                state = previous_row(s, initial, &s.cs_reset, H, states, &layout, t, row)
            line = d + (t * s.B + slot_of_row(s, row)) * ldd + unit
            clear(factor, LF)
            if state.data is not NULL:
                load_values(factor, at(state, unit), n)
            for l in range(n):
                chain[l] = chain[l] + <double> line[l] * factor[l]
        if (r + 1) % BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                block[l] = block[l] + chain[l]
                chain[l] = 0
        if (r + 1) % ROW_BLOCK == 0 or r + 1 == rows:
            for l in range(n):
                total[l] = total[l] + block[l]
                block[l] = 0
    for l in range(n):
        store_value(at(out, unit + l), <real> total[l])
