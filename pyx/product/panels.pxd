"""Weight matrices in panels, and products with them: what the forward passes of LSTM, GRU and Dense share.

w [I+H, gates * H] holds gate after gate; it may consist of two matrices side by side.  `transposed` it is as PyTorch
has it, [gates * H, I] and [gates * H, H]: the rows for x and those for h in an array each, and these transposed.

A panel holds `units` lines of hidden units with all of their gates: its line g is gate g % gates of line of units
j * units + g // gates, so that the gates of a unit meet in one accumulator tile.  The last line of units may be short.
Where all of w is packed its gates then stand one behind the other, in fewer lines, and `spread` parts them in z.

A GRU that resets after the product needs the last gate's product with x `apart` from that with h.  z then has a line
more: the last gate's with x, the other gates' with both, the last gate's with h.  So the panel's rows for x have the
last gate first, and the product with its rows for h goes to z one line further on.

Weights may be quantized: `pack_quantized`.

A sequence packs all of w once.  A single step uses each weight once for every batch row: unless w is small, it packs
block by block, where the block is still in cache when it is used, or for few rows reads w as it lies.
"""
from libc.stdint cimport uint16_t
from libc.string cimport memset

from product.half cimport half
from product.integer cimport QUAD, add_integer_product, quads_of
from product.quantized cimport INT8, UNQUANTIZED, add_float16_product, bytes_per_code
from product.real cimport real
from product.tile cimport (
    BLOCK, GROUP_TILES, LF, LINES, PACK_ROWS, add_panel_product, add_row_panels_product, chain_rows, clear, lanes_of,
    load_line, load_lines, load_lines_transposed, load_part, load_value, max_row_panels, noinline_void,
    pack_line_transposed, packed_line, packed_stride, store, tile_group_height
)

cdef enum:
    MATRICES = 2  # that w consists of, at most
    FEW = 16  # batch rows up to which packing costs more than it gains
    THREAD_GAP = 68  # lines of scratch between two threads' rows: no cache fetches ahead into the other's


