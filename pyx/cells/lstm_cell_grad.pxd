"""`LSTMBlockCellGrad`: the gradient of a step of the LSTM to its pre-activations and to cs_prev, without a product.

A loop over the rows stores dicfo and cs_prev_grad where the caller wants them.  The phases of backward.pxd, which copy
both from scratch memory, were slower.
"""
from cython.parallel cimport parallel, prange

from cells.activations cimport default_activations
from cells.lstm cimport PEEP_LINES, load_peepholes, lstm_grad_line, store_peephole_grads
from passes.indices cimport CS_PREV, CS_PREV_GRAD, DICFO
from passes.steps cimport contiguous_layout, steps_of
from product.lines cimport LF, L, at, clear, lines_in, noinline_void, store_line, store_row
from product.real cimport real
from schedule.cost cimport grid_of, parts_of, use_threads
from schedule.plan cimport BACKWARD_REGIONS, D, PEEPHOLES, Backward
from schedule.team cimport Team, barrier, join_team, measured_cost, part_start, start_team
from schedule.workspace cimport Region, guard_zones, lay_out, region, release_zones

cdef enum:
    CELL_GRAD_UNITS = 8192  # B * H from which on there are several threads; chosen by hand, as in plan.pxd


cdef inline Backward plan_dicfo(Py_ssize_t B, Py_ssize_t H, Py_ssize_t threads) noexcept nogil:
    """Plan `LSTMBlockCellGrad` on at most so many threads, which share the rows.  Rows of d are rows of dicfo; float16
    has d in scratch memory."""
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef int i
    p.steps = steps_of(1, B)
    p.B, p.I, p.H = B, 0, H
    p.cs_layout = p.d_y_layout = contiguous_layout(B, H)
    p.J = lines_in(H)
    p.N[0] = p.Ns = 4 * H
    p.grid = grid_of(1 if B * H < CELL_GRAD_UNITS else min(threads, B), 1)
    for i in range(BACKWARD_REGIONS):
        regions[i] = region("", 0, 0, 0)
    regions[PEEPHOLES] = region("peepholes", p.grid.groups * p.J, PEEP_LINES * L, 0)
    regions[D] = region("d", B, p.Ns, 0)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


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
        load_peepholes(p.c, peep, p.inputs, p.H, j)
    for row in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        for j in range(p.J):
            clear(d_cs, L)
            lstm_grad_line(<const default_activations *> p, at(p.inputs[CS_PREV], row * p.H), peep, j, 0, row, zero,
                           d_cs, d + row * p.Ns)
            store_line(at(p.outputs[CS_PREV_GRAD], row * p.H + j * L), d_cs, p.H - j * L)
        if p.c.is_half:
            store_row(at(p.outputs[DICFO], row * p.N[0]), d + row * p.Ns, p.N[0])


cdef inline long long run_dicfo(Backward *p, int ready) noexcept nogil:
    """Run the gradient of a step without its product; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts
    cdef long long nanoseconds = 0
    cdef real *d = p.scratch + p.start[D] if p.c.is_half else <real *> p.outputs[DICFO].data
    use_threads(&p.grid, ready)
    parts = parts_of(&p.grid)
    guard_zones(&p.workspace, p.scratch, 1)
    if parts == 1:
        store_dicfo_rows(p, d, 0, 1)
        store_peephole_grads(p, d, 0, 1)
    else:
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
        nanoseconds = measured_cost(&team)
    release_zones(&p.workspace, p.scratch, 1)
    return nanoseconds
