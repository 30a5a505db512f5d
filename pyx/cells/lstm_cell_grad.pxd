"""`LSTMBlockCellGrad`: the gradient of a step of the LSTM to its pre-activations and to cs_prev, without a product.

A loop over the rows stores dicfo and cs_prev_grad where the caller wants them.  The phases of backward.pxd, which copy
both from scratch memory, were slower.
"""
from cython.parallel cimport parallel, prange
from libc.string cimport memset

from cells.activations cimport default_activations
from cells.lstm cimport PEEP_LINES, load_peepholes, lstm_grad_line, store_peephole_grads
from cells.types cimport Cell
from passes.arrays cimport Pass
from passes.backward cimport use_arrays
from passes.indices cimport CS_PREV, DICFO, GRADS, INPUTS
from passes.layer cimport planned_kernel
from passes.steps cimport contiguous_layout, steps_of
from product.lines cimport LF, Array, L, at, clear, lines_in, noinline_void, store_line, store_row
from product.real cimport real
from schedule.cost cimport grid_of, parts_of
from schedule.plan cimport BACKWARD_REGIONS, D, PEEPHOLES, Backward
from schedule.team cimport Team, barrier, join_team, measured_cost, part_start, start_team
from schedule.workspace cimport Region, lay_out, region, release_zones

cdef enum:
    CELL_GRAD_UNITS = 8192  # B * H from which on there are several threads; chosen by hand, as in plan.pxd


cdef inline noinline_void store_dicfo_rows(
    const Backward *p, real *d, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Store one part of the rows of dicfo, which are computed in d, and of cs_prev_grad.  Each part loads all peepholes
    for itself."""
    cdef Py_ssize_t row, j
    cdef real *peep = p.scratch + p.start[PEEPHOLES] + part * p.J * PEEP_LINES * L
    cdef real[LF] zero
    cdef real[LF] d_cs
    clear(zero, L)
    for j in range(p.J if p.c.peephole else 0):
        load_peepholes(&p.c, peep, p.inputs, p.H, j)
    for row in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        for j in range(p.J):
            clear(d_cs, L)
            lstm_grad_line(<const default_activations *> p, at(p.inputs[CS_PREV], row * p.H), peep, j, 0, row, zero,
                           d_cs, d + row * p.Ns)
            store_line(at(p.grads[CS_PREV], row * p.H + j * L), d_cs, p.H - j * L)
        if p.c.is_half:
            store_row(at(p.grads[DICFO], row * p.N[0]), d + row * p.Ns, p.N[0])


cdef inline long long compute_dicfo(const Backward *p, real *d) noexcept nogil:
    """Compute the gradient, with dicfo in the rows d; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts = parts_of(&p.grid)
    if parts == 1:
        store_dicfo_rows(p, d, 0, 1)
        store_peephole_grads(p, d, 0, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=parts):
        join_team(&team)
        for part in prange(parts, schedule="static"):
            store_dicfo_rows(p, d, part, parts)
        if p.c.peephole:
            barrier(&team)
            for part in prange(parts, schedule="static"):
                store_peephole_grads(p, d, part, parts)
        barrier(&team)  # as in `forward`
    return measured_cost(&team)


cdef inline long long dicfo_pass(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run `LSTMBlockCellGrad`, whose plan is a Backward, on at most `ready` threads; return the nanoseconds that having
    several cost."""
    cdef Backward p = (<const Backward *> plan)[0]
    cdef Array[INPUTS] inputs
    cdef Array[GRADS] grads
    cdef long long nanoseconds
    use_arrays(&p, ready, <real *> scratch, a, inputs, grads)
    nanoseconds = compute_dicfo(&p, p.scratch + p.start[D] if p.c.is_half else <real *> a.grads[DICFO])
    release_zones(&p.workspace, scratch, 1)
    return nanoseconds


cdef inline tuple plan_dicfo(const Cell *c, tuple sizes, int threads):
    """Plan `LSTMBlockCellGrad` on at most so many threads, which share the rows.  Rows of d are rows of dicfo; float16
    has d in scratch memory.

    sizes : T, B, I, H
    """
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef Py_ssize_t B, H
    _, B, _, H = sizes
    memset(&p, 0, sizeof(p))  # most of a Backward means nothing here
    memset(regions, 0, sizeof(regions))
    p.c = c[0]
    p.steps = steps_of(1, B)
    p.B, p.H = B, H
    p.cs_layout = p.d_y_layout = contiguous_layout(B, H)
    p.J = lines_in(H)
    p.N[0] = p.Ns = 4 * H
    p.grid = grid_of(1 if B * H < CELL_GRAD_UNITS else min(threads, B), 1)
    regions[PEEPHOLES] = region("peepholes", p.grid.groups * p.J, PEEP_LINES * L, 0)
    regions[D] = region("d", B, p.Ns, 0)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return planned_kernel(dicfo_pass, &p, sizeof(Backward), p.workspace.size, &p.grid)
