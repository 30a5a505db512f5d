"""Grids of threads, which share rows and hidden units: which one is planned, and that all give the same bits."""

import itertools
import os

import numpy as np
import pytest
from bits import GRIDS, same, threads_of_call, with_grid, with_machine
from cases import arguments
from fresh import printed
from kernel_cases import DTYPES, LEVELS, run, sizes_of
from layer_cases import STREAMED

import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack, _cpu, _kernels, _team
from blockcell._kernels import bind
from blockcell._threads import _quota, _threads_of_this_process
from blockcell.optable import OPS

needs_openmp = pytest.mark.skipif(not _cpu.OPENMP, reason="built without OpenMP: there are no threads")
I, H = 9, 70  # noqa: E741


# ------------------------------------------------------------------------------------------------------------ same bits
@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", STREAMED)
def test_all_grids_give_the_same_bits(name, dtype, set_num_threads):
    """Forward and back, with rows that end or start anew, also where groups or members have nothing to do."""
    rng = np.random.default_rng(0)
    set_num_threads(64)
    for T, B in ((1, 5), (1, 40), (7, 13)):
        x = rng.standard_normal((T, B, I)).astype(dtype)
        marks = [{}, {"lengths": rng.integers(0, T + 1, B)}]
        if name != "Dense":
            marks.append({"lengths": rng.integers(0, T + 1, B), "reset": rng.random((T, B)) < 0.3})
        for options in marks:
            expected = None
            for grid in [(1, 1), *GRIDS[1:], (64, 1), (1, 64)]:
                layer = STREAMED[name](I, H, dtype)
                with with_grid(*grid):
                    y, last, tape = layer.forward(x, **options)
                    results = y, last, layer.backward(tape, np.ones_like(y))
                expected = results if expected is None else expected
                assert same(results, expected), (grid, T, B, options)


@pytest.mark.meet(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_all_grids_of_ops_give_the_same_bits(name, dtype, level):
    """With weights that a single step packs before, or block by block, or in each part."""
    for sizes in [(1, 20, 30, 50), (1, 70, 12, 40), (1, 3, 200, 50), (4, 9, 20, 70)]:
        args = arguments(name, sizes_of(*sizes), dtype=DTYPES[dtype])
        expected = run(name, args, level, num_threads=1)
        for grid in GRIDS[1:]:
            with with_grid(*grid):
                call = bind(OPS[name], _kernels.load(level)).run
                assert same(run(name, args, num_threads=8, call=call), expected), (sizes, grid)


@pytest.mark.meet(2)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("scheme", ["float16", "int8"])
@pytest.mark.parametrize("name", STREAMED)
def test_all_grids_read_quantized_weights(name, scheme, set_num_threads):
    rng = np.random.default_rng(1)
    set_num_threads(64)
    layer = STREAMED[name](I, H, "float32")
    for T, B in ((1, 5), (4, 30)):
        x, lengths = rng.standard_normal((T, B, I)).astype(np.float32), rng.integers(0, T + 1, B)
        with with_grid(1, 1):
            expected = layer.quantize(scheme)(x, lengths=lengths)
        for grid in GRIDS[1:]:
            with with_grid(*grid):
                assert same(layer.quantize(scheme)(x, lengths=lengths), expected), grid


@needs_openmp
@pytest.mark.parametrize("ready", range(1, 17))
def test_fewer_threads_than_planned_make_a_smaller_grid(ready):
    """Of 4 x 4 on five threads there are four groups of one."""
    layer, x = STREAMED["LSTM"](I, H, "float32"), np.ones((3, 9, I), np.float32)
    expected = layer(x)
    with with_grid(4, 4):
        layer = STREAMED["LSTM"](I, H, "float32")
        layer(x)
        _team.set(ready, ready)
        try:
            assert same(layer(x), expected)
        finally:
            blockcell.set_num_threads(None)


FEWER = """
import sys
import numpy as np
sys.path.insert(0, {lib!r})
from bits import with_grid
from blockcell import GRU, LSTM, _team, set_num_threads

_team.adapt(False)
set_num_threads(16)
x = np.random.default_rng(0).standard_normal((5, 13, 9)).astype(np.float32)
for make in (lambda: LSTM.init(9, 70, seed=1), lambda: GRU.init(9, 70, seed=1)):
    found = set()
    for grid in ((1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (4, 4)):
        with with_grid(*grid):
            layer = make()
            y, _, tape = layer.forward(x, lengths=np.arange(13) % 6)
            back = layer.backward(tape, y)
        found.add((y.tobytes(), back[0].tobytes(), *(a.tobytes() for a in back[2].values())))
    assert len(found) == 1
print("same")
"""


@needs_openmp
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_the_runtime_may_start_fewer_threads_than_it_is_asked_for(limit):
    """Then some take several parts, and all of them meet at each barrier."""
    lib = os.path.join(os.path.dirname(__file__), "..", "lib")
    assert printed(FEWER.format(lib=os.path.abspath(lib)), OMP_THREAD_LIMIT=str(limit)) == "same"


# ------------------------------------------------------------------------------------------------------------ the plan
def planned(layer, T, B, threads):
    return layer.plan(T, B, threads)[""].forward


@pytest.mark.parametrize("H", [0, 1, 16, 40, 256, 1024])
@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_a_plan_has_no_more_parts_than_there_are(kind, H):
    layer = kind.init(8, H, seed=0)
    for T, B, threads in itertools.product((1, 2, 50), (1, 3, 64, 500), (1, 2, 3, 5, 8, 16, 48, 64, 100)):
        for groups, members in layer.plan(T, B, threads)[""]:
            assert 1 <= groups <= B, (T, B, threads)
            assert 1 <= members <= max(1, -(-H // 16)), (T, B, threads)
            assert groups * members <= threads


def test_plan_has_an_entry_for_each_layer_that_has_weights(set_num_threads):
    cell, head = LSTM.init(256, 256, seed=0), Dense.init(512, 3, seed=0)
    stack = Stack([Bidirectional(cell, cell), head])
    plans = stack.plan(20, 4, 16)
    assert [*plans] == ["0.fw", "0.bw", "1"] == [*dict.fromkeys(k.rpartition(".")[0] for k in stack.weights)]
    assert plans["0.fw"] == plans["0.bw"] == cell.plan(20, 4, 16)[""]
    assert plans["1"] == head.plan(20, 4, 16)[""]
    set_num_threads(16)
    assert stack.plan(20, 4) == plans != stack.plan(20, 4, 1)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 1), ValueError, "LSTM.plan: T is 0; expected at least 1"),
        ((1, -2), ValueError, "LSTM.plan: B is -2; expected at least 1"),
        ((1.5, 1), TypeError, "LSTM.plan: T "),
        ((1, 1, 0), ValueError, "num_threads must be at least 1, got 0"),
    ],
)
def test_plan_refuses(sizes, error, message):
    with pytest.raises(error, match=message):
        LSTM.init(3, 4, seed=0).plan(*sizes)


