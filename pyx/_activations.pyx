"""What tests call alone: activations, their slopes and half precision over arrays, in lines of 64 bytes, as they are
computed in the kernels.

`out` has the size of `x`. A value's result does not depend on where in the array it is.
"""
from cython.parallel cimport prange

cimport activations
from half cimport half
from real cimport real
from source cimport BLOCKCELL_SOURCE
from tile cimport LF, line_of, lines_in, load_line, store_line

SOURCE = BLOCKCELL_SOURCE.decode()


cdef inline void sigmoid_line(const real *restrict x, real *restrict out, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t l
    cdef real[LF] z
    load_line(&z[0], x, n)
    for l in range(line_of(x)):
        z[l] = activations.sigmoid(z[l])
    store_line(out, &z[0], n)


cdef inline void tanh_line(const real *restrict x, real *restrict out, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t l
    cdef real[LF] z
    load_line(&z[0], x, n)
    for l in range(line_of(x)):
        z[l] = activations.tanh(z[l])
    store_line(out, &z[0], n)


cdef inline void activate_line(
    const activations.Activation *f, const real *restrict x, real *restrict out, Py_ssize_t n
) noexcept nogil:
    cdef real[LF] z
    cdef real[LF] y
    load_line(&z[0], x, n)
    activations.activate(f, z, y)
    store_line(out, &y[0], n)


cdef inline void slope_line(
    const activations.Activation *f, const real *restrict x, real *restrict out, Py_ssize_t n
) noexcept nogil:
    cdef real[LF] y
    cdef real[LF] s
    load_line(&y[0], x, n)
    activations.slope(f, y, s)
    store_line(out, &s[0], n)


cdef inline void to_half_line(const float *restrict x, half *restrict out, Py_ssize_t n) noexcept nogil:
    cdef float[LF] z
    load_line(&z[0], x, n)
    store_line(out, &z[0], n)


cdef inline void from_half_line(const half *restrict x, float *restrict out, Py_ssize_t n) noexcept nogil:
    cdef float[LF] z
    load_line(&z[0], x, n)
    store_line(out, &z[0], n)


def sigmoid(const real[::1] x, real[::1] out, int num_threads=1):
    cdef Py_ssize_t j, n = x.shape[0], lanes = line_of(<const real *> NULL)
    for j in prange(lines_in(<const real *> NULL, n), nogil=True, num_threads=num_threads):
        sigmoid_line(&x[j * lanes], &out[j * lanes], n - j * lanes)


def tanh(const real[::1] x, real[::1] out, int num_threads=1):
    cdef Py_ssize_t j, n = x.shape[0], lanes = line_of(<const real *> NULL)
    for j in prange(lines_in(<const real *> NULL, n), nogil=True, num_threads=num_threads):
        tanh_line(&x[j * lanes], &out[j * lanes], n - j * lanes)


def activate(const real[::1] x, real[::1] out, activation, int num_threads=1):
    """`activation` and below are `Numbers` of blockcell/activations.py."""
    cdef activations.Activation f = activations.activation_of(activation)
    cdef Py_ssize_t j, n = x.shape[0], lanes = line_of(<const real *> NULL)
    for j in prange(lines_in(<const real *> NULL, n), nogil=True, num_threads=num_threads):
        activate_line(&f, &x[j * lanes], &out[j * lanes], n - j * lanes)


def slope(const real[::1] x, real[::1] out, activation, int num_threads=1):
    cdef activations.Activation f = activations.activation_of(activation)
    cdef Py_ssize_t j, n = x.shape[0], lanes = line_of(<const real *> NULL)
    for j in prange(lines_in(<const real *> NULL, n), nogil=True, num_threads=num_threads):
        slope_line(&f, &x[j * lanes], &out[j * lanes], n - j * lanes)


def to_half(const float[::1] x, half[::1] out, int num_threads=1):
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(<const float *> NULL, n), nogil=True, num_threads=num_threads):
        to_half_line(&x[j * LF], &out[j * LF], n - j * LF)


def from_half(const half[::1] x, float[::1] out, int num_threads=1):
    cdef Py_ssize_t j, n = x.shape[0]
    for j in prange(lines_in(<const float *> NULL, n), nogil=True, num_threads=num_threads):
        from_half_line(&x[j * LF], &out[j * LF], n - j * LF)
