"""GRU block cell and sequence, forward and backward.

One step, cut into lines of units; the reset gate acts before the product, and u near 1 keeps the old state:

    r = sigmoid([x, h_prev] @ w_r + b_r)           u = sigmoid([x, h_prev] @ w_u + b_u)
    c = tanh([x, h_prev * r] @ w_c + b_c)          h = u * (h_prev - c) + c

`gates` and `candidate` compute that for one line of one row on the tile's accumulators, `gates_grad` and
`candidate_grad` its gradient; all the rest brings them their operands.  Work is cut into panels of lines of units:
two for r and u, four for c and backward, which fills the tile.  A sequence splits its work over batch rows where there
are enough of them (threads never meet), else over panels (threads meet twice a step: forward when h_prev * r and h are
complete, backward when d_c and d_r are).  A single step packs its weights block by block where they are used.
"""
from cpython.pycapsule cimport PyCapsule_New
from cython.parallel cimport parallel, threadid

from activations cimport sigmoid, tanh
from gradients cimport (
    PLAIN, backward_threads, input_grad, input_grads, load_state, pack_transposed, plain_panels, weight_grad,
    weight_grad_work
)
from half cimport half
from panels cimport (
    APART, Panels, add_bias, add_input_product, add_product, add_product_once, add_row_product, at_once, chunk_of,
    forward_threads, pack_bias, pack_panels, packs_whole, panels_of, splits_rows, stride_of, units_in
)
from real cimport real
from source cimport BLOCKCELL_SOURCE
from steps cimport ENDED, FRESH, Steps, input_row, load_steps, marked, step_at, steps_of
from team cimport Team, barrier, gather, join, lost, share, team_size
from tile cimport (
    LF, LINES, ONCE, ROWS, TILE, TILES, aligned, clear, for_writing, line_of, load_line, load_row, product,
    round_to_half, row_group, store, store_line, store_row
)

SOURCE = BLOCKCELL_SOURCE.decode()

cdef enum:
    ALONE = 32  # rows from which on a thread, in a single step backward, packs all weights itself and keeps to its rows


# ------------------------------------------------------------------------------------------------- one line of one row
cdef void gates(
    const real *restrict z, const real *restrict h_prev, real *restrict r, real *restrict u, real *restrict hr
) noexcept nogil:
    """z, in its two lines r, u, to the outputs r and u and to hr = h_prev * r."""
    cdef Py_ssize_t l, L = line_of(z)
    for l in range(L):
        r[l] = sigmoid(z[l])
        u[l] = sigmoid(z[L + l])
        hr[l] = h_prev[l] * r[l]


cdef void candidate(
    const real *restrict z, const real *restrict u, real *restrict h_state, real *restrict c
) noexcept nogil:
    """z, the line c, and u to the output c and to the line's new state."""
    cdef Py_ssize_t l, L = line_of(z)
    for l in range(L):
        c[l] = tanh(z[l])
        h_state[l] = u[l] * (h_state[l] - c[l]) + c[l]


cdef void candidate_grad(
    const real *restrict u, const real *restrict c, const real *restrict h_prev, const real *restrict d_h,
    real *restrict d_u, real *restrict d_c
) noexcept nogil:
    """From the gradient of h to those of the pre-activations u and c."""
    cdef Py_ssize_t l, L = line_of(u)
    cdef real one = 1  # a literal 1 would make all of it double
    for l in range(L):
        d_u[l] = d_h[l] * (h_prev[l] - c[l]) * u[l] * (one - u[l])
        d_c[l] = d_h[l] * (one - u[l]) * (one - c[l] * c[l])


cdef void gates_grad(
    const real *restrict r, const real *restrict u, const real *restrict h_prev, const real *restrict d_hr,
    real *restrict d_h, real *restrict d_r
) noexcept nogil:
    """From the gradient of h_prev * r to that of the pre-activation r; d_h, the gradient of h, becomes that part of
    h_prev's that does not come through r and u."""
    cdef Py_ssize_t l, L = line_of(r)
    cdef real one = 1
    for l in range(L):
        d_r[l] = d_hr[l] * h_prev[l] * r[l] * (one - r[l])
        d_h[l] = d_hr[l] * r[l] + d_h[l] * u[l]


# ------------------------------------------------------------------------------------------------------------- forward
cdef struct Forward:
    Steps steps  # those that are run
    Py_ssize_t B, I, H
    Py_ssize_t L  # units in a line
    Py_ssize_t Is, Hs  # strides of rows of x and h in scratch
    Py_ssize_t ld  # stride of rows of the output h
    Py_ssize_t chunk  # steps whose x products are computed at once; 1: they are part of the step
    Py_ssize_t threads
    bint whole  # all panels are there before the steps, else a single one packs what it uses
    bint by_rows  # threads split the batch, not the hidden units
    Py_ssize_t apart  # reals by which a thread's rows in scratch are further on than the last one's
    Panels ru, c
    Py_ssize_t h, hr, u, x, z, total  # where things begin in scratch, in reals; its size


cdef Forward forward_of(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed, int threads
) noexcept nogil:
    """`packed`: the panels are there already, else they are part of the scratch."""
    cdef Forward p
    cdef Py_ssize_t gaps
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.ld = B, I, H, H
    p.L = 64 // itemsize
    p.whole = packed or packs_whole(T, B, I, H, 3, itemsize, threads)
    p.ru, p.c = panels_of(p.whole, I, H, p.L, 2), panels_of(p.whole, I, H, p.L, 1)
    p.Is, p.Hs = stride_of(I, p.L), stride_of(H, p.L)
    p.by_rows = p.whole and splits_rows(B, H, 3, itemsize, threads)
    p.threads = forward_threads(T, B, I, H, 3, p.ru.count, p.by_rows, p.whole, threads)
    p.chunk = chunk_of(T, B, p.by_rows, p.threads)
    p.apart = APART * p.L if p.by_rows else 0
    gaps = (p.threads - 1) * p.apart
    p.h = 0 if packed else packed_size(&p)
    p.hr = p.h + B * p.Hs + gaps
    p.u = p.hr + B * p.Hs + gaps
    p.x = p.u + B * p.Hs + gaps
    p.z = p.x + p.chunk * B * p.Is + gaps
    p.total = p.z + gaps
    if p.chunk > 1 or not p.whole:
        p.total += (p.ru.count + p.c.count) * p.chunk * B * LINES * p.L
    return p