def test_a_small_call_has_one_thread():
    """Waking another one takes longer."""
    for T, B, H in ((1, 1, 64), (1, 16, 32), (20, 1, 32)):
        assert LSTM.init(H, H, seed=0).plan(T, B, 64) == {"": ((1, 1), (1, 1))}, (T, B, H)


def test_many_cores_share_rows_and_units():
    """A layer that is too narrow for all of them, and a batch that has too few rows for each."""
    groups, members = planned(LSTM.init(256, 256, seed=0), 20, 16, 64)
    assert groups > 1 and members > 1 and groups * members >= 32
    assert planned(LSTM.init(64, 64, seed=0), 20, 64, 64) == (64, 1)
    groups, members = planned(LSTM.init(1024, 1024, seed=0), 20, 1, 64)
    assert groups == 1 and members >= 24


def test_no_call_waits_for_more_threads_than_pay():
    """Where barriers take longer, groups have fewer members."""
    layer = LSTM.init(128, 128, seed=0)
    cheap = planned(layer, 20, 1, 64)
    with with_machine(barrier=100 * _cpu.machine()["barrier"]):
        assert planned(layer, 20, 1, 64).members < cheap.members


# ------------------------------------------------------------------------------------------------------ after losses
def test_after_losses_calls_run_on_half_as_many_threads(set_num_threads):
    loss = 30_000_000  # nanoseconds: longer than what may pass between two of these calls
    set_num_threads(16)
    _team.adapt(True)
    try:
        for expected in (8, 4, 2, 1):
            assert [threads_of_call(16, loss) for _ in range(2)] == [2 * expected] * 2
            assert threads_of_call(16, -1) == expected
        for expected in (2, 4, 8, 16):  # and on twice as many when time is up
            for _ in range(1000):
                threads = threads_of_call(16, -1, seconds=0.01)
                if threads == expected:
                    break
            assert threads == expected
    finally:
        _team.adapt(False)


# ---------------------------------------------------------------------------------------------------------- containers
GROUPS = {
    "none": ({}, None),
    "no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "two CPUs": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "rounded up": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
    "less than one": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
    "a group's own": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
    "the smallest above it": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
        },
        1,
    ),
    "a group that the container does not see": (
        {"proc/self/cgroup": "0::/system.slice/docker-1.scope\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        3,
    ),
    "version 1 without a limit": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "many 0\n"}, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_containers_quota_counts(case, tmp_path, monkeypatch):
    files, expected = GROUPS[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert _threads_of_this_process(str(tmp_path)) == (expected or 64)
    assert (_quota(str(tmp_path)) == float("inf")) == (expected is None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)  # both count
    assert _threads_of_this_process(str(tmp_path)) == 1
