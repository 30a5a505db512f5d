"""One step of an optimizer, and the cross-entropy with its gradient, over arrays that can be taken as they are.

blockcell/optim.py and blockcell/loss.py have the equations.  They ask here first; where the answer is None, they
convert the arguments, or say what is wrong with them, and ask again.

The bits are those of numpy's operations on whole arrays, one after the other: every result is rounded to the arrays'
dtype, and setup.py keeps the compiler from joining a product and a sum.  Powers, logarithms and sums are numpy's.
"""
from libc.math cimport INFINITY, pow, sqrt, sqrtf
from numpy cimport (
    NPY_DOUBLE, NPY_FLOAT, NPY_INT64, NPY_INTP, PyArray_BYTES, PyArray_CheckExact, PyArray_DIMS, PyArray_ISCARRAY_RO,
    PyArray_NDIM, PyArray_SAMESHAPE, PyArray_SIZE, PyArray_SimpleNew, PyArray_TYPE, PyArray_ZEROS, import_array,
    ndarray, npy_intp
)

import numpy

from numpy_arrays cimport is_plain
from product.real cimport real

import_array()

cdef object exp = numpy.exp, log1p = numpy.log1p, total = numpy.add.reduce, DOUBLE = numpy.dtype(numpy.float64)

cdef enum:
    SLOTS = 2  # at most: arrays that an optimizer keeps for each weight
    LONG = 1 << 14  # numbers, above which a loop leaves other Python threads running
    LANES = 16


cdef inline bint is_computed(array) noexcept:
    """Whether it is of a dtype that is computed in, contiguous and in every other way plain."""
    return (
        PyArray_CheckExact(array)
        and PyArray_ISCARRAY_RO(<ndarray> array)
        and (PyArray_TYPE(<ndarray> array) == NPY_FLOAT or PyArray_TYPE(<ndarray> array) == NPY_DOUBLE)
    )


cdef inline bint is_like(array, ndarray other) noexcept:
    """The same, and of the other's dtype and shape."""
    return (
        is_computed(array)
        and PyArray_TYPE(<ndarray> array) == PyArray_TYPE(other)
        and PyArray_SAMESHAPE(<ndarray> array, other)
    )


cdef inline ndarray new_like(ndarray array):
    return PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_TYPE(array))


# ----------------------------------------------------------------------------------------------------------- optimizers
cdef enum Rule:
    SGD
    MOMENTUM
    ADAM


cdef struct Factors:
    double rate, decay1, decay2, correct1, correct2, epsilon


cdef struct Entry:  # a weight, its gradient, and what is kept from step to step, before and after the step
    const void *w
    const void *grad
    const void *before[SLOTS]
    void *after[SLOTS]
    void *moved


cdef inline real root(real x) noexcept nogil:
    return sqrtf(x) if real is float else sqrt(x)


cdef void sgd_row(
    Py_ssize_t n, const Factors *c, const real *restrict w, const real *restrict grad, real *restrict moved
) noexcept nogil:
    cdef real rate = <real> c.rate
    cdef Py_ssize_t i
    for i in range(n):
        moved[i] = w[i] - rate * grad[i]


cdef void momentum_row(
    Py_ssize_t n, const Factors *c, const real *restrict w, const real *restrict grad, const real *restrict before,
    real *restrict after, real *restrict moved
) noexcept nogil:
    cdef real rate = <real> c.rate, kept = <real> c.decay1
    cdef Py_ssize_t i
    for i in range(n):
        after[i] = kept * before[i] + grad[i]
        moved[i] = w[i] - rate * after[i]


cdef void adam_row(
    Py_ssize_t n, const Factors *c, const real *restrict w, const real *restrict grad, const real *restrict m_before,
    const real *restrict v_before, real *restrict m, real *restrict v, real *restrict moved
) noexcept nogil:
    cdef real kept1 = <real> c.decay1, kept2 = <real> c.decay2
    cdef real taken1 = <real> (1 - c.decay1), taken2 = <real> (1 - c.decay2)
    cdef real rate = <real> (c.rate / c.correct1), correct2 = <real> c.correct2, epsilon = <real> c.epsilon
    cdef real nowhere = 0 if c.epsilon else INFINITY  # without any gradient so far: there is nowhere to go
    cdef real size
    cdef Py_ssize_t i
    for i in range(n):
        m[i] = kept1 * m_before[i] + taken1 * grad[i]
        v[i] = kept2 * v_before[i] + taken2 * grad[i] * grad[i]
        size = root(v[i] / correct2) + epsilon
        moved[i] = w[i] - rate * m[i] / (nowhere if size == 0 else size)