cdef Py_ssize_t packed_size(const Forward *p) noexcept nogil:
    """Reals of all panels."""
    return p.ru.size * p.ru.count + p.c.size * p.c.count


cdef void use_panels(Forward *p, real *panels) noexcept nogil:
    p.ru.base, p.c.base = panels, panels + p.ru.size * p.ru.count


cdef void gates_cells(
    const Forward *p, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *z, real *work, store **out
) noexcept nogil:
    """From z to r, u and h_prev * r of the step processed as number k, for panel j and batch rows b0 to b1."""
    cdef Py_ssize_t L = line_of(z)
    cdef real[LF] gate_r
    cdef Py_ssize_t q, s, at, to, t = step_at(&p.steps, k)
    cdef real *u
    for q in range(b0, b1):
        for s in range(units_in(&p.ru, j)):
            at = (j * p.ru.units + s) * L
            to = (t * p.B + q) * p.H + at
            u = work + p.u + q * p.Hs + at
            gates(z + ((q - b0) * LINES + 2 * s) * L, work + p.h + q * p.Hs + at, gate_r, u,
                  work + p.hr + q * p.Hs + at)
            if out[0] is NULL:
                continue
            if marked(&p.steps, k, q, ENDED):
                clear(gate_r, L)
                clear(u, L)
            store_line(out[0] + to, gate_r, p.H - at)
            store_line(out[1] + to, u, p.H - at)
            if at + p.ru.units * L < p.H:
                for_writing(out[0] + to + p.ru.units * L)  # where panel j + 1 of this row will go, not past its end:
                for_writing(out[1] + to + p.ru.units * L)  # that may be another thread's


cdef void candidate_cells(
    const Forward *p, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1, const real *z, real *work, store **out
) noexcept nogil:
    """From z to c, h and the new state of the step processed as number k, for panel j and batch rows b0 to b1."""
    cdef Py_ssize_t L = line_of(z)
    cdef real[LF] c
    cdef real[LF] zero
    cdef Py_ssize_t q, s, at, t = step_at(&p.steps, k)
    cdef real *h
    cdef const real *y
    cdef store *row
    clear(zero, L)
    for q in range(b0, b1):
        for s in range(units_in(&p.c, j)):
            at = (j * p.c.units + s) * L
            h = work + p.h + q * p.Hs + at
            y = h
            if marked(&p.steps, k, q, ENDED):
                clear(c, L)
                y = zero
            else:
                candidate(z + ((q - b0) * LINES + s) * L, work + p.u + q * p.Hs + at, h, c)
            if out[2] is not NULL:
                row = out[2] + (t * p.B + q) * p.H + at
                store_line(row, c, p.H - at)
                if at + p.c.units * L < p.H:
                    for_writing(row + p.c.units * L)
            row = out[3] + (t * p.B + q) * p.ld + at
            store_line(row, y, p.H - at)
            if at + p.c.units * L < p.H:
                for_writing(row + p.c.units * L)
            if store is half:  # the next step reads the state as it is stored
                round_to_half(h)
            if marked(&p.steps, k + 1, q, FRESH):
                clear(h, L)


cdef void step_rows(
    const Forward *p, const Panels *w, const real *h, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1,
    const real *x, real *z, real *work, store **out
) noexcept nogil:
    """A step's r and u or its c and h, whichever w is of, for panel j and batch rows b0 to b1; the input product comes
    in z, or is computed from x."""
    cdef Py_ssize_t L = line_of(h)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t r = b0, m, first = 0
    cdef real *a
    while r < b1:
        m = row_group(b1 - r, TILES * ROWS)
        if p.chunk > 1:
            a = z + (r - b0) * LINES * L
        else:
            a = acc
            add_bias(w, j, m, a)
            add_product(w, j, 0, p.I, x + (r - b0) * p.Is, p.Is, m, a, first)
        add_product(w, j, p.I, p.H, h + r * p.Hs, p.Hs, m, a, first)
        if w.gates == 2:
            gates_cells(p, j, k, r, r + m, a, work, out)
        else:
            candidate_cells(p, j, k, r, r + m, a, work, out)
        r += m
        first += TILES


cdef void step_row(
    const Forward *p, const Panels *w, const real *h, Py_ssize_t j0, Py_ssize_t j1, Py_ssize_t k, Py_ssize_t b,
    const real *x, real *z, Py_ssize_t z_panel, real *work, store **out
) noexcept nogil:
    """`step_rows` of the panels j0 to j1 for batch row b alone, several panels at once."""
    cdef Py_ssize_t L = line_of(h)
    cdef real[ONCE * LINES * LF] acc
    cdef Py_ssize_t j = j0, n, i, step
    cdef real *a
    while j < j1:
        n = at_once(w, j, j1)
        if p.chunk > 1:
            a, step = z + j * z_panel, z_panel
        else:
            a, step = acc, LINES * L
            for i in range(n):
                add_bias(w, j + i, 1, a + i * step)
            add_row_product(w, j, n, 0, p.I, x, a, step)
        add_row_product(w, j, n, p.I, p.H, h + b * p.Hs, a, step)
        for i in range(n):
            if w.gates == 2:
                gates_cells(p, j + i, k, b, b + 1, a + i * step, work, out)
            else:
                candidate_cells(p, j + i, k, b, b + 1, a + i * step, work, out)
        j += n


