"""The inner loops of the tile, as gcc compiled them: all sums in registers, and none moved from one to another; and
the equations of the cells, in which gcc must inline sigmoid and tanh.

Nothing but time would tell: with six moves for eight multiply-adds, as gcc 12 compiled four rows once, an AVX2 CPU took
a fifth longer.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import blockcell
from blockcell import _cpu

# Sums of each span, where a tile has several spans: about ten keep a CPU busy.  At base one row has fewer.
LEAST_SUMS = {"base": 4, "v3": 8, "v4": 8, "aarch64": 8}
EQUATION = re.compile(
    r"<\w*_f_5cells_\w+_(cell_state|cell_output|cell_grad|gates|candidate|candidate_grad|gates_grad|new_state"
    r"|pre_activation_grads|activate)(\.constprop\.\d+)?>:"
)
# Of the LSTM, the GRU and the GRU that resets after the product, with default activations and with any; of the RNN and
# of the dense layer.
EQUATIONS = 2 * (3 + 4 + 2) + 1 + 1
LINE = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
# Under emulation, plain `objdump` is the host's and cannot read these modules.
OBJDUMP = shutil.which(f"{platform.machine()}-linux-gnu-objdump") or shutil.which("objdump")
ON_X86 = ["base", "v3", "v4"]
TILE_HEADER = Path(__file__).parents[2] / "pyx" / "product" / "tile.h"


def read_table(level: str) -> tuple[dict[str, int], dict[tuple[int, int], list[int]]]:
    """Read the numbers of a level from tile.h, and from SPANS the spans for each number of rows and of lines."""
    text = re.search(rf"/\* {level} \*/\n(.*?)^\}};", TILE_HEADER.read_text(), re.DOTALL | re.MULTILINE)[1]
    table = re.findall(r"^    \{(.*)\},$", text, re.MULTILINE)
    spans = {
        (rows, lines): [int(length) for length in cell.split(",")]
        for rows, line in enumerate(table, 1)
        for lines, cell in enumerate(re.findall(r"\{(.*?)\}", line), 1)
    }
    return {name: int(number) for name, number in re.findall(r"([A-Z_]+) = (\d+)", text)}, spans


def inner_loops(instructions: list[tuple[int, str, str]]):
    """The instructions between a jump backwards and its target, where no other such jump lies between them."""
    places = {address: k for k, (address, _, _) in enumerate(instructions)}
    loops = []
    for k, (address, name, operands) in enumerate(instructions):
        target = int(operands.split()[0], 16) if name.startswith("j") and re.match(r"[0-9a-f]+ <", operands) else None
        if target is not None and target <= address and target in places:
            loops.append((places[target], k + 1))
    for first, end in loops:
        if not any(first <= other and last <= end and (other, last) != (first, end) for other, last in loops):
            yield instructions[first:end]


def functions_of_tile(text: str) -> dict[tuple[int, str], list[tuple[int, str, str]]]:
    """Return the instructions of each function that has tiles, by their number of rows and the function's name."""
    instructions: dict[tuple[int, str], list[tuple[int, str, str]]] = {}
    current: list[tuple[int, str, str]] = []
    for line in text.splitlines():
        head = re.match(r"[0-9a-f]+ <(\w*?(?:fuse_(\d)\w*4tile_run_fixed_rows|4tile_run_four_by_three)\S*)>:", line)
        if re.match(r"[0-9a-f]+ <", line):
            current = instructions.setdefault((int(head[2] or 3) + 1, head[1]), []) if head else []
        elif match := LINE.match(line):
            current.append((int(match[1], 16), match[2], match[3]))
    return instructions


def disassembly(module: str, level: str) -> str:
    spec = importlib.util.find_spec(f"blockcell.{module}_{level}")
    if spec is None:
        pytest.skip("not built")
    if OBJDUMP is None or "gcc" not in blockcell.build_info()["compiler"]:
        pytest.skip("needs objdump, and is about gcc's code")
    text = subprocess.check_output([OBJDUMP, "-d", "--no-show-raw-insn", spec.origin], text=True)
    if "_4tile_" not in text and "_4plan_" not in text:
        pytest.skip("without symbols, as in wheels")
    return text


