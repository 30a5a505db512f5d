"""The LSTM's cell: its equations, its gradient, and where a step finds their operands.

One step, with terms in [ ] if there are peepholes:

    [i_bar, ci_bar, f_bar, o_bar] = [x, h_prev] @ w + b
    i  = sigmoid(i_bar [+ cs_prev * wci])          ci = tanh(ci_bar)
    f  = sigmoid(f_bar + forget_bias [+ cs_prev * wcf])
    cs = clip(ci * i + f * cs_prev)                co = tanh(cs)
    o  = sigmoid(o_bar [+ cs * wco])               h  = o * co

A layer may have two variants of it, also both at once: `coupled`, without i_bar and wci,

    i  = 1 - f

and projected, from m to fewer numbers or more,

    m  = o * co                                    h  = clip(m @ w_p)

Its gradient, from h_grad and cs_grad to dicfo = [d_i_bar, d_ci_bar, d_f_bar, d_o_bar]:

    d_o_bar = h_grad * co * o * (1 - o)
    d_cs    = h_grad * o * (1 - co^2) + cs_grad [+ d_o_bar * wco]
    d_i_bar = d_cs * ci * i * (1 - i)              d_ci_bar = d_cs * i * (1 - ci^2)
    d_f_bar = d_cs * cs_prev * f * (1 - f)
    cs_prev_grad = d_cs * f [+ d_i_bar * wci + d_f_bar * wcf]

Coupled, and projected, where m_grad takes h_grad's place above:

    d_f_bar = d_cs * (cs_prev - ci) * f * (1 - f)
    d_h     = h_grad where |h| < proj_clip, else 0     m_grad = d_h @ w_p.T

A layer may have other activations than tanh and sigmoid.  Then the slopes of these, as functions of o and co, say, take
the place of o * (1 - o) and 1 - co^2: `gate_grad` and `state_slope`.

`cell_state`, `cell_output` and `cell_grad` are these equations for one line of units of one batch row.  Their pointers
are lines of L numbers, which do not overlap:

    z                   a line for each pre-activation, one behind the other, in scratch memory or on the stack
    peep                the lines of wci, wcf and wco, one behind the other, in scratch memory or behind packed weights;
                        not read without peepholes
    cs_state, h_state   states in scratch memory; h_state is m, if that is projected
    y                   a line for each output of the step, by the numbers of indices.pxd, on the stack
    i, f, o, ci, co     saved outputs, the caller's, or padded copies on the stack; cs_prev, too
    h_grad              on the stack
    cs_grad             in scratch memory or on the stack
    dicfo               a line for the gradient of each pre-activation, one behind the other, on the stack
"""
from cells.activations cimport (
    activate_gate, activate_state, activations, any_activations, default_activations, gate_grad, state_slope
)
from cells.types cimport BackwardLines, Cell, CellTraits, ForwardCells, StepProduct, no_traits
from passes.gradients cimport add_line, compute_peephole_grad, state_line
from passes.indices cimport (
    CS_GRAD, CS_PREV, H_GRAD, OUT_CI, OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_I, OUT_O, STEP_OUTPUTS, WCF, WCI, WCO
)
from passes.outputs cimport hand_on_line, store_output_line
from passes.steps cimport RESET, has_flag, offset_of, previous_row, row_of_slot, step_at, store_reset_grad_line
from product.lines cimport (
    LF, Array, L, at, can_stay, clear, line_at, load_line, no_array, noinline_void, store_reals,
    store_row
)
from product.panels cimport unit_lines_in_panel
from product.real cimport real
from product.tile cimport LINES
from schedule.plan cimport CS, D, D_CS, D_H, M, PEEPHOLES, Backward, Forward, h_before
from schedule.team cimport part_start

cdef enum:  # the lines of z, the pre-activations, and of dicfo, their gradients
    I_BAR, CI_BAR, F_BAR, O_BAR
    GATES

