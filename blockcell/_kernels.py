"""The compiled kernels of one CPU level, picked at import: `bind` gives an op its own, `plan_layer` those of a layer.

Each kernel source is compiled for several levels of CPU: ``base``, ``v3`` and ``v4``, the x86-64 levels of the psABI
(plain x86-64, AVX2, AVX-512), or ``base`` alone on other machines.  The highest level that was built and that this CPU
runs is taken, or the one that the environment variable BLOCKCELL_LEVEL names.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _cpu, _integer, _ops, _threads
from ._args import OpRunner
from ._version import __version__
from .activations import Numbers, numbers
from .argument_reader import ArgumentReader
from .installing import not_built
from .op_arguments import Converter
from .optable import DTYPES, REALS, STORAGE, Op

compiled_ops: Any = _ops  # has no stub
ENGINE = "_engine"
"""The module of a CPU level, compiled for each of REALS: ``_engine_float_v3``, for example."""
# What gcc's and LLVM's OpenMP runtimes read when they are loaded: how long idle threads spin, in iterations and in
# milliseconds.  By default they spin long, and take the CPUs from other work, such as numpy's.
BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


class Kernel(NamedTuple):
    """The kernel of an op for arrays of one dtype."""

    function: Callable[..., int]
    """Takes validated, C-contiguous arrays and writes its results into some of them.

    It returns how many nanoseconds it lost by using several threads, for `_team`.
    """
    engine: object
    """A capsule with the functions of a CPU level, which it takes as an argument."""


class PlannedKernel(NamedTuple):
    """A kernel of a layer, and how it runs: what `plan_layer` returns."""

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
    """The options of an LSTM, in the order of the arguments of `lstm_layer` in ``pyx/_ops.pyx``.

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


Engines = tuple[Any, ...]
"""The modules of a CPU level that compute each of DTYPES; float32 and float16 have one."""


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


def load(level: str) -> Engines:
    """Import the engines of a CPU level."""
    return tuple(_engine(name, level) for name in REALS.values())


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


def bind(op: Op, engines: Engines | None = None) -> OpRunner:
    """Return a runner of the op with its kernels, one for each of DTYPES, on `engines`: those in use unless given."""
    engines = engines or ENGINES
    functions = [getattr(compiled_ops, op.kernel)[storage] for storage in STORAGE.values()]
    kernels = tuple(Kernel(function, engine.ENGINE) for function, engine in zip(functions, engines, strict=True))
    kind, task = compiled_ops.REQUIREMENTS[op.kernel]

    def requirements(T: int, B: int, I: int, H: int, number: int, threads: int) -> Any:  # noqa: E741
        return engines[number].requirements(kind, task, (T, B, I, H), threads)

    reader = ArgumentReader(op.name)
    return OpRunner(op, kernels, requirements, parameter_positions(op, functions[0]), reader, Converter(op, reader))


def parameter_positions(op: Op, kernel: Callable[..., int]) -> dict[str, int]:
    """Return the position of each of the kernel's parameters by name; the names must be those of the op's row."""
    names = [tensor.parameter for tensor in op.inputs if tensor.read] + [tensor.parameter for tensor in op.outputs]
    names += [attribute.name for attribute in op.attributes] + [name for name, _ in op.constants]
    names += ["seq_len_max"] * op.sequence + ["scratch", "engine", "threads", "members", "ready"]
    parameters = list(inspect.signature(kernel).parameters)
    unknown, missing = Counter(parameters) - Counter(names), Counter(names) - Counter(parameters)
    if unknown or missing:
        wrong = [f"takes {name}, which it is not given" for name in unknown]
        wrong += [f"does not take {name}, which it is given" for name in missing]
        raise TypeError(f"{op.name}: its kernel {op.kernel} {'; '.join(wrong)}")
    return {name: position for position, name in enumerate(parameters)}


def plan_layer(
    kind: str, task: str, sizes: tuple[int, ...], threads: int, number: int, format: int, transposed: bool,
    options: tuple[Any, ...],
) -> Any:  # fmt: skip
    """Plan a kernel of a layer: `plan_layer` and `plan_dense` in ``pyx/passes/layer.pxd``.

    `kind` is "dense", or one of ``LAYERS`` in ``pyx/_ops.pyx``, whose function takes the layer's `options`. `number` is
    that of the dtype. The weights of a dense layer are never `transposed`; its option is the activation.
    """
    engine, is_half = ENGINES[number], DTYPES[number] == np.float16
    if kind == "dense":
        return engine.plan_dense(is_half, *options, task, sizes, threads, format)
    return engine.plan_layer(is_half, compiled_ops.LAYERS[kind](*options), task, sizes, threads, format, transposed)


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
    ENGINES = load(LEVEL)
TAPE_ARRAYS: dict[str, int] = ENGINES[0].TAPE_ARRAYS
"""How many arrays [T,B,H] the tape of each kind of cell has beside h."""
