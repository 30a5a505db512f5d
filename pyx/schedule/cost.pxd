"""The grid of a call: how many threads there are, and how they share its rows and its hidden units.

A grid has `groups` of threads, which share the batch rows, and in each group `members`, which share the hidden units.
Groups do not wait for each other; the members of a group wait for each other in every step.  `cost_of` predicts in
nanoseconds when the largest part would be finished: from its arithmetic, the weights that it reads, its barriers and
the start of the team.  `_cpu.pyx`, plan.pxd and the files of cells have the constants.  The grid with the least cost
is chosen.
"""
from product.lines cimport REAL_BYTES, L
from product.quantized cimport INT8
from product.tile cimport GROUP_TILES, LATENCY_ROWS, ROWS, VECTORS
from schedule.machine cimport L1, L2, L3, machine
from schedule.team cimport GROUPS


cdef struct Grid:
    Py_ssize_t groups, members
    Py_ssize_t first, end  # the parts that are run: all, except where one alone is measured


cdef inline Py_ssize_t threads_of(const Grid *g) noexcept nogil:
    """Return how many threads run the grid."""
    return g.end - g.first


cdef inline Py_ssize_t parts_of(const Grid *g) noexcept nogil:
    """Return how many parts a call has."""
    return g.groups * g.members


cdef inline Grid grid_of(Py_ssize_t groups, Py_ssize_t members) noexcept nogil:
    """Return a grid of so many groups of so many members."""
    cdef Grid g
    g.groups, g.members, g.first, g.end = groups, members, 0, groups * members
    return g


cdef inline Py_ssize_t packing_part(const Grid *g, Py_ssize_t part) noexcept nogil:
    """Return the number of the share of panels that a part packs: mostly panels that it multiplies with."""
    return part % g.members * g.groups + part // g.members


