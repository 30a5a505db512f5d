"""How the work of a call is divided into parts, and where everything is in scratch memory, for the passes over cells;
`dense.pxd` has the plan of a dense layer.

Each thread has one part of the work: with the others of its group the same batch rows, and of the hidden units its own
ones.  Parts of different groups do not wait for each other.  In a group each product of a step needs the results of all
parts of the product before.  Which grid of groups and members there is cost.pxd decides.
"""
from cell cimport cell
from cells.types cimport LSTM, Lstm, row_of
from passes.gradients cimport PANEL_LINES, count_panels, count_tiles
from passes.steps cimport Layout, Slot, Steps, active_end, contiguous_layout, set_step_mask, size_of_slots, steps_of
from product.integer cimport quantized_row_stride
from product.panels cimport (
    MATRICES, THREAD_GAP, Panels, compact_gates, panels_of, scratch_stride, separate_last_gate, steps_per_chunk
)
from product.quantized cimport INT8, UNQUANTIZED, bytes_per_code
from product.real cimport real
from product.tile cimport LINES, ROW_BLOCK, ROWS
from schedule.cost cimport (
    Grid, Work, ceil_div, cheapest, cost_of, grid_of, parts_of, requirements_of, speed_of, threads_of, work_of
)
from schedule.machine cimport L2, machine, to_prefetch
from schedule.team cimport share
from schedule.workspace cimport Region, Workspace, lay_out, region

cdef enum:
    PRODUCTS = 2  # in a step, at most
    ROWS_AHEAD = 16  # so many rows further on, where a line of one row after the other is used, no cache fetches
    ROWS_ALONE = 32  # of a part, from which on a GRU's single step backward splits rows; each part packs all weights
    PACKING = 16  # operations in whose time a weight is packed


cdef inline Py_ssize_t projection_of(const cell *c) noexcept nogil:
    """Return to how many numbers a step's output is projected, by a matrix without rows for x and without a bias; 0:
    it is not."""
    if cell is Lstm:
        return c.P
    else:
        return 0


cdef inline bint projects(const cell *c) noexcept nogil:
    return projection_of(c) > 0


cdef inline Py_ssize_t size_of_h(const cell *c, Py_ssize_t H) noexcept nogil:
    """Return how many numbers a row of h has."""
    return projection_of(c) if projects(c) else H


cdef inline int products_of(const cell *c) noexcept nogil:
    """Return how many products a step has; each needs the results of the one before."""
    return row_of(c).products + projects(c)


cdef inline int x_products_of(const cell *c) noexcept nogil:
    """Return how many of a step's products, the first ones, have rows of x."""
    return row_of(c).products


cdef inline int matrices_of(const cell *c) noexcept nogil:
    """Return how many matrices of weights there are."""
    return row_of(c).matrices + projects(c)


cdef inline int state_matrices_of(const cell *c) noexcept nogil:
    """Return by how many matrices a step's d is multiplied for the gradient of the state before it."""
    return 1 + matrices_of(c) - products_of(c)


cdef inline Py_ssize_t gates_of(const cell *c) noexcept nogil:
    """Return how many gates all matrices have together."""
    return c.gates[0] + c.gates[1]


cdef inline Py_ssize_t gates_of_product(const cell *c, int n) noexcept nogil:
    """Return how many gates product n of a step computes; a projection is one."""
    if n >= x_products_of(c):
        return 1
    return c.gates[n] if x_products_of(c) > 1 else gates_of(c)


cdef inline Py_ssize_t recurrent_weights(const cell *c, Py_ssize_t H) noexcept nogil:
    """Return how many weights a step multiplies with its states."""
    return gates_of(c) * H * size_of_h(c, H) + H * projection_of(c)


