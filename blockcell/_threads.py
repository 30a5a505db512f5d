"""The number of threads that calls run on, as users set it; `pyx/_team.pyx` says at each call how many there are."""

import math
import operator
import os
import re
from collections.abc import Callable
from typing import SupportsIndex

from . import _cpu, _team


def _quota(root: str = "/") -> float:
    """Return how many CPUs' time control groups, as of a container, leave this process: infinity without a limit."""
    limits = [math.inf]
    for line in _words(root, "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            mount, names = "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount, names = f"sys/fs/cgroup/{controllers}", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folders = [folder for folder in group.split("/") if folder]
        for n in range(len(folders) + 1):  # a container may not see its group, but only those of its own, in `mount`
            numbers = [word for name in names for word in _words(root, mount, *folders[:n], name)]
            if len(numbers) == 2 and numbers[0].isdigit() and int(numbers[1]) > 0:  # no limit: "max", or -1
                limits.append(int(numbers[0]) / int(numbers[1]))
    return min(limits)


def _words(*path: str) -> list[str]:
    """Return the words of a file; none where there is no such file."""
    try:
        with open(os.path.join(*path)) as file:
            return file.read().split()
    except (OSError, ValueError):
        return []


def _threads_of_this_process(root: str = "/") -> int:
    """Return OMP_NUM_THREADS, or else the CPUs that this process may use, at most its quota, rounded up."""
    try:
        asked = int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])  # a list is for nested teams; we have none
        if asked >= 1:
            return asked
    except ValueError:
        pass  # unset, or not a number
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cpus, _quota(root))))


def _stack_size() -> int:
    """Return the stack size of the OpenMP runtime's threads in bytes, 0 unless the user has set it (in K without a
    unit)."""
    asked = next((os.environ[name] for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE") if name in os.environ), "")
    match = re.fullmatch(r"\s*(\d{1,15})\s*([BKMG]?)\s*", asked.upper())
    return int(match[1]) << 10 * "BKMG".index(match[2] or "K") if match else 0


# More threads than CPUs are allowed, within reason.
_most_threads = max(64, os.cpu_count() or 1) if _cpu.OPENMP else 1
_threads_at_import = min(_threads_of_this_process(), _most_threads)


def num_threads(value: SupportsIndex | None) -> int:
    """Return how many threads a call with ``num_threads=value`` may plan with."""
    if value is None:
        return _team.get()
    try:
        threads = operator.index(value)
    except TypeError:
        raise TypeError(f"num_threads must be an integer or None, got {value!r}") from None
    if threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {threads}")
    return min(threads, _most_threads)


def set_num_threads(n: SupportsIndex | None) -> None:
    """Set how many threads a call uses whose ``num_threads`` is None.

    Results do not depend on it.  Small calls use fewer, and all calls do while other work occupies the CPUs.

    Parameters
    ----------
    n : int or None
        At least 1.  None: the environment variable OMP_NUM_THREADS, or else the CPUs that this process may use, by its
        affinity and by the quota of its control group (that of a container), rounded up; all as they were when
        blockcell was imported.

    Raises
    ------
    TypeError
        `n` is not an integer.
    ValueError
        `n` is less than 1.

    Warns
    -----
    RuntimeWarning
        Not here, but by the call that finds that so many threads cannot be started; it and those after it use fewer.
    """
    _team.set(min(_threads_at_import, _most_threads) if n is None else num_threads(n), _most_threads)


def get_num_threads() -> int:
    """Return how many threads a call may use whose ``num_threads`` is None; always 1 in a forked child."""
    return _team.get()


def in_forked_child(renew: Callable[[], None]) -> Callable[[], None]:
    """Have this called in each forked child: of its parent's threads it has only the one that forked.

    A lock that another one held would never be released.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return renew


@in_forked_child
def _use_one() -> None:
    """Use one thread: a forked child has the OpenMP runtime's state, not its threads, and would wait for ever."""
    global _most_threads
    _most_threads = 1
    _team.set(1, 1)


set_num_threads(None)
_team.expect_stacks(_stack_size())
