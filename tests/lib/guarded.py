"""Arrays beside protected pages."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
NONE, READ = 0, 1  # what mprotect allows with a page
SIDES = ["begins", "ends"]  # where the array touches a protected page
libc = ctypes.CDLL(None, use_errno=True)


def protect(address, pages, allowed):
    if pages and libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), allowed):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(values, side, writable=False):
    """Return a copy of the array beside a protected page."""
    pages = -(-values.nbytes // PAGE) or 1
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = PAGE if side == "begins" else (pages + 1) * PAGE - values.nbytes
    array = np.ndarray(values.shape, values.dtype, memory, at)
    array[...] = values
    protect(address, 1, NONE)
    protect(address + (pages + 1) * PAGE, 1, NONE)
    if not writable:
        protect(address + PAGE, pages, READ)
    return array
