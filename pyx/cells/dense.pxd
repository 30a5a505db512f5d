"""The dense layer: its equations, its gradient, and both passes, `forward` and `backward`, with their phases.

Each row (t, row) of x gives a row of y = activation(z), z = x @ w + b.  With d_z the gradient to z,

    none      y = z                                              d_z = d_y
    sigmoid   y = sigmoid(z)                                     d_z = d_y * y * (1 - y)
    tanh      y = tanh(z)                                        d_z = d_y * (1 - y^2)
    relu      y = max(z, 0)                                      d_z = d_y where y > 0, else 0, also at NaN
    softmax   y = e / (sum of e), e = exp(z - (largest z))       d_z = y * (d_y - (sum of d_y * y))

and d_x = d_z @ w.T, d_w = x.T @ d_z, d_b = the sum of d_z over all rows.

`activate`, `softmax`, `activation_grad` and `softmax_grad` are these equations, for a line or for a whole row.  The two
sums of a softmax are in double: a chain for each lane of a line, and the lanes in ascending order.  A finished row
gives zeros, and no gradient.

    T, B, I, O   steps, batch rows, inputs, outputs
    row          a batch row
    r            the number of a row (t, row), r = t * B + row
    q            a row of a chunk
    j, u, l      a panel of w, a line of units in it, a lane of a line
    unit         the first unit of a line
    p            the pass: its plan, and what a call sets
    part, parts  the index of a part, and how many there are; `share` has the rows and panels of one
    numbers      the numbers r of the rows of a chunk, which are not finished
"""
from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY
from libc.string cimport memset

from cells.activations cimport scaled_exp, sigmoid, tanh
from passes.arrays cimport Pass
from passes.gradients cimport (
    PANEL_LINES, InputRow, RowBlock, RowRun, XGrad, add_column_sums, add_weight_grad_rows, compute_x_grad_part,
    count_panels, count_tiles, list_active_rows, next_run, pack_columns, pack_tiles, pack_transposed_panel, panel_lines,
    runs_of, tile_stride_of
)
from passes.indices cimport BIAS, H_GRAD, OUT_H, W, X
from passes.layer cimport planned_kernel
from passes.steps cimport (
    FINISHED, Layout, Steps, has_step, offset_of, set_step_mask, size_of_slots, slot_of_row, steps_of
)
from product.integer cimport quantized_row_stride
from product.lines cimport (
    LF, Array, L, array_of, at, clear, holds_half, itemsize_of, lines_in, load_row, no_array, noinline_void, store_line,
    store_row, store_value
)
from product.panels cimport (
    THREAD_GAP, Panels, add_product, add_row_product, copy_bias, load_product_row, pack_bias, pack_panels,
    pack_quantized, panels_of, row_panels, scratch_stride, size_read_past, unit_lines_in_panel
)
from product.quantized cimport INT8, UNQUANTIZED, bytes_per_weight
from product.real cimport real
from product.tile cimport GROUP_TILES, LINES, PACK_ROWS, ROW_BLOCK, ROWS, TILE_SIZE, tile_group_height
from schedule.cost cimport (
    Grid, Work, ceil_div, choose_grid, parts_of, speed_of, threads_of, use_threads, work_of
)
from schedule.machine cimport fewest_prefetching_rows
from schedule.team cimport Team, barrier, group_barrier, join_team, measured_cost, part_start, start_team
from schedule.workspace cimport Region, Workspace, guard_zones, lay_out, region, release_zones

cdef enum:  # as in blockcell/optable.py
    DENSE_NONE, DENSE_SIGMOID, DENSE_TANH, DENSE_RELU, DENSE_SOFTMAX

cdef enum:
    CHUNK = 96  # rows that stay in cache while they are multiplied with one panel of w after the other


