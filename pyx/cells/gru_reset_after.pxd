"""The GRU that resets after the product: its equations, its gradient, and where a step finds their operands.

This is the GRU of PyTorch, Keras and cuDNN.  w_ru = [w_rux; w_ruh] and w_c = [w_cx; w_ch], for x and h each.  One step:

    [r_bar, u_bar] = [x, h_prev] @ w_ru + b_ru     r = sigmoid(r_bar)     u = sigmoid(u_bar)
    xc = x @ w_cx + b_c                            hc = h_prev @ w_ch + b_hc
    c_bar = xc + r * hc                            c = tanh(c_bar)        h = u * (h_prev - c) + c

Its gradient, from d_h:

    d_u_bar = d_h * (h_prev - c) * u * (1 - u)     d_c_bar = d_h * (1 - u) * (1 - c^2)
    d_r_bar = d_c_bar * hc * r * (1 - r)           d_hc = d_c_bar * r
    d_h_prev = d_h * u + [d_r_bar, d_u_bar] @ w_ruh.T + d_hc @ w_ch.T

A layer may have other activations than tanh and sigmoid.  Then the slopes of these, as functions of u and c, take the
place of u * (1 - u) and 1 - c^2: `gate_grad` and `state_slope`.

`new_state` and `pre_activation_grads` are these equations for one line of units of one batch row.  Their pointers are
lines of L numbers, which do not overlap:

    z              XC, R_BAR, U_BAR, HC, one behind the other, in scratch memory or on the stack
    h_prev, h      states in scratch memory; for the gradient h_prev is as r
    y              a line for each output of the step, by the numbers of indices.pxd, on the stack
    r, u, c, hc    saved outputs, the caller's, or padded copies on the stack
    d_h            the gradient of h, in scratch memory
    d              D_R_BAR, D_U_BAR, D_C_BAR, D_HC, one behind the other, on the stack

A step has one product, so n of `backward_lines` (types.pxd) is always 0.
"""
from cells.activations cimport (
    activate_gate, activate_state, activations, any_activations, default_activations, gate_grad, state_slope
)
from cells.types cimport BackwardLines, CellTraits, ForwardCells, StepProduct, no_traits
from passes.gradients cimport add_line, state_line
from passes.indices cimport H_GRAD, H_PREV, OUT_C, OUT_H, OUT_HC, OUT_R, OUT_U
from passes.outputs cimport hand_on_line, store_output_line
from passes.steps cimport offset_of, previous_row, row_of_slot, step_at
from product.lines cimport LF, Array, L, can_stay, line_at, noinline_void, store_reals
from product.real cimport real
from product.tile cimport LINES
from schedule.plan cimport D, D_H, Backward, Forward, h_before

cdef enum:  # the lines of z: x's term of c_bar, what goes into both gates, and h's term of c_bar before the reset
    XC, R_BAR, U_BAR, HC

cdef enum:  # the lines of d, and where they are in a row of gradients, in units of H
    D_R_BAR, D_U_BAR, D_C_BAR, D_HC
    D_LINES

cdef enum:
    Y_LINES = OUT_HC + 1


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline noinline_void new_state(
    const activations *cell, const real *restrict z, const real *restrict h_prev, real *restrict h, real *restrict y
) noexcept nogil:
    """Compute h, and r, u, c, hc, h in y, from z and h_prev."""
    cdef Py_ssize_t l
    cdef real[LF] c_bar
    activate_gate(cell, z + R_BAR * L, y + OUT_R * L)
    activate_gate(cell, z + U_BAR * L, y + OUT_U * L)
    for l in range(L):
        c_bar[l] = z[XC * L + l] + y[OUT_R * L + l] * z[HC * L + l]
    activate_state(cell, c_bar, y + OUT_C * L)
    for l in range(L):
        y[OUT_HC * L + l] = z[HC * L + l]
        h[l] = y[OUT_U * L + l] * (h_prev[l] - y[OUT_C * L + l]) + y[OUT_C * L + l]
        y[OUT_H * L + l] = h[l]