cdef inline Py_ssize_t columns_of(const cell *c, Py_ssize_t H) noexcept nogil:
    """Return how many numbers a row of gradients d has: H for each gate, H for d_hc, and d_h of a projection."""
    return (gates_of(c) + row_of(c).separate) * H + projection_of(c)


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
        gates = gates_of_product(c, n)
        w.lines[n] = gates * (ceil_div(P, w.L) if n == 1 else w.units)
        w.width[n] = LINES // gates * gates
        w.panels[n] = ceil_div(w.lines[n], w.width[n])
    w.line_bytes = 64 if c.format == UNQUANTIZED else w.L * bytes_per_code(c.format)
    w.speed = speed_of(c.format, itemsize)
    w.cell = row_of(c).forward
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
    w.K[0] = gates_of_product(c, 0) * H
    w.K[1] = P if projects(c) else N - w.K[0]
    w.lines[0], w.lines[1], w.ahead[0], w.ahead[1] = ceil_div(P, w.L), w.units, 0, 0
    w.width[0] = w.width[1] = PANEL_LINES
    w.panels[0], w.panels[1] = count_panels(w.lines[0]), count_panels(w.lines[1]) if w.products > 1 else 0
    w.line_bytes, w.speed = 64, speed_of(UNQUANTIZED, itemsize)
    w.cell = row_of(c).backward
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
    if products_of(c) > 1 and B >= ROWS_ALONE * threads and rows_apart(B, all_weights * itemsize, 1) == 0:
        return cheapest(&w, threads, False, True)
    return grid_of_step(&w, all_weights * itemsize, threads)


# ------------------------------------------------------------------------------------------------------------- forward
cdef enum:  # the regions of its workspace; in each but WEIGHTS and CODES, every group has its rows behind those before
    WEIGHTS  # packed panels, and the peepholes of each line behind them: unless a layer has them
    H_EVEN, H_ODD  # h before steps of even and of odd number [B, P]; one with two products overwrites it
    CS  # [B, H], of the LSTM
    M  # o * co [B, H], which is projected
    HR, U  # h_prev * r and u [B, H], of the GRU
    X_CHUNK  # x of a chunk of steps [chunk * B, I]
    CODES  # quantized rows of h, and of h_prev * r, a copy for each member of a group [members * B, P]
    M_CODES  # and of m [members * B, H]
    Z  # the products of a chunk of steps with x, in panels
    SLOTS  # of batch rows (steps.pxd)
    FORWARD_REGIONS

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
    Py_ssize_t z_panels  # for which Z has space
    Py_ssize_t[FORWARD_REGIONS] start  # where each region starts
    Workspace workspace  # the scratch memory


cdef struct Part:
    Py_ssize_t member  # which one of its group it is
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t[PRODUCTS] j0, j1  # panels of each product
    Py_ssize_t shift  # of its rows in scratch


cdef inline void list_regions(const Forward *p, const cell *c, Region *regions) noexcept nogil:
    """List the regions of a forward pass's workspace, FORWARD_REGIONS."""
    cdef Py_ssize_t gaps = p.grid.groups * p.gap, rows = p.grid.members * p.B, z_rows = 0
    cdef bint quantizes = c.format == INT8, two = products_of(c) > 1
    if p.chunk > 1 or not p.packs_all:
        z_rows = p.z_panels * p.chunk * p.B * LINES
    regions[WEIGHTS] = region("weights", 0 if p.packed else 1, p.panels, 0)
    regions[H_EVEN] = region("h", p.B, p.Ps, gaps)
    regions[H_ODD] = region("h of odd steps", 0 if two else p.B, p.Ps, gaps)
    regions[CS] = region("cs", p.B if row_of(c).states > 1 else 0, p.Hs, gaps)
    regions[M] = region("m", p.B if projects(c) else 0, p.Hs, gaps)
    regions[HR] = region("h_prev * r", p.B if two and not projects(c) else 0, p.Hs, gaps)
    regions[U] = region("u", p.B if two and not projects(c) else 0, p.Hs, gaps)
    regions[X_CHUNK] = region("x", p.chunk * p.B, p.Is, gaps)
    regions[CODES] = region("codes of h", rows if quantizes else 0, p.As[0], p.grid.members * gaps)
    regions[M_CODES] = region("codes of m", rows if quantizes and projects(c) else 0, p.As[1], p.grid.members * gaps)
    regions[Z] = region("z", z_rows, p.L, gaps)
    regions[SLOTS] = region("slots", 1, size_of_slots(p.B, p.L), 0)


