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

p : the pass: the cell, sizes, strides, packed panels, the caller's arrays, and where each region of scratch starts
    (plan.pxd)
part, parts : the index of a part, and how many there are; `share` has the slots and panels of one
rows : scratch as the rows of a group lie in it: slot b of region R is at rows + p.start[R] + b * stride
step : a product of a step (`StepProduct` in types.pxd)
n : the product of a step, 0 or 1
z : products of the panels, z_panel reals apart; each has LINES lines for every row of h
k, end : the number of a step in the order of processing, where a range of them ends
b, b0, b1 : a slot of a batch row (steps.pxd), a range of slots
row : a batch row, as the caller numbers it
r : the index of a step's first row in the chunk's x and z, which hold the active rows of all its steps
j, j0, j1 : a packed panel of product n, a range of panels; i, q : panels in that range that are multiplied together
L : reals in a cache line
"""
from cython.parallel cimport parallel, prange

from cells.types cimport Cell, StepProduct
from passes.arrays cimport Pass
from passes.indices cimport BIAS, CS_LAST, CS_PREV, H_LAST, H_PREV, INPUTS, OUT_H, OUTPUTS, STEP_OUTPUTS, W, X
from passes.operands cimport set_reset_states, set_states, set_torch_weights
from passes.steps cimport (
    RESET, Layout, ResetState, active_end, clear_finished_rows, contiguous_layout, count_active_rows, end_step_of,
    first_step_of, has_flag, offset_of, reset_row, row_of_slot, set_step_mask, step_at
)
from product.lines cimport Array, L, array_of, at, clear, load_row, no_array, reals, store_row
from product.panels cimport (
    Panels, ProductRows, add_product, add_row_product, add_unpacked_product, compute_input_product, copy_bias,
    expand_gates, load_product_row, pack_bias, pack_panels, row_panels
)
from product.quantized cimport INT8, UNQUANTIZED
from product.real cimport real
from product.tile cimport GROUP_TILES, LINES, ROW_PANELS, ROWS, TILE_SIZE, tile_group_height
from schedule.cost cimport packing_part, parts_of, threads_of, use_threads
from schedule.plan cimport (
    CODES, CS, HR, M, M_CODES, SLOTS, X_CHUNK, Z, Forward, ForwardPlan, ForwardShare, end_of_chunk,
    end_of_common_chunk, forward_share, h_before, stores_rows, use_panels, x_of, z_of
)
from schedule.team cimport Team, barrier, group_barrier, join_team, measured_cost, part_start, start_team
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


cdef inline void clear_finished_outputs(const Forward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Clear one part of the finished rows of h and of what is saved.

    The backward pass does not read the latter there: they are cleared for a tape to depend on the inputs alone.
    """
    cdef Layout saved_layout = contiguous_layout(p.B, p.H)
    cdef int out
    if p.outputs[OUT_H].data is not NULL:
        clear_finished_rows(&p.steps, p.outputs[OUT_H], &p.y_layout, p.P, part, parts)
    for out in range(OUT_H + 1, OUT_H + 1 + p.c.traits.saved):
        if p.outputs[out].data is not NULL:
            clear_finished_rows(&p.steps, p.outputs[out], &saved_layout, p.H, part, parts)


cdef inline void load_states(const Forward *p, Py_ssize_t part) noexcept nogil:
    """Load the initial states of one part of the rows, and clear one part of the finished rows of the outputs."""
    cdef ForwardShare share = forward_share(p, part)
    cdef Py_ssize_t count = share.b1 - share.b0, members = p.grid.members, b
    for b in range(share.b0 + part_start(count, share.member, members),
                   share.b0 + part_start(count, share.member + 1, members)):
        load_state(p, h_before(p, share.rows, first_step_of(&p.steps, b)), p.Ps, p.inputs[H_PREV], &p.steps.h_reset,
                   p.P, b)
        if p.c.traits.states > 1:
            load_state(p, share.rows + p.start[CS], p.Hs, p.inputs[CS_PREV], &p.steps.cs_reset, p.H, b)
    if p.steps.slots is not NULL:
        clear_finished_outputs(p, part, parts_of(&p.grid))


