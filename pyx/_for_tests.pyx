"""Functions of the kernels that tests call alone; wheels do not have this module.

Activations, their derivatives and conversions from and to half precision run over arrays in lines of 64 bytes, as in
the kernels; float16 where float is computed.  `out` has the size of `x`, and the result of a number does not depend on
its position.  n is how many numbers there are from a line's first one to the end of the array, which may be more or
fewer than a line has.  j is a line.
"""
from cython.parallel cimport prange

cimport cells.activations as activations
from cells.types cimport Activation, activation_of
from product.half cimport half
from product.lines cimport LF, Array, L, array_of, lines_in, load_line, reals, store_line
from product.real cimport real
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()


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
