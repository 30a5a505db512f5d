"""The dense layer: its equations, its gradient, and both passes, `forward` and `backward`, with their phases.

Each row (t, row) of x gives a row of y = activation(z), z = x @ w + b.  With d_z the gradient to z,

    none      y = z                                              d_z = d_y
    sigmoid   y = sigmoid(z)                                     d_z = d_y * y * (1 - y)
    tanh      y = tanh(z)                                        d_z = d_y * (1 - y^2)
    relu      y = max(z, 0)                                      d_z = d_y where y > 0, else 0
    softmax   y = e / (sum of e), e = exp(z - (largest z))       d_z = y * (d_y - (sum of d_y * y))

and d_x = d_z @ w.T, d_w = x.T @ d_z, d_b = the sum of d_z over all rows.

`activate`, `softmax`, `activation_grad` and `softmax_grad` are these equations, for a line or for a whole row.  The two
sums of a softmax are in double: a chain for each lane of a line, and the lanes in ascending order.  A finished row
gives zeros, and no gradient.

    T, B, I, O   steps, batch rows, inputs, outputs
    row          a batch row
    r            the number of a row (t, row), r = t * B + row
    q, q0, q1    a row of a chunk, a range of these
    j, u, l      a panel of w, a line of units in it, a lane of a line
    unit         the first unit of a line
    p            the plan
    part, parts  the index of a part, and how many there are; `share` has the rows and panels of one
    numbers      the numbers r of the rows of a chunk that are not finished; NULL where all rows are computed, and the
                 rows of a chunk follow each other from r on
    scratch      the workspace of the call
"""
from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY
from libc.string cimport memset

from cells.activations cimport scaled_exp, sigmoid, tanh
from passes.arrays cimport Pass, kernel_with_plan
from passes.gradients cimport (
    PANEL_LINES, InputRow, RowBlock, RowRun, add_column_sums, add_weight_grad_rows, compute_x_grad_part, count_panels,
    count_tiles, list_active_rows, next_run, pack_columns, pack_tiles, pack_transposed_panel, panel_lines, runs_of
)
from passes.steps cimport (
    FINISHED, Layout, Slot, Steps, contiguous_layout, has_step, offset_of, set_step_mask, size_of_slots, slot_of_row,
    steps_of
)
from product.integer cimport READ_PAST, quantize_row, quantized_row_stride
from product.lines cimport (
    LF, Array, array_of, at, clear, holds_half, itemsize_of, lanes_of, lines_in, load_row, no_array, noinline_void,
    store_line, store_row, store_value
)
from product.panels cimport (
    THREAD_GAP, Panels, add_product, add_row_product, copy_bias, pack_bias, pack_panels, pack_quantized,
    panels_with_rows, row_panels, scratch_stride, unit_lines_in_panel
)
from product.quantized cimport INT8, UNQUANTIZED, bytes_per_weight
from product.real cimport COMPUTES_FLOAT, real
from product.tile cimport GROUP_TILES, LINES, PACK_ROWS, ROW_BLOCK, ROWS, TILE_SIZE, tile_group_height
from schedule.cost cimport (
    Grid, Work, ceil_div, cheapest, parts_of, requirements_of, speed_of, threads_of, use_threads, work_of
)
from schedule.machine cimport fewest_prefetching_rows
from schedule.team cimport Team, adopt_rounding, barrier, group_barrier, measured_cost, part_start, start_team
from schedule.workspace cimport Region, Workspace, guard_zones, lay_out, region, release_zones

cdef enum:  # as in blockcell/optable.py
    NONE, SIGMOID, TANH, RELU, SOFTMAX

cdef enum:
    CHUNK = 96  # rows that stay in cache while they are multiplied with one panel of w after the other


# --------------------------------------------------------------------------------------- the equations, for one line
cdef inline noinline_void activate(real *restrict z, int activation) noexcept nogil:
    """Turn a line of z into y, for any activation but softmax."""
    cdef Py_ssize_t l, L = lanes_of(z)
    if activation == SIGMOID:
        for l in range(L):
            z[l] = sigmoid(z[l])
    elif activation == TANH:
        for l in range(L):
            z[l] = tanh(z[l])
    elif activation == RELU:
        for l in range(L):
            z[l] = 0 if z[l] < 0 else z[l]  # NaN stays


cdef inline noinline_void activation_grad(const real *restrict y, real *restrict d, int activation) noexcept nogil:
    """Turn a line of d_y into d_z, for any activation but softmax."""
    cdef Py_ssize_t l, L = lanes_of(y)
    cdef real one = 1  # a literal 1 would make all of it double
    if activation == SIGMOID:
        for l in range(L):
            d[l] = d[l] * y[l] * (one - y[l])
    elif activation == TANH:
        for l in range(L):
            d[l] = d[l] * (one - y[l] * y[l])
    elif activation == RELU:
        for l in range(L):
            d[l] = d[l] if y[l] > 0 else 0  # also where y is NaN


