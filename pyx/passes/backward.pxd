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
from cells.types cimport Gru, Lstm, ResetAfter, Rnn
from formulas cimport backward_lines
from passes.arrays cimport Pass
from passes.gradients cimport (
    PANEL_LINES, RowBlock, add_column_sums, add_weight_grad_rows, compute_x_grad_panel, compute_x_grad_part,
    count_panels, count_tiles, lines_in_panel, list_active_rows, pack_columns, pack_row, pack_tiles,
    pack_transposed_panel
)
from passes.operands cimport (
    BIAS_C_GRAD, BIAS_GRAD, BIAS_HC_GRAD, CS_GRAD, CS_LAST_GRAD, CS_PREV, CS_PREV_GRAD, D_C_BAR, D_R_BAR_U_BAR, H_GRAD,
    H_LAST_GRAD, H_PREV, H_PREV_GRAD, INPUTS, OUT_CO, OUT_CS, OUT_H, OUT_O, OUT_R, OUTPUTS, W, W_C, W_C_GRAD, W_C_H,
    W_C_H_GRAD, W_GRAD, W_H, W_H_GRAD, W_P, W_P_GRAD, W_P_H, W_P_H_GRAD, WCI, WCI_GRAD, X, X_GRAD
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
    PEEPHOLES, Backward, Share, matrices_of, products_of, projects, saved_of, share_of, state_matrices_of,
    use_step_mask_back
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
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the rows, and for the LSTM one part of the peepholes."""
    cdef Py_ssize_t b, j
    for b in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
        load_carry(p, work + p.d_h, p.Ps, inputs[H_LAST_GRAD], p.P, b)
    if cell is Lstm:
        for b in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
            load_carry(p, work + p.d_cs, p.Hs, inputs[CS_LAST_GRAD], p.H, b)
        if c.peephole:
            for j in range(share(p.J, number, parts), share(p.J, number + 1, parts)):
                load_peepholes(c, work + p.peep, inputs, p.H, j)


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
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the panels of w.T; where there are few, not the same part packs those for h and those for x.  Each
    part packing all panels for itself gained nothing for an LSTM."""
    cdef Py_ssize_t first = packer(&p.grid, number), last = parts - 1 - first, panels, j
    cdef int n
    for n in range(matrices_of(c)):
        for j in range(share(p.h_panels[n], first, parts), share(p.h_panels[n], first + 1, parts)):
            pack_w(p, inputs, work + p.w_h[n] + j * p.panel[n], n, False, j)
        panels = p.x_panels if p.x_rows[n] > 0 else 0
        for j in range(share(panels, last, parts), share(panels, last + 1, parts)):
            pack_w(p, inputs, work + p.w_x[n] + j * p.panel[n], n, True, j)


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline real *own_panel(
    const Backward *p, const cell *c, real *work, Py_ssize_t number, int n
) noexcept nogil:
    """Where a part packs one panel after the other in a single step."""
    cdef Py_ssize_t size = p.panel[0] + p.panel[1] if matrices_of(c) > 1 else p.panel[0]
    return work + p.w_h[0] + number * size + (p.panel[0] if n else 0)


cdef inline const real *h_panel(
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, int n, Py_ssize_t j
) noexcept nogil:
    """Panel j of matrix n's transposed weights for h; a single step packs it first."""
    cdef real *panel
    if p.packs_all:
        return work + p.w_h[n] + j * p.panel[n]
    panel = own_panel(p, c, work, number, n)
    pack_w(p, inputs, panel, n, False, j)
    return panel


cdef inline const real *next_panel(const Backward *p, const real *panel, int n) noexcept nogil:
    """What to fetch during a product with a panel of matrix n: NULL for nothing."""
    if p.prefetches:
        return panel + p.panel[n]
    return <const real *> NULL


cdef inline void carried_grads(
    const Backward *p, const cell *c, const real *work, const real **panels, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b,
    Py_ssize_t rows, Py_ssize_t first, real *acc
) noexcept nogil:
    """acc := the gradient of h after step k that the steps after it give: what is carried, and d @ w.T of step k + 1.

    k is the number by which a step is processed, j a panel.  `acc` has a tile's lines for each of the slots b to
    b + rows, and `panels` panel j of the matrices of `state_matrices_of`; `first` is the first row's number for
    `product`."""
    cdef Py_ssize_t L = lanes_of(work), lines = lines_in_panel(p.JP, j), q, s, l
    cdef Py_ssize_t taking = active_end(&p.steps, k + 1, b, b + rows) - b
    cdef const real *d = work + p.d + (step_at(&p.steps, k + 1) * p.B + b) * p.Ns
    cdef const real *d_h
    cdef int n
    for q in range(rows):
        d_h = work + p.d_h + (b + q) * p.Ps + j * PANEL_LINES * L
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
    const Backward *p, const cell *c, const store **inputs, real *work, const real **panels, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """The gradient of h after the step processed as number k, and what the cell makes of it: panel j, slots b to `end`.
    A row that takes part in the next step alone carries the gradient on, and one that takes part in neither keeps
    what it carries."""
    cdef Py_ssize_t L = lanes_of(work), here = active_end(&p.steps, k, b, end), first = 0, rows, q, l
    cdef Py_ssize_t j0 = j * PANEL_LINES, j1 = j0 + lines_in_panel(p.JP, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    end = max(here, active_end(&p.steps, k + 1, b, end))
    while b < end:
        rows = tile_group_height(end - b)
        carried_grads(p, c, work, panels, j, k, b, rows, first, acc)
        for q in range(rows):
            if b + q < here:
                backward_lines(p, c, 0, inputs, j0, j1, k, b + q, acc + q * LINES * L, work)
            else:
                for l in range((j1 - j0) * L):
                    work[p.d_h + (b + q) * p.Ps + j0 * L + l] = acc[q * LINES * L + l]
        b += rows
        first += GROUP_TILES


cdef inline void first_state_grad_rows(
    const Backward *p, const cell *c, store **outputs, real *work, const real **panels, Py_ssize_t j, Py_ssize_t b,
    Py_ssize_t end
) noexcept nogil:
    """h_prev_grad, the gradient of the state before the first step: panel j, slots b to `end`."""
    cdef Py_ssize_t L = lanes_of(work), first = 0, rows, q, s, at
    cdef real[GROUP_TILES * TILE_SIZE] acc
    while b < end:
        rows = tile_group_height(end - b)
        carried_grads(p, c, work, panels, j, -1, b, rows, first, acc)
        for q in range(rows):
            for s in range(lines_in_panel(p.JP, j)):
                at = (j * PANEL_LINES + s) * L
                store_line(outputs[H_PREV_GRAD] + row_of_slot(&p.steps, b + q) * p.P + at, acc + (q * LINES + s) * L,
                           p.P - at)
        b += rows
        first += GROUP_TILES


cdef inline void second_grad_rows(
    const Backward *p, const cell *c, const store **inputs, real *work, const real *panel, Py_ssize_t j, Py_ssize_t k,
    Py_ssize_t b, Py_ssize_t end
) noexcept nogil:
    """The second product of the step processed as number k, d @ w.T with the second matrix of weights, and what the
    cell makes of it: panel j, slots b to `end`."""
    cdef Py_ssize_t L = lanes_of(work), first = 0, rows, q, lines = lines_in_panel(p.J, j)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef const real *d = work + p.d + step_at(&p.steps, k) * p.B * p.Ns + p.column[1]
    end = active_end(&p.steps, k, b, end)
    while b < end:
        rows = tile_group_height(end - b)
        clear(acc, rows * LINES * L)
        add_panel_product(acc, rows, lines, d + b * p.Ns, p.Ns, panel, p.N[1], next_panel(p, panel, 1), first)
        for q in range(rows):
            backward_lines(p, c, 1, inputs, j * PANEL_LINES, j * PANEL_LINES + lines, k, b + q, acc + q * LINES * L,
                           work)
        b += rows
        first += GROUP_TILES


cdef inline void state_grads(
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, Py_ssize_t k
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
            panels[n] = work + p.w_h[n] + j * p.panel[n]
        state_grad_rows(p, c, inputs, work, panels, j, k, part.b0, part.b1)


cdef inline void first_state_grads(
    const Backward *p, const cell *c, store **outputs, real *work, Py_ssize_t number
) noexcept nogil:
    """One part of `first_state_grad_rows`, with weights that are packed."""
    cdef Share part = share_of(p, number, p.h_panels[0])
    cdef const real *panels[MATRICES]
    cdef Py_ssize_t j
    cdef int n
    for j in range(part.j0, part.j1):
        for n in range(state_matrices_of(c)):
            panels[n] = work + p.w_h[n] + j * p.panel[n]
        first_state_grad_rows(p, c, outputs, work, panels, j, part.b0, part.b1)


cdef inline void second_grads(
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, Py_ssize_t k
) noexcept nogil:
    """One part of `second_grad_rows` for the step processed as number k."""
    cdef Share part = share_of(p, number, p.h_panels[1])
    cdef Py_ssize_t j
    for j in range(part.j0, part.j1):
        second_grad_rows(p, c, inputs, work, h_panel(p, c, inputs, work, number, 1, j), j, k, part.b0, part.b1)


cdef inline void all_steps_back(
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number
) noexcept nogil:
    """All steps of a part that needs no other part."""
    cdef Py_ssize_t k = p.steps.T - 1
    while k >= 0:
        state_grads(p, c, inputs, work, number, k)
        if products_of(c) > 1:
            second_grads(p, c, inputs, work, number, k)
        k -= 1


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void x_grads(
    const Backward *p, const cell *c, store **outputs, real *work, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the tiles of x_grad."""
    cdef Py_ssize_t K = 0
    cdef const real *panels = NULL
    if p.x_panels == 0:  # there are no inputs, or nobody asked for it
        return
    if matrices_of(c) > 1 and not projects(c):
        K, panels = p.N[1], work + p.w_x[1]
    compute_x_grad_part(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.grid.groups, p.I, work + p.d,
                        p.Ns, work + p.w_x[0], p.N[0], panels, K, number, parts)


cdef inline void single_step_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *work, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of h_prev_grad and x_grad of a single step, which packs each panel when it uses it."""
    cdef Py_ssize_t h_panels = p.h_panels[0], j, k, K = 0
    cdef Share part = share_of(p, number, h_panels + p.x_panels)
    cdef real *panel = own_panel(p, c, work, number, 0)
    cdef real *panel2 = own_panel(p, c, work, number, 1)
    cdef const real *panels[MATRICES]
    cdef int n
    if matrices_of(c) > 1:
        K = p.N[1]
    if p.x_panels > 0 and not p.accumulate_x_grad:
        clear_finished_rows(&p.steps, outputs[X_GRAD], &p.d_x_layout, p.I, number, parts)
    for j in range(part.j0, part.j1):
        if j < h_panels:
            for n in range(state_matrices_of(c)):
                panels[n] = h_panel(p, c, inputs, work, number, n, j)
            first_state_grad_rows(p, c, outputs, work, panels, j, part.b0, part.b1)
            continue
        k = j - h_panels
        pack_w(p, inputs, panel, 0, True, k)
        if K > 0:
            pack_w(p, inputs, panel2, 1, True, k)
        compute_x_grad_panel(outputs[X_GRAD], &p.d_x_layout, p.accumulate_x_grad, &p.steps, p.I, work + p.d, p.Ns,
                             part.b0, active_end(&p.steps, 0, part.b0, part.b1), panel, p.N[0], panel2, K, k)


cdef inline void last_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *work, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of cs_prev_grad and of the peepholes' gradients, or of what `GRUBlockCellGrad` returns of d."""
    cdef Py_ssize_t b, j
    cdef real *d = work + p.d
    if cell is Lstm:
        for b in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
            store_row(outputs[CS_PREV_GRAD] + row_of_slot(&p.steps, b) * p.H, work + p.d_cs + b * p.Hs, p.H)
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
    const Backward *p, const cell *c, const store **inputs, real *work, Py_ssize_t number, Py_ssize_t parts, int n,
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
                d[q] = work + p.d + block.d_row[at + q] * p.Ns + p.column[n]
                d_h[q] = work + p.d + block.d_row[at + q] * p.Ns + p.h_column[n]
                if state is not NULL:
                    h[q] = state + (t * p.B + b) * p.H
                if scale is not NULL:
                    factor[q] = scale + (t * p.B + b) * p.H
            if p.transposed:
                pack_tiles(work + p.x_tiles + at * ROWS, p.tile_gap, d, <const real **> NULL, p.N[n], m)
                if p.h_column[n] != p.column[n]:
                    pack_tiles(work + p.h_tiles + at * ROWS, p.tile_gap, d_h, <const real **> NULL, p.N[n], m)
                for q in range(m):
                    pack_row(work + p.panels, x[q], <const store *> NULL, p.x_rows[n], &block, chain, k + q)
                    pack_row(work + p.panels + h_panels_at(p, block.rows), h[q],
                             <const store *> NULL if scales is NULL else scales[q], p.h_rows[n], &block, chain, k + q)
            else:
                pack_tiles(work + p.x_tiles + at * ROWS, p.tile_gap, x, <const store **> NULL, p.x_rows[n], m)
                pack_tiles(work + p.h_tiles + at * ROWS, p.tile_gap, h, scales, p.h_rows[n], m)
            k += m
        k, last = max(k - block.count[chain], <Py_ssize_t> 0), last - block.count[chain]


cdef inline real *weight_grad_of(
    const Backward *p, const real *work, store **outputs, int n, bint of_x
) noexcept nogil:
    """Where it is summed, in its rows for x or in those for h: in the output, or for float16 in scratch, in float32."""
    cdef Py_ssize_t h = 0 if of_x else p.x_rows[n] * p.N[n]
    if store is half:
        return <real *> work + p.w_grad[n] + h
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
    const Backward *p, store **outputs, real *work, Py_ssize_t number, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """As `weight_grads`, for the transposed gradients: one part of their rows."""
    cdef Py_ssize_t N = p.N[n]
    cdef bint apart = p.h_column[n] != p.column[n]
    cdef const real *panels = work + p.panels
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    transposed_grad(p, weight_grad_of(p, work, outputs, n, True), work + p.x_tiles, panels, N, p.x_rows[n], &block,
                    r0 == 0, number, parts)
    transposed_grad(p, weight_grad_of(p, work, outputs, n, False), work + (p.h_tiles if apart else p.x_tiles),
                    panels + h_panels_at(p, block.rows), N, p.h_rows[n], &block, r0 == 0, number, parts)
    bias_grads(p, outputs, work, share(lines_in(work, N), number, parts), share(lines_in(work, N), number + 1, parts),
               n, r0, &block)


cdef inline void bias_grads(
    const Backward *p, store **outputs, real *work, Py_ssize_t j, Py_ssize_t end, int n, Py_ssize_t r0,
    const RowBlock *block
) noexcept nogil:
    """Lines j to end of the bias gradient of matrix n, the sum of d: add a block of rows, from r0 on.  The rows for h
    may have a bias of their own, with d in another column.  A projection has none."""
    cdef Py_ssize_t L = lanes_of(work), N = p.N[n], at = j * L, columns = min(end * L, N) - at, l
    cdef const real *d = work + p.d + at
    cdef double *sums = <double *> (work + p.sums)
    cdef double *sums_h = sums + lines_in(work, N) * L
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
    const Backward *p, store **outputs, real *work, Py_ssize_t number, Py_ssize_t parts, int n, Py_ssize_t r0
) noexcept nogil:
    """One part of the columns of the gradient of matrix n of the weights, [x, h_prev].T @ d, and of the bias: add a
    block of rows, from r0 on.  For the rows for h d may be in another column."""
    cdef Py_ssize_t L = lanes_of(work), rows = min(<Py_ssize_t> ROW_BLOCK, p.steps.T * p.B), N = p.N[n], m
    cdef Py_ssize_t lines = lines_in(work, N), j = share(lines, number, parts), end = share(lines, number + 1, parts)
    cdef const real *d = work + p.d + p.column[n]
    cdef const real *d_h = work + p.d + p.h_column[n]
    cdef real *panel = work + p.panels + number * rows * PANEL_LINES * L
    cdef real *out = weight_grad_of(p, work, outputs, n, True)
    cdef real *out_h = weight_grad_of(p, work, outputs, n, False)
    cdef RowBlock block
    list_active_rows(&block, &p.steps, r0)
    while j < end:
        m = min(<Py_ssize_t> PANEL_LINES, end - j)
        pack_columns(panel, m, &block, d + j * L, p.Ns, N - j * L)
        bias_grads(p, outputs, work, j, j + m, n, r0, &block)
        add_weight_grad_rows(out + j * L, N, p.x_rows[n], work + p.x_tiles, p.tile_gap, panel, m, N - j * L, &block,
                             r0 == 0)
        if d_h != d:
            pack_columns(panel, m, &block, d_h + j * L, p.Ns, N - j * L)
        add_weight_grad_rows(out_h + j * L, N, p.h_rows[n], work + p.h_tiles, p.tile_gap, panel, m, N - j * L, &block,
                             r0 == 0)
        j += m


cdef inline void store_weight_grads(
    const Backward *p, const cell *c, store **outputs, real *work, Py_ssize_t number, Py_ssize_t parts
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
            store_row(to, work + p.w_grad[n] + k * p.N[n], p.N[n])


cdef inline void all_weight_grads(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *work
) noexcept nogil:
    """All of them, if there is only one part."""
    cdef Py_ssize_t r
    cdef int n
    for n in range(matrices_of(c)):
        r = 0
        while r < p.steps.T * p.B:
            pack_block(p, c, inputs, work, 0, 1, n, r)
            if p.transposed:
                transposed_grads(p, outputs, work, 0, 1, n, r)
            else:
                weight_grads(p, outputs, work, 0, 1, n, r)
            r += ROW_BLOCK
    if store is half:
        store_weight_grads(p, c, outputs, work, 0, 1)


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long backward(
    const Backward *p, const cell *c, const store **inputs, store **outputs, real *work
) noexcept nogil:
    """The backward pass.  Returns the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, last = p.grid.end, rows = p.steps.T * p.B
    cdef Py_ssize_t k = p.steps.T - 1, r = 0  # in the region each thread has its own k, r and n
    cdef int n = 0
    cdef bint weights = outputs[W_GRAD] is not NULL
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_gradients(p, c, inputs, work, 0, 1)
        if p.packs_all:
            pack_weights(p, c, inputs, work, 0, 1)
        all_steps_back(p, c, inputs, work, 0)
        if p.packs_all:
            first_state_grads(p, c, outputs, work, 0)
            x_grads(p, c, outputs, work, 0, 1)
        else:
            single_step_grads(p, c, inputs, outputs, work, 0, 1)
        last_grads(p, c, inputs, outputs, work, 0, 1)
        if weights:
            all_weight_grads(p, c, inputs, outputs, work)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, last, schedule="static"):
            load_gradients(p, c, inputs, work, part, parts)
        if p.packs_all:
            for part in prange(first, last, schedule="static"):
                pack_weights(p, c, inputs, work, part, parts)
        barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, last, schedule="static"):
                all_steps_back(p, c, inputs, work, part)
        else:
            while k >= 0:
                for part in prange(first, last, schedule="static"):
                    state_grads(p, c, inputs, work, part, k)
                group_barrier(&team)
                if products_of(c) > 1:
                    for part in prange(first, last, schedule="static"):
                        second_grads(p, c, inputs, work, part, k)
                    group_barrier(&team)
                k = k - 1
        if p.packs_all:
            for part in prange(first, last, schedule="static"):
                first_state_grads(p, c, outputs, work, part)
            barrier(&team)
            for part in prange(first, last, schedule="static"):
                x_grads(p, c, outputs, work, part, parts)
        else:
            for part in prange(first, last, schedule="static"):
                single_step_grads(p, c, inputs, outputs, work, part, parts)
            barrier(&team)
        for part in prange(first, last, schedule="static"):
            last_grads(p, c, inputs, outputs, work, part, parts)
        while weights and n < matrices_of(c):
            r = 0
            while r < rows:
                for part in prange(first, last, schedule="static"):
                    pack_block(p, c, inputs, work, part, parts, n, r)
                barrier(&team)
                for part in prange(first, last, schedule="static"):
                    if p.transposed:
                        transposed_grads(p, outputs, work, part, parts, n, r)
                    else:
                        weight_grads(p, outputs, work, part, parts, n, r)
                barrier(&team)
                r = r + ROW_BLOCK
            n = n + 1
        if store is half:
            if weights:
                for part in prange(first, last, schedule="static"):
                    store_weight_grads(p, c, outputs, work, part, parts)
        barrier(&team)  # as in `forward`
    return measured_cost(&team)


cdef inline long long run_backward(
    Backward *p, const cell *c, const store **inputs, store **outputs, void *work, int ready
) noexcept nogil:
    """`backward` in the type in which arrays of this type are computed, on no more threads than are ready."""
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, work, 64 // p.L, 1)
    if store is double:
        nanoseconds = backward(p, c, inputs, outputs, <double *> work)
    else:
        nanoseconds = backward(p, c, inputs, outputs, <float *> work)
    release_zones(&p.workspace, work, 64 // p.L, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline void take_transposed(
    Backward *p, const cell *c, const Pass *a, const store **inputs, store **outputs
) noexcept nogil:
    """Weights and their gradients as PyTorch has them (`take_weights` in forward.pxd), and what else such layers may
    do."""
    cdef int k
    inputs[W], inputs[W_H] = <const store *> a.weights[0], <const store *> a.weights[1]
    outputs[W_GRAD], outputs[W_H_GRAD] = <store *> a.weight_grads[0], <store *> a.weight_grads[1]
    if cell is ResetAfter:
        inputs[W_C], inputs[W_C_H] = inputs[W] + p.N[0] * p.I, inputs[W_H] + p.N[0] * p.H
        if a.weight_grads[0] is not NULL:
            outputs[W_C_GRAD], outputs[W_C_H_GRAD] = outputs[W_GRAD] + p.N[0] * p.I, outputs[W_H_GRAD] + p.N[0] * p.H
    for k in range(3 if cell is ResetAfter else 1):
        outputs[BIAS_GRAD + k] = <store *> a.weight_grads[2 + k]
    if projects(c):
        inputs[W_P_H], outputs[W_P_H_GRAD] = <const store *> a.weights[3], <store *> a.weight_grads[3]
        outputs[BIAS_GRAD + 1] = NULL
    p.x_layout, p.h_layout, p.accumulate_x_grad = a.x_layout, a.y_layout, a.accumulate_x_grad
    if a.x_grad is NULL:
        p.x_panels = 0


cdef inline void take_plain(const cell *c, const Pass *a, const store **inputs, store **outputs) noexcept nogil:
    """Weights and their gradients as layers have them."""
    cdef int k, biases = 4 if cell is Lstm else 1 if cell is Rnn else 2  # where they begin among the weights
    inputs[W], outputs[W_GRAD] = <const store *> a.weights[0], <store *> a.weight_grads[0]
    outputs[BIAS_GRAD] = <store *> a.weight_grads[biases]
    if cell is Lstm:
        for k in range(PEEPHOLES):
            inputs[WCI + k] = <const store *> a.weights[1 + k]
            outputs[WCI_GRAD + k] = <store *> a.weight_grads[1 + k]
        if projects(c):
            inputs[W_P], outputs[W_P_GRAD] = <const store *> a.weights[5], <store *> a.weight_grads[5]
            outputs[BIAS_GRAD + 1] = NULL
    else:
        if cell is not Rnn:
            inputs[W_C], outputs[W_C_GRAD] = <const store *> a.weights[1], <store *> a.weight_grads[1]
            outputs[BIAS_C_GRAD] = <store *> a.weight_grads[biases + 1]
        if cell is ResetAfter:
            outputs[BIAS_HC_GRAD] = <store *> a.weight_grads[biases + 2]


cdef inline long long pass_backward(
    const Backward *plan, const cell *c, int ready, void *work, const Pass *a, const store *x
) noexcept nogil:
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Backward p = plan[0]
    cdef int k
    for k in range(saved_of(c)):
        inputs[OUT_H + 1 + k] = <const store *> a.saved + k * p.steps.T * p.B * p.H
    inputs[X], inputs[OUT_H], inputs[H_GRAD] = x, <const store *> a.y, <const store *> a.y_grad
    outputs[X_GRAD] = <store *> a.x_grad
    if c.transposed:
        take_transposed(&p, c, a, inputs, outputs)
    else:
        take_plain(c, a, inputs, outputs)
    if cell is Lstm:
        inputs[CS_PREV], inputs[H_PREV] = <const store *> a.initial_state[0], <const store *> a.initial_state[1]
        inputs[CS_LAST_GRAD] = <const store *> a.last_state_grad[0]
        inputs[H_LAST_GRAD] = <const store *> a.last_state_grad[1]
        outputs[CS_PREV_GRAD] = <store *> a.initial_state_grad[0]
        outputs[H_PREV_GRAD] = <store *> a.initial_state_grad[1]
        inputs[CS_GRAD] = NULL
    else:
        inputs[H_PREV], inputs[H_LAST_GRAD] = <const store *> a.initial_state[0], <const store *> a.last_state_grad[0]
        outputs[H_PREV_GRAD], outputs[D_C_BAR] = <store *> a.initial_state_grad[0], NULL
    p.d_y_layout, p.d_x_layout, p.steps.reverse = a.y_grad_layout, a.x_grad_layout, a.reverse
    guard_zones(&p.workspace, work, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        use_step_mask_back(&p, a.step_mask, work)
    return run_backward(&p, c, inputs, outputs, work, ready)


cdef inline long long run_pass_back(
    const Backward *p, const cell *c, int storage, int ready, void *work, const Pass *a
) noexcept nogil:
    """The gradients of `run_pass` in forward.pxd."""
    if storage == DOUBLE:
        return pass_backward(p, c, ready, work, a, <const double *> a.x)
    if storage == HALF:
        return pass_backward(p, c, ready, work, a, <const half *> a.x)
    return pass_backward(p, c, ready, work, a, <const float *> a.x)
