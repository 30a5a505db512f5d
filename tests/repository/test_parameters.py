"""Functions of pyx have few parameters: who reads a call can tell what each argument is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEW = 8
MANY = 10  # of which there are at most MOST functions, with the kernels of ops
MOST = 20
MORE = {  # functions with more than FEW parameters, beside the kernels of ops, which take an op's arrays
    "_layers.pyx": {"forward_layer"},
    "_ops.pyx": {"lstm_cell"},
    "_tensors.pyx": {"__init__", "__call__", "run_direction"},
    "_training.pyx": {"adam_step"},
    "cells/lstm.pxd": {"cell_grad", "lstm_grad_line"},
    "product/panels.pxd": {"add_quantized_product"},
    "product/quantized.pxd": {"add_float16_product", "run_float16_lines", "run_float16_rows", "run_float16_tile"},
    "product/tile.pxd": {
        "extend_chains",
        "extend_chains_inline",
        "extend_chains_of_rows",
        "run_lines",
        "run_row_panels",
        "run_span",
        "run_tile",
    },
}


def parameters(source: str) -> list[tuple[str, list[str]]]:
    """Return the names of the functions of a Cython source, each with its parameters but self."""
    functions = []
    for match in re.finditer(r"^ *(?:cdef|cpdef|def)\b[^\n=(]*?(\w+)\(", source, re.MULTILINE):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        # No default and no type has a comma outside of brackets.
        text = re.sub(r"\[[^]]*\]|\([^)]*\)", "", source[match.end() : end - 1])
        functions.append((match[1], [p for p in map(str.strip, text.split(",")) if p not in ("", "self", "*", "/")]))
    return functions


def test_parameters() -> None:
    """At most FEW, but for MORE and the kernels of ops; and there is no more of MORE than it needs."""
    more: dict[str, set[str]] = {}
    many = 0
    for path in sorted([*ROOT.glob("pyx/**/*.pyx"), *ROOT.glob("pyx/**/*.pxd")]):
        name = path.relative_to(ROOT / "pyx").as_posix()
        for function, names in parameters(path.read_text()):
            many += len(names) >= MANY
            if len(names) > FEW and not any(parameter.startswith(("const number ", "number ")) for parameter in names):
                more.setdefault(name, set()).add(function)
    assert more == MORE
    assert many <= MOST


def test_parameters_are_counted() -> None:
    source = "cdef int f(\n    int[3] a, real *b, bint c=True\n) noexcept:\n    pass\n\ndef g(self, /, x, y=(1, 2)):"
    assert parameters(source) == [("f", ["int a", "real *b", "bint c=True"]), ("g", ["x", "y="])]