# ---------------------------------------------------------------------------------------------- and for a whole row
cdef inline double sum_of_lanes(const double *lanes, Py_ssize_t L) noexcept nogil:
    """Return the sum of the lanes of a line, in ascending order."""
    cdef double total = 0
    cdef Py_ssize_t l
    for l in range(L):
        total = total + lanes[l]
    return total


cdef inline noinline_void softmax(real *restrict z, Py_ssize_t n) noexcept nogil:
    """Turn a row of z into y.

    z : n values, padded to whole lines with any numbers
    """
    cdef Py_ssize_t L = lanes_of(z), lines = lines_in(z, n), j, l
    cdef real[LF] lane
    cdef double[LF] sums
    cdef real top = -INFINITY, total
    for l in range(n, lines * L):
        z[l] = -INFINITY
    for l in range(L):
        lane[l] = -INFINITY
        sums[l] = 0
    for j in range(lines):
        for l in range(L):
            lane[l] = z[j * L + l] if z[j * L + l] > lane[l] else lane[l]
    for l in range(L):
        top = lane[l] if lane[l] > top else top
    for j in range(lines):
        for l in range(L):
            z[j * L + l] = scaled_exp(z[j * L + l] - top)
        for l in range(L):
            sums[l] = sums[l] + <double> z[j * L + l]
    total = <real> sum_of_lanes(sums, L)
    for j in range(lines):
        for l in range(L):
            z[j * L + l] = z[j * L + l] / total


cdef inline noinline_void softmax_grad(const real *restrict y, real *restrict d, Py_ssize_t lines) noexcept nogil:
    """Turn a row of d_y into d_z.

    y, d : so many lines; both are zero beyond the row's values
    """
    cdef Py_ssize_t L = lanes_of(y), j, l
    cdef double[LF] sums
    cdef real total
    for l in range(L):
        sums[l] = 0
    for j in range(lines):
        for l in range(L):
            sums[l] = sums[l] + <double> d[j * L + l] * <double> y[j * L + l]
    total = <real> sum_of_lanes(sums, L)
    for j in range(lines):
        for l in range(L):
            d[j * L + l] = y[j * L + l] * (d[j * L + l] - total)


