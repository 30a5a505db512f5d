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

p : the plan: sizes, strides, and where each region of scratch starts (plan.pxd)
c : the cell: its gates, activations and options (types.pxd)
inputs, outputs : the arrays of the call, the caller's, at the indices of indices.pxd
scratch : the workspace of the call, whose regions plan.pxd lists
part, parts : the index of a part, and how many there are; `share` has the slots and panels of one
n : a matrix of weights, 0 or 1, with p.N[n] columns; of its rows p.x_rows[n] are for x, p.h_rows[n] for h or m
k, t : the number of a step in the order in which the forward pass processes them (here k + 1 comes before k); the step
b, end, b0, b1 : a slot of a batch row (steps.pxd), where a range of them ends, a range of slots
row : a batch row, as the caller numbers it
j, j0, j1 : a packed panel of w.T, a range of panels; its PANEL_LINES lines are lines of h, m or x
unit : the first of a line's hidden units, or of its numbers of h
acc : sums of a few rows with a panel: LINES lines for each row
r0 : the first row of a block of ROW_BLOCK rows (gradients.pxd)
run : some active rows of that block, side by side (`RowRun`)
K2 : columns of the second matrix, from whose panels x has a gradient, too; 0: there is none
L, g, l, q : reals in a cache line, a line of a panel, a real of a line, a row
"""
from cython.parallel cimport parallel, prange

from cells.types cimport Cell
from passes.arrays cimport Pass
from passes.gradients cimport (
    PANEL_LINES, InputRow, RowBlock, RowRun, add_column_sums, add_weight_grad_rows, compute_x_grad_panel,
    compute_x_grad_part, count_panels, count_tiles, list_active_rows, next_run, pack_columns, pack_row, pack_tiles,
    pack_transposed_panel, panel_lines, runs_of
)
from passes.indices cimport (
    BIAS_GRAD, BIAS_HC_GRAD, CS_GRAD, CS_LAST_GRAD, D_C_BAR, GRAD, H_GRAD, H_LAST_GRAD, H_PREV, H_PREV_GRAD, INPUTS,
    OUT_H, OUTPUTS, W, W_GRAD, W_H, W_H_GRAD, X, X_GRAD
)
from passes.operands cimport set_reset_states, set_states, set_torch_weights, set_weights
from passes.steps cimport (
    RESET, active_end, clear_finished_rows, current_row, has_flag, previous_row, row_of_slot, step_at,
    store_reset_grad_line
)
from product.lines cimport (
    Array, array_of, at, clear, holds_half, lanes_of, lines_in, load_row, no_array, reals, store_line, store_row,
    store_value
)
from product.real cimport MATRICES, real
from product.tile cimport (
    GROUP_TILES, LINES, PACK_ROWS, ROW_BLOCK, ROWS, TILE_SIZE, add_panel_product, pack_rows, tile_group_height
)
from schedule.cost cimport packing_part, parts_of, threads_of, use_threads
from schedule.plan cimport (
    D, D_CS, D_H, H_TILES, PANELS, PEEPHOLES, SUMS, TRANSPOSED, X_TILES, Backward, BackwardShare, backward_share,
    matrices_of, products_of, projects, use_backward_step_mask
)
from schedule.team cimport Team, adopt_rounding, barrier, group_barrier, measured_cost, part_start, start_team
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


cdef inline void load_gradients(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Load the gradients of the last states for one part of the rows, and one part of an LSTM's peepholes."""
    cdef Py_ssize_t b, j
    for b in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        load_last_state_grad(p, scratch + p.start[D_H], p.Ps, inputs[H_LAST_GRAD], p.P, b)
        if c.traits.states > 1:
            load_last_state_grad(p, scratch + p.start[D_CS], p.Hs, inputs[CS_LAST_GRAD], p.H, b)
    if c.peephole:
        for j in range(part_start(p.J, part, parts), part_start(p.J, part + 1, parts)):
            c.traits.load_peepholes(c, scratch + p.start[PEEPHOLES], inputs, p.H, j)


