"""The LSTM's kernels: what Python calls.

cells/lstm.pxd has the equations, passes/forward.pxd and passes/backward.pxd the phases.

For each op there are two functions.  `<kernel>_requirements` plans a call of T, B, I, H on at most `threads` threads,
and returns the bytes of its scratch, the threads that it uses, and how many of these share the hidden units of a row.
`<kernel>` runs it on `ready` of these threads: it takes the op's arrays as typed memoryviews, collects their addresses
under the indices of passes/operands.pxd, and returns the nanoseconds that having several threads cost.  The caller
owns all arrays; outputs and `scratch` overlap no other array.

`lstm_layer` plans the kernels of layers, which passes/layer.pxd has.
"""
from cpython.pycapsule cimport PyCapsule_Import
from cython.parallel cimport parallel, prange

from cells.lstm cimport layer_lstm, load_peepholes, lstm_grad_line, op_lstm, peephole_grads
from cells.types cimport LSTM, Lstm, use_activations
from passes.backward cimport run_backward
from passes.forward cimport run_forward
from passes.layer cimport plan_layer
from passes.operands cimport (
    BIAS, BIAS_GRAD, CS_GRAD, CS_LAST_GRAD, CS_PREV, CS_PREV_GRAD, DICFO, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV,
    H_PREV_GRAD, INPUTS, OUT_CI, OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_I, OUT_O, OUTPUTS, W, W_GRAD, WCF, WCF_GRAD, WCI,
    WCI_GRAD, WCO, WCO_GRAD, X, X_GRAD
)
from product.half cimport half
from product.integer cimport ProductInUse, use_product
from product.real cimport real
from product.tile cimport LF, align_scratch, clear, lanes_of, real_itemsize, store, store_line, store_row
from schedule.cost cimport grid_of, parts_of, requirements_of, use_threads
from schedule.machine cimport Machine, use_machine
from schedule.plan cimport (
    D, PEEPHOLES, Backward, Forward, backward_requirements, choose_cell_grad_grid, forward_requirements,
    plan_backward_on, plan_cell_grad_on, plan_forward_on, use_panels
)
from schedule.team cimport Team, adopt_rounding, barrier, measured_cost, part_start, start_team
from schedule.workspace cimport guard_zones, release_zones
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
TAPE_ARRAYS = LSTM.saved
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


# ------------------------------------------------------------------------------------------------------------- forward
def lstm_cell_requirements(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads):
    cdef Lstm c = op_lstm(0, 0, False, False)
    return forward_requirements(&c, 1, B, I, H, itemsize, threads)


def block_lstm_requirements(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads):
    cdef Lstm c = op_lstm(0, 0, False, False)
    return forward_requirements(&c, T, B, I, H, itemsize, threads)


def lstm_cell(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, ::1] i, store[:, ::1] cs, store[:, ::1] f, store[:, ::1] o, store[:, ::1] ci, store[:, ::1] co,
    store[:, ::1] h, unsigned char[::1] scratch, double forget_bias, double cell_clip, bint use_peephole, int threads,
    int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = op_lstm(forget_bias, cell_clip, use_peephole, False)
    cdef Forward p = plan_forward_on(&c, 1, x.shape[0], x.shape[1], h_prev.shape[1], real_itemsize(&x[0, 0]), False,
                                     grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0]
    inputs[W], inputs[WCI], inputs[WCF], inputs[WCO], inputs[BIAS] = &w[0, 0], &wci[0], &wcf[0], &wco[0], &b[0]
    outputs[OUT_I], outputs[OUT_CS], outputs[OUT_F] = &i[0, 0], &cs[0, 0], &f[0, 0]
    outputs[OUT_O], outputs[OUT_CI], outputs[OUT_CO] = &o[0, 0], &ci[0, 0], &co[0, 0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0], NULL
    use_panels(&p, align_scratch(scratch))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


def block_lstm(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, :, ::1] i, store[:, :, ::1] cs, store[:, :, ::1] f, store[:, :, ::1] o, store[:, :, ::1] ci,
    store[:, :, ::1] co, store[:, :, ::1] h, unsigned char[::1] scratch, Py_ssize_t seq_len_max, double forget_bias,
    double cell_clip, bint use_peephole, bint ifco, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = op_lstm(forget_bias, cell_clip, use_peephole, ifco)
    cdef Forward p = plan_forward_on(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                     real_itemsize(&x[0, 0, 0]), False, grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV] = &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0]
    inputs[W], inputs[WCI], inputs[WCF], inputs[WCO], inputs[BIAS] = &w[0, 0], &wci[0], &wcf[0], &wco[0], &b[0]
    outputs[OUT_I], outputs[OUT_CS], outputs[OUT_F] = &i[0, 0, 0], &cs[0, 0, 0], &f[0, 0, 0]
    outputs[OUT_O], outputs[OUT_CI], outputs[OUT_CO] = &o[0, 0, 0], &ci[0, 0, 0], &co[0, 0, 0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0, 0], NULL
    use_panels(&p, align_scratch(scratch))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


