"""The compiled kernels of one CPU level, picked at import.

Each kernel source is compiled for several levels of CPU: ``base``, ``v3`` and ``v4``, the x86-64 levels of the psABI
(plain x86-64, AVX2, AVX-512), or ``base`` alone on other machines.  The highest level that was built and that this CPU
runs is taken, or the one that the environment variable BLOCKCELL_LEVEL names.
"""

import contextlib
import importlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _cpu, _integer, _team, _threads
from ._version import __version__
from .installing import not_built
from .optable import STORAGE

MODULES = ("_lstm", "_gru", "_gru_reset_after", "_rnn", "_dense")
# What gcc's and LLVM's OpenMP runtimes read when they are loaded: how long idle threads spin, in iterations and in
# milliseconds.  By default they spin long, and take the CPUs from other work, such as numpy's.
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


class Kernel(Protocol):
    """Takes validated, C-contiguous arrays of one dtype and writes its results into some of them.

    Returns how many nanoseconds it lost by using several threads, for `_team`.
    """

    def __call__(self, *args: Any) -> int: ...


class PlannedKernel(NamedTuple):
    """A kernel of a layer, and how it runs: what functions of `LAYERS` return."""

    kernel: object
    """A capsule with the address of the function."""
    parameters: bytes
    """Its plan, as a struct of the kernel's module."""
    size: int
    """Bytes of the workspace; of the packed weights, if packing them is the task."""
    threads: int
    """How many of the threads it uses."""
    members: int
    """How many of these share the hidden units of a row."""


Kernels = dict[str, tuple[Kernel, ...]]
Requirements = dict[str, Callable[..., tuple[int, int, int]]]
Layers = dict[str, Callable[..., tuple[object, bytes, int, int, int]]]


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, as it does in any process that has freed an array of 32 MiB.

    Otherwise it returns the free top of the heap to the system once that is twice the largest block freed so far.
    Gates, tape and results of one call together are several times the largest of them, so each call would have to map
    all of its pages again, which may take as long as the computation.
    """
    np.empty((32 << 20) - (8 << 10), np.uint8)  # the largest block that counts; it is never touched


def available_levels() -> tuple[str, ...]:
    """Return the CPU levels that were built and that this CPU runs, from the oldest."""
    return tuple(level for level in _cpu.supported_levels() if _is_built(level))


def _built_levels() -> tuple[str, ...]:
    return tuple(level for level in _cpu.LEVELS if _is_built(level))


def _is_built(level: str) -> bool:
    return all(importlib.util.find_spec(f"blockcell.{module}_{level}") for module in MODULES)


def _pick_level(requested_level: str | None) -> str:
    possible = available_levels()
    if not possible and (built := _built_levels()):
        raise ImportError(
            f"blockcell was built for the CPU level {', '.join(built)}, and this CPU runs"
            f" {', '.join(_cpu.supported_levels())}: build it again here, with `pip install -e .`"
        )
    if not possible:
        raise ImportError(not_built(os.path.dirname(__file__)))
    if not requested_level:
        return possible[-1]
    if requested_level not in possible:
        raise ImportError(f"BLOCKCELL_LEVEL={requested_level}: this build on this CPU can use {', '.join(possible)}")
    return requested_level


@contextlib.contextmanager
def briefly_awake() -> Iterator[None]:
    """An OpenMP runtime loaded in here lets idle threads sleep soon, unless the user has set what they do."""
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", *BRIEFLY)):
        yield
        return
    os.environ.update(BRIEFLY)
    try:
        yield
    finally:
        for name in BRIEFLY:
            del os.environ[name]


def load(level: str) -> tuple[Kernels, Requirements, Layers]:
    """Return what a CPU level has compiled.

    Returns
    -------
    kernels : dict of str to tuple
        The kernels of ops by name, each for every one of DTYPES.
    requirements : dict of str to callable
        For each of these, a function of the sizes: the bytes of its scratch, threads, and members of a group.
    layers : dict of str to callable
        For each kind of layer, the function that plans its kernels: `plan_layer` in ``pyx/passes/layer.pxd``.
    """
    kernels: Kernels = {}
    requirements: Requirements = {}
    layers: Layers = {}
    for module in MODULES:
        names = vars(importlib.import_module(f"blockcell.{module}_{level}"))
        if names["SOURCE"] != _cpu.SOURCES[module]:  # BLOCKCELL_LEVELS has left it out of a build
            raise ImportError(
                f"blockcell.{module}_{level} was built from other sources than the package is now: build that level"
                f" again, or delete {names['__file__']}"
            )
        suffix = "_requirements"
        requirements |= {name.removesuffix(suffix): names[name] for name in names if name.endswith(suffix)}
        layers |= {name.removesuffix("_layer"): names[name] for name in names if name.endswith("_layer")}
        kernels |= {
            name: tuple(names[name][storage] for storage in STORAGE.values()) for name in names if name in requirements
        }
    return kernels, requirements, layers


def tape_arrays(level: str) -> dict[str, int]:
    """Return how many arrays [T,B,H] the tape of each kind of cell has beside h: the table in ``pyx/cells/table.h``."""
    modules = {module[1:]: importlib.import_module(f"blockcell.{module}_{level}") for module in MODULES}
    return {kind: module.TAPE_ARRAYS for kind, module in modules.items() if hasattr(module, "TAPE_ARRAYS")}


def compute(name: str, number: int, sizes: tuple[int, ...], threads: int, arguments: tuple[Any, ...]) -> None:
    """Run a kernel of the level in use that takes scratch, on as many of the threads as it can use and as there are.

    `number` is that of the dtype, `sizes` T, B, I, H and the bytes of a number as it is computed.
    """
    _team.compute(KERNELS[name][number], REQUIREMENTS[name], sizes, threads, arguments)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def build_info() -> dict[str, Any]:
    """Describe what runs here: versions, CPU level, threads, and how the kernels were compiled.

    Returns
    -------
    dict
        ``version``; ``level``, the CPU level in use; ``levels``, those that were built; ``supported_levels``, those
        that this CPU runs (BLOCKCELL_LEVEL may name what is in both); ``openmp``, whether calls can use several
        threads; ``num_threads``, how many they use by default; ``compiler``, ``flags``, ``cython``, ``numpy`` and
        ``cpu``; ``caches``, bytes of the data caches of each level, by which work is divided (usual sizes where the
        processor does not tell); ``prefetching``, whether kernels fetch weights ahead that outgrow the second-level
        cache; ``integer_products``, the instructions by which layers quantized to int8 multiply.
    """
    return {
        "version": __version__,
        "level": LEVEL,
        "levels": _built_levels(),
        "supported_levels": _cpu.supported_levels(),
        "openmp": _cpu.OPENMP,
        "num_threads": _threads.get_num_threads(),
        "compiler": _cpu.COMPILER,
        "flags": _cpu.FLAGS,
        "cython": _cpu.CYTHON,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "caches": dict(_cpu.CACHES),
        "prefetching": bool(_cpu.machine()["prefetching"]),
        "integer_products": _integer.in_use(),
    }


_keep_freed_memory()
LEVEL = _pick_level(os.environ.get("BLOCKCELL_LEVEL"))
with briefly_awake():
    KERNELS, REQUIREMENTS, LAYERS = load(LEVEL)
TAPE_ARRAYS = tape_arrays(LEVEL)
