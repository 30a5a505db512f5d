"""Steps of optimizers, and the cross-entropy with its gradient, over arrays that can be taken as they are.

blockcell/optim.py and blockcell/loss.py have the equations.  They ask here first; where the answer is None, they
convert the arguments, or say what is wrong with them, and ask again.

Results are bit-identical with those of numpy's operations on whole arrays, one after the other: every result is rounded
to the arrays' dtype, and setup.py keeps the compiler from fusing a product and a sum.  Powers, logarithms and sums are
numpy's.

Arrays are C-contiguous and no two of them overlap.  N is the number of rows of logits, C that of classes; a row is i, a
class c, and of a weight i is an element; lane l of line j is a number of a vector.
"""
from libc.math cimport INFINITY, pow, sqrt, sqrtf
from numpy cimport (
    NPY_DOUBLE, NPY_FLOAT, NPY_INT64, NPY_INTP, PyArray_BYTES, PyArray_CheckExact, PyArray_DIMS, PyArray_ISCARRAY_RO,
    PyArray_NDIM, PyArray_SIZE, PyArray_SimpleNew, PyArray_TYPE, PyArray_ZEROS, import_array, ndarray, npy_intp
)

import numpy

from numpy_arrays cimport is_like, is_plain

import_array()

cdef object exp = numpy.exp, log1p = numpy.log1p, add_reduce = numpy.add.reduce, DOUBLE = numpy.dtype(numpy.float64)

ctypedef fused real:  # in which arrays are computed
    float
    double

cdef enum:
    SLOTS = 2  # at most: arrays that an optimizer keeps for each weight
    LONG = 1 << 14  # numbers, above which a loop leaves other Python threads running
    LANES = 16


cdef inline bint is_real_array(array) noexcept:
    """Return whether `array` is of float32 or float64, C-contiguous, aligned and of native byte order."""
    return (
        PyArray_CheckExact(array)
        and PyArray_ISCARRAY_RO(<ndarray> array)
        and (PyArray_TYPE(<ndarray> array) == NPY_FLOAT or PyArray_TYPE(<ndarray> array) == NPY_DOUBLE)
    )


cdef inline ndarray new_like(ndarray array):
    """Return an array without values, of the dtype and shape of `array`."""
    return PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), PyArray_TYPE(array))


# ----------------------------------------------------------------------------------------------------------- optimizers
cdef enum Rule:
    SGD
    MOMENTUM
    ADAM


cdef struct Hyperparameters:  # by the equations in blockcell/optim.py
    double rate  # the learning rate
    double decay1, decay2  # momentum: the decay of the velocity; Adam: those of m and v
    double correct1, correct2  # Adam: 1 - decay ** steps, by which m and v are divided
    double epsilon


cdef struct WeightUpdate:  # the arrays of one weight in a step, all of its dtype and shape
    const void *w
    const void *grad
    const void *before[SLOTS]  # velocity, or m and v, before the step
    void *after[SLOTS]  # and after it; written
    void *new_w  # written


cdef inline real root(real x) noexcept nogil:
    """Return the square root of x."""
    return sqrtf(x) if real is float else sqrt(x)


cdef void sgd_step(
    Py_ssize_t n, const Hyperparameters *hyper, const real *restrict w, const real *restrict grad, real *restrict new_w
) noexcept nogil:
    """Update n elements of a weight by gradient descent."""
    cdef real rate = <real> hyper.rate
    cdef Py_ssize_t i
    for i in range(n):
        new_w[i] = w[i] - rate * grad[i]


cdef void momentum_step(
    Py_ssize_t n, const Hyperparameters *hyper, const real *restrict w, const real *restrict grad,
    const real *restrict velocity, real *restrict new_velocity, real *restrict new_w
) noexcept nogil:
    """Update n elements of a weight and of its velocity."""
    cdef real rate = <real> hyper.rate, decay = <real> hyper.decay1
    cdef Py_ssize_t i
    for i in range(n):
        new_velocity[i] = decay * velocity[i] + grad[i]
        new_w[i] = w[i] - rate * new_velocity[i]


