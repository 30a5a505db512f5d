"""The dense layer's kernels.  The equations, the phases and the plan of the workspace are in dense.pxd."""
from cpython.pycapsule cimport PyCapsule_Import

from cells.dense cimport (
    DenseBackward, DenseForward, backward_layer, forward_layer, pack_layer, plan_backward, plan_forward, unpack_layer
)
from passes.arrays cimport kernel_with_plan
from product.integer cimport READ_PAST, ProductInUse, use_product
from product.quantized cimport INT8
from schedule.cost cimport requirements_of
from schedule.machine cimport Machine, use_machine
from source cimport BLOCKCELL_SOURCE

SOURCE = BLOCKCELL_SOURCE.decode()
use_machine(<const Machine *> PyCapsule_Import("blockcell._cpu.MACHINE", 0))
use_product(<ProductInUse *> PyCapsule_Import("blockcell._integer.PRODUCT", 0))


def dense_layer(task, tuple sizes, int threads, int storage, int format, bint transposed, tuple options):
    """Plan a kernel, as `plan_layer` in layer.pxd does for layers of cells.

    sizes : (T, B, I, O)
    transposed : False
    options : (activation,), a number of `ACTIVATIONS` in blockcell/optable.py
    """
    cdef DenseForward p
    cdef DenseBackward back
    cdef Py_ssize_t T, B, I, O
    T, B, I, O = sizes
    if task == "backward":
        back = plan_backward(T, B, I, O, storage, options[0], threads)
        requirements = requirements_of(&back.workspace, back.L, &back.grid)
        return kernel_with_plan(backward_layer, &back, sizeof(DenseBackward), requirements)
    p = plan_forward(T, B, I, O, storage, format, options[0], threads)
    if task == "forward":
        requirements = requirements_of(&p.workspace, p.L, &p.grid)
        return kernel_with_plan(forward_layer, &p, sizeof(DenseForward), requirements)
    assert task in ("pack", "unpack"), task
    requirements = p.w.count * p.w.size * (64 // p.L) + 64 + READ_PAST * (format == INT8), 1, 1
    return kernel_with_plan(pack_layer if task == "pack" else unpack_layer, &p, sizeof(DenseForward), requirements)