cdef inline void pack_weight_panel(
    const Backward *p, const Array *inputs, real *panel, int n, bint of_x, Py_ssize_t j
) noexcept nogil:
    """Pack panel j of w.T for matrix n, either of its rows for x or of those for h."""
    cdef Py_ssize_t rows = p.x_rows[n] if of_x else p.h_rows[n], first = j * PANEL_LINES * p.L, left = rows - first
    if p.transposed:
        pack_rows(panel, min(<Py_ssize_t> PANEL_LINES, lines_in(panel, left)),
                  at(inputs[(W if of_x else W_H) + n], first), rows, left, p.N[n])
    else:
        pack_transposed_panel(panel, at(inputs[W + n], 0 if of_x else p.x_rows[n] * p.N[n]), p.N[n], rows, j)


cdef inline void pack_transposed_weights(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Pack one part of the panels of w.T.

    Where there are few panels, those for h and those for x are packed by different parts.  It was no faster for an LSTM
    if every part packed all panels for itself, which needs no barrier.
    """
    cdef Py_ssize_t h_part = packing_part(&p.grid, part), x_part = parts - 1 - h_part, count, j
    cdef real *panels
    cdef int n
    for n in range(matrices_of(c)):
        panels, count = scratch + p.start[TRANSPOSED] + p.h_panels_at[n], p.h_panel_count[n]
        for j in range(part_start(count, h_part, parts), part_start(count, h_part + 1, parts)):
            pack_weight_panel(p, inputs, panels + j * p.panel_size[n], n, False, j)
        panels, count = scratch + p.start[TRANSPOSED] + p.x_panels_at[n], p.x_panel_count if p.x_rows[n] > 0 else 0
        for j in range(part_start(count, x_part, parts), part_start(count, x_part + 1, parts)):
            pack_weight_panel(p, inputs, panels + j * p.panel_size[n], n, True, j)


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline real *own_panel(
    const Backward *p, const Cell *c, real *scratch, Py_ssize_t part, int n
) noexcept nogil:
    """Return the memory of a part's own panel of matrix n: in a single step it packs one after the other there."""
    cdef Py_ssize_t size = p.panel_size[0] + p.panel_size[1] if matrices_of(c) > 1 else p.panel_size[0]
    return scratch + p.start[TRANSPOSED] + p.h_panels_at[0] + part * size + (p.panel_size[0] if n else 0)


cdef inline const real *packed_h_panel(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, int n, Py_ssize_t j
) noexcept nogil:
    """Return panel j of w.T of matrix n's rows for h; in a single step pack it first."""
    cdef real *panel
    if p.packs_all:
        return scratch + p.start[TRANSPOSED] + p.h_panels_at[n] + j * p.panel_size[n]
    panel = own_panel(p, c, scratch, part, n)
    pack_weight_panel(p, inputs, panel, n, False, j)
    return panel


cdef inline Py_ssize_t prefetch_distance(const Backward *p, int n, Py_ssize_t rows) noexcept nogil:
    """Return the `distance` of tile.pxd to the panel of matrix n that comes next."""
    return p.panel_size[n] * sizeof(real) if rows >= p.prefetching_rows else 0


cdef inline void sum_h_grads(
    const Backward *p, const Cell *c, const real *scratch, const real **panels, Py_ssize_t j, Py_ssize_t k,
    Py_ssize_t b, Py_ssize_t rows, real *acc
) noexcept nogil:
    """Sum the gradients of h after step number k that later steps give: D_H, and d @ w.T of step k + 1.

    k = -1 gives the gradient of the initial state.  Of a row that is reset before step k + 1 the sum is the gradient of
    its reset state, and that of h after step k is zero.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    rows : slots from b on
    acc : written, for all of these rows
    """
    cdef Py_ssize_t L = lanes_of(scratch), lines = panel_lines(p.JP, j), q, g, l
    cdef Py_ssize_t active = active_end(&p.steps, k + 1, b, b + rows) - b
    cdef const real *d = scratch + p.start[D] + (step_at(&p.steps, k + 1) * p.B + b) * p.Ns
    cdef const real *d_h
    cdef int n
    for q in range(rows):
        d_h = scratch + p.start[D_H] + (b + q) * p.Ps + j * PANEL_LINES * L
        for g in range(lines):
            for l in range(L):
                acc[(q * LINES + g) * L + l] = d_h[g * L + l]
    if active > 0:
        for n in range(c.traits.state_matrices):
            add_panel_product(acc, active, lines, d + p.h_column[n], p.Ns, panels[n], p.N[n],
                              prefetch_distance(p, n, active))
    for q in range(rows):
        if has_flag(&p.steps, k + 1, b + q, RESET):  # step k + 1 did not see the state of step k
            for g in range(lines):
                store_reset_grad_line(&p.steps, &p.steps.h_reset, k + 1, b + q, acc + (q * LINES + g) * L,
                                      (j * PANEL_LINES + g) * L, p.P)


cdef inline void state_grads_of_panel(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, const real **panels, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Compute the gradient of h after step number k, and from it d of this step, for panel j and slots b to `end`.

    `backward_lines` stores d, and in D_H and D_CS what is carried to the step before.

    A row that is active in step k + 1 but not in step k had its first step there, in reverse: D_H carries the gradient
    to its initial state.  A row that is active in neither keeps what D_H has.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    """
    cdef Py_ssize_t L = lanes_of(scratch), active = active_end(&p.steps, k, b, end), rows, q, l
    cdef Py_ssize_t line0 = j * PANEL_LINES, line1 = line0 + panel_lines(p.JP, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    end = max(active, active_end(&p.steps, k + 1, b, end))
    while b < end:
        rows = tile_group_height(end - b)
        sum_h_grads(p, c, scratch, panels, j, k, b, rows, acc)
        for q in range(rows):
            if b + q < active:
                c.traits.backward_lines(p, c, 0, inputs, line0, line1, k, b + q, acc + q * LINES * L, scratch)
            else:
                for l in range((line1 - line0) * L):
                    scratch[p.start[D_H] + (b + q) * p.Ps + line0 * L + l] = acc[q * LINES * L + l]
        b += rows


cdef inline void first_state_grads_of_panel(
    const Backward *p, const Cell *c, const Array *outputs, real *scratch, const real **panels, Py_ssize_t j,
    Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Store h_prev_grad, the gradient of h before the first step, for panel j and slots b to `end`.

    panels : panel j of w.T for each matrix that is multiplied with h (`state_matrices` of types.pxd)
    """
    cdef Py_ssize_t L = lanes_of(scratch), rows, q, g, unit
    cdef real[GROUP_TILES * TILE_SIZE] acc
    while b < end:
        rows = tile_group_height(end - b)
        sum_h_grads(p, c, scratch, panels, j, -1, b, rows, acc)
        for q in range(rows):
            for g in range(panel_lines(p.JP, j)):
                unit = (j * PANEL_LINES + g) * L
                store_line(at(outputs[H_PREV_GRAD], row_of_slot(&p.steps, b + q) * p.P + unit),
                           acc + (q * LINES + g) * L, p.P - unit)
        b += rows


cdef inline void second_grads_of_panel(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, const real *panel, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """Compute the second product of step number k, and from it the rest of d, for panel j and slots b to `end`.

    That is d @ w.T of the second matrix, the gradient of what the forward pass's second product read: h_prev * r or m.

    panel : panel j of w.T of the second matrix
    """
    cdef Py_ssize_t L = lanes_of(scratch), lines = panel_lines(p.J, j), line0 = j * PANEL_LINES, rows, q
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef const real *d = scratch + p.start[D] + step_at(&p.steps, k) * p.B * p.Ns + p.column[1]
    end = active_end(&p.steps, k, b, end)
    while b < end:
        rows = tile_group_height(end - b)
        clear(acc, rows * LINES * L)
        add_panel_product(acc, rows, lines, d + b * p.Ns, p.Ns, panel, p.N[1], prefetch_distance(p, 1, rows))
        for q in range(rows):
            c.traits.backward_lines(p, c, 1, inputs, line0, line0 + lines, k, b + q, acc + q * LINES * L, scratch)
        b += rows


cdef inline void state_grads(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t k
) noexcept nogil:
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
        for n in range(c.traits.state_matrices):
            panels[n] = scratch + p.start[TRANSPOSED] + p.h_panels_at[n] + j * p.panel_size[n]
        state_grads_of_panel(p, c, inputs, scratch, panels, j, k, share.b0, share.b1)


cdef inline void first_state_grads(
    const Backward *p, const Cell *c, const Array *outputs, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Store one part of h_prev_grad, where all panels are packed."""
    cdef BackwardShare share = backward_share(p, part, p.h_panel_count[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    for j in range(share.j0, share.j1):
        for n in range(c.traits.state_matrices):
            panels[n] = scratch + p.start[TRANSPOSED] + p.h_panels_at[n] + j * p.panel_size[n]
        first_state_grads_of_panel(p, c, outputs, scratch, panels, j, share.b0, share.b1)


cdef inline void second_grads(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t k
) noexcept nogil:
    """Compute one part of the second product of step number k, and from it the rest of d."""
    cdef BackwardShare share = backward_share(p, part, p.h_panel_count[1])
    cdef const real *panel
    cdef Py_ssize_t j
    for j in range(share.j0, share.j1):
        panel = packed_h_panel(p, c, inputs, scratch, part, 1, j)
        second_grads_of_panel(p, c, inputs, scratch, panel, j, k, share.b0, share.b1)


cdef inline void all_steps_back(
    const Backward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Compute the gradients of all steps for one part, whose group has no other part."""
    cdef Py_ssize_t k = p.steps.T - 1
    while k >= 0:
        state_grads(p, c, inputs, scratch, part, k)
        if products_of(c) > 1:
            second_grads(p, c, inputs, scratch, part, k)
        k -= 1


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void x_grads(
    const Backward *p, const Cell *c, const Array *outputs, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Compute one part of x_grad, d @ w_x.T for all steps, unless it is not wanted or x has no columns."""
    cdef Py_ssize_t K2 = 0
    cdef const real *panels2 = NULL
    if p.x_panel_count == 0:
        return
    if matrices_of(c) > 1 and not projects(c):
        K2, panels2 = p.N[1], scratch + p.start[TRANSPOSED] + p.x_panels_at[1]
    compute_x_grad_part(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.grid.groups, p.I,
                        scratch + p.start[D], p.Ns, scratch + p.start[TRANSPOSED] + p.x_panels_at[0], p.N[0], panels2,
                        K2, part, parts)


cdef inline void single_step_grads(
    const Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, Py_ssize_t part,
    Py_ssize_t parts
) noexcept nogil:
    """Store one part of h_prev_grad and x_grad of a single step, and pack each panel when it is used."""
    cdef Py_ssize_t h_panels = p.h_panel_count[0], j, x_panel, K2 = 0
    cdef BackwardShare share = backward_share(p, part, h_panels + p.x_panel_count)
    cdef real *panel = own_panel(p, c, scratch, part, 0)
    cdef real *panel2 = own_panel(p, c, scratch, part, 1)
    cdef const real *panels[MATRICES]
    cdef int n
    if matrices_of(c) > 1:
        K2 = p.N[1]
    if p.x_panel_count > 0 and not p.accumulate_x_grad:
        clear_finished_rows(&p.steps, outputs[X_GRAD], &p.d_x_layout, p.I, part, parts)
    for j in range(share.j0, share.j1):
        if j < h_panels:
            for n in range(c.traits.state_matrices):
                panels[n] = packed_h_panel(p, c, inputs, scratch, part, n, j)
            first_state_grads_of_panel(p, c, outputs, scratch, panels, j, share.b0, share.b1)
            continue
        x_panel = j - h_panels
        pack_weight_panel(p, inputs, panel, 0, True, x_panel)
        if K2 > 0:
            pack_weight_panel(p, inputs, panel2, 1, True, x_panel)
        compute_x_grad_panel(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.I, scratch + p.start[D],
                             p.Ns, share.b0, active_end(&p.steps, 0, share.b0, share.b1), panel, p.N[0], panel2, K2,
                             x_panel)


# -------------------------------------------------------------------------------------------------- weights and biases
cdef inline Py_ssize_t h_panels_offset(const Backward *p, Py_ssize_t rows) noexcept nogil:
    """Return where in PANELS the panels with h begin, behind those with x, for a block of so many rows."""
    return count_panels((p.I + p.L - 1) // p.L) * PANEL_LINES * p.L * rows


cdef inline void find_input_rows(
    const Backward *p, const Array *inputs, int n, bint of_x, const RowBlock *block, const RowRun *run, InputRow *rows
) noexcept nogil:
    """Find the rows of x, or those that matrix n's rows for h were multiplied with, for a run of active rows.

    rows : [run.count], written
    """
    cdef Py_ssize_t q, t, row
    cdef int source = p.h_source[n], factor = 0 if of_x else p.h_factor[n]
    for q in range(run.count):
        t, row = block.t[run.first + q], block.row[run.first + q]
        if of_x:
            rows[q].values = current_row(&p.steps, inputs[X], &p.x_layout, t, row)
        elif source == H_PREV:
            rows[q].values = previous_row(&p.steps, inputs[H_PREV], &p.steps.h_reset, p.P, inputs[OUT_H], &p.h_layout,
                                          t, row)
        else:
            rows[q].values = at(inputs[source], (t * p.B + row) * p.H)
        rows[q].factor = at(inputs[factor], (t * p.B + row) * p.H) if factor else no_array()


cdef inline void pack_input_rows(
    const Backward *p, real *scratch, int n, bint of_x, bint is_half, const InputRow *rows, const RowBlock *block,
    const RowRun *run
) noexcept nogil:
    """Pack a run of rows of `find_input_rows`, of float16 or not, to tiles; to panels if weights are transposed."""
    cdef Py_ssize_t columns = p.x_rows[n] if of_x else p.h_rows[n], q
    cdef real *tiles = scratch + p.start[X_TILES if of_x else H_TILES] + run.first * ROWS
    cdef real *panels = scratch + p.start[PANELS] + (0 if of_x else h_panels_offset(p, block.rows))
    if not p.transposed:
        pack_tiles(is_half, tiles, p.tile_stride, rows, columns, run.count)
        return
    for q in range(run.count):
        pack_row(panels, &rows[q], columns, block, run.chain, run.r + q)


cdef inline void pack_d_rows(
    const Backward *p, real *scratch, int n, const RowBlock *block, const RowRun *run
) noexcept nogil:
    """Pack a run of rows of d for matrix n to tiles: for x and h, or if these are separate for each of them."""
    cdef InputRow[PACK_ROWS] rows
    cdef Py_ssize_t q
    for q in range(run.count):
        rows[q].values = reals(scratch + p.start[D] + block.d_row[run.first + q] * p.Ns + p.column[n])
        rows[q].factor = no_array()
    pack_tiles(False, scratch + p.start[X_TILES] + run.first * ROWS, p.tile_stride, rows, p.N[n], run.count)
    if p.separate[n]:
        for q in range(run.count):
            rows[q].values = at(rows[q].values, p.h_column[n] - p.column[n])
        pack_tiles(False, scratch + p.start[H_TILES] + run.first * ROWS, p.tile_stride, rows, p.N[n], run.count)


cdef inline void pack_row_block(
    const Backward *p, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Pack one part of a block of rows, as the weight gradient of matrix n reads them.

    A gradient like w is [x, h_prev].T @ d: x and h_prev go to tiles, and `weight_grads` packs d.  A transposed gradient
    is d.T @ [x, h_prev]: d goes to tiles, and x and h_prev to panels.
    """
    cdef RowBlock block
    cdef RowRun run
    cdef InputRow[PACK_ROWS] rows
    cdef bint is_half = holds_half(inputs[X])
    list_active_rows(&block, &p.steps, r0)
    run = runs_of(&block, part, parts)
    while next_run(&run, &block):
        find_input_rows(p, inputs, n, True, &block, &run, rows)
        pack_input_rows(p, scratch, n, True, is_half, rows, &block, &run)
        find_input_rows(p, inputs, n, False, &block, &run, rows)
        pack_input_rows(p, scratch, n, False, is_half, rows, &block, &run)
        if p.transposed:
            pack_d_rows(p, scratch, n, &block, &run)


cdef inline real *weight_grad_of(
    const Backward *p, const real *scratch, const Array *outputs, int n, bint of_x
) noexcept nogil:
    """Return where the gradient of matrix n is summed, its rows for x or those for h.

    That is the output or, in float32, scratch if the output is float16.
    """
    cdef Py_ssize_t offset = 0 if of_x else p.x_rows[n] * p.N[n]
    if holds_half(outputs[W_GRAD]):
        return <real *> scratch + p.start[TRANSPOSED] + p.w_grad_at[n] + offset
    elif p.transposed:
        return <real *> outputs[(W_GRAD if of_x else W_H_GRAD) + n].data
    else:
        return <real *> outputs[W_GRAD + n].data + offset


cdef inline void add_transposed_grad(
    const Backward *p, real *out, const real *tiles, const real *panels, Py_ssize_t N, Py_ssize_t M,
    const RowBlock *block, bint is_first, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Add a block of rows to one part of the rows of a transposed gradient, or set these if the block is the first one.

    out : [N,M], where `weight_grad_of` says
    tiles : the block's columns of d, N of them, packed
    panels : the block of x or h_prev, M columns, packed
    """
    cdef Py_ssize_t L = lanes_of(out), tile = part_start(count_tiles(N), part, parts), lines = lines_in(out, M), j
    cdef Py_ssize_t rows = min(part_start(count_tiles(N), part + 1, parts) * ROWS, N) - tile * ROWS, first
    for j in range(count_panels(lines)):
        first = j * PANEL_LINES * L
        add_weight_grad_rows(out + tile * ROWS * M + first, M, rows, tiles + tile * p.tile_stride, p.tile_stride,
                             panels + first * block.rows, panel_lines(lines, j), M - first, block, is_first)


cdef inline void transposed_grads(
    const Backward *p, const Array *outputs, real *scratch, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Add a block of rows to one part of the rows of matrix n's transposed gradient d.T @ [x, h_prev], and of d's sums.

    The gradients to the weights for x and for h are arrays of their own, [N,I] and [N,H].
    """
    cdef Py_ssize_t N = p.N[n], lines = lines_in(scratch, N)
    cdef const real *panels = scratch + p.start[PANELS]
    cdef const real *x_tiles = scratch + p.start[X_TILES]
    cdef const real *h_tiles = scratch + p.start[H_TILES if p.separate[n] else X_TILES]
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    add_transposed_grad(p, weight_grad_of(p, scratch, outputs, n, True), x_tiles, panels, N, p.x_rows[n], &block,
                        r0 == 0, part, parts)
    add_transposed_grad(p, weight_grad_of(p, scratch, outputs, n, False), h_tiles,
                        panels + h_panels_offset(p, block.rows), N, p.h_rows[n], &block, r0 == 0, part, parts)
    add_bias_grads(p, outputs, scratch, part_start(lines, part, parts), part_start(lines, part + 1, parts), n, r0,
                   &block)


cdef inline void add_bias_grads(
    const Backward *p, const Array *outputs, real *scratch, Py_ssize_t line0, Py_ssize_t line1, int n, Py_ssize_t r0,
    const RowBlock *block
) noexcept nogil:
    """Add a block of rows of d to the lines line0 to line1 of matrix n's bias gradient.

    Sums are in scratch until the last block.  If d is separate for x and h, h has a bias of its own; a projection has
    none.
    """
    cdef Py_ssize_t L = lanes_of(scratch), N = p.N[n], first = line0 * L, columns = min(line1 * L, N) - first, l
    cdef const real *d = scratch + p.start[D] + first
    cdef double *sums = <double *> (scratch + p.start[SUMS])
    cdef double *sums_h = sums + lines_in(scratch, N) * L
    cdef bint separate = p.separate[n]
    if columns <= 0 or outputs[BIAS_GRAD + n].data is NULL:
        return
    if r0 == 0:
        clear(sums + first, (line1 - line0) * L)
        if separate:
            clear(sums_h + first, (line1 - line0) * L)
    add_column_sums(sums + first, d + p.column[n], p.Ns, columns, block)
    if separate:
        add_column_sums(sums_h + first, d + p.h_column[n], p.Ns, columns, block)
    if r0 + block.rows == p.steps.T * p.B:
        for l in range(first, first + columns):
            store_value(at(outputs[BIAS_GRAD + n], l), <real> sums[l])
            if separate:
                store_value(at(outputs[BIAS_HC_GRAD], l), <real> sums_h[l])


cdef inline void weight_grads(
    const Backward *p, const Array *outputs, real *scratch, Py_ssize_t part, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """Add a block of rows to one part of the columns of matrix n's gradient [x, h_prev].T @ d, and of its bias."""
    cdef Py_ssize_t L = lanes_of(scratch), rows = min(<Py_ssize_t> ROW_BLOCK, p.steps.T * p.B), N = p.N[n]
    cdef Py_ssize_t all_lines = lines_in(scratch, N), end = part_start(all_lines, part + 1, parts), lines, left
    cdef Py_ssize_t line = part_start(all_lines, part, parts)
    cdef const real *d = scratch + p.start[D] + p.column[n]
    cdef const real *d_h = scratch + p.start[D] + p.h_column[n]
    cdef const real *x_tiles = scratch + p.start[X_TILES]
    cdef const real *h_tiles = scratch + p.start[H_TILES]
    cdef real *panel = scratch + p.start[PANELS] + part * rows * PANEL_LINES * L
    cdef real *out = weight_grad_of(p, scratch, outputs, n, True)
    cdef real *out_h = weight_grad_of(p, scratch, outputs, n, False)
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    while line < end:
        lines, left = min(<Py_ssize_t> PANEL_LINES, end - line), N - line * L
        pack_columns(panel, lines, &block, d + line * L, p.Ns, left)
        add_bias_grads(p, outputs, scratch, line, line + lines, n, r0, &block)
        add_weight_grad_rows(out + line * L, N, p.x_rows[n], x_tiles, p.tile_stride, panel, lines, left, &block,
                             r0 == 0)
        if p.separate[n]:
            pack_columns(panel, lines, &block, d_h + line * L, p.Ns, left)
        add_weight_grad_rows(out_h + line * L, N, p.h_rows[n], h_tiles, p.tile_stride, panel, lines, left, &block,
                             r0 == 0)
        line += lines


cdef inline void store_weight_grads(
    const Backward *p, const Cell *c, const Array *outputs, real *scratch, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Store one part of the rows of the weight gradients of float16.

    The gradient of a matrix is copied as x_rows + h_rows pieces of N values; PyTorch's two arrays have as many.
    """
    cdef Py_ssize_t rows, i
    cdef Array dst
    cdef int n
    for n in range(matrices_of(c)):
        rows = p.x_rows[n] + p.h_rows[n]
        for i in range(part_start(rows, part, parts), part_start(rows, part + 1, parts)):
            if p.transposed and i >= p.x_rows[n]:
                dst = at(outputs[W_H_GRAD + n], (i - p.x_rows[n]) * p.N[n])
            else:
                dst = at(outputs[W_GRAD + n], i * p.N[n])
            store_row(dst, scratch + p.start[TRANSPOSED] + p.w_grad_at[n] + i * p.N[n], p.N[n])


cdef inline void all_weight_grads(
    const Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch
) noexcept nogil:
    """Compute all gradients of weights and biases, where there is only one part."""
    cdef Py_ssize_t r0
    cdef int n
    for n in range(matrices_of(c)):
        r0 = 0
        while r0 < p.steps.T * p.B:
            pack_row_block(p, inputs, scratch, 0, 1, n, r0)
            if p.transposed:
                transposed_grads(p, outputs, scratch, 0, 1, n, r0)
            else:
                weight_grads(p, outputs, scratch, 0, 1, n, r0)
            r0 += ROW_BLOCK
    if holds_half(outputs[W_GRAD]):
        store_weight_grads(p, c, outputs, scratch, 0, 1)


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long backward(
    const Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch
) noexcept nogil:
    """Run the backward pass; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end, rows = p.steps.T * p.B
    # In the parallel region each thread has its own k, r0 and n; there, Cython would take `k -= 1` for a reduction.
    cdef Py_ssize_t k = p.steps.T - 1, r0 = 0
    cdef int n = 0
    cdef bint has_weight_grads = outputs[W_GRAD].data is not NULL
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_gradients(p, c, inputs, scratch, 0, 1)
        if p.packs_all:
            pack_transposed_weights(p, c, inputs, scratch, 0, 1)
        all_steps_back(p, c, inputs, scratch, 0)
        if p.packs_all:
            first_state_grads(p, c, outputs, scratch, 0)
            x_grads(p, c, outputs, scratch, 0, 1)
        else:
            single_step_grads(p, c, inputs, outputs, scratch, 0, 1)
        if c.traits.store_remaining_grads is not NULL:
            c.traits.store_remaining_grads(p, c, inputs, outputs, scratch, 0, 1)
        if has_weight_grads:
            all_weight_grads(p, c, inputs, outputs, scratch)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, end_part, schedule="static"):
            load_gradients(p, c, inputs, scratch, part, parts)
        if p.packs_all:
            for part in prange(first, end_part, schedule="static"):
                pack_transposed_weights(p, c, inputs, scratch, part, parts)
        barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, end_part, schedule="static"):
                all_steps_back(p, c, inputs, scratch, part)
        else:
            while k >= 0:
                for part in prange(first, end_part, schedule="static"):
                    state_grads(p, c, inputs, scratch, part, k)
                group_barrier(&team)
                if products_of(c) > 1:
                    for part in prange(first, end_part, schedule="static"):
                        second_grads(p, c, inputs, scratch, part, k)
                    group_barrier(&team)
                k = k - 1
        if p.packs_all:
            for part in prange(first, end_part, schedule="static"):
                first_state_grads(p, c, outputs, scratch, part)
            barrier(&team)
            for part in prange(first, end_part, schedule="static"):
                x_grads(p, c, outputs, scratch, part, parts)
        else:
            for part in prange(first, end_part, schedule="static"):
                single_step_grads(p, c, inputs, outputs, scratch, part, parts)
            barrier(&team)
        if c.traits.store_remaining_grads is not NULL:
            for part in prange(first, end_part, schedule="static"):
                c.traits.store_remaining_grads(p, c, inputs, outputs, scratch, part, parts)
        while has_weight_grads and n < matrices_of(c):
            r0 = 0
            while r0 < rows:
                for part in prange(first, end_part, schedule="static"):
                    pack_row_block(p, inputs, scratch, part, parts, n, r0)
                barrier(&team)
                for part in prange(first, end_part, schedule="static"):
                    if p.transposed:
                        transposed_grads(p, outputs, scratch, part, parts, n, r0)
                    else:
                        weight_grads(p, outputs, scratch, part, parts, n, r0)
                barrier(&team)
                r0 = r0 + ROW_BLOCK
            n = n + 1
        if has_weight_grads and holds_half(outputs[W_GRAD]):
            for part in prange(first, end_part, schedule="static"):
                store_weight_grads(p, c, outputs, scratch, part, parts)
        barrier(&team)  # results do not need it, but waiting here is short and measured, unlike in the runtime
    return measured_cost(&team)


cdef inline long long run_backward(
    Backward *p, const Cell *c, const Array *inputs, const Array *outputs, void *scratch, int ready
) noexcept nogil:
    """Run `backward`.

    p : changed to no more threads than are `ready`
    scratch : the workspace, in bytes; it begins at a cache line
    """
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    nanoseconds = backward(p, c, inputs, outputs, <real *> scratch)
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline long long run_layer_backward(
    const Backward *plan, const Cell *c, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """Run the backward pass of a layer on at most `ready` threads; return the nanoseconds that having several cost."""
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    cdef Backward p = plan[0]
    cdef int i
    for i in range(c.traits.saved):
        inputs[OUT_H + 1 + i] = at(array_of(a.saved, c.is_half), i * p.steps.T * p.B * p.H)
    inputs[X], inputs[OUT_H] = array_of(a.x, c.is_half), array_of(a.y, c.is_half)
    inputs[H_GRAD], outputs[X_GRAD] = array_of(a.y_grad, c.is_half), array_of(a.x_grad, c.is_half)
    inputs[CS_GRAD], outputs[D_C_BAR] = no_array(), no_array()  # which only ops have
    set_states(c, a.initial_state, &inputs[H_PREV])
    set_states(c, a.last_state_grad, &inputs[H_LAST_GRAD])
    set_states(c, <const void *const *> a.initial_state_grad, &outputs[H_PREV_GRAD])
    if c.transposed:
        set_torch_weights(c, p.I, p.H, a.weights, inputs)
        set_torch_weights(c, p.I, p.H, <const void *const *> a.weight_grads, &outputs[GRAD])
        p.x_layout, p.h_layout, p.accumulate_x_grad = a.x_layout, a.y_layout, a.accumulate_x_grad
        if a.x_grad is NULL:
            p.x_panel_count = 0
    else:
        set_weights(c, a.weights, inputs)
        set_weights(c, <const void *const *> a.weight_grads, &outputs[GRAD])
    p.d_y_layout, p.d_x_layout, p.steps.reverse = a.y_grad_layout, a.x_grad_layout, a.reverse
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        use_backward_step_mask(&p, a.step_mask, scratch)
        set_reset_states(c, a, &p.steps, True)
    return run_backward(&p, c, inputs, outputs, scratch, ready)
