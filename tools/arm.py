"""Compile for aarch64 on another machine, and run tests there, under QEMU's emulation of such a CPU.

    python tools/arm.py
    python tools/arm.py short       what every push runs

Needs Debian, with gcc-aarch64-linux-gnu and qemu-user, and the distribution's version of Python.  The same Python for
arm64, and the libraries below it, are fetched with apt into build/arm, where nothing has to be installed; numpy and
what tests need are PyPI's wheels.  Each file of tests is a process, as many at once as there are CPUs.

Run by CI weekly, with `short` on every push, and by hand.  Takes 40 minutes on two cores, `short` some minutes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial

from children import ROOT, copy_checkout, run_successfully
from emulation import files_of, run_tests, write_python

FOLDER = ROOT / "build" / "arm"
SYSTEM = FOLDER / "system"  # what Debian has in /
PACKAGES = FOLDER / "packages"
CHECKOUT = FOLDER / "checkout"
PYTHON = FOLDER / "python"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL = "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
DEBIAN = ["python3", "libpython3-dev", "libc6-dev", "libgomp1", "libstdc++6"]
PYPI = ["numpy>=2", "onnx>=1.16", "onnxruntime>=1.20", "pytest>=8"]
PYPI += ["hypothesis>=6.100", "mpmath>=1.3", "safetensors>=0.4.5"]
TAGS = [f"manylinux_2_{minor}_aarch64" for minor in (36, 28, 27, 17)] + ["manylinux2014_aarch64"]
# Of streams, quantization and files there are tests among those of the layers.
FOLDERS = ["kernels", "layers"]
SHORT_FILES = ["kernels/test_activations", "kernels/test_formulas", "layers/test_integers", "layers/test_quantized"]
# Dependencies of a package that is already there are not asked for: there is a status of nothing installed.
APT = """
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Debug::NoLocking "true";
"""


run = partial(run_successfully, cwd=FOLDER, hint=f"; needed: {INSTALL}")


def fetch_system() -> None:
    """Fetch Python for arm64 and the libraries below it from Debian, and unpack them into SYSTEM."""
    apt = FOLDER / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    config = apt / "apt.conf"
    config.write_text(APT.format(folder=apt))
    run("apt-get", "-qq", "update", APT_CONFIG=str(config))
    options = ["-y", "-qq", "--no-install-recommends", "--download-only"]
    run("apt-get", *options, "install", *DEBIAN, APT_CONFIG=str(config))
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, SYSTEM)
    if not (SYSTEM / f"usr/bin/python{VERSION}").exists():
        sys.exit(f"this is Python {VERSION}, and the distribution has another one: run it with that")


def fetch_packages() -> None:
    """Install PyPI's wheels for aarch64 of numpy and what tests need into PACKAGES."""
    options = ["--quiet", "--only-binary=:all:", f"--python-version={VERSION}", f"--target={PACKAGES}"]
    run(sys.executable, "-m", "pip", "install", *options, *(f"--platform={tag}" for tag in TAGS), *PYPI)


def build() -> None:
    """Build a copy of the checkout for aarch64; what an earlier build has left there is used."""
    CHECKOUT.mkdir(exist_ok=True)
    for leftover in CHECKOUT.iterdir():
        if leftover.name not in ("build", "blockcell"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    copy_checkout(CHECKOUT)
    library, include = SYSTEM / f"usr/lib/python{VERSION}", SYSTEM / "usr/include"
    data = library / "_sysconfigdata__aarch64-linux-gnu.py"
    (FOLDER / "sysconfig").mkdir(exist_ok=True)
    shutil.copy(data, FOLDER / "sysconfig")
    includes = [include / f"python{VERSION}", include, PACKAGES / "numpy/_core/include"]
    # By the first two variables CPython knows what it builds for.
    run(
        sys.executable, "setup.py", "-q", "build_ext", "--inplace", "egg_info", cwd=CHECKOUT,
        _PYTHON_HOST_PLATFORM="linux-aarch64",
        _PYTHON_SYSCONFIGDATA_NAME=data.stem,
        PYTHONPATH=str(FOLDER / "sysconfig"),
        CC="aarch64-linux-gnu-gcc",
        CFLAGS=" ".join(f"-I{include}" for include in includes),
    )  # fmt: skip


def main(is_short: bool) -> None:
    """Fetch what an earlier run has not fetched, build for aarch64, and run all files of tests there, or a few."""
    start = time.perf_counter()
    os.environ.pop("BLOCKCELL_LEVELS", None)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not SYSTEM.exists():
        fetch_system()
    if not PACKAGES.exists():
        fetch_packages()
    emulator = f'qemu-aarch64 -cpu "${{ARM_CPU:-max}}" -L {SYSTEM}'
    write_python(PYTHON, emulator, SYSTEM / f"usr/bin/python{VERSION}", CHECKOUT, PACKAGES)
    build()
    print(f"built for aarch64 in {time.perf_counter() - start:.0f} s", flush=True)
    files = [f"tests/{name}.py" for name in SHORT_FILES] if is_short else files_of(CHECKOUT, FOLDERS)
    run_tests(CHECKOUT, [(file, PYTHON, file) for file in files])


if __name__ == "__main__":
    main(sys.argv[1:] == ["short"])
