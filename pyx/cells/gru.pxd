"""The GRU's cell: its equations, its gradient, and where a step finds their operands.

One step; the reset gate acts before the product, and u near 1 keeps the old state:

    [r_bar, u_bar] = [x, h_prev] @ w_ru + b_ru     r = sigmoid(r_bar)     u = sigmoid(u_bar)
    c_bar = [x, h_prev * r] @ w_c + b_c            c = tanh(c_bar)        h = u * (h_prev - c) + c

Its gradient, from d_h, with d_hr = d_c_bar @ w_c.T, of the rows of w_c for h:

    d_u_bar = d_h * (h_prev - c) * u * (1 - u)     d_c_bar = d_h * (1 - u) * (1 - c^2)
    d_r_bar = d_hr * h_prev * r * (1 - r)
    d_h_prev = d_hr * r + d_h * u + [d_r_bar, d_u_bar] @ w_ru.T, of the rows of w_ru for h

A layer may have other activations than tanh and sigmoid.  With s the slope of one where its value is y, s(u) then
stands for u * (1 - u), and s(c) for 1 - c^2.

`gates`, `candidate`, `candidate_grad` and `gates_grad` are these equations for one line of units of one batch row.
"""
from cells.activations cimport SIGMOID, TANH, activate, plain, sigmoid, slope, tanh
from cells.types cimport Gru
from passes.gradients cimport state_line
from passes.operands cimport H_GRAD, OUT_C, OUT_R, OUT_U
from passes.outputs cimport store_h
from passes.steps cimport ENDED, FRESH, marked, place, row_in, step_at
from product.half cimport half
from product.panels cimport units_in
from product.quantized cimport UNQUANTIZED
from product.real cimport real
from product.tile cimport (
    LF, LINES, called, clear, for_writing, line_at, line_of, load_line, round_to_half, store, store_line
)
from schedule.plan cimport Backward, Forward

cdef enum:  # a step's products: the one for r and u, and the one for c
    RU, C

cdef enum:  # the lines of z of the first, and the columns of a row of gradients, in units of H
    R_BAR, U_BAR, C_BAR


cdef inline Gru gru_of() noexcept nogil:
    cdef Gru c
    c.gates[RU], c.gates[C], c.transposed, c.format = 2, 1, False, UNQUANTIZED
    c.activation, c.recurrent, c.usual = plain(TANH), plain(SIGMOID), True
    return c


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline called gates(
    const Gru *of, const real *restrict z, const real *restrict h_prev, real *restrict r, real *restrict u,
    real *restrict hr
) noexcept nogil:
    """From z to r, u and hr = h_prev * r."""
    cdef Py_ssize_t l, L = line_of(z)
    if of.usual:
        for l in range(L):
            r[l] = sigmoid(z[R_BAR * L + l])
            u[l] = sigmoid(z[U_BAR * L + l])
            hr[l] = h_prev[l] * r[l]
    else:
        activate(&of.recurrent, z + R_BAR * L, r)
        activate(&of.recurrent, z + U_BAR * L, u)
        for l in range(L):
            hr[l] = h_prev[l] * r[l]


cdef inline called candidate(
    const Gru *of, const real *restrict z, const real *restrict u, real *restrict h, real *restrict c
) noexcept nogil:
    """From z and u to c; h becomes the new state."""
    cdef Py_ssize_t l, L = line_of(z)
    if of.usual:
        for l in range(L):
            c[l] = tanh(z[l])
            h[l] = u[l] * (h[l] - c[l]) + c[l]
    else:
        activate(&of.activation, z, c)
        for l in range(L):
            h[l] = u[l] * (h[l] - c[l]) + c[l]


cdef inline called candidate_grad(
    const Gru *of, const real *restrict u, const real *restrict c, const real *restrict h_prev,
    const real *restrict d_h, real *restrict d_u_bar, real *restrict d_c_bar
) noexcept nogil:
    cdef Py_ssize_t l, L = line_of(u)
    cdef real one = 1  # a literal 1 would make all of it double
    cdef real[LF] s_u, s_c
    if of.usual:
        for l in range(L):
            d_u_bar[l] = d_h[l] * (h_prev[l] - c[l]) * u[l] * (one - u[l])
            d_c_bar[l] = d_h[l] * (one - u[l]) * (one - c[l] * c[l])
    else:
        slope(&of.recurrent, u, s_u)
        slope(&of.activation, c, s_c)
        for l in range(L):
            d_u_bar[l] = d_h[l] * (h_prev[l] - c[l]) * s_u[l]
            d_c_bar[l] = d_h[l] * (one - u[l]) * s_c[l]


