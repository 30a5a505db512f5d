"""The kernels of layers of cells: packing weights, the forward pass and the backward pass.

`plan_layer` makes the plan of a kernel.  Python keeps it as bytes, with the kernel, a `LayerKernel` (arrays.pxd).

plan : the bytes of a ForwardPlan, or of a BackwardPlan in the backward pass; Python's
ready : threads that there are; kernels that pack use one
packed : the packed weights, Python's memory, which begins at a cache line
scratch : the workspace, which begins at a cache line
a : the arrays of the call (arrays.pxd)
"""
from cell cimport Cell, cell
from passes.arrays cimport Pass, kernel_with_plan
from passes.backward cimport run_layer_backward
from passes.forward cimport pack_weights, run_layer_forward
from passes.operands cimport INPUTS, W, set_weights
from product.half cimport half
from product.integer cimport READ_PAST
from product.panels cimport pack_quantized
from product.quantized cimport INT8, UNQUANTIZED
from product.tile cimport DOUBLE, HALF, computed_itemsize, store
from schedule.cost cimport grid_of, requirements_of
from schedule.plan cimport (
    BACKWARD_REGIONS, FORWARD_REGIONS, Backward, Forward, list_backward_regions, list_forward_regions, plan_backward,
    plan_forward, plan_forward_on, products_of, use_panels
)
from schedule.workspace cimport Region, describe_regions, lay_out


cdef struct ForwardPlan:  # also of the kernels that pack
    Forward p
    Cell c
    int storage  # the type of the arrays: FLOAT, DOUBLE or HALF


cdef struct BackwardPlan:
    Backward p
    Cell c
    int storage  # the type of the arrays: FLOAT, DOUBLE or HALF


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline void pack_stored(const Forward *p, const cell *c, const Pass *a, const store *of_type) noexcept nogil:
    """Pack biases, peepholes and, unless they are quantized, matrices, from `a.weights` to the panels of p.

    of_type : only its type counts, which is that of the weights; may be NULL
    """
    cdef const store *inputs[INPUTS]
    set_weights(c, a.weights, <const void **> inputs)
    if store is double:
        pack_weights(p, c, inputs, <double *> NULL, 0, 1)
    else:
        pack_weights(p, c, inputs, <float *> NULL, 0, 1)


cdef inline void exchange_codes(const Forward *p, const cell *c, const Pass *a, bint back) noexcept nogil:
    """Pack `a.codes` and `a.scales` of quantized matrices to the panels of p, or copy them `back` from there."""
    cdef unsigned char *codes[INPUTS]
    cdef float *scales[INPUTS]
    cdef int n
    set_weights(c, <const void *const *> a.codes, <const void **> codes)
    set_weights(c, <const void *const *> a.scales, <const void **> scales)
    for n in range(products_of(c)):
        pack_quantized(&p.w[n], &codes[W + n], &scales[W + n], back)


cdef inline long long pack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack the weights of a layer, `a.weights` and if they are quantized `a.codes` and `a.scales`."""
    cdef const ForwardPlan *layer = <const ForwardPlan *> plan
    cdef Forward p = layer.p
    use_panels(&p, packed)
    if layer.storage == DOUBLE:
        pack_stored(&p, &layer.c, a, <const double *> NULL)
    elif layer.storage == HALF:
        pack_stored(&p, &layer.c, a, <const half *> NULL)
    else:
        pack_stored(&p, &layer.c, a, <const float *> NULL)
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
    if layer.storage == DOUBLE:
        return run_layer_forward(&layer.p, &layer.c, ready, scratch, a, <const double *> NULL)
    if layer.storage == HALF:
        return run_layer_forward(&layer.p, &layer.c, ready, scratch, a, <const half *> NULL)
    return run_layer_forward(&layer.p, &layer.c, ready, scratch, a, <const float *> NULL)


cdef inline long long backward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    """Run the backward pass of a layer; return the nanoseconds that having several threads cost."""
    cdef const BackwardPlan *layer = <const BackwardPlan *> plan
    if layer.storage == DOUBLE:
        return run_layer_backward(&layer.p, &layer.c, ready, scratch, a, <const double *> NULL)
    if layer.storage == HALF:
        return run_layer_backward(&layer.p, &layer.c, ready, scratch, a, <const half *> NULL)
    return run_layer_backward(&layer.p, &layer.c, ready, scratch, a, <const float *> NULL)


# --------------------------------------------------------------------------------------------------------------- plans
cdef inline tuple plan_layer(Cell *c, task, tuple sizes, int threads, int storage, int format, bint transposed):
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
    storage : int
        The position of the arrays' dtype in DTYPES of blockcell/optable.py.
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
    cdef Py_ssize_t T, B, I, H, itemsize = computed_itemsize(storage)
    T, B, I, H = sizes
    c.format, c.transposed = format, transposed
    if task == "backward":
        plan_back.p = plan_backward(c, T, B, I, H, itemsize, True, threads)
        plan_back.c, plan_back.storage = c[0], storage
        requirements = requirements_of(&plan_back.p.workspace, plan_back.p.L, &plan_back.p.grid)
        return kernel_with_plan(backward_layer, &plan_back, sizeof(BackwardPlan), requirements)
    plan.c, plan.storage = c[0], storage
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


cdef inline tuple describe_workspaces(const Forward *p, const Backward *back, const cell *c):
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