cdef inline noinline_void pre_activation_grads(
    const activations *cell, const real *restrict r, const real *restrict u, const real *restrict c,
    const real *restrict hc, const real *restrict h_prev, real *restrict d_h, real *restrict d
) noexcept nogil:
    """Compute d_r_bar, d_u_bar, d_c_bar and d_hc, in d, from d_h.

    d_h : the gradient of h, which becomes the term of d_h_prev that is not a product
    """
    cdef Py_ssize_t l
    cdef real d_c_bar, one = 1  # a literal 1 would make all of it double
    cdef real[LF] s_c
    state_slope(cell, c, s_c)
    for l in range(L):
        d_c_bar = d_h[l] * (one - u[l]) * s_c[l]
        d[D_U_BAR * L + l] = d_h[l] * (h_prev[l] - c[l])
        d[D_C_BAR * L + l] = d_c_bar
        d[D_R_BAR * L + l] = d_c_bar * hc[l]
        d[D_HC * L + l] = d_c_bar * r[l]
        d_h[l] = d_h[l] * u[l]
    gate_grad(cell, u, d + D_U_BAR * L)
    gate_grad(cell, r, d + D_R_BAR * L)


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void forward_cells(
    const activations *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute the states and outputs of a step; a panel has the gates of one line."""
    cdef const Forward *p = <const Forward *> call
    cdef const activations *cell = <const activations *> &p.c
    cdef real[Y_LINES * LF] y
    cdef Py_ssize_t j, b, row, unit, out, k = step.k, t = step_at(&p.steps, k)
    cdef const real *h_prev
    cdef real *h
    for j in range(j0, j1):
        for b in range(b0, b1):
            unit = j * L
            h_prev = h_before(p, step.rows, k) + b * p.Hs + unit
            h = h_before(p, step.rows, k + 1) + b * p.Hs + unit
            new_state(cell, z + (j - j0) * step.z_panel + (b - b0) * LINES * L, h_prev, h, y)
            row = row_of_slot(&p.steps, b)
            for out in range(Y_LINES):
                store_output_line(p, out, t, row, unit, unit + L, y + out * L)
            hand_on_line(p, &p.steps.h_reset, k, b, h, unit, p.H)


# ------------------------------------------------------------------------------------------- backward: a step's lines
cdef inline noinline_void backward_lines(
    const activations *call, int n, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *product
) noexcept nogil:
    """Compute d_r_bar, d_u_bar, d_c_bar and d_hc, and turn d_h into the term of d_h_prev that is not a product."""
    cdef const Backward *p = <const Backward *> call
    cdef const activations *cell = <const activations *> &p.c
    cdef const Array *inputs = p.inputs
    cdef Py_ssize_t t = step_at(&p.steps, k), row = row_of_slot(&p.steps, b)
    cdef Py_ssize_t j, line, saved_line, width  # saved_line: where line j begins in a saved output
    cdef bint in_place
    cdef real[Y_LINES * LF] saved  # for lines of saved outputs that cannot be read where they are
    cdef real[LF] h_prev_space  # for h_prev, where that cannot be
    cdef real[D_LINES * LF] d
    cdef real *d_row = p.scratch + p.start[D] + (t * p.B + b) * p.Ns
    cdef real *d_h = p.scratch + p.start[D_H] + b * p.Ps
    cdef Array h_prev = previous_row(&p.steps, inputs[H_PREV], &p.steps.h_reset, p.H, inputs[OUT_H], &p.h_layout, t,
                                     row)
    for j in range(j0, j1):
        saved_line, width = (t * p.B + row) * p.H + j * L, p.H - j * L
        in_place = can_stay(width, p.c.is_half)
        add_line(in_place, d_h + j * L, product + (j - j0) * L, inputs[H_GRAD],
                 offset_of(&p.d_y_layout, t, row) + j * L, width)
        pre_activation_grads(cell, line_at(in_place, &saved[OUT_R * L], inputs[OUT_R], saved_line, width),
                             line_at(in_place, &saved[OUT_U * L], inputs[OUT_U], saved_line, width),
                             line_at(in_place, &saved[OUT_C * L], inputs[OUT_C], saved_line, width),
                             line_at(in_place, &saved[OUT_HC * L], inputs[OUT_HC], saved_line, width),
                             state_line(in_place, &h_prev_space[0], h_prev, j, width), d_h + j * L, d)
        for line in range(D_LINES):
            store_reals(d_row + line * p.H + j * L, d + line * L, width)


cdef inline CellTraits gru_reset_after_traits() noexcept nogil:
    """Return the traits of the GRU that resets after the product."""
    cdef CellTraits traits = no_traits()
    traits.products, traits.matrices, traits.state_matrices, traits.gates = 1, 2, 2, [2, 1]
    traits.separate, traits.states, traits.saved = 1, 1, 4
    traits.forward_time, traits.backward_time = 20, 45
    traits.forward_cells = [<ForwardCells> forward_cells[any_activations], NULL]
    traits.default_forward_cells = [<ForwardCells> forward_cells[default_activations], NULL]
    traits.backward_lines = <BackwardLines> backward_lines[any_activations]
    traits.default_backward_lines = <BackwardLines> backward_lines[default_activations]
    return traits
