"""Functions of the kernels that tests and benchmarks/itself.py call alone; wheels do not have this module.

Activations, their derivatives and conversions from and to half precision run over arrays in lines of 64 bytes, as in
the kernels; float16 where float is computed.  `out` has the size of `x`, and the result of a number does not depend on
its position.  n is how many numbers there are from a line's first one to the end of the array, which may be more or
fewer than a line has.  j is a line or a panel.

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
from product.lines cimport LF, Array, L, array_of, lines_in, load_line, reals, store_line
from product.quantized cimport INT8, add_float16_product, bytes_per_weight
from product.real cimport real
from product.tile cimport BLOCK, ROWS, add_block_product, add_panel_product
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
TILE_ROWS = ROWS
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


cdef inline void compute_line(const Activation *f, bint derivative, Array x, Array out, Py_ssize_t n) noexcept nogil:
    """Convert a line; with an activation f compute that, or for a line of its results its `derivative`."""
    cdef real[LF] z
    cdef real[LF] y
    load_line(&z[0], x, n)
    if f is NULL:
        store_line(out, &z[0], n)
    elif derivative:
        activations.slope(f, z, y)
        store_line(out, &y[0], n)
    else:
        activations.activate(f, z, y)
        store_line(out, &y[0], n)


def activate(const real[::1] x, real[::1] out, activation, bint derivative=False, int num_threads=1):
    """Compute an activation of x, or for results x its `derivative`.

    activation : the `Numbers` of blockcell/activations.py
    """
    cdef Activation f = activation_of(activation)
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        compute_line(&f, derivative, reals(&x[j * L]), reals(&out[j * L]), n - j * L)


def to_half(const real[::1] x, half[::1] out, int num_threads=1):
    """Round x to float16, whose bits are those of uint16."""
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        compute_line(NULL, False, reals(&x[j * L]), array_of(&out[j * L], True), n - j * L)


def from_half(const half[::1] x, real[::1] out, int num_threads=1):
    """Convert x from float16, whose bits are those of uint16."""
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(n), nogil=True, num_threads=num_threads):
        compute_line(NULL, False, array_of(&x[j * L], True), reals(&out[j * L]), n - j * L)


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