cdef inline Forward forward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed, Grid grid
) noexcept nogil:
    """Plan a forward pass with this grid.  If the weights are `packed` already, its workspace has no space for them."""
    cdef Forward p
    cdef Region[FORWARD_REGIONS] regions
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), n
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout, p.y_layout = contiguous_layout(B, I), contiguous_layout(B, P)
    p.L = 64 // itemsize
    p.packed = packed
    p.grid = grid
    p.packs_all = packed or packs_before(&grid, T, B, (gates_of(c) * H * I + recurrent) * itemsize)
    p.w[0] = panels_of(p.packs_all, I, P, H, p.L, gates_of_product(c, 0), c.format)
    if row_of(c).separate:
        separate_last_gate(&p.w[0], c.gates[0])
    if p.packs_all:
        compact_gates(&p.w[0])
    if cell is Lstm:
        for n in range(gates_of(c)):
            p.w[0].column[n] = c.column[n + c.coupled]
    p.w[1].count = p.w[1].size = 0
    if products_of(c) > 1:
        p.w[1] = panels_of(p.packs_all, 0 if projects(c) else I, H, P, p.L, gates_of_product(c, 1), c.format)
    p.w[0].transposed = p.w[1].transposed = c.transposed
    p.panels = p.w[0].size * p.w[0].count + p.w[1].size * p.w[1].count + row_of(c).peepholes * p.w[0].J * p.L
    p.z_panels = max(p.w[0].count, p.w[1].count) if projects(c) else p.w[0].count + p.w[1].count
    p.Is, p.Hs, p.Ps = scratch_stride(I, p.L), scratch_stride(H, p.L), scratch_stride(P, p.L)
    p.As[0], p.As[1] = p.Ps, p.Hs
    if c.format == INT8:
        p.Is = quantized_row_stride(I)
        p.As[0], p.As[1] = quantized_row_stride(P), quantized_row_stride(H)
    p.chunk = steps_per_chunk(T, B, p.grid.groups)
    p.w[0].prefetches = p.w[1].prefetches = to_prefetch(recurrent * itemsize, p.grid.members)
    p.gap = max(THREAD_GAP * p.L, ROWS_AHEAD * max(p.Hs, p.Ps)) if p.grid.groups > 1 else 0
    list_regions(&p, c, regions)
    p.workspace = lay_out(regions, FORWARD_REGIONS, p.start)
    if products_of(c) > 1:
        p.start[H_ODD] = p.start[H_EVEN]
    if not projects(c):
        p.start[M_CODES] = p.start[CODES]
    return p


cdef inline Forward plan_forward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed,
    Py_ssize_t threads
) noexcept nogil:
    """Plan a forward pass with the grid of the least cost on at most so many threads."""
    return forward_of(c, T, B, I, H, itemsize, packed, grid_forward(c, T, B, I, H, itemsize, packed, threads))


cdef inline bint stores_rows(const Forward *p) noexcept nogil:
    """Whether h is stored in whole rows after a step, not line by line: while a thread writes a line of one row after
    the other, its cache fetches that of the rows that come next, and these may be another thread's."""
    return p.gap > 0 and p.grid.members == 1 and p.steps.step_mask is NULL


