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
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import _cpu, _integer, _ops, _threads
from ._version import __version__
from .activations import Numbers, numbers
from .installing import not_built
from .optable import REALS, STORAGE

ENGINE = "_engine"
"""The module of a CPU level, compiled for each of REALS: ``_engine_float_v3``, for example."""
# What gcc's and LLVM's OpenMP runtimes read when they are loaded: how long idle threads spin, in iterations and in
# milliseconds.  By default they spin long, and take the CPUs from other work, such as numpy's.
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


class PlannedKernel(NamedTuple):
    """A kernel of a CPU level, and how it runs: what functions of `OP_PLANNERS` and `LAYERS` return."""

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


class LSTMOptions(NamedTuple):
    """The options of an LSTM, in the order of the arguments of `lstm_cell` in ``pyx/_ops.pyx``.

    The clips are off where they are 0.
    """

    P: int = 0
    """0 without a projection."""
    coupled: bool = False
    use_peephole: bool = False
    ifco: bool = False
    forget_bias: float = 0.0
    cell_clip: float = 0.0
    proj_clip: float = 0.0
    activation: Numbers = numbers("tanh")
    recurrent_activation: Numbers = numbers("sigmoid")


OpFunctions = dict[str, tuple[Callable[..., int], ...]]
Planners = dict[str, Callable[..., tuple[object, bytes, int, int, int]]]


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
    return all(importlib.util.find_spec(f"blockcell.{_module_name(name, level)}") for name in REALS.values())


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


def load(level: str) -> tuple[OpFunctions, Planners, Planners]:
    """Return the functions of ops, and what plans the kernels of a CPU level, each as a `PlannedKernel`.

    Returns
    -------
    functions : dict of str to tuple
        The functions of ops by name, each for every one of DTYPES.  They take validated, C-contiguous arrays and write
        results into some of them.  They return how many nanoseconds several threads have cost, for `_team`.
    op_planners : dict of str to callable
        For each of these, a function of T, B, I, H, the number of the dtype, how many threads there may be, and a dict
        of the op's options.
    layers : dict of str to callable
        For each kind of layer, the function that plans its kernels: `plan_kernel` in ``pyx/passes/layer.pxd``.
    """
    ops: Any = _ops  # has no stub
    engines = [_engine(name, level) for name in REALS.values()]
    are_half = [dtype == np.float16 for dtype in REALS]
    planners = [partial(engine.plan_cell, is_half) for engine, is_half in zip(engines, are_half, strict=True)]
    dense_planners = [partial(engine.plan_dense, is_half) for engine, is_half in zip(engines, are_half, strict=True)]
    functions: OpFunctions = {}
    op_planners: Planners = {}
    for name, (function, kind, task) in ops.FUNCTIONS.items():
        functions[name] = tuple(getattr(ops, function)[storage] for storage in STORAGE.values())
        op_planners[name] = partial(_plan_op, planners, ops.CELLS[kind], kind, task)
    layers: Planners = {kind: partial(_plan_cell, planners, cell) for kind, cell in ops.CELLS.items()}
    return functions, op_planners, layers | {"dense": partial(_plan_dense, dense_planners)}


def _module_name(real: str, level: str) -> str:
    return f"{ENGINE}_{real}_{level}"


def _engine(real: str, level: str) -> Any:
    """Import the engine of a level that computes in one type."""
    engine = importlib.import_module(f"blockcell.{_module_name(real, level)}")
    if engine.SOURCE != _cpu.SOURCES[ENGINE]:  # BLOCKCELL_LEVELS has left it out of a build
        raise ImportError(
            f"{engine.__name__} was built from other sources than the package is now: build that level again, or"
            f" delete {engine.__file__}"
        )
    return engine


def _plan_op(planners: list[Any], cell: Callable[..., bytes], kind: str, task: str, *arguments: Any) -> Any:
    """Plan the kernel of an op; `cell` returns the bytes of its cell by its options, in their order."""
    *sizes, number, threads, options = arguments
    default_activations = numbers("tanh"), numbers("sigmoid")
    values = LSTMOptions(**options) if kind == "lstm" else tuple(options.values()) or default_activations
    return planners[number](cell(*values), task, tuple(sizes), threads, 0, False, False)


def _plan_cell(
    planners: list[Any], cell: Callable[..., bytes], task: str, sizes: tuple[int, ...], threads: int, number: int,
    format: int, transposed: bool, options: tuple[Any, ...],
) -> Any:  # fmt: skip
    """Plan a kernel of an LSTM, GRU or RNN layer, which packs its weights unless they are `transposed`; `cell` returns
    the bytes of its cell by its options."""
    return planners[number](cell(*options), task, sizes, threads, format, transposed, not transposed)


def _plan_dense(
    planners: list[Any], task: str, sizes: tuple[int, ...], threads: int, number: int, format: int, transposed: bool,
    options: tuple[int],
) -> Any:  # fmt: skip
    """Plan a kernel of a `Dense`, whose weights are never `transposed`; its option is the activation."""
    return planners[number](options[0], task, sizes, threads, format)


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
    OP_FUNCTIONS: OpFunctions
    OP_PLANNERS: Planners
    LAYERS: Planners
    OP_FUNCTIONS, OP_PLANNERS, LAYERS = load(LEVEL)
TAPE_ARRAYS: dict[str, int] = _engine("float", LEVEL).TAPE_ARRAYS
"""How many arrays [T,B,H] the tape of each kind of cell has beside h."""
