"""The forward pass of all cells: `forward` is the list of its phases, and of the barriers between them.

    load states, pack panels
    for each chunk of steps:
        load x  ->  x @ w_x + b
        for each step:
            h @ w_h, and from it the cells
            if the cell has a second product: that, and from it the rest of the cells
    store states

Between packing and the end groups of threads (cost.pxd) go through the steps side by side, each with its own rows.  The
functions above `forward` are what a thread does in a phase: one part, which has the slots of its group and panels of
its own.  `forward_cells` in the cell's file computes states and outputs from the product of a few rows and one panel,
while that is in cache.

p : the plan: sizes, strides, packed panels, and where each region of scratch starts (plan.pxd)
c : the cell: its gates, activations and options (types.pxd)
inputs, outputs : the arrays of the call, the caller's, at the indices of indices.pxd
scratch : the workspace of the call, whose regions plan.pxd lists
rows : scratch as the rows of a group lie in it: slot b of region R is at rows + p.start[R] + b * stride
part, parts : the index of a part, and how many there are; `share` has the slots and panels of one
n : the product of a step, 0 or 1 (`products_of` in plan.pxd)
h : what product n reads: h of the step before, h_prev * r or m, as it is or quantized; the row of slot 0, p.h_stride[n]
    reals before that of slot 1
z : products of the panels, z_panel reals apart; each has LINES lines for every row of h
k, end : the number of a step in the order of processing, where a range of them ends
b, b0, b1 : a slot of a batch row (steps.pxd), a range of slots
row : a batch row, as the caller numbers it
r : the index of a step's first row in the chunk's x and z, which hold the active rows of all its steps
j, j0, j1 : a packed panel of product n, a range of panels; i, q : panels in that range that are multiplied together
L : reals in a cache line
"""
from cython.parallel cimport parallel, prange

from cells.types cimport Cell
from passes.arrays cimport Pass
from passes.indices cimport BIAS, CS_LAST, CS_PREV, H_LAST, H_PREV, INPUTS, OUT_H, OUTPUTS, STEP_OUTPUTS, W, X
from passes.operands cimport set_reset_states, set_states, set_torch_weights
from passes.steps cimport (
    RESET, Layout, ResetState, active_end, clear_finished_rows, contiguous_layout, count_active_rows, end_step_of,
    first_step_of, has_flag, load_active_rows, offset_of, reset_row, row_of_slot, step_at
)
from product.integer cimport quantize_row
from product.lines cimport Array, array_of, at, clear, lanes_of, load_row, no_array, store_row
from product.panels cimport (
    Panels, add_product, add_row_product, add_unpacked_product, compute_input_product, copy_bias, expand_gates,
    pack_bias, pack_panels, row_panels
)
from product.quantized cimport INT8, UNQUANTIZED
from product.real cimport COMPUTES_FLOAT, real
from product.tile cimport GROUP_TILES, LINES, ROW_PANELS, ROWS, TILE_SIZE, tile_group_height
from schedule.cost cimport packing_part, parts_of, threads_of, use_threads
from schedule.plan cimport (
    CS, HR, M, X_CHUNK, Z, Forward, ForwardShare, codes_of, end_of_chunk, end_of_common_chunk, forward_share, h_before,
    products_of, projects, stores_rows, use_forward_step_mask, use_panels, x_of, x_products_of, z_of
)
from schedule.team cimport Team, adopt_rounding, barrier, group_barrier, measured_cost, part_start, start_team
from schedule.workspace cimport guard_zones, release_zones


# ----------------------------------------------------------------------------------------------------- before the steps
cdef inline void load_state(
    const Forward *p, real *states, Py_ssize_t stride, Array initial, const ResetState *reset, Py_ssize_t size,
    Py_ssize_t b
) noexcept nogil:
    """Load the state that the row in slot b starts from.

    states : the region of this state, as the rows of the group lie in it
    initial : [B,size], the caller's, or no array for zeros
    """
    cdef Py_ssize_t k = first_step_of(&p.steps, b), row = row_of_slot(&p.steps, b)
    cdef Array start = at(initial, row * size if initial.data is not NULL else 0)
    if has_flag(&p.steps, k, b, RESET):
        start = reset_row(reset, step_at(&p.steps, k), row)
    if start.data is NULL:
        clear(states + b * stride, stride)
    else:
        load_row(states + b * stride, start, size)


