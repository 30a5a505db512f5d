"""Where the outputs of a step go."""
from operands cimport OUT_H
from plan cimport Forward, stores_rows
from real cimport real
from steps cimport place
from tile cimport for_writing, line_of, store, store_line


cdef inline void store_output(
    const Forward *p, store **outputs, int out, Py_ssize_t j, Py_ssize_t t, Py_ssize_t b, const real *y
) noexcept nogil:
    """Store line j of row (t, b) of an output, unless that is NULL or stored in whole rows."""
    cdef Py_ssize_t L = line_of(y)
    cdef store *row
    if outputs[out] is not NULL and not (out == OUT_H and stores_rows(p)):
        row = outputs[out] + (place(&p.y_layout, t, b) if out == OUT_H else (t * p.B + b) * p.H) + j * L
        store_line(row, y + out * L, p.H - j * L)
        if (j + 1) * L < p.H:
            for_writing(row + L)  # for line j + 1; what follows the row may be another thread's
