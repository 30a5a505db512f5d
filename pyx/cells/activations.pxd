"""Activations without branches and without libm, so that compilers turn loops over them into vector instructions.

All activations of blockcell/activations.py are in `activate`, for a line of units, and their derivatives, from the
value, in `slope`.  Cells apply them by `activate_gate` and `activate_state`, and their derivatives by `gate_grad` and
`state_slope`: these compile the loops of the defaults, sigmoid of gates and tanh of states, into the cells' functions.
A cell's functions are compiled twice, for each type of `activations`: with the defaults alone, values stay in
registers.  A pointer to that type is one to a Cell.

sigmoid and tanh need one exponential and one division.  Results are within 2 ulp of the true value (of subnormal
results too), for every float and for double; +-0, infinities and NaN give what they should.  Largest errors found, in
ulp:

              float, all 2**32 inputs     double, 50 million samples
    sigmoid   1.9991 at -0.000345         1.9985 at -0.000095
    tanh      1.9873 at 0.5191            2.0000 at 18.17; below 18, 1.97 at 0.499

Compilers may contract products and sums to fused multiply-adds or not: the bounds hold either way.
"""
from libc.math cimport copysign, copysignf, fabs, fabsf

from cells.types cimport (
    ELU, EXPONENTIAL, HARD_SIGMOID, LEAKY_RELU, RELU, SELU, SIGMOID, SOFTPLUS, SOFTSIGN, TANH, Activation,
    Cell
)
from product.lines cimport LF, L, inline_void, noinline_void
from product.real cimport COMPUTES_FLOAT, real

cdef extern from "cells/activations.h":
    ctypedef struct default_activations: pass
    ctypedef struct any_activations: pass
    const double LOG2_E, SELU_SCALE, SELU_EDGE
    float exp2_of_low_bits_f(float x) noexcept nogil
    double exp2_of_low_bits_d(double x) noexcept nogil
    float[3] bounds_f
    double[3] bounds_d
    float[3] exp_bounds_f
    double[3] exp_bounds_d

ctypedef fused activations:
    default_activations
    any_activations


cdef inline inline_void split_exp(real x, real scale, real rate, real shift, real *two_n, real *p) noexcept nogil:
    """Compute exp(scale * x) as two numbers: two_n * (1 + scale * p) = 2**shift * exp(scale * x), two_n a power of two.

    `scale` is a power of two, with a sign: the constants below scale without rounding.  `rate`, about scale / ln 2,
    decides on the power of two; scale / ln 2 itself makes p smallest.
    """
    cdef real magic, n, low, high, r, rr, s2, s4, c23, c45, c67, c89, c1011
    # n = round(rate * x): adding 1.5 * 2**23 (or 2**52) leaves no bits after the point, and n, with the
    # exponent's bias, in the lowest ones.
    if COMPUTES_FLOAT:
        magic = <real> 12582912.0 + (<real> 127.0 + shift)
    else:
        magic = <real> 6755399441055744.0 + (<real> 1023.0 + shift)
    n = x * rate + magic
    if COMPUTES_FLOAT:
        two_n[0] = exp2_of_low_bits_f(n)
    else:
        two_n[0] = exp2_of_low_bits_d(n)
    n = n - magic
    # r = x - n * ln 2 / scale, with ln 2 as a sum of two numbers, the first so short that its product with n is exact.
    # p = r + r**2 * (c2 * scale + c3 * scale**2 * r + ...), minimax in relative error for |scale * r| <= ln 2 / 2.
    s2 = scale * scale
    s4 = s2 * s2
    if COMPUTES_FLOAT:
        r = (x - n * (<real> 0.693359375 / scale)) - n * (<real> -2.12194440e-4 / scale)
        rr = r * r
        c23 = <real> 0.49999997 * scale + <real> 0.16666545 * s2 * r
        c45 = <real> 0.0416674316 * s2 * scale + <real> 0.00836644974 * s4 * r
        p[0] = r + rr * (c23 + rr * (c45 + rr * (<real> 0.0013871172 * s4 * scale)))
    else:
        high = x - n * (<real> 0.693145751953125 / scale)
        low = n * (<real> 1.42860682030941723212e-6 / scale)
        r = high - low  # its rounding alone would take tanh past 2 ulp, so p is made of both
        rr = r * r
        c23 = <real> 0.5 * scale + <real> 0.16666666666666677 * s2 * r
        c45 = <real> 0.04166666666666665 * s2 * scale + <real> 0.008333333333321563 * s4 * r
        c67 = <real> 0.001388888888890701 * s4 * scale + <real> 0.00019841269886207804 * s4 * s2 * r
        c89 = <real> 2.4801587261356747e-05 * s4 * s2 * scale + <real> 2.7557244119583e-06 * s4 * s4 * r
        c1011 = <real> 2.7557338798499326e-07 * s4 * s4 * scale + <real> 2.5109084504836315e-08 * s4 * s4 * s2 * r
        c1011 = c1011 + rr * (<real> 2.0892413270062117e-09 * s4 * s4 * s2 * scale)
        p[0] = high + (rr * (c23 + rr * c45 + rr * rr * (c67 + rr * (c89 + rr * c1011))) - low)


