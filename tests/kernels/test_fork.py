"""A forked child works, with the same bits, after its parent has used threads.

The OpenMP runtime's threads do not survive a fork, but its belief in them does: a child that asked for a team would
wait for ever.
"""

import os

import pytest
from fresh import printed

from blockcell import _cpu


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.skipif(not _cpu.OPENMP, reason="built without OpenMP: there are no threads")
@pytest.mark.parametrize("num_threads", ["None", "2"])
def test_fork_after_a_threaded_call(num_threads):
    code = f"""
import os
import signal
import numpy as np
import blockcell
from blockcell import raw_ops

rng = np.random.default_rng(1)
T, B, I, H = 20, 64, 48, 64
arrays = dict(x=(T, B, I), cs_prev=(B, H), h_prev=(B, H), w=(I + H, 4 * H), b=(4 * H,))
arrays = {{name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in arrays.items()}}

def call():
    return b"".join(a.tobytes() for a in raw_ops.BlockLSTM(seq_len_max=T, **arrays, num_threads={num_threads}))

def running():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

blockcell.set_num_threads(2)
before = running()
expected = call()
assert not before or running() > before, "the parent used one thread: the test would show nothing"

child = os.fork()
if child == 0:
    signal.alarm(60)
    same = call() == expected and blockcell.get_num_threads() == 1
    blockcell.set_num_threads(8)
    os._exit(0 if same and call() == expected and blockcell.get_num_threads() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), call() == expected, blockcell.get_num_threads())
"""
    assert printed(code) == "0 True 2"
