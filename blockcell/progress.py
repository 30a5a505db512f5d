"""Progress bars on a terminal, if rich is installed."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int | None], None]
"""Is told what is being done, how much of it is done, and of how much, None where nobody knows."""


@contextmanager
def progress(after: float = 0.0) -> Iterator[Progress]:
    """Show bars on standard error, one for each activity, once `after` seconds have passed.

    There are none without a terminal or rich; nor in other threads and in the processes of a pool, which would all
    write to one terminal.
    """
    terminal, begin = sys.stderr.isatty(), time.monotonic()
    bars: Any = None
    tasks: dict[str, Any] = {}

    def tell(activity: str, done: int, total: int | None) -> None:
        nonlocal bars, terminal
        if not terminal or time.monotonic() < begin + after:
            return
        if bars is None:
            if not _alone() or not importlib.util.find_spec("rich"):
                terminal = False
                return
            from rich.console import Console
            from rich.progress import Progress as Bars

            bars = Bars(console=Console(stderr=True), transient=True)
            bars.start()
        if activity not in tasks:
            tasks[activity] = bars.add_task(activity, total=total)
        bars.update(
            tasks[activity], completed=done, description=activity if total is not None else f"{activity} {done:,}"
        )

    try:
        yield tell
    finally:
        if bars is not None:
            bars.stop()


def _alone() -> bool:
    """Return whether this is the main thread of a process that is not one of a pool."""
    from multiprocessing import parent_process  # takes long to import

    return threading.current_thread() is threading.main_thread() and parent_process() is None
