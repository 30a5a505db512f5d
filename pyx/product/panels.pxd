"""Weight matrices in packed panels, and products with them: what the forward passes of all cells share.

w = [w_x; w_h], [I+H, gates * H], holds gate after gate; it may consist of two matrices side by side.  `transposed` it
is as PyTorch has it, [gates * H, I] and [gates * H, H]: w_x and w_h in an array each, and these transposed.

A panel holds `unit_lines` lines of hidden units with all of their gates: its line g is gate g % gates of line of units
j * unit_lines + g // gates, so that the gates of a unit meet in one accumulator.  The last line of units may have fewer
than L units.  Where all of w is packed its gates are then compact, one behind the other in fewer lines, and
`expand_gates` gives each a line of z again.

A GRU that resets after the product needs the last gate's product with x separate from that with h.  Its z has a line
more: the last gate's with x, the other gates' with both, the last gate's with h.  So a panel of w_x has the last gate
first, and the product with w_h goes to z one line further on.

Weights may be quantized: `pack_quantized`.

A sequence packs all of w once.  A single step uses each weight once for every batch row: unless w is small, it packs
block by block, where the block is still in cache when it is used, or for few rows reads w as it lies.  A short sequence
multiplies all of x at once, and packs a transposed w_x block by block, too (`omit_x`).

Letters: j a panel; u a line of units in it; g a line of it; k a number of x or, from I on, of h, by which w is
multiplied; q a row of a and z; l a lane.  `of_x` says whether w_x is meant, or w_h.  Pointers that several functions
take:

    w : the matrices, [MATRICES], and if transposed those of h behind them, [2 * MATRICES]; the caller's
    p.base : `count` panels, `size` reals apart; a layer's, or in scratch
    a : rows, a `stride` apart; with INT8 quantized rows (`quantize_row`)
    z : for each row LINES lines, the accumulator of a panel; those of the next panel begin z_stride reals further on
"""
from cpython.pyport cimport PY_SSIZE_T_MAX
from libc.string cimport memcpy, memset

from product.half cimport half
from product.integer cimport QUAD, READ_PAST, add_integer_product, quads_of, quantize_row
from product.lines cimport (
    LF, REAL_BYTES, Array, L, align_to_line, at, clear, holds_half, inline_void, lines_in, load_line, load_row,
    load_values, noinline_void, reals, value_at
)
from product.quantized cimport INT8, UNQUANTIZED, add_float16_product, bytes_per_weight
from product.real cimport COMPUTES_FLOAT, MATRICES, real
from product.tile cimport (
    BLOCK, LINES, PACK_ROWS, ROW_PANELS, ROW_PANELS_OF_3, add_panel_product, add_row_panels_product, extend_chains,
    pack_line, packed_line, packed_stride, prefetch_read, tile_group_height, transpose_rows
)

cdef enum:
    MAX_UNPACKED_ROWS = 16  # batch rows up to which packing costs more than it gains
    THREAD_GAP = 68  # lines of scratch between two threads' rows, so that no cache prefetches the other's


# ------------------------------------------------------------------------------------------------------------ planning
cdef inline Py_ssize_t scratch_stride(Py_ssize_t n) noexcept nogil:
    """Return the stride of rows of n values in scratch: an odd number of lines, because rows that are a power of two
    apart share cache sets."""
    return (lines_in(n) | 1) * L


cdef struct Panels:
    Py_ssize_t H, J  # cells, lines of units
    Py_ssize_t gates, unit_lines, count  # gates in w, lines of units in a panel, panels
    Py_ssize_t[LINES] matrix, column  # of each gate: which matrix has it, and at which of its columns, in units of H
    Py_ssize_t[MATRICES] matrix_gates  # how many gates each matrix has
    Py_ssize_t last_lines  # lines that the gates of the last line of units take: fewer than `gates` if they are compact
    bint separate  # the last gate's products with x and with h are not added
    bint transposed
    int format  # how packed weights are quantized
    int constants  # numbers that a column has besides its weights: a bias, and with INT8 a scale
    Py_ssize_t prefetching_rows  # a product of so many rows or more prefetches the panel that comes next
    Py_ssize_t I, R  # values of k of w_x, and of w_h
    Py_ssize_t K  # values of k of a packed panel; its biases follow, and with INT8 the scales
    Py_ssize_t h_k  # the k of a packed panel where w_h begins: I, or 0 without w_x
    Py_ssize_t size  # reals from one panel to the next
    void *base  # the first panel


