"""The GRU that resets after the product: its equations, its gradient, and where a step finds their operands.

This is the GRU of PyTorch, Keras and cuDNN.  One step, with w_c = [w_cx; w_ch], the rows for x and those for h:

    [r_bar, u_bar] = [x, h_prev] @ w_ru + b_ru     r = sigmoid(r_bar)     u = sigmoid(u_bar)
    xc = x @ w_cx + b_c                            hc = h_prev @ w_ch + b_hc
    c_bar = xc + r * hc                            c = tanh(c_bar)        h = u * (h_prev - c) + c

Its gradient, from d_h:

    d_u_bar = d_h * (h_prev - c) * u * (1 - u)     d_c_bar = d_h * (1 - u) * (1 - c^2)
    d_r_bar = d_c_bar * hc * r * (1 - r)           d_hc = d_c_bar * r
    d_h_prev = d_h * u + [d_r_bar, d_u_bar] @ w_ru.T + d_hc @ w_ch.T, of the rows of w_ru for h

A layer may have other activations than tanh and sigmoid.  With s the slope of one where its value is y, s(u) then
stands for u * (1 - u), and s(c) for 1 - c^2.

`new_state` and `bars_grad` are these equations for one line of units of one batch row.
"""
from cells.activations cimport SIGMOID, TANH, activate, plain, sigmoid, slope, tanh
from cells.types cimport ResetAfter
from passes.gradients cimport state_line
from passes.operands cimport H_GRAD, OUT_C, OUT_H, OUT_HC, OUT_R, OUT_U
from passes.outputs cimport store_output
from passes.steps cimport ENDED, FRESH, marked, place, row_in, step_at
from product.half cimport half
from product.quantized cimport UNQUANTIZED
from product.real cimport real
from product.tile cimport LF, LINES, called, clear, line_at, line_of, load_line, round_to_half, store, store_line
from schedule.plan cimport Backward, Forward, h_before

cdef enum:  # the lines of z: x's part of c_bar, what goes into both gates, and h's part of c_bar before the reset
    XC, R_BAR, U_BAR, HC

cdef enum:  # the columns of a row of gradients, in units of H
    D_R_BAR, D_U_BAR, D_C_BAR, D_HC

cdef enum:
    OUTS = OUT_HC + 1


cdef inline ResetAfter reset_after_of() noexcept nogil:
    cdef ResetAfter c
    c.gates[0], c.gates[1], c.transposed, c.format = 2, 1, False, UNQUANTIZED
    c.activation, c.recurrent, c.usual = plain(TANH), plain(SIGMOID), True
    return c


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline called new_state(
    const ResetAfter *of, const real *restrict z, const real *restrict h_prev, real *restrict h, real *restrict y
) noexcept nogil:
    """From z and h_prev to the new state, and to r, u, c, hc, h in y."""
    cdef Py_ssize_t l, L = line_of(z)
    cdef real[LF] c_bar
    if of.usual:
        for l in range(L):
            y[OUT_R * L + l] = sigmoid(z[R_BAR * L + l])
            y[OUT_U * L + l] = sigmoid(z[U_BAR * L + l])
            y[OUT_HC * L + l] = z[HC * L + l]
            y[OUT_C * L + l] = tanh(z[XC * L + l] + y[OUT_R * L + l] * z[HC * L + l])
            h[l] = y[OUT_U * L + l] * (h_prev[l] - y[OUT_C * L + l]) + y[OUT_C * L + l]
            y[OUT_H * L + l] = h[l]
    else:
        activate(&of.recurrent, z + R_BAR * L, y + OUT_R * L)
        activate(&of.recurrent, z + U_BAR * L, y + OUT_U * L)
        for l in range(L):
            c_bar[l] = z[XC * L + l] + y[OUT_R * L + l] * z[HC * L + l]
        activate(&of.activation, c_bar, y + OUT_C * L)
        for l in range(L):
            y[OUT_HC * L + l] = z[HC * L + l]
            h[l] = y[OUT_U * L + l] * (h_prev[l] - y[OUT_C * L + l]) + y[OUT_C * L + l]
            y[OUT_H * L + l] = h[l]