cdef inline real sigmoid(real x) noexcept nogil:
    """Return 1 / (1 + exp(-x))."""
    cdef real e, p, one
    # The clamps let NaN through: comparisons with it are false.
    # 1 and exp(-x) are both taken times 2**-64 (2**-512), so that neither overflows before the result is zero.
    if COMPUTES_FLOAT:
        x = bounds_f[0] if x < bounds_f[0] else x
        x = bounds_f[1] if bounds_f[1] < x else x
        one = <real> 5.421010862427522e-20
        split_exp(x, <real> -1.0, <real> -LOG2_E, <real> -64.0, &e, &p)
    else:
        x = bounds_d[0] if x < bounds_d[0] else x
        x = bounds_d[1] if bounds_d[1] < x else x
        one = <real> 7.458340731200207e-155
        split_exp(x, <real> -1.0, <real> -LOG2_E, <real> -512.0, &e, &p)
    return one / (e + (one - e * p))


cdef inline real tanh(real x) noexcept nogil:
    """Return tanh(x): (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.  Numerator and denominator are halved,
    and free of cancellation."""
    cdef real a, e, p, half = <real> 0.5
    if COMPUTES_FLOAT:
        a = fabsf(x)
        a = bounds_f[2] if bounds_f[2] < a else a
        split_exp(a, <real> -2.0, <real> (-2.0 * LOG2_E), <real> 0.0, &e, &p)
    else:
        a = fabs(x)
        a = bounds_d[2] if bounds_d[2] < a else a
        # A rate 3 % too high: from a = 0.505, not 0.520, p enters with a fourth and no longer with half of its error.
        split_exp(a, <real> -2.0, <real> -2.96875, <real> 0.0, &e, &p)
    a = ((half - half * e) + e * p) / ((half + half * e) - e * p)
    return copysignf(a, x) if COMPUTES_FLOAT else copysign(a, x)


cdef inline real scaled_exp(real x) noexcept nogil:
    """Return exp(x) for x <= 0, times 2**64 (2**512) so that it is not subnormal: a term of a softmax, which divides by
    their sum."""
    cdef real two_n, p
    if COMPUTES_FLOAT:
        x = bounds_f[0] if x < bounds_f[0] else x
        split_exp(x, <real> 1.0, <real> LOG2_E, <real> 64.0, &two_n, &p)
    else:
        x = bounds_d[0] if x < bounds_d[0] else x
        split_exp(x, <real> 1.0, <real> LOG2_E, <real> 512.0, &two_n, &p)
    return two_n + two_n * p


cdef inline real exp_minus_one(real x) noexcept nogil:
    """Return exp(x) - 1 for x <= 0, with all digits also near 0."""
    cdef real two_n, p, one = 1
    if COMPUTES_FLOAT:
        x = exp_bounds_f[0] if x < exp_bounds_f[0] else x
    else:
        x = exp_bounds_d[0] if x < exp_bounds_d[0] else x
    split_exp(x, <real> 1.0, <real> LOG2_E, <real> 0.0, &two_n, &p)
    return (two_n - one) + two_n * p


