"""The kernels of layers of cells: packing weights, and the forward and the backward pass of forward.pxd, backward.pxd.

`plan_layer` makes the plan of a kernel.  Python keeps it as bytes, with the kernel, a `LayerKernel` (arrays.pxd).

plan : the bytes of a ForwardPlan, or of a BackwardPlan in the backward pass; Python's
ready : threads that there are; kernels that pack use one
packed : the packed weights, Python's memory, which begins at a cache line
scratch : the workspace, which begins at a cache line
a : the arrays of the call (arrays.pxd)
"""
from cells.types cimport Cell
from passes.arrays cimport Pass, kernel_with_plan
from passes.backward cimport backward_layer
from passes.forward cimport forward_layer, pack_layer_weights
from passes.indices cimport INPUTS, W
from passes.operands cimport set_weights
from product.integer cimport READ_PAST
from product.lines cimport REAL_BYTES, Array
from product.panels cimport pack_quantized
from product.quantized cimport INT8, UNQUANTIZED
from schedule.cost cimport grid_of, requirements_of
from schedule.plan cimport (
    BACKWARD_REGIONS, FORWARD_REGIONS, Backward, BackwardPlan, Forward, ForwardPlan, list_backward_regions,
    list_forward_regions, plan_backward, plan_forward, plan_forward_on, use_panels
)
from schedule.workspace cimport Region, describe_regions, lay_out


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline void exchange_codes(const Forward *p, const Cell *c, const Pass *a, bint back) noexcept nogil:
    """Pack `a.codes` and `a.scales` of quantized matrices to the panels of p, or copy them `back` from there."""
    cdef Array[INPUTS] codes, scales
    cdef int n
    set_weights(c, <const void *const *> a.codes, codes)
    set_weights(c, <const void *const *> a.scales, scales)
    for n in range(c.products):
        pack_quantized(&p.w[n], &codes[W + n], &scales[W + n], back)


cdef inline long long pack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack the weights of a layer, `a.weights` and if they are quantized `a.codes` and `a.scales`."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    cdef Array[INPUTS] inputs
    cdef Forward p = layer.p
    p.c, p.inputs = &layer.c, inputs
    use_panels(&p, packed)
    set_weights(&layer.c, a.weights, inputs)
    pack_layer_weights(&p, 0, 1)
    if layer.c.format != UNQUANTIZED:
        exchange_codes(&p, &layer.c, a, False)
    return 0


cdef inline long long copy_codes_back(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Copy the codes and scales of a quantized layer's matrices from `packed` to `a.codes` and `a.scales`."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    cdef Forward p = layer.p
    use_panels(&p, packed)
    exchange_codes(&p, &layer.c, a, True)
    return 0


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
    cdef Py_ssize_t T, B, I, H
    T, B, I, H = sizes
    c.format, c.transposed = format, transposed
    if task == "backward":
        plan_back.p = plan_backward(c, T, B, I, H, True, threads)
        plan_back.c = c[0]
        requirements = requirements_of(plan_back.p.workspace.size, &plan_back.p.grid)
        return kernel_with_plan(backward_layer, &plan_back, sizeof(BackwardPlan), requirements)
    plan.c = c[0]
    if task == "forward":
        plan.p = plan_forward(c, T, B, I, H, not transposed, threads)
        requirements = requirements_of(plan.p.workspace.size, &plan.p.grid)
        return kernel_with_plan(forward_layer, &plan, sizeof(ForwardPlan), requirements)
    if task == "workspace":
        plan.p = plan_forward(c, T, B, I, H, not transposed, threads)
        plan_back.p = plan_backward(c, T, B, I, H, True, threads)
        return describe_workspaces(&plan.p, &plan_back.p)
    assert task in ("pack", "unpack"), task
    plan.p = plan_forward_on(c, 1, 1, I, H, True, grid_of(1, 1))
    requirements = plan.p.packed_size * REAL_BYTES + 64 + READ_PAST * (format == INT8), 1, 1
    return kernel_with_plan(pack_layer if task == "pack" else copy_codes_back, &plan, sizeof(ForwardPlan), requirements)


cdef inline tuple describe_workspaces(const Forward *p, const Backward *back):
    """Return the regions of the workspaces of both passes."""
    cdef Region[FORWARD_REGIONS] regions
    cdef Region[BACKWARD_REGIONS] regions_back
    cdef Py_ssize_t[FORWARD_REGIONS] starts  # which the regions have, too
    cdef Py_ssize_t[BACKWARD_REGIONS] starts_back
    list_forward_regions(p, regions)
    list_backward_regions(back, True, regions_back)
    lay_out(regions, FORWARD_REGIONS, starts)
    lay_out(regions_back, BACKWARD_REGIONS, starts_back)
    return describe_regions(regions, FORWARD_REGIONS), describe_regions(regions_back, BACKWARD_REGIONS)