cdef inline void use_threads(Grid *g, Py_ssize_t ready) noexcept nogil:
    """Shrink the grid to `ready` threads: fewer members in each group, or, below one thread a group, fewer groups."""
    if ready < threads_of(g):
        g[0] = grid_of(min(g.groups, ready), max(<Py_ssize_t> 1, ready // g.groups))


# --------------------------------------------------------------------------------------------------------------- costs
cdef struct Work:  # what a pass computes, reads and waits for; times are nanoseconds of one thread
    Py_ssize_t T, B
    int products  # of a step; each needs the results of the one before
    Py_ssize_t[2] lines, width, panels  # of each product: its lines of columns, the lines of a panel, its panels
    Py_ssize_t[2] K  # the numbers of states with which its weights are multiplied
    Py_ssize_t[2] x_size  # and those of x, for several steps at once
    double line_bytes  # bytes of a line of weights, as it is read
    double speed  # operations in a nanosecond
    Py_ssize_t units  # lines of units
    double cell  # time for a line of units of one row in a step, beside the products
    double divisible_time  # time for what all threads divide evenly, once in a pass
    bint packs  # whether they pack the weights, too
    double column_time  # time for what threads divide by `column_lines` lines of columns, once in a pass
    Py_ssize_t column_lines
    double lines_read_in_part, lines_read_by_all  # lines that others wrote; each thread reads its part of them, or all
    Py_ssize_t barriers  # of all threads, in a pass
    double sleep_cost  # time by which several threads cost more, because they may have slept


cdef inline Work work_of(Py_ssize_t T, Py_ssize_t B, int products) noexcept nogil:
    """Return the work of the steps alone; the caller adds what a pass does beside them."""
    cdef Work w
    w.T, w.B, w.products = T, B, products
    w.packs, w.divisible_time, w.column_time, w.column_lines = False, 0, 0, 1
    w.lines_read_in_part, w.lines_read_by_all, w.barriers, w.sleep_cost = 0, 0, 0, 0
    return w


cdef inline double speed_of(int format) noexcept nogil:
    """Return how many operations a core computes in a nanosecond with weights of this format."""
    cdef double speed = machine.speed / 2 if VECTORS > 2 else machine.speed  # of 16 bytes
    if format == INT8:
        return 3 * speed
    return speed * 4 / REAL_BYTES


cdef inline double barrier_cost(Py_ssize_t threads) noexcept nogil:
    """Return what a barrier of so many threads costs; one thread has none."""
    return machine.barrier + machine.barrier_each * threads if threads > 1 else 0


cdef inline Py_ssize_t ceil_div(Py_ssize_t n, Py_ssize_t parts) noexcept nogil:
    """n / parts, rounded up: what the largest part has."""
    return (n + parts - 1) // parts


cdef inline Py_ssize_t lines_of_member(const Work *w, int n, Py_ssize_t members) noexcept nogil:
    """Return how many lines of columns of product n the largest part has."""
    return min(w.lines[n], ceil_div(w.panels[n], members) * w.width[n])


cdef inline Py_ssize_t values_read(const Work *w, int n) noexcept nogil:
    """Return for how many values of k each step reads the weights of product n."""
    return w.K[n] + (w.x_size[n] if w.T == 1 else 0)


cdef inline double product_cost(
    const Work *w, int n, Py_ssize_t rows, Py_ssize_t members, double nbytes
) noexcept nogil:
    """Return what product n of a step of so many rows costs one of the members, which reads `nbytes` of weights in all
    products of a step, and so from some cache."""
    cdef Py_ssize_t lines = lines_of_member(w, n, members)
    cdef double slow = 1, computing, read
    cdef int cache
    # One row takes 2.3 times as long as a quarter of four, two 1.4 times as long as half of them.
    if rows < LATENCY_ROWS:
        slow += 0.45 * (LATENCY_ROWS - rows) / rows
    computing = 2.0 * rows * lines * L * (slow * w.K[n] + w.x_size[n]) / w.speed
    read = ceil_div(rows, GROUP_TILES * ROWS) * values_read(w, n) * lines * w.line_bytes
    if nbytes <= machine.caches[L1] / 2:
        return computing
    cache = 0 if nbytes <= machine.caches[L2] else 1 if nbytes <= machine.caches[L3] else 2
    return max(computing, read / machine.read_speed[cache])


cdef inline double cost_of(const Work *w, Py_ssize_t groups, Py_ssize_t members) noexcept nogil:
    """Return the time of the largest part of this grid, with all waiting."""
    cdef Py_ssize_t threads = groups * members, rows = ceil_div(w.B, groups)
    # To wake the threads, and to wait for all of them at the end.
    cdef double start = machine.waking + machine.waking_each * threads + w.sleep_cost if threads > 1 else 0
    cdef double nbytes = 0, step = rows * ceil_div(w.units, members) * w.cell, others = (threads - 1.0) / threads
    cdef double packed = 0  # lines of weights that other groups have packed
    cdef int n
    for n in range(w.products):
        nbytes += values_read(w, n) * lines_of_member(w, n, members) * w.line_bytes
    for n in range(w.products):
        step += product_cost(w, n, rows, members, nbytes)
        if members > 1:
            step += barrier_cost(members) + machine.exchange / 2 * rows * (w.K[n] // L) * (members - 1.0) / members
    if w.packs:
        packed = nbytes / 64 * (groups - 1.0) / groups
    return (w.T * step + w.divisible_time / threads + w.column_time * ceil_div(w.column_lines, threads) / w.column_lines
            + w.barriers * barrier_cost(threads) + start + machine.exchange / 2 * packed
            + machine.exchange * others * (w.lines_read_in_part / threads + w.lines_read_by_all))


cdef inline Grid choose_grid(const Work *w, Py_ssize_t threads, bint whole_rows, bint whole_units) noexcept nogil:
    """Return the grid with the least cost on at most so many threads, or the one that a test forces.  With `whole_rows`
    rows are not divided, with `whole_units` hidden units are not."""
    cdef Py_ssize_t groups = 1, most, rows, members, panels = 1
    cdef double alone = cost_of(w, 1, 1), least = 0.9 * alone, cost  # others are not woken to gain less
    cdef Grid best = grid_of(1, 1)
    if machine.groups > 0:
        return forced_grid(w, whole_rows, whole_units)
    if alone < machine.single_thread_limit or threads <= 1:
        return best
    threads = min(threads, <Py_ssize_t> (alone / 1000) + 1)  # none for less than a microsecond
    if not whole_units:
        panels = max(w.panels[0], w.panels[1])
    most = 1 if whole_rows else min(threads, w.B)
    while True:
        members = min(threads // groups, panels)
        while members > 0:
            members = ceil_div(panels, ceil_div(panels, members))  # as few as have parts as small
            if members == 1 or groups <= GROUPS:
                cost = cost_of(w, groups, members)
                if cost < least:
                    least, best = cost, grid_of(groups, members)
            members = members // 2
        rows = ceil_div(w.B, groups)
        if groups >= most or rows == 1:
            return best
        groups = min(most, max(ceil_div(w.B, rows - 1), groups + groups // 8))  # some of those whose parts are smaller


cdef inline Grid forced_grid(const Work *w, bint whole_rows, bint whole_units) noexcept nogil:
    """Return the grid that tests and benchmarks ask for, as far as there are rows and hidden units."""
    cdef Py_ssize_t members = 1 if whole_units else min(machine.members, max(w.panels[0], w.panels[1]))
    cdef Py_ssize_t groups = 1 if whole_rows else min(machine.groups, w.B)
    cdef Grid g = grid_of(groups if members == 1 else min(groups, <Py_ssize_t> GROUPS), members)
    if machine.only_part >= 0:
        g.first, g.end = min(machine.only_part, parts_of(&g) - 1), min(machine.only_part, parts_of(&g) - 1) + 1
    return g