cdef inline real exponential(real x) noexcept nogil:
    """Return exp(x): of positive x by way of exp(x) / 2**64 (2**512), else by way of exp(x) * 2**64 (2**512), which
    neither overflow nor are subnormal."""
    cdef real two_n, p, shift, scale
    if COMPUTES_FLOAT:
        x = exp_bounds_f[1] if x < exp_bounds_f[1] else x
        x = exp_bounds_f[2] if exp_bounds_f[2] < x else x
        shift = <real> -64.0 if x > 0 else <real> 64.0
        scale = <real> 18446744073709551616.0 if x > 0 else <real> 5.421010862427522e-20
    else:
        x = exp_bounds_d[1] if x < exp_bounds_d[1] else x
        x = exp_bounds_d[2] if exp_bounds_d[2] < x else x
        shift = <real> -512.0 if x > 0 else <real> 512.0
        scale = <real> 1.3407807929942597e154 if x > 0 else <real> 7.458340731200207e-155
    split_exp(x, <real> 1.0, <real> LOG2_E, shift, &two_n, &p)
    return (two_n + two_n * p) * scale


cdef inline real softplus(real x) noexcept nogil:
    """Return log(1 + exp(x)) = max(x, 0) + log(1 + t), with t = exp(-|x|).

    log(1 + t) = 2 atanh(s), with s = t / (2 + t)."""
    cdef real t, s, u, q, two = 2
    if COMPUTES_FLOAT:
        t = scaled_exp(-fabsf(x)) * <real> 5.421010862427522e-20
    else:
        t = scaled_exp(-fabs(x)) * <real> 7.458340731200207e-155
    s = t / (two + t)
    u = s * s
    # (2 atanh(s) - 2 s) / s**3, of s <= 1 / 3
    if COMPUTES_FLOAT:
        q = <real> 0.21706576 + u * <real> 0.23224329
        q = <real> 0.66666667 + u * (<real> 0.39999706 + u * (<real> 0.28592358 + u * q))
    else:
        q = <real> 0.120010728095907 + u * (<real> 0.0880073848614467 + u * <real> 0.161640456119435)
        q = <real> 0.181817894361328582 + u * (<real> 0.153855700649586231 + u * (<real> 0.13314144209654936 + u * q))
        q = <real> 0.285714285671087572 + u * (<real> 0.222222227174278630 + u * q)
        q = <real> 0.666666666666666586 + u * (<real> 0.400000000000145827 + u * q)
    return (x if x > 0 else <real> 0.0) + (two * s + s * (u * q))


# --------------------------------------------------------------------------------------------- the activations of cells
cdef inline noinline_void activate(const Activation *f, const real *restrict z, real *restrict y) noexcept nogil:
    """Compute y = f(z) for one line."""
    cdef Py_ssize_t l
    cdef real a = <real> f.a, b = <real> f.b, zero = 0, one = 1, v
    if f.number == TANH:
        for l in range(L):
            y[l] = tanh(z[l])
    elif f.number == SIGMOID:
        for l in range(L):
            y[l] = sigmoid(z[l])
    elif f.number == RELU:  # NaN stays, here and below
        for l in range(L):
            y[l] = zero if z[l] < zero else z[l]
    elif f.number == LEAKY_RELU:
        for l in range(L):
            v = a * z[l]
            y[l] = z[l] if z[l] > zero else v
    elif f.number == ELU:
        for l in range(L):
            v = a * exp_minus_one(zero if z[l] > zero else z[l])
            y[l] = z[l] if z[l] > zero else v
    elif f.number == SELU:
        a, b = <real> SELU_SCALE, <real> SELU_EDGE
        for l in range(L):
            v = b * exp_minus_one(zero if z[l] > zero else z[l])
            y[l] = a * z[l] if z[l] > zero else v
    elif f.number == SOFTPLUS:
        for l in range(L):
            y[l] = softplus(z[l])
    elif f.number == SOFTSIGN:
        for l in range(L):
            v = fabsf(z[l]) if COMPUTES_FLOAT else fabs(z[l])
            y[l] = z[l] / (one + v)
    elif f.number == EXPONENTIAL:
        for l in range(L):
            y[l] = exponential(z[l])
    elif f.number == HARD_SIGMOID:
        for l in range(L):
            v = a * z[l] + b
            v = zero if v < zero else v
            y[l] = one if v > one else v
    else:
        for l in range(L):
            y[l] = z[l]


