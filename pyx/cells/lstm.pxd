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

A layer may have other activations than tanh and sigmoid.  With s the slope of one where its value is y, s(o) then
stands for o * (1 - o), and s(co) for 1 - co^2.

`cell_state`, `cell_output` and `cell_grad` are these equations for one line of units of one batch row.
"""
from cells.activations cimport SIGMOID, TANH, activate, plain, sigmoid, slope, tanh
from cells.types cimport Lstm
from passes.gradients cimport peephole_sum, state_line
from passes.operands cimport (
    CS_GRAD, CS_PREV, H_GRAD, OUT_CI, OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_I, OUT_O, OUTS, WCF, WCF_GRAD, WCI, WCI_GRAD,
    WCO, WCO_GRAD
)
from passes.outputs cimport store_h, store_output
from passes.steps cimport ENDED, FRESH, marked, place, row_in, step_at
from product.half cimport half
from product.panels cimport units_in
from product.quantized cimport UNQUANTIZED
from product.real cimport real
from product.tile cimport LF, LINES, called, clear, line_at, line_of, load_line, round_to_half, store, store_line
from schedule.plan cimport PEEPHOLES, Backward, Forward, h_before

cdef enum:  # the lines of z, the pre-activations, and of dicfo, their gradients
    I_BAR, CI_BAR, F_BAR, O_BAR
    GATES

cdef enum:  # the lines of the peepholes
    PEEP_I, PEEP_F, PEEP_O


cdef inline Lstm lstm_of(double forget_bias, double cell_clip, bint peephole, bint ifco) noexcept nogil:
    cdef Lstm c
    c.gates[0], c.gates[1], c.transposed, c.format = GATES, 0, False, UNQUANTIZED
    c.activation, c.recurrent, c.usual = plain(TANH), plain(SIGMOID), True
    c.forget_bias, c.cell_clip, c.peephole = forget_bias, cell_clip, peephole
    c.column[I_BAR], c.column[CI_BAR], c.column[F_BAR], c.column[O_BAR] = 0, 2 if ifco else 1, 1 if ifco else 2, 3
    c.coupled, c.P, c.proj_clip = False, 0, 0
    return c


cdef inline Lstm layer_of(
    double forget_bias, double cell_clip, bint peephole, bint ifco, Py_ssize_t P, bint coupled, double proj_clip
) noexcept nogil:
    """That of a layer, which may be projected or coupled."""
    cdef Lstm c = lstm_of(forget_bias, cell_clip, peephole, ifco)
    c.P, c.coupled, c.proj_clip = P, coupled, proj_clip
    if coupled:
        c.gates[0] = GATES - 1
        c.column[CI_BAR], c.column[F_BAR], c.column[O_BAR] = 0, 1, 2
    return c


# -------------------------------------------------------------------------------------- the equations, for one line
cdef inline called cell_state(
    const Lstm *c, const real *restrict z, const real *restrict peep, real *restrict cs_state, real *restrict y
) noexcept nogil:
    """From z to the new cs, and to i, f, ci, cs in y."""
    cdef Py_ssize_t l, L = line_of(y), ci_line = CI_BAR - c.coupled, f_line = F_BAR - c.coupled
    cdef real forget_bias = <real> c.forget_bias, clip = <real> c.cell_clip, one = 1
    cdef real[LF] i_bar, f_bar, s
    for l in range(L):
        i_bar[l] = z[I_BAR * L + l]  # a coupled one has none, and does not use what comes of it
        f_bar[l] = z[f_line * L + l] + forget_bias
    if c.peephole:
        for l in range(0 if c.coupled else L):
            i_bar[l] = i_bar[l] + cs_state[l] * peep[PEEP_I * L + l]
        for l in range(L):
            f_bar[l] = f_bar[l] + cs_state[l] * peep[PEEP_F * L + l]
    if c.usual:
        for l in range(L):
            y[OUT_I * L + l] = sigmoid(i_bar[l])
            y[OUT_F * L + l] = sigmoid(f_bar[l])
            y[OUT_CI * L + l] = tanh(z[ci_line * L + l])
    else:
        activate(&c.recurrent, i_bar, y + OUT_I * L)
        activate(&c.recurrent, f_bar, y + OUT_F * L)
        activate(&c.activation, z + ci_line * L, y + OUT_CI * L)
    if c.coupled:
        for l in range(L):
            y[OUT_I * L + l] = one - y[OUT_F * L + l]
    for l in range(L):
        s[l] = y[OUT_CI * L + l] * y[OUT_I * L + l] + y[OUT_F * L + l] * cs_state[l]
    if clip > 0:
        for l in range(L):
            s[l] = clip if s[l] > clip else s[l]
            s[l] = -clip if s[l] < -clip else s[l]
    for l in range(L):
        y[OUT_CS * L + l] = s[l]
        cs_state[l] = s[l]


cdef inline called cell_output(
    const Lstm *c, const real *restrict z, const real *restrict peep, const real *restrict cs_state,
    real *restrict h_state, real *restrict y
) noexcept nogil:
    """From z and the new cs to the new h, and to o, co, h in y."""
    cdef Py_ssize_t l, L = line_of(y), o_line = O_BAR - c.coupled
    cdef real[LF] o_bar
    for l in range(L):
        o_bar[l] = z[o_line * L + l]
    if c.peephole:
        for l in range(L):
            o_bar[l] = o_bar[l] + cs_state[l] * peep[PEEP_O * L + l]
    if c.usual:
        for l in range(L):
            y[OUT_O * L + l] = sigmoid(o_bar[l])
            y[OUT_CO * L + l] = tanh(cs_state[l])
            y[OUT_H * L + l] = y[OUT_O * L + l] * y[OUT_CO * L + l]
            h_state[l] = y[OUT_H * L + l]
    else:
        activate(&c.recurrent, o_bar, y + OUT_O * L)
        activate(&c.activation, cs_state, y + OUT_CO * L)
        for l in range(L):
            y[OUT_H * L + l] = y[OUT_O * L + l] * y[OUT_CO * L + l]
            h_state[l] = y[OUT_H * L + l]


cdef inline called cell_grad(
    const Lstm *c, const real *restrict i, const real *restrict f, const real *restrict o, const real *restrict ci,
    const real *restrict co, const real *restrict cs_prev, const real *restrict peep, const real *restrict h_grad,
    real *restrict cs_grad, real *restrict dicfo
) noexcept nogil:
    """From the saved y and the gradients of h and cs to dicfo; cs_grad becomes that of cs_prev.  The clip counts as the
    identity, as in TensorFlow."""
    cdef Py_ssize_t l, L = line_of(dicfo)
    cdef real one = 1  # a literal 1 would make it double
    cdef real[LF] d_cs, d_f, s_i, s_f, s_o, s_ci, s_co
    if c.usual:
        for l in range(L):
            dicfo[O_BAR * L + l] = h_grad[l] * co[l] * o[l] * (one - o[l])
            d_cs[l] = h_grad[l] * o[l] * (one - co[l] * co[l]) + cs_grad[l]
    else:
        slope(&c.recurrent, o, s_o)
        slope(&c.activation, co, s_co)
        for l in range(L):
            dicfo[O_BAR * L + l] = h_grad[l] * co[l] * s_o[l]
            d_cs[l] = h_grad[l] * o[l] * s_co[l] + cs_grad[l]
    if c.peephole:
        for l in range(L):
            d_cs[l] = d_cs[l] + dicfo[O_BAR * L + l] * peep[PEEP_O * L + l]
    for l in range(L):
        d_f[l] = d_cs[l] * (cs_prev[l] - ci[l] if c.coupled else cs_prev[l])
    if c.usual:
        for l in range(L):
            dicfo[I_BAR * L + l] = d_cs[l] * ci[l] * i[l] * (one - i[l])  # of a coupled one nothing that is used
            dicfo[CI_BAR * L + l] = d_cs[l] * i[l] * (one - ci[l] * ci[l])
            dicfo[F_BAR * L + l] = d_f[l] * f[l] * (one - f[l])
    else:
        slope(&c.recurrent, i, s_i)
        slope(&c.activation, ci, s_ci)
        slope(&c.recurrent, f, s_f)
        for l in range(L):
            dicfo[I_BAR * L + l] = d_cs[l] * ci[l] * s_i[l]
            dicfo[CI_BAR * L + l] = d_cs[l] * i[l] * s_ci[l]
            dicfo[F_BAR * L + l] = d_f[l] * s_f[l]
    for l in range(L):
        cs_grad[l] = d_cs[l] * f[l]
    if c.peephole:
        for l in range(0 if c.coupled else L):
            cs_grad[l] = cs_grad[l] + dicfo[I_BAR * L + l] * peep[PEEP_I * L + l]
        for l in range(L):
            cs_grad[l] = cs_grad[l] + dicfo[F_BAR * L + l] * peep[PEEP_F * L + l]


# ------------------------------------------------------------------------------------------- forward: a step's cells
cdef inline void lstm_cells(
    const Forward *p, const Lstm *c, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *z, Py_ssize_t z_panel, real *rows, store **outputs
) noexcept nogil:
    """States and outputs of the step processed as number k, from z, whose panels are z_panel apart: lines j0 to j1,
    slots b0 to b1.  All cs first, then all h: the CPU can begin the next cs while one is not finished.  Where h is to
    be projected, what is otherwise h is m."""
    cdef Py_ssize_t L = line_of(z)
    cdef real[OUTS * LF] y
    cdef Py_ssize_t j, b, row, l, t = step_at(&p.steps, k)
    cdef bint projected = c.P > 0
    cdef const real *h_prev = h_before(p, rows, k)
    cdef real *h_next = rows + p.m if projected else h_before(p, rows, k + 1)
    cdef const real *peep
    cdef real *cs
    cdef real *h
    for j in range(j0, j1):
        peep = <const real *> p.peep + PEEPHOLES * j * L
        for b in range(b0, b1):
            cs = rows + p.cs + b * p.Hs + j * L
            if marked(&p.steps, k, b, ENDED):
                clear(y, OUTS * L)
            else:
                cell_state(c, z + (j - j0) * z_panel + (b - b0) * LINES * L, peep, cs, y)
            row = row_in(&p.steps, b)
            store_output(p, outputs, OUT_I, j, t, row, y)
            store_output(p, outputs, OUT_CS, j, t, row, y)
            store_output(p, outputs, OUT_F, j, t, row, y)
            store_output(p, outputs, OUT_CI, j, t, row, y)
    for j in range(j0, j1):
        peep = <const real *> p.peep + PEEPHOLES * j * L
        for b in range(b0, b1):
            cs = rows + p.cs + b * p.Hs + j * L
            h = h_next + b * p.Hs + j * L
            if marked(&p.steps, k, b, ENDED):
                for l in range(0 if projected else L):
                    h[l] = h_prev[b * p.Hs + j * L + l]
                clear(y, OUTS * L)
            else:
                cell_output(c, z + (j - j0) * z_panel + (b - b0) * LINES * L, peep, cs, h, y)
            row = row_in(&p.steps, b)
            store_output(p, outputs, OUT_O, j, t, row, y)
            store_output(p, outputs, OUT_CO, j, t, row, y)
            if not projected:
                store_output(p, outputs, OUT_H, j, t, row, y)
            if store is half:  # the next step reads the states as they are stored
                round_to_half(cs)
                if not projected:
                    round_to_half(h)
            if marked(&p.steps, k + 1, b, FRESH):
                clear(cs, L)
                if not projected:
                    clear(h, L)


cdef inline void projected_cells(
    const Forward *p, const Lstm *c, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *z, Py_ssize_t z_panel, real *rows, store **outputs
) noexcept nogil:
    """h of the step processed as number k, and where it is the next step's state, from z = m @ w_p, whose panels are
    z_panel apart: panels j0 to j1, slots b0 to b1."""
    cdef Py_ssize_t L = line_of(z), units = p.w[1].units, j, b, s, at, l, t = step_at(&p.steps, k)
    cdef real clip = <real> c.proj_clip
    cdef real[LF] zero
    cdef real *h
    cdef const real *y
    cdef const real *value
    clear(zero, L)
    for j in range(j0, j1):
        for b in range(b0, b1):
            for s in range(units_in(&p.w[1], j)):
                at = (j * units + s) * L
                h = h_before(p, rows, k + 1) + b * p.Ps + at
                value = z + (j - j0) * z_panel + ((b - b0) * LINES + s) * L
                y = h
                if marked(&p.steps, k, b, ENDED):  # h stays
                    y = zero
                else:
                    for l in range(L):
                        h[l] = value[l]
                    if clip > 0:
                        for l in range(L):
                            h[l] = clip if h[l] > clip else h[l]
                            h[l] = -clip if h[l] < -clip else h[l]
                store_h(p, outputs, t, row_in(&p.steps, b), at, at + units * L, y)
                if store is half:
                    round_to_half(h)
                if marked(&p.steps, k + 1, b, FRESH):
                    clear(h, L)


cdef inline void load_peepholes(
    const Lstm *c, real *peep, const store **inputs, Py_ssize_t H, Py_ssize_t j
) noexcept nogil:
    """Load line j of all three, side by side, or of the two that a coupled one has."""
    cdef Py_ssize_t L = line_of(peep), at = j * L
    if not c.coupled:
        load_line(peep + (PEEPHOLES * j + PEEP_I) * L, inputs[WCI] + at, H - at)
    load_line(peep + (PEEPHOLES * j + PEEP_F) * L, inputs[WCF] + at, H - at)
    load_line(peep + (PEEPHOLES * j + PEEP_O) * L, inputs[WCO] + at, H - at)


# ------------------------------------------------------------------------------------------ backward: a step's cells
cdef inline void lstm_grad_line(
    const Backward *p, const Lstm *c, const store **inputs, const store *cs_prev, const real *peep, Py_ssize_t j,
    Py_ssize_t t, Py_ssize_t b, const real *carry, real *d_cs, real *d
) noexcept nogil:
    """Line j of row (t, b) of dicfo, to row d, from the carried gradients of h and cs and the incoming ones, or where
    h is projected from the gradient of m in `carry`.  d_cs becomes the gradient of `cs_prev`, the row that the step
    started from, or NULL for zeros.  Fetching the saved lines ahead gained nothing: memory is busy, not late."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[OUTS * LF] room  # for lines that cannot be read where they are; OUT_H is not needed otherwise
    cdef real[GATES * LF] dicfo
    cdef real[LF] d_h
    cdef const real *value
    cdef Py_ssize_t gate, l, at = (t * p.B + b) * p.H + j * L, n = p.H - j * L
    if c.P > 0:
        for l in range(L):
            d_h[l] = carry[l]
    else:
        value = line_at(&room[0], inputs[H_GRAD] + place(&p.d_y_layout, t, b) + j * L, n)
        for l in range(L):
            d_h[l] = carry[l] + value[l]
    if inputs[CS_GRAD] is not NULL:
        value = line_at(&room[0], inputs[CS_GRAD] + at, n)
        for l in range(L):
            d_cs[l] = d_cs[l] + value[l]
    value = state_line(&room[0], cs_prev, j, n)
    cell_grad(c, line_at(&room[OUT_I * L], inputs[OUT_I] + at, n), line_at(&room[OUT_F * L], inputs[OUT_F] + at, n),
              line_at(&room[OUT_O * L], inputs[OUT_O] + at, n), line_at(&room[OUT_CI * L], inputs[OUT_CI] + at, n),
              line_at(&room[OUT_CO * L], inputs[OUT_CO] + at, n), value, peep + PEEPHOLES * j * L, d_h, d_cs, dicfo)
    for gate in range(c.coupled, GATES):
        store_line(d + c.column[gate] * p.H + j * L, dicfo + gate * L, n)


