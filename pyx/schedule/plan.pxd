"""Plans of the passes over cells: how a call is divided into parts, and where everything is in its workspace.

A pass is a struct, `Forward` or `Backward`.  Its plan depends on the cell and on sizes alone, so calls of the same
sizes share it.  A call copies it, and sets what depends on its arrays, its mask and the threads that are ready
(`forward_pass`, `backward_pass`).  dense.pxd has the passes of a dense layer.

A call has a part for each thread.  The parts of a group have the same batch rows, and each its own hidden units: its
own panels of the packed weights.  Parts of different groups do not wait for each other.  In a group each product of a
step needs the results of all parts of the product before.  cost.pxd chooses the grid of groups and members.

    T, B, I, H, P   steps, batch rows, inputs, cells, numbers in a row of h (H, or those of a projection)
    L, J            numbers in a cache line; lines of H
    n               the number of a product of a step (0, 1), or of a matrix of weights
    p               the pass; p.c is the cell, p.w are the packed panels of each product
    k               the number by which a step is processed
    b, b0, b1       a slot of a batch row (steps.pxd), a range of slots
    j, j0, j1       a packed panel, a range of panels
    part            the index of a part: group * members + member
    share           the slots and panels of a part
    work            what a pass computes, reads and waits for (cost.pxd)

Sizes and strides of scratch memory are in reals, and whole lines.
"""
from cells.types cimport PRODUCTS, Cell
from passes.gradients cimport PANEL_LINES, count_panels, count_tiles, tile_stride_of
from passes.indices cimport H_PREV, OUT_O
from passes.steps cimport Layout, Steps, active_end, contiguous_layout, size_of_slots, steps_of
from product.integer cimport quantized_row_stride
from product.lines cimport REAL_BYTES, Array, L, lines_in
from product.panels cimport (
    THREAD_GAP, Panels, compact_gates, omit_x, panels_of, scratch_stride, separate_last_gate
)
from product.quantized cimport INT8, UNQUANTIZED, bytes_per_weight
from product.real cimport MATRICES, real
from product.tile cimport LINES, ROW_BLOCK
from schedule.cost cimport (
    Grid, Work, ceil_div, choose_grid, cost_of, parts_of, speed_of, threads_of, work_of
)
from schedule.machine cimport L2, fewest_prefetching_rows, machine
from schedule.team cimport part_start
from schedule.workspace cimport Region, Workspace, lay_out, region

cdef enum:
    PREFETCHED_ROWS = 16  # CPUs prefetch along a column of lines for fewer rows than this
    PACKING = 16  # arithmetic operations that take as long as to pack a weight
    CHUNK_ROWS = 96  # rows of a group, about, whose products with x are computed at once

# Thresholds chosen by hand, where single steps became faster.  No command measures them alone; single steps are in
# `python benchmarks/bench.py --tasks GRUBlockCell GRUBlockCellGrad LSTMBlockCell LSTMBlockCellGrad`.
cdef enum:
    PACKED_ROWS = 16  # rows of a thread, from which on all weights of a single step are packed before they are used
    MANY_PACKED_ROWS = 64  # the same for weights of more than BYTES_PER_ROW bytes for each row of the call
    BYTES_PER_ROW = 2048
    SINGLE_STEP_ROWS = 32  # rows of a part, from which on a GRU's backward single step divides rows instead of units


cdef inline Py_ssize_t size_of_h(const Cell *c, Py_ssize_t H) noexcept nogil:
    """Return how many numbers a row of h has."""
    return c.P if c.projects else H


cdef inline Py_ssize_t gates_of(const Cell *c) noexcept nogil:
    """Return how many gates all matrices have together."""
    return c.gates[0] + c.gates[1]


cdef inline Py_ssize_t gates_of_product(const Cell *c, int n) noexcept nogil:
    """Return how many gates product n of a step computes; a projection is one."""
    if n >= c.traits.products:
        return 1
    return c.gates[n] if c.traits.products > 1 else gates_of(c)