# --------------------------------------------------------------------------------------- the equations, for one line
cdef inline noinline_void activate(real *restrict z, int activation) noexcept nogil:
    """Turn a line of z into y, for any activation but softmax."""
    cdef Py_ssize_t l
    if activation == DENSE_SIGMOID:
        for l in range(L):
            z[l] = sigmoid(z[l])
    elif activation == DENSE_TANH:
        for l in range(L):
            z[l] = tanh(z[l])
    elif activation == DENSE_RELU:
        for l in range(L):
            z[l] = 0 if z[l] < 0 else z[l]  # NaN stays


cdef inline noinline_void activation_grad(const real *restrict y, real *restrict d, int activation) noexcept nogil:
    """Turn a line of d_y into d_z, for any activation but softmax."""
    cdef Py_ssize_t l
    cdef real one = 1  # a literal 1 would make all of it double
    if activation == DENSE_SIGMOID:
        for l in range(L):
            d[l] = d[l] * y[l] * (one - y[l])
    elif activation == DENSE_TANH:
        for l in range(L):
            d[l] = d[l] * (one - y[l] * y[l])
    elif activation == DENSE_RELU:
        for l in range(L):
            d[l] = d[l] if y[l] > 0 else 0  # 0 where y is NaN


# ---------------------------------------------------------------------------------------------- and for a whole row
cdef inline double sum_of_lanes(const double *lanes) noexcept nogil:
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
    cdef Py_ssize_t lines = lines_in(n), j, l
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
    total = <real> sum_of_lanes(sums)
    for j in range(lines):
        for l in range(L):
            z[j * L + l] = z[j * L + l] / total


cdef inline noinline_void softmax_grad(const real *restrict y, real *restrict d, Py_ssize_t lines) noexcept nogil:
    """Turn a row of d_y into d_z.

    y, d : so many lines; both are zero beyond the row's values
    """
    cdef Py_ssize_t j, l
    cdef double[LF] sums
    cdef real total
    for l in range(L):
        sums[l] = 0
    for j in range(lines):
        for l in range(L):
            sums[l] = sums[l] + <double> d[j * L + l] * <double> y[j * L + l]
    total = <real> sum_of_lanes(sums)
    for j in range(lines):
        for l in range(L):
            d[j * L + l] = y[j * L + l] * (d[j * L + l] - total)


