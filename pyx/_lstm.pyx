"""LSTM block cell and sequence, forward and backward.

One step, with z = [x, h_prev] @ w + b cut into lines of units, gates in the order i, ci, f, o:

    i  = sigmoid(z_i [+ cs_prev * wci])            ci = tanh(z_ci)
    f  = sigmoid(z_f + forget_bias [+ cs_prev * wcf])
    cs = clip(ci * i + f * cs_prev)                co = tanh(cs)
    o  = sigmoid(z_o [+ cs * wco])                 h  = o * co

`cell_state` and `cell_output` compute that for one line of one row on the tile's accumulators, and `cell_grad` its
gradient; all the rest brings them their operands.  A sequence splits its work over batch rows where there are enough of
them (threads never meet), else over hidden units (threads meet once a step).
"""
from cpython.pycapsule cimport PyCapsule_New
from cython.parallel cimport parallel, threadid

from activations cimport sigmoid, tanh
from gradients cimport (
    PLAIN, backward_threads, input_grad, input_grads, load_state, pack_transposed, peephole_sum, plain_panels,
    weight_grad, weight_grad_work
)
from half cimport half
from panels cimport (
    APART, Panels, add_bias, add_input_product, add_product, add_product_once, add_row_product, at_once, chunk_of,
    forward_threads, pack_bias, pack_panels, packs_whole, panels_of, splits_rows, stride_of
)
from real cimport real
from source cimport BLOCKCELL_SOURCE
from steps cimport ENDED, FRESH, Steps, input_row, load_steps, marked, step_at, steps_of
from team cimport Team, barrier, gather, join, lost, share, team_size
from tile cimport (
    LF, LINES, ROWS, TILE, TILES, aligned, clear, for_writing, line_of, load_line, load_row, product,
    round_to_half, row_group, store, store_line, store_row
)

SOURCE = BLOCKCELL_SOURCE.decode()


cdef struct Cell:
    double forget_bias, cell_clip
    bint peephole
    Py_ssize_t[4] column  # where the gates i, ci, f, o begin in a row of w, in units of H


cdef Cell cell_of(double forget_bias, double cell_clip, bint peephole, bint ifco) noexcept nogil:
    cdef Cell c
    c.forget_bias, c.cell_clip, c.peephole = forget_bias, cell_clip, peephole
    c.column[0], c.column[1], c.column[2], c.column[3] = 0, 2 if ifco else 1, 1 if ifco else 2, 3
    return c


# ------------------------------------------------------------------------------------------------- one line of one row
cdef void cell_state(
    const Cell *c, const real *restrict z, const real *restrict peep, real *restrict cs_state, real *restrict y
) noexcept nogil:
    """z, in its four lines i, ci, f, o, to the line's new cs, and to four of its outputs y, which are i, cs, f, o, ci,
    co, h."""
    cdef Py_ssize_t l, L = line_of(y)
    cdef real forget_bias = <real> c.forget_bias, clip = <real> c.cell_clip
    cdef real[LF] zi, zf, s
    for l in range(L):
        zi[l] = z[l]
        zf[l] = z[2 * L + l] + forget_bias
    if c.peephole:
        for l in range(L):
            zi[l] = zi[l] + cs_state[l] * peep[l]
            zf[l] = zf[l] + cs_state[l] * peep[L + l]
    for l in range(L):
        y[l] = sigmoid(zi[l])
        y[2 * L + l] = sigmoid(zf[l])
        y[4 * L + l] = tanh(z[L + l])
        s[l] = y[4 * L + l] * y[l] + y[2 * L + l] * cs_state[l]
    if clip > 0:
        for l in range(L):
            s[l] = clip if s[l] > clip else s[l]
            s[l] = -clip if s[l] < -clip else s[l]
    for l in range(L):
        y[L + l] = s[l]
        cs_state[l] = s[l]


cdef void cell_output(
    const Cell *c, const real *restrict z, const real *restrict peep, const real *restrict cs_state,
    real *restrict h_state, real *restrict y
) noexcept nogil:
    """z and the line's new cs to its new h, and to o, co, h of its outputs y."""
    cdef Py_ssize_t l, L = line_of(y)
    cdef real[LF] zo
    for l in range(L):
        zo[l] = z[3 * L + l]
    if c.peephole:
        for l in range(L):
            zo[l] = zo[l] + cs_state[l] * peep[2 * L + l]
    for l in range(L):
        y[3 * L + l] = sigmoid(zo[l])
        y[5 * L + l] = tanh(cs_state[l])
        y[6 * L + l] = y[3 * L + l] * y[5 * L + l]
        h_state[l] = y[6 * L + l]


cdef void cell_grad(
    const Cell *c, const real *restrict y, const real *restrict cs_prev, const real *restrict peep,
    const real *restrict h_grad, real *restrict cs_grad, real *restrict d
) noexcept nogil:
    """From y (i, cs, f, o, ci, co) and the gradients of h and cs to d, those of the pre-activations i, ci, f, o;
    cs_grad becomes that of cs_prev.  The clip counts as the identity, as in TF."""
    cdef Py_ssize_t l, L = line_of(d)
    cdef real i, f, o, ci, co, one = 1  # a literal 1 would make them double
    cdef real[LF] d_cs
    for l in range(L):
        o, co = y[3 * L + l], y[5 * L + l]
        d[3 * L + l] = h_grad[l] * co * o * (one - o)
        d_cs[l] = h_grad[l] * o * (one - co * co) + cs_grad[l]
    if c.peephole:
        for l in range(L):
            d_cs[l] = d_cs[l] + d[3 * L + l] * peep[2 * L + l]
    for l in range(L):
        i, f, ci = y[l], y[2 * L + l], y[4 * L + l]
        d[l] = d_cs[l] * ci * i * (one - i)
        d[L + l] = d_cs[l] * i * (one - ci * ci)
        d[2 * L + l] = d_cs[l] * cs_prev[l] * f * (one - f)
        cs_grad[l] = d_cs[l] * f
    if c.peephole:
        for l in range(L):
            cs_grad[l] = cs_grad[l] + d[l] * peep[l] + d[2 * L + l] * peep[L + l]


