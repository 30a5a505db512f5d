"""The steps of a sequence: their order, where their rows are in memory, and where a row ends or starts anew.

A step mask has flags for every row (t, b), r = t * B + b: that the row ended before this step, or that the state which
it starts from is zero, or that it is the initial one.  Else it is that of the step processed before.  Without a step
mask every row takes part in all steps and starts from the initial state.

Rows that have ended cost nothing: in scratch every batch row has a slot, and the longest rows have the first ones of
each part, so the rows that take part in a step stand side by side from the part's first slot on.
"""
from libc.stdlib cimport qsort
from libc.string cimport memset

from product.integer cimport quantize_row
from product.quantized cimport INT8
from product.real cimport real
from product.tile cimport load_row, store
from schedule.team cimport share

cdef enum:
    FINISHED = 1  # as are all later steps of the row: x is not looked at, outputs are zero, the state stays
    RESET = 2
    INITIAL = 4


cdef struct Slot:
    Py_ssize_t row, length  # the batch row that is here, and how many steps it has
    Py_ssize_t slot  # where the batch row is that has the number of this slot


cdef struct Steps:
    Py_ssize_t T, B
    bint reverse  # the last step is processed first
    const unsigned char *step_mask  # or NULL
    const Slot *slots  # or NULL: each row is in the slot of its number, and takes part in all steps


cdef struct Layout:  # how the rows (t, b) of an array of the caller's lie in memory; a row itself has no gaps
    Py_ssize_t step, row  # elements from one step to the next, and from one batch row to the next


cdef inline Layout contiguous_layout(Py_ssize_t B, Py_ssize_t size) noexcept nogil:
    """Of an array [T,B,size] without gaps."""
    cdef Layout a
    a.step, a.row = B * size, size
    return a


cdef inline Py_ssize_t offset_of(const Layout *a, Py_ssize_t t, Py_ssize_t b) noexcept nogil:
    """Where row (t, b) begins."""
    return t * a.step + b * a.row


cdef inline Steps steps_of(Py_ssize_t T, Py_ssize_t B) noexcept nogil:
    """All rows through all steps."""
    cdef Steps s
    s.T, s.B, s.reverse, s.step_mask, s.slots = T, B, False, NULL, NULL
    return s


cdef inline Py_ssize_t step_at(const Steps *s, Py_ssize_t k) noexcept nogil:
    """The step that is processed as number k."""
    return s.T - 1 - k if s.reverse else k


# --------------------------------------------------------------------------------------------------------------- slots
cdef inline Py_ssize_t size_of_slots(Py_ssize_t B, Py_ssize_t L) noexcept nogil:
    """Reals of scratch, in lines of L, that `set_step_mask` needs."""
    return (2 * B * <Py_ssize_t> sizeof(Slot) + 63) // 64 * L


cdef inline int compare_lengths(const void *a, const void *b) noexcept nogil:
    """The longer row comes first, of equally long ones the first."""
    cdef const Slot *one = <const Slot *> a
    cdef const Slot *other = <const Slot *> b
    if one.length != other.length:
        return 1 if one.length < other.length else -1
    return 1 if one.row > other.row else -1


cdef inline void set_step_mask(Steps *s, const unsigned char *step_mask, Slot *slots, Py_ssize_t parts) noexcept nogil:
    """Let rows take part as a step mask says.  If some end early, deal the rows out to the slots of so many parts, the
    longest one first.  There is room for 2 * B slots."""
    cdef Slot *ordered = slots + s.B
    cdef Py_ssize_t b, t, n = 0, part, at
    cdef bint in_order = True, all_full = True
    s.step_mask, s.slots = step_mask, NULL
    for b in range(s.B):
        t = s.T
        while t > 0 and step_mask[(t - 1) * s.B + b] & FINISHED:
            t -= 1
        ordered[b].row, ordered[b].length = b, t
        all_full = all_full and t == s.T
        in_order = in_order and (b == 0 or t <= ordered[b - 1].length)
    if all_full:
        return
    if not in_order:
        qsort(ordered, s.B, sizeof(Slot), compare_lengths)
    at = 0
    while n < s.B:
        for part in range(parts):
            b = share(s.B, part, parts) + at
            if b < share(s.B, part + 1, parts):
                slots[b].row, slots[b].length = ordered[n].row, ordered[n].length
                slots[slots[b].row].slot = b
                n += 1
        at += 1
    s.slots = slots


cdef inline Py_ssize_t row_of_slot(const Steps *s, Py_ssize_t b) noexcept nogil:
    """The batch row that is in slot b."""
    return b if s.slots is NULL else s.slots[b].row


