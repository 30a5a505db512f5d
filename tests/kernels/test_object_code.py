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

import pytest

import blockcell

ROWS = {"one_row": 1, "two_rows": 2, "three_rows": 3, "four_rows": 4, "four_by_three": 4, "five_rows": 5, "six_rows": 6}
# multiply-adds in the loops of each number of rows: its chains, of which ten keep any CPU busy
CHAINS = {
    "base": {1: {4}, 2: {8}, 3: {12}},
    "v3": {1: {2, 4, 6, 8}, 2: {4, 8, 12}, 3: {6, 9, 12}, 4: {8, 12}, 5: {10}, 6: {12}},
    "v4": {rows: {rows, 2 * rows, 3 * rows, 4 * rows} for rows in range(1, 7)},
}
EQUATION = re.compile(
    r"<\w*_f_5cells_\w+_(cell_state|cell_output|cell_grad|gates|candidate|candidate_grad|gates_grad|new_state"
    r"|pre_activation_grads|activate)>:"
)
EQUATIONS = 3 + 4 + 2 + 1 + 1  # of the LSTM, the GRU, the GRU that resets after the product, the RNN, the dense layer
LINE = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
# Under emulation, plain `objdump` is the host's and cannot read these modules.
OBJDUMP = shutil.which(f"{platform.machine()}-linux-gnu-objdump") or shutil.which("objdump")
pytestmark = [
    pytest.mark.skipif(OBJDUMP is None, reason="needs objdump"),
    pytest.mark.skipif("gcc" not in blockcell.build_info()["compiler"], reason="about gcc's code"),
]


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


def functions_of_tile(text: str) -> dict[str, list[tuple[int, str, str]]]:
    instructions: dict[str, list[tuple[int, str, str]]] = {}
    current: list[tuple[int, str, str]] = []
    for line in text.splitlines():
        head = re.match(r"[0-9a-f]+ <(\w*4tile_(\w+?)(?:\.\S+)?)>:", line)
        if re.match(r"[0-9a-f]+ <", line):
            current = instructions.setdefault(head[1], []) if head and head[2] in ROWS else []
        elif match := LINE.match(line):
            current.append((int(match[1], 16), match[2], match[3]))
    return instructions


def disassembly(module: str, level: str) -> str:
    spec = importlib.util.find_spec(f"blockcell.{module}_{level}")
    if spec is None:
        pytest.skip("not built")
    text = subprocess.check_output([OBJDUMP, "-d", "--no-show-raw-insn", spec.origin], text=True)
    if "_4tile_" not in text and "_4plan_" not in text:
        pytest.skip("without symbols, as in wheels")
    return text


@pytest.mark.parametrize("level", CHAINS)
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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86's instructions")
@pytest.mark.parametrize("level", CHAINS)
@pytest.mark.parametrize("storage", ["float", "double"])
def test_loops_of_tile(storage, level):
    text = disassembly(f"_engine_{storage}", level)
    chains: dict[int, set[int]] = {}
    for function, instructions in functions_of_tile(text).items():
        rows = ROWS[re.search(r"4tile_([a-z_]+)", function)[1]]
        for loop in inner_loops(instructions):
            products = [name for _, name, _ in loop if re.match(r"vfmadd\w*p[sd]|mulp[sd]", name)]
            if not products:
                continue
            chains.setdefault(rows, set()).add(len(products))
            shown = f"{function}, {len(products)} products:\n" + "\n".join(f"{n} {o}" for _, n, o in loop)
            assert not [o for _, _, o in loop if "(%rsp" in o or "(%rbp" in o], f"operands on the stack: {shown}"
            moves = [o for _, n, o in loop if re.match(r"v?mov[au]p[sd]|v?movdq", n) and "(" not in o]
            # Without AVX a product is written over one of its factors, which has to be copied while it is needed.
            assert len(moves) <= (len(products) // 2 if level == "base" else 0), f"moves: {shown}"
    assert chains == CHAINS[level]