cdef inline called bars_grad(
    const ResetAfter *of, const real *restrict r, const real *restrict u, const real *restrict c,
    const real *restrict hc, const real *restrict h_prev, real *restrict d_h, real *restrict d
) noexcept nogil:
    """From what was saved to the gradients of the pre-activations; d_h becomes the part of d_h_prev that is not a
    product."""
    cdef Py_ssize_t l, L = line_of(d)
    cdef real d_c_bar, one = 1  # a literal 1 would make all of it double
    cdef real[LF] s_r, s_u, s_c
    if of.usual:
        for l in range(L):
            d_c_bar = d_h[l] * (one - u[l]) * (one - c[l] * c[l])
            d[D_U_BAR * L + l] = d_h[l] * (h_prev[l] - c[l]) * u[l] * (one - u[l])
            d[D_C_BAR * L + l] = d_c_bar
            d[D_R_BAR * L + l] = d_c_bar * hc[l] * r[l] * (one - r[l])
            d[D_HC * L + l] = d_c_bar * r[l]
            d_h[l] = d_h[l] * u[l]
    else:
        slope(&of.recurrent, r, s_r)
        slope(&of.recurrent, u, s_u)
        slope(&of.activation, c, s_c)
        for l in range(L):
            d_c_bar = d_h[l] * (one - u[l]) * s_c[l]
            d[D_U_BAR * L + l] = d_h[l] * (h_prev[l] - c[l]) * s_u[l]
            d[D_C_BAR * L + l] = d_c_bar
            d[D_R_BAR * L + l] = d_c_bar * hc[l] * s_r[l]
            d[D_HC * L + l] = d_c_bar * r[l]
            d_h[l] = d_h[l] * u[l]


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void reset_after_cells(
    const Forward *p, const ResetAfter *of, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *z, Py_ssize_t z_panel, real *rows, store **outputs
) noexcept nogil:
    """States and outputs of the step processed as number k, from z, whose panels are z_panel apart: lines j0 to j1,
    slots b0 to b1."""
    cdef Py_ssize_t L = line_of(z)
    cdef real[OUTS * LF] y
    cdef Py_ssize_t j, b, row, l, t = step_at(&p.steps, k)
    cdef const real *h_prev
    cdef real *h
    for j in range(j0, j1):
        for b in range(b0, b1):
            h_prev = h_before(p, rows, k) + b * p.Hs + j * L
            h = h_before(p, rows, k + 1) + b * p.Hs + j * L
            if marked(&p.steps, k, b, ENDED):
                for l in range(L):
                    h[l] = h_prev[l]
                clear(y, OUTS * L)
            else:
                new_state(of, z + (j - j0) * z_panel + (b - b0) * LINES * L, h_prev, h, y)
            row = row_in(&p.steps, b)
            store_output(p, outputs, OUT_R, j, t, row, y)
            store_output(p, outputs, OUT_U, j, t, row, y)
            store_output(p, outputs, OUT_C, j, t, row, y)
            store_output(p, outputs, OUT_HC, j, t, row, y)
            store_output(p, outputs, OUT_H, j, t, row, y)
            if store is half:  # the next step reads the state as it is stored
                round_to_half(h)
            if marked(&p.steps, k + 1, b, FRESH):
                clear(h, L)


# ------------------------------------------------------------------------------------------ backward: a step's cells
cdef inline void bars_grad_line(
    const Backward *p, const ResetAfter *of, const store **inputs, const store *h_prev, Py_ssize_t j, Py_ssize_t t,
    Py_ssize_t b, const real *carry, real *d_h, real *d
) noexcept nogil:
    """Line j of row (t, b) of the gradients of the pre-activations, to row d, from the carried gradient of h and
    the incoming one; d_h becomes the carried one.  `h_prev` is the state that the step started from, or NULL for
    zeros."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[OUTS * LF] room  # for lines that cannot be read where they are
    cdef real[4 * LF] bars
    cdef Py_ssize_t out, l, at = (t * p.B + b) * p.H + j * L, n = p.H - j * L
    load_line(d_h, inputs[H_GRAD] + place(&p.d_y_layout, t, b) + j * L, n)
    for l in range(L):
        d_h[l] = carry[l] + d_h[l]
    bars_grad(of, line_at(&room[OUT_R * L], inputs[OUT_R] + at, n), line_at(&room[OUT_U * L], inputs[OUT_U] + at, n),
              line_at(&room[OUT_C * L], inputs[OUT_C] + at, n), line_at(&room[OUT_HC * L], inputs[OUT_HC] + at, n),
              state_line(&room[OUT_H * L], h_prev, j, n), d_h, bars)
    for out in range(4):
        store_line(d + out * p.H + j * L, bars + out * L, n)
