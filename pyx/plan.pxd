"""How the work of a call is divided into parts, and where everything is in scratch memory, for the passes over cells;
`dense.pxd` has the plan of a dense layer.

Each thread has one part of the work.  If there are enough batch rows, the parts are rows, and no part has to wait for
another one.  Otherwise they are hidden units, and each product of a step needs the results of all parts of the product
before.  A call may have fewer parts than its plan was made for, but never more.
"""
from caches cimport outgrow_l2
from cell cimport cell
from cells cimport Gru, Lstm, ResetAfter
from gradients cimport PLAIN, backward_threads, plain_panels, tiles_of
from integer cimport in_integers, stride_of_codes
from panels cimport (
    MATRICES, THREAD_GAP, Panels, chunk_of, forward_threads, join_gates, keep_apart, packs_all, panels_of, splits_rows,
    stride_of, take
)
from real cimport real
from steps cimport Layout, Slot, Steps, layout_of, size_of_slots, steps_of, taking_part, use_marks
from team cimport share
from tile cimport LINES, ROW_BLOCK, ROWS

cdef enum:
    PRODUCTS = 2  # in a step, at most
    PEEPHOLES = 3
    ROWS_AHEAD = 16  # so many rows further on, where a line of one row after the other is used, no cache fetches
    ROWS_ALONE = 32  # of a part, from which on a GRU's single step backward splits rows; each part packs all weights


cdef inline Py_ssize_t gates_of(const cell *c) noexcept nogil:
    return c.gates[0] + c.gates[1]


cdef inline bint projects(const cell *c) noexcept nogil:
    """Whether h is a product of its own, of a matrix that has no rows for x and no bias."""
    if cell is Lstm:
        return c.P > 0
    else:
        return False


cdef inline Py_ssize_t size_of_h(const cell *c, Py_ssize_t H) noexcept nogil:
    if cell is Lstm:
        return c.P if c.P > 0 else H
    else:
        return H


cdef inline int products_of(const cell *c) noexcept nogil:
    """Of a step: each needs the results of the one before."""
    return 2 if cell is Gru or projects(c) else 1


cdef inline int matrices_of(const cell *c) noexcept nogil:
    return 2 if cell is Gru or cell is ResetAfter or projects(c) else 1


cdef inline Py_ssize_t recurrent_weights(const cell *c, Py_ssize_t H) noexcept nogil:
    """How many weights a step multiplies with its states."""
    cdef Py_ssize_t P = size_of_h(c, H)
    return gates_of(c) * H * P + (H * P if projects(c) else 0)


cdef inline Py_ssize_t columns_of(const cell *c) noexcept nogil:
    """Of a row of gradients d, in units of H: one for each gate, and d_hc.  Behind them is d_h of a projection."""
    return gates_of(c) + (1 if cell is ResetAfter else 0)


cdef inline int saved_of(const cell *c) noexcept nogil:
    """How many outputs of a step the tape of a layer has beside h."""
    return 6 if cell is Lstm else 4 if cell is ResetAfter else 3 if cell is Gru else 0


# ------------------------------------------------------------------------------------------------------------- forward
cdef struct Forward:
    Steps steps  # those that are run
    Py_ssize_t B, I, H
    Py_ssize_t P  # of the numbers in a row of h: H, or those of a projection
    Py_ssize_t L  # units in a line
    Py_ssize_t Is, Hs, Ps  # strides of rows of x, of H and of P in scratch
    Py_ssize_t[PRODUCTS] As  # and of rows of h, of the GRU's h_prev * r or of m, as each product reads them
    Layout x_layout, y_layout  # of x and the output h
    Py_ssize_t chunk  # steps whose x products are computed at once; 1: they are part of the step
    Py_ssize_t threads  # that are of use
    bint packed  # the weights are packed already
    bint packs_all  # all panels are there before the steps, else a single step packs what it uses
    bint by_rows  # parts are of the batch, not of the hidden units
    Py_ssize_t thread_gap  # reals by which a part's rows in scratch are further on than the last one's
    Panels[PRODUCTS] w
    void *peep  # the three peepholes of each line, behind the panels
    Py_ssize_t panels  # reals of all panels and of the peepholes
    # Where rows begin in scratch: h, that of every other step, the LSTM's cs, m = o * co, which is projected; or for
    # the GRU h, h_prev * r, u.
    Py_ssize_t h, h_odd, cs, m, hr, u
    Py_ssize_t x, z, slots, total  # where rows of x, rows of z and the slots begin, and the size of scratch
    Py_ssize_t z_panels  # for which z has room
    Py_ssize_t[PRODUCTS] codes  # where rows of codes of these begin, for products in integers


