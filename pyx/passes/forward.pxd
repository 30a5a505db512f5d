"""The forward pass of all cells: `forward` is the list of its phases, and where threads wait for each other.

    load states, pack panels  ->  for each chunk of steps: load x, x @ w_x + b  ->  for each step: h @ w_h, cells,
    of a projected LSTM m @ w_p  ->  store states

Between packing and the end groups of threads (cost.pxd) go through the steps side by side, each with its own rows.
The functions above it are what one part does in a phase.  While the product of a few rows and a panel of weights is in
cache, `forward_cells` in the cell's file computes states and outputs from it.
"""
from cython.parallel cimport parallel, prange

from cell cimport cell
from cells.lstm cimport load_peepholes
from cells.types cimport Lstm, row_of
from formulas cimport forward_cells
from passes.arrays cimport Pass
from passes.operands cimport (
    BIAS, CS_LAST, CS_PREV, H_LAST, H_PREV, INPUTS, OUT_H, OUTPUTS, OUTS, W, X, set_states, set_torch_weights
)
from passes.steps cimport (
    RESET, Layout, active_end, clear_finished_rows, contiguous_layout, count_active_rows, end_step_of, first_step_of,
    has_flag, load_active_rows, offset_of, row_of_slot, step_at
)
from product.half cimport half
from product.integer cimport quantize_row
from product.panels cimport (
    Panels, add_input_product, add_product, add_row_product, add_unpacked_product, copy_bias, expand_gates, pack_bias,
    pack_panels, row_panels
)
from product.quantized cimport INT8, UNQUANTIZED
from product.real cimport real
from product.tile cimport (
    DOUBLE, GROUP_TILES, HALF, LINES, ROW_PANELS, ROWS, TILE_SIZE, clear, lanes_of, load_row, store, store_row,
    tile_group_height
)
from schedule.cost cimport packer, parts_of, threads_of, use_threads
from schedule.plan cimport (
    CS, HR, M, X_CHUNK, Z, Forward, Part, codes_of, end_of_chunk, end_of_common_chunk, h_before, part_of, products_of,
    projects, stores_rows, use_panels, use_step_mask, x_of, x_products_of, z_of
)
from schedule.team cimport Team, adopt_rounding, barrier, group_barrier, measured_cost, share, start_team
from schedule.workspace cimport guard_zones, release_zones


# ----------------------------------------------------------------------------------------------------- before the steps
cdef inline void load_state(
    const Forward *p, real *rows, Py_ssize_t stride, const store *first, Py_ssize_t size, Py_ssize_t b
) noexcept nogil:
    """Load the state that the row in slot b starts from; NULL stands for zeros."""
    if first is NULL or has_flag(&p.steps, first_step_of(&p.steps, b), b, RESET):
        clear(rows + b * stride, stride)
    else:
        load_row(rows + b * stride, first + row_of_slot(&p.steps, b) * size, size)


