"""The package on a Python without a GIL: built in a copy of the checkout and a new environment, and tried there.

    python3.13t tests/freethreading.py     (or `make test-freethreaded PYTHON=python3.13t`)

No import may switch the GIL on again; the default tests of the native code pass without it, and calls of everything
from eight threads at once have the bits of one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from sanitizers import TESTS, copy_of_checkout

NEEDED = ["setuptools>=77", "cython>=3.3", "numpy>=2", "pytest", "hypothesis", "mpmath"]
IMPORTS = """
import sys, importlib
from pathlib import Path
import numpy
assert not sys._is_gil_enabled(), "numpy switches the GIL on"
import blockcell
for module in Path(blockcell.__file__).parent.glob("_*.so"):
    name = module.name.partition(".")[0]
    importlib.import_module(f"blockcell.{name}")
    assert not sys._is_gil_enabled(), f"{name} switches the GIL on"
print(f"Python {sys.version.split()[0]}, numpy {numpy.__version__}: no GIL after all imports")
"""
SOAKS = [(20_000, 1), (20_000, 2)]  # calls, seed


def run(*command: object, cwd: Path, **environment: str) -> str:
    """The last line of what it prints."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        sys.exit(f"{result.stdout[-20000:]}\nexit status {result.returncode}")
    return result.stdout.rstrip().rpartition("\n")[2].strip("= ")


def main() -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(f"{sys.executable} has a GIL: make test-freethreaded PYTHON=python3.13t")
    start = time.perf_counter()
    checkout = copy_of_checkout("freethreading")
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        python = Path(name, "bin", "python")
        run(python, "-m", "pip", "install", "--quiet", *NEEDED, cwd=checkout)
        run(python, "setup.py", "build_ext", "--inplace", cwd=checkout)
        tests, path = checkout / "tests", {"PYTHONPATH": str(checkout)}
        print(run(python, "-W", "error", "-c", IMPORTS, cwd=tests, **path), flush=True)
        without = path | {"PYTHON_GIL": "0"}
        files = [f"test_{name}.py" for name in (*TESTS, "formulas", "stateful")]
        options = ["-q", "-W", "error", "-p", "no:cacheprovider"]
        print(run(python, "-m", "pytest", *options, *files, cwd=tests, **without), flush=True)
        for calls, seed in SOAKS:
            run(python, "-W", "error", "test_soak.py", calls, seed, cwd=tests, **without)
            print(f"{calls} calls from 8 threads at once, seed {seed}: the bits of one thread", flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
