"""How the work of a call is divided into parts, and where everything is in scratch memory, for the passes over cells;
`dense.pxd` has the plan of a dense layer.

Each thread has one part of the work: with the others of its group the same batch rows, and of the hidden units its own
ones.  Parts of different groups do not wait for each other.  In a group each product of a step needs the results of all
parts of the product before.  Which grid of groups and members there is cost.pxd decides.
"""
from cell cimport cell
from cells.types cimport Gru, Lstm, ResetAfter, Rnn
from passes.gradients cimport PANEL_LINES, count_panels, count_tiles
from passes.steps cimport Layout, Slot, Steps, active_end, contiguous_layout, set_step_mask, size_of_slots, steps_of
from product.integer cimport quantized_row_stride
from product.panels cimport (
    MATRICES, THREAD_GAP, Panels, compact_gates, panels_of, scratch_stride, separate_last_gate, steps_per_chunk
)
from product.quantized cimport INT8, UNQUANTIZED, bytes_per_code
from product.real cimport real
from product.tile cimport LINES, ROW_BLOCK, ROWS
from schedule.cost cimport Grid, Work, ceil_div, cheapest, cost_of, grid_of, parts_of, speed_of, threads_of, work_of
from schedule.machine cimport L2, machine, to_prefetch
from schedule.team cimport share
from schedule.workspace cimport Workspace, empty_workspace, take

cdef enum:
    PRODUCTS = 2  # in a step, at most
    PEEPHOLES = 3
    ROWS_AHEAD = 16  # so many rows further on, where a line of one row after the other is used, no cache fetches
    ROWS_ALONE = 32  # of a part, from which on a GRU's single step backward splits rows; each part packs all weights
    PACKING = 16  # operations in whose time a weight is packed


cdef inline Py_ssize_t gates_of(const cell *c) noexcept nogil:
    return c.gates[0] + c.gates[1]


cdef inline bint projects(const cell *c) noexcept nogil:
    """Whether h is a product of its own, of a matrix that has no rows for x and no bias."""
    if cell is Lstm:
        return c.P > 0
    else:
        return False


cdef inline Py_ssize_t size_of_h(const cell *c, Py_ssize_t H) noexcept nogil:
    if cell is Lstm:
        return c.P if c.P > 0 else H
    else:
        return H


cdef inline int products_of(const cell *c) noexcept nogil:
    """Of a step: each needs the results of the one before."""
    return 2 if cell is Gru or projects(c) else 1


cdef inline int matrices_of(const cell *c) noexcept nogil:
    return 2 if cell is Gru or cell is ResetAfter or projects(c) else 1


cdef inline int state_matrices_of(const cell *c) noexcept nogil:
    """By how many matrices a step's d is multiplied for the gradient of the state before it."""
    return 1 + matrices_of(c) - products_of(c)


cdef inline int x_products_of(const cell *c) noexcept nogil:
    """How many products of a step have rows of x, too."""
    return 1 if projects(c) else products_of(c)


cdef inline Py_ssize_t recurrent_weights(const cell *c, Py_ssize_t H) noexcept nogil:
    """How many weights a step multiplies with its states."""
    cdef Py_ssize_t P = size_of_h(c, H)
    return gates_of(c) * H * P + (H * P if projects(c) else 0)


cdef inline Py_ssize_t columns_of(const cell *c) noexcept nogil:
    """Of a row of gradients d, in units of H: one for each gate, and d_hc.  Behind them is d_h of a projection."""
    return gates_of(c) + (1 if cell is ResetAfter else 0)


cdef inline int saved_of(const cell *c) noexcept nogil:
    """How many outputs of a step the tape of a layer has beside h."""
    return 6 if cell is Lstm else 4 if cell is ResetAfter else 3 if cell is Gru else 0


