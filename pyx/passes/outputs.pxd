"""Stores of a step's outputs, line by line.  A step's `y` has a line of L reals for each output, at the index OUT_...

outputs : the arrays of the call (indices.pxd), [T,B,H] but h, which is [T,B,P] with p.y_layout; NULL: not wanted
t, row : the step and the batch row
j, unit : a line of units, and its first unit
"""
from passes.indices cimport OUT_H
from passes.steps cimport offset_of
from product.lines cimport Array, at, lanes_of, store_line
from product.real cimport real
from product.tile cimport prefetch_write
from schedule.plan cimport Forward, stores_rows


cdef inline void store_h_line(
    const Forward *p, const Array *outputs, Py_ssize_t t, Py_ssize_t row, Py_ssize_t unit, Py_ssize_t next,
    const real *h
) noexcept nogil:
    """Store a line of h, unless h is stored in whole rows.

    next : the first unit of the line that the same thread stores next, or past the end of the row
    h : [L], the line
    """
    cdef Array dst
    if outputs[OUT_H].data is NULL or stores_rows(p):
        return
    dst = at(outputs[OUT_H], offset_of(&p.y_layout, t, row))
    store_line(at(dst, unit), h, p.P - unit)
    if next < p.P:
        prefetch_write(at(dst, next).data)  # never past the row: what follows it may be another thread's


cdef inline void store_saved_line(
    const Forward *p, Array output, Py_ssize_t t, Py_ssize_t row, Py_ssize_t unit, Py_ssize_t next, const real *line
) noexcept nogil:
    """Store a line of an output [T,B,H] beside h.

    next : as for `store_h_line`
    """
    cdef Array dst = at(output, (t * p.B + row) * p.H)
    store_line(at(dst, unit), line, p.H - unit)
    if next < p.H:
        prefetch_write(at(dst, next).data)


cdef inline void store_output_line(
    const Forward *p, const Array *outputs, int out, Py_ssize_t j, Py_ssize_t t, Py_ssize_t row, const real *y
) noexcept nogil:
    """Store line j of output number `out` from y, the step's line of each output."""
    cdef Py_ssize_t L = lanes_of(y), unit = j * L
    if out == OUT_H:
        store_h_line(p, outputs, t, row, unit, unit + L, y + OUT_H * L)
    elif outputs[out].data is not NULL:
        store_saved_line(p, outputs[out], t, row, unit, unit + L, y + out * L)