cdef inline Py_ssize_t slot_of_row(const Steps *s, Py_ssize_t row) noexcept nogil:
    return row if s.slots is NULL else s.slots[row].slot


cdef inline bint has_step(const Steps *s, Py_ssize_t t, Py_ssize_t row) noexcept nogil:
    """Whether step t of the row is before its end."""
    return s.slots is NULL or t < s.slots[s.slots[row].slot].length


cdef inline Py_ssize_t length_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """How many steps the row in slot b has."""
    return s.T if s.slots is NULL else s.slots[b].length


cdef inline Py_ssize_t first_step_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """The number of the step that the row in slot b takes part in first; T if there is none."""
    return s.T - length_of(s, b) if s.reverse else 0 if length_of(s, b) > 0 else s.T


cdef inline Py_ssize_t end_step_of(const Steps *s, Py_ssize_t b) noexcept nogil:
    """One more than the number of the step that it takes part in last."""
    return s.T if s.reverse or length_of(s, b) == 0 else length_of(s, b)


cdef inline Py_ssize_t active_end(const Steps *s, Py_ssize_t k, Py_ssize_t b0, Py_ssize_t b1) noexcept nogil:
    """Where the rows of a part's slots b0 to b1 end that take part in the step processed as number k, if there is such
    a step: they stand side by side from b0 on."""
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
    """How many rows of a part's slots b0 to b1 take part in the steps processed as number k to end, all together."""
    cdef Py_ssize_t rows = 0
    if s.slots is NULL:
        return (end - k) * (b1 - b0)
    while k < end:
        rows += active_end(s, k, b0, b1) - b0
        k += 1
    return rows


cdef inline bint has_flag(const Steps *s, Py_ssize_t k, Py_ssize_t b, int flag) noexcept nogil:
    """Whether the row in slot b has the flag in the step processed as number k, if there is one."""
    return s.step_mask is not NULL and k < s.T and s.step_mask[step_at(s, k) * s.B + row_of_slot(s, b)] & flag != 0


# ---------------------------------------------------------------------------------------------------------------- rows


cdef inline void load_active_rows(
    const Steps *s, real *dst, Py_ssize_t stride, const store *x, const Layout *layout, Py_ssize_t I, Py_ssize_t k,
    Py_ssize_t b0, Py_ssize_t b1, Py_ssize_t r0, Py_ssize_t r1, int format
) noexcept nogil:
    """x of the rows in a part's slots b0 to b1 that take part to scratch, step after step from number k on; of these,
    the rows r0 to r1.  They are quantized if `format`, that of the weights, is INT8."""
    cdef Py_ssize_t first = 0, n, q  # the rows of the steps before, those of a step
    cdef const store *row
    while first < r1:
        n = active_end(s, k, b0, b1) - b0
        for q in range(max(r0 - first, <Py_ssize_t> 0), min(r1 - first, n)):
            row = x + offset_of(layout, step_at(s, k), row_of_slot(s, b0 + q))
            if store is float and real is float:
                if format == INT8:
                    quantize_row(dst + (first + q) * stride, row, I)
                    continue
            load_row(dst + (first + q) * stride, row, I)
        first += n
        k += 1


cdef inline void clear_finished_rows(
    const Steps *s, store *rows, const Layout *layout, Py_ssize_t n, Py_ssize_t part, Py_ssize_t parts
) noexcept nogil:
    """Zeros in one part of the rows (t, b) of n values, past the rows' ends."""
    cdef Py_ssize_t b = part, t
    while b < s.B:  # by turns, since the shortest ones come last
        for t in range(length_of(s, b), s.T):
            memset(rows + offset_of(layout, t, row_of_slot(s, b)), 0, n * sizeof(store))
        b += parts


cdef inline const store *input_row(
    const Steps *s, const store *first, Py_ssize_t H, const store *rest, const Layout *layout, Py_ssize_t t,
    Py_ssize_t b
) noexcept nogil:
    """What row (t, b) read: of x where `first` is NULL, else the state that it started from, which stands in `first`
    [B,H], the initial one, or in `rest`, those that the steps gave.  NULL where that is nothing or zero."""
    cdef int flags = s.step_mask[t * s.B + b] if s.step_mask is not NULL else 0
    if flags & FINISHED or (flags & RESET and first is not NULL):
        return <const store *> NULL
    if first is NULL:
        return rest + offset_of(layout, t, b)
    if flags & INITIAL or t == step_at(s, 0):
        return first + b * H
    return rest + offset_of(layout, t + 1 if s.reverse else t - 1, b)