cdef enum:  # the lines of the peepholes
    PEEP_I, PEEP_F, PEEP_O
    PEEP_LINES


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline noinline_void cell_state(
    const activations *cell, const real *restrict z, const real *restrict peep, real *restrict cs_state,
    real *restrict y
) noexcept nogil:
    """Compute cs, and i, f, ci, cs in y, from z.

    cs_state : cs_prev, which becomes cs
    """
    cdef const Cell *lstm = <const Cell *> cell
    cdef Py_ssize_t l, ci_line = CI_BAR - lstm.coupled, f_line = F_BAR - lstm.coupled
    cdef real forget_bias = <real> lstm.forget_bias, clip = <real> lstm.cell_clip, one = 1
    cdef real[LF] i_bar, f_bar, cs
    for l in range(L):
        i_bar[l] = z[I_BAR * L + l]  # coupled: z has no i_bar, and what comes of this is overwritten
        f_bar[l] = z[f_line * L + l] + forget_bias
    if lstm.peephole:
        for l in range(0 if lstm.coupled else L):
            i_bar[l] = i_bar[l] + cs_state[l] * peep[PEEP_I * L + l]
        for l in range(L):
            f_bar[l] = f_bar[l] + cs_state[l] * peep[PEEP_F * L + l]
    activate_gate(cell, i_bar, y + OUT_I * L)
    activate_gate(cell, f_bar, y + OUT_F * L)
    activate_state(cell, z + ci_line * L, y + OUT_CI * L)
    if lstm.coupled:
        for l in range(L):
            y[OUT_I * L + l] = one - y[OUT_F * L + l]
    for l in range(L):
        cs[l] = y[OUT_CI * L + l] * y[OUT_I * L + l] + y[OUT_F * L + l] * cs_state[l]
    if clip > 0:
        for l in range(L):
            cs[l] = clip if cs[l] > clip else cs[l]
            cs[l] = -clip if cs[l] < -clip else cs[l]
    for l in range(L):
        y[OUT_CS * L + l] = cs[l]
        cs_state[l] = cs[l]


cdef inline noinline_void cell_output(
    const activations *cell, const real *restrict z, const real *restrict peep, const real *restrict cs_state,
    real *restrict h_state, real *restrict y
) noexcept nogil:
    """Compute h, and o, co, h in y, from z and the new cs.

    cs_state : cs, read only
    h_state : written
    """
    cdef const Cell *lstm = <const Cell *> cell
    cdef Py_ssize_t l, o_line = O_BAR - lstm.coupled
    cdef real[LF] o_bar
    for l in range(L):
        o_bar[l] = z[o_line * L + l]
    if lstm.peephole:
        for l in range(L):
            o_bar[l] = o_bar[l] + cs_state[l] * peep[PEEP_O * L + l]
    activate_gate(cell, o_bar, y + OUT_O * L)
    activate_state(cell, cs_state, y + OUT_CO * L)
    for l in range(L):
        y[OUT_H * L + l] = y[OUT_O * L + l] * y[OUT_CO * L + l]
        h_state[l] = y[OUT_H * L + l]


