"""Threads: how many there are is asked at every call, they sleep soon, and they compute as the calling thread does."""

import ctypes
import os
import platform
import re
import sys

import numpy as np
import pytest
from bits import bits, on_threads, threads_of_call
from cases import arguments
from fresh import python

from blockcell import GRU, LSTM, RNN, _cpu, _team, raw_ops

needs_openmp = pytest.mark.skipif(not _cpu.OPENMP, reason="built without OpenMP: there are no threads")
SIZES = {"T": 6, "B": 40, "I": 33, "H": 70}


@pytest.fixture(params=[False, True], ids=["quiet", "busy"])
def busy(request):
    """Whether calls back off, as they do on a busy machine unless tests/conftest.py forbids it."""
    _team.adapt(request.param)
    yield request.param
    _team.adapt(False)


# -------------------------------------------------------------------------------------------------------- who does what
@needs_openmp
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("sizes", "threads"), [({"B": 1, "I": 400, "H": 50}, 2), ({"B": 7, "I": 109, "H": 156}, 8)])
def test_a_thread_may_have_nothing_to_do(sizes, threads, dtype, busy):
    """There are more panels of r and u than of c; who has none of these must not write where another one reads."""
    inputs = {name: array.astype(dtype) for name, array in arguments("GRUBlockCell", sizes).items()}
    expected = bits(raw_ops.GRUBlockCell(**inputs, num_threads=1))
    with on_threads(threads, busy):
        for _ in range(200):
            assert bits(raw_ops.GRUBlockCell(**inputs)) == expected


@pytest.mark.meet(2)
@needs_openmp
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("kind", ["LSTM", "projected LSTM", "GRU", "GRU reset_after", "RNN"])
def test_h_in_whole_rows(kind, dtype, busy):
    """Threads that share the rows of a sequence store h after a step; one alone does line by line.

    On a busy machine a plan for several threads runs on fewer: forward, backward and in streams.
    """
    layer = {
        "LSTM": lambda: LSTM.init(24, 40, seed=0, dtype=dtype),
        "projected LSTM": lambda: LSTM.init(24, 40, proj_size=33, seed=0, dtype=dtype),
        "GRU": lambda: GRU.init(24, 40, seed=0, dtype=dtype),
        "GRU reset_after": lambda: GRU.init(24, 40, reset_after=True, seed=0, dtype=dtype),
        "RNN": lambda: RNN.init(24, 40, seed=0, dtype=dtype),
    }[kind]()
    x = np.random.default_rng(0).standard_normal((5, 97, 24)).astype(dtype)

    def results():
        y, _, tape = layer.forward(x)
        return bits((layer(x), layer.stream(97).run(x), y, layer.backward(tape, y)))

    with on_threads(1):
        expected = results()
    for threads in (2, 3, 6):
        with on_threads(threads, busy):
            assert results() == expected


# ------------------------------------------------------------------------------------------------------------ how many
@needs_openmp
def test_calls_run_on_one_thread_until_they_have_made_up_for_what_was_lost(set_num_threads):
    set_num_threads(3)
    for _ in range(3):
        assert threads_of_call(3, 10**9) == 3  # tests mean the number they ask for: conftest.py
    _team.adapt(True)
    try:
        for loss in (
            -(10**6),
            10**6,  # no more than was gained
            10**9,  # a hiccup
            -(10**9),  # which pays the debt
            10**6,
            10**6,  # in debt again, and another loss
        ):
            assert threads_of_call(3, loss) == 3
        limited = 0
        while threads_of_call(3, seconds=0.0005) == 1:
            limited += 1
        assert limited
        for loss in (-(10**12), 10**9, 10**9):  # of gains only the last milliseconds count
            assert threads_of_call(3, loss) == 2  # at first
        assert threads_of_call(3) == 1
        set_num_threads(2)  # whoever sets it wants it tried anew
        assert threads_of_call(2) == 2
    finally:
        _team.adapt(False)