cdef struct Part:
    Py_ssize_t number
    Py_ssize_t b0, b1  # slots of batch rows
    Py_ssize_t[PRODUCTS] j0, j1  # panels of each product
    Py_ssize_t shift  # of its rows in scratch


cdef inline Forward forward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint packed,
    Py_ssize_t threads
) noexcept nogil:
    """The plan of a forward pass.  If the weights are `packed` already, scratch has no room for them."""
    cdef Forward p
    cdef Py_ssize_t gates = gates_of(c), P = size_of_h(c, H), recurrent = recurrent_weights(c, H), rows, n
    cdef Py_ssize_t weights = gates * H * I + recurrent
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout, p.y_layout = layout_of(B, I), layout_of(B, P)
    p.L = 64 // itemsize
    p.packed = packed
    p.packs_all = packed or packs_all(T, B, weights * itemsize, threads)
    p.w[0] = panels_of(p.packs_all, I, P, H, p.L, c.gates[0] if cell is Gru else gates, c.narrow)
    if cell is ResetAfter:
        keep_apart(&p.w[0], c.gates[0])
    p.w[0].transposed = c.transposed
    if p.packs_all:
        join_gates(&p.w[0])
    p.panels = p.w[0].size * p.w[0].count
    if cell is Lstm:
        for n in range(gates):
            p.w[0].column[n] = c.column[n + c.coupled]
        p.panels += PEEPHOLES * p.w[0].J * p.L
    p.w[1].count = p.w[1].size = 0
    if cell is Gru:
        p.w[1] = panels_of(p.packs_all, I, H, H, p.L, c.gates[1], c.narrow)
    elif projects(c):
        p.w[1] = panels_of(p.packs_all, 0, H, P, p.L, 1, c.narrow)
        p.w[1].transposed = c.transposed
    p.panels += p.w[1].size * p.w[1].count
    p.z_panels = max(p.w[0].count, p.w[1].count) if projects(c) else p.w[0].count + p.w[1].count
    p.Is, p.Hs, p.Ps = stride_of(I, p.L), stride_of(H, p.L), stride_of(P, p.L)
    p.As[0], p.As[1] = p.Ps, p.Hs
    if in_integers(c.narrow):
        p.Is = stride_of_codes(c.narrow, I)
        p.As[0], p.As[1] = stride_of_codes(c.narrow, P), stride_of_codes(c.narrow, H)
    p.by_rows = p.packs_all and splits_rows(B, recurrent * (1 if in_integers(c.narrow) else itemsize), threads)
    p.threads = forward_threads(T, B, weights, p.w[0].count, p.by_rows, p.packs_all, threads)
    p.chunk = chunk_of(T, B, p.by_rows, p.threads)
    p.w[0].fetches = p.w[1].fetches = outgrow_l2(recurrent * itemsize, 1 if p.by_rows else p.threads)
    p.thread_gap = max(THREAD_GAP * p.L, ROWS_AHEAD * max(p.Hs, p.Ps)) if p.by_rows and p.threads > 1 else 0
    p.total = 0 if packed else p.panels
    rows = B * p.Ps + p.threads * p.thread_gap
    p.h = take(&p.total, rows)
    p.h_odd = p.h if cell is Gru or projects(c) else take(&p.total, rows)
    rows = B * p.Hs + p.threads * p.thread_gap
    if cell is Lstm:
        p.cs = take(&p.total, rows)
        p.m = take(&p.total, rows) if projects(c) else 0
    elif cell is Gru:
        p.hr = take(&p.total, rows)
        p.u = take(&p.total, rows)
    p.x = take(&p.total, p.chunk * B * p.Is + p.threads * p.thread_gap)
    for n in range(PRODUCTS):
        p.codes[n] = p.total
        if in_integers(c.narrow) and (n == 1 or projects(c)):
            take(&p.total, (B if p.by_rows else p.threads * B) * p.As[n] + p.threads * p.thread_gap)
    p.z = take(&p.total, p.threads * p.thread_gap)
    if p.chunk > 1 or not p.packs_all:
        take(&p.total, p.z_panels * p.chunk * B * LINES * p.L)
    p.slots = take(&p.total, size_of_slots(B, p.L))
    return p