# ------------------------------------------------------------------------------------------------------------- forward
cdef struct Forward:
    Steps steps  # those that are run
    Py_ssize_t B, I, H
    Py_ssize_t L, J  # units in a line, lines of units
    Py_ssize_t Is, Hs  # strides of rows of x and h in scratch
    Py_ssize_t ld  # stride of rows of the output h
    Py_ssize_t chunk  # steps whose x product is computed at once; 1: it is part of the step
    Py_ssize_t threads
    bint whole  # all panels are there before the steps, else a single one packs what it uses
    bint by_rows  # threads split the batch, not the hidden units
    Py_ssize_t apart  # reals by which a thread's rows in scratch are further on than the last one's
    Panels w
    void *peep  # the three peepholes of each line, behind the panels
    Py_ssize_t h, other, cs, x, z, total  # where things begin in scratch, in reals: h, every other step's h; its size


cdef Py_ssize_t packed_size(const Panels *w) noexcept nogil:
    """Reals of the panels and of the peepholes behind them."""
    return w.size * w.count + 3 * w.J * w.L


cdef Forward forward_of(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed, int threads
) noexcept nogil:
    """`packed`: the panels are there already, else they are part of the scratch."""
    cdef Forward p
    cdef Py_ssize_t gaps
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.ld = B, I, H, H
    p.L = 64 // itemsize
    p.whole = packed or packs_whole(T, B, I, H, 4, itemsize, threads)
    p.w = panels_of(p.whole, I, H, p.L, 4)
    p.J = p.w.J
    p.Is, p.Hs = stride_of(I, p.L), stride_of(H, p.L)
    p.by_rows = p.whole and splits_rows(B, H, 4, itemsize, threads)
    p.threads = forward_threads(T, B, I, H, 4, p.J, p.by_rows, p.whole, threads)
    p.chunk = chunk_of(T, B, p.by_rows, p.threads)
    p.apart = APART * p.L if p.by_rows else 0
    gaps = (p.threads - 1) * p.apart
    p.h = 0 if packed else packed_size(&p.w)
    p.other = p.h + B * p.Hs + gaps
    p.cs = p.other + B * p.Hs + gaps
    p.x = p.cs + B * p.Hs + gaps
    p.z = p.x + p.chunk * B * p.Is + gaps
    p.total = p.z + (p.chunk * B * p.J * LINES * p.L if p.chunk > 1 or not p.whole else 0) + gaps
    return p


cdef void order_gates(Forward *p, const Cell *c) noexcept nogil:
    cdef int gate
    for gate in range(4):
        p.w.column[gate] = c.column[gate]


cdef void use_panels(Forward *p, real *panels) noexcept nogil:
    p.w.base = panels
    p.peep = panels + p.w.size * p.w.count


cdef void load_peepholes(
    real *peep, const store *wci, const store *wcf, const store *wco, Py_ssize_t H, Py_ssize_t j
) noexcept nogil:
    """Line j of the three of them side by side."""
    cdef Py_ssize_t L = line_of(peep)
    load_line(peep + 3 * j * L, wci + j * L, H - j * L)
    load_line(peep + (3 * j + 1) * L, wcf + j * L, H - j * L)
    load_line(peep + (3 * j + 2) * L, wco + j * L, H - j * L)


