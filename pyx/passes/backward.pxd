"""The backward pass of all cells: `backward` is the list of its phases, and where threads wait for each other.

    load incoming gradients, pack w.T  ->  for each step, the last one first: of a projected LSTM d_h, then for all
    gate gradients d of the step  ->  h_prev_grad, x_grad  ->  gradients of weights and biases

The functions above it are what one part does in a phase.  d has a row for every (t, b), with the gradients of the
pre-activations side by side: dicfo of an LSTM, and d_h if that is projected; d_r_bar, d_u_bar, d_c_bar of a GRU, and
d_hc if it resets after the product; d_h_bar of a plain RNN.  `backward_lines` in each cell's file computes them.
"""
from cython.parallel cimport parallel, prange

from cell cimport cell
from cells.lstm cimport load_peepholes, peephole_grads
from cells.types cimport Gru, Lstm, row_of
from formulas cimport backward_lines
from passes.arrays cimport Pass
from passes.gradients cimport (
    PANEL_LINES, RowBlock, add_column_sums, add_weight_grad_rows, compute_x_grad_panel, compute_x_grad_part,
    count_panels, count_tiles, lines_in_panel, list_active_rows, pack_columns, pack_row, pack_tiles,
    pack_transposed_panel
)
from passes.operands cimport (
    BIAS_GRAD, BIAS_HC_GRAD, CS_GRAD, CS_LAST_GRAD, CS_PREV_GRAD, D_C_BAR, D_R_BAR_U_BAR, GRAD, H_GRAD, H_LAST_GRAD,
    H_PREV, H_PREV_GRAD, INPUTS, OUT_CO, OUT_H, OUT_O, OUT_R, OUTPUTS, W, W_GRAD, W_H, W_H_GRAD, X, X_GRAD, set_states,
    set_torch_weights, set_weights
)
from passes.steps cimport (
    RESET, active_end, clear_finished_rows, current_row, has_flag, previous_row, row_of_slot, step_at
)
from product.half cimport half
from product.panels cimport MATRICES
from product.real cimport real
from product.tile cimport (
    BLOCK, DOUBLE, GROUP_TILES, HALF, LINES, PACK_ROWS, ROW_BLOCK, ROWS, TILE_SIZE, add_panel_product, clear, lanes_of,
    lines_in, load_row, pack_rows, store, store_line, store_row, store_value, tile_group_height
)
from schedule.cost cimport packer, parts_of, threads_of, use_threads
from schedule.plan cimport (
    D, D_CS, D_H, H_TILES, PANELS, PEEPHOLES, SUMS, TRANSPOSED, X_TILES, Backward, Share, matrices_of, products_of,
    projects, share_of, state_matrices_of, use_step_mask_back
)
from schedule.team cimport Team, adopt_rounding, barrier, group_barrier, measured_cost, share, start_team
from schedule.workspace cimport guard_zones, release_zones


# ----------------------------------------------------------------------------------------------------- before the steps
cdef inline void load_carry(
    const Backward *p, real *carry, Py_ssize_t stride, const store *last_grad, Py_ssize_t size, Py_ssize_t b
) noexcept nogil:
    """Load the gradient of the state after the last step, for the row in slot b; NULL stands for zeros."""
    if last_grad is NULL:
        clear(carry + b * stride, stride)
    else:
        load_row(carry + b * stride, last_grad + row_of_slot(&p.steps, b) * size, size)


