"""The memory that calls allocate."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any


def peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """The call's result, and the most bytes that it had allocated at once."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