cdef inline bint stores_rows(const Forward *p) noexcept nogil:
    """Whether h is stored in whole rows after a step, not line by line: while a thread writes a line of one row after
    the other, its cache fetches that of the rows that come next, and these may be another thread's."""
    return p.thread_gap > 0 and p.steps.marks is NULL


cdef inline void take_marks(Forward *p, const unsigned char *marks, void *work, Py_ssize_t parts) noexcept nogil:
    """Say where rows end or start anew, for a pass of so many parts."""
    use_marks(&p.steps, marks, <Slot *> (<char *> work + p.slots * (64 // p.L)), parts if p.by_rows else 1)


cdef inline void use_panels(Forward *p, void *panels) noexcept nogil:
    """Say where the packed weights are, or will be."""
    cdef Py_ssize_t itemsize = 64 // p.L
    cdef char *second = <char *> panels + p.w[0].size * p.w[0].count * itemsize
    p.w[0].base, p.w[1].base = panels, second
    p.peep = second + p.w[1].size * p.w[1].count * itemsize


cdef inline Part part_of(const Forward *p, Py_ssize_t number, Py_ssize_t parts) noexcept nogil:
    cdef Part part
    cdef int n
    part.number, part.shift, part.b0, part.b1 = number, number * p.thread_gap, 0, p.B
    for n in range(PRODUCTS):
        part.j0[n], part.j1[n] = 0, p.w[n].count
    if parts == 1:
        return part
    if p.by_rows:
        part.b0, part.b1 = share(p.B, number, parts), share(p.B, number + 1, parts)
    else:
        for n in range(PRODUCTS):
            part.j0[n], part.j1[n] = share(p.w[n].count, number, parts), share(p.w[n].count, number + 1, parts)
    return part


cdef inline Py_ssize_t end_of_chunk(const Forward *p, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1) noexcept nogil:
    """How far a chunk goes that begins with the step processed as number k: as many rows as have room."""
    cdef Py_ssize_t left = p.chunk * (b1 - b0), end = min(k + p.chunk, p.steps.T)
    if p.steps.slots is NULL or p.chunk == 1:
        return end
    end = k
    while end < p.steps.T:
        left -= taking_part(&p.steps, end, b0, b1) - b0
        if left < 0:
            break
        end += 1
    return end


cdef inline real *h_before(const Forward *p, real *rows, Py_ssize_t k) noexcept nogil:
    """Where h is before the step processed as number k, and after number k - 1."""
    return rows + (p.h_odd if k % 2 else p.h)


cdef inline real *x_of(const Forward *p, real *work, const Part *part) noexcept nogil:
    """Where a part keeps the x of a chunk of steps."""
    return work + part.shift + p.x + p.chunk * part.b0 * p.Is


cdef inline real *codes_of(const Forward *p, real *work, const Part *part, int n) noexcept nogil:
    """Where a part has rows of codes of all rows of h that product n reads, the first one that of slot 0."""
    return work + part.shift + p.codes[n] + (0 if p.by_rows else part.number * p.B * p.As[n])


cdef inline real *z_of(const Forward *p, real *work, const Part *part, int n) noexcept nogil:
    """Where a part keeps product n of x and the weights for a chunk of steps, panel after panel."""
    cdef Py_ssize_t row = p.chunk * LINES * p.L
    work += part.shift + p.z + p.z_panels * part.b0 * row
    return work + p.w[0].count * (part.b1 - part.b0) * row if n else work


# ------------------------------------------------------------------------------------------------------------ backward
cdef struct Backward:
    Steps steps  # those that are run
    Layout x_layout, h_layout, cs_layout  # of x, the output h, and cs
    Layout d_y_layout, d_x_layout  # of the incoming gradient of h, and of x_grad
    Py_ssize_t B, I, H
    Py_ssize_t P  # as in Forward
    Py_ssize_t L, J, JP  # units in a line, lines of H, lines of P
    Py_ssize_t Hs, Ps, Ns  # strides in scratch of rows of H, of P, and of the gate gradients d of a row (t, b)
    Py_ssize_t[MATRICES] x_rows, h_rows  # of each matrix of weights: its rows for x, and for h or m
    Py_ssize_t[MATRICES] N, column  # columns of each matrix of weights, and where their gradients begin in a row of d
    Py_ssize_t[MATRICES] h_column  # likewise for the weights' rows for h
    Py_ssize_t[MATRICES] h_panels  # of the transposed weights: those for h or m
    Py_ssize_t x_panels  # and those for x
    Py_ssize_t[MATRICES] panel  # reals of one
    Py_ssize_t threads  # that are of use
    bint packs_all  # all panels are there before the steps, else a single step packs what it uses
    bint by_rows  # parts are of the batch, not of the hidden units
    bint fetches  # as in Panels
    bint adds  # x_grad is added to what is there
    bint transposed  # as in the cell
    Py_ssize_t tile_gap  # from one tile of the weight gradients' operands to the next
    # Where things begin in scratch: panels for h and for x, or of a single step those of the first part; float16's
    # weight gradients in float32, which take the panels' place; carries of h and cs, peepholes, d.
    Py_ssize_t[MATRICES] w_h, w_x, w_grad
    Py_ssize_t d_h, d_cs, peep, d
    # And for the gradients of the weights for x and for h, of a block of rows: tiles of each with x or states, panels
    # with d; or, if transposed, tiles with d, panels with x and states.  Sums of columns of d in double.
    Py_ssize_t x_tiles, h_tiles, sums, panels, slots, total


cdef inline Backward backward_of(
    const cell *c, Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, bint weights,
    Py_ssize_t threads
) noexcept nogil:
    """The plan of a backward pass; with `weights` it computes gradients of the weights and biases too."""
    cdef Backward p
    cdef Py_ssize_t gates = gates_of(c), block = min(T * B, <Py_ssize_t> ROW_BLOCK), own = 0, N
    cdef Py_ssize_t P = size_of_h(c, H), recurrent = recurrent_weights(c, H), weights_in_all = gates * H * I + recurrent
    cdef int n
    p.steps = steps_of(T, B)
    p.B, p.I, p.H, p.P = B, I, H, P
    p.x_layout = p.d_x_layout = layout_of(B, I)
    p.h_layout = p.d_y_layout = layout_of(B, P)
    p.cs_layout = layout_of(B, H)
    p.adds, p.transposed = False, c.transposed
    p.L = 64 // itemsize
    p.J, p.JP = (H + p.L - 1) // p.L, (P + p.L - 1) // p.L
    p.Hs, p.Ps = stride_of(H, p.L), stride_of(P, p.L)
    p.Ns = stride_of(columns_of(c) * H + (P if projects(c) else 0), p.L)
    p.h_panels[0], p.h_panels[1] = plain_panels(p.JP), plain_panels(p.J)
    p.x_panels = plain_panels((I + p.L - 1) // p.L)
    p.packs_all = projects(c) or packs_all(T, B, weights_in_all * itemsize, threads)
    if p.packs_all:
        p.by_rows = splits_rows(B, recurrent * itemsize, threads)
    else:
        p.by_rows = cell is Gru and B >= ROWS_ALONE * threads
    p.threads = backward_threads(4.0 * B * weights_in_all, T, p.by_rows, threads)
    p.fetches = outgrow_l2(recurrent * itemsize, 1 if p.by_rows else p.threads)
    p.total = 0
    for n in range(matrices_of(c)):
        p.N[n], p.column[n] = c.gates[n] * H, n * c.gates[0] * H
        p.h_column[n] = n * (c.gates[0] + 1) * H if cell is ResetAfter else p.column[n]
        p.x_rows[n], p.h_rows[n] = I, P
        if n == 1 and projects(c):
            p.N[n], p.x_rows[n], p.h_rows[n] = P, 0, H
        p.panel[n] = PLAIN * p.L * p.N[n]
        p.w_grad[n] = n * (I + P) * p.N[0]
        own += p.panel[n]
        p.w_h[n] = take(&p.total, p.h_panels[n] * p.panel[n])
    for n in range(matrices_of(c)):
        p.w_x[n] = take(&p.total, p.x_panels * p.panel[n] if p.x_rows[n] > 0 else 0)
    p.total = max(p.total, threads * own)
    p.d_h = take(&p.total, B * p.Ps)
    if cell is Lstm:
        p.d_cs = take(&p.total, B * p.Hs)
        p.peep = take(&p.total, PEEPHOLES * p.J * p.L)
    p.d = take(&p.total, T * B * p.Ns)
    if weights:
        p.tile_gap = stride_of(block * ROWS, p.L)
        N = max(p.N[0], p.N[matrices_of(c) - 1])
        p.x_tiles = take(&p.total, tiles_of(N if c.transposed else I) * p.tile_gap)
        p.h_tiles = take(&p.total, tiles_of(N if c.transposed else max(P, H)) * p.tile_gap)
        p.sums = take(&p.total, 2 * max((p.N[0] + p.L - 1) // p.L, 2 * p.J) * p.L)
        N = p.x_panels + max(p.h_panels[0], p.h_panels[1]) if c.transposed else threads
        p.panels = take(&p.total, block * PLAIN * p.L * N)
    p.slots = take(&p.total, size_of_slots(B, p.L))
    return p


cdef inline void take_marks_back(Backward *p, const unsigned char *marks, void *work, Py_ssize_t parts) noexcept nogil:
    """As `take_marks`."""
    use_marks(&p.steps, marks, <Slot *> (<char *> work + p.slots * (64 // p.L)), parts if p.by_rows else 1)


cdef inline Backward cell_grad_plan(
    Py_ssize_t B, Py_ssize_t H, Py_ssize_t itemsize, Py_ssize_t threads
) noexcept nogil:
    """The plan of `LSTMBlockCellGrad`, which has no product; the rows of d are those of dicfo."""
    cdef Backward p
    p.steps = steps_of(1, B)
    p.B, p.I, p.H = B, 0, H
    p.cs_layout = p.d_y_layout = layout_of(B, H)
    p.L = 64 // itemsize
    p.J = (H + p.L - 1) // p.L
    p.N[0] = p.Ns = 4 * H
    p.threads = 1 if B * H < 1 << 13 else threads
    p.total = 0
    p.peep = take(&p.total, PEEPHOLES * p.J * p.L)
    p.d = take(&p.total, B * p.Ns)
    return p
