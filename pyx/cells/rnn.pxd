"""The plain RNN's cell: its equations, its gradient, and where a step finds their operands.

One step, and its gradient, from d_h.  s is the slope of the activation as a function of its value h, and w = [w_x; w_h]
has its rows for x above those for h:

    h = activation([x, h_prev] @ w + b)
    d_h_bar = d_h * s(h)                           d_h_prev = d_h_bar @ w_h.T

`activate` and `slope` (activations.pxd) are these equations for one line of units of one batch row.  A step has one
product, so n of `backward_lines` (types.pxd) is always 0.
"""
from cells.activations cimport activate, slope
from cells.types cimport CellTraits, StepProduct, no_traits
from passes.gradients cimport add_line
from passes.indices cimport H_GRAD, OUT_H
from passes.outputs cimport hand_on_line, store_output_line
from passes.steps cimport offset_of, row_of_slot, step_at
from product.lines cimport LF, L, can_stay, clear, line_at, noinline_void, store_reals
from product.panels cimport unit_lines_in_panel
from product.real cimport real
from product.tile cimport LINES
from schedule.plan cimport D, D_H, Backward, Forward, h_before


cdef inline void forward_cells(
    const void *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute h, which is the new state."""
    cdef const Forward *p = <const Forward *> call
    cdef Py_ssize_t units = p.w[0].unit_lines, k = step.k, t = step_at(&p.steps, k)
    cdef Py_ssize_t j, b, unit_line, unit
    cdef real *h
    for j in range(j0, j1):
        for b in range(b0, b1):
            for unit_line in range(unit_lines_in_panel(&p.w[0], j)):
                unit = (j * units + unit_line) * L
                h = h_before(p, step.rows, k + 1) + b * p.Hs + unit
                activate(&p.c.activation, z + (j - j0) * step.z_panel + ((b - b0) * LINES + unit_line) * L, h)
                store_output_line(p, OUT_H, t, row_of_slot(&p.steps, b), unit, unit + units * L, h)
                hand_on_line(p, &p.steps.h_reset, k, b, h, unit, p.H)


cdef inline noinline_void backward_lines(
    const void *call, int n, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *product
) noexcept nogil:
    """Compute d_h_bar.  The gradient of h that is carried becomes zero, as all of d_h_prev is a product."""
    cdef const Backward *p = <const Backward *> call
    cdef Py_ssize_t t = step_at(&p.steps, k), row = row_of_slot(&p.steps, b), j, l, width
    cdef bint in_place
    cdef real[LF] h_space  # for a line that cannot be read where it is
    cdef real[LF] d_h
    cdef real[LF] s
    cdef const real *h
    for j in range(j0, j1):
        width = p.H - j * L
        in_place = can_stay(width, p.c.is_half)
        add_line(in_place, &d_h[0], product + (j - j0) * L, p.inputs[H_GRAD], offset_of(&p.d_y_layout, t, row) + j * L,
                 width)
        h = line_at(in_place, &h_space[0], p.inputs[OUT_H], offset_of(&p.h_layout, t, row) + j * L, width)
        slope(&p.c.activation, h, s)
        for l in range(L):
            d_h[l] = d_h[l] * s[l]
        store_reals(p.scratch + p.start[D] + (t * p.B + b) * p.Ns + j * L, d_h, width)
        clear(p.scratch + p.start[D_H] + b * p.Ps + j * L, L)


cdef inline CellTraits rnn_traits() noexcept nogil:
    """Return the traits of the plain RNN."""
    cdef CellTraits traits = no_traits()
    traits.products, traits.matrices, traits.state_matrices, traits.gates = 1, 1, 1, [1, 0]
    traits.states, traits.forward_time, traits.backward_time = 1, 9, 20
    traits.forward_cells = [forward_cells, NULL]
    traits.default_forward_cells = [forward_cells, NULL]
    traits.backward_lines = backward_lines
    traits.default_backward_lines = backward_lines
    return traits