cdef inline Py_ssize_t recurrent_weights(const Cell *c, Py_ssize_t H) noexcept nogil:
    """Return how many weights a step multiplies with its states."""
    return gates_of(c) * H * size_of_h(c, H) + H * c.P


# --------------------------------------------------------------------------------------------------------------- grids
cdef inline Py_ssize_t packing_threads(Py_ssize_t B, Py_ssize_t nbytes, Py_ssize_t threads) noexcept nogil:
    """Return how many threads pack all weights of a single step, of `nbytes`, before they share its rows.

    It is 0 where packing block by block is faster: for few rows, and for weights that outgrow a core's cache."""
    if nbytes > machine.caches[L2]:
        return 0
    return min(threads, B // (PACKED_ROWS if nbytes <= B * BYTES_PER_ROW else MANY_PACKED_ROWS))


cdef inline Grid choose_single_step_grid(const Work *work, Py_ssize_t nbytes, Py_ssize_t threads) noexcept nogil:
    """Return the grid of a single step with weights of `nbytes` that the layer has not packed: its threads share either
    the hidden units or the rows."""
    cdef Grid by_units = choose_grid(work, threads, True, False), by_rows
    if packing_threads(work.B, nbytes, threads) == 0:
        return by_units
    by_rows = choose_grid(work, packing_threads(work.B, nbytes, threads), False, True)
    if by_rows.groups == 1:
        return by_units
    if by_units.members == 1 or machine.groups > 0:
        return by_rows
    return by_rows if cost_of(work, by_rows.groups, 1) < cost_of(work, 1, by_units.members) else by_units


cdef inline bint packs_before(const Grid *grid, Py_ssize_t T, Py_ssize_t B, Py_ssize_t nbytes) noexcept nogil:
    """Return whether all weights, of `nbytes`, are packed before the steps.  A single step whose hidden units are
    divided packs block by block."""
    return T > 1 or (grid.members == 1 and packing_threads(B, nbytes, 1) > 0)


cdef inline Grid choose_forward_grid(
    const Cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, bint packed, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a forward pass with the least predicted cost on at most so many threads.

    packed : whether the layer has packed the weights before
    """
    cdef Work work = work_of(T, B, c.products)
    cdef Py_ssize_t P = size_of_h(c, H), weights = gates_of(c) * H * I + recurrent_weights(c, H), gates, n
    work.units = lines_in(H)
    work.K[0], work.x_size[0], work.K[1], work.x_size[1] = P, I, H, 0 if c.projects else I
    work.panels[1] = 0
    for n in range(work.products):
        gates = gates_of_product(c, n)
        work.lines[n] = gates * (lines_in(P) if n == 1 else work.units)
        work.width[n] = LINES // gates * gates
        work.panels[n] = ceil_div(work.lines[n], work.width[n])
    work.line_bytes = L * bytes_per_weight(c.format)
    work.speed = speed_of(c.format)
    work.cell = c.traits.forward_time
    work.packs = not packed
    work.divisible_time = 0 if packed else PACKING * weights / work.speed
    work.barriers = 1 if packed else 2
    if packed or T > 1:
        return choose_grid(&work, threads, False, False)
    return choose_single_step_grid(&work, weights * REAL_BYTES, threads)


cdef inline Grid choose_backward_grid(
    const Cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, bint with_weight_grads, Py_ssize_t threads
) noexcept nogil:
    """Return the grid of a backward pass with the least predicted cost on at most so many threads.

    with_weight_grads : whether it computes gradients of the weights, too
    """
    cdef Work work = work_of(T, B, c.products)
    cdef Grid forward_grid = choose_forward_grid(c, T, B, I, H, True, threads)
    cdef Py_ssize_t P = size_of_h(c, H), N = gates_of(c) * H, all_weights = N * I + recurrent_weights(c, H), nbytes
    work.units = lines_in(H)
    work.K[0] = gates_of_product(c, 0) * H
    work.K[1] = P if c.projects else N - work.K[0]
    work.lines[0], work.lines[1], work.x_size[0], work.x_size[1] = lines_in(P), work.units, 0, 0
    work.width[0] = work.width[1] = PANEL_LINES
    work.panels[0] = count_panels(work.lines[0])
    work.panels[1] = count_panels(work.lines[1]) if work.products > 1 else 0
    work.line_bytes, work.speed = 64, speed_of(UNQUANTIZED)
    work.cell = c.traits.backward_time
    # Threads that the forward pass did not need may be asleep; those that it needs next time should not fall asleep.
    work.sleep_cost = -machine.sleep_cost if threads_of(&forward_grid) > 1 else machine.sleep_cost
    work.packs = True
    # x_grad, packing, storing gradients
    work.divisible_time = 2.0 * (T * B * I * N + PACKING * all_weights) / work.speed
    work.column_time = 2.0 * T * B * all_weights / work.speed if with_weight_grads else 0
    work.column_lines = lines_in(c.gates[0] * H)
    work.barriers = 3 + (2 * c.matrices * ceil_div(T * B, ROW_BLOCK) if with_weight_grads else 0)
    work.lines_read_in_part = T * B * lines_in(N) * (2 if with_weight_grads else 1)
    work.lines_read_by_all = T * B * (lines_in(I) + lines_in(P)) if with_weight_grads else 0
    if c.projects or T > 1:
        return choose_grid(&work, threads, False, False)
    nbytes = all_weights * REAL_BYTES
    if c.products > 1 and B >= SINGLE_STEP_ROWS * threads and packing_threads(B, nbytes, 1) == 0:
        return choose_grid(&work, threads, False, True)
    return choose_single_step_grid(&work, nbytes, threads)


# ------------------------------------------------------------------------------------------------------------- forward
cdef enum:  # the regions of the forward pass's workspace.  The rows of each group begin a `gap` behind those before.
    WEIGHTS  # packed panels, and behind them the peepholes of each line; empty if the layer has packed them
    H_EVEN, H_ODD  # h [B, P]: step k reads that of k % 2 and writes the other; with two products there is one
    CS  # [B, H]; of a cell with two states
    M  # o * co [B, H]; of a projected LSTM
    HR, U  # h_prev * r and u [B, H]; of a cell with two products, where a step writes h over h_prev
    X_CHUNK  # x of a chunk of steps [chunk * B, I]
    CODES  # quantized rows of h and of h_prev * r, a copy for each member of a group [members * B, P]
    M_CODES  # quantized rows of m, a copy for each member of a group [members * B, H]
    Z  # x @ w_x + b of a chunk of steps, in panels
    SLOTS  # the slots of batch rows (steps.pxd)
    FORWARD_REGIONS

cdef struct Forward:  # a forward pass
    Cell c
    const Array *inputs  # the caller's arrays, at the indices of indices.pxd
    const Array *outputs
    real *scratch  # the workspace, which begins at a cache line
    Steps steps  # that are processed
    Py_ssize_t B, I, H, P
    Py_ssize_t Is, Hs, Ps  # strides in scratch of rows of I, H and P numbers
    Py_ssize_t[PRODUCTS] h_stride  # of the rows that a product reads, of h, h_prev * r or m, or of their codes
    Layout x_layout, y_layout  # of x and of the output h
    Py_ssize_t chunk  # steps whose products with x are computed at once; 1: in the step itself
    Grid grid
    bint packed  # the layer has packed the weights
    bint packs_all  # all panels are packed before the steps; else a single step packs what it uses
    Py_ssize_t gap  # reals between the rows of two groups in a region
    Panels[PRODUCTS] w
    real *peep  # the three peepholes of each line, behind the panels
    Py_ssize_t packed_size  # reals of all panels and of the peepholes
    Py_ssize_t z_panel_count  # that Z has space for
    Py_ssize_t[FORWARD_REGIONS] start  # of each region
    Workspace workspace


cdef struct ForwardShare:  # of a part of a forward pass
    Py_ssize_t member  # the part's index in its group
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t[PRODUCTS] j0, j1  # panels of each product
    real *rows  # scratch + group * gap: slot b of a region is at rows + start + b * stride


cdef inline void list_forward_regions(const Forward *p, Region *regions) noexcept nogil:
    """List the regions of a forward pass's workspace.

    regions : [FORWARD_REGIONS], written
    """
    cdef const Cell *c = &p.c
    cdef Py_ssize_t gaps = p.grid.groups * p.gap, code_rows = p.grid.members * p.B, z_rows = 0
    cdef bint quantizes = c.format == INT8, two = c.products > 1
    if p.chunk > 1 or not p.packs_all:
        z_rows = p.z_panel_count * p.chunk * p.B * LINES
    regions[WEIGHTS] = region("weights", 0 if p.packed else 1, p.packed_size, 0)
    regions[H_EVEN] = region("h", p.B, p.Ps, gaps)
    regions[H_ODD] = region("h of odd steps", 0 if two else p.B, p.Ps, gaps)
    regions[CS] = region("cs", p.B if c.traits.states > 1 else 0, p.Hs, gaps)
    regions[M] = region("m", p.B if c.projects else 0, p.Hs, gaps)
    regions[HR] = region("h_prev * r", p.B if two and not c.projects else 0, p.Hs, gaps)
    regions[U] = region("u", p.B if two and not c.projects else 0, p.Hs, gaps)
    regions[X_CHUNK] = region("x", p.chunk * p.B, p.Is, gaps)
    regions[CODES] = region("codes of h", code_rows if quantizes else 0, p.h_stride[0], p.grid.members * gaps)
    regions[M_CODES] = region("codes of m", code_rows if quantizes and c.projects else 0, p.h_stride[1],
                              p.grid.members * gaps)
    regions[Z] = region("z", z_rows, L, gaps)
    regions[SLOTS] = region("slots", 1, size_of_slots(p.B), 0)


cdef inline Forward plan_forward(
    const Cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, bint packed, Grid grid
) noexcept nogil:
    """Plan a forward pass on this grid.

    packed : whether the layer has packed the weights before; the workspace then has no space for them
    """
    cdef Forward p
    cdef Region[FORWARD_REGIONS] regions
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), gate
    cdef int n
    p.c = c[0]
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout, p.y_layout = contiguous_layout(B, I), contiguous_layout(B, P)
    p.packed = packed
    p.grid = grid
    p.chunk = max(<Py_ssize_t> 1, min(T, CHUNK_ROWS // (B // p.grid.groups)))
    p.packs_all = packed or packs_before(&grid, T, B, (gates_of(c) * H * I + recurrent) * REAL_BYTES)
    p.w[0] = panels_of(p.packs_all, I, P, H, gates_of_product(c, 0), c.format)
    if c.traits.separate:
        separate_last_gate(&p.w[0], c.gates[0])
    if p.packs_all:
        compact_gates(&p.w[0])
    for gate in range(c.gates[0]):
        p.w[0].column[gate] = c.column[gate + c.coupled]
    p.w[1].count = p.w[1].size = 0
    if c.products > 1:
        p.w[1] = panels_of(p.packs_all, 0 if c.projects else I, H, P, gates_of_product(c, 1), c.format)
    p.w[0].transposed = p.w[1].transposed = c.transposed
    if not packed and c.transposed and 1 < T == p.chunk and grid.groups == 1:  # x @ w_x is one product
        for n in range(c.products):
            omit_x(&p.w[n])
    p.packed_size = p.w[0].size * p.w[0].count + p.w[1].size * p.w[1].count + c.traits.peepholes * p.w[0].J * L
    p.z_panel_count = max(p.w[0].count, p.w[1].count) if c.projects else p.w[0].count + p.w[1].count
    p.Is, p.Hs, p.Ps = scratch_stride(I), scratch_stride(H), scratch_stride(P)
    p.h_stride[0], p.h_stride[1] = p.Ps, p.Hs
    if c.format == INT8:
        p.Is = quantized_row_stride(I)
        p.h_stride[0], p.h_stride[1] = quantized_row_stride(P), quantized_row_stride(H)
    p.w[0].prefetching_rows = fewest_prefetching_rows(recurrent * bytes_per_weight(c.format), p.grid.members)
    p.w[1].prefetching_rows = p.w[0].prefetching_rows
    p.gap = max(THREAD_GAP * L, PREFETCHED_ROWS * max(p.Hs, p.Ps)) if p.grid.groups > 1 else 0
    list_forward_regions(&p, regions)
    p.workspace = lay_out(regions, FORWARD_REGIONS, p.start)
    if c.products > 1:
        p.start[H_ODD] = p.start[H_EVEN]
    if not c.projects:
        p.start[M_CODES] = p.start[CODES]
    return p


cdef inline bint stores_rows(const Forward *p) noexcept nogil:
    """Return whether h is stored in whole rows after a step, and not line by line.

    While a thread writes a line of one row after the other, its cache prefetches that line of the rows that follow,
    which may be another thread's."""
    return p.gap > 0 and p.grid.members == 1 and p.steps.step_mask is NULL


cdef inline void use_panels(Forward *p, void *panels) noexcept nogil:
    """Set where packed weights are, or will be.

    panels : `p.packed_size` reals from a cache line on; the workspace's, or the layer's
    """
    cdef real *second = <real *> panels + p.w[0].size * p.w[0].count
    p.w[0].base, p.w[1].base = panels, second
    p.peep = second + p.w[1].size * p.w[1].count


cdef inline ForwardShare forward_share(const Forward *p, Py_ssize_t part) noexcept nogil:
    """Return the slots and panels of a part."""
    cdef ForwardShare share
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = part // members
    cdef int n
    share.member, share.rows = part % members, p.scratch + group * p.gap
    share.b0, share.b1 = part_start(p.B, group, groups), part_start(p.B, group + 1, groups)
    for n in range(PRODUCTS):
        share.j0[n] = part_start(p.w[n].count, share.member, members)
        share.j1[n] = part_start(p.w[n].count, share.member + 1, members)
    return share


cdef inline Py_ssize_t end_of_chunk(const Forward *p, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1) noexcept nogil:
    """Return the number of the step behind the chunk that begins with step k, for a part with the slots b0 to b1.

    The rows (t, row) of a chunk that are not finished are as many as X_CHUNK and Z have space for."""
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
    """Return the number of the step behind the chunk that begins with step k, where all groups have the same chunks."""
    cdef Py_ssize_t end = p.steps.T, group, groups = p.grid.groups
    for group in range(1 if p.steps.slots is NULL else groups):
        end = min(end, end_of_chunk(p, k, part_start(p.B, group, groups), part_start(p.B, group + 1, groups)))
    return end


cdef inline real *h_before(const Forward *p, real *rows, Py_ssize_t k) noexcept nogil:
    """Return where h is before step k, and after step k - 1; `rows` as in ForwardShare."""
    return rows + p.start[H_ODD if k % 2 else H_EVEN]


cdef inline real *x_of(const Forward *p, const ForwardShare *share) noexcept nogil:
    """Return where a part has the rows of x of a chunk."""
    return share.rows + p.start[X_CHUNK] + p.chunk * share.b0 * p.Is


cdef inline real *z_of(const Forward *p, const ForwardShare *share, int n) noexcept nogil:
    """Return where a part has x @ w_x + b of product n for a chunk of steps, panel after panel."""
    cdef Py_ssize_t slot_size = p.chunk * LINES * L
    cdef real *z = share.rows + p.start[Z] + p.z_panel_count * share.b0 * slot_size
    return z + p.w[0].count * (share.b1 - share.b0) * slot_size if n else z


# ------------------------------------------------------------------------------------------------------------ backward
cdef enum:  # the regions of the backward pass's workspace
    TRANSPOSED  # packed panels of w.T, read until x_grad is computed; then float16's weight gradients, in float32
    D_H, D_CS  # the gradients of the states that the steps processed so far give [B, P], [B, H]
    PEEPHOLES  # three lines side by side for each line of units
    D  # the gradients of the pre-activations, d [T * B, Ns]
    X_TILES, H_TILES  # of a block of rows: x and h in tiles for `weight_grads`, d for `transposed_grads`
    SUMS  # of the columns of d, in double
    PANELS  # of a block of rows: each part's panel of d for `weight_grads`, all of x and h for `transposed_grads`
    BACKWARD_SLOTS  # the slots of batch rows (steps.pxd)
    BACKWARD_REGIONS

cdef struct Backward:  # a backward pass
    Cell c
    const Array *inputs  # the caller's arrays, at the indices of indices.pxd
    const Array *grads
    real *scratch  # the workspace, which begins at a cache line
    Steps steps  # that are processed
    Layout x_layout, h_layout, cs_layout  # of x, the output h, and cs
    Layout d_y_layout, d_x_layout  # of the incoming gradient of h, and of x_grad
    Py_ssize_t B, I, H, P, J
    Py_ssize_t JP  # lines of P
    Py_ssize_t Hs, Ps, Ns  # strides in scratch of rows of H and of P numbers, and of d
    # For each matrix of weights:
    Py_ssize_t[MATRICES] x_size, h_size  # the numbers of x, and of h or m, that it is multiplied with
    Py_ssize_t[MATRICES] N  # its columns
    Py_ssize_t[MATRICES] column, h_column  # where their gradients begin in a row of d, for w_x and for w_h
    int[MATRICES] h_source, h_factor  # its w_h was multiplied with this input (indices.pxd) times that, 0: none
    bint[MATRICES] separate  # these differ: of a GRU that resets after the product d_c_bar for x, and d_hc for h
    Py_ssize_t[MATRICES] h_panel_count  # panels of w.T that give gradients of h or m
    Py_ssize_t x_panel_count  # panels of w.T that give gradients of x, the same for each matrix; 0: these are skipped
    Py_ssize_t[MATRICES] panel_size  # reals of a panel of w.T
    Py_ssize_t[MATRICES] h_panels_at, x_panels_at  # where its panels for h and for x begin in TRANSPOSED
    Py_ssize_t[MATRICES] w_grad_at  # where its gradient begins in TRANSPOSED, of float16 alone
    Grid grid
    bint packs_all  # all panels are packed before the steps; else a single step packs what it uses
    Py_ssize_t prefetching_rows  # as in Panels
    bint accumulate_x_grad  # the gradient is added to what is in x_grad
    Py_ssize_t[BACKWARD_REGIONS] start  # of each region
    Workspace workspace


cdef inline void list_backward_regions(const Backward *p, bint with_weight_grads, Region *regions) noexcept nogil:
    """List the regions of a backward pass's workspace.

    with_weight_grads : whether it computes gradients of the weights, too
    regions : [BACKWARD_REGIONS], written
    """
    cdef const Cell *c = &p.c
    cdef Py_ssize_t T = p.steps.T, block = min(T * p.B, <Py_ssize_t> ROW_BLOCK), parts = parts_of(&p.grid)
    cdef Py_ssize_t all_panels = 0, own_panels = 0, N = max(p.N[0], p.N[c.matrices - 1]), x_tiles, h_tiles
    cdef Py_ssize_t panels = parts
    cdef int n
    for n in range(c.matrices):
        all_panels += (p.h_panel_count[n] + (p.x_panel_count if p.x_size[n] > 0 else 0)) * p.panel_size[n]
        own_panels += p.panel_size[n]
    x_tiles, h_tiles = count_tiles(p.I), count_tiles(max(p.P, p.H))
    if c.transposed:
        x_tiles = h_tiles = count_tiles(N)
        panels = p.x_panel_count + max(p.h_panel_count[0], p.h_panel_count[1])
    regions[TRANSPOSED] = region("w.T", 1, max(all_panels, parts * own_panels), 0)
    regions[D_H] = region("d_h", p.B, p.Ps, 0)
    regions[D_CS] = region("d_cs", p.B if c.traits.states > 1 else 0, p.Hs, 0)
    regions[PEEPHOLES] = region("peepholes", p.J, c.traits.peepholes * L, 0)
    regions[D] = region("d", T * p.B, p.Ns, 0)
    regions[X_TILES] = region("tiles of x", x_tiles if with_weight_grads else 0, tile_stride_of(&p.steps), 0)
    regions[H_TILES] = region("tiles of h", h_tiles if with_weight_grads else 0, tile_stride_of(&p.steps), 0)
    # A double takes two reals; the GRU that resets after the product sums d_c_bar and d_hc side by side.
    regions[SUMS] = region("sums of d", 2 if with_weight_grads else 0, max(lines_in(p.N[0]), 2 * p.J) * L, 0)
    regions[PANELS] = region("panels", panels if with_weight_grads else 0, block * PANEL_LINES * L, 0)
    regions[BACKWARD_SLOTS] = region("slots", 1, size_of_slots(p.B), 0)


cdef inline Backward plan_backward(
    const Cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, bint with_weight_grads, Grid grid
) noexcept nogil:
    """Plan a backward pass on this grid.

    with_weight_grads : whether it computes gradients of weights and biases, too
    """
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), panels = 0
    cdef int n
    p.c = c[0]
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout = p.d_x_layout = contiguous_layout(B, I)
    p.h_layout = p.d_y_layout = contiguous_layout(B, P)
    p.cs_layout = contiguous_layout(B, H)
    p.accumulate_x_grad = False
    p.J, p.JP = lines_in(H), lines_in(P)
    p.Hs, p.Ps = scratch_stride(H), scratch_stride(P)
    p.Ns = scratch_stride((gates_of(c) + c.traits.separate) * H + c.P)  # each gate, d_hc, d_h of a projection
    p.h_panel_count[0], p.h_panel_count[1] = count_panels(p.JP), count_panels(p.J)
    p.x_panel_count = count_panels(lines_in(I))
    p.grid = grid
    p.packs_all = c.projects or packs_before(&grid, T, B, (gates_of(c) * H * I + recurrent) * REAL_BYTES)
    p.prefetching_rows = fewest_prefetching_rows(recurrent * REAL_BYTES, p.grid.members)
    for n in range(c.matrices):
        p.N[n], p.column[n] = c.gates[n] * H, n * c.gates[0] * H
        p.x_size[n], p.h_size[n] = I, P
        p.h_source[n], p.h_factor[n] = H_PREV, c.traits.factor if n == 1 and c.products > 1 else 0
        if n == 1 and c.projects:
            p.N[n], p.x_size[n], p.h_size[n], p.h_source[n] = P, 0, H, OUT_O
        p.separate[n] = n == 1 and c.traits.separate
        p.h_column[n] = p.column[n] + (H if p.separate[n] else 0)
        p.panel_size[n] = PANEL_LINES * L * p.N[n]
        p.w_grad_at[n] = n * (I + P) * p.N[0]
        p.h_panels_at[n] = panels
        panels += p.h_panel_count[n] * p.panel_size[n]
    for n in range(c.matrices):
        p.x_panels_at[n] = panels
        panels += p.x_panel_count * p.panel_size[n] if p.x_size[n] > 0 else 0
    list_backward_regions(&p, with_weight_grads, regions)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


cdef struct BackwardShare:  # of a part of a backward pass in a phase
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t j0, j1  # panels


cdef inline BackwardShare backward_share(const Backward *p, Py_ssize_t part, Py_ssize_t panels) noexcept nogil:
    """Return the slots of a part, and which of so many panels it has."""
    cdef BackwardShare share
    cdef Py_ssize_t groups = p.grid.groups, members = p.grid.members, group = part // members, member = part % members
    share.b0, share.b1 = part_start(p.B, group, groups), part_start(p.B, group + 1, groups)
    share.j0, share.j1 = part_start(panels, member, members), part_start(panels, member + 1, members)
    return share
