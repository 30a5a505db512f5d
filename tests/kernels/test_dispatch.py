"""The CPU level is picked at import and never silently; the number of threads follows its rules."""

import importlib.metadata
import os

import numpy as np
import pytest
from fresh import printed

import blockcell
from blockcell import _cpu, _kernels, _threads
from blockcell.optable import OPS

LEVELS = _kernels.available_levels()
THREADS = "import blockcell; print(blockcell.get_num_threads())"


@pytest.fixture(autouse=True)
def _default_threads():
    yield
    blockcell.set_num_threads(None)


def test_every_level_can_be_chosen():
    assert [_kernels._pick_level(level) for level in LEVELS] == list(LEVELS)
    assert _kernels._pick_level(None) == _kernels._pick_level("") == LEVELS[-1]
    assert printed("import blockcell; print(blockcell.build_info()['level'])", BLOCKCELL_LEVEL=LEVELS[0]) == LEVELS[0]


@pytest.mark.parametrize("level", ["v9", "V3", "base,v3", " "])
def test_unknown_level(level):
    with pytest.raises(ImportError, match=f"^BLOCKCELL_LEVEL={level}: this build .* can use {', '.join(LEVELS)}$"):
        _kernels._pick_level(level)


def test_level_beyond_the_cpu(monkeypatch):
    """On an older CPU a level that was built is refused as well, and not taken by default."""
    monkeypatch.setattr(_cpu, "supported_levels", lambda: LEVELS[:1])
    assert _kernels._pick_level(None) == LEVELS[0]
    for level in {"v3", "v4"} - {LEVELS[0]}:
        with pytest.raises(ImportError, match=f"BLOCKCELL_LEVEL={level}: .* can use {LEVELS[0]}$"):
            _kernels._pick_level(level)


def test_nothing_built(monkeypatch):
    monkeypatch.setattr(_kernels, "ENGINE", "_no_such_module")
    with pytest.raises(ImportError, match="without native code"):
        _kernels._pick_level(None)


def test_nothing_built_for_this_cpu(monkeypatch):
    """As when it was built on a newer machine, for the best level of that one."""
    monkeypatch.setattr(_kernels, "_is_built", lambda level: level == "v4")
    monkeypatch.setattr(_cpu, "supported_levels", lambda: ("base", "v3"))
    with pytest.raises(ImportError, match="built for the CPU level v4, and this CPU runs base, v3: build it"):
        _kernels._pick_level(None)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_have_the_same_kernels(level):
    engines = _kernels.load(level)
    assert engines[0] is engines[2] is not engines[1], "float16 is computed as float32"
    for op in OPS.values():
        assert _kernels.bind(op, engines)


def test_a_library_of_other_sources_is_refused(monkeypatch):
    """One that BLOCKCELL_LEVELS has left out of a build, in a checkout, may expect other arguments."""
    monkeypatch.setitem(_cpu.SOURCES, "_engine", "0123456789abcdef")
    with pytest.raises(ImportError, match=r"_engine_float_base was built from other sources .* build that level again"):
        _kernels.load("base")


def test_levels_are_those_built(monkeypatch):
    monkeypatch.setattr(_cpu, "supported_levels", lambda: ("base",))
    info = blockcell.build_info()
    assert info["supported_levels"] == ("base",) and set(info["levels"]) >= set(LEVELS)


def test_build_info():
    info = blockcell.build_info()
    assert info["version"] == blockcell.__version__ == importlib.metadata.version("blockcell")
    assert info["level"] in info["levels"]
    assert [level for level in info["levels"] if level in info["supported_levels"]] == list(LEVELS)
    assert info["num_threads"] == blockcell.get_num_threads()
    assert isinstance(info["openmp"], bool)
    assert any(name in info["compiler"].lower() for name in ("gcc", "clang"))
    assert ("openmp" in info["flags"]) == info["openmp"]
    assert "fast-math" not in info["flags"]
    assert info["numpy"] == np.__version__
    assert info["cython"][0].isdigit()
    assert info["cpu"]
    assert 4096 <= info["caches"]["L1"] <= info["caches"]["L2"] <= info["caches"]["L3"]


@pytest.mark.parametrize("value", [1, 2, np.int64(2), np.array(2), True])
def test_num_threads(value):
    assert _threads.num_threads(value) == (int(value) if _cpu.OPENMP else 1)


def test_num_threads_none_is_the_default():
    blockcell.set_num_threads(3)
    assert _threads.num_threads(None) == blockcell.get_num_threads() == (3 if _cpu.OPENMP else 1)
    blockcell.set_num_threads(None)
    assert str(_threads.num_threads(None)) == printed(THREADS)


@pytest.mark.parametrize("check", [_threads.num_threads, blockcell.set_num_threads])
def test_num_threads_refuses(check):
    for value in (1.0, "2", [1], np.float32(1), np.array([1])):
        with pytest.raises(TypeError, match="num_threads must be an integer or None, got "):
            check(value)
    for value in (0, -1, -(2**70)):
        with pytest.raises(ValueError, match=f"num_threads must be at least 1, got {value}"):
            check(value)


def test_more_threads_than_could_be_started():
    assert 1 <= _threads.num_threads(2**70) <= max(64, os.cpu_count())


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), (" 5 ", 5), ("2,4", 2), ("999999", 999999)])
def test_omp_num_threads(variable, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert _threads._threads_of_this_process() == threads
    assert printed(THREADS, OMP_NUM_THREADS=variable) == str(_threads.num_threads(threads))


@pytest.mark.parametrize("variable", ["", "0", "-2", "many", ",3", "1.5"])
def test_malformed_omp_num_threads_is_ignored(variable, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpus = _threads._threads_of_this_process()
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert _threads._threads_of_this_process() == cpus


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_cpus_of_this_process():
    one_cpu = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    assert printed(one_cpu + THREADS, OMP_NUM_THREADS=None) == "1"
    assert 1 <= int(printed(THREADS, OMP_NUM_THREADS=None)) <= len(os.sched_getaffinity(0))


def test_prefetching_as_asked():
    assert [_cpu.prefetching(asked) for asked in ("0", "1", "", None)] == [False, True, True, True]
    with pytest.raises(ImportError, match="BLOCKCELL_PREFETCH is 'yes'; expected 0 or 1"):
        _cpu.prefetching("yes")
    assert printed("import blockcell; print(blockcell.build_info()['prefetching'])", BLOCKCELL_PREFETCH="0") == "False"
