"""The steps of a sequence: their order, where their rows lie in memory, and which rows are finished or reset.

A step mask [T,B] has flags for every row (t, row).  Without one all rows are active in all steps, and start from the
initial state.  A row is finished from its length on, and active before: finished rows cost nothing.  In scratch memory
each batch row has a slot.  Within the slots of a group of threads rows are sorted by length, the longest first, so the
active rows of a step are the first ones of a group.

t : a step of the sequence, 0 <= t < T
k : the number of a step in the order of processing; a reversed pass processes t = T - 1 as k = 0
row : a batch row, as the caller numbers it
b : a slot; b0 to b1 are the slots of one group, or the first ones of these
s : the `Steps` of a call
layout : of an array of the caller's; its rows are numbered as batch rows
"""
from libc.stdlib cimport qsort
from libc.string cimport memset

from product.lines cimport Array, L, at, clear, itemsize_of, no_array, store_line
from product.real cimport real
from schedule.team cimport part_start

cdef enum:  # flags of a step mask
    FINISHED = 1  # alone, and in all later steps of the row: x is not read, outputs are zero, the state stays
    RESET = 2  # the row starts from its reset state
    INITIAL = 4  # the row starts from its initial state


cdef struct Slot:  # an element b of the array of slots
    Py_ssize_t row, length  # the batch row in slot b, and how many steps it has
    Py_ssize_t slot  # the slot of batch row b


cdef struct Layout:  # of an array [T,B,n] of the caller's; the n values of a row have no gaps
    Py_ssize_t step, row  # elements from one step to the next, and from one batch row to the next


cdef struct ResetState:  # a state before the steps that have the flag RESET; no other rows are read or written
    Array rows  # [T,B,n] with `layout`, the caller's; no array for zeros
    Layout layout
    Array grads  # [T,B,n] with a layout of their own, the caller's, written by the backward pass; or not wanted
    Layout grads_layout


cdef struct Steps:
    Py_ssize_t T, B
    bint reverse  # the last step is processed first
    const unsigned char *step_mask  # [T,B], the caller's, or NULL
    ResetState h_reset, cs_reset  # set if there is a step mask
    const Slot *slots  # [B], in scratch; NULL: all rows have T steps, and row b is in slot b


cdef inline Layout contiguous_layout(Py_ssize_t B, Py_ssize_t n) noexcept nogil:
    """Return the layout of an array [T,B,n] without gaps."""
    cdef Layout layout
    layout.step, layout.row = B * n, n
    return layout


cdef inline Py_ssize_t offset_of(const Layout *layout, Py_ssize_t t, Py_ssize_t row) noexcept nogil:
    """Return how many elements row (t, row) is behind the first one."""
    return t * layout.step + row * layout.row


cdef inline Steps steps_of(Py_ssize_t T, Py_ssize_t B) noexcept nogil:
    """Return T steps of B rows without a step mask."""
    cdef Steps s
    s.T, s.B, s.reverse, s.step_mask, s.slots = T, B, False, NULL, NULL
    return s


cdef inline Py_ssize_t step_at(const Steps *s, Py_ssize_t k) noexcept nogil:
    """Return the step t that is processed as number k."""
    return s.T - 1 - k if s.reverse else k


# --------------------------------------------------------------------------------------------------------------- slots
cdef inline Py_ssize_t size_of_slots(Py_ssize_t B) noexcept nogil:
    """Return the size of the slots that `set_step_mask` takes for B rows, in reals."""
    return (2 * B * <Py_ssize_t> sizeof(Slot) + 63) // 64 * L


cdef inline int compare_slots(const void *slot, const void *other) noexcept nogil:
    """Compare two slots for `qsort`: the longer row comes first, and of equally long ones that of the lower number."""
    cdef const Slot *left = <const Slot *> slot
    cdef const Slot *right = <const Slot *> other
    if left.length != right.length:
        return 1 if left.length < right.length else -1
    return 1 if left.row > right.row else -1


cdef inline void set_step_mask(
    Steps *s, const unsigned char *step_mask, void *memory, Py_ssize_t groups
) noexcept nogil:
    """Set the step mask and, unless all rows have T steps, deal the rows out to slots by their lengths.

    Every group of threads gets the next longest row in turn, for the work to be even, and has its longest rows first.

    step_mask : [T,B], the caller's, as long as s
    memory : of `size_of_slots` in scratch, as long as s: the slots, and as many for sorting
    """
    cdef Slot *slots = <Slot *> memory
    cdef Slot *sorted_rows = slots + s.B
    cdef Py_ssize_t row, length, b, n = 0, group, turn
    cdef bint is_sorted = True, all_full = True
    s.step_mask, s.slots = step_mask, NULL
    for row in range(s.B):
        length = s.T
        while length > 0 and step_mask[(length - 1) * s.B + row] & FINISHED:
            length -= 1
        sorted_rows[row].row, sorted_rows[row].length = row, length
        all_full = all_full and length == s.T
        is_sorted = is_sorted and (row == 0 or length <= sorted_rows[row - 1].length)
    if all_full:
        return
    if not is_sorted:
        qsort(sorted_rows, s.B, sizeof(Slot), compare_slots)
    turn = 0
    while n < s.B:
        for group in range(groups):
            b = part_start(s.B, group, groups) + turn
            if b < part_start(s.B, group + 1, groups):
                slots[b].row, slots[b].length = sorted_rows[n].row, sorted_rows[n].length
                slots[slots[b].row].slot = b
                n += 1
        turn += 1
    s.slots = slots