cdef void adam_step(
    Py_ssize_t n, const Hyperparameters *hyper, const real *restrict w, const real *restrict grad,
    const real *restrict m, const real *restrict v, real *restrict new_m, real *restrict new_v, real *restrict new_w
) noexcept nogil:
    """Update n elements of a weight and of its moments m and v."""
    cdef real decay1 = <real> hyper.decay1, decay2 = <real> hyper.decay2
    cdef real one_minus_decay1 = <real> (1 - hyper.decay1), one_minus_decay2 = <real> (1 - hyper.decay2)
    cdef real rate = <real> (hyper.rate / hyper.correct1), correct2 = <real> hyper.correct2
    cdef real epsilon = <real> hyper.epsilon
    cdef real divisor_for_zero = 0 if hyper.epsilon else INFINITY  # w stays where all gradients so far were zero
    cdef real divisor
    cdef Py_ssize_t i
    for i in range(n):
        new_m[i] = decay1 * m[i] + one_minus_decay1 * grad[i]
        new_v[i] = decay2 * v[i] + one_minus_decay2 * grad[i] * grad[i]
        divisor = root(new_v[i] / correct2) + epsilon
        new_w[i] = w[i] - rate * new_m[i] / (divisor_for_zero if divisor == 0 else divisor)


cdef void apply_rule(
    Rule rule, const Hyperparameters *hyper, const WeightUpdate *u, Py_ssize_t n, const real *w
) noexcept nogil:
    """Update the n elements of a weight.

    w : u.w as a pointer of its dtype
    """
    cdef const real *grad = <const real *> u.grad
    cdef real *new_w = <real *> u.new_w
    if rule == SGD:
        sgd_step(n, hyper, w, grad, new_w)
    elif rule == MOMENTUM:
        momentum_step(n, hyper, w, grad, <const real *> u.before[0], <real *> u.after[0], new_w)
    else:
        adam_step(n, hyper, w, grad, <const real *> u.before[0], <const real *> u.before[1], <real *> u.after[0],
                  <real *> u.after[1], new_w)


cdef void update_weight(
    Rule rule, const Hyperparameters *hyper, const WeightUpdate *u, Py_ssize_t n, int type_number
) noexcept nogil:
    """Update the n elements of a weight of float32 or float64."""
    if type_number == NPY_FLOAT:
        apply_rule(rule, hyper, u, n, <const float *> u.w)
    else:
        apply_rule(rule, hyper, u, n, <const double *> u.w)


cdef tuple update_weights(
    Rule rule, const Hyperparameters *hyper, tuple slots, weights, grads, state, dict new_state
):
    """Make one step with all weights; return the new weights and the new state, or None unless all arrays could be
    taken as they are.

    Parameters
    ----------
    slots : tuple of str
        The names of what the optimizer keeps for each weight; the keys of a state are "slot.weight".
    weights, grads, state : dict of str to ndarray
        Of the user, so of any type; the state may be None, before the first step.
    new_state : dict of str to ndarray
        Is filled with new arrays.
    """
    cdef dict new_weights = {}
    cdef WeightUpdate u
    cdef int k
    cdef Py_ssize_t n
    cdef int type_number
    cdef list references  # to the arrays that `u` points to, as another thread may change the dict `state`
    if not isinstance(weights, dict) or type(grads) is not dict or (state is not None and type(state) is not dict):
        return None
    if len(<dict> weights) != len(<dict> grads):
        return None
    for name, w in (<dict> weights).items():
        grad = (<dict> grads).get(name)
        if not is_real_array(w) or not is_like(grad, <ndarray> w):
            return None
        n, type_number = PyArray_SIZE(<ndarray> w), PyArray_TYPE(<ndarray> w)
        new_w = new_like(<ndarray> w)
        u.w, u.grad = PyArray_BYTES(<ndarray> w), PyArray_BYTES(<ndarray> grad)
        u.new_w = PyArray_BYTES(<ndarray> new_w)
        new_weights[name] = new_w
        references = []
        for k in range(len(slots)):
            key = f"{slots[k]}.{name}"
            if state:
                before = (<dict> state).get(key)
                if not is_like(before, <ndarray> w):
                    return None
            else:
                before = PyArray_ZEROS(PyArray_NDIM(<ndarray> w), PyArray_DIMS(<ndarray> w), type_number, False)
            after = new_like(<ndarray> w)
            u.before[k], u.after[k] = PyArray_BYTES(<ndarray> before), PyArray_BYTES(<ndarray> after)
            references.append(before)
            new_state[key] = after
        if n < LONG:
            update_weight(rule, hyper, &u, n, type_number)
        else:
            with nogil:
                update_weight(rule, hyper, &u, n, type_number)
    return new_weights, new_state


