"""The kernels of a CPU level that compute in one type, float or double: setup.py compiles this module for each.

`ENGINE` is the table of functions for the ops (engine.pxd); `plan_layer` and `plan_dense` plan the kernels of layers,
which passes/layer.pxd and cells/dense.pxd have.  cells/ has the equations, passes/forward.pxd and passes/backward.pxd
the phases.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_Import, PyCapsule_New

cimport cells.dense as dense
cimport cells.lstm_cell_grad as cell_grad
cimport passes.backward as backward
cimport passes.forward as forward
cimport passes.layer as layer
from cells.gru cimport gru_traits
from cells.gru_reset_after cimport gru_reset_after_traits
from cells.lstm cimport lstm_traits
from cells.rnn cimport rnn_traits
from cells.types cimport CELL_KINDS, GRU, GRU_RESET_AFTER, LSTM, RNN, Cell, CellTraits, cell_of, use_traits
from engine cimport Engine, OpCall
from passes.indices cimport INPUTS, OUTPUTS
from product.integer cimport ProductInUse, use_product
from product.lines cimport Array, align_to_line, set_arrays
from product.real cimport real
from schedule.cost cimport grid_of, requirements_of
from schedule.machine cimport Machine, use_machine
from schedule.plan cimport (
    Backward, Forward, plan_backward, plan_backward_on, plan_forward, plan_forward_on, use_panels
)
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))

cdef CellTraits[CELL_KINDS] traits
traits[LSTM], traits[GRU] = lstm_traits(), gru_traits()
traits[GRU_RESET_AFTER], traits[RNN] = gru_reset_after_traits(), rnn_traits()
TAPE_ARRAYS = {"lstm": traits[LSTM].saved, "gru": traits[GRU].saved, "gru_reset_after": traits[GRU_RESET_AFTER].saved,
               "rnn": traits[RNN].saved}


# ----------------------------------------------------------------------------------------------------------------- ops
def requirements(int kind, task, tuple sizes, int threads):
    """Return what an op requires: `requirements_of` in cost.pxd.

    Parameters
    ----------
    kind : int
        Of the cell.
    task : {"forward", "backward", "backward without weights", "cell_grad"}
        "backward without weights" computes no gradients of weights.
    sizes : tuple of int
        T, B, I, H.
    threads : int
        How many there may be.
    """
    cdef Cell c = cell_of(kind, False)
    cdef Forward p
    cdef Backward back
    cdef Py_ssize_t T, B, I, H
    T, B, I, H = sizes
    use_traits(&c, &traits[kind])
    if task == "forward":
        p = plan_forward(&c, T, B, I, H, False, threads)
        return requirements_of(p.workspace.size, &p.grid)
    if task == "cell_grad":
        back = cell_grad.plan_dicfo(B, H, threads)
    else:
        back = plan_backward(&c, T, B, I, H, task == "backward", threads)
    return requirements_of(back.workspace.size, &back.grid)


cdef inline void set_call_arrays(const OpCall *call, Array *inputs, Array *outputs) noexcept nogil:
    """Set the arrays of a call of an op."""
    set_arrays(inputs, call.inputs, INPUTS, call.cell.is_half)
    set_arrays(outputs, <const void *const *> call.outputs, OUTPUTS, call.cell.is_half)


cdef long long run_forward(const OpCall *call, void *scratch, int ready) noexcept nogil:
    """Run the forward pass of an op."""
    cdef Cell c = call.cell
    cdef Forward p
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    use_traits(&c, &traits[c.kind])
    p = plan_forward_on(&c, call.T, call.B, call.I, call.H, False,
                        grid_of(call.threads // call.members, call.members))
    p.inputs, p.outputs, p.scratch = inputs, outputs, <real *> align_to_line(scratch)
    use_panels(&p, p.scratch)
    set_call_arrays(call, inputs, outputs)
    return forward.run_forward(&p, ready)


cdef long long run_backward(const OpCall *call, void *scratch, int ready) noexcept nogil:
    """Run the backward pass of an op."""
    cdef Cell c = call.cell
    cdef Backward p
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    use_traits(&c, &traits[c.kind])
    p = plan_backward_on(&c, call.T, call.B, call.I, call.H, call.with_weight_grads,
                         grid_of(call.threads // call.members, call.members))
    p.inputs, p.outputs, p.scratch = inputs, outputs, <real *> align_to_line(scratch)
    set_call_arrays(call, inputs, outputs)
    return backward.run_backward(&p, ready)


cdef long long run_cell_grad(const OpCall *call, void *scratch, int ready) noexcept nogil:
    """Run `LSTMBlockCellGrad`."""
    cdef Backward p = cell_grad.plan_dicfo(call.B, call.H, call.threads)
    cdef Array[INPUTS] inputs
    cdef Array[OUTPUTS] outputs
    p.c, p.inputs, p.outputs, p.scratch = &call.cell, inputs, outputs, <real *> align_to_line(scratch)
    set_call_arrays(call, inputs, outputs)
    return cell_grad.run_dicfo(&p, ready)


cdef Engine engine
engine.forward, engine.backward, engine.cell_grad = run_forward, run_backward, run_cell_grad
ENGINE = PyCapsule_New(&engine, "blockcell.engine", NULL)


# --------------------------------------------------------------------------------------------------------------- layers
def plan_layer(bint is_half, bytes cell, task, tuple sizes, int threads, int format, bint transposed):
    """Plan a kernel for layers of cells: `plan_layer` in layer.pxd.

    is_half : whether all arrays of a call are float16
    cell : the bytes of a Cell
    """
    cdef Cell c = (<const Cell *> PyBytes_AS_STRING(cell))[0]
    c.is_half = is_half
    use_traits(&c, &traits[c.kind])
    return layer.plan_layer(&c, task, sizes, threads, format, transposed)


def plan_dense(bint is_half, int activation, task, tuple sizes, int threads, int format):
    """Plan a kernel for dense layers: `plan_dense` in dense.pxd."""
    return dense.plan_dense(is_half, activation, task, sizes, threads, format)