# ------------------------------------------------------------------------------------------------------------ backward
def lstm_cell_vjp_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef Lstm c = op_lstm(0, 0, False, False)
    return backward_requirements(&c, 1, B, I, H, itemsize, True, threads)


def block_lstm_grad_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef Lstm c = op_lstm(0, 0, False, False)
    return backward_requirements(&c, T, B, I, H, itemsize, True, threads)


def lstm_cell_vjp(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, ::1] i, const store[:, ::1] cs,
    const store[:, ::1] f, const store[:, ::1] o, const store[:, ::1] ci, const store[:, ::1] co,
    const store[:, ::1] cs_grad, const store[:, ::1] h_grad, store[:, ::1] x_grad, store[:, ::1] cs_prev_grad,
    store[:, ::1] h_prev_grad, store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    store[::1] b_grad, unsigned char[::1] scratch, bint use_peephole, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = op_lstm(0, 0, use_peephole, False)
    cdef Backward p = plan_backward_on(&c, 1, x.shape[0], x.shape[1], h_prev.shape[1], real_itemsize(&x[0, 0]), True,
                                       grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV], inputs[W] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0]
    inputs[WCI], inputs[WCF], inputs[WCO] = &wci[0], &wcf[0], &wco[0]
    inputs[OUT_I], inputs[OUT_CS], inputs[OUT_F], inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    inputs[OUT_CI], inputs[OUT_CO], inputs[OUT_H] = &ci[0, 0], &co[0, 0], NULL  # one step needs no h of a step before
    inputs[CS_GRAD], inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    inputs[CS_LAST_GRAD], inputs[H_LAST_GRAD] = NULL, NULL
    outputs[X_GRAD] = &x_grad[0, 0]
    outputs[CS_PREV_GRAD], outputs[H_PREV_GRAD] = &cs_prev_grad[0, 0], &h_prev_grad[0, 0]
    outputs[WCI_GRAD], outputs[WCF_GRAD], outputs[WCO_GRAD] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


def block_lstm_grad(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, :, ::1] i,
    const store[:, :, ::1] cs, const store[:, :, ::1] f, const store[:, :, ::1] o, const store[:, :, ::1] ci,
    const store[:, :, ::1] co, const store[:, :, ::1] h, const store[:, :, ::1] cs_grad,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] cs_prev_grad, store[:, ::1] h_prev_grad,
    store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad, store[::1] b_grad,
    unsigned char[::1] scratch, Py_ssize_t seq_len_max, bint use_peephole, bint ifco, int threads, int members,
    int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = op_lstm(0, 0, use_peephole, ifco)
    cdef Backward p = plan_backward_on(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
                                       real_itemsize(&x[0, 0, 0]), True, grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV], inputs[W] = &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0], &w[0, 0]
    inputs[WCI], inputs[WCF], inputs[WCO] = &wci[0], &wcf[0], &wco[0]
    inputs[OUT_I], inputs[OUT_CS], inputs[OUT_F], inputs[OUT_O] = &i[0, 0, 0], &cs[0, 0, 0], &f[0, 0, 0], &o[0, 0, 0]
    inputs[OUT_CI], inputs[OUT_CO], inputs[OUT_H] = &ci[0, 0, 0], &co[0, 0, 0], &h[0, 0, 0]
    inputs[CS_GRAD], inputs[H_GRAD] = &cs_grad[0, 0, 0], &h_grad[0, 0, 0]
    inputs[CS_LAST_GRAD], inputs[H_LAST_GRAD] = NULL, NULL
    outputs[X_GRAD] = &x_grad[0, 0, 0]
    outputs[CS_PREV_GRAD], outputs[H_PREV_GRAD] = &cs_prev_grad[0, 0], &h_prev_grad[0, 0]
    outputs[WCI_GRAD], outputs[WCF_GRAD], outputs[WCO_GRAD] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    outputs[W_GRAD], outputs[BIAS_GRAD] = &w_grad[0, 0], &b_grad[0]
    with nogil:
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(scratch), ready)
    return nanoseconds