cdef inline noinline_void cell_grad(
    const activations *cell, const real *restrict i, const real *restrict f, const real *restrict o,
    const real *restrict ci, const real *restrict co, const real *restrict cs_prev, const real *restrict peep,
    const real *restrict h_grad, real *restrict cs_grad, real *restrict dicfo
) noexcept nogil:
    """Compute dicfo from the saved outputs and the gradients of h and cs.  The clip counts as the identity, as in
    TensorFlow.

    cs_grad : the gradient of cs, which becomes that of cs_prev
    """
    cdef const Cell *lstm = <const Cell *> cell
    cdef Py_ssize_t l
    cdef real[LF] d_cs, s_ci, s_co
    state_slope(cell, co, s_co)
    state_slope(cell, ci, s_ci)
    for l in range(L):
        dicfo[O_BAR * L + l] = h_grad[l] * co[l]
        d_cs[l] = h_grad[l] * o[l] * s_co[l] + cs_grad[l]
    gate_grad(cell, o, dicfo + O_BAR * L)
    if lstm.peephole:
        for l in range(L):
            d_cs[l] = d_cs[l] + dicfo[O_BAR * L + l] * peep[PEEP_O * L + l]
    for l in range(L):
        dicfo[I_BAR * L + l] = d_cs[l] * ci[l]  # coupled: not used
        dicfo[CI_BAR * L + l] = d_cs[l] * i[l] * s_ci[l]
        dicfo[F_BAR * L + l] = d_cs[l] * (cs_prev[l] - ci[l] if lstm.coupled else cs_prev[l])
    gate_grad(cell, i, dicfo + I_BAR * L)
    gate_grad(cell, f, dicfo + F_BAR * L)
    for l in range(L):
        cs_grad[l] = d_cs[l] * f[l]
    if lstm.peephole:
        for l in range(0 if lstm.coupled else L):
            cs_grad[l] = cs_grad[l] + dicfo[I_BAR * L + l] * peep[PEEP_I * L + l]
        for l in range(L):
            cs_grad[l] = cs_grad[l] + dicfo[F_BAR * L + l] * peep[PEEP_F * L + l]


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void lstm_cells(
    const activations *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute cs and h, or m in place of h where that is projected, from z; a panel has the gates of one line.

    All cs come first, then all h, so that the CPU can begin the next cs while one is not finished."""
    cdef const Forward *p = <const Forward *> call
    cdef const Cell *lstm = &p.c
    cdef real[STEP_OUTPUTS * LF] y
    cdef Py_ssize_t j, b, row, unit, k = step.k, t = step_at(&p.steps, k)
    cdef real *h_next = step.rows + p.start[M] if lstm.projects else h_before(p, step.rows, k + 1)
    cdef real *cs_rows = step.rows + p.start[CS]
    cdef const real *peep
    cdef real *cs
    cdef real *h
    for j in range(j0, j1):
        peep, unit = p.peep + PEEP_LINES * j * L, j * L
        for b in range(b0, b1):
            cs = cs_rows + b * p.Hs + unit
            cell_state(<const activations *> lstm, z + (j - j0) * step.z_panel + (b - b0) * LINES * L, peep, cs, y)
            row = row_of_slot(&p.steps, b)
            store_output_line(p, OUT_I, t, row, unit, unit + L, y + OUT_I * L)
            store_output_line(p, OUT_CS, t, row, unit, unit + L, y + OUT_CS * L)
            store_output_line(p, OUT_F, t, row, unit, unit + L, y + OUT_F * L)
            store_output_line(p, OUT_CI, t, row, unit, unit + L, y + OUT_CI * L)
    for j in range(j0, j1):
        peep, unit = p.peep + PEEP_LINES * j * L, j * L
        for b in range(b0, b1):
            cs, h = cs_rows + b * p.Hs + unit, h_next + b * p.Hs + unit
            cell_output(<const activations *> lstm, z + (j - j0) * step.z_panel + (b - b0) * LINES * L, peep, cs, h, y)
            row = row_of_slot(&p.steps, b)
            store_output_line(p, OUT_O, t, row, unit, unit + L, y + OUT_O * L)
            store_output_line(p, OUT_CO, t, row, unit, unit + L, y + OUT_CO * L)
            hand_on_line(p, &p.steps.cs_reset, k, b, cs, unit, p.H)
            if not lstm.projects:
                store_output_line(p, OUT_H, t, row, unit, unit + L, y + OUT_H * L)
                hand_on_line(p, &p.steps.h_reset, k, b, h, unit, p.H)


cdef inline void projected_cells(
    const void *call, const StepProduct *step, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t b0, Py_ssize_t b1,
    const real *z
) noexcept nogil:
    """Compute h from z = m @ w_p."""
    cdef const Forward *p = <const Forward *> call
    cdef Py_ssize_t units = p.w[1].unit_lines, k = step.k, t = step_at(&p.steps, k)
    cdef Py_ssize_t j, b, unit_line, unit, l
    cdef real clip = <real> p.c.proj_clip
    cdef real *h
    cdef const real *value
    for j in range(j0, j1):
        for b in range(b0, b1):
            for unit_line in range(unit_lines_in_panel(&p.w[1], j)):
                unit = (j * units + unit_line) * L
                h = h_before(p, step.rows, k + 1) + b * p.Ps + unit
                value = z + (j - j0) * step.z_panel + ((b - b0) * LINES + unit_line) * L
                for l in range(L):
                    h[l] = value[l]
                if clip > 0:
                    for l in range(L):
                        h[l] = clip if h[l] > clip else h[l]
                        h[l] = -clip if h[l] < -clip else h[l]
                store_output_line(p, OUT_H, t, row_of_slot(&p.steps, b), unit, unit + units * L, h)
                hand_on_line(p, &p.steps.h_reset, k, b, h, unit, p.P)


cdef inline void load_peepholes(
    const Cell *lstm, real *peep, const Array *inputs, Py_ssize_t H, Py_ssize_t j
) noexcept nogil:
    """Load line j of the three peepholes, or of a coupled LSTM's two.

    peep : [J, 3, L] in scratch memory
    inputs : wci, wcf, wco [H], the caller's
    """
    cdef Py_ssize_t unit = j * L
    if not lstm.coupled:
        load_line(peep + (PEEP_LINES * j + PEEP_I) * L, at(inputs[WCI], unit), H - unit)
    load_line(peep + (PEEP_LINES * j + PEEP_F) * L, at(inputs[WCF], unit), H - unit)
    load_line(peep + (PEEP_LINES * j + PEEP_O) * L, at(inputs[WCO], unit), H - unit)


# ------------------------------------------------------------------------------------------- backward: a step's lines
cdef inline void lstm_grad_line(
    const activations *call, Array cs_prev, const real *peep, Py_ssize_t j, Py_ssize_t t, Py_ssize_t row,
    const real *d_h, real *d_cs, real *d_row
) noexcept nogil:
    """Compute line j of row (t, row) of dicfo, in d_row.  Prefetching the saved lines gained nothing.

    cs_prev : the row of cs that the step started from, the caller's, or no array for zeros
    d_h : the line of the gradient of h that the steps after this one give; of a projected LSTM that of m
    d_cs : the line of the gradient of cs, which becomes that of cs_prev
    d_row : the row of dicfo
    """
    cdef const Backward *p = <const Backward *> call
    cdef const Cell *lstm = &p.c
    cdef const Array *inputs = p.inputs
    cdef Py_ssize_t l, gate, width = p.H - j * L
    cdef bint in_place = can_stay(width, lstm.is_half)
    cdef Py_ssize_t saved_line = (t * p.B + row) * p.H + j * L  # where line j begins in a saved output
    cdef real[STEP_OUTPUTS * LF] saved  # for lines of saved outputs that cannot be read where they are
    cdef real[LF] cs_grad_space, cs_prev_space  # for cs_grad and cs_prev, where these cannot be
    cdef real[GATES * LF] dicfo
    cdef real[LF] h_grad
    cdef const real *cs_grad
    if not lstm.projects:
        add_line(in_place, &h_grad[0], d_h, inputs[H_GRAD], offset_of(&p.d_y_layout, t, row) + j * L, width)
        d_h = h_grad
    if inputs[CS_GRAD].data is not NULL:
        cs_grad = line_at(in_place, &cs_grad_space[0], inputs[CS_GRAD], saved_line, width)
        for l in range(L):
            d_cs[l] = d_cs[l] + cs_grad[l]
    cell_grad(<const activations *> lstm, line_at(in_place, &saved[OUT_I * L], inputs[OUT_I], saved_line, width),
              line_at(in_place, &saved[OUT_F * L], inputs[OUT_F], saved_line, width),
              line_at(in_place, &saved[OUT_O * L], inputs[OUT_O], saved_line, width),
              line_at(in_place, &saved[OUT_CI * L], inputs[OUT_CI], saved_line, width),
              line_at(in_place, &saved[OUT_CO * L], inputs[OUT_CO], saved_line, width),
              state_line(in_place, &cs_prev_space[0], cs_prev, j, width), peep + PEEP_LINES * j * L, d_h, d_cs, dicfo)
    for gate in range(lstm.coupled, GATES):
        store_reals(d_row + lstm.column[gate] * p.H + j * L, dicfo + gate * L, width)


cdef inline void projected_grad_line(
    const Backward *p, Py_ssize_t j, Py_ssize_t t, Py_ssize_t row, const real *carry, real *d_h_row
) noexcept nogil:
    """Compute line j of row (t, row) of d_h, the gradient of the projection before its clip.

    carry : the line of the gradient of h that the steps after this one give
    d_h_row : the row, written
    """
    cdef Py_ssize_t l, width = p.P - j * L
    cdef bint in_place = can_stay(width, p.c.is_half)
    cdef real clip = <real> p.c.proj_clip
    cdef real[LF] h_space  # for a line that cannot be read where it is
    cdef real[LF] total
    cdef const real *h
    add_line(in_place, &total[0], carry, p.inputs[H_GRAD], offset_of(&p.d_y_layout, t, row) + j * L, width)
    if clip > 0:
        h = line_at(in_place, &h_space[0], p.inputs[OUT_H], offset_of(&p.h_layout, t, row) + j * L, width)
        for l in range(L):
            total[l] = 0 if h[l] >= clip or h[l] <= -clip else total[l]
    store_reals(d_h_row + j * L, total, width)


cdef inline noinline_void backward_lines(
    const activations *call, int n, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *product
) noexcept nogil:
    """Compute dicfo, and turn d_cs into the gradient of cs_prev (types.pxd has the arguments).

    n = 0 : dicfo from the gradient of h; or of a projected LSTM d_h
    n = 1 : of a projected LSTM, dicfo from d_h @ w_p.T, the gradient of m

    What D_H carries becomes zero: the gradient of the h before is a product alone.
    """
    cdef const Backward *p = <const Backward *> call
    cdef Py_ssize_t t = step_at(&p.steps, k), row = row_of_slot(&p.steps, b), j
    cdef real *d_row = p.scratch + p.start[D] + (t * p.B + b) * p.Ns
    cdef real *d_cs = p.scratch + p.start[D_CS] + b * p.Hs
    cdef const real *peep = p.scratch + p.start[PEEPHOLES]
    cdef Array cs_prev = previous_row(&p.steps, p.inputs[CS_PREV], &p.steps.cs_reset, p.H, p.inputs[OUT_CS],
                                      &p.cs_layout, t, row)
    for j in range(j0, j1):
        if n == 0:
            clear(p.scratch + p.start[D_H] + b * p.Ps + j * L, L)
        if n == 0 and p.c.projects:
            projected_grad_line(p, j, t, row, product + (j - j0) * L, d_row + p.column[1])
            continue
        lstm_grad_line(call, cs_prev, peep, j, t, row, product + (j - j0) * L, d_cs + j * L, d_row)
        if has_flag(&p.steps, k, b, RESET):  # the step before did not lead here
            store_reset_grad_line(&p.steps, &p.steps.cs_reset, k, b, d_cs + j * L, j * L, p.H)


cdef inline void store_peephole_grads(
    const Backward *p, const real *d, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Store one part of the lines of wci_grad and wcf_grad, sums of products of d with cs before a step, and of
    wco_grad, with cs after it; nothing without peepholes.

    d : dicfo of all steps and slots
    """
    cdef const Cell *lstm = &p.c
    cdef Py_ssize_t j
    cdef Array cs_prev = p.inputs[CS_PREV]
    cdef Array cs = p.inputs[OUT_CS]
    for j in range(part_start(p.J, part, parts), part_start(p.J, part + 1, parts) if lstm.peephole else 0):
        if not lstm.coupled:
            compute_peephole_grad(p.grads[WCI], d + lstm.column[I_BAR] * p.H, p.Ns, &p.steps, cs_prev, p.H, cs, j * L)
        compute_peephole_grad(p.grads[WCF], d + lstm.column[F_BAR] * p.H, p.Ns, &p.steps, cs_prev, p.H, cs, j * L)
        compute_peephole_grad(p.grads[WCO], d + lstm.column[O_BAR] * p.H, p.Ns, &p.steps, no_array(), p.H, cs, j * L)


cdef inline void store_remaining_grads(const void *call, Py_ssize_t part, Py_ssize_t parts) noexcept nogil:
    """Store one part of cs_prev_grad and of the peepholes' gradients."""
    cdef const Backward *p = <const Backward *> call
    cdef Py_ssize_t b
    for b in range(part_start(p.B, part, parts), part_start(p.B, part + 1, parts)):
        store_row(at(p.grads[CS_PREV], row_of_slot(&p.steps, b) * p.H), p.scratch + p.start[D_CS] + b * p.Hs, p.H)
    store_peephole_grads(p, p.scratch + p.start[D], part, parts)


cdef inline CellTraits lstm_traits() noexcept nogil:
    """Return the traits of the LSTM."""
    cdef CellTraits traits = no_traits()
    traits.products, traits.matrices, traits.state_matrices, traits.gates = 1, 1, 1, [GATES, 0]
    traits.states, traits.peepholes, traits.saved, traits.factor = 2, PEEP_LINES, 6, OUT_CO
    traits.forward_time, traits.backward_time = 30, 50
    traits.forward_cells = [<ForwardCells> lstm_cells[any_activations], projected_cells]
    traits.default_forward_cells = [<ForwardCells> lstm_cells[default_activations], projected_cells]
    traits.backward_lines = <BackwardLines> backward_lines[any_activations]
    traits.default_backward_lines = <BackwardLines> backward_lines[default_activations]
    traits.load_peepholes, traits.store_remaining_grads = load_peepholes, store_remaining_grads
    return traits
