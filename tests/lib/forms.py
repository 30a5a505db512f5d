"""Arrays of the same numbers in other forms: some are converted, others are refused."""

from __future__ import annotations

import numpy as np


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array):
    block = np.empty(array.nbytes + 1, np.uint8)
    moved = block[1:].view(array.dtype).reshape(array.shape) if array.size else array.copy()
    moved[...] = array
    return moved


def strided(array):
    """Return every other element of a larger array, along each axis."""
    every_other = tuple(slice(1, None, 2) for _ in array.shape)
    wide = np.zeros([2 * size + 1 for size in array.shape], array.dtype)
    wide[every_other] = array
    return wide[every_other]


def backwards(array):
    """Return an equal array with a negative stride."""
    return array[::-1].copy()[::-1]


def byte_swapped(array):
    return array.astype(array.dtype.newbyteorder())


def memmap(array, folder):
    mapped = np.memmap(folder / str(len(list(folder.iterdir()))), array.dtype, "w+", shape=array.shape)
    mapped[...] = array
    return mapped


def masked(array):
    """Return an equal array with one element masked."""
    result = np.ma.array(array)
    result[(0,) * array.ndim] = np.ma.masked
    return result


class Subclass(np.ndarray):
    pass


class Protocol:
    """Has nothing but ``__array__``."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Raising:
    """Its conversion to an array fails, as that of a tensor on another device does."""

    def __init__(self, array=None):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("on another device")