# --------------------------------------------------------------------------------------------------------------- grids
cdef inline Grid choose_forward_grid(
    Py_ssize_t rows, Py_ssize_t I, Py_ssize_t O, int format, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a forward pass: groups share the rows of y, members the columns."""
    cdef Work work = work_of(1, rows, 1)
    work.lines[0] = work.units = lines_in(O)
    work.width[0], work.panels[0], work.panels[1] = LINES, ceil_div(work.lines[0], LINES), 0
    work.K[0], work.x_size[0] = I, 0
    work.line_bytes = L * bytes_per_weight(format)
    work.speed, work.cell = speed_of(format), 10
    return choose_grid(&work, threads, False, False)


cdef inline Grid choose_backward_grid(
    Py_ssize_t rows, Py_ssize_t I, Py_ssize_t O, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a backward pass: groups of one, as many as each phase is divided into."""
    cdef Work work = work_of(1, rows, 0)
    work.panels[0] = work.panels[1] = 1
    work.speed, work.cell, work.units = speed_of(UNQUANTIZED), 20, lines_in(O)
    work.divisible_time = work.column_time = 2.0 * rows * I * O / work.speed
    work.column_lines, work.barriers = max(count_tiles(I), count_panels(work.units)), 2
    work.lines_read_in_part, work.lines_read_by_all = rows * work.units, rows * lines_in(I)
    return choose_grid(&work, threads, False, True)


# ------------------------------------------------------------------------------------------------------------- forward
cdef enum:  # the regions of a part's workspace in the forward pass; the parts lie one behind the other
    X_ROWS  # a chunk of rows of x: float16 as float32, or quantized
    Z  # a chunk of rows of z, for softmax
    ROW_NUMBERS  # how many rows of a chunk are not finished, and `numbers`; as Py_ssize_t
    PART_REGIONS

cdef struct DenseForward:  # a forward pass
    Array x, y  # [T, B, I], [T, B, O], the caller's
    Layout x_layout, y_layout
    const unsigned char *step_mask  # [T, B], the caller's; NULL if no row is finished
    real *scratch  # the workspace, which begins at a cache line
    Py_ssize_t rows, B, I, O  # rows: T * B
    bint is_half  # all arrays of the call are float16
    Py_ssize_t Is, Os  # strides in scratch of rows of x and of z
    int activation
    Grid grid
    Py_ssize_t chunk  # rows that a part computes at once
    Panels w
    Py_ssize_t[PART_REGIONS] start  # of each region of a part
    Workspace part


cdef inline DenseForward plan_forward(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int format, int activation, Py_ssize_t threads
) noexcept nogil:
    """Plan a forward pass on at most so many threads.

    format : how packed weights are quantized, as in Panels
    """
    cdef DenseForward p
    cdef Region[PART_REGIONS] regions
    cdef Py_ssize_t rows = T * B
    p.rows, p.B, p.I, p.O, p.activation = rows, B, I, O, activation
    p.Is, p.Os = quantized_row_stride(I) if format == INT8 else scratch_stride(I), scratch_stride(O)
    p.w = panels_of(True, I, 0, O, 1, format)
    p.grid = choose_forward_grid(rows, I, O, format, threads)
    p.w.prefetching_rows = fewest_prefetching_rows(I * O * bytes_per_weight(format), p.grid.members)
    p.chunk = ceil_div(rows, p.grid.groups)
    if p.grid.members == 1:
        p.chunk = min(p.chunk, <Py_ssize_t> CHUNK)
    regions[X_ROWS] = region("x", p.chunk, p.Is, 0)
    regions[Z] = region("z", p.chunk, p.Os, 0)
    regions[ROW_NUMBERS] = region("row numbers", 1, ceil_div((1 + p.chunk) * sizeof(Py_ssize_t), 64) * L, 0)
    p.part = lay_out(regions, PART_REGIONS, p.start)
    p.part.size += THREAD_GAP * L
    return p


cdef inline Py_ssize_t place_of(const Layout *a, Py_ssize_t B, Py_ssize_t r) noexcept nogil:
    """Return where row r of an array begins, in elements."""
    return r * a.row if a.step == B * a.row else offset_of(a, r // B, r % B)


cdef inline bint is_finished(const unsigned char *step_mask, Py_ssize_t r) noexcept nogil:
    """Return whether row r is finished; without a mask (NULL) none is."""
    return step_mask is not NULL and (step_mask[r] & FINISHED) != 0


cdef inline void activate_panel(
    const DenseForward *p, const real *z, real *z_rows, Py_ssize_t j, const Py_ssize_t *numbers, Py_ssize_t rows
) noexcept nogil:
    """Compute y from z in panel j, for some rows; copy z to z_rows for a softmax, which needs whole rows.

    z : [rows, LINES] lines, the tile
    z_rows : the rows, a stride of `Os` apart
    """
    cdef Py_ssize_t q, u, l, unit
    cdef real[LF] line
    for q in range(rows):
        for u in range(unit_lines_in_panel(&p.w, j)):
            unit = (j * p.w.unit_lines + u) * L
            for l in range(L):
                line[l] = z[(q * LINES + u) * L + l]
            if p.activation == DENSE_SOFTMAX:
                for l in range(L):
                    z_rows[q * p.Os + unit + l] = line[l]
                continue
            if p.activation != DENSE_NONE:
                activate(line, p.activation)
            store_line(at(p.y, place_of(&p.y_layout, p.B, numbers[q]) + unit), line, p.O - unit)


cdef inline void softmax_rows(
    const DenseForward *p, real *z_rows, const Py_ssize_t *numbers, Py_ssize_t rows
) noexcept nogil:
    """Compute y of some rows from their z.

    z_rows : the rows, a stride of `Os` apart; overwritten with y
    """
    cdef Py_ssize_t q
    for q in range(rows):
        softmax(z_rows + q * p.Os, p.O)
        store_row(at(p.y, place_of(&p.y_layout, p.B, numbers[q])), z_rows + q * p.Os, p.O)


cdef inline void multiply_rows(
    const DenseForward *p, const real *x, Py_ssize_t stride, real *z_rows, const Py_ssize_t *numbers, Py_ssize_t rows,
    Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Multiply some rows with the panels j0 to j1, and compute y.

    x : [rows, I] as the product reads it, `stride` reals apart
    z_rows : as for `activate_panel`
    """
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t panel = LINES * L, j = j0, q, m, i
    while j < j1:
        if rows == 1:
            m = row_panels(&p.w, j, j1)
            for i in range(m):
                copy_bias(&p.w, j + i, 1, acc + i * panel)
            add_row_product(&p.w, j, m, 0, p.I, x, acc, panel)
            for i in range(m):
                activate_panel(p, acc + i * panel, z_rows, j + i, numbers, 1)
            j += m
            continue
        q = 0
        while q < rows:
            m = tile_group_height(rows - q)
            copy_bias(&p.w, j, m, acc)
            add_product(&p.w, j, 0, p.I, x + q * stride, stride, m, acc)
            activate_panel(p, acc, z_rows + q * p.Os, j, numbers + q, m)
            q += m
        j += 1


cdef struct DenseShare:  # of a forward pass
    Py_ssize_t r0, r1  # its rows
    Py_ssize_t j0, j1  # its panels
    Py_ssize_t member  # the part's index in its group
    real *rows  # a chunk of rows of x, as the product reads them
    real *z_rows  # a chunk of rows of z, which a group has in the scratch of its first member
    Py_ssize_t *numbers  # how many rows a chunk has, and their numbers


cdef inline DenseShare dense_share(const DenseForward *p, Py_ssize_t part) noexcept nogil:
    """Return the rows, panels and scratch of a part."""
    cdef DenseShare share
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = part // members
    cdef real *scratch = p.scratch + part * p.part.size
    share.member = part % members
    share.r0, share.r1 = part_start(p.rows, group, groups), part_start(p.rows, group + 1, groups)
    share.j0, share.j1 = part_start(p.w.count, share.member, members), part_start(p.w.count, share.member + 1, members)
    share.rows, share.numbers = scratch + p.start[X_ROWS], <Py_ssize_t *> (scratch + p.start[ROW_NUMBERS])
    share.z_rows = scratch - share.member * p.part.size + p.start[Z]
    return share


cdef inline void compute_y(const DenseForward *p, Py_ssize_t part) noexcept nogil:
    """Compute one part of y: its rows, its panels.

    Rows of x are gathered if some are finished, or if the product does not read them as they are.
    """
    cdef DenseShare share = dense_share(p, part)
    cdef bint by_chunks = p.grid.members == 1, gathers = p.step_mask is not NULL or holds_half(p.x)
    cdef Py_ssize_t r = share.r0, most = p.chunk, step = p.chunk, count = 0, end, q, n
    cdef const real *x
    gathers = gathers or p.w.format == INT8
    if p.step_mask is not NULL and by_chunks:  # by turns, since rows end late
        most = min(p.chunk, max(p.rows // (4 * p.grid.groups), <Py_ssize_t> GROUP_TILES * ROWS))
        r, step, share.r1 = part * most, p.grid.groups * most, p.rows
    while r < share.r1:
        end = min(r + most, share.r1)
        if not gathers and p.x_layout.step != p.B * p.x_layout.row:  # the rows of one step lie at equal distances
            end = min(end, (r // p.B + 1) * p.B)
        if p.step_mask is NULL:
            step = end - r
        if by_chunks:
            count = 0
        n = 0
        for q in range(r, end):
            if is_finished(p.step_mask, q):
                if share.member == 0:
                    memset(at(p.y, place_of(&p.y_layout, p.B, q)).data, 0, p.O * itemsize_of(p.y))
                continue
            if gathers:
                load_product_row(share.rows + n * p.Is, at(p.x, place_of(&p.x_layout, p.B, q)), p.I, p.w.format)
            share.numbers[1 + count + n] = q
            n += 1
        x = share.rows if gathers else <const real *> at(p.x, place_of(&p.x_layout, p.B, r)).data
        if n > 0:
            multiply_rows(p, x, p.Is if gathers else p.x_layout.row, share.z_rows + count * p.Os,
                          share.numbers + 1 + count, n, share.j0, share.j1)
        if p.activation == DENSE_SOFTMAX and by_chunks:
            softmax_rows(p, share.z_rows, share.numbers + 1, n)
        count += n
        r += step
    share.numbers[0] = count


cdef inline void softmax_part(const DenseForward *p, Py_ssize_t part) noexcept nogil:
    """Compute y of one member's share of a group's rows, whose z all members have computed by columns."""
    cdef DenseShare share = dense_share(p, part)
    cdef Py_ssize_t first = part_start(share.numbers[0], share.member, p.grid.members)
    cdef Py_ssize_t end = part_start(share.numbers[0], share.member + 1, p.grid.members)
    softmax_rows(p, share.z_rows + first * p.Os, share.numbers + 1 + first, end - first)


cdef inline long long forward(const DenseForward *p) noexcept nogil:
    """Compute y; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part
    if parts_of(&p.grid) == 1:
        compute_y(p, 0)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        join_team(&team)
        for part in prange(p.grid.first, p.grid.end, schedule="static"):
            compute_y(p, part)
        if p.activation == DENSE_SOFTMAX and p.grid.members > 1:
            group_barrier(&team)
            for part in prange(p.grid.first, p.grid.end, schedule="static"):
                softmax_part(p, part)
        barrier(&team)  # as in forward.pxd
    return measured_cost(&team)


cdef inline long long forward_pass(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the forward pass of a plan, a `DenseForward`; return the nanoseconds that having several threads cost."""
    cdef DenseForward p = (<const DenseForward *> plan)[0]
    cdef Py_ssize_t r = 0, parts = parts_of(&p.grid)
    cdef long long nanoseconds
    p.x, p.x_layout = array_of(a.inputs[X], p.is_half), a.x_layout
    p.y, p.y_layout = array_of(a.outputs[OUT_H], p.is_half), a.y_layout
    p.scratch, p.w.base, p.step_mask = <real *> scratch, a.packed, a.step_mask
    if a.step_mask is not NULL:
        while r < p.rows and not is_finished(a.step_mask, r):
            r += 1
        if r == p.rows:
            p.step_mask = NULL
    guard_zones(&p.part, scratch, parts)
    use_threads(&p.grid, ready)
    nanoseconds = forward(&p)
    release_zones(&p.part, scratch, parts)
    return nanoseconds


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline long long pack_weights(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack a layer's weights to `packed`, or with `a.unpacks` copy quantized ones back, by a plan, a `DenseForward`."""
    cdef const DenseForward *p = <const DenseForward *> plan
    cdef Panels w = p.w
    cdef Array weights = array_of(a.inputs[W], p.is_half), bias = array_of(a.inputs[BIAS], p.is_half)
    cdef Array codes = array_of(a.codes[0], False), scales = array_of(a.scales[0], False)
    w.base = packed
    if not a.unpacks:
        pack_bias(&w, &bias, 0, w.count)
    if w.format == UNQUANTIZED:
        pack_panels(&w, &weights, 0, w.count)
    else:
        pack_quantized(&w, &codes, &scales, a.unpacks)
    return 0


# ------------------------------------------------------------------------------------------------------------ backward
cdef enum:  # the regions of the backward pass's workspace, behind which its parts lie, and those of a part
    TRANSPOSED  # packed panels of w.T
    W_GRAD  # float16's w_grad in float32
    D  # d_z [rows, O]
    SUMS  # of the columns of d_z, in double
    SLOTS  # the slots of batch rows (steps.pxd)
    BACKWARD_REGIONS
    Y_ROW = 0  # a row of y
    X_TILES  # of a block of rows: x in tiles
    D_PANEL  # and a panel of d_z
    BACKWARD_PART_REGIONS

cdef struct DenseBackward:  # a backward pass
    const Pass *a  # the arrays of the call
    real *scratch  # the workspace, which begins at a cache line
    Steps steps
    Py_ssize_t rows, B, I, O
    bint is_half  # all arrays of the call are float16
    Py_ssize_t Ns  # stride in scratch of rows of d_z
    int activation
    Py_ssize_t x_panel_count, panel_size  # panels of w.T, and the reals of one
    Py_ssize_t d_panel_count  # panels of d_z
    Grid grid  # groups of one
    bint by_inputs  # parts divide the inputs of w_grad, not its columns
    Py_ssize_t[BACKWARD_REGIONS] start  # of each region
    Py_ssize_t[BACKWARD_PART_REGIONS] part_start  # of each region of a part
    Workspace shared, part  # of all parts together, and of each part


cdef inline DenseBackward plan_backward(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t O, int activation, Py_ssize_t threads
) noexcept nogil:
    """Plan a backward pass on at most so many threads."""
    cdef DenseBackward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef Region[BACKWARD_PART_REGIONS] part_regions
    cdef Py_ssize_t rows = T * B, block = min(rows, <Py_ssize_t> ROW_BLOCK)
    p.steps = steps_of(T, B)
    p.rows, p.B, p.I, p.O, p.activation = rows, B, I, O, activation
    p.Ns = scratch_stride(O)
    p.x_panel_count, p.d_panel_count = count_panels(lines_in(I)), count_panels(lines_in(O))
    p.panel_size = PANEL_LINES * L * O
    p.grid = choose_backward_grid(rows, I, O, threads)
    p.by_inputs = count_tiles(I) >= p.d_panel_count
    part_regions[Y_ROW] = region("y", 1, p.Ns, 0)
    part_regions[X_TILES] = region("tiles of x", count_tiles(I), tile_stride_of(&p.steps), 0)
    part_regions[D_PANEL] = region("panel of d_z", 1, block * PANEL_LINES * L, 0)
    p.part = lay_out(part_regions, BACKWARD_PART_REGIONS, p.part_start)
    p.part.size += THREAD_GAP * L
    regions[TRANSPOSED] = region("w.T", p.x_panel_count, p.panel_size, 0)
    regions[W_GRAD] = region("w_grad", 1, scratch_stride(I * O), 0)
    regions[D] = region("d_z", rows, p.Ns, 0)
    regions[SUMS] = region("sums of d_z", 2, p.Ns, 0)
    regions[SLOTS] = region("slots", 1, size_of_slots(B), 0)
    p.shared = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


cdef inline real *part_scratch(const DenseBackward *p, Py_ssize_t part, int n) noexcept nogil:
    """Return where a part has its own region number n."""
    return p.scratch + p.shared.size + part * p.part.size + p.part_start[n]


cdef inline void z_grads(const DenseBackward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Compute one part of the rows of d_z."""
    cdef Array y = array_of(p.a.inputs[OUT_H], p.is_half)
    cdef Array y_grad = array_of(p.a.inputs[H_GRAD], p.is_half)
    cdef Py_ssize_t lines = lines_in(p.O), r, t, row, j
    cdef real *y_row = part_scratch(p, part, Y_ROW)
    cdef real *d
    for r in range(part_start(p.rows, part, parts), part_start(p.rows, part + 1, parts)):
        t, row = r // p.B, r % p.B
        if not has_step(&p.steps, t, row):
            continue
        d = p.scratch + p.start[D] + (t * p.B + slot_of_row(&p.steps, row)) * p.Ns
        load_row(d, at(y_grad, place_of(&p.a.y_grad_layout, p.B, r)), p.O)
        if p.activation == DENSE_NONE:
            continue
        load_row(y_row, at(y, r * p.O), p.O)
        if p.activation == DENSE_SOFTMAX:
            softmax_grad(y_row, d, lines)
            continue
        for j in range(lines):
            activation_grad(y_row + j * L, d + j * L, p.activation)


cdef inline void pack_transposed_weights(const DenseBackward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Pack one part of the panels of w.T, w : [I, O]."""
    cdef Array w = array_of(p.a.inputs[W], p.is_half)
    cdef Py_ssize_t j
    for j in range(part_start(p.x_panel_count, part, parts), part_start(p.x_panel_count, part + 1, parts)):
        pack_transposed_panel(p.scratch + p.start[TRANSPOSED] + j * p.panel_size, w, p.O, p.I, j)


cdef inline void x_grads(const DenseBackward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Compute one part of the tiles of x_grad, d_z @ w.T."""
    cdef XGrad x
    cdef const real *panels = p.scratch + p.start[TRANSPOSED]
    x.steps, x.x_grad, x.layout, x.accumulate = &p.steps, array_of(p.a.grads[X], p.is_half), p.a.x_grad_layout, False
    x.I, x.d, x.ldd, x.K, x.K2 = p.I, p.scratch + p.start[D], p.Ns, p.O, 0
    compute_x_grad_part(&x, panels, panels, 1, part, parts)


cdef inline void pack_x_tiles(
    const DenseBackward *p, real *tiles, Py_ssize_t i0, Py_ssize_t i1, const RowBlock *block
) noexcept nogil:
    """Pack the inputs i0 to i1 of a block's active rows of x to tiles."""
    cdef Array x = array_of(p.a.inputs[X], p.is_half)
    cdef InputRow[PACK_ROWS] rows
    cdef RowRun run = runs_of(block, 0, 1)
    cdef Py_ssize_t q, r
    while next_run(&run, block):
        for q in range(run.count):
            r = block.t[run.first + q] * p.B + block.row[run.first + q]
            rows[q].values = at(x, r * p.I + i0)
            rows[q].factor = no_array()
        pack_tiles(p.is_half, tiles + run.first * ROWS, block.tile_stride, rows, i1 - i0, run.count)


cdef inline void weight_grads(const DenseBackward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Compute one part of the inputs or of the columns of w_grad [I, O], and of the columns of b_grad [O]: block after
    block of rows of x and d_z.  No part waits for another: what two of them need, both pack.
    """
    # i0, i1 and j0, j1: the part's inputs, and its panels of columns, of w_grad; bias0, bias1: its panels of b_grad
    cdef Py_ssize_t O = p.O, i0 = 0, i1 = p.I, j0 = 0, j1 = p.d_panel_count, r0 = 0, i, j, l, lines, unit, end
    cdef Py_ssize_t bias0 = part_start(p.d_panel_count, part, parts)
    cdef Py_ssize_t bias1 = part_start(p.d_panel_count, part + 1, parts)
    cdef Array w_grad = array_of(p.a.grads[W], p.is_half)
    cdef Array b_grad = array_of(p.a.grads[BIAS], p.is_half)
    cdef real *tiles = part_scratch(p, part, X_TILES)
    cdef real *panel = part_scratch(p, part, D_PANEL)
    cdef real *d = p.scratch + p.start[D]
    cdef double *sums = <double *> (p.scratch + p.start[SUMS])
    cdef real *out = p.scratch + p.start[W_GRAD] if p.is_half else <real *> w_grad.data
    cdef RowBlock block
    if p.by_inputs:
        i0 = min(p.I, part_start(count_tiles(p.I), part, parts) * ROWS)
        i1 = min(p.I, part_start(count_tiles(p.I), part + 1, parts) * ROWS)
    else:
        j0, j1 = bias0, bias1
    while r0 < p.rows:
        list_active_rows(&block, &p.steps, r0)
        pack_x_tiles(p, tiles, i0, i1, &block)
        for j in range(j0, j1):
            unit, lines = j * PANEL_LINES * L, panel_lines(lines_in(O), j)
            pack_columns(panel, lines, &block, d + unit, p.Ns, O - unit)
            add_weight_grad_rows(out + i0 * O + unit, O, i1 - i0, tiles, panel, lines, O - unit, &block)
            if bias0 <= j < bias1:
                if block.is_first:
                    clear(sums + unit, lines * L)
                add_column_sums(sums + unit, d + unit, p.Ns, min(lines * L, O - unit), &block)
        r0 += block.rows
    for l in range(min(bias0 * PANEL_LINES * L, O), min(bias1 * PANEL_LINES * L, O)):
        store_value(at(b_grad, l), <real> sums[l])
    if p.is_half:
        unit, end = min(j0 * PANEL_LINES * L, O), min(j1 * PANEL_LINES * L, O)
        for i in range(i0, i1):
            store_row(at(w_grad, i * O + unit), out + i * O + unit, end - unit)


cdef inline long long backward(const DenseBackward *p) noexcept nogil:
    """Compute all gradients; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end
    if parts == 1:
        z_grads(p, 0, 1)
        pack_transposed_weights(p, 0, 1)
        x_grads(p, 0, 1)
        weight_grads(p, 0, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        join_team(&team)
        for part in prange(first, end_part, schedule="static"):
            z_grads(p, part, parts)
        for part in prange(first, end_part, schedule="static"):
            pack_transposed_weights(p, part, parts)
        barrier(&team)
        for part in prange(first, end_part, schedule="static"):
            x_grads(p, part, parts)
        for part in prange(first, end_part, schedule="static"):
            weight_grads(p, part, parts)
        barrier(&team)  # as in forward.pxd
    return measured_cost(&team)


cdef inline long long backward_pass(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the backward pass of a plan, a `DenseBackward`; return the nanoseconds that having several threads cost."""
    cdef DenseBackward p = (<const DenseBackward *> plan)[0]
    cdef Py_ssize_t parts = parts_of(&p.grid)
    cdef long long nanoseconds
    p.a, p.scratch = a, <real *> scratch
    guard_zones(&p.shared, scratch, 1)
    guard_zones(&p.part, p.scratch + p.shared.size, parts)
    if a.step_mask is not NULL:
        set_step_mask(&p.steps, a.step_mask, p.scratch + p.start[SLOTS], 1)
    use_threads(&p.grid, ready)
    nanoseconds = backward(&p)
    release_zones(&p.shared, scratch, 1)
    release_zones(&p.part, p.scratch + p.shared.size, parts)
    return nanoseconds


cdef inline tuple plan_dense(bint is_half, int activation, task, tuple sizes, int threads, int format):
    """Plan a kernel, as `plan_kernel` in layer.pxd does for cells.

    is_half : whether all arrays of a call are float16
    activation : a number of `ACTIVATIONS` in blockcell/optable.py
    sizes : (T, B, I, O)
    """
    cdef DenseForward p
    cdef DenseBackward back
    cdef Py_ssize_t T, B, I, O, size
    T, B, I, O = sizes
    if task == "backward":
        back = plan_backward(T, B, I, O, activation, threads)
        back.is_half = is_half
        size = back.shared.size + parts_of(&back.grid) * back.part.size
        return planned_kernel(backward_pass, &back, sizeof(DenseBackward), size, &back.grid)
    p = plan_forward(T, B, I, O, format, activation, threads)
    p.is_half = is_half
    if task == "forward":
        return planned_kernel(forward_pass, &p, sizeof(DenseForward), parts_of(&p.grid) * p.part.size, &p.grid)
    assert task == "pack", task
    size = p.w.count * p.w.size + size_read_past(format)
    return planned_kernel(pack_weights, &p, sizeof(DenseForward), size, &p.grid)
