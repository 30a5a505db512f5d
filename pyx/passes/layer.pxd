"""The kernels of layers of cells: packing weights, the forward pass and the backward pass.

`plan_layer` makes the plan of a kernel.  Python keeps it as bytes, with the kernel, a `LayerKernel` (arrays.pxd).
"""
from cell cimport Cell, cell
from passes.arrays cimport Pass, kernel_with_plan
from passes.backward cimport run_pass_back
from passes.forward cimport pack, run_pass
from passes.operands cimport INPUTS, W, set_weights
from product.half cimport half
from product.integer cimport READ_PAST
from product.panels cimport pack_quantized
from product.quantized cimport INT8, UNQUANTIZED
from product.tile cimport DOUBLE, HALF, computed_itemsize, store
from schedule.cost cimport grid_of, requirements_of
from schedule.plan cimport (
    BACKWARD_REGIONS, FORWARD_REGIONS, Backward, Forward, forward_of, list_regions, list_regions_back, plan_backward,
    plan_forward, products_of, use_panels
)
from schedule.workspace cimport Region, describe_regions, lay_out


cdef struct ForwardPlan:  # also of the kernels that pack
    Forward p
    Cell c
    int storage  # the type of the arrays: FLOAT, DOUBLE or HALF


cdef struct BackwardPlan:
    Backward p
    Cell c
    int storage


# ------------------------------------------------------------------------------------------------------ packed weights
cdef inline void pack_stored(const Forward *p, const cell *c, const Pass *a, const store *unused) noexcept nogil:
    """Pack biases, peepholes and, unless they are quantized, matrices.

    a.weights : in the order of the table of ops, NULL where the layer has none; the caller's
    unused : says which type they have
    """
    cdef const store *inputs[INPUTS]
    set_weights(c, a.weights, <const void **> inputs)
    if store is double:
        pack(p, c, inputs, <double *> NULL, 0, 1)
    else:
        pack(p, c, inputs, <float *> NULL, 0, 1)


cdef inline void exchange_codes(const Forward *p, const cell *c, const Pass *a, bint back) noexcept nogil:
    """Pack the codes and scales of quantized matrices, or copy them `back` from the panels.

    a.codes, a.scales : at the indices of the matrices among the weights; the caller's, written if `back`
    """
    cdef unsigned char *codes[INPUTS]
    cdef float *scales[INPUTS]
    cdef int n
    set_weights(c, <const void *const *> a.codes, <const void **> codes)
    set_weights(c, <const void *const *> a.scales, <const void **> scales)
    for n in range(products_of(c)):
        pack_quantized(&p.w[n], &codes[W + n], &scales[W + n], back)


cdef inline long long pack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack a layer's weights to `packed`, as its forward pass reads them."""
    cdef const ForwardPlan *s = <const ForwardPlan *> plan
    cdef Forward p = s.p
    use_panels(&p, packed)
    if s.storage == DOUBLE:
        pack_stored(&p, &s.c, a, <const double *> a.weights[0])
    elif s.storage == HALF:
        pack_stored(&p, &s.c, a, <const half *> a.weights[0])
    else:
        pack_stored(&p, &s.c, a, <const float *> a.weights[0])
    if s.c.format != UNQUANTIZED:
        exchange_codes(&p, &s.c, a, False)
    return 0


cdef inline long long unpack_layer(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Copy the codes and scales of a quantized layer's matrices back from `packed`."""
    cdef const ForwardPlan *s = <const ForwardPlan *> plan
    cdef Forward p = s.p
    use_panels(&p, packed)
    exchange_codes(&p, &s.c, a, True)
    return 0


# -------------------------------------------------------------------------------------------------------------- passes
cdef inline long long forward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    cdef const ForwardPlan *s = <const ForwardPlan *> plan
    return run_pass(&s.p, &s.c, s.storage, ready, scratch, a)


cdef inline long long backward_layer(const void *plan, int ready, void *scratch, const Pass *a) noexcept nogil:
    cdef const BackwardPlan *s = <const BackwardPlan *> plan
    return run_pass_back(&s.p, &s.c, s.storage, ready, scratch, a)


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
    cdef ForwardPlan s
    cdef BackwardPlan back
    cdef Py_ssize_t T, B, I, H, itemsize = computed_itemsize(storage)
    T, B, I, H = sizes
    c.format, c.transposed = format, transposed
    if task == "backward":
        back.p, back.c, back.storage = plan_backward(c, T, B, I, H, itemsize, True, threads), c[0], storage
        requirements = requirements_of(&back.p.workspace, back.p.L, &back.p.grid)
        return kernel_with_plan(backward_layer, &back, sizeof(BackwardPlan), requirements)
    s.c, s.storage = c[0], storage
    if task == "forward":
        s.p = plan_forward(c, T, B, I, H, itemsize, not transposed, threads)
        requirements = requirements_of(&s.p.workspace, s.p.L, &s.p.grid)
        return kernel_with_plan(forward_layer, &s, sizeof(ForwardPlan), requirements)
    if task == "workspace":
        s.p = plan_forward(c, T, B, I, H, itemsize, not transposed, threads)
        back.p = plan_backward(c, T, B, I, H, itemsize, True, threads)
        return describe_workspaces(&s.p, &back.p, c)
    assert task in ("pack", "unpack"), task
    s.p = forward_of(c, 1, 1, I, H, itemsize, True, grid_of(1, 1))
    requirements = s.p.panels * itemsize + 64 + READ_PAST * (format == INT8), 1, 1
    return kernel_with_plan(pack_layer if task == "pack" else unpack_layer, &s, sizeof(ForwardPlan), requirements)


cdef inline tuple describe_workspaces(const Forward *p, const Backward *back, const cell *c):
    """Return the regions of the workspaces of both passes."""
    cdef Region[FORWARD_REGIONS] regions
    cdef Region[BACKWARD_REGIONS] regions_back
    cdef Py_ssize_t[FORWARD_REGIONS] unused
    cdef Py_ssize_t[BACKWARD_REGIONS] unused_back
    list_regions(p, c, regions)
    list_regions_back(back, c, True, regions_back)
    lay_out(regions, FORWARD_REGIONS, unused)
    lay_out(regions_back, BACKWARD_REGIONS, unused_back)
    return describe_regions(regions, FORWARD_REGIONS), describe_regions(regions_back, BACKWARD_REGIONS)