# --------------------------------------------------------------------------------------------------------------- grids
cdef inline Py_ssize_t rows_apart(Py_ssize_t B, Py_ssize_t nbytes, Py_ssize_t threads) noexcept nogil:
    """By how many threads a single step's rows are divided, which then have all weights, of so many bytes, packed
    before; 0 if it packs them block by block: for few rows, or if weights do not fit into each core's cache."""
    if nbytes > machine.caches[L2]:
        return 0
    return min(threads, B // (16 if nbytes <= B << 11 else 64))


cdef inline Grid grid_of_step(const Work *w, Py_ssize_t nbytes, Py_ssize_t threads) noexcept nogil:
    """The grid of a single step whose weights, of so many bytes, are not packed."""
    cdef Grid units = cheapest(w, threads, True, False), rows
    if rows_apart(w.B, nbytes, threads) == 0:
        return units
    rows = cheapest(w, rows_apart(w.B, nbytes, threads), False, True)
    if rows.groups == 1:
        return units
    if units.members == 1 or machine.groups > 0:
        return rows
    return rows if cost_of(w, rows.groups, 1) < cost_of(w, 1, units.members) else units


cdef inline bint packs_before(const Grid *grid, Py_ssize_t T, Py_ssize_t B, Py_ssize_t nbytes) noexcept nogil:
    """Whether all weights, of so many bytes, are packed before the steps: a single one whose hidden units are divided
    packs block by block."""
    return T > 1 or (grid.members == 1 and rows_apart(B, nbytes, 1) > 0)


cdef inline Grid grid_forward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed,
    Py_ssize_t threads
) noexcept nogil:
    """The grid of a forward pass on at most so many threads."""
    cdef Work w = work_of(T, B, 64 // itemsize, products_of(c))
    cdef Py_ssize_t P = size_of_h(c, H), weights = gates_of(c) * H * I + recurrent_weights(c, H), gates, n
    w.units = ceil_div(H, w.L)
    w.K[0], w.ahead[0], w.K[1], w.ahead[1] = P, I, H, 0 if projects(c) else I
    w.panels[1] = 0
    for n in range(w.products):
        gates = 1 if n == 1 and projects(c) else c.gates[n] if cell is Gru else gates_of(c)
        w.lines[n] = gates * (ceil_div(P, w.L) if n == 1 else w.units)
        w.width[n] = LINES // gates * gates
        w.panels[n] = ceil_div(w.lines[n], w.width[n])
    w.line_bytes = 64 if c.format == UNQUANTIZED else w.L * bytes_per_code(c.format)
    w.speed = speed_of(c.format, itemsize)
    w.cell = 30 if cell is Lstm else 9 if cell is Rnn else 20
    w.packs = not packed
    w.shared = 0 if packed else PACKING * weights / w.speed
    w.barriers = 1 if packed else 2
    if packed or T > 1:
        return cheapest(&w, threads, False, False)
    return grid_of_step(&w, weights * itemsize, threads)


cdef inline Grid grid_backward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights,
    Py_ssize_t threads
) noexcept nogil:
    """That of a backward pass; with `weights` it computes gradients of the weights too."""
    cdef Work w = work_of(T, B, 64 // itemsize, products_of(c))
    cdef Grid forward = grid_forward(c, T, B, I, H, itemsize, True, threads)
    cdef Py_ssize_t P = size_of_h(c, H), N = gates_of(c) * H, all_weights = N * I + recurrent_weights(c, H)
    w.units = ceil_div(H, w.L)
    w.K[0] = c.gates[0] * H if cell is Gru else N
    w.K[1] = P if projects(c) else N - w.K[0]
    w.lines[0], w.lines[1], w.ahead[0], w.ahead[1] = ceil_div(P, w.L), w.units, 0, 0
    w.width[0] = w.width[1] = PANEL_LINES
    w.panels[0], w.panels[1] = count_panels(w.lines[0]), count_panels(w.lines[1]) if w.products > 1 else 0
    w.line_bytes, w.speed = 64, speed_of(UNQUANTIZED, itemsize)
    w.cell = 50 if cell is Lstm else 20 if cell is Rnn else 45
    # Threads that the forward pass did not need may be asleep; those that it needs next time should not fall asleep.
    w.slept = -machine.sleep_cost if threads_of(&forward) > 1 else machine.sleep_cost
    w.packs = True
    w.shared = 2.0 * (T * B * I * N + PACKING * all_weights) / w.speed  # the weights, and storing their gradients
    w.columns, w.pieces = 2.0 * T * B * all_weights / w.speed if weights else 0, ceil_div(c.gates[0] * H, w.L)
    w.barriers = 3 + (2 * matrices_of(c) * ceil_div(T * B, ROW_BLOCK) if weights else 0)
    w.divided = T * B * ceil_div(N, w.L) * (2 if weights else 1)
    w.undivided = T * B * (ceil_div(I, w.L) + ceil_div(P, w.L)) if weights else 0
    if projects(c) or T > 1:
        return cheapest(&w, threads, False, False)
    if cell is Gru:
        if B >= ROWS_ALONE * threads and rows_apart(B, all_weights * itemsize, 1) == 0:
            return cheapest(&w, threads, False, True)
    return grid_of_step(&w, all_weights * itemsize, threads)


# ------------------------------------------------------------------------------------------------------------- forward
cdef struct Forward:
    Steps steps  # those that are run
    Py_ssize_t B, I, H
    Py_ssize_t P  # of the numbers in a row of h: H, or those of a projection
    Py_ssize_t L  # units in a line
    Py_ssize_t Is, Hs, Ps  # strides of rows of x, of H and of P in scratch
    Py_ssize_t[PRODUCTS] As  # and of rows of h, of the GRU's h_prev * r or of m, as each product reads them
    Layout x_layout, y_layout  # of x and the output h
    Py_ssize_t chunk  # steps whose x products are computed at once; 1: they are part of the step
    Grid grid
    bint packed  # the weights are packed already
    bint packs_all  # all panels are there before the steps, else a single step packs what it uses
    Py_ssize_t gap  # reals by which a group's rows in scratch are further on than the last one's
    Panels[PRODUCTS] w
    void *peep  # the three peepholes of each line, behind the panels
    Py_ssize_t panels  # reals of all panels and of the peepholes
    # Where rows begin in scratch: h, that of every other step, the LSTM's cs, m = o * co, which is projected; or for
    # the GRU h, h_prev * r, u.
    Py_ssize_t h, h_odd, cs, m, hr, u
    Py_ssize_t x, z, slots  # where rows of x, rows of z and the slots begin
    Py_ssize_t z_panels  # for which z has room
    Py_ssize_t[PRODUCTS] codes  # where rows of codes of these begin, for products in integers
    Workspace workspace  # the scratch memory


cdef struct Part:
    Py_ssize_t member  # which one of its group it is
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t[PRODUCTS] j0, j1  # panels of each product
    Py_ssize_t shift  # of its rows in scratch


cdef inline Forward forward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed, Grid grid
) noexcept nogil:
    """The plan of a forward pass.  If the weights are `packed` already, scratch has no room for them."""
    cdef Forward p
    cdef Py_ssize_t gates = gates_of(c), P = size_of_h(c, H), recurrent = recurrent_weights(c, H), rows, n
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout, p.y_layout = contiguous_layout(B, I), contiguous_layout(B, P)
    p.L = 64 // itemsize
    p.packed = packed
    p.grid = grid
    p.packs_all = packed or packs_before(&grid, T, B, (gates * H * I + recurrent) * itemsize)
    p.w[0] = panels_of(p.packs_all, I, P, H, p.L, c.gates[0] if cell is Gru else gates, c.format)
    if cell is ResetAfter:
        separate_last_gate(&p.w[0], c.gates[0])
    p.w[0].transposed = c.transposed
    if p.packs_all:
        compact_gates(&p.w[0])
    p.panels = p.w[0].size * p.w[0].count
    if cell is Lstm:
        for n in range(gates):
            p.w[0].column[n] = c.column[n + c.coupled]
        p.panels += PEEPHOLES * p.w[0].J * p.L
    p.w[1].count = p.w[1].size = 0
    if cell is Gru:
        p.w[1] = panels_of(p.packs_all, I, H, H, p.L, c.gates[1], c.format)
    elif projects(c):
        p.w[1] = panels_of(p.packs_all, 0, H, P, p.L, 1, c.format)
        p.w[1].transposed = c.transposed
    p.panels += p.w[1].size * p.w[1].count
    p.z_panels = max(p.w[0].count, p.w[1].count) if projects(c) else p.w[0].count + p.w[1].count
    p.Is, p.Hs, p.Ps = scratch_stride(I, p.L), scratch_stride(H, p.L), scratch_stride(P, p.L)
    p.As[0], p.As[1] = p.Ps, p.Hs
    if c.format == INT8:
        p.Is = quantized_row_stride(I)
        p.As[0], p.As[1] = quantized_row_stride(P), quantized_row_stride(H)
    p.chunk = steps_per_chunk(T, B, p.grid.groups)
    p.w[0].prefetches = p.w[1].prefetches = to_prefetch(recurrent * itemsize, p.grid.members)
    p.gap = max(THREAD_GAP * p.L, ROWS_AHEAD * max(p.Hs, p.Ps)) if p.grid.groups > 1 else 0
    p.workspace = empty_workspace()
    if not packed:
        take(&p.workspace, p.panels)
    rows = B * p.Ps + p.grid.groups * p.gap
    p.h = take(&p.workspace, rows)
    p.h_odd = p.h if cell is Gru or projects(c) else take(&p.workspace, rows)
    rows = B * p.Hs + p.grid.groups * p.gap
    if cell is Lstm:
        p.cs = take(&p.workspace, rows)
        p.m = take(&p.workspace, rows) if projects(c) else 0
    elif cell is Gru:
        p.hr = take(&p.workspace, rows)
        p.u = take(&p.workspace, rows)
    p.x = take(&p.workspace, p.chunk * B * p.Is + p.grid.groups * p.gap)
    for n in range(PRODUCTS):
        p.codes[n] = p.workspace.size
        if c.format == INT8 and (n == 1 or projects(c)):
            take(&p.workspace, p.grid.members * codes_of_member(&p, n))
    rows = p.z_panels * p.chunk * B * LINES if p.chunk > 1 or not p.packs_all else 0
    p.z = take(&p.workspace, rows * p.L + p.grid.groups * p.gap)
    p.slots = take(&p.workspace, size_of_slots(B, p.L))
    return p


