"""The compiled kernels of one CPU level, picked at import, and the number of threads that they run on.

Each kernel source is compiled for several levels of CPU: ``base``, ``v3`` and ``v4``, the x86-64 levels of the psABI
(plain x86-64, AVX2, AVX-512), or ``base`` alone on other machines.  The highest level that was built and that this CPU
runs is taken, or the one that the environment variable BLOCKCELL_LEVEL names.
"""

import importlib
import importlib.util
import operator
import os
import platform
from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex

import numpy as np

from . import _cpu

MODULES = ("_lstm", "_gru")
STORAGE = ("float", "double", "half")  # Cython's names of float32, float64 and float16


class Kernel(Protocol):
    """Takes validated, C-contiguous arrays of one dtype and fills those of its results."""

    def __call__(self, *args: Any) -> None: ...


Kernels = dict[str, tuple[Kernel, Kernel, Kernel]]
Work = dict[str, Callable[..., int]]


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, as it does in any process that has freed an array of 32 MiB.

    Else it gives what is free at the top of the heap back to the system as soon as that is twice the largest block
    freed so far.  Gates, tape and results of one call are several times the largest of them: each call would map all of
    its pages anew, which may take as long as computing what goes there.
    """
    np.empty((32 << 20) - (8 << 10), np.uint8)  # the largest block that counts; it is never touched


def available_levels() -> tuple[str, ...]:
    """The CPU levels that were built and that this CPU runs, from the oldest."""
    return tuple(level for level in _cpu.supported_levels() if _is_built(level))


def _is_built(level: str) -> bool:
    return all(importlib.util.find_spec(f"blockcell.{module}_{level}") for module in MODULES)


def _pick_level(wanted: str | None) -> str:
    possible = available_levels()
    if not possible:
        raise ImportError("blockcell's kernels are not built: run `pip install -e .` in the checkout")
    if not wanted:
        return possible[-1]
    if wanted not in possible:
        raise ImportError(f"BLOCKCELL_LEVEL={wanted}: this build on this CPU can use {', '.join(possible)}")
    return wanted


def load(level: str) -> tuple[Kernels, Work]:
    """The kernels of a level by name, for each of float32, float64 and float16, and how much scratch each needs."""
    kernels: Kernels = {}
    work: Work = {}
    for module in MODULES:
        names = vars(importlib.import_module(f"blockcell.{module}_{level}"))
        for name in [name.removesuffix("_work") for name in names if name.endswith("_work")]:
            float32, float64, float16 = (names[name][storage] for storage in STORAGE)
            kernels[name] = float32, float64, float16
            work[name] = names[f"{name}_work"]
    return kernels, work


def _threads_of_this_process() -> int:
    """OMP_NUM_THREADS, or else the CPUs that this process may use."""
    try:
        asked = int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])  # a list is for nested teams; we have none
        if asked >= 1:
            return asked
    except ValueError:
        pass  # unset, or not a number
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # a container's quota
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or its quota is "max"
        return cpus


# More threads than CPUs are allowed, but a number that the system cannot start would make the OpenMP runtime abort.
_most_threads = max(64, os.cpu_count() or 1) if _cpu.OPENMP else 1
_threads_at_import = min(_threads_of_this_process(), _most_threads)
_threads = _threads_at_import


def num_threads(value: SupportsIndex | None) -> int:
    """How many threads a call may use that was given ``num_threads=value``."""
    if value is None:
        return _threads
    try:
        threads = operator.index(value)
    except TypeError:
        raise TypeError(f"num_threads must be an integer or None, got {value!r}") from None
    if threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {threads}")
    return min(threads, _most_threads)


def set_num_threads(n: SupportsIndex | None) -> None:
    """Set how many threads a call uses whose ``num_threads`` is None.

    Results do not depend on it.

    Parameters
    ----------
    n : int or None
        At least 1; small calls use fewer.  None: the environment variable OMP_NUM_THREADS, or else the CPUs that this
        process may use, both as they were when blockcell was imported.

    Raises
    ------
    TypeError
        `n` is not an integer.
    ValueError
        `n` is less than 1.
    """
    global _threads
    _threads = min(_threads_at_import, _most_threads) if n is None else num_threads(n)


def get_num_threads() -> int:
    """How many threads a call may use whose ``num_threads`` is None; always 1 in a forked child."""
    return _threads


def _after_fork_in_child() -> None:
    """A forked child has the OpenMP runtime's state but not its threads: waiting for those would hang."""
    global _threads, _most_threads
    _threads = _most_threads = 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def build_info() -> dict[str, Any]:
    """What runs here: versions, CPU level, threads, and how the kernels were compiled.

    Returns
    -------
    dict
        ``version``; ``level``, the CPU level in use; ``levels``, those that BLOCKCELL_LEVEL may name;
        ``supported_levels``, those that this CPU runs, built or not; ``openmp``, whether calls can use several threads;
        ``num_threads``, how many they use by default; ``compiler``, ``flags``, ``cython``, ``numpy`` and ``cpu``.
    """
    from . import __version__

    return {
        "version": __version__,
        "level": LEVEL,
        "levels": available_levels(),
        "supported_levels": _cpu.supported_levels(),
        "openmp": _cpu.OPENMP,
        "num_threads": get_num_threads(),
        "compiler": _cpu.COMPILER,
        "flags": _cpu.FLAGS,
        "cython": _cpu.CYTHON,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
    }


_keep_freed_memory()
LEVEL = _pick_level(os.environ.get("BLOCKCELL_LEVEL"))
KERNELS, WORK = load(LEVEL)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