cdef void pack_rest(
    const Forward *p, const Cell *c, real *panels, const store *wci, const store *wcf, const store *wco,
    const store *b, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Bias and peepholes of the lines j0 to j1."""
    cdef Py_ssize_t j
    pack_bias(&p.w, panels, b, j0, j1)
    if c.peephole:
        for j in range(j0, j1):
            load_peepholes(panels + p.w.size * p.w.count, wci, wcf, wco, p.H, j)


cdef inline void store_output(
    const Forward *p, store **out, int g, Py_ssize_t j, Py_ssize_t r, const real *y
) noexcept nogil:
    """Line j of row r = t * B + b of output g, where that is wanted."""
    cdef Py_ssize_t L = line_of(y)
    cdef store *row
    if out[g] is not NULL:
        row = out[g] + r * (p.ld if g == 6 else p.H) + j * L
        store_line(row, y + g * L, p.H - j * L)
        if (j + 1) * L < p.H:
            for_writing(row + L)  # where line j + 1 of this row will go; what follows the row may be another thread's


cdef void cell_lines(
    const Forward *p, const Cell *c, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *z, Py_ssize_t zs, real *work, const real *h_prev, real *h, store **out
) noexcept nogil:
    """From z, whose lines are zs apart, to the states and outputs of the step processed as number k, for the lines j0
    to j1 and batch rows b0 to b1.  First cs of all, then h of all: h waits for its cs, but not for another."""
    cdef Py_ssize_t L = line_of(z)
    cdef real[7 * LF] y
    cdef Py_ssize_t j, q, l, r, t = step_at(&p.steps, k)
    cdef const real *peep
    cdef real *cs
    cdef real *state
    for j in range(j0, j1):
        peep = <const real *> p.peep + 3 * j * L
        for q in range(b0, b1):
            r = t * p.B + q
            cs = work + p.cs + q * p.Hs + j * L
            if marked(&p.steps, k, q, ENDED):
                clear(y, 7 * L)
            else:
                cell_state(c, z + (j - j0) * zs + (q - b0) * LINES * L, peep, cs, y)
            store_output(p, out, 0, j, r, y)
            store_output(p, out, 1, j, r, y)
            store_output(p, out, 2, j, r, y)
            store_output(p, out, 4, j, r, y)
    for j in range(j0, j1):
        peep = <const real *> p.peep + 3 * j * L
        for q in range(b0, b1):
            r = t * p.B + q
            cs = work + p.cs + q * p.Hs + j * L
            state = h + q * p.Hs + j * L
            if marked(&p.steps, k, q, ENDED):
                for l in range(L):
                    state[l] = h_prev[q * p.Hs + j * L + l]
                clear(y, 7 * L)
            else:
                cell_output(c, z + (j - j0) * zs + (q - b0) * LINES * L, peep, cs, state, y)
            store_output(p, out, 3, j, r, y)
            store_output(p, out, 5, j, r, y)
            store_output(p, out, 6, j, r, y)
            if store is half:  # the next step reads the states as they are stored
                round_to_half(cs)
                round_to_half(state)
            if marked(&p.steps, k + 1, q, FRESH):
                clear(cs, L)
                clear(state, L)


cdef void step_rows(
    const Forward *p, const Cell *c, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *x, real *z,
    real *work, const real *h_prev, real *h, store **out
) noexcept nogil:
    """One step of line j for the batch rows b0 to b1; the input product comes in z, or is computed from x."""
    cdef Py_ssize_t L = line_of(x)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t r = b0, m, first = 0
    cdef real *a
    while r < b1:
        m = row_group(b1 - r, TILES * ROWS)
        if p.chunk > 1:
            a = z + (r - b0) * LINES * L
        else:
            a = acc
            add_bias(&p.w, j, m, a)
            add_product(&p.w, j, 0, p.I, x + (r - b0) * p.Is, p.Is, m, a, first)
        add_product(&p.w, j, p.I, p.H, h_prev + r * p.Hs, p.Hs, m, a, first)
        cell_lines(p, c, j, j + 1, k, r, r + m, a, 0, work, h_prev, h, out)
        r += m
        first += TILES


cdef void step_row(
    const Forward *p, const Cell *c, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b, const real *x, real *z,
    Py_ssize_t z_panel, real *work, const real *h_prev, real *h, store **out
) noexcept nogil:
    """`step_rows` of the lines j0 to j1 for batch row b alone, several lines at once."""
    cdef Py_ssize_t L = line_of(x)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t j = j0, end, n, i, q, step = z_panel if p.chunk > 1 else LINES * L
    cdef real *a
    cdef real *line
    while j < j1:
        end = min(j1, j + TILES * ROWS)
        a = z + j * z_panel if p.chunk > 1 else acc
        i = j
        while i < end:
            n = at_once(&p.w, i, end)
            line = a + (i - j) * step
            if p.chunk == 1:
                for q in range(n):
                    add_bias(&p.w, i + q, 1, line + q * step)
                add_row_product(&p.w, i, n, 0, p.I, x, line, step)
            add_row_product(&p.w, i, n, p.I, p.H, h_prev + b * p.Hs, line, step)
            i += n
        cell_lines(p, c, j, end, k, b, b + 1, a, step, work, h_prev, h, out)
        j = end


cdef void forward_part(
    const Forward *p, const Cell *c, real *work, const store *x, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of all steps."""
    cdef Py_ssize_t b0 = 0, b1 = p.B, j0 = 0, j1 = p.J, k0 = 0, k, steps, j, rows, z_panel
    cdef real *xs
    cdef real *z
    cdef real *h_prev = work + p.h
    cdef real *h = work + p.other
    if p.by_rows:
        b0, b1 = share(p.B, part, parts), share(p.B, part + 1, parts)
    else:
        j0, j1 = share(p.J, part, parts), share(p.J, part + 1, parts)
    rows = b1 - b0
    z_panel = p.chunk * rows * LINES * p.L
    xs = work + p.x + p.chunk * b0 * p.Is
    z = work + p.z + p.chunk * b0 * p.J * LINES * p.L
    while k0 < p.steps.T:
        steps = min(p.chunk, p.steps.T - k0)
        if p.by_rows:
            load_steps(&p.steps, xs, p.Is, x, p.I, k0, b0, rows, 0, steps * rows)
        else:
            load_steps(&p.steps, xs, p.Is, x, p.I, k0, 0, rows, share(steps * rows, part, parts),
                       share(steps * rows, part + 1, parts))
            barrier(team, part, parts)
        if p.chunk > 1:
            add_input_product(&p.w, p.I, xs, p.Is, steps * rows, z, z_panel, j0, j1)
        for k in range(steps):
            if rows == 1:
                step_row(p, c, j0, j1, k0 + k, b0, xs + k * p.Is, z + k * LINES * p.L, z_panel, work, h_prev, h, out)
            else:
                for j in range(j0, j1):
                    step_rows(p, c, j, k0 + k, b0, b1, xs + k * rows * p.Is, z + j * z_panel + k * rows * LINES * p.L,
                              work, h_prev, h, out)
            h_prev, h = h, h_prev
            if not p.by_rows:
                barrier(team, part, parts)
        k0 += steps


cdef void single_step(
    const Forward *p, const Cell *c, real *work, const store *w, store **out, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """A sequence of one step with weights that are not packed yet, for the lines j0 to j1."""
    cdef Py_ssize_t j, z_panel = p.B * LINES * p.L
    cdef real *z = work + p.z
    for j in range(j0, j1):
        add_bias(&p.w, j, p.B, z + j * z_panel)
    add_product_once(&p.w, w, p.I, work + p.x, p.Is, p.B, z, z_panel, j0, j1)
    add_product_once(&p.w, w + p.I * 4 * p.H, p.H, work + p.h, p.Hs, p.B, z, z_panel, j0, j1)
    for j in range(j0, j1):
        cell_lines(p, c, j, j + 1, 0, 0, p.B, z + j * z_panel, 0, work, work + p.h, work + p.other, out)


cdef void load_states(
    const Forward *p, real *work, const store *cs, const store *h, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """The states that rows b0 to b1 start from; NULL stands for zeros."""
    cdef Py_ssize_t b
    for b in range(b0, b1):
        if h is not NULL:
            load_row(work + p.cs + b * p.Hs, cs + b * p.H, p.H)
            load_row(work + p.h + b * p.Hs, h + b * p.H, p.H)
        if h is NULL or marked(&p.steps, 0, b, FRESH):
            clear(work + p.cs + b * p.Hs, p.Hs)
            clear(work + p.h + b * p.Hs, p.Hs)


cdef void forward_team(
    const Forward *p, const Cell *c, real *work, const store *x, const store *cs_prev, const store *h_prev,
    const store *w, const store *wci, const store *wcf, const store *wco, const store *b, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef Py_ssize_t j0 = share(p.J, part, parts), j1 = share(p.J, part + 1, parts)
    cdef real *rows = work + part * p.apart
    load_states(p, rows, cs_prev, h_prev, b0, b1)
    pack_rest(p, c, work, wci, wcf, wco, b, j0, j1)
    if not p.whole:
        load_steps(&p.steps, work + p.x, p.Is, x, p.I, 0, 0, p.B, b0, b1)
        barrier(team, part, parts)
        single_step(p, c, work, w, out, j0, j1)
    else:
        pack_panels(&p.w, work, w, p.I, j0, j1)
        barrier(team, part, parts)
        forward_part(p, c, rows, x, out, team, part, parts)


cdef long long forward(
    Forward *p, int threads, const Cell *c, real *work, const store *x, const store *cs_prev, const store *h_prev,
    const store *w, const store *wci, const store *wcf, const store *wco, const store *b, store **out
) noexcept nogil:
    cdef Team team
    order_gates(p, c)
    use_panels(p, work)
    if threads == 1:  # entering a parallel region costs even one thread
        forward_team(p, c, work, x, cs_prev, h_prev, w, wci, wcf, wco, b, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        forward_team(p, c, work, x, cs_prev, h_prev, w, wci, wcf, wco, b, out, &team, threadid(), team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def lstm_cell_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, B, I, H, itemsize, False, num_threads)
    return p.total * itemsize + 64, p.threads


def block_lstm_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, False, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_cell(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, ::1] i, store[:, ::1] cs, store[:, ::1] f, store[:, ::1] o, store[:, ::1] ci, store[:, ::1] co,
    store[:, ::1] h, unsigned char[::1] work, double forget_bias, double cell_clip, bint use_peephole, int num_threads,
    int ready
):
    cdef store *out[7]
    cdef Cell c = cell_of(forget_bias, cell_clip, use_peephole, False)
    cdef Forward p = forward_of(1, x.shape[0], x.shape[1], h_prev.shape[1], 8 if store is double else 4, False,
                                num_threads)
    cdef long long waste
    out[0], out[1], out[2], out[3] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    out[4], out[5], out[6] = &ci[0, 0], &co[0, 0], &h[0, 0]
    with nogil:
        if store is double:
            waste = forward(&p, ready, &c, <double *> aligned(work), &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0],
                            &wci[0], &wcf[0], &wco[0], &b[0], out)
        else:
            waste = forward(&p, ready, &c, <float *> aligned(work), &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0],
                            &wci[0], &wcf[0], &wco[0], &b[0], out)
    return waste


def block_lstm(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, :, ::1] i, store[:, :, ::1] cs, store[:, :, ::1] f, store[:, :, ::1] o, store[:, :, ::1] ci,
    store[:, :, ::1] co, store[:, :, ::1] h, unsigned char[::1] work, Py_ssize_t seq_len_max, double forget_bias,
    double cell_clip, bint use_peephole, bint ifco, int num_threads, int ready
):
    cdef store *out[7]
    cdef Cell c = cell_of(forget_bias, cell_clip, use_peephole, ifco)
    cdef Forward p = forward_of(seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], 8 if store is double else 4,
                                False, num_threads)
    cdef long long waste
    out[0], out[1], out[2], out[3] = &i[0, 0, 0], &cs[0, 0, 0], &f[0, 0, 0], &o[0, 0, 0]
    out[4], out[5], out[6] = &ci[0, 0, 0], &co[0, 0, 0], &h[0, 0, 0]
    with nogil:
        if store is double:
            waste = forward(&p, ready, &c, <double *> aligned(work), &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0,
                            0], &wci[0], &wcf[0], &wco[0], &b[0], out)
        else:
            waste = forward(&p, ready, &c, <float *> aligned(work), &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0,
                            0], &wci[0], &wcf[0], &wco[0], &b[0], out)
    return waste