def sgd(weights, grads, state, double rate):
    """Return the new weights and an empty state; None where an argument has to be converted, or explained."""
    cdef Hyperparameters hyper
    hyper.rate = rate
    return update_weights(SGD, &hyper, (), weights, grads, state, {})


def momentum(weights, grads, state, double rate, double decay):
    """Return the new weights and the new state; None where an argument has to be converted, or explained."""
    cdef Hyperparameters hyper
    hyper.rate, hyper.decay1 = rate, decay
    return update_weights(MOMENTUM, &hyper, ("velocity",), weights, grads, state, {})


def adam(weights, grads, state, double rate, double decay1, double decay2, double epsilon):
    """Return the new weights and the new state; None where an argument has to be converted, or explained."""
    cdef Hyperparameters hyper
    cdef long long steps = 0
    if type(state) is dict and state:
        before = (<dict> state).get("step")
        if not is_plain(before, NPY_INT64, 0):
            return None
        steps = (<long long *> PyArray_BYTES(<ndarray> before))[0]
        if steps < 0:
            return None
    step = PyArray_SimpleNew(0, NULL, NPY_INT64)
    (<long long *> PyArray_BYTES(<ndarray> step))[0] = steps + 1
    hyper.rate, hyper.decay1, hyper.decay2, hyper.epsilon = rate, decay1, decay2, epsilon
    hyper.correct1, hyper.correct2 = 1 - pow(decay1, steps + 1), 1 - pow(decay2, steps + 1)
    return update_weights(ADAM, &hyper, ("m", "v"), weights, grads, state, {"step": step})


# --------------------------------------------------------------------------------------------------------------- losses
cdef Py_ssize_t index_of_largest(const real *restrict z, Py_ssize_t C) noexcept nogil:
    """Return the index of the first of the largest of C numbers, or of the first NaN, if there is one."""
    cdef real[LANES] lane_largest
    cdef real largest
    cdef bint has_nan = False
    cdef Py_ssize_t c, j, l, lines = C // LANES
    for l in range(LANES):
        lane_largest[l] = -INFINITY
    for j in range(lines):
        for l in range(LANES):
            lane_largest[l] = z[j * LANES + l] if z[j * LANES + l] > lane_largest[l] else lane_largest[l]
    largest = -INFINITY
    for l in range(LANES):
        largest = lane_largest[l] if lane_largest[l] > largest else largest
    for c in range(lines * LANES, C):
        largest = z[c] if z[c] > largest else largest
    for c in range(C):
        has_nan |= z[c] != z[c]
    for c in range(C):
        if z[c] != z[c] if has_nan else z[c] == largest:
            return c
    return 0


cdef void subtract_largest(
    const real *logits, const npy_intp *label, real *z, npy_intp *top, real *z_label, Py_ssize_t N, Py_ssize_t C
) noexcept nogil:
    """Subtract from each row its largest logit.

    logits : [N,C]
    label : [N], the class of each row
    z : [N,C], written: the differences
    top : [N], written: the class of the largest logit
    z_label : [N], written: the difference at the label
    """
    cdef Py_ssize_t i, c
    cdef real largest
    for i in range(N):
        top[i] = index_of_largest(logits, C)
        largest = logits[top[i]]
        for c in range(C):
            z[c] = logits[c] - largest
        z_label[i] = z[label[i]]
        z += C
        logits += C


