"""GRU block cell and sequence, forward and backward.

One step, cut into lines of units; the reset gate acts before the product, and u near 1 keeps the old state:

    r = sigmoid([x, h_prev] @ w_r + b_r)           u = sigmoid([x, h_prev] @ w_u + b_u)
    c = tanh([x, h_prev * r] @ w_c + b_c)          h = u * (h_prev - c) + c

`gates` and `candidate` compute that for one line of one row on the tile's accumulators and `candidate_grad` and
`reset_grad` its gradient; all the rest brings them their operands.  Work is cut into *pairs* of lines of units, so that
the candidate's panel fills the tile.  A sequence splits its work over batch rows where there are enough of them
(threads never meet), else over pairs (threads meet twice a step, when h_prev * r and h are complete).  A single step
packs each panel where it is used.
"""
from cython.parallel cimport parallel, prange, threadid

from activations cimport sigmoid, tanh
from gradients cimport PLAIN
from half cimport half
from real cimport real
from team cimport share, team_barrier, team_size
from tile cimport (
    BLOCK, LF, LINES, TILE, line_of, load_line, load_row, pack_line, product, row_group, store, store_line
)


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


# ------------------------------------------------------------------------------------------------------------- forward
cdef struct Forward:
    Py_ssize_t T, B, I, H  # T: the steps that are run
    Py_ssize_t L, J, P  # units in a line, lines of units, pairs of lines
    Py_ssize_t Is, Hs  # strides of rows of x and h in scratch: whole lines, off the powers of two
    Py_ssize_t chunk  # steps whose x products are computed at once; 1: they are part of the step
    Py_ssize_t threads
    bint by_rows  # threads split the batch, not the hidden units
    Py_ssize_t ru, pair  # reals of one pair's part for r and u; of all that is packed for a pair
    Py_ssize_t pairs, h, hr, u, x, z, total  # where things begin in scratch, in reals; its size