cdef inline Panels panels_of(
    bint packs_all, Py_ssize_t I, Py_ssize_t R, Py_ssize_t H, Py_ssize_t gates, int format
) noexcept nogil:
    """Return panels that hold all of w, [I+R, gates * H], with `packs_all`, or otherwise one block of k at a time."""
    cdef Panels p
    cdef Py_ssize_t g
    p.H, p.J, p.gates = H, lines_in(H), gates
    p.unit_lines = LINES // gates
    p.count = (p.J + p.unit_lines - 1) // p.unit_lines
    p.last_lines = gates
    for g in range(LINES):
        p.matrix[g], p.column[g] = 0, g
    p.matrix_gates[0], p.separate, p.transposed = gates, False, False
    p.prefetching_rows = PY_SSIZE_T_MAX
    p.I, p.R, p.K, p.h_k = I, R, I + R if packs_all else min(<Py_ssize_t> BLOCK, max(I, R)), I
    p.format, p.constants = format, 2 if format == INT8 else 1
    p.size = size_of_lines(&p, p.gates * p.unit_lines) + p.gates * p.unit_lines * L * p.constants
    return p


cdef inline Py_ssize_t size_of_lines(const Panels *p, Py_ssize_t lines) noexcept nogil:
    """Return how many reals the weights of a panel of so many lines take: whole cache lines."""
    if p.format == INT8:
        return (quads_of(p.I) + quads_of(p.K - p.I)) * lines * L
    return (p.K * lines * L * bytes_per_weight(p.format) + 63) // 64 * L


cdef inline Py_ssize_t size_read_past(int format) noexcept nogil:
    """Return how many reals behind the last panel a product may read."""
    return READ_PAST // REAL_BYTES if format == INT8 else 0


cdef inline void separate_last_gate(Panels *p, Py_ssize_t gates) noexcept nogil:
    """Keep the last gate's products with x and h separate; it has a matrix of its own beside that of `gates` gates."""
    p.matrix[gates], p.column[gates], p.separate = 1, 0, True
    p.matrix_gates[0], p.matrix_gates[1] = gates, 1
    p.size += L * p.constants  # for one more bias


cdef inline void compact_gates(Panels *p) noexcept nogil:
    """Put the gates of the last line of units one behind the other, where that saves lines."""
    if p.J > 0 and not p.separate:
        p.last_lines = (p.gates * (p.H - (p.J - 1) * L) + L - 1) // L


cdef inline void omit_x(Panels *p) noexcept nogil:
    """Do not hold w_x, which `add_transposed_product` packs when it uses it.  Weights are not quantized."""
    p.K, p.h_k = p.R, 0
    p.size -= p.I * p.gates * p.unit_lines * L


cdef inline bint has_compact_gates(const Panels *p, Py_ssize_t j, Py_ssize_t u) noexcept nogil:
    """Return whether the gates of line u of units of panel j stand one behind the other."""
    return p.last_lines < p.gates and j * p.unit_lines + u == p.J - 1