cdef inline void projected_grad_line(
    const Backward *p, const Lstm *c, const store **inputs, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b,
    const real *carry, real *d
) noexcept nogil:
    """Line j of row (t, b) of d_h, to row d, from the carried gradient of h and the incoming one."""
    cdef Py_ssize_t L = line_of(d), l, n = p.P - j * L
    cdef real clip = <real> c.proj_clip
    cdef real[LF] room
    cdef real[LF] d_h
    cdef const real *value = line_at(&room[0], inputs[H_GRAD] + place(&p.d_y_layout, t, b) + j * L, n)
    for l in range(L):
        d_h[l] = carry[l] + value[l]
    if clip > 0:
        value = line_at(&room[0], inputs[OUT_H] + place(&p.h_layout, t, b) + j * L, n)
        for l in range(L):
            d_h[l] = 0 if value[l] >= clip or value[l] <= -clip else d_h[l]
    store_line(d + p.column[1] + j * L, d_h, n)


cdef inline void peephole_grads(
    const Backward *p, const Lstm *c, const store **inputs, store **outputs, const real *d, Py_ssize_t j
) noexcept nogil:
    """Line j of wci_grad and wcf_grad, sums of products with cs before a step, and of wco_grad, with cs after it."""
    cdef Py_ssize_t at = j * line_of(d), n = p.H - at
    cdef const store *cs_prev = inputs[CS_PREV] + at
    cdef const store *cs = inputs[OUT_CS] + at
    if not c.coupled:
        peephole_sum(outputs[WCI_GRAD] + at, d + c.column[I_BAR] * p.H + at, p.Ns, &p.steps, cs_prev, p.H, cs,
                     &p.cs_layout, n)
    peephole_sum(outputs[WCF_GRAD] + at, d + c.column[F_BAR] * p.H + at, p.Ns, &p.steps, cs_prev, p.H, cs,
                 &p.cs_layout, n)
    peephole_sum(outputs[WCO_GRAD] + at, d + c.column[O_BAR] * p.H + at, p.Ns, &p.steps, <store *> NULL, p.H, cs,
                 &p.cs_layout, n)