cdef Forward forward_of(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
) noexcept nogil:
    cdef Forward p
    cdef double step = 6.0 * B * H * (I + H)  # floating-point operations
    p.T, p.B, p.I, p.H = T, B, I, H
    p.L = 64 // itemsize
    p.J = (H + p.L - 1) // p.L
    p.P = (p.J + PLAIN - 1) // PLAIN
    p.Is = (I + p.L - 1) // p.L * p.L + p.L
    p.Hs = p.J * p.L + p.L
    p.by_rows = T > 1 and (B >= 16 * threads or (B >= 4 * threads and 3 * H * H * itemsize <= 1 << 20))
    if step * T < 1e6 or (not p.by_rows and (p.P < threads or (T > 1 and step < 2e5))):
        threads = 1
    p.threads = threads
    p.chunk = max(<Py_ssize_t> 1, min(T, 96 // (B // threads if p.by_rows else B)))
    p.ru = (I + H + 1) * LINES * p.L
    p.pair = p.ru + (I + H + 1) * PLAIN * p.L
    p.pairs = 0
    p.h = p.pair * (p.P if T > 1 else threads)
    p.hr = p.h + B * p.Hs
    p.u = p.hr + B * p.Hs
    p.x = p.u + B * p.Hs
    p.z = p.x + p.chunk * B * p.Is
    p.total = p.z + (2 * p.chunk * B * p.P * LINES * p.L if p.chunk > 1 else 0)
    return p


cdef inline Py_ssize_t lines_of_pair(const Forward *p, Py_ssize_t j) noexcept nogil:
    """Two, but for the last pair, which may be one."""
    return min(<Py_ssize_t> PLAIN, p.J - j * PLAIN)


cdef void pack_panel(
    const Forward *p, real *panel, Py_ssize_t j, Py_ssize_t gates, const store *w, const store *b
) noexcept nogil:
    """What pair j needs for its next product: the columns of w (for each line all gates side by side) and the bias."""
    cdef Py_ssize_t g, column, n, lines = gates * lines_of_pair(p, j)
    for g in range(lines):
        column = (j * PLAIN + g // gates) * p.L
        n = p.H - column
        column += g % gates * p.H
        pack_line(panel, lines, g, w + column, gates * p.H, n, p.I, BLOCK)
        pack_line(panel + p.I * lines * p.L, lines, g, w + p.I * gates * p.H + column, gates * p.H, n, p.H, BLOCK)
        load_line(panel + ((p.I + p.H) * lines + g) * p.L, b + column, n)


cdef void input_rows(
    const Forward *p, const real *panel, Py_ssize_t lines, const real *x, Py_ssize_t rows, real *z
) noexcept nogil:
    """z := b + x @ w_x for a panel and `rows` rows."""
    cdef Py_ssize_t r = 0, m, q, l
    cdef const real *bias = panel + (p.I + p.H) * lines * p.L
    while r < rows:
        m = row_group(rows - r)
        for q in range(r, r + m):
            for l in range(lines * p.L):
                z[q * LINES * p.L + l] = bias[l]
        product(z + r * LINES * p.L, m, lines, x + r * p.Is, p.Is, 1, panel, p.I, BLOCK)
        r += m


cdef void gates_rows(
    const Forward *p, const real *panel, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b0, Py_ssize_t b1, const real *x,
    real *z, real *work, store **out
) noexcept nogil:
    """Step t's r and u of pair j, batch rows b0 to b1; the input product comes in z, or is computed from x."""
    cdef real[LF] gate_r
    cdef real[TILE] acc
    cdef Py_ssize_t r = b0, m, q, s, at, lines = 2 * lines_of_pair(p, j)
    cdef real *a
    cdef real *h_prev = work + p.h
    cdef real *u
    while r < b1:
        m = row_group(b1 - r)
        if p.chunk > 1:
            a = z + (r - b0) * LINES * p.L
        else:
            a = acc
            input_rows(p, panel, lines, x + (r - b0) * p.Is, m, a)
        product(a, m, lines, h_prev + r * p.Hs, p.Hs, 1, panel + p.I * lines * p.L, p.H, BLOCK)
        for q in range(r, r + m):
            for s in range(lines // 2):
                at = (j * PLAIN + s) * p.L
                u = work + p.u + q * p.Hs + at
                gates(a + ((q - r) * LINES + 2 * s) * p.L, h_prev + q * p.Hs + at, gate_r, u,
                      work + p.hr + q * p.Hs + at)
                store_line(out[0] + (t * p.B + q) * p.H + at, gate_r, p.H - at)
                store_line(out[1] + (t * p.B + q) * p.H + at, u, p.H - at)
        r += m


cdef void candidate_rows(
    const Forward *p, const real *panel, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b0, Py_ssize_t b1, const real *x,
    real *z, real *work, store **out
) noexcept nogil:
    """Step t's c and h of pair j, batch rows b0 to b1; the input product comes in z, or is computed from x."""
    cdef real[LF] c
    cdef real[TILE] acc
    cdef Py_ssize_t r = b0, m, q, s, at, lines = lines_of_pair(p, j)
    cdef real *a
    cdef real *h
    while r < b1:
        m = row_group(b1 - r)
        if p.chunk > 1:
            a = z + (r - b0) * LINES * p.L
        else:
            a = acc
            input_rows(p, panel, lines, x + (r - b0) * p.Is, m, a)
        product(a, m, lines, work + p.hr + r * p.Hs, p.Hs, 1, panel + p.I * lines * p.L, p.H, BLOCK)
        for q in range(r, r + m):
            for s in range(lines):
                at = (j * PLAIN + s) * p.L
                h = work + p.h + q * p.Hs + at
                candidate(a + ((q - r) * LINES + s) * p.L, work + p.u + q * p.Hs + at, h, c)
                store_line(out[2] + (t * p.B + q) * p.H + at, c, p.H - at)
                store_line(out[3] + (t * p.B + q) * p.H + at, h, p.H - at)
                if store is half:  # the next step reads the state as it was written
                    load_line(h, out[3] + (t * p.B + q) * p.H + at, p.H - at)
        r += m


cdef void forward_part(
    const Forward *p, real *work, const store *x, store **out, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """One thread's part of all steps."""
    cdef Py_ssize_t b0 = 0, b1 = p.B, j0 = 0, j1 = p.P, t0 = 0, t, steps, r, j, rows, z_row = LINES * p.L
    cdef real *xs
    cdef real *z_ru
    cdef real *z_c
    if p.by_rows:
        b0, b1 = share(p.B, part, parts), share(p.B, part + 1, parts)
    else:
        j0, j1 = share(p.P, part, parts), share(p.P, part + 1, parts)
    rows = b1 - b0
    xs = work + p.x + p.chunk * b0 * p.Is
    z_ru = work + p.z + 2 * p.chunk * b0 * p.P * z_row
    z_c = z_ru + p.chunk * rows * p.P * z_row
    while t0 < p.T:
        steps = min(p.chunk, p.T - t0)
        if p.by_rows:
            for t in range(steps):
                for r in range(rows):
                    load_row(xs + (t * rows + r) * p.Is, x + ((t0 + t) * p.B + b0 + r) * p.I, p.I)
        else:
            for r in range(share(steps * rows, part, parts), share(steps * rows, part + 1, parts)):
                load_row(xs + r * p.Is, x + (t0 * p.B + r) * p.I, p.I)
            team_barrier()
        if p.chunk > 1:
            for j in range(j0, j1):
                input_rows(p, work + p.pairs + j * p.pair, 2 * lines_of_pair(p, j), xs, steps * rows,
                           z_ru + j * p.chunk * rows * z_row)
                input_rows(p, work + p.pairs + j * p.pair + p.ru, lines_of_pair(p, j), xs, steps * rows,
                           z_c + j * p.chunk * rows * z_row)
        for t in range(steps):
            for j in range(j0, j1):
                gates_rows(p, work + p.pairs + j * p.pair, j, t0 + t, b0, b1, xs + t * rows * p.Is,
                           z_ru + (j * p.chunk + t) * rows * z_row, work, out)
            if not p.by_rows:
                team_barrier()
            for j in range(j0, j1):
                candidate_rows(p, work + p.pairs + j * p.pair + p.ru, j, t0 + t, b0, b1, xs + t * rows * p.Is,
                               z_c + (j * p.chunk + t) * rows * z_row, work, out)
            if not p.by_rows:
                team_barrier()
        t0 += steps


cdef void single_step_gates(
    const Forward *p, real *work, const store *w_ru, const store *b_ru, store **out, Py_ssize_t j, Py_ssize_t thread
) noexcept nogil:
    """r and u of pair j of a single step: the panel is packed in the thread's own cache and used at once."""
    cdef real *panel = work + p.pairs + thread * p.pair
    pack_panel(p, panel, j, 2, w_ru, b_ru)
    gates_rows(p, panel, j, 0, 0, p.B, work + p.x, <real *> NULL, work, out)


cdef void single_step_candidate(
    const Forward *p, real *work, const store *w_c, const store *b_c, store **out, Py_ssize_t j, Py_ssize_t thread
) noexcept nogil:
    """c and h of pair j of a single step."""
    cdef real *panel = work + p.pairs + thread * p.pair
    pack_panel(p, panel, j, 1, w_c, b_c)
    candidate_rows(p, panel, j, 0, 0, p.B, work + p.x, <real *> NULL, work, out)


cdef void forward(
    const Forward *p, real *work, const store *x, const store *h_prev, const store *w_ru, const store *w_c,
    const store *b_ru, const store *b_c, store **out
) noexcept nogil:
    cdef Py_ssize_t r, j
    with nogil, parallel(num_threads=p.threads):
        for r in prange(p.B, schedule="static"):
            load_row(work + p.h + r * p.Hs, h_prev + r * p.H, p.H)
            if p.T == 1:
                load_row(work + p.x + r * p.Is, x + r * p.I, p.I)
        if p.T == 1:
            team_barrier()
            for j in prange(p.P, schedule="static"):
                single_step_gates(p, work, w_ru, b_ru, out, j, threadid())
            team_barrier()
            for j in prange(p.P, schedule="static"):
                single_step_candidate(p, work, w_c, b_c, out, j, threadid())
        else:
            for j in prange(p.P, schedule="static"):
                pack_panel(p, work + p.pairs + j * p.pair, j, 2, w_ru, b_ru)
                pack_panel(p, work + p.pairs + j * p.pair + p.ru, j, 1, w_c, b_c)
            team_barrier()
            forward_part(p, work, x, out, threadid(), team_size())


cdef void *aligned(unsigned char[::1] work) noexcept nogil:
    return <void *> ((<size_t> &work[0] + 63) & ~<size_t> 63)


def gru_cell_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return forward_of(1, B, I, H, itemsize, num_threads).total * itemsize + 64


def block_gru_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return forward_of(T, B, I, H, itemsize, num_threads).total * itemsize + 64


def gru_cell(
    const store[:, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[::1] b_ru, const store[::1] b_c, store[:, ::1] r, store[:, ::1] u, store[:, ::1] c, store[:, ::1] h,
    unsigned char[::1] work, int num_threads
):
    cdef store *out[4]
    cdef Forward p = forward_of(1, x.shape[0], x.shape[1], h_prev.shape[1], 8 if store is double else 4, num_threads)
    out[0], out[1], out[2], out[3] = &r[0, 0], &u[0, 0], &c[0, 0], &h[0, 0]
    with nogil:
        if store is double:
            forward(&p, <double *> aligned(work), &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0], &b_ru[0], &b_c[0],
                    out)
        else:
            forward(&p, <float *> aligned(work), &x[0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0], &b_ru[0], &b_c[0],
                    out)


def block_gru(
    const store[:, :, ::1] x, const store[:, ::1] h_prev, const store[:, ::1] w_ru, const store[:, ::1] w_c,
    const store[::1] b_ru, const store[::1] b_c, store[:, :, ::1] r, store[:, :, ::1] u, store[:, :, ::1] c,
    store[:, :, ::1] h, unsigned char[::1] work, Py_ssize_t n, int num_threads
):
    cdef store *out[4]
    cdef Forward p = forward_of(n, x.shape[1], x.shape[2], h_prev.shape[1], 8 if store is double else 4, num_threads)
    out[0], out[1], out[2], out[3] = &r[0, 0, 0], &u[0, 0, 0], &c[0, 0, 0], &h[0, 0, 0]
    with nogil:
        if store is double:
            forward(&p, <double *> aligned(work), &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0], &b_ru[0],
                    &b_c[0], out)
        else:
            forward(&p, <float *> aligned(work), &x[0, 0, 0], &h_prev[0, 0], &w_ru[0, 0], &w_c[0, 0], &b_ru[0],
                    &b_c[0], out)
