"""`LSTMBlockCellGrad`: the gradient of a step of the LSTM to its pre-activations and to cs_prev, without a product."""
from cython.parallel cimport parallel, prange

from cells.lstm cimport PEEP_LINES, load_peepholes, lstm_grad_line, peephole_grads
from cells.types cimport Cell
from passes.indices cimport CS_PREV, CS_PREV_GRAD, DICFO
from passes.steps cimport contiguous_layout, steps_of
from product.lines cimport LF, Array, at, clear, lanes_of, store_line, store_row
from product.real cimport real
from schedule.cost cimport Grid, ceil_div, grid_of, parts_of, use_threads
from schedule.plan cimport BACKWARD_REGIONS, D, PEEPHOLES, Backward
from schedule.team cimport Team, adopt_rounding, barrier, measured_cost, part_start, start_team
from schedule.workspace cimport Region, guard_zones, lay_out, region, release_zones

cdef enum:
    CELL_GRAD_UNITS = 8192  # B * H from which on there are several threads; chosen by hand, as in plan.pxd


cdef inline Grid choose_grid(Py_ssize_t B, Py_ssize_t H, Py_ssize_t threads) noexcept nogil:
    """Return the grid of `LSTMBlockCellGrad`: its threads share the rows."""
    return grid_of(1 if B * H < CELL_GRAD_UNITS else min(threads, B), 1)


cdef inline Backward plan_cell_grad(Py_ssize_t B, Py_ssize_t H, Py_ssize_t itemsize, Grid grid) noexcept nogil:
    """Plan `LSTMBlockCellGrad` on this grid.  It has no product, and the rows of d are those of dicfo."""
    cdef Backward p
    cdef Region[BACKWARD_REGIONS] regions
    cdef int i
    p.steps = steps_of(1, B)
    p.B, p.I, p.H = B, 0, H
    p.cs_layout = p.d_y_layout = contiguous_layout(B, H)
    p.L = 64 // itemsize
    p.J = ceil_div(H, p.L)
    p.N[0] = p.Ns = 4 * H
    p.grid = grid
    for i in range(BACKWARD_REGIONS):
        regions[i] = region("", 0, 0, 0)
    regions[PEEPHOLES] = region("peepholes", p.J, PEEP_LINES * p.L, 0)
    regions[D] = region("d", B, p.Ns, 0)
    p.workspace = lay_out(regions, BACKWARD_REGIONS, p.start)
    return p


cdef inline void dicfo_rows(
    const Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, real *d,
    Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """Compute one part of the rows of dicfo, in d, and of cs_prev_grad."""
    cdef Py_ssize_t L = lanes_of(d), r, j
    cdef real[LF] zero
    cdef real[LF] d_cs
    cdef real *row
    clear(zero, L)
    for r in range(part_start(p.B, number, parts), part_start(p.B, number + 1, parts)):
        row = d + r * p.Ns
        for j in range(p.J):
            clear(d_cs, L)
            lstm_grad_line(p, c, inputs, at(inputs[CS_PREV], r * p.H), scratch + p.start[PEEPHOLES], j, 0, r, zero,
                           d_cs, row)
            store_line(at(outputs[CS_PREV_GRAD], r * p.H + j * L), d_cs, p.H - j * L)
        if c.is_half:
            store_row(at(outputs[DICFO], r * p.N[0]), row, p.N[0])


cdef inline void peephole_parts(
    const Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, const real *d,
    bint loading, Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """Load one part of the lines of the peepholes, or compute one of their gradients."""
    cdef Py_ssize_t j
    for j in range(part_start(p.J, number, parts), part_start(p.J, number + 1, parts)):
        if loading:
            load_peepholes(c, scratch + p.start[PEEPHOLES], inputs, p.H, j)
        else:
            peephole_grads(p, c, inputs, outputs, d, j)


cdef inline long long cell_grads(
    Backward *p, const Cell *c, const Array *inputs, const Array *outputs, real *scratch, int ready
) noexcept nogil:
    """Run the gradient of a step without its products; return the nanoseconds that having several threads cost."""
    cdef Team team
    cdef Py_ssize_t part, parts
    cdef real *d = scratch + p.start[D]
    if not c.is_half:
        d = <real *> outputs[DICFO].data
    use_threads(&p.grid, ready)
    parts = parts_of(&p.grid)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if parts == 1:
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, scratch, d, True, 0, 1)
        dicfo_rows(p, c, inputs, outputs, scratch, d, 0, 1)
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, scratch, d, False, 0, 1)
        release_zones(&p.workspace, scratch, 64 // p.L, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=parts):
        adopt_rounding(&team)
        if c.peephole:
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, scratch, d, True, part, parts)
            barrier(&team)
        for part in prange(parts, schedule="static"):
            dicfo_rows(p, c, inputs, outputs, scratch, d, part, parts)
        if c.peephole:
            barrier(&team)
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, scratch, d, False, part, parts)
        barrier(&team)  # as in `forward`
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return measured_cost(&team)
