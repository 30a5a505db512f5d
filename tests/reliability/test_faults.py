"""If memory or threads run out or Ctrl-C strikes in a call, it raises or is right, and nothing is left half done.

The calls are those of scenarios.py. faults.py makes them in children, so that a crash or a child that hangs is a failed
test. `make test-all` tries every place where an allocation can fail or Ctrl-C can strike; the tests try a few.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fresh import script

from blockcell import GRU, LSTM, _cpu

FAULTS = Path(__file__).parents[2] / "tools" / "faults.py"
SHIM = FAULTS.with_name("malloc_shim.c")
GROUPS = ["ops", "layers", "streams", "scorers", "sessions", "files"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc as Linux has them")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
threaded = pytest.mark.skipif(not _cpu.OPENMP, reason="built without OpenMP: there are no threads")


def child(*arguments: object, minutes: float = 2, **environment: str | None) -> None:
    """Run faults.py, which must succeed in so many minutes of processor time, and print what it prints.

    Beside other work that may take ten times as long by the clock. Threads that wait do not spin, because there are
    more of them than processors. numpy uses none.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder}
        result = script(FAULTS, str(minutes), *map(str, arguments), minutes=10 * minutes, **environment)
    print(result.stdout)
    print(result.stderr[-6000:])
    assert result.returncode == 0, f"{arguments}: {result.stderr[-3000:]}"


# ------------------------------------------------------------------------------------------------- the n-th place fails
@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The library that makes mallocs fail."""
    compiler = shutil.which("cc")
    if platform.libc_ver()[0] != "glibc" or compiler is None:
        pytest.skip("needs glibc, whose functions it replaces, and a C compiler")
    library = tmp_path_factory.mktemp("shim") / "malloc_shim.so"
    subprocess.run([compiler, "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", library, SHIM], check=True)
    return str(library)


def disturb(fault, group, count, request, threads=2, minutes=2.0, third=""):
    if fault == "allocations":
        pytest.importorskip("_testcapi", reason="CPython's own, which not every build has")
    if group == "export":
        pytest.importorskip("onnx")
    environment = {"LD_PRELOAD": request.getfixturevalue("shim")} if fault == "mallocs" else {}
    child("disturb", fault, group, count, threads, third, minutes=minutes, **environment)


# Protobuf crashes if one of its own allocations fails. Where models are written, MemoryError comes from the Python code
# around it instead.
FAULTS_OF_ALL = ["allocations", "mallocs", "interrupts"]
OF_SOME = [("errors", "export"), ("interrupts", "export"), ("allocations", "steps"), ("mallocs", "steps")]
EVERY_PLACE = [*product(FAULTS_OF_ALL, GROUPS), *OF_SOME]


@pytest.mark.parametrize("fault", FAULTS_OF_ALL)
def test_some_places(fault, request):
    """Of scenarios in which all faults can be, each fault is in a third, so that each scenario meets one."""
    disturb(fault, ",".join(GROUPS), 4, request, third=FAULTS_OF_ALL.index(fault))


@pytest.mark.parametrize(("fault", "group"), OF_SOME)
def test_some_places_of_some_faults(fault, group, request):
    disturb(fault, group, 4, request)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fault", ["allocations", "mallocs"])
def test_every_place_of_first_calls(fault, threads, request):
    """In a first call after binding. The other tests call an op before; these are few places, so all are tried."""
    disturb(fault, "first calls", 0, request, threads)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("fault", "group"), EVERY_PLACE)
def test_every_place(fault, group, threads, request):
    count = 300 if group == "export" else 0  # of some ten thousand places; 0: all
    disturb(fault, group, count, request, threads, minutes=40)


# ------------------------------------------------------------------------------------------------------------ resources
@pytest.mark.meet(1)
@linux
@threaded
@pytest.mark.parametrize("before", [1, 2])  # the threads that run already
@pytest.mark.parametrize("limit", ["memory", "processes"])
def test_no_more_threads(limit, before):
    child("without_threads", limit, before, OMP_STACKSIZE="64M")


@linux
@threaded
def test_threads_of_steps():
    child("threads_of_steps")


def test_an_impossible_batch():
    layer = LSTM.init(2, 3, seed=0)
    for batch in (2**62, 2**40, 10**30):
        with pytest.raises((MemoryError, ValueError, OverflowError)) as caught:
            layer.stream(batch)
        assert caught.type is not ValueError or "batch" in str(caught.value)
    assert layer.stream(2).step(np.zeros((2, 2), np.float32)).shape == (2, 3)


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_where_every_floating_point_warning_is_an_error(kind):
    """In float16 some new weights are subnormal, and here the inputs are, too."""
    with np.errstate(all="raise"):
        for seed in range(5):
            layer = kind.init(40, 50, seed=seed, dtype="f2")
            x = np.full((3, 4, 40), np.finfo(np.float16).tiny / 4, np.float16)
            stream = layer.stream(4)
            assert np.array_equal(stream.run(x), layer(x)[0])
    assert all(np.array_equal(a, kind.init(40, 50, seed=4, dtype="f2").weights[k]) for k, a in layer.weights.items())


# ---------------------------------------------------------------------------------------------------------------- forks
@forks
@threaded
@pytest.mark.meet(1)
@pytest.mark.parametrize("only", ["", "wide GRU: step", "wide LSTM: step"])  # steps that use threads
@pytest.mark.parametrize("threads", [2, 3])
def test_fork_after_calls(threads, only):
    child("fork_after", threads, only)


@forks
@pytest.mark.parametrize("call", ["set_weights", "call", "step", "run"])
def test_fork_inside_a_call(call):
    child("fork_inside", call)


@forks
@threaded
def test_fork_during_calls():
    child("fork_during", 3)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_processes(method):
    child("processes", method)


# ------------------------------------------------------------------------------------------------- signals and threads
@forks
def test_signals(seed):
    child("signals", 100, seed)


def test_one_stream_for_several_threads():
    child("one_stream", 60)


@pytest.mark.slow
@forks
@threaded
def test_fork_during_many_calls():
    child("fork_during", 200, minutes=40)


@pytest.mark.slow
@forks
@pytest.mark.parametrize("case", range(4))
def test_many_signals(case, seed):
    child("signals", 20_000, seed + case, minutes=20)


@pytest.mark.slow
def test_one_stream_for_several_threads_for_long():
    child("one_stream", 20_000, minutes=20)
