"""The plain RNN's cell: its equations, its gradient, and where a step finds their operands.

One step, and its gradient, from d_h, with s the slope of the activation where its value is h:

    h = activation([x, h_prev] @ w + b)
    d_h_bar = d_h * s(h)                           d_h_prev = d_h_bar @ w.T, of the rows of w for h

`activate` and `slope` (activations.pxd) are these equations for one line of units of one batch row.
"""
from cells.activations cimport TANH, activate, plain, slope
from cells.types cimport Rnn
from passes.operands cimport H_GRAD, OUT_H
from passes.outputs cimport store_h
from passes.steps cimport ENDED, FRESH, marked, place, row_in, step_at
from product.half cimport half
from product.panels cimport units_in
from product.quantized cimport UNQUANTIZED
from product.real cimport real
from product.tile cimport LF, LINES, clear, line_at, line_of, round_to_half, store, store_line
from schedule.plan cimport Backward, Forward, h_before


cdef inline Rnn rnn_of() noexcept nogil:
    cdef Rnn c
    c.gates[0], c.gates[1], c.transposed, c.format = 1, 0, False, UNQUANTIZED
    c.activation = plain(TANH)
    return c


cdef inline void rnn_cells(
    const Forward *p, const Rnn *c, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *z,
    real *rows, store **outputs
) noexcept nogil:
    """h and the new state of the step processed as number k, from z: panel j, slots b0 to b1."""
    cdef Py_ssize_t L = line_of(z), units = p.w[0].units
    cdef real[LF] zero
    cdef Py_ssize_t b, s, l, at, t = step_at(&p.steps, k)
    cdef const real *h_prev
    cdef const real *y
    cdef real *h
    clear(zero, L)
    for b in range(b0, b1):
        for s in range(units_in(&p.w[0], j)):
            at = (j * units + s) * L
            h = h_before(p, rows, k + 1) + b * p.Hs + at
            y = h
            if marked(&p.steps, k, b, ENDED):
                h_prev = h_before(p, rows, k) + b * p.Hs + at
                for l in range(L):
                    h[l] = h_prev[l]
                y = zero
            else:
                activate(&c.activation, z + ((b - b0) * LINES + s) * L, h)
            store_h(p, outputs, t, row_in(&p.steps, b), at, at + units * L, y)
            if store is half:  # the next step reads the state as it is stored
                round_to_half(h)
            if marked(&p.steps, k + 1, b, FRESH):
                clear(h, L)


cdef inline void rnn_grad_line(
    const Backward *p, const Rnn *c, const store **inputs, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b,
    const real *carry, real *d
) noexcept nogil:
    """Line j of row (t, b) of d_h_bar, to row d, from the carried gradient of h and the incoming one."""
    cdef Py_ssize_t L = line_of(d), l, n = p.H - j * L
    cdef real[LF] room  # for a line that cannot be read where it is
    cdef real[LF] d_h
    cdef real[LF] s
    cdef const real *value = line_at(&room[0], inputs[H_GRAD] + place(&p.d_y_layout, t, b) + j * L, n)
    for l in range(L):
        d_h[l] = carry[l] + value[l]
    value = line_at(&room[0], inputs[OUT_H] + place(&p.h_layout, t, b) + j * L, n)
    slope(&c.activation, value, s)
    for l in range(L):
        d_h[l] = d_h[l] * s[l]
    store_line(d + j * L, d_h, n)