# --------------------------------------------------------------------------------------------------------------- grids
cdef inline Grid choose_forward_grid(
    Py_ssize_t rows, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, int format, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a forward pass: groups share the rows of y, members the columns."""
    cdef Work work = work_of(1, rows, 64 // itemsize, 1)
    work.lines[0] = work.units = ceil_div(O, work.L)
    work.width[0], work.panels[0], work.panels[1] = LINES, ceil_div(work.lines[0], LINES), 0
    work.K[0], work.x_rows[0] = I, 0
    work.line_bytes = work.L * bytes_per_weight(format, itemsize)
    work.speed, work.cell = speed_of(format, itemsize), 10
    return cheapest(&work, threads, False, False)


cdef inline Grid choose_backward_grid(
    Py_ssize_t rows, Py_ssize_t I, Py_ssize_t O, Py_ssize_t itemsize, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a backward pass: groups of one, as many as each phase is divided into."""
    cdef Work work = work_of(1, rows, 64 // itemsize, 0)
    work.panels[0] = work.panels[1] = 1
    work.speed, work.cell, work.units = speed_of(UNQUANTIZED, itemsize), 20, ceil_div(O, work.L)
    work.divisible_time = work.column_time = 2.0 * rows * I * O / work.speed
    work.column_lines, work.barriers = max(count_tiles(I), count_panels(work.units)), 2
    work.lines_read_in_part, work.lines_read_by_all = rows * work.units, rows * ceil_div(I, work.L)
    return cheapest(&work, threads, False, True)


# ------------------------------------------------------------------------------------------------------------- forward
cdef enum:  # the regions of the forward pass's workspace: those of a part, and the parts
    X_ROWS  # a chunk of rows of x: float16 as float32, or quantized
    Z  # a chunk of rows of z, for softmax
    ROW_NUMBERS  # how many rows of a chunk are not finished, and `numbers`; as Py_ssize_t
    PART_REGIONS
    PARTS = 0
    REGIONS

cdef struct DenseForward:  # the plan of a forward pass
    Py_ssize_t rows, B, I, O  # rows: T * B
    bint is_half  # all arrays of the call are float16
    Py_ssize_t L, Is, Os  # values in a line; strides in scratch of rows of x and of z
    Layout x_layout, y_layout
    const unsigned char *step_mask  # [T, B], the caller's; NULL if no row is finished
    int activation
    Grid grid
    Py_ssize_t chunk  # rows that a part computes at once
    Panels w
    Py_ssize_t[PART_REGIONS] start  # of each region of a part
    Workspace part, workspace  # of each part, and of all


cdef inline DenseForward plan_forward(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int format, int activation, Py_ssize_t threads
) noexcept nogil:
    """Plan a forward pass on at most so many threads.

    format : how packed weights are quantized, as in Panels
    """
    cdef DenseForward p
    cdef Region[PART_REGIONS] part_regions
    cdef Region[REGIONS] regions
    cdef Py_ssize_t start  # of the parts, which is 0
    cdef Py_ssize_t rows = T * B, itemsize = sizeof(real)
    p.rows, p.B, p.I, p.O = rows, B, I, O
    p.x_layout, p.y_layout = contiguous_layout(B, I), contiguous_layout(B, O)
    p.L = 64 // itemsize
    p.Is, p.Os = quantized_row_stride(I) if format == INT8 else scratch_stride(I, p.L), scratch_stride(O, p.L)
    p.step_mask, p.activation = NULL, activation
    p.w = panels_with_rows(I, I, 0, O, p.L, 1, format)
    p.grid = choose_forward_grid(rows, I, O, itemsize, format, threads)
    p.w.prefetching_rows = fewest_prefetching_rows(I * O * bytes_per_weight(format, itemsize), p.grid.members)
    p.chunk = ceil_div(rows, p.grid.groups)
    if p.grid.members == 1:
        p.chunk = min(p.chunk, <Py_ssize_t> CHUNK)
    part_regions[X_ROWS] = region("x", p.chunk, p.Is, 0)
    part_regions[Z] = region("z", p.chunk, p.Os, 0)
    part_regions[ROW_NUMBERS] = region("row numbers", 1, ceil_div((1 + p.chunk) * sizeof(Py_ssize_t), 64) * p.L, 0)
    p.part = lay_out(part_regions, PART_REGIONS, p.start)
    p.part.size += THREAD_GAP * p.L
    regions[PARTS] = region("parts", parts_of(&p.grid), p.part.size, 0)
    p.workspace = lay_out(regions, REGIONS, &start)
    return p


cdef inline void use_forward_step_mask(DenseForward *p, const unsigned char *step_mask) noexcept nogil:
    """Skip the rows that are finished by the mask.

    step_mask : [T,B], the caller's, which has to live as long as the pass runs
    """
    cdef Py_ssize_t r
    for r in range(p.rows):
        if step_mask[r] & FINISHED:
            p.step_mask = step_mask
            return


cdef inline Py_ssize_t place_of(const Layout *a, Py_ssize_t B, Py_ssize_t r) noexcept nogil:
    """Return where row r of an array begins, in elements."""
    return r * a.row if a.step == B * a.row else offset_of(a, r // B, r % B)


cdef inline bint is_finished(const unsigned char *step_mask, Py_ssize_t r) noexcept nogil:
    """Return whether row r is finished; without a mask (NULL) none is."""
    return step_mask is not NULL and (step_mask[r] & FINISHED) != 0


cdef inline Py_ssize_t number_of(Py_ssize_t r, const Py_ssize_t *numbers, Py_ssize_t q) noexcept nogil:
    """Return the number of row q of a chunk."""
    return r + q if numbers is NULL else numbers[q]


cdef inline void activate_panel(
    const DenseForward *p, Array y, const real *z, real *z_rows, Py_ssize_t j, Py_ssize_t r, const Py_ssize_t *numbers,
    Py_ssize_t q0, Py_ssize_t rows
) noexcept nogil:
    """Compute y from z in panel j, for `rows` rows of a chunk from row q0 on; copy z to z_rows for a softmax, which
    needs whole rows.

    z : [rows, LINES] lines, the tile
    z_rows : row q0 and the rows behind it, a stride of `Os` apart
    """
    cdef Py_ssize_t L = p.L, q, u, l, unit
    cdef real[LF] line
    for q in range(rows):
        for u in range(unit_lines_in_panel(&p.w, j)):
            unit = (j * p.w.unit_lines + u) * L
            for l in range(L):
                line[l] = z[(q * LINES + u) * L + l]
            if p.activation == SOFTMAX:
                for l in range(L):
                    z_rows[q * p.Os + unit + l] = line[l]
                continue
            if p.activation != NONE:
                activate(line, p.activation)
            store_line(at(y, place_of(&p.y_layout, p.B, number_of(r, numbers, q0 + q)) + unit), line, p.O - unit)


cdef inline void softmax_rows(
    const DenseForward *p, Array y, real *z_rows, Py_ssize_t r, const Py_ssize_t *numbers, Py_ssize_t q0, Py_ssize_t q1
) noexcept nogil:
    """Compute y of the rows q0 to q1 of a chunk from their z.

    z_rows : the rows of the chunk, a stride of `Os` apart; overwritten with y
    """
    cdef Py_ssize_t q
    for q in range(q0, q1):
        softmax(z_rows + q * p.Os, p.O)
        store_row(at(y, place_of(&p.y_layout, p.B, number_of(r, numbers, q))), z_rows + q * p.Os, p.O)


cdef inline void multiply_rows(
    const DenseForward *p, Array y, const real *x, Py_ssize_t stride, real *z_rows, Py_ssize_t r,
    const Py_ssize_t *numbers, Py_ssize_t rows, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Multiply the first rows of a chunk with the panels j0 to j1, and compute y.

    x : [rows, I] as the product reads it, `stride` reals apart
    z_rows : as for `activate_panel`
    """
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t panel = LINES * p.L, j = j0, q, m, i
    while j < j1:
        if rows == 1:
            m = row_panels(&p.w, j, j1)
            for i in range(m):
                copy_bias(&p.w, j + i, 1, acc + i * panel)
            add_row_product(&p.w, j, m, 0, p.I, x, acc, panel)
            for i in range(m):
                activate_panel(p, y, acc + i * panel, z_rows, j + i, r, numbers, 0, 1)
            j += m
            continue
        q = 0
        while q < rows:
            m = tile_group_height(rows - q)
            copy_bias(&p.w, j, m, acc)
            add_product(&p.w, j, 0, p.I, x + q * stride, stride, m, acc)
            activate_panel(p, y, acc, z_rows + q * p.Os, j, r, numbers, q, m)
            q += m
        j += 1


cdef inline void load_input(const DenseForward *p, real *row, Array x, Py_ssize_t r) noexcept nogil:
    """Load row r of x as the product reads it: as float32, or quantized."""
    cdef Array x_row = at(x, place_of(&p.x_layout, p.B, r))
    if COMPUTES_FLOAT and p.w.format == INT8:
        quantize_row(<float *> row, <const float *> x_row.data, p.I)
    else:
        load_row(row, x_row, p.I)


cdef inline Py_ssize_t *numbers_of(const DenseForward *p, real *scratch, Py_ssize_t part) noexcept nogil:
    """Return where a part has the number of a chunk's rows that are not finished, and behind it theirs; NULL if no row
    is finished."""
    cdef real *numbers = scratch + part * p.part.size + p.start[ROW_NUMBERS]
    return <Py_ssize_t *> NULL if p.step_mask is NULL else <Py_ssize_t *> numbers


cdef struct DenseShare:  # of a forward pass
    Py_ssize_t r0, r1  # its rows
    Py_ssize_t j0, j1  # its panels
    Py_ssize_t member  # the part's index in its group


cdef inline DenseShare dense_share(const DenseForward *p, Py_ssize_t part) noexcept nogil:
    """Return the rows and panels of a part."""
    cdef DenseShare share
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = part // members
    share.member = part % members
    share.r0, share.r1 = part_start(p.rows, group, groups), part_start(p.rows, group + 1, groups)
    share.j0, share.j1 = part_start(p.w.count, share.member, members), part_start(p.w.count, share.member + 1, members)
    return share


cdef inline real *z_rows_of(const DenseForward *p, real *scratch, Py_ssize_t part) noexcept nogil:
    """Return where a group has the rows of z of a chunk: in the scratch of its first member."""
    return scratch + (part - part % p.grid.members) * p.part.size + p.start[Z]


cdef inline void multiply_active_rows(
    const DenseForward *p, Array x, Array y, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Compute one part of y where rows are finished: `multiply` for chunks of the rows that are not, which are gathered
    from x."""
    cdef DenseShare share = dense_share(p, part)
    cdef Py_ssize_t r = share.r0, next = p.rows, most = share.r1 - share.r0, n, q
    cdef real *rows = scratch + part * p.part.size + p.start[X_ROWS]
    cdef real *z_rows = z_rows_of(p, scratch, part)
    cdef Py_ssize_t *numbers = numbers_of(p, scratch, part)
    if p.grid.members == 1:  # by turns, since rows end late
        most = min(p.chunk, max(p.rows // (4 * p.grid.groups), <Py_ssize_t> GROUP_TILES * ROWS))
        r, next, share.r1 = part * most, p.grid.groups * most, p.rows
    while r < share.r1:
        n = 0
        for q in range(r, min(r + most, share.r1)):
            if not is_finished(p.step_mask, q):
                load_input(p, rows + n * p.Is, x, q)
                n += 1
                numbers[n] = q
            elif share.member == 0:
                memset(at(y, place_of(&p.y_layout, p.B, q)).data, 0, p.O * itemsize_of(y))
        numbers[0] = n
        if n > 0:
            multiply_rows(p, y, rows, p.Is, z_rows, 0, numbers + 1, n, share.j0, share.j1)
        if p.activation == SOFTMAX and p.grid.members == 1:
            softmax_rows(p, y, z_rows, 0, numbers + 1, 0, n)
        r += next


cdef inline void multiply(
    const DenseForward *p, Array x, Array y, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Compute one part of y: its rows, its panels."""
    cdef DenseShare share = dense_share(p, part)
    cdef Py_ssize_t r = share.r0, n, q, stride = p.x_layout.row
    cdef real *rows = scratch + part * p.part.size + p.start[X_ROWS]
    cdef real *z_rows = z_rows_of(p, scratch, part)
    cdef const real *a
    if p.step_mask is not NULL:
        multiply_active_rows(p, x, y, scratch, part)
        return
    while r < share.r1:
        n = min(p.chunk, share.r1 - r)
        if holds_half(x) or p.w.format == INT8:
            a, stride = rows, p.Is
            for q in range(n):
                load_input(p, rows + q * p.Is, x, r + q)
        else:
            if p.x_layout.step != p.B * p.x_layout.row:  # the rows of one step lie at equal distances
                n = min(n, p.B - r % p.B)
            a = <const real *> at(x, place_of(&p.x_layout, p.B, r)).data
        if p.grid.members == 1:
            multiply_rows(p, y, a, stride, z_rows, r, NULL, n, share.j0, share.j1)
            if p.activation == SOFTMAX:
                softmax_rows(p, y, z_rows, r, NULL, 0, n)
        else:
            multiply_rows(p, y, a, stride, z_rows + (r - share.r0) * p.Os, r, NULL, n, share.j0, share.j1)
        r += n


cdef inline void softmax_part(const DenseForward *p, Array y, real *scratch, Py_ssize_t part) noexcept nogil:
    """Compute y of one member's share of a group's rows, whose z all members have computed by columns."""
    cdef DenseShare share = dense_share(p, part)
    cdef const Py_ssize_t *numbers = numbers_of(p, scratch, part)
    cdef Py_ssize_t n = share.r1 - share.r0 if numbers is NULL else numbers[0], members = p.grid.members
    softmax_rows(p, y, z_rows_of(p, scratch, part), share.r0, numbers if numbers is NULL else numbers + 1,
                 part_start(n, share.member, members), part_start(n, share.member + 1, members))


cdef inline long long forward(const DenseForward *p, Array x, Array y, real *scratch) noexcept nogil:
    """Compute y; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part
    if parts_of(&p.grid) == 1:
        multiply(p, x, y, scratch, 0)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(p.grid.first, p.grid.end, schedule="static"):
            multiply(p, x, y, scratch, part)
        if p.activation == SOFTMAX and p.grid.members > 1:
            group_barrier(&team)
            for part in prange(p.grid.first, p.grid.end, schedule="static"):
                softmax_part(p, y, scratch, part)
        barrier(&team)  # as in forward.pxd
    return measured_cost(&team)


cdef inline long long run_forward(
    DenseForward *p, Array x, Array y, void *scratch, int ready
) noexcept nogil:
    """Run `forward` on no more threads than are ready."""
    cdef long long nanoseconds
    cdef Py_ssize_t itemsize = 64 // p.L, parts = parts_of(&p.grid)
    guard_zones(&p.workspace, scratch, itemsize, 1)
    guard_zones(&p.part, scratch, itemsize, parts)
    use_threads(&p.grid, ready)
    nanoseconds = forward(p, x, y, <real *> scratch)
    release_zones(&p.workspace, scratch, itemsize, 1)
    release_zones(&p.part, scratch, itemsize, parts)
    return nanoseconds


cdef inline long long run_layer_forward(
    const DenseForward *plan, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """Run the forward pass of the arrays `a` on at most `ready` threads; return the nanoseconds that several cost."""
    cdef DenseForward p = plan[0]
    p.x_layout, p.y_layout, p.w.base = a.x_layout, a.y_layout, a.packed
    if a.step_mask is not NULL:
        use_forward_step_mask(&p, a.step_mask)
    return run_forward(&p, array_of(a.x, p.is_half), array_of(a.y, p.is_half), scratch, ready)


cdef inline long long forward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the forward pass of a plan, a `DenseForward`."""
    cdef const DenseForward *p = <const DenseForward *> plan
    return run_layer_forward(p, ready, scratch, a)


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline void exchange_codes(const Panels *w, const Pass *a, bint back) noexcept nogil:
    """Pack `a.codes` and `a.scales` of a quantized layer to its panels, or copy them `back` from there."""
    cdef Array codes = array_of(a.codes[0], False), scales = array_of(a.scales[0], False)
    pack_quantized(w, &codes, &scales, back)


cdef inline long long pack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack a layer's weights to `packed`, in the panels of a plan, a `DenseForward`."""
    cdef const DenseForward *p = <const DenseForward *> plan
    cdef Panels w = p.w
    cdef Array weights = array_of(a.weights[0], p.is_half), bias = array_of(a.weights[1], p.is_half)
    w.base = packed
    pack_bias(&w, &bias, 0, w.count)
    if w.format == UNQUANTIZED:
        pack_panels(&w, <real *> packed, &weights, 0, w.count)
    else:
        exchange_codes(&w, a, False)
    return 0


cdef inline long long unpack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Copy the codes and scales of a quantized layer's weights back from `packed`."""
    cdef Panels w = (<const DenseForward *> plan).w
    w.base = packed
    exchange_codes(&w, a, True)
    return 0


# ------------------------------------------------------------------------------------------------------------ backward
cdef enum:  # the regions of the backward pass's workspace, the last of which is the parts, and those of a part
    TRANSPOSED  # packed panels of w.T
    W_GRAD  # float16's w_grad in float32
    D  # d_z [rows, O]
    SUMS  # of the columns of d_z, in double
    SLOTS  # the slots of batch rows (steps.pxd)
    BACKWARD_PARTS
    BACKWARD_REGIONS
    Y_ROW = 0  # a row of y
    X_TILES  # of a block of rows: x in tiles
    D_PANEL  # and a panel of d_z
    BACKWARD_PART_REGIONS

cdef struct DenseBackward:  # the plan of a backward pass
    Steps steps
    Py_ssize_t rows, B, I, O
    bint is_half  # all arrays of the call are float16
    Layout d_y_layout, d_x_layout
    Py_ssize_t L, Ns  # values in a line; stride in scratch of rows of d_z
    int activation
    Py_ssize_t x_panel_count, panel_size  # panels of w.T, and the reals of one
    Py_ssize_t d_panel_count  # panels of d_z
    Grid grid  # groups of one
    bint by_inputs  # parts divide the rows of w_grad, not its columns
    Py_ssize_t tile_stride  # reals from one tile of X_TILES to the next
    Py_ssize_t[BACKWARD_REGIONS] start  # of each region
    Py_ssize_t[BACKWARD_PART_REGIONS] part_start  # of each region of a part
    Workspace part, workspace  # of each part, and of all


cdef inline DenseBackward plan_backward(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int activation, Py_ssize_t threads
) noexcept nogil:
    """Plan a backward pass on at most so many threads."""
    cdef DenseBackward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef Region[BACKWARD_PART_REGIONS] part_regions
    cdef Py_ssize_t rows = T * B, block = min(rows, <Py_ssize_t> ROW_BLOCK), itemsize = sizeof(real)
    p.steps = steps_of(T, B)
    p.rows, p.B, p.I, p.O = rows, B, I, O
    p.d_y_layout, p.d_x_layout = contiguous_layout(B, O), contiguous_layout(B, I)
    p.L = 64 // itemsize
    p.Ns = scratch_stride(O, p.L)
    p.activation = activation
    p.x_panel_count, p.d_panel_count = count_panels((I + p.L - 1) // p.L), count_panels((O + p.L - 1) // p.L)
    p.panel_size = PANEL_LINES * p.L * O
    p.grid = choose_backward_grid(rows, I, O, itemsize, threads)
    p.by_inputs = count_tiles(I) >= p.d_panel_count
    p.tile_stride = scratch_stride(block * ROWS, p.L)
    part_regions[Y_ROW] = region("y", 1, p.Ns, 0)
    part_regions[X_TILES] = region("tiles of x", count_tiles(I), p.tile_stride, 0)
    part_regions[D_PANEL] = region("panel of d_z", 1, block * PANEL_LINES * p.L, 0)
    p.part = lay_out(part_regions, BACKWARD_PART_REGIONS, p.part_start)
    p.part.size += THREAD_GAP * p.L
    regions[TRANSPOSED] = region("w.T", p.x_panel_count, p.panel_size, 0)
    regions[W_GRAD] = region("w_grad", 1, scratch_stride(I * O, p.L), 0)
    regions[D] = region("d_z", rows, p.Ns, 0)
    regions[SUMS] = region("sums of d_z", 2, p.Ns, 0)
    regions[SLOTS] = region("slots", 1, size_of_slots(B, p.L), 0)
    regions[BACKWARD_PARTS] = region("parts", parts_of(&p.grid), p.part.size, 0)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


cdef inline void use_backward_step_mask(DenseBackward *p, const unsigned char *step_mask, void *scratch) noexcept nogil:
    """Let rows end where the mask says so; they get slots in `scratch`.

    step_mask : [T,B], the caller's, which has to live as long as the pass runs
    """
    set_step_mask(&p.steps, step_mask, <Slot *> (<char *> scratch + p.start[SLOTS] * (64 // p.L)), 1)


cdef inline void z_grads(
    const DenseBackward *p, Array y, Array y_grad, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Compute one part of the rows of d_z.

    y, y_grad : [T, B, O], the caller's
    """
    cdef Py_ssize_t lines = lines_in(scratch, p.O), r, t, row, j, unit
    cdef real *y_row = scratch + p.start[BACKWARD_PARTS] + part * p.part.size + p.part_start[Y_ROW]
    cdef real *d
    for r in range(part_start(p.rows, part, parts), part_start(p.rows, part + 1, parts)):
        t, row = r // p.B, r % p.B
        if not has_step(&p.steps, t, row):
            continue
        d = scratch + p.start[D] + (t * p.B + slot_of_row(&p.steps, row)) * p.Ns
        if is_finished(p.steps.step_mask, r):
            clear(d, p.Ns)
            continue
        load_row(d, at(y_grad, place_of(&p.d_y_layout, p.B, r)), p.O)
        if p.activation == NONE:
            continue
        load_row(y_row, at(y, r * p.O), p.O)
        if p.activation == SOFTMAX:
            softmax_grad(y_row, d, lines)
            continue
        for j in range(lines):
            unit = j * p.L
            activation_grad(y_row + unit, d + unit, p.activation)


cdef inline void pack_transposed_weights(
    const DenseBackward *p, Array w, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Pack one part of the panels of w.T, w : [I, O], the caller's."""
    cdef Py_ssize_t j
    for j in range(part_start(p.x_panel_count, part, parts), part_start(p.x_panel_count, part + 1, parts)):
        pack_transposed_panel(scratch + p.start[TRANSPOSED] + j * p.panel_size, w, p.O, p.I, j)


cdef inline void x_grads(
    const DenseBackward *p, Array x_grad, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Compute one part of the tiles of x_grad, d_z @ w.T."""
    compute_x_grad_part(x_grad, &p.d_x_layout, False, &p.steps, 1, p.I, scratch + p.start[D], p.Ns,
                        scratch + p.start[TRANSPOSED], p.O, scratch, 0, part, parts)


cdef inline void pack_x_tiles(
    const DenseBackward *p, real *tiles, Array x, Py_ssize_t i0, Py_ssize_t i1, const RowBlock *block
) noexcept nogil:
    """Pack the inputs i0 to i1 of a block's active rows of x to tiles; zeros for rows that are finished.

    x : [T, B, I], the caller's
    """
    cdef InputRow[PACK_ROWS] rows
    cdef RowRun run = runs_of(block, 0, 1)
    cdef Py_ssize_t q, r
    while next_run(&run, block):
        for q in range(run.count):
            r = block.t[run.first + q] * p.B + block.row[run.first + q]
            rows[q].values = no_array() if is_finished(p.steps.step_mask, r) else at(x, r * p.I + i0)
            rows[q].factor = no_array()
        pack_tiles(p.is_half, tiles + run.first * ROWS, p.tile_stride, rows, i1 - i0, run.count)


cdef inline void weight_grads(
    const DenseBackward *p, Array x, Array w_grad, Array b_grad, real *scratch, Py_ssize_t part,
    Py_ssize_t parts
) noexcept nogil:
    """Compute one part of the rows or of the columns of w_grad, and of the columns of b_grad: block after block of rows
    of x and d_z.  No part waits for another: what two of them need, both pack.

    x : [T, B, I]; w_grad : [I, O]; b_grad : [O]; all are the caller's
    """
    # i0, i1 and j0, j1: the part's rows, and its panels of columns, of w_grad; bias0, bias1: its panels of b_grad
    cdef Py_ssize_t L = p.L, O = p.O, i0 = 0, i1 = p.I, j0 = 0, j1 = p.d_panel_count, r0 = 0, i, j, l, lines, unit, end
    cdef Py_ssize_t bias0 = part_start(p.d_panel_count, part, parts)
    cdef Py_ssize_t bias1 = part_start(p.d_panel_count, part + 1, parts)
    cdef real *tiles = scratch + p.start[BACKWARD_PARTS] + part * p.part.size + p.part_start[X_TILES]
    cdef real *panel = scratch + p.start[BACKWARD_PARTS] + part * p.part.size + p.part_start[D_PANEL]
    cdef double *sums = <double *> (scratch + p.start[SUMS])
    cdef real *out
    cdef RowBlock block
    if p.by_inputs:
        i0 = min(p.I, part_start(count_tiles(p.I), part, parts) * ROWS)
        i1 = min(p.I, part_start(count_tiles(p.I), part + 1, parts) * ROWS)
    else:
        j0, j1 = bias0, bias1
    out = scratch + p.start[W_GRAD] if p.is_half else <real *> w_grad.data
    while r0 < p.rows:
        list_active_rows(&block, &p.steps, r0)
        pack_x_tiles(p, tiles, x, i0, i1, &block)
        for j in range(j0, j1):
            unit, lines = j * PANEL_LINES * L, panel_lines(lines_in(scratch, O), j)
            pack_columns(panel, lines, &block, scratch + p.start[D] + unit, p.Ns, O - unit)
            add_weight_grad_rows(out + i0 * O + unit, O, i1 - i0, tiles, p.tile_stride, panel, lines, O - unit, &block,
                                 r0 == 0)
            if bias0 <= j < bias1:
                if r0 == 0:
                    for l in range(unit, unit + lines * L):
                        sums[l] = 0
                add_column_sums(sums + unit, scratch + p.start[D] + unit, p.Ns, min(lines * L, O - unit), &block)
        r0 += block.rows
    for l in range(min(bias0 * PANEL_LINES * L, O), min(bias1 * PANEL_LINES * L, O)):
        store_value(at(b_grad, l), <real> sums[l])
    if p.is_half:
        unit, end = min(j0 * PANEL_LINES * L, O), min(j1 * PANEL_LINES * L, O)
        for i in range(i0, i1):
            store_row(at(w_grad, i * O + unit), out + i * O + unit, end - unit)


cdef inline long long backward(
    const DenseBackward *p, const Pass *a, Array x, real *scratch
) noexcept nogil:
    """Compute all gradients; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end
    cdef Array w = array_of(a.weights[0], p.is_half)
    cdef Array y = array_of(a.y, p.is_half)
    cdef Array y_grad = array_of(a.y_grad, p.is_half)
    cdef Array x_grad = array_of(a.x_grad, p.is_half)
    cdef Array w_grad = array_of(a.weight_grads[0], p.is_half)
    cdef Array b_grad = array_of(a.weight_grads[1], p.is_half)
    if parts == 1:
        z_grads(p, y, y_grad, scratch, 0, 1)
        pack_transposed_weights(p, w, scratch, 0, 1)
        x_grads(p, x_grad, scratch, 0, 1)
        weight_grads(p, x, w_grad, b_grad, scratch, 0, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, end_part, schedule="static"):
            z_grads(p, y, y_grad, scratch, part, parts)
        for part in prange(first, end_part, schedule="static"):
            pack_transposed_weights(p, w, scratch, part, parts)
        barrier(&team)
        for part in prange(first, end_part, schedule="static"):
            x_grads(p, x_grad, scratch, part, parts)
        for part in prange(first, end_part, schedule="static"):
            weight_grads(p, x, w_grad, b_grad, scratch, part, parts)
        barrier(&team)  # as in forward.pxd
    return measured_cost(&team)


cdef inline long long run_backward(
    DenseBackward *p, const Pass *a, Array x, void *scratch, int ready
) noexcept nogil:
    """Run `backward` on no more threads than are ready."""
    cdef long long nanoseconds
    cdef Py_ssize_t itemsize = 64 // p.L, parts = parts_of(&p.grid)
    guard_zones(&p.workspace, scratch, itemsize, 1)
    guard_zones(&p.part, <char *> scratch + p.start[BACKWARD_PARTS] * itemsize, itemsize, parts)
    use_threads(&p.grid, ready)
    nanoseconds = backward(p, a, x, <real *> scratch)
    release_zones(&p.workspace, scratch, itemsize, 1)
    release_zones(&p.part, <char *> scratch + p.start[BACKWARD_PARTS] * itemsize, itemsize, parts)
    return nanoseconds


cdef inline long long run_layer_backward(
    const DenseBackward *plan, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """Run the backward pass of the arrays `a` on at most `ready` threads; return the nanoseconds that several cost."""
    cdef DenseBackward p = plan[0]
    p.d_y_layout, p.d_x_layout = a.y_grad_layout, a.x_grad_layout
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_backward_step_mask(&p, a.step_mask, scratch)
    return run_backward(&p, a, array_of(a.x, p.is_half), scratch, ready)


cdef inline long long backward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the backward pass of a plan, a `DenseBackward`."""
    cdef const DenseBackward *p = <const DenseBackward *> plan
    return run_layer_backward(p, ready, scratch, a)


cdef inline tuple plan_dense(bint is_half, int activation, task, tuple sizes, int threads, int format):
    """Plan a kernel, as `plan_layer` in layer.pxd does for layers of cells.

    is_half : whether all arrays of a call are float16
    activation : a number of `ACTIVATIONS` in blockcell/optable.py
    sizes : (T, B, I, O)
    """
    cdef DenseForward p
    cdef DenseBackward back
    cdef Py_ssize_t T, B, I, O
    T, B, I, O = sizes
    if task == "backward":
        back = plan_backward(T, B, I, O, activation, threads)
        back.is_half = is_half
        requirements = requirements_of(&back.workspace, back.L, &back.grid)
        return kernel_with_plan(backward_layer, &back, sizeof(DenseBackward), requirements)
    p = plan_forward(T, B, I, O, format, activation, threads)
    p.is_half = is_half
    if task == "forward":
        requirements = requirements_of(&p.workspace, p.L, &p.grid)
        return kernel_with_plan(forward_layer, &p, sizeof(DenseForward), requirements)
    assert task in ("pack", "unpack"), task
    requirements = p.w.count * p.w.size * (64 // p.L) + 64 + READ_PAST * (format == INT8), 1, 1
    return kernel_with_plan(pack_layer if task == "pack" else unpack_layer, &p, sizeof(DenseForward), requirements)
