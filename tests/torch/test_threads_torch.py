"""In one process with PyTorch: which OpenMP runtime's threads compute, by the order of the imports; the same results.

A wheel that was repaired has a runtime of its own.  Whether its kernels use it or PyTorch's is up to the dynamic
linker, which prefers what is there for all: PyTorch puts its own there when it is imported.  What is tested is such a
wheel, if it is installed, or a copy that is like it.
"""

import platform
import re

import pytest
from fresh import printed, python
from own_runtime import LOADED, PACKAGE, REPAIRED, copy

from blockcell import _cpu

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(platform.system() != "Linux", reason="libraries and threads are counted in /proc"),
    pytest.mark.skipif(not _cpu.OPENMP or "gcc" not in _cpu.COMPILER, reason="it is about gcc's runtime"),
]

CALL = """
import hashlib, os, signal, threading
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
PRODUCT = """
import hashlib
import torch

factors = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))

def product():
    return hashlib.sha256((factors[0] @ factors[1]).numpy().tobytes()).hexdigest()

torch.set_num_threads(1)
alone = product()
torch.set_num_threads(2)
"""
TOGETHER = f"""{CALL}{PRODUCT}
rounds = range(30)
found = [(call()[1], product()) for _ in rounds]  # in turn
theirs = threading.Thread(target=lambda: found.extend((None, product()) for _ in rounds))
theirs.start()
found.extend((call()[1], None) for _ in rounds)  # both at once
theirs.join()
child = os.fork()
if child == 0:
    signal.alarm(60)  # it is stopped if it waits for threads that it does not have
    torch.set_num_threads(1)  # as in a worker of a DataLoader; on several its own would wait
    os._exit((call()[1], product()) != (found[0][0], alone))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, *sorted({{pair[0] for pair in found}} - {{None}}), *sorted({{pair[1] for pair in found}} - {{None}}))
"""


def environment(own, folder):
    """Return an environment in which blockcell has a runtime of its own or the system's."""
    pytest.importorskip("torch")
    if REPAIRED and not own:
        pytest.skip("this wheel has a runtime of its own")
    return {"PYTHONSAFEPATH": "1"} | (copy(folder) if own else {"PYTHONPATH": str(PACKAGE.parent)})


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
    environ = environment(own, tmp_path)
    expected = printed(f"import blockcell\n{CALL}\nprint(*call())", **environ).split()
    assert expected[0] == "1"
    found = printed(f"import {order}\n{BOTH}", **environ).split()
    assert found == ["1", str(started), expected[1], str(runtimes), "True"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", ["torch, blockcell", "blockcell, torch"])
def test_neither_disturbs_the_other(order, own, tmp_path):
    """In turn, at once from two Python threads and in a forked child, either has the bits that it has alone."""
    environ = environment(own, tmp_path)
    ours = printed(f"import blockcell\n{CALL}\nprint(call()[1])", **environ)
    theirs = printed(f"{PRODUCT}\nprint(product())", **environ)
    assert printed(f"import {order}\n{TOGETHER}", **environ).split() == ["0", ours, theirs]


@pytest.mark.parametrize("own", [False, True])
def test_threads_of_pytorch_sleep_soon(own, tmp_path):
    """Where blockcell.torch is what loads it; nothing is left for programs that are started later."""
    environ = environment(own, tmp_path)
    unset = dict.fromkeys(["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
    code = "import os; import blockcell.torch; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = python(code, OMP_DISPLAY_ENV="VERBOSE", **unset, **environ)
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr) == ["1000"] * (1 + own)
    assert result.stdout.split() == ["None"]
