"""Compare results and states, nested in any way, bit for bit; take them apart; make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

import blockcell
from blockcell import _cpu, _team

# This CPU's, and others.
CACHES = [_cpu.machine()["caches"], (1, 1, 1), (1 << 40, 1 << 40, 1), (1, 1 << 40, 1 << 40)]
# Of groups and members; the first one is that of the least cost.
GRIDS = [(0, 0), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 5), (5, 1), (3, 5), (8, 8)]


def bits(value: Any) -> Any:
    """Return the value with dtype, shape, bytes and writeability in place of each array, which == compares."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(bits, value))
    return value


def same(a: Any, b: Any) -> bool:
    return bits(a) == bits(b)  # type: ignore[no-any-return]


def leaves(nested: Any) -> list[np.ndarray]:
    """Return the arrays of a state or of results."""
    return [nested] if isinstance(nested, np.ndarray) else [array for part in nested for array in leaves(part)]


def like(state: Any, function: Callable[[np.ndarray], Any]) -> Any:
    """Return a state of the same form, made array by array."""
    if isinstance(state, np.ndarray):
        return function(state)
    parts = [like(part, function) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def threads_of_call(planned: int, loss: int = 0, seconds: float = 0) -> int:
    """Run a kernel that is planned for so many threads and has lost so many nanoseconds by them.

    Returns on how many threads it ran.
    """
    threads = []

    def kernel(ready: int) -> int:
        threads.append(ready)
        time.sleep(seconds)
        return loss

    _team.run_for_tests(kernel, planned)
    return threads[0]


def back_off() -> None:
    """Let calls run on half as many threads as are set, as after losses of time, until threads are set again.

    A second of calls ends that, too.  Whoever calls this undoes it by `_team.adapt(False)` (tests/conftest.py).
    """
    _team.adapt(True)  # and forget earlier losses
    threads = threads_of_call(blockcell.get_num_threads(), 10**9)
    threads_of_call(threads, 10**9)
    assert threads_of_call(threads) == max(threads // 2, 1)


@contextmanager
def on_threads(n: int, busy: bool = False) -> Iterator[None]:
    """Set the number of threads, and set it back afterwards; with ``busy``, calls back off."""
    before = blockcell.get_num_threads()
    blockcell.set_num_threads(n)
    if busy:
        back_off()
    try:
        yield
    finally:
        blockcell.set_num_threads(before)


@contextmanager
def with_machine(**changes: Any) -> Iterator[None]:
    """Tell plans made in here this about the machine (pyx/schedule/machine.pxd); an op must be bound in here."""
    before = _cpu.machine()
    _cpu.use_machine(**changes)
    try:
        yield
    finally:
        _cpu.use_machine(**before)


def use_grid(groups: int, members: int) -> None:
    """Divide all work from now on among so many groups of so many threads, as far as it can be."""
    _cpu.use_machine(groups=groups, members=members)


def with_grid(groups: int, members: int) -> AbstractContextManager[None]:
    return with_machine(groups=groups, members=members)


def zeros(layer: Any, batch: int) -> Any:
    """Return the state that a stream begins with."""
    return layer(np.empty((0, batch, layer.input_size), layer.dtype))[1]
