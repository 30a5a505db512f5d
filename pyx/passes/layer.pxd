"""Plans of the kernels of ops and layers of cells, and the kernel that packs weights.

The other kernels are `forward_pass` and `backward_pass` in forward.pxd and backward.pxd.  `plan_kernel` makes the plan
of one.  Python keeps it as bytes, with the kernel (`Kernel` in arrays.pxd).
"""
from cpython.pycapsule cimport PyCapsule_New

from cells.types cimport Cell
from passes.arrays cimport Kernel, Pass
from passes.backward cimport backward_pass
from passes.forward cimport forward_pass, pack_layer_weights
from passes.indices cimport INPUTS
from product.lines cimport REAL_BYTES, Array, set_arrays
from product.panels cimport pack_quantized, size_read_past
from product.quantized cimport UNQUANTIZED
from product.real cimport MATRICES
from schedule.cost cimport Grid, grid_of, threads_of
from schedule.plan cimport (
    BACKWARD_REGIONS, FORWARD_REGIONS, Backward, Forward, choose_backward_grid, choose_forward_grid,
    list_backward_regions, list_forward_regions, plan_backward, plan_forward, use_panels
)
from schedule.workspace cimport Region, describe_regions, lay_out


cdef inline tuple planned_kernel(
    Kernel kernel, const void *plan, Py_ssize_t plan_bytes, Py_ssize_t size, const Grid *grid
):
    """Return a kernel, a copy of its plan and what the plan requires: a `PlannedKernel` (blockcell/_kernels.py).

    plan : of plan_bytes; it is copied
    size : of the workspace, in reals; the memory may begin anywhere
    """
    capsule = PyCapsule_New(<void *> kernel, NULL, NULL)
    return capsule, (<const char *> plan)[:plan_bytes], size * REAL_BYTES + 64, threads_of(grid), grid.members


cdef inline long long pack_weights(const void *plan, int ready, void *packed, const Pass *a) noexcept nogil:
    """Pack the weights of a layer, or with `a.unpacks` copy its quantized matrices back; on one thread.

    plan : the bytes of a Forward
    packed : the packed weights, Python's memory, which begins at a cache line
    """
    cdef Forward p = (<const Forward *> plan)[0]
    cdef Array[INPUTS] inputs
    cdef Array[MATRICES] codes, scales
    cdef int n
    p.inputs = inputs
    use_panels(&p, packed)
    if not a.unpacks:
        set_arrays(inputs, a.inputs, INPUTS, p.c.is_half)
        pack_layer_weights(&p, 0, 1)
    if p.c.format != UNQUANTIZED:
        set_arrays(codes, <const void *const *> a.codes, MATRICES, False)
        set_arrays(scales, <const void *const *> a.scales, MATRICES, False)
        for n in range(p.c.products):
            pack_quantized(&p.w[n], &codes[n], &scales[n], a.unpacks)
    return 0


cdef inline tuple plan_kernel(const Cell *c, task, tuple sizes, int threads, bint is_packed):
    """Plan a kernel of an op, or of layers of one kind.

    Parameters
    ----------
    c : Cell
        With the options of the op or layer.
    task : {"pack", "forward", "backward", "backward without weights", "workspace"}
        "backward without weights" computes no gradients of weights.
    sizes : tuple of int
        T, B, I, H.
    threads : int
        How many there may be.
    is_packed : bool
        Whether the layer has packed the weights.

    Returns
    -------
    tuple
        As of `planned_kernel`.  To pack, the workspace is the memory of the packed weights.  For "workspace" two
        lists, the regions of the forward and of the backward pass: `describe_regions`.
    """
    cdef Forward p
    cdef Backward back
    cdef bint with_weight_grads = task != "backward without weights"
    cdef Py_ssize_t T, B, I, H
    T, B, I, H = sizes
    if task == "pack":
        p = plan_forward(c, 1, 1, I, H, True, grid_of(1, 1))
        return planned_kernel(pack_weights, &p, sizeof(Forward), p.packed_size + size_read_past(c.format), &p.grid)
    if task in ("forward", "workspace"):
        p = plan_forward(c, T, B, I, H, is_packed, choose_forward_grid(c, T, B, I, H, is_packed, threads))
    if task == "forward":
        return planned_kernel(forward_pass, &p, sizeof(Forward), p.workspace.size, &p.grid)
    back = plan_backward(
        c, T, B, I, H, with_weight_grads, choose_backward_grid(c, T, B, I, H, with_weight_grads, threads)
    )
    if task == "workspace":
        return describe_workspaces(&p, &back)
    assert task in ("backward", "backward without weights"), task
    return planned_kernel(backward_pass, &back, sizeof(Backward), back.workspace.size, &back.grid)


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
