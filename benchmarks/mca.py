"""What the tile reaches on cores of aarch64, by LLVM's models of them: nothing is measured, and no such core is needed.

    python tests/lib/arm.py build       # or the path of a module that was built for aarch64
    python benchmarks/mca.py [MODULE]

Takes the loops of `tile_rows` out of the compiled module and has llvm-mca simulate each, with all loads from the
first-level cache.  A share is that of the rate at which the same model executes multiply-adds alone.  Needs LLVM 19.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

CORES = ("cortex-a55", "cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-v2")
FUNCTIONS = {
    "float32": "__pyx_fuse_0__pyx_f_4tile_tile_rows",
    "float64": "__pyx_fuse_1__pyx_f_4tile_tile_rows",
}
BUILT = Path(__file__).resolve().parents[1] / "build" / "arm" / "checkout" / "blockcell"
ROUNDS = 300
PEAK = [f"fmla v{k}.4s, v30.4s, v31.s[0]" for k in range(24)]  # none waits for another one


def disassembled(module: Path, function: str) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    command = ["llvm-objdump-19", "-d", "--no-show-raw-insn", f"--disassemble-symbols={function}", str(module)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ *([0-9a-f]+): +\t?(.*?)\s*$", output, re.MULTILINE)
    if not found:
        raise SystemExit(f"{module} has no {function}; was it stripped?")
    return [(int(address, 16), text.replace("\t", " ")) for address, text in found]


def loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The innermost ones that have multiply-adds, without the branch at their ends."""
    places = {address: place for place, (address, _) in enumerate(code)}
    for end, (address, text) in enumerate(code):
        branch = re.match(r"(?:b\.|cbn?z|tbn?z).* 0x([0-9a-f]+)", text)
        start = places.get(int(branch[1], 16)) if branch else None
        if start is not None and int(branch[1], 16) < address:  # type: ignore[index]
            body = [text for _, text in code[start:end]]
            if any("fmla" in text for text in body) and not any(re.match(r"b\b|b\.|cb|tb|ret", text) for text in body):
                yield body


def cycles(body: list[str], core: str) -> float:
    """For each round of a loop."""
    program = "\n".join(["begin:", *body, "b.ne begin"])
    command = ["llvm-mca-19", "-march=aarch64", f"-mcpu={core}", f"-iterations={ROUNDS}"]
    output = subprocess.run(command, input=program, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"^Total Cycles: +(\d+)", output, re.MULTILINE)[1]) / ROUNDS  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, nargs="?", default=next(BUILT.glob("_dense_base*.so"), None))
    parser.add_argument("--dtype", choices=FUNCTIONS, default="float32")
    options = parser.parse_args()
    if options.module is None:
        parser.error("nothing is built for aarch64 in build/arm")
    peaks = {core: len(PEAK) / cycles(PEAK, core) for core in CORES}
    scalar = "d" if options.dtype == "float64" else "s"
    tiles: dict[tuple[int, int], list[list[str]]] = {}
    for body in loops(disassembled(options.module, FUNCTIONS[options.dtype])):
        rows = sum(bool(re.match(rf"ldr {scalar}\d", text)) for text in body) or 1
        multiplied = sum("fmla" in text for text in body)
        tiles.setdefault((rows, multiplied // rows), []).append(body)
    print("| rows by vectors | instructions | spilled | " + " | ".join(CORES) + " |")
    print("|---" * (3 + len(CORES)) + "|")
    for (rows, vectors), bodies in sorted(tiles.items()):
        body = max(bodies, key=len)
        spilled = sum("[sp" in text for text in body)
        shares = [f"{rows * vectors / cycles(body, core) / peaks[core]:.0%}" for core in CORES]
        print(f"| {rows} by {vectors} | {len(body) + 1} | {spilled} | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    main()