# ------------------------------------------------------------------------------------------------------------ planning
cdef inline Py_ssize_t scratch_stride(Py_ssize_t n, Py_ssize_t L) noexcept nogil:
    """Stride of rows of n values in scratch: an odd number of lines, as rows a power of two apart share cache sets."""
    return ((n + L - 1) // L | 1) * L


cdef inline Py_ssize_t steps_per_chunk(Py_ssize_t T, Py_ssize_t B, Py_ssize_t groups) noexcept nogil:
    """How many steps have their input products computed at once, to give a group about 96 rows; 1 if one step has
    enough."""
    return max(<Py_ssize_t> 1, min(T, 96 // (B // groups)))


cdef struct Panels:
    Py_ssize_t H, L, J  # cells, units in a line, lines of units
    Py_ssize_t gates, unit_lines, count  # gates in w, lines of units in a panel, panels
    Py_ssize_t[LINES] matrix, column  # of each gate: which matrix has it, and where in a row of that, in units of H
    Py_ssize_t[MATRICES] width  # of a row of each matrix, in units of H
    Py_ssize_t edge  # lines that the gates of the last line of units take
    bint separate  # the last gate's products with x and with h are not added
    bint transposed
    int format  # how packed weights are quantized
    bint prefetches  # the panel that comes next, ahead of its product
    Py_ssize_t I, R  # rows of w for x, and for h
    Py_ssize_t K  # rows of a packed panel; its biases follow, and with INT8 the scales
    Py_ssize_t size  # reals from one panel to the next
    void *base  # the first panel


cdef inline Panels panels_of(
    bint packs_all, Py_ssize_t I, Py_ssize_t R, Py_ssize_t H, Py_ssize_t L, Py_ssize_t gates, int format
) noexcept nogil:
    """With `packs_all` panels hold all rows of w, otherwise one block of rows at a time."""
    return panels_with_rows(I + R if packs_all else min(<Py_ssize_t> BLOCK, max(I, R)), I, R, H, L, gates, format)


cdef inline Panels panels_with_rows(
    Py_ssize_t K, Py_ssize_t I, Py_ssize_t R, Py_ssize_t H, Py_ssize_t L, Py_ssize_t gates, int format
) noexcept nogil:
    """Panels that hold K rows of a matrix with I rows for x and R for h."""
    cdef Panels p
    cdef Py_ssize_t g
    p.H, p.L, p.J, p.gates = H, L, (H + L - 1) // L, gates
    p.unit_lines = LINES // gates
    p.count = (p.J + p.unit_lines - 1) // p.unit_lines
    p.edge = gates
    for g in range(LINES):
        p.matrix[g], p.column[g] = 0, g
    p.width[0], p.separate, p.transposed, p.prefetches = gates, False, False, False
    p.I, p.R, p.K = I, R, K
    p.format = format
    p.size = size_of_rows(&p, p.gates * p.unit_lines) + p.gates * p.unit_lines * L * constants_of(&p)
    return p


cdef inline Py_ssize_t size_of_rows(const Panels *p, Py_ssize_t lines) noexcept nogil:
    """Reals that the K rows of a panel of so many lines take: whole cache lines."""
    if p.format == INT8:
        return (quads_of(p.I) + quads_of(p.K - p.I)) * lines * p.L
    return p.K * lines * p.L if p.format == UNQUANTIZED else (p.K * lines * bytes_per_code(p.format) + 3) // 4 * p.L


cdef inline int constants_of(const Panels *p) noexcept nogil:
    """How many numbers each column has besides its weights: a bias and perhaps a scale."""
    return 2 if p.format == INT8 else 1


cdef inline void separate_last_gate(Panels *p, Py_ssize_t gates) noexcept nogil:
    """The last gate, which has a matrix of its own, beside one of the other `gates`."""
    p.matrix[gates], p.column[gates], p.separate = 1, 0, True
    p.width[0], p.width[1] = gates, 1
    p.size += p.L * constants_of(p)  # for one more bias


cdef inline void compact_gates(Panels *p) noexcept nogil:
    """Of the last line of units, where that saves lines."""
    if p.J > 0 and not p.separate:
        p.edge = (p.gates * (p.H - (p.J - 1) * p.L) + p.L - 1) // p.L


cdef inline bint has_compact_gates(const Panels *p, Py_ssize_t j, Py_ssize_t u) noexcept nogil:
    """Whether the gates of line u of units of panel j stand one behind the other."""
    return p.edge < p.gates and j * p.unit_lines + u == p.J - 1


cdef inline Py_ssize_t unit_lines_in_panel(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Lines of units in panel j: the last one may have fewer."""
    return min(p.unit_lines, p.J - j * p.unit_lines)


cdef inline Py_ssize_t lines_in_panel(const Panels *p, Py_ssize_t j) noexcept nogil:
    return p.gates * unit_lines_in_panel(p, j) - (p.gates - p.edge if j == p.count - 1 else 0)


cdef inline Py_ssize_t line_in(const Panels *p, Py_ssize_t u, Py_ssize_t gate, bint of_x) noexcept nogil:
    """Which line of a panel's rows, those for x or those for h, is a gate's of line u of units."""
    if p.separate and of_x:
        return 0 if gate == p.gates - 1 else gate + 1
    return u * p.gates + gate


cdef inline Py_ssize_t lines_of_z(const Panels *p, Py_ssize_t j) noexcept nogil:
    """How many lines panel j's z and biases have."""
    return lines_in_panel(p, j) + p.separate


cdef inline Py_ssize_t column_of(const Panels *p, Py_ssize_t j, Py_ssize_t u, Py_ssize_t gate) noexcept nogil:
    """Where line u of units of panel j begins in a row of a gate's matrix."""
    return p.column[gate] * p.H + (j * p.unit_lines + u) * p.L


cdef inline Py_ssize_t width_of(const Panels *p, Py_ssize_t j, Py_ssize_t u) noexcept nogil:
    """How many columns there are from line u of panel j on; only a line of them is used."""
    return p.H - (j * p.unit_lines + u) * p.L


# ------------------------------------------------------------------------------------------------------------- packing
cdef inline Py_ssize_t row_stride(const Panels *p, Py_ssize_t gate, bint of_x) noexcept nogil:
    """From one row of a gate's matrix to the next, or of a transposed one from one column to the next."""
    if p.transposed:
        return p.I if of_x else p.R
    return p.width[p.matrix[gate]] * p.H


cdef inline const store *weight_at(
    const Panels *p, const store **w, Py_ssize_t gate, Py_ssize_t row, Py_ssize_t column, bint of_x
) noexcept nogil:
    """Where a gate's weight in this row and column of w is."""
    cdef int n = p.matrix[gate]
    if not p.transposed:
        return w[n] + row * row_stride(p, gate, of_x) + column
    if of_x:
        return w[n] + column * p.I + row
    return w[MATRICES + n] + column * p.R + row - p.I


cdef inline void pack_joined(
    const Panels *p, real *panel, Py_ssize_t lines, const store **w, Py_ssize_t row, Py_ssize_t k0, Py_ssize_t count,
    Py_ssize_t kb, bint of_x, Py_ssize_t j, Py_ssize_t u, Py_ssize_t gate
) noexcept nogil:
    """As below for one gate of a line of units whose gates stand one behind the other: the rows k0 to k0 + count."""
    cdef Py_ssize_t width = width_of(p, j, u), first = gate * width, end = first + width, k, l, g
    cdef real *to
    if gate == p.gates - 1:
        end = p.edge * p.L
    for k in range(k0, k0 + count):
        for l in range(first, end):
            g = u * p.gates + l // p.L
            to = packed_line(panel, lines, g, 0, kb) + k * packed_stride(panel, lines, g) + l % p.L
            if l < first + width:
                load_value(to, weight_at(p, w, gate, row + k, column_of(p, j, u, gate) + l - first, of_x))
            else:
                to[0] = 0


cdef inline void pack_block(
    const Panels *p, real *panels, Py_ssize_t at, const store **w, Py_ssize_t row, Py_ssize_t kb, bint of_x,
    Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Pack kb <= BLOCK rows of w, from `row` on, into the panels j0 to j1 from row `at` on.  PACK_ROWS rows at a time,
    because each is a separate stream for the prefetcher."""
    cdef Py_ssize_t k = 0, n, gate, j, u, g, lines, ld
    cdef real *panel
    cdef const store *columns
    while k < kb:
        n = kb if p.transposed else min(<Py_ssize_t> PACK_ROWS, kb - k)
        for gate in range(p.gates):
            ld = row_stride(p, gate, of_x)
            for j in range(j0, j1):
                lines = lines_in_panel(p, j)
                panel = panels + j * p.size + at * lines * p.L
                for u in range(unit_lines_in_panel(p, j)):
                    if has_compact_gates(p, j, u):
                        pack_joined(p, panel, lines, w, row, k, n, kb, of_x, j, u, gate)
                        continue
                    g = line_in(p, u, gate, of_x)
                    columns = weight_at(p, w, gate, row, column_of(p, j, u, gate), of_x)
                    if p.transposed:
                        pack_line_transposed(panel, lines, g, columns, ld, width_of(p, j, u), kb)
                    else:
                        load_lines(packed_line(panel, lines, g, 0, kb), packed_stride(panel, lines, g), k, n, columns,
                                   ld, width_of(p, j, u))
        k += n


cdef inline void pack_panels(
    const Panels *p, real *panels, const store **w, Py_ssize_t I, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Pack all of w into the panels j0 to j1.  A new block begins where x ends and h, if there is one, begins."""
    cdef Py_ssize_t k = 0, kb
    while k < p.K:
        kb = min(<Py_ssize_t> BLOCK, (I if k < I else p.K) - k)
        pack_block(p, panels, k, w, k, kb, k < I, j0, j1)
        k += kb


cdef inline void pack_bias(
    const Panels *p, real *panels, const store **b, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Pack the biases: one for each matrix, and where the last gate's products are apart one more, for that with h.
    NULL stands for zeros."""
    cdef Py_ssize_t j, u, gate, width
    cdef real *bias
    for j in range(j0, j1):
        bias = bias_at(p, panels, j)
        if b is NULL:
            clear(bias, lines_in_panel(p, j) * p.L)
            continue
        for u in range(unit_lines_in_panel(p, j)):
            width = width_of(p, j, u)
            if has_compact_gates(p, j, u):
                clear(bias + u * p.gates * p.L, p.edge * p.L)
                for gate in range(p.gates):
                    load_part(bias + u * p.gates * p.L + gate * width, b[p.matrix[gate]] + column_of(p, j, u, gate),
                              width)
                continue
            for gate in range(p.gates):
                load_line(bias + line_in(p, u, gate, True) * p.L, b[p.matrix[gate]] + column_of(p, j, u, gate),
                          width)
        if p.separate:
            load_line(bias + p.gates * p.L, b[MATRICES] + j * p.L, width_of(p, j, 0))


cdef inline Py_ssize_t place_of_code(const Panels *p, Py_ssize_t lines, Py_ssize_t k, Py_ssize_t lane) noexcept nogil:
    """The byte of a panel of so many lines at which the code of row k of w and of a lane of these lines begins."""
    cdef Py_ssize_t quad = k // QUAD if k < p.I else quads_of(p.I) + (k - p.I) // QUAD
    if p.format == INT8:
        return (quad * lines * p.L + lane) * QUAD + (k if k < p.I else k - p.I) % QUAD
    return (k * lines * p.L + lane) * bytes_per_code(p.format)


cdef inline Py_ssize_t lane_in(const Panels *p, Py_ssize_t j, Py_ssize_t u, Py_ssize_t gate, bint of_x) noexcept nogil:
    """The first lane of a gate of line u of units, in the lines of panel j for x or for h."""
    if has_compact_gates(p, j, u):
        return u * p.gates * p.L + gate * width_of(p, j, u)
    return line_in(p, u, gate, of_x) * p.L


cdef inline noinline_void pack_quantized(
    const Panels *p, unsigned char **codes, float **scales, bint back
) noexcept nogil:
    """Pack all of w, whose matrices are `codes` with `scales`; or copy both `back` from the panels.  A panel has its
    lines for one row of w, or four, after the other, since a single row of activations reads all of them at once.
    int8 codes are packed without a sign."""
    cdef Py_ssize_t L = p.L, n = bytes_per_code(p.format), j, u, gate, k, l, count, lines
    cdef unsigned char sign = 128 if p.format == INT8 else 0
    cdef unsigned char *panel
    cdef unsigned char *row
    cdef unsigned char *code
    cdef float *packed_scales
    cdef float *gate_scales
    for j in range(p.count):
        lines = lines_in_panel(p, j)
        panel = <unsigned char *> panel_at(p, scales[0], j)
        packed_scales = bias_at(p, scales[0], j) + lines_of_z(p, j) * L
        if not back:
            memset(panel, sign, size_of_rows(p, lines) * sizeof(float))
            if p.format == INT8:
                clear(packed_scales, lines_of_z(p, j) * L)
        for u in range(unit_lines_in_panel(p, j)):
            count = min(L, width_of(p, j, u))
            for gate in range(p.gates):
                for k in range(p.K):
                    row = codes[p.matrix[gate]] + (column_of(p, j, u, gate) + k * row_stride(p, gate, k < p.I)) * n
                    code = panel + place_of_code(p, lines, k, lane_in(p, j, u, gate, k < p.I))
                    for l in range(count):
                        if n == 1:
                            if back:
                                row[l] = code[QUAD * l] ^ sign
                            else:
                                code[QUAD * l] = row[l] ^ sign
                        elif back:
                            (<uint16_t *> row)[l] = (<uint16_t *> code)[l]
                        else:
                            (<uint16_t *> code)[l] = (<uint16_t *> row)[l]
                if p.format == INT8:
                    gate_scales = scales[p.matrix[gate]] + column_of(p, j, u, gate)
                    if back:
                        load_part(gate_scales, packed_scales + lane_in(p, j, u, gate, True), count)
                    else:
                        load_part(packed_scales + lane_in(p, j, u, gate, True), gate_scales, count)
                        load_part(packed_scales + p.separate * L + lane_in(p, j, u, gate, False), gate_scales, count)


# ----------------------------------------------------------------------------- products; z has LINES lines for each row
cdef inline real *panel_at(const Panels *p, const real *unused, Py_ssize_t j) noexcept nogil:
    return <real *> p.base + j * p.size


cdef inline real *bias_at(const Panels *p, const real *unused, Py_ssize_t j) noexcept nogil:
    return panel_at(p, unused, j) + size_of_rows(p, lines_in_panel(p, j))


cdef inline const float *scales_at(const Panels *p, Py_ssize_t j, Py_ssize_t k) noexcept nogil:
    """The scales of panel j for row k of w; only with INT8."""
    cdef float *unused = NULL
    cdef Py_ssize_t line = lines_of_z(p, j)
    if k >= p.I:
        line += p.separate
    return bias_at(p, unused, j) + line * LF


cdef inline void add_bias(const Panels *p, Py_ssize_t j, Py_ssize_t rows, real *z) noexcept nogil:
    """z := b for panel j and `rows` rows."""
    cdef Py_ssize_t L = lanes_of(z), lines = lines_of_z(p, j), q, g, l
    cdef const real *bias = bias_at(p, z, j)
    for q in range(rows):
        for g in range(lines):
            for l in range(L):
                z[(q * LINES + g) * L + l] = bias[g * L + l]


cdef inline void add_quantized_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t panels, Py_ssize_t at, Py_ssize_t K, const float *a, Py_ssize_t stride,
    Py_ssize_t rows, float *z, Py_ssize_t zs
) noexcept nogil:
    """`add_product` or `add_row_product` with quantized weights; for int8, `a` has quantized rows."""
    cdef Py_ssize_t lines = lines_in_panel(p, j), i
    cdef const char *weights = <const char *> panel_at(p, z, j) + place_of_code(p, lines, at, 0)
    if p.format == INT8:
        for i in range(panels):
            add_integer_product(z + i * zs, rows, lines, a, weights + i * p.size * sizeof(float), K,
                                scales_at(p, j, at) + i * p.size)
        return
    add_float16_product(z, zs, rows, panels, lines, a, stride, <const half *> weights, 2 * p.size, K)


cdef inline void add_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t at, Py_ssize_t K, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z, Py_ssize_t first
) noexcept nogil:
    """z += a @ (K rows of panel j, from row `at` on), for `rows` rows.  `first` is the number of the first tile."""
    cdef Py_ssize_t r = 0, m, lines = lines_in_panel(p, j)
    cdef const real *panel = panel_at(p, z, j) + at * lines * p.L
    cdef const real *next = NULL
    if real is float:
        if p.format != UNQUANTIZED:
            add_quantized_product(p, j, 1, at, K, a, stride, rows, z, 0)
            return
    if p.prefetches:
        next = panel_at(p, z, j + 1 if j + 1 < p.count else 0) + at * lines * p.L
    while r < rows:
        m = tile_group_height(rows - r)
        add_panel_product(z + r * LINES * p.L, m, lines, a + r * stride, stride, panel, K, next, first)
        r += m
        first += GROUP_TILES


cdef inline Py_ssize_t row_panels(const Panels *p, Py_ssize_t j, Py_ssize_t end) noexcept nogil:
    """How many panels from j on a single row is multiplied with at once."""
    cdef Py_ssize_t lines = p.gates * p.unit_lines, most = max_row_panels(lines)
    if j + most > end or ((p.format != UNQUANTIZED or lines < LINES) and lines_in_panel(p, j + most - 1) < lines):
        return 1
    return most


cdef inline void add_row_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t panels, Py_ssize_t at, Py_ssize_t K, const real *a, real *z,
    Py_ssize_t zs
) noexcept nogil:
    """z += a @ (K rows, from row `at` on, of `panels` panels from j on), for one row.  In z they are zs reals apart."""
    cdef Py_ssize_t lines = p.gates * p.unit_lines, last = lines_in_panel(p, j + panels - 1)
    if real is float:
        if p.format != UNQUANTIZED:
            add_quantized_product(p, j, panels, at, K, a, 0, 1, z, zs)
            return
    if panels > 1:
        add_row_panels_product(lines, last, z, zs, a, panel_at(p, z, j) + at * lines * p.L,
                               p.size - at * (lines - last) * p.L, K)
    else:
        add_product(p, j, at, K, a, 0, 1, z, 0)


cdef inline void expand_gates(const Panels *p, Py_ssize_t j, Py_ssize_t rows, real *z) noexcept nogil:
    """A line of z for each gate, where those of panel j stand one behind the other."""
    cdef Py_ssize_t L = lanes_of(z), u = unit_lines_in_panel(p, j) - 1, width = width_of(p, j, u), q, gate, l
    cdef real[LF] line
    cdef real *row
    if not has_compact_gates(p, j, u):
        return
    for q in range(rows):
        row = z + (q * LINES + u * p.gates) * L
        gate = p.gates - 1
        while gate >= 0:
            for l in range(L):
                line[l] = row[gate * width + l] if l < width else 0
            for l in range(L):
                row[gate * L + l] = line[l]
            gate -= 1


cdef inline void add_input_product(
    const Panels *p, Py_ssize_t I, const real *x, Py_ssize_t stride, Py_ssize_t rows, real *z,
    Py_ssize_t zs, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """z := b + x @ w_x for the panels j0 to j1, which are zs reals apart in z."""
    cdef Py_ssize_t j
    for j in range(j0, j1):
        add_bias(p, j, rows, z + j * zs)
        add_product(p, j, 0, I, x, stride, rows, z + j * zs, 0)


cdef inline void add_block_unpacked(
    const Panels *p, const store **w, Py_ssize_t row, Py_ssize_t kb, bint of_x, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z, Py_ssize_t zs, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """z += a @ w for a block of kb rows of w, from `row` on, read as it lies, PACK_ROWS rows at a time.  The memory of
    the panels, which is not needed for weights here, holds the block's sums.  The order of summation is that of the
    tile."""
    cdef real[PACK_ROWS * LINES * LF] wide
    cdef Py_ssize_t first = j0 * p.unit_lines, lines = min(j1 * p.unit_lines, p.J) - first
    cdef Py_ssize_t whole = max(<Py_ssize_t> 0, min(lines, p.H // p.L - first))  # a thread may have no lines
    cdef Py_ssize_t k = 0, n, m, gate, j, u, q, l, ld, stride_z = lines * p.L
    cdef real *block = panel_at(p, z, j0)
    cdef real *sums
    cdef const store *columns
    if store is half:  # has to be converted, some lines at a time
        whole = 0
    for l in range(p.gates * rows * stride_z):
        block[l] = 0
    while k < kb:
        n = min(<Py_ssize_t> PACK_ROWS, kb - k)
        for gate in range(p.gates):
            sums = block + gate * rows * stride_z
            ld = row_stride(p, gate, of_x)
            columns = weight_at(p, w, gate, row + k, column_of(p, j0, 0, gate), of_x)
            chain_rows(sums, stride_z, rows, whole, a + k, stride, <const real *> columns, ld, n)
            j = whole
            while j < lines:
                m = 1
                if store is half:
                    m = min(<Py_ssize_t> LINES, lines - j)
                for u in range(m):
                    load_lines(&wide[u * p.L], m * p.L, 0, n, columns + (j + u) * p.L, ld,
                               p.H - (first + j + u) * p.L)
                chain_rows(sums + j * p.L, stride_z, rows, m, a + k, stride, &wide[0], m * p.L, n)
                j += m
        k += n
    for j in range(j0, j1):
        for u in range(unit_lines_in_panel(p, j)):
            for gate in range(p.gates):
                for q in range(rows):
                    sums = block + (gate * rows + q) * stride_z + ((j - j0) * p.unit_lines + u) * p.L
                    for l in range(p.L):
                        z[j * zs + (q * LINES + line_in(p, u, gate, of_x)) * p.L + l] += sums[l]


cdef inline void add_transposed_unpacked(
    const Panels *p, const store **w, Py_ssize_t row, Py_ssize_t K, bint of_x, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z, Py_ssize_t zs, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """z += a @ (K rows of w, from `row` on), where w is transposed: for at most FEW rows, a line of columns after the
    other, so that as many rows of memory are read from one end to the other."""
    cdef real[BLOCK * LF] wide
    cdef real[FEW * LF] sums
    cdef Py_ssize_t L = p.L, ld, j, u, gate, k, kb, q, l
    cdef const store *columns
    cdef real *to
    for j in range(j0, j1):
        for u in range(unit_lines_in_panel(p, j)):
            for gate in range(p.gates):
                ld = row_stride(p, gate, of_x)
                columns = weight_at(p, w, gate, row, column_of(p, j, u, gate), of_x)
                k = 0
                while k < K:
                    kb = min(<Py_ssize_t> BLOCK, K - k)
                    load_lines_transposed(&wide[0], L, columns + k, ld, width_of(p, j, u), kb)
                    for l in range(rows * L):
                        sums[l] = 0
                    chain_rows(&sums[0], L, rows, 1, a + k, stride, &wide[0], L, kb)
                    for q in range(rows):
                        to = z + j * zs + (q * LINES + line_in(p, u, gate, of_x)) * L
                        for l in range(L):
                            to[l] += sums[q * L + l]
                    k += kb


cdef inline void add_unpacked_product(
    const Panels *p, const store **w, Py_ssize_t row, Py_ssize_t K, bint of_x, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z, Py_ssize_t zs, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """z += a @ (K rows of w, from `row` on) for the panels j0 to j1, when each weight is used only once."""
    cdef Py_ssize_t k = 0, kb, j
    if rows <= FEW and p.transposed:
        add_transposed_unpacked(p, w, row, K, of_x, a, stride, rows, z, zs, j0, j1)
        return
    while k < K:
        kb = min(<Py_ssize_t> BLOCK, K - k)
        if rows <= FEW and rows <= p.K:
            add_block_unpacked(p, w, row + k, kb, of_x, a + k, stride, rows, z, zs, j0, j1)
        else:
            pack_block(p, <real *> p.base, 0, w, row + k, kb, of_x, j0, j1)
            for j in range(j0, j1):
                add_product(p, j, 0, kb, a + k, stride, rows, z + j * zs, 0)
        k += kb
