"""Run tests on other CPUs of x86-64 than this one, which QEMU emulates.

    python tools/cpus.py
    python tools/cpus.py short      what every push runs

Needs QEMU 7.2 or later, of Debian's qemu-user; it is this Python, with all of its packages, that is emulated, and this
checkout as it was built.  There are two CPUs: one without AVX, which runs the CPU level base, and one with AVX2, which
runs base and v3.  Neither has AVX-512 or VNNI, with which onnxruntime multiplies integers in another way; QEMU emulates
no CPU that has them.  Each file of tests is a process, as many at once as there are CPUs.

Run by CI weekly, with `short` on every push, and by hand.  Takes about two hours on two cores, `short` ten minutes.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from children import ROOT, run
from emulation import files_of, run_tests, write_python
from numpy._core._multiarray_umath import __cpu_dispatch__

FOLDER = ROOT / "build" / "cpus"
NEEDED = "QEMU 7.2 or later, as earlier ones have no AVX2: apt-get install qemu-user, on Debian 12 or Ubuntu 24.04"


@dataclass
class Cpu:
    """A CPU that QEMU emulates, and what blockcell and numpy find there."""

    model: str  # QEMU's name, without what it does not emulate and would warn of
    levels: str
    integer_products: str
    features: str  # that numpy finds, of FEATURES


CPUS = {
    "Nehalem": Cpu("Nehalem", "base", "sse2", ""),
    "Haswell-noTSX": Cpu("Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid", "base v3", "avx2", "AVX2"),
}
FEATURES = "AVX2 AVX512F AVX512VNNI"
CHECK = """
import sys
from numpy._core._multiarray_umath import __cpu_features__
import blockcell
info = blockcell.build_info()
print(*info["supported_levels"], "/", info["level"], "/", info["integer_products"], "/", end=" ")
print(*[name for name in sys.argv[1].split() if __cpu_features__[name]])
"""
CHILD = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
FOLDERS = ["kernels", "layers", "onnx"]
SHORT_FILES = ["layers/test_integers", "onnx/test_onnx_export_integers", "onnx/test_onnx_export_quantized"]
SHORT_FILES += ["onnx/test_onnx_export_sessions", "convert/test_convert_onnx_graphs", "kernels/test_formulas"]
# QEMU 7.2 reads a whole vector where an instruction of AVX2 or FMA (vmaskmovps, vfmadd231ss) reads a part of it, and so
# beyond the end of memory, where the process ends: in OpenVINO, in numpy unless that is told to do without AVX2, and in
# the kernels where arrays end before a protected page.
OPTIONS = ("-k", "not OpenVINO and not (guards and ends and not base)")
NUMPY_AVX2 = {"AVX2", "FMA3", "X86_V3"} & {*__cpu_dispatch__}  # by the names of this version of numpy


def emulated_python(name: str) -> Path:
    """Return a Python on this CPU, in an environment that has the packages of this one."""
    folder = FOLDER / name
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), folder)
    library = folder / "lib"
    library.unlink(missing_ok=True)
    library.symlink_to(Path(sys.prefix, "lib").resolve())
    python = folder / "bin" / "python"
    emulator = f"qemu-x86_64 -cpu {CPUS[name].model}"
    if "AVX2" in CPUS[name].features:
        emulator = f"env NPY_DISABLE_CPU_FEATURES='{' '.join(sorted(NUMPY_AVX2))}' {emulator}"
    write_python(python, emulator, Path(sys.executable).resolve(), ROOT)
    return python


def check_cpu(name: str, python: Path) -> None:
    """Exit unless blockcell and numpy find this CPU, in a process and in one that it starts."""
    cpu = CPUS[name]
    expected = f"{cpu.levels} / {cpu.levels.split()[-1]} / {cpu.integer_products} / {cpu.features}".strip()
    for command in ([python, "-c", CHECK, FEATURES], [python, "-c", CHILD, "-c", CHECK, FEATURES]):
        result = run(*command)
        if result.stdout.strip() != expected:
            sys.exit(f"expected of {name}: {expected}; found: {result.stdout}\nneeded: {NEEDED}")
    print(f"{name}: {expected}", flush=True)


def main(is_short: bool) -> None:
    """Check both CPUs, and run all files of tests on each, or a few."""
    if sysconfig.get_platform() != "linux-x86_64":
        sys.exit("QEMU runs this Python as it is, so that must be one for Linux on x86-64")
    os.environ.pop("BLOCKCELL_LEVEL", None)
    pythons = {name: emulated_python(name) for name in CPUS}
    for name, python in pythons.items():
        check_cpu(name, python)
    files = [f"tests/{name}.py" for name in SHORT_FILES]
    if not is_short:
        files = [*dict.fromkeys([*files_of(ROOT, FOLDERS), *files])]
    jobs = [(f"{name}: {file}", python, file) for file in files for name, python in pythons.items()]
    run_tests(ROOT, jobs, OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1:] == ["short"])
