"""No call writes past its workspace: the plan that runs is the one that says how large the workspace is."""

from pathlib import Path

import numpy as np
import pytest
from bits import with_machine
from fresh import python
from layer_cases import LAYERS

from blockcell import _kernels
from blockcell.optable import OPS
from blockcell.quantization import KERNEL_FORMATS

CALLS = """
import sys
import numpy as np
sys.path.insert(0, {lib!r})
from bits import on_threads, same, with_machine
from layer_cases import LAYERS, draw, run_all
from blockcell import _team

def results(layer, x, state, lengths, scheme):
    if not scheme:
        return run_all(layer, x, state, lengths=lengths)
    quantized = layer.quantize(scheme)
    return quantized(x, state), quantized(x, state, lengths=lengths)

_team.adapt(False)  # as many threads as are asked for, also where the machine is busy
name = {name!r}
for sizes in ((2, 16, 40, 70), (3, 40, 40, 70), (5, 40, 40, 70)):
    for scheme in (None, "float16", "int8"):
        found = []
        for threads in (1, 4, 8, 16):
            with on_threads(threads), with_machine(caches=(1, 1, 1)):  # where grids depend on how weights are stored
                layer = LAYERS[name](*sizes[2:], np.float32)
                found.append(results(layer, *draw(layer, *sizes[:2])[:3], scheme))
        assert all(same(found[0], one) for one in found), (name, sizes, scheme)
"""


@pytest.mark.parametrize(
    "name", ["lstm", "coupled lstm", "gru reset after", "rnn", "projected lstm", "gru", "dense softmax"]
)
def test_no_call_writes_past_its_workspace(name):
    """Python's debugging allocator ends the process where the bytes behind a block were written to."""
    lib = str(Path(__file__).parents[1] / "lib")
    result = python(CALLS.format(lib=lib, name=name), PYTHONMALLOC="debug")
    assert result.returncode == 0, result.stderr


FORWARD = {  # the regions of a forward pass with packed weights
    "lstm": "h, h of odd steps, cs, x, z, slots",
    "projected lstm": "h, cs, m, x, z, slots",
    "gru": "h, h_prev * r, u, x, z, slots",
    "gru reset after": "h, h of odd steps, x, z, slots",
    "rnn": "h, h of odd steps, x, z, slots",
}
BACKWARD = "w.T, d_h, d, tiles of x, tiles of h, sums of d, panels, slots"
LSTM_BACKWARD = BACKWARD.replace("d_h,", "d_h, d_cs, peepholes,")


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("name", FORWARD)
def test_regions_of_a_workspace_do_not_overlap(name, scheme, grid):
    """Each one starts where the one before ends, at a cache line, and the last one ends with the workspace."""
    layer, T, B = LAYERS[name](5, 70, np.float32), 7, 40
    format = KERNEL_FORMATS[scheme or "float32"]
    expected = FORWARD[name]
    if scheme:
        codes = "codes of h, codes of m" if name == "projected lstm" else "codes of h"
        expected = expected.replace("x,", f"x, {codes},")
    with with_machine(groups=grid[0], members=grid[1]):
        sizes, options = (T, B, layer.input_size, layer.hidden_size), layer._kernel_options()
        forward, backward = _kernels.plan_layer(layer._kernel, "workspace", sizes, 4, 0, format, False, options)
        assert [region[0] for region in forward] == expected.split(", ")
        assert [region[0] for region in backward] == (LSTM_BACKWARD if "lstm" in name else BACKWARD).split(", ")
        assert bool(forward[0][3]) == (grid[0] > 1)  # only rows of several groups need a gap
        for regions, task in ((forward, "forward"), (backward, "backward")):
            end = 0
            for _, rows, stride, gap, start in regions:
                assert start == end and start % 16 == 0
                end = start + rows * stride + gap
            assert (
                end * 4 + 64 == layer._plan_kernel(task, format, T, B, 4).size
            )  # a line more, so that any address will do


def test_a_tape_has_the_outputs_of_the_op():
    """The table of cells in pyx and the table of ops say the same."""
    ops = {"lstm": "BlockLSTM", "gru": "block_gru", "gru_reset_after": "block_gru_reset_after", "rnn": "block_rnn"}
    assert {kind: len(OPS[name].outputs) - 1 for kind, name in ops.items()} == _kernels.TAPE_ARRAYS
