"""Where the outputs of a step go.  One that nobody asked for is NULL."""
from passes.operands cimport OUT_H
from passes.steps cimport offset_of
from product.real cimport real
from product.tile cimport lanes_of, prefetch_write, store, store_line
from schedule.plan cimport Forward, stores_rows


cdef inline void store_h_line(
    const Forward *p, store **outputs, Py_ssize_t t, Py_ssize_t b, Py_ssize_t at, Py_ssize_t next, const real *h
) noexcept nogil:
    """Store the line of h of row (t, b) that begins at number `at`, unless h is stored in whole rows.  The line at
    `next` comes after it."""
    cdef store *row
    if outputs[OUT_H] is NULL or stores_rows(p):
        return
    row = outputs[OUT_H] + offset_of(&p.y_layout, t, b)
    store_line(row + at, h, p.P - at)
    if next < p.P:
        prefetch_write(row + next)  # what follows the row may be another thread's


cdef inline void store_output_line(
    const Forward *p, store **outputs, int out, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b, const real *y
) noexcept nogil:
    """Store line j of row (t, b) of an output, from its line in y."""
    cdef Py_ssize_t L = lanes_of(y), at = j * L
    cdef store *row
    if out == OUT_H:
        store_h_line(p, outputs, t, b, at, at + L, y + OUT_H * L)
    elif outputs[out] is not NULL:
        row = outputs[out] + (t * p.B + b) * p.H + at
        store_line(row, y + out * L, p.H - at)
        if at + L < p.H:
            prefetch_write(row + L)  # for line j + 1, likewise
