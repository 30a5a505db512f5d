"""In one process with PyTorch: which OpenMP runtime's threads compute, by the order of the imports; the same results.

A wheel that was repaired has a runtime of its own.  Whether its kernels use it or PyTorch's is up to the dynamic
linker, which prefers what is there for all: PyTorch puts its own there when it is imported.
"""

import platform
import re
from pathlib import Path

import pytest
from fresh import printed, python
from own_runtime import LOADED, copy

import blockcell
from blockcell import _cpu

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(platform.system() != "Linux", reason="libraries and threads are counted in /proc"),
    pytest.mark.skipif(not _cpu.OPENMP or "gcc" not in _cpu.COMPILER, reason="it is about gcc's runtime"),
]

CALL = """
import hashlib, os
import numpy as np

def threads():
    return len(os.listdir("/proc/self/task"))

def call():
    layer, x = blockcell.LSTM.init(64, 64, seed=0), np.ones((20, 64, 64), np.float32)
    before = threads()
    y, _, tape = layer.forward(x)
    grads = layer.backward(tape, y)[2]
    return threads() - before, hashlib.sha256(y.tobytes() + grads["w"].tobytes()).hexdigest()

blockcell._team.adapt(False)
blockcell.set_num_threads(2)
"""
BOTH = f"""{LOADED}{CALL}
torch.set_num_threads(2)
before = threads()
product = torch.ones(600, 600) @ torch.ones(600, 600)
print(threads() - before, *call(), len(loaded()), bool((product == 600).all()))
"""


@pytest.mark.parametrize(
    ("order", "own", "started", "runtimes"),
    [
        ("torch, blockcell", False, 0, 1),
        ("blockcell, torch", False, 0, 1),
        ("torch, blockcell", True, 0, 2),  # the second is loaded, but not used
        ("blockcell, torch", True, 1, 2),
    ],
)
def test_whose_threads(order, own, started, runtimes, tmp_path):
    """Ours are PyTorch's wherever that is possible: a call starts no thread where PyTorch has one already."""
    pytest.importorskip("torch")
    expected = printed(f"import blockcell\n{CALL}\nprint(*call())").split()
    assert expected[0] == "1"
    environment = copy(tmp_path) if own else {"PYTHONPATH": str(Path(blockcell.__file__).parents[1])}
    found = printed(f"import {order}\n{BOTH}", PYTHONSAFEPATH="1", **environment).split()
    assert found == ["1", str(started), expected[1], str(runtimes), "True"]


@pytest.mark.parametrize("own", [False, True])
def test_threads_of_pytorch_sleep_soon(own, tmp_path):
    """Where blockcell.torch is what loads it; nothing is left for programs that are started later."""
    pytest.importorskip("torch")
    environment = copy(tmp_path) if own else {"PYTHONPATH": str(Path(blockcell.__file__).parents[1])}
    unset = dict.fromkeys(["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
    code = "import os; import blockcell.torch; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = python(code, PYTHONSAFEPATH="1", OMP_DISPLAY_ENV="VERBOSE", **unset, **environment)
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr) == ["1000"] * (1 + own)
    assert result.stdout.split() == ["None"]