cdef void forward_part(
    const Forward *p, real *work, const store *x, store **out, Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of all steps."""
    cdef Py_ssize_t b0 = 0, b1 = p.B, ru0 = 0, ru1 = p.ru.count, c0 = 0, c1 = p.c.count  # panels
    cdef Py_ssize_t k0 = 0, k, steps, j, rows, at, z_panel
    cdef real *xs
    cdef real *z_ru
    cdef real *z_c
    if p.by_rows:
        b0, b1 = share(p.B, part, parts), share(p.B, part + 1, parts)
    else:
        ru0, ru1 = share(p.ru.count, part, parts), share(p.ru.count, part + 1, parts)
        c0, c1 = share(p.c.count, part, parts), share(p.c.count, part + 1, parts)
    rows = b1 - b0
    z_panel = p.chunk * rows * LINES * p.L
    xs = work + p.x + p.chunk * b0 * p.Is
    z_ru = work + p.z + (p.ru.count + p.c.count) * p.chunk * b0 * LINES * p.L
    z_c = z_ru + p.ru.count * z_panel
    while k0 < p.steps.T:
        steps = min(p.chunk, p.steps.T - k0)
        if p.by_rows:
            load_steps(&p.steps, xs, p.Is, x, p.I, k0, b0, rows, 0, steps * rows)
        else:
            load_steps(&p.steps, xs, p.Is, x, p.I, k0, 0, rows, share(steps * rows, part, parts),
                       share(steps * rows, part + 1, parts))
            barrier(team, part, parts)
        if p.chunk > 1:
            add_input_product(&p.ru, p.I, xs, p.Is, steps * rows, z_ru, z_panel, ru0, ru1)
            add_input_product(&p.c, p.I, xs, p.Is, steps * rows, z_c, z_panel, c0, c1)
        for k in range(steps):
            at = k * rows * LINES * p.L
            if rows == 1:
                step_row(p, &p.ru, work + p.h, ru0, ru1, k0 + k, b0, xs + k * p.Is, z_ru + at, z_panel, work, out)
            else:
                for j in range(ru0, ru1):
                    step_rows(p, &p.ru, work + p.h, j, k0 + k, b0, b1, xs + k * rows * p.Is, z_ru + j * z_panel + at,
                              work, out)
            if not p.by_rows:
                barrier(team, part, parts)
            if rows == 1:
                step_row(p, &p.c, work + p.hr, c0, c1, k0 + k, b0, xs + k * p.Is, z_c + at, z_panel, work, out)
            else:
                for j in range(c0, c1):
                    step_rows(p, &p.c, work + p.hr, j, k0 + k, b0, b1, xs + k * rows * p.Is, z_c + j * z_panel + at,
                              work, out)
            if not p.by_rows:
                barrier(team, part, parts)
        k0 += steps


cdef void single_step(
    const Forward *p, const Panels *w, const real *h, real *work, const store *weights, store **out, Py_ssize_t j0,
    Py_ssize_t j1
) noexcept nogil:
    """r and u or c and h of a sequence of one step with weights that are not packed yet, for the panels j0 to j1."""
    cdef Py_ssize_t j, z_panel = p.B * LINES * p.L
    cdef real *z = work + p.z
    for j in range(j0, j1):
        add_bias(w, j, p.B, z + j * z_panel)
    add_product_once(w, weights, p.I, work + p.x, p.Is, p.B, z, z_panel, j0, j1)
    add_product_once(w, weights + p.I * w.gates * p.H, p.H, h, p.Hs, p.B, z, z_panel, j0, j1)
    for j in range(j0, j1):
        if w.gates == 2:
            gates_cells(p, j, 0, 0, p.B, z + j * z_panel, work, out)
        else:
            candidate_cells(p, j, 0, 0, p.B, z + j * z_panel, work, out)


cdef void load_states(
    const Forward *p, real *work, const store *h, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """The states that rows b0 to b1 start from; NULL stands for zeros."""
    cdef Py_ssize_t b
    for b in range(b0, b1):
        if h is not NULL:
            load_row(work + p.h + b * p.Hs, h + b * p.H, p.H)
        if h is NULL or marked(&p.steps, 0, b, FRESH):
            clear(work + p.h + b * p.Hs, p.Hs)


cdef void forward_team(
    const Forward *p, real *work, const store *x, const store *h_prev, const store *w_ru, const store *w_c,
    const store *b_ru, const store *b_c, store **out, Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef Py_ssize_t ru0 = share(p.ru.count, part, parts), ru1 = share(p.ru.count, part + 1, parts)
    cdef Py_ssize_t c0 = share(p.c.count, part, parts), c1 = share(p.c.count, part + 1, parts)
    cdef real *rows = work + part * p.apart
    load_states(p, rows, h_prev, b0, b1)
    pack_bias(&p.ru, <real *> p.ru.base, b_ru, ru0, ru1)
    pack_bias(&p.c, <real *> p.c.base, b_c, c0, c1)
    if not p.whole:
        load_steps(&p.steps, work + p.x, p.Is, x, p.I, 0, 0, p.B, b0, b1)
        barrier(team, part, parts)
        single_step(p, &p.ru, work + p.h, work, w_ru, out, ru0, ru1)
        barrier(team, part, parts)
        single_step(p, &p.c, work + p.hr, work, w_c, out, c0, c1)
    else:
        pack_panels(&p.ru, <real *> p.ru.base, w_ru, p.I, ru0, ru1)
        pack_panels(&p.c, <real *> p.c.base, w_c, p.I, c0, c1)
        barrier(team, part, parts)
        forward_part(p, rows, x, out, team, part, parts)


cdef long long forward(
    Forward *p, int threads, real *work, const store *x, const store *h_prev, const store *w_ru, const store *w_c,
    const store *b_ru, const store *b_c, store **out
) noexcept nogil:
    cdef Team team
    use_panels(p, work)
    if threads == 1:  # entering a parallel region costs even one thread
        forward_team(p, work, x, h_prev, w_ru, w_c, b_ru, b_c, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        forward_team(p, work, x, h_prev, w_ru, w_c, b_ru, b_c, out, &team, threadid(), team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def gru_cell_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, B, I, H, itemsize, False, num_threads)
    return p.total * itemsize + 64, p.threads


def block_gru_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, False, num_threads)
    return p.total * itemsize + 64, p.threads


def gru_cell(
    const store[:, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[::1] b_ru, const store[::1] b_c, store[:, ::1] r, store[:, ::1] u, store[:, ::1] c, store[:, ::1] h,
    unsigned char[::1] work, int num_threads, int ready
):
    cdef store *out[4]
    cdef Forward p = forward_of(1, x.shape[0], x.shape[1], h_prev.shape[1], 8 if store is double else 4, False,
                                num_threads)
    cdef long long waste
    out[0], out[1], out[2], out[3] = &r[0, 0], &u[0, 0], &c[0, 0], &h[0, 0]
    with nogil:
        if store is double:
            waste = forward(&p, ready, <double *> aligned(work), &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0],
                            &b_ru[0], &b_c[0], out)
        else:
            waste = forward(&p, ready, <float *> aligned(work), &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0],
                            &b_ru[0], &b_c[0], out)
    return waste


def block_gru(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[::1] b_ru, const store[::1] b_c, store[:, :, ::1] r, store[:, :, ::1] u, store[:, :, ::1] c,
    store[:, :, ::1] h, unsigned char[::1] work, Py_ssize_t seq_len_max, int num_threads, int ready
):
    cdef store *out[4]
    cdef Forward p = forward_of(seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], 8 if store is double else 4,
                                False, num_threads)
    cdef long long waste
    out[0], out[1], out[2], out[3] = &r[0, 0, 0], &u[0, 0, 0], &c[0, 0, 0], &h[0, 0, 0]
    with nogil:
        if store is double:
            waste = forward(&p, ready, <double *> aligned(work), &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0],
                            &b_ru[0], &b_c[0], out)
        else:
            waste = forward(&p, ready, <float *> aligned(work), &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0],
                            &b_ru[0], &b_c[0], out)
    return waste


# ------------------------------------------------------------------------------------------------------------ backward
cdef struct Backward:
    Steps steps  # those that are run
    Py_ssize_t T, B, I, H
    Py_ssize_t L, J  # units in a line, lines of units
    Py_ssize_t h_panels, x_panels, panel  # panels of the transposed weights; reals of one for H of its columns
    Py_ssize_t Hs, Ns  # strides in scratch of rows of h and of the gate gradients d_r, d_u, d_c of a row (t, b)
    Py_ssize_t threads
    bint whole  # all panels are there before the steps, else a single one packs what it uses
    bint by_rows  # threads split the batch, not the hidden units
    Py_ssize_t h_ru, h_c, x_ru, x_c, w_grad, d_h, d, inputs, total  # where things begin in scratch, in reals; its size


cdef Backward backward_of(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
) noexcept nogil:
    cdef Backward p
    p.steps = steps_of(T, B)
    p.T, p.B, p.I, p.H = T, B, I, H
    p.L = 64 // itemsize
    p.J = (H + p.L - 1) // p.L
    p.h_panels, p.x_panels, p.panel = plain_panels(p.J), plain_panels((I + p.L - 1) // p.L), PLAIN * p.L * H
    p.Hs, p.Ns = stride_of(H, p.L), stride_of(3 * H, p.L)
    p.whole = packs_whole(T, B, I, H, 3, itemsize, threads)
    p.by_rows = splits_rows(B, H, 3, itemsize, threads) if p.whole else B >= ALONE * threads
    p.threads = backward_threads(12.0 * B * H * (I + H), T, p.by_rows, threads)
    p.h_ru = 0
    p.h_c = p.h_ru + p.h_panels * 2 * p.panel
    p.x_ru = p.h_c + p.h_panels * p.panel
    p.x_c = p.x_ru + p.x_panels * 2 * p.panel
    p.w_grad = 0  # float16's weight gradients in float32 take the place of the panels, which are done with by then
    p.d_h = max(p.x_c + p.x_panels * p.panel, threads * 3 * p.panel)  # of a single step each thread keeps one of each
    p.d = p.d_h + B * p.Hs
    p.inputs = p.d + T * B * p.Ns
    p.total = p.inputs + weight_grad_work(I, H, 2 * H, T * B, p.L, threads)
    return p


cdef void candidate_grad_line(
    const Backward *p, const store **saved, const store *before, const store *h_grad, Py_ssize_t j, Py_ssize_t r,
    const real *carry, real *d_h, real *d
) noexcept nogil:
    """Line j of row r = t * B + b, which started from the state `before`: the carry plus the incoming gradient to d_h,
    and to d_u and d_c in row d."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[LF] u
    cdef real[LF] c
    cdef real[LF] h
    cdef real[LF] d_u
    cdef real[LF] d_c
    cdef Py_ssize_t l, at = r * p.H + j * L, n = p.H - j * L
    load_line(d_h, h_grad + at, n)
    for l in range(L):
        d_h[l] = carry[l] + d_h[l]
    load_line(u, saved[1] + at, n)
    load_line(c, saved[2] + at, n)
    load_state(h, before, j, n)
    candidate_grad(u, c, h, d_h, d_u, d_c)
    store_line(d + p.H + j * L, d_u, n)
    store_line(d + 2 * p.H + j * L, d_c, n)


cdef void gates_grad_line(
    const Backward *p, const store **saved, const store *before, Py_ssize_t j, Py_ssize_t r, const real *d_hr,
    real *d_h, real *d
) noexcept nogil:
    """Line j of row r = t * B + b, which started from the state `before`: from d_hr to d_r in row d, and to the carry
    in d_h."""
    cdef Py_ssize_t L = line_of(d)
    cdef real[LF] gate_r
    cdef real[LF] u
    cdef real[LF] h
    cdef real[LF] d_r
    cdef Py_ssize_t at = r * p.H + j * L, n = p.H - j * L
    load_line(gate_r, saved[0] + at, n)
    load_line(u, saved[1] + at, n)
    load_state(h, before, j, n)
    gates_grad(gate_r, u, h, d_hr, d_h, d_r)
    store_line(d + j * L, d_r, n)


cdef void candidate_grad_rows(
    const Backward *p, real *work, const store **saved, const store *h_prev, const store *h_grad, store *h_prev_grad,
    const real *panel, Py_ssize_t j, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """d_h of the step processed as number k, from the gate gradients of the next, and with it d_u and d_c; for k = -1
    the gradient of h_prev.  Panel j, batch rows b0 to b1."""
    cdef Py_ssize_t L = line_of(work)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t b = b0, m, first = 0, q, s, l, r, at, lines = min(<Py_ssize_t> PLAIN, p.J - j * PLAIN)
    cdef Py_ssize_t t = step_at(&p.steps, k)
    cdef real *next_d = work + p.d + step_at(&p.steps, k + 1) * p.B * p.Ns
    cdef real *carry
    cdef real *d_h
    cdef real *d
    cdef const store *before = NULL
    while b < b1:
        m = row_group(b1 - b, TILES * ROWS)
        for q in range(m):
            for s in range(lines):
                carry = acc + (q * LINES + s) * L
                d_h = work + p.d_h + (b + q) * p.Hs + (j * PLAIN + s) * L
                for l in range(L):
                    carry[l] = d_h[l]
        if k < p.T - 1:
            product(acc, m, lines, next_d + b * p.Ns, p.Ns, panel, 2 * p.H, panel + 2 * p.panel, first)
        for q in range(m):
            r = b + q
            d = work + p.d + (t * p.B + r) * p.Ns
            if k >= 0:
                before = input_row(&p.steps, h_prev, saved[3], p.H, t * p.B + r)
            for s in range(lines):
                at = j * PLAIN + s
                carry = acc + (q * LINES + s) * L
                d_h = work + p.d_h + r * p.Hs + at * L
                if marked(&p.steps, k + 1, r, FRESH):  # the next step did not see this one's state
                    clear(carry, L)
                if k < 0:
                    store_line(h_prev_grad + r * p.H + at * L, carry, p.H - at * L)
                elif marked(&p.steps, k, r, ENDED):
                    for l in range(L):
                        d_h[l] = carry[l]
                    for l in range(3):
                        clear(d + l * p.H + at * L, min(L, p.H - at * L))
                else:
                    candidate_grad_line(p, saved, before, h_grad, at, t * p.B + r, carry, d_h, d)
        b += m
        first += TILES


cdef void gates_grad_rows(
    const Backward *p, real *work, const store **saved, const store *h_prev, const real *panel, Py_ssize_t j,
    Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """d_r of the step processed as number k, from its d_c.  Panel j, batch rows b0 to b1."""
    cdef Py_ssize_t L = line_of(work)
    cdef real[TILES * TILE] acc
    cdef Py_ssize_t b = b0, m, first = 0, q, s, at, lines = min(<Py_ssize_t> PLAIN, p.J - j * PLAIN)
    cdef Py_ssize_t t = step_at(&p.steps, k)
    cdef real *d = work + p.d + t * p.B * p.Ns
    cdef const store *before
    while b < b1:
        m = row_group(b1 - b, TILES * ROWS)
        clear(acc, m * LINES * L)
        product(acc, m, lines, d + b * p.Ns + 2 * p.H, p.Ns, panel, p.H, panel + p.panel, first)
        for q in range(m):
            if not marked(&p.steps, k, b + q, ENDED):
                before = input_row(&p.steps, h_prev, saved[3], p.H, t * p.B + b + q)
                for s in range(lines):
                    at = j * PLAIN + s
                    gates_grad_line(p, saved, before, at, t * p.B + b + q, acc + (q * LINES + s) * L,
                                    work + p.d_h + (b + q) * p.Hs + at * L, d + (b + q) * p.Ns)
        b += m
        first += TILES


cdef void backward_part(
    const Backward *p, real *work, const store **saved, const store *h_prev, const store *h_grad, store *h_prev_grad,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of all steps, last step first."""
    cdef Py_ssize_t b0 = 0, b1 = p.B, j0 = 0, j1 = p.h_panels, k = p.T - 1, j
    if p.by_rows:
        b0, b1 = share(p.B, part, parts), share(p.B, part + 1, parts)
    else:
        j0, j1 = share(p.h_panels, part, parts), share(p.h_panels, part + 1, parts)
    while k >= 0:
        for j in range(j0, j1):
            candidate_grad_rows(p, work, saved, h_prev, h_grad, h_prev_grad, work + p.h_ru + j * 2 * p.panel, j, k, b0,
                                b1)
        if not p.by_rows:
            barrier(team, part, parts)
        for j in range(j0, j1):
            gates_grad_rows(p, work, saved, h_prev, work + p.h_c + j * p.panel, j, k, b0, b1)
        if not p.by_rows:
            barrier(team, part, parts)
        k -= 1
    for j in range(j0, j1):
        candidate_grad_rows(p, work, saved, h_prev, h_grad, h_prev_grad, work + p.h_ru + j * 2 * p.panel, j, k, b0, b1)


cdef void backward_single(
    const Backward *p, real *work, const store *w_ru, const store *w_c, const store **saved, const store *h_prev,
    const store *h_grad, store *x_grad, store *h_prev_grad, Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of a sequence of one step, which uses each weight once: packed where it is used."""
    cdef Py_ssize_t j, H = p.H, h0 = 0, h1 = p.h_panels, j0 = 0, j1 = p.h_panels + p.x_panels
    cdef Py_ssize_t b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef real *ru = work + p.h_ru + part * 3 * p.panel
    cdef real *c = ru + 2 * p.panel
    for j in range(p.h_panels):
        candidate_grad_rows(p, work, saved, h_prev, h_grad, h_prev_grad, ru, j, 0, b0, b1)
    if not p.by_rows:
        barrier(team, part, parts)
        h0, h1 = share(h1, part, parts), share(h1, part + 1, parts)
        j0, j1 = share(j1, part, parts), share(j1, part + 1, parts)
        b0, b1 = 0, p.B
    for j in range(h0, h1):
        pack_transposed(c, w_c + p.I * H, H, H, j)
        gates_grad_rows(p, work, saved, h_prev, c, j, 0, b0, b1)
    if not p.by_rows:
        barrier(team, part, parts)
    for j in range(j0, j1):
        if j < p.h_panels:
            pack_transposed(ru, w_ru + p.I * 2 * H, 2 * H, H, j)
            candidate_grad_rows(p, work, saved, h_prev, h_grad, h_prev_grad, ru, j, -1, b0, b1)
        else:
            pack_transposed(ru, w_ru, 2 * H, p.I, j - p.h_panels)
            pack_transposed(c, w_c, H, p.I, j - p.h_panels)
            input_grad(x_grad + b0 * p.I, p.I, work + p.d + b0 * p.Ns, p.Ns, b1 - b0, ru, 2 * H, c, H, j - p.h_panels)


cdef void backward_team(
    const Backward *p, real *work, bint weights, const store *x, const store *h_prev, const store *w_ru,
    const store *w_c, const store **saved, const store *h_grad, const store *h_last_grad, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t k, j, H = p.H, rows = p.T * p.B, w_rows = p.I + H, panels = p.h_panels + p.x_panels
    cdef real *d = work + p.d
    cdef real *w_ru_grad = work + p.w_grad
    cdef real *w_c_grad = w_ru_grad + w_rows * 2 * H
    if store is not half:
        w_ru_grad = <real *> out[2]
        w_c_grad = <real *> out[3]
    for k in range(share(p.B, part, parts), share(p.B, part + 1, parts)):
        if h_last_grad is NULL:
            clear(work + p.d_h + k * p.Hs, p.Hs)
        else:
            load_row(work + p.d_h + k * p.Hs, h_last_grad + k * H, H)
    if not p.whole:
        barrier(team, part, parts)
        backward_single(p, work, w_ru, w_c, saved, h_prev, h_grad, out[0], out[1], team, part, parts)
        barrier(team, part, parts)
    else:
        for k in range(share(panels, part, parts), share(panels, part + 1, parts)):
            if k < p.h_panels:
                pack_transposed(work + p.h_ru + k * 2 * p.panel, w_ru + p.I * 2 * H, 2 * H, H, k)
                pack_transposed(work + p.h_c + k * p.panel, w_c + p.I * H, H, H, k)
            else:
                j = k - p.h_panels
                pack_transposed(work + p.x_ru + j * 2 * p.panel, w_ru, 2 * H, p.I, j)
                pack_transposed(work + p.x_c + j * p.panel, w_c, H, p.I, j)
        barrier(team, part, parts)
        backward_part(p, work, saved, h_prev, h_grad, out[1], team, part, parts)
        barrier(team, part, parts)
        input_grads(out[0], p.I, d, p.Ns, rows, work + p.x_ru, 2 * H, work + p.x_c, H, part, parts)
    if not weights:
        for k in range(share(rows, part, parts), share(rows, part + 1, parts)):
            store_row(out[2] + k * H, d + k * p.Ns + 2 * H, H)
            store_row(out[3] + k * 2 * H, d + k * p.Ns, 2 * H)
        return
    barrier(team, part, parts)
    weight_grad(w_ru_grad, out[4], 2 * H, &p.steps, x, p.I, h_prev, saved[3], <store *> NULL, H, d, p.Ns,
                work + p.inputs, team, part, parts)
    weight_grad(w_c_grad, out[5], H, &p.steps, x, p.I, h_prev, saved[3], saved[0], H, d + 2 * H, p.Ns, work + p.inputs,
                team, part, parts)
    if store is half:
        barrier(team, part, parts)
        for k in range(share(w_rows, part, parts), share(w_rows, part + 1, parts)):
            store_row(out[2] + k * 2 * H, w_ru_grad + k * 2 * H, 2 * H)
            store_row(out[3] + k * H, w_c_grad + k * H, H)


cdef long long backward(
    const Backward *p, int threads, real *work, bint weights, const store *x, const store *h_prev, const store *w_ru,
    const store *w_c, const store **saved, const store *h_grad, const store *h_last_grad, store **out
) noexcept nogil:
    """out: x_grad, h_prev_grad and with `weights` w_ru_grad, w_c_grad, b_ru_grad, b_c_grad, else d_c, d_r and d_u."""
    cdef Team team
    if threads == 1:
        backward_team(p, work, weights, x, h_prev, w_ru, w_c, saved, h_grad, h_last_grad, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        backward_team(p, work, weights, x, h_prev, w_ru, w_c, saved, h_grad, h_last_grad, out, &team, threadid(),
                      team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def gru_cell_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(1, B, I, H, itemsize, num_threads)
    return p.inputs * itemsize + 64, p.threads


def gru_cell_vjp_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(1, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def block_gru_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(T, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def gru_cell_grad(
    const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c, const store[:, ::1] r,
    const store[:, ::1] u, const store[:, ::1] c, const store[:, ::1] d_h, store[:, ::1] d_x, store[:, ::1] d_h_prev,
    store[:, ::1] d_c_bar, store[:, ::1] d_r_bar_u_bar, unsigned char[::1] work, int num_threads, int ready
):
    cdef const store *saved[4]
    cdef store *out[4]
    cdef Backward p = backward_of(1, d_x.shape[0], d_x.shape[1], h_prev.shape[1], 8 if store is double else 4,
                                  num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2], saved[3] = &r[0, 0], &u[0, 0], &c[0, 0], &h_prev[0, 0]
    out[0], out[1], out[2], out[3] = &d_x[0, 0], &d_h_prev[0, 0], &d_c_bar[0, 0], &d_r_bar_u_bar[0, 0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, <double *> aligned(work), False, <store *> NULL, &h_prev[0, 0], &w_ru[0, 0],
                             &w_c[0, 0], saved, &d_h[0, 0], <store *> NULL, out)
        else:
            waste = backward(&p, ready, <float *> aligned(work), False, <store *> NULL, &h_prev[0, 0], &w_ru[0, 0],
                             &w_c[0, 0], saved, &d_h[0, 0], <store *> NULL, out)
    return waste


def gru_cell_vjp(
    const store[:, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[:, ::1] r, const store[:, ::1] u, const store[:, ::1] c, const store[:, ::1] d_h,
    store[:, ::1] d_x, store[:, ::1] d_h_prev, store[:, ::1] d_w_ru, store[:, ::1] d_w_c, store[::1] d_b_ru,
    store[::1] d_b_c, unsigned char[::1] work, int num_threads, int ready
):
    cdef const store *saved[4]
    cdef store *out[6]
    cdef Backward p = backward_of(1, x.shape[0], x.shape[1], h_prev.shape[1], 8 if store is double else 4, num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2], saved[3] = &r[0, 0], &u[0, 0], &c[0, 0], &h_prev[0, 0]
    out[0], out[1], out[2], out[3] = &d_x[0, 0], &d_h_prev[0, 0], &d_w_ru[0, 0], &d_w_c[0, 0]
    out[4], out[5] = &d_b_ru[0], &d_b_c[0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, <double *> aligned(work), True, &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0,
                             0], saved, &d_h[0, 0], <store *> NULL, out)
        else:
            waste = backward(&p, ready, <float *> aligned(work), True, &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0],
                             saved, &d_h[0, 0], <store *> NULL, out)
    return waste


def block_gru_grad(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[:, :, ::1] r, const store[:, :, ::1] u, const store[:, :, ::1] c, const store[:, :, ::1] h,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] h_prev_grad, store[:, ::1] w_ru_grad,
    store[:, ::1] w_c_grad, store[::1] b_ru_grad, store[::1] b_c_grad, unsigned char[::1] work, Py_ssize_t seq_len_max,
    int num_threads, int ready
):
    cdef const store *saved[4]
    cdef store *out[6]
    cdef Backward p = backward_of(seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], 8 if store is double else 4,
                                  num_threads)
    cdef long long waste
    saved[0], saved[1], saved[2], saved[3] = &r[0, 0, 0], &u[0, 0, 0], &c[0, 0, 0], &h[0, 0, 0]
    out[0], out[1], out[2], out[3] = &x_grad[0, 0, 0], &h_prev_grad[0, 0], &w_ru_grad[0, 0], &w_c_grad[0, 0]
    out[4], out[5] = &b_ru_grad[0], &b_c_grad[0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, <double *> aligned(work), True, &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0,
                             0], saved, &h_grad[0, 0, 0], <store *> NULL, out)
        else:
            waste = backward(&p, ready, <float *> aligned(work), True, &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0,
                             0], saved, &h_grad[0, 0, 0], <store *> NULL, out)
    return waste


# --------------------------------------------------------------------------------------------------------------- layers
cdef void run_layer_part(
    const Forward *p, real *work, const store *x, const store *h, store *h_last, store **out,
    Team *team, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """What each thread of the team does."""
    cdef Py_ssize_t b, b0 = share(p.B, part, parts), b1 = share(p.B, part + 1, parts)
    cdef real *rows = work + part * p.apart
    load_states(p, rows, h, b0, b1)
    barrier(team, part, parts)
    forward_part(p, rows, x, out, team, part, parts)
    for b in range(b0, b1):
        store_row(h_last + b * p.H, rows + p.h + b * p.Hs, p.H)


cdef long long run_layer(
    const Forward *p, int threads, real *work, const store *x, const store *h, store *h_last, store **out
) noexcept nogil:
    cdef Team team
    if threads == 1:
        run_layer_part(p, work, x, h, h_last, out, NULL, 0, 1)
        return 0
    gather(&team)
    with nogil, parallel(num_threads=threads):
        join(&team)
        run_layer_part(p, work, x, h, h_last, out, &team, threadid(), team_size())
        barrier(&team, threadid(), team_size())
    return lost(&team, threads)


def gru_pack_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(1, 1, I, H, itemsize, True, 1)
    return packed_size(&p) * itemsize + 64, 1


def gru_pack(
    const store[:, ::1] w_ru, const store[:, ::1] w_c, const store[::1] b_ru, const store[::1] b_c,
    unsigned char[::1] packed
):
    """A layer's weights as its kernel reads them."""
    cdef Py_ssize_t H = w_c.shape[1]
    cdef Forward p = forward_of(1, 1, w_c.shape[0] - H, H, 8 if store is double else 4, True, 1)
    if store is double:
        use_panels(&p, <double *> aligned(packed))
        pack_all(&p, <double *> p.ru.base, <double *> p.c.base, &w_ru[0, 0], &w_c[0, 0], &b_ru[0], &b_c[0])
    else:
        use_panels(&p, <float *> aligned(packed))
        pack_all(&p, <float *> p.ru.base, <float *> p.c.base, &w_ru[0, 0], &w_c[0, 0], &b_ru[0], &b_c[0])


cdef void pack_all(
    const Forward *p, real *ru, real *c, const store *w_ru, const store *w_c, const store *b_ru, const store *b_c
) noexcept nogil:
    pack_panels(&p.ru, ru, w_ru, p.I, 0, p.ru.count)
    pack_bias(&p.ru, ru, b_ru, 0, p.ru.count)
    pack_panels(&p.c, c, w_c, p.I, 0, p.c.count)
    pack_bias(&p.c, c, b_c, 0, p.c.count)


def gru_layer_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, True, num_threads)
    return p.total * itemsize + 64, p.threads


def gru_layer(
    const store[:, :, ::1] x, const store[:, ::1] h, unsigned char[::1] packed, store[:, :, :] y,
    store[:, :, :, ::1] saved, store[:, ::1] h_last, const unsigned char[:, ::1] marks, bint reverse,
    unsigned char[::1] work, int num_threads, int ready
):
    """A layer's h to y, whose rows may be part of longer ones; where `saved` is not None, r, u and c to it."""
    cdef store *out[4]
    cdef int k
    cdef Forward p = forward_of(x.shape[0], x.shape[1], x.shape[2], h.shape[1], 8 if store is double else 4, True,
                                num_threads)
    cdef long long waste
    for k in range(3):
        out[k] = NULL if saved is None else &saved[k, 0, 0, 0]
    out[3] = &y[0, 0, 0]
    p.ld = y.strides[1] // sizeof(store)
    p.steps.reverse = reverse
    if marks is not None:
        p.steps.marks = &marks[0, 0]
    with nogil:
        if store is double:
            use_panels(&p, <double *> aligned(packed))
            waste = run_layer(&p, ready, <double *> aligned(work), &x[0, 0, 0], &h[0, 0], &h_last[0, 0], out)
        else:
            use_panels(&p, <float *> aligned(packed))
            waste = run_layer(&p, ready, <float *> aligned(work), &x[0, 0, 0], &h[0, 0], &h_last[0, 0], out)
    return waste


def gru_layer_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = backward_of(T, B, I, H, itemsize, num_threads)
    return p.total * itemsize + 64, p.threads


def gru_layer_grad(
    const store[:, :, ::1] x, const store[:, ::1] h, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[:, :, :, ::1] saved, const store[:, :, ::1] y, const store[:, :, ::1] y_grad,
    const store[:, ::1] h_last_grad, store[:, :, ::1] x_grad, store[:, ::1] h_grad, store[:, ::1] w_ru_grad,
    store[:, ::1] w_c_grad, store[::1] b_ru_grad, store[::1] b_c_grad, const unsigned char[:, ::1] marks,
    bint reverse, unsigned char[::1] work, int num_threads, int ready
):
    cdef const store *states[4]
    cdef store *out[6]
    cdef int k
    cdef Backward p = backward_of(x.shape[0], x.shape[1], x.shape[2], h.shape[1], 8 if store is double else 4,
                                  num_threads)
    cdef long long waste
    for k in range(3):
        states[k] = &saved[k, 0, 0, 0]
    states[3] = &y[0, 0, 0]
    out[0], out[1], out[2], out[3] = &x_grad[0, 0, 0], &h_grad[0, 0], &w_ru_grad[0, 0], &w_c_grad[0, 0]
    out[4], out[5] = &b_ru_grad[0], &b_c_grad[0]
    p.steps.reverse = reverse
    if marks is not None:
        p.steps.marks = &marks[0, 0]
    with nogil:
        if store is double:
            waste = backward(&p, ready, <double *> aligned(work), True, &x[0, 0, 0], &h[0, 0], &w_ru[0, 0], &w_c[0, 0],
                             states, &y_grad[0, 0, 0], &h_last_grad[0, 0], out)
        else:
            waste = backward(&p, ready, <float *> aligned(work), True, &x[0, 0, 0], &h[0, 0], &w_ru[0, 0], &w_c[0, 0],
                             states, &y_grad[0, 0, 0], &h_last_grad[0, 0], out)
    return waste


# -------------------------------------------------------------------------------------------------------------- streams
cdef long long run_stream(
    const Forward *p, int ready, real *work, const store *x, store *y, const store **first, store **last
) noexcept nogil:
    """All steps on so many threads, from the state `first` to `last`; NULL stands for zeros."""
    cdef store *out[4]
    out[0], out[1], out[2], out[3] = NULL, NULL, NULL, y
    return run_layer(p, ready, work, x, first[0], last[0], out)


cdef long long stream_float(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Forward *> plan, ready, <float *> work, <const float *> x, <float *> y,
                      <const float **> first, <float **> last)


cdef long long stream_double(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Forward *> plan, ready, <double *> work, <const double *> x, <double *> y,
                      <const double **> first, <double **> last)


cdef long long stream_half(
    const void *plan, int ready, void *work, const void *x, void *y, const void **first, void **last
) noexcept nogil:
    return run_stream(<const Forward *> plan, ready, <float *> work, <const half *> x, <half *> y,
                      <const half **> first, <half **> last)


def gru_stream_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Forward p = forward_of(T, B, I, H, itemsize, True, num_threads)
    return p.total * itemsize + 64, p.threads


def gru_stream(
    const store[::1] b_ru, unsigned char[::1] packed, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H,
    int num_threads
):
    """What `_stream` calls for T steps, and the plan that it passes to it."""
    cdef Forward p = forward_of(T, B, I, H, 8 if store is double else 4, True, num_threads)
    if store is double:
        use_panels(&p, <double *> aligned(packed))
        run = PyCapsule_New(<void *> stream_double, NULL, NULL)
    elif store is half:
        use_panels(&p, <float *> aligned(packed))
        run = PyCapsule_New(<void *> stream_half, NULL, NULL)
    else:
        use_panels(&p, <float *> aligned(packed))
        run = PyCapsule_New(<void *> stream_float, NULL, NULL)
    return run, (<char *> &p)[:sizeof(Forward)]