cdef inline Py_ssize_t unit_lines_in_panel(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Return how many lines of units panel j has: the last one may have fewer."""
    return min(p.unit_lines, p.J - j * p.unit_lines)


cdef inline Py_ssize_t lines_in_panel(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Return how many lines panel j has."""
    return p.gates * unit_lines_in_panel(p, j) - (p.gates - p.last_lines if j == p.count - 1 else 0)


cdef inline Py_ssize_t gate_line(const Panels *p, Py_ssize_t u, Py_ssize_t gate, bint of_x) noexcept nogil:
    """Return the line of a gate of line u of units, in a panel of w_x or of w_h."""
    if p.separate and of_x:
        return 0 if gate == p.gates - 1 else gate + 1
    return u * p.gates + gate


cdef inline Py_ssize_t z_lines(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Return how many lines the z and the biases of panel j have."""
    return lines_in_panel(p, j) + p.separate


cdef inline Py_ssize_t gate_column(const Panels *p, Py_ssize_t j, Py_ssize_t u, Py_ssize_t gate) noexcept nogil:
    """Return the column of a gate's matrix at which line u of units of panel j begins."""
    return p.column[gate] * p.H + (j * p.unit_lines + u) * L


cdef inline Py_ssize_t columns_left(const Panels *p, Py_ssize_t j, Py_ssize_t u) noexcept nogil:
    """Return how many columns a gate has from line u of units of panel j on, which may be more than a line."""
    return p.H - (j * p.unit_lines + u) * L


# ------------------------------------------------------------------------------------------------------------- packing
cdef inline Py_ssize_t weight_stride(const Panels *p, Py_ssize_t gate, bint of_x) noexcept nogil:
    """Return the distance from one k of a gate's matrix to the next, or if transposed from one column to the next."""
    if p.transposed:
        return p.I if of_x else p.R
    return p.matrix_gates[p.matrix[gate]] * p.H


cdef inline Array weights_from(
    const Panels *p, const Array *w, Py_ssize_t gate, Py_ssize_t k, Py_ssize_t column
) noexcept nogil:
    """Return a gate's weights from this k and this column of its matrix on."""
    cdef int n = p.matrix[gate]
    if not p.transposed:
        return at(w[n], k * weight_stride(p, gate, True) + column)
    if k < p.I:
        return at(w[n], column * p.I + k)
    return at(w[MATRICES + n], column * p.R + k - p.I)


cdef inline void pack_compact_gate(
    const Panels *p, real *panel, const Array *w, Py_ssize_t w_k, Py_ssize_t kb, Py_ssize_t k, Py_ssize_t j,
    Py_ssize_t gate
) noexcept nogil:
    """Pack value k of a block of kb values for one compact gate, of the last line of units of panel j.

    panel : where the block begins in the panel
    w_k : where it begins in w
    """
    cdef Py_ssize_t lines = lines_in_panel(p, j), u = unit_lines_in_panel(p, j) - 1, width = columns_left(p, j, u)
    cdef Py_ssize_t l0 = gate * width, l1 = p.last_lines * L if gate == p.gates - 1 else l0 + width, l, g
    cdef real *value
    for l in range(l0, l1):
        g = u * p.gates + l // L
        value = packed_line(panel, lines, g, 0, kb) + k * packed_stride(lines, g) + l % L
        if l < l0 + width:
            value[0] = value_at(weights_from(p, w, gate, w_k + k, gate_column(p, j, u, gate) + l - l0), 0)
        else:
            value[0] = 0


cdef inline void pack_block(
    const Panels *p, Py_ssize_t k0, const Array *w, Py_ssize_t w_k, Py_ssize_t kb, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Pack a block of kb values of k of w, from w_k on, as the values k0 to k0 + kb of the panels j0 to j1.

    PACK_ROWS values are packed at a time, because the weights of each are a separate stream for the prefetcher.
    """
    cdef Py_ssize_t k = 0, n, i, gate, j, u, g, lines, ld
    cdef bint of_x = w_k < p.I
    cdef real *panel
    cdef Array columns
    while k < kb:
        n = min(<Py_ssize_t> PACK_ROWS, kb - k)
        for gate in range(p.gates):
            ld = weight_stride(p, gate, of_x)
            for j in range(j0, j1):
                lines = lines_in_panel(p, j)
                panel = panel_at(p, j) + k0 * lines * L
                for u in range(unit_lines_in_panel(p, j)):
                    if has_compact_gates(p, j, u):
                        for i in range(n):
                            pack_compact_gate(p, panel, w, w_k, kb, k + i, j, gate)
                        continue
                    g = gate_line(p, u, gate, of_x)
                    columns = weights_from(p, w, gate, w_k, gate_column(p, j, u, gate))
                    pack_line(packed_line(panel, lines, g, 0, kb), packed_stride(lines, g), k, n, columns, ld,
                              columns_left(p, j, u))
        k += n


cdef inline void pack_transposed_compact_gates(
    const Panels *p, real *block, const Array *w, Py_ssize_t w_k, Py_ssize_t kb, Py_ssize_t j, Py_ssize_t u
) noexcept nogil:
    """Pack a block of kb values of k of a transposed w, from w_k on, for compact gates: of line u of units of panel j.

    block : [kb,lines,L], written
    """
    cdef real[LF * BLOCK] columns  # of w: kb weights for each lane
    cdef Py_ssize_t width = columns_left(p, j, u), lines = lines_in_panel(p, j), line, l, column, g
    for line in range(p.last_lines):
        for l in range(L):
            column = line * L + l
            if column < p.gates * width:
                load_row(columns + l * BLOCK, weights_from(p, w, column // width, w_k,
                                                           gate_column(p, j, u, column // width) + column % width), kb)
            else:
                clear(columns + l * BLOCK, BLOCK)
        g = u * p.gates + line
        transpose_rows(packed_line(block, lines, g, 0, kb), packed_stride(lines, g), reals(columns), BLOCK, L, kb)


cdef inline noinline_void pack_transposed_block(
    const Panels *p, real *block, const Array *w, Py_ssize_t w_k, Py_ssize_t kb, Py_ssize_t j
) noexcept nogil:
    """Pack a block of kb values of k of a transposed w, from w_k on, for panel j.

    A block has a piece of many columns, far apart in memory, which CPUs do not prefetch.  So kb lines of what the next
    panel has of each line of columns are prefetched meanwhile: these columns lie one behind the other.

    block : [kb,lines,L], written
    """
    cdef bint of_x = w_k < p.I
    cdef Py_ssize_t lines = lines_in_panel(p, j), k_in_array = w_k if of_x else w_k - p.I, gate, u, g, k, ld
    cdef Array columns
    cdef Array next_columns
    for u in range(unit_lines_in_panel(p, j)):
        if has_compact_gates(p, j, u):
            pack_transposed_compact_gates(p, block, w, w_k, kb, j, u)
            continue
        for gate in range(p.gates):
            g, ld = gate_line(p, u, gate, of_x), weight_stride(p, gate, of_x)
            columns = weights_from(p, w, gate, w_k, gate_column(p, j, u, gate))
            if j + 1 < p.count:
                next_columns = at(columns, p.unit_lines * L * ld + k_in_array * (L - 1))
                for k in range(kb):
                    prefetch_read(at(next_columns, k * L).data)
            transpose_rows(packed_line(block, lines, g, 0, kb), packed_stride(lines, g), columns, ld,
                           columns_left(p, j, u), kb)


cdef inline void pack_panels(const Panels *p, const Array *w, Py_ssize_t j0, Py_ssize_t j1) noexcept nogil:
    """Pack what panels hold of w into the panels j0 to j1.  w_h, if it is there, begins a new block.

    A transposed w is packed panel by panel, so that its memory is read in order.
    """
    cdef Py_ssize_t first = p.I - p.h_k, j = j0, end, k, kb
    while j < j1:
        end = j + 1 if p.transposed else j1
        k = 0
        while k < p.K:
            kb = min(<Py_ssize_t> BLOCK, (p.h_k if k < p.h_k else p.K) - k)
            if p.transposed:
                pack_transposed_block(p, panel_at(p, j) + k * lines_in_panel(p, j) * L, w, first + k, kb, j)
            else:
                pack_block(p, k, w, k, kb, j, end)
            k += kb
        j = end


cdef inline void pack_bias(
    const Panels *p, const Array *b, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Pack the biases of the panels j0 to j1.

    b : a bias for each matrix, and if the last gate's products are separate one more, of that with h; NULL for zeros
    """
    cdef Py_ssize_t j, u, gate, width
    cdef real *bias
    for j in range(j0, j1):
        bias = bias_at(p, j)
        if b is NULL:
            clear(bias, lines_in_panel(p, j) * L)
            continue
        for u in range(unit_lines_in_panel(p, j)):
            width = columns_left(p, j, u)
            if has_compact_gates(p, j, u):
                clear(bias + u * p.gates * L, p.last_lines * L)
                for gate in range(p.gates):
                    load_values(bias + u * p.gates * L + gate * width,
                                at(b[p.matrix[gate]], gate_column(p, j, u, gate)), width)
                continue
            for gate in range(p.gates):
                load_line(bias + gate_line(p, u, gate, True) * L, at(b[p.matrix[gate]], gate_column(p, j, u, gate)),
                          width)
        if p.separate:
            load_line(bias + p.gates * L, at(b[MATRICES], j * L), columns_left(p, j, 0))


cdef inline Py_ssize_t code_offset(const Panels *p, Py_ssize_t lines, Py_ssize_t k, Py_ssize_t lane) noexcept nogil:
    """Return the byte of a panel of so many lines at which the code for k and a lane of the lines begins."""
    cdef Py_ssize_t quad = k // QUAD if k < p.I else quads_of(p.I) + (k - p.I) // QUAD
    if p.format == INT8:
        return (quad * lines * L + lane) * QUAD + (k if k < p.I else k - p.I) % QUAD
    return (k * lines * L + lane) * bytes_per_weight(p.format)


cdef inline Py_ssize_t gate_lane(
    const Panels *p, Py_ssize_t j, Py_ssize_t u, Py_ssize_t gate, bint of_x
) noexcept nogil:
    """Return the first lane of a gate of line u of units, in the lines of panel j for x or for h."""
    if has_compact_gates(p, j, u):
        return u * p.gates * L + gate * columns_left(p, j, u)
    return gate_line(p, u, gate, of_x) * L


cdef inline void copy_codes(
    unsigned char *packed, unsigned char *codes, Py_ssize_t count, Py_ssize_t size, unsigned char sign, bint unpack
) noexcept nogil:
    """Pack `count` codes of w, side by side, of `size` bytes each, or with `unpack` copy them back.

    packed : where a panel has the first one; of int8 codes, whose sign is flipped, one is QUAD bytes before the next
    codes : where a matrix has the first one
    """
    cdef Py_ssize_t l
    if size > 1:
        memcpy(codes if unpack else packed, packed if unpack else codes, count * size)
        return
    for l in range(count):
        if unpack:
            codes[l] = packed[QUAD * l] ^ sign
        else:
            packed[QUAD * l] = codes[l] ^ sign


cdef inline noinline_void pack_quantized(
    const Panels *p, const Array *codes, const Array *scales, bint unpack
) noexcept nogil:
    """Pack all of a quantized w, or with `unpack` copy it back from the panels.

    A panel has its lines for one k, or four, after the other, because a single row of activations reads all of them at
    once.  int8 codes are packed without a sign.

    codes, scales : an array for each matrix; the caller's, written with `unpack`; for float16 there are no scales
    """
    cdef Py_ssize_t n = bytes_per_weight(p.format), j, u, gate, k, count, lines
    cdef unsigned char sign = 128 if p.format == INT8 else 0
    cdef unsigned char *panel
    cdef unsigned char *gate_codes
    cdef real *packed_scales
    cdef real *gate_scales
    for j in range(p.count):
        lines = lines_in_panel(p, j)
        panel = <unsigned char *> panel_at(p, j)
        packed_scales = bias_at(p, j) + z_lines(p, j) * L
        if not unpack:
            memset(panel, sign, size_of_lines(p, lines) * REAL_BYTES)
            if p.format == INT8:
                clear(packed_scales, z_lines(p, j) * L)
        for u in range(unit_lines_in_panel(p, j)):
            count = min(L, columns_left(p, j, u))
            for gate in range(p.gates):
                for k in range(p.K):
                    gate_codes = <unsigned char *> codes[p.matrix[gate]].data
                    gate_codes += (gate_column(p, j, u, gate) + k * weight_stride(p, gate, k < p.I)) * n
                    copy_codes(panel + code_offset(p, lines, k, gate_lane(p, j, u, gate, k < p.I)), gate_codes, count,
                               n, sign, unpack)
                if p.format == INT8:
                    gate_scales = <real *> scales[p.matrix[gate]].data + gate_column(p, j, u, gate)
                    if unpack:
                        load_values(gate_scales, reals(packed_scales + gate_lane(p, j, u, gate, True)), count)
                    else:
                        load_values(packed_scales + gate_lane(p, j, u, gate, True), reals(gate_scales), count)
                        load_values(packed_scales + p.separate * L + gate_lane(p, j, u, gate, False),
                                    reals(gate_scales), count)


# ------------------------------------------------------------------------------------------------------------ products
cdef inline real *panel_at(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Return the address of panel j."""
    return <real *> p.base + j * p.size


cdef inline real *bias_at(const Panels *p, Py_ssize_t j) noexcept nogil:
    """Return the address of the biases of panel j, which are behind its weights."""
    return panel_at(p, j) + size_of_lines(p, lines_in_panel(p, j))


cdef inline const real *scales_at(const Panels *p, Py_ssize_t j, Py_ssize_t k) noexcept nogil:
    """Return the address of the scales of panel j for k; only with INT8."""
    cdef Py_ssize_t line = z_lines(p, j)
    if k >= p.I:
        line += p.separate
    return bias_at(p, j) + line * LF


cdef inline void copy_bias(const Panels *p, Py_ssize_t j, Py_ssize_t rows, real *z) noexcept nogil:
    """Copy the biases of panel j to each of `rows` rows of z."""
    cdef Py_ssize_t lines = z_lines(p, j), q, g, l
    cdef const real *bias = bias_at(p, j)
    for q in range(rows):
        for g in range(lines):
            for l in range(L):
                z[(q * LINES + g) * L + l] = bias[g * L + l]


cdef inline Py_ssize_t prefetch_distance(const Panels *p, Py_ssize_t rows) noexcept nogil:
    """Return the `distance` of tile.pxd to the panel that comes next."""
    return p.size * REAL_BYTES if rows >= p.prefetching_rows else 0


cdef inline void add_quantized_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t panels, Py_ssize_t k0, Py_ssize_t K, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z, Py_ssize_t z_stride
) noexcept nogil:
    """Add a @ (K quantized values of k, from k0 on, of `panels` panels from j on) to z; `rows` or `panels` is 1."""
    cdef Py_ssize_t lines = lines_in_panel(p, j), i
    cdef Py_ssize_t distance = prefetch_distance(p, max(rows, <Py_ssize_t> 2))  # one row gains, too, at H 512 by AVX2
    cdef const char *weights = <const char *> panel_at(p, j) + code_offset(p, lines, k0, 0)
    if p.format == INT8:
        for i in range(panels):
            add_integer_product(<float *> (z + i * z_stride), rows, lines, <const float *> a,
                                weights + i * p.size * REAL_BYTES, K,
                                <const float *> (scales_at(p, j, k0) + i * p.size), distance)
        return
    add_float16_product(z, z_stride, rows, panels, lines, a, stride, <const half *> weights, 2 * p.size, K)


cdef inline void add_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t k0, Py_ssize_t K, const real *a, Py_ssize_t stride,
    Py_ssize_t rows, real *z
) noexcept nogil:
    """Add a @ (K values of k of panel j, from k0 on) to z for `rows` rows."""
    cdef Py_ssize_t q = 0, height, lines = lines_in_panel(p, j)
    cdef const real *panel = panel_at(p, j) + k0 * lines * L
    if COMPUTES_FLOAT and p.format != UNQUANTIZED:
        add_quantized_product(p, j, 1, k0, K, a, stride, rows, z, 0)
        return
    while q < rows:
        height = tile_group_height(rows - q)
        add_panel_product(z + q * LINES * L, height, lines, a + q * stride, stride, panel, K,
                          prefetch_distance(p, height))
        q += height


cdef inline Py_ssize_t row_panels(const Panels *p, Py_ssize_t j, Py_ssize_t end) noexcept nogil:
    """Return how many panels from j on, before `end`, a single row is multiplied with at once."""
    cdef Py_ssize_t lines = p.gates * p.unit_lines, most = ROW_PANELS_OF_3 if lines == 3 else ROW_PANELS
    if j + most > end or ((p.format != UNQUANTIZED or lines < LINES) and lines_in_panel(p, j + most - 1) < lines):
        return 1
    return most


cdef inline inline_void add_row_product(
    const Panels *p, Py_ssize_t j, Py_ssize_t panels, Py_ssize_t k0, Py_ssize_t K, const real *a, real *z,
    Py_ssize_t z_stride
) noexcept nogil:
    """Add a @ (K values of k, from k0 on, of `panels` panels from j on) to z for a single row.

    It has no next row, but is passed on with a stride: for a constant, gcc would copy the tiles of more rows, too.
    """
    cdef Py_ssize_t lines = p.gates * p.unit_lines, last_lines = lines_in_panel(p, j + panels - 1)
    if COMPUTES_FLOAT and p.format != UNQUANTIZED:
        add_quantized_product(p, j, panels, k0, K, a, p.size, 1, z, z_stride)
        return
    if panels > 1:
        add_row_panels_product(lines, last_lines, z, z_stride, a, panel_at(p, j) + k0 * lines * L,
                               p.size - k0 * (lines - last_lines) * L, K)
    else:  # `add_product` for one row
        add_panel_product(z, 1, last_lines, a, p.size, panel_at(p, j) + k0 * last_lines * L, K,
                          prefetch_distance(p, 1))


cdef inline void expand_gates(const Panels *p, Py_ssize_t j, Py_ssize_t rows, real *z) noexcept nogil:
    """Give each gate a line of z, where the gates of panel j stand one behind the other."""
    cdef Py_ssize_t u = unit_lines_in_panel(p, j) - 1, width = columns_left(p, j, u), q, gate, l
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


cdef inline void load_product_row(real *row, Array src, Py_ssize_t n, int format) noexcept nogil:
    """Load n values of an array as a row of a product with weights of this format: as reals, or quantized.

    src : of reals with INT8
    """
    if COMPUTES_FLOAT and format == INT8:
        quantize_row(<float *> row, <const float *> src.data, n)
    else:
        load_row(row, src, n)


cdef struct ProductRows:  # the rows of a product with several panels
    const real *a
    Py_ssize_t stride, count
    real *z  # of panel 0
    Py_ssize_t z_stride


cdef inline void add_unpacked_block(
    const Panels *p, const Array *w, Py_ssize_t w_k, Py_ssize_t kb, const real *a, const ProductRows *product,
    Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Add a @ (a block of kb values of k of w, from w_k on) to z for the panels j0 to j1, without packing w.

    a : the rows of the product, from the first k of the block on

    w is read as it lies, PACK_ROWS values of k at a time.  The memory of the panels, which need not hold weights here,
    holds the sums of the block, [gates,rows,lines,L].  The order of summation is that of the tile.
    """
    cdef real[PACK_ROWS * LINES * LF] space  # for lines that cannot be read as they lie
    cdef Py_ssize_t first_line = j0 * p.unit_lines, lines = min(j1 * p.unit_lines, p.J) - first_line
    cdef Py_ssize_t whole_lines = max(<Py_ssize_t> 0, min(lines, p.H // L - first_line))  # a thread may have no lines
    cdef Py_ssize_t k = 0, n, n_lines, gate, line, j, u, q, l, ld, sums_stride = lines * L
    cdef Py_ssize_t rows = product.count, stride = product.stride
    cdef bint of_x = w_k < p.I
    cdef real *block = panel_at(p, j0)
    cdef real *sums
    cdef real *z
    cdef Array columns
    if holds_half(w[0]):  # has to be converted, some lines at a time
        whole_lines = 0
    for l in range(p.gates * rows * sums_stride):
        block[l] = 0
    while k < kb:
        n = min(<Py_ssize_t> PACK_ROWS, kb - k)
        for gate in range(p.gates):
            sums = block + gate * rows * sums_stride
            ld = weight_stride(p, gate, of_x)
            columns = weights_from(p, w, gate, w_k + k, gate_column(p, j0, 0, gate))
            extend_chains(sums, sums_stride, rows, whole_lines, a + k, stride, <const real *> columns.data, ld, n)
            line = whole_lines
            while line < lines:
                n_lines = 1
                if holds_half(columns):
                    n_lines = min(<Py_ssize_t> LINES, lines - line)
                for u in range(n_lines):
                    pack_line(&space[u * L], n_lines * L, 0, n, at(columns, (line + u) * L), ld,
                              p.H - (first_line + line + u) * L)
                extend_chains(sums + line * L, sums_stride, rows, n_lines, a + k, stride, &space[0], n_lines * L, n)
                line += n_lines
        k += n
    for j in range(j0, j1):
        for u in range(unit_lines_in_panel(p, j)):
            for gate in range(p.gates):
                for q in range(rows):
                    sums = block + (gate * rows + q) * sums_stride + ((j - j0) * p.unit_lines + u) * L
                    z = product.z + j * product.z_stride + (q * LINES + gate_line(p, u, gate, of_x)) * L
                    for l in range(L):
                        z[l] += sums[l]


cdef inline void add_transposed_product(
    const Panels *p, const Array *w, bint of_x, const ProductRows *product, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Add a @ (w_x or w_h) to z for the panels j0 to j1, where w is transposed and not packed before.

    Each block of a panel is packed when all rows of a use it, and stays in the first-level cache meanwhile.
    """
    cdef real[BLOCK * LINES * LF + LF] space
    cdef real *block = <real *> align_to_line(space)
    cdef Py_ssize_t w_k = 0 if of_x else p.I, K = p.I if of_x else p.R, j, k, kb, q, height
    for j in range(j0, j1):
        k = 0
        while k < K:
            kb = min(<Py_ssize_t> BLOCK, K - k)
            pack_transposed_block(p, block, w, w_k + k, kb, j)
            q = 0
            while q < product.count:
                height = tile_group_height(product.count - q)
                add_panel_product(product.z + j * product.z_stride + q * LINES * L, height, lines_in_panel(p, j),
                                  product.a + q * product.stride + k, product.stride, block, kb, 0)
                q += height
            k += kb


cdef inline void compute_input_product(
    const Panels *p, const Array *w, const ProductRows *product, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Compute z = b + a @ w_x for the panels j0 to j1.

    w : the matrices, which are read if the panels do not hold w_x
    """
    cdef Py_ssize_t j
    cdef real *z
    for j in range(j0, j1):
        z = product.z + j * product.z_stride
        copy_bias(p, j, product.count, z)
        if p.h_k == p.I:
            add_product(p, j, 0, p.I, product.a, product.stride, product.count, z)
        else:
            add_transposed_product(p, w, True, product, j, j + 1)


cdef inline void add_unpacked_product(
    const Panels *p, const Array *w, bint of_x, const ProductRows *product, Py_ssize_t j0, Py_ssize_t j1
) noexcept nogil:
    """Add a @ (w_x or w_h) to z for the panels j0 to j1, where w is not packed before.

    For a single step, which uses a weight only once for each row: a block is packed when it is used, or, for few rows,
    not at all.  The sums of these rows take the place of a panel's weights.
    """
    cdef Py_ssize_t w_k = 0 if of_x else p.I, K = p.I if of_x else p.R, k = 0, kb, j
    if p.transposed:
        add_transposed_product(p, w, of_x, product, j0, j1)
        return
    while k < K:
        kb = min(<Py_ssize_t> BLOCK, K - k)
        if product.count <= MAX_UNPACKED_ROWS and product.count <= p.K:
            add_unpacked_block(p, w, w_k + k, kb, product.a + k, product, j0, j1)
        else:
            pack_block(p, 0, w, w_k + k, kb, j0, j1)
            for j in range(j0, j1):
                add_product(p, j, 0, kb, product.a + k, product.stride, product.count, product.z + j * product.z_stride)
        k += kb