cdef inline Forward plan_forward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed,
    Py_ssize_t threads
) noexcept nogil:
    """With the grid of the least cost on at most so many threads."""
    return forward_of(c, T, B, I, H, itemsize, packed, grid_forward(c, T, B, I, H, itemsize, packed, threads))


cdef inline bint stores_rows(const Forward *p) noexcept nogil:
    """Whether h is stored in whole rows after a step, not line by line: while a thread writes a line of one row after
    the other, its cache fetches that of the rows that come next, and these may be another thread's."""
    return p.gap > 0 and p.grid.members == 1 and p.steps.step_mask is NULL


cdef inline void use_step_mask(Forward *p, const unsigned char *step_mask, void *work) noexcept nogil:
    """Say where rows end or start anew."""
    set_step_mask(&p.steps, step_mask, <Slot *> (<char *> work + p.slots * (64 // p.L)), p.grid.groups)


cdef inline void use_panels(Forward *p, void *panels) noexcept nogil:
    """Say where the packed weights are, or will be."""
    cdef Py_ssize_t itemsize = 64 // p.L
    cdef char *second = <char *> panels + p.w[0].size * p.w[0].count * itemsize
    p.w[0].base, p.w[1].base = panels, second
    p.peep = second + p.w[1].size * p.w[1].count * itemsize


cdef inline Part part_of(const Forward *p, Py_ssize_t number) noexcept nogil:
    cdef Part part
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = number // members
    cdef int n
    part.member, part.shift = number % members, group * p.gap
    part.b0, part.b1 = share(p.B, group, groups), share(p.B, group + 1, groups)
    for n in range(PRODUCTS):
        part.j0[n] = share(p.w[n].count, part.member, members)
        part.j1[n] = share(p.w[n].count, part.member + 1, members)
    return part


cdef inline Py_ssize_t end_of_chunk(const Forward *p, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1) noexcept nogil:
    """How far a chunk goes that begins with the step processed as number k: as many rows as have room."""
    cdef Py_ssize_t left = p.chunk * (b1 - b0), end = min(k + p.chunk, p.steps.T)
    if p.steps.slots is NULL or p.chunk == 1:
        return end
    end = k
    while end < p.steps.T:
        left -= active_end(&p.steps, end, b0, b1) - b0
        if left < 0:
            break
        end += 1
    return end


cdef inline Py_ssize_t end_of_common_chunk(const Forward *p, Py_ssize_t k) noexcept nogil:
    """The same for all groups alike."""
    cdef Py_ssize_t end = p.steps.T, group, groups = p.grid.groups
    for group in range(1 if p.steps.slots is NULL else groups):
        end = min(end, end_of_chunk(p, k, share(p.B, group, groups), share(p.B, group + 1, groups)))
    return end


cdef inline real *h_before(const Forward *p, real *rows, Py_ssize_t k) noexcept nogil:
    """Where h is before the step processed as number k, and after number k - 1."""
    return rows + (p.h_odd if k % 2 else p.h)


cdef inline real *x_of(const Forward *p, real *work, const Part *part) noexcept nogil:
    """Where a part keeps the x of a chunk of steps."""
    return work + part.shift + p.x + p.chunk * part.b0 * p.Is


cdef inline Py_ssize_t codes_of_member(const Forward *p, int n) noexcept nogil:
    """Reals of scratch for rows of codes of all rows of h that product n reads: each member of a group has its own."""
    return p.B * p.As[n] + p.grid.groups * p.gap


cdef inline real *codes_of(const Forward *p, real *work, const Part *part, int n) noexcept nogil:
    """Where a part has its rows of codes, the first one that of slot 0."""
    return work + part.shift + p.codes[n] + part.member * codes_of_member(p, n)


cdef inline real *z_of(const Forward *p, real *work, const Part *part, int n) noexcept nogil:
    """Where a part keeps product n of x and the weights for a chunk of steps, panel after panel."""
    cdef Py_ssize_t row = p.chunk * LINES * p.L
    work += part.shift + p.z + p.z_panels * part.b0 * row
    return work + p.w[0].count * (part.b1 - part.b0) * row if n else work


# ------------------------------------------------------------------------------------------------------------ backward
cdef struct Backward:
    Steps steps  # those that are run
    Layout x_layout, h_layout, cs_layout  # of x, the output h, and cs
    Layout d_y_layout, d_x_layout  # of the incoming gradient of h, and of x_grad
    Py_ssize_t B, I, H
    Py_ssize_t P  # as in Forward
    Py_ssize_t L, J, JP  # units in a line, lines of H, lines of P
    Py_ssize_t Hs, Ps, Ns  # strides in scratch of rows of H, of P, and of the gate gradients d of a row (t, b)
    Py_ssize_t[MATRICES] x_rows, h_rows  # of each matrix of weights: its rows for x, and for h or m
    Py_ssize_t[MATRICES] N, column  # columns of each matrix of weights, and where their gradients begin in a row of d
    Py_ssize_t[MATRICES] h_column  # likewise for the weights' rows for h
    Py_ssize_t[MATRICES] h_panels  # of the transposed weights: those for h or m
    Py_ssize_t x_panels  # and those for x
    Py_ssize_t[MATRICES] panel  # reals of one
    Grid grid
    bint packs_all  # all panels are there before the steps, else a single step packs what it uses
    bint prefetches  # as in Panels
    bint accumulate_x_grad  # x_grad is added to what is there
    bint transposed  # as in the cell
    Py_ssize_t tile_gap  # from one tile of the weight gradients' operands to the next
    # Where things begin in scratch: panels for h and for x, or of a single step those of the first part; float16's
    # weight gradients in float32, which take the panels' place; carries of h and cs, peepholes, d.
    Py_ssize_t[MATRICES] w_h, w_x, w_grad
    Py_ssize_t d_h, d_cs, peep, d
    # And for the gradients of the weights for x and for h, of a block of rows: tiles of each with x or states, panels
    # with d; or, if transposed, tiles with d, panels with x and states.  Sums of columns of d in double.
    Py_ssize_t x_tiles, h_tiles, sums, panels, slots
    Workspace workspace  # the scratch memory


cdef inline Backward backward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights, Grid grid
) noexcept nogil:
    """The plan of a backward pass; with `weights` it computes gradients of the weights and biases too."""
    cdef Backward p
    cdef Py_ssize_t block = min(T * B, <Py_ssize_t> ROW_BLOCK), panels = 0, own = 0, N
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), parts = parts_of(&grid)
    cdef int n
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout = p.d_x_layout = contiguous_layout(B, I)
    p.h_layout = p.d_y_layout = contiguous_layout(B, P)
    p.cs_layout = contiguous_layout(B, H)
    p.accumulate_x_grad, p.transposed = False, c.transposed
    p.L = 64 // itemsize
    p.J, p.JP = (H + p.L - 1) // p.L, (P + p.L - 1) // p.L
    p.Hs, p.Ps = scratch_stride(H, p.L), scratch_stride(P, p.L)
    p.Ns = scratch_stride(columns_of(c) * H + (P if projects(c) else 0), p.L)
    p.h_panels[0], p.h_panels[1] = count_panels(p.JP), count_panels(p.J)
    p.x_panels = count_panels((I + p.L - 1) // p.L)
    p.grid = grid
    p.packs_all = projects(c) or packs_before(&grid, T, B, (gates_of(c) * H * I + recurrent) * itemsize)
    p.prefetches = to_prefetch(recurrent * itemsize, p.grid.members)
    for n in range(matrices_of(c)):
        p.N[n], p.column[n] = c.gates[n] * H, n * c.gates[0] * H
        p.h_column[n] = n * (c.gates[0] + 1) * H if cell is ResetAfter else p.column[n]
        p.x_rows[n], p.h_rows[n] = I, P
        if n == 1 and projects(c):
            p.N[n], p.x_rows[n], p.h_rows[n] = P, 0, H
        p.panel[n] = PANEL_LINES * p.L * p.N[n]
        p.w_grad[n] = n * (I + P) * p.N[0]
        own += p.panel[n]
        p.w_h[n] = panels
        panels += p.h_panels[n] * p.panel[n]
    for n in range(matrices_of(c)):
        p.w_x[n] = panels
        panels += p.x_panels * p.panel[n] if p.x_rows[n] > 0 else 0
    p.workspace = empty_workspace()
    take(&p.workspace, max(panels, parts * own))
    p.d_h = take(&p.workspace, B * p.Ps)
    if cell is Lstm:
        p.d_cs = take(&p.workspace, B * p.Hs)
        p.peep = take(&p.workspace, PEEPHOLES * p.J * p.L)
    p.d = take(&p.workspace, T * B * p.Ns)
    if weights:
        p.tile_gap = scratch_stride(block * ROWS, p.L)
        N = max(p.N[0], p.N[matrices_of(c) - 1])
        p.x_tiles = take(&p.workspace, count_tiles(N if c.transposed else I) * p.tile_gap)
        p.h_tiles = take(&p.workspace, count_tiles(N if c.transposed else max(P, H)) * p.tile_gap)
        p.sums = take(&p.workspace, 2 * max((p.N[0] + p.L - 1) // p.L, 2 * p.J) * p.L)
        N = p.x_panels + max(p.h_panels[0], p.h_panels[1]) if c.transposed else parts
        p.panels = take(&p.workspace, block * PANEL_LINES * p.L * N)
    p.slots = take(&p.workspace, size_of_slots(B, p.L))
    return p


cdef inline Backward plan_backward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights,
    Py_ssize_t threads
) noexcept nogil:
    """Likewise."""
    return backward_of(c, T, B, I, H, itemsize, weights, grid_backward(c, T, B, I, H, itemsize, weights, threads))


cdef struct Share:  # of a part in a step
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t j0, j1  # panels


cdef inline Share share_of(const Backward *p, Py_ssize_t number, Py_ssize_t panels) noexcept nogil:
    """Of so many panels."""
    cdef Share part
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = number // members
    part.b0, part.b1 = share(p.B, group, groups), share(p.B, group + 1, groups)
    part.j0, part.j1 = share(panels, number % members, members), share(panels, number % members + 1, members)
    return part


cdef inline void use_step_mask_back(Backward *p, const unsigned char *step_mask, void *work) noexcept nogil:
    """As `use_step_mask`."""
    set_step_mask(&p.steps, step_mask, <Slot *> (<char *> work + p.slots * (64 // p.L)), p.grid.groups)


cdef inline Grid grid_of_cell_grad(Py_ssize_t B, Py_ssize_t H, Py_ssize_t threads) noexcept nogil:
    return grid_of(1 if B * H < 1 << 13 else min(threads, B), 1)


cdef inline Backward cell_grad_plan(Py_ssize_t B, Py_ssize_t H, Py_ssize_t itemsize, Grid grid) noexcept nogil:
    """The plan of `LSTMBlockCellGrad`, which has no product; the rows of d are those of dicfo."""
    cdef Backward p
    p.steps = steps_of(1, B)
    p.B, p.I, p.H = B, 0, H
    p.cs_layout = p.d_y_layout = contiguous_layout(B, H)
    p.L = 64 // itemsize
    p.J = (H + p.L - 1) // p.L
    p.N[0] = p.Ns = 4 * H
    p.grid = grid
    p.workspace = empty_workspace()
    p.peep = take(&p.workspace, PEEPHOLES * p.J * p.L)
    p.d = take(&p.workspace, B * p.Ns)
    return p