cdef inline void clear_finished_outputs(
    const Forward *p, const Cell *c, const Array *outputs, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Clear one part of the finished rows of h and of what is saved.

    The backward pass does not read the latter there: they are cleared for a tape to depend on the inputs alone.
    """
    cdef Layout saved_layout = contiguous_layout(p.B, p.H)
    cdef int out
    if outputs[OUT_H].data is not NULL:
        clear_finished_rows(&p.steps, outputs[OUT_H], &p.y_layout, p.P, part, parts)
    for out in range(OUT_H + 1, OUT_H + 1 + c.traits.saved):
        if outputs[out].data is not NULL:
            clear_finished_rows(&p.steps, outputs[out], &saved_layout, p.H, part, parts)


cdef inline void load_states(
    const Forward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Load the initial states of one part of the rows, and clear one part of the finished rows of the outputs."""
    cdef ForwardShare share = forward_share(p, part)
    cdef real *rows = scratch + share.shift
    cdef Py_ssize_t count = share.b1 - share.b0, members = p.grid.members, b
    for b in range(share.b0 + part_start(count, share.member, members),
                   share.b0 + part_start(count, share.member + 1, members)):
        load_state(p, h_before(p, rows, first_step_of(&p.steps, b)), p.Ps, inputs[H_PREV], &p.steps.h_reset, p.P, b)
        if c.traits.states > 1:
            load_state(p, rows + p.start[CS], p.Hs, inputs[CS_PREV], &p.steps.cs_reset, p.H, b)
    if p.steps.slots is not NULL:
        clear_finished_outputs(p, c, outputs, part, parts_of(&p.grid))


cdef inline void pack_weights(
    const Forward *p, const Cell *c, const Array *inputs, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Pack one part of the panels with their biases, and of the peepholes.

    Weights are skipped if a single step packs them when it uses them, or if they are quantized (`pack_quantized`).
    """
    cdef const Panels *w
    cdef real *panels
    cdef Py_ssize_t panel_part = packing_part(&p.grid, part), j, j0, j1
    cdef int n
    for n in range(products_of(c)):
        w = &p.w[n]
        panels = <real *> w.base
        j0, j1 = part_start(w.count, panel_part, parts), part_start(w.count, panel_part + 1, parts)
        pack_bias(w, &inputs[BIAS + n] if n < x_products_of(c) else <const Array *> NULL, j0, j1)
        if p.packs_all and w.format == UNQUANTIZED:
            pack_panels(w, panels, &inputs[W + n], j0, j1)
        if c.peephole and n == 0:
            for j in range(j0, j1):
                c.traits.load_peepholes(c, <real *> p.peep, inputs, p.H, j)


# -------------------------------------------------------------------------------------------------------------- a chunk
cdef inline void load_x(
    const Forward *p, const Array *inputs, real *scratch, const ForwardShare *share, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    """Load x for a chunk of steps, number k to `end`; the members of a group divide its active rows."""
    cdef Py_ssize_t count = count_active_rows(&p.steps, k, end, share.b0, share.b1), members = p.grid.members
    load_active_rows(&p.steps, x_of(p, scratch, share), p.Is, inputs[X], &p.x_layout, p.I, k, share.b0, share.b1,
                     part_start(count, share.member, members), part_start(count, share.member + 1, members),
                     p.w[0].format)


cdef inline void multiply_x(
    const Forward *p, const Cell *c, const Array *inputs, real *scratch, const ForwardShare *share, Py_ssize_t k,
    Py_ssize_t end
) noexcept nogil:
    """Compute z = x @ w_x + b for a chunk of steps, number k to `end`, unless chunks have one step: `multiply_h`."""
    cdef Py_ssize_t count = count_active_rows(&p.steps, k, end, share.b0, share.b1)
    cdef int n
    if p.chunk > 1:
        for n in range(x_products_of(c)):
            compute_input_product(&p.w[n], &inputs[W + n], p.I, x_of(p, scratch, share), p.Is, count,
                                  z_of(p, scratch, share, n), p.chunk * (share.b1 - share.b0) * LINES * p.L,
                                  share.j0[n], share.j1[n])


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline void multiply_h_panel(
    const Forward *p, const Cell *c, int n, const real *h, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *x, real *z, real *rows, const Array *outputs
) noexcept nogil:
    """Compute product n of step number k for panel j and the slots b0 to b1, and then their cells.

    A few tiles of rows use the panel while it is in cache, and the cells follow while their product is.

    x : the step's rows of x, that of slot b0 first; read if z has no product with x
    z : rows of panel j, that of slot b0 first.  If chunks have several steps z is x @ w_x + b, and h @ w_h is added;
        else the whole product is computed here, in `acc`
    """
    cdef const Panels *w = &p.w[n]
    cdef Py_ssize_t L = lanes_of(x)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t b = b0, count
    cdef bint reads_x = n < x_products_of(c)
    cdef real *sums
    while b < b1:
        count = tile_group_height(b1 - b)
        if p.chunk > 1 and reads_x:
            sums = z + (b - b0) * LINES * L
        else:
            sums = acc
            copy_bias(w, j, count, sums)
            if reads_x:
                add_product(w, j, 0, p.I, x + (b - b0) * p.Is, p.Is, count, sums)
        add_product(w, j, w.h_row, w.R, h + b * p.h_stride[n], p.h_stride[n], count, sums + w.separate * L)
        expand_gates(w, j, count, sums)
        c.traits.forward_cells[n](p, c, j, j + 1, k, b, b + count, sums, 0, rows, outputs)
        b += count


cdef inline void multiply_h_row(
    const Forward *p, const Cell *c, int n, const real *h, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b,
    const real *x, real *z, Py_ssize_t z_panel, real *rows, const Array *outputs
) noexcept nogil:
    """Compute product n of step number k for the panels j0 to j1 and the row in slot b alone, and then its cells.

    One row has too few sums in a panel to keep a CPU busy, so several panels are multiplied at once (`row_panels`).

    x : the row of x; read if z has no product with x
    z : the row of panel 0.  If chunks have several steps z is x @ w_x + b, and h @ w_h is added; else the whole
        product is computed here, in `acc`
    """
    cdef const Panels *w = &p.w[n]
    cdef Py_ssize_t L = lanes_of(x)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    # Panels whose cells are computed together: many cells in a row overlap each other in the CPU; those of a GRU with
    # two products overlap the next product.
    cdef Py_ssize_t most = ROW_PANELS if x_products_of(c) > 1 else GROUP_TILES * ROWS
    cdef Py_ssize_t j = j0, end, i, count, q
    cdef bint reads_x = n < x_products_of(c), has_x_product = p.chunk > 1 and reads_x
    cdef real *sums
    cdef real *panel_sums
    if not has_x_product:
        z_panel = LINES * L
    while j < j1:
        end = min(j1, j + most)
        sums = z + j * z_panel if has_x_product else acc
        i = j
        while i < end:
            count = row_panels(w, i, end)
            panel_sums = sums + (i - j) * z_panel
            if not has_x_product:
                for q in range(count):
                    copy_bias(w, i + q, 1, panel_sums + q * z_panel)
                if reads_x:
                    add_row_product(w, i, count, 0, p.I, x, panel_sums, z_panel)
            add_row_product(w, i, count, w.h_row, w.R, h + b * p.h_stride[n], panel_sums + w.separate * L, z_panel)
            i += count
            expand_gates(w, i - 1, 1, panel_sums + (count - 1) * z_panel)
        c.traits.forward_cells[n](p, c, j, end, k, b, b + 1, sums, z_panel, rows, outputs)
        j = end


cdef inline void multiply_unpacked(
    const Forward *p, const Cell *c, int n, const real *h, const Array *w, Py_ssize_t j0, Py_ssize_t j1,
    Py_ssize_t b1, real *scratch, const Array *outputs
) noexcept nogil:
    """Compute product n of a single step for the panels j0 to j1 and the slots 0 to b1, and then their cells.

    w : the matrices of product n, the caller's; they are read where they are, or packed block by block
    """
    cdef const Panels *panels = &p.w[n]
    cdef Py_ssize_t j, z_panel = p.B * LINES * p.L
    cdef real *z = scratch + p.start[Z]
    for j in range(j0, j1):
        copy_bias(panels, j, b1, z + j * z_panel)
    add_unpacked_product(panels, w, 0, panels.I, True, scratch + p.start[X_CHUNK], p.Is, b1, z, z_panel, j0, j1)
    add_unpacked_product(panels, w, panels.I, panels.R, False, h, p.h_stride[n], b1, z + panels.separate * p.L, z_panel,
                         j0, j1)
    for j in range(j0, j1):
        c.traits.forward_cells[n](p, c, j, j + 1, 0, 0, b1, z + j * z_panel, 0, scratch, outputs)


cdef inline const real *quantize_h(
    const Forward *p, real *scratch, const ForwardShare *share, int n, const real *h, Py_ssize_t b1
) noexcept nogil:
    """Quantize the rows that product n reads, of a part's slots up to b1; return the quantized row of slot 0.

    h : the row of slot 0 in scratch, not quantized
    """
    cdef real *codes = codes_of(p, scratch, share, n)
    cdef Py_ssize_t b, stride = p.Hs if n == 1 else p.Ps
    if COMPUTES_FLOAT:
        for b in range(share.b0, b1):
            quantize_row(<float *> (codes + b * p.h_stride[n]), <const float *> (h + b * stride), p.w[n].R)
    return codes


cdef inline void store_h_rows(
    const Forward *p, const Array *outputs, real *rows, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """Store h after step number k for the slots b0 to b1, in whole rows.

    `stores_rows` wants that only without a step mask, so batch row b is in slot b.
    """
    cdef Py_ssize_t b
    for b in range(b0, b1):
        store_row(at(outputs[OUT_H], offset_of(&p.y_layout, step_at(&p.steps, k), b)),
                  h_before(p, rows, k + 1) + b * p.Ps, p.P)


cdef inline void multiply_h(
    const Forward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch,
    const ForwardShare *share, int n, Py_ssize_t k, Py_ssize_t r
) noexcept nogil:
    """Compute one part of product n of step number k, and of its cells."""
    cdef Py_ssize_t j, b0 = share.b0, b1 = active_end(&p.steps, k, b0, share.b1)
    cdef Py_ssize_t z_panel = p.chunk * (share.b1 - b0) * LINES * p.L
    cdef real *rows = scratch + share.shift
    cdef const real *h = h_before(p, rows, k)
    cdef const real *x
    cdef real *z
    if n == 1:
        h = rows + p.start[M if projects(c) else HR]
    if b0 == b1:
        return
    if not p.packs_all:
        multiply_unpacked(p, c, n, h, &inputs[W + n], share.j0[n], share.j1[n], b1, scratch, outputs)
        return
    if p.w[n].format == INT8:
        h = quantize_h(p, scratch, share, n, h, b1)
    x = x_of(p, scratch, share) + r * p.Is
    z = z_of(p, scratch, share, n) + r * LINES * p.L
    if b1 - b0 == 1:
        multiply_h_row(p, c, n, h, share.j0[n], share.j1[n], k, b0, x, z, z_panel, rows, outputs)
    else:
        for j in range(share.j0[n], share.j1[n]):
            multiply_h_panel(p, c, n, h, j, k, b0, b1, x, z + j * z_panel, rows, outputs)
    if n == products_of(c) - 1 and outputs[OUT_H].data is not NULL and stores_rows(p):
        store_h_rows(p, outputs, rows, k, b0, b1)


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void store_states(
    const Forward *p, const Cell *c, const Array *outputs, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Store the last states of one part of the rows of a layer; an op has no arrays for them."""
    cdef ForwardShare share = forward_share(p, part)
    cdef real *rows = scratch + share.shift
    cdef Py_ssize_t count = share.b1 - share.b0, members = p.grid.members, b, row
    if outputs[H_LAST].data is NULL:
        return
    for b in range(share.b0 + part_start(count, share.member, members),
                   share.b0 + part_start(count, share.member + 1, members)):
        row = row_of_slot(&p.steps, b)
        store_row(at(outputs[H_LAST], row * p.P), h_before(p, rows, end_step_of(&p.steps, b)) + b * p.Ps, p.P)
        if c.traits.states > 1:
            store_row(at(outputs[CS_LAST], row * p.H), rows + p.start[CS] + b * p.Hs, p.H)


# ----------------------------------------------------------------------------------------------- a part by its number
cdef inline void load_x_part(
    const Forward *p, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    """Load one part of x for a chunk of steps, number k to `end`."""
    cdef ForwardShare share = forward_share(p, part)
    load_x(p, inputs, scratch, &share, k, end)


cdef inline void multiply_x_part(
    const Forward *p, const Cell *c, const Array *inputs, real *scratch, Py_ssize_t part, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    """Compute one part of z = x @ w_x + b for a chunk of steps, number k to `end`."""
    cdef ForwardShare share = forward_share(p, part)
    multiply_x(p, c, inputs, scratch, &share, k, end)


cdef inline void multiply_h_part(
    const Forward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, Py_ssize_t part, int n,
    Py_ssize_t k, Py_ssize_t start
) noexcept nogil:
    """Compute one part of product n of step number k, and of its cells; the step's chunk begins with number `start`."""
    cdef ForwardShare share = forward_share(p, part)
    multiply_h(p, c, inputs, outputs, scratch, &share, n, k, count_active_rows(&p.steps, start, k, share.b0, share.b1))


cdef inline void all_steps(
    const Forward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, Py_ssize_t part
) noexcept nogil:
    """Compute all steps of one part, whose group has no other part."""
    cdef ForwardShare share = forward_share(p, part)
    cdef Py_ssize_t k = 0, end, r
    while k < p.steps.T:
        r, end = 0, end_of_chunk(p, k, share.b0, share.b1)
        load_x(p, inputs, scratch, &share, k, end)
        multiply_x(p, c, inputs, scratch, &share, k, end)
        while k < end:
            multiply_h(p, c, inputs, outputs, scratch, &share, 0, k, r)
            if products_of(c) > 1:
                multiply_h(p, c, inputs, outputs, scratch, &share, 1, k, r)
            r += active_end(&p.steps, k, share.b0, share.b1) - share.b0
            k += 1


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long forward(
    const Forward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch
) noexcept nogil:
    """Run the forward pass; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end
    # In the parallel region each thread has its own; there, Cython would take `k += 1` for a reduction.
    cdef Py_ssize_t k = 0, start = 0, end = 0
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_states(p, c, inputs, outputs, scratch, 0)
        if not p.packed:
            pack_weights(p, c, inputs, 0, 1)
        all_steps(p, c, inputs, outputs, scratch, 0)
        store_states(p, c, outputs, scratch, 0)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, end_part, schedule="static"):
            load_states(p, c, inputs, outputs, scratch, part)
        if not p.packed:
            for part in prange(first, end_part, schedule="static"):
                pack_weights(p, c, inputs, part, parts)
            barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, end_part, schedule="static"):
                all_steps(p, c, inputs, outputs, scratch, part)
        else:
            while k < p.steps.T:
                start, end = k, end_of_common_chunk(p, k)
                for part in prange(first, end_part, schedule="static"):
                    load_x_part(p, inputs, scratch, part, start, end)
                group_barrier(&team)
                for part in prange(first, end_part, schedule="static"):
                    multiply_x_part(p, c, inputs, scratch, part, start, end)
                while k < end:
                    for part in prange(first, end_part, schedule="static"):
                        multiply_h_part(p, c, inputs, outputs, scratch, part, 0, k, start)
                    group_barrier(&team)
                    if products_of(c) > 1:
                        for part in prange(first, end_part, schedule="static"):
                            multiply_h_part(p, c, inputs, outputs, scratch, part, 1, k, start)
                        group_barrier(&team)
                    k = k + 1
        for part in prange(first, end_part, schedule="static"):
            store_states(p, c, outputs, scratch, part)
        barrier(&team)  # results do not need it, but waiting here is short and measured, unlike in the runtime
    return measured_cost(&team)


cdef inline long long run_forward(
    Forward *p, const Cell *c, const Array *inputs, const Array *outputs, void *scratch, int ready
) noexcept nogil:
    """Run `forward`.

    p : changed to no more threads than are `ready`
    scratch : the workspace, in bytes; it begins at a cache line
    """
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    nanoseconds = forward(p, c, inputs, outputs, <real *> scratch)
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline long long run_layer_forward(
    const Forward *plan, const Cell *c, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """Run the forward pass of a layer on at most `ready` threads; return the nanoseconds that having several cost."""
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    cdef Forward p = plan[0]
    cdef int i
    for i in range(STEP_OUTPUTS):
        outputs[i] = no_array()
    if a.saved is not NULL:
        for i in range(c.traits.saved):
            outputs[OUT_H + 1 + i] = at(array_of(a.saved, c.is_half), i * p.steps.T * p.B * p.H)
    inputs[X], outputs[OUT_H] = array_of(a.x, c.is_half), array_of(a.y, c.is_half)
    set_states(c, a.initial_state, &inputs[H_PREV])
    set_states(c, <const void *const *> a.last_state, &outputs[H_LAST])
    p.x_layout, p.y_layout, p.steps.reverse = a.x_layout, a.y_layout, a.reverse
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        use_forward_step_mask(&p, a.step_mask, scratch)
        set_reset_states(c, a, &p.steps, False)
    if p.packed:
        use_panels(&p, a.packed)
    else:
        set_torch_weights(c, p.I, p.H, a.weights, inputs)
        use_panels(&p, scratch)
    return run_forward(&p, c, inputs, outputs, scratch, ready)