cdef void losses_and_gradients(
    real *p, const npy_intp *label, const npy_intp *top, const real *other_sum, real *loss, const real *z_label,
    Py_ssize_t N, Py_ssize_t C
) noexcept nogil:
    """Compute the loss of each row, and the gradient of their mean.

    p : [N,C], e to the power of the differences, but 0 at the largest logit; becomes the gradient
    label, top, z_label : as for `subtract_largest`
    other_sum : [N], the sum of each row of p
    loss : [N], log(1 + other_sum); becomes the loss
    """
    cdef Py_ssize_t i, c
    cdef real row_sum, divisor, rows = <real> <double> N
    for i in range(N):
        loss[i] = loss[i] - z_label[i]  # neither is negative, so that nothing cancels
        row_sum = 1 + other_sum[i]
        divisor = row_sum * rows
        p[top[i]] = 1
        if label[i] == top[i]:
            p[label[i]] = -other_sum[i]
        else:
            p[label[i]] = p[label[i]] - row_sum
        for c in range(C):
            p[c] = p[c] / divisor
        p += C


cdef mean_cross_entropy(
    const real *logits, const npy_intp *label, ndarray grad, int type_number, npy_intp N, npy_intp C
):
    """Return the mean of the losses of all rows as a float.

    logits : [N,C]
    label : [N]
    grad : an array of N * C numbers of the logits' dtype; the gradient is written to it
    """
    cdef real *p = <real *> PyArray_BYTES(grad)
    cdef ndarray top_classes = PyArray_SimpleNew(1, &N, NPY_INTP), z_labels = PyArray_SimpleNew(1, &N, type_number)
    cdef npy_intp *top = <npy_intp *> PyArray_BYTES(top_classes)
    cdef real *z_label = <real *> PyArray_BYTES(z_labels)
    cdef Py_ssize_t i
    with nogil:
        subtract_largest(logits, label, p, top, z_label, N, C)
    exp(grad, grad)
    for i in range(N):
        p[i * C + top[i]] = 0
    other_sums = add_reduce(grad if PyArray_NDIM(grad) == 2 else grad.reshape(N, C), 1)
    losses = log1p(other_sums)
    with nogil:
        losses_and_gradients(p, label, top, <real *> PyArray_BYTES(<ndarray> other_sums),
                             <real *> PyArray_BYTES(<ndarray> losses), z_label, N, C)
    if N == 1:
        return float((<real *> PyArray_BYTES(<ndarray> losses))[0])
    return float(add_reduce(losses, 0, DOUBLE)) / N


def cross_entropy(logits, labels):
    """Return the mean cross-entropy of logits (..., C) and its gradient; None where an argument has to be converted, or
    explained."""
    cdef npy_intp *shape
    cdef npy_intp N = 1, C
    cdef const npy_intp *label
    cdef const char *values
    cdef Py_ssize_t i
    cdef int d, rank
    if not is_real_array(logits) or PyArray_NDIM(<ndarray> logits) == 0:
        return None
    rank, shape = PyArray_NDIM(<ndarray> logits), PyArray_DIMS(<ndarray> logits)
    C = shape[rank - 1]
    if not is_plain(labels, NPY_INTP, rank - 1):
        return None
    for d in range(rank - 1):
        if PyArray_DIMS(<ndarray> labels)[d] != shape[d]:
            return None
        N *= shape[d]
    if C == 0 or N == 0:
        return None
    label = <const npy_intp *> PyArray_BYTES(<ndarray> labels)
    for i in range(N):
        if not 0 <= label[i] < C:
            return None
    grad = new_like(<ndarray> logits)
    values = PyArray_BYTES(<ndarray> logits)
    if PyArray_TYPE(grad) == NPY_FLOAT:
        mean = mean_cross_entropy(<const float *> values, label, grad, NPY_FLOAT, N, C)
    else:
        mean = mean_cross_entropy(<const double *> values, label, grad, NPY_DOUBLE, N, C)
    return mean, grad