cdef inline void pack_layer_weights(const Forward *p, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Pack one part of the panels, their biases, and the peepholes.

    Matrices are skipped if a single step packs them when it uses them, or if they are quantized (`pack_quantized`).
    """
    cdef const Panels *w
    cdef Py_ssize_t panel_part = packing_part(&p.grid, part), j, j0, j1
    cdef int n
    for n in range(p.c.products):
        w = &p.w[n]
        j0, j1 = part_start(w.count, panel_part, parts), part_start(w.count, panel_part + 1, parts)
        pack_bias(w, &p.inputs[BIAS + n] if n < p.c.traits.products else <const Array *> NULL, j0, j1)
        if p.packs_all and w.format == UNQUANTIZED:
            pack_panels(w, &p.inputs[W + n], j0, j1)
        if p.c.peephole and n == 0:
            for j in range(j0, j1):
                p.c.traits.load_peepholes(p.c, p.peep, p.inputs, p.H, j)


# -------------------------------------------------------------------------------------------------------------- a chunk
cdef inline void load_x(const Forward *p, const ForwardShare *share, Py_ssize_t k, Py_ssize_t end) noexcept nogil:
    """Load x for a chunk of steps, number k to `end`; the members of a group divide its active rows."""
    cdef Py_ssize_t count = count_active_rows(&p.steps, k, end, share.b0, share.b1), members = p.grid.members
    cdef Py_ssize_t r0 = part_start(count, share.member, members), r1 = part_start(count, share.member + 1, members)
    cdef Py_ssize_t r = 0, t, n, q  # r: of the first of n active rows of a step
    while r < r1:
        n, t = active_end(&p.steps, k, share.b0, share.b1) - share.b0, step_at(&p.steps, k)
        for q in range(max(r0 - r, <Py_ssize_t> 0), min(r1 - r, n)):
            load_product_row(x_of(p, share) + (r + q) * p.Is,
                             at(p.inputs[X], offset_of(&p.x_layout, t, row_of_slot(&p.steps, share.b0 + q))), p.I,
                             p.w[0].format)
        r += n
        k += 1


cdef inline void multiply_x(const Forward *p, const ForwardShare *share, Py_ssize_t k, Py_ssize_t end) noexcept nogil:
    """Compute z = x @ w_x + b for a chunk of steps, number k to `end`, unless chunks have one step: `multiply_h`."""
    cdef Py_ssize_t count = count_active_rows(&p.steps, k, end, share.b0, share.b1)
    cdef ProductRows product
    cdef int n
    product.a, product.stride, product.count = x_of(p, share), p.Is, count
    product.z_stride = p.chunk * (share.b1 - share.b0) * LINES * L
    if p.chunk > 1:
        for n in range(p.c.traits.products):
            product.z = z_of(p, share, n)
            compute_input_product(&p.w[n], &p.inputs[W + n], &product, share.j0[n], share.j1[n])


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline void multiply_h_panel(const Forward *p, const StepProduct *step, Py_ssize_t j) noexcept nogil:
    """Compute the product of a step for panel j, and then its cells.

    A few tiles of rows use the panel while it is in cache, and the cells follow while their product is.  If chunks have
    several steps z is x @ w_x + b, and h @ w_h is added; else the whole product is computed here, in `acc`.
    """
    cdef int n = step.n
    cdef const Panels *w = &p.w[n]
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t b = step.b0, count
    cdef real *sums
    while b < step.b1:
        count = tile_group_height(step.b1 - b)
        if step.z is not NULL:
            sums = step.z + j * step.z_panel + (b - step.b0) * LINES * L
        else:
            sums = acc
            copy_bias(w, j, count, sums)
            if n < p.c.traits.products:
                add_product(w, j, 0, p.I, step.x + (b - step.b0) * p.Is, p.Is, count, sums)
        add_product(w, j, w.h_row, w.R, step.h + b * p.h_stride[n], p.h_stride[n], count, sums + w.separate * L)
        expand_gates(w, j, count, sums)
        p.c.forward_cells[n](p, step, j, j + 1, b, b + count, sums)
        b += count


cdef inline void multiply_h_row(
    const Forward *p, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Compute the product of a step for the panels j0 to j1 and a single row, and then its cells, as
    `multiply_h_panel`.

    One row has too few sums in a panel to keep a CPU busy, so several panels are multiplied at once (`row_panels`).
    """
    cdef int n = step.n
    cdef const Panels *w = &p.w[n]
    cdef const real *h = step.h + step.b0 * p.h_stride[n]
    cdef real[GROUP_TILES * TILE_SIZE] acc
    # Panels whose cells are computed together: many cells in a row overlap each other in the CPU; those of a GRU with
    # two products overlap the next product.
    cdef Py_ssize_t most = ROW_PANELS if p.c.traits.products > 1 else GROUP_TILES * ROWS
    cdef Py_ssize_t z_panel = step.z_panel, j = j0, end, i, count, q
    cdef real *sums
    cdef real *panel_sums
    while j < j1:
        end = min(j1, j + most)
        sums = step.z + j * z_panel if step.z is not NULL else acc
        i = j
        while i < end:
            count = row_panels(w, i, end)
            panel_sums = sums + (i - j) * z_panel
            if step.z is NULL:
                for q in range(count):
                    copy_bias(w, i + q, 1, panel_sums + q * z_panel)
                if n < p.c.traits.products:
                    add_row_product(w, i, count, 0, p.I, step.x, panel_sums, z_panel)
            add_row_product(w, i, count, w.h_row, w.R, h, panel_sums + w.separate * L, z_panel)
            i += count
            expand_gates(w, i - 1, 1, panel_sums + (count - 1) * z_panel)
        p.c.forward_cells[n](p, step, j, end, step.b0, step.b1, sums)
        j = end


cdef inline void multiply_unpacked(
    const Forward *p, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Compute the product of a single step for the panels j0 to j1, and then its cells.

    The caller's matrices are read where they are, or packed block by block.
    """
    cdef const Panels *w = &p.w[step.n]
    cdef ProductRows product
    cdef real *z = p.scratch + p.start[Z]
    cdef Py_ssize_t j
    product.a, product.stride, product.count = p.scratch + p.start[X_CHUNK], p.Is, step.b1
    product.z, product.z_stride = z, p.B * LINES * L
    for j in range(j0, j1):
        copy_bias(w, j, step.b1, z + j * product.z_stride)
    add_unpacked_product(w, &p.inputs[W + step.n], True, &product, j0, j1)
    product.a, product.stride, product.z = step.h, p.h_stride[step.n], z + w.separate * L
    add_unpacked_product(w, &p.inputs[W + step.n], False, &product, j0, j1)
    for j in range(j0, j1):
        p.c.forward_cells[step.n](p, step, j, j + 1, 0, step.b1, z + j * product.z_stride)


cdef inline const real *quantize_h(
    const Forward *p, const ForwardShare *share, int n, const real *h, Py_ssize_t b1
) noexcept nogil:
    """Quantize the rows that product n reads, of a part's slots up to b1; return the quantized row of slot 0.

    Each member of a group has all quantized rows of the group.

    h : the row of slot 0 in scratch, not quantized
    """
    cdef Py_ssize_t b, stride = p.Hs if n == 1 else p.Ps, size = p.B * p.h_stride[n] + p.grid.groups * p.gap
    cdef real *codes = share.rows + p.start[M_CODES if n else CODES] + share.member * size
    for b in range(share.b0, b1):
        load_product_row(codes + b * p.h_stride[n], reals(h + b * stride), p.w[n].R, INT8)
    return codes


cdef inline void store_h_rows(const Forward *p, const StepProduct *step) noexcept nogil:
    """Store h after a step in whole rows.

    `stores_rows` wants that only without a step mask, so batch row b is in slot b.
    """
    cdef Py_ssize_t b
    for b in range(step.b0, step.b1):
        store_row(at(p.outputs[OUT_H], offset_of(&p.y_layout, step_at(&p.steps, step.k), b)),
                  h_before(p, step.rows, step.k + 1) + b * p.Ps, p.P)


cdef inline void multiply_h(
    const Forward *p, const ForwardShare *share, int n, Py_ssize_t k, Py_ssize_t r
) noexcept nogil:
    """Compute one part of product n of step number k, and of its cells."""
    cdef Py_ssize_t j
    cdef StepProduct step
    step.n, step.k, step.rows = n, k, share.rows
    step.b0, step.b1 = share.b0, active_end(&p.steps, k, share.b0, share.b1)
    step.h, step.z, step.z_panel = h_before(p, share.rows, k), NULL, LINES * L
    if n == 1:
        step.h = share.rows + p.start[M if p.c.projects else HR]
    if step.b0 == step.b1:
        return
    if not p.packs_all:
        multiply_unpacked(p, &step, share.j0[n], share.j1[n])
        return
    if p.w[n].format == INT8:
        step.h = quantize_h(p, share, n, step.h, step.b1)
    step.x = x_of(p, share) + r * p.Is
    if p.chunk > 1 and n < p.c.traits.products:
        step.z, step.z_panel = z_of(p, share, n) + r * LINES * L, p.chunk * (share.b1 - share.b0) * LINES * L
    if step.b1 - step.b0 == 1:
        multiply_h_row(p, &step, share.j0[n], share.j1[n])
    else:
        for j in range(share.j0[n], share.j1[n]):
            multiply_h_panel(p, &step, j)
    if n == p.c.products - 1 and p.outputs[OUT_H].data is not NULL and stores_rows(p):
        store_h_rows(p, &step)


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void store_states(const Forward *p, Py_ssize_t part) noexcept nogil:
    """Store the last states of one part of the rows of a layer; an op has no arrays for them."""
    cdef ForwardShare share = forward_share(p, part)
    cdef Py_ssize_t count = share.b1 - share.b0, members = p.grid.members, b, row
    if p.outputs[H_LAST].data is NULL:
        return
    for b in range(share.b0 + part_start(count, share.member, members),
                   share.b0 + part_start(count, share.member + 1, members)):
        row = row_of_slot(&p.steps, b)
        store_row(at(p.outputs[H_LAST], row * p.P), h_before(p, share.rows, end_step_of(&p.steps, b)) + b * p.Ps, p.P)
        if p.c.traits.states > 1:
            store_row(at(p.outputs[CS_LAST], row * p.H), share.rows + p.start[CS] + b * p.Hs, p.H)


# ----------------------------------------------------------------------------------------------- a part by its number
cdef inline void load_x_part(const Forward *p, Py_ssize_t part, Py_ssize_t k, Py_ssize_t end) noexcept nogil:
    """Load one part of x for a chunk of steps, number k to `end`."""
    cdef ForwardShare share = forward_share(p, part)
    load_x(p, &share, k, end)


cdef inline void multiply_x_part(const Forward *p, Py_ssize_t part, Py_ssize_t k, Py_ssize_t end) noexcept nogil:
    """Compute one part of z = x @ w_x + b for a chunk of steps, number k to `end`."""
    cdef ForwardShare share = forward_share(p, part)
    multiply_x(p, &share, k, end)


cdef inline void multiply_h_part(
    const Forward *p, Py_ssize_t part, int n, Py_ssize_t k, Py_ssize_t start
) noexcept nogil:
    """Compute one part of product n of step number k, and of its cells; the step's chunk begins with number `start`."""
    cdef ForwardShare share = forward_share(p, part)
    multiply_h(p, &share, n, k, count_active_rows(&p.steps, start, k, share.b0, share.b1))


cdef inline void all_steps(const Forward *p, Py_ssize_t part) noexcept nogil:
    """Compute all steps of one part, whose group has no other part."""
    cdef ForwardShare share = forward_share(p, part)
    cdef Py_ssize_t k = 0, end, r
    while k < p.steps.T:
        r, end = 0, end_of_chunk(p, k, share.b0, share.b1)
        load_x(p, &share, k, end)
        multiply_x(p, &share, k, end)
        while k < end:
            multiply_h(p, &share, 0, k, r)
            if p.c.products > 1:
                multiply_h(p, &share, 1, k, r)
            r += active_end(&p.steps, k, share.b0, share.b1) - share.b0
            k += 1


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long forward(const Forward *p) noexcept nogil:
    """Run the forward pass; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, end_part = p.grid.end
    # In the parallel region each thread has its own; there, Cython would take `k += 1` for a reduction.
    cdef Py_ssize_t k = 0, start = 0, end = 0
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_states(p, 0)
        if not p.packed:
            pack_layer_weights(p, 0, 1)
        all_steps(p, 0)
        store_states(p, 0)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        join_team(&team)
        for part in prange(first, end_part, schedule="static"):
            load_states(p, part)
        if not p.packed:
            for part in prange(first, end_part, schedule="static"):
                pack_layer_weights(p, part, parts)
            barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, end_part, schedule="static"):
                all_steps(p, part)
        else:
            while k < p.steps.T:
                start, end = k, end_of_common_chunk(p, k)
                for part in prange(first, end_part, schedule="static"):
                    load_x_part(p, part, start, end)
                group_barrier(&team)
                for part in prange(first, end_part, schedule="static"):
                    multiply_x_part(p, part, start, end)
                while k < end:
                    for part in prange(first, end_part, schedule="static"):
                        multiply_h_part(p, part, 0, k, start)
                    group_barrier(&team)
                    if p.c.products > 1:
                        for part in prange(first, end_part, schedule="static"):
                            multiply_h_part(p, part, 1, k, start)
                        group_barrier(&team)
                    k = k + 1
        for part in prange(first, end_part, schedule="static"):
            store_states(p, part)
        barrier(&team)  # results do not need it, but waiting here is short and measured, unlike in the runtime
    return measured_cost(&team)


cdef inline long long run_forward(Forward *p, int ready) noexcept nogil:
    """Run `forward`.

    p : changed to no more threads than are `ready`
    """
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, p.scratch, 1)
    nanoseconds = forward(p)
    release_zones(&p.workspace, p.scratch, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline long long forward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the forward pass of a layer, whose plan is a ForwardPlan, on at most `ready` threads; return the nanoseconds
    that having several cost."""
    cdef const Cell *c = &(<const ForwardPlan *> plan).c
    cdef Forward p = (<const ForwardPlan *> plan).p
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    cdef int i
    p.c, p.inputs, p.outputs, p.scratch = c, inputs, outputs, <real *> scratch
    for i in range(STEP_OUTPUTS):
        outputs[i] = no_array()
    if a.saved is not NULL:
        for i in range(c.traits.saved):
            outputs[OUT_H + 1 + i] = at(array_of(a.saved, c.is_half), i * p.steps.T * p.B * p.H)
    inputs[X], outputs[OUT_H] = array_of(a.x, c.is_half), array_of(a.y, c.is_half)
    set_states(c, a.initial_state, &inputs[H_PREV])
    set_states(c, <const void *const *> a.last_state, &outputs[H_LAST])
    p.x_layout, p.y_layout, p.steps.reverse = a.x_layout, a.y_layout, a.reverse
    guard_zones(&p.workspace, scratch, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        set_step_mask(&p.steps, a.step_mask, p.scratch + p.start[SLOTS], p.grid.groups)
        set_reset_states(c, a, &p.steps, False)
    if p.packed:
        use_panels(&p, a.packed)
    else:
        set_torch_weights(c, p.I, p.H, a.weights, inputs)
        use_panels(&p, scratch)
    return run_forward(&p, ready)
