"""Stores of a step's outputs, line by line.  A step's `y` has a line of L reals for each output, at the index OUT_...

outputs : the arrays of the call (indices.pxd), [T,B,H] but h, which is [T,B,P] with p.y_layout; NULL: not wanted
t, row : the step and the batch row
j, unit : a line of units, and its first unit
"""
from passes.indices cimport OUT_H
from passes.steps cimport offset_of
from product.real cimport real, store
from product.tile cimport lanes_of, prefetch_write, store_line
from schedule.plan cimport Forward, stores_rows


cdef inline void store_h_line(
    const Forward *p, store **outputs, Py_ssize_t t, Py_ssize_t row, Py_ssize_t unit, Py_ssize_t next, const real *h
) noexcept nogil:
    """Store a line of h, unless h is stored in whole rows.

    next : the first unit of the line that the same thread stores next, or past the end of the row
    h : [L], the line
    """
    cdef store *dst
    if outputs[OUT_H] is NULL or stores_rows(p):
        return
    dst = outputs[OUT_H] + offset_of(&p.y_layout, t, row)
    store_line(dst + unit, h, p.P - unit)
    if next < p.P:
        prefetch_write(dst + next)  # never past the row: what follows it may be another thread's


cdef inline void store_output_line(
    const Forward *p, store **outputs, int out, Py_ssize_t j, Py_ssize_t t, Py_ssize_t row, const real *y
) noexcept nogil:
    """Store line j of output number `out` from y, the step's line of each output."""
    cdef Py_ssize_t L = lanes_of(y), unit = j * L
    cdef store *dst
    if out == OUT_H:
        store_h_line(p, outputs, t, row, unit, unit + L, y + OUT_H * L)
    elif outputs[out] is not NULL:
        dst = outputs[out] + (t * p.B + row) * p.H + unit
        store_line(dst, y + out * L, p.H - unit)
        if unit + L < p.H:
            prefetch_write(dst + L)  # line j + 1, which comes next, never past the row
