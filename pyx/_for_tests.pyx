"""Parts of the kernels that tests and benchmarks/itself.py call alone; wheels do not have this module.

Activations, their derivatives and conversions from and to half precision run over arrays in lines of 64 bytes, as in
the kernels.  `out` has the size of `x`, and the result of a number does not depend on its position.  A function of a
line takes `x` and `out` from the line's first number on, and n, the numbers from there to the end of the array, which
may be more or fewer than a line has.  j is a line or a panel, l a lane of a line.

Products are those of one register tile: `a` has its rows, `panels` are packed panels, one behind the other, of `lines`
lines each, and each of the products is added to `out`, whose rows are as wide as the tile.
"""
from cpython.pycapsule cimport PyCapsule_Import
from cython.parallel cimport prange

cimport cells.activations as activations
from cells.types cimport Activation, activation_of
from product.half cimport half
from product.integer cimport (
    ProductInUse, add_integer_product, quads_of, quantize_row, quantized_row_stride, use_product
)
from product.lines cimport LF, L, lines_in, load_halves, load_reals, store_halves, store_reals
from product.quantized cimport INT8, add_float16_product, bytes_per_weight
from product.real cimport real
from product.tile cimport BLOCK, ROWS, add_block_product, add_panel_product
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
TILE_ROWS = ROWS
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


cdef inline void activate_line(
    const Activation *f, bint derivative, const real *restrict x, real *restrict out, Py_ssize_t n
) noexcept nogil:
    """Compute the activation f of a line, or for a line of its results its `derivative`."""
    cdef real[LF] z
    cdef real[LF] y
    load_reals(&z[0], x, n)
    if derivative:
        activations.slope(f, z, y)
    else:
        activations.activate(f, z, y)
    store_reals(out, &y[0], n)


cdef inline void to_half_line(const real *restrict x, half *restrict out, Py_ssize_t n) noexcept nogil:
    """Round a line to float16."""
    cdef real[LF] z
    load_reals(&z[0], x, n)
    store_halves(out, &z[0], n)


cdef inline void from_half_line(const half *restrict x, real *restrict out, Py_ssize_t n) noexcept nogil:
    """Convert a line from float16."""
    cdef real[LF] z
    load_halves(&z[0], x, n)
    store_reals(out, &z[0], n)


def activate(const real[::1] x, real[::1] out, activation, bint derivative=False, int num_threads=1):
    """Compute an activation of x, or for results x its `derivative`.

    activation : the `Numbers` of blockcell/activations.py
    """
    cdef Activation f = activation_of(activation)
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        activate_line(&f, derivative, &x[j * L], &out[j * L], n - j * L)


def to_half(const real[::1] x, half[::1] out, int num_threads=1):
    """Round x to float16, whose bits are those of uint16."""
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        to_half_line(&x[j * LF], &out[j * LF], n - j * LF)


def from_half(const half[::1] x, real[::1] out, int num_threads=1):
    """Convert x from float16, whose bits are those of uint16."""
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        from_half_line(&x[j * LF], &out[j * LF], n - j * LF)


def add_products(real[::1] out, const real[:, ::1] a, const real[::1] panels, Py_ssize_t lines, Py_ssize_t times):
    """Add the product of `a` with each panel to `out`, `times` times."""
    cdef Py_ssize_t K = a.shape[1], size = K * lines * L, count = panels.shape[0] // size, j, _repeat
    for _repeat in range(times):
        for j in range(count):
            add_panel_product(&out[0], a.shape[0], lines, &a[0, 0], K, &panels[j * size], K, 0)


def add_products_of_columns(
    real[::1] out, const real[::1] columns, const real[::1] panels, Py_ssize_t rows, Py_ssize_t lines, Py_ssize_t times
):
    """Add the product of a block of columns with each panel to `out`, `times` times, as weight gradients are summed.

    columns : BLOCK columns of ROWS numbers, of which the first `rows` are multiplied
    """
    cdef Py_ssize_t size = BLOCK * lines * L, count = panels.shape[0] // size, j, _repeat
    for _repeat in range(times):
        for j in range(count):
            add_block_product(&out[0], rows, lines, &columns[0], 1, &panels[j * size], BLOCK, 0)


def add_quantized_products(
    int format, real[::1] out, const real[:, ::1] a, const unsigned char[::1] panels, const real[::1] scales,
    real[::1] codes, Py_ssize_t lines, Py_ssize_t times
):
    """Add the product of `a` with each panel of quantized weights to `out`, `times` times.

    format, panels, scales : how the weights are quantized, their codes, and for int8 the scales of the columns
    codes : scratch, to which rows of `a` are quantized for int8
    """
    cdef Py_ssize_t K = a.shape[1], rows = a.shape[0], r, j, _repeat
    cdef Py_ssize_t stored_k = 4 * quads_of(K) if format == INT8 else K
    cdef Py_ssize_t size = stored_k * lines * LF * bytes_per_weight(format)
    cdef const char *panel
    if format == INT8:
        for r in range(rows):
            quantize_row(<float *> &codes[r * quantized_row_stride(K)], <const float *> &a[r, 0], K)
    for _repeat in range(times):
        for j in range(panels.shape[0] // size):
            panel = <const char *> &panels[j * size]
            if format == INT8:
                add_integer_product(<float *> &out[0], rows, lines, <const float *> &codes[0], panel, K,
                                    <const float *> &scales[0], 0)
            else:
                add_float16_product(&out[0], 0, rows, 1, lines, &a[0, 0], K, <const half *> panel, 0, K)
