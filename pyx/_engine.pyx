"""The kernels of a CPU level that compute in one type, float or double: setup.py compiles this module for each.

`plan_cell` and `plan_dense` return a kernel with its plan.  cells/ has the equations, passes/forward.pxd and
passes/backward.pxd the phases.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_Import

cimport cells.dense as dense
from cells.gru cimport gru_traits
from cells.gru_reset_after cimport gru_reset_after_traits
from cells.lstm cimport lstm_traits
from cells.lstm_cell_grad cimport plan_dicfo
from cells.rnn cimport rnn_traits
from cells.types cimport CELL_KINDS, GRU, GRU_RESET_AFTER, LSTM, RNN, Cell, CellTraits, use_traits
from passes.layer cimport plan_kernel
from product.integer cimport ProductInUse, use_product
from schedule.machine cimport Machine, use_machine
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))

cdef CellTraits[CELL_KINDS] traits
traits[LSTM], traits[GRU] = lstm_traits(), gru_traits()
traits[GRU_RESET_AFTER], traits[RNN] = gru_reset_after_traits(), rnn_traits()
TAPE_ARRAYS = {"lstm": traits[LSTM].saved, "gru": traits[GRU].saved, "gru_reset_after": traits[GRU_RESET_AFTER].saved,
               "rnn": traits[RNN].saved}


def plan_cell(bint is_half, bytes cell, task, tuple sizes, int threads, int format, bint transposed, bint is_packed):
    """Plan a kernel of an op, or of layers of cells: `plan_kernel` in layer.pxd.

    is_half : whether all arrays of a call are float16
    cell : the bytes of a Cell, with the options of the op or layer
    task : of `plan_kernel`; or "cell_grad", the gradient of a step without its products
    format : how the matrices of weights are quantized
    transposed : whether weights are as in PyTorch
    """
    cdef Cell c = (<const Cell *> PyBytes_AS_STRING(cell))[0]
    c.is_half, c.format, c.transposed = is_half, format, transposed
    use_traits(&c, &traits[c.kind])
    if task == "cell_grad":
        return plan_dicfo(&c, sizes, threads)
    return plan_kernel(&c, task, sizes, threads, is_packed)


def plan_dense(bint is_half, int activation, task, tuple sizes, int threads, int format):
    """Plan a kernel for dense layers: `plan_dense` in dense.pxd."""
    return dense.plan_dense(is_half, activation, task, sizes, threads, format)