cdef inline void use_step_mask(Forward *p, const unsigned char *step_mask, void *scratch) noexcept nogil:
    """Let rows end, and start anew, where the mask [T, B] says so (steps.pxd); its rows get slots in `scratch`."""
    cdef char *slots = <char *> scratch + p.start[SLOTS] * (64 // p.L)
    set_step_mask(&p.steps, step_mask, <Slot *> slots, p.grid.groups)


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
    return rows + p.start[H_ODD if k % 2 else H_EVEN]


cdef inline real *x_of(const Forward *p, real *scratch, const Part *part) noexcept nogil:
    """Where a part keeps the x of a chunk of steps."""
    return scratch + part.shift + p.start[X_CHUNK] + p.chunk * part.b0 * p.Is


cdef inline Py_ssize_t codes_of_member(const Forward *p, int n) noexcept nogil:
    """Reals of scratch for rows of codes of all rows of h that product n reads: each member of a group has its own."""
    return p.B * p.As[n] + p.grid.groups * p.gap


cdef inline real *codes_of(const Forward *p, real *scratch, const Part *part, int n) noexcept nogil:
    """Where a part has its rows of codes, the first one that of slot 0."""
    return scratch + part.shift + p.start[M_CODES if n else CODES] + part.member * codes_of_member(p, n)


cdef inline real *z_of(const Forward *p, real *scratch, const Part *part, int n) noexcept nogil:
    """Where a part keeps product n of x and the weights for a chunk of steps, panel after panel."""
    cdef Py_ssize_t row = p.chunk * LINES * p.L
    scratch += part.shift + p.start[Z] + p.z_panels * part.b0 * row
    return scratch + p.w[0].count * (part.b1 - part.b0) * row if n else scratch


# ------------------------------------------------------------------------------------------------------------ backward
cdef enum:  # the regions of its workspace
    TRANSPOSED  # panels of w.T; later float16's weight gradients in float32
    D_H, D_CS  # the gradients of the states that the steps so far have given [B, P], [B, H]
    PEEPHOLES  # three lines side by side for each line of units
    D  # [T * B, columns_of]
    X_TILES, H_TILES  # of a block of rows: x and h, or if transposed d, in tiles
    SUMS  # of columns of d, in double
    PANELS  # of a block of rows: d, or if transposed x and h, in panels; a panel for each thread, or all
    BACKWARD_SLOTS  # of batch rows (steps.pxd)
    BACKWARD_REGIONS

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
    # Where the panels of each matrix begin in TRANSPOSED, those for h and those for x, and its weight gradients.
    Py_ssize_t[MATRICES] w_h, w_x, w_grad
    Py_ssize_t[BACKWARD_REGIONS] start  # where each region starts
    Workspace workspace  # the scratch memory


cdef inline void list_regions_back(const Backward *p, const cell *c, bint weights, Region *regions) noexcept nogil:
    """List the regions of a backward pass's workspace, BACKWARD_REGIONS."""
    cdef Py_ssize_t T = p.steps.T, block = min(T * p.B, <Py_ssize_t> ROW_BLOCK), parts = parts_of(&p.grid)
    cdef Py_ssize_t all_panels = 0, own_panels = 0, N = max(p.N[0], p.N[matrices_of(c) - 1]), x_tiles, h_tiles
    cdef Py_ssize_t panels = parts
    cdef int n
    for n in range(matrices_of(c)):
        all_panels += (p.h_panels[n] + (p.x_panels if p.x_rows[n] > 0 else 0)) * p.panel[n]
        own_panels += p.panel[n]
    x_tiles, h_tiles = count_tiles(p.I), count_tiles(max(p.P, p.H))
    if c.transposed:
        x_tiles = h_tiles = count_tiles(N)
        panels = p.x_panels + max(p.h_panels[0], p.h_panels[1])
    regions[TRANSPOSED] = region("w.T", 1, max(all_panels, parts * own_panels), 0)
    regions[D_H] = region("d_h", p.B, p.Ps, 0)
    regions[D_CS] = region("d_cs", p.B if row_of(c).states > 1 else 0, p.Hs, 0)
    regions[PEEPHOLES] = region("peepholes", p.J, row_of(c).peepholes * p.L, 0)
    regions[D] = region("d", T * p.B, p.Ns, 0)
    regions[X_TILES] = region("tiles of x", x_tiles if weights else 0, p.tile_gap, 0)
    regions[H_TILES] = region("tiles of h", h_tiles if weights else 0, p.tile_gap, 0)
    regions[SUMS] = region("sums of d", 2 if weights else 0, max(ceil_div(p.N[0], p.L), 2 * p.J) * p.L, 0)
    regions[PANELS] = region("panels", panels if weights else 0, block * PANEL_LINES * p.L, 0)
    regions[BACKWARD_SLOTS] = region("slots", 1, size_of_slots(p.B, p.L), 0)


cdef inline Backward backward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights, Grid grid
) noexcept nogil:
    """Plan a backward pass with this grid; with `weights` it computes gradients of the weights and biases too."""
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), panels = 0
    cdef int n
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout = p.d_x_layout = contiguous_layout(B, I)
    p.h_layout = p.d_y_layout = contiguous_layout(B, P)
    p.cs_layout = contiguous_layout(B, H)
    p.accumulate_x_grad, p.transposed = False, c.transposed
    p.L = 64 // itemsize
    p.J, p.JP = ceil_div(H, p.L), ceil_div(P, p.L)
    p.Hs, p.Ps, p.Ns = scratch_stride(H, p.L), scratch_stride(P, p.L), scratch_stride(columns_of(c, H), p.L)
    p.h_panels[0], p.h_panels[1] = count_panels(p.JP), count_panels(p.J)
    p.x_panels = count_panels(ceil_div(I, p.L))
    p.grid = grid
    p.packs_all = projects(c) or packs_before(&grid, T, B, (gates_of(c) * H * I + recurrent) * itemsize)
    p.prefetches = to_prefetch(recurrent * itemsize, p.grid.members)
    p.tile_gap = scratch_stride(min(T * B, <Py_ssize_t> ROW_BLOCK) * ROWS, p.L)
    for n in range(matrices_of(c)):
        p.N[n], p.column[n] = c.gates[n] * H, n * c.gates[0] * H
        p.x_rows[n], p.h_rows[n] = I, P
        if n == 1 and projects(c):
            p.N[n], p.x_rows[n], p.h_rows[n] = P, 0, H
        p.h_column[n] = p.column[n] + (H if n == 1 and row_of(c).separate else 0)
        p.panel[n] = PANEL_LINES * p.L * p.N[n]
        p.w_grad[n] = n * (I + P) * p.N[0]
        p.w_h[n] = panels
        panels += p.h_panels[n] * p.panel[n]
    for n in range(matrices_of(c)):
        p.w_x[n] = panels
        panels += p.x_panels * p.panel[n] if p.x_rows[n] > 0 else 0
    list_regions_back(&p, c, weights, regions)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


