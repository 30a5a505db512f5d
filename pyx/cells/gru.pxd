"""The GRU's cell: its equations, its gradient, and where a step finds their operands.

w_ru = [w_rux; w_ruh] and w_c = [w_cx; w_ch], for x and h each.  One step; the reset gate acts before the product, and u
near 1 keeps the old state:

    [r_bar, u_bar] = [x, h_prev] @ w_ru + b_ru     r = sigmoid(r_bar)     u = sigmoid(u_bar)
    c_bar = [x, h_prev * r] @ w_c + b_c            c = tanh(c_bar)        h = u * (h_prev - c) + c

Its gradient, from d_h, with d_hr = d_c_bar @ w_ch.T:

    d_u_bar = d_h * (h_prev - c) * u * (1 - u)     d_c_bar = d_h * (1 - u) * (1 - c^2)
    d_r_bar = d_hr * h_prev * r * (1 - r)
    d_h_prev = d_hr * r + d_h * u + [d_r_bar, d_u_bar] @ w_ruh.T

A layer may have other activations than tanh and sigmoid.  Then the slopes of these, as functions of u and c, take the
place of u * (1 - u) and 1 - c^2: `gate_grad` and `state_slope`.

`gates`, `candidate`, `candidate_grad` and `gates_grad` are these equations for one line of units of one batch row.
Their pointers are lines of L numbers, which do not overlap:

    z                          r_bar and u_bar, one behind the other, or c_bar; in scratch memory or on the stack
    h_prev, h, hr, u           in scratch memory; for gradients h_prev and u are as r
    r, c                       on the stack; for gradients saved outputs, the caller's, or padded copies on the stack
    d_h                        the gradient of h, in scratch memory
    d_hr                       the product, on the stack
    d_r_bar, d_u_bar, d_c_bar  on the stack
"""
from cells.activations cimport (
    activate_gate, activate_state, activations, any_activations, default_activations, gate_grad, state_slope
)
from cells.types cimport BackwardLines, CellTraits, ForwardCells, StepProduct, no_traits
from passes.gradients cimport add_line, state_line
from passes.indices cimport D_C_BAR, D_R_BAR_U_BAR, H_GRAD, H_PREV, OUT_C, OUT_H, OUT_R, OUT_U
from passes.outputs cimport hand_on_line, store_output_line
from passes.steps cimport offset_of, previous_row, row_of_slot, step_at
from product.lines cimport LF, Array, L, at, can_stay, line_at, noinline_void, store_reals, store_row
from product.panels cimport unit_lines_in_panel
from product.real cimport real
from product.tile cimport LINES
from schedule.plan cimport D, D_H, H_EVEN, HR, U, Backward, Forward
from schedule.team cimport part_start

cdef enum:  # a step's products: the one for r and u, and the one for c
    RU, C

cdef enum:  # the lines of z of the first, and the columns of a row of gradients, in units of H
    R_BAR, U_BAR, C_BAR


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline noinline_void gates(
    const activations *cell, const real *restrict z, const real *restrict h_prev, real *restrict r, real *restrict u,
    real *restrict hr
) noexcept nogil:
    """Compute r, u and hr = h_prev * r from z."""
    cdef Py_ssize_t l
    activate_gate(cell, z + R_BAR * L, r)
    activate_gate(cell, z + U_BAR * L, u)
    for l in range(L):
        hr[l] = h_prev[l] * r[l]


cdef inline noinline_void candidate(
    const activations *cell, const real *restrict z, const real *restrict u, real *restrict h, real *restrict c
) noexcept nogil:
    """Compute c and h from z and u.

    h : h_prev, which becomes h
    """
    cdef Py_ssize_t l
    activate_state(cell, z, c)
    for l in range(L):
        h[l] = u[l] * (h[l] - c[l]) + c[l]


cdef inline noinline_void candidate_grad(
    const activations *cell, const real *restrict u, const real *restrict c, const real *restrict h_prev,
    const real *restrict d_h, real *restrict d_u_bar, real *restrict d_c_bar
) noexcept nogil:
    """Compute d_u_bar and d_c_bar from d_h."""
    cdef Py_ssize_t l
    cdef real one = 1  # a literal 1 would make all of it double
    cdef real[LF] s_c
    state_slope(cell, c, s_c)
    for l in range(L):
        d_u_bar[l] = d_h[l] * (h_prev[l] - c[l])
        d_c_bar[l] = d_h[l] * (one - u[l]) * s_c[l]
    gate_grad(cell, u, d_u_bar)