cdef inline noinline_void slope(const Activation *f, const real *restrict y, real *restrict s) noexcept nogil:
    """Compute the derivative s of f where its value is y, for one line."""
    cdef Py_ssize_t l
    cdef real a = <real> f.a, b, zero = 0, one = 1, v
    if f.number == TANH:
        for l in range(L):
            s[l] = one - y[l] * y[l]
    elif f.number == SIGMOID:
        for l in range(L):
            s[l] = y[l] * (one - y[l])
    elif f.number == RELU:
        for l in range(L):
            s[l] = one if y[l] > zero else zero
    elif f.number == LEAKY_RELU:
        for l in range(L):
            s[l] = one if y[l] > zero else a
    elif f.number == ELU:
        for l in range(L):
            v = y[l] + a
            s[l] = one if y[l] > zero else v
    elif f.number == SELU:
        a, b = <real> SELU_SCALE, <real> SELU_EDGE
        for l in range(L):
            v = y[l] + b
            s[l] = a if y[l] > zero else v
    elif f.number == SOFTPLUS:
        for l in range(L):
            s[l] = -exp_minus_one(-y[l])
    elif f.number == SOFTSIGN:
        for l in range(L):
            v = one - (fabsf(y[l]) if COMPUTES_FLOAT else fabs(y[l]))
            s[l] = v * v
    elif f.number == EXPONENTIAL:
        for l in range(L):
            s[l] = y[l]
    elif f.number == HARD_SIGMOID:
        for l in range(L):
            v = a if y[l] > zero else zero
            s[l] = zero if y[l] >= one else v
    else:
        for l in range(L):
            s[l] = one


cdef inline inline_void activate_gate(const activations *cell, const real *restrict z, real *restrict y) noexcept nogil:
    """Compute y = f(z) for a line of gates, whose default is sigmoid."""
    cdef const Activation *f = &(<const Cell *> cell).recurrent
    cdef Py_ssize_t l
    if activations is any_activations:
        if f.number != SIGMOID:
            activate(f, z, y)
            return
    for l in range(L):
        y[l] = sigmoid(z[l])


cdef inline inline_void activate_state(
    const activations *cell, const real *restrict z, real *restrict y
) noexcept nogil:
    """Compute y = f(z) for a line of states or candidates, whose default is tanh."""
    cdef const Activation *f = &(<const Cell *> cell).activation
    cdef Py_ssize_t l
    if activations is any_activations:
        if f.number != TANH:
            activate(f, z, y)
            return
    for l in range(L):
        y[l] = tanh(z[l])


cdef inline inline_void gate_grad(const activations *cell, const real *restrict y, real *restrict d) noexcept nogil:
    """Turn the gradient d of a line of gates y = f(z) into that of z: multiply d by f'(z)."""
    cdef const Activation *f = &(<const Cell *> cell).recurrent
    cdef Py_ssize_t l
    cdef real one = 1
    cdef real[LF] s
    if activations is any_activations:
        if f.number != SIGMOID:
            slope(f, y, s)
            for l in range(L):
                d[l] = d[l] * s[l]
            return
    for l in range(L):
        d[l] = d[l] * y[l] * (one - y[l])


cdef inline inline_void state_slope(const activations *cell, const real *restrict y, real *restrict s) noexcept nogil:
    """Compute s = f'(z) for a line of states or candidates y = f(z)."""
    cdef const Activation *f = &(<const Cell *> cell).activation
    cdef Py_ssize_t l
    cdef real one = 1
    if activations is any_activations:
        if f.number != TANH:
            slope(f, y, s)
            return
    for l in range(L):
        s[l] = one - y[l] * y[l]
