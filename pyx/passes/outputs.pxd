"""Stores of a step's outputs, and its states for the next step, line by line."""
from passes.indices cimport OUT_H
from passes.steps cimport RESET, ResetState, has_flag, offset_of, reset_row, row_of_slot, step_at
from product.lines cimport Array, L, at, clear, load_line, round_to_half, store_line
from product.real cimport real
from product.tile cimport prefetch_write
from schedule.plan cimport Forward, stores_rows


cdef inline void store_output_line(
    const Forward *p, int out, Py_ssize_t t, Py_ssize_t row, Py_ssize_t unit, Py_ssize_t next, const real *line
) noexcept nogil:
    """Store a line of an output of row (t, row), if it is wanted, unless h is stored in whole rows.

    out : the output's index, of indices.pxd: [T,B,H], but h is [T,B,P] with p.y_layout
    unit : the first unit of the line
    next : that of the line that the same thread stores next, or past the end of the row
    line : [L]
    """
    cdef Array dst = p.outputs[out]
    cdef Py_ssize_t n = p.P if out == OUT_H else p.H
    if dst.data is NULL or (out == OUT_H and stores_rows(p)):
        return
    dst = at(dst, offset_of(&p.y_layout, t, row) if out == OUT_H else (t * p.B + row) * p.H)
    store_line(at(dst, unit), line, n - unit)
    if next < n:
        prefetch_write(at(dst, next).data)  # never past the row: what follows it may be another thread's


cdef inline void hand_on_line(
    const Forward *p, const ResetState *reset, Py_ssize_t k, Py_ssize_t b, real *state, Py_ssize_t unit, Py_ssize_t n
) noexcept nogil:
    """Make a line of a state after step number k what the next step reads: as it is stored, or the reset state.

    state : [L], of the row in slot b; read and written
    unit, n : the first unit of the line; numbers in a row of the state
    """
    cdef Array reset_state
    if p.c.is_half:
        round_to_half(state)
    if has_flag(&p.steps, k + 1, b, RESET):
        reset_state = reset_row(reset, step_at(&p.steps, k + 1), row_of_slot(&p.steps, b))
        if reset_state.data is NULL:
            clear(state, L)
        else:
            load_line(state, at(reset_state, unit), n - unit)