# ------------------------------------------------------------------------------------------------------------ backward
cdef struct Backward:
    Steps steps  # those that are run
    Py_ssize_t T, B, I, H
    Py_ssize_t L, J  # units in a line, lines of units
    Py_ssize_t h_panels, x_panels, panel  # panels of the transposed weights; reals of one
    Py_ssize_t Hs, N, Ns  # stride of a row of H; gate gradients of a row (t, b) and their stride
    Py_ssize_t threads
    bint whole  # all panels are there before the steps, else a single one packs what it uses
    bint by_rows  # threads split the batch, not the hidden units
    Py_ssize_t w_h, w_x, w_grad, d, d_h, d_cs, peep, inputs, total  # where things begin in scratch, in reals; its size


cdef Backward backward_of(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
) noexcept nogil:
    cdef Backward p
    p.steps = steps_of(T, B)
    p.T, p.B, p.I, p.H, p.N = T, B, I, H, 4 * H
    p.L = 64 // itemsize
    p.J = (H + p.L - 1) // p.L
    p.Hs, p.Ns = stride_of(H, p.L), stride_of(p.N, p.L)
    p.whole = packs_whole(T, B, I, H, 4, itemsize, threads)
    p.by_rows = splits_rows(B, H, 4, itemsize, threads)
    p.threads = backward_threads(16.0 * B * H * (I + H), T, p.by_rows, threads)
    p.panel = PLAIN * p.L * p.N
    p.h_panels, p.x_panels = plain_panels(p.J), plain_panels((I + p.L - 1) // p.L)
    p.w_h = 0
    p.w_x = p.w_h + p.h_panels * p.panel
    p.w_grad = 0  # float16's weight gradient in float32 takes the place of the panels, which are done with by then
    p.d = max(p.w_x + p.x_panels * p.panel, threads * p.panel)  # of a single step each thread keeps one panel
    p.d_h = p.d + T * B * p.Ns
    p.d_cs = p.d_h + B * p.Hs
    p.peep = p.d_cs + B * p.Hs
    p.inputs = p.peep + 3 * p.J * p.L
    p.total = p.inputs + weight_grad_work(I, H, p.N, T * B, p.L, threads)
    return p


cdef void backward_line(
    const Backward *p, const Cell *c, const store **saved, const store *before, const store *cs_grad,
    const store *h_grad, const real *peep, Py_ssize_t j, Py_ssize_t r, const real *carry, real *d_cs, real *d
) noexcept nogil:
    """Line j of row r = t * B + b: the carries of h and cs plus the incoming gradients to the gate gradients in row d;
    d_cs becomes the gradient of the cs that the step started from, whose row is `before`, or NULL for zeros."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[6 * LF] y
    cdef real[4 * LF] gates
    cdef real[LF] value
    cdef real[LF] d_h
    cdef Py_ssize_t k, l, at = r * p.H + j * L, n = p.H - j * L
    for k in range(6):
        load_line(y + k * L, saved[k] + at, n)
    load_line(value, h_grad + at, n)
    for l in range(L):
        d_h[l] = carry[l] + value[l]
    if cs_grad is not NULL:
        load_line(value, cs_grad + at, n)
        for l in range(L):
            d_cs[l] = d_cs[l] + value[l]
    load_state(value, before, j, n)
    cell_grad(c, y, value, peep + 3 * j * L, d_h, d_cs, gates)
    for k in range(4):
        store_line(d + c.column[k] * p.H + j * L, gates + k * L, n)


cdef void backward_rows(
    const Backward *p, const Cell *c, real *work, const store **saved, const store *cs_prev, const store *cs_grad,
    const store *h_grad, store *h_prev_grad, const real *panel, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """The gate gradients of the step processed as number k, from those of the next; for k = -1 that of h_prev.  Panel
    j, batch rows b0 to b1."""
    cdef Py_ssize_t L = line_of(work)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t b = b0, m, first = 0, q, g, l, i, r, n = min(<Py_ssize_t> PLAIN, p.J - j * PLAIN)
    cdef Py_ssize_t t = step_at(&p.steps, k)
    cdef real *next_d = work + p.d + step_at(&p.steps, k + 1) * p.B * p.Ns
    cdef real *carry
    cdef real *d_h
    cdef real *d_cs
    cdef real *d
    cdef const store *before = NULL
    while b < b1:
        m = row_group(b1 - b, TILES * ROWS)
        for q in range(m):
            for g in range(n):
                carry = acc + (q * LINES + g) * L
                d_h = work + p.d_h + (b + q) * p.Hs + (j * PLAIN + g) * L
                for l in range(L):
                    carry[l] = d_h[l]
        if k < p.T - 1:
            product(acc, m, n, next_d + b * p.Ns, p.Ns, panel, p.N, panel + p.panel, first)
        for q in range(m):
            r = b + q
            d = work + p.d + (t * p.B + r) * p.Ns
            if k >= 0:
                before = input_row(&p.steps, cs_prev, saved[1], p.H, t * p.B + r)
            for g in range(n):
                l = j * PLAIN + g
                carry = acc + (q * LINES + g) * L
                d_h = work + p.d_h + r * p.Hs + l * L
                d_cs = work + p.d_cs + r * p.Hs + l * L
                if marked(&p.steps, k + 1, r, FRESH):  # the next step did not see this one's states
                    clear(carry, L)
                    clear(d_cs, L)
                if k < 0:
                    store_line(h_prev_grad + r * p.H + l * L, carry, p.H - l * L)
                elif marked(&p.steps, k, r, ENDED):
                    for i in range(L):
                        d_h[i] = carry[i]
                    for i in range(4):
                        clear(d + i * p.H + l * L, min(L, p.H - l * L))
                else:
                    clear(d_h, L)
                    backward_line(p, c, saved, before, cs_grad, h_grad, work + p.peep, l, t * p.B + r, carry, d_cs, d)
        b += m
        first += TILES


cdef void backward_part(
    const Backward *p, const Cell *c, real *work, const store **saved, const store *cs_prev, const store *cs_grad,
    const store *h_grad, store *h_prev_grad, Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of all steps, last step first."""
    cdef Py_ssize_t b0 = 0, b1 = p.B, j0 = 0, j1 = p.h_panels, k = p.T - 1, j
    if p.by_rows:
        b0, b1 = share(p.B, part, parts), share(p.B, part + 1, parts)
    else:
        j0, j1 = share(p.h_panels, part, parts), share(p.h_panels, part + 1, parts)
    while k >= -1:
        for j in range(j0, j1):
            backward_rows(p, c, work, saved, cs_prev, cs_grad, h_grad, h_prev_grad, work + p.w_h + j * p.panel, j, k,
                          b0, b1)
        if not p.by_rows:
            barrier(team, part, parts)
        k -= 1


cdef void backward_single(
    const Backward *p, const Cell *c, real *work, const store *w, const store **saved, const store *cs_prev,
    const store *cs_grad, const store *h_grad, store *x_grad, store *h_prev_grad,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of a sequence of one step, which uses each weight once: packed where it is used."""
    cdef Py_ssize_t j, panels = p.h_panels + p.x_panels
    cdef real *panel = work + p.w_h + part * p.panel
    for j in range(p.h_panels):
        backward_rows(p, c, work, saved, cs_prev, cs_grad, h_grad, h_prev_grad, panel, j, 0, share(p.B, part, parts),
                      share(p.B, part + 1, parts))
    barrier(team, part, parts)
    for j in range(share(panels, part, parts), share(panels, part + 1, parts)):
        if j < p.h_panels:
            pack_transposed(panel, w + p.I * p.N, p.N, p.H, j)
            backward_rows(p, c, work, saved, cs_prev, cs_grad, h_grad, h_prev_grad, panel, j, -1, 0, p.B)
        else:
            pack_transposed(panel, w, p.N, p.I, j - p.h_panels)
            input_grad(x_grad, p.I, work + p.d, p.Ns, p.B, panel, p.N, panel, 0, j - p.h_panels)


cdef void load_carry(
    const Backward *p, real *work, const store *cs_last_grad, const store *h_last_grad, Py_ssize_t b
) noexcept nogil:
    """The gradients of the states after the last step, for batch row b; NULL for zeros."""
    if h_last_grad is NULL:
        clear(work + p.d_h + b * p.Hs, p.Hs)
    else:
        load_row(work + p.d_h + b * p.Hs, h_last_grad + b * p.H, p.H)
    if cs_last_grad is NULL:
        clear(work + p.d_cs + b * p.Hs, p.Hs)
    else:
        load_row(work + p.d_cs + b * p.Hs, cs_last_grad + b * p.H, p.H)


cdef void peephole_grad(
    const Backward *p, const Cell *c, const real *d, const store *cs_prev, const store *cs, store **out, Py_ssize_t j
) noexcept nogil:
    """Line j of wci_grad and wcf_grad, summed with the cs that a step starts from, and of wco_grad, with its new cs."""
    cdef Py_ssize_t at = j * p.L, n = p.H - j * p.L
    peephole_sum(out[4] + at, d + c.column[0] * p.H + at, p.Ns, &p.steps, cs_prev + at, cs + at, p.H, n)
    peephole_sum(out[5] + at, d + c.column[2] * p.H + at, p.Ns, &p.steps, cs_prev + at, cs + at, p.H, n)
    peephole_sum(out[6] + at, d + c.column[3] * p.H + at, p.Ns, &p.steps, <store *> NULL, cs + at, p.H, n)


cdef void backward_team(
    const Backward *p, const Cell *c, real *work, const store *x, const store *cs_prev, const store *h_prev,
    const store *w, const store *wci, const store *wcf, const store *wco, const store **saved, const store *h,
    const store *cs_grad, const store *h_grad, const store *cs_last_grad, const store *h_last_grad, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t k, j, rows = p.T * p.B, w_rows = p.I + p.H, panels = p.h_panels + p.x_panels
    cdef Py_ssize_t b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef Py_ssize_t j0 = share(p.J, part, parts), j1 = share(p.J, part + 1, parts)
    cdef real *d = work + p.d
    cdef real *w_grad = work + p.w_grad
    if store is not half:
        w_grad = <real *> out[3]
    if c.peephole:
        for k in range(j0, j1):
            load_peepholes(work + p.peep, wci, wcf, wco, p.H, k)
    for k in range(b0, b1):
        load_carry(p, work, cs_last_grad, h_last_grad, k)
    if not p.whole:
        barrier(team, part, parts)
        backward_single(p, c, work, w, saved, cs_prev, cs_grad, h_grad, out[0], out[2], team, part, parts)
        barrier(team, part, parts)
    else:
        for k in range(share(panels, part, parts), share(panels, part + 1, parts)):
            if k < p.h_panels:
                pack_transposed(work + p.w_h + k * p.panel, w + p.I * p.N, p.N, p.H, k)
            else:
                j = k - p.h_panels
                pack_transposed(work + p.w_x + j * p.panel, w, p.N, p.I, j)
        barrier(team, part, parts)
        backward_part(p, c, work, saved, cs_prev, cs_grad, h_grad, out[2], team, part, parts)
        barrier(team, part, parts)
        input_grads(out[0], p.I, d, p.Ns, rows, work + p.w_x, p.N, work, 0, part, parts)
    for k in range(b0, b1):
        store_row(out[1] + k * p.H, work + p.d_cs + k * p.Hs, p.H)
    if c.peephole:
        for k in range(j0, j1):
            peephole_grad(p, c, d, cs_prev, saved[1], out, k)
    barrier(team, part, parts)
    weight_grad(w_grad, out[7], p.N, &p.steps, x, p.I, h_prev, h, <store *> NULL, p.H, d, p.Ns, work + p.inputs, team,
                part, parts)
    if store is half:
        barrier(team, part, parts)
        for k in range(share(w_rows, part, parts), share(w_rows, part + 1, parts)):
            store_row(out[3] + k * p.N, w_grad + k * p.N, p.N)


cdef long long backward(
    const Backward *p, int threads, const Cell *c, real *work, const store *x, const store *cs_prev,
    const store *h_prev, const store *w, const store *wci, const store *wcf, const store *wco, const store **saved,
    const store *h, const store *cs_grad, const store *h_grad, const store *cs_last_grad, const store *h_last_grad,
    store **out
) noexcept nogil:
    """out: x_grad, cs_prev_grad, h_prev_grad, w_grad, wci_grad, wcf_grad, wco_grad, b_grad."""
    cdef Team team
    if threads == 1:
        backward_team(p, c, work, x, cs_prev, h_prev, w, wci, wcf, wco, saved, h, cs_grad, h_grad, cs_last_grad,
                      h_last_grad, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        backward_team(p, c, work, x, cs_prev, h_prev, w, wci, wcf, wco, saved, h, cs_grad, h_grad, cs_last_grad,
                      h_last_grad, out, &team, threadid(), team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def lstm_cell_vjp_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(1, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def block_lstm_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(T, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_cell_vjp(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, ::1] i, const store[:, ::1] cs,
    const store[:, ::1] f, const store[:, ::1] o, const store[:, ::1] ci, const store[:, ::1] co,
    const store[:, ::1] cs_grad, const store[:, ::1] h_grad, store[:, ::1] x_grad, store[:, ::1] cs_prev_grad,
    store[:, ::1] h_prev_grad, store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    store[::1] b_grad, unsigned char[::1] work, bint use_peephole, int num_threads, int ready
):
    cdef const store *saved[6]
    cdef store *out[8]
    cdef Cell c = cell_of(0, 0, use_peephole, False)
    cdef Backward p = backward_of(1, x.shape[0], x.shape[1], h_prev.shape[1], 8 if store is double else 4, num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2] = &i[0, 0], &cs[0, 0], &f[0, 0]
    saved[3], saved[4], saved[5] = &o[0, 0], &ci[0, 0], &co[0, 0]
    out[0], out[1], out[2], out[3] = &x_grad[0, 0], &cs_prev_grad[0, 0], &h_prev_grad[0, 0], &w_grad[0, 0]
    out[4], out[5], out[6], out[7] = &wci_grad[0], &wcf_grad[0], &wco_grad[0], &b_grad[0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, &c, <double *> aligned(work), &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0],
                             &wci[0], &wcf[0], &wco[0], saved, &h_prev[0, 0], &cs_grad[0, 0], &h_grad[0, 0],
                             <store *> NULL, <store *> NULL, out)
        else:
            waste = backward(&p, ready, &c, <float *> aligned(work), &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0],
                             &wci[0], &wcf[0], &wco[0], saved, &h_prev[0, 0], &cs_grad[0, 0], &h_grad[0, 0],
                             <store *> NULL, <store *> NULL, out)
    return waste


def block_lstm_grad(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, :, ::1] i,
    const store[:, :, ::1] cs, const store[:, :, ::1] f, const store[:, :, ::1] o, const store[:, :, ::1] ci,
    const store[:, :, ::1] co, const store[:, :, ::1] h, const store[:, :, ::1] cs_grad,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] cs_prev_grad, store[:, ::1] h_prev_grad,
    store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad, store[::1] b_grad,
    unsigned char[::1] work, Py_ssize_t seq_len_max, bint use_peephole, bint ifco, int num_threads, int ready
):
    cdef const store *saved[6]
    cdef store *out[8]
    cdef Cell c = cell_of(0, 0, use_peephole, ifco)
    cdef Backward p = backward_of(seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], 8 if store is double else 4,
                                  num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2] = &i[0, 0, 0], &cs[0, 0, 0], &f[0, 0, 0]
    saved[3], saved[4], saved[5] = &o[0, 0, 0], &ci[0, 0, 0], &co[0, 0, 0]
    out[0], out[1], out[2], out[3] = &x_grad[0, 0, 0], &cs_prev_grad[0, 0], &h_prev_grad[0, 0], &w_grad[0, 0]
    out[4], out[5], out[6], out[7] = &wci_grad[0], &wcf_grad[0], &wco_grad[0], &b_grad[0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, &c, <double *> aligned(work), &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0,
                             0], &wci[0], &wcf[0], &wco[0], saved, &h[0, 0, 0], &cs_grad[0, 0, 0], &h_grad[0, 0, 0],
                             <store *> NULL, <store *> NULL, out)
        else:
            waste = backward(&p, ready, &c, <float *> aligned(work), &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0,
                             0], &wci[0], &wcf[0], &wco[0], saved, &h[0, 0, 0], &cs_grad[0, 0, 0], &h_grad[0, 0, 0],
                             <store *> NULL, <store *> NULL, out)
    return waste


# ------------------------------------------------------------------------------- the cell's gradient without a product
cdef void cell_grad_row(
    const Backward *p, const Cell *c, const store **saved, const store *cs_prev, const store *cs_grad,
    const store *h_grad, const real *peep, store *cs_prev_grad, real *d, Py_ssize_t r
) noexcept nogil:
    cdef Py_ssize_t L = line_of(d)
    cdef Py_ssize_t j, l
    cdef real[LF] zero
    cdef real[LF] d_cs
    for l in range(L):
        zero[l] = 0
    for j in range(p.J):
        for l in range(L):
            d_cs[l] = 0
        backward_line(p, c, saved, cs_prev + r * p.H, cs_grad, h_grad, peep, j, r, zero, d_cs, d)
        store_line(cs_prev_grad + r * p.H + j * L, d_cs, p.H - j * L)


cdef void cell_backward_team(
    const Backward *p, const Cell *c, real *work, const store *cs_prev, const store *wci, const store *wcf,
    const store *wco, const store **saved, const store *cs_grad, const store *h_grad, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t k, j0 = share(p.J, part, parts), j1 = share(p.J, part + 1, parts)
    cdef real *d = work + p.d
    if store is not half:
        d = <real *> out[0]
    if c.peephole:
        for k in range(j0, j1):
            load_peepholes(work + p.peep, wci, wcf, wco, p.H, k)
        barrier(team, part, parts)
    for k in range(share(p.B, part, parts), share(p.B, part + 1, parts)):
        cell_grad_row(p, c, saved, cs_prev, cs_grad, h_grad, work + p.peep, out[1], d + k * p.Ns, k)
        if store is half:
            store_row(out[0] + k * p.N, d + k * p.Ns, p.N)
    if c.peephole:
        barrier(team, part, parts)
        for k in range(j0, j1):
            peephole_grad(p, c, d, cs_prev, saved[1], out, k)


cdef long long cell_backward(
    const Backward *p, int threads, const Cell *c, real *work, const store *cs_prev, const store *wci, const store *wcf,
    const store *wco, const store **saved, const store *cs_grad, const store *h_grad, store **out
) noexcept nogil:
    """out: dicfo, cs_prev_grad, -, -, wci_grad, wcf_grad, wco_grad."""
    cdef Team team
    if threads == 1:
        cell_backward_team(p, c, work, cs_prev, wci, wcf, wco, saved, cs_grad, h_grad, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        cell_backward_team(p, c, work, cs_prev, wci, wcf, wco, saved, cs_grad, h_grad, out, &team, threadid(),
                           team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


cdef Backward cell_backward_of(Py_ssize_t B, Py_ssize_t H, Py_ssize_t itemsize, int threads) noexcept nogil:
    cdef Backward p = backward_of(1, B, 0, H, itemsize, threads)
    p.threads = 1 if B * H < 1 << 13 else threads
    p.Ns = p.N  # float and double go straight to dicfo
    p.peep = 0
    p.d = 3 * p.J * p.L
    p.total = p.d + B * p.Ns
    return p


def lstm_cell_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = cell_backward_of(B, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_cell_grad(
    const store[:, ::1] cs_prev, const store[::1] wci, const store[::1] wcf, const store[::1] wco,
    const store[:, ::1] i, const store[:, ::1] cs, const store[:, ::1] f, const store[:, ::1] o,
    const store[:, ::1] ci, const store[:, ::1] co, const store[:, ::1] cs_grad, const store[:, ::1] h_grad,
    store[:, ::1] cs_prev_grad, store[:, ::1] dicfo, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    unsigned char[::1] work, bint use_peephole, int num_threads, int ready
):
    cdef const store *saved[6]
    cdef store *out[7]
    cdef Cell c = cell_of(0, 0, use_peephole, False)
    cdef Backward p = cell_backward_of(i.shape[0], i.shape[1], 8 if store is double else 4, num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2] = &i[0, 0], &cs[0, 0], &f[0, 0]
    saved[3], saved[4], saved[5] = &o[0, 0], &ci[0, 0], &co[0, 0]
    out[0], out[1], out[4], out[5] = &dicfo[0, 0], &cs_prev_grad[0, 0], &wci_grad[0], &wcf_grad[0]
    out[6] = &wco_grad[0]
    with nogil:
        if store is double:
            waste = cell_backward(&p, ready, &c, <double *> aligned(work), &cs_prev[0, 0], &wci[0], &wcf[0], &wco[0],
                                  saved, &cs_grad[0, 0], &h_grad[0, 0], out)
        else:
            waste = cell_backward(&p, ready, &c, <float *> aligned(work), &cs_prev[0, 0], &wci[0], &wcf[0], &wco[0],
                                  saved, &cs_grad[0, 0], &h_grad[0, 0], out)
    return waste


# --------------------------------------------------------------------------------------------------------------- layers
cdef void run_layer_part(
    const Forward *p, const Cell *c, real *work, const store *x, const store *cs, const store *h, store *cs_last,
    store *h_last, store **out, Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t b, b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef real *rows = work + part * p.apart
    cdef const real *last = rows + (p.other if p.steps.T % 2 else p.h)
    load_states(p, rows, cs, h, b0, b1)
    barrier(team, part, parts)
    forward_part(p, c, rows, x, out, team, part, parts)
    for b in range(b0, b1):
        store_row(cs_last + b * p.H, rows + p.cs + b * p.Hs, p.H)
        store_row(h_last + b * p.H, last + b * p.Hs, p.H)


cdef long long run_layer(
    const Forward *p, int threads, const Cell *c, real *work, const store *x, const store *cs, const store *h,
    store *cs_last, store *h_last, store **out
) noexcept nogil:
    cdef Team team
    if threads == 1:
        run_layer_part(p, c, work, x, cs, h, cs_last, h_last, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        run_layer_part(p, c, work, x, cs, h, cs_last, h_last, out, &team, threadid(), team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def lstm_pack_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, 1, I, H, itemsize, True, 1)
    return packed_size(&p.w) * itemsize + 64, 1


def lstm_pack(
    const store[:, ::1] w, const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    unsigned char[::1] packed, bint use_peephole, bint ifco
):
    """A layer's weights as its kernel reads them."""
    cdef Cell c = cell_of(0, 0, use_peephole, ifco)
    cdef Py_ssize_t H = w.shape[1] // 4
    cdef Forward p = forward_of(1, 1, w.shape[0] - H, H, 8 if store is double else 4, True, 1)
    order_gates(&p, &c)
    if store is double:
        pack_rest(&p, &c, <double *> aligned(packed), &wci[0], &wcf[0], &wco[0], &b[0], 0, p.J)
        pack_panels(&p.w, <double *> aligned(packed), &w[0, 0], p.I, 0, p.J)
    else:
        pack_rest(&p, &c, <float *> aligned(packed), &wci[0], &wcf[0], &wco[0], &b[0], 0, p.J)
        pack_panels(&p.w, <float *> aligned(packed), &w[0, 0], p.I, 0, p.J)


def lstm_layer_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, True, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_layer(
    const store[:, :, ::1] x, const store[:, ::1] cs, const store[:, ::1] h, unsigned char[::1] packed,
    store[:, :, :] y, store[:, :, :, ::1] saved, store[:, ::1] cs_last, store[:, ::1] h_last,
    const unsigned char[:, ::1] marks, bint reverse, double forget_bias, double cell_clip, bint use_peephole,
    unsigned char[::1] work, int num_threads, int ready
):
    """A layer's h to y, whose rows may be part of longer ones; where `saved` is not None, i, cs, f, o, ci, co to it."""
    cdef store *out[7]
    cdef int k
    cdef Cell c = cell_of(forget_bias, cell_clip, use_peephole, False)
    cdef Forward p = forward_of(x.shape[0], x.shape[1], x.shape[2], h.shape[1], 8 if store is double else 4, True,
                                num_threads)
    cdef long long waste
    for k in range(6):
        out[k] = NULL if saved is None else &saved[k, 0, 0, 0]
    out[6] = &y[0, 0, 0]
    p.ld = y.strides[1] // sizeof(store)
    p.steps.reverse = reverse
    if marks is not None:
        p.steps.marks = &marks[0, 0]
    with nogil:
        if store is double:
            use_panels(&p, <double *> aligned(packed))
            waste = run_layer(&p, ready, &c, <double *> aligned(work), &x[0, 0, 0], &cs[0, 0], &h[0, 0], &cs_last[0, 0],
                              &h_last[0, 0], out)
        else:
            use_panels(&p, <float *> aligned(packed))
            waste = run_layer(&p, ready, &c, <float *> aligned(work), &x[0, 0, 0], &cs[0, 0], &h[0, 0], &cs_last[0, 0],
                              &h_last[0, 0], out)
    return waste


def lstm_layer_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(T, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_layer_grad(
    const store[:, :, ::1] x, const store[:, ::1] cs, const store[:, ::1] h, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, :, :, ::1] saved,
    const store[:, :, ::1] y, const store[:, :, ::1] y_grad, const store[:, ::1] cs_last_grad,
    const store[:, ::1] h_last_grad, store[:, :, ::1] x_grad, store[:, ::1] cs_grad, store[:, ::1] h_grad,
    store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad, store[::1] b_grad,
    const unsigned char[:, ::1] marks, bint reverse, bint use_peephole, bint ifco, unsigned char[::1] work,
    int num_threads, int ready
):
    cdef const store *states[6]
    cdef store *out[8]
    cdef int k
    cdef Cell c = cell_of(0, 0, use_peephole, ifco)
    cdef Backward p = backward_of(x.shape[0], x.shape[1], x.shape[2], h.shape[1], 8 if store is double else 4,
                                  num_threads)
    cdef long long waste
    for k in range(6):
        states[k] = &saved[k, 0, 0, 0]
    out[0], out[1], out[2], out[3] = &x_grad[0, 0, 0], &cs_grad[0, 0], &h_grad[0, 0], &w_grad[0, 0]
    out[4], out[5], out[6], out[7] = &wci_grad[0], &wcf_grad[0], &wco_grad[0], &b_grad[0]
    p.steps.reverse = reverse
    if marks is not None:
        p.steps.marks = &marks[0, 0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, &c, <double *> aligned(work), &x[0, 0, 0], &cs[0, 0], &h[0, 0], &w[0, 0],
                             &wci[0], &wcf[0], &wco[0], states, &y[0, 0, 0], <store *> NULL, &y_grad[0, 0, 0],
                             &cs_last_grad[0, 0], &h_last_grad[0, 0], out)
        else:
            waste = backward(&p, ready, &c, <float *> aligned(work), &x[0, 0, 0], &cs[0, 0], &h[0, 0], &w[0, 0],
                             &wci[0], &wcf[0], &wco[0], states, &y[0, 0, 0], <store *> NULL, &y_grad[0, 0, 0],
                             &cs_last_grad[0, 0], &h_last_grad[0, 0], out)
    return waste


# -------------------------------------------------------------------------------------------------------------- streams
cdef struct Stream:
    Forward p
    Cell c


cdef long long run_stream(
    const Stream *s, int ready, real *work, const store *x, store *y, const store **first, store **last
) noexcept nogil:
    """All steps on so many threads, from the states `first` to `last`; NULL stands for zeros."""
    cdef store *out[7]
    cdef int k
    for k in range(6):
        out[k] = NULL
    out[6] = y
    return run_layer(&s.p, ready, &s.c, work, x, first[0], first[1], last[0], last[1], out)


cdef long long stream_float(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Stream *> plan, ready, <float *> work, <const float *> x, <float *> y,
                      <const float **> first, <float **> last)


cdef long long stream_double(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Stream *> plan, ready, <double *> work, <const double *> x, <double *> y,
                      <const double **> first, <double **> last)


cdef long long stream_half(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Stream *> plan, ready, <float *> work, <const half *> x, <half *> y,
                      <const half **> first, <half **> last)


def lstm_stream_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, True, num_threads)
    return p.total * itemsize + 64, p.threads


def lstm_stream(
    const store[::1] b, unsigned char[::1] packed, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H,
    double forget_bias, double cell_clip, bint use_peephole, int num_threads
):
    """What `_stream` calls for T steps, and the plan that it passes to it."""
    cdef Stream s
    s.c = cell_of(forget_bias, cell_clip, use_peephole, False)
    s.p = forward_of(T, B, I, H, 8 if store is double else 4, True, num_threads)
    if store is double:
        use_panels(&s.p, <double *> aligned(packed))
        run = PyCapsule_New(<void *> stream_double, NULL, NULL)
    elif store is half:
        use_panels(&s.p, <float *> aligned(packed))
        run = PyCapsule_New(<void *> stream_half, NULL, NULL)
    else:
        use_panels(&s.p, <float *> aligned(packed))
        run = PyCapsule_New(<void *> stream_float, NULL, NULL)
    return run, (<char *> &s)[:sizeof(Stream)]
