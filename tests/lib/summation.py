"""Factors whose sums show the order of summation, and sums in the promised order."""

from __future__ import annotations

import numpy as np

BLOCK, ROW_BLOCK = 64, 256


def chains(term, start, stop):
    """Yield the sum of each block of terms, from zero in ascending order."""
    for first in range(start, stop, BLOCK):
        chain = 0
        for k in range(first, min(first + BLOCK, stop)):
            chain = chain + term(k)
        yield chain


def product(total, a, w):
    """Return total + a @ w, in the promised order."""
    for chain in chains(lambda k: a[:, k, None] * w[k], 0, len(w)):
        total = total + chain
    return total


def over_rows(term, rows):
    """Return the sum over all rows (t, b), in the promised order."""
    total = 0
    for first in range(0, rows, ROW_BLOCK):
        block = 0
        for chain in chains(term, first, min(first + ROW_BLOCK, rows)):
            block = block + chain
        total = total + block
    return total


def real_of(dtype):
    """Return the dtype in which kernels compute."""
    return np.float64 if dtype == np.float64 else np.float32


def powers(g, shape, low, high):
    """Draw powers of two of either sign."""
    return g.choice([-1.0, 1.0], shape) * 2.0 ** g.integers(low, high, shape)


def mates(g, n):
    """Pair n terms: return whose size each has, its sign, and the few that have no mate."""
    order = g.permutation(n)
    pairs = max(0, n - 4) // 2
    of, sign = np.arange(n), np.ones(n)
    of[order[:pairs]], sign[order[:pairs]] = order[pairs : 2 * pairs], -1
    return of, sign, order[2 * pairs :]


def factors(g, n, of, sign, single, dtype):
    """Draw weights of terms, of which n numbers each add up to about one."""
    terms = powers(g, (len(of), n), 0, np.finfo(real_of(dtype)).nmant - 10)
    terms[single] = powers(g, (len(single), n), -6, -2)
    return terms[of] * sign[:, None]


def sum_in_double(d, factors=1):
    """Return the gradient of a bias, or of peepholes, summed in float64."""
    terms = d.astype(np.float64) * factors
    return over_rows(lambda r: terms[r], len(d)).astype(d.dtype)