cdef inline Py_ssize_t row_of_slot(const Steps *s, Py_ssize_t b) noexcept nogil:
    """Return the batch row in slot b."""
    return b if s.slots is NULL else s.slots[b].row


cdef inline Py_ssize_t slot_of_row(const Steps *s, Py_ssize_t row) noexcept nogil:
    """Return the slot of a batch row."""
    return row if s.slots is NULL else s.slots[row].slot


cdef inline bint has_step(const Steps *s, Py_ssize_t t, Py_ssize_t row) noexcept nogil:
    """Return whether a batch row is active in step t."""
    return s.slots is NULL or t < s.slots[s.slots[row].slot].length


cdef inline Py_ssize_t length_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """Return how many steps the row in slot b has."""
    return s.T if s.slots is NULL else s.slots[b].length


cdef inline Py_ssize_t first_step_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """Return the number k of the first step in which the row in slot b is active; T if there is none."""
    return s.T - length_of(s, b) if s.reverse else 0 if length_of(s, b) > 0 else s.T


cdef inline Py_ssize_t end_step_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """Return the number k of the last step in which the row in slot b is active, plus one; T if there is none."""
    return s.T if s.reverse or length_of(s, b) == 0 else length_of(s, b)


cdef inline Py_ssize_t active_end(const Steps *s, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1) noexcept nogil:
    """Return the slot at which the active rows of step number k end: b0 to it are active, it to b1 are finished.

    If there is no step k, no row is active.
    """
    cdef Py_ssize_t t = step_at(s, k), middle
    if k < 0 or k >= s.T:
        return b0
    if s.slots is NULL:
        return b1
    while b0 < b1:
        middle = (b0 + b1) // 2
        if s.slots[middle].length > t:
            b0 = middle + 1
        else:
            b1 = middle
    return b0


cdef inline Py_ssize_t count_active_rows(
    const Steps *s, Py_ssize_t k, Py_ssize_t end, Py_ssize_t b0, Py_ssize_t b1
) noexcept nogil:
    """Return how many rows of the slots b0 to b1 are active in the steps number k to `end`, summed over these steps."""
    cdef Py_ssize_t rows = 0
    if s.slots is NULL:
        return (end - k) * (b1 - b0)
    while k < end:
        rows += active_end(s, k, b0, b1) - b0
        k += 1
    return rows


cdef inline bint has_flag(const Steps *s, Py_ssize_t k, Py_ssize_t b, int flag) noexcept nogil:
    """Return whether there is a step number k and the row in slot b has the flag in it."""
    return s.step_mask is not NULL and k < s.T and (s.step_mask[step_at(s, k) * s.B + row_of_slot(s, b)] & flag) != 0


# ---------------------------------------------------------------------------------------------------------------- rows
cdef inline void clear_finished_rows(
    const Steps *s, Array rows, const Layout *layout, Py_ssize_t n, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Clear one of so many parts of the finished rows of an array [T,B,n] of the caller's, with `layout`."""
    cdef Py_ssize_t t = part, row, end
    cdef bint has_gaps = layout.row != n
    while t < s.T:  # every `parts`-th step, since the last ones have the most finished rows
        row = 0
        while row < s.B:
            end = row + 1
            if not has_step(s, t, row):
                while not has_gaps and end < s.B and not has_step(s, t, end):  # one call for rows side by side
                    end += 1
                memset(at(rows, offset_of(layout, t, row)).data, 0, (end - row) * n * itemsize_of(rows))
            row = end
        t += parts


cdef inline Array reset_row(
    const ResetState *reset, Py_ssize_t t, Py_ssize_t row
) noexcept nogil:
    """Return the state that row (t, row) starts from if it has the flag RESET, or no array for zeros."""
    if reset.rows.data is NULL:
        return no_array()
    return at(reset.rows, offset_of(&reset.layout, t, row))


cdef inline void store_reset_grad_line(
    const Steps *s, const ResetState *reset, Py_ssize_t k, Py_ssize_t b, real *grad, Py_ssize_t unit, Py_ssize_t n
) noexcept nogil:
    """Store a line of the gradient to the state that the row in slot b started from in step number k, where it has the
    flag RESET, and clear it: none of it is of the step before.

    grad : [L]
    unit, n : the first unit of the line; numbers in a row of the state
    """
    cdef Py_ssize_t row = offset_of(&reset.grads_layout, step_at(s, k), row_of_slot(s, b))
    if reset.grads.data is not NULL:
        store_line(at(reset.grads, row + unit), grad, n - unit)
    clear(grad, L)


cdef inline Array previous_row(
    const Steps *s, Array initial, const ResetState *reset, Py_ssize_t n, Array states,
    const Layout *layout, Py_ssize_t t, Py_ssize_t row
) noexcept nogil:
    """Return the state that an active row (t, row) started from, or no array if that is zero.

    initial : the states before the first step, [B,n]
    reset : the states where rows are reset
    states : those after each step, [T,B,n] with `layout`
    """
    cdef int flags = s.step_mask[t * s.B + row] if s.step_mask is not NULL else 0
    if flags & RESET:
        return reset_row(reset, t, row)
    if flags & INITIAL or t == step_at(s, 0):
        return at(initial, row * n)
    return at(states, offset_of(layout, t + 1 if s.reverse else t - 1, row))
