"""The kernels of layers of cells: packing weights, the forward pass and the backward pass.

`plan_layer` makes the plan of a kernel.  Python keeps it as bytes, with the kernel, a `LayerKernel` (arrays.pxd).

plan : the bytes of a ForwardPlan, or of a BackwardPlan in the backward pass; Python's
ready : threads that there are; kernels that pack use one
packed : the packed weights, Python's memory, which begins at a cache line
scratch : the workspace, which begins at a cache line
a : the arrays of the call (arrays.pxd)
"""
from cells.types cimport Cell
from passes.arrays cimport Pass, kernel_with_plan
from passes.backward cimport run_layer_backward
from passes.forward cimport pack_weights, run_layer_forward
from passes.indices cimport INPUTS, W
from passes.operands cimport set_weights
from product.integer cimport READ_PAST
from product.lines cimport Array
from product.panels cimport pack_quantized
from product.quantized cimport INT8, UNQUANTIZED
from product.real cimport real
from schedule.cost cimport grid_of, requirements_of
from schedule.plan cimport (
    BACKWARD_REGIONS, FORWARD_REGIONS, Backward, Forward, list_backward_regions, list_forward_regions, plan_backward,
    plan_forward, plan_forward_on, products_of, use_panels
)
from schedule.workspace cimport Region, describe_regions, lay_out


cdef struct ForwardPlan:  # also of the kernels that pack
    Forward p
    Cell c


cdef struct BackwardPlan:
    Backward p
    Cell c


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline void exchange_codes(const Forward *p, const Cell *c, const Pass *a, bint back) noexcept nogil:
    """Pack `a.codes` and `a.scales` of quantized matrices to the panels of p, or copy them `back` from there."""
    cdef Array[INPUTS] codes, scales
    cdef int n
    set_weights(c, <const void *const *> a.codes, codes)
    set_weights(c, <const void *const *> a.scales, scales)
    for n in range(products_of(c)):
        pack_quantized(&p.w[n], &codes[W + n], &scales[W + n], back)


cdef inline long long pack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack the weights of a layer, `a.weights` and if they are quantized `a.codes` and `a.scales`."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    cdef Array[INPUTS] inputs
    cdef Forward p = layer.p
    use_panels(&p, packed)
    set_weights(&layer.c, a.weights, inputs)
    pack_weights(&p, &layer.c, inputs, 0, 1)
    if layer.c.format != UNQUANTIZED:
        exchange_codes(&p, &layer.c, a, False)
    return 0


cdef inline long long unpack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Copy the codes and scales of a quantized layer's matrices from `packed` to `a.codes` and `a.scales`."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    cdef Forward p = layer.p
    use_panels(&p, packed)
    exchange_codes(&p, &layer.c, a, True)
    return 0


# -------------------------------------------------------------------------------------------------------------- passes
cdef inline long long forward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the forward pass of a layer; return the nanoseconds that having several threads cost."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    return run_layer_forward(&layer.p, &layer.c, ready, scratch, a)


cdef inline long long backward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the backward pass of a layer; return the nanoseconds that having several threads cost."""
    cdef const BackwardPlan *layer = <const BackwardPlan *> plan
    return run_layer_backward(&layer.p, &layer.c, ready, scratch, a)


# --------------------------------------------------------------------------------------------------------------- plans
cdef inline tuple plan_layer(Cell *c, task, tuple sizes, int threads, int format, bint transposed):
    """Plan a kernel for layers of one kind.

    Parameters
    ----------
    c : Cell
        With the layer's attributes; `format` and `transposed` are set here.
    task : {"pack", "unpack", "forward", "backward", "workspace"}
    sizes : tuple of int
        T, B, I, H.
    threads : int
        How many there may be.
    format : int
        How the matrices of weights are quantized.
    transposed : bool
        Whether weights are as in PyTorch, and not packed.

    Returns
    -------
    tuple
        As of `kernel_with_plan`.  To pack, the workspace is the memory of the packed weights.  For "workspace" two
        lists, the regions of the forward and of the backward pass: `describe_regions`.
    """
    cdef ForwardPlan plan
    cdef BackwardPlan plan_back
    cdef Py_ssize_t T, B, I, H, itemsize = sizeof(real)
    T, B, I, H = sizes
    c.format, c.transposed = format, transposed
    if task == "backward":
        plan_back.p = plan_backward(c, T, B, I, H, itemsize, True, threads)
        plan_back.c = c[0]
        requirements = requirements_of(&plan_back.p.workspace, plan_back.p.L, &plan_back.p.grid)
        return kernel_with_plan(backward_layer, &plan_back, sizeof(BackwardPlan), requirements)
    plan.c = c[0]
    if task == "forward":
        plan.p = plan_forward(c, T, B, I, H, itemsize, not transposed, threads)
        requirements = requirements_of(&plan.p.workspace, plan.p.L, &plan.p.grid)
        return kernel_with_plan(forward_layer, &plan, sizeof(ForwardPlan), requirements)
    if task == "workspace":
        plan.p = plan_forward(c, T, B, I, H, itemsize, not transposed, threads)
        plan_back.p = plan_backward(c, T, B, I, H, itemsize, True, threads)
        return describe_workspaces(&plan.p, &plan_back.p, c)
    assert task in ("pack", "unpack"), task
    plan.p = plan_forward_on(c, 1, 1, I, H, itemsize, True, grid_of(1, 1))
    requirements = plan.p.packed_size * itemsize + 64 + READ_PAST * (format == INT8), 1, 1
    return kernel_with_plan(pack_layer if task == "pack" else unpack_layer, &plan, sizeof(ForwardPlan), requirements)


cdef inline tuple describe_workspaces(const Forward *p, const Backward *back, const Cell *c):
    """Return the regions of the workspaces of both passes."""
    cdef Region[FORWARD_REGIONS] regions
    cdef Region[BACKWARD_REGIONS] regions_back
    cdef Py_ssize_t[FORWARD_REGIONS] starts  # which the regions have, too
    cdef Py_ssize_t[BACKWARD_REGIONS] starts_back
    list_forward_regions(p, c, regions)
    list_backward_regions(back, c, True, regions_back)
    lay_out(regions, FORWARD_REGIONS, starts)
    lay_out(regions_back, BACKWARD_REGIONS, starts_back)
    return describe_regions(regions, FORWARD_REGIONS), describe_regions(regions_back, BACKWARD_REGIONS)