cdef void move_row(Rule rule, const Factors *c, const Entry *e, Py_ssize_t n, const real *w) noexcept nogil:
    """`w` is the entry's, of its dtype."""
    cdef const real *grad = <const real *> e.grad
    cdef real *moved = <real *> e.moved
    if rule == SGD:
        sgd_row(n, c, w, grad, moved)
    elif rule == MOMENTUM:
        momentum_row(n, c, w, grad, <const real *> e.before[0], <real *> e.after[0], moved)
    else:
        adam_row(n, c, w, grad, <const real *> e.before[0], <const real *> e.before[1], <real *> e.after[0],
                 <real *> e.after[1], moved)


cdef void move(Rule rule, const Factors *c, const Entry *e, Py_ssize_t n, int type_number) noexcept nogil:
    if type_number == NPY_FLOAT:
        move_row(rule, c, e, n, <const float *> e.w)
    else:
        move_row(rule, c, e, n, <const double *> e.w)


cdef bint go_on(
    Rule rule, const Factors *c, tuple slots, weights, grads, state, dict new_weights, dict new_state
) except -1:
    """One step of all weights; whether they could be taken."""
    cdef Entry e
    cdef int k
    cdef Py_ssize_t n
    cdef int type_number
    cdef list held
    if type(weights) is not dict or type(grads) is not dict or (state is not None and type(state) is not dict):
        return False
    if len(<dict> weights) != len(<dict> grads):
        return False
    for name, w in (<dict> weights).items():
        grad = (<dict> grads).get(name)
        if not is_computed(w) or not is_like(grad, <ndarray> w):
            return False
        n, type_number = PyArray_SIZE(<ndarray> w), PyArray_TYPE(<ndarray> w)
        moved = new_like(<ndarray> w)
        e.w, e.grad = PyArray_BYTES(<ndarray> w), PyArray_BYTES(<ndarray> grad)
        e.moved = PyArray_BYTES(<ndarray> moved)
        new_weights[name] = moved
        held = []
        for k in range(len(slots)):
            key = f"{slots[k]}.{name}"
            if state:
                before = (<dict> state).get(key)
                if not is_like(before, <ndarray> w):
                    return False
            else:
                before = PyArray_ZEROS(PyArray_NDIM(<ndarray> w), PyArray_DIMS(<ndarray> w), type_number, False)
            after = new_like(<ndarray> w)
            e.before[k], e.after[k] = PyArray_BYTES(<ndarray> before), PyArray_BYTES(<ndarray> after)
            held.append(before)
            new_state[key] = after
        if n < LONG:
            move(rule, c, &e, n, type_number)
        else:
            with nogil:
                move(rule, c, &e, n, type_number)
    return True


def sgd(weights, grads, state, double rate):
    """The new weights and an empty state; None where something has to be converted, or explained."""
    cdef Factors c
    cdef dict new_weights = {}
    c.rate = rate
    return (new_weights, {}) if go_on(SGD, &c, (), weights, grads, state, new_weights, {}) else None


def momentum(weights, grads, state, double rate, double kept):
    """The new weights and the new state; None as above."""
    cdef Factors c
    cdef dict new_weights = {}, new_state = {}
    c.rate, c.decay1 = rate, kept
    if not go_on(MOMENTUM, &c, ("velocity",), weights, grads, state, new_weights, new_state):
        return None
    return new_weights, new_state


def adam(weights, grads, state, double rate, double decay1, double decay2, double epsilon):
    """The new weights and the new state; None as above."""
    cdef Factors c
    cdef long long steps = 0
    cdef dict new_weights = {}, new_state = {}
    if type(state) is dict and state:
        before = (<dict> state).get("step")
        if not is_plain(before, NPY_INT64, 0):
            return None
        steps = (<long long *> PyArray_BYTES(<ndarray> before))[0]
        if steps < 0:
            return None
    step = PyArray_SimpleNew(0, NULL, NPY_INT64)
    (<long long *> PyArray_BYTES(<ndarray> step))[0] = steps + 1
    new_state["step"] = step
    c.rate, c.decay1, c.decay2, c.epsilon = rate, decay1, decay2, epsilon
    c.correct1, c.correct2 = 1 - pow(decay1, steps + 1), 1 - pow(decay2, steps + 1)
    if not go_on(ADAM, &c, ("m", "v"), weights, grads, state, new_weights, new_state):
        return None
    return new_weights, new_state


# --------------------------------------------------------------------------------------------------------------- losses
cdef Py_ssize_t place_of_largest(const real *restrict z, Py_ssize_t n) noexcept nogil:
    """The first of the largest; the first NaN, if there is one."""
    cdef real[LANES] most
    cdef real best
    cdef bint odd = False
    cdef Py_ssize_t i, k, lines = n // LANES
    for k in range(LANES):
        most[k] = -INFINITY
    for i in range(lines):
        for k in range(LANES):
            most[k] = z[i * LANES + k] if z[i * LANES + k] > most[k] else most[k]
    best = -INFINITY
    for k in range(LANES):
        best = most[k] if most[k] > best else best
    for i in range(lines * LANES, n):
        best = z[i] if z[i] > best else best
    for i in range(n):
        odd |= z[i] != z[i]
    for i in range(n):
        if z[i] != z[i] if odd else z[i] == best:
            return i
    return 0