@needs_openmp
def test_how_long_calls_back_off(set_num_threads):
    """For 1, 2, 4, 8 and 10 times what was lost, and for a second at most; counted in sleeps of a quarter of that."""
    set_num_threads(2)
    _team.adapt(True)
    try:
        for loss, lasts in [*((0.012, 0.012 * times) for times in (1, 2, 4, 8, 10, 10)), (2, 1)]:  # seconds
            for _ in range(2):
                assert threads_of_call(2, int(loss / 2 * 1e9)) == 2
            limited = 0
            while threads_of_call(2, seconds=lasts / 4) == 1:
                limited += 1
            assert (lasts > 0.1) < limited <= 4  # a busy machine prolongs a short sleep
    finally:
        _team.adapt(False)


def test_never_more_than_planned(set_num_threads):
    set_num_threads(8)
    assert threads_of_call(1) == 1
    assert threads_of_call(_team.get()) == _team.get()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Only Linux moves a thread to a CPU at once")
def test_each_thread_takes_a_cpu_of_its_own_while_there_are_any():
    """Linux may wake both on one CPU, and leave them there."""
    allowed = os.sched_getaffinity(0)
    cpus = _team.take_cpus_for_tests(len(allowed))
    assert sorted(cpus) == sorted(allowed)
    assert os.sched_getaffinity(0) == allowed
    try:
        os.sched_setaffinity(0, {cpus[0]})
        assert _team.take_cpus_for_tests(3) == [cpus[0]] * 3
        assert os.sched_getaffinity(0) == {cpus[0]}
    finally:
        os.sched_setaffinity(0, allowed)


# ------------------------------------------------------------------------------------------------------------ awake
RUNTIME = "import os; import blockcell; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('KMP_BLOCKTIME'))"


@needs_openmp
@pytest.mark.skipif("gcc" not in _cpu.COMPILER, reason="gcc's runtime tells its settings, by these names")
@pytest.mark.parametrize(
    ("users", "count"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_idle_threads_sleep_soon(users, count):
    """What the runtime took, and that nothing of it is left for other programs."""
    unset = dict.fromkeys(["GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"])
    result = python(RUNTIME, OMP_DISPLAY_ENV="VERBOSE", **unset | users)
    assert re.search(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)[1] == count
    assert result.stdout.split() == [users.get("GOMP_SPINCOUNT", "None"), "None"]


# ------------------------------------------------------------------------------------------------------------ alike
CONTROLS = {"flush to zero": 0x8040, "upward": 0x4000}  # of the register mxcsr


def subnormal_arguments(name):
    """Products of inputs and weights are subnormal in float32, and those of gradients and weights."""
    args = arguments(name, SIZES, dtype=np.float32)
    small = [key for key in args if key[0] in "xw" or key in ("h_prev", "h_grad", "d_h")]
    zero = [key for key in args if key[0] == "b"]
    return args | {key: args[key] * np.float32(1e-20) for key in small} | {key: 0 * args[key] for key in zero}


@needs_openmp
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="glibc on x86-64 has a function for it",
)
@pytest.mark.parametrize("how", CONTROLS)
@pytest.mark.parametrize("name", ["LSTMBlockCell", "BlockLSTM", "BlockLSTMGrad", "GRUBlockCell", "GRUBlockCellGrad"])
def test_all_threads_compute_as_the_calling_one_does(name, how, busy):
    """Other libraries have it flush subnormal numbers to zero; the other threads were started before that."""
    args, op, libm = subnormal_arguments(name), getattr(raw_ops, name), ctypes.CDLL("libm.so.6")
    usual, before = op(**args, num_threads=3), (ctypes.c_uint32 * 8)()  # the last of which is mxcsr
    libm.fegetenv(before)
    libm.fesetenv((ctypes.c_uint32 * 8)(*before[:7], before[7] | CONTROLS[how]))
    try:
        one = bits(op(**args, num_threads=1))
        with on_threads(6, busy):
            several = bits(op(**args))
    finally:
        libm.fesetenv(before)
    assert one == several
    assert one != bits(usual), "nothing was subnormal or rounded: the test would show nothing"
    assert bits(op(**args, num_threads=3)) == bits(usual)
