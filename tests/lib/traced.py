"""The memory that calls allocate, and what they keep of it."""

from __future__ import annotations

import ctypes
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any


def peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the call's result, and the most bytes that it had allocated at once."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peak_beside(calls: Iterable[Callable[[], Any]]) -> int:
    """Return the most bytes that all the calls together had allocated at once, beside what there was before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for call in calls:
            call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


libc = ctypes.CDLL(None)
MALLINFO = next((name for name in ("mallinfo2", "mallinfo") if hasattr(libc, name)), None)  # glibc alone has them


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t if MALLINFO == "mallinfo2" else ctypes.c_uint)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def in_use() -> tuple[int, int]:
    """Return the bytes that the C library has given out to all threads, and the blocks of Python's own allocator.

    The resident size of a process does not tell what it keeps: that grows by 2 MiB at a time, even in a process that
    sleeps, when Linux makes huge pages of memory that was freed.
    """
    function = getattr(libc, str(MALLINFO))
    function.restype = Mallinfo
    info = function()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()