cdef void shift_rows(
    const real *logits, const npy_intp *label, real *z, npy_intp *top, real *z_label, Py_ssize_t rows,
    Py_ssize_t classes
) noexcept nogil:
    """Subtract from each row its largest entry, and note where that is, and what is left at the label."""
    cdef Py_ssize_t i, j
    cdef real most
    for i in range(rows):
        top[i] = place_of_largest(logits, classes)
        most = logits[top[i]]
        for j in range(classes):
            z[j] = logits[j] - most
        z_label[i] = z[label[i]]
        z += classes
        logits += classes


cdef void leave_out_largest(real *p, const npy_intp *top, Py_ssize_t rows, Py_ssize_t classes) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(rows):
        p[i * classes + top[i]] = 0


cdef void finish_rows(
    real *p, const npy_intp *label, const npy_intp *top, const real *others, real *logs, const real *z_label,
    Py_ssize_t rows, Py_ssize_t classes
) noexcept nogil:
    """From the powers, 0 for the largest entry's, and their sums, to the gradient; the loss of each row, in `logs`."""
    cdef Py_ssize_t i, j
    cdef real whole, divisor, count = <real> <double> rows
    for i in range(rows):
        logs[i] = logs[i] - z_label[i]  # neither is negative, so that nothing cancels
        whole = 1 + others[i]
        divisor = whole * count
        p[top[i]] = 1
        if label[i] == top[i]:
            p[label[i]] = -others[i]
        else:
            p[label[i]] = p[label[i]] - whole
        for j in range(classes):
            p[j] = p[j] / divisor
        p += classes


cdef cross_entropy_of(
    const real *values, const npy_intp *label, ndarray grad, int type_number, npy_intp rows, npy_intp classes
):
    """Its mean; the gradient goes to `grad`."""
    cdef real *p = <real *> PyArray_BYTES(grad)
    top = PyArray_SimpleNew(1, &rows, NPY_INTP)
    z_label = PyArray_SimpleNew(1, &rows, type_number)
    with nogil:
        shift_rows(values, label, p, <npy_intp *> PyArray_BYTES(<ndarray> top),
                   <real *> PyArray_BYTES(<ndarray> z_label), rows, classes)
    exp(grad, grad)
    with nogil:
        leave_out_largest(p, <npy_intp *> PyArray_BYTES(<ndarray> top), rows, classes)
    others = total(grad if PyArray_NDIM(grad) == 2 else grad.reshape(rows, classes), 1)
    logs = log1p(others)
    with nogil:
        finish_rows(p, label, <npy_intp *> PyArray_BYTES(<ndarray> top), <real *> PyArray_BYTES(<ndarray> others),
                    <real *> PyArray_BYTES(<ndarray> logs), <real *> PyArray_BYTES(<ndarray> z_label), rows, classes)
    if rows == 1:
        return float((<real *> PyArray_BYTES(<ndarray> logs))[0])
    return float(total(logs, 0, DOUBLE)) / rows


def cross_entropy(logits, labels):
    """The mean of logits (..., C) and its gradient; None where something has to be converted, or explained."""
    cdef npy_intp *shape
    cdef npy_intp rows = 1, classes
    cdef const npy_intp *label
    cdef const char *values
    cdef Py_ssize_t k
    cdef int rank
    if not is_computed(logits) or PyArray_NDIM(<ndarray> logits) == 0:
        return None
    rank, shape = PyArray_NDIM(<ndarray> logits), PyArray_DIMS(<ndarray> logits)
    classes = shape[rank - 1]
    if not is_plain(labels, NPY_INTP, rank - 1):
        return None
    for k in range(rank - 1):
        if PyArray_DIMS(<ndarray> labels)[k] != shape[k]:
            return None
        rows *= shape[k]
    if classes == 0 or rows == 0:
        return None
    label = <const npy_intp *> PyArray_BYTES(<ndarray> labels)
    for k in range(rows):
        if not 0 <= label[k] < classes:
            return None
    grad = new_like(<ndarray> logits)
    values = PyArray_BYTES(<ndarray> logits)
    if PyArray_TYPE(grad) == NPY_FLOAT:
        mean = cross_entropy_of(<const float *> values, label, grad, NPY_FLOAT, rows, classes)
    else:
        mean = cross_entropy_of(<const double *> values, label, grad, NPY_DOUBLE, rows, classes)
    return mean, grad
