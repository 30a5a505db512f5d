"""The LSTM's kernels: what Python calls.

The equations are in lstm.pxd, the phases in forward.pxd and backward.pxd.  The kernel of an op takes typed
memoryviews: it collects their addresses under the names of operands.pxd, and makes the plan (plan.pxd).  `..._work`
returns what it requires: bytes of its workspace, threads, and how many of these share the units of a row.  A kernel
returns the nanoseconds that having several threads cost.  `lstm_layer` plans the kernels of layers, which
layer.pxd has.
"""
from cpython.pycapsule cimport PyCapsule_Import
from cython.parallel cimport parallel, prange

from cells.lstm cimport layer_of, load_peepholes, lstm_grad_line, lstm_of, peephole_grads
from cells.types cimport Lstm, use_activations
from passes.backward cimport run_backward
from passes.forward cimport run_forward
from passes.layer cimport plan_layer
from passes.operands cimport (
    BIAS, BIAS_GRAD, CS_GRAD, CS_LAST_GRAD, CS_PREV, CS_PREV_GRAD, DICFO, H_GRAD, H_LAST, H_LAST_GRAD, H_PREV,
    H_PREV_GRAD, INPUTS, OUT_CI, OUT_CO, OUT_CS, OUT_F, OUT_H, OUT_I, OUT_O, OUTPUTS, W, W_GRAD, WCF, WCF_GRAD,
    WCI, WCI_GRAD, WCO, WCO_GRAD, X, X_GRAD
)
from product.half cimport half
from product.integer cimport ProductInUse, use_product
from product.real cimport real
from product.tile cimport LF, align_scratch, clear, lanes_of, real_itemsize, store, store_line, store_row
from schedule.cost cimport grid_of, parts_of, requirements_of, use_threads
from schedule.machine cimport Machine, use_machine
from schedule.plan cimport (
    Backward, Forward, backward_of, cell_grad_plan, forward_of, grid_of_cell_grad, plan_backward, plan_forward,
    use_panels
)
from schedule.team cimport Team, adopt_rounding, barrier, measured_cost, share, start_team
from schedule.workspace cimport guard_zones, release_zones
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


# ------------------------------------------------------------------------------------------------------------- forward
cdef forward_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Lstm c = lstm_of(0, 0, False, False)
    cdef Forward p = plan_forward(&c, T, B, I, H, itemsize, False, num_threads)
    return requirements_of(&p.workspace, p.L, &p.grid)


def lstm_cell_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return forward_work(1, B, I, H, itemsize, num_threads)


def block_lstm_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return forward_work(T, B, I, H, itemsize, num_threads)


def lstm_cell(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, ::1] i, store[:, ::1] cs, store[:, ::1] f, store[:, ::1] o, store[:, ::1] ci, store[:, ::1] co,
    store[:, ::1] h, unsigned char[::1] work, double forget_bias, double cell_clip, bint use_peephole, int threads,
    int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = lstm_of(forget_bias, cell_clip, use_peephole, False)
    cdef Forward p = forward_of(&c, 1, x.shape[0], x.shape[1], h_prev.shape[1], real_itemsize(&x[0, 0]), False,
                                grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV] = &x[0, 0], &cs_prev[0, 0], &h_prev[0, 0]
    inputs[W], inputs[WCI], inputs[WCF], inputs[WCO], inputs[BIAS] = &w[0, 0], &wci[0], &wcf[0], &wco[0], &b[0]
    outputs[OUT_I], outputs[OUT_CS], outputs[OUT_F] = &i[0, 0], &cs[0, 0], &f[0, 0]
    outputs[OUT_O], outputs[OUT_CI], outputs[OUT_CO] = &o[0, 0], &ci[0, 0], &co[0, 0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0], NULL
    use_panels(&p, align_scratch(work))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


