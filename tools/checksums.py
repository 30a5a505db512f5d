"""Record checksums of results, and compare them bit for bit: ``python tools/checksums.py record|compare FILE``.

For a change that must keep every bit of every result: record with the package as it was, compare with it as it is now.
`compare` lists the cases that differ or are missing, and then fails.  Whichever blockcell is imported is run, so that
PYTHONPATH may lead to another checkout.  The cases are the calls that workspaces.py draws, but PyTorch's: ops, layers,
streams, quantized layers and kernels of PyTorch's operators at every CPU level, with sizes, machines and numbers of
threads for which plans take many forms.

Run by hand, before and after such a change.  Takes about half an hour, with `--cases 2` to record few a quarter of a
minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workspaces import KINDS, draw_calls, run_on_machine

import blockcell
from blockcell import _team

SEED, CASES = 20240229, 400  # calls of each op and layer at a level


def checksum(value: np.ndarray) -> str:
    """Return the CRC-32 of shape, dtype and bytes of an array, where every NaN is the same one."""
    crc = zlib.crc32(f"{value.dtype.str} {value.shape}".encode())
    if np.issubdtype(value.dtype, np.floating):
        value = np.where(np.isnan(value), value.dtype.type(np.nan), value)
    return f"{zlib.crc32(np.ascontiguousarray(value).tobytes(), crc):08x}"


def level_checksums(cases: int) -> dict[str, list[str]]:
    """Return the checksums of the results of each case, for the CPU level that is imported."""
    _team.adapt(False)  # else a busy machine has one thread at work where several are meant
    level, checksums = blockcell.build_info()["level"], {}
    for number in range(cases):
        for case, call, machine, threads in draw_calls(SEED, number, [kind for kind in KINDS if kind != "PyTorch"]):
            results = run_on_machine(call, machine, threads)
            checksums[f"{level} {number} {case} on {threads} threads"] = [checksum(array) for array in results]
    return checksums


def all_checksums(cases: int) -> dict[str, Any]:
    """Return the checksums of every level, each computed by an interpreter of its own, and what built them."""
    info = blockcell.build_info()
    levels = [level for level in info["levels"] if level in info["supported_levels"]]
    build = {key: info[key] for key in ("version", "numpy", "cpu", "compiler", "flags")}
    record = {"seed": SEED, "cases": cases, "levels": levels, **build, "checksums": {}}
    for level in levels:
        command = [sys.executable, __file__, "level", "--cases", str(cases)]
        environment = os.environ | {"BLOCKCELL_LEVEL": level}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        record["checksums"] |= json.loads(output)
    return record


def differences(recorded: dict[str, list[str]], computed: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line for each case whose checksums differ or that one side lacks."""
    for case in sorted({*recorded, *computed}):
        if case not in computed:
            yield f"{case}: recorded, but not found here"
        elif case not in recorded:
            yield f"{case}: found here, but not recorded"
        elif recorded[case] != computed[case]:
            pairs = itertools.zip_longest(recorded[case], computed[case])
            yield f"{case}: other bits in results {[k for k, (old, new) in enumerate(pairs) if old != new]}"


def main() -> None:
    """Record or compare checksums, or print those of one level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "level"], help="level prints those of one level")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--cases", type=int, default=CASES, help="calls of each op and layer at a level, to record")
    arguments = parser.parse_args()
    if arguments.action == "level":
        print(json.dumps(level_checksums(arguments.cases)))
        return
    print(f"blockcell of {Path(blockcell.__file__).parent}")
    if arguments.action == "record":
        computed = all_checksums(arguments.cases)
        arguments.file.write_text(json.dumps(computed, indent=0))
        print(f"{len(computed['checksums'])} cases recorded")
        return
    recorded = json.loads(arguments.file.read_text())
    computed = all_checksums(recorded["cases"])
    for key in recorded:
        if key != "checksums" and recorded[key] != computed[key]:
            print(f"{key} was {recorded[key]} and is {computed[key]}")
    lines = [*differences(recorded["checksums"], computed["checksums"])]
    print(*lines, f"{len(lines)} of {len(recorded['checksums'])} cases differ", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
