"""The steps of a sequence: their order, where their rows are in memory, and where a row ends or starts anew.

Marks, where there are any, say for every row (t, b), r = t * B + b: that the row does not take part in this step, that
the state which it starts from is zero, or that it is the initial one.  Else it is that of the step processed before.
Without marks every row takes part in all steps and starts from the initial state.
"""
from real cimport real
from tile cimport load_row, store

cdef enum:
    ENDED = 1  # x is not looked at, outputs are zero, the state stays
    FRESH = 2
    FIRST = 4


cdef struct Steps:
    Py_ssize_t T, B
    bint reverse  # the last step is processed first
    const unsigned char *marks  # or NULL


cdef struct Layout:  # how the rows (t, b) of an array of the caller's lie in memory; a row itself has no gaps
    Py_ssize_t step, row  # elements from one step to the next, and from one batch row to the next


cdef inline Layout layout_of(Py_ssize_t B, Py_ssize_t size) noexcept nogil:
    """Of an array [T,B,size] without gaps."""
    cdef Layout a
    a.step, a.row = B * size, size
    return a


cdef inline Layout strided(const Py_ssize_t *strides, Py_ssize_t itemsize) noexcept nogil:
    """Of an array with these strides."""
    cdef Layout a
    a.step, a.row = strides[0] // itemsize, strides[1] // itemsize
    return a


cdef inline Py_ssize_t place(const Layout *a, Py_ssize_t t, Py_ssize_t b) noexcept nogil:
    """Where row (t, b) begins."""
    return t * a.step + b * a.row


cdef inline Steps steps_of(Py_ssize_t T, Py_ssize_t B) noexcept nogil:
    """All rows through all steps."""
    cdef Steps s
    s.T, s.B, s.reverse, s.marks = T, B, False, NULL
    return s


cdef inline Py_ssize_t step_at(const Steps *s, Py_ssize_t k) noexcept nogil:
    """The step that is processed as number k."""
    return s.T - 1 - k if s.reverse else k


cdef inline bint marked(const Steps *s, Py_ssize_t k, Py_ssize_t b, int mark) noexcept nogil:
    """Whether row b of the step processed as number k, if there is one, has the mark."""
    return s.marks is not NULL and k < s.T and s.marks[step_at(s, k) * s.B + b] & mark != 0


cdef inline void load_steps(
    const Steps *s, real *dst, Py_ssize_t stride, const store *x, const Layout *layout, Py_ssize_t I, Py_ssize_t k,
    Py_ssize_t b, Py_ssize_t rows, Py_ssize_t r0, Py_ssize_t r1
) noexcept nogil:
    """x of `rows` batch rows from b on to scratch, step after step from number k on; of these, the rows r0 to r1."""
    cdef Py_ssize_t r, q
    if r0 == r1:
        return
    k, q = k + r0 // rows, r0 % rows
    for r in range(r0, r1):
        load_row(dst + r * stride, x + place(layout, step_at(s, k), b + q), I)
        q += 1
        if q == rows:
            k, q = k + 1, 0


cdef inline const store *input_row(
    const Steps *s, const store *first, Py_ssize_t H, const store *rest, const Layout *layout, Py_ssize_t t,
    Py_ssize_t b
) noexcept nogil:
    """What row (t, b) read: of x where `first` is NULL, else the state that it started from, which stands in `first`
    [B,H], the initial one, or in `rest`, those that the steps gave.  NULL where that is nothing or zero."""
    cdef int mark = s.marks[t * s.B + b] if s.marks is not NULL else 0
    if mark & ENDED or (mark & FRESH and first is not NULL):
        return <const store *> NULL
    if first is NULL:
        return rest + place(layout, t, b)
    if mark & FIRST or t == step_at(s, 0):
        return first + b * H
    return rest + place(layout, t + 1 if s.reverse else t - 1, b)
