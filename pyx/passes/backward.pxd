"""The backward pass of all cells, backpropagation through time: `backward` is the list of its phases, and of the
barriers between them.

    load incoming gradients, pack w.T
    for each step, the last one first:
        the gradient of h, and from it d; of a projected LSTM, only d_h
        if the cell has a second product: that of w.T, and from it the rest of d
    h_prev_grad, x_grad  ->  gradients of weights and biases

The functions above `backward` are what a thread does in a phase: one part.

In scratch d has a row for every step and slot, with the gradients of the pre-activations side by side: dicfo of an
LSTM, and d_h if that is projected; d_r_bar, d_u_bar, d_c_bar of a GRU, and d_hc if it resets after the product; d_h_bar
of a plain RNN.  `backward_lines` in each cell's file computes them from the gradient of h after the step, the sum of

    1. d @ w.T of step k + 1
    2. D_H: what step k + 1 adds beside its product, such as d_h * u of a GRU; the gradient of the last state at first
    3. the row of y_grad, which `backward_lines` adds

p : the pass: the cell, sizes, strides, the caller's arrays, and where each region of scratch starts (plan.pxd)
part, parts : the index of a part, and how many there are; `share` has the slots and panels of one
n : a matrix of weights w = [w_x; w_h], 0 or 1, with p.N[n] columns; w_x has p.x_size[n] inputs, w_h p.h_size[n]
k, t : the number of a step in the order in which the forward pass processes them (here k + 1 comes before k); the step
b, end, b0, b1 : a slot of a batch row (steps.pxd), where a range of them ends, a range of slots
row : a batch row, as the caller numbers it
j, j0, j1 : a packed panel of w.T, a range of panels; its PANEL_LINES lines are lines of h, m or x
unit : the first of a line's hidden units, or of its numbers of h
acc : sums of a few rows with a panel: LINES lines for each row
r0 : the first row of a block of ROW_BLOCK rows (gradients.pxd)
run : some active rows of that block, side by side (`RowRun`)
L, g, l, q : reals in a cache line, a line of a panel, a real of a line, a row
"""
from cython.parallel cimport parallel, prange

from passes.arrays cimport Pass, set_reset_states
from passes.gradients cimport (
    PANEL_LINES, InputRow, RowBlock, RowRun, XGrad, add_column_sums, add_weight_grad_rows, compute_x_grad_panel,
    compute_x_grad_part, count_panels, count_tiles, list_active_rows, next_run, pack_columns, pack_row, pack_tiles,
    pack_transposed_panel, panel_lines, runs_of
)
from passes.indices cimport BIAS, BIAS_HC, CS_LAST_GRAD, GRADS, H_LAST_GRAD, H_PREV, INPUTS, OUT_H, W, W_H, X
from passes.steps cimport (
    RESET, active_end, clear_finished_rows, has_flag, offset_of, previous_row, row_of_slot, set_step_mask, step_at,
    store_reset_grad_line
)
from product.lines cimport (
    REAL_BYTES, Array, L, at, clear, holds_half, lines_in, load_row, no_array, reals, set_arrays, store_line, store_row,
    store_value
)
from product.real cimport MATRICES, real
from product.tile cimport (
    GROUP_TILES, LINES, PACK_ROWS, ROW_BLOCK, ROWS, TILE_SIZE, add_panel_product, pack_rows, tile_group_height
)
from schedule.cost cimport packing_part, parts_of, threads_of, use_threads
from schedule.plan cimport (
    BACKWARD_SLOTS, D, D_CS, D_H, H_TILES, PANELS, PEEPHOLES, SUMS, TRANSPOSED, X_TILES, Backward, BackwardShare,
    backward_share
)
from schedule.team cimport Team, barrier, group_barrier, join_team, measured_cost, part_start, start_team
from schedule.workspace cimport guard_zones, release_zones