cdef inline noinline_void gates_grad(
    const activations *cell, const real *restrict r, const real *restrict u, const real *restrict h_prev,
    const real *restrict d_hr, real *restrict d_h, real *restrict d_r_bar
) noexcept nogil:
    """Compute d_r_bar from d_hr.

    d_h : the gradient of h, which becomes the term of d_h_prev that does not come through r and u
    """
    cdef Py_ssize_t l
    for l in range(L):
        d_r_bar[l] = d_hr[l] * h_prev[l]
        d_h[l] = d_hr[l] * r[l] + d_h[l] * u[l]
    gate_grad(cell, r, d_r_bar)


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void gates_cells(
    const activations *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute r, u and h_prev * r of step k from product RU."""
    cdef const Forward *p = <const Forward *> call
    cdef const activations *cell = <const activations *> &p.c
    cdef Py_ssize_t units = p.w[RU].unit_lines, j, b, row, unit_line, unit
    cdef Py_ssize_t t = step_at(&p.steps, step.k)
    cdef real[LF] gate_r
    cdef real *rows = step.rows
    cdef real *u
    for j in range(j0, j1):
        for b in range(b0, b1):
            for unit_line in range(unit_lines_in_panel(&p.w[RU], j)):
                unit = (j * units + unit_line) * L
                u = rows + p.start[U] + b * p.Hs + unit
                gates(cell, z + (j - j0) * step.z_panel + ((b - b0) * LINES + 2 * unit_line) * L,
                      rows + p.start[H_EVEN] + b * p.Hs + unit, gate_r, u, rows + p.start[HR] + b * p.Hs + unit)
                row = row_of_slot(&p.steps, b)
                store_output_line(p, OUT_R, t, row, unit, unit + units * L, gate_r)
                store_output_line(p, OUT_U, t, row, unit, unit + units * L, u)


cdef inline void candidate_cells(
    const activations *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute c and h of step k from product C."""
    cdef const Forward *p = <const Forward *> call
    cdef const activations *cell = <const activations *> &p.c
    cdef Py_ssize_t units = p.w[C].unit_lines, j, b, row, unit_line, unit
    cdef Py_ssize_t k = step.k, t = step_at(&p.steps, k)
    cdef real[LF] c
    cdef real *rows = step.rows
    cdef real *h
    for j in range(j0, j1):
        for b in range(b0, b1):
            for unit_line in range(unit_lines_in_panel(&p.w[C], j)):
                unit = (j * units + unit_line) * L
                h = rows + p.start[H_EVEN] + b * p.Hs + unit
                candidate(cell, z + (j - j0) * step.z_panel + ((b - b0) * LINES + unit_line) * L,
                          rows + p.start[U] + b * p.Hs + unit, h, c)
                row = row_of_slot(&p.steps, b)
                store_output_line(p, OUT_C, t, row, unit, unit + units * L, c)
                store_output_line(p, OUT_H, t, row, unit, unit + units * L, h)
                hand_on_line(p, &p.steps.h_reset, k, b, h, unit, p.H)


# ------------------------------------------------------------------------------------------- backward: a step's lines
cdef inline noinline_void backward_lines(
    const activations *call, int n, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *product
) noexcept nogil:
    """Compute d_u_bar and d_c_bar; or d_r_bar from the product of d_c_bar, d_hr, and turn d_h into the term of d_h_prev
    that does not come through r and u."""
    cdef const Backward *p = <const Backward *> call
    cdef const activations *cell = <const activations *> &p.c
    cdef const Array *inputs = p.inputs
    cdef Py_ssize_t t = step_at(&p.steps, k), row = row_of_slot(&p.steps, b)
    cdef Py_ssize_t j, saved_line, width  # saved_line: where line j begins in a saved output
    cdef bint in_place
    cdef real[LF] h_prev_space, r_space, u_space, c_space  # for lines that cannot be read where they are
    cdef real[LF] d_r_bar, d_u_bar, d_c_bar
    cdef real *d_row = p.scratch + p.start[D] + (t * p.B + b) * p.Ns
    cdef real *d_h = p.scratch + p.start[D_H] + b * p.Ps
    cdef Array h_prev_row = previous_row(&p.steps, inputs[H_PREV], &p.steps.h_reset, p.H, inputs[OUT_H], &p.h_layout,
                                         t, row)
    cdef const real *h_prev
    cdef const real *u
    for j in range(j0, j1):
        saved_line, width = (t * p.B + row) * p.H + j * L, p.H - j * L
        in_place = can_stay(width, p.c.is_half)
        h_prev = state_line(in_place, &h_prev_space[0], h_prev_row, j, width)
        u = line_at(in_place, &u_space[0], inputs[OUT_U], saved_line, width)
        if n == 0:
            add_line(in_place, d_h + j * L, product + (j - j0) * L, inputs[H_GRAD],
                     offset_of(&p.d_y_layout, t, row) + j * L, width)
            candidate_grad(cell, u, line_at(in_place, &c_space[0], inputs[OUT_C], saved_line, width), h_prev,
                           d_h + j * L, d_u_bar, d_c_bar)
            store_reals(d_row + U_BAR * p.H + j * L, d_u_bar, width)
            store_reals(d_row + C_BAR * p.H + j * L, d_c_bar, width)
        else:
            gates_grad(cell, line_at(in_place, &r_space[0], inputs[OUT_R], saved_line, width), u, h_prev,
                       product + (j - j0) * L, d_h + j * L, d_r_bar)
            store_reals(d_row + R_BAR * p.H + j * L, d_r_bar, width)


cdef inline void store_remaining_grads(const void *call, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Store one part of the rows of d, where `GRUBlockCellGrad` returns it."""
    cdef const Backward *p = <const Backward *> call
    cdef const real *d
    cdef Py_ssize_t b
    if p.grads[D_C_BAR].data is NULL:
        return
    for b in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        d = p.scratch + p.start[D] + b * p.Ns
        store_row(at(p.grads[D_R_BAR_U_BAR], b * p.N[0]), d, p.N[0])
        store_row(at(p.grads[D_C_BAR], b * p.N[1]), d + p.column[1], p.N[1])


cdef inline CellTraits gru_traits() noexcept nogil:
    """Return the traits of the GRU."""
    cdef CellTraits traits = no_traits()
    traits.products, traits.matrices, traits.state_matrices, traits.gates = 2, 2, 1, [2, 1]
    traits.states, traits.saved, traits.factor = 1, 3, OUT_R
    traits.forward_time, traits.backward_time = 20, 45
    traits.forward_cells = [
        <ForwardCells> gates_cells[any_activations], <ForwardCells> candidate_cells[any_activations]
    ]
    traits.default_forward_cells = [
        <ForwardCells> gates_cells[default_activations], <ForwardCells> candidate_cells[default_activations]
    ]
    traits.backward_lines = <BackwardLines> backward_lines[any_activations]
    traits.default_backward_lines = <BackwardLines> backward_lines[default_activations]
    traits.store_remaining_grads = store_remaining_grads
    return traits
