"""Progress bars on a terminal, if rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and of how much."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Show bars on standard error, one for each activity; none without a terminal or rich."""
    is_shown = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    bars: Any = None
    tasks: dict[str, Any] = {}

    def tell(activity: str, done: int, total: int) -> None:
        nonlocal bars
        if not is_shown:
            return
        if bars is None:
            from rich.console import Console
            from rich.progress import Progress as Bars

            bars = Bars(console=Console(stderr=True), transient=True)
            bars.start()
        if activity not in tasks:
            tasks[activity] = bars.add_task(activity, total=total)
        bars.update(tasks[activity], completed=done)

    try:
        yield tell
    finally:
        if bars is not None:
            bars.stop()
