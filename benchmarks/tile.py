"""Measure the register tile alone: multiply-adds a second with 1 to 6 rows, and their share of the ceiling.

Needed by: docs/performance.md

    python benchmarks/tile.py [--levels v3] [--rows 6] [--reduce 512] [--lines 4]

For every CPU level and product: float32 and float64; of columns, as weight gradients have them; float16 weights; and
8-bit weights and rows, each with the instructions that the level's CPUs have.  Panels lie in the second-level cache.
One thread.  The ceiling is that of multiply-adds between registers of the same level and dtype (ceiling.py), of float32
for 8 bits.  Needs a checkout that was built in place, and a C compiler.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from functools import partial

import numpy as np
from ceiling import multiply_adds
from turns import print_heads, print_row, seconds

import blockcell
from blockcell import _integer
from blockcell.optable import REALS
from blockcell.quantization import KERNEL_FORMATS

LEVELS = {"base": ("sse2", "c"), "v3": ("avx2",), "v4": ("avx512_vnni", "avx2")}  # and their integer products
PANELS, MOST_LINES, OPERATIONS = 2, 4, 2e7  # of a call that is timed


def aligned_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Make an array of small whole numbers that starts at a cache line; its products neither overflow nor vanish."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    array = room[-room.ctypes.data % 64 :][:size].view(dtype).reshape(shape)
    array[...] = np.random.default_rng(0).integers(1, 3, shape) if dtype != "uint8" else 1
    return array


def measure_rate(call: Callable[[int], None], operations: float) -> float:
    """Return GF/s of `call(times)`, which does `operations` each time."""
    times = max(1, int(OPERATIONS / operations))
    return operations * times / seconds(lambda: call(times)) / 1e9


def measure_rates(level: str, product: str, rows: list[int], reduce: int, lines: int) -> list[float]:
    """Return GF/s of the tile with each number of rows, over `reduce` values of k; of columns 64, at most TILE_ROWS."""
    dtype = "float64" if product == "float64" else "float32"
    module = importlib.import_module(f"blockcell._for_tests_{REALS[np.dtype(dtype)]}_{level}")
    lanes = 64 // np.dtype(dtype).itemsize
    own_rates = []
    for m in rows:
        if product == "columns" and m > module.TILE_ROWS:  # of which no more are summed at once
            continue
        out, a = aligned_array((4 * m * MOST_LINES * lanes,), dtype), aligned_array((m, reduce), dtype)
        operations = 2.0 * PANELS * m * reduce * lines * lanes
        if product in ("float32", "float64"):
            panels = aligned_array((PANELS * reduce * lines * lanes,), dtype)
            own_rates.append(measure_rate(partial(module.add_products, out, a, panels, lines), operations))
        elif product == "columns":
            columns, panels = aligned_array((64 * 8,), dtype), aligned_array((PANELS * 64 * lines * lanes,), dtype)
            call = partial(module.add_products_of_columns, out, columns, panels, m, lines)
            own_rates.append(measure_rate(call, operations / reduce * 64))
        else:
            scheme, size = ("float16", 2) if product == "float16" else ("int8", 1)
            panels = aligned_array((PANELS * reduce * lines * lanes * size,), "uint8")
            codes = aligned_array((m * (reduce + 256),), dtype)
            scales = aligned_array((lines * lanes,), dtype)
            if scheme == "int8":
                _integer.use(product)
            format_ = KERNEL_FORMATS[scheme]
            call = partial(module.add_quantized_products, format_, out, a, panels, scales, codes, lines)
            own_rates.append(measure_rate(call, operations))
    return own_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=blockcell.build_info()["supported_levels"])
    parser.add_argument("--rows", nargs="+", type=int, choices=range(1, 7), default=range(1, 7), metavar="N")
    parser.add_argument("--reduce", type=int, default=512, metavar="K")
    parser.add_argument("--lines", type=int, default=MOST_LINES, choices=range(1, MOST_LINES + 1))
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = options.rows
    print_heads(["level", "product", "ceiling, GF/s", *(f"{m} row{'s'[: m > 1]}" for m in rows)])
    for level in options.levels:
        integer = [name for name in LEVELS[level] if name in _integer.available_instruction_sets()][:1]
        for product in ["float32", "float64", "columns", "float16", *integer]:
            ceiling = multiply_adds(level, "float64" if product == "float64" else "float32", 1, 1_000_000)
            own_rates = measure_rates(level, product, rows, options.reduce, options.lines)
            cells = [f"{r:.0f} ({100 * r / ceiling:.0f} %)" for r in own_rates] + [""] * (len(rows) - len(own_rates))
            print_row([level, product, f"{ceiling:.0f}", *cells])


if __name__ == "__main__":
    main()