cdef inline void load_gradients(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the rows, and for the LSTM one part of the peepholes."""
    cdef Py_ssize_t b, j
    for b in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
        load_carry(p, scratch + p.start[D_H], p.Ps, inputs[H_LAST_GRAD], p.P, b)
        if row_of(c).states > 1:
            load_carry(p, scratch + p.start[D_CS], p.Hs, inputs[CS_LAST_GRAD], p.H, b)
    if cell is Lstm:
        if c.peephole:
            for j in range(share(p.J, number, parts), share(p.J, number + 1, parts)):
                load_peepholes(c, scratch + p.start[PEEPHOLES], inputs, p.H, j)


cdef inline void pack_w(
    const Backward *p, const store **inputs, real *panel, int n, bint of_x, Py_ssize_t j
) noexcept nogil:
    """Pack panel j of w.T, for matrix n of the weights and its rows for x or for h."""
    cdef Py_ssize_t rows = p.x_rows[n] if of_x else p.h_rows[n], at = j * PANEL_LINES * p.L, left = rows - at
    if p.transposed:
        pack_rows(panel, min(<Py_ssize_t> PANEL_LINES, lines_in(panel, left)), inputs[(W if of_x else W_H) + n] + at,
                  rows, left, p.N[n])
    else:
        pack_transposed_panel(panel, inputs[W + n] + (0 if of_x else p.x_rows[n] * p.N[n]), p.N[n], rows, j)


cdef inline void pack_weights(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the panels of w.T; where there are few, not the same part packs those for h and those for x.  Each
    part packing all panels for itself gained nothing for an LSTM."""
    cdef Py_ssize_t first = packer(&p.grid, number), last = parts - 1 - first, panels, j
    cdef int n
    for n in range(matrices_of(c)):
        for j in range(share(p.h_panels[n], first, parts), share(p.h_panels[n], first + 1, parts)):
            pack_w(p, inputs, scratch + p.start[TRANSPOSED] + p.w_h[n] + j * p.panel[n], n, False, j)
        panels = p.x_panels if p.x_rows[n] > 0 else 0
        for j in range(share(panels, last, parts), share(panels, last + 1, parts)):
            pack_w(p, inputs, scratch + p.start[TRANSPOSED] + p.w_x[n] + j * p.panel[n], n, True, j)


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline real *own_panel(
    const Backward *p, const cell *c, real *scratch, Py_ssize_t number, int n
) noexcept nogil:
    """Where a part packs one panel after the other in a single step."""
    cdef Py_ssize_t size = p.panel[0] + p.panel[1] if matrices_of(c) > 1 else p.panel[0]
    return scratch + p.start[TRANSPOSED] + p.w_h[0] + number * size + (p.panel[0] if n else 0)


cdef inline const real *h_panel(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, int n, Py_ssize_t j
) noexcept nogil:
    """Panel j of matrix n's transposed weights for h; a single step packs it first."""
    cdef real *panel
    if p.packs_all:
        return scratch + p.start[TRANSPOSED] + p.w_h[n] + j * p.panel[n]
    panel = own_panel(p, c, scratch, number, n)
    pack_w(p, inputs, panel, n, False, j)
    return panel


cdef inline const real *next_panel(const Backward *p, const real *panel, int n) noexcept nogil:
    """What to fetch during a product with a panel of matrix n: NULL for nothing."""
    if p.prefetches:
        return panel + p.panel[n]
    return <const real *> NULL


cdef inline void carried_grads(
    const Backward *p, const cell *c, const real *scratch, const real **panels, Py_ssize_t j, Py_ssize_t k,
    Py_ssize_t b, Py_ssize_t rows, Py_ssize_t first, real *acc
) noexcept nogil:
    """acc := the gradient of h after step k that the steps after it give: what is carried, and d @ w.T of step k + 1.

    k is the number by which a step is processed, j a panel.  `acc` has a tile's lines for each of the slots b to
    b + rows, and `panels` panel j of the matrices of `state_matrices_of`; `first` is the first row's number for
    `product`."""
    cdef Py_ssize_t L = lanes_of(scratch), lines = lines_in_panel(p.JP, j), q, s, l
    cdef Py_ssize_t taking = active_end(&p.steps, k + 1, b, b + rows) - b
    cdef const real *d = scratch + p.start[D] + (step_at(&p.steps, k + 1) * p.B + b) * p.Ns
    cdef const real *d_h
    cdef int n
    for q in range(rows):
        d_h = scratch + p.start[D_H] + (b + q) * p.Ps + j * PANEL_LINES * L
        for s in range(lines):
            for l in range(L):
                acc[(q * LINES + s) * L + l] = d_h[s * L + l]
    if taking > 0:
        for n in range(state_matrices_of(c)):
            add_panel_product(acc, taking, lines, d + p.h_column[n], p.Ns, panels[n], p.N[n],
                              next_panel(p, panels[n], n), first)
    for q in range(rows):
        if has_flag(&p.steps, k + 1, b + q, RESET):  # step k + 1 did not see the state of step k
            clear(acc + q * LINES * L, lines * L)


cdef inline void state_grad_rows(
    const Backward *p, const cell *c, const store **inputs, real *scratch, const real **panels, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """The gradient of h after the step processed as number k, and what the cell makes of it: panel j, slots b to `end`.
    A row that takes part in the next step alone carries the gradient on, and one that takes part in neither keeps
    what it carries."""
    cdef Py_ssize_t L = lanes_of(scratch), here = active_end(&p.steps, k, b, end), first = 0, rows, q, l
    cdef Py_ssize_t j0 = j * PANEL_LINES, j1 = j0 + lines_in_panel(p.JP, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    end = max(here, active_end(&p.steps, k + 1, b, end))
    while b < end:
        rows = tile_group_height(end - b)
        carried_grads(p, c, scratch, panels, j, k, b, rows, first, acc)
        for q in range(rows):
            if b + q < here:
                backward_lines(p, c, 0, inputs, j0, j1, k, b + q, acc + q * LINES * L, scratch)
            else:
                for l in range((j1 - j0) * L):
                    scratch[p.start[D_H] + (b + q) * p.Ps + j0 * L + l] = acc[q * LINES * L + l]
        b += rows
        first += GROUP_TILES


cdef inline void first_state_grad_rows(
    const Backward *p, const cell *c, store **outputs, real *scratch, const real **panels, Py_ssize_t j, Py_ssize_t b,
    Py_ssize_t end
) noexcept nogil:
    """h_prev_grad, the gradient of the state before the first step: panel j, slots b to `end`."""
    cdef Py_ssize_t L = lanes_of(scratch), first = 0, rows, q, s, at
    cdef real[GROUP_TILES * TILE_SIZE] acc
    while b < end:
        rows = tile_group_height(end - b)
        carried_grads(p, c, scratch, panels, j, -1, b, rows, first, acc)
        for q in range(rows):
            for s in range(lines_in_panel(p.JP, j)):
                at = (j * PANEL_LINES + s) * L
                store_line(outputs[H_PREV_GRAD] + row_of_slot(&p.steps, b + q) * p.P + at, acc + (q * LINES + s) * L,
                           p.P - at)
        b += rows
        first += GROUP_TILES


cdef inline void second_grad_rows(
    const Backward *p, const cell *c, const store **inputs, real *scratch, const real *panel, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """The second product of the step processed as number k, d @ w.T with the second matrix of weights, and what the
    cell makes of it: panel j, slots b to `end`."""
    cdef Py_ssize_t L = lanes_of(scratch), first = 0, rows, q, lines = lines_in_panel(p.J, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef const real *d = scratch + p.start[D] + step_at(&p.steps, k) * p.B * p.Ns + p.column[1]
    end = active_end(&p.steps, k, b, end)
    while b < end:
        rows = tile_group_height(end - b)
        clear(acc, rows * LINES * L)
        add_panel_product(acc, rows, lines, d + b * p.Ns, p.Ns, panel, p.N[1], next_panel(p, panel, 1), first)
        for q in range(rows):
            backward_lines(p, c, 1, inputs, j * PANEL_LINES, j * PANEL_LINES + lines, k, b + q, acc + q * LINES * L,
                           scratch)
        b += rows
        first += GROUP_TILES


cdef inline void state_grads(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t k
) noexcept nogil:
    """One part of `state_grad_rows` for the step processed as number k."""
    cdef Share part = share_of(p, number, p.h_panels[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    if not p.packs_all:  # a single step has no product here, and rows divide more evenly than panels
        part.j0, part.j1 = 0, p.h_panels[0]
        part.b0, part.b1 = share(p.B, number, parts_of(&p.grid)), share(p.B, number + 1, parts_of(&p.grid))
    for j in range(part.j0, part.j1):
        for n in range(state_matrices_of(c)):
            panels[n] = scratch + p.start[TRANSPOSED] + p.w_h[n] + j * p.panel[n]
        state_grad_rows(p, c, inputs, scratch, panels, j, k, part.b0, part.b1)


cdef inline void first_state_grads(
    const Backward *p, const cell *c, store **outputs, real *scratch, Py_ssize_t number
) noexcept nogil:
    """One part of `first_state_grad_rows`, with weights that are packed."""
    cdef Share part = share_of(p, number, p.h_panels[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    for j in range(part.j0, part.j1):
        for n in range(state_matrices_of(c)):
            panels[n] = scratch + p.start[TRANSPOSED] + p.w_h[n] + j * p.panel[n]
        first_state_grad_rows(p, c, outputs, scratch, panels, j, part.b0, part.b1)


cdef inline void second_grads(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t k
) noexcept nogil:
    """One part of `second_grad_rows` for the step processed as number k."""
    cdef Share part = share_of(p, number, p.h_panels[1])
    cdef Py_ssize_t j
    for j in range(part.j0, part.j1):
        second_grad_rows(p, c, inputs, scratch, h_panel(p, c, inputs, scratch, number, 1, j), j, k, part.b0, part.b1)


cdef inline void all_steps_back(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number
) noexcept nogil:
    """All steps of a part that needs no other part."""
    cdef Py_ssize_t k = p.steps.T - 1
    while k >= 0:
        state_grads(p, c, inputs, scratch, number, k)
        if products_of(c) > 1:
            second_grads(p, c, inputs, scratch, number, k)
        k -= 1


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void x_grads(
    const Backward *p, const cell *c, store **outputs, real *scratch, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the tiles of x_grad."""
    cdef Py_ssize_t K = 0
    cdef const real *panels = NULL
    if p.x_panels == 0:  # there are no inputs, or nobody asked for it
        return
    if matrices_of(c) > 1 and not projects(c):
        K, panels = p.N[1], scratch + p.start[TRANSPOSED] + p.w_x[1]
    compute_x_grad_part(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.grid.groups, p.I,
                        scratch + p.start[D], p.Ns, scratch + p.start[TRANSPOSED] + p.w_x[0], p.N[0], panels, K, number,
                        parts)


cdef inline void single_step_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *scratch, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of h_prev_grad and x_grad of a single step, which packs each panel when it uses it."""
    cdef Py_ssize_t h_panels = p.h_panels[0], j, k, K = 0
    cdef Share part = share_of(p, number, h_panels + p.x_panels)
    cdef real *panel = own_panel(p, c, scratch, number, 0)
    cdef real *panel2 = own_panel(p, c, scratch, number, 1)
    cdef const real *panels[MATRICES]
    cdef int n
    if matrices_of(c) > 1:
        K = p.N[1]
    if p.x_panels > 0 and not p.accumulate_x_grad:
        clear_finished_rows(&p.steps, outputs[X_GRAD], &p.d_x_layout, p.I, number, parts)
    for j in range(part.j0, part.j1):
        if j < h_panels:
            for n in range(state_matrices_of(c)):
                panels[n] = h_panel(p, c, inputs, scratch, number, n, j)
            first_state_grad_rows(p, c, outputs, scratch, panels, j, part.b0, part.b1)
            continue
        k = j - h_panels
        pack_w(p, inputs, panel, 0, True, k)
        if K > 0:
            pack_w(p, inputs, panel2, 1, True, k)
        compute_x_grad_panel(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.I, scratch + p.start[D],
                             p.Ns, part.b0, active_end(&p.steps, 0, part.b0, part.b1), panel, p.N[0], panel2, K, k)


cdef inline void last_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *scratch, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of cs_prev_grad and of the peepholes' gradients, or of what `GRUBlockCellGrad` returns of d."""
    cdef Py_ssize_t b, j
    cdef real *d = scratch + p.start[D]
    if cell is Lstm:
        for b in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
            store_row(outputs[CS_PREV_GRAD] + row_of_slot(&p.steps, b) * p.H, scratch + p.start[D_CS] + b * p.Hs, p.H)
        for j in range(share(p.J, number, parts), share(p.J, number + 1, parts) if c.peephole else 0):
            peephole_grads(p, c, inputs, outputs, d, j)
    elif cell is Gru:
        for b in range(share(p.B, number, parts), share(p.B, number + 1, parts) if outputs[D_C_BAR] is not NULL else 0):
            store_row(outputs[D_R_BAR_U_BAR] + b * p.N[0], d + b * p.Ns, p.N[0])
            store_row(outputs[D_C_BAR] + b * p.N[1], d + b * p.Ns + p.column[1], p.N[1])


# -------------------------------------------------------------------------------------------------- weights and biases
cdef inline Py_ssize_t h_panels_at(const Backward *p, Py_ssize_t kb) noexcept nogil:
    """Where the panels of h begin, behind those of x, for a block of kb rows."""
    return count_panels((p.I + p.L - 1) // p.L) * PANEL_LINES * p.L * kb


cdef inline void pack_block(
    const Backward *p, const cell *c, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t parts, int n,
    Py_ssize_t r0
) noexcept nogil:
    """One part of the rows of x and h_prev (for a second product h_prev * r, or o * co), of a block of rows from r0 on;
    if transposed of d too."""
    cdef RowBlock block
    cdef Py_ssize_t k, end, last, chain, m, q, at, t, b
    cdef const store *x[PACK_ROWS]
    cdef const store *h[PACK_ROWS]
    cdef const store *factor[PACK_ROWS]
    cdef const store **scales = NULL
    cdef const store *state = NULL  # what a second product reads instead of h, [T,B,H]
    cdef const store *scale = NULL  # and by what it is multiplied
    cdef const real *d[PACK_ROWS]
    cdef const real *d_h[PACK_ROWS]
    if n == 1 and projects(c):
        state, scale = inputs[OUT_O], inputs[OUT_CO]
    elif n == 1 and products_of(c) > 1:
        scale = inputs[OUT_R]
    if scale is not NULL:
        scales = factor
    list_active_rows(&block, &p.steps, r0)
    k, last = share(block.active, number, parts), share(block.active, number + 1, parts)
    for chain in range(block.chains):
        end = min(last, block.count[chain])  # both k and `last` count from the chain's first row on
        while k < end:
            m = min(<Py_ssize_t> PACK_ROWS, end - k)
            at = chain * BLOCK + k
            for q in range(m):
                t, b = block.t[at + q], block.b[at + q]
                x[q] = current_row(&p.steps, inputs[X], &p.x_layout, t, b)
                h[q] = previous_row(&p.steps, inputs[H_PREV], p.P, inputs[OUT_H], &p.h_layout, t, b)
                d[q] = scratch + p.start[D] + block.d_row[at + q] * p.Ns + p.column[n]
                d_h[q] = scratch + p.start[D] + block.d_row[at + q] * p.Ns + p.h_column[n]
                if state is not NULL:
                    h[q] = state + (t * p.B + b) * p.H
                if scale is not NULL:
                    factor[q] = scale + (t * p.B + b) * p.H
            if p.transposed:
                pack_tiles(scratch + p.start[X_TILES] + at * ROWS, p.tile_gap, d, <const real **> NULL, p.N[n], m)
                if p.h_column[n] != p.column[n]:
                    pack_tiles(scratch + p.start[H_TILES] + at * ROWS, p.tile_gap, d_h, <const real **> NULL, p.N[n], m)
                for q in range(m):
                    pack_row(scratch + p.start[PANELS], x[q], <const store *> NULL, p.x_rows[n], &block, chain, k + q)
                    pack_row(scratch + p.start[PANELS] + h_panels_at(p, block.rows), h[q],
                             <const store *> NULL if scales is NULL else scales[q], p.h_rows[n], &block, chain, k + q)
            else:
                pack_tiles(scratch + p.start[X_TILES] + at * ROWS, p.tile_gap, x, <const store **> NULL, p.x_rows[n], m)
                pack_tiles(scratch + p.start[H_TILES] + at * ROWS, p.tile_gap, h, scales, p.h_rows[n], m)
            k += m
        k, last = max(k - block.count[chain], <Py_ssize_t> 0), last - block.count[chain]


cdef inline real *weight_grad_of(
    const Backward *p, const real *scratch, store **outputs, int n, bint of_x
) noexcept nogil:
    """Where it is summed, in its rows for x or in those for h: in the output, or for float16 in scratch, in float32."""
    cdef Py_ssize_t h = 0 if of_x else p.x_rows[n] * p.N[n]
    if store is half:
        return <real *> scratch + p.start[TRANSPOSED] + p.w_grad[n] + h
    elif p.transposed:
        return <real *> outputs[(W_GRAD if of_x else W_H_GRAD) + n]
    else:
        return <real *> outputs[W_GRAD + n] + h


cdef inline void transposed_grad(
    const Backward *p, real *out, const real *tiles, const real *panels, Py_ssize_t N, Py_ssize_t M,
    const RowBlock *block, bint first, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the rows of out [N,M], d.T @ inputs: add a block of rows."""
    cdef Py_ssize_t L = lanes_of(out), j = share(count_tiles(N), number, parts), lines = lines_in(out, M), n = 0, m
    cdef Py_ssize_t at = j * ROWS, rows = min(share(count_tiles(N), number + 1, parts) * ROWS, N) - at
    while n < lines:
        m = min(<Py_ssize_t> PANEL_LINES, lines - n)
        add_weight_grad_rows(out + at * M + n * L, M, rows, tiles + j * p.tile_gap, p.tile_gap,
                             panels + n * L * block.rows, m, M - n * L, block, first)
        n += m


cdef inline void transposed_grads(
    const Backward *p, store **outputs, real *scratch, Py_ssize_t number, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """As `weight_grads`, for the transposed gradients: one part of their rows."""
    cdef Py_ssize_t N = p.N[n], lines = lines_in(scratch, N)
    cdef bint apart = p.h_column[n] != p.column[n]
    cdef const real *panels = scratch + p.start[PANELS]
    cdef const real *x_tiles = scratch + p.start[X_TILES]
    cdef const real *h_tiles = scratch + p.start[H_TILES if apart else X_TILES]
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    transposed_grad(p, weight_grad_of(p, scratch, outputs, n, True), x_tiles, panels, N, p.x_rows[n], &block, r0 == 0,
                    number, parts)
    transposed_grad(p, weight_grad_of(p, scratch, outputs, n, False), h_tiles, panels + h_panels_at(p, block.rows), N,
                    p.h_rows[n], &block, r0 == 0, number, parts)
    bias_grads(p, outputs, scratch, share(lines, number, parts), share(lines, number + 1, parts), n, r0, &block)


cdef inline void bias_grads(
    const Backward *p, store **outputs, real *scratch, Py_ssize_t j, Py_ssize_t end, int n, Py_ssize_t r0,
    const RowBlock *block
) noexcept nogil:
    """Lines j to end of the bias gradient of matrix n, the sum of d: add a block of rows, from r0 on.  The rows for h
    may have a bias of their own, with d in another column.  A projection has none."""
    cdef Py_ssize_t L = lanes_of(scratch), N = p.N[n], at = j * L, columns = min(end * L, N) - at, l
    cdef const real *d = scratch + p.start[D] + at
    cdef double *sums = <double *> (scratch + p.start[SUMS])
    cdef double *sums_h = sums + lines_in(scratch, N) * L
    cdef bint apart = p.h_column[n] != p.column[n]
    if columns <= 0 or outputs[BIAS_GRAD + n] is NULL:
        return
    if r0 == 0:
        clear(sums + at, (end - j) * L)
        if apart:
            clear(sums_h + at, (end - j) * L)
    add_column_sums(sums + at, d + p.column[n], p.Ns, columns, block)
    if apart:
        add_column_sums(sums_h + at, d + p.h_column[n], p.Ns, columns, block)
    if r0 + block.rows == p.steps.T * p.B:
        for l in range(at, at + columns):
            store_value(outputs[BIAS_GRAD + n] + l, <real> sums[l])
            if apart:
                store_value(outputs[BIAS_HC_GRAD] + l, <real> sums_h[l])


cdef inline void weight_grads(
    const Backward *p, store **outputs, real *scratch, Py_ssize_t number, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """One part of the columns of the gradient of matrix n of the weights, [x, h_prev].T @ d, and of the bias: add a
    block of rows, from r0 on.  For the rows for h d may be in another column."""
    cdef Py_ssize_t L = lanes_of(scratch), rows = min(<Py_ssize_t> ROW_BLOCK, p.steps.T * p.B), N = p.N[n], m
    cdef Py_ssize_t lines = lines_in(scratch, N), j = share(lines, number, parts), end = share(lines, number + 1, parts)
    cdef const real *d = scratch + p.start[D] + p.column[n]
    cdef const real *d_h = scratch + p.start[D] + p.h_column[n]
    cdef const real *x_tiles = scratch + p.start[X_TILES]
    cdef const real *h_tiles = scratch + p.start[H_TILES]
    cdef real *panel = scratch + p.start[PANELS] + number * rows * PANEL_LINES * L
    cdef real *out = weight_grad_of(p, scratch, outputs, n, True)
    cdef real *out_h = weight_grad_of(p, scratch, outputs, n, False)
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    while j < end:
        m = min(<Py_ssize_t> PANEL_LINES, end - j)
        pack_columns(panel, m, &block, d + j * L, p.Ns, N - j * L)
        bias_grads(p, outputs, scratch, j, j + m, n, r0, &block)
        add_weight_grad_rows(out + j * L, N, p.x_rows[n], x_tiles, p.tile_gap, panel, m, N - j * L, &block, r0 == 0)
        if d_h != d:
            pack_columns(panel, m, &block, d_h + j * L, p.Ns, N - j * L)
        add_weight_grad_rows(out_h + j * L, N, p.h_rows[n], h_tiles, p.tile_gap, panel, m, N - j * L, &block, r0 == 0)
        j += m


cdef inline void store_weight_grads(
    const Backward *p, const cell *c, store **outputs, real *scratch, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the rows of the weight gradients of float16; transposed ones have as many values, in two arrays."""
    cdef Py_ssize_t rows, k
    cdef store *to
    cdef int n
    for n in range(matrices_of(c)):
        rows = p.x_rows[n] + p.h_rows[n]
        for k in range(share(rows, number, parts), share(rows, number + 1, parts)):
            to = outputs[W_GRAD + n] + k * p.N[n]
            if p.transposed and k >= p.x_rows[n]:
                to = outputs[W_H_GRAD + n] + (k - p.x_rows[n]) * p.N[n]
            store_row(to, scratch + p.start[TRANSPOSED] + p.w_grad[n] + k * p.N[n], p.N[n])


cdef inline void all_weight_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *scratch
) noexcept nogil:
    """All of them, if there is only one part."""
    cdef Py_ssize_t r
    cdef int n
    for n in range(matrices_of(c)):
        r = 0
        while r < p.steps.T * p.B:
            pack_block(p, c, inputs, scratch, 0, 1, n, r)
            if p.transposed:
                transposed_grads(p, outputs, scratch, 0, 1, n, r)
            else:
                weight_grads(p, outputs, scratch, 0, 1, n, r)
            r += ROW_BLOCK
    if store is half:
        store_weight_grads(p, c, outputs, scratch, 0, 1)


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long backward(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *scratch
) noexcept nogil:
    """The backward pass.  Returns the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, last = p.grid.end, rows = p.steps.T * p.B
    cdef Py_ssize_t k = p.steps.T - 1, r = 0  # in the region each thread has its own k, r and n
    cdef int n = 0
    cdef bint weights = outputs[W_GRAD] is not NULL
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_gradients(p, c, inputs, scratch, 0, 1)
        if p.packs_all:
            pack_weights(p, c, inputs, scratch, 0, 1)
        all_steps_back(p, c, inputs, scratch, 0)
        if p.packs_all:
            first_state_grads(p, c, outputs, scratch, 0)
            x_grads(p, c, outputs, scratch, 0, 1)
        else:
            single_step_grads(p, c, inputs, outputs, scratch, 0, 1)
        last_grads(p, c, inputs, outputs, scratch, 0, 1)
        if weights:
            all_weight_grads(p, c, inputs, outputs, scratch)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, last, schedule="static"):
            load_gradients(p, c, inputs, scratch, part, parts)
        if p.packs_all:
            for part in prange(first, last, schedule="static"):
                pack_weights(p, c, inputs, scratch, part, parts)
        barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, last, schedule="static"):
                all_steps_back(p, c, inputs, scratch, part)
        else:
            while k >= 0:
                for part in prange(first, last, schedule="static"):
                    state_grads(p, c, inputs, scratch, part, k)
                group_barrier(&team)
                if products_of(c) > 1:
                    for part in prange(first, last, schedule="static"):
                        second_grads(p, c, inputs, scratch, part, k)
                    group_barrier(&team)
                k = k - 1
        if p.packs_all:
            for part in prange(first, last, schedule="static"):
                first_state_grads(p, c, outputs, scratch, part)
            barrier(&team)
            for part in prange(first, last, schedule="static"):
                x_grads(p, c, outputs, scratch, part, parts)
        else:
            for part in prange(first, last, schedule="static"):
                single_step_grads(p, c, inputs, outputs, scratch, part, parts)
            barrier(&team)
        for part in prange(first, last, schedule="static"):
            last_grads(p, c, inputs, outputs, scratch, part, parts)
        while weights and n < matrices_of(c):
            r = 0
            while r < rows:
                for part in prange(first, last, schedule="static"):
                    pack_block(p, c, inputs, scratch, part, parts, n, r)
                barrier(&team)
                for part in prange(first, last, schedule="static"):
                    if p.transposed:
                        transposed_grads(p, outputs, scratch, part, parts, n, r)
                    else:
                        weight_grads(p, outputs, scratch, part, parts, n, r)
                barrier(&team)
                r = r + ROW_BLOCK
            n = n + 1
        if store is half:
            if weights:
                for part in prange(first, last, schedule="static"):
                    store_weight_grads(p, c, outputs, scratch, part, parts)
        barrier(&team)  # as in `forward`
    return measured_cost(&team)


cdef inline long long run_backward(
    Backward *p, const cell *c, const store **inputs, store **outputs, void *scratch, int ready
) noexcept nogil:
    """`backward` in the type in which arrays of this type are computed, on no more threads than are ready."""
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if store is double:
        nanoseconds = backward(p, c, inputs, outputs, <double *> scratch)
    else:
        nanoseconds = backward(p, c, inputs, outputs, <float *> scratch)
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline long long pass_backward(
    const Backward *plan, const cell *c, int ready, void *scratch, const Pass *a, const store *x
) noexcept nogil:
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Backward p = plan[0]
    cdef int k
    for k in range(row_of(c).saved):
        inputs[OUT_H + 1 + k] = <const store *> a.saved + k * p.steps.T * p.B * p.H
    inputs[X], inputs[OUT_H], inputs[H_GRAD] = x, <const store *> a.y, <const store *> a.y_grad
    outputs[X_GRAD] = <store *> a.x_grad
    inputs[CS_GRAD], outputs[D_C_BAR] = NULL, NULL  # which only ops have
    set_states(c, a.initial_state, <const void **> &inputs[H_PREV])
    set_states(c, a.last_state_grad, <const void **> &inputs[H_LAST_GRAD])
    set_states(c, <const void *const *> a.initial_state_grad, <const void **> &outputs[H_PREV_GRAD])
    if c.transposed:
        set_torch_weights(c, p.I, p.H, a.weights, inputs)
        set_torch_weights(c, p.I, p.H, <const void *const *> a.weight_grads, <const store **> outputs + GRAD)
        p.x_layout, p.h_layout, p.accumulate_x_grad = a.x_layout, a.y_layout, a.accumulate_x_grad
        if a.x_grad is NULL:
            p.x_panels = 0
    else:
        set_weights(c, a.weights, <const void **> inputs)
        set_weights(c, <const void *const *> a.weight_grads, <const void **> outputs + GRAD)
    p.d_y_layout, p.d_x_layout, p.steps.reverse = a.y_grad_layout, a.x_grad_layout, a.reverse
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        use_step_mask_back(&p, a.step_mask, scratch)
    return run_backward(&p, c, inputs, outputs, scratch, ready)


cdef inline long long run_pass_back(
    const Backward *p, const cell *c, int storage, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """The gradients of `run_pass` in forward.pxd."""
    if storage == DOUBLE:
        return pass_backward(p, c, ready, scratch, a, <const double *> a.x)
    if storage == HALF:
        return pass_backward(p, c, ready, scratch, a, <const half *> a.x)
    return pass_backward(p, c, ready, scratch, a, <const float *> a.x)