cdef inline void clear_finished_outputs(
    const Forward *p, const cell *c, store **outputs, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """Zeros in the outputs of one part of the rows, where these have ended."""
    cdef Layout saved = contiguous_layout(p.B, p.H)
    cdef int out
    if outputs[OUT_H] is not NULL:
        clear_finished_rows(&p.steps, outputs[OUT_H], &p.y_layout, p.P, number, parts)
    for out in range(OUT_H + 1, OUT_H + 1 + row_of(c).saved):
        if outputs[out] is not NULL:
            clear_finished_rows(&p.steps, outputs[out], &saved, p.H, number, parts)


cdef inline void load_states(
    const Forward *p, const cell *c, const store **inputs, store **outputs, real *scratch, Py_ssize_t number
) noexcept nogil:
    """One part of the rows; their outputs where they have ended, too."""
    cdef Part part = part_of(p, number)
    cdef real *rows = scratch + part.shift
    cdef Py_ssize_t n = part.b1 - part.b0, members = p.grid.members, b
    for b in range(part.b0 + share(n, part.member, members), part.b0 + share(n, part.member + 1, members)):
        load_state(p, h_before(p, rows, first_step_of(&p.steps, b)), p.Ps, inputs[H_PREV], p.P, b)
        if row_of(c).states > 1:
            load_state(p, rows + p.start[CS], p.Hs, inputs[CS_PREV], p.H, b)
    if p.steps.slots is not NULL:
        clear_finished_outputs(p, c, outputs, number, parts_of(&p.grid))


cdef inline void pack(
    const Forward *p, const cell *c, const store **inputs, real *unused, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """Pack one part of the panels.  Only biases and peepholes where a single step packs weights when it uses them, or
    where weights are quantized."""
    cdef const Panels *w
    cdef real *panels
    cdef Py_ssize_t part = packer(&p.grid, number), j, j0, j1
    cdef int n
    for n in range(products_of(c)):
        w = &p.w[n]
        panels = <real *> w.base
        j0, j1 = share(w.count, part, parts), share(w.count, part + 1, parts)
        pack_bias(w, panels, &inputs[BIAS + n] if n < x_products_of(c) else <const store **> NULL, j0, j1)
        if p.packs_all and w.format == UNQUANTIZED:
            pack_panels(w, panels, &inputs[W + n], w.I, j0, j1)
        if cell is Lstm:
            if c.peephole and n == 0:
                for j in range(j0, j1):
                    load_peepholes(c, <real *> p.peep, inputs, p.H, j)


# -------------------------------------------------------------------------------------------------------------- a chunk
cdef inline void load_x(
    const Forward *p, const store **inputs, real *scratch, const Part *part, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    """Load one part of x for the steps number k to end, a chunk."""
    cdef Py_ssize_t n = count_active_rows(&p.steps, k, end, part.b0, part.b1), members = p.grid.members
    load_active_rows(&p.steps, x_of(p, scratch, part), p.Is, inputs[X], &p.x_layout, p.I, k, part.b0, part.b1,
                     share(n, part.member, members), share(n, part.member + 1, members), p.w[0].format)


cdef inline void multiply_x(
    const Forward *p, const cell *c, real *scratch, const Part *part, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    """x @ w_x + b for such steps; chunks of one step have it computed in the step itself."""
    cdef Py_ssize_t rows = count_active_rows(&p.steps, k, end, part.b0, part.b1)
    cdef int n
    if p.chunk > 1:
        for n in range(x_products_of(c)):
            add_input_product(&p.w[n], p.I, x_of(p, scratch, part), p.Is, rows, z_of(p, scratch, part, n),
                              p.chunk * (part.b1 - part.b0) * LINES * p.L, part.j0[n], part.j1[n])


# --------------------------------------------------------------------------------------------------------------- a step
cdef inline void step_rows(
    const Forward *p, const cell *c, int n, const real *h, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *x, real *z, real *rows, store **outputs
) noexcept nogil:
    """A step's product n and its cells for panel j and slots b0 to b1.  z has the input product already, or it is
    computed from x."""
    cdef const Panels *w = &p.w[n]
    cdef Py_ssize_t L = lanes_of(x)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    cdef Py_ssize_t b = b0, m, first = 0
    cdef bint of_x = n < x_products_of(c)
    cdef real *a
    while b < b1:
        m = tile_group_height(b1 - b)
        if p.chunk > 1 and of_x:
            a = z + (b - b0) * LINES * L
        else:
            a = acc
            copy_bias(w, j, m, a)
            if of_x:
                add_product(w, j, 0, p.I, x + (b - b0) * p.Is, p.Is, m, a, first)
        add_product(w, j, w.I, w.R, h + b * p.As[n], p.As[n], m, a + w.separate * L, first)
        expand_gates(w, j, m, a)
        forward_cells(p, c, n, j, j + 1, k, b, b + m, a, 0, rows, outputs)
        b += m
        first += GROUP_TILES


cdef inline void step_row(
    const Forward *p, const cell *c, int n, const real *h, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b,
    const real *x, real *z, Py_ssize_t z_panel, real *rows, store **outputs
) noexcept nogil:
    """As `step_rows`, for the panels j0 to j1 and batch row b alone, several panels at once."""
    cdef const Panels *w = &p.w[n]
    cdef Py_ssize_t L = lanes_of(x)
    cdef real[GROUP_TILES * TILE_SIZE] acc
    # Many cells in a row overlap each other in the CPU; those of a GRU with two products overlap the next product.
    cdef Py_ssize_t j = j0, end, m, i, q, most = ROW_PANELS if x_products_of(c) > 1 else GROUP_TILES * ROWS
    cdef bint of_x = n < x_products_of(c), ahead = p.chunk > 1 and of_x
    cdef real *a
    cdef real *panel
    if not ahead:
        z_panel = LINES * L
    while j < j1:
        end = min(j1, j + most)
        a = z + j * z_panel if ahead else acc
        i = j
        while i < end:
            m = row_panels(w, i, end)
            panel = a + (i - j) * z_panel
            if not ahead:
                for q in range(m):
                    copy_bias(w, i + q, 1, panel + q * z_panel)
                if of_x:
                    add_row_product(w, i, m, 0, p.I, x, panel, z_panel)
            add_row_product(w, i, m, w.I, w.R, h + b * p.As[n], panel + w.separate * L, z_panel)
            i += m
            expand_gates(w, i - 1, 1, panel + (m - 1) * z_panel)
        forward_cells(p, c, n, j, end, k, b, b + 1, a, z_panel, rows, outputs)
        j = end


cdef inline void step_unpacked(
    const Forward *p, const cell *c, int n, const real *h, const store **w, Py_ssize_t j0, Py_ssize_t j1,
    Py_ssize_t rows, real *scratch, store **outputs
) noexcept nogil:
    """A step's product n and its cells for the panels j0 to j1 and so many rows, with weights that are not packed
    yet."""
    cdef const Panels *panels = &p.w[n]
    cdef Py_ssize_t j, z_panel = p.B * LINES * p.L
    cdef real *z = scratch + p.start[Z]
    for j in range(j0, j1):
        copy_bias(panels, j, rows, z + j * z_panel)
    add_unpacked_product(panels, w, 0, panels.I, True, scratch + p.start[X_CHUNK], p.Is, rows, z, z_panel, j0, j1)
    add_unpacked_product(panels, w, panels.I, panels.R, False, h, p.As[n], rows, z + panels.separate * p.L, z_panel,
                         j0, j1)
    for j in range(j0, j1):
        forward_cells(p, c, n, j, j + 1, 0, 0, rows, z + j * z_panel, 0, scratch, outputs)


cdef inline const real *as_codes(
    const Forward *p, real *scratch, const Part *part, int n, const real *h, Py_ssize_t b1
) noexcept nogil:
    """Rows of codes of h, or of what product n reads instead, for a part's slots up to b1."""
    cdef real *codes = codes_of(p, scratch, part, n)
    cdef Py_ssize_t b, stride = p.Hs if n == 1 else p.Ps
    if real is float:
        for b in range(part.b0, b1):
            quantize_row(codes + b * p.As[n], h + b * stride, p.w[n].R)
    return codes


cdef inline void store_rows(
    const Forward *p, store **outputs, real *rows, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """h of a part's batch rows b0 to b1 after the step processed as number k, where `stores_rows` says so."""
    cdef Py_ssize_t b
    for b in range(b0, b1):
        store_row(outputs[OUT_H] + offset_of(&p.y_layout, step_at(&p.steps, k), b), h_before(p, rows, k + 1) + b * p.Ps,
                  p.P)


cdef inline void multiply_h(
    const Forward *p, const cell *c, const store **inputs, store **outputs, real *scratch, const Part *part, int n,
    Py_ssize_t k, Py_ssize_t row
) noexcept nogil:
    """One part of product n of the step processed as number k, and its cells.  The step's rows begin with number `row`
    of its chunk."""
    cdef Py_ssize_t j, b0 = part.b0, b1 = active_end(&p.steps, k, b0, part.b1)
    cdef Py_ssize_t z_panel = p.chunk * (part.b1 - b0) * LINES * p.L
    cdef real *rows = scratch + part.shift
    cdef const real *h = h_before(p, rows, k)
    cdef const real *x
    cdef real *z
    if n == 1:
        h = rows + p.start[M if projects(c) else HR]
    if b0 == b1:
        return
    if not p.packs_all:
        step_unpacked(p, c, n, h, &inputs[W + n], part.j0[n], part.j1[n], b1, scratch, outputs)
        return
    if p.w[n].format == INT8:
        h = as_codes(p, scratch, part, n, h, b1)
    x = x_of(p, scratch, part) + row * p.Is
    z = z_of(p, scratch, part, n) + row * LINES * p.L
    if b1 - b0 == 1:
        step_row(p, c, n, h, part.j0[n], part.j1[n], k, b0, x, z, z_panel, rows, outputs)
    else:
        for j in range(part.j0[n], part.j1[n]):
            step_rows(p, c, n, h, j, k, b0, b1, x, z + j * z_panel, rows, outputs)
    if n == products_of(c) - 1 and outputs[OUT_H] is not NULL and stores_rows(p):
        store_rows(p, outputs, rows, k, b0, b1)


# ------------------------------------------------------------------------------------------------------ after the steps
cdef inline void store_states(
    const Forward *p, const cell *c, store **outputs, real *scratch, Py_ssize_t number
) noexcept nogil:
    """Store one part of a layer's last states; an op has them in its outputs."""
    cdef Part part = part_of(p, number)
    cdef real *rows = scratch + part.shift
    cdef Py_ssize_t n = part.b1 - part.b0, members = p.grid.members, b, at
    if outputs[H_LAST] is NULL:
        return
    for b in range(part.b0 + share(n, part.member, members), part.b0 + share(n, part.member + 1, members)):
        at = row_of_slot(&p.steps, b)
        store_row(outputs[H_LAST] + at * p.P, h_before(p, rows, end_step_of(&p.steps, b)) + b * p.Ps, p.P)
        if row_of(c).states > 1:
            store_row(outputs[CS_LAST] + at * p.H, rows + p.start[CS] + b * p.Hs, p.H)


# ------------------------------------------------------------------------------------ what a part does in a phase alone
cdef inline void load_x_part(
    const Forward *p, const store **inputs, real *scratch, Py_ssize_t number, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    cdef Part part = part_of(p, number)
    load_x(p, inputs, scratch, &part, k, end)


cdef inline void multiply_x_part(
    const Forward *p, const cell *c, real *scratch, Py_ssize_t number, Py_ssize_t k, Py_ssize_t end
) noexcept nogil:
    cdef Part part = part_of(p, number)
    multiply_x(p, c, scratch, &part, k, end)


cdef inline void multiply_h_part(
    const Forward *p, const cell *c, const store **inputs, store **outputs, real *scratch, Py_ssize_t number, int n,
    Py_ssize_t k, Py_ssize_t start
) noexcept nogil:
    """For the step processed as number k, of the chunk that begins with number `start`."""
    cdef Part part = part_of(p, number)
    multiply_h(p, c, inputs, outputs, scratch, &part, n, k, count_active_rows(&p.steps, start, k, part.b0, part.b1))


cdef inline void all_steps(
    const Forward *p, const cell *c, const store **inputs, store **outputs, real *scratch, Py_ssize_t number
) noexcept nogil:
    """All steps of a part that needs no other part."""
    cdef Part part = part_of(p, number)
    cdef Py_ssize_t k = 0, end, row
    while k < p.steps.T:
        row, end = 0, end_of_chunk(p, k, part.b0, part.b1)
        load_x(p, inputs, scratch, &part, k, end)
        multiply_x(p, c, scratch, &part, k, end)
        while k < end:
            multiply_h(p, c, inputs, outputs, scratch, &part, 0, k, row)
            if products_of(c) > 1:
                multiply_h(p, c, inputs, outputs, scratch, &part, 1, k, row)
            row += active_end(&p.steps, k, part.b0, part.b1) - part.b0
            k += 1


# -------------------------------------------------------------------------------------------------------------- driver
cdef inline long long forward(
    const Forward *p, const cell *c, const store **inputs, store **outputs, real *scratch
) noexcept nogil:
    """The forward pass.  Returns the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid), first = p.grid.first, last = p.grid.end
    cdef Py_ssize_t k = 0, start = 0, end = 0  # in the region each thread has its own
    if parts == 1:  # entering a parallel region costs time even with one thread
        load_states(p, c, inputs, outputs, scratch, 0)
        if not p.packed:
            pack(p, c, inputs, scratch, 0, 1)
        all_steps(p, c, inputs, outputs, scratch, 0)
        store_states(p, c, outputs, scratch, 0)
        return 0
    start_team(&team, p.grid.groups, p.grid.members)
    with nogil, parallel(num_threads=threads_of(&p.grid)):
        adopt_rounding(&team)
        for part in prange(first, last, schedule="static"):
            load_states(p, c, inputs, outputs, scratch, part)
        if not p.packed:
            for part in prange(first, last, schedule="static"):
                pack(p, c, inputs, scratch, part, parts)
            barrier(&team)
        if p.grid.members == 1:
            for part in prange(first, last, schedule="static"):
                all_steps(p, c, inputs, outputs, scratch, part)
        else:
            while k < p.steps.T:
                start, end = k, end_of_common_chunk(p, k)
                for part in prange(first, last, schedule="static"):
                    load_x_part(p, inputs, scratch, part, start, end)
                group_barrier(&team)
                for part in prange(first, last, schedule="static"):
                    multiply_x_part(p, c, scratch, part, start, end)
                while k < end:
                    for part in prange(first, last, schedule="static"):
                        multiply_h_part(p, c, inputs, outputs, scratch, part, 0, k, start)
                    group_barrier(&team)
                    if products_of(c) > 1:
                        for part in prange(first, last, schedule="static"):
                            multiply_h_part(p, c, inputs, outputs, scratch, part, 1, k, start)
                        group_barrier(&team)
                    k = k + 1
        for part in prange(first, last, schedule="static"):
            store_states(p, c, outputs, scratch, part)
        barrier(&team)  # results do not need it, but waiting here is short and measured, unlike in the runtime
    return measured_cost(&team)


cdef inline long long run_forward(
    Forward *p, const cell *c, const store **inputs, store **outputs, void *scratch, int ready
) noexcept nogil:
    """`forward` in the type in which arrays of this type are computed, on no more threads than are ready."""
    cdef long long nanoseconds
    use_threads(&p.grid, ready)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if store is double:
        nanoseconds = forward(p, c, inputs, outputs, <double *> scratch)
    else:
        nanoseconds = forward(p, c, inputs, outputs, <float *> scratch)
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
cdef inline long long pass_forward(
    const Forward *plan, const cell *c, int ready, void *scratch, const Pass *a, const store *x
) noexcept nogil:
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Forward p = plan[0]
    cdef int k
    for k in range(OUTS):
        outputs[k] = NULL
    if a.saved is not NULL:
        for k in range(row_of(c).saved):
            outputs[OUT_H + 1 + k] = <store *> a.saved + k * p.steps.T * p.B * p.H
    inputs[X], outputs[OUT_H] = x, <store *> a.y
    set_states(c, a.initial_state, <const void **> &inputs[H_PREV])
    set_states(c, <const void *const *> a.last_state, <const void **> &outputs[H_LAST])
    p.x_layout, p.y_layout, p.steps.reverse = a.x_layout, a.y_layout, a.reverse
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if a.step_mask is not NULL:
        use_threads(&p.grid, ready)
        use_step_mask(&p, a.step_mask, scratch)
    if p.packed:
        use_panels(&p, a.packed)
    else:
        set_torch_weights(c, p.I, p.H, a.weights, inputs)
        use_panels(&p, scratch)
    return run_forward(&p, c, inputs, outputs, scratch, ready)


cdef inline long long run_pass(
    const Forward *p, const cell *c, int storage, int ready, void *scratch, const Pass *a
) noexcept nogil:
    """A layer's steps, where `storage` says which type the arrays have."""
    if storage == DOUBLE:
        return pass_forward(p, c, ready, scratch, a, <const double *> a.x)
    if storage == HALF:
        return pass_forward(p, c, ready, scratch, a, <const half *> a.x)
    return pass_forward(p, c, ready, scratch, a, <const float *> a.x)