cdef inline Backward plan_backward(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights,
    Py_ssize_t threads
) noexcept nogil:
    """Plan a backward pass with the grid of the least cost on at most so many threads."""
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


cdef inline void use_step_mask_back(Backward *p, const unsigned char *step_mask, void *scratch) noexcept nogil:
    """Let rows end, and start anew, as in the forward pass: `use_step_mask`."""
    cdef char *slots = <char *> scratch + p.start[BACKWARD_SLOTS] * (64 // p.L)
    set_step_mask(&p.steps, step_mask, <Slot *> slots, p.grid.groups)


cdef inline Grid grid_of_cell_grad(Py_ssize_t B, Py_ssize_t H, Py_ssize_t threads) noexcept nogil:
    return grid_of(1 if B * H < 1 << 13 else min(threads, B), 1)


cdef inline Backward cell_grad_plan(Py_ssize_t B, Py_ssize_t H, Py_ssize_t itemsize, Grid grid) noexcept nogil:
    """Plan `LSTMBlockCellGrad`, which has no product; the rows of d are those of dicfo."""
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef int n
    p.steps = steps_of(1, B)
    p.B, p.I, p.H = B, 0, H
    p.cs_layout = p.d_y_layout = contiguous_layout(B, H)
    p.L = 64 // itemsize
    p.J = ceil_div(H, p.L)
    p.N[0] = p.Ns = 4 * H
    p.grid = grid
    for n in range(BACKWARD_REGIONS):
        regions[n] = region("", 0, 0, 0)
    regions[PEEPHOLES] = region("peepholes", p.J, LSTM.peepholes * p.L, 0)
    regions[D] = region("d", B, p.Ns, 0)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


# -------------------------------------------------------------------------------------------------------- requirements
cdef inline tuple forward_requirements(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    """Return what an op's forward pass requires on at most so many threads: `requirements_of`."""
    cdef Forward p = plan_forward(c, T, B, I, H, itemsize, False, threads)
    return requirements_of(&p.workspace, p.L, &p.grid)


cdef inline tuple backward_requirements(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights,
    int threads
):
    """Return what an op's backward pass requires on at most so many threads; with `weights` it computes their gradients
    too."""
    cdef Backward p = plan_backward(c, T, B, I, H, itemsize, weights, threads)
    return requirements_of(&p.workspace, p.L, &p.grid)