@pytest.mark.parametrize("level", ON_X86)
@pytest.mark.parametrize("storage", ["float", "double"])
def test_equations_call_no_default_activation(storage, level):
    called: dict[str, set[str]] = {}  # by an equation
    current: set[str] = set()
    for line in disassembly(f"_engine_{storage}", level).splitlines():
        if re.match(r"[0-9a-f]+ <", line):
            current = called.setdefault(line, set()) if EQUATION.search(line) else set()
        elif call := re.search(r"\b(?:call\w*|bl)\s+[0-9a-f]+ <(\w+)", line):
            current.add(call[1])
    assert len(called) == EQUATIONS
    for function, names in called.items():
        others = {name for name in names if "_f_" in name and not re.search("activations_(activate|slope)", name)}
        assert not others, function


@pytest.mark.parametrize("level", LEAST_SUMS)
def test_spans_of_tile(level):
    numbers, spans = read_table(level)
    vectors = 64 // numbers["VECTOR_BYTES"]
    assert list(spans) == [(rows, lines) for rows in range(1, numbers["ROWS"] + 1) for lines in range(1, 5)]
    for (rows, lines), lengths in spans.items():
        shown = f"{rows} rows, {lines} lines: {lengths}"
        assert sum(lengths) == lines * vectors, shown
        assert numbers["SUB_LINES"] == 1 or len(lengths) == 1, shown
        for i, length in enumerate(lengths):
            start = sum(lengths[:i]) % vectors  # in a line
            assert start == 0 or (length == lengths[i - 1] and start == length % vectors), shown
            assert rows * length <= numbers["ROWS"] * numbers["SUB_LINES"] * vectors, shown  # ACCUMULATORS
            assert len(lengths) == 1 or rows * length >= LEAST_SUMS[level], shown


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86's instructions")
@pytest.mark.parametrize("level", ON_X86)
@pytest.mark.parametrize("storage", ["float", "double"])
def test_loops_of_tile(storage, level):
    text = disassembly(f"_engine_{storage}", level)
    sums: set[tuple[int, int]] = set()  # rows, and the multiply-adds in a loop of theirs
    starts: list[int] = []  # where loops begin in a cache line; gcc aligns nearly all
    for (rows, function), instructions in functions_of_tile(text).items():
        for loop in inner_loops(instructions):
            products = [name for _, name, _ in loop if re.match(r"vfmadd\w*p[sd]|mulp[sd]", name)]
            if not products:
                continue
            sums.add((rows, len(products)))
            shown = f"{function}, {len(products)} products:\n" + "\n".join(f"{n} {o}" for _, n, o in loop)
            starts.append(loop[0][0] % 64)
            assert not [o for _, _, o in loop if "(%rsp" in o or "(%rbp" in o], f"operands on the stack: {shown}"
            moves = [o for _, n, o in loop if re.match(r"v?mov[au]p[sd]|v?movdq", n) and "(" not in o]
            # Without AVX a product is written over one of its factors, which has to be copied while it is needed.
            assert len(moves) <= (len(products) // 2 if level == "base" else 0), f"moves: {shown}"
    assert sums == {(rows, rows * length) for (rows, _), spans in read_table(level)[1].items() for length in spans}
    assert sum(start != 0 for start in starts) <= len(starts) // 16, starts


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86's instructions")
def test_what_every_cpu_runs_has_no_avx():
    """Header functions are static: a linker may take no copy of them that another level has compiled."""
    levels = tuple(f"_{level}." for level in _cpu.LEVELS if level != "base")
    files = [
        path
        for path in sorted(Path(blockcell.__file__).parent.glob("_*.so"))
        if not any(m in path.name for m in levels)
    ]
    names = {path.name.partition(".")[0] for path in files}
    assert {"_ops", "_args", "_layers"} <= names
    if OBJDUMP is None:
        pytest.skip("needs objdump")
    for path in files:
        text = subprocess.check_output([OBJDUMP, "-d", "--no-show-raw-insn", path], text=True)
        if not path.name.startswith("_integer."):  # which has the integer products of all CPUs, and picks one
            assert not re.search(r"%[yz]mm\d", text), path.name