# ------------------------------------------------------------ LSTMBlockCellGrad: the cell's gradient, without a product
cdef void dicfo_rows(
    const Backward *p, const Lstm *c, const store **inputs, store **outputs, real *scratch, real *d, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of the rows of dicfo, in d, and of cs_prev_grad."""
    cdef Py_ssize_t L = lanes_of(d), r, j
    cdef real[LF] zero
    cdef real[LF] d_cs
    cdef real *row
    clear(zero, L)
    for r in range(part_start(p.B, number, parts), part_start(p.B, number + 1, parts)):
        row = d + r * p.Ns
        for j in range(p.J):
            clear(d_cs, L)
            lstm_grad_line(p, c, inputs, inputs[CS_PREV] + r * p.H, scratch + p.start[PEEPHOLES], j, 0, r, zero, d_cs,
                           row)
            store_line(outputs[CS_PREV_GRAD] + r * p.H + j * L, d_cs, p.H - j * L)
        if store is half:
            store_row(outputs[DICFO] + r * p.N[0], row, p.N[0])


cdef void peephole_parts(
    const Backward *p, const Lstm *c, const store **inputs, store **outputs, real *scratch, const real *d, bint loading,
    Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the lines of the peepholes, or of their gradients."""
    cdef Py_ssize_t j
    for j in range(part_start(p.J, number, parts), part_start(p.J, number + 1, parts)):
        if loading:
            load_peepholes(c, scratch + p.start[PEEPHOLES], inputs, p.H, j)
        else:
            peephole_grads(p, c, inputs, outputs, d, j)


cdef long long cell_grads(
    Backward *p, const Lstm *c, const store **inputs, store **outputs, real *scratch, int ready
) noexcept nogil:
    cdef Team team
    cdef Py_ssize_t part, parts
    cdef real *d = scratch + p.start[D]
    if store is not half:
        d = <real *> outputs[DICFO]
    use_threads(&p.grid, ready)
    parts = parts_of(&p.grid)
    guard_zones(&p.workspace, scratch, 64 // p.L, 1)
    if parts == 1:
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, scratch, d, True, 0, 1)
        dicfo_rows(p, c, inputs, outputs, scratch, d, 0, 1)
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, scratch, d, False, 0, 1)
        release_zones(&p.workspace, scratch, 64 // p.L, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=parts):
        adopt_rounding(&team)
        if c.peephole:
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, scratch, d, True, part, parts)
            barrier(&team)
        for part in prange(parts, schedule="static"):
            dicfo_rows(p, c, inputs, outputs, scratch, d, part, parts)
        if c.peephole:
            barrier(&team)
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, scratch, d, False, part, parts)
        barrier(&team)  # as in `forward`
    release_zones(&p.workspace, scratch, 64 // p.L, 1)
    return measured_cost(&team)


def lstm_cell_grad_requirements(
    Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int threads
):
    cdef Backward p = plan_cell_grad_on(B, H, itemsize, choose_cell_grad_grid(B, H, threads))
    return requirements_of(&p.workspace, p.L, &p.grid)


def lstm_cell_grad(
    const store[:, ::1] cs_prev, const store[::1] wci, const store[::1] wcf, const store[::1] wco,
    const store[:, ::1] i, const store[:, ::1] cs, const store[:, ::1] f, const store[:, ::1] o,
    const store[:, ::1] ci, const store[:, ::1] co, const store[:, ::1] cs_grad, const store[:, ::1] h_grad,
    store[:, ::1] cs_prev_grad, store[:, ::1] dicfo, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    unsigned char[::1] scratch, bint use_peephole, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = op_lstm(0, 0, use_peephole, False)
    cdef Backward p = plan_cell_grad_on(i.shape[0], i.shape[1], real_itemsize(&i[0, 0]),
                                        grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[CS_PREV], inputs[WCI], inputs[WCF], inputs[WCO] = &cs_prev[0, 0], &wci[0], &wcf[0], &wco[0]
    inputs[OUT_I], inputs[OUT_CS], inputs[OUT_F], inputs[OUT_O] = &i[0, 0], &cs[0, 0], &f[0, 0], &o[0, 0]
    inputs[OUT_CI], inputs[OUT_CO] = &ci[0, 0], &co[0, 0]
    inputs[CS_GRAD], inputs[H_GRAD] = &cs_grad[0, 0], &h_grad[0, 0]
    outputs[CS_PREV_GRAD], outputs[DICFO] = &cs_prev_grad[0, 0], &dicfo[0, 0]
    outputs[WCI_GRAD], outputs[WCF_GRAD], outputs[WCO_GRAD] = &wci_grad[0], &wcf_grad[0], &wco_grad[0]
    with nogil:
        if store is double:
            nanoseconds = cell_grads(&p, &c, inputs, outputs, <double *> align_scratch(scratch), ready)
        else:
            nanoseconds = cell_grads(&p, &c, inputs, outputs, <float *> align_scratch(scratch), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def lstm_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers: `plan_layer` in layer.pxd.

    options : (P or 0, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation)
    """
    P, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation = options
    cdef Lstm c = layer_lstm(forget_bias, cell_clip, use_peephole, ifco, P, coupled, proj_clip)
    use_activations(&c, activation, recurrent_activation)
    return plan_layer(&c, task, sizes, threads, storage, format, transposed)