cdef inline called gates_grad(
    const Gru *of, const real *restrict r, const real *restrict u, const real *restrict h_prev,
    const real *restrict d_hr, real *restrict d_h, real *restrict d_r_bar
) noexcept nogil:
    """d_h becomes the part of d_h_prev that does not come through r and u."""
    cdef Py_ssize_t l, L = line_of(r)
    cdef real one = 1
    cdef real[LF] s_r
    if of.usual:
        for l in range(L):
            d_r_bar[l] = d_hr[l] * h_prev[l] * r[l] * (one - r[l])
            d_h[l] = d_hr[l] * r[l] + d_h[l] * u[l]
    else:
        slope(&of.recurrent, r, s_r)
        for l in range(L):
            d_r_bar[l] = d_hr[l] * h_prev[l] * s_r[l]
            d_h[l] = d_hr[l] * r[l] + d_h[l] * u[l]


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void gates_cells(
    const Forward *p, const Gru *of, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *z,
    real *rows, store **outputs
) noexcept nogil:
    """r, u and h_prev * r of the step processed as number k, from z: panel j, slots b0 to b1."""
    cdef Py_ssize_t L = line_of(z), units = p.w[RU].units
    cdef real[LF] gate_r
    cdef Py_ssize_t b, s, at, to, t = step_at(&p.steps, k)
    cdef real *u
    for b in range(b0, b1):
        for s in range(units_in(&p.w[RU], j)):
            at = (j * units + s) * L
            to = (t * p.B + row_in(&p.steps, b)) * p.H + at
            u = rows + p.u + b * p.Hs + at
            gates(of, z + ((b - b0) * LINES + 2 * s) * L, rows + p.h + b * p.Hs + at, gate_r, u,
                  rows + p.hr + b * p.Hs + at)
            if outputs[OUT_R] is NULL:
                continue
            if marked(&p.steps, k, b, ENDED):
                clear(gate_r, L)
                clear(u, L)
            store_line(outputs[OUT_R] + to, gate_r, p.H - at)
            store_line(outputs[OUT_U] + to, u, p.H - at)
            if at + units * L < p.H:
                for_writing(outputs[OUT_R] + to + units * L)  # for panel j + 1; what follows the row may be
                for_writing(outputs[OUT_U] + to + units * L)  # another thread's


cdef inline void candidate_cells(
    const Forward *p, const Gru *of, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *z,
    real *rows, store **outputs
) noexcept nogil:
    """c, h and the new state of the step processed as number k, from z: panel j, slots b0 to b1."""
    cdef Py_ssize_t L = line_of(z), units = p.w[C].units
    cdef real[LF] c
    cdef real[LF] zero
    cdef Py_ssize_t b, s, at, t = step_at(&p.steps, k)
    cdef real *h
    cdef const real *y
    cdef store *row
    clear(zero, L)
    for b in range(b0, b1):
        for s in range(units_in(&p.w[C], j)):
            at = (j * units + s) * L
            h = rows + p.h + b * p.Hs + at
            y = h
            if marked(&p.steps, k, b, ENDED):
                clear(c, L)
                y = zero
            else:
                candidate(of, z + ((b - b0) * LINES + s) * L, rows + p.u + b * p.Hs + at, h, c)
            if outputs[OUT_C] is not NULL:
                row = outputs[OUT_C] + (t * p.B + row_in(&p.steps, b)) * p.H + at
                store_line(row, c, p.H - at)
                if at + units * L < p.H:
                    for_writing(row + units * L)
            store_h(p, outputs, t, row_in(&p.steps, b), at, at + units * L, y)
            if store is half:  # the next step reads the state as it is stored
                round_to_half(h)
            if marked(&p.steps, k + 1, b, FRESH):
                clear(h, L)


# ------------------------------------------------------------------------------------------ backward: a step's cells
cdef inline void candidate_grad_line(
    const Backward *p, const Gru *of, const store **inputs, const store *h_prev, Py_ssize_t j, Py_ssize_t t,
    Py_ssize_t b, const real *carry, real *d_h, real *d
) noexcept nogil:
    """Line j of row (t, b) of d_u_bar and d_c_bar, to row d, and of d_h, the carried gradient plus the incoming
    one.  `h_prev` is the state that the step started from, or NULL for zeros."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[LF] u
    cdef real[LF] c
    cdef real[LF] h
    cdef real[LF] d_u_bar
    cdef real[LF] d_c_bar
    cdef Py_ssize_t l, at = (t * p.B + b) * p.H + j * L, n = p.H - j * L
    load_line(d_h, inputs[H_GRAD] + place(&p.d_y_layout, t, b) + j * L, n)
    for l in range(L):
        d_h[l] = carry[l] + d_h[l]
    candidate_grad(of, line_at(&u[0], inputs[OUT_U] + at, n), line_at(&c[0], inputs[OUT_C] + at, n),
                   state_line(&h[0], h_prev, j, n), d_h, d_u_bar, d_c_bar)
    store_line(d + U_BAR * p.H + j * L, d_u_bar, n)
    store_line(d + C_BAR * p.H + j * L, d_c_bar, n)


cdef inline void gates_grad_line(
    const Backward *p, const Gru *of, const store **inputs, const store *h_prev, Py_ssize_t j, Py_ssize_t r,
    const real *d_hr, real *d_h, real *d
) noexcept nogil:
    """Line j of row r = t * B + b of d_r_bar, to row d, from d_hr; d_h becomes the carried gradient."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[LF] gate_r
    cdef real[LF] u
    cdef real[LF] h
    cdef real[LF] d_r_bar
    cdef Py_ssize_t at = r * p.H + j * L, n = p.H - j * L
    gates_grad(of, line_at(&gate_r[0], inputs[OUT_R] + at, n), line_at(&u[0], inputs[OUT_U] + at, n),
               state_line(&h[0], h_prev, j, n), d_hr, d_h, d_r_bar)
    store_line(d + R_BAR * p.H + j * L, d_r_bar, n)