def block_lstm(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[::1] b,
    store[:, :, ::1] i, store[:, :, ::1] cs, store[:, :, ::1] f, store[:, :, ::1] o, store[:, :, ::1] ci,
    store[:, :, ::1] co, store[:, :, ::1] h, unsigned char[::1] work, Py_ssize_t seq_len_max, double forget_bias,
    double cell_clip, bint use_peephole, bint ifco, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = lstm_of(forget_bias, cell_clip, use_peephole, ifco)
    cdef Forward p = forward_of(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1], real_itemsize(&x[0, 0, 0]),
                                False, grid_of(threads // members, members))
    cdef long long nanoseconds
    inputs[X], inputs[CS_PREV], inputs[H_PREV] = &x[0, 0, 0], &cs_prev[0, 0], &h_prev[0, 0]
    inputs[W], inputs[WCI], inputs[WCF], inputs[WCO], inputs[BIAS] = &w[0, 0], &wci[0], &wcf[0], &wco[0], &b[0]
    outputs[OUT_I], outputs[OUT_CS], outputs[OUT_F] = &i[0, 0, 0], &cs[0, 0, 0], &f[0, 0, 0]
    outputs[OUT_O], outputs[OUT_CI], outputs[OUT_CO] = &o[0, 0, 0], &ci[0, 0, 0], &co[0, 0, 0]
    outputs[OUT_H], outputs[H_LAST] = &h[0, 0, 0], NULL
    use_panels(&p, align_scratch(work))
    with nogil:
        nanoseconds = run_forward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


# ------------------------------------------------------------------------------------------------------------ backward
cdef backward_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Lstm c = lstm_of(0, 0, False, False)
    cdef Backward p = plan_backward(&c, T, B, I, H, itemsize, True, num_threads)
    return requirements_of(&p.workspace, p.L, &p.grid)


def lstm_cell_vjp_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return backward_work(1, B, I, H, itemsize, num_threads)


def block_lstm_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    return backward_work(T, B, I, H, itemsize, num_threads)


def lstm_cell_vjp(
    const store[:, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, ::1] i, const store[:, ::1] cs,
    const store[:, ::1] f, const store[:, ::1] o, const store[:, ::1] ci, const store[:, ::1] co,
    const store[:, ::1] cs_grad, const store[:, ::1] h_grad, store[:, ::1] x_grad, store[:, ::1] cs_prev_grad,
    store[:, ::1] h_prev_grad, store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    store[::1] b_grad, unsigned char[::1] work, bint use_peephole, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = lstm_of(0, 0, use_peephole, False)
    cdef Backward p = backward_of(&c, 1, x.shape[0], x.shape[1], h_prev.shape[1], real_itemsize(&x[0, 0]), True,
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
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


def block_lstm_grad(
    const store[:, :, ::1] x, const store[:, ::1] cs_prev, const store[:, ::1] h_prev, const store[:, ::1] w,
    const store[::1] wci, const store[::1] wcf, const store[::1] wco, const store[:, :, ::1] i,
    const store[:, :, ::1] cs, const store[:, :, ::1] f, const store[:, :, ::1] o, const store[:, :, ::1] ci,
    const store[:, :, ::1] co, const store[:, :, ::1] h, const store[:, :, ::1] cs_grad,
    const store[:, :, ::1] h_grad, store[:, :, ::1] x_grad, store[:, ::1] cs_prev_grad, store[:, ::1] h_prev_grad,
    store[:, ::1] w_grad, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad, store[::1] b_grad,
    unsigned char[::1] work, Py_ssize_t seq_len_max, bint use_peephole, bint ifco, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = lstm_of(0, 0, use_peephole, ifco)
    cdef Backward p = backward_of(&c, seq_len_max, x.shape[1], x.shape[2], h_prev.shape[1],
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
        nanoseconds = run_backward(&p, &c, inputs, outputs, align_scratch(work), ready)
    return nanoseconds


# ------------------------------------------------------------ LSTMBlockCellGrad: the cell's gradient, without a product
cdef void dicfo_rows(
    const Backward *p, const Lstm *c, const store **inputs, store **outputs, real *work, real *d, Py_ssize_t number,
    Py_ssize_t parts
) noexcept nogil:
    """One part of the rows of dicfo, in d, and of cs_prev_grad."""
    cdef Py_ssize_t L = lanes_of(d), r, j
    cdef real[LF] zero
    cdef real[LF] d_cs
    cdef real *row
    clear(zero, L)
    for r in range(share(p.B, number, parts), share(p.B, number + 1, parts)):
        row = d + r * p.Ns
        for j in range(p.J):
            clear(d_cs, L)
            lstm_grad_line(p, c, inputs, inputs[CS_PREV] + r * p.H, work + p.peep, j, 0, r, zero, d_cs, row)
            store_line(outputs[CS_PREV_GRAD] + r * p.H + j * L, d_cs, p.H - j * L)
        if store is half:
            store_row(outputs[DICFO] + r * p.N[0], row, p.N[0])


cdef void peephole_parts(
    const Backward *p, const Lstm *c, const store **inputs, store **outputs, real *work, const real *d, bint loading,
    Py_ssize_t number, Py_ssize_t parts
) noexcept nogil:
    """One part of the lines of the peepholes, or of their gradients."""
    cdef Py_ssize_t j
    for j in range(share(p.J, number, parts), share(p.J, number + 1, parts)):
        if loading:
            load_peepholes(c, work + p.peep, inputs, p.H, j)
        else:
            peephole_grads(p, c, inputs, outputs, d, j)


cdef long long cell_grads(
    Backward *p, const Lstm *c, const store **inputs, store **outputs, real *work, int ready
) noexcept nogil:
    cdef Team team
    cdef Py_ssize_t part, parts
    cdef real *d = work + p.d
    if store is not half:
        d = <real *> outputs[DICFO]
    use_threads(&p.grid, ready)
    parts = parts_of(&p.grid)
    guard_zones(&p.workspace, work, 64 // p.L, 1)
    if parts == 1:
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, work, d, True, 0, 1)
        dicfo_rows(p, c, inputs, outputs, work, d, 0, 1)
        if c.peephole:
            peephole_parts(p, c, inputs, outputs, work, d, False, 0, 1)
        release_zones(&p.workspace, work, 64 // p.L, 1)
        return 0
    start_team(&team, parts, 1)
    with nogil, parallel(num_threads=parts):
        adopt_rounding(&team)
        if c.peephole:
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, work, d, True, part, parts)
            barrier(&team)
        for part in prange(parts, schedule="static"):
            dicfo_rows(p, c, inputs, outputs, work, d, part, parts)
        if c.peephole:
            barrier(&team)
            for part in prange(parts, schedule="static"):
                peephole_parts(p, c, inputs, outputs, work, d, False, part, parts)
        barrier(&team)  # as in `forward`
    release_zones(&p.workspace, work, 64 // p.L, 1)
    return measured_cost(&team)


def lstm_cell_grad_work(Py_ssize_t T, Py_ssize_t B, Py_ssize_t I, Py_ssize_t H, Py_ssize_t itemsize, int num_threads):
    cdef Backward p = cell_grad_plan(B, H, itemsize, grid_of_cell_grad(B, H, num_threads))
    return requirements_of(&p.workspace, p.L, &p.grid)


def lstm_cell_grad(
    const store[:, ::1] cs_prev, const store[::1] wci, const store[::1] wcf, const store[::1] wco,
    const store[:, ::1] i, const store[:, ::1] cs, const store[:, ::1] f, const store[:, ::1] o,
    const store[:, ::1] ci, const store[:, ::1] co, const store[:, ::1] cs_grad, const store[:, ::1] h_grad,
    store[:, ::1] cs_prev_grad, store[:, ::1] dicfo, store[::1] wci_grad, store[::1] wcf_grad, store[::1] wco_grad,
    unsigned char[::1] work, bint use_peephole, int threads, int members, int ready
):
    cdef const store *inputs[INPUTS]
    cdef store *outputs[OUTPUTS]
    cdef Lstm c = lstm_of(0, 0, use_peephole, False)
    cdef Backward p = cell_grad_plan(i.shape[0], i.shape[1], real_itemsize(&i[0, 0]),
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
            nanoseconds = cell_grads(&p, &c, inputs, outputs, <double *> align_scratch(work), ready)
        else:
            nanoseconds = cell_grads(&p, &c, inputs, outputs, <float *> align_scratch(work), ready)
    return nanoseconds


# --------------------------------------------------------------------------------------------------------------- layers
def lstm_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel for layers: `plan_layer` in layer.pxd.

    options : (P or 0, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation)
    """
    P, coupled, use_peephole, ifco, forget_bias, cell_clip, proj_clip, activation, recurrent_activation = options
    cdef Lstm c = layer_of(forget_bias, cell_clip, use_peephole, ifco, P, coupled, proj_clip)
    use_activations(&c, activation, recurrent_activation)
    return plan_layer(&c, task, sizes, threads, storage, format, transposed)