# ----------------------------------------------------------------------------------------------------- before the steps
cdef inline void load_last_state_grad(
    const Backward *p, real *grads, Py_ssize_t stride, Array last_grad, Py_ssize_t size, Py_ssize_t b
) noexcept nogil:
    """Load the gradient of the last state of the row in slot b.

    grads : the region of this state's gradient, [B,stride]
    last_grad : [B,size], the caller's, or no array for zeros
    """
    if last_grad.data is NULL:
        clear(grads + b * stride, stride)
    else:
        load_row(grads + b * stride, at(last_grad, row_of_slot(&p.steps, b) * size), size)


cdef inline void load_gradients(const Backward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Load the gradients of the last states for one part of the rows, and one part of an LSTM's peepholes."""
    cdef Py_ssize_t b, j
    for b in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        load_last_state_grad(p, p.scratch + p.start[D_H], p.Ps, p.inputs[H_LAST_GRAD], p.P, b)
        if p.c.traits.states > 1:
            load_last_state_grad(p, p.scratch + p.start[D_CS], p.Hs, p.inputs[CS_LAST_GRAD], p.H, b)
    if p.c.peephole:
        for j in range(part_start(p.J, part, parts), part_start(p.J, part + 1, parts)):
            p.c.traits.load_peepholes(&p.c, p.scratch + p.start[PEEPHOLES], p.inputs, p.H, j)


cdef inline void pack_weight_panel(const Backward *p, real *panel, int n, bint of_x, Py_ssize_t j) noexcept nogil:
    """Pack panel j of w.T for matrix n, either of w_x or of w_h."""
    cdef Py_ssize_t size = p.x_size[n] if of_x else p.h_size[n], first = j * PANEL_LINES * L, left = size - first
    if p.c.transposed:
        pack_rows(panel, min(<Py_ssize_t> PANEL_LINES, lines_in(left)),
                  at(p.inputs[(W if of_x else W_H) + n], first), size, left, p.N[n])
    else:
        pack_transposed_panel(panel, at(p.inputs[W + n], 0 if of_x else p.x_size[n] * p.N[n]), p.N[n], size, j)


cdef inline real *packed_panel(const Backward *p, int n, bint of_x, Py_ssize_t j) noexcept nogil:
    """Return where panel j of w.T for matrix n is, of w_x or of w_h, if all panels are packed before the steps."""
    cdef Py_ssize_t start = p.x_panels_at[n] if of_x else p.h_panels_at[n]
    return p.scratch + p.start[TRANSPOSED] + start + j * p.panel_size[n]


cdef inline void pack_transposed_weights(const Backward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Pack one part of the panels of w.T.

    Where there are few panels, those for h and those for x are packed by different parts.  It was no faster for an LSTM
    if every part packed all panels for itself, which needs no barrier.
    """
    cdef Py_ssize_t h_part = packing_part(&p.grid, part), panel_part, count, j
    cdef int n, of_x
    for n in range(p.c.matrices):
        for of_x in range(2 if p.x_size[n] > 0 else 1):
            count = p.x_panel_count if of_x else p.h_panel_count[n]
            panel_part = parts - 1 - h_part if of_x else h_part
            for j in range(part_start(count, panel_part, parts), part_start(count, panel_part + 1, parts)):
                pack_weight_panel(p, packed_panel(p, n, of_x, j), n, of_x, j)


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline real *own_panel(const Backward *p, Py_ssize_t part, int n) noexcept nogil:
    """Return the memory of a part's own panel of matrix n: in a single step it packs one after the other there."""
    cdef Py_ssize_t size = p.panel_size[0] + p.panel_size[1] if p.c.matrices > 1 else p.panel_size[0]
    return packed_panel(p, 0, False, 0) + part * size + (p.panel_size[0] if n else 0)


cdef inline const real *packed_h_panel(const Backward *p, Py_ssize_t part, int n, Py_ssize_t j) noexcept nogil:
    """Return panel j of w_h.T of matrix n; in a single step pack it first."""
    cdef real *panel
    if p.packs_all:
        return packed_panel(p, n, False, j)
    panel = own_panel(p, part, n)
    pack_weight_panel(p, panel, n, False, j)
    return panel


cdef inline Py_ssize_t prefetch_distance(const Backward *p, int n, Py_ssize_t rows) noexcept nogil:
    """Return the `distance` of tile.pxd to the panel of matrix n that comes next."""
    return p.panel_size[n] * REAL_BYTES if rows >= p.prefetching_rows else 0


cdef inline void sum_h_grads(
    const Backward *p, const real **panels, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b, Py_ssize_t rows, real *acc
) noexcept nogil:
    """Sum the gradients of h after step number k that later steps give: D_H, and d @ w.T of step k + 1.

    k = -1 gives the gradient of the initial state.  Of a row that is reset before step k + 1 the sum is the gradient of
    its reset state, and that of h after step k is zero.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    rows : slots from b on
    acc : written, for all of these rows
    """
    cdef Py_ssize_t lines = panel_lines(p.JP, j), q, g, l
    cdef Py_ssize_t active = active_end(&p.steps, k + 1, b, b + rows) - b
    cdef const real *d = p.scratch + p.start[D] + (step_at(&p.steps, k + 1) * p.B + b) * p.Ns
    cdef const real *d_h
    cdef int n
    for q in range(rows):
        d_h = p.scratch + p.start[D_H] + (b + q) * p.Ps + j * PANEL_LINES * L
        for g in range(lines):
            for l in range(L):
                acc[(q * LINES + g) * L + l] = d_h[g * L + l]
    if active > 0:
        for n in range(p.c.traits.state_matrices):
            add_panel_product(acc, active, lines, d + p.h_column[n], p.Ns, panels[n], p.N[n],
                              prefetch_distance(p, n, active))
    for q in range(rows):
        if has_flag(&p.steps, k + 1, b + q, RESET):  # step k + 1 did not see the state of step k
            for g in range(lines):
                store_reset_grad_line(&p.steps, &p.steps.h_reset, k + 1, b + q, acc + (q * LINES + g) * L,
                                      (j * PANEL_LINES + g) * L, p.P)


cdef inline void state_grads_of_panel(
    const Backward *p, const real **panels, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Compute the gradient of h after step number k, and from it d of this step, for panel j and slots b to `end`.

    `backward_lines` stores d, and in D_H and D_CS what is carried to the step before.

    A row that is active in step k + 1 but not in step k had its first step there, in reverse: D_H carries the gradient
    to its initial state.  A row that is active in neither keeps what D_H has.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    """
    cdef Py_ssize_t active = active_end(&p.steps, k, b, end), rows, q, l
    cdef Py_ssize_t line0 = j * PANEL_LINES, line1 = line0 + panel_lines(p.JP, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    end = max(active, active_end(&p.steps, k + 1, b, end))
    while b < end:
        rows = tile_group_height(end - b)
        sum_h_grads(p, panels, j, k, b, rows, acc)
        for q in range(rows):
            if b + q < active:
                p.c.backward_lines(p, 0, line0, line1, k, b + q, acc + q * LINES * L)
            else:
                for l in range((line1 - line0) * L):
                    p.scratch[p.start[D_H] + (b + q) * p.Ps + line0 * L + l] = acc[q * LINES * L + l]
        b += rows


cdef inline void first_state_grads_of_panel(
    const Backward *p, const real **panels, Py_ssize_t j, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Store h_prev_grad, the gradient of h before the first step, for panel j and slots b to `end`.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    """
    cdef Py_ssize_t rows, q, g, unit
    cdef real[GROUP_TILES * TILE_SIZE] acc
    while b < end:
        rows = tile_group_height(end - b)
        sum_h_grads(p, panels, j, -1, b, rows, acc)
        for q in range(rows):
            for g in range(panel_lines(p.JP, j)):
                unit = (j * PANEL_LINES + g) * L
                store_line(at(p.grads[H_PREV], row_of_slot(&p.steps, b + q) * p.P + unit),
                           acc + (q * LINES + g) * L, p.P - unit)
        b += rows


cdef inline void second_grads_of_panel(
    const Backward *p, const real *panel, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Compute the second product of step number k, and from it the rest of d, for panel j and slots b to `end`.

    That is d @ w.T of the second matrix, the gradient of what the forward pass's second product read: h_prev * r or m.

    panel : panel j of w.T of the second matrix
    """
    cdef Py_ssize_t lines = panel_lines(p.J, j), line0 = j * PANEL_LINES, rows, q
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef const real *d = p.scratch + p.start[D] + step_at(&p.steps, k) * p.B * p.Ns + p.column[1]
    end = active_end(&p.steps, k, b, end)
    while b < end:
        rows = tile_group_height(end - b)
        clear(acc, rows * LINES * L)
        add_panel_product(acc, rows, lines, d + b * p.Ns, p.Ns, panel, p.N[1], prefetch_distance(p, 1, rows))
        for q in range(rows):
            p.c.backward_lines(p, 1, line0, line0 + lines, k, b + q, acc + q * LINES * L)
        b += rows


cdef inline void state_grads(const Backward *p, Py_ssize_t part, Py_ssize_t k) noexcept nogil:
    """Compute one part of the gradients of h after step number k, and from them d of this step."""
    cdef BackwardShare share = backward_share(p, part, p.h_panel_count[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    # A single step has no product here, and rows divide more evenly than panels.  The barrier of the group is enough
    # afterwards too: the parts of a group have the same rows together, however they divide them.
    if not p.packs_all:
        share.j0, share.j1 = 0, p.h_panel_count[0]
        share.b0, share.b1 = part_start(p.B, part, parts_of(&p.grid)), part_start(p.B, part + 1, parts_of(&p.grid))
    for j in range(share.j0, share.j1):
        for n in range(p.c.traits.state_matrices):
            panels[n] = packed_panel(p, n, False, j)
        state_grads_of_panel(p, panels, j, k, share.b0, share.b1)


cdef inline void first_state_grads(const Backward *p, Py_ssize_t part) noexcept nogil:
    """Store one part of h_prev_grad, where all panels are packed."""
    cdef BackwardShare share = backward_share(p, part, p.h_panel_count[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    for j in range(share.j0, share.j1):
        for n in range(p.c.traits.state_matrices):
            panels[n] = packed_panel(p, n, False, j)
        first_state_grads_of_panel(p, panels, j, share.b0, share.b1)


cdef inline void second_grads(const Backward *p, Py_ssize_t part, Py_ssize_t k) noexcept nogil:
    """Compute one part of the second product of step number k, and from it the rest of d."""
    cdef BackwardShare share = backward_share(p, part, p.h_panel_count[1])
    cdef Py_ssize_t j
    for j in range(share.j0, share.j1):
        second_grads_of_panel(p, packed_h_panel(p, part, 1, j), j, k, share.b0, share.b1)


cdef inline void all_steps_back(const Backward *p, Py_ssize_t part) noexcept nogil:
    """Compute the gradients of all steps for one part, whose group has no other part."""
    cdef Py_ssize_t k = p.steps.T - 1
    while k >= 0:
        state_grads(p, part, k)
        if p.c.products > 1:
            second_grads(p, part, k)
        k -= 1


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline XGrad x_grad_of(const Backward *p) noexcept nogil:
    """Return how the gradient of x is computed."""
    cdef XGrad x
    x.steps, x.x_grad, x.layout, x.accumulate = &p.steps, p.grads[X], p.d_x_layout, p.accumulate_x_grad
    x.I, x.d, x.ldd, x.K = p.I, p.scratch + p.start[D], p.Ns, p.N[0]
    x.K2 = p.N[1] if p.c.traits.matrices > 1 else 0
    return x


cdef inline void x_grads(const Backward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Compute one part of x_grad, d @ w_x.T for all steps, unless it is not wanted or x has no columns."""
    cdef XGrad x = x_grad_of(p)
    if p.x_panel_count > 0:
        compute_x_grad_part(&x, packed_panel(p, 0, True, 0), packed_panel(p, 1 if x.K2 > 0 else 0, True, 0),
                            p.grid.groups, part, parts)


cdef inline void single_step_grads(const Backward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Store one part of h_prev_grad and x_grad of a single step, and pack each panel when it is used."""
    cdef Py_ssize_t h_panels = p.h_panel_count[0], j
    cdef BackwardShare share = backward_share(p, part, h_panels + p.x_panel_count)
    cdef XGrad x = x_grad_of(p)
    cdef real *panel = own_panel(p, part, 0)
    cdef real *panel2 = own_panel(p, part, 1)
    cdef const real *panels[MATRICES]
    cdef int n
    if p.x_panel_count > 0 and not p.accumulate_x_grad:
        clear_finished_rows(&p.steps, p.grads[X], &p.d_x_layout, p.I, part, parts)
    for j in range(share.j0, share.j1):
        if j < h_panels:
            for n in range(p.c.traits.state_matrices):
                panels[n] = packed_h_panel(p, part, n, j)
            first_state_grads_of_panel(p, panels, j, share.b0, share.b1)
            continue
        pack_weight_panel(p, panel, 0, True, j - h_panels)
        if x.K2 > 0:
            pack_weight_panel(p, panel2, 1, True, j - h_panels)
        compute_x_grad_panel(&x, share.b0, active_end(&p.steps, 0, share.b0, share.b1), panel, panel2, j - h_panels)


# -------------------------------------------------------------------------------------------------- weights and biases
cdef inline Py_ssize_t h_panels_offset(const Backward *p, Py_ssize_t rows) noexcept nogil:
    """Return where in PANELS the panels with h begin, behind those with x, for a block of so many rows."""
    return count_panels(lines_in(p.I)) * PANEL_LINES * L * rows


cdef inline void find_input_rows(
    const Backward *p, int n, bint of_x, const RowBlock *block, const RowRun *run, InputRow *rows
) noexcept nogil:
    """Find the rows of x, or those that w_h of matrix n was multiplied with, for a run of active rows.

    rows : [run.count], written
    """
    cdef Py_ssize_t q, t, row
    cdef int source = p.h_source[n], factor = 0 if of_x else p.h_factor[n]
    for q in range(run.count):
        t, row = block.t[run.first + q], block.row[run.first + q]
        if of_x:
            rows[q].values = at(p.inputs[X], offset_of(&p.x_layout, t, row))
        elif source == H_PREV:
            rows[q].values = previous_row(&p.steps, p.inputs[H_PREV], &p.steps.h_reset, p.P, p.inputs[OUT_H],
                                          &p.h_layout, t, row)
        else:
            rows[q].values = at(p.inputs[source], (t * p.B + row) * p.H)
        rows[q].factor = at(p.inputs[factor], (t * p.B + row) * p.H) if factor else no_array()


cdef inline void pack_input_rows(
    const Backward *p, int n, bint of_x, const RowBlock *block, const RowRun *run
) noexcept nogil:
    """Pack a run of rows of `find_input_rows` to tiles; to panels if weights are transposed."""
    cdef Py_ssize_t columns = p.x_size[n] if of_x else p.h_size[n], q
    cdef real *tiles = p.scratch + p.start[X_TILES if of_x else H_TILES] + run.first * ROWS
    cdef real *panels = p.scratch + p.start[PANELS] + (0 if of_x else h_panels_offset(p, block.rows))
    cdef InputRow[PACK_ROWS] rows
    find_input_rows(p, n, of_x, block, run, rows)
    if not p.c.transposed:
        pack_tiles(holds_half(p.inputs[X]), tiles, block.tile_stride, rows, columns, run.count)
        return
    for q in range(run.count):
        pack_row(panels, &rows[q], columns, block, run.chain, run.r + q)


cdef inline void pack_d_rows(const Backward *p, int n, const RowBlock *block, const RowRun *run) noexcept nogil:
    """Pack a run of rows of d for matrix n to tiles: for x and h, or if these are separate for each of them."""
    cdef InputRow[PACK_ROWS] rows
    cdef Py_ssize_t q
    for q in range(run.count):
        rows[q].values = reals(p.scratch + p.start[D] + block.d_row[run.first + q] * p.Ns + p.column[n])
        rows[q].factor = no_array()
    pack_tiles(False, p.scratch + p.start[X_TILES] + run.first * ROWS, block.tile_stride, rows, p.N[n], run.count)
    if p.separate[n]:
        for q in range(run.count):
            rows[q].values = at(rows[q].values, p.h_column[n] - p.column[n])
        pack_tiles(False, p.scratch + p.start[H_TILES] + run.first * ROWS, block.tile_stride, rows, p.N[n], run.count)


cdef inline void pack_row_block(
    const Backward *p, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Pack one part of a block of rows, as the weight gradient of matrix n reads them.

    A gradient like w is [x, h_prev].T @ d: x and h_prev go to tiles, and `weight_grads` packs d.  A transposed gradient
    is d.T @ [x, h_prev]: d goes to tiles, and x and h_prev to panels.
    """
    cdef RowBlock block
    cdef RowRun run
    list_active_rows(&block, &p.steps, r0)
    run = runs_of(&block, part, parts)
    while next_run(&run, &block):
        pack_input_rows(p, n, True, &block, &run)
        pack_input_rows(p, n, False, &block, &run)
        if p.c.transposed:
            pack_d_rows(p, n, &block, &run)


cdef inline real *weight_grad_of(const Backward *p, int n, bint of_x) noexcept nogil:
    """Return where the gradient of matrix n is summed, of w_x or of w_h.

    That is the output or, in float32, scratch if the output is float16.
    """
    cdef Py_ssize_t offset = 0 if of_x else p.x_size[n] * p.N[n]
    if holds_half(p.grads[W]):
        return p.scratch + p.start[TRANSPOSED] + p.w_grad_at[n] + offset
    elif p.c.transposed:
        return <real *> p.grads[(W if of_x else W_H) + n].data
    else:
        return <real *> p.grads[W + n].data + offset


cdef inline void add_transposed_grad(
    const Backward *p, int n, bint of_x, const real *tiles, const RowBlock *block, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Add a block of rows to one part of the columns of matrix n's transposed gradient, of w_x or w_h, or set these if
    the block is the first one.

    tiles : the block's columns of d, packed
    """
    cdef Py_ssize_t N = p.N[n], M = p.x_size[n] if of_x else p.h_size[n], tile = part_start(count_tiles(N), part, parts)
    cdef Py_ssize_t rows = min(part_start(count_tiles(N), part + 1, parts) * ROWS, N) - tile * ROWS, first, j
    cdef const real *panels = p.scratch + p.start[PANELS] + (0 if of_x else h_panels_offset(p, block.rows))
    cdef real *out = weight_grad_of(p, n, of_x) + tile * ROWS * M
    for j in range(count_panels(lines_in(M))):
        first = j * PANEL_LINES * L
        add_weight_grad_rows(out + first, M, rows, tiles + tile * block.tile_stride, panels + first * block.rows,
                             panel_lines(lines_in(M), j), M - first, block)


cdef inline void transposed_grads(
    const Backward *p, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Add a block of rows to one part of the columns of matrix n's gradient, and of d's sums: d.T @ [x, h_prev].

    The gradients to the weights for x and for h are arrays of their own, [N,I] and [N,H].
    """
    cdef Py_ssize_t lines = lines_in(p.N[n])
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    add_transposed_grad(p, n, True, p.scratch + p.start[X_TILES], &block, part, parts)
    add_transposed_grad(p, n, False, p.scratch + p.start[H_TILES if p.separate[n] else X_TILES], &block, part, parts)
    add_bias_grads(p, part_start(lines, part, parts), part_start(lines, part + 1, parts), n, &block)


cdef inline void add_bias_grads(
    const Backward *p, Py_ssize_t line0, Py_ssize_t line1, int n, const RowBlock *block
) noexcept nogil:
    """Add a block of rows of d to the lines line0 to line1 of matrix n's bias gradient.

    Sums are in scratch until the last block.  If d is separate for x and h, h has a bias of its own; a projection has
    none.
    """
    cdef Py_ssize_t N = p.N[n], first = line0 * L, columns = min(line1 * L, N) - first, l
    cdef const real *d = p.scratch + p.start[D] + first
    cdef double *sums = <double *> (p.scratch + p.start[SUMS])
    cdef double *sums_h = sums + lines_in(N) * L
    cdef bint separate = p.separate[n]
    if columns <= 0 or p.grads[BIAS + n].data is NULL:
        return
    if block.is_first:
        clear(sums + first, (line1 - line0) * L)
        if separate:
            clear(sums_h + first, (line1 - line0) * L)
    add_column_sums(sums + first, d + p.column[n], p.Ns, columns, block)
    if separate:
        add_column_sums(sums_h + first, d + p.h_column[n], p.Ns, columns, block)
    if block.is_last:
        for l in range(first, first + columns):
            store_value(at(p.grads[BIAS + n], l), <real> sums[l])
            if separate:
                store_value(at(p.grads[BIAS_HC], l), <real> sums_h[l])


cdef inline void weight_grads(
    const Backward *p, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Add a block of rows to one part of the columns of matrix n's gradient [x, h_prev].T @ d, and of its bias; if
    weights are transposed: `transposed_grads`."""
    cdef Py_ssize_t rows = min(<Py_ssize_t> ROW_BLOCK, p.steps.T * p.B), N = p.N[n]
    cdef Py_ssize_t all_lines = lines_in(N), end = part_start(all_lines, part + 1, parts), lines, left
    cdef Py_ssize_t line = part_start(all_lines, part, parts)
    cdef const real *d = p.scratch + p.start[D] + p.column[n]
    cdef const real *d_h = p.scratch + p.start[D] + p.h_column[n]
    cdef const real *x_tiles = p.scratch + p.start[X_TILES]
    cdef const real *h_tiles = p.scratch + p.start[H_TILES]
    cdef real *panel = p.scratch + p.start[PANELS] + part * rows * PANEL_LINES * L
    cdef real *out = weight_grad_of(p, n, True)
    cdef real *out_h = weight_grad_of(p, n, False)
    cdef RowBlock block
    if p.c.transposed:
        transposed_grads(p, part, parts, n, r0)
        return
    list_active_rows(&block, &p.steps, r0)
    while line < end:
        lines, left = min(<Py_ssize_t> PANEL_LINES, end - line), N - line * L
        pack_columns(panel, lines, &block, d + line * L, p.Ns, left)
        add_bias_grads(p, line, line + lines, n, &block)
        add_weight_grad_rows(out + line * L, N, p.x_size[n], x_tiles, panel, lines, left, &block)
        if p.separate[n]:
            pack_columns(panel, lines, &block, d_h + line * L, p.Ns, left)
        add_weight_grad_rows(out_h + line * L, N, p.h_size[n], h_tiles, panel, lines, left, &block)
        line += lines


cdef inline void store_weight_grads(const Backward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Store one part of the weight gradients of float16.

    The gradient of a matrix is copied as x_size + h_size pieces of N values; PyTorch's two arrays have as many.
    """
    cdef Py_ssize_t pieces, i
    cdef Array dst
    cdef int n
    for n in range(p.c.matrices):
        pieces = p.x_size[n] + p.h_size[n]
        for i in range(part_start(pieces, part, parts), part_start(pieces, part + 1, parts)):
            if p.c.transposed and i >= p.x_size[n]:
                dst = at(p.grads[W_H + n], (i - p.x_size[n]) * p.N[n])
            else:
                dst = at(p.grads[W + n], i * p.N[n])
            store_row(dst, p.scratch + p.start[TRANSPOSED] + p.w_grad_at[n] + i * p.N[n], p.N[n])


cdef inline void all_weight_grads(const Backward *p) noexcept nogil:
    """Compute all gradients of weights and biases, where there is only one part."""
    cdef Py_ssize_t r0
    cdef int n
    for n in range(p.c.matrices):
        r0 = 0
        while r0 < p.steps.T * p.B:
            pack_row_block(p, 0, 1, n, r0)
            weight_grads(p, 0, 1, n, r0)
            r0 += ROW_BLOCK
    if holds_half(p.grads[W]):
        store_weight_grads(p, 0, 1)


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long backward(const Backward *p) noexcept nogil:
    """Run the backward pass; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end, rows = p.steps.T * p.B
    # In the parallel region each thread has its own k, r0 and n; there, Cython would take `k -= 1` for a reduction.
    cdef Py_ssize_t k = p.steps.T - 1, r0 = 0
    cdef int n = 0
    cdef bint has_weight_grads = p.grads[W].data is not NULL
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_gradients(p, 0, 1)
        if p.packs_all:
            pack_transposed_weights(p, 0, 1)
        all_steps_back(p, 0)
        if p.packs_all:
            first_state_grads(p, 0)
            x_grads(p, 0, 1)
        else:
            single_step_grads(p, 0, 1)
        if p.c.traits.store_remaining_grads is not NULL:
            p.c.traits.store_remaining_grads(p, 0, 1)
        if has_weight_grads:
            all_weight_grads(p)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        join_team(&team)
        for part in prange(first, end_part, schedule="static"):
            load_gradients(p, part, parts)
        if p.packs_all:
            for part in prange(first, end_part, schedule="static"):
                pack_transposed_weights(p, part, parts)
        barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, end_part, schedule="static"):
                all_steps_back(p, part)
        else:
            while k >= 0:
                for part in prange(first, end_part, schedule="static"):
                    state_grads(p, part, k)
                group_barrier(&team)
                if p.c.products > 1:
                    for part in prange(first, end_part, schedule="static"):
                        second_grads(p, part, k)
                    group_barrier(&team)
                k = k - 1
        if p.packs_all:
            for part in prange(first, end_part, schedule="static"):
                first_state_grads(p, part)
            barrier(&team)
            for part in prange(first, end_part, schedule="static"):
                x_grads(p, part, parts)
        else:
            for part in prange(first, end_part, schedule="static"):
                single_step_grads(p, part, parts)
            barrier(&team)
        if p.c.traits.store_remaining_grads is not NULL:
            for part in prange(first, end_part, schedule="static"):
                p.c.traits.store_remaining_grads(p, part, parts)
        while has_weight_grads and n < p.c.matrices:
            r0 = 0
            while r0 < rows:
                for part in prange(first, end_part, schedule="static"):
                    pack_row_block(p, part, parts, n, r0)
                barrier(&team)
                for part in prange(first, end_part, schedule="static"):
                    weight_grads(p, part, parts, n, r0)
                barrier(&team)
                r0 = r0 + ROW_BLOCK
            n = n + 1
        if has_weight_grads and holds_half(p.grads[W]):
            for part in prange(first, end_part, schedule="static"):
                store_weight_grads(p, part, parts)
        barrier(&team)  # results do not need it, but waiting here is short and measured, unlike in the runtime
    return measured_cost(&team)


cdef inline void use_arrays(
    Backward *p, int ready, real *scratch, const Pass *a, Array *inputs, Array *grads
) noexcept nogil:
    """Use at most `ready` threads, scratch memory, and a's arrays, for which `inputs` and `grads` have room."""
    p.inputs, p.grads, p.scratch = inputs, grads, scratch
    set_arrays(inputs, a.inputs, INPUTS, p.c.is_half)
    set_arrays(grads, <const void *const *> a.grads, GRADS, p.c.is_half)
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, scratch, 1)


cdef inline long long backward_pass(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the backward pass of an op or a layer, whose plan is a Backward, on at most `ready` threads; return the
    nanoseconds that having several cost."""
    cdef Backward p = (<const Backward *> plan)[0]
    cdef Array[INPUTS] inputs
    cdef Array[GRADS] grads
    cdef long long nanoseconds
    use_arrays(&p, ready, <real *> scratch, a, inputs, grads)
    p.steps.reverse = a.reverse
    if a.has_layouts:
        p.d_y_layout, p.d_x_layout = a.y_grad_layout, a.x_grad_layout
    if p.c.transposed:
        p.x_layout, p.h_layout, p.accumulate_x_grad = a.x_layout, a.y_layout, a.accumulate_x_grad
        if a.grads[X] is NULL:
            p.x_panel_count = 0
    if a.step_mask is not NULL:
        set_step_mask(&p.steps, a.step_mask, p.scratch + p.start[BACKWARD_SLOTS], p.grid.groups)
        set_reset_states(a, p.c.is_half, &p.steps)
    nanoseconds = backward(&p)
    release_zones(&p.workspace, scratch, 1)
    return nanoseconds
